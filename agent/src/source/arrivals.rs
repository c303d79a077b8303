//! Arrivals: when commands that must not be applied late have arrived in the journal.
//!
//! A snapshot holds everything up to an offset, and replicas apply the stream behind it. Which snapshot that is shows
//! later than the commands arrive: so all of them are noted, those of a short time together.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Commands that arrive within this time are one entry. A replica that joined in it is taken for one that came after
/// all of them.
const TOGETHER: Duration = Duration::from_millis(50);

/// The most entries. With more, neighbours become one. So the oldest become coarse, and a snapshot that is taken now
/// begins among the newest.
const ENTRIES_MAX: usize = 1024;

/// The commands of one kind.
#[derive(Debug, Default)]
pub(crate) struct Arrivals {
    /// In the order of the stream.
    entries: VecDeque<Entry>,
}

/// Some commands.
#[derive(Debug, Clone, Copy)]
struct Entry {
    /// When the first of them arrived.
    at: Instant,
    /// Offset of the last byte of the last one.
    last: u64,
}

impl Arrivals {
    /// A command whose last byte has this offset has arrived, and maybe others before it.
    pub(crate) fn note(&mut self, last: u64, at: Instant) {
        match self.entries.back_mut() {
            Some(entry) if at.saturating_duration_since(entry.at) < TOGETHER => entry.last = last,
            _ => self.entries.push_back(Entry { at, last }),
        }
        if self.entries.len() > ENTRIES_MAX {
            let all: Vec<Entry> = self.entries.drain(..).collect();
            let joined = all.chunks(2).filter_map(|pair| Some(Entry { at: pair.first()?.at, last: pair.last()?.last }));
            self.entries.extend(joined);
        }
    }

    /// When the first command behind a snapshot at this offset arrived, or a little before; `None`: there is none. What
    /// the snapshot holds is forgotten: the next one is taken later.
    pub(crate) fn first_behind(&mut self, offset: u64) -> Option<Instant> {
        while self.entries.front().is_some_and(|entry| entry.last <= offset) {
            self.entries.pop_front();
        }
        self.entries.front().map(|entry| entry.at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_command_behind_a_snapshot_is_known_and_what_is_in_it_is_forgotten() {
        let (began, second) = (Instant::now(), Duration::from_secs(1));
        let mut arrivals = Arrivals::default();
        assert_eq!(arrivals.first_behind(0), None);
        (1..=5).for_each(|step| arrivals.note(u64::from(step) * 100, began + second * step));
        arrivals.note(510, began + second * 5 + TOGETHER / 2);
        assert_eq!(arrivals.first_behind(99), Some(began + second));
        assert_eq!(arrivals.first_behind(100), Some(began + second * 2));
        assert_eq!(arrivals.first_behind(499), Some(began + second * 5));
        // A part of an entry is behind it: never later than in truth.
        assert_eq!(arrivals.first_behind(505), Some(began + second * 5));
        assert_eq!(arrivals.first_behind(510), None);
        assert!(arrivals.entries.is_empty());
    }

    #[test]
    fn memory_is_bounded_and_no_time_is_later_than_in_truth() {
        let (began, step) = (Instant::now(), TOGETHER * 2);
        let mut arrivals = Arrivals::default();
        for number in 1..=20_000_u32 {
            arrivals.note(u64::from(number), began + step * number);
            assert!(arrivals.entries.len() <= ENTRIES_MAX);
        }
        for offset in (0..19_900).step_by(777) {
            let first = arrivals.first_behind(u64::from(offset)).unwrap_or(began);
            assert!(first <= began + step * (offset + 1), "{offset}");
        }
        let first = arrivals.first_behind(19_900).unwrap_or(began);
        assert!(first + step * 4 >= began + step * 19_901, "the newest are coarse too");
    }
}
