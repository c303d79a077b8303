//! Rejections: log lines about connections that strangers make, at a bounded rate.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Time after a log line in which further rejections are only counted.
const QUIET: Duration = Duration::from_secs(10);

/// Logs rejections. During a flood it logs the first one, and every ten seconds how many there were.
#[derive(Default)]
pub(crate) struct Rejections(Mutex<Count>);

#[derive(Debug, Default)]
struct Count {
    /// When the last line was logged.
    logged: Option<Instant>,
    /// Rejections since then.
    more: u64,
}

impl Rejections {
    /// Calls `log` for a rejection, unless another one was logged shortly before.
    pub(crate) fn add(&self, log: impl FnOnce()) {
        let more = self.0.lock().unwrap_or_else(PoisonError::into_inner).add(Instant::now());
        let Some(more) = more else { return };
        if more > 0 {
            tracing::warn!(more, "more connections were rejected since the last line about one");
        }
        log();
    }
}

impl Count {
    /// The number of rejections that were not logged, if this one is to be logged.
    fn add(&mut self, now: Instant) -> Option<u64> {
        if self.logged.is_some_and(|logged| now.saturating_duration_since(logged) < QUIET) {
            self.more += 1;
            return None;
        }
        self.logged = Some(now);
        Some(std::mem::take(&mut self.more))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_has_one_line_and_then_a_count() {
        let (mut count, start) = (Count::default(), Instant::now());
        assert_eq!(count.add(start), Some(0));
        for millis in 1..1000 {
            assert_eq!(count.add(start + Duration::from_millis(millis)), None);
        }
        assert_eq!(count.add(start + QUIET), Some(999));
        assert_eq!(count.add(start + QUIET * 3), Some(0));
    }
}
