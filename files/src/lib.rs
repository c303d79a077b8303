//! Files in a volume: a file system in the blocks of one, and its mount.
//!
//! ```text
//!   mount ──▶ Files: names in memory, one lock ── blocks, with the log ──▶ Disk: a volume
//!               ▲                                                           │
//!               ╰───────────────── acknowledged: the caller is told ◀───────╯
//!
//!   mount, read-only ──▶ Follower: names, read on when the log has grown ◀── one-sided reads ── Blocks: a copy
//! ```
//!
//! One host writes, by [`Files`] on a [`Disk`]: blocks that one process writes, such as a [`remora_volume`] volume. Any
//! number of hosts read, by a [`Follower`] on [`Blocks`](remora_volume::reader::Blocks) of a copy, and cost the writer
//! nothing. [`Image`] is all of a volume as one file, for another file system in it.
//!
//! - [`names`]: the names of files, in the order of what is written. Pure.
//! - `disk`: the blocks below, which of them a range of a file is, requests to them in their order, what is answered
//!   early, and threads of the disk. **Start here.**
//! - `core`: the lock, what is under way, changes of what is in files, reads, and how a volume gets files or
//!   has some. `files`: what can be asked.
//! - `image`: all of a volume as one file.
//! - `follower`: files on a host that only reads.
//! - Here: why something cannot be done ([`FilesError`]).
//! - [`mount`]: the files as a file system of the kernel.
//!
//! What is asked of names alone is answered at once. A change is answered when the volume has acknowledged it: then it
//! survives what an acknowledged write of the volume survives. After [`Files::fsync`] everything before it survives
//! what a flush does. What a page cache writes back may be answered before, and is then as safe as in that cache. A
//! write is in the volume together with the size and the clusters that it gives to its file, or it
//! is not.
//!
//! Names change in memory when a change is submitted. So another caller can see a change that is not acknowledged yet;
//! if the writer dies at that moment, the change may be lost.

#![forbid(unsafe_code)]

mod core;
mod disk;
mod files;
mod follower;
mod image;
pub mod mount;
pub mod names;
#[cfg(test)]
mod tests;

#[cfg(test)]
use std::cell::Cell;

use remora_volume::client;
use remora_volume::shape::BLOCK_BYTES;
use rustix::io::Errno;

use names::NamesError;
use names::layout::{HeadError, LEAST_BLOCKS};
use names::log::Malformed;

pub use core::Purpose;

pub use disk::{Disk, DiskDone};
pub use files::{Allocate, Files};
pub use follower::Follower;
pub use image::Image;

/// The most bytes of a write.
pub const MOST_WRITE_BYTES: usize = 4 << 20;

/// Why something was not done.
#[derive(Clone, Debug, thiserror::Error)]
pub enum FilesError {
    /// It cannot be done to these names.
    #[error(transparent)]
    Names(#[from] NamesError),
    /// The volume has failed. What was not acknowledged may or may not be there.
    #[error("the volume below the files: {0}")]
    Disk(#[from] client::Error),
    /// A host that only reads could not read.
    #[error("the volume below the files: {0}")]
    Blocks(String),
    /// The volume has no file system, or not one of this release.
    #[error(transparent)]
    Head(#[from] HeadError),
    /// It has one that is damaged.
    #[error("the names of the files are damaged: {0}; nothing was changed")]
    Damaged(#[from] Malformed),
    /// The volume is smaller than what the head says.
    #[error(
        "the files are of a volume of {said} blocks, and this one has {blocks}: use the volume's newest description"
    )]
    Shrunk {
        /// Blocks that the head says.
        said: u64,
        /// Blocks that there are.
        blocks: u64,
    },
    /// The volume is too small for files.
    #[error("a volume for files has at least {LEAST_BLOCKS} blocks of {BLOCK_BYTES} bytes")]
    TooSmall,
    /// There is something in the volume that would be lost.
    #[error(
        "the volume is not empty: block {0} holds something; use another one, or --force if nothing in it is needed"
    )]
    Occupied(u64),
    /// A block device or an image would be written over files.
    #[error("the volume has files: mount them (`remora volume mount`, without --image), or use another volume")]
    HasFiles,
    /// A write or a range is too long, or of no bytes.
    #[error("a write has at most {MOST_WRITE_BYTES} bytes, and a range at least one")]
    Length,
}

impl FilesError {
    /// What the system calls it.
    pub fn errno(&self) -> Errno {
        match self {
            FilesError::Names(error) => error.errno(),
            FilesError::Length => Errno::INVAL,
            FilesError::Occupied(_) => Errno::EXIST,
            FilesError::Disk(client::Error::NoSpace { .. }) => Errno::NOSPC,
            _ => Errno::IO,
        }
    }
}

/// A rule that is taken out.
#[cfg(test)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mutant {
    /// What a page cache has accepted and the volume has refused is said once, and later writes of the file go on.
    RefusedOnce,
    /// What is written is answered before it has its space.
    AnsweredWithoutSpace,
    /// An extended attribute of an inode that an image has passed is not written into it.
    XattrsNotPassedOn,
    /// An image takes the place of the log before the ends of inodes that were put off are in it.
    PutOffPastTheImage,
    /// A file that was removed is read as if it were there as late as the names say.
    RemovedIsThere,
    /// The head names larger areas before their image is written.
    HeadBeforeItsAreas,
    /// Files get the clusters in which the areas are.
    AreasAreFree,
}

#[cfg(test)]
thread_local! {
    static ACTIVE: Cell<Option<Mutant>> = const { Cell::new(None) };
}

#[cfg(test)]
impl Mutant {
    /// Whether this rule is taken out in this thread.
    pub(crate) fn is_active(self) -> bool {
        ACTIVE.get() == Some(self)
    }

    /// Takes this rule out in this thread, or none.
    pub(crate) fn set(mutant: Option<Mutant>) {
        ACTIVE.set(mutant);
    }
}
