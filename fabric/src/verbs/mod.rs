//! One-sided RDMA by libibverbs and librdmacm: InfiniBand, RoCE, iWARP.
//!
//! A reader's card reads the source's memory without the source's processor. The source's thread only admits readers
//! and closes their connections. No other end ever has the right to write to the source's memory. Before a reader has
//! proved its session, its queue pair has no rights, even with the right key.
//!
//! ```text
//!   VerbsExporter ── export: register with every device          VerbsConnector ── connect
//!     │  one thread: requests, proofs, closing                     │  no thread at all
//!     ▼                                                            ▼
//!   serve     ◀═══ hello, challenge, proof, welcome ═══════════▶ lane ┐ 1 to 8 queue pairs, on one port or several
//!                                                                lane ┤ READs are posted as far as its credits allow
//!   region    ◀─────────────── READ ────────────────────────────   ▼
//!   (the card answers)                                           peer   depth, order, time-outs, waiting
//! ```
//!
//! - `wire`: the handshake's bytes, the memory for them, and the body of a region key; pure. **Start here.**
//! - `source`: regions, grants, connections and devices, and the source's thread.
//! - `reader`: makes connections; lanes, and how reads are distributed over them.
//!
//! Queue pairs, completion queues, registrations and the connection manager are in `remora-rdma`.
//!
//! What is true in addition to what is true of every transport:
//!
//! - Only shared memory of our own (memfd) is registered, at both ends. When a process has registered private memory, a
//!   fork copies all of it immediately; shared memory is never copied. `ibv_fork_init`, which would take the memory
//!   away from the child, is not called (see `docs/explanation/rdma.md`).
//! - Grants are checked at the handshake only. There is one protection domain per exporter and device, so a card reads
//!   whatever registered memory a queue pair with rights names the key of. A session gets the key of its region in the
//!   welcome, and no other. One that has a grant for some region, and knows the key of another one, can read that too:
//!   from an earlier grant for the same memory (prepared memory keeps its key over generations), from a reader that
//!   passed it on, or by guessing 32 bits. Where tables are sealed it reads ciphertext, whose key comes with the offer.
//! - Each queue pair has credits: no more requests are posted than the send queue and the completion queue hold.
//! - Any error retires the peer, which destroys its queue pairs: after that no card writes to the sink.
//! - Exported memory must not be [released](crate::Memory::release): the card would keep the old pages.

mod reader;
mod source;
mod wire;

#[cfg(test)]
mod tests;

use std::time::Duration;

pub use remora_rdma::DISABLE;
use remora_rdma::cm::ConnectOptions;
pub use remora_rdma::report::{DeviceReport, PortReport, RdmaAddress, Report, addresses_of, devices, rdma_addresses};

use crate::Error;
pub use reader::{VerbsConnector, VerbsPeer};
pub use source::VerbsExporter;

#[cfg(any(test, feature = "fuzzing"))]
pub(crate) use wire::check_key;
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) use wire::{Verbs, check_refusal};

/// Options of both ends. The ends need not agree: each uses the options that concern it, and the lower number of READs
/// in flight applies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VerbsOptions {
    /// Reader: queue pairs per peer, 1 to [`MAX_QUEUE_PAIRS`]. One fills most links. Several fill a link that hashes by
    /// flow; with several addresses of the source, each uses another port.
    pub queue_pairs: u8,
    /// Reader: maximum number of outstanding reads per peer, 1 to [`MAX_DEPTH`].
    pub depth: usize,
    /// Reader: pieces of reads that may be posted per queue pair, 1 to [`MAX_QUEUE_DEPTH`]. Independent of `depth`: a
    /// large read has several pieces, and pieces without room wait in the lane's own queue.
    pub queue_depth: u32,
    /// Both: READs that a card has in flight per queue pair, 1 to [`MAX_READS_IN_FLIGHT`]. The cards' limits lower it.
    /// With 1, each piece costs a round trip, which is the most common mistake with RDMA.
    pub reads_in_flight: u8,
    /// Reader: size of the pieces that a longer read is split into, 4 KiB to 1 GiB, a multiple of 4096. Connections of
    /// one card alternate by pieces.
    pub piece_bytes: u32,
    /// Reader: how it waits for completions.
    pub completion: CompletionMode,
    /// Reader: for [`CompletionMode::PollThenArm`], how long it polls before it sleeps.
    pub poll_time: Duration,
    /// Both: IP type of service of RoCE packets, by which switches classify them; `None` leaves the system's.
    pub traffic_class: Option<u8>,
    /// Both: the InfiniBand service level, 0 to 15, which on RoCE is the Ethernet priority. `None` leaves what the
    /// subnet manager or the traffic class has assigned. iWARP has none.
    pub service_level: Option<u8>,
    /// Both: the card retransmits what is not acknowledged after 4.096 µs × 2^this (up to four times as long on some
    /// cards), 8 to 24.
    pub ack_timeout: u8,
    /// Both: number of retransmissions, 1 to 6, before the connection ends. Not 7: Soft-RoCE takes that for unlimited.
    pub retries: u8,
    /// Reader: time limit to connect one queue pair, including address and route resolution.
    pub connect_timeout: Duration,
    /// Both: time limit of the proof and its answer.
    pub handshake_timeout: Duration,
    /// Reader: with reads outstanding, time without a completion after which they fail with `TimedOut`.
    pub stall_timeout: Duration,
    /// Source: maximum number of connections, 1 to [`MAX_CONNECTIONS`].
    pub connections: usize,
    /// Source: whether it may listen on iWARP devices. There, unproved connections can read a region whose key they
    /// guess: such a device connects by itself, and takes no rights after that.
    pub iwarp: bool,
}

impl Default for VerbsOptions {
    fn default() -> Self {
        let connect = ConnectOptions::default();
        VerbsOptions {
            queue_pairs: 1,
            depth: 16,
            queue_depth: 64,
            reads_in_flight: MAX_READS_IN_FLIGHT,
            // 20 µs of a 100 Gb/s link: short enough to alternate, long enough that the cost of a request does not
            // matter.
            piece_bytes: 256 << 10,
            completion: CompletionMode::PollThenArm,
            // A read of 64 KiB takes 5 to 20 µs on a card. Sleeping and waking costs about as much.
            poll_time: Duration::from_micros(20),
            traffic_class: None,
            service_level: None,
            ack_timeout: connect.ack_timeout,
            retries: connect.retries,
            // Connection managers repeat a lost request after some 4 s: time for two.
            connect_timeout: Duration::from_secs(10),
            handshake_timeout: Duration::from_secs(5),
            stall_timeout: Duration::from_secs(10),
            connections: 256,
            iwarp: false,
        }
    }
}

impl VerbsOptions {
    /// The options that the connection manager takes.
    fn connecting(&self) -> ConnectOptions {
        ConnectOptions { ack_timeout: self.ack_timeout, retries: self.retries, service_level: self.service_level }
    }

    /// Fails if a number is out of range.
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
    /// Polls continuously: lowest latency, and a busy processor.
    Polling,
    /// Sleeps until the card interrupts: least processor time.
    Event,
    /// Polls for a short time, then sleeps: a completion that comes soon costs no wake-up.
    #[default]
    PollThenArm,
}

/// Maximum number of queue pairs per peer.
pub const MAX_QUEUE_PAIRS: u8 = 8;

/// Maximum number of outstanding reads per peer, as for the other transports.
pub const MAX_DEPTH: usize = 256;

/// Maximum number of posted pieces per queue pair; every card's send queue is longer.
pub const MAX_QUEUE_DEPTH: u32 = 1024;

/// Maximum number of READs in flight per queue pair. Cards offer 16, which some share among all queue pairs. With
/// pieces of 256 KiB that is 4 MiB in flight.
pub const MAX_READS_IN_FLIGHT: u8 = 16;

/// Maximum number of segments of one READ: reads of neighbouring bytes are one request. Cards format a request in units
/// of 64 bytes, and more segments would make all requests of a queue longer. Some devices allow fewer, iWARP often 1.
pub const MAX_SCATTER: u32 = 4;

/// Maximum number of connections of one source. Each takes a queue pair and a page.
pub const MAX_CONNECTIONS: usize = 4096;

/// A shorter time-out would expire without need on a busy machine.
const SHORTEST_TIMEOUT: Duration = Duration::from_millis(10);

/// Longest time-out, so that arithmetic on it does not overflow.
const LONGEST_TIMEOUT: Duration = Duration::from_secs(24 * 60 * 60);

/// Longest poll time. For longer polling use [`CompletionMode::Polling`].
const LONGEST_POLL: Duration = Duration::from_secs(1);
