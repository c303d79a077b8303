//! Tasks that end with their owner, and work that blocks.
// Stands alone: every room has such work.

pub use remora_base::AbortOnDrop;

use crate::exit::Failure;

/// Runs work that may block a thread. It has time limits of its own.
///
/// # Errors
/// Those of the work, or its thread has failed.
pub async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, Failure> + Send + 'static,
) -> Result<T, Failure> {
    let done = tokio::task::spawn_blocking(work).await;
    done.unwrap_or_else(|error| Err(Failure::local(format!("a thread of this command failed: {error}"))))
}
