//! The peak of a server's private memory during a period.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use remora_lab::process;

/// Samples a process's private memory (`RssAnon`) until stopped. It does not include what a fork child copies; the
/// server counts that itself (`rdb_last_cow_size`).
pub(super) struct Peak {
    is_over: Arc<AtomicBool>,
    looking: Option<JoinHandle<u64>>,
}

impl Peak {
    pub(super) fn watch(pid: u32) -> Peak {
        let is_over = Arc::new(AtomicBool::new(false));
        let is_stopped = Arc::clone(&is_over);
        let looking = thread::spawn(move || {
            let mut most = 0;
            while !is_stopped.load(Ordering::Relaxed) {
                // A server that has ended was sampled before.
                most = most.max(process::private_memory(pid).unwrap_or_default());
                thread::sleep(LOOK_EVERY);
            }
            most
        });
        Peak { is_over, looking: Some(looking) }
    }

    /// Bytes.
    pub(super) fn end(&mut self) -> u64 {
        self.is_over.store(true, Ordering::Relaxed);
        self.looking.take().and_then(|thread| thread.join().ok()).unwrap_or_default()
    }
}

impl Drop for Peak {
    fn drop(&mut self) {
        self.end();
    }
}

/// Reading one line of /proc costs microseconds; an output buffer grows for seconds.
const LOOK_EVERY: Duration = Duration::from_millis(25);
