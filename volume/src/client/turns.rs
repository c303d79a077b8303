//! Turns: which thread runs the driver. The one that brings an event does, so that no other thread has to be woken for
//! it: with a write of 4 KiB, to wake a thread takes longer than everything else.
//!
//! ```text
//!   a caller ─────────────── submits ────▶ queue ─╮
//!   the messenger's worker ─ an answer ───────────┤  one at a time has the driver, for one turn
//!   a reader of a region ─── news ────────────────┤─▶ Driver
//!   the volume's thread ──── the time ────────────╯
//! ```
//!
//! - **A caller never waits for the driver.** If another thread has it, that one begins the request: it looks into the
//!   queue again after it has given the driver back.
//! - **`done` is not called by a thread that submits**, so callers may hold locks which `done` takes. What a caller's
//!   turn completes is handed to the volume's thread. This is rare: a read in place that had to wait, and a flush of
//!   what is flushed already.
//! - The other threads wait for the driver, which is busy for microseconds.

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, TryLockError};
use std::thread::Thread;

use super::Event;
use super::driver::{Driver, LOOK_AGAIN};
use super::request::Op;

/// See the module's text.
pub(super) struct Turns {
    submitted: Mutex<Submitted>,
    /// `None`: before the volume is opened, and after its end.
    driver: Mutex<Option<Driver>>,
    /// The thread that looks at the time.
    keeper: OnceLock<Thread>,
}

impl fmt::Debug for Turns {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Turns").finish_non_exhaustive()
    }
}

#[derive(Default)]
struct Submitted {
    queue: VecDeque<Op>,
    /// The volume has ended: nothing is begun any more.
    is_over: bool,
}

impl Turns {
    pub(super) fn new() -> Arc<Turns> {
        Arc::new(Turns { submitted: Mutex::default(), driver: Mutex::new(None), keeper: OnceLock::new() })
    }

    /// Submits a request. It is given back if the volume has ended.
    pub(super) fn submit(&self, op: Op) -> Option<Op> {
        let mut submitted = self.submitted();
        if submitted.is_over {
            return Some(op);
        }
        submitted.queue.push_back(op);
        drop(submitted);
        self.begin_submitted();
        None
    }

    /// Begins what is submitted, unless another thread has the driver: that one looks into the queue again after it has
    /// given it back.
    fn begin_submitted(&self) {
        while self.is_waiting() {
            let mut driver = match self.driver.try_lock() {
                Ok(driver) => driver,
                Err(TryLockError::Poisoned(poisoned)) => given_up(poisoned),
                Err(TryLockError::WouldBlock) => return,
            };
            let Some(running) = driver.as_mut().filter(|running| !running.is_over()) else { return };
            self.take_submitted(running);
            running.go_on_for_a_caller();
            let needs_keeper = running.needs_keeper();
            drop(driver);
            if needs_keeper {
                self.wake_keeper();
            }
        }
    }

    /// Something has happened: the calling thread carries it out, and what follows from it.
    pub(super) fn happened(&self, event: Event) {
        self.turn(|driver| driver.happened(event));
    }

    /// The volume's thread: until the volume is closed, or ends. What is then under way is dropped, and so completed
    /// with the reason.
    pub(super) fn keep(&self, driver: Driver) {
        let _ = self.keeper.set(std::thread::current()); // there is one
        *self.driver() = Some(driver);
        while self.turn(Driver::look_at_the_time) {
            std::thread::park_timeout(LOOK_AGAIN);
        }
        let driver = self.driver().take();
        let mut submitted = self.submitted();
        submitted.is_over = true;
        let queue = std::mem::take(&mut submitted.queue);
        drop(submitted);
        // Without a lock: their completions are the callers' own code, and the messenger's threads are waited for.
        drop(queue);
        if let Some(driver) = driver {
            driver.end();
        }
    }

    /// The volume is to end.
    pub(super) fn close(&self) {
        self.happened(Event::Close);
        self.wake_keeper();
    }

    /// A turn of a thread that may call callers' own code. Returns whether the volume goes on.
    fn turn(&self, does: impl FnOnce(&mut Driver)) -> bool {
        let mut does = Some(does);
        loop {
            let mut driver = self.driver();
            let Some(running) = driver.as_mut().filter(|running| !running.is_over()) else { return false };
            if let Some(does) = does.take() {
                does(running);
            }
            self.take_submitted(running);
            running.go_on();
            let (goes_on, needs_keeper) = (!running.is_over(), running.needs_keeper());
            drop(driver);
            if needs_keeper {
                self.wake_keeper();
            }
            if !goes_on || !self.is_waiting() {
                return goes_on;
            }
        }
    }

    /// The driver gets what is submitted.
    fn take_submitted(&self, driver: &mut Driver) {
        driver.submitted(std::mem::take(&mut self.submitted().queue));
    }

    fn is_waiting(&self) -> bool {
        !self.submitted().queue.is_empty()
    }

    fn wake_keeper(&self) {
        // It wakes itself if that was the one.
        if let Some(keeper) = self.keeper.get() {
            keeper.unpark();
        }
    }

    fn submitted(&self) -> MutexGuard<'_, Submitted> {
        self.submitted.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn driver(&self) -> MutexGuard<'_, Option<Driver>> {
        self.driver.lock().unwrap_or_else(given_up)
    }
}

/// The driver of a thread that has panicked. It does nothing more.
fn given_up<'a>(poisoned: PoisonError<MutexGuard<'a, Option<Driver>>>) -> MutexGuard<'a, Option<Driver>> {
    let mut driver = poisoned.into_inner();
    if let Some(driver) = driver.as_mut() {
        driver.give_up();
    }
    driver
}
