//! What a capture is given, what it reports, and how it fails.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use remora_fabric::Memory;
use remora_redis::psync::client;
use remora_redis::{Refusal, ReplId};
use remora_table::Geometry;
use tokio::sync::mpsc::UnboundedSender;

use super::method::Rules as ModuleRules;
use crate::server::{Server, ServerError, Task};
use crate::source::gauge::Gauge;

/// What one capture thread is given.
#[derive(Clone)]
pub(crate) struct Plan {
    /// The number of the snapshot that it makes.
    pub(crate) generation: u64,
    /// The server that it asks.
    pub(crate) server: Server,
    /// The version of server that the snapshot is for, where that makes a difference; one that all read without it.
    pub(crate) reader_version: Option<String>,
    /// Where the snapshot goes.
    pub(crate) snapshot: (Arc<Memory>, Geometry),
    /// Whether its slots may never be used again: then it fails where it would have to.
    pub(crate) retained: bool,
    /// Where the stream goes; `None` when another thread already follows it.
    pub(crate) journal: Option<(Arc<Memory>, Geometry)>,
    /// What may be asked of a module in the server.
    pub(crate) module: Arc<ModuleRules>,
    /// What the others may see of it while it runs.
    pub(crate) gauge: Arc<Gauge>,
    /// What it tells the owner: a handful of events in its life.
    pub(crate) events: UnboundedSender<CaptureEvent>,
    /// Set by the owner to end it.
    pub(crate) stop: Arc<AtomicBool>,
    /// For the asynchronous parts of connecting (name look-up, TLS).
    pub(crate) runtime: tokio::runtime::Handle,
}

/// What a capture thread tells the owner.
#[derive(Debug)]
pub(crate) enum CaptureEvent {
    /// The primary has forked: the snapshot will hold everything up to `offset`.
    Started { generation: u64, replid: ReplId, offset: u64 },
    /// The snapshot is whole.
    Completed { generation: u64, bytes: u64 },
    /// The snapshot will never be whole.
    Failed { generation: u64, fault: Fault },
    /// The stream broke and was taken up again at the next byte: nothing was lost.
    StreamResumed,
    /// The server offers to continue the stream under another replid. The journal ends at `at`, the offset of the last
    /// byte of the old history that it holds; nothing of the new history was appended.
    HistoryChanged { generation: u64, from: ReplId, to: ReplId, at: u64 },
    /// The stream can't be taken up at the next byte: the journal ends here.
    StreamLost { text: String },
}

/// Why a capture ended early.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Fault {
    /// The server did not let us in, or did not do what was asked.
    #[error(transparent)]
    Server(#[from] ServerError),
    /// The server answered the handshake with something else than a snapshot.
    #[error("the server's answer to the replication handshake: {}{}", .0, rules_for(.0))]
    Psync(#[from] client::Error),
    /// The link to the server broke.
    #[error("the link to the server broke during the {during}: {cause}")]
    Link { during: &'static str, cause: String },
    /// The module in the server did not do what it was armed for. The next attempt does without it.
    #[error("the module in the server: {0}")]
    Module(String),
    /// The server no longer has the byte that we need next.
    #[error("the server's backlog no longer reaches back to where the stream broke, or its history is another one")]
    HistoryGone,
    /// The server has the byte that we need next, but continues under another replid: it was promoted, follows another
    /// primary, or was shut down and started again.
    #[error("the server's history changed from {from} to {to} after offset {at}")]
    HistoryChanged { from: ReplId, to: ReplId, at: u64 },
    /// The snapshot is larger than was expected, and its readers rely on memory that is never used again.
    #[error(
        "the snapshot is larger than the server's INFO (used_memory_dataset) let expect; taking another through a window"
    )]
    Outgrown,
    /// The table refused: a mistake of ours.
    #[error(transparent)]
    Table(#[from] remora_table::Error),
    /// The owner asked for it.
    #[error("stopped")]
    Stopped,
}

impl Fault {
    /// Whether asking the same server again may go better.
    pub(crate) fn is_transient(&self) -> bool {
        match self {
            Fault::Server(error) => error.is_passing(),
            Fault::Psync(error) => error.is_temporary(),
            Fault::Link { .. } | Fault::Outgrown | Fault::Module(_) | Fault::HistoryChanged { .. } => true,
            Fault::HistoryGone | Fault::Table(_) | Fault::Stopped => false,
        }
    }
}

/// The rules that a server's user lacks who was refused for want of one.
fn rules_for(error: &client::Error) -> String {
    match error {
        client::Error::Refused(Refusal::NoPerm { .. }) => {
            format!("; {} needs these rules: {}", Task::Source.command(), Task::Source.rules())
        }
        _ => String::new(),
    }
}

/// What ends a capture: the owner's word, and for a stream beside a snapshot the snapshot's failure.
#[derive(Clone, Copy)]
pub(super) struct Stops<'a> {
    pub(super) plan: &'a AtomicBool,
    pub(super) abandoned: Option<&'a AtomicBool>,
}

impl<'a> Stops<'a> {
    pub(super) fn of(plan: &'a Plan) -> Stops<'a> {
        Stops { plan: &plan.stop, abandoned: None }
    }

    pub(super) fn set(self) -> bool {
        self.plan.load(Ordering::Relaxed) || self.abandoned.is_some_and(|flag| flag.load(Ordering::Relaxed))
    }
}

/// How often a waiting thread looks at its stop flag: the bound on how long stopping takes.
pub(super) const TICK: Duration = Duration::from_millis(100);

/// The longest silence of the server in a handshake or a snapshot. Servers send a newline each second while they
/// prepare one, and give up themselves after `repl-timeout`, 60 s by default.
pub(super) const SILENCE_LIMIT: Duration = Duration::from_secs(60);
