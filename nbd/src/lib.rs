//! A server of the NBD protocol: any block device, by a socket.
//!
//! ```text
//!   client ── options ──▶ Handshake (pure)                    answers
//!          ── requests ─▶ Request (pure) ── checked ──▶ Device ──╮
//!          ◀─ replies ─── Replies (pure) ◀── at once, or later ──╯
//! ```
//!
//! What is said, and no I/O:
//!
//! - [`protocol`]: the numbers of the protocol, and replies as bytes. [`Export`]: what is served under a name.
//! - [`handshake`]: negotiation, option by option. **Start here.**
//! - [`request`]: one request, and whether it may take place.
//!
//! What carries it:
//!
//! - [`device`]: what a block device must do, and how it answers: in the caller's thread, or later from any other; what
//!   waits to be sent; and a device in this process's memory.
//! - `stream`: a socket, with TLS or without, and its certificates.
//! - [`server`]: listens, and has a thread for each connection.
//!
//! A device that answers at once is served by one thread with one `recv` and one `send` for as many requests as have
//! arrived. One that answers later may have [`device::MOST_REQUESTS`] under way on each connection, answered in the
//! order in which they are completed.
//!
//! It does not know what stands behind a device, and it is not a client.

#![forbid(unsafe_code)]

pub mod device;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
pub mod handshake;
pub mod protocol;
pub mod request;
pub mod server;
mod stream;

use protocol::{MAX_PAYLOAD_BYTES, transmission_flags as flag};

pub use device::Device;
pub use server::{Address, Offer, Server, ServerOptions};
pub use stream::TlsConfig;

/// Something that clients can choose.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Export {
    /// The name that clients ask for. The first export of a server is the one without a name, too.
    pub name: String,
    /// A sentence for people; may be empty.
    pub description: String,
    /// What a client must know of the device.
    pub geometry: Geometry,
}

/// The size of a device, and what it can do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Bytes, a multiple of `minimum`.
    pub size: u64,
    /// The least block that clients are told: a power of two, 1 to 65536.
    pub minimum: u32,
    /// Offsets and lengths are multiples of this power of two, `minimum` at most. Less than that serves clients that
    /// did not ask for block sizes, or send smaller requests all the same, as `nbd-client` has the kernel do.
    pub accepted: u32,
    /// The request that suits the device: a power of two, 512 or `minimum` at least.
    pub preferred: u32,
    /// Nothing can be written.
    pub read_only: bool,
    /// Zeros are faster than a write of as many bytes.
    pub fast_zero: bool,
    /// The device knows what is a hole.
    pub has_status: bool,
}

impl Geometry {
    /// A device of `size` bytes that takes whole blocks only, and knows nothing about holes.
    pub fn of_blocks(size: u64, block: u32) -> Geometry {
        Geometry {
            size,
            minimum: block,
            accepted: block,
            preferred: block.max(4096),
            read_only: false,
            fast_zero: false,
            has_status: false,
        }
    }

    /// What is wrong with it, if anything is.
    pub fn misuse(&self) -> Option<&'static str> {
        let is_power = |value: u32| value.is_power_of_two();
        match self {
            _ if !is_power(self.minimum) || self.minimum > 65536 => {
                Some("the least block is a power of two up to 65536")
            }
            _ if !is_power(self.accepted) || self.accepted > self.minimum => {
                Some("the least block that is accepted is a power of two up to the least block")
            }
            _ if !is_power(self.preferred) || self.preferred < self.minimum.max(512) => {
                Some("the preferred block is a power of two, 512 and the least block at least")
            }
            _ if self.preferred > MAX_PAYLOAD_BYTES => Some("the preferred block is larger than a request"),
            _ if !self.size.is_multiple_of(u64::from(self.minimum)) => {
                Some("the size is not a multiple of the least block")
            }
            _ if self.size > i64::MAX as u64 => Some("the size is larger than a file offset"),
            _ => None,
        }
    }

    /// The transmission flags of the protocol.
    pub fn flags(&self, structured: bool) -> u16 {
        let common = flag::HAS_FLAGS | flag::SEND_FLUSH | flag::CAN_MULTI_CONN | flag::SEND_CACHE;
        let writes = flag::SEND_FUA | flag::SEND_TRIM | flag::SEND_WRITE_ZEROES | flag::SEND_FAST_ZERO;
        common | if self.read_only { flag::READ_ONLY } else { writes } | if structured { flag::SEND_DF } else { 0 }
    }
}
