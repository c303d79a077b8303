//! Work in a forked child of the server: a crash there costs nothing, and its result is a text.

use std::ffi::c_int;
use std::io::{PipeReader, PipeWriter, Read, Write};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, Resource, Rlimit, Signal, WaitOptions, kill_process, setrlimit, waitpid};

use super::super::callback::guard;
use super::super::context::Context;

/// Signals that end a child that has gone wrong. The server's handlers would write a crash report into its log.
const FAULTS: [c_int; 5] = [libc::SIGSEGV, libc::SIGBUS, libc::SIGFPE, libc::SIGILL, libc::SIGABRT];

/// Runs `work` in a child of this process, and returns what it returned. The child can't do anything to the server: it
/// has a copy of its memory, runs no event loop, and ends after the work.
///
/// # Errors
/// The text of `work`, or that the child crashed, or took longer than `limit`.
pub(crate) fn in_child(
    _context: &Context<'_>,
    limit: Duration,
    work: impl FnOnce() -> Result<(), String>,
) -> Result<(), String> {
    let failed = |error: std::io::Error| format!("a child for the trial could not be started: {error}");
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
fn run_and_end(mut writer: PipeWriter, work: impl FnOnce() -> Result<(), String>) -> ! {
    for fault in FAULTS {
        // SAFETY: A valid signal, and its default action.
        unsafe { libc::signal(fault, libc::SIG_DFL) };
    }
    let _ = setrlimit(Resource::Core, Rlimit { current: Some(0), maximum: Some(0) });
    let result = guard(Err("it panicked".to_owned()), work);
    let text = result.map_or_else(|text| text, |()| FINE.to_owned());
    let _ = writer.write_all(text.as_bytes());
    // SAFETY: No conditions. The server's handlers for an orderly end must not run.
    unsafe { libc::_exit(0) }
}

/// In the server: what the child writes until it ends.
fn await_result(mut reader: PipeReader, limit: Duration) -> Result<(), String> {
    let (began, mut text) = (Instant::now(), Vec::new());
    loop {
        let Some(left) = limit.checked_sub(began.elapsed()) else {
            return Err(format!("the trial took longer than {} s", limit.as_secs()));
        };
        let wait = Timespec { tv_sec: left.as_secs().cast_signed(), tv_nsec: left.subsec_nanos().into() };
        let readable = poll(&mut [PollFd::new(&reader, PollFlags::IN)], Some(&wait));
        if readable.is_err_and(|error| error != rustix::io::Errno::INTR) {
            return Err("the trial's result could not be awaited".into());
        }
        if readable != Ok(1) {
            continue;
        }
        let mut part = [0; 512];
        match reader.read(&mut part) {
            Ok(0) => break,
            Ok(read) => text.extend_from_slice(part.get(..read).unwrap_or_default()),
            Err(error) => return Err(format!("the trial's result could not be read: {error}")),
        }
    }
    match String::from_utf8_lossy(&text).as_ref() {
        FINE => Ok(()),
        "" => Err("the trial crashed".into()),
        text => Err(text.to_owned()),
    }
}

/// What a child writes if its work succeeded.
const FINE: &str = "fine";
