//! The source's state machine: it decides, and nothing else. Events, readings of the tables and the time go in; actions
//! come out.
//!
//! It does no I/O, reads no clock and no shared memory, and draws no random numbers: its pauses follow from the
//! [`Backoff`] that it is given. The same calls therefore give the same actions, and a run can be replayed from its
//! events.
//!
//! ```text
//!                    join                    Started              Completed
//!   (nothing) ──────────────▶ capturing ──────────────▶ open ──────────────▶ sealed ──┐
//!       ▲                        │ Failed                │ Failed              │      │ join while the journal still
//!       │                        ▼                       ▼                     │      │ reaches back: offered again
//!       └──────────── waiting replicas try again, with back-off ◀──────────────┘ ◀────┘ too old, overrun, windowed away
//! ```
//!
//! When the primary's history changes, the stream of the old history ends. Replicas that are still reading slots begin
//! again. Replicas that have all slots keep the journal until they have applied it, and then go to the primary
//! (`Ending`). After that the next snapshot may begin.
//!
//! Invariant, restored by `settle` after every event: *no replica waits while a snapshot could serve it or
//! could be begun for it* (but for its turn, `waiting`), and *a slot is reused only after every replica it was promised
//! to has received it*. The tests in `replay.rs` check both after every event of random runs.
//!
//! One thread decides for all replicas, and a replica reports its progress up to 20 times a second. So a report costs
//! the same however many replicas there are, unless it changes more than the replica's position
//! (`Machine::progress`). Time and the tables' readings take effect at the next [`Event::Tick`], which looks at every
//! replica.
// Larger than the bound: all decisions about snapshots and replicas stand in one place.

mod event;
#[cfg(test)]
mod replay;
mod waiting;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use remora_base::mutation::Mutation;
use remora_protocol::{Phase, RefusalCode, WaitCause};
use remora_redis::ReplId;
use remora_table::Origin;

use self::event::Slowest;
pub use self::event::{Action, Event, Format, Replica, Report, Resume, Rules, Session, Snapshot, Stage, Status};
pub use self::event::{Failures, Forks};
use self::event::{LEAST_RATE, Pace};
use self::waiting::Lost;
use self::waiting::{Left, Turns};
use super::capture::{CaptureError, CaptureEvent};
use super::gauge::Reading;
use remora_base::pace::Backoff;
use remora_process::progress::Tracker;

/// How long a stream without replicas is kept for one whose connection broke. A replica tries again for as long, by
/// default (`--retry-for`).
const RETURN_LIMIT: Duration = Duration::from_secs(60);

/// The source's decision state. The module docs describe its states and invariants.
pub struct Machine {
    rules: Rules,
    /// The reading that came with the current event.
    reading: Reading,
    snapshot: Option<Snapshot>,
    /// Where the stream in the journal began.
    stream: Option<Origin>,
    /// A stream that has ended and is still read. No other stream begins meanwhile: both would use the same memory.
    ending: Option<Ending>,
    replicas: BTreeMap<Session, Replica>,
    /// The readers that have passed the fewest slots.
    slowest: Slowest,
    /// Whether a replica waits.
    has_waiting: bool,
    next_generation: u64,
    eager: bool,
    /// When a replica last needed slots of the snapshot, or its capture began.
    unread_since: Instant,
    lost: Lost,
    /// When the next capture may begin after one that failed, and what to tell the replicas that wait for it.
    retry: Option<(Instant, String)>,
    backoff: Backoff,
    failures: Failures,
    forks: Forks,
    turns: Turns,
    /// The writer may reuse the slots of the current snapshot below this one.
    retire_below: u64,
    snapshots_taken: u64,
    forks_made: u64,
    replicas_done: u64,
    /// A replica that read the current memory disconnected before it confirmed that its server had loaded everything.
    /// Pages that it passed to its server's socket may still be read after it has exited.
    unfinished: bool,
}

impl Machine {
    /// Creates the machine of a source. No earlier run of it may have had `first_generation`, or one after it.
    pub fn new(now: Instant, rules: Rules, backoff: Backoff, first_generation: u64, eager: bool) -> Machine {
        Machine {
            forks: Forks::new(now, rules.fork_interval),
            turns: Turns::new(rules.at_once),
            rules,
            reading: Reading::default(),
            snapshot: None,
            stream: None,
            ending: None,
            replicas: BTreeMap::new(),
            slowest: Slowest::default(),
            has_waiting: false,
            next_generation: first_generation,
            eager,
            unread_since: now,
            lost: Lost::default(),
            retry: None,
            backoff,
            failures: Failures::default(),
            retire_below: 0,
            snapshots_taken: 0,
            forks_made: 0,
            replicas_done: 0,
            unfinished: false,
        }
    }

    /// The state that others may see.
    pub fn status(&self) -> Status<'_> {
        Status {
            snapshot: self.snapshot.as_ref(),
            stream: self.stream,
            replicas: &self.replicas,
            snapshots_taken: self.snapshots_taken,
            forks_made: self.forks_made,
            replicas_done: self.replicas_done,
            failures: &self.failures,
            forks: &self.forks,
        }
    }

    /// Handles one event, restores the invariant, and returns the actions to perform, in order.
    pub fn apply(&mut self, now: Instant, reading: Reading, event: Event) -> Vec<Action> {
        self.reading = reading;
        self.forks.look(now, self.snapshot.as_ref().is_some_and(Snapshot::has_a_child));
        let mut actions = Vec::new();
        match event {
            Event::Joined { session, name, address, zone, resume, reads } => {
                self.join(now, session, (name, address, zone), resume, reads, &mut actions);
            }
            Event::StandbyJoined { session, name, address } => {
                self.join(now, session, (name, address, String::new()), None, Format::Own, &mut actions);
                if let Some(replica) = self.replicas.get_mut(&session) {
                    replica.is_standby = true;
                }
            }
            Event::Copied { generation } => self.copy(now, generation, &mut actions),
            Event::Progress { session, at } => {
                if !self.progress(now, session, at) {
                    self.allow_retiring(&mut actions);
                    return actions;
                }
            }
            Event::Gone { session, done } => {
                self.replicas_done += u64::from(done);
                let gone = self.replicas.remove(&session);
                self.unfinished |= !done && gone.as_ref().is_some_and(Replica::is_reading);
                if let Some(replica) = gone.filter(|_| !done) {
                    self.lost.lose(now, &replica);
                }
                self.failures.replica_left(self.replicas.len(), now, &mut self.retry);
            }
            Event::Capture(event) => self.captured(now, event, &mut actions),
            Event::Tick => {}
        }
        self.settle(now, &mut actions);
        actions
    }

    fn join(
        &mut self,
        now: Instant,
        session: Session,
        (name, address, zone): (String, String, String),
        resume: Option<Resume>,
        reads: Format,
        actions: &mut Vec<Action>,
    ) {
        // A replica that joins again over the same connection is counted already.
        if self.replicas.len() >= self.rules.max_replicas && !self.replicas.contains_key(&session) {
            let text = format!(
                "{} replicas have joined, which is the limit of this source; join later, or raise --max-replicas on the source",
                self.replicas.len()
            );
            actions.push(Action::Drop { session, code: RefusalCode::Busy, text });
            return;
        }
        let since = self.lost.joined(now, &name, resume);
        let place = self.replicas.get(&session).filter(|before| before.waits()).map(|before| before.place);
        let replica = Replica {
            since,
            place: place.unwrap_or_else(|| self.lost.place(since, now, &name)),
            name,
            address,
            zone,
            joined: now,
            last_seen: now,
            generation: None,
            at: Report::NOTHING,
            tracker: Tracker::default(),
            resume,
            reads,
            moved: now,
            pace: Pace::default(),
            told: None,
            history: None,
            advanced: now,
            turn_since: None,
            sent_away: false,
            is_standby: false,
        };
        let before = self.replicas.insert(session, replica);
        // Its server may still read what was lent to it of the snapshot that it leaves.
        self.unfinished |= before.as_ref().is_some_and(Replica::is_reading);
    }

    /// Notes a report. Returns whether it may have changed more than the replica's position and rate, so that all
    /// replicas have to be looked at.
    fn progress(&mut self, now: Instant, session: Session, at: Report) -> bool {
        let Some(replica) = self.replicas.get_mut(&session) else { return false };
        let (was_reading, had_loaded, before) = (replica.is_reading(), replica.has_loaded(), replica.at.slots_below);
        replica.tracker.reach(now, at.bytes, self.reading.length);
        if at.slots_below > replica.at.slots_below || at.phase != replica.at.phase {
            replica.moved = now;
        }
        if at.applied_offset > replica.at.applied_offset {
            replica.advanced = now;
        }
        // A replica cannot go back before a slot that it has passed.
        let slots_below = at.slots_below.max(replica.at.slots_below);
        replica.at = Report { slots_below, ..at };
        replica.last_seen = now;
        if at.phase > Phase::Load
            && let Some(since) = replica.turn_since.take()
        {
            self.turns.ended(&replica.zone, now.duration_since(since));
        }
        let is_reading = replica.is_reading();
        let has_ended = |ending: &Ending| {
            replica.generation.is_some() && replica.has_loaded() && replica.at.applied_offset >= ending.at
        };
        let may_retry = self.has_waiting && self.retry.as_ref().is_some_and(|(at, _)| *at <= now);
        if is_reading != was_reading
            || had_loaded != replica.has_loaded()
            || may_retry
            || self.ending.as_ref().is_some_and(has_ended)
        {
            return true;
        }
        if is_reading && !self.slowest.moved(before, slots_below) {
            self.slowest = Slowest::of(&self.replicas);
        }
        false
    }

    fn captured(&mut self, now: Instant, event: CaptureEvent, actions: &mut Vec<Action>) {
        match event {
            CaptureEvent::Forked { .. } if Mutation::ForkFromTheFirstByte.is_active() => {}
            // Perhaps for a capture that has ended meanwhile, or for a stream that the primary did not continue.
            CaptureEvent::Forked { generation } => {
                self.forks.forked();
                self.forks_made += 1;
                if let Some(snapshot) = self.current(generation) {
                    snapshot.forked = Some(now);
                }
            }
            CaptureEvent::Started { generation, replid, offset } => {
                self.started(now, Origin { generation, history: replid, offset }, actions);
            }
            CaptureEvent::Completed { generation, bytes } => {
                if let Some(snapshot) = self.current(generation)
                    && let Some(origin) = snapshot.origin()
                {
                    snapshot.stage = Stage::Sealed { origin, bytes };
                    snapshot.sealed = Some(now);
                }
                self.backoff.reset();
                self.failures.succeeded();
            }
            CaptureEvent::Failed { generation, error } => {
                self.capture_failed(now, generation, &error, actions);
            }
            CaptureEvent::FromBase { .. }
            | CaptureEvent::BaseTried { .. }
            | CaptureEvent::ModuleFailed
            | CaptureEvent::SweepFailed
            | CaptureEvent::StreamResumed => {}
            CaptureEvent::HistoryChanged { generation, from, to, at } => {
                self.history_changed(now, generation, (from, to), at, actions);
            }
            CaptureEvent::StreamLost { text } => self.end_stream(&text, actions),
        }
    }

    fn current(&mut self, generation: u64) -> Option<&mut Snapshot> {
        self.snapshot.as_mut().filter(|snapshot| snapshot.generation == generation)
    }

    fn started(&mut self, now: Instant, origin: Origin, actions: &mut Vec<Action>) {
        let Some(snapshot) = self.current(origin.generation) else { return };
        // One from a file, which costs the primary nothing, is counted here: it is spaced as the others are.
        let is_counted = snapshot.forked.is_some();
        snapshot.forked.get_or_insert(now);
        if !is_counted {
            self.forks.forked();
        }
        let Some(snapshot) = self.current(origin.generation) else { return };
        snapshot.stage = Stage::Open(origin);
        self.snapshots_taken += 1;
        match self.stream {
            None => self.stream = Some(origin),
            Some(stream) if stream.history == origin.history => {}
            Some(_) => {
                // The stream that the source follows belongs to a history that the primary has left.
                self.end_stream("the primary's replid changed (a failover or a restart)", actions);
            }
        }
    }

    fn capture_failed(&mut self, now: Instant, generation: u64, error: &CaptureError, actions: &mut Vec<Action>) {
        let Some(snapshot) = self.current(generation) else { return };
        let has_forked = snapshot.has_forked();
        let text = error.to_string();
        self.failures.count(has_forked, &text);
        self.forget_snapshot(&text, actions);
        // The stream of this capture ended with it. The journal's memory is used again by the next one.
        if self.stream.take_if(|stream| stream.generation == generation).is_some() {
            actions.push(Action::EndStream { generation });
        }
        if error.is_transient() {
            let pause = self.backoff.next().max(self.failures.pause());
            self.retry = Some((now + pause, self.failures.describe(&text, pause)));
        } else if !matches!(error, CaptureError::Stopped) {
            for session in self.waiting() {
                self.replicas.remove(&session);
                let code = RefusalCode::PrimaryRefuses;
                actions.push(Action::Drop { session, code, text: text.clone() });
            }
        }
    }

    /// Revokes the snapshot. Replicas that still read it begin again.
    fn forget_snapshot(&mut self, text: &str, actions: &mut Vec<Action>) {
        let Some(snapshot) = self.snapshot.take() else { return };
        let generation = snapshot.generation;
        actions.push(Action::RevokeSnapshot { generation });
        self.free_standbys();
        for (&session, replica) in &mut self.replicas {
            if replica.is_reading() && replica.generation == Some(generation) {
                self.unfinished = true;
                replica.generation = None;
                let text = text.to_string();
                actions.push(Action::GenerationGone { session, generation, text });
            }
        }
    }

    /// Ends the stream. Every replica that was given this history begins again or goes to the primary.
    fn end_stream(&mut self, text: &str, actions: &mut Vec<Action>) {
        let Some(stream) = self.stream.take() else { return };
        actions.push(Action::EndStream { generation: stream.generation });
        self.end_snapshot(actions);
        self.end_generations(text, |_| true, actions);
    }

    /// The primary continues under another replid after offset `at`. The journal holds nothing of the new history.
    ///
    /// A replica that has the whole snapshot keeps the journal until it has applied all of it: a primary that was shut
    /// down and started again has no backlog of the time before, and continues the old history from its last byte only.
    fn history_changed(
        &mut self,
        now: Instant,
        generation: u64,
        (from, to): (ReplId, ReplId),
        at: u64,
        actions: &mut Vec<Action>,
    ) {
        if self.stream.is_none_or(|stream| stream.generation != generation) {
            return;
        }
        self.stream = None;
        let text = format!("the primary's history changed from {from} to {to} after offset {at}");
        self.end_snapshot(actions);
        self.end_generations(&text, |replica| !replica.has_all_slots(), actions);
        self.ending = Some(Ending { generation, at, since: now, text });
    }

    /// Revokes the snapshot of a stream that has ended.
    fn end_snapshot(&mut self, actions: &mut Vec<Action>) {
        let Some(snapshot) = self.snapshot.take() else { return };
        actions.push(Action::RevokeSnapshot { generation: snapshot.generation });
        self.free_standbys();
        if !snapshot.is_sealed() {
            actions.push(Action::StopCapture { generation: snapshot.generation });
        }
    }

    /// Ends the generation of these replicas. A replica that has loaded goes to the primary; the others wait for a new
    /// snapshot.
    fn end_generations(&mut self, text: &str, which: impl Fn(&Replica) -> bool, actions: &mut Vec<Action>) {
        for (&session, replica) in self.replicas.iter_mut().filter(|(_, replica)| which(replica)) {
            self.unfinished |= replica.is_reading();
            if let Some(generation) = replica.generation.take() {
                replica.sent_away = replica.has_loaded();
                let text = text.to_string();
                actions.push(Action::GenerationGone { session, generation, text });
            }
        }
    }

    /// Standbys that have copied the snapshot, which has ended, wait for the next one. They keep what they have.
    fn free_standbys(&mut self) {
        for replica in self.replicas.values_mut().filter(|replica| replica.is_standby && !replica.is_reading()) {
            replica.generation = None;
        }
    }

    /// Restores the invariant that the module docs state.
    fn settle(&mut self, now: Instant, actions: &mut Vec<Action>) {
        self.finish_ending(now, actions);
        self.drop_stalled(now, actions);
        self.slowest = Slowest::of(&self.replicas);
        self.allow_retiring(actions);
        self.release_unused(now, actions);
        self.serve_waiting(now, actions);
        self.slowest = Slowest::of(&self.replicas);
    }

    /// Lets the writer reuse slots that every reader has passed, but only once the ring is full: until then the next
    /// replica can still read all of them. Without a reader no slot is reused either.
    fn allow_retiring(&mut self, actions: &mut Vec<Action>) {
        if self.reading.writer_waits == 0 {
            return;
        }
        let below = self.slowest.below();
        if below > self.retire_below {
            self.retire_below = below;
            actions.push(Action::AllowRetiring { below });
        }
    }

    /// Drops replicas that take no slot, or too few, while the writer of a windowed snapshot, or replicas that need the
    /// next snapshot, wait for them.
    fn drop_stalled(&mut self, now: Instant, actions: &mut Vec<Action>) {
        let Some(snapshot) = &self.snapshot else { return };
        let is_sealed = snapshot.is_sealed();
        let needs_another = |session: &Session| !self.can_serve(now, *session) && !self.is_standby(*session);
        let others_wait = is_sealed && self.waiting().iter().any(needs_another);
        let given = (&self.rules, self.reading);
        for (session, text) in find(now, given, (is_sealed, others_wait), &mut self.replicas) {
            self.replicas.remove(&session);
            self.unfinished = true;
            actions.push(Action::Drop { session, code: RefusalCode::Stalled, text });
        }
    }

    /// The replicas that wait, in the order in which they joined first.
    fn waiting(&self) -> Vec<Session> {
        let waits = |(&session, replica): (&Session, &Replica)| replica.waits().then_some((replica.place, session));
        let mut waiting: Vec<(Instant, Session)> = self.replicas.iter().filter_map(waits).collect();
        waiting.sort_unstable();
        if Mutation::LastComesFirst.is_active() {
            waiting.reverse();
        }
        waiting.into_iter().map(|(_, session)| session).collect()
    }

    fn serve_waiting(&mut self, now: Instant, actions: &mut Vec<Action>) {
        let waiting = self.waiting();
        let (mut unserved, mut queued) = (Vec::new(), Vec::new());
        let mut left = self.turns_left(now, self.rules.stall_limit);
        for session in waiting {
            if self.can_serve(now, session) {
                let turn = self.replicas.get(&session).filter(|_| self.needs_turn(session));
                if let (Some(replica), Some(left)) = (turn, &mut left)
                    && let Err(before) = left.take(&replica.zone)
                {
                    queued.push((session, before));
                    continue;
                }
                self.offer(now, session, actions);
            } else if self.replicas.get(&session).is_some_and(Replica::is_loaded) {
                // Its server has loaded a snapshot already and can go to the primary as it is.
                self.replicas.remove(&session);
                let code = RefusalCode::HistoryGone;
                let text = "the journal does not hold what this replica's server needs next".to_string();
                actions.push(Action::Drop { session, code, text });
            } else if !self.is_standby(session) || Mutation::ForkForAStandby.is_active() {
                unserved.push(session);
            }
        }
        for &(session, before) in &queued {
            let zone = self.replicas.get(&session).map_or("", |replica| &replica.zone);
            let reason = self.turns.told(zone, before);
            self.tell(session, reason, actions);
        }
        self.has_waiting = !unserved.is_empty() || !queued.is_empty();
        let first_wanted = self.eager && self.snapshots_taken == 0 && self.snapshot.is_none();
        if unserved.is_empty() && !first_wanted {
            return;
        }
        let late = match self.snapshot {
            Some(_) => {
                waiting::told_late(&self.rules, &self.reading, unserved.iter().filter_map(|of| self.replicas.get(of)))
            }
            None => "",
        };
        let reason = match self.why_not_begin(now) {
            None => {
                self.begin(now, actions);
                (WaitCause::NotYet, format!("the source is requesting a snapshot from the primary{late}"))
            }
            Some((cause, text)) => (cause, format!("{text}{late}")),
        };
        for session in unserved {
            self.tell(session, reason.clone(), actions);
        }
    }

    /// Tells a replica why it waits, if it was told something else before.
    fn tell(&mut self, session: Session, reason: (WaitCause, String), actions: &mut Vec<Action>) {
        let Some(replica) = self.replicas.get_mut(&session) else { return };
        if replica.told.as_ref() != Some(&reason) {
            replica.told = Some(reason.clone());
            let (cause, text) = reason;
            actions.push(Action::Wait { session, cause, text });
        }
    }

    fn is_standby(&self, session: Session) -> bool {
        self.replicas.get(&session).is_some_and(|replica| replica.is_standby)
    }

    /// The turns that are free; `None`: nobody needs one.
    fn turns_left(&self, now: Instant, stall_limit: Duration) -> Option<Left> {
        self.turns.left(now, self.reading.is_windowed, stall_limit, self.replicas.values())
    }

    fn needs_turn(&self, session: Session) -> bool {
        let generation = self.snapshot.as_ref().map_or(0, |snapshot| snapshot.generation);
        self.replicas.get(&session).is_some_and(|replica| waiting::needs_turn(replica, generation))
    }

    fn offer(&mut self, now: Instant, session: Session, actions: &mut Vec<Action>) {
        let generation = self.snapshot.as_ref().map(|snapshot| snapshot.generation);
        let history = self.stream.map(|stream| stream.history);
        if let Some(replica) = self.replicas.get_mut(&session) {
            replica.generation = generation;
            replica.history = history;
            (replica.told, replica.tracker) = (None, Tracker::default());
            let held = replica.resume.filter(|resume| Some(resume.generation) == generation);
            let slots_below = held.map_or(0, |resume| resume.held_slots);
            let phase = if replica.is_loaded() { Phase::CatchUp } else { Phase::Waiting };
            replica.at = Report { slots_below, phase, ..Report::NOTHING };
            (replica.moved, replica.pace) = (now, Pace::from(slots_below));
            replica.turn_since = (!replica.is_loaded() && slots_below == 0 && !replica.is_standby).then_some(now);
            actions.push(Action::Offer { session });
        }
    }

    /// Whether the current snapshot has all slots that this replica needs, and the journal all bytes behind it.
    fn can_serve(&self, now: Instant, session: Session) -> bool {
        let (Some(snapshot), Some(stream)) = (&self.snapshot, &self.stream) else { return false };
        let Some(origin) = snapshot.origin() else { return false };
        let replica = self.replicas.get(&session);
        let (resume, joined) =
            (replica.and_then(|replica| replica.resume), replica.map_or(now, |replica| replica.joined));
        let Reading { journal_first, journal_end, .. } = self.reading;
        if let Some((history, next_byte)) = resume.and_then(|resume| resume.loaded) {
            return history == stream.history && journal_first <= next_byte && next_byte <= journal_end + 1;
        }
        let held = resume.filter(|resume| resume.generation == snapshot.generation);
        let first_needed = held.map_or(0, |resume| resume.held_slots);
        // Slots that the writer may reuse count as reused.
        let first_held = self.reading.retired.max(self.retire_below);
        if replica.is_some_and(|replica| replica.is_standby) {
            let has_all = !self.reading.is_windowed && first_held == 0;
            return has_all && origin.history == stream.history && journal_first <= origin.offset + 1;
        }
        if Mutation::SnapshotNotShared.is_active() && self.replicas.values().any(Replica::is_reading) {
            return false;
        }
        let reads_it = snapshot.format == Format::Shared
            || held.is_some()
            || self.replicas.get(&session).is_some_and(|replica| replica.reads == Format::Own);
        origin.history == stream.history
            && reads_it
            && first_needed >= first_held
            && journal_first <= origin.offset + 1
            && self
                .replicas
                .get(&session)
                .and_then(|replica| waiting::too_late(&self.rules, &self.reading, replica))
                .is_none()
            && (held.is_some() || snapshot.is_for(joined, now, self.rules.max_age))
    }

    /// Why no new snapshot can begin now; `None` if one can.
    fn why_not_begin(&self, now: Instant) -> Option<(WaitCause, String)> {
        if self.reading.is_preparing {
            return Some((WaitCause::NotYet, "the source is preparing its memory".to_owned()));
        }
        if let Some((at, text)) = &self.retry
            && now < *at
        {
            return Some((WaitCause::LastAttemptFailed, text.clone()));
        }
        if self.ending.is_some() {
            let text = "the primary's history has changed; a snapshot of the new one follows as soon as the last replicas of the \
                        old one have gone to the primary";
            return Some((WaitCause::Busy, text.to_string()));
        }
        if let Some(why) = self.waits_for_the_first(now) {
            return Some((WaitCause::NotYet, why));
        }
        match &self.snapshot {
            None => self.forks.why_not(),
            Some(Snapshot { stage: Stage::Asked, .. }) => {
                Some((WaitCause::NotYet, "the primary is preparing a snapshot".to_string()))
            }
            Some(snapshot) if !self.replicas.values().any(Replica::is_reading) && snapshot.is_sealed() => {
                self.forks.why_not()
            }
            Some(_) => {
                let text = "other replicas still read the current snapshot, which does not serve this one (it no longer has its first \
                            slots, or is too old); the next one follows when they are done";
                Some((WaitCause::Busy, text.to_string()))
            }
        }
    }

    /// Why a standby does not ask its server for a snapshot yet; `None` if it does, or is no standby.
    fn waits_for_the_first(&self, now: Instant) -> Option<String> {
        let limit = self.rules.standby.filter(|_| !Mutation::StandbyForksAtOnce.is_active())?;
        let waits = |replica: &&Replica| replica.waits() && !replica.is_standby;
        let longest = self.replicas.values().filter(waits).map(|replica| now.duration_since(replica.joined)).max();
        if longest.is_some_and(|waited| waited >= limit) {
            return None;
        }
        let after = match limit {
            Duration::MAX => "asks its own server for none (--no-fork)".to_owned(),
            limit => format!("asks its own server for one after {} s (--fork-after)", limit.as_secs()),
        };
        Some(format!(
            "this source is a standby without a snapshot that serves; it waits for one of the source that it stands by for, and {after}"
        ))
    }

    fn begin(&mut self, now: Instant, actions: &mut Vec<Action>) {
        let generation = self.next_generation;
        let waits_for_shared = |replica: &Replica| replica.waits() && replica.reads == Format::Shared;
        let format = if self.replicas.values().any(waits_for_shared) { Format::Shared } else { Format::Own };
        self.begin_as(now, (generation, format), None, actions);
    }

    /// Begins to copy this snapshot of another source, unless readers still need the present one.
    fn copy(&mut self, now: Instant, generation: u64, actions: &mut Vec<Action>) {
        if self.can_copy(generation) {
            // Which format it is in is not told. The primary has not forked for it here.
            self.begin_as(now, (generation, Format::Own), Some(now), actions);
        }
    }

    /// Whether a snapshot of another source can take the place of the present one.
    pub fn can_copy(&self, generation: u64) -> bool {
        let is_free =
            self.snapshot.as_ref().is_none_or(|present| present.is_sealed() && present.generation != generation);
        let is_read = self.replicas.values().any(Replica::is_reading) && !Mutation::CopyOverReaders.is_active();
        is_free && self.ending.is_none() && !is_read
    }

    fn begin_as(
        &mut self,
        now: Instant,
        (generation, format): (u64, Format),
        forked: Option<Instant>,
        actions: &mut Vec<Action>,
    ) {
        if let Some(old) = self.snapshot.take() {
            actions.push(Action::RevokeSnapshot { generation: old.generation });
            self.free_standbys();
        }
        self.number_apart_from(generation);
        self.retry = None;
        self.retire_below = 0;
        self.snapshot = Some(Snapshot { generation, stage: Stage::Asked, format, asked: now, forked, sealed: None });
        self.unread_since = now;
        let with_stream = self.stream.is_none() || Mutation::StreamForEach.is_active();
        let fresh = std::mem::take(&mut self.unfinished);
        actions.push(Action::Capture { generation, with_stream, fresh });
    }

    /// Keeps the numbers of this source's snapshots apart from this one, of which there may be a copy. It goes on from
    /// its own number also behind a copy: the first source gives its next snapshot the number behind the copied one.
    fn number_apart_from(&mut self, generation: u64) {
        if self.next_generation == generation || Mutation::CopyNumbersOn.is_active() {
            self.next_generation = self.next_generation.max(generation + 1);
        }
    }

    /// Releases what no replica uses: a full ring holds up the primary, and waiting replicas that lack its first slots;
    /// a snapshot that is too old to be offered, or a stream, costs the primary a connection.
    fn release_unused(&mut self, now: Instant, actions: &mut Vec<Action>) {
        let is_idle = self.replicas.values().all(|replica| replica.is_standby);
        let Some(snapshot) = &self.snapshot else {
            if is_idle {
                self.end_stream("the last snapshot failed, and no replica uses the stream any more", actions);
            }
            return;
        };
        let generation = snapshot.generation;
        // A replica that had loaded an earlier snapshot when it joined was offered this one for its stream only.
        if self.replicas.values().any(Replica::is_reading) {
            self.unread_since = now;
            return;
        }
        let stuck = matches!(snapshot.stage, Stage::Open { .. })
            && self.reading.writer_waits > 0
            && now.duration_since(self.unread_since) > self.rules.stall_limit;
        let old = match snapshot.is_sealed() {
            true => snapshot.is_old(now, self.rules.max_age),
            // The first one of an eager source is for replicas that are still to come.
            false if self.eager && self.snapshots_taken <= 1 => false,
            // No replica waits for it any more.
            false => now.duration_since(snapshot.asked) > self.rules.max_age,
        };
        let overrun = snapshot.origin().is_some_and(|origin| self.reading.journal_first > origin.offset + 1);
        // Its end would serve nobody: the stream behind it is lost.
        let in_vain = overrun && !snapshot.is_sealed();
        let may_return = self.lost.at.is_some_and(|lost| now.duration_since(lost) < RETURN_LIMIT);
        if !(stuck || in_vain || (is_idle && !may_return && (old || overrun))) {
            return;
        }
        if !snapshot.is_sealed() {
            actions.push(Action::StopCapture { generation });
        }
        let text = "no replica reads the snapshot any more";
        self.forget_snapshot(text, actions);
        // Replicas that have loaded an earlier snapshot may still follow a stream that began with that one.
        if self.stream.is_some_and(|stream| is_idle || stream.generation == generation) {
            self.end_stream(text, actions);
        }
    }
}

// Streams that have ended and are still read.

/// A stream whose history the primary has left. Its journal holds every byte of the old history that the source
/// received, and stays readable until the replicas that have the whole snapshot have applied it.
struct Ending {
    /// The generation that began the stream.
    generation: u64,
    /// Offset of the last byte.
    at: u64,
    /// When it ended.
    since: Instant,
    /// Why it ended, to be sent to the replicas.
    text: String,
}

/// How long the replicas of an ended history may take to apply the rest of it while others wait for a snapshot of the
/// new one. A server that was in step acknowledges all of it within a second.
const ENDING_LIMIT: Duration = Duration::from_secs(10);

/// How long such a replica may acknowledge nothing new before it is sent to the primary. Servers acknowledge once a
/// second. The end of a broken stream may be a part of a command or transaction, which a server never acknowledges.
const UNMOVED_LIMIT: Duration = Duration::from_secs(3);

impl Machine {
    /// Sends the replicas of an ended stream to the primary once they have applied all of it or make no progress, and
    /// revokes its journal when none is left.
    fn finish_ending(&mut self, now: Instant, actions: &mut Vec<Action>) {
        let Some(ending) = self.ending.take() else { return };
        let is_late = now.duration_since(ending.since) > ENDING_LIMIT && !self.waiting().is_empty();
        let is_unmoved = |replica: &Replica| now.duration_since(replica.advanced.max(ending.since)) > UNMOVED_LIMIT;
        let has_all = |replica: &Replica| replica.has_loaded() && replica.at.applied_offset >= ending.at;
        let is_done = |replica: &Replica| is_late || has_all(replica) || is_unmoved(replica);
        self.end_generations(&ending.text, is_done, actions);
        if self.replicas.values().any(|replica| replica.generation.is_some()) {
            self.ending = Some(ending);
        } else {
            actions.push(Action::EndStream { generation: ending.generation });
        }
    }
}

// A snapshot that a former process of the source has completed.

/// Goes on with a snapshot of which all slots are there, and with the stream behind it. `asked`: when the
/// primary forked for it. Called before the first event.
pub fn go_on(machine: &mut Machine, now: Instant, origin: Origin, bytes: u64, format: Format, asked: Instant) {
    let generation = origin.generation;
    machine.next_generation = machine.next_generation.max(generation + 1);
    let (stage, taken) = (Stage::Sealed { origin, bytes }, Some(asked));
    machine.snapshot = Some(Snapshot { generation, stage, format, asked, forked: taken, sealed: taken });
    machine.stream = Some(origin);
    machine.unread_since = now;
    // Its replicas come back as after a broken connection, and their servers may still read the memory.
    machine.lost.at = Some(now);
    machine.unfinished = true;
}

// Readers that hold up a snapshot: those that take nothing for a while, and those that take too little for long.
//
// A reader is in the way if the writer of a windowed snapshot waits for the slot that it needs next, or if it still
// reads a complete snapshot that replicas which wait cannot use. The primary's fork, and what the primary holds back
// for the source, last as long as that. So a reader loses its place
//
// - if it passes no slot for the stall limit, or
// - if it is late: while it is in the way, its lateness grows with the time, and shrinks by what [`LEAST_RATE`] would
//   take for the slots that it passes. A reader that keeps this rate is never late. One that takes a slot just before
//   each stall limit is late after a few of them.

/// How late a reader may be, in stall limits: with the default of 15 s, a minute. Less would drop a reader whose link
/// or server pauses now and then.
const LATE_LIMITS: u32 = 4;

/// Finds the replicas that have to make room, each with what it is told. `others_wait`: replicas wait for the next
/// snapshot, which cannot begin before the readers of this one are done.
fn find(
    now: Instant,
    (rules, reading): (&Rules, Reading),
    (is_sealed, others_wait): (bool, bool),
    replicas: &mut BTreeMap<Session, Replica>,
) -> Vec<(Session, String)> {
    let writer_waits = reading.writer_waits > 0 && !is_sealed;
    let mut stalled = Vec::new();
    for (&session, replica) in replicas {
        let below = replica.at.slots_below;
        let is_in_the_way = replica.is_reading()
            && below < reading.published
            && (others_wait || (writer_waits && below <= reading.retired));
        replica.pace.look(now, below, rules.slot_bytes, is_in_the_way);
        if below >= reading.published {
            // It has all that there is. A server that saves to disk publishes nothing for as long as that takes.
            replica.moved = now;
        }
        if !is_in_the_way {
            continue;
        }
        let limit = rules.stall_limit;
        let what = if now.duration_since(replica.moved) > limit {
            format!("no slot for {} s", limit.as_secs())
        } else if replica.pace.late > limit * LATE_LIMITS {
            format!("less than {} KiB/s for more than {} s", LEAST_RATE >> 10, (limit * LATE_LIMITS).as_secs())
        } else {
            continue;
        };
        let text = format!(
            "the replica took {what} while the source's table was full or others waited for the next snapshot; give \
             the source more --memory or the replica a faster server, or raise --stall-timeout on the source"
        );
        stalled.push((session, text));
    }
    stalled
}

#[cfg(test)]
mod tests;

#[cfg(test)]
mod kept_tests {
    #![allow(clippy::unwrap_used)]

    use std::time::Duration;

    use super::*;
    use crate::gauge::Reading;
    use remora_base::pace::Backoff;

    const OFFSET: u64 = 10;

    /// A machine that goes on with a snapshot of that age, whose generation is above its own first one.
    fn machine(now: Instant, age: Duration) -> (Machine, Origin) {
        let rules = Rules {
            max_age: Duration::from_secs(60),
            max_replicas: 3,
            stall_limit: Duration::from_secs(60),
            fork_interval: Duration::ZERO,
            slot_bytes: 1 << 20,
            repeat_messages: Duration::ZERO,
            at_once: None,
            standby: None,
        };
        let mut machine = Machine::new(now, rules, Backoff::seeded(1), 5, false);
        let history = "a".repeat(40).parse().unwrap();
        let origin = Origin { generation: 7, history, offset: OFFSET };
        go_on(&mut machine, now, origin, 1 << 30, Format::Shared, now.checked_sub(age).unwrap());
        (machine, origin)
    }

    fn join(machine: &mut Machine, now: Instant, resume: Option<Resume>) -> Vec<Action> {
        let reading = Reading { published: 9, journal_first: OFFSET + 1, journal_end: 500, ..Reading::default() };
        let (name, address, zone) = ("r1".to_owned(), String::new(), String::new());
        machine.apply(now, reading, Event::Joined { session: 1, name, address, zone, resume, reads: Format::Own })
    }

    #[test]
    fn replicas_old_and_new_are_offered_the_snapshot_and_nothing_is_asked_of_the_primary() {
        let now = Instant::now() + Duration::from_secs(3600);
        let (mut machine, origin) = machine(now, Duration::from_secs(30));
        assert_eq!(machine.apply(now, Reading::default(), Event::Tick), []);
        assert_eq!(join(&mut machine, now, None), [Action::Offer { session: 1 }]);
        for loaded in [None, Some((origin.history, 400))] {
            let resume = Resume { generation: 7, held_slots: 4, loaded };
            assert_eq!(join(&mut machine, now, Some(resume)), [Action::Offer { session: 1 }], "{resume:?}");
        }
        assert_eq!(machine.status().replica(1).unwrap().at.slots_below, Report::NOTHING.slots_below + 4);
    }

    #[test]
    fn its_age_counts_on_and_the_next_snapshot_has_a_higher_number_and_other_memory() {
        let now = Instant::now() + Duration::from_secs(3600);
        let (mut machine, _) = machine(now, Duration::from_secs(61));
        let actions = join(&mut machine, now, None);
        assert!(actions.contains(&Action::RevokeSnapshot { generation: 7 }), "{actions:?}");
        let next = Action::Capture { generation: 8, with_stream: false, fresh: true };
        assert!(actions.contains(&next), "{actions:?}");
    }
}
