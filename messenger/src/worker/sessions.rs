//! The sessions of a worker, and what they ask of it.

use std::sync::Arc;
use std::time::Instant;

use slotmap::{Key, SlotMap};

use super::Context;
use super::keys::{LinkKey, SessionKey};
use super::link::{LinkState, Phase};
use super::links::LinkTable;
use super::timers::Timers;
use crate::connection::{Connection, Queued};
use crate::error::LinkError;
use crate::registry::Name;
use crate::session::{Action, LinkId, News, Session};
use crate::signal::{Open, Signal};
use crate::throttle::Throttle;

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
    pub(super) fn learn_names(&mut self, open: &Open, cx: &Context) {
        let mut names = vec![Name::Theirs(open.entity, open.from.id)];
        names.extend(open.address.filter(|_| cx.is_peer()).map(Name::Address));
        names.retain(|name| !self.names.contains(name));
        let mut registry = cx.common.registry();
        names.iter().for_each(|name| registry.enter(*name, &self.connection));
        self.names.extend(names);
    }

    /// Performs what the session asks for.
    pub(super) fn perform(&mut self, key: SessionKey, links: &mut LinkTable, cx: &Context) {
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
    pub(super) fn end_link(&mut self, key: LinkKey, broken: LinkError, links: &mut LinkTable, cx: &Context) {
        if let Some(link) = links.end(key, &broken, cx)
            && link.session().is_some()
        {
            self.link_ended(key, &link, broken, cx);
        }
    }

    /// Goes on without a link, which was this session's.
    pub(super) fn link_ended(&mut self, key: LinkKey, link: &LinkState, broken: LinkError, cx: &Context) {
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
