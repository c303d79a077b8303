//! `remora restore`: checks a backup, says what it holds, and lays out what a server starts on.
//!
//! ```text
//!   PATH ──▶ found: an RDB file, or a folder with a list ──▶ checked: all of it is read ──▶ report
//!             ▲                                                │ --until: where it is cut
//!   objects ──╯ archived: fetched into a folder                ╰──▶ laid: copies beside, synced, renamed
//! ```
//!
//! - `archived`: the files of a backup in a bucket, or another archive.
//! - `bases`: what a source can make a snapshot of.
//! - This file: what there is at a path (`Found`), the files for a server, and append-only files, which are read to
//!   their end or to a moment.

mod archived;

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::RenameFlags;
use serde::Serialize;
use tempfile::TempDir;

use self::archived::Archived;
use crate::commands_file::{self, AofFile, End};
use crate::manifest::{Behind, Damaged, IN_FOLDER, Kind, Manifest as About, checked_snapshot, newest_until};
use crate::options::{Location, Pass, RestoreOptions};
use crate::shelf::{self, Backup};
use remora_base::files::{self, PRIVATE};
use remora_base::units::{Moment, Size, counted};
use remora_process::checked_json::Checksum;
use remora_process::exit::Failure;
use remora_process::rdb_file::RdbFile;
use remora_process::signals::until_signal;
use remora_process::{blocking, host, progress};
use remora_redis::aof::{FileKind, Manifest};
use remora_server::local;

pub use crate::restore::archived::Places;

/// What a backup holds.
#[derive(Debug, Serialize)]
pub struct Report {
    path: PathBuf,
    server: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    rdb_version: Option<u32>,
    replid: String,
    /// The last byte of the stream that it holds, as far as that is known.
    offset: u64,
    bytes: u64,
    has_checksum: bool,
    /// Keys of each database in the snapshot.
    #[serde(skip_serializing_if = "Option::is_none")]
    keys: Option<BTreeMap<u64, u64>>,
    /// How many databases a server needs for it.
    databases: u64,
    /// Keys of the snapshot whose time to live has ended by now.
    expired_keys: u64,
    /// The first moment that can be restored.
    first: String,
    /// The last one.
    last: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    commands: Option<Commands>,
    #[serde(skip_serializing_if = "Option::is_none")]
    laid_at: Option<PathBuf>,
    /// The settings with which a server loads what was laid out.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    settings: BTreeMap<&'static str, String>,
}

/// Checks a backup, and lays it out if that is wanted, unless a signal stops it before.
///
/// # Errors
/// There is no backup at the place, it is damaged, does not reach the moment, or cannot be laid out.
pub async fn run(options: RestoreOptions) -> Result<Report, Failure> {
    until_signal(restored(options), ": nothing was laid out").await
}

async fn restored(options: RestoreOptions) -> Result<Report, Failure> {
    let options = Arc::new(options);
    let asked = Arc::clone(&options);
    let archived = blocking(move || {
        asked.to.as_deref().map_or(Ok(()), refuse_a_folder_in_use)?;
        Archived::find(&asked)
    });
    let archived = archived.await?;
    // The folder goes with this function, and so with a signal.
    let beside = archived.as_ref().map(|_| folder_for(&options)).transpose()?;
    let (asked, into) = (Arc::clone(&options), beside.as_ref().map(|folder| folder.path().to_owned()));
    blocking(move || match (archived, into) {
        (Some(archived), Some(into)) => {
            if let (Some(to), false) = (&asked.to, asked.replaces) {
                refuse_what_is_there(to, archived.manifest.kind)?;
            }
            let found = archived.fetch(asked.until, &into, &|| true)?;
            let mut report = checked(&asked, &found, true)?;
            report.path = archived.address();
            Ok(report)
        }
        _ => {
            let Location::Path(path) = &asked.from else {
                return Err(Failure::refused(format!(
                    "there is no backup in {}: name what remora backup --to named",
                    asked.from
                )));
            };
            let found = Found::at(path, asked.until, asked.until_pass)?;
            if let (Some(to), false) = (&asked.to, asked.replaces) {
                refuse_what_is_there(to, found.kind())?;
            }
            checked(&asked, &found, false)
        }
    })
    .await
}

/// The folder into which a backup is fetched: where it is laid out, so that its files only need another name.
fn folder_for(options: &RestoreOptions) -> Result<TempDir, Failure> {
    let above = options.to.as_ref().unwrap_or(&options.spool);
    let unusable = |error| Failure::local(format!("{} cannot be used: {error}", above.display()));
    std::fs::create_dir_all(above).map_err(unusable)?;
    tempfile::Builder::new().prefix(BESIDE).tempdir_in(above).map_err(unusable)
}

/// Checks what was found, and lays it out. `moves`: its files are of no further use.
fn checked(options: &RestoreOptions, found: &Found, moves: bool) -> Result<Report, Failure> {
    let mut report = match found {
        Found::Snapshot(path) => {
            let rdb = checked_snapshot(path)?;
            if let Some(until) = options.until.filter(|until| *until < rdb.taken) {
                return Err(too_early(path, rdb.taken, until));
            }
            Report::of(path.clone(), Some(&rdb), None)
        }
        Found::Folder(folder) => {
            let (base, commands) = check(folder, options.until, options.until_pass)?;
            let taken = base.as_ref().map_or(Moment::default(), |base| base.taken);
            if let Some(until) = options.until.filter(|until| *until < taken && !commands.is_after_a_step) {
                return Err(too_early(&folder.path, taken, until));
            }
            if let (Some(until), Some(behind)) = (options.until, &folder.behind)
                && !(commands.is_after_a_step || commands.is_cut)
            {
                behind.refuse(until, commands.last.unwrap_or(taken), &folder.path.display())?;
            }
            Report::of(folder.path.clone(), base.as_ref(), Some(commands))
        }
    };
    if let Some(to) = &options.to {
        // The check may have taken an hour.
        refuse_a_folder_in_use(to)?;
        let how = How { replaces: options.replaces, moves };
        let laid = match found {
            Found::Snapshot(path) => lay_out_snapshot(path, to, how)?,
            Found::Folder(aof) => lay_out_folder(aof, report.commands.as_ref(), to, how)?,
        };
        report.laid_at = Some(laid);
        report.settings = settings(found, report.databases);
    }
    Ok(report)
}

fn too_early(path: &Path, taken: Moment, until: Moment) -> Failure {
    Failure::refused(format!(
        "{} begins at {taken}, which is after --until {until}: give an earlier backup, or the folder that has it",
        path.display()
    ))
}

impl Report {
    fn of(path: PathBuf, rdb: Option<&RdbFile>, commands: Option<Commands>) -> Report {
        let taken = rdb.map_or(Moment::default(), |rdb| rdb.taken);
        let (first, last) = match &commands {
            Some(commands) => (
                if taken > Moment::default() { taken } else { commands.first.unwrap_or_default() },
                commands.last.unwrap_or(taken),
            ),
            None => (taken, taken),
        };
        let said = |moment: Moment| if moment == Moment::default() { String::new() } else { moment.to_string() };
        let offset = commands.as_ref().and_then(|commands| commands.offset);
        let keys = rdb.and_then(|rdb| rdb.keys.clone());
        let highest = keys.as_ref().and_then(|keys| Some(keys.last_key_value()?.0 + 1));
        Report {
            databases: commands.as_ref().map_or(1, |commands| commands.databases).max(highest.unwrap_or(1)),
            path,
            server: rdb.map(|rdb| rdb.server.clone()).unwrap_or_default(),
            rdb_version: rdb.map(|rdb| rdb.version),
            replid: rdb.map(|rdb| rdb.replid.clone()).unwrap_or_default(),
            offset: offset.or(rdb.map(|rdb| rdb.offset)).unwrap_or_default(),
            bytes: rdb.map_or(0, |rdb| rdb.bytes) + commands.as_ref().map_or(0, |commands| commands.bytes),
            has_checksum: rdb.is_some_and(|rdb| rdb.has_checksum),
            keys,
            expired_keys: rdb.map_or(0, |rdb| rdb.expired),
            first: said(first),
            last: said(last),
            commands,
            laid_at: None,
            settings: BTreeMap::new(),
        }
    }

    /// Says it in words.
    pub fn show(&self) {
        let mut lines = vec![format!("backup     {}: {}", self.path.display(), Size::bytes(self.bytes))];
        if let Some(version) = self.rdb_version {
            let checksum = if self.has_checksum { "" } else { "; it has no checksum" };
            lines.push(format!("snapshot   of {}, RDB version {version}{checksum}", self.server));
            if !self.replid.is_empty() {
                lines.push(format!("history    {}:{}", self.replid, self.offset));
            }
            match &self.keys {
                Some(keys) => {
                    let keys: Vec<String> = keys.iter().map(|(database, keys)| format!("{database}: {keys}")).collect();
                    lines.push(format!("keys       {}", if keys.is_empty() { "none".into() } else { keys.join(", ") }));
                }
                None => lines.push("keys       not counted: it holds types that this program does not know".into()),
            }
        }
        if let Some(commands) = &self.commands {
            lines.push(format!(
                "commands   {} in {}, {}",
                commands.commands,
                counted(commands.files, "file"),
                counted(commands.transactions, "transaction")
            ));
            if commands.cluster_changes > 0 {
                lines.push(format!(
                    "WARNING    {} of them change the map of a cluster (CLUSTER SETSLOT): a node that starts on these files may follow \
                     another shard, and a server without cluster mode logs an error for each; make a new backup, which leaves them out",
                    commands.cluster_changes
                ));
            }
            if !commands.left_out.is_empty() {
                lines.push(format!("left out   {}", commands.left_out));
            }
        }
        let moments =
            if self.first == self.last { self.first.clone() } else { format!("{} to {}", self.first, self.last) };
        if !moments.is_empty() {
            lines.push(format!("moments    {moments}"));
        }
        if self.databases > DATABASES {
            lines.push(format!(
                "databases  {0}: start the server with databases {0} at least; with fewer it does not load the snapshot, or carries \
                 out in another database what was written to one that it lacks",
                self.databases
            ));
        }
        if self.expired_keys > 0 {
            lines.push(format!(
                "expired    {} of the snapshot, whose time to live has ended since: a server deletes them when it loads them",
                counted(self.expired_keys, "key")
            ));
        }
        if let Some(laid) = &self.laid_at {
            let settings: Vec<String> = self.settings.iter().map(|(name, value)| format!("{name} {value}")).collect();
            lines.push(format!("laid out   {}; start the server with {}", laid.display(), settings.join(", ")));
        }
        progress::say(&lines.join("\n"));
    }
}

// Found: what there is at a path.

/// A backup that was found.
#[derive(Debug)]
enum Found {
    /// An RDB file.
    Snapshot(PathBuf),
    /// An append-only file of several parts.
    Folder(AofFolder),
}

/// The folder of an append-only file.
#[derive(Debug)]
struct AofFolder {
    path: PathBuf,
    /// The name of the list.
    list: String,
    manifest: Manifest,
    /// The command files have checksums.
    is_checked: bool,
    /// The next backup, if there is a gap between both and a moment was asked for.
    behind: Option<Behind>,
}

/// The servers' default name of the folder (`appenddirname`).
const FOLDER: &str = "appendonlydir";

/// How the names of lists end.
const LIST_SUFFIX: &str = ".manifest";

/// Bytes of a list that are read at most: more than the most files need.
const LIST_BYTES_MAX: u64 = 16 << 20;

impl Found {
    /// What kind of backup it is.
    fn kind(&self) -> Kind {
        match self {
            Found::Snapshot(_) => Kind::Snapshot,
            Found::Folder(_) => Kind::Journal,
        }
    }

    /// Looks at the path, and chooses the newest backup that is not of a later moment.
    ///
    /// # Errors
    /// The path holds no such backup, or the moment is there twice and `pass` does not say which one is meant.
    fn at(path: &Path, until: Option<Moment>, pass: Option<Pass>) -> Result<Found, Failure> {
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
                "{0} has snapshots and folders with commands: name the one that is meant, as {0}/NAME",
                path.display()
            )));
        }
        match newest_until(all, |backup: &Backup| &backup.manifest, until, pass)? {
            Some((backup, _)) if backup.manifest.kind == Kind::Snapshot => Ok(Found::Snapshot(backup.path)),
            Some((backup, behind)) => match AofFolder::at(&backup.path.join(FOLDER))? {
                Some(folder) => Ok(Found::Folder(AofFolder { behind, ..folder })),
                None => {
                    Err(Failure::refused(format!("{} has lost its list of files ({FOLDER})", backup.path.display())))
                }
            },
            None if path.join("dump.rdb").is_file() => Ok(Found::Snapshot(path.join("dump.rdb"))),
            None if is_empty => match AofFolder::below(path)? {
                Some(folder) => Ok(Found::Folder(folder)),
                None => Err(Failure::refused(format!(
                    "there is no backup in {}: name what remora backup --to named",
                    path.display()
                ))),
            },
            None => Err(Failure::refused(format!(
                "all backups in {} are of a later moment than --until: give a later one, or name an older backup",
                path.display()
            ))),
        }
    }
}

/// The folders in this one, in order.
fn folders_in(path: &Path) -> Vec<PathBuf> {
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
    fn below(path: &Path) -> Result<Option<AofFolder>, Failure> {
        let mut found = None;
        for folder in folders_in(path) {
            let Some(folder) = AofFolder::at(&folder)? else { continue };
            if let Some(AofFolder { path: other, .. }) = found.replace(folder) {
                return Err(Failure::refused(format!(
                    "{} has several folders with an append-only file, such as {}: name the folder that is meant",
                    path.display(),
                    other.display()
                )));
            }
        }
        Ok(found)
    }

    /// The append-only file in this folder; `None` if the folder has no such file.
    fn at(path: &Path) -> Result<Option<AofFolder>, Failure> {
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
        match commands_file::check(&bytes) {
            Checksum::Wrong => return Err(unreadable(&"it is damaged: its checksum does not match")),
            Checksum::Missing if is_checked => return Err(unreadable(&"it is damaged: it has lost its checksum")),
            Checksum::Missing | Checksum::Right => {}
        }
        let manifest = Manifest::parse(&bytes).map_err(|error| unreadable(&error))?;
        if manifest.files.is_empty() {
            return Err(unreadable(&"it names no file"));
        }
        Ok(Some(AofFolder { path: path.to_owned(), list, manifest, is_checked, behind: None }))
    }

    /// The folder at this path, which a backup names.
    ///
    /// # Errors
    /// It has no list of its files, or that cannot be read.
    fn named(path: &Path) -> Result<AofFolder, Failure> {
        let lost = || Failure::refused(format!("{} has lost its list of files", path.display()));
        AofFolder::at(path)?.ok_or_else(lost)
    }

    /// Its files of commands.
    fn commands(&self) -> Vec<PathBuf> {
        let files = self.manifest.files.iter().filter(|file| file.kind == FileKind::Incremental);
        files.map(|file| self.path.join(&file.name)).collect()
    }
}

// Laid: the files of a backup in a server's folder. They are copied beside, brought to the disk, and get their name
// last.

/// The servers' default name of an RDB file (`dbfilename`).
const SNAPSHOT: &str = "dump.rdb";

/// What files and folders are called that have no name yet.
const BESIDE: &str = ".remora-restore";

/// How files are laid out.
#[derive(Clone, Copy, Debug)]
struct How {
    /// What is there already goes.
    replaces: bool,
    /// The files of the backup are on the same file system, and of no further use.
    moves: bool,
}

fn failed(path: &Path) -> impl Fn(io::Error) -> Failure {
    let path = path.display().to_string();
    move |error| Failure::local(format!("{path} cannot be written: {error}"))
}

/// Refuses a folder that has data already, before a long check.
///
/// # Errors
/// It has.
fn refuse_what_is_there(folder: &Path, kind: Kind) -> Result<(), Failure> {
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
fn refuse_a_folder_in_use(folder: &Path) -> Result<(), Failure> {
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

/// How many databases a server has by default.
const DATABASES: u64 = 16;

/// The settings with which a server loads the files of this backup. Each has a default that another server may have
/// changed.
fn settings(found: &Found, databases: u64) -> BTreeMap<&'static str, String> {
    let mut settings = match found {
        Found::Snapshot(_) => BTreeMap::from([("appendonly", "no".to_owned()), ("dbfilename", SNAPSHOT.to_owned())]),
        Found::Folder(folder) => {
            let name = folder.list.strip_suffix(LIST_SUFFIX).unwrap_or(&folder.list).to_owned();
            BTreeMap::from([
                ("appendonly", "yes".to_owned()),
                ("appenddirname", FOLDER.to_owned()),
                ("appendfilename", name),
            ])
        }
    };
    if databases > DATABASES {
        settings.insert("databases", databases.to_string());
    }
    settings
}

/// Lays an RDB file out.
///
/// # Errors
/// It cannot be written, or there is one and it is not to be replaced.
fn lay_out_snapshot(from: &Path, folder: &Path, how: How) -> Result<PathBuf, Failure> {
    let to = folder.join(SNAPSHOT);
    fs::create_dir_all(folder).map_err(failed(folder))?;
    let placing = files::Placing { replaces: how.replaces, ..PRIVATE };
    if how.moves {
        let file = File::open(from).map_err(failed(&to))?;
        files::put(&file, from, &to, &placing)?;
        return Ok(to);
    }
    host::check_copies(SNAPSHOT, from, folder, from.metadata().map_or(0, |found| found.len()))?;
    let beside = tempfile::Builder::new().prefix(BESIDE).tempfile_in(folder).map_err(failed(&to))?;
    let (mut file, fresh) = beside.into_parts();
    File::open(from).and_then(|mut from| io::copy(&mut from, &mut file)).map_err(failed(&to))?;
    files::put(&file, &fresh, &to, &placing)?;
    _ = fresh.keep(); // it has another name by now
    Ok(to)
}

/// Lays the files of an append-only file out, the last one up to where it is cut.
///
/// # Errors
/// They cannot be written, or there are some and they are not to be replaced.
fn lay_out_folder(from: &AofFolder, commands: Option<&Commands>, folder: &Path, how: How) -> Result<PathBuf, Failure> {
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
        host::check_copies(FOLDER, &from.path, folder, all.saturating_sub(last))?;
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
    files::write(&inner.join(&from.list), list.as_bytes(), &PRIVATE)?;
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

// Commands: append-only files, read to their end or to a moment.

/// What the commands of a backup are.
#[derive(Clone, Debug, Default, Serialize)]
struct Commands {
    /// Files that a server loads.
    files: usize,
    /// Bytes of them, without the snapshot.
    bytes: u64,
    commands: u64,
    transactions: u64,
    /// Commands that change the map of a cluster. A backup of an earlier release may have some.
    cluster_changes: u64,
    /// How many databases a server needs for them.
    #[serde(skip)]
    databases: u64,
    /// The first and the last second that they name.
    #[serde(skip)]
    first: Option<Moment>,
    #[serde(skip)]
    last: Option<Moment>,
    /// The last byte of the stream at the last mark.
    #[serde(skip)]
    offset: Option<u64>,
    /// Why some of the bytes are left out; empty if none are.
    left_out: String,
    /// Commands of later moments follow.
    #[serde(skip)]
    is_cut: bool,
    /// Bytes of the last file that are used.
    #[serde(skip)]
    last_bytes: u64,
    /// The moment is the one after the clock went back: what stands before may be of later seconds.
    #[serde(skip)]
    is_after_a_step: bool,
}

/// What the first bytes of a snapshot are.
const MAGICS: [&[u8]; 2] = [b"REDIS", b"VALKEY"];

/// Reads all files of a folder, up to the end of the second `until`. `pass`: which one, if the clock went back. Returns
/// the snapshot, if the base is one.
///
/// # Errors
/// A file cannot be read or is damaged, a file that others follow is cut off, no times are named although one is asked
/// for, or the second is there twice and `pass` does not say which one is meant.
fn check(
    folder: &AofFolder,
    until: Option<Moment>,
    pass: Option<Pass>,
) -> Result<(Option<RdbFile>, Commands), Failure> {
    let (mut base, mut all) = (None, Commands::default());
    let mut has_times = false;
    let last_pass = until.map_or(Ok(None), |until| last_pass(folder, until))?;
    // What is behind the second, and yet before the file in which it is reached again.
    let is_before_last = |number| last_pass.as_ref().is_some_and(|last: &LastPass| number < last.file);
    for (number, file) in folder.manifest.files.iter().enumerate() {
        let path = folder.path.join(&file.name);
        all.files = number + 1;
        if file.kind == FileKind::Base && is_snapshot(&path)? {
            let rdb = checked_snapshot(&path)?;
            all.last_bytes = rdb.bytes;
            if let (Some(until), Some(last)) = (until.filter(|until| rdb.taken > *until), &last_pass) {
                all.is_after_a_step = last.is_meant(pass, until, folder)?;
            }
            base = Some(rdb);
            continue;
        }
        let is_last = number + 1 == folder.manifest.files.len();
        let mut read = AofFile::read(&path, until)?;
        if let (End::Cut, true, Some(until), Some(last)) = (&read.end, is_before_last(number), until, &last_pass)
            && last.is_meant(pass, until, folder)?
        {
            all.is_after_a_step = true;
            read = AofFile::read(&path, None)?;
        }
        if folder.is_checked {
            read.refuse_what_is_not_checked(&path, is_last)?;
        }
        has_times |= read.has_times;
        all.add(&read);
        match read.end {
            End::Whole => {}
            End::Cut => {
                let rest = folder.manifest.files.len() - number - 1;
                all.left_out =
                    format!("all behind byte {} of {}, and {rest} more files (--until)", read.used, file.name);
                all.is_cut = true;
                break;
            }
            End::Torn(length) if is_last => {
                let torn = length - read.used;
                all.left_out =
                    format!("the last {torn} bytes of {}: they are no whole command or transaction", file.name);
            }
            End::Torn(_) => {
                return Err(Failure::refused(format!(
                    "{} ends in the middle of a command or transaction, and other files follow it: the backup is damaged",
                    path.display()
                )));
            }
        }
    }
    if until.is_some() && !has_times && all.commands > 0 {
        return Err(Failure::refused(format!(
            "{} does not say at which times its commands were run (aof-timestamp-enabled), so --until cannot be found",
            folder.path.display()
        )));
    }
    Ok((base, all))
}

/// Where a second is reached for the last time.
struct LastPass {
    /// The number of the file of commands.
    file: usize,
    /// The second with which that file begins.
    begins: Moment,
}

/// The last file that begins before or in this second. Within a file seconds only grow, so what is before this file and
/// of a later second shows that the clock went back.
fn last_pass(folder: &AofFolder, until: Moment) -> Result<Option<LastPass>, Failure> {
    for (number, file) in folder.manifest.files.iter().enumerate().rev() {
        let path = folder.path.join(&file.name);
        if file.kind == FileKind::Base && is_snapshot(&path)? {
            continue;
        }
        if let Some(begins) = AofFile::first_second(&path)?.filter(|begins| *begins <= until) {
            return Ok(Some(LastPass { file: number, begins }));
        }
    }
    Ok(None)
}

impl LastPass {
    /// Whether this one is meant, of several.
    ///
    /// # Errors
    /// It is not said.
    fn is_meant(&self, pass: Option<Pass>, until: Moment, folder: &AofFolder) -> Result<bool, Failure> {
        match pass {
            Some(pass) => Ok(pass == Pass::Last),
            None => Err(Failure::refused(format!(
                "{} has the second {until} twice: the clock of the host that wrote it went back, to {}. Give --until-pass first \
                 for the data before it went back, or --until-pass last for those after",
                folder.path.display(),
                self.begins
            ))),
        }
    }
}

fn is_snapshot(path: &Path) -> Result<bool, Failure> {
    let mut bytes = Vec::new();
    let read = File::open(path).and_then(|file| file.take(6).read_to_end(&mut bytes));
    read.map_err(|error| Failure::refused(format!("{} cannot be read: {error}", path.display())))?;
    Ok(MAGICS.iter().any(|magic| bytes.starts_with(magic)))
}

impl Commands {
    fn add(&mut self, file: &AofFile) {
        self.bytes += file.used;
        self.commands += file.commands;
        self.transactions += file.transactions;
        self.cluster_changes += file.cluster;
        self.databases = self.databases.max(file.databases);
        self.first = self.first.or(file.first);
        self.last = file.last.or(self.last);
        self.offset = file.mark.map(|mark| mark.offset).or(self.offset);
        self.last_bytes = file.used;
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use remora_redis::aof::{Manifest, NamedFile};
    use remora_redis::resp::command;

    use super::*;

    /// A folder with these files of commands: each key is set in that second.
    fn folder(at: &Path, files: &[&[(u64, &str)]]) -> AofFolder {
        let mut named = Vec::new();
        for (number, commands) in (1..).zip(files) {
            let mut text = Vec::new();
            for (second, key) in *commands {
                text.extend_from_slice(format!("#TS:{second}\r\n").as_bytes());
                command(&mut text, &[&b"SET"[..], key.as_bytes(), b"1"]);
            }
            let name = format!("appendonly.aof.{number}.incr.aof");
            std::fs::write(at.join(&name), text).unwrap();
            named.push(NamedFile { name, number, kind: FileKind::Incremental });
        }
        AofFolder {
            path: at.to_owned(),
            list: String::new(),
            manifest: Manifest { files: named },
            is_checked: false,
            behind: None,
        }
    }

    #[test]
    fn a_second_that_is_there_twice_is_refused_until_it_is_said_which_one_is_meant() {
        let temporary = tempfile::tempdir().unwrap();
        let files: &[&[(u64, &str)]] =
            &[&[(1000, "a")], &[(4000, "b"), (5000, "c")], &[(2000, "d"), (3000, "e")], &[(6000, "f")]];
        let folder = folder(temporary.path(), files);
        let commands = |until: u64, pass| {
            let read = check(&folder, Some(Moment::seconds(until)), pass);
            read.map(|(_, commands)| commands.commands).map_err(|failure| failure.message)
        };
        // Before the clock had reached it, and after it had passed the highest one again.
        for pass in [None, Some(Pass::First), Some(Pass::Last)] {
            assert_eq!(commands(1500, pass), Ok(1));
            assert_eq!(commands(5500, pass), Ok(5));
            assert_eq!(commands(9000, pass), Ok(6));
        }
        for (until, first, last) in [(2000, 1, 4), (2500, 1, 4), (4000, 2, 5), (4999, 2, 5)] {
            let refused = commands(until, None).unwrap_err();
            let moment = Moment::seconds(until).to_string();
            assert!(refused.contains(&moment) && refused.contains("--until-pass first"), "{refused}");
            assert_eq!(commands(until, Some(Pass::First)), Ok(first), "{until}");
            assert_eq!(commands(until, Some(Pass::Last)), Ok(last), "{until}");
        }
    }

    #[test]
    fn where_the_clock_never_went_back_no_second_is_in_question() {
        let temporary = tempfile::tempdir().unwrap();
        let folder = folder(temporary.path(), &[&[(10, "a"), (20, "b")], &[(20, "c"), (30, "d")]]);
        for (until, count) in [(9, 0), (10, 1), (20, 3), (25, 3), (30, 4)] {
            let (_, commands) = check(&folder, Some(Moment::seconds(until)), None).unwrap();
            assert_eq!(commands.commands, count, "{until}");
        }
    }

    #[test]
    fn a_server_is_told_how_many_databases_the_commands_need() {
        let temporary = tempfile::tempdir().unwrap();
        let folder = folder(temporary.path(), &[&[(10, "a")], &[(20, "b")]]);
        let needed = |folder: &AofFolder, until: Option<u64>| {
            let (_, commands) = check(folder, until.map(Moment::seconds), None).unwrap();
            Report::of(PathBuf::new(), None, Some(commands)).databases
        };
        assert_eq!(needed(&folder, None), 1);
        let file = temporary.path().join("appendonly.aof.2.incr.aof");
        let mut text = std::fs::read(&file).unwrap();
        command(&mut text, &["SELECT", "19"]);
        command(&mut text, &["SET", "c", "1"]);
        std::fs::write(file, text).unwrap();
        assert_eq!((needed(&folder, None), needed(&folder, Some(15))), (20, 1));
        let found = Found::Folder(folder);
        assert_eq!(settings(&found, 20)["databases"], "20");
        assert_eq!(settings(&found, 16).get("databases"), None);
    }
}
