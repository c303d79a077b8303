//! The transport for all networks: reads over plain TCP connections.
//!
//! The reader requests ranges of one region, and the source answers each in order, so that the reader controls the
//! flow, as with RDMA. Control and data never share a connection; a data connection is called a *lane*. The start of a
//! lane is authenticated; the bytes after that are neither encrypted nor signed.
//!
//! ```text
//!   TcpExporter ── adopt / listen                         TcpConnector ── connect
//!     │  one thread per lane                                │  no thread at all
//!     ▼                                                     ▼
//!   handshake  ◀═══ hello, challenge, proof, welcome ═══▶  handshake
//!     ▼                                                     ▼
//!   serve      ◀═══ requests ═════════════════════════════ lane ┐ 1 to 4 of them
//!   (check each, send directly from the region)            lane ┤ receive directly into the sink
//!              ════ answers, bytes ═══════════════════════▶ lane ┘
//!                                                          peer   depth, order, time-outs
//! ```
//!
//! - `wire`: the bytes, and the body of a [`RegionKey`](crate::RegionKey) of this transport; pure. **Start here**, or
//!   with `fabric/README.md`.
//! - `source`: regions, grants, threads and their limits, and the source's data path. `background`: its rate limit, a
//!   fixed one, or that of a transfer which leaves the network link to others.
//! - `reader`: makes connections; lanes, and how reads are distributed over them.
//! - `socket`: options of a connection.
//!
//! The reader has no receiving thread: it would have to wake the thread that wants the bytes, which on two cores shared
//! with the source is a context switch per read. [`Peer::poll`](crate::Peer::poll) receives on the caller's thread
//! instead. What is not polled for waits in the kernel's buffer, which is the desired back-pressure.

mod background;
mod reader;
mod socket;
mod source;
mod wire;

#[cfg(test)]
mod tests;

use std::num::NonZeroU64;
use std::time::Duration;

use crate::Error;
pub use background::Upload;
pub use reader::{TcpConnector, TcpPeer};
pub use source::TcpExporter;
pub use wire::LANE_MAGIC;

#[cfg(any(test, feature = "fuzzing"))]
pub(crate) use wire::check_key;
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) use wire::{Tcp, check_messages};

/// Options of both ends. The ends need not agree: each uses the options that concern it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TcpOptions {
    /// Reader: connections per peer, 1 to [`MAX_LANES_PER_PEER`]. One saturates a loopback and most networks; more help
    /// where a single flow is limited (per-flow hashing, long paths with much bandwidth).
    pub lanes: u8,
    /// Reader: maximum number of outstanding reads per peer, 1 to [`MAX_DEPTH`].
    pub depth: usize,
    /// Both: congestion control by its kernel name, e.g. `cubic`; it matters at the source, which sends. `None` leaves
    /// the system's. If the system refuses it (not loaded, not in `tcp_allowed_congestion_control`), the lane uses the
    /// system's and a warning is logged once; `effective_congestion` of the peer and the exporter return the one in
    /// use.
    pub congestion: Option<String>,
    /// Source: how bytes are sent.
    pub send: SendMode,
    /// Source: how fast the bytes of large reads are sent, all lanes together.
    pub upload: UploadRate,
    /// Source: maximum number of lanes of all readers, 1 to [`MAX_SERVED_LANES`]. Each takes a thread, 96 KiB of buffer
    /// and some kernel memory. Further readers are told to retry later.
    pub served_lanes: usize,
    /// Reader: time limit to connect all lanes.
    pub connect_timeout: Duration,
    /// Both: time limit of the whole handshake of a lane, also for a connection that sends nothing, or byte by byte.
    pub handshake_timeout: Duration,
    /// Reader: with reads outstanding, time without a received byte after which they fail with `TimedOut`.
    pub stall_timeout: Duration,
    /// Source: time in which a reader must take [`SLOWEST_DRAIN_BYTES`] of what it requested; otherwise its lane is
    /// closed. A reader that does not read must not hold a thread and a region forever.
    pub drain_timeout: Duration,
}

impl Default for TcpOptions {
    fn default() -> Self {
        TcpOptions {
            lanes: 1,
            depth: 16,
            congestion: None,
            send: SendMode::Copy,
            upload: UploadRate::Unlimited,
            // 32 readers × 2 regions × 4 lanes, or 128 readers with one lane per region.
            served_lanes: 256,
            connect_timeout: Duration::from_secs(10),
            handshake_timeout: Duration::from_secs(5),
            stall_timeout: Duration::from_secs(10),
            drain_timeout: Duration::from_secs(10),
        }
    }
}

impl TcpOptions {
    /// Fails if a number is out of range.
    fn check(&self) -> Result<(), Error> {
        if !(1..=MAX_LANES_PER_PEER).contains(&self.lanes) {
            return Err(Error::Misuse("tcp lanes: choose 1 to 4"));
        }
        if !(1..=MAX_DEPTH).contains(&self.depth) {
            return Err(Error::Misuse("tcp depth: choose 1 to 256 outstanding reads"));
        }
        if !(1..=MAX_SERVED_LANES).contains(&self.served_lanes) {
            return Err(Error::Misuse("tcp served lanes: choose 1 to 16384"));
        }
        let times = [self.connect_timeout, self.handshake_timeout, self.stall_timeout, self.drain_timeout];
        if times.iter().any(|time| *time < SHORTEST_TIMEOUT || *time > LONGEST_TIMEOUT) {
            return Err(Error::Misuse("tcp time-outs: choose 10 ms to one day"));
        }
        Ok(())
    }
}

/// How the source sends the bytes of a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum SendMode {
    /// `send(2)` from the mapping: the kernel copies once, and the bytes are those of the moment of sending.
    #[default]
    Copy,
    /// `sendfile(2)`: the kernel takes the pages by reference, at a third of the processor time at the source. It reads
    /// them when they leave the host, or on a loopback when the reader receives them. As with RDMA, bytes may be newer
    /// than the answer that announces them, which the table above can handle.
    File,
}

/// How fast the source sends the bytes of large reads, all lanes together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum UploadRate {
    /// As fast as TCP does.
    #[default]
    Unlimited,
    /// Bytes per second. A rate slightly below that of the link keeps other traffic on it from queueing behind them.
    Fixed(NonZeroU64),
    /// As fast as leaves the queue of the link short for other traffic. Lanes within this host are not limited.
    Background,
}

/// Maximum of [`TcpOptions::served_lanes`]: more threads than any machine should have.
pub const MAX_SERVED_LANES: usize = 16_384;

/// Lanes per session that a source serves: 2 regions × 4 lanes, twice, because a reader may reconnect before its old
/// lanes are found closed.
pub const MAX_LANES_PER_SESSION: usize = 16;

/// Maximum number of lanes per peer: beyond four, the processor is the limit and not the flow.
pub const MAX_LANES_PER_PEER: u8 = 4;

/// Maximum number of outstanding reads per peer. 256 requests, each split over four lanes, are 32 KiB, which fit a send
/// buffer even if the source does not read.
pub const MAX_DEPTH: usize = 256;

/// Bytes that a reader must take within the drain time-out. With the default of 10 s: 6.5 kB/s.
pub const SLOWEST_DRAIN_BYTES: usize = 64 << 10;

/// A shorter time-out would expire without need on a busy machine.
const SHORTEST_TIMEOUT: Duration = Duration::from_millis(10);

/// Longest time-out, so that arithmetic on it does not overflow.
const LONGEST_TIMEOUT: Duration = Duration::from_secs(24 * 60 * 60);
