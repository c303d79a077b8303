//! Locality: whether the replica's server runs on this host, and what its connections look like then.
//!
//! The agent's own connection to the server shows it. If both ends have the same address, and the server's end is among
//! the sockets of this network namespace, then the server can reach a listener on loopback, and other hosts cannot. The
//! end of a server in a container, whose port is forwarded to this host, is in another namespace.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener};
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;

use rustix::net::{AddressFamily, SocketFlags, SocketType};

use super::unread::owner;
use crate::exit::Failure;
use crate::server::Client;

/// Where the replica's server runs, seen from the agent.
#[derive(Clone, Copy, Debug)]
pub(super) struct Locality {
    /// The agent's address to which the server's link connects.
    pub(super) link_host: IpAddr,
    /// The server's address. Its connections can come from another one: a forwarded port, a host with several
    /// addresses.
    pub(super) server: Option<IpAddr>,
    /// The server's user id, if the server is on this host and the kernel reports it.
    pub(super) uid: Option<u32>,
}

impl Locality {
    /// Examines the connection `client`. `process_id` is what the server reports about itself.
    pub(super) fn of(client: &Client, process_id: Option<u32>) -> Locality {
        match (client.local_addr(), client.peer_addr()) {
            (Some(here), Some(there)) => Locality::between(here, there, process_id),
            // A unix socket.
            _ => Locality { link_host: IpAddr::V4(Ipv4Addr::LOCALHOST), server: None, uid: None },
        }
    }

    fn between(here: SocketAddr, there: SocketAddr, process_id: Option<u32>) -> Locality {
        let one_address = here.ip() == there.ip();
        let socket_owner = one_address.then(|| owner(there, here).ok()).flatten();
        let link_host = match (here.ip(), socket_owner) {
            (IpAddr::V4(_), Some(_)) if !here.ip().is_loopback() => Ipv4Addr::LOCALHOST.into(),
            (IpAddr::V6(_), Some(_)) if !here.ip().is_loopback() => Ipv6Addr::LOCALHOST.into(),
            (address, _) => address,
        };
        // If a proxy on this host stands between, the socket is the proxy's. So the user must be that of the server's
        // process too.
        let process_owner =
            process_id.and_then(|id| std::fs::metadata(format!("/proc/{id}")).ok()).map(|about| about.uid());
        Locality { link_host, server: Some(there.ip()), uid: socket_owner.filter(|uid| process_owner == Some(*uid)) }
    }

    /// Replaces the link's address with the one that the operator named, if any.
    pub(super) fn or_listen(self, named: Option<IpAddr>) -> Locality {
        Locality { link_host: named.unwrap_or(self.link_host), ..self }
    }

    /// Takes a port for the server's link. Calls on the listener do not wait. It listens from [`LinkPort::open`] on.
    pub(super) fn take_port(&self) -> Result<(TcpListener, LinkPort), Failure> {
        let host = self.link_host;
        let no_port = |error| cannot_listen(host, &error);
        let family = if host.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = rustix::net::socket_with(family, SocketType::STREAM, flags, None)
            .and_then(|socket| rustix::net::bind(&socket, &SocketAddr::new(host, 0)).map(|()| socket));
        let listener = TcpListener::from(socket.map_err(|error| no_port(error.into()))?);
        let address = listener.local_addr().map_err(no_port)?;
        let closed = Some(listener.try_clone().map_err(no_port)?.into());
        Ok((listener, LinkPort { address, closed }))
    }

    /// Whether a connection from this address can be the server's.
    pub(super) fn expects(&self, address: IpAddr) -> bool {
        self.link_host.is_loopback() || self.server.is_none_or(|server| server == address)
    }
}

/// The port for the server's link. It belongs to the agent from the start, and refuses connections until it is open.
pub(super) struct LinkPort {
    address: SocketAddr,
    /// The listener's socket, until it listens.
    closed: Option<OwnedFd>,
}

impl LinkPort {
    /// One that the simulation has opened.
    #[cfg(any(test, feature = "simulation"))]
    pub(super) fn opened(address: SocketAddr) -> LinkPort {
        LinkPort { address, closed: None }
    }

    pub(super) fn address(&self) -> SocketAddr {
        self.address
    }

    /// Listens, from the first call on, until the listener is dropped.
    pub(super) fn open(&mut self) -> Result<(), Failure> {
        let Some(socket) = &self.closed else { return Ok(()) };
        rustix::net::listen(socket, WAITING).map_err(|error| cannot_listen(self.address.ip(), &error.into()))?;
        self.closed = None;
        Ok(())
    }
}

impl fmt::Display for LinkPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.address.fmt(f)
    }
}

fn cannot_listen(host: IpAddr, error: &std::io::Error) -> Failure {
    Failure::local(format!("the link for the server can't listen on {host}: {error}; see --listen"))
}

/// Connections that the kernel holds until they are accepted, as of the standard library's listeners.
const WAITING: i32 = 128;

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::net::TcpStream;

    use super::*;

    #[test]
    fn a_server_that_holds_the_other_end_of_our_connection_is_on_this_host() {
        for host in ["127.0.0.1", "::1"] {
            let listener = TcpListener::bind((host, 0)).unwrap();
            let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            let _far = listener.accept().unwrap().0;
            let (here, there) = (near.local_addr().unwrap(), near.peer_addr().unwrap());
            let us = rustix::process::geteuid().as_raw();
            let found = Locality::between(here, there, Some(std::process::id()));
            assert_eq!((found.link_host, found.uid), (host.parse().unwrap(), Some(us)));
            let unsure = Locality::between(here, there, None);
            assert_eq!((unsure.link_host, unsure.uid), (host.parse().unwrap(), None));
        }
    }

    #[test]
    fn the_port_refuses_connections_before_it_is_open_and_after_the_listener_is_gone() {
        for host in ["127.0.0.1", "::1"] {
            let locality = Locality { link_host: host.parse().unwrap(), server: None, uid: None };
            let (listener, mut port) = locality.take_port().unwrap();
            assert_eq!(port.address(), listener.local_addr().unwrap());
            assert!(TcpStream::connect(port.address()).is_err());
            assert!(TcpListener::bind(port.address()).is_err(), "another process takes the port");
            port.open().unwrap();
            port.open().unwrap();
            let near = TcpStream::connect(port.address()).unwrap();
            assert_eq!(listener.accept().unwrap().1, near.local_addr().unwrap());
            drop(listener);
            assert!(TcpStream::connect(port.address()).is_err());
        }
    }

    #[test]
    fn a_server_elsewhere_is_given_the_address_by_which_we_reach_it() {
        let (here, there) = ("10.0.0.1:4000".parse().unwrap(), "10.0.0.2:6379".parse().unwrap());
        let found = Locality::between(here, there, Some(std::process::id()));
        assert_eq!((found.link_host, found.uid), (here.ip(), None));
        assert!(found.expects(there.ip()) && !found.expects(here.ip()));
        let named = found.or_listen(Some("10.0.0.9".parse().unwrap()));
        assert_eq!((named.link_host, found.or_listen(None).link_host), ("10.0.0.9".parse().unwrap(), here.ip()));
        // One address, but no socket of this network namespace: a port that is forwarded into a container.
        let forwarded = Locality::between(here, "10.0.0.1:6379".parse().unwrap(), Some(std::process::id()));
        assert_eq!((forwarded.link_host, forwarded.uid), (here.ip(), None));
    }
}
