//! The program `remora-bench`: the tables of the benchmarks page, over networks of a known rate.
//!
//! ```text
//!   sync      N replicas by every method over every network    sync::Scene on a Place
//!   feel      what the primary's clients notice          the same, under feel::Load
//!   volume    files of a mounted volume, and rivals          volume::Place, fio, redis-benchmark
//!      │
//!      ▼ Kept: bench/runs/<date>-<machine>-bench_<name>[-label]/{README.md, raw.csv, run.json, summary.md}
//!   report    tables and plots from kept runs, into bench/report.md
//! ```
//!
//! `messenger` is a subcommand as well, but is implemented in [`crate::messenger`].
//!
//! [`crate::sync`] runs the syncs, the same as for `full_sync` and the demo. This module chooses the networks, and
//! records and prints the results. Only `sync`, `feel` and `volume` measure figures, and they write them at once.
//! `report` measures none, so tables can be made again from any kept run.

pub mod feel;
pub mod kept;
pub mod report;
pub mod syncs;
pub mod volume;

use std::path::PathBuf;
use std::str::FromStr;
use std::time::{Duration, Instant};

use clap::ValueEnum;
use remora_lab::{BitRate, Kind, iperf};
use serde::{Deserialize, Serialize};

use crate::sync::{Compare, Method, Place, Program, Result};
use feel::ClientLatency;

pub use kept::Kept;

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

// A network as an argument of the command line: this machine's loopback, or hosts with cables of a rate.

/// The network over which something is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Network {
    /// This machine's loopback: limited only by its processors.
    Loopback,
    /// Hosts of a test network, each on a cable of this rate.
    Shaped(BitRate),
}

impl Network {
    /// Whether this program can run a method over it, and whether the method differs from others for that number of
    /// replicas.
    fn suits(self, method: Method, kind: Kind, replicas: usize, program: &Program) -> bool {
        method.applies(kind, replicas)
            && (self == Network::Loopback || method.crosses_hosts())
            && (method.serves_peers() != Some(true) || program.serves_peers())
    }

    /// A place on it, with room for `replicas` replicas.
    ///
    /// # Errors
    /// Hosts need root and a kernel that can shape; the error says what is missing.
    pub fn place(self, replicas: usize) -> Result<Place> {
        match self {
            Network::Loopback => Ok(Place::loopback()),
            Network::Shaped(rate) => Place::network(rate, replicas),
        }
    }

    /// The same with reserved processors for the primary's host, if there are hosts.
    ///
    /// # Errors
    /// As for [`Network::place`].
    pub fn place_apart(self, replicas: usize) -> Result<Place> {
        match self {
            Network::Loopback => Ok(Place::loopback()),
            Network::Shaped(rate) => Place::network_apart(rate, replicas),
        }
    }

    /// The rate that iperf3 measures, from the primary's host to the first replica's.
    ///
    /// # Errors
    /// iperf3 is not installed or cannot connect.
    pub fn measure(self, place: &Place) -> Result<Link> {
        let hosts = place.primary().zip(place.replica(0));
        let bytes_per_second = iperf::bandwidth(hosts, IPERF_TIME)?;
        Ok(Link { network: self.to_string(), bytes_per_second })
    }
}

/// The measured speed of a network.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Link {
    /// Its name.
    pub network: String,
    /// By iperf3, on one connection.
    pub bytes_per_second: f64,
}

impl FromStr for Network {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Network, String> {
        match text {
            "loopback" => Ok(Network::Loopback),
            rate => rate.parse().map(Network::Shaped).map_err(|error: String| format!("{error}, or loopback")),
        }
    }
}

impl std::fmt::Display for Network {
    fn fmt(&self, to: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Network::Loopback => to.write_str("loopback"),
            Network::Shaped(rate) => rate.fmt(to),
        }
    }
}

/// Long beside the start of a connection.
const IPERF_TIME: Duration = Duration::from_secs(3);

// The kept measurements: the rows of the tables and the points of the plots. The suites create them, the report shows
// them.

/// One sync.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct SyncPoint {
    /// Name and version of the server.
    pub server: String,
    /// Name of the network.
    pub network: String,
    /// Bytes of all values.
    pub bytes: u64,
    /// What the values are, if they are not the large random ones, which do not compress.
    #[serde(default)]
    pub content: String,
    /// The method.
    pub method: Method,
    /// Number of replicas.
    pub replicas: usize,
    /// The round, from 0.
    pub round: usize,
    /// Wall seconds until the last replica had caught up.
    pub seconds: f64,
    /// Wall seconds until the first replica had caught up.
    pub first_seconds: f64,
    /// Phase of the last replica, in seconds; see [`crate::sync::Phases`].
    pub snapshot: f64,
    /// Phase of the last replica, in seconds.
    pub transfer: f64,
    /// Phase of the last replica, in seconds.
    pub load: f64,
    /// Phase of the last replica, in seconds.
    pub catch_up: f64,
    /// Bytes out of the primary's host; on loopback, out of the primary.
    pub sent: u64,
    /// Full copies that the primary was asked for and gave (`sync_full`); `None` in runs before 2026-11-26.
    #[serde(default)]
    pub full_copies: Option<u64>,
    /// Processor seconds of the primary with its child.
    pub primary_cpu: f64,
    /// Processor seconds of all replicas' servers.
    pub replicas_cpu: f64,
    /// Processor seconds of all agents, or of the copier.
    pub agents_cpu: f64,
    /// Processor seconds of the source agent, which are part of those; `None` in runs before 2026-11-24.
    #[serde(default)]
    pub source_cpu: Option<f64>,
    /// The part of it that the source had used when it was ready: nearly all of it the first touch of its memory.
    /// `None` in runs that did not record it.
    #[serde(default)]
    pub source_ready_cpu: Option<f64>,
    /// Peak of the primary's private memory, including what its child copied, in bytes.
    pub peak_memory: u64,
    /// Peak memory of the source agent, in bytes.
    pub source_memory: u64,
    /// Peak memory of each replica agent, in bytes. Empty in runs before 2026-11-23, in which agents with relay had
    /// memory for the whole data set.
    #[serde(default)]
    pub agent_memory: Vec<u64>,
    /// Whether the replicas equal the primary; `None` if that was not checked.
    pub equal: Option<bool>,
}

/// What one group of clients noticed during one sync.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct FeelPoint {
    /// Name and version of the server.
    pub server: String,
    /// Name of the network.
    pub network: String,
    /// Bytes of all values.
    pub bytes: u64,
    /// `near` or `far`.
    pub clients: String,
    /// Commands per second that this group sent.
    pub asked: u64,
    /// The method by which replicas were made; `None` without replicas.
    pub method: Option<Method>,
    /// Number of replicas.
    pub replicas: usize,
    /// The round, from 0.
    pub round: usize,
    /// Seconds of the sync.
    pub seconds: f64,
    /// What the clients noticed in that time.
    #[serde(flatten)]
    pub felt: ClientLatency,
    /// Peak memory of the source agent, in bytes; `None` without one, and in runs that did not record it.
    #[serde(default)]
    pub source_memory: Option<u64>,
    /// Peak memory of each replica agent, in bytes; empty in runs before 2026-11-23.
    #[serde(default)]
    pub agent_memory: Vec<u64>,
    /// Whether the replicas equal the primary; `None` if that was not checked.
    #[serde(default)]
    pub equal: Option<bool>,
}

/// A method in the words of a table.
fn name_of(method: Option<Method>) -> &'static str {
    method.map_or("no sync", Method::name)
}

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
