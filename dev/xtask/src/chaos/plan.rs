//! What a round draws: its servers, their settings and their data.

use std::fmt;

use remora_lab::{Kind, Random};

/// One draw.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    pub(crate) kind: Kind,
    /// The primary saves to disk before it sends (`repl-diskless-sync no`).
    pub(crate) to_disk: bool,
    pub(crate) data: Data,
    /// Which have the module: the primary, the others.
    pub(crate) modules: [bool; 2],
    /// How replicas load (`repl-diskless-load`).
    pub(crate) load: &'static str,
    /// Valkey's replication over two channels.
    pub(crate) dual_channel: bool,
    /// The primary's backlog.
    pub(crate) backlog: &'static str,
    /// Microseconds that the primary's child takes for each key.
    pub(crate) save_delay: u64,
    /// Full copies of A.
    pub(crate) copies: u64,
    /// The writers' seed.
    pub(crate) seed: u64,
}

/// How much there is to copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Data {
    /// A dozen keys: the snapshot is below the 16 KiB of a socket's first read, and the first writes arrive with it.
    Small,
    /// Every type, some hundred keys of each.
    Every,
    /// The same, beside megabytes of small values.
    Middle,
}

impl Plan {
    pub(crate) fn draw(kind: Kind, random: &mut Random) -> Plan {
        let data = pick(random, &[Data::Small, Data::Small, Data::Every, Data::Middle]);
        Plan {
            kind,
            to_disk: random.one_in(2),
            data,
            modules: [random.one_in(3), random.one_in(3)],
            load: pick(random, &LOADS),
            dual_channel: kind == Kind::Valkey9 && random.one_in(2),
            // A small one makes hand-offs wait until the writers pause; see the load's rate.
            backlog: pick(random, &BACKLOGS),
            // A snapshot of some tenths of a second: there is time for writes and for disturbances.
            save_delay: if data == Data::Small { random.between(5_000, 50_000) } else { 20 },
            copies: random.between(3, 6),
            seed: random.word(),
        }
    }

    /// The word of `--server`.
    pub(crate) fn server(&self) -> &'static str {
        match self.kind {
            Kind::Redis7 => "redis",
            Kind::Valkey9 => "valkey",
        }
    }
}

/// The values of `repl-diskless-load`.
const LOADS: [&str; 3] = ["disabled", "swapdb", "on-empty-db"];

/// Sizes of a backlog.
const BACKLOGS: [&str; 2] = ["1mb", "16mb"];

/// One of these.
fn pick<T: Copy>(random: &mut Random, from: &[T]) -> T {
    from[random.below(from.len() as u64) as usize]
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let how = if self.to_disk { "to disk" } else { "diskless" };
        let modules = match self.modules {
            [false, false] => "no module",
            [true, false] => "module in the primary",
            [false, true] => "module in the replicas",
            [true, true] => "module everywhere",
        };
        let dual = if self.dual_channel { ", dual channel" } else { "" };
        let Plan { kind, data, load, backlog, copies, save_delay, .. } = self;
        write!(
            f,
            "{kind} {how}{dual}, {data:?} data ({save_delay} us a key), {modules}, load {load}, backlog {backlog}, {copies} copies"
        )
    }
}
