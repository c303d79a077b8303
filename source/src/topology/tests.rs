//! Tests of the topology's decisions, without any I/O.
#![allow(clippy::unwrap_used)]

use proptest::collection::vec;
use proptest::prelude::*;

use super::*;

const GENERATION: u64 = 5;

struct Bench {
    topology: Topology,
    now: Instant,
}

impl Bench {
    fn new() -> Bench {
        Bench { topology: Topology::default(), now: Instant::now() }
    }

    /// `count` replicas that join at the same time and serve.
    fn chain(count: u64) -> Bench {
        let mut bench = Bench::new();
        for session in 1..=count {
            bench.join(session, "");
        }
        bench
    }

    fn join(&mut self, session: Session, zone: &str) -> Option<Session> {
        let joining = Joining { serves: true, zone: zone.into(), witness: witness(session), first: 0 };
        self.topology.join(self.now, GENERATION, session, joining)
    }

    fn holds(&mut self, session: Session, held: u64) {
        self.says(session, Relaying { held, ..Relaying::default() }, held * 1000, false);
    }

    fn says(&mut self, session: Session, at: Relaying, bytes: u64, is_done: bool) {
        self.topology.progress(self.now, session, at, bytes, is_done);
    }

    fn after(&mut self, time: Duration, published: u64) -> Vec<Assignment> {
        self.now += time;
        self.topology.tick(self.now, published)
    }
}

/// A replica on a host of its own.
fn witness(session: Session) -> Witness {
    Witness::new([10, 0, 0, session as u8].into(), "replica")
}

fn assigned(reader: Session, from: Option<Session>) -> Assignment {
    Assignment { reader, from }
}

#[test]
fn replicas_that_join_together_form_one_chain_and_the_source_feeds_its_head() {
    let mut bench = Bench::new();
    let from: Vec<Option<Session>> = (1..=5).map(|session| bench.join(session, "")).collect();
    assert_eq!(from, [None, Some(1), Some(2), Some(3), Some(4)]);
}

#[test]
fn a_late_joiner_reads_from_a_peer_without_readers() {
    let mut bench = Bench::chain(2);
    let whole = Relaying { held: 100, ..Relaying::default() };
    bench.says(1, whole, 0, true);
    bench.says(2, whole, 0, true);
    assert_eq!(bench.join(3, ""), Some(1));
    assert_eq!(bench.join(4, ""), Some(2));
    // Every replica that is complete has a reader: the next one joins the end of the chain.
    assert_eq!(bench.join(5, ""), Some(3));
}

#[test]
fn no_replica_reads_from_one_that_does_not_serve() {
    let mut bench = Bench::new();
    let now = bench.now;
    let silent = Joining { serves: false, zone: String::new(), witness: witness(1), first: 0 };
    assert_eq!(bench.topology.join(now, GENERATION, 1, silent.clone()), None);
    assert_eq!(bench.join(2, ""), None);
    assert_eq!(bench.topology.join(now, GENERATION, 3, silent), Some(2));
}

#[test]
fn a_replica_that_begins_does_not_read_from_a_peer_without_the_first_slots() {
    let mut bench = Bench::chain(1);
    bench.says(1, Relaying { oldest: 3, held: 9, ..Relaying::default() }, 0, false);
    assert_eq!(bench.join(2, ""), None);
    let resuming = Joining { serves: true, zone: String::new(), witness: witness(9), first: 4 };
    assert_eq!(bench.topology.join(bench.now, GENERATION, 3, resuming), Some(1));
}

#[test]
fn a_zone_is_entered_once_and_fed_from_within() {
    let mut bench = Bench::new();
    assert_eq!(bench.join(1, "east"), None);
    assert_eq!(bench.join(2, "west"), Some(1));
    assert_eq!(bench.join(3, "east"), Some(1));
    assert_eq!(bench.join(4, "west"), Some(2));
    assert_eq!(bench.join(5, "east"), Some(3));
}

#[test]
fn when_a_replica_of_the_chain_leaves_its_reader_takes_over_its_upstream() {
    let mut bench = Bench::chain(4);
    for session in 1..=4 {
        bench.holds(session, 50 - session);
    }
    assert_eq!(bench.topology.gone(2), [assigned(3, Some(1))]);
    // The reader of the former head is the head now.
    assert_eq!(bench.topology.gone(1), [assigned(3, None)]);
    assert_eq!(bench.topology.reads_from(4), Some(3));
}

#[test]
fn a_peer_that_one_reader_lost_may_still_serve_others_but_not_that_one() {
    let mut bench = Bench::chain(3);
    assert_eq!(bench.topology.lost(2, 1, LossCause::Gone), [assigned(2, None)]);
    // No replica reads from the chain's head now, and 2 is not assigned to it again.
    assert_eq!(bench.topology.lost(3, 2, LossCause::Gone), [assigned(3, Some(1))]);
    assert_eq!(bench.join(4, ""), Some(2));
}

#[test]
fn a_reader_leaves_a_peer_that_it_accuses_and_the_second_accuser_bans_the_peer_for_all() {
    let mut bench = Bench::chain(4);
    for (reader, peer) in [(3, 2), (4, 3)] {
        bench.topology.lost(reader, peer, LossCause::Refused);
    }
    // 2 and 3 read from 1, and 4 from 2.
    assert_eq!([2, 3, 4].map(|session| bench.topology.reads_from(session)), [Some(1), Some(1), Some(2)]);
    bench.holds(1, 10);
    bench.holds(2, 2);
    bench.holds(3, 3);
    assert_eq!(bench.topology.lost(2, 1, LossCause::Lied), [assigned(2, Some(3))]);
    assert!(!bench.topology.accusations.is_banned(1));
    assert_eq!(bench.topology.reads_from(3), Some(1), "one accuser took the peer from another reader");
    assert_eq!(bench.topology.lost(3, 1, LossCause::Lied), [assigned(3, None)]);
    assert!(bench.topology.accusations.is_banned(1));
    assert!([5, 6, 7].iter().all(|&session| bench.join(session, "") != Some(1)));
}

#[test]
fn a_replica_that_accuses_again_after_it_has_connected_again_is_still_one_accuser() {
    let mut bench = Bench::new();
    bench.join(1, "");
    let (now, whole) = (bench.now, Relaying { held: 10, ..Relaying::default() });
    bench.says(1, whole, 0, true);
    let joining = |session| Joining { serves: false, zone: String::new(), witness: witness(session), first: 0 };
    assert_eq!(bench.topology.join(now, GENERATION, 2, joining(2)), Some(1));
    assert_eq!(bench.topology.lost(2, 1, LossCause::Lied), [assigned(2, None)]);
    bench.topology.gone(2);
    // The same host under another number: it is not assigned to the peer again, and its reports count for nothing.
    assert_eq!(bench.topology.join(now, GENERATION, 3, joining(2)), None);
    assert_eq!(bench.topology.lost(3, 1, LossCause::Lied), []);
    assert_eq!(bench.topology.join(now, GENERATION, 4, joining(4)), Some(1));
}

#[test]
fn replicas_of_one_host_are_one_witness_except_on_the_sources_host() {
    let [far, near] = ["10.0.0.7", "::ffff:127.0.0.1"].map(|address| address.parse().unwrap());
    assert_eq!(Witness::new(far, "a"), Witness::new(far, "b"));
    assert_ne!(Witness::new(near, "a"), Witness::new(near, "b"));
    assert_eq!(Witness::new(near, "a"), Witness::new("127.0.0.1".parse().unwrap(), "a"));
}

#[test]
fn the_loss_of_a_peer_that_was_not_read_changes_nothing() {
    let mut bench = Bench::chain(3);
    assert_eq!(bench.topology.lost(3, 1, LossCause::Gone), []);
    assert_eq!(bench.topology.lost(9, 1, LossCause::Gone), []);
    // A report about a peer that the source never assigned bans no peer, however many replicas send it.
    assert_eq!(bench.topology.lost(3, 1, LossCause::Lied), []);
    assert_eq!(bench.topology.lost(1, 3, LossCause::Lied), []);
    assert_eq!(bench.topology.reads_from(3), Some(2));
    assert_eq!(bench.topology.reads_from(2), Some(1));
}

#[test]
fn a_replica_behind_a_slow_link_moves_to_the_end_and_each_pair_is_swapped_once() {
    let mut bench = Bench::chain(3);
    // Both at full speed, then the head at a tenth of it.
    for step in 0..40_u64 {
        let head = if step < 10 { step * 10 } else { 90 + (step - 10) };
        bench.holds(1, head);
        bench.holds(2, head);
        bench.holds(3, head);
        let swapped = bench.after(Duration::from_millis(500), 1000);
        if !swapped.is_empty() {
            assert!(step > 10, "{step}");
            assert_eq!(swapped, [assigned(2, None), assigned(1, Some(2))]);
            break;
        }
    }
    assert_eq!((bench.topology.reads_from(2), bench.topology.reads_from(1)), (None, Some(2)));
    assert_eq!(bench.topology.reads_from(3), Some(2));
    // The head's link was not the cause: all are as slow as before, and the pair is not swapped back.
    for step in 0..40 {
        bench.holds(2, 120 + step);
        bench.holds(1, 120 + step);
        bench.holds(3, 120 + step);
        let swapped = bench.after(Duration::from_millis(500), 1000);
        assert!(!swapped.iter().any(|assignment| assignment.reader == 1), "{swapped:?}");
    }
}

/// Two replicas report every 250 ms, the reader of the other one `later` than that one. `holds` gives what each has at a
/// number of milliseconds, and what the source has published. Returns what was assigned, and when.
fn at_different_times(later: u64, holds: impl Fn(u64) -> [u64; 3]) -> Option<(u64, Vec<Assignment>)> {
    let mut bench = Bench::chain(2);
    let begin = bench.now;
    (0..8000).step_by(10).find_map(|millis| {
        bench.now = begin + Duration::from_millis(millis);
        let [head, reader, published] = holds(millis);
        if millis % 250 == 0 {
            bench.holds(1, head);
        }
        if millis % 250 == later {
            bench.holds(2, reader);
        }
        // Between the reports of both.
        let moved = if millis % 50 == 40 { bench.topology.tick(bench.now, published) } else { Vec::new() };
        (!moved.is_empty()).then_some((millis, moved))
    })
}

#[test]
fn a_slow_peer_is_found_although_replicas_report_at_different_times() {
    // After two seconds the head has a third of its rate, and its reader all of its slots.
    let head = |millis: u64| millis.min(2000) / 10 + millis.saturating_sub(2000) / 30;
    for later in [10, 120, 240] {
        let (millis, moved) = at_different_times(later, |millis| [head(millis), head(millis), 1000]).unwrap();
        assert!((4000..6000).contains(&millis), "{millis}");
        assert_eq!(moved, [assigned(2, None), assigned(1, Some(2))]);
    }
}

#[test]
fn a_peer_that_has_all_of_the_source_is_not_slow_although_replicas_report_at_different_times() {
    // After two seconds the source publishes less. The head follows it closely, and the reader the head.
    let published = |millis: u64| 20 + millis.min(2000) + millis.saturating_sub(2000) * 3 / 10;
    for later in [10, 30, 120, 240] {
        let holds = |millis: u64| [published(millis) - 3, published(millis) - 5, published(millis)];
        assert_eq!(at_different_times(later, holds), None);
    }
}

#[test]
fn a_silent_replica_loses_its_readers_until_it_reports_again() {
    let mut bench = Bench::chain(3);
    for step in 1..8 {
        bench.holds(2, 5);
        bench.holds(3, 5);
        let moved = bench.after(Duration::from_millis(500), 5);
        assert_eq!(moved, if step == 5 { vec![assigned(2, None)] } else { vec![] }, "step {step}");
    }
    bench.holds(1, 9);
    assert_eq!(bench.topology.lost(3, 2, LossCause::Gone), [assigned(3, Some(1))]);
}

#[test]
fn a_reader_that_waits_for_its_own_server_says_nothing_about_its_peer() {
    let mut bench = Bench::chain(2);
    for step in 0..40_u64 {
        let held = if step < 10 { step * 10 } else { 90 };
        bench.holds(1, held);
        bench.says(2, Relaying { held, is_full: true, ..Relaying::default() }, held * 1000, false);
        assert_eq!(bench.after(Duration::from_millis(500), 1000), []);
    }
}

/// A peer at 10 slots a second, and its reader, which lends nothing.
fn behind_a_crawling_peer() -> Bench {
    let mut bench = Bench::chain(1);
    let joining = Joining { serves: false, zone: String::new(), witness: witness(9), first: 0 };
    assert_eq!(bench.topology.join(bench.now, GENERATION, 2, joining), Some(1));
    bench
}

/// One second passes; the replicas gain this many slots.
fn second(bench: &mut Bench, gain: [u64; 2]) -> Vec<Assignment> {
    for (session, gain) in (1..).zip(gain) {
        let held = bench.topology.nodes[&session].held + gain;
        bench.holds(session, held);
    }
    bench.after(Duration::from_secs(1), 1000)
}

#[test]
fn a_reader_that_lends_nothing_leaves_a_peer_that_is_slower_than_another_reader_has_been() {
    let mut bench = behind_a_crawling_peer();
    assert_eq!((0..3).flat_map(|_| second(&mut bench, [50, 50])).count(), 0);
    // The peer's copy stands still: its server takes nothing.
    let moved: Vec<_> = (0..6).flat_map(|_| second(&mut bench, [0, 0])).collect();
    assert_eq!(moved, [assigned(2, None)]);
}

#[test]
fn a_reader_that_lends_nothing_tries_the_source_and_stays_there_if_it_is_faster() {
    let mut bench = behind_a_crawling_peer();
    let moved: Vec<_> = (0..8).flat_map(|_| second(&mut bench, [10, 10])).collect();
    assert_eq!(moved, [assigned(2, None)]);
    assert_eq!((0..20).flat_map(|_| second(&mut bench, [10, 40])).count(), 0);
    assert_eq!(bench.topology.reads_from(2), None);
}

#[test]
fn a_reader_that_lends_nothing_returns_to_its_peer_if_the_source_is_no_faster() {
    let mut bench = behind_a_crawling_peer();
    while second(&mut bench, [10, 10]).is_empty() {}
    // Both now share the source's link.
    let moved: Vec<_> = (0..5).flat_map(|_| second(&mut bench, [5, 5])).collect();
    assert_eq!(moved, [assigned(2, Some(1))]);
    // And it is not tried again soon.
    assert_eq!((0..30).flat_map(|_| second(&mut bench, [10, 10])).count(), 0);
}

/// Two replicas that lend, of which the second reads from the first. Both have received 100 slots a second for a while.
fn fed_well() -> Bench {
    let mut bench = Bench::chain(2);
    for _ in 0..4 {
        assert_eq!(second(&mut bench, [100, 90]), []);
    }
    bench
}

#[test]
fn a_reader_that_its_peer_feeds_slowly_tries_the_source_and_stays_there_if_it_is_faster() {
    let mut bench = fed_well();
    // Its peer receives as much as before, and has more than the reader.
    let moved: Vec<_> = (0..6).flat_map(|_| second(&mut bench, [100, 10])).collect();
    assert_eq!(moved, [assigned(2, None)]);
    assert_eq!((0..20).flat_map(|_| second(&mut bench, [100, 80])).count(), 0);
    assert_eq!(bench.topology.reads_from(2), None);
}

#[test]
fn a_reader_that_its_peer_has_never_fed_tries_the_source() {
    let mut bench = Bench::chain(2);
    let moved: Vec<_> = (0..8).flat_map(|_| second(&mut bench, [100, 0])).collect();
    assert_eq!(moved, [assigned(2, None)]);
}

#[test]
fn a_reader_whose_own_link_has_become_slow_returns_to_its_peer() {
    let mut bench = fed_well();
    let moved: Vec<_> = (0..9).flat_map(|_| second(&mut bench, [100, 10])).collect();
    assert_eq!(moved, [assigned(2, None), assigned(2, Some(1))]);
    assert_eq!((0..30).flat_map(|_| second(&mut bench, [100, 10])).count(), 0);
}

#[test]
fn a_reader_that_shares_its_peer_with_another_one_is_not_fed_slowly() {
    let mut bench = fed_well();
    assert_eq!((0..30).flat_map(|_| second(&mut bench, [100, 40])).count(), 0);
}

#[test]
fn a_joiner_takes_the_place_of_a_reader_in_another_zone_and_feeds_it() {
    let mut bench = Bench::new();
    for (session, zone) in [(1, "east"), (2, "west"), (3, "east"), (4, "west"), (5, "east")] {
        bench.join(session, zone);
    }
    // One chain: all of east, then all of west.
    let from = [1, 2, 3, 4, 5].map(|session| bench.topology.reads_from(session));
    assert_eq!(from, [None, Some(5), Some(1), Some(2), Some(3)]);
    assert_eq!(bench.topology.spliced(), [assigned(2, Some(3)), assigned(2, Some(5))]);
    // A reader that holds more than the joiner does not wait for it.
    bench.holds(5, 9);
    bench.holds(2, 9);
    assert_eq!(bench.join(6, "east"), Some(5));
    assert_eq!((bench.topology.reads_from(2), bench.topology.spliced()), (Some(5), vec![]));
}

#[test]
fn another_snapshot_begins_with_an_empty_topology() {
    let mut bench = Bench::chain(3);
    let joining = || Joining { serves: true, zone: String::new(), witness: witness(1), first: 0 };
    assert_eq!(bench.topology.join(bench.now, GENERATION + 1, 3, joining()), None);
    assert_eq!(bench.topology.join(bench.now, GENERATION + 1, 1, joining()), Some(3));
}

/// An event for a topology.
#[derive(Clone, Debug)]
enum Operation {
    Join { session: Session, zone: u8, first: u64 },
    Progress { session: Session, oldest: u64, more: u64, is_done: bool },
    Lost { reader: Session, cause: u8 },
    Gone { session: Session },
    Tick,
}

fn operations() -> impl Strategy<Value = Operation> {
    let session = 1_u64..8;
    prop_oneof![
        4 => (session.clone(), 0_u8..3, prop_oneof![4 => Just(0), 1 => 0_u64..20])
            .prop_map(|(session, zone, first)| Operation::Join { session, zone, first }),
        8 => (session.clone(), 0_u64..4, 0_u64..9, prop::bool::weighted(0.1))
            .prop_map(|(session, oldest, more, is_done)| Operation::Progress { session, oldest, more, is_done }),
        2 => (session.clone(), 0_u8..4).prop_map(|(reader, cause)| Operation::Lost { reader, cause }),
        1 => session.prop_map(|session| Operation::Gone { session }),
        3 => Just(Operation::Tick),
    ]
}

/// Applies one operation, and returns the new upstreams.
fn apply(bench: &mut Bench, operation: &Operation) -> Vec<Assignment> {
    match *operation {
        Operation::Join { session, zone, first } => {
            let serves = session % 4 != 0;
            let joining = Joining { serves, zone: zone.to_string(), witness: witness(session % 6), first };
            let joined = assigned(session, bench.topology.join(bench.now, GENERATION, session, joining));
            [vec![joined], bench.topology.spliced()].concat()
        }
        Operation::Progress { session, oldest, more, is_done } => {
            let Some(node) = bench.topology.nodes.get(&session) else { return Vec::new() };
            let held = node.held + more;
            let at = Relaying { oldest: (node.oldest + oldest).min(held), held, ..Relaying::default() };
            bench.says(session, at, held * 1000, is_done);
            Vec::new()
        }
        Operation::Lost { reader, cause } => {
            let Some(peer) = bench.topology.reads_from(reader) else { return Vec::new() };
            let causes = [LossCause::Gone, LossCause::Lied, LossCause::Passed, LossCause::Refused];
            bench.topology.lost(reader, peer, causes[usize::from(cause)])
        }
        Operation::Gone { session } => bench.topology.gone(session),
        Operation::Tick => bench.after(Duration::from_millis(700), 1000),
    }
}

proptest! {
    #[test]
    fn after_every_event_there_are_no_rings_and_each_replica_reads_from_a_valid_peer(operations in vec(operations(), 1..120)) {
        let mut bench = Bench::new();
        let mut told: BTreeMap<Session, Option<Session>> = BTreeMap::new();
        for operation in operations {
            for Assignment { reader, from } in apply(&mut bench, &operation) {
                told.insert(reader, from);
            }
            let topology = &bench.topology;
            told.retain(|session, _| topology.nodes.contains_key(session));
            for (&session, node) in &topology.nodes {
                let mut at = node.from;
                for _ in 0..=topology.nodes.len() {
                    at = at.and_then(|above| topology.nodes[&above].from);
                }
                prop_assert!(at.is_none(), "a ring at {session} after {operation:?}");
                prop_assert!(topology.readers_of(session).count() <= MAX_READERS);
                if node.is_done {
                    continue;
                }
                // The topology has the upstream that the reader was told.
                prop_assert_eq!(told.get(&session).copied().flatten(), node.from, "{} after {:?}", session, operation);
                if let Some(peer) = node.from {
                    prop_assert!(topology.nodes[&peer].serves);
                    prop_assert!(!topology.accusations.bars(peer, &node.witness));
                    prop_assert!(!node.lost.contains(&peer));
                }
            }
        }
    }

    #[test]
    fn of_replicas_that_join_one_after_the_other_only_the_first_reads_from_the_source(zones in vec(0_u8..3, 1..20)) {
        let mut bench = Bench::new();
        for (session, zone) in (1..).zip(&zones) {
            let from = bench.join(session, &zone.to_string());
            prop_assert_eq!(from.is_none(), session == 1, "{}", session);
        }
        // Each zone except the first has one replica that reads from outside of it.
        let entries = bench.topology.nodes.values().filter(|node| {
            node.from.is_some_and(|peer| bench.topology.nodes[&peer].zone != node.zone)
        }).count();
        let kinds: BTreeSet<_> = zones.iter().collect();
        prop_assert_eq!(entries, kinds.len() - 1);
    }
}
