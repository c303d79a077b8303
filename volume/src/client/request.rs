//! What a caller wants of a volume, its completion, and requests for many blocks at once.

use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use remora_messenger::Permit;

use super::regions::UnderWay;
use super::{Error, Shared, Volume};
use crate::layout::Layout;
use crate::shape::{BLOCK_BYTES, Shape};
use crate::store::sums;
use crate::wire::{MOST_BLOCKS, MOST_ENTRIES, MOST_RUNS, Run};

// What a caller wants of a volume, and its completion.

/// What a caller wants of a volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Request {
    /// Write these blocks: all of them or, if the process dies, perhaps none.
    Write {
        /// Where they belong.
        runs: Vec<Run>,
        /// The blocks, run by run.
        data: Bytes,
    },
    /// Write zeros: all of them or, if the process dies, perhaps none. No bytes are sent, so it may be of as many
    /// blocks as [`MOST_ENTRIES`].
    Zero(Run),
    /// Read these blocks.
    Read(Run),
    /// Say which of these blocks are known to be zeros, of as many as [`MOST_ENTRIES`]. It is completed with a bit for
    /// each block, the lowest one first.
    Map(Run),
    /// Complete when every write that was submitted before is acknowledged.
    Flush,
}

impl Request {
    /// A write of neighbouring blocks.
    pub fn write(first: u64, data: impl Into<Bytes>) -> Request {
        let data = data.into();
        let count = u32::try_from(data.len() / BLOCK_BYTES).unwrap_or(u32::MAX);
        Request::Write { runs: vec![Run { first, count }], data }
    }

    /// The blocks that it changes.
    pub(super) fn changes(&self) -> &[Run] {
        match self {
            Request::Write { runs, .. } => runs,
            Request::Zero(run) => std::slice::from_ref(run),
            Request::Read(_) | Request::Map(_) | Request::Flush => &[],
        }
    }

    /// Checks the request, and returns how many bytes it moves.
    pub(super) fn check(&self, shape: Shape) -> Result<usize, Error> {
        let check = |run: &Run| {
            let is_inside = Layout::of(shape).has(run.first, run.count.into());
            if is_inside { Ok(()) } else { Err(Error::OutOfBounds { run: *run, blocks: shape.blocks() }) }
        };
        let blocks = match self {
            Request::Write { runs, data } => {
                runs.iter().try_for_each(check)?;
                let blocks = runs.iter().map(|run| run.count as usize).sum();
                let is_whole = data.len() == blocks * BLOCK_BYTES && runs.iter().all(|run| run.count > 0);
                if is_whole && runs.len() <= MOST_RUNS { blocks } else { return Err(Error::Misuse) }
            }
            Request::Read(run) => {
                check(run)?;
                run.count as usize
            }
            Request::Zero(run) | Request::Map(run) => {
                check(run)?;
                let is_one = (1..=MOST_ENTRIES).contains(&(run.count as usize));
                return if is_one { Ok(0) } else { Err(Error::Misuse) };
            }
            Request::Flush => return Ok(0),
        };
        if (1..=MOST_BLOCKS).contains(&blocks) { Ok(blocks * BLOCK_BYTES) } else { Err(Error::Misuse) }
    }
}

/// Called once, with the result.
pub(super) type Done = Box<dyn FnOnce(Result<Bytes, Error>) + Send>;

/// The end of a request. One that is dropped says that the volume has ended, so that no caller waits for ever.
pub(super) struct Completion {
    done: Option<Done>,
    shared: Arc<Shared>,
    /// Its share of what may be under way.
    _permit: Permit,
    /// Of a write: its blocks are not read in place. Ends before the caller learns of the end.
    under_way: Option<UnderWay>,
}

impl Completion {
    pub(super) fn new(done: Done, shared: Arc<Shared>, permit: Permit, under_way: Option<UnderWay>) -> Completion {
        Completion { done: Some(done), shared, _permit: permit, under_way }
    }

    /// The request is done; `None`: it has failed, since the volume has ended.
    pub(super) fn end(mut self, data: Option<Bytes>) {
        self.under_way = None;
        if let Some(data) = data
            && let Some(done) = self.done.take()
        {
            done(Ok(data));
        }
    }

    /// Its caller is told now, by `done`. The request goes on, with its share of what may be under way.
    pub(super) fn split(&mut self) -> Option<Done> {
        self.done.take()
    }

    /// The request was not submitted: its caller is told by another way.
    pub(super) fn forget(mut self) {
        self.done = None;
    }
}

impl Drop for Completion {
    fn drop(&mut self) {
        self.under_way = None;
        if let Some(done) = self.done.take() {
            done(Err(self.shared.end.get().map_or(Error::Closed, |&end| Error::Ended(end))));
        }
    }
}

/// A request on its way to the driver.
pub(super) struct Op {
    pub(super) request: Request,
    /// The checksum of each block that is written. They are computed by the caller's thread.
    pub(super) sums: Vec<u32>,
    pub(super) completion: Completion,
}

impl Op {
    pub(super) fn new(request: Request, completion: Completion) -> Op {
        let sums = match &request {
            Request::Write { data, .. } => sums(data).collect(),
            _ => Vec::new(),
        };
        Op { request, sums, completion }
    }
}

// Any number of neighbouring blocks, as several requests that are completed together. A long write is
// not one write: if the process dies, a part of it may be there.

/// What several requests have in common: what they have read, and what to do after the last one.
struct Joined {
    state: Mutex<State>,
}

struct State {
    parts: Vec<Bytes>,
    left: usize,
    error: Option<Error>,
    done: Option<LongDone>,
}

type LongDone = Box<dyn FnOnce(Result<Vec<Bytes>, Error>) + Send>;

impl Joined {
    fn new(parts: usize, done: LongDone) -> Arc<Joined> {
        let state = State { parts: vec![Bytes::new(); parts], left: parts, error: None, done: Some(done) };
        Arc::new(Joined { state: Mutex::new(state) })
    }

    /// One of them is done. The last one completes the whole: with the first error, if there was one.
    fn completed(&self, number: usize, result: Result<Bytes, Error>) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.left -= 1;
        match (result, state.parts.get_mut(number)) {
            (Ok(data), Some(part)) => *part = data,
            (Err(error), _) => _ = state.error.get_or_insert(error),
            _ => {}
        }
        if state.left > 0 {
            return;
        }
        let result = state.error.take().map_or_else(|| Ok(std::mem::take(&mut state.parts)), Err);
        let done = state.done.take();
        drop(state); // the caller's own code runs without the lock
        if let Some(done) = done {
            done(result);
        }
    }
}

impl Volume {
    /// Writes neighbouring blocks, however many. As [`Volume::submit`].
    ///
    /// # Errors
    /// As for [`Volume::submit`].
    pub fn submit_write(
        &self,
        first: u64,
        data: impl Into<Bytes>,
        done: impl FnOnce(Result<(), Error>) + Send + 'static,
    ) -> Result<(), Error> {
        let data = data.into();
        let bytes = MOST_BLOCKS * BLOCK_BYTES;
        let parts = (0..data.len()).step_by(bytes).map(|at| data.slice(at..data.len().min(at + bytes)));
        let requests = (first..).step_by(MOST_BLOCKS).zip(parts).map(|(first, part)| Request::write(first, part));
        self.submit_all(requests.collect(), Box::new(|result| done(result.map(drop))))
    }

    /// Reads neighbouring blocks, however many, into as many pieces as it takes requests. As [`Volume::submit`].
    ///
    /// # Errors
    /// As for [`Volume::submit`].
    pub fn submit_read(
        &self,
        first: u64,
        count: u64,
        done: impl FnOnce(Result<Vec<Bytes>, Error>) + Send + 'static,
    ) -> Result<(), Error> {
        let end = first.saturating_add(count);
        let run = |first| Run { first, count: (end - first).min(MOST_BLOCKS as u64) as u32 };
        let requests = (first..end).step_by(MOST_BLOCKS).map(|first| Request::Read(run(first)));
        self.submit_all(requests.collect(), Box::new(done))
    }

    fn submit_all(&self, requests: Vec<Request>, done: LongDone) -> Result<(), Error> {
        if requests.is_empty() {
            return Err(Error::Misuse);
        }
        requests.iter().try_for_each(|request| request.check(self.shape).map(drop))?;
        let joined = Joined::new(requests.len(), done);
        for (number, request) in requests.into_iter().enumerate() {
            let whole = Arc::clone(&joined);
            // Checked above, so this fails only if the volume has ended: then nothing else completes this part.
            let submitted = self.submit(request, move |result| whole.completed(number, result));
            if let Err(error) = submitted {
                joined.completed(number, Err(error));
            }
        }
        Ok(())
    }
}
