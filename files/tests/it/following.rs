//! Hosts that only read: files that a writer appends to, while servers and writers come and go.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use remora_files::names::New;
use remora_files::{Disk, Files, Follower};
use remora_lab::{Net, require};
use remora_volume::client::{Reads, Volume};
use remora_volume::read_only::{ReadOnly, ReadOnlyCounter, ReadOnlyOptions};
use remora_volume::server::ServerOptions;

use crate::cluster::{Cluster, Remotes, options, security, server_options, until};
use crate::writing::{formatted, make, open, put};

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

fn line(number: u64) -> Vec<u8> {
    format!("*3 SET key {number:010}\r\n").into_bytes()
}

const LINE: usize = 23;

/// All of a file, which must be lines one after the other. Returns how many.
fn lines(follower: &Follower, ino: u64) -> u64 {
    let size = follower.getattr(ino).unwrap().size;
    let parts = (0..size).step_by(1 << 20).map(|at| follower.read(ino, at, 1 << 20).unwrap()).collect::<Vec<_>>();
    let data = parts.concat();
    assert!(data.len() as u64 >= size && data.len().is_multiple_of(LINE), "{} of {size}", data.len());
    assert!((0..).zip(data.chunks(LINE)).all(|(number, found)| found == line(number)));
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
        if is_over.load(Ordering::SeqCst) || put(files, ino, number * LINE as u64, &line(number)).is_err() {
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
        (first..first + 100).for_each(|number| put(&files, ino, number * LINE as u64, &line(number)).unwrap());
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
    put(&files, ino, 0, &line(0)).unwrap();
    let opened = reader.within(|| ReadOnly::open(remotes.shape, &remotes.addresses(), &reading(Reads::Anywhere)));
    let follower = Follower::open(Box::new(opened.unwrap().unwrap())).unwrap();
    let mut count = 1;
    for host in &hosts {
        host.cut_from(&writer).unwrap();
        let began = Instant::now();
        while began.elapsed() < Duration::from_secs(4) {
            put(&files, ino, count * LINE as u64, &line(count)).unwrap();
            count += 1;
            let acknowledged = Instant::now();
            while follower.poll().is_err() || lines(&follower, ino) < count {
                assert!(acknowledged.elapsed() < Duration::from_secs(2), "{count} lines: not seen for two seconds");
                thread::sleep(Duration::from_millis(5));
            }
        }
        host.heal_from(&writer).unwrap();
        until("all copies are whole", || {
            put(&files, ino, (count - 1) * LINE as u64, &line(count - 1)).unwrap();
            volume.members().len() == 3
        });
    }
}
