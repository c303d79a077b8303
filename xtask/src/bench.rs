//! Builds the programs of `bench/` and runs one after the other; each keeps its own run.

use std::path::{Path, PathBuf};
use std::process::Command;

use remora_bench::sync::Result;

/// What can be typed.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Options {
    /// Only these programs.
    #[arg(long, value_delimiter = ',', value_name = "NAME", default_values = PROGRAMS, value_parser = clap::builder::PossibleValuesParser::new(PROGRAMS))]
    only: Vec<String>,

    /// Folder for the runs.
    #[arg(long, value_name = "DIR", default_value = "bench/runs")]
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
    for program in &options.only {
        eprintln!("── {program}");
        let mut command = Command::new(target.join("release").join(program));
        command.arg("--out").arg(&options.out).args(&options.arguments);
        command.current_dir(remora_lab::server::project_root());
        // It dies with us.
        if !remora_lab::process::spawn(command)?.wait()?.success() {
            failed.push(program.as_str());
        }
    }
    if failed.is_empty() { Ok(()) } else { Err(format!("not as promised: {}", failed.join(", ")).into()) }
}

fn build(target: &Path) -> Result<()> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut build = Command::new(cargo);
    build.args(["build", "--release", "--locked", "-p", "remora-bench", "-p", "remora-agent", "--bins"]);
    build.arg("--target-dir").arg(target).current_dir(remora_lab::server::project_root());
    if build.status()?.success() { Ok(()) } else { Err("the benchmarks could not be built; cargo has said why".into()) }
}

const PROGRAMS: [&str; 5] = ["read_bandwidth", "read_latency", "full_sync", "follow_lag", "messenger_rate"];
