//! Opening: a volume gets files, or has some.

use std::sync::Arc;
use std::sync::mpsc;

use bytes::Bytes;
use remora_volume::client::{Error, Request};
use remora_volume::shape::BLOCK_BYTES;
use remora_volume::wire::{MOST_BLOCKS, Run};

use crate::core::now;
use crate::disk::Disk;
use crate::error::FilesError;
use crate::names::layout::{Geometry, Head};
use crate::names::{BlocksToWrite, Names, New, View};

/// Blocks at the beginning of a volume that must be zeros before it gets files: partition tables and the superblocks of
/// other file systems are in there.
const LOOKED_AT: u32 = 64;

/// Submits a request, and waits for its completion.
fn wait(disk: &dyn Disk, request: Request) -> Result<Bytes, FilesError> {
    let (done, is_done) = mpsc::sync_channel(1);
    disk.submit(request, Box::new(move |result| _ = done.send(result))); // the other end waits below
    Ok(is_done.recv().unwrap_or(Err(Error::Closed))?)
}

/// What a volume is opened for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// Its files are used.
    Files,
    /// All of it is a block device or an image.
    Device,
    /// It gets files. With `force` whatever it holds.
    Format {
        /// What it holds is lost.
        force: bool,
    },
}

impl Purpose {
    /// Whether a volume of this number of blocks can be opened for this. `read` reads blocks of it; another writer may
    /// change them meanwhile.
    ///
    /// # Errors
    /// What keeps it from being opened, as the opening itself would say; or [`FilesError::Blocks`] if it cannot be
    /// read.
    pub fn check(self, blocks: u64, mut read: impl FnMut(Run) -> Result<Bytes, String>) -> Result<(), FilesError> {
        let mut read = |run| read(run).map_err(FilesError::Blocks);
        match self {
            Purpose::Files => {
                let mut tries = LOOKS;
                loop {
                    tries -= 1;
                    match view(blocks, &mut read) {
                        // The log was written, or its area used again, while it was read.
                        Err(FilesError::Damaged(_)) if tries > 0 => std::thread::sleep(LOOK_AGAIN),
                        result => return result.map(drop),
                    }
                }
            }
            Purpose::Device => has_no_files(&read(Run { first: 0, count: 1 })?),
            Purpose::Format { force: true } => Geometry::of(blocks).map(drop).ok_or(FilesError::TooSmall),
            Purpose::Format { force: false } => {
                Geometry::of(blocks).ok_or(FilesError::TooSmall)?;
                is_empty(&read(Run { first: 0, count: LOOKED_AT })?)
            }
        }
    }
}

/// Whether the first block of a volume is not the head of files.
pub(crate) fn has_no_files(first: &[u8]) -> Result<(), FilesError> {
    if Head::parse(first).is_ok() { Err(FilesError::HasFiles) } else { Ok(()) }
}

/// Whether these blocks, the first ones, are zeros.
fn is_empty(first: &[u8]) -> Result<(), FilesError> {
    let used = first.chunks(BLOCK_BYTES).position(|block| block.iter().any(|byte| *byte != 0));
    used.map_or(Ok(()), |block| Err(FilesError::Occupied(block as u64)))
}

/// Makes an empty file system.
pub(crate) fn format(disk: &dyn Disk, root: &New, force: bool) -> Result<(), FilesError> {
    let geometry = Geometry::of(disk.blocks()).ok_or(FilesError::TooSmall)?;
    if !force {
        is_empty(&wait(disk, Request::Read(Run { first: 0, count: LOOKED_AT }))?)?;
    }
    for BlocksToWrite { first, data } in Names::format(geometry, root, now()) {
        wait(disk, Request::write(first, data))?;
    }
    wait(disk, Request::Flush).map(drop)
}

/// The names in a volume of this number of blocks, with the head that says where they are.
fn view(blocks: u64, mut read: impl FnMut(Run) -> Result<Bytes, FilesError>) -> Result<(Head, View), FilesError> {
    let head = Head::parse(&read(Run { first: 0, count: 1 })?)?;
    let said = head.geometry.blocks();
    if said > blocks {
        return Err(FilesError::Shrunk { said, blocks });
    }
    let mut view = View::new(head);
    loop {
        let (first, most) = view.wants();
        let count = most.min(READ_BLOCKS) as u32;
        let is_more = match count {
            0 => view.push(&[])?,
            count => view.push(&read(Run { first, count })?)?,
        };
        if !is_more {
            break;
        }
        if count == 0 {
            return Err(FilesError::Damaged(crate::names::log::Malformed("the end of an area")));
        }
    }
    Ok((head, view))
}

/// The names in a volume, with what must be written before they are used.
pub(crate) fn open(disk: &Arc<dyn Disk>) -> Result<(Names, Vec<BlocksToWrite>), FilesError> {
    let blocks = disk.blocks();
    let (head, view) = view(blocks, |run| wait(&**disk, Request::Read(run)))?;
    let mut names = Names::of(view, blocks)?;
    let mut writes = Vec::new();
    if names.head() != head {
        writes.push(BlocksToWrite { first: 0, data: names.head().to_block() });
    }
    if names.begin_to_move() {
        write_all(&**disk, std::mem::take(&mut writes))?;
        loop {
            let (blocks, has_moved) = names.go_on_to_move();
            write_all(&**disk, blocks)?;
            if has_moved {
                break;
            }
        }
        tracing::info!(inodes = names.usage().inodes, "the volume has grown, and so has the room for names");
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

/// How often names are read that another writer changes meanwhile, before they are called damaged.
const LOOKS: u32 = 5;

/// Pause between two looks: much longer than it takes to read the end of a log.
const LOOK_AGAIN: std::time::Duration = std::time::Duration::from_millis(100);

/// Blocks that are read at a time: 1 MiB.
const READ_BLOCKS: u64 = 256;

const _: () = assert!(READ_BLOCKS as usize <= MOST_BLOCKS);

/// Inodes that are removed with one frame.
const ORPHANS_AT_ONCE: usize = 256;

/// Writes these blocks, and waits for the last one.
pub(crate) fn write_all(disk: &dyn Disk, writes: Vec<BlocksToWrite>) -> Result<(), FilesError> {
    writes.into_iter().try_for_each(|BlocksToWrite { first, data }| wait(disk, Request::write(first, data)).map(drop))
}
