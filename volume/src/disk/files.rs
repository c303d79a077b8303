//! Files: what a store asks of its folder.

use std::fmt;
use std::io;

/// A file of a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Name {
    /// See [`super::superblock`].
    Superblock,
    /// The blocks and their entries, as of the last checkpoint.
    Extents,
    /// A part of the journal.
    Segment(u64),
}

impl Name {
    /// The file of this name, if it is one of a store's.
    pub(crate) fn parse(name: &str) -> Option<Name> {
        match name {
            "superblock" => Some(Name::Superblock),
            "extents" => Some(Name::Extents),
            name => name.strip_prefix("journal-").and_then(|number| number.parse().ok()).map(Name::Segment),
        }
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Name::Superblock => f.write_str("superblock"),
            Name::Extents => f.write_str("extents"),
            Name::Segment(number) => write!(f, "journal-{number}"),
        }
    }
}

/// The files of one store. What is written is durable once it was synced; a file that was made or removed, once the
/// folder was.
pub(crate) trait Files {
    /// Makes a file of zeros, with space for all of them. One that is there is emptied.
    fn create(&self, name: Name, bytes: u64) -> io::Result<()>;

    /// The numbers of the segments, in ascending order.
    fn segments(&self) -> io::Result<Vec<u64>>;

    /// Reads up to the end of the file. Returns the number of bytes.
    fn read(&self, name: Name, at: u64, into: &mut [u8]) -> io::Result<usize>;

    /// Writes these parts one after the other.
    fn write(&self, name: Name, at: u64, parts: &[&[u8]]) -> io::Result<()>;

    /// Makes zeros of everything behind this offset.
    fn clear(&self, name: Name, from: u64) -> io::Result<()>;

    /// Returns when everything that was written to the file is durable.
    fn sync(&self, name: Name) -> io::Result<()>;

    /// Returns when the names of the files are durable.
    fn sync_folder(&self) -> io::Result<()>;

    /// Removes a file.
    fn remove(&self, name: Name) -> io::Result<()>;

    /// The path of a file, for people.
    fn path(&self, name: Name) -> String;
}

/// Why a store does not do what it should.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Failure {
    /// The device is full. Nothing has changed.
    #[error("no space for {path}: {why}; free some, or use another folder for --store")]
    Full {
        /// The file.
        path: String,
        /// What the system says.
        why: String,
    },
    /// A write, a read or a sync has failed. The store must not be believed any more.
    #[error("the store has failed at {path}: {why}; check the device, its log and its file system")]
    Lost {
        /// The file.
        path: String,
        /// What the system says.
        why: String,
    },
}

impl Failure {
    /// A file has failed so.
    pub(crate) fn of(files: &impl Files, name: Name, error: &io::Error) -> Failure {
        let (path, why) = (files.path(name), error.to_string());
        match error.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded | io::ErrorKind::FileTooLarge => {
                Failure::Full { path, why }
            }
            _ => Failure::Lost { path, why },
        }
    }

    /// A sync has failed so. Nothing is known of what it was for, whatever the reason.
    pub(crate) fn of_sync(files: &impl Files, name: Name, error: &io::Error) -> Failure {
        Failure::Lost { path: files.path(name), why: format!("sync: {error}") }
    }

    /// What is in the file cannot be used.
    pub(crate) fn damaged(files: &impl Files, name: Name, why: &str) -> Failure {
        Failure::Lost { path: files.path(name), why: why.into() }
    }
}
