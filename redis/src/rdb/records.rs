//! Records of short strings that follow each other: what most of a snapshot of small values consists of. They are read
//! in place, one after the other, and nothing is copied.
//!
//! ```text
//!   … │ FC <time> 00 <key> <value> │ 00 <key> <value> │ F9 <freq> 00 <key> <value> │ 04 <key> <hash> │ …
//!     ╰─────────────────── records of a run ────────────────────────────────────────╯  ends the run
//! ```
//!
//! A run ends at the first record that is anything else: of another type, compressed, too long, cut off or damaged. The
//! scanner or the server's own loader then says what it is.

use super::grammar::TYPE_STRING;
use super::input::STRING_BYTES_MAX;
use super::{OPCODE_EXPIRETIME_MS, OPCODE_FREQ, OPCODE_IDLE};

/// Bytes that a record has at most besides its key and its value: expiry, usage, type and two lengths.
pub const RECORD_HEAD_BYTES_MAX: usize = 9 + 10 + 1 + 9 + 9;

/// Longest key of such a record, in bytes.
pub const RECORD_KEY_BYTES_MAX: usize = STRING_BYTES_MAX;

/// A key whose value is a short string.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Record<'a> {
    /// Its key.
    pub key: Content<'a>,
    /// Its value.
    pub value: Content<'a>,
    /// When it expires, in milliseconds since 1970.
    pub expires_ms: Option<u64>,
    /// Idle time or use counter, if the snapshot has it.
    pub usage: Option<Usage>,
}

/// A key or a value: servers write short decimal numbers in binary.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Content<'a> {
    /// The bytes.
    Bytes(&'a [u8]),
    /// A number, which stands for its decimal digits.
    Number(i32),
}

/// How a key was used, as the eviction policies count it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Usage {
    /// Seconds since the last use.
    Idle(u64),
    /// A logarithmic counter of uses.
    Frequency(u8),
}

/// The records at the beginning of `bytes`.
#[derive(Debug, Clone)]
pub struct Records<'a> {
    bytes: &'a [u8],
    at: usize,
    below: usize,
}

impl<'a> Records<'a> {
    /// The records whose values have fewer than `below` bytes.
    pub fn new(bytes: &'a [u8], below: u64) -> Records<'a> {
        Records { bytes, at: 0, below: usize::try_from(below).unwrap_or(usize::MAX) }
    }

    /// How many bytes the records have that were returned so far.
    pub fn taken(&self) -> usize {
        self.at
    }

    fn record(&self, input: &mut Reader<'a>) -> Option<Record<'a>> {
        let (mut expires_ms, mut usage) = (None, None);
        loop {
            match input.byte()? {
                TYPE_STRING => break,
                // A time before 1970 is left to the server.
                OPCODE_EXPIRETIME_MS => {
                    expires_ms = Some(u64::try_from(i64::from_le_bytes(input.array()?)).ok()?);
                }
                OPCODE_IDLE => usage = Some(Usage::Idle(input.number()?)),
                OPCODE_FREQ => usage = Some(Usage::Frequency(input.byte()?)),
                _ => return None,
            }
        }
        let key = input.content(STRING_BYTES_MAX + 1)?;
        let value = input.content(self.below)?;
        Some(Record { key, value, expires_ms, usage })
    }
}

impl<'a> Iterator for Records<'a> {
    type Item = Record<'a>;

    fn next(&mut self) -> Option<Record<'a>> {
        let mut input = Reader { rest: self.bytes.get(self.at..)? };
        let record = self.record(&mut input)?;
        self.at = self.bytes.len() - input.rest.len();
        Some(record)
    }
}

struct Reader<'a> {
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    fn byte(&mut self) -> Option<u8> {
        let (first, rest) = self.rest.split_first()?;
        self.rest = rest;
        Some(*first)
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (array, rest) = self.rest.split_first_chunk()?;
        self.rest = rest;
        Some(*array)
    }

    /// A length where nothing else is allowed.
    fn number(&mut self) -> Option<u64> {
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

    fn content(&mut self, below: usize) -> Option<Content<'a>> {
        let number = match self.byte()? {
            0xC0 => i32::from(i8::from_le_bytes(self.array()?)),
            0xC1 => i32::from(i16::from_le_bytes(self.array()?)),
            0xC2 => i32::from_le_bytes(self.array()?),
            first => {
                let length = usize::try_from(self.length(first)?).ok().filter(|length| *length < below)?;
                let (bytes, rest) = self.rest.split_at_checked(length)?;
                self.rest = rest;
                return Some(Content::Bytes(bytes));
            }
        };
        Some(Content::Number(number))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use proptest::prelude::*;

    use super::super::Writer;
    use super::*;

    fn bytes(text: &[u8]) -> Content<'_> {
        Content::Bytes(text)
    }

    #[test]
    fn a_run_has_every_string_with_all_that_belongs_to_it() {
        let run =
            b"\x00\x01a\x03one\xFC\x01\0\0\0\0\0\0\0\xF8\x07\x00\x01b\xC0\xFB\xF9\x09\x00\xC1\x39\x30\xC2\x01\0\0\x80";
        let mut records = Records::new(run, 10);
        let plain = Record { key: bytes(b"a"), value: bytes(b"one"), expires_ms: None, usage: None };
        assert_eq!(records.next(), Some(plain));
        let idle = Some(Usage::Idle(7));
        let expiring = Record { key: bytes(b"b"), value: Content::Number(-5), expires_ms: Some(1), usage: idle };
        assert_eq!(records.next(), Some(expiring));
        let (key, value) = (Content::Number(12345), Content::Number(i32::MIN + 1));
        let counted = Record { key, value, expires_ms: None, usage: Some(Usage::Frequency(9)) };
        assert_eq!(records.next(), Some(counted));
        assert_eq!((records.next(), records.taken()), (None, run.len()));
    }

    #[test]
    fn a_run_ends_before_anything_else() {
        let one = b"\x00\x01a\x03one";
        for other in [
            &b"\x04\x01h\x01\x01f\x01v"[..],                       // a hash
            b"\x00\x01z\xC3\x05\x28\x000\xE0\x1E\x00",             // a compressed value
            b"\x00\x01l\x0Atenletters",                            // as long as the limit
            b"\xFC\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\x00\x01a\x01b", // a time before 1970
            b"\xFE\x01",                                           // another database
            b"\x00\x01a\x82",                                      // a length of no encoding
            b"\xFF\0\0\0\0\0\0\0\0",
        ] {
            let all = [&one[..], other].concat();
            let mut records = Records::new(&all, 10);
            assert_eq!(records.by_ref().count(), 1, "{other:?}");
            assert_eq!(records.taken(), one.len());
        }
    }

    proptest! {
        #[test]
        fn a_run_that_is_cut_ends_with_its_last_whole_record(
            strings in proptest::collection::vec((proptest::collection::vec(any::<u8>(), 0..80), 0_usize..300, any::<Option<u32>>()), 1..20),
            cut in any::<prop::sample::Index>(),
        ) {
            let mut writer = Writer::new(11);
            let head = writer.clone().finish().len() - super::super::TAIL_BYTES;
            let mut ends = vec![0];
            for (key, length, expires) in &strings {
                writer.string(key, vec![b'v'; *length], expires.map(u64::from));
                ends.push(writer.clone().finish().len() - super::super::TAIL_BYTES - head);
            }
            let all = writer.finish();
            let run = &all[head..all.len() - super::super::TAIL_BYTES];
            let cut = cut.index(run.len() + 1);
            let mut records = Records::new(&run[..cut], 300);
            let found = records.by_ref().count();
            let whole = ends.iter().filter(|end| **end <= cut).count() - 1;
            prop_assert_eq!((found, records.taken()), (whole, ends[whole]));
        }

        #[test]
        fn any_bytes_are_read_without_a_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let mut records = Records::new(&bytes, 100);
            records.by_ref().for_each(drop);
            prop_assert!(records.taken() <= bytes.len());
        }
    }
}
