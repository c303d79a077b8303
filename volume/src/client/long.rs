//! Long requests: any number of neighbouring blocks, as several requests that are completed together. A long write is
//! not one write: if the process dies, a part of it may be there.

use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;

use super::{Error, Request, Volume};
use crate::shape::BLOCK_BYTES;
use crate::wire::{MOST_BLOCKS, Run};

/// What several requests have in common: what they have read, and what to do after the last one.
struct Joined {
    state: Mutex<State>,
}

struct State {
    parts: Vec<Bytes>,
    left: usize,
    error: Option<Error>,
    done: Option<Done>,
}

type Done = Box<dyn FnOnce(Result<Vec<Bytes>, Error>) + Send>;

impl Joined {
    fn new(parts: usize, done: Done) -> Arc<Joined> {
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

    fn submit_all(&self, requests: Vec<Request>, done: Done) -> Result<(), Error> {
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
