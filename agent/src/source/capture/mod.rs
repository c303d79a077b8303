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
//! A capture decides nothing: [`super::machine`] decides which one runs when. It ends within one [`TICK`](plan::TICK)
//! after its `stop` is set, or when the primary ends it.
//!
//! - `plan`: what a capture is given, reports and fails with. `method`: how it takes the snapshot.
//! - `with_module` and `without_module`: the two ways; `join` appends the server's part to the part that its child
//!   wrote. `imports` keeps snapshots from a time when the server imported slots of a cluster from being used.
//! - `from_file`: the snapshot from a file (`snapshot_file`), and only the stream from the server.
//! - `psync_link` drives every handshake; `snapshot` and `stream` fill the tables, `sealing` and `journal`
//!   the sealed ones; `socket` is the connection, which owns what was read ahead of it. `pieces` stands in its place in
//!   tests and in the simulation.

#[cfg(test)]
mod boundaries;
mod from_file;
mod imports;
mod join;
mod journal;
mod method;
#[cfg(any(test, feature = "simulation"))]
pub(crate) mod pieces;
mod plan;
pub(crate) mod psync_link;
#[cfg(test)]
mod scripted;
mod sealing;
mod snapshot;
mod snapshot_file;
mod socket;
mod stream;
#[cfg(test)]
mod tests;
mod with_module;
mod without_module;

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use remora_table::State;

pub(crate) use self::journal::Journal;
pub(crate) use self::method::{Method, MethodHistory, ModuleRules};
pub(crate) use self::plan::{CaptureError, CaptureEvent, Plan};
use self::plan::{SILENCE_LIMIT, Stop, TICK};
#[cfg(any(test, feature = "simulation"))]
pub(crate) use self::snapshot::Intake;
pub(crate) use self::snapshot_file::SnapshotFile;
use self::socket::Silence;
#[cfg(any(test, feature = "simulation"))]
pub(crate) use self::socket::{Received, Socket};
#[cfg(any(test, feature = "simulation"))]
pub(crate) use self::stream::Written;
use self::stream::{Follower, Following};
use crate::server::ServerError;
use crate::server::own_changes::why_not_as_its_primary;

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
