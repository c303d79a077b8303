//! How fast the primary writes.

use std::time::{Duration, Instant};

use crate::growth::Growth;

/// How fast the stream has grown in the last few seconds.
#[derive(Default)]
pub(super) struct Rate {
    growth: Growth,
    bytes_per_second: f64,
}

impl Rate {
    /// The least time between two samples.
    const SPAN: Duration = Duration::from_millis(500);

    /// Takes the stream's offset at a time.
    pub(super) fn sample(&mut self, now: Instant, position: u64) {
        let is_new = self.growth.last() == Some(0);
        if let Some(fresh) = self.growth.look(now, position, Self::SPAN) {
            // The first sample of a new journal gives no rate: offsets are absolute.
            let fresh = if is_new { 0.0 } else { fresh };
            self.bytes_per_second = (self.bytes_per_second + fresh) / 2.0;
        }
    }

    pub(super) fn bytes_per_second(&self) -> u64 {
        self.bytes_per_second as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_sample_of_a_journal_is_not_a_rate_and_later_ones_are_averaged() {
        let (mut rate, start) = (Rate::default(), Instant::now());
        rate.sample(start, 0);
        rate.sample(start + Rate::SPAN, 1_000_000);
        assert_eq!(rate.bytes_per_second(), 0, "offsets are absolute");
        rate.sample(start + Rate::SPAN * 2, 1_000_500);
        assert_eq!(rate.bytes_per_second(), 500);
        rate.sample(start + Rate::SPAN * 2 + Rate::SPAN / 2, 9_000_000);
        assert_eq!(rate.bytes_per_second(), 500, "less than a span has passed");
    }
}
