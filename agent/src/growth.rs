//! Growth: how fast an offset grows, from two looks at it. Pure: the caller hands the time in.

use std::time::{Duration, Instant};

/// The last look at an offset.
#[derive(Debug, Default)]
pub(crate) struct Growth(Option<(Instant, u64)>);

impl Growth {
    /// The offset at the last look.
    pub(crate) fn last(&self) -> Option<u64> {
        self.0.map(|(_, offset)| offset)
    }

    /// Takes a look, and returns the bytes per second since the last one. `None` for the first look, and if the last
    /// one is less than `least` ago: it then stays the last one. An offset that became smaller has not grown: a server
    /// that restarted, or changed its history, may have a lower one.
    pub(crate) fn look(&mut self, now: Instant, offset: u64, least: Duration) -> Option<f64> {
        let Some((then, before)) = self.0 else {
            self.0 = Some((now, offset));
            return None;
        };
        let time = now.saturating_duration_since(then);
        if time < least {
            return None;
        }
        self.0 = Some((now, offset));
        Some(offset.saturating_sub(before) as f64 / time.as_secs_f64())
    }
}
