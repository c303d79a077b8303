//! A frame of the handshake: a fixed preamble, the payload, their checksums. Pure: bytes in, frames out.
//!
//! The meaning of the tags is in [`crate::handshake`]. After the handshake come the frames of the message layer
//! ([`crate::frame`]), which have another layout. A checksum finds accidental changes.
//!
//! ```text
//!   0      2    3      4            8                 12              12+n            16+n
//!   ┌──────┬────┬──────┬────────────┬─────────────────┬───────────────┬───────────────┐
//!   │ "Rm" │tag │flags │ length n   │ CRC-32C of 0..8 │ payload       │ CRC-32C of it │
//!   │      │    │zero  │ u32        │ u32             │ n bytes       │ u32           │
//!   └──────┴────┴──────┴────────────┴─────────────────┴───────────────┴───────────────┘
//! ```
//!
//! The preamble has a checksum of its own, so that a damaged length is not believed. The length is compared with its
//! bound before any byte of the payload is awaited.

use super::error::FrameError;

/// A complete frame with valid checksums.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Frame {
    /// The meaning of the payload.
    pub tag: u8,
    /// The content.
    pub payload: Vec<u8>,
}

impl Frame {
    /// Makes a frame.
    pub fn plain(tag: u8, payload: Vec<u8>) -> Frame {
        Frame { tag, payload }
    }

    /// Appends the frame's bytes. They depend only on the fields: a received frame encodes to the bytes received.
    pub fn encode(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&preamble(self.tag, &self.payload));
        out.extend_from_slice(&self.payload);
        out.extend_from_slice(&remora_memory::crc::crc32c(&self.payload).to_le_bytes());
    }
}

/// The twelve bytes before the payload.
fn preamble(tag: u8, payload: &[u8]) -> [u8; PREAMBLE_BYTES] {
    let length = u32::try_from(payload.len())
        .expect("the codec bounds every payload by MAX_HANDSHAKE_PAYLOAD_BYTES before it is framed");
    let mut bytes = [0; PREAMBLE_BYTES];
    bytes[..2].copy_from_slice(&FRAME_MAGIC);
    bytes[2] = tag;
    bytes[4..8].copy_from_slice(&length.to_le_bytes());
    let checksum = remora_memory::crc::crc32c(&bytes[..8]);
    bytes[8..].copy_from_slice(&checksum.to_le_bytes());
    bytes
}

/// Finds frames in bytes that arrive in pieces.
///
/// Its memory grows with the bytes received, never with the length in a preamble. If every frame is taken after each
/// [`Decoder::feed`], it holds less than one frame of the greatest length plus the last piece.
#[derive(Debug)]
pub struct Decoder {
    buffer: Vec<u8>,
    /// Bytes of `buffer` that belong to frames already taken. The next `feed` removes them.
    taken: usize,
    limit: u32,
}

impl Decoder {
    /// A decoder that accepts payloads of at most `limit` bytes.
    pub fn new(limit: u32) -> Decoder {
        Decoder { buffer: Vec::new(), taken: 0, limit }
    }

    /// Adds received bytes.
    pub fn feed(&mut self, bytes: &[u8]) {
        self.buffer.drain(..self.taken);
        self.taken = 0;
        self.buffer.extend_from_slice(bytes);
    }

    /// Returns the next complete frame, or `None` if it has not arrived completely.
    ///
    /// # Errors
    /// [`FrameError`]: the next frame cannot be found after this; close the connection.
    pub fn next_frame(&mut self) -> Result<Option<Frame>, FrameError> {
        let rest = self.buffer.get(self.taken..).unwrap_or_default();
        let Some((preamble, rest)) = rest.split_first_chunk::<PREAMBLE_BYTES>() else {
            return check_start(rest).map(|()| None);
        };
        let head = Head::parse(preamble, self.limit)?;
        let Some((payload, rest)) = rest.split_at_checked(head.length) else {
            return Ok(None);
        };
        let Some(checksum) = rest.first_chunk::<CHECKSUM_BYTES>() else {
            return Ok(None);
        };
        if remora_memory::crc::crc32c(payload) != u32::from_le_bytes(*checksum) {
            return Err(FrameError::Checksum { part: "payload" });
        }
        let frame = Frame { tag: head.tag, payload: payload.to_vec() };
        self.taken += PREAMBLE_BYTES + head.length + CHECKSUM_BYTES;
        Ok(Some(frame))
    }

    /// Stops finding frames, and returns the bytes that belong to none yet.
    pub fn take_rest(&mut self) -> Vec<u8> {
        let rest = self.buffer.split_off(self.taken.min(self.buffer.len()));
        (self.buffer, self.taken) = (Vec::new(), 0);
        rest
    }

    /// Number of bytes held that belong to no frame taken yet.
    pub fn buffered(&self) -> usize {
        self.buffer.len() - self.taken
    }
}

/// The content of a preamble.
struct Head {
    tag: u8,
    length: usize,
}

impl Head {
    fn parse(bytes: &[u8; PREAMBLE_BYTES], limit: u32) -> Result<Head, FrameError> {
        let [m0, m1, tag, flags, l0, l1, l2, l3, c0, c1, c2, c3] = *bytes;
        check_start(&[m0, m1])?;
        if remora_memory::crc::crc32c(&bytes[..8]) != u32::from_le_bytes([c0, c1, c2, c3]) {
            return Err(FrameError::Checksum { part: "preamble" });
        }
        if flags != 0 {
            return Err(FrameError::Flags { flags });
        }
        let length = u32::from_le_bytes([l0, l1, l2, l3]);
        if length > limit {
            return Err(FrameError::TooLong { length, limit });
        }
        Ok(Head { tag, length: length as usize })
    }
}

/// Checks the magic as far as it has arrived: other protocols are recognised by their first byte.
fn check_start(bytes: &[u8]) -> Result<(), FrameError> {
    let length = bytes.len().min(FRAME_MAGIC.len());
    if bytes[..length] == FRAME_MAGIC[..length] {
        return Ok(());
    }
    Err(FrameError::Magic)
}

/// The longest payload of a frame, in bytes. The challenge has 54, and may grow in later versions. This bounds the
/// memory that an unauthenticated peer can take.
pub const MAX_HANDSHAKE_PAYLOAD_BYTES: u32 = 256;

/// Length of a preamble, in bytes.
pub const PREAMBLE_BYTES: usize = 12;

/// Length of the payload's checksum, in bytes.
const CHECKSUM_BYTES: usize = 4;

/// The first bytes of a frame.
const FRAME_MAGIC: [u8; 2] = *b"Rm";

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use proptest::prelude::*;

    fn encoded(frame: &Frame) -> Vec<u8> {
        let mut out = Vec::new();
        frame.encode(&mut out);
        out
    }

    fn frames() -> impl Strategy<Value = Frame> {
        let payload = proptest::collection::vec(any::<u8>(), 0..300);
        (any::<u8>(), payload).prop_map(|(tag, payload)| Frame { tag, payload })
    }

    proptest! {
        #[test]
        fn frames_survive_any_cutting_of_their_bytes(
            sent in proptest::collection::vec(frames(), 0..8),
            piece in 1usize..50,
        ) {
            let bytes: Vec<u8> = sent.iter().flat_map(encoded).collect();
            let mut decoder = Decoder::new(300);
            let mut received = Vec::new();
            for piece in bytes.chunks(piece) {
                decoder.feed(piece);
                while let Some(frame) = decoder.next_frame().unwrap() {
                    received.push(frame);
                }
            }
            prop_assert_eq!(received, sent);
            prop_assert_eq!(decoder.buffered(), 0);
        }

        #[test]
        fn a_changed_byte_is_never_taken_for_the_frame(frame in frames(), at in any::<prop::sample::Index>(), change in 1u8..) {
            let mut bytes = encoded(&frame);
            let at = at.index(bytes.len());
            bytes[at] ^= change;
            let mut decoder = Decoder::new(300);
            decoder.feed(&bytes);
            prop_assert!(decoder.next_frame().is_err(), "a damaged frame is taken, or waited for");
        }

        #[test]
        fn any_bytes_are_frames_or_an_error(bytes in proptest::collection::vec(any::<u8>(), 0..600)) {
            crate::fuzzing::frames(&bytes);
        }
    }

    #[test]
    fn a_frame_cut_short_anywhere_is_waited_for() {
        let frame = Frame { tag: 7, payload: b"content".to_vec() };
        let bytes = encoded(&frame);
        for length in 0..bytes.len() {
            let mut decoder = Decoder::new(300);
            decoder.feed(&bytes[..length]);
            assert_eq!(decoder.next_frame().unwrap(), None, "{length} bytes");
            decoder.feed(&bytes[length..]);
            assert_eq!(decoder.next_frame().unwrap().as_ref(), Some(&frame));
        }
    }

    #[test]
    fn an_oversize_frame_is_refused_by_its_preamble_alone() {
        let bytes = encoded(&Frame::plain(1, vec![0; 11]));
        let mut decoder = Decoder::new(10);
        decoder.feed(&bytes[..PREAMBLE_BYTES]);
        let found = decoder.next_frame().unwrap_err();
        assert_eq!(found, FrameError::TooLong { length: 11, limit: 10 });
    }

    #[test]
    fn unknown_flags_are_refused() {
        let mut bytes = encoded(&Frame::plain(1, Vec::new()));
        bytes[3] = 1;
        let checksum = remora_memory::crc::crc32c(&bytes[..8]).to_le_bytes();
        bytes[8..12].copy_from_slice(&checksum);
        let mut decoder = Decoder::new(10);
        decoder.feed(&bytes);
        assert_eq!(decoder.next_frame().unwrap_err(), FrameError::Flags { flags: 1 });
    }

    #[test]
    fn the_first_wrong_byte_is_enough() {
        let mut decoder = Decoder::new(10);
        decoder.feed(b"H");
        assert_eq!(decoder.next_frame().unwrap_err(), FrameError::Magic);
    }

    #[test]
    fn memory_follows_what_arrived_not_what_was_announced() {
        const LONG_BYTES: u32 = 512 * 1024;
        let bytes = encoded(&Frame::plain(1, vec![0; LONG_BYTES as usize]));
        let mut decoder = Decoder::new(LONG_BYTES);
        decoder.feed(&bytes[..100]);
        assert_eq!(decoder.next_frame().unwrap(), None);
        assert!(decoder.buffer.capacity() < 1000);
    }
}
