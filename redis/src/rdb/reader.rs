//! Reads lengths and strings of whole records in place, and copies nothing but what LZF has compressed. `input` reads
//! those of which only a part may have arrived.

/// A key or a string: servers write short decimal numbers in binary.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Content<'a> {
    /// The bytes.
    Bytes(&'a [u8]),
    /// A number, which stands for its decimal digits.
    Number(i32),
}

/// What is left to read of records.
pub(super) struct Reader<'a> {
    pub(super) rest: &'a [u8],
}

impl<'a> Reader<'a> {
    pub(super) fn byte(&mut self) -> Option<u8> {
        let (first, rest) = self.rest.split_first()?;
        self.rest = rest;
        Some(*first)
    }

    pub(super) fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (array, rest) = self.rest.split_first_chunk()?;
        self.rest = rest;
        Some(*array)
    }

    /// A length where nothing else is allowed.
    pub(super) fn number(&mut self) -> Option<u64> {
        let first = self.byte()?;
        self.length(first)
    }

    /// The length that begins with `first`; `None` if it is cut off, or if it is something else.
    fn length(&mut self, first: u8) -> Option<u64> {
        match (first >> 6, first) {
            (0, _) => Some(u64::from(first)),
            (1, _) => Some(u64::from(u16::from_be_bytes([first & 0x3F, self.byte()?]))),
            (2, 0x80) => Some(u64::from(u32::from_be_bytes(self.array()?))),
            (2, 0x81) => Some(u64::from_be_bytes(self.array()?)),
            _ => None,
        }
    }

    pub(super) fn take(&mut self, count: usize) -> Option<&'a [u8]> {
        let (bytes, rest) = self.rest.split_at_checked(count)?;
        self.rest = rest;
        Some(bytes)
    }

    /// A string that is neither compressed nor a number.
    pub(super) fn bytes(&mut self) -> Option<&'a [u8]> {
        let length = self.number()?;
        self.take(usize::try_from(length).ok()?)
    }

    /// A string that is not compressed, of fewer than `below` bytes.
    pub(super) fn content(&mut self, below: usize) -> Option<Content<'a>> {
        let number = match self.byte()? {
            0xC0 => i32::from(i8::from_le_bytes(self.array()?)),
            0xC1 => i32::from(i16::from_le_bytes(self.array()?)),
            0xC2 => i32::from_le_bytes(self.array()?),
            first => {
                let length = usize::try_from(self.length(first)?).ok().filter(|length| *length < below)?;
                return self.take(length).map(Content::Bytes);
            }
        };
        Some(Content::Number(number))
    }
}

// LZF, the compression of strings in a snapshot. Only the short strings of the head are expanded here: servers
// compress a field of more than 20 bytes when that saves four, and a replid may contain repetitions.
//
// ```text
//   000nnnnn  literal…            n + 1 bytes as they are
//   lllooooo  oooooooo            l + 2 bytes from offset + 1 bytes back        (l from 1 to 6)
//   111ooooo  llllllll  oooooooo  l + 9 bytes from offset + 1 bytes back
// ```

/// Expands `packed` to exactly `length` bytes; `None` if it has another length. The caller bounds `length`.
pub(super) fn expand(packed: &[u8], length: usize) -> Option<Vec<u8>> {
    let mut out: Vec<u8> = Vec::new();
    let mut rest = packed;
    while let Some((control, after)) = rest.split_first() {
        let control = usize::from(*control);
        if control < 32 {
            let (literal, after) = after.split_at_checked(control + 1)?;
            out.extend_from_slice(literal);
            rest = after;
        } else {
            let (run, after) = run_length(control >> 5, after)?;
            let (low, after) = after.split_first()?;
            let back = ((control & 0x1F) << 8) + usize::from(*low) + 1;
            copy_back(&mut out, back, run)?;
            rest = after;
        }
        if out.len() > length {
            return None;
        }
    }
    (out.len() == length).then_some(out)
}

fn run_length(short: usize, after: &[u8]) -> Option<(usize, &[u8])> {
    match short {
        7 => after.split_first().map(|(more, after)| (usize::from(*more) + 9, after)),
        _ => Some((short + 2, after)),
    }
}

/// Byte by byte: a run may overlap the bytes that it writes.
fn copy_back(out: &mut Vec<u8>, back: usize, run: usize) -> Option<()> {
    let from = out.len().checked_sub(back)?;
    for place in from..from + run {
        out.push(*out.get(place)?);
    }
    Some(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn literals_and_runs_are_expanded() {
        assert_eq!(expand(&[2, b'a', b'b', b'c'], 3), Some(b"abc".to_vec()));
        // "ab", then 4 bytes from 2 back: a run that overlaps itself.
        assert_eq!(expand(&[1, b'a', b'b', 2 << 5, 1], 6), Some(b"ababab".to_vec()));
        // "0", then 39 bytes from 1 back: how servers compress a replid of zeros.
        assert_eq!(expand(&[0, b'0', 7 << 5, 30, 0], 40), Some(vec![b'0'; 40]));
    }

    #[test]
    fn damage_is_refused() {
        for (packed, length) in [
            (&[3, b'a'][..], 4),        // a literal cut off
            (&[1 << 5], 3),             // a run without its offset
            (&[7 << 5, 1], 10),         // a long run without its offset
            (&[0, b'a', 1 << 5, 1], 4), // a run from before the beginning
            (&[1, b'a', b'b'], 3),      // shorter than promised
            (&[1, b'a', b'b'], 1),      // longer than promised
        ] {
            assert_eq!(expand(packed, length), None, "{packed:?}");
        }
    }
}
