//! The snapshot from a file that some server has written, and the stream behind it from the server that is followed.
//!
//! ```text
//!   dump.rdb: repl-id, repl-offset ──▶ does the server's backlog reach back to there? ── no: refused, nothing is asked for
//!        │                                    │ yes
//!        ▼ bytes                              ▼ PSYNC <repl-id> <repl-offset + 1> ──▶ +CONTINUE
//!   snapshot table                          journal
//! ```
//!
//! The server is asked by `INFO` first: a `PSYNC` that it cannot continue would have it take a snapshot.

use std::fs::File;
use std::io::Read;
use std::time::{Duration, Instant};

use remora_redis::psync::client::Options;
use remora_table::{Kind, SnapshotWriter};

use super::Capture;
use super::plan::CaptureError;
use super::psync_link::is_same_history;
use super::snapshot::{Begun, Taking};
use super::snapshot_file::SnapshotFile;
use super::stream::Following;
use crate::server::Facts;

/// Bytes that are read at a time.
const PIECE: usize = 1 << 20;

const A_DAY: Duration = Duration::from_secs(24 * 3600);

impl Capture {
    /// Takes the snapshot from a file, and the stream behind it from the server.
    pub(super) fn take_file(&self, file: &SnapshotFile) -> Result<Following, CaptureError> {
        let SnapshotFile { path, replid, offset, .. } = file;
        let unreadable =
            |error: std::io::Error| CaptureError::File(format!("{} cannot be read: {error}", path.display()));
        let mut input = File::open(path).map_err(unreadable)?;
        let (first, _) = self.plan.gauge.journal();
        let socket = match self.plan.journal {
            // Another capture follows the stream.
            None if first > offset + 1 => {
                let text =
                    format!("the journal does not reach back to the offset {offset} of {} any more", path.display());
                return Err(CaptureError::File(text));
            }
            None if self.plan.gauge.reading().first_state.is_some() => {
                let text = format!(
                    "the stream behind {} has commands that must not be applied late (expiries that count from the moment of the \
                     command, or changes of the cluster's slots): restart the source with a newer file, or without one",
                    path.display()
                );
                return Err(CaptureError::File(text));
            }
            None => None,
            Some(_) => {
                let facts = self.wait_for(async { Facts::read(&mut self.plan.server.connect().await?).await })?;
                file.check(&facts).map_err(CaptureError::File)?;
                let resume = Some((*replid, offset + 1));
                let mut link = self.handshake(Options { resume, ..Options::default() })?;
                let now = link.continued()?.ok_or(CaptureError::HistoryGone)?;
                is_same_history(*replid, now, *offset)?;
                Some(link.into_socket())
            }
        };
        let (memory, geometry) = &self.plan.snapshot;
        let identity = self.identity(Kind::Snapshot, *replid, *offset);
        let writer = SnapshotWriter::create(memory.clone(), *geometry, identity, 0)?;
        let Begun { journal, sealing } = self.begun(*replid, *offset)?;
        self.plan.gauge.announced(file.bytes);
        let mut taking = Taking::new(self, writer, sealing);
        let journal = journal.map(|mut journal| {
            // When the server has written what it has kept is not known.
            journal.written_since(long_ago(Instant::now()));
            journal
        });
        let (Some(socket), Some(journal)) = (socket, journal) else {
            taking.append_file(&mut input, file)?;
            taking.complete(0)?;
            return Ok(Following::AnotherCapture);
        };
        self.beside_the_stream(socket, journal, || {
            taking.append_file(&mut input, file)?;
            taking.complete(0)
        })
    }
}

/// A time before anything that still plays a part. A host that has just started has no such time: then its first one,
/// nearly.
fn long_ago(now: Instant) -> Instant {
    (0..32_u32).find_map(|halves| now.checked_sub(A_DAY / 2_u32.saturating_pow(halves))).unwrap_or(now)
}

impl Taking<'_> {
    /// Appends all of a file, which must have the length that it had when it was checked.
    fn append_file(&mut self, input: &mut File, file: &SnapshotFile) -> Result<(), CaptureError> {
        let failed = |what: &dyn std::fmt::Display| CaptureError::File(format!("{}: {what}", file.path.display()));
        let (mut piece, mut read) = (vec![0; PIECE], 0);
        loop {
            let length = match input.read(&mut piece) {
                Ok(0) if read == file.bytes => return Ok(()),
                Ok(0) => return Err(failed(&"it is shorter than it was")),
                Ok(length) => length,
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(failed(&error)),
            };
            read += length as u64;
            if read > file.bytes {
                return Err(failed(&"it is longer than it was"));
            }
            self.append(piece.get(..length).unwrap_or_default())?;
        }
    }
}
