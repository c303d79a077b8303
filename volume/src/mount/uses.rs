//! Uses: which files processes have open, and what the kernel must forget of them.
//!
//! A page cache whose bytes the volume has refused (mapped memory, see [`crate::files`]) still shows them. A thread has
//! the kernel drop them, so that a process reads what the volume has. It is not the thread that answers the kernel: the
//! kernel may wait for other answers first.

use std::collections::HashMap;
use std::sync::mpsc::{Receiver, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use remora_fuse::{Errno, Notifier};

/// See the module's text.
#[derive(Clone)]
pub(super) struct Uses {
    /// How many times each file is open.
    open: Arc<Mutex<HashMap<u64, u32>>>,
    refused: Sender<u64>,
}

impl Uses {
    /// Files whose bytes were refused are sent there.
    pub(super) fn new(refused: Sender<u64>) -> Uses {
        Uses { open: Arc::default(), refused }
    }

    /// A file is open once more.
    pub(super) fn opened(&self, node: u64) {
        *self.open.lock().unwrap_or_else(PoisonError::into_inner).entry(node).or_default() += 1;
    }

    /// A file is open once less. Returns whether no process has it open now.
    pub(super) fn closed(&self, node: u64) -> bool {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(uses) = open.get_mut(&node) else { return true };
        *uses -= 1;
        let is_last = *uses == 0;
        if is_last {
            open.remove(&node);
        }
        is_last
    }

    /// The volume has refused what the kernel has of a file.
    pub(super) fn refused(&self, node: u64) {
        let _ = self.refused.send(node); // the session may be over
    }
}

/// The thread: ends when the session is dropped, and with it all senders.
pub(super) fn forget_refused(refused: &Receiver<u64>, notifier: &Notifier) {
    while let Ok(node) = refused.recv() {
        tracing::error!(
            node,
            "the volume has refused bytes that a process had written to a mapped file: later writes and flushes of \
             this inode fail until it is truncated or closed"
        );
        match notifier.changed(node, 0, 0) {
            Ok(_) | Err(Errno::NODEV | Errno::NOTCONN | Errno::CONNABORTED) => {}
            Err(errno) => tracing::warn!(node, "the kernel may still show these bytes: {errno}"),
        }
    }
}

/// Waits for that thread, for a bounded time: a call of the file system that hangs keeps it.
pub(super) fn join(thread: JoinHandle<()>) {
    let until = Instant::now() + LAST_COMPLETION_LIMIT;
    while !thread.is_finished() {
        if Instant::now() > until {
            return tracing::error!("a completion has kept the thread that has the kernel forget refused bytes");
        }
        std::thread::sleep(LOOK_AGAIN);
    }
    let _ = thread.join(); // a panic was reported where it happened
}

/// How long a completion may run.
pub(super) const LAST_COMPLETION_LIMIT: Duration = Duration::from_secs(10);

pub(super) const LOOK_AGAIN: Duration = Duration::from_millis(1);
