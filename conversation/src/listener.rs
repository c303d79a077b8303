//! The one port that a source opens, or a replica that serves its slots to others.
//!
//! ```text
//!   accept ──▶ Doorway: a place? ──▶ greet: lane or conversation? ──▶ TcpExporter::adopt
//!     │             │                                            └──▶ Endpoint::accept ──▶ incoming
//!     │             └── no ──▶ turned away
//!     └── no descriptor is left ──▶ closed
//! ```
//!
//! Control connections and data lanes are separate connections that share the port, so a firewall needs one rule. Their
//! first eight bytes tell them apart, and only conversations have TLS. The listener peeks at these bytes and leaves
//! them in the socket.
//!
//! Any host can connect, so the listener bounds what a stranger costs. A connection without a proof has one of
//! [`GREETINGS`] places, of which each address has a part ([`remora_fabric::admission`]). A connection that sends
//! nothing is closed after [`FIRST_WORD_LIMIT`], or as soon as another one needs its place.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use remora_fabric::admission::{Admission, Limits, Verdict};
use remora_fabric::tcp::{LANE_MAGIC, TcpExporter};
use remora_messenger::handshake::MAGIC;
use remora_protocol::Message;
use rustix::io::Errno;
use rustix::net::{Shutdown, shutdown};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, mpsc};
use tokio::task::{AbortHandle, JoinHandle};

use super::{Connection, Endpoint, Error, Receiver, Security, error, security};
use remora_process::events;
use remora_process::exit::Failure;

/// Connections that may be in their handshake at once: enough for a burst of replicas, and a bound for a flood of other
/// connections. Half of them for one address, since all replicas of one host share it.
const GREETINGS: Limits = Limits { total: 64, per_address: 32 };

/// Connections that are turned away with a reason at once. Each costs a descriptor for up to a second. Further ones are
/// closed without a reason.
const TURNED_AWAY_LIMIT: usize = 16;

/// Time limit for the first eight bytes of a connection.
const FIRST_WORD_LIMIT: Duration = Duration::from_secs(5);

/// The first and the longest pause between two looks at a connection that has sent a part of its first eight bytes.
const PEEK_PAUSES: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(64));

/// Pause after the system failed to accept a connection.
const ACCEPT_PAUSE: Duration = Duration::from_millis(200);

/// A listening port. Dropping it closes the port.
pub struct Listener {
    address: SocketAddr,
    task: JoinHandle<()>,
}

impl Listener {
    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Binds the port. The address returned has the actual port if any free one was requested. `who` listens, as `option`
/// says: both are for the error's text.
///
/// # Errors
/// The address cannot be bound, or connections to it would not be protected.
pub async fn bind(
    listen: SocketAddr,
    security: &Security,
    who: &str,
    option: &str,
) -> Result<(TcpListener, SocketAddr), Failure> {
    security.check(listen.ip()).map_err(|why| Failure::refused(format!("{who} at {option} {listen} {why}")))?;
    let closed = |error: std::io::Error| {
        Failure::local(format!("{who} cannot listen on {listen}: {error}; set another address with {option}"))
    };
    let listener = TcpListener::bind(listen).await.map_err(closed)?;
    let address = listener.local_addr().map_err(closed)?;
    Ok((listener, address))
}

/// Uses a port that is open already at this address. `who` listens, as `option` says: both are for the error's text.
///
/// # Errors
/// Connections to it would not be protected, or the socket cannot be used.
pub fn adopt(
    socket: std::net::TcpListener,
    address: SocketAddr,
    security: &Security,
    who: &str,
    option: &str,
) -> Result<(TcpListener, SocketAddr), Failure> {
    security.check(address.ip()).map_err(|why| Failure::refused(format!("{who} at {option}{address} {why}")))?;
    let unusable = |error: io::Error| Failure::local(format!("{who} cannot use its socket at {address}: {error}"));
    socket.set_nonblocking(true).map_err(unusable)?;
    Ok((TcpListener::from_std(socket).map_err(unusable)?, address))
}

/// Starts listening. Authenticated connections are sent to `incoming`.
pub fn start<T>(
    (listener, address): (TcpListener, SocketAddr),
    conversations: Endpoint,
    lanes: Arc<TcpExporter>,
    incoming: mpsc::Sender<T>,
) -> Listener
where
    T: From<Connection> + Send + 'static,
{
    let conversations = Arc::new(conversations);
    let task = tokio::spawn(async move {
        let doorway = Arc::new(Doorway::new());
        let turned_away = Arc::new(Semaphore::new(TURNED_AWAY_LIMIT));
        let mut spare = Spare::new();
        loop {
            let (stream, peer) = match listener.accept().await {
                Ok(accepted) => accepted,
                Err(error) => {
                    doorway.rejections.add(|| tracing::warn!(%error, "cannot accept a connection"));
                    if !spare.refuse_one(&listener, &error) {
                        tokio::time::sleep(ACCEPT_PAUSE).await;
                    }
                    continue;
                }
            };
            let Some(place) = doorway.place_for(&stream, peer) else {
                doorway.rejections.add(|| tracing::warn!(event = events::CONNECTION_REJECTED, %peer, "connection rejected: too many handshakes at once"));
                if let Ok(permit) = turned_away.clone().try_acquire_owned() {
                    tokio::spawn(async move {
                        error::turn_away(stream).await;
                        drop(permit);
                    });
                }
                continue;
            };
            let (conversations, lanes, incoming) = (conversations.clone(), lanes.clone(), incoming.clone());
            let number = place.number;
            let greeting = tokio::spawn(async move {
                if let Err(text) = greet(stream, &conversations, &lanes, &incoming).await {
                    place.doorway.rejections.add(
                        || tracing::warn!(event = events::CONNECTION_REJECTED, %peer, "connection rejected: {text}"),
                    );
                }
                drop(place);
            });
            doorway.greeted_by(number, greeting.abort_handle());
        }
    });
    Listener { address, task }
}

/// The connections that are in their handshake.
struct Doorway {
    waiting: Mutex<Waiting>,
    rejections: Rejections,
}

struct Waiting {
    admission: Admission,
    /// How to close each connection.
    open: HashMap<u64, Open>,
}

/// A connection that may have to give way. Its descriptor may be the task's or already the messenger's.
struct Open {
    socket: OwnedFd,
    /// The task that reads its first bytes.
    task: Option<AbortHandle>,
}

impl Open {
    fn close(self) {
        // An error means that the peer has closed it already.
        let _ = shutdown(self.socket, Shutdown::Both);
        self.task.inspect(AbortHandle::abort);
    }
}

/// A connection's place, until it is dropped.
struct Place {
    doorway: Arc<Doorway>,
    number: u64,
}

impl Doorway {
    fn new() -> Doorway {
        let waiting = Waiting { admission: Admission::new(GREETINGS), open: HashMap::new() };
        Doorway { waiting: Mutex::new(waiting), rejections: Rejections::default() }
    }

    fn waiting(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A place for this connection. Closes the connection that gives way to it.
    fn place_for(self: &Arc<Doorway>, stream: &TcpStream, peer: SocketAddr) -> Option<Place> {
        let socket = stream.as_fd().try_clone_to_owned().ok()?;
        let mut waiting = self.waiting();
        let Verdict::Admitted { place, instead } = waiting.admission.admit(Instant::now(), peer.ip()) else {
            return None;
        };
        if let Some(open) = instead.and_then(|instead| waiting.open.remove(&instead)) {
            open.close();
        }
        waiting.open.insert(place, Open { socket, task: None });
        Some(Place { doorway: self.clone(), number: place })
    }

    /// Notes the task of a place, which ends with the place.
    fn greeted_by(&self, place: u64, task: AbortHandle) {
        if let Some(open) = self.waiting().open.get_mut(&place) {
            open.task = Some(task);
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut waiting = self.doorway.waiting();
        waiting.admission.leave(self.number);
        waiting.open.remove(&self.number);
    }
}

/// A descriptor in reserve. With none left, accept(2) fails and leaves the connection in the queue, where the peer
/// waits without an answer.
struct Spare(Option<File>);

impl Spare {
    fn new() -> Spare {
        Spare(File::open("/dev/null").ok())
    }

    /// Accepts a connection with the descriptor in reserve and closes it. Returns `false` if accepting failed for
    /// another reason.
    fn refuse_one(&mut self, listener: &TcpListener, error: &io::Error) -> bool {
        let is_short =
            [Errno::MFILE, Errno::NFILE].map(|errno| Some(errno.raw_os_error())).contains(&error.raw_os_error());
        if !is_short || self.0.take().is_none() {
            return false;
        }
        let refused = rustix::net::accept(listener).is_ok();
        *self = Spare::new();
        refused
    }
}

async fn greet<T: From<Connection>>(
    stream: TcpStream,
    conversations: &Endpoint,
    lanes: &TcpExporter,
    incoming: &mpsc::Sender<T>,
) -> Result<(), String> {
    let (opening, peer) = (first_word(&stream).await?, stream.peer_addr().map_err(|error| error.to_string())?);
    let security = conversations.security();
    match opening {
        // Its proof needs no TLS, and what it reads is sealed, or both ends are on loopback, or plaintext is meant.
        Opening::Lane => {
            let stream = stream.into_std().map_err(|error| error.to_string())?;
            stream.set_nonblocking(false).map_err(|error| error.to_string())?;
            return lanes.adopt(stream).map_err(|error| error.to_string());
        }
        Opening::Tls if conversations.tls().is_none() => {
            return Err("it speaks TLS: start this agent without --security none, or it with that option".to_owned());
        }
        Opening::Plain if security.needs_tls(peer.ip()) => {
            let option = security.option();
            let mut first = [0];
            let is_agent = matches!(stream.peek(&mut first).await, Ok(1)) && first[0] == MAGIC[0];
            if is_agent {
                error::refuse_plaintext(stream, option).await;
            }
            return Err(format!("it does not speak TLS: start it with --security {option}"));
        }
        Opening::Tls | Opening::Plain => {}
    }
    let is_tls = opening == Opening::Tls;
    let connection = conversations.accept(stream, is_tls).await.map_err(|error| error.to_string())?;
    incoming.send(connection.into()).await.map_err(|_| "this agent is stopping".to_string())
}

/// Forwards everything a conversation receives, as the owner's events, until it ends or `incoming` is closed. The last
/// event is the error that ended it.
pub fn listen_to<T: Send + 'static>(
    mut receiver: Receiver,
    incoming: mpsc::Sender<T>,
    into_event: impl Fn(Result<Message, Error>) -> T + Send + 'static,
) {
    tokio::spawn(async move {
        loop {
            let received = receiver.receive().await;
            let last = received.is_err();
            if incoming.send(into_event(received)).await.is_err() || last {
                return;
            }
        }
    });
}

/// What a connection is, by its first bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Opening {
    /// A data lane.
    Lane,
    /// A conversation with TLS.
    Tls,
    /// A conversation without TLS, or something else.
    Plain,
}

/// What these first bytes say; `None` if more are needed.
fn opening(bytes: &[u8]) -> Option<Opening> {
    if bytes.first() == Some(&security::FIRST_BYTE) {
        return Some(Opening::Tls);
    }
    let length = bytes.len().min(LANE_MAGIC.len());
    match bytes[..length] == LANE_MAGIC[..length] {
        true if length == LANE_MAGIC.len() => Some(Opening::Lane),
        true => None,
        // A magic that differs already need not be complete.
        false => Some(Opening::Plain),
    }
}

/// Reads a connection's first bytes without taking them.
async fn first_word(stream: &TcpStream) -> Result<Opening, String> {
    let peek = async {
        let mut bytes = [0; LANE_MAGIC.len()];
        let mut pause = PEEK_PAUSES.0;
        loop {
            let n = stream.peek(&mut bytes).await.map_err(|error| error.to_string())?;
            if n == 0 {
                return Ok(Opening::Plain);
            }
            if let Some(opening) = opening(&bytes[..n]) {
                return Ok(opening);
            }
            // The rest is under way. Peeking again at once would only spin.
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(PEEK_PAUSES.1);
        }
    };
    match tokio::time::timeout(FIRST_WORD_LIMIT, peek).await {
        Ok(opening) => opening,
        Err(_) => Err(format!("it sent nothing for {} s", FIRST_WORD_LIMIT.as_secs())),
    }
}

// Rejections: log lines about connections that strangers make, at a bounded rate.

/// Time after a log line in which further rejections are only counted.
const QUIET: Duration = Duration::from_secs(10);

/// Logs rejections. During a flood it logs the first one, and every ten seconds how many there were.
#[derive(Default)]
pub struct Rejections(Mutex<Count>);

#[derive(Debug, Default)]
struct Count {
    /// When the last line was logged.
    logged: Option<Instant>,
    /// Rejections since then.
    more: u64,
}

impl Rejections {
    /// Calls `log` for a rejection, unless another one was logged shortly before.
    pub fn add(&self, log: impl FnOnce()) {
        let more = self.0.lock().unwrap_or_else(PoisonError::into_inner).add(Instant::now());
        let Some(more) = more else { return };
        if more > 0 {
            tracing::warn!(more, "more connections were rejected since the last line about one");
        }
        log();
    }
}

impl Count {
    /// The number of rejections that were not logged, if this one is to be logged.
    fn add(&mut self, now: Instant) -> Option<u64> {
        if self.logged.is_some_and(|logged| now.saturating_duration_since(logged) < QUIET) {
            self.more += 1;
            return None;
        }
        self.logged = Some(now);
        Some(std::mem::take(&mut self.more))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_bytes_tell_lanes_and_conversations_apart_as_soon_as_they_can() {
        for length in 0..LANE_MAGIC.len() {
            assert_eq!(opening(&LANE_MAGIC[..length]), None, "{length}");
        }
        assert_eq!(opening(&LANE_MAGIC), Some(Opening::Lane));
        assert_eq!((opening(&MAGIC[..1]), opening(&MAGIC[..2])), (None, Some(Opening::Plain)));
        assert_eq!(opening(b"GET / HT"), Some(Opening::Plain));
        assert_eq!(opening(&[security::FIRST_BYTE]), Some(Opening::Tls));
        assert!(![MAGIC[0], LANE_MAGIC[0]].contains(&security::FIRST_BYTE));
    }

    #[test]
    fn a_flood_has_one_line_and_then_a_count() {
        let (mut count, start) = (Count::default(), Instant::now());
        assert_eq!(count.add(start), Some(0));
        for millis in 1..1000 {
            assert_eq!(count.add(start + Duration::from_millis(millis)), None);
        }
        assert_eq!(count.add(start + QUIET), Some(999));
        assert_eq!(count.add(start + QUIET * 3), Some(0));
    }
}
