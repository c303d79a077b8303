//! Deferred destruction of queue pairs. Pure: `device` adds entries, and a worker's timer says when to look.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Entries, each kept for [`RETIRE_TIME`], oldest first.
#[derive(Debug)]
pub(super) struct RetiredQueue<G>(VecDeque<(Instant, G)>);

impl<G> Default for RetiredQueue<G> {
    fn default() -> RetiredQueue<G> {
        RetiredQueue(VecDeque::new())
    }
}

impl<G> RetiredQueue<G> {
    pub(super) fn push(&mut self, now: Instant, link: G) {
        self.0.push_back((now + RETIRE_TIME, link));
    }

    /// When to look again; `None` if there are no entries.
    pub(super) fn next(&self) -> Option<Instant> {
        self.0.front().map(|(expired, _)| *expired)
    }

    /// Takes the entries whose time is over.
    pub(super) fn take_expired(&mut self, now: Instant) -> Vec<G> {
        let count = self.0.iter().take_while(|(expired, _)| *expired <= now).count();
        self.0.drain(..count).map(|(_, link)| link).collect()
    }
}

/// Long after this time a card has flushed a queue pair in the error state.
const RETIRE_TIME: Duration = Duration::from_millis(200);

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// A caller that looks only when told takes all entries eventually.
        #[test]
        fn a_caller_that_looks_when_told_takes_each_entry_once_and_in_time(pauses in proptest::collection::vec(0u64..500, 1..40)) {
            let mut retired = RetiredQueue::default();
            let mut now = Instant::now();
            let mut pushed = Vec::new();
            let mut out = Vec::new();
            let look = |retired: &mut RetiredQueue<usize>, until: Option<Instant>, out: &mut Vec<(usize, Instant)>| {
                while let Some(at) = retired.next().filter(|at| until.is_none_or(|until| *at <= until)) {
                    let expired = retired.take_expired(at);
                    assert!(!expired.is_empty(), "told to look for nothing");
                    out.extend(expired.into_iter().map(|link| (link, at)));
                }
            };
            for (link, pause) in pauses.iter().enumerate() {
                now += Duration::from_millis(*pause);
                look(&mut retired, Some(now), &mut out);
                retired.push(now, link);
                pushed.push((link, now + RETIRE_TIME));
            }
            look(&mut retired, None, &mut out);
            prop_assert_eq!(out, pushed);
            prop_assert!(retired.next().is_none());
        }
    }
}
