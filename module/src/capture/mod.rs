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
//!   dropped; whether anything else relies on the child; the version of the file format; the work of a fork child
//!   before it writes its first byte; why a capture fails.
//! - [`walk`]: iterates over the data set, by the module's API, or in the server's own tables where its build is known;
//!   writes into the table, and waits while there is no space; the encoding.
//!
//! The server's own process only keeps two descriptors and checks once a second whether the agent is alive. All work is
//! done in the child, where a bug costs a snapshot and not the server.
//!
//! The child was forked to save something, and does that afterwards. If something fails here before anything was
//! deleted from the child's memory, the page gets the reason, and the server saves everything as usual. If something
//! fails later, the child ends, so that the incomplete rest is not taken for a complete snapshot.

pub(crate) mod walk;

use std::cell::RefCell;
use std::ffi::{CStr, CString};
use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU64};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use std::{fmt, thread};

use remora_fabric::{Memory, handover};
use remora_protocol::MODULE_PROTOCOL;
use remora_table::CapturePage;
use remora_table::server_pages::{CAPTURE_PAGE_BYTES, Stage, Work, WriterStatus};

use crate::api::{
    Command, Context, EVENT_FORK_CHILD, EVENT_PERSISTENCE, EventHandler, FORK_CHILD_DIED, Flag, LogLevel, Number,
    OPTION_HANDLE_IO_ERRORS, OPTION_HANDLE_REPL_ASYNC_LOAD, OPTION_NO_IMPLICIT_SIGNAL_MODIFIED, OwnContext, OwnedStr,
    PERSISTENCE_RDB_START, ServerInfo, StrRef, Timer, TimerId,
};
use crate::{fast, load};

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

/// Handles the beginning of a snapshot.
pub(crate) struct SnapshotBegins;

impl EventHandler for SnapshotBegins {
    const EVENT: u64 = EVENT_PERSISTENCE;

    /// Only a snapshot in a fork child concerns us; a save in the server's own process is left alone.
    fn handle(context: &Context<'_>, what: u64) {
        if what != PERSISTENCE_RDB_START || !context.flags().is_child() {
            return;
        }
        let Some(armed) = take_in_child() else { return };
        if armed.page.stage() != Stage::Armed || armed.page.is_cancelled() {
            return;
        }
        let own = OwnContext::new(context);
        if saves_to_disk() {
            // The file may be that of the sync for which the agent waits, if syncs go to files now. Otherwise it is no
            // concern of the agent: its child is still to come.
            if matches!(syncs_go_to_sockets(&own), Ok(false)) {
                armed.page.decline(&CaptureError::NotExclusive(SharedWith::File).to_string());
            }
            return;
        }
        WORK.set(Some(armed));
        let error = own
            .call(Walk::NAME, &[])
            .map_or(Some("the server gave no reply to REMORA.WALK".into()), |reply| reply.error());
        WORK.with_borrow(|work| {
            if let Some(armed) = work {
                conclude(&own, &armed.page, error);
            }
        });
    }
}

/// Concludes the work, however it ended: even after a panic, the server must not save an incomplete data set.
fn conclude(context: &Context<'_>, page: &CapturePage, error: Option<String>) {
    let why = || error.unwrap_or_else(|| "a bug of remora in the walk; the server's log has the location".into());
    match page.stage() {
        Stage::Done | Stage::Declined => return,
        Stage::Armed | Stage::Asking => return page.decline(&format!("the walk failed: {}", why())),
        Stage::Begun => page.fail(&why()),
        Stage::Failed => {}
    }
    context.log(LogLevel::Warning, &format!("remora: {}; this child ends, and with it the sync", page.status_text()));
    context.fail_child();
}

thread_local! {
    /// Passes the armed state from the event to the command that the event calls.
    static WORK: RefCell<Option<Armed>> = const { RefCell::new(None) };
}

/// `REMORA.WALK`: called by the module itself, in a fork child.
///
/// It is a command because the server reads its clock once per command and not inside of one: so there is one time by
/// which keys are expired or not.
pub(crate) struct Walk;

impl Command for Walk {
    const NAME: &'static CStr = c"remora.walk";
    const FLAGS: &'static CStr = c"admin deny-script";

    fn run(context: &Context<'_>, _arguments: &[StrRef<'_>]) {
        if !context.flags().is_child() {
            return context.reply_error("ERR remora: only the module itself calls REMORA.WALK, in a fork child");
        }
        work(context);
        context.reply_simple(c"OK");
    }
}

/// The body of `REMORA.WALK`.
fn work(context: &Context<'_>) {
    WORK.with_borrow(|work| {
        let Some(armed) = work else { return };
        if let Err(error) = capture(context, armed) {
            match armed.page.stage() {
                Stage::Begun => armed.page.fail(&error.to_string()),
                _ => armed.page.decline(&error.to_string()),
            }
        }
    });
}

fn capture(context: &Context<'_>, armed: &Armed) -> Result<(), CaptureError> {
    let page = &armed.page;
    // Asked once: each answer is many small allocations, which copy pages of a child.
    let info = context.server_info(c"replication").ok_or(CaptureError::NoAnswer("INFO replication"))?;
    let point = walk::fork_point(context, &info)?;
    let eased = without_compression(context);
    match page.order().work {
        Work::Ease => {
            eased?;
            page.ask(&point)?;
            page.begin()?;
        }
        work @ (Work::Walk | Work::FastWalk) => {
            check(context, &info)?;
            let fast = (work == Work::FastWalk).then(|| walk::checked(context)).transpose()?;
            let table = armed.table.as_ref().ok_or(CaptureError::NoTable)?;
            let descriptor = table.try_clone().map_err(|error| CaptureError::System(error.to_string()))?;
            let memory = Memory::adopt(descriptor, page.order().geometry.memory_len())?;
            page.ask(&point)?;
            wait_for_permission(page)?;
            // Held for as long as this process writes to the table. The claim ends with the process, however it ends;
            // then the agent knows that no process writes there any more.
            let _claim = memory.claim()?.ok_or(CaptureError::Claimed)?;
            // Clients that watch a key or have it cached watch the primary's key, which stays.
            context.set_module_options(
                OPTION_HANDLE_IO_ERRORS | OPTION_HANDLE_REPL_ASYNC_LOAD | OPTION_NO_IMPLICIT_SIGNAL_MODIFIED,
            );
            page.begin()?;
            match fast {
                None => walk::run(context, page, memory.into(), &point)?,
                Some(server) => walk::run_fast(context, page, memory.into(), &point, &server)?,
            }
        }
    }
    page.finish();
    Ok(())
}

/// Waits until the agent confirms that the server has forked for it.
fn wait_for_permission(page: &CapturePage) -> Result<(), CaptureError> {
    let asked = Instant::now();
    while !page.is_permitted() {
        if page.is_cancelled() {
            return Err(CaptureError::Cancelled);
        }
        if asked.elapsed() > PERMISSION_LIMIT {
            return Err(CaptureError::NotPermitted(PERMISSION_LIMIT.as_secs()));
        }
        thread::sleep(PERMISSION_POLL);
    }
    Ok(())
}

/// How long a child waits for its permission: the agent has a line to read that was sent before the fork. A child that
/// works for another replica loses this time.
const PERMISSION_LIMIT: Duration = Duration::from_secs(3);

/// How often the child checks for its permission.
const PERMISSION_POLL: Duration = Duration::from_micros(100);

/// Makes the server save without compression: a setting of this process only, since the process is a copy.
fn without_compression(context: &Context<'_>) -> Result<(), CaptureError> {
    let words = ["SET", "rdbcompression", "no"].map(|word| OwnedStr::new(context, word.as_bytes()));
    let arguments: Vec<_> = words.iter().map(OwnedStr::borrow).collect();
    let reply = context.call(c"CONFIG", &arguments).ok_or(CaptureError::NoAnswer("CONFIG SET"))?;
    reply.error().map_or(Ok(()), |text| Err(CaptureError::Refused { command: "CONFIG SET", text }))
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
