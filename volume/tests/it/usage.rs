//! Volumes as they are used, without faults.

use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use remora_volume::client::{Error, Request};
use remora_volume::shape::BLOCK_BYTES;
use remora_volume::wire::{MOST_BLOCKS, Run};

use crate::cluster::{Cluster, until};
use crate::pattern::{Checker, content, number_of};

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

/// Reads in place and flushes of what is flushed need no answer: they are done while they are submitted. Two threads, so
/// that each also begins requests of the other one.
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
