//! The writer of a snapshot: hands out space for bytes, and publishes the slots that are complete.
//!
//! It copies nothing: the caller receives bytes straight into the memory. Only for bytes that are in the caller's own
//! memory does it make the copy ([`SnapshotWriter::append`]). Not here: the source of the bytes.
//!
//! ```text
//!    slot 0        slot 1        slot 2
//!   ├─────────────┼─────────────┼──────┄┄┄┄
//!   ▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▒▒▒
//!                 ▲          ▲  ▲
//!         published    summed  received        received - summed = hold_back
//! ```
//!
//! The last `hold_back` bytes received may turn out not to be content (the 40-byte mark that ends an `$EOF:` payload,
//! which may span two slots). They are neither summed nor published until bytes after them, or the end, have come.

use std::{ops::Range, sync::Arc};

use remora_fabric::{Memory, memory::crc};

use crate::{
    error::Error,
    layout::{Entry, Geometry, Head, Identity, Kind, State},
    publish::{Publisher, load_line},
    seal::Seal,
};

/// Memory is first touched in steps of this many bytes, ahead of the bytes: one call for 256 pages instead of 256
/// faults within the receiving system call. Not more, so that a small snapshot uses little memory.
const PREFAULT_BYTES: u64 = 1 << 20;

/// Bytes that [`SnapshotWriter::append`] sums and then copies at a time: they are still in the first-level cache for
/// the copy, and the checksum code processes them as three streams of 8 KiB.
const APPEND_BYTES: usize = 24 << 10;

/// Writes one snapshot into one memory.
pub struct SnapshotWriter {
    memory: Arc<Memory>,
    geometry: Geometry,
    publisher: Publisher<Arc<Memory>>,
    hold_back: u64,
    /// Bytes that have landed, including those held back.
    received: u64,
    /// Bytes whose CRC is computed: at most `received - hold_back`.
    summed: u64,
    /// CRC-32C of the summed part of the slot that contains `summed`.
    crc: u32,
    /// Slots whose entry has been marked as being written.
    begun: u64,
    /// Slots below this number need not be kept once the ring is full.
    dispensable: u64,
    /// In the first lap: the memory below this position of the stream has been touched.
    prefaulted: u64,
}

impl SnapshotWriter {
    /// Creates an empty, open snapshot in `memory`, which may hold anything, such as the table of an earlier
    /// generation. No reader may have access to it yet; access that readers had to an earlier table must be revoked.
    ///
    /// `hold_back`: bytes at the end of the stream that may turn out not to be content. A slot is published only when
    /// that many bytes have been received after it.
    ///
    /// # Errors
    /// [`Error::Layout`] if the geometry is outside its limits, [`Error::Memory`] if the memory is smaller than it,
    /// [`Error::Misuse`] if the identity is that of a journal or `hold_back` exceeds a slot.
    pub fn create(
        memory: Arc<Memory>,
        geometry: Geometry,
        identity: Identity,
        hold_back: u32,
    ) -> Result<SnapshotWriter, Error> {
        if identity.kind != Kind::Snapshot {
            return Err(Error::Misuse("the identity of a snapshot must have the kind Snapshot"));
        }
        if hold_back > geometry.slot_size {
            // With more, a ring of two slots could never publish its first.
            return Err(Error::Misuse("hold_back exceeds the size of a slot"));
        }
        let publisher = lay_out(&memory, geometry, identity, None, false)?;
        Ok(SnapshotWriter {
            memory,
            geometry,
            publisher,
            hold_back: u64::from(hold_back),
            received: 0,
            summed: 0,
            crc: 0,
            begun: 0,
            dispensable: 0,
            prefaulted: 0,
        })
    }

    /// Continues where another writer of the same memory, perhaps in another process, has stopped for good after
    /// `received` bytes. That writer held no bytes back, and neither does this one.
    ///
    /// # Errors
    /// [`Error::Layout`] if the memory does not hold an open snapshot of that many bytes.
    pub fn resume(memory: Arc<Memory>, geometry: Geometry, received: u64) -> Result<SnapshotWriter, Error> {
        let geometry = geometry.checked()?;
        let (slot, inside) = (received / geometry.slot_bytes(), received % geometry.slot_bytes());
        let line = load_line(&memory, None)?.filter(|line| line.state == State::Open);
        let line = line.filter(|line| line.published == geometry.start_of(slot));
        let Some(line) = line else {
            return Err(Error::Layout(format!(
                "the memory does not hold an open snapshot of {received} bytes left by another writer"
            )));
        };
        let start = geometry.slot_offset(slot);
        let crc = if inside == 0 { 0 } else { memory.crc32c_append(0, start..start + inside)? };
        let publisher = Publisher::resume(Arc::clone(&memory), geometry, line);
        let (begun, dispensable) = (slot + u64::from(inside > 0), publisher.line().retired);
        Ok(SnapshotWriter {
            memory,
            geometry,
            publisher,
            hold_back: 0,
            received,
            summed: received,
            crc,
            begun,
            dispensable,
            prefaulted: received,
        })
    }

    /// The range of the memory for the next bytes: contiguous, inside one slot, never empty.
    ///
    /// `None`: the ring is full, wait for readers and [`retire`](Self::retire); or the snapshot is no longer open.
    pub fn space(&mut self) -> Option<Range<u64>> {
        if self.state() != State::Open {
            return None;
        }
        let number = self.received / self.geometry.slot_bytes();
        if number == self.begun && !self.begin(number) {
            return None;
        }
        self.prefault();
        let start = self.geometry.slot_offset(number);
        Some(start + self.received % self.geometry.slot_bytes()..start + self.geometry.slot_bytes())
    }

    /// That many bytes have landed at the start of the last [`space`](Self::space).
    ///
    /// # Errors
    /// [`Error::Misuse`] if that is more than the space.
    pub fn advance(&mut self, bytes: u64) -> Result<(), Error> {
        let room = self.geometry.start_of(self.begun) - self.received;
        if bytes > room || self.state() != State::Open {
            return Err(Error::Misuse("advance() beyond the space handed out"));
        }
        self.received += bytes;
        self.sum_up_to(self.received.saturating_sub(self.hold_back))
    }

    /// Copies as many of `bytes` as there is space for, and returns how many. Fewer than all: the ring is full, wait
    /// for readers and [`retire`](Self::retire); or the snapshot is no longer open.
    ///
    /// The CRC is computed from `bytes` and not from the copy, so that the memory is written once and not read.
    /// Therefore no bytes may be held back.
    ///
    /// # Errors
    /// [`Error::Misuse`] if this writer holds bytes back.
    pub fn append(&mut self, bytes: &[u8]) -> Result<usize, Error> {
        if self.hold_back != 0 {
            return Err(Error::Misuse("append() on a snapshot that holds bytes back"));
        }
        let mut done = 0;
        while let Some(rest) = bytes.get(done..).filter(|rest| !rest.is_empty()) {
            let Some(space) = self.space() else { break };
            let room = usize::try_from(space.end - space.start).unwrap_or(usize::MAX);
            let (piece, _) = rest.split_at(rest.len().min(room).min(APPEND_BYTES));
            self.crc = crc::crc32c_append(self.crc, piece);
            self.memory.write(space.start, piece)?;
            done += piece.len();
            self.received += piece.len() as u64;
            self.summed = self.received;
            if self.summed.is_multiple_of(self.geometry.slot_bytes()) {
                self.publish_slot()?;
            }
        }
        Ok(done)
    }

    /// The stream has ended, and its last `trim` bytes are not content. Publishes the last slot and seals the table.
    /// Returns the length of the content in bytes.
    ///
    /// # Errors
    /// [`Error::Misuse`] if `trim` exceeds the bytes held back or received, or if the snapshot is not open.
    pub fn finish(&mut self, trim: u64) -> Result<u64, Error> {
        if trim > self.hold_back || trim > self.received {
            return Err(Error::Misuse("finish() trims more bytes than were held back"));
        }
        if self.state() != State::Open {
            return Err(Error::Misuse("finish() on a snapshot that is not open"));
        }
        self.sum_up_to(self.received - trim)?;
        if !self.summed.is_multiple_of(self.geometry.slot_bytes()) {
            self.publish_slot()?;
        }
        self.publisher.seal()?;
        Ok(self.summed)
    }

    /// Aborts the snapshot: readers will find the table aborted.
    pub fn abort(&mut self) {
        // These are stores into our own memory, which was checked at the start, so they cannot fail. If one did, the
        // readers would learn of the abort through the messenger.
        let _ = self.publisher.abort();
    }

    /// No reader needs the slots below this number any more. They stay until the ring has no other space.
    pub fn retire(&mut self, below: u64) {
        self.dispensable = self.dispensable.max(below.min(self.published_slots()));
    }

    /// Slots that readers may read or have read.
    pub fn published_slots(&self) -> u64 {
        self.geometry.slots_for(self.publisher.line().published)
    }

    /// Slots below this number have been retired.
    pub fn retired(&self) -> u64 {
        self.publisher.line().retired
    }

    /// Bytes received so far, including those held back.
    pub fn received(&self) -> u64 {
        self.received
    }

    /// Open, sealed or aborted.
    pub fn state(&self) -> State {
        self.publisher.line().state
    }

    /// Whether the whole snapshot, as far as it is written, can still be read from its start.
    pub fn is_retained(&self) -> bool {
        self.retired() == 0
    }

    /// Bytes of content, once the snapshot is sealed.
    pub fn end(&self) -> Option<u64> {
        self.publisher.line().end
    }

    /// The table's shape.
    pub fn geometry(&self) -> Geometry {
        self.geometry
    }

    /// Claims the place of slot `number`, if it is free or may be reused.
    fn begin(&mut self, number: u64) -> bool {
        let ready = match number.checked_sub(u64::from(self.geometry.slots)) {
            None => Ok(()),
            Some(former) if former < self.dispensable => self.publisher.retire(former + 1),
            Some(_) => return false,
        };
        let begun = ready.and_then(|()| self.publisher.begin(number));
        debug_assert!(begun.is_ok(), "the memory was checked to hold the whole geometry");
        self.begun += u64::from(begun.is_ok());
        begun.is_ok()
    }

    fn prefault(&mut self) {
        let lap = self.geometry.slot_bytes() * u64::from(self.geometry.slots);
        if self.received < self.prefaulted || self.received >= lap {
            return;
        }
        let end = (self.received + PREFAULT_BYTES).min(self.geometry.start_of(self.begun));
        let base = self.geometry.data_offset();
        // Only an optimisation: memory that is not touched now is touched when the bytes come.
        let _ = self.memory.prefault(base + self.received..base + end);
        self.prefaulted = end;
    }

    /// Computes the CRC while the bytes are still in the cache, and publishes each slot that this completes.
    fn sum_up_to(&mut self, target: u64) -> Result<(), Error> {
        while self.summed < target {
            let number = self.summed / self.geometry.slot_bytes();
            let inside = self.summed % self.geometry.slot_bytes();
            let bytes = (target - self.summed).min(self.geometry.slot_bytes() - inside);
            let start = self.geometry.slot_offset(number) + inside;
            self.crc = self.memory.crc32c_append(self.crc, start..start + bytes)?;
            self.summed += bytes;
            if self.summed.is_multiple_of(self.geometry.slot_bytes()) {
                self.publish_slot()?;
            }
        }
        Ok(())
    }

    /// Publishes the slot that ends at `summed`.
    fn publish_slot(&mut self) -> Result<(), Error> {
        let number = (self.summed - 1) / self.geometry.slot_bytes();
        let position = self.geometry.start_of(number);
        let length = (self.summed - position) as u32;
        self.publisher.complete(Entry::plain(number, position, length, self.crc))?;
        self.publisher.publish(self.summed)?;
        self.crc = 0;
        Ok(())
    }
}

/// Writes the head and an open line; no entry is published. `compressed`: slots may be compressed.
pub(crate) fn lay_out(
    memory: &Arc<Memory>,
    geometry: Geometry,
    identity: Identity,
    seal: Option<Arc<Seal>>,
    compressed: bool,
) -> Result<Publisher<Arc<Memory>>, Error> {
    let geometry = geometry.checked()?;
    let wanted = geometry.memory_len();
    if memory.length() < wanted {
        return Err(Error::Layout(format!(
            "a table of {} slots of {} bytes needs {wanted} bytes of memory, not {}",
            geometry.slots,
            geometry.slot_size,
            memory.length()
        )));
    }
    let algorithm = seal.as_deref().map(Seal::algorithm);
    memory.write(0, &Head { identity, geometry, algorithm, compressed }.to_bytes())?;
    Publisher::new(Arc::clone(memory), geometry, seal)
}
