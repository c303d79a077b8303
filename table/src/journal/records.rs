//! Parsing the records of a slot: copied from a memory into bytes of our own, and checked there.
//!
//! The copy comes first. The proof that the slot was not overwritten meanwhile comes after it, from the caller. So the
//! copied bytes may be anything, and are treated as such.

use remora_fabric::{View, memory::crc};

use crate::{
    encoding::{Decoder, Method},
    error::Error,
    layout::{RECORD_HEADER_BYTES, RecordHeader, SEALED_RECORD_HEADER_BYTES},
    seal::{Seal, TAG_BYTES},
};

/// A chunk is closed once it has this many bytes: enough that its fixed cost is small, few enough to be passed on soon.
/// One record may exceed it, by less than a slot.
const CHUNK_BYTES: usize = 256 << 10;

/// A range to read, and its limit.
pub(super) struct Window<'a> {
    pub(super) memory: &'a View,
    /// Offset of the slot's image in that memory.
    pub(super) base: u64,
    pub(super) slot_size: u32,
    /// Bytes of the slot that are published and present.
    pub(super) limit: u32,
    /// The records are ciphertext, and have tags.
    pub(super) is_sealed: bool,
}

/// Records that were copied and not verified yet.
pub(super) struct Copied {
    pub(super) bytes: Vec<u8>,
    records: Vec<Record>,
    /// Offset in the slot of the next record.
    pub(super) inner: u32,
    /// The invalid header that ended the copy, if there was one.
    malformed: Option<RecordHeader>,
}

/// One of them.
struct Record {
    /// Its end in the bytes.
    end: usize,
    /// The CRC-32C in its header.
    crc: u32,
    /// Zeros in a plain journal.
    tag: [u8; TAG_BYTES],
    /// As in its header.
    encoding: u8,
}

/// What is wrong with copied records.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Damage {
    /// The CRC-32C in the header, and that of the bytes.
    Checksum { want: u32, got: u32 },
    /// The record whose first byte has this offset was not sealed by the source.
    Forged { offset: u64 },
    /// A record that is compressed gives no bytes; by which method, and why.
    Encoding { method: Method, why: String },
    /// The record whose first byte has this offset is compressed, by a method with this number, and may not be.
    Unknown { offset: u64, encoding: u8 },
}

impl Damage {
    /// The error, for a slot that was read again.
    pub(super) fn of(self, slot: u64) -> Error {
        match self {
            Damage::Checksum { want, got } => Error::Corrupt { slot, want, got },
            Damage::Forged { offset } => Error::Forged { what: format!("the record at stream offset {offset}") },
            Damage::Encoding { method, why } => Error::Encoding { slot, method, why },
            Damage::Unknown { offset, encoding } => Error::Layout(format!(
                "the record at stream offset {offset} is compressed by method {encoding}, which is not expected here: use \
                 the same release on both ends"
            )),
        }
    }
}

impl Window<'_> {
    /// Whether no record begins at `inner`, now or later.
    pub(super) fn is_slot_end(&self, inner: u32) -> bool {
        self.slot_size.saturating_sub(inner) <= self.header_bytes()
    }

    fn header_bytes(&self) -> u32 {
        if self.is_sealed { SEALED_RECORD_HEADER_BYTES } else { RECORD_HEADER_BYTES }
    }

    /// Copies records from `inner` on, up to the limit or until the chunk is full.
    pub(super) fn copy(&self, inner: u32) -> Result<Copied, Error> {
        let room = (self.limit.saturating_sub(inner) as usize).min(CHUNK_BYTES);
        let mut copied = Copied { bytes: Vec::with_capacity(room), records: Vec::new(), inner, malformed: None };
        while copied.inner < self.limit && !self.is_slot_end(copied.inner) && copied.bytes.len() < CHUNK_BYTES {
            let mut header = [0; RECORD_HEADER_BYTES as usize];
            self.memory.read(self.base + u64::from(copied.inner), &mut header)?;
            let header = RecordHeader::from_bytes(&header);
            let Some(next) = self.end_of(copied.inner, &header) else {
                copied.malformed = Some(header);
                break;
            };
            let mut tag = [0; TAG_BYTES];
            let at = self.base + u64::from(copied.inner);
            if self.is_sealed {
                self.memory.read(at + u64::from(RECORD_HEADER_BYTES), &mut tag)?;
            }
            let start = copied.bytes.len();
            copied.bytes.resize(start + header.length as usize, 0);
            self.memory.read(at + u64::from(self.header_bytes()), &mut copied.bytes[start..])?;
            let encoding = header.encoding;
            copied.records.push(Record { end: copied.bytes.len(), crc: header.crc, tag, encoding });
            copied.inner = next;
        }
        Ok(copied)
    }

    fn end_of(&self, inner: u32, header: &RecordHeader) -> Option<u32> {
        let end = inner.checked_add(self.header_bytes())?.checked_add(header.length)?;
        (header.length > 0 && end <= self.limit).then_some(end)
    }
}

impl Copied {
    /// Checks each record's CRC, opens the records of a sealed journal, and decompresses those that are compressed. The
    /// first of them has the offset `offset`. Call it only after the slot has proved not to be overwritten.
    ///
    /// `decoder`: that of a journal with compressed records.
    pub(super) fn check(
        &mut self,
        seal: Option<&Seal>,
        mut offset: u64,
        mut decoder: Option<&mut Decoder>,
    ) -> Result<(), Damage> {
        let (mut start, mut plain) = (0, Vec::new());
        let is_encoded = self.records.iter().any(|record| record.encoding != 0);
        for &Record { end, crc: want, ref tag, encoding } in &self.records {
            let bytes = &mut self.bytes[start..end];
            let got = crc::crc32c(bytes);
            if got != want {
                return Err(Damage::Checksum { want, got });
            }
            if let Some(seal) = seal {
                seal.open_record(offset, encoding, tag, bytes).map_err(|_| Damage::Forged { offset })?;
            }
            let bytes = match (Method::from_code(encoding), &mut decoder) {
                _ if encoding == 0 => &*bytes,
                (Some(method), Some(decoder)) => {
                    decoder.decode_record(method, 0, bytes).map_err(|error| Damage::Encoding {
                        method,
                        why: match error {
                            Error::Encoding { why, .. } => why,
                            other => other.to_string(),
                        },
                    })?;
                    &decoder.plain
                }
                _ => return Err(Damage::Unknown { offset, encoding }),
            };
            offset = offset.saturating_add(bytes.len() as u64);
            if is_encoded {
                plain.extend_from_slice(bytes);
            }
            start = end;
        }
        if is_encoded {
            self.bytes = plain;
        }
        match self.malformed {
            None => Ok(()),
            // There is no CRC to compare; the one in the header identifies the record well enough.
            Some(header) => Err(Damage::Checksum { want: header.crc, got: 0 }),
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    #![allow(clippy::unwrap_used)]

    use proptest::prelude::*;
    use remora_fabric::{Memory, Pages};

    use super::*;

    fn window(memory: &Memory, limit: u32) -> Window<'_> {
        Window { memory, base: 0, slot_size: 4096, limit, is_sealed: false }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn no_bytes_at_all_make_it_read_beyond_the_limit(
            bytes in prop::collection::vec(any::<u8>(), 4096),
            inner in 0u32..4096,
            limit in 0u32..=4096,
        ) {
            let memory = Memory::create("records", 4096, Pages::Small).unwrap();
            memory.write(0, &bytes).unwrap();
            let copied = window(&memory, limit).copy(inner).unwrap();
            prop_assert!(copied.inner <= limit.max(inner));
            prop_assert!(copied.bytes.len() <= limit as usize);
        }
    }

    #[test]
    fn a_flipped_bit_is_named_with_both_checksums() {
        let memory = Memory::create("records", 4096, Pages::Small).unwrap();
        let header = RecordHeader { length: 5, encoding: 0, crc: crc::crc32c(b"hello") };
        memory.write(0, &header.to_bytes()).unwrap();
        memory.write(8, b"hellp").unwrap();
        let mut copied = window(&memory, 13).copy(0).unwrap();
        let damage = Damage::Checksum { want: header.crc, got: crc::crc32c(b"hellp") };
        assert_eq!(copied.check(None, 1, None), Err(damage));
    }
}
