//! Volumes as they are used, without faults.

use std::os::unix::fs::MetadataExt;
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use remora_messenger::Address;
use remora_volume::client::{ClientOptions, Error, Request, Volume, new_id};
use remora_volume::rules::State;
use remora_volume::server::{Server, ServerOptions};
use remora_volume::shape::{BLOCK_BYTES, Copies, Shape};
use remora_volume::wire::{MOST_BLOCKS, MOST_ENTRIES, Run, Status};

use crate::cluster::{Checker, Cluster, Remotes, content, number_of, options, server_options, until};

#[test]
fn what_is_written_is_read_and_what_is_not_is_zeros() {
    let cluster = Cluster::new(3, 2, 3000);
    let volume = cluster.open().unwrap();
    volume.write(7, [content(7, 1), content(8, 1)].concat()).unwrap();
    let read = volume.read(6, 4).unwrap();
    let found: Vec<u64> = (6..).zip(read.chunks(BLOCK_BYTES)).map(|(block, bytes)| number_of(block, bytes)).collect();
    assert_eq!(found, [0, 1, 1, 0]);
    // As long as a request may be, at the end.
    let first = 3000 - MOST_BLOCKS as u64;
    let long: Vec<u8> = (first..3000).flat_map(|block| content(block, 2)).collect();
    volume.write(first, long.clone()).unwrap();
    assert!(volume.read(first, MOST_BLOCKS as u32).unwrap() == long);
    // Several runs at once.
    let runs = vec![Run { first: 0, count: 1 }, Run { first: 100, count: 2 }];
    let data = [content(0, 3), content(100, 3), content(101, 3)].concat().into();
    volume.request(Request::Write { runs, data }).unwrap();
    volume.flush().unwrap();
    assert!(volume.read(100, 2).unwrap() == [content(100, 3), content(101, 3)].concat());
    assert!(volume.read(0, 1).unwrap() == content(0, 3));
}

#[test]
fn requests_that_are_not_for_the_volume_are_refused_and_harm_nothing() {
    let cluster = Cluster::new(1, 1, 10);
    let volume = cluster.open().unwrap();
    let out_of_bounds = |request| matches!(volume.request(request), Err(Error::OutOfBounds { .. }));
    assert!(out_of_bounds(Request::Read(Run { first: 9, count: 2 })));
    assert!(out_of_bounds(Request::Read(Run { first: u64::MAX, count: 2 })));
    assert!(out_of_bounds(Request::write(10, vec![0; BLOCK_BYTES])));
    for request in [
        Request::Read(Run { first: 0, count: 0 }),
        Request::write(0, vec![0; 100]),
        Request::write(0, vec![]),
        Request::Write { runs: vec![Run { first: 0, count: 2 }], data: vec![0; BLOCK_BYTES].into() },
        Request::Write { runs: vec![Run { first: 0, count: 1 }; 17], data: vec![0; 17 * BLOCK_BYTES].into() },
    ] {
        assert!(matches!(volume.request(request), Err(Error::Misuse)));
    }
    volume.write(0, content(0, 1)).unwrap();
    assert!(volume.read(0, 1).unwrap() == content(0, 1));
}

/// Reads see the writes before them although the caller does not wait in between.
#[test]
fn requests_are_pipelined_and_take_place_in_order() {
    let cluster = Cluster::new(3, 2, 4);
    let volume = cluster.open().unwrap();
    let (found, all) = mpsc::channel();
    for number in 1..=2000 {
        volume.submit(Request::write(1, content(1, number)), |done| assert!(done.is_ok())).unwrap();
        let found = found.clone();
        let read = Request::Read(Run { first: 1, count: 1 });
        volume.submit(read, move |done| found.send((number, done)).unwrap()).unwrap();
    }
    for _ in 1..=2000 {
        // Two copies may answer in another order. Each answer is of the moment at which its read was submitted.
        let (number, read) = all.recv().unwrap();
        assert_eq!(number_of(1, &read.unwrap()), number);
    }
    volume.flush().unwrap();
    for number in 0..3 {
        until("every copy has applied everything", || cluster.applied(number).counter() == 2000);
    }
}

/// Reads in place and flushes of what is flushed need no answer: they are done while they are submitted. Two threads,
/// so that each also begins requests of the other one.
#[test]
fn a_caller_may_hold_a_lock_that_done_takes() {
    let cluster = Cluster::new(1, 1, 64);
    let volume = Arc::new(cluster.open().unwrap());
    until("the copy is read in place", || volume.read(0, 1).is_ok() && volume.read_counts().here > 0);
    let lock = Arc::new(Mutex::new(()));
    let (over, all_over) = mpsc::channel();
    for caller in 0..2 {
        let (volume, lock, over) = (Arc::clone(&volume), Arc::clone(&lock), over.clone());
        std::thread::spawn(move || {
            for number in 1..=500 {
                let write = Request::write(caller, content(caller, number));
                for request in [write, Request::Read(Run { first: caller, count: 1 }), Request::Flush] {
                    let (done, is_done) = mpsc::channel();
                    let (held, taken) = (lock.lock().unwrap(), Arc::clone(&lock));
                    let submitted = volume.submit(request, move |result| {
                        let _taken = taken.lock().unwrap();
                        done.send(result.map(drop)).unwrap();
                    });
                    submitted.unwrap();
                    drop(held);
                    is_done.recv().unwrap().unwrap();
                }
            }
            over.send(()).unwrap();
        });
    }
    for _ in 0..2 {
        all_over.recv_timeout(Duration::from_secs(60)).expect("a thread waits for itself");
    }
}

#[test]
fn every_copy_alone_holds_what_was_written() {
    for left in 0..3 {
        let mut cluster = Cluster::new(3, 3, 100);
        let mut checker = Checker::new(left as u64);
        let volume = cluster.open().unwrap();
        (0..300).for_each(|_| assert!(checker.write(&volume)));
        volume.flush().unwrap();
        // Levelled by the next writer: two copies are emptied and taken from the third.
        drop(volume);
        let version = cluster.applied(left);
        for number in (0..3).filter(|&number| number != left) {
            assert_eq!(cluster.applied(number), version);
        }
        let volume = cluster.open().unwrap();
        assert!(checker.check(&volume) > 50);
        cluster.end((left + 1) % 3);
        assert!(checker.check(&volume) > 50);
        cluster.end((left + 2) % 3);
        assert!(checker.check(&volume) > 50, "reads go on at one copy, whatever writes need");
    }
}

#[test]
fn a_long_request_is_several_and_completed_once() {
    let cluster = Cluster::new(3, 2, 5000);
    let volume = cluster.open().unwrap();
    let blocks = 3 * MOST_BLOCKS as u64 + 7;
    let data: Vec<u8> = (11..11 + blocks).flat_map(|block| content(block, 1)).collect();
    let (done, is_done) = mpsc::channel();
    volume.submit_write(11, data.clone(), move |result| done.send(result).unwrap()).unwrap();
    is_done.recv().unwrap().unwrap();
    assert!(is_done.recv().is_err(), "completed once");
    let (done, is_done) = mpsc::channel();
    volume.submit_read(11, blocks, move |result| done.send(result).unwrap()).unwrap();
    let parts = is_done.recv().unwrap().unwrap();
    assert_eq!(parts.len(), 4);
    assert!(parts.concat() == data);
    // All of it is checked before any of it is begun.
    let beyond = volume.submit_write(5000 - MOST_BLOCKS as u64, data, |_| unreachable!("it is not begun"));
    assert!(matches!(beyond, Err(Error::OutOfBounds { .. })));
    assert!(volume.read(4990, 10).unwrap().iter().all(|byte| *byte == 0));
    assert!(volume.submit_read(0, 0, |_| unreachable!("it is not begun")).is_err());
    // One that is under way when the volume is closed is completed too, with the reason.
    let (done, is_done) = mpsc::channel();
    volume.submit_read(0, 5000, move |result| done.send(result.is_ok()).unwrap()).unwrap();
    drop(volume);
    assert!(is_done.recv().is_ok());
}

// Zeros without bytes: written, read, mapped, kept, and taken by copies that were away.

const BLOCKS: u64 = 20_000; // 78 MiB: more than one write of zeros takes

/// Longer than any answer takes.
const LONG: Duration = Duration::from_secs(20);

/// Writes the beginning, then zeros over a part of it, a block within that, and many blocks that were never written.
fn write_some(volume: &Volume) {
    let data: Vec<u8> = (0..600).flat_map(|block| content(block, 1)).collect();
    volume.write(0, data).unwrap();
    volume.zero(100, 300).unwrap();
    volume.write(200, content(200, 2)).unwrap();
    volume.zero(1000, MOST_ENTRIES as u32).unwrap();
}

/// Which blocks [`write_some`] has left with bytes.
fn has_bytes(block: u64) -> bool {
    block == 200 || (0..100).contains(&block) || (400..600).contains(&block)
}

fn is_there(volume: &Volume) {
    let zeros = volume.map(0, 10_000).unwrap();
    for (block, is_zero) in (0..).zip(zeros) {
        assert_eq!(is_zero, !has_bytes(block), "block {block}");
    }
    let read = volume.read(0, 700).unwrap();
    for (block, bytes) in (0..).zip(read.chunks_exact(BLOCK_BYTES)) {
        let number = if block == 200 { 2 } else { u64::from(has_bytes(block)) };
        assert!(bytes == content(block, number), "block {block} is not of write {number}");
    }
}

#[test]
fn zeros_are_read_and_mapped_and_no_bytes_of_them_are_sent() {
    let cluster = Cluster::new(3, 2, BLOCKS);
    let volume = cluster.open().unwrap();
    assert!(volume.map(3, 13).unwrap() == [true; 13], "a new volume is zeros");
    write_some(&volume);
    is_there(&volume);
    // Blocks of zeros that were sent have bytes, and it is not looked whether these are zeros.
    volume.write(150, vec![0; BLOCK_BYTES]).unwrap();
    assert_eq!(volume.map(149, 3).unwrap(), [true, false, true]);
    let before = volume.write_counts();
    volume.zero(0, MOST_ENTRIES as u32).unwrap();
    until("each server was sent it", || volume.write_counts().inline >= before.inline + 3);
    let sent = volume.write_counts().bytes - before.bytes;
    assert!(sent < 1000, "{sent} bytes were sent for 64 MiB of zeros");
    assert_eq!(volume.map(0, 600).unwrap(), [true; 600]);
    assert!(volume.read(0, 600).unwrap() == vec![0; 600 * BLOCK_BYTES]);
    let too_many = MOST_ENTRIES as u32 + 1;
    assert!(matches!(volume.zero(0, too_many), Err(Error::Misuse)) && matches!(volume.map(0, 0), Err(Error::Misuse)));
    assert!(matches!(volume.zero(BLOCKS - 1, 2), Err(Error::OutOfBounds { .. })));
}

/// Zeros that are under way are under way for a reader in the memory of this host, too.
#[test]
#[ignore = "long: make test-all"]
fn a_read_behind_zeros_does_not_return_what_was_there_before() {
    let cluster = Cluster::new(3, 2, BLOCKS);
    let volume = cluster.open().unwrap();
    let run = Run { first: 5, count: 40 };
    until("a copy is read without asking", || {
        volume.read(0, 1).unwrap();
        volume.read_counts().here > 0
    });
    for round in 1..200 {
        volume.write(5, (0..40).flat_map(|block| content(block, round)).collect::<Vec<u8>>()).unwrap();
        let (done, is_done) = mpsc::channel();
        volume.submit(Request::Zero(run), move |result| done.send(result).unwrap()).unwrap();
        let zeros = vec![0; 40 * BLOCK_BYTES];
        if let Some(read) = volume.try_read(run).unwrap() {
            assert!(read == zeros, "round {round}: what was there before the zeros");
        }
        assert!(volume.read(5, 40).unwrap() == zeros, "round {round}");
        is_done.recv_timeout(LONG).unwrap().unwrap();
    }
}

/// Every server is new in turn, and takes what the others have. It says the same then.
#[test]
fn a_server_without_its_memory_takes_zeros_as_zeros() {
    let mut cluster = Cluster::new(3, 2, BLOCKS);
    let volume = cluster.open().unwrap();
    write_some(&volume);
    for number in 0..3 {
        cluster.end(number);
        until("its copy is left out", || volume.members().len() == 2);
        cluster.start(number);
        until("its copy is whole again", || volume.members().len() == 3);
        is_there(&volume);
    }
}

/// The journal's records of zeros, and what a checkpoint makes of them.
#[test]
#[ignore = "long: make test-all"]
fn zeros_are_in_the_stores_of_servers_that_are_killed_together() {
    let folder = tempfile::tempdir().unwrap();
    let mut servers = Remotes::with(BLOCKS, Some(folder.path()));
    let volume = servers.open(&options());
    write_some(&volume);
    drop(volume);
    let restart = |servers: &mut Remotes| {
        (0..3).for_each(|number| servers.kill(number));
        (0..3).for_each(|number| servers.restart(number));
    };
    restart(&mut servers);
    let volume = servers.open(&options());
    is_there(&volume);
    // More than a segment, so that a checkpoint moves the zeros to the extents.
    let oldest_segment = || {
        let store = folder.path().join("0").join(volume.shape().volume().to_string());
        let names = std::fs::read_dir(store).unwrap().map(|entry| entry.unwrap());
        let segments: Vec<_> =
            names.filter(|entry| entry.file_name().to_string_lossy().starts_with("journal-")).collect();
        let numbers =
            segments.iter().filter_map(|entry| entry.file_name().to_str()?.strip_prefix("journal-")?.parse().ok());
        (numbers.min().unwrap_or(0_u64), segments[0].metadata().unwrap().size())
    };
    let (first, bytes) = oldest_segment();
    let data: Vec<u8> = (0..1000).flat_map(|block| content(18_000 + block, 3)).collect();
    for _ in 0..=bytes / (1000 * BLOCK_BYTES as u64) {
        volume.write(18_000, data.clone()).unwrap();
    }
    until("a checkpoint is complete", || oldest_segment().0 > first);
    is_there(&volume);
    drop(volume);
    restart(&mut servers);
    is_there(&servers.open(&options()));
}

// What is asked of a volume without opening it: how its copies stand, and their removal.

fn statuses(shape: Shape, addresses: &[Address]) -> Vec<Status> {
    let statuses = Volume::statuses(shape, addresses, &options()).unwrap();
    statuses.into_iter().map(Result::unwrap).collect()
}

fn memory_used(shape: Shape, addresses: &[Address]) -> Vec<u64> {
    statuses(shape, addresses).iter().map(|status| status.memory.bytes).collect()
}

#[test]
fn a_status_says_what_is_used_and_how_long_the_writer_was_silent() {
    let folder = tempfile::tempdir().unwrap();
    let store = Some(folder.path().to_owned());
    let cluster = Cluster::with(1, 1, 1000, &ServerOptions { store, ..server_options() });
    let before = statuses(cluster.shape, &cluster.addresses)[0];
    assert!(before.has_store && before.standing.state == State::Whole && before.writer_silent.is_none());
    assert!((1000 * 4096..1100 * 4096).contains(&before.memory.bytes), "{before:?}");
    assert_eq!((before.memory.most, before.staging.bytes), (1 << 30, 0));
    let volume = cluster.open().unwrap();
    volume.write(0, vec![1; 10 * BLOCK_BYTES]).unwrap();
    volume.flush().unwrap();
    let during = statuses(cluster.shape, &cluster.addresses)[0];
    assert!(during.writer_silent.is_some_and(|silent| silent < 10_000), "{during:?}");
    assert_eq!(during.durable, during.standing.applied);
    assert!(during.staging.bytes >= 4 << 20 && during.staging.most == 256 << 20, "{during:?}");
    drop(volume);
    until("the writer has gone", || statuses(cluster.shape, &cluster.addresses)[0].writer_silent.is_none());
    // A volume that no server knows.
    let unknown = Shape::new(new_id().unwrap(), 10, Copies::new(1, 1).unwrap()).unwrap();
    assert_eq!(statuses(unknown, &cluster.addresses)[0].standing.state, State::Empty);
}

#[test]
fn a_removed_volume_leaves_neither_memory_nor_files_and_one_with_a_writer_is_removed_by_consent_only() {
    let folder = tempfile::tempdir().unwrap();
    let store = Some(folder.path().join("0"));
    let mut cluster = Cluster::new(3, 2, 500);
    cluster.end(0);
    cluster.start_with(0, &ServerOptions { store: store.clone(), ..server_options() });
    let volume = cluster.open().unwrap();
    volume.write(0, vec![1; 10 * BLOCK_BYTES]).unwrap();
    until("all have it", || volume.members().len() == 3);
    let copy = folder.path().join("0").join(cluster.shape.volume().to_string());
    assert!(copy.is_dir());
    let courteous = ClientOptions { take_over: false, ..options() };
    let refused = Volume::remove(cluster.shape, &cluster.addresses, &courteous);
    assert!(matches!(refused, Err(Error::InUse { .. })), "{refused:?}");
    volume.write(0, vec![2; BLOCK_BYTES]).unwrap();
    assert_eq!(volume.members().len(), 3);
    drop(volume);
    until("the writer has gone", || {
        statuses(cluster.shape, &cluster.addresses).iter().all(|status| status.writer_silent.is_none())
    });

    let removed = Volume::remove(cluster.shape, &cluster.addresses, &courteous).unwrap();
    assert_eq!(removed, [Ok(true), Ok(true), Ok(true)]);
    assert!(!copy.exists());
    assert_eq!(memory_used(cluster.shape, &cluster.addresses), [0; 3]);
    assert!(statuses(cluster.shape, &cluster.addresses).iter().all(|status| status.standing.state == State::Empty));
    assert!(cluster.open().is_err());
    let again = Volume::remove(cluster.shape, &cluster.addresses, &courteous).unwrap();
    assert_eq!(again, [Ok(false), Ok(false), Ok(false)]);
    // It stays away after a restart.
    cluster.end(0);
    cluster.start_with(0, &ServerOptions { store, ..server_options() });
    assert_eq!(statuses(cluster.shape, &cluster.addresses)[0].standing.state, State::Empty);
}

#[test]
fn a_volume_is_removed_from_a_writer_at_work_if_that_is_wanted() {
    let cluster = Cluster::new(3, 2, 500);
    let volume = cluster.open().unwrap();
    volume.write(0, vec![1; 10 * BLOCK_BYTES]).unwrap();
    until("all are members", || volume.members().len() == 3);
    let removed = Volume::remove(cluster.shape, &cluster.addresses, &ClientOptions { take_over: true, ..options() });
    assert_eq!(removed.unwrap(), [Ok(true), Ok(true), Ok(true)]);
    until("the writer has ended", || volume.end().is_some());
    assert_eq!(memory_used(cluster.shape, &cluster.addresses), [0; 3]);
}

#[test]
fn a_volume_that_one_server_does_not_make_is_removed_at_the_others() {
    let small = ServerOptions { memory: 1 << 20, ..server_options() };
    let anywhere = format!("tcp:{}:0", crate::cluster::own_loopback()).parse().unwrap();
    let servers: Vec<_> = [&server_options(), &server_options(), &small]
        .into_iter()
        .map(|options| Server::start(&anywhere, options).unwrap())
        .collect();
    let addresses: Vec<_> = servers.iter().map(|server| server.address().clone()).collect();
    let shape = Shape::new(new_id().unwrap(), 1000, Copies::new(3, 2).unwrap()).unwrap();
    let failed = Volume::create(shape, &addresses, &options());
    let Err(Error::NotCreated { server, left, .. }) = failed else { panic!("{failed:?}") };
    assert_eq!((server, left.0.len()), (addresses[2].to_string(), 0));
    assert_eq!(memory_used(shape, &addresses), [0; 3]);

    // One that is there already is left alone.
    let two = &addresses[..2];
    let shape = Shape::new(new_id().unwrap(), 100, Copies::new(2, 1).unwrap()).unwrap();
    Volume::create(shape, two, &options()).unwrap();
    assert!(Volume::create(shape, two, &options()).is_err());
    assert!(statuses(shape, two).iter().all(|status| status.standing.state == State::Whole));
}
