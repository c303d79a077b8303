//! Commands: what each one that can stand in a replication stream acts on, where its keys are, and which servers have
//! it.
//!
//! ```text
//!   COMMAND of the real servers ──cargo xtask commands──▶ table.rs ──▶ find("SET")    what is it, which release has it
//!                                     ▲                            └─▶ Effect         may it be applied late?
//!                                     ╰── the effect of a new command is decided by a person (--decide)
//! ```
//!
//! - [`Command`]: a row of the table. **Start here.** [`TABLE`]: all of them. [`find`]: one of them, by its name.
//! - [`Effect`]: what a command acts on, besides the data set. Most commands act on nothing else: they make the same of
//!   the same data whenever they are run.
//! - [`Expiry`]: where a command has a time that counts from the moment at which it is run.
//! - [`Key`]: where the keys of a command are.
//! - [`Release`], [`Releases`]: a version of a server, and those that have a command.
//!
//! Commands of modules are not in the table. They are taken to act on the data set alone.

mod table;

use std::fmt;
use std::sync::LazyLock;

use crate::info;

pub use table::{RELEASES, TABLE};

/// A command, or a subcommand of one.
#[derive(Clone, Copy, Debug)]
pub struct Command {
    /// Its name, in lower case; that of a subcommand as `xgroup|create`.
    pub name: &'static str,
    /// Number of arguments with the name; negative: at least so many. That of the newest server which has the command.
    pub arity: i8,
    /// Whether a server flags it as one that writes.
    pub writes: bool,
    /// What it acts on.
    pub effect: Effect,
    /// Where its keys are.
    pub keys: &'static [Key],
    /// The servers that have it.
    pub releases: Releases,
}

/// What a command acts on when a replica runs it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// The data set (functions belong to it). Of the same data it makes the same at any time.
    Data,
    /// The data set and, with some arguments, the time: keys expire a while after the moment at which it is run.
    Expiry(Expiry),
    /// The same for fields of a hash.
    FieldExpiry(Expiry),
    /// It runs a script, which may have any effect.
    Script,
    /// The cache of scripts, which is not replicated any more since Redis 7.0.
    ScriptCache,
    /// The map of the cluster: which node has which slots.
    Cluster,
    /// Clients that have subscribed to a channel.
    Publish,
    /// The link between a primary and its replicas.
    Link,
    /// The meaning of the commands behind it: database and transaction.
    Frame,
}

/// Why a command must not be applied late.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Late {
    /// Subscribers would get a message again.
    Message,
    /// Data, or the cluster's map, would differ from the primary's.
    State,
}

impl Effect {
    /// Why a command with this effect must not be applied late; `None` if it may. `is_relative`: whether its arguments
    /// have a time that counts from the moment at which it is run.
    pub fn late(self, is_relative: bool) -> Option<Late> {
        match self {
            Effect::Expiry(_) | Effect::FieldExpiry(_) => is_relative.then_some(Late::State),
            Effect::Script | Effect::Cluster => Some(Late::State),
            Effect::Publish => Some(Late::Message),
            Effect::Data | Effect::ScriptCache | Effect::Link | Effect::Frame => None,
        }
    }

    /// Whether a backup of the data set needs it. The cluster's map is not restored: the node would take the place that
    /// another one has now.
    pub fn is_for_backups(self) -> bool {
        !matches!(self, Effect::Cluster | Effect::Publish | Effect::Link)
    }
}

/// A version of a server, as `Redis 6.2`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Release {
    /// `Redis` or `Valkey`.
    pub family: &'static str,
    /// Its first number.
    pub major: u32,
    /// Its second number.
    pub minor: u32,
}

impl fmt::Display for Release {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}.{}", self.family, self.major, self.minor)
    }
}

/// Some of [`RELEASES`]: one bit for each, the first one the lowest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Releases(pub u32);

impl Releases {
    /// Whether this one is among them. `None`: the table does not know it.
    pub fn has(self, release: Release) -> Option<bool> {
        let at = RELEASES.iter().position(|known| *known == release)?;
        Some(self.0 >> at & 1 == 1)
    }

    /// Those that are among them.
    pub fn iter(self) -> impl Iterator<Item = Release> {
        (0..).zip(RELEASES).filter(move |(at, _): &(u32, _)| self.0 >> at & 1 == 1).map(|(_, release)| *release)
    }
}

/// The command of this name, in any case; that of a subcommand as `xgroup|create`. `None`: the table has none.
pub fn find(name: &[u8]) -> Option<&'static Command> {
    let mut at = hash(name);
    loop {
        match INDEX[at % PLACES] {
            0 => return None,
            row => {
                let command = TABLE.get(usize::from(row) - 1)?;
                if command.name.len() == name.len() && command.name.as_bytes().eq_ignore_ascii_case(name) {
                    return Some(command);
                }
            }
        }
        at += 1;
    }
}

/// Whether the table has subcommands of this name, in any case.
pub fn has_subcommands(name: &[u8]) -> bool {
    const CONTAINERS: [&str; 4] = ["cluster", "function", "script", "xgroup"];
    CONTAINERS.iter().any(|known| known.len() == name.len() && known.as_bytes().eq_ignore_ascii_case(name))
}

/// Longest name of a command in the table, and of one with a subcommand.
pub const NAME_BYTES_MAX: usize = 24;

/// Places of the index: more than twice the rows, so that a look finds its row within one or two.
const PLACES: usize = 512;

/// For each place 0, or the number of a row, from 1 on.
static INDEX: LazyLock<[u8; PLACES]> = LazyLock::new(|| {
    let mut index = [0; PLACES];
    for (row, command) in (1..=u8::MAX).zip(TABLE) {
        let mut at = hash(command.name.as_bytes());
        while index[at % PLACES] != 0 {
            at += 1;
        }
        index[at % PLACES] = row;
    }
    index
});

/// FNV-1a of the name in lower case.
fn hash(name: &[u8]) -> usize {
    let folded = |hash: u32, byte: &u8| (hash ^ u32::from(byte.to_ascii_lowercase())).wrapping_mul(0x0100_0193);
    name.iter().fold(0x811C_9DC5_u32, folded) as usize >> 4
}

// Times that count from the moment at which a command is run.

/// Where a command has such a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Expiry {
    /// Always: it is this argument.
    At(u8, Unit),
    /// If it has the word `EX` or `PX`, from this argument on: the next one is the time.
    Options(u8),
    /// The same, behind as many pairs of key and value as argument 1 says.
    OptionsBehindPairs,
    /// `RESTORE`: argument 2, if it is not 0 and the word `ABSTTL` does not follow.
    Restore,
}

/// The unit of a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// Seconds.
    Seconds,
    /// Milliseconds.
    Milliseconds,
}

/// A time that counts from the moment at which the command is run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Time {
    /// The time in milliseconds. `None`: the argument is not a number.
    pub milliseconds: Option<i64>,
}

/// Looks for such a time while the arguments of a command arrive, and holds none of them.
#[derive(Clone, Copy, Debug)]
pub struct Times {
    form: Expiry,
    found: Option<Time>,
    next: Next,
}

/// What the next argument that is looked at is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Next {
    /// A word, from this argument on.
    Word(u64),
    /// A time.
    Time(Unit),
    /// An argument of the word before.
    Skipped,
    /// Nothing more has to be looked at.
    Nothing,
}

/// Where `RESTORE` has its first word.
const RESTORE_WORDS: u64 = 4;

impl Times {
    /// For a command of this form.
    pub fn new(form: Expiry) -> Times {
        let next = match form {
            Expiry::At(..) | Expiry::Restore => Next::Word(RESTORE_WORDS),
            Expiry::Options(from) => Next::Word(u64::from(from)),
            Expiry::OptionsBehindPairs => Next::Nothing,
        };
        Times { form, found: None, next }
    }

    /// Whether it has to see this argument, if it is short: at most [`crate::aof::SHORT_BYTES_MAX`] bytes.
    pub fn looks_at(&self, argument: u64) -> bool {
        match self.form {
            Expiry::At(at, _) => argument == u64::from(at),
            Expiry::Restore => argument == 2 || (argument >= RESTORE_WORDS && self.found.is_some()),
            Expiry::OptionsBehindPairs if argument == 1 => true,
            Expiry::Options(_) | Expiry::OptionsBehindPairs => match self.next {
                Next::Word(from) => argument >= from,
                Next::Time(_) | Next::Skipped => true,
                Next::Nothing => false,
            },
        }
    }

    /// Takes an argument that it has to see. `None`: it is too long to be a word or a time.
    pub fn take(&mut self, argument: u64, value: Option<&[u8]>) {
        match self.form {
            Expiry::At(_, unit) => self.found = Some(time(value, unit)),
            Expiry::Restore if argument == 2 => {
                self.found = Some(time(value, Unit::Milliseconds)).filter(|time| time.milliseconds != Some(0));
            }
            Expiry::Restore => {
                if is(value, "ABSTTL") {
                    self.found = None;
                }
            }
            Expiry::OptionsBehindPairs if argument == 1 => {
                let pairs = value.and_then(info::decimal_u64).filter(|pairs| *pairs <= i32::MAX as u64);
                self.next = pairs.map_or(Next::Nothing, |pairs| Next::Word(2 + 2 * pairs));
            }
            Expiry::Options(_) | Expiry::OptionsBehindPairs => self.option(argument, value),
        }
    }

    fn option(&mut self, argument: u64, value: Option<&[u8]>) {
        let words = Next::Word(argument + 1);
        self.next = match self.next {
            Next::Time(unit) => {
                self.found = Some(time(value, unit));
                words
            }
            Next::Skipped => words,
            Next::Nothing => Next::Nothing,
            Next::Word(_) if is(value, "EX") => Next::Time(Unit::Seconds),
            Next::Word(_) if is(value, "PX") => Next::Time(Unit::Milliseconds),
            // What follows is not a word, whatever stands there.
            Next::Word(_) if ["EXAT", "PXAT", "IFEQ", "IFNE", "IFDEQ", "IFDNE"].iter().any(|word| is(value, word)) => {
                Next::Skipped
            }
            // Fields and their values.
            Next::Word(_) if is(value, "FIELDS") => Next::Nothing,
            Next::Word(_) => words,
        };
    }

    /// The time that was found, once all arguments are there.
    pub fn found(&self) -> Option<Time> {
        self.found
    }
}

fn is(value: Option<&[u8]>, word: &str) -> bool {
    value.is_some_and(|value| value.eq_ignore_ascii_case(word.as_bytes()))
}

fn time(value: Option<&[u8]>, unit: Unit) -> Time {
    let number = value.and_then(|value| std::str::from_utf8(value).ok()).and_then(|text| text.parse::<i64>().ok());
    let scale = if unit == Unit::Seconds { 1000 } else { 1 };
    Time { milliseconds: number.and_then(|number| number.checked_mul(scale)) }
}

// Where the keys of a command are, as the servers tell it (key specifications).

/// Keys of a command, of one kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Key {
    /// What becomes of their values.
    pub access: Access,
    /// Where to begin.
    pub begin: Begin,
    /// Which arguments they are from there on.
    pub find: Find,
    /// They are names of something else, as a shard's channel is.
    pub is_not_key: bool,
    /// Not all keys are found so.
    pub is_incomplete: bool,
}

/// What becomes of the value of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// It is read.
    Read,
    /// It is changed: what becomes of it depends on what it was.
    Change,
    /// It is overwritten: what it was plays no part.
    Overwrite,
    /// It is removed.
    Remove,
    /// The server does not say.
    Unsaid,
}

/// Where a search begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Begin {
    /// At this argument; the name is argument 0.
    At(u8),
    /// Behind this word, which is searched from this argument on; from the end, if it is negative.
    Behind(&'static str, i8),
    /// The server does not say.
    Anywhere,
}

/// Which arguments are keys, from the beginning on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Find {
    /// Every `step`th up to `last`, which counts from the beginning; from the end of the command, if it is negative.
    Range {
        /// The last one.
        last: i8,
        /// From one key to the next.
        step: u8,
        /// 0, or the part of the rest that has keys: a half for 2.
        limit: u8,
    },
    /// As many as an argument says.
    Counted {
        /// This argument, which counts from the beginning.
        number: u8,
        /// The first key, which counts from the beginning too.
        first: u8,
        /// From one key to the next.
        step: u8,
    },
    /// The server does not say.
    Anything,
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn every_row_is_found_by_its_name_in_any_case() {
        assert!(TABLE.len() * 2 < PLACES && TABLE.len() < usize::from(u8::MAX));
        for (row, command) in TABLE.iter().enumerate() {
            let found = find(command.name.to_ascii_uppercase().as_bytes()).unwrap();
            assert_eq!(found.name, command.name, "row {row}");
            assert!(command.name.len() <= NAME_BYTES_MAX, "{}", command.name);
            assert_ne!(command.releases, Releases(0), "{}", command.name);
            if let Some((container, _)) = command.name.split_once('|') {
                assert!(has_subcommands(container.as_bytes()), "{container}");
            }
        }
        assert!(TABLE.is_sorted_by_key(|command| command.name));
        for unknown in [&b""[..], b"bf.add", b"SETX", b"SE", &[0xFF; 300]] {
            assert!(find(unknown).is_none(), "{unknown:?}");
        }
    }

    #[test]
    fn what_acts_on_more_than_data_is_told_apart() {
        let late = |name: &str, is_relative| find(name.as_bytes()).unwrap().effect.late(is_relative);
        for name in ["set", "getex", "restore", "restore-asking", "hsetex", "msetex", "expire", "psetex", "hpexpire"] {
            assert_eq!((late(name, true), late(name, false)), (Some(Late::State), None), "{name}");
        }
        for name in ["cluster|setslot", "cluster|syncslots", "eval", "evalsha"] {
            assert_eq!(late(name, false), Some(Late::State), "{name}");
        }
        assert_eq!((late("publish", false), late("spublish", false)), (Some(Late::Message), Some(Late::Message)));
        for name in ["cluster|flushslot", "pexpireat", "xclaim", "function|load", "multi", "select", "ping", "del"] {
            assert_eq!(late(name, false), None, "{name}");
        }
        for (name, wanted) in
            [("cluster|flushslot", true), ("cluster|setslot", false), ("publish", false), ("eval", true)]
        {
            assert_eq!(find(name.as_bytes()).unwrap().effect.is_for_backups(), wanted, "{name}");
        }
    }

    #[test]
    fn the_releases_of_a_command_are_known() {
        let of = |name: &str| find(name.as_bytes()).unwrap().releases;
        let release = |family, major, minor| Release { family, major, minor };
        assert_eq!(of("delifeq").has(release("Valkey", 9, 1)), Some(true));
        assert_eq!(of("delifeq").has(release("Redis", 8, 2)), Some(false));
        assert_eq!(of("delifeq").has(release("Redis", 5, 0)), None);
        assert_eq!(of("set").iter().count(), RELEASES.len());
        assert_eq!(of("vadd").iter().next(), Some(release("Redis", 8, 0)));
    }

    /// The time of a command, as a walker asks for it.
    fn of(words: &[&str]) -> Option<Option<i64>> {
        let (Effect::Expiry(form) | Effect::FieldExpiry(form)) = find(words[0].as_bytes()).unwrap().effect else {
            panic!("{words:?}")
        };
        let mut times = Times::new(form);
        for (argument, word) in (0..).zip(words).skip(1) {
            if times.looks_at(argument) {
                times.take(argument, Some(word.as_bytes()).filter(|word| word.len() <= 20));
            }
        }
        times.found().map(|time| time.milliseconds)
    }

    #[test]
    fn times_that_count_from_now_are_found() {
        for (command, wanted) in [
            ("set k v px 1500", Some(1500)),
            ("SET k v NX EX 2", Some(2000)),
            ("set k v xx get px 7", Some(7)),
            ("set k ex px 7", Some(7)),
            ("setex k 3 v", Some(3000)),
            ("psetex k 3 v", Some(3)),
            ("expire k 4", Some(4000)),
            ("expire k -4 gt", Some(-4000)),
            ("pexpire k 5", Some(5)),
            ("getex k ex 6", Some(6000)),
            ("restore k 99 payload", Some(99)),
            ("restore-asking k 99 payload replace idletime 5", Some(99)),
            ("hexpire h 8 fields 1 f", Some(8000)),
            ("hpexpire h 8 nx fields 1 f", Some(8)),
            ("hgetex h px 9 fields 1 f", Some(9)),
            ("hsetex h fnx ex 9 fields 1 f v", Some(9000)),
            ("msetex 2 a ex b 7 px 11", Some(11)),
            ("set k v ifeq ex px 12", Some(12)),
        ] {
            assert_eq!(of(&command.split(' ').collect::<Vec<_>>()), Some(wanted), "{command}");
        }
        assert_eq!(of(&["expire", "k", "many"]), Some(None));
        assert_eq!(of(&["expire", "k", "9223372036854775807"]), Some(None));
    }

    #[test]
    fn what_only_looks_like_such_a_time_is_not_one() {
        for command in [
            "set k v",
            "set ex ex",
            "set k v pxat 1764208000000",
            "set k v exat 1764208000 nx",
            "set k v keepttl",
            "set k v ifeq ex",
            "set k v ifeq px get",
            "getex k persist",
            "getex k pxat 1764208000000",
            "restore k 0 payload",
            "restore k 0 payload replace",
            "restore k 1764208000000 payload replace absttl",
            "restore k 1764208000000 absttl idletime 5 ABSTTL",
            "hsetex h keepttl fields 2 ex 5 px 6",
            "hgetex h persist fields 1 ex",
            "msetex 1 ex 5",
            "msetex 2 a ex b px pxat 1764208000000",
            "msetex x a ex 5",
        ] {
            assert_eq!(of(&command.split(' ').collect::<Vec<_>>()), None, "{command}");
        }
    }
}
