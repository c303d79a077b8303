//! The transport that works everywhere: reads over plain TCP connections.
//!
//! Not a stream of anybody's choosing: the reader asks for ranges of one region and the source answers each in turn, so that
//! it is the reader who sets the pace, as with RDMA. Control and data never share a connection; a data connection is called
//! a *lane*. The bytes are authenticated at the beginning of a lane and neither encrypted nor signed after it.
//!
//! ```text
//!   TcpExporter ── adopt / listen                         TcpConnector ── connect
//!     │  one thread per lane                                │  no thread at all
//!     ▼                                                     ▼
//!   handshake  ◀═══ hello, challenge, proof, welcome ═══▶  handshake
//!     ▼                                                     ▼
//!   serve      ◀═══ requests ═════════════════════════════ lane ┐ 1 to 4 of them
//!   (judge each, send straight out of the region)          lane ┤ receive straight into the sink
//!              ════ answers, bytes ═══════════════════════▶ lane ┘
//!                                                          peer   depth, order, time-outs
//! ```
//!
//! - `wire`: the bytes, pure. **Start here**, or with `docs/fabric-tcp.md`.
//! - `handshake`: both ends' first four messages, with deadlines.
//! - `exporter`: who may read what; the threads and their limits. `serve`: the source's data path.
//! - `connector`: how a peer comes to be. `peer` and `lane`: the reader's data path.
//! - `socket`: options of a connection; `key`: what a [`RegionKey`](crate::RegionKey) of this transport contains.
//!
//! Why the reader has no receiving thread: the bytes would be in the sink when the thread that wants them has not yet been
//! woken, and on two cores shared with the other end each such hand-over is a switch. [`Peer::poll`](crate::Peer::poll)
//! receives on the caller's thread instead, and what is not polled for waits in the kernel's buffer, which is the
//! back-pressure one wants.

mod connector;
mod exporter;
mod handshake;
mod key;
mod lane;
mod pacer;
mod peer;
mod serve;
mod socket;
mod wire;

#[cfg(test)]
mod tests;

use std::{num::NonZeroU64, time::Duration};

pub use connector::TcpConnector;
pub use exporter::TcpExporter;
pub use peer::TcpPeer;
pub use wire::LANE_MAGIC;

use crate::Error;

/// What both ends may choose. The ends need not agree: each uses what concerns it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TcpOptions {
    /// Reader: connections per peer, 1 to [`MAX_LANES_PER_PEER`]. One saturates a loopback and most networks; more help
    /// where a single flow is limited (per-flow hashing, long fat pipes).
    pub lanes: u8,
    /// Reader: reads that may be outstanding per peer, 1 to [`MAX_DEPTH`].
    pub depth: usize,
    /// Both: congestion control by its kernel name, e.g. `cubic`; it matters at the source, which sends. `None` leaves the
    /// system's. Where the system refuses (not loaded, not in `tcp_allowed_congestion_control`) the lane goes on with the
    /// system's own and a warning is logged once; `effective_congestion` of the peer and the exporter tells which it is.
    pub congestion: Option<String>,
    /// Source: how bytes leave.
    pub send: SendMode,
    /// Source: bytes per second that large reads take, all lanes together; `None`: as much as they can. A little below what the cable
    /// carries, and others on it do not wait behind them.
    pub upload_rate: Option<NonZeroU64>,
    /// Reader: time to connect, all addresses and lanes together.
    pub connect_timeout: Duration,
    /// Both: time for the whole handshake of a lane, so that a connection that says nothing, or says it byte by byte,
    /// is cut.
    pub handshake_timeout: Duration,
    /// Reader: with reads outstanding, time without a single byte received after which they fail with `TimedOut`.
    pub stall_timeout: Duration,
    /// Source: time for a reader to take [`SLOWEST_DRAIN_BYTES`] of what it asked for, after which its lane is cut: a
    /// reader that doesn't read may not hold a thread and a region for ever.
    pub drain_timeout: Duration,
}

impl Default for TcpOptions {
    fn default() -> Self {
        TcpOptions {
            lanes: 1,
            depth: 16,
            congestion: None,
            send: SendMode::Copy,
            upload_rate: None,
            connect_timeout: Duration::from_secs(10),
            handshake_timeout: Duration::from_secs(5),
            stall_timeout: Duration::from_secs(10),
            drain_timeout: Duration::from_secs(10),
        }
    }
}

impl TcpOptions {
    /// Fails where a number is outside its range.
    fn check(&self) -> Result<(), Error> {
        if !(1..=MAX_LANES_PER_PEER).contains(&self.lanes) {
            return Err(Error::Misuse("tcp lanes: choose 1 to 4"));
        }
        if !(1..=MAX_DEPTH).contains(&self.depth) {
            return Err(Error::Misuse("tcp depth: choose 1 to 256 outstanding reads"));
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
    /// `send(2)` straight out of the mapping: the kernel copies once, and the bytes are those of the moment of sending.
    #[default]
    Copy,
    /// `sendfile(2)`: the kernel takes the pages by reference, at a third of the processor time at the source, and reads them
    /// when they leave the host, or on a loopback when the reader gets to them. As with RDMA, bytes may thus be newer than
    /// the answer that carries them; the table above copes with either.
    File,
}

/// The most lanes of one peer: beyond four, the processor is the limit and not the flow.
pub const MAX_LANES_PER_PEER: u8 = 4;

/// The most reads outstanding per peer. 256 requests, each cut over four lanes, are 32 KiB: they fit a send buffer even when
/// the source has not begun to read them.
pub const MAX_DEPTH: usize = 256;

/// What a reader has to take within the drain time-out to be called slow and not dead. At the default of 10 s: 6.5 kB/s.
pub const SLOWEST_DRAIN_BYTES: usize = 64 << 10;

/// Below this a time-out would strike on a busy machine without need.
const SHORTEST_TIMEOUT: Duration = Duration::from_millis(10);

/// Above this a time-out is none, and arithmetic on it might overflow.
const LONGEST_TIMEOUT: Duration = Duration::from_secs(24 * 60 * 60);
