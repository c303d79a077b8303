//! Disk: the store of a copy: what a server keeps of it in files, so that it has it again after its end.
//!
//! ```text
//!   event ─▶ record in the journal ─▶ memory ─▶ answer            one pwrite; the page cache outlives the process
//!                  │ fdatasync, for all records so far             `durable` advances; promises and marks are answered
//!                  ▼
//!            a segment is full ─▶ checkpoint: its blocks go to the extents, fdatasync, the segment is removed
//! ```
//!
//! - `journal`: an event as bytes: how the copy stands after it, and the blocks that it changed; the superblock, with
//!   which recovery begins; and what appends, and knows what is synced. **Start here.**
//! - Here: what a store asks of its folder, and the folder of the system that gives it.
//! - `checkpoint`: moves blocks from the journal's segments to the extents, and scrubs: it reads what no client reads,
//!   before it is needed.
//! - `recovery`: finds the copy again, and makes the store of one that becomes larger; the folders of
//!   a server's copies.
//!
//! What holds:
//!
//! - A copy that is found again is the copy as it was after one event, at or after the last one that was synced.
//! - A block in the extents that is torn is in the journal still: a segment is removed after the extents are synced.
//! - What was synced and is not readable any more is not taken for the end of the journal: the copy is lost, as what
//!   it has promised may be missing. That it was synced, a later record says, or after half a second the superblock.
//! - As long as the system runs, nothing is missing but a write that the process's end has interrupted.
//! - After an error of a write or a sync nothing is believed: the store is marked as lost, and the copy is.
//!
//! Assumed of the device: what was synced stays, also if a neighbouring sector is written when the power fails.

pub(crate) mod journal;
pub(crate) mod recovery;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::{fmt, io};

use rustix::fs::{FallocateFlags, OFlags, fallocate};
use rustix::io::Errno;

/// A file of a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Name {
    /// See [`journal`].
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

/// The files of one store, in a folder of the system. Only its user can read them.
#[derive(Debug)]
pub(crate) struct Folder {
    path: Mutex<PathBuf>,
    /// Those that were used, open.
    files: Mutex<HashMap<Name, Arc<File>>>,
}

impl Folder {
    /// The files in this folder, which exists.
    pub(crate) fn at(path: &Path) -> Folder {
        Folder { path: Mutex::new(path.into()), files: Mutex::default() }
    }

    /// Its path.
    pub(crate) fn folder(&self) -> PathBuf {
        self.path.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// It has this path from now on.
    fn moved(&self, path: PathBuf) {
        *self.path.lock().unwrap_or_else(PoisonError::into_inner) = path;
    }

    fn path_of(&self, name: Name) -> PathBuf {
        self.folder().join(name.to_string())
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Name, Arc<File>>> {
        self.files.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn file(&self, name: Name) -> io::Result<Arc<File>> {
        let mut files = self.lock();
        if let Some(file) = files.get(&name) {
            return Ok(Arc::clone(file));
        }
        let file = Arc::new(options().open(self.path_of(name))?);
        files.insert(name, Arc::clone(&file));
        Ok(file)
    }
}

/// A link is not followed: nothing outside of the folder is written.
fn options() -> OpenOptions {
    let mut options = OpenOptions::new();
    options.read(true).write(true).mode(0o600).custom_flags(OFlags::NOFOLLOW.bits() as i32);
    options
}

/// Gives the file its length, and takes the space for it, if the file system can.
fn reserve(file: &File, bytes: u64) -> io::Result<()> {
    match fallocate(file, FallocateFlags::empty(), 0, bytes) {
        Err(Errno::OPNOTSUPP | Errno::NOSYS) => file.set_len(bytes),
        other => Ok(other?),
    }
}

impl Files for Folder {
    fn create(&self, name: Name, bytes: u64) -> io::Result<()> {
        let path = self.path_of(name);
        let file = options().create(true).truncate(true).open(&path)?;
        if let Err(error) = reserve(&file, bytes) {
            let _ = std::fs::remove_file(path); // its space is needed
            return Err(error);
        }
        self.lock().insert(name, Arc::new(file));
        Ok(())
    }

    fn segments(&self) -> io::Result<Vec<u64>> {
        let mut numbers = Vec::new();
        for entry in std::fs::read_dir(self.folder())? {
            if let Some(Name::Segment(number)) = entry?.file_name().to_str().and_then(Name::parse) {
                numbers.push(number);
            }
        }
        numbers.sort_unstable();
        Ok(numbers)
    }

    fn read(&self, name: Name, at: u64, into: &mut [u8]) -> io::Result<usize> {
        let (file, mut has) = (self.file(name)?, 0);
        while let Some(rest) = into.get_mut(has..).filter(|rest| !rest.is_empty()) {
            match file.read_at(rest, at + has as u64) {
                Ok(0) => break,
                Ok(bytes) => has += bytes,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(has)
    }

    fn write(&self, name: Name, at: u64, parts: &[&[u8]]) -> io::Result<()> {
        let file = self.file(name)?;
        let bytes: usize = parts.iter().map(|part| part.len()).sum();
        if bytes <= COPIED || parts.len() > 2 {
            return file.write_all_at(&parts.concat(), at);
        }
        parts.iter().try_fold(at, |at, part| file.write_all_at(part, at).map(|()| at + part.len() as u64)).map(drop)
    }

    fn clear(&self, name: Name, from: u64) -> io::Result<()> {
        let file = self.file(name)?;
        let bytes = file.metadata()?.len();
        if from < bytes {
            file.set_len(from)?;
            // Its space may be gone for now. Then a later write says so.
            reserve(&file, bytes).or_else(|_| file.set_len(bytes))?;
        }
        Ok(())
    }

    fn sync(&self, name: Name) -> io::Result<()> {
        #[cfg(test)]
        if failing::is_below(&self.folder()) {
            return Err(io::Error::other("the device has failed in a test"));
        }
        self.file(name)?.sync_data()
    }

    fn sync_folder(&self) -> io::Result<()> {
        File::open(self.folder())?.sync_all()
    }

    fn remove(&self, name: Name) -> io::Result<()> {
        self.lock().remove(&name);
        std::fs::remove_file(self.path_of(name))
    }

    fn path(&self, name: Name) -> String {
        self.path_of(name).display().to_string()
    }
}

/// Bytes below which one call of the system is cheaper than not to copy them.
const COPIED: usize = 128 << 10;

/// Lets a test fail the syncs of a folder's stores.
#[cfg(test)]
pub(crate) mod failing {
    use std::path::{Path, PathBuf};
    use std::sync::{Mutex, PoisonError};

    static FOLDER: Mutex<Option<PathBuf>> = Mutex::new(None);

    pub(crate) fn set(folder: Option<&Path>) {
        *FOLDER.lock().unwrap_or_else(PoisonError::into_inner) = folder.map(Into::into);
    }

    pub(super) fn is_below(path: &Path) -> bool {
        let folder = FOLDER.lock().unwrap_or_else(PoisonError::into_inner);
        folder.as_ref().is_some_and(|folder| path.starts_with(folder))
    }
}
