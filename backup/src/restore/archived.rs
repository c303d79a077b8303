//! Archived: which backup of an archive is meant, and its files on this host.
//!
//! ```text
//!   objects ── length and checksum of each ──▶ a folder of this host: dump.rdb, or appendonlydir with a file for each segment
//! ```
//!
//! And bases: what a source can make a snapshot of, of the backups and files that it is told.
//!
//! ```text
//!   a file            ── its head ─────────────▶ where in which history, how old
//!   a folder          ── dump.rdb, backups ────▶ the same of the newest one      ── chosen ──▶ all of it is read
//!   s3://…, a folder of objects ── manifests ──▶ the same                        ── chosen ──▶ fetched, read
//! ```
//!
//! A look reads heads, manifests, and the end of the last file of commands. The commands of a backup are read where the
//! server has no more of the stream behind its snapshot. They have every byte of it.

use std::fs::{self, File};
use std::io::{self, BufReader, Read, Write};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use remora_base::units::Moment;
use remora_process::exit::Failure;
use remora_process::host;
use remora_process::progress::{Meter, Unit};
use remora_process::rdb_file::{Found, Opened, RdbFile, Stored, StoredHead, StoredStream, head_of};
use remora_protocol::BaseKind;
use remora_redis::aof::{FileKind, Manifest as List, NamedFile};
use remora_redis::rdb::crc64;

use super::{AofFolder, FOLDER, Found as Files, folder_for};
use crate::archive::{self, ENDING, Identities, Segment, failure_of, missing};
use crate::commands_file::{checked_list, reaches, write_stream};
use crate::manifest::{Behind, Damaged, IN_FOLDER, Kind, Manifest, checked_snapshot, newest_until};
use crate::options::{Location, Pass, RestoreOptions, StoreOptions};
use crate::shelf;
use crate::store::{self, Store};

/// Bytes that are read at a time.
const PIECE: usize = 1 << 20;

/// A backup of an archive.
#[derive(Debug)]
pub(super) struct Archived {
    store: Arc<dyn Store>,
    /// What opens its objects, if they are encrypted.
    identities: Option<Identities>,
    pub(super) manifest: Manifest,
    /// The next backup, if there is a gap between both and a moment was asked for.
    behind: Option<Behind>,
}

/// What one object must be.
struct Expected {
    key: String,
    bytes: u64,
    crc: u64,
}

impl Archived {
    /// The backup that is meant, if an archive has it.
    ///
    /// # Errors
    /// The store cannot be read, or has no such backup.
    pub(super) fn find(options: &RestoreOptions) -> Result<Option<Archived>, Failure> {
        let at = &options.from;
        let identities = options.identity.as_deref().map(Identities::read).transpose()?;
        if let Some(store) = store::open(at, &options.store, options.retry_for)?
            && let Some((manifest, behind)) = newest(&*store, options.until, options.until_pass)?
        {
            if let Location::Path(path) = at
                && !shelf::list(path, Damaged::Refused)?.is_empty()
            {
                return Err(Failure::refused(format!(
                    "{at} has backups as files and as objects: name the one that is meant, as {at}/NAME"
                )));
            }
            return Ok(Some(Archived { store, identities, manifest, behind }));
        }
        if let Some((above, name)) = named(at)
            && let Some(store) = store::open(&above, &options.store, options.retry_for)?
            && let Some(manifest) = archive::read(&*store, &name)?
        {
            return Ok(Some(Archived { store, identities, manifest, behind: None }));
        }
        match at {
            Location::Path(_) => Ok(None),
            Location::Bucket { .. } => {
                Err(Failure::refused(format!("there is no backup in {at}: name what remora backup --to named")))
            }
        }
    }

    /// Its address.
    pub(super) fn address(&self) -> PathBuf {
        PathBuf::from(self.store.address(&self.manifest.name))
    }

    /// The last byte of the stream that its commands hold.
    ///
    /// # Errors
    /// The store cannot be read, or does not say it.
    pub(super) fn reaches(&self) -> Result<u64, Failure> {
        Ok(archive::reached(&*self.store, &self.manifest.name)?.offset)
    }

    /// Fetches its files into a folder of this host, up to the end of the second `until`, while `goes_on` says so.
    ///
    /// # Errors
    /// An object is missing or damaged, the store cannot be read, or the folder has no room.
    pub(super) fn fetch(
        &self,
        until: Option<Moment>,
        into: &Path,
        goes_on: &dyn Fn() -> bool,
    ) -> Result<Files, Failure> {
        let base = self.base()?;
        if self.manifest.kind == Kind::Snapshot {
            return Ok(Files::Snapshot(self.fetch_snapshot(into, goes_on)?));
        }
        // Before anything is fetched: what is missing is known by then.
        let mut wanted = self.segments()?;
        // Up to the last one, without a gap: if the clock went back, there are later ones between them.
        let last = wanted.iter().rposition(|segment| until.is_none_or(|until| segment.begun <= until));
        let all = wanted.len();
        wanted.truncate(last.map_or(0, |last| last + 1));
        // What is of a later moment shows that nothing is missing before.
        let behind = self.behind.clone().filter(|_| wanted.len() == all);
        let total = base.bytes + wanted.iter().map(|segment| segment.bytes).sum::<u64>();
        host::check_space("the backup", into, total)?;
        let meter = Meter::start("fetched", Unit::Bytes, Some(total));
        let folder = into.join(FOLDER);
        let failed = |error: io::Error| Failure::local(format!("{}: {error}", folder.display()));
        fs::DirBuilder::new().mode(0o700).create(&folder).map_err(failed)?;
        let mut files = vec![NamedFile { name: "appendonly.aof.1.base.rdb".into(), number: 1, kind: FileKind::Base }];
        self.object(&base, &folder.join(&files[0].name), &meter, goes_on)?;
        for Segment { key, number, crc, bytes, .. } in wanted {
            let name = format!("appendonly.aof.{number}.incr.aof");
            self.object(&Expected { key, bytes, crc }, &folder.join(&name), &meter, goes_on)?;
            files.push(NamedFile { name, number, kind: FileKind::Incremental });
        }
        meter.finish();
        fs::write(folder.join("appendonly.aof.manifest"), checked_list(&List { files })).map_err(failed)?;
        self.manifest.write(&into.join(IN_FOLDER))?;
        let found = AofFolder::at(&folder)?.ok_or_else(|| failed(io::Error::other("its list is missing")))?;
        Ok(Files::Folder(AofFolder { behind, ..found }))
    }

    /// Fetches its snapshot into a folder of this host, whatever commands there are since, while `goes_on` says so.
    ///
    /// # Errors
    /// As [`Archived::fetch`].
    pub(super) fn fetch_snapshot(&self, into: &Path, goes_on: &dyn Fn() -> bool) -> Result<PathBuf, Failure> {
        let (base, to) = (self.base()?, into.join("dump.rdb"));
        host::check_space("the backup", into, base.bytes)?;
        let meter = Meter::start("fetched", Unit::Bytes, Some(base.bytes));
        self.object(&base, &to, &meter, goes_on)?;
        meter.finish();
        // So that it is compared with what was noted of it, too.
        self.manifest.of_the_snapshot().write(&to.with_extension("json"))?;
        Ok(to)
    }

    /// The object with its snapshot.
    ///
    /// # Errors
    /// The manifest does not name it, or it is encrypted and nothing is given that opens it.
    fn base(&self) -> Result<Expected, Failure> {
        let name = &self.manifest.name;
        let stored = self.manifest.stored.as_ref().ok_or_else(|| missing(&*self.store, name))?;
        let crc = u64::from_str_radix(&stored.crc64, 16).map_err(|_| {
            Failure::refused(format!("the manifest of {} is damaged: its crc64", self.store.address(name)))
        })?;
        if let (Some(format), None) = (&stored.encryption, &self.identities) {
            let text = format!("{} is encrypted ({format})", self.store.address(name));
            return Err(Failure::refused(format!("{text}: name the file with your identity by --identity")));
        }
        Ok(Expected { key: stored.object.clone(), bytes: stored.bytes, crc })
    }

    /// All segments that are counted.
    fn segments(&self) -> Result<Vec<Segment>, Failure> {
        let name = &self.manifest.name;
        let reached = archive::reached(&*self.store, name)?;
        let mut all = archive::segments(&*self.store, name)?;
        // One that was sent, and not counted before its command was killed.
        all.retain(|segment| (1..=reached.segments).contains(&segment.number));
        let at = self.store.address(name);
        for (expected, segment) in (1..).zip(&all) {
            if segment.number < expected {
                let text = format!("{at} has two segments {}: two commands have written to it", segment.number);
                return Err(Failure::refused(format!("{text}; remove {} or the other one", segment.key)));
            }
            if segment.number > expected {
                return Err(no_segment(&at, expected));
            }
        }
        if (all.len() as u64) < reached.segments { Err(no_segment(&at, all.len() as u64 + 1)) } else { Ok(all) }
    }

    /// Fetches an object into a file.
    fn object(&self, expected: &Expected, to: &Path, meter: &Meter, goes_on: &dyn Fn() -> bool) -> Result<(), Failure> {
        let address = self.store.address(&expected.key);
        let damaged = |what: String| Failure::refused(format!("{address} is damaged: {what}"));
        let object = self.store.read(&expected.key)?.ok_or_else(|| missing(&*self.store, &expected.key))?;
        let mut object = Counted { object, bytes: 0, crc: 0, meter, goes_on };
        let unwritable = |error: io::Error| Failure::local(format!("{}: {error}", to.display()));
        let mut file = File::create_new(to).map_err(unwritable)?;
        match (expected.key.ends_with(ENDING), &self.identities) {
            (false, _) => copy(&mut object, &mut file, &address, to)?,
            (true, Some(identities)) => {
                copy(&mut identities.open(BufReader::new(&mut object), &address)?, &mut file, &address, to)?;
                // What follows its end is not of it, and is counted.
                io::copy(&mut object, &mut io::sink()).map_err(|error| failure_of(error, &address))?;
            }
            (true, None) => {
                return Err(Failure::refused(format!(
                    "{address} is encrypted: name the file with your identity by --identity"
                )));
            }
        }
        if object.bytes != expected.bytes {
            return Err(damaged(format!("it has {} bytes, and {} were stored", object.bytes, expected.bytes)));
        }
        if object.crc != expected.crc {
            return Err(damaged(format!("its checksum is {:016x}, and {:016x} was stored", object.crc, expected.crc)));
        }
        Ok(())
    }
}

fn no_segment(at: &str, number: u64) -> Failure {
    Failure::refused(format!("{at}/commands/{number:08}-… is missing: the backup is damaged"))
}

/// The newest backup that is not of a later moment; `None` if there is no backup at all.
fn newest(
    store: &dyn Store,
    until: Option<Moment>,
    pass: Option<Pass>,
) -> Result<Option<(Manifest, Option<Behind>)>, Failure> {
    let all = archive::list(store, Damaged::Refused)?;
    if all.is_empty() {
        return Ok(None);
    }
    let at = store.address("");
    let snapshots = all.iter().filter(|backup| backup.kind == Kind::Snapshot).count();
    if snapshots > 0 && snapshots < all.len() {
        // Commands may reach further than a snapshot that was taken later, or may not.
        return Err(Failure::refused(format!(
            "{at} has snapshots and backups with commands: name the one that is meant, as {at}/NAME"
        )));
    }
    match newest_until(all, |backup| backup, until, pass)? {
        Some(chosen) => Ok(Some(chosen)),
        None => Err(Failure::refused(format!(
            "all backups in {at} are of a later moment than --until: give a later one, or name an older backup"
        ))),
    }
}

/// The place of the archive and the name of a backup in it, if this is the address of one.
fn named(at: &Location) -> Option<(Location, String)> {
    match at {
        Location::Path(path) => {
            let name = path.file_name()?.to_str()?;
            let name = [".json", ".rdb.age", ".rdb"].iter().find_map(|end| name.strip_suffix(end)).unwrap_or(name);
            let above = path.parent().filter(|above| !above.as_os_str().is_empty()).unwrap_or(Path::new("."));
            Some((Location::Path(above.to_owned()), name.to_owned()))
        }
        Location::Bucket { bucket, prefix } => {
            let (above, name) = prefix.rsplit_once('/').unwrap_or(("", prefix));
            let above = Location::Bucket { bucket: bucket.clone(), prefix: above.to_owned() };
            (!name.is_empty()).then(|| (above, name.to_owned()))
        }
    }
}

fn copy(from: &mut impl Read, to: &mut File, address: &str, path: &Path) -> Result<(), Failure> {
    let mut piece = vec![0; PIECE];
    loop {
        let length = match from.read(&mut piece) {
            Ok(0) => return Ok(()),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            read => read.map_err(|error| match error.downcast::<Failure>() {
                Ok(failure) => failure,
                Err(error) => Failure::refused(format!("{address} is damaged, or cannot be read: {error}")),
            })?,
        };
        let written = to.write_all(piece.get(..length).unwrap_or_default());
        written.map_err(|error| Failure::local(format!("{}: {error}", path.display())))?;
    }
}

/// An object whose bytes are counted and summed as they are read.
struct Counted<'a> {
    object: Box<dyn Read + Send>,
    bytes: u64,
    crc: u64,
    meter: &'a Meter,
    goes_on: &'a dyn Fn() -> bool,
}

impl Read for Counted<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        if !(self.goes_on)() {
            return Err(io::Error::other("its reader ends"));
        }
        let length = self.object.read(into)?;
        self.bytes += length as u64;
        self.crc = crc64(self.crc, into.get(..length).unwrap_or_default());
        self.meter.add(length as u64);
        Ok(length)
    }
}

/// How long a store that cannot be reached is tried again: replicas wait meanwhile, and there may be another base.
const RETRY_FOR: Duration = Duration::from_secs(5);

/// How long a look at files serves: an operator who has laid one there sees it soon.
const FOLDER_HOLDS: Duration = Duration::from_secs(10);

/// The same of a bucket: a list and its manifests are requests that are paid for.
const BUCKET_HOLDS: Duration = Duration::from_secs(300);

/// The servers' default name of the file of a snapshot.
const DUMP: &str = "dump.rdb";

/// The snapshot of a backup with commands, in its folder.
const BASE: &str = "appendonly.aof.1.base.rdb";

/// The stream of a backup with commands, in the folder in which it is kept until the source has read it.
const STREAM: &str = "stream";

/// The places at which backups and files are looked for.
#[derive(Clone, Debug)]
pub struct Places {
    /// Files, folders and buckets.
    pub at: Vec<Location>,
    /// How buckets are reached.
    pub store: StoreOptions,
    /// The file that opens encrypted backups.
    pub identity: Option<PathBuf>,
    /// The folder in which a backup is kept that was fetched, until the source has read it.
    pub spool: PathBuf,
}

/// A backup or a file at one place.
enum Base {
    /// `commands`: the folder with the commands since.
    File {
        path: PathBuf,
        commands: Option<PathBuf>,
        kind: BaseKind,
        head: StoredHead,
    },
    Archived(Box<Archived>, StoredHead),
}

impl Stored for Places {
    fn look(&self) -> Vec<Found> {
        self.at.iter().flat_map(|at| self.look_at(at)).collect()
    }

    fn holds(&self) -> Duration {
        match self.at.iter().any(|at| matches!(at, Location::Bucket { .. })) {
            true => BUCKET_HOLDS,
            false => FOLDER_HOLDS,
        }
    }

    fn open(&self, found: &Found, with_commands: bool, goes_on: &dyn Fn() -> bool) -> Result<Opened, Failure> {
        for at in &self.at {
            let bases = self.bases_at(at).unwrap_or_default();
            if let Some(base) = bases.into_iter().find(|base| base.place() == found.place) {
                return self
                    .open_base(base, with_commands, goes_on)
                    .map_err(|failure| Failure { message: in_the_options_of_a_source(&failure.message), ..failure });
            }
        }
        Err(Failure::refused(format!("{} is not there any more", found.place)))
    }
}

impl Places {
    fn look_at(&self, at: &Location) -> Vec<Found> {
        let unusable = |why: String| {
            let kind = if matches!(at, Location::Bucket { .. }) { BaseKind::Backup } else { BaseKind::File };
            vec![Found { kind, place: at.to_string(), head: Err(why) }]
        };
        match self.bases_at(at) {
            Err(why) => unusable(in_the_options_of_a_source(&why)),
            Ok(bases) if bases.is_empty() => unusable("there is neither a backup nor dump.rdb".to_owned()),
            Ok(bases) => bases.iter().map(Base::found).collect(),
        }
    }

    /// What there is at this place: the newest backup, and the file that a server has saved.
    ///
    /// # Errors
    /// Why it cannot be used, as the end of a sentence.
    fn bases_at(&self, at: &Location) -> Result<Vec<Base>, String> {
        let mut all = Vec::new();
        if let Location::Path(path) = at {
            if !path.is_dir() {
                return Ok(vec![Base::of_file(path, BaseKind::File)?]);
            }
            let dump = path.join(DUMP);
            if dump.is_file() {
                all.push(Base::of_file(&dump, BaseKind::File)?);
            }
            let backups = shelf::list(path, Damaged::Skipped).map_err(|failure| failure.to_string())?;
            if let Some(newest) = backups.into_iter().next_back() {
                let mut head = of_manifest(&newest.manifest)?;
                let commands = (newest.manifest.kind == Kind::Journal).then(|| newest.path.join(FOLDER));
                let path = commands.as_ref().map_or(newest.path, |folder| folder.join(BASE));
                if let Some(folder) = &commands {
                    head.reaches = reach_of(folder).unwrap_or_default().max(head.offset);
                }
                all.push(Base::File { path, commands, kind: BaseKind::Backup, head });
                return Ok(all);
            }
        }
        let options = self.options(at);
        match Archived::find(&options) {
            Ok(None) => {}
            Ok(Some(archived)) => {
                let mut head = of_manifest(&archived.manifest)?;
                if archived.manifest.kind == Kind::Journal {
                    // Its snapshot may serve without them.
                    head.reaches = archived.reaches().unwrap_or_default().max(head.offset);
                }
                all.push(Base::Archived(Box::new(archived), head));
            }
            // A folder of a server has no backups.
            Err(_) if !all.is_empty() => {}
            Err(failure) => return Err(failure.to_string()),
        }
        Ok(all)
    }

    fn options(&self, at: &Location) -> RestoreOptions {
        RestoreOptions {
            store: self.store.clone(),
            identity: self.identity.clone(),
            spool: self.spool.clone(),
            retry_for: RETRY_FOR,
            ..RestoreOptions::new(at.clone())
        }
    }

    fn open_base(&self, base: Base, with_commands: bool, goes_on: &dyn Fn() -> bool) -> Result<Opened, Failure> {
        let folder_beside = || folder_for(&self.options(&Location::Path(PathBuf::new())));
        // What is fetched, or put together, needs a folder until the source has read it.
        let (path, commands, mut beside) = match base {
            Base::File { path, commands, .. } => {
                let commands = commands.filter(|_| with_commands);
                (path, commands.map(|folder| AofFolder::named(&folder)).transpose()?, None)
            }
            Base::Archived(archived, _) => {
                let beside = folder_beside()?;
                if with_commands && archived.manifest.kind == Kind::Journal {
                    let Files::Folder(folder) = archived.fetch(None, beside.path(), goes_on)? else {
                        return Err(Failure::refused(format!("{} has no commands", archived.address().display())));
                    };
                    (folder.path.join(BASE), Some(folder), Some(beside))
                } else {
                    (archived.fetch_snapshot(beside.path(), goes_on)?, None, Some(beside))
                }
            }
        };
        let rdb = checked_snapshot(&path)?;
        let mut stream = None;
        if let Some(folder) = commands {
            let written = match beside.take() {
                Some(beside) => beside,
                None => folder_beside()?,
            };
            stream = Some(stream_of(&folder, &rdb, written.path(), goes_on)?);
            beside = Some(written);
        }
        let keeps = beside.map(|beside| Box::new(beside) as Box<_>);
        Ok(Opened { path, rdb, stream, keeps })
    }
}

impl Base {
    fn of_file(path: &Path, kind: BaseKind) -> Result<Base, String> {
        Ok(Base::File { path: path.to_owned(), commands: None, kind, head: head_of(path)? })
    }

    fn place(&self) -> String {
        match self {
            Base::File { path, .. } => path.display().to_string(),
            Base::Archived(archived, _) => archived.address().display().to_string(),
        }
    }

    fn found(&self) -> Found {
        let (kind, head) = match self {
            Base::File { kind, head, .. } => (*kind, *head),
            Base::Archived(_, head) => (BaseKind::Backup, *head),
        };
        Found { kind, place: self.place(), head: Ok(head) }
    }
}

/// How far the commands in a folder reach.
fn reach_of(folder: &Path) -> Option<u64> {
    reaches(AofFolder::at(folder).ok()??.commands().last()?)
}

/// The commands of a backup, byte by byte as the server wrote them.
fn stream_of(
    folder: &AofFolder,
    rdb: &RdbFile,
    beside: &Path,
    goes_on: &dyn Fn() -> bool,
) -> Result<StoredStream, Failure> {
    let path = beside.join(STREAM);
    let bytes = folder.commands().iter().filter_map(|path| path.metadata().ok()).map(|file| file.len()).sum();
    host::check_space("the stream of a backup", beside, bytes)?;
    let out = File::create_new(&path).map_err(|error| Failure::local(format!("{}: {error}", path.display())))?;
    let end = write_stream(&folder.commands(), rdb.offset, (&path, &out), goes_on)?;
    Ok(StoredStream { path, end })
}

/// What a manifest says of a backup's snapshot.
fn of_manifest(manifest: &Manifest) -> Result<StoredHead, String> {
    let history = manifest.replid.parse().map_err(|_| {
        "its manifest does not say to which replication history it belongs (repl-id, repl-offset)".to_owned()
    })?;
    let (offset, taken, version) = (manifest.offset, manifest.taken_seconds, manifest.rdb_version);
    Ok(StoredHead { history, offset, reaches: offset, taken, version })
}

/// A sentence about a store or a backup, with the options of `remora source` in place of those of `remora restore`.
fn in_the_options_of_a_source(text: &str) -> String {
    OPTIONS.iter().fold(text.to_owned(), |text, (of_a_restore, of_a_source)| text.replace(of_a_restore, of_a_source))
}

/// Options of a restore that failures name, and what a source has for them: how long it tries is fixed.
const OPTIONS: [(&str, &str); 3] = [("--s3-", "--base-s3-"), ("--identity", "--base-identity"), (" (--retry-for)", "")];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_source_is_told_names_its_own_options() {
        let places = Places {
            at: vec![Location::Bucket { bucket: "b".into(), prefix: String::new() }],
            store: StoreOptions { endpoint: Some("http://192.0.2.1:1".into()), ..StoreOptions::default() },
            identity: None,
            spool: PathBuf::new(),
        };
        let found = places.look();
        let why = found[0].head.as_ref().err().map(String::as_str).unwrap_or_default();
        assert!(why.contains("--base-s3-allow-http") && !why.contains(" --s3-"), "{why}");
        let opened = in_the_options_of_a_source("x is encrypted: name the file with your identity by --identity");
        assert!(opened.ends_with("by --base-identity"), "{opened}");
        let tried = in_the_options_of_a_source("tried for 5 s (--retry-for): check --s3-endpoint");
        assert_eq!(tried, "tried for 5 s: check --base-s3-endpoint");
    }
}
