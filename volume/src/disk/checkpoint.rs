//! Checkpoint: moves blocks from the journal's segments to the extents, so that the segments can be removed.
//!
//! ```text
//!   a segment begins ─▶ everything before it is synced, and the superblock says so ─▶ blocks, out of memory, to the
//!     extents ─▶ everything so far is synced ─▶ extents synced ─▶ superblock: the segment is the first needed
//!     ─▶ older ones removed
//! ```
//!
//! A block that was changed since the segment began is left out: it is in a segment that stays. So the extents never
//! hold a block that is newer than what is durable of the journal, and a block that is torn there is in the segments.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::extents;
use super::files::{Failure, Files, Name};
use super::journal::{Due, Journal, write_superblock};
use super::superblock::Superblock;
use crate::layout::{Entry, Layout};
use crate::shape::BLOCK_BYTES;
use crate::store::Store;

/// See the module's text.
#[derive(Debug)]
pub(crate) struct Checkpoint<F> {
    files: Arc<F>,
    layout: Layout,
    /// The first segment that is needed before, and after.
    old: u64,
    base: u64,
    left: BTreeSet<u64>,
    /// What was written, in case the checkpoint is given up.
    done: BTreeSet<u64>,
}

/// Blocks with their entries.
pub(crate) type Batch = Vec<(u64, Entry, Vec<u8>)>;

impl<F: Files> Journal<F> {
    /// Begins a checkpoint, if one is due and can be. This superblock is to be written first.
    pub(crate) fn begin_checkpoint(&mut self) -> Option<(Checkpoint<F>, Superblock)> {
        let (files, layout, old) = (Arc::clone(self.files()), self.shape_layout(), self.base());
        let event = self.due()?.event;
        if !self.is_synced(event) {
            return None;
        }
        let Due { base, blocks, .. } = self.due()?;
        let left = blocks.take()?;
        let checkpoint = Checkpoint { files, layout, old, base: *base, left, done: BTreeSet::new() };
        Some((checkpoint, self.next_superblock(|_| {})))
    }
}

impl<F: Files> Checkpoint<F> {
    /// Says what is synced before the extents have a part of it: if a record of that is not readable any more, the
    /// journal is not taken to end there, with blocks in the extents that are newer. No lock should be held.
    ///
    /// # Errors
    /// [`Failure`].
    pub(crate) fn announce(&self, superblock: Superblock) -> Result<(), Failure> {
        write_superblock(&*self.files, superblock)
    }

    /// The next blocks; empty: that was all. To be called with the copy's lock held.
    pub(crate) fn next(&mut self, journal: &Journal<F>, store: &Store) -> Batch {
        let mut batch = Batch::new();
        while batch.len() < extents::AT_ONCE as usize
            && let Some(block) = self.left.pop_first()
        {
            self.done.insert(block);
            if journal.is_dirty(block) {
                continue;
            }
            let mut bytes = vec![0; BLOCK_BYTES];
            // One that is damaged in memory is left as it is: the copy is behind, and takes it.
            if let Ok(entry) = store.get(block, &mut bytes) {
                batch.push((block, entry, bytes));
            }
        }
        batch
    }

    /// Writes them. It takes its time: no lock should be held.
    ///
    /// # Errors
    /// [`Failure`].
    pub(crate) fn write(&self, batch: &Batch) -> Result<(), Failure> {
        extents::write(&*self.files, self.layout, batch)
    }

    /// Everything was written, and everything that was appended until then is synced. No lock should be held.
    ///
    /// # Errors
    /// [`Failure`].
    pub(crate) fn sync(&self) -> Result<(), Failure> {
        #[cfg(test)]
        if crate::mutant::Mutant::ExtentsNotSynced.is_active() {
            return Ok(());
        }
        self.files.sync(Name::Extents).map_err(|error| Failure::of_sync(&*self.files, Name::Extents, &error))
    }

    /// The superblock that makes it count, after [`Checkpoint::sync`].
    pub(crate) fn superblock(&self, journal: &mut Journal<F>) -> Superblock {
        journal.next_superblock(|superblock| superblock.base = self.base)
    }

    /// Writes that, and removes the segments that are not needed any more. No lock should be held.
    ///
    /// # Errors
    /// [`Failure`].
    pub(crate) fn complete(&self, superblock: Superblock) -> Result<(), Failure> {
        write_superblock(&*self.files, superblock)?;
        for segment in self.old..self.base {
            // One that stays is removed by the next recovery.
            let _ = self.files.remove(Name::Segment(segment));
        }
        Ok(())
    }

    /// It is complete. To be called with the copy's lock held.
    pub(crate) fn end(self, journal: &mut Journal<F>) {
        journal.end_checkpoint(BTreeSet::new());
    }

    /// It is given up: the next one moves its blocks, too.
    pub(crate) fn give_up(mut self, journal: &mut Journal<F>) {
        self.done.append(&mut self.left);
        journal.end_checkpoint(self.done);
    }
}
