//! The transport within one host: the source passes the memory itself to the reader, and a read is a copy by the
//! reader. No bytes of a region are sent over a socket.
//!
//! ```text
//!   ShmExporter                                            ShmConnector
//!     │  one thread for all connections                      │  no thread
//!     ▼                                                      ▼
//!   serve   ◀═══ hello, challenge, proof ═══════════════▶  connector
//!     │      ═══ welcome + memfd (SCM_RIGHTS) ══════════▶    │ maps it, read-only
//!     │                                                      ▼
//!     │      (no traffic while the grant holds)            peer    post: queue.  poll: copy region → sink
//!     └───── farewell, or the end of the connection ════▶          view: or read in place, no copy at all
//! ```
//!
//! - `wire`: the five messages, and the body of a [`RegionKey`](crate::RegionKey) of this transport; pure. **Start
//!   here.**
//! - `source`: regions, grants and connections, and the thread that admits readers.
//! - `reader`: makes connections, and copies.
//!
//! **Who can connect:** see [`Place`]. A connection without a proof uses none of the places of readers, and nothing
//! that a peer sends can block a thread: descriptors that it attaches are refused by the system, or closed on a thread
//! of their own, as are its connections.
//!
//! After the welcome the connection carries nothing until it ends. The source ends it when the region is revoked, the
//! grant is withdrawn or the source exits; the reader notices at its next [`Peer::poll`](crate::Peer::poll).
//!
//! **What revoking cannot do here:** a mapping cannot be removed from another process. A reader that does not poll its
//! [`Peer`](crate::Peer) still sees the memory, and zeros after [`Memory::release`](crate::Memory::release). It can see
//! nothing else, as each generation has its own memory.

mod reader;
mod source;
mod wire;

#[cfg(test)]
mod tests;

use std::time::Duration;

use crate::error::Error;
pub use crate::memory::Place;
pub use reader::{ShmConnector, ShmPeer};
pub use source::ShmExporter;

#[cfg(any(test, feature = "fuzzing"))]
pub(crate) use wire::check_key;
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) use wire::{Shm, check_farewell};

/// Options of the source.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShmOptions {
    /// Where the socket is bound.
    pub place: Place,
    /// Maximum number of connections that have proved their session, 1 to [`MAX_CONNECTIONS`]; further ones are refused
    /// as `Busy`.
    pub connections: usize,
    /// Time limit of a reader's whole handshake; the connection is then closed.
    pub handshake_timeout: Duration,
}

impl Default for ShmOptions {
    fn default() -> Self {
        ShmOptions { place: Place::default(), connections: 256, handshake_timeout: Duration::from_secs(5) }
    }
}

impl ShmOptions {
    /// Fails if a number is out of range.
    fn check(&self) -> Result<(), Error> {
        if !(1..=MAX_CONNECTIONS).contains(&self.connections) {
            return Err(Error::Misuse("shm connections: choose 1 to 4096"));
        }
        if !(SHORTEST_TIMEOUT..=LONGEST_TIMEOUT).contains(&self.handshake_timeout) {
            return Err(Error::Misuse("shm time-out of the handshake: choose 10 ms to one hour"));
        }
        Ok(())
    }
}

/// Maximum of [`ShmOptions::connections`]: each connection takes a descriptor, of which a process often has 1024 or
/// 4096.
pub const MAX_CONNECTIONS: usize = 4096;

/// A shorter time-out would expire without need on a busy machine.
const SHORTEST_TIMEOUT: Duration = Duration::from_millis(10);

/// Longest time-out.
const LONGEST_TIMEOUT: Duration = Duration::from_secs(60 * 60);
