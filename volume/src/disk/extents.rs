//! Extents: the blocks of a copy and their entries in a file, as of the last checkpoint.
//!
//! ```text
//! 0                              next multiple of 4096
//! │ entries: 16 bytes each       │ blocks: 4096 bytes each │
//! ```

use super::files::{Failure, Files, Name};
use crate::layout::{ENTRY_BYTES, Entry, Layout};
use crate::shape::BLOCK_BYTES;
use crate::store::Store;

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
        let entry = entry.map(|entry| match crate::mutant::Mutant::ZerosAreJudged.is_active() {
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
