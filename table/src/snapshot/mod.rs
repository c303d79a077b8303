//! A finite stream of bytes in slots: the RDB on its way from one writer to any number of readers.
//!
//! ```text
//!   recv(2) ─▶ space() ─▶ advance() ─▶ published ═════ reads ═════▶ pump() ─▶ next_slot() ─▶ release()
//!              writer                             (Peer or View)    reader
//! ```
//!
//! A reader may keep what it has read in a table of its own, from which others read: `copy` is reader and writer in
//! one, and `SourceEntries` is what it has read from the source itself.

mod copy;
mod reader;
mod slot;

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use remora_fabric::Memory;
use remora_fabric::memory::crc;

use crate::encoding::{Encoder, Method};
use crate::error::Error;
use crate::layout::{Entry, Geometry, Head, Identity, Kind, State};
use crate::publish::{Publisher, load_entry_again, load_line};
use crate::seal::{Seal, SealKey};

pub use copy::{Loss, SnapshotCopy, Turn};
pub use reader::{SnapshotReader, snapshot_left};
pub use slot::{Encoded, Place, Progress, SinkLayout, Slot};

// The writer of a snapshot: hands out space for bytes, and publishes the slots that are complete.
//
// It copies nothing: the caller receives bytes straight into the memory. Only for bytes that are in the caller's own
// memory does it make the copy ([`SnapshotWriter::append`]). Not here: the source of the bytes.
//
// ```text
//    slot 0        slot 1        slot 2
//   ├─────────────┼─────────────┼──────┄┄┄┄
//   ▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▒▒▒
//                 ▲          ▲  ▲
//         published    summed  received        received - summed = hold_back
// ```
//
// The last `hold_back` bytes received may turn out not to be content (the 40-byte mark that ends an `$EOF:` payload,
// which may span two slots). They are neither summed nor published until bytes after them, or the end, have come.

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

// The sealer of a snapshot: follows a plain table of this process or another one, and writes each slot, once it is
// complete, into a second table, for readers on other hosts: compressed, as ciphertext, or both in this order.
//
// ```text
//   plain:   SnapshotWriter, or a server's child ─▶ slots ─ published ═══ in place ═══▶ readers on this host
//                                                     │ pump(): one slot
//   sealed:                                           ╰─▶ slots ─ published ═══ TCP, RDMA ═══▶ other readers
// ```
//
// Both tables have the same geometry. The writer of the plain one must not reuse a slot that is not sealed yet; the
// place of a slot in the sealed table is reused when the plain one has reused it.

/// Writes one sealed snapshot. See the module docs.
pub struct SnapshotSealer {
    plain: Arc<Memory>,
    sealed: Arc<Memory>,
    geometry: Geometry,
    seal: Option<Arc<Seal>>,
    /// Of a table with compressed slots.
    encoder: Option<Encoder>,
    /// The next slots as another source has stored them, if they are copied from one.
    copied: Option<VecDeque<Option<Encoded>>>,
    /// How the next slots are compressed.
    method: Option<Method>,
    publisher: Publisher<Arc<Memory>>,
    /// Slots below this number are sealed.
    next: u64,
    scratch: Vec<u8>,
    last: Option<StoredSlot>,
}

/// How the last slot was stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StoredSlot {
    /// How it was to be compressed.
    pub wanted: Option<Method>,
    /// How it is: not at all if that saves less than a tenth.
    pub method: Option<Method>,
    /// Bytes of its content.
    pub plain: u32,
    /// Bytes that readers get.
    pub stored: u32,
}

impl SnapshotSealer {
    /// Creates an empty, open, sealed snapshot in `sealed`, of the one in `plain`, which must exist. What holds for the
    /// memory of [`SnapshotWriter::create`](crate::SnapshotWriter::create) holds for `sealed`. `key` must not have been
    /// used before.
    ///
    /// # Errors
    /// [`Error::Layout`] if the geometry is outside its limits or a memory too small for it, [`Error::Misuse`] if the
    /// identity is that of a journal.
    pub fn create(
        plain: Arc<Memory>,
        sealed: Arc<Memory>,
        geometry: Geometry,
        identity: Identity,
        key: &SealKey,
    ) -> Result<SnapshotSealer, Error> {
        Self::with((plain, sealed), geometry, identity, Some(key), None)
    }

    /// The same with slots that may be compressed ([`compress_with`](Self::compress_with)), and sealed if there is a
    /// key.
    ///
    /// # Errors
    /// As for [`create`](Self::create).
    pub fn create_compressed(
        plain: Arc<Memory>,
        stored: Arc<Memory>,
        geometry: Geometry,
        identity: Identity,
        key: Option<&SealKey>,
    ) -> Result<SnapshotSealer, Error> {
        Self::with((plain, stored), geometry, identity, key, Some(Encoder::default()))
    }

    fn with(
        (plain, sealed): (Arc<Memory>, Arc<Memory>),
        geometry: Geometry,
        identity: Identity,
        key: Option<&SealKey>,
        encoder: Option<Encoder>,
    ) -> Result<SnapshotSealer, Error> {
        if identity.kind != Kind::Snapshot {
            return Err(Error::Misuse("the identity of a snapshot must have the kind Snapshot"));
        }
        let seal = key.map(|key| Seal::new(key, &identity)).transpose()?.map(Arc::new);
        let publisher = lay_out(&sealed, geometry, identity, seal.clone(), encoder.is_some())?;
        Ok(SnapshotSealer {
            plain,
            sealed,
            geometry,
            seal,
            encoder,
            copied: None,
            method: None,
            publisher,
            next: 0,
            scratch: Vec::new(),
            last: None,
        })
    }

    /// The table becomes the same bytes as another source's, whose key and identity it has: each slot is stored as it
    /// was there ([`store_as`](Self::store_as)). Under each nonce the key seals the same bytes as before.
    pub fn as_a_copy(self) -> SnapshotSealer {
        SnapshotSealer { copied: Some(VecDeque::new()), ..self }
    }

    /// How another source has stored the next slot of a copy that was not named yet: `None`, not compressed.
    pub fn store_as(&mut self, encoded: Option<Encoded>) {
        if let Some(copied) = &mut self.copied {
            copied.push_back(encoded);
        }
    }

    /// The next slots are compressed by this method, if that saves a tenth of them. Without effect unless the table has
    /// compressed slots.
    pub fn compress_with(&mut self, method: Option<Method>) {
        self.method = method;
    }

    /// How the last slot was stored, if another one was since this was last asked.
    pub fn take_stored(&mut self) -> Option<StoredSlot> {
        self.last.take()
    }

    /// Seals the next slot, if it is complete. Returns whether anything was done.
    ///
    /// # Errors
    /// [`Error::Overrun`]: the plain table has reused a slot that was not sealed. [`Error::Corrupt`]: the bytes of a
    /// slot have changed since they were written. Both are bugs, or defects of the memory; [`abort`](Self::abort).
    pub fn pump(&mut self) -> Result<bool, Error> {
        if self.state() != State::Open {
            return Ok(false);
        }
        // `None`: the line was caught in the middle of a change; the next call looks again.
        let Some(line) = load_line(&self.plain, None)? else { return Ok(false) };
        if line.state == State::Aborted {
            self.abort();
            return Ok(true);
        }
        if self.next < self.geometry.slots_for(line.published) {
            self.seal_slot(line.retired)?;
            return Ok(true);
        }
        let is_whole = line.end.is_some_and(|end| end == self.publisher.line().published);
        if is_whole {
            self.publisher.seal()?;
        }
        Ok(is_whole)
    }

    /// Aborts the sealed snapshot: readers will find it aborted.
    pub fn abort(&mut self) {
        // As for `SnapshotWriter::abort`.
        let _ = self.publisher.abort();
    }

    /// Slots below this number are sealed: the plain table may reuse them.
    pub fn sealed_slots(&self) -> u64 {
        self.next
    }

    /// Open, sealed or aborted.
    pub fn state(&self) -> State {
        self.publisher.line().state
    }

    /// Replaces the plain bytes of the next slot by those that are stored, and returns how these are compressed and how
    /// they were to be.
    fn stored_form(&mut self, crc: u32) -> Result<(Option<Method>, Option<Method>), Error> {
        if let Some(copied) = &mut self.copied {
            let unnamed = Error::Misuse("a slot of a copy is sealed before it was said how it is stored");
            let Some(Encoded { method, bytes }) = copied.pop_front().ok_or(unnamed)? else { return Ok((None, None)) };
            self.scratch = bytes.ok_or(Error::Misuse("a compressed slot of a copy comes without its stored bytes"))?;
            return Ok((Some(method), Some(method)));
        }
        let wanted = self.method.filter(|_| self.encoder.is_some());
        let (Some(encoder), Some(method)) = (&mut self.encoder, wanted) else { return Ok((None, wanted)) };
        let Some(encoded) = encoder.encode(method, &self.scratch, crc)? else { return Ok((None, wanted)) };
        std::mem::swap(encoded, &mut self.scratch);
        Ok((Some(method), wanted))
    }

    fn seal_slot(&mut self, retired: u64) -> Result<(), Error> {
        let number = self.next;
        let overrun = || Error::slot_overrun(number, retired.max(number + 1));
        let is_of = |entry: &Entry| entry.number == number && !entry.writing;
        let plain = load_entry_again(&self.plain, &self.geometry, number, None)?.filter(is_of).ok_or_else(overrun)?;
        if u64::from(plain.length) > self.geometry.slot_bytes() {
            return Err(Error::Layout(format!("slot {number} is entered with {} bytes", plain.length)));
        }
        self.scratch.resize(plain.length as usize, 0);
        self.plain.read(self.geometry.slot_offset(number), &mut self.scratch)?;
        // These bytes were not overwritten meanwhile, and are those that their writer summed.
        load_entry_again(&self.plain, &self.geometry, number, None)?.filter(is_of).ok_or_else(overrun)?;
        let got = crc::crc32c(&self.scratch);
        if got != plain.crc {
            return Err(Error::Corrupt { slot: number, want: plain.crc, got });
        }
        let (method, wanted) = self.stored_form(plain.crc)?;
        let bytes = &mut self.scratch;
        let seal = self.seal.as_ref().map(|seal| seal.seal_slot(number, bytes)).transpose()?;
        if let Some(former) = number.checked_sub(u64::from(self.geometry.slots)) {
            self.publisher.retire(former + 1)?;
        }
        self.publisher.begin(number)?;
        self.sealed.write(self.geometry.slot_offset(number), bytes)?;
        // At most as many as the plain ones.
        let (length, encoding) = (bytes.len() as u32, method.map_or(0, Method::code));
        let crc = crc::crc32c(bytes);
        self.publisher.complete(Entry { length, encoding, crc, seal: seal.unwrap_or_default(), ..plain })?;
        self.last = Some(StoredSlot { wanted, method, plain: plain.length, stored: length });
        self.publisher.publish(plain.position + u64::from(plain.length))?;
        self.next += 1;
        Ok(())
    }
}
