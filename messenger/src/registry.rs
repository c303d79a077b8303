//! Finds the session that an OPEN names. Shared by the workers of a messenger, and asked once per link, never per
//! message.

use std::collections::HashMap;
use std::net::SocketAddr;

use crate::connection::Connection;
use crate::signal::{Entity, Open};

/// The names by which sessions are found.
#[derive(Default)]
pub(crate) struct Registry {
    sessions: usize,
    names: HashMap<Name, Connection>,
}

/// A name of a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Name {
    /// This end's cookie: the peer has been told it.
    Ours(u64),
    /// The peer's cookie: a peer that connects again because it never received the answer.
    Theirs(Entity, u64),
    /// The address that the peer listens at: two peers that connect to each other.
    Address(SocketAddr),
}

impl Registry {
    /// The session that an OPEN names.
    pub(crate) fn find(&self, open: &Open) -> Option<&Connection> {
        if let Some(to) = open.to {
            return self.names.get(&Name::Ours(to.id));
        }
        let by_cookie = self.names.get(&Name::Theirs(open.entity, open.from.id));
        by_cookie.or_else(|| self.names.get(&Name::Address(open.address?)))
    }

    /// The session with the peer that listens at an address.
    pub(crate) fn with_peer_at(&self, address: SocketAddr) -> Option<&Connection> {
        self.names.get(&Name::Address(address))
    }

    /// Gives a session a name. A name that is in use moves to this session.
    pub(crate) fn enter(&mut self, name: Name, connection: &Connection) {
        let before = self.names.insert(name, connection.clone());
        self.sessions += usize::from(before.is_none() && matches!(name, Name::Ours(_)));
    }

    /// Removes names that still belong to that session.
    pub(crate) fn leave(&mut self, names: &[Name], connection: &Connection) {
        for name in names {
            if self.names.get(name) == Some(connection) {
                self.names.remove(name);
                self.sessions -= usize::from(matches!(name, Name::Ours(_)));
            }
        }
    }

    /// The number of sessions.
    pub(crate) fn sessions(&self) -> usize {
        self.sessions
    }
}
