//! Archive: backups as objects of a store that cannot append or rename.
//!
//! First the archive, then the keys of its objects, the commands since a snapshot, and encryption.
//!
//! Nothing is a backup before its manifest is there, which is written last. A note says which backup arrives or is
//! being removed, so the next command finds what a killed one has left, and removes it.
//!
//! One command at a time writes. A store has no locks: each command writes its own mark at its beginning, and looks for
//! it before each thing that counts. One whose mark was replaced ends. On one host the spool folder is locked.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::commands_file::{HEAD_BYTES, head};
use crate::manifest::{Damaged, Kind, Manifest, Stored, is_name, oldest_first};
use crate::recorder::{Files, Finished};
use crate::shelf::Shelf;
use crate::store::{self, Object, Store, Upload, get, put};
use remora_base::files::{Claim, Folder, is_unsafe};
use remora_base::units::Moment;
use remora_process::checked_json::{self, Checksum};
use remora_process::exit::{Code, Failure};
use remora_process::progress::{Meter, Unit};
use remora_process::rdb_file::RdbFile;
use remora_redis::rdb::crc64;

/// The snapshot that arrives, in the spool folder.
const INCOMING: &str = "incoming.rdb";

/// Bytes that are read at a time.
const PIECE: usize = 1 << 20;

/// How many names are tried: of a snapshot that was taken once, and backed up again after a gap.
const NAMES: u32 = 1000;

/// An archive that this command writes to.
#[derive(Debug)]
pub(crate) struct Archive {
    store: Arc<dyn Store>,
    /// The folder of this host where things are before they are sent.
    spool: PathBuf,
    /// Who can open its objects; `None`: they are not encrypted.
    recipients: Option<Recipients>,
    /// The mark of this command.
    writer: String,
    /// Nothing more is sent.
    stop: AtomicBool,
    _claim: Claim,
    /// The store's folder, if it is one.
    _shelf: Option<Shelf>,
}

impl Archive {
    /// Opens the archive in a store for writing, and removes what a killed command has left. `spool`: the folder in
    /// which its own is made. `shelf`: the store's folder, which is claimed.
    ///
    /// # Errors
    /// The store cannot be reached, or the folder cannot be used.
    pub(crate) fn open(
        store: Arc<dyn Store>,
        spool: &Path,
        recipients: Option<Recipients>,
        shelf: Option<Shelf>,
    ) -> Result<Archive, Failure> {
        let at = store.address("");
        let spool = spool.join(format!("remora-backup-{:016x}", crc64(0, at.as_bytes())));
        let unusable = |error: io::Error| {
            let text = format!("{} cannot be used (--spool): {error}", spool.display());
            if is_unsafe(&error) { Failure::refused(text) } else { Failure::local(text) }
        };
        let claim = Folder::open(&spool).and_then(|folder| folder.claim()).map_err(unusable)?;
        let Some(claim) = claim else {
            return Err(Failure::refused(format!("another remora backup writes to {at}; wait for it, or end it")));
        };
        let mut random = [0; 8];
        getrandom::fill(&mut random)
            .map_err(|error| Failure::local(format!("the system gives no random bytes: {error}")))?;
        let writer = format!("{:016x}", u64::from_le_bytes(random));
        let stop = AtomicBool::new(false);
        let archive = Archive { store, spool, recipients, writer, stop, _claim: claim, _shelf: shelf };
        put(archive.store(), WRITER, archive.writer.as_bytes())?;
        archive.store.recover()?;
        archive.clean()?;
        Ok(archive)
    }

    pub(crate) fn store(&self) -> &dyn Store {
        &*self.store
    }

    /// Where the snapshot arrives, on this host.
    pub(crate) fn incoming_file(&self) -> PathBuf {
        self.spool.join(INCOMING)
    }

    /// The folder of this host where things are before they are sent.
    pub(crate) fn spool(&self) -> &Path {
        &self.spool
    }

    /// Sends nothing more: what is under way fails soon.
    pub(crate) fn stop(&self) {
        self.stop.store(true, Relaxed);
        self.store.stop();
    }

    /// The address of a backup.
    pub(crate) fn address_of(&self, manifest: &Manifest) -> String {
        self.store.address(&manifest.name)
    }

    /// The address of the same backup, if it is there.
    ///
    /// # Errors
    /// The store cannot be read.
    pub(crate) fn find(&self, manifest: &Manifest) -> Result<Option<String>, Failure> {
        let found = read(self.store(), name_of(manifest))?;
        Ok(found.map(|found| self.address_of(&found)))
    }

    /// Sends the snapshot that has arrived, and makes it a backup. Returns its address.
    ///
    /// # Errors
    /// The store cannot be written to.
    pub(crate) fn place(&self, rdb: &RdbFile, manifest: &Manifest) -> Result<String, Failure> {
        let mut manifest = manifest.clone();
        manifest.name = name_of(&manifest).to_owned();
        self.begin(&manifest.name)?;
        self.send_snapshot(rdb, &mut manifest)?;
        self.publish(&manifest)?;
        Ok(self.address_of(&manifest))
    }

    /// A name for a new backup that none has.
    fn free_name(&self, manifest: &Manifest) -> Result<String, Failure> {
        let wanted = name_of(manifest);
        for attempt in 1..=NAMES {
            let name = if attempt == 1 { wanted.to_owned() } else { format!("{wanted}-{attempt}") };
            if read(self.store(), &name)?.is_none() {
                return Ok(name);
            }
        }
        Err(Failure::local(format!("{} has {NAMES} backups of the same snapshot: remove some", self.store.address(""))))
    }

    /// Notes that a backup arrives.
    fn begin(&self, name: &str) -> Result<(), Failure> {
        put(self.store(), &format!("{UNFINISHED}/{name}"), self.writer.as_bytes())
    }

    /// Sends the snapshot from the spool folder, and says in the manifest what has been stored.
    fn send_snapshot(&self, rdb: &RdbFile, manifest: &mut Manifest) -> Result<(), Failure> {
        let key = snapshot_key(&manifest.name, manifest.kind, self.recipients.is_some());
        let incoming = self.incoming_file();
        let unreadable = |error: io::Error| Failure::local(format!("{}: {error}", incoming.display()));
        let file = File::open(&incoming).map_err(unreadable)?;
        let meter = Meter::start(format!("upload to {}", self.store.address("")), Unit::Bytes, Some(rdb.bytes));
        let (bytes, crc) = self.send(&key, Shown { file, meter: &meter }, rdb.bytes, self.recipients.as_ref())?;
        meter.finish();
        if bytes < rdb.bytes {
            return Err(unreadable(io::Error::other("it has become shorter")));
        }
        let encryption = self.recipients.as_ref().map(|_| FORMAT.to_owned());
        manifest.stored = Some(Stored { object: key, bytes, crc64: format!("{crc:016x}"), encryption });
        Ok(())
    }

    /// An encrypted copy of what is read, in the spool folder and without a name, if objects are encrypted.
    fn sealed(&self, mut from: impl Read) -> io::Result<Option<(File, u64)>> {
        let Some(recipients) = &self.recipients else { return Ok(None) };
        let mut sealing = Sealing::begin(Some(recipients), tempfile::tempfile_in(&self.spool)?)?;
        io::copy(&mut from, &mut sealing)?;
        let file = sealing.finish()?;
        let bytes = file.metadata()?.len();
        Ok(Some((file, bytes)))
    }

    /// Sends an object, encrypted to these recipients. Returns the length and the checksum of what is stored.
    fn send(
        &self,
        key: &str,
        mut from: impl Read,
        about: u64,
        recipients: Option<&Recipients>,
    ) -> Result<(u64, u64), Failure> {
        let failed = |error: io::Error| failure_of(error, &self.store.address(key));
        let upload = Counted { upload: self.store.upload(key, about)?, bytes: 0, crc: 0 };
        let mut sealing = Sealing::begin(recipients, upload).map_err(failed)?;
        let mut piece = vec![0; PIECE];
        loop {
            if self.stop.load(Relaxed) {
                return Err(Failure::new(Code::Interrupted, format!("{}: stopped", self.store.address(key))));
            }
            let length = match from.read(&mut piece) {
                Ok(0) => break,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                read => read.map_err(failed)?,
            };
            sealing.write_all(piece.get(..length).unwrap_or_default()).map_err(failed)?;
        }
        let Counted { upload, bytes, crc } = sealing.finish().map_err(failed)?;
        upload.finish()?;
        Ok((bytes, crc))
    }

    /// Makes a backup of what has been sent.
    fn publish(&self, manifest: &Manifest) -> Result<(), Failure> {
        self.check_writer()?;
        put(self.store(), &manifest_key(&manifest.name), &manifest.to_json()?)?;
        self.store.remove(&[format!("{UNFINISHED}/{}", manifest.name)])?;
        // The next snapshot replaces it.
        _ = std::fs::remove_file(self.incoming_file());
        Ok(())
    }

    /// Refuses to go on if another command writes here.
    fn check_writer(&self) -> Result<(), Failure> {
        let mark = store::get(self.store(), WRITER)?;
        if mark.as_deref() == Some(self.writer.as_bytes()) {
            return Ok(());
        }
        let at = self.store.address("");
        Err(Failure::refused(format!("another remora backup has begun to write to {at}: this one ends")))
    }

    /// Removes the oldest backups of the same history and kind, so that `keep` stay.
    pub(crate) fn keep(&self, newest: &Manifest, keep: u32) -> Result<(), Failure> {
        let mut all = list(self.store(), Damaged::Skipped)?;
        all.retain(|backup| backup.kind == newest.kind && backup.replid == newest.replid);
        let surplus = all.len().saturating_sub(keep as usize);
        for backup in all.into_iter().take(surplus).filter(|backup| backup.name != name_of(newest)) {
            tracing::info!("{} is removed: {keep} newer ones are kept", self.address_of(&backup));
            self.check_writer()?;
            self.begin(&backup.name)?;
            self.store.remove(&[manifest_key(&backup.name)])?;
            self.remove_objects(&backup.name)?;
        }
        Ok(())
    }

    /// Removes the objects of backups that have arrived in part, or have been removed in part.
    fn clean(&self) -> Result<(), Failure> {
        for object in self.store.list(UNFINISHED)? {
            let Some(name) = object.key.rsplit('/').next().filter(|name| is_name(name)) else { continue };
            if read(self.store(), name)?.is_some() {
                self.store.remove(std::slice::from_ref(&object.key))?;
            } else {
                tracing::info!("{} was not ended, and is removed", self.store.address(name));
                self.remove_objects(name)?;
            }
        }
        Ok(())
    }

    /// Removes all of a backup that has no manifest, and the note of it at the end.
    fn remove_objects(&self, name: &str) -> Result<(), Failure> {
        let mut keys: Vec<String> = Vec::new();
        for kind in [Kind::Snapshot, Kind::Journal] {
            keys.extend([false, true].map(|is_sealed| snapshot_key(name, kind, is_sealed)));
        }
        keys.push(reached_key(name));
        keys.extend(segments(self.store(), name)?.into_iter().map(|segment| segment.key));
        self.store.remove(&keys)?;
        self.store.remove(&[format!("{UNFINISHED}/{name}")])
    }
}

/// A file whose bytes are shown as they are read.
struct Shown<'a> {
    file: File,
    meter: &'a Meter,
}

impl Read for Shown<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let length = self.file.read(into)?;
        self.meter.add(length as u64);
        Ok(length)
    }
}

/// An upload whose bytes are counted and summed.
struct Counted {
    upload: Box<dyn Upload>,
    bytes: u64,
    crc: u64,
}

impl Write for Counted {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let taken = self.upload.write(bytes)?;
        self.bytes += taken as u64;
        self.crc = crc64(self.crc, bytes.get(..taken).unwrap_or_default());
        Ok(taken)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.upload.flush()
    }
}

/// The name of a backup in an archive: without an ending, whatever its kind.
fn name_of(manifest: &Manifest) -> &str {
    manifest.name.strip_suffix(".rdb").unwrap_or(&manifest.name)
}

/// What has gone wrong in a store, if it was that, or what this error says of a thing.
pub(crate) fn failure_of(error: io::Error, what: &str) -> Failure {
    match error.downcast::<Failure>() {
        Ok(failure) => failure,
        Err(error) => Failure::local(format!("{what}: {error}")),
    }
}

// Layout: the keys of an archive's objects, and what the short ones hold.
//
// ```text
//   20261125T234500Z-8c1c6b2f-307366.json                    the manifest, last: without it there is no backup
//   20261125T234500Z-8c1c6b2f-307366.rdb                     a snapshot; `.rdb.age`, and so on, if it is encrypted
//   20261125T234500Z-8c1c6b2f-307366/base.rdb                the snapshot of a backup with commands
//   20261125T234500Z-8c1c6b2f-307366/commands/00000001-…     the commands since, in segments that never change
//   20261125T234500Z-8c1c6b2f-307366/commands.json           how many segments there are, and how far they reach
//   .remora-unfinished/20261125T234500Z-8c1c6b2f-307366      the backup arrives, or is being removed
//   .remora-writer                                           which command writes here
// ```

/// Where it is noted that a backup arrives, or is being removed.
const UNFINISHED: &str = ".remora-unfinished";

/// Which command writes.
const WRITER: &str = ".remora-writer";

/// How far the segments of a backup reach.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Reached {
    /// How many segments there are.
    pub(crate) segments: u64,
    /// The last byte of the stream in them.
    pub(crate) offset: u64,
    /// The database that is selected there.
    pub(crate) database: u64,
    /// The last second that was noted.
    pub(crate) noted_seconds: Moment,
    /// From 2 on, the object has a checksum.
    #[serde(default)]
    version: u32,
}

/// The version of the object that this program writes.
const REACHED_VERSION: u32 = 2;

impl Reached {
    /// The same with the version and its checksum, as it is stored.
    ///
    /// # Errors
    /// It has no text; that would be a bug.
    fn to_json(&self) -> Result<Vec<u8>, Failure> {
        let stored = Reached { version: REACHED_VERSION, ..self.clone() };
        checked_json::to_json(&stored).map_err(|error| Failure::local(error.to_string()))
    }

    fn parse(bytes: &[u8]) -> Result<Reached, String> {
        let read: Reached = serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
        match checked_json::check(bytes) {
            Checksum::Right => Ok(read),
            Checksum::Missing if read.version < REACHED_VERSION => Ok(read),
            Checksum::Missing | Checksum::Wrong => Err("its checksum does not match".to_owned()),
        }
    }
}

/// A segment, as its key says it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Segment {
    pub(crate) key: String,
    /// From 1 on, without a gap.
    pub(crate) number: u64,
    /// The second in which it was begun: no command in it is of an earlier one.
    pub(crate) begun: Moment,
    /// Checksum of the object.
    pub(crate) crc: u64,
    pub(crate) bytes: u64,
}

fn manifest_key(name: &str) -> String {
    format!("{name}.json")
}

/// The key of a backup's snapshot.
fn snapshot_key(name: &str, kind: Kind, is_sealed: bool) -> String {
    let ending = ending(is_sealed);
    match kind {
        Kind::Snapshot => format!("{name}.rdb{ending}"),
        Kind::Journal => format!("{name}/base.rdb{ending}"),
    }
}

fn ending(is_sealed: bool) -> &'static str {
    if is_sealed { ENDING } else { "" }
}

fn reached_key(name: &str) -> String {
    format!("{name}/commands.json")
}

fn segment_key(name: &str, number: u64, begun: Moment, crc: u64, is_sealed: bool) -> String {
    format!("{name}/commands/{number:08}-{}-{crc:016x}.aof{}", begun.compact(), ending(is_sealed))
}

impl Segment {
    /// Reads a key; `None` if it is of another object.
    fn of(object: Object) -> Option<Segment> {
        let file = object.key.rsplit('/').next()?;
        let file = file.strip_suffix(ENDING).unwrap_or(file).strip_suffix(".aof")?;
        let (number, rest) = file.split_once('-')?;
        let (begun, crc) = rest.split_once('-')?;
        let (number, crc) = (number.parse().ok()?, u64::from_str_radix(crc, 16).ok()?);
        let begun = Moment::from_compact(begun)?;
        Some(Segment { number, begun, crc, bytes: object.bytes, key: object.key })
    }
}

/// The segments of a backup, in order.
pub(crate) fn segments(store: &dyn Store, name: &str) -> Result<Vec<Segment>, Failure> {
    let mut all: Vec<Segment> = store.list(&format!("{name}/commands"))?.into_iter().filter_map(Segment::of).collect();
    all.sort_by_key(|segment| segment.number);
    Ok(all)
}

/// How far the segments of a backup reach.
///
/// # Errors
/// The object is missing or damaged.
pub(crate) fn reached(store: &dyn Store, name: &str) -> Result<Reached, Failure> {
    let key = reached_key(name);
    let bytes = get(store, &key)?.ok_or_else(|| missing(store, &key))?;
    Reached::parse(&bytes).map_err(|error| Failure::refused(format!("{} is damaged: {error}", store.address(&key))))
}

/// What is said of an object that must be there.
pub(crate) fn missing(store: &dyn Store, key: &str) -> Failure {
    Failure::refused(format!("{} is missing: the backup is damaged", store.address(key)))
}

/// The backups in a store, the oldest first. `damaged`: what becomes of a manifest that is damaged.
///
/// # Errors
/// The store cannot be read, or a manifest is damaged and that is an error.
pub(crate) fn list(store: &dyn Store, damaged: Damaged) -> Result<Vec<Manifest>, Failure> {
    let mut all = Vec::new();
    for Object { key, .. } in store.list("")? {
        let Some(name) = key.strip_suffix(".json").filter(|name| is_name(name)) else { continue };
        all.extend(damaged.of(read(store, name))?.flatten());
    }
    Ok(oldest_first(all, |manifest| manifest))
}

/// The backup of this name.
///
/// # Errors
/// The store cannot be read, or the manifest is damaged.
pub(crate) fn read(store: &dyn Store, name: &str) -> Result<Option<Manifest>, Failure> {
    let key = manifest_key(name);
    let Some(bytes) = get(store, &key)? else { return Ok(None) };
    let manifest = Manifest::parse(&bytes, name, &store.address(&key))?;
    Ok(manifest.filter(|manifest| manifest.stored.is_some() && manifest.name == name))
}

// Segments: the commands since a snapshot, as objects that never change.
//
// ```text
//   recorder ──▶ a file without a name ── large enough, or old enough ──▶ object ──▶ commands.json says that it is there
// ```
//
// A segment is a file of commands with a head of its own. While the snapshot still arrives, the files wait: the
// database with which they begin is in the snapshot, and so is their backup's name.

/// Where the commands of one backup go.
#[derive(Debug)]
pub(crate) struct Segments {
    archive: Arc<Archive>,
    /// A segment is sent when it is as old or as large as this.
    limits: Limits,
    state: Mutex<State>,
}

/// When a segment is sent.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    pub(crate) age: Duration,
    pub(crate) bytes: u64,
}

#[derive(Debug)]
struct State {
    /// The name of the backup, once it has one.
    name: Option<String>,
    /// The database that the stream writes to until it selects one, once the snapshot has said it.
    database: Option<u64>,
    /// Files that have ended, and wait for the name.
    waiting: Vec<Ended>,
    /// The file that is written.
    present: Begun,
    reached: Reached,
}

/// What is known at a file's beginning.
#[derive(Clone, Copy, Debug)]
struct Begun {
    at: Instant,
    second: Moment,
    /// The offset in its head, if the database there is not known.
    unselected: Option<u64>,
}

/// A file that has ended.
#[derive(Debug)]
struct Ended {
    file: File,
    bytes: u64,
    begun: Begun,
    offset: u64,
    database: Option<u64>,
    noted: Moment,
}

impl Segments {
    /// Those of a backup that begins.
    pub(crate) fn new(archive: Arc<Archive>, limits: Limits) -> Segments {
        Segments::of(archive, limits, None, None, Reached::default())
    }

    /// Those of a backup that goes on.
    pub(crate) fn again(archive: Arc<Archive>, limits: Limits, name: String, reached: Reached) -> Segments {
        Segments::of(archive, limits, Some(name), Some(reached.database), reached)
    }

    fn of(
        archive: Arc<Archive>,
        limits: Limits,
        name: Option<String>,
        database: Option<u64>,
        reached: Reached,
    ) -> Segments {
        let present = Begun { at: Instant::now(), second: Moment::now(), unselected: None };
        let state = Mutex::new(State { name, database, waiting: Vec::new(), present, reached });
        Segments { archive, limits, state }
    }

    /// What it holds is right after every statement, so a panic elsewhere does not invalidate it.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends the snapshot that has arrived and the commands until now, and makes them a backup. Returns the manifest
    /// with its name.
    ///
    /// # Errors
    /// The store cannot be written to.
    pub(crate) fn publish(&self, rdb: &RdbFile, manifest: &Manifest) -> Result<Manifest, Failure> {
        let name = self.archive.free_name(manifest)?;
        let mut manifest = manifest.clone();
        manifest.name.clone_from(&name);
        self.archive.begin(&name)?;
        self.archive.send_snapshot(rdb, &mut manifest)?;
        let mut reached = Reached { offset: rdb.offset, database: rdb.stream_db, ..Reached::default() };
        loop {
            // Commands go on meanwhile.
            let waiting = std::mem::take(&mut self.state().waiting);
            if waiting.is_empty() {
                break;
            }
            self.send_all(waiting, &name, rdb.stream_db, &mut reached)?;
        }
        let mut state = self.state();
        let waiting = std::mem::take(&mut state.waiting);
        self.send_all(waiting, &name, rdb.stream_db, &mut reached)?;
        self.say(&name, &reached)?;
        self.archive.publish(&manifest)?;
        (state.name, state.database, state.reached) = (Some(name), Some(rdb.stream_db), reached);
        Ok(manifest)
    }

    fn send_all(&self, all: Vec<Ended>, name: &str, database: u64, reached: &mut Reached) -> Result<(), Failure> {
        all.into_iter().try_for_each(|ended| self.send(ended, name, database, reached))
    }

    /// Sends a file. `database`: the one of a stream that has not selected any.
    fn send(&self, ended: Ended, name: &str, database: u64, reached: &mut Reached) -> Result<(), Failure> {
        let unreadable = |error: io::Error| Failure::local(format!("{}: {error}", self.archive.spool().display()));
        if let Some(offset) = ended.begun.unselected {
            ended.file.write_all_at(&head(database, offset), 0).map_err(unreadable)?;
        }
        let sealed = self.archive.sealed(Part::of(&ended.file, ended.bytes)).map_err(unreadable)?;
        let (file, bytes) = sealed.as_ref().map_or((&ended.file, ended.bytes), |(file, bytes)| (file, *bytes));
        let crc = checksum(&mut Part::of(file, bytes)).map_err(unreadable)?;
        let key = segment_key(name, reached.segments + 1, ended.begun.second, crc, sealed.is_some());
        let sent = self.archive.send(&key, Part::of(file, bytes), bytes, None)?;
        if sent != (bytes, crc) {
            return Err(unreadable(io::Error::other("a file without a name has changed")));
        }
        *reached = Reached {
            segments: reached.segments + 1,
            offset: ended.offset,
            database: ended.database.unwrap_or(database),
            noted_seconds: ended.noted,
            ..Reached::default()
        };
        Ok(())
    }

    /// Says how far the segments reach.
    fn say(&self, name: &str, reached: &Reached) -> Result<(), Failure> {
        self.archive.check_writer()?;
        let json = reached.to_json()?;
        put(self.archive.store(), &reached_key(name), &json)
    }

    /// Takes the present file as one that has ended.
    fn ended(&self, state: &mut State, file: Finished<'_>) -> io::Result<()> {
        let Finished { file, bytes, offset, database, noted } = file;
        let ended = Ended { file: file.try_clone()?, bytes, begun: state.present, offset, database, noted };
        let (Some(name), Some(known)) = (state.name.clone(), state.database) else {
            state.waiting.push(ended);
            return Ok(());
        };
        let mut reached = state.reached.clone();
        let sent = self.archive.check_writer().and_then(|()| self.send(ended, &name, known, &mut reached));
        sent.and_then(|()| self.say(&name, &reached)).map_err(io::Error::other)?;
        state.reached = reached;
        Ok(())
    }
}

impl Files for Segments {
    fn name(&self) -> String {
        self.archive.store().address(self.state().name.as_deref().unwrap_or_default())
    }

    fn is_due(&self, bytes: u64) -> bool {
        if bytes >= self.limits.bytes {
            return true;
        }
        let state = self.state();
        bytes > HEAD_BYTES as u64 && state.name.is_some() && state.present.at.elapsed() >= self.limits.age
    }

    fn next(&self, before: Option<Finished<'_>>, database: Option<u64>, offset: u64) -> io::Result<(File, u64)> {
        let mut state = self.state();
        if let Some(before) = before {
            self.ended(&mut state, before)?;
        }
        let mut file = tempfile::tempfile_in(self.archive.spool())?;
        let known = database.or(state.database);
        file.write_all(&head(known.unwrap_or(0), offset))?;
        let unselected = if known.is_none() { Some(offset) } else { None };
        state.present = Begun { at: Instant::now(), second: Moment::now(), unselected };
        Ok((file, HEAD_BYTES as u64))
    }

    fn sync(&self, _: &File) -> io::Result<()> {
        // A file without a name outlives nothing.
        Ok(())
    }

    fn end(&self, last: Finished<'_>) -> io::Result<()> {
        let mut state = self.state();
        // A head and a mark say nothing new.
        if last.offset <= state.reached.offset && state.name.is_some() {
            return Ok(());
        }
        self.ended(&mut state, last)
    }
}

/// The bytes of a file, from its beginning, whatever its position is.
struct Part<'a> {
    file: &'a File,
    at: u64,
    bytes: u64,
}

impl Part<'_> {
    fn of(file: &File, bytes: u64) -> Part<'_> {
        Part { file, at: 0, bytes }
    }
}

impl Read for Part<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let most = into.len().min(usize::try_from(self.bytes - self.at).unwrap_or(usize::MAX));
        let length = self.file.read_at(into.get_mut(..most).unwrap_or_default(), self.at)?;
        self.at += length as u64;
        Ok(length)
    }
}

fn checksum(from: &mut impl Read) -> io::Result<u64> {
    let (mut crc, mut piece) = (0, vec![0; PIECE]);
    loop {
        match from.read(&mut piece) {
            Ok(0) => return Ok(crc),
            Ok(length) => crc = crc64(crc, piece.get(..length).unwrap_or_default()),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

// Sealing: objects in the age format, which only the owner of an identity opens.
//
// The encryption is the age crate's (feature `age`). What is here: whose keys, and the objects as streams.

/// How the key of a sealed object ends.
pub(crate) const ENDING: &str = ".age";

/// What a manifest says of such an object.
pub(crate) const FORMAT: &str = "age";

/// How a recipient begins.
const RECIPIENT: &str = "age1";

/// Bytes of a file with recipients or identities at most: some hundred.
const FILE_BYTES: usize = 64 << 10;

/// Reads recipients: each argument is one, or a file with one on each line.
///
/// # Errors
/// One is not a recipient, or a file cannot be read.
pub(crate) fn recipients(arguments: &[String]) -> Result<Option<Recipients>, Failure> {
    let mut all = Vec::new();
    for argument in arguments {
        if argument.starts_with(RECIPIENT) {
            all.push((argument.clone(), "--encrypt-to".to_owned()));
            continue;
        }
        let unusable = |what: &dyn std::fmt::Display| {
            Failure::refused(format!(
                "--encrypt-to {argument} is neither a recipient (age1…) nor a file of recipients: {what}"
            ))
        };
        let mut text = String::new();
        let file = std::fs::File::open(argument).map(|file| file.take(FILE_BYTES as u64));
        file.and_then(|mut file| file.read_to_string(&mut text)).map_err(|error| unusable(&error))?;
        let lines = text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
        let before = all.len();
        all.extend(lines.map(|line| (line.to_owned(), argument.clone())));
        if all.len() == before {
            return Err(unusable(&"it has none"));
        }
    }
    if all.is_empty() { Ok(None) } else { Recipients::parse(&all).map(Some) }
}

/// A writer through which an object passes, sealed or as it is.
pub(crate) enum Sealing<W: Write> {
    Plain(W),
    #[cfg(feature = "age")]
    Age(Box<age::stream::StreamWriter<W>>),
}

impl<W: Write> Sealing<W> {
    /// Begins an object. Without recipients it stays as it is.
    pub(crate) fn begin(recipients: Option<&Recipients>, to: W) -> io::Result<Sealing<W>> {
        match recipients {
            None => Ok(Sealing::Plain(to)),
            Some(recipients) => recipients.seal(to),
        }
    }

    /// Ends the object. What was below it is not ended.
    pub(crate) fn finish(self) -> io::Result<W> {
        match self {
            Sealing::Plain(to) => Ok(to),
            #[cfg(feature = "age")]
            Sealing::Age(sealed) => sealed.finish(),
        }
    }
}

impl<W: Write> Write for Sealing<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Sealing::Plain(to) => to.write(bytes),
            #[cfg(feature = "age")]
            Sealing::Age(sealed) => sealed.write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match self {
            Sealing::Plain(to) => to.flush(),
            #[cfg(feature = "age")]
            Sealing::Age(sealed) => sealed.flush(),
        }
    }
}

/// The holders of the keys that open sealed objects.
#[cfg(feature = "age")]
pub(crate) struct Recipients(Vec<age::x25519::Recipient>);

#[cfg(feature = "age")]
impl Recipients {
    /// `all`: each recipient, and where it was given.
    fn parse(all: &[(String, String)]) -> Result<Recipients, Failure> {
        let parse = |(text, from): &(String, String)| {
            let parsed = text.parse::<age::x25519::Recipient>();
            parsed.map_err(|error| Failure::refused(format!("{text} ({from}) is not a recipient of age: {error}")))
        };
        all.iter().map(parse).collect::<Result<_, _>>().map(Recipients)
    }

    fn seal<W: Write>(&self, to: W) -> io::Result<Sealing<W>> {
        let all = self.0.iter().map(|recipient| recipient as &dyn age::Recipient);
        let encryptor = age::Encryptor::with_recipients(all).map_err(io::Error::other)?;
        Ok(Sealing::Age(Box::new(encryptor.wrap_output(to)?)))
    }
}

/// What opens sealed objects.
#[cfg(feature = "age")]
pub(crate) struct Identities {
    file: std::path::PathBuf,
    all: Vec<age::x25519::Identity>,
}

#[cfg(feature = "age")]
impl Identities {
    /// Reads the identities in a file that its owner alone can read, as `age-keygen` writes it.
    ///
    /// # Errors
    /// It cannot be read, other users can read it, or it has no identity.
    pub(crate) fn read(file: &Path) -> Result<Identities, Failure> {
        let unusable = |what: &dyn std::fmt::Display| {
            Failure::refused(format!("the identities in {} (--identity) cannot be used: {what}", file.display()))
        };
        let bytes = remora_wire::token::read(file, FILE_BYTES + 1).map_err(|error| unusable(&error))?;
        if bytes.len() > FILE_BYTES {
            return Err(unusable(&"the file is too long"));
        }
        let text = String::from_utf8(bytes).map_err(|_| unusable(&"the file is not text"))?;
        let lines = text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
        let all: Result<Vec<_>, _> = lines.map(str::parse::<age::x25519::Identity>).collect();
        let all = all.map_err(|error| unusable(&error))?;
        if all.is_empty() {
            return Err(unusable(&"it has none (AGE-SECRET-KEY-1…)"));
        }
        Ok(Identities { file: file.to_owned(), all })
    }

    /// Opens an object.
    ///
    /// # Errors
    /// None of the identities fits, or the object is damaged at its beginning.
    pub(crate) fn open<'a>(&self, object: impl io::BufRead + 'a, address: &str) -> Result<Box<dyn Read + 'a>, Failure> {
        let failed = |error: age::DecryptError| match error {
            age::DecryptError::NoMatchingKeys => Failure::refused(format!(
                "{address} is encrypted to other recipients: no identity in {} opens it",
                self.file.display()
            )),
            age::DecryptError::Io(error) => match error.downcast::<Failure>() {
                Ok(failure) => failure,
                Err(error) => Failure::refused(format!("{address} is damaged: {error}")),
            },
            error => Failure::refused(format!("{address} is damaged: {error}")),
        };
        let decryptor = age::Decryptor::new_buffered(object).map_err(failed)?;
        let all = self.all.iter().map(|identity| identity as &dyn age::Identity);
        Ok(Box::new(decryptor.decrypt(all).map_err(failed)?))
    }
}

/// Nothing: this program was built without the feature `age`.
#[cfg(not(feature = "age"))]
pub(crate) enum Recipients {}

#[cfg(not(feature = "age"))]
impl Recipients {
    fn parse(_: &[(String, String)]) -> Result<Recipients, Failure> {
        Err(Failure::refused("this remora was built without the feature age, so --encrypt-to cannot be used"))
    }

    fn seal<W: Write>(&self, _: W) -> io::Result<Sealing<W>> {
        match *self {}
    }
}

/// Nothing: this program was built without the feature `age`.
#[cfg(not(feature = "age"))]
pub(crate) enum Identities {}

#[cfg(not(feature = "age"))]
impl Identities {
    /// Refuses.
    pub(crate) fn read(_: &Path) -> Result<Identities, Failure> {
        Err(Failure::refused("this remora was built without the feature age, so --identity cannot be used"))
    }

    /// Is never called.
    pub(crate) fn open<'a>(&self, _: impl io::BufRead + 'a, _: &str) -> Result<Box<dyn Read + 'a>, Failure> {
        match *self {}
    }
}

impl std::fmt::Debug for Recipients {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Recipients(…)")
    }
}

impl std::fmt::Debug for Identities {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Identities(…)")
    }
}

#[cfg(all(test, feature = "age"))]
mod sealed_tests {
    #![allow(clippy::unwrap_used)]

    use std::os::unix::fs::PermissionsExt;

    use age::secrecy::ExposeSecret;

    use super::*;

    fn sealed(recipients: &Recipients, bytes: &[u8]) -> Vec<u8> {
        let mut sealing = Sealing::begin(Some(recipients), Vec::new()).unwrap();
        sealing.write_all(bytes).unwrap();
        sealing.finish().unwrap()
    }

    #[test]
    fn what_was_sealed_is_opened_by_the_right_identity_only_and_only_if_it_is_whole() {
        let folder = tempfile::tempdir().unwrap();
        let identity = |name: &str| {
            let (key, file) = (age::x25519::Identity::generate(), folder.path().join(name));
            std::fs::write(&file, format!("# a key\n{}\n", key.to_string().expose_secret())).unwrap();
            std::fs::set_permissions(&file, PermissionsExt::from_mode(0o600)).unwrap();
            (key.to_public().to_string(), file)
        };
        let (recipient, file) = identity("one");
        let (other, other_file) = identity("other");
        let list = folder.path().join("recipients");
        std::fs::write(&list, format!("# ours\n{recipient}\n")).unwrap();
        let bytes: Vec<u8> = (0..200_000_u32).map(|number| number as u8).collect();
        for arguments in [vec![recipient.clone()], vec![list.display().to_string()], vec![other, recipient]] {
            let object = sealed(&recipients(&arguments).unwrap().unwrap(), &bytes);
            let identities = Identities::read(&file).unwrap();
            let read = |object: &[u8]| {
                let mut read = Vec::new();
                identities
                    .open(object, "it")
                    .map_err(|failure| failure.message)?
                    .read_to_end(&mut read)
                    .map_err(|e| e.to_string())?;
                Ok::<_, String>(read)
            };
            assert_eq!(read(&object).unwrap(), bytes);
            for cut in [1, 100, object.len() / 2, object.len() - 1] {
                assert!(read(&object[..cut]).is_err(), "cut at {cut}");
            }
            for at in [3, 40, 300, object.len() / 2, object.len() - 1] {
                let mut changed = object.clone();
                changed[at] ^= 1;
                assert!(read(&changed).is_err(), "byte {at}");
            }
            if arguments.len() == 1 {
                let error = Identities::read(&other_file).unwrap().open(&*object, "it").map(|_| ()).unwrap_err();
                assert!(error.message.contains("other recipients"), "{error}");
            }
        }
        std::fs::set_permissions(&file, PermissionsExt::from_mode(0o644)).unwrap();
        assert!(Identities::read(&file).unwrap_err().message.contains("chmod 600"));
    }

    #[test]
    fn what_is_no_recipient_is_refused() {
        assert!(recipients(&[]).unwrap().is_none());
        let empty = tempfile::NamedTempFile::new().unwrap();
        for wrong in ["age1wrong", "/nowhere/recipients", empty.path().to_str().unwrap()] {
            assert!(recipients(&[wrong.to_owned()]).unwrap_err().message.contains(wrong), "{wrong}");
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use remora_redis::rdb::Writer;

    use super::*;

    /// A snapshot that has arrived.
    fn arrived(archive: &Archive) -> (RdbFile, Manifest) {
        let mut writer = Writer::new(11);
        writer.aux("redis-ver", "7.0.15").aux("ctime", "1795650300").aux("repl-stream-db", "0");
        writer.aux("repl-id", "8c1c6b2f0d6a4e7b9a0f1e2d3c4b5a6978695a4b").aux("repl-offset", "77");
        writer.select_db(0).string("key", "value", None);
        std::fs::write(archive.incoming_file(), writer.finish()).unwrap();
        let rdb = RdbFile::read(&archive.incoming_file()).unwrap();
        let manifest = Manifest::of(Kind::Snapshot, &rdb, "redis 7.0.15", "127.0.0.1:7379".into());
        (rdb, manifest)
    }

    fn open(folder: &Path) -> Result<Archive, Failure> {
        let store = folder.join("store");
        std::fs::create_dir_all(&store).unwrap();
        Archive::open(store::in_folder(&store), folder, None, None)
    }

    fn keys(archive: &Archive) -> Vec<String> {
        archive.store().list("").unwrap().into_iter().map(|object| object.key).collect()
    }

    #[test]
    fn what_has_no_manifest_is_removed_and_what_has_one_stays() {
        let folder = tempfile::tempdir().unwrap();
        let archive = open(folder.path()).unwrap();
        let (rdb, manifest) = arrived(&archive);
        archive.place(&rdb, &manifest).unwrap();
        let name = "20261125T234500Z-8c1c6b2f-77";
        let whole = [WRITER.to_owned(), format!("{name}.json"), format!("{name}.rdb")];
        assert_eq!(keys(&archive), whole);
        assert!(archive.find(&manifest).unwrap().is_some() && !archive.incoming_file().exists());
        // Killed between the manifest and the removal of the note; and before the manifest.
        archive.begin(name).unwrap();
        let other = "20261125T234501Z-8c1c6b2f-99";
        archive.begin(other).unwrap();
        for key in [format!("{other}.rdb"), format!("{other}/base.rdb.age"), reached_key(other)] {
            put(archive.store(), &key, b"half").unwrap();
        }
        let segment = segment_key(other, 1, remora_base::units::Moment::now(), 0, true);
        put(archive.store(), &segment, b"half").unwrap();
        put(archive.store(), "20261125T234502Z-foreign.rdb", b"not ours").unwrap();
        drop(archive);
        let archive = open(folder.path()).unwrap();
        let all = [&whole[..], &["20261125T234502Z-foreign.rdb".to_owned()]].concat();
        assert_eq!(keys(&archive), all);
        assert!(archive.store().list(UNFINISHED).unwrap().is_empty());
        assert!(!folder.path().join("store").join(other).exists());
    }

    #[test]
    fn one_command_writes_and_another_one_on_another_host_ends_it() {
        let folder = tempfile::tempdir().unwrap();
        let archive = open(folder.path()).unwrap();
        assert!(open(folder.path()).unwrap_err().message.contains("another remora backup"));
        let (rdb, manifest) = arrived(&archive);
        put(archive.store(), WRITER, b"of another host").unwrap();
        let failure = archive.place(&rdb, &manifest).unwrap_err();
        assert!(failure.message.contains("has begun to write"), "{failure}");
        assert!(archive.find(&manifest).unwrap().is_none());
    }

    #[test]
    fn a_command_that_is_stopped_sends_nothing_more() {
        let folder = tempfile::tempdir().unwrap();
        let archive = open(folder.path()).unwrap();
        let (rdb, manifest) = arrived(&archive);
        archive.stop();
        assert_eq!(archive.place(&rdb, &manifest).unwrap_err().code, Code::Interrupted);
        assert_eq!(keys(&archive), [WRITER]);
    }

    #[test]
    fn a_key_says_what_a_segment_is() {
        let begun = Moment::seconds(1_795_650_300);
        for (is_sealed, ending) in [(false, ""), (true, ".age")] {
            let key = segment_key("20261125T234500Z-8c1c6b2f-307366", 42, begun, 0xAB, is_sealed);
            let wanted = format!("/commands/00000042-20261125T234500Z-00000000000000ab.aof{ending}");
            assert!(key.ends_with(&wanted), "{key}");
            let segment = Segment::of(Object { key: key.clone(), bytes: 9 }).unwrap();
            assert_eq!(segment, Segment { key, number: 42, begun, crc: 0xAB, bytes: 9 });
        }
        for other in ["a/commands/x.aof", "a/commands/1-2-3", "a/commands/1-20261125T234500Z-zz.aof"] {
            assert_eq!(Segment::of(Object { key: other.into(), bytes: 9 }), None, "{other}");
        }
    }
}
