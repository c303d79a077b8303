//! Explore: many schedules, on one thread or on several.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::run::play;
use remora_base::pace::Random;

/// Findings after which it ends early: the first ones say enough.
const FINDINGS: usize = 10;

/// How often the progress is shown.
const SHOW_EVERY: Duration = Duration::from_secs(60);

/// How much is played. The first limit that is reached ends the run.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// The time.
    pub time: Duration,
    /// The number of schedules.
    pub schedules: u64,
    /// Whether each schedule is played twice. One that is not the same both times is a finding.
    pub twice: bool,
    /// The number of threads. They take the seeds from one stream, so that the number does not decide what is played.
    pub jobs: usize,
}

/// What came of many schedules.
#[derive(Clone, Debug, Default)]
pub struct Summary {
    /// How many ran.
    pub schedules: u64,
    /// How long they took.
    pub took: Duration,
    /// What they reached, and how often.
    pub reached: BTreeMap<String, u64>,
    /// Seeds whose schedules violated what must hold, and how.
    pub findings: Vec<(u64, String)>,
}

impl Summary {
    /// The number of schedules per second.
    pub fn rate(&self) -> f64 {
        self.schedules as f64 / self.took.as_secs_f64().max(f64::EPSILON)
    }
}

/// What the threads share.
struct Progress<S> {
    seeds: S,
    summary: Summary,
    shown: Instant,
}

/// Plays schedules whose seeds follow from `first`, until a limit is reached or enough was found. With `shows`, it
/// prints its progress once a minute, and the last events of each finding.
pub fn explore(limits: Limits, first: u64, shows: bool) -> Summary {
    let began = Instant::now();
    let seeds = Random::seeded(first).draws().take(usize::try_from(limits.schedules).unwrap_or(usize::MAX));
    let progress = Mutex::new(Progress { seeds, summary: Summary::default(), shown: began });
    std::thread::scope(|scope| {
        for _ in 1..limits.jobs {
            scope.spawn(|| work(limits, began, &progress, shows));
        }
        work(limits, began, &progress, shows);
    });
    let mut summary = progress.into_inner().unwrap_or_else(PoisonError::into_inner).summary;
    summary.took = began.elapsed();
    summary
}

/// Plays schedules on this thread.
fn work<S: Iterator<Item = u64>>(limits: Limits, began: Instant, progress: &Mutex<Progress<S>>, shows: bool) {
    let locked = || progress.lock().unwrap_or_else(PoisonError::into_inner);
    loop {
        let mut progress = locked();
        if progress.summary.findings.len() >= FINDINGS || began.elapsed() >= limits.time {
            return;
        }
        let Some(seed) = progress.seeds.next() else { return };
        drop(progress);
        let mut outcome = play(seed, None, false);
        if limits.twice {
            outcome.finding = outcome.finding.or_else(|| difference(&outcome.counts, &play(seed, None, false).counts));
        }
        if shows && outcome.finding.is_some() {
            println!("{}", explain(seed));
        }
        let mut progress = locked();
        progress.summary.schedules += 1;
        for (what, count) in outcome.counts {
            *progress.summary.reached.entry(what).or_default() += count;
        }
        progress.summary.findings.extend(outcome.finding.map(|finding| (seed, finding)));
        if shows && progress.shown.elapsed() >= SHOW_EVERY {
            progress.shown = Instant::now();
            progress.summary.took = began.elapsed();
            let summary = &progress.summary;
            let (number, found) = (summary.schedules, summary.findings.len());
            println!("{number} schedules, {:.0} per second, {found} findings", summary.rate());
        }
    }
}

/// How the second play of a schedule differed from the first.
fn difference(first: &BTreeMap<String, u64>, second: &BTreeMap<String, u64>) -> Option<String> {
    let names = first.keys().chain(second.keys());
    let counts = |name: &String| (first.get(name).copied(), second.get(name).copied());
    let other = names.map(|name| (name, counts(name))).find(|(_, (one, two))| one != two);
    other.map(|(name, (one, two))| format!("the seed does not replay: {name} {one:?} times, and then {two:?} times"))
}

/// Plays the schedule of a seed again and says what it finds, with the last events.
pub fn explain(seed: u64) -> String {
    let outcome = play(seed, None, true);
    match outcome.finding {
        None => format!("REMORA_SIM_SEED={seed}: nothing is found"),
        Some(finding) => format!("{}\nREMORA_SIM_SEED={seed} runs it again: {finding}", outcome.log),
    }
}
