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
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, mpsc};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use bytes::{Bytes, BytesMut};
use remora_volume::client::{self, Error, Request};
use remora_volume::shape::BLOCK_BYTES;
use remora_volume::wire::{MOST_BLOCKS, MOST_RUNS, Run};

use crate::FilesError;
use crate::disk::{
    Ahead, BLOCK, CHANGE_BYTES, Content, Disk, DiskDone, Early, Gate, Known, MOST_BYTES, Outgoing, Piece, Refused,
    Visits, blocks_of, cleared, clusters_of, find, pieces, uncovered, zeros,
};
use crate::names::layout::{CLUSTER_BYTES, Geometry, Head};
use crate::names::{BlocksToWrite, MOST_FILE_BYTES, Names, NamesError, New, SetAttributes, View};

/// Called once, with the result.
pub(crate) type Done<T> = Box<dyn FnOnce(Result<T, FilesError>) + Send>;

/// What all calls have in common. It does not own the disk: it may be dropped by a thread of it.
pub(crate) struct Core {
    state: Mutex<State>,
    outgoing: Arc<Outgoing>,
    pub(crate) ahead: Arc<Ahead>,
    pub(crate) gate: Arc<Gate>,
    failure: Arc<OnceLock<client::Error>>,
    began: Instant,
    visits: Arc<Visits>,
}

/// Under the lock.
pub(crate) struct State {
    pub(crate) names: Names,
    pub(crate) files: HashMap<u64, Live>,
    /// Changes for which no cluster is free until a read is over, with what is known of them. Their files are busy.
    starved: Vec<(Waiting, Known)>,
    pub(crate) refused: Refused,
}

/// A file whose contents were changed since it was opened.
#[derive(Default)]
pub(crate) struct Live {
    /// A change of it waits for blocks.
    is_busy: bool,
    /// Changes behind that one.
    pub(crate) waiting: VecDeque<Waiting>,
    /// The block that was last written in part, and its number in the file: the next write often goes on in it.
    pub(crate) last: Option<(u64, Bytes)>,
}

/// A change of contents, with its caller.
pub(crate) struct Waiting {
    pub(crate) content: Content,
    pub(crate) caller: Caller<()>,
}

/// Who waits for a change, and the room that it takes at the gate.
pub(crate) struct Caller<T> {
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
    pub(crate) fn tell(mut self, result: Result<T, FilesError>) {
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
    pub(crate) fn ahead(mut self, bytes: usize) -> Caller<T> {
        self.ahead = Some(bytes);
        self
    }

    /// Whether the change may be answered before it is acknowledged.
    #[cfg(test)]
    fn is_ahead(&self) -> bool {
        self.ahead.is_some()
    }

    /// If the window permits it, the one to be told now. What is left keeps the room.
    pub(crate) fn split(&mut self, ahead: &Arc<Ahead>) -> Option<Caller<T>> {
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
    pub(crate) fn new(names: Names, disk: &Arc<dyn Disk>, ahead: usize) -> Core {
        let (failure, visits) = (Arc::default(), Arc::<Visits>::default());
        Core {
            state: Mutex::new(State { names, files: HashMap::new(), starved: Vec::new(), refused: Refused::default() }),
            outgoing: Outgoing::new(disk, &visits),
            ahead: Ahead::new(ahead, &failure),
            gate: Gate::new(Ahead::room(ahead).saturating_add(MOST_BYTES)),
            failure,
            began: Instant::now(),
            visits,
        }
    }

    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for room at the gate.
    pub(crate) fn caller<T>(
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
    pub(crate) fn check(&self) -> Result<(), FilesError> {
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
    pub(crate) fn check_space(&self) -> Result<(), FilesError> {
        self.check()?;
        let space = self.outgoing.disk().map_or(Ok(()), |disk| disk.has_space());
        space.map_err(FilesError::Disk)
    }

    /// Whether every request before has been submitted.
    fn has_submitted_all(&self) -> bool {
        self.outgoing.is_empty()
    }

    pub(crate) fn submit(&self) {
        self.outgoing.submit();
    }

    /// A request after which there is nothing to do.
    pub(crate) fn put(&self, request: Request) {
        let failure = Arc::clone(&self.failure);
        self.put_for(request, Box::new(move |result| note(&failure, result.map(drop))));
    }

    fn put_for(&self, request: Request, done: DiskDone) {
        self.outgoing.put(request, done);
    }

    fn put_blocks(&self, writes: Vec<BlocksToWrite>) {
        writes.into_iter().for_each(|BlocksToWrite { first, data }| self.put(Request::write(first, data)));
    }

    /// The last request of a change. Those before it are done when it is, as each copy does them in their order.
    fn put_last<T: Send + 'static>(&self, request: Request, caller: Caller<T>, value: T) {
        let failure = Arc::clone(&self.failure);
        let done = move |result: Result<Bytes, client::Error>| {
            let result = result.map(|_| value);
            note(&failure, result.as_ref().map(drop).map_err(client::Error::clone));
            caller.tell(result.map_err(FilesError::Disk));
        };
        self.put_for(request, Box::new(done));
    }

    /// A change of names alone. The caller is told once it is acknowledged.
    pub(crate) fn change<T: Send + 'static>(
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

    /// A change of names that nobody waits for. If it can wait, it is written with the next one.
    pub(crate) fn change_later(&self, caller: Caller<()>, change: impl FnOnce(&mut Names) -> Result<(), NamesError>) {
        let mut state = self.state();
        self.prepare(&mut state);
        let changed = change(&mut state.names).map_err(FilesError::Names);
        let log = if state.names.put_off() { None } else { state.names.commit() };
        let told = match log {
            Some(BlocksToWrite { first, data }) => {
                self.put_last(Request::write(first, data), caller, ());
                self.put_blocks(state.names.step());
                None
            }
            None => Some(caller),
        };
        drop(state);
        if let Some(caller) = told {
            caller.tell(changed);
        }
        self.submit();
    }

    /// Several changes of contents, one after the other. The caller is told after the last one.
    pub(crate) fn change_several(
        self: &Arc<Core>,
        parts: Vec<Content>,
        done: impl FnOnce(Result<(), FilesError>) + Send + 'static,
    ) {
        let joined = Arc::new(Mutex::new((parts.len(), Ok(()), Some(Box::new(done) as Done<()>))));
        for content in parts {
            let joined = Arc::clone(&joined);
            let caller = self.caller(CHANGE_BYTES, move |result| {
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
    pub(crate) fn flush(
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
    pub(crate) fn forget(&self, ino: u64) {
        let mut state = self.state();
        let is_idle = state.files.get(&ino).is_some_and(|live| !live.is_busy && live.waiting.is_empty());
        if is_idle && !state.names.is_held(ino) {
            state.files.remove(&ino);
        }
    }

    /// Blocks that this thread can have at once.
    pub(crate) fn try_read(&self, run: Run) -> Option<Bytes> {
        self.outgoing.disk()?.try_read(run)
    }

    /// Before a change of names.
    pub(crate) fn prepare(&self, state: &mut State) {
        state.names.tick(self.began.elapsed().as_millis() as u64); // five hundred million years fit
        let writes = state.names.prepare();
        self.put_blocks(writes);
    }

    /// A thread of the disk comes with what was read. `false`: the files are closed.
    pub(crate) fn visit(&self, visit: impl FnOnce()) -> bool {
        self.visits.visit(visit)
    }

    /// From now on nothing goes on, and no thread of the disk is here.
    pub(crate) fn close(&self) {
        self.visits.end(|| self.gate.close());
    }

    /// What failed first is what every later call is told.
    pub(crate) fn note(&self, result: Result<(), client::Error>) {
        note(&self.failure, result);
    }

    /// A change of a file's contents begins, or waits for those before it.
    pub(crate) fn change_content(self: &Arc<Core>, content: Content, caller: Caller<()>) {
        let mut state = self.state();
        let live = state.files.entry(content.ino()).or_default();
        let mut told = Vec::new();
        let ino = content.ino();
        live.waiting.push_back(Waiting { content, caller });
        self.begin_waiting(&mut state, ino, &mut told);
        drop(state);
        told.into_iter().for_each(|(caller, result)| caller.tell(result));
        self.submit();
    }

    /// Begins a change. What is known of it at once is told by the caller of this, without the lock.
    fn begin(self: &Arc<Core>, state: &mut State, waiting: Waiting, told: &mut Vec<Told>) {
        let refused = match &waiting.content {
            Content::Write { ino, .. } => state.refused.check(*ino),
            _ => Ok(()),
        };
        let needs = match self.check_space().and(refused).and_then(|()| Ok(waiting.content.needs(&state.names)?)) {
            Ok(needs) => needs,
            Err(error) => {
                state.refused.note_write(&waiting.content, &error);
                return told.push((waiting.caller, Err(error)));
            }
        };
        let live = state.files.entry(waiting.content.ino()).or_default();
        let last = live.last.clone();
        let known: Vec<_> = last.into_iter().filter(|(block, _)| needs.iter().any(|(need, _)| need == block)).collect();
        let missing: Vec<_> =
            needs.into_iter().filter(|(need, _)| known.iter().all(|(block, _)| block != need)).collect();
        if missing.is_empty() {
            return self.carry_out(state, waiting, Known(known), told);
        }
        live.is_busy = true;
        let read = state.names.begin_read();
        let pending = PendingChange { waiting: Some(waiting), known, left: missing.len(), error: None };
        let pending = Arc::new(Mutex::new(pending));
        for (block, at) in missing {
            let (core, pending) = (Arc::downgrade(self), Arc::clone(&pending));
            let done = move |result: Result<Bytes, client::Error>| {
                let Some(core) = core.upgrade() else { return };
                let mut guard = pending.lock().unwrap_or_else(PoisonError::into_inner);
                match result {
                    Ok(data) => guard.known.push((block, data)),
                    Err(error) => guard.error = Some(error),
                }
                guard.left -= 1;
                if guard.left == 0 {
                    let (waiting, known) = (guard.waiting.take(), std::mem::take(&mut guard.known));
                    let error = guard.error.take();
                    drop(guard);
                    if let Some(waiting) = waiting {
                        core.visit(|| core.go_on(waiting, known, error, read));
                    }
                }
            };
            self.put_for(Request::Read(Run { first: at, count: 1 }), Box::new(done));
        }
    }

    /// The blocks that a change has waited for are there.
    fn go_on(self: &Arc<Core>, waiting: Waiting, known: Vec<(u64, Bytes)>, error: Option<client::Error>, read: u64) {
        let ino = waiting.content.ino();
        let mut told = Vec::new();
        let mut state = self.state();
        if let Some(live) = state.files.get_mut(&ino) {
            live.is_busy = false;
        }
        match error {
            None => self.carry_out(&mut state, waiting, Known(known), &mut told),
            Some(error) => {
                self.note(Err(error.clone()));
                told.push((waiting.caller, Err(FilesError::Disk(error))));
            }
        }
        self.begin_waiting(&mut state, ino, &mut told);
        self.read_is_over(&mut state, read, &mut told);
        drop(state);
        told.into_iter().for_each(|(caller, result)| caller.tell(result));
        self.submit();
    }

    /// Changes of a file that have waited for another one begin.
    fn begin_waiting(self: &Arc<Core>, state: &mut State, ino: u64, told: &mut Vec<Told>) {
        while let Some(live) = state.files.get_mut(&ino).filter(|live| !live.is_busy)
            && let Some(next) = live.waiting.pop_front()
        {
            self.begin(state, next, told);
        }
        let is_needless = |live: &Live| !live.is_busy && (live.last.is_none() || state.names.attr(ino).is_err());
        if state.files.get(&ino).is_some_and(is_needless) {
            state.files.remove(&ino);
        }
    }

    /// A read is over. Clusters that it may have been of can be used, and changes that wait for such ones go on.
    pub(crate) fn end_read(self: &Arc<Core>, read: u64) {
        let mut told = Vec::new();
        let mut state = self.state();
        self.read_is_over(&mut state, read, &mut told);
        let has_put = !told.is_empty() || !self.has_submitted_all();
        drop(state);
        told.into_iter().for_each(|(caller, result)| caller.tell(result));
        if has_put {
            self.submit();
        }
    }

    fn read_is_over(self: &Arc<Core>, state: &mut State, read: u64, told: &mut Vec<Told>) {
        state.names.end_read(read);
        for (waiting, known) in std::mem::take(&mut state.starved) {
            let ino = waiting.content.ino();
            if let Some(live) = state.files.get_mut(&ino) {
                live.is_busy = false;
            }
            self.carry_out(state, waiting, known, told);
            self.begin_waiting(state, ino, told);
        }
    }

    /// Carries out a change whose blocks are known.
    fn carry_out(&self, state: &mut State, waiting: Waiting, known: Known, told: &mut Vec<Told>) {
        self.prepare(state);
        let ino = waiting.content.ino();
        let planned = match &waiting.content {
            Content::Write { offset, data, .. } => self.plan_write(state, ino, *offset, data, &known),
            Content::Resize { size, set, .. } => plan_resize(state, ino, *size, *set, &known),
            Content::Allocate { clusters, size, .. } => self.plan_allocation(state, ino, clusters.clone(), *size),
            Content::Punch { range, .. } => plan_punch(state, ino, range.clone(), &known),
        };
        let is_starved = matches!(planned, Err(FilesError::Names(NamesError::NoSpace)));
        if is_starved && state.names.has_clusters_that_are_read() {
            state.files.entry(ino).or_default().is_busy = true;
            return state.starved.push((waiting, known));
        }
        let mut caller = waiting.caller;
        let log = state.names.commit();
        let (mut write, last) = match planned {
            Ok(planned) => planned,
            Err(error) => {
                state.refused.note_write(&waiting.content, &error);
                self.put_blocks(log.into_iter().collect());
                #[cfg(test)]
                if caller.is_ahead() && crate::Mutant::AnsweredWithoutSpace.is_active() {
                    return told.push((caller, Ok(())));
                }
                return told.push((caller, Err(error)));
            }
        };
        if let Content::Resize { size, .. } = &waiting.content {
            state.refused.cut(ino, *size);
        }
        if let Some(live) = state.files.get_mut(&ino) {
            live.last = last;
        }
        let fits = write.runs.len() < MOST_RUNS && write.bytes() <= TOGETHER_BYTES;
        let mut requests = Vec::new();
        match log {
            Some(log) if fits => {
                write.add(log.first, log.data.into());
                let data = write.data();
                requests.push(Request::Write { runs: write.runs, data });
            }
            log => {
                split(write, &mut requests);
                requests.extend(log.map(|log| Request::write(log.first, log.data)));
            }
        }
        match requests.pop() {
            None => told.push((caller, Ok(()))),
            Some(last) => {
                requests.into_iter().for_each(|request| self.put(request));
                told.extend(caller.split(&self.ahead).map(|caller| (caller, Ok(()))));
                self.put_last(last, caller, ());
            }
        }
        self.put_blocks(state.names.step());
    }

    fn plan_write(&self, state: &mut State, ino: u64, offset: u64, data: &Bytes, known: &Known) -> Plan {
        let end = offset + data.len() as u64;
        let blocks = blocks_of(&(offset..end));
        let new = state.names.allocate(ino, clusters_of(&blocks))?;
        state.names.drop_capabilities(ino)?;
        state.names.written(ino, end, now())?;
        self.clear(uncovered(state.names.head().geometry, &new, &blocks));
        let whole = known.around(offset, data);
        let mut write = ToWrite::default();
        for Piece { count, at, .. } in find(&state.names, ino, blocks.clone())? {
            // There are no holes: they were given clusters.
            at.into_iter().for_each(|at| write.add_run(at, count * BLOCK));
        }
        let is_part = !end.is_multiple_of(BLOCK);
        let last = is_part.then(|| (blocks.end - 1, Bytes::copy_from_slice(&whole[whole.len() - BLOCK_BYTES..])));
        write.parts.push(whole);
        Ok((write, last))
    }

    fn plan_allocation(&self, state: &mut State, ino: u64, clusters: std::ops::Range<u64>, size: u64) -> Plan {
        let new = state.names.allocate(ino, clusters)?;
        state.names.written(ino, size, now())?;
        self.clear(uncovered(state.names.head().geometry, &new, &(0..0)));
        Ok((ToWrite::default(), state.files.get(&ino).and_then(|live| live.last.clone())))
    }

    /// Before a file has these blocks, they are zeros.
    fn clear(&self, runs: Vec<Run>) {
        runs.into_iter().for_each(|run| self.put(Request::Zero(run)));
    }

    /// Reads bytes of a file, as far as it has them.
    pub(crate) fn read(self: &Arc<Core>, ino: u64, range: Range<u64>, caller: Caller<Pieces>) {
        let mut state = self.state();
        let found = self.check().and_then(|()| {
            let blocks = blocks_of(&range);
            let (size, runs) = state.names.file(ino, clusters_of(&blocks))?;
            let range = range.start.min(size)..range.end.min(size);
            Ok((pieces(state.names.head().geometry, &runs, blocks_of(&range)), range))
        });
        let (pieces, range) = match found {
            Ok((pieces, range)) if !range.is_empty() => (pieces, range),
            found => {
                drop(state);
                return caller.tell(found.map(|_| Vec::new()));
            }
        };
        let parts = parts(&pieces);
        let number = state.names.begin_read();
        let left = parts.iter().filter(|part| matches!(part, Part::Blocks(_))).count();
        // A write that is on its way to the disk is perhaps the one that has made the file longer. Holes need no disk.
        if left == 0 || self.has_submitted_all() {
            drop(state);
            if let Some(read) = self.read_here(&parts) {
                self.end_read(number);
                return caller.tell(Ok(cut(&parts, read, &range)));
            }
            state = self.state();
        }
        let read = vec![Bytes::new(); parts.len()];
        let asked = parts.clone();
        let pending = PendingRead { parts, range, read, left, error: None, caller: Some(caller) };
        let pending = Arc::new(Mutex::new(pending));
        for (place, part) in asked.into_iter().enumerate() {
            let Part::Blocks(run) = part else { continue };
            let (core, pending) = (Arc::downgrade(self), Arc::clone(&pending));
            let done = move |result| {
                let Some(last) = arrived(&pending, place, result) else { return };
                if let Some(core) = core.upgrade() {
                    core.visit(|| core.end_read(number));
                }
                last();
            };
            self.put_for(Request::Read(run), Box::new(done));
        }
        drop(state);
        self.submit();
    }

    /// All of them, if this thread can have them at once.
    fn read_here(&self, parts: &[Part]) -> Option<Vec<Bytes>> {
        let read = |part: &Part| match part {
            Part::Zeros(_) => Some(Bytes::new()),
            Part::Blocks(run) => self.try_read(*run),
        };
        parts.iter().map(read).collect()
    }
}

/// What waits for space has not failed: it is done later.
fn note(failure: &OnceLock<client::Error>, result: Result<(), client::Error>) {
    if let Err(error) = result.or_else(|error| if error.is_for_space() { Ok(()) } else { Err(error) }) {
        let _ = failure.set(error); // it may not be the first one
    }
}

/// Nanoseconds since 1970.
pub(crate) fn now() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_nanos()).unwrap_or(i64::MAX)
}

// Changes of what is in files, carried out.
//
// Changes of one file take place one after the other, in the order in which they were asked for. One that changes a
// part of a block reads it first, unless it was the last one to be changed; those behind it wait meanwhile. Changes of
// other files, and reads, do not.

/// Runs of blocks, and the bytes that they get.
#[derive(Default)]
struct ToWrite {
    runs: Vec<Run>,
    parts: Vec<Bytes>,
}

impl ToWrite {
    fn add_run(&mut self, at: u64, bytes: u64) {
        let count = (bytes / BLOCK) as u32; // of a write, which has a bound
        match self.runs.last_mut() {
            Some(last) if last.first + u64::from(last.count) == at => last.count += count,
            _ => self.runs.push(Run { first: at, count }),
        }
    }

    fn add(&mut self, at: u64, data: Bytes) {
        self.add_run(at, data.len() as u64);
        self.parts.push(data);
    }

    fn bytes(&self) -> usize {
        self.parts.iter().map(Bytes::len).sum()
    }

    /// One part is not copied.
    fn data(&mut self) -> Bytes {
        if self.parts.len() == 1 {
            return self.parts.pop().unwrap_or_default();
        }
        let mut data = BytesMut::with_capacity(self.bytes());
        self.parts.drain(..).for_each(|part| data.extend_from_slice(&part));
        data.freeze()
    }
}

/// Up to this length, data goes with the log in one write: a second message would take longer than a copy.
const TOGETHER_BYTES: usize = 64 << 10;

/// A change that waits for blocks.
struct PendingChange {
    waiting: Option<Waiting>,
    known: Vec<(u64, Bytes)>,
    left: usize,
    error: Option<client::Error>,
}

type Told = (Caller<()>, Result<(), FilesError>);

/// What is written with the log, and the block that may be changed next.
type Plan = Result<(ToWrite, Option<(u64, Bytes)>), FilesError>;

fn plan_resize(state: &mut State, ino: u64, size: u64, set: SetAttributes, known: &Known) -> Plan {
    let (before, _) = state.names.file(ino, 0..0)?;
    let mut write = ToWrite::default();
    let mut last = None;
    if size < before {
        // Up to the end of the last cluster that stays, or of the file as it was.
        let end = size.next_multiple_of(CLUSTER_BYTES).min(before.next_multiple_of(BLOCK));
        last = clear_part(state, ino, size..end, known, &mut write)?;
    } else if let Some(live) = state.files.get(&ino) {
        last = live.last.clone();
    }
    state.names.resize(ino, size, now())?;
    state.names.drop_capabilities(ino)?;
    if set != SetAttributes::default() {
        state.names.set(ino, set, now())?;
    }
    Ok((write, last))
}

fn plan_punch(state: &mut State, ino: u64, range: std::ops::Range<u64>, known: &Known) -> Plan {
    let (size, _) = state.names.file(ino, 0..0)?;
    // Behind the end of the file there is nothing but clusters.
    let range = if range.end >= size { range.start..range.end.next_multiple_of(CLUSTER_BYTES) } else { range };
    let mut write = ToWrite::default();
    let last = clear_part(state, ino, range.clone(), known, &mut write)?;
    state.names.unmap(ino, range.start.div_ceil(CLUSTER_BYTES)..range.end / CLUSTER_BYTES)?;
    state.names.written(ino, 0, now())?;
    state.names.drop_capabilities(ino)?;
    state.names.settle(ino)?;
    Ok((write, last))
}

/// Writes zeros over what of a range of bytes is not freed: the parts of blocks at its ends, and whole blocks of
/// clusters that have others.
fn clear_part(
    state: &State,
    ino: u64,
    range: std::ops::Range<u64>,
    known: &Known,
    write: &mut ToWrite,
) -> Result<Option<(u64, Bytes)>, FilesError> {
    let mut last = None;
    let mut ends: Vec<(u64, std::ops::Range<usize>)> = Vec::new();
    let (first_block, last_block) = (range.start / BLOCK, range.end / BLOCK);
    let (start, end) = ((range.start % BLOCK) as usize, (range.end % BLOCK) as usize);
    match () {
        () if first_block == last_block && range.start < range.end => ends.push((first_block, start..end)),
        () => {
            if start > 0 {
                ends.push((first_block, start..BLOCK_BYTES));
            }
            if end > 0 && range.start < range.end {
                ends.push((last_block, 0..end));
            }
        }
    }
    for (block, zeros) in ends {
        let found = find(&state.names, ino, block..block + 1)?;
        if let Some(at) = found.first().and_then(|piece| piece.at) {
            let data = known.without(block, zeros);
            write.add(at, data.clone());
            last = Some((block, data));
        }
    }
    for piece in cleared(&state.names, ino, &range)? {
        if let Some(at) = piece.at {
            let mut at = at;
            for part in zeros((piece.count * BLOCK) as usize) {
                let blocks = part.len() as u64 / BLOCK;
                write.add(at, part);
                at += blocks;
            }
        }
    }
    Ok(last)
}

/// As many writes as it takes.
fn split(mut write: ToWrite, requests: &mut Vec<Request>) {
    let mut data = write.data();
    let (mut runs, mut blocks) = (Vec::new(), 0);
    let mut flush = |runs: &mut Vec<Run>, blocks: &mut usize| {
        if *blocks > 0 {
            let data = data.split_to(*blocks * BLOCK_BYTES);
            requests.push(Request::Write { runs: std::mem::take(runs), data });
            *blocks = 0;
        }
    };
    for mut run in write.runs {
        while run.count > 0 {
            if runs.len() == MOST_RUNS || blocks == MOST_BLOCKS {
                flush(&mut runs, &mut blocks);
            }
            let count = run.count.min((MOST_BLOCKS - blocks) as u32);
            runs.push(Run { first: run.first, count });
            blocks += count as usize;
            run = Run { first: run.first + u64::from(count), count: run.count - count };
        }
    }
    flush(&mut runs, &mut blocks);
}

/// Whether a file can be written up to this byte.
pub(crate) fn check_end(offset: u64, length: u64) -> Result<u64, FilesError> {
    let end = offset.checked_add(length).filter(|end| *end <= MOST_FILE_BYTES);
    end.ok_or(FilesError::Names(NamesError::FileTooLong))
}

// Bytes of files, out of the disk.
//
// Where the blocks are is looked up under the lock. Until the read is over, no cluster that is freed meanwhile is
// given to another file. A read returns every write that was acknowledged before it began.

/// What is read: pieces, one after the other.
type Pieces = Vec<Bytes>;

/// A part of a read: zeros, or blocks of the disk.
#[derive(Clone, Copy)]
enum Part {
    Zeros(u64),
    Blocks(Run),
}

fn parts(pieces: &[Piece]) -> Vec<Part> {
    let mut parts = Vec::with_capacity(pieces.len());
    for Piece { count, at, .. } in pieces {
        match at {
            None => parts.push(Part::Zeros(*count)),
            Some(at) => {
                let runs = (0..*count).step_by(MOST_BLOCKS);
                parts.extend(runs.map(|skipped| {
                    let count = (*count - skipped).min(MOST_BLOCKS as u64) as u32;
                    Part::Blocks(Run { first: at + skipped, count })
                }));
            }
        }
    }
    parts
}

/// The bytes of a range, out of the blocks in which it is.
fn cut(parts: &[Part], read: Vec<Bytes>, range: &Range<u64>) -> Pieces {
    let mut skipped = (range.start % BLOCK) as usize;
    let mut left = (range.end - range.start) as usize;
    let mut found = Vec::with_capacity(parts.len());
    for (part, data) in parts.iter().zip(read) {
        let length = match part {
            Part::Zeros(count) => (*count * BLOCK) as usize,
            Part::Blocks(run) => run.count as usize * BLOCK_BYTES,
        };
        let take = (length - skipped).min(left);
        match part {
            Part::Zeros(_) => found.extend(zeros(take)),
            Part::Blocks(_) => found.push(data.slice(skipped..skipped + take)),
        }
        (skipped, left) = (0, left - take);
    }
    found
}

/// A read that waits for the disk.
struct PendingRead {
    parts: Vec<Part>,
    range: Range<u64>,
    read: Vec<Bytes>,
    left: usize,
    error: Option<client::Error>,
    caller: Option<Caller<Pieces>>,
}

/// A part has arrived. After the last one: what tells the caller.
fn arrived(
    pending: &Mutex<PendingRead>,
    place: usize,
    result: Result<Bytes, client::Error>,
) -> Option<impl FnOnce() + use<>> {
    let mut pending = pending.lock().unwrap_or_else(PoisonError::into_inner);
    match result {
        Ok(data) => pending.read[place] = data,
        Err(error) => pending.error = Some(error),
    }
    pending.left -= 1;
    if pending.left > 0 {
        return None;
    }
    let (caller, error) = (pending.caller.take()?, pending.error.take());
    let (parts, read) = (std::mem::take(&mut pending.parts), std::mem::take(&mut pending.read));
    let range = pending.range.clone();
    Some(move || {
        let result = error.map_or_else(|| Ok(cut(&parts, read, &range)), |error| Err(FilesError::Disk(error)));
        caller.tell(result);
    })
}

// Opening: a volume gets files, or has some.

/// Blocks at the beginning of a volume that must be zeros before it gets files: partition tables and the superblocks of
/// other file systems are in there.
const LOOKED_AT: u32 = 64;

/// Submits a request, and waits for its completion.
fn wait(disk: &dyn Disk, request: Request) -> Result<Bytes, FilesError> {
    let (done, is_done) = mpsc::sync_channel(1);
    disk.submit(request, Box::new(move |result| _ = done.send(result))); // the other end waits below
    Ok(is_done.recv().unwrap_or(Err(Error::Closed))?)
}

/// What a volume is opened for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// Its files are used.
    Files,
    /// All of it is a block device or an image.
    Device,
    /// It gets files. With `force` whatever it holds.
    Format {
        /// What it holds is lost.
        force: bool,
    },
}

impl Purpose {
    /// Whether a volume of this number of blocks can be opened for this. `read` reads blocks of it; another writer may
    /// change them meanwhile.
    ///
    /// # Errors
    /// What keeps it from being opened, as the opening itself would say; or [`FilesError::Blocks`] if it cannot be
    /// read.
    pub fn check(self, blocks: u64, mut read: impl FnMut(Run) -> Result<Bytes, String>) -> Result<(), FilesError> {
        let mut read = |run| read(run).map_err(FilesError::Blocks);
        match self {
            Purpose::Files => {
                let mut tries = LOOKS;
                loop {
                    tries -= 1;
                    match view(blocks, &mut read) {
                        // The log was written, or its area used again, while it was read.
                        Err(FilesError::Damaged(_)) if tries > 0 => std::thread::sleep(LOOK_AGAIN),
                        result => return result.map(drop),
                    }
                }
            }
            Purpose::Device => has_no_files(&read(Run { first: 0, count: 1 })?),
            Purpose::Format { force: true } => Geometry::of(blocks).map(drop).ok_or(FilesError::TooSmall),
            Purpose::Format { force: false } => {
                Geometry::of(blocks).ok_or(FilesError::TooSmall)?;
                is_empty(&read(Run { first: 0, count: LOOKED_AT })?)
            }
        }
    }
}

/// Whether the first block of a volume is not the head of files.
pub(crate) fn has_no_files(first: &[u8]) -> Result<(), FilesError> {
    if Head::parse(first).is_ok() { Err(FilesError::HasFiles) } else { Ok(()) }
}

/// Whether these blocks, the first ones, are zeros.
fn is_empty(first: &[u8]) -> Result<(), FilesError> {
    let used = first.chunks(BLOCK_BYTES).position(|block| block.iter().any(|byte| *byte != 0));
    used.map_or(Ok(()), |block| Err(FilesError::Occupied(block as u64)))
}

/// Makes an empty file system.
pub(crate) fn format(disk: &dyn Disk, root: &New, force: bool) -> Result<(), FilesError> {
    let geometry = Geometry::of(disk.blocks()).ok_or(FilesError::TooSmall)?;
    if !force {
        is_empty(&wait(disk, Request::Read(Run { first: 0, count: LOOKED_AT }))?)?;
    }
    for BlocksToWrite { first, data } in Names::format(geometry, root, now()) {
        wait(disk, Request::write(first, data))?;
    }
    wait(disk, Request::Flush).map(drop)
}

/// The names in a volume of this number of blocks, with the head that says where they are.
fn view(blocks: u64, mut read: impl FnMut(Run) -> Result<Bytes, FilesError>) -> Result<(Head, View), FilesError> {
    let head = Head::parse(&read(Run { first: 0, count: 1 })?)?;
    let said = head.geometry.blocks();
    if said > blocks {
        return Err(FilesError::Shrunk { said, blocks });
    }
    let mut view = View::new(head);
    loop {
        let (first, most) = view.wants();
        let count = most.min(READ_BLOCKS) as u32;
        let is_more = match count {
            0 => view.push(&[])?,
            count => view.push(&read(Run { first, count })?)?,
        };
        if !is_more {
            break;
        }
        if count == 0 {
            return Err(FilesError::Damaged(crate::names::log::Malformed("the end of an area")));
        }
    }
    Ok((head, view))
}

/// The names in a volume, with what must be written before they are used.
pub(crate) fn open(disk: &Arc<dyn Disk>) -> Result<(Names, Vec<BlocksToWrite>), FilesError> {
    let blocks = disk.blocks();
    let (head, view) = view(blocks, |run| wait(&**disk, Request::Read(run)))?;
    let mut names = Names::of(view, blocks)?;
    let mut writes = Vec::new();
    if names.head() != head {
        writes.push(BlocksToWrite { first: 0, data: names.head().to_block() });
    }
    if names.begin_to_move() {
        write_all(&**disk, std::mem::take(&mut writes))?;
        loop {
            let (blocks, has_moved) = names.go_on_to_move();
            write_all(&**disk, blocks)?;
            if has_moved {
                break;
            }
        }
        tracing::info!(inodes = names.usage().inodes, "the volume has grown, and so has the room for names");
    }
    // Files that were open without a name when the writer ended.
    loop {
        writes.extend(names.prepare());
        let is_more = names.remove_orphans(ORPHANS_AT_ONCE)?;
        writes.extend(names.commit());
        writes.extend(names.step());
        if !is_more {
            return Ok((names, writes));
        }
    }
}

/// How often names are read that another writer changes meanwhile, before they are called damaged.
const LOOKS: u32 = 5;

/// Pause between two looks: much longer than it takes to read the end of a log.
const LOOK_AGAIN: std::time::Duration = std::time::Duration::from_millis(100);

/// Blocks that are read at a time: 1 MiB.
const READ_BLOCKS: u64 = 256;

const _: () = assert!(READ_BLOCKS as usize <= MOST_BLOCKS);

/// Inodes that are removed with one frame.
const ORPHANS_AT_ONCE: usize = 256;

/// Writes these blocks, and waits for the last one.
pub(crate) fn write_all(disk: &dyn Disk, writes: Vec<BlocksToWrite>) -> Result<(), FilesError> {
    writes.into_iter().try_for_each(|BlocksToWrite { first, data }| wait(disk, Request::write(first, data)).map(drop))
}
