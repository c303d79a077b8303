//! Snapshots without a server: files that servers start on, a mount, and backups with the commands since.
//!
//! ```text
//!   source ══ slots ═══▶ receiving ──▶ target ─┬─ file ──▶ dump.rdb in its place, or beside backups
//!          ══ journal ═▶ recorder ──▶ files    ├─ kept ──▶ standard output
//!                           │                  ╰─ kept ◀── mount ◀── kernel ◀── cp, redis-check-rdb, …
//!                           ▼
//!             shelf: a folder   archive: a store of objects ──▶ restore ──▶ a server's folder
//! ```
//!
//! Each job is a function that takes its options: [`fetch`](fetch::to_stdout) and its two halves
//! [`receive`](fetch::receive) and [`place`](fetch::Whole::place), [`mount`](mount::run), [`backup`](run) and
//! [`restore`](restore::run). None of them knows a command line; some of them end when a signal stops them.
//!
//! - `receiving` is the conversation with the source about a snapshot, as a replica has it, and reads the slots into a
//!   target. **Start there.**
//! - [`fetch`] has the slots beside the file that they become, or writes them to standard output. [`mount`] keeps them
//!   for the readers that wait for them, and shows them to the kernel.
//! - [`run`] makes a backup of a snapshot, and `journal` one of the commands since, of which `recorder` makes files.
//!   The destination, below, is where they go: `shelf` is a folder of backups, its names, and what is removed there;
//!   `archive` is objects of a `store`, such as a bucket, which it can encrypt. `manifest` says what a backup is.
//! - [`restore`] finds a backup, checks all of it, and lays out what a server starts on. `commands_file` checks a file
//!   of commands.
//!
//! A slot's bytes count when they match the source's checksum. What has arrived stays, whatever becomes of the source.
//! What does not arrive is an error, and never the end of a file. A backup gets its name when it is whole, checked and
//! on the disk.

#![forbid(unsafe_code)]

mod archive;
mod commands_file;
pub mod fetch;
mod journal;
mod manifest;
pub mod mount;
mod options;
mod receiving;
mod recorder;
pub mod restore;
mod shelf;
mod store;

use std::fmt;
use std::path::PathBuf;
use std::pin::pin;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use archive::Archive;
use manifest::{Damaged, Kind, Manifest};
use shelf::Shelf;

use remora_base::units::{Moment, Size, counted};
use remora_metrics::{Families, Scrapes, register as all};
use remora_process::exit::{Code, Failure};
use remora_process::rdb_file::RdbFile;
use remora_process::signals::Signals;
use remora_process::{blocking, progress};

pub use self::manifest::checked_snapshot;
pub use self::options::{
    BackupOptions, FetchOptions, JournalOptions, LEAST_FILE, Location, MountOptions, Pass, PassOn, ReplicaOf,
    RestoreOptions, SPOOL, SnapshotFrom, StoreOptions,
};

// Backup: a snapshot in a folder or a store, and with the journal the commands since.
//
// ```text
//   source ══ slots ══▶ .remora-incoming.rdb ── whole, checked ──▶ 20261125T234500Z-8c1c6b2f-307366.rdb   (+ .json)
// ```
//
// The fetch itself is [`fetch`], and the commands since are recorded by `journal`. [`RdbFile`] has the checks of a
// snapshot.

/// Makes a backup. With a journal it stays, until a signal stops it. Those who watch are shown how far it is.
///
/// # Errors
/// The folder or the store cannot be used, the source cannot be reached or refuses, or the snapshot is damaged.
pub async fn run(options: BackupOptions, scrapes: &mut Scrapes) -> Result<(), Failure> {
    if options.to.is_stdout() {
        if options.journal.is_some() || options.keep.is_some() {
            return Err(Failure::refused(
                "--to - writes the snapshot alone: omit --journal and --keep, or give a folder",
            ));
        }
        let file = FetchOptions::of_a_backup(options.from, PathBuf::from("-"));
        let fetched = fetch::to_stdout(&file, &options.spool);
        scrapes.meanwhile("the snapshot is being fetched", fetched).await?.show();
        return Ok(());
    }
    let options = Arc::new(options);
    let opened = Arc::clone(&options);
    let opening = blocking(move || {
        let target = Destination::open(&opened)?;
        let found = target.manifests()?;
        Ok((Arc::new(target), found))
    });
    let (target, found) = scrapes.meanwhile("what is there is being looked at", opening).await?;
    let seen = Seen::shown_to(scrapes);
    found.iter().for_each(|manifest| seen.has(manifest));
    match options.journal {
        Some(limits) => journal::run(options, limits, target, seen, scrapes).await,
        None => snapshot(&options, &target, &seen, scrapes).await,
    }
}

/// Makes a backup of the snapshot.
async fn snapshot(
    options: &BackupOptions,
    target: &Arc<Destination>,
    seen: &Seen,
    scrapes: &mut Scrapes,
) -> Result<(), Failure> {
    let began = Instant::now();
    let incoming = target.incoming_file();
    seen.begins(true);
    let file = FetchOptions::of_a_backup(options.from.clone(), incoming.clone());
    let fetched = fetch::to_file(&file, |_| {}, scrapes).await?;
    let (at, keep, source) = (Arc::clone(target), options.keep, options.from.read.source.to_string());
    let work = blocking(move || {
        let rdb = RdbFile::read(&incoming)?;
        let manifest = Manifest::of(Kind::Snapshot, &rdb, &fetched.server, source);
        if let Some(before) = at.find(&manifest)? {
            _ = std::fs::remove_file(&incoming); // the next backup replaces it
            return Ok((before, manifest, false));
        }
        let address = at.place(&rdb, &manifest)?;
        if let Some(keep) = keep {
            at.keep(&manifest, keep);
        }
        Ok((address, manifest, true))
    });
    let placed = scrapes.meanwhile("the snapshot is being checked and placed", stoppable(work, target));
    let (address, manifest, is_new) = placed.await?;
    seen.begins(false);
    seen.has(&manifest);
    say(&address, &manifest, is_new, began);
    Ok(())
}

/// Runs work that sends to the target, until a signal stops it: what was under way is broken off.
async fn stoppable<T>(work: impl Future<Output = Result<T, Failure>>, target: &Destination) -> Result<T, Failure> {
    let mut signals = Signals::catch()?;
    let mut work = pin!(work);
    let signal = tokio::select! {
        done = &mut work => return done,
        signal = signals.next() => signal,
    };
    target.stop();
    // It may be past the last thing that can be stopped.
    work.await.map_err(|failure| match failure.code {
        Code::Interrupted => {
            Failure::new(Code::Interrupted, format!("stopped by {signal}: there is no new backup in {target}"))
        }
        _ => failure,
    })
}

fn say(address: &str, manifest: &Manifest, is_new: bool, began: Instant) {
    let keys = manifest
        .keys
        .as_ref()
        .map(|keys| (counted(keys.values().sum::<u64>(), "key"), counted(keys.len(), "database")))
        .map_or_else(String::new, |(keys, databases)| format!(", {keys} in {databases}"));
    let text = format!(
        "{address}: {} of {} at {}:{}, taken {}{keys}",
        Size::bytes(manifest.bytes),
        manifest.server,
        manifest.replid,
        manifest.offset,
        manifest.taken
    );
    let end = match is_new {
        true => format!(", in {:.2} s", began.elapsed().as_secs_f64()),
        false => "; it was there already: the source has the same snapshot still (its --max-age)".to_owned(),
    };
    progress::say(&format!("{text}{end}"));
}

// Destination: where the backups of one command go, and what is shown of them to those who watch.
//
// A plain folder has files that servers load as they are ([`Shelf`]). A store has objects, which a restore fetches
// ([`Archive`]); so has a folder of encrypted backups.

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
                let (recipients, shelf) = (archive::recipients(&options.encrypt_to)?, Shelf::open(folder)?);
                if recipients.is_none() {
                    return Ok(Destination::Folder(shelf));
                }
                Archive::open(store::in_folder(folder), &options.spool, recipients, Some(shelf))
            }
            Location::Bucket { bucket, prefix } => {
                let recipients = archive::recipients(&options.encrypt_to)?;
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
