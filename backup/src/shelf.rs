//! Shelf: the folder of the backups. It knows which files are backups, and removes old ones.
//!
//! ```text
//!   20261125T234500Z-8c1c6b2f-307366.rdb       a snapshot
//!   20261125T234500Z-8c1c6b2f-307366.json      its manifest, written before the snapshot has its name
//!   20261125T234500Z-8c1c6b2f-307366/          a folder with commands: backup.json, appendonlydir/
//!   .remora-…                                  what is not whole yet, or on its way out
//! ```

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use crate::manifest::{Damaged, IN_FOLDER, Kind, Manifest, oldest_first};
use remora_base::files::{self, PRIVATE};
use remora_base::files::{Claim, Folder, is_unsafe};
use remora_process::exit::Failure;

/// The manifest in a folder with commands.
pub(crate) const MANIFEST: &str = IN_FOLDER;

/// The snapshot that arrives.
const INCOMING_FILE: &str = ".remora-incoming.rdb";

/// The folder with commands that is not whole yet.
const INCOMING_FOLDER: &str = ".remora-incoming";

/// What a folder that is being removed is called at its beginning.
const OUTGOING: &str = ".remora-outgoing-";

/// A folder of backups. One process at a time writes there.
#[derive(Debug)]
pub(crate) struct Shelf {
    folder: PathBuf,
    _claim: Claim,
}

/// A backup in a folder.
#[derive(Clone, Debug)]
pub(crate) struct Backup {
    /// The RDB file, or the folder.
    pub(crate) path: PathBuf,
    pub(crate) manifest: Manifest,
}

impl Shelf {
    /// Opens the folder, makes it if it is missing, and removes what a crash has left on its way out.
    ///
    /// # Errors
    /// The folder cannot be used, other users can write to it, or another process writes there.
    pub(crate) fn open(folder: &Path) -> Result<Shelf, Failure> {
        let unusable = |error: io::Error| {
            let text = format!("the folder {} cannot be used for backups: {error}", folder.display());
            if is_unsafe(&error) { Failure::refused(text) } else { Failure::local(text) }
        };
        fs::DirBuilder::new().recursive(true).mode(0o700).create(folder).map_err(unusable)?;
        let claim = Folder::open(folder).and_then(|folder| folder.claim()).map_err(unusable)?;
        let Some(claim) = claim else {
            let text = format!("another remora backup writes to {}; wait for it, or end it", folder.display());
            return Err(Failure::refused(text));
        };
        let shelf = Shelf { folder: folder.to_owned(), _claim: claim };
        for entry in fs::read_dir(folder).map_err(unusable)?.flatten() {
            if entry.file_name().to_string_lossy().starts_with(OUTGOING) {
                shelf.forget(&entry.path());
            }
        }
        Ok(shelf)
    }

    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }

    /// Where a snapshot arrives.
    pub(crate) fn incoming_file(&self) -> PathBuf {
        self.folder.join(INCOMING_FILE)
    }

    /// An empty folder for a snapshot and its commands, until they are whole.
    ///
    /// # Errors
    /// It cannot be made.
    pub(crate) fn incoming_folder(&self) -> Result<PathBuf, Failure> {
        let path = self.folder.join(INCOMING_FOLDER);
        let made = match fs::remove_dir_all(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => fs::DirBuilder::new().mode(0o700).create(&path),
        };
        made.map_err(|error| Failure::local(format!("{} cannot be made: {error}", path.display())))?;
        Ok(path)
    }

    /// The backup that has this manifest, if there is one.
    pub(crate) fn find(&self, manifest: &Manifest) -> Option<Backup> {
        self.list().into_iter().find(|backup| backup.manifest.name == manifest.name)
    }

    /// The backups. A damaged manifest is named and skipped: it is in no new backup's way.
    pub(crate) fn list(&self) -> Vec<Backup> {
        list(&self.folder, Damaged::Skipped).unwrap_or_default()
    }

    /// Gives the snapshot that has arrived its name. The manifest has its own before.
    ///
    /// # Errors
    /// The names cannot be given.
    pub(crate) fn place(&self, manifest: &Manifest) -> Result<PathBuf, Failure> {
        let (from, to) = (self.incoming_file(), self.folder.join(&manifest.name));
        manifest.write(&manifest_of(&to))?;
        let file = File::open(&from)
            .map_err(|error| Failure::local(format!("{} cannot be opened: {error}", from.display())))?;
        files::put(&file, &from, &to, &PRIVATE)?;
        Ok(to)
    }

    /// Removes the oldest backups of the same history and kind, so that `keep` stay.
    pub(crate) fn keep(&self, newest: &Manifest, keep: u32) {
        let mut all = self.list();
        all.retain(|backup| backup.manifest.kind == newest.kind && backup.manifest.replid == newest.replid);
        let surplus = all.len().saturating_sub(keep as usize);
        for backup in all.into_iter().take(surplus).filter(|backup| backup.manifest.name != newest.name) {
            tracing::info!("{} is removed: {keep} newer ones are kept", backup.path.display());
            match backup.manifest.kind {
                // A manifest without its file is no backup.
                Kind::Snapshot => {
                    self.forget(&backup.path);
                    self.forget(&manifest_of(&backup.path));
                }
                Kind::Journal => {
                    let outgoing = self.folder.join(format!("{OUTGOING}{}", backup.manifest.name));
                    match fs::rename(&backup.path, &outgoing) {
                        Ok(()) => self.forget(&outgoing),
                        Err(error) => tracing::warn!("{} cannot be removed: {error}", backup.path.display()),
                    }
                }
            }
        }
    }

    fn forget(&self, path: &Path) {
        let removed = if path.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) };
        if let Err(error) = removed {
            tracing::warn!("{} cannot be removed: {error}", path.display());
        }
    }
}

/// The manifest of an RDB file.
pub(crate) fn manifest_of(rdb: &Path) -> PathBuf {
    rdb.with_extension("json")
}

/// The whole backups in a folder, the oldest first. `damaged`: what becomes of one whose manifest is damaged.
///
/// # Errors
/// A manifest is damaged, and that is an error.
pub(crate) fn list(folder: &Path, damaged: Damaged) -> Result<Vec<Backup>, Failure> {
    let mut all = Vec::new();
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        all.extend(damaged.of(of_entry(&entry.path()))?.flatten());
    }
    Ok(oldest_first(all, |backup: &Backup| &backup.manifest))
}

/// The backup at this path of a folder. A manifest beside a snapshot counts by the snapshot.
///
/// # Errors
/// Its manifest is damaged.
pub(crate) fn of_entry(path: &Path) -> Result<Option<Backup>, Failure> {
    let Some(name) = path.file_name().and_then(|name| name.to_str()) else { return Ok(None) };
    let (manifest, kind) = match path.is_dir() {
        true => (Manifest::read(&path.join(MANIFEST))?, Kind::Journal),
        false if name.ends_with(".rdb") => (Manifest::read(&manifest_of(path))?, Kind::Snapshot),
        false => return Ok(None),
    };
    let manifest = manifest.filter(|manifest| manifest.name == name && manifest.kind == kind);
    Ok(manifest.map(|manifest| Backup { path: path.to_owned(), manifest }))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use remora_base::units::Moment;
    use remora_process::rdb_file::RdbFile;

    fn manifest(kind: Kind, taken: u64, replid: char) -> Manifest {
        let rdb = RdbFile {
            replid: replid.to_string().repeat(40),
            offset: taken,
            server: String::new(),
            version: 11,
            taken: Moment::seconds(taken),
            bytes: 9,
            crc: 0,
            has_checksum: true,
            keys: None,
            expired: 0,
            stream_db: 0,
        };
        Manifest::of(kind, &rdb, "redis 7.0.15", "127.0.0.1:7379".into())
    }

    fn names(shelf: &Shelf) -> Vec<String> {
        let mut names: Vec<String> = fs::read_dir(shelf.folder())
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }

    #[test]
    fn the_oldest_of_the_same_history_and_kind_go_and_nothing_else() {
        let temporary = tempfile::tempdir().unwrap();
        let shelf = Shelf::open(&temporary.path().join("backups")).unwrap();
        let put = |taken, replid| {
            fs::write(shelf.incoming_file(), "snapshot").unwrap();
            let manifest = manifest(Kind::Snapshot, taken, replid);
            shelf.place(&manifest).unwrap();
            manifest
        };
        put(1, 'b');
        for taken in 1..=3 {
            put(taken, 'a');
        }
        fs::write(shelf.folder().join("0-foreign.rdb"), "mine").unwrap();
        fs::write(shelf.folder().join("0-other.json"), "{}").unwrap();
        let set = shelf.folder().join(manifest(Kind::Journal, 1, 'a').name);
        fs::create_dir(&set).unwrap();
        manifest(Kind::Journal, 1, 'a').write(&set.join(MANIFEST)).unwrap();
        let newest = put(4, 'a');
        shelf.keep(&newest, 2);
        let left: Vec<String> = shelf.list().into_iter().map(|backup| backup.manifest.name).collect();
        let wanted = [
            manifest(Kind::Journal, 1, 'a').name,
            manifest(Kind::Snapshot, 1, 'b').name,
            manifest(Kind::Snapshot, 3, 'a').name,
            newest.name.clone(),
        ];
        assert_eq!(left, wanted);
        assert!(names(&shelf).iter().filter(|name| name.starts_with("0-")).count() == 2, "{:?}", names(&shelf));
        // A folder goes as a whole.
        let mut newer = manifest(Kind::Journal, 2, 'a');
        newer.name.push('x');
        shelf.keep(&newer, 1);
        assert!(set.exists(), "one stays");
        let second = shelf.folder().join(manifest(Kind::Journal, 2, 'a').name);
        fs::create_dir(&second).unwrap();
        manifest(Kind::Journal, 2, 'a').write(&second.join(MANIFEST)).unwrap();
        shelf.keep(&manifest(Kind::Journal, 2, 'a'), 1);
        assert!(!set.exists() && second.exists());
    }

    #[test]
    fn a_clock_that_goes_back_makes_no_backup_older_than_those_before_it() {
        let temporary = tempfile::tempdir().unwrap();
        let shelf = Shelf::open(temporary.path()).unwrap();
        let put = |taken, offset, replid| {
            fs::write(shelf.incoming_file(), "snapshot").unwrap();
            let mut manifest = manifest(Kind::Snapshot, taken, replid);
            manifest.offset = offset;
            shelf.place(&manifest).unwrap();
            manifest
        };
        let other = put(5000, 7, 'b');
        // The third one is of an hour before the second one, by the clock.
        let [first, wrong, right] = [(1000, 10), (5600, 20), (2000, 30)].map(|(taken, at)| put(taken, at, 'a'));
        let names = || shelf.list().into_iter().map(|backup| backup.manifest.name).collect::<Vec<_>>();
        let of = |all: &[&Manifest]| all.iter().map(|one| one.name.clone()).collect::<Vec<_>>();
        assert_eq!(names(), of(&[&first, &wrong, &other, &right]));
        shelf.keep(&right, 1);
        assert_eq!(names(), of(&[&right, &other]));
    }

    #[test]
    fn a_folder_has_one_writer_and_what_was_going_is_gone() {
        let temporary = tempfile::tempdir().unwrap();
        let outgoing = temporary.path().join(".remora-outgoing-x");
        fs::create_dir(&outgoing).unwrap();
        let shelf = Shelf::open(temporary.path()).unwrap();
        assert!(!outgoing.exists());
        assert!(Shelf::open(temporary.path()).unwrap_err().message.contains("another remora backup"));
        drop(shelf);
        assert!(Shelf::open(temporary.path()).is_ok());
    }

    #[test]
    fn a_manifest_of_another_file_or_program_is_none() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("a.rdb");
        fs::write(&file, "snapshot").unwrap();
        for text in ["", "{}", "[1]", "null"] {
            fs::write(manifest_of(&file), text).unwrap();
            assert!(of_entry(&file).unwrap().is_none(), "{text}");
        }
        manifest(Kind::Snapshot, 1, 'a').write(&manifest_of(&file)).unwrap();
        assert!(of_entry(&file).unwrap().is_none(), "of another name");
    }
}
