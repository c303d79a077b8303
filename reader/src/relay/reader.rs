//! Relay reader: the reading half of a relay. Fills a copy of the snapshot with bytes of the source or of another
//! replica (the peer), which it checks against the source's entries.
//!
//! ```text
//!   the source assigns …         ── Order::ReadFrom ──▶  Awaiting ──▶ Source
//!                                                          ▲  │  ╰──▶ Peer ── lost ─╮   reported to the driver, which tells the source,
//!                                                          ╰──┼─────────────────────╯   which assigns another
//!                                                             ╰─ nothing was assigned in time: Source, as the last resort
//! ```
//!
//! It belongs to the delivery's thread and outlives a feed: if the lanes to the source break, the slots held stay, and
//! other replicas continue to read them. Not here: how peers are connected ([`super`]), and how
//! others read this copy (`super::lender`).

use std::collections::HashMap;
use std::net::SocketAddr;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::time::{Duration, Instant};

use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use crate::parts::{CopyPlan, FeedError, Mapped, Meter};
use remora_conversation::listener::{self, Listener};
use remora_conversation::transports::{self, LANES_LABEL, RdmaOffer};
use remora_conversation::{Connection, Endpoint, Options, Protection, Security, Sender, derive};
use remora_fabric::shm::{ShmExporter, ShmOptions};
use remora_fabric::tcp::{SendMode, TcpExporter, TcpOptions, UploadRate};
use remora_fabric::{Exporter, Memory, Peer, RegionId, Regions};
use remora_messenger::Keyring;
use remora_process::events;
use remora_process::exit::Failure;
use remora_protocol::{LossCause, Message, RefusalCode, TableOffer};
use remora_table::{Geometry, Loss, Progress, Slot, SnapshotCopy, Turn};

/// A peer's copy, ready to be read.
pub struct Reading {
    /// The peer's session with the source.
    pub session: u64,
    /// Reads its copy.
    pub peer: Box<dyn Peer>,
    /// How many slots its ring has.
    pub slots: u32,
    /// Bytes per second that can be read from it; 0: no limit.
    pub rate: u64,
}

/// Where slots are read from.
pub enum ReadFrom {
    /// A peer is being connected.
    Awaited,
    /// The source itself.
    Source,
    /// Another replica.
    Peer(Reading),
    /// The rate of the present peer has changed.
    Rate {
        /// The session of the replica with the source.
        session: u64,
        /// Bytes per second.
        rate: u64,
    },
    /// The conversation with the present peer has ended.
    Left {
        /// The session of the replica with the source.
        session: u64,
    },
}

/// A peer cannot be read any more.
#[derive(Debug)]
pub struct Lost {
    /// The session of the replica with the source.
    pub session: u64,
    /// Which kind of reason there is.
    pub cause: LossCause,
    /// The reason.
    pub text: String,
}

enum Way {
    Awaiting { since: Instant },
    Source,
    Peer { session: u64, peer: Box<dyn Peer>, limit: Limit, mapped: Mapped },
}

/// Fills a copy of the snapshot from the source or from a peer, and checks each slot.
pub struct RelayReader {
    copy: SnapshotCopy,
    /// The connection to the source; `None` between two feeds.
    source: Option<Box<dyn Peer>>,
    way: Way,
    download: Limit,
    /// The source keeps all slots.
    retained: bool,
    looked: Instant,
}

/// How long to wait for an assignment before slots are read from the source: longer than connecting to a working peer
/// takes.
const AWAIT_LIMIT: Duration = Duration::from_secs(6);

/// How often a progress line is read while slots are on their way: each look costs a small read.
const LOOK_PACE: Duration = Duration::from_millis(1);

/// How often a limit is checked for room.
const LIMIT_PACE: Duration = Duration::from_millis(2);

impl RelayReader {
    /// Reads nothing until a source or peer is assigned, or the wait for that is over.
    pub fn new(now: Instant, copy: SnapshotCopy, source: Box<dyn Peer>, plan: CopyPlan) -> RelayReader {
        let way = Way::Awaiting { since: now };
        let download = Limit::new(now, plan.download_rate);
        RelayReader { copy, source: Some(source), way, download, retained: plan.retained, looked: now }
    }

    /// Reads the source over this connection from now on.
    pub fn reconnect(&mut self, source: Box<dyn Peer>) {
        self.copy.reconnect();
        self.source = Some(source);
    }

    /// Closes the connection to the source, and the one to the peer if no slots are missing.
    pub fn disconnect(&mut self, now: Instant) {
        self.source = None;
        if self.copy.is_whole() {
            self.await_word(now);
        }
    }

    /// The memory of the copy.
    pub fn memory(&self) -> &Arc<Memory> {
        self.copy.memory()
    }

    /// Continues at slot `first`, which may still be in use. `false`: the copy does not hold it any more.
    pub fn resume_at(&mut self, first: u64) -> bool {
        self.copy.resume_at(first)
    }

    /// Delivers all slots again. `false`: this copy cannot. The number of slots of a windowed snapshot is not known
    /// beforehand.
    pub fn rewind(&mut self) -> bool {
        self.retained && self.copy.rewind(0)
    }

    /// Changes where slots are read from.
    pub fn read_from(&mut self, now: Instant, from: ReadFrom) {
        match from {
            ReadFrom::Awaited => self.await_word(now),
            ReadFrom::Source => self.turn_to_source(now),
            ReadFrom::Peer(Reading { session, peer, slots, rate }) => {
                self.await_word(now);
                // A number of slots out of bounds: as if there were no such peer.
                if self.copy.read_from_peer(slots).is_ok() {
                    let (limit, mapped) = (Limit::new(now, rate), Mapped::new(peer.view()));
                    self.way = Way::Peer { session, peer, limit, mapped };
                }
            }
            ReadFrom::Rate { session, rate } => {
                if let Way::Peer { session: present, limit, .. } = &mut self.way
                    && *present == session
                {
                    limit.set_rate(rate);
                }
            }
            ReadFrom::Left { session } if self.reads_from() == Some(session) => self.await_word(now),
            ReadFrom::Left { .. } => {}
        }
    }

    /// The session of the peer; `None` if slots come from the source, or from nowhere.
    pub fn reads_from(&self) -> Option<u64> {
        match &self.way {
            Way::Peer { session, .. } => Some(*session),
            Way::Awaiting { .. } | Way::Source => None,
        }
    }

    /// Closes the connection to the peer before the copy discards its reads: none of them may complete afterwards.
    fn await_word(&mut self, now: Instant) {
        self.way = Way::Awaiting { since: now };
        self.copy.hold();
    }

    fn turn_to_source(&mut self, now: Instant) {
        self.await_word(now);
        self.copy.read_from_source();
        self.way = Way::Source;
    }

    /// Runs one turn. If the peer was lost, disconnects from it and returns the reason.
    pub fn pump(&mut self, now: Instant) -> Result<Option<Lost>, FeedError> {
        self.copy.check()?;
        if self.copy.is_whole() {
            return Ok(None);
        }
        if let Way::Awaiting { since } = self.way
            && now.duration_since(since) > AWAIT_LIMIT
        {
            tracing::info!("no upstream assigned; reading from the source");
            self.turn_to_source(now);
        }
        let Some(source) = &mut self.source else { return Ok(None) };
        let look = self.copy.is_idle() || now.duration_since(self.looked) >= LOOK_PACE;
        if look {
            self.looked = now;
        }
        let (peer, limit) = match &mut self.way {
            Way::Peer { peer, limit, .. } => (Some(&mut **peer), Some(limit)),
            Way::Awaiting { .. } | Way::Source => (None, None),
        };
        let own = self.download.allowance(now);
        let theirs = limit.map_or(i64::MAX, |limit| limit.allowance(now));
        let mut turn = Turn { look, allowance: own.min(theirs) };
        let loss = self.copy.pump(&mut **source, peer, &mut turn)?;
        let asked = own.min(theirs).abs_diff(turn.allowance);
        self.download.spend(asked);
        if let Way::Peer { limit, mapped, .. } = &mut self.way {
            limit.spend(asked);
            mapped.copied(asked);
        }
        Ok(loss.and_then(|loss| self.lose(now, &loss)))
    }

    fn lose(&mut self, now: Instant, loss: &Loss) -> Option<Lost> {
        let session = self.reads_from()?;
        self.await_word(now);
        let cause = match loss {
            Loss::Gone(_) => LossCause::Gone,
            Loss::Lied { .. } => LossCause::Lied,
            Loss::Passed { .. } => LossCause::Passed,
        };
        Some(Lost { session, cause, text: loss.to_string() })
    }

    /// Subtracts bytes of the stream from the limit: they go before slots.
    pub fn stream_took(&mut self, bytes: u64) {
        self.download.spend(bytes);
    }

    /// Publishes the progress of the copy.
    pub fn show(&self, meter: &Meter) {
        meter.slots_held.set(self.copy.held());
        meter.bytes_fetched.set(self.copy.arrived());
        meter.copy_oldest.set(self.copy.oldest());
        meter.copy_full.set(u64::from(self.copy.is_full()));
        meter.reads_from.set(self.reads_from().unwrap_or(0));
    }

    /// The next slot that the server needs.
    pub fn next_slot(&mut self) -> Option<Slot> {
        self.copy.next_slot()
    }

    /// Gives back a slot that the server needs no more.
    pub fn release(&mut self, slot: Slot) {
        self.copy.release(slot);
    }

    /// How far the reading is.
    pub fn progress(&self) -> Progress {
        self.copy.progress()
    }

    /// Whether all slots have arrived.
    pub fn is_whole(&self) -> bool {
        self.copy.is_whole()
    }

    /// Whether nothing is under way.
    pub fn is_idle(&self) -> bool {
        self.copy.is_idle()
    }

    /// When to turn again without an arrival, while a limit holds reads back.
    pub fn due(&self, now: Instant) -> Option<Instant> {
        let is_limited = match &self.way {
            Way::Peer { limit, .. } => limit.is_set() || self.download.is_set(),
            Way::Awaiting { .. } | Way::Source => self.download.is_set(),
        };
        is_limited.then_some(now + LIMIT_PACE)
    }

    /// The descriptors to wait on.
    pub fn arms(&mut self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let peer = match &mut self.way {
            Way::Peer { peer, .. } => Some(peer.arm()),
            Way::Awaiting { .. } | Way::Source => None,
        };
        self.source.as_mut().map(|source| source.arm()).into_iter().chain(peer)
    }
}

// Limit: how many bytes the reader may request now to keep a rate in bytes per second. Pure: the caller hands the time
// in.
//
// The reader keeps the limit: the end that is read does not notice a one-sided read. Bytes of the stream always go
// first. They are subtracted as well, below zero if necessary, and slots then wait.

/// A rate limit in bytes per second.
#[derive(Debug)]
pub(crate) struct Limit {
    /// Bytes per second; 0: no limit.
    rate: u64,
    /// Bytes that can be requested; below 0: bytes that were requested beyond the limit.
    tokens: f64,
    last: Instant,
}

/// The time for which unused allowance accumulates: what was not used for longer is lost, and never becomes a burst.
const SAVED: Duration = Duration::from_millis(100);

impl Limit {
    pub(crate) fn new(now: Instant, rate: u64) -> Limit {
        Limit { rate, tokens: 0.0, last: now }
    }

    /// Whether there is a limit.
    pub(crate) fn is_set(&self) -> bool {
        self.rate > 0
    }

    pub(crate) fn set_rate(&mut self, rate: u64) {
        self.rate = rate;
    }

    /// Bytes that can be requested now. The caller requests while this is above 0, and [`spend`](Self::spend)s what it
    /// requested.
    pub(crate) fn allowance(&mut self, now: Instant) -> i64 {
        if self.rate == 0 {
            return i64::MAX;
        }
        let gained = now.duration_since(self.last).as_secs_f64() * self.rate as f64;
        let most = (SAVED.as_secs_f64() * self.rate as f64).max(1.0);
        self.tokens = (self.tokens + gained).min(most);
        self.last = now;
        self.tokens as i64
    }

    /// Subtracts bytes that were requested, or that arrived.
    pub(crate) fn spend(&mut self, bytes: u64) {
        if self.rate > 0 {
            self.tokens -= bytes as f64;
        }
    }
}

// Relay server: the lending half of a relay. One listener, the fabric's exporters, and the replicas that read our copy
// through them.
//
// ```text
//   other replicas ──▶ port ── ReadPeer ──▶ is there a copy of that generation? ── PeerOffer ──▶
//                        │                        ▲ not yet: it waits for RelayServer::lend
//                        └── data lanes ─▶ exporters ─▶ our copy's memory: read without this task, and without our server
// ```
//
// One task owns all of it. The source decides which replicas read here; this task knows them and divides the upload
// limit among them. Not here: how the copy is filled ([`super::reader`]).

/// A copy for other replicas to read.
pub(crate) struct LentCopy {
    pub(crate) generation: u64,
    pub(crate) memory: Arc<Memory>,
    pub(crate) own: Geometry,
    pub(crate) first_offset: u64,
    /// Whether every slot is written only once.
    pub(crate) keeps_all: bool,
    /// How to offer RDMA; `None`: not at all.
    pub(crate) rdma: Option<RdmaOffer>,
    /// Whether it is filled over TCP, and so over the link by which it is lent.
    pub(crate) by_tcp: bool,
}

/// Bytes per second that other replicas may read; 0: no limit.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct UploadLimits {
    pub(crate) in_all: u64,
    pub(crate) per_peer: u64,
    /// Whether this end limits what it sends over TCP, as a background transfer.
    pub(crate) in_background: bool,
}

impl UploadLimits {
    fn tcp(self) -> UploadRate {
        if self.in_background { UploadRate::Background } else { UploadRate::Unlimited }
    }

    /// The rate of each of `readers` readers.
    fn share(self, readers: usize) -> u64 {
        let divided = self.in_all / readers.max(1) as u64;
        match (self.in_all, self.per_peer) {
            (0, per_peer) => per_peer,
            // A byte a second is next to nothing; 0 would mean no limit.
            (_, 0) => divided.max(1),
            (_, per_peer) => divided.max(1).min(per_peer),
        }
    }
}

/// The server through which other replicas read this replica's copy. Dropping it ends the task and every
/// reader's connection.
pub(crate) struct RelayServer {
    address: SocketAddr,
    orders: mpsc::UnboundedSender<LentCopy>,
    readers: Arc<AtomicUsize>,
    by_tcp: Arc<AtomicBool>,
    task: JoinHandle<()>,
}

impl Drop for RelayServer {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Length of the task's queue, in messages: a few for each reader. Connections wait while it is full.
const INCOMING_LIMIT: usize = 64;

/// Limit of simultaneous readers: more than the source assigns to one replica, so that new readers can come before lost
/// ones are noticed.
const READERS_LIMIT: usize = 8;

/// How long a peer that has connected may take to say what it wants to read. It knows that before it connects. Silent
/// peers would otherwise keep readers out.
const ASK_LIMIT: Duration = Duration::from_secs(10);

/// The first region number that is used here: lower numbers are the source's.
const FIRST_REGION: u32 = 16;

impl RelayServer {
    /// Opens a port at `listen` (0: any free one). The meter tells how much the copy has received.
    ///
    /// # Errors
    /// The address cannot be bound.
    pub(crate) async fn open(
        listen: SocketAddr,
        keyring: Arc<Keyring>,
        limits: UploadLimits,
        security: &Security,
        meter: Arc<Meter>,
    ) -> Result<RelayServer, Failure> {
        let port = listener::bind(listen, security, "this replica agent", "--peer-listen").await?;
        let options = TcpOptions { send: SendMode::File, upload: limits.tcp(), ..TcpOptions::default() };
        let by_tcp = Arc::new(AtomicBool::new(false));
        let counts = by_tcp.clone();
        let received = move || if counts.load(Relaxed) { meter.bytes_fetched.get() } else { 0 };
        let tcp = TcpExporter::of_relay(options, Some(port.1), received)
            .map_err(|error| Failure::local(error.to_string()))?;
        let tcp = Arc::new(tcp);
        let (incoming, inbox) = mpsc::channel(INCOMING_LIMIT);
        let conversations = Endpoint::with_keyring(keyring, &Options::secured(security.clone()));
        let conversations = conversations.map_err(|error| Failure::local(format!("no conversations: {error}")))?;
        let door = listener::start(port, conversations, tcp.clone(), incoming.clone());
        let mut exporters: Vec<Arc<dyn Exporter>> = Vec::new();
        match ShmExporter::bind(ShmOptions::default()) {
            Ok(shm) => exporters.push(Arc::new(shm)),
            Err(error) => tracing::debug!(%error, "slots are not lent by shared memory"),
        }
        exporters.push(tcp);
        let address = door.address();
        tracing::info!(event = events::SERVING, listening = %address, "serving slots to other replicas");
        let (orders, lendings) = mpsc::unbounded_channel();
        let readers = Arc::new(AtomicUsize::new(0));
        let lender = Lender {
            address,
            exporters,
            incoming,
            limits,
            table: None,
            next_region: FIRST_REGION,
            readers: HashMap::new(),
            count: readers.clone(),
            _door: door,
        };
        let task = tokio::spawn(lender.run(inbox, lendings));
        Ok(RelayServer { address, orders, readers, by_tcp, task })
    }

    /// The address of the listener.
    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }

    /// Lends this copy from now on, in place of the one before.
    pub(crate) fn lend(&self, lending: LentCopy) {
        self.by_tcp.store(lending.by_tcp, Relaxed);
        // The task ends with us.
        let _ = self.orders.send(lending);
    }

    /// Replicas that read here now.
    pub(crate) fn readers(&self) -> usize {
        self.readers.load(Relaxed)
    }
}

/// Messages to the task.
enum Incoming {
    Arrived(Connection),
    Said { session: u64, message: Box<Message> },
    Left { session: u64 },
}

impl From<Connection> for Incoming {
    fn from(connection: Connection) -> Incoming {
        Incoming::Arrived(connection)
    }
}

/// One authenticated conversation.
struct Reader {
    sender: Sender,
    key: [u8; 32],
    /// What protects the conversation, and the slots unless they are read by shared memory or RDMA.
    protection: Protection,
    name: String,
    came: Instant,
    /// The generation that it asked for; `None` before.
    wants: Option<u64>,
    /// The rate that it was last sent; `None` before it was offered the copy.
    told: Option<u64>,
}

struct Lender {
    address: SocketAddr,
    exporters: Vec<Arc<dyn Exporter>>,
    incoming: mpsc::Sender<Incoming>,
    limits: UploadLimits,
    table: Option<(RegionId, TableOffer)>,
    next_region: u32,
    readers: HashMap<u64, Reader>,
    count: Arc<AtomicUsize>,
    _door: Listener,
}

impl Lender {
    async fn run(mut self, mut inbox: mpsc::Receiver<Incoming>, mut lendings: mpsc::UnboundedReceiver<LentCopy>) {
        loop {
            tokio::select! {
                Some(incoming) = inbox.recv() => self.receive(incoming),
                lending = lendings.recv() => match lending {
                    Some(lending) => self.lend(lending).await,
                    None => return,
                },
                () = until(self.next_silent()) => self.turn_silent_away(Instant::now()),
            }
            self.tell();
        }
    }

    /// When the first peer has been silent for too long.
    fn next_silent(&self) -> Option<Instant> {
        self.readers.values().filter(|reader| reader.wants.is_none()).map(|reader| reader.came + ASK_LIMIT).min()
    }

    fn turn_silent_away(&mut self, now: Instant) {
        let is_late = |reader: &Reader| reader.wants.is_none() && reader.came + ASK_LIMIT <= now;
        self.readers.retain(|_, reader| {
            if is_late(reader) {
                let text = format!("no request within {} s", ASK_LIMIT.as_secs());
                let _ = reader.sender.try_send(Message::Refused { code: RefusalCode::Busy, text });
                reader.sender.close();
            }
            !is_late(reader)
        });
    }

    fn receive(&mut self, incoming: Incoming) {
        match incoming {
            Incoming::Arrived(connection) => self.welcome(connection),
            Incoming::Said { session, message } => {
                let Message::ReadPeer { generation, name } = *message else { return };
                let Some(reader) = self.readers.get_mut(&session) else { return };
                (reader.wants, reader.name) = (Some(generation), name);
            }
            Incoming::Left { session } => {
                let Some(reader) = self.readers.remove(&session) else { return };
                self.exporters.iter().for_each(|exporter| exporter.withdraw(session));
                if reader.told.is_some() {
                    tracing::info!(reader = %reader.name, "downstream replica disconnected");
                }
            }
        }
    }

    fn welcome(&mut self, connection: Connection) {
        let (session, key, protection) = (connection.session(), connection.session_key(), connection.protection());
        let (sender, receiver) = connection.split();
        if self.readers.len() >= READERS_LIMIT {
            let text = format!("{READERS_LIMIT} replicas read here already");
            let _ = sender.try_send(Message::Refused { code: RefusalCode::Busy, text });
            return;
        }
        let reader =
            Reader { sender, key, protection, came: Instant::now(), name: String::new(), wants: None, told: None };
        self.readers.insert(session, reader);
        listener::listen_to(receiver, self.incoming.clone(), move |heard| match heard {
            Ok(message) => Incoming::Said { session, message: Box::new(message) },
            Err(_) => Incoming::Left { session },
        });
    }

    async fn lend(&mut self, lending: LentCopy) {
        let former = self.table.take().map(|(id, _)| id);
        if former.is_some() {
            // They are offered the new copy, if it is of the snapshot that they want.
            self.readers.values_mut().for_each(|reader| reader.told = None);
        }
        self.add_rdma(&lending).await;
        let id = RegionId { generation: lending.generation, region: self.next_region };
        self.next_region += 1;
        let (exporters, memory) = (self.exporters.clone(), lending.memory.clone());
        // Where it is by RDMA, memory is unpinned and pinned: that blocks.
        let lent = tokio::task::spawn_blocking(move || {
            for exporter in &exporters {
                if let Some(former) = former {
                    exporter.revoke(former);
                }
                if let Err(error) = exporter.export(id, memory.clone()) {
                    tracing::warn!(by = %exporter.kind(), %error, "slots can't be lent");
                }
            }
        });
        if let Err(error) = lent.await {
            tracing::warn!(%error, "slots can't be lent");
        }
        let keys = self.exporters.iter().filter_map(|exporter| exporter.key(id).ok());
        let offer = TableOffer {
            generation: lending.generation,
            first_offset: lending.first_offset,
            slot_size: lending.own.slot_size,
            slots: lending.own.slots,
            retained: lending.keeps_all,
            keys: keys.map(|key| key.as_bytes().to_vec()).collect(),
            // A copy of a sealed table is sealed like the source's, whose offer has the key.
            seal: Vec::new(),
            // So it is with slots that are compressed.
            compressed: false,
        };
        self.table = Some((id, offer));
    }

    /// Opens RDMA once, when it is known to work on this host.
    async fn add_rdma(&mut self, lending: &LentCopy) {
        let Some(offer) = lending.rdma.clone() else { return };
        if self.exporters.iter().any(|exporter| exporter.kind() == remora_fabric::TransportKind::Verbs) {
            return;
        }
        // A copy is lent once: nothing is kept registered beyond that.
        let address = self.address;
        let open = move || transports::rdma(&offer, address, READERS_LIMIT, &[]);
        let opened = tokio::task::spawn_blocking(open).await;
        match opened {
            Ok(Ok(Some(exporter))) => self.exporters.insert(0, exporter),
            Ok(Ok(None)) => {}
            Ok(Err(error)) => tracing::warn!(%error, "slots are not lent by RDMA"),
            Err(error) => tracing::warn!(%error, "slots are not lent by RDMA"),
        }
    }

    /// Offers the copy to the readers that wait for it, and sends each reader its share of the limit where that has
    /// changed.
    fn tell(&mut self) {
        let Some((id, offer)) = &self.table else { return };
        let wants = |reader: &Reader| reader.wants == Some(id.generation);
        let count = self.readers.values().filter(|reader| wants(reader)).count();
        self.count.store(count, Relaxed);
        let rate = self.limits.share(count);
        for (&session, reader) in self.readers.iter_mut().filter(|(_, reader)| wants(reader)) {
            if reader.told == Some(rate) {
                continue;
            }
            if reader.told.is_none() {
                let secret = derive(&reader.key, LANES_LABEL);
                let regions = Regions::only([*id]);
                self.exporters.iter().for_each(|exporter| exporter.grant(session, secret, regions.clone()));
                tracing::info!(reader = %reader.name, protection = %reader.protection, "downstream replica connected");
            }
            reader.told = Some(rate);
            let message = Message::PeerOffer { generation: id.generation, table: offer.clone(), rate };
            if let Err(error) = reader.sender.try_send(message) {
                tracing::debug!(%error, "a message could not be queued");
            }
        }
    }
}

/// Waits until then; `None`: without end.
async fn until(then: Option<Instant>) {
    match then {
        Some(then) => tokio::time::sleep_until(then.into()).await,
        None => std::future::pending().await,
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use remora_fabric::sim::{Faults, Network, SimExporter};
    use remora_fabric::{Connector, Exporter, Pages, RegionId, Regions};
    use remora_table::{Expectation, Geometry, Identity, Kind, Origin, SnapshotWriter};

    const GEOMETRY: Geometry = Geometry { slot_size: 4096, slots: 4 };

    const REGION: RegionId = RegionId { generation: 1, region: 0 };

    const SECRET: [u8; 32] = [7; 32];

    /// Turns that suffice for all slots: each read of the simulated network takes some.
    const TURNS: usize = 400;

    /// A reader of a whole snapshot of four slots, and the source's memory, which it can read as long as that lives.
    fn reader(now: Instant) -> (RelayReader, SimExporter) {
        let history = "8c1c6b2f0d6a4e7b9a0f1e2d3c4b5a6978695a4b".parse().unwrap();
        let origin = Origin { generation: REGION.generation, history, offset: 0 };
        let table = Arc::new(Memory::create("table", GEOMETRY.memory_len(), Pages::Small).unwrap());
        let identity = Identity { kind: Kind::Snapshot, origin };
        let mut writer = SnapshotWriter::create(table.clone(), GEOMETRY, identity, 0).unwrap();
        for _ in 0..GEOMETRY.slots {
            writer.append(&[5; 4096]).unwrap();
        }
        writer.finish(0).unwrap();
        let network = Network::new(1, Faults::honest());
        let exporter = network.exporter();
        exporter.export(REGION, table).unwrap();
        exporter.grant(1, SECRET, Regions::All);
        let sink = Arc::new(Memory::create("copy", SnapshotCopy::memory_len(&GEOMETRY), Pages::Small).unwrap());
        let source = network.connector().connect(&exporter.key(REGION).unwrap(), 1, &SECRET, sink.clone()).unwrap();
        let copy = SnapshotCopy::create(sink, GEOMETRY, Expectation::plain(origin, GEOMETRY), 0).unwrap();
        let plan = CopyPlan { own: GEOMETRY, download_rate: 0, retained: true };
        (RelayReader::new(now, copy, source, plan), exporter)
    }

    /// The slots that have arrived after many turns at this moment.
    fn arrived(reader: &mut RelayReader, now: Instant) -> u64 {
        for _ in 0..TURNS {
            reader.pump(now).unwrap();
        }
        reader.copy.held()
    }

    #[test]
    fn without_an_assignment_slots_come_from_the_source_after_six_seconds_and_not_before() {
        let began = Instant::now();
        let (mut reader, _source) = reader(began);
        assert_eq!(arrived(&mut reader, began + Duration::from_secs(6)), 0);
        assert_eq!(arrived(&mut reader, began + Duration::from_millis(6001)), u64::from(GEOMETRY.slots));
    }

    #[test]
    fn each_wait_for_an_assignment_has_the_whole_time() {
        let began = Instant::now();
        let (mut reader, _source) = reader(began);
        // A peer was assigned and is being connected. It takes as long as an assignment may.
        let again = began + Duration::from_secs(4);
        reader.read_from(again, ReadFrom::Awaited);
        assert_eq!(arrived(&mut reader, began + Duration::from_secs(10)), 0);
        assert_eq!(arrived(&mut reader, began + Duration::from_millis(10_001)), u64::from(GEOMETRY.slots));
    }

    /// Bytes that a reader gets in ten seconds if it requests a piece each millisecond that the limit permits.
    fn run(rate: u64, piece: u64, stream: u64) -> u64 {
        let start = Instant::now();
        let mut limit = Limit::new(start, rate);
        let mut got = 0;
        for tick in 0..10_000 {
            limit.spend(stream / 1000);
            if limit.allowance(start + Duration::from_millis(tick)) > 0 {
                limit.spend(piece);
                got += piece;
            }
        }
        got
    }

    #[test]
    fn no_more_comes_than_the_rate_and_hardly_less() {
        for (rate, piece) in [(10_000_000, 1 << 20), (1_000_000, 1 << 20), (50_000_000, 65_536), (300_000, 4096)] {
            let got = run(rate, piece, 0);
            let want = rate * 10;
            assert!(got <= want + want / 20 + piece && got + want / 20 + piece >= want, "{got} of {want}");
        }
    }

    #[test]
    fn the_stream_comes_first_and_the_rest_gets_what_is_left() {
        let got = run(10_000_000, 65_536, 6_000_000);
        assert!((38_000_000..=42_000_000).contains(&got), "{got}");
        assert_eq!(run(10_000_000, 65_536, 12_000_000), 0, "the stream alone is beyond the limit");
    }

    #[test]
    fn without_a_rate_there_is_no_limit() {
        let now = Instant::now();
        let mut limit = Limit::new(now, 0);
        limit.spend(u64::MAX);
        assert_eq!(limit.allowance(now), i64::MAX);
    }

    #[test]
    fn the_upload_limit_is_divided_and_no_share_exceeds_that_of_one_peer() {
        let share = |in_all, per_peer, readers| UploadLimits { in_all, per_peer, in_background: false }.share(readers);
        assert_eq!(share(0, 0, 3), 0, "no limit");
        assert_eq!(share(900, 0, 3), 300);
        assert_eq!(share(0, 200, 3), 200);
        assert_eq!((share(900, 200, 3), share(900, 400, 3)), (200, 300));
        assert_eq!(share(2, 0, 3), 1, "never 0, which would be no limit at all");
    }
}
