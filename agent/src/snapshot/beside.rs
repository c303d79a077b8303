//! Beside: files that get their name when they are whole, on the disk, and have the right owner and mode.

use std::fs::File;
use std::io::{self, Write};
use std::path::Path;

use rustix::fs::{Gid, Mode, RenameFlags, Uid};
use rustix::io::Errno;

use crate::exit::Failure;

/// How a file is put in its place.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Placing {
    pub(crate) owner: Option<(Uid, Gid)>,
    pub(crate) mode: Mode,
    /// A file that is there already goes.
    pub(crate) replaces: bool,
}

/// Writes a short file. Readers see the file of before, or all of the new one.
///
/// # Errors
/// The file cannot be written, or [`put`].
pub(crate) fn write(to: &Path, bytes: &[u8], how: &Placing) -> Result<(), Failure> {
    let failed = |error: io::Error| Failure::local(format!("{} cannot be written: {error}", to.display()));
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
pub(crate) fn put(file: &File, from: &Path, to: &Path, how: &Placing) -> Result<(), Failure> {
    let name = to.display();
    let failed = |what: &str, error: io::Error| Failure::local(format!("{name}: {what}: {error}"));
    if let Some((user, group)) = how.owner {
        let given = rustix::fs::fchown(file, Some(user), Some(group));
        given.map_err(|errno| failed("it cannot be given to that --owner", errno.into()))?;
    }
    let given = rustix::fs::fchmod(file, how.mode).and_then(|()| rustix::fs::fsync(file));
    given.map_err(|errno| failed("it cannot be given that --mode", errno.into()))?;
    let flags = if how.replaces { RenameFlags::empty() } else { RenameFlags::NOREPLACE };
    match rustix::fs::renameat_with(rustix::fs::CWD, from, rustix::fs::CWD, to, flags) {
        Err(Errno::EXIST) => return Err(Failure::refused(format!("{name} exists by now; replace it by --replace"))),
        named => named.map_err(|errno| failed("it cannot be given its name", errno.into()))?,
    }
    let synced = File::open(folder_of(to)).and_then(|folder| folder.sync_all());
    synced.map_err(|error| failed("its name may not outlive a power cut", error))
}

fn folder_of(file: &Path) -> &Path {
    file.parent().filter(|path| !path.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn a_file_is_written_as_a_whole_and_leaves_nothing_beside_it() {
        let folder = tempfile::tempdir().unwrap();
        let to = folder.path().join("file");
        let how = |replaces| Placing { owner: None, mode: Mode::from_raw_mode(0o640), replaces };
        write(&to, b"first", &how(false)).unwrap();
        let error = write(&to, b"second", &how(false)).unwrap_err();
        assert!(error.message.contains("--replace"), "{error}");
        assert_eq!(std::fs::read(&to).unwrap(), b"first");
        write(&to, b"second", &how(true)).unwrap();
        assert_eq!(std::fs::read(&to).unwrap(), b"second");
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
        assert!(write(Path::new("/nowhere/file"), b"", &how(true)).is_err());
    }
}
