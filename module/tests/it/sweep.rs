//! Sweeps by hand: what comes over the socket is what a twin of the server had at that moment, key by key, whatever
//! clients write meanwhile; and an agent that leaves leaves nothing behind.

use std::collections::BTreeMap;
use std::io::Read;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use std::{fs, thread};

use remora_fabric::{Handover, shm::Place};
use remora_lab::server::wait_until;
use remora_lab::workload::Options;
use remora_lab::{Client, Kind, Random, Server, Workload, fill_every_type, require};
use remora_protocol::sweep::Frames;
use remora_redis::resp::Frame;

use crate::capture::age_slack;

const LONG: Duration = Duration::from_secs(120);

/// Offers a socket to the module, and returns our end when the sweep has begun.
fn begin(server: &Server) -> remora_lab::Result<UnixStream> {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let handover = Handover::bind(&Place::Abstract).unwrap();
    thread::scope(|scope| {
        scope.spawn(|| {
            let _ = handover.give(&[theirs.as_fd()], Duration::from_millis(500));
        });
        server.client()?.list(&["REMORA.SWEEP", &handover.address(), &handover.secret()])
    })?;
    Ok(ours)
}

/// The snapshot that comes over the socket.
fn snapshot(mut socket: UnixStream) -> Option<Vec<u8>> {
    let (mut frames, mut buffer, mut bytes) = (Frames::default(), vec![0; 1 << 16], Vec::new());
    loop {
        let read = socket.read(&mut buffer).unwrap();
        if read == 0 {
            return None;
        }
        if frames.take(&buffer[..read], |records| bytes.extend_from_slice(records)).unwrap().is_some() {
            return Some(bytes);
        }
    }
}

fn with_backlog(kind: Kind) -> (Server, Server) {
    with_backlog_of(Server::builder(kind).module("").unwrap())
}

fn with_backlog_of(server: remora_lab::Builder) -> (Server, Server) {
    // By default a primary waits five seconds for more replicas before it begins a copy.
    let server = server.config("repl-diskless-sync-delay", 0).start().unwrap();
    let kind = server.kind();
    let replica = Server::start(kind).unwrap();
    replica.replicate(&server).unwrap();
    replica.wait_for_link(LONG).unwrap();
    (server, replica)
}

/// Every key of every database, with the digest of its value and its expiry.
fn contents(server: &Server) -> BTreeMap<(u32, Vec<u8>), (String, i64)> {
    let mut client = server.client().unwrap();
    client.ok(&["DEBUG", "SET-ACTIVE-EXPIRE", "0"]).unwrap();
    let mut all = BTreeMap::new();
    for database in 0..16 {
        client.ok(&["SELECT", &database.to_string()]).unwrap();
        let names: Vec<_> =
            client.list(&["KEYS", "*"]).unwrap().iter().map(|name| name.as_bytes().unwrap().to_vec()).collect();
        for some in names.chunks(1000) {
            let about = |name: &Vec<u8>| {
                let words = |words: [&[u8]; 2]| {
                    [&words[..], &[name.as_slice()]].concat().iter().map(|word| word.to_vec()).collect()
                };
                [words([b"DEBUG", b"DIGEST-VALUE"]), vec![b"PEXPIRETIME".to_vec(), name.clone()]]
            };
            let commands: Vec<Vec<Vec<u8>>> = some.iter().flat_map(about).collect();
            let answers = client.pipeline(&commands).unwrap();
            for (name, answer) in some.iter().zip(answers.chunks(2)) {
                let Frame::Integer(expiry) = answer[1] else { panic!("{answer:?}") };
                all.insert((database, name.clone()), (format!("{:?}", answer[0]), expiry));
            }
        }
    }
    all
}

/// Makes a server of the replica that has what the primary has now.
fn freeze(server: &Server, twin: &Server) {
    server.client().unwrap().ok(&["SET", "last", "command"]).unwrap();
    wait_until("the twin to have everything", LONG, || {
        let found = twin.client()?.int(&["EXISTS", "last"])?;
        Ok(if found == 1 { Ok(()) } else { Err(format!("{found}")) })
    })
    .unwrap();
    twin.client().unwrap().ok(&["REPLICAOF", "NO", "ONE"]).unwrap();
}

fn equals_its_twin(kind: Kind, seed: u64) {
    let (server, twin) = with_backlog(kind);
    let mut client = server.client().unwrap();
    fill_every_type(&mut client, seed).unwrap();
    client.ok(&["DEBUG", "POPULATE", "50000", "key", "20"]).unwrap();
    client.int(&["DEL", "key:0"]).unwrap();
    let has_vectors = !client.list(&["COMMAND", "LIST", "FILTERBY", "PATTERN", "vadd"]).unwrap().is_empty();
    for number in 0..if has_vectors { 300 } else { 0 } {
        client.int(&["VADD", &format!("vectors:{number}"), "VALUES", "3", "1", "2", "3", "element"]).unwrap();
    }
    freeze(&server, &twin);
    // `DEBUG POPULATE` is not replicated.
    twin.client().unwrap().ok(&["DEBUG", "POPULATE", "50000", "key", "20"]).unwrap();
    twin.client().unwrap().int(&["DEL", "key:0"]).unwrap();

    let socket = begin(&server).unwrap();
    let writers = [1, 2].map(|number| {
        let options = Options { flush: false, big_bytes: 0, ..Options::seeded(seed + number) };
        Workload::start(server.client().unwrap(), options).unwrap()
    });
    let over = AtomicBool::new(false);
    let bytes = thread::scope(|scope| {
        let (server, stop) = (&server, &over);
        scope.spawn(move || {
            let mut client = server.client().unwrap();
            for number in (1..50_000).cycle() {
                if stop.load(Ordering::Relaxed) {
                    break;
                }
                let key = format!("key:{number}");
                match number % 5 {
                    0 => client.queue(&["DEL", &key]),
                    1 => client.queue(&["RENAME", &key, &format!("key:{}", number + 10)]),
                    2 => client.queue(&["COPY", &key, &key, "DB", "1"]),
                    3 if has_vectors && number % 50 == 3 => {
                        let (key, element) = (format!("vectors:{}", number % 300), number.to_string());
                        client.queue(&["VADD", &key, "VALUES", "3", "3", "2", "1", &element, "CAS"]);
                    }
                    3 => client.queue(&["SET", &key, "other"]),
                    _ => client.queue(&["SETRANGE", &format!("new:{number}"), "3", "x"]),
                }
                if client.queued() > 100 {
                    client.flush().unwrap();
                }
            }
        });
        let bytes = snapshot(socket);
        over.store(true, Ordering::Relaxed);
        bytes
    });
    for writer in writers {
        assert!(writer.stop().unwrap().commands > 0);
    }
    assert!(is_what_the_twin_has(&server, &twin, bytes) > 50_000);
}

/// Compares a snapshot with the twin key by key, and returns the number of its keys.
fn is_what_the_twin_has(server: &Server, twin: &Server, snapshot: Option<Vec<u8>>) -> usize {
    let kind = server.kind();
    let why = server.fact("remora_sweep_error").unwrap();
    let bytes = snapshot.unwrap_or_else(|| panic!("{kind}: {why}"));
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("swept.rdb"), bytes).unwrap();
    let loaded = Server::builder(kind).config("dir", folder.path().display()).config("dbfilename", "swept.rdb").start();
    let (wanted, found) = (contents(twin), contents(&loaded.unwrap()));
    for (key, value) in &found {
        assert_eq!(wanted.get(key), Some(value), "{kind}: {} of {}", String::from_utf8_lossy(&key.1), key.0);
    }
    // What has expired since is missing in one or the other.
    let stays = |(_, (_, expiry)): &(&_, &(String, i64))| *expiry < 0;
    let missing: Vec<_> = wanted.iter().filter(stays).filter(|(key, _)| !found.contains_key(*key)).take(3).collect();
    assert!(missing.is_empty(), "{kind}: {missing:?}");
    found.len()
}

/// A large value whose rest is too much for one moment as a client is about to change all of it ends a sweep.
#[test]
fn a_client_that_changes_all_of_a_large_value_ends_a_sweep_and_waits_for_nothing() {
    for kind in require::kinds() {
        let (server, _replica) = with_backlog(kind);
        let mut random = Random::new(71);
        fill_large(&mut Pipeline::to(&server), "list:large", 60_000, &mut random);
        server.configure("remora.sweep-share", "1").unwrap();
        let socket = begin(&server).unwrap();
        assert_eq!(server.client().unwrap().int(&["LREM", "list:large", "0", "nothing"]).unwrap(), 0);
        assert!(snapshot(socket).is_none(), "{kind}");
        let why = server.fact("remora_sweep_error").unwrap();
        assert!(why.contains("\"list:large\"") && why.contains("a client changes all of it"), "{kind}: {why}");
        assert!(snapshot(begin(&server).unwrap()).is_some(), "{kind}");
        assert_eq!(server.fact("remora_sweep_keys_in_pieces").unwrap(), "1");
    }
}

/// The same of a string; also one that is sent before it is whole, and expires.
#[test]
fn a_client_that_changes_all_of_a_large_string_or_its_expiry_ends_a_sweep_and_waits_for_nothing() {
    for kind in require::kinds() {
        let (server, _replica) = with_backlog(kind);
        let mut client = server.client().unwrap();
        fill_string(&mut Pipeline::to(&server), "string:large", 48 << 20, &mut Random::new(72));
        server.configure("remora.sweep-share", "1").unwrap();
        let socket = begin(&server).unwrap();
        assert_eq!(client.int(&["SETNX", "string:large", "nothing"]).unwrap(), 0);
        assert!(snapshot(socket).is_none(), "{kind}");
        let why = server.fact("remora_sweep_error").unwrap();
        assert!(why.contains("\"string:large\"") && why.contains("of its 49152"), "{kind}: {why}");

        // The server lets go of it when a client looks for it.
        client.ok(&["DEBUG", "SET-ACTIVE-EXPIRE", "0"]).unwrap();
        client.int(&["PEXPIRE", "string:large", "1"]).unwrap();
        let mut socket = begin(&server).unwrap();
        socket.read_exact(&mut vec![0; 1 << 20]).unwrap();
        wait_until("the key to expire", LONG, || {
            let left = client.int(&["EXISTS", "string:large"])?;
            Ok(if left == 0 { Ok(()) } else { Err(format!("{left}")) })
        })
        .unwrap();
        let left = socket.read_to_end(&mut Vec::new()).unwrap();
        assert!(left < 32 << 20, "{kind}: {left}");
        let why = server.fact("remora_sweep_error").unwrap();
        assert!(why.contains("\"string:large\"") && why.contains("has expired"), "{kind}: {why}");
        assert!(snapshot(begin(&server).unwrap()).is_some(), "{kind}");
    }
}

/// Values that are not taken in pieces, and are too large for one moment, end a sweep by their name and size.
#[test]
fn a_value_that_is_too_large_for_one_moment_ends_a_sweep() {
    for kind in require::kinds() {
        let (server, _replica) = with_backlog(kind);
        let mut client = server.client().unwrap();
        let fields = !client.list(&["COMMAND", "LIST", "FILTERBY", "PATTERN", "hpexpire"]).unwrap().is_empty();
        let vectors = !client.list(&["COMMAND", "LIST", "FILTERBY", "PATTERN", "vadd"]).unwrap().is_empty();
        let mut values = vec![("stream", 30_000)];
        values.extend(fields.then_some(("hash with expiring fields", 30_000)));
        values.extend(vectors.then_some(("value of a module", 6_000)));
        for (key, elements) in values {
            let mut filling = Pipeline::to(&server);
            for element in 0..elements {
                let element = element.to_string();
                match key {
                    "stream" => filling.queue(&["XADD", key, "*", "field", &element]),
                    "value of a module" => {
                        let vector = ["1"; 300].join(" ");
                        let head = ["VADD", key, "VALUES", "300"].into_iter();
                        filling.queue(&head.chain(vector.split(' ')).chain([element.as_str()]).collect::<Vec<_>>());
                    }
                    _ => filling.queue(&["HSET", key, &element, "value"]),
                }
                filling.read(500);
            }
            if key.starts_with("hash") {
                filling.queue(&["HPEXPIRE", key, "10000000", "FIELDS", "1", "0"]);
            }
            filling.read(0);
            assert!(snapshot(begin(&server).unwrap()).is_none(), "{kind}");
            let why = server.fact("remora_sweep_error").unwrap();
            let size = if key.starts_with("value") { " KiB" } else { "30000 elements" };
            assert!(why.contains(&format!("\"{key}\"")) && why.contains(size), "{kind}: {why}");
            assert_eq!(client.int(&["DEL", key]).unwrap(), 1);
        }
        assert!(snapshot(begin(&server).unwrap()).is_some(), "{kind}");
    }
}

/// A server drops the subscriptions of a module that it unloads, and the library may stay in memory.
#[test]
fn a_module_that_is_loaded_anew_hears_which_lists_have_changed() {
    for kind in require::kinds() {
        let (server, twin) = with_backlog_of(Server::builder(kind).config("enable-module-command", "local"));
        let (mut client, mut random) = (server.client().unwrap(), Random::new(73));
        let library = remora_lab::server::module_library().unwrap();
        let load = ["MODULE", "LOAD", library.to_str().unwrap(), "capture-only"];
        client.ok(&load).unwrap();
        assert!(snapshot(begin(&server).unwrap()).is_some(), "{kind}: a server without keys");
        client.ok(&["MODULE", "UNLOAD", "remora"]).unwrap();
        client.ok(&load).unwrap();
        fill_large(&mut Pipeline::to(&server), "list", 60_000, &mut random);
        server.configure("remora.sweep-share", "1").unwrap();
        freeze(&server, &twin);
        let socket = begin(&server).unwrap();
        // The list is as long as before, and its elements have other numbers.
        client.ok(&["MULTI"]).unwrap();
        for _ in 0..5 {
            client.call(&["LPUSH", "list", "new"]).unwrap();
            client.call(&["RPOP", "list"]).unwrap();
        }
        assert_eq!(client.list(&["EXEC"]).unwrap().len(), 10);
        is_what_the_twin_has(&server, &twin, snapshot(socket));
        assert_eq!(server.fact("remora_sweep_keys_in_pieces").unwrap(), "1", "{kind}");
    }
}

/// Large values of each shape, and how a client names an element of them.
const SHAPES: [&str; 5] = ["list", "hash", "set", "zset", "string"];
const LARGE: u64 = 40;

/// Elements of the smallest and of the largest: more than a value of one moment has, and no more than a command may
/// wait for.
const ELEMENTS: (u64, u64) = (4_500, 9_500);

fn large_key(number: u64) -> String {
    format!("{}:{number}", SHAPES[(number % 5) as usize])
}

/// Commands whose answers are read, some at a time.
struct Pipeline {
    client: Client,
    waiting: usize,
}

impl Pipeline {
    fn to(server: &Server) -> Pipeline {
        Pipeline { client: server.client().unwrap(), waiting: 0 }
    }

    fn queue(&mut self, words: &[&str]) {
        self.client.queue(words);
        self.waiting += 1;
    }

    /// Waits for the answers if there are so many.
    fn read(&mut self, from: usize) {
        if self.waiting >= from {
            self.client.flush().unwrap();
            (0..std::mem::take(&mut self.waiting)).for_each(|_| drop(self.client.receive().unwrap()));
        }
    }
}

fn fill_large(client: &mut Pipeline, key: &str, elements: u64, random: &mut Random) {
    if key.starts_with("string") {
        return fill_string(client, key, elements * STRING_BYTES, random);
    }
    for element in 0..elements {
        let (name, value) = (format!("element:{element}"), "v".repeat(random.below(60) as usize));
        match key.split(':').next().unwrap() {
            "list" => client.queue(&["RPUSH", key, &format!("{element} {value}")]),
            "hash" => client.queue(&["HSET", key, &name, &value]),
            "set" => client.queue(&["SADD", key, &name]),
            _ => client.queue(&["ZADD", key, &format!("{}", random.below(1 << 40) as f64 / 1024.0), &name]),
        }
        client.read(500);
    }
    client.read(0);
}

/// Bytes of a string for each element of other values: all are taken in pieces.
const STRING_BYTES: u64 = 100;

fn fill_string(client: &mut Pipeline, key: &str, bytes: u64, random: &mut Random) {
    let mut letters = || (0..997).map(|_| char::from(b'a' + random.below(26) as u8)).collect::<String>();
    let mut left = bytes as usize;
    while left > 0 {
        let piece = letters().repeat(1_000);
        client.queue(&["APPEND", key, &piece[..piece.len().min(left)]]);
        client.read(1);
        left -= piece.len().min(left);
    }
}

/// A command on a large value. One in `harsh` changes all of it.
fn disturb(client: &mut Pipeline, random: &mut Random, harsh: u64) {
    let key = large_key(random.below(LARGE));
    let shape = key.split(':').next().unwrap();
    let [name, other] = [(); 2].map(|()| format!("element:{}", random.below(12_000)));
    let (value, place) = (random.below(1000).to_string(), large_key(LARGE + random.below(8)));
    let (from, bit) = (random.below(1_000_000).to_string(), random.below(8_000_000).to_string());
    if random.one_in(harsh) {
        return match random.below(9) {
            0 => client.queue(&["DEL", &key]),
            1 => client.queue(&["RENAME", &key, &place]),
            2 => client.queue(&["COPY", &key, &place, "DB", "1", "REPLACE"]),
            3 if !matches!(shape, "hash" | "string") => {
                client.queue(&["SORT", &key, "ALPHA", "LIMIT", "0", "9", "STORE", &place])
            }
            4 => client.queue(&["PEXPIRE", &key, "40"]),
            5 => client.queue(&["SET", &key, &value]),
            6 if shape == "set" => client.queue(&["SUNIONSTORE", &key, &key, &place]),
            6 => client.queue(&["RPOPLPUSH", &key, &key]),
            7 => client.queue(&["SPOP", &key]),
            _ => client.queue(&[
                "EVAL",
                "redis.call('UNLINK', KEYS[1]) return redis.call('HSET', KEYS[1], 'a', 'b')",
                "1",
                &key,
            ]),
        };
    }
    let words: Vec<&str> = match (shape, random.below(6)) {
        ("string", 0 | 1) => vec!["APPEND", &key, &name],
        ("string", 2) => vec!["SETBIT", &key, &bit, "1"],
        ("string", _) => vec!["SETRANGE", &key, &from, &other],
        ("list", 0) => vec!["LPUSH", &key, &value, &name],
        ("list", 1) => vec!["RPUSH", &key, &value],
        ("list", 2) => vec!["LPOP", &key],
        ("list", 3) => vec!["RPOP", &key, "2"],
        ("list", 4) => vec!["BLPOP", &key, "0.01"],
        ("list", _) => vec!["RPUSHX", &key, &name, &other],
        ("hash", 0) => vec!["HINCRBY", &key, &value, "7"],
        ("hash", 1 | 2) => vec!["HDEL", &key, &name, &other],
        ("hash", _) => vec!["HSET", &key, &name, &value, &other, "new"],
        ("set", 0 | 1) => vec!["SREM", &key, &name, &other],
        ("set", _) => vec!["SADD", &key, &name, &value],
        (_, 0 | 1) => vec!["ZREM", &key, &name, &other],
        (_, 2) => vec!["ZINCRBY", &key, "0.1", &name],
        (_, _) => vec!["ZADD", &key, &value, &name, "inf", &other],
    };
    match random.below(8) {
        0 => {
            client.queue(&["MULTI"]);
            client.queue(&words);
            client.queue(&["GET", "nothing"]);
            client.queue(&words);
            client.queue(&[if random.one_in(3) { "DISCARD" } else { "EXEC" }]);
        }
        1 if words[0] != "BLPOP" => {
            let call = ["EVAL", "return redis.call(unpack(ARGV))", "1", &key];
            client.queue(&[&call[..], &words].concat());
        }
        _ => client.queue(&words),
    }
}

/// A string of which a command may not take the rest.
const WHOLE_STRING_BYTES: u64 = 24 << 20;

/// Large values are taken in pieces while clients write to them.
fn large_values_equal_their_twins(kind: Kind, seed: u64, harsh: u64) {
    let (server, twin) = with_backlog(kind);
    let (mut client, mut random) = (server.client().unwrap(), Random::new(seed));
    let mut filling = Pipeline::to(&server);
    for number in 0..LARGE {
        let elements = random.between(ELEMENTS.0, ELEMENTS.1);
        fill_large(&mut filling, &large_key(number), elements, &mut random);
        if random.one_in(4) {
            client.int(&["PEXPIREAT", &large_key(number), "4102444800000"]).unwrap();
        }
    }
    // One that only a share of a moment's elements can be taken of.
    fill_large(&mut filling, "list:whole", 40_000, &mut random);
    fill_string(&mut filling, "string:whole", WHOLE_STRING_BYTES, &mut random);
    server.configure("remora.sweep-share", "1").unwrap();
    let soon: Vec<String> = (0..6).map(|_| large_key(random.below(LARGE))).collect();
    for (number, key) in soon.iter().enumerate() {
        client.int(&["PEXPIRE", key, &(800 + 150 * number).to_string()]).unwrap();
    }
    freeze(&server, &twin);
    let socket = begin(&server).unwrap();
    let over = AtomicBool::new(false);
    let bytes = thread::scope(|scope| {
        for number in 0..3 {
            let (server, over) = (&server, &over);
            scope.spawn(move || {
                let (mut client, mut random) = (Pipeline::to(server), Random::new(seed * 10 + number));
                let mut round = 0_u64;
                while !over.load(Ordering::Relaxed) {
                    disturb(&mut client, &mut random, harsh);
                    let value = format!("pushed {round}");
                    match round % 4 {
                        0 => client.queue(&["LPUSH", "list:whole", &value]),
                        1 => client.queue(&["RPUSH", "list:whole", &value]),
                        2 => client.queue(&["RPOP", "list:whole"]),
                        _ => client.queue(&["LPOP", "list:whole"]),
                    }
                    let from = random.below(WHOLE_STRING_BYTES).to_string();
                    match round % 8 {
                        0 => client.queue(&["APPEND", "string:whole", &value]),
                        1 => client.queue(&["SETRANGE", "string:whole", &from, &value.repeat(1_000)]),
                        2 => client.queue(&["SETBIT", "string:whole", &from, "1"]),
                        _ => {}
                    }
                    round += 1;
                    client.read(6);
                }
                client.read(0);
                assert!(round > 0);
            });
        }
        let bytes = snapshot(socket);
        over.store(true, Ordering::Relaxed);
        bytes
    });
    wait_until("keys to expire", LONG, || {
        let mut client = twin.client()?;
        let left = soon.iter().map(|key| client.int(&["EXISTS", key])).sum::<remora_lab::Result<i64>>()?;
        Ok(if left == 0 { Ok(()) } else { Err(format!("{left}")) })
    })
    .unwrap();
    is_what_the_twin_has(&server, &twin, bytes);
    let large = server.fact("remora_sweep_keys_in_pieces").unwrap();
    assert!(large.parse::<u64>().unwrap() > LARGE / 2, "{kind}: {large}");
}

#[test]
fn large_values_are_swept_in_pieces_while_they_are_written_to() {
    require::kinds().into_iter().for_each(|kind| large_values_equal_their_twins(kind, 51, 200));
}

#[test]
#[ignore = "long: make test-all"]
fn large_values_are_swept_in_pieces_while_they_are_changed_in_every_way() {
    for seed in 61..65 {
        require::kinds()
            .into_iter()
            .for_each(|kind| large_values_equal_their_twins(kind, seed, [5, 30, 2_000][seed as usize % 3]));
    }
}

#[test]
fn what_is_swept_is_what_a_twin_had_at_that_moment() {
    require::kinds().into_iter().for_each(|kind| equals_its_twin(kind, 41));
}

#[test]
#[ignore = "long: make test-all"]
fn what_is_swept_of_other_data_is_what_a_twin_had_at_that_moment() {
    require::kinds().into_iter().for_each(|kind| equals_its_twin(kind, 42));
}

#[test]
#[ignore = "long: make test-all"]
fn an_agent_that_leaves_ends_its_sweep_and_another_one_may_begin() {
    for kind in require::kinds() {
        let (server, _replica) = with_backlog(kind);
        let mut client = server.client().unwrap();
        client.ok(&["DEBUG", "POPULATE", "300000", "key", "100"]).unwrap();
        let first = begin(&server).unwrap();
        let busy = begin(&server).unwrap_err().to_string();
        assert!(busy.contains("BUSY"), "{busy}");
        drop(first);
        wait_until("the sweep to end", LONG, || {
            let state = server.fact("remora_sweep")?;
            Ok(if state == "idle" { Ok(()) } else { Err(state) })
        })
        .unwrap();
        assert!(server.fact("remora_sweep_error").unwrap().contains("its agent is gone"));
        assert!(snapshot(begin(&server).unwrap()).is_some());
        assert_eq!(server.fact("remora_sweeps_done").unwrap(), "1");
    }
}

/// The ages of keys are as before in the server, and in the snapshot where the server goes by them.
#[test]
fn keys_stay_as_old_as_they_were() {
    for kind in require::kinds() {
        for (policy, option, question, is_saved) in [
            ("allkeys-lru", "IDLETIME", "IDLETIME", true),
            ("volatile-lfu", "FREQ", "FREQ", true),
            ("noeviction", "IDLETIME", "IDLETIME", false),
            ("allkeys-random", "IDLETIME", "IDLETIME", false),
        ] {
            let (server, _replica) = with_backlog(kind);
            server.configure("maxmemory-policy", policy).unwrap();
            let mut client = server.client().unwrap();
            client.ok(&["SET", "template", "a value"]).unwrap();
            let dumped = client.call(&["DUMP", "template"]).unwrap();
            let dumped = dumped.as_bytes().unwrap();
            let steps = if question == "FREQ" { 1 } else { 50 };
            for number in 0..200_u32 {
                let (key, age) = (format!("key:{number}"), (steps * number).to_string());
                let words = [b"RESTORE".as_slice(), key.as_bytes(), b"0", dumped, option.as_bytes(), age.as_bytes()];
                client.call(&words).unwrap();
            }
            let bytes = snapshot(begin(&server).unwrap());
            let why = server.fact("remora_sweep_error").unwrap();
            let folder = tempfile::tempdir().unwrap();
            fs::write(folder.path().join("swept.rdb"), bytes.unwrap_or_else(|| panic!("{kind}: {why}"))).unwrap();
            let loaded = Server::builder(kind)
                .config("dir", folder.path().display())
                .config("dbfilename", "swept.rdb")
                .config("maxmemory-policy", policy);
            let loaded = loaded.start().unwrap();
            for (who, server) in [("the server", &server), ("the snapshot", &loaded)] {
                if who == "the snapshot" && !is_saved {
                    continue;
                }
                let mut client = server.client().unwrap();
                for number in 0..200_i64 {
                    let age = client.int(&["OBJECT", question, &format!("key:{number}")]).unwrap();
                    let wanted = i64::from(steps) * number;
                    // Ages grow with time, and frequencies sink with it.
                    let slack = if question == "IDLETIME" && who == "the server" { age_slack(kind) } else { 60 };
                    assert!((age - wanted).abs() <= slack, "{kind} {policy} {who}: {age} for {wanted}");
                }
            }
        }
    }
}

#[test]
fn an_eviction_ends_the_sweep() {
    for kind in require::kinds() {
        let (server, _replica) = with_backlog(kind);
        let mut client = server.client().unwrap();
        client.ok(&["DEBUG", "POPULATE", "300000", "key", "100"]).unwrap();
        server.configure("maxmemory-policy", "allkeys-lru").unwrap();
        let socket = begin(&server).unwrap();
        server.configure("maxmemory", "20mb").unwrap();
        client.ok(&["SET", "one", "more"]).unwrap();
        assert!(snapshot(socket).is_none(), "{kind}");
        let why = server.fact("remora_sweep_error").unwrap();
        assert!(why.contains("evicted"), "{kind}: {why}");
        server.configure("maxmemory", "0").unwrap();
        assert!(snapshot(begin(&server).unwrap()).is_some(), "{kind}");
    }
}

#[test]
fn a_sweep_is_not_begun_within_a_transaction_or_a_script() {
    for kind in require::kinds() {
        let (server, _replica) = with_backlog(kind);
        let mut client = server.client().unwrap();
        client.ok(&["MULTI"]).unwrap();
        client.call(&["REMORA.SWEEP", "@nowhere", "secret"]).unwrap();
        let answer = client.list(&["EXEC"]).unwrap();
        let answer = match &answer[..] {
            [Frame::Error(text)] => String::from_utf8_lossy(text).into_owned(),
            other => panic!("{other:?}"),
        };
        assert!(answer.contains("a script or a transaction calls it"), "{answer}");
        assert!(client.call(&["EVAL", "return redis.call('REMORA.SWEEP', 'a', 'b')", "0"]).is_err());
        assert_eq!(server.fact("remora_sweep").unwrap(), "idle");
    }
}

mod by_command {
    use std::time::Instant;

    use super::*;

    /// Sweeps, and dumps, of which the median is printed.
    const ROUNDS: usize = 5;

    /// The longest time that a client waited for a small write meanwhile, in milliseconds.
    fn longest_wait(server: &Server, work: impl FnOnce()) -> f64 {
        let over = AtomicBool::new(false);
        thread::scope(|scope| {
            let waited = scope.spawn(|| {
                let (mut client, mut longest, mut number) = (server.client().unwrap(), Duration::ZERO, 0_u64);
                while !over.load(Ordering::Relaxed) {
                    number += 1;
                    let begun = Instant::now();
                    client.ok(&["SET", &format!("elsewhere:{}", number % 1_000), "value"]).unwrap();
                    longest = longest.max(begun.elapsed());
                }
                longest
            });
            work();
            over.store(true, Ordering::Relaxed);
            waited.join().unwrap().as_secs_f64() * 1e3
        })
    }

    /// Milliseconds of a command by the server's count.
    fn usec_of(client: &mut Client, command: &str) -> f64 {
        let stats = client.call(&["INFO", "commandstats"]).unwrap();
        let stats = String::from_utf8_lossy(stats.as_bytes().unwrap()).into_owned();
        let line = stats.lines().find(|line| line.starts_with(&format!("cmdstat_{command}:"))).unwrap();
        let taken = line.split("usec=").nth(1).unwrap().split(',').next().unwrap();
        taken.parse::<f64>().unwrap() / 1e3
    }

    fn median(mut numbers: Vec<f64>) -> f64 {
        numbers.sort_by(f64::total_cmp);
        numbers[numbers.len() / 2]
    }

    /// Takes a sweep, and keeps none of it.
    fn sweep(server: &Server) -> Duration {
        let (mut socket, begun) = (begin(server).unwrap(), Instant::now());
        let (mut frames, mut buffer) = (Frames::default(), vec![0; 1 << 20]);
        loop {
            let read = socket.read(&mut buffer).unwrap();
            assert!(read > 0, "{}: {}", server.kind(), server.fact("remora_sweep_error").unwrap());
            if frames.take(&buffer[..read], |_| {}).unwrap().is_some() {
                return begun.elapsed();
            }
        }
    }

    fn print(kind: Kind, what: &str, work: &mut dyn FnMut() -> f64) {
        let waits: Vec<f64> = (0..ROUNDS).map(|_| work()).collect();
        println!("{kind}, {what}: {:.1} ms, of {waits:.1?}", median(waits.clone()));
    }

    #[test]
    #[ignore = "measures: ask for it by its name"]
    fn how_long_clients_wait_beside_a_large_string() {
        for kind in require::kinds() {
            let (server, replica) = with_backlog(kind);
            drop(replica);
            let mut client = server.client().unwrap();
            client.ok(&["SET", "elsewhere", "value"]).unwrap();
            let quiet = Duration::from_secs(1);
            print(kind, "nothing", &mut || longest_wait(&server, || thread::sleep(quiet)));
            print(kind, "a sweep of nothing", &mut || {
                longest_wait(&server, || {
                    sweep(&server);
                })
            });
            for mebibytes in [4_u64, 64, 512] {
                let (mut left, mut random) = (mebibytes, Random::new(mebibytes));
                let piece: String = (0..1 << 20).map(|_| char::from(random.between(33, 126) as u8)).collect();
                while left > 0 {
                    client.int(&["APPEND", "string", &piece]).unwrap();
                    left -= 1;
                }
                let mut lasted = Duration::ZERO;
                print(kind, &format!("a sweep of {mebibytes} MiB"), &mut || {
                    longest_wait(&server, || lasted = sweep(&server))
                });
                println!("{kind}, the last of these took {} ms", lasted.as_millis());
                print(kind, &format!("a sweep of {mebibytes} MiB that is written into"), &mut || {
                    let mut writer = server.client().unwrap();
                    let over = AtomicBool::new(false);
                    thread::scope(|scope| {
                        let over = &over;
                        let written = scope.spawn(move || {
                            let (mut random, mut longest) = (Random::new(3), Duration::ZERO);
                            while !over.load(Ordering::Relaxed) {
                                let (from, begun) = (random.below(mebibytes << 20).to_string(), Instant::now());
                                writer.int(&["SETRANGE", "string", &from, "value"]).unwrap();
                                longest = longest.max(begun.elapsed());
                            }
                            longest.as_secs_f64() * 1e3
                        });
                        sweep(&server);
                        over.store(true, Ordering::Relaxed);
                        written.join().unwrap()
                    })
                });
                print(kind, &format!("what a DUMP of {mebibytes} MiB takes of the server"), &mut || {
                    client.ok(&["CONFIG", "RESETSTAT"]).unwrap();
                    client.call(&["EVAL", "return #redis.call('DUMP', KEYS[1])", "1", "string"]).unwrap();
                    usec_of(&mut client, "dump")
                });
                client.int(&["DEL", "string"]).unwrap();
            }
        }
    }

    /// A client that changes all of a string takes the rest of it, of some 3 MiB here.
    #[test]
    #[ignore = "measures: ask for it by its name"]
    fn how_long_a_client_waits_for_the_rest_of_a_string() {
        for kind in require::kinds() {
            let (server, _replica) = with_backlog(kind);
            fill_string(&mut Pipeline::to(&server), "string", 7_500 << 10, &mut Random::new(6));
            let mut client = server.client().unwrap();
            print(kind, "SETNX beside the rest of a string", &mut || {
                // Nobody reads: the sweep stands still behind 4 MiB.
                let socket = begin(&server).unwrap();
                thread::sleep(Duration::from_millis(500));
                let begun = Instant::now();
                client.int(&["SETNX", "string", "other"]).unwrap();
                let waited = begun.elapsed().as_secs_f64() * 1e3;
                assert!(snapshot(socket).is_some(), "{}", server.fact("remora_sweep_error").unwrap());
                waited
            });
        }
    }

    #[test]
    #[ignore = "measures: ask for it by its name"]
    fn how_long_a_dump_of_what_is_not_taken_in_pieces_takes() {
        for kind in require::kinds() {
            let server = Server::builder(kind).start().unwrap();
            let mut client = server.client().unwrap();
            let fields = !client.list(&["COMMAND", "LIST", "FILTERBY", "PATTERN", "hpexpire"]).unwrap().is_empty();
            for (elements, bytes) in [(5_000_u64, 20_usize), (20_000, 20), (5_000, 200), (20_000, 200), (1_000, 4_000)]
            {
                for shape in ["stream", "hash"] {
                    let (mut filling, mut random) = (Pipeline::to(&server), Random::new(5));
                    for element in 0..elements {
                        let value: String = (0..bytes).map(|_| char::from(random.between(33, 126) as u8)).collect();
                        match shape {
                            "stream" => filling.queue(&["XADD", shape, "*", "field", &value]),
                            _ => filling.queue(&["HSET", shape, &element.to_string(), &value]),
                        }
                        filling.read(500);
                    }
                    if fields && shape == "hash" {
                        filling.queue(&["HPEXPIRE", shape, "100000000", "FIELDS", "1", "0"]);
                    }
                    filling.read(0);
                    let memory = client.int(&["MEMORY", "USAGE", shape]).unwrap();
                    let mut least = f64::INFINITY;
                    for _ in 0..2 * ROUNDS {
                        client.ok(&["CONFIG", "RESETSTAT"]).unwrap();
                        client.call(&["DUMP", shape]).unwrap();
                        least = least.min(usec_of(&mut client, "dump"));
                    }
                    println!("{kind}, {shape} of {elements} × {bytes} bytes, {} KiB: {least:.1} ms", memory >> 10);
                    client.int(&["DEL", shape]).unwrap();
                }
            }
        }
    }

    /// A folder with the sources of Redis 7.0 (`dev/judge/setup` unpacks them), whose `src` has links to its programs.
    const SUITE: &str = "REMORA_SUITE";

    /// Files of the suite: all of `unit/type` by default, with spaces between.
    const FILES: &str = "REMORA_SUITE_FILES";
    const TYPES: [&str; 10] =
        ["string", "incr", "list", "list-2", "list-3", "hash", "set", "zset", "stream", "stream-cgroups"];

    /// Redis' own tests pass on a server that is swept all the time.
    #[test]
    #[ignore = "needs a folder: REMORA_SUITE"]
    fn the_servers_own_tests_pass_beside_sweeps() {
        let suite = std::env::var(SUITE).expect(SUITE);
        let files = std::env::var(FILES).unwrap_or_else(|_| TYPES.map(|name| format!("unit/type/{name}")).join(" "));
        let (server, replica) = with_backlog(Kind::Redis7);
        drop(replica);
        let port = server.port().to_string();
        let mut tests = std::process::Command::new("tclsh");
        tests.current_dir(suite).args(["tests/test_helper.tcl", "--host", "127.0.0.1", "--port", &port]);
        tests.args(files.split(' ').flat_map(|file| ["--single", file]));
        // Those that look at the stream find the PING of each sweep there. The other one asks for the process of the
        // server, which the suite has not started.
        tests.args(["--tags", "-needs:repl", "--skiptest", "SRANDMEMBER with a dict containing long chain"]);
        let mut tests = tests.spawn().unwrap();
        let (mut done, mut ended, mut refused) =
            (0_u64, BTreeMap::<String, u64>::new(), BTreeMap::<String, u64>::new());
        let passed = loop {
            if let Some(status) = tests.try_wait().unwrap() {
                break status.success();
            }
            match begin(&server).map(snapshot) {
                Ok(Some(_)) => done += 1,
                Ok(None) => {
                    let mut why = server.fact("remora_sweep_error").unwrap();
                    why.truncate(60);
                    *ended.entry(why).or_default() += 1;
                }
                Err(error) => {
                    *refused.entry(error.to_string()).or_default() += 1;
                    thread::sleep(Duration::from_millis(1));
                }
            }
        };
        println!("whole sweeps: {done}\nended: {ended:#?}\nnot begun: {refused:#?}");
        assert!(passed && done > 0);
    }
}
