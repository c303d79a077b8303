//! Stores: where objects are kept under keys, in a folder or in a bucket.
//!
//! An object is there as a whole or not at all, and never changes; a short one can be replaced as a whole. What a
//! killed process has left is removed by [`Store::recover`].
//!
//! - [`folder`]: objects as files. [`bucket`]: objects of an S3-compatible store (feature `s3`).

#[cfg(feature = "s3")]
mod bucket;
#[cfg(feature = "s3")]
mod credentials;
pub(super) mod folder;
#[cfg(feature = "s3")]
mod http;

use std::fmt::Debug;
use std::io::{Read, Write};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use self::folder::FolderStore;
use crate::args::{Location, StoreArgs};
use crate::exit::Failure;

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
pub(super) fn open(at: &Location, args: &StoreArgs, retry_for: Duration) -> Result<Option<Arc<dyn Store>>, Failure> {
    match at {
        Location::Path(path) if path.is_dir() => Ok(Some(Arc::new(FolderStore::new(path)))),
        Location::Path(_) => Ok(None),
        Location::Bucket { bucket, prefix } => of_bucket(bucket, prefix, args, retry_for).map(Some),
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
    args: &StoreArgs,
    retry_for: Duration,
) -> Result<Arc<dyn Store>, Failure> {
    Ok(Arc::new(bucket::BucketStore::open(bucket, prefix, args, retry_for)?))
}

/// The store in a bucket.
#[cfg(not(feature = "s3"))]
pub(super) fn of_bucket(bucket: &str, _: &str, _: &StoreArgs, _: Duration) -> Result<Arc<dyn Store>, Failure> {
    Err(Failure::refused(format!("this remora was built without the feature s3, so s3://{bucket} cannot be used")))
}
