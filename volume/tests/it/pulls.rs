//! Large writes that servers pull: out of the writer's outbox, and along a chain.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use bytes::Bytes;
use remora_fabric::tcp::{TcpExporter, TcpOptions};
use remora_fabric::{Exporter, Memory, Pages, RegionId, Regions};
use remora_lab::net::Link;
use remora_messenger::Address;
use remora_volume::client::{ClientOptions, Error, Request, Volume, WindowSize, WriteCounts, Writes, new_id};
use remora_volume::server::{Server, ServerOptions};
use remora_volume::shape::{BLOCK_BYTES, Copies, Shape};
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

// How many writes are under way: over a link with late answers, and with several writers at a server.

const MIB: u64 = 1 << 20;

/// A volume, and the writes of it that were completed.
struct Load {
    volume: Volume,
    completed: Arc<AtomicU64>,
}

impl Load {
    /// Writes of a block that are completed in a second, with always more of them submitted than any window takes.
    fn rate(&self, span: Duration) -> f64 {
        let (began, before) = (Instant::now(), self.completed.load(Ordering::Relaxed));
        let data = Bytes::from(vec![5; BLOCK_BYTES]);
        let mut first = 0;
        while began.elapsed() < span {
            first = (first + 1) % self.volume.shape().blocks();
            let completed = Arc::clone(&self.completed);
            let done =
                move |result: Result<Bytes, Error>| _ = completed.fetch_add(result.is_ok().into(), Ordering::Relaxed);
            self.volume.submit(Request::write(first, data.clone()), done).unwrap();
        }
        (self.completed.load(Ordering::Relaxed) - before) as f64 / began.elapsed().as_secs_f64()
    }
}

/// 60 MB/s and 5 ms: some 75 writes of a block fill it.
#[test]
#[ignore = "long: make test-all"]
fn over_a_link_with_late_answers_a_window_grows_until_it_is_not_the_limit() {
    let cluster = Cluster::new(1, 1, 1000);
    let Address::Tcp(server) = cluster.addresses[0] else { unreachable!("its servers listen on TCP") };
    let link = Link::new(server, Duration::from_millis(5), 60e6).unwrap();
    let sizes = ["fixed:32", "fixed:1024", "adaptive"];
    let loads = sizes.map(|size| {
        let options = ClientOptions { window: size.parse().unwrap(), ..options() };
        // The next one would replace it, so each has a volume of its own.
        let shape = Shape::new(new_id().unwrap(), 1000, Copies::new(1, 1).unwrap()).unwrap();
        Volume::create(shape, &[cluster.addresses[0].clone()], &options).unwrap();
        let volume = Volume::open(shape, &[Address::Tcp(link.address())], &options).unwrap();
        Load { volume, completed: Arc::default() }
    });
    loads.iter().for_each(|load| _ = load.rate(Duration::from_millis(400))); // the window grows
    // The machine may be busy with something else: what holds in one of some rounds holds.
    let mut found = Vec::new();
    for _ in 0..6 {
        let [few, many, adaptive] = [0, 1, 2].map(|number| loads[number].rate(Duration::from_millis(400)));
        println!("fixed:32 {few:.0}/s, fixed:1024 {many:.0}/s, adaptive {adaptive:.0}/s");
        assert!(few <= 0.7 * many, "fixed:32 {few:.0}/s, fixed:1024 {many:.0}/s");
        found.push(adaptive / many);
        if adaptive >= 0.95 * many {
            break;
        }
    }
    assert!(found.iter().any(|ratio| *ratio >= 0.95), "adaptive beside fixed:1024: {found:?}");
    let (now, most) = cluster.servers[0].as_ref().unwrap().staging();
    assert!(now <= most && most <= 256 * MIB, "{now} and {most} bytes");
}

#[test]
#[ignore = "long: make test-all"]
fn writers_share_what_a_server_has_and_never_have_more() {
    let staging = 40 * MIB;
    let server = Server::start(&"tcp:127.0.0.1:0".parse().unwrap(), &ServerOptions { staging, ..server_options() });
    let server = server.unwrap();
    // A busy machine is not what this is about.
    let copy_limit = Duration::from_secs(20);
    let options = ClientOptions { window: WindowSize::Fixed(1024), copy_limit, ..options() };
    let open = || {
        let shape = Shape::new(new_id().unwrap(), 4096, Copies::new(1, 1).unwrap()).unwrap();
        Volume::create(shape, &[server.address().clone()], &options).unwrap();
        Volume::open(shape, &[server.address().clone()], &options)
    };
    let volumes: Vec<Volume> = (0..4).map(|_| open().unwrap()).collect();
    std::thread::scope(|scope| {
        // They begin one after the other: the first one has most of it until the others want some.
        for (number, volume) in volumes.iter().enumerate() {
            scope.spawn(move || {
                std::thread::sleep(Duration::from_millis(200) * number as u32);
                let data = Bytes::from(vec![number as u8; MIB as usize]);
                let (done, all) = mpsc::channel();
                for place in 0..100_u64 {
                    let done = done.clone();
                    let request = Request::write(place % 16 * 256, data.clone());
                    volume.submit(request, move |result| done.send(result.map(drop)).unwrap()).unwrap();
                }
                (0..100).for_each(|_| all.recv().unwrap().unwrap());
            });
        }
    });
    let (now, most) = server.staging();
    println!("{} MiB are granted, and at most {} MiB were", now / MIB, most / MIB);
    assert!(most > 20 * MIB && most <= staging, "{most}");
    // Ten writers have the least that one can do with, if the others want no more. Then one has to go before another one
    // can come.
    let mut others: Vec<Volume> = Vec::new();
    while let Ok(volume) = open() {
        others.push(volume);
        assert!(others.len() <= 6 && server.staging().1 <= staging);
    }
    println!("{} writers", volumes.len() + others.len());
    assert!(!others.is_empty());
    others.pop();
    until("there is room again", || open().is_ok());
}
