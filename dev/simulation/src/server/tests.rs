//! The model of the servers: alone, in pairs whose messages arrive at once and in order, and against real servers, with
//! the same scripts and the same answers.
#![allow(clippy::unwrap_used)]

use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use remora_lab::server::{Kind, Server as RealServer};
use remora_redis::ReplId;

use super::*;
use crate::oracle::Content;
use crate::wire::Ask;

#[test]
fn a_replica_gets_a_snapshot_and_then_the_stream() {
    let mut pair = Pair::new(2, 1000);
    pair.write(0, 3);
    pair.follow(1, Some(0));
    assert!(pair.is_in_step(1, 0));
    pair.write(0, 20);
    assert!(pair.is_in_step(1, 0));
    assert_eq!((pair.servers[0].offset, pair.servers[1].full_copies), (200, (0, 1)));
}

#[test]
fn a_replica_that_comes_back_goes_on_where_it_was_if_the_backlog_reaches_back() {
    let mut pair = Pair::new(2, 1000);
    pair.follow(1, Some(0));
    pair.write(0, 5);
    pair.follow(1, Some(7));
    pair.write(0, 50);
    pair.follow(1, Some(0));
    assert!(pair.is_in_step(1, 0));
    assert_eq!(pair.servers[0].full_copies.0, 1);
    pair.follow(1, Some(7));
    pair.write(0, 101);
    pair.follow(1, Some(0));
    assert!(pair.is_in_step(1, 0));
    assert_eq!(pair.servers[0].full_copies.0, 2, "the backlog was overrun");
}

#[test]
fn a_server_that_was_emptied_is_continued_unless_its_position_was_made_worthless() {
    let mut pair = Pair::new(2, 1000);
    pair.write(0, 3);
    pair.follow(1, Some(0));
    pair.write(0, 5);
    pair.follow(1, Some(7));
    pair.servers[1].content = Content::EMPTY;
    pair.follow(1, Some(0));
    assert!(pair.servers[1].is_up() && !pair.is_in_step(1, 0), "the fault of a server emptied by a module");
    pair.follow(1, Some(7));
    pair.follow(1, None);
    pair.servers[1].content = Content::EMPTY;
    pair.follow(1, Some(0));
    assert!(pair.is_in_step(1, 0));
}

#[test]
fn a_primary_that_was_shut_down_cleanly_goes_on_under_another_replid() {
    let mut pair = Pair::new(2, 1000);
    pair.follow(1, Some(0));
    pair.write(0, 5);
    let before = pair.servers[0].replid;
    pair.stop(0, true);
    pair.on(0, Server::restart);
    assert_eq!(pair.servers[0].answer(Some((before, 51))), Answer::Continue);
    assert_eq!(pair.servers[0].answer(Some((before, 50))), Answer::Full, "no backlog outlives the process");
    pair.settle();
    assert!(pair.is_in_step(1, 0));
    assert_eq!(pair.servers[1].former, Some((before, 51)));
    assert_eq!(pair.servers[1].full_copies, (0, 1));
    pair.write(0, 5);
    assert!(pair.is_in_step(1, 0));
    pair.stop(0, false);
    pair.on(0, Server::restart);
    pair.settle();
    assert!(pair.is_in_step(1, 0));
    assert_eq!(pair.servers[1].full_copies, (0, 2), "a killed primary has lost what it wrote");
}

#[test]
fn a_promoted_server_goes_on_with_the_former_history_up_to_its_promotion() {
    let mut pair = Pair::new(3, 1000);
    pair.follow(1, Some(0));
    pair.follow(2, Some(1));
    pair.write(0, 5);
    assert!(pair.is_in_step(2, 0));
    let before = pair.servers[0].replid;
    pair.follow(1, None);
    assert_eq!(pair.servers[1].former, Some((before, 51)));
    pair.write(1, 2);
    pair.write(0, 3);
    assert_eq!(pair.servers[1].answer(Some((before, 51))), Answer::Continue);
    assert_eq!(pair.servers[1].answer(Some((before, 61))), Answer::Full);
    pair.settle();
    assert!(pair.is_in_step(2, 1) && pair.servers[2].full_copies.1 == 1);
    pair.follow(0, Some(1));
    assert!(pair.is_in_step(0, 1) && pair.servers[0].full_copies.1 == 1, "its writes are in no history of the other");
}

/// A link that no server is at the other end of asks the first one.
const LINK: Conn = Conn(1_000_000);

fn asks(pair: &mut Pair, history: Option<(ReplId, u64)>, ask: Ask) {
    let psync = Message::Psync { history, login: String::new(), ask };
    pair.on(0, |server, step| server.receive(LINK, psync, step));
    pair.settle();
}

/// A primary with a replica and a full backlog of 1000 bytes, and the first offset and the end of that.
fn with_a_backlog(shares_its_buffer: bool) -> (Pair, u64, u64) {
    let mut pair = Pair::new(2, 1000);
    pair.servers[0].traits.shares_its_buffer = shares_its_buffer;
    pair.follow(1, Some(0));
    pair.write(0, 150);
    let (first, end) = pair.servers[0].backlog_range().unwrap();
    assert_eq!(end - first, 1000);
    (pair, first, end)
}

#[test]
fn a_link_that_is_not_read_keeps_a_shared_buffer_from_its_offset_on() {
    for shares in [true, false] {
        let (mut pair, _, end) = with_a_backlog(shares);
        let (replid, from) = (pair.servers[0].replid, end - 500);
        asks(&mut pair, Some((replid, from)), Ask::Unread);
        pair.write(0, 300);
        let kept = Answer::Continue;
        let expected = if shares { (from + 40, kept) } else { (end + 2000, Answer::Full) };
        let server = &pair.servers[0];
        assert_eq!((server.backlog_range().unwrap().0, server.answer(Some((replid, from + 40)))), expected);
        assert_eq!(server.kept_from(), expected.0);
        assert!(pair.is_in_step(1, 0), "the replica is sent everything");
        pair.on(0, |server, step| server.closed(LINK, step));
        assert_eq!(pair.servers[0].backlog_range().unwrap().0, end + 2000);
    }
}

#[test]
fn a_link_that_holds_back_too_much_is_closed() {
    let (mut pair, _, end) = with_a_backlog(true);
    let replid = pair.servers[0].replid;
    asks(&mut pair, Some((replid, end)), Ask::Unread);
    pair.write(0, 1004);
    assert_eq!(pair.servers[0].backlog_range().unwrap().0, end + 40, "10,000 bytes, and what the sockets took");
    pair.write(0, 1);
    assert_eq!(pair.servers[0].backlog_range().unwrap().0, end + 10_050 - 1000);
}

#[test]
fn a_backlog_is_over_full_while_a_link_was_not_sent_what_stands_behind_its_snapshot() {
    let (mut pair, _, end) = with_a_backlog(true);
    // It makes no room for the rest of the snapshot.
    asks(&mut pair, None, Ask::Stream);
    pair.write(0, 300);
    let server = &pair.servers[0];
    assert_eq!(server.backlog_range().unwrap(), (end, end + 3000));
    assert_eq!(server.kept_from(), end + 2000, "nothing promises that it stays");
    assert!(server.info().contains("repl_backlog_histlen:3000"));
    for _ in 0..6 {
        pair.on(0, |server, step| server.receive(LINK, Message::Room, step));
        pair.settle();
    }
    pair.on(0, |server, step| server.receive(LINK, Message::Ack { offset: 0 }, step));
    pair.settle();
    assert_eq!(pair.servers[0].backlog_range().unwrap(), (end + 2000, end + 3000));
}

/// Two or three servers whose messages arrive at once and in order.
pub(crate) struct Pair {
    pub(crate) servers: Vec<Server>,
    pub(super) oracle: Oracle,
    timers: VecDeque<(usize, Timer)>,
    conns: BTreeMap<Conn, (usize, usize)>,
    next: u64,
}

pub(crate) fn address(number: usize) -> Address {
    Address { host: format!("10.0.0.{number}"), port: 6379 }
}

fn traits(number: usize, backlog_bytes: usize) -> Traits {
    Traits {
        id: ServerId(number),
        address: address(number),
        valkey: false,
        module: false,
        backlog_bytes,
        shares_its_buffer: true,
        output_limit: 10_000,
        idle_limit: Duration::ZERO,
        follows: None,
        pace: Duration::from_millis(1),
        slots: 6,
        saves_to_file: number == 1,
        lacks_a_command: false,
    }
}

impl Pair {
    pub(crate) fn new(number: usize, backlog_bytes: usize) -> Pair {
        let mut oracle = Oracle::default();
        let mut timers = VecDeque::new();
        let servers = (0..number).map(|number| {
            let mut step = Step { oracle: &mut oracle, effects: Vec::new() };
            let server = Server::start(traits(number, backlog_bytes), number as u64, &mut step);
            timers.extend(step.effects.into_iter().filter_map(|effect| match effect {
                Effect::After(_, timer) => Some((number, timer)),
                _ => None,
            }));
            server
        });
        let servers = servers.collect();
        Pair { servers, oracle, timers, conns: BTreeMap::new(), next: 1 }
    }

    /// Does something with one server, and carries out what follows from it.
    pub(crate) fn on(&mut self, at: usize, what: impl FnOnce(&mut Server, &mut Step<'_>)) {
        let mut step = Step { oracle: &mut self.oracle, effects: Vec::new() };
        what(&mut self.servers[at], &mut step);
        for effect in step.effects {
            self.perform(at, effect);
        }
    }

    fn perform(&mut self, at: usize, effect: Effect) {
        let other = |(a, b): (usize, usize)| if a == at { b } else { a };
        match effect {
            Effect::Send(conn, message) => {
                if let Some(&ends) = self.conns.get(&conn) {
                    self.on(other(ends), |server, step| server.receive(conn, message, step));
                }
            }
            Effect::Close(conn) => {
                if let Some(ends) = self.conns.remove(&conn) {
                    self.on(other(ends), |server, step| server.closed(conn, step));
                }
            }
            Effect::Dial { to, attempt } => {
                let peer = self.servers.iter().position(|server| server.traits.address == to && server.alive);
                let conn = peer.map(|peer| {
                    self.next += 1;
                    self.conns.insert(Conn(self.next), (at, peer));
                    Conn(self.next)
                });
                self.on(at, |server, step| server.dialed(attempt, conn, step));
            }
            Effect::After(_, timer) => self.timers.push_back((at, timer)),
            Effect::Block(_) | Effect::NotContinued(_) | Effect::Overflowed(_) => {}
        }
    }

    /// Lets every timer come a number of times.
    pub(crate) fn settle(&mut self) {
        for _ in 0..100 {
            if let Some((at, timer)) = self.timers.pop_front() {
                self.on(at, |server, step| server.timer(timer, step));
            }
        }
    }

    pub(crate) fn write(&mut self, at: usize, number: usize) {
        for n in 0..number {
            self.on(at, |server, step| server.write(&[10, 1, n as u8, 7, 7, 7, 7, 7, 7, 7], step));
        }
    }

    pub(crate) fn follow(&mut self, at: usize, to: Option<usize>) {
        self.on(at, |server, step| server.replicaof(to.map(address), step));
        self.settle();
    }

    /// Ends the process of a server, and all its connections.
    pub(crate) fn stop(&mut self, at: usize, saves: bool) {
        self.servers[at].stop(saves);
        let ended: Vec<Conn> =
            self.conns.iter().filter(|(_, ends)| ends.0 == at || ends.1 == at).map(|(&conn, _)| conn).collect();
        for conn in ended {
            let (a, b) = self.conns.remove(&conn).unwrap();
            self.on(if a == at { b } else { a }, |server, step| server.closed(conn, step));
        }
    }

    pub(crate) fn is_in_step(&self, at: usize, with: usize) -> bool {
        let (replica, primary) = (&self.servers[at], &self.servers[with]);
        replica.is_up()
            && (replica.replid, replica.offset, replica.content) == (primary.replid, primary.offset, primary.content)
            && self.oracle.expected(replica.replid, replica.offset) == Some(replica.content)
    }
}

/// The least backlog that real servers have.
const BACKLOG: usize = 16 * 1024;

/// How long a real server may take for anything.
const PATIENCE: Duration = Duration::from_secs(30);

/// Two servers: at first 0 is a primary, and 1 has nothing to do with it.
trait Servers {
    /// Writes this number of commands of some hundred bytes.
    fn write(&mut self, at: usize, commands: usize);
    /// `REPLICAOF` the other server, and waits for the link.
    fn follow(&mut self, at: usize);
    /// `REPLICAOF` an address at which nothing listens.
    fn follow_nowhere(&mut self, at: usize);
    /// `REPLICAOF NO ONE`.
    fn promote(&mut self, at: usize);
    /// Removes all keys of a replica and leaves its position.
    fn empty(&mut self, at: usize);
    fn stop(&mut self, at: usize, saves: bool);
    /// Starts it again, and waits for the other one's link if that follows it.
    fn start(&mut self, at: usize);
    /// replid and offset
    fn position(&self, at: usize) -> (ReplId, u64);
    /// The second replid, and the first offset that is not in both histories.
    fn former(&self, at: usize) -> Option<(ReplId, u64)>;
    fn answer(&self, at: usize, history: (ReplId, u64)) -> Answer;
    fn is_empty(&self, at: usize) -> bool;
    /// How many full copies it has given since it was started.
    fn full_copies(&self, at: usize) -> u64;
}

// ---- the scripts ----

/// What a script saw, as lines.
type Seen = Vec<String>;

type Script = fn(&mut dyn Servers) -> Seen;

const SCRIPTS: [(&str, Script); 7] = [
    ("away and back", away_and_back),
    ("away, emptied and back", emptied),
    ("away, detached, emptied and back", detached_and_emptied),
    ("backlog overrun", overrun),
    ("clean restart", clean_restart),
    ("crash", crash),
    ("promotion", promotion),
];

/// Whether 1 goes on at 0, and what it holds then.
fn back(servers: &mut dyn Servers) -> Seen {
    let before = servers.full_copies(0);
    servers.follow(1);
    let copied = servers.full_copies(0) - before;
    let same = servers.position(0) == servers.position(1);
    vec![format!("{copied} full copies, same position: {same}, empty: {}", servers.is_empty(1))]
}

fn in_step(servers: &mut dyn Servers) {
    servers.write(0, 3);
    servers.follow(1);
    servers.write(0, 3);
}

fn away_and_back(servers: &mut dyn Servers) -> Seen {
    in_step(servers);
    servers.follow_nowhere(1);
    servers.write(0, 5);
    back(servers)
}

fn emptied(servers: &mut dyn Servers) -> Seen {
    in_step(servers);
    servers.follow_nowhere(1);
    servers.empty(1);
    back(servers)
}

fn detached_and_emptied(servers: &mut dyn Servers) -> Seen {
    in_step(servers);
    servers.follow_nowhere(1);
    servers.promote(1);
    servers.follow_nowhere(1);
    servers.empty(1);
    back(servers)
}

fn overrun(servers: &mut dyn Servers) -> Seen {
    in_step(servers);
    servers.follow_nowhere(1);
    servers.write(0, 600);
    back(servers)
}

fn clean_restart(servers: &mut dyn Servers) -> Seen {
    in_step(servers);
    let (old, end) = servers.position(0);
    servers.stop(0, true);
    servers.start(0);
    let (new, _) = servers.position(0);
    let mut seen = vec![
        format!("another id: {}", new != old),
        format!("the second id is the old one: {}", servers.former(0) == Some((old, end + 1))),
        format!("the replica has the new one: {}", servers.position(1).0 == new),
        format!("{} full copies", servers.full_copies(0)),
    ];
    let asked = [(old, end + 1), (old, end + 2), (old, end), (new, end + 1), (other(), end + 1)];
    seen.extend(asked.map(|history| format!("{:?}", servers.answer(0, history))));
    seen
}

fn crash(servers: &mut dyn Servers) -> Seen {
    in_step(servers);
    let (old, end) = servers.position(0);
    servers.stop(0, false);
    let mut seen = vec![format!("{:?}", servers.answer(1, (old, end + 1)))];
    servers.start(0);
    seen.push(format!("{} full copies, empty: {}", servers.full_copies(0), servers.is_empty(1)));
    seen
}

fn promotion(servers: &mut dyn Servers) -> Seen {
    in_step(servers);
    let (old, end) = servers.position(0);
    servers.promote(1);
    let (new, _) = servers.position(1);
    let mut seen = vec![
        format!("another id: {}", new != old),
        format!("the second id is the old one: {}", servers.former(1) == Some((old, end + 1))),
    ];
    let asked = [(old, end + 1), (old, end + 2), (new, end + 1), (new, end + 2), (other(), end + 1)];
    seen.extend(asked.map(|history| format!("{:?}", servers.answer(1, history))));
    servers.follow(0);
    seen.push(format!("same position: {}", servers.position(0) == servers.position(1)));
    seen.push(format!("its second id is the old one: {}", servers.former(0) == Some((old, end + 1))));
    seen
}

fn other() -> ReplId {
    "c".repeat(40).parse().unwrap()
}

// ---- the model ----

struct Model {
    pair: Pair,
    /// Full copies that were given before the last start.
    before: [u64; 2],
}

impl Servers for Model {
    fn write(&mut self, at: usize, commands: usize) {
        for number in 0..commands {
            let mut command = [number as u8; 120];
            (command[0], command[1]) = (120, 1);
            self.pair.on(at, |server, step| server.write(&command, step));
        }
    }

    fn follow(&mut self, at: usize) {
        self.pair.follow(at, Some(1 - at));
    }

    fn follow_nowhere(&mut self, at: usize) {
        self.pair.follow(at, Some(7));
    }

    fn promote(&mut self, at: usize) {
        self.pair.follow(at, None);
    }

    fn empty(&mut self, at: usize) {
        self.pair.servers[at].content = Content::EMPTY;
    }

    fn stop(&mut self, at: usize, saves: bool) {
        self.pair.stop(at, saves);
    }

    fn start(&mut self, at: usize) {
        self.before[at] = self.pair.servers[at].full_copies.0;
        self.pair.on(at, Server::restart);
        self.pair.settle();
    }

    fn position(&self, at: usize) -> (ReplId, u64) {
        (self.pair.servers[at].replid, self.pair.servers[at].offset)
    }

    fn former(&self, at: usize) -> Option<(ReplId, u64)> {
        self.pair.servers[at].former
    }

    fn answer(&self, at: usize, (replid, next): (ReplId, u64)) -> Answer {
        self.pair.servers[at].answer(Some((replid, next)))
    }

    fn is_empty(&self, at: usize) -> bool {
        self.pair.servers[at].content == Content::EMPTY
    }

    fn full_copies(&self, at: usize) -> u64 {
        self.pair.servers[at].full_copies.0 - self.before[at]
    }
}

// ---- real servers ----

struct Real {
    servers: Vec<RealServer>,
    /// The next start is one after `SHUTDOWN SAVE`.
    saves: bool,
}

impl Real {
    fn start(kind: Kind) -> Real {
        let start = |_| {
            let builder = RealServer::builder(kind).config("repl-ping-replica-period", 3600);
            let builder = builder.config("repl-diskless-sync-delay", 0).config("repl-backlog-size", BACKLOG);
            builder.config("replica-read-only", "no").start().unwrap()
        };
        Real { servers: (0..2).map(start).collect(), saves: false }
    }

    fn call(&self, at: usize, command: &[&str]) {
        self.servers[at].client().unwrap().ok(command).unwrap();
    }

    fn number(&self, at: usize, name: &str) -> u64 {
        self.servers[at].fact(name).unwrap().parse().unwrap()
    }

    /// Waits until a replica is in step.
    fn wait(&self, at: usize) {
        self.servers[at].wait_for_link(PATIENCE).unwrap();
        let began = Instant::now();
        while self.position(at) != self.position(1 - at) {
            assert!(began.elapsed() < PATIENCE, "server {at} does not catch up");
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

impl Servers for Real {
    fn write(&mut self, at: usize, commands: usize) {
        let mut client = self.servers[at].client().unwrap();
        for number in 0..commands {
            client.ok(&["SET", &format!("key {number}"), &"x".repeat(100)]).unwrap();
        }
        let other = 1 - at;
        if self.servers[other].fact("master_port").is_ok_and(|port| port == self.servers[at].port().to_string()) {
            self.wait(other);
        }
    }

    fn follow(&mut self, at: usize) {
        let port = self.servers[1 - at].port().to_string();
        self.call(at, &["REPLICAOF", "127.0.0.1", &port]);
        self.wait(at);
    }

    fn follow_nowhere(&mut self, at: usize) {
        self.call(at, &["REPLICAOF", "127.0.0.1", "1"]);
    }

    fn promote(&mut self, at: usize) {
        self.call(at, &["REPLICAOF", "NO", "ONE"]);
    }

    fn empty(&mut self, at: usize) {
        self.call(at, &["FLUSHALL"]);
    }

    fn stop(&mut self, at: usize, saves: bool) {
        self.saves = saves;
        if saves {
            return; // with the start, in one step
        }
        self.servers[at].kill().unwrap();
        let other = 1 - at;
        let began = Instant::now();
        while self.servers[other].fact("master_link_status").is_ok_and(|status| status == "up") {
            assert!(began.elapsed() < PATIENCE, "server {other} does not notice");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    fn start(&mut self, at: usize) {
        if self.saves {
            self.servers[at].restart_saved(PATIENCE).unwrap();
        } else {
            self.servers[at].restart().unwrap();
        }
        self.wait(1 - at);
    }

    fn position(&self, at: usize) -> (ReplId, u64) {
        let replid = self.servers[at].fact("master_replid").unwrap().parse().unwrap();
        (replid, self.number(at, "master_repl_offset"))
    }

    fn former(&self, at: usize) -> Option<(ReplId, u64)> {
        let end = self.servers[at].fact("second_repl_offset").unwrap().parse().ok()?;
        Some((self.servers[at].fact("master_replid2").unwrap().parse().unwrap(), end))
    }

    fn answer(&self, at: usize, (replid, next): (ReplId, u64)) -> Answer {
        let mut stream = TcpStream::connect(self.servers[at].address()).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        write!(stream, "REPLCONF capa eof capa psync2\r\nPSYNC {replid} {next}\r\n").unwrap();
        let lines = BufReader::new(stream).lines();
        for line in lines.map(Result::unwrap) {
            match line.split(' ').next().unwrap_or_default() {
                "+FULLRESYNC" => return Answer::Full,
                "+CONTINUE" => return Answer::Continue,
                "-NOMASTERLINK" | "-LOADING" => return Answer::Later,
                "" | "+OK" => {}
                other => panic!("{other}"),
            }
        }
        panic!("server {at} closed the connection");
    }

    fn is_empty(&self, at: usize) -> bool {
        self.servers[at].client().unwrap().int(&["DBSIZE"]).unwrap() == 0
    }

    fn full_copies(&self, at: usize) -> u64 {
        self.number(at, "sync_full")
    }
}

#[test]
#[ignore = "long: make test-all"]
fn the_model_answers_as_real_servers_do() {
    assert_ne!(address(7), address(0), "nothing listens at the address of a server that does not exist");
    for kind in remora_lab::require::kinds() {
        for (name, script) in SCRIPTS {
            let mut model = Model { pair: Pair::new(2, BACKLOG), before: [0; 2] };
            let expected = script(&mut Real::start(kind));
            assert_eq!(script(&mut model), expected, "{name}, {kind}");
            println!("{kind}, {name}: {expected:?}");
        }
    }
}
