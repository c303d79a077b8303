//! Builds the programs of `dev/bench` and runs one after the other. Each keeps its own run. Afterwards it writes the
//! page of the project's own runs again.

use std::path::{Path, PathBuf};
use std::process::Command;

use remora_bench::sync::Result;

use crate::process::cargo;

/// Command-line arguments.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Options {
    /// Run only these.
    #[arg(long, value_delimiter = ',', value_name = "NAME", default_values = NAMES, value_parser = clap::builder::PossibleValuesParser::new(NAMES))]
    only: Vec<String>,

    /// Folder for the runs.
    #[arg(long, value_name = "DIR", default_value = RUNS)]
    out: PathBuf,

    /// Total minutes for the programs that can shorten their work (full_sync, sync, feel, volume). The others
    /// take half an hour. Without it everything is measured, which takes many hours.
    #[arg(long, value_name = "NUMBER", value_parser = clap::value_parser!(u64).range(4..=MOST_MINUTES))]
    minutes: Option<u64>,

    /// Arguments for the programs, after `--`; see each program's --help.
    #[arg(last = true)]
    arguments: Vec<String>,
}

/// Runs the programs. Continues after one that fails or misses its target, and reports all failures at the end.
pub(crate) fn run(options: &Options) -> Result<()> {
    let own = std::env::current_exe()?;
    let target = own.parent().and_then(Path::parent).ok_or("this program is not in a cargo target folder")?;
    build(target)?;
    let mut failed = Vec::new();
    for name in &options.only {
        let minutes = options.minutes.and_then(|minutes| share(minutes, name, &options.only));
        // Explicit arguments replace the extra runs, which could contradict them.
        let with_words = WORDS.iter().filter(|(whose, _)| whose == name && options.arguments.is_empty());
        for words in with_words.map(|(_, words)| *words).chain([""]) {
            let what = format!("{name} {words}");
            let what = what.trim_end();
            eprintln!("── {what}");
            let is_part = PARTS.contains(&name.as_str());
            let mut command = Command::new(target.join("release").join(if is_part { SUITE } else { name }));
            if is_part {
                command.arg(name);
            }
            command.args(words.split_whitespace()).arg("--out").arg(&options.out);
            if let Some(minutes) = minutes {
                command.args(["--budget-minutes", &minutes.to_string()]);
            }
            command.args(&options.arguments);
            if !is_well(command)? {
                failed.push(what.to_owned());
            }
        }
    }
    if options.out == Path::new(RUNS) {
        let mut report = Command::new(target.join("release").join(SUITE));
        report.args(["report", "--runs", RUNS]);
        if !is_well(report)? {
            failed.push("report".to_owned());
        }
    }
    if failed.is_empty() { Ok(()) } else { Err(format!("failed, or missed a target: {}", failed.join(", ")).into()) }
}

/// Runs the command in the project's folder and waits for its end. The child is killed if this process ends.
fn is_well(mut command: Command) -> Result<bool> {
    command.current_dir(remora_lab::server::project_root());
    Ok(remora_lab::process::spawn(command)?.wait()?.success())
}

/// The share of `minutes` that this program gets; `None` if it cannot shorten its work.
fn share(minutes: u64, name: &str, measured: &[String]) -> Option<u64> {
    let part = |name: &str| SHARES.iter().find(|(shared, _)| *shared == name).map(|(_, part)| *part);
    let all: u64 = measured.iter().filter_map(|name| part(name)).sum();
    part(name).map(|part| (minutes * part / all).max(1))
}

fn build(target: &Path) -> Result<()> {
    let mut build = cargo();
    // With the module, as the Makefile builds: without it cargo compiles all crates once more.
    build.args("build --release --locked -p remora-bench -p remora-agent -p remora-module --lib --bins".split(' '));
    build.arg("--target-dir").arg(target).current_dir(remora_lab::server::project_root());
    if build.status()?.success() {
        Ok(())
    } else {
        Err("the benchmarks could not be built; see cargo's errors above".into())
    }
}

/// The project's own runs, which the benchmarks page shows.
const RUNS: &str = "bench/runs";

/// Separate programs, and the parts of [`SUITE`].
const NAMES: [&str; 10] = [
    "read_bandwidth",
    "read_latency",
    "nbd_requests",
    "volume_requests",
    "name_changes",
    "full_sync",
    "messenger",
    "sync",
    "feel",
    "volume",
];

/// Further runs of a program besides the one with its default arguments, each kept separately. For the messenger:
/// beside other libraries, on a busy machine, with one thing changed at a time, over shared memory, over RDMA in an
/// emulated machine, and idle. For files of a volume: by RDMA beside TCP, in an emulated machine.
const WORDS: [(&str, &str); 7] = [
    ("messenger", "--label rivals --rounds 3 --connections 1,2,4,8,16,32,64 --rivals raw,zeromq"),
    ("messenger", "--label busy --rounds 3 --busy"),
    (
        "messenger",
        "--label varied --rounds 3 --connections 16 --depths 1,32 --request 64,4096 --rivals raw \
         --vary spin,adaptive:50,workers:2,workers:4,workers:10,pool:0,allocator:libmimalloc.so",
    ),
    ("messenger", "--label shm --stacks shm --connections 1 --vary spin"),
    (
        "messenger",
        "--label rdma --emulated --rounds 3 --stacks rdma --connections 1 --depths 1,32 --request 64,4096,131072 --rivals ib-send \
         --vary spin,queue:16",
    ),
    ("messenger", "--label idle --rounds 3 --idle 10000"),
    (
        "volume",
        "--label rdma --emulated --rounds 3 --parts files,connections --subjects emulated-rdma,emulated-tcp --transport device \
         --blocks-kib 4,1024 --jobs 1 --mib 16",
    ),
];

/// Shares of a limited time.
const SHARES: [(&str, u64); 4] = [("full_sync", 4), ("sync", 8), ("feel", 3), ("volume", 3)];

/// A month. More is taken for a typing error.
const MOST_MINUTES: u64 = 31 * 24 * 60;

/// The program that prints the tables, and its parts that measure.
const SUITE: &str = "remora-bench";
const PARTS: [&str; 4] = ["messenger", "sync", "feel", "volume"];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_is_shared_among_those_that_can_leave_things_out() {
        let all: Vec<String> = NAMES.map(str::to_owned).to_vec();
        let shares: Vec<Option<u64>> =
            ["full_sync", "sync", "feel", "volume", "messenger"].map(|name| share(180, name, &all)).to_vec();
        assert_eq!(shares, [Some(40), Some(80), Some(30), Some(30), None]);
        assert_eq!(share(10, "feel", &["feel".to_owned(), "messenger".to_owned()]), Some(10));
        assert_eq!(share(4, "feel", &all), Some(1), "never zero, which some programs take for no limit");
    }
}
