//! Tests of the topology's decisions, without any I/O; and a model of many replicas in racks, which drives the real
//! [`Topology`].
//!
//! Assumptions of the model. The bytes are a fluid: each step divides the cables among the flows by max-min fair
//! sharing, and a replica holds at most what its upstream holds, less one slot and the delay of a hop. Each host has one
//! network link with the same rate in both directions, each rack one uplink; traffic within a rack uses no uplink. A
//! host's servers, processors and memory are never the limit. Nothing is lost on a cable. A replica that loses its
//! upstream needs [`RECONNECT`] for the next one; [`DELAY`] passes until a reader fetches a slot that its upstream has
//! just received.
#![allow(clippy::unwrap_used)]

use std::fmt;

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

const GIB: f64 = (1_u64 << 30) as f64;

/// Bytes of a slot, the default of a source.
const SLOT: f64 = (1_u64 << 20) as f64;

/// Bytes per second of a cable of 1 Gb/s, less the headers.
const GIGABIT: f64 = 117e6;

/// Seconds of one step of the model.
const STEP: f64 = 0.25;

/// Seconds until a reader fetches a slot that its upstream has just received: a poll, and two round trips.
const DELAY: f64 = 0.001;

/// Seconds until a reader has connected to another upstream.
const RECONNECT: f64 = 0.3;

/// Seconds after which a model that has not ended is stopped.
const LIMIT: f64 = 3000.0;

/// Which replica reads from which other one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Shape {
    /// Each replica feeds two others, in the order of the racks.
    Tree,
    /// The first replica of each rack reads from that of the rack before, and feeds a chain in its own rack.
    Heads,
    /// The topology decides and knows no racks.
    NoZones,
    /// The topology decides and knows the racks (`--zone`).
    Zones,
}

/// One run of the model.
#[derive(Clone, Debug)]
struct Plan {
    shape: Shape,
    replicas: usize,
    racks: usize,
    gibibytes: f64,
    /// Gb/s of the source's cable, of the hosts' cables (by turns), and of the uplinks.
    source: f64,
    hosts: Vec<f64>,
    uplink: f64,
    /// One in this number of hosts has a cable of a tenth of the rate; 0 for no host.
    slow_part: usize,
    /// One in this number joins when half of the time of one is over; 0 for no host.
    late_part: usize,
    /// One in this number ends in the middle, each at another time; half of them without closing a connection.
    dead_part: usize,
}

impl Plan {
    fn of(shape: Shape, replicas: usize, gibibytes: f64) -> Plan {
        let racks = 20;
        let (source, hosts, uplink) = (10.0, vec![10.0], 25.0);
        Plan { shape, replicas, racks, gibibytes, source, hosts, uplink, slow_part: 0, late_part: 0, dead_part: 0 }
    }
}

/// What a run has shown.
#[derive(Debug)]
struct Outcome {
    /// Seconds until the last replica that lives had everything; [`LIMIT`] if it never did.
    last: f64,
    /// The same, of the replicas that joined at the beginning and whose cables are not slower than the source's.
    regular: f64,
    /// Copies of the data set that left the source, and that the busiest uplink carried in one direction.
    from_source: f64,
    uplink: f64,
    /// Hops from the source to the deepest replica.
    depth: usize,
    /// Upstreams that replicas were assigned after their first one.
    moves: usize,
}

impl fmt::Display for Outcome {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Outcome { last, regular, from_source, uplink, depth, moves } = self;
        write!(to, "{last:7.1} s | {regular:7.1} s | {from_source:7.2} | {uplink:6.2} | {depth:5} | {moves:5}")
    }
}

struct Host {
    session: Session,
    rack: usize,
    rate: f64,
    joins: f64,
    dies: Option<f64>,
    from: Option<usize>,
    /// It fetches nothing before this time.
    connects: f64,
    has_joined: bool,
    is_dead: bool,
    held: f64,
    done: Option<f64>,
    flow: f64,
}

struct World {
    plan: Plan,
    hosts: Vec<Host>,
    topology: Topology,
    base: Instant,
    now: f64,
    total: f64,
    outcome: Outcome,
    uplinks: Vec<[f64; 2]>,
}

/// Pseudo-random numbers, the same in every run.
fn mixed(number: usize) -> u64 {
    let mut bits = (number as u64).wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    bits ^= bits >> 29;
    bits = bits.wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits ^ (bits >> 32)
}

/// Whether this host is one of one in `part`. `salt` draws other hosts for each question.
fn is_one(number: usize, part: usize, salt: usize) -> bool {
    part > 0 && number > 0 && mixed(number + salt).is_multiple_of(part as u64)
}

impl World {
    fn new(plan: Plan) -> World {
        let total = plan.gibibytes * GIB;
        let alone = total / (plan.source * GIGABIT);
        let mut hosts: Vec<Host> = (0..plan.replicas)
            .map(|number| {
                let gigabits = plan.hosts[number % plan.hosts.len()];
                let slow = if is_one(number, plan.slow_part, 1000) { 0.1 } else { 1.0 };
                let late = if is_one(number, plan.late_part, 2000) { alone / 2.0 } else { 0.0 };
                let share = (mixed(number + 4000) % 1000) as f64 / 1000.0;
                Host {
                    session: number as u64 + 1,
                    // Static shapes go through the racks in order. The topology gets the joiners as they come.
                    rack: number * plan.racks / plan.replicas.max(1),
                    rate: gigabits * GIGABIT * slow,
                    joins: late,
                    dies: is_one(number, plan.dead_part, 3000).then_some(alone * (0.1 + 0.8 * share)),
                    from: None,
                    connects: 0.0,
                    has_joined: false,
                    is_dead: false,
                    held: 0.0,
                    done: None,
                    flow: 0.0,
                }
            })
            .collect();
        if matches!(plan.shape, Shape::Zones | Shape::NoZones) {
            hosts.sort_by_key(|host| mixed(host.session as usize));
            for (session, host) in (1..).zip(&mut hosts) {
                host.session = session;
            }
        }
        let outcome = Outcome { last: 0.0, regular: 0.0, from_source: 0.0, uplink: 0.0, depth: 0, moves: 0 };
        let uplinks = vec![[0.0; 2]; plan.racks + 1];
        let base = Instant::now();
        World { plan, hosts, topology: Topology::default(), base, now: 0.0, total, outcome, uplinks }
    }

    fn run(mut self) -> Outcome {
        while self.now < LIMIT && self.hosts.iter().any(|host| !host.is_dead && host.done.is_none()) {
            self.join();
            self.die();
            self.share();
            self.advance();
            self.now += STEP;
            self.tell();
        }
        self.outcome.last =
            self.hosts.iter().filter(|host| !host.is_dead).map(|host| host.done.unwrap_or(LIMIT)).fold(0.0, f64::max);
        let fast = self.plan.source * GIGABIT;
        let regular = self.hosts.iter().filter(|host| !host.is_dead && host.joins <= 0.0 && host.rate >= fast);
        self.outcome.regular = regular.map(|host| host.done.unwrap_or(LIMIT)).fold(0.0, f64::max);
        self.outcome.from_source /= self.total;
        self.outcome.uplink = self.uplinks.iter().flatten().fold(0.0, |most: f64, bytes| most.max(*bytes)) / self.total;
        self.outcome
    }

    fn time(&self) -> Instant {
        self.base + Duration::from_secs_f64(self.now)
    }

    fn at(&self, session: Option<Session>) -> Option<usize> {
        session.map(|session| session as usize - 1)
    }

    fn join(&mut self) {
        let time = self.time();
        for number in 0..self.hosts.len() {
            if self.hosts[number].has_joined || self.hosts[number].joins > self.now {
                continue;
            }
            self.hosts[number].has_joined = true;
            let (session, rack) = (self.hosts[number].session, self.hosts[number].rack);
            self.hosts[number].from = match self.plan.shape {
                Shape::Tree => number.checked_sub(1).map(|before| before / 2),
                Shape::Heads => {
                    let before = number.checked_sub(1);
                    let is_head = before.is_none_or(|before| self.hosts[before].rack != rack);
                    if is_head { self.hosts.iter().position(|host| host.rack + 1 == rack) } else { before }
                }
                Shape::NoZones | Shape::Zones => {
                    let zone = if self.plan.shape == Shape::Zones { rack.to_string() } else { String::new() };
                    let witness = Witness::new([10, 0, 0, 1].into(), "");
                    let joining = Joining { serves: true, zone, witness, first: 0 };
                    let from = self.topology.join(time, 1, session, joining);
                    let spliced = self.topology.spliced();
                    self.hosts[number].from = self.at(from);
                    self.assign(&spliced);
                    self.at(from)
                }
            };
        }
    }

    fn assign(&mut self, moved: &[Assignment]) {
        for assignment in moved {
            let from = self.at(assignment.from);
            let host = &mut self.hosts[assignment.reader as usize - 1];
            host.from = from;
            if self.now > 0.0 {
                host.connects = self.now + RECONNECT;
                self.outcome.moves += 1;
            }
        }
    }

    fn die(&mut self) {
        for number in 0..self.hosts.len() {
            let host = &mut self.hosts[number];
            if host.is_dead || host.dies.is_none_or(|dies| dies > self.now) {
                continue;
            }
            host.is_dead = true;
            // Half of them close their connections. The others fall silent, and the tick notices.
            if host.session.is_multiple_of(2) {
                let moved = self.topology.gone(host.session);
                self.assign(&moved);
            }
        }
    }

    /// The hosts in an order in which each follows its upstream.
    fn order(&self) -> Vec<usize> {
        let mut readers = vec![Vec::new(); self.hosts.len()];
        let mut order = Vec::new();
        for (number, host) in self.hosts.iter().enumerate() {
            match host.from {
                Some(from) => readers[from].push(number),
                None => order.push(number),
            }
        }
        let mut next = 0;
        while next < order.len() {
            order.extend(&readers[order[next]]);
            next += 1;
        }
        order
    }

    /// The most bytes that a reader can hold, given its upstream's.
    fn behind(&self, from: usize) -> f64 {
        let above = &self.hosts[from];
        if above.done.is_some() { self.total } else { above.held - SLOT - above.flow * DELAY }
    }

    fn is_active(&self, host: &Host) -> bool {
        let is_fed = host.from.is_none_or(|from| !self.hosts[from].is_dead);
        host.has_joined && !host.is_dead && host.done.is_none() && host.connects <= self.now && is_fed
    }

    /// The cables that a host's flow goes through. Numbers: the source's, the hosts' in and out, the uplinks' in and
    /// out.
    fn cables(&self, number: usize) -> Vec<usize> {
        let (host, hosts, racks) = (&self.hosts[number], self.hosts.len(), self.plan.racks + 1);
        let (out, rack) = match host.from {
            Some(from) => (1 + hosts + from, self.hosts[from].rack),
            None => (0, racks - 1),
        };
        let mut cables = vec![1 + number, out];
        if rack != host.rack {
            cables.push(1 + 2 * hosts + host.rack);
            // The source has a rack of its own.
            if rack < racks - 1 {
                cables.push(1 + 2 * hosts + racks + rack);
            }
        }
        cables
    }

    /// Max-min fair sharing: all flows grow alike until a cable is full. A flow that has all of its upstream grows no
    /// faster than that.
    fn share(&mut self) {
        let (hosts, racks) = (self.hosts.len(), self.plan.racks + 1);
        let mut room = vec![self.plan.source * GIGABIT];
        room.extend(self.hosts.iter().map(|host| host.rate));
        room.extend(self.hosts.iter().map(|host| host.rate));
        room.extend(vec![self.plan.uplink * GIGABIT; 2 * racks]);
        let mut flows = vec![0_usize; room.len()];
        let paths: Vec<Vec<usize>> = (0..hosts).map(|number| self.cables(number)).collect();
        let mut open: Vec<usize> =
            self.order().into_iter().filter(|&number| self.is_active(&self.hosts[number])).collect();
        let mut is_open = vec![false; hosts];
        for &number in &open {
            is_open[number] = true;
            paths[number].iter().for_each(|&cable| flows[cable] += 1);
        }
        let waits: Vec<bool> = self
            .hosts
            .iter()
            .map(|host| {
                host.from.is_some_and(|from| self.hosts[from].done.is_none() && host.held + SLOT >= self.behind(from))
            })
            .collect();
        self.hosts.iter_mut().for_each(|host| host.flow = 0.0);
        let mut level = 0.0;
        while !open.is_empty() {
            let shares = room.iter().zip(&flows).filter(|(_, flows)| **flows > 0);
            let more = shares.map(|(room, flows)| room / *flows as f64).fold(f64::INFINITY, f64::min);
            level += more;
            for (room, flows) in room.iter_mut().zip(&flows) {
                *room -= more * *flows as f64;
            }
            let full: Vec<bool> = room.iter().zip(&flows).map(|(room, flows)| *flows > 0 && *room < 1.0).collect();
            open.retain(|&number| {
                let follows = waits[number] && self.hosts[number].from.is_some_and(|from| !is_open[from]);
                let stays = !follows && !paths[number].iter().any(|&cable| full[cable]);
                if !stays {
                    is_open[number] = false;
                    self.hosts[number].flow = level;
                    paths[number].iter().for_each(|&cable| flows[cable] -= 1);
                }
                stays
            });
        }
    }

    fn advance(&mut self) {
        for number in self.order() {
            if !self.is_active(&self.hosts[number]) {
                continue;
            }
            let limit = self.hosts[number].from.map_or(self.total, |from| self.behind(from));
            let (before, flow) = (self.hosts[number].held, self.hosts[number].flow);
            let held = (before + flow * STEP).min(limit).max(before).min(self.total);
            let got = held - before;
            self.hosts[number].held = held;
            if self.hosts[number].from.is_none() {
                self.outcome.from_source += got;
            }
            let (hosts, racks) = (self.hosts.len(), self.plan.racks + 1);
            for cable in self.cables(number).into_iter().filter_map(|cable| cable.checked_sub(1 + 2 * hosts)) {
                self.uplinks[cable % racks][cable / racks] += got;
            }
            // One slot before the end the rest is on its way.
            let above = self.hosts[number].from.and_then(|from| self.hosts[from].done);
            let lag = (SLOT / flow.max(1.0)) + DELAY;
            let is_whole = held >= self.total - 1.0;
            if is_whole {
                let reached = self.now + got / flow.max(1.0);
                self.hosts[number].done = Some(reached.max(above.map_or(0.0, |above| above + lag)));
            }
        }
    }

    fn tell(&mut self) {
        let time = self.time();
        for host in self.hosts.iter().filter(|host| host.has_joined && !host.is_dead) {
            let at = Relaying { held: (host.held / SLOT) as u64, ..Relaying::default() };
            self.topology.progress(time, host.session, at, host.held as u64, host.done.is_some());
        }
        let moved = self.topology.tick(time, (self.total / SLOT) as u64);
        self.assign(&moved);
        let mut depth = vec![1; self.hosts.len()];
        for number in self.order() {
            if let Some(from) = self.hosts[number].from {
                depth[number] = depth[from] + 1;
            }
        }
        self.outcome.depth = self.outcome.depth.max(depth.into_iter().max().unwrap_or(0));
    }
}

fn alone(plan: &Plan) -> f64 {
    World::new(Plan { replicas: 1, slow_part: 0, late_part: 0, dead_part: 0, ..plan.clone() }).run().last
}

fn ratio(plan: &Plan) -> (f64, Outcome) {
    let outcome = World::new(plan.clone()).run();
    (outcome.last / alone(plan), outcome)
}

#[test]
#[ignore = "long: make test-all"]
fn a_thousand_replicas_in_racks_take_little_longer_than_one_and_each_cable_carries_one_copy() {
    let (ratio, outcome) = ratio(&Plan::of(Shape::Zones, 1000, 64.0));
    assert!(ratio <= 1.3, "{ratio}: {outcome}");
    assert!(outcome.from_source < 1.01 && outcome.uplink < 1.01, "{outcome}");
}

mod by_command {
    use super::*;

    #[test]
    #[ignore = "a table for docs/explanation/relay.md: cargo xtask scale"]
    fn table() {
        println!(
            "| data | network | shape | time of one | ratio | last of all | last regular | source | uplink | hops | moves |"
        );
        let shapes = [Shape::Tree, Shape::Heads, Shape::NoZones, Shape::Zones];
        for shape in shapes {
            row("64 GiB, 10 Gb/s", &Plan::of(shape, 1000, 64.0));
        }
        for shape in shapes {
            row("64 GiB, source 1", &Plan { source: 1.0, ..Plan::of(shape, 1000, 64.0) });
        }
        let zones = |gibibytes| Plan::of(Shape::Zones, 1000, gibibytes);
        row("64 GiB, all 1", &Plan { source: 1.0, hosts: vec![1.0], uplink: 10.0, ..zones(64.0) });
        row("64 GiB, all 25", &Plan { source: 25.0, hosts: vec![25.0], ..zones(64.0) });
        row("64 GiB, hosts 10 and 25", &Plan { hosts: vec![10.0, 25.0], ..zones(64.0) });
        row("64 GiB, hosts 1, 10, 25", &Plan { hosts: vec![10.0, 25.0, 1.0], ..zones(64.0) });
        row("8 GiB", &zones(8.0));
        row("1 GiB", &zones(1.0));
        row("64 GiB, 1 in 100 slow", &Plan { slow_part: 100, ..zones(64.0) });
        row("64 GiB, 1 in 10 late", &Plan { late_part: 10, ..zones(64.0) });
        row("64 GiB, 1 in 100 dies", &Plan { dead_part: 100, ..zones(64.0) });
    }
}

fn row(text: &str, plan: &Plan) {
    let (ratio, outcome) = ratio(plan);
    println!("| {text} | {:?} | {:.1} s | {ratio:.2} | {outcome} |", plan.shape, alone(plan));
}
