//! Opening: a volume gets files, or has some.

use std::sync::Arc;
use std::sync::mpsc;

use bytes::Bytes;

use super::core::now;
use super::disk::Disk;
use super::error::FilesError;
use crate::client::{Error, Request};
use crate::names::layout::{Geometry, Head};
use crate::names::{BlocksToWrite, Names, New, View};
use crate::shape::BLOCK_BYTES;
use crate::wire::{MOST_BLOCKS, Run};

/// Blocks at the beginning of a volume that must be zeros before it gets files: partition tables and the superblocks of
/// other file systems are in there.
const LOOKED_AT: u32 = 64;

/// Submits a request, and waits for its completion.
fn wait(disk: &dyn Disk, request: Request) -> Result<Bytes, FilesError> {
    let (done, is_done) = mpsc::sync_channel(1);
    disk.submit(request, Box::new(move |result| _ = done.send(result))); // the other end waits below
    Ok(is_done.recv().unwrap_or(Err(Error::Closed))?)
}

/// Makes an empty file system.
pub(super) fn format(disk: &dyn Disk, root: &New, force: bool) -> Result<(), FilesError> {
    let geometry = Geometry::of(disk.blocks()).ok_or(FilesError::TooSmall)?;
    if !force {
        let found = wait(disk, Request::Read(Run { first: 0, count: LOOKED_AT }))?;
        let used = found.chunks(BLOCK_BYTES).position(|block| block.iter().any(|byte| *byte != 0));
        if let Some(block) = used {
            return Err(FilesError::Occupied(block as u64));
        }
    }
    for BlocksToWrite { first, data } in Names::format(geometry, root, now()) {
        wait(disk, Request::write(first, data))?;
    }
    wait(disk, Request::Flush).map(drop)
}

/// The names in a volume, with what must be written before they are used.
pub(super) fn open(disk: &Arc<dyn Disk>) -> Result<(Names, Vec<BlocksToWrite>), FilesError> {
    let head = Head::parse(&wait(&**disk, Request::Read(Run { first: 0, count: 1 }))?)?;
    let (said, blocks) = (head.geometry.blocks(), disk.blocks());
    if said > blocks {
        return Err(FilesError::Shrunk { said, blocks });
    }
    let mut view = View::new(head);
    loop {
        let (first, most) = view.wants();
        let count = most.min(READ_BLOCKS) as u32;
        let is_more = match count {
            0 => view.push(&[])?,
            count => view.push(&wait(&**disk, Request::Read(Run { first, count }))?)?,
        };
        if !is_more {
            break;
        }
        if count == 0 {
            return Err(FilesError::Damaged(crate::names::record::Malformed("the end of an area")));
        }
    }
    let mut names = Names::of(view, blocks)?;
    let mut writes = Vec::new();
    if names.head() != head {
        writes.push(BlocksToWrite { first: 0, data: names.head().to_block() });
    }
    // Files that were open without a name when the writer ended.
    loop {
        writes.extend(names.prepare());
        let is_more = names.remove_orphans(ORPHANS_AT_ONCE)?;
        writes.extend(names.commit());
        writes.extend(names.step());
        if !is_more {
            return Ok((names, writes));
        }
    }
}

/// Blocks that are read at a time: 1 MiB.
const READ_BLOCKS: u64 = 256;

const _: () = assert!(READ_BLOCKS as usize <= MOST_BLOCKS);

/// Inodes that are removed with one frame.
const ORPHANS_AT_ONCE: usize = 256;

/// Writes these blocks, and waits for the last one.
pub(super) fn write_all(disk: &dyn Disk, writes: Vec<BlocksToWrite>) -> Result<(), FilesError> {
    writes.into_iter().try_for_each(|BlocksToWrite { first, data }| wait(disk, Request::write(first, data)).map(drop))
}
