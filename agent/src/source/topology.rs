//! Topology: who holds what of the present snapshot, and who reads from whom. Decisions only; no I/O, no clock.
//!
//! ```text
//!   source ──▶ a ──▶ b ──▶ c          a chain as long as nobody speaks against it: the bytes leave the source once, and each link
//!                                      carries them once in and once out
//!   source ──▶ a ─┬▶ b                 a second reader only where a zone or a loss makes it so
//!                 └▶ c
//! ```
//!
//! What must hold, after every event:
//!
//! - following `from` from any replica ends at the source: there are no rings;
//! - nobody reads from a peer that does not serve, is silent, has lied to anybody, was lost to that very reader, no longer holds what the reader
//!   needs next, or is behind it;
//! - nobody has more than [`MOST_READERS`] readers;
//! - whoever could read from a peer does not read from the source, but for those who began there.
//!
//! A chain that is slow somewhere is mended by a *swap*: a reader that has all its peer has, while the source has more and the peer is slower
//! than this snapshot's bytes have been seen to come, changes places with it. The one behind a bad link, or before a slow server,
//! so comes to stand at the end. Each pair is swapped once, so that two that are slow for another reason do not go on for ever.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use remora_protocol::{LossCause, Relaying};

use super::machine::Session;

/// Readers of one peer, at most. One is a chain; another makes room for a zone's own, and for those whose peer was lost.
const MOST_READERS: usize = 2;

/// How long a reader must have had all that its peer has, while others have more, before something is done about it. Longer than a
/// slot takes on a slow link, shorter than people wait.
const SLOW_AFTER: Duration = Duration::from_secs(2);

/// How long a replica may say nothing before its readers are sent elsewhere: it is stopped or cut off, though its connection has yet to
/// find that out. Replicas tell how far they are many times a second, but for a moment when they connect.
const SILENT_AFTER: Duration = Duration::from_secs(2);

/// A peer is slow when it gets less than one in so many of the bytes per second that one of this snapshot's readers has got.
const SLOW_PART: u64 = 2;

/// Slots that others must have more than a peer before it can be called slow: what is under way is no evidence.
const AHEAD_SLOTS: u64 = 8;

/// See the module's text.
#[derive(Default)]
pub(super) struct Topology {
    generation: u64,
    nodes: BTreeMap<Session, Node>,
    liars: BTreeSet<Session>,
    /// Pairs that have changed places: (who was read, who read).
    swapped: BTreeSet<(Session, Session)>,
    /// The most bytes per second that a reader of this generation has got.
    best_rate: u64,
}

/// What is known of one replica that takes part.
#[derive(Debug)]
struct Node {
    serves: bool,
    zone: String,
    /// From whom it reads; `None`: from the source.
    from: Option<Session>,
    oldest: u64,
    held: u64,
    rate: Rate,
    is_full: bool,
    /// When it last said how far it is.
    heard: Instant,
    is_silent: bool,
    /// It needs no more slots.
    is_done: bool,
    /// Peers that it can't read from any more.
    lost: BTreeSet<Session>,
    /// Since when it has had all that its peer has.
    starved: Option<Instant>,
}

/// How many bytes a replica gets, over the last whole span.
#[derive(Debug, Default)]
struct Rate {
    since: Option<(Instant, u64)>,
    bytes_per_second: Option<u64>,
}

/// The span over which a rate is taken: some slots even on a slow link, since what comes counts by the piece.
const RATE_SPAN: Duration = Duration::from_secs(1);

impl Rate {
    fn sample(&mut self, now: Instant, bytes: u64) {
        let (then, before) = *self.since.get_or_insert((now, bytes));
        let span = now.duration_since(then);
        if span >= RATE_SPAN {
            self.bytes_per_second = Some((bytes.saturating_sub(before) as f64 / span.as_secs_f64()) as u64);
            self.since = Some((now, bytes));
        }
    }
}

/// A replica is to read from another one from now on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Assignment {
    pub(super) reader: Session,
    /// From whom; `None`: from the source.
    pub(super) from: Option<Session>,
}

/// How a replica joins.
#[derive(Clone, Debug)]
pub(super) struct Joining {
    pub(super) serves: bool,
    pub(super) zone: String,
    /// The first slot that it needs.
    pub(super) first: u64,
}

impl Topology {
    /// A replica was offered the snapshot of `generation`. From whom it is to read; `None`: from the source.
    pub(super) fn join(
        &mut self,
        now: Instant,
        generation: u64,
        session: Session,
        joining: Joining,
    ) -> Option<Session> {
        if generation != self.generation {
            *self = Topology { generation, ..Topology::default() };
        }
        // One that asks once more keeps its readers: they find out by themselves whether it still has what they read.
        let lost = self.nodes.remove(&session).map(|node| node.lost).unwrap_or_default();
        let Joining { serves, zone, first } = joining;
        let node = Node {
            serves,
            zone,
            from: None,
            oldest: first,
            held: first,
            rate: Rate::default(),
            is_full: false,
            heard: now,
            is_silent: false,
            is_done: false,
            lost,
            starved: None,
        };
        self.nodes.insert(session, node);
        let from = self.best_for(session);
        self.set(session, from);
        from
    }

    /// A replica says how far it is, and how many bytes it has got.
    pub(super) fn progress(&mut self, now: Instant, session: Session, at: Relaying, bytes: u64, is_done: bool) {
        let Some(node) = self.nodes.get_mut(&session) else { return };
        (node.oldest, node.held, node.is_full) = (at.oldest, at.held, at.is_full);
        (node.heard, node.is_silent) = (now, false);
        node.is_done |= is_done;
        node.rate.sample(now, bytes);
        self.best_rate = self.best_rate.max(node.rate.bytes_per_second.unwrap_or(0));
    }

    /// A replica can't read from that peer any more.
    pub(super) fn lost(&mut self, reader: Session, peer: Session, cause: LossCause) -> Vec<Assignment> {
        let Some(node) = self.nodes.get_mut(&reader) else { return Vec::new() };
        node.lost.insert(peer);
        let was_read = node.from == Some(peer);
        let mut orphans = BTreeSet::new();
        if was_read {
            orphans.insert(reader);
        }
        if cause == LossCause::Lied && self.liars.insert(peer) {
            orphans.extend(self.readers_of(peer));
        }
        self.place(orphans)
    }

    /// A replica is gone, or serves no more.
    pub(super) fn gone(&mut self, session: Session) -> Vec<Assignment> {
        let orphans = self.forget(session);
        self.place(orphans)
    }

    /// Nobody reads that snapshot any more.
    pub(super) fn clear(&mut self) {
        *self = Topology::default();
    }

    /// Time has passed; the source has published so many slots.
    pub(super) fn tick(&mut self, now: Instant, published: u64) -> Vec<Assignment> {
        let mut moved = self.leave_the_silent(now);
        let readers: Vec<(Session, Session)> =
            self.nodes.iter().filter_map(|(&reader, node)| Some((reader, node.from?))).collect();
        let mut swaps = Vec::new();
        for (reader, peer) in readers {
            let is_slow = self.is_slow(reader, peer, published);
            let Some(node) = self.nodes.get_mut(&reader) else { continue };
            let since = *node.starved.get_or_insert(now);
            if !is_slow {
                node.starved = None;
            } else if now.duration_since(since) >= SLOW_AFTER && swaps.is_empty() {
                swaps.extend(self.swap(reader, peer));
            }
        }
        moved.extend(swaps);
        moved
    }

    /// Those who read from somebody that says nothing any more go elsewhere.
    fn leave_the_silent(&mut self, now: Instant) -> Vec<Assignment> {
        let falls_silent = |node: &Node| !node.is_silent && now.duration_since(node.heard) > SILENT_AFTER;
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

    /// From whom that replica reads; `None`: from the source, or not at all.
    pub(super) fn reads_from(&self, session: Session) -> Option<Session> {
        self.nodes.get(&session)?.from
    }

    /// What others may take from that replica: the oldest slot, and whether it serves at all.
    pub(super) fn lends(&self, session: Session) -> (u64, bool) {
        self.nodes.get(&session).map_or((0, false), |node| (node.oldest, node.serves))
    }

    // ---- decisions ----

    /// The reader waits for its peer, which gets far less than can be had.
    fn is_slow(&self, reader: Session, peer: Session, published: u64) -> bool {
        let (Some(node), Some(above)) = (self.nodes.get(&reader), self.nodes.get(&peer)) else { return false };
        let ahead = match above.from.and_then(|from| self.nodes.get(&from)) {
            Some(from) => from.held,
            None => published,
        };
        let waits = !node.is_done && !node.is_full && node.held >= above.held.saturating_sub(1);
        let crawls = above.rate.bytes_per_second.is_some_and(|rate| rate < (self.best_rate / SLOW_PART).max(1));
        let is_behind = !above.is_done && ahead >= above.held + AHEAD_SLOTS;
        waits && is_behind && crawls && !self.swapped.contains(&(peer, reader))
    }

    /// The reader takes its peer's place, and the peer reads from it.
    fn swap(&mut self, reader: Session, peer: Session) -> Vec<Assignment> {
        self.swapped.extend([(peer, reader), (reader, peer)]);
        let (Some(node), Some(above)) = (self.nodes.get(&reader), self.nodes.get(&peer)) else { return Vec::new() };
        let up = above.from;
        let up_is_open = up.is_none_or(|up| !node.lost.contains(&up) && !self.liars.contains(&up));
        let lends = node.serves && !node.is_silent && !self.liars.contains(&reader) && !above.lost.contains(&reader);
        if !up_is_open || !lends || self.readers_of(reader).count() >= MOST_READERS {
            return Vec::new();
        }
        // First up, then down: in between there is no ring.
        self.set(reader, up);
        self.set(peer, Some(reader));
        vec![Assignment { reader, from: up }, Assignment { reader: peer, from: Some(reader) }]
    }

    /// Finds a place for each of those who have none: first for the one that holds the most, for the others may then read from it.
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
        }
        placed
    }

    /// The best peer for a reader: of its zone, with the fewest readers, that holds the most; `None`: the source.
    fn best_for(&self, reader: Session) -> Option<Session> {
        let node = self.nodes.get(&reader)?;
        let candidates = self.nodes.keys().filter(|&&peer| self.may_read(reader, peer));
        candidates.copied().min_by_key(|&peer| {
            let other = self.nodes.get(&peer);
            let is_far = other.is_none_or(|other| other.zone != node.zone);
            let held = other.map_or(0, |other| other.held);
            (is_far, self.readers_of(peer).count(), std::cmp::Reverse(held), peer)
        })
    }

    fn may_read(&self, reader: Session, peer: Session) -> bool {
        let (Some(node), Some(other)) = (self.nodes.get(&reader), self.nodes.get(&peer)) else { return false };
        other.serves
            && !other.is_silent
            && !self.liars.contains(&peer)
            && !node.lost.contains(&peer)
            && other.oldest <= node.held
            && other.held >= node.held
            && self.readers_of(peer).count() < MOST_READERS
            && !self.is_above(reader, peer)
    }

    /// Whether `peer` gets its slots from `reader`, over however many others, or is it.
    fn is_above(&self, reader: Session, peer: Session) -> bool {
        let mut at = Some(peer);
        while let Some(session) = at {
            if session == reader {
                return true;
            }
            at = self.nodes.get(&session).and_then(|node| node.from);
        }
        false
    }

    fn readers_of(&self, peer: Session) -> impl Iterator<Item = Session> {
        let reads =
            move |(&reader, node): (&Session, &Node)| (node.from == Some(peer) && !node.is_done).then_some(reader);
        self.nodes.iter().filter_map(reads)
    }

    fn set(&mut self, reader: Session, from: Option<Session>) {
        if let Some(node) = self.nodes.get_mut(&reader) {
            node.from = from;
            node.starved = None;
        }
    }

    /// Takes a replica out; those who read from it are given back.
    fn forget(&mut self, session: Session) -> BTreeSet<Session> {
        self.nodes.remove(&session);
        let orphans: BTreeSet<Session> = self.readers_of(session).collect();
        for node in self.nodes.values_mut() {
            if node.from == Some(session) {
                node.from = None;
            }
        }
        orphans
    }
}

#[cfg(test)]
mod tests;
