//! Tasks that end with their owner.
// Stands alone: the one thing that every part of a program asks of tokio's tasks, and tokio does not have.

use tokio::task::{AbortHandle, JoinHandle};

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
