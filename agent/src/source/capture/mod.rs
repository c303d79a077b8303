//! Capture: the primary's side of replication, laid into tables.
//!
//! One thread speaks PSYNC to the server. The snapshot's bytes go from the socket straight into slots of the snapshot
//! table (one `recv`, no buffer between); what follows goes on as the stream, into the journal.
//!
//! ```text
//!            first capture                                a later one, while the stream lives
//!   connect ── PSYNC ? -1 ──▶ +FULLRESYNC          connect ── REPLCONF rdb-only ── PSYNC ? -1 ──▶ +FULLRESYNC
//!      RDB bytes ──▶ snapshot table                   RDB bytes ──▶ snapshot table
//!      stream    ──▶ journal (until stopped)          close: the journal already holds what follows
//! ```
//!
//! Where the server offers it (Valkey's dual channel), the first capture takes two connections: the forked child writes the
//! snapshot into one by itself, which spares the server's main thread a copy of it, and the stream flows over the other from
//! the beginning.
//!
//! ```text
//!   connect ── PSYNC ? -1 ──▶ +DUALCHANNELSYNC ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ▶ PSYNC <replid> <offset + 1> ──▶ +CONTINUE
//!                 connect ── SYNC ──▶ offset, replid, RDB bytes ──▶ snapshot table      stream ──▶ journal
//! ```
//!
//! There is one stream for any number of snapshots: replication offsets are absolute, so a snapshot taken later joins
//! the same journal at its own offset.
//!
//! A journal holds one history. The server continues a broken stream under another replid (`+CONTINUE <new replid>`)
//! after it was promoted, when it follows another primary, or after it was shut down and started again. Then the stream
//! ends before a byte of the new history is appended.
//!
//! It decides nothing: which capture runs when is the business of [`super::owner`]. It ends when its `stop` is set, within
//! one [`TICK`], or when the primary ends it.
//!
//! - `plan`: what a capture is given, reports and fails with. `method`: in which way it takes the snapshot.
//! - `with_module` and `without_module`: the two ways; `join` puts what the server saves behind what its child has written.
//! - `psync_link` drives every handshake; `snapshot` and `stream` fill the tables; `socket` is the connection.

mod join;
mod method;
mod plan;
mod psync_link;
mod snapshot;
mod socket;
mod stream;
mod with_module;
mod without_module;

use remora_table::State;

pub(crate) use self::method::{Rules as ModuleRules, Way};
use self::plan::Stops;
pub(crate) use self::plan::{CaptureEvent, Fault, Plan};
use self::stream::follow;
use self::without_module::Stream;

/// Runs one capture to its end; meant to be the body of a thread.
pub(crate) fn run(plan: Plan) {
    let generation = plan.generation;
    match with_module::take_snapshot(&plan) {
        Ok(Stream::Elsewhere) => {}
        Ok(Stream::Next(wire, mut journal)) => follow(&plan, wire, &mut journal, Stops::of(&plan)),
        Ok(Stream::Flows(thread)) => {
            let _ = thread.join();
        }
        Err(fault) => {
            plan.gauge.snapshot_ended(State::Aborted);
            let _ = plan.events.send(CaptureEvent::Failed { generation, fault });
        }
    }
}
