//! What an owner has of a session: the handle by which it sends, and the callbacks by which it receives.

use std::collections::VecDeque;
use std::fmt;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::buffer::Buffer;
use crate::error::LinkError;
use crate::message::{Arrival, Delivery, Message};
use crate::signal::Refusal;
use crate::stack::Address;
use crate::throttle::{Permit, Throttle};

// The owner's handle of a session: its send queue. Cheap to clone; every method may be called from any thread.
//
// The session itself lives on one worker's thread. A message enters the queue under a lock that is held only for as
// long as it takes to move the queue's content. The worker is woken only if the queue was empty and it sleeps.

/// The handle of a session with a peer. See [`crate::Messenger::connect`].
#[derive(Clone)]
pub struct Connection(Arc<Shared>);

struct Shared {
    id: u64,
    peer: Address,
    worker: Arc<dyn Mailbox>,
    /// The key of the session on its worker. Only the worker uses it.
    session_key: AtomicU64,
    budget: Arc<Throttle>,
    outbox: Mutex<Outbox>,
    /// Whether the worker knows of queued messages, or is about to look. Set by any thread; unset with the queue
    /// locked.
    posted: AtomicBool,
    ready: AtomicBool,
    /// How the last link began, and how it ended.
    negotiated: Mutex<Option<Negotiated>>,
    broken: Mutex<Option<Arc<LinkError>>>,
}

/// What a connection asks of the worker that its session lives on.
pub(crate) enum Request {
    /// The connection's send queue is no longer empty.
    Flush(Connection),
    /// End the session once everything queued is sent.
    Close(Connection),
    /// End the session now.
    Abort(Connection),
    /// Break the session's link.
    Cut(Connection),
}

/// The worker that a session lives on, as its connection sees it. Any thread may post.
pub(crate) trait Mailbox: Send + Sync {
    /// The worker's number in its messenger.
    fn worker(&self) -> usize;

    /// Queues a request, and wakes the worker if it sleeps.
    fn request(&self, request: Request);
}

/// What both ends of a link have agreed on in their handshake.
#[derive(Clone, PartialEq, Eq)]
pub struct Negotiated {
    /// The link's number, the same at both ends.
    pub number: u64,
    /// A key that only the two ends know, if they hold a token. Pass on what [`remora_wire::derive()`] makes of it,
    /// never the key itself.
    pub key: [u8; 32],
    /// The version of the owner's protocol.
    pub version: u16,
    /// The mark of the token that both ends proved, at this end.
    pub mark: u16,
    /// The address of this end, as the peer sees it; `None` where the transport has no addresses.
    pub local: Option<SocketAddr>,
    /// The certificate of the peer, in DER, if it has presented one in TLS. rustls's configuration says which are
    /// accepted.
    pub certificate: Option<Box<[u8]>>,
}

impl fmt::Debug for Negotiated {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(to, "Negotiated({}, version {})", self.number, self.version) // never shows the key
    }
}

#[derive(Default)]
struct Outbox {
    queue: VecDeque<Queued>,
    over: bool,
}

/// A message and its share of the send queue's bound.
pub(crate) struct Queued {
    pub(crate) message: Message,
    _permit: Permit,
}

/// Why a message was not queued. It is given back.
#[derive(Debug, thiserror::Error)]
pub enum SendError {
    /// The send queue is full: try again later, or end the connection.
    #[error("the send queue is full: the peer reads more slowly than this end sends")]
    Full(Message),
    /// The connection is over.
    #[error("the connection is over")]
    Over(Message),
    /// A body is longer than a frame carries: send it in several messages.
    #[error("a body is longer than {} bytes: send it in several messages", crate::frame::MAX_SEGMENT_BYTES)]
    TooLong(Message),
}

impl Connection {
    pub(crate) fn new(peer: Address, worker: Arc<dyn Mailbox>, budget: Arc<Throttle>) -> Connection {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Connection(Arc::new(Shared {
            id: NEXT.fetch_add(1, Ordering::Relaxed),
            peer,
            worker,
            session_key: AtomicU64::new(UNASSIGNED),
            budget,
            outbox: Mutex::default(),
            posted: AtomicBool::new(false),
            ready: AtomicBool::new(false),
            negotiated: Mutex::default(),
            broken: Mutex::default(),
        }))
    }

    /// A number that is unique in this process.
    pub fn id(&self) -> u64 {
        self.0.id
    }

    /// The address that was connected to, or that the peer connected from.
    pub fn peer(&self) -> &Address {
        &self.0.peer
    }

    /// Whether messages flow at present. Messages are queued in any case.
    pub fn is_ready(&self) -> bool {
        self.0.ready.load(Ordering::Relaxed)
    }

    /// What the handshake of the last link agreed on; `None` before the first.
    pub fn negotiated(&self) -> Option<Negotiated> {
        self.0.negotiated.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Why the last link, or the last attempt at one, ended; `None` if it did not.
    pub fn link_error(&self) -> Option<Arc<LinkError>> {
        self.0.broken.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Queues a message. Does not block.
    ///
    /// # Errors
    /// [`SendError`], with the message.
    pub fn send(&self, message: Message) -> Result<(), SendError> {
        if !message.fits() {
            return Err(SendError::TooLong(message));
        }
        match self.0.budget.take(message.bytes()) {
            Some(permit) => self.put(message, permit),
            None => Err(SendError::Full(message)),
        }
    }

    /// Queues a message. If there is no room, `wake` is called once there may be; another sender may be faster.
    ///
    /// # Errors
    /// [`SendError`], with the message.
    pub fn send_or_wake(&self, message: Message, wake: impl FnOnce() + Send + 'static) -> Result<(), SendError> {
        if !message.fits() {
            return Err(SendError::TooLong(message));
        }
        match self.0.budget.take_or_wait(message.bytes(), wake) {
            Some(permit) => self.put(message, permit),
            None if self.lock().over => Err(SendError::Over(message)),
            None => Err(SendError::Full(message)),
        }
    }

    /// Queues a message, and blocks for up to `limit` until there is room. Not for a dispatcher, which would block the
    /// worker that makes room.
    ///
    /// # Errors
    /// [`SendError`], with the message.
    pub fn send_within(&self, message: Message, limit: Duration) -> Result<(), SendError> {
        if !message.fits() {
            return Err(SendError::TooLong(message));
        }
        let deadline = Instant::now() + limit;
        loop {
            let thread = std::thread::current();
            if let Some(permit) = self.0.budget.take_or_wait(message.bytes(), move || thread.unpark()) {
                return self.put(message, permit);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if self.lock().over {
                return Err(SendError::Over(message));
            }
            if left.is_zero() {
                return Err(SendError::Full(message));
            }
            std::thread::park_timeout(left.min(LOOK_AGAIN));
        }
    }

    /// Stops taking messages, and ends the session once everything queued is written (lossless: acknowledged). The
    /// dispatcher is told.
    pub fn close(&self) {
        self.0.worker.request(Request::Close(self.clone()));
    }

    /// Ends the session now and drops what is queued. The dispatcher is told.
    pub fn abort(&self) {
        self.0.worker.request(Request::Abort(self.clone()));
    }

    /// Breaks the session's link, as a cut cable would. For tests.
    pub fn cut(&self) {
        self.0.worker.request(Request::Cut(self.clone()));
    }

    fn put(&self, message: Message, permit: Permit) -> Result<(), SendError> {
        let mut outbox = self.lock();
        if outbox.over {
            return Err(SendError::Over(message));
        }
        outbox.queue.push_back(Queued { message, _permit: permit });
        // The worker unsets it with the lock held when it takes messages out.
        let is_first = !self.0.posted.load(Ordering::Relaxed);
        if is_first {
            self.0.posted.store(true, Ordering::Relaxed);
        }
        drop(outbox);
        if is_first {
            self.0.worker.request(Request::Flush(self.clone()));
        }
        Ok(())
    }

    /// Notes that the worker will look into the queue after it has called the owner: no thread needs to wake it.
    pub(crate) fn expect_messages(&self) {
        self.0.posted.store(true, Ordering::Relaxed);
    }

    /// Moves the queued messages to `into`.
    pub(crate) fn take_queued(&self, into: &mut VecDeque<Queued>) {
        let mut outbox = self.lock();
        self.0.posted.store(false, Ordering::Relaxed);
        if into.is_empty() {
            std::mem::swap(&mut outbox.queue, into);
        } else {
            into.append(&mut outbox.queue);
        }
    }

    pub(crate) fn set_negotiated(&self, negotiated: Negotiated) {
        *self.0.negotiated.lock().unwrap_or_else(PoisonError::into_inner) = Some(negotiated);
    }

    pub(crate) fn set_link_error(&self, broken: Arc<LinkError>) {
        *self.0.broken.lock().unwrap_or_else(PoisonError::into_inner) = Some(broken);
    }

    pub(crate) fn set_ready(&self, ready: bool) {
        self.0.ready.store(ready, Ordering::Relaxed);
    }

    /// Notes that the session is over: no more messages are taken.
    pub(crate) fn set_over(&self) {
        self.set_ready(false);
        let mut outbox = self.lock();
        outbox.over = true;
        outbox.queue.clear();
    }

    pub(crate) fn session_key(&self) -> u64 {
        self.0.session_key.load(Ordering::Relaxed)
    }

    pub(crate) fn set_session_key(&self, key: u64) {
        self.0.session_key.store(key, Ordering::Relaxed);
    }

    /// The number of the worker that the session lives on.
    pub(crate) fn worker(&self) -> usize {
        self.0.worker.worker()
    }

    fn lock(&self) -> MutexGuard<'_, Outbox> {
        self.0.outbox.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl PartialEq for Connection {
    fn eq(&self, other: &Connection) -> bool {
        self.id() == other.id()
    }
}

impl Eq for Connection {}

impl fmt::Debug for Connection {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(to, "Connection({} with {})", self.id(), self.peer())
    }
}

/// The session key of a connection that its worker has not seen yet.
pub(crate) const UNASSIGNED: u64 = u64::MAX;

/// How often a thread that waits for room checks whether the connection is over.
const LOOK_AGAIN: Duration = Duration::from_millis(100);

// The callbacks of a messenger. They run on the thread of the worker that the connection lives on.
//
// A dispatcher must not block: every connection of that worker would wait with it. It may send on any connection;
// sending never blocks. It must not panic: a panic ends the worker's thread and everything on it.

/// Receives what happens on a messenger's connections. Only [`Dispatcher::message`] has no default.
pub trait Dispatcher: Send + Sync + 'static {
    /// A message has arrived: in order, and with lossless policies exactly once.
    fn message(&self, connection: &Connection, delivery: Delivery);

    /// Chooses the memory for a message's data, before any of it is read: a buffer of exactly its length, or `None` for
    /// one of the messenger's own.
    fn memory(&self, connection: &Connection, arrival: &Arrival) -> Option<Buffer> {
        let _ = (connection, arrival);
        None
    }

    /// Messages flow: for the first time, or again after a broken link.
    fn connected(&self, connection: &Connection) {
        let _ = connection;
    }

    /// The peer has forgotten the session, or the link of a lossy session broke. `unacknowledged` messages of this end
    /// were not acknowledged (lossy: not written). They are dropped, and the peer may or may not have received them. If
    /// the session `goes_on`, it is empty and numbers start again; otherwise the connection is over.
    fn reset(&self, connection: &Connection, unacknowledged: usize, goes_on: bool) {
        let _ = (connection, unacknowledged, goes_on);
    }

    /// Either end has closed the connection.
    fn closed(&self, connection: &Connection) {
        let _ = connection;
    }

    /// The peer refuses the session. The connection is over.
    fn refused(&self, connection: &Connection, why: Refusal) {
        let _ = (connection, why);
    }

    /// A peer connected and did not get as far as a session; usually it was not authenticated.
    fn rejected(&self, peer: &Address, why: &LinkError) {
        let _ = (peer, why);
    }
}
