//! Measures and keeps the figures of the tables, and prints the tables. See `remora_bench::suite`.
//!
//! ```text
//! cargo run --release -p remora-bench --bin remora-bench -- sync --networks 1gbit --servers valkey --out bench/runs
//! cargo run --release -p remora-bench --bin remora-bench -- messenger --rounds 5 --out bench/runs
//! cargo run --release -p remora-bench --bin remora-bench -- volume --budget-minutes 40 --out bench/runs
//! cargo run --release -p remora-bench --bin remora-bench -- report
//! ```

// Stands alone: a program's command line.

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use remora_bench::suite::{feel, report, syncs, volume};
use remora_bench::sync::Result;
use remora_bench::{elsewhere, messenger};

/// Measures, keeps and prints the tables of the benchmarks page.
#[derive(Debug, Parser)]
#[command(name = "remora-bench", max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Measure N replicas by every method over every network.
    Sync(syncs::Options),
    /// Measure what the primary's clients notice.
    Feel(feel::Options),
    /// Measure requests per second and latency of the messenger and its rivals.
    Messenger(Box<messenger::Options>),
    /// Measure files of a mounted volume with three copies, and of its rivals. Needs root.
    Volume(Box<volume::Options>),
    /// Mount files in this process's memory: the floor of `volume`.
    #[command(hide = true)]
    MemoryFiles(volume::MemoryOptions),
    /// Measure a bit of everything on a machine that has only the archive of `make bench-elsewhere`.
    Elsewhere(elsewhere::Options),
    /// Write tables and plots from kept runs into bench/report.md.
    Report(report::Options),
}

fn main() -> Result<ExitCode> {
    let is_well = match Cli::parse().command {
        Command::Sync(options) => syncs::run(&options),
        Command::Feel(options) => feel::run(&options),
        Command::Messenger(options) => messenger::rate::run(&options),
        Command::Volume(options) => volume::run(&options),
        Command::MemoryFiles(options) => volume::serve_memory(&options),
        Command::Elsewhere(options) => elsewhere::run(&options),
        Command::Report(options) => report::run(&options),
    }?;
    Ok(if is_well { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
