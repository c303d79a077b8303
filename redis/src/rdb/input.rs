//! A forward reader over the bytes of a snapshot that have arrived: lengths and strings in all their encodings. Not a
//! buffer: the caller keeps the bytes and tries again with more of them.

use super::Error;

/// Longest string that is read instead of skipped, in bytes: names and values of fields, keys. The longest that servers
/// write in a field is the replid with its 40 bytes; a key may be longer, and is then not examined.
pub(super) const STRING_BYTES_MAX: usize = 4 * 1024;

/// The bytes that are left to read.
pub(super) struct Input<'a> {
    pub(super) bytes: &'a [u8],
    pub(super) position: usize,
}

/// Why reading stopped.
pub(super) enum Stop {
    Incomplete,
    Broken(Error),
}

/// A length, or what may take its place.
pub(super) enum Length {
    Plain(u64),
    /// The encoding of a string instead of a length.
    Special(u8),
}

impl<'a> Input<'a> {
    pub(super) fn rest(&self) -> &'a [u8] {
        self.bytes.get(self.position..).unwrap_or_default()
    }

    pub(super) fn peek(&self) -> Result<u8, Stop> {
        self.rest().first().copied().ok_or(Stop::Incomplete)
    }

    pub(super) fn take(&mut self, count: usize) -> Result<&'a [u8], Stop> {
        let taken = self.rest().get(..count).ok_or(Stop::Incomplete)?;
        self.position += count;
        Ok(taken)
    }

    pub(super) fn array<const N: usize>(&mut self) -> Result<[u8; N], Stop> {
        let taken = self.rest().first_chunk::<N>().ok_or(Stop::Incomplete)?;
        self.position += N;
        Ok(*taken)
    }

    /// Two bits tell how to read the rest: 6 bits, 14 bits, 32 or 64 bits with the high byte first, or a special
    /// encoding.
    pub(super) fn length(&mut self) -> Result<Length, Stop> {
        let [first] = self.array()?;
        let low = first & 0x3F;
        match (first >> 6, first) {
            (0, _) => Ok(Length::Plain(low.into())),
            (1, _) => {
                let [second] = self.array()?;
                Ok(Length::Plain(u16::from_be_bytes([low, second]).into()))
            }
            (2, 0x80) => Ok(Length::Plain(u32::from_be_bytes(self.array()?).into())),
            (2, 0x81) => Ok(Length::Plain(u64::from_be_bytes(self.array()?))),
            (2, _) => Err(malformed("a length of an unknown encoding")),
            _ => Ok(Length::Special(low)),
        }
    }

    /// A length where nothing else is allowed.
    pub(super) fn number(&mut self) -> Result<u64, Stop> {
        match self.length()? {
            Length::Plain(number) => Ok(number),
            Length::Special(_) => Err(malformed("an encoding in place of a length")),
        }
    }

    /// A string: a length and bytes, a number, or compressed bytes.
    pub(super) fn string(&mut self, what: &'static str) -> Result<Vec<u8>, Stop> {
        match self.length()? {
            Length::Plain(length) => Ok(self.take(bounded(what, length)?)?.to_vec()),
            Length::Special(0) => Ok(i8::from_le_bytes(self.array()?).to_string().into_bytes()),
            Length::Special(1) => Ok(i16::from_le_bytes(self.array()?).to_string().into_bytes()),
            Length::Special(2) => Ok(i32::from_le_bytes(self.array()?).to_string().into_bytes()),
            Length::Special(3) => self.compressed(what),
            Length::Special(_) => Err(malformed("a string of an unknown encoding")),
        }
    }

    fn compressed(&mut self, what: &'static str) -> Result<Vec<u8>, Stop> {
        let (Length::Plain(packed), Length::Plain(length)) = (self.length()?, self.length()?) else {
            return Err(malformed("a compressed string without its lengths"));
        };
        let (packed, length) = (bounded(what, packed)?, bounded(what, length)?);
        expand_lzf(self.take(packed)?, length).ok_or_else(|| malformed("a compressed string that does not expand"))
    }

    /// The beginning of a string that is skipped: how many bytes follow.
    pub(super) fn string_to_skip(&mut self) -> Result<u64, Stop> {
        match self.length()? {
            Length::Plain(length) => Ok(length),
            Length::Special(0) => Ok(1),
            Length::Special(1) => Ok(2),
            Length::Special(2) => Ok(4),
            Length::Special(3) => {
                let packed = self.number()?;
                self.number()?;
                Ok(packed)
            }
            Length::Special(_) => Err(malformed("a string of an unknown encoding")),
        }
    }
}

fn bounded(what: &'static str, length: u64) -> Result<usize, Stop> {
    match usize::try_from(length) {
        Ok(length) if length <= STRING_BYTES_MAX => Ok(length),
        _ => Err(too_long(what, length, STRING_BYTES_MAX)),
    }
}

pub(super) fn too_long(what: &'static str, size: u64, limit: usize) -> Stop {
    Stop::Broken(Error::TooLong { what, size, limit: limit as u64 })
}

pub(super) fn malformed(what: &'static str) -> Stop {
    Stop::Broken(Error::Malformed { what })
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
pub(super) fn expand_lzf(packed: &[u8], length: usize) -> Option<Vec<u8>> {
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
        assert_eq!(expand_lzf(&[2, b'a', b'b', b'c'], 3), Some(b"abc".to_vec()));
        // "ab", then 4 bytes from 2 back: a run that overlaps itself.
        assert_eq!(expand_lzf(&[1, b'a', b'b', 2 << 5, 1], 6), Some(b"ababab".to_vec()));
        // "0", then 39 bytes from 1 back: how servers compress a replid of zeros.
        assert_eq!(expand_lzf(&[0, b'0', 7 << 5, 30, 0], 40), Some(vec![b'0'; 40]));
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
            assert_eq!(expand_lzf(packed, length), None, "{packed:?}");
        }
    }
}
