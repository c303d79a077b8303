//! Turns: how many replicas read a snapshot and load it at the same time (`--at-once`). Pure.
//!
//! ```text
//!   joined ──▶ waits for its turn ──▶ offered: reads, loads ──▶ loaded: follows the stream
//!              (in the order of joining)   └── at most N ──┘
//! ```
//!
//! Servers that lost their link together would otherwise be without their data together, and share one network link.
//! Four kinds of replicas take no turn:
//!
//! - one whose server has loaded: it needs the stream only;
//! - one that comes back with slots of this snapshot: its server is in the middle of loading, and its own link would
//!   time out;
//! - a standby: it is no server without data, and is of use only if it has its copy before the others are through;
//! - any, while slots of the snapshot are reused: it would find the first ones gone when its turn comes, and each turn
//!   would cost the primary a fork.

use std::num::NonZeroU32;
use std::time::{Duration, Instant};

use remora_base::mutation::Mutation;
use remora_protocol::WaitCause;

use super::event::Replica;

/// The turns of one source.
#[derive(Debug)]
pub(super) struct Turns {
    /// How many replicas may have a turn at the same time; `None`: all.
    at_once: Option<NonZeroU32>,
    /// How long a turn takes, as the last ones did.
    took: Option<Duration>,
}

impl Turns {
    pub(super) fn new(at_once: Option<NonZeroU32>) -> Turns {
        Turns { at_once, took: None }
    }

    /// How many more replicas may begin now; `None`: any number. A replica that takes nothing for `stall_limit` keeps
    /// nobody waiting.
    pub(super) fn left<'r>(
        &self,
        now: Instant,
        is_windowed: bool,
        stall_limit: Duration,
        replicas: impl Iterator<Item = &'r Replica>,
    ) -> Option<usize> {
        let at_once = self.at_once.filter(|_| !is_windowed)?.get() as usize;
        let taken = replicas.filter(|replica| has_turn(replica, now, stall_limit)).count();
        Some(at_once.saturating_sub(taken))
    }

    /// A turn has ended: its server has loaded.
    pub(super) fn ended(&mut self, took: Duration) {
        // The newest counts as much as all before it: a data set grows, and hosts differ.
        self.took = Some(self.took.map_or(took, |before| (before + took) / 2));
    }

    /// What a replica is told that waits for its turn behind `before` others.
    pub(super) fn told(&self, before: usize) -> (WaitCause, String) {
        let at_once = self.at_once.map_or(1, NonZeroU32::get);
        let place = match before {
            0 => "this one is next".to_owned(),
            1 => "one more comes before this one".to_owned(),
            more => format!("{more} more come before this one"),
        };
        let rounds = u32::try_from(before / at_once as usize + 1).unwrap_or(u32::MAX);
        let time = self.took.and_then(|took| took.checked_mul(rounds));
        let time = time.map_or(String::new(), |time| format!(", for about {} s", time.as_secs_f64().ceil()));
        let load = if at_once == 1 { "another replica loads".to_owned() } else { format!("{at_once} replicas load") };
        (WaitCause::Turn, format!("{load} at present, which is the limit of this source (--at-once); {place}{time}"))
    }
}

/// Whether a replica that waits needs a turn to be offered this generation.
pub(super) fn needs_turn(replica: &Replica, generation: u64) -> bool {
    let has_none = !replica.is_loaded() && replica.held_slots(generation) == 0 && !is_exempt(replica);
    has_none || Mutation::TurnForAll.is_active()
}

/// A standby takes no turn.
fn is_exempt(replica: &Replica) -> bool {
    replica.is_standby && !Mutation::StandbyTakesTurn.is_active()
}

/// Whether this replica has a turn now.
fn has_turn(replica: &Replica, now: Instant, stall_limit: Duration) -> bool {
    let is_loading =
        replica.generation.is_some() && !replica.is_loaded() && !replica.has_loaded() && !is_exempt(replica);
    let is_loading = is_loading || (Mutation::TurnKept.is_active() && replica.generation.is_some());
    // How long a server takes to load what it has got is its agent's to judge.
    let moves = now.saturating_duration_since(replica.moved) <= stall_limit || Mutation::StalledTurnKept.is_active();
    is_loading && (replica.has_all_slots() || moves)
}
