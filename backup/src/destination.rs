//! Destination: where the backups of one command go, and what is shown of them to those who watch.
//!
//! A plain folder has files that servers load as they are ([`Shelf`]). A store has objects, which a restore fetches
//! ([`Archive`]); so has a folder of encrypted backups.

use std::fmt;
use std::path::PathBuf;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use remora_base::moment::Moment;
use remora_metrics::{Families, Scrapes, register as all};
use remora_process::exit::Failure;
use remora_process::rdb_file::RdbFile;

use crate::archive::{self, Archive};
use crate::manifest::{Damaged, Manifest};
use crate::options::{BackupOptions, Location};
use crate::shelf::Shelf;
use crate::{sealing, store};

/// Where backups go.
#[derive(Debug)]
pub(crate) enum Destination {
    /// A folder.
    Folder(Shelf),
    /// A store of objects.
    Archive(Arc<Archive>),
}

impl Destination {
    /// Opens it for writing, and removes what a killed command has left there.
    ///
    /// # Errors
    /// It cannot be used, or another command writes there.
    pub(crate) fn open(options: &BackupOptions) -> Result<Destination, Failure> {
        let archive = match &options.to {
            Location::Path(folder) => {
                let (recipients, shelf) = (sealing::recipients(&options.encrypt_to)?, Shelf::open(folder)?);
                if recipients.is_none() {
                    return Ok(Destination::Folder(shelf));
                }
                Archive::open(store::in_folder(folder), &options.spool, recipients, Some(shelf))
            }
            Location::Bucket { bucket, prefix } => {
                let recipients = sealing::recipients(&options.encrypt_to)?;
                let store = store::of_bucket(bucket, prefix, &options.store, options.from.read.retry_for)?;
                Archive::open(store, &options.spool, recipients, None)
            }
        };
        archive.map(|archive| Destination::Archive(Arc::new(archive)))
    }

    /// Where a snapshot arrives.
    pub(crate) fn incoming_file(&self) -> PathBuf {
        match self {
            Destination::Folder(shelf) => shelf.incoming_file(),
            Destination::Archive(archive) => archive.incoming_file(),
        }
    }

    /// Where a backup is, for messages.
    pub(crate) fn address_of(&self, manifest: &Manifest) -> String {
        match self {
            Destination::Folder(shelf) => shelf.folder().join(&manifest.name).display().to_string(),
            Destination::Archive(archive) => archive.address_of(manifest),
        }
    }

    /// What is known of the backups that are there.
    ///
    /// # Errors
    /// The store cannot be read.
    pub(crate) fn manifests(&self) -> Result<Vec<Manifest>, Failure> {
        match self {
            Destination::Folder(shelf) => Ok(shelf.list().into_iter().map(|backup| backup.manifest).collect()),
            Destination::Archive(archive) => archive::list(archive.store(), Damaged::Skipped),
        }
    }

    /// Where the same backup is, if there is one.
    ///
    /// # Errors
    /// The store cannot be read.
    pub(crate) fn find(&self, manifest: &Manifest) -> Result<Option<String>, Failure> {
        match self {
            Destination::Folder(shelf) => Ok(shelf.find(manifest).map(|backup| backup.path.display().to_string())),
            Destination::Archive(archive) => archive.find(manifest),
        }
    }

    /// Makes a backup of the snapshot that has arrived. Returns where it is.
    ///
    /// # Errors
    /// It cannot be written.
    pub(crate) fn place(&self, rdb: &RdbFile, manifest: &Manifest) -> Result<String, Failure> {
        match self {
            Destination::Folder(shelf) => shelf.place(manifest).map(|path| path.display().to_string()),
            Destination::Archive(archive) => archive.place(rdb, manifest),
        }
    }

    /// Removes the oldest backups of the same history and kind, so that `keep` stay.
    pub(crate) fn keep(&self, newest: &Manifest, keep: u32) {
        match self {
            Destination::Folder(shelf) => shelf.keep(newest, keep),
            Destination::Archive(archive) => {
                // They are removed after the next backup.
                if let Err(failure) = archive.keep(newest, keep) {
                    tracing::warn!("old backups are not removed: {failure}");
                }
            }
        }
    }

    /// Sends nothing more to a store.
    pub(crate) fn stop(&self) {
        if let Destination::Archive(archive) = self {
            archive.stop();
        }
    }
}

impl fmt::Display for Destination {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Destination::Folder(shelf) => shelf.folder().display().fmt(f),
            Destination::Archive(archive) => f.write_str(&archive.store().address("")),
        }
    }
}

// Metrics: what a backup shows to those who watch it.

/// What has been seen. Clones are the same.
#[derive(Clone, Debug, Default)]
pub(crate) struct Seen(Arc<Mutex<State>>);

#[derive(Debug, Default)]
struct State {
    /// When the snapshot of the newest whole backup was taken, and its bytes.
    newest: Option<(Moment, u64)>,
    /// Whether another one arrives.
    is_beginning: bool,
    /// The commands that are recorded.
    recorded: Option<Arc<Recorded>>,
}

/// How far the commands are. The thread that records them writes it.
#[derive(Debug, Default)]
pub(crate) struct Recorded {
    /// The byte of the stream that is needed next.
    pub(crate) next_byte: AtomicU64,
    /// The last second that was noted.
    pub(crate) noted: AtomicU64,
    /// Whether they are being read from the source.
    pub(crate) is_reading: AtomicBool,
}

impl Seen {
    /// What those who ask are shown from now on.
    pub(crate) fn shown_to(scrapes: &mut Scrapes) -> Seen {
        let seen = Seen::default();
        let shown = seen.clone();
        scrapes.always(move |families| shown.show(families));
        seen
    }

    /// There is this whole backup. An older one than the newest changes nothing.
    pub(crate) fn has(&self, manifest: &Manifest) {
        let mut state = self.state();
        let found = (manifest.taken_seconds, manifest.bytes);
        state.newest = state.newest.max(Some(found));
    }

    pub(crate) fn begins(&self, is_beginning: bool) {
        self.state().is_beginning = is_beginning;
    }

    /// The commands that are recorded from now on.
    pub(crate) fn records(&self, recorded: Option<&Arc<Recorded>>) {
        self.state().recorded = recorded.cloned();
    }

    fn show(&self, families: &mut Families) {
        let state = self.state();
        if let Some((taken, bytes)) = state.newest {
            families.number(&all::BACKUP_TAKEN, taken.get());
            families.number(&all::BACKUP_BYTES, bytes);
        }
        families.whether(&all::BACKUP_BEGINNING, state.is_beginning);
        if let Some(recorded) = &state.recorded {
            families.whether(&all::BACKUP_SOURCE_UP, recorded.is_reading.load(Relaxed));
            families.number(&all::BACKUP_RECORDED, recorded.next_byte.load(Relaxed).saturating_sub(1));
            families.number(&all::BACKUP_NOTED, recorded.noted.load(Relaxed));
        }
    }

    /// The state is right after every statement, so a panic elsewhere does not invalidate it.
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
