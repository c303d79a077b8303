//! `remora backup` and `remora restore`: snapshots in a folder, with the commands since, and what they are good for.
//!
//! ```text
//!   source ══ slots ══▶ .remora-incoming.rdb ── whole, checked ──▶ 20261125T234500Z-8c1c6b2f-307366.rdb   (+ .json)
//! ```
//!
//! - [`shelf`]: a folder of backups, its names, and what is removed there. [`archive`]: objects of a [`store`], such as
//!   a bucket, which [`sealing`] can encrypt. [`manifest`]: what a backup is, as JSON.
//! - [`rdb_file`](remora_process::rdb_file), [`commands_file`]: the checks of a snapshot and of a file of commands.
//!   [`moment`]: seconds as text and in names.
//! - [`journal`]: a snapshot and the commands since, in a folder of their own.
//! - [`restore`]: what there is, whether it is whole, and the files for a server.
//! - This file: a snapshot as a backup, where it goes ([`Target`]), and what is shown to those who watch. The fetch
//!   itself is [`crate::snapshot::fetch`].

pub(crate) mod archive;
mod commands_file;
mod journal;
mod manifest;
pub mod restore;
mod sealing;
mod shelf;
pub(crate) mod store;

use std::fmt;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use self::archive::Archive;
pub(crate) use self::manifest::checked_snapshot;
use self::manifest::{Damaged, Kind, Manifest};
use self::shelf::Shelf;
use crate::args::{BackupArgs, Location};
use crate::exit::{Code, Failure};
use crate::metrics::{Agent, Families, Scrapes, Watch, register as all};
use crate::progress;
use crate::reader::data_set::DataSet;
use crate::signals::Signals;
use crate::snapshot::fetch;
use crate::tasks::blocking;
use crate::units::{Size, counted};
use remora_base::moment::{self, Moment};
use remora_process::rdb_file::RdbFile;

/// Runs `remora backup`.
///
/// # Errors
/// The folder or the store cannot be used, the source cannot be reached or refuses, or the snapshot is damaged.
pub async fn run(args: BackupArgs) -> Result<(), Failure> {
    let (watch, mut scrapes) =
        Watch::begin(Agent::Backup, args.metrics.metrics, args.metrics_file.metrics_file.as_deref()).await?;
    let outcome = backup(args, &mut scrapes).await;
    scrapes.leave(|_| {});
    watch.end(outcome).await
}

async fn backup(args: BackupArgs, scrapes: &mut Scrapes) -> Result<(), Failure> {
    if args.to.is_stdout() {
        if args.journal || args.keep.is_some() {
            return Err(Failure::refused(
                "--to - writes the snapshot alone: omit --journal and --keep, or give a folder",
            ));
        }
        let fetched = fetch::run(args.fetch(Path::new("-")));
        return scrapes.meanwhile("the snapshot is being fetched", fetched).await;
    }
    let opened = args.clone();
    let opening = blocking(move || {
        let target = Target::open(&opened)?;
        let found = target.manifests()?;
        Ok((Arc::new(target), found))
    });
    let (target, found) = scrapes.meanwhile("what is there is being looked at", opening).await?;
    let seen = Seen::shown_to(scrapes);
    found.iter().for_each(|manifest| seen.has(manifest));
    match args.journal {
        true => journal::run(args, target, seen, scrapes).await,
        false => snapshot(&args, &target, &seen, scrapes).await,
    }
}

/// Makes a backup of the snapshot.
async fn snapshot(args: &BackupArgs, target: &Arc<Target>, seen: &Seen, scrapes: &mut Scrapes) -> Result<(), Failure> {
    let began = Instant::now();
    let incoming = target.incoming_file();
    seen.begins(true);
    let data_set = DataSet::of_a_source(args.from.expected.is_given());
    let fetched = fetch::to_file_telling(&args.fetch(&incoming), data_set, |_| {}, scrapes).await?;
    let (at, keep, source) = (Arc::clone(target), args.keep, args.from.read.source.to_string());
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
async fn stoppable<T>(work: impl Future<Output = Result<T, Failure>>, target: &Target) -> Result<T, Failure> {
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

// Target: where the backups of one command go.
//
// A plain folder has files that servers load as they are ([`shelf`]). A store has objects, which
// `remora restore` fetches ([`archive`]); so has a folder of encrypted backups.

/// Where backups go.
#[derive(Debug)]
enum Target {
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
    fn open(args: &BackupArgs) -> Result<Target, Failure> {
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
    fn incoming_file(&self) -> PathBuf {
        match self {
            Target::Folder(shelf) => shelf.incoming_file(),
            Target::Archive(archive) => archive.incoming_file(),
        }
    }

    /// Where a backup is, for messages.
    fn address_of(&self, manifest: &Manifest) -> String {
        match self {
            Target::Folder(shelf) => shelf.folder().join(&manifest.name).display().to_string(),
            Target::Archive(archive) => archive.address_of(manifest),
        }
    }

    /// What is known of the backups that are there.
    ///
    /// # Errors
    /// The store cannot be read.
    fn manifests(&self) -> Result<Vec<Manifest>, Failure> {
        match self {
            Target::Folder(shelf) => Ok(shelf.list().into_iter().map(|backup| backup.manifest).collect()),
            Target::Archive(archive) => archive::list(archive.store(), Damaged::Skipped),
        }
    }

    /// Where the same backup is, if there is one.
    ///
    /// # Errors
    /// The store cannot be read.
    fn find(&self, manifest: &Manifest) -> Result<Option<String>, Failure> {
        match self {
            Target::Folder(shelf) => Ok(shelf.find(manifest).map(|backup| backup.path.display().to_string())),
            Target::Archive(archive) => archive.find(manifest),
        }
    }

    /// Makes a backup of the snapshot that has arrived. Returns where it is.
    ///
    /// # Errors
    /// It cannot be written.
    fn place(&self, rdb: &RdbFile, manifest: &Manifest) -> Result<String, Failure> {
        match self {
            Target::Folder(shelf) => shelf.place(manifest).map(|path| path.display().to_string()),
            Target::Archive(archive) => archive.place(rdb, manifest),
        }
    }

    /// Removes the oldest backups of the same history and kind, so that `keep` stay.
    fn keep(&self, newest: &Manifest, keep: u32) {
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
    fn stop(&self) {
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

// Metrics: what a backup shows to those who watch it.

/// What has been seen. Clones are the same.
#[derive(Clone, Debug, Default)]
struct Seen(Arc<Mutex<State>>);

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
struct Recorded {
    /// The byte of the stream that is needed next.
    next_byte: AtomicU64,
    /// The last second that was noted.
    noted: AtomicU64,
    /// Whether they are being read from the source.
    is_reading: AtomicBool,
}

impl Seen {
    /// What those who ask are shown from now on.
    fn shown_to(scrapes: &mut Scrapes) -> Seen {
        let seen = Seen::default();
        let shown = seen.clone();
        scrapes.always(move |families| shown.show(families));
        seen
    }

    /// There is this whole backup. An older one than the newest changes nothing.
    fn has(&self, manifest: &Manifest) {
        let mut state = self.state();
        let found = (manifest.taken_seconds, manifest.bytes);
        state.newest = state.newest.max(Some(found));
    }

    fn begins(&self, is_beginning: bool) {
        self.state().is_beginning = is_beginning;
    }

    /// The commands that are recorded from now on.
    fn records(&self, recorded: Option<&Arc<Recorded>>) {
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
