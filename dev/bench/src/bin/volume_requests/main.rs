//! What a volume's writes and reads cost, how fast they are, and how long they stall, by the library's client.
//!
//! | scene | what is measured | beside |
//! |---|---|---|
//! | `cost` | processor time of a 4 KiB write, client and one server | the promise |
//! | `copy` | 1 MiB reads in the memory of a server on this host | `memcpy` |
//! | `window` | writes over a link with late answers, by `fixed:32`, `fixed:1024`, `adaptive` | `fixed:1024` |
//! | `chain` | 1 MiB writes of three copies over cables of 1 Gb/s: inline, pulled, along a chain | pulled |
//! | `stall` | the longest time between two answers while one of three servers is killed, or hangs | the promise |
//!
//! Servers are processes of their own, but in `window`, which asks its server how much memory writers had. Each round
//! measures all of a scene in turn. Requests over NBD, beside other servers, are measured by `nbd_requests`.
//!
//! ```text
//! cargo run --release -p remora-bench --bin volume_requests -- --rounds 5 --out bench/runs
//! ```

mod chain;
mod cost;
mod load;
mod stall;
mod window;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Parser, ValueEnum};
use remora_bench::{Run, Sample, copies};

/// Processor time, rates and stalls of a volume.
#[derive(Parser, Debug)]
struct Options {
    /// Rounds; the figures are medians over them.
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Milliseconds per measurement.
    #[arg(long, default_value_t = 2000)]
    millis: u64,
    /// What to measure.
    #[arg(long, value_enum, value_delimiter = ',', default_value = "cost,copy,window,chain,stall")]
    scenes: Vec<SceneName>,
    /// Keep the run in a new folder below this one.
    #[arg(long)]
    out: Option<PathBuf>,
    /// Write everything as JSON to this file.
    #[arg(long)]
    json: Option<PathBuf>,
}

impl Options {
    fn span(&self) -> Duration {
        Duration::from_millis(self.millis)
    }
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum SceneName {
    Cost,
    Copy,
    Window,
    Chain,
    Stall,
}

type Failure = Box<dyn std::error::Error + Send + Sync>;

/// Something that is set up once, and measured in each round.
trait Scene {
    /// Measures everything once.
    fn measure(&mut self, round: usize) -> Result<Vec<Sample>, Failure>;

    /// Compares, after the last round.
    fn compare(&self, run: &mut Run);
}

fn main() -> Result<ExitCode, Failure> {
    copies::be_one_if_asked()?;
    let options = Options::parse();
    let mut run = Run::new("volume_requests", "each case names its unit");
    for name in &options.scenes {
        let mut scene = match name {
            SceneName::Cost => boxed(cost::Cost::new(options.span())?),
            SceneName::Copy => boxed(cost::Reading::new(options.span())?),
            SceneName::Window => boxed(window::Windows::new(options.span())?),
            SceneName::Chain => match chain::Cables::new(options.span()) {
                Ok(cables) => boxed(cables),
                Err(error) => {
                    run.notes.push(format!("the scene chain was left out: {error}"));
                    continue;
                }
            },
            SceneName::Stall => boxed(stall::Stalls::new(options.span())?),
        };
        for round in 0..options.rounds {
            eprintln!("{name:?}: round {} of {}", round + 1, options.rounds);
            run.samples.extend(scene.measure(round)?);
        }
        scene.compare(&mut run);
    }
    run.finish(options.out.as_deref(), options.json.as_deref())?;
    Ok(if run.keeps_promises() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn boxed(scene: impl Scene + 'static) -> Box<dyn Scene> {
    Box::new(scene)
}

/// A figure without processor time.
fn sample(subject: &str, case: &str, round: usize, value: f64) -> Sample {
    let (subject, case) = (subject.to_owned(), case.to_owned());
    Sample { subject, case, round, value, reader_cpu_seconds: 0.0, source_cpu_seconds: 0.0, gigabytes: 0.0 }
}

/// What was promised, as a subject that figures are compared with.
const PROMISED: &str = "promised";
