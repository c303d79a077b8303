//! Visits: threads of the disk that are here. They may hold the disk for a moment, and must not be the last to do so.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// See the module's text.
#[derive(Default)]
pub(super) struct Visits {
    /// No visit begins any more.
    is_over: AtomicBool,
    visitors: AtomicUsize,
}

impl Visits {
    /// A thread of the disk comes with what is done. `false`: the files are closed.
    pub(super) fn visit(&self, visit: impl FnOnce()) -> bool {
        self.visitors.fetch_add(1, Ordering::SeqCst);
        let may_visit = !self.is_over();
        if may_visit {
            visit();
        }
        self.visitors.fetch_sub(1, Ordering::SeqCst);
        may_visit
    }

    /// From now on no thread of the disk is here. `end` is called before it waits for those that are.
    pub(super) fn end(&self, end: impl FnOnce()) {
        self.is_over.store(true, Ordering::SeqCst);
        end();
        while self.visitors.load(Ordering::SeqCst) > 0 {
            std::thread::yield_now(); // a visitor waits for nothing
        }
    }

    pub(super) fn is_over(&self) -> bool {
        self.is_over.load(Ordering::SeqCst)
    }
}
