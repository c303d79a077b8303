//! `remora-bench sync`: N replicas by every method over every network.
//!
//! For each server and network a primary is filled once. Then every method in turn makes N replicas on fresh, empty
//! servers, for each N, round by round. Comparisons are within one run: a method against the others at the same N, and
//! each method against itself at N = 1.

use std::path::Path;
use std::time::{Duration, Instant};

use super::Kept;
pub use super::SyncPoint as Point;
use super::report::tables;
use super::{Budget, Common, Network, ServerChoice, VALUE_BYTES};
use crate::sync::{Content, Method, Outcome, Phases, Program, Result, Scene, Shape, Trial, available_memory};

/// Command-line arguments.
#[derive(Clone, Debug, clap::Args)]
pub struct Options {
    /// Networks: `loopback`, or the rate of each host's cable (needs root). Put fast ones first: the slow ones get the
    /// time of --budget-minutes that they leave.
    #[arg(long, value_delimiter = ',', default_value = "loopback,10gbit,1gbit,100mbit")]
    pub networks: Vec<Network>,
    /// Servers to measure.
    #[arg(long, value_delimiter = ',', default_value = "redis,valkey")]
    pub servers: Vec<ServerChoice>,
    /// Numbers of replicas.
    #[arg(long, value_delimiter = ',', default_value = "1,2,3,8")]
    pub replicas: Vec<usize>,
    /// Values of 3748 KiB in the data set: 256 are 937 MiB.
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..=super::MOST_OF_DATA), default_value_t = 256)]
    pub values: u64,
    /// Values of 1 KiB that are JSON records, instead of the large random ones, of as many bytes in all.
    #[arg(long)]
    pub json: bool,
    /// Values on networks of less than 1 Gb/s, where the full data set would take minutes each time.
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..=super::MOST_OF_DATA), default_value_t = 16)]
    pub values_where_slow: u64,
    /// Methods. Those that do not apply to a network, a server or a number of replicas are skipped.
    #[arg(long, value_delimiter = ',')]
    pub methods: Vec<Method>,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub common: Common,
}

impl Options {
    fn asked(&self) -> &[Method] {
        if self.methods.is_empty() { METHODS.as_slice() } else { self.methods.as_slice() }
    }
}

impl Point {
    fn of(outcome: &Outcome, server: &str, network: Network, shape: Shape, round: usize) -> Point {
        let Phases { snapshot, transfer, load, catch_up } = outcome.phases;
        Point {
            server: server.to_owned(),
            network: network.to_string(),
            bytes: shape.bytes(),
            content: if shape.content == Content::Json { JSON.to_owned() } else { String::new() },
            method: outcome.method,
            replicas: outcome.replicas,
            round,
            seconds: outcome.seconds,
            first_seconds: outcome.first_seconds,
            snapshot,
            transfer,
            load,
            catch_up,
            sent: outcome.host_bytes.unwrap_or(outcome.primary_bytes),
            full_copies: Some(outcome.full_copies),
            primary_cpu: outcome.primary_cpu,
            replicas_cpu: outcome.replica_cpu.iter().sum(),
            agents_cpu: outcome.agents_cpu,
            source_cpu: Some(outcome.source_cpu),
            source_ready_cpu: Some(outcome.source_ready_cpu),
            peak_memory: outcome.peak_memory,
            source_memory: outcome.source_memory,
            agent_memory: outcome.agent_memory.clone(),
            equal: outcome.equal,
        }
    }
}

/// Runs the subcommand. Returns whether every compared replica was equal.
pub fn run(options: &Options) -> Result<bool> {
    let program = Program::build()?;
    let mut bench = Bench {
        options,
        program,
        kept: Kept::begin("sync", options.common.label.as_deref()),
        budget: options.common.budget(),
        left_out: 0,
    };
    for method in options.asked() {
        if let Some(why) = method.missing() {
            bench.kept.note(format!("NOT MEASURED: {}: {why}", method.name()));
        }
    }
    let (whole, mut left) = (bench.budget, options.networks.len() * options.servers.len());
    if !bench.program.serves_peers() {
        bench.kept.note("This build's replicas do not feed each other: the method with relay is left out.");
    }
    for network in &options.networks {
        for server in &options.servers {
            bench.budget = whole.part(left);
            left -= 1;
            bench.scene(*network, *server)?;
        }
    }
    print!("{}", tables::sync(&[&bench.kept], &[], Path::new("")));
    Ok(bench.kept.points.iter().all(|point| point.equal != Some(false)))
}

struct Bench<'a> {
    options: &'a Options,
    program: Program,
    kept: Kept<Point>,
    budget: Budget,
    /// Number of syncs of a scene for which there was no time.
    left_out: usize,
}

impl Bench<'_> {
    /// Runs all rounds on one primary.
    fn scene(&mut self, network: Network, server: ServerChoice) -> Result<()> {
        let most = self.options.replicas.iter().copied().max().unwrap_or(1);
        let place = network.place(most)?;
        let link = network.measure(&place)?;
        eprintln!("{network}: iperf3 {:.1} MB/s; filling a primary", link.bytes_per_second / 1e6);
        self.kept.links.push(link);
        let values = self.values(network, most);
        let shape = match self.options.json {
            true => Shape { keys: values * VALUE_BYTES / JSON_BYTES, value_bytes: JSON_BYTES, content: Content::Json },
            false => Shape { keys: values, value_bytes: VALUE_BYTES, content: Content::Strings },
        };
        let mut scene = Scene::at(&place, &self.program, server.kind(), shape)?;
        let name = format!("{} ({})", server.kind(), scene.primary().version()?);
        let mut wanted = 0;
        for round in 0..self.options.common.rounds {
            for replicas in self.options.replicas.clone() {
                for method in self.order(network, server, replicas, round) {
                    wanted += 1;
                    self.trial(
                        &mut scene,
                        &name,
                        network,
                        Trial { method, replicas, writes: None, compare: self.options.common.compare.is_due(round) },
                        round,
                    )?;
                }
            }
        }
        match std::mem::take(&mut self.left_out) {
            0 => {}
            left_out => self.kept.note(format!(
                "{name}, {network}: {left_out} of {wanted} syncs were left out for lack of time, later rounds and many replicas first"
            )),
        }
        self.keep()
    }

    fn trial(&mut self, scene: &mut Scene, server: &str, network: Network, trial: Trial, round: usize) -> Result<()> {
        let what = format!("{server}, {network}, N = {}, {}", trial.replicas, trial.method.name());
        if !self.budget.has(self.longest(server, network, &trial, scene.shape().bytes())) {
            self.left_out += 1;
            return Ok(());
        }
        let begun = Instant::now();
        match scene.play(&trial, &|_, _| {}) {
            Ok(outcome) => {
                let point = Point::of(&outcome, server, network, scene.shape(), round);
                eprintln!(
                    "{what}: {:.2} s (first {:.2}), {:.0} MB out [{:.0} s]",
                    point.seconds,
                    point.first_seconds,
                    point.sent as f64 / 1e6,
                    begun.elapsed().as_secs_f64()
                );
                if let Some(remark) = outcome.remark() {
                    self.kept.note(format!("{what}, round {}: {remark}", round + 1));
                }
                for difference in &outcome.differences {
                    self.kept.note(format!("{what}: NOT EQUAL: {difference}"));
                }
                self.kept.points.push(point);
            }
            Err(error) => self.kept.note(format!("{what}, round {}: failed: {error}", round + 1)),
        }
        self.keep()
    }

    fn keep(&self) -> Result<()> {
        self.kept.keep(self.options.common.out.as_deref(), &tables::sync(&[&self.kept], &[], Path::new("")))
    }

    /// The expected time of a sync: that of an earlier one, or the network's time for the copies that leave the
    /// primary's host.
    fn longest(&self, server: &str, network: Network, trial: &Trial, bytes: u64) -> Duration {
        let network = network.to_string();
        let link = self.kept.links.iter().rev().find(|link| link.network == network);
        let copies = if trial.method.serves_peers() == Some(true) { 1 } else { trial.replicas };
        let guess = link.map_or(0.0, |link| copies as f64 * bytes as f64 / link.bytes_per_second);
        let before = self.kept.points.iter().filter(|point| {
            point.server == server
                && point.network == network
                && point.replicas == trial.replicas
                && point.method == trial.method
        });
        let seconds = before.map(|point| point.seconds).reduce(f64::max).unwrap_or(guess);
        Duration::from_secs_f64(seconds) + BESIDES
    }

    /// The order of the methods: each round begins with another one.
    fn order(&self, network: Network, server: ServerChoice, replicas: usize, round: usize) -> Vec<Method> {
        let asked = self.options.asked();
        let suits = |method: &Method| {
            network.suits(*method, server.kind(), replicas, &self.program) && method.missing().is_none()
        };
        let mut methods: Vec<Method> = asked.iter().copied().filter(suits).collect();
        let count = methods.len().max(1);
        methods.rotate_left(round % count);
        methods
    }

    /// The number of values: as given, halved until N replicas of them fit into this machine's memory.
    fn values(&mut self, network: Network, replicas: usize) -> u64 {
        let is_slow = matches!(network, Network::Shaped(rate) if rate.0 < SLOW_BITS);
        let asked = if is_slow { self.options.values_where_slow } else { self.options.values };
        let mut values = asked.max(1);
        while values > 1 && values * VALUE_BYTES * copies(replicas) > available_memory().unwrap_or(u64::MAX) {
            values /= 2;
        }
        if values < asked {
            let mib = |values: u64| (values * VALUE_BYTES) >> 20;
            let (here, asked) = (mib(values), mib(asked));
            self.kept
                .note(format!("{network}: {here} MiB instead of {asked}, so that {replicas} replicas fit into memory"));
        }
        values
    }
}

/// Copies of the data set in memory at once: the primary's, the source's, and of each replica the server's and, if
/// replicas feed each other, the agent's; and one for the rest.
fn copies(replicas: usize) -> u64 {
    3 + 2 * replicas as u64
}

/// All methods that differ from others; each is asked whether it applies.
const METHODS: [Method; 15] = [
    Method::OwnDefault,
    Method::OwnBest,
    Method::OwnTogether,
    Method::OwnDual,
    Method::CopierOneByOne,
    Method::Copier,
    Method::RdbFile,
    Method::RedisShake,
    Method::RemoraShm,
    Method::RemoraTcp,
    Method::RemoraTcpSealed,
    Method::RemoraRelay,
    Method::RemoraRelaySealed,
    Method::RemoraRelayKilled,
    Method::RemoraModuleRelay,
];

/// What the data are with `--json`.
const JSON: &str = "JSON";

/// Bytes of a value of JSON records.
const JSON_BYTES: u64 = 1 << 10;

/// A network below this rate is slow.
const SLOW_BITS: u64 = 1_000_000_000;

/// Time of a trial besides the sync itself: starting servers, and waiting until they are idle.
const BESIDES: Duration = Duration::from_secs(5);
