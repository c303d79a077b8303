//! A timer heap. An entry is not removed when its deadline moves: the owner sets another one, and ignores the stale
//! entry when it fires.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::time::Instant;

/// Deadlines with a key each, the earliest first.
pub(crate) struct Timers<K>(BinaryHeap<Reverse<(Instant, K)>>);

impl<K: Ord + Copy> Default for Timers<K> {
    fn default() -> Timers<K> {
        Timers(BinaryHeap::new())
    }
}

impl<K: Ord + Copy> Timers<K> {
    /// Adds a deadline.
    pub(crate) fn set(&mut self, at: Instant, name: K) {
        self.0.push(Reverse((at, name)));
    }

    /// The earliest deadline.
    pub(crate) fn next(&self) -> Option<Instant> {
        self.0.peek().map(|Reverse((at, _))| *at)
    }

    /// Takes an entry whose deadline has passed.
    pub(crate) fn pop(&mut self, now: Instant) -> Option<(Instant, K)> {
        if self.next()? > now {
            return None;
        }
        self.0.pop().map(|Reverse(entry)| entry)
    }

    /// Removes stale entries if there are many more entries than keys. `meant` is the number of keys in use.
    pub(crate) fn tidy(&mut self, meant: usize, is_meant: impl Fn(Instant, K) -> bool) {
        if self.0.len() > ENTRIES_PER_NAME * meant + ENTRIES_ALWAYS {
            self.0.retain(|Reverse((at, name))| is_meant(*at, *name));
        }
    }
}

/// Stale entries are cheap; removing them costs a walk over the heap.
const ENTRIES_PER_NAME: usize = 4;
const ENTRIES_ALWAYS: usize = 1024;
