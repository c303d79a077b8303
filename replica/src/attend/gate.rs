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
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tokio::time::Instant;

use crate::intercept::{ENTRY_SECONDS, REMOVING};
use remora_process::exit::Failure;

/// Interval at which the entries are renewed: a third of their life, so that one late renewal harms nothing.
pub(super) const RENEW_EVERY: Duration = Duration::from_secs(ENTRY_SECONDS / 3);

/// How long the server may take to close a connection that the agent has closed. A server that executes a slow command
/// notices it afterwards.
const CLOSE_LIMIT: Duration = Duration::from_secs(5);

/// Pause between two looks whether it has.
const CLOSE_LOOK: Duration = Duration::from_millis(2);

/// Whether the server's connections come here, and the one that has come. Clones are the same gate.
#[derive(Clone)]
pub(crate) struct Gate(Arc<Inner>);

struct Inner {
    socket: UdpSocket,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    is_open: bool,
    ports: BTreeSet<u16>,
    /// The server's connection. The delivery, or the passage that copies its bytes, owns it and ends it.
    link: Option<Arc<TcpStream>>,
}

impl State {
    /// Notes the server's connection.
    fn serve(&mut self, link: impl AsFd) -> io::Result<Served> {
        let link = Arc::new(TcpStream::from(link.as_fd().try_clone_to_owned()?));
        self.link = Some(Arc::clone(&link));
        Ok(Served(link))
    }
}

/// The service of a connection that the gate looks at too. Its end ends the connection towards the server, which the
/// end of one descriptor does not do while the gate has another one.
#[must_use = "the connection ends with it"]
pub(crate) struct Served(Arc<TcpStream>);

impl Drop for Served {
    fn drop(&mut self) {
        // What was written before still arrives. An error means that the connection has ended already.
        let _ = self.0.shutdown(Shutdown::Write);
    }
}

impl Gate {
    /// For connections to these ports, with the rules that listen to this port. Closed at first.
    pub(super) fn new(listen: u16, ports: BTreeSet<u16>) -> Result<Gate, Failure> {
        let no_port = |error| {
            Failure::local(format!(
                "the UDP port 127.0.0.1:{listen} cannot be used: {error}; give another port by --listen-port, here and to remora intercept add"
            ))
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

    /// Notes the server's connection, by a descriptor of its own. The connection ends with what is returned: keep it
    /// beside the descriptor that serves the server.
    pub(super) fn came(&self, link: impl AsFd) -> io::Result<Served> {
        self.state().serve(link)
    }

    /// As [`Gate::came`], if the gate is open. `None` if it has been closed: the connections that had come by then were
    /// ended, and this one must end too.
    pub(super) fn came_in_time(&self, link: impl AsFd) -> io::Result<Option<Served>> {
        // Under one lock: `hand_back` closes the gate before it takes the connection.
        let mut state = self.state();
        state.is_open.then(|| state.serve(link)).transpose()
    }

    /// Closes the gate, and then the server's connection: the server connects again by itself, to its primary. Returns
    /// when the server has closed its end too, so that what it says about its link afterwards is about another one.
    pub(crate) async fn hand_back(&self) {
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
        let (link, _) = listener.accept().unwrap();
        let _served = gate.came(&link).unwrap();
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

    /// A connection whose serving end is closed ends at once, though the gate has a descriptor of it: with what was
    /// written before, and also if it is never handed back.
    #[test]
    fn a_connection_ends_with_its_service() {
        let gate = Gate::new(0, BTreeSet::new()).unwrap();
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        for writes in [true, false] {
            let mut server = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            server.set_read_timeout(Some(CLOSE_LIMIT)).unwrap();
            let (mut link, _) = listener.accept().unwrap();
            let served = gate.came(&link).unwrap();
            if writes {
                io::Write::write_all(&mut link, b"+FULLRESYNC").unwrap();
            }
            drop((link, served));
            let mut read = Vec::new();
            io::Read::read_to_end(&mut server, &mut read).unwrap();
            assert_eq!(read, if writes { &b"+FULLRESYNC"[..] } else { b"" });
        }
    }

    /// The driver closes the gate while the attending task decides on a connection.
    #[tokio::test]
    async fn a_connection_that_comes_after_the_gate_was_closed_is_not_served() {
        let gate = Gate::new(0, BTreeSet::new()).unwrap();
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let server = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (link, _) = listener.accept().unwrap();
        gate.open();
        assert!(gate.came_in_time(&link).unwrap().is_some());
        drop(server);
        gate.hand_back().await;
        let server = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (link, _) = listener.accept().unwrap();
        assert!(gate.came_in_time(&link).unwrap().is_none());
        assert!(gate.state().link.is_none(), "a later hand-over ends nothing");
        drop(server);
    }

    #[test]
    fn without_rules_the_gate_says_so() {
        let gate = Gate::new(0, BTreeSet::from([9])).unwrap();
        assert!(gate.renew(), "a closed gate renews nothing");
        assert!(!gate.open(), "this test runs where no rules are");
    }
}
