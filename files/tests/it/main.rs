//! Files in volumes on real servers: of one writer, and of hosts that only read what a writer appends, while servers
//! and writers come and go.

#![allow(clippy::unwrap_used, unreachable_pub)]

// The servers are those of the volume's own tests.
#[allow(dead_code)]
#[path = "../../../volume/tests/it/cluster.rs"]
mod cluster;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use bytes::Bytes;
use remora_files::names::{New, NewKind, ROOT, Rename};
use remora_files::{Disk, Files, FilesError, Follower};
use remora_lab::{Net, require};
use remora_volume::client::{Reads, Request, Volume};
use remora_volume::read_only::{ReadOnly, ReadOnlyCounter, ReadOnlyOptions};
use remora_volume::server::ServerOptions;
use remora_volume::wire::Run;

use self::cluster::{Cluster, Remotes, options, security, server_options, until};

/// Waits for an answer.
fn wait<T: Send + 'static>(ask: impl FnOnce(Box<dyn FnOnce(Result<T, FilesError>) + Send>)) -> Result<T, FilesError> {
    let (done, is_done) = mpsc::sync_channel(1);
    ask(Box::new(move |result| done.send(result).unwrap()));
    is_done.recv().unwrap()
}

fn open(cluster: &Cluster) -> (Arc<Volume>, Files) {
    let volume = Arc::new(cluster.open().unwrap());
    let files = Files::open(Arc::clone(&volume) as Arc<dyn Disk>).unwrap();
    (volume, files)
}

fn formatted(cluster: &Cluster) -> (Arc<Volume>, Files) {
    let volume = Arc::new(cluster.open().unwrap());
    Files::format(&*volume, &New::default(), false).unwrap();
    let files = Files::open(Arc::clone(&volume) as Arc<dyn Disk>).unwrap();
    (volume, files)
}

fn make(files: &Files, name: &str) -> u64 {
    let new = New { kind: NewKind::File, mode: 0o600, uid: 0, gid: 0, umask: 0 };
    wait(|done| files.create(ROOT, name.as_bytes(), new, false, done)).unwrap().ino
}

fn put(files: &Files, ino: u64, offset: u64, data: &[u8]) -> Result<(), FilesError> {
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

fn reading(reads: Reads) -> ReadOnlyOptions {
    ReadOnlyOptions { security: security(), reads, limit: Duration::from_secs(2), ..ReadOnlyOptions::default() }
}

/// Servers that can be read in every way.
fn cluster(blocks: u64) -> Cluster {
    Cluster::with(3, 2, blocks, &ServerOptions { lanes: Some(0), ..server_options() })
}

fn follow(cluster: &Cluster, reads: Reads) -> (Follower, ReadOnlyCounter) {
    let volume = ReadOnly::open(cluster.shape, &cluster.addresses, &reading(reads)).unwrap();
    let counter = volume.counter();
    (Follower::open(Box::new(volume)).unwrap(), counter)
}

fn numbered_line(number: u64) -> Vec<u8> {
    format!("*3 SET key {number:010}\r\n").into_bytes()
}

const LINE: usize = 23;

/// All of a file, which must be lines one after the other. Returns how many.
fn lines(follower: &Follower, ino: u64) -> u64 {
    let size = follower.getattr(ino).unwrap().size;
    let parts = (0..size).step_by(1 << 20).map(|at| follower.read(ino, at, 1 << 20).unwrap()).collect::<Vec<_>>();
    let data = parts.concat();
    assert!(data.len() as u64 >= size && data.len().is_multiple_of(LINE), "{} of {size}", data.len());
    assert!((0..).zip(data.chunks(LINE)).all(|(number, found)| found == numbered_line(number)));
    (data.len() / LINE) as u64
}

/// Ends what appends when the test does, however that is.
struct Ends<'a>(&'a AtomicBool);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

/// Appends lines until it is told to end, or the volume has ended.
fn append(files: &Files, ino: u64, first: u64, is_over: &AtomicBool, acknowledged: &AtomicU64) {
    for number in first.. {
        if is_over.load(Ordering::SeqCst) || put(files, ino, number * LINE as u64, &numbered_line(number)).is_err() {
            return;
        }
        acknowledged.store(number + 1, Ordering::SeqCst);
        thread::sleep(Duration::from_micros(300)); // the file stays small enough to be read as a whole
    }
}

#[test]
fn any_number_of_readers_costs_the_writer_no_request_and_the_servers_two_each() {
    let cluster = cluster(4 << 10);
    let (volume, files) = formatted(&cluster);
    let ino = make(&files, "aof");
    let round = |first: u64| {
        let (before, reads) = (volume.write_counts().inline, volume.read_counts());
        (first..first + 100).for_each(|number| put(&files, ino, number * LINE as u64, &numbered_line(number)).unwrap());
        assert_eq!(volume.read_counts(), reads, "an append reads nothing");
        volume.write_counts().inline - before
    };
    let alone = round(0);
    let readers: Vec<_> = [Reads::Here, Reads::Far, Reads::Far, Reads::Here, Reads::Far]
        .map(|reads| follow(&cluster, reads))
        .into_iter()
        .collect();
    until("each reader has asked every server", || readers.iter().all(|(_, counter)| counter.counts().questions == 6));
    for (reader, _) in &readers {
        until("what was acknowledged is seen", || reader.poll().is_ok() && lines(reader, ino) == 100);
    }
    let before: Vec<_> = readers.iter().map(|(_, counter)| counter.counts()).collect();
    let beside = thread::scope(|scope| {
        for (reader, _) in &readers {
            scope.spawn(|| (0..200).for_each(|_| assert!(lines(reader, ino) >= 100)));
        }
        round(100)
    });
    assert!(beside <= alone, "{beside} messages beside readers, and {alone} without");
    for ((_, counter), before) in readers.iter().zip(before) {
        let counts = counter.counts();
        assert_eq!(counts.questions, before.questions, "no server is asked for a read");
        assert!(counts.reads >= before.reads + 200);
    }
}

#[test]
#[ignore = "long: make test-all"]
fn a_reader_goes_on_when_servers_end_and_sees_what_was_acknowledged() {
    for reads in [Reads::Here, Reads::Far] {
        let mut cluster = cluster(16 << 10);
        let (volume, files) = formatted(&cluster);
        let ino = make(&files, "aof");
        let (is_over, acknowledged) = (AtomicBool::new(false), AtomicU64::new(0));
        thread::scope(|scope| {
            let _ends = Ends(&is_over);
            scope.spawn(|| append(&files, ino, 0, &is_over, &acknowledged));
            let (reader, _) = follow(&cluster, reads);
            let mut seen = 0;
            let mut see = |reader: &Follower, what: &str| {
                // What was acknowledged a second ago is seen, and never less than before.
                let (before, began) = (acknowledged.load(Ordering::SeqCst), Instant::now());
                loop {
                    reader.poll().unwrap();
                    let found = lines(reader, ino);
                    assert!(found >= seen, "{what}: {found} lines, and {seen} before");
                    seen = found;
                    if found >= before {
                        println!("{reads}, {what}: {found} lines after {:?}", began.elapsed());
                        return;
                    }
                    assert!(began.elapsed() < Duration::from_secs(5), "{what}: {found} of {before}");
                }
            };
            see(&reader, "at first");
            // One of them is the one that is read.
            for number in 0..3 {
                cluster.end(number);
                see(&reader, "a server has ended");
                let more = acknowledged.load(Ordering::SeqCst) + 200;
                until("the writer goes on", || acknowledged.load(Ordering::SeqCst) > more);
                see(&reader, "and the writer goes on");
                cluster.start_with(number, &ServerOptions { lanes: Some(0), ..server_options() });
                // Its exporter has another port: it is asked again.
                until("its copy is whole", || cluster.is_whole(number));
            }
            see(&reader, "all are back");
        });
        drop((files, volume));
    }
}

#[test]
fn a_reader_follows_from_writer_to_writer_and_reads_on_when_there_is_none() {
    for reads in [Reads::Here, Reads::Far] {
        let cluster = cluster(16 << 10);
        let (volume, files) = formatted(&cluster);
        let ino = make(&files, "aof");
        let acknowledged = AtomicU64::new(0);
        let (reader, _) = follow(&cluster, reads);
        for _ in 0..3 {
            let first = acknowledged.load(Ordering::SeqCst);
            let (volume, files) = open(&cluster);
            let is_over = AtomicBool::new(false);
            thread::scope(|scope| {
                let _ends = Ends(&is_over);
                scope.spawn(|| append(&files, ino, first, &is_over, &acknowledged));
                until("appends are seen", || reader.poll().is_ok() && lines(&reader, ino) > first + 100);
            });
            drop((files, volume)); // as a host that dies: nothing is said to the servers
            let last = acknowledged.load(Ordering::SeqCst);
            until("everything is seen", || reader.poll().is_ok() && lines(&reader, ino) == last);
        }
        drop((files, volume));
    }
}

/// What was read last is later than what the lookouts have seen of the copy. It is read on nevertheless, and threads
/// read side by side. A read that waited for the next sighting would take a quarter of a second.
#[test]
fn reads_go_on_while_the_writer_writes() {
    for reads in [Reads::Here, Reads::Far] {
        let cluster = cluster(16 << 10);
        let (volume, files) = formatted(&cluster);
        let ino = make(&files, "aof");
        let (is_over, acknowledged) = (AtomicBool::new(false), AtomicU64::new(0));
        thread::scope(|scope| {
            let _ends = Ends(&is_over);
            scope.spawn(|| append(&files, ino, 0, &is_over, &acknowledged));
            let (reader, counter) = follow(&cluster, reads);
            until("appends are seen", || reader.poll().is_ok() && lines(&reader, ino) > 100);
            let (before, began) = (counter.counts(), Instant::now());
            let last = acknowledged.load(Ordering::SeqCst) + 300;
            let read = || {
                let mut count = 0_u64;
                while acknowledged.load(Ordering::SeqCst) < last {
                    reader.poll().unwrap();
                    lines(&reader, ino);
                    count += 1;
                }
                count
            };
            let count: u64 = thread::scope(|scope| {
                let threads = [(); 3].map(|()| scope.spawn(read));
                threads.into_iter().map(|thread| thread.join().unwrap()).sum()
            });
            let (time, counts) = (began.elapsed(), counter.counts());
            println!("{reads}: {count} reads beside 300 writes in {time:?}, {counts:?} after {before:?}");
            // No lookout had to see the copy for each of them.
            assert!(count > 3 * (counts.looks - before.looks + 3), "{reads}: {count} reads in {time:?}");
        });
        drop((files, volume));
    }
}

/// The copy that the reader has chosen gets no writes any more, and its server does not know. Rates of a reader that
/// stays with it would be none.
#[test]
#[ignore = "long: make test-all"]
fn a_copy_that_the_writer_does_not_reach_is_left_within_about_a_second() {
    let Some(()) = require::namespaces() else { return };
    let net = Net::new().unwrap();
    let hosts = ["one", "two", "three"].map(|name| net.host(name).unwrap()).to_vec();
    let remotes = Remotes::on(&hosts, None, 4 << 10);
    let [writer, reader] = ["writer", "reader"].map(|name| net.host(name).unwrap());
    let volume: Arc<Volume> = Arc::new(writer.within(|| remotes.open(&options())).unwrap());
    Files::format(&*volume, &New::default(), false).unwrap();
    let files = Files::open(Arc::clone(&volume) as Arc<dyn Disk>).unwrap();
    let ino = make(&files, "aof");
    put(&files, ino, 0, &numbered_line(0)).unwrap();
    let opened = reader.within(|| ReadOnly::open(remotes.shape, &remotes.addresses(), &reading(Reads::Anywhere)));
    let follower = Follower::open(Box::new(opened.unwrap().unwrap())).unwrap();
    let mut count = 1;
    for host in &hosts {
        host.cut_from(&writer).unwrap();
        let began = Instant::now();
        while began.elapsed() < Duration::from_secs(4) {
            put(&files, ino, count * LINE as u64, &numbered_line(count)).unwrap();
            count += 1;
            let acknowledged = Instant::now();
            while follower.poll().is_err() || lines(&follower, ino) < count {
                assert!(acknowledged.elapsed() < Duration::from_secs(2), "{count} lines: not seen for two seconds");
                thread::sleep(Duration::from_millis(5));
            }
        }
        host.heal_from(&writer).unwrap();
        until("all copies are whole", || {
            put(&files, ino, (count - 1) * LINE as u64, &numbered_line(count - 1)).unwrap();
            volume.members().len() == 3
        });
    }
}
