//! Schedules in the tests, and the faults that they must find.
#![allow(clippy::unwrap_used)]

use std::time::{Duration, Instant};

use super::plan::Plan;
use super::run::play;
use super::run::{Limits, explain, explore};
use remora_base::mutation::Mutation;
use remora_base::pace::Random;

/// How many schedules are played by `make test`, by `make test-all`, and for how long at most: a busy machine plays a
/// few in a second.
const SCHEDULES: u64 = 40;
const MORE_SCHEDULES: u64 = 400;
const LIMIT: Duration = Duration::from_secs(300);

/// How long the search for a fault may take: seconds on an idle machine, and up to ten times as long beside other
/// tests.
const FOUND_WITHIN: Duration = Duration::from_secs(300);

/// Seeds that once found a fault, and which.
const FOUND: [(u64, &str); 15] = [
    (4_474_298_603_552_836_524, "a full ring without a reader held up the next replica for ever"),
    (16_555_945_931_975_370_203, "a snapshot that began again was read in the phase Load, and its window stood still"),
    (9_911_429_021_584_333_846, "a server that had loaded a snapshot was said to hold what it held before"),
    (13_993_092_097_711_418_162, "as the second, with a smaller window"),
    (
        11_168_514_840_210_456_975,
        "an agent that closed the link of a server, which was promoted just then, waited for ever",
    ),
    (4_563_113_557_085_440_407, "as the fifth, with a killed agent"),
    (7_249_279_064_245_750_149, "as the fifth, with a server that crashed"),
    (
        15_796_549_188_492_407_312,
        "a full ring without a reader was kept for a replica that had loaded and needed the stream only",
    ),
    (7_225_482_857_048_614_238, "a stopped agent waited --retry-for for a full copy that its server took"),
    (18_380_026_408_176_979_787, "REPLICAOF was repeated to a loading server, which was promoted meanwhile"),
    (10_127_402_616_368_650_530, "a server that had loaded got the stream of the history after its own"),
    (1_870_137_823_949_232_611, "a server that came back empty on its way to the primary got no source any more"),
    (5_881_100_582_862_365_907, "a full copy was ended that began while the agent gave the server its login"),
    (3_115_134_766_651_315_598, "a slot that one lender had lost was awaited for ever from another without it"),
    (9_075_546_820_424_752_924, "a pin that the primary had closed was trusted until the next look at it"),
];

#[test]
fn what_must_hold_does_in_schedules_of_many_seeds() {
    if let Some(seed) = std::env::var("REMORA_SIM_SEED").ok().and_then(|seed| seed.parse().ok()) {
        return println!("{}", explain(seed));
    }
    what_must_hold_does(SCHEDULES);
}

#[test]
#[ignore = "long: make test-all"]
fn what_must_hold_does_in_schedules_of_many_more_seeds() {
    what_must_hold_does(MORE_SCHEDULES);
}

fn what_must_hold_does(schedules: u64) {
    let summary = explore(Limits { time: LIMIT, schedules, jobs: 1, twice: false }, 1, true);
    println!("{} schedules: {:#?}", summary.schedules, summary.reached);
    assert!(summary.findings.is_empty(), "{:#?}", summary.findings);
    assert_eq!(summary.schedules, schedules, "in {LIMIT:?}");
}

#[test]
fn seeds_that_once_found_a_fault_find_nothing() {
    for (seed, what) in FOUND {
        let finding = play(seed, None, false).finding;
        assert_eq!(finding, None, "{what}\n{}", explain(seed));
    }
}

#[test]
fn the_number_of_threads_does_not_change_what_is_played() {
    let [one, two] = [1, 2].map(|jobs| explore(Limits { time: LIMIT, schedules: 6, jobs, twice: false }, 4, false));
    assert_eq!((one.schedules, two.schedules), (6, 6));
    assert_eq!((one.reached, one.findings), (two.reached, two.findings));
    let none = explore(Limits { time: Duration::ZERO, schedules: 6, jobs: 2, twice: false }, 4, false);
    assert_eq!(none.schedules, 0);
}

/// What is left to chance in the program differs each time. The kernel delivers a byte later than it was written now
/// and then, on a busy machine, and hardly in two plays in a row.
#[test]
fn a_seed_replays() {
    for seed in Random::seeded(2).draws().take(3) {
        let mut last = play(seed, None, true);
        let replayed = (1..PLAYS).any(|_| {
            let before = std::mem::replace(&mut last, play(seed, None, true));
            before.log == last.log && before.counts == last.counts
        });
        assert!(replayed, "seed {seed}: no two of {PLAYS} plays in a row are the same; the last:\n{}", last.log);
    }
}

/// How often a seed is played until two plays in a row are the same.
const PLAYS: u32 = 4;

#[test]
#[ignore = "long: make test-all"]
fn agents_read_from_lenders_which_lie_go_away_and_write_over_slots() {
    let began = Instant::now();
    let mut missing = vec!["relay: a lender is read", "relay: Lied", "relay: Gone", "relay: Passed"];
    for seed in Random::seeded(5).draws().filter(|&seed| Plan::of(seed).has_relays()) {
        let outcome = play(seed, None, false);
        assert_eq!(outcome.finding, None, "{}", explain(seed));
        missing.retain(|what| !outcome.counts.contains_key(*what));
        if missing.is_empty() {
            return;
        }
        assert!(began.elapsed() < FOUND_WITHIN, "not reached: {missing:?}");
    }
}

/// The simulation finds a fault that is put back.
fn is_found(mutation: Mutation, as_what: &str) {
    is_found_among(mutation, as_what, |_| true);
}

/// As [`is_found`], in schedules whose agents have the real delivery.
fn is_found_by_real_deliveries(mutation: Mutation, as_what: &str) {
    is_found_among(mutation, as_what, Plan::has_a_real_delivery);
}

fn is_found_among(mutation: Mutation, as_what: &str, which: impl Fn(&Plan) -> bool) {
    let began = Instant::now();
    for (number, seed) in Random::seeded(3).draws().filter(|&seed| which(&Plan::of(seed))).enumerate() {
        if let Some(finding) = play(seed, Some(mutation), false).finding
            && finding.contains(as_what)
        {
            assert_eq!(play(seed, None, false).finding, None, "the seed {seed} finds another fault");
            return println!("{mutation:?} after {number} schedules: {finding}");
        }
        assert!(began.elapsed() < FOUND_WITHIN, "{mutation:?} was not found in {number} schedules");
    }
}

#[test]
#[ignore = "long: make test-all"]
fn a_position_that_is_kept_while_the_server_is_emptied_is_found() {
    is_found_among(Mutation::PositionKept, "says that it is in step", Plan::has_traps_at_a_module);
}

#[test]
fn a_promotion_that_is_undone_is_found() {
    is_found(Mutation::NoLook, "which the operator took over");
}

#[test]
#[ignore = "long: make test-all"]
fn another_history_that_is_ignored_is_found() {
    is_found(Mutation::OtherHistoryIgnored, "says that it is in step");
}

#[test]
fn a_closed_connection_that_is_kept_is_found() {
    is_found(Mutation::ClosedConnectionKept, "which has ended");
}

#[test]
#[ignore = "long: make test-all"]
fn a_lender_that_was_taken_away_and_is_asked_is_found() {
    is_found_among(Mutation::AssignmentForgotten, "the source had taken away", Plan::has_relays);
}

#[test]
fn a_command_that_is_given_to_an_agent_which_joined_after_it_is_found() {
    is_found(Mutation::LateCommandsServed, "must not be applied late");
}

#[test]
#[ignore = "long: make test-all"]
fn a_turn_that_does_not_end_is_found() {
    is_found(Mutation::TurnKept, "still at work long after the last fault");
}

/// Plans whose writes are longer than a backlog that can be pinned.
fn is_found_under_long_writes(mutation: Mutation, as_what: &str) {
    is_found_among(mutation, as_what, Plan::has_long_writes_that_can_be_pinned);
}

#[test]
fn a_hand_off_without_a_pin_is_found() {
    is_found_under_long_writes(Mutation::PinNotOpened, "takes a full copy there");
}

#[test]
#[ignore = "long: make test-all"]
fn a_pin_that_is_closed_before_the_server_is_there_is_found() {
    is_found_under_long_writes(Mutation::PinClosedEarly, "takes a full copy there");
}

#[test]
#[ignore = "long: make test-all"]
fn a_backlog_that_is_believed_while_it_is_over_full_is_found() {
    is_found_among(Mutation::OverfullBelieved, "the primary", Plan::floods_a_shared_buffer);
}

#[test]
fn a_full_copy_that_is_aborted_is_found() {
    // A server is asked for before it goes to the primary. Only a primary that loses its history at that moment makes
    // it take a full copy there.
    is_found_among(Mutation::FullCopyAborted, "takes by itself", Plan::may_copy_for_long_at_the_hand_off);
}

#[test]
fn a_payload_that_is_ended_early_is_found() {
    is_found_by_real_deliveries(Mutation::PayloadEndedEarly, "says that it is in step");
}

#[test]
#[ignore = "long: make test-all"]
fn a_stream_that_does_not_wait_for_the_ack_is_found() {
    is_found_by_real_deliveries(Mutation::StreamBeforeTheAck, "says that it is in step");
}

/// A source reads a small snapshot, its header and the first bytes of the stream at once, and drops what lies behind
/// the snapshot.
#[test]
fn the_first_bytes_of_the_stream_that_are_dropped_are_found() {
    is_found(Mutation::AheadDropped, "says that it is in step");
}

#[test]
#[ignore = "long: make test-all"]
fn a_server_that_is_continued_at_the_wrong_offset_is_found() {
    // The server must lose what is under way to it after it has loaded, and come back to the link.
    is_found_among(Mutation::OffsetIgnored, "says that it is in step", Plan::cuts_real_links);
}

#[test]
#[ignore = "long: make test-all"]
fn a_source_of_another_data_set_that_is_taken_is_found() {
    is_found_among(Mutation::ForeignSourceTaken, "the data set of another primary", |plan| plan.foreign);
}

#[test]
fn an_offer_that_is_forgotten_while_the_server_is_handed_over_is_found() {
    is_found_among(Mutation::OfferForgotten, "", Plan::reattaches);
}

#[test]
fn a_source_of_another_data_set_is_met_and_refused() {
    let began = Instant::now();
    for seed in Random::seeded(6).draws().filter(|&seed| Plan::of(seed).foreign) {
        let outcome = play(seed, None, false);
        assert_eq!(outcome.finding, None, "{}", explain(seed));
        if outcome.counts.contains_key("a source of another data set") {
            return;
        }
        assert!(began.elapsed() < FOUND_WITHIN, "not reached");
    }
}

/// Plans with two sources.
fn is_found_beside_a_standby(mutation: Mutation, as_what: &str) {
    is_found_among(mutation, as_what, Plan::has_a_standby);
}

#[test]
fn readers_go_on_at_their_slot_and_at_their_byte_with_the_other_source() {
    let began = Instant::now();
    let mut missing = vec!["a reader goes on at its slot with another source", "a reader goes on with another source"];
    for seed in Random::seeded(7).draws().filter(|&seed| Plan::of(seed).has_a_standby()) {
        let outcome = play(seed, None, false);
        assert_eq!(outcome.finding, None, "{}", explain(seed));
        missing.retain(|what| !outcome.counts.contains_key(*what));
        if missing.is_empty() {
            return;
        }
        assert!(began.elapsed() < FOUND_WITHIN, "not reached: {missing:?}");
    }
}

#[test]
fn a_copy_that_is_numbered_on_is_found() {
    is_found_beside_a_standby(Mutation::CopyNumbersOn, "call different snapshots");
}

#[test]
fn a_hand_off_that_is_asked_of_a_source_beside_another_server_is_found() {
    is_found_beside_a_standby(Mutation::FirstPlanBelieved, "by a source that has asked");
}

#[test]
fn a_gap_behind_a_copy_is_found() {
    is_found_beside_a_standby(Mutation::CopyLeavesAGap, "says that it is in step");
}

#[test]
fn a_copy_for_which_the_server_is_not_asked_first_is_found() {
    is_found_beside_a_standby(Mutation::CopyUnasked, "for what it does not have");
}

#[test]
fn a_copy_of_another_history_is_found() {
    is_found_beside_a_standby(Mutation::AnyHistoryCopied, "whose history its server does not have");
}

#[test]
#[ignore = "long: make test-all"]
fn a_copy_over_a_snapshot_that_is_read_is_found() {
    is_found_beside_a_standby(Mutation::CopyOverReaders, "still reads");
}

#[test]
fn a_standby_that_forks_at_once_is_found() {
    is_found_beside_a_standby(Mutation::StandbyForksAtOnce, "for a replica that has waited");
}

#[test]
fn a_fork_for_a_standby_alone_is_found() {
    is_found_beside_a_standby(Mutation::ForkForAStandby, "no replica waits for one");
}

#[test]
fn a_reader_that_tries_one_source_of_two_is_found() {
    is_found_beside_a_standby(Mutation::OneSourceTried, "long after the last fault");
}

#[test]
fn errors_of_the_server_that_are_not_heard_are_found() {
    is_found_among(Mutation::ErrorsUnheard, "says that all is well", Plan::has_a_server_that_lacks_a_command);
}
