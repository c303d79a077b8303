//! Capture: takes the primary's side of replication and writes it into tables.
//!
//! One thread speaks PSYNC to the server. The snapshot's bytes go from the socket straight into slots of the snapshot
//! table (one `recv`, no buffer between). The replication stream that follows goes into the journal.
//!
//! ```text
//!            first capture                                a later one, while the stream is being followed
//!   connect ── PSYNC ? -1 ──▶ +FULLRESYNC          connect ── REPLCONF rdb-only ── PSYNC ? -1 ──▶ +FULLRESYNC
//!      RDB bytes ──▶ snapshot table                   RDB bytes ──▶ snapshot table
//!      stream    ──▶ journal (until stopped)          close: the journal already holds what follows
//! ```
//!
//! If the server offers it (Valkey's dual channel), the first capture uses two connections. The forked child itself
//! writes the snapshot to one of them, which spares the server's main thread a copy. The stream flows over the other
//! one from the beginning.
//!
//! ```text
//!   connect ── PSYNC ? -1 ──▶ +DUALCHANNELSYNC ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ▶ PSYNC <replid> <offset + 1> ──▶ +CONTINUE
//!                 connect ── SYNC ──▶ offset, replid, RDB bytes ──▶ snapshot table      stream ──▶ journal
//! ```
//!
//! There is one stream for any number of snapshots. Replication offsets are absolute, so a later snapshot uses the same
//! journal, from its own offset on.
//!
//! A journal holds one history. The server continues a broken stream under another replid (`+CONTINUE <new replid>`)
//! after it was promoted, when it follows another primary, or after it was shut down and started again. Then the stream
//! ends before a byte of the new history is appended.
//!
//! A capture decides nothing: [`super::machine`] decides which one runs when. It ends within one [`TICK`]
//! after its `stop` is set, or when the primary ends it.
//!
//! - [`Plan`]: what a capture is given; [`CaptureEvent`]: what it reports. `method`: how it takes the snapshot.
//! - `snapshot`: the snapshot's bytes, as the server sends them or from a file, and the thread that seals them.
//! - `with_module`: the other ways, in which the server's child writes into the table, and the server the rest; or,
//!   without a fork, the module sends all of it to the capture.
//! - `bases`: which way is tried first, and a snapshot from a backup, from a file, or as a copy of another source's.
//! - `stream`: the stream behind it, into the journals.
//! - `psync_link` drives every handshake, on a connection that owns what was read ahead of it. Its `Pieces` stand
//!   in place of a server in tests and in the simulation.

mod bases;
mod method;
pub(crate) mod psync_link;
mod snapshot;
mod stream;
mod with_module;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use remora_fabric::Memory;
use remora_protocol::Offer;
use remora_reader::source::Way;
use remora_redis::ReplId;
use remora_redis::psync::client;
use remora_table::{Geometry, State};
use tokio::sync::mpsc::UnboundedSender;

pub(crate) use self::bases::{Candidate, Data, Known, Tried, World, candidate, of_the_server, order};
pub(crate) use self::method::{Method, MethodHistory, ModuleRules};
use self::psync_link::Silence;
pub use self::snapshot::Intake;
pub(crate) use self::snapshot::SnapshotFile;
pub(crate) use self::stream::Journal;
pub use self::stream::Written;
use self::stream::{Follower, Following};
use crate::captured::{Captured, Presence, REMEDY, Tuning};
use crate::gauge::Gauge;
use crate::tables::{RemoteTable, SealedTable};
use remora_base::units::Size;
use remora_process::rdb_file::Stored;
use remora_server::own_changes::why_not_as_its_primary;
use remora_server::{OutputLimit, Server, ServerError, Task, refusals};

/// What the first source offers, and how it is read.
pub(crate) struct Offered {
    pub(crate) offer: Offer,
    pub(crate) way: Way,
    /// The conversation in which it was offered has ended.
    pub(crate) is_over: Arc<AtomicBool>,
}

impl AsRef<Offer> for Offered {
    fn as_ref(&self) -> &Offer {
        &self.offer
    }
}

/// One capture: a snapshot of the server and, unless another capture follows it, the replication stream behind it.
// Larger than the bound: a method for each step of the two ways to take a snapshot, in the files named after them.
#[derive(Clone)]
pub(crate) struct Capture {
    plan: Plan,
    stop: Stop,
    /// The longest silence of the server that the capture accepts.
    silence_limit: Duration,
    /// Imports of slots that were over before the snapshot was requested, by their names.
    imports_over: BTreeSet<Vec<u8>>,
}

impl Capture {
    pub(crate) fn new(plan: Plan) -> Capture {
        let stop = Stop::new(plan.stop.clone()).with(plan.presence.clone());
        Capture { plan, stop, silence_limit: SILENCE_LIMIT, imports_over: BTreeSet::new() }
    }

    /// Runs the capture to its end. It is meant to be the body of a thread. A panic, which is a bug, ends the snapshot
    /// or the stream with an event as any other error does: the source's loop would wait for it without end.
    pub(crate) fn run(self) {
        let taken =
            caught(|| self.not_while_the_server_ends()?.beside_a_suitable_server()?.without_imports()?.take_snapshot())
                .unwrap_or_else(|text| Err(CaptureError::Panicked(text)));
        self.plan.tuning.end(&self.plan.runtime);
        match taken {
            Ok(Following::AnotherCapture) => {}
            Ok(Following::ThisThread(follower)) => self.follow(|| follower.run()),
            Ok(Following::OwnThread(thread)) => {
                let _ = thread.join();
            }
            Err(error) => {
                self.plan.gauge.snapshot_ended(State::Aborted);
                self.report(CaptureEvent::Failed { generation: self.plan.generation, error });
            }
        }
    }

    /// Goes on with the stream behind what the journal has of it: a former process of this service has followed it so
    /// far. It is meant to be the body of a thread.
    pub(crate) fn go_on(self, journal: Journal) {
        self.follow(|| Follower::unconnected(&self, journal).run());
    }

    /// The capture, of a server that is not being shut down. Waits for the end of that, or until the capture is
    /// stopped.
    fn not_while_the_server_ends(&self) -> Result<&Capture, CaptureError> {
        let stop = self.stop.without_presence();
        while self.plan.presence.leaves_at().is_some() {
            stop.check()?;
            std::thread::sleep(TICK);
        }
        Ok(self)
    }

    /// The capture, of the server that the source is to sit beside now: a fail-over may just have happened.
    fn beside_a_suitable_server(&self) -> Result<Capture, CaptureError> {
        let server = self.wait_for(async { Ok(self.plan.captured.for_a_snapshot().await) })?;
        if self.plan.is_examined
            && let Some(why) = self.wait_for(async { why_not_as_its_primary(&mut server.connect().await?).await })?
        {
            return Err(CaptureError::NotAsItsPrimary(why));
        }
        Ok(Capture { plan: Plan { server, ..self.plan.clone() }, ..self.clone() })
    }

    /// Runs the body of the thread that follows the stream.
    fn follow(&self, body: impl FnOnce()) {
        if let Err(text) = caught(body) {
            self.report(CaptureEvent::StreamLost { text: format!("the thread that follows it panicked: {text}") });
        }
    }

    /// Sends an event to the source's loop. A loop that has ended needs none.
    fn report(&self, event: CaptureEvent) {
        let _ = self.plan.events.send(event);
    }

    /// Waits for `work`, which uses the network, unless the capture is stopped meanwhile.
    fn wait_for<T>(&self, work: impl Future<Output = Result<T, ServerError>>) -> Result<T, CaptureError> {
        self.plan.runtime.block_on(async {
            tokio::select! {
                done = work => Ok(done?),
                why = self.stop.wait() => Err(why),
            }
        })
    }

    /// Starts to measure how long the server is silent. `during` names the phase in the error.
    fn silence(&self, during: &'static str) -> Silence {
        Silence { since: Instant::now(), limit: self.silence_limit, during }
    }
}

/// Runs `body`, and returns the message of its panic as an error.
fn caught<T>(body: impl FnOnce() -> T) -> Result<T, String> {
    // What a panic leaves behind is not used again: the table is aborted or revoked, and the connection closed.
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(body)).map_err(|panic| {
        let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
        text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "no message".to_owned())
    })
}

// What a capture is given, what it reports, and how it fails.

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
    /// Backups and files of which the snapshot can be made.
    pub(crate) stored: Option<Arc<dyn Stored>>,
    /// Those that were tried lately.
    pub(crate) tried: Tried,
    /// Bytes of the stream that the journal can hold.
    pub(crate) journal_bytes: u64,
    /// The other source whose snapshot is copied. `None`: none is.
    pub(crate) first: Option<Arc<Offered>>,
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
    /// Whether the module failed a short time ago ([`MethodHistory`]). It is not asked then.
    pub(crate) module_failed_lately: bool,
    /// Whether a sweep failed a short time ago. The server forks then, or there is no snapshot.
    pub(crate) sweep_failed_lately: bool,
    /// The server must not fork for the snapshot.
    pub(crate) no_fork: bool,
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
#[allow(missing_docs)] // A field's name says what it is, or the variant does.
pub enum CaptureEvent {
    /// The server forks for this capture, as it has said (`+FULLRESYNC`). The first byte of a snapshot that it saves
    /// to disk first comes much later, or never. A capture may report it more than once, and so does one whose stream
    /// could not be resumed.
    Forked { generation: u64 },
    /// The snapshot has begun to arrive: it will hold everything up to `offset`.
    Started { generation: u64, replid: ReplId, offset: u64 },
    /// The snapshot is complete.
    Completed { generation: u64, bytes: u64 },
    /// The snapshot that begins is made of what is stored there, which is so old.
    FromBase { generation: u64, place: String, age: Duration },
    /// What is stored there up to that byte has served, or is of no use.
    BaseTried { place: String, offset: u64 },
    /// The module in the server may be the cause of the failure that follows.
    ModuleFailed,
    /// A sweep of the server has ended before its end: that is the failure that follows.
    SweepFailed,
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
#[allow(missing_docs)] // A field's name says what it is, or the variant does.
pub enum CaptureError {
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
    /// The snapshot needs a fork, and the server must not be made to.
    #[error("no snapshot without a fork (--no-fork): {0}")]
    NeedsFork(String),
    /// The snapshot's file cannot be used, or the server does not continue behind it.
    #[error("{0}")]
    File(String),
    /// What was stored cannot be read to its end. Another attempt follows with another base.
    #[error("{0}")]
    Base(String),
    /// The snapshot of the first source cannot be copied. Another attempt follows with another offer.
    #[error("the copy of the first source's snapshot: {0}")]
    First(String),
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
    pub fn is_transient(&self) -> bool {
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
            | CaptureError::NeedsFork(_)
            | CaptureError::Base(_)
            | CaptureError::First(_)
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
struct Stop {
    stopped: Arc<AtomicBool>,
    abandoned: Option<Arc<AtomicBool>>,
    presence: Option<Arc<Presence>>,
}

impl Stop {
    /// A stop that `stopped` sets.
    fn new(stopped: Arc<AtomicBool>) -> Stop {
        Stop { stopped, abandoned: None, presence: None }
    }

    /// A stop that the end of the server sets too.
    fn with(self, presence: Arc<Presence>) -> Stop {
        Stop { presence: Some(presence), ..self }
    }

    /// A stop that the end of the server does not set.
    fn without_presence(&self) -> Stop {
        Stop { presence: None, ..self.clone() }
    }

    /// A stop that `abandoned` sets too.
    fn or(&self, abandoned: Arc<AtomicBool>) -> Stop {
        Stop { abandoned: Some(abandoned), ..self.clone() }
    }

    /// Whether the capture has to end.
    fn is_set(&self) -> bool {
        self.check().is_err()
    }

    /// Waits until the stop is set, and returns why.
    async fn wait(&self) -> CaptureError {
        loop {
            match self.check() {
                Ok(()) => tokio::time::sleep(TICK).await,
                Err(why) => return why,
            }
        }
    }

    /// Fails if the stop is set.
    fn check(&self) -> Result<(), CaptureError> {
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
const TICK: Duration = Duration::from_millis(100);

/// The longest silence of the server in a handshake, a snapshot or the stream. Servers send a newline each second while
/// they prepare a snapshot, and drop silent replicas themselves after `repl-timeout`, 60 s by default.
const SILENCE_LIMIT: Duration = Duration::from_secs(60);

#[cfg(test)]
mod tests;
