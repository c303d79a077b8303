//! An endless stream in slots: the replication stream after the snapshot. The newest slot replaces the oldest.
//!
//! ```text
//!   slot:  ├ length, CRC-32C ┤ bytes ┼ length, CRC-32C ┤ bytes … ┼─ 0 to 8 bytes unused ─┤
//! ```
//!
//! A stream has no boundaries that must be kept, so an append that does not fit is split into two records. Therefore
//! every slot but the open one is full, except for at most 8 bytes in which no record fits, and a reader knows where to
//! continue in the next one. Offsets are replication offsets: the first byte of the journal is `first_offset + 1`.

mod reader;

use std::collections::VecDeque;
use std::sync::Arc;

use reader::{InPlace, Track};
use remora_fabric::memory::crc;
use remora_fabric::{Memory, View};

use crate::encoding::{Decoder, Encoder, LEAST_RECORD_BYTES, MOST_RECORD_BYTES, Method};
use crate::error::Error;
use crate::expectation::Expectation;
use crate::layout::{
    Entry, Geometry, Identity, Kind, RECORD_HEADER_BYTES, RecordHeader, SEALED_RECORD_HEADER_BYTES, State,
    record_header_bytes,
};
use crate::publish::Publisher;
use crate::seal::{Seal, SealKey, TAG_BYTES};
use crate::snapshot::lay_out;

pub use reader::{Chunk, JournalReader, Room};

// The writer of a journal: appends, and overwrites the oldest slot when it must. It does not wait for readers.

/// Writes one journal into one memory.
pub struct JournalWriter {
    memory: Arc<Memory>,
    geometry: Geometry,
    publisher: Publisher<Arc<Memory>>,
    /// Replication offset of the first byte of each slot held, oldest first.
    positions: VecDeque<u64>,
    /// Slots opened so far; the last of them is open.
    opened: u64,
    /// Bytes written in the open slot, headers included.
    used: u32,
    /// Replication offset of the next byte.
    end_offset: u64,
    /// That of a sealed journal.
    seal: Option<Arc<Seal>>,
    /// Where a record is while it is sealed.
    scratch: Vec<u8>,
    /// Of a journal with compressed records.
    encoder: Option<Encoder>,
    /// Whether the next records are compressed.
    compresses: bool,
}

impl JournalWriter {
    /// Creates an empty journal in `memory`, which may hold anything, such as the table of an earlier generation. No
    /// reader may have access to it yet; access that readers had to an earlier table must be revoked. The journal's
    /// first byte has the offset `identity.first_offset + 1`.
    ///
    /// # Errors
    /// [`Error::Layout`] if the geometry is outside its limits or the memory too small for it, [`Error::Misuse`] if the
    /// identity is that of a snapshot.
    pub fn create(memory: Arc<Memory>, geometry: Geometry, identity: Identity) -> Result<JournalWriter, Error> {
        Self::with(memory, geometry, identity, None, None)
    }

    /// Creates an empty journal whose records are ciphertext. `key` must not have been used before.
    ///
    /// # Errors
    /// As for [`create`](Self::create).
    pub fn create_sealed(
        memory: Arc<Memory>,
        geometry: Geometry,
        identity: Identity,
        key: &SealKey,
    ) -> Result<JournalWriter, Error> {
        let seal = Arc::new(Seal::new(key, &identity)?);
        Self::with(memory, geometry, identity, Some(seal), None)
    }

    /// The same with records that may be compressed ([`compress`](Self::compress)).
    ///
    /// # Errors
    /// As for [`create`](Self::create).
    pub fn create_compressed(
        memory: Arc<Memory>,
        geometry: Geometry,
        identity: Identity,
        key: &SealKey,
    ) -> Result<JournalWriter, Error> {
        let seal = Arc::new(Seal::new(key, &identity)?);
        Self::with(memory, geometry, identity, Some(seal), Some(Encoder::default()))
    }

    /// Whether the next records are compressed, by LZ4: those that are long enough, if that saves a tenth of them.
    /// Without effect unless the journal has compressed records.
    pub fn compress(&mut self, compresses: bool) {
        self.compresses = compresses;
    }

    fn with(
        memory: Arc<Memory>,
        geometry: Geometry,
        identity: Identity,
        seal: Option<Arc<Seal>>,
        encoder: Option<Encoder>,
    ) -> Result<JournalWriter, Error> {
        if identity.kind != Kind::Journal {
            return Err(Error::Misuse("the identity of a journal must have the kind Journal"));
        }
        let end_offset = identity.origin.offset.saturating_add(1);
        let publisher = lay_out(&memory, geometry, identity, seal.clone(), encoder.is_some())?;
        // As if a slot before the first were full: the first append opens the first slot.
        let used = geometry.slot_size;
        let (positions, scratch) = (VecDeque::new(), Vec::new());
        Ok(JournalWriter {
            memory,
            geometry,
            publisher,
            positions,
            opened: 0,
            used,
            end_offset,
            seal,
            scratch,
            encoder,
            compresses: false,
        })
    }

    /// Appends bytes of the stream; readers may take them at once.
    ///
    /// # Errors
    /// [`Error::Misuse`] after [`abort`](Self::abort).
    pub fn append(&mut self, mut bytes: &[u8]) -> Result<(), Error> {
        if self.state() != State::Open {
            return Err(Error::Misuse("append() on a journal that was aborted"));
        }
        while !bytes.is_empty() {
            if self.room() == 0 {
                self.open_slot()?;
            }
            let most = if self.compresses { self.room().min(MOST_RECORD_BYTES) } else { self.room() };
            let (record, rest) = bytes.split_at(bytes.len().min(most as usize));
            self.append_record(record)?;
            bytes = rest;
        }
        Ok(())
    }

    /// Aborts the journal: readers take what it holds and then find it aborted.
    pub fn abort(&mut self) {
        // These are stores into our own memory, which was checked at the start, so they cannot fail. If one did, the
        // readers would learn of the abort through the messenger.
        let _ = self.publisher.abort();
    }

    /// Replication offset of the oldest byte still held: a reader may begin here or later. For an empty journal, the
    /// offset of its first byte.
    pub fn first_offset(&self) -> u64 {
        self.positions.front().copied().unwrap_or(self.end_offset)
    }

    /// Replication offset of the byte that will be appended next: one more than the newest held.
    pub fn end_offset(&self) -> u64 {
        self.end_offset
    }

    /// Open or aborted.
    pub fn state(&self) -> State {
        self.publisher.line().state
    }

    /// The table's shape.
    pub fn geometry(&self) -> Geometry {
        self.geometry
    }

    /// Bytes of a record that fit into the open slot, after the header.
    fn room(&self) -> u32 {
        (self.geometry.slot_size - self.used).saturating_sub(record_header_bytes(self.seal.as_deref()))
    }

    fn open_slot(&mut self) -> Result<(), Error> {
        let number = self.opened;
        if self.positions.len() == self.geometry.slots as usize {
            // The last warning to readers; only then may the bytes change.
            self.publisher.retire(number + 1 - u64::from(self.geometry.slots))?;
            self.positions.pop_front();
        }
        self.publisher.begin(number)?;
        // The records have their own lengths and CRCs, so the entry is complete before the first of them.
        let position = self.end_offset;
        let entry = Entry::plain(number, position, 0, 0);
        self.publisher.complete(entry)?;
        self.positions.push_back(position);
        self.opened += 1;
        self.used = 0;
        Ok(())
    }

    fn append_record(&mut self, bytes: &[u8]) -> Result<(), Error> {
        let slot = self.opened - 1;
        let at = self.geometry.slot_offset(slot) + u64::from(self.used);
        let header_bytes = record_header_bytes(self.seal.as_deref());
        let encoded = match &mut self.encoder {
            Some(encoder) if self.compresses && bytes.len() >= LEAST_RECORD_BYTES => {
                encoder.encode(Method::Lz4, bytes, crc::crc32c(bytes))?
            }
            _ => None,
        };
        let encoding = encoded.as_ref().map_or(0, |_| Method::Lz4.code());
        let stored = match &self.seal {
            None => bytes,
            Some(seal) => {
                let sealed = encoded.unwrap_or_else(|| {
                    self.scratch.clear();
                    self.scratch.extend_from_slice(bytes);
                    &mut self.scratch
                });
                let tag = seal.seal_record(self.end_offset, encoding, sealed)?;
                self.memory.write(at + u64::from(RECORD_HEADER_BYTES), &tag)?;
                sealed
            }
        };
        let header = RecordHeader { length: stored.len() as u32, encoding, crc: crc::crc32c(stored) };
        self.memory.write(at, &header.to_bytes())?;
        self.memory.write(at + u64::from(header_bytes), stored)?;
        self.used += header_bytes + header.length;
        self.end_offset += bytes.len() as u64;
        self.publisher.publish(self.geometry.start_of(slot) + u64::from(self.used))
    }
}

/// Passes all bytes of a journal from `start` on to `take`, in order. No process may write it any more. An append that
/// its writer did not complete is not there: readers could not have got it either.
///
/// # Errors
/// It is another table than expected, no longer reaches back to `start`, or is damaged; and what `take` fails with.
pub fn journal_left<E: From<Error>>(
    view: &Arc<View>,
    expect: Expectation,
    start: u64,
    mut take: impl FnMut(&[u8]) -> Result<(), E>,
) -> Result<(), E> {
    let geometry = expect.geometry.checked()?;
    let mut memory = InPlace::new(view.clone(), &geometry)?;
    let mut track = Track::new(expect, start);
    while !track.is_at_end() {
        // It fails after some attempts if its writer ended in the middle of a change of the line.
        memory.look(&mut track)?;
        while let Some(chunk) = track.take() {
            take(&chunk.bytes)?;
        }
    }
    Ok(())
}

// Parsing the records of a slot: copied from a memory into bytes of our own, and checked there.
//
// The copy comes first. The proof that the slot was not overwritten meanwhile comes after it, from the caller. So the
// copied bytes may be anything, and are treated as such.

/// A chunk is closed once it has this many bytes: enough that its fixed cost is small, few enough to be passed on soon.
/// One record may exceed it, by less than a slot.
const CHUNK_BYTES: usize = 256 << 10;

/// A range to read, and its limit.
struct Window<'a> {
    memory: &'a View,
    /// Offset of the slot's image in that memory.
    base: u64,
    slot_size: u32,
    /// Bytes of the slot that are published and present.
    limit: u32,
    /// The records are ciphertext, and have tags.
    is_sealed: bool,
}

/// Records that were copied and not verified yet.
struct Copied {
    bytes: Vec<u8>,
    records: Vec<Record>,
    /// Offset in the slot of the next record.
    inner: u32,
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
enum Damage {
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
    fn of(self, slot: u64) -> Error {
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
    fn is_slot_end(&self, inner: u32) -> bool {
        self.slot_size.saturating_sub(inner) <= self.header_bytes()
    }

    fn header_bytes(&self) -> u32 {
        if self.is_sealed { SEALED_RECORD_HEADER_BYTES } else { RECORD_HEADER_BYTES }
    }

    /// Copies records from `inner` on, up to the limit or until the chunk is full.
    fn copy(&self, inner: u32) -> Result<Copied, Error> {
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
    fn check(&mut self, seal: Option<&Seal>, mut offset: u64, mut decoder: Option<&mut Decoder>) -> Result<(), Damage> {
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
    use crate::layout::Geometry;
    use crate::layout::Kind;
    use crate::tests::{FIRST_OFFSET, Random, expect, identity, used_memory};

    const GEOMETRY: Geometry = Geometry { slot_size: 4096, slots: 4 };

    fn view(memory: &Memory) -> Arc<View> {
        Arc::new(View::open(memory.as_fd().try_clone_to_owned().unwrap(), memory.length()).unwrap())
    }

    fn left(memory: &Memory, start: u64) -> Result<Vec<u8>, Error> {
        let mut found = Vec::new();
        journal_left(&view(memory), expect(GEOMETRY), start, |bytes| {
            found.extend_from_slice(bytes);
            Ok::<_, Error>(())
        })?;
        Ok(found)
    }

    #[test]
    fn all_bytes_from_the_offset_on_are_found_after_every_append_and_after_an_abort() {
        for seed in 0..20 {
            let mut random = Random(seed);
            let memory = used_memory(&GEOMETRY, &mut random);
            let mut writer = JournalWriter::create(memory.clone(), GEOMETRY, identity(Kind::Journal)).unwrap();
            let mut truth = Vec::new();
            assert_eq!(left(&memory, FIRST_OFFSET + 1).unwrap(), b"", "nothing was appended");
            for _ in 0..80 {
                let length = 1 + random.below(900) as usize;
                let bytes = random.bytes(length);
                writer.append(&bytes).unwrap();
                truth.extend_from_slice(&bytes);
                let skip = (writer.first_offset() - FIRST_OFFSET - 1) as usize;
                assert_eq!(left(&memory, writer.first_offset()).unwrap(), &truth[skip..], "seed {seed}");
            }
            assert_eq!(left(&memory, writer.end_offset() - 1).unwrap(), &truth[truth.len() - 1..]);
            assert_eq!(left(&memory, writer.end_offset()).unwrap(), b"");
            let error = left(&memory, FIRST_OFFSET + 1).unwrap_err();
            assert!(matches!(error, Error::Overrun { .. }), "the first bytes were overwritten: {error}");
            writer.abort();
            assert_eq!(left(&memory, writer.end_offset() - 1).unwrap(), &truth[truth.len() - 1..]);
        }
    }

    #[test]
    fn what_its_writer_did_not_publish_is_not_there_and_damage_is_found() {
        let memory = used_memory(&GEOMETRY, &mut Random(3));
        let mut writer = JournalWriter::create(memory.clone(), GEOMETRY, identity(Kind::Journal)).unwrap();
        writer.append(b"published").unwrap();
        // A writer that was killed between the bytes of a record and the line.
        memory.write(GEOMETRY.slot_offset(0) + 8 + 9, &[0xff; 64]).unwrap();
        assert_eq!(left(&memory, FIRST_OFFSET + 1).unwrap(), b"published");
        memory.write(GEOMETRY.slot_offset(0) + 8, b"P").unwrap();
        left(&memory, FIRST_OFFSET + 1).unwrap_err();
        // A writer that was killed in the middle of a change of the line.
        let memory = used_memory(&GEOMETRY, &mut Random(4));
        JournalWriter::create(memory.clone(), GEOMETRY, identity(Kind::Journal)).unwrap();
        memory.write(crate::layout::LINE_OFFSET, &[1]).unwrap();
        left(&memory, FIRST_OFFSET + 1).unwrap_err();
    }

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
