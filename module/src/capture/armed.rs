//! The armed state: what the server keeps from `REMORA.ARM` until a fork child has used it. Not here: what the child
//! does.
//!
//! ```text
//!            REMORA.ARM                 a child begins           that child is gone
//!   idle ───────────────────▶ armed ──────────────────▶ begun ────────────────────▶ idle
//!     ▲                         │                         │
//!     └─── REMORA.DISARM, or the agent's beat stops ──────┘
//! ```
//!
//! Only one agent can be armed at a time: two agents that share a primary take turns. The armed state does not outlive
//! its agent: the agent beats on the capture page, and a timer checks the beat once a second. While that timer runs,
//! the server does not unload the module.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use remora_fabric::{Memory, handover};
use remora_table::CapturePage;
use remora_table::server_pages::capture_page::{CAPTURE_PAGE_BYTES, Stage, Work, WriterStatus};

use super::format;
use crate::api::{Context, EVENT_FORK_CHILD, EventHandler, FORK_CHILD_DIED, Flag, LogLevel, Number, Timer, TimerId};

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
    pub(super) page: CapturePage,
    /// Open for writing; only the child maps it.
    pub(super) table: Option<OwnedFd>,
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
    format::learn(context);
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
pub(super) fn take_in_child() -> Option<Armed> {
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
