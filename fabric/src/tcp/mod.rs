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
//! - Here: the bytes of a lane, the check that a read is inside its region, and the body of a
//!   [`RegionKey`] of this transport; pure. **Start here**, or with `fabric/README.md`.
//! - `source`: regions, grants, threads and their limits, and the source's data path. `background`: its rate limit, a
//!   fixed one, or that of a transfer which leaves the network link to others.
//! - `reader`: makes connections; lanes, and how reads are distributed over them.
//! - `socket`: options of a connection.
//!
//! The reader has no receiving thread: it would have to wake the thread that wants the bytes, which on two cores shared
//! with the source is a context switch per read. [`Peer::poll`](crate::Peer::poll) receives on the caller's thread
//! instead. What is not polled for waits in the kernel's buffer, which is the desired back-pressure.
//!
//! The bytes of a lane. `fabric/README.md` has the same in tables, and the tests write one of each message out byte by
//! byte. `admission` decides the order of the first four messages, `source` and `reader` that of the other two.
//!
//! ```text
//!   reader                                   source
//!     │ ── hello      64 bytes ──────────────▶ │   session, region, a nonce
//!     │ ◀───────────── challenge  48 bytes ─── │   the other nonce; or a refusal
//!     │ ── proof      32 bytes ──────────────▶ │   HMAC of both messages above
//!     │ ◀───────────── welcome    48 bytes ─── │   the region's length, the source's own HMAC; or a denial
//!     │                                        │
//!     │ ── Request    32 bytes ──────────────▶ │   as many as the depth allows
//!     │ ◀───────────── Answer     16 bytes ─── │   in the order of the requests, each followed by its bytes,
//!     │ ◀───────────── bytes ───────────────── │   in pieces of at most `PIECE_BYTES`
//! ```
//!
//! All integers are little-endian, as on nearly all hosts.

mod background;
mod reader;
mod socket;
mod source;
#[cfg(test)]
mod tests;

use std::net::{SocketAddr, TcpStream};
use std::num::NonZeroU64;
use std::time::Duration;

use crate::admission::{self, Format, Hello, NONCE_BYTES, PROOF_BYTES, Proved, Proving, Reader, Refusal, Source};
use crate::error::Denial;
use crate::region::{KeyError, RegionId, RegionKey, Secret, TransportKind};
use crate::{Error, address};
use socket::Deadline;

pub use background::Upload;
pub use reader::{TcpConnector, TcpPeer};
pub use source::TcpExporter;

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

/// First bytes of every data lane. A listening port can thus serve control and data: peek, and compare.
pub const LANE_MAGIC: [u8; 8] = *b"RMRALANE";

/// The handshake of this transport. A grant is the region's length.
pub(crate) struct Tcp;

/// For the fuzz targets: requests and answers survive encoding, and an accepted request is inside its region.
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) fn check_messages(data: &[u8]) {
    let (requests, _) = data.as_chunks::<{ Request::BYTES }>();
    for bytes in requests {
        let request = Request::decode(bytes);
        assert_eq!(request.encode(), *bytes);
        // A region whose length is the request's own tag: near the bounds more often than any fixed one.
        let length = request.tag >> 1;
        if request.judge(request.id, length) == Status::Good {
            assert!(u128::from(request.offset) + u128::from(request.length) <= u128::from(length));
        }
    }
    let (answers, _) = data.as_chunks::<{ Answer::BYTES }>();
    for bytes in answers {
        let Ok(answer) = Answer::decode(bytes) else { continue };
        assert_eq!(answer.encode(), *bytes);
    }
}

/// For the fuzz targets: an address in a key survives encoding.
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) fn check_key(key: &RegionKey) {
    let Ok(at) = address_in(key, None) else { return };
    let again = region_key(key.id(), key.length(), at).and_then(|key| address_in(&key, None));
    assert_eq!(again.ok(), Some(at));
}

/// A shorter time-out would expire without need on a busy machine.
const SHORTEST_TIMEOUT: Duration = Duration::from_millis(10);

/// Longest time-out, so that arithmetic on it does not overflow.
const LONGEST_TIMEOUT: Duration = Duration::from_secs(24 * 60 * 60);

/// The version of this file. A source that receives another version refuses it and hangs up.
const VERSION: u16 = 1;

/// Maximum bytes after one answer header. A longer read is answered in several pieces, so that a source whose region is
/// revoked can report it between two pieces. At 1 MiB the extra header and system call cost less than 1 % of the copy.
const PIECE_BYTES: u32 = 1 << 20;

/// The tag of an answer about the lane, not about one request: all outstanding reads have failed with its status. No
/// request may carry it.
const TAG_LANE: u64 = u64::MAX;

/// Received bytes that are not of this protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
enum Malformed {
    /// The first eight bytes are not [`LANE_MAGIC`].
    #[error("its first bytes are not those of a Remora data lane")]
    Magic,
    /// A data lane of a version that this build does not support.
    #[error("it uses version {0} of the data lane, this build version {VERSION}")]
    Version(u16),
    /// A status that is not defined.
    #[error("it sent the unknown status {0}")]
    Status(u32),
    /// Bytes that must be zero are not.
    #[error("it sent bytes that must be zero and are not")]
    Reserved,
}

/// The source's answer to a lane or a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Status {
    /// Success; the bytes follow.
    Good,
    /// The source refuses, for a reason.
    Denied(Denial),
    /// The source could not parse what it received, and hangs up.
    Malformed,
}

impl Status {
    /// The number on the wire: that of the [`Denial`], or one of the other two.
    fn code(self) -> u32 {
        match self {
            Status::Good => 0,
            Status::Denied(denial) => denial.code().into(),
            Status::Malformed => MALFORMED,
        }
    }

    /// The status of a number.
    fn from_code(code: u32) -> Result<Status, Malformed> {
        match code {
            0 => Ok(Status::Good),
            MALFORMED => Ok(Status::Malformed),
            other => {
                let denial = u8::try_from(other).ok().and_then(Denial::from_code);
                denial.map(Status::Denied).ok_or(Malformed::Status(other))
            }
        }
    }
}

/// Not a number of a [`Denial`], which fit a byte.
const MALFORMED: u32 = 0x100;

/// Bytes of a welcome.
const WELCOME_BYTES: usize = 48;

impl Format for Tcp {
    const READER: &'static [u8] = b"remora tcp lane 1 reader";
    const SOURCE: &'static [u8] = b"remora tcp lane 1 source";
    const HELLO_BYTES: usize = 64;
    const CHALLENGE_BYTES: usize = 48;
    type Grant = u64;

    fn hello(hello: &Hello) -> Vec<u8> {
        let mut out = Out::<{ Tcp::HELLO_BYTES }>::new();
        out.put(&LANE_MAGIC);
        out.put(&VERSION.to_le_bytes());
        out.put(&[hello.lane, 0]);
        out.put(&hello.id.region.to_le_bytes());
        out.put(&hello.session.to_le_bytes());
        out.put(&hello.id.generation.to_le_bytes());
        out.put(&hello.nonce);
        out.finish().to_vec()
    }

    fn parse_hello(bytes: &[u8]) -> Result<Hello, Error> {
        let bytes = bytes.try_into().map_err(|_| Error::Protocol("a hello of the wrong length"))?;
        Ok(decode_hello(bytes)?)
    }

    fn challenge(nonce: &[u8; NONCE_BYTES]) -> Vec<u8> {
        encode_challenge(Status::Good, nonce)
    }

    fn parse_challenge(bytes: &[u8]) -> Result<(), Error> {
        let bytes = bytes.try_into().map_err(|_| Error::Protocol("a challenge of the wrong length"))?;
        let (status, _) = decode_challenge(bytes)?;
        accept(status)
    }

    fn refusal(why: Refusal) -> Option<Vec<u8>> {
        let status = match why {
            Refusal::Denied(denial) => Status::Denied(denial),
            Refusal::Version | Refusal::Malformed => Status::Malformed,
        };
        Some(encode_challenge(status, &[0; NONCE_BYTES]))
    }

    fn welcome(region_length: &u64, proof: &[u8; PROOF_BYTES]) -> Vec<u8> {
        encode_welcome(Status::Good, *region_length, proof)
    }

    fn denial(denial: Denial) -> Vec<u8> {
        encode_welcome(Status::Denied(denial), 0, &[0; PROOF_BYTES])
    }

    fn parse_welcome(bytes: &[u8]) -> Result<(u64, [u8; PROOF_BYTES]), Error> {
        let bytes = bytes.try_into().map_err(|_| Error::Protocol("a welcome of the wrong length"))?;
        let (status, region_length, proof) = decode_welcome(bytes)?;
        accept(status)?;
        Ok((region_length, proof))
    }
}

fn decode_hello(bytes: &[u8; Tcp::HELLO_BYTES]) -> Result<Hello, Malformed> {
    let mut rest = In(bytes);
    check_opening(&mut rest)?;
    let [lane, reserved] = rest.take();
    let region = u32::from_le_bytes(rest.take());
    let session = u64::from_le_bytes(rest.take());
    let generation = u64::from_le_bytes(rest.take());
    let nonce = rest.take();
    if reserved != 0 {
        return Err(Malformed::Reserved);
    }
    Ok(Hello { lane, session, id: RegionId { generation, region }, nonce })
}

fn encode_challenge(status: Status, nonce: &[u8; NONCE_BYTES]) -> Vec<u8> {
    let mut out = Out::<{ Tcp::CHALLENGE_BYTES }>::new();
    out.put(&LANE_MAGIC);
    out.put(&VERSION.to_le_bytes());
    out.put(&[0; 2]);
    out.put(&status.code().to_le_bytes());
    out.put(nonce);
    out.finish().to_vec()
}

/// Status and nonce of a challenge.
fn decode_challenge(bytes: &[u8; Tcp::CHALLENGE_BYTES]) -> Result<(Status, [u8; NONCE_BYTES]), Malformed> {
    let mut rest = In(bytes);
    check_opening(&mut rest)?;
    let reserved: [u8; 2] = rest.take();
    let status = Status::from_code(u32::from_le_bytes(rest.take()))?;
    let nonce = rest.take();
    if reserved != [0; 2] {
        return Err(Malformed::Reserved);
    }
    Ok((status, nonce))
}

fn encode_welcome(status: Status, region_length: u64, proof: &[u8; PROOF_BYTES]) -> Vec<u8> {
    let mut out = Out::<WELCOME_BYTES>::new();
    out.put(&status.code().to_le_bytes());
    out.put(&[0; 4]);
    out.put(&region_length.to_le_bytes());
    out.put(proof);
    out.finish().to_vec()
}

/// Status, length of the region, and the source's proof.
fn decode_welcome(bytes: &[u8; WELCOME_BYTES]) -> Result<(Status, u64, [u8; PROOF_BYTES]), Malformed> {
    let mut rest = In(bytes);
    let status = Status::from_code(u32::from_le_bytes(rest.take()))?;
    let reserved: [u8; 4] = rest.take();
    let region_length = u64::from_le_bytes(rest.take());
    let proof = rest.take();
    if reserved != [0; 4] {
        return Err(Malformed::Reserved);
    }
    Ok((status, region_length, proof))
}

/// What a status means to a reader that shakes hands.
fn accept(status: Status) -> Result<(), Error> {
    match status {
        Status::Good => Ok(()),
        Status::Denied(denial) => Err(Error::Refused(denial)),
        Status::Malformed => Err(Error::Protocol("the source could not parse our hello")),
    }
}

impl From<Malformed> for Error {
    fn from(malformed: Malformed) -> Error {
        Error::Protocol(match malformed {
            Malformed::Version(theirs) => {
                return Error::Version { kind: TransportKind::Tcp, theirs, ours: VERSION };
            }
            Malformed::Magic => "its first bytes are not those of a Remora data lane",
            Malformed::Status(_) => "an unknown status",
            Malformed::Reserved => "bytes that must be zero are not",
        })
    }
}

/// A read request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Request {
    /// Returned in the answer; anything but [`TAG_LANE`].
    tag: u64,
    /// The region. Each request names it, although a lane is for one region only: a reader that confuses two
    /// generations is told so, and never gets bytes of the wrong one.
    id: RegionId,
    /// Offset of the first byte in the region.
    offset: u64,
    /// Number of bytes.
    length: u32,
}

impl Request {
    const BYTES: usize = 32;

    fn encode(&self) -> [u8; Self::BYTES] {
        let mut out = Out::<{ Self::BYTES }>::new();
        out.put(&self.tag.to_le_bytes());
        out.put(&self.id.generation.to_le_bytes());
        out.put(&self.offset.to_le_bytes());
        out.put(&self.id.region.to_le_bytes());
        out.put(&self.length.to_le_bytes());
        out.finish()
    }

    /// Decodes a request. Any 32 bytes are a request; [`Request::judge`] checks it.
    fn decode(bytes: &[u8; Self::BYTES]) -> Request {
        let mut rest = In(bytes);
        let tag = u64::from_le_bytes(rest.take());
        let generation = u64::from_le_bytes(rest.take());
        let offset = u64::from_le_bytes(rest.take());
        let region = u32::from_le_bytes(rest.take());
        let length = u32::from_le_bytes(rest.take());
        Request { tag, id: RegionId { generation, region }, offset, length }
    }

    /// Checks a read against region `id` of `region_length` bytes. The end is compared by subtraction, because `offset
    /// + length` may overflow.
    fn judge(&self, id: RegionId, region_length: u64) -> Status {
        if self.tag == TAG_LANE {
            return Status::Malformed;
        }
        if self.id.region != id.region {
            return Status::Denied(Denial::Unknown);
        }
        if self.id.generation != id.generation {
            return Status::Denied(Denial::Stale);
        }
        if self.offset > region_length || u64::from(self.length) > region_length - self.offset {
            return Status::Denied(Denial::OutOfBounds);
        }
        Status::Good
    }
}

/// The header before the bytes of a read, or of a piece of one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Answer {
    /// The request's tag, or [`TAG_LANE`].
    tag: u64,
    /// `Good`, or the reason why no bytes follow.
    status: Status,
    /// Bytes that follow: a piece of what is missing of this read. 0 unless `Good`.
    length: u32,
}

impl Answer {
    const BYTES: usize = 16;

    fn encode(&self) -> [u8; Self::BYTES] {
        let mut out = Out::<{ Self::BYTES }>::new();
        out.put(&self.tag.to_le_bytes());
        out.put(&self.status.code().to_le_bytes());
        out.put(&self.length.to_le_bytes());
        out.finish()
    }

    fn decode(bytes: &[u8; Self::BYTES]) -> Result<Answer, Malformed> {
        let mut rest = In(bytes);
        let tag = u64::from_le_bytes(rest.take());
        let status = Status::from_code(u32::from_le_bytes(rest.take()))?;
        let length = u32::from_le_bytes(rest.take());
        Ok(Answer { tag, status, length })
    }
}

/// Checks magic and version, which start the messages of both ends. The version comes first, as the rest of the layout
/// may depend on it.
fn check_opening(rest: &mut In<'_>) -> Result<(), Malformed> {
    if rest.take::<8>() != LANE_MAGIC {
        return Err(Malformed::Magic);
    }
    match u16::from_le_bytes(rest.take()) {
        VERSION => Ok(()),
        other => Err(Malformed::Version(other)),
    }
}

/// A message of fixed size being written, front to back.
struct Out<const N: usize> {
    bytes: [u8; N],
    filled: usize,
}

impl<const N: usize> Out<N> {
    fn new() -> Self {
        Out { bytes: [0; N], filled: 0 }
    }

    fn put(&mut self, field: &[u8]) {
        let end = self.filled + field.len();
        self.bytes[self.filled..end].copy_from_slice(field);
        self.filled = end;
    }

    fn finish(self) -> [u8; N] {
        debug_assert_eq!(self.filled, N, "the fields of a message fill it exactly");
        self.bytes
    }
}

/// A message of fixed size being read, front to back.
struct In<'a>(&'a [u8]);

impl In<'_> {
    /// The next field. Callers pass whole messages, so that no field is beyond the end.
    fn take<const N: usize>(&mut self) -> [u8; N] {
        match self.0.split_first_chunk::<N>() {
            Some((field, rest)) => {
                self.0 = rest;
                *field
            }
            None => {
                debug_assert!(false, "a field lies beyond the end of its message");
                [0; N]
            }
        }
    }
}

// The body of a [`RegionKey`] of this transport: the address to connect to. It is not secret.

/// The key of `id`, to be read at address `at`. An unspecified host stands for the host by which the reader reached the
/// source.
fn region_key(id: RegionId, length: u64, at: SocketAddr) -> Result<RegionKey, Error> {
    Ok(RegionKey::new(TransportKind::Tcp, id, length, &address::encode(at))?)
}

/// The address in `key`. `fallback_host` replaces an unspecified host; its port is not used.
fn address_in(key: &RegionKey, fallback_host: Option<SocketAddr>) -> Result<SocketAddr, Error> {
    key.expect(TransportKind::Tcp)?;
    let body = key.body().try_into().map_err(|_| KeyError::Body("its tcp part is not 20 bytes long"))?;
    address::decode(body, fallback_host)
}

// The handshake of a lane over a TCP stream, both ends, each step against a deadline. What is said is
// `admission`'s machine.

/// The reader's end, which has said hello. The steps are separate, so that the round trips of several lanes overlap.
struct HelloSent<'a> {
    stream: &'a TcpStream,
    deadline: Deadline,
    reader: Reader<Tcp>,
}

impl<'a> HelloSent<'a> {
    /// Says hello.
    fn hello(stream: &'a TcpStream, deadline: Deadline, hello: &Hello) -> Result<HelloSent<'a>, Error> {
        let (reader, bytes) = Reader::hello(hello);
        deadline.write(stream, &bytes)?;
        Ok(HelloSent { stream, deadline, reader })
    }

    /// Receives the challenge and sends the proof.
    fn prove(self, secret: &'a Secret) -> Result<ProofSent<'a>, Error> {
        let HelloSent { stream, deadline, reader } = self;
        let mut bytes = [0; Tcp::CHALLENGE_BYTES];
        deadline.read(stream, &mut bytes)?;
        let (reader, proof) = reader.prove(&bytes, secret)?;
        deadline.write(stream, &proof)?;
        Ok(ProofSent { stream, deadline, reader })
    }
}

/// The reader's end, which has proved its session.
struct ProofSent<'a> {
    stream: &'a TcpStream,
    deadline: Deadline,
    reader: Proving<'a, Tcp>,
}

impl ProofSent<'_> {
    /// Receives the welcome, checks the source's proof, and returns the length of the region in bytes.
    fn finish(self) -> Result<u64, Error> {
        let mut bytes = [0; WELCOME_BYTES];
        self.deadline.read(self.stream, &mut bytes)?;
        self.reader.finish(&bytes)
    }
}

/// The source's end, which has received the hello and sent the challenge.
struct Responder<'a> {
    stream: &'a TcpStream,
    deadline: Deadline,
    source: Source<Tcp>,
}

impl<'a> Responder<'a> {
    /// Receives the hello and sends the challenge, or says why not.
    fn challenge(stream: &'a TcpStream, deadline: Deadline) -> Result<Responder<'a>, Error> {
        let mut bytes = [0; Tcp::HELLO_BYTES];
        deadline.read(stream, &mut bytes)?;
        match Source::challenge(&bytes, &admission::nonce()?) {
            Ok((source, challenge)) => {
                deadline.write(stream, &challenge)?;
                Ok(Responder { stream, deadline, source })
            }
            Err(rejected) => {
                if let Some(answer) = rejected.answer {
                    let _ = deadline.write(stream, &answer);
                }
                Err(rejected.error)
            }
        }
    }

    /// What the reader claims.
    fn hello(&self) -> &Hello {
        self.source.hello()
    }

    /// Receives the proof and checks it. Without a secret (no such session) it fails as a wrong proof does, after the
    /// same work.
    fn examine<'s>(&self, secret: Option<&'s Secret>) -> Result<Result<Proved<'_, 's, Tcp>, Denial>, Error> {
        let mut proof = [0; PROOF_BYTES];
        self.deadline.read(self.stream, &mut proof)?;
        Ok(self.source.examine(&proof, secret))
    }

    /// Lets the reader in.
    fn welcome(&self, proved: &Proved<'_, '_, Tcp>, region_length: u64) -> Result<(), Error> {
        self.deadline.write(self.stream, &proved.welcome(&region_length))
    }

    /// Refuses the reader, and says why.
    fn refuse(&self, denial: Denial) -> Result<(), Error> {
        self.deadline.write(self.stream, &Tcp::denial(denial))
    }
}

/// Refuses a connection before its hello, if the reader still listens.
fn refuse_connection(stream: &TcpStream, denial: Denial, deadline: Deadline) {
    if let Some(refusal) = Tcp::refusal(Refusal::Denied(denial)) {
        let _ = deadline.write(stream, &refusal);
    }
}

#[cfg(test)]
mod wire_tests {
    #![allow(clippy::unwrap_used)]

    use std::net::IpAddr;

    use proptest::prelude::*;

    use super::*;

    const HERE: RegionId = RegionId { generation: 0x1122_3344_5566_7788, region: 0x99AA_BBCC };

    fn hello_bytes() -> [u8; Tcp::HELLO_BYTES] {
        Tcp::hello(&Hello { lane: 0, session: 0, id: HERE, nonce: [0; NONCE_BYTES] }).try_into().unwrap()
    }

    #[test]
    fn a_request_is_these_bytes() {
        let request = Request { tag: 1, id: HERE, offset: 0x0102_0304_0506_0708, length: 0x1000 };
        let mut want = Vec::new();
        want.extend([1, 0, 0, 0, 0, 0, 0, 0]);
        want.extend([0x88, 0x77, 0x66, 0x55, 0x44, 0x33, 0x22, 0x11]);
        want.extend([8, 7, 6, 5, 4, 3, 2, 1]);
        want.extend([0xCC, 0xBB, 0xAA, 0x99]);
        want.extend([0, 0x10, 0, 0]);
        assert_eq!(request.encode().as_slice(), want);
    }

    #[test]
    fn an_answer_is_these_bytes() {
        let answer = Answer { tag: 2, status: Status::Denied(Denial::Revoked), length: 0 };
        assert_eq!(answer.encode(), [2, 0, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 0, 0, 0, 0]);
    }

    #[test]
    fn a_hello_is_these_bytes() {
        let hello = Tcp::hello(&Hello { lane: 3, session: 5, id: HERE, nonce: [7; NONCE_BYTES] });
        let mut want = b"RMRALANE\x01\x00\x03\x00\xCC\xBB\xAA\x99\x05\0\0\0\0\0\0\0".to_vec();
        want.extend([0x88, 0x77, 0x66, 0x55, 0x44, 0x33, 0x22, 0x11]);
        want.extend([7; 32]);
        assert_eq!(hello, want);
    }

    #[test]
    fn a_challenge_and_a_welcome_are_these_bytes() {
        let challenge = encode_challenge(Status::Denied(Denial::Busy), &[9; NONCE_BYTES]);
        let mut want = b"RMRALANE\x01\x00\x00\x00\x06\0\0\0".to_vec();
        want.extend([9; 32]);
        assert_eq!(challenge, want);

        let welcome = Tcp::welcome(&0x1_0000_0000, &[8; PROOF_BYTES]);
        let mut want = vec![0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0];
        want.extend([8; 32]);
        assert_eq!(welcome, want);
    }

    #[test]
    fn another_version_is_named_before_anything_else_is_judged() {
        let mut bytes = hello_bytes();
        bytes[8] = 2;
        bytes[11] = 0xFF;
        assert_eq!(decode_hello(&bytes), Err(Malformed::Version(2)));
    }

    #[test]
    fn bytes_that_must_be_zero_are_checked() {
        let mut hello = hello_bytes();
        hello[11] = 1;
        assert_eq!(decode_hello(&hello), Err(Malformed::Reserved));
        let mut welcome: [u8; WELCOME_BYTES] = Tcp::welcome(&1, &[0; PROOF_BYTES]).try_into().unwrap();
        welcome[7] = 1;
        assert_eq!(decode_welcome(&welcome), Err(Malformed::Reserved));
        let mut challenge: [u8; Tcp::CHALLENGE_BYTES] = Tcp::challenge(&[0; NONCE_BYTES]).try_into().unwrap();
        challenge[10] = 1;
        assert_eq!(decode_challenge(&challenge), Err(Malformed::Reserved));
    }

    #[test]
    fn the_last_byte_can_be_read_and_the_one_behind_it_cannot() {
        let read = |offset, length| Request { tag: 0, id: HERE, offset, length }.judge(HERE, 4096);
        assert_eq!(read(4095, 1), Status::Good);
        assert_eq!(read(4096, 0), Status::Good);
        assert_eq!(read(4096, 1), Status::Denied(Denial::OutOfBounds));
        assert_eq!(read(4097, 0), Status::Denied(Denial::OutOfBounds));
        assert_eq!(read(u64::MAX, u32::MAX), Status::Denied(Denial::OutOfBounds));
        assert_eq!(read(u64::MAX - 1, 2), Status::Denied(Denial::OutOfBounds));
    }

    #[test]
    fn another_generation_is_stale_and_another_region_unknown() {
        let stale = RegionId { generation: HERE.generation + 1, ..HERE };
        let other = RegionId { region: HERE.region + 1, ..HERE };
        let read = |id| Request { tag: 0, id, offset: 0, length: 1 }.judge(HERE, 4096);
        assert_eq!(read(stale), Status::Denied(Denial::Stale));
        assert_eq!(read(other), Status::Denied(Denial::Unknown));
    }

    #[test]
    fn the_tag_of_the_lane_is_not_for_requests() {
        let request = Request { tag: TAG_LANE, id: HERE, offset: 0, length: 1 };
        assert_eq!(request.judge(HERE, 4096), Status::Malformed);
    }

    fn any_status() -> impl Strategy<Value = Status> {
        prop_oneof![0u32..7, Just(MALFORMED)].prop_map(|code| Status::from_code(code).unwrap())
    }

    fn any_id() -> impl Strategy<Value = RegionId> {
        (any::<u64>(), any::<u32>()).prop_map(|(generation, region)| RegionId { generation, region })
    }

    proptest! {
        #[test]
        fn what_is_encoded_is_decoded(
            (tag, offset, length) in any::<(u64, u64, u32)>(), id in any_id(), status in any_status(),
            (lane, session) in any::<(u8, u64)>(), nonce in any::<[u8; 32]>(),
        ) {
            let request = Request { tag, id, offset, length };
            prop_assert_eq!(Request::decode(&request.encode()), request);
            let answer = Answer { tag, status, length };
            prop_assert_eq!(Answer::decode(&answer.encode()), Ok(answer));
            let hello = Hello { lane, session, id, nonce };
            prop_assert_eq!(Tcp::parse_hello(&Tcp::hello(&hello)).unwrap(), hello);
            let challenge = encode_challenge(status, &nonce).try_into().unwrap();
            prop_assert_eq!(decode_challenge(&challenge), Ok((status, nonce)));
            let welcome = encode_welcome(status, offset, &nonce).try_into().unwrap();
            prop_assert_eq!(decode_welcome(&welcome), Ok((status, offset, nonce)));
        }

        #[test]
        fn any_bytes_are_decoded_to_what_encodes_to_them_again_or_refused(bytes in any::<[u8; 64]>(), open in any::<bool>()) {
            let mut bytes = bytes;
            if open {
                bytes[..8].copy_from_slice(&LANE_MAGIC);
                bytes[8..10].copy_from_slice(&VERSION.to_le_bytes());
            }
            if let Ok(hello) = decode_hello(&bytes) {
                prop_assert_eq!(Tcp::hello(&hello), bytes);
            }
            let short: [u8; 48] = bytes[..48].try_into().unwrap();
            if let Ok((status, nonce)) = decode_challenge(&short) {
                prop_assert_eq!(encode_challenge(status, &nonce), short);
            }
            if let Ok((status, length, proof)) = decode_welcome(&short) {
                prop_assert_eq!(encode_welcome(status, length, &proof), short);
            }
            let request: [u8; 32] = bytes[..32].try_into().unwrap();
            prop_assert_eq!(Request::decode(&request).encode(), request);
            let answer: [u8; 16] = bytes[..16].try_into().unwrap();
            if let Ok(decoded) = Answer::decode(&answer) {
                prop_assert_eq!(decoded.encode(), answer);
            }
        }

        #[test]
        fn bounds_are_those_of_unbounded_arithmetic(
            offset in prop_oneof![any::<u64>(), 0u64..10_000, (u64::MAX - 10_000)..=u64::MAX],
            length in prop_oneof![any::<u32>(), 0u32..10_000],
            region_length in prop_oneof![any::<u64>(), 0u64..20_000, (u64::MAX - 10_000)..=u64::MAX],
        ) {
            let inside = u128::from(offset) + u128::from(length) <= u128::from(region_length);
            let verdict = Request { tag: 0, id: HERE, offset, length }.judge(HERE, region_length);
            prop_assert_eq!(verdict == Status::Good, inside);
        }
    }

    const ID: RegionId = RegionId { generation: 1, region: 2 };

    proptest! {
        #[test]
        fn an_address_comes_back_out_of_its_key(host: IpAddr, port in 1u16..) {
            prop_assume!(!host.is_unspecified());
            let given = SocketAddr::new(host, port);
            prop_assert_eq!(address_in(&region_key(ID, 1, given).unwrap(), None).unwrap(), given);
        }

        #[test]
        fn any_body_is_an_address_or_an_error(body in prop::collection::vec(any::<u8>(), 0..40)) {
            let key = RegionKey::new(TransportKind::Tcp, ID, 1, &body).unwrap();
            let _ = address_in(&key, None);
        }
    }

    #[test]
    fn no_host_means_where_the_source_was_reached() {
        let key = region_key(ID, 1, "0.0.0.0:7000".parse().unwrap()).unwrap();
        let reached = "[fe80::1%3]:9".parse().unwrap();
        assert_eq!(address_in(&key, Some(reached)).unwrap(), "[fe80::1%3]:7000".parse().unwrap());
        assert!(matches!(address_in(&key, None), Err(Error::Key(_))));
    }

    #[test]
    fn a_key_of_another_transport_is_refused() {
        let key = RegionKey::new(TransportKind::Shm, ID, 1, &[0; 20]).unwrap();
        assert!(matches!(address_in(&key, None), Err(Error::WrongTransport { .. })));
    }
}
