//! A frame of the message layer: a fixed preamble, a head, up to three bodies, their checksums. Pure: bytes in, frames
//! out; no socket, no clock. The meaning of tags and heads is in [`crate::signal`].
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

mod reader;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::io::IoSlice;

use bytes::Bytes;
use hmac::{Hmac, Mac};
use remora_wire::derive;
use sha2::Sha256;

use crate::buffer::Buffer;
use crate::handshake::Role;
pub use reader::{Reader, Step, Unfit};

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
