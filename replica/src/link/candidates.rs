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

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use std::{fmt, io};

use remora_redis::ReplId;
use remora_redis::psync::server::{Access, Event, Options, Server as PrimaryRole};
use rustix::event::PollFlags;
use rustix::net::{AddressFamily, SocketFlags, SocketType, sockopt};
use rustls::{ServerConfig, ServerConnection};

use super::{Link, owner};
use crate::attend::gate::Served;
use crate::record::{Record, present};
use remora_conversation::listener::Rejections;
use remora_process::exit::Failure;
use remora_server::{Client, Password, RefusalKind, Server, ServerError};

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
pub(crate) struct Candidates {
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
pub(crate) struct Newcomer {
    pub(crate) peer: SocketAddr,
    pub(crate) link: Link,
    pub(crate) role: PrimaryRole,
    /// Answers to the server; those up to `written` have been sent.
    pub(crate) out: Vec<u8>,
    pub(crate) written: usize,
    /// What `PSYNC` asked for: the replid of its history and the offset of the next byte.
    pub(crate) replid: Option<ReplId>,
    pub(crate) offset: i64,
}

impl Candidates {
    /// Takes a listener in non-blocking mode, which may not listen yet.
    pub(crate) fn new(
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
    pub(crate) fn without_a_port() -> Candidates {
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
    pub(crate) fn opened(&mut self) {
        self.is_open = self.listener.is_some();
    }

    /// Where it is noted why a connection did not become the link.
    pub(crate) fn failure(&self) -> LinkFailure {
        self.failure.clone()
    }

    /// How many connections were closed before they had logged in.
    pub(crate) fn strangers(&self) -> u64 {
        self.strangers
    }

    /// Continues all conversations without waiting. Returns the first that became the server's link; call it again for
    /// more.
    pub(crate) fn turn(&mut self, now: Instant) -> Option<Newcomer> {
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
    pub(crate) fn fds(&self) -> impl Iterator<Item = (BorrowedFd<'_>, PollFlags)> {
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
    pub(crate) fn due(&self) -> Option<Instant> {
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
    pub(crate) fn intercepted(
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

// Link login: the password with which the replica's server logs in at the link.
//
// Who is on the link receives the whole data set. So the link requires a password that opens nothing else: a secret of
// this sync. The agent sets it as the server's `masterauth` before `REPLICAOF`. The server's own password for its
// primary never reaches the link. If the agent is killed, a process that takes over the link's port learns only the
// secret. The [record](crate::record) restores `masterauth` before the server follows its primary, when it is
// detached, and after a crash.
//
// If the server refuses `CONFIG SET`, it keeps its `masterauth`, and the link requires that password.

/// The password with which the replica's server logs in at the link.
#[derive(Clone, Debug)]
pub(crate) enum LinkLogin {
    /// A secret of this sync, and the setting that gives it to the server.
    Secret {
        /// The setting's name on this server: `masterauth`, or Valkey's `primaryauth`.
        setting: &'static str,
        secret: Password,
    },
    /// The server's own password for its primary.
    Own { user: Option<Vec<u8>>, password: Password },
}

/// The server's settings for the login to its primary.
#[derive(Clone, Debug)]
pub(crate) struct PrimaryLogin {
    /// `masteruser`; empty for the default user.
    pub(crate) user: Vec<u8>,
    /// `masterauth`; `None` if the server sends no password.
    pub(crate) password: Option<Password>,
    /// The name of the setting with the password; `None` if the server knows no such setting.
    pub(crate) setting: Option<&'static str>,
}

/// Random bytes in a secret. A token has 32 too.
const SECRET_BYTES: usize = 32;

/// A setting that no server has. `CONFIG SET` of it changes nothing, and the error shows whether `CONFIG SET` is
/// permitted.
const NO_SETTING: &str = "remora-no-such-setting";

impl LinkLogin {
    /// Finds out which login the server permits. Changes nothing on the server.
    ///
    /// # Errors
    /// A refusal if the server permits no `CONFIG SET` and has no `masterauth`.
    pub(crate) async fn choose(
        server: &Server,
        client: &mut Client,
        login: &PrimaryLogin,
    ) -> Result<LinkLogin, Failure> {
        let refused = match client.command_once_settled(&["CONFIG", "SET", NO_SETTING, "0"]).await {
            Err(error) if matches!(error.refusal(), Some(RefusalKind::NoPerm | RefusalKind::Unknown)) => Some(error),
            Ok(_) | Err(ServerError::Refused { .. }) => None,
            Err(error) => return Err(error.into()),
        };
        match (refused, login.setting, &login.password) {
            (None, Some(setting), _) => Ok(LinkLogin::Secret { setting, secret: random_secret()? }),
            (_, _, Some(password)) => {
                tracing::warn!(
                    "the server {} can't be given a password for the time of the sync: the link asks for its own masterauth",
                    server.url()
                );
                let user = Some(login.user.clone()).filter(|user| !user.is_empty());
                Ok(LinkLogin::Own { user, password: password.clone() })
            }
            (refused, _, None) => {
                let why = refused.map_or_else(|| "it knows no masterauth".to_string(), |error| error.to_string());
                Err(Failure::refused(format!(
                    "the server {} would log in at our link without a password, and other processes could do the same: it has no \
                     masterauth, and it can't be given one for the time of the sync ({why}); grant our user +config|set there, or \
                     set masterauth",
                    server.url()
                )))
            }
        }
    }

    /// The login that the link requires.
    pub(crate) fn access(&self) -> Access {
        match self {
            LinkLogin::Secret { secret, .. } => Access::Secret(String::from_utf8_lossy(secret.expose()).into_owned()),
            LinkLogin::Own { user, password } => {
                Access::User { name: user.clone(), password: password.expose().to_vec() }
            }
        }
    }

    /// Sets the server's `masterauth` to the secret. Call it before each `REPLICAOF` to the link.
    pub(crate) async fn give(&self, record: &mut Record, client: &mut Client) -> Result<(), Failure> {
        let LinkLogin::Secret { setting, secret } = self else { return Ok(()) };
        let present = present(client, setting).await?.unwrap_or_default();
        if present == secret.expose() {
            return Ok(());
        }
        let before = record.original(setting, &present);
        match record.change(client, setting, &before, secret.expose()).await? {
            true => Ok(()),
            false => Err(Failure::refused(format!(
                "the server {} does not let its {setting} be set, which our link needs for the time of the sync: grant our user \
                 +config|set there",
                client.server().url()
            ))),
        }
    }
}

/// Whether this password may be the secret of another sync's link.
pub(crate) fn may_be_a_secret(password: &Password) -> bool {
    let bytes = password.expose();
    bytes.len() == 2 * SECRET_BYTES && bytes.iter().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

fn random_secret() -> Result<Password, Failure> {
    let mut random = [0; SECRET_BYTES];
    getrandom::fill(&mut random)
        .map_err(|error| Failure::local(format!("the system gives no random bytes: {error}")))?;
    Ok(Password::new(random.iter().map(|byte| format!("{byte:02x}")).collect::<String>()))
}

// Locality: whether the replica's server runs on this host, and what its connections look like then.
//
// The agent's own connection to the server shows it. If both ends have the same address, and the server's end is among
// the sockets of this network namespace, then the server can reach a listener on loopback, and other hosts cannot. The
// end of a server in a container, whose port is forwarded to this host, is in another namespace.

/// Where the replica's server runs, seen from the agent.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Locality {
    /// The agent's address to which the server's link connects.
    pub(crate) link_host: IpAddr,
    /// The server's address. Its connections can come from another one: a forwarded port, a host with several
    /// addresses.
    pub(crate) server: Option<IpAddr>,
    /// The server's user id, if the server is on this host and the kernel reports it.
    pub(crate) uid: Option<u32>,
}

impl Locality {
    /// Examines the connection `client`. `process_id` is what the server reports about itself.
    pub(crate) fn of(client: &Client, process_id: Option<u32>) -> Locality {
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
    pub(crate) fn or_listen(self, named: Option<IpAddr>) -> Locality {
        Locality { link_host: named.unwrap_or(self.link_host), ..self }
    }

    /// Takes a port for the server's link. Calls on the listener do not wait. It listens from [`LinkPort::open`] on.
    pub(crate) fn take_port(&self) -> Result<(TcpListener, LinkPort), Failure> {
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
    pub(crate) fn expects(&self, address: IpAddr) -> bool {
        self.link_host.is_loopback() || self.server.is_none_or(|server| server == address)
    }
}

/// The port for the server's link. It belongs to the agent from the start, and refuses connections until it is open.
pub(crate) struct LinkPort {
    address: SocketAddr,
    /// The listener's socket, until it listens.
    closed: Option<OwnedFd>,
}

impl LinkPort {
    /// One that the simulation has opened.
    pub(crate) fn opened(address: SocketAddr) -> LinkPort {
        LinkPort { address, closed: None }
    }

    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }

    /// Listens, from the first call on, until the listener is dropped.
    pub(crate) fn open(&mut self) -> Result<(), Failure> {
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
    Failure::local(format!(
        "the link for the server can't listen on {host}: {error}; name an address of this host by --listen"
    ))
}

/// Connections that the kernel holds until they are accepted, as of the standard library's listeners.
const WAITING: i32 = 128;

// Link failure: why the last connection to the link's port did not become the server's link.
//
// The delivery's thread notes it; the server's task reads it when the server stays away, to name the cause.

/// See the module's text.
#[derive(Clone, Debug, Default)]
pub(crate) struct LinkFailure(Arc<Mutex<Option<String>>>);

impl LinkFailure {
    /// A connection from there was closed for this reason.
    pub(crate) fn note(&self, peer: SocketAddr, why: &str) {
        let text = format!("connection from {} failed: {why}", peer.ip());
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(text);
    }

    /// What was noted last; `None` if no connection has failed.
    pub(crate) fn last(&self) -> Option<String> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::io::{Read, Write};
    use std::net::{IpAddr, TcpStream};

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

    #[test]
    fn every_sync_has_another_secret_which_does_not_show_itself() {
        let [one, other] = [random_secret().unwrap(), random_secret().unwrap()];
        assert_ne!(one, other);
        assert_eq!(one.expose().len(), 2 * SECRET_BYTES);
        assert!(one.expose().iter().all(u8::is_ascii_hexdigit));
        let login = LinkLogin::Secret { setting: "masterauth", secret: one.clone() };
        let text = String::from_utf8(one.expose().to_vec()).unwrap();
        assert!(!format!("{login:?} {:?}", login.access()).contains(&text));
        assert_eq!(login.access(), Access::Secret(text));
    }

    #[test]
    fn without_a_secret_the_link_asks_for_the_servers_own_login() {
        let login = LinkLogin::Own { user: Some("repl".into()), password: Password::new("pw") };
        assert_eq!(login.access(), Access::User { name: Some("repl".into()), password: "pw".into() });
    }

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
