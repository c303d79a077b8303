//! Tests of the source's decisions without any I/O: events and times go in, actions come out.
#![allow(clippy::unwrap_used)]

use std::num::NonZeroU32;
use std::time::{Duration, Instant};

use remora_protocol::{Phase, RefusalCode, WaitCause};
use remora_redis::ReplId;
use rustix::time::{ClockId, clock_gettime};

use super::{UNMOVED_LIMIT, *};
use crate::capture::{CaptureError, CaptureEvent};
use remora_base::mutation::Mutation;

const RULES: Rules = Rules {
    max_age: Duration::from_secs(3600),
    max_replicas: 3,
    stall_limit: Duration::from_secs(60),
    fork_interval: Duration::from_secs(30),
    slot_bytes: 1 << 20,
    repeat_messages: Duration::ZERO,
    at_once: None,
    standby: None,
};

const FIRST: u64 = 100;

/// A machine, and the reading of the tables that it is given. Slots that it lets the writer reuse are kept apart from
/// the other actions.
struct Bench {
    machine: Machine,
    reading: Reading,
    retire_below: u64,
    now: Instant,
}

impl Bench {
    fn new() -> Bench {
        Bench::with(RULES, false)
    }

    fn with(rules: Rules, eager: bool) -> Bench {
        let now = Instant::now();
        let machine = Machine::new(now, rules, Backoff::seeded(1), FIRST, eager);
        Bench { machine, reading: Reading::default(), retire_below: 0, now }
    }

    fn event(&mut self, event: Event) -> Vec<Action> {
        let mut actions = self.machine.apply(self.now, self.reading, event);
        actions.retain(|action| match action {
            Action::AllowRetiring { below } => {
                self.retire_below = *below;
                false
            }
            _ => true,
        });
        actions
    }

    fn join(&mut self, session: Session) -> Vec<Action> {
        self.join_with(session, None)
    }

    fn join_with(&mut self, session: Session, resume: Option<Resume>) -> Vec<Action> {
        self.join_in("", session, resume)
    }

    fn join_in(&mut self, zone: &str, session: Session, resume: Option<Resume>) -> Vec<Action> {
        let (name, address, zone) = (format!("r{session}"), String::new(), zone.to_owned());
        self.event(Event::Joined { session, name, address, zone, resume, reads: Format::Own })
    }

    fn after(&mut self, time: Duration) -> Vec<Action> {
        self.now += time;
        self.event(Event::Tick)
    }

    fn progress(&mut self, session: Session, phase: Phase, slots_below: u64) -> Vec<Action> {
        let at = Report { phase, slots_below, slots_held: slots_below, ..Report::NOTHING };
        self.event(Event::Progress { session, at })
    }

    fn journal_at(&mut self, first: u64, end: u64) {
        (self.reading.journal_first, self.reading.journal_end) = (first, end);
    }

    /// A snapshot has started. The reading of the table is that of a new one.
    fn started(&mut self, generation: u64, replid: ReplId, offset: u64) -> Vec<Action> {
        self.reading = Reading { published: 0, retired: 0, writer_waits: 0, ..self.reading };
        self.retire_below = 0;
        if self.machine.stream.is_none() {
            self.journal_at(offset + 1, offset);
        }
        self.event(Event::Capture(CaptureEvent::Started { generation, replid, offset }))
    }

    /// The primary has answered `+FULLRESYNC`.
    fn forked(&mut self, generation: u64) {
        self.event(Event::Capture(CaptureEvent::Forked { generation }));
    }

    fn completed(&mut self, generation: u64) -> Vec<Action> {
        self.event(Event::Capture(CaptureEvent::Completed { generation, bytes: 1 }))
    }

    fn failed(&mut self, generation: u64, error: CaptureError) -> Vec<Action> {
        self.event(Event::Capture(CaptureEvent::Failed { generation, error }))
    }

    /// A source with a complete snapshot at offset 10. Session 1 was given it and has been handed over.
    fn with_snapshot() -> Bench {
        let mut bench = Bench::new();
        bench.join(1);
        bench.started(FIRST, replid(1), 10);
        bench.completed(FIRST);
        bench.event(Event::Gone { session: 1, done: true });
        bench
    }
}

fn replid(byte: u8) -> ReplId {
    String::from_utf8(vec![b'0' + byte; 40]).unwrap().parse().unwrap()
}

fn link_error() -> CaptureError {
    CaptureError::Link { during: "snapshot", cause: "gone".into() }
}

fn offers(actions: &[Action]) -> Vec<Session> {
    let offer = |action: &Action| match action {
        Action::Offer { session } => Some(*session),
        _ => None,
    };
    actions.iter().filter_map(offer).collect()
}

fn begins(actions: &[Action]) -> Option<(u64, bool)> {
    actions.iter().find_map(|action| match action {
        Action::Capture { generation, with_stream, .. } => Some((*generation, *with_stream)),
        _ => None,
    })
}

#[test]
fn the_first_replica_has_one_snapshot_taken_and_the_others_share_it() {
    let mut bench = Bench::new();
    assert_eq!(begins(&bench.after(Duration::from_secs(1))), None);
    assert_eq!(begins(&bench.join(1)), Some((FIRST, true)));
    assert_eq!(begins(&bench.join(2)), None);
    assert_eq!(offers(&bench.started(FIRST, replid(1), 10)), [1, 2]);
    assert_eq!(offers(&bench.join(3)), [3]);
    bench.completed(FIRST);
    assert_eq!(bench.machine.snapshots_taken, 1);
}

#[test]
fn an_eager_source_does_not_wait_for_the_first_replica() {
    let mut bench = Bench::with(RULES, true);
    assert_eq!(begins(&bench.after(Duration::ZERO)), Some((FIRST, true)));
    assert_eq!(begins(&bench.after(Duration::ZERO)), None);
}

#[test]
fn while_the_memory_is_prepared_replicas_wait_and_then_the_snapshot_is_taken() {
    for eager in [false, true] {
        let mut bench = Bench::with(RULES, eager);
        bench.reading.is_preparing = true;
        assert_eq!(begins(&bench.after(Duration::from_secs(1))), None);
        let actions = bench.join(1);
        assert_eq!(begins(&actions), None);
        let is_told = |action: &Action| matches!(action, Action::Wait { session: 1, cause: WaitCause::NotYet, .. });
        assert!(actions.iter().any(is_told), "{actions:?}");
        assert_eq!(bench.after(Duration::from_secs(600)), [], "told once, and not ended");
        bench.reading.is_preparing = false;
        assert_eq!(begins(&bench.after(Duration::ZERO)), Some((FIRST, true)));
    }
}

#[test]
fn a_late_joiner_gets_the_old_snapshot_as_long_as_the_journal_reaches_back() {
    let mut bench = Bench::with_snapshot();
    bench.after(Duration::from_secs(600));
    bench.journal_at(11, 5000);
    let actions = bench.join(2);
    assert_eq!((offers(&actions), begins(&actions)), (vec![2], None));

    bench.event(Event::Gone { session: 2, done: true });
    bench.journal_at(12, 9000);
    let actions = bench.join(3);
    assert_eq!(offers(&actions), Vec::<Session>::new());
    assert!(begins(&actions).is_some());
}

#[test]
fn a_snapshot_that_is_too_old_makes_way_for_another_in_the_same_stream() {
    let mut bench = Bench::with_snapshot();
    // A replica stays, so the stream lives; the snapshot grows old.
    bench.join(2);
    bench.progress(2, Phase::Stay, u64::MAX);
    bench.after(RULES.max_age + Duration::from_secs(1));
    let actions = bench.join(3);
    assert_eq!(begins(&actions), Some((FIRST + 1, false)));
    assert!(actions.contains(&Action::RevokeSnapshot { generation: FIRST }));
    bench.journal_at(11, 70);
    assert_eq!(offers(&bench.started(FIRST + 1, replid(1), 60)), [3]);
    assert_eq!(bench.machine.replicas[&2].generation, Some(FIRST));
}

#[test]
fn a_replica_whose_connection_breaks_finds_its_stream_again_though_the_snapshot_is_of_no_use_any_more() {
    for done in [false, true] {
        let mut bench = Bench::with_snapshot();
        bench.join(2);
        bench.progress(2, Phase::Stay, u64::MAX);
        // The journal does not reach back to the snapshot.
        bench.journal_at(500, 9000);
        bench.event(Event::Gone { session: 2, done });
        bench.after(RETURN_LIMIT / 2);
        let revoked = Action::RevokeSnapshot { generation: FIRST };
        if done {
            assert!(bench.machine.stream.is_none());
            continue;
        }
        let resume = Resume { generation: FIRST, held_slots: 0, loaded: Some((replid(1), 9001)) };
        assert_eq!(offers(&bench.join_with(3, Some(resume))), [3]);
        bench.event(Event::Gone { session: 3, done });
        assert!(!bench.after(RETURN_LIMIT - Duration::from_secs(1)).contains(&revoked));
        assert!(bench.after(Duration::from_secs(2)).contains(&revoked));
        assert!(bench.machine.stream.is_none());
    }
}

#[test]
fn memory_is_used_again_only_when_no_reader_is_left() {
    let fresh = |bench: &mut Bench| {
        bench.after(RULES.max_age + Duration::from_secs(1));
        bench.join(9).iter().find_map(|action| match action {
            Action::Capture { fresh, .. } => Some(*fresh),
            _ => None,
        })
    };
    // The only reader was handed over.
    assert_eq!(fresh(&mut Bench::with_snapshot()), Some(false));
    // It went in the middle, or after its server had loaded everything.
    for (phase, expected) in [(Phase::Transfer, true), (Phase::Load, false)] {
        let mut bench = Bench::with_snapshot();
        bench.join(2);
        bench.progress(2, phase, 3);
        bench.event(Event::Gone { session: 2, done: false });
        assert_eq!(fresh(&mut bench), Some(expected), "{phase:?}");
    }
    // The snapshot failed under it.
    let mut bench = Bench::new();
    bench.join(1);
    bench.started(FIRST, replid(1), 10);
    bench.failed(FIRST, link_error());
    let retried = bench.after(Duration::from_secs(10));
    assert!(retried.iter().any(|action| matches!(action, Action::Capture { fresh: true, .. })), "{retried:?}");
}

#[test]
fn a_snapshot_of_another_history_ends_all_that_was_given_of_the_old_one() {
    let mut bench = Bench::with_snapshot();
    bench.join(2);
    bench.progress(2, Phase::Stay, u64::MAX);
    bench.after(RULES.max_age + Duration::from_secs(1));
    bench.join(3);
    let actions = bench.started(FIRST + 1, replid(2), 5);
    assert!(actions.contains(&Action::EndStream { generation: FIRST }), "{actions:?}");
    let gone = |action: &&Action| matches!(action, Action::GenerationGone { session: 2, generation: FIRST, .. });
    assert_eq!(actions.iter().filter(gone).count(), 1, "{actions:?}");
    // The new snapshot does not belong to the stream: its capture is stopped, and the next one begins with a stream of
    // its own.
    assert!(actions.contains(&Action::StopCapture { generation: FIRST + 1 }), "{actions:?}");
    assert_eq!(begins(&actions), Some((FIRST + 2, true)), "{actions:?}");
}

#[test]
fn slots_are_reused_only_when_the_ring_is_full_and_every_reader_has_passed_them() {
    let mut bench = Bench::new();
    bench.join(1);
    bench.join(2);
    bench.started(FIRST, replid(1), 10);
    bench.progress(1, Phase::Transfer, 7);
    bench.progress(2, Phase::Transfer, 3);
    assert_eq!(bench.retire_below, 0, "the ring has room: the next replica may want them all");
    bench.reading.writer_waits += 1;
    bench.after(Duration::ZERO);
    assert_eq!(bench.retire_below, 3);
    bench.progress(2, Phase::Transfer, 5);
    assert_eq!(bench.retire_below, 5);
    // A replica cannot go back before a slot that it has passed.
    bench.progress(2, Phase::Transfer, 1);
    assert_eq!(bench.machine.replicas[&2].at.slots_below, 5);
    // From now on no replica can begin at the first slot.
    let actions = bench.join(3);
    assert_eq!(offers(&actions), Vec::<Session>::new());
    assert!(matches!(&actions[..], [Action::Wait { session: 3, cause: WaitCause::Busy, .. }]), "{actions:?}");
}

#[test]
fn a_replica_that_holds_up_a_full_ring_is_dropped_alone_and_after_its_time() {
    let mut bench = Bench::new();
    bench.join(1);
    bench.join(2);
    bench.started(FIRST, replid(1), 10);
    bench.reading.writer_waits += 1;
    bench.reading.published = 8;
    bench.progress(1, Phase::Transfer, 8);
    bench.now += RULES.stall_limit;
    bench.progress(1, Phase::Transfer, 9);
    let actions = bench.after(Duration::from_secs(1));
    assert!(matches!(&actions[..], [Action::Drop { session: 2, code: RefusalCode::Stalled, .. }]), "{actions:?}");
    assert_eq!(bench.retire_below, 9);
}

#[test]
fn a_replica_that_had_nothing_to_read_has_all_its_time_when_the_slots_come_at_once() {
    let mut bench = Bench::new();
    bench.join(1);
    bench.started(FIRST, replid(1), 10);
    // A server that saves to disk first publishes nothing for long, and then more than the ring holds.
    assert_eq!(bench.after(RULES.stall_limit * 3), []);
    bench.reading.writer_waits += 1;
    bench.reading.published = 8;
    assert_eq!(bench.after(RULES.stall_limit), [], "it may take as long as any other");
    let actions = bench.after(Duration::from_secs(1));
    assert!(matches!(&actions[..], [Action::Drop { session: 1, code: RefusalCode::Stalled, .. }, ..]), "{actions:?}");
}

/// A replica that reads a full ring takes one slot in each `period` for an hour. Returns when it was dropped.
fn dropped_after(period: Duration) -> Option<Duration> {
    let mut bench = Bench::new();
    bench.join(1);
    bench.started(FIRST, replid(1), 10);
    let begin = bench.now;
    while bench.now < begin + Duration::from_secs(3600) {
        let passed = (bench.now - begin).as_millis() / period.as_millis();
        let passed = u64::try_from(passed).unwrap();
        bench.progress(1, Phase::Transfer, passed);
        bench.reading = Reading { published: passed + 8, retired: passed, writer_waits: 1, ..bench.reading };
        let actions = bench.after(Duration::from_millis(100));
        if actions.iter().any(|action| matches!(action, Action::Drop { code: RefusalCode::Stalled, .. })) {
            return Some(bench.now - begin);
        }
    }
    None
}

#[test]
fn a_replica_that_renews_its_place_by_a_slot_now_and_then_loses_it_and_one_behind_a_slow_link_does_not() {
    // 10 Mb/s, and two replicas that share it.
    for millis in [850, 1700] {
        assert_eq!(dropped_after(Duration::from_millis(millis)), None, "a slot in {millis} ms");
    }
    for seconds in [4, 14, 59] {
        let dropped = dropped_after(Duration::from_secs(seconds)).expect("it holds up the others for an hour");
        assert!(dropped < 10 * RULES.stall_limit, "a slot in {seconds} s: dropped after {dropped:?}");
    }
}

#[test]
fn a_replica_that_joins_again_and_again_makes_the_primary_fork_a_few_times_and_then_at_intervals() {
    let mut bench = Bench::new();
    let (mut taken, begin) = (Vec::new(), bench.now);
    for session in 1..2000 {
        // The window has lost its first slots when it comes back after a second.
        let mut actions = bench.join(session);
        actions.extend(bench.after(Duration::from_millis(500)));
        if let Some((generation, _)) = begins(&actions) {
            taken.push(bench.now - begin);
            bench.started(generation, replid(1), 10);
            bench.completed(generation);
            bench.reading.retired = 5;
        } else {
            let told = actions.iter().find_map(|action| match action {
                Action::Wait { cause, text, .. } => Some((*cause, text.clone())),
                _ => None,
            });
            let (cause, text) = told.expect("it is told why it waits");
            assert!(cause == WaitCause::Busy && text.contains("--fork-interval"), "{text}");
        }
        bench.event(Event::Gone { session, done: false });
        bench.after(Duration::from_millis(500));
    }
    let first = taken.iter().filter(|at| **at < Duration::from_secs(10)).count();
    assert_eq!(first, 5, "the first ones do not wait: {taken:?}");
    let spaced = 2000 / RULES.fork_interval.as_secs() as usize;
    assert!((5 + spaced - 3..=5 + spaced + 1).contains(&taken.len()), "{} forks in 2000 s", taken.len());
}

#[test]
fn a_full_ring_that_no_replica_reads_is_given_up_though_a_loaded_one_was_offered_its_stream() {
    let mut bench = Bench::with_snapshot();
    bench.now += RULES.max_age + Duration::from_secs(1);
    let resume = Resume { generation: FIRST, held_slots: 9, loaded: Some((replid(1), 11)) };
    bench.join_with(2, Some(resume));
    assert_eq!(begins(&bench.join(3)), Some((FIRST + 1, false)));
    bench.started(FIRST + 1, replid(1), 20);
    // The replica with the data comes again while the snapshot of the other one is open.
    bench.event(Event::Gone { session: 2, done: false });
    assert_eq!(offers(&bench.join_with(4, Some(resume))), [4]);
    bench.reading.writer_waits += 1;
    bench.progress(3, Phase::Transfer, 3);
    bench.after(Duration::ZERO);
    bench.event(Event::Gone { session: 3, done: false });
    bench.now += RULES.stall_limit / 2;
    // It needs the first slots, which were reused. That others come and go changes nothing.
    bench.join(5);
    bench.event(Event::Gone { session: 5, done: false });
    bench.join(6);
    let actions = bench.after(RULES.stall_limit);
    let generation = FIRST + 1;
    assert!(actions.contains(&Action::StopCapture { generation }), "{actions:?}");
    assert_eq!(begins(&actions), Some((FIRST + 2, false)), "{actions:?}");
    let is_ended = |action: &Action| matches!(action, Action::EndStream { .. } | Action::GenerationGone { .. });
    assert!(!actions.iter().any(is_ended), "the replica with the data keeps its stream: {actions:?}");
}

#[test]
fn a_capture_that_breaks_is_tried_again_after_a_pause_and_its_readers_are_told() {
    let mut bench = Bench::new();
    bench.join(1);
    bench.started(FIRST, replid(1), 10);
    let actions = bench.failed(FIRST, link_error());
    assert!(actions.contains(&Action::RevokeSnapshot { generation: FIRST }));
    assert!(actions.iter().any(|action| matches!(action, Action::GenerationGone { session: 1, .. })), "{actions:?}");
    assert_eq!(begins(&actions), None);
    let waits =
        |action: &Action| matches!(action, Action::Wait { session: 1, cause: WaitCause::LastAttemptFailed, .. });
    assert!(actions.iter().any(waits), "{actions:?}");
    assert_eq!(begins(&bench.after(Duration::from_secs(10))), Some((FIRST + 1, true)));
    assert_eq!(offers(&bench.started(FIRST + 1, replid(1), 30)), [1]);
}

#[test]
fn failures_after_a_fork_are_counted_and_each_pause_is_longer() {
    let mut bench = Bench::new();
    bench.join(1);
    let mut pauses = Vec::new();
    for generation in FIRST..FIRST + 12 {
        bench.started(generation, replid(1), 10);
        let actions = bench.failed(generation, link_error());
        assert!(
            actions.contains(&Action::EndStream { generation }),
            "the stream of the capture ends with it: {actions:?}"
        );
        let failed = bench.now;
        while begins(&bench.after(Duration::from_millis(500))).is_none() {}
        pauses.push((bench.now - failed).as_secs());
    }
    assert!(pauses[0] <= 1, "{pauses:?}");
    let doubled: Vec<u64> = pauses[1..].iter().map(|pause| pause.next_power_of_two().min(600)).collect();
    assert_eq!(doubled, [2, 4, 8, 16, 32, 64, 128, 256, 512, 600, 600], "{pauses:?}");
    assert_eq!(bench.machine.status().failures.total(), 12);
    assert!(bench.machine.status().failures.last().contains("gone"));

    // The replicas that wait are told the count and the cause.
    bench.started(FIRST + 12, replid(1), 10);
    let told = bench.failed(FIRST + 12, link_error());
    let says = |action: &Action| matches!(action, Action::Wait { text, .. } if text.contains("13 snapshots in a row") && text.contains("gone"));
    assert!(told.iter().any(says), "{told:?}");

    // A replica that joins after all have left was started by its operator, and does not wait for ten minutes.
    bench.event(Event::Gone { session: 1, done: false });
    bench.join(2);
    assert_eq!(begins(&bench.after(Duration::from_secs(5))), Some((FIRST + 13, true)));
    bench.started(FIRST + 13, replid(1), 10);
    bench.completed(FIRST + 13);
    assert_eq!((bench.machine.status().failures.total(), bench.machine.status().failures.last()), (13, ""));
}

/// The times at which the primary forked in ten minutes, for a replica that waits while each snapshot fails two seconds
/// after the fork: before a byte of it, as with a primary that saves to disk, or after the first one.
fn forks_for_failures(rules: Rules, with_a_byte: bool) -> Vec<u64> {
    let mut bench = Bench::with(rules, false);
    let (begin, mut forks) = (bench.now, Vec::new());
    let mut actions = bench.join(1);
    while bench.now < begin + Duration::from_secs(600) {
        if let Some((generation, _)) = begins(&actions) {
            bench.forked(generation);
            forks.push((bench.now - begin).as_secs());
            if with_a_byte {
                bench.started(generation, replid(1), 10);
            }
            bench.after(Duration::from_secs(2));
            bench.failed(generation, link_error());
        }
        actions = bench.after(Duration::from_millis(500));
    }
    forks
}

#[test]
fn snapshots_that_fail_before_their_first_byte_are_as_rare_as_those_that_fail_later() {
    for fork_interval in [Duration::ZERO, RULES.fork_interval] {
        let rules = || Rules { fork_interval, ..RULES };
        for with_a_byte in [false, true] {
            let forks = forks_for_failures(rules(), with_a_byte);
            assert!(forks.len() <= 11, "{with_a_byte} {fork_interval:?}: {forks:?}");
            let pauses: Vec<u64> = forks.windows(2).map(|pair| pair[1] - pair[0]).collect();
            assert!(pauses.is_sorted() && pauses.last() >= Some(&128), "{with_a_byte}: {pauses:?}");
        }
        Mutation::set(Some(Mutation::ForkFromTheFirstByte));
        let storm = forks_for_failures(rules(), false).len();
        Mutation::set(None);
        assert!(storm > 60, "the fault that is put back makes {storm} forks");
    }
}

#[test]
fn forks_for_which_nothing_arrives_are_spaced_too() {
    let mut bench = Bench::new();
    // Replicas that come and go, so that no failure is remembered.
    let (begin, mut forks) = (bench.now, 0);
    for session in 1..600 {
        let mut actions = bench.join(session);
        actions.extend(bench.after(Duration::from_millis(500)));
        if let Some((generation, _)) = begins(&actions) {
            bench.forked(generation);
            forks += 1;
            bench.failed(generation, link_error());
        }
        bench.event(Event::Gone { session, done: false });
        bench.after(Duration::from_millis(500));
    }
    let most = 5 + (bench.now - begin).as_secs() / RULES.fork_interval.as_secs() + 1;
    assert!(forks <= most, "{forks} forks, and {most} would be allowed");
}

#[test]
fn a_fork_for_a_stream_that_was_not_continued_counts() {
    let mut bench = Bench::with_snapshot();
    (0..5).for_each(|_| bench.forked(FIRST - 1));
    bench.now += RULES.max_age + Duration::from_secs(1);
    assert!(begins(&bench.join(2)).is_some(), "the time without a fork has passed");
    let mut bench = Bench::with_snapshot();
    (0..5).for_each(|_| bench.forked(FIRST - 1));
    bench.journal_at(500, 600);
    assert_eq!(begins(&bench.join(2)), None);
}

/// A snapshot that begins to arrive an hour and more after it was requested, and takes as long.
fn slow_snapshot(bench: &mut Bench) -> Vec<Session> {
    let hours = RULES.max_age * 2;
    assert_eq!(begins(&bench.join(1)), Some((FIRST, true)));
    bench.after(hours);
    bench.forked(FIRST);
    bench.after(hours);
    bench.join(2);
    let mut served = offers(&bench.started(FIRST, replid(1), 10));
    bench.after(hours);
    served.extend(offers(&bench.join(3)));
    served
}

#[test]
fn a_snapshot_is_for_those_who_waited_for_it_or_joined_while_it_was_taken_whatever_its_age() {
    let mut bench = Bench::new();
    assert_eq!(slow_snapshot(&mut bench), [1, 2, 3]);
    bench.completed(FIRST);
    // One of them breaks off before it was given the snapshot: it comes back, and is another one.
    bench.after(Duration::from_secs(1));
    (1..=3).for_each(|session| drop(bench.event(Event::Gone { session, done: true })));
    assert_eq!(begins(&bench.join(4)), Some((FIRST + 1, true)), "it is too old for one that comes later");
    Mutation::set(Some(Mutation::AgeFromTheRequest));
    let served = slow_snapshot(&mut Bench::new());
    Mutation::set(None);
    assert!(served.is_empty(), "the fault that is put back serves {served:?}");
}

#[test]
fn the_age_of_a_snapshot_counts_from_the_fork() {
    let mut bench = Bench::new();
    bench.join(1);
    bench.after(RULES.max_age);
    bench.forked(FIRST);
    bench.started(FIRST, replid(1), 10);
    bench.completed(FIRST);
    bench.after(RULES.max_age - Duration::from_secs(1));
    assert_eq!(offers(&bench.join(2)), [2]);
    bench.after(Duration::from_secs(2));
    assert_eq!(offers(&bench.join(3)), Vec::<Session>::new());
}

#[test]
fn the_first_snapshot_of_an_eager_source_is_not_thrown_away_while_it_is_taken() {
    let mut bench = Bench::with(RULES, true);
    assert_eq!(begins(&bench.after(Duration::ZERO)), Some((FIRST, true)));
    let hours = RULES.max_age * 2;
    assert_eq!(bench.after(hours), []);
    bench.forked(FIRST);
    assert_eq!(bench.after(hours), []);
    bench.started(FIRST, replid(1), 10);
    assert_eq!(bench.after(hours), []);
    assert_eq!(offers(&bench.join(1)), [1]);
}

#[test]
fn a_snapshot_that_no_replica_waits_for_any_more_ends_after_a_while() {
    let mut bench = Bench::new();
    bench.join(1);
    bench.event(Event::Gone { session: 1, done: true });
    let actions = bench.after(RULES.max_age + Duration::from_secs(1));
    assert!(actions.contains(&Action::StopCapture { generation: FIRST }), "{actions:?}");
    assert_eq!(begins(&actions), None);
}

#[test]
fn failures_before_a_fork_cost_the_primary_little_and_pause_a_few_seconds() {
    let mut bench = Bench::new();
    bench.join(1);
    for generation in FIRST..FIRST + 12 {
        bench.failed(generation, link_error());
        assert_eq!(begins(&bench.after(Duration::from_secs(5))), Some((generation + 1, true)));
    }
}

#[test]
fn a_stream_ends_if_a_later_snapshot_failed_and_no_replica_is_left() {
    let mut bench = Bench::with_snapshot();
    bench.now += RULES.max_age + Duration::from_secs(1);
    assert_eq!(begins(&bench.join(2)), Some((FIRST + 1, false)), "the stream is used again");
    bench.failed(FIRST + 1, link_error());
    assert_eq!(bench.event(Event::Gone { session: 2, done: false }), [Action::EndStream { generation: FIRST }]);
    bench.now += Duration::from_secs(10);
    assert_eq!(begins(&bench.join(3)), Some((FIRST + 2, true)));
}

#[test]
fn a_server_that_refuses_is_not_asked_again_and_waiting_replicas_are_told_why() {
    let mut bench = Bench::new();
    bench.join(1);
    let actions = bench.failed(FIRST, CaptureError::HistoryGone);
    let refused =
        Action::Drop { session: 1, code: RefusalCode::PrimaryRefuses, text: CaptureError::HistoryGone.to_string() };
    assert!(actions.contains(&refused), "{actions:?}");
    assert_eq!(begins(&bench.after(Duration::from_secs(60))), None);
}

#[test]
fn a_replica_that_comes_back_goes_on_with_the_generation_it_knows() {
    let mut bench = Bench::new();
    bench.join(1);
    bench.started(FIRST, replid(1), 10);
    bench.reading.writer_waits += 1;
    bench.progress(1, Phase::Transfer, 6);
    bench.event(Event::Gone { session: 1, done: false });
    let held = |held_slots| Some(Resume { generation: FIRST, held_slots, loaded: None });
    assert_eq!(offers(&bench.join_with(2, held(6))), [2]);
    assert_eq!(bench.machine.replicas[&2].at.slots_below, 6);
    assert_eq!(offers(&bench.join_with(3, held(5))), Vec::<Session>::new(), "slot 5 is given up");
}

#[test]
fn a_loaded_replica_needs_the_stream_only_and_is_sent_away_if_the_stream_is_gone() {
    let mut bench = Bench::with_snapshot();
    bench.journal_at(40, 90);
    let loaded =
        |byte, next_byte| Some(Resume { generation: FIRST, held_slots: 0, loaded: Some((replid(byte), next_byte)) });
    assert_eq!(offers(&bench.join_with(2, loaded(1, 91))), [2]);
    assert_eq!(bench.machine.replicas[&2].at.phase, Phase::CatchUp);
    for (session, resume) in [(3, loaded(1, 39)), (4, loaded(2, 80)), (5, loaded(1, 92))] {
        let actions = bench.join_with(session, resume);
        assert!(
            matches!(&actions[..], [Action::Drop { code: RefusalCode::HistoryGone, .. }]),
            "{session}: {actions:?}"
        );
    }
}

#[test]
fn one_replica_too_many_is_refused_and_touches_nothing() {
    let mut bench = Bench::new();
    for session in 1..=3 {
        bench.join(session);
    }
    let actions = bench.join(4);
    assert!(matches!(&actions[..], [Action::Drop { session: 4, code: RefusalCode::Busy, .. }]), "{actions:?}");
    // A replica that has joined may ask again.
    let actions = bench.join(2);
    assert!(!actions.iter().any(|action| matches!(action, Action::Drop { .. })), "{actions:?}");
}

#[test]
fn a_full_ring_without_a_reader_makes_way_for_a_replica_that_cannot_begin_with_it() {
    let mut bench = Bench::new();
    bench.join(1);
    bench.started(FIRST, replid(1), 1000);
    bench.progress(1, Phase::Transfer, 4);
    (bench.reading.published, bench.reading.retired, bench.reading.writer_waits) = (8, 4, 1);
    bench.event(Event::Gone { session: 1, done: false });
    let actions = bench.join(2);
    assert!(matches!(actions[..], [Action::Wait { session: 2, cause: WaitCause::Busy, .. }]), "{actions:?}");
    assert_eq!(bench.after(RULES.stall_limit), [], "its reader may come back");
    let actions = bench.after(Duration::from_secs(1));
    let ended = [
        Action::StopCapture { generation: FIRST },
        Action::RevokeSnapshot { generation: FIRST },
        Action::EndStream { generation: FIRST },
    ];
    assert_eq!(actions[..3], ended, "{actions:?}");
    assert_eq!(begins(&actions), Some((FIRST + 1, true)));
}

#[test]
fn the_memory_that_a_replica_reads_is_not_written_again_when_it_joins_once_more_over_the_same_connection() {
    // A server in the phase of loading has read all slots.
    for (phase, is_fresh) in [(Phase::Transfer, true), (Phase::Load, false)] {
        let mut bench = Bench::with_snapshot();
        bench.join(2);
        bench.progress(2, phase, 4);
        bench.journal_at(12, 5000);
        let actions = bench.join(2);
        let captures = |action: &Action| match action {
            Action::Capture { fresh, .. } => Some(*fresh),
            _ => None,
        };
        assert_eq!(actions.iter().find_map(captures), Some(is_fresh), "{phase:?}: {actions:?}");
    }
}

#[test]
fn a_snapshot_whose_stream_is_overwritten_while_it_is_taken_makes_way_as_soon_as_nobody_reads_it() {
    let mut bench = Bench::new();
    bench.join(1);
    bench.started(FIRST, replid(1), 1000);
    bench.progress(1, Phase::Transfer, 4);
    bench.journal_at(1002, 5000);
    assert_eq!(bench.after(Duration::from_secs(1)), [], "its reader may have read the stream's beginning already");
    let actions = bench.event(Event::Gone { session: 1, done: false });
    let ended = [
        Action::StopCapture { generation: FIRST },
        Action::RevokeSnapshot { generation: FIRST },
        Action::EndStream { generation: FIRST },
    ];
    assert_eq!(actions, ended);
    assert_eq!(begins(&bench.join(2)), Some((FIRST + 1, true)));
}

#[test]
fn a_source_without_replicas_releases_the_server_after_a_while() {
    let mut bench = Bench::with_snapshot();
    assert_eq!(bench.after(RULES.max_age - Duration::from_secs(1)), []);
    let actions = bench.after(Duration::from_secs(2));
    assert_eq!(actions, [Action::RevokeSnapshot { generation: FIRST }, Action::EndStream { generation: FIRST }]);
    assert_eq!(begins(&bench.join(9)), Some((FIRST + 1, true)));
}

#[test]
fn a_stream_that_is_lost_ends_the_snapshot_with_it() {
    let mut bench = Bench::with_snapshot();
    bench.join(2);
    let actions = bench.event(Event::Capture(CaptureEvent::StreamLost { text: "gone".into() }));
    assert!(actions.contains(&Action::EndStream { generation: FIRST }));
    assert!(actions.iter().any(|action| matches!(action, Action::GenerationGone { session: 2, .. })));
    assert_eq!(begins(&actions), Some((FIRST + 1, true)), "{actions:?}");
}

impl Bench {
    fn history_changed(&mut self, at: u64) -> Vec<Action> {
        let (from, to) = (replid(1), replid(2));
        self.event(Event::Capture(CaptureEvent::HistoryChanged { generation: FIRST, from, to, at }))
    }

    /// A progress report of a replica whose server has loaded.
    fn applied(&mut self, session: Session, phase: Phase, applied_offset: u64) -> Vec<Action> {
        let at = Report { phase, applied_offset, slots_below: u64::MAX, ..Report::NOTHING };
        self.event(Event::Progress { session, at })
    }
}

fn sent_away(actions: &[Action]) -> Vec<Session> {
    let gone = |action: &Action| match action {
        Action::GenerationGone { session, generation: FIRST, .. } => Some(*session),
        _ => None,
    };
    actions.iter().filter_map(gone).collect()
}

fn ends_stream(actions: &[Action]) -> bool {
    actions.contains(&Action::EndStream { generation: FIRST })
}

#[test]
fn when_the_history_changes_a_loaded_replica_keeps_the_journal_until_it_has_applied_it() {
    let mut bench = Bench::with_snapshot();
    bench.join(2);
    bench.applied(2, Phase::Stay, 80);
    let actions = bench.history_changed(100);
    assert_eq!(actions, [Action::RevokeSnapshot { generation: FIRST }]);
    assert_eq!(bench.applied(2, Phase::Stay, 99), []);
    let actions = bench.applied(2, Phase::Stay, 100);
    assert_eq!((sent_away(&actions), ends_stream(&actions)), (vec![2], true), "{actions:?}");
    // It goes to the primary: no snapshot is taken for it, and its hand-off is judged by its own history.
    assert_eq!(begins(&bench.after(Duration::from_secs(60))), None);
    assert_eq!(bench.machine.status().history_of(2), Some(replid(1)));
}

#[test]
fn when_the_history_changes_replicas_that_have_not_loaded_begin_again_after_the_loaded_ones_are_done() {
    let mut bench = Bench::with_snapshot();
    bench.join(2);
    bench.join(3);
    bench.applied(2, Phase::CatchUp, 80);
    bench.progress(3, Phase::Transfer, 4);
    let actions = bench.history_changed(100);
    assert_eq!((sent_away(&actions), ends_stream(&actions), begins(&actions)), (vec![3], false, None), "{actions:?}");
    assert!(actions.iter().any(|action| matches!(action, Action::Wait { session: 3, .. })), "{actions:?}");
    let actions = bench.applied(2, Phase::CatchUp, 100);
    assert_eq!((sent_away(&actions), ends_stream(&actions)), (vec![2], true), "{actions:?}");
    // The memory that session 3 was reading is not used again, and the new snapshot has a stream of its own.
    assert!(
        actions.contains(&Action::Capture { generation: FIRST + 1, with_stream: true, fresh: true }),
        "{actions:?}"
    );
    assert_eq!(offers(&bench.started(FIRST + 1, replid(2), 120)), [3]);
    assert_eq!(bench.machine.status().history_of(3), Some(replid(2)));
}

#[test]
fn after_the_history_has_changed_the_old_one_is_not_offered() {
    let mut bench = Bench::with_snapshot();
    bench.history_changed(100);
    assert_eq!(begins(&bench.join(2)), Some((FIRST + 1, true)));
    let loaded = Some(Resume { generation: FIRST, held_slots: 0, loaded: Some((replid(1), 90)) });
    let actions = bench.join_with(3, loaded);
    let refused = |action: &Action| matches!(action, Action::Drop { session: 3, code: RefusalCode::HistoryGone, .. });
    assert!(actions.iter().any(refused) && offers(&actions).is_empty(), "{actions:?}");
    assert_eq!(offers(&bench.started(FIRST + 1, replid(2), 120)), [2]);
}

#[test]
fn a_replica_that_gets_no_further_in_an_ended_history_is_sent_away() {
    let mut bench = Bench::with_snapshot();
    bench.join(2);
    bench.applied(2, Phase::Stay, 80);
    bench.history_changed(100);
    assert_eq!(bench.after(UNMOVED_LIMIT), []);
    bench.applied(2, Phase::Stay, 90);
    assert_eq!(bench.after(UNMOVED_LIMIT), [], "it has moved since");
    let actions = bench.after(Duration::from_millis(1));
    assert_eq!((sent_away(&actions), ends_stream(&actions)), (vec![2], true), "{actions:?}");
}

#[test]
fn replicas_of_an_ended_history_hold_up_the_others_for_a_while_only() {
    let mut bench = Bench::with_snapshot();
    bench.join(2);
    bench.applied(2, Phase::CatchUp, 20);
    bench.history_changed(1000);
    let mut applied = 20;
    for _ in 0..20 {
        applied += 1;
        bench.now += Duration::from_secs(1);
        assert_eq!(bench.applied(2, Phase::CatchUp, applied), [], "it moves, and no replica waits");
    }
    let actions = bench.join(3);
    assert_eq!(sent_away(&actions), [2], "{actions:?}");
    assert_eq!(begins(&actions), Some((FIRST + 1, true)), "{actions:?}");
}

#[test]
fn a_running_snapshot_ends_with_the_history_and_a_late_event_of_the_old_stream_changes_nothing() {
    let mut bench = Bench::new();
    bench.join(1);
    bench.started(FIRST, replid(1), 10);
    let actions = bench.history_changed(10);
    for wanted in [
        Action::RevokeSnapshot { generation: FIRST },
        Action::StopCapture { generation: FIRST },
        Action::EndStream { generation: FIRST },
        Action::Capture { generation: FIRST + 1, with_stream: true, fresh: true },
    ] {
        assert!(actions.contains(&wanted), "{wanted:?}: {actions:?}");
    }
    bench.started(FIRST + 1, replid(2), 20);
    assert_eq!(bench.history_changed(10), []);
    assert_eq!(bench.machine.stream, Some(Origin { generation: FIRST + 1, history: replid(2), offset: 20 }));
}

#[test]
fn a_loaded_replica_whose_stream_is_lost_causes_no_other_snapshot() {
    let mut bench = Bench::with_snapshot();
    bench.join(2);
    bench.applied(2, Phase::Stay, 80);
    let actions = bench.event(Event::Capture(CaptureEvent::StreamLost { text: "gone".into() }));
    assert_eq!((sent_away(&actions), begins(&actions)), (vec![2], None), "{actions:?}");
}

const NOBODY: [Session; 0] = [];

/// A source that lets `at_once` replicas load at the same time, with a complete snapshot.
fn with_turns(at_once: u32) -> Bench {
    let rules = Rules { at_once: NonZeroU32::new(at_once), max_replicas: 10, ..RULES };
    let mut bench = Bench::with(rules, true);
    bench.after(Duration::ZERO);
    bench.started(FIRST, replid(1), 10);
    bench.completed(FIRST);
    bench
}

/// What each replica is told that waits for its turn.
fn turns(actions: &[Action]) -> Vec<(Session, &str)> {
    let told = actions.iter().filter_map(|action| match action {
        Action::Wait { session, cause: WaitCause::Turn, text } => Some((*session, text.as_str())),
        _ => None,
    });
    told.collect()
}

#[test]
fn replicas_load_in_turn_in_the_order_in_which_they_joined() {
    let mut bench = with_turns(2);
    assert_eq!((offers(&bench.join(1)), offers(&bench.join(2))), (vec![1], vec![2]));
    let (third, fourth) = (bench.join(3), bench.join(4));
    assert!(turns(&third)[0].1.ends_with("this one is next"), "{third:?}");
    assert!(turns(&fourth)[0].1.contains("one more comes before this one"), "{fourth:?}");
    bench.progress(2, Phase::Transfer, 5);
    assert_eq!(offers(&bench.progress(2, Phase::Load, 9)), NOBODY, "it has all slots, and loads still");
    bench.now += Duration::from_secs(30);
    let actions = bench.progress(2, Phase::CatchUp, 9);
    assert_eq!(offers(&actions), [3]);
    assert!(turns(&actions)[0].1.ends_with("this one is next, for about 30 s"), "{actions:?}");
    assert_eq!(offers(&bench.event(Event::Gone { session: 1, done: false })), [4], "one that is gone has no turn");
    assert_eq!(bench.machine.snapshots_taken, 1);
}

#[test]
fn each_zone_has_turns_of_its_own_and_a_place_is_one_within_the_zone() {
    let mut bench = with_turns(1);
    assert_eq!(offers(&bench.join_in("east", 1, None)), [1]);
    let second = bench.join_in("east", 2, None);
    assert_eq!(
        turns(&second)[0].1,
        concat!(
            "another replica of zone east loads at present, which is the limit of this source for each zone (--at-once); ",
            "this one is next"
        )
    );
    // Neither the slow one of another zone nor the one that waits there is before these.
    assert_eq!(offers(&bench.join_in("west", 3, None)), [3]);
    assert_eq!(offers(&bench.join_in("", 4, None)), [4]);
    let (fifth, sixth) = (bench.join_in("west", 5, None), bench.join_in("", 6, None));
    assert!(turns(&fifth)[0].1.ends_with("this one is next"), "{fifth:?}");
    assert!(turns(&sixth)[0].1.starts_with("another replica loads at present"), "{sixth:?}");
    // How long a turn takes is known of the west only, and better than nothing elsewhere.
    bench.now += Duration::from_secs(30);
    let actions = bench.progress(3, Phase::CatchUp, 9);
    assert_eq!(offers(&actions), [5]);
    let told = turns(&actions);
    assert!(told.iter().all(|(_, text)| text.ends_with("this one is next, for about 30 s")), "{told:?}");
    bench.now += Duration::from_secs(10);
    let actions = bench.progress(4, Phase::CatchUp, 9);
    assert_eq!(offers(&actions), [6]);
    let seventh = bench.join_in("", 7, None);
    assert!(turns(&seventh)[0].1.ends_with("for about 40 s"), "{seventh:?}");
    assert_eq!(offers(&bench.event(Event::Gone { session: 1, done: false })), [2]);
}

#[test]
fn a_replica_that_has_loaded_or_comes_back_in_the_middle_does_not_wait_for_a_turn() {
    let mut bench = with_turns(1);
    bench.journal_at(11, 100);
    assert_eq!(offers(&bench.join(1)), [1]);
    assert_eq!(offers(&bench.join(2)), NOBODY, "it waits");
    let loaded = Resume { generation: FIRST, held_slots: 0, loaded: Some((replid(1), 50)) };
    assert_eq!(offers(&bench.join_with(3, Some(loaded))), [3]);
    let in_the_middle = Resume { generation: FIRST, held_slots: 4, loaded: None };
    assert_eq!(offers(&bench.join_with(4, Some(in_the_middle))), [4]);
    let of_another = Resume { generation: FIRST - 1, held_slots: 4, loaded: None };
    assert_eq!(offers(&bench.join_with(5, Some(of_another))), NOBODY);
}

#[test]
fn a_replica_that_takes_nothing_keeps_nobody_waiting_and_one_whose_server_loads_does() {
    let mut bench = with_turns(1);
    bench.reading.published = 9;
    bench.join(1);
    bench.join(2);
    assert_eq!(offers(&bench.after(RULES.stall_limit + Duration::from_secs(1))), [2]);
    bench.join(3);
    bench.progress(2, Phase::Load, 9);
    bench.progress(1, Phase::CatchUp, 9);
    assert_eq!(offers(&bench.after(RULES.stall_limit * 5)), NOBODY);
    assert_eq!(offers(&bench.progress(2, Phase::CatchUp, 9)), [3]);
}

#[test]
fn nobody_waits_for_a_turn_where_that_would_cost_a_fork() {
    let mut bench = with_turns(1);
    bench.reading.is_windowed = true;
    assert_eq!((offers(&bench.join(1)), offers(&bench.join(2))), (vec![1], vec![2]));
}

/// A standby joins.
fn stands_by(bench: &mut Bench, session: Session) -> Vec<Action> {
    let (name, address) = ("standby".to_owned(), String::new());
    bench.event(Event::StandbyJoined { session, name, address })
}

#[test]
fn no_snapshot_is_taken_for_a_standby_and_each_whole_one_is_offered_to_it() {
    let mut bench = Bench::new();
    assert_eq!(stands_by(&mut bench, 7), []);
    assert_eq!(bench.after(Duration::from_secs(600)), []);
    assert_eq!(begins(&bench.join(1)), Some((FIRST, true)));
    assert_eq!(offers(&bench.started(FIRST, replid(1), 10)), [7, 1]);
    bench.completed(FIRST);
    bench.progress(7, Phase::Stay, 9);
    bench.event(Event::Gone { session: 1, done: true });
    // Its age is the standby's to judge, and it is no reason to keep the snapshot.
    assert_eq!(offers(&stands_by(&mut bench, 8)), [8]);
    bench.progress(8, Phase::Stay, 9);
    let actions = bench.after(RULES.max_age + RETURN_LIMIT);
    assert!(actions.contains(&Action::RevokeSnapshot { generation: FIRST }), "{actions:?}");
    assert_eq!(bench.after(RULES.max_age), []);
    // The next one.
    assert!(begins(&bench.join(2)).is_some());
    let mut next = offers(&bench.started(FIRST + 1, replid(1), 60));
    next.sort_unstable();
    assert_eq!(next, [2, 7, 8]);
}

#[test]
fn a_standby_that_has_the_old_snapshot_gets_the_next_one_and_a_windowed_one_is_not_for_it() {
    let mut bench = Bench::with_snapshot();
    stands_by(&mut bench, 7);
    bench.progress(7, Phase::Stay, 9);
    bench.after(RULES.max_age + Duration::from_secs(1));
    // Nobody but the standby was there, so the stream has ended too.
    assert_eq!(begins(&bench.join(2)), Some((FIRST + 1, true)));
    bench.reading.is_windowed = true;
    assert_eq!(offers(&bench.started(FIRST + 1, replid(1), 60)), [2]);
    bench.reading.is_windowed = false;
    assert_eq!(offers(&bench.after(Duration::ZERO)), [7]);
}

#[test]
fn a_standby_takes_no_turn_and_waits_for_none() {
    let mut bench = Bench::with(Rules { at_once: NonZeroU32::new(1), ..RULES }, false);
    bench.join(1);
    assert_eq!(offers(&bench.started(FIRST, replid(1), 10)), [1]);
    bench.completed(FIRST);
    assert_eq!(offers(&bench.join(2)), [] as [Session; 0]);
    let (name, address) = ("standby".to_owned(), String::new());
    assert_eq!(offers(&bench.event(Event::StandbyJoined { session: 7, name, address })), [7]);
    bench.progress(7, Phase::Transfer, 1);
    assert_eq!(offers(&bench.event(Event::Gone { session: 1, done: true })), [2]);
}

/// The machine of a standby whose replicas wait for so long.
fn standby(limit: Duration) -> Bench {
    Bench::with(Rules { standby: Some(limit), ..RULES }, false)
}

#[test]
fn a_standby_serves_copies_under_their_own_numbers_and_asks_its_server_for_nothing() {
    let mut bench = standby(Duration::MAX);
    let told = bench.join(1);
    assert!(matches!(&told[..], [Action::Wait { text, .. }] if text.contains("--no-fork")), "{told:?}");
    assert_eq!(bench.after(Duration::from_secs(900)), []);
    let copy = bench.event(Event::Copied { generation: 5000 });
    assert_eq!(begins(&copy), Some((5000, true)));
    assert_eq!(offers(&bench.started(5000, replid(1), 10)), [1]);
    bench.completed(5000);
    assert!(bench.event(Event::Copied { generation: 5001 }).is_empty(), "a replica reads");
    bench.progress(1, Phase::Stay, 9);
    assert_eq!(begins(&bench.event(Event::Copied { generation: 5001 })), Some((5001, false)));
    assert_eq!(bench.machine.forks.why_not(), None, "its server has not forked");
    assert_eq!(bench.machine.status().forks_made, 0);
    // A reader that comes from the first source with a part of it, whatever the format of its server.
    bench.journal_at(11, 100);
    bench.started(5001, replid(1), 60);
    let (name, address, zone, reads) = (String::new(), String::new(), String::new(), Format::Shared);
    let resume = Some(Resume { generation: 5001, held_slots: 4, loaded: None });
    let joined = bench.event(Event::Joined { session: 2, name, address, zone, resume, reads });
    assert_eq!(offers(&joined), [2]);
    assert_eq!(bench.machine.status().replica(2).unwrap().at.slots_below, 4);
}

/// The first source gives its next snapshot the number behind the copied one. A reader that holds slots of that one
/// would go on at its slot in another snapshot of the same number.
#[test]
fn the_snapshots_of_a_standbys_own_server_are_not_numbered_on_from_a_copy() {
    let limit = Duration::from_secs(30);
    for copied in [5000, FIRST] {
        let mut bench = standby(limit);
        assert_eq!(begins(&bench.event(Event::Copied { generation: copied })), Some((copied, true)));
        bench.started(copied, replid(1), 10);
        bench.completed(copied);
        bench.after(RULES.max_age + Duration::from_secs(1));
        bench.join(1);
        let own = if copied == FIRST { FIRST + 1 } else { FIRST };
        assert_eq!(begins(&bench.after(limit)).map(|(generation, _)| generation), Some(own));
    }
}

#[test]
fn a_standby_asks_its_server_once_a_replica_has_waited_for_so_long() {
    let limit = Duration::from_secs(30);
    let mut bench = standby(limit);
    bench.after(limit * 3);
    assert_eq!(begins(&bench.join(1)), None);
    assert_eq!(begins(&bench.after(limit - Duration::from_secs(1))), None);
    assert_eq!(begins(&bench.after(Duration::from_secs(1))), Some((FIRST, true)));
}

/// The time of the processor for one report, the least of `ROUNDS` rounds, in which each of `replicas` readers of a full
/// ring moves on `MOVES` times.
fn time_of_a_report(replicas: usize) -> Duration {
    const ROUNDS: u64 = 5;
    const MOVES: u64 = 4;
    let mut bench = Bench::with(Rules { max_replicas: replicas, ..RULES }, false);
    let sessions = 1..=replicas as u64;
    for session in sessions.clone() {
        bench.join(session);
    }
    assert_eq!(offers(&bench.started(FIRST, replid(1), 10)).len(), replicas);
    (bench.reading.published, bench.reading.writer_waits) = (u64::MAX, 1);
    let of_this_thread = || Duration::try_from(clock_gettime(ClockId::ThreadCPUTime)).unwrap();
    let round = |round: u64| {
        let began = of_this_thread();
        for to in 1..=MOVES {
            for session in sessions.clone() {
                bench.progress(session, Phase::Transfer, round * MOVES + to);
            }
            assert_eq!(bench.retire_below, round * MOVES + to);
        }
        (of_this_thread() - began) / (MOVES * replicas as u64) as u32
    };
    (0..ROUNDS).map(round).min().unwrap()
}

#[test]
fn a_report_costs_as_much_among_a_thousand_replicas_as_among_ten() {
    let (few, many) = (time_of_a_report(10), time_of_a_report(1000));
    // A look at all replicas would cost a hundred times as much. Memory that another program has pushed out of the caches
    // costs ten times.
    assert!(many < few * 40, "{few:?} for a report of one of 10, {many:?} for one of 1000");
}
