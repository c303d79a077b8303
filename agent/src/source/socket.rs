//! Socket: the source's port, where the service manager keeps it open (`remora-source@.socket`).
//!
//! ```text
//!   systemd opens the port ══ LISTEN_FDS ══▶ source ──▶ ends ──▶ starts again ══▶ accepts
//!                                 replicas that connect meanwhile wait ──────────────╯
//! ```
//!
//! A port of the source's own is closed while the source is started again: a replica that connects meanwhile is
//! refused. The manager's port stays open, and the connection waits in the system's queue. The manager can also start
//! the source for the first connection.
//!
//! A socket is known by its name. Without one of that name, the only socket that there is counts: a manager that passes
//! one wants the source to listen there, and nowhere else.

use std::net::{Ipv4Addr, SocketAddr, TcpListener};

use remora_fabric::memory::inherited::Inherited;
use rustix::net::sockopt::{socket_acceptconn, socket_type};
use rustix::net::{AddressFamily, SocketType, getsockname};

use crate::conversation::{Security, listener};
use crate::exit::Failure;

/// The name of the socket: `FileDescriptorName=` of its unit.
const NAME: &str = "remora-listen";

/// The address without `--listen` and without a socket: this host only.
const DEFAULT: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 7379);

/// The source's port: one to open, or one that is open.
#[derive(Debug)]
pub(super) struct Port {
    address: SocketAddr,
    socket: Option<TcpListener>,
}

impl Port {
    /// Takes the socket out of what the service manager has passed. `listen` is the value of `--listen`.
    ///
    /// # Errors
    /// The socket is not one at which connections over TCP can be accepted, it has another address than `listen`, or
    /// there are several, of which none or more than one has the name.
    pub(super) fn take(inherited: &mut Vec<Inherited>, listen: Option<SocketAddr>) -> Result<Port, Failure> {
        let is_named = inherited.iter().any(|passed| passed.name == NAME);
        let is_meant = |passed: &Inherited| match is_named {
            true => passed.name == NAME,
            false => getsockname(&passed.descriptor).is_ok(),
        };
        let (mut sockets, others): (Vec<_>, Vec<_>) = std::mem::take(inherited).into_iter().partition(is_meant);
        *inherited = others;
        if sockets.len() > 1 {
            let text = format!(
                "the service manager passed {} sockets to listen on: leave one ListenStream= in the socket unit, or set \
                 FileDescriptorName={NAME} for the one that is meant",
                sockets.len()
            );
            return Err(Failure::refused(text));
        }
        let Some(socket) = sockets.pop() else {
            return Ok(Port { address: listen.unwrap_or(DEFAULT), socket: None });
        };
        let (address, socket) = checked(socket)?;
        if let Some(listen) = listen.filter(|listen| *listen != address) {
            let text = format!(
                "--listen is {listen}, and the service manager passed a socket that listens on {address}: \
                 omit --listen, or set ListenStream={listen} in the socket unit"
            );
            return Err(Failure::refused(text));
        }
        Ok(Port { address, socket: Some(socket) })
    }

    /// Its address. The port is 0 if any free one was requested.
    pub(super) fn address(&self) -> SocketAddr {
        self.address
    }

    /// Opens it, if it is not open. The address returned has the actual port.
    ///
    /// # Errors
    /// The address cannot be bound, or connections to it would not be protected.
    pub(super) async fn open(self, security: &Security) -> Result<(tokio::net::TcpListener, SocketAddr), Failure> {
        match self.socket {
            Some(socket) => listener::adopt(socket, self.address, security, "the source", "ListenStream="),
            None => listener::bind(self.address, security, "the source", "--listen").await,
        }
    }
}

/// The socket, if connections over TCP can be accepted at it, and its address.
fn checked(Inherited { name, descriptor: socket }: Inherited) -> Result<(SocketAddr, TcpListener), Failure> {
    let refused = |what: &str| {
        let text =
            format!("the socket {name:?} of the service manager {what}: it must be one of ListenStream=ADDRESS:PORT");
        Err(Failure::refused(text))
    };
    let family = getsockname(&socket).map(|address| address.address_family());
    if !matches!(family, Ok(AddressFamily::INET | AddressFamily::INET6)) {
        return refused("has no address of a network");
    }
    if socket_type(&socket) != Ok(SocketType::STREAM) || socket_acceptconn(&socket) != Ok(true) {
        return refused("accepts no connections (with Accept=yes, set Accept=no)");
    }
    let socket = TcpListener::from(socket);
    match socket.local_addr() {
        Ok(address) => Ok((address, socket)),
        Err(error) => refused(&format!("has no address ({error})")),
    }
}

/// Logs that sockets were passed to another process, such as a shell that has started this one.
pub(super) fn tell_of_another_process() {
    let number = |name: &str| std::env::var(name).ok()?.parse::<u32>().ok();
    if let (Some(process), Some(1..)) = (number("LISTEN_PID"), number("LISTEN_FDS"))
        && process != std::process::id()
    {
        tracing::warn!(
            "the service manager passed sockets to process {process}, and this is another one: they are not used; start \
             remora itself, or by exec"
        );
    }
}

/// Logs what the service manager has passed and nothing has taken.
pub(super) fn tell_of_others<'a>(names: impl Iterator<Item = &'a String>) {
    for name in names {
        tracing::warn!(name, "the service manager passed a descriptor that the source does not know");
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::net::UdpSocket;
    use std::os::fd::OwnedFd;
    use std::os::unix::net::UnixListener;

    use super::*;

    fn passed(name: &str, descriptor: impl Into<OwnedFd>) -> Inherited {
        Inherited { name: name.into(), descriptor: descriptor.into() }
    }

    fn listening() -> (TcpListener, SocketAddr) {
        let socket = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = socket.local_addr().unwrap();
        (socket, address)
    }

    #[test]
    fn the_socket_is_taken_and_what_else_was_passed_stays() {
        let ((socket, address), (other, _)) = (listening(), listening());
        let mut inherited = vec![passed("else", other), passed(NAME, socket)];
        let port = Port::take(&mut inherited, None).unwrap();
        assert_eq!(port.address(), address);
        assert_eq!(port.socket.unwrap().local_addr().unwrap(), address);
        assert_eq!(inherited.iter().map(|passed| &passed.name).collect::<Vec<_>>(), ["else"]);
    }

    #[test]
    fn without_a_socket_the_option_counts_and_without_both_this_host_is_served() {
        let listen: SocketAddr = "10.0.0.5:7".parse().unwrap();
        let port = Port::take(&mut Vec::new(), Some(listen)).unwrap();
        assert_eq!((port.address(), port.socket.is_none()), (listen, true));
        let port = Port::take(&mut Vec::new(), None).unwrap();
        assert_eq!(port.address().to_string(), "127.0.0.1:7379");
    }

    #[test]
    fn a_socket_elsewhere_than_the_option_says_is_refused_with_both_addresses() {
        let (socket, address) = listening();
        let same = socket.try_clone().unwrap();
        let listen = SocketAddr::new(address.ip(), address.port() ^ 1);
        let failure = Port::take(&mut vec![passed(NAME, socket)], Some(listen)).unwrap_err();
        for part in [listen.to_string(), address.to_string()] {
            assert!(failure.message.contains(&part), "{}", failure.message);
        }
        assert!(Port::take(&mut vec![passed(NAME, same)], Some(address)).is_ok());
    }

    #[test]
    fn a_socket_of_another_kind_and_a_second_one_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let unix = UnixListener::bind(folder.path().join("socket")).unwrap();
        let refused = |inherited: Vec<Inherited>, why: &str| {
            let mut inherited = inherited;
            let failure = Port::take(&mut inherited, None).unwrap_err();
            assert!(failure.message.contains(why), "{}", failure.message);
        };
        refused(vec![passed(NAME, unix)], "no address of a network");
        refused(vec![passed(NAME, UdpSocket::bind("127.0.0.1:0").unwrap())], "accepts no connections");
        let (socket, address) = listening();
        refused(vec![passed(NAME, std::net::TcpStream::connect(address).unwrap())], "accepts no connections");
        refused(vec![passed(NAME, std::fs::File::open("/dev/null").unwrap())], "no address of a network");
        refused(vec![passed(NAME, socket), passed(NAME, listening().0)], "2 sockets");
    }

    #[test]
    fn a_socket_of_another_name_or_none_is_taken_if_it_is_the_only_one_and_never_passed_over() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["", "unknown", "remora-source@6379.socket"] {
            let (socket, address) = listening();
            let file = std::fs::File::open("/dev/null").unwrap();
            let mut inherited = vec![passed("remora-journal", file), passed(name, socket)];
            let port = Port::take(&mut inherited, None).unwrap();
            assert_eq!((port.address(), port.socket.is_some(), inherited.len()), (address, true, 1), "{name:?}");

            let several = Port::take(&mut vec![passed(name, listening().0), passed("", listening().0)], None);
            let said = several.unwrap_err().message;
            assert!(said.contains("2 sockets") && said.contains("FileDescriptorName=remora-listen"), "{said}");
            let unix = UnixListener::bind(folder.path().join(format!("socket{name}"))).unwrap();
            let said = Port::take(&mut vec![passed(name, unix)], None).unwrap_err().message;
            assert!(said.contains("no address of a network"), "{said}");
        }
    }
}
