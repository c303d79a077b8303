//! The writer of a snapshot: hands out room for bytes, and publishes the slots that have become complete.
//!
//! It copies nothing: whoever has the bytes receives them straight into the memory. Only who has them in memory of his own lets it
//! copy them ([`SnapshotWriter::append`]). Not here: where they come from.
//!
//! ```text
//!    slot 0        slot 1        slot 2
//!   ├─────────────┼─────────────┼──────┄┄┄┄
//!   ▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▒▒▒
//!                 ▲          ▲  ▲
//!         published    summed  received        received - summed = hold_back
//! ```
//!
//! The last `hold_back` bytes received may turn out to be no content (the 40-byte mark that ends an `$EOF:` payload, which
//! may lie across two slots). They are neither summed nor published until bytes beyond them, or the end, have come.

use std::{ops::Range, sync::Arc};

use remora_fabric::{Memory, memory::crc};

use crate::{
    error::Error,
    layout::{Entry, Geometry, Head, Identity, Kind, State},
    publish::{Publisher, load_line},
};

/// Memory is first touched in steps of this many bytes, ahead of the bytes: one call for 256 pages instead of 256 faults
/// within the receiving system call; no more, so that a small snapshot takes little memory.
const PREFAULT_BYTES: u64 = 1 << 20;

/// Bytes that [`SnapshotWriter::append`] sums and then copies at a time: they are still in the first-level cache for the copy, and
/// the checksum's code takes them as three streams of 8 KiB.
const APPEND_BYTES: usize = 24 << 10;

/// Writes one snapshot into one memory.
pub struct SnapshotWriter {
    memory: Arc<Memory>,
    geometry: Geometry,
    publisher: Publisher<Arc<Memory>>,
    hold_back: u64,
    /// Bytes that have landed, those held back included.
    received: u64,
    /// Bytes whose CRC is reckoned: `received - hold_back` at most.
    summed: u64,
    /// CRC-32C of the summed part of the slot in which `summed` lies.
    crc: u32,
    /// Slots whose place has been marked as being written.
    begun: u64,
    /// Slots below this number need not be kept once the ring is full.
    dispensable: u64,
    /// In the first lap: below this position of the stream the memory has been touched.
    prefaulted: u64,
}

impl SnapshotWriter {
    /// An empty, open snapshot in `memory`, which must be fresh (all zero).
    ///
    /// `hold_back`: bytes at the end of the stream that may turn out not to be content. A slot is published only when that
    /// many bytes lie beyond it.
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
            return Err(Error::Misuse("a snapshot's identity must say that it is one"));
        }
        if hold_back > geometry.slot_size {
            // With more, a ring of two slots could never publish its first.
            return Err(Error::Misuse("more bytes held back than a slot has"));
        }
        let publisher = lay_out(&memory, geometry, identity)?;
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

    /// Goes on where another writer of the same memory, perhaps in another process, has stopped for good after `received` bytes. It held
    /// none back, and neither does this one.
    ///
    /// # Errors
    /// [`Error::Layout`] if what lies there is no open snapshot of so many bytes.
    pub fn resume(memory: Arc<Memory>, geometry: Geometry, received: u64) -> Result<SnapshotWriter, Error> {
        let geometry = geometry.checked()?;
        let (slot, inside) = (received / geometry.slot_bytes(), received % geometry.slot_bytes());
        let line = load_line(&memory)?.filter(|line| line.state == State::Open);
        let line = line.filter(|line| line.published == geometry.start_of(slot));
        let Some(line) = line else {
            return Err(Error::Layout(format!("what another writer has left is no open snapshot of {received} bytes")));
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

    /// Where in the memory the next bytes go: contiguous, inside one slot, never empty.
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

    /// So many bytes have landed at the start of the last [`space`](Self::space).
    ///
    /// # Errors
    /// [`Error::Misuse`] if they are more than that had room for.
    pub fn advance(&mut self, bytes: u64) -> Result<(), Error> {
        let room = self.geometry.start_of(self.begun) - self.received;
        if bytes > room || self.state() != State::Open {
            return Err(Error::Misuse("advanced beyond the space handed out"));
        }
        self.received += bytes;
        self.sum_up_to(self.received.saturating_sub(self.hold_back))
    }

    /// Copies as many of `bytes` as there is room for, and says how many. Less than all of them: the ring is full, wait for readers
    /// and [`retire`](Self::retire); or the snapshot is no longer open.
    ///
    /// The CRC is reckoned from `bytes` and not from the copy, so that the memory is written once and not read. For that no bytes may
    /// be held back.
    ///
    /// # Errors
    /// [`Error::Misuse`] if this writer holds bytes back.
    pub fn append(&mut self, bytes: &[u8]) -> Result<usize, Error> {
        if self.hold_back != 0 {
            return Err(Error::Misuse("bytes are appended to a snapshot that holds none back"));
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

    /// The stream has ended and its last `trim` bytes are not content. Publishes the last slot and seals. Returns the
    /// content's length in bytes.
    ///
    /// # Errors
    /// [`Error::Misuse`] if `trim` is more than was held back, or than was received; or if the snapshot is not open.
    pub fn finish(&mut self, trim: u64) -> Result<u64, Error> {
        if trim > self.hold_back || trim > self.received {
            return Err(Error::Misuse("bytes trimmed that were not held back"));
        }
        if self.state() != State::Open {
            return Err(Error::Misuse("a snapshot is finished once"));
        }
        self.sum_up_to(self.received - trim)?;
        if !self.summed.is_multiple_of(self.geometry.slot_bytes()) {
            self.publish_slot()?;
        }
        self.publisher.seal()?;
        Ok(self.summed)
    }

    /// Gives the snapshot up: readers will find it aborted.
    pub fn abort(&mut self) {
        // Stores into memory of ours that was checked at the start: it cannot fail, and if it did, the readers would learn
        // it by the messenger.
        let _ = self.publisher.abort();
    }

    /// No reader needs the slots below this number any more. They stay nevertheless until the ring has no other room.
    pub fn retire(&mut self, below: u64) {
        self.dispensable = self.dispensable.max(below.min(self.published_slots()));
    }

    /// Slots that readers may read or have read.
    pub fn published_slots(&self) -> u64 {
        self.geometry.slots_for(self.publisher.line().published)
    }

    /// Slots below this number have been given up to make room.
    pub fn retired(&self) -> u64 {
        self.publisher.line().retired
    }

    /// Bytes received so far, those held back included.
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

    /// Bytes of the content: known once the snapshot is sealed.
    pub fn end(&self) -> Option<u64> {
        self.publisher.line().end
    }

    /// The table's shape.
    pub fn geometry(&self) -> Geometry {
        self.geometry
    }

    /// Makes the place of slot `number` ours, if it is free or may be freed.
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
        // Only a matter of speed: what isn't touched now is touched when the bytes come.
        let _ = self.memory.prefault(base + self.received..base + end);
        self.prefaulted = end;
    }

    /// Reckons the CRC while the bytes are still in the cache, and publishes each slot that this completes.
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
        self.publisher.complete(Entry { number, writing: false, position, length, crc: self.crc })?;
        self.publisher.publish(self.summed)?;
        self.crc = 0;
        Ok(())
    }
}

/// Head, empty directory, open line.
pub(crate) fn lay_out(
    memory: &Arc<Memory>,
    geometry: Geometry,
    identity: Identity,
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
    memory.write(0, &Head { identity, geometry }.to_bytes())?;
    Publisher::new(Arc::clone(memory), geometry)
}
