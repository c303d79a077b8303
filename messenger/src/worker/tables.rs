//! The links and sessions of a worker, and everything that happens between the two.
//!
//! [`Tables::served`] and [`Tables::owner`] resolve a link's key; handlers get what they resolved. A handler that may
//! end a link or a session is the last to use it, and what follows resolves the key again: a key that finds nothing
//! then means that this step ended it, and is no mistake. A key that one table holds of the other must be valid, which
//! is asserted where it is looked up.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::Context;
use super::inbox::Command;
use super::keys::{LinkKey, SessionKey};
use super::link::{LinkState, Phase};
use super::links::LinkTable;
use super::receive::{RECEIVE_BYTES, RECEIVES_PER_TURN, Received, Served};
use super::sessions::{SessionEntry, SessionTable};
use super::shutdown::LEAVING_LIMIT;
use super::transmit::Transmitter;
use crate::connection::{Connection, Mailbox, Queued, UNASSIGNED};
use crate::error::LinkError;
use crate::registry::{Name, Registry};
use crate::session::{Session, Violation};
use crate::signal::{Open, Refusal, Signal};
use crate::throttle::Throttle;

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
    pub(super) fn end_link(&mut self, key: LinkKey, broken: LinkError) {
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
