//! The time to make N replicas, and its costs: Remora against the servers' own replication, a copier and programs of
//! others.
//!
//! For each server and shape of data a primary is filled once. Each round then runs every method in turn on fresh,
//! empty servers, so that a slow minute of the machine affects all of them. The first method changes from round to
//! round.
//!
//! ```text
//! cargo run --release -p remora-bench --bin full_sync -- --rounds 5 --budget-minutes 120 --out bench/runs
//! cargo run --release -p remora-bench --bin full_sync -- --rounds 1 --divide 50       # a look, in two minutes
//! ```
//!
//! Scenes of the module (docs/explanation/module.md), each with `--methods own-best,remora-module`:
//!
//! ```text
//! … --shapes mix --replicas 1 --methods own-best,own-dual,remora-module,remora-module-late # small values of all types
//! … --shapes small --keys 100000,1000000,5000000,20000000 --replicas 1 # by the number of keys … --shapes small
//! --writes 50000 --replicas 1 # how long the fork child lives meanwhile ```

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::{Parser, ValueEnum};
use remora_bench::suite::ServerChoice;
use remora_bench::sync::{Compare, Content, Method, Program, Result, Samples, Scene, Shape, Taken, Trial};
use remora_bench::{Keep, Run};
use remora_lab::Kind;

/// Full synchronisation by every method. Exits with 1 if a target is missed or a replica differs.
#[derive(Parser, Debug)]
struct Options {
    /// Rounds; the figures are medians over them.
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Time limit in minutes, shared among servers and shapes. What does not fit is left out, comparisons first, and
    /// the kept run lists it.
    #[arg(long)]
    budget_minutes: Option<f64>,
    /// Servers to measure.
    #[arg(long, value_delimiter = ',', default_value = "redis,valkey")]
    servers: Vec<ServerChoice>,
    /// Shapes of the data: 256 × 3.66 MiB, 900 k × 1 KiB, 4 M × 100 B, 2 M small values of all types.
    #[arg(long, value_delimiter = ',', default_value = "large,medium,small")]
    shapes: Vec<ShapeChoice>,
    /// Divide the number of keys by this.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..))]
    divide: u64,
    /// Numbers of keys, in place of the shapes' own.
    #[arg(long, value_delimiter = ',', value_parser = clap::value_parser!(u64).range(1..))]
    keys: Vec<u64>,
    /// Commands per second with which a writer changes the primary meanwhile.
    #[arg(long)]
    writes: Option<u64>,
    /// Numbers of replicas.
    #[arg(long, value_delimiter = ',', default_value = "1,3")]
    replicas: Vec<usize>,
    /// Methods.
    #[arg(long, value_delimiter = ',', default_values_t = METHODS.map(MethodName))]
    methods: Vec<MethodName>,
    /// When to compare the replicas with the primary, which takes seconds each.
    #[arg(long, default_value = "first")]
    compare: Compare,
    #[command(flatten)]
    keep: Keep,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum ShapeChoice {
    Large,
    Medium,
    Small,
    Mix,
}

/// A shape, with the number of keys if it is not the shape's own.
#[derive(Clone, Debug)]
struct Data {
    shape: Shape,
    name: String,
}

/// A method as an argument of the command line.
#[derive(Clone, Copy, Debug)]
struct MethodName(Method);

impl std::str::FromStr for MethodName {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        Method::from_str(text, false).map(MethodName)
    }
}

impl std::fmt::Display for MethodName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.0.to_possible_value().as_ref().map_or("", |value| value.get_name()))
    }
}

impl ShapeChoice {
    /// `keys`: in place of its own number.
    fn data(self, divide: u64, keys: Option<u64>) -> Data {
        let (own, number, what, value_bytes) = match self {
            ShapeChoice::Large => (256, "256", "× 3.66 MiB", 3748 << 10),
            ShapeChoice::Medium => (900_000, "900 k", "× 1 KiB", 1 << 10),
            ShapeChoice::Small => (4_000_000, "4 M", "× 100 B", 100),
            ShapeChoice::Mix => (2_000_000, "2 M", "of all types", 0),
        };
        let content = if matches!(self, ShapeChoice::Mix) { Content::Mix } else { Content::Strings };
        let name = keys.map_or_else(|| format!("{number} {what}"), |keys| format!("{keys} {what}"));
        Data { shape: Shape { keys: keys.unwrap_or(own / divide).max(1), value_bytes, content }, name }
    }
}

fn main() -> Result<ExitCode> {
    let options = Options::parse();
    let program = Program::build()?;
    let mut bench =
        Bench { begun: Instant::now(), program, run: Run::new("full_sync", "s"), samples: Samples::default(), options };
    bench.run_all()?;
    bench.finish()
}

struct Bench {
    options: Options,
    begun: Instant,
    program: Program,
    run: Run,
    samples: Samples,
}

impl Bench {
    fn run_all(&mut self) -> Result<()> {
        for method in self.options.methods.iter().map(|name| name.0).collect::<Vec<_>>() {
            if let Some(why) = method.missing() {
                self.note(format!("NOT MEASURED: {}: {why}", method.name()));
            }
        }
        self.options.methods.retain(|name| name.0.missing().is_none());
        let keys: Vec<Option<u64>> = match self.options.keys.as_slice() {
            [] => vec![None],
            keys => keys.iter().copied().map(Some).collect(),
        };
        let divide = self.options.divide;
        let data = self.options.shapes.iter().flat_map(|shape| keys.iter().map(|keys| shape.data(divide, *keys)));
        let data: Vec<Data> = data.collect();
        let scenes: Vec<(Kind, &Data)> =
            (self.options.servers.iter()).flat_map(|server| data.iter().map(|data| (server.kind(), data))).collect();
        for (number, (kind, data)) in scenes.iter().enumerate() {
            let left = self.time_left().map(|left| left / u32::try_from(scenes.len() - number).unwrap_or(1));
            self.scene(*kind, data, left.map(|left| Instant::now() + left))?;
            // A run that is ended has what it has measured.
            self.keep()?;
        }
        Ok(())
    }

    fn time_left(&self) -> Option<Duration> {
        let budget = Duration::from_secs_f64(60.0 * self.options.budget_minutes?);
        Some(budget.saturating_sub(self.begun.elapsed()))
    }

    /// Runs all rounds on one primary.
    fn scene(&mut self, kind: Kind, data: &Data, deadline: Option<Instant>) -> Result<()> {
        eprintln!("{kind}, {}: filling a primary", data.name);
        let middle = deadline.map(|deadline| Instant::now() + deadline.saturating_duration_since(Instant::now()) / 2);
        let mut scene = Scene::set(&self.program, kind, data.shape)?;
        if self.options.writes.is_some() {
            // The default holds less than a fast writer sends while a server changes its primary: neither method would
            // end in step.
            scene.primary().configure("repl-backlog-size", BACKLOG_OF_A_WRITTEN_PRIMARY)?;
        }
        let server = format!("{kind} ({})", scene.primary().version()?);
        let mut longest = Duration::ZERO;
        for round in 0..self.options.rounds {
            if round > 0 && deadline.is_some_and(|deadline| Instant::now() + longest > deadline) {
                let left = self.options.rounds - round;
                self.note(format!("{server}, {}: the last {left} rounds left out for want of time", data.name));
                break;
            }
            let begun = Instant::now();
            self.round(&mut scene, &server, &data.name, round, middle.zip(deadline))?;
            longest = longest.max(begun.elapsed());
        }
        Ok(())
    }

    fn note(&mut self, text: String) {
        eprintln!("{text}");
        self.run.notes.push(text);
    }

    /// `times`: the first is the end of comparisons, the second the end of measurements.
    fn round(
        &mut self,
        scene: &mut Scene,
        server: &str,
        shape: &str,
        round: usize,
        times: Option<(Instant, Instant)>,
    ) -> Result<()> {
        let kind = scene.primary().kind();
        let compare = self.options.compare.is_due(round);
        for replicas in self.options.replicas.clone() {
            for method in self.order(round).into_iter().filter(|method| method.applies(kind, replicas)) {
                if times.is_some_and(|(_, deadline)| Instant::now() > deadline) {
                    let what = format!("{server}, {shape}, N = {replicas}, {}", method.name());
                    self.note(format!("{what}, round {}: left out for want of time", round + 1));
                    continue;
                }
                let compare = compare && times.is_none_or(|(middle, _)| Instant::now() < middle);
                let trial = Trial { method, replicas, writes: self.options.writes, compare };
                let outcome = match scene.play(&trial, &|_, _| {}) {
                    // Which servers it can read depends on its version: the other methods are measured all the same.
                    Err(error) if method == Method::RedisShake => {
                        let what = format!("{server}, {shape}, N = {replicas}, {}", method.name());
                        self.note(format!("{what}, round {}: failed: {error}", round + 1));
                        continue;
                    }
                    played => played?,
                };
                eprintln!(
                    "round {} of {}: N = {replicas}, {}: {:.2} s{}",
                    round + 1,
                    self.options.rounds,
                    method.name(),
                    outcome.seconds,
                    if outcome.equal == Some(false) { ", NOT EQUAL" } else { "" }
                );
                if let Some(remark) = outcome.remark() {
                    let what = format!("{server}, {shape}, N = {replicas}, {}", method.name());
                    self.note(format!("{what}, round {}: {remark}", round + 1));
                }
                let (server, shape) = (server.to_owned(), shape.to_owned());
                self.samples.0.push(Taken { server, kind, shape, round, outcome });
            }
        }
        Ok(())
    }

    /// The order of the methods in a round: each round begins with another one. A late joiner follows those whose
    /// snapshot it joins.
    fn order(&self, round: usize) -> Vec<Method> {
        let (late, mut others): (Vec<Method>, Vec<Method>) =
            self.options.methods.iter().map(|name| name.0).partition(|method| method.joins().is_some());
        let count = others.len().max(1);
        others.rotate_left(round % count);
        for late in late {
            let first = others.iter().position(|method| Some(*method) == late.joins());
            others.insert(first.map_or(others.len(), |place| place + 1), late);
        }
        others
    }

    /// Writes the run down, and returns its folder.
    fn keep(&self) -> Result<Option<PathBuf>> {
        let all = serde_json::json!({ "run": self.run, "samples": self.samples });
        Ok(self.options.keep.write(&self.run, self.summary(), &self.samples.0, &all)?)
    }

    fn summary(&self) -> String {
        self.samples.summary() + &self.run.quoted_notes()
    }

    fn finish(mut self) -> Result<ExitCode> {
        if self.options.divide > 1 {
            self.run.notes.push(format!("Only a {}th of the keys: do not quote these figures.", self.options.divide));
        }
        if let Some(rate) = self.options.writes {
            let achieved = self.samples.0.iter().map(|taken| taken.outcome.writes_per_second);
            let least = achieved.fold(f64::INFINITY, f64::min);
            let text = format!(
                "A writer sent {rate} commands a second to the primary; it achieved {least:.0} at least. The primary's \
                 repl-backlog-size was {BACKLOG_OF_A_WRITTEN_PRIMARY}."
            );
            self.run.notes.push(text);
        }
        print!("{}", self.summary());
        self.options.keep.said(self.keep()?);
        Ok(if self.samples.keep_promises() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
    }
}

/// The backlog of a primary that a writer changes meanwhile.
const BACKLOG_OF_A_WRITTEN_PRIMARY: &str = "256mb";

/// Every choice.
const METHODS: [Method; 14] = [
    Method::OwnDefault,
    Method::OwnBest,
    Method::OwnTogether,
    Method::OwnDual,
    Method::Copier,
    Method::RdbFile,
    Method::RedisShake,
    Method::RemoraDefault,
    Method::RemoraTuned,
    Method::RemoraShm,
    Method::RemoraLate,
    Method::RemoraTcp,
    Method::RemoraModule,
    Method::RemoraModuleLate,
];
