//! Laid: the files of a backup in a server's folder. They are copied beside, brought to the disk, and get their name
//! last.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use remora_redis::aof::Manifest;
use rustix::fs::RenameFlags;

use super::super::manifest::Kind;
use super::commands::Commands;
use super::found::{AofFolder, FOLDER, Found, LIST_SUFFIX, folders_in};
use crate::exit::Failure;
use crate::free_space;
use crate::server::local;
use crate::snapshot::beside;
use crate::snapshot::fetch::PRIVATE;

/// The servers' default name of an RDB file (`dbfilename`).
const SNAPSHOT: &str = "dump.rdb";

/// What files and folders are called that have no name yet.
pub(super) const BESIDE: &str = ".remora-restore";

/// How files are laid out.
#[derive(Clone, Copy, Debug)]
pub(super) struct How {
    /// What is there already goes.
    pub(super) replaces: bool,
    /// The files of the backup are on the same file system, and of no further use.
    pub(super) moves: bool,
}

fn failed(path: &Path) -> impl Fn(io::Error) -> Failure {
    let path = path.display().to_string();
    move |error| Failure::local(format!("{path} cannot be written: {error}"))
}

/// Refuses a folder that has data already, before a long check.
///
/// # Errors
/// It has.
pub(super) fn refuse_what_is_there(folder: &Path, kind: Kind) -> Result<(), Failure> {
    let to = folder.join(if kind == Kind::Snapshot { SNAPSHOT } else { FOLDER });
    if to.symlink_metadata().is_ok() { Err(exists(&to)) } else { Ok(()) }
}

fn exists(to: &Path) -> Failure {
    Failure::refused(format!("{} exists; replace it by --replace, while its server is stopped", to.display()))
}

/// Refuses the folder of a server that runs, and one whose server would load other files than those laid out.
///
/// # Errors
/// It is such a folder.
pub(super) fn refuse_a_folder_in_use(folder: &Path) -> Result<(), Failure> {
    if let Some(process) = local::process_in(folder) {
        return Err(Failure::refused(format!(
            "{process} runs in {}, and would write its own data over the backup when it saves or ends: stop it first",
            folder.display()
        )));
    }
    let other = folders_in(folder).into_iter().find(|path| {
        path.file_name().is_some_and(|name| name != FOLDER && !name.as_encoded_bytes().starts_with(BESIDE.as_bytes()))
            && !matches!(AofFolder::at(path), Ok(None))
    });
    match other {
        Some(other) => Err(Failure::refused(format!(
            "{} is the append-only file of a server whose appenddirname is not {FOLDER}, and such a server would load it in place of \
             the backup: move it away, and start the server with the settings that this command names",
            other.display()
        ))),
        None => Ok(()),
    }
}

/// The settings with which a server loads the files of this backup. Each has a default that another server may have
/// changed.
pub(super) fn settings(found: &Found) -> BTreeMap<&'static str, String> {
    match found {
        Found::Snapshot(_) => BTreeMap::from([("appendonly", "no".to_owned()), ("dbfilename", SNAPSHOT.to_owned())]),
        Found::Folder(folder) => {
            let name = folder.list.strip_suffix(LIST_SUFFIX).unwrap_or(&folder.list).to_owned();
            BTreeMap::from([
                ("appendonly", "yes".to_owned()),
                ("appenddirname", FOLDER.to_owned()),
                ("appendfilename", name),
            ])
        }
    }
}

/// Lays an RDB file out.
///
/// # Errors
/// It cannot be written, or there is one and it is not to be replaced.
pub(super) fn snapshot(from: &Path, folder: &Path, how: How) -> Result<PathBuf, Failure> {
    let to = folder.join(SNAPSHOT);
    fs::create_dir_all(folder).map_err(failed(folder))?;
    let placing = beside::Placing { replaces: how.replaces, ..PRIVATE };
    if how.moves {
        let file = File::open(from).map_err(failed(&to))?;
        beside::put(&file, from, &to, &placing)?;
        return Ok(to);
    }
    free_space::check_copies(SNAPSHOT, from, folder, from.metadata().map_or(0, |found| found.len()))?;
    let beside = tempfile::Builder::new().prefix(BESIDE).tempfile_in(folder).map_err(failed(&to))?;
    let (mut file, fresh) = beside.into_parts();
    File::open(from).and_then(|mut from| io::copy(&mut from, &mut file)).map_err(failed(&to))?;
    beside::put(&file, &fresh, &to, &placing)?;
    _ = fresh.keep(); // it has another name by now
    Ok(to)
}

/// Lays the files of an append-only file out, the last one up to where it is cut.
///
/// # Errors
/// They cannot be written, or there are some and they are not to be replaced.
pub(super) fn folder(
    from: &AofFolder,
    commands: Option<&Commands>,
    folder: &Path,
    how: How,
) -> Result<PathBuf, Failure> {
    let to = folder.join(FOLDER);
    fs::create_dir_all(folder).map_err(failed(folder))?;
    let beside = tempfile::Builder::new().prefix(BESIDE).tempdir_in(folder).map_err(failed(&to))?;
    let inner = beside.path().join(FOLDER);
    fs::DirBuilder::new().mode(0o700).create(&inner).map_err(failed(&inner))?;
    let mut files = from.manifest.files.clone();
    let last_bytes = commands.map_or(u64::MAX, |commands| commands.last_bytes);
    files.truncate(commands.map_or(usize::MAX, |commands| commands.files));
    if last_bytes == 0 && files.len() > 1 {
        files.pop();
    }
    if !how.moves {
        let length = |name: &str| from.path.join(name).metadata().map_or(0, |found| found.len());
        let last = files.last().map_or(0, |file| length(&file.name).saturating_sub(last_bytes));
        let all: u64 = files.iter().map(|file| length(&file.name)).sum();
        free_space::check_copies(FOLDER, &from.path, folder, all.saturating_sub(last))?;
    }
    for (number, file) in files.iter().enumerate() {
        // The last one that was read is used up to there. One that is not copied was empty.
        let is_cut = commands.is_some_and(|commands| commands.files == number + 1);
        let path = inner.join(&file.name);
        let bytes = if is_cut { last_bytes } else { u64::MAX };
        let lay = if how.moves { cut_and_move } else { copy };
        lay(&from.path.join(&file.name), &path, bytes).map_err(failed(&path))?;
    }
    let list = Manifest { files }.to_string();
    beside::write(&inner.join(&from.list), list.as_bytes(), &PRIVATE)?;
    let flags =
        if how.replaces && to.symlink_metadata().is_ok() { RenameFlags::EXCHANGE } else { RenameFlags::NOREPLACE };
    match rustix::fs::renameat_with(rustix::fs::CWD, &inner, rustix::fs::CWD, &to, flags) {
        Err(rustix::io::Errno::EXIST) => return Err(exists(&to)),
        renamed => renamed.map_err(|errno| failed(&to)(errno.into()))?,
    }
    File::open(folder).and_then(|folder| folder.sync_all()).map_err(failed(&to))?;
    // What was replaced goes with the folder beside.
    Ok(to)
}

fn copy(from: &Path, to: &Path, bytes: u64) -> io::Result<()> {
    let mut file = File::options().write(true).create_new(true).open(to)?;
    io::copy(&mut File::open(from)?.take(bytes), &mut file)?;
    rustix::fs::fchmod(&file, PRIVATE.mode)?;
    file.sync_all()
}

fn cut_and_move(from: &Path, to: &Path, bytes: u64) -> io::Result<()> {
    let file = File::options().write(true).open(from)?;
    if file.metadata()?.len() > bytes {
        file.set_len(bytes)?;
    }
    rustix::fs::fchmod(&file, PRIVATE.mode)?;
    file.sync_all()?;
    fs::rename(from, to)
}
