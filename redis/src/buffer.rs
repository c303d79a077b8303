//! Bytes that have arrived and are not decoded yet. Both decoders of [`crate::resp`] read from such a buffer.
//!
//! Two guarantees keep the decoders linear in the bytes that arrive: no line is scanned twice for its end, and a long
//! bulk string that is complete is moved out of the buffer instead of copied.

/// A bulk string of at least this size takes the buffer's allocation with it instead of being copied. Below this size,
/// a copy is cheaper than losing the warm buffer.
const STEAL_BYTES: usize = 64 * 1024;

#[derive(Debug, Default)]
pub(crate) struct Buffer {
    bytes: Vec<u8>,
    /// Bytes at the front that were already taken.
    start: usize,
    /// Bytes after `start` that are known to contain no line feed.
    scanned: usize,
}

/// A line exceeds the length limit. Its full length is unknown, since the buffer does not wait for its end.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct LineTooLong;

impl Buffer {
    pub(crate) fn feed(&mut self, bytes: &[u8]) {
        // The rest is moved to the front only after at least as many bytes were taken. This bounds the cost of all
        // moves.
        if self.start >= self.bytes.len() / 2 {
            self.compact();
        }
        self.bytes.extend_from_slice(bytes);
    }

    pub(crate) fn len(&self) -> usize {
        self.bytes.len() - self.start
    }

    /// The number of bytes allocated. Tests use it to show that it follows the bytes that arrived.
    #[cfg(any(test, feature = "fuzzing"))]
    pub(crate) fn capacity(&self) -> usize {
        self.bytes.capacity()
    }

    pub(crate) fn peek(&self) -> Option<u8> {
        self.bytes.get(self.start).copied()
    }

    /// The next line without its line feed; `None` until the line is complete.
    pub(crate) fn line(&mut self, limit: usize) -> Result<Option<&[u8]>, LineTooLong> {
        let fresh = self.bytes.get(self.start + self.scanned..).unwrap_or_default();
        let found = fresh.iter().position(|byte| *byte == b'\n');
        let length = self.scanned + found.unwrap_or(fresh.len());
        if length > limit {
            return Err(LineTooLong);
        }
        if found.is_none() {
            self.scanned = length;
            return Ok(None);
        }
        let line = self.start..self.start + length;
        self.consume(length + 1);
        Ok(self.bytes.get(line))
    }

    /// Announces that the next `count` bytes will be taken at once: a long bulk string then begins at the front, where
    /// it can be moved out.
    pub(crate) fn expect(&mut self, count: usize) {
        if count >= STEAL_BYTES {
            self.compact();
        }
    }

    /// The next `count` bytes; `None` until all have arrived.
    pub(crate) fn take(&mut self, count: usize) -> Option<Vec<u8>> {
        if self.len() < count {
            return None;
        }
        if count >= STEAL_BYTES {
            self.compact();
            let rest = self.bytes.split_off(count);
            return Some(std::mem::replace(&mut self.bytes, rest));
        }
        let taken = self.bytes.get(self.start..self.start + count)?.to_vec();
        self.consume(count);
        Some(taken)
    }

    pub(crate) fn take_rest(&mut self) -> Vec<u8> {
        self.compact();
        self.scanned = 0;
        std::mem::take(&mut self.bytes)
    }

    fn consume(&mut self, count: usize) {
        self.start += count;
        self.scanned = 0;
    }

    fn compact(&mut self) {
        self.bytes.drain(..self.start);
        self.start = 0;
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn a_long_bulk_is_moved_out_and_not_copied() {
        let mut buffer = Buffer::default();
        buffer.feed(b"$65536\r\n");
        assert_eq!(buffer.line(100).unwrap().unwrap(), b"$65536\r");
        buffer.expect(STEAL_BYTES);
        buffer.feed(&[7; STEAL_BYTES]);
        buffer.feed(b"\r\n+next");
        let before = buffer.bytes.as_ptr();
        let bulk = buffer.take(STEAL_BYTES).unwrap();
        assert_eq!(bulk.as_ptr(), before);
        assert_eq!(bulk, vec![7; STEAL_BYTES]);
        assert_eq!(buffer.take_rest(), b"\r\n+next");
    }

    #[test]
    fn a_line_without_an_end_is_refused_wherever_it_was_cut() {
        for cut in 0..=11 {
            let mut buffer = Buffer::default();
            let text = b"abcdefghijk";
            let mut outcome = Ok(());
            for part in [&text[..cut], &text[cut..]] {
                buffer.feed(part);
                outcome = outcome.and(buffer.line(10).map(|line| assert_eq!(line, None)));
            }
            assert_eq!(outcome, Err(LineTooLong), "cut at {cut}");
        }
    }
}
