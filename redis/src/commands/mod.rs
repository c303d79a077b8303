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
//! - [`keys`]: where the keys of a command are.
//! - [`Release`], [`Releases`]: a version of a server, and those that have a command.
//!
//! Commands of modules are not in the table. They are taken to act on the data set alone.

mod expiry;
pub mod keys;
mod table;

use std::fmt;
use std::sync::LazyLock;

pub use self::expiry::{Expiry, Time, Times, Unit};
use self::keys::Key;
pub use self::table::{RELEASES, TABLE};

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
}
