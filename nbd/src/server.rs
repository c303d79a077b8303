//! Server: listens, and has a thread for each connection.
//!
//! First the server, then its listener: a socket with an address, and who may open it. The connection (below) is one
//! client, from its first byte to its last. **Start there.**

use std::fs::{self, DirBuilder, Permissions};
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use crate::device::{Answer, Device, Outbox, Payload};
use crate::handshake::{self, Handshake, Session, Step, Tls};
use crate::protocol::{Asked, MAX_STRING_BYTES};
use crate::request::{Broken, Op, Request};
use crate::stream::{self, Stream, TlsConfig};
use crate::{Export, Geometry};

/// Where a server listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    /// A socket of this host. Only its owner can open it. Its folder is made if it is missing, for its owner only.
    Unix(PathBuf),
    /// A port. Every host that reaches it can read and write what is exported, unless TLS asks for certificates.
    Tcp(SocketAddr),
}

impl std::fmt::Display for Address {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Address::Unix(path) => write!(f, "unix:{}", path.display()),
            Address::Tcp(address) => write!(f, "tcp:{address}"),
        }
    }
}

/// Settings of a server.
#[derive(Clone, Debug)]
pub struct ServerOptions {
    /// Where it listens.
    pub address: Address,
    /// Certificates, which may be replaced. With them TLS is required, without them there is none.
    pub tls: Option<TlsConfig>,
    /// Connections at a time. One more is closed at once.
    pub most_connections: usize,
}

impl ServerOptions {
    /// Without TLS, with [`MOST_CONNECTIONS`].
    pub fn new(address: Address) -> ServerOptions {
        ServerOptions { address, tls: None, most_connections: MOST_CONNECTIONS }
    }
}

/// A device, and what clients call it.
#[derive(Clone)]
pub struct Offer {
    /// Its name. The first one is found without a name, too.
    pub name: String,
    /// A sentence for people; may be empty.
    pub description: String,
    /// The device.
    pub device: Arc<dyn Device>,
}

/// Why a server does not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The address cannot be used.
    #[error("listening at {address}: {error}")]
    Listen {
        /// The address.
        address: Address,
        /// The system's reason.
        error: io::Error,
    },
    /// Something that is to be exported is not right.
    #[error("the export {name:?}: {why}")]
    Export {
        /// Its name.
        name: String,
        /// What to change.
        why: &'static str,
    },
    /// The system provides no thread.
    #[error("starting a thread: {0}")]
    Thread(io::Error),
}

/// A server. It ends when it is dropped: connections are closed, and their threads have ended. A request that a
/// device takes its time with delays that.
pub struct Server {
    address: Address,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    served: Served,
    most_connections: usize,
    is_over: AtomicBool,
    running: Mutex<Vec<Running>>,
    waker: Waker,
}

struct Running {
    socket: Arc<OwnedFd>,
    /// Set when negotiation has ended.
    outbox: Arc<OnceLock<Arc<Outbox>>>,
    thread: JoinHandle<()>,
}

impl Running {
    /// Ends it: all that waits for the client returns, and so does all that waits for the device's answers.
    fn end(&self) {
        stream::shut_down(&self.socket);
        if let Some(outbox) = self.outbox.get() {
            outbox.end();
        }
    }
}

/// A place where a server will listen. Clients that connect wait until it serves.
pub struct Bound {
    listener: Listener,
    address: Address,
    options: ServerOptions,
}

impl Bound {
    /// Listens.
    ///
    /// # Errors
    /// [`StartError::Listen`].
    pub fn new(options: &ServerOptions) -> Result<Bound, StartError> {
        let failed = |error| StartError::Listen { address: options.address.clone(), error };
        let listener = Listener::bind(&options.address).map_err(failed)?;
        let address = listener.address().map_err(failed)?;
        Ok(Bound { listener, address, options: options.clone() })
    }
}

impl Server {
    /// Starts to serve.
    ///
    /// # Errors
    /// [`StartError`].
    pub fn start(offers: Vec<Offer>, options: &ServerOptions) -> Result<Server, StartError> {
        Server::serve(offers, Bound::new(options)?)
    }

    /// Starts to serve at a place where it listens already.
    ///
    /// # Errors
    /// [`StartError`].
    pub fn serve(offers: Vec<Offer>, bound: Bound) -> Result<Server, StartError> {
        let Bound { listener, address, options } = bound;
        let exports = offers.iter().map(export).collect::<Result<Vec<_>, _>>()?;
        if let Some(twice) =
            exports.iter().enumerate().find(|(at, one)| exports[..*at].iter().any(|e| e.name == one.name))
        {
            return Err(StartError::Export { name: twice.1.name.clone(), why: "two exports have this name" });
        }
        if exports.is_empty() {
            return Err(StartError::Export { name: String::new(), why: "there is nothing to export" });
        }
        let devices = offers.into_iter().map(|offer| offer.device).collect();
        let shared = Arc::new(Shared {
            served: Served { exports: exports.into(), devices, tls: options.tls.clone() },
            most_connections: options.most_connections,
            is_over: AtomicBool::new(false),
            running: Mutex::default(),
            waker: Waker::new().map_err(StartError::Thread)?,
        });
        let accepting = Arc::clone(&shared);
        let thread = std::thread::Builder::new().name("nbd-accept".into()).spawn(move || accept(&listener, &accepting));
        Ok(Server { address, shared, thread: Some(thread.map_err(StartError::Thread)?) })
    }

    /// Where it listens: with the port that the system chose.
    pub fn address(&self) -> &Address {
        &self.address
    }

    /// Connections that are open.
    pub fn connections(&self) -> usize {
        self.shared.running().iter().filter(|running| !running.thread.is_finished()).count()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.shared.is_over.store(true, Ordering::Release);
        self.shared.waker.wake();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join(); // a panic was reported where it happened
        }
        let running = std::mem::take(&mut *self.shared.running());
        running.iter().for_each(Running::end);
        for running in running {
            let _ = running.thread.join(); // as above
        }
    }
}

impl Shared {
    fn running(&self) -> MutexGuard<'_, Vec<Running>> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn serve(self: &Arc<Shared>, socket: OwnedFd, peer: &str) -> io::Result<()> {
        let mut running = self.running();
        running.retain(|running| !running.thread.is_finished());
        if running.len() >= self.most_connections {
            return Err(io::Error::other(format!("{} connections are open, and more are not allowed", running.len())));
        }
        stream::limit_send(&socket, SEND_LIMIT)?;
        let (socket, outbox) = (Arc::new(socket), Arc::default());
        let (shared, peer) = (Arc::clone(self), peer.to_owned());
        let (own, own_outbox) = (Arc::clone(&socket), Arc::clone(&outbox));
        let thread = std::thread::Builder::new().name("nbd".into()).spawn(move || {
            let result = serve(Arc::clone(&own), &shared.served, &own_outbox);
            stream::shut_down(&own); // the server still has it
            match result {
                Ok(()) => tracing::debug!(peer, "an NBD client has ended its connection"),
                Err(_) if shared.is_over.load(Ordering::Acquire) => {}
                Err(why) => tracing::warn!(peer, "the connection of an NBD client has ended: {why}"),
            }
        })?;
        running.push(Running { socket, outbox, thread });
        Ok(())
    }
}

fn accept(listener: &Listener, shared: &Arc<Shared>) {
    while !shared.is_over.load(Ordering::Acquire) {
        let accepted = match listener.accept(&shared.waker) {
            Ok(Some((socket, peer))) => shared.serve(socket, &peer),
            Ok(None) => Ok(()),
            Err(error) => Err(error),
        };
        if let Err(error) = accepted {
            tracing::warn!("an NBD connection was not accepted: {error}");
            std::thread::sleep(AFTER_AN_ERROR);
        }
    }
}

fn export(offer: &Offer) -> Result<Export, StartError> {
    let geometry = offer.device.geometry();
    let is_long = offer.name.len().max(offer.description.len()) > MAX_STRING_BYTES;
    let why = if is_long { Some("the name or the description is longer than 4096 bytes") } else { geometry.misuse() };
    match why {
        Some(why) => Err(StartError::Export { name: offer.name.clone(), why }),
        None => Ok(Export { name: offer.name.clone(), description: offer.description.clone(), geometry }),
    }
}

/// Connections of one server: clients open one to sixteen. Each has a thread and 320 KiB, and requests of up to
/// 64 MiB.
pub const MOST_CONNECTIONS: usize = 64;

/// How long a client may take none of its answers. A virtual machine that is stopped for longer connects again.
const SEND_LIMIT: Duration = Duration::from_secs(60);

/// Without descriptors or memory, accepting would fail again at once.
const AFTER_AN_ERROR: Duration = Duration::from_millis(20);

// A socket with an address, and who may open it.

/// A listening socket. The file of a unix socket is removed with it.
enum Listener {
    Unix { socket: OwnedFd, address: Address, file: FileId },
    Tcp(TcpListener),
}

/// Device and number of a file: which one a path stands for.
type FileId = (u64, u64);

fn file_id(path: &Path) -> io::Result<FileId> {
    fs::symlink_metadata(path).map(|file| (file.dev(), file.ino()))
}

impl Listener {
    fn bind(address: &Address) -> io::Result<Listener> {
        match address {
            Address::Unix(path) => {
                let (socket, file) = unix(path)?;
                Ok(Listener::Unix { socket, address: address.clone(), file })
            }
            Address::Tcp(address) => {
                let listener = TcpListener::bind(address)?;
                listener.set_nonblocking(true)?;
                Ok(Listener::Tcp(listener))
            }
        }
    }

    fn address(&self) -> io::Result<Address> {
        match self {
            Listener::Unix { address, .. } => Ok(address.clone()),
            Listener::Tcp(listener) => listener.local_addr().map(Address::Tcp),
        }
    }

    /// The next connection, and its peer. Waits for it, or for the waker: `None`.
    fn accept(&self, waker: &Waker) -> io::Result<Option<(OwnedFd, String)>> {
        let socket = match self {
            Listener::Unix { socket, .. } => socket.as_fd(),
            Listener::Tcp(listener) => listener.as_fd(),
        };
        let mut both = [PollFd::new(&socket, PollFlags::IN), PollFd::new(&waker.wakes, PollFlags::IN)];
        match poll(&mut both, None) {
            Err(Errno::INTR) => return Ok(None),
            other => other?,
        };
        match self {
            Listener::Unix { socket, address, .. } => match rustix::net::accept_with(socket, SocketFlags::CLOEXEC) {
                Ok(accepted) => Ok(Some((accepted, address.to_string()))),
                Err(error) => none_yet(error.into()),
            },
            Listener::Tcp(listener) => match listener.accept() {
                Ok((stream, peer)) => {
                    stream.set_nonblocking(false)?;
                    stream.set_nodelay(true)?;
                    rustix::net::sockopt::set_socket_keepalive(&stream, true)?;
                    Ok(Some((stream.into(), peer.to_string())))
                }
                Err(error) => none_yet(error),
            },
        }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        // Another process may listen at the path by now, after somebody has removed this one's file.
        if let Listener::Unix { address: Address::Unix(path), file, .. } = self
            && file_id(path).is_ok_and(|there| there == *file)
        {
            let _ = fs::remove_file(path); // it may be gone already
        }
    }
}

/// It was woken, or the peer has given up before it was accepted.
fn none_yet<T>(error: io::Error) -> io::Result<Option<T>> {
    match error.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted | io::ErrorKind::ConnectionAborted => Ok(None),
        _ => Err(error),
    }
}

/// Binds, and only then listens: no client connects before the file has its mode.
fn unix(path: &Path) -> io::Result<(OwnedFd, FileId)> {
    if let Some(folder) = path.parent().filter(|folder| !folder.as_os_str().is_empty() && !folder.exists()) {
        DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
    }
    let address = SocketAddrUnix::new(path)?;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let new = || rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None);
    let socket = new()?;
    match rustix::net::bind(&socket, &address) {
        // The system refuses connections to files that are no sockets, too. Such a file is somebody's data.
        Err(Errno::ADDRINUSE) if !fs::symlink_metadata(path)?.file_type().is_socket() => {
            return Err(io::Error::new(io::ErrorKind::AlreadyExists, "a file that is not a socket has this name"));
        }
        // No process listens at this file: its owner could not remove it.
        Err(Errno::ADDRINUSE) if rustix::net::connect(&new()?, &address) == Err(Errno::CONNREFUSED) => {
            fs::remove_file(path)?;
            rustix::net::bind(&socket, &address)?;
        }
        other => other?,
    }
    let listens = fs::set_permissions(path, Permissions::from_mode(0o600));
    match listens.and_then(|()| Ok(rustix::net::listen(&socket, BACKLOG)?)).and_then(|()| file_id(path)) {
        Ok(file) => Ok((socket, file)),
        Err(error) => {
            let _ = fs::remove_file(path); // the file of this bind
            Err(error)
        }
    }
}

/// Ends the wait of [`Listener::accept`].
struct Waker {
    wakes: UnixStream,
    /// Closed by [`Waker::wake`].
    other: Mutex<Option<UnixStream>>,
}

impl Waker {
    fn new() -> io::Result<Waker> {
        let (wakes, other) = UnixStream::pair()?;
        Ok(Waker { wakes, other: Mutex::new(Some(other)) })
    }

    /// For good.
    fn wake(&self) {
        self.other.lock().unwrap_or_else(std::sync::PoisonError::into_inner).take();
    }
}

/// Connections that wait to be accepted.
const BACKLOG: i32 = 64;

// Connection: one client, and the thread that serves it.
//
// The thread receives as many requests as have arrived, has them all done, and sends the answers that it got at once.
// One that answers later needs a second thread, which is started with the first of these answers.

/// What all connections of a server serve.
struct Served {
    exports: Arc<[Export]>,
    devices: Vec<Arc<dyn Device>>,
    tls: Option<TlsConfig>,
}

/// Why a connection has ended.
#[derive(Debug, thiserror::Error)]
enum Ended {
    #[error(transparent)]
    Handshake(#[from] handshake::Error),
    #[error(transparent)]
    Requests(#[from] Broken),
    #[error("negotiation took more than {HANDSHAKE_LIMIT:?}")]
    TooSlow,
    #[error("the client does not take its answers, or is gone: {0}")]
    Io(#[from] io::Error),
    #[error("starting TLS: {0}")]
    Tls(io::Error),
}

/// Serves a client until it ends the connection, or cannot be followed any more. `published` is how the server ends it.
fn serve(socket: Arc<OwnedFd>, served: &Served, published: &OnceLock<Arc<Outbox>>) -> Result<(), Ended> {
    let Some((stream, session, early)) = negotiate(socket, served)? else { return Ok(()) };
    let Some(device) = served.devices.get(session.export) else { return Ok(()) };
    let outbox = Arc::clone(published.get_or_init(|| Arc::new(Outbox::new(stream))));
    let mut connection = Connection {
        device: &**device,
        geometry: device.geometry(),
        session,
        outbox: Arc::clone(&outbox),
        writer: None,
        batch: Vec::with_capacity(BATCH_BYTES),
        buffer: vec![0; BUFFER_BYTES].into(),
        start: 0,
        end: early.len(),
        is_busy: false,
    };
    connection.buffer[..early.len()].copy_from_slice(&early);
    let result = connection.run();
    if matches!(result, Ok(End::Asked)) {
        outbox.drain(DRAIN_LIMIT);
    }
    outbox.end();
    if let Some(writer) = connection.writer.take() {
        let _ = writer.join(); // a panic was reported where it happened
    }
    result.map(drop)
}

/// Negotiates, and returns what a hasty client has sent behind its choice. `None`: the client wants nothing more.
fn negotiate(socket: Arc<OwnedFd>, served: &Served) -> Result<Option<(Stream, Session, Vec<u8>)>, Ended> {
    let until = Instant::now() + HANDSHAKE_LIMIT;
    let tls = if served.tls.is_some() { Tls::Required } else { Tls::Off };
    let mut handshake = Handshake::new(Arc::clone(&served.exports), tls);
    let mut stream = Stream::plain(Arc::clone(&socket));
    let (mut input, mut out) = (Vec::new(), Vec::new());
    Handshake::greeting(&mut out);
    loop {
        let received = handshake.receive(&input, &mut out);
        // A client that does not send the next option before it has this answer must not wait for it.
        if !out.is_empty() {
            stream.send(&[&out])?;
            out.clear();
        }
        let (consumed, step) = received?;
        input.drain(..consumed);
        match step {
            Step::Next => {}
            Step::More => {
                let mut more = [0; 4096];
                stream.receive_until(Some(until)).map_err(too_slow)?;
                match stream.receive(&mut more).map_err(too_slow)? {
                    0 => return Ok(None),
                    count => input.extend_from_slice(&more[..count]),
                }
            }
            Step::StartTls => {
                let Some(config) = served.tls.as_ref().map(TlsConfig::current) else { return Ok(None) };
                stream = Stream::encrypted(Arc::clone(&socket), config, until).map_err(Ended::Tls)?;
                handshake.tls_started();
            }
            Step::Serve(session) => {
                stream.receive_until(None)?;
                return Ok(Some((stream, session, input)));
            }
            Step::End => return Ok(None),
        }
    }
}

fn too_slow(error: io::Error) -> Ended {
    match error.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => Ended::TooSlow,
        _ => Ended::Io(error),
    }
}

struct Connection<'a> {
    device: &'a dyn Device,
    geometry: Geometry,
    session: Session,
    outbox: Arc<Outbox>,
    /// Sends what is answered later.
    writer: Option<JoinHandle<()>>,
    /// What was answered at once.
    batch: Vec<u8>,
    /// What was received and not yet used is `buffer[start..end]`.
    buffer: Box<[u8]>,
    start: usize,
    end: usize,
    /// The client sends its requests one soon after the other.
    is_busy: bool,
}

enum End {
    /// The client asked for it, and waits until all is done.
    Asked,
    /// The client is gone.
    Gone,
}

impl Connection<'_> {
    fn run(&mut self) -> Result<End, Ended> {
        loop {
            while let Some(request) = self.next()? {
                if let Some(end) = self.request(request)? {
                    self.send()?;
                    return Ok(end);
                }
                if self.batch.len() >= BATCH_BYTES {
                    self.send()?;
                }
            }
            self.send()?;
            if !self.receive()? {
                return Ok(End::Gone);
            }
        }
    }

    /// The next head in the buffer.
    fn next(&mut self) -> Result<Option<Request>, Ended> {
        let Some(head) = self.buffer[self.start..self.end].first_chunk() else { return Ok(None) };
        let request = Request::decode(head)?;
        let here = self.end - self.start - Request::BYTES;
        // A short write waits in the buffer until it is complete. A long one gets memory of its own.
        if here < request.payload() && request.payload() <= SHORT_BYTES {
            return Ok(None);
        }
        self.start += Request::BYTES;
        Ok(Some(request))
    }

    /// Has one request done.
    fn request(&mut self, request: Request) -> Result<Option<End>, Ended> {
        let long = self.long_payload(&request)?;
        let checked = request.check(&self.geometry, &self.session);
        if checked == Ok(Op::Disconnect) {
            return Ok(Some(End::Asked));
        }
        let moves = if matches!(checked, Ok(Op::Read | Op::Write { .. })) { request.length as usize } else { 0 };
        if self.outbox.has_under_way() && !self.outbox.wait_for_room(moves) {
            return Ok(Some(End::Gone));
        }
        let Request { cookie, offset, length, .. } = request;
        let asked = Asked { cookie, offset, length, structured: self.session.structured };
        let answer = Answer::new(asked, moves, &mut self.batch, &self.outbox);
        let device = self.device;
        let short = if long.is_some() { 0 } else { request.payload() };
        let bytes = &self.buffer[self.start..self.start + short];
        self.start += short;
        match checked {
            Ok(Op::Read) => device.read(offset, length, answer),
            Ok(Op::Write { fua }) => {
                let data = long.map_or(Payload::Borrowed(bytes), Payload::Owned);
                device.write(offset, data, fua, answer);
            }
            Ok(Op::Zero(how)) => device.zero(offset, length, how, answer),
            Ok(Op::Trim { fua }) => device.trim(offset, length, fua, answer),
            Ok(Op::Flush) => device.flush(answer),
            Ok(Op::Status { one }) => device.status(offset, length, answer.of_one_extent(one)),
            Ok(Op::Nothing | Op::Disconnect) => answer.done(),
            Err(failure) => answer.fail(&failure),
        }
        if self.writer.is_none() && self.outbox.has_under_way() {
            self.start_writer()?;
        }
        Ok(None)
    }

    /// The bytes of a write that are not all in the buffer.
    fn long_payload(&mut self, request: &Request) -> Result<Option<Vec<u8>>, Ended> {
        let length = request.payload();
        if length <= self.end - self.start {
            return Ok(None);
        }
        self.send()?; // this may take a while
        let mut bytes = Vec::with_capacity(length);
        bytes.extend_from_slice(&self.buffer[self.start..self.end]);
        (self.start, self.end) = (0, 0);
        while bytes.len() < length {
            if self.outbox.stream().receive_behind(&mut bytes)? == 0 {
                return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
            }
        }
        // A vector may have more capacity than was asked for: then the next request has begun in it.
        let behind = bytes.split_off(length);
        self.buffer[..behind.len()].copy_from_slice(&behind);
        self.end = behind.len();
        Ok(Some(bytes))
    }

    /// Receives more, and waits for it. `false`: the client has closed the connection.
    ///
    /// A client that has just got an answer often has its next request ready within microseconds. To sleep and be woken
    /// costs both ends more than that. So the thread looks a few times, and lets others run meanwhile: on a busy
    /// processor that is the client, which then sends several requests before this thread runs again. With 32 requests
    /// under way this halved the processor time of a request.
    fn receive(&mut self) -> Result<bool, Ended> {
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        } else if self.buffer.len() - self.start < Request::BYTES + SHORT_BYTES {
            self.buffer.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        let (stream, room) = (self.outbox.stream(), &mut self.buffer[self.end..]);
        let began = Instant::now();
        // A client that waits for an answer sends nothing.
        while self.is_busy && !self.outbox.has_under_way() && began.elapsed() < LOOK_FOR {
            if let Some(received) = stream.receive_now(room)? {
                self.end += received;
                return Ok(received > 0);
            }
            std::thread::yield_now();
        }
        let received = stream.receive(room)?;
        self.is_busy = stream.is_plain() && began.elapsed() < BUSY;
        self.end += received;
        Ok(received > 0)
    }

    fn send(&mut self) -> Result<(), Ended> {
        self.outbox.send(&mut self.batch)?;
        if self.batch.capacity() > KEPT_BYTES {
            self.batch = Vec::with_capacity(BATCH_BYTES);
        }
        Ok(())
    }

    fn start_writer(&mut self) -> Result<(), Ended> {
        let outbox = Arc::clone(&self.outbox);
        self.writer = Some(std::thread::Builder::new().name("nbd-writer".into()).spawn(move || outbox.write())?);
        Ok(())
    }
}

/// Time for the whole negotiation, TLS included. A client that has not chosen by then uses up a connection.
const HANDSHAKE_LIMIT: Duration = Duration::from_secs(10);

/// How long a client that says good-bye waits for its last requests.
const DRAIN_LIMIT: Duration = Duration::from_secs(30);

/// Received at once: 60 writes of 4 KiB.
const BUFFER_BYTES: usize = 256 << 10;

// What is left of the negotiation fits.
const _: () = assert!(BUFFER_BYTES > 2 * handshake::MAX_OPTION_BYTES);

/// The longest write that waits in the buffer until it is complete: it is then copied once, and needs no memory.
const SHORT_BYTES: usize = 64 << 10;

/// Answers that are sent without waiting for the next request's.
const BATCH_BYTES: usize = 64 << 10;

/// How long a thread looks for the next request of a busy client before it sleeps: as long as sleeping and being woken
/// take. An idle client costs nothing, since it is not busy.
const LOOK_FOR: Duration = Duration::from_micros(20);

/// A client is busy if the next request came within this time. Then looking costs a tenth of a processor at most.
const BUSY: Duration = Duration::from_micros(200);

/// Memory for answers that is kept. Reads of 32 MiB are rare.
const KEPT_BYTES: usize = 4 << 20;
