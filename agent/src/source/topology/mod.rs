//! Topology: which slots of the current snapshot each replica holds, and which replica reads from which other one. It
//! decides only; it does no I/O and reads no clock.
//!
//! ```text
//!   source ──▶ a ──▶ b ──▶ c          by default, a chain: the bytes leave the source once, and each replica's network carries them
//!                                      once in and once out
//!   source ──▶ a ─┬▶ b                 a second reader only if zones or a loss require it
//!                 └▶ c
//! ```
//!
//! Invariants, after every event:
//!
//! - Following `from` from any replica ends at the source: there are no rings.
//! - No replica reads from a peer that does not serve, is silent, has lent wrong bytes to any reader, was lost to this
//!   reader, no longer holds the slot that the reader needs next, or holds less than the reader.
//! - No replica has more than [`MAX_READERS`] readers.
//! - A replica that could read from a peer does not read from the source, unless it began there.
//!
//! A *swap* repairs a chain that is slow somewhere. A reader changes places with its peer if it has all slots that the
//! peer has, while the source has more, and the peer is slower than another reader of this snapshot has been. So a
//! replica behind a bad link, or with a slow server, moves to the end of the chain. Each pair is swapped at most once,
//! so two replicas that are slow for other reasons are not swapped endlessly.

use std::collections::{BTreeMap, BTreeSet};
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
/// although its connection has not failed yet. Replicas report their progress many times a second, except for a moment
/// when they connect.
const SILENT_AFTER: Duration = Duration::from_secs(2);

/// A peer is slow if it receives less than 1/SLOW_PART of the best rate that any reader of this snapshot has reached.
const SLOW_PART: u64 = 2;

/// How many more slots others must have before a peer counts as slow. Fewer may be on their way to it.
const AHEAD_SLOTS: u64 = 8;

/// The replicas that take part in one snapshot, and their upstreams. The module docs state the invariants.
#[derive(Default)]
pub(crate) struct Topology {
    generation: u64,
    nodes: BTreeMap<Session, Node>,
    /// Replicas that have lent wrong bytes. No replica reads from them.
    liars: BTreeSet<Session>,
    /// Pairs that have been swapped: (peer, reader).
    swapped: BTreeSet<(Session, Session)>,
    /// The most bytes per second that a reader of this generation has received.
    best_rate: u64,
}

/// One replica that takes part.
#[derive(Debug)]
struct Node {
    serves: bool,
    zone: String,
    /// The peer that it reads from; `None`: the source.
    from: Option<Session>,
    /// The oldest slot that it can lend.
    oldest: u64,
    /// It holds all slots from `oldest` to below this one.
    held: u64,
    rate: Rate,
    is_full: bool,
    /// When it last reported its progress.
    last_seen: Instant,
    is_silent: bool,
    /// Whether it needs no more slots.
    is_done: bool,
    /// Peers that it can no longer read from.
    lost: BTreeSet<Session>,
    /// Since when it has had all slots of its slow peer.
    starved: Option<Instant>,
}

/// Bytes per second that a replica received in the last whole [`RATE_SPAN`].
#[derive(Debug, Default)]
struct Rate {
    since: Option<(Instant, u64)>,
    bytes_per_second: Option<u64>,
}

/// The time over which a rate is measured: long enough for a few slots on a slow link, since only whole slots count.
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

/// A replica's new upstream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Assignment {
    pub(crate) reader: Session,
    /// The peer to read from; `None`: the source.
    pub(crate) from: Option<Session>,
}

/// How a replica joins.
#[derive(Clone, Debug)]
pub(crate) struct Joining {
    pub(crate) serves: bool,
    pub(crate) zone: String,
    /// The first slot that the replica needs.
    pub(crate) first: u64,
}

impl Topology {
    /// A replica is offered the snapshot of `generation`. Returns the peer that it is to read from; `None`: the source.
    pub(crate) fn join(
        &mut self,
        now: Instant,
        generation: u64,
        session: Session,
        joining: Joining,
    ) -> Option<Session> {
        if generation != self.generation {
            *self = Topology { generation, ..Topology::default() };
        }
        // A replica that joins again keeps its readers. They notice themselves whether it still has the slots that they
        // need.
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
            last_seen: now,
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

    /// A replica reports its progress and the number of bytes that it has received.
    pub(crate) fn progress(&mut self, now: Instant, session: Session, at: Relaying, bytes: u64, is_done: bool) {
        let Some(node) = self.nodes.get_mut(&session) else { return };
        (node.oldest, node.held, node.is_full) = (at.oldest, at.held, at.is_full);
        (node.last_seen, node.is_silent) = (now, false);
        node.is_done |= is_done;
        node.rate.sample(now, bytes);
        self.best_rate = self.best_rate.max(node.rate.bytes_per_second.unwrap_or(0));
    }

    /// A replica can no longer read from this peer. Returns the new upstreams.
    pub(crate) fn lost(&mut self, reader: Session, peer: Session, cause: LossCause) -> Vec<Assignment> {
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

    /// A replica has left, or no longer serves. Returns the new upstreams of its readers.
    pub(crate) fn gone(&mut self, session: Session) -> Vec<Assignment> {
        let orphans = self.forget(session);
        self.place(orphans)
    }

    /// The snapshot was revoked: forgets all replicas.
    pub(crate) fn clear(&mut self) {
        *self = Topology::default();
    }

    /// Time has passed, and the source has published this many slots. Returns new upstreams.
    pub(crate) fn tick(&mut self, now: Instant, published: u64) -> Vec<Assignment> {
        let mut moved = self.leave_silent(now);
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
    pub(crate) fn reads_from(&self, session: Session) -> Option<Session> {
        self.nodes.get(&session)?.from
    }

    /// The oldest slot that this replica can lend, and whether it lends slots at all.
    pub(crate) fn lends(&self, session: Session) -> (u64, bool) {
        self.nodes.get(&session).map_or((0, false), |node| (node.oldest, node.serves))
    }

    // ---- decisions ----

    /// Whether the reader waits for its peer, and the peer receives slots far slower than others have.
    fn is_slow(&self, reader: Session, peer: Session, published: u64) -> bool {
        let (Some(node), Some(above)) = (self.nodes.get(&reader), self.nodes.get(&peer)) else { return false };
        let ahead = match above.from.and_then(|from| self.nodes.get(&from)) {
            Some(from) => from.held,
            None => published,
        };
        let waits = !node.is_done && !node.is_full && node.held >= above.held.saturating_sub(1);
        let has_low_rate = above.rate.bytes_per_second.is_some_and(|rate| rate < (self.best_rate / SLOW_PART).max(1));
        let is_behind = !above.is_done && ahead >= above.held.saturating_add(AHEAD_SLOTS);
        waits && is_behind && has_low_rate && !self.swapped.contains(&(peer, reader))
    }

    /// Swaps a reader with its peer: the reader takes the peer's upstream, and the peer reads from it.
    fn swap(&mut self, reader: Session, peer: Session) -> Vec<Assignment> {
        self.swapped.extend([(peer, reader), (reader, peer)]);
        let (Some(node), Some(above)) = (self.nodes.get(&reader), self.nodes.get(&peer)) else { return Vec::new() };
        let up = above.from;
        let up_is_open = up.is_none_or(|up| !node.lost.contains(&up) && !self.liars.contains(&up));
        let lends = node.serves && !node.is_silent && !self.liars.contains(&reader) && !above.lost.contains(&reader);
        if !up_is_open || !lends || self.readers_of(reader).count() >= MAX_READERS {
            return Vec::new();
        }
        // In this order there is no ring in between.
        self.set(reader, up);
        self.set(peer, Some(reader));
        vec![Assignment { reader, from: up }, Assignment { reader: peer, from: Some(reader) }]
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
        }
        placed
    }

    /// The best peer for a reader: in its zone, with the fewest readers, with the most slots, in this order of
    /// importance. `None`: the source.
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

    /// Whether a reader may read from this peer.
    fn may_read(&self, reader: Session, peer: Session) -> bool {
        let (Some(node), Some(other)) = (self.nodes.get(&reader), self.nodes.get(&peer)) else { return false };
        other.serves
            && !other.is_silent
            && !self.liars.contains(&peer)
            && !node.lost.contains(&peer)
            && other.oldest <= node.held
            && other.held >= node.held
            && self.readers_of(peer).count() < MAX_READERS
            && !self.is_above(reader, peer)
    }

    /// Whether `peer` is `reader`, or gets its slots from it directly or through others.
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

    /// The replicas that read from this peer and need further slots.
    fn readers_of(&self, peer: Session) -> impl Iterator<Item = Session> {
        let reads =
            move |(&reader, node): (&Session, &Node)| (node.from == Some(peer) && !node.is_done).then_some(reader);
        self.nodes.iter().filter_map(reads)
    }

    /// Sets a reader's upstream.
    fn set(&mut self, reader: Session, from: Option<Session>) {
        if let Some(node) = self.nodes.get_mut(&reader) {
            node.from = from;
            node.starved = None;
        }
    }

    /// Removes a replica, and returns its readers.
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
