//! Volumes as they are used, without faults.
//!
//! Clients that do not keep to the rules, or send anything: what a server refuses, and that it goes on.

use std::os::unix::fs::MetadataExt;
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use remora_lab::Random;
use remora_messenger::handshake::Versions;
use remora_messenger::{Address, Connection, Delivery, Dispatcher, Message, Messenger, Options, Policy};
use remora_volume::client::{ClientOptions, Error, Request, Volume, new_id};
use remora_volume::layout::Entry;
use remora_volume::rules::{Generation, Holder, Standing, State, Version};
use remora_volume::server::{Server, ServerOptions};
use remora_volume::shape::{BLOCK_BYTES, Copies, Shape};
use remora_volume::wire::{Call, Cause, MOST_BLOCKS, MOST_ENTRIES, Mode, Reply, Room, Run, Status, VERSION};

use crate::cluster::{Checker, Cluster, Remotes, content, keys, number_of, options, server_options, until};

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

/// A connection by hand.
pub struct Hand {
    pub connection: Connection,
    replies: Receiver<Option<Reply>>,
    _messenger: Messenger,
}

struct Post(Mutex<Sender<Option<Reply>>>);

impl Post {
    fn post(&self, reply: Option<Reply>) {
        let _ = self.0.lock().unwrap().send(reply);
    }
}

impl Dispatcher for Post {
    fn message(&self, _: &Connection, delivery: Delivery) {
        self.post(Some(Reply::decode(delivery.kind, &delivery.front, delivery.data.len()).unwrap()));
    }

    fn reset(&self, _: &Connection, _: usize, _: bool) {
        self.post(None);
    }

    fn closed(&self, _: &Connection) {
        self.post(None);
    }
}

impl Hand {
    pub fn new(server: &Server) -> Hand {
        let (post, replies) = mpsc::channel();
        let options = Options { keys: keys(), versions: Versions::only(VERSION), ..Options::default() };
        let messenger = Messenger::new(Policy::lossy_client(), &options, Arc::new(Post(Mutex::new(post)))).unwrap();
        Hand { connection: messenger.connect(server.address()), replies, _messenger: messenger }
    }

    pub fn open(server: &Server, shape: Shape, mode: Mode) -> Hand {
        let hand = Hand::new(server);
        assert!(matches!(hand.ask(&Call::Open { shape, mode, writer: 5 }, 0), Some(Reply::Standing { .. })));
        hand
    }

    pub fn post(&self, call: &Call) {
        let mut front = Vec::new();
        let kind = call.encode(&mut front).unwrap();
        self.send(kind, front, Vec::new());
    }

    /// The answer to a call with this number of blocks of zeros; `None`: the connection was ended.
    pub fn ask(&self, call: &Call, blocks: usize) -> Option<Reply> {
        let mut front = Vec::new();
        let kind = call.encode(&mut front).unwrap();
        self.send(kind, front, vec![0; blocks * BLOCK_BYTES]);
        self.hear()
    }

    pub fn send(&self, kind: u16, front: Vec<u8>, data: Vec<u8>) {
        let _ = self.connection.send(Message::new(0, kind, front).with_data(data)); // it may have ended
    }

    pub fn hear(&self) -> Option<Reply> {
        loop {
            match self.replies.recv_timeout(Duration::from_secs(10)).expect("an answer, or the end, within ten seconds")
            {
                Some(Reply::Progress { .. }) => {}
                reply => return reply,
            }
        }
    }

    /// Returns what the refusal says.
    pub fn is_refused(&self, call: &Call, blocks: usize, why: Cause) -> String {
        let text = match self.ask(call, blocks) {
            Some(Reply::Refused { cause, text }) if cause == why => text,
            other => panic!("{call:?}: {other:?}"),
        };
        assert_eq!(self.hear(), None, "what is refused ends the connection");
        text
    }
}

/// CRC-32C of a block of zeros.
pub const SUM_OF_ZEROS: u32 = 0x98f9_4189;

pub fn holder() -> Holder {
    Holder { generation: Generation::from_number(9).unwrap(), writer: 5 }
}

fn write(first: u64, sum: u32) -> Call {
    let runs = vec![Run { first, count: 1 }];
    Call::Write { holder: holder(), version: holder().generation.start().next().unwrap(), runs, sums: vec![sum] }
}

#[test]
fn what_is_out_of_step_or_out_of_bounds_is_refused() {
    let cluster = Cluster::new(1, 1, 10);
    let server = cluster.servers[0].as_ref().unwrap();
    let open = || Hand::open(server, cluster.shape, Mode::Write);
    let promised = || {
        let hand = open();
        assert!(matches!(hand.ask(&Call::Promise(holder()), 0), Some(Reply::Promised(_))));
        hand
    };
    Hand::new(server).is_refused(&Call::Promise(holder()), 0, Cause::Misuse);
    open().is_refused(&Call::Open { shape: cluster.shape, mode: Mode::Write, writer: 6 }, 0, Cause::Misuse);
    open().is_refused(&Call::Mark { holder: holder(), may_lack_tail: false }, 0, Cause::OutOfStep);
    promised().is_refused(&write(0, SUM_OF_ZEROS), 1, Cause::OutOfStep); // before the mark
    let marked = promised();
    assert!(matches!(
        marked.ask(&Call::Mark { holder: holder(), may_lack_tail: false }, 0),
        Some(Reply::Written { .. })
    ));
    marked.is_refused(&write(10, SUM_OF_ZEROS), 1, Cause::Misuse);
    promised().is_refused(&write(u64::MAX, SUM_OF_ZEROS), 1, Cause::Misuse);
    let version = holder().generation.start().next().unwrap();
    for run in [Run { first: 9, count: 2 }, Run { first: u64::MAX, count: 1 }] {
        promised().is_refused(&Call::Zero { holder: holder(), version, run }, 0, Cause::Misuse);
        promised().is_refused(&Call::Map { holder: holder(), number: 1, run }, 0, Cause::Misuse);
    }
    let later = version.next().unwrap();
    let zero = Call::Zero { holder: holder(), version: later, run: Run { first: 0, count: 10 } };
    promised().is_refused(&zero, 0, Cause::OutOfStep); // a write before it is missing
    promised().is_refused(&write(3, SUM_OF_ZEROS + 1), 1, Cause::Damaged);
    promised().is_refused(
        &Call::Read { holder: holder(), number: 1, run: Run { first: 9, count: 2 } },
        0,
        Cause::Misuse,
    );
    let elsewhere = Call::CatchUp { holder: holder(), since: Version::NONE, lender: "nowhere".into() };
    // It was behind from then on, and the lender is not an address.
    promised().is_refused(&elsewhere, 0, Cause::Misuse);
    promised().is_refused(
        &Call::Read { holder: holder(), number: 1, run: Run { first: 0, count: 1 } },
        0,
        Cause::OutOfStep,
    );
    let loan = Hand::open(server, cluster.shape, Mode::Borrow);
    loan.is_refused(&Call::Promise(holder()), 0, Cause::Misuse);
    let other = Shape::new(cluster.shape.volume(), 11, cluster.shape.copies()).unwrap();
    Hand::new(server).is_refused(&Call::Open { shape: other, mode: Mode::Write, writer: 5 }, 0, Cause::Shape);
    Hand::new(server).is_refused(&Call::Create { shape: cluster.shape }, 0, Cause::Shape);
}

/// Two writers of one generation would give one version to two writes.
#[test]
fn a_generation_is_promised_once() {
    let cluster = Cluster::new(1, 1, 10);
    let server = cluster.servers[0].as_ref().unwrap();
    let first = Hand::open(server, cluster.shape, Mode::Write);
    assert!(matches!(first.ask(&Call::Promise(holder()), 0), Some(Reply::Promised(_))));
    let other = Holder { writer: 6, ..holder() };
    assert_eq!(first.ask(&Call::Promise(other), 0), Some(Reply::Fenced { by: holder().generation }));
}

#[test]
fn a_newer_connection_of_a_writer_ends_the_earlier_one() {
    let cluster = Cluster::new(1, 1, 10);
    let server = cluster.servers[0].as_ref().unwrap();
    let first = Hand::open(server, cluster.shape, Mode::Write);
    let _second = Hand::open(server, cluster.shape, Mode::Write);
    assert_eq!(first.hear(), None);
}

#[test]
fn a_server_takes_no_more_memory_than_it_was_given() {
    let options = ServerOptions { memory: 4 << 20, ..server_options() };
    let server = Server::start(&"tcp:127.0.0.1:0".parse().unwrap(), &options).unwrap();
    let shape = |number: u8, blocks| {
        let id = remora_volume::shape::VolumeId([number; 16]);
        Shape::new(id, blocks, Copies::new(1, 1).unwrap()).unwrap()
    };
    let create = |shape| Call::Create { shape };
    assert_eq!(Hand::new(&server).ask(&create(shape(1, 600)), 0), Some(Reply::Created));
    Hand::new(&server).is_refused(&create(shape(2, 600)), 0, Cause::NoMemory);
    Hand::new(&server).is_refused(&create(shape(3, 1 << 32)), 0, Cause::NoMemory);
    assert_eq!(Hand::new(&server).ask(&create(shape(4, 300)), 0), Some(Reply::Created));
}

/// A call of every kind, as a client would send it that is not the volume's writer, and its blocks.
pub fn calls_of(shape: Shape, holder: Holder) -> Vec<(Call, usize)> {
    let (version, run) = (holder.generation.start().next().unwrap(), Run { first: 3, count: 2 });
    let (runs, sums, since) = (vec![run], vec![SUM_OF_ZEROS; 2], Version::NONE);
    let room = Room { bytes: 9 << 20, writes: 99 };
    let keys = vec![vec![7; 40]; 2];
    vec![
        (Call::Open { shape, mode: Mode::Borrow, writer: 5 }, 0),
        (Call::Create { shape }, 0),
        (Call::Promise(holder), 0),
        (Call::CatchUp { holder, since, lender: "tcp:127.0.0.1:1".into() }, 0),
        (Call::Mark { holder, may_lack_tail: false }, 0),
        (Call::Write { holder, version, runs: runs.clone(), sums: sums.clone() }, 2),
        (Call::Confirm { holder, question: 3 }, 0),
        (Call::Zero { holder, version, run }, 0),
        (Call::Read { holder, number: 3, run }, 0),
        (Call::Map { holder, number: 3, run }, 0),
        (Call::Lend { holder, since, run, with_blocks: true }, 0),
        (Call::Attach(holder), 0),
        (Call::Window { wants: room, obeys: room }, 0),
        (Call::Flush(holder), 0),
        (Call::Offer { session: 1, keys }, 0),
        (Call::Pull { holder, version, runs, sums, at: 0, source: String::new() }, 0),
        (Call::Follow(holder), 0),
    ]
}

/// The calls that a server answers itself, and not one of its copies, and that open no volume.
pub fn calls_of_server(shape: Shape) -> Vec<(Call, usize)> {
    let calls = [
        Call::Status { shape },
        Call::Scrub { shape },
        Call::Remove { shape, takes_over: true },
        Call::Grow { shape, takes_over: true },
        Call::MayGrow { shape, takes_over: true },
        Call::Agree { shape },
    ];
    calls.map(|call| (call, 0)).into()
}

/// Whether these are the bytes of a call by which a client of the token may replace the writer.
fn replaces(kind: u16, front: &[u8], data: usize) -> bool {
    matches!(Call::decode(kind, front, data), Ok(Call::Promise(_) | Call::CatchUp { .. }))
}

/// Anything at all ends the connection that sent it, and nothing else: random bytes of any kind of message, calls of
/// which bytes were changed, and calls that a client may not make, before it has said which volume it means and after.
#[test]
#[ignore = "long: make test-all"]
fn garbage_harms_nobody_else() {
    let cluster = Cluster::new(1, 1, 100);
    let volume = cluster.open().unwrap();
    volume.write(3, content(3, 1)).unwrap();
    let mut random = Random::new(remora_lab::random::seed("garbage"));
    let (calls, mut answers) = (calls_of(cluster.shape, holder()), 0);
    for round in 0..600 {
        let server = cluster.servers[0].as_ref().unwrap();
        let hand = match round % 4 {
            0 => Hand::new(server),
            1 => Hand::open(server, cluster.shape, Mode::Borrow),
            2 => Hand::open(server, cluster.shape, Mode::Read),
            _ => Hand::open(server, cluster.shape, Mode::Write),
        };
        for _ in 0..random.between(1, 4) {
            let (kind, data);
            let mut front = Vec::new();
            if random.one_in(3) {
                kind = random.below(64) as u16; // of clients, of servers, and of neither
                let length = [0, 8, 12, 20, 26, 33, 40][random.below(7) as usize];
                front = random.bytes(length);
                data = random.below(3) as usize;
            } else {
                let (call, blocks) = &calls[random.below(calls.len() as u64) as usize];
                (kind, data) = (call.encode(&mut front).unwrap(), *blocks);
                for _ in 0..random.below(3) {
                    let at = random.below(front.len() as u64) as usize;
                    match random.below(4) {
                        0 => front.truncate(at.max(1)),
                        1 => front.push(at as u8),
                        _ => front[at] ^= 1 << random.below(8),
                    }
                }
            }
            if !replaces(kind, &front, data * BLOCK_BYTES) {
                hand.send(kind, front, vec![0; data * BLOCK_BYTES]);
            }
        }
        // Whatever was answered: this is no message, and so the end.
        hand.send(0, Vec::new(), Vec::new());
        while hand.hear().is_some() {
            answers += 1;
        }
    }
    println!("{answers} answers");
    assert!(answers > 0 && volume.end().is_none());
    assert!(volume.read(3, 1).unwrap() == content(3, 1));
    volume.write(4, content(4, 1)).unwrap();
}

/// A lender that answers when it is told to.
struct SlowLender {
    calls: Receiver<(Connection, Call)>,
    address: Address,
    _messenger: Messenger,
}

struct Calls(Mutex<Sender<(Connection, Call)>>);

impl Dispatcher for Calls {
    fn message(&self, connection: &Connection, delivery: Delivery) {
        let call = Call::decode(delivery.kind, &delivery.front, delivery.data.len()).unwrap();
        let _ = self.0.lock().unwrap().send((connection.clone(), call)); // the test may have ended
    }
}

impl SlowLender {
    fn start() -> SlowLender {
        let (post, calls) = mpsc::channel();
        let options = Options { keys: keys(), versions: Versions::only(VERSION), ..Options::default() };
        let calls_post = Arc::new(Calls(Mutex::new(post)));
        let messenger = Messenger::new(Policy::stateless_server(), &options, calls_post).unwrap();
        let address = messenger.listen(&"tcp:127.0.0.1:0".parse().unwrap()).unwrap();
        SlowLender { calls, address, _messenger: messenger }
    }

    /// The next call; `None` if there is none for a while.
    fn call(&self) -> Option<(Connection, Call)> {
        self.calls.recv_timeout(Duration::from_millis(500)).ok()
    }

    /// Greets the borrower, and returns its first question.
    fn question(&self) -> Connection {
        let (borrower, open) = self.call().unwrap();
        assert!(matches!(open, Call::Open { mode: Mode::Borrow, .. }));
        let room = Room { bytes: 0, writes: 0 };
        reply(&borrower, &Reply::Standing { standing: Standing::default(), room, writer_silent: None }, 0);
        let (borrower, lend) = self.call().unwrap();
        assert!(matches!(lend, Call::Lend { with_blocks: false, .. }), "{lend:?}");
        borrower
    }
}

fn reply(to: &Connection, reply: &Reply, blocks: usize) {
    let mut front = Vec::new();
    let kind = reply.encode(&mut front).unwrap();
    to.send(Message::new(0, kind, front).with_data(vec![0; blocks * BLOCK_BYTES])).unwrap();
}

fn catch_up(since: u64, lender: &SlowLender) -> Call {
    let since = Version::from_word(holder().generation.start().word() + since).unwrap();
    Call::CatchUp { holder: holder(), since, lender: lender.address.to_string() }
}

/// What a lender said before the writer began another catch-up can be older than the writes that this one is not sent.
#[test]
fn a_loan_of_an_earlier_catch_up_is_not_taken() {
    let cluster = Cluster::new(1, 1, 3);
    let hand = Hand::open(cluster.servers[0].as_ref().unwrap(), cluster.shape, Mode::Write);
    assert!(matches!(hand.ask(&Call::Promise(holder()), 0), Some(Reply::Promised(_))));
    let [first, second] = [SlowLender::start(), SlowLender::start()];
    hand.post(&catch_up(1, &first));
    let early = first.question();
    hand.post(&catch_up(5, &second));
    let late = second.question();
    let version = holder().generation.start().next().unwrap();
    let lent = Reply::Lent { applied: version, entries: vec![Entry::of(version, SUM_OF_ZEROS); 3] };
    reply(&early, &lent, 0);
    assert!(first.call().is_none(), "it has no further question to the first one");
    reply(&late, &lent, 0);
    let (_, question) = second.call().unwrap();
    assert!(matches!(question, Call::Lend { with_blocks: true, run: Run { first: 0, count: 3 }, .. }));
    reply(&late, &lent, 3);
    let whole = holder().generation.start().word() + 5;
    assert_eq!(hand.hear(), Some(Reply::Whole { applied: Version::from_word(whole).unwrap() }));
}

/// A lender whose blocks are not those of their entries is not believed.
#[test]
fn a_damaged_loan_is_not_taken() {
    let cluster = Cluster::new(1, 1, 3);
    let hand = Hand::open(cluster.servers[0].as_ref().unwrap(), cluster.shape, Mode::Write);
    assert!(matches!(hand.ask(&Call::Promise(holder()), 0), Some(Reply::Promised(_))));
    let lender = SlowLender::start();
    hand.post(&catch_up(0, &lender));
    let borrower = lender.question();
    let version = holder().generation.start().next().unwrap();
    let lent = Reply::Lent { applied: version, entries: vec![Entry::of(version, 1); 3] };
    reply(&borrower, &lent, 0);
    assert!(matches!(lender.call(), Some((_, Call::Lend { with_blocks: true, .. }))));
    reply(&borrower, &lent, 3);
    assert!(matches!(hand.hear(), Some(Reply::Refused { cause: Cause::OutOfStep, .. })));
    assert_eq!(hand.hear(), None);
}

/// A write that no later writer has opened with is gone for good, also where nothing was written before it.
#[test]
fn a_write_that_the_lender_does_not_have_is_undone() {
    let cluster = Cluster::new(1, 1, 3);
    let server = cluster.servers[0].as_ref().unwrap();
    let first = Hand::open(server, cluster.shape, Mode::Write);
    assert!(matches!(first.ask(&Call::Promise(holder()), 0), Some(Reply::Promised(_))));
    assert!(matches!(
        first.ask(&Call::Mark { holder: holder(), may_lack_tail: false }, 0),
        Some(Reply::Written { .. })
    ));
    assert!(matches!(first.ask(&write(1, SUM_OF_ZEROS), 1), Some(Reply::Written { .. })));
    let holder = Holder { generation: holder().generation.next().unwrap(), writer: 5 };
    let second = Hand::open(server, cluster.shape, Mode::Write);
    assert!(matches!(second.ask(&Call::Promise(holder), 0), Some(Reply::Promised(_))));
    let (lender, since) = (SlowLender::start(), holder.generation.start());
    second.post(&Call::CatchUp { holder, since, lender: lender.address.to_string() });
    reply(&lender.question(), &Reply::Lent { applied: since, entries: vec![Entry::NONE; 3] }, 0);
    assert_eq!(second.hear(), Some(Reply::Whole { applied: since }));
    let read = second.ask(&Call::Read { holder, number: 1, run: Run { first: 0, count: 3 } }, 0);
    assert_eq!(read, Some(Reply::Data { number: 1, entries: vec![Entry::NONE; 3] }));
}
