//! Ctrl-C and SIGTERM: every started process is killed. The work then fails, because its processes are gone, and cleans
//! up as after any other failure: folders are removed when their owner is dropped.
//!
//! `kill -9` cannot be handled: the kernel ends the processes, and their folders stay in the temporary folder.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use std::{fmt, fs};

use remora_bench::sync::Result;
use rustix::process::{Pid, Signal, getpid, kill_process, kill_process_group};
use tokio::signal::unix::{SignalKind, signal};

/// The work was stopped by a signal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stopped {
    signal: SignalKind,
}

impl Stopped {
    /// The exit code that shells expect.
    pub(crate) fn code(self) -> u8 {
        128 + u8::try_from(self.signal.as_raw_value()).unwrap_or(0)
    }
}

impl fmt::Display for Stopped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "stopped by signal {}; servers, agents and their folders are gone", self.signal.as_raw_value())
    }
}

impl std::error::Error for Stopped {}

/// Runs `work` to its end, or until a signal stops it.
pub(crate) fn or_run(work: impl FnOnce() -> Result<()> + Send + 'static) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let (mut interrupt, mut terminate) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
        let mut work = tokio::task::spawn_blocking(work);
        let mut stopped: Option<Stopped> = None;
        loop {
            tokio::select! {
                outcome = &mut work => return match stopped {
                    Some(stopped) => Err(stopped.into()),
                    None => outcome?,
                },
                _ = interrupt.recv() => stopped = Some(Stopped { signal: SignalKind::interrupt() }),
                _ = terminate.recv() => stopped = Some(Stopped { signal: SignalKind::terminate() }),
                // Processes that the work starts before it notices are killed too.
                () = tokio::time::sleep(AGAIN_EVERY), if stopped.is_some() => {}
            }
            if stopped.is_some() {
                IS_STOPPED.store(true, Ordering::Relaxed);
                end_children_of(getpid());
            }
        }
    })
}

/// Fails if a signal has stopped the work, for work that could go on without its processes.
pub(crate) fn check() -> Result<()> {
    if IS_STOPPED.load(Ordering::Relaxed) { Err("stopped by a signal".into()) } else { Ok(()) }
}

/// Whether a signal has stopped the work of this process.
static IS_STOPPED: AtomicBool = AtomicBool::new(false);

/// Kills all children of a process and their descendants (each of ours leads a process group).
fn end_children_of(parent: Pid) {
    for child in children_of(parent) {
        // A child that has just ended needs no signal. A child without its own group (cargo) is killed alone.
        if kill_process_group(child, Signal::KILL).is_err() {
            let _ = kill_process(child, Signal::KILL);
        }
    }
}

fn children_of(parent: Pid) -> Vec<Pid> {
    let parent = parent.as_raw_nonzero().get();
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = processes.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    pids.filter(|pid| parent_of(*pid) == Some(parent)).filter_map(Pid::from_raw).collect()
}

fn parent_of(pid: i32) -> Option<i32> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name in brackets can contain anything; state and parent follow it.
    let (_, rest) = stat.rsplit_once(')')?;
    rest.split_whitespace().nth(1)?.parse().ok()
}

/// How often children are searched for while the work ends.
const AGAIN_EVERY: Duration = Duration::from_millis(100);

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::process::Command;
    use std::thread;
    use std::time::Instant;

    use super::*;

    #[test]
    fn children_are_found_and_ended() {
        // Children of a shell, not of this process: other tests have children here.
        let mut shell = Command::new("sh").args(["-c", "sleep 60 & sleep 60; wait"]).spawn().unwrap();
        let parent = Pid::from_child(&shell);
        let began = Instant::now();
        while children_of(parent).len() < 2 {
            assert!(began.elapsed() < Duration::from_secs(20), "the shell started no child");
            thread::sleep(Duration::from_millis(5));
        }
        assert!(children_of(getpid()).contains(&parent));
        end_children_of(parent);
        shell.wait().unwrap();
        assert!(began.elapsed() < Duration::from_secs(60), "they ran to their end");
    }

    #[test]
    fn a_stopped_run_ends_with_the_code_that_shells_expect() {
        assert_eq!(Stopped { signal: SignalKind::interrupt() }.code(), 130);
    }
}
