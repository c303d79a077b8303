//! What each command means for a sweep. Pure: a table, and words in.
//!
//! The table has every command that Redis 7.0 to 8.6 and Valkey 8.0 to 9.1 count among those that write (`COMMAND LIST
//! FILTERBY ACLCAT write`), by its first word, and a few others that change what is stored. A server with a command
//! that writes and that is not here is not swept ([`is_known`]). A rule may ask for more than its command needs, and
//! never for less: to settle a key early changes nothing.

use super::large::{End, Touch};

/// What is to be done before a command runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Need {
    /// Nothing: it changes no key, or is not the sweep's concern.
    Nothing,
    /// Its keys must be settled, those that it only reads too, and in every database: `MOVE` and `COPY` write to
    /// another one.
    Keys,
    /// The sweep must end: the command changes keys that it does not name.
    End,
}

/// How a command's need is found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Rule {
    Nothing,
    Keys,
    End,
    /// With `STORE` and `BY` or `GET`, replicas read keys that it does not name, and one that has expired meanwhile may
    /// be missing from the snapshot.
    Sort,
    /// Most of what it does changes keys; what tests and operators look with does not.
    Debug,
}

/// What the command of these words needs. `word`: its words, the name first.
pub(super) fn need<'w>(count: usize, word: impl Fn(usize) -> Option<&'w [u8]>) -> Need {
    let Some(rule) = word(0).and_then(rule_of) else { return Need::Nothing };
    let has = |wanted: &[u8]| (2..count).any(|at| word(at).is_some_and(|word| word.eq_ignore_ascii_case(wanted)));
    match rule {
        Rule::Nothing => Need::Nothing,
        Rule::Keys => Need::Keys,
        Rule::End => Need::End,
        Rule::Sort if has(b"STORE") && (has(b"BY") || has(b"GET")) => Need::End,
        Rule::Sort => Need::Keys,
        Rule::Debug => {
            let what = word(1).unwrap_or_default();
            if HARMLESS.iter().any(|harmless| what.eq_ignore_ascii_case(harmless)) { Need::Nothing } else { Need::End }
        }
    }
}

/// What the command of these words does to a large value that is being taken, if its key is the one key that the
/// command names, or one of those that it may pop from.
pub(super) fn touch<'w>(count: usize, word: impl Fn(usize) -> Option<&'w [u8]>) -> Touch {
    let is = |name: &[u8]| word(0).is_some_and(|word| word.eq_ignore_ascii_case(name));
    let any = |names: &[&[u8]]| names.iter().any(|name| is(name));
    // All that may be an element's name. A word that is none changes nothing: it is no element, or an early one.
    if any(&[b"hset", b"hmset"]) {
        Touch::Elements { first: 2, step: 2 }
    } else if any(&[b"hsetnx", b"hincrby", b"hincrbyfloat", b"hdel", b"sadd", b"srem", b"zadd", b"zincrby", b"zrem"]) {
        Touch::Elements { first: 2, step: 1 }
    } else if any(&[b"lpush", b"lpushx", b"rpush", b"rpushx"]) {
        Touch::Push
    } else if any(&[b"lpop", b"rpop"]) {
        let end = if is(b"lpop") { End::Head } else { End::Tail };
        let elements = word(2).map_or(Some(1), |elements| std::str::from_utf8(elements).ok()?.parse().ok());
        elements.filter(|_| count <= 3).map_or(Touch::All, |elements| Touch::Pop(end, elements))
    } else if is(b"append") {
        Touch::Append
    } else if any(&[b"setrange", b"setbit"]) {
        let from = word(2).and_then(|from| std::str::from_utf8(from).ok()?.parse::<u64>().ok());
        let write = |from: u64| {
            let bytes = word(3).map_or(0, |bytes| bytes.len() as u64);
            if is(b"setbit") { Touch::Write { from: from / 8, bytes: 1 } } else { Touch::Write { from, bytes } }
        };
        from.map_or(Touch::All, write)
    } else if is(b"blpop") {
        Touch::Pop(End::Head, 1)
    } else if is(b"brpop") {
        Touch::Pop(End::Tail, 1)
    } else {
        Touch::All
    }
}

/// Whether the table has this command, or the container of this subcommand (`xgroup|create`).
pub(super) fn is_known(name: &[u8]) -> bool {
    rule_of(name.split(|byte| *byte == b'|').next().unwrap_or_default()).is_some()
}

/// Commands of the table that the servers do not count among those that write.
pub(super) const BESIDES: [&str; 6] = ["debug", "failover", "module", "pfcount", "replicaof", "slaveof"];

/// Whether a client that waits in this command writes, when it goes on, to a key that no other command has named: the
/// sweep sees a command when it is sent, and not again when it goes on.
pub(super) fn writes_unseen(command: &str) -> bool {
    !matches!(
        command.split('|').next().unwrap_or_default(),
        // These take from a key that a command which is seen has just written to, or change none.
        "blpop" | "brpop" | "blmpop" | "bzpopmin" | "bzpopmax" | "bzmpop" | "xread" | "xreadgroup" | "wait" | "waitaof"
    )
}

fn rule_of(name: &[u8]) -> Option<Rule> {
    let mut lower = [0; NAME_BYTES_MAX];
    let lower = lower.get_mut(..name.len())?;
    for (to, from) in lower.iter_mut().zip(name) {
        *to = from.to_ascii_lowercase();
    }
    let at = COMMANDS.binary_search_by(|(known, _)| known.as_bytes().cmp(lower)).ok()?;
    COMMANDS.get(at).map(|(_, rule)| *rule)
}

/// Bytes of the longest name in the table (`zremrangebyscore`, `georadiusbymember`), and some.
const NAME_BYTES_MAX: usize = 20;

/// Subcommands of `DEBUG` that change no key.
const HARMLESS: [&[u8]; 8] =
    [b"DIGEST", b"DIGEST-VALUE", b"HELP", b"HTSTATS", b"JMAP", b"OBJECT", b"SET-ACTIVE-EXPIRE", b"SLEEP"];

/// In the order of their names.
const COMMANDS: &[(&str, Rule)] = &[
    ("append", Rule::Keys),
    ("bitfield", Rule::Keys),
    ("bitop", Rule::Keys),
    ("blmove", Rule::Keys),
    ("blmpop", Rule::Keys),
    ("blpop", Rule::Keys),
    ("brpop", Rule::Keys),
    ("brpoplpush", Rule::Keys),
    ("bzmpop", Rule::Keys),
    ("bzpopmax", Rule::Keys),
    ("bzpopmin", Rule::Keys),
    ("cluster", Rule::Nothing),
    ("copy", Rule::Keys),
    ("debug", Rule::Debug),
    ("decr", Rule::Keys),
    ("decrby", Rule::Keys),
    ("del", Rule::Keys),
    ("delex", Rule::Keys),
    ("delifeq", Rule::Keys),
    ("expire", Rule::Keys),
    ("expireat", Rule::Keys),
    ("failover", Rule::End),
    ("flushall", Rule::End),
    ("flushdb", Rule::End),
    ("function", Rule::Nothing),
    ("geoadd", Rule::Keys),
    ("georadius", Rule::Keys),
    ("georadiusbymember", Rule::Keys),
    ("geosearchstore", Rule::Keys),
    ("getdel", Rule::Keys),
    ("getex", Rule::Keys),
    ("getset", Rule::Keys),
    ("hdel", Rule::Keys),
    ("hexpire", Rule::Keys),
    ("hexpireat", Rule::Keys),
    ("hgetdel", Rule::Keys),
    ("hgetex", Rule::Keys),
    ("hincrby", Rule::Keys),
    ("hincrbyfloat", Rule::Keys),
    ("hmset", Rule::Keys),
    ("hpersist", Rule::Keys),
    ("hpexpire", Rule::Keys),
    ("hpexpireat", Rule::Keys),
    ("hset", Rule::Keys),
    ("hsetex", Rule::Keys),
    ("hsetnx", Rule::Keys),
    ("incr", Rule::Keys),
    ("incrby", Rule::Keys),
    ("incrbyfloat", Rule::Keys),
    ("linsert", Rule::Keys),
    ("lmove", Rule::Keys),
    ("lmpop", Rule::Keys),
    ("lpop", Rule::Keys),
    ("lpush", Rule::Keys),
    ("lpushx", Rule::Keys),
    ("lrem", Rule::Keys),
    ("lset", Rule::Keys),
    ("ltrim", Rule::Keys),
    ("migrate", Rule::Keys),
    ("module", Rule::End),
    ("move", Rule::Keys),
    ("mset", Rule::Keys),
    ("msetex", Rule::Keys),
    ("msetnx", Rule::Keys),
    ("persist", Rule::Keys),
    ("pexpire", Rule::Keys),
    ("pexpireat", Rule::Keys),
    ("pfadd", Rule::Keys),
    ("pfcount", Rule::Keys),
    ("pfdebug", Rule::Keys),
    ("pfmerge", Rule::Keys),
    ("psetex", Rule::Keys),
    ("rename", Rule::Keys),
    ("renamenx", Rule::Keys),
    ("replicaof", Rule::End),
    ("restore", Rule::Keys),
    ("restore-asking", Rule::Keys),
    ("rpop", Rule::Keys),
    ("rpoplpush", Rule::Keys),
    ("rpush", Rule::Keys),
    ("rpushx", Rule::Keys),
    ("sadd", Rule::Keys),
    ("sdiffstore", Rule::Keys),
    ("set", Rule::Keys),
    ("setbit", Rule::Keys),
    ("setex", Rule::Keys),
    ("setnx", Rule::Keys),
    ("setrange", Rule::Keys),
    ("sinterstore", Rule::Keys),
    ("slaveof", Rule::End),
    ("smove", Rule::Keys),
    ("sort", Rule::Sort),
    ("spop", Rule::Keys),
    ("srem", Rule::Keys),
    ("sunionstore", Rule::Keys),
    ("swapdb", Rule::End),
    ("trimslots", Rule::End),
    ("unlink", Rule::Keys),
    ("vadd", Rule::Keys),
    ("vrem", Rule::Keys),
    ("vsetattr", Rule::Keys),
    ("xack", Rule::Keys),
    ("xackdel", Rule::Keys),
    ("xadd", Rule::Keys),
    ("xautoclaim", Rule::Keys),
    ("xcfgset", Rule::Keys),
    ("xclaim", Rule::Keys),
    ("xdel", Rule::Keys),
    ("xdelex", Rule::Keys),
    ("xgroup", Rule::Keys),
    ("xidmprecord", Rule::Keys),
    ("xreadgroup", Rule::Keys),
    ("xsetid", Rule::Keys),
    ("xtrim", Rule::Keys),
    ("zadd", Rule::Keys),
    ("zdiffstore", Rule::Keys),
    ("zincrby", Rule::Keys),
    ("zinterstore", Rule::Keys),
    ("zmpop", Rule::Keys),
    ("zpopmax", Rule::Keys),
    ("zpopmin", Rule::Keys),
    ("zrangestore", Rule::Keys),
    ("zrem", Rule::Keys),
    ("zremrangebylex", Rule::Keys),
    ("zremrangebyrank", Rule::Keys),
    ("zremrangebyscore", Rule::Keys),
    ("zunionstore", Rule::Keys),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[allow(clippy::unwrap_used)]
    fn every_command_that_writes_of_the_labs_servers_is_in_the_table() {
        for kind in remora_lab::require::kinds() {
            let server = remora_lab::Server::start(kind).unwrap();
            let list = server.client().unwrap().list(&["COMMAND", "LIST", "FILTERBY", "ACLCAT", "write"]).unwrap();
            assert!(list.len() > 90, "{kind}");
            for name in list {
                let name = name.as_bytes().unwrap().to_vec();
                assert!(is_known(&name), "{kind}: {}", String::from_utf8_lossy(&name));
            }
        }
    }

    fn of(line: &str) -> Need {
        let words: Vec<&[u8]> = line.split(' ').map(str::as_bytes).collect();
        need(words.len(), |at| words.get(at).copied())
    }

    #[test]
    fn the_table_is_sorted_and_its_names_fit() {
        assert!(COMMANDS.is_sorted_by(|one, other| one.0 < other.0));
        assert!(COMMANDS.iter().all(|(name, _)| name.len() < NAME_BYTES_MAX));
        assert!(BESIDES.iter().all(|name| is_known(name.as_bytes())));
    }

    #[test]
    fn what_a_command_needs_is_found_by_its_words_in_any_case() {
        for line in ["set a b", "ReName a b", "xgroup CREATE s g $ MKSTREAM", "SORT a STORE b", "sort a by get"] {
            assert_eq!(of(line), Need::Keys, "{line}");
        }
        for line in ["GET a", "FUNCTION LOAD x", "DEBUG digest", "publish a b", "a-name-that-is-longer-than-any x"] {
            assert_eq!(of(line), Need::Nothing, "{line}");
        }
        for line in ["FLUSHALL", "swapdb 0 1", "DEBUG RELOAD", "DEBUG", "sort a by w_* get # store b", "MODULE LOAD x"]
        {
            assert_eq!(of(line), Need::End, "{line}");
        }
    }

    #[test]
    fn what_a_command_does_to_a_large_value_is_found_by_its_words() {
        let of = |line: &str| {
            let words: Vec<&[u8]> = line.split(' ').map(str::as_bytes).collect();
            touch(words.len(), |at| words.get(at).copied())
        };
        assert_eq!(of("HSet k f v"), Touch::Elements { first: 2, step: 2 });
        assert_eq!(of("zadd k NX 1 m"), Touch::Elements { first: 2, step: 1 });
        assert_eq!((of("RPUSH k v"), of("rpop k")), (Touch::Push, Touch::Pop(End::Tail, 1)));
        assert_eq!((of("LPOP k 7"), of("blpop k l 0")), (Touch::Pop(End::Head, 7), Touch::Pop(End::Head, 1)));
        assert_eq!((of("APPEND k v"), of("setbit k 17 1")), (Touch::Append, Touch::Write { from: 2, bytes: 1 }));
        assert_eq!(of("setrange k 17 value"), Touch::Write { from: 17, bytes: 5 });
        for line in [
            "set k v",
            "setrange k -1 v",
            "setbit k",
            "bitfield k set u8 0 1",
            "del k",
            "lpop k x",
            "lpop k -1",
            "lmove k l LEFT LEFT",
            "spop k",
            "hsetex k FIELDS 1 f v",
            "sort k",
        ] {
            assert_eq!(of(line), Touch::All, "{line}");
        }
    }

    #[test]
    fn subcommands_are_known_by_their_container() {
        assert!(is_known(b"xgroup|destroy") && !is_known(b"newcommand") && !is_known(b""));
    }

    #[test]
    fn a_client_that_waits_to_move_an_element_writes_unseen() {
        assert!(writes_unseen("blmove") && writes_unseen("brpoplpush") && writes_unseen("a-newer-command"));
        assert!(!writes_unseen("blpop") && !writes_unseen("xreadgroup"));
    }
}
