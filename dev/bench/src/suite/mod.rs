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
pub mod report;
pub mod syncs;
pub mod volume;

use std::fs;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::{Duration, Instant};

use clap::ValueEnum;
use feel::ClientLatency;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::sync::{Compare, Method, Place, Program, Result};
use crate::{Keep, Run};
use remora_lab::{BitRate, Kind, RdmaVm, net};

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
        let bytes_per_second = net::bandwidth(hosts, IPERF_TIME)?;
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

/// Runs this program's own command line once more in an emulated machine with that many nodes, without `--emulated`:
/// `before` it these words, and `after` it those.
pub(crate) fn emulated(
    nodes: u8,
    limit: Duration,
    out: Option<&Path>,
    before: &[&str],
    after: &[&str],
) -> Result<bool> {
    let mut machine = RdmaVm::ready()?.nodes(nodes).limit(limit);
    if let Some(out) = out {
        fs::create_dir_all(out)?;
        machine = machine.writable(&out.canonicalize()?);
    }
    let program = std::env::current_exe()?.to_string_lossy().into_owned();
    let typed: Vec<String> = std::env::args().skip(1).filter(|word| word != "--emulated").collect();
    let typed: Vec<&str> = typed.iter().map(String::as_str).collect();
    let ran = machine.run(&[before, &[program.as_str()], &typed, after].concat())?;
    print!("{}", String::from_utf8_lossy(&ran.stdout));
    match ran.status.code() {
        Some(0) => Ok(true),
        // It has printed its figures, and one missed its target or could not be measured.
        Some(1) if !ran.stdout.is_empty() => Ok(false),
        _ => Err(format!("the emulated machine: {}", String::from_utf8_lossy(&ran.stderr).trim()).into()),
    }
}

// Kept runs: all figures, with the facts that a reader needs.

/// One run of one subcommand.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Kept<P> {
    /// Machine, time and command line.
    pub run: Run,
    /// A label that distinguishes it from other runs of the same kind.
    #[serde(default)]
    pub label: String,
    /// The speed of the networks, measured just before.
    pub links: Vec<Link>,
    /// Every figure.
    pub points: Vec<P>,
}

impl<P: Serialize + DeserializeOwned> Kept<P> {
    /// An empty run of `remora-bench NAME`.
    pub fn begin(name: &str, label: Option<&str>) -> Kept<P> {
        let run = Run::new(&format!("bench_{name}"), "see the columns");
        let run = Run { command: format!("remora-bench {}", arguments(std::env::args().skip(1))), ..run };
        Kept { run, label: label.unwrap_or_default().to_owned(), links: Vec::new(), points: Vec::new() }
    }

    /// Adds a note for the reader of the run, and prints it.
    pub fn note(&mut self, text: impl Into<String>) {
        let text = text.into();
        eprintln!("note: {text}");
        self.run.notes.push(text);
    }

    /// Writes the run into a new folder below `out`, with this summary. Called after each figure, so that an
    /// interrupted run leaves the figures that it has.
    pub fn keep(&self, out: Option<&Path>, summary: &str) -> Result<()> {
        let Some(out) = out else { return Ok(()) };
        let mut run = self.run.clone();
        if !self.label.is_empty() {
            run.program = format!("{}-{}", run.program, self.label);
        }
        let keep = Keep { out: Some(out.to_owned()), json: None };
        keep.write(&run, summary.to_owned() + &self.run.quoted_notes(), &self.points, self)?;
        Ok(())
    }
}

/// The command line without the folder in which the run is kept.
pub(crate) fn arguments(typed: impl Iterator<Item = String>) -> String {
    let mut typed = typed;
    let mut words = Vec::new();
    while let Some(word) = typed.next() {
        match word.as_str() {
            "--out" => drop(typed.next()),
            _ if word.starts_with("--out=") => {}
            _ => words.push(word),
        }
    }
    words.join(" ")
}

/// The kept runs of `remora-bench NAME`, the newest of each label, with their folders.
pub fn newest<P: DeserializeOwned>(runs: &Path, name: &str) -> Result<Vec<(PathBuf, Kept<P>)>> {
    newest_of(runs, &format!("bench_{name}"))
}

/// The kept runs of a program, the newest of each label, with their folders.
pub fn newest_of<R: DeserializeOwned>(runs: &Path, program: &str) -> Result<Vec<(PathBuf, R)>> {
    let mut folders: Vec<PathBuf> = fs::read_dir(runs)
        .map_err(|error| format!("could not read {}: {error}", runs.display()))?
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|folder| is_of(folder, program))
        .collect();
    // The name begins with the date; what follows it is the same for all of one label.
    folders.sort();
    let last = |folder: &PathBuf| {
        let same = folders.iter().rev().find(|other| label(other, program) == label(folder, program));
        same == Some(folder)
    };
    let folders: Vec<PathBuf> = folders.iter().filter(|folder| last(folder)).cloned().collect();
    let read = |folder: PathBuf| {
        let path = folder.join("run.json");
        let kept = fs::read(&path).map_err(|error| error.to_string());
        let kept = kept.and_then(|bytes| serde_json::from_slice(&bytes).map_err(|error| error.to_string()));
        Ok((folder, kept.map_err(|error| format!("could not read {}: {error}", path.display()))?))
    };
    folders.into_iter().map(read).collect()
}

/// The label in the name of a run's folder; empty without one.
fn label(folder: &Path, program: &str) -> String {
    after(folder, program).unwrap_or_default().trim_start_matches('-').to_owned()
}

/// Whether a folder's name is `…-PROGRAM` or `…-PROGRAM-LABEL`.
fn is_of(folder: &Path, program: &str) -> bool {
    after(folder, program).is_some_and(|rest| rest.is_empty() || rest.starts_with('-'))
}

/// What follows the program in the name of a run's folder.
fn after(folder: &Path, program: &str) -> Option<String> {
    let name = folder.file_name().unwrap_or_default().to_string_lossy();
    name.split_once(&format!("-{program}")).map(|(_, rest)| rest.to_owned())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

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

    #[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
    struct Point {
        name: String,
        value: f64,
        more: Option<Vec<u32>>,
    }

    #[test]
    fn the_folder_of_a_run_is_not_in_its_command_line() {
        let typed = ["sync", "--out", "/home/me/runs", "--rounds", "2", "--out=elsewhere"].map(str::to_owned);
        assert_eq!(arguments(typed.into_iter()), "sync --rounds 2");
    }

    #[test]
    fn the_newest_run_of_each_label_is_read() {
        let folder = tempfile::tempdir().unwrap();
        let mut kept = Kept::begin("sync", Some("label"));
        kept.points.push(Point { name: "a, b".into(), value: 1.5, more: Some(vec![1, 2]) });
        let runs = [("2026-01-02", "label", 2.0), ("2026-01-01", "label", 1.0), ("2026-01-01", "other", 3.0)];
        for (date, label, value) in runs {
            kept.run.date = date.into();
            kept.label = label.into();
            kept.points[0].value = value;
            kept.keep(Some(folder.path()), "# words\n").unwrap();
        }
        let read = newest::<Point>(folder.path(), "sync").unwrap();
        assert_eq!(read.iter().map(|(_, kept)| kept.points[0].value).collect::<Vec<_>>(), [3.0, 2.0]);
        assert_eq!(fs::read_to_string(read[1].0.join("raw.csv")).unwrap(), "more,name,value\n1 2,a b,2.0\n");
        assert!(newest::<Point>(folder.path(), "syn").unwrap().is_empty());
    }
}
