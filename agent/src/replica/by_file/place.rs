//! Place: where a server on this host has its RDB file. It is proved, before anything is touched, that the server and
//! the agent mean the same file.
//!
//! The server tells its process id, which is a number in its own container. So the other end of the agent's connection
//! must be among the open files of that process here. The server works in its `dir`: that folder must be the one that
//! the agent finds under the same name.

use std::fs;
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{Gid, Mode, Uid};

use crate::exit::Failure;
use crate::replica::preflight::path_of;
use crate::replica::unread;
use crate::server::{Client, Facts};

/// The mode of a file that was not there before.
const MODE: Mode = Mode::RUSR.union(Mode::WUSR);

/// What is added to the name of the file that was there before.
const FORMER: &str = ".before-remora";

/// A server's RDB file, and its owner.
#[derive(Clone, Debug)]
pub(super) struct Place {
    pub(super) file: PathBuf,
    /// The server's user and group, if the agent's are others.
    pub(super) owner: Option<(Uid, Gid)>,
    pub(super) mode: Mode,
}

impl Place {
    /// Finds it.
    ///
    /// # Errors
    /// It cannot be shown that the server runs on this host and that its folder is here.
    pub(super) async fn find(client: &mut Client, facts: &Facts) -> Result<Place, Failure> {
        let url = client.server().url().to_string();
        let elsewhere = |why: String| {
            Failure::refused(format!(
                "it cannot be shown that the server {url} runs on this host and has its file here: {why}. For --delivery file \
                 the agent runs beside the server, as root or as the server's user; where the server runs in a container, use \
                 remora fetch before it starts"
            ))
        };
        let process = facts.process_id.ok_or_else(|| elsewhere("it does not tell its process id".into()))?;
        is_at_the_other_end(client, process).map_err(&elsewhere)?;
        let unknown = |name: &str| Failure::refused(format!("the server {url} does not tell its setting {name}"));
        let folder = client.config_bytes("dir").await?.ok_or_else(|| unknown("dir"))?;
        let name = client.config_bytes("dbfilename").await?.ok_or_else(|| unknown("dbfilename"))?;
        let (folder, name) = (path_of(folder), path_of(name));
        is_same_folder(process, &folder).map_err(&elsewhere)?;
        let owner = owner_of(process).map_err(|error| elsewhere(format!("its user is not known: {error}")))?;
        let file = folder.join(name);
        let present = fs::symlink_metadata(&file).ok();
        let mode = present.map_or(MODE, |about| Mode::from_raw_mode(about.permissions().mode() & 0o777));
        let us = rustix::process::geteuid();
        if owner.0 != us && !us.is_root() {
            return Err(elsewhere(format!("it runs as user {}, and this agent as {}", owner.0.as_raw(), us.as_raw())));
        }
        Ok(Place { file, owner: (owner.0 != us).then_some(owner), mode })
    }

    /// Keeps the file that is there under another name as well, unless it is `ours`. Returns that name; `None` if there
    /// is no such file.
    ///
    /// # Errors
    /// The name cannot be given.
    pub(super) fn keep_the_former(&self, ours: Option<u64>) -> Result<Option<PathBuf>, Failure> {
        let mut name = self.file.file_name().unwrap_or_default().to_owned();
        name.push(FORMER);
        let former = self.file.with_file_name(name);
        let failed = |error: io::Error| {
            let (file, former) = (self.file.display(), former.display());
            Failure::local(format!("{file} cannot be kept as {former}: {error}; nothing was put in its place"))
        };
        match inode(&self.file) {
            // A delivery before this one has kept the file.
            Some(inode) if Some(inode) == ours => return Ok(former.exists().then_some(former)),
            None => return Ok(None),
            Some(_) => {}
        }
        match fs::remove_file(&former) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(failed(error)),
            _ => {}
        }
        // A second name: the file is never without its own one.
        match fs::hard_link(&self.file, &former) {
            Ok(()) => Ok(Some(former)),
            Err(_) => fs::copy(&self.file, &former).map(|_| Some(former.clone())).map_err(failed),
        }
    }
}

/// A file's number in its file system; `None` if it is not there.
pub(super) fn inode(file: &Path) -> Option<u64> {
    fs::symlink_metadata(file).ok().map(|about| about.ino())
}

/// Whether this process has the other end of the connection. The error says why that is not known.
fn is_at_the_other_end(client: &Client, process: u32) -> Result<(), String> {
    let another = || format!("its process {process} is another one here (a container, or a proxy in between?)");
    let (Some(here), Some(there)) = (client.local_addr(), client.peer_addr()) else {
        return match client.peer_process() {
            Some(other) if other == process => Ok(()),
            _ => Err(another()),
        };
    };
    let socket = unread::inode(there, here);
    let socket = socket.map_err(|_| format!("the connection to {there} does not end on this host"))?;
    let socket = format!("socket:[{socket}]");
    let folder = format!("/proc/{process}/fd");
    let files = fs::read_dir(&folder).map_err(|error| format!("{folder} cannot be read: {error}"))?;
    let is_it = |file: fs::DirEntry| fs::read_link(file.path()).is_ok_and(|to| to.as_os_str() == socket.as_str());
    match files.flatten().any(is_it) {
        true => Ok(()),
        false => Err(another()),
    }
}

/// Whether the folder in which this process works is the one that has this name here.
fn is_same_folder(process: u32, folder: &Path) -> Result<(), String> {
    let name = folder.display();
    let works_in = fs::metadata(format!("/proc/{process}/cwd"))
        .map_err(|error| format!("the folder of its process {process} cannot be seen: {error}"))?;
    let here = fs::metadata(folder).map_err(|error| format!("its folder {name} cannot be seen: {error}"))?;
    match (works_in.dev(), works_in.ino()) == (here.dev(), here.ino()) {
        true => Ok(()),
        false => Err(format!("its folder {name} is another one here")),
    }
}

/// The user and the group as which this process makes files.
fn owner_of(process: u32) -> io::Result<(Uid, Gid)> {
    let status = fs::read_to_string(format!("/proc/{process}/status"))?;
    // Real, effective, saved, and that of the file system.
    let number = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name))?;
        line.split_whitespace().nth(3)?.parse::<u32>().ok()
    };
    match (number("Uid:"), number("Gid:")) {
        (Some(user), Some(group)) => Ok((Uid::from_raw(user), Gid::from_raw(group))),
        _ => Err(io::ErrorKind::InvalidData.into()),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn this_process_works_in_its_folder_and_belongs_to_its_user() {
        let us = std::process::id();
        assert!(is_same_folder(us, &std::env::current_dir().unwrap()).is_ok());
        let other = tempfile::tempdir().unwrap();
        assert!(is_same_folder(us, other.path()).unwrap_err().contains("another one here"));
        assert!(is_same_folder(us, Path::new("/nowhere")).is_err());
        assert_eq!(owner_of(us).unwrap().0, rustix::process::geteuid());
    }

    #[test]
    fn the_former_file_is_kept_and_our_own_is_not_taken_for_it() {
        let folder = tempfile::tempdir().unwrap();
        let place = Place { file: folder.path().join("dump.rdb"), owner: None, mode: MODE };
        assert_eq!(place.keep_the_former(None).unwrap(), None, "there is none");
        fs::write(&place.file, "old").unwrap();
        let former = place.keep_the_former(None).unwrap().unwrap();
        assert_eq!(former, folder.path().join("dump.rdb.before-remora"));
        assert_eq!((fs::read(&former).unwrap(), fs::read(&place.file).unwrap()), (b"old".to_vec(), b"old".to_vec()));
        // The next agent, after ours was put in place.
        let fresh = folder.path().join("fresh");
        fs::write(&fresh, "ours").unwrap();
        fs::rename(&fresh, &place.file).unwrap();
        assert_eq!(place.keep_the_former(inode(&place.file)).unwrap(), Some(former.clone()));
        assert_eq!(fs::read(&former).unwrap(), b"old");
        assert_eq!(place.keep_the_former(None).unwrap(), Some(former.clone()), "the server's own again");
        assert_eq!(fs::read(&former).unwrap(), b"ours");
    }
}
