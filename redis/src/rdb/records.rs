//! Records of small values that follow each other: what most of a snapshot of small values consists of. They are read
//! in place, one after the other, and nothing is copied.
//!
//! ```text
//!   … │ FC <time> 00 <key> <value> │ 10 <key> <hash> │ F9 <freq> 00 <key> <value> │ 15 <key> <stream> │ …
//!     ╰─────────────────── records of a run ───────────────────────────────────────╯  ends the run
//! ```
//!
//! A run ends at the first record that is anything else: of another type, compressed, too long, cut off or damaged. The
//! scanner or the server's own loader then says what it is.

use super::collection::{COLLECTION_TYPES, Collection, TYPE_STRING};
use super::input::STRING_BYTES_MAX;
use super::reader::{Content, Reader};
use super::{OPCODE_EXPIRETIME_MS, OPCODE_FREQ, OPCODE_IDLE};

/// Bytes that a record has at most besides its key and its value: expiry, usage, type and two lengths.
pub const RECORD_HEAD_BYTES_MAX: usize = 9 + 10 + 1 + 9 + 9;

/// Longest key of such a record, in bytes.
pub const RECORD_KEY_BYTES_MAX: usize = STRING_BYTES_MAX;

/// A key whose value is small.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Record<'a> {
    /// Its key.
    pub key: Content<'a>,
    /// Its value.
    pub value: Value<'a>,
    /// When it expires, in milliseconds since 1970.
    pub expires_ms: Option<u64>,
    /// Idle time or use counter, if the snapshot has it.
    pub usage: Option<Usage>,
}

/// A value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Value<'a> {
    /// A string.
    String(Content<'a>),
    /// A hash, a list, a set or a sorted set. Nothing but its length has been looked at.
    Collection(Collection<'a>),
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
        let kind = loop {
            match input.byte()? {
                // A time before 1970 is left to the server.
                OPCODE_EXPIRETIME_MS => {
                    expires_ms = Some(u64::try_from(i64::from_le_bytes(input.array()?)).ok()?);
                }
                OPCODE_IDLE => usage = Some(Usage::Idle(input.number()?)),
                OPCODE_FREQ => usage = Some(Usage::Frequency(input.byte()?)),
                kind => break kind,
            }
        };
        if kind != TYPE_STRING && !COLLECTION_TYPES.contains(&kind) {
            return None;
        }
        let key = input.content(STRING_BYTES_MAX + 1)?;
        let value = match kind {
            TYPE_STRING => Value::String(input.content(self.below)?),
            _ => Value::Collection(Collection::read(kind, input, self.below)?),
        };
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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use proptest::prelude::*;

    use super::super::Writer;
    use super::*;

    fn bytes(text: &[u8]) -> Content<'_> {
        Content::Bytes(text)
    }

    fn string(value: Content<'_>) -> Value<'_> {
        Value::String(value)
    }

    #[test]
    fn a_run_has_every_string_with_all_that_belongs_to_it() {
        let run =
            b"\x00\x01a\x03one\xFC\x01\0\0\0\0\0\0\0\xF8\x07\x00\x01b\xC0\xFB\xF9\x09\x00\xC1\x39\x30\xC2\x01\0\0\x80";
        let mut records = Records::new(run, 10);
        let plain = Record { key: bytes(b"a"), value: string(bytes(b"one")), expires_ms: None, usage: None };
        assert_eq!(records.next(), Some(plain));
        let idle = Some(Usage::Idle(7));
        let expiring =
            Record { key: bytes(b"b"), value: string(Content::Number(-5)), expires_ms: Some(1), usage: idle };
        assert_eq!(records.next(), Some(expiring));
        let (key, value) = (Content::Number(12345), string(Content::Number(i32::MIN + 1)));
        let counted = Record { key, value, expires_ms: None, usage: Some(Usage::Frequency(9)) };
        assert_eq!(records.next(), Some(counted));
        assert_eq!((records.next(), records.taken()), (None, run.len()));
    }

    #[test]
    fn a_run_has_small_collections_among_its_strings() {
        let run = b"\x00\x01a\x03one\x04\x01h\x01\x01f\x01v\xFC\x01\0\0\0\0\0\0\0\x10\x01l\x03abc\x00\x01b\x01c";
        let mut records = Records::new(run, 10);
        let collection = |kind, bytes| Value::Collection(Collection { kind, bytes });
        let values: Vec<_> = records.by_ref().map(|record| (record.value, record.expires_ms)).collect();
        let wanted = [
            (string(bytes(b"one")), None),
            (collection(4, &b"\x01\x01f\x01v"[..]), None),
            (collection(16, b"\x03abc"), Some(1)),
            (string(bytes(b"c")), None),
        ];
        assert_eq!((&values[..], records.taken()), (&wanted[..], run.len()));
    }

    #[test]
    fn a_run_ends_before_anything_else() {
        let one = b"\x00\x01a\x03one";
        for other in [
            &b"\x0A\x01h\x05abcde"[..],                            // a ziplist of an old server
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
