//! The transport of one host: the memory itself is handed over, and a read is a copy by the reader. No byte crosses a socket.
//!
//! ```text
//!   ShmExporter                                            ShmConnector
//!     │  one thread for all connections                      │  no thread
//!     ▼                                                      ▼
//!   serve   ◀═══ hello, challenge, proof ═══════════════▶  connector
//!     │      ═══ welcome + memfd (SCM_RIGHTS) ══════════▶    │ maps it, read-only
//!     │                                                      ▼
//!     │      (silence while all is well)                   peer    post: queue.  poll: copy region → sink
//!     └───── farewell, or the end of the connection ════▶          view: or read in place, no copy at all
//! ```
//!
//! - `wire`: the five messages, pure. **Start here.**
//! - `exporter`: who may read what. `serve`: the thread that answers the door, and its limits.
//! - `connector`: how a peer comes to be. `peer`: the reader's data path.
//! - `socket`: the local socket and descriptors in messages; `key`: what a [`RegionKey`](crate::RegionKey) contains here.
//!
//! After the welcome the connection carries nothing; it is there to end. The source ends it when the region is revoked, the grant
//! withdrawn, or the source gone, and the reader sees that in its next [`Peer::poll`](crate::Peer::poll).
//!
//! **What revoking can't do here:** a mapping can't be taken out of another process. A reader that does not ask [`Peer`](crate::Peer)
//! goes on seeing the memory, and what [`Memory::release`](crate::Memory::release) made of it: zeros. It can see nothing else, as
//! each generation is a memory of its own.

mod connector;
mod exporter;
mod key;
mod peer;
mod serve;
mod server;
mod wire;

#[cfg(test)]
mod tests;

use std::time::Duration;

pub use connector::ShmConnector;
pub use exporter::ShmExporter;
pub use peer::ShmPeer;

pub use crate::memory::Place;

use crate::error::Error;

/// What the source may choose.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShmOptions {
    /// Where readers find us.
    pub place: Place,
    /// Connections held at once, 1 to [`MAX_CONNECTIONS`]; one more is told `Busy`.
    pub connections: usize,
    /// Time for a reader's whole handshake, after which it is cut.
    pub handshake_timeout: Duration,
}

impl Default for ShmOptions {
    fn default() -> Self {
        ShmOptions { place: Place::Abstract, connections: 256, handshake_timeout: Duration::from_secs(5) }
    }
}

impl ShmOptions {
    /// Fails where a number is outside its range.
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

/// The most connections an exporter can be told to hold: each costs a descriptor, of which a process often has 1024 or 4096.
pub const MAX_CONNECTIONS: usize = 4096;

/// Below this a time-out would strike on a busy machine without need.
const SHORTEST_TIMEOUT: Duration = Duration::from_millis(10);

/// Above this a time-out is none.
const LONGEST_TIMEOUT: Duration = Duration::from_secs(60 * 60);
