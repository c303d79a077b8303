//! Capture: the server's fork child writes the snapshot into the table of the agent that armed it.
//!
//! ```text
//!   agent                           server                                   its fork child
//!   REMORA.ARM ────────────────────▶ takes page and table, keeps them
//!   PSYNC ─────────────────────────▶ +FULLRESYNC, fork ────────────────────▶ PERSISTENCE_RDB_START
//!        ◀══ page: asks, replid, offset ═════════════════════════════════════ exclusive?
//!        ═══ page: may begin, if +FULLRESYNC said the same ════════════════▶
//!        ◀══ table: slots, one after the other ═══════════════════════════════ walk: long strings into slots, and out of its memory
//!        ◀── the RDB of all the rest, the stream ◀──── pipe ◀──────────────── … saves what is left
//!   REMORA.DISARM, or the agent is gone: the server forgets
//! ```
//!
//! - this file: the commands for agents and people; what the server keeps between arming and fork, and when it is
//!   dropped; whether anything else relies on the child; the version of the file format; why a capture fails.
//! - [`child`]: the work of a fork child before its first byte.
//! - [`walk`]: iterates over the data set, by the module's API, or in the server's own tables where its build is known;
//!   writes into the table, and waits while there is no space; the encoding.
//!
//! The server's own process only keeps two descriptors and checks once a second whether the agent is alive. All work is
//! done in the child, where a bug costs a snapshot and not the server.

pub(crate) mod child;
pub(crate) mod walk;

use std::ffi::{CStr, CString};
use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU64};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use remora_fabric::{Memory, handover};
use remora_protocol::MODULE_PROTOCOL;
use remora_table::CapturePage;
use remora_table::server_pages::{CAPTURE_PAGE_BYTES, Stage, Work, WriterStatus};

use crate::api::{
    Command, Context, EVENT_FORK_CHILD, EventHandler, FORK_CHILD_DIED, Flag, LogLevel, Number, OwnedStr, ServerInfo,
    StrRef, Timer, TimerId,
};
use crate::fast;
use crate::load;

pub(crate) use walk::shown;

// The commands of the module, for agents and people.

/// `REMORA.ARM address secret`: an agent offers a page, and a table, for the next snapshot.
pub(crate) struct Arm;

impl Command for Arm {
    const NAME: &'static CStr = c"remora.arm";
    // The secret must not appear in MONITOR or in the slow log; a server that is loading has nothing to capture.
    const FLAGS: &'static CStr = c"admin deny-script no-monitor no-slowlog";

    fn run(context: &Context<'_>, arguments: &[StrRef<'_>]) {
        let [address, secret] = arguments else { return wrong_arity(context, "REMORA.ARM address secret") };
        let (Some(address), Some(secret)) = (address.as_str(), secret.as_str()) else {
            return context.reply_error("ERR remora: address and secret must be UTF-8 text");
        };
        match arm(context, address, secret) {
            Ok(_) => context.reply_simple(c"OK"),
            Err(refused @ ArmError::Busy(_)) => context.reply_error(&format!("BUSY remora: {refused}")),
            Err(refused) => context.reply_error(&format!("ERR remora: {refused}")),
        }
    }
}

/// `REMORA.DISARM [generation]`: the agent does not need the armed state any more.
pub(crate) struct Disarm;

impl Command for Disarm {
    const NAME: &'static CStr = c"remora.disarm";
    const FLAGS: &'static CStr = c"admin deny-script";

    fn run(context: &Context<'_>, arguments: &[StrRef<'_>]) {
        let generation = match arguments {
            [] => None,
            [generation] => match generation.as_str().and_then(|text| text.parse().ok()) {
                Some(generation) => Some(generation),
                None => return context.reply_error("ERR remora: a generation must be a number"),
            },
            _ => return wrong_arity(context, "REMORA.DISARM [generation]"),
        };
        context.reply_integer(i64::from(disarm(context, generation)));
    }
}

/// `REMORA.STATUS`: names and values in turn.
pub(crate) struct Status;

impl Command for Status {
    const NAME: &'static CStr = c"remora.status";
    const FLAGS: &'static CStr = c"admin deny-script allow-loading allow-stale";

    fn run(context: &Context<'_>, _arguments: &[StrRef<'_>]) {
        let (state, generation) = state();
        let history = history();
        let pairs = [
            ("version", env!("CARGO_PKG_VERSION").to_owned()),
            ("protocol", MODULE_PROTOCOL.to_string()),
            ("capture", if ALLOWED.get() { "yes" } else { "no" }.to_owned()),
            ("load", if load::is_registered() { "yes" } else { "no" }.to_owned()),
            ("fast_keys", fast::state()),
            ("fast_capture", fast::offer_walk(context).map_or_else(|why| format!("no: {why}"), |_| "yes".to_owned())),
            ("syncs_go_to", if syncs_go_to_sockets(context).unwrap_or(true) { "sockets" } else { "files" }.to_owned()),
            ("load_state", load::state().to_owned()),
            ("state", state.to_owned()),
            ("generation", generation.map_or(String::new(), |generation| generation.to_string())),
            ("captures_done", history.done.to_string()),
            ("captures_failed", history.failed.to_string()),
            ("last_bytes", history.last.received.to_string()),
            ("last_keys", history.last.keys.to_string()),
            ("last_micros", history.last.took_micros.to_string()),
            ("last_error", history.last_error),
        ];
        context.reply_array(2 * pairs.len());
        for (name, value) in pairs {
            context.reply_bytes(name.as_bytes());
            context.reply_bytes(value.as_bytes());
        }
    }
}

/// `REMORA.HELP`.
pub(crate) struct Help;

impl Command for Help {
    const NAME: &'static CStr = c"remora.help";
    const FLAGS: &'static CStr = c"allow-loading allow-stale";

    fn run(context: &Context<'_>, _arguments: &[StrRef<'_>]) {
        context.reply_array(HELP.len());
        for line in HELP {
            context.reply_bytes(line.as_bytes());
        }
    }
}

const HELP: &[&str] = &[
    "REMORA.ARM address secret -- take a capture page, and a table, offered at a local socket; the next sync's fork \
     child writes into it",
    "REMORA.DISARM [generation] -- forget what was armed; the reply is 1 if something was armed, else 0",
    "REMORA.SWEEP address secret -- take a socket offered at a local socket, and send a snapshot over it without a fork; the reply has \
     its replid and offset",
    "REMORA.LOAD address secret ticket length [FLUSH] -- take memory that fields of the next snapshot refer to",
    "REMORA.STATUS -- names and values: version, protocol, state, counters",
    "REMORA.HELP -- this text",
    "Settings: remora.capture (yes or no), remora.fast-keys (yes or no), remora.sweep-share (percent), remora.agent-timeout (seconds). INFO remora has the same fields as \
     REMORA.STATUS.",
];

fn wrong_arity(context: &Context<'_>, usage: &str) {
    context.reply_error(&format!("ERR remora: wrong number of arguments; usage: {usage}"));
}

// The armed state: what the server keeps from `REMORA.ARM` until a fork child has used it. Not here: what the child
// does.
//
// ```text
//            REMORA.ARM                 a child begins           that child is gone
//   idle ───────────────────▶ armed ──────────────────▶ begun ────────────────────▶ idle
//     ▲                         │                         │
//     └─── REMORA.DISARM, or the agent's beat stops ──────┘
// ```
//
// Only one agent can be armed at a time: two agents that share a primary take turns. The armed state does not outlive
// its agent: the agent beats on the capture page, and a timer checks the beat once a second. While that timer runs,
// the server does not unload the module.

/// Whether captures are allowed.
pub(crate) static ALLOWED: Flag = Flag { name: c"capture", default: true, value: AtomicBool::new(true) };

/// Seconds without a beat after which an agent counts as gone. Many of its beats fit into this time, and it is short
/// compared to the time for which a primary may keep memory without a user.
pub(crate) static AGENT_TIMEOUT: Number =
    Number { name: c"agent-timeout", default: 10, least: 1, most: 3600, value: AtomicU64::new(10) };

/// How long the server waits for an agent to hand over what it has just offered. The agent is on the same host and was
/// ready before it sent the command. The limit is short because the server does nothing else meanwhile.
const HANDOVER_LIMIT: Duration = Duration::from_millis(250);

/// How often the server checks whether the agent is alive.
const LOOK_EVERY_MILLIS: u64 = 1000;

/// The page and the table that an agent has handed over.
pub(crate) struct Armed {
    page: CapturePage,
    /// Open for writing; only the child maps it.
    table: Option<OwnedFd>,
    timer: TimerId,
    beat: u64,
    beat_seen: Instant,
}

/// Counters and the last results, for INFO and `REMORA.STATUS`.
#[derive(Clone, Debug, Default)]
pub(crate) struct History {
    /// Captures that were finished.
    pub(crate) done: u64,
    /// Captures that a child began and did not finish.
    pub(crate) failed: u64,
    /// The final status of the last child.
    pub(crate) last: WriterStatus,
    /// The reason of the last failure.
    pub(crate) last_error: String,
}

struct ServerState {
    armed: Option<Armed>,
    history: History,
}

/// Only the server's thread uses it, and its copy in a fork child; the lock exists because Rust can't know that.
static SERVER_STATE: Mutex<ServerState> = Mutex::new(ServerState {
    armed: None,
    history: History {
        done: 0,
        failed: 0,
        last: WriterStatus {
            received: 0,
            published_slots: 0,
            retired_slots: 0,
            waits: 0,
            keys: 0,
            format: 0,
            took_micros: 0,
        },
        last_error: String::new(),
    },
});

/// A panic while the lock was held leaves the state intact: each change is one assignment.
fn server_state() -> MutexGuard<'static, ServerState> {
    SERVER_STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Why arming was refused.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ArmError {
    #[error("captures are disabled on this server (remora.capture no)")]
    Forbidden,
    #[error("already armed for generation {0}; retry after it completes or after remora.agent-timeout")]
    Busy(u64),
    #[error("the offered descriptors could not be taken: {0}")]
    NotTaken(#[from] remora_fabric::memory::Error),
    #[error("the offered page is not valid: {0}")]
    Senseless(#[from] remora_table::Error),
    #[error("the offer has {has} descriptors, this work needs {needs}")]
    Incomplete { has: usize, needs: usize },
}

/// Takes what is offered at `address` and keeps it for the next snapshot. Returns its generation.
pub(crate) fn arm(context: &Context<'_>, address: &str, secret: &str) -> Result<u64, ArmError> {
    if !ALLOWED.get() {
        return Err(ArmError::Forbidden);
    }
    if let Some(armed) = &server_state().armed {
        return Err(ArmError::Busy(armed.page.order().generation));
    }
    let mut taken = handover::take(address, secret, HANDOVER_LIMIT)?.into_iter();
    let has = taken.len();
    let incomplete = |needs| ArmError::Incomplete { has, needs };
    let page = taken.next().ok_or_else(|| incomplete(1))?;
    let page = CapturePage::adopt(Memory::adopt(page, CAPTURE_PAGE_BYTES)?)?;
    let table = taken.next();
    if page.order().work != Work::Ease && table.is_none() {
        return Err(incomplete(2));
    }
    learn(context);
    let generation = page.order().generation;
    let timer = context.set_timer::<AgentCheck>(LOOK_EVERY_MILLIS, generation);
    let beat = page.orderer_beat();
    server_state().armed = Some(Armed { page, table, timer, beat, beat_seen: Instant::now() });
    Ok(generation)
}

/// Ends the armed state of that generation, or of any generation. False if there was none.
pub(crate) fn disarm(context: &Context<'_>, generation: Option<u64>) -> bool {
    let mut state = server_state();
    let wanted = |armed: &Armed| generation.is_none_or(|generation| generation == armed.page.order().generation);
    let Some(armed) = state.armed.take_if(|armed| wanted(armed)) else { return false };
    context.stop_timer(armed.timer);
    state.history.add(&armed.page);
    true
}

/// In a fork child: takes what the server had kept. Only the child uses it from there on.
fn take_in_child() -> Option<Armed> {
    server_state().armed.take()
}

/// The state for users: a word, and the generation if there is one.
pub(crate) fn state() -> (&'static str, Option<u64>) {
    match &server_state().armed {
        None => ("idle", None),
        Some(armed) => {
            let word = match armed.page.stage() {
                Stage::Armed | Stage::Asking => "armed",
                Stage::Begun => "writing",
                Stage::Done | Stage::Declined | Stage::Failed => "saving",
            };
            (word, Some(armed.page.order().generation))
        }
    }
}

/// The counters and the last results.
pub(crate) fn history() -> History {
    server_state().history.clone()
}

impl History {
    /// Counts the outcome of a child.
    fn add(&mut self, page: &CapturePage) {
        match page.stage() {
            Stage::Armed | Stage::Asking | Stage::Declined => return,
            Stage::Done => self.done += 1,
            Stage::Begun => {
                self.failed += 1;
                self.last_error = "the child ended before it had finished".into();
            }
            Stage::Failed => {
                self.failed += 1;
                self.last_error = page.status_text();
            }
        }
        self.last = page.writer_status();
    }
}

/// The timer that checks whether the agent is alive.
struct AgentCheck;

impl Timer for AgentCheck {
    fn fire(context: &Context<'_>, generation: u64) {
        let mut state = server_state();
        let Some(armed) = state.armed.as_mut() else { return };
        if armed.page.order().generation != generation {
            return;
        }
        let beat = armed.page.orderer_beat();
        if beat != armed.beat {
            (armed.beat, armed.beat_seen) = (beat, Instant::now());
        } else if armed.beat_seen.elapsed() >= Duration::from_secs(AGENT_TIMEOUT.get()) {
            let text = format!("remora: the agent of generation {generation} is gone; its table is released");
            context.log(LogLevel::Warning, &text);
            if let Some(armed) = state.armed.take() {
                armed.page.cancel();
                state.history.add(&armed.page);
            }
            return;
        }
        armed.timer = context.set_timer::<AgentCheck>(LOOK_EVERY_MILLIS, generation);
    }
}

/// A fork child has ended: if it has used the armed state, nothing is left to keep.
pub(crate) struct ChildEnded;

impl EventHandler for ChildEnded {
    const EVENT: u64 = EVENT_FORK_CHILD;

    fn handle(context: &Context<'_>, what: u64) {
        let used = || server_state().armed.as_ref().is_some_and(|armed| armed.page.stage() != Stage::Armed);
        if what == FORK_CHILD_DIED && used() {
            disarm(context, None);
        }
    }
}

// Checks that this fork child works for one replica, and that nothing else relies on what it saves. Only then may
// anything be deleted from its memory.
//
// The evidence is spread over two processes, and each of them checks only what it knows for certain:
//
// ```text
//   the child, of the moment of the fork                     the agent, of its own connection
//   ─ it does not write a file                               ─ +FULLRESYNC has come, with this very replid and offset
//   ─ syncs go to sockets (repl-diskless-sync yes)         ─ it is still open when the child asks
//   ─ one replica, and no more, is waiting for a snapshot
// ```
//
// A server has one child at a time, and sends `+FULLRESYNC` to a replica just before it forks for it; if the fork
// fails, it closes the connection. So if the agent got the line, and its connection is open while this child lives,
// the child belongs to that sync. Since syncs go to sockets, no replica can join it later; since one replica is
// waiting, that replica is the agent. A child for a file (`BGSAVE`), or for another replica, waits in vain for its
// permission, up to three seconds, and then saves everything, uncompressed.

/// Checks that one replica is waiting, and that its snapshot does not go through a file. `info`: INFO replication.
fn check(context: &Context<'_>, info: &ServerInfo<'_>) -> Result<(), CaptureError> {
    if !syncs_go_to_sockets(context)? {
        return Err(CaptureError::NotExclusive(SharedWith::File));
    }
    let connected = info.number(c"connected_slaves").ok_or(CaptureError::NotReported("number of replicas"))?;
    let lines = (0..connected).map(|number| {
        let name = CString::new(format!("slave{number}")).unwrap_or_default();
        info.get(&name).map(str::to_owned)
    });
    match busy(lines) {
        1 => Ok(()),
        count => Err(CaptureError::NotExclusive(SharedWith::Replicas(count))),
    }
}

/// Counts the replicas that are not up to date. A replica that the server counts but does not describe is counted too.
fn busy(lines: impl Iterator<Item = Option<String>>) -> usize {
    lines.filter(|line| !line.as_ref().is_some_and(|line| line.split(',').any(|pair| pair == "state=online"))).count()
}

/// Whether the server sends the snapshot of a sync straight to its replicas.
fn syncs_go_to_sockets(context: &Context<'_>) -> Result<bool, CaptureError> {
    let words = ["GET", "repl-diskless-sync"].map(|word| OwnedStr::new(context, word.as_bytes()));
    let arguments: Vec<_> = words.iter().map(OwnedStr::borrow).collect();
    let reply = context.call(c"CONFIG", &arguments).ok_or(CaptureError::NoAnswer("CONFIG GET"))?;
    Ok(reply.element(1).is_some_and(|value| value.as_bytes() == Some(b"yes".as_slice())))
}

/// Whether this child was forked to write a file (`BGSAVE`, a save point). Servers set the process title of their
/// children by their task, and name the file after the process that writes it.
fn saves_to_disk() -> bool {
    let title = std::fs::read("/proc/self/cmdline").unwrap_or_default();
    title.windows(BGSAVE.len()).any(|part| part == BGSAVE) || holds_a_dump()
}

fn holds_a_dump() -> bool {
    let name = format!("temp-{}.rdb", std::process::id());
    let Ok(descriptors) = std::fs::read_dir("/proc/self/fd") else { return false };
    descriptors
        .flatten()
        .any(|descriptor| std::fs::read_link(descriptor.path()).is_ok_and(|file| file.ends_with(&name)))
}

const BGSAVE: &[u8] = b"rdb-bgsave";

// Which version of the file format the server writes.

/// The version of the format that the server writes, as it was when the server was armed, if it could be asked then.
fn format_version(context: &Context<'_>) -> Result<u16, CaptureError> {
    match FORMAT_VERSION.load(Relaxed) {
        0 => ask_format_version(context),
        version => Ok(version),
    }
}

/// Asks the server itself, before it forks: in a child, the reply would copy some thirty pages.
fn learn(context: &Context<'_>) {
    FORMAT_VERSION.store(ask_format_version(context).unwrap_or(0), Relaxed);
}

/// 0: not known.
static FORMAT_VERSION: AtomicU16 = AtomicU16::new(0);

/// That of its own DUMP. `FUNCTION DUMP` gives it even if there is no key at all.
fn ask_format_version(context: &Context<'_>) -> Result<u16, CaptureError> {
    let dump = OwnedStr::new(context, b"DUMP");
    let reply = context.call(c"FUNCTION", &[dump.borrow()]).ok_or(CaptureError::NoAnswer("FUNCTION DUMP"))?;
    if let Some(text) = reply.error() {
        return Err(CaptureError::Refused { command: "FUNCTION DUMP", text });
    }
    reply.as_bytes().and_then(walk::dump_version).ok_or(CaptureError::NoAnswer("FUNCTION DUMP"))
}

// Why a fork child did not capture.

/// Why a capture in the child was declined or failed; the message becomes the status text on the page.
#[derive(Debug, thiserror::Error)]
enum CaptureError {
    #[error("it was cancelled")]
    Cancelled,
    #[error("the table was full and its agent did not beat for {0} s")]
    Abandoned(u64),
    #[error("no table was handed over")]
    NoTable,
    #[error("another process is writing to that table")]
    Claimed,
    #[error("{0}")]
    NotExclusive(SharedWith),
    #[error("its agent did not say within {0} s that this child works for it only")]
    NotPermitted(u64),
    #[error("{0}")]
    System(String),
    #[error("the server gave no reply to {0}")]
    NoAnswer(&'static str),
    #[error("the server refused {command}: {text}")]
    Refused { command: &'static str, text: String },
    #[error("the server does not report its {0}")]
    NotReported(&'static str),
    #[error("the key {key:?} of database {database} could not be read")]
    Unreadable { database: u32, key: String },
    #[error(
        "the string {key:?} of database {database} was written, but could not be deleted from what the server saves"
    )]
    Undeletable { database: u32, key: String },
    #[error("the fast walk is not offered: {0}")]
    NoFastWalk(String),
    #[error("the tables of database {database} have {seen} keys, and the server says {wanted}")]
    Miscounted { database: u32, seen: u64, wanted: u64 },
    #[error(transparent)]
    Memory(#[from] remora_fabric::memory::Error),
    #[error(transparent)]
    Table(#[from] remora_table::Error),
}

/// Who else may rely on this child.
#[derive(Debug, PartialEq, Eq)]
enum SharedWith {
    /// The server writes a sync's snapshot to a file first.
    File,
    /// This many replicas are waiting for a snapshot, or are being sent one, or the server does not tell their state.
    Replicas(usize),
}

impl fmt::Display for SharedWith {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SharedWith::File => {
                f.write_str("the server writes snapshots of syncs to a file first (repl-diskless-sync no)")
            }
            SharedWith::Replicas(0) => f.write_str("no replica is waiting for this child"),
            SharedWith::Replicas(count) => {
                write!(f, "{count} replicas are waiting, and each of them gets what this child saves")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    fn line(state: &str) -> Option<String> {
        Some(format!("ip=127.0.0.1,port=0,state={state},offset=0,lag=0"))
    }

    #[test]
    fn a_replica_that_is_not_up_to_date_is_busy() {
        assert_eq!(busy([line("online"), line("wait_bgsave"), line("online")].into_iter()), 1);
        assert_eq!(busy([line("wait_bgsave"), line("send_bulk")].into_iter()), 2);
        assert_eq!(busy([line("wait_bgsave"), None].into_iter()), 2, "the server counts one that it does not describe");
        assert_eq!(busy([line("online")].into_iter()), 0);
    }

    #[test]
    fn a_process_that_holds_its_own_dump_file_saves_to_disk() {
        assert!(!saves_to_disk());
        let folder = tempfile::tempdir().unwrap();
        let _file = std::fs::File::create(folder.path().join(format!("temp-{}.rdb", std::process::id()))).unwrap();
        assert!(saves_to_disk());
    }
}
