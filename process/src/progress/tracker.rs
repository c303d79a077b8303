//! Tracker: how far a piece of work is, how fast it goes, and how long the rest takes. The one definition of all three,
//! for bars and lines of this process, for what a source reports of itself and its replicas, and for metrics.
//!
//! - **Rate:** what was added in the last [`RATE_SPAN`], per second. None in the first [`LEAST_SPAN`], and none at the
//!   end: there is nothing left to be fast with.
//! - **Percent:** of the length of the whole. While that is estimated it stays below 100, and it never becomes smaller:
//!   an estimate may grow faster than the work.
//! - **Time left:** the rest, at that rate.
//!
//! Pure: the caller hands the time in.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use remora_protocol::{Advance, Basis, Length};

/// The time over which a rate is averaged: long enough to be steady beside slots that arrive whole, short enough to
/// follow a link that slows down.
pub const RATE_SPAN: Duration = Duration::from_secs(5);

/// A rate over less time is a matter of chance.
const LEAST_SPAN: Duration = Duration::from_millis(500);

/// Samples are this far apart, so that a tracker holds two dozen of them however often it is told something.
const SAMPLE_EVERY: Duration = Duration::from_millis(250);

/// All of the work, in thousandths.
const ALL: u16 = 1000;

/// Follows one piece of work. A position below the last one begins it anew.
#[derive(Clone, Debug, Default)]
pub struct Tracker {
    /// When the work began, and at which position: what a former attempt has left is not counted.
    begun: Option<(Instant, u64)>,
    /// Positions of the last [`RATE_SPAN`], and the last one before.
    samples: VecDeque<(Instant, u64)>,
    position: u64,
    /// When it was told last.
    told: Option<Instant>,
    length: Length,
    permille: Option<u16>,
    /// The highest of them so far.
    highest: u16,
    /// When all was there.
    ended: Option<Instant>,
}

/// What a tracker shows at one moment.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Look {
    /// What is there.
    pub position: u64,
    /// What is known of the whole.
    pub length: Length,
    /// Thousandths of the whole; `None` if its length is unknown.
    pub permille: Option<u16>,
    /// Per second; `None` if it cannot be told yet, or all is there.
    pub rate: Option<f64>,
    /// `None` if nothing moves, or the rest is unknown.
    pub left: Option<Duration>,
    /// Since the beginning, up to the end.
    pub took: Duration,
    /// Per second since the beginning.
    pub average: f64,
}

impl Tracker {
    /// The work is at `position` of `length`.
    pub fn reach(&mut self, now: Instant, position: u64, length: Length) {
        if position < self.position {
            *self = Tracker::default();
        }
        self.begun.get_or_insert((now, position));
        (self.position, self.length, self.told) = (position, length, Some(now));
        let is_whole = length.basis == Basis::Known && position >= length.bytes;
        self.ended = is_whole.then(|| self.ended.unwrap_or(now));
        self.permille = match share(position, length) {
            None => None,
            Some(_) if is_whole => Some(ALL),
            Some(share) => Some(share.max(self.highest).min(ALL - 1)),
        };
        self.highest = self.permille.unwrap_or(self.highest);
        if self.samples.back().is_none_or(|(last, _)| now.saturating_duration_since(*last) >= SAMPLE_EVERY) {
            self.samples.push_back((now, position));
        }
        let is_old = |sample: &(Instant, u64)| now.saturating_duration_since(sample.0) >= RATE_SPAN;
        while self.samples.get(1).is_some_and(is_old) {
            self.samples.pop_front();
        }
    }

    /// Whether all is there.
    pub fn is_whole(&self) -> bool {
        self.ended.is_some()
    }

    /// What is shown at this moment.
    pub fn look(&self, now: Instant) -> Look {
        let (begun, from) = self.begun.unwrap_or((now, self.position));
        let took = self.ended.unwrap_or(now).saturating_duration_since(begun);
        let rate = self.rate(now);
        let rest = self.length.bytes.saturating_sub(self.position);
        // A slower one is shown as zero.
        let left = rate.filter(|rate| *rate >= 1.0 && rest > 0);
        Look {
            position: self.position,
            length: self.length,
            permille: self.permille,
            rate,
            left: left.and_then(|rate| Duration::try_from_secs_f64(rest as f64 / rate).ok()),
            took,
            average: (self.position - from) as f64 / took.max(Duration::from_millis(1)).as_secs_f64(),
        }
    }

    /// What was added in the last [`RATE_SPAN`], per second.
    fn rate(&self, now: Instant) -> Option<f64> {
        let age = |sample: &(Instant, u64)| now.saturating_duration_since(sample.0);
        if !self.is_whole() && self.told.is_some_and(|told| now.saturating_duration_since(told) >= RATE_SPAN) {
            return Some(0.0);
        }
        let old = self.samples.iter().rev().find(|sample| age(sample) >= RATE_SPAN);
        let since = old.or_else(|| self.samples.front()).filter(|_| !self.is_whole())?;
        let span = age(since);
        (span >= LEAST_SPAN).then(|| self.position.saturating_sub(since.1) as f64 / span.as_secs_f64())
    }
}

impl Look {
    /// The same for another process.
    pub fn advance(&self) -> Advance {
        Advance {
            percent_permille: self.permille,
            rate_bytes_per_s: self.rate.unwrap_or(0.0) as u64,
            left_seconds: self.left.map(|left| left.as_secs_f64().ceil() as u64),
        }
    }
}

/// The end of a transfer.
pub const WHOLE: Advance = Advance { percent_permille: Some(ALL), rate_bytes_per_s: 0, left_seconds: None };

/// The length of something that is known.
pub fn known(length: u64) -> Length {
    Length { bytes: length, basis: Basis::Known }
}

/// Thousandths, rounded down. An estimate that was exceeded says nothing, except one that follows the work.
pub fn share(position: u64, length: Length) -> Option<u16> {
    match length.basis {
        Basis::Unknown => None,
        Basis::Memory | Basis::Former if position > length.bytes => None,
        Basis::Memory | Basis::Former | Basis::Keys | Basis::Known => {
            let share = (u128::from(position) * u128::from(ALL)).checked_div(u128::from(length.bytes));
            Some(share.map_or(0, |share| share.min(u128::from(ALL)) as u16))
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MIB: u64 = 1 << 20;

    fn estimated(bytes: u64) -> Length {
        Length { bytes, basis: Basis::Keys }
    }

    /// What is shown of work after `steps` steps, each of which takes 100 ms and adds a MiB.
    fn after(steps: u64, length: Length) -> Look {
        let (start, mut tracker) = (Instant::now(), Tracker::default());
        let at = |step: u64| start + Duration::from_millis(100 * step);
        (0..=steps).for_each(|step| tracker.reach(at(step), step * MIB, length));
        tracker.look(at(steps))
    }

    fn rate(look: &Look) -> Option<u64> {
        look.rate.map(|rate| (rate / MIB as f64).round() as u64)
    }

    #[test]
    fn a_percentage_a_rate_and_the_time_left_follow_from_each_other() {
        let look = after(50, estimated(200 * MIB));
        assert_eq!((look.permille, rate(&look), look.left), (Some(250), Some(10), Some(Duration::from_secs(15))));
        let advance = Advance { percent_permille: Some(250), rate_bytes_per_s: 10 * MIB, left_seconds: Some(15) };
        assert_eq!(look.advance(), advance);
    }

    #[test]
    fn the_first_moment_has_no_rate_and_thus_no_time_left() {
        let look = after(4, known(200 * MIB));
        assert_eq!((look.permille, look.rate, look.left), (Some(20), None, None));
        assert_eq!(rate(&after(5, known(200 * MIB))), Some(10));
        assert_eq!(Tracker::default().look(Instant::now()).advance(), Advance::default());
    }

    #[test]
    fn the_rate_is_that_of_the_last_seconds_and_of_nothing_it_is_zero() {
        let (start, mut tracker) = (Instant::now(), Tracker::default());
        let at = |step: u64| start + Duration::from_millis(100 * step);
        // Fast for a minute, then slow.
        (0..600).for_each(|step| tracker.reach(at(step), step * 10 * MIB, known(10_000 * MIB)));
        (600..660).for_each(|step| tracker.reach(at(step), (6000 + step - 600) * MIB, known(10_000 * MIB)));
        assert_eq!(rate(&tracker.look(at(659))), Some(10));
        // The tracker is told nothing for a while.
        let silent = tracker.look(at(659) + RATE_SPAN);
        assert_eq!((silent.rate, silent.left, silent.permille), (Some(0.0), None, Some(605)));
    }

    #[test]
    fn all_is_a_hundred_percent_only_once_the_end_is_known_and_the_end_has_no_rate() {
        assert_eq!(after(50, estimated(50 * MIB)).permille, Some(999));
        assert_eq!(after(50, estimated(10 * MIB)).permille, Some(999), "more keys are to come");
        let (start, mut tracker) = (Instant::now(), Tracker::default());
        tracker.reach(start, 0, known(4 * MIB));
        tracker.reach(start + Duration::from_secs(2), 4 * MIB, known(4 * MIB));
        let later = tracker.look(start + Duration::from_secs(60));
        assert_eq!((later.permille, later.rate, later.left), (Some(1000), None, None));
        assert_eq!((later.took, later.average as u64), (Duration::from_secs(2), 2 * MIB));
    }

    #[test]
    fn an_unknown_length_has_no_percentage_and_a_refuted_one_neither() {
        assert_eq!(after(50, Length::default()).permille, None);
        let memory = |bytes| Length { bytes, basis: Basis::Memory };
        assert_eq!(after(50, memory(100 * MIB)).permille, Some(500));
        assert_eq!(after(50, memory(49 * MIB)).permille, None);
        assert_eq!(after(50, estimated(0)).permille, Some(0));
        assert_eq!(after(0, known(0)).permille, Some(1000), "nothing, and all of it");
    }

    #[test]
    fn an_attempt_that_begins_anew_begins_at_nothing() {
        let (start, mut tracker) = (Instant::now(), Tracker::default());
        tracker.reach(start, 0, known(100));
        tracker.reach(start + Duration::from_secs(1), 90, known(100));
        tracker.reach(start + Duration::from_secs(2), 10, known(100));
        let look = tracker.look(start + Duration::from_secs(2));
        assert_eq!((look.permille, look.rate), (Some(100), None));
    }

    fn lengths() -> impl Strategy<Value = Length> {
        let bases = [Basis::Unknown, Basis::Memory, Basis::Former, Basis::Keys];
        (0..1u64 << 40, prop::sample::select(bases.to_vec())).prop_map(|(bytes, basis)| Length { bytes, basis })
    }

    proptest! {
        #[test]
        fn whatever_is_estimated_a_percentage_never_falls_and_is_a_hundred_at_the_end_only(
            steps in prop::collection::vec((0..1u64 << 36, lengths(), 0..3000u64), 1..60),
        ) {
            let (mut now, mut tracker, mut position, mut shown) = (Instant::now(), Tracker::default(), 0, 0);
            for (more, length, millis) in steps {
                now += Duration::from_millis(millis);
                position += more;
                tracker.reach(now, position, length);
                let look = tracker.look(now);
                if let Some(permille) = look.permille {
                    prop_assert!((shown..1000).contains(&permille));
                    shown = permille;
                }
                prop_assert!(look.rate.is_none_or(|rate| rate.is_finite() && rate >= 0.0));
                prop_assert!(look.left.is_none() || look.rate >= Some(1.0));
                prop_assert!(tracker.samples.len() <= 22);
            }
            tracker.reach(now, position, known(position));
            prop_assert_eq!(tracker.look(now).permille, Some(1000));
        }
    }
}
