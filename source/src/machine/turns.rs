//! Turns: how many replicas read a snapshot and load it at the same time (`--at-once`). Pure.
//!
//! ```text
//!   joined ──▶ waits for its turn ──▶ offered: reads, loads ──▶ loaded: follows the stream
//!              (in the order of joining)   └── at most N ──┘
//! ```
//!
//! Servers that lost their link together would otherwise be without their data together, and share one network link.
//!
//! Each zone (`--zone`) has `N` turns of its own, and replicas that name none have `N` together. What a turn protects
//! is the zone's: the servers that still answer its clients, and the link into it. So no zone waits for a slow server of
//! another one. What all of them together read from the source is bounded elsewhere: those of one zone read from each
//! other (`topology`), and the source has a limit on its uploads.
//!
//! Four kinds of replicas take no turn:
//!
//! - one whose server has loaded: it needs the stream only;
//! - one that comes back with slots of this snapshot: its server is in the middle of loading, and its own link would
//!   time out;
//! - a standby: it is no server without data, and is of use only if it has its copy before the others are through;
//! - any, while slots of the snapshot are reused: it would find the first ones gone when its turn comes, and each turn
//!   would cost the primary a fork.

use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::time::{Duration, Instant};

use remora_base::mutation::Mutation;
use remora_protocol::WaitCause;

use super::event::Replica;

/// The turns of one source.
#[derive(Debug)]
pub(super) struct Turns {
    /// How many replicas of a zone may have a turn at the same time; `None`: all.
    at_once: Option<NonZeroU32>,
    /// How long a turn takes in each zone, as the last ones did there: its hosts and its link are its own.
    took: BTreeMap<String, Duration>,
    /// How long one takes in any zone, for those that are not in `took`.
    took_anywhere: Option<Duration>,
}

/// The most zones whose time is remembered: replicas choose their names.
const TIMED_ZONES_MAX: usize = 64;

/// What is left of the turns of each zone, while those that wait are gone through in their order.
pub(super) struct Left {
    at_once: usize,
    zones: BTreeMap<String, Zone>,
}

#[derive(Clone, Copy, Default)]
struct Zone {
    /// Replicas that have a turn.
    taken: usize,
    /// Replicas that were left waiting.
    waiting: usize,
}

impl Left {
    /// The next of those that wait takes a turn of its zone.
    ///
    /// # Errors
    /// None is left. Returns how many of the same zone wait before it.
    pub(super) fn take(&mut self, zone: &str) -> Result<(), usize> {
        let is_held_up = Mutation::ZoneHeldUp.is_active() && self.zones.values().any(|zone| zone.waiting > 0);
        let at_once = self.at_once;
        let zone = self.zone(zone);
        if zone.taken >= at_once || is_held_up {
            zone.waiting += 1;
            return Err(zone.waiting - 1);
        }
        zone.taken += usize::from(!Mutation::TurnsUncounted.is_active());
        Ok(())
    }

    /// Whether a zone has no turn left.
    #[cfg(test)]
    pub(super) fn is_none(&self, zone: &str) -> bool {
        self.zones.get(zone).is_some_and(|zone| zone.taken >= self.at_once)
    }

    fn zone(&mut self, name: &str) -> &mut Zone {
        let name = if Mutation::ZonesShareTurns.is_active() { "" } else { name };
        self.zones.entry(name.to_owned()).or_default()
    }
}

impl Turns {
    pub(super) fn new(at_once: Option<NonZeroU32>) -> Turns {
        Turns { at_once, took: BTreeMap::new(), took_anywhere: None }
    }

    /// How many more replicas of each zone may begin now; `None`: any number. A replica that takes nothing for
    /// `stall_limit` keeps nobody waiting.
    pub(super) fn left<'r>(
        &self,
        now: Instant,
        is_windowed: bool,
        stall_limit: Duration,
        replicas: impl Iterator<Item = &'r Replica>,
    ) -> Option<Left> {
        let at_once = self.at_once.filter(|_| !is_windowed)?.get() as usize;
        let mut left = Left { at_once, zones: BTreeMap::new() };
        for replica in replicas.filter(|replica| has_turn(replica, now, stall_limit)) {
            left.zone(&replica.zone).taken += 1;
        }
        Some(left)
    }

    /// A turn has ended: a server of this zone has loaded.
    pub(super) fn ended(&mut self, zone: &str, took: Duration) {
        // The newest counts as much as all before it: a data set grows, and hosts differ.
        let with = |before: Option<Duration>| before.map_or(took, |before| (before + took) / 2);
        self.took_anywhere = Some(with(self.took_anywhere));
        let before = self.took.get(zone).copied();
        if before.is_some() || self.took.len() < TIMED_ZONES_MAX {
            self.took.insert(zone.to_owned(), with(before));
        }
    }

    /// What a replica is told that waits for its turn behind `before` others of its zone.
    pub(super) fn told(&self, zone: &str, before: usize) -> (WaitCause, String) {
        let at_once = self.at_once.map_or(1, NonZeroU32::get);
        let place = match before {
            0 => "this one is next".to_owned(),
            1 => "one more comes before this one".to_owned(),
            more => format!("{more} more come before this one"),
        };
        let rounds = u32::try_from(before / at_once as usize + 1).unwrap_or(u32::MAX);
        let took = self.took.get(zone).copied().or(self.took_anywhere);
        let time = took.and_then(|took| took.checked_mul(rounds));
        let time = time.map_or(String::new(), |time| format!(", for about {} s", time.as_secs_f64().ceil()));
        let (of_zone, limit) = match zone {
            "" => (String::new(), "the limit of this source"),
            zone => (format!(" of zone {zone}"), "the limit of this source for each zone"),
        };
        let load = match at_once {
            1 => format!("another replica{of_zone} loads"),
            more => format!("{more} replicas{of_zone} load"),
        };
        (WaitCause::Turn, format!("{load} at present, which is {limit} (--at-once); {place}{time}"))
    }
}

/// Whether a replica that waits needs a turn to be offered this generation.
pub(super) fn needs_turn(replica: &Replica, generation: u64) -> bool {
    let has_none = !replica.is_loaded() && replica.held_slots(generation) == 0 && !is_exempt(replica);
    let is_forgotten = Mutation::ZonelessTakeNoTurn.is_active() && replica.zone.is_empty();
    has_none && !is_forgotten || Mutation::TurnForAll.is_active()
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_times_of_no_more_zones_are_kept_than_a_limit() {
        let mut turns = Turns::new(NonZeroU32::new(1));
        (0..1000).for_each(|zone: u32| turns.ended(&zone.to_string(), Duration::from_secs(1)));
        assert_eq!(turns.took.len(), TIMED_ZONES_MAX);
        assert!(turns.told("999", 0).1.ends_with("for about 1 s"));
    }
}
