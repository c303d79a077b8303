//! Disk: the blocks below the files.

use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;

use crate::client::{Error, Request, Volume};
use crate::wire::Run;

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
