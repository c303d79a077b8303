//! Servers as processes of their own: killed, stopped and continued, while a checking writer goes on; and servers with
//! stores, alone and all at once, on a device that is full, or damaged.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver};
use std::time::{Duration, Instant};

use remora_lab::process::Process;
use remora_lab::{Random, require};
use remora_messenger::Address;
use remora_volume::client::{Error, Request, Volume, new_id};
use remora_volume::rules::{Standing, State};
use remora_volume::server::{Server, ServerOptions};
use remora_volume::shape::{BLOCK_BYTES, Copies, Shape, VolumeId};
use remora_volume::writer::End;
use rustix::process::Signal;

use crate::cluster::{
    Checker, Cluster, Remotes, all_are_whole, content, number_of, options, server_options, until, write_for,
};

#[test]
#[ignore = "long: make test-all"]
fn a_killed_server_is_hardly_noticed_and_taken_back_without_its_memory() {
    let mut servers = Remotes::new(2000);
    let mut checker = Checker::new(11);
    let volume = servers.open(&options());
    for number in [0, 1, 2] {
        write_for(&volume, &mut checker, Duration::from_millis(300));
        let longest = std::thread::scope(|scope| {
            let (volume, checker) = (&volume, &mut checker);
            let writer = scope.spawn(move || write_for(volume, checker, Duration::from_millis(600)));
            std::thread::sleep(Duration::from_millis(200));
            servers.kill(number);
            writer.join().unwrap()
        });
        println!("longest write while server {number} was killed: {longest:?}");
        assert!(longest < Duration::from_secs(1), "{longest:?}");
        checker.check(&volume);
        servers.restart(number);
        all_are_whole(&volume, &mut checker);
        checker.check(&volume);
    }
    let ledger = checker.ledger.lock().unwrap();
    println!("{} writes acknowledged", ledger.acknowledgements);
    assert!(ledger.failures.is_empty());
}

#[test]
#[ignore = "long: make test-all"]
fn a_server_that_hangs_is_left_out_in_time_and_taken_back() {
    let mut servers = Remotes::new(2000);
    let mut checker = Checker::new(12);
    let options = options();
    let volume = servers.open(&options);
    write_for(&volume, &mut checker, Duration::from_millis(300));
    assert_eq!(volume.members().len(), 3);
    servers.servers[0].process.signal(Signal::STOP).unwrap();
    // The other two hold each write, until as much is under way at the one that hangs as it has room for. From then on
    // writes wait until it is left out.
    let longest = write_for(&volume, &mut checker, options.copy_limit + Duration::from_secs(1));
    println!("longest write while a server hung: {longest:?}");
    assert!(longest < options.copy_limit + Duration::from_millis(500), "{longest:?}");
    assert_eq!(volume.members().len(), 2);
    checker.check(&volume);
    servers.servers[0].process.signal(Signal::CONT).unwrap();
    all_are_whole(&volume, &mut checker);
    checker.check(&volume);
    assert!(checker.ledger.lock().unwrap().failures.is_empty());
}

/// A read that was sent to a server that hangs is answered by another one.
#[test]
fn a_read_at_a_server_that_hangs_takes_the_time_limit_and_not_longer() {
    let mut servers = Remotes::new(100);
    let mut checker = Checker::new(13);
    let options = options();
    let volume = servers.open(&options);
    write_for(&volume, &mut checker, Duration::from_millis(100));
    for number in [0, 1, 2] {
        servers.servers[number].process.signal(Signal::STOP).unwrap();
        let began = Instant::now();
        checker.check(&volume);
        // Without the limit it would wait until the server goes on, which is later.
        assert!(began.elapsed() < options.copy_limit + BUSY, "{:?}", began.elapsed());
        servers.servers[number].process.signal(Signal::CONT).unwrap();
        all_are_whole(&volume, &mut checker);
    }
}

/// How much later than its limit a call may end on a busy machine.
const BUSY: Duration = Duration::from_secs(30);

/// The replaced writer is cut off from nothing: it still reaches every server.
#[test]
fn a_writer_that_hangs_while_it_is_replaced_acknowledges_nothing_more() {
    let servers = Remotes::new(500);
    let mut checker = Checker::new(14);
    let first = servers.open(&options());
    (0..500).for_each(|_| assert!(checker.write(&first)));
    let second = servers.open(&options());
    let acknowledged = checker.ledger.lock().unwrap().acknowledgements;
    (0..50).for_each(|_| {
        checker.write(&first);
    });
    until("the first writer has ended", || first.end().is_some());
    drop(first);
    let ledger = checker.ledger.lock().unwrap();
    // Between the promise and this count some of the first 500 may have been acknowledged, and none after.
    assert!(ledger.acknowledgements <= 500 && ledger.acknowledgements >= acknowledged);
    drop(ledger);
    checker.check(&second);
}

// Servers that end and come back, and writers that are replaced.

#[test]
#[ignore = "long: make test-all"]
fn a_server_that_ends_under_load_is_missed_by_nobody_and_taken_back_without_its_memory() {
    let mut cluster = Cluster::new(3, 2, 500);
    let volume = cluster.open().unwrap();
    let mut checker = Checker::new(1);
    for round in 0..6 {
        (0..200).for_each(|_| assert!(checker.write(&volume)));
        let number = round % 3;
        cluster.end(number);
        (0..200).for_each(|_| assert!(checker.write(&volume)));
        checker.check(&volume);
        cluster.start(number);
        (0..200).for_each(|_| assert!(checker.write(&volume)));
        until("the copy is taken back", || cluster.is_whole(number));
    }
    volume.flush().unwrap();
    assert!(checker.check(&volume) > 400);
    assert_eq!(checker.ledger.lock().unwrap().acknowledgements, 6 * 600);
    // What the copies hold is the same, and the next writer finds it.
    drop(volume);
    let volume = cluster.open().unwrap();
    assert!(checker.check(&volume) > 400);
}

#[test]
fn writes_wait_below_the_number_that_must_hold_them_and_reads_go_on() {
    let mut cluster = Cluster::new(3, 2, 100);
    let volume = cluster.open().unwrap();
    let mut checker = Checker::new(2);
    (0..50).for_each(|_| assert!(checker.write(&volume)));
    volume.flush().unwrap();
    cluster.end(0);
    cluster.end(1);
    let before = checker.ledger.lock().unwrap().acknowledgements;
    // Not before both connections are known to be over: a read asks one that is left.
    checker.check(&volume);
    assert!(checker.write(&volume));
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(checker.ledger.lock().unwrap().acknowledgements, before);
    cluster.start(0);
    // An empty server is taken in only after two others have confirmed, and one is left.
    std::thread::sleep(Duration::from_millis(500));
    assert!(!cluster.is_whole(0));
    assert_eq!(checker.ledger.lock().unwrap().acknowledgements, before);
}

/// Four times in a row, each time while the former writer has writes under way.
#[test]
fn a_second_writer_takes_over_and_the_first_one_acknowledges_nothing_more() {
    let cluster = Cluster::new(3, 2, 200);
    let mut checker = Checker::new(3);
    let mut volume = cluster.open().unwrap();
    for _ in 0..4 {
        let next = std::thread::scope(|scope| {
            let next = scope.spawn(|| {
                std::thread::sleep(Duration::from_millis(50));
                cluster.open().unwrap()
            });
            while volume.end().is_none() {
                checker.write(&volume);
            }
            next.join().unwrap()
        });
        assert!(matches!(volume.end(), Some(End::Fenced { .. })));
        assert!(matches!(volume.read(0, 1), Err(Error::Ended(End::Fenced { .. }))));
        assert!(matches!(volume.write(0, content(0, 1)), Err(Error::Ended(End::Fenced { .. }))));
        drop(volume); // completes what was under way
        let acknowledgements = checker.ledger.lock().unwrap().acknowledgements;
        assert!(checker.check(&next) > 100);
        checker.settle(&next);
        println!("{acknowledgements} writes were acknowledged, and none of them is missing");
        volume = next;
    }
    assert!(!checker.ledger.lock().unwrap().failures.is_empty(), "it was replaced while writes were under way");
}

#[test]
fn a_volume_whose_memory_is_gone_is_not_opened() {
    let mut cluster = Cluster::new(3, 2, 100);
    let volume = cluster.open().unwrap();
    volume.write(5, content(5, 1)).unwrap();
    volume.flush().unwrap();
    drop(volume);
    for number in [0, 1] {
        cluster.end(number);
        cluster.start(number);
    }
    let error = cluster.open().unwrap_err();
    assert!(matches!(error, Error::NotOpened { end: End::TooFew { found: 1, needed: 2 }, .. }), "{error}");
}

#[test]
fn a_wrong_token_opens_nothing() {
    let cluster = Cluster::new(1, 1, 10);
    let options = remora_volume::client::ClientOptions {
        security: remora_volume::Security::default(),
        copy_limit: Duration::from_secs(1),
        ..Default::default()
    };
    let opened = remora_volume::client::Volume::open(cluster.shape, &cluster.addresses, &options);
    let error = opened.unwrap_err();
    assert!(matches!(error, Error::NotOpened { end: End::TooFew { found: 0, needed: 1 }, .. }));
    assert!(error.to_string().contains("token"), "{error}");
}

// Writers as processes of their own: killed and stopped with writes under way. They print what was acknowledged.
//
// Each write has a number, which decides what it changes. Copies are prefixes of what was written, so what is found
// must be what the volume held after one of these writes, whichever: not before the last one that was acknowledged.

/// Tells a process of this test's program that it is a writer, of which volume, and which write is its first.
const WRITE: &str = "REMORA_VOLUME_TEST_WRITE";

const BLOCKS: u64 = 300;

/// The exit code of a writer that another one has replaced, as the command's.
const FENCED: i32 = 11;

/// The blocks of a write: a few neighbouring ones, at two places if there is room.
fn runs(number: u64) -> Vec<(u64, u64)> {
    let mut random = Random::new(number);
    let count = random.between(1, 6);
    let first = random.below(BLOCKS - count + 1);
    let mut runs = vec![(first, count)];
    let rest = first + count;
    if rest < BLOCKS && random.one_in(2) {
        let second = random.between(rest, BLOCKS - 1);
        runs.push((second, random.between(1, 3).min(BLOCKS - second)));
    }
    runs
}

fn blocks(number: u64) -> impl Iterator<Item = u64> {
    runs(number).into_iter().flat_map(|(first, count)| first..first + count)
}

fn request(number: u64) -> Request {
    let runs = runs(number).into_iter().map(|(first, count)| remora_volume::wire::Run { first, count: count as u32 });
    let data: Vec<u8> = blocks(number).flat_map(|block| content(block, number)).collect();
    Request::Write { runs: runs.collect(), data: data.into() }
}

/// Not a test: the writer of the tests below, which start this program again. Without their variable it does nothing.
#[test]
fn a_writer_for_the_other_tests() {
    let Ok(what) = std::env::var(WRITE) else { return };
    let mut words = what.split(' ');
    let id = VolumeId(u128::from_str_radix(words.next().unwrap(), 16).unwrap().to_be_bytes());
    let first: u64 = words.next().unwrap().parse().unwrap();
    let servers: Vec<Address> = words.map(|word| word.parse().unwrap()).collect();
    let shape = Shape::new(id, BLOCKS, Copies::new(servers.len(), 2).unwrap()).unwrap();
    let volume = Volume::open(shape, &servers, &options()).unwrap();
    for number in first.. {
        // Said as a whole line, by the thread that completes the writes in their order.
        let say = move |done: Result<_, _>| {
            if done.is_ok() {
                let _ = std::io::stdout().write_all(format!("\nacknowledged {number}\n").as_bytes());
            }
        };
        if volume.submit(request(number), say).is_err() || volume.end().is_some() {
            break;
        }
    }
    let end = volume.end();
    drop(volume);
    std::process::exit(if matches!(end, Some(End::Fenced { .. })) { FENCED } else { 1 });
}

struct Writing {
    process: Process,
    acknowledged: Receiver<u64>,
}

impl Writing {
    fn start(servers: &Remotes, first: u64) -> Writing {
        let id = u128::from_be_bytes(servers.shape.volume().0);
        let addresses: Vec<String> = servers.addresses().iter().map(ToString::to_string).collect();
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "processes::a_writer_for_the_other_tests", "--nocapture", "--test-threads=1"]);
        command.env(WRITE, format!("{id:x} {first} {}", addresses.join(" ")));
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
        let (process, pipes) = Process::start("a volume's writer", command).unwrap();
        let (said, acknowledged) = mpsc::channel();
        let lines = BufReader::new(pipes.stdout.unwrap()).lines();
        std::thread::spawn(move || {
            for line in lines.map_while(Result::ok) {
                if let Some(number) = line.strip_prefix("acknowledged ") {
                    let _ = said.send(number.parse().unwrap()); // the test may have ended
                }
            }
        }); // ends with the process
        Writing { process, acknowledged }
    }

    /// Waits for an acknowledgement.
    fn one(&self) -> u64 {
        self.acknowledged.recv_timeout(Duration::from_secs(30)).expect("an acknowledgement within 30 s")
    }

    /// The last write that was acknowledged, once the process has ended.
    fn last(&self, before: u64) -> u64 {
        self.acknowledged.iter().last().unwrap_or(before)
    }
}

/// The write after which the volume was what it is, if `first` was after it or is in it. Panics if it never was that.
fn found(volume: &Volume) -> u64 {
    let data = volume.read(0, BLOCKS as u32).unwrap();
    let numbers: Vec<u64> =
        (0..).zip(data.chunks_exact(BLOCK_BYTES)).map(|(block, bytes)| number_of(block, bytes)).collect();
    let last = numbers.iter().copied().max().unwrap();
    let mut expected = vec![0; BLOCKS as usize];
    for number in 1..=last {
        blocks(number).for_each(|block| expected[block as usize] = number);
    }
    assert!(numbers == expected, "the volume is not what it was after write {last}: {numbers:?}");
    last
}

/// In each round a writer is killed at some moment, and another one finds what it has acknowledged.
fn writers_are_killed(stores: Option<&Path>) {
    let servers = Remotes::with(BLOCKS, stores);
    let mut random = Random::new(remora_lab::random::seed("kills"));
    let (mut last, mut under_way) = (0, 0);
    for round in 0..20 {
        let mut writing = Writing::start(&servers, last + 1);
        let mut acknowledged = writing.one();
        std::thread::sleep(Duration::from_micros(random.below(100_000)));
        writing.process.kill().unwrap();
        acknowledged = writing.last(acknowledged);
        let volume = servers.open(&options());
        last = found(&volume);
        assert!(last >= acknowledged, "round {round}: {acknowledged} was acknowledged, and {last} is the last one");
        under_way += last - acknowledged;
    }
    println!("{last} writes, of which {under_way} were there and not acknowledged yet");
}

#[test]
#[ignore = "long: make test-all"]
fn what_killed_writers_have_acknowledged_is_there() {
    writers_are_killed(None);
}

#[test]
#[ignore = "long: make test-all"]
fn what_killed_writers_have_acknowledged_is_there_with_stores() {
    let folder = tempfile::tempdir().unwrap();
    writers_are_killed(Some(folder.path()));
}

/// A writer is stopped, replaced, and goes on. What it had heard of and not said yet, it may still say.
fn a_writer_is_stopped(stores: Option<&Path>) {
    let servers = Remotes::with(BLOCKS, stores);
    let mut last = 0;
    for pause in [0, 0, 3000].map(Duration::from_millis) {
        let mut writing = Writing::start(&servers, last + 1);
        let before = writing.one();
        std::thread::sleep(Duration::from_millis(20));
        writing.process.signal(Signal::STOP).unwrap();
        let volume = servers.open(&options());
        last = found(&volume);
        std::thread::sleep(pause); // also for longer than servers may take to answer
        writing.process.signal(Signal::CONT).unwrap();
        let status = writing.process.wait(Duration::from_secs(30)).unwrap().expect("the writer ends");
        assert_eq!(status.code(), Some(FENCED));
        let acknowledged = writing.last(before);
        assert!(last >= acknowledged, "{acknowledged} was acknowledged, and {last} is the last one");
        assert_eq!(found(&volume), last, "nothing of it has come since");
        last += 1;
        volume.request(request(last)).unwrap();
        assert_eq!(found(&volume), last);
    }
}

/// Its process was stopped, not its servers, which have answered meanwhile.
#[test]
#[ignore = "long: make test-all"]
fn a_writer_that_was_stopped_for_longer_than_servers_may_take_goes_on() {
    let servers = Remotes::new(BLOCKS);
    let mut writing = Writing::start(&servers, 1);
    let mut last = writing.one();
    // Several times, as it may hear of the servers before it looks at the time.
    for _ in 0..3 {
        writing.process.signal(Signal::STOP).unwrap();
        std::thread::sleep(options().copy_limit + Duration::from_millis(500));
        last = writing.acknowledged.try_iter().last().unwrap_or(last);
        writing.process.signal(Signal::CONT).unwrap();
        // More than was under way.
        while writing.one() < last + 5000 {}
    }
    writing.process.kill().unwrap();
    assert!(found(&servers.open(&options())) >= writing.last(last));
}

#[test]
#[ignore = "long: make test-all"]
fn a_writer_that_was_stopped_and_replaced_ends_and_acknowledges_nothing_more() {
    a_writer_is_stopped(None);
}

#[test]
#[ignore = "long: make test-all"]
fn a_writer_that_was_stopped_and_replaced_ends_and_acknowledges_nothing_more_with_stores() {
    let folder = tempfile::tempdir().unwrap();
    a_writer_is_stopped(Some(folder.path()));
}

fn standings(servers: &Remotes) -> Vec<Standing> {
    let standings = Volume::standings(servers.shape, &servers.addresses(), &options()).unwrap();
    standings.into_iter().map(Result::unwrap).collect()
}

#[test]
fn servers_that_are_killed_together_have_every_acknowledged_write_again() {
    let folder = tempfile::tempdir().unwrap();
    let mut servers = Remotes::with(4000, Some(folder.path()));
    let mut checker = Checker::new(21);
    for round in 0..3 {
        let volume = servers.open(&options());
        checker.settle(&volume);
        // More than a segment: checkpoints are made, and interrupted.
        write_for(&volume, &mut checker, Duration::from_millis(700));
        (0..50).for_each(|_| assert!(checker.write(&volume)));
        (0..3).for_each(|number| servers.kill(number));
        drop(volume);
        (0..3).for_each(|number| servers.restart(number));
        let found = standings(&servers);
        assert!(found.iter().all(|standing| standing.state == State::Whole && !standing.is_cut), "{round}: {found:?}");
        let volume = servers.open(&options());
        let written = checker.check(&volume);
        println!("round {round}: {written} blocks are there, applied {}", found[0].applied);
        assert!(written > 0);
    }
}

#[test]
#[ignore = "long: make test-all"]
fn a_killed_server_comes_back_with_its_copy_and_is_taken_back_under_load() {
    let folder = tempfile::tempdir().unwrap();
    let mut servers = Remotes::with(2000, Some(folder.path()));
    let mut checker = Checker::new(22);
    let volume = servers.open(&options());
    for number in [0, 1, 2] {
        write_for(&volume, &mut checker, Duration::from_millis(200));
        servers.kill(number);
        write_for(&volume, &mut checker, Duration::from_millis(200));
        servers.restart(number);
        all_are_whole(&volume, &mut checker);
        checker.check(&volume);
    }
    assert!(checker.ledger.lock().unwrap().failures.is_empty());
}

/// With one copy left nothing is acknowledged. The two that were killed have their copies again, and are taken back.
#[test]
#[ignore = "long: make test-all"]
fn writes_wait_while_two_servers_are_gone_and_go_on_when_they_are_back() {
    let folder = tempfile::tempdir().unwrap();
    let mut servers = Remotes::with(2000, Some(folder.path()));
    let mut checker = Checker::new(23);
    let volume = servers.open(&options());
    let ledger = Arc::clone(&checker.ledger);
    let acknowledgements = || ledger.lock().unwrap().acknowledgements;
    for killed in [[0, 1], [1, 2], [2, 0]] {
        std::thread::scope(|scope| {
            let (volume, writer, began) = (&volume, &mut checker, acknowledgements());
            scope.spawn(move || {
                write_for(volume, writer, Duration::from_millis(600));
                (0..500).for_each(|_| assert!(writer.write(volume)));
                write_for(volume, writer, Duration::from_millis(300));
            });
            until("something is written", || acknowledgements() > began + 20);
            killed.iter().for_each(|&number| servers.kill(number));
            until("two servers are left out", || volume.members().len() == 1);
            let before = acknowledgements();
            std::thread::sleep(Duration::from_millis(300));
            assert_eq!(acknowledgements(), before);
            killed.iter().for_each(|&number| servers.restart(number));
            until("writes go on", || acknowledgements() > before);
        });
        assert!(acknowledgements() > 500);
        all_are_whole(&volume, &mut checker);
        checker.check(&volume);
    }
    assert!(checker.ledger.lock().unwrap().failures.is_empty());
    drop(volume);
    let volume = servers.open(&options());
    checker.check(&volume);
}

/// A volume with one copy, whose server has its store in this folder.
struct Alone {
    shape: Shape,
    address: Address,
    server: Option<Server>,
    options: ServerOptions,
}

impl Alone {
    fn new(blocks: u64, store: &Path) -> Alone {
        let shape = Shape::new(new_id().unwrap(), blocks, Copies::new(1, 1).unwrap()).unwrap();
        let options = ServerOptions { store: Some(store.into()), ..server_options() };
        let anywhere = format!("tcp:{}:0", crate::cluster::own_loopback()).parse().unwrap();
        let server = Server::start(&anywhere, &options).unwrap();
        let address = server.address().clone();
        Alone { shape, address, server: Some(server), options }
    }

    fn create(&self) -> Result<(), String> {
        let servers = std::slice::from_ref(&self.address);
        Volume::create(self.shape, servers, &options()).map_err(|error| error.to_string())
    }

    fn open(&self) -> Result<Volume, String> {
        let servers = std::slice::from_ref(&self.address);
        Volume::open(self.shape, servers, &options()).map_err(|error| error.to_string())
    }

    fn standing(&self) -> Option<Standing> {
        self.server.as_ref().and_then(|server| server.standing(self.shape.volume()))
    }

    fn stop(&mut self) {
        self.server.take().unwrap().stop();
    }

    fn start(&mut self) {
        self.server = Some(Server::start(&self.address, &self.options).unwrap());
    }
}

#[test]
fn a_server_that_was_stopped_has_its_copy_its_promise_and_its_mark() {
    let folder = tempfile::tempdir().unwrap();
    let mut alone = Alone::new(100, folder.path());
    alone.create().unwrap();
    let volume = alone.open().unwrap();
    volume.write(7, content(7, 1)).unwrap();
    volume.flush().unwrap();
    let before = alone.standing().unwrap();
    assert_eq!(before.claim, before.applied);
    drop(volume);
    alone.stop();
    alone.start();
    assert_eq!(alone.standing(), Some(before));
    let volume = alone.open().unwrap();
    assert_eq!(number_of(7, &volume.read(7, 1).unwrap()), 1);
    assert!(alone.standing().unwrap().promised.unwrap().generation > before.promised.unwrap().generation);
    // No two servers share the folder.
    let refused = Server::start(&"tcp:127.0.0.1:0".parse().unwrap(), &alone.options).unwrap_err();
    assert!(refused.to_string().contains("another server has its stores there"), "{refused}");
}

/// A record of the journal that changes by itself can hold a promise: the copy is lost. With one copy, nothing can
/// repair it.
#[test]
#[ignore = "long: make test-all"]
fn a_record_that_rots_in_the_store_makes_the_copy_lost() {
    let folder = tempfile::tempdir().unwrap();
    let mut alone = Alone::new(100, folder.path());
    alone.create().unwrap();
    let volume = alone.open().unwrap();
    volume.write(7, content(7, 1)).unwrap();
    volume.flush().unwrap();
    drop(volume);
    alone.stop();
    // The block is in the journal still.
    let store = folder.path().join(alone.shape.volume().to_string());
    let mut rotten = 0;
    for entry in std::fs::read_dir(store).unwrap() {
        let path = entry.unwrap().path();
        let mut bytes = std::fs::read(&path).unwrap();
        if let Some(at) = bytes.windows(64).position(|window| window == &content(7, 1)[512..576]) {
            bytes[at] ^= 1;
            std::fs::write(&path, bytes).unwrap();
            rotten += 1;
        }
    }
    assert_eq!(rotten, 1);
    alone.start();
    assert_eq!(alone.standing().map(|standing| standing.state).unwrap_or_default(), State::Empty);
    let refused = alone.open().map(drop).unwrap_err();
    assert!(refused.contains("0 of the servers that hold the volume answered"), "{refused}");
}

/// A small file system of its own, until dropped.
pub struct Small(tempfile::TempDir);

impl Small {
    pub fn new(bytes: u64) -> Option<Small> {
        require::root()?;
        let folder = tempfile::tempdir().unwrap();
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", &format!("size={bytes},mode=0700"), "none"]).arg(folder.path());
        assert!(mount.status().unwrap().success());
        Some(Small(folder))
    }

    pub fn path(&self) -> &Path {
        self.0.path()
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(self.0.path()).status();
    }
}

#[test]
fn a_full_device_refuses_writes_by_name_and_nothing_that_was_acknowledged_is_lost() {
    // The extents and one segment fit, and not another one.
    let Some(small) = Small::new(14 << 20) else { return };
    let too_large = Alone::new(4096, small.0.path());
    let refused = too_large.create().unwrap_err();
    assert!(refused.contains("extents") && refused.contains("space"), "{refused}");
    assert_eq!(too_large.standing().map(|standing| standing.state).unwrap_or_default(), State::Empty);
    drop(too_large);

    let mut alone = Alone::new(1024, small.0.path());
    alone.create().unwrap();
    let volume = alone.open().unwrap();
    let mut acknowledged = 0;
    for number in 1..=64 {
        // 1 MiB each, so that the segment is full after some.
        let blocks: Vec<u8> = (0..256).flat_map(|block| content(block, number)).collect();
        if volume.write(0, blocks).is_err() {
            break;
        }
        acknowledged = number;
    }
    println!("{acknowledged} writes of 1 MiB were acknowledged");
    assert!((1..64).contains(&acknowledged));
    drop(volume);
    alone.stop();
    // With more space the server goes on.
    let mut remount = Command::new("mount");
    remount.args(["-o", "remount,size=64m"]).arg(small.0.path());
    assert!(remount.status().unwrap().success());
    alone.start();
    assert_eq!(alone.standing().unwrap().state, State::Whole);
    let volume = alone.open().unwrap();
    let read = volume.read(0, 256).unwrap();
    for (block, bytes) in (0..).zip(read.chunks_exact(BLOCK_BYTES)) {
        assert_eq!(number_of(block, bytes), acknowledged);
    }
    for number in acknowledged + 1..acknowledged + 30 {
        volume.write(0, (0..256).flat_map(|block| content(block, number)).collect::<Vec<u8>>()).unwrap();
    }
    // Checkpoints have removed the segments before.
    let store = small.0.path().join(alone.shape.volume().to_string());
    until("old segments are removed", || std::fs::read_dir(&store).unwrap().count() <= 5);
}
