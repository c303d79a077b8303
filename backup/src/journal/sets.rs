//! Sets: a snapshot and the commands since, in a folder or in an archive.

use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use remora_redis::aof::{FileKind, Manifest as List, NamedFile};
use rustix::fs::RenameFlags;

use crate::Destination;
use crate::archive::{self, Limits, Segments};
use crate::commands_file::{HEAD_BYTES, checked_list, head};
use crate::manifest::{Damaged, Kind, Manifest};
use crate::options::JournalOptions;
use crate::recorder::{Files, Finished, Recorder};
use crate::shelf::{MANIFEST, Shelf};
use remora_base::files::{self, PRIVATE};
use remora_process::exit::Failure;
use remora_process::rdb_file::RdbFile;

/// A set without a name.
#[derive(Debug)]
pub(super) enum Beginning {
    Folder(Arc<Place>),
    Archive(Arc<Segments>),
}

/// When a file of commands is followed by another one.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sizes {
    file_size: u64,
    segment_every: Duration,
}

impl Sizes {
    pub(super) fn of(options: &JournalOptions) -> Sizes {
        Sizes { file_size: options.file_size.get(), segment_every: options.segment_every }
    }

    fn limits(self) -> Limits {
        Limits { age: self.segment_every, bytes: self.file_size }
    }
}

/// Goes on with the newest set, if there is one.
///
/// # Errors
/// It is there, and cannot be gone on with.
pub(super) fn resume(target: &Destination, sizes: Sizes) -> Result<Option<(Manifest, Recorder)>, Failure> {
    match target {
        Destination::Folder(shelf) => resume_folder(shelf, sizes),
        Destination::Archive(archive) => {
            let all = archive::list(archive.store(), Damaged::Skipped)?;
            let Some(newest) = all.into_iter().rev().find(|backup| backup.kind == Kind::Journal) else {
                return Ok(None);
            };
            let reached = archive::reached(archive.store(), &newest.name)?;
            // Sent, and not counted: it comes again.
            let beyond = archive::segments(archive.store(), &newest.name)?;
            let beyond = beyond.into_iter().filter(|segment| segment.number > reached.segments);
            archive.store().remove(&beyond.map(|segment| segment.key).collect::<Vec<_>>())?;
            let segments = Segments::again(Arc::clone(archive), sizes.limits(), newest.name.clone(), reached.clone());
            let recorder = Recorder::go_on(Arc::new(segments), reached.offset, reached.database, reached.noted_seconds);
            Ok(Some((newest, recorder.map_err(|error| unusable(target, &error))?)))
        }
    }
}

fn resume_folder(shelf: &Shelf, sizes: Sizes) -> Result<Option<(Manifest, Recorder)>, Failure> {
    let all = shelf.list();
    let Some(newest) = all.into_iter().rev().find(|backup| backup.manifest.kind == Kind::Journal) else {
        return Ok(None);
    };
    let (place, path) = Place::reopen(&newest.path, sizes.file_size)?;
    let recorder = Recorder::resume(Arc::new(place), &path)?;
    Ok(Some((newest.manifest, recorder)))
}

fn unusable(target: &Destination, error: &std::io::Error) -> Failure {
    Failure::local(format!("{target} cannot be used: {error}"))
}

/// Begins a set, behind a snapshot at this offset.
///
/// # Errors
/// Its first file cannot be made.
pub(super) fn begin(target: &Destination, sizes: Sizes, offset: u64) -> Result<(Beginning, Recorder), Failure> {
    let failed = |error| unusable(target, &error);
    let (set, files): (Beginning, Arc<dyn Files>) = match target {
        Destination::Folder(shelf) => {
            let place = Arc::new(Place::create(shelf.incoming_folder()?, sizes.file_size).map_err(failed)?);
            (Beginning::Folder(Arc::clone(&place)), place)
        }
        Destination::Archive(archive) => {
            let segments = Arc::new(Segments::new(Arc::clone(archive), sizes.limits()));
            (Beginning::Archive(Arc::clone(&segments)), segments)
        }
    };
    Ok((set, Recorder::begin(files, offset).map_err(failed)?))
}

impl Beginning {
    /// Puts the snapshot that has arrived in, and gives the set its name. Returns the manifest with that name.
    ///
    /// # Errors
    /// Something cannot be written.
    pub(super) fn publish(
        &self,
        target: &Destination,
        rdb: &RdbFile,
        manifest: &Manifest,
    ) -> Result<Manifest, Failure> {
        match (self, target) {
            (Beginning::Folder(place), Destination::Folder(shelf)) => {
                let incoming: PathBuf = shelf.incoming_file();
                place.publish(&incoming, rdb, manifest, shelf.folder())
            }
            (Beginning::Archive(segments), _) => segments.publish(rdb, manifest),
            (Beginning::Folder(_), Destination::Archive(_)) => {
                Err(Failure::local("a folder was begun for an archive; this is a bug of remora, please report it"))
            }
        }
    }
}

// Place: the folder of a snapshot and its commands, while it is written.
//
// ```text
//   .remora-incoming/appendonlydir/appendonly.aof.1.incr.aof …      commands, while the snapshot arrives
//         │ the snapshot is whole: base, list, backup.json, and the name
//         ▼
//   20261125T234500Z-8c1c6b2f-307366/appendonlydir/…                what restore and servers read
// ```
//
// The folder gets its name while a thread writes commands there, so both hold the lock for what depends on the name.

/// The servers' default name of the folder (`appenddirname`).
const FOLDER: &str = "appendonlydir";

/// The snapshot in that folder.
const BASE: &str = "appendonly.aof.1.base.rdb";

/// The list in that folder.
const LIST: &str = "appendonly.aof.manifest";

/// How many names are tried for a folder: of a snapshot that was taken once, and backed up again after a gap.
const NAMES: u32 = 1000;

/// The folder of a snapshot and its commands.
#[derive(Debug)]
pub(crate) struct Place {
    state: Mutex<State>,
    /// A file that is larger is followed by another one.
    file_size: u64,
}

#[derive(Debug)]
struct State {
    folder: PathBuf,
    /// Numbers of the files of commands.
    numbers: Vec<u64>,
    has_base: bool,
    /// The database that the stream writes to until it selects one, once the snapshot has said it.
    database: Option<u64>,
    /// Files that begin before the stream has selected a database, with the offset in their heads.
    unselected: Vec<(u64, u64)>,
}

fn name_of(number: u64) -> String {
    format!("appendonly.aof.{number}.incr.aof")
}

impl Place {
    /// A new one in an empty folder.
    pub(crate) fn create(folder: PathBuf, file_size: u64) -> io::Result<Place> {
        fs::DirBuilder::new().mode(0o700).create(folder.join(FOLDER))?;
        let (numbers, unselected) = (Vec::new(), Vec::new());
        let state = State { folder, numbers, has_base: false, database: None, unselected };
        Ok(Place { state: Mutex::new(state), file_size })
    }

    /// One that has been written to. Returns the last file of commands too.
    ///
    /// # Errors
    /// Its list cannot be read.
    pub(crate) fn reopen(folder: &Path, file_size: u64) -> Result<(Place, PathBuf), Failure> {
        let list = folder.join(FOLDER).join(LIST);
        let unreadable = |what: &dyn std::fmt::Display| Failure::refused(format!("{}: {what}", list.display()));
        let bytes = fs::read(&list).map_err(|error| unreadable(&error))?;
        let files = List::parse(&bytes).map_err(|error| unreadable(&error))?.files;
        let numbers =
            files.iter().filter(|file| file.kind == FileKind::Incremental && file.name == name_of(file.number));
        let numbers: Vec<u64> = numbers.map(|file| file.number).collect();
        let last = *numbers.last().ok_or_else(|| unreadable(&"it names no file of commands"))?;
        let path = folder.join(FOLDER).join(name_of(last));
        let state =
            State { folder: folder.to_owned(), numbers, has_base: true, database: Some(0), unselected: Vec::new() };
        Ok((Place { state: Mutex::new(state), file_size }, path))
    }

    /// What it holds is right after every statement, so a panic elsewhere does not invalidate it.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Puts the snapshot in, and gives the folder its name. Returns the manifest with that name.
    ///
    /// # Errors
    /// Something cannot be written or named.
    pub(super) fn publish(
        &self,
        base: &Path,
        rdb: &RdbFile,
        manifest: &Manifest,
        to: &Path,
    ) -> Result<Manifest, Failure> {
        let mut state = self.state();
        let failed = |path: &Path, error: io::Error| Failure::local(format!("{}: {error}", path.display()));
        let name = state.folder.join(FOLDER).join(BASE);
        let file = File::open(base).map_err(|error| failed(base, error))?;
        files::put(&file, base, &name, &PRIVATE)?;
        for (number, offset) in std::mem::take(&mut state.unselected) {
            let path = state.folder.join(FOLDER).join(name_of(number));
            let file = File::options().write(true).open(&path).map_err(|error| failed(&path, error))?;
            let written = file.write_all_at(&head(rdb.stream_db, offset), 0).and_then(|()| file.sync_all());
            written.map_err(|error| failed(&path, error))?;
        }
        (state.has_base, state.database) = (true, Some(rdb.stream_db));
        state.list()?;
        for attempt in 1..=NAMES {
            let mut manifest = manifest.clone();
            if attempt > 1 {
                manifest.name = format!("{}-{attempt}", manifest.name);
            }
            manifest.write(&state.folder.join(MANIFEST))?;
            let named = to.join(&manifest.name);
            let flags = RenameFlags::NOREPLACE;
            match rustix::fs::renameat_with(rustix::fs::CWD, &state.folder, rustix::fs::CWD, &named, flags) {
                Err(rustix::io::Errno::EXIST) => continue,
                renamed => renamed.map_err(|errno| failed(&named, errno.into()))?,
            }
            state.folder = named;
            File::open(to).and_then(|folder| folder.sync_all()).map_err(|error| failed(to, error))?;
            return Ok(manifest);
        }
        Err(Failure::local(format!("{} has {NAMES} backups of the same snapshot: remove some", to.display())))
    }
}

impl Files for Place {
    fn name(&self) -> String {
        self.state().folder.display().to_string()
    }

    fn is_due(&self, bytes: u64) -> bool {
        bytes >= self.file_size
    }

    fn next(&self, _: Option<Finished<'_>>, database: Option<u64>, offset: u64) -> io::Result<(File, u64)> {
        let mut state = self.state();
        let number = state.numbers.last().map_or(1, |last| last + 1);
        let path = state.folder.join(FOLDER).join(name_of(number));
        let mut file = File::options().read(true).write(true).create(true).truncate(true).mode(0o600).open(&path)?;
        let known = database.or(state.database);
        file.write_all(&head(known.unwrap_or(0), offset))?;
        file.sync_all()?;
        if known.is_none() {
            state.unselected.push((number, offset));
        }
        state.numbers.push(number);
        if state.has_base {
            // It is named before it has commands.
            state.list().map_err(|failure| io::Error::other(failure.message))?;
        }
        Ok((file, HEAD_BYTES as u64))
    }

    fn sync(&self, file: &File) -> io::Result<()> {
        file.sync_data()
    }

    fn end(&self, last: Finished<'_>) -> io::Result<()> {
        last.file.sync_all()
    }
}

impl State {
    /// Writes the list, as a whole.
    fn list(&self) -> Result<(), Failure> {
        let base = NamedFile { name: BASE.to_owned(), number: 1, kind: FileKind::Base };
        let file = |number: &u64| NamedFile { name: name_of(*number), number: *number, kind: FileKind::Incremental };
        let files = std::iter::once(base).chain(self.numbers.iter().map(file)).collect();
        let list = checked_list(&List { files });
        Ok(files::write(&self.folder.join(FOLDER).join(LIST), list.as_bytes(), &PRIVATE)?)
    }
}
