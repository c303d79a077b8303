//! What a server's module sends to the agent during a sweep: frames of records, and a mark behind the last one. Pure.
//!
//! ```text
//!   length (u32, little-endian) │ that many bytes of the snapshot      … any number of times
//!   0                           │ number of keys (u64, little-endian)  the snapshot is whole
//! ```
//!
//! A connection that ends without the mark has no whole snapshot.

/// Bytes before a frame.
pub const HEAD_BYTES: usize = 4;

/// The longest frame in bytes: more than the module ever keeps for an agent.
pub const FRAME_BYTES_MAX: usize = 1 << 30;

const END_BYTES: usize = HEAD_BYTES + 8;

/// The head of a frame of `bytes` bytes.
pub fn frame_head(bytes: usize) -> [u8; HEAD_BYTES] {
    u32::try_from(bytes).unwrap_or(u32::MAX).to_le_bytes()
}

/// The mark of a whole snapshot.
pub fn end(keys: u64) -> [u8; END_BYTES] {
    let mut bytes = [0; END_BYTES];
    bytes[HEAD_BYTES..].copy_from_slice(&keys.to_le_bytes());
    bytes
}

/// What arrives is not what a module sends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    /// A frame is longer than any of a module's.
    #[error("a frame of {0} bytes")]
    TooLong(usize),
    /// Something follows the mark.
    #[error("bytes behind the end")]
    BehindTheEnd,
}

/// Takes frames apart, in whatever pieces they arrive.
#[derive(Debug, Default)]
pub struct Frames {
    /// The beginning of a head, or of the mark.
    head: Vec<u8>,
    /// Bytes of the frame that have not arrived.
    left: usize,
    ended: bool,
}

impl Frames {
    /// Takes bytes, and gives the snapshot's bytes among them to `records`. Returns the number of keys if they end with
    /// the mark.
    ///
    /// # Errors
    /// These are not the frames of a module.
    pub fn take(&mut self, mut bytes: &[u8], mut records: impl FnMut(&[u8])) -> Result<Option<u64>, FrameError> {
        while !bytes.is_empty() {
            if self.ended {
                return Err(FrameError::BehindTheEnd);
            }
            if self.left > 0 {
                let (now, rest) = bytes.split_at(self.left.min(bytes.len()));
                records(now);
                self.left -= now.len();
                bytes = rest;
                continue;
            }
            let wanted = if self.head.starts_with(&[0; HEAD_BYTES]) { END_BYTES } else { HEAD_BYTES };
            let (now, rest) = bytes.split_at((wanted - self.head.len()).min(bytes.len()));
            self.head.extend_from_slice(now);
            bytes = rest;
            self.read_head()?;
        }
        Ok(self.ended.then(|| self.keys()))
    }

    fn read_head(&mut self) -> Result<(), FrameError> {
        let Some(length) = self.head.first_chunk().map(|length| u32::from_le_bytes(*length) as usize) else {
            return Ok(());
        };
        if length == 0 {
            self.ended = self.head.len() == END_BYTES;
            return Ok(());
        }
        if length > FRAME_BYTES_MAX {
            return Err(FrameError::TooLong(length));
        }
        self.left = length;
        self.head.clear();
        Ok(())
    }

    fn keys(&self) -> u64 {
        self.head.last_chunk().map_or(0, |keys| u64::from_le_bytes(*keys))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn frames_are_taken_apart_in_any_pieces_and_end_with_the_mark() {
        let whole = [&frame_head(3)[..], b"abc", &frame_head(5), b"\0\0\0\0d", &end(7)].concat();
        for size in 1..=whole.len() {
            let (mut frames, mut got, mut keys) = (Frames::default(), Vec::new(), None);
            for piece in whole.chunks(size) {
                assert_eq!(keys, None);
                keys = frames.take(piece, |bytes| got.extend_from_slice(bytes)).unwrap();
            }
            assert_eq!((got.as_slice(), keys), (&b"abc\0\0\0\0d"[..], Some(7)), "pieces of {size}");
        }
    }

    #[test]
    fn what_no_module_sends_is_refused() {
        let mut frames = Frames::default();
        assert_eq!(frames.take(&[255; 4], |_| ()), Err(FrameError::TooLong(u32::MAX as usize)));
        let mut frames = Frames::default();
        let behind = [&end(1)[..], b"x"].concat();
        assert_eq!(frames.take(&behind, |_| ()), Err(FrameError::BehindTheEnd));
    }
}
