//! Outgoing: requests on their way to the disk, in their order.
//!
//! They are put here under the lock of the names, and submitted without it: the disk may call back at once, and takes
//! time for a long write. One thread submits at a time; others that come meanwhile leave their requests to it.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use super::disk::{Disk, DiskDone};
use crate::client::{LEAST_SUBMITTED_BYTES, Request};

#[derive(Default)]
pub(super) struct Outgoing {
    queue: Mutex<Queue>,
}

#[derive(Default)]
struct Queue {
    requests: VecDeque<(Request, DiskDone)>,
    is_submitting: bool,
}

impl Outgoing {
    /// To be called under the lock of the names.
    pub(super) fn put(&self, request: Request, done: DiskDone) {
        self.queue().requests.push_back((request, done));
    }

    /// Whether the disk has every request.
    pub(super) fn is_empty(&self) -> bool {
        let queue = self.queue();
        queue.requests.is_empty() && !queue.is_submitting
    }

    /// Submits what there is, unless another thread does.
    pub(super) fn submit(&self, disk: &dyn Disk) {
        let mut queue = self.queue();
        if queue.is_submitting {
            return;
        }
        queue.is_submitting = true;
        while let Some((request, done)) = queue.requests.pop_front() {
            drop(queue);
            disk.submit(request, done);
            queue = self.queue();
        }
        queue.is_submitting = false;
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Bounds what is under way, so that the disk itself never makes a thread wait: it could be the one that the disk
/// completes requests with.
#[derive(Default)]
pub(super) struct Gate {
    room: Mutex<Room>,
    changed: Condvar,
}

#[derive(Default)]
struct Room {
    under_way: usize,
    /// Nothing waits any more.
    is_closed: bool,
}

/// Bytes that may be under way: less than a volume takes without waiting.
const MOST_BYTES: usize = 24 << 20;

const _: () =
    assert!(MOST_BYTES < LEAST_SUBMITTED_BYTES && super::MOST_WRITE_BYTES + 4 * super::CHANGE_BYTES < MOST_BYTES);

impl Gate {
    /// Waits until there is room for so many bytes, or the gate is closed.
    pub(super) fn enter(&self, bytes: usize) {
        let mut room = self.room();
        while room.under_way + bytes > MOST_BYTES && !room.is_closed {
            room = self.changed.wait(room).unwrap_or_else(PoisonError::into_inner);
        }
        room.under_way += bytes;
    }

    /// So many bytes are not under way any more.
    pub(super) fn leave(&self, bytes: usize) {
        self.room().under_way -= bytes;
        self.changed.notify_all();
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
