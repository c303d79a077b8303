//! Decides whether a key that looked different is different.
//!
//! ```text
//!   primary ── before ─────────────────── after ──▶ time          held = before, or held = after:    the same
//!                  └─ wait until the replica               before = after, and held is neither:   different
//!   replica           has caught up ── held ──▶            before ≠ after, and held is neither:   look again
//! ```
//!
//! If the replica had executed everything up to `before` when `held` was read, and the key did not change on the
//! primary from then on, the replica had to hold that value. If that is unknown (two servers that do not replicate),
//! the same must be found in every round.

use std::collections::BTreeSet;

use super::{
    look::{Look, look},
    pair::{CaughtUp, Pair, Side},
    report::{Difference, Kind, Report},
};
use crate::server::ServerError;

/// A key that looked different.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Suspect {
    pub(super) database: u32,
    pub(super) key: Vec<u8>,
}

/// Keys that are compared between two waits. With fewer there would be too many waits, with more a busy key would have
/// time to change.
const AT_ONCE: usize = 64;

/// With this many proven differences one round is enough for further ones: the servers differ, and it should not take
/// hours to count how much.
const MANY: u64 = 1000;

/// Compares the suspects up to `rounds` times, and reports those that differ and those that changed every time.
pub(super) async fn settle(
    pair: &mut Pair,
    suspects: Vec<Suspect>,
    rounds: u32,
    report: &mut Report,
) -> Result<(), ServerError> {
    // Sorted by database, and without keys that a scan returned twice.
    let mut open: BTreeSet<Suspect> = suspects.into_iter().collect();
    let rounds = if report.differences() > MANY { 1 } else { rounds };
    for round in 1..=rounds {
        let mut undecided = BTreeSet::new();
        for few in some_at_once(open) {
            undecided.extend(look_again(pair, few, round == rounds, report).await?);
        }
        open = undecided;
    }
    report.undecided += open.len() as u64;
    Ok(())
}

/// Cuts the suspects into pieces. All keys of a piece are in one database.
fn some_at_once(suspects: BTreeSet<Suspect>) -> Vec<Vec<Suspect>> {
    let mut pieces: Vec<Vec<Suspect>> = Vec::new();
    for suspect in suspects {
        match pieces.last_mut() {
            Some(piece)
                if piece.len() < AT_ONCE && piece.first().is_some_and(|first| first.database == suspect.database) =>
            {
                piece.push(suspect);
            }
            _ => pieces.push(vec![suspect]),
        }
    }
    pieces
}

/// One round for a few keys of one database. Returns those that are still undecided.
async fn look_again(
    pair: &mut Pair,
    suspects: Vec<Suspect>,
    last_round: bool,
    report: &mut Report,
) -> Result<Vec<Suspect>, ServerError> {
    let Some(database) = suspects.first().map(|suspect| suspect.database) else {
        return Ok(suspects);
    };
    pair.select(database).await?;
    let abilities = pair.abilities;
    let looks = async |side: &mut Side| -> Result<Vec<Look>, ServerError> {
        let mut looks = Vec::with_capacity(suspects.len());
        for suspect in &suspects {
            looks.push(look(side, abilities, &suspect.key).await?);
        }
        Ok(looks)
    };
    let before = looks(&mut pair.primary).await?;
    let caught_up = pair.catch_up().await?;
    let held = looks(&mut pair.replica).await?;
    let after = looks(&mut pair.primary).await?;
    let certain = caught_up == CaughtUp::Yes || last_round;
    let mut open = Vec::new();
    for (((suspect, before), held), after) in suspects.into_iter().zip(before).zip(held).zip(after) {
        match verdict(&before, &held, &after, certain) {
            Verdict::Same => {}
            Verdict::Different(kind) => {
                report.add(Difference::new(suspect.database, &suspect.key, kind, &before, &held))
            }
            Verdict::Open => open.push(suspect),
        }
    }
    Ok(open)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    Same,
    Different(Kind),
    Open,
}

fn verdict(before: &Look, held: &Look, after: &Look, certain: bool) -> Verdict {
    if held.agrees(before) || held.agrees(after) {
        return Verdict::Same;
    }
    if !certain || !before.agrees(after) {
        return Verdict::Open;
    }
    match (before, held) {
        (Look::Present { .. }, Look::Absent) => Verdict::Different(Kind::Missing),
        (Look::Absent, Look::Present { .. }) => Verdict::Different(Kind::Extra),
        (Look::Present { kind: one, .. }, Look::Present { kind: other, .. }) => Verdict::Different(match () {
            () if one != other => Kind::Type,
            () if !before.same_value(held) => Kind::Value,
            () => Kind::Expiry,
        }),
        _ => Verdict::Open,
    }
}

#[cfg(test)]
mod tests {
    use super::{
        super::look::{Consumers, Expiry},
        *,
    };

    fn present(kind: &str, content: u8, expiry: Expiry) -> Look {
        Look::Present { kind: kind.into(), content: [content; 32], consumers: Consumers::default(), expiry }
    }

    #[test]
    fn a_replica_that_holds_an_earlier_or_a_later_value_is_the_same() {
        let (old, new) = (present("string", 1, Expiry::Never), present("string", 2, Expiry::Never));
        assert_eq!(verdict(&old, &old, &new, true), Verdict::Same);
        assert_eq!(verdict(&old, &new, &new, true), Verdict::Same);
        assert_eq!(verdict(&new, &Look::Absent, &Look::Absent, true), Verdict::Same);
    }

    #[test]
    fn a_key_that_stood_still_while_the_replica_held_another_value_differs_by_its_kind() {
        let still = present("string", 1, Expiry::At(7));
        let table = [
            (Look::Absent, Kind::Missing),
            (present("list", 1, Expiry::At(7)), Kind::Type),
            (present("string", 2, Expiry::At(8)), Kind::Value),
            (present("string", 1, Expiry::At(8)), Kind::Expiry),
        ];
        for (held, kind) in table {
            assert_eq!(verdict(&still, &held, &still, true), Verdict::Different(kind));
            assert_eq!(verdict(&still, &held, &still, false), Verdict::Open);
        }
        assert_eq!(verdict(&Look::Absent, &still, &Look::Absent, true), Verdict::Different(Kind::Extra));
    }

    #[test]
    fn a_key_that_did_not_stand_still_stays_open() {
        let [one, two, three] = [1, 2, 3].map(|content| present("string", content, Expiry::Never));
        assert_eq!(verdict(&one, &two, &three, true), Verdict::Open);
        assert_eq!(verdict(&one, &Look::Changing, &one, true), Verdict::Open);
    }

    #[test]
    fn pieces_stay_within_a_database_and_a_limit() {
        let suspects = (0..150u8).map(|key| Suspect { database: u32::from(key / 100), key: vec![key] });
        let lengths: Vec<_> = some_at_once(suspects.collect()).iter().map(Vec::len).collect();
        assert_eq!(lengths, [64, 36, 50]);
    }
}
