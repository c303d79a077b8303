//! The blocks below the files: which of them a range of a file is, which a change must know first, and the changes on
//! their way to them.
//!
//! What is always true, and makes this short: every block of a file's clusters has been written, and the bytes behind
//! the end of a file are zeros. So a new cluster is written as zeros where its first write does not cover it, and a
//! file that is cut has zeros written up to the end of its last cluster.

use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

use bytes::{Bytes, BytesMut};
use remora_volume::client::{self, Error, LEAST_SUBMITTED_BYTES, Request, Volume};
use remora_volume::shape::BLOCK_BYTES;
use remora_volume::wire::{self, Run};

use crate::names::layout::{CLUSTER_BLOCKS, CLUSTER_BYTES, Geometry};
use crate::names::{self, Names, NamesError, SetAttributes};
use crate::{FilesError, MOST_WRITE_BYTES};

#[cfg(test)]
use crate::Mutant;

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

/// Changes that may be answered and not acknowledged, however short they are: those of 4 KiB of a window of 4 MiB, far
/// more than a network has under way. Each takes room at the gate. One more waits for its answer, and its process does
/// not ask for anything else meanwhile: so there is room for others, and no thread waits at the gate that the kernel's
/// questions come by.
pub(crate) const MOST_EARLY: u64 = 1024;

impl Ahead {
    /// Room at the gate that is kept for changes which are answered early, of `limit` bytes.
    pub(crate) fn room(limit: usize) -> usize {
        if limit == 0 { 0 } else { limit.saturating_add(MOST_EARLY as usize * CHANGE_BYTES) }
    }

    pub(crate) fn new(limit: usize, failure: &Arc<OnceLock<client::Error>>) -> Arc<Ahead> {
        Arc::new(Ahead { limit, window: Mutex::default(), failure: Arc::clone(failure) })
    }

    /// `None`: the caller of a change of this length must wait.
    pub(crate) fn enter(self: &Arc<Ahead>, bytes: usize) -> Option<Early> {
        let mut window = self.window();
        if window.bytes + bytes > self.limit || window.given - window.over >= MOST_EARLY {
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

pub(crate) const BLOCK: u64 = BLOCK_BYTES as u64;

/// A change of a file's contents.
#[derive(Clone, Debug)]
pub(crate) enum Content {
    /// These bytes are at this offset. `is_cached`: a page cache has accepted them before.
    Write { ino: u64, offset: u64, data: Bytes, is_cached: bool },
    /// The file has this size, and the attributes are set.
    Resize { ino: u64, size: u64, set: SetAttributes },
    /// The file has these clusters, and at least this size.
    Allocate { ino: u64, clusters: Range<u64>, size: u64 },
    /// These bytes are zeros, and take no more space than they must.
    Punch { ino: u64, range: Range<u64> },
}

/// Neighbouring blocks of a file, which are neighbours in the volume too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    /// The first one, in the file.
    pub(crate) first: u64,
    pub(crate) count: u64,
    /// The first one, in the volume; `None`: a hole.
    pub(crate) at: Option<u64>,
}

/// The pieces of these blocks of a file with these runs.
pub(crate) fn pieces(geometry: Geometry, runs: &[names::Run], blocks: Range<u64>) -> Vec<Piece> {
    let mut pieces = Vec::with_capacity(2 * runs.len() + 1);
    let mut at = blocks.start;
    for run in runs {
        let clusters = run.clusters();
        let start = (clusters.start * CLUSTER_BLOCKS).max(blocks.start);
        let end = (clusters.end * CLUSTER_BLOCKS).min(blocks.end);
        if start >= end {
            continue;
        }
        if at < start {
            pieces.push(Piece { first: at, count: start - at, at: None });
        }
        let place = geometry.cluster_at(run.at) + (start - clusters.start * CLUSTER_BLOCKS);
        pieces.push(Piece { first: start, count: end - start, at: Some(place) });
        at = end;
    }
    if at < blocks.end {
        pieces.push(Piece { first: at, count: blocks.end - at, at: None });
    }
    pieces
}

/// The clusters of blocks.
pub(crate) fn clusters_of(blocks: &Range<u64>) -> Range<u64> {
    blocks.start / CLUSTER_BLOCKS..blocks.end.div_ceil(CLUSTER_BLOCKS)
}

/// The blocks of bytes.
pub(crate) fn blocks_of(bytes: &Range<u64>) -> Range<u64> {
    bytes.start / BLOCK..bytes.end.div_ceil(BLOCK)
}

/// Where blocks of a file are.
pub(crate) fn find(names: &Names, ino: u64, blocks: Range<u64>) -> Result<Vec<Piece>, NamesError> {
    let (_, runs) = names.file(ino, clusters_of(&blocks))?;
    Ok(pieces(names.head().geometry, &runs, blocks))
}

impl Content {
    pub(crate) fn ino(&self) -> u64 {
        match self {
            Content::Write { ino, .. }
            | Content::Resize { ino, .. }
            | Content::Allocate { ino, .. }
            | Content::Punch { ino, .. } => *ino,
        }
    }

    /// The blocks of which it changes a part, and a part of what they hold stays: their numbers in the file, and where
    /// they are.
    pub(crate) fn needs(&self, names: &Names) -> Result<Vec<(u64, u64)>, NamesError> {
        let (size, _) = names.file(self.ino(), 0..0)?;
        // What stays of the bytes before `start`, and of those from `end`.
        let (start, end) = match self {
            Content::Write { offset, data, .. } => (*offset, offset + data.len() as u64),
            Content::Resize { size: new, .. } => (*new, u64::MAX),
            Content::Punch { range, .. } => (range.start, range.end),
            Content::Allocate { .. } => return Ok(Vec::new()),
        };
        let mut blocks = Vec::new();
        if !start.is_multiple_of(BLOCK) && start / BLOCK * BLOCK < size {
            blocks.push(start / BLOCK);
        }
        if !end.is_multiple_of(BLOCK) && end < size && !blocks.contains(&(end / BLOCK)) {
            blocks.push(end / BLOCK);
        }
        // Nothing is cut off if a file becomes longer.
        if matches!(self, Content::Resize { size: new, .. } if *new >= size) {
            blocks.clear();
        }
        let mut needs = Vec::new();
        for block in blocks {
            let found = find(names, self.ino(), block..block + 1)?;
            needs.extend(found.first().and_then(|piece| Some((block, piece.at?))));
        }
        Ok(needs)
    }
}

/// Blocks that are known, by their number in the file. Those that are not are zeros.
pub(crate) struct Known(pub(crate) Vec<(u64, Bytes)>);

impl Known {
    fn put(&self, block: u64, range: Range<usize>, into: &mut BytesMut) {
        match self.0.iter().find(|(number, _)| *number == block) {
            Some((_, data)) => into.extend_from_slice(&data[range]),
            None => into.extend_from_slice(&ZEROS[range]),
        }
    }

    /// Whole blocks of a file: these bytes, and what is known around them.
    pub(crate) fn around(&self, offset: u64, data: &Bytes) -> Bytes {
        let end = offset + data.len() as u64;
        // Less than a block.
        let (before, after) = ((offset % BLOCK) as usize, (end % BLOCK) as usize);
        if before == 0 && after == 0 {
            return data.clone();
        }
        let mut whole = BytesMut::with_capacity(data.len() + 2 * BLOCK_BYTES);
        self.put(offset / BLOCK, 0..before, &mut whole);
        whole.extend_from_slice(data);
        if after > 0 {
            self.put(end / BLOCK, after..BLOCK_BYTES, &mut whole);
        }
        whole.freeze()
    }

    /// A block of which these bytes are zeros.
    pub(crate) fn without(&self, block: u64, zeros: Range<usize>) -> Bytes {
        let mut whole = BytesMut::with_capacity(BLOCK_BYTES);
        self.put(block, 0..zeros.start, &mut whole);
        whole.extend_from_slice(&ZEROS[zeros.clone()]);
        self.put(block, zeros.end..BLOCK_BYTES, &mut whole);
        whole.freeze()
    }
}

/// Zeros, in pieces.
pub(crate) fn zeros(mut length: usize) -> impl Iterator<Item = Bytes> {
    std::iter::from_fn(move || {
        let part = length.min(ZEROS.len());
        length -= part;
        (part > 0).then(|| Bytes::from_static(&ZEROS[..part]))
    })
}

/// Blocks of clusters that are new, and that a write of these blocks does not cover.
pub(crate) fn uncovered(geometry: Geometry, new: &[names::Run], written: &Range<u64>) -> Vec<wire::Run> {
    let mut runs = Vec::new();
    for run in new {
        let blocks = run.clusters().start * CLUSTER_BLOCKS..run.clusters().end * CLUSTER_BLOCKS;
        let before = blocks.start..written.start.clamp(blocks.start, blocks.end);
        let after = written.end.clamp(blocks.start, blocks.end)..blocks.end;
        for part in [before, after] {
            if part.start < part.end {
                let first = geometry.cluster_at(run.at) + (part.start - blocks.start);
                runs.push(wire::Run { first, count: (part.end - part.start) as u32 }); // no more than a run has
            }
        }
    }
    runs
}

/// Blocks that become zeros where a range of bytes does, without the clusters that are freed for it, and without the
/// blocks of which only a part does: where they are.
pub(crate) fn cleared(names: &Names, ino: u64, bytes: &Range<u64>) -> Result<Vec<Piece>, NamesError> {
    let blocks = bytes.start.div_ceil(BLOCK)..bytes.end / BLOCK;
    if blocks.start >= blocks.end {
        return Ok(Vec::new());
    }
    let freed = blocks.start.div_ceil(CLUSTER_BLOCKS) * CLUSTER_BLOCKS..blocks.end / CLUSTER_BLOCKS * CLUSTER_BLOCKS;
    let parts = if freed.start < freed.end {
        [blocks.start..freed.start, freed.end..blocks.end]
    } else {
        [blocks.clone(), 0..0]
    };
    let mut cleared = Vec::new();
    for part in parts.into_iter().filter(|part| part.start < part.end) {
        cleared.extend(find(names, ino, part)?.into_iter().filter(|piece| piece.at.is_some()));
    }
    Ok(cleared)
}

/// Files of which a page cache has accepted bytes that the volume has refused.
///
/// The process that wrote them was answered before: it wrote to mapped memory. If what it writes next went on, the file
/// would have a hole among what it has written, and a later `fsync` would say that all is well. So nothing more of the
/// file is written or flushed until what was lost no longer matters: the file is cut before it, or no process has the
/// file open. One entry for each such file that is open.
#[derive(Default)]
pub(crate) struct Refused(HashMap<u64, Lost>);

static ZEROS: [u8; CLUSTER_BYTES as usize] = [0; CLUSTER_BYTES as usize];

/// What a file lacks.
struct Lost {
    /// The first byte of it.
    first: u64,
    /// Why it was refused.
    error: FilesError,
}

impl Refused {
    /// A page cache is told that it cannot keep what it has accepted of a file, from this byte on.
    pub(crate) fn note(&mut self, ino: u64, offset: u64, error: &FilesError) {
        let lost = self.0.entry(ino).or_insert_with(|| Lost { first: offset, error: error.clone() });
        lost.first = lost.first.min(offset);
    }

    /// The same, if this change is of such bytes.
    pub(crate) fn note_write(&mut self, content: &Content, error: &FilesError) {
        if let Content::Write { ino, offset, is_cached: true, .. } = content {
            self.note(*ino, *offset, error);
        }
    }

    /// Whether a file can be written and flushed.
    ///
    /// # Errors
    /// Why its bytes were refused.
    pub(crate) fn check(&self, ino: u64) -> Result<(), FilesError> {
        #[cfg(test)]
        if Mutant::RefusedOnce.is_active() {
            return Ok(());
        }
        self.0.get(&ino).map_or(Ok(()), |lost| Err(lost.error.clone()))
    }

    /// A file was cut to this size.
    pub(crate) fn cut(&mut self, ino: u64, size: u64) {
        if self.0.get(&ino).is_some_and(|lost| size <= lost.first) {
            self.0.remove(&ino);
        }
    }

    /// No process has the file open.
    pub(crate) fn forget(&mut self, ino: u64) {
        self.0.remove(&ino);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn pieces_are_runs_and_holes_in_their_order() {
        let geometry = Geometry::of(4096).unwrap();
        let runs = [names::Run { first: 1, at: 7, count: 2 }, names::Run { first: 5, at: 3, count: 1 }];
        let at = |cluster, block| Some(geometry.cluster_at(cluster) + block);
        let found = pieces(geometry, &runs, 20..90);
        let expected = [(20, 28, at(7, 4)), (48, 32, None), (80, 10, at(3, 0))];
        assert_eq!(found, expected.map(|(first, count, at)| Piece { first, count, at }));
        assert!(found.windows(2).all(|pair| pair[0].first + pair[0].count == pair[1].first));
        assert_eq!(pieces(geometry, &[], 3..5), [Piece { first: 3, count: 2, at: None }]);
    }

    #[test]
    fn what_a_write_does_not_cover_of_new_clusters_is_zeros() {
        let geometry = Geometry::of(4096).unwrap();
        let new = [names::Run { first: 0, at: 9, count: 2 }];
        let at = |block, count| wire::Run { first: geometry.cluster_at(9) + block, count };
        assert_eq!(uncovered(geometry, &new, &(3..5)), [at(0, 3), at(5, 27)]);
        assert_eq!(uncovered(geometry, &new, &(0..32)), []);
        assert_eq!(uncovered(geometry, &new, &(40..50)), [at(0, 32)]);
        assert_eq!(uncovered(geometry, &new, &(0..0)), [at(0, 32)]);
    }

    #[test]
    fn bytes_around_a_write_are_kept() {
        let known = Known(vec![(1, Bytes::from(vec![7; BLOCK_BYTES]))]);
        let whole = known.around(BLOCK + 10, &Bytes::from_static(b"abc"));
        assert_eq!((whole.len(), &whole[8..15]), (BLOCK_BYTES, &b"\x07\x07abc\x07\x07"[..]));
        let whole = known.around(BLOCK + 4090, &Bytes::from(vec![1; 10]));
        assert_eq!((whole.len(), &whole[4089..4102]), (2 * BLOCK_BYTES, &[7, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0][..]));
        let cut = known.without(1, 5..BLOCK_BYTES);
        assert_eq!((cut.len(), &cut[..6]), (BLOCK_BYTES, &[7, 7, 7, 7, 7, 0][..]));
    }
}
