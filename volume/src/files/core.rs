//! Core: the names, the requests that follow from changes of them, and what of each file is under way.
//!
//! ```text
//!   caller ──▶ lock: check, change names, put requests ──▶ without the lock: submit ──▶ disk
//!                │                                                                       │
//!                ╰─ a block must be read first: the file is busy, and later changes wait │
//!                     ╰────────────────── its change goes on ◀──── the block ────────────╯
//! ```
//!
//! Names change in memory when a change is submitted, and its caller learns of it when it is acknowledged.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use bytes::Bytes;

use super::ahead::{Ahead, Early};
use super::disk::{Disk, DiskDone};
use super::error::FilesError;
use super::outgoing::{Gate, MOST_BYTES, Outgoing};
use super::parts::{Content, Known};
use super::refused::Refused;
use super::visits::Visits;
use crate::client::{self, Request};
use crate::names::{BlocksToWrite, Names};
use crate::wire::Run;

/// Called once, with the result.
pub(super) type Done<T> = Box<dyn FnOnce(Result<T, FilesError>) + Send>;

// Larger than the bound: what `content` and `reading` do is here too, as all of it needs the one lock.
/// What all calls have in common. It does not own the disk: it may be dropped by a thread of it.
pub(super) struct Core {
    state: Mutex<State>,
    outgoing: Arc<Outgoing>,
    pub(super) ahead: Arc<Ahead>,
    pub(super) gate: Arc<Gate>,
    failure: Arc<OnceLock<client::Error>>,
    began: Instant,
    visits: Arc<Visits>,
}

/// Under the lock.
pub(super) struct State {
    pub(super) names: Names,
    pub(super) files: HashMap<u64, Live>,
    /// Changes for which no cluster is free until a read is over, with what is known of them. Their files are busy.
    pub(super) starved: Vec<(Waiting, Known)>,
    pub(super) refused: Refused,
}

/// A file whose contents were changed since it was opened.
#[derive(Default)]
pub(super) struct Live {
    /// A change of it waits for blocks.
    pub(super) is_busy: bool,
    /// Changes behind that one.
    pub(super) waiting: VecDeque<Waiting>,
    /// The block that was last written in part, and its number in the file: the next write often goes on in it.
    pub(super) last: Option<(u64, Bytes)>,
}

/// A change of contents, with its caller.
pub(super) struct Waiting {
    pub(super) content: Content,
    pub(super) caller: Caller<()>,
}

/// Who waits for a change, and the room that it takes at the gate.
pub(super) struct Caller<T> {
    /// `None`: it was told.
    done: Option<Done<T>>,
    room: usize,
    gate: Arc<Gate>,
    /// Bytes of a change that may be answered before it is acknowledged.
    ahead: Option<usize>,
    /// It was.
    early: Option<Early>,
}

impl<T> Caller<T> {
    /// Tells the caller.
    pub(super) fn tell(mut self, result: Result<T, FilesError>) {
        self.leave();
        if let Some(done) = self.done.take() {
            done(result);
        }
    }

    fn leave(&mut self) {
        let room = std::mem::take(&mut self.room);
        if room > 0 {
            self.gate.leave(room);
        }
        drop(self.early.take());
    }

    /// The change has this number of bytes, and may be answered before it is acknowledged.
    pub(super) fn ahead(mut self, bytes: usize) -> Caller<T> {
        self.ahead = Some(bytes);
        self
    }

    /// Whether the change may be answered before it is acknowledged.
    #[cfg(test)]
    pub(super) fn is_ahead(&self) -> bool {
        self.ahead.is_some()
    }

    /// If the window permits it, the one to be told now. What is left keeps the room.
    pub(super) fn split(&mut self, ahead: &Arc<Ahead>) -> Option<Caller<T>> {
        self.early = Some(ahead.enter(self.ahead?)?);
        let gate = Arc::clone(&self.gate);
        Some(Caller { done: self.done.take(), room: 0, gate, ahead: None, early: None })
    }
}

impl<T> Drop for Caller<T> {
    /// Nothing that is asked is left without an answer.
    fn drop(&mut self) {
        self.leave();
        if let Some(done) = self.done.take() {
            done(Err(FilesError::Disk(client::Error::Closed)));
        }
    }
}

impl Core {
    /// Changes may be answered early as long as no more than `ahead` bytes are.
    pub(super) fn new(names: Names, disk: &Arc<dyn Disk>, ahead: usize) -> Core {
        let (failure, visits) = (Arc::default(), Arc::<Visits>::default());
        Core {
            state: Mutex::new(State { names, files: HashMap::new(), starved: Vec::new(), refused: Refused::default() }),
            outgoing: Outgoing::new(disk, &visits),
            ahead: Ahead::new(ahead, &failure),
            gate: Gate::new(MOST_BYTES + ahead),
            failure,
            began: Instant::now(),
            visits,
        }
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for room at the gate.
    pub(super) fn caller<T>(
        &self,
        room: usize,
        done: impl FnOnce(Result<T, FilesError>) + Send + 'static,
    ) -> Caller<T> {
        self.gate.enter(room);
        Caller { done: Some(Box::new(done)), room, gate: Arc::clone(&self.gate), ahead: None, early: None }
    }

    /// Whether the disk still works.
    ///
    /// # Errors
    /// The first error of it.
    pub(super) fn check(&self) -> Result<(), FilesError> {
        match self.failure.get() {
            Some(error) => Err(FilesError::Disk(error.clone())),
            None if self.visits.is_over() => Err(FilesError::Disk(client::Error::Closed)),
            None => Ok(()),
        }
    }

    /// Whether the disk still works, and accepts changes.
    ///
    /// # Errors
    /// The first error of it, or why it accepts none now.
    pub(super) fn check_space(&self) -> Result<(), FilesError> {
        self.check()?;
        let space = self.outgoing.disk().map_or(Ok(()), |disk| disk.has_space());
        space.map_err(FilesError::Disk)
    }

    /// Whether every request before has been submitted.
    pub(super) fn has_submitted_all(&self) -> bool {
        self.outgoing.is_empty()
    }

    pub(super) fn submit(&self) {
        self.outgoing.submit();
    }

    /// A request after which there is nothing to do.
    pub(super) fn put(&self, request: Request) {
        let failure = Arc::clone(&self.failure);
        self.put_for(request, Box::new(move |result| note(&failure, result.map(drop))));
    }

    pub(super) fn put_for(&self, request: Request, done: DiskDone) {
        self.outgoing.put(request, done);
    }

    pub(super) fn put_blocks(&self, writes: Vec<BlocksToWrite>) {
        writes.into_iter().for_each(|BlocksToWrite { first, data }| self.put(Request::write(first, data)));
    }

    /// The last request of a change. Those before it are done when it is, as each copy does them in their order.
    pub(super) fn put_last<T: Send + 'static>(&self, request: Request, caller: Caller<T>, value: T) {
        let failure = Arc::clone(&self.failure);
        let done = move |result: Result<Bytes, client::Error>| {
            let result = result.map(|_| value);
            note(&failure, result.as_ref().map(drop).map_err(client::Error::clone));
            caller.tell(result.map_err(FilesError::Disk));
        };
        self.put_for(request, Box::new(done));
    }

    /// A change of names alone. The caller is told once it is acknowledged.
    pub(super) fn change<T: Send + 'static>(
        &self,
        caller: Caller<T>,
        change: impl FnOnce(&mut Names, i64) -> Result<T, FilesError>,
    ) {
        let mut state = self.state();
        let changed = self.check_space().and_then(|()| {
            self.prepare(&mut state);
            change(&mut state.names, now())
        });
        let told = match (changed, state.names.commit()) {
            (Ok(value), Some(BlocksToWrite { first, data })) => {
                self.put_last(Request::write(first, data), caller, value);
                self.put_blocks(state.names.step());
                None
            }
            (changed, blocks) => {
                self.put_blocks(blocks.into_iter().collect());
                Some((caller, changed))
            }
        };
        drop(state);
        if let Some((caller, changed)) = told {
            caller.tell(changed);
        }
        self.submit();
    }

    /// Several changes of contents, one after the other. The caller is told after the last one.
    pub(super) fn change_several(
        self: &Arc<Core>,
        parts: Vec<Content>,
        done: impl FnOnce(Result<(), FilesError>) + Send + 'static,
    ) {
        let joined = Arc::new(Mutex::new((parts.len(), Ok(()), Some(Box::new(done) as Done<()>))));
        for content in parts {
            let joined = Arc::clone(&joined);
            let caller = self.caller(super::CHANGE_BYTES, move |result| {
                let mut state = joined.lock().unwrap_or_else(PoisonError::into_inner);
                state.0 -= 1;
                if state.1.is_ok() {
                    state.1 = result;
                }
                let told =
                    if state.0 == 0 { state.2.take().zip(Some(std::mem::replace(&mut state.1, Ok(())))) } else { None };
                drop(state);
                if let Some((done, result)) = told {
                    done(result);
                }
            });
            self.change_content(content, caller);
        }
    }

    /// A flush, after this change.
    pub(super) fn flush(
        &self,
        caller: Caller<()>,
        change: impl FnOnce(&mut Names, &Refused) -> Result<(), FilesError>,
    ) {
        let mut state = self.state();
        let changed = self.check().and_then(|()| {
            self.prepare(&mut state);
            let State { names, refused, .. } = &mut *state;
            change(names, refused)
        });
        let log = state.names.commit();
        self.put_blocks(log.into_iter().collect());
        let told = match changed {
            Ok(()) => {
                self.put_last(Request::Flush, caller, ());
                self.put_blocks(state.names.step());
                None
            }
            Err(error) => Some((caller, error)),
        };
        drop(state);
        if let Some((caller, error)) = told {
            caller.tell(Err(error));
        }
        self.submit();
    }

    /// A file that no change of waits for needs no memory.
    pub(super) fn forget(&self, ino: u64) {
        let mut state = self.state();
        let is_idle = state.files.get(&ino).is_some_and(|live| !live.is_busy && live.waiting.is_empty());
        if is_idle && !state.names.is_held(ino) {
            state.files.remove(&ino);
        }
    }

    /// Blocks that this thread can have at once.
    pub(super) fn try_read(&self, run: Run) -> Option<Bytes> {
        self.outgoing.disk()?.try_read(run)
    }

    /// Before a change of names.
    pub(super) fn prepare(&self, state: &mut State) {
        state.names.tick(self.began.elapsed().as_millis() as u64); // five hundred million years fit
        let writes = state.names.prepare();
        self.put_blocks(writes);
    }

    /// A thread of the disk comes with what was read. `false`: the files are closed.
    pub(super) fn visit(&self, visit: impl FnOnce()) -> bool {
        self.visits.visit(visit)
    }

    /// From now on nothing goes on, and no thread of the disk is here.
    pub(super) fn close(&self) {
        self.visits.end(|| self.gate.close());
    }

    /// What failed first is what every later call is told.
    pub(super) fn note(&self, result: Result<(), client::Error>) {
        note(&self.failure, result);
    }
}

/// What waits for space has not failed: it is done later.
fn note(failure: &OnceLock<client::Error>, result: Result<(), client::Error>) {
    if let Err(error) = result.or_else(|error| if error.is_for_space() { Ok(()) } else { Err(error) }) {
        let _ = failure.set(error); // it may not be the first one
    }
}

/// Nanoseconds since 1970.
pub(super) fn now() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_nanos()).unwrap_or(i64::MAX)
}
