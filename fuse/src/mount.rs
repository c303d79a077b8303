//! Mount: a directory becomes a file system of this process, and an ordinary directory again.
//!
//! A process that dies leaves its mount behind: the kernel answers `ENOTCONN` for it until it is unmounted. The
//! next one that mounts there with the same subtype takes it away.

use std::ffi::CString;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags, MountFlags, UnmountFlags};

use crate::error::{DEVICE, StartError};

/// How a file system is mounted. Always with `nosuid`, `nodev` and `default_permissions`.
#[derive(Clone, Debug)]
pub struct MountOptions {
    /// What `mount` and `df` show as its source.
    pub source: String,
    /// What it calls itself: the type is `fuse.` and this. Letters, digits, `-` and `_`.
    pub subtype: String,
    /// Nothing can be changed.
    pub read_only: bool,
    /// Other users than the one that mounts may use it, as far as permissions allow.
    pub other_users: bool,
}

impl Default for MountOptions {
    fn default() -> MountOptions {
        MountOptions { source: "remora".into(), subtype: "remora".into(), read_only: false, other_users: true }
    }
}

/// A mount of this process.
pub(crate) struct Mounted {
    /// Where it was mounted. It may have been moved since, or a folder above it been renamed.
    directory: PathBuf,
    line: Line,
    /// `None` if this kernel or container does not show it.
    control: Option<Control>,
}

impl Mounted {
    /// Mounts. The kernel then sends its first request to `device`.
    pub(crate) fn new(directory: &Path, device: BorrowedFd<'_>, options: &MountOptions) -> Result<Mounted, StartError> {
        let misuse = options.subtype.is_empty() || !options.subtype.bytes().all(is_plain);
        if misuse || options.source.contains('\0') {
            return Err(StartError::Misuse("a subtype has letters, digits, `-` and `_`, and a source has no NUL"));
        }
        let directory = prepare(directory, &options.subtype)?;
        let failed = |source: io::Error| match source.raw_os_error() {
            Some(code) if code == Errno::PERM.raw_os_error() => {
                StartError::NotPermitted { directory: directory.clone() }
            }
            _ => StartError::Mount { directory: directory.clone(), source },
        };
        let flags = MountFlags::NOSUID | MountFlags::NODEV;
        let flags = if options.read_only { flags | MountFlags::RDONLY } else { flags };
        let (uid, gid) = (rustix::process::getuid().as_raw(), rustix::process::getgid().as_raw());
        let others = if options.other_users { ",allow_other" } else { "" };
        let data = format!(
            "fd={},rootmode=40000,user_id={uid},group_id={gid},default_permissions{others}",
            device.as_raw_fd()
        );
        let data = CString::new(data).map_err(|error| failed(error.into()))?;
        let kind = format!("fuse.{}", options.subtype);
        rustix::mount::mount(&*options.source, &directory, &*kind, flags, &*data).map_err(|e| failed(e.into()))?;
        match Line::of(&directory) {
            Ok(Some(line)) => {
                let control = Control::of(line.minor);
                Ok(Mounted { directory, line, control })
            }
            // Without its line it could not be told from another that is mounted there later.
            wrong => {
                let _ = rustix::mount::unmount(&directory, UnmountFlags::DETACH);
                let missing = || io::Error::other("it is not in /proc/self/mountinfo");
                Err(failed(wrong.err().unwrap_or_else(missing)))
            }
        }
    }

    /// Where it was mounted.
    pub(crate) fn directory(&self) -> &Path {
        &self.directory
    }

    /// Whether it is still in the tree, and on top of others that are mounted at the same place.
    pub(crate) fn is_there(&self) -> bool {
        self.place().is_some()
    }

    /// Where it is now. `None`: it is gone, or another one hides it.
    pub(crate) fn place(&self) -> Option<PathBuf> {
        // The next mount may get the numbers of one that is gone.
        let is_known = self.control.as_ref().is_none_or(|control| control.under_way().is_some());
        if !is_known {
            return None;
        }
        let all = Line::all().ok()?;
        let place = all.iter().find(|(_, line)| *line == self.line).map(|(place, _)| place)?;
        let top = all.iter().rfind(|(at, _)| at == place).map(|(_, line)| line);
        (top == Some(&self.line)).then(|| place.clone())
    }

    /// Unmounts, if no process uses it.
    pub(crate) fn unmount(&self) -> io::Result<()> {
        self.unmount_with(UnmountFlags::NOFOLLOW)
    }

    /// Takes it out of the tree, even if processes use it.
    pub(crate) fn detach(&self) -> io::Result<()> {
        self.unmount_with(UnmountFlags::NOFOLLOW | UnmountFlags::DETACH)
    }

    fn unmount_with(&self, flags: UnmountFlags) -> io::Result<()> {
        let Some(place) = self.place() else { return Ok(()) };
        Ok(rustix::mount::unmount(&place, flags)?)
    }

    /// Whether requests are under way, as far as the kernel shows it.
    pub(crate) fn has_under_way(&self) -> bool {
        self.control.as_ref().and_then(Control::under_way).is_some_and(|number| number > 0)
    }

    /// Ends the connection: every request under way and to come fails. The mount stays until it is unmounted.
    pub(crate) fn abort(&self) -> io::Result<()> {
        match &self.control {
            Some(control) => rustix::io::write(&control.abort, b"1").map(|_| ()).map_err(io::Error::from),
            // This wakes them as well, and does not unmount while it is used.
            None => self.unmount_with(UnmountFlags::NOFOLLOW | UnmountFlags::FORCE),
        }
    }
}

fn is(error: &io::Error, errno: Errno) -> bool {
    error.raw_os_error() == Some(errno.raw_os_error())
}

fn is_plain(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_'
}

/// Whether a file system could be mounted at a directory, as far as this can be known without doing so: for a caller
/// that must end another one before it mounts. Where one of the same subtype is served, it could not.
///
/// # Errors
/// [`StartError`].
pub fn check(directory: &Path, options: &MountOptions) -> Result<(), StartError> {
    if !may_mount() {
        return Err(StartError::NotPermitted { directory: directory.to_owned() });
    }
    rustix::fs::open(DEVICE, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())
        .map_err(|errno| StartError::Device(errno.into()))?;
    let Found::Directory(found) = look(directory, &options.subtype)? else { return Ok(()) };
    let line = Line::of(&found).map_err(|source| StartError::Directory { directory: directory.to_owned(), source })?;
    match line {
        // It would be hidden, and seem to be replaced.
        Some(line) if line.kind == format!("fuse.{}", options.subtype) => Err(StartError::Taken { directory: found }),
        _ => Ok(()),
    }
}

/// Whether this process has the capability to mount, as far as the system says it.
fn may_mount() -> bool {
    let Ok(status) = std::fs::read_to_string("/proc/self/status") else { return true };
    let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let effective = effective.and_then(|digits| u64::from_str_radix(digits.trim(), 16).ok());
    effective.is_none_or(|effective| effective & 1 << CAP_SYS_ADMIN != 0)
}

/// The capability's number, which is the kernel's interface.
const CAP_SYS_ADMIN: u32 = 21;

/// What is at a directory where a file system is to be mounted.
enum Found {
    /// A directory, by its full path.
    Directory(PathBuf),
    /// What a dead process, or a session that has ended, has left mounted with the same subtype.
    Left(PathBuf),
}

/// The directory's full path. What a dead process has left there is taken away.
fn prepare(directory: &Path, subtype: &str) -> Result<PathBuf, StartError> {
    for _ in 0..MOST_LEFT {
        match look(directory, subtype)? {
            Found::Directory(found) => return Ok(found),
            Found::Left(found) => {
                tracing::warn!(directory = %found.display(), "unmounting what a process that has ended left mounted");
                rustix::mount::unmount(&found, UnmountFlags::NOFOLLOW | UnmountFlags::DETACH)
                    .map_err(|_| StartError::Dead { directory: found.clone() })?;
            }
        }
    }
    Err(StartError::Dead { directory: directory.to_owned() })
}

/// Mounts of dead processes, one over the other, that are taken away: there is seldom more than one.
const MOST_LEFT: u32 = 16;

fn look(directory: &Path, subtype: &str) -> Result<Found, StartError> {
    let failed = |source| StartError::Directory { directory: directory.to_owned(), source };
    let found = std::fs::canonicalize(directory).map_err(failed)?;
    // The kernel may remember the attributes of a dead process's directory. It always asks what the file system has.
    let looked = std::fs::metadata(&found);
    let asked = rustix::fs::statfs(&found).map_err(io::Error::from);
    match looked.and_then(|metadata| asked.map(|_| metadata)) {
        Ok(metadata) if metadata.is_dir() => Ok(Found::Directory(found)),
        Ok(_) => Err(failed(io::ErrorKind::NotADirectory.into())),
        Err(error) if OF_THE_DEAD.iter().any(|errno| is(&error, *errno)) => {
            let line = Line::of(&found).map_err(failed)?;
            if line.is_none_or(|line| line.kind != format!("fuse.{subtype}")) {
                return Err(StartError::Dead { directory: found });
            }
            Ok(Found::Left(found))
        }
        Err(error) => Err(failed(error)),
    }
}

/// How the kernel answers for a directory whose process is dead. The last two: while it takes down that process's ring,
/// for a request that waited, and for one that was about to be handed over.
const OF_THE_DEAD: [Errno; 3] = [Errno::NOTCONN, Errno::CONNABORTED, Errno::CANCELED];

/// The kernel's control files of a connection. They need no path of the mount, which may be hidden, moved, or in
/// other namespaces.
struct Control {
    /// What is written to it ends the connection.
    abort: OwnedFd,
    folder: OwnedFd,
}

impl Control {
    /// Opens them. A mount of the control file system that has no place in the tree will do; only root can make one.
    fn of(minor: u32) -> Option<Control> {
        let own = || {
            let context = rustix::mount::fsopen("fusectl", FsOpenFlags::FSOPEN_CLOEXEC)?;
            rustix::mount::fsconfig_create(context.as_fd())?;
            let attributes = MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NODEV;
            let folder = rustix::mount::fsmount(context.as_fd(), FsMountFlags::FSMOUNT_CLOEXEC, attributes)?;
            Control::open(folder.as_fd(), minor)
        };
        let system = || {
            let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
            let folder = rustix::fs::open("/sys/fs/fuse/connections", flags, Mode::empty())?;
            Control::open(folder.as_fd(), minor)
        };
        own().or_else(|_: Errno| system()).ok()
    }

    fn open(all: BorrowedFd<'_>, minor: u32) -> Result<Control, Errno> {
        let open = |name: String, flags| rustix::fs::openat(all, name, flags | OFlags::CLOEXEC, Mode::empty());
        let abort = open(format!("{minor}/abort"), OFlags::WRONLY)?;
        Ok(Control { abort, folder: open(minor.to_string(), OFlags::PATH | OFlags::DIRECTORY)? })
    }

    /// Requests under way. `None`: the connection does not belong to a mount any more. Its folder is not that of a
    /// later one with the same number.
    fn under_way(&self) -> Option<u64> {
        let flags = OFlags::RDONLY | OFlags::CLOEXEC;
        let waiting = rustix::fs::openat(&self.folder, "waiting", flags, Mode::empty()).ok()?;
        let mut number = [0; 32];
        let length = rustix::io::read(waiting, &mut number).ok()?;
        std::str::from_utf8(&number[..length]).ok()?.trim().parse().ok()
    }
}

/// What `/proc/self/mountinfo` says of one mount.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Line {
    id: u32,
    /// The device's minor number, by which the kernel also names the connection.
    minor: u32,
    kind: String,
}

impl Line {
    /// Of the last mount at a place.
    fn of(place: &Path) -> io::Result<Option<Line>> {
        Ok(Line::all()?.into_iter().rfind(|(at, _)| at == place).map(|(_, line)| line))
    }

    /// Of all mounts, each with its place.
    fn all() -> io::Result<Vec<(PathBuf, Line)>> {
        let all = std::fs::read("/proc/self/mountinfo")?;
        Ok(all.split(|byte| *byte == b'\n').filter_map(Line::parse).collect())
    }

    /// `36 35 0:98 / /mnt rw,nosuid shared:1 - fuse.remora source rw`
    fn parse(line: &[u8]) -> Option<(PathBuf, Line)> {
        let mut words = line.split(|byte| *byte == b' ');
        let text = |word: &[u8]| std::str::from_utf8(word).map(str::to_owned).ok();
        let id = text(words.next()?)?.parse().ok()?;
        let device = text(words.nth(1)?)?;
        let minor = device.split_once(':')?.1.parse().ok()?;
        let place = PathBuf::from(std::ffi::OsString::from_vec(unescaped(words.nth(1)?)));
        words.find(|word| *word == b"-")?;
        Some((place, Line { id, minor, kind: text(words.next()?)? }))
    }
}

/// Blanks are written as `\040`, other such bytes in the same way.
fn unescaped(word: &[u8]) -> Vec<u8> {
    let (mut out, mut rest) = (Vec::with_capacity(word.len()), word);
    while let Some((first, behind)) = rest.split_first() {
        let octal = behind.get(..3).filter(|_| *first == b'\\').and_then(|digits| std::str::from_utf8(digits).ok());
        match octal.and_then(|digits| u8::from_str_radix(digits, 8).ok()) {
            Some(byte) => (out.push(byte), rest = &behind[3..]).1,
            None => (out.push(*first), rest = behind).1,
        }
    }
    out
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::os::unix::ffi::OsStrExt;

    use super::*;

    #[test]
    fn a_line_of_mountinfo_says_where_and_what() {
        let line = br"36 35 0:98 / /mnt/a\040b\134c rw,noatime shared:1 master:2 - fuse.remora vol\0401 rw,user_id=0";
        let (place, line) = Line::parse(line).unwrap();
        assert_eq!(place.as_os_str().as_bytes(), br"/mnt/a b\c");
        assert_eq!(line, Line { id: 36, minor: 98, kind: "fuse.remora".into() });
        assert_eq!(Line::parse(b"36 35 0:98 / /mnt"), None);
        assert_eq!(Line::parse(b""), None);
    }
}
