//! How fast the primary writes.

use std::time::{Duration, Instant};

use crate::growth::Growth;

/// How fast the stream has grown in the last few seconds, and just now.
#[derive(Default)]
pub(super) struct Rate {
    growth: Growth,
    bytes_per_second: f64,
    now: Growth,
    bytes_per_second_now: f64,
}

impl Rate {
    /// The least time between two samples.
    const SPAN: Duration = Duration::from_millis(500);

    /// The least time between two samples of what happens just now. Clients that were kept waiting, by a busy host or a
    /// fork, write what they owe in a burst that is over in less than a second.
    const SPAN_NOW: Duration = Duration::from_millis(100);

    /// Takes the stream's offset at a time.
    pub(super) fn sample(&mut self, now: Instant, position: u64) {
        // The first sample of a new journal gives no rate: offsets are absolute.
        let is_new = [&self.growth, &self.now].map(|growth| growth.last() == Some(0));
        if let Some(fresh) = self.growth.look(now, position, Self::SPAN) {
            let fresh = if is_new[0] { 0.0 } else { fresh };
            self.bytes_per_second = (self.bytes_per_second + fresh) / 2.0;
        }
        if let Some(fresh) = self.now.look(now, position, Self::SPAN_NOW) {
            self.bytes_per_second_now = if is_new[1] { 0.0 } else { fresh };
        }
    }

    /// On the average of the last few seconds.
    pub(super) fn bytes_per_second(&self) -> u64 {
        self.bytes_per_second as u64
    }

    /// The average, or the present rate while that is higher: in a burst, the backlog is gone faster than the average
    /// says.
    pub(super) fn highest(&self) -> u64 {
        self.bytes_per_second.max(self.bytes_per_second_now) as u64
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

    #[test]
    fn a_burst_is_a_rate_while_it_lasts() {
        let (mut rate, start) = (Rate::default(), Instant::now());
        let mut at = |millis: u64, position| {
            rate.sample(start + Duration::from_millis(millis), position);
            (rate.bytes_per_second(), rate.highest())
        };
        at(0, 0);
        assert_eq!(at(100, 1_000_000), (0, 0), "offsets are absolute");
        assert_eq!(at(200, 1_000_100), (0, 1000));
        assert_eq!(at(300, 2_000_100), (0, 10_000_000));
        assert_eq!(at(350, 2_000_100), (0, 10_000_000), "less than a span has passed");
        assert_eq!(at(400, 2_000_100), (0, 0));
    }
}
