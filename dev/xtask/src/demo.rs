//! The demonstration: the same data, writer and three empty servers, once with Remora and once with the servers' own
//! replication.
//!
//! ```text
//!   for each server:   fresh primary ── fill
//!     for each method:   settings ──▶ three fresh empty servers ── writer on ── method ──▶ caught up ── writer off ── compare
//! ```
//!
//! The demonstration is not a benchmark. Each method runs once; `make bench` runs them in turn, several times, and
//! gives medians. What is promised of the servers' default settings is played again, in turn, while the two are too
//! close to tell ([`OPEN`]).

use std::path::PathBuf;
use std::time::Instant;

use clap::ValueEnum;
use remora_agent::transports::verdicts;
use remora_agent::units::{Size, readable};
use remora_bench::bars::{Bar, Chart, Family, Group};
use remora_bench::sync::{Content, Method, Outcome, Program, Result, Scene, Setting, Shape, Trial};
use remora_bench::{Machine, Spread};
use remora_lab::Kind;
use serde::Serialize;

use crate::process::{Screen, lay_out};

/// Command-line arguments.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Options {
    /// Size of the data: random values of 3.66 MiB each. A set of every type is added. The kept measurements have
    /// 937MiB.
    #[arg(long, value_name = "SIZE", default_value = "256MiB", value_parser = parse_size)]
    size: Size,

    /// Which servers to use.
    #[arg(long, value_name = "WHICH", default_value = "both")]
    server: Which,

    /// Number of replicas.
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u8).range(1..=16))]
    replicas: u8,

    /// Commands per second that change the primary meanwhile.
    #[arg(long, value_name = "N", default_value_t = 2000)]
    writes: u64,

    /// Where the picture of the results is put.
    #[arg(long, value_name = "FILE", default_value = "target/demo.svg")]
    picture: PathBuf,

    /// Also write all results as JSON to this file.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// The kinds of server to use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Which {
    /// Redis 7.
    Redis,
    /// Valkey 9.1.
    Valkey,
    /// One after the other.
    Both,
}

impl Which {
    /// Them, in order.
    pub(crate) fn kinds(self) -> Vec<Kind> {
        match self {
            Which::Redis => vec![Kind::Redis7],
            Which::Valkey => vec![Kind::Valkey9],
            Which::Both => Kind::ALL.to_vec(),
        }
    }
}

/// All results, as `--json` writes them.
#[derive(Serialize)]
pub(crate) struct Report {
    machine: Machine,
    /// Which transports this machine has, or what is missing for them.
    transports: Vec<(&'static str, String)>,
    remora: String,
    values: u64,
    value_bytes: u64,
    replicas: u8,
    writes_per_second: u64,
    servers: Vec<ServerReport>,
}

#[derive(Serialize)]
struct ServerReport {
    server: String,
    outcomes: Vec<Entry>,
    /// The further rounds of [`PROMISED`].
    again: Vec<Entry>,
}

#[derive(Serialize)]
struct Entry {
    primary_settings: Vec<Setting>,
    replica_settings: Vec<Setting>,
    #[serde(flatten)]
    outcome: Outcome,
}

/// Runs the demonstration and prints the table on stdout.
pub(crate) fn run(options: &Options) -> Result<()> {
    let begun = Instant::now();
    let screen = Screen::new();
    let kinds = options.server.kinds();
    let program = screen.build_for(&kinds)?;
    let demo = Demo { options, screen, program };
    let mut report = Report {
        machine: Machine::here(),
        transports: verdicts().into_iter().map(|(kind, verdict)| (kind.name(), verdict)).collect(),
        remora: demo.program.version()?,
        values: options.shape().keys,
        value_bytes: VALUE_BYTES,
        replicas: options.replicas,
        writes_per_second: options.writes,
        servers: Vec::new(),
    };
    for kind in kinds {
        report.servers.push(demo.server(kind)?);
    }
    print!("{}", report.text());
    let chart = report.chart();
    println!("{}", chart.text());
    if let Some(folder) = options.picture.parent() {
        std::fs::create_dir_all(folder)?;
    }
    chart.draw(&options.picture)?;
    println!("the same as a picture: {}", options.picture.display());
    if let Some(path) = &options.json {
        std::fs::write(path, serde_json::to_vec_pretty(&report)?)?;
        println!("written to {}", path.display());
    }
    for line in report.promises() {
        println!("{line}");
    }
    println!("{} in all", readable(begun.elapsed()));
    report.verdict()
}

impl Options {
    fn shape(&self) -> Shape {
        let keys = (self.size.get() + VALUE_BYTES / 2) / VALUE_BYTES;
        Shape { keys: keys.max(1), value_bytes: VALUE_BYTES, content: Content::StringsAndEveryType }
    }
}

struct Demo<'a> {
    options: &'a Options,
    screen: Screen,
    program: Program,
}

impl Demo<'_> {
    fn server(&self, kind: Kind) -> Result<ServerReport> {
        let shape = self.options.shape();
        let mut scene = {
            let _busy = self.screen.busy(&format!("{kind}: filling a primary with {}", Size::bytes(shape.bytes())));
            Scene::set(&self.program, kind, shape)?
        };
        let server = format!("{} {}", family(kind), scene.primary().version()?);
        let mut report = ServerReport { server, outcomes: Vec::new(), again: Vec::new() };
        for method in METHODS.into_iter().filter(|method| method.applies(kind, self.options.replicas.into())) {
            report.outcomes.push(self.method(&mut scene, method)?);
        }
        while report.is_open() {
            for method in PROMISED {
                report.again.push(self.method(&mut scene, method)?);
            }
        }
        Ok(report)
    }

    fn method(&self, scene: &mut Scene, method: Method) -> Result<Entry> {
        let (kind, replicas) = (scene.primary().kind(), usize::from(self.options.replicas));
        self.screen.say(&format!("{kind}: {}", method.name()));
        let bars = self.screen.replicas(replicas, self.options.shape().bytes());
        let trial = Trial { method, replicas, writes: Some(self.options.writes), compare: true };
        let outcome = scene.play(&trial, &|number, sight| bars.saw(number, sight))?;
        drop(bars);
        for difference in &outcome.differences {
            self.screen.say(&format!("  DIFFERENT: {difference}"));
        }
        let verdict = if outcome.equal == Some(true) { "all equal" } else { "NOT EQUAL" };
        self.screen.say(&format!("  {:.2} s until {} caught up, {verdict}", outcome.seconds, count(replicas)));
        Ok(Entry {
            primary_settings: method.primary_settings(kind, replicas),
            replica_settings: method.replica_settings(kind),
            outcome,
        })
    }
}

impl Report {
    fn text(&self) -> String {
        let Machine { processor, memory, system, load, .. } = &self.machine;
        // The three averages. The other fields of the kernel's line are not needed.
        let load = load.split_whitespace().take(3).collect::<Vec<_>>().join(" ");
        let size = Size::bytes(self.values * self.value_bytes);
        let mut text = format!(
            "\n{}: {} values of {} ({size}) and a set of every type; {}; {} writes/s meanwhile\n\
             on {processor}, {memory}, {system}; load at the beginning {load}; everything on this machine, over loopback\n\n",
            self.remora,
            self.values,
            Size::bytes(self.value_bytes),
            count(self.replicas.into()),
            self.writes_per_second,
        );
        let rows: Vec<Vec<String>> = self.servers.iter().flat_map(ServerReport::rows).collect();
        text.push_str(&lay_out(&HEAD, TEXT_COLUMNS, &rows));
        text.push_str(LEGEND);
        text.push_str(
            "Transports of this machine (all agents ran on it, and read by shared memory unless the row says tcp):\n",
        );
        for (kind, verdict) in &self.transports {
            text.push_str(&format!("  {kind:<6} {verdict}\n"));
        }
        text.push('\n');
        for server in &self.servers {
            for entry in &server.outcomes {
                let name = entry.outcome.method.name();
                text.push_str(&format!("  {}, {name}: {}\n", server.server, entry.settings()));
            }
        }
        text
    }

    /// Seconds until the last replica had caught up, as bars.
    fn chart(&self) -> Chart {
        let group = |server: &ServerReport| {
            let slowest = server.seconds(Method::OwnDefault);
            let bar = |entry: &Entry| {
                let method = entry.outcome.method;
                let figure = server.seconds(method)?;
                let family = if method.is_own() { Family::Own } else { Family::Ours };
                let share = slowest.map_or(String::new(), |slowest| format!("{:.2}", figure.median / slowest.median));
                Some(Bar { name: method.name().to_owned(), family, figure, note: share })
            };
            Group { title: server.server.clone(), bars: server.outcomes.iter().filter_map(bar).collect() }
        };
        Chart {
            title: format!(
                "Seconds until {} caught up; of own replication with default settings",
                have(self.replicas.into())
            ),
            unit: "s",
            notes: "of replication, defaults",
            groups: self.servers.iter().map(group).collect(),
        }
    }

    /// Says for each server what Remora promises of default settings: no more time than own replication, and one copy.
    fn promises(&self) -> Vec<String> {
        let of_server = |server: &ServerReport| {
            let [ours, own] = PROMISED.map(|method| server.cost(method));
            Some(promise(&server.server, ours?, own?))
        };
        self.servers.iter().filter_map(of_server).collect()
    }

    /// A demonstration fails if a replica differs from its primary.
    fn verdict(&self) -> Result<()> {
        let outcomes = self.servers.iter().flat_map(|server| server.outcomes.iter().chain(&server.again));
        let wrong = outcomes.filter(|entry| entry.outcome.equal != Some(true)).count();
        if wrong == 0 {
            Ok(())
        } else {
            Err(format!("in {wrong} of the rows above a replica differs from its primary").into())
        }
    }
}

impl ServerReport {
    /// What was played of a method, its first round first.
    fn rounds(&self, method: Method) -> impl Iterator<Item = &Outcome> {
        let all = self.outcomes.iter().chain(&self.again).map(|entry| &entry.outcome);
        all.filter(move |outcome| outcome.method == method)
    }

    fn seconds(&self, method: Method) -> Option<Spread> {
        Spread::of(self.rounds(method).map(|outcome| outcome.seconds))
    }

    /// Whether another round of [`PROMISED`] may tell more.
    fn is_open(&self) -> bool {
        let [ours, own] = PROMISED.map(|method| self.cost(method));
        let (Some(ours), Some(own)) = (ours, own) else { return false };
        ours.rounds < MOST_ROUNDS && (ours.seconds.median - own.seconds.median).abs() < OPEN
    }

    fn cost(&self, method: Method) -> Option<Cost> {
        let after_fork = |outcome: &Outcome| outcome.seconds - outcome.phases.snapshot;
        Some(Cost {
            rounds: self.rounds(method).count(),
            seconds: self.seconds(method)?,
            after_fork: Spread::of(self.rounds(method).map(after_fork))?.median,
            most_copies: self.rounds(method).map(|outcome| outcome.full_copies).max()?,
        })
    }

    fn rows(&self) -> Vec<Vec<String>> {
        self.outcomes.iter().map(|entry| row(&self.server, &entry.outcome)).collect()
    }
}

impl Entry {
    fn settings(&self) -> String {
        let list = |settings: &[Setting]| match settings {
            [] => "default settings".to_owned(),
            some => some.iter().map(|(name, value)| format!("{name} {value}")).collect::<Vec<_>>().join(", "),
        };
        format!("primary {}; replicas {}", list(&self.primary_settings), list(&self.replica_settings))
    }
}

/// What the rounds of a method cost.
#[derive(Clone, Copy)]
struct Cost {
    rounds: usize,
    seconds: Spread,
    /// The median without the time until the snapshot's first bytes, which is the server's delay before it forks.
    after_fork: f64,
    most_copies: u64,
}

/// Whether Remora took no longer than own replication, both with the servers' default settings, and how many copies the
/// primary made at most. What was not kept stands in capitals.
fn promise(server: &str, ours: Cost, own: Cost) -> String {
    let ratio = ours.seconds.median / own.seconds.median;
    let time = match ratio <= 1.0 {
        true => "not slower than",
        false if ours.seconds.low <= own.seconds.high && ours.rounds > 1 => "within the spread of",
        false => "SLOWER than",
    };
    let copies = if ours.most_copies <= 1 { "one copy" } else { "MORE THAN ONE COPY" };
    let seconds = |spread: &Spread| match ours.rounds {
        1 => format!("{:.2} s", spread.median),
        _ => format!("{:.2} s [{:.2}, {:.2}]", spread.median, spread.low, spread.high),
    };
    let rounds = match ours.rounds {
        1 => "one round".to_owned(),
        rounds => format!("medians of {rounds} rounds"),
    };
    format!(
        "{server}, default settings: Remora was {time} own replication ({}, {}, ratio {ratio:.2}; without the server's \
         delay before its fork {:.2} s, {:.2} s; {rounds}), and its primary made {copies} (sync_full {}, \
         own replication {})",
        seconds(&ours.seconds),
        seconds(&own.seconds),
        ours.after_fork,
        own.after_fork,
        ours.most_copies,
        own.most_copies
    )
}

fn row(server: &str, outcome: &Outcome) -> Vec<String> {
    let seconds = |seconds: f64| format!("{seconds:.2}");
    let each: Vec<String> = outcome.replica_cpu.iter().map(|cpu| format!("{cpu:.1}")).collect();
    let phases = &outcome.phases;
    let equal = if outcome.equal == Some(true) { "yes" } else { "NO" };
    vec![
        server.to_owned(),
        outcome.method.name().to_owned(),
        seconds(outcome.seconds),
        seconds(outcome.primary_cpu),
        each.join(" "),
        seconds(outcome.agents_cpu),
        seconds(phases.snapshot),
        seconds(phases.transfer),
        seconds(phases.load),
        seconds(phases.catch_up),
        format!("{:.0}", outcome.primary_bytes as f64 / f64::from(1 << 20)),
        equal.to_owned(),
    ]
}

fn count(replicas: usize) -> String {
    if replicas == 1 { "1 replica".to_owned() } else { format!("{replicas} replicas") }
}

fn have(replicas: usize) -> String {
    if replicas == 1 { "1 replica has".to_owned() } else { format!("{replicas} replicas have") }
}

fn family(kind: Kind) -> &'static str {
    match kind {
        Kind::Redis7 => "Redis",
        Kind::Valkey9 => "Valkey",
    }
}

fn parse_size(text: &str) -> std::result::Result<Size, String> {
    text.parse().map_err(|error: remora_agent::units::UnitError| error.to_string())
}

/// What is promised of the servers' default settings, and what it is compared with.
const PROMISED: [Method; 2] = [Method::RemoraDefault, Method::OwnDefault];

/// How often these are played at most: what two rounds leave open is called so.
const MOST_ROUNDS: usize = 2;

/// Seconds: with a smaller difference they are played again. With default settings a server waits for 5 s before it
/// forks, and counts in whole seconds: a single round is up to a second longer or shorter by chance.
const OPEN: f64 = 1.0;

/// In this order: each of our methods beside the rival with the same settings of the primary. The sealed one does what
/// agents on several hosts do without an option: replicas feed each other with ciphertext.
const METHODS: [Method; 8] = [
    Method::RemoraTuned,
    Method::RemoraDefault,
    Method::OwnDefault,
    Method::RemoraShm,
    Method::RemoraRelaySealed,
    Method::OwnBest,
    Method::OwnTogether,
    Method::OwnDual,
];

/// The size of a value in the project's first measurements: 256 of them are 937 MiB.
const VALUE_BYTES: u64 = 3748 << 10;

const HEAD: [&str; 12] = [
    "server",
    "method",
    "wall s",
    "primary CPU",
    "replicas' CPU",
    "agents' CPU",
    "snapshot",
    "transfer",
    "load",
    "catch-up",
    "MiB out",
    "equal",
];

/// The first columns are text.
const TEXT_COLUMNS: usize = 2;

const LEGEND: &str = "
  wall s: from the first REPLICAOF, or the start of the first `remora replica`, until the last replica has caught up with the
  primary (its link is up, and it has reached the primary's offset of that moment). CPU: processor seconds, of the primary with
  its fork children and the writer's commands, of each replica, of all agents together (the source's from its start). Phases of
  the last replica: snapshot, until its first bytes arrive; transfer, until the last arrive (it loads meanwhile); load, the rest
  of the load; catch-up, until it has caught up. MiB out: bytes that left the primary. equal: DEBUG DIGEST, replid, offset,
  functions, expiries. Sealed: as between hosts, with TLS and a token, and encrypted slots; the other rows are in plaintext, as
  agents on loopback are by default. Where default settings without tuning were played several times, their rows show the first
  round, and bars and promise the medians.

";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_demonstration_says_whether_default_settings_kept_what_is_promised() {
        let of = |seconds: &[f64], most_copies| {
            let (rounds, seconds) = (seconds.len(), Spread::of(seconds.iter().copied()).expect("some rounds"));
            Cost { rounds, seconds, after_fork: seconds.median - 5.0, most_copies }
        };
        let kept = promise("Redis 7.0.15", of(&[6.0, 7.0, 11.0], 1), of(&[9.0, 10.0, 10.5], 3));
        assert!(kept.contains("not slower") && kept.contains("ratio 0.70") && kept.contains("one copy"), "{kept}");
        assert!(kept.contains("7.00 s [6.00, 11.00], 10.00 s [") && kept.contains("medians of 3 rounds"), "{kept}");
        assert!(kept.contains("7.00 s [6.00, 11.00]") && kept.contains("fork 2.00 s, 5.00 s"), "{kept}");
        let close = promise("Redis 7.0.15", of(&[8.3, 8.5, 8.7], 1), of(&[8.2, 8.4, 8.6], 3));
        assert!(close.contains("Remora was within the spread of own replication (8.50 s"), "{close}");
        let missed = promise("Redis 7.0.15", of(&[16.0], 2), of(&[8.0], 3));
        assert!(missed.contains("(16.00 s, 8.00 s, ratio 2.00;") && missed.contains("one round"), "{missed}");
        assert!(missed.contains("SLOWER than") && missed.contains("MORE THAN ONE COPY (sync_full 2"), "{missed}");
    }
}
