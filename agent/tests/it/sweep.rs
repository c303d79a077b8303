//! Snapshots without a fork: the module sweeps its server. Whatever clients write meanwhile, the replica is exact; what
//! stands in the way is named, and a fork takes the snapshot.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use remora_lab::server::{Builder, wait_until};
use remora_lab::workload::Options;
use remora_lab::{Client, Kind, Server, Workload, assert_same_data, fill_every_type, require};

use crate::kit::{LONG, Source, Stage, at_once, ends, load, number, says};
use crate::module::{method, with_module};

const SWEEP: [&str; 4] = ["--memory", "1GiB", "--module-capture", "sweep"];

const SWEPT: &str = "the module, without a fork";

/// A primary whose backlog can be made without a fork: servers wait for more replicas by default.
fn sweepable(kind: Kind) -> Builder {
    with_module(kind).config("repl-diskless-sync-delay", 5)
}

/// Keys of the first database, so many that a sweep takes a second or two.
const KEYS: u64 = 200_000;

/// Keys of the first database while its clients write as fast as they can: the sweep has a share of the server's time, and
/// a module without optimisation needs most of that.
const KEYS_BESIDE_WRITERS: u64 = 40_000;

fn populate(primary: &Server, keys: u64) {
    let mut client = primary.client().unwrap();
    client.ok(&["DEBUG", "POPULATE", &keys.to_string(), "key", "50"]).unwrap();
}

/// Values that are written in pieces.
const LARGE: [&str; 4] = ["large:list", "large:hash", "large:set", "large:sorted"];

fn populate_large(primary: &Server) {
    let script = "for i = 1, 12000 do redis.call('RPUSH', KEYS[1], i) redis.call('HSET', KEYS[2], i, i) \
                  redis.call('SADD', KEYS[3], 'e' .. i) redis.call('ZADD', KEYS[4], i / 3, i) end";
    primary.client().unwrap().call(&[&["EVAL", script, "4"][..], &LARGE].concat()).unwrap();
}

/// A write to a large value: most change a part of it, and some all of it.
fn write_to_large(client: &mut Client, number: u64) {
    let element = (number * 7919 % 14_000).to_string();
    let [list, hash, set, sorted] = LARGE;
    match number % 211 {
        0 => client.queue(&["RENAME", hash, "large:renamed"]),
        1 => client.queue(&["RENAME", "large:renamed", hash]),
        2 => client.queue(&["SPOP", set]),
        3 => client.queue(&["RPOPLPUSH", list, list]),
        4 => client.queue(&["ZUNIONSTORE", "large:union", "1", sorted]),
        _ => match number % 8 {
            0 => client.queue(&["LPUSH", list, &element]),
            1 => client.queue(&["RPOP", list]),
            2 => client.queue(&["HSET", hash, &element, "new"]),
            3 => client.queue(&["HDEL", hash, &element]),
            4 => client.queue(&["SADD", set, &element]),
            5 => client.queue(&["SREM", set, &format!("e{element}")]),
            6 => client.queue(&["ZADD", sorted, "7", &element]),
            _ => client.queue(&["ZREM", sorted, &element]),
        },
    }
}

/// Writes of each of two writers, per second. Beside them stands [`resize`], which is as fast as the server.
const RATE: u64 = 5_000;

/// Every kind of write that names its keys.
fn writer(primary: &Server, seed: u64) -> Workload {
    let options = Options { flush: false, big_bytes: 0, ..Options::seeded(seed) };
    Workload::start(primary.client().unwrap(), options.rate(RATE)).unwrap()
}

/// Makes and deletes keys by the ten thousand until `over` is set, so that tables grow and shrink, some in transactions
/// and by scripts.
fn resize(primary: &Server, over: &AtomicBool) {
    let mut client = primary.client().unwrap();
    let mut round = 0;
    while !over.load(Ordering::Relaxed) {
        for number in 0..KEYS_BESIDE_WRITERS / 2 {
            let (more, old) = (format!("more:{number}"), format!("key:{}", (number * 7 + round) % KEYS_BESIDE_WRITERS));
            client.queue(&["APPEND", &more, "x"]);
            write_to_large(&mut client, number + round);
            match number % 8 {
                0 => client.queue(&["RENAME", &old, &format!("renamed:{number}")]),
                1 => client.queue(&["COPY", &old, &more, "DB", "9", "REPLACE"]),
                2 => client.queue(&[
                    "EVAL",
                    "redis.call('APPEND', KEYS[1], 'y') return redis.call('DEL', KEYS[2])",
                    "2",
                    &old,
                    &more,
                ]),
                3 => {
                    client.queue(&["MULTI"]);
                    client.queue(&["APPEND", &old, "z"]);
                    client.queue(&["PEXPIRE", &more, "50"]);
                    client.queue(&["EXEC"]);
                }
                4 => client.queue(&["MOVE", &more, "9"]),
                5 => client.queue(&["SET", &old, "new", "PX", "30"]),
                _ => client.queue(&["APPEND", &old, "w"]),
            }
            if client.queued() > 500 {
                client.flush().unwrap();
                if over.load(Ordering::Relaxed) {
                    return;
                }
            }
        }
        for number in 0..KEYS_BESIDE_WRITERS / 2 {
            client.queue(&["UNLINK", &format!("more:{number}"), &format!("renamed:{number}")]);
            if client.queued() > 500 {
                client.flush().unwrap();
            }
        }
        client.flush().unwrap();
        round += 1;
    }
}

fn is_exact_under_every_kind_of_write(kind: Kind) {
    let primary = sweepable(kind).start().unwrap();
    fill_every_type(&mut primary.client().unwrap(), 23).unwrap();
    load(&primary, 50, 100_000);
    populate(&primary, KEYS_BESIDE_WRITERS);
    populate_large(&primary);
    let forks = number(&primary, "total_forks");
    for round in 0..2 {
        let replica = Server::start(kind).unwrap();
        let mut source = Source::start(&primary, &SWEEP);
        let writers = [writer(&primary, 100 + round), writer(&primary, 200 + round)];
        let over = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| resize(&primary, &over));
            writers[0].wait_for(2_000);
            let mut agent = source.replica(&replica, &["--transport", if round % 2 == 1 { "tcp" } else { "shm" }]);
            let made = agent.wait_for_success(LONG);
            writers[1].wait_for(2_000);
            over.store(true, Ordering::Relaxed);
            if let Err(error) = made {
                panic!("{error}\n{}\n{}\n{}", agent.output(), source.agent.output(), primary.log());
            }
        });
        for writer in writers {
            writer.stop().unwrap();
        }
        assert_eq!(method(&mut source), SWEPT, "{}", source.agent.output());
        assert_same_data(&primary, &replica);
    }
    assert_eq!(number(&primary, "total_forks"), forks);
}

#[test]
#[ignore = "long: make test-all"]
fn replicas_of_redis_swept_under_every_kind_of_write_are_exact() {
    let Some(kind) = require::redis() else { return };
    is_exact_under_every_kind_of_write(kind);
}

#[test]
#[ignore = "long: make test-all"]
fn replicas_of_valkey_swept_under_every_kind_of_write_are_exact() {
    let Some(kind) = require::valkey() else { return };
    is_exact_under_every_kind_of_write(kind);
}

#[test]
fn a_primary_that_never_had_a_replica_is_swept_without_a_fork() {
    for kind in require::kinds() {
        let primary = sweepable(kind).start().unwrap();
        let keys = fill_every_type(&mut primary.client().unwrap(), 21).unwrap();
        let mut source = Source::start(&primary, &SWEEP);
        let replicas = [(); 2].map(|()| Server::start(kind).unwrap());
        for replica in &replicas {
            source.replicate(replica, &[]);
            assert_same_data(&primary, replica);
        }
        assert_eq!(method(&mut source), SWEPT);
        assert_eq!(number(&primary, "total_forks"), 0, "{kind}");
        assert_eq!(number(&primary, "latest_fork_usec"), 0, "{kind}");
        assert_eq!(number(&primary, "remora_sweep_keys"), keys, "{kind}");
        let libraries =
            |server: &Server| format!("{:?}", server.client().unwrap().list(&["FUNCTION", "LIST"]).unwrap());
        assert_eq!(libraries(&primary).len(), libraries(&replicas[0]).len());
    }
}

/// A replica is made of a primary that is not swept, or not to the end: by a fork, and the source says why.
#[track_caller]
fn is_forked_for(primary: &Server, why: &str) {
    let replica = Server::start(primary.kind()).unwrap();
    let mut source = Source::start(primary, &SWEEP);
    source.replicate(&replica, &[]);
    assert_ne!(method(&mut source), SWEPT, "{why}");
    let output = source.agent.output();
    assert!(output.contains(why), "{why} is not in:\n{output}");
    assert_same_data(primary, &replica);
}

#[test]
#[ignore = "long: make test-all"]
fn what_keeps_a_server_from_being_swept_is_named_and_its_fork_takes_the_snapshot() {
    at_once(require::kinds(), |kind| {
        let fill = |primary: &Server| assert!(fill_every_type(&mut primary.client().unwrap(), 24).unwrap() > 0);
        let primary = sweepable(kind).start().unwrap();
        fill(&primary);
        let mut client = primary.client().unwrap();
        client.ok(&["MULTI"]).unwrap();
        is_forked_for(&primary, "a client is in a transaction");
        client.ok(&["DISCARD"]).unwrap();
        client.send(&["BLMOVE", "nothing", "somewhere", "LEFT", "LEFT", "0"]).unwrap();
        is_forked_for(&primary, "a client waits in blmove");
        drop(client);

        let renamed = sweepable(kind).config("rename-command", "SWAPDB exchange").start().unwrap();
        fill(&renamed);
        is_forked_for(&renamed, "the command swapdb has been renamed or disabled");
        let hasty = with_module(kind).config("repl-diskless-sync-delay", 0).start().unwrap();
        fill(&hasty);
        is_forked_for(&hasty, "the server has no backlog, and would fork to get one");
    });
}

#[test]
fn a_primary_that_must_not_fork_does_not_and_replicas_wait_until_it_can_be_swept() {
    let Some(kind) = require::valkey() else { return };
    let primary = sweepable(kind).start().unwrap();
    fill_every_type(&mut primary.client().unwrap(), 26).unwrap();
    let mut client = primary.client().unwrap();
    client.ok(&["MULTI"]).unwrap();
    let mut source = Source::start(&primary, &[&SWEEP[..], &["--no-fork"]].concat());
    let replica = Server::start(kind).unwrap();
    let mut agent = source.replica(&replica, &[]);
    source.agent.wait_for_line("a client is in a transaction", LONG).unwrap();
    client.ok(&["DISCARD"]).unwrap();
    agent.wait_for_success(LONG).unwrap();
    assert_eq!(method(&mut source), SWEPT);
    assert_same_data(&primary, &replica);
    assert_eq!(number(&primary, "total_forks"), 0);
    // Without a way that needs no fork, nothing is begun.
    let stage = Stage::new();
    let url = primary.url();
    let token = stage.token.display().to_string();
    let words = ["source", "--server", &url, "--token-file", &token, "--no-fork"];
    says(&ends(&mut stage.start(None, &words), 2), &["--from-file", "--module-capture sweep"]);
}

/// Does something to a primary that is being swept. The replica that waits is made by a fork then.
fn interrupt(kind: Kind, what: &[&str], why: &str) {
    let primary = sweepable(kind).start().unwrap();
    fill_every_type(&mut primary.client().unwrap(), 25).unwrap();
    populate(&primary, KEYS);
    let replica = Server::start(kind).unwrap();
    let mut source = Source::start(&primary, &SWEEP);
    let mut agent = source.replica(&replica, &[]);
    source.agent.wait_for_event("snapshot_started", LONG).unwrap();
    primary.client().unwrap().call(what).unwrap();
    agent.wait_for_success(LONG).unwrap();
    assert_ne!(method(&mut source), SWEPT);
    let output = source.agent.output();
    assert!(output.contains(why), "{why} is not in:\n{output}");
    assert_same_data(&primary, &replica);
    wait_until("the sweep to have left", LONG, || {
        let state = primary.fact("remora_sweep")?;
        Ok(if state == "idle" { Ok(()) } else { Err(state) })
    })
    .unwrap();
}

#[test]
#[ignore = "long: make test-all"]
fn what_ends_a_sweep_is_named_and_a_fork_takes_the_next_snapshot() {
    at_once(require::kinds(), |kind| {
        interrupt(kind, &["FLUSHDB"], "a client sent FLUSHDB");
        interrupt(kind, &["SWAPDB", "0", "3"], "a client sent SWAPDB");
        interrupt(kind, &["EVAL", "redis.call('FLUSHALL')", "0"], "a client sent FLUSHALL");
        interrupt(kind, &["DEBUG", "RELOAD"], "a client sent DEBUG");
        interrupt(kind, &["SORT", "nothing", "BY", "w_*", "STORE", "sorted"], "a client sent SORT");
        interrupt(
            kind,
            &["CONFIG", "SET", "maxmemory-policy", "allkeys-lru"],
            "maxmemory-policy was changed meanwhile",
        );
    });
}

#[test]
#[ignore = "long: make test-all"]
fn a_value_that_is_too_large_for_one_moment_ends_a_sweep() {
    for kind in require::kinds() {
        let primary = sweepable(kind).start().unwrap();
        let mut client = primary.client().unwrap();
        // A string of any length is taken in pieces.
        client.ok(&["SET", "large", &"x".repeat(40 << 20)]).unwrap();
        let replica = Server::start(kind).unwrap();
        let mut source = Source::start(&primary, &SWEEP);
        source.replicate(&replica, &[]);
        assert_eq!(method(&mut source), SWEPT, "{}", source.agent.output());
        assert_same_data(&primary, &replica);
        source.stop();
        let script = "for i = 1, 30000 do redis.call('XADD', KEYS[1], '*', 'field', i) end";
        client.call(&["EVAL", script, "1", "long"]).unwrap();
        is_forked_for(&primary, "the value of the key \"long\" of database 0 is too large");
    }
}

/// A key that has expired and is still there is removed by the command that names it, and not by the sweep in a way
/// that the server does not expect: also if the command is refused then.
#[test]
#[ignore = "long: make test-all"]
fn keys_that_have_expired_leave_a_server_that_is_swept_as_ever() {
    for kind in require::kinds() {
        let primary = sweepable(kind).start().unwrap();
        let mut client = primary.client().unwrap();
        client.ok(&["DEBUG", "SET-ACTIVE-EXPIRE", "0"]).unwrap();
        populate(&primary, KEYS);
        for number in 0..1000 {
            client.ok(&["SET", &format!("gone:{number}"), "5", "PX", "1"]).unwrap();
            client.ok(&["SET", &format!("soon:{number}"), "5", "PX", &(1500 + number).to_string()]).unwrap();
        }
        let replica = Server::start(kind).unwrap();
        let mut source = Source::start(&primary, &SWEEP);
        let mut agent = source.replica(&replica, &[]);
        source.agent.wait_for_event("snapshot_started", LONG).unwrap();
        client.ok(&["CONFIG", "SET", "min-replicas-to-write", "7"]).unwrap();
        for number in 0..500 {
            assert!(client.int(&["INCR", &format!("gone:{number}")]).is_err(), "the server refuses writes");
        }
        client.ok(&["CONFIG", "SET", "min-replicas-to-write", "0"]).unwrap();
        client.ok(&["DEBUG", "SET-ACTIVE-EXPIRE", "1"]).unwrap();
        for number in 0..2000 {
            for name in ["gone", "soon"] {
                client.int(&["INCR", &format!("{name}:{}", number % 1000)]).unwrap();
            }
            thread::sleep(Duration::from_micros(200));
        }
        agent.wait_for_success(LONG).unwrap();
        assert_eq!(method(&mut source), SWEPT, "{}", source.agent.output());
        assert_same_data(&primary, &replica);
    }
}
