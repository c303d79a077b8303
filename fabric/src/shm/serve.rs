//! The thread that accepts connections, checks proofs, passes the memory, and notices closed connections. It copies no
//! bytes of a region.
//!
//! ```text
//!   accepted ─▶ AwaitingHello ──hello──▶ AwaitingProof ──proof──▶ Reading ──any packet, or the end──▶ closed
//!                  │ late, malformed        │ late, wrong            └─ revoked, withdrawn ─ farewell ─▶ closed
//!                  ▼                        ▼
//!                closed                  denied with a reason, closed
//! ```
//!
//! No call blocks on a reader: the sockets are non-blocking, every packet is smaller than an empty connection's buffer,
//! and a connection whose handshake takes too long is closed. Packets are received without the lock, and connections
//! and received descriptors are closed on another thread, as closing a descriptor that a peer has sent can block.

use std::{
    os::fd::{AsFd, OwnedFd},
    sync::Arc,
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use rustix::{event::epoll, io::Errno};

use super::server::{Shared, WatchedSocket, refuse};
use crate::{
    error::{Denial, Error},
    memory::local::{self, Listener, PeerSocket},
};

/// Starts the thread.
pub(super) fn start(shared: Arc<Shared>, listener: Listener) -> Result<JoinHandle<()>, Error> {
    let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(Error::system("creating an epoll instance"))?;
    watch(&epoll, &shared.stop, STOP).map_err(Error::system("watching an eventfd"))?;
    watch(&epoll, &listener, LISTENER).map_err(Error::system("watching a local socket"))?;
    thread::Builder::new()
        .name("remora-shm".into())
        .spawn(move || {
            Owner { shared: &shared, epoll: Arc::new(epoll), listener }.run();
            shared.server().readers.clear();
        })
        .map_err(Error::system("starting a thread"))
}

/// What only the thread uses.
struct Owner<'a> {
    shared: &'a Shared,
    epoll: Arc<OwnedFd>,
    listener: Listener,
}

impl Owner<'_> {
    fn run(&self) {
        let mut events = Vec::with_capacity(EVENTS_PER_TURN);
        loop {
            events.clear();
            let patience = self.shared.server().next_timeout(Instant::now());
            match epoll::wait(&self.epoll, rustix::buffer::spare_capacity(&mut events), patience.as_ref()) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => return tracing::error!(%error, "shm: epoll_wait failed; no connection can be served"),
            }
            for event in &events {
                match event.data.u64() {
                    STOP => return,
                    LISTENER => self.accept(),
                    number => self.receive(number),
                }
            }
            self.shared.server().cut_late(Instant::now());
        }
    }

    /// Accepts waiting connections, up to the limit of one turn.
    fn accept(&self) {
        for _ in 0..EVENTS_PER_TURN {
            match self.listener.accept() {
                Ok(Some(reader)) => self.admit(reader),
                Ok(None) => return,
                Err(error) => {
                    // Probably out of descriptors. The connections stay in the backlog; without a pause this loop would
                    // spin.
                    tracing::warn!(%error, "shm: cannot accept a connection, retrying");
                    return thread::sleep(ACCEPT_PAUSE);
                }
            }
        }
    }

    fn admit(&self, reader: PeerSocket) {
        let (number, full) = self.shared.server().next_reader();
        if full {
            return refuse(&reader, Denial::Busy);
        }
        if let Err(error) = watch(&self.epoll, &reader, number) {
            return tracing::warn!(%error, "shm: cannot watch a connection");
        }
        self.shared.server().admit(number, WatchedSocket::new(reader, self.epoll.clone()), Instant::now());
    }

    /// Receives a packet of a reader, or the end of its connection, without the lock.
    fn receive(&self, number: u64) {
        let Some(socket) = self.shared.server().socket(number) else { return };
        let packet = local::receive(&*socket);
        self.shared.server().on_packet(number, packet);
    }
}

fn watch(epoll: &OwnedFd, fd: impl AsFd, number: u64) -> Result<(), Errno> {
    epoll::add(epoll, fd, epoll::EventData::new_u64(number), epoll::EventFlags::IN | epoll::EventFlags::RDHUP)
}

/// Numbers of the two descriptors that are not reader connections.
const STOP: u64 = 0;
const LISTENER: u64 = 1;
/// Events handled, and connections accepted, per turn: enough to be efficient, few enough that new connections do not
/// starve existing ones.
const EVENTS_PER_TURN: usize = 64;
/// Pause after a failed accept.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
