//! Connections of volumes: links by the messenger, lanes, a caller that asks one question at a time, and RDMA.

use std::collections::VecDeque;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender, TryRecvError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use remora_fabric::shm::ShmConnector;
use remora_fabric::tcp::{TcpConnector, TcpOptions};
use remora_fabric::{Connector, Exporter, Memory, Peer, RegionKey, Secret, TransportKind};
use remora_messenger::frame::Limits;
use remora_messenger::handshake::Versions;
use remora_messenger::stack::tls::TlsOptions;
use remora_messenger::{
    Address, Buffer, Connection, Delivery, Dispatcher, Keyring, Message, Messenger, Options, Policy, Refusal,
};
use remora_wire::{TooLarge, derive};

use crate::wire::{Call, DecodeError, MAX_DATA_BYTES, MAX_FRONT_BYTES, Reply, Room, VERSION};

#[cfg(feature = "verbs")]
use remora_fabric::verbs::{VerbsConnector, VerbsExporter, VerbsOptions};

// How the volume uses the messenger, at both ends.
//
// Sessions are lossy: a link that breaks ends the session, and both ends are told at once. The copy is then taken
// back. A session that resumed would hide a server that was restarted without its memory until it is asked, and a
// killed process for as long as reconnects are tried.

/// The most that a server lets a writer have under way: what 10 Gbit/s carry in 25 ms, and 160,000 writes a second.
pub(crate) const MOST_ROOM: Room = Room { bytes: 32 << 20, writes: 4096 };

/// The least, with which a writer begins: one of the longest writes, and what fills a loopback with small ones.
pub(crate) const LEAST_ROOM: Room = Room { bytes: MAX_DATA_BYTES as u64, writes: 32 };

/// Calls of a connection that may wait beside its writes: questions and reads, which are short.
const OTHER_CALLS: usize = 4096;

/// Bytes of answers that may wait for a client that reads slowly. Beyond that its connection is ended.
const ANSWER_BYTES: usize = 64 << 20;

/// A client's end: a writer, or a server that borrows.
pub(crate) fn client_policy() -> Policy {
    Policy { limits: limits(), ..Policy::lossy_client() }
}

/// A server's end. Each connection has its own bound, so no writer waits for another one.
pub(crate) fn server_policy() -> Policy {
    let messages = MOST_ROOM.writes as usize + OTHER_CALLS;
    let bytes = MOST_ROOM.bytes as usize + MAX_DATA_BYTES;
    Policy {
        receive_each: Some((messages, bytes)),
        limits: limits(),
        send_bytes: ANSWER_BYTES,
        ..Policy::stateless_server()
    }
}

fn limits() -> Limits {
    Limits { front: MAX_FRONT_BYTES as u32, data: MAX_DATA_BYTES as u32 }
}

/// What protects connections.
#[derive(Clone, Debug, Default)]
pub struct Security {
    /// The secrets that clients and servers share: every frame has a MAC, unless `unsealed` is set at both ends.
    /// `None`: every client is obeyed, and every server believed.
    pub keys: Option<Arc<Keyring>>,
    /// Frames need no MAC, because no other process can change them: connections have TLS, or both ends are on this
    /// host. A MAC costs more than everything else that is done with a large write.
    pub unsealed: bool,
    /// Certificates, for `tls:` addresses. Without TLS the blocks can be read on the network.
    pub tls: TlsOptions,
}

pub(crate) fn options(security: &Security, workers: usize, max_sessions: usize) -> Options {
    let Security { keys, unsealed, tls } = security.clone();
    Options {
        keys,
        sealed: !unsealed,
        tls,
        workers,
        max_sessions,
        versions: Versions::only(VERSION),
        ..Options::default()
    }
}

/// A call as a message.
pub(crate) fn call(call: &Call, data: Bytes) -> Result<Message, TooLarge> {
    let mut front = Vec::new();
    let kind = call.encode(&mut front)?;
    Ok(Message::new(0, kind, front).with_data(data))
}

/// A reply as a message.
pub(crate) fn reply(reply: &Reply, data: Bytes) -> Result<Message, TooLarge> {
    let mut front = Vec::new();
    let kind = reply.encode(&mut front)?;
    Ok(Message::new(0, kind, front).with_data(data))
}

/// What a server has sent.
pub(crate) fn decode_reply(delivery: &Delivery) -> Result<Reply, DecodeError> {
    Reply::decode(delivery.kind, &delivery.front, delivery.data.len())
}

/// What a client has sent.
pub(crate) fn decode_call(delivery: &Delivery) -> Result<Call, DecodeError> {
    Call::decode(delivery.kind, &delivery.front, delivery.data.len())
}

/// The host and port of an address, if it is one of a network.
pub(crate) fn socket_address(address: &Address) -> Option<SocketAddr> {
    match address {
        Address::Tcp(address) | Address::Tls(address) | Address::Rdma(address) => Some(*address),
        Address::Shm(_) => None,
    }
}

/// A writer that was heard within this time is at work. It says something each second, and a busy host lets it wait for
/// a few.
pub const AT_WORK: Duration = Duration::from_secs(10);

/// What proves to a server's exporters that a reader is the client of this connection; `None` before its handshake.
pub(crate) fn region_secret(connection: &Connection) -> Option<[u8; 32]> {
    connection.negotiated().map(|negotiated| derive(&negotiated.key, REGION_LABEL))
}

/// What the secret of a grant is derived for.
const REGION_LABEL: &[u8] = b"remora volume regions";

// A connection to a region at the other end of a messenger's connection, over the nearest transport.

/// How a region is connected to.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Lane<'a> {
    /// The transports that may be used, nearest first.
    pub(crate) transports: &'a [TransportKind],
    /// By which devices RDMA is used.
    pub(crate) rdma: &'a Rdma,
    /// How long the region must be.
    pub(crate) length: u64,
    /// Reads under way.
    pub(crate) depth: usize,
    /// Longest time for the connection.
    pub(crate) connect_limit: Duration,
    /// Longest time without a byte while a read is under way.
    pub(crate) read_limit: Duration,
}

/// A connection.
pub(crate) struct Laid {
    pub(crate) peer: Box<dyn Peer>,
    pub(crate) transport: TransportKind,
    /// Why nearer transports were passed over; empty if none was.
    pub(crate) why: String,
    /// How long it took to connect by that transport.
    pub(crate) took: Duration,
}

impl Lane<'_> {
    /// Connects by the first transport by which it can. `session`: this end's name there. Reads arrive in `sink`.
    ///
    /// # Errors
    /// Why none of the transports can be used.
    pub(crate) fn connect(
        &self,
        connection: &Connection,
        (session, keys): (u64, &[Vec<u8>]),
        sink: &Arc<Memory>,
    ) -> Result<Laid, String> {
        let secret = region_secret(connection).ok_or("the connection has not begun")?;
        let keys: Vec<RegionKey> = keys.iter().filter_map(|key| RegionKey::from_bytes(key.clone()).ok()).collect();
        let mut why = Vec::new();
        for kind in self.transports {
            let began = Instant::now();
            match self.connect_by(*kind, connection, (session, &secret, &keys), sink) {
                Ok(peer) => {
                    return Ok(Laid { peer, transport: *kind, why: why.join("; "), took: began.elapsed() });
                }
                Err(error) => why.push(format!("{kind}: {error}")),
            }
        }
        Err(why.join("; "))
    }

    fn connect_by(
        &self,
        kind: TransportKind,
        connection: &Connection,
        (session, secret, keys): (u64, &Secret, &[RegionKey]),
        sink: &Arc<Memory>,
    ) -> Result<Box<dyn Peer>, String> {
        let key = keys.iter().find(|key| key.transport() == kind).ok_or("the other end does not offer it")?;
        if key.length() != self.length {
            return Err(format!("the region has {} bytes, and {} were expected", key.length(), self.length));
        }
        let peer = self.connector(kind, connection)?.connect(key, session, secret, Arc::clone(sink));
        peer.map_err(|error| error.to_string())
    }

    fn connector(&self, kind: TransportKind, connection: &Connection) -> Result<Box<dyn Connector>, String> {
        let Lane { depth, connect_limit, read_limit, .. } = *self;
        let host = socket_address(connection.peer());
        match kind {
            TransportKind::Shm => Ok(Box::new(ShmConnector::with_timeout(connect_limit))),
            TransportKind::Verbs => self.rdma.connector(Reading { host, depth, connect_limit, read_limit }),
            _ => {
                let options = TcpOptions {
                    depth,
                    connect_timeout: connect_limit,
                    handshake_timeout: connect_limit,
                    stall_timeout: read_limit,
                    ..TcpOptions::default()
                };
                let tcp = TcpConnector::new(options, host);
                tcp.map(|tcp| Box::new(tcp) as Box<dyn Connector>).map_err(|error| error.to_string())
            }
        }
    }
}

/// A connection to a server, of another one or of a host that only reads. One question at a time.
pub(crate) struct Caller {
    connection: Connection,
    events: Receiver<Event>,
    _messenger: Messenger,
}

enum Event {
    Delivery(Delivery),
    Over,
}

struct Post(Sender<Event>);

impl Dispatcher for Post {
    fn message(&self, _: &Connection, delivery: Delivery) {
        let _ = self.0.send(Event::Delivery(delivery)); // the caller may have ended
    }

    fn reset(&self, _: &Connection, _: usize, _: bool) {
        let _ = self.0.send(Event::Over);
    }

    fn closed(&self, _: &Connection) {
        let _ = self.0.send(Event::Over);
    }

    fn refused(&self, _: &Connection, _: Refusal) {
        let _ = self.0.send(Event::Over);
    }
}

impl Caller {
    /// Begins to connect. The first answer shows whether that was possible.
    pub(crate) fn connect(address: &Address, security: &Security) -> Result<Caller, String> {
        let (post, events) = mpsc::channel();
        let options = options(security, 1, 1);
        let messenger = Messenger::new(client_policy(), &options, Arc::new(Post(post)));
        let messenger = messenger.map_err(|error| error.to_string())?;
        Ok(Caller { connection: messenger.connect(address), events, _messenger: messenger })
    }

    pub(crate) fn connection(&self) -> &Connection {
        &self.connection
    }

    /// Why the connection is over; `None` while it is not. Not to be called while a question is open.
    pub(crate) fn why_over(&self) -> Option<String> {
        let is_over = matches!(self.events.try_recv(), Ok(_) | Err(TryRecvError::Disconnected));
        is_over.then(|| self.why())
    }

    fn why(&self) -> String {
        let why = self.connection.link_error().map(|error| error.to_string());
        why.unwrap_or_else(|| "the connection is over".into())
    }

    /// The answer to a question, within `limit`. `goes_on` is asked from time to time whether to wait on.
    pub(crate) fn ask<E: From<String>>(
        &self,
        call: &Call,
        limit: Duration,
        mut goes_on: impl FnMut() -> Result<(), E>,
    ) -> Result<(Reply, Buffer), E> {
        let message = self::call(call, Bytes::new()).map_err(|error| error.to_string())?;
        self.connection.send(message).map_err(|error| error.to_string())?;
        let deadline = Instant::now() + limit;
        loop {
            goes_on()?;
            let left = deadline.saturating_duration_since(Instant::now());
            match self.events.recv_timeout(left.min(LOOK_AGAIN)) {
                Ok(Event::Delivery(delivery)) => {
                    let reply = decode_reply(&delivery).map_err(|error| error.to_string())?;
                    return Ok((reply, delivery.data));
                }
                Ok(Event::Over) | Err(RecvTimeoutError::Disconnected) => return Err(self.why().into()),
                Err(RecvTimeoutError::Timeout) if left.is_zero() => {
                    return Err(format!("no answer within {limit:?}").into());
                }
                Err(RecvTimeoutError::Timeout) => {}
            }
        }
    }
}

/// How often a caller that waits checks whether it should end.
pub(crate) const LOOK_AGAIN: Duration = Duration::from_millis(50);

// RDMA: how an end offers its memory by RDMA, and reads that of others. Without the feature `verbs` it can do neither,
// and says so.
//
// A card reads memory without its host's processor. The bytes are neither encrypted nor authenticated on their way; a
// reader proves its right before it can read, as over TCP.

/// The RDMA devices of an end, and how its packets are marked.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rdma {
    /// Addresses of this host's devices. Memory is offered at them, and read by them. Empty: none is offered, and the
    /// system's routes decide by which device this end reads.
    pub addresses: Vec<IpAddr>,
    /// IP type of service of RoCE packets; `None` leaves the system's.
    pub traffic_class: Option<u8>,
    /// Service level, 0 to 15; `None` leaves the system's.
    pub service_level: Option<u8>,
}

/// What a reader expects of a connection.
#[derive(Clone, Copy, Debug)]
#[cfg_attr(not(feature = "verbs"), allow(dead_code))]
pub(crate) struct Reading {
    /// Where the messenger reached the other end.
    pub(crate) host: Option<SocketAddr>,
    /// Reads under way.
    pub(crate) depth: usize,
    /// Longest time for the connection.
    pub(crate) connect_limit: Duration,
    /// Longest time without a byte while a read is under way.
    pub(crate) read_limit: Duration,
}

#[cfg(feature = "verbs")]
impl Rdma {
    /// Listens at the addresses. `None`: there are none.
    ///
    /// # Errors
    /// One of them is not the address of a device that can be used.
    pub(crate) fn exporter(&self) -> Result<Option<Box<dyn Exporter>>, String> {
        if self.addresses.is_empty() {
            return Ok(None);
        }
        // A device that connects by itself (iWARP) is used as well: the user has named it.
        let options = VerbsOptions { iwarp: true, connections: CONNECTIONS, ..self.options() };
        let addresses: Vec<SocketAddr> = self.addresses.iter().map(|address| SocketAddr::new(*address, 0)).collect();
        let exporter = VerbsExporter::listen(options, &addresses).map_err(|error| error.to_string())?;
        let (devices, addresses) = (exporter.devices().join(", "), exporter.addresses());
        tracing::info!(%devices, ?addresses, "RDMA is offered");
        Ok(Some(Box::new(exporter)))
    }

    /// # Errors
    /// This host has no RDMA, with what is missing.
    pub(crate) fn connector(&self, reading: Reading) -> Result<Box<dyn Connector>, String> {
        let Reading { host, depth, connect_limit, read_limit } = reading;
        let options = VerbsOptions {
            depth,
            connect_timeout: connect_limit,
            handshake_timeout: connect_limit,
            stall_timeout: read_limit,
            ..self.options()
        };
        let connector =
            VerbsConnector::new(options, host, self.addresses.clone()).map_err(|error| error.to_string())?;
        Ok(Box::new(connector))
    }

    fn options(&self) -> VerbsOptions {
        VerbsOptions { traffic_class: self.traffic_class, service_level: self.service_level, ..VerbsOptions::default() }
    }
}

/// Readers of an end. Each has a queue pair and a page here: a writer, and a server that follows it, for each volume.
#[cfg(feature = "verbs")]
const CONNECTIONS: usize = 1024;

#[cfg(not(feature = "verbs"))]
impl Rdma {
    /// # Errors
    /// Addresses were given.
    pub(crate) fn exporter(&self) -> Result<Option<Box<dyn Exporter>>, String> {
        if self.addresses.is_empty() { Ok(None) } else { Err(NOT_BUILT.into()) }
    }

    /// # Errors
    /// Always.
    pub(crate) fn connector(&self, _: Reading) -> Result<Box<dyn Connector>, String> {
        Err(NOT_BUILT.into())
    }
}

#[cfg(not(feature = "verbs"))]
const NOT_BUILT: &str = "this program was built without RDMA (feature verbs of remora-volume)";

// Memory of the writer out of which servers pull the blocks of large writes, and the memory at a server into
// which they do. Both have each write at the same place, so a server can be pulled from in its turn.
//
// ```text
//   writer: outbox ══ bytes ══▶ server: staging ══ bytes ══▶ server: staging      (chain; star: each from the outbox)
// ```
//
// | at | bytes | what |
// |---|---|---|
// | 0 | [`OUTBOX_BYTES`] | blocks of writes, each write in one piece |
// | [`PROGRESS_AT`] | 8 | in a staging: the last write whose blocks are there, as a version's word |

/// Bytes for blocks: all that a writer may have under way at a server, and the longest write, as a write is not divided
/// at the end.
pub(crate) const OUTBOX_BYTES: u64 = MOST_ROOM.bytes + MAX_DATA_BYTES as u64;

/// Where a staging says how far it is.
pub(crate) const PROGRESS_AT: u64 = OUTBOX_BYTES;

/// Where a server reads the progress of another one into its own staging.
pub(crate) const SEEN_AT: u64 = PROGRESS_AT + 64;

/// Length of both: a page for the progress.
pub(crate) const REGION_BYTES: u64 = OUTBOX_BYTES + 4096;

/// Shortest write that is pulled, in bytes. Below it a message is one round trip, and a pull two.
pub(crate) const LEAST_PULLED_BYTES: usize = 64 << 10;

/// Longest time for a connection to a region. Less than a server has for an answer.
pub(crate) const REACH_LIMIT: Duration = Duration::from_secs(1);

/// Whether a write of this length can be at this place.
pub(crate) fn has_place(at: u64, bytes: usize) -> bool {
    at.checked_add(bytes as u64).is_some_and(|end| end <= OUTBOX_BYTES)
}

/// The places of an outbox. They are freed in the order in which they were taken.
#[derive(Debug, Default)]
pub(crate) struct Places {
    /// Those that are taken: first byte, length.
    taken: VecDeque<(u64, u64)>,
}

impl Places {
    /// Takes a place, if there is one. An outbox that is empty begins at its start again, so that few pages are touched
    /// as long as little is under way.
    pub(crate) fn take(&mut self, bytes: u64) -> Option<u64> {
        let (Some(&(oldest, _)), Some(&(last, length))) = (self.taken.front(), self.taken.back()) else {
            return self.taken_at(0, bytes, OUTBOX_BYTES);
        };
        let next = last + length;
        if last < oldest {
            return self.taken_at(next, bytes, oldest);
        }
        let at_the_start = if bytes <= oldest { Some(0) } else { None };
        match at_the_start {
            // Turned back early: more than the longest write must fit before the oldest one.
            Some(at) if oldest >= next - oldest + 2 * MAX_DATA_BYTES as u64 => self.taken_at(at, bytes, oldest),
            _ => self.taken_at(next, bytes, OUTBOX_BYTES).or_else(|| self.taken_at(0, bytes, oldest)),
        }
    }

    fn taken_at(&mut self, at: u64, bytes: u64, end: u64) -> Option<u64> {
        (at + bytes <= end).then(|| {
            self.taken.push_back((at, bytes));
            at
        })
    }

    /// Frees the oldest place.
    pub(crate) fn free(&mut self) {
        self.taken.pop_front();
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_place_is_within_the_outbox() {
        assert!(has_place(0, MAX_DATA_BYTES) && has_place(OUTBOX_BYTES - 4096, 4096));
        for (at, bytes) in [(OUTBOX_BYTES, 4096), (OUTBOX_BYTES - 4095, 4096), (u64::MAX, 1), (u64::MAX - 4095, 4096)] {
            assert!(!has_place(at, bytes), "{at} {bytes}");
        }
    }

    #[test]
    fn little_under_way_touches_little() {
        let mut places = Places::default();
        let bytes = 1 << 20;
        let mut highest = 0;
        for round in 0..1000 {
            highest = highest.max(places.take(bytes).unwrap_or(u64::MAX));
            if round >= 4 {
                places.free();
            }
        }
        assert!(highest < 20 << 20, "{highest}");
    }

    proptest! {
        #[test]
        fn places_are_inside_and_do_not_overlap(steps in prop::collection::vec((1..=1024_u64, 0..8_u8), 1..400)) {
            let (mut places, mut taken) = (Places::default(), VecDeque::<(u64, u64)>::new());
            for (blocks, freed) in steps {
                let bytes = blocks * 4096;
                for _ in 0..freed.min(2) {
                    places.free();
                    taken.pop_front();
                }
                while taken.iter().map(|(_, length)| length).sum::<u64>() + bytes > MOST_ROOM.bytes {
                    places.free();
                    taken.pop_front();
                }
                let Some(at) = places.take(bytes) else { continue };
                prop_assert!(has_place(at, bytes as usize));
                prop_assert!(taken.iter().all(|&(other, length)| at + bytes <= other || other + length <= at));
                taken.push_back((at, bytes));
            }
        }
    }
}
