//! Opening slots of a table that is sealed, or has compressed slots: for the reader that has them in buffers, and for a
//! copy, which keeps what is stored for others and opens slots elsewhere for its own use.

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use remora_fabric::{Memory, Pages, View};

use crate::{
    encoding::{Decoder, Method},
    error::Error,
    expectation::Expectation,
    layout::{Entry, Geometry},
    seal::{Seal, SlotSeal},
};

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
