//! Archived: which backup of an archive is meant, and its files on this host.
//!
//! ```text
//!   objects ── length and checksum of each ──▶ a folder of this host: dump.rdb, or appendonlydir with a file for each segment
//! ```

use std::fs::{self, File};
use std::io::{self, BufReader, Read, Write};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use remora_redis::aof::{FileKind, Manifest as List, NamedFile};
use remora_redis::rdb::crc64;

use super::{AofFolder, FOLDER, Found};
use crate::archive::{self, Segment, failure_of, missing};
use crate::archive::{ENDING, Identities};
use crate::commands_file::checked_list;
use crate::manifest::{Damaged, IN_FOLDER, Kind, Manifest, newest_until};
use crate::options::{Location, Pass, RestoreOptions};
use crate::shelf;
use crate::store::{self, Store};
use remora_base::units::Moment;
use remora_process::exit::Failure;
use remora_process::host;
use remora_process::progress::{Meter, Unit};

/// Bytes that are read at a time.
const PIECE: usize = 1 << 20;

/// A backup of an archive.
#[derive(Debug)]
pub(super) struct Archived {
    store: Arc<dyn Store>,
    /// What opens its objects, if they are encrypted.
    identities: Option<Identities>,
    pub(super) manifest: Manifest,
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
            && let Some(manifest) = newest(&*store, options.until, options.until_pass)?
        {
            if let Location::Path(path) = at
                && !shelf::list(path, Damaged::Refused)?.is_empty()
            {
                return Err(Failure::refused(format!(
                    "{at} has backups as files and as objects: name the one that is meant, as {at}/NAME"
                )));
            }
            return Ok(Some(Archived { store, identities, manifest }));
        }
        if let Some((above, name)) = named(at)
            && let Some(store) = store::open(&above, &options.store, options.retry_for)?
            && let Some(manifest) = archive::read(&*store, &name)?
        {
            return Ok(Some(Archived { store, identities, manifest }));
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
    ) -> Result<Found, Failure> {
        let base = self.base()?;
        if self.manifest.kind == Kind::Snapshot {
            return Ok(Found::Snapshot(self.fetch_snapshot(into, goes_on)?));
        }
        // Before anything is fetched: what is missing is known by then.
        let mut wanted = self.segments()?;
        // Up to the last one, without a gap: if the clock went back, there are later ones between them.
        let last = wanted.iter().rposition(|segment| until.is_none_or(|until| segment.begun <= until));
        wanted.truncate(last.map_or(0, |last| last + 1));
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
        AofFolder::at(&folder)?.map(Found::Folder).ok_or_else(|| failed(io::Error::other("its list is missing")))
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
fn newest(store: &dyn Store, until: Option<Moment>, pass: Option<Pass>) -> Result<Option<Manifest>, Failure> {
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
        Some(manifest) => Ok(Some(manifest)),
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
