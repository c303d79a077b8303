//! Outgoing: requests on their way to the disk, in their order.
//!
//! They are put here under the lock of the names, and submitted without it: the disk may call back at once, and takes
//! time for a long write. One thread submits at a time; others that come meanwhile leave their requests to it. As much
//! is under way as the disk takes without making that thread wait: it could be the one that the disk completes requests
//! with. What is done lets the next ones go.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};

use super::disk::{Disk, DiskDone};
use super::visits::Visits;
use crate::client::{LEAST_SUBMITTED_BYTES, Request};
use crate::shape::BLOCK_BYTES;

pub(super) struct Outgoing {
    /// It may be dropped by a thread of the disk, so it does not own it.
    disk: Weak<dyn Disk>,
    queue: Mutex<Queue>,
    visits: Arc<Visits>,
}

#[derive(Default)]
struct Queue {
    requests: VecDeque<(Request, DiskDone)>,
    /// Bytes of requests that the disk has not done.
    under_way: usize,
    is_submitting: bool,
}

impl Queue {
    /// The next request, if there is room for it at the disk; with the room that it takes.
    fn next(&mut self) -> Option<(Request, DiskDone, usize)> {
        let room = room_of(&self.requests.front()?.0);
        if self.under_way + room > MOST_BYTES {
            return None;
        }
        self.under_way += room;
        let (request, done) = self.requests.pop_front()?;
        Some((request, done, room))
    }
}

impl Outgoing {
    pub(super) fn new(disk: &Arc<dyn Disk>, visits: &Arc<Visits>) -> Arc<Outgoing> {
        let visits = Arc::clone(visits);
        Arc::new(Outgoing { disk: Arc::downgrade(disk), queue: Mutex::default(), visits })
    }

    /// The disk, while there is one.
    pub(super) fn disk(&self) -> Option<Arc<dyn Disk>> {
        self.disk.upgrade()
    }

    /// To be called under the lock of the names.
    pub(super) fn put(&self, request: Request, done: DiskDone) {
        self.queue().requests.push_back((request, done));
    }

    /// Whether the disk has every request.
    pub(super) fn is_empty(&self) -> bool {
        let queue = self.queue();
        queue.requests.is_empty() && !queue.is_submitting
    }

    /// Submits what there is room for, unless another thread does.
    pub(super) fn submit(self: &Arc<Outgoing>) {
        let Some(disk) = self.disk() else { return };
        let mut queue = self.queue();
        if queue.is_submitting {
            return;
        }
        queue.is_submitting = true;
        while let Some((request, done, room)) = queue.next() {
            drop(queue);
            let outgoing = Arc::clone(self);
            let done = move |result| {
                outgoing.queue().under_way -= room;
                done(result);
                outgoing.visits.visit(|| outgoing.submit());
            };
            disk.submit(request, Box::new(done));
            queue = self.queue();
        }
        queue.is_submitting = false;
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What a request takes of the room at the disk. Short ones are counted too, so that not too many are under way.
fn room_of(request: &Request) -> usize {
    let bytes = match request {
        Request::Write { data, .. } => data.len(),
        Request::Read(run) => run.count as usize * BLOCK_BYTES,
        Request::Zero(_) | Request::Map(_) | Request::Flush => 0,
    };
    bytes + REQUEST_BYTES
}

/// Room of a request beside its bytes: as many as a volume lets be under way are more than [`MOST_BYTES`] then.
const REQUEST_BYTES: usize = 4 << 10;

/// Bounds what was asked for and is not done, and so the memory of it: callers wait here.
pub(super) struct Gate {
    /// Bytes.
    most: usize,
    room: Mutex<Room>,
    changed: Condvar,
}

#[derive(Default)]
struct Room {
    under_way: usize,
    /// Threads that wait. Without one there is no reason to wake any, which is a system call.
    waiting: usize,
    /// Nothing waits any more.
    is_closed: bool,
}

/// Bytes that may be under way at the disk: less than a volume takes without waiting.
pub(super) const MOST_BYTES: usize = 24 << 20;

const _: () =
    assert!(MOST_BYTES < LEAST_SUBMITTED_BYTES && super::MOST_WRITE_BYTES + 4 * super::CHANGE_BYTES < MOST_BYTES);

impl Gate {
    /// For this number of bytes, [`MOST_BYTES`] at least: one change always finds room.
    pub(super) fn new(most: usize) -> Arc<Gate> {
        Arc::new(Gate { most: most.max(MOST_BYTES), room: Mutex::default(), changed: Condvar::new() })
    }

    /// Waits until there is room for this number of bytes, or the gate is closed.
    pub(super) fn enter(&self, bytes: usize) {
        let mut room = self.room();
        while room.under_way + bytes > self.most && !room.is_closed {
            room.waiting += 1;
            room = self.changed.wait(room).unwrap_or_else(PoisonError::into_inner);
            room.waiting -= 1;
        }
        room.under_way += bytes;
    }

    /// So many bytes are not under way any more.
    pub(super) fn leave(&self, bytes: usize) {
        let mut room = self.room();
        room.under_way -= bytes;
        let is_awaited = room.waiting > 0;
        drop(room);
        if is_awaited {
            self.changed.notify_all();
        }
    }

    /// From now on no thread waits.
    pub(super) fn close(&self) {
        self.room().is_closed = true;
        self.changed.notify_all();
    }

    fn room(&self) -> MutexGuard<'_, Room> {
        self.room.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
