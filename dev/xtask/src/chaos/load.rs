//! The writers of a round.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use remora_bench::sync::Result;
use remora_lab::workload::Options;
use remora_lab::{Client, Random, Server, Workload};

use super::plan::{Data, Plan};

/// Writers, until they are stopped.
pub(crate) enum Load {
    /// Every kind of write.
    Every(Workload),
    /// A dozen keys that stay small.
    Small(Small),
}

impl Load {
    /// Starts writing.
    pub(crate) fn start(primary: &Server, plan: &Plan, seed: u64) -> Result<Load> {
        Ok(match plan.data {
            Data::Small => Load::Small(Small::start(primary.client()?, seed)),
            Data::Every | Data::Middle => {
                let options = Options { big_bytes: 0, pipeline: 16, ..Options::seeded(seed) }.rate(RATE);
                Load::Every(Workload::start(primary.client()?, options)?)
            }
        })
    }

    /// Stops; all that was written has been answered. Returns how many commands there were.
    pub(crate) fn stop(self) -> Result<u64> {
        match self {
            Load::Every(workload) => Ok(workload.stop()?.commands),
            Load::Small(small) => small.stop(),
        }
    }
}

/// A writer of small keys.
pub(crate) struct Small {
    stop: Arc<AtomicBool>,
    writer: Option<JoinHandle<Result<u64>>>,
}

impl Small {
    fn start(mut client: Client, seed: u64) -> Small {
        let stop = Arc::new(AtomicBool::new(false));
        let is_stopped = Arc::clone(&stop);
        let writer = thread::spawn(move || {
            let (mut random, mut commands) = (Random::new(seed), 0);
            while !is_stopped.load(Ordering::Relaxed) {
                let batch: Vec<Vec<String>> = (0..random.between(1, 40)).map(|_| small(&mut random)).collect();
                commands += client.pipeline(&batch)?.len() as u64;
                thread::sleep(Duration::from_micros(random.below(LONGEST_PAUSE_US)));
            }
            Ok(commands)
        });
        Small { stop, writer: Some(writer) }
    }

    fn stop(mut self) -> Result<u64> {
        self.halt().unwrap_or(Ok(0))
    }

    fn halt(&mut self) -> Option<Result<u64>> {
        self.stop.store(true, Ordering::Relaxed);
        Some(self.writer.take()?.join().unwrap_or_else(|_| Err("the writer's thread panicked".into())))
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        let _ = self.halt();
    }
}

/// A command none of whose effects may be lost, doubled or moved: counters, and lists that say who came when.
fn small(random: &mut Random) -> Vec<String> {
    let key = random.below(4);
    let words = match random.below(8) {
        // As long as `SELECT 0`, which a replica executes for nothing.
        0..4 => format!("INCR a{key}a"),
        4 => format!("INCRBYFLOAT f{key} 0.5"),
        5 => format!("RPUSH l{key} {:x}", random.below(1 << 16)),
        6 => format!("LTRIM l{key} -20 -1"),
        _ if random.one_in(4) => format!("SELECT {}", random.below(3)),
        _ => format!("SETRANGE s{key} {} {:x}", random.below(60), random.below(1 << 16)),
    };
    words.split(' ').map(str::to_owned).collect()
}

/// Commands per second: a hand-off through a backlog of a megabyte is possible under them.
const RATE: u64 = 1500;

/// Pause between two batches: the load has gaps, so that the border of a snapshot falls into one now and then.
const LONGEST_PAUSE_US: u64 = 20_000;
