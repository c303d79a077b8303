//! What each process of Remora stands on: how its work fails, waits, is stopped and is shown, and what its host has.
//!
//! ```text
//!   a command ──▶ work ──Err(Failure)──▶ Patience: wait, or end ──▶ one sentence and one exit code
//!                  │ │
//!                  │ └─ progress: bars and lines on stderr, results on stdout
//!                  └─── signals, service: told to end, and telling the service manager
//! ```
//!
//! - [`exit`]: a [`Failure`] names a thing and a cure, is of a kind, and says whether it passes by
//!   itself. [`Patience`](exit::Patience) decides how long a command waits for what passes.
//! - [`events`]: what a reader of the log may rely on.
//! - [`progress`]: what a command shows while it works, and where it writes its result.
//! - [`signals`]: how it is stopped. [`service`]: what a service manager is told, and keeps.
//! - [`blocking`]: work that blocks a thread. [`AbortOnDrop`]: a task that ends with its owner.
//! - [`host`]: what is refused before it fails, because this host has too little memory, threads or space.
//! - [`checked_json`]: a file of JSON that says whether it is whole. [`rdb_file`]: what an RDB file holds,
//!   and of which files and backups a source can make a snapshot.
//! - [`record`]: the settings that a process changes at its server, so that another one can put them back.
//!
//! It knows no command line, and no agent.

#![forbid(unsafe_code)]
// The docs of some files name private items: read them in the source, or with `--document-private-items`.
#![allow(rustdoc::private_intra_doc_links)]

pub mod checked_json;
pub mod events;
pub mod exit;
pub mod host;
pub mod progress;
pub mod rdb_file;
pub mod record;
pub mod service;
pub mod signals;

use exit::Failure;

pub use remora_base::AbortOnDrop;

// Tasks that end with their owner, and work that blocks.

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
