//! Tasks that end with their owner, and work that blocks.

use tokio::task::{AbortHandle, JoinHandle};

use crate::exit::Failure;

/// Aborts its task when it is dropped.
#[derive(Debug)]
pub(crate) struct AbortOnDrop(AbortHandle);

impl AbortOnDrop {
    pub(crate) fn new<T>(task: &JoinHandle<T>) -> AbortOnDrop {
        AbortOnDrop(task.abort_handle())
    }
}

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Runs work that may block a thread. It has time limits of its own.
///
/// # Errors
/// Those of the work, or its thread has failed.
pub(crate) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, Failure> + Send + 'static,
) -> Result<T, Failure> {
    let done = tokio::task::spawn_blocking(work).await;
    done.unwrap_or_else(|error| Err(Failure::local(format!("a thread of this command failed: {error}"))))
}
