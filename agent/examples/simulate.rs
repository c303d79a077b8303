//! Plays schedules of whole syncs for a long time: `make simulate ARGS="--hours 8"`. See docs/testing.md.

use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use remora_agent::simulation::{explain, explore};

/// The command line.
#[derive(Parser)]
struct Arguments {
    /// How long to play, in hours.
    #[arg(long, default_value_t = 1.0)]
    hours: f64,
    /// The first seed. Default: another one in each run.
    #[arg(long)]
    first: Option<u64>,
    /// Play this seed alone and print its last events.
    #[arg(long)]
    seed: Option<u64>,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    if let Some(seed) = arguments.seed {
        println!("{}", explain(seed));
        return ExitCode::SUCCESS;
    }
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    let first = arguments.first.unwrap_or(now.as_secs());
    println!("the first seed is {first} (--first)");
    let summary = explore(Duration::from_secs_f64(arguments.hours * 3600.0), first, true);
    for (what, count) in &summary.reached {
        println!("{count:>12}  {what}");
    }
    println!("{} schedules, {} findings", summary.schedules, summary.findings.len());
    for (seed, finding) in &summary.findings {
        println!("REMORA_SIM_SEED={seed}: {finding}");
    }
    if summary.findings.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
