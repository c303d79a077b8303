//! Listener: a socket with an address, and who may open it.

use std::fs::{self, DirBuilder, Permissions};
use std::io;
use std::net::TcpListener;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Mutex;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use super::Address;

/// A listening socket. The file of a unix socket is removed with it.
pub(super) enum Listener {
    Unix(OwnedFd, Address),
    Tcp(TcpListener),
}

impl Listener {
    pub(super) fn bind(address: &Address) -> io::Result<Listener> {
        match address {
            Address::Unix(path) => Ok(Listener::Unix(unix(path)?, address.clone())),
            Address::Tcp(address) => {
                let listener = TcpListener::bind(address)?;
                listener.set_nonblocking(true)?;
                Ok(Listener::Tcp(listener))
            }
        }
    }

    pub(super) fn address(&self) -> io::Result<Address> {
        match self {
            Listener::Unix(_, address) => Ok(address.clone()),
            Listener::Tcp(listener) => listener.local_addr().map(Address::Tcp),
        }
    }

    /// The next connection, and its peer. Waits for it, or for the waker: `None`.
    pub(super) fn accept(&self, waker: &Waker) -> io::Result<Option<(OwnedFd, String)>> {
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
pub(super) struct Waker {
    wakes: UnixStream,
    /// Closed by [`Waker::wake`].
    other: Mutex<Option<UnixStream>>,
}

impl Waker {
    pub(super) fn new() -> io::Result<Waker> {
        let (wakes, other) = UnixStream::pair()?;
        Ok(Waker { wakes, other: Mutex::new(Some(other)) })
    }

    /// For good.
    pub(super) fn wake(&self) {
        self.other.lock().unwrap_or_else(std::sync::PoisonError::into_inner).take();
    }
}

/// Connections that wait to be accepted.
const BACKLOG: i32 = 64;
