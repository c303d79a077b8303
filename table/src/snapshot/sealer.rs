//! The sealer of a snapshot: follows a plain table of this process or another one, and writes each slot, once it is
//! complete, as ciphertext into a second table, for readers on other hosts.
//!
//! ```text
//!   plain:   SnapshotWriter, or a server's child ─▶ slots ─ published ═══ in place ═══▶ readers on this host
//!                                                     │ pump(): one slot
//!   sealed:                                           ╰─▶ slots ─ published ═══ TCP, RDMA ═══▶ other readers
//! ```
//!
//! Both tables have the same geometry. The writer of the plain one must not reuse a slot that is not sealed yet; the
//! place of a slot in the sealed table is reused when the plain one has reused it.

use std::sync::Arc;

use remora_fabric::{Memory, memory::crc};

use super::writer::lay_out;
use crate::{
    error::Error,
    layout::{Entry, Geometry, Identity, Kind, State},
    publish::{Publisher, load_entry_again, load_line},
    seal::{Seal, SealKey},
};

/// Writes one sealed snapshot. See the module docs.
pub struct SnapshotSealer {
    plain: Arc<Memory>,
    sealed: Arc<Memory>,
    geometry: Geometry,
    seal: Arc<Seal>,
    publisher: Publisher<Arc<Memory>>,
    /// Slots below this number are sealed.
    next: u64,
    scratch: Vec<u8>,
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
        if identity.kind != Kind::Snapshot {
            return Err(Error::Misuse("the identity of a snapshot must have the kind Snapshot"));
        }
        let seal = Arc::new(Seal::new(key, &identity)?);
        let publisher = lay_out(&sealed, geometry, identity, Some(Arc::clone(&seal)))?;
        Ok(SnapshotSealer { plain, sealed, geometry, seal, publisher, next: 0, scratch: Vec::new() })
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
        let seal = self.seal.seal_slot(number, &mut self.scratch)?;
        if let Some(former) = number.checked_sub(u64::from(self.geometry.slots)) {
            self.publisher.retire(former + 1)?;
        }
        self.publisher.begin(number)?;
        self.sealed.write(self.geometry.slot_offset(number), &self.scratch)?;
        let crc = crc::crc32c(&self.scratch);
        self.publisher.complete(Entry { crc, seal, ..plain })?;
        self.publisher.publish(plain.position + u64::from(plain.length))?;
        self.next += 1;
        Ok(())
    }
}
