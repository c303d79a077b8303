//! Finding the slot that holds an offset by probing entries: a binary search in a ring that moves meanwhile.
//!
//! No reads here: [`Search::probe`] returns the entry to load next, [`Search::answer`] takes it.

use crate::{
    error::Error,
    layout::{Entry, Geometry, Line},
};

#[derive(Debug)]
pub(super) struct Search {
    /// The offset wanted.
    wanted: u64,
    /// Slots that are still candidates.
    low: u64,
    high: u64,
    /// The last slot known to begin at or before the offset.
    best: Option<Found>,
    /// The lowest position seen, for the error message.
    oldest: Option<u64>,
}

/// The slot that contains the offset, unless the ring moves on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Found {
    pub(super) number: u64,
    /// Replication offset of its first byte.
    pub(super) position: u64,
}

impl Search {
    /// `None`: nothing is published yet, so there is nothing to search.
    pub(super) fn new(wanted: u64, line: &Line, geometry: &Geometry) -> Option<Search> {
        let high = line.published.checked_sub(1)? / geometry.slot_bytes();
        Some(Search { wanted, low: line.retired, high, best: None, oldest: None })
    }

    /// The entry to load next.
    pub(super) fn probe(&self) -> Option<u64> {
        (self.low <= self.high).then(|| self.low + (self.high - self.low) / 2)
    }

    /// The entry found at the place of slot `number`, the last probe.
    pub(super) fn answer(&mut self, number: u64, entry: &Entry) {
        if entry.number != number || entry.writing {
            // The ring has moved on over this slot, and over all before it.
            self.low = number + 1;
            self.best = self.best.filter(|best| best.number > number);
            return;
        }
        self.oldest = Some(self.oldest.map_or(entry.position, |oldest| oldest.min(entry.position)));
        if entry.position <= self.wanted {
            self.best = Some(Found { number, position: entry.position });
            self.low = number + 1;
        } else if number == 0 {
            self.high = 0;
            self.low = 1;
        } else {
            self.high = number - 1;
        }
    }

    /// The result, once there is nothing more to probe.
    pub(super) fn found(&self) -> Result<Found, Error> {
        let oldest = self.oldest.unwrap_or(self.wanted.saturating_add(1));
        self.best.ok_or(Error::Overrun { wanted: self.wanted, oldest, unit: "stream offset" })
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    #![allow(clippy::unwrap_used)]

    use proptest::prelude::*;

    use super::*;
    use crate::layout::State;

    const GEOMETRY: Geometry = Geometry { slot_size: 4096, slots: 64 };

    fn entry(number: u64, positions: &[u64]) -> Entry {
        Entry::plain(number, positions[number as usize], 0, 0)
    }

    proptest! {
        #[test]
        fn the_slot_found_is_the_one_a_scan_finds(
            steps in prop::collection::vec(1u64..5000, 1..60),
            retired in 0usize..60,
            wanted in 0u64..200_000,
        ) {
            let positions: Vec<u64> = steps.iter().scan(100, |at, step| { *at += step; Some(*at) }).collect();
            let retired = retired.min(positions.len() - 1);
            let line = Line {
                published: positions.len() as u64 * 4096,
                retired: retired as u64,
                end: None,
                state: State::Open,
            };
            let mut search = Search::new(wanted, &line, &GEOMETRY).unwrap();
            let mut probes = 0;
            while let Some(number) = search.probe() {
                search.answer(number, &entry(number, &positions));
                probes += 1;
            }
            prop_assert!(probes <= 7);
            let scan = (retired..positions.len()).rev().find(|&i| positions[i] <= wanted);
            match scan {
                Some(i) => prop_assert_eq!(search.found().unwrap(), Found { number: i as u64, position: positions[i] }),
                None => prop_assert!(search.found().is_err()),
            }
        }
    }

    #[test]
    fn an_empty_journal_has_nothing_to_search() {
        assert!(Search::new(5, &Line::NEW, &GEOMETRY).is_none());
    }

    #[test]
    fn slots_overwritten_during_the_search_are_given_up() {
        let line = Line { published: 8 * 4096, retired: 0, end: None, state: State::Open };
        let mut search = Search::new(1000, &line, &GEOMETRY).unwrap();
        while let Some(number) = search.probe() {
            let now = Entry::plain(number + 64, 999_999, 0, 0);
            search.answer(number, &now);
        }
        assert!(matches!(search.found(), Err(Error::Overrun { wanted: 1000, .. })));
    }
}
