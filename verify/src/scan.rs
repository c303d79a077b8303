//! Scans all keys of both servers, one group after the other.
//!
//! A group is as many keys as have 8 MiB of values together, by the servers' own estimate. So neither `verify` nor a
//! server's output buffer holds more at once. Values too large for a group are never read whole: [`look`] reads them in
//! pieces.

use std::collections::{BTreeMap, BTreeSet};
use std::mem;

use remora_redis::resp::Frame;

use super::look::{Expiry, Look, body_of_dump, look, scan_answer};
use super::pair::{Abilities, CaughtUp, Pair, Side};
use super::{Difference, Kind, Method, Report};
use remora_base::units::counted;
use remora_process::progress::Meter;
use remora_server::{Pipeline, ServerError};

/// Keys that one step of `SCAN` requests. A server returns them in well under a millisecond.
const SCAN_COUNT: &str = "1000";

/// Bytes of values in one group. Each server holds one group in its output buffer; `verify` holds one value of each
/// side.
const GROUP_BYTES: u64 = 8 << 20;

/// The types whose values `DEBUG DIGEST` covers completely, but for fields of hashes that expire. Of streams it covers
/// only the entries, and of a module's types what the module says, which may be nothing.
const COVERED_BY_DIGESTS: [&str; 6] = ["string", "list", "set", "zset", "hash", "none"];

/// Suspects that are held before they are settled. Their names are the only memory that grows with the differences.
const SUSPECTS: usize = 4096;

/// The scan of both servers.
pub(super) struct Scan<'a> {
    pair: &'a mut Pair,
    report: &'a mut Report,
    meter: &'a Meter,
    rounds: u32,
    suspects: Vec<Suspect>,
    pipeline: Pipeline,
    /// Cleared for good if a server does not allow `MEMORY USAGE`. All values are then read in pieces.
    sizes_known: bool,
}

impl<'a> Scan<'a> {
    pub(super) fn new(pair: &'a mut Pair, report: &'a mut Report, meter: &'a Meter, rounds: u32) -> Self {
        Self { pair, report, meter, rounds, suspects: Vec::new(), pipeline: Pipeline::default(), sizes_known: true }
    }

    /// Scans one database of both servers.
    pub(super) async fn database(&mut self, database: u32) -> Result<(), ServerError> {
        let (primary_has, replica_has) = self.pair.have(database).await?;
        if !primary_has || !replica_has {
            self.lacking(database, replica_has);
            return Ok(());
        }
        self.report.databases += 1;
        self.keys_of_primary(database).await?;
        if self.report.method == Method::Values {
            self.keys_only_on_replica(database).await?;
        }
        Ok(())
    }

    /// Notes that only one of the servers has that database: all its keys are at that one alone.
    fn lacking(&mut self, database: u32, is_at_the_replica: bool) {
        let Pair { primary, replica, .. } = &*self.pair;
        let (has, lacks) = if is_at_the_replica { (replica, primary) } else { (primary, replica) };
        let keys = has.keys_in(database);
        tracing::warn!(
            "{} has no database {database} (databases), in which {} has {}",
            lacks.url(),
            has.url(),
            counted(keys, "key")
        );
        let count = if is_at_the_replica { &mut self.report.extra } else { &mut self.report.missing };
        *count += keys;
        self.report.databases += 1;
        self.meter.add(keys);
    }

    /// Settles the remaining suspects.
    pub(super) async fn finish(mut self) -> Result<(), ServerError> {
        self.settle().await
    }

    async fn keys_of_primary(&mut self, database: u32) -> Result<(), ServerError> {
        let mut cursor = START.to_vec();
        loop {
            let (next, keys) = scan_step(&mut self.pair.primary, &cursor).await?;
            let found = keys.len() as u64;
            match self.report.method {
                Method::Digest => self.compare_what_digests_leave_out(database, keys).await?,
                Method::Values => self.compare_values(database, keys).await?,
            }
            self.report.keys += found;
            self.meter.add(found);
            self.settle_if_many(database).await?;
            if next == START {
                return Ok(());
            }
            cursor = next;
        }
    }

    async fn keys_only_on_replica(&mut self, database: u32) -> Result<(), ServerError> {
        let mut cursor = START.to_vec();
        loop {
            let (next, keys) = scan_step(&mut self.pair.replica, &cursor).await?;
            self.meter.add(keys.len() as u64);
            for key in &keys {
                self.pipeline.push::<&[u8]>(&[b"EXISTS", key]);
            }
            let answers = self.pair.primary.client.pipeline(&mut self.pipeline).await?;
            for (key, answer) in keys.into_iter().zip(&answers) {
                match answer.as_int() {
                    Some(0) => self.suspects.push(Suspect { database, key }),
                    Some(_) => {}
                    None => return Err(wrong(&self.pair.primary, "EXISTS", answer)),
                }
            }
            self.settle_if_many(database).await?;
            if next == START {
                return Ok(());
            }
            cursor = next;
        }
    }

    /// After equal digests: compares when keys expire, and the whole value of each type that digests do not cover.
    async fn compare_what_digests_leave_out(&mut self, database: u32, keys: Vec<Vec<u8>>) -> Result<(), ServerError> {
        // Digests cover the types, so that those of one server are those of both.
        for key in &keys {
            self.pipeline.push::<&[u8]>(&[b"TYPE", key]);
        }
        let types = self.pair.primary.client.pipeline(&mut self.pipeline).await?;
        let mut covered = Vec::new();
        let mut left_out = Vec::new();
        for (key, kind) in keys.into_iter().zip(&types) {
            if let Frame::Error(_) = kind {
                return Err(wrong(&self.pair.primary, "TYPE", kind));
            }
            let is_covered = kind.as_str().is_some_and(|kind| COVERED_BY_DIGESTS.contains(&kind));
            if is_covered { covered.push(key) } else { left_out.push(key) }
        }
        self.report.beyond_digests += left_out.len() as u64;
        self.compare_values(database, left_out).await?;
        self.compare_expiries(database, covered).await
    }

    async fn compare_expiries(&mut self, database: u32, keys: Vec<Vec<u8>>) -> Result<(), ServerError> {
        if !self.pair.expires_in(database) {
            return Ok(());
        }
        let abilities = self.pair.abilities;
        let command = Expiry::command(abilities).as_bytes();
        for key in &keys {
            self.pipeline.push(&[command, key]);
        }
        self.send_to_both().await?;
        for key in keys {
            let (one, other) = tokio::try_join!(
                receive_expiry(&mut self.pair.primary, abilities),
                receive_expiry(&mut self.pair.replica, abilities)
            )?;
            if !one.agrees(other) {
                self.suspects.push(Suspect { database, key });
            }
        }
        Ok(())
    }

    async fn compare_values(&mut self, database: u32, keys: Vec<Vec<u8>>) -> Result<(), ServerError> {
        let sizes = self.sizes(&keys).await?;
        let mut group = Vec::new();
        let mut bytes = 0u64;
        for (key, size) in keys.into_iter().zip(sizes) {
            if size > GROUP_BYTES {
                self.compare_in_pieces(database, key).await?;
                continue;
            }
            if bytes + size > GROUP_BYTES {
                self.compare_group(database, mem::take(&mut group)).await?;
                bytes = 0;
            }
            bytes += size;
            group.push(key);
        }
        self.compare_group(database, group).await
    }

    /// The larger of the numbers of bytes that a key takes on either side; more than a group if that is unknown.
    async fn sizes(&mut self, keys: &[Vec<u8>]) -> Result<Vec<u64>, ServerError> {
        if self.sizes_known {
            for key in keys {
                self.pipeline.push::<&[u8]>(&[b"MEMORY", b"USAGE", key]);
            }
            self.send_to_both().await?;
            let mut sizes = Vec::with_capacity(keys.len());
            for _ in keys {
                let Pair { primary, replica, .. } = &mut *self.pair;
                let (one, other) = tokio::try_join!(primary.client.receive(), replica.client.receive())?;
                self.sizes_known &= one.as_error().is_none() && other.as_error().is_none();
                sizes.push(size_of(&one).max(size_of(&other)));
            }
            if self.sizes_known {
                return Ok(sizes);
            }
        }
        Ok(vec![u64::MAX; keys.len()])
    }

    /// Reads the dumps of all keys of the group from both servers and compares them as they arrive. Then it compares by
    /// content those that differ.
    async fn compare_group(&mut self, database: u32, keys: Vec<Vec<u8>>) -> Result<(), ServerError> {
        let abilities = self.pair.abilities;
        for key in &keys {
            self.pipeline.push::<&[u8]>(&[b"DUMP", key]);
            self.pipeline.push(&[Expiry::command(abilities).as_bytes(), key]);
        }
        self.send_to_both().await?;
        let mut doubtful = Vec::new();
        for key in keys {
            let (one, other) = tokio::try_join!(
                receive_value(&mut self.pair.primary, abilities),
                receive_value(&mut self.pair.replica, abilities)
            )?;
            if !one.agrees(&other) {
                doubtful.push(key);
            }
        }
        for key in doubtful {
            self.compare_in_pieces(database, key).await?;
        }
        Ok(())
    }

    async fn compare_in_pieces(&mut self, database: u32, key: Vec<u8>) -> Result<(), ServerError> {
        let abilities = self.pair.abilities;
        let (one, other) = tokio::try_join!(
            look(&mut self.pair.primary, abilities, &key),
            look(&mut self.pair.replica, abilities, &key)
        )?;
        if !one.agrees(&other) {
            self.suspects.push(Suspect { database, key });
        }
        Ok(())
    }

    async fn send_to_both(&mut self) -> Result<(), ServerError> {
        let Pair { primary, replica, .. } = &mut *self.pair;
        let bytes = self.pipeline.as_bytes();
        tokio::try_join!(primary.client.send(bytes), replica.client.send(bytes))?;
        self.pipeline.clear();
        Ok(())
    }

    async fn settle_if_many(&mut self, database: u32) -> Result<(), ServerError> {
        if self.suspects.len() >= SUSPECTS {
            self.settle().await?;
            self.pair.select(database).await?;
        }
        Ok(())
    }

    async fn settle(&mut self) -> Result<(), ServerError> {
        settle(self.pair, mem::take(&mut self.suspects), self.rounds, self.report).await
    }
}

/// A key's dump and expiry, as received.
struct Value {
    dump: Option<Vec<u8>>,
    expiry: Expiry,
}

impl Value {
    /// Whether both are the same beyond doubt. Otherwise they may still be: dumps of the same value may differ.
    fn agrees(&self, other: &Self) -> bool {
        self.expiry.agrees(other.expiry) && self.body() == other.body()
    }

    fn body(&self) -> Option<&[u8]> {
        self.dump.as_deref().map(body_of_dump)
    }
}

async fn scan_step(side: &mut Side, cursor: &[u8]) -> Result<(Vec<u8>, Vec<Vec<u8>>), ServerError> {
    let answer = side.client.command(&[b"SCAN", cursor, b"COUNT", SCAN_COUNT.as_bytes()]).await?;
    let (next, keys) = scan_answer(answer).map_err(|other| side.client.unexpected("SCAN", &other))?;
    Ok((next, keys.into_iter().filter_map(|key| key.into_bytes().ok()).collect()))
}

async fn receive_value(side: &mut Side, abilities: Abilities) -> Result<Value, ServerError> {
    let dump = match side.client.receive().await? {
        Frame::Bulk(dump) => Some(dump),
        Frame::Null => None,
        other => return Err(wrong(side, "DUMP", &other)),
    };
    Ok(Value { dump, expiry: receive_expiry(side, abilities).await? })
}

async fn receive_expiry(side: &mut Side, abilities: Abilities) -> Result<Expiry, ServerError> {
    let answer = side.client.receive().await?;
    Expiry::of(&answer, abilities).ok_or_else(|| wrong(side, Expiry::command(abilities), &answer))
}

fn wrong(side: &Side, command: &str, answer: &Frame) -> ServerError {
    match answer.as_error() {
        Some(text) => side.client.refused(command, text),
        None => side.client.unexpected(command, answer),
    }
}

/// The answer to `MEMORY USAGE`; 0 for a key that does not exist.
fn size_of(answer: &Frame) -> u64 {
    answer.as_int().and_then(|bytes| u64::try_from(bytes).ok()).unwrap_or(0)
}

/// The cursor at which a scan begins, and which the server returns at its end.
const START: &[u8] = b"0";

// Decides whether a key that looked different is different.
//
// ```text
//   primary ── before ─────────────────── after ──▶ time          held = before, or held = after:    the same
//                  └─ wait until the replica               before = after, and held is neither:   different
//   replica           has caught up ── held ──▶            before ≠ after, and held is neither:   look again
// ```
//
// If the replica had executed everything up to `before` when `held` was read, and the key did not change on the
// primary from then on, the replica had to hold that value. If that is unknown (two servers that do not replicate),
// the key must look different in every round.
//
// That `before` and `after` are the same does not say that the key stood still: it may have been written, read at the
// replica, and removed. If the primary's offset says that nothing was written, it stood still. Otherwise two rounds in
// a row must find the same difference.

/// What the last round found of the keys that are open: at the primary, and at the replica.
type Found = BTreeMap<Suspect, (Look, Look)>;

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
    let mut earlier = Found::new();
    for round in 1..=rounds {
        let mut found = Found::new();
        for few in some_at_once(open) {
            let earlier = (rounds > 1).then_some(&earlier);
            found.append(&mut look_again(pair, few, earlier, round == rounds, report).await?);
        }
        open = found.keys().cloned().collect();
        earlier = found;
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

/// One round for a few keys of one database. Returns those that are still undecided, and what it found of them.
/// `earlier`: what the round before found. `None`: this is the only one.
async fn look_again(
    pair: &mut Pair,
    suspects: Vec<Suspect>,
    earlier: Option<&Found>,
    last_round: bool,
    report: &mut Report,
) -> Result<Found, ServerError> {
    let Some(database) = suspects.first().map(|suspect| suspect.database) else {
        return Ok(Found::new());
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
    let began = pair.primary.offset().await?;
    let before = looks(&mut pair.primary).await?;
    let caught_up = pair.catch_up().await?;
    let held = looks(&mut pair.replica).await?;
    let after = looks(&mut pair.primary).await?;
    let ended = pair.primary.offset().await?;
    let (had_all, stood_still) = (caught_up == CaughtUp::Yes || last_round, began.is_some() && began == ended);
    let mut open = Found::new();
    for (((suspect, before), held), after) in suspects.into_iter().zip(before).zip(held).zip(after) {
        let is_proven = stood_still || earlier.is_none_or(|found| is_again(found.get(&suspect), &before, &held));
        match verdict(&before, &held, &after, had_all && is_proven) {
            Verdict::Same => {}
            Verdict::Different(kind) => {
                report.add(Difference::new(suspect.database, &suspect.key, kind, &before, &held))
            }
            Verdict::Open => {
                open.insert(suspect, (before, held));
            }
        }
    }
    Ok(open)
}

/// Whether the round before found the same.
fn is_again(earlier: Option<&(Look, Look)>, before: &Look, held: &Look) -> bool {
    earlier.is_some_and(|(then, held_then)| then.agrees(before) && held_then.agrees(held))
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
    use super::super::look::{Consumers, Expiry};
    use super::*;

    fn value(dump: Option<&[u8]>, expiry: Expiry) -> Value {
        Value { dump: dump.map(<[u8]>::to_vec), expiry }
    }

    #[test]
    fn dumps_that_differ_only_in_their_foot_are_the_same() {
        let one = value(Some(b"\x00\x03abc\x0a\x00CHECKSUM"), Expiry::Never);
        let other = value(Some(b"\x00\x03abc\x50\x00checksum"), Expiry::Never);
        assert!(one.agrees(&other));
    }

    #[test]
    fn another_expiry_or_a_missing_key_is_not_the_same() {
        let dump: Option<&[u8]> = Some(b"\x00\x03abc\x0a\x00CHECKSUM");
        assert!(!value(dump, Expiry::Never).agrees(&value(dump, Expiry::At(5))));
        assert!(!value(dump, Expiry::Never).agrees(&value(None, Expiry::NoKey)));
        assert!(value(None, Expiry::NoKey).agrees(&value(None, Expiry::NoKey)));
    }

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
    fn what_was_written_and_removed_between_two_looks_is_no_difference_that_was_found_again() {
        let [one, other] = [7, 8].map(|at| present("string", 1, Expiry::At(at)));
        let found = |held: &Look| Some((Look::Absent, held.clone()));
        assert!(!is_again(None, &Look::Absent, &one), "the first round");
        assert!(!is_again(found(&other).as_ref(), &Look::Absent, &one), "it was written twice");
        assert!(!is_again(found(&one).as_ref(), &other, &one), "the primary has another now");
        assert!(is_again(found(&one).as_ref(), &Look::Absent, &one));
        assert_eq!(verdict(&Look::Absent, &one, &Look::Absent, false), Verdict::Open);
    }

    #[test]
    fn pieces_stay_within_a_database_and_a_limit() {
        let suspects = (0..150u8).map(|key| Suspect { database: u32::from(key / 100), key: vec![key] });
        let lengths: Vec<_> = some_at_once(suspects.collect()).iter().map(Vec::len).collect();
        assert_eq!(lengths, [64, 36, 50]);
    }
}
