//! Bases: from what the next snapshot is made, of all that there is. Pure: no I/O, no clock.
//!
//! ```text
//!   the source's snapshot ─▶ a copy of another source's ─▶ a backup, a file ─▶ a sweep ─▶ a fork of the server
//!     costs nothing           the stream behind it           the same           time       memory too
//! ```
//!
//! Of backups and files the one with the least of the stream behind it comes first. A base serves if its history is
//! that of the server, if the server has all of the stream behind it, or behind the commands that are stored with it,
//! and if the journal holds that.
//!
//! A capture tries them in this order, and a dry run and the status say the first of them: there is one function,
//! [`order`].

use std::time::Duration;

use remora_base::units::{Size, readable};
use remora_protocol::{Base, BaseKind};
use remora_redis::ReplId;
use remora_server::Facts;

/// What is known of one way to a base.
#[derive(Clone, Debug)]
pub(crate) struct Candidate {
    /// Which way it is.
    pub(crate) kind: BaseKind,
    /// Where it is, for people; empty if the kind says that.
    pub(crate) place: String,
    /// What is known of its data.
    pub(crate) known: Known,
}

/// What is known of the data of a base.
#[derive(Clone, Debug)]
pub(crate) enum Known {
    /// They are taken when they are wanted.
    New,
    /// They are there.
    There(Data),
    /// They cannot be used, and why.
    Unusable(String),
}

/// Data that are there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Data {
    /// The history that they belong to.
    pub(crate) history: ReplId,
    /// The last byte of the stream that they hold.
    pub(crate) offset: u64,
    /// The last byte of the stream that is stored with them; [`Data::offset`] where none is.
    pub(crate) reaches: u64,
    /// How long ago they were the server's.
    pub(crate) age: Duration,
}

/// What the order depends on beside the candidates.
#[derive(Clone, Copy, Debug)]
pub(crate) struct World<'a> {
    /// What the server says of itself: its history, and its backlog.
    pub(crate) facts: &'a Facts,
    /// The stream that the source follows already: its history, and the first and last byte in the journal.
    pub(crate) journal: Option<(ReplId, u64, u64)>,
    /// Bytes of the stream that the journal can hold.
    pub(crate) journal_bytes: u64,
    /// A snapshot of the source that is older is not given to those who join.
    pub(crate) max_age: Duration,
    /// The server must not fork.
    pub(crate) no_fork: bool,
}

/// The candidates that serve, the best one first.
#[derive(Clone, Debug, Default)]
pub(crate) struct Order {
    /// Each with its place among the candidates.
    pub(crate) serve: Vec<Serves>,
    /// What does not serve, and why: a place among the candidates, and a sentence.
    pub(crate) passed_over: Vec<(usize, String)>,
}

/// A candidate that serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Serves {
    /// Its place among the candidates.
    pub(crate) candidate: usize,
    /// Bytes of the stream behind it.
    pub(crate) behind: u64,
    /// The server does not have all of them: the first ones are stored with it.
    pub(crate) with_commands: bool,
}

/// Puts the candidates in the order in which they are tried.
pub(crate) fn order(candidates: &[Candidate], world: &World<'_>) -> Order {
    let mut order = Order::default();
    for (number, candidate) in candidates.iter().enumerate() {
        match world.behind(candidate) {
            Ok((behind, with_commands)) => order.serve.push(Serves { candidate: number, behind, with_commands }),
            Err(why) => order.passed_over.push((number, format!("{}: {why}", candidate.name()))),
        }
    }
    // In the order in which they were named, where nothing else tells them apart.
    order.serve.sort_by_key(|serves| (candidates.get(serves.candidate).map(Candidate::class), serves.behind));
    order
}

impl World<'_> {
    /// How much of the stream is behind the candidate, and whether its commands are needed for that.
    ///
    /// # Errors
    /// It does not serve, and why.
    fn behind(&self, candidate: &Candidate) -> Result<(u64, bool), String> {
        let data = match &candidate.known {
            Known::Unusable(why) => return Err(why.clone()),
            Known::New if candidate.kind == BaseKind::Fork && self.no_fork => {
                return Err("the server must not fork (--no-fork)".to_owned());
            }
            Known::New => return Ok((0, false)),
            Known::There(data) => data,
        };
        if candidate.kind == BaseKind::Snapshot && data.age > self.max_age {
            let [age, most] = [data.age, self.max_age].map(readable);
            return Err(format!("{age} old, and {most} is the most (--max-age)"));
        }
        let mut with_commands = false;
        let end = match self.journal {
            // The stream that is followed serves for a snapshot that begins within it.
            Some((history, first, end)) => {
                if history != data.history {
                    return Err("it belongs to another history than the stream that is followed".to_owned());
                }
                if first > data.offset.saturating_add(1) {
                    return Err("the journal does not reach back to it".to_owned());
                }
                if data.offset > end {
                    return Err("it is ahead of the stream that is followed".to_owned());
                }
                end
            }
            None => {
                if let Err(why) = self.facts.covers(data.history, data.offset, 0) {
                    if data.reaches <= data.offset || self.facts.covers(data.history, data.reaches, 0).is_err() {
                        return Err(why);
                    }
                    with_commands = true;
                }
                self.facts.offset.unwrap_or(data.offset)
            }
        };
        let behind = end.saturating_sub(data.offset);
        match behind <= self.journal_bytes {
            true => Ok((behind, with_commands)),
            false => Err(format!(
                "{} of the stream are behind it, and the journal holds {} (--journal-memory)",
                Size::bytes(behind),
                Size::bytes(self.journal_bytes)
            )),
        }
    }
}

impl Candidate {
    /// A base of which nothing is there before it is wanted.
    pub(crate) fn new(kind: BaseKind) -> Candidate {
        Candidate { kind, place: String::new(), known: Known::New }
    }

    /// What it is, for people.
    pub(crate) fn name(&self) -> &str {
        match self.kind {
            _ if !self.place.is_empty() => &self.place,
            kind => kind.words(),
        }
    }

    /// Its place in the order.
    fn class(&self) -> u8 {
        match self.kind {
            BaseKind::Snapshot => 0,
            BaseKind::Copy => 1,
            BaseKind::Backup | BaseKind::File => 2,
            BaseKind::Sweep => 3,
            BaseKind::Fork => 4,
            BaseKind::None => 5,
        }
    }

    /// How old its data are.
    pub(crate) fn age(&self) -> Duration {
        match &self.known {
            Known::There(data) => data.age,
            Known::New | Known::Unusable(_) => Duration::ZERO,
        }
    }
}

impl Order {
    /// The first base of these candidates, in the words of a report.
    pub(crate) fn told(&self, candidates: &[Candidate]) -> Base {
        let why: Vec<&str> = self.passed_over.iter().map(|(_, why)| why.as_str()).collect();
        let passed_over = why.join("; ");
        let first = self.serve.first().and_then(|serves| Some((serves, candidates.get(serves.candidate)?)));
        match first {
            None => Base { passed_over, ..Base::default() },
            Some((serves, candidate)) => Base {
                kind: candidate.kind,
                place: candidate.place.clone(),
                age_seconds: candidate.age().as_secs(),
                stream_bytes: serves.behind,
                passed_over,
            },
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use proptest::prelude::*;
    use remora_server::Backlog;

    use super::*;

    const HOUR: Duration = Duration::from_secs(3600);

    fn replid(digit: char) -> ReplId {
        digit.to_string().repeat(40).parse().unwrap()
    }

    /// A server with the history `a` at offset 1000, whose backlog keeps what follows offset 500.
    fn facts() -> Facts {
        let backlog = Backlog { active: true, size: 500, first: 501, held: 500 };
        Facts { replid: Some(replid('a')), offset: Some(1000), backlog: Some(backlog), ..Facts::default() }
    }

    fn world(facts: &Facts) -> World<'_> {
        World { facts, journal: None, journal_bytes: 10_000, max_age: HOUR, no_fork: false }
    }

    fn there(kind: BaseKind, place: &str, offset: u64) -> Candidate {
        let data = Data { history: replid('a'), offset, reaches: offset, age: HOUR * 3 };
        Candidate { kind, place: place.into(), known: Known::There(data) }
    }

    fn all() -> Vec<Candidate> {
        vec![
            Candidate::new(BaseKind::Fork),
            Candidate::new(BaseKind::Sweep),
            there(BaseKind::File, "old.rdb", 400),
            there(BaseKind::File, "dump.rdb", 600),
            there(BaseKind::Backup, "s3://b", 550),
            Candidate::new(BaseKind::Copy),
        ]
    }

    fn kinds(order: &Order, candidates: &[Candidate]) -> Vec<(BaseKind, u64)> {
        order.serve.iter().map(|serves| (candidates[serves.candidate].kind, serves.behind)).collect()
    }

    #[test]
    fn each_way_has_its_place_and_a_reason() {
        use BaseKind::{Backup, Copy, File, Fork, Sweep};
        let (facts, candidates) = (facts(), all());
        let found = order(&candidates, &world(&facts));
        assert_eq!(kinds(&found, &candidates), [(Copy, 0), (File, 400), (Backup, 450), (Sweep, 0), (Fork, 0)]);
        let [(2, why)] = &found.passed_over[..] else { panic!("{found:?}") };
        assert!(why.starts_with("old.rdb: ") && why.contains("backlog"), "{why}");

        // What a table of cases leaves of them.
        let cases: [(&str, World<'_>, &[BaseKind]); 4] = [
            ("no fork", World { no_fork: true, ..world(&facts) }, &[Copy, File, Backup, Sweep]),
            ("a small journal", World { journal_bytes: 420, ..world(&facts) }, &[Copy, File, Sweep, Fork]),
            (
                "a stream that is followed",
                World { journal: Some((replid('a'), 350, 1100)), ..world(&facts) },
                &[Copy, File, Backup, File, Sweep, Fork],
            ),
            (
                "a stream of another history",
                World { journal: Some((replid('b'), 1, 1100)), ..world(&facts) },
                &[Copy, Sweep, Fork],
            ),
        ];
        for (what, world, expected) in cases {
            let found = order(&candidates, &world);
            let kinds: Vec<_> = kinds(&found, &candidates).into_iter().map(|(kind, _)| kind).collect();
            assert_eq!(kinds, expected, "{what}: {found:?}");
        }
    }

    #[test]
    fn the_snapshot_that_is_there_comes_first_unless_it_is_too_old() {
        let facts = facts();
        let held = |age| {
            let data = Data { history: replid('a'), offset: 700, reaches: 700, age };
            Candidate { kind: BaseKind::Snapshot, place: String::new(), known: Known::There(data) }
        };
        let world = World { journal: Some((replid('a'), 701, 1000)), ..world(&facts) };
        let candidates = [Candidate::new(BaseKind::Fork), held(HOUR)];
        let told = order(&candidates, &world).told(&candidates);
        assert_eq!((told.kind, told.age_seconds, told.stream_bytes), (BaseKind::Snapshot, 3600, 300));
        let candidates = [Candidate::new(BaseKind::Fork), held(HOUR + Duration::from_secs(1))];
        let told = order(&candidates, &world).told(&candidates);
        assert!(told.kind == BaseKind::Fork && told.passed_over.contains("--max-age"), "{told:?}");
    }

    #[test]
    fn a_base_of_a_former_history_serves_to_the_end_of_that() {
        let facts = Facts { former: Some((replid('b'), 801)), ..facts() };
        for (offset, serves) in [(800, true), (801, false)] {
            let data = Data { history: replid('b'), offset, reaches: offset, age: HOUR };
            let candidate = Candidate { kind: BaseKind::File, place: "f".into(), known: Known::There(data) };
            assert_eq!(!order(&[candidate], &world(&facts)).serve.is_empty(), serves, "{offset}");
        }
    }

    #[test]
    fn the_commands_of_a_backup_are_taken_where_the_server_lacks_what_is_behind_its_snapshot() {
        let facts = facts();
        let stored = |offset, reaches| {
            let data = Data { history: replid('a'), offset, reaches, age: HOUR };
            Candidate { kind: BaseKind::Backup, place: "b".into(), known: Known::There(data) }
        };
        // The backlog keeps what follows offset 500.
        for (offset, reaches, expected) in [
            (500, 900, Some((500, false))),
            (499, 900, Some((501, true))),
            (100, 500, Some((900, true))),
            (100, 499, None),
            (100, 100, None),
            (100, 1001, None),
        ] {
            let found = order(&[stored(offset, reaches)], &world(&facts));
            let serves = found.serve.first().map(|serves| (serves.behind, serves.with_commands));
            assert_eq!(serves, expected, "{offset} to {reaches}: {found:?}");
        }
        // All of it must find room, and a stream that is followed is never given its beginning later.
        let small = World { journal_bytes: 800, ..world(&facts) };
        assert!(order(&[stored(100, 900)], &small).serve.is_empty());
        let follows = World { journal: Some((replid('a'), 501, 1000)), ..world(&facts) };
        assert!(order(&[stored(100, 900)], &follows).serve.is_empty());
    }

    #[test]
    fn nothing_that_serves_is_said_with_its_reasons() {
        let facts = facts();
        let candidates = [Candidate::new(BaseKind::Fork), there(BaseKind::File, "f.rdb", 1)];
        let told = order(&candidates, &World { no_fork: true, ..world(&facts) }).told(&candidates);
        assert_eq!(told.kind, BaseKind::None);
        assert!(told.passed_over.contains("--no-fork") && told.passed_over.contains("f.rdb"), "{told:?}");
    }

    fn candidates() -> impl Strategy<Value = Candidate> {
        let kinds = prop_oneof![
            Just(BaseKind::Snapshot),
            Just(BaseKind::Copy),
            Just(BaseKind::Backup),
            Just(BaseKind::File),
            Just(BaseKind::Sweep),
            Just(BaseKind::Fork),
        ];
        let offsets = || prop_oneof![0..2000_u64, Just(u64::MAX)];
        (kinds, 0..4_u8, prop_oneof![Just('a'), Just('b'), Just('c')], offsets(), 0..7200_u64).prop_map(
            |(kind, known, digit, offset, age)| {
                let known = match known {
                    0 => Known::New,
                    1 => Known::Unusable("broken".into()),
                    _ => {
                        let (history, age) = (replid(digit), Duration::from_secs(age));
                        let reaches = offset.saturating_add(if known == 2 { 0 } else { 400 });
                        Known::There(Data { history, offset, reaches, age })
                    }
                };
                Candidate { kind, place: String::new(), known }
            },
        )
    }

    proptest! {
        #[test]
        fn whatever_there_is_each_is_chosen_or_passed_over_and_the_best_comes_first(
            candidates in prop::collection::vec(candidates(), 0..8),
            follows in any::<bool>(),
            no_fork in any::<bool>(),
            journal_bytes in 0..2000_u64,
        ) {
            let facts = Facts { former: Some((replid('b'), 801)), ..facts() };
            let journal = follows.then(|| (replid('a'), 600, 1100));
            let world = World { journal, journal_bytes, no_fork, ..world(&facts) };
            let found = order(&candidates, &world);
            let mut seen: Vec<usize> = found.serve.iter().map(|serves| serves.candidate).collect();
            seen.extend(found.passed_over.iter().map(|(number, _)| *number));
            seen.sort_unstable();
            prop_assert_eq!(seen, (0..candidates.len()).collect::<Vec<_>>());
            let keys: Vec<_> = found.serve.iter().map(|at| (candidates[at.candidate].class(), at.behind)).collect();
            prop_assert!(keys.is_sorted(), "{keys:?}");
            for serves in &found.serve {
                let candidate = &candidates[serves.candidate];
                match &candidate.known {
                    Known::Unusable(_) => prop_assert!(false, "it cannot be used"),
                    Known::New => prop_assert!(!(no_fork && candidate.kind == BaseKind::Fork)),
                    Known::There(data) => {
                        prop_assert!(serves.behind <= journal_bytes);
                        // Every byte behind the data is in the journal, or is the server's to send.
                        match journal {
                            Some((history, first, end)) => {
                                prop_assert!(history == data.history && (first - 1..=end).contains(&data.offset));
                            }
                            None => {
                                let from = if serves.with_commands { data.reaches } else { data.offset };
                                prop_assert!(facts.covers(data.history, from, 0).is_ok());
                            }
                        }
                    }
                }
            }
            // The order in which they are named changes nothing but the choice between equals.
            let mut reversed = candidates.clone();
            reversed.reverse();
            let other = order(&reversed, &world);
            let of = |order: &Order, all: &[Candidate]| -> Vec<(u8, u64)> {
                order.serve.iter().map(|at| (all[at.candidate].class(), at.behind)).collect()
            };
            prop_assert_eq!(of(&found, &candidates), of(&other, &reversed));
            let told = found.told(&candidates);
            prop_assert_eq!(told.kind == BaseKind::None, found.serve.is_empty());
        }
    }
}
