//! `remora-bench feel`: what the primary's clients notice while N replicas are made by each method.
//!
//! Two groups of clients send commands at the same time at a steady rate. *Near* clients run on the primary's own host:
//! they notice its processor, its forks and its main thread. *Far* clients run on a separate host: they also notice its
//! cable. Loopback has only near clients.
//!
//! Half of the machine's processors are for the primary's host and its clients, the rest for all replicas, whose work
//! does not affect the clients. The clients, which measure, have priority over all other processes on their processors
//! ([`Load`]).

use std::thread;
use std::time::{Duration, Instant};

use super::kept::Kept;
use super::load::Load;
use super::network::Network;
pub use super::points::FeelPoint as Point;
use super::points::name_of;
use super::report::cells;
use super::{Common, ServerChoice, VALUE_BYTES};
use crate::sync::{Content, Method, Outcome, Place, Program, Result, Scene, Shape, Trial};

/// Command-line arguments.
#[derive(Clone, Debug, clap::Args)]
pub struct Options {
    /// Networks, as for `sync`.
    #[arg(long, value_delimiter = ',', default_value = "1gbit,loopback")]
    pub networks: Vec<Network>,
    /// Servers to measure.
    #[arg(long, value_delimiter = ',', default_value = "valkey")]
    pub servers: Vec<ServerChoice>,
    /// Numbers of replicas. The case without replicas is always measured too.
    #[arg(long, value_delimiter = ',', default_value = "1,3,8")]
    pub replicas: Vec<usize>,
    /// Methods.
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "own-best,own-together,own-dual,remora-shm,remora-tcp,remora-relay,remora-tcp-auto,remora-relay-auto,remora-relay-gentle,remora-module,remora-module-relay,remora-module-relay-gentle"
    )]
    pub methods: Vec<Method>,
    /// Congestion control of all hosts, by its kernel name. Default: the system's.
    #[arg(long)]
    pub congestion: Option<String>,
    /// Commands per second of each group of clients.
    #[arg(long, default_value_t = 2000)]
    pub rate: u64,
    /// Values of 3748 KiB in the data set.
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..=super::MOST_OF_DATA), default_value_t = 128)]
    pub values: u64,
    /// Let all hosts compete for all of the machine's processors, instead of reserving half of them for the primary and
    /// its clients.
    #[arg(long)]
    pub shared_processors: bool,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub common: Common,
}

/// Runs the subcommand. Returns whether every compared replica was equal.
///
/// # Errors
/// A network could not be created, a primary not be filled, or the run not be kept. A failed sync is noted, and the
/// next one is tried.
pub fn run(options: &Options) -> Result<bool> {
    let program = Program::build()?;
    let mut kept = Kept::begin("feel", options.common.label.as_deref());
    let budget = options.common.budget();
    let most = options.replicas.iter().copied().max().unwrap_or(1);
    kept.note(match options.shared_processors {
        true => "All hosts compete for all processors.",
        false => {
            "Where there are hosts, half of the processors are the primary's and its clients', the rest all replicas'."
        }
    });
    if let Some(name) = &options.congestion {
        kept.note(format!("Where there are hosts, their congestion control is {name}."));
    }
    let mut left = options.networks.len() * options.servers.len();
    for network in &options.networks {
        for server in &options.servers {
            let place = if options.shared_processors { network.place(most) } else { network.place_apart(most) }?;
            if let Some(name) = &options.congestion {
                place.congestion(name)?;
            }
            kept.links.push(network.measure(&place)?);
            let shape = Shape { keys: options.values, value_bytes: VALUE_BYTES, content: Content::Strings };
            eprintln!("{network}: filling a primary");
            let mut scene = Scene::at(&place, &program, server.kind(), shape)?;
            Load::prepare(scene.primary())?;
            let name = format!("{} ({})", server.kind(), scene.primary().version()?);
            let budget = budget.part(left);
            left -= 1;
            let mut here = Here { options, place, network: *network, name, kept: &mut kept };
            for round in 0..options.common.rounds {
                for (method, replicas) in here.trials(*server, &program, round) {
                    let what = format!("{}, {network}, N = {replicas}, {}", here.name, name_of(method));
                    if !budget.has(LONGEST_USUAL) {
                        here.kept.note(format!("{what}, round {}: left out for want of time", round + 1));
                        continue;
                    }
                    if let Err(error) = here.trial(&mut scene, method, replicas, round) {
                        here.kept.note(format!("{what}, round {}: failed: {error}", round + 1));
                    }
                    let summary = cells::table(&[&*here.kept]);
                    here.kept.keep(options.common.out.as_deref(), &summary)?;
                }
            }
        }
    }
    print!("{}", cells::table(&[&kept]));
    Ok(kept.points.iter().all(|point| point.equal != Some(false)))
}

struct Here<'a> {
    options: &'a Options,
    place: Place,
    network: Network,
    name: String,
    kept: &'a mut Kept<Point>,
}

impl Here<'_> {
    /// The order of trials: without replicas, then every method for every number of replicas. Each round begins at
    /// another place of that order.
    fn trials(&self, server: ServerChoice, program: &Program, round: usize) -> Vec<(Option<Method>, usize)> {
        let mut trials = vec![(None, 0)];
        for replicas in &self.options.replicas {
            for method in &self.options.methods {
                if self.network.suits(*method, server.kind(), *replicas, program) {
                    trials.push((Some(*method), *replicas));
                }
            }
        }
        let count = trials.len();
        trials.rotate_left(round % count);
        trials
    }

    fn trial(&mut self, scene: &mut Scene, method: Option<Method>, replicas: usize, round: usize) -> Result<()> {
        let mut loads = vec![("near", Load::start(scene.primary(), None, self.options.rate)?)];
        if let Some(host) = self.place.client() {
            loads.push(("far", Load::start(scene.primary(), Some(host), self.options.rate)?));
        }
        let mut felt = Vec::new();
        let mut end = |window| {
            for (clients, load) in loads.drain(..) {
                felt.push((clients, load.end(window)?));
            }
            Ok(())
        };
        let (window, outcome) = match method {
            None => {
                let begun = Instant::now();
                thread::sleep(IDLE_TIME);
                let window = (begun, begun + IDLE_TIME);
                end(window)?;
                (window, None)
            }
            Some(method) => {
                let compare = self.options.common.compare.is_due(round);
                let trial = Trial { method, replicas, writes: None, compare };
                let window_of = |outcome: &Outcome| outcome.window.ok_or("the sync does not say when it was");
                // The clients write, and stop before the replicas are compared.
                let outcome = scene.play_then(&trial, &|_, _| {}, &mut |outcome| end(window_of(outcome)?))?;
                (window_of(&outcome)?, Some(outcome))
            }
        };
        for difference in outcome.iter().flat_map(|outcome| &outcome.differences) {
            self.kept.note(format!("{}, N = {replicas}, {}: NOT EQUAL: {difference}", self.network, name_of(method)));
        }
        for (clients, felt) in felt {
            let seconds = (window.1 - window.0).as_secs_f64();
            eprintln!(
                "{}, N = {replicas}, {}: {seconds:.1} s, {clients}: {:.0}/s, p99 {:.2} ms, p99.9 {:.2} ms",
                self.network,
                name_of(method),
                felt.per_second,
                felt.p99,
                felt.p999
            );
            self.kept.points.push(Point {
                server: self.name.clone(),
                network: self.network.to_string(),
                bytes: scene.shape().bytes(),
                clients: clients.to_owned(),
                asked: self.options.rate,
                method,
                replicas,
                round,
                seconds,
                felt,
                source_memory: outcome.as_ref().map(|outcome| outcome.source_memory).filter(|bytes| *bytes > 0),
                agent_memory: outcome.as_ref().map(|outcome| outcome.agent_memory.clone()).unwrap_or_default(),
                equal: outcome.as_ref().and_then(|outcome| outcome.equal),
            });
        }
        Ok(())
    }
}

/// How long the clients are watched without a sync.
const IDLE_TIME: Duration = Duration::from_secs(5);

/// No sync begins if less time is left.
const LONGEST_USUAL: Duration = Duration::from_secs(20);
