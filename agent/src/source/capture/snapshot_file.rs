//! A file that has a snapshot which some server has written.

use std::path::{Path, PathBuf};

use remora_redis::ReplId;

use crate::backup::checked_snapshot;
use crate::exit::Failure;
use crate::server::Facts;

/// A snapshot in a file.
#[derive(Debug)]
pub(crate) struct SnapshotFile {
    pub(super) path: PathBuf,
    /// The history that it belongs to.
    pub(super) replid: ReplId,
    /// The last byte of the stream that it holds.
    pub(super) offset: u64,
    pub(super) bytes: u64,
}

impl SnapshotFile {
    /// Reads all of a file, to check it.
    ///
    /// # Errors
    /// It cannot be read, is damaged, or does not say where in which history it was taken.
    pub(crate) fn open(path: &Path) -> Result<SnapshotFile, Failure> {
        let rdb = checked_snapshot(path)?;
        let Ok(replid) = rdb.replid.parse() else {
            return Err(Failure::refused(format!(
                "{} does not say to which replication history it belongs (repl-id, repl-offset): a server writes that only \
                 while it is a replica, or has replicas or a backlog",
                path.display()
            )));
        };
        Ok(SnapshotFile { path: path.to_owned(), replid, offset: rdb.offset, bytes: rdb.bytes })
    }

    /// Whether the server would continue behind it, with room for what it writes in the meantime.
    ///
    /// # Errors
    /// It would not.
    pub(crate) fn check(&self, facts: &Facts) -> Result<(), String> {
        let covered = facts.covers(self.replid, self.offset, 0);
        covered.map_err(|text| {
            format!(
                "the server would not continue behind {} ({}:{}): {text}; take a newer file, or raise repl-backlog-size",
                self.path.display(),
                self.replid,
                self.offset
            )
        })
    }
}
