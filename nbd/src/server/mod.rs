//! Server: listens, and has a thread for each connection.
//!
//! First the server, then its listener: a socket with an address, and who may open it. `connection` is one client, from
//! its first byte to its last. **Start there.**

mod connection;

use std::fs::{self, DirBuilder, Permissions};
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use crate::device::Device;
use crate::export::Export;
use crate::outbox::Outbox;
use crate::protocol::MAX_STRING_BYTES;
use crate::stream::{self, TlsConfig};
use connection::Served;

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
            let result = connection::serve(Arc::clone(&own), &shared.served, &own_outbox);
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
    Unix(OwnedFd, Address),
    Tcp(TcpListener),
}

impl Listener {
    fn bind(address: &Address) -> io::Result<Listener> {
        match address {
            Address::Unix(path) => Ok(Listener::Unix(unix(path)?, address.clone())),
            Address::Tcp(address) => {
                let listener = TcpListener::bind(address)?;
                listener.set_nonblocking(true)?;
                Ok(Listener::Tcp(listener))
            }
        }
    }

    fn address(&self) -> io::Result<Address> {
        match self {
            Listener::Unix(_, address) => Ok(address.clone()),
            Listener::Tcp(listener) => listener.local_addr().map(Address::Tcp),
        }
    }

    /// The next connection, and its peer. Waits for it, or for the waker: `None`.
    fn accept(&self, waker: &Waker) -> io::Result<Option<(OwnedFd, String)>> {
        let socket = match self {
            Listener::Unix(socket, _) => socket.as_fd(),
            Listener::Tcp(listener) => listener.as_fd(),
        };
        let mut both = [PollFd::new(&socket, PollFlags::IN), PollFd::new(&waker.wakes, PollFlags::IN)];
        match poll(&mut both, None) {
            Err(Errno::INTR) => return Ok(None),
            other => other?,
        };
        match self {
            Listener::Unix(socket, address) => match rustix::net::accept_with(socket, SocketFlags::CLOEXEC) {
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
        if let Listener::Unix(_, Address::Unix(path)) = self {
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
fn unix(path: &Path) -> io::Result<OwnedFd> {
    if let Some(folder) = path.parent().filter(|folder| !folder.as_os_str().is_empty() && !folder.exists()) {
        DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
    }
    let address = SocketAddrUnix::new(path)?;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let new = || rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None);
    let socket = new()?;
    match rustix::net::bind(&socket, &address) {
        // No process listens at this file: its owner could not remove it.
        Err(Errno::ADDRINUSE) if rustix::net::connect(&new()?, &address) == Err(Errno::CONNREFUSED) => {
            fs::remove_file(path)?;
            rustix::net::bind(&socket, &address)?;
        }
        other => other?,
    }
    let listens = fs::set_permissions(path, Permissions::from_mode(0o600));
    if let Err(error) = listens.and_then(|()| Ok(rustix::net::listen(&socket, BACKLOG)?)) {
        let _ = fs::remove_file(path); // the file of this bind
        return Err(error);
    }
    Ok(socket)
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
