//! How late a reader is that others wait for.

use std::time::{Duration, Instant};

/// The least rate of a reader that is in the way, in bytes per second: 4 Mb/s. Two replicas behind a link of 10 Mb/s
/// have more. At this rate a snapshot of 8 GiB takes 4.5 hours, so less is of no use to a replica either.
pub(crate) const LEAST_RATE: u64 = 512 << 10;

/// The longest time between two looks that counts. A longer one means that the source itself was stopped.
const LONGEST_STEP: Duration = Duration::from_secs(1);

/// How late a reader is.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Pace {
    pub(super) late: Duration,
    /// The slots that it had passed at the last look.
    passed: u64,
    looked: Option<Instant>,
}

impl Pace {
    /// The pace of a reader that begins at this slot.
    pub(super) fn from(slot: u64) -> Pace {
        Pace { passed: slot, ..Pace::default() }
    }

    /// The reader has passed the slots below this one. `is_in_the_way`: others wait for it.
    pub(super) fn look(&mut self, now: Instant, slots_below: u64, slot_bytes: u64, is_in_the_way: bool) {
        let step = self.looked.map_or(Duration::ZERO, |looked| now.saturating_duration_since(looked).min(LONGEST_STEP));
        let bytes = slots_below.saturating_sub(self.passed).saturating_mul(slot_bytes);
        if is_in_the_way {
            self.late += step;
        }
        self.late = self.late.saturating_sub(Duration::from_secs_f64(bytes as f64 / LEAST_RATE as f64));
        (self.passed, self.looked) = (slots_below.max(self.passed), Some(now));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SLOT: u64 = 1 << 20;
    const LIMIT: Duration = Duration::from_secs(60);

    /// How late a reader is that takes one slot in each `period`, at the latest in an hour.
    fn latest(period: Duration, is_in_the_way: bool) -> Duration {
        let begin = Instant::now();
        let (mut pace, mut most) = (Pace::default(), Duration::ZERO);
        for millis in (0..3_600_000).step_by(50) {
            let since = Duration::from_millis(millis);
            pace.look(begin + since, (since.as_millis() / period.as_millis()) as u64, SLOT, is_in_the_way);
            most = most.max(pace.late);
        }
        most
    }

    #[test]
    fn a_reader_behind_a_slow_link_is_never_late_and_one_that_drips_is() {
        // 10 Mb/s, and half of it.
        for period in [Duration::from_millis(850), Duration::from_millis(1700)] {
            assert!(latest(period, true) < 2 * period, "{period:?}");
        }
        assert!(latest(Duration::from_secs(14), true) > LIMIT);
        assert!(latest(Duration::from_secs(3), true) > LIMIT);
        assert_eq!(latest(Duration::from_secs(3), false), Duration::ZERO);
    }

    #[test]
    fn numbers_that_no_reader_has_and_a_source_that_was_stopped_do_no_harm() {
        let (mut pace, now) = (Pace::default(), Instant::now());
        pace.look(now, 0, SLOT, true);
        pace.look(now + LIMIT * 100, 0, SLOT, true);
        assert_eq!(pace.late, LONGEST_STEP);
        pace.look(now + LIMIT * 101, u64::MAX, u64::MAX, true);
        assert_eq!(pace.late, Duration::ZERO);
    }
}
