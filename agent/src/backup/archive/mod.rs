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
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use remora_redis::rdb::crc64;

use self::layout::{UNFINISHED, WRITER, list, manifest_key, reached_key, segments, snapshot_key};
use super::manifest::{Damaged, Kind, Manifest, Stored, is_name};
use super::rdb_file::RdbFile;
use super::sealing::{FORMAT, Recipients, Sealing};
use super::shelf::Shelf;
use super::store::{self, Store, Upload, put};
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
    pub(super) fn open(
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
        let key = snapshot_key(&manifest.name, manifest.kind, self.recipients.is_some());
        let incoming = self.incoming_file();
        let unreadable = |error: io::Error| Failure::local(format!("{}: {error}", incoming.display()));
        let file = File::open(&incoming).map_err(unreadable)?;
        let (bytes, crc) = self.send(&key, file, rdb.bytes, self.recipients.as_ref())?;
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
    pub(super) fn keep(&self, newest: &Manifest, keep: u32) -> Result<(), Failure> {
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
            keys.extend([false, true].map(|is_sealed| snapshot_key(name, kind, is_sealed)));
        }
        keys.push(reached_key(name));
        keys.extend(segments(self.store(), name)?.into_iter().map(|segment| segment.key));
        self.store.remove(&keys)?;
        self.store.remove(&[format!("{UNFINISHED}/{name}")])
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
pub(super) fn failure_of(error: io::Error, what: &str) -> Failure {
    match error.downcast::<Failure>() {
        Ok(failure) => failure,
        Err(error) => Failure::local(format!("{what}: {error}")),
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
        let segment = layout::segment_key(other, 1, super::super::moment::Moment::now(), 0, true);
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
}
