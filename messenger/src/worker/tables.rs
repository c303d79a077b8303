//! The links and sessions of a worker, and everything that happens between the two: what is received and dispatched,
//! and what is sent.

use std::collections::VecDeque;
use std::io::{self, IoSliceMut};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use slotmap::{Key, SlotMap};

use super::links::{Incoming, LEAVING_LIMIT, LinkKey, LinkState, LinkTable, Phase, SessionKey, Timers};
use super::{Command, Context};
use crate::buffer::{Buffer, Permit, Throttle};
use crate::connection::{Arrival, Connection, Delivery, Mailbox, Name, Queued, Registry, UNASSIGNED};
use crate::error::LinkError;
use crate::frame::{Label, MESSAGE, Malformed, NO_BODIES, Open, Preamble, Refusal, Signal, Step};
use crate::session::{Action, LinkId, News, Outgoing, Payload, Session, Verdict, Violation};

// The links and sessions of a worker, and everything that happens between the two.
//
// [`Tables::served`] and [`Tables::owner`] resolve a link's key; handlers get what they resolved. A handler that may
// end a link or a session is the last to use it, and what follows resolves the key again: a key that finds nothing
// then means that this step ended it, and is no mistake. A key that one table holds of the other must be valid, which
// is asserted where it is looked up.

/// See the module's documentation.
pub(super) struct Tables {
    pub(super) cx: Context,
    pub(super) links: LinkTable,
    pub(super) sessions: SessionTable,
    pub(super) transmitter: Transmitter,
    /// Received bytes on their way into frames. One for all links, as only one is read at a time.
    buffer: Vec<u8>,
}

/// The session that a link serves, with all links, which its actions may change.
struct Owner<'a> {
    key: SessionKey,
    entry: &'a mut SessionEntry,
    links: &'a mut LinkTable,
    cx: &'a Context,
}

impl Tables {
    pub(super) fn new(cx: Context, links: LinkTable) -> Tables {
        let (sessions, transmitter) = (SessionTable::default(), Transmitter::default());
        Tables { cx, links, sessions, transmitter, buffer: vec![0; RECEIVE_BYTES] }
    }

    /// Resolves a link and the session that it serves. `None`: an earlier step has ended the link, or given it to
    /// another worker.
    fn served(&mut self, key: LinkKey) -> Option<Served<'_>> {
        let link = self.links.find(key)?;
        let session = link.session().and_then(|session| self.sessions.find(session));
        debug_assert!(
            session.is_some() || !matches!(link.phase, Phase::Serving(_)),
            "{key:?} serves a session that is gone"
        );
        Some(Served { key, link, session, cx: &self.cx })
    }

    /// Resolves the session that a link serves. `None`: it serves none.
    fn owner(&mut self, key: LinkKey) -> Option<Owner<'_>> {
        let session = self.links.find(key)?.session()?;
        let entry = self.sessions.find(session)?;
        Some(Owner { key: session, entry, links: &mut self.links, cx: &self.cx })
    }

    /// Handles an event of a link, ends the link if it breaks, and sends what follows from the event.
    pub(super) fn serve(&mut self, key: LinkKey, readable: bool) {
        // An earlier event of this turn may have ended the link.
        let Some(link) = self.links.find(key) else { return };
        let before = link.session();
        let outcome = match &link.phase {
            Phase::Calling(_) | Phase::Handshaking { .. } => self.handshake(key),
            Phase::Leaving => link.leave(self.cx.now),
            Phase::Unbound | Phase::Serving(_) if readable => self.receive(key),
            Phase::Unbound | Phase::Serving(_) => Ok(()),
        };
        if let Err(broken) = outcome {
            return self.end_link(key, broken);
        }
        if let Some(session) = self.links.find(key).and_then(|link| link.session()).or(before) {
            self.settle(session);
        }
        self.refresh(key);
    }

    /// Sends what is written on a link without a session, and has the reactor wait for what the link now waits for. The
    /// link may have ended.
    fn refresh(&mut self, key: LinkKey) {
        let Some(link) = self.links.find(key) else { return };
        let flushed = match link.session() {
            None => link.flush(self.cx.now).map(drop),
            Some(_) => Ok(()),
        };
        if let Err(broken) = flushed.and_then(|()| self.links.update(key, &self.cx)) {
            self.end_link(key, broken);
        }
    }

    /// Continues a connect or a handshake. Once it is complete, the session that called gets the link, and reading
    /// begins.
    fn handshake(&mut self, key: LinkKey) -> Result<(), LinkError> {
        let Some(link) = self.links.get_mut(key) else { return Ok(()) };
        if let Phase::Calling(session) = link.phase {
            if !link.finish_call()? {
                return Ok(());
            }
            link.begin_handshake(Some(session), &self.cx.common.handshake, self.cx.now)?;
        }
        let Some(mut established) = link.continue_handshake()? else { return Ok(()) };
        link.establish(&mut established);
        match link.session() {
            None => link.phase = Phase::Unbound,
            Some(caller) => {
                // A session that was closed meanwhile has no use for the link.
                let entry = self.sessions.find(caller).ok_or(LinkError::Cut)?;
                entry.session.link_up(key.id(), self.cx.now);
                self.settle(caller); // binds the link, or ends it
            }
        }
        self.read_held(key)?;
        self.receive(key)
    }

    /// Receives and reads for as long as there is something, within a turn's share.
    fn receive(&mut self, key: LinkKey) -> Result<(), LinkError> {
        let mut buffer = std::mem::take(&mut self.buffer);
        let outcome = self.receive_into(key, &mut buffer);
        self.buffer = buffer;
        outcome
    }

    fn receive_into(&mut self, key: LinkKey, buffer: &mut [u8]) -> Result<(), LinkError> {
        for _ in 0..RECEIVES_PER_TURN {
            let Some(mut served) = self.served(key) else { return Ok(()) };
            let Some(Received { buffered, is_full }) = served.receive(buffer)? else { return Ok(()) };
            let mut input = &buffer[..buffered];
            // Usually there is no signal, and the link need not be resolved again.
            if let Some(signal) = served.read(&mut input)? {
                self.handle_signal(key, signal)?;
                self.read(key, input)?;
            }
            if !is_full {
                return Ok(());
            }
        }
        Ok(())
    }

    /// Reads bytes of a link, and handles the signals among them. Stops where a signal ends the link.
    fn read(&mut self, key: LinkKey, mut input: &[u8]) -> Result<(), LinkError> {
        while let Some(mut served) = self.served(key) {
            match served.read(&mut input)? {
                Some(signal) => self.handle_signal(key, signal)?,
                None => break,
            }
        }
        Ok(())
    }

    /// Reads bytes that came before there was room, or a session, for them.
    fn read_held(&mut self, key: LinkKey) -> Result<(), LinkError> {
        let held = self.links.find(key).map(|link| std::mem::take(&mut link.held));
        self.read(key, &held.unwrap_or_default())
    }

    fn handle_signal(&mut self, key: LinkKey, signal: Signal) -> Result<(), LinkError> {
        if let Signal::Open(open) = signal {
            return self.open(key, open);
        }
        let Some(owner) = self.owner(key) else { return Err(LinkError::Violation(Violation::OutOfTurn)) };
        owner.entry.handle_signal(owner.key, key.id(), signal, owner.links, owner.cx)
    }

    /// The peer has named the session that a link is for: finds it, on whichever worker it is, or makes it here.
    fn open(&mut self, key: LinkKey, open: Open) -> Result<(), LinkError> {
        let Some(link) = self.links.get_mut(key) else { return Ok(()) };
        if !matches!(link.phase, Phase::Unbound) {
            return Err(LinkError::Violation(Violation::OutOfTurn));
        }
        let cx = &self.cx;
        let mut registry = cx.common.registry();
        if let Some(connection) = registry.find(&open).filter(|_| open.entity != cx.common.entity).cloned() {
            drop(registry);
            self.hand_over(key, open, connection);
            return Ok(());
        }
        if let Some(answer) = cx.refuses(&open, &registry) {
            link.say(answer);
            return Ok(());
        }
        // A peer that listens can be called back, at that address and not where it happens to have called from.
        let back = open.address.filter(|_| cx.is_peer()).map(|address| link.link.peer().elsewhere(address));
        let local_end = cx.local_end(back.is_some());
        let peer = back.unwrap_or_else(|| link.link.peer());
        let policy = &cx.common.policy;
        let budget = Throttle::new(policy.send_messages, policy.send_bytes);
        let connection = Connection::new(peer, Arc::clone(&cx.inbox) as Arc<dyn Mailbox>, budget);
        let session = Session::called(policy.clone(), local_end, random_id(), cx.now);
        let mut entry = SessionEntry::new(session, connection.clone(), cx);
        entry.names = vec![Name::Ours(entry.session.cookie().id), Name::Theirs(open.entity, open.from.id)];
        entry.names.iter().for_each(|name| registry.enter(*name, &connection));
        let session = self.sessions.insert(entry);
        drop(registry);
        self.adopt(key, open, session);
        Ok(())
    }

    /// Gives a link to the session that its peer means, which may live on another worker.
    fn hand_over(&mut self, key: LinkKey, open: Open, connection: Connection) {
        if connection.worker() == self.cx.inbox.worker() && connection.session_key() != UNASSIGNED {
            return self.adopt(key, open, SessionKey::of(&connection));
        }
        // To another worker, or to this one behind the command that begins the session. Between OPEN and its answer
        // nothing is under way, so the link moves without losing a byte.
        let worker = self.cx.workers.get(connection.worker());
        debug_assert!(worker.is_some(), "{connection:?} lives on a worker that this one does not know");
        if let (Some(worker), Some(link)) = (worker, self.links.remove(key)) {
            worker.post(Command::Adopt(Box::new(link), open, connection));
        }
    }

    /// Offers a link to the session that its peer means. The answer to a peer that means a session that is over is
    /// RESET.
    fn adopt(&mut self, link: LinkKey, open: Open, session: SessionKey) {
        let Some(entry) = self.sessions.find(session) else {
            if let Some(link) = self.links.get_mut(link) {
                link.say(Signal::Reset);
            }
            return;
        };
        entry.session.handle_open(link.id(), open, self.cx.now);
        if entry.session.is_ready() {
            entry.learn_names(&open, &self.cx);
        }
        self.settle(session);
    }

    /// Serves a link that another worker has handed over.
    pub(super) fn adopt_from_elsewhere(&mut self, link: LinkState, open: Open, connection: &Connection) {
        if let Some(key) = self.insert(link) {
            self.adopt(key, open, SessionKey::of(connection));
            self.refresh(key);
        }
    }

    /// Begins to serve a link that a peer opened.
    pub(super) fn take(&mut self, link: LinkState) {
        if self.links.unauthenticated() >= self.cx.common.max_unauthenticated {
            let peer = link.link.peer();
            tracing::warn!(%peer, "too many unauthenticated connections; dropping this one");
            return self.cx.common.dispatcher.rejected(&peer, &LinkError::Ended);
        }
        if let Some(key) = self.insert(link) {
            self.serve(key, true);
        }
    }

    /// Adds a link that has no session yet. The owner is told of one that cannot be watched.
    fn insert(&mut self, link: LinkState) -> Option<LinkKey> {
        let inserted = self.links.insert(link, &self.cx);
        let rejected = |(link, broken): (Box<LinkState>, LinkError)| {
            self.cx.common.dispatcher.rejected(&link.link.peer(), &broken);
        };
        inserted.map_err(rejected).ok()
    }

    /// Begins a session that this end has asked for.
    pub(super) fn connect(&mut self, connection: Connection) {
        let cx = &self.cx;
        let session = Session::calling(cx.common.policy.clone(), cx.local_end(true), random_id(), cx.now);
        let ours = Name::Ours(session.cookie().id);
        cx.common.registry().enter(ours, &connection);
        let address = connection.peer().socket_address().filter(|_| cx.is_peer()).map(Name::Address);
        let mut entry = SessionEntry::new(session, connection, cx);
        entry.names = [ours].into_iter().chain(address).collect();
        let key = self.sessions.insert(entry);
        self.settle(key);
    }

    /// Changes a session and performs what follows. What was queued before is sent before. A session that is over is
    /// left alone.
    pub(super) fn with_session(&mut self, key: SessionKey, change: impl FnOnce(&mut Session<Queued>)) {
        if let Some(entry) = self.sessions.find(key) {
            self.transmitter.take_queued(entry, &self.cx);
            change(&mut entry.session);
            self.settle(key);
        }
    }

    /// Breaks the link of a session.
    pub(super) fn cut(&mut self, session: SessionKey) {
        if let Some(link) = self.sessions.find(session).and_then(|entry| entry.link) {
            self.end_link(link, LinkError::Cut);
        }
    }

    /// Continues to read a link for whose next message there may be room now.
    pub(super) fn make_room(&mut self, key: LinkKey) {
        let Some(mut served) = self.served(key) else { return };
        let mut outcome = served.admit();
        if outcome.is_ok() && !served.link.is_blocked() {
            served.note_received();
            outcome = self.read_held(key);
        }
        match outcome {
            Ok(()) => self.serve(key, true),
            Err(broken) => self.end_link(key, broken),
        }
    }

    /// Performs what a session wants, sends what it has to send, and ends it if it is over. It may be over already.
    pub(super) fn settle(&mut self, key: SessionKey) {
        let Some(entry) = self.sessions.find(key) else { return };
        self.transmitter.settle(key, entry, &mut self.links, &self.cx);
        if entry.session.is_closed() {
            return self.finish(key);
        }
        self.sessions.schedule(key);
    }

    /// Takes a session out that is over. Its link sends what is written, and closes.
    fn finish(&mut self, key: SessionKey) {
        let Some(mut entry) = self.sessions.remove(key) else { return };
        entry.perform(key, &mut self.links, &self.cx); // its last news
        entry.connection.set_over();
        self.cx.common.registry().leave(&entry.names, &entry.connection);
        if let Some(link) = entry.link {
            self.links.leave(link, self.cx.now + LEAVING_LIMIT);
            self.serve(link, false);
        }
    }

    /// Ends a link that is of no use any more. Its session goes on without it.
    fn end_link(&mut self, key: LinkKey, broken: LinkError) {
        let Some(link) = self.links.end(key, &broken, &self.cx) else { return };
        let Some(session) = link.session() else { return };
        if let Some(entry) = self.sessions.find(session) {
            entry.link_ended(key, &link, broken, &self.cx);
            self.settle(session);
        }
    }

    /// Handles every timer that is due.
    pub(super) fn handle_timers(&mut self) {
        while let Some(session) = self.sessions.pop_expired(&mut self.links, &self.cx) {
            self.settle(session);
        }
        while let Some((link, broken)) = self.links.pop_expired(&self.cx) {
            self.end_link(link, broken);
        }
    }
}

impl Context {
    /// How an OPEN that means no session we know is refused, if it is.
    fn refuses(&self, open: &Open, registry: &Registry) -> Option<Signal> {
        let common = &self.common;
        match () {
            () if open.entity == common.entity => Some(Signal::Refused(Refusal::Oneself)),
            () if open.to.is_some() => Some(Signal::Reset),
            () if !common.serving.load(Ordering::Acquire) => Some(Signal::Refused(Refusal::NotServing)),
            () if registry.sessions() >= common.max_sessions => Some(Signal::Refused(Refusal::Full)),
            () if open.lossy != common.policy.lossy => Some(Signal::Refused(Refusal::Policy)),
            () => None,
        }
    }
}

/// A cookie of its own. Without random bytes no handshake would have succeeded either.
fn random_id() -> u64 {
    let mut bytes = [0; 8];
    let _ = getrandom::fill(&mut bytes);
    u64::from_le_bytes(bytes)
}

// The sessions of a worker, and what they ask of it.

/// A session and what belongs to it on its worker.
pub(super) struct SessionEntry {
    pub(super) session: Session<Queued>,
    pub(super) connection: Connection,
    /// Bounds what was received and the owner has not released.
    pub(super) receive: Arc<Throttle>,
    /// The link that serves it.
    pub(super) link: Option<LinkKey>,
    /// The names by which the registry finds it.
    pub(super) names: Vec<Name>,
    /// The timer that is set.
    timer: Option<Instant>,
}

impl SessionEntry {
    pub(super) fn new(session: Session<Queued>, connection: Connection, cx: &Context) -> SessionEntry {
        let receive = cx.common.policy.throttle();
        SessionEntry { session, connection, receive, link: None, names: Vec::new(), timer: None }
    }

    /// Handles a signal of the session's link, and performs what the session asks for.
    pub(super) fn handle_signal(
        &mut self,
        key: SessionKey,
        link: LinkId,
        signal: Signal,
        links: &mut LinkTable,
        cx: &Context,
    ) -> Result<(), LinkError> {
        self.session.handle_signal(link, signal, cx.now)?;
        if let Signal::Opened(open) = signal {
            self.learn_names(&open, cx);
        }
        self.perform(key, links, cx);
        Ok(())
    }

    /// Notes the names that the peer has given itself: the registry finds the session by them from now on.
    fn learn_names(&mut self, open: &Open, cx: &Context) {
        let mut names = vec![Name::Theirs(open.entity, open.from.id)];
        names.extend(open.address.filter(|_| cx.is_peer()).map(Name::Address));
        names.retain(|name| !self.names.contains(name));
        let mut registry = cx.common.registry();
        names.iter().for_each(|name| registry.enter(*name, &self.connection));
        self.names.extend(names);
    }

    /// Performs what the session asks for.
    fn perform(&mut self, key: SessionKey, links: &mut LinkTable, cx: &Context) {
        while let Some(action) = self.session.poll_action() {
            match action {
                Action::Call => self.call(key, links, cx),
                Action::Adopt(link) => {
                    let link = LinkKey::of(link);
                    self.link = Some(link);
                    if let Some(negotiated) = links.bind(link, key, cx.common.policy.limits) {
                        self.connection.set_negotiated(*negotiated);
                    }
                }
                Action::Hang(link) => {
                    let link = LinkKey::of(link);
                    self.link = self.link.filter(|current| *current != link);
                    drop(links.remove(link));
                }
                Action::Answer(link, signal) => self.answer(LinkKey::of(link), signal, links, cx),
                Action::Tell(news) => self.tell(news, cx),
            }
        }
    }

    fn call(&mut self, key: SessionKey, links: &mut LinkTable, cx: &Context) {
        let deadline = cx.now + cx.common.policy.opening_limit;
        let called = match cx.common.stacks.call(self.connection.peer()) {
            Ok(link) => {
                let inserted = links.insert(LinkState::new(link, Phase::Calling(key), deadline), cx);
                inserted.map(drop).map_err(|(_, broken)| broken)
            }
            Err(error) => Err(LinkError::Unreachable(error)),
        };
        if let Err(broken) = called {
            tracing::debug!(peer = %self.connection.peer(), %broken, "connect failed");
            self.connection.set_link_error(Arc::new(broken));
            self.session.call_failed(cx.now);
        }
    }

    fn answer(&mut self, key: LinkKey, signal: Signal, links: &mut LinkTable, cx: &Context) {
        let Some(link) = links.get_mut(key) else { return };
        link.say(signal);
        let flushed = link.flush(cx.now).map(drop).and_then(|()| links.update(key, cx));
        if let Err(broken) = flushed {
            self.end_link(key, broken, links, cx);
        }
    }

    /// Ends a link that this session may be served by.
    fn end_link(&mut self, key: LinkKey, broken: LinkError, links: &mut LinkTable, cx: &Context) {
        if let Some(link) = links.end(key, &broken, cx)
            && link.session().is_some()
        {
            self.link_ended(key, &link, broken, cx);
        }
    }

    /// Goes on without a link, which was this session's.
    fn link_ended(&mut self, key: LinkKey, link: &LinkState, broken: LinkError, cx: &Context) {
        self.connection.set_link_error(Arc::new(broken));
        match link.phase {
            Phase::Serving(_) => {
                if self.link == Some(key) {
                    self.link = None;
                    self.connection.set_ready(false);
                }
                self.session.link_down(key.id(), cx.now);
            }
            _ => self.session.call_failed(cx.now),
        }
    }

    fn tell(&mut self, news: News, cx: &Context) {
        let (dispatcher, connection) = (&cx.common.dispatcher, &self.connection);
        // An owner that knows that the session is over may send at once, from any thread, and must be refused.
        if news.is_last() {
            connection.set_over();
        }
        match news {
            News::Connected => {
                connection.set_ready(true);
                dispatcher.connected(connection);
            }
            News::Reset { unacknowledged, goes_on } => {
                connection.set_ready(false);
                dispatcher.reset(connection, unacknowledged, goes_on);
            }
            News::Closed => dispatcher.closed(connection),
            News::Refused(why) => dispatcher.refused(connection, why),
        }
    }

    /// Bytes have come for the session. Its owner may send from its callbacks without waking the worker.
    pub(super) fn note_received(&mut self, cx: &Context) {
        self.session.note_received(cx.now);
        self.connection.expect_messages();
    }

    /// Handles the session's own timer. `is_blocked`: its link is not read because there is no room for its messages.
    fn handle_timeout(&mut self, is_blocked: bool, cx: &Context) {
        let was_ready = self.session.is_ready();
        self.session.handle_timeout(cx.now);
        if was_ready && !self.session.has_link() {
            self.connection.set_link_error(Arc::new(LinkError::Silent));
        } else if self.session.is_closed() && self.connection.link_error().is_none() {
            self.connection.set_link_error(Arc::new(LinkError::TooSlow(super::OPENING)));
        }
        if is_blocked {
            // A peer that is not read is not silent. It has just been pinged, so it knows that this end lives.
            self.session.note_received(cx.now);
        }
    }
}

/// See the module's documentation.
#[derive(Default)]
pub(super) struct SessionTable {
    entries: SlotMap<SessionKey, SessionEntry>,
    timers: Timers<SessionKey>,
}

impl SessionTable {
    /// Adds a session, and notes in its connection where it is.
    pub(super) fn insert(&mut self, entry: SessionEntry) -> SessionKey {
        let connection = entry.connection.clone();
        let key = self.entries.insert(entry);
        connection.set_session_key(key.data().as_ffi());
        key
    }

    /// Takes a session out.
    pub(super) fn remove(&mut self, key: SessionKey) -> Option<SessionEntry> {
        self.entries.remove(key)
    }

    /// The session of a key that may be out of date.
    pub(super) fn find(&mut self, key: SessionKey) -> Option<&mut SessionEntry> {
        self.entries.get_mut(key)
    }

    /// Sets a session's timer, if it is not set for an earlier time.
    pub(super) fn schedule(&mut self, key: SessionKey) {
        let Some(entry) = self.entries.get_mut(key) else { return };
        if let Some(next) = entry.session.deadline()
            && entry.timer.is_none_or(|timer| next < timer)
        {
            entry.timer = Some(next);
            self.timers.set(next, key);
        }
    }

    /// Has the next session whose time has come handle it.
    pub(super) fn pop_expired(&mut self, links: &mut LinkTable, cx: &Context) -> Option<SessionKey> {
        while let Some((at, key)) = self.timers.pop(cx.now) {
            let Some(entry) = self.entries.get_mut(key).filter(|entry| entry.timer == Some(at)) else { continue };
            entry.timer = None;
            let link = entry.link.and_then(|link| links.get_mut(link));
            entry.handle_timeout(link.is_some_and(|link| link.is_blocked()), cx);
            return Some(key);
        }
        let entries = &self.entries;
        self.timers.tidy(entries.len(), |at, key| entries.get(key).is_some_and(|entry| entry.timer == Some(at)));
        None
    }

    /// The earliest timer.
    pub(super) fn next_timer(&self) -> Option<Instant> {
        self.timers.next()
    }

    /// The keys of all sessions.
    pub(super) fn keys(&self) -> Vec<SessionKey> {
        self.entries.keys().collect()
    }
}

// From bytes to messages: receives from a link, finds frames, gives messages memory to land in, and dispatches them.

/// A link and the session that it serves, if it serves one yet; resolved once for everything that came together.
pub(super) struct Served<'a> {
    pub(super) key: LinkKey,
    pub(super) link: &'a mut LinkState,
    pub(super) session: Option<&'a mut SessionEntry>,
    pub(super) cx: &'a Context,
}

/// What a receive brought.
pub(super) struct Received {
    /// Bytes in the buffer. Those that landed in a message's memory are not among them.
    pub(super) buffered: usize,
    /// There may be more to receive.
    is_full: bool,
}

impl Served<'_> {
    /// Receives once: into the memory of the message that is coming, then into the buffer. `None` if there is nothing
    /// to receive, or the link is not to be read.
    pub(super) fn receive(&mut self, buffer: &mut [u8]) -> Result<Option<Received>, LinkError> {
        if !self.link.wanted().readable {
            return Ok(None);
        }
        let (received, room, landed) = match self.link.reader.landing() {
            Some(landing) => {
                let direct = landing.len();
                let mut pieces = [IoSliceMut::new(landing), IoSliceMut::new(buffer)];
                (self.link.link.receive(&mut pieces), direct + RECEIVE_BYTES, direct)
            }
            None => (self.link.link.receive(&mut [IoSliceMut::new(buffer)]), RECEIVE_BYTES, 0),
        };
        let count = match received {
            Ok(0) => return Err(LinkError::Ended),
            Ok(count) => count,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
            Err(error) => return Err(LinkError::Io(error)),
        };
        let direct = count.min(landed);
        self.link.reader.landed(direct);
        self.note_received();
        Ok(Some(Received { buffered: count - direct, is_full: count == room }))
    }

    /// Notes for the session that its peer lives.
    pub(super) fn note_received(&mut self) {
        if let Some(session) = &mut self.session {
            session.note_received(self.cx);
        }
    }

    /// Finds frames in bytes that have come, and dispatches the messages among them. Returns at the first signal, which
    /// may change what the link serves: the caller handles it and goes on with the rest of `input`. `None`: everything
    /// is read, or kept because there is no room.
    pub(super) fn read(&mut self, input: &mut &[u8]) -> Result<Option<Signal>, LinkError> {
        loop {
            match self.link.reader.next(input)? {
                Step::Head(preamble) => self.head(preamble)?,
                Step::Whole => match self.link.incoming.take() {
                    Some(Incoming::Message(label, permit)) => self.deliver(&label, permit)?,
                    Some(Incoming::Signal(signal)) => return Ok(Some(signal)),
                    Some(Incoming::Blocked(..)) | None => {}
                },
                Step::Incomplete => {
                    self.link.held.extend_from_slice(input); // nothing is left unless the link is blocked
                    return Ok(None);
                }
            }
        }
    }

    fn head(&mut self, preamble: Preamble) -> Result<(), LinkError> {
        if preamble.tag == MESSAGE {
            let label = Label::decode(self.link.reader.head())?;
            self.link.incoming = Some(Incoming::Blocked(preamble, label));
            return self.admit();
        }
        let malformed = Malformed::Content { tag: preamble.tag };
        self.link.incoming = Some(Incoming::Signal(Signal::decode(preamble.tag, self.link.reader.head())?));
        self.link.reader.land(NO_BODIES).map_err(|_| LinkError::Malformed(malformed)) // signals have no bodies
    }

    /// Gives the message that blocks the link memory to land in, if there is room for it. Otherwise the link stays
    /// blocked, and the peer waits.
    fn admit(&mut self) -> Result<(), LinkError> {
        let Some(Incoming::Blocked(preamble, label)) = &self.link.incoming else { return Ok(()) };
        let (preamble, label) = (*preamble, *label);
        let Some(session) = &self.session else {
            return Err(LinkError::Violation(Violation::OutOfTurn));
        };
        let (throttle, bytes) = (&session.receive, preamble.body_bytes() as usize);
        let wait = || {
            let (inbox, key) = (Arc::clone(&self.cx.inbox), self.key);
            throttle.take_or_wait(bytes, move || inbox.post(Command::Room(key)))
        };
        let Some(permit) = throttle.take(bytes).or_else(wait) else { return Ok(()) };
        let alignment = preamble.data_alignment();
        let [front, middle, data] = preamble.bodies.map(|length| length as usize);
        let arrival = Arrival { transaction: label.transaction, kind: label.kind, bodies: preamble.bodies, alignment };
        let chosen = match data {
            0 => None,
            _ => self.cx.common.dispatcher.memory(&session.connection, &arrival).filter(|buffer| buffer.len() == data),
        };
        let take =
            |length, alignment| if length == 0 { Buffer::EMPTY } else { self.cx.common.pool.take(length, alignment) };
        let data = chosen.unwrap_or_else(|| take(data, alignment));
        self.link.incoming = Some(Incoming::Message(label, permit));
        let landed = self.link.reader.land([take(front, 1), take(middle, 1), data]);
        landed.map_err(|_| LinkError::Malformed(Malformed::Content { tag: preamble.tag }))
    }

    fn deliver(&mut self, label: &Label, permit: Permit) -> Result<(), LinkError> {
        let [front, middle, data] = self.link.reader.bodies();
        let Some(session) = &mut self.session else { return Ok(()) };
        if session.session.handle_message(self.key.id(), label, self.cx.now)? == Verdict::Deliver {
            let Label { number, transaction, kind, .. } = *label;
            let delivery = Delivery { transaction, kind, number, front, middle, data, permit: Some(permit) };
            self.cx.common.dispatcher.message(&session.connection, delivery);
        }
        Ok(())
    }
}

/// One receive: enough for sixty messages of 4 KiB, small enough to stay in a second-level cache until they are read.
pub(super) const RECEIVE_BYTES: usize = 256 * 1024;

/// Full receives of one link in a row, after which other links have their turn: 4 MiB.
const RECEIVES_PER_TURN: usize = 16;

// From messages to bytes: moves queued messages to their session, performs what the session wants, writes frames and
// sends them.

/// Sends for the sessions of a worker, one at a time.
#[derive(Default)]
pub(super) struct Transmitter {
    /// Messages on their way from a connection's queue to its session. Kept, so that the two queues trade their memory.
    queued: VecDeque<Queued>,
}

impl Transmitter {
    /// Moves what the owner has queued to the session.
    pub(super) fn take_queued(&mut self, entry: &mut SessionEntry, cx: &Context) {
        entry.connection.take_queued(&mut self.queued);
        // The session may be over. The owner is told by that, not by each message.
        let _ = entry.session.send_all(&mut self.queued, cx.now);
    }

    /// Sends everything that a session has to send, as far as its peer takes it, and performs what it asks for
    /// meanwhile.
    pub(super) fn settle(&mut self, key: SessionKey, entry: &mut SessionEntry, links: &mut LinkTable, cx: &Context) {
        loop {
            self.take_queued(entry, cx);
            entry.perform(key, links, cx);
            let Some(link) = entry.link else { return };
            match write(entry, links, cx) {
                Ok(true) => {}
                Ok(false) => return,
                Err(broken) => entry.end_link(link, broken, links, cx),
            }
        }
    }

    /// Sends what the owner has queued, if the peer has received everything before. Performs nothing. `false`: the
    /// session must be settled.
    pub(super) fn send_now(&mut self, entry: &mut SessionEntry, links: &mut LinkTable, cx: &Context) -> bool {
        let sends_now = entry.link.and_then(|link| links.find(link)).is_some_and(|link| link.link.sends_now());
        if !sends_now || !entry.session.is_quiet() {
            return false;
        }
        self.take_queued(entry, cx);
        // A link that breaks is found broken again by the worker, which tells the session.
        while let Ok(more) = write(entry, links, cx) {
            if !more {
                return true;
            }
        }
        false
    }
}

/// Writes and sends a share. Returns whether there may be more.
fn write(entry: &mut SessionEntry, links: &mut LinkTable, cx: &Context) -> Result<bool, LinkError> {
    let Some(key) = entry.link else { return Ok(false) };
    let Some(link) = links.get_mut(key) else { return Ok(false) };
    let more = fill(entry, link);
    let was_blocked = link.interest.writable;
    let flushed = link.flush(cx.now)?;
    if flushed == was_blocked {
        links.update(key, cx)?;
    }
    Ok(flushed && more)
}

/// Writes frames until enough is written, or there is nothing more (then it returns false).
fn fill(entry: &mut SessionEntry, link: &mut LinkState) -> bool {
    while link.writer.len() < WRITE_AHEAD_BYTES {
        match entry.session.poll_transmit() {
            Some(Outgoing::Signal(signal)) => link.say(signal),
            Some(Outgoing::Message { number, heard, message }) => {
                let message = match message {
                    Payload::Owned(Queued { message, .. }) => message,
                    Payload::Kept(Queued { message, .. }) => message.clone(),
                };
                let label = Label { number, heard, transaction: message.transaction, kind: message.kind };
                let bodies = [message.front, message.middle, message.data];
                link.writer.frame(MESSAGE, &label.encode(), bodies, usize::from(message.alignment));
            }
            None => return false,
        }
    }
    true
}

/// What is written before it is sent. The send buffer of a loopback connection takes about as much at once.
const WRITE_AHEAD_BYTES: usize = 256 * 1024;
