//! Simulated: a delivery without its thread, for a simulation, which turns its loop and sets its clock. The server's
//! end of the link is a socket of loopback; the tables are in a simulated network. No program calls it.

use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use remora_fabric::sim::Network;
use remora_fabric::{Connector, Memory, Pages, Peer, RegionKey};
use remora_protocol::{LossCause, Offer, Relaying, Resume, TableOffer};
use remora_redis::psync::server::Access;
use remora_table::{Expectation, Geometry, Origin, SinkLayout, SnapshotCopy};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

use super::ends;
use super::{Delivery, Handle, Notice, Order, Readiness, Setup, Turned};
use crate::link::candidates::{Candidates, Locality};
use remora_reader::feed::{Feed, Position};
use remora_reader::parts::Meter;
use remora_reader::parts::{CopyPlan, Part, Parts};
use remora_reader::relay::reader::{Lost, ReadFrom, Reading as PeerReading};
use remora_reader::spool::SnapshotId;

/// Bytes of the stream that may wait for the server.
const BACKLOG_LIMIT: usize = 1 << 20;

/// Buffers in a sink. Few, so that a slow server holds up the reads.
const BUFFERS: u32 = 4;

/// A feed that was connected and not attached yet.
pub struct Connected {
    feed: Box<Feed>,
    /// The copy that its slots go into.
    pub copy: Option<Copied>,
}

/// A copy from which other replicas can read.
pub struct Copied {
    /// Where it is.
    pub memory: Arc<Memory>,
    /// Its shape.
    pub own: Geometry,
    /// It continues no copy of a former feed.
    pub is_new: bool,
}

/// From where slots are read, as the driver orders it.
pub enum Whence {
    /// The source has not said.
    Awaited,
    /// From the source.
    Source,
    /// From another replica.
    Peer {
        /// The session with it.
        session: u64,
        /// The connection to its copy.
        peer: Box<dyn Peer>,
        /// Slots that this has.
        slots: u32,
    },
    /// No longer from this one.
    Left {
        /// The session with it.
        session: u64,
    },
}

/// A peer that cannot be read any more.
pub struct PeerLost {
    /// The session with it.
    pub session: u64,
    /// What kind of loss it is.
    pub cause: LossCause,
    /// Why.
    pub text: String,
}

/// See the module's text.
pub struct Stepped {
    /// The thread's part, until it ends.
    delivery: Option<Delivery>,
    handle: Handle,
    notices: UnboundedReceiver<Notice>,
    meter: Arc<Meter>,
    address: SocketAddr,
    losses: Vec<PeerLost>,
}

impl Stepped {
    /// Opens the link's port. `secret` is the password that the link asks for, `spool` the folder of slots that outlive
    /// the agent.
    ///
    /// # Errors
    /// The system has no port, or no descriptor.
    pub fn start(now: Instant, secret: &str, spool: Option<PathBuf>) -> io::Result<Stepped> {
        let host = IpAddr::V4(Ipv4Addr::LOCALHOST);
        let listener = TcpListener::bind((host, 0))?;
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        let locality = Locality { link_host: host, server: None, uid: None };
        let (tell, notices) = unbounded_channel();
        let meter = Arc::new(Meter::default());
        let setup = Setup {
            candidates: Candidates::new(listener, None, Access::Secret(secret.into()), locality),
            spool,
            found: None,
            conversion: None,
            backlog_limit: BACKLOG_LIMIT,
            meter: meter.clone(),
            notices: tell,
        };
        let (handle, control) = ends()?;
        let mut delivery = Delivery::new(now, setup, control);
        delivery.clock.set = Some(now);
        Ok(Stepped { delivery: Some(delivery), handle, notices, meter, address, losses: Vec::new() })
    }

    /// The link's port.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// One turn of the loop. Returns whether anything moved. `tries` says whether the sockets may have something to
    /// read; a try that finds nothing costs a few system calls.
    ///
    /// # Errors
    /// Why the delivery cannot continue.
    pub fn turn(&mut self, now: Instant, tries: bool) -> Result<bool, String> {
        let Some(delivery) = &mut self.delivery else { return Ok(false) };
        delivery.clock.set = Some(now);
        delivery.ready = Readiness::after(now, true, tries, tries);
        Ok(matches!(delivery.turn(now)?, Turned::Moved))
    }

    /// Ends it, as its thread does: its sockets are closed, and what it has counted remains.
    pub fn end(&mut self) {
        self.delivery = None;
    }

    /// Whether its port is open.
    pub fn is_running(&self) -> bool {
        self.delivery.is_some()
    }

    /// Whether it waits for a read of the source's memory.
    pub fn is_reading(&self) -> bool {
        let feed = self.delivery.as_ref().and_then(|delivery| delivery.input.feed());
        feed.is_some_and(|feed| {
            let snapshot = feed.snapshot.as_ref().is_some_and(|snapshot| !snapshot.is_idle());
            snapshot || feed.journal.as_ref().is_some_and(|journal| !journal.is_idle())
        })
    }

    /// What it has reported since the last call.
    pub fn notices(&mut self) -> Vec<Notice> {
        let mut notices = Vec::new();
        while let Ok(notice) = self.notices.try_recv() {
            match notice {
                Notice::PeerLost(Lost { session, cause, text }) => self.losses.push(PeerLost { session, cause, text }),
                notice => notices.push(notice),
            }
        }
        notices
    }

    /// The peers that it has lost since the last call. To be asked after [`Stepped::notices`].
    pub fn losses(&mut self) -> Vec<PeerLost> {
        std::mem::take(&mut self.losses)
    }

    // ---- orders ----

    /// Gives it tables.
    pub fn attach(&self, feed: Connected) {
        self.handle.order(Order::Attach(feed.feed));
    }

    /// Says from where slots are read.
    pub fn read_from(&self, whence: Whence) {
        self.handle.order(Order::ReadFrom(match whence {
            Whence::Awaited => ReadFrom::Awaited,
            Whence::Source => ReadFrom::Source,
            Whence::Peer { session, peer, slots } => ReadFrom::Peer(PeerReading { session, peer, slots, rate: 0 }),
            Whence::Left { session } => ReadFrom::Left { session },
        }));
    }

    /// Closes the link of a server whose snapshot will never be whole.
    pub fn give_up(&self) {
        self.handle.order(Order::GiveUp);
    }

    /// Has the server load another snapshot.
    pub fn load_again(&self) {
        self.handle.order(Order::LoadAgain);
    }

    /// Gives the server no more of the stream.
    pub fn hold(&self) {
        self.handle.order(Order::Hold);
    }

    // ---- what the driver reads ----

    /// What it has counted.
    pub fn meter(&self) -> &Meter {
        &self.meter
    }

    /// Where it is.
    pub fn position(&self) -> Position {
        self.handle.progress()
    }

    /// What a session is continued from.
    pub fn resume(&self) -> Option<Resume> {
        let progress = self.handle.progress();
        let origin = progress.snapshot?.origin;
        let spool = self.delivery.as_ref().and_then(|delivery| delivery.input.spool());
        let spooled = spool.map_or(0, |spool| spool.held_below());
        let copied = progress.copy.map_or(0, |_| self.meter.slots_held.get());
        Some(Resume {
            generation: origin.generation,
            held_slots: progress.next_slot.max(spooled).max(copied),
            loaded: progress.loaded,
            replid: origin.history,
            next_byte: progress.next_byte,
        })
    }

    /// The memory of the copy that a feed of this generation can continue.
    pub fn kept_copy(&self, generation: u64) -> Option<Arc<Memory>> {
        let progress = self.handle.progress();
        progress.copy.filter(|_| progress.snapshot.is_some_and(|id| id.origin.generation == generation))
    }

    /// What it reports of its part in passing slots on.
    pub fn relaying(&self) -> Relaying {
        let reads_from = self.meter.reads_from.get();
        Relaying {
            reads_from: (reads_from != 0).then_some(reads_from),
            oldest: self.meter.copy_oldest.get(),
            held: self.meter.slots_held.get(),
            is_full: self.meter.copy_full.get() > 0,
        }
    }

    /// Slots from the first one on without a gap.
    pub fn slots_below(&self) -> u64 {
        self.meter.slots_below.get()
    }

    /// Slots that have arrived.
    pub fn slots_held(&self) -> u64 {
        self.meter.slots_held.get()
    }

    /// The offset that the server has acknowledged.
    pub fn acknowledged(&self) -> u64 {
        self.meter.acknowledged.get()
    }

    /// Bytes of the present snapshot that have arrived or were given to the server.
    pub fn bytes(&self) -> u64 {
        self.meter.bytes_fetched.get().max(self.meter.bytes_delivered.get())
    }

    /// Bytes of payloads that the server was given, and whether the end of one was among them.
    pub fn given(&self) -> (u64, bool) {
        (self.meter.bytes_given.get(), self.meter.end_given.get() > 0)
    }
}

/// How the regions of one offer are reached.
pub struct Way<'a> {
    /// The network between the hosts.
    pub network: &'a Network,
    /// The session with the source.
    pub session: u64,
    /// What its lanes prove.
    pub secret: [u8; 32],
    /// The snapshot's region.
    pub snapshot: Option<RegionKey>,
    /// The journal's region.
    pub journal: RegionKey,
    /// The copy that slots go into.
    pub copy: Option<CopyWish>,
}

/// A copy that slots are to go into.
pub struct CopyWish {
    /// Slots that it has room for, at most.
    pub slots: u32,
    /// The memory of one that can be continued.
    pub kept: Option<Arc<Memory>>,
}

/// Connects to the tables of an offer, as the driver's task does. Without a key for the snapshot only the stream is
/// read.
///
/// # Errors
/// The text says what could not be connected.
pub fn connect(way: &Way<'_>, offer: &Offer) -> Result<Connected, String> {
    let history = offer.replid.ok_or("the offer has no replid")?;
    let part = |key: &RegionKey, table: &TableOffer, sink: Arc<Memory>, layout: SinkLayout| -> Result<Part, String> {
        let geometry = Geometry { slot_size: table.slot_size, slots: table.slots };
        let peer = way.network.connector().connect(key, way.session, &way.secret, sink.clone());
        let peer = peer.map_err(|error| error.to_string())?;
        let origin = Origin { generation: table.generation, history, offset: table.first_offset };
        Ok(Part { peer, sink, layout, expect: Expectation::plain(origin, geometry), in_place: false, copy: None })
    };
    let buffers = |table: &TableOffer| -> Result<(Arc<Memory>, SinkLayout), String> {
        let geometry = Geometry { slot_size: table.slot_size, slots: table.slots };
        let layout = SinkLayout { offset: 0, buffers: BUFFERS };
        Ok((memory("simulated-sink", layout.length(&geometry))?, layout))
    };
    let (mut snapshot, mut copy) = (None, None);
    match (&way.snapshot, &way.copy) {
        (None, _) => {}
        (Some(key), None) => {
            let (sink, layout) = buffers(&offer.snapshot)?;
            snapshot = Some(part(key, &offer.snapshot, sink, layout)?);
        }
        (Some(key), Some(wish)) => {
            let TableOffer { slot_size, slots, retained, .. } = offer.snapshot;
            let own = Geometry { slot_size, slots: slots.min(wish.slots) };
            let length = SnapshotCopy::memory_len(&own);
            let kept = wish.kept.clone().filter(|kept| kept.length() == length);
            let is_new = kept.is_none();
            let memory = kept.map_or_else(|| memory("simulated-copy", length), Ok)?;
            let part = part(key, &offer.snapshot, memory.clone(), SinkLayout { offset: 0, buffers: 1 })?;
            snapshot = Some(Part { copy: Some(CopyPlan { own, download_rate: 0, retained }), ..part });
            copy = Some(Copied { memory, own, is_new });
        }
    }
    let (sink, layout) = buffers(&offer.journal)?;
    let journal = part(&way.journal, &offer.journal, sink, layout)?;
    let origin = Origin { generation: offer.generation, history, offset: offer.offset };
    let id = SnapshotId { origin, slot_size: offer.snapshot.slot_size };
    Ok(Connected { feed: Box::new(Feed::new(id, Parts { snapshot, journal, backlog: offer.backlog_bytes })), copy })
}

fn memory(name: &str, length: u64) -> Result<Arc<Memory>, String> {
    Memory::create(name, length, Pages::Small).map(Arc::new).map_err(|error| error.to_string())
}
