//! The head of a snapshot: magic, version, auxiliary fields.

use super::input::{Input, STRING_BYTES_MAX, Stop, too_long};
use super::{Error, FIRST_VALKEY_VERSION, OPCODE_AUX};
use crate::{ReplId, text};

/// Maximum number of auxiliary fields. Servers write about ten.
const FIELDS_MAX: usize = 64;

/// `REDIS0011` and `VALKEY080` are both nine bytes.
pub(super) const MAGIC_BYTES: usize = 9;

/// Before Redis 7 the script cache is saved as fields of this name, of any size and number, after the last key; without
/// keys, that is directly after the head. These fields therefore count as content.
const SCRIPT_FIELD: &[u8] = b"lua";

/// The format family.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Magic {
    /// `REDIS` and four digits: all versions of Redis, Valkey before 9, and Valkey 9 towards older replicas.
    Redis,
    /// `VALKEY` and three digits: Valkey from 9 on.
    Valkey,
}

/// What a snapshot contains before its first key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Head {
    /// The format family.
    pub magic: Magic,
    /// Version of the format: 9 is Redis 5 and 6, 10 is 7.0, 11 is 7.2 and Valkey 7.2 to 8, from 12 on Redis 7.4 and
    /// later, from 80 on Valkey 9 and later.
    pub version: u32,
    /// Names and values, in their order. Numbers are converted to text.
    pub aux: Vec<(Vec<u8>, Vec<u8>)>,
}

impl Head {
    /// Maximum size of a head, in bytes: a reader that has collected this much can give up. It is the sum of the magic
    /// and of `FIELDS_MAX` fields with an opcode and two strings, each with a length of at most 9 + 9 + 1 bytes before
    /// it.
    pub const BYTES_MAX: usize = MAGIC_BYTES + FIELDS_MAX * (1 + 2 * (19 + STRING_BYTES_MAX));

    /// Parses the head at the beginning of a snapshot, and returns its length in bytes. `None` if more bytes are
    /// needed: the end of the head shows only in the byte after it.
    pub fn parse(bytes: &[u8]) -> Result<Option<(Head, usize)>, Error> {
        let mut input = Input { bytes, position: 0 };
        match Head::read(&mut input) {
            Ok(head) => Ok(Some((head, input.position))),
            Err(Stop::Incomplete) => Ok(None),
            Err(Stop::Broken(error)) => Err(error),
        }
    }

    /// The value of a field.
    pub fn get(&self, name: &str) -> Option<&[u8]> {
        let (_, value) = self.aux.iter().find(|(found, _)| found == name.as_bytes())?;
        Some(value)
    }

    /// The history the snapshot belongs to (`repl-id`).
    pub fn replid(&self) -> Option<ReplId> {
        ReplId::parse(self.get("repl-id")?).ok()
    }

    /// The last byte of the stream that the snapshot contains (`repl-offset`).
    pub fn offset(&self) -> Option<u64> {
        text::decimal_u64(self.get("repl-offset")?)
    }

    /// The database that the stream after the snapshot writes to until it selects one (`repl-stream-db`).
    pub fn stream_db(&self) -> Option<u32> {
        text::decimal_u64(self.get("repl-stream-db")?)?.try_into().ok()
    }

    fn read(input: &mut Input<'_>) -> Result<Head, Stop> {
        let (magic, version) = read_magic(input)?;
        let mut aux = Vec::new();
        while input.peek()? == OPCODE_AUX {
            let field = input.position;
            input.take(1)?;
            let name = input.string("the name of a field")?;
            if name == SCRIPT_FIELD {
                input.position = field;
                break;
            }
            if aux.len() == FIELDS_MAX {
                return Err(too_long("fields", aux.len() as u64 + 1, FIELDS_MAX));
            }
            aux.push((name, input.string("the value of a field")?));
        }
        Ok(Head { magic, version, aux })
    }
}

pub(super) fn read_magic(input: &mut Input<'_>) -> Result<(Magic, u32), Stop> {
    let rest = input.rest();
    let not_rdb = || Stop::Broken(Error::NotRdb { found: text::excerpt(rest.get(..MAGIC_BYTES).unwrap_or(rest)) });
    // A few bytes are enough to see that it is not a snapshot.
    let could_be = |magic: &[u8]| magic.iter().zip(rest).all(|(wanted, found)| wanted == found);
    if !could_be(b"REDIS") && !could_be(b"VALKEY") {
        return Err(not_rdb());
    }
    let bytes = input.take(MAGIC_BYTES)?;
    let (magic, digits) = match (bytes.strip_prefix(b"REDIS"), bytes.strip_prefix(b"VALKEY")) {
        (Some(digits), _) => (Magic::Redis, digits),
        (_, Some(digits)) => (Magic::Valkey, digits),
        _ => return Err(not_rdb()),
    };
    let version = text::decimal_u64(digits).and_then(|version| u32::try_from(version).ok());
    let version = version.ok_or_else(not_rdb)?;
    let fits = magic == Magic::Redis || version >= FIRST_VALKEY_VERSION;
    if fits { Ok((magic, version)) } else { Err(not_rdb()) }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::super::Writer;
    use super::*;
    use proptest::prelude::*;

    fn whole(bytes: &[u8]) -> (Head, usize) {
        Head::parse(bytes).unwrap().unwrap()
    }

    #[test]
    fn both_magics_and_their_versions_are_read() {
        for (bytes, magic, version) in [
            (b"REDIS0009\xFE", Magic::Redis, 9),
            (b"REDIS0012\xFF", Magic::Redis, 12),
            (b"VALKEY080\xF5", Magic::Valkey, 80),
        ] {
            assert_eq!(whole(bytes), (Head { magic, version, aux: vec![] }, MAGIC_BYTES));
        }
    }

    #[test]
    fn what_does_not_begin_like_a_snapshot_is_refused_at_once() {
        for wrong in [&b"PK"[..], b"REDIX", b"VALKEX", b"REDIS00x1", b"VALKEY011", b"REDIS+011", b"<html>"] {
            assert!(matches!(Head::parse(wrong), Err(Error::NotRdb { .. })), "{wrong:?}");
        }
        for short in [&b""[..], b"R", b"REDIS001", b"VALKEY08", b"REDIS0011"] {
            assert_eq!(Head::parse(short), Ok(None), "{short:?}");
        }
    }

    #[test]
    fn every_encoding_of_a_field_is_read() {
        let long = [b'v'; 100];
        let values: [(&[u8], &[u8]); 9] = [
            (b"\x03abc", b"abc"),
            (&[&[0x40, 100], &long[..]].concat(), &long),
            (&[&[0x80, 0, 0, 0, 100], &long[..]].concat(), &long),
            (&[&[0x81, 0, 0, 0, 0, 0, 0, 0, 100], &long[..]].concat(), &long),
            (&[0xC0, 0xFF], b"-1"),
            (&[0xC1, 0x00, 0x80], b"-32768"),
            (&[0xC2, 0xFF, 0xFF, 0xFF, 0x7F], b"2147483647"),
            (&[0xC3, 5, 40, 0, b'0', 7 << 5, 30, 0], &[b'0'; 40]),
            (b"\x00", b""),
        ];
        for (encoded, value) in values {
            let bytes = [b"REDIS0011\xFA\x01k", encoded, b"\xFF"].concat();
            let (head, length) = whole(&bytes);
            assert_eq!(head.get("k"), Some(value), "{encoded:?}");
            assert_eq!(length, bytes.len() - 1);
        }
    }

    #[test]
    fn damaged_fields_are_errors() {
        for field in [
            &[0xC4][..],              // no such encoding
            &[0x82],                  // no such length
            &[0xC3, 0xC0],            // a special encoding for a length
            &[0xC3, 2, 9, 1 << 5, 0], // a run from before the beginning
            &[0x50, 1],               // 4,097 bytes
            &[0x81, 255, 255, 255, 255, 255, 255, 255, 255],
            &[0xC3, 1, 0x80, 0xFF, 0xFF, 0xFF, 0xFF], // expands to 4 GiB
        ] {
            let bytes = [b"REDIS0011\xFA", field, &[0; 20]].concat();
            assert!(Head::parse(&bytes).is_err(), "{field:?}");
        }
        let endless = [&b"REDIS0011"[..], &b"\xFA\x01k\x01v".repeat(FIELDS_MAX + 1)].concat();
        assert!(matches!(Head::parse(&endless), Err(Error::TooLong { what: "fields", .. })));
    }

    #[test]
    fn the_place_in_the_stream_is_found() {
        let replid = "8c1c6b2f0d6a4e7b9a0f1e2d3c4b5a6978695a4b";
        let mut writer = Writer::new(11);
        writer.aux("repl-stream-db", "3").aux("repl-id", replid).aux("repl-offset", "307366");
        let (head, _) = whole(&writer.finish());
        assert_eq!(head.replid(), Some(replid.parse().unwrap()));
        assert_eq!((head.stream_db(), head.offset()), (Some(3), Some(307_366)));
        let (head, _) = whole(b"REDIS0011\xFA\x0erepl-stream-db\xC0\xFF\xFF");
        assert_eq!((head.replid(), head.stream_db(), head.offset()), (None, None, None));
    }

    #[test]
    fn scripts_of_an_empty_data_set_are_content_however_long() {
        let head = b"REDIS0009\xFA\x01k\x01v";
        let bytes = [&head[..], b"\xFA\x03lua\x80\x10\x00\x00\x00"].concat();
        assert_eq!(whole(&bytes).1, head.len());
    }

    proptest! {
        #[test]
        fn what_is_written_is_read_and_every_beginning_is_incomplete(
            fields in proptest::collection::vec((proptest::collection::vec(any::<u8>(), 4..30), proptest::collection::vec(any::<u8>(), 0..300)), 0..8),
            version in prop_oneof![1_u32..80, 80_u32..1000],
        ) {
            let mut writer = Writer::new(version);
            for (name, value) in &fields {
                writer.aux(name, value);
            }
            let bytes = writer.finish();
            let (head, length) = whole(&bytes);
            prop_assert_eq!(&head.aux, &fields);
            prop_assert_eq!(head.version, version);
            prop_assert_eq!(head.magic == Magic::Valkey, version >= 80);
            prop_assert_eq!(length, bytes.len() - super::super::TAIL_BYTES);
            for cut in 0..=length {
                prop_assert_eq!(Head::parse(&bytes[..cut]), Ok(None));
            }
        }
    }
}
