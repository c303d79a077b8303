//! The program `remora-bench`: the tables of the benchmarks page, over networks of a known rate.
//!
//! ```text
//!   devices   speed of disk, networks and fabric            fio, iperf3, read_bandwidth
//!   sync      N replicas by every method over every network    sync::Scene on a Place
//!   feel      what the primary's clients notice          the same, under load::Load
//!   scaling   cost against size of data, size of values        the same, N = 1
//!   conversations   N control conversations at one source      crowd::Crowd
//!   volume    files of a mounted volume, and rivals          volume::Place, fio, redis-benchmark
//!      │
//!      ▼ Kept: bench/runs/<date>-<machine>-bench_<name>[-label]/{README.md, raw.csv, run.json, summary.md}
//!   report    tables and plots from kept runs, into bench/report.md
//! ```
//!
//! `messenger` is a subcommand as well, but is implemented in [`crate::messenger`].
//!
//! [`crate::sync`] runs the syncs, the same as for `full_sync` and the demo. This module chooses the networks, and
//! records and prints the results. Only `devices`, `sync`, `feel`, `scaling`, `conversations` and `volume` measure
//! figures, and they write them at once. `report` measures none, so tables can be made again from any kept run.

pub mod conversations;
pub mod devices;
pub mod feel;
pub mod kept;
pub mod load;
pub mod network;
pub mod points;
pub mod report;
pub mod scaling;
pub mod syncs;
pub mod volume;

pub use kept::Kept;
pub use network::Network;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::ValueEnum;
use remora_lab::Kind;

use crate::sync::Compare;

/// Options of every measuring subcommand.
#[derive(Clone, Debug, clap::Args)]
pub struct Common {
    /// Rounds; figures are medians over them.
    #[arg(long, default_value_t = 3)]
    pub rounds: usize,
    /// When to compare the replicas with the primary, by digest.
    #[arg(long, default_value = "first")]
    pub compare: Compare,
    /// Time limit in minutes. What does not fit is left out, and the kept run lists it.
    #[arg(long, value_parser = minutes)]
    pub budget_minutes: Option<f64>,
    /// Keep the run in a new folder below this one.
    #[arg(long)]
    pub out: Option<PathBuf>,
    /// A label at the end of that folder's name, for runs that are shown beside each other.
    #[arg(long)]
    pub label: Option<String>,
}

impl Common {
    fn budget(&self) -> Budget {
        Budget::of(self.budget_minutes)
    }
}

fn minutes(text: &str) -> std::result::Result<f64, String> {
    let minutes = text.parse().ok().filter(|minutes| (0.0..=MOST_MINUTES).contains(minutes));
    minutes.ok_or_else(|| format!("{text:?} is not a number of minutes from 0 to {MOST_MINUTES}"))
}

/// A month. More is taken for a typing error.
const MOST_MINUTES: f64 = 31.0 * 24.0 * 60.0;

/// Limits on the values, MiB, or bytes of a value of a data set. Zero would be no data set, and no machine holds more
/// than the maximum.
const MOST_OF_DATA: u64 = 1 << 30;

/// The time limit.
#[derive(Clone, Copy, Debug)]
struct Budget {
    end: Option<Instant>,
}

impl Budget {
    /// This number of minutes from now; `None` is no limit.
    fn of(minutes: Option<f64>) -> Budget {
        Budget { end: minutes.map(|minutes| Instant::now() + Duration::from_secs_f64(60.0 * minutes)) }
    }

    /// One of `of` equal parts of the remaining time. What one part does not use is left to the following ones.
    fn part(self, of: usize) -> Budget {
        let share = |end: Instant| {
            let now = Instant::now();
            now + end.saturating_duration_since(now) / u32::try_from(of).unwrap_or(u32::MAX).max(1)
        };
        Budget { end: self.end.map(share) }
    }

    /// Whether something that takes this long still fits.
    fn has(self, time: Duration) -> bool {
        self.end.is_none_or(|end| Instant::now() + time < end)
    }
}

/// A server as an argument of the command line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ServerChoice {
    /// Redis 7.
    Redis,
    /// Valkey 9.1.
    Valkey,
}

impl ServerChoice {
    /// The lab's name of it.
    pub fn kind(self) -> Kind {
        match self {
            ServerChoice::Redis => Kind::Redis7,
            ServerChoice::Valkey => Kind::Valkey9,
        }
    }
}

/// The project's first measurements used 256 values of about 4 MB, 937 MiB in all; this is the same.
pub const VALUE_BYTES: u64 = 3748 << 10;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_of_the_time_is_a_share_of_the_rest_and_no_limit_has_no_parts() {
        let budget = Budget { end: Some(Instant::now() + Duration::from_secs(100)) };
        let part = budget.part(4);
        assert!(part.has(Duration::from_secs(20)) && !part.has(Duration::from_secs(30)));
        let over = Budget { end: Some(Instant::now()) };
        assert!(!over.part(2).has(Duration::from_secs(1)));
        assert!(Budget { end: None }.part(9).has(Duration::from_secs(u64::from(u32::MAX))));
    }
}
