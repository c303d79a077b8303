//! What a capture is given, what it reports, and how it fails.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use remora_fabric::Memory;
use remora_redis::ReplId;
use remora_redis::psync::client;
use remora_table::Geometry;
use tokio::sync::mpsc::UnboundedSender;

use super::method::ModuleRules;
use super::snapshot_file::SnapshotFile;
use crate::server::{OutputLimit, Server, ServerError, Task, refusals};
use crate::source::captured::Captured;
use crate::source::gauge::Gauge;
use crate::source::output_buffer::REMEDY;
use crate::source::presence::Presence;
use crate::source::sealing::{RemoteTable, SealedTable};
use crate::source::tuning::Tuning;
use crate::units::Size;

/// What one capture is given.
// Larger than the bound: a field for each thing that the source's loop decides for it.
#[derive(Clone)]
pub(crate) struct Plan {
    /// The generation of the snapshot that the capture takes.
    pub(crate) generation: u64,
    /// The server to take the snapshot from.
    pub(crate) server: Server,
    /// The file that has the snapshot. `None`: the server takes it.
    pub(crate) file: Option<Arc<SnapshotFile>>,
    /// What is changed at the server until it has forked.
    pub(crate) tuning: Arc<Tuning>,
    /// The server that the source captures at any time, where the stream is resumed.
    pub(crate) captured: Captured,
    /// Whether the server is asked first if it holds what its primary holds. Only scripted servers are not.
    pub(crate) is_examined: bool,
    /// The server version that the capture claims, so that the server writes its own format. `None`: the server writes
    /// the format that all readers know.
    pub(crate) reader_version: Option<String>,
    /// Whether the server can import slots: Valkey from 9 on, in cluster mode.
    pub(crate) may_import_slots: bool,
    /// The memory for the snapshot's table.
    pub(crate) snapshot: (Arc<Memory>, Geometry),
    /// Whether readers were promised that no slot of the snapshot is reused. The capture fails if it would have to
    /// reuse one.
    pub(crate) retained: bool,
    /// Readies new memory for the snapshot, before the server is asked for it. It may take long: RDMA registers all of
    /// the memory.
    pub(crate) prepare: Arc<dyn Fn() + Send + Sync>,
    /// The memory for the journal. `None` if another capture already follows the stream.
    pub(crate) journal: Option<(Arc<Memory>, Geometry)>,
    /// The snapshot for replicas on other hosts, sealed, compressed or both. `None`: they read the plain one.
    pub(crate) remote: Option<RemoteTable>,
    /// The sealed journal. `None`: replicas on other hosts read the plain one.
    pub(crate) sealed_journal: Option<SealedTable>,
    /// What a module in the server may be asked to do.
    pub(crate) module: Arc<ModuleRules>,
    /// Whether the module failed a short time ago ([`MethodHistory`](super::MethodHistory)). It is not asked then.
    pub(crate) module_failed_lately: bool,
    /// Figures that the capture shows while it runs.
    pub(crate) gauge: Arc<Gauge>,
    /// Where the capture sends its events: a handful in its life.
    pub(crate) events: UnboundedSender<CaptureEvent>,
    /// Set by the source's loop to end the capture.
    pub(crate) stop: Arc<AtomicBool>,
    /// Says when the server is to be without our links.
    pub(crate) presence: Arc<Presence>,
    /// For the asynchronous parts of connecting (name look-up, TLS).
    pub(crate) runtime: tokio::runtime::Handle,
}

/// What a capture reports to the source's loop.
#[derive(Debug)]
pub(crate) enum CaptureEvent {
    /// The server forks for this capture, as it has said (`+FULLRESYNC`). The first byte of a snapshot that it saves
    /// to disk first comes much later, or never. A capture may report it more than once, and so does one whose stream
    /// could not be resumed.
    Forked { generation: u64 },
    /// The snapshot has begun to arrive: it will hold everything up to `offset`.
    Started { generation: u64, replid: ReplId, offset: u64 },
    /// The snapshot is complete.
    Completed { generation: u64, bytes: u64 },
    /// The module in the server may be the cause of the failure that follows.
    ModuleFailed,
    /// The snapshot failed and will never be complete.
    Failed { generation: u64, error: CaptureError },
    /// The stream broke and was resumed at the next byte: nothing was lost.
    StreamResumed,
    /// The server offers to continue the stream under another replid. The journal ends at `at`, the offset of the last
    /// byte of the old history that it holds; nothing of the new history was appended.
    HistoryChanged { generation: u64, from: ReplId, to: ReplId, at: u64 },
    /// The stream cannot be resumed at the next byte: the journal ends here.
    StreamLost { text: String },
}

/// Why a capture ended early.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CaptureError {
    /// The server refused the login or a command.
    #[error(transparent)]
    Server(#[from] ServerError),
    /// The server's answer to the handshake announces no snapshot.
    #[error("the server's answer to the replication handshake: {}{}", .0, advice_for(.0))]
    Psync(#[from] client::Error),
    /// The link to the server broke.
    #[error("the link to the server broke during the {during}: {cause}")]
    Link { during: &'static str, cause: String },
    /// The server closed the link because it held back too much of the stream.
    #[error(
        "the server closed the connection: after {} s it held back {} that clients had written, and its client-output-buffer-limit for \
         replicas is {limit}; {REMEDY}",
        .took.as_secs(), Size::bytes(*.held)
    )]
    OutputBuffer { held: u64, took: Duration, limit: OutputLimit },
    /// The module in the server did not do what it was armed for. The next attempt does without it.
    #[error("the module in the server: {0}")]
    Module(String),
    /// The snapshot's file cannot be used, or the server does not continue behind it.
    #[error("{0}")]
    File(String),
    /// The server no longer has the byte that the journal needs next.
    #[error("the server's backlog no longer reaches back to where the stream broke, or its history is another one")]
    HistoryGone,
    /// The server has the byte that the journal needs next, but continues under another replid: it was promoted,
    /// follows another primary, or was shut down and started again.
    #[error("the server's history changed from {from} to {to} after offset {at}")]
    HistoryChanged { from: ReplId, to: ReplId, at: u64 },
    /// A snapshot from now would hold keys that are not the server's yet.
    #[error(
        "the server imports the slots {slots} (CLUSTER MIGRATESLOTS); a snapshot can be taken when CLUSTER GETSLOTMIGRATIONS \
         says that the import is over"
    )]
    ImportsSlots { slots: String },
    /// The server is a replica that need not hold what its primary holds.
    #[error("{0}")]
    NotAsItsPrimary(String),
    /// The snapshot is larger than expected, and its readers were promised that no slot is reused.
    #[error("the snapshot is larger than the server's INFO (used_memory_dataset) suggests; the next one is windowed")]
    Outgrown,
    /// A bug of the source. Another attempt may not meet it.
    #[error("the thread that takes the snapshot panicked, which is a bug of remora; please report it: {0}")]
    Panicked(String),
    /// The table refused a call: a bug of the source.
    #[error(transparent)]
    Table(#[from] remora_table::Error),
    /// The server is being shut down, and waits for its replicas before it ends.
    #[error("the server is being shut down; another snapshot is requested when it is back")]
    ServerEnds,
    /// The source stopped the capture.
    #[error("stopped")]
    Stopped,
}

impl CaptureError {
    /// Whether another attempt with the same server may succeed.
    pub(crate) fn is_transient(&self) -> bool {
        match self {
            CaptureError::Server(error) => error.is_passing(),
            CaptureError::Psync(client::Error::Refused(refusal)) => {
                refusals::line_for(&refusal.command, &refusal.text).verdict.passes()
            }
            CaptureError::Psync(_) => false,
            CaptureError::Link { .. }
            | CaptureError::OutputBuffer { .. }
            | CaptureError::ImportsSlots { .. }
            | CaptureError::Outgrown
            | CaptureError::ServerEnds
            | CaptureError::Module(_)
            | CaptureError::Panicked(_)
            | CaptureError::HistoryChanged { .. } => true,
            CaptureError::HistoryGone
            | CaptureError::File(_)
            | CaptureError::NotAsItsPrimary(_)
            | CaptureError::Table(_)
            | CaptureError::Stopped => false,
        }
    }
}

/// What to do about a refusal.
fn advice_for(error: &client::Error) -> String {
    match error {
        client::Error::Refused(refusal) => {
            format!("; {}", refusals::advice(&refusal.command, &refusal.text, Task::Source))
        }
        _ => String::new(),
    }
}

/// What ends a capture early: the source's loop, for a snapshot also the server's end, and for a stream beside a
/// snapshot also the snapshot's failure.
#[derive(Clone)]
pub(super) struct Stop {
    stopped: Arc<AtomicBool>,
    abandoned: Option<Arc<AtomicBool>>,
    presence: Option<Arc<Presence>>,
}

impl Stop {
    /// A stop that `stopped` sets.
    pub(super) fn new(stopped: Arc<AtomicBool>) -> Stop {
        Stop { stopped, abandoned: None, presence: None }
    }

    /// A stop that the end of the server sets too.
    pub(super) fn with(self, presence: Arc<Presence>) -> Stop {
        Stop { presence: Some(presence), ..self }
    }

    /// A stop that the end of the server does not set.
    pub(super) fn without_presence(&self) -> Stop {
        Stop { presence: None, ..self.clone() }
    }

    /// A stop that `abandoned` sets too.
    pub(super) fn or(&self, abandoned: Arc<AtomicBool>) -> Stop {
        Stop { abandoned: Some(abandoned), ..self.clone() }
    }

    /// Whether the capture has to end.
    pub(super) fn is_set(&self) -> bool {
        self.check().is_err()
    }

    /// Waits until the stop is set, and returns why.
    pub(super) async fn wait(&self) -> CaptureError {
        loop {
            match self.check() {
                Ok(()) => tokio::time::sleep(TICK).await,
                Err(why) => return why,
            }
        }
    }

    /// Fails if the stop is set.
    pub(super) fn check(&self) -> Result<(), CaptureError> {
        let is_abandoned = self.abandoned.as_ref().is_some_and(|flag| flag.load(Ordering::Relaxed));
        if self.stopped.load(Ordering::Relaxed) || is_abandoned {
            return Err(CaptureError::Stopped);
        }
        match self.presence.as_ref().and_then(|presence| presence.leaves_at()) {
            Some(_) => Err(CaptureError::ServerEnds),
            None => Ok(()),
        }
    }
}

/// How often a waiting thread checks its stop: the bound on how long stopping takes.
pub(super) const TICK: Duration = Duration::from_millis(100);

/// The longest silence of the server in a handshake, a snapshot or the stream. Servers send a newline each second while
/// they prepare a snapshot, and drop silent replicas themselves after `repl-timeout`, 60 s by default.
pub(super) const SILENCE_LIMIT: Duration = Duration::from_secs(60);
