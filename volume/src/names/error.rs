//! Why something cannot be done to names.

use rustix::io::Errno;

use super::inode::{MOST_LINKS, MOST_TARGET_BYTES};
use super::record::{MOST_NAME_BYTES, Malformed};

/// Why something was not done. Nothing has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NamesError {
    /// There is no such name; or the directory was removed.
    #[error("no such file or directory")]
    NotFound,
    /// There is no inode of this number.
    #[error("inode {0} does not exist any more")]
    Stale(u64),
    /// There is such a name.
    #[error("the name exists")]
    Exists,
    /// It must be a directory.
    #[error("not a directory")]
    NotADirectory,
    /// It must not be a directory.
    #[error("is a directory")]
    IsADirectory,
    /// It must be a file.
    #[error("not a file")]
    NotAFile,
    /// A directory with entries cannot be removed.
    #[error("the directory is not empty")]
    NotEmpty,
    /// A directory cannot be moved into itself.
    #[error("a directory cannot be moved into itself")]
    WithinItself,
    /// A directory has one name.
    #[error("a directory has one name")]
    LinkOfDirectory,
    /// The inode has the most names.
    #[error("an inode has at most {MOST_LINKS} names")]
    TooManyLinks,
    /// The name is too long.
    #[error("a name has at most {MOST_NAME_BYTES} bytes")]
    NameTooLong,
    /// The target is too long.
    #[error("the target of a link has 1 to {MOST_TARGET_BYTES} bytes")]
    TargetTooLong,
    /// Not a name, or not a range of bytes.
    #[error("the name or the range is not valid")]
    Invalid,
    /// The file would be too long.
    #[error("a file has at most {} bytes", super::MOST_FILE_BYTES)]
    FileTooLong,
    /// No cluster is free, or the areas have no room for more names.
    #[error("no space is left in the volume")]
    NoSpace,
    /// What is in memory does not permit what was checked before: a bug.
    #[error("{0}: this is a bug")]
    Bug(Malformed),
}

impl NamesError {
    /// What the system calls it.
    pub fn errno(self) -> Errno {
        match self {
            NamesError::NotFound => Errno::NOENT,
            NamesError::Stale(_) => Errno::STALE,
            NamesError::Exists => Errno::EXIST,
            NamesError::NotADirectory => Errno::NOTDIR,
            NamesError::IsADirectory => Errno::ISDIR,
            NamesError::NotEmpty => Errno::NOTEMPTY,
            NamesError::WithinItself | NamesError::Invalid | NamesError::NotAFile => Errno::INVAL,
            NamesError::LinkOfDirectory => Errno::PERM,
            NamesError::TooManyLinks => Errno::MLINK,
            NamesError::NameTooLong | NamesError::TargetTooLong => Errno::NAMETOOLONG,
            NamesError::FileTooLong => Errno::FBIG,
            NamesError::NoSpace => Errno::NOSPC,
            NamesError::Bug(_) => Errno::IO,
        }
    }
}
