//! The folder for sockets that only this user's processes may reach, and the modes of sockets.

use std::{
    fs::{DirBuilder, Metadata},
    io,
    os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt},
    path::{Path, PathBuf},
};

use rustix::fs::{AtFlags, CWD, Gid, Mode};

use crate::Error;

/// The folders in which a socket may be bound, best first: those that exist, or could be created, and that no stranger
/// can change.
///
/// # Errors
/// [`Error::System`] if no folder can be used. The error names each folder and says why it was rejected.
pub(crate) fn private_folders() -> Result<Vec<PathBuf>, Error> {
    let mut rejected = Vec::new();
    let mut usable = Vec::new();
    for folder in candidates() {
        match prepare(&folder) {
            Ok(()) => usable.push(folder),
            Err(error) => rejected.push(format!("{}: {error}", folder.display())),
        }
    }
    if usable.is_empty() {
        let text = format!("{} (set XDG_RUNTIME_DIR to a folder of this user)", rejected.join("; "));
        return Err(Error::system("looking for a folder for a local socket")(io::Error::other(text)));
    }
    Ok(usable)
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
