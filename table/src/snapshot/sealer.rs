//! The sealer of a snapshot: follows a plain table of this process or another one, and writes each slot, once it is
//! complete, into a second table, for readers on other hosts: compressed, as ciphertext, or both in this order.
//!
//! ```text
//!   plain:   SnapshotWriter, or a server's child ─▶ slots ─ published ═══ in place ═══▶ readers on this host
//!                                                     │ pump(): one slot
//!   sealed:                                           ╰─▶ slots ─ published ═══ TCP, RDMA ═══▶ other readers
//! ```
//!
//! Both tables have the same geometry. The writer of the plain one must not reuse a slot that is not sealed yet; the
//! place of a slot in the sealed table is reused when the plain one has reused it.

use std::collections::VecDeque;
use std::sync::Arc;

use remora_fabric::{Memory, memory::crc};

use super::slot::Encoded;
use super::writer::lay_out;
use crate::{
    encoding::{Encoder, Method},
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
