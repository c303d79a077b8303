//! Stores: where objects are kept under keys, in a folder or in a bucket.
//!
//! An object is there as a whole or not at all, and never changes; a short one can be replaced as a whole. What a
//! killed process has left is removed by [`Store::recover`].
//!
//! - [`FolderStore`]: objects as files. [`bucket`]: objects of an S3-compatible store (feature `s3`).

#[cfg(feature = "s3")]
mod bucket;

use std::fmt::Debug;
use std::fs::{self, DirBuilder, File};
use std::io::{self, Read, Write};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tempfile::NamedTempFile;

use crate::options::{Location, StoreOptions};
use remora_base::files::{self, PRIVATE};
use remora_process::exit::Failure;

/// Where objects are kept. All calls block, so they are for threads that may. Each of them is bounded in time.
pub(super) trait Store: Debug + Send + Sync {
    /// The object's address, for messages; of the store itself with an empty key.
    fn address(&self, key: &str) -> String;

    /// The keys right below `under` (a key without a slash at its end; empty: the store), with their sizes.
    fn list(&self, under: &str) -> Result<Vec<Object>, Failure>;

    /// Begins to read an object; `None` if it does not exist.
    fn read(&self, key: &str) -> Result<Option<Box<dyn Read + Send>>, Failure>;

    /// Begins an object of about this length. It is there when [`Upload::finish`] has returned.
    fn upload(&self, key: &str, about: u64) -> Result<Box<dyn Upload>, Failure>;

    /// Removes objects. A missing one is no error.
    fn remove(&self, keys: &[String]) -> Result<(), Failure>;

    /// Ends requests that are under way, and refuses others, except those by which an [`Upload`] leaves nothing.
    fn stop(&self);

    /// Removes what a process has left that was killed in an [`Upload`]. Only while no other process writes there.
    fn recover(&self) -> Result<(), Failure>;
}

/// An object that is written. Dropping it leaves nothing.
pub(super) trait Upload: Write + Send {
    /// Ends it, with its name.
    fn finish(self: Box<Self>) -> Result<(), Failure>;
}

/// An object that is there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Object {
    pub(super) key: String,
    pub(super) bytes: u64,
}

/// Bytes of a short object at most: manifests, and how far something is.
const SHORT: u64 = 4 << 20;

/// Writes a short object, as a whole.
pub(super) fn put(store: &dyn Store, key: &str, bytes: &[u8]) -> Result<(), Failure> {
    let mut upload = store.upload(key, bytes.len() as u64)?;
    upload.write_all(bytes).map_err(|error| Failure::local(format!("{}: {error}", store.address(key))))?;
    upload.finish()
}

/// Reads a short object; `None` if it does not exist.
pub(super) fn get(store: &dyn Store, key: &str) -> Result<Option<Vec<u8>>, Failure> {
    let Some(reader) = store.read(key)? else { return Ok(None) };
    let mut bytes = Vec::new();
    let read = reader.take(SHORT).read_to_end(&mut bytes);
    read.map_err(|error| Failure::refused(format!("{} cannot be read: {error}", store.address(key))))?;
    Ok(Some(bytes))
}

/// The store at this place, for reading; `None` for a path that is not a folder. `retry_for`: how long a request is
/// tried again while a bucket's store cannot be reached.
pub(super) fn open(
    at: &Location,
    options: &StoreOptions,
    retry_for: Duration,
) -> Result<Option<Arc<dyn Store>>, Failure> {
    match at {
        Location::Path(path) if path.is_dir() => Ok(Some(Arc::new(FolderStore::new(path)))),
        Location::Path(_) => Ok(None),
        Location::Bucket { bucket, prefix } => of_bucket(bucket, prefix, options, retry_for).map(Some),
    }
}

/// The store in this folder.
pub(super) fn in_folder(path: &Path) -> Arc<dyn Store> {
    Arc::new(FolderStore::new(path))
}

/// The store in a bucket.
#[cfg(feature = "s3")]
pub(super) fn of_bucket(
    bucket: &str,
    prefix: &str,
    options: &StoreOptions,
    retry_for: Duration,
) -> Result<Arc<dyn Store>, Failure> {
    Ok(Arc::new(bucket::BucketStore::open(bucket, prefix, options, retry_for)?))
}

/// The store in a bucket.
#[cfg(not(feature = "s3"))]
pub(super) fn of_bucket(bucket: &str, _: &str, _: &StoreOptions, _: Duration) -> Result<Arc<dyn Store>, Failure> {
    Err(Failure::refused(format!("this remora was built without the feature s3, so s3://{bucket} cannot be used")))
}

// A folder as a store: objects are files, and keys are their paths.

/// What files are called that have no name yet.
const ARRIVING: &str = ".remora-upload-";

/// A folder with objects.
#[derive(Debug)]
pub(super) struct FolderStore {
    folder: PathBuf,
}

impl FolderStore {
    pub(super) fn new(folder: &Path) -> FolderStore {
        FolderStore { folder: folder.to_owned() }
    }

    fn path(&self, key: &str) -> PathBuf {
        if key.is_empty() { self.folder.clone() } else { self.folder.join(key) }
    }

    fn failed(&self, key: &str) -> impl Fn(io::Error) -> Failure {
        let path = self.path(key);
        move |error| Failure::local(format!("{}: {error}", path.display()))
    }
}

impl Store for FolderStore {
    fn address(&self, key: &str) -> String {
        self.path(key).display().to_string()
    }

    fn list(&self, under: &str) -> Result<Vec<Object>, Failure> {
        let entries = match fs::read_dir(self.path(under)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries.map_err(self.failed(under))?,
        };
        let mut all = Vec::new();
        for entry in entries {
            let entry = entry.map_err(self.failed(under))?;
            let Ok(name) = entry.file_name().into_string() else { continue };
            // A file that has just been removed is not an object.
            let Ok(facts) = entry.metadata() else { continue };
            if facts.is_file() && !name.starts_with(ARRIVING) {
                let key = if under.is_empty() { name } else { format!("{under}/{name}") };
                all.push(Object { key, bytes: facts.len() });
            }
        }
        all.sort_by(|one, other| one.key.cmp(&other.key));
        Ok(all)
    }

    fn read(&self, key: &str) -> Result<Option<Box<dyn Read + Send>>, Failure> {
        match File::open(self.path(key)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            file => Ok(Some(Box::new(file.map_err(self.failed(key))?))),
        }
    }

    fn upload(&self, key: &str, _: u64) -> Result<Box<dyn Upload>, Failure> {
        let to = self.path(key);
        if let Some(parent) = to.parent() {
            DirBuilder::new().recursive(true).mode(0o700).create(parent).map_err(self.failed(key))?;
        }
        let file = tempfile::Builder::new().prefix(ARRIVING).tempfile_in(&self.folder).map_err(self.failed(key))?;
        Ok(Box::new(Arriving { file, to }))
    }

    fn remove(&self, keys: &[String]) -> Result<(), Failure> {
        for key in keys {
            let path = self.path(key);
            match fs::remove_file(&path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(self.failed(key)(error)),
                _ => {}
            }
            // The folders that hold nothing more, up to the store's own. A store has none of its own without objects.
            let above = path.ancestors().skip(1).take_while(|folder| *folder != self.folder);
            for folder in above {
                if fs::remove_dir(folder).is_err() {
                    break;
                }
            }
        }
        Ok(())
    }

    fn stop(&self) {
        // No call takes long.
    }

    fn recover(&self) -> Result<(), Failure> {
        for entry in fs::read_dir(&self.folder).map_err(self.failed(""))?.flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            if name.starts_with(ARRIVING) {
                fs::remove_file(entry.path()).map_err(self.failed(&name))?;
            }
        }
        Ok(())
    }
}

/// A file that has no name yet.
struct Arriving {
    file: NamedTempFile,
    to: PathBuf,
}

impl Write for Arriving {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.file.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

impl Upload for Arriving {
    fn finish(self: Box<Self>) -> Result<(), Failure> {
        let (file, fresh) = self.file.into_parts();
        files::put(&file, &fresh, &self.to, &PRIVATE)?;
        _ = fresh.keep(); // it has another name by now
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn an_object_is_there_as_a_whole_and_what_was_arriving_is_gone() {
        let folder = tempfile::tempdir().unwrap();
        let store = FolderStore::new(folder.path());
        put(&store, "a/b/c", b"first").unwrap();
        put(&store, "a/b/c", b"second").unwrap();
        put(&store, "a/d", b"other").unwrap();
        assert_eq!(get(&store, "a/b/c").unwrap().unwrap(), b"second");
        assert_eq!(get(&store, "a/b/x").unwrap(), None);
        let mut half = store.upload("a/e", 9).unwrap();
        half.write_all(b"half").unwrap();
        assert_eq!(store.list("a").unwrap(), [Object { key: "a/d".into(), bytes: 5 }]);
        drop(half);
        fs::write(folder.path().join(".remora-upload-xyz"), b"of a killed process").unwrap();
        assert_eq!(store.list("").unwrap(), []);
        store.recover().unwrap();
        store.remove(&["a/b/c".into(), "a/b/x".into()]).unwrap();
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
        assert!(!folder.path().join("a/b").exists());
        assert_eq!(store.list("nowhere").unwrap(), []);
    }
}
