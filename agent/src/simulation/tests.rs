//! Schedules in the tests, and the faults that they must find.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use super::operator::seeds;
use super::run::{Outcome, play};
use crate::mutation::Mutation;

/// Panics with everything that is known of a schedule.
fn explain(seed: u64) -> ! {
    let Outcome { finding, log, .. } = play(seed, None, true);
    panic!("{log}\nREMORA_SIM_SEED={seed} runs it again: {finding:?}");
}

#[test]
fn schedules() {
    if let Some(seed) = std::env::var("REMORA_SIM_SEED").ok().and_then(|seed| seed.parse().ok()) {
        match play(seed, None, true).finding {
            Some(_) => explain(seed),
            None => return,
        }
    }
    let began = Instant::now();
    let mut counts: BTreeMap<String, u64> = BTreeMap::new();
    let mut number = 0;
    for seed in seeds(1) {
        if began.elapsed() > Duration::from_secs(40) {
            break;
        }
        let outcome = play(seed, None, false);
        if outcome.finding.is_some() {
            println!("after {number} schedules");
            explain(seed);
        }
        number += 1;
        outcome.counts.into_iter().for_each(|(what, count)| *counts.entry(what).or_default() += count);
    }
    println!("{number} schedules: {counts:#?}");
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
