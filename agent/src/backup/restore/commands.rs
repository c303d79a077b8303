//! Commands: append-only files, read to their end or to a moment.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use remora_redis::aof::FileKind;
use serde::Serialize;

use super::super::aof_file::{AofFile, End};
use super::super::manifest::checked_snapshot;
use super::super::moment::Moment;
use super::super::rdb_file::RdbFile;
use super::found::AofFolder;
use crate::exit::Failure;

/// What the commands of a backup are.
#[derive(Clone, Debug, Default, Serialize)]
pub(super) struct Commands {
    /// Files that a server loads.
    pub(super) files: usize,
    /// Bytes of them, without the snapshot.
    pub(super) bytes: u64,
    pub(super) commands: u64,
    pub(super) transactions: u64,
    /// Commands that change the map of a cluster. A backup of an earlier release may have some.
    pub(super) cluster_changes: u64,
    /// The first and the last second that they name.
    #[serde(skip)]
    pub(super) first: Option<Moment>,
    #[serde(skip)]
    pub(super) last: Option<Moment>,
    /// The last byte of the stream at the last mark.
    #[serde(skip)]
    pub(super) offset: Option<u64>,
    /// Why some of the bytes are left out; empty if none are.
    pub(super) left_out: String,
    /// Bytes of the last file that are used.
    #[serde(skip)]
    pub(super) last_bytes: u64,
}

/// What the first bytes of a snapshot are.
const MAGICS: [&[u8]; 2] = [b"REDIS", b"VALKEY"];

/// Reads all files of a folder, up to the end of the second `until`. Returns the snapshot, if the base is one.
///
/// # Errors
/// A file cannot be read or is damaged, a file that others follow is cut off, or no times are named although one is
/// asked for.
pub(super) fn check(folder: &AofFolder, until: Option<Moment>) -> Result<(Option<RdbFile>, Commands), Failure> {
    let (mut base, mut all) = (None, Commands::default());
    let mut has_times = false;
    for (number, file) in folder.manifest.files.iter().enumerate() {
        let path = folder.path.join(&file.name);
        all.files = number + 1;
        if file.kind == FileKind::Base && is_snapshot(&path)? {
            let rdb = checked_snapshot(&path)?;
            all.last_bytes = rdb.bytes;
            base = Some(rdb);
            continue;
        }
        let is_last = number + 1 == folder.manifest.files.len();
        let read = AofFile::read(&path, until)?;
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
        self.first = self.first.or(file.first);
        self.last = file.last.or(self.last);
        self.offset = file.mark.map(|mark| mark.offset).or(self.offset);
        self.last_bytes = file.used;
    }
}
