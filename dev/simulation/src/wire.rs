//! Wire: names of things in the simulated world, and the messages on its connections.

use std::time::Duration;

use remora_fabric::TransportKind;
use remora_redis::ReplId;

/// A server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct ServerId(pub(super) usize);

/// A connection. Numbers are never used twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Conn(pub(super) u64);

/// A host and a port.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Address {
    pub(super) host: String,
    pub(super) port: u16,
}

impl std::fmt::Display for Address {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}:{}", self.host, self.port)
    }
}

/// What is said on a connection: between two servers, or a server and an agent in the place of one, and between agents.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Message {
    /// `PSYNC`. `history`: the replid, and the offset of the next byte wanted. `login`: the password that came before.
    Psync { history: Option<(ReplId, u64)>, login: String, ask: Ask },
    /// `REPLCONF ACK`.
    Ack { offset: u64 },
    /// The reader has room for another slot: stands for the window of TCP.
    Room,
    /// `+FULLRESYNC`.
    FullResync { replid: ReplId, offset: u64 },
    /// A part of a snapshot.
    Slot(u64),
    /// The mark behind a snapshot.
    End,
    /// `+CONTINUE`.
    Continue { replid: ReplId },
    /// `-NOMASTERLINK` or `-LOADING`.
    Later,
    /// Bytes of the stream.
    Stream(Vec<u8>),
    /// What agents say to each other.
    Agents(Box<remora_protocol::Message>),
}

/// What follows the answer to `PSYNC`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ask {
    Stream,
    /// No stream follows the snapshot.
    SnapshotOnly,
    /// The stream, which is not read: stands for the window of TCP.
    Unread,
}

/// What a server wants done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Effect {
    Send(Conn, Message),
    Close(Conn),
    /// Connect to this address, and report the connection or its failure to this attempt.
    Dial {
        to: Address,
        attempt: u64,
    },
    After(Duration, Timer),
    /// The server answers no command for this time.
    Block(Duration),
    /// Noted for the checks: the server does not continue what was asked for on this connection.
    NotContinued(Conn),
    /// The same: more waits for this connection than the server holds back.
    Overflowed(Conn),
}

/// What a server waits for. Each names what it is for, so that one that is out of date has no effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Timer {
    /// Once a second.
    Cron { run: u64 },
    /// The fork for the replicas that wait.
    Fork { run: u64 },
    /// The next slot of a snapshot.
    Slot { fork: u64 },
    /// The snapshot has been loaded.
    Loaded { conn: Conn },
    /// The next bytes for a replica that was not sent the stream for a while.
    Piece { conn: Conn },
}

/// An end of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum End {
    Server(ServerId),
    /// The link on which a replica agent plays the primary of this server.
    Link(usize, ServerId),
    /// A replica agent's session with the source.
    Replica(usize, ServerId),
    /// The source's end of such sessions.
    Source(usize),
    /// A standby's session with the source that it stands by for.
    Standby(usize),
    /// A capture of a source.
    Capture(usize, u64),
    /// A link that pins, by its number.
    Pin(Keeper, u64),
}

/// An agent that pins.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Keeper {
    Source(usize),
    Replica(usize, ServerId),
}

/// A host. Each server has one, together with the replica agents beside it, and so has each place of a source: of those
/// that are started one after the other at the first one's address, and of those at the standby's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Host {
    Server(ServerId),
    Source(usize),
}

impl End {
    /// The host that it is on. `places`: the place of each source.
    pub(super) fn host(self, places: &[usize]) -> Host {
        let of = |source: usize| Host::Source(places.get(source).copied().unwrap_or_default());
        match self {
            End::Server(server) | End::Link(_, server) | End::Replica(_, server) => Host::Server(server),
            End::Pin(Keeper::Replica(_, server), _) => Host::Server(server),
            End::Source(source) | End::Standby(source) | End::Capture(source, _) => of(source),
            End::Pin(Keeper::Source(source), _) => of(source),
        }
    }
}

/// Where sources listen, as agents know it: the first one, and the second one.
pub(super) const SOURCES: [(&str, u16); 2] = [("10.8.0.1", 7379), ("10.8.0.2", 7379)];

/// The place of the source that listens there.
pub(super) fn place_of(address: &Address) -> Option<usize> {
    SOURCES.iter().position(|source| *source == (address.host.as_str(), address.port))
}

/// How replicas read in this world.
pub(super) const TRANSPORT: TransportKind = TransportKind::Tcp;
