//! Forks of the primary: how many snapshots the source takes in a short time.
//!
//! Each snapshot makes the primary fork, and until its end the primary copies every page that clients write to. A
//! replica that fails and comes back in a loop, or a holder of the token, could make the source take one snapshot after
//! the other without end. So the source may take [`FORKS_AT_ONCE`] in a row. Each further one must wait until the
//! primary has been left alone for a while: `--fork-interval`, or as long as the last snapshot took.
//!
//! Several replicas that come one after the other share a retained snapshot, and the first ones of a windowed source
//! are within the number above. Neither waits.

use std::time::{Duration, Instant};

use remora_protocol::WaitCause;

/// Snapshots that the source may take without a pause: those of a few replicas that come one after the other to a
/// windowed source, with some failures in between.
pub(crate) const FORKS_AT_ONCE: u32 = 5;

/// The longest pause that follows from a long snapshot: less than the default of `--retry-for`, so that a replica that
/// waits for it does not give up.
const LONGEST_PAUSE: Duration = Duration::from_secs(240);

/// The forks that the source has caused lately. A bucket: each fork takes one out, and the time without a snapshot puts
/// them back.
#[derive(Debug)]
pub(crate) struct Forks {
    /// The shortest time in which one fork is put back; zero: forks are not spaced.
    interval: Duration,
    /// Forks that may follow at once.
    left: f64,
    /// How long the last snapshot took, or the present one so far.
    took: Duration,
    looked: Instant,
}

impl Forks {
    pub(super) fn new(now: Instant, interval: Duration) -> Forks {
        Forks { interval, left: f64::from(FORKS_AT_ONCE), took: Duration::ZERO, looked: now }
    }

    /// The primary has forked for a snapshot.
    pub(super) fn forked(&mut self) {
        self.left = (self.left - 1.0).max(0.0);
        self.took = Duration::ZERO;
    }

    /// Time has passed. `has_fork`: a snapshot is being taken.
    pub(super) fn look(&mut self, now: Instant, has_fork: bool) {
        let passed = now.saturating_duration_since(self.looked);
        self.looked = now;
        if has_fork {
            self.took += passed;
        } else if !self.interval.is_zero() {
            let back = passed.as_secs_f64() / self.pause().as_secs_f64();
            self.left = (self.left + back).min(f64::from(FORKS_AT_ONCE));
        }
    }

    /// Why the source does not make the primary fork now; `None` if it may.
    pub(crate) fn why_not(&self) -> Option<(WaitCause, String)> {
        if self.interval.is_zero() || self.left >= 1.0 {
            return None;
        }
        let text = format!(
            "the primary has forked for {FORKS_AT_ONCE} snapshots in a short time; the source takes the next one within {} s \
             (--fork-interval on the source)",
            self.pause().as_secs_f64().ceil()
        );
        Some((WaitCause::Busy, text))
    }

    /// The time in which one fork is put back: as long as the last snapshot took, within bounds.
    fn pause(&self) -> Duration {
        self.interval.max(self.took.min(LONGEST_PAUSE))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    const INTERVAL: Duration = Duration::from_secs(30);
    const STEP: Duration = Duration::from_millis(250);

    /// The number of snapshots in this time if each is taken as soon as it may be.
    fn taken_in(span: Duration, interval: Duration, took: Duration) -> u32 {
        let begin = Instant::now();
        let (mut forks, mut now, mut taken) = (Forks::new(begin, interval), begin, 0);
        while now < begin + span {
            if forks.why_not().is_none() {
                forks.forked();
                let end = now + took;
                while now < end {
                    now += STEP;
                    forks.look(now, true);
                }
                taken += 1;
            }
            now += STEP;
            forks.look(now, false);
        }
        taken
    }

    #[test]
    fn the_first_snapshots_do_not_wait_and_then_there_is_one_for_each_interval() {
        let second = Duration::from_secs(1);
        assert_eq!(taken_in(10 * second, INTERVAL, second), FORKS_AT_ONCE);
        let in_an_hour = taken_in(3600 * second, INTERVAL, second);
        assert!((114..=122).contains(&in_an_hour), "{in_an_hour}");
    }

    #[test]
    fn after_long_snapshots_the_primary_has_as_much_time_without_a_fork_up_to_a_bound() {
        let minute = Duration::from_secs(60);
        let in_a_day = taken_in(1440 * minute, INTERVAL, 3 * minute);
        assert!((235..=246).contains(&in_a_day), "{in_a_day} of three minutes in 1440 minutes");
        let in_a_day = taken_in(1440 * minute, INTERVAL, 60 * minute);
        assert!((22..=24).contains(&in_a_day), "{in_a_day} of an hour in 24 hours");
    }

    #[test]
    fn an_interval_of_zero_spaces_nothing_and_a_waiting_replica_is_told_the_same_text_throughout() {
        let now = Instant::now();
        let (mut free, mut spaced) = (Forks::new(now, Duration::ZERO), Forks::new(now, INTERVAL));
        for _ in 0..100 {
            free.forked();
            free.look(now + INTERVAL, true);
            assert!(free.why_not().is_none());
        }
        (0..FORKS_AT_ONCE).for_each(|_| spaced.forked());
        let (cause, text) = spaced.why_not().unwrap();
        assert_eq!(cause, WaitCause::Busy);
        assert!(text.contains("within 30 s") && text.contains("--fork-interval"), "{text}");
        spaced.look(now + INTERVAL / 2, false);
        assert_eq!(spaced.why_not(), Some((cause, text)));
        spaced.look(now + INTERVAL, false);
        assert_eq!(spaced.why_not(), None);
    }
}
