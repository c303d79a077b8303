//! A delivered slot, and what keeps its bytes where they are: shared by every reader of a snapshot.
//!
//! A slot outlives the reader that delivered it. So it holds its memory itself, and its release needs no reader.

use std::{
    collections::BTreeMap,
    ops::Range,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use remora_fabric::{Memory, View};

use super::{
    opening::Buffer,
    verdict::{Wanted, judge_now},
};
use crate::{
    encoding::Method,
    error::Error,
    layout::{Geometry, State},
};

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
