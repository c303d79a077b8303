//! Parsing the records of a slot: copied from a memory into bytes of our own, and checked there.
//!
//! The copy comes first. The proof that the slot was not overwritten meanwhile comes after it, from the caller. So the
//! copied bytes may be anything, and are treated as such.

use remora_fabric::{View, memory::crc};

use crate::{
    error::Error,
    layout::{RECORD_HEADER_BYTES, RecordHeader},
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
}

/// Records that were copied and not verified yet.
pub(super) struct Copied {
    pub(super) bytes: Vec<u8>,
    /// The end of each record in `bytes`, and the CRC-32C in its header.
    records: Vec<(usize, u32)>,
    /// Offset in the slot of the next record.
    pub(super) inner: u32,
    /// The invalid header that ended the copy, if there was one.
    malformed: Option<RecordHeader>,
}

/// What is wrong with copied records.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Damage {
    pub(super) want: u32,
    pub(super) got: u32,
}

impl Window<'_> {
    /// Whether no record begins at `inner`, now or later.
    pub(super) fn is_slot_end(&self, inner: u32) -> bool {
        self.slot_size.saturating_sub(inner) <= RECORD_HEADER_BYTES
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
            let start = copied.bytes.len();
            copied.bytes.resize(start + header.length as usize, 0);
            let at = self.base + u64::from(copied.inner) + u64::from(RECORD_HEADER_BYTES);
            self.memory.read(at, &mut copied.bytes[start..])?;
            copied.records.push((copied.bytes.len(), header.crc));
            copied.inner = next;
        }
        Ok(copied)
    }

    fn end_of(&self, inner: u32, header: &RecordHeader) -> Option<u32> {
        let end = inner.checked_add(RECORD_HEADER_BYTES)?.checked_add(header.length)?;
        (header.length > 0 && end <= self.limit).then_some(end)
    }
}

impl Copied {
    /// Checks each record's CRC. Call it only after the slot has proved not to be overwritten.
    pub(super) fn check(&self) -> Result<(), Damage> {
        let mut start = 0;
        for &(end, want) in &self.records {
            let got = crc::crc32c(&self.bytes[start..end]);
            if got != want {
                return Err(Damage { want, got });
            }
            start = end;
        }
        match self.malformed {
            None => Ok(()),
            // There is no CRC to compare; the one in the header identifies the record well enough.
            Some(header) => Err(Damage { want: header.crc, got: 0 }),
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
        Window { memory, base: 0, slot_size: 4096, limit }
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
        let header = RecordHeader { length: 5, crc: crc::crc32c(b"hello") };
        memory.write(0, &header.to_bytes()).unwrap();
        memory.write(8, b"hellp").unwrap();
        let copied = window(&memory, 13).copy(0).unwrap();
        assert_eq!(copied.check(), Err(Damage { want: header.crc, got: crc::crc32c(b"hellp") }));
    }
}
