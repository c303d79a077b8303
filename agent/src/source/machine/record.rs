//! The machine's records of the snapshot, the stream and each replica. Others see them through a shared reference only.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use remora_fabric::TransportKind;
use remora_protocol::{Phase, WaitCause};
use remora_redis::ReplId;
use remora_table::Origin;

use super::event::{Format, Report, Resume, Session};
use super::failures::Failures;
use super::forks::Forks;
use super::pace::Pace;
use crate::progress::tracker::Tracker;

/// One snapshot, from the request to its end.
pub(crate) struct Snapshot {
    pub(crate) generation: u64,
    pub(crate) stage: Stage,
    pub(crate) format: Format,
    pub(super) asked: Instant,
    /// When the primary forked for it. Its data are of that moment.
    pub(super) forked: Option<Instant>,
    /// When every slot was there.
    pub(super) sealed: Option<Instant>,
}

/// The stage of a snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    /// The source has requested the snapshot, and nothing of it has arrived yet.
    Asked,
    /// Slots are being filled.
    Open(Origin),
    /// Every slot is there.
    Sealed { origin: Origin, bytes: u64 },
}

impl Snapshot {
    /// Where the snapshot was taken, once it has begun to arrive.
    pub(crate) fn origin(&self) -> Option<Origin> {
        match self.stage {
            Stage::Asked => None,
            Stage::Open(origin) | Stage::Sealed { origin, .. } => Some(origin),
        }
    }

    /// Whether it may be offered to a replica that joined at this time. One that waited for it, or that joined while it
    /// was taken, gets it whatever its age: another one would take as long.
    pub(super) fn is_for(&self, joined: Instant, now: Instant, max_age: Duration) -> bool {
        #[cfg(any(test, feature = "simulation"))]
        if crate::mutation::Mutation::AgeFromTheRequest.is_active() {
            return now.duration_since(self.asked) <= max_age;
        }
        self.sealed.is_none_or(|sealed| joined <= sealed) || !self.is_old(now, max_age)
    }

    /// Whether its data are older than this.
    pub(super) fn is_old(&self, now: Instant, max_age: Duration) -> bool {
        self.forked.is_some_and(|forked| now.duration_since(forked) > max_age)
    }

    /// Whether the primary has forked for it.
    pub(crate) fn has_forked(&self) -> bool {
        #[cfg(any(test, feature = "simulation"))]
        if crate::mutation::Mutation::ForkFromTheFirstByte.is_active() {
            return self.origin().is_some();
        }
        self.forked.is_some()
    }

    /// Of which moment its data are: that of the fork, and until then that of the request.
    pub(crate) fn taken(&self) -> Instant {
        self.forked.unwrap_or(self.asked)
    }

    /// Whether the primary has forked for it, and its child may still be at work.
    pub(super) fn has_a_child(&self) -> bool {
        self.has_forked() && !self.is_sealed()
    }

    pub(crate) fn is_sealed(&self) -> bool {
        matches!(self.stage, Stage::Sealed { .. })
    }
}

/// A joined replica.
pub(crate) struct Replica {
    pub(crate) name: String,
    pub(crate) address: String,
    pub(crate) joined: Instant,
    /// The same, or when it joined first, if its connection broke meanwhile.
    pub(super) since: Instant,
    /// When its last message arrived.
    pub(crate) last_seen: Instant,
    /// The generation that it was offered; `None` while it waits.
    pub(crate) generation: Option<u64>,
    pub(crate) at: Report,
    /// How far it is with the snapshot, as its reports say.
    pub(crate) tracker: Tracker,
    pub(super) resume: Option<Resume>,
    /// The newest format that its server reads.
    pub(super) reads: Format,
    /// When it last took a slot or entered another phase.
    pub(super) moved: Instant,
    /// How late it is as a reader that others wait for.
    pub(super) pace: Pace,
    /// Why it waits, as it was told last.
    pub(super) told: Option<(WaitCause, String)>,
    /// The history of the stream in its last offer.
    pub(super) history: Option<ReplId>,
    /// When it last reported a higher applied offset, or joined.
    pub(super) advanced: Instant,
    /// Its stream has ended and its server has loaded the snapshot: it goes to the primary and needs no other snapshot.
    pub(super) sent_away: bool,
}

impl Replica {
    /// The transport over which it reads; `None` until it does.
    pub(crate) fn transport(&self) -> Option<TransportKind> {
        self.at.transport.and_then(TransportKind::from_code)
    }

    /// Why it waits for a snapshot, as it was told; `None` if it has one.
    pub(crate) fn waits_because(&self) -> Option<&str> {
        self.told.as_ref().filter(|_| self.generation.is_none()).map(|(_, text)| text.as_str())
    }

    /// The number of slots of this generation that it held when it joined, from the first one without a gap.
    pub(crate) fn held_slots(&self, generation: u64) -> u64 {
        self.resume.filter(|resume| resume.generation == generation).map_or(0, |resume| resume.held_slots)
    }

    /// Whether its server had loaded a whole snapshot when it joined, so that it needs the stream only.
    pub(crate) fn is_loaded(&self) -> bool {
        self.resume.is_some_and(|resume| resume.loaded.is_some())
    }

    /// Whether its server is loading the snapshot or has loaded it.
    pub(crate) fn has_all_slots(&self) -> bool {
        self.at.phase > Phase::Transfer
    }

    /// Whether its server has loaded the snapshot and needs the stream only.
    pub(super) fn has_loaded(&self) -> bool {
        self.at.phase > Phase::Load
    }

    /// Whether it still needs slots of the snapshot.
    pub(crate) fn is_reading(&self) -> bool {
        self.generation.is_some() && matches!(self.at.phase, Phase::Waiting | Phase::Transfer)
    }
}

/// The readers that have passed the fewest slots: the writer of a full ring waits for them. Kept up to date with each
/// report, so that a report need not look at all replicas.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Slowest {
    /// They need no slot below this one; 0 if no replica reads.
    below: u64,
    readers: usize,
}

impl Slowest {
    /// The slowest of these replicas.
    pub(super) fn of(replicas: &BTreeMap<Session, Replica>) -> Slowest {
        let reading = replicas.values().filter(|replica| replica.is_reading()).map(|replica| replica.at.slots_below);
        reading.fold(Slowest::default(), |slowest, below| match slowest {
            Slowest { readers: 0, .. } => Slowest { below, readers: 1 },
            Slowest { below: least, readers } if below == least => Slowest { below, readers: readers + 1 },
            Slowest { below: least, .. } if below < least => Slowest { below, readers: 1 },
            slowest => slowest,
        })
    }

    /// Every reader has passed the slots below this one. No reader: 0.
    pub(super) fn below(self) -> u64 {
        self.below
    }

    /// A reader went on from slot `from` to slot `to`. Returns `false` if it was the last of the slowest: another one
    /// is the slowest now.
    pub(super) fn moved(&mut self, from: u64, to: u64) -> bool {
        if from == self.below && to > from {
            self.readers = self.readers.saturating_sub(1);
        }
        self.readers > 0
    }
}

/// The part of the machine's state that others may see.
#[derive(Clone, Copy)]
pub(crate) struct Status<'a> {
    pub(crate) snapshot: Option<&'a Snapshot>,
    pub(crate) stream: Option<Origin>,
    pub(crate) replicas: &'a BTreeMap<Session, Replica>,
    pub(crate) snapshots_taken: u64,
    pub(crate) replicas_done: u64,
    pub(crate) failures: &'a Failures,
    pub(crate) forks: &'a Forks,
}

impl<'a> Status<'a> {
    /// The generation that this replica was offered last; `None` while it waits.
    pub(crate) fn offered(&self, session: Session) -> Option<u64> {
        self.replicas.get(&session)?.generation
    }

    /// The replicas that wait for a snapshot.
    pub(crate) fn waiting(&self) -> impl Iterator<Item = Session> + use<'a> {
        let waits = |replica: &Replica| replica.generation.is_none() && !replica.sent_away;
        self.replicas.iter().filter(move |(_, replica)| waits(replica)).map(|(&session, _)| session)
    }

    /// The history of the stream that this replica was offered last.
    pub(crate) fn history_of(&self, session: Session) -> Option<ReplId> {
        self.replicas.get(&session)?.history
    }

    /// The generation of the current snapshot.
    pub(crate) fn generation(&self) -> Option<u64> {
        self.snapshot.map(|snapshot| snapshot.generation)
    }

    /// A joined replica.
    pub(crate) fn replica(&self, session: Session) -> Option<&'a Replica> {
        self.replicas.get(&session)
    }
}
