//! Outbox: memory of the writer out of which servers pull the blocks of large writes, and the memory at a server into
//! which they do. Both have each write at the same place, so a server can be pulled from in its turn.
//!
//! ```text
//!   writer: outbox ══ bytes ══▶ server: staging ══ bytes ══▶ server: staging      (chain; star: each from the outbox)
//! ```
//!
//! | at | bytes | what |
//! |---|---|---|
//! | 0 | [`OUTBOX_BYTES`] | blocks of writes, each write in one piece |
//! | [`PROGRESS_AT`] | 8 | in a staging: the last write whose blocks are there, as a version's word |

use std::collections::VecDeque;
use std::time::Duration;

use crate::link::MOST_ROOM;
use crate::wire::MAX_DATA_BYTES;

/// Bytes for blocks: all that a writer may have under way at a server, and the longest write, as a write is not divided
/// at the end.
pub(crate) const OUTBOX_BYTES: u64 = MOST_ROOM.bytes + MAX_DATA_BYTES as u64;

/// Where a staging says how far it is.
pub(crate) const PROGRESS_AT: u64 = OUTBOX_BYTES;

/// Where a server reads the progress of another one into its own staging.
pub(crate) const SEEN_AT: u64 = PROGRESS_AT + 64;

/// Length of both: a page for the progress.
pub(crate) const REGION_BYTES: u64 = OUTBOX_BYTES + 4096;

/// Shortest write that is pulled, in bytes. Below it a message is one round trip, and a pull two.
pub(crate) const LEAST_PULLED_BYTES: usize = 64 << 10;

/// Longest time for a connection to a region. Less than a server has for an answer.
pub(crate) const REACH_LIMIT: Duration = Duration::from_secs(1);

/// Whether a write of this length can be at this place.
pub(crate) fn has_place(at: u64, bytes: usize) -> bool {
    at.checked_add(bytes as u64).is_some_and(|end| end <= OUTBOX_BYTES)
}

/// The places of an outbox. They are freed in the order in which they were taken.
#[derive(Debug, Default)]
pub(crate) struct Places {
    /// Those that are taken: first byte, length.
    taken: VecDeque<(u64, u64)>,
}

impl Places {
    /// Takes a place, if there is one. An outbox that is empty begins at its start again, so that few pages are touched
    /// as long as little is under way.
    pub(crate) fn take(&mut self, bytes: u64) -> Option<u64> {
        let (Some(&(oldest, _)), Some(&(last, length))) = (self.taken.front(), self.taken.back()) else {
            return self.taken_at(0, bytes, OUTBOX_BYTES);
        };
        let next = last + length;
        if last < oldest {
            return self.taken_at(next, bytes, oldest);
        }
        let at_the_start = if bytes <= oldest { Some(0) } else { None };
        match at_the_start {
            // Turned back early: more than the longest write must fit before the oldest one.
            Some(at) if oldest >= next - oldest + 2 * MAX_DATA_BYTES as u64 => self.taken_at(at, bytes, oldest),
            _ => self.taken_at(next, bytes, OUTBOX_BYTES).or_else(|| self.taken_at(0, bytes, oldest)),
        }
    }

    fn taken_at(&mut self, at: u64, bytes: u64, end: u64) -> Option<u64> {
        (at + bytes <= end).then(|| {
            self.taken.push_back((at, bytes));
            at
        })
    }

    /// Frees the oldest place.
    pub(crate) fn free(&mut self) {
        self.taken.pop_front();
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_place_is_within_the_outbox() {
        assert!(has_place(0, MAX_DATA_BYTES) && has_place(OUTBOX_BYTES - 4096, 4096));
        for (at, bytes) in [(OUTBOX_BYTES, 4096), (OUTBOX_BYTES - 4095, 4096), (u64::MAX, 1), (u64::MAX - 4095, 4096)] {
            assert!(!has_place(at, bytes), "{at} {bytes}");
        }
    }

    #[test]
    fn little_under_way_touches_little() {
        let mut places = Places::default();
        let bytes = 1 << 20;
        let mut highest = 0;
        for round in 0..1000 {
            highest = highest.max(places.take(bytes).unwrap_or(u64::MAX));
            if round >= 4 {
                places.free();
            }
        }
        assert!(highest < 20 << 20, "{highest}");
    }

    proptest! {
        #[test]
        fn places_are_inside_and_do_not_overlap(steps in prop::collection::vec((1..=1024_u64, 0..8_u8), 1..400)) {
            let (mut places, mut taken) = (Places::default(), VecDeque::<(u64, u64)>::new());
            for (blocks, freed) in steps {
                let bytes = blocks * 4096;
                for _ in 0..freed.min(2) {
                    places.free();
                    taken.pop_front();
                }
                while taken.iter().map(|(_, length)| length).sum::<u64>() + bytes > MOST_ROOM.bytes {
                    places.free();
                    taken.pop_front();
                }
                let Some(at) = places.take(bytes) else { continue };
                prop_assert!(has_place(at, bytes as usize));
                prop_assert!(taken.iter().all(|&(other, length)| at + bytes <= other || other + length <= at));
                taken.push_back((at, bytes));
            }
        }
    }
}
