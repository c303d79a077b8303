//! What Remora's programs stand on, and what knows no server, no agent and no command line.
//!
//! - [`units`]: sizes, times and rates as text, as options take them and messages show them. [`Size`](units::Size).
//!   [`Moment`](units::Moment): a second of the calendar, in texts and in names that sort by time.
//! - [`files`]: folders that other users cannot change, and files that are never seen in halves.
//! - [`pace`]: [`Backoff`], the pauses between attempts, and [`Growth`], how fast an offset grows; numbers that follow
//!   from a seed.
//! - [`AbortOnDrop`]: a task that ends with its owner.
//! - [`x509`]: what a sentence says about a certificate, and fingerprints.
//! - [`mutation`]: faults that tests put back, to see that they are found.
//!
//! Most of it is pure: time, seeds and bytes are handed in. Each error is of its own type and says what can be done;
//! the caller decides how its process ends.

#![forbid(unsafe_code)]

pub mod files;
pub mod mutation;
pub mod pace;
pub mod units;
pub mod x509;

use tokio::task::{AbortHandle, JoinHandle};

pub use self::pace::{Backoff, Growth};

// Tasks that end with their owner.

/// Aborts its task when it is dropped.
#[derive(Debug)]
pub struct AbortOnDrop(AbortHandle);

impl AbortOnDrop {
    /// Ties this task to the value that is returned. The handle stays with the caller.
    pub fn new<T>(task: &JoinHandle<T>) -> AbortOnDrop {
        AbortOnDrop(task.abort_handle())
    }
}

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}
