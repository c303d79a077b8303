//! The writer's operations: one function for each way to change a server, drawn by weight.
//!
//! Each type has its own key names, so that few commands are refused for the wrong type. Each key is kept small by an
//! operation that shrinks it again: a writer that runs for an hour leaves a data set of the same size as one that runs
//! for a minute.

use super::Abilities;
use super::{Commands, say};
use super::{DATABASES, library_code};
use crate::random::Random;

/// One way to change a server.
pub(super) struct Operation {
    pub(super) name: &'static str,
    /// Weight of the operation in the draw.
    weight: u64,
    write: fn(&mut Script),
}

/// The operations that a server with these features supports.
pub(super) fn operations(abilities: Abilities, flush: bool, big_bytes: u64) -> Vec<&'static Operation> {
    let fits = |operation: &&Operation| match operation.name {
        "hash-field-expiry" => abilities.hash_field_expiry,
        "hash-float" => abilities.adds_to_fields(),
        "stream-group" => abilities.counts_of_groups,
        "function" => abilities.functions,
        "flush" | "swap" => flush,
        "big" => big_bytes > 0,
        _ => true,
    };
    OPERATIONS.iter().filter(fits).collect()
}

/// Draws an operation by weight.
pub(super) fn draw(from: &[&'static Operation], random: &mut Random) -> &'static Operation {
    let mut point = random.below(from.iter().map(|operation| operation.weight).sum());
    for operation in from {
        match point.checked_sub(operation.weight) {
            Some(rest) => point = rest,
            None => return operation,
        }
    }
    &OPERATIONS[0]
}

/// What the writer knows while it generates commands.
pub(super) struct Script {
    pub(super) commands: Commands,
    pub(super) random: Random,
    /// The database that the connection has selected.
    database: u32,
    big_bytes: u64,
    now_ms: u64,
}

impl Script {
    pub(super) fn new(seed: u64, big_bytes: u64) -> Script {
        Script { commands: Commands::default(), random: Random::new(seed), database: 0, big_bytes, now_ms: 0 }
    }

    /// Generates the commands of one operation.
    pub(super) fn write(&mut self, operation: &Operation, now_ms: u64) {
        self.now_ms = now_ms;
        (operation.write)(self);
    }

    fn key(&mut self, prefix: &str) -> String {
        format!("{prefix}:{}", self.random.below(KEYS))
    }

    fn member(&mut self) -> String {
        format!("member {}", self.random.below(MEMBERS))
    }

    fn value(&mut self) -> Vec<u8> {
        let most = match self.random.below(100) {
            0 => 64 << 10,
            1..10 => 4 << 10,
            _ => 200,
        };
        let length = self.random.below(most + 1);
        self.random.bytes(length as usize)
    }

    /// A time to live: mostly short, so that keys expire while the test runs.
    fn milliseconds(&mut self) -> u64 {
        let most = if self.random.one_in(4) { 100_000 } else { 500 };
        self.random.between(1, most)
    }

    fn pick<'a>(&mut self, words: &[&'a str]) -> &'a str {
        words[self.random.below(words.len() as u64) as usize]
    }
}

const fn operation(name: &'static str, weight: u64, write: fn(&mut Script)) -> Operation {
    Operation { name, weight, write }
}

/// All operations, the most frequent first.
const OPERATIONS: &[Operation] = &[
    operation("set", 3000, set),
    operation("expire", 1500, expire),
    operation("delete", 600, delete),
    operation("count", 500, count),
    operation("list", 800, list),
    operation("hash", 700, hash),
    operation("hash-float", 100, hash_float),
    operation("set-type", 800, set_type),
    operation("random-pick", 400, random_pick),
    operation("sorted-set", 800, sorted_set),
    operation("stream", 600, stream),
    operation("stream-group", 400, stream_group),
    operation("append", 300, append),
    operation("bits", 300, bits),
    operation("hyperloglog", 200, hyperloglog),
    operation("geo", 200, geo),
    operation("rename", 200, rename),
    operation("copy-move", 200, copy_and_move),
    operation("store", 100, store),
    operation("transaction", 400, transaction),
    operation("lua", 400, lua),
    operation("hash-field-expiry", 300, hash_field_expiry),
    operation("function", 50, function),
    operation("select", 400, select),
    operation("flush", 2, flush),
    operation("swap", 2, swap),
    operation("big", 2, big),
];

fn set(script: &mut Script) {
    let (key, value) = (script.key("string"), script.value());
    match script.random.below(10) {
        0 => say!(script.commands, "MSET", key, value, "string:pair", "x"),
        1 => say!(script.commands, "SETNX", key, value),
        2 => say!(script.commands, "SET", key, value, "KEEPTTL"),
        3 => say!(script.commands, "GETSET", key, value),
        _ => say!(script.commands, "SET", key, value),
    }
}

fn expire(script: &mut Script) {
    let (key, value, ms) = (script.key("string"), script.value(), script.milliseconds());
    let at = script.now_ms + ms;
    match script.random.below(8) {
        0 => say!(script.commands, "SET", key, value, "EX", ms / 1000 + 1),
        1 | 2 => say!(script.commands, "SET", key, value, "PX", ms),
        3 => say!(script.commands, "SET", key, value, "PXAT", at),
        4 => say!(script.commands, "PEXPIREAT", key, at),
        5 => say!(script.commands, "PEXPIRE", script.key("hash"), ms),
        6 => say!(script.commands, "GETEX", key, "PX", ms),
        _ => say!(script.commands, "PERSIST", key),
    }
}

fn delete(script: &mut Script) {
    let prefix = script.pick(&["string", "list", "hash", "set", "zset", "stream", "bits", "hll", "geo", "append"]);
    let (one, other) = (script.key(prefix), script.key(prefix));
    match script.random.below(3) {
        0 => say!(script.commands, "DEL", one, other),
        1 => say!(script.commands, "UNLINK", one, other),
        _ => say!(script.commands, "GETDEL", script.key("string")),
    }
}

fn count(script: &mut Script) {
    match script.random.below(3) {
        0 => say!(script.commands, "INCR", script.key("int")),
        1 => say!(script.commands, "DECRBY", script.key("int"), script.random.below(1 << 30)),
        _ => say!(script.commands, "INCRBYFLOAT", script.key("float"), "0.1"),
    }
}

fn list(script: &mut Script) {
    let (key, value) = (script.key("list"), script.value());
    match script.random.below(8) {
        0 | 1 => say!(script.commands, "RPUSH", key, value, "tail"),
        2 => say!(script.commands, "LPUSH", key, value, "head"),
        3 => say!(script.commands, "LTRIM", key, 0_u32, 100_u32),
        4 => say!(script.commands, "LPOP", key, 3_u32),
        5 => say!(script.commands, "LINSERT", key, "BEFORE", "tail", value),
        6 => say!(script.commands, "LMOVE", key, script.key("list"), "LEFT", "RIGHT"),
        _ => say!(script.commands, "LREM", key, 1_u32, "tail"),
    }
}

fn hash(script: &mut Script) {
    let (key, field, value) = (script.key("hash"), script.member(), script.value());
    match script.random.below(5) {
        0..3 => say!(script.commands, "HSET", key, field, value, "always", "here"),
        3 => say!(script.commands, "HINCRBY", key, "counter", 1_u32),
        // One field each: Valkey's replicas differ from their primary after an HDEL of a live field and of one that has
        // expired but is still stored (https://github.com/valkey-io/valkey/issues/4732).
        _ if script.random.one_in(2) => say!(script.commands, "HDEL", key, field),
        _ => say!(script.commands, "HDEL", key, "always"),
    }
}

fn set_type(script: &mut Script) {
    let (key, member) = (script.key("set"), script.member());
    match script.random.below(5) {
        0 => say!(script.commands, "SADD", script.key("set:int"), script.random.below(500)),
        1 | 2 => say!(script.commands, "SADD", key, member, script.member()),
        3 => say!(script.commands, "SREM", key, member),
        _ => say!(script.commands, "SMOVE", key, script.key("set"), member),
    }
}

/// The result of the server's random choice must reach the replica.
fn random_pick(script: &mut Script) {
    match script.random.below(4) {
        0 => say!(script.commands, "SPOP", script.key("set")),
        1 => say!(script.commands, "SPOP", script.key("set"), 5_u32),
        2 => say!(script.commands, "SRANDMEMBER", script.key("set"), 3_u32),
        _ => say!(script.commands, "EVAL", POP_AND_KEEP, 2_u32, script.key("set"), script.key("set")),
    }
}

fn sorted_set(script: &mut Script) {
    let (key, member) = (script.key("zset"), script.member());
    let score = script.random.below(1 << 30) as f64 / 1024.0;
    match script.random.below(6) {
        0..3 => say!(script.commands, "ZADD", key, score, member),
        3 => say!(script.commands, "ZINCRBY", key, "0.1", member),
        4 => say!(script.commands, "ZPOPMIN", key, 2_u32),
        _ => say!(script.commands, "ZREMRANGEBYRANK", key, 50_u32, "-1"),
    }
}

fn stream(script: &mut Script) {
    let (key, value) = (script.key("stream"), script.value());
    match script.random.below(6) {
        0..4 => say!(script.commands, "XADD", key, "MAXLEN", "~", 100_u32, "*", "field", value),
        4 => say!(script.commands, "XTRIM", key, "MAXLEN", 50_u32),
        // A script deletes the first entry, because only the server knows its id.
        _ => say!(script.commands, "EVAL", DELETE_FIRST_ENTRY, 1_u32, key),
    }
}

fn hash_float(script: &mut Script) {
    let key = script.key("hash");
    say!(script.commands, "HINCRBYFLOAT", key, "balance", "1.25");
}

fn stream_group(script: &mut Script) {
    let key = script.key("stream:group");
    let reader = script.pick(&["ann", "bob", "eve"]);
    match script.random.below(6) {
        // Refused with BUSYGROUP if the group exists.
        0 => say!(script.commands, "XGROUP", "CREATE", key, "group", "$", "MKSTREAM"),
        1 | 2 => {
            say!(script.commands, "EVAL", ADD_WITH_GROUP, 1_u32, &key);
            say!(script.commands, "XREADGROUP", "GROUP", "group", reader, "COUNT", 3_u32, "STREAMS", key, ">");
        }
        3 => say!(script.commands, "EVAL", ACKNOWLEDGE_OLDEST, 1_u32, key),
        4 => say!(script.commands, "EVAL", CLAIM_OLDEST, 1_u32, key),
        _ => say!(script.commands, "XTRIM", key, "MAXLEN", 20_u32),
    }
}

fn append(script: &mut Script) {
    let (key, value) = (script.key("append"), script.value());
    match script.random.below(6) {
        0..3 => say!(script.commands, "APPEND", key, value),
        3 | 4 => say!(script.commands, "SETRANGE", key, script.random.below(16 << 10), value),
        // Short again: no other operation shortens it.
        _ => say!(script.commands, "SET", key, "short"),
    }
}

fn bits(script: &mut Script) {
    let key = script.key("bits");
    match script.random.below(3) {
        0 => say!(script.commands, "SETBIT", key, script.random.below(1 << 16), script.random.below(2)),
        1 => say!(script.commands, "BITFIELD", key, "INCRBY", "i32", "#3", 7_u32),
        _ => say!(script.commands, "BITOP", "XOR", script.key("bits"), key, script.key("bits")),
    }
}

fn hyperloglog(script: &mut Script) {
    let key = script.key("hll");
    match script.random.below(4) {
        0..3 => say!(script.commands, "PFADD", key, script.random.word(), script.random.word()),
        _ => say!(script.commands, "PFMERGE", key, script.key("hll")),
    }
}

fn geo(script: &mut Script) {
    let longitude = script.random.below(360_000) as f64 / 1000.0 - 180.0;
    let latitude = script.random.below(170_000) as f64 / 1000.0 - 85.0;
    let (key, member) = (script.key("geo"), script.member());
    say!(script.commands, "GEOADD", key, longitude, latitude, member);
}

fn rename(script: &mut Script) {
    let prefix = script.pick(&["string", "list", "hash", "set", "zset"]);
    // Refused if the key does not exist.
    say!(script.commands, "RENAME", script.key(prefix), script.key(prefix));
}

fn copy_and_move(script: &mut Script) {
    let prefix = script.pick(&["string", "list", "hash", "zset", "stream"]);
    let (key, other) = (script.key(prefix), script.key(prefix));
    let elsewhere = (script.database + 1 + script.random.below(u64::from(DATABASES) - 1) as u32) % DATABASES;
    match script.random.below(3) {
        0 => say!(script.commands, "COPY", key, other, "REPLACE"),
        1 => say!(script.commands, "COPY", key, other, "DB", elsewhere, "REPLACE"),
        _ => say!(script.commands, "MOVE", key, elsewhere),
    }
}

fn store(script: &mut Script) {
    match script.random.below(4) {
        0 => say!(script.commands, "SUNIONSTORE", script.key("set"), script.key("set"), script.key("set")),
        1 => say!(script.commands, "ZUNIONSTORE", script.key("zset"), 2_u32, script.key("zset"), script.key("zset")),
        2 => say!(script.commands, "SINTERSTORE", script.key("set"), script.key("set"), script.key("set")),
        _ => say!(
            script.commands,
            "SORT",
            script.key("list"),
            "ALPHA",
            "LIMIT",
            0_u32,
            50_u32,
            "STORE",
            script.key("list")
        ),
    }
}

fn transaction(script: &mut Script) {
    const WITHIN: [fn(&mut Script); 6] = [set, expire, list, hash, sorted_set, random_pick];
    say!(script.commands, "MULTI");
    for _ in 0..script.random.between(1, 5) {
        let write = WITHIN[script.random.below(WITHIN.len() as u64) as usize];
        write(script);
    }
    // One in ten is discarded, and nothing of it may arrive.
    say!(script.commands, if script.random.one_in(10) { "DISCARD" } else { "EXEC" });
}

fn lua(script: &mut Script) {
    let (one, other, value) = (script.key("string"), script.key("int"), script.value());
    say!(script.commands, "EVAL", SET_AND_COUNT, 2_u32, one, other, value);
}

fn hash_field_expiry(script: &mut Script) {
    let (key, field, ms) = (script.key("hash"), script.member(), script.milliseconds());
    match script.random.below(4) {
        0 => say!(script.commands, "HPERSIST", key, "FIELDS", 1_u32, field),
        1 => say!(script.commands, "HEXPIRE", key, ms / 1000 + 1, "FIELDS", 1_u32, "always"),
        _ => {
            say!(script.commands, "HSET", &key, &field, "soon gone");
            say!(script.commands, "HPEXPIRE", key, ms, "FIELDS", 1_u32, field);
        }
    }
}

fn function(script: &mut Script) {
    let name = format!("library_{}", script.random.below(4));
    match script.random.below(5) {
        0 => say!(script.commands, "FUNCTION", "DELETE", name),
        _ => {
            say!(script.commands, "FUNCTION", "LOAD", "REPLACE", library_code(&name));
            say!(script.commands, "FCALL", format!("{name}_set"), 1_u32, script.key("string"), "by a function");
        }
    }
}

fn select(script: &mut Script) {
    script.database = script.random.below(u64::from(DATABASES)) as u32;
    say!(script.commands, "SELECT", script.database);
}

/// Empties one database, never the first: tests keep there what must survive.
fn flush(script: &mut Script) {
    say!(script.commands, "SELECT", script.random.between(1, u64::from(DATABASES) - 1));
    say!(script.commands, "FLUSHDB", script.pick(&["SYNC", "ASYNC"]));
    say!(script.commands, "SELECT", script.database);
}

fn swap(script: &mut Script) {
    let last = u64::from(DATABASES) - 1;
    say!(script.commands, "SWAPDB", script.random.between(1, last), script.random.between(1, last));
}

fn big(script: &mut Script) {
    let (number, length) = (script.random.below(4), script.random.between(1 << 20, script.big_bytes.max(1 << 20)));
    let value = script.random.bytes(length as usize);
    say!(script.commands, "SET", format!("big:{number}"), value);
}

const SET_AND_COUNT: &str = "redis.call('SET', KEYS[1], ARGV[1], 'PX', 100 + redis.call('TIME')[2] % 5000) \
                             return redis.call('INCR', KEYS[2])";
const POP_AND_KEEP: &str = "local member = redis.call('SPOP', KEYS[1]) \
                            if member then redis.call('SADD', KEYS[2], member) end return member";
const DELETE_FIRST_ENTRY: &str = "local first = redis.call('XRANGE', KEYS[1], '-', '+', 'COUNT', 1) \
                                  if first[1] then return redis.call('XDEL', KEYS[1], first[1][1]) end return 0";
const ADD_WITH_GROUP: &str = "redis.pcall('XGROUP', 'CREATE', KEYS[1], 'group', '0', 'MKSTREAM') \
                              return redis.call('XADD', KEYS[1], 'MAXLEN', '~', 50, '*', 'a', 'b')";
const ACKNOWLEDGE_OLDEST: &str = "local waiting = redis.pcall('XPENDING', KEYS[1], 'group', '-', '+', 2) \
                                  if waiting.err or not waiting[1] then return 0 end \
                                  return redis.call('XACK', KEYS[1], 'group', waiting[1][1])";
const CLAIM_OLDEST: &str = "local claimed = redis.pcall('XAUTOCLAIM', KEYS[1], 'group', 'heir', 0, '0', 'COUNT', 2) \
                            if claimed.err then return 0 end return 1";

/// Keys of each type in each database: few enough that every key is used again and again.
const KEYS: u64 = 500;

/// Members and fields in use.
const MEMBERS: u64 = 300;
