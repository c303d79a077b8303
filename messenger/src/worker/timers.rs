//! When to look at whom. Entries are never removed, only overtaken: whoever is looked at says when it wants to be looked at
//! next, and an entry that is no longer meant is passed over.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::time::Instant;

/// Times, each with a name; the earliest first.
pub(crate) struct Timers<K>(BinaryHeap<Reverse<(Instant, K)>>);

impl<K: Ord + Copy> Default for Timers<K> {
    fn default() -> Timers<K> {
        Timers(BinaryHeap::new())
    }
}

impl<K: Ord + Copy> Timers<K> {
    /// Notes a time.
    pub(crate) fn set(&mut self, at: Instant, name: K) {
        self.0.push(Reverse((at, name)));
    }

    /// The earliest.
    pub(crate) fn next(&self) -> Option<Instant> {
        self.0.peek().map(|Reverse((at, _))| *at)
    }

    /// One whose time has come.
    pub(crate) fn pop(&mut self, now: Instant) -> Option<(Instant, K)> {
        if self.next()? > now {
            return None;
        }
        self.0.pop().map(|Reverse(entry)| entry)
    }

    /// Throws away entries that nobody means any more, when there are many more than the `meant`.
    pub(crate) fn tidy(&mut self, meant: usize, is_meant: impl Fn(Instant, K) -> bool) {
        if self.0.len() > ENTRIES_PER_NAME * meant + ENTRIES_ALWAYS {
            self.0.retain(|Reverse((at, name))| is_meant(*at, *name));
        }
    }
}

/// Overtaken entries are cheap; looking for them costs a walk over all.
const ENTRIES_PER_NAME: usize = 4;
const ENTRIES_ALWAYS: usize = 1024;
