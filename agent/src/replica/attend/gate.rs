//! Gate: whether the server's new connections to its primary come to this agent, and the connection that has come.
//!
//! The rules of `remora intercept add` ([`crate::intercept`]) redirect a connection only while a timed entry stands for
//! its port. The agent makes and renews the entries by datagrams without content, from its own port to the port on
//! loopback that is meant: the rules take each datagram for an order and drop it. So the agent needs no rights, and an
//! agent that is killed or stopped loses the entries within [`ENTRY_SECONDS`]. A datagram with one byte removes an
//! entry at once. The rules act while the call that sends the datagram runs, so their effect precedes its return.

use std::collections::BTreeSet;
use std::io;
use std::net::{Ipv4Addr, Shutdown, TcpStream, UdpSocket};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tokio::time::Instant;

use crate::exit::Failure;
use crate::intercept::{ENTRY_SECONDS, REMOVING};

/// Interval at which the entries are renewed: a third of their life, so that one late renewal harms nothing.
pub(super) const RENEW_EVERY: Duration = Duration::from_secs(ENTRY_SECONDS / 3);

/// How long the server may take to close a connection that the agent has closed. A server that executes a slow command
/// notices it afterwards.
const CLOSE_LIMIT: Duration = Duration::from_secs(5);

/// Pause between two looks whether it has.
const CLOSE_LOOK: Duration = Duration::from_millis(2);

/// Whether the server's connections come here, and the one that has come. Clones are the same gate.
#[derive(Clone)]
pub(in crate::replica) struct Gate(Arc<Inner>);

struct Inner {
    socket: UdpSocket,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    is_open: bool,
    ports: BTreeSet<u16>,
    /// The server's connection: the delivery, or the passage that copies its bytes, has the same socket.
    link: Option<TcpStream>,
}

impl Gate {
    /// For connections to these ports, with the rules that listen to this port. Closed at first.
    pub(super) fn new(listen: u16, ports: BTreeSet<u16>) -> Result<Gate, Failure> {
        let no_port = |error| {
            Failure::local(format!("the UDP port 127.0.0.1:{listen} cannot be used: {error}; see --listen-port"))
        };
        let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, listen)).map_err(no_port)?;
        socket.set_nonblocking(true).map_err(no_port)?;
        Ok(Gate(Arc::new(Inner { socket, state: Mutex::new(State { ports, ..State::default() }) })))
    }

    /// New connections come here from now on. `false` if there are no rules that heed this agent.
    pub(super) fn open(&self) -> bool {
        self.state().is_open = true;
        self.renew()
    }

    /// Renews the entries of an open gate. `false` if there are no rules that heed this agent.
    pub(super) fn renew(&self) -> bool {
        let state = self.state();
        // Under the lock: an entry must not be renewed after it was removed.
        !state.is_open || self.order(&state.ports, &[])
    }

    /// Connections to these ports are meant from now on. Entries of other ports run out by themselves.
    pub(super) fn set_ports(&self, ports: BTreeSet<u16>) {
        self.state().ports = ports;
    }

    pub(super) fn is_open(&self) -> bool {
        self.state().is_open
    }

    /// New connections go to the primary from now on. Those that have come stay.
    pub(super) fn close(&self) {
        let mut state = self.state();
        state.is_open = false;
        self.order(&state.ports, REMOVING);
    }

    /// Sends an order for each port. A datagram that was dropped is reported as not permitted: the rules took it.
    fn order(&self, ports: &BTreeSet<u16>, content: &[u8]) -> bool {
        let taken = |port: &u16| {
            let sent = self.0.socket.send_to(content, (Ipv4Addr::LOCALHOST, *port));
            sent.is_err_and(|error| error.kind() == io::ErrorKind::PermissionDenied)
        };
        ports.iter().filter(|port| taken(port)).count() == ports.len()
    }

    /// Notes the server's connection.
    pub(super) fn came(&self, link: TcpStream) {
        self.state().link = Some(link);
    }

    /// Closes the gate, and then the server's connection: the server connects again by itself, to its primary. Returns
    /// when the server has closed its end too, so that what it says about its link afterwards is about another one.
    pub(in crate::replica) async fn hand_back(&self) {
        self.close();
        let Some(link) = self.state().link.take() else { return };
        // What was written before still arrives, and then the end of the stream.
        let _ = link.shutdown(Shutdown::Write);
        let until = Instant::now() + CLOSE_LIMIT;
        while !is_closed(&link) && Instant::now() < until {
            tokio::time::sleep(CLOSE_LOOK).await;
        }
        let _ = link.shutdown(Shutdown::Both);
    }

    /// The state is right after every statement, so a panic elsewhere does not invalidate it.
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether both directions of a connection have ended.
fn is_closed(link: &TcpStream) -> bool {
    let mut fds = [PollFd::new(link, PollFlags::empty())];
    match poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })) {
        Ok(_) => fds[0].revents().intersects(PollFlags::HUP | PollFlags::ERR),
        Err(_) => false,
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::net::TcpListener;

    use super::*;

    #[tokio::test]
    async fn the_server_has_closed_its_end_when_its_connection_was_handed_back() {
        let probe = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let port = probe.local_addr().unwrap().port();
        drop(probe);
        let gate = Gate::new(port, BTreeSet::from([9])).unwrap();
        assert!(Gate::new(port, BTreeSet::new()).is_err(), "the port is taken");
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let server = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        gate.came(listener.accept().unwrap().0);
        let began = Instant::now();
        let closing = std::thread::spawn(move || {
            let ended = io::Read::read(&mut &server, &mut [0; 8]).unwrap();
            std::thread::sleep(Duration::from_millis(100));
            ended
        });
        gate.hand_back().await;
        assert!(began.elapsed() >= Duration::from_millis(100) && began.elapsed() < CLOSE_LIMIT);
        assert_eq!(closing.join().unwrap(), 0, "the end of the stream");
        assert!(!gate.is_open());
    }

    #[test]
    fn without_rules_the_gate_says_so() {
        let gate = Gate::new(0, BTreeSet::from([9])).unwrap();
        assert!(gate.renew(), "a closed gate renews nothing");
        assert!(!gate.open(), "this test runs where no rules are");
    }
}
