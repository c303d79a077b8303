//! Server side: what the agent has changed on the replica's server, and the jobs for the task that changes it.
//!
//! ```text
//!   Not ── Prepare ──▶ UnderWay ── Follow ──▶ Done ── the server restarted ──▶ UnderWay ── ...
//! ```

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use super::Desk;
use super::event::{
    Action, Followed, Follows, Introduced, Job, Lapse, Leaving, Look, NotFollowed, Reading, Report, Rules,
};
use super::hand_off::{Ending, HandOff, QUICK};
use remora_base::pace::Backoff;
use remora_base::units::counted;
use remora_process::events;
use remora_process::exit::{Code, Failure};
use remora_protocol::{Phase, WaitCause};
use remora_reader::addresses::{Loss, no_snapshot, wait_limit};
use remora_server::PinSizes;

/// The state of the replica's server as far as this agent has changed it.
pub(super) struct ServerSide {
    pub(super) desk: Desk,
    pub(super) presence: Presence,
    redirect: Redirect,
    /// Another client has taken the server over.
    taken_over: bool,
    /// It does not know what the primary's stream has next.
    unfit: bool,
    /// It comes by itself, and has come before the sync began ([`Rules::intercepted`]).
    intercepted: bool,
}

/// Whether the server was pointed at the link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Redirect {
    /// Nothing.
    Not,
    /// It is under way; `again` if the server had followed the link before it restarted.
    UnderWay { again: bool },
    /// The server was pointed at the link.
    Done,
}

impl ServerSide {
    pub(super) fn new(run_id: Option<String>, intercepted: bool) -> ServerSide {
        ServerSide {
            desk: Desk::default(),
            presence: Presence::new(run_id),
            redirect: Redirect::Not,
            taken_over: false,
            unfit: false,
            intercepted,
        }
    }

    /// Whether the server was pointed at the link.
    pub(super) fn follows_link(&self) -> bool {
        self.redirect == Redirect::Done
    }

    /// Begins to point the server at our link, unless that was done.
    pub(super) fn begin(&mut self) {
        if self.redirect == Redirect::Not {
            self.redirect = Redirect::UnderWay { again: false };
            self.desk.add(Job::Prepare { after_restart: false });
        }
    }

    /// Notes what a report says about the server, in any state of the sync. Returns `false` if it answers no job.
    pub(super) fn note(&mut self, report: &Report) -> bool {
        if !self.desk.done(report) {
            return false;
        }
        self.taken_over |= report.is_take_over();
        match report {
            Report::Followed(Ok(()) | Err(NotFollowed::Failed { told: true, .. })) => self.redirect = Redirect::Done,
            Report::Prepared(Err(_)) | Report::Followed(Err(NotFollowed::Failed { told: false, .. })) => {
                // A server that followed the link before it restarted holds what it was given.
                if self.redirect == (Redirect::UnderWay { again: false }) {
                    self.redirect = Redirect::Not;
                } else {
                    self.redirect = Redirect::Done;
                }
            }
            _ => {}
        }
        true
    }

    /// Notes that another client has taken the server over.
    pub(super) fn give_up(&mut self) {
        self.taken_over = true;
    }

    /// The server's settings are ready; `by_module`: its module can load the snapshot.
    pub(super) fn prepared(&mut self, now: Instant, by_module: bool, actions: &mut VecDeque<Action>) {
        // The delivery is ordered first: the server may ask for its payload before its answer to the command arrives.
        actions.push_back(Action::UseModule(by_module));
        self.follow(now, by_module);
    }

    /// The server permits no transaction, so that its position cannot be made worthless.
    pub(super) fn without_transaction(&mut self, now: Instant, text: &str, actions: &mut VecDeque<Action>) {
        tracing::info!(
            "the server has the module, but it is not used: REPLICAOF in a transaction was refused: {text}; its user \
             needs +multi +exec +discard"
        );
        actions.push_back(Action::UseModule(false));
        self.follow(now, false);
    }

    fn follow(&mut self, now: Instant, from_nothing: bool) {
        if !self.intercepted {
            self.presence.expect(now);
        }
        self.desk.add(Job::Follow { from_nothing });
    }

    /// The introduction of this number has ended.
    pub(super) fn introduced(
        &mut self,
        number: u64,
        outcome: Introduced,
        actions: &mut VecDeque<Action>,
    ) -> Result<(), Lapse> {
        match outcome {
            Introduced::Done { .. } => actions.push_back(Action::EndIntroduction { number }),
            Introduced::NotUsed => actions.extend([Action::UseModule(false), Action::EndIntroduction { number }]),
            // This ends the server's link. The server connects again.
            Introduced::AgainFromNothing | Introduced::Cancelled => {}
            Introduced::Failed(lapse) => return Err(lapse),
        }
        Ok(())
    }

    /// The server was looked at because it stays away.
    pub(super) fn looked(&mut self, now: Instant, rules: &Rules, looked: Result<Look, Failure>) -> Result<(), Lapse> {
        if self.redirect != Redirect::Done {
            return Ok(());
        }
        match self.presence.looked(now, rules, looked) {
            Seen::Wait => {}
            Seen::GiveLogin => self.desk.add(Job::GiveLogin),
            Seen::Verify => self.desk.add(Job::Verify(Followed::Link)),
            Seen::Redirect => {
                let server = &rules.server;
                tracing::warn!(
                    event = events::SERVER_RESTARTED,
                    "the server {server} restarted and follows no primary: it is redirected again"
                );
                self.redirect = Redirect::UnderWay { again: true };
                self.desk.add(Job::Prepare { after_restart: true });
            }
            Seen::TakenOver(how) => return Err(Lapse::TakenOver(how)),
            Seen::Fail(failure) => return Err(Lapse::Failed(failure)),
        }
        Ok(())
    }

    /// When to look at the server if it stays away.
    pub(super) fn look_at(&self) -> Option<Instant> {
        let looks = |job| matches!(job, Job::Look | Job::GiveLogin | Job::Verify(Followed::Link));
        let may_look = self.redirect == Redirect::Done && !self.desk.has(looks);
        self.presence.deadline().filter(|_| may_look)
    }

    /// Whether such a job waits or is being done.
    pub(super) fn has(&self, job: Job) -> bool {
        self.desk.has(|other| other == job)
    }

    /// Notes that the server does not know what comes next in the primary's stream.
    pub(super) fn note_unfit(&mut self) {
        self.unfit = true;
    }

    /// The state in which to leave the server.
    pub(super) fn leaving(&self, loaded: bool) -> Leaving {
        match self.redirect {
            Redirect::Not | Redirect::UnderWay { again: false } => Leaving::Untouched,
            _ if self.taken_over => Leaving::AsItIs,
            _ if loaded && self.unfit => Leaving::Alone,
            _ if loaded => Leaving::ToPrimary,
            _ => Leaving::Detached,
        }
    }
}

// State: how far the server is, and when to ask whether it can be handed to the primary.

/// Pauses between questions whether the primary would continue the server: the first, and the longest. Each is twice as
/// long as the one before. An answer that the primary keeps the stream from an offset on is out of date within
/// milliseconds; one that its backlog is too small stays true for long.
const QUESTION_PAUSES: [Duration; 2] = [Duration::from_millis(20), Duration::from_millis(250)];

/// How long the primary is asked whether it would continue a server that gets no more of the stream. Longer than an
/// answer takes, and short for someone who waits for the agent to stop.
const PARTING_LIMIT: Duration = Duration::from_secs(5);

/// Pause after a failed hand-off before the next one.
const AFTER_A_FAILED_HAND_OFF: Duration = Duration::from_secs(2);

/// The part of the primary's backlog that the server may lag behind at the hand-off: one in this number.
const NEAR_ENOUGH_PART: u64 = 10;

/// How far the server is.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum State {
    /// There are no tables to read yet.
    Waiting,
    /// Slots arrive and are written to the server.
    Transfer,
    /// All slots have arrived here, and the server loads them.
    Loading,
    /// The server applies the stream up to the present.
    CatchUp(CatchUp),
    /// The server is in step and is fed until the agent is stopped (`--stay`).
    Staying,
    HandingOff(HandOff),
    /// A hand-off has failed: the server is being pointed back at our link.
    Returning,
    Ending(Ending),
}

/// The progress of a server that has loaded the snapshot and applies the stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct CatchUp {
    /// When to ask for the server's offset next.
    ask_at: Instant,
    /// The pause after the next question.
    pause: Duration,
    /// Whether the hand-off was asked for and not answered.
    asked: bool,
    /// Set when the server gets no more of the stream, or is to leave the link.
    parting: Option<Parting>,
}

/// The end of the stream through the source. The primary is asked for a while whether it would continue the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Parting {
    /// Why the stream ends, for the log.
    pub(super) why: &'static str,
    /// The signal that ends it, if any.
    pub(super) because: Option<&'static str>,
    /// What follows if the primary would not.
    pub(super) otherwise: Otherwise,
    /// Until when it is asked.
    pub(super) until: Instant,
}

/// What becomes of a server that the primary would not continue, and that gets no more of the stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Otherwise {
    /// It loads another snapshot of the source. The primary serves no full copy.
    LoadAgain,
    /// It is left to its own replication, which takes a full copy of the primary: there is no source, or no agent.
    FullCopy,
}

impl State {
    /// The phase that the source is sent; `None` after a failure, when nothing more is sent.
    pub(super) fn phase(&self) -> Option<Phase> {
        match self {
            State::Waiting => Some(Phase::Waiting),
            State::Transfer => Some(Phase::Transfer),
            State::Loading => Some(Phase::Load),
            State::CatchUp(_) => Some(Phase::CatchUp),
            State::Staying => Some(Phase::Stay),
            State::HandingOff(_) | State::Returning => Some(Phase::HandOff),
            State::Ending(ending) => ending.phase(),
        }
    }
}

impl CatchUp {
    /// The server has just loaded the snapshot.
    pub(super) fn begin(now: Instant) -> CatchUp {
        CatchUp { ask_at: now, pause: QUESTION_PAUSES[0], asked: false, parting: None }
    }

    /// The server did not get in step with the primary.
    pub(super) fn begin_again(now: Instant) -> CatchUp {
        CatchUp { ask_at: now + AFTER_A_FAILED_HAND_OFF, ..CatchUp::begin(now) }
    }

    /// The stream through the source ends.
    pub(super) fn part(
        now: Instant,
        why: &'static str,
        because: Option<&'static str>,
        otherwise: Otherwise,
    ) -> CatchUp {
        CatchUp {
            parting: Some(Parting { why, because, otherwise, until: now + PARTING_LIMIT }),
            ..CatchUp::begin(now)
        }
    }

    /// The stream is there again.
    pub(super) fn is_fed_again(&mut self) {
        self.parting = self.parting.filter(|parting| parting.because.is_some());
    }

    pub(super) fn parting(&self) -> Option<Parting> {
        self.parting
    }

    /// The parting whose time is over.
    pub(super) fn parted(&self, now: Instant) -> Option<Parting> {
        self.parting.filter(|parting| parting.until <= now)
    }

    /// When to ask for the server's offset. Not while the hand-off is being asked for.
    pub(super) fn question_at(&self) -> Option<Instant> {
        (!self.asked).then_some(self.ask_at)
    }

    /// When something is due without an event; `is_asking`: the server is being asked for its offset.
    pub(super) fn deadline(&self, is_asking: bool) -> Option<Instant> {
        let question = self.question_at().filter(|_| !is_asking);
        [question, self.parting.map(|parting| parting.until)].into_iter().flatten().min()
    }

    /// The server is not near enough yet.
    pub(super) fn is_behind(&mut self, now: Instant) {
        self.ask_at = now + QUICK;
    }

    /// The server did not answer.
    pub(super) fn pauses(&mut self, until: Instant) {
        self.ask_at = until;
    }

    /// The server is near enough; `asked`: so the hand-off was asked for.
    pub(super) fn is_near(&mut self, now: Instant, asked: bool) {
        (self.ask_at, self.asked) = (now + self.pause, asked);
        self.pause = (self.pause * 2).min(QUESTION_PAUSES[1]);
    }

    /// Notes the answer, or that none will come. Returns whether one was awaited.
    pub(super) fn answered(&mut self) -> bool {
        std::mem::take(&mut self.asked)
    }
}

/// Whether a server that has applied the stream up to this offset can go to the primary. Under writes the present runs
/// ahead of every question: near enough is where the primary's backlog reaches, or can be made to reach. While the
/// stream is not read its end may be anywhere.
pub(super) fn is_near_enough(reading: &Reading, applied: u64, backlog_bytes: u64, sizes: &PinSizes) -> bool {
    let part = backlog_bytes / NEAR_ENOUGH_PART;
    let slack = if backlog_bytes >= sizes.least_backlog { part.max(sizes.slack) } else { part };
    let fetched = reading.stream_fetched;
    !reading.stream_paused
        && applied.saturating_add(slack) >= fetched
        && reading.stream_delivered.saturating_add(slack) >= fetched
}

// Presence: whether the server connects to the link, and when to look at it.

/// How long a server may stay away from our link before it is looked at. Servers try again each second.
const MISSED_LIMIT: Duration = Duration::from_secs(2);

/// How long a server may follow the link without ever coming to it, should `--retry-for` be longer. Servers try again
/// each second: one that did not come in this time cannot reach the link, or does not accept it.
const FIRST_LINK_LIMIT: Duration = Duration::from_secs(60);

/// How long a server may stay away from the link, should `--retry-for` be shorter: some of its tries.
const LEAST_LINK_LIMIT: Duration = Duration::from_secs(10);

/// Links in a row that may end before the server is given anything. Servers make a new one each second.
const UNUSED_LINKS_LIMIT: u32 = 30;

/// Whether the server connects to the link, and when to look at it next.
pub(super) struct Presence {
    /// Since when the server should have connected to the link and has not; set anew by each look.
    missed: Option<Instant>,
    /// Since when the server could have come to our link and has not.
    away_since: Option<Instant>,
    /// The server has come once.
    has_come: bool,
    /// The cause of its absence was logged.
    is_told: bool,
    /// Links that ended in a row before the server was given anything.
    unused_links: u32,
    /// Bytes that the server had been given when its last link ended.
    given: u64,
    /// Since when it has not answered.
    silent_since: Option<Instant>,
    /// The run id of the server that was pointed at the link.
    run_id: Option<String>,
}

/// What follows from a look at the server.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Seen {
    /// Nothing. It is looked at again, or has connected meanwhile.
    Wait,
    /// It follows the link and does not connect: its login may be wrong.
    GiveLogin,
    /// It restarted and follows no primary: it is pointed at the link again.
    Redirect,
    /// Another client has changed it; the text continues a sentence that begins with the server's name.
    TakenOver(String),
    /// It follows something else. The present connection verifies that, since it may just have changed.
    Verify,
    Fail(Failure),
}

impl Presence {
    pub(super) fn new(run_id: Option<String>) -> Presence {
        Presence {
            missed: None,
            away_since: None,
            has_come: false,
            is_told: false,
            unused_links: 0,
            given: 0,
            silent_since: None,
            run_id,
        }
    }

    /// Expects the server at the link from now on.
    pub(super) fn expect(&mut self, now: Instant) {
        self.missed = Some(now);
        self.away_since = Some(now);
    }

    /// Notes that the server's link ended.
    pub(super) fn gone(&mut self, now: Instant) {
        self.missed.get_or_insert(now);
        self.away_since.get_or_insert(now);
    }

    /// Notes that the server has connected.
    pub(super) fn came(&mut self) {
        self.missed = None;
        self.away_since = None;
        self.is_told = false;
        self.has_come = true;
    }

    /// A link ended for this reason, not in the middle of a snapshot. Fails if too many of them were of no use.
    pub(super) fn link_ended(&mut self, rules: &Rules, reading: &Reading, text: &str) -> Result<(), Failure> {
        let is_used = reading.loaded || reading.bytes_delivered > self.given;
        self.given = reading.bytes_delivered;
        self.unused_links = if is_used { 0 } else { self.unused_links + 1 };
        if self.unused_links < UNUSED_LINKS_LIMIT {
            return Ok(());
        }
        let text = format!(
            "the link of the server {} ended {UNUSED_LINKS_LIMIT} times in a row before it was given anything ({text}); its log \
             says why",
            rules.server
        );
        Err(Failure::new(Code::SyncFailed, text))
    }

    /// Notes that the server has answered.
    pub(super) fn answered(&mut self) {
        self.silent_since = None;
    }

    /// Notes that the server did not answer. Returns whether it has been silent for longer than the limit.
    pub(super) fn silent(&mut self, now: Instant, limit: Duration) -> bool {
        now.duration_since(*self.silent_since.get_or_insert(now)) > limit
    }

    /// When to look at the server.
    pub(super) fn deadline(&self) -> Option<Instant> {
        Some(self.missed? + MISSED_LIMIT)
    }

    /// Handles what was seen over a new connection.
    pub(super) fn looked(&mut self, now: Instant, rules: &Rules, looked: Result<Look, Failure>) -> Seen {
        if self.missed.is_none() {
            return Seen::Wait;
        }
        self.missed = Some(now);
        let look = match looked {
            Ok(look) => look,
            Err(failure) if self.silent(now, rules.retry_for) => return Seen::Fail(failure),
            Err(failure) => {
                tracing::debug!("{failure}; looking again");
                // It could not have come.
                self.away_since = Some(now);
                return Seen::Wait;
            }
        };
        self.answered();
        match look.follows {
            _ if look.loading => {
                self.away_since = Some(now);
                Seen::Wait
            }
            Follows::Link => self.stays_away(now, rules, &look.trouble),
            Follows::Nothing if look.run_id != self.run_id => {
                if look.keys > 0 && !rules.replace {
                    let keys = counted(look.keys, "key");
                    return Seen::TakenOver(format!("restarted and holds {keys} now; give --replace if they may go"));
                }
                self.run_id = look.run_id;
                Seen::Redirect
            }
            Follows::Nothing | Follows::Another => Seen::Verify,
        }
    }

    /// The server follows the link, answers, and has not come.
    fn stays_away(&mut self, now: Instant, rules: &Rules, trouble: &str) -> Seen {
        let away = now.duration_since(*self.away_since.get_or_insert(now));
        let (server, seconds) = (&rules.server, away.as_secs());
        let text = format!("the server {server} has not completed its link to us for {seconds} s: {trouble}");
        let longest = if self.has_come { rules.retry_for } else { rules.retry_for.min(FIRST_LINK_LIMIT) };
        if away > longest.max(LEAST_LINK_LIMIT) {
            return Seen::Fail(Failure::new(Code::SyncFailed, text));
        }
        // Not at the first look: a server whose login was wrong comes after it was given the right one.
        if away >= 2 * MISSED_LIMIT && !std::mem::replace(&mut self.is_told, true) {
            tracing::warn!("{text}");
        }
        Seen::GiveLogin
    }
}

// Supply: whether the source feeds the delivery, and when to try again.

/// How long an attended server waits for a source whose own server is cut off from their primary: a link that broke
/// is back within a second or two, and the primary can serve the server meanwhile.
const CUT_OFF_LIMIT: Duration = Duration::from_secs(3);

/// How long a server that is fed (`--stay`) may be without its source until the primary is asked. Short: the server
/// gets nothing of the primary meanwhile, and a source that was started again does not know the old stream.
const STAY_WITHOUT_SOURCE: Duration = Duration::from_secs(2);

/// How long tables must be read without a loss, at least, before an earlier loss counts as overcome although nothing
/// new has arrived. Longer than it takes to find that a slot is damaged.
const QUIET: Duration = Duration::from_secs(60);

/// Whether the source feeds the delivery, and when to connect again.
pub(super) struct Supply {
    pub(super) state: SupplyState,
    pub(super) has_session: bool,
    /// Since when losses have followed each other without progress. Connecting again is no progress: a path that
    /// damages every slot lets each new connection begin.
    away_since: Option<Instant>,
    /// When the tables of the last offer were attached.
    attached_at: Option<Instant>,
    /// The furthest that the transfer has come.
    reached: Reached,
    waiting: Option<Waiting>,
    /// Whether the source ended the session because the server read nothing. The server must answer before the source
    /// is asked for another snapshot, which would cost the primary a fork.
    pub(super) stalled: bool,
    attempt: u64,
    backoff: Backoff,
    /// A loss that was noticed while the server was on its way to the primary.
    pub(super) deferred: Option<Loss>,
}

/// The state of the supply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SupplyState {
    /// Nothing was asked for.
    Idle,
    /// The source was asked for a snapshot.
    Asked,
    /// The tables of an offer are being connected.
    Connecting { attempt: u64 },
    /// The delivery reads them.
    Attached,
    /// The next attempt is due at this time.
    Pausing { until: Instant },
    /// Before the next attempt the server is asked whether it answers.
    CheckingServer,
    /// A new session is being begun.
    Reconnecting,
}

/// The furthest that the transfer has come. Each number only grows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Reached {
    slots_held: u64,
    bytes_delivered: u64,
    stream_fetched: u64,
}

impl Reached {
    /// Notes how far the transfer is, and returns whether it has come further. Until the server holds the snapshot,
    /// only the snapshot counts: the stream may arrive while no slot does.
    fn has_grown(&mut self, reading: &Reading) -> bool {
        let before = *self;
        self.slots_held = self.slots_held.max(reading.slots_held);
        self.bytes_delivered = self.bytes_delivered.max(reading.bytes_delivered);
        self.stream_fetched = self.stream_fetched.max(reading.stream_fetched);
        if reading.loaded {
            return self.stream_fetched > before.stream_fetched;
        }
        self.slots_held > before.slots_held || self.bytes_delivered > before.bytes_delivered
    }
}

struct Waiting {
    since: Instant,
    /// Since when the source's server has been cut off. Attempts of the source to take a snapshot do not end that.
    cut_off_since: Option<Instant>,
    cause: WaitCause,
    text: String,
}

impl Waiting {
    /// How long the source may have nothing to offer, and since when that counts.
    fn limit(&self, rules: &Rules) -> (Instant, Duration) {
        match self.cause {
            WaitCause::CutOff if rules.intercepted => {
                (self.cut_off_since.unwrap_or(self.since), CUT_OFF_LIMIT.min(rules.retry_for))
            }
            cause => (self.since, wait_limit(cause, rules.retry_for)),
        }
    }
}

/// What follows from a loss.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// Try again after this pause.
    Pause(Duration),
    /// The source feeds the server no more, which has all that the snapshot held.
    Part,
    Fail(Failure),
}

impl Supply {
    /// Begins with a new session.
    pub(super) fn new(backoff: Backoff) -> Supply {
        Supply {
            state: SupplyState::Idle,
            has_session: true,
            away_since: None,
            attached_at: None,
            reached: Reached::default(),
            waiting: None,
            stalled: false,
            attempt: 0,
            backoff,
            deferred: None,
        }
    }

    /// Notes that the source has nothing to offer yet.
    pub(super) fn waits(&mut self, now: Instant, cause: WaitCause, text: String) {
        let before = self.waiting.take().map(|waiting| (waiting.since, waiting.cut_off_since));
        let (since, mut cut_off_since) = before.unwrap_or((now, None));
        if cause == WaitCause::CutOff {
            cut_off_since.get_or_insert(now);
        }
        self.waiting = Some(Waiting { since, cut_off_since, cause, text });
    }

    /// Begins to connect to the tables of an offer. Earlier attempts become void.
    pub(super) fn connecting(&mut self) -> u64 {
        self.attempt += 1;
        self.state = SupplyState::Connecting { attempt: self.attempt };
        self.attempt
    }

    pub(super) fn is_connecting(&self, attempt: u64) -> bool {
        self.state == SupplyState::Connecting { attempt }
    }

    /// Notes that the delivery reads the tables of the last offer.
    pub(super) fn attached(&mut self, now: Instant) {
        self.state = SupplyState::Attached;
        self.attached_at = Some(now);
        self.waiting = None;
        self.deferred = None;
    }

    /// Whether the delivery reads the tables of the last offer.
    pub(super) fn is_attached(&self) -> bool {
        self.state == SupplyState::Attached
    }

    /// A new session has begun.
    pub(super) fn connected(&mut self) {
        self.has_session = true;
        self.backoff.reset();
        self.state = SupplyState::Idle;
    }

    /// The pause before the next attempt.
    pub(super) fn pause(&mut self) -> Duration {
        self.backoff.next()
    }

    /// Handles a failure of the feed or the source.
    pub(super) fn lost(&mut self, now: Instant, rules: &Rules, reading: &Reading, loss: &Loss) -> Verdict {
        let quiet = if rules.stay && reading.loaded { STAY_WITHOUT_SOURCE } else { QUIET.max(rules.retry_for) };
        let was_quiet = self.attached_at.take().is_some_and(|at| now.duration_since(at) > quiet);
        if self.reached.has_grown(reading) || was_quiet {
            self.away_since = None;
        }
        let away = now.duration_since(*self.away_since.get_or_insert(now));
        if !loss.passes {
            return if reading.loaded { Verdict::Part } else { Verdict::Fail(loss.failure.clone()) };
        }
        if away > rules.retry_for {
            let text = format!("tried for {} s (--retry-for)", rules.retry_for.as_secs());
            return Verdict::Fail(loss.failure.clone().and(&text));
        }
        let pause = self.backoff.next();
        self.state = SupplyState::Pausing { until: now + pause };
        Verdict::Pause(pause)
    }

    /// Whether a server that is fed (`--stay`) has been without its source for long enough.
    pub(super) fn is_missed(&self, now: Instant) -> bool {
        self.away_since.is_some_and(|since| now.duration_since(since) > STAY_WITHOUT_SOURCE)
    }

    /// The pause is over.
    pub(super) fn is_due(&self, now: Instant) -> bool {
        matches!(self.state, SupplyState::Pausing { until } if until <= now)
    }

    /// The source has had nothing to offer for too long.
    pub(super) fn gives_up(&self, now: Instant, rules: &Rules) -> Option<Failure> {
        let waiting = self.waiting.as_ref()?;
        let (since, limit) = waiting.limit(rules);
        let waited = now.duration_since(since);
        (waited > limit).then(|| no_snapshot(&rules.source, waited, &waiting.text))
    }

    /// When something is due without an event.
    pub(super) fn deadline(&self, rules: &Rules) -> Option<Instant> {
        let pause = match self.state {
            SupplyState::Pausing { until } => Some(until),
            _ => None,
        };
        // Behind the limit, and not at it.
        let waited = self.waiting.as_ref().map(|waiting| waiting.limit(rules));
        let waited = waited.map(|(since, limit)| since + limit + Duration::from_millis(1));
        [pause, waited].into_iter().flatten().min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn questions_come_quickly_at_first_and_then_four_times_a_second() {
        let began = Instant::now();
        let (mut now, mut pauses, mut catch_up) = (began, Vec::new(), CatchUp::begin(began));
        for _ in 0..6 {
            catch_up.is_near(now, true);
            assert_eq!(catch_up.question_at(), None, "the answer is awaited");
            assert!(catch_up.answered());
            let next = catch_up.question_at().unwrap_or(now);
            pauses.push(next.duration_since(now).as_millis());
            now = next;
        }
        assert_eq!(pauses, [20, 40, 80, 160, 250, 250]);
    }
}
