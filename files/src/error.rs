//! Why something cannot be done to files.

use remora_volume::client;
use remora_volume::shape::BLOCK_BYTES;
use rustix::io::Errno;

use crate::names::NamesError;
use crate::names::layout::{HeadError, LEAST_BLOCKS};
use crate::names::log::Malformed;

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
