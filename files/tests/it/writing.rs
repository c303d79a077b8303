//! Files in volumes on real servers.

use std::sync::Arc;
use std::sync::mpsc;
use std::thread;
use std::time::Instant;

use bytes::Bytes;
use remora_files::names::{New, NewKind, ROOT, Rename};
use remora_files::{Disk, Files, FilesError};
use remora_volume::client::{Request, Volume};
use remora_volume::wire::Run;

use crate::cluster::{Cluster, until};

/// Waits for an answer.
fn wait<T: Send + 'static>(ask: impl FnOnce(Box<dyn FnOnce(Result<T, FilesError>) + Send>)) -> Result<T, FilesError> {
    let (done, is_done) = mpsc::sync_channel(1);
    ask(Box::new(move |result| done.send(result).unwrap()));
    is_done.recv().unwrap()
}

pub fn open(cluster: &Cluster) -> (Arc<Volume>, Files) {
    let volume = Arc::new(cluster.open().unwrap());
    let files = Files::open(Arc::clone(&volume) as Arc<dyn Disk>).unwrap();
    (volume, files)
}

pub fn formatted(cluster: &Cluster) -> (Arc<Volume>, Files) {
    let volume = Arc::new(cluster.open().unwrap());
    Files::format(&*volume, &New::default(), false).unwrap();
    let files = Files::open(Arc::clone(&volume) as Arc<dyn Disk>).unwrap();
    (volume, files)
}

pub fn make(files: &Files, name: &str) -> u64 {
    let new = New { kind: NewKind::File, mode: 0o600, uid: 0, gid: 0, umask: 0 };
    wait(|done| files.create(ROOT, name.as_bytes(), new, false, done)).unwrap().ino
}

pub fn put(files: &Files, ino: u64, offset: u64, data: &[u8]) -> Result<(), FilesError> {
    wait(|done| files.write(ino, offset, Bytes::copy_from_slice(data), done))
}

fn all(files: &Files, ino: u64) -> Vec<u8> {
    let size = files.getattr(ino).unwrap().size;
    let parts = (0..size).step_by(1 << 20).map(|at| wait(|done| files.read(ino, at, 1 << 20, done)).unwrap().concat());
    parts.collect::<Vec<_>>().concat()
}

/// What a server that appends to a file writes.
fn line(writer: u64, number: u64) -> Vec<u8> {
    format!("*3 SET key:{writer} {number:010}\r\n").into_bytes()
}

/// Servers come and go, and then the writer's host dies.
#[test]
#[ignore = "long: make test-all"]
fn everything_that_was_answered_is_there_for_the_next_writer() {
    let mut cluster = Cluster::new(3, 2, 16 << 10);
    let (volume, files) = formatted(&cluster);
    let inodes: Vec<u64> = (0..3).map(|writer| make(&files, &format!("aof.{writer}"))).collect();
    let counts: Vec<u64> = thread::scope(|scope| {
        let writers: Vec<_> = (0..)
            .zip(&inodes)
            .map(|(writer, ino)| {
                let (files, volume) = (&files, &volume);
                scope.spawn(move || {
                    let (mut size, mut count) = (0, 0);
                    // Until a later writer has opened the volume.
                    loop {
                        let data = line(writer, count);
                        if put(files, *ino, size, &data).is_err() {
                            assert!(volume.end().is_some());
                            return count;
                        }
                        (size, count) = (size + data.len() as u64, count + 1);
                        if count % 200 == 0 {
                            wait(|done| files.fsync(*ino, true, done)).ok();
                        }
                    }
                })
            })
            .collect();
        until("appends", || files.getattr(inodes[0]).unwrap().size > 20_000);
        cluster.end(1);
        let size = files.getattr(inodes[0]).unwrap().size;
        until("appends with two servers", || files.getattr(inodes[0]).unwrap().size > size + 20_000);
        cluster.start(1);
        until("the third one is whole", || cluster.is_whole(1));
        let next = cluster.open().unwrap();
        let counts = writers.into_iter().map(|writer| writer.join().unwrap()).collect();
        drop(next);
        counts
    });
    drop((files, volume));
    let (_volume, files) = open(&cluster);
    for ((writer, ino), count) in (0..).zip(&inodes).zip(counts) {
        let data = all(&files, *ino);
        let length = line(0, 0).len();
        assert!(
            data.len() >= count as usize * length,
            "writer {writer} has lost something: {} of {count}",
            data.len() / length
        );
        assert!((0..).zip(data.chunks(length)).all(|(number, found)| found == line(writer, number)));
    }
}

/// As a server writes a snapshot: a new file, long writes, and a rename over the old one.
#[test]
fn a_file_that_is_renamed_over_another_one_is_whole() {
    let cluster = Cluster::new(2, 1, 16 << 10);
    let (volume, files) = formatted(&cluster);
    for round in 1..4_u8 {
        let ino = make(&files, "temp-1.rdb");
        let written: Vec<_> = (0..8_u64)
            .map(|part| {
                let (done, is_done) = mpsc::sync_channel(1);
                let data = Bytes::from(vec![round; 700_001]);
                files.write(ino, part * 700_001, data, move |result| done.send(result).unwrap());
                is_done
            })
            .collect();
        written.into_iter().for_each(|is_done| is_done.recv().unwrap().unwrap());
        wait(|done| files.fsync(ino, false, done)).unwrap();
        wait(|done| files.rename((ROOT, b"temp-1.rdb"), (ROOT, b"dump.rdb"), Rename::Replace, done)).unwrap();
    }
    drop((files, volume));
    let (_volume, files) = open(&cluster);
    let ino = files.lookup(ROOT, b"dump.rdb").unwrap().ino;
    let data = all(&files, ino);
    assert!(data.len() == 8 * 700_001 && data.iter().all(|byte| *byte == 3));
    let usage = files.statfs();
    assert_eq!((usage.inodes, usage.blocks - usage.free_blocks), (2, 86 * 16));
}

mod by_command {
    use super::*;

    /// How long an append takes, beside a write of a block and of two. Run it alone, with `--ignored --nocapture`.
    #[test]
    #[ignore = "a measurement"]
    fn appends_take_this_long() {
        const EACH: u64 = 2000;
        for (number, hold) in [(1, 1), (3, 2)] {
            let cluster = Cluster::new(number, hold, 64 << 10);
            let (volume, files) = formatted(&cluster);
            let ino = make(&files, "f");
            let mut times: [Vec<f64>; 3] = Default::default();
            for round in 0..9 {
                let append = |at: u64| put(&files, ino, (round * EACH + at) * 100, &[1; 100]).unwrap();
                let block = |at: u64| volume.write(60_000 + at % 2, vec![1; 4096]).unwrap();
                let two = |at: u64| {
                    let runs = vec![Run { first: 60_000 + at % 2, count: 1 }, Run { first: 61_000, count: 1 }];
                    volume.request(Request::Write { runs, data: vec![1; 8192].into() }).map(drop).unwrap();
                };
                for (times, step) in times.iter_mut().zip([&append as &dyn Fn(u64), &block, &two]) {
                    let began = Instant::now();
                    (0..EACH).for_each(step);
                    times.push(began.elapsed().as_micros() as f64 / EACH as f64);
                }
            }
            let [append, block, two] = times.map(|mut times| {
                times.sort_by(f64::total_cmp);
                format!("{:.1} ({:.1} to {:.1})", times[4], times[0], times[8])
            });
            println!("{number} copies, µs: an append of 100 bytes {append}, a block of the volume {block}, two {two}");
        }
    }
}
