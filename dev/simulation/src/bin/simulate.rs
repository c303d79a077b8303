//! Plays schedules of whole syncs for a long time: `make simulate ARGS="--hours 8"`. See dev/testing.md.

use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use remora_simulation::{Limits, explain, explore, storm};

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
    /// Play this many storms of a whole fleet, and nothing else.
    #[arg(long)]
    storms: Option<u64>,
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
    if let Some(storms) = arguments.storms {
        return play_storms(first, storms);
    }
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

/// Plays storms with the seeds from `first` on. Each finding names its seed.
fn play_storms(first: u64, storms: u64) -> ExitCode {
    let outcomes = (first..first.saturating_add(storms)).map(|seed| (seed, storm(seed, None)));
    let mut findings = 0;
    let (mut longest_wait, mut in_step) = (0, 0);
    for (seed, outcome) in outcomes {
        (longest_wait, in_step) = (longest_wait.max(outcome.longest_wait), in_step.max(outcome.in_step));
        if let Some(finding) = outcome.finding {
            println!("storm {seed} (--first {seed} --storms 1): {finding}");
            findings += 1;
        }
    }
    println!(
        "{storms} storms, {findings} findings; the longest wait {longest_wait} s, all in step after {in_step} s at most"
    );
    if findings == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
