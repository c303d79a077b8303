//! TCP sockets. Every method of [`super::Link`] is one system call.

use std::io::{self, IoSlice, IoSliceMut};
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};

use rustix::net::{SendAncillaryBuffer, SendFlags, sendmsg, sockopt};
use socket2::{Domain, Protocol, Socket, Type};

use super::{Address, Link, Listener};

/// A TCP connection.
pub struct TcpLink {
    socket: Socket,
    peer: SocketAddr,
}

impl TcpLink {
    /// Begins to connect.
    pub(super) fn call(peer: SocketAddr) -> io::Result<TcpLink> {
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
    pub(super) fn bind(address: SocketAddr) -> io::Result<TcpListener> {
        let socket = socket_for(address)?;
        socket.set_reuse_address(true)?;
        socket.bind(&address.into())?;
        socket.listen(BACKLOG)?;
        let address = socket.local_addr()?.as_socket().ok_or(io::ErrorKind::AddrNotAvailable)?;
        Ok(TcpListener { socket, address })
    }

    /// Accepts the next connection.
    pub(super) fn take(&mut self) -> io::Result<TcpLink> {
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
