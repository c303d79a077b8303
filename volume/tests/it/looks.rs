//! Reads that are answered out of a copy's memory, without its server.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use remora_volume::client::{ClientOptions, Error, Reads, Volume};
use remora_volume::server::ServerOptions;
use remora_volume::writer::End;
use rustix::process::Signal;

use crate::cluster::{Cluster, Remotes, options, server_options, until};
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
