//! Explore: many schedules, one after the other.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use super::operator::seeds;
use super::run::play;

/// Findings after which it ends early: the first ones say enough.
const FINDINGS: usize = 10;

/// How often the progress is shown.
const SHOW_EVERY: Duration = Duration::from_secs(60);

/// What came of many schedules.
#[derive(Clone, Debug, Default)]
pub struct Summary {
    /// How many ran.
    pub schedules: u64,
    /// What they reached, and how often.
    pub reached: BTreeMap<String, u64>,
    /// Seeds whose schedules violated what must hold, and how.
    pub findings: Vec<(u64, String)>,
}

/// Plays schedules whose seeds follow from `first`, for this time or until enough was found. With `shows`, it prints
/// its progress once a minute, and the last events of each finding.
pub fn explore(limit: Duration, first: u64, shows: bool) -> Summary {
    let (began, mut shown) = (Instant::now(), Instant::now());
    let mut summary = Summary::default();
    for seed in seeds(first) {
        if began.elapsed() >= limit || summary.findings.len() >= FINDINGS {
            break;
        }
        let outcome = play(seed, None, false);
        summary.schedules += 1;
        for (what, count) in outcome.counts {
            *summary.reached.entry(what).or_default() += count;
        }
        if let Some(finding) = outcome.finding {
            if shows {
                println!("{}", explain(seed));
            }
            summary.findings.push((seed, finding));
        }
        if shows && shown.elapsed() >= SHOW_EVERY {
            shown = Instant::now();
            let minutes = began.elapsed().as_secs_f64() / 60.0;
            let (number, found) = (summary.schedules, summary.findings.len());
            println!("{number} schedules, {:.0} a minute, {found} findings", number as f64 / minutes);
        }
    }
    summary
}

/// Plays the schedule of a seed again and says what it finds, with the last events.
pub fn explain(seed: u64) -> String {
    let outcome = play(seed, None, true);
    match outcome.finding {
        None => format!("REMORA_SIM_SEED={seed}: nothing is found"),
        Some(finding) => format!("{}\nREMORA_SIM_SEED={seed} runs it again: {finding}", outcome.log),
    }
}
