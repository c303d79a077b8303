//! What an owner has of a session: messages, the handle by which it sends them, and the callbacks by which it receives;
//! and what the workers of one messenger share.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;

use crate::buffer::{Buffer, Permit, Pool, Throttle};
use crate::error::LinkError;
use crate::frame::{Entity, MAX_SEGMENT_BYTES, Open, Refusal};
use crate::handshake::{Keyring, Versions};
use crate::policy::Policy;
use crate::stack::rdma::RdmaOptions;
use crate::stack::tls::TlsOptions;
use crate::stack::{Address, Stacks};

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

/// A message to be sent: up to three bodies, shared and not copied.
///
/// `front` is for what the receiver parses, `data` for bulk data that should land in memory of the receiver's choice;
/// `middle` is for anything in between.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Message {
    /// The request that this answers, or any other number that the owner chooses.
    pub transaction: u64,
    /// The kind of message, chosen by the owner.
    pub kind: u16,
    /// The first body.
    pub front: Bytes,
    /// The second body.
    pub middle: Bytes,
    /// The third body.
    pub data: Bytes,
    /// Alignment of the data at the receiver: a power of two up to 4096; 0 counts as 1.
    pub alignment: u16,
}

impl Message {
    /// A message with one body.
    pub fn new(transaction: u64, kind: u16, front: impl Into<Bytes>) -> Message {
        Message { transaction, kind, front: front.into(), ..Message::default() }
    }

    /// Adds data.
    pub fn with_data(mut self, data: impl Into<Bytes>) -> Message {
        self.data = data.into();
        self
    }

    /// Length of all bodies, in bytes.
    pub fn bytes(&self) -> usize {
        self.front.len() + self.middle.len() + self.data.len()
    }

    /// Whether one frame can carry it.
    pub(crate) fn fits(&self) -> bool {
        let most = MAX_SEGMENT_BYTES as usize;
        self.front.len() <= most && self.middle.len() <= most && self.data.len() <= most
    }
}

/// A received message. It counts against the receive throttle of its policy while it is held: drop it, or take its
/// bodies out, to let the next one in.
#[derive(Debug)]
pub struct Delivery {
    /// The request that this answers.
    pub transaction: u64,
    /// The kind of message, chosen by its sender.
    pub kind: u16,
    /// Its number in the session, from 1.
    pub number: u64,
    /// The first body.
    pub front: Buffer,
    /// The second body.
    pub middle: Buffer,
    /// The third body.
    pub data: Buffer,
    /// Its share of the throttle.
    pub permit: Option<Permit>,
}

impl Delivery {
    /// A message that answers this one: same transaction, same kind.
    pub fn reply(&self, front: impl Into<Bytes>) -> Message {
        Message::new(self.transaction, self.kind, front)
    }
}

/// A message whose head has arrived and whose bodies have not. It decides where the bodies are received.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Arrival {
    /// The request that it answers.
    pub transaction: u64,
    /// The kind of message, chosen by its sender.
    pub kind: u16,
    /// Lengths of front, middle and data, in bytes.
    pub bodies: [u32; 3],
    /// Alignment that the sender wants for its data, in bytes.
    pub alignment: usize,
}

// What the workers of one messenger share, its settings, and the registry that finds the session of an OPEN.

// What the workers of one messenger share.

/// What all workers of a messenger share.
pub(crate) struct Common {
    pub(crate) entity: Entity,
    pub(crate) policy: Policy,
    pub(crate) handshake: HandshakeConfig,
    pub(crate) polling: Polling,
    pub(crate) stacks: Stacks,
    pub(crate) dispatcher: Arc<dyn Dispatcher>,
    pub(crate) pool: Arc<Pool>,
    pub(crate) max_sessions: usize,
    pub(crate) max_unauthenticated: usize,
    pub(crate) serving: AtomicBool,
    /// Where peers can connect to, once the messenger listens.
    pub(crate) address: Mutex<Option<Address>>,
    pub(crate) next_worker: AtomicUsize,
    pub(crate) registry: Mutex<Registry>,
}

impl Common {
    pub(crate) fn registry(&self) -> MutexGuard<'_, Registry> {
        self.registry.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Settings of a messenger, other than the behaviour of its sessions ([`Policy`]).
#[derive(Debug, Clone)]
pub struct Options {
    /// Number of threads. A connection lives on one of them.
    pub workers: usize,
    /// Whether bodies have checksums. They are left out only where both ends ask for that.
    pub summed: bool,
    /// The secrets that both ends share. With a token frames are sealed, unless `sealed` is false at both ends. Without
    /// one every peer is accepted.
    pub keys: Option<Arc<Keyring>>,
    /// The versions of the owner's protocol that this end speaks. The ends agree on the newest common one.
    pub versions: Versions,
    /// Whether frames have seals if there is a token.
    pub sealed: bool,
    /// Whether a worker polls before it sleeps.
    pub polling: Polling,
    /// Bytes of received data that the pool may keep for reuse.
    pub pool_bytes: usize,
    /// Greatest number of sessions.
    pub max_sessions: usize,
    /// What `tls:` addresses need.
    pub tls: TlsOptions,
    /// Settings of RDMA links.
    pub rdma: RdmaOptions,
    /// Greatest number of links per worker without a session. This bounds the memory that unauthenticated peers can
    /// take.
    pub max_unauthenticated: usize,
}

/// What a worker does when it has no work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Polling {
    /// It sleeps at once: least processor time.
    Event,
    /// It never sleeps: least latency, at the price of one processor.
    Spin,
    /// It polls for up to this long, and for less where polling has rarely found something.
    Adaptive(Duration),
}

impl Default for Options {
    fn default() -> Options {
        Options {
            workers: 1,
            summed: true,
            keys: None,
            versions: Versions::only(1),
            sealed: true,
            polling: Polling::Event,
            pool_bytes: POOL_BYTES,
            max_sessions: MAX_SESSIONS,
            tls: TlsOptions::default(),
            rdma: RdmaOptions::default(),
            max_unauthenticated: MAX_UNAUTHENTICATED,
        }
    }
}

/// What this end brings into every handshake.
#[derive(Debug, Clone)]
pub(crate) struct HandshakeConfig {
    pub(crate) keys: Arc<Keyring>,
    pub(crate) versions: Versions,
    pub(crate) summed: bool,
    pub(crate) sealed: bool,
}

impl HandshakeConfig {
    /// What this end can do without. Only what both ends can do without is left out, so no peer weakens this end.
    pub(crate) fn features(&self) -> u64 {
        u64::from(!self.summed) * MAY_LEAVE_SUMS + u64::from(!self.sealed) * MAY_LEAVE_SEALS
    }
}

/// Feature bits of the handshake: this end can do without checksums over bodies, and without seals.
pub(crate) const MAY_LEAVE_SUMS: u64 = 1;

pub(crate) const MAY_LEAVE_SEALS: u64 = 2;

/// Twice what a fast link brings in a hundredth of a second.
const POOL_BYTES: usize = 64 << 20;

/// Each session costs a descriptor and a few kilobytes.
const MAX_SESSIONS: usize = 65_536;

/// As many connections as arrive at once when a server with very many clients comes back.
const MAX_UNAUTHENTICATED: usize = 16_384;

// Finds the session that an OPEN names. Shared by the workers of a messenger, and asked once per link, never per
// message.

/// The names by which sessions are found.
#[derive(Default)]
pub(crate) struct Registry {
    sessions: usize,
    names: HashMap<Name, Connection>,
}

/// A name of a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Name {
    /// This end's cookie: the peer has been told it.
    Ours(u64),
    /// The peer's cookie: a peer that connects again because it never received the answer.
    Theirs(Entity, u64),
    /// The address that the peer listens at: two peers that connect to each other.
    Address(SocketAddr),
}

impl Registry {
    /// The session that an OPEN names.
    pub(crate) fn find(&self, open: &Open) -> Option<&Connection> {
        if let Some(to) = open.to {
            return self.names.get(&Name::Ours(to.id));
        }
        let by_cookie = self.names.get(&Name::Theirs(open.entity, open.from.id));
        by_cookie.or_else(|| self.names.get(&Name::Address(open.address?)))
    }

    /// The session with the peer that listens at an address.
    pub(crate) fn with_peer_at(&self, address: SocketAddr) -> Option<&Connection> {
        self.names.get(&Name::Address(address))
    }

    /// Gives a session a name. A name that is in use moves to this session.
    pub(crate) fn enter(&mut self, name: Name, connection: &Connection) {
        let before = self.names.insert(name, connection.clone());
        self.sessions += usize::from(before.is_none() && matches!(name, Name::Ours(_)));
    }

    /// Removes names that still belong to that session.
    pub(crate) fn leave(&mut self, names: &[Name], connection: &Connection) {
        for name in names {
            if self.names.get(name) == Some(connection) {
                self.names.remove(name);
                self.sessions -= usize::from(matches!(name, Name::Ours(_)));
            }
        }
    }

    /// The number of sessions.
    pub(crate) fn sessions(&self) -> usize {
        self.sessions
    }
}
