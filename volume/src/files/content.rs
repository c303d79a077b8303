//! Content: changes of what is in files, carried out.
//!
//! Changes of one file take place one after the other, in the order in which they were asked for. One that changes a
//! part of a block reads it first, unless it was the last one to be changed; those behind it wait meanwhile. Changes of
//! other files, and reads, do not.

use std::sync::{Arc, Mutex, PoisonError};

use bytes::{Bytes, BytesMut};

use super::core::{Caller, Core, Live, State, Waiting, now};
use super::error::FilesError;
use super::parts::{BLOCK, Content, Known, Piece, blocks_of, cleared, clusters_of, find, uncovered, zeros};
use crate::client::{self, Request};
use crate::names::layout::CLUSTER_BYTES;
use crate::names::{MOST_FILE_BYTES, NamesError, SetAttributes};
use crate::shape::BLOCK_BYTES;
use crate::wire::{MOST_BLOCKS, MOST_RUNS, Run};

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
struct Pending {
    waiting: Option<Waiting>,
    known: Vec<(u64, Bytes)>,
    left: usize,
    error: Option<client::Error>,
}

impl Core {
    /// A change of a file's contents begins, or waits for those before it.
    pub(super) fn change_content(self: &Arc<Core>, content: Content, caller: Caller<()>) {
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
        let pending = Pending { waiting: Some(waiting), known, left: missing.len(), error: None };
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
    pub(super) fn end_read(self: &Arc<Core>, read: u64) {
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
                if caller.is_ahead() && crate::mutant::Mutant::AnsweredWithoutSpace.is_active() {
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
        let (now_size, _) = state.names.file(ino, 0..0)?;
        if size > now_size {
            state.names.written(ino, size, now())?;
        }
        self.clear(uncovered(state.names.head().geometry, &new, &(0..0)));
        Ok((ToWrite::default(), state.files.get(&ino).and_then(|live| live.last.clone())))
    }

    /// Before a file has these blocks, they are zeros.
    fn clear(&self, runs: Vec<Run>) {
        runs.into_iter().for_each(|run| self.put(Request::Zero(run)));
    }
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
pub(super) fn check_end(offset: u64, length: u64) -> Result<u64, FilesError> {
    let end = offset.checked_add(length).filter(|end| *end <= MOST_FILE_BYTES);
    end.ok_or(FilesError::Names(NamesError::FileTooLong))
}
