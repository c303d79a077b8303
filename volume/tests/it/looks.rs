//! Reads that are answered out of a copy's memory, without its server.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use remora_fabric::tcp::{TcpConnector, TcpOptions};
use remora_fabric::{Connector, Memory, Pages, RegionKey, TransportKind};
use remora_messenger::{Keyring, Token};
use remora_volume::Security;
use remora_volume::client::{ClientOptions, Error, Reads, Volume};
use remora_volume::read_only::{ReadOnly, ReadOnlyError, ReadOnlyOptions};
use remora_volume::server::ServerOptions;
use remora_volume::wire::{Call, Cause, Mode, Reply};
use remora_volume::writer::End;
use remora_wire::derive;
use rustix::process::Signal;

use crate::calls::{Hand, calls_of, calls_of_server};
use crate::cluster::{Cluster, Remotes, far_options, options, security, server_options, until};
use crate::pattern::{Checker, content, number_of};

/// Longer than any test should take.
const LONG: Duration = Duration::from_secs(60);

/// In the memory of this host, and over a network.
const WAYS: [Reads; 2] = [Reads::Here, Reads::Far];

fn reading(reads: Reads) -> ClientOptions {
    ClientOptions { reads, ..options() }
}

fn cluster(number: usize, hold: usize, blocks: u64) -> Cluster {
    Cluster::with(number, hold, blocks, &ServerOptions { lanes: Some(0), ..server_options() })
}

/// Opens a volume, and waits until reads are answered this way.
fn open(cluster: &Cluster, reads: Reads) -> Volume {
    let volume = Volume::open(cluster.shape, &cluster.addresses, &reading(reads)).unwrap();
    until("a copy is read without asking", || {
        volume.read(0, 1).unwrap();
        looks(&volume) > 0
    });
    volume
}

fn looks(volume: &Volume) -> u64 {
    let counts = volume.read_counts();
    counts.here + counts.far
}

/// Pages of servers on this host that this process has mapped, in bytes.
fn mapped_of_servers() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("RssShmem:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
}

/// What a client has read in the memory of this host is not its own: it counts for it only up to a bound, however much
/// it reads.
#[test]
#[ignore = "long: make test-all"]
fn the_memory_of_servers_counts_for_a_client_up_to_a_bound() {
    const BLOCKS: u64 = 50_000;
    let remotes = Remotes::new(BLOCKS);
    let volume = Volume::open(remotes.shape, &remotes.addresses(), &reading(Reads::Here)).unwrap();
    until("a copy is read without asking", || {
        volume.read(0, 1).unwrap();
        looks(&volume) > 0
    });
    let (before, own) = (volume.read_counts().here, mapped_of_servers());
    let mut most = 0;
    for first in (0..BLOCKS - 64).step_by(64) {
        volume.read(first, 64).unwrap();
        most = most.max(mapped_of_servers() - own.min(mapped_of_servers()));
    }
    assert!(volume.read_counts().here - before > BLOCKS / 64 / 2, "most of it is read in memory of this host");
    // 64 MiB of blocks, their entries, and what one fault maps beside the page that was touched.
    assert!((1 << 20..96 << 20).contains(&most), "{most} bytes of servers' memory");
}

#[test]
#[ignore = "long: make test-all"]
fn what_was_written_is_seen_in_the_memory_of_a_copy() {
    for reads in WAYS {
        let cluster = cluster(3, 2, 300);
        let volume = open(&cluster, reads);
        let mut checker = Checker::new(21);
        for _ in 0..20 {
            (0..50).for_each(|_| assert!(checker.write(&volume)));
            checker.check(&volume); // most of these blocks have writes under way
        }
        volume.flush().unwrap();
        assert!(checker.check(&volume) > 200);
        let before = volume.read_counts();
        until("every write is applied everywhere, and nothing is asked for", || {
            let before = volume.read_counts().asked;
            checker.check(&volume);
            volume.read_counts().asked == before
        });
        let after = volume.read_counts();
        println!("{reads:?}: {before:?}, {after:?}");
        let (way, other) = if reads == Reads::Here { (after.here, after.far) } else { (after.far, after.here) };
        assert!(way > 5 && other == 0, "{reads:?}: {after:?}");
    }
}

#[test]
fn asked_means_asked_and_a_server_that_exports_nothing_is_asked() {
    let cluster = cluster(1, 1, 10);
    let none = Cluster::with(1, 1, 10, &ServerOptions { shm: false, ..server_options() });
    for (cluster, reads) in [(&cluster, Reads::Asked), (&none, Reads::Here), (&none, Reads::Anywhere)] {
        let volume = Volume::open(cluster.shape, &cluster.addresses, &reading(reads)).unwrap();
        volume.write(3, content(3, 1)).unwrap();
        for _ in 0..50 {
            assert_eq!(number_of(3, &volume.read(3, 1).unwrap()), 1);
            std::thread::sleep(Duration::from_millis(2)); // a region would be open by then
        }
        assert_eq!(volume.read_counts().asked, 50);
        assert_eq!(looks(&volume), 0);
    }
}

/// A block is written as fast as possible while another thread reads it.
#[test]
fn a_block_that_is_being_written_is_never_torn_and_never_goes_back() {
    for reads in WAYS {
        let cluster = cluster(3, 2, 4);
        let volume = open(&cluster, reads);
        let is_over = AtomicBool::new(false);
        let (last, found) = std::thread::scope(|scope| {
            let reader = scope.spawn(|| {
                let (mut last, mut found) = (0, 0);
                while !is_over.load(Ordering::Relaxed) {
                    let number = number_of(1, &volume.read(1, 1).unwrap());
                    assert!(number >= last, "read {number} after {last}");
                    (last, found) = (number, found + 1);
                }
                (last, found)
            });
            let (began, mut number) = (Instant::now(), 0);
            // A second, or longer on a machine that is busy with something else.
            while began.elapsed() < Duration::from_secs(1) || (number <= 100 && began.elapsed() < LONG) {
                number += 1;
                volume.write(1, content(1, number)).unwrap();
                // What was acknowledged is read, by every thread.
                assert_eq!(number_of(1, &volume.read(1, 1).unwrap()), number);
            }
            is_over.store(true, Ordering::Relaxed);
            reader.join().unwrap()
        });
        println!("{reads:?}: {found} reads beside {last} writes, {:?}", volume.read_counts());
        assert!(found > 100 && last > 0);
    }
}

/// A writer that only reads learns that it was replaced, whatever it reads.
#[test]
fn a_reader_whose_writer_was_replaced_ends() {
    for reads in [Reads::Asked, Reads::Here, Reads::Far] {
        let cluster = cluster(3, 2, 100);
        let first = Volume::open(cluster.shape, &cluster.addresses, &reading(reads)).unwrap();
        first.write(7, content(7, 1)).unwrap();
        if reads != Reads::Asked {
            until("a copy is read without asking", || {
                first.read(7, 1).unwrap();
                looks(&first) > 0
            });
        }
        let second = cluster.open().unwrap();
        second.write(7, content(7, 2)).unwrap();
        // All servers obey the second one, so not one more read of the first one is answered.
        let read = first.read(7, 1);
        assert!(matches!(read, Err(Error::Ended(End::Fenced { .. }))), "{reads:?}: {read:?}");
        assert_eq!(number_of(7, &second.read(7, 1).unwrap()), 2);
    }
}

/// One that does nothing learns it as well, as it asks now and then.
#[test]
fn a_silent_writer_that_was_replaced_ends() {
    let cluster = cluster(3, 2, 10);
    let first = cluster.open().unwrap();
    let second = cluster.open().unwrap();
    until("the first writer has ended", || first.end().is_some());
    assert!(matches!(first.end(), Some(End::Fenced { .. })));
    second.flush().unwrap();
}

/// The memory of a server that hangs can still be read, and would be for ever. It is left out in time all the same.
#[test]
#[ignore = "long: make test-all"]
fn the_memory_of_a_server_that_hangs_is_not_read_for_long() {
    let mut servers = Remotes::new(200);
    let volume = servers.open(&reading(Reads::Here));
    let mut checker = Checker::new(22);
    (0..200).for_each(|_| assert!(checker.write(&volume)));
    volume.flush().unwrap();
    until("a copy is read without asking", || {
        checker.check(&volume);
        looks(&volume) > 10 && volume.members().len() == 3
    });
    for number in 0..3 {
        servers.servers[number].process.signal(Signal::STOP).unwrap();
        let began = Instant::now();
        while volume.members().len() == 3 {
            checker.check(&volume);
            assert!(began.elapsed() < Duration::from_secs(5), "only reads were made, and the server is not left out");
        }
        servers.servers[number].process.signal(Signal::CONT).unwrap();
        until("it is taken back", || volume.members().len() == 3);
        checker.check(&volume);
    }
}

/// Reads go on from a server to the next as they are killed, with what was acknowledged.
#[test]
fn reads_survive_the_death_of_the_server_whose_memory_is_read() {
    let mut servers = Remotes::new(200);
    let volume = servers.open(&reading(Reads::Here));
    let mut checker = Checker::new(23);
    for round in 0..6 {
        (0..100).for_each(|_| assert!(checker.write(&volume)));
        volume.flush().unwrap();
        checker.check(&volume);
        servers.kill(round % 3);
        (0..100).for_each(|_| assert!(checker.write(&volume)));
        checker.check(&volume);
        servers.restart(round % 3);
        until("the copy is taken back", || volume.members().len() == 3);
    }
    checker.check(&volume);
    assert!(looks(&volume) > 20, "{:?}", volume.read_counts());
}

// Hosts that only read: what their connections are for, and what is refused.

fn reader_options(reads: Reads) -> ReadOnlyOptions {
    ReadOnlyOptions { security: security(), reads, limit: Duration::from_secs(2), ..ReadOnlyOptions::default() }
}

/// Servers that can be read in every way.
fn readable(blocks: u64) -> Cluster {
    Cluster::with(3, 2, blocks, &ServerOptions { lanes: Some(0), ..server_options() })
}

#[test]
fn a_connection_for_reading_is_for_nothing_else() {
    let cluster = readable(100);
    let volume = cluster.open().unwrap();
    volume.write(3, vec![7; 4096]).unwrap();
    let server = cluster.servers[0].as_ref().unwrap();
    let before = cluster.settled();
    let holder = before.promised.unwrap();
    let shape = cluster.shape;
    for (call, blocks) in calls_of(shape, holder).into_iter().chain(calls_of_server(shape)) {
        let hand = Hand::open(server, cluster.shape, Mode::Read);
        let text = hand.is_refused(&call, blocks, Cause::Misuse);
        let says_why =
            matches!(call, Call::Open { .. } | Call::Pull { .. } | Call::Follow(_)) || text.contains("is for reading");
        assert!(says_why, "{call:?}: {text}");
        // Also after it was granted the region.
        let hand = Hand::open(server, cluster.shape, Mode::Read);
        assert!(matches!(hand.ask(&Call::Look, 0), Some(Reply::Attached { .. })));
        hand.is_refused(&call, blocks, Cause::Misuse);
    }
    for mode in [Mode::Write, Mode::Borrow] {
        Hand::open(server, cluster.shape, mode).is_refused(&Call::Look, 0, Cause::Misuse);
    }
    assert_eq!(server.standing(cluster.shape.volume()).unwrap(), before);
    volume.write(3, vec![8; 4096]).unwrap();
    assert!(volume.end().is_none());
}

/// Another server borrows blocks by it, or follows the writer's chain.
#[test]
fn a_connection_for_loans_is_for_nothing_else() {
    let cluster = readable(100);
    let volume = cluster.open().unwrap();
    volume.write(3, vec![7; 4096]).unwrap();
    let server = cluster.servers[0].as_ref().unwrap();
    let before = cluster.settled();
    let (shape, holder) = (cluster.shape, before.promised.unwrap());
    let is_for_it = |call: &Call| matches!(call, Call::Lend { .. } | Call::Follow(_));
    let calls = calls_of(shape, holder).into_iter().chain(calls_of_server(shape)).chain([(Call::Look, 0)]);
    for (call, blocks) in calls.filter(|(call, _)| !is_for_it(call)) {
        let hand = Hand::open(server, cluster.shape, Mode::Borrow);
        let text = hand.is_refused(&call, blocks, Cause::Misuse);
        let says_why = matches!(call, Call::Open { .. } | Call::Pull { .. }) || text.contains("is for loans");
        assert!(says_why, "{call:?}: {text}");
    }
    assert_eq!(server.standing(cluster.shape.volume()).unwrap(), before);
    volume.write(3, vec![8; 4096]).unwrap();
    assert!(volume.end().is_none());
}

/// Connects to the region of a server, as a reader's lane does.
fn connect(hand: &Hand, session: u64, keys: &[Vec<u8>]) -> Result<Box<dyn remora_fabric::Peer>, String> {
    let key = hand.connection.negotiated().unwrap().key;
    let secret = derive(&key, b"remora volume regions");
    let keys = keys.iter().map(|key| RegionKey::from_bytes(key.clone()).unwrap());
    let key = keys.into_iter().find(|key| key.transport() == TransportKind::Tcp).unwrap();
    let sink = Arc::new(Memory::create("test", 1 << 20, Pages::Small).unwrap());
    let connector = TcpConnector::new(TcpOptions::default(), Some("127.0.0.1:1".parse().unwrap())).unwrap();
    connector.connect(&key, session, &secret, sink).map_err(|error| error.to_string())
}

#[test]
fn a_grant_is_for_one_copy_and_ends_with_its_connection() {
    let cluster = Cluster::with(1, 1, 100, &far_options());
    let server = cluster.servers[0].as_ref().unwrap();
    let other = remora_volume::shape::Shape::new(
        remora_volume::client::new_id().unwrap(),
        100,
        remora_volume::shape::Copies::new(1, 1).unwrap(),
    )
    .unwrap();
    Volume::create(other, &cluster.addresses, &options()).unwrap();
    let look = |shape| {
        let hand = Hand::open(server, shape, Mode::Read);
        let Some(Reply::Attached { session, keys }) = hand.ask(&Call::Look, 0) else { panic!() };
        (hand, session, keys)
    };
    let (hand, session, keys) = look(cluster.shape);
    let (_hand_of_other, _, keys_of_other) = look(other);
    assert!(connect(&hand, session, &keys).is_ok());
    let refused = connect(&hand, session, &keys_of_other).err().unwrap();
    assert!(refused.contains("refused the connection"), "{refused}");
    // A later writer changes nothing; the connection's end does.
    drop(cluster.open().unwrap());
    let mut peer = connect(&hand, session, &keys).unwrap();
    hand.connection.close();
    until("the grant has ended", || connect(&hand, session, &keys).is_err());
    until("and with it what was connected", || peer.poll(&mut Vec::new()).is_err());
    // A volume that a server does not have is not read, and no connection is kept for it.
    let unknown =
        remora_volume::shape::Shape::new(remora_volume::client::new_id().unwrap(), 100, other.copies()).unwrap();
    let (_hand, _, keys) = look(unknown);
    assert!(keys.is_empty());
}

#[test]
#[ignore = "long: make test-all"]
fn what_cannot_be_read_is_said() {
    let cluster = Cluster::with(1, 1, 100, &ServerOptions { shm: false, ..server_options() });
    let open = |options: &ReadOnlyOptions| match ReadOnly::open(cluster.shape, &cluster.addresses, options) {
        Ok(_) => panic!("it was opened"),
        Err(error) => error,
    };
    let error = open(&reader_options(Reads::Anywhere));
    assert!(matches!(error, ReadOnlyError::NoCopy(_)) && error.to_string().contains("does not offer"), "{error}");
    assert!(matches!(open(&reader_options(Reads::Asked)), ReadOnlyError::NoWay));
    let token = Token::new(b"another token, 0123456789abcdefgh").unwrap();
    let stranger = Security { keys: Some(Arc::new(Keyring::only(Arc::new(token)))), ..Security::default() };
    let error = open(&ReadOnlyOptions { security: stranger, ..reader_options(Reads::Anywhere) });
    assert!(matches!(error, ReadOnlyError::NoCopy(_)), "{error}");
    assert!(error.to_string().contains("token"), "{error}");
}
