//! Random commands on twins: a server that has loaded keys in the fast way, and one that has loaded the same keys by
//! itself. Each answer must be the same on both, an error too.
//!
//! `make twins` does this for an hour, with new data and another seed every few seconds.

use std::time::{Duration, Instant};

use remora_lab::{Client, Kind, Random, Server, random, require};
use remora_redis::resp::Frame;

use crate::fast::{mixed, names, pair, records};

/// Commands on one pair of servers.
const COMMANDS: u64 = 30_000;

/// Minutes of the long form.
const MINUTES: &str = "REMORA_TWINS_MINUTES";
const MINUTES_DEFAULT: u64 = 60;

#[test]
#[ignore = "long: make test-all"]
fn every_command_is_answered_alike_afterwards() {
    for kind in require::kinds() {
        play(kind, 4);
    }
}

mod by_command {
    use super::*;

    #[test]
    #[ignore = "takes an hour: make twins"]
    fn every_command_is_answered_alike_for_long() {
        let minutes = std::env::var(MINUTES).ok().and_then(|text| text.parse().ok()).unwrap_or(MINUTES_DEFAULT);
        let (begun, mut seed, mut commands) = (Instant::now(), random::seed("twins"), 0);
        while begun.elapsed() < Duration::from_secs(60 * minutes) {
            for kind in require::kinds() {
                play(kind, seed);
                commands += COMMANDS;
                println!("{:>5} s: {commands} commands answered alike; {kind}, seed {seed}", begun.elapsed().as_secs());
            }
            seed = seed.wrapping_add(1);
        }
    }
}

/// New data, and many commands.
fn play(kind: Kind, seed: u64) {
    let parts = [(0, mixed(kind, seed, 8_000)), (1, records(seed.wrapping_add(1), 1_000))];
    let (fast, own) = pair(kind, &[], &parts);
    for server in [&fast, &own] {
        server.client().unwrap().ok(&["REPLICAOF", "NO", "ONE"]).unwrap();
    }
    let mut twins = Twins { kind, seed, fast: fast.client().unwrap(), own: own.client().unwrap(), names: names(&own) };
    let mut random = Random::new(seed);
    for round in 0..COMMANDS {
        twins.command(&mut random, round);
    }
    twins.both(&[b"DBSIZE"]);
    let same_data = |fast: &Server, own: &Server| {
        assert_eq!(fast.digest().unwrap(), own.digest().unwrap(), "{kind}, seed {seed}");
    };
    same_data(&fast, &own);
    twins.both(&[b"DEBUG", b"RELOAD"]);
    same_data(&fast, &own);
    twins.both(&[b"SWAPDB", b"0", b"1"]);
    same_data(&fast, &own);
    twins.both(&[b"SELECT", b"1"]);
    twins.both(&[b"FLUSHDB", b"ASYNC"]);
    twins.both(&[b"FLUSHALL", b"SYNC"]);
    twins.both(&[b"DBSIZE"]);
}

struct Twins {
    kind: Kind,
    seed: u64,
    fast: Client,
    own: Client,
    names: Vec<Vec<u8>>,
}

impl Twins {
    fn both(&mut self, command: &[&[u8]]) {
        let answer = |client: &mut Client| match client.call(command) {
            // Tables have another order in each process.
            Ok(Frame::Array(mut items)) if matches!(command[0], b"SMEMBERS" | b"HGETALL") => {
                items.sort_by(|one, other| one.as_bytes().cmp(&other.as_bytes()));
                Ok(Frame::Array(items))
            }
            answer => answer.map_err(|error| error.to_string()),
        };
        let (fast, own) = (answer(&mut self.fast), answer(&mut self.own));
        assert_eq!(fast, own, "{}, seed {}: {command:?}", self.kind, self.seed);
    }

    fn command(&mut self, random: &mut Random, round: u64) {
        let mut pick = || self.names[random.below(self.names.len() as u64) as usize].clone();
        let (name, more) = (pick(), pick());
        let (name, more) = (name.as_slice(), more.as_slice());
        let [small, number, score] = [12, 300, 1000].map(|below| random.below(below).to_string());
        let (small, number, score) = (small.as_bytes(), number.as_bytes(), score.as_bytes());
        let new = format!("new {round}");
        let id = format!("{}-1", round + 1);
        match random.below(54) {
            0 => self.both(&[b"DEL", name]),
            1 => self.both(&[b"SET", name, more]),
            2 => self.both(&[b"APPEND", name, more]),
            3 => self.both(&[b"SETRANGE", name, number, b"range"]),
            4 => self.both(&[b"RENAME", name, more]),
            5 => self.both(&[b"COPY", name, more, b"REPLACE"]),
            6 => self.both(&[b"PEXPIREAT", name, b"4102444800000"]),
            7 => self.both(&[b"PERSIST", name]),
            8 => self.both(&[b"INCR", name]),
            9 => self.both(&[b"SET", new.as_bytes(), b"new"]),
            10 => self.both(&[b"GETDEL", more]),
            11 => self.both(&[b"MOVE", name, b"1"]),
            12 => self.both(&[b"UNLINK", name, more]),
            13 => self.both(&[b"SETBIT", name, number, b"1"]),
            14 => self.both(&[b"PEXPIRETIME", name]),
            15 => self.both(&[b"TYPE", name]),
            16 => self.both(&[b"OBJECT", b"ENCODING", name]),
            17 => self.both(&[b"HSET", name, small, more]),
            18 => self.both(&[b"HDEL", name, small, b"field", b"0 "]),
            19 => self.both(&[b"HGETALL", name]),
            20 => self.both(&[b"HINCRBY", name, small, number]),
            21 => self.both(&[b"HLEN", name]),
            22 => self.both(&[b"HSETNX", name, more, number]),
            23 => self.both(&[b"RPUSH", name, more, small]),
            24 => self.both(&[b"LPUSH", name, number]),
            25 => self.both(&[b"LPOP", name]),
            26 => self.both(&[b"RPOP", name, b"2"]),
            27 => self.both(&[b"LRANGE", name, b"0", b"-1"]),
            28 => self.both(&[b"LINSERT", name, b"BEFORE", small, more]),
            29 => self.both(&[b"LSET", name, small, more]),
            30 => self.both(&[b"LREM", name, b"0", small]),
            31 => self.both(&[b"LINDEX", name, small]),
            32 => self.both(&[b"LTRIM", name, b"0", number]),
            33 => self.both(&[b"LMOVE", name, more, b"LEFT", b"RIGHT"]),
            34 => self.both(&[b"SADD", name, small, number]),
            35 => self.both(&[b"SADD", name, more]),
            36 => self.both(&[b"SREM", name, small, more]),
            37 => self.both(&[b"SMEMBERS", name]),
            38 => self.both(&[b"SISMEMBER", name, small]),
            39 => self.both(&[b"SINTERSTORE", more, name, more]),
            40 => self.both(&[b"SUNIONSTORE", more, name, more]),
            41 => self.both(&[b"SDIFFSTORE", more, name, more]),
            42 => self.both(&[b"SMOVE", name, more, small]),
            43 => self.both(&[b"ZADD", name, score, small, number, more]),
            44 => self.both(&[b"ZREM", name, small, more]),
            45 => self.both(&[b"ZRANGE", name, b"0", b"-1", b"WITHSCORES"]),
            46 => self.both(&[b"ZINCRBY", name, score, small]),
            47 => self.both(&[b"ZREVRANK", name, small]),
            48 => self.both(&[b"ZREMRANGEBYRANK", name, b"0", b"1"]),
            49 => self.both(&[b"ZUNIONSTORE", more, b"2", name, more]),
            50 => self.both(&[b"ZPOPMAX", name]),
            51 => self.both(&[b"XADD", name, id.as_bytes(), b"field", more]),
            52 => self.both(&[b"XRANGE", name, b"-", b"+"]),
            _ => self.both(&[b"GET", name]),
        }
        if round.is_multiple_of(20) {
            self.both(&[
                [b"HSET".as_slice(), b"RPUSH", b"SADD", b"ZADD"][(round / 20 % 4) as usize],
                new.as_bytes(),
                small,
                number,
            ]);
            self.names.push(new.into_bytes());
        }
    }
}

mod asserting {
    //! Servers that check themselves, by assertions and by AddressSanitizer, after a load in the fast way: `make asserting`.
    //!
    //! Such a server ends at the first fault, and says why in its log.

    use remora_lab::server::wait_until;
    use remora_lab::{Client, Kind, Server, require};

    use crate::LONG;
    use crate::fast::{mixed, pair, records};

    mod by_command {
        use super::*;

        #[test]
        #[ignore = "needs servers that check themselves: make asserting"]
        fn a_server_that_checks_itself_finds_nothing_to_object_to() {
            for kind in require::kinds() {
                let parts = [(0, mixed(kind, 31, 6_000)), (2, records(32, 3_000))];
                let (fast, own) = pair(kind, &[], &parts);
                for server in [&fast, &own] {
                    let client = &mut server.client().unwrap();
                    client.ok(&["REPLICAOF", "NO", "ONE"]).unwrap();
                    drive(kind, client, server);
                }
                assert_eq!(fast.digest().unwrap(), own.digest().unwrap(), "{kind}");
                for server in [fast, own] {
                    server.client().unwrap().ok(&["FLUSHALL", "ASYNC"]).unwrap();
                    let complaint = |log: &str| log.contains("AddressSanitizer") || log.contains("ASSERTION FAILED");
                    assert!(!complaint(&server.log()), "{kind}: {}", server.log());
                }
            }
        }
    }

    /// What servers do with their tables, all of it.
    fn drive(kind: Kind, client: &mut Client, server: &Server) {
        let before = server.digest().unwrap();
        for database in ["0", "2"] {
            let statistics = client.text(&["DEBUG", "HTSTATS", database]).unwrap();
            assert!(statistics.contains("number of e"), "{kind}: {statistics}");
        }
        client.ok(&["DEBUG", "RELOAD"]).unwrap();
        assert_eq!(server.digest().unwrap(), before, "{kind}");
        // Servers with another allocator than jemalloc refuse it.
        let _ = client.ok(&["CONFIG", "SET", "activedefrag", "yes"]);
        // Tables grow while keys are looked up, and shrink when most keys are gone. (Eviction and expiry are in `fast`.)
        for command in ["SET", "GET", "DEL"] {
            for number in 0..FILLERS {
                let name = format!("filler {number}");
                let words = if command == "SET" { vec![command, &name, "x"] } else { vec![command, &name] };
                client.queue(&words);
            }
            client.flush().unwrap();
            for _ in 0..FILLERS {
                client.receive().unwrap();
            }
        }
        wait_until("the table to shrink", LONG, || {
            let statistics = client.text(&["DEBUG", "HTSTATS", "0"])?;
            Ok(if statistics.contains("rehashing target") { Err(statistics) } else { Ok(()) })
        })
        .unwrap();
        assert_eq!(server.digest().unwrap(), before, "{kind}: the same keys");
        client.ok(&["SWAPDB", "0", "2"]).unwrap();
        client.ok(&["SWAPDB", "0", "2"]).unwrap();
    }

    /// Keys that only fill the tables.
    const FILLERS: usize = 40_000;
}

mod defragmenting {
    //! Active defragmentation of keys that were loaded in the fast way: `make asserting`, with `--defragment`.
    //!
    //! The server moves keys, values and tables to other memory, one after the other, while the keys stay. It needs a server
    //! with a jemalloc of its own, which no package of a distribution has.

    use remora_lab::server::wait_until;
    use remora_lab::{Random, Server, require};

    use crate::LONG;
    use crate::fast::{mixed, names, pair};

    /// Strings in the data set, of which most are deleted.
    const STRINGS: usize = 60_000;

    fn number(server: &Server, name: &str) -> u64 {
        server.fact(name).unwrap().parse().unwrap()
    }

    mod by_command {
        use super::*;

        #[test]
        #[ignore = "needs servers with a jemalloc of their own: make asserting, with --defragment"]
        fn keys_of_a_fast_load_outlive_defragmentation() {
            let mut tried = 0;
            for kind in require::kinds() {
                let settings = [
                    ("active-defrag-ignore-bytes", "1"),
                    ("active-defrag-threshold-lower", "1"),
                    ("active-defrag-cycle-min", "20"),
                    ("active-defrag-cycle-max", "60"),
                ];
                let can = Server::start(kind).unwrap().configure("activedefrag", "yes").is_ok();
                if !can {
                    continue;
                }
                tried += 1;
                let (fast, own) = pair(kind, &settings, &[(0, mixed(kind, 41, STRINGS))]);
                let mut random = Random::new(42);
                let mut all = names(&own);
                all.sort_unstable();
                for server in [&fast, &own] {
                    server.client().unwrap().ok(&["REPLICAOF", "NO", "ONE"]).unwrap();
                }
                // Three quarters of the keys go, and leave holes everywhere.
                let gone: Vec<Vec<u8>> = all.into_iter().filter(|_| !random.one_in(4)).collect();
                for server in [&fast, &own] {
                    let mut client = server.client().unwrap();
                    for name in &gone {
                        assert_eq!(client.int(&[b"DEL".as_slice(), name]).unwrap(), 1);
                    }
                }
                let before = own.digest().unwrap();
                assert_eq!(fast.digest().unwrap(), before, "{kind}");
                for server in [&fast, &own] {
                    server.configure("activedefrag", "yes").unwrap();
                    wait_until("keys to be moved", LONG, || {
                        let moved = number(server, "active_defrag_hits");
                        Ok(if moved > 1000 { Ok(()) } else { Err(format!("{moved} were moved")) })
                    })
                    .unwrap();
                    // With a threshold of one percent it never ends: every key has its turn twice.
                    let keys = server.client().unwrap().int(&["DBSIZE"]).unwrap().unsigned_abs();
                    wait_until("two turns of all keys", LONG, || {
                        let turns =
                            number(server, "active_defrag_key_hits") + number(server, "active_defrag_key_misses");
                        Ok(if turns >= 2 * keys { Ok(()) } else { Err(format!("{turns} turns of {keys} keys")) })
                    })
                    .unwrap();
                    server.configure("activedefrag", "no").unwrap();
                    let moved = number(server, "active_defrag_key_hits");
                    println!("{kind}: {moved} of {keys} keys were moved");
                    assert!(moved > 100, "{kind}: {moved}");
                    assert_eq!(server.digest().unwrap(), before, "{kind}: the same keys");
                    let mut client = server.client().unwrap();
                    client.ok(&["DEBUG", "RELOAD"]).unwrap();
                    assert_eq!(server.digest().unwrap(), before, "{kind}: the same keys");
                    client.ok(&["FLUSHALL", "ASYNC"]).unwrap();
                    assert!(!server.log().contains("ASSERTION FAILED"), "{kind}: {}", server.log());
                }
            }
            assert!(tried > 0, "no server here can defragment");
        }
    }
}
