//! A session as its owner holds it: something to send on. Cheap to clone; every method may be called from any thread.
//!
//! What it is not: the session. That lives on one worker's thread; here is only its letter box. A message goes into the box
//! under a lock that nobody holds for longer than it takes to move the box's content; the worker is woken only if the box was
//! empty and it sleeps.

use std::collections::VecDeque;
use std::fmt;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::error::LinkError;
use crate::message::Message;
use crate::stack::Address;
use crate::throttle::{Permit, Throttle};
use crate::worker::{Command, Inbox};

/// A session with a peer, to send on. See [`crate::Messenger::connect`].
#[derive(Clone)]
pub struct Connection(Arc<Shared>);

struct Shared {
    id: u64,
    peer: Address,
    inbox: Arc<Inbox>,
    /// Where the worker has it; known to the worker only.
    session_key: AtomicU64,
    budget: Arc<Throttle>,
    outbox: Mutex<Outbox>,
    /// The worker knows that there is something in the box, or is about to look. Set by anybody, unset with the box locked.
    posted: AtomicBool,
    ready: AtomicBool,
    /// Of the last link: how it began and how it ended.
    negotiated: Mutex<Option<Negotiated>>,
    broken: Mutex<Option<Arc<LinkError>>>,
}

/// What both ends of a link have settled in its greeting.
#[derive(Clone, PartialEq, Eq)]
pub struct Negotiated {
    /// The link's number, the same at both ends.
    pub number: u64,
    /// A key that only the two ends know, if they hold a token: give away what [`remora_wire::derive()`] makes of it.
    pub key: [u8; 32],
    /// The protocol version.
    pub version: u16,
    /// Our address, by which the peer sees us; `None` where the transport has none.
    pub local: Option<SocketAddr>,
}

impl fmt::Debug for Negotiated {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(to, "Negotiated({}, version {})", self.number, self.version) // a key is shown to nobody
    }
}

#[derive(Default)]
struct Outbox {
    queue: VecDeque<Queued>,
    over: bool,
}

/// A message and its share of what may wait to be sent.
pub(crate) struct Queued {
    pub(crate) message: Message,
    _permit: Permit,
}

/// Why a message was not taken. It is given back.
#[derive(Debug, thiserror::Error)]
pub enum SendError {
    /// As much waits as may: try again when some has gone, or let the peer go.
    #[error("the send queue is full: the peer takes less than is sent")]
    Full(Message),
    /// The connection is over.
    #[error("the connection is over")]
    Over(Message),
    /// A body is longer than a frame may carry: send it as several messages.
    #[error("a body is longer than {} bytes: send it in several messages", crate::frame::MAX_SEGMENT_BYTES)]
    TooLong(Message),
}

impl Connection {
    pub(crate) fn new(peer: Address, inbox: Arc<Inbox>, budget: Arc<Throttle>) -> Connection {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Connection(Arc::new(Shared {
            id: NEXT.fetch_add(1, Ordering::Relaxed),
            peer,
            inbox,
            session_key: AtomicU64::new(UNASSIGNED),
            budget,
            outbox: Mutex::default(),
            posted: AtomicBool::new(false),
            ready: AtomicBool::new(false),
            negotiated: Mutex::default(),
            broken: Mutex::default(),
        }))
    }

    /// A number of its own in this process.
    pub fn id(&self) -> u64 {
        self.0.id
    }

    /// Where the peer was called, or where it called from.
    pub fn peer(&self) -> &Address {
        &self.0.peer
    }

    /// Whether messages flow at present. They are taken in any case.
    pub fn is_ready(&self) -> bool {
        self.0.ready.load(Ordering::Relaxed)
    }

    /// What the greeting of the last link came to; `None` before the first.
    pub fn negotiated(&self) -> Option<Negotiated> {
        self.0.negotiated.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Why the last link, or the last attempt at one, was given up, if it was.
    pub fn link_error(&self) -> Option<Arc<LinkError>> {
        self.0.broken.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Takes a message to be sent, and does not wait.
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

    /// As [`Connection::send`]; if there is no room, `wake` is called when there may be. It may then be too late again.
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

    /// As [`Connection::send`], but waits for room, no longer than `limit`. Not for a dispatcher: it would wait for itself.
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

    /// Takes no more messages, and ends when what was taken is written (lossless: acknowledged). The dispatcher is told.
    pub fn close(&self) {
        self.0.inbox.post(Command::Close(self.clone()));
    }

    /// Ends now, whatever waits. The dispatcher is told.
    pub fn abort(&self) {
        self.0.inbox.post(Command::Abort(self.clone()));
    }

    /// Cuts the transport under the session, as a broken cable would: for tests of what becomes of it.
    pub fn cut(&self) {
        self.0.inbox.post(Command::Cut(self.clone()));
    }

    fn put(&self, message: Message, permit: Permit) -> Result<(), SendError> {
        let mut outbox = self.lock();
        if outbox.over {
            return Err(SendError::Over(message));
        }
        outbox.queue.push_back(Queued { message, _permit: permit });
        // Whoever has taken letters out before us has unset it before it let go of the lock.
        let is_first = !self.0.posted.load(Ordering::Relaxed);
        if is_first {
            self.0.posted.store(true, Ordering::Relaxed);
        }
        drop(outbox);
        if is_first {
            self.0.inbox.post(Command::Flush(self.clone()));
        }
        Ok(())
    }

    /// The worker is about to dispatch to the owner, and will look into the box afterwards: nobody need tell it to.
    pub(crate) fn expect_messages(&self) {
        self.0.posted.store(true, Ordering::Relaxed);
    }

    /// What lies in the box.
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

    /// The session is over: no more letters.
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

    pub(crate) fn inbox(&self) -> &Arc<Inbox> {
        &self.0.inbox
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

/// A connection that its worker has not seen yet.
pub(crate) const UNASSIGNED: u64 = u64::MAX;

/// Who waits for room looks again this often whether the connection still is.
const LOOK_AGAIN: Duration = Duration::from_millis(100);
