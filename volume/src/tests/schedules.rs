//! Schedules: many seeds, and what they must find.

use std::time::{Duration, Instant};

use super::world::World;
use super::{Counts, play_for};
use crate::mutant::Mutant;
use crate::rules::ServerId;
use crate::shape::Copies;

/// Steps of one schedule: some hundred messages, several writers, and what happens to them.
const STEPS: usize = 600;

/// How long all kinds of volumes are played together, if [`super::time`] is not told otherwise. `make test-all` says
/// three times as long.
const USUAL: Duration = Duration::from_secs(10);

/// How long the search for a rule that was taken out may take.
const FOUND_WITHIN: Duration = Duration::from_secs(300);

/// Numbers of copies, and how many must hold a write.
const KINDS: [(usize, usize); 7] = [(1, 1), (2, 1), (2, 2), (3, 1), (3, 2), (3, 3), (5, 3)];

fn copies((number, hold): (usize, usize)) -> Copies {
    Copies::new(number, hold).unwrap_or_else(|| unreachable!("a volume of {number} copies, held by {hold}"))
}

/// Plays a seed. Returns what does not hold.
fn play(seed: u64, copies: Copies, stores: bool, counts: &mut Counts) -> Option<String> {
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
    let time = super::time(USUAL) / KINDS.len() as u32;
    let mut all = Counts::new();
    for kind in KINDS {
        let what = format!("a volume of the kind {kind:?}");
        let (played, counts) = play_for(time, first, &what, |seed, counts| play(seed, copies(kind), stores, counts));
        println!("{kind:?}: {played} schedules, {counts:?}");
        counts.into_iter().for_each(|(what, count)| *all.entry(what).or_default() += count);
    }
    // By all kinds together: with few copies, or all needed, some are rare.
    let reached = [
        "a writer serves",
        "an acknowledgement",
        "a read",
        "a look",
        "a look at once",
        "zeros were taken",
        "a full copy was tried again",
    ];
    let stored = ["a power cut", "a flush"];
    let is_reached = |what: &&str| all.contains_key(what);
    assert!(reached.iter().all(is_reached) && (!stores || stored.iter().all(is_reached)), "{all:?}");
}

/// A rule that is taken out is found missing.
fn is_found(mutant: Mutant) {
    let began = Instant::now();
    let stores = mutant.is_about_stores();
    for seed in 0_u64.. {
        let kind = [(3, 2), (5, 3), (3, 2), (2, 1)][(seed % 4) as usize];
        Mutant::set(Some(mutant));
        let finding = play(seed, copies(kind), stores, &mut Counts::new());
        Mutant::set(None);
        if let Some(finding) = finding {
            assert_eq!(
                play(seed, copies(kind), stores, &mut Counts::new()),
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
fn a_full_copy_that_is_read_as_if_it_took_writes_is_found() {
    is_found(Mutant::FullCopyIsRead);
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
fn an_overlap_that_is_looked_for_at_one_block_only_is_found() {
    is_found(Mutant::OverlapOfFirst);
}

#[test]
fn a_write_of_which_one_run_counts_is_found() {
    is_found(Mutant::FirstRunOnly);
}

#[test]
fn zeros_that_are_not_taken_are_found() {
    is_found(Mutant::ZerosNotTaken);
}

#[test]
fn a_read_whose_newest_block_is_taken_to_be_the_first_is_found() {
    is_found(Mutant::NewestOfFirst);
}

#[test]
fn a_copy_that_is_whole_before_its_blocks_is_found() {
    is_found(Mutant::WholeBeforeBlocks);
}

/// A rule that hardly any random schedule finds missing, as it takes several power cuts at the right moments: a
/// schedule that was thought of finds it.
fn is_found_by(mutant: Mutant, expected: &str, schedule: fn(&mut World) -> Result<(), String>) {
    let play = |mutant| {
        Mutant::set(mutant);
        let finding = schedule(&mut World::new(1, copies((3, 2)), true)).err();
        Mutant::set(None);
        finding
    };
    assert_eq!(play(None), None);
    let finding = play(Some(mutant));
    assert!(finding.as_ref().is_some_and(|finding| finding.contains(expected)), "{finding:?}");
}

/// Server 0 has a write that was not acknowledged. The next writer marks it and server 1, which then loses its power and
/// forgets that. A third writer, which does not reach server 0, begins the same generation with other blocks.
#[test]
fn a_promise_that_is_not_durable_is_found() {
    is_found_by(Mutant::PromiseNotDurable, "generation 2 begins with", |world| {
        world.begin(&[2]);
        world.go_on(&[0, 1], true)?;
        world.lose(0, ServerId(1));
        world.write_block(0, 0);
        world.go_on(&[0], true)?;
        world.die(0);
        world.begin(&[2]);
        world.go_on(&[0], true)?;
        world.die(1);
        world.lose_power(1, Some(0));
        world.begin(&[0]);
        world.go_on(&[1, 2], true)
    });
}

/// Server 0 has a write that was not acknowledged. The next writer levels server 1 with it, and reads it. Server 1 loses its
/// power, and server 0 does not answer.
#[test]
fn a_mark_that_is_not_durable_is_found() {
    is_found_by(Mutant::MarkNotDurable, "was flushed at", |world| {
        world.begin(&[2]);
        world.go_on(&[0, 1], true)?;
        world.lose(0, ServerId(1));
        world.write_block(0, 0);
        world.go_on(&[0], true)?;
        world.die(0);
        world.begin(&[2]);
        world.go_on(&[], false)?; // is asked to promise
        world.sync_one(0);
        world.sync_one(1);
        world.go_on(&[0], true)?; // levels and marks
        world.die(1);
        world.lose_power(1, Some(0));
        world.begin(&[0]);
        world.go_on(&[1, 2], true)
    });
}

/// A flushed write is at servers 0 and 1. Server 2 has caught up, and server 0 has begun to, when both lose their power and
/// server 1 does not answer: server 0 alone knows that there was more than server 2 has.
#[test]
fn a_claim_that_is_not_durable_is_found() {
    is_found_by(Mutant::ClaimNotDurable, "was flushed at", |world| {
        world.begin(&[2]);
        world.go_on(&[0, 1], true)?;
        world.write_block(0, 0);
        world.flush_of(0);
        world.go_on(&[0, 1], true)?;
        world.reach_again(0, 2);
        world.go_on(&[], true)?;
        world.lose(0, ServerId(0));
        world.reach_again(0, 0);
        world.go_on(&[0], false)?; // server 0 is behind, durably
        world.die(0);
        world.lose_power(0, None);
        world.lose_power(2, Some(0));
        world.begin(&[1]);
        world.go_on(&[0, 2], true)
    });
}

/// A write is at server 0, durably, when server 2 catches up with it. Then server 2 loses its power, and server 0 does not
/// answer: server 1 never had the write.
#[test]
fn a_copy_that_was_behind_and_counts_at_once_is_found() {
    is_found_by(Mutant::BehindCounts, "was flushed at", |world| {
        world.begin(&[2]);
        world.go_on(&[0, 1], true)?;
        world.lose(0, ServerId(1));
        world.write_block(0, 0);
        world.flush_of(0);
        world.go_on(&[0], true)?;
        world.reach_again(0, 2);
        world.go_on(&[0], true)?;
        world.die(0);
        world.lose_power(2, Some(0));
        world.begin(&[0]);
        world.go_on(&[1, 2], true)
    });
}

/// Of two copies that have a write, one has synced it, when the other one loses its power and the first does not answer.
#[test]
fn a_flush_that_is_complete_early_is_found() {
    is_found_by(Mutant::FlushedEarly, "was flushed at", |world| {
        world.begin(&[2]);
        world.go_on(&[0, 1], true)?;
        world.write_block(0, 0);
        world.flush_of(0);
        world.go_on(&[0], true)?;
        world.die(0);
        world.lose_power(1, Some(0));
        world.begin(&[0]);
        world.go_on(&[1, 2], true)
    });
}

/// Two copies have a write, and have not synced it, when both lose their power.
fn two_lose_their_power(world: &mut World) -> Result<(), String> {
    world.begin(&[2]);
    world.go_on(&[0, 1], true)?;
    world.write_block(0, 0);
    world.flush_of(0);
    world.go_on(&[], true)?;
    world.die(0);
    world.lose_power(0, Some(0));
    world.lose_power(1, Some(0));
    world.begin(&[2]);
    world.go_on(&[0, 1], true)
}

#[test]
fn a_store_that_is_believed_before_it_is_synced_is_found() {
    is_found_by(Mutant::AppliedIsDurable, "was flushed at", two_lose_their_power);
}

#[test]
fn a_power_cut_that_is_not_said_is_found() {
    is_found_by(Mutant::CutUnsaid, "was seen at", two_lose_their_power);
}
