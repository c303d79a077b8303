//! The folder of layouts: one file for each build, named after it, and the marks of builds that failed.
//!
//! ```text
//!   /var/lib/remora-layouts/
//!     build-id-a50d6825….layout     what was found: offsets in the server's memory
//!     build-id-a50d6825….refused    why this build is not used, though its layout is there
//! ```
//!
//! What a layout says becomes addresses that are called and written in the server. So a file is as trusted as the
//! server's program: it is believed only if nobody but root and the server's own user can change it, itself or by a
//! folder above it.

use std::fs::{self, File, Metadata, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;
use rustix::process::geteuid;

use crate::Build;

/// Where layouts are kept, and looked for, unless another folder is named. Not below `/var/lib/remora`: that folder
/// belongs to the agents' user, whom the servers need not trust.
pub const DEFAULT: &str = "/var/lib/remora-layouts";

/// The largest layout: one has some forty lines.
const LAYOUT_BYTES_MAX: u64 = 64 << 10;

/// The longest reason that a mark keeps, in letters, each of which has up to four bytes.
const REASON_LETTERS_MAX: usize = 1 << 10;

/// Why a file is not read or written.
#[derive(Debug, thiserror::Error)]
pub enum FolderError {
    /// There is none.
    #[error("{0} does not exist")]
    Absent(PathBuf),
    /// The system refuses.
    #[error("{path} cannot be {doing}: {error}")]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// Read, or written.
        doing: &'static str,
        /// What the system says.
        error: io::Error,
    },
    /// Others than root and this user could have written it.
    #[error(
        "{path} is refused: {why}; what it says becomes code of the server, so only root and the server's user may be able to change it"
    )]
    NotOurs {
        /// The file or a folder above it.
        path: PathBuf,
        /// Owner or mode.
        why: String,
    },
    /// It is something else than a layout.
    #[error("{path} is refused: {why}")]
    Odd {
        /// The file.
        path: PathBuf,
        /// What it is.
        why: &'static str,
    },
}

/// The file of a build's layout.
pub fn file(folder: &Path, build: &Build) -> PathBuf {
    folder.join(format!("{build}.layout"))
}

/// The text of a layout, if nobody but root and this process's user can change it.
///
/// # Errors
/// [`FolderError`].
pub fn read(path: &Path) -> Result<String, FolderError> {
    let failed = |error: io::Error| match error.kind() {
        io::ErrorKind::NotFound => FolderError::Absent(path.to_owned()),
        _ => FolderError::Io { path: path.to_owned(), doing: "read", error },
    };
    // A link could lead to a file whose folders are not those that are checked here; opening a pipe would wait.
    let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let opened = OpenOptions::new().read(true).custom_flags(flags.bits().cast_signed()).open(path);
    let file = match opened {
        Err(error) if error.raw_os_error() == Some(rustix::io::Errno::LOOP.raw_os_error()) => {
            return Err(FolderError::Odd { path: path.to_owned(), why: "it is a symbolic link" });
        }
        opened => opened.map_err(failed)?,
    };
    let facts = file.metadata().map_err(failed)?;
    if !facts.is_file() {
        return Err(FolderError::Odd { path: path.to_owned(), why: "it is not a regular file" });
    }
    if facts.len() > LAYOUT_BYTES_MAX {
        return Err(FolderError::Odd { path: path.to_owned(), why: "it has more than 64 KiB" });
    }
    is_ours(path, &facts)?;
    folders_are_ours(path)?;
    let mut text = String::new();
    file.take(LAYOUT_BYTES_MAX).read_to_string(&mut text).map_err(failed)?;
    Ok(text)
}

/// Owner and mode.
fn is_ours(path: &Path, facts: &Metadata) -> Result<(), FolderError> {
    let not = |why| Err(FolderError::NotOurs { path: path.to_owned(), why });
    if facts.uid() != 0 && facts.uid() != geteuid().as_raw() {
        return not(format!("it belongs to the user {}", facts.uid()));
    }
    // In a folder like /tmp nobody removes or renames what others have there.
    let is_sticky = facts.is_dir() && facts.mode() & STICKY != 0;
    if facts.mode() & OTHERS_WRITE != 0 && !is_sticky {
        return not(format!("others may write it (mode {:04o})", facts.mode() & 0o7777));
    }
    Ok(())
}

const OTHERS_WRITE: u32 = 0o022;
const STICKY: u32 = 0o1000;

/// The folders above a path, each with its links resolved.
fn folders_are_ours(path: &Path) -> Result<(), FolderError> {
    let folder = path.parent().unwrap_or(Path::new("/"));
    let failed = |path: &Path, error| FolderError::Io { path: path.to_owned(), doing: "read", error };
    let real = fs::canonicalize(folder).map_err(|error| failed(folder, error))?;
    for folder in real.ancestors() {
        let facts = fs::symlink_metadata(folder).map_err(|error| failed(folder, error))?;
        is_ours(folder, &facts)?;
    }
    Ok(())
}

/// Keeps a layout, in place of an earlier one, and removes the mark of the build. The folder is created if it does not
/// exist.
///
/// # Errors
/// [`FolderError`].
pub fn keep(folder: &Path, build: &Build, text: &str) -> Result<PathBuf, FolderError> {
    let path = file(folder, build);
    let failed = |path: &Path| {
        let path = path.to_owned();
        move |error| FolderError::Io { path, doing: "written", error }
    };
    fs::DirBuilder::new().recursive(true).mode(0o755).create(folder).map_err(failed(folder))?;
    folders_are_ours(&path)?;
    let mut new = tempfile::Builder::new()
        .prefix(".new-")
        .permissions(std::os::unix::fs::PermissionsExt::from_mode(0o644))
        .tempfile_in(folder)
        .map_err(failed(folder))?;
    new.write_all(text.as_bytes()).and_then(|()| new.as_file().sync_all()).map_err(failed(&path))?;
    // A strict umask would keep the server's user from reading it.
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o644);
    new.as_file().set_permissions(mode).map_err(failed(&path))?;
    new.persist(&path).map_err(|error| failed(&path)(error.error))?;
    match fs::remove_file(mark_file(folder, build)) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(failed(&mark_file(folder, build))(error))?,
        _ => {}
    }
    // The names are on the disk before anybody relies on them.
    File::open(folder).and_then(|folder| folder.sync_all()).map_err(failed(folder))?;
    Ok(path)
}

// Marks: builds that are not tried again.

fn mark_file(folder: &Path, build: &Build) -> PathBuf {
    folder.join(format!("{build}.refused"))
}

/// Marks a build as one that failed. A build that has a mark keeps it.
///
/// # Errors
/// The mark cannot be written: the folder may belong to root alone.
pub fn mark(folder: &Path, build: &Build, reason: &str) -> Result<PathBuf, FolderError> {
    let path = mark_file(folder, build);
    let failed = |error| FolderError::Io { path: path.clone(), doing: "written", error };
    let letters = reason.chars().take(REASON_LETTERS_MAX);
    let reason: String = letters.map(|letter| if letter.is_control() { ' ' } else { letter }).collect();
    match OpenOptions::new().write(true).create_new(true).mode(0o644).open(&path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        Err(error) => return Err(failed(error)),
        Ok(mut file) => writeln!(file, "{reason}").and_then(|()| file.sync_all()).map_err(failed)?,
    }
    Ok(path)
}

/// Why a build is marked. `None`: it is not.
pub fn marked(folder: &Path, build: &Build) -> Option<String> {
    let mut text = Vec::new();
    match File::open(mark_file(folder, build)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return None,
        // A mark that cannot be read is one.
        Err(error) => return Some(format!("its mark cannot be read: {error}")),
        Ok(file) => {
            let _ = file.take(4 * REASON_LETTERS_MAX as u64).read_to_end(&mut text);
        }
    }
    Some(String::from_utf8_lossy(&text).trim().to_owned())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::os::unix::fs::{PermissionsExt, chown, symlink};

    use super::*;

    fn build() -> Build {
        Build::parse("build-id-a50d6825e71f1473372299161f75fe50e80452de").unwrap()
    }

    fn set_mode(path: &Path, mode: u32) {
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    }

    #[test]
    fn what_is_kept_is_read_and_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let below = folder.path().join("a/b");
        assert!(matches!(read(&file(&below, &build())), Err(FolderError::Absent(_))));
        let path = keep(&below, &build(), "one").unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o7777, 0o644);
        assert_eq!(read(&path).unwrap(), "one");
        keep(&below, &build(), "two").unwrap();
        assert_eq!(read(&path).unwrap(), "two");
        assert_eq!(fs::read_dir(&below).unwrap().count(), 1);
    }

    #[test]
    fn a_file_that_others_can_change_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = keep(folder.path(), &build(), "text").unwrap();
        let refused = |why: &str| {
            let error = read(&path).unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
        };
        for mode in [0o666, 0o664, 0o646] {
            set_mode(&path, mode);
            refused(&format!("others may write it (mode {mode:04o})"));
        }
        set_mode(&path, 0o644);
        set_mode(folder.path(), 0o777);
        refused("others may write it (mode 0777)");
        assert!(matches!(keep(folder.path(), &build(), "text"), Err(FolderError::NotOurs { .. })));
        set_mode(folder.path(), 0o1777);
        assert_eq!(read(&path).unwrap(), "text");
        if geteuid().is_root() {
            chown(&path, Some(12345), None).unwrap();
            refused("it belongs to the user 12345");
        }
    }

    #[test]
    fn links_pipes_folders_and_large_files_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = file(folder.path(), &build());
        let refused = |why: &str| {
            let error = read(&path).unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
            if path.is_dir() { fs::remove_dir(&path).unwrap() } else { fs::remove_file(&path).unwrap() }
        };
        symlink("/etc/passwd", &path).unwrap();
        refused("a symbolic link");
        fs::create_dir(&path).unwrap();
        refused("not a regular file");
        rustix::fs::mknodat(rustix::fs::CWD, &path, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
        refused("not a regular file");
        fs::write(&path, vec![b'#'; LAYOUT_BYTES_MAX as usize + 1]).unwrap();
        refused("64 KiB");
        fs::write(&path, [0xFF, 0xFE]).unwrap();
        refused("cannot be read");
    }

    #[test]
    fn a_mark_stays_until_the_layout_is_found_anew() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(marked(folder.path(), &build()), None);
        let long = format!("a reason\nof {}", "é".repeat(REASON_LETTERS_MAX));
        mark(folder.path(), &build(), &long).unwrap();
        mark(folder.path(), &build(), "another").unwrap();
        assert!(marked(folder.path(), &build()).unwrap().starts_with("a reason of é"));
        keep(folder.path(), &build(), "text").unwrap();
        assert_eq!(marked(folder.path(), &build()), None);
        assert!(mark(&folder.path().join("none"), &build(), "x").is_err());
    }
}
