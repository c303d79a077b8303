//! The model of the servers against real ones: the same scripts, and the same answers.
#![allow(clippy::unwrap_used)]

use std::io::{BufRead, BufReader, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use remora_lab::server::{Kind, Server as RealServer};
use remora_redis::ReplId;

use super::oracle::Content;
use super::server::pair::{Pair, address};
use super::server::{Answer, Server};

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
