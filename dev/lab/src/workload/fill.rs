//! A data set with every type in every encoding, and with every byte in keys and values.
//!
//! It is small (a few MiB) and the same for the same seed: errors of a copy show here first.

use super::Abilities;
use super::commands::{Commands, say};
use crate::client::Client;
use crate::error::Result;
use crate::random::Random;

/// Fills the databases 0 to 15 with every type. Returns the number of keys in all of them.
pub fn fill_every_type(client: &mut Client, seed: u64) -> Result<u64> {
    let abilities = Abilities::of(client)?;
    fill_with(client, seed, abilities)
}

/// The same with these features only.
pub fn fill_with(client: &mut Client, seed: u64, abilities: Abilities) -> Result<u64> {
    let mut random = Random::new(seed);
    let mut commands = Commands::default();
    for database in 0..DATABASES {
        say!(commands, "SELECT", database);
        small_set(&mut commands, database);
    }
    // The whole collection twice: in database 0, which most tests look at, and in the last one.
    for database in [0, DATABASES - 1] {
        say!(commands, "SELECT", database);
        strings(&mut commands, &mut random);
        lists(&mut commands, &mut random);
        sets(&mut commands, &mut random);
        sorted_sets(&mut commands, &mut random);
        hashes(&mut commands, &mut random, abilities);
        streams(&mut commands, abilities);
        special_strings(&mut commands, &mut random);
        commands.run_all(client)?;
    }
    functions(&mut commands, abilities);
    say!(commands, "SELECT", 0_u32);
    commands.run_all(client)?;
    key_count(client)
}

/// The number of keys in all databases.
pub fn key_count(client: &mut Client) -> Result<u64> {
    let keyspace = client.info("keyspace")?;
    let keys = |line: &str| line.strip_prefix("keys=")?.split(',').next()?.parse::<u64>().ok();
    Ok(keyspace.iter().filter(|(name, _)| name.starts_with("db")).filter_map(|(_, line)| keys(line)).sum())
}

/// The same names with other values in each database: a copy that loses a SELECT differs.
fn small_set(commands: &mut Commands, database: u32) {
    say!(commands, "SET", "database", database);
    say!(commands, "RPUSH", "path", "from", database, "to", database + 1);
    say!(commands, "SET", format!("only-in-{database}"), "here");
}

fn strings(commands: &mut Commands, random: &mut Random) {
    say!(commands, "SET", "string:int", 12_345_u64);
    say!(commands, "SET", "string:int:least", i64::MIN);
    say!(commands, "SET", "string:int:most", i64::MAX);
    say!(commands, "SET", "string:not-quite-int", "9223372036854775808");
    say!(commands, "SET", "string:embstr", "x".repeat(44));
    say!(commands, "SET", "string:raw", "x".repeat(1000));
    say!(commands, "SET", "string:empty", "");
    say!(commands, "SET", "string:compressible", "ab".repeat(50_000));
    say!(commands, "SET", "string:noise", random.bytes(1 << 20));
    say!(commands, "APPEND", "string:appended", "grown");
    say!(commands, "APPEND", "string:appended", " later");
    say!(commands, "SETRANGE", "string:hole", 1000_u32, "after a thousand zeros");

    let every_byte: Vec<u8> = (0..=u8::MAX).collect();
    say!(commands, "SET", &every_byte, &every_byte);
    for byte in 0..=u8::MAX {
        say!(commands, "SET", vec![byte], vec![byte; 3]);
    }
    for strange in
        ["", "\r\n", "a\0b", "$5\r\nhello\r\n", "*1\r\n$4\r\nPING\r\n", "naïve 鯨", "key with spaces \" and '"]
    {
        say!(commands, "SET", strange, strange);
    }
    say!(commands, "SET", "k".repeat(10_000), "a long name");

    say!(commands, "SET", "expires:late", "in 2100", "PXAT", YEAR_2100_MS);
    say!(commands, "SET", "expires:never", "now for good", "PXAT", YEAR_2100_MS);
    say!(commands, "PERSIST", "expires:never");
    for number in 0..50_u64 {
        say!(commands, "SET", format!("expires:{number}"), number, "PXAT", YEAR_2100_MS + number * 977);
    }
}

fn lists(commands: &mut Commands, random: &mut Random) {
    say!(commands, "RPUSH", "list:listpack", "a", "", "-1", "12345678901", "z");
    commands.push_with(&["RPUSH", "list:quicklist"], (0..3000).map(|n: u32| format!("item {n}").into_bytes()));
    say!(commands, "RPUSH", "list:big-item", "before", random.bytes(64 << 10), "after");
    say!(commands, "RPUSH", "list:popped", 1_u32, 2_u32, 3_u32);
    say!(commands, "LPOP", "list:popped");
    say!(commands, "RPUSH", "list:expires", "x");
    say!(commands, "PEXPIREAT", "list:expires", YEAR_2100_MS);
}

fn sets(commands: &mut Commands, random: &mut Random) {
    for (name, base) in [("16", 0_i64), ("32", 1 << 20), ("64", 1 << 40)] {
        let members = (0..100).map(|n| (base + n * 7 - 300).to_string().into_bytes());
        commands.push_with(&["SADD", &format!("set:intset:{name}")], members);
    }
    say!(commands, "SADD", "set:listpack", "a", "b", "", "17");
    commands.push_with(&["SADD", "set:hashtable"], (0..1000).map(|n: u32| format!("member {n}").into_bytes()));
    say!(commands, "SADD", "set:long-member", random.bytes(5000));
}

fn sorted_sets(commands: &mut Commands, random: &mut Random) {
    say!(commands, "ZADD", "zset:listpack", 1.5, "a", "-inf", "least", "+inf", "most", 1e300, "far", 0_u32, "zero");
    say!(commands, "ZADD", "zset:precise", "0.1", "tenth", "0.30000000000000004", "sum", "-0.0", "minus zero");
    let scored = |n: u64, random: &mut Random| {
        let score = random.below(1 << 40) as f64 / 1000.0;
        [score.to_string().into_bytes(), format!("member {n}").into_bytes()]
    };
    let members: Vec<Vec<u8>> = (0..1000).flat_map(|n| scored(n, random)).collect();
    commands.push_with(&["ZADD", "zset:skiplist"], members);
    say!(commands, "GEOADD", "geo", "13.361389", "38.115556", "Palermo", "15.087269", "37.502669", "Catania");
}

fn hashes(commands: &mut Commands, random: &mut Random, abilities: Abilities) {
    say!(commands, "HSET", "hash:listpack", "field", "value", "", "", "number", "-42");
    let fields = (0..2000).map(|n: u32| format!("word {n}").into_bytes());
    commands.push_with(&["HSET", "hash:hashtable"], fields);
    say!(commands, "HSET", "hash:long-value", "noise", random.bytes(10_000), "short", "x");
    if abilities.hash_field_expiry {
        say!(commands, "HSET", "hash:expiring", "stays", "1", "goes", "2", "goes too", "3");
        say!(commands, "HPEXPIREAT", "hash:expiring", YEAR_2100_MS, "FIELDS", "2", "goes", "goes too");
        commands.push_with(&["HSET", "hash:expiring:big"], (0..2000).map(|n: u32| format!("word {n}").into_bytes()));
        say!(commands, "HPEXPIREAT", "hash:expiring:big", YEAR_2100_MS, "FIELDS", "1", "word 0");
    }
}

fn streams(commands: &mut Commands, abilities: Abilities) {
    for number in 1..=500_u64 {
        say!(commands, "XADD", "stream", format!("{}-{number}", 1_000 + number), "number", number, "text", "entry");
    }
    say!(commands, "XDEL", "stream", "1100-100", "1101-101", "1500-500");
    say!(commands, "XGROUP", "CREATE", "stream", "readers", 0_u32);
    say!(commands, "XGROUP", "CREATE", "stream", "idle", "$");
    say!(commands, "XGROUP", "CREATECONSUMER", "stream", "readers", "never read");
    for consumer in ["ann", "bob"] {
        say!(commands, "XREADGROUP", "GROUP", "readers", consumer, "COUNT", 20_u32, "STREAMS", "stream", ">");
    }
    say!(commands, "XACK", "stream", "readers", "1001-1", "1025-25");
    say!(commands, "XADD", "stream:emptied", "1-1", "a", "b");
    say!(commands, "XDEL", "stream:emptied", "1-1");
    say!(commands, "XGROUP", "CREATE", "stream:made", "group", "$", "MKSTREAM");
    say!(commands, "XADD", "stream:other-fields", "5-1", "a", "1");
    say!(commands, "XADD", "stream:other-fields", "5-2", "b", "2", "c", "3");
    // Redis counts what was added to a stream since 7.0, which brought functions too.
    match abilities.functions {
        true => say!(commands, "XSETID", "stream:other-fields", "9-0", "ENTRIESADDED", 12_u32, "MAXDELETEDID", "4-4"),
        false => say!(commands, "XSETID", "stream:other-fields", "9-0"),
    }
}

/// Strings with a structure that some commands use.
fn special_strings(commands: &mut Commands, random: &mut Random) {
    say!(commands, "PFADD", "hll:sparse", "a", "b", "c");
    commands.push_with(&["PFADD", "hll:dense"], (0..20_000).map(|n: u32| format!("visitor {n}").into_bytes()));
    say!(commands, "SETBIT", "bitmap", 100_000_u32, 1_u32);
    say!(commands, "BITFIELD", "bitfield", "SET", "u8", "#0", "200", "INCRBY", "i64", "#2", random.below(1 << 40));
}

fn functions(commands: &mut Commands, abilities: Abilities) {
    if abilities.functions {
        for library in ["first", "second"] {
            say!(commands, "FUNCTION", "LOAD", "REPLACE", library_code(library));
        }
    }
}

/// A library with one function that sets a key.
pub(super) fn library_code(name: &str) -> String {
    format!(
        "#!lua name={name}\nredis.register_function('{name}_set', function(keys, args) return \
         redis.call('SET', keys[1], args[1]) end)\n"
    )
}

/// The servers' default number of databases.
pub(super) const DATABASES: u32 = 16;

/// Later than any test. Absolute, so that two fills with the same seed are equal.
const YEAR_2100_MS: u64 = 4_102_444_800_000;
