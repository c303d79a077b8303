//! Candidates: connections to the link's port that have not yet shown that they are the server's.
//!
//! ```text
//!   listener ── accept ──▶ Candidate ── AUTH, REPLCONF, PSYNC ──▶ Newcomer: the server's link
//!                              │
//!                              └── not in time, no room, another user, not a replica ──▶ closed
//! ```
//!
//! Any process that reaches the port can connect. A connection replaces the server's link only after its peer has
//! logged in and sent `PSYNC`. Until then the link does not notice it. It costs one socket, and their number is
//! bounded.
//!
//! The login keeps strangers out. The other rules let the server in while strangers use up the places: a connection
//! from the server's address then replaces a connection from another address, or one that has not logged in in time.

use std::io;
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use remora_redis::ReplId;
use remora_redis::psync::server::{Access, Event, Options, Server as PrimaryRole};
use rustix::event::PollFlags;
use rustix::net::sockopt;
use rustls::{ServerConfig, ServerConnection};

use super::attend::gate::Served;
use super::link::Link;
use super::link_failure::LinkFailure;
use super::locality::Locality;
use super::unread::owner;
use crate::conversation::listener::Rejections;

/// Connections that may wait at a time. A server makes one.
const PLACES: usize = 4;

/// How long a connection may take until it sends `PSYNC`. A server needs a few round trips, and longer while it
/// executes a slow command. A server that is closed here connects again.
const TIME_LIMIT: Duration = Duration::from_secs(5);

/// How long a connection that has not logged in keeps its place. A server logs in at once.
const LOGIN_GRACE: Duration = Duration::from_millis(500);

/// Connections accepted in one turn of the loop. The bound keeps a flood of strangers from delaying the delivery.
const ACCEPTS_PER_TURN: usize = 16;

/// Reads from one connection in one turn, for the same reason. A server's whole login fits into one read.
const READS_PER_TURN: usize = 4;

/// Connections to the link's port that have not logged in and asked for a sync yet.
pub(super) struct Candidates {
    /// `None` if connections are handed over by an attending agent only.
    listener: Option<TcpListener>,
    /// Whether the listener listens: the server may come.
    is_open: bool,
    tls: Option<Arc<ServerConfig>>,
    access: Access,
    locality: Locality,
    /// Oldest first.
    waiting: Vec<Candidate>,
    /// Whether the log has a warning about a wrong password. A second one would let a stranger fill the log.
    warned: bool,
    failure: LinkFailure,
    /// Connections that were closed before they had logged in.
    strangers: u64,
    rejections: Rejections,
}

struct Candidate {
    peer: SocketAddr,
    since: Instant,
    /// Whether its address is the server's.
    is_expected: bool,
    link: Link,
    role: PrimaryRole,
    out: Vec<u8>,
    written: usize,
}

/// A connection that has logged in and sent `PSYNC`: the server's new link.
pub(super) struct Newcomer {
    pub(super) peer: SocketAddr,
    pub(super) link: Link,
    pub(super) role: PrimaryRole,
    /// Answers to the server; those up to `written` have been sent.
    pub(super) out: Vec<u8>,
    pub(super) written: usize,
    /// What `PSYNC` asked for: the replid of its history and the offset of the next byte.
    pub(super) replid: Option<ReplId>,
    pub(super) offset: i64,
}

impl Candidates {
    /// Takes a listener in non-blocking mode, which may not listen yet.
    pub(super) fn new(
        listener: TcpListener,
        tls: Option<Arc<ServerConfig>>,
        access: Access,
        locality: Locality,
    ) -> Candidates {
        let failure = LinkFailure::default();
        let is_open = sockopt::socket_acceptconn(&listener).unwrap_or(true);
        Candidates {
            listener: Some(listener),
            is_open,
            tls,
            access,
            locality,
            waiting: Vec::new(),
            warned: false,
            failure,
            strangers: 0,
            rejections: Rejections::default(),
        }
    }

    /// Without a port: the server's connections are intercepted, and come as [`Newcomer`]s.
    pub(super) fn without_a_port() -> Candidates {
        let locality = Locality { link_host: Ipv4Addr::LOCALHOST.into(), server: None, uid: None };
        Candidates {
            listener: None,
            is_open: false,
            tls: None,
            access: Access::Open,
            locality,
            waiting: Vec::new(),
            warned: false,
            failure: LinkFailure::default(),
            strangers: 0,
            rejections: Rejections::default(),
        }
    }

    /// The listener listens from now on.
    pub(super) fn opened(&mut self) {
        self.is_open = self.listener.is_some();
    }

    /// Where it is noted why a connection did not become the link.
    pub(super) fn failure(&self) -> LinkFailure {
        self.failure.clone()
    }

    /// How many connections were closed before they had logged in.
    pub(super) fn strangers(&self) -> u64 {
        self.strangers
    }

    /// Continues all conversations without waiting. Returns the first that became the server's link; call it again for
    /// more.
    pub(super) fn turn(&mut self, now: Instant) -> Option<Newcomer> {
        // Closed connections free their places before new ones are accepted.
        if let Some(newcomer) = self.hear(now) {
            return Some(newcomer);
        }
        self.accept(now);
        self.hear(now)
    }

    fn accept(&mut self, now: Instant) {
        if !self.is_open {
            return;
        }
        for _ in 0..ACCEPTS_PER_TURN {
            let Some(listener) = &self.listener else { return };
            match listener.accept() {
                Ok((socket, peer)) => self.admit(socket, peer, now),
                Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => break,
                Err(error) => {
                    tracing::warn!(%error, "a connection to the link could not be accepted");
                    break;
                }
            }
        }
    }

    fn hear(&mut self, now: Instant) -> Option<Newcomer> {
        let mut at = 0;
        while let Some(candidate) = self.waiting.get_mut(at) {
            match candidate.turn(now) {
                Ok(None) => at += 1,
                Ok(Some((replid, offset))) => {
                    let Candidate { peer, mut link, role, out, written, .. } = self.waiting.remove(at);
                    link.look_at_what_is_unread();
                    return Some(Newcomer { peer, link, role, out, written, replid, offset });
                }
                Err(why) => {
                    let candidate = self.waiting.remove(at);
                    self.closed(&candidate, &why);
                }
            }
        }
        None
    }

    /// The descriptors to poll.
    pub(super) fn fds(&self) -> impl Iterator<Item = (BorrowedFd<'_>, PollFlags)> {
        let waiting = self.waiting.iter().map(|candidate| {
            let has_more = candidate.written < candidate.out.len() || candidate.link.wants_write();
            let write = if has_more { PollFlags::OUT } else { PollFlags::empty() };
            (candidate.link.as_fd(), PollFlags::IN | write)
        });
        let listener =
            self.listener.as_ref().filter(|_| self.is_open).map(|listener| (listener.as_fd(), PollFlags::IN));
        listener.into_iter().chain(waiting)
    }

    /// The earliest deadline of a connection.
    pub(super) fn due(&self) -> Option<Instant> {
        self.waiting.iter().map(|candidate| candidate.since + TIME_LIMIT).min()
    }

    /// Gives a connection a place, or closes it.
    fn admit(&mut self, socket: TcpStream, peer: SocketAddr, now: Instant) {
        if let Some(uid) = self.stranger(&socket, peer) {
            self.stranger_closed(peer, &format!("it is another user's than the server's (uid {uid})"));
            return;
        }
        let is_expected = self.locality.expects(peer.ip());
        if self.waiting.len() >= PLACES {
            let Some(at) = self.to_give_way(is_expected, now) else {
                self.stranger_closed(peer, &format!("{PLACES} wait already"));
                return;
            };
            let candidate = self.waiting.remove(at);
            self.closed(&candidate, "another connection needs its place");
        }
        match Link::new(socket, peer, self.tls.as_ref()) {
            Ok(link) => self.waiting.push(Candidate {
                peer,
                since: now,
                is_expected,
                link,
                role: PrimaryRole::new(Options { access: self.access.clone() }),
                out: Vec::new(),
                written: 0,
            }),
            Err(error) => {
                self.stranger_closed(peer, &error.to_string());
                self.failure.note(peer, &error.to_string());
            }
        }
    }

    /// The user id of the peer if it is certainly not the server: a process on this host that runs as another user.
    fn stranger(&self, socket: &TcpStream, peer: SocketAddr) -> Option<u32> {
        let server = self.locality.uid?;
        let uid = owner(peer, socket.local_addr().ok()?).ok()?;
        (uid != server).then_some(uid)
    }

    /// The candidate that a new connection replaces when all places are taken.
    fn to_give_way(&self, newcomer_is_expected: bool, now: Instant) -> Option<usize> {
        let without_login = |candidate: &Candidate| !candidate.role.is_authenticated();
        let from_elsewhere = |candidate: &Candidate| without_login(candidate) && !candidate.is_expected;
        let slow = |candidate: &Candidate| {
            without_login(candidate) && now.saturating_duration_since(candidate.since) >= LOGIN_GRACE
        };
        let elsewhere = self.waiting.iter().position(from_elsewhere).filter(|_| newcomer_is_expected);
        elsewhere.or_else(|| self.waiting.iter().position(slow))
    }

    fn closed(&mut self, candidate: &Candidate, why: &str) {
        let peer = candidate.peer;
        if candidate.role.is_authenticated() {
            tracing::debug!(%peer, "a connection to the link is closed: {why}");
            return self.failure.note(peer, why);
        }
        let is_refused = candidate.role.refused_logins() > 0;
        let why = if is_refused { "it gave a wrong password" } else { why };
        self.stranger_closed(peer, why);
        self.failure.note(peer, why);
        if is_refused && !self.warned {
            self.warned = true;
            tracing::warn!(
                %peer,
                "a connection to the link gave a wrong password and was closed; if it was the server, another client has changed its \
                 masterauth"
            );
        }
    }

    /// Counts a connection that was closed before it had logged in, and names its address in the log. During a flood
    /// the log has a line every ten seconds.
    fn stranger_closed(&mut self, peer: SocketAddr, why: &str) {
        self.strangers += 1;
        self.rejections.add(|| {
            tracing::info!(%peer, "a connection to the link's port was closed before it had logged in: {why}");
        });
    }
}

impl Newcomer {
    /// A connection whose handshake was with the true primary, up to and including `PSYNC`, which waits for its answer.
    /// `heard` is what the server has said in it.
    pub(super) fn intercepted(
        socket: TcpStream,
        tls: Option<Box<ServerConnection>>,
        peer: SocketAddr,
        heard: &[u8],
        served: Served,
    ) -> io::Result<Newcomer> {
        let mut role = PrimaryRole::new(Options { access: Access::Open });
        role.handle_input(heard).map_err(io::Error::other)?;
        // The true primary has given the answers.
        drop(role.take_output());
        let Some(Event::Psync { replid, offset }) = role.poll_event() else {
            return Err(io::Error::other("the server has not asked to be synchronised"));
        };
        let mut link = Link::intercepted(socket, peer, tls, served)?;
        link.look_at_what_is_unread();
        Ok(Newcomer { peer, link, role, out: Vec::new(), written: 0, replid, offset })
    }
}

impl Candidate {
    /// Reads commands and answers them. The error says why the connection is closed.
    fn turn(&mut self, now: Instant) -> Result<Option<(Option<ReplId>, i64)>, String> {
        let mut buffer = [0; 4096];
        for _ in 0..READS_PER_TURN {
            match self.link.read(&mut buffer).map_err(|error| error.to_string())? {
                None => break,
                Some(0) => return Err("the peer closed it".into()),
                Some(n) => self.role.handle_input(&buffer[..n]).map_err(|error| error.to_string())?,
            }
            // After PSYNC the peer waits for an answer, which the delivery gives.
            if let Some(Event::Psync { replid, offset }) = self.role.poll_event() {
                self.out.extend(self.role.take_output());
                return Ok(Some((replid, offset)));
            }
        }
        self.out.extend(self.role.take_output());
        self.link.write_out(&mut self.out, &mut self.written).map_err(|error| error.to_string())?;
        if now.saturating_duration_since(self.since) >= TIME_LIMIT {
            return Err(format!("it has not asked to be synchronised within {} s", TIME_LIMIT.as_secs()));
        }
        Ok(None)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::io::{Read, Write};
    use std::net::IpAddr;

    use super::*;

    const LOCAL: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

    fn anywhere() -> Locality {
        Locality { link_host: LOCAL, server: None, uid: None }
    }

    fn candidates(locality: Locality) -> (Candidates, SocketAddr) {
        let listener = TcpListener::bind((LOCAL, 0)).unwrap();
        listener.set_nonblocking(true).unwrap();
        let address = listener.local_addr().unwrap();
        (Candidates::new(listener, None, Access::Secret("5ec4e7".into()), locality), address)
    }

    fn connect(to: SocketAddr) -> TcpStream {
        let peer = TcpStream::connect(to).unwrap();
        peer.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        peer
    }

    /// Turns the loop until a connection becomes the link, for a short time at most.
    fn turn(candidates: &mut Candidates, now: Instant) -> Option<Newcomer> {
        (0..50).find_map(|_| {
            std::thread::sleep(Duration::from_millis(1));
            candidates.turn(now)
        })
    }

    /// All that the peer can read now, and whether it reached the end of the stream.
    fn said(peer: &mut TcpStream) -> (String, bool) {
        let (mut text, mut buffer) = (Vec::new(), [0; 4096]);
        peer.set_nonblocking(true).unwrap();
        let over = loop {
            match peer.read(&mut buffer) {
                Ok(0) => break true,
                Ok(n) => text.extend_from_slice(&buffer[..n]),
                Err(error) => break error.kind() != io::ErrorKind::WouldBlock,
            }
        };
        (String::from_utf8(text).unwrap(), over)
    }

    #[test]
    fn who_logs_in_and_asks_becomes_the_link_and_the_others_wait() {
        let (mut candidates, address) = candidates(anywhere());
        let now = Instant::now();
        let (mut silent, mut wrong, mut server) = (connect(address), connect(address), connect(address));
        wrong.write_all(b"AUTH 5ec4e8\r\nREPLCONF capa eof\r\nPSYNC ? -1\r\n").unwrap();
        assert!(turn(&mut candidates, now).is_none());
        server.write_all(b"PING\r\nAUTH masteruser 5ec4e7\r\n").unwrap();
        assert!(turn(&mut candidates, now).is_none());
        assert_eq!(candidates.waiting.len(), 3);
        let id = "8c1c6b2f0d6a4e7b9a0f1e2d3c4b5a6978695a4b";
        server.write_all(format!("REPLCONF capa eof\r\nPSYNC {id} 42\r\n").as_bytes()).unwrap();
        let newcomer = turn(&mut candidates, now).unwrap();
        assert_eq!((newcomer.replid, newcomer.offset), (Some(id.parse().unwrap()), 42));
        assert!(newcomer.role.peer().eof);
        assert_eq!(candidates.waiting.len(), 2);
        assert_eq!(said(&mut silent), (String::new(), false));
        let (answers, _) = said(&mut wrong);
        assert!(answers.starts_with("-WRONGPASS") && answers.matches("-NOAUTH").count() == 2, "{answers}");
    }

    #[test]
    fn who_does_not_ask_in_time_is_closed() {
        let (mut candidates, address) = candidates(anywhere());
        let now = Instant::now();
        let (mut silent, mut talker) = (connect(address), connect(address));
        talker.write_all(b"AUTH 5ec4e7\r\nPING\r\n").unwrap();
        assert!(turn(&mut candidates, now).is_none());
        assert_eq!(candidates.due(), Some(now + TIME_LIMIT));
        assert!(turn(&mut candidates, now + TIME_LIMIT).is_none());
        assert!(candidates.waiting.is_empty() && candidates.due().is_none());
        assert_eq!(candidates.strangers(), 1, "the talker has logged in");
        assert!(said(&mut silent).1 && said(&mut talker).1);
    }

    #[test]
    fn when_all_places_are_taken_a_new_connection_is_closed_at_once() {
        let (mut candidates, address) = candidates(anywhere());
        let now = Instant::now();
        let mut held: Vec<TcpStream> = (0..PLACES).map(|_| connect(address)).collect();
        assert!(turn(&mut candidates, now).is_none());
        let mut excess: Vec<TcpStream> = (0..20).map(|_| connect(address)).collect();
        assert!(turn(&mut candidates, now).is_none());
        assert_eq!(candidates.waiting.len(), PLACES);
        assert!(excess.iter_mut().all(|peer| said(peer).1) && held.iter_mut().all(|peer| !said(peer).1));
        assert_eq!(candidates.strangers(), 20);
        assert_eq!(candidates.fds().count(), 1 + PLACES);
    }

    #[test]
    fn those_who_left_take_no_place() {
        let (mut candidates, address) = candidates(anywhere());
        let now = Instant::now();
        let held: Vec<TcpStream> = (0..PLACES).map(|_| connect(address)).collect();
        assert!(turn(&mut candidates, now).is_none());
        drop(held);
        let mut server = connect(address);
        server.write_all(b"AUTH 5ec4e7\r\nPSYNC ? -1\r\n").unwrap();
        assert!(turn(&mut candidates, now).is_some());
        assert!(candidates.waiting.is_empty());
    }

    #[test]
    fn those_who_had_time_to_log_in_do_not_keep_the_server_out() {
        let (mut candidates, address) = candidates(anywhere());
        let now = Instant::now();
        let mut held: Vec<TcpStream> = (0..PLACES).map(|_| connect(address)).collect();
        held[0].write_all(b"AUTH 5ec4e7\r\n").unwrap();
        assert!(turn(&mut candidates, now).is_none());
        let mut server = connect(address);
        server.write_all(b"AUTH 5ec4e7\r\nPSYNC ? -1\r\n").unwrap();
        assert!(turn(&mut candidates, now + LOGIN_GRACE).is_some());
        assert_eq!(candidates.waiting.len(), PLACES - 1);
        assert!(!said(&mut held[0]).1, "a connection that has logged in keeps its place");
        assert!(said(&mut held[1]).1);
    }

    #[test]
    fn those_from_elsewhere_give_way_to_the_server_at_once() {
        let elsewhere = Locality { link_host: "192.0.2.1".parse().unwrap(), server: Some(LOCAL), uid: None };
        let (mut candidates, address) = candidates(elsewhere);
        let now = Instant::now();
        let _held: Vec<TcpStream> = (0..PLACES).map(|_| connect(address)).collect();
        assert!(turn(&mut candidates, now).is_none());
        assert_eq!(candidates.to_give_way(true, now), None);
        candidates.waiting[2].is_expected = false;
        assert_eq!(candidates.to_give_way(false, now), None);
        assert_eq!(candidates.to_give_way(true, now), Some(2));
    }

    #[test]
    fn a_process_of_another_user_is_closed_before_it_takes_a_place() {
        let us = rustix::process::geteuid().as_raw();
        for (uid, waiting) in [(us, 1), (us + 1, 0)] {
            let (mut candidates, address) = candidates(Locality { uid: Some(uid), ..anywhere() });
            let _peer = connect(address);
            assert!(turn(&mut candidates, Instant::now()).is_none());
            assert_eq!(candidates.waiting.len(), waiting);
        }
    }
}
