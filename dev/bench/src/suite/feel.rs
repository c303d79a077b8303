//! `remora-bench feel`: what the primary's clients notice while N replicas are made by each method.
//!
//! Two groups of clients send commands at the same time at a steady rate. *Near* clients run on the primary's own host:
//! they notice its processor, its forks and its main thread. *Far* clients run on a separate host: they also notice its
//! cable. Loopback has only near clients.
//!
//! Half of the machine's processors are for the primary's host and its clients, the rest for all replicas, whose work
//! does not affect the clients. The clients, which measure, have priority over all other processes on their processors
//! ([`Load`]).

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use remora_lab::{Address, Client, Host, Random, Server};
use serde::{Deserialize, Serialize};

use super::Kept;
use super::report::tables;
use super::{Common, Network, ServerChoice, VALUE_BYTES, name_of};
use crate::sync::{Content, Method, Outcome, Place, Program, Result, Scene, Shape, Trial};
use crate::{Background, quantile};

pub use super::FeelPoint as Point;

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
                    let summary = tables::felt(&[&*here.kept]);
                    here.kept.keep(options.common.out.as_deref(), &summary)?;
                }
            }
        }
    }
    print!("{}", tables::felt(&[&kept]));
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

// What a primary's clients notice: GETs and SETs at a given rate, each timed, and cut to a window afterwards.
//
// ```text
//   due ──┬──────┬──────┬──────┬──▶        the rate does not depend on the server: a command that could not be sent when it
//         │ 80 µs│ 80 µs│ 30 ms ......       was due, because the previous one was unanswered, counts from when it was due
// ```
//
// So a stall of 30 ms delays every command that was due in these 30 ms, as it would in practice. A generator that
// waits for each answer before it schedules the next command would count one slow command. The time by which the
// generator itself wakes up late is not counted, since it does not depend on the server.
//
// The threads have priority over all others on their processor: a client on a machine that also runs the other hosts
// must not wait for a turn that the client's own machine would give it.
//
// This is our own tool, because common ones either wait (redis-benchmark) or are in no distribution, and none cuts to
// a window.

/// A running load.
pub struct Load {
    begun: Instant,
    threads: Vec<Background<Result<Vec<Beat>>>>,
}

/// One command.
#[derive(Clone, Copy, Debug)]
struct Beat {
    /// When it was due, in µs since the load began.
    due: u64,
    /// The time until its answer, in µs.
    took: u32,
}

/// What the clients noticed in a window.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ClientLatency {
    /// Commands answered per second.
    pub per_second: f64,
    /// The median latency, in milliseconds.
    pub p50: f64,
    /// The 99th percentile, in milliseconds.
    pub p99: f64,
    /// The 99.9th percentile, in milliseconds.
    pub p999: f64,
    /// The greatest latency, in milliseconds.
    pub most: f64,
}

impl Load {
    /// Writes the keys that the load uses.
    pub fn prepare(server: &Server) -> Result<()> {
        let value = vec![b'x'; LOAD_VALUE_BYTES];
        let commands: Vec<Vec<Vec<u8>>> =
            (0..KEYS).map(|number| vec![b"SET".to_vec(), key(number), value.clone()]).collect();
        server.client()?.pipeline(&commands)?;
        Ok(())
    }

    /// Starts `per_second` commands per second on [`CONNECTIONS`] connections from that host, or from the server's own.
    pub fn start(server: &Server, from: Option<&Host>, per_second: u64) -> Result<Load> {
        let from = from.or(server.host());
        let address = Address::Tcp(server.address());
        let mut load = Load { begun: Instant::now(), threads: Vec::new() };
        for number in 0..CONNECTIONS {
            let client = match from {
                Some(host) => host.within(|| Client::connect(&address))??,
                None => Client::connect(&address)?,
            };
            let every = Duration::from_secs_f64(CONNECTIONS as f64 / per_second.max(1) as f64);
            let first = every.mul_f64(number as f64 / CONNECTIONS as f64);
            let clock = Clock { begun: load.begun, first, every };
            let host = from.cloned();
            load.threads.push(Background::start(move |is_over| {
                host.map_or(Ok(()), |host| host.keep_to_processors())?;
                beat(client, clock, number, is_over)
            }));
        }
        Ok(load)
    }

    /// Ends the load, and returns what the clients noticed between these moments.
    pub fn end(mut self, (from, to): (Instant, Instant)) -> Result<ClientLatency> {
        let mut beats = Vec::new();
        for thread in &mut self.threads {
            beats.extend(thread.end().ok_or("a client's thread panicked")??);
        }
        let micros = |moment: Instant| u64::try_from(moment.saturating_duration_since(self.begun).as_micros());
        let (from, to) = (micros(from)?, micros(to)?);
        felt(beats.into_iter().filter(|beat| (from..to).contains(&beat.due)), to.saturating_sub(from))
            .ok_or_else(|| "no command was due in the time of the sync".into())
    }
}

/// The schedule of a connection's commands.
#[derive(Clone, Copy)]
struct Clock {
    begun: Instant,
    first: Duration,
    every: Duration,
}

fn beat(mut client: Client, clock: Clock, number: u64, is_over: &AtomicBool) -> Result<Vec<Beat>> {
    // This thread only. Without the permission (root, as for test networks) it runs with the default priority.
    let _ = rustix::process::setpriority_process(None, BEFORE_ALL);
    let mut random = Random::new(number);
    let value = vec![b'y'; LOAD_VALUE_BYTES];
    let mut beats = Vec::new();
    let mut due = clock.first;
    while !is_over.load(Ordering::Relaxed) {
        let key = key(random.below(KEYS));
        let is_set = random.one_in(ONE_SET_IN);
        // From the due time if the connection was still waiting then, otherwise from the wake-up.
        let since = match due.checked_sub(clock.begun.elapsed()) {
            Some(early) => {
                thread::sleep(early);
                clock.begun.elapsed()
            }
            None => due,
        };
        if is_set {
            client.ok(&[b"SET".as_slice(), &key, &value])?;
        } else {
            client.bytes(&[b"GET".as_slice(), &key])?;
        }
        let took = clock.begun.elapsed().saturating_sub(since);
        beats.push(Beat { due: u64::try_from(due.as_micros())?, took: u32::try_from(took.as_micros())? });
        due += clock.every;
    }
    Ok(beats)
}

fn felt(beats: impl Iterator<Item = Beat>, micros: u64) -> Option<ClientLatency> {
    let mut times: Vec<f64> = beats.map(|beat| f64::from(beat.took) / 1e3).collect();
    times.sort_by(f64::total_cmp);
    Some(ClientLatency {
        per_second: times.len() as f64 / (micros as f64 / 1e6),
        p50: quantile(&times, 0.5)?,
        p99: quantile(&times, 0.99)?,
        p999: quantile(&times, 0.999)?,
        most: quantile(&times, 1.0)?,
    })
}

fn key(number: u64) -> Vec<u8> {
    format!("felt:{number}").into_bytes()
}

/// Connections of one load: enough that one slow answer does not delay all, few enough for two processors.
pub const CONNECTIONS: u64 = 8;

/// The highest priority of nice(2).
const BEFORE_ALL: i32 = -20;

/// Number of keys, and bytes of each: 10 MB beside the data set.
const KEYS: u64 = 10_000;
const LOAD_VALUE_BYTES: usize = 1 << 10;

/// One command in this many writes.
const ONE_SET_IN: u64 = 10;

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use remora_lab::require;

    use super::*;

    #[test]
    fn a_stalled_server_delays_all_commands_that_were_due_meanwhile() {
        let Some(kind) = require::redis() else { return };
        let mut server = Server::start(kind).unwrap();
        Load::prepare(&server).unwrap();
        let load = Load::start(&server, None, 1000).unwrap();
        let begun = Instant::now();
        thread::sleep(Duration::from_millis(300));
        server.pause().unwrap();
        thread::sleep(Duration::from_millis(300));
        server.resume().unwrap();
        thread::sleep(Duration::from_millis(400));
        let felt = load.end((begun, begun + Duration::from_secs(1))).unwrap();
        // 300 of 1000 were due during the stall: each waited for the rest of the 300 ms.
        assert!(felt.p99 > 150.0 && felt.most > 280.0, "{felt:?}");
        assert!(felt.per_second > 800.0, "{felt:?}");
    }

    #[test]
    fn only_commands_due_in_the_window_count() {
        let beats = [(5, 1000), (10, 2000), (19, 4000), (20, 9000)].map(|(due, took)| Beat { due, took });
        let inside = beats.into_iter().filter(|beat| (10..20).contains(&beat.due));
        let felt = felt(inside, 10).unwrap();
        assert_eq!((felt.most, felt.p50), (4.0, 3.0));
        assert!((felt.per_second - 200_000.0).abs() < 1e-6);
    }
}
