//! Staging: how many bytes each writer may have under way here. Together never more than the server has for it.
//!
//! ```text
//!   writer                                  server
//!     │ Window{wants, obeys} ─────────────▶ │ held := obeys; as much more as its fair share and the rest permit
//!     │ ◀───────────────── Granted{room}    │
//!     │ ◀── Written{…, room}, room < held   │ another writer is short: give some back
//!     │ Window{wants, obeys: that room} ──▶ │ held := obeys, and now there is some for the other one
//! ```
//!
//! What a writer *holds* is what it may have under way at most, whatever messages are on their way: it grows only with
//! an answer to the writer's question, of which there is one at a time, and shrinks only when the writer says so. The
//! *level* is the fair share: writers that want less than it get what they want, and the others get as much as it.

use std::collections::BTreeMap;

use crate::link::{LEAST_ROOM, MOST_ROOM};
use crate::wire::Used;

/// See the module's text.
#[derive(Debug)]
pub(super) struct Staging {
    bytes: u64,
    /// By the numbers of their connections.
    writers: BTreeMap<u64, Writer>,
    /// The sum of what they hold, and its maximum so far.
    held: u64,
    most_held: u64,
    level: u64,
}

#[derive(Clone, Copy, Debug)]
struct Writer {
    held: u64,
    wants: u64,
}

impl Staging {
    pub(super) fn new(bytes: u64) -> Staging {
        Staging { bytes, writers: BTreeMap::new(), held: 0, most_held: 0, level: MOST_ROOM.bytes }
    }

    /// Adds a writer, with the least that one can do with. `false`: there is not as much left.
    pub(super) fn enter(&mut self, writer: u64) -> bool {
        let least = LEAST_ROOM.bytes;
        let enters = self.held + least <= self.bytes && !self.writers.contains_key(&writer);
        if enters {
            self.writers.insert(writer, Writer { held: least, wants: least });
            self.changed();
        }
        enters
    }

    /// Removes a writer. It may never have been added.
    pub(super) fn leave(&mut self, writer: u64) {
        self.writers.remove(&writer);
        self.changed();
    }

    /// A writer wants so much, and has no more under way than it `obeys` until it is answered. Returns what it holds
    /// from now on; `None` if it is not known.
    pub(super) fn ask(&mut self, writer: u64, wants: u64, obeys: u64) -> Option<u64> {
        let (least, most) = (LEAST_ROOM.bytes, MOST_ROOM.bytes);
        let asking = self.writers.get_mut(&writer)?;
        asking.wants = wants.clamp(least, most);
        asking.held = asking.held.min(obeys.max(least));
        self.changed();
        let free = self.shared().saturating_sub(self.held);
        let level = self.level;
        let asking = self.writers.get_mut(&writer)?;
        let more = asking.wants.min(level).saturating_sub(asking.held).min(free);
        asking.held += more;
        let held = asking.held;
        self.changed();
        Some(held)
    }

    /// What a writer is told with each answer: less than it holds if another one is short.
    pub(super) fn told(&self, writer: u64) -> u64 {
        self.writers.get(&writer).map_or(LEAST_ROOM.bytes, |writer| writer.held.min(self.level))
    }

    /// What all writers together hold, and the most that they ever held.
    pub(super) fn held(&self) -> (u64, u64) {
        (self.held, self.most_held)
    }

    /// How much of it the writers hold.
    pub(super) fn used(&self) -> Used {
        Used { bytes: self.held, most: self.bytes }
    }

    /// What grants beyond the least are taken from. The rest is for writers that come.
    fn shared(&self) -> u64 {
        self.bytes - self.bytes / RESERVE
    }

    fn changed(&mut self) {
        self.held = self.writers.values().map(|writer| writer.held).sum();
        self.most_held = self.most_held.max(self.held);
        self.level = self.fair_share();
    }

    fn fair_share(&self) -> u64 {
        let mut wants: Vec<u64> = self.writers.values().map(|writer| writer.wants).collect();
        wants.sort_unstable();
        let mut left = self.shared();
        for (number, want) in wants.iter().enumerate() {
            let share = left / (wants.len() - number) as u64;
            if *want > share {
                return share.max(LEAST_ROOM.bytes);
            }
            left -= want;
        }
        MOST_ROOM.bytes
    }
}

/// A quarter is kept for writers that come: sixteen at once, of 256 MiB.
const RESERVE: u64 = 4;

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use proptest::prelude::*;

    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn a_lone_writer_gets_what_it_wants_and_gives_back_what_another_one_lacks() {
        let mut staging = Staging::new(64 * MIB); // 48 shared
        assert!(staging.enter(1));
        assert_eq!((staging.told(1), staging.ask(1, 20 * MIB, 4 * MIB)), (4 * MIB, Some(20 * MIB)));
        assert_eq!(staging.ask(1, 1 << 40, 20 * MIB), Some(MOST_ROOM.bytes), "as much as a writer can have");
        assert!(staging.enter(2));
        assert_eq!(staging.told(1), MOST_ROOM.bytes, "the second one does not want more than the least");
        assert_eq!(staging.ask(2, 1 << 40, 4 * MIB), Some(16 * MIB), "what is left over");
        assert_eq!((staging.told(1), staging.told(2)), (24 * MIB, 16 * MIB));
        assert_eq!(staging.ask(1, 1 << 40, 24 * MIB), Some(24 * MIB));
        assert_eq!(staging.ask(2, 1 << 40, 16 * MIB), Some(24 * MIB), "both are equal");
        staging.leave(1);
        assert_eq!(staging.ask(2, 1 << 40, 24 * MIB), Some(MOST_ROOM.bytes));
        assert_eq!(staging.held(), (MOST_ROOM.bytes, 48 * MIB));
    }

    #[test]
    fn as_many_writers_enter_as_have_the_least() {
        let mut staging = Staging::new(17 * MIB);
        let entered = (0..10).filter(|writer| staging.enter(*writer)).count();
        assert_eq!(entered, 4);
        assert!(!staging.enter(0), "twice");
        assert_eq!(staging.ask(0, 1 << 40, 0), Some(4 * MIB), "there is no more");
        staging.leave(3);
        assert!(staging.enter(77) && !staging.enter(78));
        assert_eq!(staging.ask(99, 1, 1), None);
    }

    proptest! {
        /// Writers that do as they say never have more under way together than the server has.
        #[test]
        fn what_is_held_stays_within_the_budget(
            bytes in 4 * MIB..300 * MIB,
            steps in prop::collection::vec((0..12_u64, 0..5_u8, 0..80 * MIB), 1..200),
        ) {
            let mut staging = Staging::new(bytes);
            let mut obeyed: BTreeMap<u64, u64> = BTreeMap::new();
            for (writer, step, wants) in steps {
                match step {
                    0 if staging.enter(writer) => _ = obeyed.insert(writer, LEAST_ROOM.bytes),
                    1 => {
                        staging.leave(writer);
                        obeyed.remove(&writer);
                    }
                    _ => {
                        let Some(room) = obeyed.get_mut(&writer) else { continue };
                        *room = (*room).min(staging.told(writer));
                        *room = staging.ask(writer, wants, *room).unwrap();
                    }
                }
                prop_assert!(obeyed.values().sum::<u64>() <= bytes && staging.held().1 <= bytes);
                for (writer, room) in &obeyed {
                    prop_assert!(*room >= LEAST_ROOM.bytes && *room <= MOST_ROOM.bytes);
                    prop_assert!(staging.told(*writer) <= *room);
                }
            }
        }
    }
}
