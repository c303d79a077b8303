//! Host threads: whether the system gives this process the threads that every command needs.
//!
//! The runtime panics if it is refused a thread, and work that blocks would wait for a thread for ever. So a command
//! starts some threads first, and ends if it cannot.
// Stands alone: no other limit of the host is refused by every command.

use std::io;
use std::sync::{Mutex, PoisonError};
use std::thread;

use crate::exit::Failure;

/// Threads at once: two of the runtime, some that wait in blocking calls, and those of data lanes and of a delivery.
const THREADS: usize = 8;

/// Bytes of the stack of a thread that only waits: limits of memory have messages of their own.
const STACK: usize = 64 << 10;

/// Checks that this many threads can be started.
///
/// # Errors
/// The system refuses one.
pub fn check() -> Result<(), Failure> {
    start(THREADS).map_err(|error| no_thread(&error))
}

/// Starts threads that wait for each other, and ends them.
fn start(count: usize) -> io::Result<()> {
    let gate = Mutex::new(());
    let pass = || drop(gate.lock().unwrap_or_else(PoisonError::into_inner));
    thread::scope(|scope| {
        let closed = gate.lock().unwrap_or_else(PoisonError::into_inner);
        let started = (0..count).try_for_each(|_| {
            let thread = thread::Builder::new().name("trial".into()).stack_size(STACK).spawn_scoped(scope, pass)?;
            drop(thread); // the scope waits for it
            Ok(())
        });
        drop(closed);
        started
    })
}

fn no_thread(error: &io::Error) -> Failure {
    Failure::local(format!(
        "cannot start {THREADS} threads: {error}; raise the limit of this user's processes (ulimit -u, LimitNPROC= of systemd) or of \
         the control group (pids.max, TasksMax= of systemd, the pod's limit of process ids)"
    ))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn threads_are_started_at_once_and_ended() {
        start(0).unwrap();
        start(64).unwrap();
        check().unwrap();
    }

    #[test]
    fn a_refusal_names_the_limits_that_may_be_too_low() {
        let refused = no_thread(&io::Error::from_raw_os_error(11));
        assert_eq!(refused.code, crate::exit::Code::Local);
        for word in ["ulimit -u", "LimitNPROC=", "pids.max", "TasksMax="] {
            assert!(refused.message.contains(word), "{refused}");
        }
    }
}
