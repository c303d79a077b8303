//! The transports, as a worker sees them: something that can be polled, sent to and received from in vectors, without waiting.
//!
//! | address | stack | what it is |
//! |---|---|---|
//! | `tcp:HOST:PORT` | [`posix`] | a TCP socket |
//! | `shm:PATH` | [`shm`] | two rings in shared memory, and a unix socket as their bell |
//! | `tls:HOST:PORT` | [`tls`] | TLS on a TCP socket |
//! | `rdma:HOST:PORT` | [`rdma`] | a queue pair: SEND for what is small, READ for what is large |

pub mod posix;
pub mod rdma;
pub mod shm;
pub mod tls;

use std::fmt;
use std::io::{self, IoSlice, IoSliceMut};
use std::net::SocketAddr;
use std::os::fd::BorrowedFd;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

/// One connection of a transport. No call waits: what cannot be done now is [`io::ErrorKind::WouldBlock`].
pub trait Link: Send {
    /// Becomes readable when there may be something to receive, or room to send again; while it calls, readable or writable when
    /// there may be an answer.
    fn descriptor(&self) -> BorrowedFd<'_>;

    /// Whether a call that was begun has been answered; asked when the descriptor says that it may have been.
    ///
    /// # Errors
    /// Why it was not, or would block: not yet.
    fn finish_call(&mut self) -> io::Result<()>;

    /// Sends the beginning of these bytes; how many it took. Of no bytes: sends on what it owes.
    ///
    /// # Errors
    /// The link is broken, or would block.
    fn send(&mut self, bytes: &[IoSlice<'_>]) -> io::Result<usize>;

    /// Receives into this memory, filling one piece after the other; 0 is the end.
    ///
    /// # Errors
    /// The link is broken, or would block.
    fn receive(&mut self, into: &mut [IoSliceMut<'_>]) -> io::Result<usize>;

    /// Whether bytes that it took are not with the system yet: to be sent on when the descriptor is writable.
    fn has_unsent(&self) -> bool {
        false
    }

    /// Where the peer is.
    fn peer(&self) -> Address;

    /// Where we are, as the peer sees it, if the transport has addresses.
    fn local(&self) -> Option<SocketAddr> {
        None
    }

    /// Whether there is something to do, without a system call; `None` if only the descriptor knows.
    fn poll_ready(&mut self) -> Option<bool> {
        None
    }

    /// The worker is about to sleep on the descriptor: asks the peer to ring. Whether something came in the meantime.
    fn arm(&mut self) -> bool {
        false
    }

    /// The worker is awake: the peer need not ring.
    fn disarm(&mut self) {}
}

/// Where links are accepted.
pub trait Listener: Send {
    /// Becomes readable when somebody calls.
    fn descriptor(&self) -> BorrowedFd<'_>;

    /// The next one who calls.
    ///
    /// # Errors
    /// Nobody (would block), or what the system says.
    fn accept(&mut self) -> io::Result<Box<dyn Link>>;

    /// Where it listens, with the port that the system chose.
    fn address(&self) -> Address;
}

/// Where a messenger listens or calls, and by which transport.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Address {
    /// TCP.
    Tcp(SocketAddr),
    /// TLS on TCP; see [`tls::TlsOptions`].
    Tls(SocketAddr),
    /// Shared memory of this host; the path of the unix socket where it is handed over. Empty for a peer that has called.
    Shm(PathBuf),
    /// RDMA: the address of a device's port, and a port of the connection manager's own numbering.
    Rdma(SocketAddr),
}

/// The transports of one messenger, with what each needs besides an address. What a transport shares between its links is made
/// when the first is wanted.
pub(crate) struct Stacks {
    tls: tls::TlsOptions,
    rdma: rdma::RdmaOptions,
    rdma_context: OnceLock<Arc<rdma::RdmaContext>>,
}

impl Stacks {
    pub(crate) fn new(tls: tls::TlsOptions, rdma: rdma::RdmaOptions) -> Stacks {
        Stacks { tls, rdma, rdma_context: OnceLock::new() }
    }

    /// Listens there.
    ///
    /// # Errors
    /// What the system says.
    pub(crate) fn listen(&self, address: &Address) -> io::Result<Box<dyn Listener>> {
        match address {
            Address::Tcp(address) => Ok(Box::new(posix::TcpListener::bind(*address)?)),
            Address::Tls(address) => Ok(Box::new(tls::TlsListener::bind(&self.tls, *address)?)),
            Address::Shm(path) => Ok(Box::new(shm::ShmListener::bind(path)?)),
            Address::Rdma(address) => Ok(Box::new(rdma::RdmaListener::bind(self.rdma_context()?, *address)?)),
        }
    }

    /// Begins to call there.
    ///
    /// # Errors
    /// What the system says at once; more may come by [`Link::finish_call`].
    pub(crate) fn call(&self, address: &Address) -> io::Result<Box<dyn Link>> {
        match address {
            Address::Tcp(address) => Ok(Box::new(posix::TcpLink::call(*address)?)),
            Address::Tls(address) => Ok(Box::new(tls::TlsLink::call(&self.tls, *address)?)),
            Address::Shm(path) => Ok(Box::new(shm::ShmLink::call(path)?)),
            Address::Rdma(address) => Ok(Box::new(rdma::RdmaLink::call(self.rdma_context()?, *address)?)),
        }
    }

    /// Does what transports have put off and is due; when to do so again, if anything is left. A call costs next to nothing where
    /// nothing was put off.
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
    /// The address that peers on other hosts know it by, if there is one.
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

    /// Another place by the same transport.
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
