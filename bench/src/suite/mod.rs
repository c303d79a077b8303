//! The program `remora-bench`: the tables that a reader wants, over networks that are what they are named for.
//!
//! ```text
//!   devices   what disk, networks and fabric can do            fio, iperf3, read_bandwidth
//!   sync      N replicas by every method over every network    sync::Scene on a Place
//!   feel      what the primary's clients notice of it          the same, under load::Load
//!   scaling   cost against size of data, size of values        the same, N = 1
//!      │
//!      ▼ Kept: bench/runs/<date>-<machine>-bench_<name>[-label]/{README.md, raw.csv, run.json, summary.md}
//!   report    tables and plots out of what is kept, into docs/benchmarks.md
//! ```
//!
//! `messenger` is a subcommand as well, but has a stage of its own: [`crate::messenger`].
//!
//! What it is not: a second stage. Syncs are played by [`crate::sync`], the same as for `full_sync` and the demo; only where
//! they are played, what is noted and how it is shown is here. Figures are taken by `devices`, `sync`, `feel` and `scaling`
//! alone, and written down at once; `report` takes none, so tables can be made again from any kept run.

pub mod devices;
pub mod feel;
pub mod kept;
pub mod load;
pub mod network;
pub mod points;
pub mod report;
pub mod scaling;
pub mod syncs;

pub use kept::Kept;
pub use network::Network;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::ValueEnum;
use remora_lab::Kind;

/// What every measuring subcommand can be told.
#[derive(Clone, Debug, clap::Args)]
pub struct Common {
    /// Rounds; figures are medians over them.
    #[arg(long, default_value_t = 3)]
    pub rounds: usize,
    /// Minutes that it may take. What does not fit is left out, and the kept run says what.
    #[arg(long, value_parser = minutes)]
    pub budget_minutes: Option<f64>,
    /// Keeps the run in a folder of its own below this one.
    #[arg(long)]
    pub out: Option<PathBuf>,
    /// A word at the end of that folder's name, for runs that stand beside each other.
    #[arg(long)]
    pub label: Option<String>,
}

impl Common {
    fn budget(&self) -> Budget {
        Budget { end: self.budget_minutes.map(|minutes| Instant::now() + Duration::from_secs_f64(60.0 * minutes)) }
    }
}

fn minutes(text: &str) -> std::result::Result<f64, String> {
    let minutes = text.parse().ok().filter(|minutes| (0.0..=MOST_MINUTES).contains(minutes));
    minutes.ok_or_else(|| format!("{text:?} is no number of minutes from 0 to {MOST_MINUTES}"))
}

/// A month: more is a slip of the hand.
const MOST_MINUTES: f64 = 31.0 * 24.0 * 60.0;

/// Values, or MiB, or bytes of a value, that a data set may be asked to have: none is no data set, and more than this no machine holds.
const MOST_OF_DATA: u64 = 1 << 30;

/// When it has to be over.
#[derive(Clone, Copy, Debug)]
struct Budget {
    end: Option<Instant>,
}

impl Budget {
    /// One of so many parts of what is left: who needs less leaves it to those who come after.
    fn part(self, of: usize) -> Budget {
        let share = |end: Instant| {
            let now = Instant::now();
            now + end.saturating_duration_since(now) / u32::try_from(of).unwrap_or(u32::MAX).max(1)
        };
        Budget { end: self.end.map(share) }
    }

    /// Whether something that takes so long still fits.
    fn has(self, time: Duration) -> bool {
        self.end.is_none_or(|end| Instant::now() + time < end)
    }
}

/// A server as it is typed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ServerChoice {
    /// Redis 7.
    Redis,
    /// Valkey 9.1.
    Valkey,
}

impl ServerChoice {
    /// The lab's name for it.
    pub fn kind(self) -> Kind {
        match self {
            ServerChoice::Redis => Kind::Redis7,
            ServerChoice::Valkey => Kind::Valkey9,
        }
    }
}

/// The seeds of this project measured with 256 values of about 4 MB, 937 MiB in all; so do we.
pub const VALUE_BYTES: u64 = 3748 << 10;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_of_the_time_is_a_share_of_what_is_left_and_no_limit_has_no_parts() {
        let budget = Budget { end: Some(Instant::now() + Duration::from_secs(100)) };
        let part = budget.part(4);
        assert!(part.has(Duration::from_secs(20)) && !part.has(Duration::from_secs(30)));
        let over = Budget { end: Some(Instant::now()) };
        assert!(!over.part(2).has(Duration::from_secs(1)));
        assert!(Budget { end: None }.part(9).has(Duration::from_secs(u64::from(u32::MAX))));
    }
}
