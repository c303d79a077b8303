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
//! first eight bytes tell them apart, or with TLS the ALPN protocol in the client's first message. The listener peeks
//! at these bytes and leaves them in the socket.
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

use super::rejections::Rejections;
use super::security::{self, ClientHello, Purpose};
use super::{Connection, Endpoint, Error, Receiver};
use crate::exit::Failure;

/// Connections that may be in their handshake at once: enough for a burst of replicas, and a bound for a flood of other
/// connections. Half of them for one address, since all replicas of one host share it.
const GREETINGS: Limits = Limits { total: 64, per_address: 32 };

/// Connections that are turned away with a reason at once. Each costs a descriptor for up to a second. Further ones are
/// closed without a reason.
const TURNED_AWAY_LIMIT: usize = 16;

/// Bytes of a connection that are looked at: TLS's first message, of which an agent's has some 300 bytes.
const FIRST_WORD_BYTES: usize = 4096;

/// Time limit for the first bytes of a connection: eight, or TLS's first message.
const FIRST_WORD_LIMIT: Duration = Duration::from_secs(5);

/// The first and the longest pause between two looks at a connection that has sent a part of its first eight bytes.
const PEEK_PAUSES: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(64));

/// Pause after the system failed to accept a connection.
const ACCEPT_PAUSE: Duration = Duration::from_millis(200);

/// A listening port. Dropping it closes the port.
pub(crate) struct Listener {
    address: SocketAddr,
    task: JoinHandle<()>,
}

impl Listener {
    pub(crate) fn address(&self) -> SocketAddr {
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
pub(crate) async fn bind(listen: SocketAddr, who: &str, option: &str) -> Result<(TcpListener, SocketAddr), Failure> {
    let closed = |error: std::io::Error| {
        Failure::local(format!("{who} cannot listen on {listen}: {error}; set another address with {option}"))
    };
    let listener = TcpListener::bind(listen).await.map_err(closed)?;
    let address = listener.local_addr().map_err(closed)?;
    Ok((listener, address))
}

/// Starts listening. Authenticated connections are sent to `incoming`.
pub(crate) fn start<T>(
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
                doorway.rejections.add(|| tracing::warn!(%peer, "connection rejected: too many handshakes at once"));
                if let Ok(permit) = turned_away.clone().try_acquire_owned() {
                    tokio::spawn(async move {
                        super::turn_away(stream).await;
                        drop(permit);
                    });
                }
                continue;
            };
            let (conversations, lanes, incoming) = (conversations.clone(), lanes.clone(), incoming.clone());
            let number = place.number;
            let greeting = tokio::spawn(async move {
                if let Err(text) = greet(stream, &conversations, &lanes, &incoming).await {
                    place.doorway.rejections.add(|| tracing::warn!(%peer, "connection rejected: {text}"));
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
    let Opening { purpose, is_tls } = first_word(&stream).await?;
    let tls = conversations.tls();
    match (is_tls, tls.is_some()) {
        (true, false) => {
            return Err("it speaks TLS: start this agent with --security token, or it with none".to_owned());
        }
        (false, true) => {
            let mut first = [0];
            let is_agent = matches!(stream.peek(&mut first).await, Ok(1)) && first[0] == MAGIC[0];
            if purpose == Purpose::Control && is_agent {
                super::refuse_plaintext(stream).await;
            }
            return Err("it does not speak TLS: start it with --security token".to_owned());
        }
        _ => {}
    }
    if purpose == Purpose::Lane {
        let stream = stream.into_std().map_err(|error| error.to_string())?;
        stream.set_nonblocking(false).map_err(|error| error.to_string())?;
        let adopted = match tls {
            Some(config) => lanes.adopt_tls(stream, config.clone()),
            None => lanes.adopt(stream),
        };
        return adopted.map_err(|error| error.to_string());
    }
    let connection = conversations.accept(stream).await.map_err(|error| error.to_string())?;
    incoming.send(connection.into()).await.map_err(|_| "this agent is stopping".to_string())
}

/// Forwards everything a conversation receives, as the owner's events, until it ends or `incoming` is closed. The last
/// event is the error that ended it.
pub(crate) fn listen_to<T: Send + 'static>(
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
#[derive(Debug, PartialEq, Eq)]
struct Opening {
    purpose: Purpose,
    is_tls: bool,
}

/// What these first bytes say; `None` if more are needed.
fn opening(bytes: &[u8]) -> Result<Option<Opening>, String> {
    let plain = |purpose| Ok(Some(Opening { purpose, is_tls: false }));
    if security::begins_tls(bytes) {
        return match security::read_client_hello(bytes)? {
            ClientHello::For(purpose) => Ok(Some(Opening { purpose, is_tls: true })),
            ClientHello::Incomplete if bytes.len() >= FIRST_WORD_BYTES => {
                Err(format!("its TLS greeting is longer than {FIRST_WORD_BYTES} bytes"))
            }
            ClientHello::Incomplete => Ok(None),
        };
    }
    let length = bytes.len().min(LANE_MAGIC.len());
    match bytes[..length] == LANE_MAGIC[..length] {
        true if length == LANE_MAGIC.len() => plain(Purpose::Lane),
        true => Ok(None),
        // A magic that differs already need not be complete.
        false => plain(Purpose::Control),
    }
}

/// Reads a connection's first bytes without taking them.
async fn first_word(stream: &TcpStream) -> Result<Opening, String> {
    let peek = async {
        let mut bytes = vec![0; FIRST_WORD_BYTES];
        let mut pause = PEEK_PAUSES.0;
        loop {
            let n = stream.peek(&mut bytes).await.map_err(|error| error.to_string())?;
            if n == 0 {
                return Ok(Opening { purpose: Purpose::Control, is_tls: false });
            }
            if let Some(opening) = opening(&bytes[..n])? {
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
