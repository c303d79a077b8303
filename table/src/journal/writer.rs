//! The writer of a journal: appends, and overwrites the oldest slot when it must. It does not wait for readers.

use std::{collections::VecDeque, sync::Arc};

use remora_fabric::{Memory, memory::crc};

use crate::{
    encoding::{Encoder, LEAST_RECORD_BYTES, MOST_RECORD_BYTES, Method},
    error::Error,
    layout::{Entry, Geometry, Identity, Kind, RECORD_HEADER_BYTES, RecordHeader, State, record_header_bytes},
    publish::Publisher,
    seal::{Seal, SealKey},
    snapshot::lay_out,
};

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
