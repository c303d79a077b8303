//! What other threads ask of a worker, and how they wake it.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use rustix::event::{EventfdFlags, eventfd};

use super::keys::LinkKey;
use super::link::LinkState;
use crate::connection::{Connection, Mailbox, Request};
use crate::signal::Open;
use crate::stack::Listener;

/// A request to a worker.
pub(crate) enum Command {
    /// The workers of the messenger, in order.
    Workers(Vec<Arc<Inbox>>),
    /// Accept connections there.
    Listen(Box<dyn Listener>),
    /// Begin that session.
    Connect(Connection),
    /// What a connection asks for.
    Request(Request),
    /// Serve a link that a peer opened, with the handshake begun.
    Take(Box<LinkState>),
    /// Serve a link whose peer has named a session of this worker.
    Adopt(Box<LinkState>, Open, Connection),
    /// There may be room for the message that blocks that link.
    Room(LinkKey),
    /// End the thread.
    Stop,
}

/// Sends in the calling thread, while the worker sleeps.
pub(super) trait SendsNow: Send + Sync {
    /// Sends what the connection has queued. `false`: the worker must. Calls no owner, and never waits.
    fn send_now(&self, connection: &Connection) -> bool;
}

/// The queue of a worker's commands. Any thread may post; only the worker takes.
pub(crate) struct Inbox {
    /// The worker's number in its messenger.
    worker: usize,
    commands: Mutex<Vec<Command>>,
    /// Whether there are commands. Read without the lock.
    waiting: AtomicBool,
    /// Whether the worker sleeps, or is about to: a thread that posts must wake it.
    asleep: AtomicBool,
    waker: OwnedFd,
    /// What can send while the worker sleeps.
    desk: OnceLock<Arc<dyn SendsNow>>,
}

impl Inbox {
    pub(super) fn new(worker: usize) -> io::Result<Inbox> {
        let waker = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Inbox {
            worker,
            commands: Mutex::default(),
            waiting: false.into(),
            asleep: false.into(),
            waker,
            desk: OnceLock::new(),
        })
    }

    /// What can send while the worker sleeps. Set once.
    pub(super) fn set_desk(&self, desk: Arc<dyn SendsNow>) {
        let _ = self.desk.set(desk);
    }

    /// Queues a command, and wakes the worker if it sleeps.
    pub(crate) fn post(&self, command: Command) {
        self.commands.lock().unwrap_or_else(PoisonError::into_inner).push(command);
        self.waiting.store(true, Ordering::SeqCst);
        if self.asleep.load(Ordering::SeqCst) && self.asleep.swap(false, Ordering::SeqCst) {
            let _ = rustix::io::write(&self.waker, &1u64.to_ne_bytes()); // fails only when the counter is full
        }
    }

    /// Whether there are commands.
    pub(super) fn is_waiting(&self) -> bool {
        self.waiting.load(Ordering::Acquire)
    }

    /// Moves the commands to `into`, which must be empty.
    pub(super) fn take(&self, into: &mut Vec<Command>) {
        // A load before the exchange: usually there is nothing, and this is called after each event.
        if self.is_waiting() && self.waiting.swap(false, Ordering::SeqCst) {
            std::mem::swap(&mut *self.commands.lock().unwrap_or_else(PoisonError::into_inner), into);
        }
    }

    /// Announces that the worker is about to sleep. Returns whether it may: no command came before the announcement.
    pub(super) fn fall_asleep(&self) -> bool {
        self.asleep.store(true, Ordering::SeqCst);
        !self.waiting.load(Ordering::SeqCst)
    }

    /// Announces that the worker is awake.
    pub(super) fn wake_up(&self) {
        self.asleep.store(false, Ordering::SeqCst);
    }

    /// The eventfd that wakes the worker.
    pub(super) fn waker(&self) -> &OwnedFd {
        &self.waker
    }
}

impl Mailbox for Inbox {
    fn worker(&self) -> usize {
        self.worker
    }

    fn request(&self, request: Request) {
        let is_sent = match &request {
            Request::Flush(connection) if self.asleep.load(Ordering::SeqCst) => {
                self.desk.get().is_some_and(|desk| desk.send_now(connection))
            }
            _ => false,
        };
        if !is_sent {
            self.post(Command::Request(request));
        }
    }
}
