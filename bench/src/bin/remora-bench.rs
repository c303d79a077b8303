//! The tables that a reader wants, measured, kept and shown. `remora_bench::suite` says how.
//!
//! ```text
//! cargo run --release -p remora-bench --bin remora-bench -- sync --networks 1gbit --servers valkey --out bench/runs
//! cargo run --release -p remora-bench --bin remora-bench -- messenger --rounds 5 --out bench/runs
//! cargo run --release -p remora-bench --bin remora-bench -- report
//! ```

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use remora_bench::messenger;
use remora_bench::suite::{devices, feel, report, scaling, syncs};
use remora_bench::sync::Result;

/// The tables that a reader wants: measured, kept, shown.
#[derive(Debug, Parser)]
#[command(name = "remora-bench", max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// What disk, networks and fabric can do.
    Devices(devices::Options),
    /// N replicas by every method over every network.
    Sync(syncs::Options),
    /// What the primary's clients notice of it.
    Feel(feel::Options),
    /// Cost against the size of the data set, and of its values.
    Scaling(scaling::Options),
    /// Requests per second and latency of the messenger and its rivals.
    Messenger(Box<messenger::options::Options>),
    /// Tables and plots out of kept runs, into docs/benchmarks.md.
    Report(report::Options),
}

fn main() -> Result<ExitCode> {
    let is_well = match Cli::parse().command {
        Command::Devices(options) => devices::run(&options),
        Command::Sync(options) => syncs::run(&options),
        Command::Feel(options) => feel::run(&options),
        Command::Scaling(options) => scaling::run(&options),
        Command::Messenger(options) => messenger::rate::run(&options),
        Command::Report(options) => report::run(&options),
    }?;
    Ok(if is_well { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
