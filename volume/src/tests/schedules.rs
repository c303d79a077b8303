//! Schedules: many seeds, and what they must find.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use super::world::World;
use crate::mutant::Mutant;
use crate::shape::Copies;

/// Steps of one schedule: some hundred messages, several writers, and what happens to them.
const STEPS: usize = 600;

/// How long each kind of volume is played.
const LIMIT: Duration = Duration::from_secs(3);

/// How long the search for a rule that was taken out may take.
const FOUND_WITHIN: Duration = Duration::from_secs(300);

/// Numbers of copies, and how many must hold a write.
const KINDS: [(usize, usize); 7] = [(1, 1), (2, 1), (2, 2), (3, 1), (3, 2), (3, 3), (5, 3)];

fn copies((number, hold): (usize, usize)) -> Copies {
    Copies::new(number, hold).unwrap_or_else(|| unreachable!("a volume of {number} copies, held by {hold}"))
}

/// Plays a seed. Returns what does not hold.
fn play(seed: u64, copies: Copies, stores: bool, counts: &mut BTreeMap<&'static str, u64>) -> Option<String> {
    let mut world = World::new(seed, copies, stores);
    let finding = world.play(STEPS).err();
    for (what, count) in world.counts {
        *counts.entry(what).or_default() += count;
    }
    finding
}

#[test]
fn nothing_that_was_acknowledged_or_read_is_ever_lost() {
    nothing_is_lost(false);
}

#[test]
fn nothing_that_was_flushed_is_ever_lost_and_no_other_loss_is_unsaid() {
    nothing_is_lost(true);
}

fn nothing_is_lost(stores: bool) {
    let first = remora_lab::random::seed("schedules");
    for kind in KINDS {
        let (began, mut played, mut counts) = (Instant::now(), 0, BTreeMap::new());
        while began.elapsed() < LIMIT {
            let seed = first.wrapping_add(played);
            let finding = play(seed, copies(kind), stores, &mut counts);
            assert_eq!(finding, None, "REMORA_SEED={seed} plays it again, as the first of its kind {kind:?}");
            played += 1;
        }
        println!("{kind:?}: {played} schedules, {counts:?}");
        assert!(
            ["a writer serves", "an acknowledgement", "a read", "a look", "a look at once"]
                .iter()
                .all(|what| counts.contains_key(what))
                && (!stores || ["a power cut", "a flush"].iter().all(|what| counts.contains_key(what))),
            "{counts:?}"
        );
    }
}

/// A rule that is taken out is found missing.
fn is_found(mutant: Mutant) {
    let began = Instant::now();
    let stores = mutant.is_about_stores();
    for seed in 0_u64.. {
        let kind = [(3, 2), (5, 3), (3, 2), (2, 1)][(seed % 4) as usize];
        Mutant::set(Some(mutant));
        let finding = play(seed, copies(kind), stores, &mut BTreeMap::new());
        Mutant::set(None);
        if let Some(finding) = finding {
            assert_eq!(
                play(seed, copies(kind), stores, &mut BTreeMap::new()),
                None,
                "the seed {seed} finds another fault"
            );
            return println!("{mutant:?} after {seed} schedules: {finding}");
        }
        assert!(began.elapsed() < FOUND_WITHIN, "{mutant:?} was not found in {seed} schedules");
    }
}

#[test]
fn a_forgotten_claim_is_found() {
    is_found(Mutant::ClaimForgotten);
}

#[test]
fn servers_that_promise_nothing_are_found() {
    is_found(Mutant::NothingPromised);
}

#[test]
fn a_missing_mark_is_found() {
    is_found(Mutant::NotMarked);
}

#[test]
fn an_empty_server_that_counts_is_found() {
    is_found(Mutant::EmptyCounts);
}

#[test]
fn an_empty_server_that_is_taken_in_unasked_is_found() {
    is_found(Mutant::NotConfirmed);
}

#[test]
fn a_lender_that_lends_too_early_is_found() {
    is_found(Mutant::LenderTooEarly);
}

#[test]
fn a_copy_that_is_whole_too_early_is_found() {
    is_found(Mutant::WholeTooEarly);
}

#[test]
fn a_write_that_is_acknowledged_early_is_found() {
    is_found(Mutant::AcknowledgedEarly);
}

#[test]
fn a_generation_of_two_writers_is_found() {
    is_found(Mutant::GenerationShared);
}

#[test]
fn a_read_that_is_given_out_early_is_found() {
    is_found(Mutant::ReadUnacknowledged);
}

#[test]
fn a_read_of_a_copy_that_is_behind_is_found() {
    is_found(Mutant::ReadBehind);
}

#[test]
fn a_look_at_a_copy_that_lacks_a_write_is_found() {
    is_found(Mutant::LookTooEarly);
}

#[test]
fn a_look_that_ignores_the_line_is_found() {
    is_found(Mutant::LineIgnored);
}

#[test]
fn a_line_that_is_read_before_the_blocks_is_found() {
    is_found(Mutant::LineFirst);
}

#[test]
fn a_promise_that_is_not_durable_is_found() {
    is_found(Mutant::PromiseNotDurable);
}

#[test]
fn a_flush_that_is_complete_early_is_found() {
    is_found(Mutant::FlushedEarly);
}

#[test]
fn a_store_that_is_believed_before_it_is_synced_is_found() {
    is_found(Mutant::AppliedIsDurable);
}

#[test]
fn a_power_cut_that_is_not_said_is_found() {
    is_found(Mutant::CutUnsaid);
}

#[test]
fn a_copy_that_is_whole_before_its_blocks_is_found() {
    is_found(Mutant::WholeBeforeBlocks);
}
