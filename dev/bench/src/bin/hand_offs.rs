//! Hand-offs beside a primary with default settings that is being written to: how many copies it makes.
//!
//! The primary has 70 values of 3.66 MiB. Clients write while six replicas are made at the same moment. Remora hands
//! each server over to the primary's own replication. A hand-off that comes too late costs the primary a second full
//! copy, and its counter `sync_full` shows that. So this program counts, and does not compare times.
//!
//! ```text
//! cargo run --release -p remora-bench --bin hand_offs -- --rounds 50 --out bench/runs
//! cargo run --release -p remora-bench --bin hand_offs -- --rounds 1 --servers redis --loads paced      # a look
//! ```

use std::process::{Command, ExitCode, Stdio};
use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

use clap::{Parser, ValueEnum};
use remora_bench::suite::ServerChoice;
use remora_bench::sync::{Compare, Content, Method, Outcome, Program, Result, Scene, Shape, Trial};
use remora_bench::{Background, Goal, Keep, Run, Sample, Spread, Target, distinct};
use remora_lab::process::Process;
use remora_lab::workload::{self, Workload};
use remora_lab::{Client, Kind, Server};

/// Hand-offs beside writes, with default settings. Exits with 1 if the primary made a second copy, refused a partial
/// resynchronisation, came near its output limit, or if a hand-off waited for the writes to end.
#[derive(Parser, Debug)]
struct Options {
    /// Rounds of each load.
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Servers.
    #[arg(long, value_delimiter = ',', default_value = "redis,valkey")]
    servers: Vec<ServerChoice>,
    /// What clients write meanwhile.
    #[arg(long, value_delimiter = ',', default_value = "paced,quick,burst,large")]
    loads: Vec<Load>,
    /// The method: Remora's, or a rival's for comparison.
    #[arg(long, default_value = "remora-default")]
    method: Method,
    /// Replicas that are made at the same moment.
    #[arg(long, default_value_t = 6)]
    replicas: usize,
    /// Values of 3.66 MiB in the primary.
    #[arg(long, default_value_t = 70)]
    values: u64,
    /// When to compare the replicas with the primary, by digest.
    #[arg(long, default_value = "first")]
    compare: Compare,
    #[command(flatten)]
    keep: Keep,
}

/// What clients write while the replicas are made.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum Load {
    /// 2,000 values of 1,000 bytes a second.
    Paced,
    /// 2,000 values of 5,500 bytes a second.
    Quick,
    /// `redis-benchmark -d 4096 -P 16`, as fast as the server answers, from the fork on. It ends before the server's
    /// output limit would end every replica link.
    Burst,
    /// The same from the start and without an end. It is not judged: the server's output limit ends the links of every
    /// replica, until the writes are over.
    Endless,
    /// 2,000 commands of every kind a second, among them values of 1 to 4 MiB, which a backlog of 1 MiB cannot hold.
    Large,
}

impl Load {
    fn name(self) -> &'static str {
        match self {
            Load::Paced => "2 MB/s",
            Load::Quick => "11 MB/s",
            Load::Burst => "redis-benchmark -d 4096 -P 16, 195 MiB from the fork on",
            Load::Endless => "redis-benchmark -d 4096 -P 16",
            Load::Large => "2,000 commands/s, values to 4 MiB",
        }
    }
}

fn main() -> Result<ExitCode> {
    let options = Options::parse();
    let program = Program::build()?;
    let mut run = Run::new("hand_offs", "see the case");
    run.notes.push(format!(
        "{}: {} replicas at the same moment beside a primary with default settings and {} values of 3.66 MiB; everything on this \
         machine, over loopback. The greatest value of all rounds is the one that is judged.",
        options.method.name(),
        options.replicas,
        options.values
    ));
    for server in options.servers.clone() {
        measure(&options, &program, server.kind(), &mut run)?;
        judge(server.kind(), &mut run);
    }
    Ok(options.keep.finish(&run)?)
}

fn measure(options: &Options, program: &Program, kind: Kind, run: &mut Run) -> Result<()> {
    let shape = Shape { keys: options.values, value_bytes: VALUE_BYTES, content: Content::Strings };
    for load in options.loads.clone() {
        for round in 0..options.rounds {
            // A primary that has never had a replica, whose backlog is as small as it will ever be.
            let mut scene = Scene::set(program, kind, shape)?;
            let seen = play(&mut scene, options, load, round)?;
            eprintln!("{kind}, {}, round {} of {}: {seen}", load.name(), round + 1, options.rounds);
            seen.note(run, kind, load, round);
        }
    }
    Ok(())
}

/// What one round has shown.
struct Seen {
    seconds: f64,
    /// Full copies that the primary has begun (`sync_full`).
    full_copies: u64,
    /// Partial resynchronisations that the primary has refused (`sync_partial_err`).
    refused: u64,
    /// The largest output that the primary kept for one replica link, in bytes.
    kept: u64,
    /// Whether the clients had stopped before the last replica was in step. `None`: they stop by themselves.
    waited: Option<bool>,
    /// Bytes that the clients wrote meanwhile.
    written: u64,
    source_cpu: f64,
    agents_cpu: f64,
}

impl std::fmt::Display for Seen {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mib = |bytes: u64| bytes >> 20;
        write!(
            f,
            "{:.2} s, {} full copies, {} refused, at most {} MiB for one link, {} MiB written meanwhile",
            self.seconds,
            self.full_copies,
            self.refused,
            mib(self.kept),
            mib(self.written)
        )
    }
}

impl Seen {
    fn note(&self, run: &mut Run, kind: Kind, load: Load, round: usize) {
        let figures = [
            (FULL, self.full_copies as f64),
            (REFUSED, self.refused as f64),
            (KEPT, self.kept as f64 / f64::from(1 << 20)),
            ("seconds", self.seconds),
            ("MiB written meanwhile", self.written as f64 / f64::from(1 << 20)),
        ];
        let waited = self.waited.map(|waited| (WAITED, f64::from(u8::from(waited))));
        run.samples.extend(figures.into_iter().chain(waited).map(|(what, value)| {
            let sample = Sample::new(kind.to_string(), format!("{}: {what}", load.name()), round, value);
            sample.cost(self.agents_cpu - self.source_cpu, self.source_cpu, self.written as f64 / 1e9)
        }));
    }
}

fn play(scene: &mut Scene, options: &Options, load: Load, round: usize) -> Result<Seen> {
    let mut client = scene.primary().client()?;
    let before = Counters::read(&mut client)?;
    let mut outputs = watch_outputs(scene.primary())?;
    let mut writer = Some(Writer::start(load, scene.primary(), round)?);
    let trial = Trial {
        method: options.method,
        replicas: options.replicas,
        writes: None,
        compare: options.compare.is_due(round),
    };
    let mut after = None;
    let outcome: Outcome = scene.play_then(&trial, &|_, _| {}, &mut |_| {
        let waited = writer.as_mut().and_then(Writer::is_over);
        after = Some((Counters::read(&mut client)?, waited));
        // Replicas are compared when nobody writes.
        writer.take().map_or(Ok(()), Writer::stop)
    })?;
    if let Some(difference) = outcome.differences.first() {
        return Err(format!("a replica differs from its primary: {difference}").into());
    }
    let (after, waited) = after.ok_or("the sync was not measured")?;
    Ok(Seen {
        seconds: outcome.seconds,
        full_copies: after.full - before.full,
        refused: after.refused - before.refused,
        kept: outputs.end().ok_or("the thread that watches outputs panicked")??,
        waited,
        written: after.offset.saturating_sub(before.offset),
        source_cpu: outcome.source_cpu,
        agents_cpu: outcome.agents_cpu,
    })
}

/// One goal for each load and promise. The worst round counts, so it is the only value of the goal.
fn judge(kind: Kind, run: &mut Run) {
    let subject = kind.to_string();
    let of_server = run.samples.iter().filter(|sample| sample.subject == subject);
    let cases = distinct(of_server.map(|sample| sample.case.clone()));
    let is_judged = |case: &&String| !case.starts_with(&format!("{}: ", Load::Endless.name()));
    for case in cases.iter().filter(is_judged) {
        let Some((_, most)) = PROMISES.iter().find(|(what, _)| case.ends_with(what)) else { continue };
        let worst = run.of(&subject, case).map(|sample| sample.value).fold(f64::NEG_INFINITY, f64::max);
        let goal = Goal { what: format!("{subject}, {case}"), target: Target::most(*most), value: Spread::of([worst]) };
        run.goals.push(goal);
    }
}

/// Counters of the primary.
struct Counters {
    full: u64,
    refused: u64,
    offset: u64,
}

impl Counters {
    fn read(client: &mut Client) -> Result<Counters> {
        let stats = client.info("stats")?;
        let replication = client.info("replication")?;
        Ok(Counters {
            full: stats.number("sync_full").ok_or("the server does not say sync_full")?,
            refused: stats.number("sync_partial_err").ok_or("the server does not say sync_partial_err")?,
            offset: replication.number("master_repl_offset").ok_or("the server does not say its offset")?,
        })
    }
}

/// Watches how much output the primary keeps for its replica links, of which the source's pin is one.
fn watch_outputs(primary: &Server) -> Result<Background<Result<u64>>> {
    let mut client = primary.client()?;
    Ok(Background::start(move |is_over| {
        let mut most = 0;
        while !is_over.load(Ordering::Relaxed) {
            let list = client.text(&["CLIENT", "LIST", "TYPE", "replica"])?;
            let outputs = list.split_whitespace().filter_map(|word| word.strip_prefix("omem=")?.parse::<u64>().ok());
            most = outputs.fold(most, u64::max);
            thread::sleep(OUTPUT_POLL);
        }
        Ok(most)
    }))
}

/// The clients that write.
enum Writer {
    /// Values of one size, [`WRITES_PER_SECOND`] of them.
    Values(Background<Result<()>>),
    Every(Workload),
    /// [`BURST_COMMANDS`] of `redis-benchmark`, from the fork on.
    Burst(Background<Result<()>>),
    Benchmark(Process),
}

impl Writer {
    fn start(load: Load, primary: &Server, round: usize) -> Result<Writer> {
        match load {
            Load::Paced => Writer::values(primary, 1000),
            Load::Quick => Writer::values(primary, 5500),
            Load::Burst => Writer::burst(primary),
            Load::Endless => Writer::benchmark(primary),
            Load::Large => {
                let options = workload::Options::seeded(round as u64).rate(WRITES_PER_SECOND);
                let options = workload::Options { flush: false, ..options };
                Ok(Writer::Every(Workload::start(primary.client()?, options)?))
            }
        }
    }

    fn values(primary: &Server, bytes: usize) -> Result<Writer> {
        let mut client = primary.client()?;
        Ok(Writer::Values(Background::start(move |ended| {
            let value = vec![b'v'; bytes];
            let (begun, mut written) = (Instant::now(), 0u64);
            while !ended.load(Ordering::Relaxed) {
                let due = (begun.elapsed().as_secs_f64() * WRITES_PER_SECOND as f64) as u64;
                if due == written {
                    thread::sleep(WRITER_POLL);
                    continue;
                }
                let upto = due.min(written + MOST_AT_ONCE);
                let set =
                    |number: u64| vec![b"SET".to_vec(), format!("w:{}", number % KEYS).into_bytes(), value.clone()];
                let commands: Vec<Vec<Vec<u8>>> = (written..upto).map(set).collect();
                client.pipeline(&commands)?;
                written = upto;
            }
            Ok(())
        })))
    }

    fn burst(primary: &Server) -> Result<Writer> {
        let mut client = primary.client()?;
        let command = benchmark(primary, BURST_COMMANDS);
        Ok(Writer::Burst(Background::start(move |ended| {
            while client.info("persistence")?.get("rdb_bgsave_in_progress") != Some("1") {
                if ended.load(Ordering::Relaxed) {
                    return Err("the primary has not forked, so nothing was written".into());
                }
                thread::sleep(WRITER_POLL);
            }
            let (mut process, _) = Process::start("redis-benchmark", command)?;
            match process.wait(BURST_TIME)? {
                Some(status) if status.success() => Ok(()),
                other => Err(format!("redis-benchmark did not end well: {other:?}").into()),
            }
        })))
    }

    fn benchmark(primary: &Server) -> Result<Writer> {
        let (process, _) = Process::start("redis-benchmark", benchmark(primary, ENDLESS_COMMANDS))?;
        Ok(Writer::Benchmark(process))
    }

    /// Whether it writes no more. `None`: it is to end by itself, so that says nothing.
    fn is_over(&mut self) -> Option<bool> {
        match self {
            Writer::Values(thread) => Some(thread.is_finished()),
            Writer::Burst(_) => None,
            Writer::Every(workload) => Some(workload.is_over()),
            Writer::Benchmark(process) => Some(!matches!(process.ended(), Ok(None))),
        }
    }

    fn stop(self) -> Result<()> {
        match self {
            Writer::Values(mut thread) | Writer::Burst(mut thread) => {
                thread.end().ok_or("the writing thread panicked")?
            }
            Writer::Every(workload) => Ok(workload.stop().map(drop)?),
            Writer::Benchmark(mut process) => Ok(process.kill().map(drop)?),
        }
    }
}

fn benchmark(primary: &Server, commands: u64) -> Command {
    let address = primary.address();
    let mut command = Command::new("redis-benchmark");
    command.args(["-h", &address.ip().to_string(), "-p", &address.port().to_string()]);
    command.args(["-t", "set", "-d", "4096", "-P", "16", "-q"]);
    command.args(["-n", &commands.to_string(), "-r", &KEYS.to_string()]);
    command.stdout(Stdio::null()).stderr(Stdio::null());
    command
}

const FULL: &str = "sync_full";
const REFUSED: &str = "sync_partial_err";
const KEPT: &str = "most output for a replica link, MiB";
const WAITED: &str = "rounds that waited for the writes to end";

/// What is promised of the worst round. The server ends a link for which it keeps more than 256 MiB, or 64 MiB for a
/// minute (`client-output-buffer-limit replica`).
const PROMISES: [(&str, f64); 4] = [(FULL, 1.0), (REFUSED, 0.0), (KEPT, 255.0), (WAITED, 0.0)];

/// The size of a value in the project's first measurements, in bytes.
const VALUE_BYTES: u64 = 3748 << 10;

/// Commands per second of the paced loads.
const WRITES_PER_SECOND: u64 = 2000;

/// Keys that the loads write to, over and over.
const KEYS: u64 = 20_000;

/// Commands that a paced load catches up with in one pipeline.
const MOST_AT_ONCE: u64 = 200;

/// Commands of a burst: 195 MiB, less than the 256 MiB at which the server ends a replica link that cannot be read
/// while the snapshot is on it.
const BURST_COMMANDS: u64 = 50_000;

/// How long a burst may take, also on a busy machine.
const BURST_TIME: Duration = Duration::from_secs(120);

/// Commands of `redis-benchmark` that are more than it can send while replicas are made: 19 GiB.
const ENDLESS_COMMANDS: u64 = 5_000_000;

/// How often a paced load looks whether commands are due.
const WRITER_POLL: Duration = Duration::from_millis(2);

/// How often the output kept for replica links is read.
const OUTPUT_POLL: Duration = Duration::from_millis(50);
