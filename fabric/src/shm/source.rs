//! The source's end: its regions and who may read them, and the thread that admits readers and passes them the memory.

use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, Timespec, epoll, eventfd};
use rustix::io::Errno;

use super::{BootId, Namespace, Place, Shm, ShmOptions};
use crate::admission::{self, Format, Grants, Hello, PROOF_BYTES, Refusal, Regions, Source};
use crate::error::{Denial, Error};
use crate::memory::Memory;
use crate::memory::local::{self, Address, Admits, Listener, Packet, PeerSocket};
use crate::region::{RegionId, RegionKey, Secret, TransportKind};
use crate::shm;
use crate::transport::Exporter;

// The source's end: which regions there are and who may read them. The thread that talks to readers is in `serve`.

/// Exports memory to other processes of this host. Dropping it closes all connections and ends its thread.
pub struct ShmExporter {
    shared: Arc<Shared>,
    address: Address,
    boot_id: BootId,
    /// Where the address is meant for one network namespace.
    namespace: Option<Namespace>,
    owner: Option<JoinHandle<()>>,
}

impl ShmExporter {
    /// Binds the socket and starts the thread.
    ///
    /// # Errors
    /// [`Error::Misuse`] for options out of range; [`Error::System`] if the socket cannot be created. A folder must
    /// exist, be writable, and have a short path.
    pub fn bind(options: ShmOptions) -> Result<ShmExporter, Error> {
        options.check()?;
        let listener = Listener::bind(&options.place, Admits::Us)?;
        ShmExporter::over(listener, &options)
    }

    /// Serves the connections of this listener.
    pub(super) fn over(listener: Listener, options: &ShmOptions) -> Result<ShmExporter, Error> {
        let address = listener.address().clone();
        // The file is removed if a step fails.
        ShmExporter::start(listener, options).inspect_err(|_| address.remove())
    }

    fn start(listener: Listener, options: &ShmOptions) -> Result<ShmExporter, Error> {
        let boot_id = BootId::of_this_host()?;
        let namespace = if options.place == Place::Private { Some(Namespace::of_this_process()?) } else { None };
        let stop =
            eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(Error::system("creating an eventfd"))?;
        let address = listener.address().clone();
        let server = Server::new(options.connections, options.handshake_timeout);
        let shared = Arc::new(Shared { server: Mutex::new(server), stop });
        let owner = Some(start(shared.clone(), listener)?);
        Ok(ShmExporter { shared, address, boot_id, namespace, owner })
    }
}

impl Exporter for ShmExporter {
    fn kind(&self) -> TransportKind {
        TransportKind::Shm
    }

    fn export(&self, id: RegionId, memory: Arc<Memory>) -> Result<(), Error> {
        let read_only = memory.reopen_read_only()?;
        self.shared.server().export(id, memory.length(), read_only)
    }

    fn revoke(&self, id: RegionId) {
        let mut server = self.shared.server();
        server.forget_region(id);
        server.cut_readers(Denial::Revoked, |_, region| region == id);
    }

    fn grant(&self, session: u64, secret: Secret, regions: Regions) {
        let mut server = self.shared.server();
        let closes = server.grants.insert(session, secret, regions);
        server.cut_readers(Denial::NotGranted, |reader, id| reader == session && closes(id));
    }

    fn withdraw(&self, session: u64) {
        let mut server = self.shared.server();
        server.grants.remove(session);
        server.cut_readers(Denial::NotGranted, |reader, _| reader == session);
    }

    fn key(&self, id: RegionId) -> Result<RegionKey, Error> {
        let length = self.shared.server().region_length(id).ok_or(Error::NotExported(id))?;
        shm::region_key(id, length, &self.boot_id, self.namespace.as_ref(), &self.address)
    }

    /// Always 0: readers copy the bytes themselves, without a trace here.
    fn bytes_served(&self) -> u64 {
        0
    }
}

impl Drop for ShmExporter {
    fn drop(&mut self) {
        if rustix::io::write(self.shared.stop.as_fd(), &1u64.to_ne_bytes()).is_err() {
            tracing::error!("the thread of a shm exporter cannot be stopped");
        }
        if self.owner.take().is_some_and(|owner| owner.join().is_err()) {
            tracing::error!("the thread of a shm exporter has panicked");
        }
        self.address.remove();
    }
}

// The regions, grants and reader connections of one exporter: what the exporter and its thread share.

/// What the exporter and its thread share.
pub(super) struct Shared {
    /// Behind a lock, and not owned by the thread, so that `revoke` has closed the connections when it returns. The
    /// lock is never held while a call blocks.
    pub(super) server: Mutex<Server>,
    /// Written once, to end the thread.
    pub(super) stop: OwnedFd,
}

impl Shared {
    /// Locks the server. A panic leaves it valid, because each method changes one thing.
    pub(super) fn server(&self) -> MutexGuard<'_, Server> {
        self.server.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Regions, grants, and reader connections.
pub(super) struct Server {
    regions: HashMap<RegionId, Region>,
    pub(super) grants: Grants,
    pub(super) readers: HashMap<u64, ReaderConnection>,
    /// Readers are numbered in the order of their connections. No number is used twice, so that an event for a closed
    /// connection finds none.
    next_number: u64,
    max_connections: usize,
    handshake_timeout: Duration,
}

struct Region {
    length: u64,
    read_only: Arc<OwnedFd>,
}

pub(super) struct ReaderConnection {
    socket: Arc<WatchedSocket>,
    stage: Stage,
}

/// A reader's socket in the thread's epoll instance. Dropping it never blocks.
pub(super) struct WatchedSocket {
    socket: PeerSocket,
    epoll: Arc<OwnedFd>,
}

impl WatchedSocket {
    /// Wraps a socket that the epoll instance watches.
    pub(super) fn new(socket: PeerSocket, epoll: Arc<OwnedFd>) -> WatchedSocket {
        WatchedSocket { socket, epoll }
    }
}

impl AsFd for WatchedSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Drop for WatchedSocket {
    fn drop(&mut self) {
        // The descriptor is closed later, and would report the end of the connection until then.
        if let Err(error) = epoll::delete(&*self.epoll, &self.socket) {
            tracing::debug!(%error, "shm: a connection was not watched");
        }
    }
}

enum Stage {
    AwaitingHello { deadline: Instant },
    AwaitingProof { deadline: Instant, handshake: Source<Shm> },
    Reading { session: u64, id: RegionId },
}

impl Server {
    pub(super) fn new(max_connections: usize, handshake_timeout: Duration) -> Server {
        Server {
            regions: HashMap::new(),
            grants: Grants::default(),
            readers: HashMap::new(),
            next_number: FIRST_READER,
            max_connections,
            handshake_timeout,
        }
    }

    pub(super) fn export(&mut self, id: RegionId, length: u64, read_only: OwnedFd) -> Result<(), Error> {
        if self.regions.contains_key(&id) {
            return Err(Error::AlreadyExported(id));
        }
        self.regions.insert(id, Region { length, read_only: Arc::new(read_only) });
        Ok(())
    }

    fn forget_region(&mut self, id: RegionId) {
        self.regions.remove(&id);
    }

    pub(super) fn region_length(&self, id: RegionId) -> Option<u64> {
        self.regions.get(&id).map(|region| region.length)
    }

    /// Sends a farewell to the readers that `chosen` selects by session and region, and closes their connections.
    fn cut_readers(&mut self, reason: Denial, chosen: impl Fn(u64, RegionId) -> bool) {
        self.readers.retain(|_, reader| match reader.stage {
            Stage::Reading { session, id } if chosen(session, id) => {
                // If it cannot be sent, the end of the connection tells the reader enough.
                let _ = local::send(&*reader.socket, &shm::farewell(reason), None);
                false
            }
            _ => true,
        });
    }

    /// Time until the next handshake is late; `None` if no handshake is in progress.
    fn next_timeout(&self, now: Instant) -> Option<Timespec> {
        let first = self.readers.values().filter_map(ReaderConnection::deadline).min()?;
        // A millisecond more, so that the handshake is late at the next turn, and not only almost.
        let left = first.saturating_duration_since(now) + Duration::from_millis(1);
        Some(Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() })
    }

    fn cut_late(&mut self, now: Instant) {
        self.readers.retain(|_, reader| reader.deadline().is_none_or(|deadline| deadline > now));
    }

    /// The number of the next reader, and whether all places for readers are taken.
    fn next_reader(&mut self) -> (u64, bool) {
        let number = self.next_number;
        self.next_number += 1;
        (number, self.all_places_taken())
    }

    /// Admits a connection that has sent nothing yet. If there are too many of these, the oldest gives way.
    pub(super) fn admit(&mut self, number: u64, socket: WatchedSocket, now: Instant) {
        let unproved = self.readers.iter().filter(|(_, reader)| reader.deadline().is_some()).map(|(number, _)| *number);
        let (count, oldest) = unproved.fold((0, u64::MAX), |(count, oldest), number| (count + 1, number.min(oldest)));
        if count >= UNPROVED_MAX {
            self.readers.remove(&oldest);
        }
        let stage = Stage::AwaitingHello { deadline: now + self.handshake_timeout };
        self.readers.insert(number, ReaderConnection { socket: Arc::new(socket), stage });
    }

    /// The socket of a reader, to receive from it without the lock.
    pub(super) fn socket(&self, number: u64) -> Option<Arc<WatchedSocket>> {
        self.readers.get(&number).map(|reader| reader.socket.clone())
    }

    /// Handles a packet of a reader, or the end of its connection.
    fn on_packet(&mut self, number: u64, packet: Result<Packet, Errno>) {
        if matches!(packet, Err(Errno::AGAIN)) {
            return;
        }
        // Its region or session may have been revoked in the meantime.
        let Some(mut reader) = self.readers.remove(&number) else { return };
        let Ok(packet) = packet else { return };
        if let Some(stage) = self.next_stage(&reader, packet.bytes()) {
            reader.stage = stage;
            self.readers.insert(number, reader);
        }
    }

    /// The stage after a packet; `None` closes the connection.
    fn next_stage(&self, reader: &ReaderConnection, packet: &[u8]) -> Option<Stage> {
        match &reader.stage {
            Stage::AwaitingHello { deadline } => self.greet(reader, packet, *deadline),
            Stage::AwaitingProof { handshake, .. } => self.examine(reader, packet, handshake),
            // A reader sends nothing: this is the end of the connection, or a violation of the protocol.
            Stage::Reading { .. } => None,
        }
    }

    fn greet(&self, reader: &ReaderConnection, packet: &[u8], deadline: Instant) -> Option<Stage> {
        match Source::challenge(packet, &admission::nonce().ok()?) {
            Ok((handshake, challenge)) => {
                local::send(&*reader.socket, &challenge, None).ok()?;
                Some(Stage::AwaitingProof { deadline, handshake })
            }
            Err(rejected) => {
                tracing::debug!(error = %rejected.error, "shm: a connection was rejected");
                local::send(&*reader.socket, &rejected.answer?, None).ok()?;
                None
            }
        }
    }

    fn examine(&self, reader: &ReaderConnection, packet: &[u8], handshake: &Source<Shm>) -> Option<Stage> {
        let proof: &[u8; PROOF_BYTES] = packet.try_into().ok()?;
        let &Hello { session, id, .. } = handshake.hello();
        match self.judge(proof, handshake) {
            Ok((region, welcome)) => {
                local::send(&*reader.socket, &welcome, Some(region.read_only.as_fd())).ok()?;
                Some(Stage::Reading { session, id })
            }
            Err(denial) => {
                tracing::info!(session, region = %id, %denial, "shm: a reader was refused");
                let _ = local::send(&*reader.socket, &Shm::denial(denial), None);
                None
            }
        }
    }

    /// Checks the proof first: a reader is told what there is only after it has proved its session.
    fn judge(&self, proof: &[u8; PROOF_BYTES], handshake: &Source<Shm>) -> Result<(&Region, Vec<u8>), Denial> {
        let hello = handshake.hello();
        let proved = handshake.examine(proof, self.grants.secret(hello.session))?;
        self.grants.permit(hello.session, hello.id)?;
        match self.regions.get(&hello.id) {
            Some(_) if self.all_places_taken() => Err(Denial::Busy),
            Some(_) if self.readers_of(hello.session) >= READERS_PER_SESSION => Err(Denial::Busy),
            Some(region) => Ok((region, proved.welcome(&region.length))),
            None if self.regions.keys().any(|id| id.region == hello.id.region) => Err(Denial::Stale),
            None => Err(Denial::Unknown),
        }
    }

    fn all_places_taken(&self) -> bool {
        self.readers.values().filter(|reader| reader.deadline().is_none()).count() >= self.max_connections
    }

    fn readers_of(&self, session: u64) -> usize {
        let theirs =
            |reader: &&ReaderConnection| matches!(reader.stage, Stage::Reading { session: of, .. } if of == session);
        self.readers.values().filter(theirs).count()
    }
}

impl ReaderConnection {
    /// When the handshake must be finished; `None` if it is.
    fn deadline(&self) -> Option<Instant> {
        match self.stage {
            Stage::AwaitingHello { deadline } | Stage::AwaitingProof { deadline, .. } => Some(deadline),
            Stage::Reading { .. } => None,
        }
    }
}

/// Refuses a connection before its hello. A received hello is discarded first: closing a connection with unread packets
/// would make the system discard the refusal.
pub(super) fn refuse(reader: &PeerSocket, denial: Denial) {
    let Some(refusal) = Shm::refusal(Refusal::Denied(denial)) else { return };
    let _ = local::receive(reader);
    let _ = local::send(reader, &refusal, None);
}

/// Number of the first reader connection.
const FIRST_READER: u64 = 2;

/// Connections per session, so that one session cannot take all: 2 regions, and room for a reader that reconnects
/// before its old connections are found closed.
const READERS_PER_SESSION: usize = 16;

/// Connections that have not proved their session yet. A handshake takes microseconds.
const UNPROVED_MAX: usize = 64;

// The thread that accepts connections, checks proofs, passes the memory, and notices closed connections. It copies no
// bytes of a region.
//
// ```text
//   accepted ─▶ AwaitingHello ──hello──▶ AwaitingProof ──proof──▶ Reading ──any packet, or the end──▶ closed
//                  │ late, malformed        │ late, wrong            └─ revoked, withdrawn ─ farewell ─▶ closed
//                  ▼                        ▼
//                closed                  denied with a reason, closed
// ```
//
// No call blocks on a reader: the sockets are non-blocking, every packet is smaller than an empty connection's buffer,
// and a connection whose handshake takes too long is closed. Packets are received without the lock, and connections
// and received descriptors are closed on another thread, as closing a descriptor that a peer has sent can block.

/// Starts the thread.
pub(super) fn start(shared: Arc<Shared>, listener: Listener) -> Result<JoinHandle<()>, Error> {
    let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(Error::system("creating an epoll instance"))?;
    watch(&epoll, &shared.stop, STOP).map_err(Error::system("watching an eventfd"))?;
    watch(&epoll, &listener, LISTENER).map_err(Error::system("watching a local socket"))?;
    thread::Builder::new()
        .name("remora-shm".into())
        .spawn(move || {
            Owner { shared: &shared, epoll: Arc::new(epoll), listener }.run();
            shared.server().readers.clear();
        })
        .map_err(Error::system("starting a thread"))
}

/// What only the thread uses.
struct Owner<'a> {
    shared: &'a Shared,
    epoll: Arc<OwnedFd>,
    listener: Listener,
}

impl Owner<'_> {
    fn run(&self) {
        let mut events = Vec::with_capacity(EVENTS_PER_TURN);
        loop {
            events.clear();
            let patience = self.shared.server().next_timeout(Instant::now());
            match epoll::wait(&self.epoll, rustix::buffer::spare_capacity(&mut events), patience.as_ref()) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => return tracing::error!(%error, "shm: epoll_wait failed; no connection can be served"),
            }
            for event in &events {
                match event.data.u64() {
                    STOP => return,
                    LISTENER => self.accept(),
                    number => self.receive(number),
                }
            }
            self.shared.server().cut_late(Instant::now());
        }
    }

    /// Accepts waiting connections, up to the limit of one turn.
    fn accept(&self) {
        for _ in 0..EVENTS_PER_TURN {
            match self.listener.accept() {
                Ok(Some(reader)) => self.admit(reader),
                Ok(None) => return,
                Err(error) => {
                    // Probably out of descriptors. The connections stay in the backlog; without a pause this loop would
                    // spin.
                    tracing::warn!(%error, "shm: cannot accept a connection, retrying");
                    return thread::sleep(ACCEPT_PAUSE);
                }
            }
        }
    }

    fn admit(&self, reader: PeerSocket) {
        let (number, full) = self.shared.server().next_reader();
        if full {
            return refuse(&reader, Denial::Busy);
        }
        if let Err(error) = watch(&self.epoll, &reader, number) {
            return tracing::warn!(%error, "shm: cannot watch a connection");
        }
        self.shared.server().admit(number, WatchedSocket::new(reader, self.epoll.clone()), Instant::now());
    }

    /// Receives a packet of a reader, or the end of its connection, without the lock.
    fn receive(&self, number: u64) {
        let Some(socket) = self.shared.server().socket(number) else { return };
        let packet = local::receive(&*socket);
        self.shared.server().on_packet(number, packet);
    }
}

fn watch(epoll: &OwnedFd, fd: impl AsFd, number: u64) -> Result<(), Errno> {
    epoll::add(epoll, fd, epoll::EventData::new_u64(number), epoll::EventFlags::IN | epoll::EventFlags::RDHUP)
}

/// Numbers of the two descriptors that are not reader connections.
const STOP: u64 = 0;

const LISTENER: u64 = 1;

/// Events handled, and connections accepted, per turn: enough to be efficient, few enough that new connections do not
/// starve existing ones.
const EVENTS_PER_TURN: usize = 64;

/// Pause after a failed accept.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
