//! Machine: the replica's decisions, and nothing else. Events, readings and the time go in, actions come out.
//!
//! It does no I/O, reads no clock and no shared memory, and draws no randomness of its own: its pauses follow from the
//! [`Backoff`] that it is given. The same calls give the same actions, so that a run can be replayed from its events.
//!
//! ```text
//!   Waiting ── tables ──▶ Transfer ── last slot ──▶ Loading ── first ACK ──▶ CatchUp ── covered ──▶ HandingOff
//!      ▲                     ▲                        │                      │   ▲                    │   │
//!      │                     └───── link lost ────────┘                      │   └──── Returning ◀────┘   │ in step
//!      └───── the server lost what it had loaded ◀───────────────────────────┤     (at most twice)        ▼
//!                                                                            └─▶ Staying ──▶ ...     Finishing
//!   a failure in any state ──▶ Leaving ──▶ Ended                              (--stay)                   │
//!                                                                       Ended ◀── Lingering ◀────────────┘
//! ```
//!
//! The calls, in the order in which the driver makes them: [`Replica::begin`], [`Replica::poll_action`] until it gives
//! nothing, then wait for an event or for [`Replica::deadline`], [`Replica::handle`], and again.
//!
//! Concerns beside the state have a type each: [`Supply`] (whether the source feeds the delivery), [`ServerSide`] (what
//! was done to the server, whether it comes to our link, and the one job that its task is at), [`HandOff`] and
//! [`Ending`].
//!
//! What must hold, and is checked after every event of random runs:
//! - The server's task has one job at a time, and reports before it gets the next.
//! - No server is pointed at the primary before the primary was asked whether it would continue it, for some seconds at
//!   least. One that it would not continue loads another snapshot of the source, if there is a source.
//! - A failure before the server holds the whole snapshot ends with the server at its former primary, or detached.
//!   Afterwards the server always goes to the primary: its own replication makes good whatever is missing.
//! - A server that another client has taken over is not changed any more, except that settings are put back.
//! - A server that began a full copy of the primary is never pointed back at the link, which would abort the copy.
//! - The delivery is ordered to use the module before the server is pointed at the link from nothing: the server
//!   may ask for its payload at once.
//! - Every state waits for a report, a deadline or the source, so that no run stands still.
// Larger than the bound: the reactions to all events stand in one place, in the order of a sync.

mod event;
mod hand_off;
#[cfg(test)]
mod replay;
mod server_side;

use std::collections::VecDeque;
use std::time::Instant;

use remora_protocol::Phase;

pub use self::event::{
    Action, DeliveryEvent, Event, Followed, Follows, Introduced, Job, Lapse, Leaving, Left, Look, NoAnswer,
    NotFollowed, PrimaryLink, Reading, Report, Rules, SourceEvent,
};
use self::hand_off::{Ending, HAND_OFF_LIMIT, HandOff, HandedOver, Next, Uncovered};
use self::server_side::{CatchUp, Otherwise, Parting, ServerSide, State, is_near_enough};
use self::server_side::{Supply, SupplyState, Verdict};
use super::report::Moments;
use remora_base::pace::Backoff;
use remora_process::events;
use remora_process::exit::{Code, Failure};
use remora_reader::addresses::Loss;
use remora_reader::source::Tables;

/// Loads that the server may break off before the sync fails.
const BROKEN_LOADS_LIMIT: u32 = 3;

/// Snapshots that a server may load in the place of one whose stream has ended. What ended the stream of three would
/// end the next one too: the source's journal is too short for the time that the transfer takes.
const LOADS_AGAIN_LIMIT: u32 = 2;

/// Hand-offs that may fail before the sync fails.
const HAND_OFFS_LIMIT: u32 = 3;

/// The replica's decisions: events go in, actions come out.
// Larger than the bound: a method for each thing that an event can bring. What a concern can decide alone is its
// type's.
pub struct Replica {
    rules: Rules,
    reading: Reading,
    state: State,
    supply: Supply,
    server: ServerSide,
    /// What the delivery reads, or has read.
    tables: Option<Tables>,
    moments: Moments,
    /// A signal that came when the server had loaded.
    stop: Option<&'static str>,
    broken_loads: u32,
    failed_hand_offs: u32,
    loads_again: u32,
    interruptions: u32,
    uncovered: Uncovered,
    hand_off_offset: u64,
    actions: VecDeque<Action>,
}

impl Replica {
    /// Starts a sync over a new session with the source.
    pub fn begin(now: Instant, rules: Rules, backoff: Backoff) -> Replica {
        let server = ServerSide::new(rules.run_id.clone(), rules.intercepted);
        let mut replica = Replica {
            rules,
            reading: Reading::default(),
            state: State::Waiting,
            supply: Supply::new(backoff),
            server,
            tables: None,
            moments: Moments::begin(now),
            stop: None,
            broken_loads: 0,
            failed_hand_offs: 0,
            loads_again: 0,
            interruptions: 0,
            uncovered: Uncovered::default(),
            hand_off_offset: 0,
            actions: VecDeque::new(),
        };
        replica.join();
        replica
    }

    /// Handles one event.
    pub fn handle(&mut self, now: Instant, reading: Reading, event: Event) {
        self.reading = reading;
        match event {
            Event::Tick => {}
            Event::Stop { signal } => self.stop(now, signal),
            Event::Source(event) => self.source(now, event),
            Event::Tables { attempt, connected } => self.tables_connected(now, attempt, connected),
            Event::Delivery(event) => self.delivery(now, event),
            Event::Server(report) => self.server_reports(now, report),
        }
        self.settle(now);
    }

    /// The next action. The driver polls until it gets `None`.
    pub fn poll_action(&mut self) -> Option<Action> {
        self.actions.pop_front()
    }

    /// When [`Event::Tick`] is due. `None` if only an event continues the run.
    pub fn deadline(&self) -> Option<Instant> {
        let of_state = match &self.state {
            State::Ending(ending) => return ending.deadline(),
            State::HandingOff(hand_off) => return hand_off.deadline(),
            State::Returning => return None,
            State::CatchUp(catch_up) => catch_up.deadline(self.server.has(Job::AskOffset)),
            _ => None,
        };
        [of_state, self.server.look_at(), self.supply.deadline(&self.rules)].into_iter().flatten().min()
    }

    // ---- what others may see ----

    /// The phase that the source is sent; `None` after a failure, when nothing more is sent.
    pub fn phase(&self) -> Option<Phase> {
        self.state.phase()
    }

    /// What the delivery reads, or has read.
    pub fn tables(&self) -> Option<&Tables> {
        self.tables.as_ref()
    }

    /// Whether the server was pointed at the link.
    pub fn follows_link(&self) -> bool {
        self.server.follows_link()
    }

    pub(super) fn moments(&self) -> &Moments {
        &self.moments
    }

    /// How often the sync was interrupted.
    pub fn interruptions(&self) -> u32 {
        self.interruptions
    }

    /// The offset at which the server was found in step with the primary; 0 before.
    pub fn hand_off_offset(&self) -> u64 {
        self.hand_off_offset
    }

    // ---- the source ----

    fn source(&mut self, now: Instant, event: SourceEvent) {
        if self.is_over() {
            return;
        }
        match event {
            SourceEvent::Connected => {
                self.supply.connected();
                if !self.is_on_its_way() {
                    self.join();
                }
            }
            SourceEvent::Unreachable(loss) => self.come_again(now, loss),
            SourceEvent::Lost(loss) => self.source_lost(now, loss),
            SourceEvent::Waiting { cause, text } => {
                tracing::info!(event = events::SNAPSHOT_AWAITED, "waiting: {text}");
                self.supply.waits(now, cause, text);
            }
            SourceEvent::Offer(offer) => {
                if self.is_on_its_way() && !is_forgotten() {
                    // The server goes to the primary. Should it come back, the source is asked again.
                    self.supply.state = SupplyState::Idle;
                } else if self.supply.has_session && !self.is_on_its_way() {
                    let attempt = self.supply.connecting();
                    self.actions.push_back(Action::ConnectTables { attempt, offer });
                }
            }
            SourceEvent::GenerationGone { generation, text } => {
                tracing::warn!(
                    event = events::SNAPSHOT_GIVEN_UP,
                    generation,
                    "the source has given up its snapshot: {text}"
                );
                self.interruptions += 1;
                if self.reading.loaded && !self.is_on_its_way() {
                    self.part(now, "its stream through the source has ended", None, Otherwise::LoadAgain);
                }
            }
            SourceEvent::HandOffAnswer { covered, text } => self.answered(now, covered, &text),
        }
    }

    fn join(&mut self) {
        if self.supply.has_session {
            self.supply.state = SupplyState::Asked;
            self.actions.push_back(Action::Join);
        }
    }

    fn source_lost(&mut self, now: Instant, loss: Loss) {
        self.supply.has_session = false;
        if let State::CatchUp(catch_up) = &mut self.state {
            catch_up.answered();
        }
        if loss.stalled {
            self.supply.stalled = true;
            self.actions.push_back(Action::GiveUpLoad);
            if self.state == State::Loading {
                self.slots_wanted();
            }
        }
        self.come_again(now, loss);
    }

    /// Sets the next attempt, or ends the sync where another would not help or the time for them is over. Meanwhile a
    /// server that has loaded goes to the primary as soon as that would continue it.
    fn come_again(&mut self, now: Instant, loss: Loss) {
        if self.is_on_its_way() {
            self.supply.state = SupplyState::Idle;
            self.supply.deferred = Some(loss);
            return;
        }
        match self.supply.lost(now, &self.rules, &self.reading, &loss) {
            Verdict::Pause(pause) => {
                tracing::warn!(
                    event = events::SOURCE_LOST,
                    "{}; trying again in {} ms",
                    loss.failure,
                    pause.as_millis()
                );
                self.interruptions += 1;
                if self.state == State::Staying && self.supply.is_missed(now) {
                    self.state = State::CatchUp(CatchUp::begin(now));
                }
            }
            Verdict::Part => {
                tracing::warn!("{}; asking whether the primary would continue the server", loss.failure);
                self.supply.state = SupplyState::Idle;
                let otherwise = if loss.history_gone { Otherwise::LoadAgain } else { Otherwise::FullCopy };
                self.supply.deferred = Some(loss);
                self.part(now, "the source can't feed it any more", None, otherwise);
            }
            Verdict::Fail(failure) => self.fail(failure),
        }
    }

    /// The pause after a loss is over.
    fn try_again(&mut self) {
        if self.supply.stalled {
            self.supply.state = SupplyState::CheckingServer;
            if !self.server.has(Job::Look) {
                self.server.desk.add(Job::Look);
            }
        } else if self.supply.has_session {
            self.join();
        } else {
            self.connect_source();
        }
    }

    fn connect_source(&mut self) {
        self.supply.state = SupplyState::Reconnecting;
        self.actions.push_back(Action::ConnectSource);
    }

    fn tables_connected(&mut self, now: Instant, attempt: u64, connected: Result<Tables, Failure>) {
        if self.is_over() || !self.supply.is_connecting(attempt) {
            return;
        }
        let tables = match connected {
            Ok(tables) if !self.is_on_its_way() => tables,
            // The server goes to the primary. Should it come back, the tables are asked for again.
            Ok(_) => return self.supply.state = SupplyState::Idle,
            Err(failure) => return self.feed_lost(now, failure),
        };
        let other_history = |before: &Tables| before.offer.replid != tables.offer.replid;
        if self.reading.loaded && self.tables.as_ref().is_some_and(other_history) {
            self.supply.state = SupplyState::Idle;
            return self.part(now, "the source no longer has its server's history", None, Otherwise::LoadAgain);
        }
        if let State::CatchUp(catch_up) = &mut self.state {
            catch_up.is_fed_again();
        }
        self.moments.offered.get_or_insert(now);
        self.supply.attached(now);
        self.actions.push_back(Action::Attach { attempt });
        tables.log_what_is_new(self.tables.as_ref());
        let generation = tables.offer.generation;
        let before = self.tables.replace(tables).map(|before| before.offer.generation);
        if self.state == State::Waiting || before != Some(generation) {
            self.slots_wanted();
        }
        self.server.begin();
    }

    fn feed_lost(&mut self, now: Instant, failure: Failure) {
        // Without a session the driver is connecting again, and a new session brings a new feed.
        if self.supply.has_session {
            self.come_again(now, Loss::passing(failure));
        }
    }

    /// The answer to [`Action::AskHandOff`].
    fn answered(&mut self, now: Instant, covered: bool, text: &str) {
        let State::CatchUp(catch_up) = &mut self.state else { return };
        if !catch_up.answered() {
            return; // the server has restarted since the question
        }
        if covered {
            let parting = catch_up.parting();
            let why = match parting {
                Some(parting) => parting.why,
                None if self.supply.is_attached() => "caught up",
                None => "the source is away",
            };
            return self.hand_off(now, why, parting.and_then(|parting| parting.because));
        }
        self.uncovered.tell(now, text);
    }

    // ---- the delivery ----

    fn delivery(&mut self, now: Instant, event: DeliveryEvent) {
        if self.is_over() {
            return;
        }
        match event {
            DeliveryEvent::Asked => self.server.presence.came(),
            DeliveryEvent::Introduce { number } => self.server.desk.add(Job::Introduce { number }),
            DeliveryEvent::Fetched => {
                self.moments.fetched = Some(now);
                self.loading();
            }
            DeliveryEvent::PayloadSent => self.loading(),
            DeliveryEvent::Loaded => {
                self.moments.loaded = Some(now);
                self.moments.fetched.get_or_insert(now);
                if !self.is_on_its_way() {
                    self.state = State::CatchUp(CatchUp::begin(now));
                    self.server.desk.add(Job::PutSettingsBack);
                    self.actions.push_back(Action::TellProgress);
                }
            }
            DeliveryEvent::LinkLost { text, loading } => self.link_lost(now, &text, loading),
            DeliveryEvent::FeedLost { failure } => {
                self.interruptions += 1;
                self.feed_lost(now, failure);
            }
            DeliveryEvent::FeedWanted => {
                if self.reading.loaded {
                    // On its way to the primary the server needs no feed. Should it come back, the source is asked.
                    return match self.state {
                        State::HandingOff(_) if self.supply.has_session => self.supply.state = SupplyState::Idle,
                        State::HandingOff(_) => {}
                        _ => self.join(),
                    };
                }
                if !self.is_on_its_way() {
                    if let Some(signal) = self.stop {
                        return self.fail(interrupted(signal));
                    }
                    self.state = State::Waiting;
                }
                if self.supply.has_session {
                    self.join();
                } else if self.supply.state == SupplyState::Idle {
                    self.connect_source();
                }
            }
            DeliveryEvent::Fatal { failure } => {
                if failure.code == Code::Refused {
                    self.server.note_unfit();
                }
                self.fail(failure);
            }
        }
    }

    /// The source must keep slots for this replica again, also if all slots of an earlier snapshot had arrived: in the
    /// phase `Load` the source would wait for no progress, and a windowed snapshot would come to a stop.
    fn slots_wanted(&mut self) {
        if matches!(self.state, State::Waiting | State::Loading) && !self.reading.loaded {
            self.state = State::Transfer;
            self.moments.fetched = None;
        }
    }

    /// From here on the source need not keep any slot of the snapshot.
    fn loading(&mut self) {
        if matches!(self.state, State::Waiting | State::Transfer) {
            self.state = State::Loading;
        }
    }

    fn link_lost(&mut self, now: Instant, text: &str, loading: bool) {
        if !self.is_on_its_way() {
            self.server.presence.gone(now);
        }
        if !loading {
            tracing::debug!("the server's link ended: {text}");
            let ended = self.server.presence.link_ended(&self.rules, &self.reading, text);
            return self.check(ended.map_err(Lapse::Failed));
        }
        self.broken_loads += 1;
        self.interruptions += 1;
        self.moments.fetched = None;
        if !self.is_on_its_way() {
            self.state = State::Transfer;
        }
        if self.broken_loads >= BROKEN_LOADS_LIMIT {
            let (server, times) = (&self.rules.server, self.broken_loads);
            let text = format!(
                "the server {server} broke off loading the snapshot {times} times ({text}); its log says why. After a timeout \
                 raise its repl-timeout"
            );
            return self.fail(Failure::new(Code::SyncFailed, text));
        }
        tracing::warn!("the server's link ended while it was loading: {text}; it will ask again");
    }

    // ---- the server ----

    /// The server's task has done its job.
    fn server_reports(&mut self, now: Instant, report: Report) {
        if !self.server.note(&report) {
            return;
        }
        if let State::Ending(ending) = &mut self.state {
            return ending.server(now, &self.rules, &self.reading, report, &mut self.actions);
        }
        match report {
            Report::Prepared(Ok(by_module)) => self.server.prepared(now, by_module, &mut self.actions),
            Report::Followed(Ok(())) => tracing::info!(event = events::LINK_FOLLOWED, "the server follows our link"),
            Report::Followed(Err(NotFollowed::NoTransaction(text))) => {
                self.server.without_transaction(now, &text, &mut self.actions);
            }
            Report::Introduced { number, outcome } => {
                let introduced = self.server.introduced(number, outcome, &mut self.actions);
                self.check(introduced);
            }
            Report::Offset(answer) => self.offset(now, answer),
            Report::Looked(looked) => self.looked(now, looked),
            Report::PrimaryLink(answer) => self.primary_link(now, answer),
            Report::ReturnedToLink(Ok(())) => self.returned(now),
            Report::Settled(Ok(())) if !self.reading.loaded => self.settled_without_data(now),
            Report::Settled(Ok(())) | Report::PointedAtPrimary(Ok(())) | Report::Verified(Ok(())) => {
                if let State::HandingOff(hand_off) = &mut self.state
                    && let Some(job) = hand_off.done(now, &report)
                {
                    self.server.desk.add(job);
                }
            }
            Report::SettingsPutBack(Err(Lapse::Failed(failure))) => {
                tracing::warn!("a setting could not be put back yet: {failure}");
            }
            Report::LoginGiven(Err(failure)) => tracing::debug!("{failure}; trying again"),
            Report::LoginGiven(Ok(())) | Report::SettingsPutBack(Ok(())) | Report::Left(_) | Report::Finished(_) => {}
            Report::Settled(Err(failure)) => self.fail(failure),
            Report::Prepared(Err(lapse))
            | Report::Followed(Err(NotFollowed::Failed { lapse, .. }))
            | Report::SettingsPutBack(Err(lapse))
            | Report::Verified(Err(lapse))
            | Report::PointedAtPrimary(Err(lapse))
            | Report::ReturnedToLink(Err(lapse)) => self.check(Err(lapse)),
            Report::Ended => self.fail(Failure::local(
                "the server's task ended unexpectedly; this is a bug of remora, please report it",
            )),
        }
    }

    fn looked(&mut self, now: Instant, looked: Result<Look, Failure>) {
        if self.supply.state == SupplyState::CheckingServer {
            match &looked {
                Ok(_) => {
                    self.supply.stalled = false;
                    self.try_again();
                }
                Err(failure) => self.come_again(now, Loss::passing(failure.clone())),
            }
        }
        if !self.is_on_its_way() && !self.is_over() {
            let looked = self.server.looked(now, &self.rules, looked);
            self.check(looked);
        }
    }

    /// Handles the server's offset. Asks for the hand-off when the server has applied everything.
    fn offset(&mut self, now: Instant, answer: Result<u64, Failure>) {
        let State::CatchUp(catch_up) = &mut self.state else { return };
        let backlog = self.tables.as_ref().map_or(0, |tables| tables.offer.backlog_bytes);
        match answer {
            Ok(applied) => {
                self.server.presence.answered();
                let is_fed = self.supply.is_attached() && catch_up.parting().is_none();
                if is_fed && !is_near_enough(&self.reading, applied, backlog, &self.rules.sizes) {
                    catch_up.is_behind(now);
                } else if is_fed && self.rules.stay {
                    self.moments.caught_up = Some(now);
                    self.state = State::Staying;
                    tracing::info!(
                        event = events::IN_STEP,
                        offset = applied,
                        "in step; staying as its feed until stopped"
                    );
                } else {
                    let generation = self.tables.as_ref().map(|tables| tables.offer.generation);
                    catch_up.is_near(now, generation.is_some());
                    let question = generation.map(|generation| Action::AskHandOff { generation, offset: applied });
                    self.actions.extend(question);
                }
            }
            Err(failure) if self.server.presence.silent(now, self.rules.retry_for) => self.fail(failure),
            Err(_) => catch_up.pauses(now + self.supply.pause()),
        }
    }

    /// Ends the sync if another client has changed the server, or a job on it has failed.
    fn check(&mut self, job: Result<(), Lapse>) {
        match job {
            Ok(()) => {}
            Err(Lapse::TakenOver(how)) => {
                self.server.give_up();
                self.fail(Failure::new(Code::TakenOver, format!("the server {} {how}", self.rules.server)));
            }
            Err(Lapse::Failed(failure)) => self.fail(failure),
        }
    }

    // ---- the way to the primary ----

    /// The stream through the source ends for a server that has loaded. The primary is asked first whether it would
    /// continue the server.
    fn part(&mut self, now: Instant, why: &'static str, because: Option<&'static str>, otherwise: Otherwise) {
        let is_parting = matches!(&self.state, State::CatchUp(catch_up) if catch_up.parting().is_some());
        if !is_parting || because.is_some() {
            self.state = State::CatchUp(CatchUp::part(now, why, because, otherwise));
        }
    }

    /// The primary would not continue the server, which gets no more of the stream.
    fn parted(&mut self, now: Instant, parting: Parting) {
        let Parting { why, because, otherwise, .. } = parting;
        if otherwise == Otherwise::LoadAgain && self.loads_again < LOADS_AGAIN_LIMIT {
            tracing::warn!(
                event = events::LOADING_AGAIN,
                "{why}, and the primary would not continue the server without a full copy: the server loads another snapshot of \
                 the source"
            );
            self.loads_again += 1;
            self.interruptions += 1;
            self.moments.fetched = None;
            self.supply.deferred = None;
            self.state = State::Waiting;
            return self.actions.push_back(Action::LoadAgain);
        }
        tracing::warn!(
            "the primary does not say that it would continue the server; it goes there nevertheless, and may take a full copy \
             by its own replication"
        );
        self.hand_off(now, why, because);
    }

    /// Points the server at the primary and waits until it is in step there.
    fn hand_off(&mut self, now: Instant, why: &str, because: Option<&'static str>) {
        self.moments.caught_up.get_or_insert(now);
        tracing::info!(event = events::HANDING_OVER, primary = %self.rules.primary, "handing the server over: {why}");
        self.state = State::HandingOff(HandOff::begin(now, because));
        self.actions.push_back(Action::HoldStream);
        self.server.desk.add(Job::Settle);
    }

    fn primary_link(&mut self, now: Instant, answer: Result<PrimaryLink, NoAnswer>) {
        let State::HandingOff(hand_off) = &mut self.state else { return };
        let link = match answer {
            Ok(link) => link,
            Err(NoAnswer { passes: true, .. }) if hand_off.bears_silence(now) => return hand_off.watch(now),
            Err(NoAnswer { failure, .. }) => return self.fail(failure),
        };
        match hand_off.looked(now, link) {
            Next::Watch => {}
            Next::Do(job) => self.server.desk.add(job),
            Next::FullCopy => tracing::warn!(
                event = events::FULL_COPY,
                "the server did not go on where it was and is taking a full copy of the primary by itself; its log says \
                 why. If the primary's backlog did not reach back far enough, raise repl-backlog-size there"
            ),
            Next::InStep { offset } => {
                let because = hand_off.because;
                self.moments.handed_over = Some(now);
                self.hand_off_offset = offset;
                self.state = State::Ending(Ending::Finishing(HandedOver { because, offset }));
                // It does not come to the link any more.
                self.actions.push_back(Action::StopDelivery { done: true });
                if because.or(self.stop).is_some() {
                    self.actions.push_back(Action::Hurry);
                }
                self.server.desk.add(Job::Finish);
            }
        }
    }

    /// Points the server back at the link after it did not get in step with the primary.
    fn hand_off_failed(&mut self, now: Instant, because: Option<&'static str>) {
        self.failed_hand_offs += 1;
        let (server, primary) = (&self.rules.server, &self.rules.primary);
        if let Some(signal) = because.or(self.stop) {
            return self.fail(interrupted(signal));
        }
        if matches!(&self.state, State::HandingOff(hand_off) if hand_off.takes_full_copy()) {
            let seconds = self.rules.retry_for.max(HAND_OFF_LIMIT).as_secs();
            let text = format!(
                "the server {server} is taking a full copy of the primary {primary}, which has not ended after {seconds} s"
            );
            return self.fail(Failure::new(Code::SyncFailed, text));
        }
        if self.failed_hand_offs >= HAND_OFFS_LIMIT || !self.supply.has_session {
            let text = format!(
                "the server {server} holds the whole data set but does not get in step with the primary {primary}; the \
                 logs of both servers say why"
            );
            return self.fail(Failure::new(Code::SyncFailed, text));
        }
        tracing::warn!("the server did not get in step with the primary {primary}; back to our link, to try again");
        self.state = State::Returning;
        self.server.presence.expect(now);
        self.server.desk.add(Job::ReturnToLink);
    }

    fn returned(&mut self, now: Instant) {
        if self.state != State::Returning {
            return;
        }
        if let Some(signal) = self.stop {
            return self.fail(interrupted(signal));
        }
        let loaded = self.reading.loaded;
        self.state = if loaded { State::CatchUp(CatchUp::begin_again(now)) } else { State::Waiting };
        self.feed_again(now);
    }

    /// The server restarted without its data before it was pointed at the primary: it is filled again.
    fn settled_without_data(&mut self, now: Instant) {
        let State::HandingOff(hand_off) = &self.state else { return };
        if let Some(signal) = hand_off.because.or(self.stop) {
            return self.fail(interrupted(signal));
        }
        self.state = State::Transfer;
        self.feed_again(now);
    }

    /// The server is no longer on its way to the primary, and needs the source.
    fn feed_again(&mut self, now: Instant) {
        if let Some(loss) = self.supply.deferred.take() {
            self.come_again(now, loss);
        } else if self.supply.state == SupplyState::Idle {
            self.join();
        }
    }

    // ---- the ends ----

    fn stop(&mut self, now: Instant, signal: &'static str) {
        match &mut self.state {
            State::Ending(ending) => ending.stop(now, signal, &mut self.actions),
            State::HandingOff(_) | State::Returning => self.stop = Some(signal),
            // The second signal.
            _ if self.reading.loaded && self.stop.is_some() => self.hand_off(now, "we were stopped", Some(signal)),
            _ if self.reading.loaded => {
                self.stop = Some(signal);
                self.part(now, "we were stopped", Some(signal), Otherwise::FullCopy);
            }
            _ => self.fail(interrupted(signal)),
        }
    }

    /// Fails the sync. The delivery ends at once, and the server is put in order when its task is free.
    fn fail(&mut self, failure: Failure) {
        if self.is_over() {
            return;
        }
        self.server.desk.clear();
        if matches!(self.server.desk.doing(), Some(Job::Introduce { .. })) {
            self.actions.push_back(Action::CancelIntroduction);
        }
        self.actions.push_back(Action::StopDelivery { done: false });
        self.state = State::Ending(Ending::Leaving { failure, loaded: self.reading.loaded });
    }

    // ---- after every event ----

    /// Does what is due, and gives the server's task its next job.
    fn settle(&mut self, now: Instant) {
        if !self.reading.loaded && matches!(self.state, State::CatchUp(_) | State::Staying) {
            // The server asked for the snapshot once more, as servers do that restarted.
            match self.stop {
                Some(signal) => self.fail(interrupted(signal)),
                None => self.state = State::Transfer,
            }
        }
        if !self.is_over() && !self.is_on_its_way() {
            self.settle_supply(now);
        }
        if !self.is_over() && !self.is_on_its_way() && self.server.look_at().is_some_and(|at| at <= now) {
            self.server.desk.add(Job::Look);
        }
        match &mut self.state {
            State::CatchUp(catch_up) => {
                let is_due = catch_up.question_at().is_some_and(|at| at <= now);
                if let Some(parting) = catch_up.parted(now) {
                    self.parted(now, parting);
                } else if is_due && !self.server.has(Job::AskOffset) {
                    self.server.desk.add(Job::AskOffset);
                }
            }
            State::HandingOff(hand_off) => {
                if hand_off.is_late(now, &self.rules, self.stop.is_some()) {
                    let because = hand_off.because;
                    self.hand_off_failed(now, because);
                } else if let Some(question) = hand_off.question(now) {
                    self.server.desk.add(question);
                }
            }
            State::Ending(ending) => ending.tick(now, &self.rules, &self.reading, &mut self.actions),
            _ => {}
        }
        if let State::Ending(Ending::Leaving { loaded, .. }) = self.state
            && self.server.desk.is_idle()
        {
            self.server.desk.add(Job::Leave(self.server.leaving(loaded)));
        }
        if let Some(job) = self.server.desk.next() {
            self.actions.push_back(Action::Server(job));
        }
    }

    fn settle_supply(&mut self, now: Instant) {
        if let Some(failure) = self.supply.gives_up(now, &self.rules) {
            self.fail(failure);
        } else if self.supply.is_due(now) {
            self.try_again();
        }
    }

    /// Whether the server is between our link and the primary.
    fn is_on_its_way(&self) -> bool {
        matches!(self.state, State::HandingOff(_) | State::Returning)
    }

    /// Whether only the end is left.
    fn is_over(&self) -> bool {
        matches!(self.state, State::Ending(_))
    }
}

/// Whether the fault is put back by which an offer that comes during a hand-off counts as an answer that is awaited.
fn is_forgotten() -> bool {
    remora_base::mutation::Mutation::OfferForgotten.is_active()
}

fn interrupted(signal: &str) -> Failure {
    Failure::new(Code::Interrupted, format!("stopped by {signal}"))
}

// Desk: the jobs for the server's task, one at a time and in order.

/// A queue of jobs for the task that changes the server. One job runs at a time.
#[derive(Default)]
struct Desk {
    doing: Option<Job>,
    queue: VecDeque<Job>,
}

impl Desk {
    /// Appends a job.
    fn add(&mut self, job: Job) {
        self.queue.push_back(job);
    }

    /// The next job for the task, if the task is free.
    fn next(&mut self) -> Option<Job> {
        if self.doing.is_some() {
            return None;
        }
        self.doing = self.queue.pop_front();
        self.doing
    }

    /// Notes a report. Returns whether it belongs to the task's present job, or says that the task has ended.
    fn done(&mut self, report: &Report) -> bool {
        let is_it = matches!(report, Report::Ended) || self.doing.is_some_and(|job| report.answers(job));
        if is_it {
            self.doing = None;
        }
        is_it
    }

    /// Marks this job as the task's present one.
    #[cfg(test)]
    fn pretend(&mut self, job: Job) {
        self.doing = Some(job);
    }

    /// The task's present job.
    fn doing(&self) -> Option<Job> {
        self.doing
    }

    /// Whether such a job waits or is being done.
    fn has(&self, is_it: impl Fn(Job) -> bool) -> bool {
        self.doing.iter().chain(&self.queue).any(|&job| is_it(job))
    }

    /// Drops the jobs that wait.
    fn clear(&mut self) {
        self.queue.clear();
    }

    fn is_idle(&self) -> bool {
        self.doing.is_none() && self.queue.is_empty()
    }
}

#[cfg(test)]
mod tests;
