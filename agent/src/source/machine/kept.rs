//! A snapshot that a former process of the source has completed.

use std::time::Instant;

use remora_table::Origin;

use super::record::{Snapshot, Stage};
use super::{Format, Machine};

/// Goes on with a snapshot of which all slots are there, and with the stream behind it. `asked`: when the
/// primary forked for it. Called before the first event.
pub(crate) fn go_on(machine: &mut Machine, now: Instant, origin: Origin, bytes: u64, format: Format, asked: Instant) {
    let generation = origin.generation;
    machine.next_generation = machine.next_generation.max(generation + 1);
    let (stage, taken) = (Stage::Sealed { origin, bytes }, Some(asked));
    machine.snapshot = Some(Snapshot { generation, stage, format, asked, forked: taken, sealed: taken });
    machine.stream = Some(origin);
    machine.unread_since = now;
    // Its replicas come back as after a broken connection, and their servers may still read the memory.
    machine.lost.at = Some(now);
    machine.unfinished = true;
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::time::Duration;

    use super::super::{Action, Event, Report, Resume, Rules};
    use super::*;
    use crate::backoff::Backoff;
    use crate::source::gauge::Reading;

    const OFFSET: u64 = 10;

    /// A machine that goes on with a snapshot of that age, whose generation is above its own first one.
    fn machine(now: Instant, age: Duration) -> (Machine, Origin) {
        let rules = Rules {
            max_age: Duration::from_secs(60),
            max_replicas: 3,
            stall_limit: Duration::from_secs(60),
            fork_interval: Duration::ZERO,
            slot_bytes: 1 << 20,
            repeat_messages: Duration::ZERO,
        };
        let mut machine = Machine::new(now, rules, Backoff::seeded(1), 5, false);
        let history = "a".repeat(40).parse().unwrap();
        let origin = Origin { generation: 7, history, offset: OFFSET };
        go_on(&mut machine, now, origin, 1 << 30, Format::Shared, now.checked_sub(age).unwrap());
        (machine, origin)
    }

    fn join(machine: &mut Machine, now: Instant, resume: Option<Resume>) -> Vec<Action> {
        let reading = Reading { published: 9, journal_first: OFFSET + 1, journal_end: 500, ..Reading::default() };
        let (name, address) = ("r1".to_owned(), String::new());
        machine.apply(now, reading, Event::Joined { session: 1, name, address, resume, reads: Format::Own })
    }

    #[test]
    fn replicas_old_and_new_are_offered_the_snapshot_and_nothing_is_asked_of_the_primary() {
        let now = Instant::now() + Duration::from_secs(3600);
        let (mut machine, origin) = machine(now, Duration::from_secs(30));
        assert_eq!(machine.apply(now, Reading::default(), Event::Tick), []);
        assert_eq!(join(&mut machine, now, None), [Action::Offer { session: 1 }]);
        for loaded in [None, Some((origin.history, 400))] {
            let resume = Resume { generation: 7, held_slots: 4, loaded };
            assert_eq!(join(&mut machine, now, Some(resume)), [Action::Offer { session: 1 }], "{resume:?}");
        }
        assert_eq!(machine.status().replica(1).unwrap().at.slots_below, Report::NOTHING.slots_below + 4);
    }

    #[test]
    fn its_age_counts_on_and_the_next_snapshot_has_a_higher_number_and_other_memory() {
        let now = Instant::now() + Duration::from_secs(3600);
        let (mut machine, _) = machine(now, Duration::from_secs(61));
        let actions = join(&mut machine, now, None);
        assert!(actions.contains(&Action::RevokeSnapshot { generation: 7 }), "{actions:?}");
        let next = Action::Capture { generation: 8, with_stream: false, fresh: true };
        assert!(actions.contains(&next), "{actions:?}");
    }
}
