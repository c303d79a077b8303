//! The envelope of a snapshot, and the boundaries of the records in it. Values are decoded only to be given to a server
//! that does not know their type.
//!
//! ```text
//!   ┌───────────┬───────────────────────────┬──────────────────────────────────────┬────┬──────────────┐
//!   │ REDIS0011 │ FA name value  FA name …  │ functions, module fields, databases, │ FF │ CRC-64, low  │
//!   │ VALKEY080 │ redis-ver repl-id ctime … │ keys …                               │    │ byte first   │
//!   └───────────┴───────────────────────────┴──────────────────────────────────────┴────┴──────────────┘
//!    9 bytes      Head::parse ends here ──▶  passed on unseen                        Tail::parse, 9 bytes
//! ```
//!
//! - [`Head`]: the server that wrote the snapshot, and the history and offset it belongs to.
//! - [`Tail`]: whether the snapshot is complete.
//! - [`Scanner`]: walks over the records and points at the long strings among them.
//! - [`Records`]: small values that follow each other, read in place. [`Collection`]: one of them that is not a string.
//! - [`mod@reference`]: how a server is given such a string without its bytes.
//! - [`Converter`]: rewrites a snapshot for a server of another family or an older version.
//! - [`crc64`]: the checksum that the servers use.
//! - [`Writer`]: small snapshots of our own: an empty data set, or a few strings for tests.

mod convert;
mod grammar;
mod head;
mod input;
mod packed;
mod records;
pub mod reference;
mod scan;
mod writer;

pub use convert::{ConvertError, Converted, Converter, Format, Obstacle, Obstacles, Options, SAMPLE_KEYS};
pub use head::{Head, Magic};
pub use records::{
    COLLECTION_TYPES, Collection, CollectionError, Content, RECORD_HEAD_BYTES_MAX, RECORD_KEY_BYTES_MAX, Record,
    Records, Usage, Value,
};
pub use scan::{Found, Run, ScanError, Scanner, Text};
pub use writer::{Writer, crc64, magic, put_length};

/// Slot and number of keys that follow: a hint for cluster mode.
pub const OPCODE_SLOT_INFO: u8 = 0xF4;
/// The source code of a function library follows.
pub const OPCODE_FUNCTION: u8 = 0xF5;
/// Module data outside the keyspace follows.
pub const OPCODE_MODULE_AUX: u8 = 0xF7;
/// The idle time of the next key in seconds follows.
pub const OPCODE_IDLE: u8 = 0xF8;
/// A logarithmic counter of the next key's uses follows.
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

/// The first RDB version that Valkey writes with its own magic. Redis numbers its versions from 12 on below it.
const FIRST_VALKEY_VERSION: u32 = 80;

/// The end of a snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tail {
    /// CRC-64 of everything before it; 0 if the server is configured not to compute it (`rdbchecksum no`, or over TLS).
    pub checksum: u64,
}

impl Tail {
    /// Parses the last nine bytes.
    pub fn parse(bytes: [u8; TAIL_BYTES]) -> Result<Tail, Error> {
        let [OPCODE_EOF, checksum @ ..] = bytes else {
            return Err(Error::NoEnd { found: bytes[0] });
        };
        Ok(Tail { checksum: u64::from_le_bytes(checksum) })
    }
}

/// The bytes are not a snapshot, or the snapshot is damaged.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The first bytes are not those of a snapshot.
    #[error("not a snapshot: it begins with {found:?} instead of REDIS or VALKEY and a version")]
    NotRdb {
        /// The first bytes.
        found: String,
    },
    /// Something is longer than any server writes it.
    #[error("the snapshot is damaged: {what} of {size}, the limit is {limit}")]
    TooLong {
        /// Which part.
        what: &'static str,
        /// Its size in bytes (or fields).
        size: u64,
        /// The limit.
        limit: u64,
    },
    /// A field can't be read.
    #[error("the snapshot is damaged: {what}")]
    Malformed {
        /// Which part, and what is wrong with it.
        what: &'static str,
    },
    /// The end mark is missing.
    #[error("the snapshot is cut off or damaged: its end mark reads {found:#04x}, not 0xff")]
    NoEnd {
        /// The byte found in place of the end mark.
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
