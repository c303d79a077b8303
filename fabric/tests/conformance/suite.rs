//! What must be true of every transport, one function each. The transport is unknown here.

use std::{
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use remora_fabric::{
    Completion, Denial, Error, Peer, ReadError, ReadRequest, RegionId, RegionKey, Regions, TransportKind, sim::Random,
    transport::wait_readable,
};

use crate::harness::{
    Harness, ID, PATIENCE, SECRET, SESSION, SIZE, World, memory, memory_of, read, settle, until_retired,
};

const OUT_OF_BOUNDS: Result<u32, ReadError> = Err(ReadError::Denied(Denial::OutOfBounds));

// -- Bytes --

/// Compares the whole sink with a model: the requested bytes have arrived, and nothing else has changed.
pub(crate) fn bytes_arrive_exactly_at_any_offset_and_length(harness: &impl Harness) {
    let world = World::new(harness);
    let mut peer = world.peer();
    let mut random = Random::new(11);
    for _round in 0..12 {
        let mut model = vec![0xEE; SIZE as usize];
        world.sink.fill(0..SIZE, 0xEE).unwrap();
        let reads = scattered_reads(&mut random, peer.depth().min(16));
        for read in &reads {
            let from = read.offset as usize..read.offset as usize + read.length as usize;
            model[read.sink_offset as usize..][..from.len()].copy_from_slice(&world.truth[from]);
        }
        assert_eq!(peer.post_read(&reads).unwrap(), reads.len());
        for done in settle(&mut *peer, reads.len()) {
            assert_eq!(done.result, Ok(reads[done.tag as usize].length));
        }
        let mut sink = vec![0; SIZE as usize];
        world.sink.read(0, &mut sink).unwrap();
        assert!(sink == model, "the whole sink");
    }
}

/// Reads of 0 bytes up to a whole place, each into its own place in the sink.
fn scattered_reads(random: &mut Random, count: usize) -> Vec<ReadRequest> {
    let place = SIZE / count as u64;
    let one = |tag: u64| {
        let length = match random.below(4) {
            0 => random.below(10),
            _ => random.below(place + 1),
        };
        let into = tag * place + random.below(place - length + 1);
        read(tag, random.below(SIZE - length + 1), length as u32, into)
    };
    (0..count as u64).map(one).collect()
}

pub(crate) fn one_read_can_fetch_the_whole_region(harness: &impl Harness) {
    let world = World::new(harness);
    world.assert_reads(&mut *world.peer(), 0, SIZE as u32);
}

pub(crate) fn reads_see_bytes_written_after_connecting(harness: &impl Harness) {
    let mut world = World::new(harness);
    let mut peer = world.peer();
    for round in 1..=20u8 {
        let offset = u64::from(round) * 5000;
        world.memory.fill(offset..offset + 3000, round).unwrap();
        world.truth[offset as usize..][..3000].fill(round);
        world.assert_reads(&mut *peer, offset - 100, 3200);
    }
}

pub(crate) fn a_view_shows_the_region_itself<H: Harness>(harness: &H) {
    let world = World::new(harness);
    let peer = world.peer();
    assert_eq!(peer.view().is_some(), H::HAS_VIEW);
    let Some(view) = peer.view() else { return };
    assert_eq!(view.length(), SIZE);
    assert_eq!(view.crc32c(0..SIZE).unwrap(), world.memory.crc32c(0..SIZE).unwrap());
    world.memory.write(1234, b"just now").unwrap();
    let mut bytes = [0; 8];
    view.read(1234, &mut bytes).unwrap();
    assert_eq!(&bytes, b"just now");
}

// -- The queue --

pub(crate) fn a_full_queue_accepts_fewer_and_recovers(harness: &impl Harness) {
    let world = World::new(harness);
    let mut peer = world.peer();
    let depth = peer.depth();
    assert!(depth >= 1);
    let reads: Vec<ReadRequest> = (0..depth as u64 + 5).map(|tag| read(tag, tag * 64, 64, tag * 64)).collect();
    for _round in 0..3 {
        assert_eq!(peer.post_read(&reads).unwrap(), depth, "as many as there is room for");
        assert_eq!(peer.post_read(&reads).unwrap(), 0, "full");
        let mut tags: Vec<u64> = settle(&mut *peer, depth).iter().map(|done| done.tag).collect();
        tags.sort_unstable();
        assert_eq!(tags, (0..depth as u64).collect::<Vec<_>>(), "the first ones, each once");
    }
    assert_eq!(peer.poll(&mut Vec::new()).unwrap(), 0);
}

/// Random posts and polls, and one fault at a random moment; then each accepted tag has been returned once.
pub(crate) fn every_accepted_read_completes_exactly_once_whatever_happens(harness: &impl Harness) {
    for seed in 0..8 {
        let mut world = World::new(harness);
        let mut peer = world.peer();
        let mut random = Random::new(seed);
        let (mut accepted, mut completions) = (0, Vec::new());
        let accident = random.below(60);
        for step in 0..80 {
            match (step == accident, seed % 4) {
                (true, 0) => world.exporter().revoke(ID),
                (true, 1) => world.exporter().withdraw(SESSION),
                (true, 2) => world.exporter = None,
                (true, _) => peer.close(),
                _ => {}
            }
            accepted += post_some(&mut *peer, &mut random, accepted);
            if random.below(3) == 0 {
                let _ = peer.poll(&mut completions);
            }
        }
        completions.extend(until_retired(&mut *peer).0);
        let mut tags: Vec<u64> = completions.iter().map(|done| done.tag).collect();
        tags.sort_unstable();
        assert_eq!(tags, (0..accepted).collect::<Vec<_>>(), "seed {seed}");
    }
}

/// Posts up to three reads with consecutive tags, some of them outside the region; returns how many were accepted.
fn post_some(peer: &mut dyn Peer, random: &mut Random, first_tag: u64) -> u64 {
    let count = random.below(4);
    let reads: Vec<ReadRequest> = (first_tag..first_tag + count)
        .map(|tag| read(tag, random.below(SIZE + SIZE / 8), random.below(20_000) as u32, random.below(SIZE - 20_000)))
        .collect();
    peer.post_read(&reads).unwrap_or(0) as u64
}

// -- Bounds --

pub(crate) fn a_range_outside_the_region_is_denied_and_the_peer_lives(harness: &impl Harness) {
    let world = World::new(harness);
    let mut peer = world.peer();
    for (offset, length) in [(SIZE - 10, 11), (SIZE, 1), (SIZE + 1, 1), (0, SIZE as u32 + 1), (1 << 40, 100)] {
        let sink = memory_of(2 * SIZE);
        let mut peer = world.peer_of(SESSION, ID, sink);
        assert_eq!(peer.post_read(&[read(3, offset, length, 0)]).unwrap(), 1);
        let done = settle(&mut *peer, 1);
        assert_eq!(done, [Completion { tag: 3, result: OUT_OF_BOUNDS }], "{length} bytes at {offset}");
    }
    for _again in 0..3 {
        assert_eq!(peer.post_read(&[read(3, SIZE, 1, 0)]).unwrap(), 1);
        assert_eq!(settle(&mut *peer, 1), [Completion { tag: 3, result: OUT_OF_BOUNDS }]);
        world.assert_reads(&mut *peer, SIZE - 10, 10);
    }
}

pub(crate) fn an_offset_that_overflows_is_denied_and_the_peer_lives(harness: &impl Harness) {
    let world = World::new(harness);
    let mut peer = world.peer();
    for (offset, length) in [(u64::MAX, 1), (u64::MAX - 9, 10), (u64::MAX - 9, 100), (u64::MAX, SIZE as u32)] {
        assert_eq!(peer.post_read(&[read(4, offset, length, 0)]).unwrap(), 1);
        let done = settle(&mut *peer, 1);
        assert_eq!(done, [Completion { tag: 4, result: OUT_OF_BOUNDS }], "{length} bytes at {offset}");
    }
    world.assert_reads(&mut *peer, 0, 100);
}

pub(crate) fn a_read_of_no_bytes_completes_with_none(harness: &impl Harness) {
    let world = World::new(harness);
    let mut peer = world.peer();
    for offset in [0, 17, SIZE] {
        assert_eq!(peer.post_read(&[read(5, offset, 0, SIZE)]).unwrap(), 1);
        assert_eq!(settle(&mut *peer, 1), [Completion { tag: 5, result: Ok(0) }], "at {offset}");
    }
    assert_eq!(peer.post_read(&[read(5, SIZE + 1, 0, 0)]).unwrap(), 1);
    assert_eq!(settle(&mut *peer, 1), [Completion { tag: 5, result: OUT_OF_BOUNDS }]);
    world.assert_reads(&mut *peer, 0, 100);
}

pub(crate) fn a_place_outside_the_sink_is_refused_at_once(harness: &impl Harness) {
    let world = World::new(harness);
    let mut peer = world.peer();
    for place in [SIZE, SIZE - 9, u64::MAX, u64::MAX - 5] {
        let refused = peer.post_read(&[read(1, 0, 10, 0), read(2, 0, 10, place)]);
        assert!(matches!(refused, Err(Error::OutOfBounds { .. })), "at {place}");
    }
    assert_eq!(peer.poll(&mut Vec::new()).unwrap(), 0, "the good one beside it was not accepted either");
    world.assert_reads(&mut *peer, 0, 100);
}

// -- Names and grants --

pub(crate) fn a_region_has_one_name_once(harness: &impl Harness) {
    let world = World::new(harness);
    assert!(matches!(world.exporter().export(ID, memory()), Err(Error::AlreadyExported(ID))));
    let other = RegionId { generation: 7, region: 2 };
    assert!(matches!(world.exporter().key(other), Err(Error::NotExported(id)) if id == other));
    world.exporter().revoke(other);
    world.exporter().export(other, memory()).unwrap();
    let key = world.exporter().key(other).unwrap();
    assert_eq!((key.id(), key.length(), key.transport()), (other, SIZE, world.exporter().kind()));
    assert_eq!(world.connector.kind(), world.exporter().kind());
}

/// The error of connecting with this key.
fn refusal(world: &World, key: &RegionKey, session: u64, secret: [u8; 32]) -> Error {
    match world.connector.connect(key, session, &secret, world.sink.clone()) {
        Ok(_) => panic!("connected, and should not have"),
        Err(error) => error,
    }
}

pub(crate) fn a_key_of_a_stale_generation_is_refused(harness: &impl Harness) {
    let world = World::new(harness);
    let stale = world.exporter().key(ID).unwrap();
    world.exporter().revoke(ID);
    world.exporter().export(RegionId { generation: ID.generation + 1, ..ID }, memory()).unwrap();
    let error = refusal(&world, &stale, SESSION, SECRET);
    assert!(matches!(error, Error::Refused(Denial::Stale)), "{error}");
}

pub(crate) fn a_key_of_an_unknown_region_is_refused(harness: &impl Harness) {
    let world = World::new(harness);
    let key = world.exporter().key(ID).unwrap();
    world.exporter().revoke(ID);
    world.exporter().export(RegionId { region: ID.region + 1, ..ID }, memory()).unwrap();
    let error = refusal(&world, &key, SESSION, SECRET);
    assert!(matches!(error, Error::Refused(Denial::Unknown)), "{error}");
}

pub(crate) fn a_key_of_another_transport_is_refused(harness: &impl Harness) {
    let world = World::new(harness);
    let kinds = [TransportKind::Sim, TransportKind::Shm, TransportKind::Tcp, TransportKind::Verbs];
    for other in kinds.into_iter().filter(|kind| *kind != world.connector.kind()) {
        let key = RegionKey::new(other, ID, SIZE, b"somewhere").unwrap();
        let error = refusal(&world, &key, SESSION, SECRET);
        assert!(matches!(error, Error::WrongTransport { given, .. } if given == other), "{error}");
    }
}

/// An outsider can find out neither which sessions exist nor, by asking for one that does not, which regions exist.
pub(crate) fn a_wrong_secret_is_refused_just_as_no_grant_is(harness: &impl Harness) {
    let world = World::new(harness);
    let key = world.exporter().key(ID).unwrap();
    let mut wrong = SECRET;
    wrong[31] ^= 1;
    for (session, secret) in [(SESSION, wrong), (SESSION + 1, SECRET), (SESSION + 1, [0; 32])] {
        let error = refusal(&world, &key, session, secret);
        assert!(matches!(error, Error::Refused(Denial::NotGranted)), "{error}");
    }
    world.exporter().revoke(ID);
    let error = refusal(&world, &key, SESSION, wrong);
    assert!(matches!(error, Error::Refused(Denial::NotGranted)), "{error}");
}

pub(crate) fn a_new_grant_replaces_the_old_secret(harness: &impl Harness) {
    let world = World::new(harness);
    let key = world.exporter().key(ID).unwrap();
    world.exporter().grant(SESSION, [1; 32], Regions::All);
    let error = refusal(&world, &key, SESSION, SECRET);
    assert!(matches!(error, Error::Refused(Denial::NotGranted)), "{error}");
    let mut peer = world.connector.connect(&key, SESSION, &[1; 32], world.sink.clone()).unwrap();
    world.assert_reads(&mut *peer, 0, 100);
}

pub(crate) fn a_withdrawn_grant_cuts_this_session_alone(harness: &impl Harness) {
    let world = World::new(harness);
    world.exporter().grant(SESSION + 1, SECRET, Regions::only([ID]));
    let mut cut = world.peer();
    let mut other = world.peer_of(SESSION + 1, ID, world.sink.clone());
    world.assert_reads(&mut *cut, 0, 100);
    world.exporter().withdraw(SESSION);
    let (_, why) = until_retired(&mut *cut);
    assert!(matches!(why, ReadError::PeerGone | ReadError::Denied(Denial::NotGranted)), "{why}");
    world.assert_reads(&mut *other, 0, 100);
    let key = world.exporter().key(ID).unwrap();
    let error = refusal(&world, &key, SESSION, SECRET);
    assert!(matches!(error, Error::Refused(Denial::NotGranted)), "{error}");
}

/// Other memory than the world's region, as the probe region is beside the snapshot.
const OTHER: RegionId = RegionId { region: ID.region + 1, ..ID };

/// The key is not what protects the region: this reader has it.
pub(crate) fn a_reader_with_a_grant_for_one_region_cannot_read_another(harness: &impl Harness) {
    let world = World::new(harness);
    world.exporter().export(OTHER, memory()).unwrap();
    let session = SESSION + 1;
    world.exporter().grant(session, SECRET, Regions::only([ID]));
    let mut peer = world.peer_of(session, ID, world.sink.clone());
    world.assert_reads(&mut *peer, 0, 100);
    let other = world.exporter().key(OTHER).unwrap();
    let error = refusal(&world, &other, session, SECRET);
    assert!(matches!(error, Error::Refused(Denial::NotGranted)), "{error}");
    // It does not learn which regions there are either.
    world.exporter().revoke(OTHER);
    let error = refusal(&world, &other, session, SECRET);
    assert!(matches!(error, Error::Refused(Denial::NotGranted)), "{error}");

    world.exporter().export(OTHER, world.memory.clone()).unwrap();
    world.exporter().grant(session, SECRET, Regions::only([ID, OTHER]));
    let mut second = world.peer_of(session, OTHER, world.sink.clone());
    for peer in [&mut peer, &mut second] {
        world.assert_reads(&mut **peer, 0, 100);
    }
}

pub(crate) fn a_narrower_grant_cuts_the_readers_of_other_regions(harness: &impl Harness) {
    let world = World::new(harness);
    world.exporter().export(OTHER, memory()).unwrap();
    let mut spared = world.peer();
    let mut cut = world.peer_of(SESSION, OTHER, memory());
    world.exporter().grant(SESSION, SECRET, Regions::only([ID]));
    let (_, why) = until_retired(&mut *cut);
    assert!(matches!(why, ReadError::PeerGone | ReadError::Denied(Denial::NotGranted)), "{why}");
    world.assert_reads(&mut *spared, 0, 100);
}

// -- Ends --

/// Fills the queue with reads of the whole region.
fn fill_queue(peer: &mut dyn Peer) -> usize {
    let reads: Vec<ReadRequest> = (0..peer.depth() as u64).map(|tag| read(tag, 0, SIZE as u32, 0)).collect();
    peer.post_read(&reads).unwrap()
}

/// Checks a peer that has ended: each outstanding read has completed or failed for the reason of the end, and every
/// further call returns that reason.
fn assert_ended(peer: &mut dyn Peer, outstanding: usize) -> ReadError {
    let (completions, why) = until_retired(peer);
    assert_eq!(completions.len(), outstanding);
    assert!(
        completions.iter().all(|done| done.result == Ok(SIZE as u32) || done.result == Err(why)),
        "{completions:?}"
    );
    assert!(matches!(peer.post_read(&[read(0, 0, 1, 0)]), Err(Error::Retired(again)) if again == why));
    assert!(matches!(peer.poll(&mut Vec::new()), Err(Error::Retired(again)) if again == why));
    why
}

pub(crate) fn a_region_revoked_mid_read_ends_the_peer(harness: &impl Harness) {
    let world = World::new(harness);
    let mut peer = world.peer();
    let outstanding = fill_queue(&mut *peer);
    world.exporter().revoke(ID);
    let why = assert_ended(&mut *peer, outstanding);
    assert!(matches!(why, ReadError::Denied(Denial::Revoked) | ReadError::PeerGone), "{why}");
}

pub(crate) fn revoking_a_region_leaves_the_readers_of_others_alone(harness: &impl Harness) {
    let world = World::new(harness);
    let other = RegionId { generation: ID.generation + 1, ..ID };
    world.exporter().export(other, world.memory.clone()).unwrap();
    let (mut cut, mut spared) = (world.peer(), world.peer_of(SESSION, other, world.sink.clone()));
    world.exporter().revoke(ID);
    until_retired(&mut *cut);
    world.assert_reads(&mut *spared, 0, 1000);
}

pub(crate) fn an_exporter_dropped_mid_read_ends_the_peer(harness: &impl Harness) {
    let mut world = World::new(harness);
    let mut peer = world.peer();
    let outstanding = fill_queue(&mut *peer);
    world.exporter = None;
    assert_eq!(assert_ended(&mut *peer, outstanding), ReadError::PeerGone);
}

pub(crate) fn a_source_that_is_gone_can_not_be_reached(harness: &impl Harness) {
    let mut world = World::new(harness);
    let key = world.exporter().key(ID).unwrap();
    world.exporter = None;
    let error = refusal(&world, &key, SESSION, SECRET);
    assert!(matches!(error, Error::Unreachable { .. }), "{error}");
}

pub(crate) fn a_closed_peer_cancels_what_is_outstanding(harness: &impl Harness) {
    let world = World::new(harness);
    let mut peer = world.peer();
    let outstanding = fill_queue(&mut *peer);
    peer.close();
    assert_eq!(assert_ended(&mut *peer, outstanding), ReadError::Cancelled);
    peer.close();
    assert!(matches!(peer.poll(&mut Vec::new()), Err(Error::Retired(ReadError::Cancelled))));
    world.assert_reads(&mut *world.peer(), 0, 100);
}

// -- Several readers --

pub(crate) fn a_reader_that_does_not_poll_delays_no_other_reader(harness: &impl Harness) {
    let world = World::new(harness);
    let mut slow = world.peer_of(SESSION, ID, memory());
    let outstanding = fill_queue(&mut *slow);
    let mut other = world.peer();
    let begun = Instant::now();
    for round in 0..30 {
        world.assert_reads(&mut *other, round * 1000, 10_000);
    }
    assert!(begun.elapsed() < PATIENCE);
    let done = settle(&mut *slow, outstanding);
    assert!(done.iter().all(|done| done.result == Ok(SIZE as u32)), "and in the end it gets its own");
}

pub(crate) fn many_readers_at_once_each_get_their_bytes(harness: &impl Harness) {
    const READERS: u64 = 6;
    let world = World::new(harness);
    let come = |number| {
        let sink = memory();
        (world.peer_of_new_session(number, sink.clone()), sink)
    };
    let readers: Vec<_> = (0..READERS).map(come).collect();
    thread::scope(|scope| {
        for (number, (mut peer, sink)) in readers.into_iter().enumerate() {
            let truth = &world.truth;
            scope.spawn(move || {
                for round in 0..10 {
                    let offset = number * 10_000 + round * 777;
                    assert_eq!(peer.post_read(&[read(0, offset as u64, 50_000, 0)]).unwrap(), 1);
                    assert_eq!(settle(&mut *peer, 1)[0].result, Ok(50_000));
                    let mut bytes = vec![0; 50_000];
                    sink.read(0, &mut bytes).unwrap();
                    assert!(bytes == truth[offset..][..50_000]);
                }
            });
        }
    });
}

// -- Waiting --

pub(crate) fn the_armed_descriptor_becomes_readable_when_bytes_arrive(harness: &impl Harness) {
    let world = World::new(harness);
    let mut peer = world.peer();
    for round in 0..5 {
        assert_eq!(peer.post_read(&[read(round, 0, 100_000, 0)]).unwrap(), 1);
        let (begun, mut completions) = (Instant::now(), Vec::new());
        while completions.is_empty() {
            let left = PATIENCE.saturating_sub(begun.elapsed());
            assert!(wait_readable(peer.arm(), left).unwrap(), "silent though bytes are to come");
            peer.poll(&mut completions).unwrap();
        }
        assert_eq!(completions, [Completion { tag: round, result: Ok(100_000) }]);
    }
}

pub(crate) fn the_armed_descriptor_becomes_readable_when_the_region_is_revoked(harness: &impl Harness) {
    let world = World::new(harness);
    let mut peer = world.peer();
    world.assert_reads(&mut *peer, 0, 100);
    world.exporter().revoke(ID);
    let begun = Instant::now();
    // The descriptor may be readable without need, so the loop ends only when the peer reports the end.
    while peer.poll(&mut Vec::new()).is_ok() {
        let left = PATIENCE.saturating_sub(begun.elapsed());
        assert!(wait_readable(peer.arm(), left).unwrap(), "silent though the region is gone");
    }
}

pub(crate) fn waiting_ends_by_its_time_out(harness: &impl Harness) {
    let world = World::new(harness);
    let mut peer = world.peer();
    let begun = Instant::now();
    peer.wait(Duration::from_millis(30)).unwrap();
    peer.wait(Duration::ZERO).unwrap();
    assert!(begun.elapsed() < PATIENCE);
    assert_eq!(peer.poll(&mut Vec::new()).unwrap(), 0);
}

// -- What is left behind --

/// Runs alone in its process; see `in_own_process`.
pub(crate) fn many_peers_come_and_go_and_leave_no_descriptor_or_thread(harness: &impl Harness) {
    const PEERS: u64 = 4;
    let before = held();
    for _exporter in 0..5 {
        let mut world = World::new(harness);
        let key = world.exporter().key(ID).unwrap();
        for round in 0..10 {
            let come = |number| world.peer_of_new_session(round * PEERS + number, world.sink.clone());
            let mut peers: Vec<Box<dyn Peer>> = (0..PEERS).map(come).collect();
            world.assert_reads(&mut *peers[0], 0, 1000);
            for peer in &mut peers {
                fill_queue(&mut **peer);
            }
            peers[0].close();
            drop(refusal(&world, &key, SESSION, [0; 32]));
        }
        let last = world.peer();
        world.exporter = None;
        drop(last);
    }
    let begun = Instant::now();
    let is_back = || held().iter().zip(&before).all(|(now, then)| now <= then);
    while !is_back() && begun.elapsed() < PATIENCE {
        // A thread that has just ended may still be listed.
        thread::sleep(Duration::from_millis(10));
    }
    assert!(is_back(), "before: {before:?}, after: {:?} (descriptors, threads, mappings)", held());
}

/// Descriptors, threads, and mappings of the suite's memories that this process holds.
fn held() -> [usize; 3] {
    let entries = |folder: &str| std::fs::read_dir(folder).unwrap().count();
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    [entries("/proc/self/fd"), entries("/proc/self/task"), maps.matches("memfd:conformance").count()]
}

// The traits promise that both ends can be shared between threads.
const _: fn(Arc<dyn remora_fabric::Exporter>, Arc<dyn remora_fabric::Connector>) = |exporter, connector| {
    fn shared<T: Send + Sync>(_: T) {}
    shared(exporter);
    shared(connector);
};
