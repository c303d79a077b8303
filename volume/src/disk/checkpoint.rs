//! The blocks of a copy in a file: the checkpoint that moves them there from the journal, and the scrub that
//! reads them all.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::journal::{Due, Journal, Superblock, write_superblock};
use super::{Failure, Files, Name};
use crate::layout::{ENTRY_BYTES, Entry, Layout, Store};
use crate::shape::BLOCK_BYTES;

/// Moves blocks from the journal's segments to the extents, so that the segments can be removed.
///
/// ```text
///   a segment begins ─▶ everything before it is synced, and the superblock says so ─▶ blocks, out of memory, to the
///     extents ─▶ everything so far is synced ─▶ extents synced ─▶ superblock: the segment is the first needed
///     ─▶ older ones removed
/// ```
///
/// A block that was changed since the segment began is left out: it is in a segment that stays. So the extents never
/// hold a block that is newer than what is durable of the journal, and a block that is torn there is in the segments.
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
        while batch.len() < AT_ONCE as usize
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
        write(&*self.files, self.layout, batch)
    }

    /// Everything was written, and everything that was appended until then is synced. No lock should be held.
    ///
    /// # Errors
    /// [`Failure`].
    pub(crate) fn sync(&self) -> Result<(), Failure> {
        #[cfg(test)]
        if crate::rules::Mutant::ExtentsNotSynced.is_active() {
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

// The blocks of a copy and their entries in a file, as of the last checkpoint.
//
// ```text
// 0                              next multiple of 4096
// │ entries: 16 bytes each       │ blocks: 4096 bytes each │
// ```

/// The offset of a block's entry.
fn entry_at(block: u64) -> u64 {
    block * ENTRY_BYTES as u64
}

/// The offset of a block.
fn block_at(layout: Layout, block: u64) -> u64 {
    entry_at(layout.blocks()).next_multiple_of(BLOCK_BYTES as u64) + block * BLOCK_BYTES as u64
}

/// Bytes of the file.
pub(super) fn length(layout: Layout) -> u64 {
    block_at(layout, layout.blocks())
}

/// Writes these blocks, which ascend, neighbours at once. Of those that are zeros their entries only.
///
/// # Errors
/// [`Failure`].
pub(super) fn write(files: &impl Files, layout: Layout, blocks: &[(u64, Entry, Vec<u8>)]) -> Result<(), Failure> {
    let failed = |error| Failure::of(files, Name::Extents, &error);
    let is_one_run = |(block, entry, _): &(u64, Entry, _), (next, after, _): &(u64, Entry, _)| {
        block + 1 == *next && entry.has_bytes() == after.has_bytes()
    };
    for run in blocks.chunk_by(is_one_run) {
        let Some(&(first, one, _)) = run.first() else { continue };
        let words = run.iter().flat_map(|(_, entry, _)| entry.to_words());
        let entries: Vec<u8> = words.flat_map(u64::to_le_bytes).collect();
        let parts: Vec<&[u8]> = run.iter().map(|(.., bytes)| bytes.as_slice()).collect();
        if one.has_bytes() {
            files.write(Name::Extents, block_at(layout, first), &parts).map_err(failed)?;
        }
        files.write(Name::Extents, entry_at(first), &[&entries]).map_err(failed)?;
    }
    Ok(())
}

/// A block with its entry; no bytes if it is zeros.
pub(super) type Block = (Entry, Vec<u8>);

/// What is in the file for some blocks: `None` for one that has not its checksum.
pub(super) fn read(files: &impl Files, layout: Layout, first: u64, count: u64) -> Result<Vec<Option<Block>>, Failure> {
    let failed = |error| Failure::of(files, Name::Extents, &error);
    let mut entries = vec![0; count as usize * ENTRY_BYTES];
    let has = files.read(Name::Extents, entry_at(first), &mut entries).map_err(failed)?;
    let entries: Vec<_> = entries[..has].chunks_exact(ENTRY_BYTES).map(entry).collect();
    let mut blocks = vec![0; count as usize * BLOCK_BYTES];
    let is_any = entries.iter().any(|entry| entry.is_none_or(Entry::has_bytes));
    let has = match is_any {
        true => files.read(Name::Extents, block_at(layout, first), &mut blocks).map_err(failed)?,
        false => 0,
    };
    let mut found: Vec<_> = Vec::with_capacity(count as usize);
    for number in 0..count as usize {
        let bytes = blocks[..has].chunks_exact(BLOCK_BYTES).nth(number);
        let entry = entries.get(number).copied().flatten();
        #[cfg(test)]
        let entry = entry.map(|entry| match crate::rules::Mutant::ZerosAreJudged.is_active() {
            true => Entry { is_zero: false, ..entry },
            false => entry,
        });
        found.push(match entry {
            Some(entry) if !entry.has_bytes() => Some((entry, Vec::new())),
            Some(entry) => bytes.filter(|bytes| entry.is_of(bytes)).map(|bytes| (entry, bytes.to_vec())),
            None => None,
        });
    }
    Ok(found)
}

fn entry(bytes: &[u8]) -> Option<Entry> {
    bytes.first_chunk().and_then(Entry::from_bytes)
}

/// Brings all blocks into the memory of a copy. Those that cannot be read, or have not their checksum, are marked as
/// missing there.
pub(super) fn load(files: &impl Files, store: &Store) {
    let layout = store.layout();
    let mut first = 0;
    while first < layout.blocks() {
        let count = (layout.blocks() - first).min(AT_ONCE);
        let found = read(files, layout, first, count).unwrap_or_else(|_| {
            // A sector that the device does not give back any more: the others are read.
            let one = |block| read(files, layout, block, 1).ok().and_then(|mut found| found.pop().flatten());
            (first..first + count).map(one).collect()
        });
        for (block, found) in (first..).zip(found) {
            match found {
                Some((entry, bytes)) if entry.is_written() => store.put(block, entry, &bytes),
                Some(_) => {}
                None => store.lack(block),
            }
        }
        first += count;
    }
}

/// Blocks that are read at once: 1 MiB.
pub(super) const AT_ONCE: u64 = 256;

// Reads every block of a copy, in memory and in the extents, so that damage is found while another copy can
// repair it. Beside checkpoints, never during one.

/// What was found in some blocks.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Findings {
    /// Blocks that have not their checksums in the extents. They are written again, out of memory.
    pub(crate) repaired: Vec<u64>,
    /// Blocks that have not their checksums in memory: the copy lacks them from now on.
    pub(crate) damaged: Vec<u64>,
}

/// Blocks of which the extents must have the last write, out of these: `is_moved` says it of each. To be called with
/// the copy's lock held; the blocks that are damaged in memory are found here.
pub(crate) fn in_memory(
    is_moved: impl Fn(u64) -> bool,
    store: &Store,
    blocks: std::ops::Range<u64>,
    findings: &mut Findings,
) -> Vec<u64> {
    let mut bytes = vec![0; BLOCK_BYTES];
    let mut moved = Vec::new();
    for block in blocks {
        if store.entry(block).is_none() {
            continue; // the copy lacks it already, and is behind
        }
        match store.get(block, &mut bytes) {
            Ok(_) if is_moved(block) => moved.push(block),
            Ok(_) => {}
            Err(_) => findings.damaged.push(block),
        }
    }
    moved
}

/// Those of these blocks that the extents do not have. No lock should be held.
pub(crate) fn in_extents(files: &impl Files, layout: Layout, blocks: &[u64]) -> Vec<u64> {
    let mut bad = Vec::new();
    for run in blocks.chunk_by(|block, next| block + 1 == *next) {
        let Some(&first) = run.first() else { continue };
        match read(files, layout, first, run.len() as u64) {
            Ok(found) => bad.extend(run.iter().zip(found).filter(|(_, found)| found.is_none()).map(|(block, _)| block)),
            // A sector that the device does not give back: the others are read, and each that is not is written again.
            Err(_) => bad.extend(run.iter().filter(|&&block| {
                let one = read(files, layout, block, 1);
                one.ok().and_then(|mut found| found.pop().flatten()).is_none()
            })),
        }
    }
    bad
}

/// Writes blocks into the extents again, which are in memory and durable in no other file. To be called with the copy's
/// lock held: what changed since is left to the next checkpoint.
///
/// # Errors
/// [`Failure`].
pub(crate) fn repair<F: Files>(
    journal: &Journal<F>,
    store: &Store,
    blocks: &[u64],
    findings: &mut Findings,
) -> Result<(), Failure> {
    let mut batch = Vec::new();
    for &block in blocks.iter().filter(|&&block| journal.is_moved(block)) {
        let mut bytes = vec![0; BLOCK_BYTES];
        if let Ok(entry) = store.get(block, &mut bytes) {
            batch.push((block, entry, bytes));
            findings.repaired.push(block);
        }
    }
    if batch.is_empty() {
        return Ok(());
    }
    let files = &**journal.files();
    write(files, store.layout(), &batch)?;
    files.sync(Name::Extents).map_err(|error| Failure::of_sync(files, Name::Extents, &error))
}
