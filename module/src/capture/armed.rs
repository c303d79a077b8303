//! Armed: what the server keeps from `REMORA.ARM` until a fork child has used it. Not here: what the child does with it.
//!
//! ```text
//!            REMORA.ARM                 a child begins           that child is gone
//!   idle ───────────────────▶ armed ──────────────────▶ begun ────────────────────▶ idle
//!     ▲                         │                         │
//!     └─── REMORA.DISARM, or the agent's beat stands still┘
//! ```
//!
//! One arming at a time: two agents that share a primary take turns. It does not survive its agent: the agent beats on the page, and a
//! timer looks once a second. While that timer runs the server does not unload the module.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use remora_fabric::{Memory, handover};
use remora_table::CapturePage;
use remora_table::server_pages::capture_page::{CAPTURE_PAGE_BYTES, Stage, Work, WriterStatus};

use crate::api::{Context, EVENT_FORK_CHILD, EventHandler, FORK_CHILD_DIED, Flag, LogLevel, Number, Timer, TimerId};

/// Whether captures are allowed at all.
pub(crate) static ALLOWED: Flag = Flag { name: c"capture", default: true, value: AtomicBool::new(true) };

/// Seconds without a beat after which an agent counts as gone: many of its beats, and short beside the time that a primary may
/// hold memory for nobody.
pub(crate) static AGENT_TIMEOUT: Number =
    Number { name: c"agent-timeout", default: 10, least: 1, most: 3600, value: AtomicU64::new(10) };

/// How long the server waits for an agent to hand over what it has just offered: it is on the same host and was ready before it
/// sent the command. The server does nothing else meanwhile, hence so short.
const HANDOVER_LIMIT: Duration = Duration::from_millis(250);

/// How often the server looks whether the agent lives.
const LOOK_EVERY_MILLIS: u64 = 1000;

/// The page and the table that were handed over.
pub(crate) struct Armed {
    pub(super) page: CapturePage,
    /// Open for writing; mapped by the child alone.
    pub(super) table: Option<OwnedFd>,
    timer: TimerId,
    beat: u64,
    beat_seen: Instant,
}

/// What has been, for INFO and `REMORA.STATUS`.
#[derive(Clone, Debug, Default)]
pub(crate) struct History {
    /// Captures that were finished.
    pub(crate) done: u64,
    /// Captures that a child began and did not finish.
    pub(crate) failed: u64,
    /// What the last child told.
    pub(crate) last: WriterStatus,
    /// Why the last failure was one.
    pub(crate) last_error: String,
}

struct ServerState {
    armed: Option<Armed>,
    history: History,
}

/// Only the server's thread uses it, and its copy in a fork child; the lock is there because Rust can't know.
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

/// A panic while it was held leaves it whole: each change is one assignment.
fn server_state() -> MutexGuard<'static, ServerState> {
    SERVER_STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Why an arming was refused.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ArmError {
    #[error("captures are forbidden here (remora.capture no)")]
    Forbidden,
    #[error("armed already, for generation {0}: it is done soon, or its agent is gone within remora.agent-timeout")]
    Busy(u64),
    #[error("what was offered could not be taken: {0}")]
    NotTaken(#[from] remora_fabric::memory::Error),
    #[error("what was offered makes no sense: {0}")]
    Senseless(#[from] remora_table::Error),
    #[error("the offer has {has} descriptors, this work needs {needs}")]
    Incomplete { has: usize, needs: usize },
}

/// Takes what is offered at `address` and keeps it for the next snapshot. Gives back its generation.
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
    if page.order().work == Work::Walk && table.is_none() {
        return Err(incomplete(2));
    }
    let generation = page.order().generation;
    let timer = context.set_timer::<AgentCheck>(LOOK_EVERY_MILLIS, generation);
    let beat = page.orderer_beat();
    server_state().armed = Some(Armed { page, table, timer, beat, beat_seen: Instant::now() });
    Ok(generation)
}

/// Forgets the arming of that generation, or whichever there is. False if there was none.
pub(crate) fn disarm(context: &Context<'_>, generation: Option<u64>) -> bool {
    let mut state = server_state();
    let wanted = |armed: &Armed| generation.is_none_or(|generation| generation == armed.page.order().generation);
    let Some(armed) = state.armed.take_if(|armed| wanted(armed)) else { return false };
    context.stop_timer(armed.timer);
    state.history.add(&armed.page);
    true
}

/// In a fork child: what its server had kept. The child is the only one who still has a use for it there.
pub(super) fn take_in_child() -> Option<Armed> {
    server_state().armed.take()
}

/// What is to be said of it: a word, and the generation if there is one.
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

/// What has been.
pub(crate) fn history() -> History {
    server_state().history.clone()
}

impl History {
    /// Counts what a child has made of an arming.
    fn add(&mut self, page: &CapturePage) {
        match page.stage() {
            Stage::Armed | Stage::Asking | Stage::Declined => return,
            Stage::Done => self.done += 1,
            Stage::Begun => {
                self.failed += 1;
                self.last_error = "the child ended before it was done".into();
            }
            Stage::Failed => {
                self.failed += 1;
                self.last_error = page.status_text();
            }
        }
        self.last = page.writer_status();
    }
}

/// The alarm that looks whether the agent still lives.
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
            let text = format!("remora: the agent of generation {generation} is gone; its table is given back");
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

/// A fork child has ended: if it has used the arming, there is nothing left to keep.
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
