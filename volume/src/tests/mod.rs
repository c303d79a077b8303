//! Random schedules against the rules, and the rules taken out one at a time; readers against torn
//! reads; volumes that grow while commands and servers vanish.

mod schedules;
mod sizes;
mod torn;
mod world;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

// Plays: how long random plays go on, and on how many threads. `make simulate-volume` plays for long.

/// What was reached, and how often.
pub(crate) type Counts = BTreeMap<&'static str, u64>;

/// The environment variable that says how many seconds each of the tests plays.
const SECONDS_VARIABLE: &str = "REMORA_PLAY_SECONDS";

/// The environment variable that says on how many threads each of them does. Without it, on one: the tests of a program
/// run beside each other.
const JOBS_VARIABLE: &str = "REMORA_PLAY_JOBS";

fn variable(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{name}={text} is not a number")))
}

/// How long a test plays that plays for `usual` if it is not told.
pub(crate) fn time(usual: Duration) -> Duration {
    variable(SECONDS_VARIABLE).map_or(usual, Duration::from_secs)
}

/// Plays one seed after the other for this time. The threads take the seeds from one sequence. Returns how many were
/// played, and what they reached.
///
/// # Panics
/// A play has found something. The message says how to play its seed again.
pub(crate) fn play_for(
    time: Duration,
    first: u64,
    what: &str,
    play: impl Fn(u64, &mut Counts) -> Option<String> + Sync,
) -> (u64, Counts) {
    let (began, next, is_over) = (Instant::now(), AtomicU64::new(0), AtomicBool::new(false));
    let (all, findings) = (Mutex::new(Counts::new()), Mutex::new(Vec::new()));
    let work = || {
        let mut counts = Counts::new();
        while began.elapsed() < time && !is_over.load(Ordering::Relaxed) {
            let seed = first.wrapping_add(next.fetch_add(1, Ordering::Relaxed));
            if let Some(finding) = play(seed, &mut counts) {
                is_over.store(true, Ordering::Relaxed);
                findings.lock().unwrap_or_else(PoisonError::into_inner).push((seed, finding));
            }
        }
        let mut all = all.lock().unwrap_or_else(PoisonError::into_inner);
        counts.into_iter().for_each(|(what, count)| *all.entry(what).or_default() += count);
    };
    std::thread::scope(|scope| {
        for _ in 1..variable(JOBS_VARIABLE).unwrap_or(1) {
            scope.spawn(work);
        }
        work();
    });
    let findings = findings.into_inner().unwrap_or_else(PoisonError::into_inner);
    if let Some((seed, finding)) = findings.first() {
        panic!("{what}: {finding}; REMORA_SEED={seed} plays it again, as the first one");
    }
    (next.into_inner(), all.into_inner().unwrap_or_else(PoisonError::into_inner))
}

#[test]
fn every_seed_is_played_once_and_a_finding_ends_the_plays() {
    let seen = Mutex::new(Vec::new());
    let play = |seed, counts: &mut Counts| {
        seen.lock().unwrap_or_else(PoisonError::into_inner).push(seed);
        *counts.entry("a play").or_default() += 1;
        (seed == 1).then(|| "found".to_owned())
    };
    let ended = std::panic::catch_unwind(|| play_for(Duration::from_secs(60), u64::MAX - 1, "the test", play));
    let why = ended.err().and_then(|why| why.downcast::<String>().ok()).unwrap_or_default();
    assert!(why.contains("found; REMORA_SEED=1 "), "{why}");
    let mut seen = seen.into_inner().unwrap_or_else(PoisonError::into_inner);
    seen.sort_unstable();
    seen.dedup();
    assert!([0, 1, u64::MAX - 1, u64::MAX].iter().all(|seed| seen.contains(seed)), "{seen:?}");
}
