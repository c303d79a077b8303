//! Target: where the backups of one command go.
//!
//! A plain folder has files that servers load as they are ([`shelf`](super::shelf)). A store has objects, which
//! `remora restore` fetches ([`archive`](super::archive)); so has a folder of encrypted backups.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

use super::archive::{Archive, layout};
use super::manifest::{Damaged, Manifest};
use super::rdb_file::RdbFile;
use super::sealing;
use super::shelf::Shelf;
use super::store;
use crate::args::{BackupArgs, Location};
use crate::exit::Failure;

/// Where backups go.
#[derive(Debug)]
pub(super) enum Target {
    /// A folder.
    Folder(Shelf),
    /// A store of objects.
    Archive(Arc<Archive>),
}

impl Target {
    /// Opens it for writing, and removes what a killed command has left there.
    ///
    /// # Errors
    /// It cannot be used, or another command writes there.
    pub(super) fn open(args: &BackupArgs) -> Result<Target, Failure> {
        let archive = match &args.to {
            Location::Path(folder) => {
                let (recipients, shelf) = (sealing::recipients(&args.encrypt_to)?, Shelf::open(folder)?);
                if recipients.is_none() {
                    return Ok(Target::Folder(shelf));
                }
                Archive::open(store::in_folder(folder), &args.spool, recipients, Some(shelf))
            }
            Location::Bucket { bucket, prefix } => {
                let recipients = sealing::recipients(&args.encrypt_to)?;
                let store = store::of_bucket(bucket, prefix, &args.store, args.from.read.retry_for)?;
                Archive::open(store, &args.spool, recipients, None)
            }
        };
        archive.map(|archive| Target::Archive(Arc::new(archive)))
    }

    /// Where a snapshot arrives.
    pub(super) fn incoming_file(&self) -> PathBuf {
        match self {
            Target::Folder(shelf) => shelf.incoming_file(),
            Target::Archive(archive) => archive.incoming_file(),
        }
    }

    /// Where a backup is, for messages.
    pub(super) fn address_of(&self, manifest: &Manifest) -> String {
        match self {
            Target::Folder(shelf) => shelf.folder().join(&manifest.name).display().to_string(),
            Target::Archive(archive) => archive.address_of(manifest),
        }
    }

    /// What is known of the backups that are there.
    ///
    /// # Errors
    /// The store cannot be read.
    pub(super) fn manifests(&self) -> Result<Vec<Manifest>, Failure> {
        match self {
            Target::Folder(shelf) => Ok(shelf.list().into_iter().map(|backup| backup.manifest).collect()),
            Target::Archive(archive) => layout::list(archive.store(), Damaged::Skipped),
        }
    }

    /// Where the same backup is, if there is one.
    ///
    /// # Errors
    /// The store cannot be read.
    pub(super) fn find(&self, manifest: &Manifest) -> Result<Option<String>, Failure> {
        match self {
            Target::Folder(shelf) => Ok(shelf.find(manifest).map(|backup| backup.path.display().to_string())),
            Target::Archive(archive) => archive.find(manifest),
        }
    }

    /// Makes a backup of the snapshot that has arrived. Returns where it is.
    ///
    /// # Errors
    /// It cannot be written.
    pub(super) fn place(&self, rdb: &RdbFile, manifest: &Manifest) -> Result<String, Failure> {
        match self {
            Target::Folder(shelf) => shelf.place(manifest).map(|path| path.display().to_string()),
            Target::Archive(archive) => archive.place(rdb, manifest),
        }
    }

    /// Removes the oldest backups of the same history and kind, so that `keep` stay.
    pub(super) fn keep(&self, newest: &Manifest, keep: u32) {
        match self {
            Target::Folder(shelf) => shelf.keep(newest, keep),
            Target::Archive(archive) => {
                // They are removed after the next backup.
                if let Err(failure) = archive.keep(newest, keep) {
                    tracing::warn!("old backups are not removed: {failure}");
                }
            }
        }
    }

    /// Sends nothing more to a store.
    pub(super) fn stop(&self) {
        if let Target::Archive(archive) = self {
            archive.stop();
        }
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Target::Folder(shelf) => shelf.folder().display().fmt(f),
            Target::Archive(archive) => f.write_str(&archive.store().address("")),
        }
    }
}
