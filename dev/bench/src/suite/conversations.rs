//! `remora-bench conversations`: what N control conversations cost a source, and a replica that joins meanwhile.
//!
//! The source runs alone beside its server. The conversations come from this process ([`crate::crowd`]), over loopback,
//! so both share the machine's processors. No data lane is behind them.

use std::fs;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use remora_lab::{Server, process, scratch};

use super::kept::Kept;
pub use super::points::ConversationsPoint as Point;
use super::report::tables;
use super::{Common, ServerChoice, VALUE_BYTES};
use crate::cpu;
use crate::crowd::Crowd;
use crate::sync::{Method, Program, Result, Source, difference};

/// Command-line arguments.
#[derive(Clone, Debug, clap::Args)]
pub struct Options {
    /// Server to measure.
    #[arg(long, default_value = "valkey")]
    pub server: ServerChoice,
    /// Numbers of conversations.
    #[arg(long, value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..=1000), default_value = "1,100,1000")]
    pub replicas: Vec<u32>,
    /// Seconds for which the source is measured, in each of the two states of the conversations.
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=3600), default_value_t = 10)]
    pub seconds: u32,
    /// Values of 3748 KiB in the data set, for the real replicas.
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..=super::MOST_OF_DATA), default_value_t = 128)]
    pub values: u64,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub common: Common,
}

/// Runs the subcommand, on loopback. Returns whether every conversation stayed open, and every compared replica was
/// equal.
///
/// # Errors
/// A primary could not be filled or the run not be kept. A failed round is noted, and the next one is tried.
pub fn run(options: &Options) -> Result<bool> {
    let program = Program::build()?;
    let budget = options.common.budget();
    let mut kept = Kept::begin("conversations", options.common.label.as_deref());
    let primary = Server::builder(options.server.kind()).config("repl-diskless-sync-delay", "0").start()?;
    program.load(&primary, options.values, VALUE_BYTES, false)?;
    let server = format!("{} ({})", options.server.kind(), primary.version()?);
    let mut failed = 0;
    for round in 0..options.common.rounds {
        for replicas in &options.replicas {
            let what = format!("N = {replicas}, round {}", round + 1);
            if !budget.has(USUAL + Duration::from_secs(2 * u64::from(options.seconds))) {
                kept.note(format!("{what}: left out for lack of time"));
                continue;
            }
            let compare = options.common.compare.is_due(round);
            let mut trial = Trial { options, program: &program, primary: &primary, compare, differences: Vec::new() };
            match trial.run(*replicas) {
                Ok(point) => {
                    for difference in &trial.differences {
                        kept.note(format!("{what}: NOT EQUAL: {difference}"));
                    }
                    let point = Point { server: server.clone(), round, ..point };
                    eprintln!("{what}: joined in {:.2} s, {:.3} CPU s/s", point.join_seconds, point.receiving.cpu);
                    kept.points.push(point);
                }
                Err(error) => {
                    failed += 1;
                    kept.note(format!("{what}: failed: {error}"));
                }
            }
            kept.keep(options.common.out.as_deref(), &tables::conversations(&[&kept]))?;
        }
    }
    print!("{}", tables::conversations(&[&kept]));
    Ok(failed == 0 && kept.points.iter().all(|point| point.equal != Some(false)))
}

struct Trial<'a> {
    options: &'a Options,
    program: &'a Program,
    primary: &'a Server,
    /// Whether each real replica is compared with the primary.
    compare: bool,
    /// What these comparisons found.
    differences: Vec<String>,
}

impl Trial<'_> {
    /// One round with this many conversations, at a source of its own.
    fn run(&mut self, replicas: u32) -> Result<Point> {
        let folder = scratch::folder("conversations")?;
        let bytes = self.options.values * VALUE_BYTES;
        let source = Source::start_for(self.program, self.primary, folder.path(), bytes, replicas + ROOM)?;
        // The first one has the snapshot taken; the others find it.
        self.sync(&source, "first")?;
        let alone = self.sync(&source, "alone")?;
        let before = Usage::of(&source)?;
        let crowd = Crowd::open(source.address()?, source.token(), replicas as usize)?;
        let receiving = self.watch(&source, &crowd)?;
        let status_seconds = time_of_status(&source, replicas)?;
        let beside = self.sync(&source, "beside")?;
        crowd.stay();
        thread::sleep(SETTLE);
        let staying = self.watch(&source, &crowd)?;
        let beside_staying = self.sync(&source, "beside-staying")?;
        crowd.check()?;
        let (join_seconds, after) = (crowd.joined().as_secs_f64(), Usage::of(&source)?);
        let began = Instant::now();
        crowd.leave()?;
        wait_until_alone(&source)?;
        Ok(Point {
            server: String::new(),
            replicas,
            round: 0,
            join_seconds,
            receiving,
            staying,
            descriptors: after.descriptors,
            threads: after.threads,
            resident: after.resident,
            private: after.private,
            private_before: before.private,
            peak: after.peak,
            status_seconds,
            alone_seconds: alone,
            beside_seconds: beside,
            beside_staying_seconds: beside_staying,
            leave_seconds: began.elapsed().as_secs_f64(),
            equal: self.compare.then_some(self.differences.is_empty()),
        })
    }

    /// Measures the source for the given time.
    fn watch(&self, source: &Source, crowd: &Crowd) -> Result<Load> {
        let (began, cpu_before, own_before) = (Instant::now(), source.cpu()?, cpu::of_self()?);
        let (sent_before, received_before) = crowd.messages();
        thread::sleep(Duration::from_secs(self.options.seconds.into()));
        let (sent, received) = crowd.messages();
        crowd.check()?;
        let seconds = began.elapsed().as_secs_f64();
        Ok(Load {
            cpu: (source.cpu()? - cpu_before) / seconds,
            crowd_cpu: (cpu::of_self()? - own_before).as_secs_f64() / seconds,
            reports: (sent - sent_before) as f64 / seconds,
            answers: (received - received_before) as f64 / seconds,
        })
    }

    /// Makes a real replica over shared memory, and returns the seconds from the start of its agent to its end. It is
    /// compared afterwards, in the rounds that compare.
    fn sync(&mut self, source: &Source, name: &str) -> Result<f64> {
        let method = Method::RemoraShm;
        let settings = method.replica_settings(self.primary.kind()).into_iter();
        let builder = Server::builder(self.primary.kind());
        let server = settings.fold(builder, |builder, (name, value)| builder.config(name, value)).start()?;
        let began = Instant::now();
        let mut agent = self.program.replica(&server, source, method, name)?;
        agent.finish()?;
        let seconds = began.elapsed().as_secs_f64();
        if self.compare {
            let found = difference(self.primary, &server)?;
            self.differences.extend(found.map(|difference| format!("the replica {name}: {difference}")));
        }
        Ok(seconds)
    }
}

pub use super::points::ConversationsLoad as Load;

/// What the source has of the system.
struct Usage {
    descriptors: u64,
    threads: u64,
    resident: u64,
    private: u64,
    peak: u64,
}

impl Usage {
    fn of(source: &Source) -> Result<Usage> {
        let pid = source.pid();
        let folder = Path::new("/proc").join(pid.to_string());
        let status = fs::read_to_string(folder.join("status"))?;
        let number = |field: &str| -> Result<u64> {
            let line = status.lines().find_map(|line| line.strip_prefix(field));
            let number = line.and_then(|rest| rest.split_whitespace().next()?.parse().ok());
            number.ok_or_else(|| format!("/proc/{pid}/status has no {field}").into())
        };
        Ok(Usage {
            descriptors: fs::read_dir(folder.join("fd"))?.count() as u64,
            threads: number("Threads:")?,
            resident: number("VmRSS:")? << 10,
            private: process::private_memory(pid)?,
            peak: process::peak_memory(pid)?,
        })
    }
}

/// The seconds that `remora status` takes, which must list all members.
fn time_of_status(source: &Source, replicas: u32) -> Result<f64> {
    let began = Instant::now();
    let status = source.status()?;
    let seconds = began.elapsed().as_secs_f64();
    let listed = status.get("replicas").and_then(|list| Some(list.as_array()?.len())).unwrap_or(0);
    if listed != replicas as usize {
        return Err(format!("remora status lists {listed} of {replicas} replicas").into());
    }
    Ok(seconds)
}

/// Waits until the source has no replica.
fn wait_until_alone(source: &Source) -> Result<()> {
    let end = Instant::now() + USUAL;
    while time_of_status(source, 0).is_err() {
        if Instant::now() >= end {
            return Err("the source still lists replicas that have left".into());
        }
        thread::sleep(LOOK_EVERY);
    }
    Ok(())
}

/// Places for the real replicas at the source, beside the conversations.
const ROOM: u32 = 8;

/// How long all else of a round usually takes, at most.
const USUAL: Duration = Duration::from_secs(30);

/// Time in which all members have made their first report of another state.
const SETTLE: Duration = Duration::from_secs(1);

const LOOK_EVERY: Duration = Duration::from_millis(10);
