//! The links of a worker: found by key, watched by the reactor, looked at when their time has come.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use slotmap::SlotMap;

use super::link::{LinkKey, LinkState, Phase, SessionKey, Timers};
use super::{Command, Context, Reactor};
use crate::connection::Negotiated;
use crate::error::LinkError;
use crate::frame::Limits;
use crate::stack::Listener;

/// See the module's documentation.
pub(super) struct LinkTable {
    links: SlotMap<LinkKey, LinkState>,
    /// Links whose transport can be asked for something to do without a system call.
    polled: Vec<LinkKey>,
    /// Links that peers opened and that serve no session yet.
    unauthenticated: usize,
    timers: Timers<LinkKey>,
    pub(super) reactor: Reactor,
}

impl LinkTable {
    pub(super) fn new(reactor: Reactor) -> LinkTable {
        LinkTable {
            links: SlotMap::with_key(),
            polled: Vec::new(),
            unauthenticated: 0,
            timers: Timers::default(),
            reactor,
        }
    }

    /// Adds a link and has the reactor watch it. A link that the reactor does not take is given back.
    pub(super) fn insert(&mut self, mut link: LinkState, cx: &Context) -> Result<LinkKey, (Box<LinkState>, LinkError)> {
        link.interest = link.wanted();
        link.timer = None;
        let (is_polled, is_unauthenticated) = (link.is_polled, link.is_unauthenticated());
        let key = self.links.insert(link);
        let link = &self.links[key];
        if let Err(error) = self.reactor.add_link(key, link.link.descriptor(), link.interest)
            && let Some(link) = self.links.remove(key)
        {
            return Err((Box::new(link), LinkError::Io(error)));
        }
        self.unauthenticated += usize::from(is_unauthenticated);
        if is_polled {
            self.polled.push(key);
        }
        self.schedule(key, cx);
        Ok(key)
    }

    /// Takes a link out.
    pub(super) fn remove(&mut self, key: LinkKey) -> Option<LinkState> {
        let link = self.links.remove(key)?;
        self.unauthenticated -= usize::from(link.is_unauthenticated());
        self.reactor.remove_link(link.link.descriptor());
        self.polled.retain(|other| *other != key);
        Some(link)
    }

    /// Takes a link out that is of no use any more. The owner is told of a peer that never got a session.
    pub(super) fn end(&mut self, key: LinkKey, broken: &LinkError, cx: &Context) -> Option<LinkState> {
        let link = self.remove(key)?;
        tracing::debug!(peer = %link.link.peer(), %broken, "a link ends");
        if link.is_unauthenticated() {
            cx.common.dispatcher.rejected(&link.link.peer(), broken);
        }
        Some(link)
    }

    /// The link of a key that may be out of date.
    pub(super) fn find(&mut self, key: LinkKey) -> Option<&mut LinkState> {
        self.links.get_mut(key)
    }

    /// The link of a key that a session or another table holds. Such a key is valid; a missing link is a mistake of
    /// ours.
    pub(super) fn get_mut(&mut self, key: LinkKey) -> Option<&mut LinkState> {
        let link = self.links.get_mut(key);
        debug_assert!(link.is_some(), "{key:?} is held, but its link is gone");
        link
    }

    /// Makes a link that of a session. Returns what its handshake settled, if the session has not been told.
    pub(super) fn bind(&mut self, key: LinkKey, session: SessionKey, limits: Limits) -> Option<Box<Negotiated>> {
        let link = self.get_mut(key)?;
        let was_unauthenticated = link.is_unauthenticated();
        link.phase = Phase::Serving(session);
        link.deadline = None;
        link.reader.set_limits(limits);
        let negotiated = link.negotiated.take();
        self.unauthenticated -= usize::from(was_unauthenticated);
        negotiated
    }

    /// Has a link send what is written and then close.
    pub(super) fn leave(&mut self, key: LinkKey, deadline: Instant) {
        if let Some(link) = self.get_mut(key) {
            link.phase = Phase::Leaving;
            link.deadline = Some(deadline);
        }
    }

    /// Tells the reactor what a link waits for, when that has changed, and sets its timer.
    pub(super) fn update(&mut self, key: LinkKey, cx: &Context) -> Result<(), LinkError> {
        let Some(link) = self.links.get_mut(key) else {
            debug_assert!(false, "{key:?} is updated, but its link is gone");
            return Ok(());
        };
        let wanted = link.wanted();
        if link.interest != wanted {
            link.interest = wanted;
            self.reactor.change_link(key, link.link.descriptor(), wanted).map_err(LinkError::Io)?;
        }
        self.schedule(key, cx);
        Ok(())
    }

    /// Sets a link's timer, if it is not set for an earlier time.
    fn schedule(&mut self, key: LinkKey, cx: &Context) {
        let Some(link) = self.links.get_mut(key) else { return };
        let Some(next) = link.next_deadline(cx) else { return };
        if link.timer.is_none_or(|timer| next < timer) {
            link.timer = Some(next);
            self.timers.set(next, key);
        }
    }

    /// Ends the wait of a link whose time has come: the next one, and why it must end.
    pub(super) fn pop_expired(&mut self, cx: &Context) -> Option<(LinkKey, LinkError)> {
        while let Some((at, key)) = self.timers.pop(cx.now) {
            let Some(link) = self.links.get_mut(key).filter(|link| link.timer == Some(at)) else { continue };
            link.timer = None;
            if let Some(broken) = link.expired(cx) {
                return Some((key, broken));
            }
            self.schedule(key, cx);
        }
        let links = &self.links;
        self.timers.tidy(links.len(), |at, key| links.get(key).is_some_and(|link| link.timer == Some(at)));
        None
    }

    /// The earliest timer.
    pub(super) fn next_timer(&self) -> Option<Instant> {
        self.timers.next()
    }

    /// The number of links that can be polled.
    pub(super) fn polled(&self) -> usize {
        self.polled.len()
    }

    /// The polled link of that index, if there is something to do on it.
    pub(super) fn poll_ready(&mut self, index: usize) -> Option<LinkKey> {
        let key = *self.polled.get(index)?;
        self.get_mut(key)?.has_something().then_some(key)
    }

    /// Prepares polled links for a sleep on their descriptors. Returns whether something came in the meantime.
    pub(super) fn arm(&mut self) -> bool {
        let links = &mut self.links;
        self.polled.iter().fold(false, |found, key| found | links.get_mut(*key).is_some_and(LinkState::arm))
    }

    /// Ends what [`LinkTable::arm`] began.
    pub(super) fn disarm(&mut self) {
        for key in &self.polled {
            if let Some(link) = self.links.get_mut(*key) {
                link.link.disarm();
            }
        }
    }

    /// How many links peers have opened that serve no session yet.
    pub(super) fn unauthenticated(&self) -> usize {
        self.unauthenticated
    }

    /// Links that send their last bytes.
    pub(super) fn leaving(&self) -> Vec<LinkKey> {
        let is_leaving = |link: &LinkState| matches!(link.phase, Phase::Leaving);
        self.links.iter().filter(|(_, link)| is_leaving(link)).map(|(key, _)| key).collect()
    }
}

// Accepts connections, and shares them out among the workers of the messenger.

/// The listeners of a worker.
#[derive(Default)]
pub(super) struct Acceptor {
    listeners: Vec<Box<dyn Listener>>,
}

/// Where an accepted connection goes.
pub(super) enum Accepted {
    /// This worker is to serve it.
    Here(Box<LinkState>),
    /// Another worker has it.
    Elsewhere,
}

impl Acceptor {
    /// Begins to accept there.
    pub(super) fn listen(&mut self, listener: Box<dyn Listener>, reactor: &Reactor) {
        match reactor.add_listener(self.listeners.len(), listener.descriptor()) {
            Ok(()) => self.listeners.push(listener),
            Err(error) => tracing::error!(address = %listener.address(), %error, "cannot listen"),
        }
    }

    /// Accepts the next connection of a listener and begins its handshake. `None`: there is none, or it failed.
    pub(super) fn accept(&mut self, index: usize, cx: &Context) -> Option<Accepted> {
        let listener = self.listeners.get_mut(index)?;
        let link = match listener.accept() {
            Ok(link) => link,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return None,
            Err(error) => {
                tracing::warn!(address = %listener.address(), %error, "cannot accept");
                return None;
            }
        };
        let link = match LinkState::called(link, &cx.common, cx.now) {
            Ok(link) => Box::new(link),
            Err(broken) => {
                tracing::warn!(%broken, "cannot begin a handshake");
                return None;
            }
        };
        let next = cx.common.next_worker.fetch_add(1, Ordering::Relaxed);
        let worker = cx.workers.get(next % cx.workers.len().max(1));
        match worker.filter(|worker| !Arc::ptr_eq(worker, &cx.inbox)) {
            Some(worker) => worker.post(Command::Take(link)),
            None => return Some(Accepted::Here(link)),
        }
        Some(Accepted::Elsewhere)
    }
}

/// Connections accepted in a row, after which other events have their turn.
pub(super) const ACCEPTS_PER_TURN: usize = 64;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_never_finds_what_came_later_to_its_place() {
        let mut links: SlotMap<LinkKey, &str> = SlotMap::with_key();
        let first = links.insert("first");
        assert_eq!(links.remove(first), Some("first"));
        let second = links.insert("second");
        assert_eq!((links.get(first), links.get(second)), (None, Some(&"second")));
        assert_eq!(links.remove(first), None);
        assert_eq!((links.len(), links.keys().collect::<Vec<_>>()), (1, vec![second]));
    }
}
