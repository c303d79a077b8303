//! Proofs of the files of a mounted volume, by programs that other people wrote to find faults in file systems.
//!
//! ```text
//!   three servers ── create ── format ── mount by io_uring ◀── each proof        [`scene`], [`proofs`]
//!                                        mount by /dev/fuse ◀── each proof
//! ```
//!
//! Each proof has a volume of its own, so that a failure leaves the others alone, and ends with a verdict.

mod posix;
mod proofs;
mod scene;

use std::time::{Duration, Instant};

use clap::ValueEnum;
use remora_bench::sync::Result;
use remora_lab::ring_allowed::RingAllowed;

use crate::show::Screen;
use scene::Scene;

/// Command-line arguments.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Options {
    /// Run only these.
    #[arg(long, value_delimiter = ',', value_name = "NAME", default_value = "fsx,posix,verify,stress,build,rsync")]
    only: Vec<Proof>,

    /// How the kernel asks for files.
    #[arg(long, value_delimiter = ',', value_name = "HOW", default_value = "ring,device")]
    by: Vec<By>,

    /// How long the proofs take that can be longer: times the usual.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1000))]
    times: u32,
}

/// A proof.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Proof {
    /// Random operations on one file, each compared with what must be in it.
    Fsx,
    /// What POSIX says of files, by pjdfstest.
    Posix,
    /// Every block that was written is read and checked, while servers are killed.
    Verify,
    /// stress-ng's stressors of files, which check what they read.
    Stress,
    /// A repository is cloned into the files, checked, and built there.
    Build,
    /// A tree of files there, a new mount, and back.
    Rsync,
}

/// How the kernel asks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum By {
    /// By io_uring.
    Ring,
    /// By /dev/fuse.
    Device,
}

/// What came of one proof.
struct Verdict {
    name: String,
    by: By,
    took: Duration,
    outcome: Result<String>,
}

/// Runs the proofs, and prints a line for each.
pub(crate) fn run(options: &Options) -> Result<()> {
    let screen = Screen::new();
    if !rustix::process::geteuid().is_root() {
        return Err("mounts need root".into());
    }
    let program = screen.build_for(&[])?;
    let mut verdicts = Vec::new();
    for &by in &options.by {
        let _allowed = match by {
            By::Ring => match RingAllowed::new() {
                Ok(allowed) => Some(allowed),
                Err(why) => {
                    screen.say(&format!("NOT PROVEN by io_uring: FUSE has none here ({why})"));
                    continue;
                }
            },
            By::Device => None,
        };
        for proof in &options.only {
            let name = proof.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default();
            let begun = Instant::now();
            let busy = screen.busy(&format!("{name}, by {by:?}"));
            let outcome = Scene::set(&program, by).and_then(|mut scene| {
                let outcome = proofs::run(*proof, &mut scene, options.times)?;
                scene.end()?;
                Ok(outcome)
            });
            drop(busy);
            let verdict = Verdict { name, by, took: begun.elapsed(), outcome };
            screen.say(&verdict.line());
            verdicts.push(verdict);
        }
    }
    println!("\n| proof | by | verdict | s | what |\n|---|---|---|---:|---|");
    verdicts.iter().for_each(|verdict| println!("{}", verdict.line()));
    let failed: Vec<&str> =
        verdicts.iter().filter(|verdict| verdict.outcome.is_err()).map(|verdict| verdict.name.as_str()).collect();
    if failed.is_empty() { Ok(()) } else { Err(format!("failed: {}", failed.join(", ")).into()) }
}

impl Verdict {
    fn line(&self) -> String {
        let (word, what) = match &self.outcome {
            Ok(what) => ("proven", what.clone()),
            Err(error) => ("**FAILED**", error.to_string().replace('\n', " / ")),
        };
        let by = if self.by == By::Ring { "io_uring" } else { "/dev/fuse" };
        format!("| {} | {by} | {word} | {:.0} | {what} |", self.name, self.took.as_secs_f64())
    }
}
