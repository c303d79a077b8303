//! Files that other users cannot read or change, and files that are never seen in halves.
//!
//! # Private folders
//!
//! A [`Folder`] of state holds slots of the data set and settings of the server. So the folder and its files must
//! belong to the agent's user or to root, files have mode 0600, and no symbolic link is followed. The agent may run as
//! root, and a link would let another user choose which file it overwrites. A [`Claim`] keeps other processes out.
//!
//! The folder must not be a symbolic link either. Its owner and mode are checked when it is opened, but another user
//! could point a link to a different folder between two runs. Links in the folders above are followed: they belong to
//! the administrator.
//!
//! # Files of others
//!
//! [`open_to_read`] opens what an operator has named, and waits for nobody.
//!
//! # Whole files
//!
//! [`write`](write()) and [`put`] give a file its name when it is whole, on the disk, and has the right owner and mode
//! ([`Placing`]).

use std::fs::{self, DirBuilder, File};
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, FileType, FlockOperation, Gid, Mode, OFlags, RenameFlags, Stat, Uid};
use rustix::io::Errno;

/// An open folder that no other user can write to.
#[derive(Debug)]
pub struct Folder {
    path: PathBuf,
    handle: OwnedFd,
}

/// A folder or file that another user can change or could have created.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct Unsafe(String);

/// The mode of new folders.
const FOLDER_MODE: u32 = 0o700;

/// The mode of new files.
const FILE_MODE: Mode = Mode::RUSR.union(Mode::WUSR);

/// Mode bits of a folder that let other users add and remove files.
const WRITABLE_BY_OTHERS: u32 = 0o022;

/// Mode bits of a file that give other users access.
const FOR_OTHERS: u32 = 0o077;

/// The flags with which each file is opened. Without `NONBLOCK`, a FIFO with the file's name would block the agent.
const OPEN: OFlags = OFlags::NOFOLLOW.union(OFlags::CLOEXEC).union(OFlags::NONBLOCK);

impl Folder {
    /// Opens the folder. If it is missing, creates it and its parents with access for the owner only.
    ///
    /// # Errors
    /// An error with [`Unsafe`] inside ([`is_unsafe`]) if the folder is a symbolic link, or if another user owns it or
    /// can write to it.
    pub fn open(path: &Path) -> io::Result<Folder> {
        // A slash at the end would make the system follow a link.
        let path: PathBuf = path.components().collect();
        DirBuilder::new().recursive(true).mode(FOLDER_MODE).create(&path)?;
        if fs::symlink_metadata(&path)?.is_symlink() {
            return Err(unsafe_path(
                &path,
                "is a symbolic link, which is not followed; name the folder that it leads to",
            ));
        }
        let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let handle = rustix::fs::open(&path, flags, Mode::empty())?;
        let stat = rustix::fs::fstat(&handle)?;
        check_owner(&path, &stat)?;
        let mode = stat.st_mode & 0o7777;
        if mode & WRITABLE_BY_OTHERS != 0 {
            let text = format!("can be written to by other users (mode {mode:04o}); take that away with chmod go-w");
            return Err(unsafe_path(&path, &text));
        }
        Ok(Folder { path, handle })
    }

    /// The path of a file in the folder, for messages.
    pub fn path_of(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    /// Opens a file for reading and writing, and creates it if it is missing.
    pub fn file(&self, name: &str) -> io::Result<File> {
        self.open_file(name, OFlags::RDWR | OFlags::CREATE)
    }

    /// Reads the first `limit` bytes of a file; `None` if the file does not exist.
    pub fn read(&self, name: &str, limit: u64) -> io::Result<Option<Vec<u8>>> {
        let file = match self.open_file(name, OFlags::RDONLY) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            // The file system does not allow this name, so the file cannot exist.
            Err(error) if error.raw_os_error() == Some(Errno::NAMETOOLONG.raw_os_error()) => return Ok(None),
            file => file?,
        };
        let mut bytes = Vec::new();
        file.take(limit).read_to_end(&mut bytes)?;
        Ok(Some(bytes))
    }

    /// Replaces a file atomically, and waits until it is on the disk.
    pub fn replace(&self, name: &str, bytes: &[u8]) -> io::Result<()> {
        let fresh = format!("{name}.new");
        self.remove(&fresh)?;
        let mut file = self.open_file(&fresh, OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL)?;
        file.write_all(bytes)?;
        file.sync_all()?;
        Ok(rustix::fs::renameat(&self.handle, &fresh, &self.handle, name)?)
    }

    /// Removes a file. If it is a link, removes the link and not its target. A missing file is no error.
    pub fn remove(&self, name: &str) -> io::Result<()> {
        match rustix::fs::unlinkat(&self.handle, name, AtFlags::empty()) {
            Err(Errno::NOENT) => Ok(()),
            done => Ok(done?),
        }
    }

    /// Claims the folder for this process. `None` if another process has claimed it.
    pub fn claim(&self) -> io::Result<Option<Claim>> {
        // Opened anew: a copy of the handle would keep the lock until the folder is closed too.
        let flags = OFlags::DIRECTORY | OFlags::CLOEXEC;
        Claim::take(rustix::fs::openat(&self.handle, ".", flags, Mode::empty())?)
    }

    /// Claims a file of the folder, which it creates. `None` if another process has claimed it.
    pub fn claim_file(&self, name: &str) -> io::Result<Option<Claim>> {
        Claim::take(self.file(name)?.into())
    }

    fn open_file(&self, name: &str, how: OFlags) -> io::Result<File> {
        let path = self.path_of(name);
        let file = match rustix::fs::openat(&self.handle, name, OPEN | how, FILE_MODE) {
            Err(Errno::LOOP) => {
                return Err(unsafe_path(&path, "is a symbolic link, which is not followed; remove it"));
            }
            file => File::from(file?),
        };
        let stat = rustix::fs::fstat(&file)?;
        if !FileType::from_raw_mode(stat.st_mode).is_file() {
            return Err(unsafe_path(&path, "is not a regular file; remove it"));
        }
        check_owner(&path, &stat)?;
        if stat.st_mode & FOR_OTHERS != 0 {
            rustix::fs::fchmod(&file, FILE_MODE)?;
        }
        Ok(file)
    }
}

/// A folder or file that no other process can claim until this value is dropped, or the process ends.
#[derive(Debug)]
pub struct Claim {
    _handle: OwnedFd,
}

impl Claim {
    fn take(handle: OwnedFd) -> io::Result<Option<Claim>> {
        match rustix::fs::flock(&handle, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(Some(Claim { _handle: handle })),
            Err(Errno::WOULDBLOCK) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }
}

/// Opens an ordinary file to read it, and waits for nobody: to open a FIFO would wait until somebody writes into it.
///
/// # Errors
/// It cannot be opened, or is something else than a file.
pub fn open_to_read(path: &Path) -> io::Result<File> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK;
    let file = File::from(rustix::fs::open(path, flags, Mode::empty())?);
    match file.metadata()?.is_file() {
        true => Ok(file),
        false => Err(io::Error::new(io::ErrorKind::InvalidInput, "it is not a file")),
    }
}

/// Whether the error says that a folder or file is not safe to use.
pub fn is_unsafe(error: &io::Error) -> bool {
    error.get_ref().is_some_and(|cause| cause.is::<Unsafe>())
}

fn check_owner(path: &Path, stat: &Stat) -> io::Result<()> {
    let us = rustix::process::geteuid();
    if stat.st_uid == us.as_raw() || stat.st_uid == 0 {
        return Ok(());
    }
    let text = format!("belongs to another user (uid {}, and the agent has uid {})", stat.st_uid, us.as_raw());
    Err(unsafe_path(path, &format!("{text}; name another folder with --state-dir, or change the owner")))
}

fn unsafe_path(path: &Path, text: &str) -> io::Error {
    io::Error::new(io::ErrorKind::PermissionDenied, Unsafe(format!("{} {text}", path.display())))
}

/// How a file is put in its place.
#[derive(Clone, Copy, Debug)]
pub struct Placing {
    /// The user and group to which it is given; `None` leaves it with this process's.
    pub owner: Option<(Uid, Gid)>,
    /// The permission bits, whatever the umask is.
    pub mode: Mode,
    /// Whether a file that is there already goes.
    pub replaces: bool,
}

/// A file that its owner alone can read, and that replaces another one.
pub const PRIVATE: Placing = Placing { owner: None, mode: Mode::RUSR.union(Mode::WUSR), replaces: true };

/// Why a file is not in its place. The sentences name the options by which the user has asked for it.
#[derive(Debug, thiserror::Error)]
pub enum PutError {
    /// Another file has the name, and was not to be replaced: the user decides.
    #[error("{} exists by now; replace it by --replace", .0.display())]
    Exists(PathBuf),
    /// The system refused a step: its administrator has to see to it.
    #[error("{path}{step}: {cause}", path = path.display())]
    Failed {
        /// The file.
        path: PathBuf,
        /// What did not succeed, behind the file's name.
        step: &'static str,
        /// The system's error.
        cause: io::Error,
    },
}

/// Writes a short file. Readers see the file of before, or all of the new one.
///
/// # Errors
/// The file cannot be written, or [`put`].
pub fn write(to: &Path, bytes: &[u8], how: &Placing) -> Result<(), PutError> {
    let failed = |cause: io::Error| PutError::Failed { path: to.to_owned(), step: " cannot be written", cause };
    let mut file = tempfile::Builder::new().prefix(".remora").tempfile_in(folder_of(to)).map_err(failed)?;
    file.write_all(bytes).map_err(failed)?;
    let (file, fresh) = file.into_parts();
    put(&file, &fresh, to, how)?;
    // It has another name by now.
    let _ = fresh.keep();
    Ok(())
}

/// Gives a whole file its owner, its mode and its name, and waits until they are on the disk.
///
/// # Errors
/// The owner or the name cannot be given to it, or another file has the name by now.
pub fn put(file: &File, from: &Path, to: &Path, how: &Placing) -> Result<(), PutError> {
    let failed = |step, cause: io::Error| PutError::Failed { path: to.to_owned(), step, cause };
    if let Some((user, group)) = how.owner {
        let given = rustix::fs::fchown(file, Some(user), Some(group));
        given.map_err(|errno| failed(": it cannot be given to that --owner", errno.into()))?;
    }
    let given = rustix::fs::fchmod(file, how.mode).and_then(|()| rustix::fs::fsync(file));
    given.map_err(|errno| failed(": it cannot be given that --mode", errno.into()))?;
    let flags = if how.replaces { RenameFlags::empty() } else { RenameFlags::NOREPLACE };
    match rustix::fs::renameat_with(rustix::fs::CWD, from, rustix::fs::CWD, to, flags) {
        Err(Errno::EXIST) => return Err(PutError::Exists(to.to_owned())),
        named => named.map_err(|errno| failed(": it cannot be given its name", errno.into()))?,
    }
    let synced = File::open(folder_of(to)).and_then(|folder| folder.sync_all());
    synced.map_err(|error| failed(": its name may not outlive a power cut", error))
}

fn folder_of(file: &Path) -> &Path {
    file.parent().filter(|path| !path.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};

    use super::*;

    fn mode(path: &Path) -> u32 {
        fs::symlink_metadata(path).unwrap().mode() & 0o7777
    }

    fn set_mode(path: &Path, mode: u32) {
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    }

    #[test]
    fn a_fifo_or_a_folder_is_refused_and_not_waited_for() {
        let home = tempfile::tempdir().unwrap();
        let [fifo, file] = ["fifo", "file"].map(|name| home.path().join(name));
        rustix::fs::mknodat(rustix::fs::CWD, &fifo, FileType::Fifo, FILE_MODE, 0).unwrap();
        for other in [fifo.as_path(), home.path(), Path::new("/dev/zero")] {
            assert_eq!(open_to_read(other).unwrap_err().to_string(), "it is not a file", "{}", other.display());
        }
        fs::write(&file, "content").unwrap();
        let mut text = String::new();
        open_to_read(&file).unwrap().read_to_string(&mut text).unwrap();
        assert_eq!(text, "content");
    }

    #[test]
    fn folders_and_files_are_made_for_their_owner_only() {
        let home = tempfile::tempdir().unwrap();
        let path = home.path().join("a/b");
        let folder = Folder::open(&path).unwrap();
        assert_eq!((mode(&home.path().join("a")), mode(&path)), (0o700, 0o700));
        folder.file("slots").unwrap().write_all(b"x").unwrap();
        folder.replace("record", b"{}").unwrap();
        folder.replace("record", b"{1}").unwrap();
        assert_eq!((mode(&path.join("slots")), mode(&path.join("record"))), (0o600, 0o600));
        assert_eq!(folder.read("record", 100).unwrap().unwrap(), b"{1}");
        assert_eq!(folder.read("record", 2).unwrap().unwrap(), b"{1");
        assert_eq!(folder.read("nothing", 100).unwrap(), None);
        folder.remove("record").unwrap();
        folder.remove("record").unwrap();
        assert_eq!(fs::read_dir(&path).unwrap().count(), 1);
    }

    #[test]
    fn a_file_that_others_could_read_is_closed_to_them() {
        let home = tempfile::tempdir().unwrap();
        let folder = Folder::open(home.path()).unwrap();
        let path = home.path().join("slots");
        fs::write(&path, b"kept").unwrap();
        set_mode(&path, 0o644);
        assert_eq!(folder.read("slots", 9).unwrap().unwrap(), b"kept");
        assert_eq!(mode(&path), 0o600);
    }

    #[test]
    fn a_folder_that_others_can_only_read_is_taken_and_one_that_they_can_write_to_is_refused() {
        let home = tempfile::tempdir().unwrap();
        for (wide, is_taken) in [(0o700, true), (0o755, true), (0o775, false), (0o702, false), (0o1777, false)] {
            set_mode(home.path(), wide);
            match Folder::open(home.path()) {
                Ok(_) => assert!(is_taken, "{wide:o}"),
                Err(error) => {
                    assert!(!is_taken && is_unsafe(&error), "{wide:o}: {error}");
                    let text = error.to_string();
                    assert!(text.contains(&format!("{wide:04o}")) && text.contains("chmod go-w"), "{text}");
                    assert!(text.contains(&home.path().display().to_string()), "{text}");
                }
            }
        }
    }

    #[test]
    fn no_link_is_followed() {
        let home = tempfile::tempdir().unwrap();
        let target = home.path().join("target");
        fs::write(&target, b"precious").unwrap();
        let path = home.path().join("state");
        let folder = Folder::open(&path).unwrap();
        symlink(&target, path.join("slots")).unwrap();
        symlink(&target, path.join("record.new")).unwrap();
        assert!(is_unsafe(&folder.file("slots").unwrap_err()));
        assert!(is_unsafe(&folder.read("slots", 9).unwrap_err()));
        folder.replace("record", b"{}").unwrap();
        folder.remove("slots").unwrap();
        assert_eq!(fs::read(&target).unwrap(), b"precious");
        assert_eq!(fs::read(path.join("record")).unwrap(), b"{}");

        let link = home.path().join("link");
        symlink(&path, &link).unwrap();
        for named in [link.clone(), link.join("")] {
            let error = Folder::open(&named).unwrap_err();
            assert!(is_unsafe(&error) && error.to_string().contains("symbolic link"), "{error}");
        }
    }

    #[test]
    fn a_fifo_in_the_place_of_a_file_is_refused_without_waiting_for_it() {
        let home = tempfile::tempdir().unwrap();
        let folder = Folder::open(home.path()).unwrap();
        rustix::fs::mknodat(rustix::fs::CWD, home.path().join("slots"), FileType::Fifo, FILE_MODE, 0).unwrap();
        assert!(is_unsafe(&folder.read("slots", 9).unwrap_err()));
        assert!(is_unsafe(&folder.file("slots").unwrap_err()));
    }

    #[test]
    fn what_one_has_claimed_no_other_can() {
        let home = tempfile::tempdir().unwrap();
        let [one, other] = [(); 2].map(|()| Folder::open(home.path()).unwrap());
        let (folder, file) = (one.claim().unwrap().unwrap(), one.claim_file("a.lock").unwrap().unwrap());
        assert!(other.claim().unwrap().is_none() && other.claim_file("a.lock").unwrap().is_none());
        assert!(other.claim_file("b.lock").unwrap().is_some());
        drop((folder, file));
        assert!(other.claim().unwrap().is_some() && other.claim_file("a.lock").unwrap().is_some());
    }

    #[test]
    fn a_file_is_written_as_a_whole_and_leaves_nothing_beside_it() {
        let folder = tempfile::tempdir().unwrap();
        let to = folder.path().join("file");
        let how = |replaces| Placing { owner: None, mode: Mode::from_raw_mode(0o640), replaces };
        write(&to, b"first", &how(false)).unwrap();
        let error = write(&to, b"second", &how(false)).unwrap_err();
        assert!(matches!(error, PutError::Exists(_)) && error.to_string().contains("--replace"), "{error}");
        assert_eq!(std::fs::read(&to).unwrap(), b"first");
        write(&to, b"second", &how(true)).unwrap();
        assert_eq!(std::fs::read(&to).unwrap(), b"second");
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
        assert!(write(Path::new("/nowhere/file"), b"", &how(true)).is_err());
    }
}
