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
mod writer;

pub use self::reader::{Reader, Step, Unfit};
pub use self::writer::Writer;

use crate::buffer::Buffer;

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

#[cfg(test)]
mod tests;
