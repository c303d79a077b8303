//! Journal: appends what changes a copy, and knows what of it is durable.
//!
//! A segment is a file of fixed length, whose space is taken when it is made. When a record does not fit any more, the
//! next segment begins, and the blocks of those before it are due for a checkpoint: one at a time.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::files::{Failure, Files, Name};
use super::record::{Head, MAX_RECORD_BYTES, Superblock};
use crate::layout::{Entry, Layout};
use crate::message::Standing;

/// See the module's text.
#[derive(Debug)]
pub(crate) struct Journal<F> {
    files: Arc<F>,
    superblock: Superblock,
    /// Bytes of each segment.
    length: u64,
    /// The present segment, and where its next record begins.
    segment: u64,
    at: u64,
    /// The last event, and the last one that is durable.
    appended: u64,
    synced: u64,
    /// The number of the next event. A number is not used again, even if its event did not happen: a power cut can
    /// bring its record back, and the events after it must not take that for the one which they follow.
    next: u64,
    /// Segments with records that are not, and whether the name of one is not.
    unsynced: BTreeSet<Name>,
    has_new_names: bool,
    is_syncing: bool,
    /// Blocks that were changed since the last checkpoint was due.
    dirty: BTreeSet<u64>,
    due: Option<Due>,
}

/// A checkpoint that is due, or under way.
#[derive(Debug)]
pub(super) struct Due {
    /// The segment that is the first one needed after it.
    pub(super) base: u64,
    /// An event of that segment, the first one if not a later one: no block below was changed after it. When it is
    /// durable, so is everything before it.
    pub(super) event: u64,
    /// Blocks that were changed before; `None` once it is under way.
    pub(super) blocks: Option<BTreeSet<u64>>,
}

/// What must be synced so that everything up to an event is durable.
#[derive(Debug)]
pub(crate) struct Sync<F> {
    files: Arc<F>,
    names: BTreeSet<Name>,
    folder: bool,
    pub(crate) through: u64,
}

impl<F: Files> Sync<F> {
    /// Syncs. It takes its time: no lock should be held.
    ///
    /// # Errors
    /// It is not known what is durable.
    pub(crate) fn run(&self) -> Result<(), Failure> {
        for &name in &self.names {
            self.files.sync(name).map_err(|error| Failure::of_sync(&*self.files, name, &error))?;
        }
        #[cfg(test)]
        if crate::mutant::Mutant::NameNotSynced.is_active() {
            return Ok(());
        }
        if self.folder {
            let last = self.names.last().copied().unwrap_or(Name::Superblock);
            self.files.sync_folder().map_err(|error| Failure::of_sync(&*self.files, last, &error))?;
        }
        Ok(())
    }
}

impl<F: Files> Journal<F> {
    /// A journal whose next segment is this one, and begins now. Everything in it is durable, and what it says of the
    /// copy is found again.
    ///
    /// # Errors
    /// See [`Failure`].
    pub(super) fn begin(
        files: Arc<F>,
        superblock: Superblock,
        length: u64,
        segment: u64,
        (previous, sequence): (u64, u64),
        standing: Standing,
        dirty: BTreeSet<u64>,
    ) -> Result<Journal<F>, Failure> {
        let mut journal = Journal {
            files,
            superblock,
            length,
            segment,
            at: 0,
            appended: previous,
            synced: previous,
            next: sequence,
            unsynced: BTreeSet::new(),
            has_new_names: true,
            is_syncing: false,
            dirty: BTreeSet::new(),
            due: None,
        };
        let name = Name::Segment(segment);
        journal.files.create(name, length).map_err(|error| Failure::of(&*journal.files, name, &error))?;
        journal.put(segment, 0, standing, &[], &[])?;
        if !dirty.is_empty() {
            journal.due = Some(Due { base: segment, event: sequence, blocks: Some(dirty) });
        }
        if let Some(sync) = journal.begin_sync() {
            sync.run()?;
            journal.synced(&sync);
        }
        Ok(journal)
    }

    /// Bytes of the segments of a copy of this layout.
    pub(crate) fn segment_bytes(layout: Layout) -> u64 {
        (layout.length() / SEGMENTS_OF_A_COPY).clamp(LEAST_SEGMENT, MOST_SEGMENT).next_multiple_of(4096)
    }

    /// The present segment.
    pub(super) fn segment(&self) -> u64 {
        self.segment
    }

    /// The last event that was appended.
    pub(crate) fn appended(&self) -> u64 {
        self.appended
    }

    /// The number that the next event will have if it happens at the first attempt.
    #[cfg(test)]
    pub(super) fn next(&self) -> u64 {
        self.next
    }

    /// Appends an event: how the copy stands after it, what it changes, and the blocks of what is written.
    ///
    /// # Errors
    /// [`Failure::Full`]: it did not happen, unless the power fails before the next sync. [`Failure::Lost`]: the store
    /// is not to be believed any more.
    pub(crate) fn append(
        &mut self,
        standing: Standing,
        changes: &[(u64, Entry)],
        blocks: &[&[u8]],
    ) -> Result<u64, Failure> {
        self.put(self.segment, self.at, standing, changes, blocks)?;
        Ok(self.appended)
    }

    /// Writes a record there, or at the beginning of the next segment.
    fn put(
        &mut self,
        mut segment: u64,
        mut at: u64,
        standing: Standing,
        changes: &[(u64, Entry)],
        blocks: &[&[u8]],
    ) -> Result<(), Failure> {
        let (sequence, previous, synced, store) = (self.next, self.appended, self.synced, self.superblock.store);
        let mut head = Head { store, segment, sequence, previous, synced, standing, changes: changes.to_vec() };
        let bytes = head.record_bytes() as u64;
        let is_full = at + bytes > self.length;
        if is_full {
            (segment, at) = (segment + 1, 0);
            head.segment = segment;
            let name = Name::Segment(segment);
            if segment - self.superblock.base >= MOST_SEGMENTS || bytes > self.length {
                let why = format!("{MOST_SEGMENTS} segments wait for the checkpoint");
                return Err(Failure::Full { path: self.files.path(name), why });
            }
            self.files.create(name, self.length).map_err(|error| Failure::of(&*self.files, name, &error))?;
        }
        let name = Name::Segment(segment);
        let encoded = head.encode();
        let parts: Vec<&[u8]> = [encoded.as_slice()].into_iter().chain(blocks.iter().copied()).collect();
        if let Err(error) = self.files.write(name, at, &parts) {
            // A part that was written can be a whole record, whose end is zeros. It is gone for good before a later
            // event is durable, which may be in the next segment.
            self.unsynced.insert(name);
            self.next += 1;
            #[cfg(test)]
            if crate::mutant::Mutant::NumberUsedAgain.is_active() {
                self.next -= 1;
            }
            self.files.clear(name, at).map_err(|error| Failure::of_sync(&*self.files, name, &error))?;
            return Err(Failure::of(&*self.files, name, &error));
        }
        if is_full {
            self.has_new_names = true;
            if self.due.is_none() {
                let blocks = Some(std::mem::take(&mut self.dirty));
                self.due = Some(Due { base: segment, event: sequence, blocks });
            }
        }
        (self.segment, self.at, self.appended, self.next) = (segment, at + bytes, sequence, sequence + 1);
        self.unsynced.insert(name);
        self.dirty.extend(changes.iter().map(|(block, _)| block));
        Ok(())
    }

    /// What must be synced; `None` if nothing, or as long as an earlier sync is under way.
    pub(crate) fn begin_sync(&mut self) -> Option<Sync<F>> {
        if self.is_syncing || self.synced == self.appended {
            return None;
        }
        self.is_syncing = true;
        Some(Sync {
            files: Arc::clone(&self.files),
            names: std::mem::take(&mut self.unsynced),
            folder: std::mem::take(&mut self.has_new_names),
            through: self.appended,
        })
    }

    /// It was synced.
    pub(crate) fn synced(&mut self, sync: &Sync<F>) {
        self.is_syncing = false;
        self.synced = sync.through;
    }

    /// Whether everything is durable, and only the superblock can say so: no later record does. If the last one is not
    /// readable later, it would be taken for one that was torn.
    pub(crate) fn is_unsaid(&self) -> bool {
        !self.is_syncing && self.synced == self.appended && self.superblock.synced < self.synced
    }

    // ---- for checkpoints ----

    pub(super) fn files(&self) -> &Arc<F> {
        &self.files
    }

    pub(super) fn shape_layout(&self) -> Layout {
        Layout::of(self.superblock.shape)
    }

    /// Whether everything up to this event is durable.
    pub(crate) fn is_synced(&self, event: u64) -> bool {
        self.synced >= event
    }

    /// Whether a block was changed after the checkpoint was due: it is in segments that stay.
    pub(super) fn is_dirty(&self, block: u64) -> bool {
        self.dirty.contains(&block)
    }

    /// Whether the extents have the last write of a block.
    pub(crate) fn is_moved(&self, block: u64) -> bool {
        let is_due = self.due.as_ref().is_some_and(|due| match &due.blocks {
            Some(blocks) => blocks.contains(&block),
            None => true, // it is being moved
        });
        !is_due && !self.dirty.contains(&block)
    }

    /// When all blocks were last read and checked, in seconds since 1970; 0: never.
    pub(crate) fn scrubbed(&self) -> u64 {
        self.superblock.scrubbed
    }

    pub(super) fn due(&mut self) -> Option<&mut Due> {
        self.due.as_mut()
    }

    /// The first segment that is needed.
    pub(super) fn base(&self) -> u64 {
        self.superblock.base
    }

    /// The checkpoint is complete, or was given up: then these blocks are still to be moved.
    pub(super) fn end_checkpoint(&mut self, left: BTreeSet<u64>) {
        let was_given_up = !left.is_empty();
        self.due = None;
        self.dirty.extend(left);
        if !was_given_up && self.segment > self.superblock.base {
            // Segments became full meanwhile.
            let blocks = Some(std::mem::take(&mut self.dirty));
            self.due = Some(Due { base: self.segment, event: self.appended, blocks });
        }
    }

    /// The blocks of the copy before a growth that is not agreed.
    pub(crate) fn former(&self) -> Option<u64> {
        self.superblock.former
    }

    /// The superblock as it is to be written next. Each one that was taken is written.
    pub(crate) fn next_superblock(&mut self, change: impl FnOnce(&mut Superblock)) -> Superblock {
        self.superblock.counter += 1;
        self.superblock.synced = self.superblock.synced.max(self.synced);
        change(&mut self.superblock);
        self.superblock
    }

    /// Says in the files that nothing in them is to be believed, so that no later process of this system does: what a
    /// sync has lost is still in the page cache, and looks whole. After a power cut the files are what is durable.
    pub(crate) fn lose(&mut self) {
        #[cfg(test)]
        if crate::mutant::Mutant::LostIsBelieved.is_active() {
            return;
        }
        let superblock = self.next_superblock(|superblock| superblock.is_lost = true);
        let written = self.files.write(Name::Superblock, superblock.at(), &[&superblock.encode()]);
        // Without its superblock it is no store either.
        if let Err(error) = written
            && self.files.remove(Name::Superblock).is_err()
        {
            let path = self.files.path(Name::Superblock);
            tracing::error!(path, %error, "a store that has failed cannot be marked: remove its folder before a restart");
        }
    }
}

/// Writes a superblock, and makes it durable.
pub(crate) fn write_superblock(files: &impl Files, superblock: Superblock) -> Result<(), Failure> {
    let name = Name::Superblock;
    files
        .write(name, superblock.at(), &[&superblock.encode()])
        .map_err(|error| Failure::of_sync(files, name, &error))?;
    files.sync(name).map_err(|error| Failure::of_sync(files, name, &error))
}

/// A segment is this part of a copy, within the bounds below: the journal takes about as much again while a checkpoint
/// is under way.
const SEGMENTS_OF_A_COPY: u64 = 8;

/// Fits the longest record, and some more.
const LEAST_SEGMENT: u64 = 8 << 20;

/// Read again in a second after a restart.
const MOST_SEGMENT: u64 = 64 << 20;

/// Segments that wait for a checkpoint. With more, writes come faster than the device takes blocks: the copy refuses
/// them, and is taken back.
const MOST_SEGMENTS: u64 = 64;

const _: () = assert!(MAX_RECORD_BYTES as u64 <= LEAST_SEGMENT);
