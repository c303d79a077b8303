//! Signals that end a command: SIGINT and SIGTERM.
//!
//! Only for commands that have nothing to put in order when they are stopped. The two ends catch signals themselves.

use tokio::signal::unix::{SignalKind, signal};

use crate::exit::{Code, Failure};

/// Runs `work` until it ends or a signal stops it; `left` says in which state that leaves things.
pub(crate) async fn until_signal<T>(work: impl Future<Output = Result<T, Failure>>, left: &str) -> Result<T, Failure> {
    let no_handler = |error| Failure::local(format!("signals cannot be caught: {error}"));
    let mut interrupt = signal(SignalKind::interrupt()).map_err(no_handler)?;
    let mut terminate = signal(SignalKind::terminate()).map_err(no_handler)?;
    let name = tokio::select! {
        outcome = work => return outcome,
        _ = interrupt.recv() => "SIGINT",
        _ = terminate.recv() => "SIGTERM",
    };
    Err(Failure::new(Code::Interrupted, format!("stopped by {name}{left}")))
}
