//! Mailbox: answers that other threads give to requests of a ring.
//!
//! The ring's own thread commits them. A thread that commits has the kernel do the slot's next requests in it, also
//! after it has returned to its own work; if it ends, the slot is lost.

use std::io;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::event::EventfdFlags;
use rustix::io::Errno;

use super::slot::Room;
use crate::answer::{LaterReplier, WRONG_LENGTH};

/// An answer that was given later.
pub(super) struct Posted {
    pub(super) index: usize,
    pub(super) unique: u64,
    pub(super) result: Result<Body, Errno>,
    /// The payload that the answer had with it.
    pub(super) room: Option<Room>,
}

/// What an answer consists of.
pub(super) enum Body {
    /// These bytes.
    Bytes(Vec<u8>),
    /// So many bytes, which are in the slot's payload.
    InPlace(usize),
}

pub(crate) struct Mailbox {
    state: Mutex<State>,
    /// An eventfd: each write to it is news. It is never read, which would be a system call for each answer: the ring
    /// polls it for writes, not for what it counts.
    news: OwnedFd,
}

#[derive(Default)]
struct State {
    posted: Vec<Posted>,
    is_closed: bool,
}

impl Mailbox {
    pub(super) fn new() -> io::Result<Mailbox> {
        let news = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Mailbox { state: Mutex::default(), news })
    }

    pub(super) fn news(&self) -> &OwnedFd {
        &self.news
    }

    /// What was posted, and whether more can be.
    pub(super) fn take(&self) -> (Vec<Posted>, bool) {
        let mut state = self.state();
        (std::mem::take(&mut state.posted), !state.is_closed)
    }

    /// The connection is over. Answers to come are dropped.
    pub(crate) fn close(&self) {
        self.state().is_closed = true;
        self.tell();
    }

    fn post(&self, posted: Posted) {
        let mut state = self.state();
        if state.is_closed {
            return;
        }
        state.posted.push(posted);
        let is_first = state.posted.len() == 1;
        drop(state);
        if is_first {
            self.tell();
        }
    }

    fn tell(&self) {
        // It is full after 2^64 writes.
        let _ = rustix::io::write(&self.news, &1_u64.to_ne_bytes());
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Answers in any thread.
pub(super) struct RingLater {
    pub(super) mailbox: Arc<Mailbox>,
    pub(super) index: usize,
    /// The slot's payload, for answers that are put there.
    pub(super) room: Option<Room>,
}

impl LaterReplier for RingLater {
    fn reply(mut self: Box<Self>, unique: u64, answer: Result<&[&[u8]], Errno>) {
        let result = answer.and_then(|pieces| put(self.room.as_mut(), pieces));
        let RingLater { mailbox, index, room } = *self;
        mailbox.post(Posted { index, unique, result, room });
    }

    fn place(&self) -> Option<Range<u64>> {
        self.room.as_ref().and_then(Room::place)
    }

    fn landed(self: Box<Self>, unique: u64, length: usize) {
        let fits = self.room.as_ref().is_some_and(|room| room.place().is_some() && length <= room.length());
        let result = if fits { Ok(Body::InPlace(length)) } else { Err(WRONG_LENGTH) };
        let RingLater { mailbox, index, room } = *self;
        mailbox.post(Posted { index, unique, result, room });
    }
}

/// Puts an answer into the payload, if it is here, or else into bytes of its own.
pub(super) fn put(room: Option<&mut Room>, pieces: &[&[u8]]) -> Result<Body, Errno> {
    let Some(room) = room else { return Ok(Body::Bytes(pieces.concat())) };
    let mut sink = room.sink(usize::MAX);
    pieces.iter().for_each(|piece| sink.put(piece));
    sink.finish().map(Body::InPlace).ok_or(WRONG_LENGTH)
}
