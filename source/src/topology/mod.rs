//! Topology: which slots of the current snapshot each replica holds, and which replica reads from which other one. It
//! decides only; it does no I/O and reads no clock.
//!
//! ```text
//!   source ──▶ a ──▶ b ──▶ c          by default, a chain: the bytes leave the source once, and each replica's network
//!                                      carries them once in and once out
//!   source ──▶ a ─┬▶ b                 a second reader only if zones or a loss require it
//!                 └▶ c
//! ```
//!
//! Invariants, after every event:
//!
//! - Following `from` from any replica ends at the source: there are no rings.
//! - No replica reads from a peer that does not serve, is silent, is barred for it by an accusation ([`Witness`]),
//!   was lost to this reader, no longer holds the slot that the reader needs next, or holds less than the reader.
//! - No replica has more than `MAX_READERS` readers.
//! - A replica that could read from a peer does not read from the source, unless it began there, or it left a slow
//!   peer.
//!
//! A *splice* keeps one chain through several zones. If a joiner's zone has no free peer but one that feeds a reader in
//! another zone, the joiner takes the place of that reader, which then reads from the joiner. So each network link
//! still carries the bytes once in and once out, and each zone's uplink too.
//!
//! A *swap* repairs a chain that is slow somewhere. A reader changes places with its peer if it has all slots that the
//! peer has, while the source has more, and the peer is slower than another reader of this snapshot has been. So a
//! replica behind a bad link, or with a slow server, moves to the end of the chain. Each pair is swapped at most once,
//! so two replicas that are slow for other reasons are not swapped endlessly.
//!
//! A reader that lends nothing cannot be swapped. It *leaves* a slow peer for another one or for the source. If no
//! reader of this snapshot was ever faster, the source's link could be the slow one, and a second copy through it would
//! slow down all replicas. So the reader first *tries* the source for a moment, one reader at a time, and returns to
//! its peer if the source is not clearly faster.
//!
//! A reader that has become far slower than it was, or gets nothing, although its peer has more, tries the source in
//! the same way. Either its peer lends slowly or its own link has become slow, and a swap would put a slow link in
//! front of a fast one.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::{Duration, Instant};

use remora_protocol::{LossCause, Relaying};

use super::machine::Session;

/// The most readers of one peer. One makes a chain; the second is for another zone's first reader, and for replicas
/// that lost their peer.
const MAX_READERS: usize = 2;

/// How long a reader must have had all slots of its peer, while others have more, before the two are swapped. This is
/// longer than a slot takes on a slow link, and short compared with a sync.
const SLOW_AFTER: Duration = Duration::from_secs(2);

/// How long a replica may send nothing before its readers are assigned other upstreams. It is stopped or cut off,
/// although its connection has not failed yet. Replicas report their progress twice a second at least, except for a
/// moment when they connect.
const SILENT_AFTER: Duration = Duration::from_secs(2);

/// A peer is slow if it receives less than 1/SLOW_PART of the best rate that any reader of this snapshot has reached.
const SLOW_PART: u64 = 2;

/// A reader is fed slowly if it receives nothing, or less than 1/SLOWLY_FED_PART of the best rate that it has reached
/// itself, although its peer has more. A peer with two readers gives each of them half of what it could.
const SLOWLY_FED_PART: u64 = 4;

/// How many more slots others must have before a peer counts as slow. Fewer may be on their way to it.
const AHEAD_SLOTS: u64 = 8;

/// How long a reader must have waited for a slow peer before it tries the source. Longer than [`SLOW_AFTER`]: a trial
/// costs the source's link bytes that were already on their way.
const TRY_AFTER: Duration = Duration::from_secs(4);

/// How long a trial takes: several slots of 1 MiB at 10 MiB/s, and a new connection.
const TRIAL_SPAN: Duration = Duration::from_secs(3);

/// Pause after a trial that showed that the source is not faster.
const TRIAL_PAUSE: Duration = Duration::from_secs(60);

/// The source is faster than a peer if it gives TRIAL_GAIN.0/TRIAL_GAIN.1 of the peer's rate, at least.
const TRIAL_GAIN: (u64, u64) = (3, 2);

/// The replicas that take part in one snapshot, and their upstreams. The module docs state the invariants.
#[derive(Default)]
pub struct Topology {
    generation: u64,
    nodes: BTreeMap<Session, Node>,
    /// Reports of replicas that have lent wrong bytes.
    pub(super) accusations: Accusations,
    /// Pairs that have been swapped: (peer, reader).
    swapped: BTreeSet<(Session, Session)>,
    /// The most bytes per second that a reader of this generation has received.
    best_rate: u64,
    /// The replicas that read from each peer, those included that need no more slots.
    readers: BTreeMap<Session, BTreeSet<Session>>,
    /// Readers that made room for a joiner, and were not yet told.
    spliced: Vec<Assignment>,
    trial: Option<Trial>,
    /// No trial begins before this time.
    no_trial_until: Option<Instant>,
    /// The last [`tick`](Topology::tick).
    ticked: Option<Instant>,
}

/// A reader tries whether the source is faster than its peer.
#[derive(Debug)]
struct Trial {
    reader: Session,
    peer: Session,
    began: Instant,
    /// Bytes that the reader had received.
    bytes: u64,
    /// Bytes per second that the reader received before.
    rate: u64,
}

/// One replica that takes part.
#[derive(Debug)]
struct Node {
    serves: bool,
    zone: String,
    /// As which it accuses others.
    witness: Witness,
    /// The peer that it reads from; `None`: the source.
    from: Option<Session>,
    /// Every peer that it was assigned to. It can have lost no other one.
    assigned: BTreeSet<Session>,
    /// The oldest slot that it can lend.
    oldest: u64,
    /// It holds all slots from `oldest` to below this one.
    held: u64,
    rate: Rate,
    /// Bytes that it has received.
    bytes: u64,
    is_full: bool,
    /// When it last reported its progress.
    last_seen: Instant,
    /// When it reported before that, and what it held then.
    before: (Instant, u64),
    /// The slots that the source had published when it last reported.
    published: u64,
    is_silent: bool,
    /// Whether it needs no more slots.
    is_done: bool,
    /// Peers that it does not read from any more: they were lost, or too slow.
    lost: BTreeSet<Session>,
    /// Since when it has had all slots of its slow peer, or has been fed slowly.
    starved: Option<Instant>,
}

impl Node {
    /// The slots that it held at this time. Between its last two reports they grew evenly.
    fn held_at(&self, time: Instant) -> u64 {
        let (before, held) = self.before;
        let (span, since) = (self.last_seen.saturating_duration_since(before), time.saturating_duration_since(before));
        if since >= span {
            return self.held;
        }
        held + (self.held.saturating_sub(held) as f64 * since.as_secs_f64() / span.as_secs_f64()) as u64
    }
}

/// Bytes per second that a replica received in the last whole [`RATE_SPAN`].
#[derive(Debug, Default)]
struct Rate {
    since: Option<(Instant, u64)>,
    bytes_per_second: Option<u64>,
    /// The highest so far.
    best: u64,
}

/// The time over which a rate is measured: long enough for a few slots on a slow link, since only whole slots count.
const RATE_SPAN: Duration = Duration::from_secs(1);

impl Rate {
    fn sample(&mut self, now: Instant, bytes: u64) {
        let (then, before) = *self.since.get_or_insert((now, bytes));
        let span = now.duration_since(then);
        if span >= RATE_SPAN {
            let rate = (bytes.saturating_sub(before) as f64 / span.as_secs_f64()) as u64;
            self.best = self.best.max(rate);
            self.bytes_per_second = Some(rate);
            self.since = Some((now, bytes));
        }
    }
}

/// A replica's new upstream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Assignment {
    /// The replica that reads.
    pub reader: Session,
    /// The peer to read from; `None`: the source.
    pub from: Option<Session>,
}

/// How a replica joins.
#[derive(Clone, Debug)]
pub struct Joining {
    /// Others may read from it.
    pub serves: bool,
    /// Where it is: nearer peers have the same zone.
    pub zone: String,
    /// As which the replica accuses others.
    pub witness: Witness,
    /// The first slot that the replica needs.
    pub first: u64,
}

impl Topology {
    /// A replica is offered the snapshot of `generation`. Returns the peer that it is to read from; `None`: the source.
    pub fn join(&mut self, now: Instant, generation: u64, session: Session, joining: Joining) -> Option<Session> {
        if generation != self.generation {
            *self = Topology { generation, ..Topology::default() };
        }
        // A replica that joins again keeps its readers. They notice themselves whether it still has the slots that they
        // need.
        self.set(session, None);
        let (lost, assigned) = self.nodes.remove(&session).map(|node| (node.lost, node.assigned)).unwrap_or_default();
        let Joining { serves, zone, witness, first } = joining;
        let node = Node {
            serves,
            zone,
            witness,
            from: None,
            assigned,
            oldest: first,
            held: first,
            rate: Rate::default(),
            bytes: 0,
            is_full: false,
            last_seen: now,
            before: (now, first),
            published: first,
            is_silent: false,
            is_done: false,
            lost,
            starved: None,
        };
        self.nodes.insert(session, node);
        let from = self.best_for(session);
        self.set(session, from);
        let spliced = from.and_then(|peer| self.splice(session, peer));
        self.spliced.extend(spliced);
        from
    }

    /// The new upstreams of readers that made room for a joiner since the last call.
    pub fn spliced(&mut self) -> Vec<Assignment> {
        std::mem::take(&mut self.spliced)
    }

    /// A replica reports its progress and the number of bytes that it has received.
    pub fn progress(&mut self, now: Instant, session: Session, at: Relaying, bytes: u64, is_done: bool) {
        let Some(node) = self.nodes.get_mut(&session) else { return };
        node.before = (node.last_seen, node.held);
        (node.oldest, node.held, node.is_full) = (at.oldest, at.held, at.is_full);
        (node.last_seen, node.is_silent) = (now, false);
        node.is_done |= is_done;
        node.bytes = bytes;
        node.rate.sample(now, bytes);
        self.best_rate = self.best_rate.max(node.rate.bytes_per_second.unwrap_or(0));
    }

    /// A replica can no longer read from this peer. Returns the new upstreams. A report about a peer that the replica
    /// was never assigned to changes nothing.
    pub fn lost(&mut self, reader: Session, peer: Session, cause: LossCause) -> Vec<Assignment> {
        let Some(node) = self.nodes.get_mut(&reader).filter(|node| node.assigned.contains(&peer)) else {
            return Vec::new();
        };
        node.lost.insert(peer);
        let was_read = node.from == Some(peer);
        let mut orphans = BTreeSet::new();
        if was_read {
            orphans.insert(reader);
        }
        if cause == LossCause::Lied {
            self.accusations.accuse(peer, &node.witness);
            let leaves = |reader: &Session| {
                self.nodes.get(reader).is_some_and(|node| self.accusations.bars(peer, &node.witness))
            };
            orphans.extend(self.readers_of(peer).filter(leaves));
        }
        self.place(orphans)
    }

    /// A replica has left, or no longer serves. Returns the new upstreams of its readers.
    pub fn gone(&mut self, session: Session) -> Vec<Assignment> {
        let orphans = self.forget(session);
        self.place(orphans)
    }

    /// The snapshot was revoked: forgets all replicas.
    pub fn clear(&mut self) {
        *self = Topology::default();
    }

    /// Time has passed, and the source has published this many slots. Returns new upstreams.
    pub fn tick(&mut self, now: Instant, published: u64) -> Vec<Assignment> {
        let mut moved = self.leave_silent(now);
        let ticked = self.ticked.replace(now);
        let has_reported = |node: &&mut Node| ticked.is_none_or(|ticked| node.last_seen >= ticked);
        self.nodes.values_mut().filter(has_reported).for_each(|node| node.published = published);
        let readers: Vec<(Session, Session)> =
            self.nodes.iter().filter_map(|(&reader, node)| Some((reader, node.from?))).collect();
        let mut swaps = self.end_trial(now);
        for (reader, peer) in readers {
            let pace = self.pace(reader, peer);
            let Some(node) = self.nodes.get_mut(&reader) else { continue };
            let waited = now.duration_since(*node.starved.get_or_insert(now));
            match pace {
                Pace::Good => node.starved = None,
                Pace::Slow if waited >= SLOW_AFTER && swaps.is_empty() => swaps.extend(self.improve(reader, peer)),
                Pace::Unclear if waited >= TRY_AFTER && swaps.is_empty() => swaps.extend(self.try_source(now, reader)),
                Pace::Slow | Pace::Unclear => {}
            }
        }
        moved.extend(swaps);
        moved
    }

    /// Assigns other upstreams to the readers of replicas that have fallen silent.
    fn leave_silent(&mut self, now: Instant) -> Vec<Assignment> {
        let falls_silent = |node: &Node| !node.is_silent && now.duration_since(node.last_seen) > SILENT_AFTER;
        let silent = self.nodes.iter().filter_map(|(&session, node)| falls_silent(node).then_some(session));
        let silent: Vec<Session> = silent.collect();
        let mut orphans = BTreeSet::new();
        for session in silent {
            orphans.extend(self.readers_of(session));
            if let Some(node) = self.nodes.get_mut(&session) {
                node.is_silent = true;
            }
        }
        self.place(orphans)
    }

    /// The peer that this replica reads from; `None`: it reads from the source or not at all.
    pub fn reads_from(&self, session: Session) -> Option<Session> {
        self.nodes.get(&session)?.from
    }

    /// The oldest slot that this replica can lend, and whether it lends slots at all.
    pub fn lends(&self, session: Session) -> (u64, bool) {
        self.nodes.get(&session).map_or((0, false), |node| (node.oldest, node.serves))
    }

    // ---- decisions ----

    /// How fast a peer is that the reader waits for. Replicas report at different times, and many slots may arrive
    /// between two reports: they are compared at a time of which both have told.
    fn pace(&self, reader: Session, peer: Session) -> Pace {
        let (Some(node), Some(above)) = (self.nodes.get(&reader), self.nodes.get(&peer)) else { return Pace::Good };
        let needs_more = !node.is_done && !node.is_full;
        let time = node.last_seen.min(above.last_seen);
        let waits = needs_more && node.held_at(time) >= above.held_at(time).saturating_sub(1);
        let (ahead, held) = match above.from.and_then(|from| self.nodes.get(&from)) {
            Some(from) => {
                let time = from.last_seen.min(above.last_seen);
                (from.held_at(time), above.held_at(time))
            }
            None => (above.published, above.held),
        };
        let is_behind = !above.is_done && ahead >= held.saturating_add(AHEAD_SLOTS);
        let is_fed_slowly = |rate: u64| rate < (node.rate.best / SLOWLY_FED_PART).max(1);
        if needs_more && !waits && node.rate.bytes_per_second.is_some_and(is_fed_slowly) {
            return Pace::Unclear;
        }
        let Some(rate) = above.rate.bytes_per_second else { return Pace::Good };
        if !waits || !is_behind || self.swapped.contains(&(peer, reader)) {
            Pace::Good
        } else if rate < (self.best_rate / SLOW_PART).max(1) {
            Pace::Slow
        } else if node.serves {
            Pace::Good
        } else {
            Pace::Unclear
        }
    }

    /// Gives the reader of a slow peer a better upstream.
    fn improve(&mut self, reader: Session, peer: Session) -> Vec<Assignment> {
        self.swapped.extend([(peer, reader), (reader, peer)]);
        match self.nodes.get_mut(&reader) {
            Some(node) if !node.serves => {
                node.lost.insert(peer);
                self.place(BTreeSet::from([reader]))
            }
            _ => self.swap(reader, peer),
        }
    }

    /// Swaps a reader with its peer: the reader takes the peer's upstream, and the peer reads from it.
    fn swap(&mut self, reader: Session, peer: Session) -> Vec<Assignment> {
        let (Some(node), Some(above)) = (self.nodes.get(&reader), self.nodes.get(&peer)) else { return Vec::new() };
        let up = above.from;
        let up_is_open = up.is_none_or(|up| !node.lost.contains(&up) && !self.accusations.bars(up, &node.witness));
        let lends = node.serves
            && !node.is_silent
            && !self.accusations.bars(reader, &above.witness)
            && !above.lost.contains(&reader);
        if !up_is_open || !lends || self.readers_of(reader).count() >= MAX_READERS {
            return Vec::new();
        }
        // In this order there is no ring in between.
        self.set(reader, up);
        self.set(peer, Some(reader));
        vec![Assignment { reader, from: up }, Assignment { reader: peer, from: Some(reader) }]
    }

    /// Moves a reader to the source for [`TRIAL_SPAN`].
    fn try_source(&mut self, now: Instant, reader: Session) -> Vec<Assignment> {
        let may_try = self.trial.is_none() && self.no_trial_until.is_none_or(|until| until <= now);
        let Some(node) = self.nodes.get(&reader).filter(|_| may_try) else { return Vec::new() };
        let Some(peer) = node.from else { return Vec::new() };
        // A reader that has all slots of its peer is as fast as the peer is.
        let rates = [self.nodes.get(&peer), Some(node)].map(|node| node?.rate.bytes_per_second);
        let rate = rates.into_iter().flatten().min().unwrap_or(0);
        self.trial = Some(Trial { reader, peer, began: now, bytes: node.bytes, rate });
        self.set(reader, None);
        vec![Assignment { reader, from: None }]
    }

    /// Judges a trial whose time is over. The reader returns to its peer if the source was not faster.
    fn end_trial(&mut self, now: Instant) -> Vec<Assignment> {
        let is_over = |trial: &mut Trial| now.duration_since(trial.began) >= TRIAL_SPAN;
        let Some(Trial { reader, peer, began, bytes, rate }) = self.trial.take_if(is_over) else { return Vec::new() };
        let Some(node) = self.nodes.get(&reader) else { return Vec::new() };
        let measured = (node.bytes.saturating_sub(bytes) as f64 / now.duration_since(began).as_secs_f64()) as u64;
        if node.from.is_some() || node.is_done || node.is_full {
            return Vec::new();
        }
        // The reader may hold slots that the peer lacks yet: it waits for the peer, as before.
        let may_return =
            |above: &Node| above.serves && !above.is_silent && above.oldest <= node.held && !node.lost.contains(&peer);
        let may_return = self.nodes.get(&peer).is_some_and(may_return)
            && !self.accusations.bars(peer, &node.witness)
            && self.readers_of(peer).count() < MAX_READERS
            && !self.below(reader).contains(&peer);
        if measured.saturating_mul(TRIAL_GAIN.1) >= rate.saturating_mul(TRIAL_GAIN.0) {
            if let Some(node) = self.nodes.get_mut(&reader) {
                node.lost.insert(peer);
            }
            return Vec::new();
        }
        self.no_trial_until = Some(now + TRIAL_PAUSE);
        if !may_return {
            return Vec::new();
        }
        self.set(reader, Some(peer));
        vec![Assignment { reader, from: Some(peer) }]
    }

    /// Lets the reader of `peer` that gives way to a joiner, if there is one, read from the joiner.
    fn splice(&mut self, joiner: Session, peer: Session) -> Option<Assignment> {
        let reader = self.readers_of(peer).find(|&reader| self.gives_way(reader, peer, joiner))?;
        self.set(reader, Some(joiner));
        Some(Assignment { reader, from: Some(joiner) })
    }

    /// Whether a reader of `peer` can read from the joiner instead, so that the bytes leave the zone only at its end.
    fn gives_way(&self, reader: Session, peer: Session, joiner: Session) -> bool {
        let [Some(node), Some(above), Some(new)] = [reader, peer, joiner].map(|at| self.nodes.get(&at)) else {
            return false;
        };
        let is_entry = node.zone != above.zone && new.zone == above.zone;
        let is_free = self.readers_of(joiner).next().is_none();
        let lends =
            new.serves && is_free && !self.accusations.bars(joiner, &node.witness) && !node.lost.contains(&joiner);
        reader != joiner && is_entry && lends && new.oldest <= node.held && new.held >= node.held
    }

    /// The number of readers that a joiner must share a peer with, first without the silent ones: they read nothing,
    /// but may come back.
    fn shares(&self, joiner: Session, peer: Session) -> (usize, usize) {
        let readers = self.readers_of(peer).filter(|&reader| !self.gives_way(reader, peer, joiner));
        readers.fold((0, 0), |(active, all), reader| {
            let is_active = self.nodes.get(&reader).is_some_and(|node| !node.is_silent);
            (active + usize::from(is_active), all + 1)
        })
    }

    /// Assigns an upstream to each of `orphans`, first to the one that holds the most slots: the others may then read
    /// from it.
    fn place(&mut self, orphans: BTreeSet<Session>) -> Vec<Assignment> {
        let mut orphans: Vec<Session> = orphans.into_iter().filter(|reader| self.nodes.contains_key(reader)).collect();
        orphans.sort_by_key(|reader| std::cmp::Reverse(self.nodes.get(reader).map_or(0, |node| node.held)));
        for &reader in &orphans {
            self.set(reader, None);
        }
        let mut placed = Vec::new();
        for reader in orphans {
            let from = self.best_for(reader);
            self.set(reader, from);
            placed.push(Assignment { reader, from });
            placed.extend(from.and_then(|peer| self.splice(reader, peer)));
        }
        placed
    }

    /// The best peer for a reader: in its zone, with the fewest readers, with the most slots, in this order of
    /// importance. `None`: the source.
    fn best_for(&self, reader: Session) -> Option<Session> {
        let node = self.nodes.get(&reader)?;
        let below = self.below(reader);
        let candidates = self.nodes.iter().filter(|&(&peer, other)| self.may_read(reader, node, peer, other));
        let candidates = candidates.filter(|(peer, _)| !below.contains(peer));
        let best = candidates.min_by_key(|&(&peer, other)| {
            (other.zone != node.zone, self.shares(reader, peer).0, std::cmp::Reverse(other.held), peer)
        });
        best.map(|(&peer, _)| peer)
    }

    /// Whether a reader may read from this peer, if the peer does not get its slots from the reader.
    fn may_read(&self, reader: Session, node: &Node, peer: Session, other: &Node) -> bool {
        other.serves
            && !other.is_silent
            && !self.accusations.bars(peer, &node.witness)
            && !node.lost.contains(&peer)
            && other.oldest <= node.held
            && other.held >= node.held
            && self.shares(reader, peer).1 < MAX_READERS
    }

    /// The replica, and all that get their slots from it directly or through others.
    fn below(&self, session: Session) -> BTreeSet<Session> {
        let (mut below, mut next) = (BTreeSet::from([session]), vec![session]);
        while let Some(at) = next.pop() {
            for &reader in self.readers.get(&at).into_iter().flatten() {
                if below.insert(reader) {
                    next.push(reader);
                }
            }
        }
        below
    }

    /// The replicas that read from this peer and need further slots.
    fn readers_of(&self, peer: Session) -> impl Iterator<Item = Session> {
        let readers = self.readers.get(&peer).into_iter().flatten().copied();
        readers.filter(|reader| self.nodes.get(reader).is_some_and(|node| !node.is_done))
    }

    /// Sets a reader's upstream.
    fn set(&mut self, reader: Session, from: Option<Session>) {
        let Some(node) = self.nodes.get_mut(&reader) else { return };
        let before = std::mem::replace(&mut node.from, from);
        node.starved = None;
        if let Some(readers) = before.and_then(|before| self.readers.get_mut(&before)) {
            readers.remove(&reader);
        }
        if let Some(peer) = from {
            node.assigned.insert(peer);
            self.readers.entry(peer).or_default().insert(reader);
        }
    }

    /// Removes a replica, and returns its readers.
    fn forget(&mut self, session: Session) -> BTreeSet<Session> {
        let orphans: BTreeSet<Session> = self.readers_of(session).collect();
        self.set(session, None);
        self.nodes.remove(&session);
        for reader in self.readers.remove(&session).unwrap_or_default() {
            if let Some(node) = self.nodes.get_mut(&reader) {
                node.from = None;
            }
        }
        orphans
    }
}

/// How fast a peer is, as its reader sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Pace {
    /// The reader does not wait for it, or cannot get a better one.
    Good,
    /// Far slower than another reader has been.
    Slow,
    /// No reader has been faster, or the reader has become slow although the peer has more. Only a trial shows whether
    /// the source is faster.
    Unclear,
}

// Replicas that report that a peer lent them wrong bytes, and what follows from their reports.
//
// The source does not see what one replica lends to another. A report may be false: the accuser may have bad memory,
// or its operator wants the others to read from the source. So a report costs the peer the accuser as a reader, and no
// other one. The second report, from an accuser that is independent of the first, bans the peer for all.

/// The number of independent accusers after which no replica reads from a peer.
const ACCUSERS_FOR_A_BAN: usize = 2;

/// A replica as an accuser. Two accusers are independent if they are different witnesses.
///
/// A replica that connects again is the same witness, and so are all replicas of another host: they share their memory
/// and their operator. The replicas of the source's own host have one address, and are told apart by their names.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Witness {
    /// All replicas at this address.
    Host(IpAddr),
    /// The replica of this name on the source's host.
    Local(String),
}

impl Witness {
    /// The replica of this name that connected from this address.
    pub fn new(address: IpAddr, name: &str) -> Witness {
        match address.to_canonical() {
            address if address.is_loopback() => Witness::Local(name.to_owned()),
            address => Witness::Host(address),
        }
    }
}

/// The accusers of each peer.
#[derive(Debug, Default)]
pub(super) struct Accusations {
    by_peer: BTreeMap<Session, BTreeSet<Witness>>,
}

impl Accusations {
    /// Notes a report. Further ones about a peer that is banned are not kept.
    fn accuse(&mut self, peer: Session, witness: &Witness) {
        let accusers = self.by_peer.entry(peer).or_default();
        if accusers.len() < ACCUSERS_FOR_A_BAN {
            accusers.insert(witness.clone());
        }
    }

    /// Whether no replica may read from this peer.
    pub(super) fn is_banned(&self, peer: Session) -> bool {
        self.by_peer.get(&peer).is_some_and(|accusers| accusers.len() >= ACCUSERS_FOR_A_BAN)
    }

    /// Whether this reader may not read from the peer: the peer is banned, or the reader itself accused it.
    fn bars(&self, peer: Session, reader: &Witness) -> bool {
        self.by_peer.get(&peer).is_some_and(|accusers| accusers.contains(reader)) || self.is_banned(peer)
    }
}

#[cfg(test)]
mod tests;
