//! A frame of the message layer: a fixed preamble, a head, up to three bodies, their checksums. Pure: bytes in, frames
//! out; no socket, no clock. What each head says is in the second half of this file.
//!
//! ```text
//!    0    1      2       4        8         12      16       17         24         28           32
//!   ┌────┬──────┬───────┬────────┬─────────┬───────┬────────┬──────────┬──────────┬────────────┐
//!   │tag │flags │head n₀│front n₁│middle n₂│data n₃│align   │ 0        │ CRC of   │ CRC of     │ preamble, 32 bytes
//!   │ u8 │ u8   │ u16   │ u32    │ u32     │ u32   │log₂ u8 │ 7 bytes  │ head     │ bytes 0–27 │
//!   ├────┴──────┴───────┴────────┴─────────┴───────┴────────┴──────────┴──────────┴────────────┤
//!   │ head: n₀ bytes, at most 96: all that decides whether and where the bodies are received   │
//!   ├──────────────────────────────────────────────────────────────────────────────────────────┤
//!   │ front: n₁ bytes │ middle: n₂ bytes │ data: n₃ bytes                                      │
//!   ├──────────────────────────────────────────────────────────────────────────────────────────┤
//!   │ CRC of front, middle, data: 12 bytes, if flags bit 0 │ seal: 16 bytes, if flags bit 1    │
//!   └──────────────────────────────────────────────────────────────────────────────────────────┘
//! ```
//!
//! All integers are little-endian, all checksums CRC-32C. The preamble and the head always have checksums, so that a
//! damaged length is not believed. Checksums of the bodies are the sender's choice (flags bit 0). They follow the
//! bodies, so that a receiver computes each one while the bytes are in its cache.
//!
//! The reader stops after the head ([`Step::Head`]) and goes on when it has been given memory for the bodies. So a
//! receiver chooses where the data lands before a byte of it is read, and a receiver without room does not go on.

use std::collections::VecDeque;
use std::io::IoSlice;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use bytes::Bytes;
use hmac::{Hmac, Mac};
use remora_memory::crc;
use remora_wire::derive;
use sha2::Sha256;

use crate::buffer::Buffer;
use crate::handshake::Role;

/// The content of the first 32 bytes of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Preamble {
    /// The kind of frame.
    pub tag: u8,
    /// The bodies have checksums.
    pub summed: bool,
    /// The frame has a seal at its end.
    pub sealed: bool,
    /// Length of the head, in bytes.
    pub head: u16,
    /// Lengths of front, middle and data, in bytes.
    pub bodies: [u32; BODIES],
    /// Alignment of the data, as a power of two.
    pub alignment: u8,
    /// Checksum of the head.
    pub head_sum: u32,
}

impl Preamble {
    /// Encodes the preamble.
    pub fn encode(&self) -> [u8; PREAMBLE_BYTES] {
        let mut bytes = [0; PREAMBLE_BYTES];
        bytes[0] = self.tag;
        bytes[1] = (u8::from(self.summed) * FLAG_SUMMED) | (u8::from(self.sealed) * FLAG_SEALED);
        bytes[2..4].copy_from_slice(&self.head.to_le_bytes());
        for (at, length) in [4, 8, 12].into_iter().zip(self.bodies) {
            bytes[at..at + 4].copy_from_slice(&length.to_le_bytes());
        }
        bytes[16] = self.alignment;
        bytes[24..28].copy_from_slice(&self.head_sum.to_le_bytes());
        let sum = checksum(&bytes[..28]);
        bytes[28..].copy_from_slice(&sum.to_le_bytes());
        bytes
    }

    /// Decodes a preamble and checks its lengths against the limits.
    ///
    /// # Errors
    /// [`Malformed`]: the next frame cannot be found after this.
    pub fn decode(bytes: &[u8; PREAMBLE_BYTES], limits: &Limits) -> Result<Preamble, Malformed> {
        let word = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        if word(28) != checksum(&bytes[..28]) {
            return Err(Malformed::Checksum { part: "preamble" });
        }
        let [tag, flags, ..] = *bytes;
        if flags & !(FLAG_SUMMED | FLAG_SEALED) != 0 || bytes[17..24] != [0; 7] || bytes[16] > MAX_ALIGNMENT_LOG2 {
            return Err(Malformed::Reserved);
        }
        let preamble = Preamble {
            tag,
            summed: flags & FLAG_SUMMED != 0,
            sealed: flags & FLAG_SEALED != 0,
            head: u16::from_le_bytes([bytes[2], bytes[3]]),
            bodies: [word(4), word(8), word(12)],
            alignment: bytes[16],
            head_sum: word(24),
        };
        limits.check(&preamble)?;
        Ok(preamble)
    }

    /// Length of all bodies, in bytes.
    pub fn body_bytes(&self) -> u64 {
        self.bodies.iter().map(|&length| u64::from(length)).sum()
    }

    /// Alignment of the data, in bytes.
    pub fn data_alignment(&self) -> usize {
        1 << self.alignment
    }
}

impl Preamble {
    fn has_sums(&self) -> bool {
        self.summed && self.body_bytes() > 0
    }
}

/// The longest bodies that a receiver accepts, in bytes. A preamble with more ends the link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// For front and for middle, each.
    pub front: u32,
    /// For data.
    pub data: u32,
}

impl Limits {
    /// Before a peer has a session: heads, and the short text of a refusal.
    pub const UNAUTHENTICATED: Limits = Limits { front: 256, data: 0 };

    fn check(&self, preamble: &Preamble) -> Result<(), Malformed> {
        let limits = [self.front, self.front, self.data].map(|limit| limit.min(MAX_SEGMENT_BYTES));
        if usize::from(preamble.head) > HEAD_BYTES {
            return Err(Malformed::TooLong { length: u32::from(preamble.head), limit: HEAD_BYTES as u32 });
        }
        let over = preamble.bodies.into_iter().zip(limits).find(|(length, limit)| length > limit);
        over.map_or(Ok(()), |(length, limit)| Err(Malformed::TooLong { length, limit }))
    }
}

/// Bytes that are not a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    /// A checksum is wrong.
    #[error("the checksum of a frame's {part} does not match")]
    Checksum {
        /// "preamble", "head", "front", "middle" or "data".
        part: &'static str,
    },
    /// Bits or bytes are set that this version does not define.
    #[error("frame uses flags or bytes that this protocol version does not define")]
    Reserved,
    /// A part exceeds its limit.
    #[error("frame part of {length} bytes exceeds the limit of {limit}")]
    TooLong {
        /// The length in the preamble, in bytes.
        length: u32,
        /// The bound, in bytes.
        limit: u32,
    },
    /// The seal is missing or invalid for these bytes at this position.
    #[error("frame {sequence} has no valid seal: frames were altered, repeated, dropped or inserted on their way")]
    Forged {
        /// Number of the frame in its direction, from 0.
        sequence: u64,
    },
    /// The head or a body does not match the tag.
    #[error("frame with tag {tag:#04x} has invalid content")]
    Content {
        /// The tag.
        tag: u8,
    },
}

/// Computes a checksum.
pub fn checksum(bytes: &[u8]) -> u32 {
    if bytes.is_empty() {
        return 0;
    }
    remora_memory::crc::crc32c(bytes)
}

/// Length of a preamble, in bytes.
pub const PREAMBLE_BYTES: usize = 32;

/// Length of the longest head, in bytes. The longest in use has 67 (`OPEN`); the rest is for later versions.
pub const HEAD_BYTES: usize = 96;

/// Front, middle and data.
pub const BODIES: usize = 3;

/// The memory for a frame without bodies.
pub const NO_BODIES: [Buffer; BODIES] = [Buffer::EMPTY, Buffer::EMPTY, Buffer::EMPTY];

/// The longest body, in bytes, whatever a receiver allows: a longer one would visibly delay the other messages of its
/// connection. Send larger data in several messages, or let the peer read it one-sidedly.
pub const MAX_SEGMENT_BYTES: u32 = 16 << 20;

/// The rest of a body is received straight into its memory from this size on. For less, a copy out of the shared
/// receive buffer costs less than the system call that ends exactly there.
pub const DIRECT_FROM_BYTES: usize = 16 * 1024;

/// Bodies up to this size are copied beside the heads: an entry of a vectored send costs about as much as the copy.
pub const COPIED_UP_TO_BYTES: usize = 1024;

const MAX_ALIGNMENT_LOG2: u8 = crate::buffer::MAX_ALIGNMENT.trailing_zeros() as u8;

const SUMS_BYTES: usize = 4 * BODIES;

const PARTS: [&str; BODIES] = ["front", "middle", "data"];

const FLAG_SUMMED: u8 = 1;

const FLAG_SEALED: u8 = 2;

// Frames on their way out, in as few pieces as possible.

/// Frames to be sent: small parts are copied one after the other, large ones are referred to, so that many frames go in
/// one vectored send.
pub struct Writer {
    summed: bool,
    seals: Option<Seals>,
    pieces: VecDeque<Piece>,
    /// Small parts, which pieces refer to by position. Emptied when everything is sent.
    scratch: Vec<u8>,
    /// Bytes of the first piece that are sent.
    gone: usize,
    bytes: usize,
}

enum Piece {
    Scratch { start: usize, end: usize },
    Shared(Bytes),
}

impl Writer {
    /// A writer that adds checksums of bodies if `summed`, and ends each frame with a seal if there are `seals`.
    pub fn new(summed: bool, seals: Option<Seals>) -> Writer {
        Writer { summed, seals, pieces: VecDeque::new(), scratch: Vec::new(), gone: 0, bytes: 0 }
    }

    /// Appends a frame. Its bodies are held until they are sent. `alignment` is the wanted alignment of the data in
    /// bytes, a power of two.
    ///
    /// # Panics
    /// If the head is longer than [`HEAD_BYTES`] or a body longer than [`MAX_SEGMENT_BYTES`]: the makers of
    /// messages check that.
    pub fn frame(&mut self, tag: u8, head: &[u8], bodies: [Bytes; BODIES], alignment: usize) {
        assert!(head.len() <= HEAD_BYTES, "heads are fixed records of at most HEAD_BYTES");
        let length = |body: &Bytes| u32::try_from(body.len()).expect("messages are checked against MAX_SEGMENT_BYTES");
        let preamble = Preamble {
            tag,
            summed: self.summed,
            sealed: self.seals.is_some(),
            head: head.len() as u16,
            bodies: bodies.each_ref().map(length),
            alignment: (alignment.max(1).ilog2() as u8).min(MAX_ALIGNMENT_LOG2),
            head_sum: checksum(head),
        };
        let bytes = preamble.encode();
        let seal: Option<Seal> =
            self.seals.as_mut().map(|seals| seals.next(&bytes, head, bodies.each_ref().map(|body| -> &[u8] { body })));
        let sums = preamble.has_sums().then(|| bodies.each_ref().map(|body| checksum(body).to_le_bytes()));
        self.copy([&bytes, head]);
        bodies.into_iter().for_each(|body| self.body(body));
        if let Some(sums) = sums {
            self.copy([sums.as_flattened()]);
        }
        if let Some(seal) = seal {
            self.copy([&seal]);
        }
    }

    /// Whether there is nothing to send.
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// Number of bytes to be sent.
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Fills `slices` with the next bytes to send. Returns the number of slices used.
    pub fn slices<'a>(&'a self, slices: &mut [IoSlice<'a>]) -> usize {
        let mut count = 0;
        for (piece, slice) in self.pieces.iter().zip(slices) {
            let bytes = self.piece(piece);
            let from = if count == 0 { self.gone } else { 0 };
            *slice = IoSlice::new(&bytes[from..]);
            count += 1;
        }
        count
    }

    /// The bytes to send, if they are in one piece: small messages are, and need no vector.
    pub fn only_piece(&self) -> Option<&[u8]> {
        match self.pieces.len() {
            1 => self.piece(&self.pieces[0]).get(self.gone..),
            _ => None,
        }
    }

    /// Notes that `count` bytes are sent.
    pub fn sent(&mut self, mut count: usize) {
        self.bytes -= count.min(self.bytes);
        while let Some(piece) = self.pieces.front() {
            let rest = self.piece(piece).len() - self.gone;
            if count < rest {
                self.gone += count;
                return;
            }
            count -= rest;
            self.gone = 0;
            self.pieces.pop_front();
        }
        self.scratch.clear();
        self.scratch.shrink_to(SCRATCH_KEPT_BYTES);
    }

    fn piece<'a>(&'a self, piece: &'a Piece) -> &'a [u8] {
        match piece {
            Piece::Scratch { start, end } => &self.scratch[*start..*end],
            Piece::Shared(bytes) => bytes,
        }
    }

    fn body(&mut self, body: Bytes) {
        if body.len() <= COPIED_UP_TO_BYTES {
            return self.copy([&body]);
        }
        self.bytes += body.len();
        self.pieces.push_back(Piece::Shared(body));
    }

    fn copy<const N: usize>(&mut self, parts: [&[u8]; N]) {
        let start = self.scratch.len();
        parts.into_iter().for_each(|part| self.scratch.extend_from_slice(part));
        let now = self.scratch.len();
        self.bytes += now - start;
        match self.pieces.back_mut() {
            Some(Piece::Scratch { end, .. }) => *end = now,
            _ if now == start => {}
            _ => self.pieces.push_back(Piece::Scratch { start, end: now }),
        }
    }
}

/// A connection keeps at most this much scratch memory: the heads of a hundred messages. Opening a session needs a few
/// hundred bytes.
const SCRATCH_KEPT_BYTES: usize = 16 * 1024;

// A keyed hash at the end of each frame, over its direction, its number and all its bytes. A checksum finds
// accidental changes; a seal also finds deliberate ones. The key comes from the handshake ([`crate::handshake`]).

/// A truncated HMAC-SHA256. With sixteen bytes a guess succeeds with probability 2^-128, and a wrong guess ends the
/// connection.
pub type Seal = [u8; SEAL_BYTES];

/// The seals of one direction of a connection, in order.
pub struct Seals {
    /// Keyed once: each frame's seal starts from a copy.
    key: Hmac<Sha256>,
    direction: u8,
    sequence: u64,
}

impl Seals {
    /// The seals of the frames that `sender` sends, for a key that only the two ends know.
    pub fn new(session_key: &[u8; 32], sender: Role) -> Seals {
        let (direction, label) = match sender {
            Role::Caller => (0, LABEL_CLIENT),
            Role::Called => (1, LABEL_SERVER),
        };
        let key =
            <Hmac<Sha256> as Mac>::new_from_slice(&derive(session_key, label)).expect("HMAC takes keys of any length");
        Seals { key, direction, sequence: 0 }
    }

    /// Computes the next frame's seal.
    pub fn next(&mut self, preamble: &[u8], head: &[u8], bodies: [&[u8]; BODIES]) -> Seal {
        let whole = self.hash(preamble, head, bodies).finalize().into_bytes();
        let mut seal = [0; SEAL_BYTES];
        seal.copy_from_slice(&whole[..SEAL_BYTES]);
        self.sequence += 1;
        seal
    }

    /// Checks the next frame's seal. The time it takes does not depend on the bytes compared.
    ///
    /// # Errors
    /// [`Malformed::Forged`].
    pub fn check(
        &mut self,
        seal: &[u8],
        preamble: &[u8],
        head: &[u8],
        bodies: [&[u8]; BODIES],
    ) -> Result<(), Malformed> {
        let forged = Malformed::Forged { sequence: self.sequence };
        if seal.len() != SEAL_BYTES {
            return Err(forged);
        }
        self.hash(preamble, head, bodies).verify_truncated_left(seal).map_err(|_| forged)?;
        self.sequence += 1;
        Ok(())
    }

    fn hash(&self, preamble: &[u8], head: &[u8], bodies: [&[u8]; BODIES]) -> Hmac<Sha256> {
        let mut hash = self.key.clone();
        hash.update(&[self.direction]);
        hash.update(&self.sequence.to_le_bytes());
        hash.update(preamble); // holds all lengths: the bytes that follow can be split in one way only
        hash.update(head);
        bodies.iter().for_each(|body| hash.update(body));
        hash
    }
}

/// Length of a seal, in bytes.
pub const SEAL_BYTES: usize = 16;

const LABEL_CLIENT: &[u8] = b"message seals of the client";

const LABEL_SERVER: &[u8] = b"message seals of the server";

/// The memory does not fit the bodies of the frame that is being read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the buffers do not have the lengths of the frame's bodies")]
pub struct Unfit;

/// What the reader has found.
#[derive(Debug)]
pub enum Step {
    /// A head with a valid checksum; see [`Reader::head`]. Call [`Reader::land`] before feeding more, also if all
    /// bodies are empty.
    Head(Preamble),
    /// The frame is complete and its checksums are valid. [`Reader::bodies`] returns its bodies.
    Whole,
    /// More bytes are needed.
    Incomplete,
}

/// Finds frames in bytes that arrive in pieces. The text above says when it stops.
pub struct Reader {
    limits: Limits,
    seals: Option<Seals>,
    stage: Stage,
    /// Bytes of a fixed-size part that has not arrived completely.
    cut: [u8; HEAD_BYTES],
    have: usize,
    preamble: [u8; PREAMBLE_BYTES],
    head: [u8; HEAD_BYTES],
    head_length: usize,
    arriving: Arriving,
}

/// The next part. Arriving bodies are kept outside of it: they are too large to be moved from stage to stage.
#[derive(Clone, Copy)]
enum Stage {
    Preamble,
    Head(Preamble),
    /// The head was returned, and the caller has yet to give memory.
    Asked(Preamble),
    Bodies,
    Trailer,
    /// Malformed: no further frame can be found.
    Over(Malformed),
}

/// Bodies that are being received.
struct Arriving {
    /// Which trailers follow the bodies.
    summed: bool,
    sealed: bool,
    bodies: [Buffer; BODIES],
    /// The body that is being filled, and how far.
    at: usize,
    filled: usize,
    sums: [u32; BODIES],
    /// The running checksum of the body that is being filled, if it came in more than one piece.
    running: Option<u32>,
}

impl Reader {
    /// A reader that accepts nothing beyond the limits, and with `seals` only frames with a valid seal.
    pub fn new(limits: Limits, seals: Option<Seals>) -> Reader {
        Reader {
            limits,
            seals,
            stage: Stage::Preamble,
            cut: [0; HEAD_BYTES],
            have: 0,
            preamble: [0; PREAMBLE_BYTES],
            head: [0; HEAD_BYTES],
            head_length: 0,
            arriving: Arriving::NOTHING,
        }
    }

    /// Sets the limits from the next preamble on.
    pub fn set_limits(&mut self, limits: Limits) {
        self.limits = limits;
    }

    /// Whether no frame has begun.
    pub fn is_between_frames(&self) -> bool {
        matches!(self.stage, Stage::Preamble) && self.have == 0
    }

    /// The head of the frame that is being read.
    pub fn head(&self) -> &[u8] {
        &self.head[..self.head_length]
    }

    /// Takes the bodies of the complete frame.
    pub fn bodies(&mut self) -> [Buffer; BODIES] {
        std::mem::replace(&mut self.arriving.bodies, NO_BODIES)
    }

    /// Reads from the front of `input` up to the next step.
    ///
    /// # Errors
    /// [`Malformed`], and the same error for every later call: close the connection.
    pub fn next(&mut self, input: &mut &[u8]) -> Result<Step, Malformed> {
        let outcome = self.advance(input);
        if let Err(malformed) = outcome {
            self.stage = Stage::Over(malformed);
        }
        outcome
    }

    /// Gives memory for the bodies of the frame whose head was returned. Each buffer has the length that the preamble
    /// says.
    ///
    /// # Errors
    /// [`Unfit`]: the lengths are others, or no head was returned. Other memory may be tried.
    pub fn land(&mut self, bodies: [Buffer; BODIES]) -> Result<(), Unfit> {
        let Stage::Asked(preamble) = self.stage else { return Err(Unfit) };
        if !bodies.iter().zip(preamble.bodies).all(|(buffer, length)| buffer.len() == length as usize) {
            return Err(Unfit);
        }
        self.arriving.begin(&preamble, bodies);
        self.stage = Stage::Bodies;
        Ok(())
    }

    /// The memory that the next bytes belong to, if it pays to receive straight into it, without a copy.
    pub fn landing(&mut self) -> Option<&mut [u8]> {
        let Stage::Bodies = self.stage else { return None };
        let arriving = &mut self.arriving;
        arriving.skip_full();
        let rest = arriving.bodies.get_mut(arriving.at)?.get_mut(arriving.filled..)?;
        Some(rest).filter(|rest| rest.len() >= DIRECT_FROM_BYTES)
    }

    /// Notes that `count` bytes were received into [`Reader::landing`].
    pub fn landed(&mut self, count: usize) {
        if let Stage::Bodies = self.stage {
            self.arriving.fill(count);
        }
    }

    fn advance(&mut self, input: &mut &[u8]) -> Result<Step, Malformed> {
        loop {
            match self.stage {
                Stage::Preamble => {
                    let Some(bytes) = gather::<PREAMBLE_BYTES>(&mut self.cut, &mut self.have, input) else {
                        return Ok(Step::Incomplete);
                    };
                    let preamble = Preamble::decode(&bytes, &self.limits)?;
                    self.preamble = bytes;
                    self.stage = Stage::Head(preamble);
                }
                Stage::Head(preamble) => {
                    let length = usize::from(preamble.head);
                    if !gather_some(&mut self.head[..length], &mut self.have, input) {
                        return Ok(Step::Incomplete);
                    }
                    self.head_length = length;
                    if checksum(self.head()) != preamble.head_sum {
                        return Err(Malformed::Checksum { part: "head" });
                    }
                    self.stage = Stage::Asked(preamble);
                    return Ok(Step::Head(preamble));
                }
                Stage::Asked(_) => return Ok(Step::Incomplete),
                Stage::Bodies => {
                    if !self.arriving.take(input) {
                        return Ok(Step::Incomplete);
                    }
                    self.stage = Stage::Trailer;
                }
                Stage::Trailer => return self.finish(input),
                Stage::Over(malformed) => return Err(malformed),
            }
        }
    }

    fn finish(&mut self, input: &mut &[u8]) -> Result<Step, Malformed> {
        let Arriving { summed, sealed, sums, .. } = self.arriving;
        let sums_bytes = if summed { SUMS_BYTES } else { 0 };
        let length = sums_bytes + if sealed { SEAL_BYTES } else { 0 };
        if !gather_some(&mut self.cut[..length], &mut self.have, input) {
            return Ok(Step::Incomplete);
        }
        let (said, seal) = self.cut[..length].split_at(sums_bytes);
        for ((said, sum), part) in said.chunks_exact(4).zip(sums).zip(PARTS) {
            if said != sum.to_le_bytes() {
                return Err(Malformed::Checksum { part });
            }
        }
        let bodies = &self.arriving.bodies;
        if let Some(seals) = &mut self.seals {
            let head = &self.head[..self.head_length];
            seals.check(seal, &self.preamble, head, bodies.each_ref().map(|body| -> &[u8] { body }))?;
        } else if sealed {
            return Err(Malformed::Reserved);
        }
        self.stage = Stage::Preamble;
        Ok(Step::Whole)
    }
}

impl Arriving {
    const NOTHING: Arriving = Arriving {
        summed: false,
        sealed: false,
        bodies: NO_BODIES,
        at: 0,
        filled: 0,
        sums: [0; BODIES],
        running: None,
    };

    /// Begins with the bodies of another frame. In place: a running checksum has half a kilobyte.
    fn begin(&mut self, preamble: &Preamble, bodies: [Buffer; BODIES]) {
        (self.summed, self.sealed, self.bodies) = (preamble.has_sums(), preamble.sealed, bodies);
        (self.at, self.filled, self.sums) = (0, 0, [0; BODIES]);
        self.running = None;
    }

    /// Moves bytes from the input into the bodies. Returns whether all are full.
    fn take(&mut self, input: &mut &[u8]) -> bool {
        loop {
            self.skip_full();
            let Some(rest) = self.bodies.get_mut(self.at).and_then(|body| body.get_mut(self.filled..)) else {
                return true;
            };
            let count = rest.len().min(input.len());
            if count == 0 {
                return false;
            }
            let (piece, left) = input.split_at(count);
            rest[..count].copy_from_slice(piece);
            *input = left;
            self.fill(count);
        }
    }

    /// Notes `count` more bytes of the current body: updates the checksum, and goes on to the next body when this one
    /// is full.
    fn fill(&mut self, count: usize) {
        let Some(body) = self.bodies.get(self.at) else { return };
        let end = (self.filled + count).min(body.len());
        let piece = &body[self.filled..end];
        let is_last = end == body.len();
        if self.summed {
            match (&mut self.running, is_last) {
                (None, true) => self.sums[self.at] = checksum(piece),
                (Some(running), last) => {
                    *running = crc::crc32c_append(*running, piece);
                    if last {
                        self.sums[self.at] = *running;
                    }
                }
                (None, false) => self.running = Some(checksum(piece)),
            }
        }
        self.filled = end;
        self.skip_full();
    }

    fn skip_full(&mut self) {
        while self.bodies.get(self.at).is_some_and(|body| body.len() == self.filled) {
            self.at += 1;
            self.filled = 0;
            self.running = None;
        }
    }
}

/// Returns `N` bytes of the input, pieced together if necessary; `None` while some are missing.
fn gather<const N: usize>(cut: &mut [u8; HEAD_BYTES], have: &mut usize, input: &mut &[u8]) -> Option<[u8; N]> {
    if *have == 0
        && let Some((bytes, rest)) = input.split_first_chunk::<N>()
    {
        *input = rest;
        return Some(*bytes);
    }
    gather_some(&mut cut[..N], have, input).then(|| std::array::from_fn(|at| cut[at]))
}

/// Fills `into` from the input, after the `have` bytes of the last call. Returns whether it is full, which resets
/// `have`.
fn gather_some(into: &mut [u8], have: &mut usize, input: &mut &[u8]) -> bool {
    let count = (into.len() - *have).min(input.len());
    let (piece, rest) = input.split_at(count);
    into[*have..*have + count].copy_from_slice(piece);
    *input = rest;
    *have += count;
    let full = *have == into.len();
    if full {
        *have = 0;
    }
    full
}

// A trailer is pieced together in the same memory as an incomplete preamble.
const _: () = assert!(SUMS_BYTES + SEAL_BYTES <= HEAD_BYTES && PREAMBLE_BYTES <= HEAD_BYTES);

// The meaning of frames: the heads of all tags, as fixed records. Pure.
//
// | tag | head | sent by, and when |
// |---|---|---|
// | 1 `OPEN` | who this end is, both cookies, attempt, last message received | the connecting end, first |
// | 2 `OPENED` | the same for the other end | the answer that makes both ends ready |
// | 3 `RETRY` | attempt | your attempt is older than one that this end knows: continue from this one |
// | 4 `RESET` | – | this end does not know the session that you want to resume |
// | 5 `WAIT` | – | both ends have connected, and the sender's connection wins: wait for it |
// | 6 `REFUSED` | reason | no; do not repeat the same request |
// | 16 `MESSAGE` | number, acknowledgement, transaction, kind | at any time when ready; front, middle and data are the owner's |
// | 17 `ACK` | acknowledgement | when no message has carried it for a while |
// | 18 `PING`, 19 `PONG` | – | after a silence; the answer |
// | 20 `CLOSE` | – | the sender has sent everything |

/// The identity of an end: one messenger, for as long as it exists.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Entity(pub u64);

/// Identifies a session at one end, and counts how often it was reset.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Cookie {
    /// Random, unique at its end, and the same for as long as the owner keeps the connection. Never 0.
    pub id: u64,
    /// Counts the resets: a session that was forgotten is a different session.
    pub epoch: u32,
}

/// What each end says about itself when a link begins to serve a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Open {
    /// The sender.
    pub entity: Entity,
    /// Where the sender can be connected to, if it listens.
    pub address: Option<SocketAddr>,
    /// The sender's session.
    pub from: Cookie,
    /// The receiver's session that the sender means; `None` if it knows of none.
    pub to: Option<Cookie>,
    /// Counts the links that either end has made for this session.
    pub attempt: u64,
    /// Number of the last message that the sender has received.
    pub heard: u64,
    /// The sender's end is lossy: it replays nothing and expects no replay.
    pub lossy: bool,
}

/// A frame of the session itself, without bodies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Signal {
    /// Names the session that a link is for.
    Open(Open),
    /// Accepts the session.
    Opened(Open),
    /// The attempt is older than one that the sender knows.
    Retry {
        /// The highest attempt known.
        attempt: u64,
    },
    /// The sender does not know the session.
    Reset,
    /// The sender's own connect wins.
    Wait,
    /// The sender refuses the session.
    Refused(Refusal),
    /// Acknowledges messages.
    Ack {
        /// Number of the last message received.
        heard: u64,
    },
    /// Asks for a PONG.
    Ping,
    /// Answers a PING.
    Pong,
    /// The sender has sent everything.
    Close,
}

/// Why an end refuses a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// It accepts no sessions: it only connects, or it is stopping.
    #[error("it accepts no connections")]
    NotServing,
    /// It holds as many sessions as its limit allows.
    #[error("it has as many sessions as it allows: try again later, or raise its limit")]
    Full,
    /// One end replays messages and the other does not.
    #[error("one end is lossy and the other is not: give both ends policies that fit together")]
    Policy,
    /// It has connected to itself.
    #[error("it is this messenger itself: connect to another address")]
    Oneself,
}

/// The head of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Label {
    /// Counted from 1, per direction of a session.
    pub number: u64,
    /// Number of the last message received in the other direction.
    pub heard: u64,
    /// The request that this answers, or any other number that the owner chooses.
    pub transaction: u64,
    /// The kind of message, chosen by the owner.
    pub kind: u16,
}

/// The tag of messages. Every other tag is a [`Signal`].
pub const MESSAGE: u8 = 16;

impl Label {
    /// Encodes the head.
    pub fn encode(&self) -> [u8; LABEL_BYTES] {
        let mut head = [0; LABEL_BYTES];
        head[..8].copy_from_slice(&self.number.to_le_bytes());
        head[8..16].copy_from_slice(&self.heard.to_le_bytes());
        head[16..24].copy_from_slice(&self.transaction.to_le_bytes());
        head[24..26].copy_from_slice(&self.kind.to_le_bytes());
        head
    }

    /// Decodes a head.
    ///
    /// # Errors
    /// [`Malformed::Content`].
    pub fn decode(head: &[u8]) -> Result<Label, Malformed> {
        let mut fields = Fields { rest: head, tag: MESSAGE };
        let label =
            Label { number: fields.u64()?, heard: fields.u64()?, transaction: fields.u64()?, kind: fields.u16()? };
        fields.reserved::<2>()?;
        fields.end().map(|()| label)
    }
}

impl Signal {
    /// Encodes the tag, and the head with its length.
    pub fn encode(&self) -> (u8, [u8; HEAD_BYTES], usize) {
        let mut head = [0; HEAD_BYTES];
        let (tag, length) = match self {
            Signal::Open(open) => (OPEN, open.put(&mut head)),
            Signal::Opened(open) => (OPENED, open.put(&mut head)),
            Signal::Retry { attempt: number } => (RETRY, put(&mut head, 0, &number.to_le_bytes())),
            Signal::Ack { heard: number } => (ACK, put(&mut head, 0, &number.to_le_bytes())),
            Signal::Refused(refusal) => (REFUSED, put(&mut head, 0, &[refusal.code()])),
            Signal::Reset => (RESET, 0),
            Signal::Wait => (WAIT, 0),
            Signal::Ping => (PING, 0),
            Signal::Pong => (PONG, 0),
            Signal::Close => (CLOSE, 0),
        };
        (tag, head, length)
    }

    /// Decodes a head.
    ///
    /// # Errors
    /// [`Malformed::Content`]: there is no such tag, or the head is not one of that tag.
    pub fn decode(tag: u8, head: &[u8]) -> Result<Signal, Malformed> {
        let mut fields = Fields { rest: head, tag };
        let signal = match tag {
            OPEN => Signal::Open(Open::take(&mut fields)?),
            OPENED => Signal::Opened(Open::take(&mut fields)?),
            RETRY => Signal::Retry { attempt: fields.u64()? },
            ACK => Signal::Ack { heard: fields.u64()? },
            REFUSED => Signal::Refused(Refusal::of(fields.u8()?).ok_or(Malformed::Content { tag })?),
            RESET => Signal::Reset,
            WAIT => Signal::Wait,
            PING => Signal::Ping,
            PONG => Signal::Pong,
            CLOSE => Signal::Close,
            _ => return Err(Malformed::Content { tag }),
        };
        fields.end().map(|()| signal)
    }
}

impl Open {
    /// Fixed positions: entity, from, to, attempt, heard, address (IPv4 mapped into IPv6), port (0 for none), lossy: 67
    /// bytes.
    fn put(&self, head: &mut [u8; HEAD_BYTES]) -> usize {
        let to = self.to.unwrap_or(Cookie { id: 0, epoch: 0 });
        let (ip, port) = match self.address {
            Some(address) => (to_v6(address.ip()), address.port()),
            None => (Ipv6Addr::UNSPECIFIED, 0),
        };
        let mut at = put(head, 0, &self.entity.0.to_le_bytes());
        at = put(head, at, &self.from.id.to_le_bytes());
        at = put(head, at, &self.from.epoch.to_le_bytes());
        at = put(head, at, &to.id.to_le_bytes());
        at = put(head, at, &to.epoch.to_le_bytes());
        at = put(head, at, &self.attempt.to_le_bytes());
        at = put(head, at, &self.heard.to_le_bytes());
        at = put(head, at, &ip.octets());
        at = put(head, at, &port.to_le_bytes());
        put(head, at, &[u8::from(self.lossy)])
    }

    fn take(fields: &mut Fields<'_>) -> Result<Open, Malformed> {
        let malformed = Malformed::Content { tag: fields.tag };
        let entity = Entity(fields.u64()?);
        let from = Cookie { id: fields.u64()?, epoch: fields.u32()? };
        let to = Cookie { id: fields.u64()?, epoch: fields.u32()? };
        let (attempt, heard) = (fields.u64()?, fields.u64()?);
        let (ip, port) = (Ipv6Addr::from(fields.array::<16>()?), fields.u16()?);
        let lossy = match fields.u8()? {
            0 => false,
            1 => true,
            _ => return Err(malformed),
        };
        if from.id == 0 {
            return Err(malformed);
        }
        let address = (port != 0).then(|| SocketAddr::new(ip.to_canonical(), port));
        let to = (to.id != 0).then_some(to);
        Ok(Open { entity, address, from, to, attempt, heard, lossy })
    }
}

impl Refusal {
    fn code(self) -> u8 {
        match self {
            Refusal::NotServing => 1,
            Refusal::Full => 2,
            Refusal::Policy => 3,
            Refusal::Oneself => 4,
        }
    }

    fn of(code: u8) -> Option<Refusal> {
        [Refusal::NotServing, Refusal::Full, Refusal::Policy, Refusal::Oneself].into_iter().find(|it| it.code() == code)
    }
}

fn to_v6(ip: IpAddr) -> Ipv6Addr {
    match ip {
        IpAddr::V4(ip) => ip.to_ipv6_mapped(),
        IpAddr::V6(ip) => ip,
    }
}

/// Writes a field, and returns where the next one begins.
fn put(head: &mut [u8], at: usize, field: &[u8]) -> usize {
    head[at..at + field.len()].copy_from_slice(field);
    at + field.len()
}

/// The fields of a head that have not been read yet.
struct Fields<'a> {
    rest: &'a [u8],
    tag: u8,
}

impl Fields<'_> {
    fn array<const N: usize>(&mut self) -> Result<[u8; N], Malformed> {
        let (field, rest) = self.rest.split_first_chunk().ok_or(Malformed::Content { tag: self.tag })?;
        self.rest = rest;
        Ok(*field)
    }

    fn u8(&mut self) -> Result<u8, Malformed> {
        self.array().map(u8::from_le_bytes)
    }

    fn u16(&mut self) -> Result<u16, Malformed> {
        self.array().map(u16::from_le_bytes)
    }

    fn u32(&mut self) -> Result<u32, Malformed> {
        self.array().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Result<u64, Malformed> {
        self.array().map(u64::from_le_bytes)
    }

    /// Checks bytes that must be zero until a later version uses them.
    fn reserved<const N: usize>(&mut self) -> Result<(), Malformed> {
        let zero = self.array::<N>()? == [0; N];
        zero.then_some(()).ok_or(Malformed::Content { tag: self.tag })
    }

    fn end(self) -> Result<(), Malformed> {
        self.rest.is_empty().then_some(()).ok_or(Malformed::Content { tag: self.tag })
    }
}

const OPEN: u8 = 1;
const OPENED: u8 = 2;
const RETRY: u8 = 3;
const RESET: u8 = 4;
const WAIT: u8 = 5;
const REFUSED: u8 = 6;
const ACK: u8 = 17;
const PING: u8 = 18;
const PONG: u8 = 19;
const CLOSE: u8 = 20;

/// Length of a message's head, in bytes.
pub const LABEL_BYTES: usize = 28;

#[cfg(test)]
mod tests {
    //! Frames survive any splitting of their bytes, and bytes that are not frames are refused.
    #![allow(clippy::unwrap_used)]

    use std::io::IoSlice;

    use bytes::Bytes;
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;
    use crate::handshake::Role;

    const LIMITS: Limits = Limits { front: 1 << 20, data: 1 << 20 };

    type Parts = (u8, Vec<u8>, [Vec<u8>; 3]);

    fn parts() -> impl Strategy<Value = Parts> {
        let body = || prop_oneof![4 => vec(any::<u8>(), 0..40), 1 => vec(any::<u8>(), 0..3000)];
        let data = prop_oneof![4 => vec(any::<u8>(), 0..40), 1 => (16_000usize..40_000).prop_map(|n| vec![7; n])];
        (any::<u8>(), vec(any::<u8>(), 0..HEAD_BYTES), body(), body(), data)
            .prop_map(|(tag, head, front, middle, data)| (tag, head, [front, middle, data]))
    }

    fn seals() -> Seals {
        Seals::new(&[9; 32], Role::Caller)
    }

    fn encoded(frames: &[Parts], summed: bool, sealed: bool) -> Vec<u8> {
        let mut writer = Writer::new(summed, sealed.then(seals));
        for (tag, head, bodies) in frames {
            let bodies = bodies.each_ref().map(|body| Bytes::copy_from_slice(body));
            writer.frame(*tag, head, bodies, 1);
        }
        let mut out = Vec::new();
        while !writer.is_empty() {
            let mut slices = [IoSlice::new(&[]); 3];
            let count = writer.slices(&mut slices);
            let all: Vec<u8> = slices[..count].iter().flat_map(|slice| slice.to_vec()).collect();
            let some = all.len().div_ceil(2); // a socket that takes half
            out.extend_from_slice(&all[..some]);
            writer.sent(some);
        }
        out
    }

    /// Reads everything in pieces of `piece` bytes; large rests go straight into their memory if `direct`.
    fn decoded(bytes: &[u8], piece: usize, direct: bool, sealed: bool) -> Result<Vec<Parts>, Malformed> {
        let mut reader = Reader::new(LIMITS, sealed.then(seals));
        let (mut frames, mut heads) = (Vec::new(), Vec::new());
        let mut rest = bytes;
        while !rest.is_empty() {
            if direct && let Some(landing) = reader.landing() {
                let count = landing.len().min(piece).min(rest.len());
                landing[..count].copy_from_slice(&rest[..count]);
                reader.landed(count);
                rest = &rest[count..];
            }
            let (mut input, later) = rest.split_at(piece.min(rest.len()));
            rest = later;
            loop {
                match reader.next(&mut input)? {
                    Step::Incomplete => break,
                    Step::Head(preamble) => {
                        heads.push((preamble.tag, reader.head().to_vec()));
                        reader.land(preamble.bodies.map(|length| Buffer::zeroed(length as usize, 1))).unwrap();
                    }
                    Step::Whole => {
                        let bodies = reader.bodies();
                        let (tag, head) = heads.pop().unwrap();
                        frames.push((tag, head, bodies.map(|body| body.to_vec())));
                    }
                }
            }
            assert!(input.is_empty());
        }
        assert!(reader.is_between_frames());
        Ok(frames)
    }

    proptest! {
        #[test]
        fn frames_survive_any_cutting_and_either_way_of_landing(
            sent in vec(parts(), 0..5), piece in 1usize..20_000, direct: bool, summed: bool, sealed: bool,
        ) {
            let bytes = encoded(&sent, summed, sealed);
            prop_assert_eq!(decoded(&bytes, piece, direct, sealed), Ok(sent));
        }

        #[test]
        fn a_changed_byte_is_never_taken_for_the_frame(
            frame in parts(), at in any::<prop::sample::Index>(), change in 1u8.., sealed: bool,
        ) {
            let mut bytes = encoded(std::slice::from_ref(&frame), true, sealed);
            let at = at.index(bytes.len());
            bytes[at] ^= change;
            prop_assert!(decoded(&bytes, 1 << 20, false, sealed).is_err());
        }

        #[test]
        fn any_bytes_are_frames_or_an_error(bytes in vec(any::<u8>(), 0..600)) {
            crate::fuzzing::layer_frames(&bytes);
        }
    }

    #[test]
    fn a_repeated_a_left_out_and_a_stripped_frame_are_forged() {
        let frames = [(1, vec![1], [vec![], vec![], vec![]]), (2, vec![2], [vec![], vec![], vec![]])];
        let both = encoded(&frames, true, true);
        let (first, second) = both.split_at(both.len() / 2);
        assert_eq!(decoded(&[first, first].concat(), 100, false, true), Err(Malformed::Forged { sequence: 1 }));
        assert_eq!(decoded(second, 100, false, true), Err(Malformed::Forged { sequence: 0 }));
        let bare = encoded(&frames, true, false);
        assert_eq!(decoded(&bare, 100, false, true), Err(Malformed::Forged { sequence: 0 }));
    }

    #[test]
    fn a_length_over_the_limit_is_refused_on_the_preamble_alone() {
        let bytes = encoded(&[(1, vec![], [vec![], vec![], vec![0; 2000]])], true, false);
        let mut reader = Reader::new(Limits { front: 10, data: 1999 }, None);
        let found = reader.next(&mut &bytes[..PREAMBLE_BYTES]).unwrap_err();
        assert_eq!(found, Malformed::TooLong { length: 2000, limit: 1999 });
        assert_eq!(reader.next(&mut &b""[..]).unwrap_err(), found, "there is no going on");
    }

    #[test]
    fn nothing_of_a_body_is_taken_before_memory_is_given_for_it() {
        let bytes = encoded(&[(1, vec![5], [vec![1, 2, 3], vec![], vec![]])], true, false);
        let mut reader = Reader::new(LIMITS, None);
        let mut input = &bytes[..];
        assert!(matches!(reader.next(&mut input).unwrap(), Step::Head(_)));
        let left = input.len();
        assert!(matches!(reader.next(&mut input).unwrap(), Step::Incomplete));
        assert_eq!(input.len(), left);
        assert!(reader.land([Buffer::EMPTY, Buffer::EMPTY, Buffer::EMPTY]).is_err(), "wrong lengths");
        assert!(reader.land([Buffer::zeroed(3, 1), Buffer::EMPTY, Buffer::EMPTY]).is_ok());
        assert!(matches!(reader.next(&mut input).unwrap(), Step::Whole));
    }

    #[test]
    fn small_frames_lie_one_behind_the_other_for_one_send() {
        let mut writer = Writer::new(true, None);
        let small = Bytes::from_static(&[1; 64]);
        for _ in 0..10 {
            writer.frame(16, &[0; 28], [small.clone(), Bytes::new(), Bytes::new()], 1);
        }
        let mut slices = [IoSlice::new(&[]); 16];
        assert_eq!(writer.slices(&mut slices), 1);
        assert_eq!(slices[0].len(), writer.len());
    }

    fn opens() -> impl Strategy<Value = Open> {
        let cookies = (1u64.., any::<u32>()).prop_map(|(id, epoch)| Cookie { id, epoch });
        let address = proptest::option::of((any::<IpAddr>(), 1u16..)).prop_map(|address| {
            let (ip, port) = address?;
            Some(SocketAddr::new(to_v6(ip).to_canonical(), port))
        });
        (any::<[u64; 3]>(), address, cookies.clone(), proptest::option::of(cookies), any::<bool>()).prop_map(
            |([entity, attempt, heard], address, from, to, lossy)| Open {
                entity: Entity(entity),
                address,
                from,
                to,
                attempt,
                heard,
                lossy,
            },
        )
    }

    fn signals() -> impl Strategy<Value = Signal> {
        prop_oneof![
            opens().prop_map(Signal::Open),
            opens().prop_map(Signal::Opened),
            any::<u64>().prop_map(|attempt| Signal::Retry { attempt }),
            any::<u64>().prop_map(|heard| Signal::Ack { heard }),
            (1u8..5).prop_map(|code| Signal::Refused(Refusal::of(code).unwrap())),
            prop::sample::select(vec![Signal::Reset, Signal::Wait, Signal::Ping, Signal::Pong, Signal::Close]),
        ]
    }

    proptest! {
        #[test]
        fn every_signal_arrives_as_it_was_sent_and_no_byte_may_be_missing(signal in signals()) {
            let (tag, head, length) = signal.encode();
            prop_assert_eq!(Signal::decode(tag, &head[..length]), Ok(signal));
            if length > 0 {
                prop_assert!(Signal::decode(tag, &head[..length - 1]).is_err());
            }
        }

        #[test]
        fn every_label_arrives_as_it_was_sent(number: u64, heard: u64, transaction: u64, kind: u16) {
            let label = Label { number, heard, transaction, kind };
            prop_assert_eq!(Label::decode(&label.encode()), Ok(label));
        }

        #[test]
        fn any_head_is_a_signal_or_an_error(tag: u8, head in proptest::collection::vec(any::<u8>(), 0..70)) {
            if let Ok(signal) = Signal::decode(tag, &head) {
                let (again, bytes, length) = signal.encode();
                prop_assert_eq!(again, tag);
                prop_assert_eq!(bytes[..length].len(), head.len());
            }
        }
    }
}
