//! The folder for sockets that only this user's processes may reach, and the modes of sockets.

use std::{
    fs::{DirBuilder, Metadata},
    io,
    os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt},
    path::{Path, PathBuf},
};

use rustix::fs::{AtFlags, CWD, Gid, Mode};

use crate::Error;

/// Calls `bind` with the first folder in which a socket may be bound: one that exists, or could be created, and that no
/// stranger can change. If `bind` fails there, the next folder is tried. No folder is created after the one that is
/// used.
///
/// # Errors
/// [`Error::System`] if no folder can be used. The error names each folder and says why it was rejected.
pub(crate) fn in_private_folder<T>(bind: impl FnMut(&Path) -> Result<T, Error>) -> Result<T, Error> {
    in_first_of(candidates(), bind)
}

fn in_first_of<T>(folders: Vec<PathBuf>, mut bind: impl FnMut(&Path) -> Result<T, Error>) -> Result<T, Error> {
    let mut rejected = Vec::new();
    for folder in folders {
        let why = match prepare(&folder).map(|()| bind(&folder)) {
            Ok(Ok(bound)) => return Ok(bound),
            Ok(Err(error)) => error.to_string(),
            Err(error) => error.to_string(),
        };
        rejected.push(format!("{}: {why}", folder.display()));
    }
    let text = format!("{} (set XDG_RUNTIME_DIR to a folder of this user)", rejected.join("; "));
    Err(Error::system("looking for a folder for a local socket")(io::Error::other(text)))
}

fn candidates() -> Vec<PathBuf> {
    let runtime = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from).filter(|folder| folder.is_absolute());
    let user = rustix::process::geteuid().as_raw();
    let temporary = std::env::temp_dir().join(format!("remora-{user}"));
    runtime.map(|folder| folder.join("remora")).into_iter().chain(["/run/remora".into(), temporary]).collect()
}

/// Creates the folder, or checks an existing one.
fn prepare(folder: &Path) -> io::Result<()> {
    match DirBuilder::new().mode(FOLDER_MODE).create(folder) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    // Does not follow a symbolic link.
    let about = folder.symlink_metadata()?;
    if !about.is_dir() {
        return Err(io::Error::other("it is not a folder"));
    }
    let us = rustix::process::geteuid().as_raw();
    if about.uid() != us && about.uid() != ROOT {
        return Err(io::Error::other(format!("it belongs to the user {}", about.uid())));
    }
    if about.mode() & 0o002 != 0 {
        return Err(io::Error::other("every user can write to it"));
    }
    Ok(())
}

/// Gives the socket at `path` its mode: 0600, or 0660 in a folder that its group may enter and others may not. Returns
/// whether the group may connect.
///
/// # Errors
/// [`Error::System`].
pub(crate) fn restrict(path: &Path) -> Result<bool, Error> {
    let group = path.parent().and_then(|folder| folder.metadata().ok()).and_then(|about| group(&about));
    let to_group = group.is_some_and(|group| {
        let group = Some(Gid::from_raw(group));
        rustix::fs::chownat(CWD, path, None, group, AtFlags::SYMLINK_NOFOLLOW).is_ok()
    });
    let mode = if to_group { Mode::RUSR | Mode::WUSR | Mode::RGRP | Mode::WGRP } else { Mode::RUSR | Mode::WUSR };
    rustix::fs::chmodat(CWD, path, mode, AtFlags::empty())
        .map_err(Error::system("setting the mode of a local socket"))?;
    Ok(to_group)
}

/// The group that may enter a folder which is closed to other users.
fn group(folder: &Metadata) -> Option<u32> {
    let mode = folder.permissions().mode();
    (mode & 0o010 != 0 && mode & 0o007 == 0).then(|| folder.gid())
}

/// Mode of a folder that this process creates.
const FOLDER_MODE: u32 = 0o700;
/// The user id of root.
const ROOT: u32 = 0;

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    fn never(folder: &Path) -> Result<(), Error> {
        Err(Error::system("binding")(io::Error::other(format!("no room in {}", folder.display()))))
    }

    #[test]
    fn only_the_folder_that_is_used_is_created() {
        let home = tempfile::tempdir().unwrap();
        let folders: Vec<PathBuf> = ["a", "b", "c"].map(|name| home.path().join(name)).into();
        std::fs::write(&folders[0], "a file where the best folder would be").unwrap();
        let used = in_first_of(folders.clone(), |folder| Ok(folder.to_owned())).unwrap();
        assert_eq!(used, folders[1]);
        assert_eq!(used.metadata().unwrap().mode() & 0o777, FOLDER_MODE);
        assert!(!folders[2].exists(), "a folder was created that is not used");
    }

    #[test]
    fn a_folder_in_which_no_socket_can_be_bound_is_passed_over_and_named_if_it_was_the_last() {
        let home = tempfile::tempdir().unwrap();
        let folders: Vec<PathBuf> = ["a", "b"].map(|name| home.path().join(name)).into();
        let pick = |folder: &Path| if folder.ends_with("a") { never(folder) } else { Ok(()) };
        in_first_of(folders.clone(), pick).unwrap();
        let refused = in_first_of(folders.clone(), never).unwrap_err();
        let text = format!("{refused} {:?}", std::error::Error::source(&refused));
        assert!(folders.iter().all(|folder| text.contains(&format!("no room in {}", folder.display()))), "{text}");
    }
}
