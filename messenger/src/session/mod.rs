//! One session with a peer, as a pure machine: frames, broken links and the time go in; frames, connects and events
//! come out. The worker (`worker/`) feeds it from sockets, the tests from a simulated network driven by a seed.
//!
//! A *session* is what the owner sees: messages in order, each once. A *link* is one connection of the transport; a
//! lossless session outlives its links.
//!
//! ```text
//!        connect()                                          an OPEN arrives for no session yet
//!            │                                                          │
//!      ┌─────▼───┐   link up: OPEN    ┌─────────┐      OPENED     ┌─────▼───┐ ◀─┐ an OPEN for this session, newer
//!   ┌─▶│ Calling ├───────────────────▶│ Opening ├────────────────▶│  Ready  │ ──┘ than its link, from any state but
//!   │  └─────┬───┘                    └─┬──┬──┬─┘                 └─┬─┬─┬───┘     Closed ²
//!   │        │ no answer                │  │  └ RETRY, RESET:       │ │ │
//!   │        ▼                          │  │    OPEN again          │ │ └ lossy, or CLOSE ──▶ Closed
//!   │  ┌─────────┐      link broken     │  │ WAIT                   │ └ link broken, something to say ──▶ Calling
//!   ├──┤ Pausing │◀─────────────────────┘  │                        └ link broken, nothing to say, or a server
//!   │  └─────────┘      ┌─────────┐        │                                              │
//!   ├───── time ────────┤ Waiting │◀───────┘                        ┌─────────┐           │
//!   │                   └─────────┘                                 │ Standby │◀──────────┘
//!   └──────────────────────── send() ───────────────────────────────┴─────────┘── a server's time is over ──▶ Closed
//! ```
//!
//! | in \ event | link up | link broken | OPENED | RETRY, RESET | WAIT | OPEN (routed here) | send | time |
//! |---|---|---|---|---|---|---|---|---|
//! | Calling | OPEN → Opening | → Pausing ¹ | drop link | drop link | drop link | race ² | queue | → Pausing ¹ |
//! | Opening | drop it | → Pausing ¹ | → Ready | OPEN again | → Waiting | race ² | queue | → Pausing ¹ |
//! | Ready | drop it | → Calling, Standby ¹ | drop link | drop link | drop link | newer: → Ready | write | ping, silence, idle: CLOSE |
//! | Pausing, Waiting | drop it | – | – | – | – | → Ready | queue | → Calling |
//! | Standby | drop it | – | – | – | – | → Ready | → Calling ³ | keep over: Closed |
//! | Closed | drop it | – | – | – | – | RESET | error | – |
//!
//! ¹ Lossy: Closed, and the owner is told. ² The connect of the greater entity wins: it answers WAIT, and the other end
//! takes its link. ³ A server cannot connect: it queues.
//!
//! Invariants:
//!
//! - **Each message once, in order, or the owner is told.** Messages are numbered from 1. A sender keeps them until
//!   they are acknowledged, and after every new link writes again from the first unacknowledged one. A receiver takes
//!   only the next number. It drops a number that it has taken before; a gap is a violation.
//! - **A peer that has forgotten the session is detected.** Both ends name both cookies. An end that does not know the
//!   session answers RESET, and the other end tells its owner what was lost before it starts again with the next epoch.
//! - **Of two links only the newer one serves.** Attempts are counted by the session, not by an end. An OPEN that is
//!   not newer than the current link is answered with RETRY.
//! - **No circular wait.** Every state but Ready and Closed ends after a time limit, except Standby of a peer, which
//!   waits for nothing.

#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use crate::frame::{Cookie, Entity, Label, Open, Refusal, Signal};
use crate::policy::Policy;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Calling { until: Instant },
    Opening { until: Instant },
    Ready,
    Pausing { until: Instant },
    Waiting { until: Instant },
    Standby { until: Option<Instant> },
    Closed,
}

/// One end of a session. `T` is a message.
pub struct Session<T> {
    policy: Policy,
    local_end: LocalEnd,
    state: State,
    /// The link that serves the session; only in Opening and Ready.
    link: Option<LinkId>,
    ours: Cookie,
    theirs: Option<Cookie>,
    /// The highest attempt that either end has announced.
    attempt: u64,
    /// Messages that are queued and not acknowledged (lossy: not written).
    queue: SendQueue<T>,
    receipts: Receipts,
    /// Signals to be written before any message.
    signals: VecDeque<Signal>,
    actions: VecDeque<Action>,
    last_word: Instant,
    /// When the last message was sent or received.
    last_message: Instant,
    asked: bool,
    retries: Retries,
    closing: bool,
    /// A deliberate fault, which the tests must find.
    #[cfg(test)]
    never_replays: bool,
}

impl<T> Session<T> {
    /// A session that connects. Its first action is [`Action::Call`].
    pub fn calling(policy: Policy, local_end: LocalEnd, cookie_id: u64, now: Instant) -> Session<T> {
        let mut session = Session::new(policy, local_end, cookie_id, now);
        session.call(now);
        session
    }

    /// A session that was connected to. Pass it the OPEN next ([`Session::handle_open`]).
    pub fn called(policy: Policy, local_end: LocalEnd, cookie_id: u64, now: Instant) -> Session<T> {
        Session::new(policy, local_end, cookie_id, now)
    }

    fn new(policy: Policy, local_end: LocalEnd, cookie_id: u64, now: Instant) -> Session<T> {
        Session {
            state: State::Standby { until: Some(now + policy.opening_limit) },
            policy,
            local_end,
            link: None,
            ours: Cookie { id: cookie_id.max(1), epoch: 0 },
            theirs: None,
            attempt: 0,
            queue: SendQueue::new(),
            receipts: Receipts::default(),
            signals: VecDeque::new(),
            actions: VecDeque::new(),
            last_word: now,
            last_message: now,
            asked: false,
            retries: Retries::new(cookie_id),
            closing: false,
            #[cfg(test)]
            never_replays: false,
        }
    }

    /// The next action for the owner.
    pub fn poll_action(&mut self) -> Option<Action> {
        self.actions.pop_front()
    }

    /// Queues a message.
    ///
    /// # Errors
    /// [`Over`].
    pub fn send(&mut self, message: T, now: Instant) -> Result<(), Over> {
        self.send_all(&mut VecDeque::from([message]), now)
    }

    /// Queues messages, in order. Empties `messages`, also if the session is over.
    ///
    /// # Errors
    /// [`Over`].
    pub fn send_all(&mut self, messages: &mut VecDeque<T>, now: Instant) -> Result<(), Over> {
        if self.state == State::Closed || self.closing {
            messages.clear();
            return Err(Over);
        }
        if messages.is_empty() {
            return Ok(());
        }
        self.queue.append(messages);
        self.last_message = now;
        if matches!(self.state, State::Standby { .. }) && self.may_call() {
            self.call(now);
        }
        Ok(())
    }

    /// The next frame to write on the session's link, if any. The caller writes it, or reports that the link is broken.
    #[allow(clippy::should_implement_trait)]
    pub fn poll_transmit(&mut self) -> Option<Outgoing<'_, T>> {
        self.link?;
        if let Some(signal) = self.signals.pop_front() {
            return Some(Outgoing::Signal(signal));
        }
        if self.state != State::Ready {
            return None;
        }
        if self.queue.has_unwritten() {
            return self.next_message();
        }
        if self.receipts.are_many() {
            return Some(Outgoing::Signal(self.ack()));
        }
        if self.closing && self.queue.is_empty() {
            self.actions.push_back(Action::Tell(News::Closed));
            self.state = State::Closed;
            return Some(Outgoing::Signal(Signal::Close));
        }
        None
    }

    fn next_message(&mut self) -> Option<Outgoing<'_, T>> {
        let heard = self.receipts.acknowledge();
        if self.policy.lossy {
            let (number, message) = self.queue.take_next()?;
            return Some(Outgoing::Message { number, heard, message: Payload::Owned(message) });
        }
        let (number, message) = self.queue.write_next()?;
        Some(Outgoing::Message { number, heard, message: Payload::Kept(message) })
    }

    /// The connect has succeeded, and the peer is authenticated.
    pub fn link_up(&mut self, link: LinkId, now: Instant) {
        if !matches!(self.state, State::Calling { .. }) {
            self.actions.push_back(Action::Hang(link));
            return;
        }
        self.state = State::Opening { until: now + self.policy.opening_limit };
        self.adopt(link);
        self.say_open();
    }

    /// The connect has failed.
    pub fn call_failed(&mut self, now: Instant) {
        if matches!(self.state, State::Calling { .. }) {
            self.pause(now);
        }
    }

    /// A link broke, or was closed after a violation.
    pub fn link_down(&mut self, link: LinkId, now: Instant) {
        if self.link != Some(link) {
            return;
        }
        self.link = None;
        self.signals.clear();
        match self.state {
            State::Opening { .. } => self.pause(now),
            State::Ready => self.cut(now),
            _ => {}
        }
    }

    /// Handles a signal that arrived on a link.
    ///
    /// # Errors
    /// [`Violation`]: close the link and call `link_down`.
    pub fn handle_signal(&mut self, link: LinkId, signal: Signal, now: Instant) -> Result<(), Violation> {
        if self.link != Some(link) {
            return Err(Violation::OutOfTurn);
        }
        self.note_received(now);
        match (self.state, signal) {
            (State::Opening { .. }, Signal::Opened(open)) => self.opened(open, now),
            (State::Opening { .. }, Signal::Retry { attempt }) => {
                self.attempt = self.attempt.max(attempt);
                self.say_open();
                Ok(())
            }
            (State::Opening { .. }, Signal::Reset) if self.theirs.is_some() => {
                self.forget();
                self.say_open();
                Ok(())
            }
            (State::Opening { .. }, Signal::Wait) => {
                self.hang();
                self.state = State::Waiting { until: now + self.policy.opening_limit };
                Ok(())
            }
            (State::Opening { .. }, Signal::Refused(refusal)) => {
                self.end(News::Refused(refusal));
                Ok(())
            }
            (State::Ready, Signal::Ack { heard }) => self.acknowledge(heard),
            (State::Ready, Signal::Ping) => {
                self.signals.push_back(Signal::Pong);
                Ok(())
            }
            (State::Ready, Signal::Pong) => Ok(()),
            (State::Ready, Signal::Close) => {
                self.end(News::Closed);
                Ok(())
            }
            _ => Err(Violation::OutOfTurn),
        }
    }

    /// Handles an OPEN that arrived on another link and names this session.
    pub fn handle_open(&mut self, link: LinkId, open: Open, now: Instant) {
        let answer = self.answer(&open);
        if let Some(signal) = answer {
            self.actions.push_back(Action::Answer(link, signal));
            return;
        }
        let is_new = self.theirs.is_some_and(|theirs| theirs != open.from);
        if is_new {
            self.forget();
        }
        self.hang();
        self.theirs = Some(open.from);
        self.attempt = open.attempt;
        self.adopt(link);
        self.resume(open.heard);
        self.signals.push_back(Signal::Opened(self.introduce()));
        self.ready(now);
    }

    /// Why an OPEN is not accepted, if it is not.
    fn answer(&self, open: &Open) -> Option<Signal> {
        if self.state == State::Closed || open.to.is_some_and(|to| to != self.ours) {
            return Some(Signal::Reset);
        }
        // A peer that names the current epoch has received it, although its OPENED may be lost.
        if open.to.is_some() && self.theirs.is_some_and(|theirs| theirs != open.from) {
            return Some(Signal::Reset);
        }
        if open.lossy != self.policy.lossy {
            return Some(Signal::Refused(Refusal::Policy));
        }
        let is_same = self.theirs == Some(open.from);
        if !self.policy.lossy && !self.could_have_heard(open.heard, is_same) {
            return Some(Signal::Reset);
        }
        // This end's own attempt that is under way does not count yet: the peer may have chosen the same number.
        let known = self.attempt - u64::from(matches!(self.state, State::Opening { .. }));
        if open.attempt <= known {
            return Some(Signal::Retry { attempt: self.attempt });
        }
        let under_way = matches!(self.state, State::Calling { .. } | State::Opening { .. });
        (under_way && self.local_end.entity > open.entity).then_some(Signal::Wait)
    }

    /// Whether an honest peer can have received that many messages. A peer that means another session has received
    /// none.
    fn could_have_heard(&self, heard: u64, is_same: bool) -> bool {
        if is_same { self.queue.may_be_heard(heard) } else { heard == 0 }
    }

    /// Handles a message that arrived on a link.
    ///
    /// # Errors
    /// [`Violation`]: close the link and call `link_down`.
    pub fn handle_message(&mut self, link: LinkId, label: &Label, now: Instant) -> Result<Verdict, Violation> {
        if self.link != Some(link) || self.state != State::Ready {
            return Err(Violation::OutOfTurn);
        }
        self.note_received(now);
        self.acknowledge(label.heard)?;
        let verdict = self.receipts.receive(label.number, self.policy.lossy, now)?;
        if verdict == Verdict::Deliver {
            self.last_message = now;
        }
        Ok(verdict)
    }

    /// Notes that bytes arrived: the peer is alive, although the frame is not complete.
    pub fn note_received(&mut self, now: Instant) {
        self.last_word = now;
        self.asked = false;
    }

    /// When [`Session::handle_timeout`] must be called.
    pub fn deadline(&self) -> Option<Instant> {
        match self.state {
            State::Calling { until } | State::Opening { until } => Some(until),
            State::Pausing { until } | State::Waiting { until } => Some(until),
            State::Standby { until } => until,
            State::Ready => {
                let next = if self.asked { self.policy.silence_limit } else { self.policy.ping_after };
                let times = [Some(self.last_word + next), self.receipts.due(), self.idle_until()];
                times.into_iter().flatten().min()
            }
            State::Closed => None,
        }
    }

    /// Handles the time. May be called early.
    pub fn handle_timeout(&mut self, now: Instant) {
        if self.deadline().is_none_or(|deadline| now < deadline) {
            return;
        }
        match self.state {
            State::Calling { .. } | State::Opening { .. } => {
                self.hang();
                self.pause(now);
            }
            State::Pausing { .. } | State::Waiting { .. } => match self.may_call() {
                true => self.call(now),
                false => self.stand_by(now),
            },
            State::Standby { .. } => self.end(self.lost(false)),
            State::Ready => self.look_after(now),
            State::Closed => {}
        }
    }

    fn look_after(&mut self, now: Instant) {
        if self.receipts.due().is_some_and(|due| now >= due) {
            let ack = self.ack();
            self.signals.push_back(ack);
        }
        if now >= self.last_word + self.policy.silence_limit {
            self.hang();
            self.cut(now);
        } else if !self.asked && now >= self.last_word + self.policy.ping_after {
            self.asked = true;
            self.signals.push_back(Signal::Ping);
        }
        if self.state == State::Ready && self.idle_until().is_some_and(|until| now >= until) {
            self.close();
        }
    }

    /// When the session is closed because it is idle. Not while messages wait to be sent.
    fn idle_until(&self) -> Option<Instant> {
        let limit = self.policy.idle_limit.filter(|_| self.queue.is_empty() && !self.closing)?;
        Some(self.last_message + limit)
    }

    /// Takes no more messages, and ends when everything queued is written (lossless: acknowledged).
    pub fn close(&mut self) {
        self.closing = true;
        if self.state != State::Ready && self.queue.is_empty() {
            self.end(News::Closed);
        }
    }

    /// Ends at once.
    pub fn abort(&mut self) {
        if self.state != State::Closed {
            self.end(News::Closed);
        }
    }

    fn opened(&mut self, open: Open, now: Instant) -> Result<(), Violation> {
        let is_expected = self.theirs.is_none_or(|theirs| theirs == open.from);
        if open.to != Some(self.ours) || !is_expected {
            return Err(Violation::OutOfTurn);
        }
        if !self.policy.lossy && !self.could_have_heard(open.heard, true) {
            return Err(Violation::Unsent { found: open.heard, sent: self.queue.last() });
        }
        self.theirs = Some(open.from);
        self.resume(open.heard);
        self.ready(now);
        Ok(())
    }

    /// The peer has received messages up to `heard`, which is plausible: the later ones are written again.
    fn resume(&mut self, heard: u64) {
        #[cfg(test)]
        if self.never_replays {
            return;
        }
        if !self.policy.lossy {
            self.queue.release(heard);
        }
        self.queue.note_heard(heard);
        self.queue.rewind();
    }

    fn acknowledge(&mut self, heard: u64) -> Result<(), Violation> {
        self.queue.note_heard(heard);
        if self.policy.lossy {
            return Ok(());
        }
        let sent = self.queue.last_written();
        if heard > sent {
            return Err(Violation::Unsent { found: heard, sent });
        }
        self.queue.release(heard);
        Ok(())
    }

    fn ready(&mut self, now: Instant) {
        self.state = State::Ready;
        self.retries.succeeded();
        self.receipts.acknowledge(); // OPEN and OPENED carry it
        self.note_received(now);
        self.actions.push_back(Action::Tell(News::Connected));
    }

    fn ack(&mut self) -> Signal {
        Signal::Ack { heard: self.receipts.acknowledge() }
    }

    fn adopt(&mut self, link: LinkId) {
        self.signals.clear();
        self.link = Some(link);
        self.actions.push_back(Action::Adopt(link));
    }

    fn say_open(&mut self) {
        self.attempt = self.attempt.saturating_add(1);
        let open = self.introduce();
        self.signals.push_back(Signal::Open(open));
    }

    fn introduce(&self) -> Open {
        Open {
            entity: self.local_end.entity,
            address: self.local_end.address,
            from: self.ours,
            to: self.theirs,
            attempt: self.attempt,
            heard: self.receipts.heard(),
            lossy: self.policy.lossy,
        }
    }

    fn hang(&mut self) {
        if let Some(link) = self.link.take() {
            self.actions.push_back(Action::Hang(link));
        }
        self.signals.clear();
    }

    fn call(&mut self, now: Instant) {
        self.state = State::Calling { until: now + self.policy.opening_limit };
        self.actions.push_back(Action::Call);
    }

    fn may_call(&self) -> bool {
        self.local_end.can_call && !self.policy.server
    }

    /// The link of a ready session is gone.
    fn cut(&mut self, now: Instant) {
        if self.policy.lossy {
            return self.end(self.lost(false));
        }
        let idle = self.queue.is_empty();
        if self.closing && idle {
            return self.end(News::Closed);
        }
        // An end that cannot be connected to does not stand by: the peer may have messages.
        let may_stand_by = self.policy.standby && idle && self.local_end.address.is_some();
        match self.may_call() && !may_stand_by {
            true => self.call(now), // at once the first time: most broken links are a peer's restart or a switch's
            false => self.stand_by(now),
        }
    }

    fn stand_by(&mut self, now: Instant) {
        let until = (!self.may_call()).then(|| now + self.policy.keep);
        self.state = State::Standby { until };
    }

    /// An attempt has failed.
    fn pause(&mut self, now: Instant) {
        if self.policy.lossy {
            return self.end(self.lost(false));
        }
        self.state = State::Pausing { until: now + self.retries.failed(&self.policy) };
    }

    /// Starts another session: everything sent and received so far is void.
    fn forget(&mut self) {
        let unacknowledged = self.queue.len();
        self.ours.epoch = self.ours.epoch.wrapping_add(1);
        self.theirs = None;
        self.queue.restart();
        self.receipts.restart();
        self.actions.push_back(Action::Tell(News::Reset { unacknowledged, goes_on: true }));
    }

    fn lost(&self, goes_on: bool) -> News {
        News::Reset { unacknowledged: self.queue.len(), goes_on }
    }

    fn end(&mut self, news: News) {
        self.hang();
        self.state = State::Closed;
        self.queue.clear();
        self.actions.push_back(Action::Tell(news));
    }

    /// Whether a link serves the session.
    pub fn has_link(&self) -> bool {
        self.link.is_some()
    }

    /// Whether the session is over.
    pub fn is_closed(&self) -> bool {
        self.state == State::Closed
    }

    /// Whether messages flow.
    pub fn is_ready(&self) -> bool {
        self.state == State::Ready
    }

    /// Whether messages flow, the peer has received all that were sent, and there is nothing to do for the owner.
    pub fn is_quiet(&self) -> bool {
        self.is_ready() && self.link.is_some() && self.actions.is_empty() && !self.closing && self.queue.is_heard()
    }

    /// The link that serves the session.
    pub fn link(&self) -> Option<LinkId> {
        self.link
    }

    /// The cookie of this end.
    pub fn cookie(&self) -> Cookie {
        self.ours
    }

    /// Number of messages queued and not acknowledged (lossy: not written).
    pub fn unacknowledged(&self) -> usize {
        self.queue.len()
    }
}

// What a session is told, and what it asks of its owner.

/// A link, by a number that the session's owner gives it. No number is used twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LinkId(pub u64);

/// The end that a session belongs to, and how it reaches the other end.
#[derive(Debug, Clone, Copy)]
pub struct LocalEnd {
    /// This messenger.
    pub entity: Entity,
    /// The address that this end listens at, if it does: the peer may connect there, so this end may stand by.
    pub address: Option<SocketAddr>,
    /// Whether this end knows where to connect.
    pub can_call: bool,
}

/// What the owner of a session has to do, in this order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// Connect to the peer, then call `link_up` or `call_failed`.
    Call,
    /// Serve the session by this link from now on. Half-written and half-read frames of another link are void.
    Adopt(LinkId),
    /// Send that signal on that link, which does not serve the session. Its peer may send OPEN again, or close.
    Answer(LinkId, Signal),
    /// Close that link.
    Hang(LinkId),
    /// Tell the owner of the connection.
    Tell(News),
}

/// An event for the owner of the connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum News {
    /// The session is ready: for the first time, or again after a broken link.
    Connected,
    /// The peer has forgotten the session, or the link of a lossy session broke. A lossless session starts again by
    /// itself.
    Reset {
        /// Messages that were not acknowledged (lossy: not written). The peer may or may not have received them.
        unacknowledged: usize,
        /// Whether this end goes on, with an empty queue.
        goes_on: bool,
    },
    /// The session is over, and everything that this end had queued was written.
    Closed,
    /// The peer refuses the session. This end does not try again.
    Refused(Refusal),
}

impl News {
    /// Whether the session is over with this event.
    pub fn is_last(self) -> bool {
        !matches!(self, News::Connected | News::Reset { goes_on: true, .. })
    }
}

/// What to write next on the session's link.
#[derive(Debug, PartialEq, Eq)]
pub enum Outgoing<'a, T> {
    /// A frame of the session itself.
    Signal(Signal),
    /// A message, with its number and its acknowledgement.
    Message {
        /// Its number.
        number: u64,
        /// Number of the last message received.
        heard: u64,
        /// The message.
        message: Payload<'a, T>,
    },
}

/// A message to be written.
#[derive(Debug, PartialEq, Eq)]
pub enum Payload<'a, T> {
    /// Written once, and not kept by the session.
    Owned(T),
    /// Kept by the session until it is acknowledged, to be written again.
    Kept(&'a T),
}

/// What to do with a received message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// Deliver it to the owner.
    Deliver,
    /// Drop it: it was received before.
    Known,
}

/// The peer violates the protocol. Close its link.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Violation {
    /// The current state does not allow the frame.
    #[error("sent a frame out of turn")]
    OutOfTurn,
    /// A message is missing.
    #[error("sent message {found}; expected {wanted}")]
    Gap {
        /// The number that was received.
        found: u64,
        /// The number that was expected.
        wanted: u64,
    },
    /// The peer acknowledges a message that was not sent.
    #[error("acknowledged message {found}; only {sent} were sent")]
    Unsent {
        /// The number that it acknowledges.
        found: u64,
        /// The last number written.
        sent: u64,
    },
}

/// The session is over: nothing can be sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the session is over")]
pub struct Over;

// What a session says of itself.

// How long to wait before the next attempt to connect.

/// Attempts that failed in a row. Pauses double, and vary at random.
struct Retries {
    failures: u32,
    jitter: u64,
}

impl Retries {
    /// `seed`: any number that differs between sessions.
    fn new(seed: u64) -> Retries {
        Retries { failures: 0, jitter: seed | 1 }
    }

    /// An attempt has succeeded.
    fn succeeded(&mut self) {
        self.failures = 0;
    }

    /// An attempt has failed. Returns how long to wait before the next one.
    fn failed(&mut self, policy: &Policy) -> Duration {
        self.failures += 1;
        let doubled = policy.first_pause * 2u32.saturating_pow(self.failures.min(20) - 1);
        let pause = doubled.min(policy.longest_pause);
        pause / 2 + pause.mul_f64(self.random() / 2.0)
    }

    /// A number from 0 to 1 (xorshift): enough to keep sessions that broke together from connecting together.
    fn random(&mut self) -> f64 {
        self.jitter ^= self.jitter << 13;
        self.jitter ^= self.jitter >> 7;
        self.jitter ^= self.jitter << 17;
        (self.jitter >> 11) as f64 / (1u64 << 53) as f64
    }
}

// Messages on their way to the peer, by their numbers.

/// Messages that are queued and not acknowledged (lossy: not written), in order. They are numbered from 1.
struct SendQueue<T> {
    messages: VecDeque<T>,
    /// The number of the first message.
    first: u64,
    /// How many of the messages are written on the current link.
    written: usize,
    /// The last message that the peer says to have received.
    heard: u64,
}

impl<T> SendQueue<T> {
    fn new() -> SendQueue<T> {
        SendQueue { messages: VecDeque::new(), first: 1, written: 0, heard: 0 }
    }

    fn is_empty(&self) -> bool {
        self.messages.is_empty()
    }

    fn len(&self) -> usize {
        self.messages.len()
    }

    /// The messages.
    #[cfg(test)]
    fn messages(&self) -> &VecDeque<T> {
        &self.messages
    }

    /// Queues messages, and empties `messages`.
    fn append(&mut self, messages: &mut VecDeque<T>) {
        match self.messages.is_empty() {
            true => std::mem::swap(&mut self.messages, messages), // the usual case, in which nothing is moved
            false => self.messages.append(messages),
        }
    }

    /// Whether a message is to be written on the current link.
    fn has_unwritten(&self) -> bool {
        self.written < self.messages.len()
    }

    /// Number of the last message queued.
    fn last(&self) -> u64 {
        self.first - 1 + self.messages.len() as u64
    }

    /// Number of the last message written on the current link.
    fn last_written(&self) -> u64 {
        self.first - 1 + self.written as u64
    }

    /// Whether a peer of this session can have received messages up to that number, and no more.
    fn may_be_heard(&self, heard: u64) -> bool {
        (self.first - 1..=self.last()).contains(&heard)
    }

    /// Takes the next message out, for a session that writes each message once.
    fn take_next(&mut self) -> Option<(u64, T)> {
        let message = self.messages.pop_front()?;
        let number = self.first;
        self.first += 1;
        Some((number, message))
    }

    /// The next message to write. It is kept until it is acknowledged.
    fn write_next(&mut self) -> Option<(u64, &T)> {
        let number = self.first + self.written as u64;
        let message = self.messages.get(self.written)?;
        self.written += 1;
        Some((number, message))
    }

    /// The peer says that it has received messages up to that number.
    fn note_heard(&mut self, heard: u64) {
        self.heard = heard;
    }

    /// Whether the peer has received every message.
    fn is_heard(&self) -> bool {
        self.heard == self.last()
    }

    /// Drops messages up to that number.
    fn release(&mut self, heard: u64) {
        while self.first <= heard && self.messages.pop_front().is_some() {
            self.first += 1;
            self.written = self.written.saturating_sub(1);
        }
    }

    /// Nothing is written on the current link.
    fn rewind(&mut self) {
        self.written = 0;
    }

    /// Drops all messages. Later ones keep counting.
    fn clear(&mut self) {
        self.messages.clear();
        self.written = 0;
    }

    /// Drops all messages, and numbers later ones from 1 again.
    fn restart(&mut self) {
        self.clear();
        (self.first, self.heard) = (1, 0);
    }
}

// What was received of the peer's messages, and what the peer knows of that.

/// The numbers of the messages received and acknowledged.
#[derive(Default)]
struct Receipts {
    /// Number of the last message received.
    heard: u64,
    /// The last number that was acknowledged, and when the rest must be.
    told: u64,
    due: Option<Instant>,
}

impl Receipts {
    /// Number of the last message received.
    fn heard(&self) -> u64 {
        self.heard
    }

    /// When the messages received must be acknowledged.
    fn due(&self) -> Option<Instant> {
        self.due
    }

    /// Takes only the next message. `lossy`: messages are not acknowledged.
    fn receive(&mut self, number: u64, lossy: bool, now: Instant) -> Result<Verdict, Violation> {
        let wanted = self.heard + 1;
        if number < wanted {
            return Ok(Verdict::Known);
        }
        if number > wanted {
            return Err(Violation::Gap { found: number, wanted });
        }
        self.heard = wanted;
        if lossy {
            self.told = self.heard;
        } else if self.due.is_none() {
            self.due = Some(now + ACK_AFTER);
        }
        Ok(Verdict::Deliver)
    }

    /// Whether enough messages were received for an acknowledgement of their own.
    fn are_many(&self) -> bool {
        self.heard - self.told >= ACK_AFTER_MESSAGES
    }

    /// The number to acknowledge: a frame that carries it is about to be written.
    fn acknowledge(&mut self) -> u64 {
        self.told = self.heard;
        self.due = None;
        self.heard
    }

    /// The peer numbers its messages from 1 again.
    fn restart(&mut self) {
        (self.heard, self.told) = (0, 0);
    }
}

/// Messages that may be received before they are acknowledged in a frame of their own: one small frame for this many.
const ACK_AFTER_MESSAGES: u64 = 64;

/// The longest delay of an acknowledgement. Short compared with what a sender can queue, and long enough that a reply
/// usually carries it.
const ACK_AFTER: Duration = Duration::from_millis(20);
