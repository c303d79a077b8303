//! Bases: what a source can make a snapshot of, of the backups and files that it is told.
//!
//! ```text
//!   a file            ── its head ─────────────▶ where in which history, how old
//!   a folder          ── dump.rdb, backups ────▶ the same of the newest one      ── chosen ──▶ all of it is read
//!   s3://…, a folder of objects ── manifests ──▶ the same                        ── chosen ──▶ fetched, read
//! ```
//!
//! A look reads heads, manifests, and the end of the last file of commands. The commands of a backup are read where the
//! server has no more of the stream behind its snapshot. They have every byte of it.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::Duration;

use remora_protocol::BaseKind;

use super::archived::Archived;
use super::{AofFolder, FOLDER, Found as Files, folder_for};
use crate::commands_file::{reaches, write_stream};
use crate::manifest::{Damaged, Kind, Manifest, checked_snapshot};
use crate::options::{Location, RestoreOptions, StoreOptions};
use crate::shelf;
use remora_process::exit::Failure;
use remora_process::host;
use remora_process::rdb_file::RdbFile;
use remora_process::rdb_file::{Found, Opened, Stored, StoredHead, StoredStream, head_of};

/// How long a store that cannot be reached is tried again: replicas wait meanwhile, and there may be another base.
const RETRY_FOR: Duration = Duration::from_secs(5);

/// How long a look at files serves: an operator who has laid one there sees it soon.
const FOLDER_HOLDS: Duration = Duration::from_secs(10);

/// The same of a bucket: a list and its manifests are requests that are paid for.
const BUCKET_HOLDS: Duration = Duration::from_secs(300);

/// The servers' default name of the file of a snapshot.
const DUMP: &str = "dump.rdb";

/// The snapshot of a backup with commands, in its folder.
const BASE: &str = "appendonly.aof.1.base.rdb";

/// The stream of a backup with commands, in the folder in which it is kept until the source has read it.
const STREAM: &str = "stream";

/// The places at which backups and files are looked for.
#[derive(Clone, Debug)]
pub struct Places {
    /// Files, folders and buckets.
    pub at: Vec<Location>,
    /// How buckets are reached.
    pub store: StoreOptions,
    /// The file that opens encrypted backups.
    pub identity: Option<PathBuf>,
    /// The folder in which a backup is kept that was fetched, until the source has read it.
    pub spool: PathBuf,
}

/// A backup or a file at one place.
enum Base {
    /// `commands`: the folder with the commands since.
    File {
        path: PathBuf,
        commands: Option<PathBuf>,
        kind: BaseKind,
        head: StoredHead,
    },
    Archived(Box<Archived>, StoredHead),
}

impl Stored for Places {
    fn look(&self) -> Vec<Found> {
        self.at.iter().flat_map(|at| self.look_at(at)).collect()
    }

    fn holds(&self) -> Duration {
        match self.at.iter().any(|at| matches!(at, Location::Bucket { .. })) {
            true => BUCKET_HOLDS,
            false => FOLDER_HOLDS,
        }
    }

    fn open(&self, found: &Found, with_commands: bool, goes_on: &dyn Fn() -> bool) -> Result<Opened, Failure> {
        for at in &self.at {
            let bases = self.bases_at(at).unwrap_or_default();
            if let Some(base) = bases.into_iter().find(|base| base.place() == found.place) {
                return self
                    .open_base(base, with_commands, goes_on)
                    .map_err(|failure| Failure { message: in_the_options_of_a_source(&failure.message), ..failure });
            }
        }
        Err(Failure::refused(format!("{} is not there any more", found.place)))
    }
}

impl Places {
    fn look_at(&self, at: &Location) -> Vec<Found> {
        let unusable = |why: String| {
            let kind = if matches!(at, Location::Bucket { .. }) { BaseKind::Backup } else { BaseKind::File };
            vec![Found { kind, place: at.to_string(), head: Err(why) }]
        };
        match self.bases_at(at) {
            Err(why) => unusable(in_the_options_of_a_source(&why)),
            Ok(bases) if bases.is_empty() => unusable("there is neither a backup nor dump.rdb".to_owned()),
            Ok(bases) => bases.iter().map(Base::found).collect(),
        }
    }

    /// What there is at this place: the newest backup, and the file that a server has saved.
    ///
    /// # Errors
    /// Why it cannot be used, as the end of a sentence.
    fn bases_at(&self, at: &Location) -> Result<Vec<Base>, String> {
        let mut all = Vec::new();
        if let Location::Path(path) = at {
            if !path.is_dir() {
                return Ok(vec![Base::of_file(path, BaseKind::File)?]);
            }
            let dump = path.join(DUMP);
            if dump.is_file() {
                all.push(Base::of_file(&dump, BaseKind::File)?);
            }
            let backups = shelf::list(path, Damaged::Skipped).map_err(|failure| failure.to_string())?;
            if let Some(newest) = backups.into_iter().next_back() {
                let mut head = of_manifest(&newest.manifest)?;
                let commands = (newest.manifest.kind == Kind::Journal).then(|| newest.path.join(FOLDER));
                let path = commands.as_ref().map_or(newest.path, |folder| folder.join(BASE));
                if let Some(folder) = &commands {
                    head.reaches = reach_of(folder).unwrap_or_default().max(head.offset);
                }
                all.push(Base::File { path, commands, kind: BaseKind::Backup, head });
                return Ok(all);
            }
        }
        let options = self.options(at);
        match Archived::find(&options) {
            Ok(None) => {}
            Ok(Some(archived)) => {
                let mut head = of_manifest(&archived.manifest)?;
                if archived.manifest.kind == Kind::Journal {
                    // Its snapshot may serve without them.
                    head.reaches = archived.reaches().unwrap_or_default().max(head.offset);
                }
                all.push(Base::Archived(Box::new(archived), head));
            }
            // A folder of a server has no backups.
            Err(_) if !all.is_empty() => {}
            Err(failure) => return Err(failure.to_string()),
        }
        Ok(all)
    }

    fn options(&self, at: &Location) -> RestoreOptions {
        RestoreOptions {
            store: self.store.clone(),
            identity: self.identity.clone(),
            spool: self.spool.clone(),
            retry_for: RETRY_FOR,
            ..RestoreOptions::new(at.clone())
        }
    }

    fn open_base(&self, base: Base, with_commands: bool, goes_on: &dyn Fn() -> bool) -> Result<Opened, Failure> {
        let folder_beside = || folder_for(&self.options(&Location::Path(PathBuf::new())));
        // What is fetched, or put together, needs a folder until the source has read it.
        let (path, commands, mut beside) = match base {
            Base::File { path, commands, .. } => {
                let commands = commands.filter(|_| with_commands);
                (path, commands.map(|folder| AofFolder::named(&folder)).transpose()?, None)
            }
            Base::Archived(archived, _) => {
                let beside = folder_beside()?;
                if with_commands && archived.manifest.kind == Kind::Journal {
                    let Files::Folder(folder) = archived.fetch(None, beside.path(), goes_on)? else {
                        return Err(Failure::refused(format!("{} has no commands", archived.address().display())));
                    };
                    (folder.path.join(BASE), Some(folder), Some(beside))
                } else {
                    (archived.fetch_snapshot(beside.path(), goes_on)?, None, Some(beside))
                }
            }
        };
        let rdb = checked_snapshot(&path)?;
        let mut stream = None;
        if let Some(folder) = commands {
            let written = match beside.take() {
                Some(beside) => beside,
                None => folder_beside()?,
            };
            stream = Some(stream_of(&folder, &rdb, written.path(), goes_on)?);
            beside = Some(written);
        }
        let keeps = beside.map(|beside| Box::new(beside) as Box<_>);
        Ok(Opened { path, rdb, stream, keeps })
    }
}

impl Base {
    fn of_file(path: &Path, kind: BaseKind) -> Result<Base, String> {
        Ok(Base::File { path: path.to_owned(), commands: None, kind, head: head_of(path)? })
    }

    fn place(&self) -> String {
        match self {
            Base::File { path, .. } => path.display().to_string(),
            Base::Archived(archived, _) => archived.address().display().to_string(),
        }
    }

    fn found(&self) -> Found {
        let (kind, head) = match self {
            Base::File { kind, head, .. } => (*kind, *head),
            Base::Archived(_, head) => (BaseKind::Backup, *head),
        };
        Found { kind, place: self.place(), head: Ok(head) }
    }
}

/// How far the commands in a folder reach.
fn reach_of(folder: &Path) -> Option<u64> {
    reaches(AofFolder::at(folder).ok()??.commands().last()?)
}

/// The commands of a backup, byte by byte as the server wrote them.
fn stream_of(
    folder: &AofFolder,
    rdb: &RdbFile,
    beside: &Path,
    goes_on: &dyn Fn() -> bool,
) -> Result<StoredStream, Failure> {
    let path = beside.join(STREAM);
    let bytes = folder.commands().iter().filter_map(|path| path.metadata().ok()).map(|file| file.len()).sum();
    host::check_space("the stream of a backup", beside, bytes)?;
    let out = File::create_new(&path).map_err(|error| Failure::local(format!("{}: {error}", path.display())))?;
    let end = write_stream(&folder.commands(), rdb.offset, (&path, &out), goes_on)?;
    Ok(StoredStream { path, end })
}

/// What a manifest says of a backup's snapshot.
fn of_manifest(manifest: &Manifest) -> Result<StoredHead, String> {
    let history = manifest.replid.parse().map_err(|_| {
        "its manifest does not say to which replication history it belongs (repl-id, repl-offset)".to_owned()
    })?;
    let (offset, taken, version) = (manifest.offset, manifest.taken_seconds, manifest.rdb_version);
    Ok(StoredHead { history, offset, reaches: offset, taken, version })
}

/// A sentence about a store or a backup, with the options of `remora source` in place of those of `remora restore`.
fn in_the_options_of_a_source(text: &str) -> String {
    OPTIONS.iter().fold(text.to_owned(), |text, (of_a_restore, of_a_source)| text.replace(of_a_restore, of_a_source))
}

/// Options of a restore that failures name, and what a source has for them: how long it tries is fixed.
const OPTIONS: [(&str, &str); 3] = [("--s3-", "--base-s3-"), ("--identity", "--base-identity"), (" (--retry-for)", "")];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_source_is_told_names_its_own_options() {
        let places = Places {
            at: vec![Location::Bucket { bucket: "b".into(), prefix: String::new() }],
            store: StoreOptions { endpoint: Some("http://192.0.2.1:1".into()), ..StoreOptions::default() },
            identity: None,
            spool: PathBuf::new(),
        };
        let found = places.look();
        let why = found[0].head.as_ref().err().map(String::as_str).unwrap_or_default();
        assert!(why.contains("--base-s3-allow-http") && !why.contains(" --s3-"), "{why}");
        let opened = in_the_options_of_a_source("x is encrypted: name the file with your identity by --identity");
        assert!(opened.ends_with("by --base-identity"), "{opened}");
        let tried = in_the_options_of_a_source("tried for 5 s (--retry-for): check --s3-endpoint");
        assert_eq!(tried, "tried for 5 s: check --base-s3-endpoint");
    }
}
