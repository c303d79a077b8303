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
