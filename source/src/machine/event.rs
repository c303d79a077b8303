//! The machine's input and output: rules and events go in, actions come out. And its records: of the snapshot, of each
//! replica, and of its pauses, between two forks of the primary ([`Forks`]), after snapshots that failed
//! ([`Failures`]), and for a reader that is late ([`Pace`]).

use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::time::{Duration, Instant};

use remora_base::mutation::Mutation;
use remora_fabric::TransportKind;
use remora_process::progress::Tracker;
use remora_protocol as protocol;
use remora_protocol::{Phase, Progress, RefusalCode, WaitCause};
use remora_redis::ReplId;
use remora_table::Origin;

use crate::capture::CaptureEvent;

/// A replica's session, as numbered by the messenger.
pub type Session = u64;

/// Limits that the machine is given once, at its creation.
#[derive(Clone, Debug)]
pub struct Rules {
    /// The highest age of a snapshot that is still offered to another replica.
    pub max_age: Duration,
    /// The highest number of joined replicas.
    pub max_replicas: usize,
    /// How long a replica may hold up the writer of a windowed snapshot.
    pub stall_limit: Duration,
    /// The shortest mean time between two forks of the primary, after the first few; zero: no limit.
    pub fork_interval: Duration,
    /// How long ago a message to subscribers may have been published that a replica gets, before it joined.
    pub repeat_messages: Duration,
    /// Size of a slot.
    pub slot_bytes: u64,
    /// How many replicas of one zone may read a snapshot and load it at the same time; `None`: all.
    pub at_once: Option<NonZeroU32>,
    /// Set if the source stands by for another one: how long a replica waits for one of that source's snapshots before
    /// the server is asked for one. `Duration::MAX`: it is never asked.
    pub standby: Option<Duration>,
}

/// What happened.
#[derive(Debug)]
#[allow(missing_docs)] // A field's name says what it is, or the variant does.
pub enum Event {
    /// An authenticated replica asks for a snapshot.
    Joined { session: Session, name: String, address: String, zone: String, resume: Option<Resume>, reads: Format },
    /// An authenticated standby asks for a copy of each snapshot whose slots are all kept.
    StandbyJoined { session: Session, name: String, address: String },
    /// A source that this one stands by for has a snapshot, which is copied in place of one from the server.
    Copied { generation: u64 },
    /// A replica reports its progress.
    Progress { session: Session, at: Report },
    /// A replica has left, timed out or lost its connection. `done`: it was handed over.
    Gone { session: Session, done: bool },
    /// An event of a capture.
    Capture(CaptureEvent),
    /// Time has passed.
    Tick,
}

/// The format of a snapshot, and the newest format that a replica's server reads.
///
/// Valkey has a format of its own from version 9 on. Only this format has the expiry times of hash fields: if the data
/// set has any, Valkey breaks off a snapshot in the format that it shares with Redis. A server that reads its own
/// format reads the shared one too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// The newest format that the primary knows.
    Own,
    /// A format that older servers and those of the other family know.
    Shared,
}

/// The slots or the data set that a replica holds from an earlier session.
#[derive(Clone, Copy, Debug)]
pub struct Resume {
    /// The generation of that session.
    pub generation: u64,
    /// Slots that the replica holds from the first one without a gap.
    pub held_slots: u64,
    /// Set if the replica's server has loaded the whole snapshot: it needs only the stream of this history, from this
    /// byte on.
    pub loaded: Option<(ReplId, u64)>,
}

impl Resume {
    /// What a replica has asked for.
    pub fn of(asked: &protocol::Resume) -> Resume {
        Resume {
            generation: asked.generation,
            held_slots: asked.held_slots,
            loaded: asked.loaded.then_some((asked.replid, asked.next_byte)),
        }
    }
}

/// The progress that a replica reports.
#[derive(Clone, Copy, Debug)]
pub struct Report {
    /// Where it is on its way.
    pub phase: Phase,
    /// The number of the transport that it reads by.
    pub transport: Option<u8>,
    /// It needs no slot below this one.
    pub slots_below: u64,
    /// Slots that it holds.
    pub slots_held: u64,
    /// Bytes that it has read.
    pub bytes: u64,
    /// The offset up to which its server has applied the stream.
    pub applied_offset: u64,
}

impl Report {
    pub(super) const NOTHING: Report =
        Report { phase: Phase::Waiting, transport: None, slots_below: 0, slots_held: 0, bytes: 0, applied_offset: 0 };

    /// What a replica has said.
    pub fn of(progress: &Progress) -> Report {
        Report {
            phase: progress.phase,
            transport: progress.transport,
            slots_below: progress.slots_below,
            slots_held: progress.slots_held,
            bytes: progress.bytes,
            applied_offset: progress.applied_offset,
        }
    }
}

/// What the source's loop has to do.
#[derive(Debug, PartialEq, Eq)]
#[allow(missing_docs)] // A field's name says what it is, or the variant does.
pub enum Action {
    /// Take a snapshot. `with_stream`: follow the stream too, as no capture follows it yet. `fresh`: into new memory,
    /// as a reader may still use the old one.
    Capture { generation: u64, with_stream: bool, fresh: bool },
    /// Offer this replica the current snapshot and the journal.
    Offer { session: Session },
    /// Tell this replica that it must wait, and why.
    Wait { session: Session, cause: WaitCause, text: String },
    /// Refuse this replica further service, tell it why, and close its lanes.
    Drop { session: Session, code: RefusalCode, text: String },
    /// Tell this replica that the generation it was given has ended, and why.
    GenerationGone { session: Session, generation: u64, text: String },
    /// Revoke read access to this generation's snapshot.
    RevokeSnapshot { generation: u64 },
    /// The stream has ended: revoke read access to its journal and end its thread.
    EndStream { generation: u64 },
    /// End the capture of this snapshot, which no replica waits for.
    StopCapture { generation: u64 },
    /// Let the snapshot's writer reuse every slot below this one. It grows within a generation; each capture begins at
    /// 0.
    AllowRetiring { below: u64 },
}

// The machine's records of the snapshot, the stream and each replica. Others see them through a shared reference only.

/// One snapshot, from the request to its end.
pub struct Snapshot {
    /// Its generation.
    pub generation: u64,
    /// How far it is.
    pub stage: Stage,
    /// What it is written in.
    pub format: Format,
    pub(super) asked: Instant,
    /// When the primary forked for it. Its data are of that moment.
    pub(super) forked: Option<Instant>,
    /// When every slot was there.
    pub(super) sealed: Option<Instant>,
}

/// The stage of a snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)] // A field's name says what it is, or the variant does.
pub enum Stage {
    /// The source has requested the snapshot, and nothing of it has arrived yet.
    Asked,
    /// Slots are being filled.
    Open(Origin),
    /// Every slot is there.
    Sealed { origin: Origin, bytes: u64 },
}

impl Snapshot {
    /// Where the snapshot was taken, once it has begun to arrive.
    pub fn origin(&self) -> Option<Origin> {
        match self.stage {
            Stage::Asked => None,
            Stage::Open(origin) | Stage::Sealed { origin, .. } => Some(origin),
        }
    }

    /// Whether it may be offered to a replica that joined at this time. One that waited for it, or that joined while it
    /// was taken, gets it whatever its age: another one would take as long.
    pub(super) fn is_for(&self, joined: Instant, now: Instant, max_age: Duration) -> bool {
        if Mutation::AgeFromTheRequest.is_active() {
            return now.duration_since(self.asked) <= max_age;
        }
        self.sealed.is_none_or(|sealed| joined <= sealed) || !self.is_old(now, max_age)
    }

    /// Whether its data are older than this.
    pub(super) fn is_old(&self, now: Instant, max_age: Duration) -> bool {
        self.forked.is_some_and(|forked| now.duration_since(forked) > max_age)
    }

    /// Whether the primary has forked for it.
    pub fn has_forked(&self) -> bool {
        if Mutation::ForkFromTheFirstByte.is_active() {
            return self.origin().is_some();
        }
        self.forked.is_some()
    }

    /// Of which moment its data are: that of the fork, and until then that of the request.
    pub fn taken(&self) -> Instant {
        self.forked.unwrap_or(self.asked)
    }

    /// Whether the primary has forked for it, and its child may still be at work.
    pub(super) fn has_a_child(&self) -> bool {
        self.has_forked() && !self.is_sealed()
    }

    /// Whether every slot is there.
    pub fn is_sealed(&self) -> bool {
        matches!(self.stage, Stage::Sealed { .. })
    }
}

/// A joined replica.
pub struct Replica {
    /// The name that it goes by.
    pub name: String,
    /// Where it has come from.
    pub address: String,
    /// Its zone: it takes turns with the replicas of the same one. Empty: it names none.
    pub zone: String,
    /// When it joined.
    pub joined: Instant,
    /// The same, or when it joined first, if its connection broke meanwhile.
    pub(super) since: Instant,
    /// Since when it has its place among those that wait: when it joined, or when it joined first, if its connection
    /// broke while it waited.
    pub(super) place: Instant,
    /// When its last message arrived.
    pub last_seen: Instant,
    /// The generation that it was offered; `None` while it waits.
    pub generation: Option<u64>,
    /// What it has reported last.
    pub at: Report,
    /// How far it is with the snapshot, as its reports say.
    pub tracker: Tracker,
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
    /// Since when it has had the whole snapshot to read and load; `None` once its server has loaded.
    pub(super) turn_since: Option<Instant>,
    /// Its stream has ended and its server has loaded the snapshot: it goes to the primary and needs no other snapshot.
    pub(super) sent_away: bool,
    /// It is a standby: no snapshot is taken or kept for it.
    pub is_standby: bool,
}

impl Replica {
    /// The transport over which it reads; `None` until it does.
    pub fn transport(&self) -> Option<TransportKind> {
        self.at.transport.and_then(TransportKind::from_code)
    }

    /// Why it waits for a snapshot, as it was told; `None` if it has one.
    pub fn waits_because(&self) -> Option<&str> {
        self.told.as_ref().filter(|_| self.generation.is_none()).map(|(_, text)| text.as_str())
    }

    /// The number of slots of this generation that it held when it joined, from the first one without a gap.
    pub fn held_slots(&self, generation: u64) -> u64 {
        self.resume.filter(|resume| resume.generation == generation).map_or(0, |resume| resume.held_slots)
    }

    /// Whether its server had loaded a whole snapshot when it joined, so that it needs the stream only.
    pub fn is_loaded(&self) -> bool {
        self.resume.is_some_and(|resume| resume.loaded.is_some())
    }

    /// Whether its server is loading the snapshot or has loaded it.
    pub fn has_all_slots(&self) -> bool {
        self.at.phase > Phase::Transfer
    }

    /// Whether its server has loaded the snapshot and needs the stream only.
    pub(super) fn has_loaded(&self) -> bool {
        self.at.phase > Phase::Load
    }

    /// Whether it waits for a snapshot.
    pub(super) fn waits(&self) -> bool {
        self.generation.is_none() && !self.sent_away
    }

    /// Whether it still needs slots of the snapshot.
    pub fn is_reading(&self) -> bool {
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
pub struct Status<'a> {
    /// The current snapshot.
    pub snapshot: Option<&'a Snapshot>,
    /// Where the journal begins.
    pub stream: Option<Origin>,
    /// The replicas that have joined.
    pub replicas: &'a BTreeMap<Session, Replica>,
    /// Snapshots that were whole.
    pub snapshots_taken: u64,
    /// How often the primary has forked for one, failed ones included.
    pub forks_made: u64,
    /// Replicas that were handed over.
    pub replicas_done: u64,
    /// Snapshots that failed.
    pub failures: &'a Failures,
    /// Forks of the primary.
    pub forks: &'a Forks,
}

impl<'a> Status<'a> {
    /// The generation that this replica was offered last; `None` while it waits.
    pub fn offered(&self, session: Session) -> Option<u64> {
        self.replicas.get(&session)?.generation
    }

    /// The replicas that wait for a snapshot.
    pub fn waiting(&self) -> impl Iterator<Item = Session> + use<'a> {
        self.replicas.iter().filter(|(_, replica)| replica.waits() && !replica.is_standby).map(|(&session, _)| session)
    }

    /// The history of the stream that this replica was offered last.
    pub fn history_of(&self, session: Session) -> Option<ReplId> {
        self.replicas.get(&session)?.history
    }

    /// The generation of the current snapshot.
    pub fn generation(&self) -> Option<u64> {
        self.snapshot.map(|snapshot| snapshot.generation)
    }

    /// A joined replica.
    pub fn replica(&self, session: Session) -> Option<&'a Replica> {
        self.replicas.get(&session)
    }
}

// Forks of the primary: how many snapshots the source takes in a short time.
//
// Each snapshot makes the primary fork, and until its end the primary copies every page that clients write to. A
// replica that fails and comes back in a loop, or a holder of the token, could make the source take one snapshot after
// the other without end. So the source may take [`FORKS_AT_ONCE`] in a row. Each further one must wait until the
// primary has been left alone for a while: `--fork-interval`, or as long as the last snapshot took.
//
// Several replicas that come one after the other share a retained snapshot, and the first ones of a windowed source
// are within the number above. Neither waits.

/// Snapshots that the source may take without a pause: those of a few replicas that come one after the other to a
/// windowed source, with some failures in between.
pub(crate) const FORKS_AT_ONCE: u32 = 5;

/// The longest pause that follows from a long snapshot: less than the default of `--retry-for`, so that a replica that
/// waits for it does not give up.
const LONGEST_PAUSE: Duration = Duration::from_secs(240);

/// The forks that the source has caused lately. A bucket: each fork takes one out, and the time without a snapshot puts
/// them back.
#[derive(Debug)]
pub struct Forks {
    /// The shortest time in which one fork is put back; zero: forks are not spaced.
    interval: Duration,
    /// Forks that may follow at once.
    left: f64,
    /// How long the last snapshot took, or the present one so far.
    took: Duration,
    looked: Instant,
}

impl Forks {
    pub(super) fn new(now: Instant, interval: Duration) -> Forks {
        Forks { interval, left: f64::from(FORKS_AT_ONCE), took: Duration::ZERO, looked: now }
    }

    /// The primary has forked for a snapshot.
    pub(super) fn forked(&mut self) {
        self.left = (self.left - 1.0).max(0.0);
        self.took = Duration::ZERO;
    }

    /// Time has passed. `has_fork`: a snapshot is being taken.
    pub(super) fn look(&mut self, now: Instant, has_fork: bool) {
        let passed = now.saturating_duration_since(self.looked);
        self.looked = now;
        if has_fork {
            self.took += passed;
        } else if !self.interval.is_zero() {
            let back = passed.as_secs_f64() / self.pause().as_secs_f64();
            self.left = (self.left + back).min(f64::from(FORKS_AT_ONCE));
        }
    }

    /// Why the source does not make the primary fork now; `None` if it may.
    pub fn why_not(&self) -> Option<(WaitCause, String)> {
        if self.interval.is_zero() || self.left >= 1.0 {
            return None;
        }
        let text = format!(
            "the primary has forked for {FORKS_AT_ONCE} snapshots in a short time; the source takes the next one within {} s \
             (--fork-interval on the source)",
            self.pause().as_secs_f64().ceil()
        );
        Some((WaitCause::Busy, text))
    }

    /// The time in which one fork is put back: as long as the last snapshot took, within bounds.
    fn pause(&self) -> Duration {
        self.interval.max(self.took.min(LONGEST_PAUSE))
    }
}

// Failed snapshots: how many failed in a row, and how long the source pauses before the next one.
//
// Every attempt makes the primary fork, and its cause may be one that does not pass, such as an output buffer that is
// too small for the primary's write rate. So the pause grows with the failures in a row. Attempts that end before the
// primary has forked cost it a connection only, and do not count.

/// The failed snapshots of a source.
#[derive(Debug, Default)]
pub struct Failures {
    total: u64,
    /// Snapshots in a row that failed after the primary had forked for them.
    forks_in_a_row: u32,
    last: Option<String>,
}

impl Failures {
    /// Failed snapshots since the source started.
    pub fn total(&self) -> u64 {
        self.total
    }

    /// Why the last snapshot failed; empty if the last one is complete.
    pub fn last(&self) -> &str {
        self.last.as_deref().unwrap_or_default()
    }

    /// Counts a failed snapshot. `has_forked`: the primary had forked for it.
    pub(super) fn count(&mut self, has_forked: bool, text: &str) {
        self.total += 1;
        self.forks_in_a_row = self.forks_in_a_row.saturating_add(u32::from(has_forked));
        self.last = Some(text.to_owned());
    }

    /// A snapshot is complete.
    pub(super) fn succeeded(&mut self) {
        self.forks_in_a_row = 0;
        self.last = None;
    }

    /// A replica has gone, and `left` others remain. If it was the last one, the next was started by an operator who
    /// may have removed the cause, so it does not wait for the end of a long pause.
    pub(super) fn replica_left(&mut self, left: usize, now: Instant, retry: &mut Option<(Instant, String)>) {
        if left > 0 {
            return;
        }
        self.forks_in_a_row = 0;
        if let Some((at, _)) = retry {
            *at = (*at).min(now + FORGIVEN_PAUSE);
        }
    }

    /// The shortest pause before the next snapshot.
    pub(super) fn pause(&self) -> Duration {
        match self.forks_in_a_row.checked_sub(2) {
            // After one failure the caller's own pause is enough.
            None => Duration::ZERO,
            Some(further) => FORK_PAUSE.saturating_mul(1 << further.min(16)).min(FORK_PAUSE_MAX),
        }
    }

    /// What to tell replicas that wait. `text`: why the last snapshot failed; `pause`: how long the source waits now.
    pub(super) fn describe(&self, text: &str, pause: Duration) -> String {
        if self.forks_in_a_row < 2 {
            return format!("the last attempt to take a snapshot failed ({text}); the source tries again soon");
        }
        format!(
            "{} snapshots in a row failed after the primary had forked for them, the last one because {text}; the source takes the \
             next one in {} s",
            self.forks_in_a_row,
            pause.as_secs()
        )
    }
}

/// The pause after two failures in a row. It doubles with each further one.
const FORK_PAUSE: Duration = Duration::from_secs(2);

/// The longest pause: twice the default of `--retry-for`, so that replicas report the cause to their operators while
/// the primary is left alone.
const FORK_PAUSE_MAX: Duration = Duration::from_secs(600);

/// The longest rest of a pause once no replica is left.
const FORGIVEN_PAUSE: Duration = Duration::from_secs(5);

// How late a reader is that others wait for.

/// The least rate of a reader that is in the way, in bytes per second: 4 Mb/s. Two replicas behind a link of 10 Mb/s
/// have more. At this rate a snapshot of 8 GiB takes 4.5 hours, so less is of no use to a replica either.
pub(crate) const LEAST_RATE: u64 = 512 << 10;

/// The longest time between two looks that counts. A longer one means that the source itself was stopped.
const LONGEST_STEP: Duration = Duration::from_secs(1);

/// How late a reader is.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Pace {
    pub(super) late: Duration,
    /// The slots that it had passed at the last look.
    passed: u64,
    looked: Option<Instant>,
}

impl Pace {
    /// The pace of a reader that begins at this slot.
    pub(super) fn from(slot: u64) -> Pace {
        Pace { passed: slot, ..Pace::default() }
    }

    /// The reader has passed the slots below this one. `is_in_the_way`: others wait for it.
    pub(super) fn look(&mut self, now: Instant, slots_below: u64, slot_bytes: u64, is_in_the_way: bool) {
        let step = self.looked.map_or(Duration::ZERO, |looked| now.saturating_duration_since(looked).min(LONGEST_STEP));
        let bytes = slots_below.saturating_sub(self.passed).saturating_mul(slot_bytes);
        if is_in_the_way {
            self.late += step;
        }
        self.late = self.late.saturating_sub(Duration::from_secs_f64(bytes as f64 / LEAST_RATE as f64));
        (self.passed, self.looked) = (slots_below.max(self.passed), Some(now));
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    const INTERVAL: Duration = Duration::from_secs(30);
    const STEP: Duration = Duration::from_millis(250);

    /// The number of snapshots in this time if each is taken as soon as it may be.
    fn taken_in(span: Duration, interval: Duration, took: Duration) -> u32 {
        let begin = Instant::now();
        let (mut forks, mut now, mut taken) = (Forks::new(begin, interval), begin, 0);
        while now < begin + span {
            if forks.why_not().is_none() {
                forks.forked();
                let end = now + took;
                while now < end {
                    now += STEP;
                    forks.look(now, true);
                }
                taken += 1;
            }
            now += STEP;
            forks.look(now, false);
        }
        taken
    }

    #[test]
    fn the_first_snapshots_do_not_wait_and_then_there_is_one_for_each_interval() {
        let second = Duration::from_secs(1);
        assert_eq!(taken_in(10 * second, INTERVAL, second), FORKS_AT_ONCE);
        let in_an_hour = taken_in(3600 * second, INTERVAL, second);
        assert!((114..=122).contains(&in_an_hour), "{in_an_hour}");
    }

    #[test]
    fn after_long_snapshots_the_primary_has_as_much_time_without_a_fork_up_to_a_bound() {
        let minute = Duration::from_secs(60);
        let in_a_day = taken_in(1440 * minute, INTERVAL, 3 * minute);
        assert!((235..=246).contains(&in_a_day), "{in_a_day} of three minutes in 1440 minutes");
        let in_a_day = taken_in(1440 * minute, INTERVAL, 60 * minute);
        assert!((22..=24).contains(&in_a_day), "{in_a_day} of an hour in 24 hours");
    }

    #[test]
    fn an_interval_of_zero_spaces_nothing_and_a_waiting_replica_is_told_the_same_text_throughout() {
        let now = Instant::now();
        let (mut free, mut spaced) = (Forks::new(now, Duration::ZERO), Forks::new(now, INTERVAL));
        for _ in 0..100 {
            free.forked();
            free.look(now + INTERVAL, true);
            assert!(free.why_not().is_none());
        }
        (0..FORKS_AT_ONCE).for_each(|_| spaced.forked());
        let (cause, text) = spaced.why_not().unwrap();
        assert_eq!(cause, WaitCause::Busy);
        assert!(text.contains("within 30 s") && text.contains("--fork-interval"), "{text}");
        spaced.look(now + INTERVAL / 2, false);
        assert_eq!(spaced.why_not(), Some((cause, text)));
        spaced.look(now + INTERVAL, false);
        assert_eq!(spaced.why_not(), None);
    }

    const SLOT: u64 = 1 << 20;
    const LIMIT: Duration = Duration::from_secs(60);

    /// How late a reader is that takes one slot in each `period`, at the latest in an hour.
    fn latest(period: Duration, is_in_the_way: bool) -> Duration {
        let begin = Instant::now();
        let (mut pace, mut most) = (Pace::default(), Duration::ZERO);
        for millis in (0..3_600_000).step_by(50) {
            let since = Duration::from_millis(millis);
            pace.look(begin + since, (since.as_millis() / period.as_millis()) as u64, SLOT, is_in_the_way);
            most = most.max(pace.late);
        }
        most
    }

    #[test]
    fn a_reader_behind_a_slow_link_is_never_late_and_one_that_drips_is() {
        // 10 Mb/s, and half of it.
        for period in [Duration::from_millis(850), Duration::from_millis(1700)] {
            assert!(latest(period, true) < 2 * period, "{period:?}");
        }
        assert!(latest(Duration::from_secs(14), true) > LIMIT);
        assert!(latest(Duration::from_secs(3), true) > LIMIT);
        assert_eq!(latest(Duration::from_secs(3), false), Duration::ZERO);
    }

    #[test]
    fn numbers_that_no_reader_has_and_a_source_that_was_stopped_do_no_harm() {
        let (mut pace, now) = (Pace::default(), Instant::now());
        pace.look(now, 0, SLOT, true);
        pace.look(now + LIMIT * 100, 0, SLOT, true);
        assert_eq!(pace.late, LONGEST_STEP);
        pace.look(now + LIMIT * 101, u64::MAX, u64::MAX, true);
        assert_eq!(pace.late, Duration::ZERO);
    }
}
