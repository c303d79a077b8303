//! Clients that do not keep to the rules, or send anything: what a server refuses, and that it goes on.

use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use remora_lab::Random;
use remora_messenger::handshake::Versions;
use remora_messenger::{Address, Connection, Delivery, Dispatcher, Message, Messenger, Options, Policy};
use remora_volume::layout::Entry;
use remora_volume::rules::{Generation, Holder, Standing, Version};
use remora_volume::server::{Server, ServerOptions};
use remora_volume::shape::{BLOCK_BYTES, Copies, Shape};
use remora_volume::wire::{Call, Cause, Mode, Reply, Room, Run, VERSION};

use crate::cluster::{Cluster, content, keys, server_options};

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
