//! Schedules in the tests, and the faults that they must find.
#![allow(clippy::unwrap_used)]

use std::time::{Duration, Instant};

use super::explore::{explain, explore};
use super::operator::seeds;
use super::run::play;
use crate::mutation::Mutation;

/// How long schedules are played, and how many there must be: a tenth of what one core plays in that time.
const LIMIT: Duration = Duration::from_secs(30);
const LEAST_SCHEDULES: u64 = 200;

#[test]
fn what_must_hold_does_in_schedules_of_many_seeds() {
    if let Some(seed) = std::env::var("REMORA_SIM_SEED").ok().and_then(|seed| seed.parse().ok()) {
        return println!("{}", explain(seed));
    }
    let summary = explore(LIMIT, 1, true);
    println!("{} schedules: {:#?}", summary.schedules, summary.reached);
    assert!(summary.findings.is_empty(), "{:#?}", summary.findings);
    assert!(summary.schedules >= LEAST_SCHEDULES, "{} schedules", summary.schedules);
}

#[test]
fn a_seed_replays() {
    for seed in seeds(2).take(3) {
        let [one, other] = [play(seed, None, true), play(seed, None, true)];
        assert_eq!(one.log, other.log);
        assert_eq!(one.counts, other.counts);
    }
}

/// The simulation finds a fault that is put back.
fn is_found(mutation: Mutation, as_what: &str) {
    let began = Instant::now();
    for (number, seed) in seeds(3).enumerate() {
        if let Some(finding) = play(seed, Some(mutation), false).finding
            && finding.contains(as_what)
        {
            assert_eq!(play(seed, None, false).finding, None, "the seed {seed} finds another fault");
            return println!("{mutation:?} after {number} schedules: {finding}");
        }
        assert!(began.elapsed() < Duration::from_secs(60), "{mutation:?} was not found in {number} schedules");
    }
}

#[test]
fn a_position_that_is_kept_while_the_server_is_emptied_is_found() {
    is_found(Mutation::PositionKept, "says that it is in step");
}

#[test]
fn a_promotion_that_is_undone_is_found() {
    is_found(Mutation::NoLook, "which the operator took over");
}

#[test]
fn another_history_that_is_ignored_is_found() {
    is_found(Mutation::OtherHistoryIgnored, "says that it is in step");
}

#[test]
fn a_closed_connection_that_is_kept_is_found() {
    is_found(Mutation::ClosedConnectionKept, "which has ended");
}

#[test]
fn a_full_copy_that_is_aborted_is_found() {
    is_found(Mutation::FullCopyAborted, "takes by itself");
}
