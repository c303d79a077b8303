//! Authenticated connections, what each may read, and how replicas learn from which other one they read.

use remora_fabric::{RegionId, Regions, TransportKind};
use remora_protocol::{LossCause, Message, Relays};

use super::Source;
use super::exports::Exports;
use super::machine::Session;
use super::topology::Assignment;
use crate::conversation::{Connection, Protection, Receiver, Role, Sender, derive};
use crate::events;
use crate::lanes::LANES_LABEL;

/// One authenticated connection.
pub(super) struct Peer {
    pub(super) sender: Sender,
    pub(super) address: std::net::SocketAddr,
    /// Whether it is on this host, as far as its address says.
    pub(super) is_local: bool,
    pub(super) key: [u8; 32],
    /// What it may ask for.
    pub(super) role: Role,
    /// What protects the conversation.
    pub(super) protection: Protection,
    pub(super) done: bool,
    /// Why the peer uses no better transport, as it reported.
    pub(super) transport_why: String,
    /// Why its server does not load in the fast way.
    pub(super) no_fast_keys: String,
    /// How the peer lends its slots to other replicas, with its address as they reach it.
    pub(super) relays: Option<Relays>,
    /// What it was offered, and may read.
    pub(super) readable: Readable,
}

/// The regions that a session may read: those that it was offered last.
#[derive(Default)]
pub(super) struct Readable {
    /// The snapshot and the journal of an offer.
    pub(super) tables: Option<[RegionId; 2]>,
    /// Memory to measure with.
    pub(super) probe: Option<RegionId>,
}

impl Readable {
    pub(super) fn regions(&self) -> Regions {
        Regions::only(self.tables.into_iter().flatten().chain(self.probe))
    }
}

impl Peer {
    /// The peer at the other end of a connection, and what it says.
    pub(super) fn of(connection: Connection) -> (Peer, Receiver) {
        let (address, key) = (connection.peer_addr(), connection.session_key());
        let (role, protection) = (connection.role(), connection.protection());
        let is_local = address.ip().is_loopback() || address.ip() == connection.local_addr().ip();
        let (sender, receiver) = connection.split();
        let peer = Peer {
            sender,
            address,
            is_local,
            key,
            role,
            protection,
            done: false,
            transport_why: String::new(),
            no_fast_keys: String::new(),
            relays: None,
            readable: Readable::default(),
        };
        (peer, receiver)
    }

    /// Changes what it may read. Call it before the message that offers the regions.
    pub(super) fn grant(&mut self, session: Session, exports: &Exports, change: impl FnOnce(&mut Readable)) {
        change(&mut self.readable);
        exports.grant(session, derive(&self.key, LANES_LABEL), &self.readable.regions());
    }

    /// What protects the data that it reads over this transport, or its conversation as long as it reads nothing.
    pub(super) fn data_protection(&self, transport: Option<TransportKind>, is_sealed: bool) -> Protection {
        transport.map_or(self.protection, |kind| self.protection.of_data(kind, is_sealed, self.address.ip()))
    }
}

impl Source {
    /// Tells replicas the upstreams that the topology has assigned to them.
    pub(super) fn assign(&mut self, assignments: &[Assignment]) {
        let Some(generation) = self.machine.status().generation() else { return };
        for &Assignment { reader, from } in assignments {
            let upstream = from.and_then(|from| self.upstream(from));
            let name = upstream.as_ref().map_or("the source", |upstream| upstream.name.as_str());
            tracing::info!(
                event = events::UPSTREAM_ASSIGNED,
                reader,
                from = name,
                "replica assigned a different upstream"
            );
            self.send(reader, Message::ReadFrom { generation, upstream });
        }
    }

    pub(super) fn peer_lost(&mut self, reader: Session, generation: u64, peer: Session, cause: LossCause, text: &str) {
        if self.machine.status().offered(reader) != Some(generation) {
            return;
        }
        let was_banned = self.topology.accusations.is_banned(peer);
        let moved = self.topology.lost(reader, peer, cause);
        let name = |session| self.machine.status().replica(session).map_or("gone", |replica| replica.name.as_str());
        match cause {
            LossCause::Lied if self.topology.accusations.is_banned(peer) && !was_banned => {
                tracing::warn!(peer = name(peer), reader = name(reader), %text, "a second replica reports that this one lent slots that differ from the source's; no other replica will read from it");
            }
            LossCause::Lied => {
                tracing::warn!(peer = name(peer), reader = name(reader), %text, "a replica reports that another one lent slots that differ from the source's; it will not read from it again");
            }
            _ => tracing::info!(peer = name(peer), reader = name(reader), %text, "replica lost its upstream"),
        }
        self.assign(&moved);
    }
}
