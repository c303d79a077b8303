//! Plays schedules of whole syncs for a long time: `make simulate ARGS="--hours 8"`. See dev/testing.md.

use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use remora_simulation::{Limits, explain, explore};

/// The command line.
#[derive(Parser)]
struct Arguments {
    /// How long to play, in hours. Default: one hour, or as long as `--schedules` takes.
    #[arg(long, conflicts_with = "minutes")]
    hours: Option<f64>,
    /// How long to play, in minutes.
    #[arg(long)]
    minutes: Option<f64>,
    /// How many schedules to play.
    #[arg(long)]
    schedules: Option<u64>,
    /// Play each schedule twice: one that is not the same both times is a finding.
    #[arg(long)]
    twice: bool,
    /// On how many threads to play.
    #[arg(long, default_value_t = 1)]
    jobs: usize,
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
    let hours = arguments.hours.or(arguments.minutes.map(|minutes| minutes / 60.0));
    let time = match (hours, arguments.schedules) {
        (Some(hours), _) => Duration::try_from_secs_f64(hours * 3600.0).unwrap_or(Duration::MAX),
        (None, Some(_)) => Duration::MAX,
        (None, None) => Duration::from_secs(3600),
    };
    let Arguments { schedules, jobs, twice, .. } = arguments;
    let limits = Limits { time, schedules: schedules.unwrap_or(u64::MAX), jobs, twice };
    let summary = explore(limits, first, true);
    for (what, count) in &summary.reached {
        println!("{count:>12}  {what}");
    }
    let (seconds, rate) = (summary.took.as_secs(), summary.rate());
    println!(
        "{} schedules in {seconds} s, {rate:.0} per second, {} findings",
        summary.schedules,
        summary.findings.len()
    );
    for (seed, finding) in &summary.findings {
        println!("REMORA_SIM_SEED={seed}: {finding}");
    }
    if summary.findings.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
