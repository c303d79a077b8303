//! Choice: which copy is read. It does no I/O: sightings of the copies' lines and the time go in.
//!
//! A copy is read if it was seen a moment ago, is whole, and has applied whatever was read before. It is left if
//! another one had applied more a while before it was seen itself: then its server gets no writes, or hangs.

use std::time::{Duration, Instant};

use crate::message::{Standing, State};
use crate::shape::Copies;
use crate::version::Version;

/// See the module's text.
#[derive(Debug, Default)]
pub(super) struct Choice {
    places: [Place; Copies::MOST],
    /// The copy that is read.
    current: Option<usize>,
}

/// What is known of a copy.
#[derive(Clone, Copy, Debug, Default)]
struct Place {
    /// Whether it is in memory of this host.
    is_here: bool,
    last: Option<Sighting>,
    /// Two earlier ones, the later one first. The other one is at least [`LAG`] older, however often a copy is seen.
    kept: [Option<Sighting>; 2],
}

#[derive(Clone, Copy, Debug)]
struct Sighting {
    line: Standing,
    at: Instant,
}

impl Choice {
    /// The line of a copy was read.
    pub(super) fn sighted(&mut self, server: usize, is_here: bool, line: Standing, now: Instant) {
        if let Some(place) = self.places.get_mut(server) {
            let last = Some(Sighting { line, at: now });
            let kept = match place.kept {
                [Some(newer), _] if newer.at + LAG > now => place.kept,
                [newer, _] => [last, newer],
            };
            *place = Place { is_here, last, kept };
        }
    }

    /// A copy cannot be read any more.
    pub(super) fn lost(&mut self, server: usize) {
        if let Some(place) = self.places.get_mut(server) {
            *place = Place::default();
        }
    }

    /// How many copies can be read at present.
    pub(super) fn readable(&self, now: Instant) -> usize {
        self.places.iter().filter(|place| place.is_readable(Version::NONE, now)).count()
    }

    /// The copy to read, of those that have applied everything up to `through`. `None`: no copy can be read at present.
    /// `first` is the one with which it begins: hosts that begin with different ones share the copies out.
    pub(super) fn choose(&mut self, through: Version, first: usize, now: Instant) -> Option<usize> {
        let (places, number) = (&self.places, self.places.len());
        let is_good = |server: &usize| places[*server].is_readable(through, now) && !self.falls_behind(*server);
        let all = || (0..number).map(|step| (first + step) % number).filter(is_good);
        let kept = self.current.filter(is_good);
        let chosen = kept.or_else(|| all().find(|server| places[*server].is_here)).or_else(|| all().next());
        self.current = chosen;
        chosen
    }

    /// Whether another copy had applied more, a while before this one was seen.
    fn falls_behind(&self, server: usize) -> bool {
        let Some(seen) = self.places[server].last else { return false };
        let sightings = self.places.iter().flat_map(|place| [place.last, place.kept[0], place.kept[1]]).flatten();
        sightings
            .filter(|other| other.line.state == State::Whole && other.at + LAG <= seen.at)
            .any(|other| other.line.applied > seen.line.applied)
    }
}

impl Place {
    fn is_readable(&self, through: Version, now: Instant) -> bool {
        self.last.is_some_and(|Sighting { line, at }| {
            line.state == State::Whole && line.applied >= through && now.saturating_duration_since(at) <= FRESH
        })
    }
}

/// How often each copy is looked at.
pub(super) const SIGHT_EVERY: Duration = Duration::from_millis(250);

/// How much later than another one a copy may have a write. Less than [`SIGHT_EVERY`], so that of two sightings of a
/// copy one is always old enough.
const LAG: Duration = Duration::from_millis(200);

/// How long a sighting counts: some that were late because the host was busy, and not a server that hangs.
const FRESH: Duration = Duration::from_millis(1500);

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use crate::version::Generation;

    fn line(state: State, applied: u64) -> Standing {
        let start = Generation::NONE.next().unwrap().start();
        Standing { state, applied: Version::from_word(start.word() + applied).unwrap(), ..Standing::default() }
    }

    /// Copies that are seen every quarter of a second, a little after each other.
    struct Seen {
        choice: Choice,
        now: Instant,
    }

    impl Seen {
        fn new() -> Seen {
            Seen { choice: Choice::default(), now: Instant::now() }
        }

        fn look(&mut self, applied: &[Option<u64>]) {
            self.now += SIGHT_EVERY - Duration::from_millis(10) * applied.len() as u32;
            for (server, applied) in applied.iter().enumerate() {
                self.now += Duration::from_millis(10);
                if let Some(applied) = applied {
                    self.choice.sighted(server, false, line(State::Whole, *applied), self.now);
                }
            }
        }

        fn choose(&mut self, through: u64, first: usize) -> Option<usize> {
            self.choice.choose(line(State::Whole, through).applied, first, self.now)
        }
    }

    #[test]
    fn a_copy_is_read_as_long_as_it_gets_the_writes_and_left_soon_after() {
        let mut seen = Seen::new();
        assert_eq!(seen.choose(0, 1), None);
        seen.look(&[Some(5), Some(5), Some(5)]);
        assert_eq!(seen.choose(5, 1), Some(1));
        for applied in 6..20 {
            // The others are a little further each time.
            seen.look(&[Some(applied + 1), Some(applied), Some(applied + 1)]);
            assert_eq!(seen.choose(applied, 2), Some(1), "it is kept");
        }
        seen.look(&[Some(21), Some(19), Some(21)]);
        seen.look(&[Some(22), Some(19), Some(22)]);
        assert_eq!(seen.choose(19, 1), Some(2), "its server gets no writes any more");
        seen.look(&[Some(23), Some(23), Some(23)]);
        assert_eq!(seen.choose(22, 1), Some(2), "no need to go back");
        assert_eq!(seen.choose(24, 1), None, "none has what was read");
    }

    #[test]
    fn a_copy_that_hangs_is_behind_or_lost_is_not_read() {
        let mut seen = Seen::new();
        seen.look(&[Some(5), Some(5), None]);
        assert_eq!((seen.choose(5, 0), seen.choice.readable(seen.now)), (Some(0), 2));
        seen.choice.sighted(0, false, line(State::Behind, 5), seen.now);
        assert_eq!(seen.choose(5, 0), Some(1));
        seen.choice.lost(1);
        assert_eq!(seen.choose(5, 0), None);
        seen.look(&[Some(6), Some(6), None]);
        assert_eq!(seen.choose(6, 0), Some(0));
        // Nothing was seen of it for a while; the writer has written nothing either.
        for _ in 0..7 {
            seen.look(&[None, Some(6), None]);
        }
        assert_eq!((seen.choose(6, 0), seen.choice.readable(seen.now)), (Some(1), 1));
    }

    /// Each read of blocks is a sighting too: thousands a second.
    #[test]
    fn a_copy_that_is_seen_all_the_time_is_known_to_be_ahead_of_others() {
        let mut seen = Seen::new();
        seen.look(&[Some(0), Some(0), Some(0)]);
        assert_eq!(seen.choose(0, 0), Some(0));
        for applied in 1..1000 {
            seen.now += Duration::from_millis(1);
            seen.choice.sighted(0, false, line(State::Whole, applied), seen.now);
            assert_eq!(seen.choose(applied, 0), Some(0), "it is what was just read");
        }
        // A copy that had the first hundred writes after the last of these was applied lags, and one that had nearly
        // all of them does not.
        seen.choice.lost(2);
        seen.choice.sighted(1, false, line(State::Whole, 100), seen.now);
        assert!(seen.choice.falls_behind(1));
        seen.choice.sighted(1, false, line(State::Whole, 950), seen.now);
        assert!(!seen.choice.falls_behind(1) && !seen.choice.falls_behind(0));
    }

    #[test]
    fn memory_of_this_host_is_read_first() {
        let mut seen = Seen::new();
        seen.look(&[Some(5), Some(5), Some(5)]);
        seen.choice.sighted(2, true, line(State::Whole, 5), seen.now);
        assert_eq!(seen.choose(5, 0), Some(2));
        // Unless it lags: as memory of a process that was stopped does.
        seen.look(&[Some(7), Some(7), None]);
        seen.now += SIGHT_EVERY;
        seen.choice.sighted(2, true, line(State::Whole, 5), seen.now);
        assert_eq!(seen.choose(5, 0), Some(0));
    }
}
