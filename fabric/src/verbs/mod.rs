//! One-sided RDMA by libibverbs and librdmacm: InfiniBand, RoCE, iWARP.
//!
//! A reader's card fetches bytes out of the source's memory, and no processor of the source takes part. What the source's thread does
//! is let readers in and show them out. Nobody ever has the right to write into the source's memory, and before a reader has proved
//! its session its queue pair has no rights at all, whatever keys it guesses.
//!
//! ```text
//!   VerbsExporter ── export: register with every device          VerbsConnector ── connect
//!     │  one thread: requests, proofs, farewells                   │  no thread at all
//!     ▼                                                            ▼
//!   serve     ◀═══ Hello, Challenge, proof, Welcome ═══════════▶ lane ┐ 1 to 8 queue pairs, on one port or several
//!                                                                lane ┤ READs go out as far as its credits reach
//!   region    ◀─────────────── READ ────────────────────────────   ▼
//!   (the card answers)                                           peer   depth, order, time-outs, waiting
//! ```
//!
//! - `wire`: the handshake's bytes, pure. `handshake`: what is signed. **Start here.**
//! - `exporter`: who may read what; `serve`: the source's thread.
//! - `connector`: how a peer comes to be; `lane` and `peer`: the reader's data path.
//!
//! Queue pairs, completion queues, registrations and the connection manager are `remora-rdma`'s.
//!
//! What is true of it, besides what is true of every transport:
//!
//! - Only shared memory of our own (memfd) is registered, on both ends: a fork of a process that has registered private memory
//!   copies all of it at once, shared memory is never copied. Nothing here calls `ibv_fork_init`, which would take the memory away
//!   from the child (see `docs/rdma.md`).
//! - One protection domain per exporter and device: everybody who proves a session holds the same token and is trusted alike.
//! - Queue pairs have their own credits: as many requests are posted as the send queue and the completion queue hold, and no more.
//! - Any error retires the peer, and retiring destroys its queue pairs: after that no card writes into the sink.
//! - Memory that is exported must not be [released](crate::Memory::release): the card would keep to the old pages.

mod connector;
mod exporter;
mod handshake;
mod key;
mod lane;
mod peer;
mod serve;
mod server;
mod wire;

#[cfg(test)]
mod tests;

use std::time::Duration;

pub use connector::VerbsConnector;
pub use exporter::VerbsExporter;
pub use peer::VerbsPeer;
use remora_rdma::cm::ConnectOptions;
pub use remora_rdma::{
    DISABLE,
    ports::{RdmaAddress, addresses_of, rdma_addresses},
    report::{DeviceReport, PortReport, Report, devices},
};

use crate::Error;

/// What both ends may choose. The ends need not agree: each uses what concerns it, and of the READs in flight they take the less.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VerbsOptions {
    /// Reader: queue pairs per peer, 1 to [`MAX_QUEUE_PAIRS`]. One fills most links; several fill one that hashes by flow, and with
    /// several addresses of the source each goes over another port.
    pub queue_pairs: u8,
    /// Reader: reads that may be outstanding per peer, 1 to [`MAX_DEPTH`].
    pub depth: usize,
    /// Reader: pieces of reads that may be posted per queue pair, 1 to [`MAX_QUEUE_DEPTH`]. Not tied to `depth`: a large read is
    /// several pieces, and what finds no room waits in our own queue.
    pub queue_depth: u32,
    /// Both: READs that a card has in flight per queue pair, 1 to [`MAX_READS_IN_FLIGHT`]. The cards' own limits lower it. One alone
    /// costs a round trip per piece, which is the commonest mistake made with RDMA.
    pub reads_in_flight: u8,
    /// Reader: a longer read is cut into pieces of so many bytes, 4 KiB to 1 GiB, a multiple of 4096. Several connections of one card
    /// take turns by pieces.
    pub piece_bytes: u32,
    /// Reader: how it waits.
    pub completion: CompletionMode,
    /// Reader: for [`CompletionMode::PollThenArm`], how long it polls before it sleeps.
    pub poll_time: Duration,
    /// Both: IP type of service of RoCE packets, from which switches tell classes; `None` leaves the system's.
    pub traffic_class: Option<u8>,
    /// Both: the InfiniBand service level, 0 to 15, which on RoCE is the Ethernet priority; `None` leaves what the subnet manager or the
    /// traffic class has assigned. iWARP has none.
    pub service_level: Option<u8>,
    /// Both: the card repeats what is not acknowledged after 4.096 µs × 2^this (up to four times as long on some cards), 8 to 24.
    pub ack_timeout: u8,
    /// Both: ... so many times, 1 to 6, before the connection is over. Not 7: Soft-RoCE takes that for "for ever".
    pub retries: u8,
    /// Reader: time to connect one queue pair, addresses and route included.
    pub connect_timeout: Duration,
    /// Both: time for the proof and its answer.
    pub handshake_timeout: Duration,
    /// Reader: with reads outstanding, time without a single one completed after which they fail with `TimedOut`.
    pub stall_timeout: Duration,
    /// Source: connections there may be at once, 1 to [`MAX_CONNECTIONS`].
    pub connections: usize,
}

impl Default for VerbsOptions {
    fn default() -> Self {
        let connect = ConnectOptions::default();
        VerbsOptions {
            queue_pairs: 1,
            depth: 16,
            queue_depth: 64,
            reads_in_flight: MAX_READS_IN_FLIGHT,
            // At 100 Gb/s 20 µs of a link: little enough to take turns, enough that a request costs nothing beside it.
            piece_bytes: 256 << 10,
            completion: CompletionMode::PollThenArm,
            // A read of 64 KiB takes 5 to 20 µs on a card; sleeping and waking costs about as much.
            poll_time: Duration::from_micros(20),
            traffic_class: None,
            service_level: None,
            ack_timeout: connect.ack_timeout,
            retries: connect.retries,
            // A connection manager repeats a lost request after some 4 s: time for two.
            connect_timeout: Duration::from_secs(10),
            handshake_timeout: Duration::from_secs(5),
            stall_timeout: Duration::from_secs(10),
            connections: 256,
        }
    }
}

impl VerbsOptions {
    /// The part that the connection manager takes.
    fn connecting(&self) -> ConnectOptions {
        ConnectOptions { ack_timeout: self.ack_timeout, retries: self.retries, service_level: self.service_level }
    }

    /// Fails where a number is outside its range.
    fn check(&self) -> Result<(), Error> {
        let fits = |fits: bool, sentence: &'static str| if fits { Ok(()) } else { Err(Error::Misuse(sentence)) };
        fits((1..=MAX_QUEUE_PAIRS).contains(&self.queue_pairs), "queue pairs: choose 1 to 8")?;
        fits((1..=MAX_DEPTH).contains(&self.depth), "verbs depth: choose 1 to 256 outstanding reads")?;
        fits((1..=MAX_QUEUE_DEPTH).contains(&self.queue_depth), "queue depth: choose 1 to 1024 pieces")?;
        fits((1..=MAX_READS_IN_FLIGHT).contains(&self.reads_in_flight), "READs in flight: choose 1 to 16")?;
        let piece = self.piece_bytes;
        fits(
            (4096..=1 << 30).contains(&piece) && piece.is_multiple_of(4096),
            "pieces: choose 4 KiB to 1 GiB in whole pages",
        )?;
        fits(self.service_level.is_none_or(|level| level <= 15), "service level: choose 0 to 15")?;
        fits((8..=24).contains(&self.ack_timeout), "acknowledgement time-out: choose 8 to 24")?;
        fits((1..=6).contains(&self.retries), "retries: choose 1 to 6")?;
        fits((1..=MAX_CONNECTIONS).contains(&self.connections), "connections: choose 1 to 4096")?;
        let times = [self.connect_timeout, self.handshake_timeout, self.stall_timeout];
        let fit = times.iter().all(|time| (SHORTEST_TIMEOUT..=LONGEST_TIMEOUT).contains(time));
        fits(fit, "verbs time-outs: choose 10 ms to one day")?;
        fits(self.poll_time <= LONGEST_POLL, "poll time: choose at most 1 s")
    }
}

/// How a reader waits for its card.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum CompletionMode {
    /// Asks again and again: the least latency, and a processor kept busy.
    Polling,
    /// Sleeps until the card interrupts: the least work.
    Event,
    /// Asks for a short while, then sleeps: what comes at once is had at once.
    #[default]
    PollThenArm,
}

/// The most queue pairs of one peer.
pub const MAX_QUEUE_PAIRS: u8 = 8;

/// The most reads outstanding per peer, as for the other transports.
pub const MAX_DEPTH: usize = 256;

/// The most pieces posted per queue pair; every card's send queue is longer.
pub const MAX_QUEUE_DEPTH: u32 = 1024;

/// The most READs in flight per queue pair. Cards offer 16 (some share them among all queue pairs), and with pieces of 256 KiB 16 keep
/// 4 MiB on their way.
pub const MAX_READS_IN_FLIGHT: u8 = 16;

/// The most places that one READ is scattered over: reads of neighbouring bytes go out as one request. Cards lay a request out in units
/// of 64 bytes, and more places would make all requests of a queue longer. Devices' own limit lowers it, on iWARP often to 1.
pub const MAX_SCATTER: u32 = 4;

/// The most connections of one source: each is a queue pair and a page.
pub const MAX_CONNECTIONS: usize = 4096;

/// Below this a time-out would strike on a busy machine without need.
const SHORTEST_TIMEOUT: Duration = Duration::from_millis(10);

/// Above this a time-out is none, and arithmetic on it might overflow.
const LONGEST_TIMEOUT: Duration = Duration::from_secs(24 * 60 * 60);

/// Whoever wants to poll for longer wants [`CompletionMode::Polling`].
const LONGEST_POLL: Duration = Duration::from_secs(1);
