//! Found: what there is at a path.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use remora_redis::aof::Manifest;

use super::super::list;
use super::super::manifest::{Damaged, IN_FOLDER, Kind, Manifest as About, newest_until};
use super::super::moment::Moment;
use super::super::shelf::{self, Backup};
use crate::args::Pass;
use crate::checked_json::Checksum;
use crate::exit::Failure;

/// A backup that was found.
#[derive(Debug)]
pub(super) enum Found {
    /// An RDB file.
    Snapshot(PathBuf),
    /// An append-only file of several parts.
    Folder(AofFolder),
}

/// The folder of an append-only file.
#[derive(Debug)]
pub(super) struct AofFolder {
    pub(super) path: PathBuf,
    /// The name of the list.
    pub(super) list: String,
    pub(super) manifest: Manifest,
    /// The command files have checksums.
    pub(super) is_checked: bool,
}

/// The servers' default name of the folder (`appenddirname`).
pub(super) const FOLDER: &str = "appendonlydir";

/// How the names of lists end.
pub(super) const LIST_SUFFIX: &str = ".manifest";

/// Bytes of a list that are read at most: more than the most files need.
const LIST_BYTES_MAX: u64 = 16 << 20;

impl Found {
    /// What kind of backup it is.
    pub(super) fn kind(&self) -> Kind {
        match self {
            Found::Snapshot(_) => Kind::Snapshot,
            Found::Folder(_) => Kind::Journal,
        }
    }

    /// Looks at the path, and chooses the newest backup that is not of a later moment.
    ///
    /// # Errors
    /// The path holds no such backup, or the moment is there twice and `pass` does not say which one is meant.
    pub(super) fn at(path: &Path, until: Option<Moment>, pass: Option<Pass>) -> Result<Found, Failure> {
        let kind = path.metadata();
        let kind = kind.map_err(|error| Failure::refused(format!("{} cannot be read: {error}", path.display())))?;
        if kind.is_file() {
            return Ok(Found::Snapshot(path.to_owned()));
        }
        for folder in [path.join(FOLDER), path.to_owned()] {
            if let Some(folder) = AofFolder::at(&folder)? {
                return Ok(Found::Folder(folder));
            }
        }
        let all = shelf::list(path, Damaged::Refused)?;
        let is_empty = all.is_empty();
        let snapshots = all.iter().filter(|backup| backup.manifest.kind == Kind::Snapshot).count();
        if snapshots > 0 && snapshots < all.len() {
            // Commands may reach further than a snapshot that was taken later, or may not.
            return Err(Failure::refused(format!(
                "{} has snapshots and folders with commands: name the one that is meant",
                path.display()
            )));
        }
        match newest_until(all, |backup: &Backup| &backup.manifest, until, pass)? {
            Some(backup) if backup.manifest.kind == Kind::Snapshot => Ok(Found::Snapshot(backup.path)),
            Some(backup) => AofFolder::at(&backup.path.join(FOLDER))?.map(Found::Folder).ok_or_else(|| {
                Failure::refused(format!("{} has lost its list of files ({FOLDER})", backup.path.display()))
            }),
            None if path.join("dump.rdb").is_file() => Ok(Found::Snapshot(path.join("dump.rdb"))),
            None if is_empty => match AofFolder::below(path)? {
                Some(folder) => Ok(Found::Folder(folder)),
                None => Err(Failure::refused(format!("there is no backup in {}", path.display()))),
            },
            None => {
                Err(Failure::refused(format!("all backups in {} are of a later moment than --until", path.display())))
            }
        }
    }
}

/// The folders in this one, in order.
pub(super) fn folders_in(path: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(path).into_iter().flatten().flatten();
    let mut folders: Vec<PathBuf> = entries.map(|entry| entry.path()).filter(|path| path.is_dir()).collect();
    folders.sort();
    folders
}

impl AofFolder {
    /// The append-only file in a folder of a server that has another `appenddirname`; `None` if there is no such file.
    ///
    /// # Errors
    /// There are several, or it is damaged.
    pub(super) fn below(path: &Path) -> Result<Option<AofFolder>, Failure> {
        let mut found = None;
        for folder in folders_in(path) {
            let Some(folder) = AofFolder::at(&folder)? else { continue };
            if let Some(AofFolder { path: other, .. }) = found.replace(folder) {
                return Err(Failure::refused(format!(
                    "{} has several folders with an append-only file, such as {}: name the one that is meant",
                    path.display(),
                    other.display()
                )));
            }
        }
        Ok(found)
    }

    /// The append-only file in this folder; `None` if the folder has no such file.
    pub(super) fn at(path: &Path) -> Result<Option<AofFolder>, Failure> {
        let entries = std::fs::read_dir(path).into_iter().flatten().flatten();
        let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
        let mut lists: Vec<String> = names.filter(|name| name.ends_with(LIST_SUFFIX)).collect();
        lists.sort();
        let Some(list) = lists.pop() else { return Ok(None) };
        let file = path.join(&list);
        if let Some(other) = lists.pop() {
            let text = format!("{} has two lists of files: {other} and {list}; remove the wrong one", path.display());
            return Err(Failure::refused(text));
        }
        let unreadable = |error: &dyn std::fmt::Display| Failure::refused(format!("{}: {error}", file.display()));
        let mut bytes = Vec::new();
        let read = File::open(&file).and_then(|opened| opened.take(LIST_BYTES_MAX).read_to_end(&mut bytes));
        read.map_err(|error| unreadable(&error))?;
        let about = path.parent().map(|above| About::read(&above.join(IN_FOLDER))).transpose()?.flatten();
        let is_checked = about.is_some_and(|about| about.is_checked());
        match list::check(&bytes) {
            Checksum::Wrong => return Err(unreadable(&"it is damaged: its checksum does not match")),
            Checksum::Missing if is_checked => return Err(unreadable(&"it is damaged: it has lost its checksum")),
            Checksum::Missing | Checksum::Right => {}
        }
        let manifest = Manifest::parse(&bytes).map_err(|error| unreadable(&error))?;
        if manifest.files.is_empty() {
            return Err(unreadable(&"it names no file"));
        }
        Ok(Some(AofFolder { path: path.to_owned(), list, manifest, is_checked }))
    }
}
