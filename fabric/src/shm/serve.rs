//! The thread that answers the door: accepts, examines, hands the memory over, and notices who has left. It copies nothing.
//!
//! ```text
//!   accepted ─▶ Greeting ──hello──▶ Proving ──proof──▶ Reading ──any word, or the end──▶ gone
//!                  │ late, garbled     │ late, wrong       └─ revoked, withdrawn ─ farewell ─▶ gone
//!                  ▼                   ▼
//!                 gone               told why, gone
//! ```
//!
//! Nothing here blocks on a reader: sockets don't wait, every packet is smaller than an empty connection's buffer, and who is
//! late with the handshake is cut.

use std::{
    os::fd::OwnedFd,
    sync::Arc,
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use rustix::{event::epoll, io::Errno};

use super::server::{Guest, Shared, Stage, turn_away};
use crate::{
    error::{Denial, Error},
    memory::local,
};

/// Starts the thread.
pub(super) fn start(shared: Arc<Shared>, listener: OwnedFd) -> Result<JoinHandle<()>, Error> {
    let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(Error::system("making an epoll descriptor"))?;
    watch(&epoll, &shared.stop, STOP).map_err(Error::system("watching an eventfd"))?;
    watch(&epoll, &listener, LISTENER).map_err(Error::system("watching a local socket"))?;
    thread::Builder::new()
        .name("remora-shm".into())
        .spawn(move || {
            Owner { shared: &shared, epoll, listener }.run();
            shared.house().guests.clear();
        })
        .map_err(Error::system("starting a thread"))
}

/// The thread's own things.
struct Owner<'a> {
    shared: &'a Shared,
    epoll: OwnedFd,
    listener: OwnedFd,
}

impl Owner<'_> {
    fn run(&self) {
        let mut events = Vec::with_capacity(EVENTS_PER_TURN);
        loop {
            events.clear();
            let patience = self.shared.house().patience(Instant::now());
            match epoll::wait(&self.epoll, rustix::buffer::spare_capacity(&mut events), patience.as_ref()) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => return tracing::error!(%error, "shm: no connection can be answered any more"),
            }
            for event in &events {
                match event.data.u64() {
                    STOP => return,
                    LISTENER => self.accept(),
                    number => self.shared.house().hear(number),
                }
            }
            self.shared.house().cut_late(Instant::now());
        }
    }

    /// Lets in who waits at the door; those beyond this turn's share are there at the next.
    fn accept(&self) {
        for _ in 0..EVENTS_PER_TURN {
            match local::accept(&self.listener) {
                Ok(Some(guest)) => self.admit(guest),
                Ok(None) => return,
                Err(error) => {
                    // Out of descriptors, most likely. They stay in the backlog; without a pause we would spin on them.
                    tracing::warn!(%error, "shm: cannot accept a connection, trying again");
                    return thread::sleep(ACCEPT_PAUSE);
                }
            }
        }
    }

    fn admit(&self, guest: OwnedFd) {
        let mut house = self.shared.house();
        let number = house.next_number;
        if house.guests.len() >= house.connections {
            return turn_away(&guest, Denial::Busy);
        }
        if let Err(error) = watch(&self.epoll, &guest, number) {
            return tracing::warn!(%error, "shm: cannot watch a connection");
        }
        house.next_number += 1;
        let deadline = Instant::now() + house.handshake_timeout;
        house.guests.insert(number, Guest { socket: guest, stage: Stage::Greeting { deadline } });
    }
}

fn watch(epoll: &OwnedFd, fd: &OwnedFd, number: u64) -> Result<(), Errno> {
    epoll::add(epoll, fd, epoll::EventData::new_u64(number), epoll::EventFlags::IN | epoll::EventFlags::RDHUP)
}

/// Numbers of the two descriptors that are no guests.
const STOP: u64 = 0;
const LISTENER: u64 = 1;
/// Events taken, and connections accepted, per turn: enough to be rare, few enough that a crowd can't starve those inside.
const EVENTS_PER_TURN: usize = 64;
/// Rest after a failed accept.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
