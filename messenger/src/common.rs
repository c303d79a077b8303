//! What the workers of one messenger share: its settings, other than the behaviour of its sessions
//! ([`Policy`]), and the registry that finds the session of an OPEN.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::buffer::Pool;
use crate::connection::{Connection, Dispatcher};
use crate::handshake::Versions;
use crate::keyring::Keyring;
use crate::policy::Policy;
use crate::signal::{Entity, Open};
use crate::stack::rdma::RdmaOptions;
use crate::stack::tls::TlsOptions;
use crate::stack::{Address, Stacks};

// What the workers of one messenger share.

/// What all workers of a messenger share.
pub(crate) struct Common {
    pub(crate) entity: Entity,
    pub(crate) policy: Policy,
    pub(crate) handshake: HandshakeConfig,
    pub(crate) polling: Polling,
    pub(crate) stacks: Stacks,
    pub(crate) dispatcher: Arc<dyn Dispatcher>,
    pub(crate) pool: Arc<Pool>,
    pub(crate) max_sessions: usize,
    pub(crate) max_unauthenticated: usize,
    pub(crate) serving: AtomicBool,
    /// Where peers can connect to, once the messenger listens.
    pub(crate) address: Mutex<Option<Address>>,
    pub(crate) next_worker: AtomicUsize,
    pub(crate) registry: Mutex<Registry>,
}

impl Common {
    pub(crate) fn registry(&self) -> MutexGuard<'_, Registry> {
        self.registry.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Settings of a messenger, other than the behaviour of its sessions ([`Policy`]).
#[derive(Debug, Clone)]
pub struct Options {
    /// Number of threads. A connection lives on one of them.
    pub workers: usize,
    /// Whether bodies have checksums. They are left out only where both ends ask for that.
    pub summed: bool,
    /// The secrets that both ends share. With a token frames are sealed, unless `sealed` is false at both ends. Without
    /// one every peer is accepted.
    pub keys: Option<Arc<Keyring>>,
    /// The versions of the owner's protocol that this end speaks. The ends agree on the newest common one.
    pub versions: Versions,
    /// Whether frames have seals if there is a token.
    pub sealed: bool,
    /// Whether a worker polls before it sleeps.
    pub polling: Polling,
    /// Bytes of received data that the pool may keep for reuse.
    pub pool_bytes: usize,
    /// Greatest number of sessions.
    pub max_sessions: usize,
    /// What `tls:` addresses need.
    pub tls: TlsOptions,
    /// Settings of RDMA links.
    pub rdma: RdmaOptions,
    /// Greatest number of links per worker without a session. This bounds the memory that unauthenticated peers can
    /// take.
    pub max_unauthenticated: usize,
}

/// What a worker does when it has no work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Polling {
    /// It sleeps at once: least processor time.
    Event,
    /// It never sleeps: least latency, at the price of one processor.
    Spin,
    /// It polls for up to this long, and for less where polling has rarely found something.
    Adaptive(Duration),
}

impl Default for Options {
    fn default() -> Options {
        Options {
            workers: 1,
            summed: true,
            keys: None,
            versions: Versions::only(1),
            sealed: true,
            polling: Polling::Event,
            pool_bytes: POOL_BYTES,
            max_sessions: MAX_SESSIONS,
            tls: TlsOptions::default(),
            rdma: RdmaOptions::default(),
            max_unauthenticated: MAX_UNAUTHENTICATED,
        }
    }
}

/// What this end brings into every handshake.
#[derive(Debug, Clone)]
pub(crate) struct HandshakeConfig {
    pub(crate) keys: Arc<Keyring>,
    pub(crate) versions: Versions,
    pub(crate) summed: bool,
    pub(crate) sealed: bool,
}

impl HandshakeConfig {
    /// What this end can do without. Only what both ends can do without is left out, so no peer weakens this end.
    pub(crate) fn features(&self) -> u64 {
        u64::from(!self.summed) * MAY_LEAVE_SUMS + u64::from(!self.sealed) * MAY_LEAVE_SEALS
    }
}

/// Feature bits of the handshake: this end can do without checksums over bodies, and without seals.
pub(crate) const MAY_LEAVE_SUMS: u64 = 1;

pub(crate) const MAY_LEAVE_SEALS: u64 = 2;

/// Twice what a fast link brings in a hundredth of a second.
const POOL_BYTES: usize = 64 << 20;

/// Each session costs a descriptor and a few kilobytes.
const MAX_SESSIONS: usize = 65_536;

/// As many connections as arrive at once when a server with very many clients comes back.
const MAX_UNAUTHENTICATED: usize = 16_384;

// Finds the session that an OPEN names. Shared by the workers of a messenger, and asked once per link, never per
// message.

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
