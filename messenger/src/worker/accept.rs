//! Accepts connections, and shares them out among the workers of the messenger.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::Context;
use super::inbox::Command;
use super::link::LinkState;
use super::reactor::Reactor;
use crate::stack::Listener;

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
