//! The source's end: its regions and who may read them, the threads that serve lanes, and the path of the data.

use std::collections::HashMap;
use std::io::{self, Read};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::net::SendFlags;

use super::background::{LanePace, Pacer, Received, Upload};
use super::socket::{self, Deadline};
use super::{
    Answer, MAX_LANES_PER_SESSION, PIECE_BYTES, Request, Responder, SLOWEST_DRAIN_BYTES, SendMode, Status, TAG_LANE,
    TcpOptions,
};
use crate::admission::{Admission, Grants, Hello, Limits, Verdict};
use crate::{Denial, Error, Exporter, Memory, RegionId, RegionKey, Regions, Secret, TransportKind, tcp};

// The source's end: which regions there are, who may read them, and the threads that serve lanes. The data path is in
// `serve`.
//
// ```text
//   adopt(stream) ─▶ thread: handshake ─▶ Server::admit ─▶ serve ─▶ Server::leave
//                                            ▲   under one lock: grant still the same, and for this region? exported? room?
//   export, revoke, grant, withdraw, drop ───┘
// ```
//
// What is true at every moment, by the lock around [`Server`]:
//
// - The thread of each lane is either in `lanes`, with its socket, or in `ended`, to be joined.
// - A lane that is served has a grant for its region, which is exported: removing either closes the lane before the
//   lock is released.
// - There are at most [`TcpOptions::served_lanes`] lanes. [`UNPROVED`] bounds those without a proof, by address and in
//   all: the oldest of them is closed when another connection needs its place.
//
// The lock is never held during a system call that could block. A lane's thread takes it three times.

/// Exports regions over TCP. The owner of a listening port passes connections to [`TcpExporter::adopt`], or
/// [`TcpExporter::listen`] accepts them.
///
/// Dropping it closes every lane and joins every thread; no reader can delay that.
pub struct TcpExporter {
    shared: Arc<Shared>,
    listeners: Mutex<Vec<Listener>>,
}

impl TcpExporter {
    /// An exporter without connections.
    ///
    /// Keys tell readers to connect to `advertised`. If its host is unspecified (`0.0.0.0`, `::`), a reader uses the
    /// host by which it reached the source. `None` stands for the address of [`TcpExporter::listen`].
    ///
    /// # Errors
    /// [`Error::Misuse`] for options out of range.
    pub fn new(options: TcpOptions, advertised: Option<SocketAddr>) -> Result<TcpExporter, Error> {
        TcpExporter::make(options, advertised, None)
    }

    /// As [`TcpExporter::new`], at an end that passes on what it receives: `received` tells how many bytes that are so
    /// far. With [`UploadRate::Background`](super::UploadRate::Background) this end sends at least as fast as it
    /// receives, because its own reception delays what TCP measures.
    ///
    /// # Errors
    /// [`Error::Misuse`] for options out of range.
    pub fn of_relay(
        options: TcpOptions,
        advertised: Option<SocketAddr>,
        received: impl Fn() -> u64 + Send + Sync + 'static,
    ) -> Result<TcpExporter, Error> {
        TcpExporter::make(options, advertised, Some(Received(Box::new(received))))
    }

    fn make(
        options: TcpOptions,
        advertised: Option<SocketAddr>,
        received: Option<Received>,
    ) -> Result<TcpExporter, Error> {
        options.check()?;
        let server = Server::new(advertised);
        let pacer = Pacer::new(options.upload, Instant::now(), received);
        let shared = Shared { options, pacer, server: Mutex::new(server), served: AtomicU64::new(0) };
        Ok(TcpExporter { shared: Arc::new(shared), listeners: Mutex::default() })
    }

    /// Takes over a connection whose first bytes, presumably [`LANE_MAGIC`](super::LANE_MAGIC), have been peeked at but
    /// not read. It never blocks: a new thread does the handshake. If there are too many lanes, the connection is
    /// refused and closed.
    ///
    /// # Errors
    /// [`Error::System`] if a thread cannot be started or a socket option cannot be set.
    pub fn adopt(&self, stream: TcpStream) -> Result<(), Error> {
        self.shared.adopt(stream)
    }

    /// Listens on `address` and adopts all connections, until dropped. Returns the address; port 0 selects a free port.
    ///
    /// # Errors
    /// What the system reports for the address.
    pub fn listen(&self, address: impl ToSocketAddrs) -> io::Result<SocketAddr> {
        let listener = Listener::start(TcpListener::bind(address)?, self.shared.clone())?;
        let address = listener.address;
        self.shared.server().advertised.get_or_insert(address);
        lock(&self.listeners).push(listener);
        Ok(address)
    }

    /// Number of lanes, including those in the handshake.
    pub fn lanes(&self) -> usize {
        self.shared.server().lanes.len()
    }

    /// What the transfer does at present, if its rate is [`UploadRate::Background`](super::UploadRate::Background).
    pub fn upload(&self) -> Option<Upload> {
        self.shared.pacer.as_ref()?.upload()
    }

    /// The congestion control of a lane of this exporter, by its kernel name; `None` without lanes.
    pub fn effective_congestion(&self) -> Option<String> {
        let server = self.shared.server();
        server.lanes.values().find_map(|lane| socket::congestion(&lane.stream).ok())
    }
}

impl Exporter for TcpExporter {
    fn kind(&self) -> TransportKind {
        TransportKind::Tcp
    }

    fn export(&self, id: RegionId, memory: Arc<Memory>) -> Result<(), Error> {
        let mut server = self.shared.server();
        if server.regions.contains_key(&id) {
            return Err(Error::AlreadyExported(id));
        }
        server.regions.insert(id, Arc::new(Region { id, memory, revoked: AtomicBool::new(false) }));
        Ok(())
    }

    fn revoke(&self, id: RegionId) {
        let mut server = self.shared.server();
        let Some(region) = server.regions.remove(&id) else { return };
        region.revoked.store(true, Ordering::Release);
        for lane in server.lanes.values().filter(|lane| lane.reads(id)) {
            // Wakes a thread that waits for requests, so that it notifies its reader. A thread that is sending sees the
            // flag after the present piece.
            let _ = lane.stream.shutdown(Shutdown::Read);
        }
    }

    fn grant(&self, session: u64, secret: Secret, regions: Regions) {
        let mut server = self.shared.server();
        let closes = server.grants.insert(session, secret, regions);
        server.cut(|lane| lane.reader.is_some_and(|(of, id)| of == session && closes(id)));
    }

    fn withdraw(&self, session: u64) {
        let mut server = self.shared.server();
        server.grants.remove(session);
        server.cut(|lane| lane.belongs_to(session));
    }

    fn key(&self, id: RegionId) -> Result<RegionKey, Error> {
        let server = self.shared.server();
        let region = server.regions.get(&id).ok_or(Error::NotExported(id))?;
        let address = server
            .advertised
            .ok_or(Error::Misuse("a tcp key needs an address: give one to TcpExporter::new, or listen first"))?;
        tcp::region_key(id, region.memory.length(), address)
    }

    fn bytes_served(&self) -> u64 {
        self.shared.served.load(Ordering::Relaxed)
    }
}

impl Drop for TcpExporter {
    fn drop(&mut self) {
        if let Some(pacer) = &self.shared.pacer {
            pacer.end();
        }
        // Listeners first, so that no new connection is accepted; each joins its thread.
        lock(&self.listeners).clear();
        let threads = self.shared.server().close();
        threads.into_iter().for_each(join);
    }
}

/// What the exporter and its threads share.
struct Shared {
    options: TcpOptions,
    pacer: Option<Pacer>,
    server: Mutex<Server>,
    served: AtomicU64,
}

impl Shared {
    fn adopt(self: &Arc<Self>, stream: TcpStream) -> Result<(), Error> {
        socket::prepare(&stream, &self.options)?;
        let ended = self.server().take_ended();
        ended.into_iter().for_each(join);
        let mut server = self.server();
        let Some(place) = server.place_for(&stream, self.options.served_lanes) else {
            drop(server);
            // 48 bytes fit a connection on which nothing was sent before, so this does not wait.
            let soon = Deadline::after(Duration::from_millis(100));
            tcp::refuse_connection(&stream, Denial::Busy, soon);
            return Ok(());
        };
        let number = server.next_lane;
        server.next_lane += 1;
        let stream = Arc::new(stream);
        let (shared, lane_stream) = (self.clone(), stream.clone());
        // Under the lock: the thread cannot remove the lane before it is inserted.
        let thread = std::thread::Builder::new()
            .name(format!("tcp-lane-{number}"))
            .spawn(move || shared.run_lane(number, lane_stream))
            .map_err(Error::system("starting a thread for a data lane"));
        match thread {
            Ok(thread) => server.lanes.insert(number, Lane { stream, thread, place, reader: None }),
            Err(error) => {
                server.unproved.leave(place);
                return Err(error);
            }
        };
        Ok(())
    }

    /// The main function of a lane's thread.
    fn run_lane(&self, number: u64, stream: Arc<TcpStream>) {
        if let Err(error) = self.serve_lane(number, &stream) {
            tracing::debug!(lane = number, %error, "a data lane was refused");
        }
        // Not by dropping the socket: the server holds it too, until the next line.
        socket::cut(&stream);
        self.server().leave(number);
    }

    fn serve_lane(&self, number: u64, stream: &TcpStream) -> Result<(), Error> {
        let responder = Responder::challenge(stream, Deadline::after(self.options.handshake_timeout))?;
        let &Hello { session, id, .. } = responder.hello();
        let secret = self.server().grants.secret(session).copied();
        let examined = responder.examine(secret.as_ref())?;
        let admitted = examined.and_then(|proved| {
            let region = self.server().admit(number, session, secret.as_ref(), id)?;
            Ok((proved, region))
        });
        let (proved, region) = match admitted {
            Ok(admitted) => admitted,
            Err(denial) => {
                responder.refuse(denial)?;
                return Err(Error::Refused(denial));
            }
        };
        responder.welcome(&proved, region.memory.length())?;
        tracing::debug!(lane = number, session, region = %region.id, "a data lane is open");
        let TcpOptions { send, drain_timeout, .. } = self.options;
        let pace = LanePace::new(self.pacer.as_ref(), stream, number);
        let ended = LaneServer::new(stream, &region, send, drain_timeout, pace, &self.served).run();
        tracing::debug!(lane = number, session, region = %region.id, "a data lane has ended: {ended}");
        Ok(())
    }

    fn server(&self) -> MutexGuard<'_, Server> {
        lock(&self.server)
    }
}

/// Regions, grants, and lanes.
struct Server {
    advertised: Option<SocketAddr>,
    regions: HashMap<RegionId, Arc<Region>>,
    grants: Grants,
    lanes: HashMap<u64, Lane>,
    /// The lanes without a proof.
    unproved: Admission,
    ended: Vec<JoinHandle<()>>,
    next_lane: u64,
    closed: bool,
}

/// A lane, at the exporter.
struct Lane {
    stream: Arc<TcpStream>,
    thread: JoinHandle<()>,
    /// Its place in [`Server::unproved`], which it leaves with its proof.
    place: u64,
    /// Session and region, after the proof.
    reader: Option<(u64, RegionId)>,
}

impl Lane {
    fn belongs_to(&self, session: u64) -> bool {
        self.reader.is_some_and(|(of, _)| of == session)
    }

    fn reads(&self, id: RegionId) -> bool {
        self.reader.is_some_and(|(_, of)| of == id)
    }
}

impl Server {
    fn new(advertised: Option<SocketAddr>) -> Server {
        Server {
            advertised,
            regions: HashMap::new(),
            grants: Grants::default(),
            lanes: HashMap::new(),
            unproved: Admission::new(UNPROVED),
            ended: Vec::new(),
            next_lane: 0,
            closed: false,
        }
    }

    /// A place for one more connection's handshake, if there are at most `limit` lanes. Closes the connection that
    /// gives way to it.
    fn place_for(&mut self, stream: &TcpStream, limit: usize) -> Option<u64> {
        if self.closed || self.lanes.len() >= limit {
            return None;
        }
        let Verdict::Admitted { place, instead } = self.unproved.admit(Instant::now(), stream.peer_addr().ok()?.ip())
        else {
            return None;
        };
        if let Some(instead) = instead {
            self.cut(|lane| lane.reader.is_none() && lane.place == instead);
        }
        Some(place)
    }

    /// Admits a lane that has proved `secret` to region `id`, or returns the reason for a denial.
    fn admit(
        &mut self,
        number: u64,
        session: u64,
        secret: Option<&Secret>,
        id: RegionId,
    ) -> Result<Arc<Region>, Denial> {
        // The grant may have been withdrawn since the proof was checked.
        if self.closed || secret.is_none() || self.grants.secret(session) != secret {
            return Err(Denial::NotGranted);
        }
        self.grants.permit(session, id)?;
        let Some(region) = self.regions.get(&id) else {
            let is_stale = self.regions.keys().any(|known| known.region == id.region);
            return Err(if is_stale { Denial::Stale } else { Denial::Unknown });
        };
        if self.lanes.values().filter(|lane| lane.belongs_to(session)).count() >= MAX_LANES_PER_SESSION {
            return Err(Denial::Busy);
        }
        let lane = self.lanes.get_mut(&number).ok_or(Denial::Busy)?;
        lane.reader = Some((session, id));
        self.unproved.leave(lane.place);
        Ok(region.clone())
    }

    /// Moves a lane whose thread is about to end from `lanes` to `ended`.
    fn leave(&mut self, number: u64) {
        if let Some(lane) = self.lanes.remove(&number) {
            self.unproved.leave(lane.place);
            self.ended.push(lane.thread);
        }
    }

    fn cut(&mut self, which: impl Fn(&Lane) -> bool) {
        for lane in self.lanes.values().filter(|lane| which(lane)) {
            socket::cut(&lane.stream);
        }
    }

    /// Closes all lanes, refuses new ones, and returns the threads.
    fn close(&mut self) -> Vec<JoinHandle<()>> {
        self.closed = true;
        self.cut(|_| true);
        let lanes = std::mem::take(&mut self.lanes);
        lanes.into_values().map(|lane| lane.thread).chain(self.take_ended()).collect()
    }

    fn take_ended(&mut self) -> Vec<JoinHandle<()>> {
        std::mem::take(&mut self.ended)
    }
}

/// A listening socket, and the thread that accepts from it.
struct Listener {
    address: SocketAddr,
    socket: TcpListener,
    thread: Option<JoinHandle<()>>,
}

impl Listener {
    fn start(socket: TcpListener, shared: Arc<Shared>) -> io::Result<Listener> {
        let address = socket.local_addr()?;
        let accepting = socket.try_clone()?;
        let thread =
            std::thread::Builder::new().name("tcp-accept".into()).spawn(move || accept_all(&accepting, &shared))?;
        Ok(Listener { address, socket, thread: Some(thread) })
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        // On Linux this wakes a thread that sleeps in accept(2).
        let _ = socket2::SockRef::from(&self.socket).shutdown(Shutdown::Both);
        self.thread.take().into_iter().for_each(join);
    }
}

fn accept_all(listener: &TcpListener, shared: &Arc<Shared>) {
    loop {
        match listener.accept() {
            Ok((stream, peer)) => {
                if let Err(error) = shared.adopt(stream) {
                    tracing::warn!(%peer, %error, "cannot serve a data connection");
                }
            }
            // Its owner has shut the listener down.
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => return,
            // A connection that failed before it was accepted, or a temporary lack of descriptors.
            Err(error) => {
                tracing::warn!(%error, "cannot accept a data connection, retrying");
                std::thread::sleep(ACCEPT_PAUSE);
            }
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // The data is valid after every statement, so that it can be used after a panic of another thread.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn join(thread: JoinHandle<()>) {
    if thread.join().is_err() {
        tracing::error!("the thread of a data lane has panicked");
    }
}

/// Maximum number of lanes that have not proved a session, each a thread. One address has half of them: a host with
/// many replicas opens many lanes at once.
pub(super) const UNPROVED: Limits = Limits { total: 64, per_address: 32 };

/// Pause after a failed accept(2), so that the loop does not spin when descriptors have run out.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

// The source's data path: one lane, from its welcome to its end. `exporter` decides who may have a lane.
//
// ```text
//   recv: a batch of requests ─▶ check each ─┬─ small: header and bytes into `outbox`, sent with the rest of the batch
//                                            └─ large: header, then send(2) or sendfile(2) from the region, piece by piece
// ```
//
// Bytes of a large read are not copied in user space. Those of small reads are: sixteen reads of 4 KiB are then sent
// by one system call instead of thirty-two, which saves far more than the copy costs.

/// A region, as its lanes use it.
#[derive(Debug)]
pub(super) struct Region {
    pub(super) id: RegionId,
    pub(super) memory: Arc<Memory>,
    /// Set once, by `revoke`; checked before every piece.
    pub(super) revoked: AtomicBool,
}

/// Why a lane ended. For the log only: it is not an error of the source.
#[derive(Debug, thiserror::Error)]
pub(super) enum Ended {
    #[error("the reader closed the connection")]
    HungUp,
    #[error("the region was revoked")]
    Revoked,
    #[error("the reader took less than {SLOWEST_DRAIN_BYTES} bytes within {0:?}")]
    Slow(Duration),
    #[error("the reader did not complete a request within {0:?}")]
    HalfRequest(Duration),
    #[error("the reader sent an invalid request")]
    Malformed,
    #[error("{0}")]
    Broken(#[from] io::Error),
}

/// Answers the requests of one lane until it ends.
pub(super) struct LaneServer<'a> {
    stream: &'a TcpStream,
    region: &'a Region,
    mode: SendMode,
    drain_timeout: Duration,
    pace: Option<LanePace<'a>>,
    served: &'a AtomicU64,
    outbox: Vec<u8>,
}

impl<'a> LaneServer<'a> {
    pub(super) fn new(
        stream: &'a TcpStream,
        region: &'a Region,
        mode: SendMode,
        drain_timeout: Duration,
        pace: Option<LanePace<'a>>,
        served: &'a AtomicU64,
    ) -> LaneServer<'a> {
        LaneServer { stream, region, mode, drain_timeout, pace, served, outbox: Vec::with_capacity(OUTBOX_BYTES) }
    }

    /// Serves the lane, and returns why it ended.
    pub(super) fn run(mut self) -> Ended {
        let ended = match self.serve() {
            Ok(never) => match never {},
            Err(ended) => ended,
        };
        // `revoke` has woken this thread by closing the receiving side; the reader must still be notified.
        let last_word = match &ended {
            // In the middle of a piece the reader would take an answer for content.
            Ended::Slow(_) | Ended::Broken(_) => None,
            Ended::Malformed => Some(Status::Malformed),
            _ if self.is_revoked() => Some(Status::Denied(Denial::Revoked)),
            _ => None,
        };
        if let Some(status) = last_word {
            self.outbox.extend(Answer { tag: TAG_LANE, status, length: 0 }.encode());
            let _ = self.flush(SendFlags::empty());
            self.hang_up();
        }
        if self.is_revoked() { Ended::Revoked } else { ended }
    }

    /// Ends the lane so that sent bytes still arrive: closing a socket with unread requests resets the connection,
    /// which discards unsent bytes.
    fn hang_up(&self) {
        socket::cut(self.stream);
        let mut unread = [0; INBOX_BYTES];
        let mut stream = self.stream;
        while matches!(stream.read(&mut unread), Ok(1..)) {}
    }

    fn serve(&mut self) -> Result<std::convert::Infallible, Ended> {
        self.stream.set_read_timeout(None)?;
        self.stream.set_write_timeout(Some(self.drain_timeout))?;
        let mut inbox = [0; INBOX_BYTES];
        let mut filled = 0;
        loop {
            filled += self.receive(inbox.get_mut(filled..).unwrap_or_default(), filled > 0)?;
            let received = inbox.get(..filled).unwrap_or_default();
            let (requests, _) = received.as_chunks::<{ Request::BYTES }>();
            for request in requests {
                self.answer(Request::decode(request))?;
            }
            self.flush(SendFlags::empty())?;
            let done = requests.len() * Request::BYTES;
            inbox.copy_within(done..filled, 0);
            filled -= done;
        }
    }

    /// Receives at least one byte of requests. A lane may be idle between two requests, but not in the middle of one.
    fn receive(&self, into: &mut [u8], inside_request: bool) -> Result<usize, Ended> {
        if inside_request {
            self.stream.set_read_timeout(Some(self.drain_timeout))?;
        }
        let received = loop {
            let mut stream = self.stream;
            match stream.read(into) {
                Ok(0) => return Err(Ended::HungUp),
                Ok(count) => break count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    return Err(Ended::HalfRequest(self.drain_timeout));
                }
                Err(error) => return Err(error.into()),
            }
        };
        if inside_request {
            self.stream.set_read_timeout(None)?;
        }
        Ok(received)
    }

    fn answer(&mut self, request: Request) -> Result<(), Ended> {
        if self.is_revoked() {
            return Err(Ended::Revoked);
        }
        match request.judge(self.region.id, self.region.memory.length()) {
            Status::Good if request.length as usize <= SMALL_BYTES => self.answer_small(request),
            Status::Good => self.answer_large(request),
            Status::Malformed => Err(Ended::Malformed),
            denied => self.put_header(Answer { tag: request.tag, status: denied, length: 0 }),
        }
    }

    /// Writes header and bytes to the outbox.
    fn answer_small(&mut self, request: Request) -> Result<(), Ended> {
        if self.outbox.len() + Answer::BYTES + SMALL_BYTES > OUTBOX_BYTES {
            self.flush(SendFlags::MORE)?;
        }
        self.put_header(Answer { tag: request.tag, status: Status::Good, length: request.length })?;
        let begin = self.outbox.len();
        self.outbox.resize(begin + request.length as usize, 0);
        let place = self.outbox.get_mut(begin..).unwrap_or_default();
        self.region.memory.read(request.offset, place).map_err(io::Error::from)?;
        self.served.fetch_add(request.length.into(), Ordering::Relaxed);
        Ok(())
    }

    /// Sends bytes from the region, each piece after its header.
    fn answer_large(&mut self, request: Request) -> Result<(), Ended> {
        let mut sent = 0;
        while sent < request.length {
            if self.is_revoked() {
                return Err(Ended::Revoked);
            }
            let length = (request.length - sent).min(PIECE_BYTES);
            self.put_header(Answer { tag: request.tag, status: Status::Good, length })?;
            self.flush(SendFlags::MORE)?;
            self.send_region(request.offset + u64::from(sent), length as usize)?;
            sent += length;
        }
        Ok(())
    }

    /// Sends one piece. `offset + length` was checked to be inside the region.
    fn send_region(&mut self, offset: u64, length: usize) -> Result<(), Ended> {
        let (region, mut sent) = (self.region, 0);
        while sent < length {
            let (at, mut left) = (offset + sent as u64, length - sent);
            if let Some(pace) = &mut self.pace {
                // The rest of the piece must be sent even if the region is revoked; a closed connection is found by
                // sending.
                left = pace.wait(left, || region.revoked.load(Ordering::Acquire));
            }
            let began = Instant::now();
            let result = match self.mode {
                SendMode::Copy => region.memory.send(self.stream, at, left),
                SendMode::File => region.memory.send_file(self.stream, at, left),
            };
            let count = self.drained(result, left, began)?;
            self.served.fetch_add(count as u64, Ordering::Relaxed);
            sent += count;
        }
        Ok(())
    }

    fn put_header(&mut self, answer: Answer) -> Result<(), Ended> {
        if self.outbox.len() + Answer::BYTES > OUTBOX_BYTES {
            self.flush(SendFlags::MORE)?;
        }
        self.outbox.extend(answer.encode());
        Ok(())
    }

    /// Sends the outbox. With `MORE` the kernel may wait for the bytes that follow immediately.
    fn flush(&mut self, flags: SendFlags) -> Result<(), Ended> {
        let mut sent = 0;
        while let Some(rest) = self.outbox.get(sent..).filter(|rest| !rest.is_empty()) {
            let began = Instant::now();
            let result = rustix::net::send(self.stream.as_fd(), rest, flags | SendFlags::NOSIGNAL);
            sent += self.drained(result.map_err(io::Error::from), rest.len(), began)?;
        }
        self.outbox.clear();
        Ok(())
    }

    /// Checks the result of a blocking send that started at `began`. It is short only after a signal or at the
    /// time-out. Then the count shows the reader's speed: a slow reader is kept, one that has almost stopped is
    /// disconnected.
    fn drained(&self, result: io::Result<usize>, wanted: usize, began: Instant) -> Result<usize, Ended> {
        let count = match result {
            Ok(count) => count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => 0,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Err(Ended::Slow(self.drain_timeout)),
            Err(error) => return Err(error.into()),
        };
        let is_short = count < wanted && count < SLOWEST_DRAIN_BYTES;
        match is_short && began.elapsed() >= self.drain_timeout {
            true => Err(Ended::Slow(self.drain_timeout)),
            false => Ok(count),
        }
    }

    fn is_revoked(&self) -> bool {
        self.region.revoked.load(Ordering::Acquire)
    }
}

/// Reads up to this size are gathered in the outbox. At 16 KiB the copy costs as much as the system call that it saves
/// (about 1.5 µs).
const SMALL_BYTES: usize = 16 << 10;

/// Room for sixteen reads of 4 KiB with their headers, and one more small one. Per lane.
const OUTBOX_BYTES: usize = 96 << 10;

/// Room for 64 requests, four times the usual depth; further ones wait in the kernel's buffer.
const INBOX_BYTES: usize = 64 * Request::BYTES;
