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
//! - Here: the handshake's bytes, the memory for them, and the body of a region key; pure. **Start here.**
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
//!
//! The first two messages of the handshake are the connection manager's private data, of which the reader's end has 56
//! bytes, and which arrives padded with zeros. They therefore start with magic, version and length. The other two are
//! sent over the connection.
//!
//! ```text
//!   reader                                    source
//!     │ ── hello      56, in REQ ─────────────▶ │   session, region, a nonce
//!     │ ◀── challenge 40, in REP ────────────── │   the other nonce      (or a refusal, 12, in REJ)
//!     │ ── proof      32, SEND ───────────────▶ │   HMAC of both
//!     │ ◀── welcome   64, SEND ──────────────── │   key, base and length of the region, the source's own HMAC; or a denial
//!     │ ══ READ ══════════════════════════════▶ │   (no processor of the source takes part)
//! ```
//!
//! All integers are little-endian.

mod reader;
mod source;
#[cfg(test)]
mod tests;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use remora_rdma::cm::ConnectOptions;
use remora_rdma::objects::{Access, Domain, Registration};

use crate::address::{self, ADDRESS_BYTES};
use crate::admission::{Format, Hello, NONCE_BYTES, PROOF_BYTES, Refusal};
use crate::{Denial, Error, KeyError, Memory, Pages, RegionId, RegionKey, TransportKind};

pub use remora_rdma::DISABLE;
pub use remora_rdma::report::{DeviceReport, PortReport, RdmaAddress, Report, addresses_of, devices, rdma_addresses};

pub use reader::{VerbsConnector, VerbsPeer};
pub use source::VerbsExporter;

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

/// What a reader learns of a region: what a READ names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Grant {
    /// The key to name in a READ.
    key: u32,
    /// The address of the region's first byte, as a READ names it.
    base: u64,
    /// Bytes of the region.
    length: u64,
}

/// The handshake of this transport.
pub(crate) struct Verbs;

/// For the fuzz target: a refusal that is valid survives encoding.
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) fn check_refusal(bytes: &[u8]) {
    if let Ok(refusal) = decode_refusal(bytes) {
        let wire = Verbs::refusal(refusal);
        assert_eq!(wire.as_deref().map(decode_refusal), Some(Ok(refusal)));
    }
}

/// For the fuzz targets: the addresses in a key survive encoding.
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) fn check_key(key: &RegionKey) {
    let Ok(at) = addresses_in(key, None) else { return };
    let again = region_key(key.id(), key.length(), &at).and_then(|key| addresses_in(&key, None));
    assert_eq!(again.ok(), Some(at));
}

/// A shorter time-out would expire without need on a busy machine.
const SHORTEST_TIMEOUT: Duration = Duration::from_millis(10);

/// Longest time-out, so that arithmetic on it does not overflow.
const LONGEST_TIMEOUT: Duration = Duration::from_secs(24 * 60 * 60);

/// Longest poll time. For longer polling use [`CompletionMode::Polling`].
const LONGEST_POLL: Duration = Duration::from_secs(1);

/// Bytes of the reader's nonce: what is left of the private data. 192 random bits do not repeat either.
const READER_NONCE_BYTES: usize = 24;

/// Bytes of a welcome.
const WELCOME_BYTES: usize = 64;

impl Format for Verbs {
    const READER: &'static [u8] = b"remora verbs 1 reader";
    const SOURCE: &'static [u8] = b"remora verbs 1 source";
    const HELLO_BYTES: usize = 56;
    const CHALLENGE_BYTES: usize = 40;
    type Grant = Grant;

    fn hello(hello: &Hello) -> Vec<u8> {
        let [nonce @ .., _, _, _, _, _, _, _, _] = hello.nonce;
        let nonce: [u8; READER_NONCE_BYTES] = nonce;
        message(&[
            &hello.session.to_le_bytes(),
            &hello.id.generation.to_le_bytes(),
            &hello.id.region.to_le_bytes(),
            &[hello.lane, 0, 0, 0],
            &nonce,
        ])
    }

    fn parse_hello(bytes: &[u8]) -> Result<Hello, Error> {
        Ok(decode_hello(bytes)?)
    }

    fn challenge(nonce: &[u8; NONCE_BYTES]) -> Vec<u8> {
        message(&[nonce])
    }

    fn parse_challenge(bytes: &[u8]) -> Result<(), Error> {
        decode_challenge(bytes)?;
        Ok(())
    }

    /// Sent in the connection manager's rejection.
    fn refusal(why: Refusal) -> Option<Vec<u8>> {
        let code = match why {
            Refusal::Denied(denial) => denial.code().into(),
            Refusal::Version | Refusal::Malformed => MALFORMED,
        };
        Some(message(&[&u32::to_le_bytes(code)]))
    }

    fn welcome(grant: &Grant, proof: &[u8; PROOF_BYTES]) -> Vec<u8> {
        welcome(0, grant, proof)
    }

    fn denial(denial: Denial) -> Vec<u8> {
        welcome(denial.code().into(), &Grant { key: 0, base: 0, length: 0 }, &[0; PROOF_BYTES])
    }

    fn parse_welcome(bytes: &[u8]) -> Result<(Grant, [u8; PROOF_BYTES]), Error> {
        match decode_welcome(bytes)? {
            (None, grant, proof) => Ok((grant, proof)),
            (Some(denial), _, _) => Err(Error::Refused(denial)),
        }
    }
}

fn decode_hello(bytes: &[u8]) -> Result<Hello, Malformed> {
    let mut rest = opened(bytes, Verbs::HELLO_BYTES)?;
    let session = u64::from_le_bytes(take(&mut rest)?);
    let generation = u64::from_le_bytes(take(&mut rest)?);
    let region = u32::from_le_bytes(take(&mut rest)?);
    let [lane, ..] = take::<4>(&mut rest)?;
    let mut nonce = [0; NONCE_BYTES];
    nonce[..READER_NONCE_BYTES].copy_from_slice(&take::<READER_NONCE_BYTES>(&mut rest)?);
    Ok(Hello { session, id: RegionId { generation, region }, lane, nonce })
}

fn decode_challenge(bytes: &[u8]) -> Result<[u8; NONCE_BYTES], Malformed> {
    let mut rest = opened(bytes, Verbs::CHALLENGE_BYTES)?;
    take(&mut rest)
}

/// The reason in a refusal.
fn decode_refusal(bytes: &[u8]) -> Result<Refusal, Malformed> {
    let mut rest = opened(bytes, REFUSAL_BYTES)?;
    match u32::from_le_bytes(take(&mut rest)?) {
        MALFORMED => Ok(Refusal::Malformed),
        code => denial(code).map(Refusal::Denied),
    }
}

fn welcome(code: u32, grant: &Grant, proof: &[u8; PROOF_BYTES]) -> Vec<u8> {
    message(&[
        &code.to_le_bytes(),
        &grant.key.to_le_bytes(),
        &grant.base.to_le_bytes(),
        &grant.length.to_le_bytes(),
        proof,
    ])
}

/// The denial if there is one, the grant, and the source's proof.
fn decode_welcome(bytes: &[u8]) -> Result<(Option<Denial>, Grant, [u8; PROOF_BYTES]), Malformed> {
    let mut rest = opened(bytes, WELCOME_BYTES)?;
    let denied = match u32::from_le_bytes(take(&mut rest)?) {
        0 => None,
        code => Some(denial(code)?),
    };
    let key = u32::from_le_bytes(take(&mut rest)?);
    let base = u64::from_le_bytes(take(&mut rest)?);
    let length = u64::from_le_bytes(take(&mut rest)?);
    Ok((denied, Grant { key, base, length }, take(&mut rest)?))
}

/// Bytes of a refusal.
const REFUSAL_BYTES: usize = 12;

/// Received bytes that are not of this protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Malformed {
    /// The magic is wrong.
    Magic,
    /// The version differs.
    Version(u16),
    /// The length is wrong, or the message is truncated.
    Length,
    /// The reason of a denial is unknown.
    Denial,
}

impl From<Malformed> for Error {
    fn from(malformed: Malformed) -> Error {
        Error::Protocol(match malformed {
            Malformed::Version(theirs) => {
                return Error::Version { kind: TransportKind::Verbs, theirs, ours: VERSION };
            }
            Malformed::Magic => "its message is not of a Remora connection",
            Malformed::Length => "its message is too short",
            Malformed::Denial => "it refuses for an unknown reason",
        })
    }
}

/// First bytes of every message.
const MAGIC: [u8; 4] = *b"RMRV";

/// The version of this file.
const VERSION: u16 = 1;

/// Not a number of a [`Denial`], which fit a byte.
const MALFORMED: u32 = 0x100;

/// A message of these fields, behind magic, version and its length.
fn message(fields: &[&[u8]]) -> Vec<u8> {
    let length = HEAD_BYTES + fields.iter().map(|field| field.len()).sum::<usize>();
    let mut bytes = Vec::with_capacity(length);
    bytes.extend_from_slice(&MAGIC);
    bytes.extend_from_slice(&VERSION.to_le_bytes());
    bytes.extend_from_slice(&(length as u16).to_le_bytes());
    fields.iter().for_each(|field| bytes.extend_from_slice(field));
    bytes
}

/// Magic, version, length.
const HEAD_BYTES: usize = 4 + 2 + 2;

/// Checks magic, version and length; returns the fields, without padding.
fn opened(bytes: &[u8], wanted: usize) -> Result<&[u8], Malformed> {
    let mut rest = bytes;
    if take::<4>(&mut rest).map_err(|_| Malformed::Magic)? != MAGIC {
        return Err(Malformed::Magic);
    }
    let version = u16::from_le_bytes(take(&mut rest)?);
    if version != VERSION {
        return Err(Malformed::Version(version));
    }
    let length = usize::from(u16::from_le_bytes(take(&mut rest)?));
    if length != wanted {
        return Err(Malformed::Length);
    }
    bytes.get(bytes.len() - rest.len()..wanted).ok_or(Malformed::Length)
}

fn take<const N: usize>(rest: &mut &[u8]) -> Result<[u8; N], Malformed> {
    let (taken, after) = rest.split_first_chunk().ok_or(Malformed::Length)?;
    *rest = after;
    Ok(*taken)
}

fn denial(code: u32) -> Result<Denial, Malformed> {
    u8::try_from(code).ok().and_then(Denial::from_code).ok_or(Malformed::Denial)
}

// The memory for the handshake's messages, and its layout. `admission` decides what is sent.

/// One page for the two messages that are sent over the connection, and for the reader's first READ. It is shared
/// memory, like all memory that is registered, so that a fork copies nothing. No remote end has rights to it.
fn buffer(domain: &Arc<Domain>) -> Result<Arc<Registration>, Error> {
    let memory = Memory::create("remora-verbs-buffer", BUFFER_BYTES, Pages::Small)?;
    Ok(Registration::new(domain, &Arc::new(memory), Access::Landing)?)
}

const BUFFER_BYTES: u64 = 4096;

/// Offsets of the outgoing message, of the incoming one, and of the trial READ.
const OUTGOING: u64 = 0;

const INCOMING: u64 = 128;

const TRIAL: u64 = 2048;

/// Maximum size of the trial READ.
const TRIAL_BYTES: u64 = 1024;

// The body of a [`RegionKey`] of this transport: the addresses to connect to, one per port of the source. The card's
// key is not included: only readers that have proved their session get it.

/// The key of `id`, to be read at any of `addresses`. An unspecified host stands for the host by which the reader
/// reached the source.
fn region_key(id: RegionId, length: u64, addresses: &[SocketAddr]) -> Result<RegionKey, Error> {
    let body: Vec<u8> = addresses.iter().take(MAX_ADDRESSES).flat_map(|at| address::encode(*at)).collect();
    Ok(RegionKey::new(TransportKind::Verbs, id, length, &body)?)
}

/// The addresses in `key`; at least one.
fn addresses_in(key: &RegionKey, fallback_host: Option<SocketAddr>) -> Result<Vec<SocketAddr>, Error> {
    key.expect(TransportKind::Verbs)?;
    let (entries, rest) = key.body().as_chunks::<ADDRESS_BYTES>();
    if entries.is_empty() || !rest.is_empty() || entries.len() > MAX_ADDRESSES {
        return Err(KeyError::Body("its verbs part does not contain 1 to 8 addresses").into());
    }
    entries.iter().map(|entry| address::decode(entry, fallback_host)).collect()
}

/// Maximum number of ports of one source. A key of that many addresses is far below its size limit.
const MAX_ADDRESSES: usize = 8;

#[cfg(test)]
mod wire_tests {
    #![allow(clippy::unwrap_used)]
    use proptest::prelude::*;

    use super::*;

    /// As the manager delivers it.
    fn padded(bytes: &[u8]) -> Vec<u8> {
        let mut long = bytes.to_vec();
        long.resize(196, 0);
        long
    }

    proptest! {
        #[test]
        fn messages_come_back_out_of_their_bytes_though_filled_up_with_zeros(
            session: u64, generation: u64, region: u32, lane: u8, key: u32, base: u64, length: u64,
            reader: [u8; READER_NONCE_BYTES], nonce: [u8; 32],
        ) {
            let mut long = [0; NONCE_BYTES];
            long[..READER_NONCE_BYTES].copy_from_slice(&reader);
            let hello = Hello { session, id: RegionId { generation, region }, lane, nonce: long };
            prop_assert_eq!(decode_hello(&padded(&Verbs::hello(&hello))), Ok(hello));
            prop_assert_eq!(decode_challenge(&padded(&Verbs::challenge(&nonce))), Ok(nonce));
            let grant = Grant { key, base, length };
            prop_assert_eq!(decode_welcome(&Verbs::welcome(&grant, &nonce)), Ok((None, grant, nonce)));
            let denied = Verbs::parse_welcome(&Verbs::denial(Denial::Stale));
            prop_assert!(matches!(denied, Err(Error::Refused(Denial::Stale))));
        }

        #[test]
        fn any_bytes_are_a_message_or_an_error_but_never_a_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = (decode_hello(&bytes), decode_challenge(&bytes), decode_welcome(&bytes));
            check_refusal(&bytes);
        }
    }

    #[test]
    fn what_is_cut_short_or_of_another_version_is_told_apart() {
        let id = RegionId { generation: 2, region: 3 };
        let hello = Verbs::hello(&Hello { session: 1, id, lane: 0, nonce: [4; NONCE_BYTES] });
        assert_eq!(decode_hello(&hello[..55]), Err(Malformed::Length));
        assert_eq!(decode_hello(b"RMR"), Err(Malformed::Magic));
        let mut other = hello.clone();
        other[4] = 9;
        assert_eq!(decode_hello(&other), Err(Malformed::Version(9)));
        assert_eq!(decode_challenge(&hello), Err(Malformed::Length), "one kind is not taken for another");
    }

    #[test]
    fn the_messages_are_these_bytes() {
        let id = RegionId { generation: 0x0102, region: 3 };
        let hello = Verbs::hello(&Hello { session: 5, id, lane: 2, nonce: [7; NONCE_BYTES] });
        let mut want = b"RMRV\x01\0\x38\0\x05\0\0\0\0\0\0\0\x02\x01\0\0\0\0\0\0\x03\0\0\0\x02\0\0\0".to_vec();
        want.extend([7; READER_NONCE_BYTES]);
        assert_eq!((hello.len(), hello), (Verbs::HELLO_BYTES, want));
        let challenge = Verbs::challenge(&[9; NONCE_BYTES]);
        assert_eq!(challenge, [&b"RMRV\x01\0\x28\0"[..], &[9; 32]].concat());
        assert_eq!(Verbs::refusal(Refusal::Denied(Denial::Busy)).unwrap(), b"RMRV\x01\0\x0c\0\x06\0\0\0");
        let welcome = Verbs::welcome(&Grant { key: 1, base: 2, length: 3 }, &[8; PROOF_BYTES]);
        let mut want = b"RMRV\x01\0\x40\0\0\0\0\0\x01\0\0\0\x02\0\0\0\0\0\0\0\x03\0\0\0\0\0\0\0".to_vec();
        want.extend([8; 32]);
        assert_eq!((welcome.len(), welcome), (WELCOME_BYTES, want));
    }

    #[test]
    fn every_refusal_keeps_its_reason() {
        for refusal in [Refusal::Malformed, Refusal::Denied(Denial::Busy), Refusal::Denied(Denial::NotGranted)] {
            assert_eq!(decode_refusal(&padded(&Verbs::refusal(refusal).unwrap())), Ok(refusal));
        }
    }

    const ID: RegionId = RegionId { generation: 1, region: 2 };

    #[test]
    fn addresses_come_back_out_of_their_key() {
        let given: Vec<SocketAddr> = vec!["10.0.0.1:7".parse().unwrap(), "[fd00::1]:8".parse().unwrap()];
        assert_eq!(addresses_in(&region_key(ID, 1, &given).unwrap(), None).unwrap(), given);
        assert!(matches!(addresses_in(&region_key(ID, 1, &[]).unwrap(), None), Err(Error::Key(_))));
    }

    proptest! {
        #[test]
        fn any_body_is_addresses_or_an_error(body in prop::collection::vec(any::<u8>(), 0..200)) {
            let key = RegionKey::new(TransportKind::Verbs, ID, 1, &body).unwrap();
            let _ = addresses_in(&key, None);
        }
    }
}
