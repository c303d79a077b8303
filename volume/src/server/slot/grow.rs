//! Growing: the copy becomes that of a larger volume, with every block, promise and claim that it has. The thread of
//! [`crate::server::growing`] calls these steps, with the lock held for one step at a time.
//!
//! While it grows, the copy has no connections but those that ask how it stands, so no write changes it.

use super::{Done, State};
use crate::disk::checkpoint::Batch;
use crate::disk::files::Failure;
use crate::message::Standing;
use crate::server;
use crate::server::exports::Exports;
use crate::server::growing::{Beside, Larger};
use crate::server::kept::Kept;
use crate::server::scrubbing::Scrubbing;
use crate::shape::{BLOCK_BYTES, Shape};
use crate::size::{Opened, Size};
use crate::store::Store;
use crate::wire::Cause;

impl State {
    /// Whether the copy grows at present.
    pub(in crate::server) fn is_growing(&self) -> bool {
        self.is_growing
    }

    /// Whether the server has a copy.
    pub(in crate::server) fn is_there(&self) -> bool {
        self.store.is_some()
    }

    /// Whether a block from this one on was ever written. Behind the end there is none.
    pub(in crate::server) fn has_written_from(&self, first: u64) -> bool {
        let Some(store) = &self.store else { return false };
        // A damaged entry may be of a write.
        (first..store.layout().blocks()).any(|block| store.entry(block).is_none_or(|entry| entry.is_written()))
    }

    /// Which size the copy has, and had.
    pub(in crate::server) fn size(&self) -> Size {
        Size::kept(self.shape.blocks(), self.former)
    }

    /// What a writer finds that opens the volume of this shape.
    pub(in crate::server) fn opened_with(&self, shape: Shape) -> Opened {
        if self.shape.copies() != shape.copies() {
            return Opened::Other;
        }
        match self.size().opened_with(shape.blocks()) {
            // It cannot have any: no writer was promised with the size that the copy has.
            Opened::GoesBack if self.has_written_from(shape.blocks()) => Opened::Other,
            opened => opened,
        }
    }

    /// The size that the copy has is agreed. Durable at once: it is not changed often.
    pub(in crate::server) fn agree(&mut self) -> Result<(), Done> {
        if self.former.is_none() {
            return Ok(());
        }
        let mut size = self.size();
        size.agree();
        self.former = size.former();
        if let Some(Err(failure)) = self.kept.as_mut().map(Kept::agree) {
            self.lose(&failure);
            return Err(Done::Later);
        }
        Ok(())
    }

    /// The volume has this shape, and no copy here.
    pub(in crate::server) fn reshape(&mut self, shape: Shape) {
        debug_assert!(self.store.is_none(), "a copy keeps its shape until all of its blocks were copied");
        (self.shape, self.former) = (shape, None);
    }

    /// Ends the connections, and lets none begin.
    pub(in crate::server) fn begin_growth(&mut self, exports: &Exports) {
        self.is_growing = true;
        self.catch_ups += 1;
        self.compared = None;
        for session in self.sessions.drain(..) {
            exports.withdraw(&session.connection);
            server::refuse(&session.connection, Cause::InUse, GROWS);
        }
    }

    /// Copies some blocks from `first` on into the larger copy. Returns those that its store needs, and where to go
    /// on; `None`: that was all, or there is no copy any more.
    pub(in crate::server) fn grow(&mut self, larger: &Store, first: u64) -> Option<(Batch, u64)> {
        let store = self.store.as_ref()?;
        let all = store.layout().blocks().min(larger.layout().blocks());
        let end = all.min(first + AT_ONCE);
        let (mut batch, mut bad) = (Batch::new(), Vec::new());
        for block in first..end {
            if store.entry(block).is_some_and(|entry| !entry.is_written()) {
                continue;
            }
            let mut bytes = vec![0; BLOCK_BYTES];
            match store.get(block, &mut bytes) {
                Ok(entry) => {
                    larger.put(block, entry, &bytes);
                    batch.push((block, entry, bytes));
                }
                Err(_) => {
                    larger.lack(block);
                    bad.push(block);
                }
            }
        }
        if !bad.is_empty() {
            self.found_damaged(&bad);
        }
        (first < end).then_some((batch, end))
    }

    /// The larger copy has every block: it takes the place of this one. Returns whether there is a copy.
    pub(in crate::server) fn complete_growth(&mut self, larger: Larger, exports: &Exports) -> Result<bool, Failure> {
        self.is_growing = false;
        let Some(store) = &self.store else { return Ok(false) };
        let former = self.size().becomes(larger.store.shape().blocks()).former();
        if let (Some(Beside { stores, growth }), Some(kept)) = (&larger.beside, &self.kept) {
            match stores.complete_growth(growth, kept, self.copy.standing(), former) {
                Ok(kept) => self.kept = Some(kept),
                Err(failure @ Failure::Full { .. }) => return Err(failure),
                Err(failure) => {
                    self.lose(&failure);
                    return Err(failure);
                }
            }
        }
        store.set_line(Standing::default()); // its region may still be mapped
        if let Some(region) = self.region.take() {
            exports.revoke(region);
        }
        self.region = exports.export(larger.store.memory());
        (self.shape, self.former) = (larger.store.shape(), former);
        (self.store, self.grant) = (Some(larger.store), Some(larger.grant));
        self.scrubbing = Scrubbing::new();
        self.say();
        Ok(true)
    }

    /// The growth was given up: the copy is as it was.
    pub(in crate::server) fn end_growth(&mut self) {
        self.is_growing = false;
    }
}

/// Blocks that are copied with the lock held at once: 1 MiB.
const AT_ONCE: u64 = 256;

/// Why a connection is ended or refused.
pub(in crate::server) const GROWS: &str =
    "the copy is about to become larger: try again when remora volume grow is over";
