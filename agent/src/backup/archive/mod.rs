//! Archive: backups as objects of a store that cannot append or rename.
//!
//! Nothing is a backup before its manifest is there, which is written last. A note says which backup arrives or is
//! being removed, so the next command finds what a killed one has left, and removes it.
//!
//! One command at a time writes. A store has no locks: each command writes its own mark at its beginning, and looks for
//! it before each thing that counts. One whose mark was replaced ends. On one host the spool folder is locked.
//!
//! - [`layout`]: the keys, and what the short objects hold. [`segments`]: the commands since a snapshot.

pub(super) mod layout;
pub(super) mod segments;

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use remora_redis::rdb::crc64;

use self::layout::{UNFINISHED, WRITER, list, manifest_key, reached_key, segments, snapshot_key};
use super::manifest::{Kind, Manifest, Stored};
use super::rdb_file::RdbFile;
use super::store::{self, Store, put};
use crate::exit::{Code, Failure};
use crate::replica::private::{Claim, Folder, is_unsafe};

/// The snapshot that arrives, in the spool folder.
const INCOMING: &str = "incoming.rdb";

/// Bytes that are read at a time.
const PIECE: usize = 1 << 20;

/// How many names are tried: of a snapshot that was taken once, and backed up again after a gap.
const NAMES: u32 = 1000;

/// An archive that this command writes to.
#[derive(Debug)]
pub(super) struct Archive {
    store: Arc<dyn Store>,
    /// The folder of this host where things are before they are sent.
    spool: PathBuf,
    /// The mark of this command.
    writer: String,
    /// Nothing more is sent.
    stop: AtomicBool,
    _claim: Claim,
}

impl Archive {
    /// Opens the archive in a store for writing, and removes what a killed command has left. `spool`: the folder in
    /// which its own is made.
    ///
    /// # Errors
    /// The store cannot be reached, or the folder cannot be used.
    pub(super) fn open(store: Arc<dyn Store>, spool: &Path) -> Result<Archive, Failure> {
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
        let archive = Archive { store, spool, writer, stop: AtomicBool::new(false), _claim: claim };
        put(archive.store(), WRITER, archive.writer.as_bytes())?;
        archive.store.recover()?;
        archive.clean()?;
        Ok(archive)
    }

    pub(super) fn store(&self) -> &dyn Store {
        &*self.store
    }

    /// Where the snapshot arrives, on this host.
    pub(super) fn incoming_file(&self) -> PathBuf {
        self.spool.join(INCOMING)
    }

    /// The folder of this host where things are before they are sent.
    pub(super) fn spool(&self) -> &Path {
        &self.spool
    }

    /// Sends nothing more: what is under way fails soon.
    pub(super) fn stop(&self) {
        self.stop.store(true, Relaxed);
        self.store.stop();
    }

    /// The address of a backup.
    pub(super) fn address_of(&self, manifest: &Manifest) -> String {
        self.store.address(&manifest.name)
    }

    /// The address of the same backup, if it is there.
    ///
    /// # Errors
    /// The store cannot be read.
    pub(super) fn find(&self, manifest: &Manifest) -> Result<Option<String>, Failure> {
        let found = layout::read(self.store(), name_of(manifest))?;
        Ok(found.map(|found| self.address_of(&found)))
    }

    /// Sends the snapshot that has arrived, and makes it a backup. Returns its address.
    ///
    /// # Errors
    /// The store cannot be written to.
    pub(super) fn place(&self, rdb: &RdbFile, manifest: &Manifest) -> Result<String, Failure> {
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
            if layout::read(self.store(), &name)?.is_none() {
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
        let (key, incoming) = (snapshot_key(&manifest.name, manifest.kind), self.incoming_file());
        let unreadable = |error: io::Error| Failure::local(format!("{}: {error}", incoming.display()));
        let file = File::open(&incoming).map_err(unreadable)?;
        let (bytes, crc) = self.send(&key, file, rdb.bytes)?;
        if bytes < rdb.bytes {
            return Err(unreadable(io::Error::other("it has become shorter")));
        }
        manifest.stored = Some(Stored { object: key, bytes, crc64: format!("{crc:016x}") });
        Ok(())
    }

    /// Sends an object. Returns its length and its checksum.
    fn send(&self, key: &str, mut from: impl Read, about: u64) -> Result<(u64, u64), Failure> {
        let failed = |error: io::Error| failure_of(error, &self.store.address(key));
        let mut upload = self.store.upload(key, about)?;
        let (mut bytes, mut crc, mut piece) = (0, 0, vec![0; PIECE]);
        loop {
            if self.stop.load(Relaxed) {
                return Err(Failure::new(Code::Interrupted, format!("{}: stopped", self.store.address(key))));
            }
            let length = match from.read(&mut piece) {
                Ok(0) => break,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                read => read.map_err(failed)?,
            };
            let part = piece.get(..length).unwrap_or_default();
            upload.write_all(part).map_err(failed)?;
            (bytes, crc) = (bytes + length as u64, crc64(crc, part));
        }
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
    pub(super) fn keep(&self, newest: &Manifest, keep: u32) -> Result<(), Failure> {
        let mut all = list(self.store())?;
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
            let Some(name) = object.key.rsplit('/').next().filter(|name| layout::is_name(name)) else { continue };
            if layout::read(self.store(), name)?.is_some() {
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
            keys.push(snapshot_key(name, kind));
        }
        keys.push(reached_key(name));
        keys.extend(segments(self.store(), name)?.into_iter().map(|segment| segment.key));
        self.store.remove(&keys)?;
        self.store.remove(&[format!("{UNFINISHED}/{name}")])
    }
}

/// The name of a backup in an archive: without an ending, whatever its kind.
fn name_of(manifest: &Manifest) -> &str {
    manifest.name.strip_suffix(".rdb").unwrap_or(&manifest.name)
}

/// What has gone wrong in a store, if it was that, or what this error says of a thing.
pub(super) fn failure_of(error: io::Error, what: &str) -> Failure {
    match error.downcast::<Failure>() {
        Ok(failure) => failure,
        Err(error) => Failure::local(format!("{what}: {error}")),
    }
}
