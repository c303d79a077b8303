//! Unread: how many of the bytes that were given to a connection its other end has not read yet.
//!
//! The receiver reads bytes that were lent to a socket (`sendfile`) in its own time, and the lender must know when. A
//! TCP acknowledgement does not tell: it means "queued at the receiver". On a connection within this host both queues
//! are here, and the kernel reports their lengths (sock_diag(7), which `ss` uses).
//!
//! ```text
//!   written ──▶ [ our send queue: not acknowledged ] ──▶ [ their receive queue: not read ] ──▶ read
//! ```
//!
//! The send queue is asked for first. A byte that leaves it between the two questions is then counted in the receive
//! queue or has been read: the answer can be too high, never too low.

use std::io;
use std::net::{SocketAddr, TcpStream};

use netlink_packet_core::{NLM_F_REQUEST, NetlinkHeader, NetlinkMessage, NetlinkPayload};
use netlink_packet_sock_diag::SockDiagMessage;
use netlink_packet_sock_diag::constants::{AF_INET, AF_INET6, IPPROTO_TCP};
use netlink_packet_sock_diag::inet::{ExtensionFlags, InetRequest, InetResponseHeader, SocketId, StateFlags};
use netlink_sys::protocols::NETLINK_SOCK_DIAG;
use netlink_sys::{Socket, SocketAddr as Port};

/// A query for the bytes of a connection that its other end has not read.
pub(super) struct Unread {
    system: Socket,
    ours: Vec<u8>,
    theirs: Vec<u8>,
}

/// Any socket with these addresses, whatever its number: INET_DIAG_NOCOOKIE.
const NO_COOKIE: [u8; 8] = [0xff; 8];

/// An answer about one socket: 72 bytes and a few attributes.
const ANSWER_BYTES: usize = 4096;

impl Unread {
    /// Of this connection; both its ends are on this host.
    ///
    /// # Errors
    /// `Unsupported` if an end is on another host; the kernel's error if it has no sock_diag.
    pub(super) fn of(connection: &TcpStream) -> io::Result<Unread> {
        let (here, there) = (connection.local_addr()?, connection.peer_addr()?);
        if !here.ip().is_loopback() || !there.ip().is_loopback() {
            return Err(io::Error::from(io::ErrorKind::Unsupported));
        }
        let mut unread = Unread { system: system()?, ours: question(here, there), theirs: question(there, here) };
        unread.bytes()?;
        Ok(unread)
    }

    /// An upper bound of the unread bytes at this moment.
    ///
    /// # Errors
    /// `NotFound` when the connection is gone.
    pub(super) fn bytes(&mut self) -> io::Result<u64> {
        let unacknowledged = ask(&self.system, &self.ours)?.send_queue;
        let unread = ask(&self.system, &self.theirs)?.recv_queue;
        Ok(u64::from(unacknowledged) + u64::from(unread))
    }
}

/// The user whose process made or accepted the socket at `here` that is connected with `there`.
///
/// # Errors
/// `NotFound` if there is no such socket in this network namespace; the kernel's error if it has no sock_diag.
pub(super) fn owner(here: SocketAddr, there: SocketAddr) -> io::Result<u32> {
    Ok(ask(&system()?, &question(here, there))?.uid)
}

/// The number of the socket at `here` that is connected with `there`, as `/proc/PID/fd` shows it.
///
/// # Errors
/// As [`owner`].
pub(super) fn inode(here: SocketAddr, there: SocketAddr) -> io::Result<u32> {
    Ok(ask(&system()?, &question(here, there))?.inode)
}

/// A sock_diag(7) socket.
fn system() -> io::Result<Socket> {
    let mut system = Socket::new(NETLINK_SOCK_DIAG)?;
    system.bind_auto()?;
    system.connect(&Port::new(0, 0))?;
    // The answer is there when the question has been sent.
    system.set_non_blocking(true)?;
    Ok(system)
}

fn ask(system: &Socket, question: &[u8]) -> io::Result<InetResponseHeader> {
    system.send(question, 0)?;
    let mut answer = Vec::with_capacity(ANSWER_BYTES);
    system.recv(&mut answer, 0)?;
    let answer = NetlinkMessage::<SockDiagMessage>::deserialize(&answer).map_err(io::Error::other)?;
    match answer.payload {
        NetlinkPayload::InnerMessage(SockDiagMessage::InetResponse(response)) => Ok(response.header),
        NetlinkPayload::Error(error) => Err(error.to_io()),
        other => Err(io::Error::other(format!("the system answers {other:?} when asked about a socket"))),
    }
}

/// The question about the socket at `here` that is connected with `there`.
fn question(here: SocketAddr, there: SocketAddr) -> Vec<u8> {
    let request = InetRequest {
        family: if here.is_ipv4() { AF_INET } else { AF_INET6 },
        protocol: IPPROTO_TCP,
        extensions: ExtensionFlags::empty(),
        states: StateFlags::all(),
        socket_id: SocketId {
            source_port: here.port(),
            destination_port: there.port(),
            source_address: here.ip(),
            destination_address: there.ip(),
            interface_id: 0,
            cookie: NO_COOKIE,
        },
    };
    let mut header = NetlinkHeader::default();
    header.flags = NLM_F_REQUEST;
    let mut message = NetlinkMessage::new(header, SockDiagMessage::InetRequest(request).into());
    message.finalize();
    let mut bytes = vec![0; message.buffer_len()];
    message.serialize(&mut bytes);
    bytes
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::io::{Read, Write};
    use std::net::TcpListener;

    use super::*;

    fn connection(host: &str) -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind((host, 0)).unwrap();
        let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (near, listener.accept().unwrap().0)
    }

    #[test]
    fn what_was_written_is_unread_until_it_was_read() {
        for host in ["127.0.0.1", "::1"] {
            let (mut near, mut far) = connection(host);
            let mut unread = Unread::of(&near).unwrap();
            assert_eq!(unread.bytes().unwrap(), 0);
            near.write_all(&[7; 10_000]).unwrap();
            assert_eq!(unread.bytes().unwrap(), 10_000);
            far.read_exact(&mut [0; 4_000]).unwrap();
            assert_eq!(unread.bytes().unwrap(), 6_000);
            far.read_exact(&mut [0; 6_000]).unwrap();
            assert_eq!(unread.bytes().unwrap(), 0);
        }
    }

    #[test]
    fn both_ends_of_a_connection_within_this_process_are_ours() {
        let (near, far) = connection("127.0.0.1");
        let (one, other) = (near.local_addr().unwrap(), far.local_addr().unwrap());
        let us = rustix::process::geteuid().as_raw();
        assert_eq!((owner(one, other).unwrap(), owner(other, one).unwrap()), (us, us));
        drop((near, far));
        assert_eq!(owner(other, one).unwrap_err().kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn a_connection_that_is_gone_has_no_answer() {
        let (near, far) = connection("127.0.0.1");
        let mut unread = Unread::of(&near).unwrap();
        drop((near, far));
        assert!(unread.bytes().is_err());
    }
}
