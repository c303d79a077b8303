//! The time to make N replicas, and its costs: Remora against the servers' own replication and a copier.
//!
//! For each server and shape of data a primary is filled once. Each round then runs every method in turn on fresh,
//! empty servers, so that a slow minute of the machine affects all of them. The first method changes from round to
//! round.
//!
//! ```text
//! cargo run --release -p remora-bench --bin full_sync -- --rounds 5 --budget-minutes 120 --out bench/runs
//! cargo run --release -p remora-bench --bin full_sync -- --rounds 1 --divide 50       # a look, in two minutes
//! ```

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::{Parser, ValueEnum};
use remora_bench::Run;
use remora_bench::sync::{Compare, Method, Program, Result, Samples, Scene, Shape, Taken, Trial};
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
    budget_minutes: Option<u64>,
    /// Servers to measure.
    #[arg(long, value_delimiter = ',', default_value = "redis,valkey")]
    servers: Vec<ServerChoice>,
    /// Shapes of the data: 256 × 3.66 MiB, 900 k × 1 KiB, 4 M × 100 B.
    #[arg(long, value_delimiter = ',', default_value = "large,medium,small")]
    shapes: Vec<ShapeChoice>,
    /// Divide the number of keys by this.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..))]
    divide: u64,
    /// Numbers of replicas.
    #[arg(long, value_delimiter = ',', default_value = "1,3")]
    replicas: Vec<usize>,
    /// Methods.
    #[arg(long, value_delimiter = ',', default_values_t = METHODS.map(MethodName))]
    methods: Vec<MethodName>,
    /// When to compare the replicas with the primary, which takes seconds each.
    #[arg(long, default_value = "first")]
    compare: Compare,
    /// Keep the run in a new folder below this one.
    #[arg(long)]
    out: Option<PathBuf>,
    /// Write everything as JSON to this file.
    #[arg(long)]
    json: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum ServerChoice {
    Redis,
    Valkey,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum ShapeChoice {
    Large,
    Medium,
    Small,
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

impl ServerChoice {
    fn kind(self) -> Kind {
        match self {
            ServerChoice::Redis => Kind::Redis7,
            ServerChoice::Valkey => Kind::Valkey9,
        }
    }
}

impl ShapeChoice {
    fn name(self) -> &'static str {
        match self {
            ShapeChoice::Large => "256 × 3.66 MiB",
            ShapeChoice::Medium => "900 k × 1 KiB",
            ShapeChoice::Small => "4 M × 100 B",
        }
    }

    fn shape(self, divide: u64) -> Shape {
        let (keys, value_bytes) = match self {
            ShapeChoice::Large => (256, 3748 << 10),
            ShapeChoice::Medium => (900_000, 1 << 10),
            ShapeChoice::Small => (4_000_000, 100),
        };
        Shape { keys: (keys / divide).max(1), value_bytes, every_type: false }
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
        let scenes: Vec<(Kind, ShapeChoice)> = (self.options.servers.iter())
            .flat_map(|server| self.options.shapes.iter().map(|shape| (server.kind(), *shape)))
            .collect();
        for (number, (kind, shape)) in scenes.iter().enumerate() {
            let left = self.time_left().map(|left| left / u32::try_from(scenes.len() - number).unwrap_or(1));
            self.scene(*kind, *shape, left.map(|left| Instant::now() + left))?;
        }
        Ok(())
    }

    fn time_left(&self) -> Option<Duration> {
        let budget = Duration::from_secs(60 * self.options.budget_minutes?);
        Some(budget.saturating_sub(self.begun.elapsed()))
    }

    /// Runs all rounds on one primary.
    fn scene(&mut self, kind: Kind, shape: ShapeChoice, deadline: Option<Instant>) -> Result<()> {
        eprintln!("{kind}, {}: filling a primary", shape.name());
        let middle = deadline.map(|deadline| Instant::now() + deadline.saturating_duration_since(Instant::now()) / 2);
        let mut scene = Scene::set(&self.program, kind, shape.shape(self.options.divide))?;
        let server = format!("{kind} ({})", scene.primary().version()?);
        let mut longest = Duration::ZERO;
        for round in 0..self.options.rounds {
            if round > 0 && deadline.is_some_and(|deadline| Instant::now() + longest > deadline) {
                let left = self.options.rounds - round;
                self.note(format!("{server}, {}: the last {left} rounds left out for want of time", shape.name()));
                break;
            }
            let begun = Instant::now();
            self.round(&mut scene, &server, shape, round, middle.zip(deadline))?;
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
        shape: ShapeChoice,
        round: usize,
        times: Option<(Instant, Instant)>,
    ) -> Result<()> {
        let kind = scene.primary().kind();
        let compare = self.options.compare.is_due(round);
        for replicas in self.options.replicas.clone() {
            for method in self.order(round).into_iter().filter(|method| method.applies(kind, replicas)) {
                if times.is_some_and(|(_, deadline)| Instant::now() > deadline) {
                    let what = format!("{server}, {}, N = {replicas}, {}", shape.name(), method.name());
                    self.note(format!("{what}, round {}: left out for want of time", round + 1));
                    continue;
                }
                let compare = compare && times.is_none_or(|(middle, _)| Instant::now() < middle);
                let trial = Trial { method, replicas, writes: None, compare };
                let outcome = scene.play(&trial, &|_, _| {})?;
                eprintln!(
                    "round {} of {}: N = {replicas}, {}: {:.2} s{}",
                    round + 1,
                    self.options.rounds,
                    method.name(),
                    outcome.seconds,
                    if outcome.equal == Some(false) { ", NOT EQUAL" } else { "" }
                );
                let (server, shape) = (server.to_owned(), shape.name().to_owned());
                self.samples.0.push(Taken { server, kind, shape, round, outcome });
            }
        }
        Ok(())
    }

    /// The order of the methods in a round: each round begins with another one. A late joiner follows those whose
    /// snapshot it joins.
    fn order(&self, round: usize) -> Vec<Method> {
        let is_late = |method: &Method| *method == Method::RemoraLate;
        let (late, mut others): (Vec<Method>, Vec<Method>) =
            self.options.methods.iter().map(|name| name.0).partition(is_late);
        let count = others.len().max(1);
        others.rotate_left(round % count);
        let place =
            others.iter().position(|method| *method == Method::RemoraShm).map_or(others.len(), |place| place + 1);
        others.splice(place..place, late);
        others
    }

    fn finish(mut self) -> Result<ExitCode> {
        if self.options.divide > 1 {
            self.run.notes.push(format!("Only a {}th of the keys: do not quote these figures.", self.options.divide));
        }
        let notes: String = self.run.notes.iter().map(|note| format!("\n> {note}\n")).collect();
        let summary = self.samples.summary() + &notes;
        print!("{summary}");
        let json = serde_json::json!({ "run": self.run, "samples": self.samples });
        if let Some(path) = &self.options.json {
            std::fs::write(path, serde_json::to_vec_pretty(&json)?)?;
        }
        if let Some(folder) = &self.options.out {
            let files = [
                ("raw.csv", self.samples.raw()),
                ("summary.md", summary),
                ("run.json", serde_json::to_string_pretty(&json)?),
            ];
            println!("\nkept in {}", self.run.keep_files(folder, &files)?.display());
        }
        Ok(if self.samples.keep_promises() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
    }
}

/// Every choice.
const METHODS: [Method; 10] = [
    Method::OwnDefault,
    Method::OwnBest,
    Method::OwnTogether,
    Method::OwnDual,
    Method::Copier,
    Method::RemoraDefault,
    Method::RemoraShm,
    Method::RemoraLate,
    Method::RemoraTcp,
    Method::RemoraModule,
];
