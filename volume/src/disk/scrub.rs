//! Scrub: reads every block of a copy, in memory and in the extents, so that damage is found while another copy can
//! repair it. Beside checkpoints, never during one.

use super::extents;
use super::files::{Failure, Files, Name};
use super::journal::Journal;
use crate::layout::Layout;
use crate::shape::BLOCK_BYTES;
use crate::store::Store;

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
        match extents::read(files, layout, first, run.len() as u64) {
            Ok(found) => bad.extend(run.iter().zip(found).filter(|(_, found)| found.is_none()).map(|(block, _)| block)),
            // A sector that the device does not give back: the others are read, and each that is not is written again.
            Err(_) => bad.extend(run.iter().filter(|&&block| {
                let one = extents::read(files, layout, block, 1);
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
    extents::write(files, store.layout(), &batch)?;
    files.sync(Name::Extents).map_err(|error| Failure::of_sync(files, Name::Extents, &error))
}
