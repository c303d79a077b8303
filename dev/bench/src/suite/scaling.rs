//! `remora-bench scaling`: one replica, as the data set grows, and as its values grow. The slope is the cost of a
//! further GiB.

use std::time::Duration;

use super::kept::Kept;
pub use super::points::ScalingPoint as Point;
use super::report::tables;
use super::{Common, ServerChoice};
use crate::sync::{Content, Method, Program, Result, Scene, Shape, Trial, available_memory};

/// Command-line arguments.
#[derive(Clone, Debug, clap::Args)]
pub struct Options {
    /// Server to measure.
    #[arg(long, default_value = "valkey")]
    pub server: ServerChoice,
    /// Sizes of the data set in MiB, in values of 1 MiB.
    #[arg(long, value_delimiter = ',', value_parser = clap::value_parser!(u64).range(1..=super::MOST_OF_DATA), default_value = "100,256,512,1024,2048,4096,8192")]
    pub sizes_mib: Vec<u64>,
    /// Sizes of the values in bytes, in a data set of --values-mib. For small values the data set is smaller: two
    /// million are enough.
    #[arg(long, value_delimiter = ',', value_parser = clap::value_parser!(u64).range(1..=super::MOST_OF_DATA), default_value = "64,1024,16384,262144,4194304,67108864,536870912")]
    pub value_bytes: Vec<u64>,
    /// Size of the data set whose values grow, in MiB.
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..=super::MOST_OF_DATA), default_value_t = 512)]
    pub values_mib: u64,
    /// Methods.
    #[arg(long, value_delimiter = ',', default_value = "own-best,remora-shm,remora-tcp")]
    pub methods: Vec<Method>,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub common: Common,
}

/// Runs the subcommand, on loopback. Returns whether every compared replica was equal.
///
/// # Errors
/// A primary could not be filled or the run not be kept. A failed sync is noted, and the next one is tried.
pub fn run(options: &Options) -> Result<bool> {
    let program = Program::build()?;
    let budget = options.common.budget();
    let mut kept = Kept::begin("scaling", options.common.label.as_deref());
    let sizes = options.sizes_mib.iter().map(|mib| ("size", mib << 20, 1 << 20));
    let values = options.value_bytes.iter().map(|bytes| ("value", (options.values_mib << 20).max(*bytes), *bytes));
    let mut left = options.sizes_mib.len() + options.value_bytes.len();
    for (grows, bytes, value_bytes) in sizes.chain(values) {
        let budget = budget.part(left);
        left -= 1;
        let shape = Shape { keys: (bytes / value_bytes).clamp(1, MOST_KEYS), value_bytes, content: Content::Strings };
        let what = format!("{} in values of {}", crate::bytes(shape.bytes()), crate::bytes(value_bytes));
        if shape.bytes() * COPIES > available_memory().unwrap_or(u64::MAX) {
            kept.note(format!("{what}: left out for lack of memory"));
            continue;
        }
        // Filling takes about as long as one or two syncs.
        let expected = Duration::from_secs_f64(5.0 + 5.0 * shape.bytes() as f64 / f64::from(1 << 30));
        if !budget.has(expected) {
            kept.note(format!("{what}: left out for lack of time"));
            continue;
        }
        eprintln!("{what}: filling a primary");
        let mut scene = Scene::set(&program, options.server.kind(), shape)?;
        let server = format!("{} ({})", options.server.kind(), scene.primary().version()?);
        for round in 0..options.common.rounds {
            if round > 0 && !budget.has(expected) {
                kept.note(format!("{what}: {round} rounds only, for lack of time"));
                break;
            }
            let mut methods = options.methods.clone();
            let count = methods.len().max(1);
            methods.rotate_left(round % count);
            for method in &methods {
                let compare = options.common.compare.is_due(round);
                let trial = Trial { method: *method, replicas: 1, writes: None, compare };
                match scene.play(&trial, &|_, _| {}) {
                    Ok(outcome) => {
                        eprintln!("{what}, {}: {:.2} s", method.name(), outcome.seconds);
                        for difference in &outcome.differences {
                            kept.note(format!("{what}, {}: NOT EQUAL: {difference}", method.name()));
                        }
                        kept.points.push(Point {
                            server: server.clone(),
                            grows: grows.to_owned(),
                            method: *method,
                            bytes: shape.bytes(),
                            value_bytes,
                            round,
                            seconds: outcome.seconds,
                            primary_cpu: outcome.primary_cpu,
                            others_cpu: outcome.agents_cpu + outcome.replica_cpu.iter().sum::<f64>(),
                            peak_memory: outcome.peak_memory,
                            source_memory: outcome.source_memory,
                            agent_memory: outcome.agent_memory,
                            equal: outcome.equal,
                        });
                    }
                    Err(error) => kept.note(format!("{what}, {}: failed: {error}", method.name())),
                }
            }
            let summary = tables::scaling(&[&kept]);
            kept.keep(options.common.out.as_deref(), &summary)?;
        }
    }
    print!("{}", tables::scaling(&[&kept]));
    Ok(kept.points.iter().all(|point| point.equal != Some(false)))
}

/// Limit on the number of values: with keys as small as 64 bytes, more of them give no new result and fill the machine.
const MOST_KEYS: u64 = 2_000_000;

/// Copies of a data set in memory at once: primary, source's table, replica, and some room for the rest.
const COPIES: u64 = 4;
