//! Ahead: changes that are answered before they are acknowledged, as far as a window permits it.
//!
//! They are on their way then, in their order: whatever is left of the disk after a failure is what it was after some
//! of them, and all before those. What fails is told to every later call, a flush among them.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use super::error::FilesError;
use crate::client;

/// Called once, with the result.
type Done = Box<dyn FnOnce(Result<(), FilesError>) + Send>;

/// See the module's text.
pub(super) struct Ahead {
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
pub(super) struct Early {
    ahead: Arc<Ahead>,
    bytes: usize,
}

impl Ahead {
    pub(super) fn new(limit: usize, failure: &Arc<OnceLock<client::Error>>) -> Arc<Ahead> {
        Arc::new(Ahead { limit, window: Mutex::default(), failure: Arc::clone(failure) })
    }

    /// `None`: the caller of a change of this length must wait.
    pub(super) fn enter(self: &Arc<Ahead>, bytes: usize) -> Option<Early> {
        let mut window = self.window();
        if window.bytes + bytes > self.limit {
            return None;
        }
        window.bytes += bytes;
        window.given += 1;
        Some(Early { ahead: Arc::clone(self), bytes })
    }

    /// Calls this when every change is over that was answered early until now.
    pub(super) fn wait(&self, done: Done) {
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
