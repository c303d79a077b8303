//! Waits: processes that wait for answers, and may be killed meanwhile.
//!
//! A process that is killed stays until its request is answered: the kernel cannot take a request back that a file
//! system has. It says that a signal has come (`INTERRUPT`), but not which one, and of each request only once. A signal
//! that the program handles must not fail its `fsync`: no disk does that, and programs that send themselves signals all
//! the time (Go's runtime) do not expect it. So it is as with NFS: a thread looks at the processes whose answers take
//! long, and gives up those that are being killed, with `EINTR`. Nothing else is told so.
//!
//! ```text
//!   Later ── wait ─▶ Waiter ── result ─────────────▶ the process
//!                       ╰── the process is killed ──▶ EINTR, and what the caller wants to be done then
//! ```
//!
//! What was asked for is carried out all the same, sooner or later.

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::io::Errno;

use crate::answer::Later;
use crate::reply::Reply;

/// The processes that wait. When it is dropped, its thread ends; answers that are owed can still be given.
pub struct Waits {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// In the order in which they came.
    waiting: BTreeMap<u64, Waiting>,
    next: u64,
    /// A signal has come for one of them.
    is_interrupted: bool,
    /// The thread sleeps until one comes.
    is_asleep: bool,
    is_over: bool,
}

/// A process that waits.
struct Waiting {
    process: u32,
    since: Instant,
    /// Answers with `EINTR`, unless it was answered.
    give_up: Box<dyn FnOnce() + Send>,
}

impl Waits {
    /// Starts the thread.
    ///
    /// # Errors
    /// The system provides none.
    pub fn new() -> io::Result<Waits> {
        let shared = Arc::<Shared>::default();
        let watched = Arc::clone(&shared);
        let thread = std::thread::Builder::new().name("fuse-waits".into()).spawn(move || watched.watch())?;
        Ok(Waits { shared, thread: Some(thread) })
    }

    /// An answer that may take long. If its process is killed before, it gets `EINTR`, and `given_up` is called by the
    /// thread, which must not wait in it.
    pub fn wait<R: Reply + 'static>(&self, later: Later<R>, given_up: impl FnOnce() + Send + 'static) -> Waiter<R> {
        let process = later.process();
        let later = Arc::new(Mutex::new(Some(later)));
        let owed = Arc::clone(&later);
        let give_up = move || {
            if let Some(later) = taken(&owed) {
                later.fail(Errno::INTR);
                given_up();
            }
        };
        let mut state = self.shared.state();
        let number = state.next;
        state.next += 1;
        state.waiting.insert(number, Waiting { process, since: Instant::now(), give_up: Box::new(give_up) });
        if std::mem::take(&mut state.is_asleep) {
            self.shared.changed.notify_all();
        }
        drop(state);
        Waiter { later, number, shared: Arc::clone(&self.shared) }
    }

    /// A signal has come for a process that waits: it is looked at now.
    pub fn interrupt(&self) {
        let mut state = self.shared.state();
        state.is_interrupted = true;
        state.is_asleep = false;
        self.shared.changed.notify_all();
    }
}

impl Drop for Waits {
    fn drop(&mut self) {
        self.shared.state().is_over = true;
        self.shared.changed.notify_all();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join(); // a panic was reported where it happened
        }
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The thread.
    fn watch(&self) {
        let mut state = self.state();
        while !state.is_over {
            if state.waiting.is_empty() {
                state.is_asleep = true;
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            if !std::mem::take(&mut state.is_interrupted) {
                let goes_on = |state: &mut State| !state.is_over && !state.is_interrupted;
                let waited = self.changed.wait_timeout_while(state, LOOK_EVERY, goes_on);
                state = waited.map_or_else(|error| error.into_inner().0, |(state, _)| state);
            }
            state.is_interrupted = false;
            let old = state.waiting.iter().take_while(|(_, waiting)| waiting.since.elapsed() >= SHORT);
            let old: Vec<_> = old.map(|(number, waiting)| (*number, waiting.process)).collect();
            drop(state);
            let killed: Vec<_> = old.into_iter().filter(|(_, process)| is_killed(*process)).collect();
            state = self.state();
            let given_up: Vec<_> = killed.iter().filter_map(|(number, _)| state.waiting.remove(number)).collect();
            drop(state);
            given_up.into_iter().for_each(|waiting| (waiting.give_up)());
            state = self.state();
        }
    }
}

/// The answer that a process waits for. If it is dropped, the process gets `EIO`.
pub struct Waiter<R> {
    later: Arc<Mutex<Option<Later<R>>>>,
    number: u64,
    shared: Arc<Shared>,
}

impl<R: Reply> Waiter<R> {
    /// Gives the answer. Returns whether the process still waited for it: the kernel knows nothing of one that it did
    /// not get.
    #[must_use = "a process that was killed does not have what it asked for"]
    pub fn result(self, result: Result<R, Errno>) -> bool {
        taken(&self.later).map(|later| later.result(result)).is_some()
    }
}

impl<R> Drop for Waiter<R> {
    fn drop(&mut self) {
        let waiting = self.shared.state().waiting.remove(&self.number);
        drop(waiting); // without the lock
    }
}

fn taken<R>(later: &Mutex<Option<Later<R>>>) -> Option<Later<R>> {
    later.lock().unwrap_or_else(PoisonError::into_inner).take()
}

/// Whether a thread of this number is being killed: a signal that ends it waits for it, or has ended it and it closes
/// its files. One that is not seen is not.
fn is_killed(process: u32) -> bool {
    let read = |file: &str| std::fs::read_to_string(format!("/proc/{process}/{file}")).unwrap_or_default();
    process != 0 && (has_kill_pending(&read("status")) || has_been_killed(&read("stat")))
}

/// The kernel sends `SIGKILL` to each thread of a process that any signal ends, unless it writes a core file first.
fn has_kill_pending(status: &str) -> bool {
    let pending = status.lines().filter_map(|line| line.strip_prefix("SigPnd:").or(line.strip_prefix("ShdPnd:")));
    let bits = pending.filter_map(|digits| u64::from_str_radix(digits.trim(), 16).ok());
    bits.fold(0, |all, bits| all | bits) & KILL_BIT != 0
}

fn has_been_killed(stat: &str) -> bool {
    // The name may have any characters.
    let Some((_, fields)) = stat.rsplit_once(')') else { return false };
    let field = |number: usize| fields.split_whitespace().nth(number - FIRST_FIELD)?.parse::<u64>().ok();
    let is_exiting = field(FLAGS_FIELD).is_some_and(|flags| flags & PF_EXITING != 0);
    is_exiting && field(EXIT_CODE_FIELD).is_some_and(|code| code & SIGNAL_OF_CODE != 0)
}

/// An answer that comes sooner is not watched: this is longer than a volume takes, and short for a user who has killed
/// a process.
const SHORT: Duration = Duration::from_millis(50);

/// How often processes are looked at that wait for longer.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// `SIGKILL` in a mask of signals.
const KILL_BIT: u64 = 1 << 8;

// Of proc(5): the first field of `/proc/PID/stat` behind the name, and those that are needed.
const FIRST_FIELD: usize = 3;
const FLAGS_FIELD: usize = 9;
const EXIT_CODE_FIELD: usize = 52;

/// A flag of a task: it ends.
const PF_EXITING: u64 = 0x4;

/// The bits of an exit code that say by which signal.
const SIGNAL_OF_CODE: u64 = 0x7f;

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn only_what_ends_a_process_counts() {
        let status = |own: &str, shared: &str| format!("Name:\tx\nSigPnd:\t{own}\nShdPnd:\t{shared}\nSigBlk:\t0100\n");
        assert!(has_kill_pending(&status("0000000000000100", "0000000000000000")));
        assert!(has_kill_pending(&status("0000000000000000", "0000000000004102")));
        assert!(!has_kill_pending(&status("0000000000000002", "0000000000400000")), "SIGINT, SIGURG");
        let stat = |flags: u64, code: u64| {
            let zeros = "0 ".repeat(EXIT_CODE_FIELD - FLAGS_FIELD - 1);
            format!("77 (a) (b)) D 1 1 1 0 -1 {flags} {zeros}{code}\n")
        };
        assert!(has_been_killed(&stat(0x40_0004, 9)));
        assert!(!has_been_killed(&stat(0x40_0004, 0)), "it has ended by itself: its close waits");
        assert!(!has_been_killed(&stat(0x40_0000, 9)) && !has_been_killed("") && !has_been_killed("1 (x) D"));
        assert!(!is_killed(std::process::id()) && !is_killed(0));
    }
}
