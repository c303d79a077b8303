//! Large writes that servers pull: out of the writer's outbox, and along a chain.

use std::sync::Arc;
use std::time::Duration;

use remora_fabric::tcp::{TcpExporter, TcpOptions};
use remora_fabric::{Exporter, Memory, Pages, RegionId, Regions};
use remora_volume::client::{ClientOptions, Volume, WriteCounts, Writes};
use remora_volume::shape::BLOCK_BYTES;
use remora_volume::wire::{Call, Cause, Mode, Reply, Run};

use crate::calls::{Hand, SUM_OF_ZEROS, holder};
use crate::cluster::{Cluster, Remotes, far_options, options, server_options, until};
use crate::pattern::{Checker, all_are_whole, content, write_for};

fn ways(writes: Writes) -> ClientOptions {
    ClientOptions { writes, ..options() }
}

/// Waits until large writes are pulled by all three servers.
fn are_pulled(volume: &Volume) {
    until("every server pulls", || {
        let before = volume.write_counts();
        volume.write(0, vec![0; 16 * BLOCK_BYTES]).unwrap();
        let after = volume.write_counts();
        (after.inline, after.pulled) == (before.inline, before.pulled + 3)
    });
}

/// Every copy holds the same blocks: each in its turn is the only one that is left.
fn copies_agree(mut cluster: Cluster, checker: &Checker) {
    for number in 0..3 {
        let volume = Volume::open(cluster.shape, &cluster.addresses, &options()).unwrap();
        until("all copies are whole", || volume.members().len() == 3);
        cluster.end((number + 1) % 3);
        until("a copy is gone", || volume.members().len() == 2);
        checker.check(&volume);
        cluster.start_with((number + 1) % 3, &server_options());
        until("it is taken back", || volume.members().len() == 3);
    }
}

#[test]
#[ignore = "long: make test-all"]
fn each_way_writes_the_same_blocks() {
    for (writes, server_options) in [
        (Writes::Inline, server_options()),
        (Writes::Here, server_options()),
        (Writes::Pulled, far_options()),
        (Writes::Chain, far_options()),
        (Writes::Chain, server_options()),
    ] {
        let cluster = Cluster::with(3, 2, 600, &server_options);
        let volume = Volume::open(cluster.shape, &cluster.addresses, &ways(writes)).unwrap();
        if writes != Writes::Inline {
            are_pulled(&volume);
        }
        // What are_pulled has written is no write of the checker.
        volume.write(0, vec![0; 16 * BLOCK_BYTES]).unwrap();
        let mut checker = Checker::of(21, 60);
        for round in 0..200 {
            assert!(checker.write(&volume));
            if round % 20 == 0 {
                checker.check(&volume);
            }
        }
        volume.flush().unwrap();
        checker.check(&volume);
        let counts = volume.write_counts();
        println!("{writes}: {counts:?}");
        assert_eq!(counts.pulled > 0, writes != Writes::Inline);
        drop(volume);
        copies_agree(cluster, &checker);
    }
}

/// Bytes that leave the writer for each byte that is written.
fn cost(writes: Writes) -> f64 {
    let cluster = Cluster::with(3, 2, 4096, &far_options());
    let volume = Volume::open(cluster.shape, &cluster.addresses, &ways(writes)).unwrap();
    are_pulled(&volume);
    let until_counted = || std::thread::sleep(Duration::from_millis(300));
    until_counted();
    let before = volume.write_counts();
    for round in 0..64_u64 {
        volume.write(round * 64, vec![round as u8; 64 * BLOCK_BYTES]).unwrap();
    }
    until("all copies have them", || (0..3).all(|number| cluster.applied(number) == cluster.applied(0)));
    until_counted();
    let WriteCounts { bytes, .. } = volume.write_counts();
    (bytes - before.bytes) as f64 / (64 * 64 * BLOCK_BYTES) as f64
}

#[test]
fn along_a_chain_the_bytes_leave_the_writer_once() {
    let (star, chain) = (cost(Writes::Pulled), cost(Writes::Chain));
    println!("bytes out of the writer: {star:.3} by star, {chain:.3} by chain");
    assert!((3.0..=3.1).contains(&star), "{star}");
    assert!((1.0..=1.1).contains(&chain), "{chain}");
}

#[test]
#[ignore = "long: make test-all"]
fn a_server_of_a_chain_is_killed_and_nothing_is_lost() {
    let mut servers = Remotes::far(2000);
    let mut checker = Checker::of(22, 100);
    let volume = servers.open(&ways(Writes::Chain));
    for number in [0, 1, 2] {
        write_for(&volume, &mut checker, Duration::from_millis(300));
        std::thread::scope(|scope| {
            let (volume, checker) = (&volume, &mut checker);
            let writer = scope.spawn(move || write_for(volume, checker, Duration::from_millis(1500)));
            std::thread::sleep(Duration::from_millis(300));
            servers.kill(number);
            let longest = writer.join().unwrap();
            println!("longest write while server {number} of the chain was killed: {longest:?}");
            assert!(longest < Duration::from_secs(2), "{longest:?}");
        });
        checker.check(&volume);
        servers.restart(number);
        all_are_whole(&volume, &mut checker);
        checker.check(&volume);
    }
    let counts = volume.write_counts();
    println!("{counts:?}, {} writes acknowledged", checker.ledger.lock().unwrap().acknowledgements);
    assert!(counts.pulled > 0 && checker.ledger.lock().unwrap().failures.is_empty());
}

/// Its outbox is gone in the middle of pulls.
#[test]
fn a_writer_that_ends_in_the_middle_of_pulls_leaves_a_prefix() {
    let cluster = Cluster::with(3, 2, 1000, &far_options());
    let mut checker = Checker::of(23, 100);
    for writes in [Writes::Pulled, Writes::Chain, Writes::Pulled, Writes::Chain] {
        let volume = Volume::open(cluster.shape, &cluster.addresses, &ways(writes)).unwrap();
        until("large writes are pulled", || {
            assert!(checker.write(&volume));
            volume.flush().unwrap();
            volume.write_counts().pulled > 3
        });
        (0..30).for_each(|_| assert!(checker.write(&volume)));
        drop(volume);
        let volume = cluster.open().unwrap();
        checker.check(&volume);
        checker.settle(&volume);
    }
}

/// A client by hand, and its outbox.
struct Hostile {
    hand: Hand,
    exporter: TcpExporter,
    memory: Arc<Memory>,
}

const OUTBOX: RegionId = RegionId { generation: 0, region: 0 };

/// Length of an outbox: 36 MiB, and a page.
const LENGTH: u64 = (36 << 20) + 4096;

impl Hostile {
    /// Whose writes the server takes.
    fn new(cluster: &Cluster, length: u64) -> Hostile {
        let hand = Hand::open(cluster.servers[0].as_ref().unwrap(), cluster.shape, Mode::Write);
        assert!(matches!(hand.ask(&Call::Promise(holder()), 0), Some(Reply::Promised(_))));
        let mark = Call::Mark { holder: holder(), may_lack_tail: false };
        assert!(matches!(hand.ask(&mark, 0), Some(Reply::Written { .. })));
        let exporter = TcpExporter::new(TcpOptions::default(), None).unwrap();
        exporter.listen("127.0.0.1:0").unwrap();
        let memory = Arc::new(Memory::create("hostile", length, Pages::Small).unwrap());
        exporter.export(OUTBOX, Arc::clone(&memory)).unwrap();
        Hostile { hand, exporter, memory }
    }

    fn offer(&self) -> Call {
        let secret = remora_wire::derive(&self.hand.connection.negotiated().unwrap().key, b"remora volume regions");
        self.exporter.grant(7, secret, Regions::All);
        Call::Offer { session: 7, keys: vec![self.exporter.key(OUTBOX).unwrap().as_bytes().to_vec()] }
    }

    fn offered(self) -> Hostile {
        let reached = self.hand.ask(&self.offer(), 0);
        assert!(matches!(reached, Some(Reply::Reached { pulls: true, .. })), "{reached:?}");
        self
    }
}

fn pull(first: u64, at: u64, sum: u32) -> Call {
    let version = holder().generation.start().next().unwrap();
    let (runs, sums) = (vec![Run { first, count: 16 }], vec![sum; 16]);
    Call::Pull { holder: holder(), version, runs, sums, at, source: String::new() }
}

#[test]
fn what_cannot_be_pulled_is_refused_and_named() {
    // A client that has ended can leave the copy whole with its mark, which comes again.
    let cluster = || Cluster::with(1, 1, 100, &far_options());
    let on = cluster();
    Hostile::new(&on, LENGTH).hand.is_refused(&pull(0, 0, SUM_OF_ZEROS), 0, Cause::Misuse);
    let mut refused = Vec::new();
    for (first, at, sum, why) in [
        (0, 36 << 20, SUM_OF_ZEROS, Cause::Misuse),
        (0, (36 << 20) - 4096, SUM_OF_ZEROS, Cause::Misuse),
        (0, u64::MAX, SUM_OF_ZEROS, Cause::Misuse),
        (90, 0, SUM_OF_ZEROS, Cause::Misuse),
        (u64::MAX, 0, SUM_OF_ZEROS, Cause::Misuse),
        (30, 4096, SUM_OF_ZEROS + 1, Cause::Damaged),
    ] {
        let on = cluster();
        let hostile = Hostile::new(&on, LENGTH).offered();
        let Some(Reply::Refused { cause, text }) = hostile.hand.ask(&pull(first, at, sum), 0) else {
            panic!("{first} {at} is not refused");
        };
        assert_eq!(cause, why, "{text}");
        assert_eq!(hostile.hand.hear(), None, "what is refused ends the connection");
        assert_eq!(on.applied(0), holder().generation.start(), "nothing was applied");
        refused.push(text);
    }
    assert!(refused[0].contains("no 65536 bytes at 37748736"), "{}", refused[0]);
    assert!(refused[5].starts_with("block 30 of write "), "{}", refused[5]);
    // One damaged block among others.
    let on = cluster();
    let hostile = Hostile::new(&on, LENGTH).offered();
    hostile.memory.write(5 * 4096 + 100, &[1]).unwrap();
    let Some(Reply::Refused { text, .. }) = hostile.hand.ask(&pull(10, 0, SUM_OF_ZEROS), 0) else { panic!() };
    assert!(text.starts_with("block 15 of write "), "{text}");
}

#[test]
fn an_outbox_that_is_none_is_not_pulled_from() {
    let cluster = Cluster::with(1, 1, 100, &far_options());
    // Too short; and without a transport.
    let hostile = Hostile::new(&cluster, LENGTH - 4096);
    let not_reached = Some(Reply::Reached { pulls: false, lends: false });
    assert_eq!(hostile.hand.ask(&hostile.offer(), 0), not_reached);
    hostile.hand.is_refused(&pull(0, 0, SUM_OF_ZEROS), 0, Cause::Misuse);
    let cluster = Cluster::with(1, 1, 100, &far_options());
    let hostile = Hostile::new(&cluster, LENGTH);
    assert_eq!(hostile.hand.ask(&Call::Offer { session: 7, keys: vec![vec![1, 2, 3]] }, 0), not_reached);
    // Offered twice.
    hostile.hand.is_refused(&hostile.offer(), 0, Cause::Misuse);
    // None of it keeps the server from others.
    let on = Cluster::with(1, 1, 100, &far_options());
    let hostile = Hostile::new(&on, LENGTH).offered();
    assert!(matches!(hostile.hand.ask(&pull(0, 0, SUM_OF_ZEROS), 0), Some(Reply::Written { .. })));
    let follower = Hand::open(on.servers[0].as_ref().unwrap(), on.shape, Mode::Borrow);
    assert!(matches!(follower.ask(&Call::Follow(holder()), 0), Some(Reply::Attached { .. })));
    drop(hostile);
    until("the writer has gone", || {
        let follower = Hand::open(on.servers[0].as_ref().unwrap(), on.shape, Mode::Borrow);
        matches!(follower.ask(&Call::Follow(holder()), 0), Some(Reply::Refused { cause: Cause::OutOfStep, .. }))
    });
}

/// A server that fails in the middle: its outbox ends while a pull is under way.
#[test]
fn an_outbox_that_ends_in_the_middle_is_named() {
    let cluster = Cluster::with(1, 1, 100, &far_options());
    let Hostile { hand, exporter, memory } = Hostile::new(&cluster, LENGTH).offered();
    memory.write(0, &content(0, 1)).unwrap();
    drop(exporter);
    let Some(Reply::Refused { text, .. }) = hand.ask(&pull(0, 0, SUM_OF_ZEROS), 0) else { panic!() };
    assert!(text.contains("the outbox cannot be read"), "{text}");
    assert_eq!(cluster.applied(0), holder().generation.start());
}
