//! The envelope of a snapshot, and where the records in it begin and end. Values are never decoded.
//!
//! ```text
//!   ┌───────────┬───────────────────────────┬──────────────────────────────────────┬────┬──────────────┐
//!   │ REDIS0011 │ FA name value  FA name …  │ functions, module fields, databases, │ FF │ CRC-64, low  │
//!   │ VALKEY080 │ redis-ver repl-id ctime … │ keys …                               │    │ byte first   │
//!   └───────────┴───────────────────────────┴──────────────────────────────────────┴────┴──────────────┘
//!    9 bytes      Head::parse ends here ──▶  passed on unseen                        Tail::parse, 9 bytes
//! ```
//!
//! - [`Head`]: who wrote the snapshot, and to which history and offset it belongs.
//! - [`Tail`]: whether it is whole.
//! - [`Scanner`]: walks over the records and points at the long strings among them.
//! - [`mod@reference`]: how such a string is told to a server without its bytes.
//! - [`crc64`]: the checksum the servers use.
//! - [`Writer`]: small snapshots of our own: an empty data set, or a few strings for tests.

mod crc64;
mod grammar;
mod head;
mod input;
mod lzf;
pub mod reference;
mod scan;
mod writer;

pub use crc64::crc64;
pub use head::{Head, Magic};
pub use scan::{Found, ScanError, Scanner, Text, Usage};
pub use writer::{Writer, magic, put_length};

/// Slot and number of the keys that follow: a hint for cluster mode.
pub const OPCODE_SLOT_INFO: u8 = 0xF4;
/// The source of a library of functions follows.
pub const OPCODE_FUNCTION: u8 = 0xF5;
/// Module data outside the keyspace follows.
pub const OPCODE_MODULE_AUX: u8 = 0xF7;
/// The seconds for which the next key has not been used follow.
pub const OPCODE_IDLE: u8 = 0xF8;
/// A logarithmic count of the next key's uses follows.
pub const OPCODE_FREQ: u8 = 0xF9;
/// An auxiliary field follows: a name and a value.
pub const OPCODE_AUX: u8 = 0xFA;
/// Size hints for the database's tables follow.
pub const OPCODE_RESIZEDB: u8 = 0xFB;
/// The next key's expiry, in milliseconds since 1970, follows.
pub const OPCODE_EXPIRETIME_MS: u8 = 0xFC;
/// The next key's expiry, in seconds since 1970, follows. Written before Redis 2.6 only.
pub const OPCODE_EXPIRETIME: u8 = 0xFD;
/// The number of the database that the next keys belong to follows.
pub const OPCODE_SELECTDB: u8 = 0xFE;
/// The end; the checksum follows.
pub const OPCODE_EOF: u8 = 0xFF;

/// How many bytes follow the last key: [`OPCODE_EOF`] and the checksum.
pub const TAIL_BYTES: usize = 9;

/// The first RDB version that Valkey writes under its own magic. Redis counts on from 12 below it.
const FIRST_VALKEY_VERSION: u32 = 80;

/// The end of a snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tail {
    /// CRC-64 of everything before it; 0 when the server was told not to compute one (`rdbchecksum no`, or over TLS).
    pub checksum: u64,
}

impl Tail {
    /// Reads the last nine bytes.
    pub fn parse(bytes: [u8; TAIL_BYTES]) -> Result<Tail, Error> {
        let [OPCODE_EOF, checksum @ ..] = bytes else {
            return Err(Error::NoEnd { found: bytes[0] });
        };
        Ok(Tail { checksum: u64::from_le_bytes(checksum) })
    }
}

/// What was taken for a snapshot is none, or is damaged.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// It does not begin like one.
    #[error("this is no snapshot: it begins with {found:?}, not with REDIS or VALKEY and a version")]
    NotRdb {
        /// Its beginning.
        found: String,
    },
    /// Something longer than any server writes there.
    #[error("the snapshot is damaged: {what} of {size}, the limit is {limit}")]
    TooLong {
        /// Which part.
        what: &'static str,
        /// Its size in bytes (or fields).
        size: u64,
        /// What is allowed.
        limit: u64,
    },
    /// A field that cannot be read.
    #[error("the snapshot is damaged: {what}")]
    Malformed {
        /// Which part, and how.
        what: &'static str,
    },
    /// It does not end like one.
    #[error("the snapshot is cut off or damaged: its end mark reads {found:#04x}, not 0xff")]
    NoEnd {
        /// The byte where the end mark should be.
        found: u8,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tail_holds_the_checksum_low_byte_first() {
        assert_eq!(Tail::parse([0xFF, 1, 0, 0, 0, 0, 0, 0, 2]), Ok(Tail { checksum: 0x0200_0000_0000_0001 }));
        assert_eq!(Tail::parse([0xFE; TAIL_BYTES]), Err(Error::NoEnd { found: 0xFE }));
    }
}
