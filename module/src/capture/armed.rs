//! Armed: what the server keeps from `REMORA.ARM` until a fork child has used it. Not here: what the child does with it.
//!
//! ```text
//!            REMORA.ARM                 a child begins           that child is gone
//!   idle ───────────────────▶ armed ──────────────────▶ begun ────────────────────▶ idle
//!     ▲                         │                         │
//!     └─── REMORA.DISARM, or the agent's beat stands still┘
//! ```
//!
//! One arming at a time: two agents that share a primary take turns. It does not survive its agent: the agent beats on the board, and a
//! timer looks once a second. While that timer runs the server does not unload the module.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use remora_fabric::{Memory, handover};
use remora_table::Board;
use remora_table::board::{BOARD_BYTES, Stage, Told, Work};

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

/// The board and the table that were handed over.
pub(crate) struct Armed {
    pub(super) board: Board,
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
    pub(crate) last: Told,
    /// Why the last failure was one.
    pub(crate) last_error: String,
}

struct Kept {
    armed: Option<Armed>,
    history: History,
}

/// Only the server's thread uses it, and its copy in a fork child; the lock is there because Rust can't know.
static KEPT: Mutex<Kept> = Mutex::new(Kept {
    armed: None,
    history: History {
        done: 0,
        failed: 0,
        last: Told { received: 0, published_slots: 0, retired_slots: 0, waits: 0, keys: 0, format: 0, took_micros: 0 },
        last_error: String::new(),
    },
});

/// A panic while it was held leaves it whole: each change is one assignment.
fn kept() -> MutexGuard<'static, Kept> {
    KEPT.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Why an arming was refused.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Refused {
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
pub(crate) fn arm(context: &Context<'_>, address: &str, secret: &str) -> Result<u64, Refused> {
    if !ALLOWED.get() {
        return Err(Refused::Forbidden);
    }
    if let Some(armed) = &kept().armed {
        return Err(Refused::Busy(armed.board.order().generation));
    }
    let mut taken = handover::take(address, secret, HANDOVER_LIMIT)?.into_iter();
    let has = taken.len();
    let incomplete = |needs| Refused::Incomplete { has, needs };
    let board = taken.next().ok_or_else(|| incomplete(1))?;
    let board = Board::adopt(Memory::adopt(board, BOARD_BYTES)?)?;
    let table = taken.next();
    if board.order().work == Work::Walk && table.is_none() {
        return Err(incomplete(2));
    }
    let generation = board.order().generation;
    let timer = context.set_timer::<Look>(LOOK_EVERY_MILLIS, generation);
    let beat = board.orderer_beat();
    kept().armed = Some(Armed { board, table, timer, beat, beat_seen: Instant::now() });
    Ok(generation)
}

/// Forgets the arming of that generation, or whichever there is. False if there was none.
pub(crate) fn disarm(context: &Context<'_>, generation: Option<u64>) -> bool {
    let mut kept = kept();
    let wanted = |armed: &Armed| generation.is_none_or(|generation| generation == armed.board.order().generation);
    let Some(armed) = kept.armed.take_if(|armed| wanted(armed)) else { return false };
    context.stop_timer(armed.timer);
    kept.history.add(&armed.board);
    true
}

/// In a fork child: what its server had kept. The child is the only one who still has a use for it there.
pub(super) fn take_in_child() -> Option<Armed> {
    kept().armed.take()
}

/// What is to be said of it: a word, and the generation if there is one.
pub(crate) fn state() -> (&'static str, Option<u64>) {
    match &kept().armed {
        None => ("idle", None),
        Some(armed) => {
            let word = match armed.board.stage() {
                Stage::Armed | Stage::Asking => "armed",
                Stage::Begun => "writing",
                Stage::Done | Stage::Declined | Stage::Failed => "saving",
            };
            (word, Some(armed.board.order().generation))
        }
    }
}

/// What has been.
pub(crate) fn history() -> History {
    kept().history.clone()
}

impl History {
    /// Counts what a child has made of an arming.
    fn add(&mut self, board: &Board) {
        match board.stage() {
            Stage::Armed | Stage::Asking | Stage::Declined => return,
            Stage::Done => self.done += 1,
            Stage::Begun => {
                self.failed += 1;
                self.last_error = "the child ended before it was done".into();
            }
            Stage::Failed => {
                self.failed += 1;
                self.last_error = board.sentence();
            }
        }
        self.last = board.told();
    }
}

/// The alarm that looks whether the agent still lives.
struct Look;

impl Timer for Look {
    fn ring(context: &Context<'_>, generation: u64) {
        let mut kept = kept();
        let Some(armed) = kept.armed.as_mut() else { return };
        if armed.board.order().generation != generation {
            return;
        }
        let beat = armed.board.orderer_beat();
        if beat != armed.beat {
            (armed.beat, armed.beat_seen) = (beat, Instant::now());
        } else if armed.beat_seen.elapsed() >= Duration::from_secs(AGENT_TIMEOUT.get()) {
            let text = format!("remora: the agent of generation {generation} is gone; its table is given back");
            context.log(LogLevel::Warning, &text);
            if let Some(armed) = kept.armed.take() {
                armed.board.cancel();
                kept.history.add(&armed.board);
            }
            return;
        }
        armed.timer = context.set_timer::<Look>(LOOK_EVERY_MILLIS, generation);
    }
}

/// A fork child has ended: if it has used the arming, there is nothing left to keep.
pub(crate) struct ChildEnded;

impl EventHandler for ChildEnded {
    const EVENT: u64 = EVENT_FORK_CHILD;

    fn handle(context: &Context<'_>, what: u64) {
        let used = || kept().armed.as_ref().is_some_and(|armed| armed.board.stage() != Stage::Armed);
        if what == FORK_CHILD_DIED && used() {
            disarm(context, None);
        }
    }
}
