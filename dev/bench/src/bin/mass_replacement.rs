//! Six replicas of a cluster lose their data at once: the time until all are in step again, and what their primaries
//! did for it ([`remora_bench::mass`]). Each round runs every way in turn, beginning with another one.
//!
//! ```text
//! cargo run --release -p remora-bench --bin mass_replacement -- --rounds 3 --out bench/runs
//! ```

use std::process::ExitCode;

use clap::Parser;
use remora_bench::mass::{COPIES, FORKS, FULL, Mass, REPLICAS, Replaced, SECONDS, SHARDS, VALUE_BYTES, Way, case};
use remora_bench::suite::ServerChoice;
use remora_bench::sync::{Compare, Program, Result};
use remora_bench::{Goal, Keep, Run, Sample, Spread, Target, bytes};
use remora_lab::{BitRate, Kind};

/// Mass replacement of a cluster's replicas. Exits with 1 if a target is missed.
#[derive(Parser, Debug)]
struct Options {
    /// Rounds; the figures are medians over them.
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Rate of each host's cable.
    #[arg(long, default_value = "200mbit")]
    rate: BitRate,
    /// Data of a shard in MiB, in random values of 128 KiB.
    #[arg(long, default_value_t = 96)]
    mebibytes: usize,
    /// Servers to measure.
    #[arg(long, value_delimiter = ',', default_value = "redis,valkey")]
    servers: Vec<ServerChoice>,
    /// Ways.
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "own-default,own-best,own-dual,remora-default,remora-best,remora-sealed"
    )]
    ways: Vec<Way>,
    /// When to compare the replicas with their primaries, by digest.
    #[arg(long, default_value = "every")]
    compare: Compare,
    #[command(flatten)]
    keep: Keep,
}

fn main() -> Result<ExitCode> {
    let options = Options::parse();
    let program = Program::build()?;
    let mut run = Run::new("mass_replacement", "see the case");
    run.notes.push(format!(
        "{SHARDS} shards with {REPLICAS} replicas each, {} MiB a shard in values of {}, every node on a host with a cable of {}. Smaller \
         is better, so is a smaller ratio. All processes share one machine. Every figure of a primary is that of the shard with the \
         most; CPU: of all agents, and of all primaries.",
        options.mebibytes,
        bytes(VALUE_BYTES as u64),
        options.rate
    ));
    for server in options.servers.clone() {
        measure(&options, &program, server.kind(), &mut run)?;
    }
    Ok(options.keep.finish(&run)?)
}

fn measure(options: &Options, program: &Program, kind: Kind, run: &mut Run) -> Result<()> {
    let mut mass = Mass::set(program, kind, options.rate, options.mebibytes)?;
    let mut ways: Vec<Way> = options.ways.iter().copied().filter(|way| way.applies(kind)).collect();
    run.notes.push(format!(
        "{kind} ({}): one copy of a shard needs {:.2} s at least to leave its primary's host, and two copies twice that: by bytes alone \
         the ratio is 0.5.",
        mass.version()?,
        mass.floor()
    ));
    for round in 0..options.rounds {
        for way in ways.clone() {
            let replaced = mass.replace(way)?;
            if options.compare.is_due(round) {
                mass.compare()?;
            }
            eprintln!("{kind}, round {} of {}, {}: {:.2} s", round + 1, options.rounds, way.name(), replaced.seconds);
            note(run, kind, way, round, replaced, mass.bytes());
        }
        let count = ways.len().max(1);
        ways.rotate_left(1 % count);
    }
    let seconds = case(kind, SECONDS);
    for ours in ways.iter().filter(|way| way.is_ours()) {
        for rival in ways.iter().filter(|way| !way.is_ours()) {
            // As different as the settings may be: each beside the one with the same ones, and beside the best.
            let target = (*rival != Way::OwnDefault || *ours == Way::RemoraDefault).then_some(GOAL);
            run.compare_less((ours.name(), &seconds), (rival.name(), &seconds), target);
        }
        let forks = case(kind, FORKS);
        let value = Spread::of(run.of(ours.name(), &forks).map(|sample| sample.value));
        run.goals.push(Goal { what: format!("{}, {forks}", ours.name()), target: Target::most(1.0), value });
    }
    Ok(())
}

fn note(run: &mut Run, kind: Kind, way: Way, round: usize, replaced: Replaced, bytes: u64) {
    let Replaced { seconds, sent, forks, full_copies, primaries_cpu, agents_cpu } = replaced;
    let figures =
        [(SECONDS, seconds), (COPIES, sent as f64 / bytes as f64), (FORKS, forks as f64), (FULL, full_copies as f64)];
    for (what, value) in figures {
        let sample = Sample::new(way.name(), case(kind, what), round, value);
        run.samples.push(sample.cost(agents_cpu, primaries_cpu, bytes as f64 * SHARDS as f64 / 1e9));
    }
}

/// The part of own replication's time that was aimed at.
const GOAL: f64 = 0.35;
