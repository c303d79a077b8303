//! Where a sweep is, and which keys need nothing more. Pure: places and names in, decisions out.
//!
//! A server's scan goes through a table in the order of the keys' hashes *with their bits reversed*: the key's
//! **place**. So one number says which keys of a database the sweep has passed, however the table grows and shrinks
//! meanwhile. Before a command changes a key that lies ahead, the key is *settled*: if it exists, its record is written
//! at once, as it was at the beginning; if not, it was not there at the beginning either. The sweep leaves settled keys
//! out.
//!
//! ```text
//!   database 0            database 3                     database 5
//!   ███████████████████   ███████████████▌ · · s · s ·   · · s · · · · · s · ·      s: settled
//!        passed                          └ position               ahead
//! ```
//!
//! A name is settled in all databases ahead at once: a filter of commands does not know in which one a client is.

use std::collections::BTreeSet;
use std::ops::Range;

/// Where a key is in the order of the sweep.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Place(u64);

impl Place {
    pub(super) fn of_hash(hash: u64) -> Place {
        Place(hash.reverse_bits())
    }

    /// Where the step after this one begins, by the cursor of the scan. `None` if there is no such step.
    pub(super) fn of_cursor(cursor: u64) -> Option<Place> {
        (cursor != 0).then(|| Place(cursor.reverse_bits()))
    }
}

/// A database that had keys at the beginning.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Database {
    pub(super) number: u32,
    /// Keys at the beginning.
    pub(super) keys: u64,
    /// Keys whose records are written.
    pub(super) recorded: u64,
}

/// A sweep's way through the databases.
#[derive(Clone, Debug)]
pub(super) struct Course {
    databases: Vec<Database>,
    /// The database that is being swept. Beyond the last one at the end.
    at: usize,
    /// Keys of that database before this place are passed.
    position: Place,
    /// Names whose keys are settled in every database ahead.
    settled: BTreeSet<(Place, Box<[u8]>)>,
    settled_bytes: usize,
}

/// Why the sweep cannot go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Astray {
    #[error("a step of the scan showed a key beyond its end: this server scans in another order")]
    Beyond,
    #[error("a step of the scan did not go forward")]
    Backward,
    #[error("clients have written to more keys ahead of the sweep than it keeps the names of ({} MiB)", SETTLED_BYTES_MAX >> 20)]
    TooManySettled,
    #[error("of {keys} keys {recorded} were recorded, and no more than {gone} can have expired")]
    Miscounted { keys: u64, recorded: u64, gone: u64 },
}

impl Course {
    /// A sweep through these databases, and the keys that they have now.
    pub(super) fn new(databases: impl IntoIterator<Item = (u32, u64)>) -> Course {
        let databases = databases.into_iter().filter(|(_, keys)| *keys > 0);
        let databases = databases.map(|(number, keys)| Database { number, keys, recorded: 0 }).collect();
        Course { databases, at: 0, position: Place(0), settled: BTreeSet::new(), settled_bytes: 0 }
    }

    pub(super) fn databases(&self) -> &[Database] {
        &self.databases
    }

    /// The database to take the next step in, by its index and its number. `None` at the end.
    pub(super) fn current(&self) -> Option<(usize, u32)> {
        self.databases.get(self.at).map(|database| (self.at, database.number))
    }

    /// A command is about to change this key: the databases, by their index, in which it must be recorded now if it
    /// exists there. The key is settled from now on.
    pub(super) fn settle(&mut self, place: Place, name: &[u8]) -> Result<Range<usize>, Astray> {
        let ahead = if place < self.position { self.at + 1 } else { self.at };
        if ahead >= self.databases.len() {
            return Ok(0..0);
        }
        if !self.settled.insert((place, name.into())) {
            return Ok(0..0);
        }
        self.settled_bytes += name.len() + ENTRY_BYTES;
        if self.settled_bytes > SETTLED_BYTES_MAX {
            return Err(Astray::TooManySettled);
        }
        Ok(ahead..self.databases.len())
    }

    /// Whether a key that a step has shown is to be recorded. `next`: where the step after it begins. A key that is
    /// already passed is shown again after its table has shrunk.
    pub(super) fn shown(&self, place: Place, name: &[u8], next: Option<Place>) -> Result<bool, Astray> {
        if next.is_some_and(|next| place >= next) {
            return Err(Astray::Beyond);
        }
        Ok(place >= self.position && (self.settled.is_empty() || !self.settled.contains(&(place, name.into()))))
    }

    /// The key of that database has been recorded.
    pub(super) fn recorded(&mut self, index: usize) {
        if let Some(database) = self.databases.get_mut(index) {
            database.recorded += 1;
        }
    }

    /// All keys of a step are recorded, and the next one begins there.
    pub(super) fn passed(&mut self, next: Option<Place>) -> Result<(), Astray> {
        match next {
            Some(next) if next <= self.position => return Err(Astray::Backward),
            Some(next) => self.position = next,
            None => {
                self.at += 1;
                self.position = Place(0);
            }
        }
        self.forget();
        Ok(())
    }

    /// Forgets settled names that the sweep has passed in the last database.
    fn forget(&mut self) {
        if self.at >= self.databases.len() {
            self.settled.clear();
            self.settled_bytes = 0;
        } else if self.at + 1 == self.databases.len() {
            while let Some(first) = self.settled.first()
                && first.0 < self.position
            {
                let gone = self.settled.pop_first();
                self.settled_bytes -= gone.map_or(0, |(_, name)| name.len() + ENTRY_BYTES);
            }
        }
    }

    /// Checks at the end that every key of the beginning was recorded, but for the `gone` that the server has removed
    /// since because they had expired. Databases are checked together: a server counts them together.
    pub(super) fn check(&self, gone: u64) -> Result<(), Astray> {
        let keys = self.databases.iter().map(|database| database.keys).sum();
        let recorded: u64 = self.databases.iter().map(|database| database.recorded).sum();
        let too_many = self.databases.iter().any(|database| database.recorded > database.keys);
        if too_many || recorded.saturating_add(gone) < keys {
            return Err(Astray::Miscounted { keys, recorded, gone });
        }
        Ok(())
    }
}

/// Bytes of one settled name besides its own: the place, the slice, the allocation and its part of the tree.
const ENTRY_BYTES: usize = 64;

/// The most bytes of settled names: half a million keys of some 60 bytes. Beyond that the server's memory would grow by
/// more than the fork's way costs that servers of this size fear.
const SETTLED_BYTES_MAX: usize = 64 << 20;

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    const MIDDLE: Place = Place(1 << 63);

    #[test]
    fn a_key_behind_the_sweep_needs_nothing_and_one_ahead_is_settled_once() {
        let mut course = Course::new([(0, 1), (1, 0), (2, 1)]);
        course.passed(Some(MIDDLE)).unwrap();
        assert_eq!(course.settle(Place(5), b"behind").unwrap(), 1..2, "it may be in the database ahead");
        assert_eq!(course.settle(MIDDLE, b"ahead").unwrap(), 0..2);
        assert_eq!(course.settle(MIDDLE, b"ahead").unwrap(), 0..0);
        assert!(!course.shown(MIDDLE, b"ahead", None).unwrap());
        assert!(course.shown(MIDDLE, b"another", None).unwrap());
        assert!(!course.shown(Place(5), b"shown again", None).unwrap());
        course.passed(None).unwrap();
        assert_eq!(course.current(), Some((1, 2)));
        assert!(!course.shown(Place(5), b"behind", Some(MIDDLE)).unwrap(), "it is settled here too");
        course.passed(Some(MIDDLE)).unwrap();
        assert_eq!(course.settled.len(), 1, "what the sweep has passed is forgotten");
        course.passed(None).unwrap();
        assert_eq!((course.current(), course.settled_bytes), (None, 0));
        assert_eq!(course.settle(MIDDLE, b"after the end").unwrap(), 0..0);
    }

    #[test]
    fn a_scan_in_another_order_is_noticed() {
        let mut course = Course::new([(0, 10)]);
        assert_eq!(course.shown(MIDDLE, b"key", Some(MIDDLE)), Err(Astray::Beyond));
        course.passed(Some(MIDDLE)).unwrap();
        assert_eq!(course.passed(Some(MIDDLE)), Err(Astray::Backward));
    }

    #[test]
    fn a_key_that_is_missing_or_recorded_twice_is_noticed() {
        let mut course = Course::new([(0, 2), (1, 1)]);
        course.recorded(0);
        course.recorded(1);
        assert_eq!(course.check(0), Err(Astray::Miscounted { keys: 3, recorded: 2, gone: 0 }));
        course.check(1).unwrap();
        course.recorded(1);
        assert!(course.check(1).is_err(), "twice in the second database");
    }

    #[test]
    fn names_that_are_kept_have_a_bound() {
        let mut course = Course::new([(0, 1)]);
        let name = vec![0; SETTLED_BYTES_MAX];
        assert_eq!(course.settle(MIDDLE, &name), Err(Astray::TooManySettled));
    }
}
