//! Why a replica waits: for its turn (`--at-once`), or because it would apply commands too late that stand behind the
//! present snapshot. Pure.
//!
//! ```text
//!   joined ──▶ waits for its turn ──▶ offered: reads, loads ──▶ loaded: follows the stream
//!              (in the order of joining)   └── at most N of a zone ──┘
//! ```
//!
//! Servers that lost their link together would otherwise be without their data together, and share one network link.
//!
//! Each zone (`--zone`) has `N` turns of its own, and replicas that name none have `N` together. What a turn protects
//! is the zone's: the servers that still answer its clients, and the link into it. So no zone waits for a slow server
//! of another one. What all of them together read from the source is bounded elsewhere: those of one zone read from
//! each other (`topology`), and the source has a limit on its uploads.
//!
//! Four kinds of replicas take no turn:
//!
//! - one whose server has loaded: it needs the stream only;
//! - one that comes back with slots of this snapshot: its server is in the middle of loading, and its own link would
//!   time out;
//! - a standby: it is no server without data, and is of use only if it has its copy before the others are through;
//! - any, while slots of the snapshot are reused: it would find the first ones gone when its turn comes, and each turn
//!   would cost the primary a fork.
//!
//! A server runs a command of the stream when it has the data set, however long ago the primary wrote it. That is right
//! for nearly all commands. For a few it is not (`remora_redis::commands::Effect`): an expiry that counts from the
//! moment of the command, a change of the cluster's map, a message to subscribers.
//!
//! ```text
//!   snapshot ──────── PUBLISH ──────────── join            the next snapshot
//!   snapshot ──────── join ─────────────── PUBLISH         served: it comes as late as in any full copy
//! ```
//!
//! So no replica gets such a command that had arrived before it joined. That is what the primary's own full copies
//! promise too: a replica attaches before the fork, or to the output of a fork that has begun.

use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::time::{Duration, Instant};

use remora_base::mutation::Mutation;
use remora_protocol::WaitCause;
use remora_redis::commands::Late;

use super::{Machine, RETURN_LIMIT, Reading, Replica, Resume, Rules};

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

/// The most replicas whose join is remembered after their connection broke, of those that read and of those that wait.
const REMEMBERED_MAX: usize = 1024;

/// Replicas whose connection broke while they read a snapshot.
#[derive(Debug, Default)]
pub(super) struct Lost {
    /// When the last one disconnected without saying that it is done. It may come back.
    pub(super) at: Option<Instant>,
    readers: Vec<Reader>,
    waiting: Vec<Waited>,
}

/// One that waited when its connection broke.
#[derive(Debug)]
struct Waited {
    name: String,
    /// Since when it has had its place among those that wait.
    place: Instant,
    lost: Instant,
}

#[derive(Debug)]
struct Reader {
    name: String,
    generation: u64,
    /// When it joined.
    since: Instant,
    lost: Instant,
}

impl Lost {
    /// The connection of a replica broke.
    pub(super) fn lose(&mut self, now: Instant, replica: &Replica) {
        let Some(generation) = replica.generation else {
            self.waiting.retain(|waited| now.duration_since(waited.lost) < RETURN_LIMIT);
            if self.waiting.len() < REMEMBERED_MAX && !Mutation::PlaceLost.is_active() {
                let (name, place) = (replica.name.clone(), replica.place);
                self.waiting.push(Waited { name, place, lost: now });
            }
            return;
        };
        self.at = Some(now);
        self.readers.retain(|reader| now.duration_since(reader.lost) < RETURN_LIMIT);
        if self.readers.len() < REMEMBERED_MAX {
            let (name, since) = (replica.name.clone(), replica.since);
            self.readers.push(Reader { name, generation, since, lost: now });
        }
    }

    /// When a replica that joins now did so first: one that comes back soon and has slots of its snapshot goes on.
    pub(super) fn joined(&mut self, now: Instant, name: &str, resume: Option<Resume>) -> Instant {
        let is_it = |reader: &Reader| {
            resume.is_some_and(|resume| resume.held_slots > 0 && resume.generation == reader.generation)
                && reader.name == name
                && now.duration_since(reader.lost) < RETURN_LIMIT
        };
        let found = self.readers.iter().position(is_it);
        found.map_or(now, |at| self.readers.swap_remove(at).since)
    }

    /// Since when a replica that joins now has its place among those that wait: one whose connection broke while it
    /// waited, and that comes back soon, keeps it. A switch that fails again and again would else mix the order each
    /// time, and leave some waiting for ever. What must not be applied late is not judged by it.
    pub(super) fn place(&mut self, since: Instant, now: Instant, name: &str) -> Instant {
        let is_it = |waited: &Waited| waited.name == name && now.duration_since(waited.lost) < RETURN_LIMIT;
        let found = self.waiting.iter().position(is_it);
        found.map_or(since, |at| self.waiting.swap_remove(at).place.min(since))
    }
}

/// Why the stream behind the current snapshot must not be applied by this replica: it has a command that arrived before
/// the replica joined.
pub(super) fn too_late(rules: &Rules, reading: &Reading, replica: &Replica) -> Option<Late> {
    too_late_since(rules, reading, replica.since)
}

/// The same for one that joined at this time.
fn too_late_since(rules: &Rules, reading: &Reading, joined: Instant) -> Option<Late> {
    if Mutation::LateCommandsServed.is_active() {
        return None;
    }
    let before = |first: Option<Instant>, grace| {
        first.and_then(|first| first.checked_add(grace)).is_some_and(|until| until < joined)
    };
    if before(reading.first_state, Duration::ZERO) {
        Some(Late::State)
    } else if before(reading.first_message, rules.repeat_messages) {
        Some(Late::Message)
    } else {
        None
    }
}

impl Machine {
    /// Why one that joins now gets another snapshot than the present one, as the end of a sentence.
    pub(crate) fn why_late(&self, now: Instant) -> Option<&'static str> {
        Some(match too_late_since(&self.rules, &self.reading, now)? {
            Late::State => "the stream behind it has commands that must not be applied late",
            Late::Message => "the stream behind it has messages to subscribers (--repeat-messages)",
        })
    }
}

/// Words about the present snapshot, if one of these replicas needs another one because of that; empty if not.
pub(super) fn told_late<'a>(
    rules: &Rules,
    reading: &Reading,
    waiting: impl Iterator<Item = &'a Replica>,
) -> &'static str {
    let why = waiting.filter_map(|replica| too_late(rules, reading, replica)).max();
    match why {
        Some(Late::State) => {
            "; the stream behind the present one has commands that must not be applied late: expiries that count from the moment of \
             the command, or changes of the cluster's slots"
        }
        Some(Late::Message) => {
            "; the stream behind the present one has messages to subscribers, which would be delivered again (--repeat-messages)"
        }
        None => "",
    }
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

#[cfg(test)]
mod late_tests {
    #![allow(clippy::unwrap_used)]

    use remora_redis::ReplId;

    use super::super::{Action, Event, Format, Report, Session, Turns};
    use super::*;
    use crate::capture::CaptureEvent;
    use remora_base::pace::Backoff;

    const SECOND: Duration = Duration::from_secs(1);
    const OFFSET: u64 = 10;

    #[test]
    fn a_place_is_kept_for_one_that_comes_back_soon_and_once() {
        let now = Instant::now() + SECOND * 1000;
        let mut bench = Bench::new(Duration::ZERO);
        bench.now = now;
        bench.machine.turns = Turns::new(std::num::NonZeroU32::new(1));
        let join = |bench: &mut Bench, session: Session, name: &str| {
            let (name, address, zone) = (name.to_owned(), String::new(), String::new());
            bench.apply(Event::Joined { session, name, address, zone, resume: None, reads: Format::Own })
        };
        let offers = |actions: Vec<Action>| {
            let offer = |action| if let Action::Offer { session } = action { Some(session) } else { None };
            actions.into_iter().filter_map(offer).collect::<Vec<_>>()
        };
        join(&mut bench, 1, "a");
        for event in [
            CaptureEvent::Started { generation: 5, replid: "a".repeat(40).parse().unwrap(), offset: OFFSET },
            CaptureEvent::Completed { generation: 5, bytes: 1 },
        ] {
            bench.apply(Event::Capture(event));
        }
        let at = Report { phase: remora_protocol::Phase::Load, ..Report::NOTHING };
        bench.apply(Event::Progress { session: 1, at });
        for (session, name) in [(2, "b"), (3, "c"), (4, "d")] {
            bench.now += SECOND;
            assert!(offers(join(&mut bench, session, name)).is_empty());
        }
        // A switch fails: two that wait come back in the other order, and one too late.
        for session in [2, 3, 4] {
            bench.apply(Event::Gone { session, done: false });
        }
        bench.now += SECOND;
        for (session, name) in [(5, "e"), (6, "c"), (7, "b")] {
            assert!(offers(join(&mut bench, session, name)).is_empty());
        }
        bench.now += RETURN_LIMIT;
        assert!(offers(join(&mut bench, 8, "d")).is_empty());
        let mut order = Vec::new();
        for session in [1, 7, 6, 5] {
            order.extend(offers(bench.apply(Event::Gone { session, done: true })));
        }
        assert_eq!(order, [7, 6, 5, 8]);
    }

    /// A machine whose first snapshot is whole, for a replica that has read it and gone.
    struct Bench {
        machine: Machine,
        now: Instant,
        reading: Reading,
        generation: u64,
    }

    impl Bench {
        fn new(repeat_messages: Duration) -> Bench {
            let rules = Rules {
                max_age: SECOND * 3600,
                max_replicas: 10,
                stall_limit: SECOND * 60,
                fork_interval: Duration::ZERO,
                slot_bytes: 1 << 20,
                repeat_messages,
                at_once: None,
                standby: None,
            };
            let now = Instant::now() + SECOND * 1000;
            let machine = Machine::new(now, rules, Backoff::seeded(1), 5, false);
            let reading = Reading { published: 9, journal_first: OFFSET + 1, journal_end: 500, ..Reading::default() };
            Bench { machine, now, reading, generation: 5 }
        }

        fn apply(&mut self, event: Event) -> Vec<Action> {
            self.machine.apply(self.now, self.reading, event)
        }

        fn join(&mut self, session: Session, resume: Option<Resume>) -> Vec<Action> {
            let (name, address, zone) = (format!("r{}", session % 10), String::new(), String::new());
            self.apply(Event::Joined { session, name, address, zone, resume, reads: Format::Own })
        }

        /// The snapshot that was asked for is taken.
        fn take(&mut self) -> Vec<Action> {
            let (generation, replid, offset) = (self.generation, "a".repeat(40).parse::<ReplId>().unwrap(), OFFSET);
            let mut actions = self.apply(Event::Capture(CaptureEvent::Started { generation, replid, offset }));
            actions.extend(self.apply(Event::Capture(CaptureEvent::Completed { generation, bytes: 1 << 20 })));
            actions
        }

        fn asks_again(&mut self, actions: &[Action]) -> bool {
            let next = self.generation + 1;
            let asks = actions
                .iter()
                .any(|action| matches!(action, Action::Capture { generation, .. } if *generation == next));
            self.generation += u64::from(asks);
            asks
        }
    }

    fn is_offered(actions: &[Action], session: Session) -> bool {
        actions.contains(&Action::Offer { session })
    }

    #[test]
    fn who_joined_before_a_command_is_served_and_who_joins_after_it_gets_the_next_snapshot() {
        for kind in [Late::State, Late::Message] {
            let mut bench = Bench::new(Duration::ZERO);
            bench.join(1, None);
            bench.now += SECOND;
            bench.join(2, None);
            bench.now += SECOND;
            // It arrived behind the snapshot, before the capture's event came.
            let at = Some(bench.now);
            match kind {
                Late::State => bench.reading.first_state = at,
                Late::Message => bench.reading.first_message = at,
            }
            bench.now += SECOND;
            let actions = bench.take();
            assert!(is_offered(&actions, 1) && is_offered(&actions, 2), "{actions:?}");
            for session in [1, 2] {
                bench.apply(Event::Gone { session, done: true });
            }
            assert!(bench.machine.why_late(bench.now).is_some());
            let actions = bench.join(3, None);
            assert!(!is_offered(&actions, 3) && bench.asks_again(&actions), "{actions:?}");
            bench.reading = Reading { first_state: None, first_message: None, ..bench.reading };
            assert!(is_offered(&bench.take(), 3));
        }
    }

    #[test]
    fn messages_may_be_repeated_for_as_long_as_the_operator_says_and_nothing_else() {
        let mut bench = Bench::new(SECOND * 60);
        bench.join(1, None);
        bench.take();
        bench.apply(Event::Gone { session: 1, done: true });
        bench.reading.first_message = Some(bench.now);
        bench.now += SECOND * 60;
        assert_eq!(bench.machine.why_late(bench.now), None);
        assert!(is_offered(&bench.join(2, None), 2));
        bench.apply(Event::Gone { session: 2, done: true });
        bench.reading.first_state = Some(bench.now);
        bench.now += SECOND;
        let actions = bench.join(3, None);
        assert!(!is_offered(&actions, 3) && bench.asks_again(&actions), "{actions:?}");
    }

    #[test]
    fn a_replica_that_comes_back_goes_on_and_another_one_does_not() {
        let mut bench = Bench::new(Duration::ZERO);
        bench.join(1, None);
        bench.take();
        bench.now += SECOND;
        bench.reading.first_state = Some(bench.now);
        bench.now += SECOND;
        bench.apply(Event::Gone { session: 1, done: false });
        let held = |held_slots, loaded| Some(Resume { generation: 5, held_slots, loaded });
        // Session 11 has the name of session 1.
        bench.now += RETURN_LIMIT / 2;
        assert!(is_offered(&bench.join(11, held(4, None)), 11));
        bench.apply(Event::Gone { session: 11, done: false });
        let actions = bench.join(2, held(4, None));
        assert!(!is_offered(&actions, 2), "another one: {actions:?}");
        bench.apply(Event::Gone { session: 2, done: false });
        // Its server has loaded: the primary's own backlog would give it the same commands.
        let mut bench = Bench::new(Duration::ZERO);
        bench.join(1, None);
        bench.take();
        bench.reading.first_state = Some(bench.now);
        bench.now += SECOND * 600;
        let origin = bench.machine.status().stream.unwrap();
        assert!(is_offered(&bench.join(2, held(4, Some((origin.history, 400)))), 2));
    }
}
