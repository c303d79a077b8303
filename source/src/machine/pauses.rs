//! When the machine waits: between two forks of the primary ([`Forks`]), after snapshots that failed ([`Failures`]),
//! and for a reader that is late ([`Pace`]).

use std::time::{Duration, Instant};

use remora_protocol::WaitCause;

// Forks of the primary: how many snapshots the source takes in a short time.
//
// Each snapshot makes the primary fork, and until its end the primary copies every page that clients write to. A
// replica that fails and comes back in a loop, or a holder of the token, could make the source take one snapshot after
// the other without end. So the source may take [`FORKS_AT_ONCE`] in a row. Each further one must wait until the
// primary has been left alone for a while: `--fork-interval`, or as long as the last snapshot took.
//
// Several replicas that come one after the other share a retained snapshot, and the first ones of a windowed source
// are within the number above. Neither waits.

/// Snapshots that the source may take without a pause: those of a few replicas that come one after the other to a
/// windowed source, with some failures in between.
pub(crate) const FORKS_AT_ONCE: u32 = 5;

/// The longest pause that follows from a long snapshot: less than the default of `--retry-for`, so that a replica that
/// waits for it does not give up.
const LONGEST_PAUSE: Duration = Duration::from_secs(240);

/// The forks that the source has caused lately. A bucket: each fork takes one out, and the time without a snapshot puts
/// them back.
#[derive(Debug)]
pub struct Forks {
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
    pub fn why_not(&self) -> Option<(WaitCause, String)> {
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

// Failed snapshots: how many failed in a row, and how long the source pauses before the next one.
//
// Every attempt makes the primary fork, and its cause may be one that does not pass, such as an output buffer that is
// too small for the primary's write rate. So the pause grows with the failures in a row. Attempts that end before the
// primary has forked cost it a connection only, and do not count.

/// The failed snapshots of a source.
#[derive(Debug, Default)]
pub struct Failures {
    total: u64,
    /// Snapshots in a row that failed after the primary had forked for them.
    forks_in_a_row: u32,
    last: Option<String>,
}

impl Failures {
    /// Failed snapshots since the source started.
    pub fn total(&self) -> u64 {
        self.total
    }

    /// Why the last snapshot failed; empty if the last one is complete.
    pub fn last(&self) -> &str {
        self.last.as_deref().unwrap_or_default()
    }

    /// Counts a failed snapshot. `has_forked`: the primary had forked for it.
    pub(super) fn count(&mut self, has_forked: bool, text: &str) {
        self.total += 1;
        self.forks_in_a_row = self.forks_in_a_row.saturating_add(u32::from(has_forked));
        self.last = Some(text.to_owned());
    }

    /// A snapshot is complete.
    pub(super) fn succeeded(&mut self) {
        self.forks_in_a_row = 0;
        self.last = None;
    }

    /// A replica has gone, and `left` others remain. If it was the last one, the next was started by an operator who
    /// may have removed the cause, so it does not wait for the end of a long pause.
    pub(super) fn replica_left(&mut self, left: usize, now: Instant, retry: &mut Option<(Instant, String)>) {
        if left > 0 {
            return;
        }
        self.forks_in_a_row = 0;
        if let Some((at, _)) = retry {
            *at = (*at).min(now + FORGIVEN_PAUSE);
        }
    }

    /// The shortest pause before the next snapshot.
    pub(super) fn pause(&self) -> Duration {
        match self.forks_in_a_row.checked_sub(2) {
            // After one failure the caller's own pause is enough.
            None => Duration::ZERO,
            Some(further) => FORK_PAUSE.saturating_mul(1 << further.min(16)).min(FORK_PAUSE_MAX),
        }
    }

    /// What to tell replicas that wait. `text`: why the last snapshot failed; `pause`: how long the source waits now.
    pub(super) fn describe(&self, text: &str, pause: Duration) -> String {
        if self.forks_in_a_row < 2 {
            return format!("the last attempt to take a snapshot failed ({text}); the source tries again soon");
        }
        format!(
            "{} snapshots in a row failed after the primary had forked for them, the last one because {text}; the source takes the \
             next one in {} s",
            self.forks_in_a_row,
            pause.as_secs()
        )
    }
}

/// The pause after two failures in a row. It doubles with each further one.
const FORK_PAUSE: Duration = Duration::from_secs(2);

/// The longest pause: twice the default of `--retry-for`, so that replicas report the cause to their operators while
/// the primary is left alone.
const FORK_PAUSE_MAX: Duration = Duration::from_secs(600);

/// The longest rest of a pause once no replica is left.
const FORGIVEN_PAUSE: Duration = Duration::from_secs(5);

// How late a reader is that others wait for.

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
