//! The transports, as a worker sees them: connections that can be polled, and sent to and received from in vectors,
//! without blocking.
//!
//! | address | stack | what it is |
//! |---|---|---|
//! | `tcp:HOST:PORT` | [`TcpLink`] | a TCP socket |
//! | `shm:PATH` | [`shm`] | two rings in shared memory, and a unix socket as their waker |
//! | `tls:HOST:PORT` | [`tls`] | TLS on a TCP socket |
//! | `rdma:HOST:PORT` | [`rdma`] | a queue pair: SEND for small messages, READ for large ones |

pub mod rdma;
pub mod shm;
pub mod tls;

use std::fmt;
use std::io::{self, IoSlice, IoSliceMut};
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use rustix::net::{SendAncillaryBuffer, SendFlags, sendmsg, sockopt};
use socket2::{Domain, Protocol, Socket, Type};

use crate::handshake::BINDING_BYTES;

/// A connection of a transport. No call blocks: what is not possible now is [`io::ErrorKind::WouldBlock`].
pub trait Link: Send {
    /// Becomes readable when there may be something to receive, or room to send again. While connecting: readable or
    /// writable when the connect may have completed.
    fn descriptor(&self) -> BorrowedFd<'_>;

    /// Returns whether the connect has completed. Called when the descriptor says that it may have.
    ///
    /// # Errors
    /// Why the connect failed, or would block: it has not completed.
    fn finish_call(&mut self) -> io::Result<()>;

    /// Sends bytes from the front, and returns how many. With no bytes: sends what the link holds back.
    ///
    /// # Errors
    /// The link is broken, or would block.
    fn send(&mut self, bytes: &[IoSlice<'_>]) -> io::Result<usize>;

    /// Receives into these buffers, one after the other; 0 is the end of the stream.
    ///
    /// # Errors
    /// The link is broken, or would block.
    fn receive(&mut self, into: &mut [IoSliceMut<'_>]) -> io::Result<usize>;

    /// Whether `send` may be called while the worker sleeps on the descriptor, by another thread: it takes nothing that
    /// has arrived.
    fn sends_now(&self) -> bool {
        true
    }

    /// Whether the link holds back bytes that it took: call `send` when the descriptor is writable.
    fn has_unsent(&self) -> bool {
        false
    }

    /// A value that only the two ends of this link share, if the link is a secure channel (RFC 9266). The handshake's
    /// proofs cover it. Called once bytes have been received.
    ///
    /// # Errors
    /// The link is a secure channel that has no such value.
    fn channel_binding(&self) -> io::Result<Option<[u8; BINDING_BYTES]>> {
        Ok(None)
    }

    /// The certificate that the peer has presented, in DER, if the link is a secure channel in which peers do. Known
    /// once bytes have been received.
    fn peer_certificate(&self) -> Option<&[u8]> {
        None
    }

    /// The peer's address.
    fn peer(&self) -> Address;

    /// The address of this end, as the peer sees it, if the transport has addresses.
    fn local(&self) -> Option<SocketAddr> {
        None
    }

    /// Whether there is something to do, without a system call; `None` if only the descriptor knows.
    fn poll_ready(&mut self) -> Option<bool> {
        None
    }

    /// Prepares for a sleep on the descriptor: the peer must wake this end from now on. Returns whether something came
    /// in the meantime.
    fn arm(&mut self) -> bool {
        false
    }

    /// Ends the sleep: the peer need not wake this end.
    fn disarm(&mut self) {}
}

/// Accepts links.
pub trait Listener: Send {
    /// Becomes readable when a peer connects.
    fn descriptor(&self) -> BorrowedFd<'_>;

    /// Accepts the next link.
    ///
    /// # Errors
    /// There is none (would block), or the error of the system.
    fn accept(&mut self) -> io::Result<Box<dyn Link>>;

    /// The address, with the port that the system chose.
    fn address(&self) -> Address;
}

/// An address of a transport.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Address {
    /// TCP.
    Tcp(SocketAddr),
    /// TLS on TCP; see [`tls::TlsOptions`].
    Tls(SocketAddr),
    /// Shared memory of this host: the path of the unix socket that hands it over. Empty for a peer that has connected.
    Shm(PathBuf),
    /// RDMA: the address of a device's port, and a port number of the connection manager.
    Rdma(SocketAddr),
}

/// The transports of one messenger, with their settings. What a transport shares between its links is created with the
/// first one.
pub(crate) struct Stacks {
    tls: tls::TlsOptions,
    rdma: rdma::RdmaOptions,
    rdma_context: OnceLock<Arc<rdma::RdmaContext>>,
}

impl Stacks {
    pub(crate) fn new(tls: tls::TlsOptions, rdma: rdma::RdmaOptions) -> Stacks {
        Stacks { tls, rdma, rdma_context: OnceLock::new() }
    }

    /// Listens at an address.
    ///
    /// # Errors
    /// The error of the system.
    pub(crate) fn listen(&self, address: &Address) -> io::Result<Box<dyn Listener>> {
        match address {
            Address::Tcp(address) => Ok(Box::new(TcpListener::bind(*address)?)),
            Address::Tls(address) => Ok(Box::new(tls::TlsListener::bind(&self.tls, *address)?)),
            Address::Shm(path) => Ok(Box::new(shm::ShmListener::bind(path)?)),
            Address::Rdma(address) => Ok(Box::new(rdma::RdmaListener::bind(self.rdma_context()?, *address)?)),
        }
    }

    /// Begins to connect to an address.
    ///
    /// # Errors
    /// Immediate errors of the system. Later ones come from [`Link::finish_call`].
    pub(crate) fn call(&self, address: &Address) -> io::Result<Box<dyn Link>> {
        match address {
            Address::Tcp(address) => Ok(Box::new(TcpLink::call(*address)?)),
            Address::Tls(address) => Ok(Box::new(tls::TlsLink::call(&self.tls, *address)?)),
            Address::Shm(path) => Ok(Box::new(shm::ShmLink::call(path)?)),
            Address::Rdma(address) => Ok(Box::new(rdma::RdmaLink::call(self.rdma_context()?, *address)?)),
        }
    }

    /// Performs deferred work of transports that is due. Returns when to call again, if any is left. Cheap if there is
    /// none.
    pub(crate) fn tend(&self) -> Option<Instant> {
        self.rdma_context.get()?.tend()
    }

    fn rdma_context(&self) -> io::Result<&Arc<rdma::RdmaContext>> {
        if let Some(sites) = self.rdma_context.get() {
            return Ok(sites);
        }
        let made = rdma::context(&self.rdma)?;
        Ok(self.rdma_context.get_or_init(|| made))
    }
}

impl Address {
    /// The address that peers on other hosts can use, if there is one.
    pub(crate) fn socket_address(&self) -> Option<SocketAddr> {
        match self {
            Address::Tcp(address) | Address::Tls(address) | Address::Rdma(address)
                if !address.ip().is_unspecified() =>
            {
                Some(*address)
            }
            _ => None,
        }
    }

    /// Another address of the same transport.
    pub(crate) fn elsewhere(&self, address: SocketAddr) -> Address {
        match self {
            Address::Rdma(_) => Address::Rdma(address),
            Address::Tls(_) => Address::Tls(address),
            _ => Address::Tcp(address),
        }
    }
}

impl fmt::Display for Address {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Address::Tcp(address) => write!(to, "tcp:{address}"),
            Address::Tls(address) => write!(to, "tls:{address}"),
            Address::Shm(path) => write!(to, "shm:{}", path.display()),
            Address::Rdma(address) => write!(to, "rdma:{address}"),
        }
    }
}

impl FromStr for Address {
    type Err = String;

    fn from_str(text: &str) -> Result<Address, String> {
        let at = |address: &str| address.parse().map_err(|_| format!("{address}: not an IP address and a port"));
        match text.split_once(':') {
            Some(("shm", path)) if !path.is_empty() => Ok(Address::Shm(PathBuf::from(path))),
            Some(("tcp", address)) => at(address).map(Address::Tcp),
            Some(("tls", address)) => at(address).map(Address::Tls),
            Some(("rdma", address)) => at(address).map(Address::Rdma),
            _ => Err(format!("{text}: neither tcp:IP:PORT nor tls:IP:PORT nor rdma:IP:PORT nor shm:PATH")),
        }
    }
}

impl From<SocketAddr> for Address {
    fn from(address: SocketAddr) -> Address {
        Address::Tcp(address)
    }
}

// TCP sockets. Every method of [`Link`] is one system call.

/// A TCP connection.
pub struct TcpLink {
    socket: Socket,
    peer: SocketAddr,
}

impl TcpLink {
    /// Begins to connect.
    fn call(peer: SocketAddr) -> io::Result<TcpLink> {
        let socket = socket_for(peer)?;
        match socket.connect(&peer.into()) {
            Err(error) if error.raw_os_error() != Some(rustix::io::Errno::INPROGRESS.raw_os_error()) => Err(error),
            _ => TcpLink::of(socket, peer),
        }
    }

    /// Wraps a socket that the owner has accepted.
    pub(crate) fn adopt(stream: std::net::TcpStream) -> io::Result<TcpLink> {
        stream.set_nonblocking(true)?;
        let peer = stream.peer_addr()?;
        TcpLink::of(stream.into(), peer)
    }

    fn of(socket: Socket, peer: SocketAddr) -> io::Result<TcpLink> {
        socket.set_tcp_nodelay(true)?; // bytes that belong together are given to the kernel together
        Ok(TcpLink { socket, peer })
    }
}

impl Link for TcpLink {
    fn descriptor(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    fn finish_call(&mut self) -> io::Result<()> {
        sockopt::socket_error(&self.socket)??;
        Ok(())
    }

    fn send(&mut self, bytes: &[IoSlice<'_>]) -> io::Result<usize> {
        loop {
            let sent = match bytes {
                [one] => rustix::net::send(&self.socket, one, SendFlags::NOSIGNAL),
                many => sendmsg(&self.socket, many, &mut SendAncillaryBuffer::default(), SendFlags::NOSIGNAL),
            };
            match sent {
                Err(rustix::io::Errno::INTR) => continue,
                sent => return Ok(sent?),
            }
        }
    }

    fn receive(&mut self, into: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        loop {
            let received = match into.len() {
                1 => rustix::io::read(&self.socket, &mut *into[0]),
                _ => rustix::io::readv(&self.socket, into),
            };
            match received {
                Err(rustix::io::Errno::INTR) => continue,
                received => return Ok(received?),
            }
        }
    }

    fn peer(&self) -> Address {
        Address::Tcp(self.peer)
    }

    fn local(&self) -> Option<SocketAddr> {
        self.socket.local_addr().ok()?.as_socket()
    }
}

/// A listening TCP socket.
pub struct TcpListener {
    socket: Socket,
    address: SocketAddr,
}

impl TcpListener {
    fn bind(address: SocketAddr) -> io::Result<TcpListener> {
        let socket = socket_for(address)?;
        socket.set_reuse_address(true)?;
        socket.bind(&address.into())?;
        socket.listen(BACKLOG)?;
        let address = socket.local_addr()?.as_socket().ok_or(io::ErrorKind::AddrNotAvailable)?;
        Ok(TcpListener { socket, address })
    }

    /// Accepts the next connection.
    fn take(&mut self) -> io::Result<TcpLink> {
        let (socket, peer) = self.socket.accept()?;
        socket.set_nonblocking(true)?;
        let peer = peer.as_socket().ok_or(io::ErrorKind::AddrNotAvailable)?;
        TcpLink::of(socket, peer)
    }
}

impl Listener for TcpListener {
    fn descriptor(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    fn accept(&mut self) -> io::Result<Box<dyn Link>> {
        Ok(Box::new(self.take()?))
    }

    fn address(&self) -> Address {
        Address::Tcp(self.address)
    }
}

fn socket_for(address: SocketAddr) -> io::Result<Socket> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    socket.set_nonblocking(true)?;
    Ok(socket)
}

/// Connections that wait to be accepted: as many as the system allows by default, since all clients of a restarted
/// server connect at once.
const BACKLOG: i32 = 4096;
