//! Writers as processes of their own: killed and stopped with writes under way. They print what was acknowledged.
//!
//! Each write has a number, which decides what it changes. Copies are prefixes of what was written, so what is found
//! must be what the volume held after one of these writes, whichever: not before the last one that was acknowledged.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::time::Duration;

use remora_lab::Random;
use remora_lab::process::Process;
use remora_messenger::Address;
use remora_volume::client::{Request, Volume};
use remora_volume::shape::{BLOCK_BYTES, Copies, Shape, VolumeId};
use remora_volume::writer::End;
use rustix::process::Signal;

use crate::cluster::{Remotes, options};
use crate::pattern::{content, number_of};

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
        command.args(["--exact", "writers::a_writer_for_the_other_tests", "--nocapture", "--test-threads=1"]);
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
