//! Relay server: the lending half of a relay. One listener, the fabric's exporters, and the replicas that read our copy
//! through them.
//!
//! ```text
//!   other replicas ──▶ port ── ReadPeer ──▶ is there a copy of that generation? ── PeerOffer ──▶
//!                        │                        ▲ not yet: it waits for RelayServer::lend
//!                        └── data lanes ─▶ exporters ─▶ our copy's memory: read without this task, and without our server
//! ```
//!
//! One task owns all of it. The source decides which replicas read here; this task knows them and divides the upload
//! limit among them. Not here: how the copy is filled ([`super::reader`]).

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::time::{Duration, Instant};

use remora_fabric::shm::{ShmExporter, ShmOptions};
use remora_fabric::tcp::{SendMode, TcpExporter, TcpOptions, UploadRate};
use remora_fabric::{Exporter, Memory, RegionId, Regions};
use remora_messenger::Keyring;
use remora_protocol::{Message, RefusalCode, TableOffer};
use remora_table::Geometry;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use crate::meter::Meter;
use remora_conversation::listener::{self, Listener};
use remora_conversation::transports;
use remora_conversation::transports::{LANES_LABEL, RdmaOffer};
use remora_conversation::{Connection, Endpoint, Options, Protection, Security, Sender, derive};
use remora_process::events;
use remora_process::exit::Failure;

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
    use super::*;

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
