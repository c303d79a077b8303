//! Signals that end a command, SIGINT and SIGTERM, also when the command that has started it ends, and the one at which
//! files are read again: SIGHUP.

use rustix::process;
use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::AbortOnDrop;
use crate::exit::{Code, Failure};

/// The signals that ask a command to end. From [`Signals::catch`] on they no longer kill the process.
pub struct Signals {
    interrupt: Signal,
    terminate: Signal,
}

impl Signals {
    /// Installs the handlers.
    ///
    /// # Errors
    /// The system refused a handler.
    pub fn catch() -> Result<Signals, Failure> {
        let no_handler = |error| Failure::local(format!("signals cannot be caught: {error}"));
        let interrupt = signal(SignalKind::interrupt()).map_err(no_handler)?;
        let terminate = signal(SignalKind::terminate()).map_err(no_handler)?;
        Ok(Signals { interrupt, terminate })
    }

    /// Waits for the next signal and returns its name. A caller that stops waiting loses no signal.
    pub async fn next(&mut self) -> &'static str {
        tokio::select! {
            _ = self.interrupt.recv() => "SIGINT",
            _ = self.terminate.recv() => "SIGTERM",
        }
    }
}

/// The variable by which an agent knows that a command of ours has started it, and that it must end with that one. Its
/// value is that command's process id.
pub const CHILD_OF: &str = "REMORA_CHILD_OF";

/// Has the system tell this process to end when the command that has started it ends, however that is.
pub fn end_with_parent() {
    let Some(parent) = std::env::var(CHILD_OF).ok().and_then(|text| text.parse::<i32>().ok()) else { return };
    let told = process::set_parent_process_death_signal(Some(process::Signal::TERM));
    // It may have ended before that.
    if told.is_ok() && process::getppid().is_none_or(|pid| pid.as_raw_nonzero().get() != parent) {
        std::process::exit(Code::Interrupted.number().into());
    }
}

/// Requests to read files again (SIGHUP). From this call on the signal no longer ends the process.
///
/// # Errors
/// The system refused the handler.
pub fn hangups() -> Result<Signal, Failure> {
    signal(SignalKind::hangup()).map_err(|error| Failure::local(format!("SIGHUP cannot be caught: {error}")))
}

/// Calls `read_again` at each request to read files again (SIGHUP), until the returned owner of the task is dropped.
///
/// # Errors
/// As [`hangups`].
pub fn on_hangup(read_again: impl Fn() + Send + 'static) -> Result<AbortOnDrop, Failure> {
    let mut hangups = hangups()?;
    let task = tokio::spawn(async move {
        while hangups.recv().await.is_some() {
            read_again();
        }
    });
    Ok(AbortOnDrop::new(&task))
}

/// Runs `work` until it ends or a signal stops it. `left` describes the state in which a signal leaves things; it ends
/// the error's text.
///
/// Only for commands that have nothing to clean up.
pub async fn until_signal<T>(work: impl Future<Output = Result<T, Failure>>, left: &str) -> Result<T, Failure> {
    let mut signals = Signals::catch()?;
    let name = tokio::select! {
        outcome = work => return outcome,
        name = signals.next() => name,
    };
    Err(Failure::new(Code::Interrupted, format!("stopped by {name}{left}")))
}
