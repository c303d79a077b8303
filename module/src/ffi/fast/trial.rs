//! Work in a forked child of the server: a crash there costs nothing, and its result is a text.

use std::cell::RefCell;
use std::ffi::c_int;
use std::io::{PipeReader, PipeWriter, Read, Write};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, Resource, Rlimit, Signal, WaitOptions, kill_process, setrlimit, waitpid};

use super::super::callback::guard;
use super::super::context::Context;

/// Signals that end a child that has gone wrong. The server's handlers would write a crash report into its log.
const FAULTS: [c_int; 5] = [libc::SIGSEGV, libc::SIGBUS, libc::SIGFPE, libc::SIGILL, libc::SIGABRT];

/// Why a trial failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Trouble {
    /// Something is different, or the child crashed: so it would be the next time.
    #[error("{0}")]
    Found(String),
    /// Nothing was found out: the child could not be started, or not awaited.
    #[error("{0}")]
    Unknown(String),
}

/// Runs `work` in a child of this process, and returns what it returned. The child can't do anything to the server: it
/// has a copy of its memory, runs no event loop, and ends after the work.
///
/// # Errors
/// The text of `work`, or that the child crashed, or took longer than `limit`.
pub(crate) fn in_child(
    _context: &Context<'_>,
    limit: Duration,
    work: impl FnOnce(&Steps) -> Result<(), String>,
) -> Result<(), Trouble> {
    let failed = |error: std::io::Error| Trouble::Unknown(format!("a child could not be started: {error}"));
    let (reader, writer) = std::io::pipe().map_err(failed)?;
    // SAFETY: The context proves that this is the server's main thread. The child has only this thread; it calls the
    // server's allocator, which is made for forks (jemalloc and the C library both handle them), and no lock of another
    // thread of the server is needed for keys and tables: servers fork their own savers in the same way.
    let child = unsafe { libc::fork() };
    match child {
        -1 => Err(failed(std::io::Error::last_os_error())),
        0 => {
            drop(reader);
            run_and_end(writer, work)
        }
        child => {
            drop(writer);
            let result = await_result(reader, limit);
            if let Some(pid) = Pid::from_raw(child) {
                // It has ended, or must not go on.
                let _ = kill_process(pid, Signal::KILL);
                let _ = waitpid(Some(pid), WaitOptions::empty());
            }
            result
        }
    }
}

/// In the child.
fn run_and_end(writer: PipeWriter, work: impl FnOnce(&Steps) -> Result<(), String>) -> ! {
    let steps = Steps(RefCell::new(writer));
    for fault in FAULTS {
        // SAFETY: A valid signal, and its default action.
        unsafe { libc::signal(fault, libc::SIG_DFL) };
    }
    let _ = setrlimit(Resource::Core, Rlimit { current: Some(0), maximum: Some(0) });
    let result = guard(Err("it panicked".to_owned()), || work(&steps));
    let text = result.map_or_else(|text| text, |()| FINE.to_owned());
    let _ = steps.0.borrow_mut().write_all(text.as_bytes());
    // SAFETY: No conditions. The server's handlers for an orderly end must not run.
    unsafe { libc::_exit(0) }
}

/// In the server: what the child writes until it ends.
fn await_result(mut reader: PipeReader, limit: Duration) -> Result<(), Trouble> {
    let (began, mut text) = (Instant::now(), Vec::new());
    loop {
        let Some(left) = limit.checked_sub(began.elapsed()) else {
            let (at, _) = Steps::of(&text);
            return Err(Trouble::Unknown(format!("it took longer than {} s{at}", limit.as_secs())));
        };
        let wait = Timespec { tv_sec: left.as_secs().cast_signed(), tv_nsec: left.subsec_nanos().into() };
        let readable = poll(&mut [PollFd::new(&reader, PollFlags::IN)], Some(&wait));
        if readable.is_err_and(|error| error != rustix::io::Errno::INTR) {
            return Err(Trouble::Unknown("its result could not be awaited".into()));
        }
        if readable != Ok(1) {
            continue;
        }
        let mut part = [0; 512];
        match reader.read(&mut part) {
            Ok(0) => break,
            Ok(read) => text.extend_from_slice(part.get(..read).unwrap_or_default()),
            Err(error) => return Err(Trouble::Unknown(format!("its result could not be read: {error}"))),
        }
    }
    match Steps::of(&text) {
        (_, result) if result == FINE => Ok(()),
        (at, result) if result.is_empty() => Err(Trouble::Found(format!("the child crashed{at}"))),
        (_, result) => Err(Trouble::Found(result)),
    }
}

/// What the child is about to do, for the message about one that crashes there.
pub(crate) struct Steps(RefCell<PipeWriter>);

impl Steps {
    pub(crate) fn begin(&self, step: &str) {
        // A parent that does not read any more ends this process soon.
        let _ = self.0.borrow_mut().write_all(format!("{STEP}{step}\n").as_bytes());
    }

    /// The last step, in words, and the result.
    fn of(text: &[u8]) -> (String, String) {
        let text = String::from_utf8_lossy(text);
        let (mut last, mut rest) = ("", &*text);
        while let Some((step, after)) = rest.strip_prefix(STEP).and_then(|rest| rest.split_once('\n')) {
            (last, rest) = (step, after);
        }
        let at = if last.is_empty() { String::new() } else { format!(" (in {last})") };
        (at, rest.to_owned())
    }
}

/// What stands before a step.
const STEP: char = '\u{1}';

/// What a child writes if its work succeeded.
const FINE: &str = "fine";
