//! The blocks below the files, and the changes on their way to them.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

use bytes::Bytes;
use remora_volume::client::{self, Error, LEAST_SUBMITTED_BYTES, Request, Volume};
use remora_volume::shape::BLOCK_BYTES;
use remora_volume::wire::Run;

use crate::error::{FilesError, MOST_WRITE_BYTES};

// The blocks below the files.

/// Called once, with the result of a request.
pub type DiskDone = Box<dyn FnOnce(Result<Bytes, Error>) + Send>;

/// Blocks that one process writes. What is submitted is done in that order: whatever is left of the disk after a
/// failure is what it was after some of the writes, and all before them.
pub trait Disk: Send + Sync {
    /// How many blocks there are.
    fn blocks(&self) -> u64;

    /// Submits a request. `done` is called once, by this thread or another one, and does not block. A write is done
    /// when it is as safe as the disk makes it at once; a flush, when every write before it is as safe as it makes
    /// anything.
    fn submit(&self, request: Request, done: DiskDone);

    /// Whether changes are accepted. What was submitted is done in its order, also if it must wait for space: then
    /// `done` is told [`Error::NoSpace`] at once.
    ///
    /// # Errors
    /// Why not.
    fn has_space(&self) -> Result<(), Error> {
        Ok(())
    }

    /// Blocks that this thread can have at once. `None`: submit the read. Every write that is done is in what is read.
    fn try_read(&self, run: Run) -> Option<Bytes> {
        let _ = run;
        None
    }
}

impl Disk for Volume {
    fn blocks(&self) -> u64 {
        self.shape().blocks()
    }

    fn submit(&self, request: Request, done: DiskDone) {
        let done = Arc::new(Mutex::new(Some(done)));
        let take = |done: &Mutex<Option<DiskDone>>| done.lock().unwrap_or_else(PoisonError::into_inner).take();
        let later = Arc::clone(&done);
        let submitted = Volume::submit(self, request, move |result| {
            if let Some(done) = take(&later) {
                done(result);
            }
        });
        // Then it is not called.
        if let Err(error) = submitted
            && let Some(done) = take(&done)
        {
            done(Err(error));
        }
    }

    fn has_space(&self) -> Result<(), Error> {
        Volume::has_space(self)
    }

    fn try_read(&self, run: Run) -> Option<Bytes> {
        Volume::try_read(self, run).ok().flatten()
    }
}

// Requests on their way to the disk, in their order.
//
// They are put here under the lock of the names, and submitted without it: the disk may call back at once, and takes
// time for a long write. One thread submits at a time; others that come meanwhile leave their requests to it. As much
// is under way as the disk takes without making that thread wait: it could be the one that the disk completes requests
// with. What is done lets the next ones go.

pub(crate) struct Outgoing {
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
    pub(crate) fn new(disk: &Arc<dyn Disk>, visits: &Arc<Visits>) -> Arc<Outgoing> {
        let visits = Arc::clone(visits);
        Arc::new(Outgoing { disk: Arc::downgrade(disk), queue: Mutex::default(), visits })
    }

    /// The disk, while there is one.
    pub(crate) fn disk(&self) -> Option<Arc<dyn Disk>> {
        self.disk.upgrade()
    }

    /// To be called under the lock of the names.
    pub(crate) fn put(&self, request: Request, done: DiskDone) {
        self.queue().requests.push_back((request, done));
    }

    /// Whether the disk has every request.
    pub(crate) fn is_empty(&self) -> bool {
        let queue = self.queue();
        queue.requests.is_empty() && !queue.is_submitting
    }

    /// Submits what there is room for, unless another thread does.
    pub(crate) fn submit(self: &Arc<Outgoing>) {
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
pub(crate) struct Gate {
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

/// Room that a change takes beside its bytes: its part of the log, and the part of an image that is written with it.
pub(crate) const CHANGE_BYTES: usize = 64 << 10;

/// Bytes that may be under way at the disk: less than a volume takes without waiting.
pub(crate) const MOST_BYTES: usize = 24 << 20;

const _: () = assert!(MOST_BYTES < LEAST_SUBMITTED_BYTES && MOST_WRITE_BYTES + 4 * CHANGE_BYTES < MOST_BYTES);

impl Gate {
    /// For this number of bytes, [`MOST_BYTES`] at least: one change always finds room.
    pub(crate) fn new(most: usize) -> Arc<Gate> {
        Arc::new(Gate { most: most.max(MOST_BYTES), room: Mutex::default(), changed: Condvar::new() })
    }

    /// Waits until there is room for this number of bytes, or the gate is closed.
    pub(crate) fn enter(&self, bytes: usize) {
        let mut room = self.room();
        while room.under_way + bytes > self.most && !room.is_closed {
            room.waiting += 1;
            room = self.changed.wait(room).unwrap_or_else(PoisonError::into_inner);
            room.waiting -= 1;
        }
        room.under_way += bytes;
    }

    /// So many bytes are not under way any more.
    pub(crate) fn leave(&self, bytes: usize) {
        let mut room = self.room();
        room.under_way -= bytes;
        let is_awaited = room.waiting > 0;
        drop(room);
        if is_awaited {
            self.changed.notify_all();
        }
    }

    /// From now on no thread waits.
    pub(crate) fn close(&self) {
        self.room().is_closed = true;
        self.changed.notify_all();
    }

    fn room(&self) -> MutexGuard<'_, Room> {
        self.room.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Called once, with the result.
type Done = Box<dyn FnOnce(Result<(), FilesError>) + Send>;

/// Write-behind: changes that are answered before they are acknowledged, as far as a window permits it.
///
/// They are on their way then, in their order: whatever is left of the disk after a failure is what it was after some
/// of them, and all before those. What fails is told to every later call, a flush among them.
pub(crate) struct Ahead {
    /// Bytes that may be answered and not acknowledged.
    limit: usize,
    window: Mutex<Window>,
    failure: Arc<OnceLock<client::Error>>,
}

#[derive(Default)]
struct Window {
    bytes: usize,
    /// Changes that were answered early so far, and those of them that are over. They end in their order.
    given: u64,
    over: u64,
    /// Calls that wait for this number of changes, the first ones.
    waiting: VecDeque<(u64, Done)>,
}

/// A change that was answered early. When it is dropped, it is acknowledged or has failed.
pub(crate) struct Early {
    ahead: Arc<Ahead>,
    bytes: usize,
}

impl Ahead {
    pub(crate) fn new(limit: usize, failure: &Arc<OnceLock<client::Error>>) -> Arc<Ahead> {
        Arc::new(Ahead { limit, window: Mutex::default(), failure: Arc::clone(failure) })
    }

    /// `None`: the caller of a change of this length must wait.
    pub(crate) fn enter(self: &Arc<Ahead>, bytes: usize) -> Option<Early> {
        let mut window = self.window();
        if window.bytes + bytes > self.limit {
            return None;
        }
        window.bytes += bytes;
        window.given += 1;
        Some(Early { ahead: Arc::clone(self), bytes })
    }

    /// Calls this when every change is over that was answered early until now.
    pub(crate) fn wait(&self, done: Done) {
        let mut window = self.window();
        if window.over < window.given {
            let given = window.given;
            return window.waiting.push_back((given, done));
        }
        drop(window);
        done(self.result());
    }

    fn result(&self) -> Result<(), FilesError> {
        self.failure.get().map_or(Ok(()), |error| Err(FilesError::Disk(error.clone())))
    }

    fn window(&self) -> MutexGuard<'_, Window> {
        self.window.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Early {
    fn drop(&mut self) {
        let mut window = self.ahead.window();
        window.bytes -= self.bytes;
        window.over += 1;
        let over = window.over;
        let due = window.waiting.iter().take_while(|(given, _)| *given <= over).count();
        let due: Vec<_> = window.waiting.drain(..due).collect();
        drop(window);
        due.into_iter().for_each(|(_, done)| done(self.ahead.result()));
    }
}

/// A rundown guard: closing waits for completion callbacks, so that none of them drops the last reference to the disk.
#[derive(Default)]
pub(crate) struct Visits {
    /// No visit begins any more.
    is_over: AtomicBool,
    visitors: AtomicUsize,
}

impl Visits {
    /// A thread of the disk comes with what is done. `false`: the files are closed.
    pub(crate) fn visit(&self, visit: impl FnOnce()) -> bool {
        self.visitors.fetch_add(1, Ordering::SeqCst);
        let may_visit = !self.is_over();
        if may_visit {
            visit();
        }
        self.visitors.fetch_sub(1, Ordering::SeqCst);
        may_visit
    }

    /// From now on no thread of the disk is here. `end` is called before it waits for those that are.
    pub(crate) fn end(&self, end: impl FnOnce()) {
        self.is_over.store(true, Ordering::SeqCst);
        end();
        while self.visitors.load(Ordering::SeqCst) > 0 {
            std::thread::yield_now(); // a visitor waits for nothing
        }
    }

    pub(crate) fn is_over(&self) -> bool {
        self.is_over.load(Ordering::SeqCst)
    }
}
