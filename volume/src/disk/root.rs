//! Root: the folder of a server's stores: one folder for each copy, and a lock, so that no two servers share them.

use std::fs::{DirBuilder, File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, FlockOperation, OFlags, RenameFlags, flock, renameat_with};

use super::files::Folder;
use super::recovery;
use crate::shape::VolumeId;

/// See the module's text.
#[derive(Debug)]
pub(crate) struct Root {
    path: PathBuf,
    /// Of the system that runs.
    boot: [u8; 16],
    /// Locked until it is dropped.
    _lock: File,
}

impl Root {
    /// Opens the folder, or makes it.
    ///
    /// # Errors
    /// It cannot be used, or another server uses it.
    pub(crate) fn open(path: &Path) -> io::Result<Root> {
        let failed = |what: &str, error: io::Error| {
            io::Error::new(error.kind(), format!("{what} {}: {error}; use another folder for --store", path.display()))
        };
        let made = DirBuilder::new().recursive(true).mode(0o700).create(path);
        made.map_err(|error| failed("cannot make the folder", error))?;
        let mut options = OpenOptions::new();
        options.write(true).create(true).truncate(false).mode(0o600).custom_flags(OFlags::NOFOLLOW.bits() as i32);
        let lock = options.open(path.join("lock")).map_err(|error| failed("cannot use the folder", error))?;
        flock(&lock, FlockOperation::NonBlockingLockExclusive)
            .map_err(|_| failed("cannot lock the folder", io::Error::other("another server has its stores there")))?;
        let root = Root { path: path.into(), boot: boot(), _lock: lock };
        root.clear_growths().map_err(|error| failed("cannot use the folder", error))?;
        Ok(root)
    }

    /// Removes what copies have left whose growth was interrupted.
    fn clear_growths(&self) -> io::Result<()> {
        self.sync()?; // the names that are seen are those that stay
        for entry in std::fs::read_dir(&self.path)? {
            let name = entry?.file_name();
            if name.to_str().and_then(|name| name.strip_suffix(GROWTH)).and_then(volume).is_some() {
                std::fs::remove_dir_all(self.path.join(name))?;
            }
        }
        Ok(())
    }

    /// The folder.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// The system that runs: another one after each boot.
    pub(crate) fn boot(&self) -> [u8; 16] {
        self.boot
    }

    /// The stores that are there.
    ///
    /// # Errors
    /// The folder cannot be read.
    pub(crate) fn stores(&self) -> io::Result<Vec<(VolumeId, Folder)>> {
        let mut stores = Vec::new();
        for entry in std::fs::read_dir(&self.path)? {
            let entry = entry?;
            let volume = entry.file_name().to_str().and_then(volume);
            if let Some(volume) = volume.filter(|_| entry.file_type().is_ok_and(|kind| kind.is_dir())) {
                stores.push((volume, Folder::at(&entry.path())));
            }
        }
        stores.sort_unstable_by_key(|(volume, _)| *volume);
        Ok(stores)
    }

    /// An empty folder for a copy. What is there, of a copy that was lost, is removed.
    ///
    /// # Errors
    /// The folder cannot be made.
    pub(crate) fn make(&self, volume: VolumeId) -> io::Result<Folder> {
        self.make_at(&self.path.join(volume.to_string()))
    }

    fn make_at(&self, path: &Path) -> io::Result<Folder> {
        match std::fs::remove_dir_all(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        DirBuilder::new().mode(0o700).create(path)?;
        File::open(&self.path)?.sync_all()?;
        Ok(Folder::at(path))
    }

    /// An empty folder for a copy as it will be when it has grown.
    ///
    /// # Errors
    /// The folder cannot be made.
    pub(crate) fn make_growth(&self, volume: VolumeId) -> io::Result<Folder> {
        self.make_at(&self.growth(volume))
    }

    /// The growth takes the place of the copy, which is removed. A power cut leaves one of the two.
    ///
    /// # Errors
    /// The folders keep their names.
    pub(crate) fn exchange(&self, volume: VolumeId, copy: &Folder, growth: &Folder) -> io::Result<()> {
        let (path, beside) = (self.path.join(volume.to_string()), self.growth(volume));
        renameat_with(CWD, &path, CWD, &beside, RenameFlags::EXCHANGE)?;
        copy.moved(beside);
        growth.moved(path);
        Ok(())
    }

    /// Returns when the names of the folders are durable.
    ///
    /// # Errors
    /// It is not known which names are.
    pub(crate) fn sync(&self) -> io::Result<()> {
        File::open(&self.path)?.sync_all()
    }

    /// Removes the folder of a growth, or of the copy whose place it has taken. One that stays is removed when the root
    /// is opened again.
    pub(crate) fn remove_growth(&self, volume: VolumeId) {
        let path = self.growth(volume);
        if let Err(error) = std::fs::remove_dir_all(&path) {
            let path = path.display();
            tracing::warn!(%path, %error, "a folder that is not needed any more cannot be removed");
        }
    }

    fn growth(&self, volume: VolumeId) -> PathBuf {
        self.path.join(format!("{volume}{GROWTH}"))
    }

    /// Removes the folder of a copy that is forgotten. Returns whether there was one. A folder of this name that has
    /// the store of another volume is left alone.
    ///
    /// # Errors
    /// It cannot be removed. The text names it.
    pub(crate) fn remove_all(&self, volume: VolumeId) -> io::Result<bool> {
        let path = self.path.join(volume.to_string());
        let failed = |error: io::Error| io::Error::new(error.kind(), format!("{}: {error}", path.display()));
        let is_other = recovery::superblock(&Folder::at(&path)).is_ok_and(|found| found.shape.volume() != volume);
        if is_other {
            return Ok(false);
        }
        match std::fs::remove_dir_all(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
            removed => removed.map_err(failed)?,
        }
        File::open(&self.path).and_then(|folder| folder.sync_all()).map_err(failed)?;
        Ok(true)
    }

    /// Removes the folder of a copy that was not made, as far as that is possible.
    pub(crate) fn remove(&self, volume: VolumeId) {
        let _ = std::fs::remove_dir_all(self.path.join(volume.to_string()));
    }
}

/// What the name of a growth's folder ends with.
const GROWTH: &str = ".grown";

/// The volume of a folder's name.
fn volume(name: &str) -> Option<VolumeId> {
    let is_name = name.len() == 32 && name.bytes().all(|byte| byte.is_ascii_hexdigit() && !byte.is_ascii_uppercase());
    let number = u128::from_str_radix(name, 16).ok().filter(|_| is_name)?;
    Some(VolumeId(number.to_be_bytes()))
}

/// The system that runs. If it does not say, each process counts as another one: after each a tail may be missing.
fn boot() -> [u8; 16] {
    let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let digits: String = text.chars().filter(char::is_ascii_hexdigit).collect();
    let number = u128::from_str_radix(&digits, 16).ok().filter(|_| digits.len() == 32);
    number.map(u128::to_be_bytes).unwrap_or_else(|| {
        let mut bytes = [0; 16];
        let _ = getrandom::fill(&mut bytes);
        bytes
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::os::unix::fs::PermissionsExt;
    use std::sync::Arc;

    use remora_fabric::memory::crc::crc32c;

    use super::*;
    use crate::disk::files::{Failure, Files, Name};
    use crate::layout::Entry;
    use crate::message::{Standing, State};
    use crate::shape::{BLOCK_BYTES, Copies, Shape};
    use crate::store::{Store, sums};
    use crate::version::Generation;

    const VOLUME: VolumeId = VolumeId([0xab; 16]);

    /// Fits the longest record.
    const SEGMENT: u64 = 8 << 20;

    #[test]
    fn a_copy_in_a_folder_is_found_again_and_only_its_user_can_read_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("stores");
        let root = Root::open(&path).unwrap();
        let refused = Root::open(&path).unwrap_err().to_string();
        assert!(refused.contains("another server has its stores there"), "{refused}");

        let shape = Shape::new(VOLUME, 100, Copies::new(3, 2).unwrap()).unwrap();
        let start = Generation::NONE.next().unwrap().start();
        let standing = Standing { state: State::Whole, claim: start, applied: start, ..Standing::default() };
        let files = Arc::new(root.make(VOLUME).unwrap());
        let mut journal = recovery::create(Arc::clone(&files), shape, SEGMENT, (7, root.boot()), standing).unwrap();
        let (version, bytes) = (start.next().unwrap(), vec![9; BLOCK_BYTES]);
        let entry = Entry::of(version, sums(&bytes).next().unwrap());
        let standing = Standing { applied: version, claim: version, ..standing };
        journal.append(standing, &[(42, entry)], &[&bytes]).unwrap();
        for name in ["", "superblock", "extents", "journal-1"] {
            let mode = std::fs::metadata(files.folder().join(name)).unwrap().permissions().mode();
            assert_eq!(mode & 0o777, if name.is_empty() { 0o700 } else { 0o600 }, "{name}");
        }
        drop((journal, files, root));

        let root = Root::open(&path).unwrap();
        let (volume, files) = root.stores().unwrap().pop().unwrap();
        let memory = Store::create(shape).unwrap();
        let found = recovery::recover(Arc::new(files), root.boot(), SEGMENT, &memory).unwrap();
        assert_eq!((volume, found.standing, found.is_cut, found.lacks), (VOLUME, standing, false, None));
        let mut read = vec![0; BLOCK_BYTES];
        assert_eq!((memory.get(42, &mut read), read), (Ok(entry), bytes));
    }

    #[test]
    fn a_store_of_an_earlier_layout_is_refused_with_both_layouts_named() {
        let folder = tempfile::tempdir().unwrap();
        let root = Root::open(folder.path()).unwrap();
        let shape = Shape::new(VOLUME, 100, Copies::new(3, 2).unwrap()).unwrap();
        let files = Arc::new(root.make(VOLUME).unwrap());
        recovery::create(Arc::clone(&files), shape, SEGMENT, (7, root.boot()), Standing::default()).unwrap();
        let path = files.folder().join("superblock");
        let mut slots = std::fs::read(&path).unwrap();
        for slot in slots.chunks_mut(4096).filter(|slot| slot[0] != 0) {
            slot[12..16].copy_from_slice(&1_u32.to_le_bytes());
            let check = crc32c(&slot[12..132]);
            slot[8..12].copy_from_slice(&check.to_le_bytes());
        }
        std::fs::write(&path, slots).unwrap();
        let why = recovery::superblock(&*files).unwrap_err().to_string();
        assert!(why.contains("it has layout 1, and this release reads 2") && why.contains("superblock"), "{why}");
    }

    #[test]
    fn a_link_in_a_folder_is_not_followed_and_a_file_that_is_missing_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let root = Root::open(folder.path()).unwrap();
        let files = root.make(VOLUME).unwrap();
        let other = folder.path().join("other");
        std::fs::write(&other, "precious").unwrap();
        std::os::unix::fs::symlink(&other, files.folder().join("extents")).unwrap();
        assert!(files.create(Name::Extents, 4096).is_err());
        assert_eq!(std::fs::read(&other).unwrap(), b"precious");
        let Err(Failure::Lost { path, .. }) = recovery::superblock(&files) else { panic!("there is none") };
        assert!(path.ends_with("superblock"), "{path}");
    }
}
