//! A delivered slot, and how its bytes become content: the check against its entry, and its opening if the table is
//! sealed or has compressed slots.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use remora_fabric::{Memory, Pages, View};

use crate::encoding::{Decoder, Method};
use crate::error::Error;
use crate::expectation::Expectation;
use crate::layout::{Entry, Geometry, State};
use crate::publish::load_entry_again;
use crate::seal::{Seal, SlotSeal};

// A delivered slot, and what keeps its bytes where they are: shared by every reader of a snapshot.
//
// A slot outlives the reader that delivered it. So it holds its memory itself, and its release needs no reader.

/// The location of a delivered slot's bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// At this offset of the sink: reserved for the caller until released.
    Sink(u64),
    /// At this offset of the source's own memory. They may be overwritten while they are used, if the table is windowed
    /// and the source believes that we have passed the slot.
    /// [`SnapshotReader::release`](crate::SnapshotReader::release) reports that.
    View(u64),
}

/// A slot whose bytes have been verified. Return it with [`SnapshotReader::release`](crate::SnapshotReader::release).
#[derive(Debug)]
#[must_use = "a slot that is never released keeps its buffer"]
pub struct Slot {
    /// Number of the slot; numbers that the caller holds are skipped.
    pub number: u64,
    /// Position of its first byte in the stream (the RDB).
    pub position: u64,
    /// Bytes of content.
    pub length: u32,
    /// Location of the bytes.
    pub place: Place,
    /// The CRC-32C of those bytes, if they were verified by it. Those of a sealed table were verified by their tag.
    pub(super) crc: Option<u32>,
    pub(super) encoded: Option<Encoded>,
    pub(super) memory: Holder,
    pub(super) geometry: Geometry,
}

/// The bytes of a compressed slot as its source has stored them, before it sealed them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Encoded {
    /// How they are compressed.
    pub method: Method,
    /// The bytes, if the reader keeps them: [`keeping_encoded`](crate::SnapshotReader::keeping_encoded).
    pub bytes: Option<Vec<u8>>,
}

impl Slot {
    /// How the slot was stored if it was compressed, and what was stored.
    pub fn encoded(&self) -> Option<&Encoded> {
        self.encoded.as_ref()
    }

    /// Releases a slot whose reader is gone, and checks that it was intact until now.
    ///
    /// # Errors
    /// As for [`SnapshotReader::release`](crate::SnapshotReader::release).
    pub fn release_alone(self) -> Result<(), Error> {
        match &self.memory {
            Holder::Sink(..) => Ok(()),
            Holder::Copy(_, lent) | Holder::Opened { lent, .. } => {
                lent.give_back(self.number);
                Ok(())
            }
            Holder::View(view) => release_view(view, &self.geometry, &self),
        }
    }

    /// The CRC-32C of the bytes. It is computed here if the slot was decrypted.
    ///
    /// # Errors
    /// [`Error::Fabric`]: the memory cannot be read.
    pub fn crc(&self) -> Result<u32, Error> {
        let (view, range) = self.bytes();
        self.crc.map_or_else(|| Ok(view.crc32c(range)?), Ok)
    }

    /// The memory that holds the bytes, and their range in it.
    pub fn bytes(&self) -> (&View, Range<u64>) {
        let (Place::Sink(offset) | Place::View(offset)) = self.place;
        let range = offset..offset + u64::from(self.length);
        match &self.memory {
            Holder::Sink(memory, _) | Holder::Copy(memory, _) | Holder::Opened { memory, .. } => (memory, range),
            Holder::View(view) => (view, range),
        }
    }
}

/// Keeps a slot's memory mapped, even if the peer that delivered it is gone.
#[derive(Debug)]
pub(super) enum Holder {
    /// A buffer of the sink.
    Sink(Arc<Memory>, u8),
    /// A table of our own, and the accounts of the slots in use.
    Copy(Arc<Memory>, Arc<Lent>),
    /// A buffer in which a slot of a sealed copy was opened. It becomes free when the slot is dropped.
    Opened {
        memory: Arc<Memory>,
        lent: Arc<Lent>,
        _buffer: Buffer,
    },
    View(Arc<View>),
}

/// The caller has used `slot` in the source's memory: checks that it was intact until now.
fn release_view(view: &View, geometry: &Geometry, slot: &Slot) -> Result<(), Error> {
    let wanted = Wanted { number: slot.number, position: slot.position, length: slot.length, compressed: false };
    let got = slot.crc()?;
    let verdict = judge_now(view, &wanted, got, geometry);
    let (_, range) = slot.bytes();
    // The pages are removed from our mapping, so that our resident memory stays bounded; the source keeps the
    // content.
    view.forget(range);
    match verdict? {
        None => Ok(()),
        Some(want) => Err(Error::Corrupt { slot: slot.number, want, got }),
    }
}

/// The slots that the owner of a copy uses: they keep their places. Shared with the slots, which may outlive the copy.
#[derive(Debug, Default)]
pub(super) struct Lent {
    slots: Mutex<BTreeMap<u64, u32>>,
}

impl Lent {
    pub(super) fn lend(&self, number: u64) {
        *self.slots().entry(number).or_default() += 1;
    }

    pub(super) fn give_back(&self, number: u64) {
        let mut slots = self.slots();
        if let Some(count) = slots.get_mut(&number) {
            *count -= 1;
            if *count == 0 {
                slots.remove(&number);
            }
        }
    }

    /// Slots below this number are no longer in use, if those from `delivered` on have not been delivered yet.
    pub(super) fn floor(&self, delivered: u64) -> u64 {
        self.slots().first_key_value().map_or(delivered, |(&number, _)| number.min(delivered))
    }

    /// The counts are right after every statement, so a panic elsewhere does not invalidate them.
    fn slots(&self) -> MutexGuard<'_, BTreeMap<u64, u32>> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What is known about the snapshot so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    /// Slots that may be read.
    pub published: u64,
    /// Total number of slots, once known.
    pub end: Option<u64>,
    /// Bytes of content in the published slots.
    pub bytes_known: u64,
    /// The state last seen. `Open` before the first read of the line.
    pub state: State,
}

// Opening slots of a table that is sealed, or has compressed slots: for the reader that has them in buffers, and for a
// copy, which keeps what is stored for others and opens slots elsewhere for its own use.

/// Opens slots, one after the other.
#[derive(Default)]
pub(super) struct Opener {
    /// The slot as it is stored, and after that without its seal.
    stored: Vec<u8>,
    decoder: Decoder,
}

/// What an opened slot was.
pub(super) struct WasStored {
    /// How it was compressed.
    pub(super) method: Option<Method>,
    /// The CRC-32C of its content, if that is known.
    pub(super) crc: Option<u32>,
}

impl Opener {
    /// Decrypts and decompresses the slot of this entry, which is at `from`, to `to`, where its content of `length`
    /// bytes has room. If the slot is not what its source stored, nothing is written.
    pub(super) fn open(
        &mut self,
        seal: Option<&Seal>,
        entry: &Entry,
        length: u32,
        (view, at): (&View, u64),
        to: (&Memory, u64),
    ) -> Result<WasStored, Error> {
        let number = entry.number;
        self.stored.resize(entry.length as usize, 0);
        view.read(at, &mut self.stored)?;
        if let Some(seal) = seal {
            seal.open_slot(number, &entry.seal, &mut self.stored).map_err(|_| forged_slot(number))?;
        }
        let method = entry.method()?;
        let Some(by) = method else {
            to.0.write(to.1, &self.stored)?;
            return Ok(WasStored { method, crc: seal.is_none().then_some(entry.crc) });
        };
        let crc = self.decoder.decode(by, number, &self.stored, length)?;
        to.0.write(to.1, &self.decoder.plain)?;
        Ok(WasStored { method, crc: Some(crc) })
    }

    /// The bytes of the last slot as they were stored, without its seal. The opener takes other memory for the next.
    pub(super) fn take_stored(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.stored)
    }
}

pub(super) fn forged_slot(number: u64) -> Error {
    Error::Forged { what: format!("slot {number}") }
}

/// The digest of the ciphertext in this range.
pub(super) fn digest(view: &View, range: Range<u64>, scratch: &mut Vec<u8>) -> Result<SlotDigest, Error> {
    scratch.resize((range.end - range.start) as usize, 0);
    view.read(range.start, scratch)?;
    Ok(crate::seal::digest(scratch))
}

type SlotDigest = [u8; crate::seal::DIGEST_BYTES];

/// Bytes of the buffers in which a copy opens slots, at most: as many as a reader without a copy uses.
const OPEN_BYTES: u64 = 64 << 20;

/// One such buffer for this many slots of the copy: a small copy has few.
const SLOTS_PER_BUFFER: u64 = 4;

/// Least number of these buffers: one is filled while others are used.
const MIN_BUFFERS: u64 = 4;

/// The most of them: more than are in use at a time, whatever the size of the slots.
const MAX_BUFFERS: u64 = 60;

/// The buffers in which a copy of a table that needs it opens slots for its owner.
pub(super) struct Opening {
    seal: Option<Arc<Seal>>,
    memory: Arc<Memory>,
    slot_bytes: u64,
    free: Arc<Free>,
    opener: Opener,
}

/// An opened slot.
pub(super) struct Opened {
    pub(super) memory: Arc<Memory>,
    pub(super) at: u64,
    pub(super) buffer: Buffer,
    pub(super) was: WasStored,
}

impl Opening {
    /// Bytes of the buffers for a copy of this shape.
    pub(super) fn memory_len(geometry: &Geometry) -> u64 {
        let most = (OPEN_BYTES / geometry.slot_bytes()).min(u64::from(geometry.slots) / SLOTS_PER_BUFFER);
        most.clamp(MIN_BUFFERS, MAX_BUFFERS) * geometry.slot_bytes()
    }

    /// The buffers for a copy of this shape of the expected table. `None`: it needs none.
    pub(super) fn of(expect: &Expectation, geometry: &Geometry) -> Result<Option<Opening>, Error> {
        expect.needs_opening().then(|| Opening::new(expect.seal.clone(), geometry)).transpose()
    }

    fn new(seal: Option<Arc<Seal>>, geometry: &Geometry) -> Result<Opening, Error> {
        let length = Self::memory_len(geometry);
        let memory = Arc::new(Memory::create_single_writer("remora-opened", length, Pages::Small)?);
        let free = Arc::new(Free(Mutex::new((0..length / geometry.slot_bytes()).collect())));
        Ok(Opening { seal, memory, slot_bytes: geometry.slot_bytes(), free, opener: Opener::default() })
    }

    /// The same with other buffers, for an owner whose server may still read these.
    pub(super) fn renewed(&self, geometry: &Geometry) -> Result<Opening, Error> {
        Opening::new(self.seal.clone(), geometry)
    }

    /// Opens the slot of this entry, whose content has `length` bytes. `None`: all buffers are in use.
    pub(super) fn open(&mut self, entry: &Entry, length: u32, from: (&View, u64)) -> Result<Option<Opened>, Error> {
        let Some(buffer) = self.free.take() else { return Ok(None) };
        let at = buffer.number * self.slot_bytes;
        let was = self.opener.open(self.seal.as_deref(), entry, length, from, (&self.memory, at))?;
        Ok(Some(Opened { memory: Arc::clone(&self.memory), at, buffer, was }))
    }

    /// Whether the ciphertext in this range has the digest that its source gave it. `None`: it is not ciphertext.
    pub(super) fn is_right(&mut self, slot_seal: &SlotSeal, from: (&View, Range<u64>)) -> Result<Option<bool>, Error> {
        if self.seal.is_none() {
            return Ok(None);
        }
        Ok(Some(digest(from.0, from.1, &mut self.opener.stored)? == slot_seal.digest))
    }
}

/// The numbers of the buffers that are not in use.
#[derive(Debug)]
struct Free(Mutex<Vec<u64>>);

impl Free {
    fn take(self: &Arc<Free>) -> Option<Buffer> {
        let number = self.numbers().pop()?;
        Some(Buffer { number, free: Arc::clone(self) })
    }

    /// The list is right after every statement, so a panic elsewhere does not invalidate it.
    fn numbers(&self) -> MutexGuard<'_, Vec<u64>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A buffer in use, until it is dropped.
#[derive(Debug)]
pub(super) struct Buffer {
    number: u64,
    free: Arc<Free>,
}

impl Drop for Buffer {
    fn drop(&mut self) {
        self.free.numbers().push(self.number);
    }
}

// Whether bytes that were read are those of the slot that was wanted, by the slot's entry.

/// A slot to get.
#[derive(Debug, Clone, Copy)]
pub(super) struct Wanted {
    pub(super) number: u64,
    pub(super) position: u64,
    /// Bytes of its content. Fewer are stored if it is compressed.
    pub(super) length: u32,
    /// Whether it may be compressed.
    pub(super) compressed: bool,
}

/// The judgement of an entry that was loaded after the slot's bytes.
#[derive(Debug)]
pub(super) enum Verdict {
    /// The bytes are the slot.
    Right,
    /// The entry was caught in the middle of a change, or is older than `published`: load it again.
    Unclear,
    /// The bytes are not what was written, though the slot was not overwritten.
    Damaged { want: u32 },
}

impl Wanted {
    /// Judges bytes with the checksum `crc` by the entry at the place of their slot.
    pub(super) fn judge(&self, entry: Option<Entry>, crc: u32, geometry: &Geometry) -> Result<Verdict, Error> {
        let Some(entry) = entry else {
            return Ok(Verdict::Unclear);
        };
        if entry.number > self.number {
            let oldest = (entry.number + 1).saturating_sub(u64::from(geometry.slots));
            return Err(Error::slot_overrun(self.number, oldest));
        }
        if entry.number < self.number || entry.writing {
            return Ok(Verdict::Unclear);
        }
        if !entry.has_content(self.position, self.length, self.compressed) {
            return Err(wrong_content(&entry, self.position, self.length));
        }
        if entry.crc != crc {
            return Ok(Verdict::Damaged { want: entry.crc });
        }
        Ok(Verdict::Right)
    }
}

/// An entry says another thing of its slot than the progress line.
pub(super) fn wrong_content(entry: &Entry, position: u64, length: u32) -> Error {
    let compressed = if entry.encoding == 0 { "" } else { ", compressed" };
    Error::Layout(format!(
        "slot {} of the table is published as bytes {position}+{length} and entered as {}+{}{compressed}",
        entry.number, entry.position, entry.length
    ))
}

/// Whether bytes with this CRC, taken before this call, are those of the slot: `None`, or the CRC that they should
/// have.
pub(super) fn judge_now(view: &View, wanted: &Wanted, crc: u32, geometry: &Geometry) -> Result<Option<u32>, Error> {
    match wanted.judge(load_entry_again(&view, geometry, wanted.number, None)?, crc, geometry)? {
        Verdict::Right => Ok(None),
        Verdict::Damaged { want } => Ok(Some(want)),
        // Words of a mapping are never torn, and the entry of a published slot changes for one reason only: the next
        // lap.
        Verdict::Unclear => Err(Error::slot_overrun(wanted.number, wanted.number + 1)),
    }
}

/// The part of the sink in which the reads of one [`SnapshotReader`](crate::SnapshotReader) land: a page for the small
/// reads, then the slot buffers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SinkLayout {
    /// Offset of the page, in bytes from the start of the sink. A multiple of 64.
    pub offset: u64,
    /// Slot buffers, each of `slot_size` bytes. Enough that one slot may be verified and another used while
    /// [`Peer::depth`](remora_fabric::Peer::depth) reads are outstanding.
    pub buffers: u32,
}

impl SinkLayout {
    /// Bytes of the page for small reads: line, head, probe, and an entry per buffer.
    pub const SMALL_BYTES: u64 = 4096;
    /// Maximum number of buffers: as many as have an entry in the page beside the four lines of the other reads.
    pub const MAX_BUFFERS: u32 = 60;

    /// Bytes of the sink that this layout takes from `offset` on.
    pub fn length(&self, geometry: &Geometry) -> u64 {
        Self::SMALL_BYTES + u64::from(self.buffers) * geometry.slot_bytes()
    }

    pub(crate) const fn line(&self) -> u64 {
        self.offset
    }

    pub(crate) const fn head(&self) -> u64 {
        self.offset + 64
    }

    pub(crate) const fn probe(&self) -> u64 {
        self.offset + 192
    }

    pub(crate) fn entry(&self, buffer: u8) -> u64 {
        self.offset + 256 + 64 * u64::from(buffer)
    }

    pub(crate) fn buffer(&self, buffer: u8, geometry: &Geometry) -> u64 {
        self.offset + Self::SMALL_BYTES + u64::from(buffer) * geometry.slot_bytes()
    }

    /// Checks that the layout fits the sink.
    pub(crate) fn check(&self, sink: &Memory, geometry: &Geometry) -> Result<(), Error> {
        if !(1..=Self::MAX_BUFFERS).contains(&self.buffers) {
            return Err(Error::Layout(format!("{} slot buffers: must be 1 to {}", self.buffers, Self::MAX_BUFFERS)));
        }
        let end = self.offset.checked_add(self.length(geometry));
        if end.is_none_or(|end| end > sink.length()) {
            return Err(Error::Layout(format!(
                "a sink of {} bytes does not hold {} slot buffers of {} bytes from {} on",
                sink.length(),
                self.buffers,
                geometry.slot_size,
                self.offset
            )));
        }
        Ok(())
    }
}
