//! Random schedules against the rules, and the rules taken out one at a time: many seeds, and what they must find.

mod world;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::rules::{Mutant, ServerId};
use crate::shape::Copies;
use world::World;

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

/// Steps of one schedule: some hundred messages, several writers, and what happens to them.
const STEPS: usize = 600;

/// How long all kinds of volumes are played together, if [`time`] is not told otherwise. `make test-all` says
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
    let time = time(USUAL) / KINDS.len() as u32;
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

/// Server 0 has a write that was not acknowledged. The next writer marks it and server 1, which then loses its power
/// and forgets that. A third writer, which does not reach server 0, begins the same generation with other blocks.
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

/// Server 0 has a write that was not acknowledged. The next writer levels server 1 with it, and reads it. Server 1
/// loses its power, and server 0 does not answer.
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

/// A flushed write is at servers 0 and 1. Server 2 has caught up, and server 0 has begun to, when both lose their power
/// and server 1 does not answer: server 0 alone knows that there was more than server 2 has.
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

/// A write is at server 0, durably, when server 2 catches up with it. Then server 2 loses its power, and server 0 does
/// not answer: server 1 never had the write.
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

/// Of two copies that have a write, one has synced it, when the other one loses its power and the first does not
/// answer.
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
