//! Builds the programs of `bench/` and runs one after the other; each keeps its own run. Then the page that shows the
//! project's own runs is made again.

use std::path::{Path, PathBuf};
use std::process::Command;

use remora_bench::sync::Result;

/// What can be typed.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Options {
    /// Only these.
    #[arg(long, value_delimiter = ',', value_name = "NAME", default_values = NAMES, value_parser = clap::builder::PossibleValuesParser::new(NAMES))]
    only: Vec<String>,

    /// Folder for the runs.
    #[arg(long, value_name = "DIR", default_value = RUNS)]
    out: PathBuf,

    /// Arguments for the programs, after `--`; see the program's own --help.
    #[arg(last = true)]
    arguments: Vec<String>,
}

/// Runs them. Goes on after one that fails or misses what it promised, and says so at the end.
pub(crate) fn run(options: &Options) -> Result<()> {
    let own = std::env::current_exe()?;
    let target = own.parent().and_then(Path::parent).ok_or("this program lies in no target folder")?;
    build(target)?;
    let mut failed = Vec::new();
    for name in &options.only {
        eprintln!("── {name}");
        let is_part = PARTS.contains(&name.as_str());
        let mut command = Command::new(target.join("release").join(if is_part { SUITE } else { name }));
        if is_part {
            command.arg(name);
        }
        command.arg("--out").arg(&options.out).args(&options.arguments);
        if !is_well(command)? {
            failed.push(name.as_str());
        }
    }
    if options.out == Path::new(RUNS) {
        let mut report = Command::new(target.join("release").join(SUITE));
        report.args(["report", "--runs", RUNS]);
        if !is_well(report)? {
            failed.push("report");
        }
    }
    if failed.is_empty() { Ok(()) } else { Err(format!("not as promised: {}", failed.join(", ")).into()) }
}

/// Runs it in the project's folder, to its end. It dies with us.
fn is_well(mut command: Command) -> Result<bool> {
    command.current_dir(remora_lab::server::project_root());
    Ok(remora_lab::process::spawn(command)?.wait()?.success())
}

fn build(target: &Path) -> Result<()> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut build = Command::new(cargo);
    build.args(["build", "--release", "--locked", "-p", "remora-bench", "-p", "remora-agent", "--bins"]);
    build.arg("--target-dir").arg(target).current_dir(remora_lab::server::project_root());
    if build.status()?.success() { Ok(()) } else { Err("the benchmarks could not be built; cargo has said why".into()) }
}

/// The project's own runs, which its page shows.
const RUNS: &str = "bench/runs";

/// Programs of their own, and parts of [`SUITE`].
const NAMES: [&str; 9] =
    ["read_bandwidth", "read_latency", "full_sync", "follow_lag", "messenger", "devices", "sync", "feel", "scaling"];

/// The program with the tables that a reader wants, and its parts that measure.
const SUITE: &str = "remora-bench";
const PARTS: [&str; 5] = ["messenger", "devices", "sync", "feel", "scaling"];
