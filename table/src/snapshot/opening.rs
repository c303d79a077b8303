//! Opening slots of a sealed table: for the reader that has them in buffers, and for a copy, which keeps the ciphertext
//! for others and opens slots elsewhere for its own use.

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use remora_fabric::{Memory, Pages, View};

use crate::{
    error::Error,
    layout::Geometry,
    seal::{Seal, SlotSeal},
};

/// Decrypts slot `number`, which is at `from`, to `to`. If the slot is not what its source sealed, nothing is written.
pub(super) fn open_slot(
    seal: &Seal,
    number: u64,
    slot_seal: &SlotSeal,
    from: (&View, Range<u64>),
    to: (&Memory, u64),
    scratch: &mut Vec<u8>,
) -> Result<(), Error> {
    let (view, range) = from;
    scratch.resize((range.end - range.start) as usize, 0);
    view.read(range.start, scratch)?;
    seal.open_slot(number, slot_seal, scratch).map_err(|_| forged_slot(number))?;
    Ok(to.0.write(to.1, scratch)?)
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

/// The buffers in which a copy of a sealed table opens slots for its owner.
pub(super) struct Opening {
    seal: Arc<Seal>,
    memory: Arc<Memory>,
    slot_bytes: u64,
    free: Arc<Free>,
    scratch: Vec<u8>,
}

/// An opened slot.
pub(super) struct Opened {
    pub(super) memory: Arc<Memory>,
    pub(super) at: u64,
    pub(super) buffer: Buffer,
}

impl Opening {
    /// Bytes of the buffers for a copy of this shape.
    pub(super) fn memory_len(geometry: &Geometry) -> u64 {
        let most = (OPEN_BYTES / geometry.slot_bytes()).min(u64::from(geometry.slots) / SLOTS_PER_BUFFER);
        most.clamp(MIN_BUFFERS, MAX_BUFFERS) * geometry.slot_bytes()
    }

    pub(super) fn new(seal: &Arc<Seal>, geometry: &Geometry) -> Result<Opening, Error> {
        let length = Self::memory_len(geometry);
        let memory = Arc::new(Memory::create_single_writer("remora-opened", length, Pages::Small)?);
        let free = Arc::new(Free(Mutex::new((0..length / geometry.slot_bytes()).collect())));
        Ok(Opening { seal: Arc::clone(seal), memory, slot_bytes: geometry.slot_bytes(), free, scratch: Vec::new() })
    }

    /// The same with other buffers, for an owner whose server may still read these.
    pub(super) fn renewed(&self, geometry: &Geometry) -> Result<Opening, Error> {
        Opening::new(&self.seal, geometry)
    }

    /// Opens the slot in this range. `None`: all buffers are in use.
    pub(super) fn open(
        &mut self,
        number: u64,
        slot_seal: &SlotSeal,
        from: (&View, Range<u64>),
    ) -> Result<Option<Opened>, Error> {
        let Some(buffer) = self.free.take() else { return Ok(None) };
        let at = buffer.number * self.slot_bytes;
        open_slot(&self.seal, number, slot_seal, from, (&self.memory, at), &mut self.scratch)?;
        Ok(Some(Opened { memory: Arc::clone(&self.memory), at, buffer }))
    }

    /// Whether the ciphertext in this range has the digest that its source gave it.
    pub(super) fn is_right(&mut self, slot_seal: &SlotSeal, from: (&View, Range<u64>)) -> Result<bool, Error> {
        Ok(digest(from.0, from.1, &mut self.scratch)? == slot_seal.digest)
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
