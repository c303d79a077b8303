//! The server's RDB file: where it is on this host, and whether the server would load it and go on from there.

use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::{fs, io};

use remora_protocol::Offer;
use rustix::fs::{Gid, Mode, Uid};

use crate::link;
use crate::options::Options;
use crate::preflight::{Primary, path_of};
use remora_process::exit::Failure;
use remora_server::{Client, Configuration, Facts, Role};

// Place: where a server on this host has its RDB file. It is proved, before anything is touched, that the server and
// the agent mean the same file.
//
// The server tells its process id, which is a number in its own container. So the other end of the agent's connection
// must be among the open files of that process here. The server works in its `dir`: that folder must be the one that
// the agent finds under the same name.

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
    let socket = link::inode(there, here);
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

// Fitness: whether a server that is restarted on a file loads it, and goes on from there as a replica.
//
// Both servers decide that in `loadDataFromDisk` and `primaryTryPartialResynchronization`: no AOF, a replica while it
// loads, and a primary whose backlog reaches back. The last is asked by the fetch. What the restart command itself
// adds to the command line cannot be seen from here.

/// Refuses a server that would not.
pub(super) async fn refuse_what_would_not_load(
    options: &Options,
    client: &mut Client,
    facts: &Facts,
    primary: &Primary,
    plan: &Offer,
) -> Result<(), Failure> {
    let url = client.server().url().to_string();
    if client.config_get("appendonly").await?.as_deref() == Some("yes") {
        return Err(Failure::refused(aof(&format!("the server {url}"))));
    }
    let followed = match &facts.link {
        Some(link) if facts.role == Some(Role::Replica) => primary.is_at(&link.host, link.port, plan).await,
        _ => false,
    };
    if facts.cluster_enabled == Some(true) {
        return cluster(client, options, followed, primary).await;
    }
    let file = client.info("server").await?.get("config_file").map(PathBuf::from).unwrap_or_default();
    let configuration = match file.as_os_str().is_empty() {
        true => Configuration::default(),
        false => Configuration::read(&file).map_err(|error| {
            Failure::refused(format!(
                "the configuration file {} of the server {url} cannot be read: {error}; what the server follows after a restart \
                 is not known",
                file.display()
            ))
        })?,
    };
    if configuration.is_yes("appendonly") {
        return Err(Failure::refused(aof(&file.display().to_string())));
    }
    check_the_place(client, &configuration, &file).await?;
    check_the_modules(&configuration, &file, primary)?;
    check_the_primary(options, &configuration, &file, followed, primary, plan).await
}

fn aof(who: &str) -> String {
    format!(
        "{who} has appendonly yes: after a restart the server would load its AOF, or nothing, and not an RDB file. Set appendonly \
         no there (and CONFIG SET appendonly yes when the server is in step), or use --delivery link or intercept"
    )
}

/// The primary that the server follows after its restart must be the right one.
async fn check_the_primary(
    options: &Options,
    configuration: &Configuration,
    file: &Path,
    followed: bool,
    primary: &Primary,
    plan: &Offer,
) -> Result<(), Failure> {
    let right = format!("{}:{}", primary.host, primary.port);
    if options.rewrite_config && !followed {
        return Err(Failure::refused(format!(
            "--rewrite-config would not write the primary {right}, which the server does not follow: use --write-replicaof with a \
             file that its configuration includes"
        )));
    }
    if options.rewrite_config {
        return Ok(());
    }
    if let Some(written) = &options.delivery.write_replicaof {
        let path = std::path::absolute(written).unwrap_or_else(|_| written.clone());
        if !configuration.includes(&path) {
            tracing::warn!(
                "the server's configuration file ({}) does not include {}: the restart command must name it (--include)",
                file.display(),
                path.display()
            );
        }
        return Ok(());
    }
    let advice = "--rewrite-config writes it for a server that follows its primary already; --write-replicaof FILE is for a file \
                  that the configuration includes";
    match configuration.primary() {
        Some((host, port)) if primary.is_at(host, port, plan).await => Ok(()),
        Some((host, port)) => Err(Failure::refused(format!(
            "{} has replicaof {host} {port}, and the source's primary is {right}: correct it, or {advice}",
            file.display()
        ))),
        None if !configuration.unread().is_empty() => {
            tracing::warn!(
                "{} has no replicaof, unless it is in one of {}, which were not read: without it the server would be a primary \
                 after its restart",
                file.display(),
                configuration.unread().join(", ")
            );
            Ok(())
        }
        None => {
            let who = match file.as_os_str().is_empty() {
                true => "the server has no configuration file".to_owned(),
                false => format!("{} has no replicaof", file.display()),
            };
            Err(Failure::refused(format!(
                "{who}: after a restart the server would be a primary with the data of the file, and not a replica of {right}; {advice}"
            )))
        }
    }
}

/// The file must be where the server looks for it after its restart.
async fn check_the_place(client: &mut Client, configuration: &Configuration, file: &Path) -> Result<(), Failure> {
    for name in ["dir", "dbfilename"] {
        let (now, then) = (client.config_get(name).await?, configuration.last(name).and_then(<[String]>::first));
        let (Some(now), Some(then)) = (now, then) else { continue };
        // A relative folder is relative to where the server was started.
        let is_known = name != "dir" || Path::new(then).is_absolute();
        let same = |one: &str, other: &str| match (std::fs::canonicalize(one), std::fs::canonicalize(other)) {
            (Ok(one), Ok(other)) => one == other,
            _ => one == other,
        };
        if is_known && !same(&now, then) {
            return Err(Failure::refused(format!(
                "the server has {name} {now}, and {} has {then}, where it would look for its file after a restart: make them the \
                 same",
                file.display()
            )));
        }
    }
    Ok(())
}

/// A module that was loaded by a command is not there after the restart, and its data would end the server.
fn check_the_modules(configuration: &Configuration, file: &Path, primary: &Primary) -> Result<(), Failure> {
    if !primary.has_modules_with_data() || configuration.last("loadmodule").is_some() {
        return Ok(());
    }
    Err(Failure::refused(format!(
        "the primary has modules that may have data, and {} has no loadmodule: after a restart the server could not load the file; \
         load its modules there",
        file.display()
    )))
}

/// A node of a cluster keeps what it follows in a file of its own.
async fn cluster(client: &mut Client, options: &Options, followed: bool, primary: &Primary) -> Result<(), Failure> {
    let url = client.server().url().to_string();
    if options.delivery.write_replicaof.is_some() {
        return Err(Failure::refused(format!(
            "the server {url} runs in cluster mode, where a configuration with replicaof does not start: omit --write-replicaof"
        )));
    }
    if !followed {
        return Err(Failure::refused(format!(
            "the node {url} does not follow the source's primary {}:{}, so it would take the slots of the file's keys for its own \
             after a restart: CLUSTER REPLICATE comes first",
            primary.host, primary.port
        )));
    }
    let databases = client.config_get("cluster-databases").await?.and_then(|count| count.parse::<u32>().ok());
    match databases {
        Some(2..) => Err(Failure::refused(format!(
            "the node {url} has several databases (cluster-databases): a node that starts on a file can take the stream for \
             database 0; use --delivery intercept"
        ))),
        _ => Ok(()),
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
