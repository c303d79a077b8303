//! Sweep: a snapshot without a fork. The server's main thread walks through its keys, a moment at a time, and writes
//! each one down as it was at the beginning, or before a client changes it.
//!
//! ```text
//!   agent                       server
//!   REMORA.SWEEP ──────────────▶ one moment: replid and offset, functions, numbers of keys; the filter is on
//!        ◀── replid, offset ──── PING into the stream
//!   PSYNC replid offset+1 ─────▶ the stream from that moment on ─────────────────────────────────────▶ journal
//!                                each millisecond: some of the keys ahead          ─▶ records ─▶ socket ─▶ slots
//!                                before a command changes a key ahead: that key    ─▶ records ─▶ socket ─▶ slots
//!                                every key passed: do the numbers agree? filter off ─▶ end
//! ```
//!
//! - this file: `REMORA.SWEEP`, and every condition under which a server is not swept; what each command of the servers
//!   means for a sweep.
//! - [`feed`]: where the sweep is, and which keys need nothing more; pure. **Start there.** Also the bytes on their way
//!   to the agent.
//! - [`large`]: one large value, which is taken down in pieces while clients change it. Pure.
//! - [`running`]: the sweep in the server: its filter, its turns, its end.
//!
//! The rule: **whatever is in doubt ends the sweep with its reason**, and the source takes the snapshot by a fork. An
//! agent takes a snapshot for whole only with the mark at its end, which is written after the numbers of keys agree.

mod feed;
mod large;
#[cfg(test)]
mod model;
pub(crate) mod running;

use std::ffi::CStr;
use std::time::Duration;

use feed::Course;
use large::{End, Touch};
use remora_fabric::handover;
use running::Sweep;

use crate::api::{Command, Context, KeyHash, OwnContext, OwnedStr, StrRef};
use crate::capture::{self, walk};

// `REMORA.SWEEP`: every condition under which a server is not swept, and the moment that the snapshot is of.
//
// All of this is one command, so that one moment of the server's main thread decides: what the snapshot holds, from
// which offset on the stream follows, and from when on the filter sees every command.

/// `REMORA.SWEEP address secret`: the agent offers a socket, and the reply has the names and values of the moment.
pub(crate) struct Begin;

impl Command for Begin {
    const NAME: &'static CStr = c"remora.sweep";
    // A server whose clients are paused must put nothing into its stream; it lets a command wait that may replicate.
    const FLAGS: &'static CStr = c"admin deny-script may-replicate no-monitor no-slowlog";

    fn run(context: &Context<'_>, arguments: &[StrRef<'_>]) {
        let [address, secret] = arguments else {
            return context.reply_error("ERR remora: wrong number of arguments; usage: REMORA.SWEEP address secret");
        };
        let (Some(address), Some(secret)) = (address.as_str(), secret.as_str()) else {
            return context.reply_error("ERR remora: address and secret must be UTF-8 text");
        };
        match begin(context, address, secret) {
            Ok(moment) => {
                let pairs = [("replid", moment.replid), ("offset", moment.offset.to_string())];
                context.reply_array(2 * pairs.len());
                for (name, value) in pairs {
                    context.reply_bytes(name.as_bytes());
                    context.reply_bytes(value.as_bytes());
                }
            }
            Err(refused @ (Refused::Busy | Refused::Transaction | Refused::Waits(_))) => {
                context.reply_error(&format!("BUSY remora: {refused}"));
            }
            Err(refused) => context.reply_error(&format!("ERR remora: {refused}")),
        }
    }
}

/// Why a server is not swept. The first ones pass by themselves.
#[derive(Debug, thiserror::Error)]
enum Refused {
    #[error("the server is being swept already")]
    Busy,
    #[error("a client is in a transaction (MULTI), whose commands were not seen")]
    Transaction,
    #[error("a client waits in {0}, and writes to a key that was not seen when it goes on")]
    Waits(String),
    #[error("captures are disabled on this server (remora.capture no)")]
    Forbidden,
    #[error("a script or a transaction calls it")]
    Within,
    #[error("the server is in cluster mode")]
    Cluster,
    #[error("the server is a replica")]
    Replica,
    #[error("the server has no backlog of its stream")]
    NoBacklog,
    #[error("the module {0} may change keys unseen")]
    OtherModule(String),
    #[error("the command {0} writes, and this version of remora does not know it")]
    UnknownCommand(String),
    #[error("the command {0} has been renamed or disabled")]
    Renamed(String),
    #[error("the server does not show its hash function")]
    NoHash,
    #[error("the offered socket could not be taken: {0}")]
    NotTaken(#[from] remora_fabric::memory::Error),
    #[error("the server refused {0}: {1}")]
    Server(&'static str, String),
    #[error("the server does not report its {0}")]
    NotReported(&'static str),
}

/// What the snapshot is of.
struct Moment {
    replid: String,
    offset: u64,
}

fn begin(context: &Context<'_>, address: &str, secret: &str) -> Result<Moment, Refused> {
    conditions(context)?;
    let hash = KeyHash::find(context).ok_or(Refused::NoHash)?;
    let socket = handover::take_socket(address, secret, HANDOVER_LIMIT)?;

    // Nothing above has waited for anything but the agent, and no other command has run since the first condition.
    let own = OwnContext::new(context);
    let functions = functions(context)?;
    let info = context.server_info(c"replication").ok_or(Refused::NotReported("replication"))?;
    let replid = info.get(c"master_replid").ok_or(Refused::NotReported("replid"))?.to_owned();
    let offset = info.number(c"master_repl_offset").ok_or(Refused::NotReported("offset"))?;
    drop(info);
    let counts = running::Counts::read(context).ok_or(Refused::NotReported("counters"))?;
    let mut databases = Vec::new();
    let mut number = 0;
    while own.select(number) {
        databases.push((number, own.key_count()));
        number += 1;
    }
    let course = Course::new(databases);
    let mut head = head(&replid, offset, &functions)?;
    for database in course.databases() {
        walk::put_database(&mut head, database.number, database.keys, 0);
    }
    let policy = context.setting("maxmemory-policy").ok_or(Refused::NotReported("maxmemory-policy"))?;
    Sweep::begin(context, own, hash, socket, (course, counts, policy), &head)
        .ok_or(Refused::NotReported("commands"))?;
    // The stream from here on begins with this PING, in this command's database, behind a SELECT if the command before
    // it was in another one. So a reader that begins in database 0 is right either way.
    if !(context.select(0) && context.replicate_ping()) {
        running::interrupt("the server refused a PING for its replicas");
    }
    Ok(Moment { replid, offset })
}

/// How long the server waits for an agent to hand over the socket that it has just offered, as for `REMORA.ARM`.
const HANDOVER_LIMIT: Duration = Duration::from_millis(250);

fn conditions(context: &Context<'_>) -> Result<(), Refused> {
    let flags = context.flags();
    if !capture::ALLOWED.get() {
        return Err(Refused::Forbidden);
    } else if flags.is_within_another() {
        return Err(Refused::Within);
    } else if flags.is_cluster() {
        return Err(Refused::Cluster);
    } else if flags.is_replica() {
        return Err(Refused::Replica);
    } else if running::is_busy() {
        return Err(Refused::Busy);
    }
    let info = context.server_info(c"replication").ok_or(Refused::NotReported("replication"))?;
    if info.number(c"repl_backlog_active") != Some(1) {
        return Err(Refused::NoBacklog);
    }
    only_this_module(context)?;
    known_commands(context)?;
    clients(context)
}

/// Other modules may write without commands.
fn only_this_module(context: &Context<'_>) -> Result<(), Refused> {
    let list = OwnedStr::new(context, b"LIST");
    let reply = context.call(c"MODULE", &[list.borrow()]).ok_or(Refused::NotReported("modules"))?;
    if let Some(text) = reply.error() {
        return Err(Refused::Server("MODULE LIST", text));
    }
    for index in 0..reply.len() {
        let name = reply.element(index).and_then(|module| {
            let fields = (0..module.len()).step_by(2);
            fields.into_iter().find_map(|at| {
                let is_name = module.element(at)?.as_bytes() == Some(b"name".as_slice());
                is_name.then(|| Some(String::from_utf8_lossy(module.element(at + 1)?.as_bytes()?).into_owned()))?
            })
        });
        match name {
            Some(name) if OWN_MODULES.contains(&name.as_str()) => {}
            name => return Err(Refused::OtherModule(name.unwrap_or_else(|| "without a name".into()))),
        }
    }
    Ok(())
}

/// This module, and those that are parts of servers: the scripts' engine, which Valkey from 9.1 on counts among the
/// modules, and Redis' vector sets. All that they change is changed by commands. `VADD … CAS` changes its key later
/// than it is seen: a client that waits in one keeps a sweep from beginning.
const OWN_MODULES: [&str; 3] = ["remora", "lua", "vectorset"];

/// Every command that writes is in our table, and under its own name.
fn known_commands(context: &Context<'_>) -> Result<(), Refused> {
    let mut names = Vec::new();
    for filter in std::iter::once(["ACLCAT", "write"]).chain(BESIDES.map(|name| ["PATTERN", name])) {
        let words = ["LIST", "FILTERBY", filter[0], filter[1]].map(|word| OwnedStr::new(context, word.as_bytes()));
        let reply = context.call(c"COMMAND", &words.each_ref().map(OwnedStr::borrow));
        let reply = reply.ok_or(Refused::NotReported("commands"))?;
        if let Some(text) = reply.error() {
            return Err(Refused::Server("COMMAND LIST", text));
        }
        for index in 0..reply.len() {
            let name = reply.element(index).and_then(|name| Some(name.as_bytes()?.to_vec()));
            names.push(name.ok_or(Refused::NotReported("commands"))?);
        }
    }
    if names.len() < COMMANDS_MIN {
        return Err(Refused::NotReported("commands"));
    }
    for name in &names {
        if !is_known(name) {
            return Err(Refused::UnknownCommand(String::from_utf8_lossy(name).into_owned()));
        }
    }
    // The list has a command by its own name, and finds it by the name that clients must use.
    let names = names.iter().filter(|name| !name.contains(&b'|'));
    let words: Vec<_> =
        std::iter::once(&b"INFO".to_vec()).chain(names).map(|word| OwnedStr::new(context, word)).collect();
    let arguments: Vec<_> = words.iter().map(OwnedStr::borrow).collect();
    let reply = context.call(c"COMMAND", &arguments).ok_or(Refused::NotReported("commands"))?;
    for (index, word) in words.iter().skip(1).enumerate() {
        if reply.element(index).is_none_or(|found| found.len() == 0) {
            return Err(Refused::Renamed(String::from_utf8_lossy(word.borrow().as_bytes()).into_owned()));
        }
    }
    Ok(())
}

/// The least number of commands that write that a server can have: Redis 7.0 has 101.
const COMMANDS_MIN: usize = 90;

/// No client has sent a command that runs later and that the filter does not see.
fn clients(context: &Context<'_>) -> Result<(), Refused> {
    let list = OwnedStr::new(context, b"LIST");
    let reply = context.call(c"CLIENT", &[list.borrow()]).ok_or(Refused::NotReported("clients"))?;
    let text = reply.as_bytes().ok_or(Refused::NotReported("clients"))?;
    for line in String::from_utf8_lossy(text).lines() {
        unseen(line)?;
    }
    Ok(())
}

/// One line of `CLIENT LIST`.
fn unseen(line: &str) -> Result<(), Refused> {
    let field = |name: &str| line.split(' ').find_map(|pair| pair.strip_prefix(name)?.strip_prefix('='));
    let (flags, command) = (field("flags").unwrap_or_default(), field("cmd").unwrap_or_default());
    // Valkey goes on saying 0 of a client whose transaction is over.
    let has_queued = field("multi").is_none_or(|queued| !matches!(queued, "-1" | "0"));
    if flags.is_empty() || flags.contains('x') || has_queued {
        return Err(Refused::Transaction);
    }
    // Blocked, or about to go on.
    if flags.contains('u') || (flags.contains('b') && writes_unseen(command)) {
        return Err(Refused::Waits(command.to_owned()));
    }
    Ok(())
}

/// The reply to `FUNCTION DUMP`: the libraries as they stand in a snapshot, and the version of the format.
fn functions(context: &Context<'_>) -> Result<Vec<u8>, Refused> {
    let dump = OwnedStr::new(context, b"DUMP");
    let reply = context.call(c"FUNCTION", &[dump.borrow()]).ok_or(Refused::NotReported("functions"))?;
    if let Some(text) = reply.error() {
        return Err(Refused::Server("FUNCTION DUMP", text));
    }
    Ok(reply.as_bytes().ok_or(Refused::NotReported("functions"))?.to_vec())
}

/// The snapshot up to its first database.
fn head(replid: &str, offset: u64, functions: &[u8]) -> Result<Vec<u8>, Refused> {
    let version = walk::dump_version(functions).ok_or(Refused::NotReported("format"))?;
    let libraries = walk::dumped_value(functions).ok_or(Refused::NotReported("functions"))?;
    let mut head = Vec::new();
    walk::put_magic(&mut head, version).ok_or(Refused::NotReported("format"))?;
    walk::put_field(&mut head, "repl-stream-db", b"0");
    walk::put_field(&mut head, "repl-id", replid.as_bytes());
    walk::put_field(&mut head, "repl-offset", offset.to_string().as_bytes());
    head.extend_from_slice(libraries);
    Ok(head)
}

// What each command means for a sweep. Pure: a table, and words in.
//
// The table has every command that Redis 7.0 to 8.6 and Valkey 8.0 to 9.1 count among those that write (`COMMAND LIST
// FILTERBY ACLCAT write`), by its first word, and a few others that change what is stored. A server with a command
// that writes and that is not here is not swept ([`is_known`]). A rule may ask for more than its command needs, and
// never for less: to settle a key early changes nothing.

/// What is to be done before a command runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Need {
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
fn need<'w>(count: usize, word: impl Fn(usize) -> Option<&'w [u8]>) -> Need {
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
fn touch<'w>(count: usize, word: impl Fn(usize) -> Option<&'w [u8]>) -> Touch {
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
fn is_known(name: &[u8]) -> bool {
    rule_of(name.split(|byte| *byte == b'|').next().unwrap_or_default()).is_some()
}

/// Commands of the table that the servers do not count among those that write.
const BESIDES: [&str; 6] = ["debug", "failover", "module", "pfcount", "replicaof", "slaveof"];

/// Whether a client that waits in this command writes, when it goes on, to a key that no other command has named: the
/// sweep sees a command when it is sent, and not again when it goes on.
fn writes_unseen(command: &str) -> bool {
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
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn clients_in_a_transaction_or_waiting_to_move_an_element_keep_a_sweep_from_beginning() {
        let line = |flags: &str, multi: &str, command: &str| {
            format!(
                "id=3 addr=127.0.0.1:5 name= age=0 flags={flags} db=0 sub=0 multi={multi} watch=0 cmd={command} user=default"
            )
        };
        for line in
            [line("N", "-1", "set"), line("N", "0", "discard"), line("b", "-1", "blpop"), line("S", "-1", "replconf")]
        {
            unseen(&line).unwrap();
        }
        assert!(matches!(unseen(&line("x", "2", "set")), Err(Refused::Transaction)));
        assert!(matches!(unseen(&line("x", "0", "multi")), Err(Refused::Transaction)));
        assert!(matches!(unseen("id=3 flags=N cmd=set"), Err(Refused::Transaction)), "another server's words");
        assert!(matches!(unseen(&line("b", "-1", "blmove")), Err(Refused::Waits(_))));
        assert!(matches!(unseen(&line("b", "-1", "VADD")), Err(Refused::Waits(_))));
        assert!(matches!(unseen(&line("u", "-1", "set")), Err(Refused::Waits(_))));
    }

    #[test]
    fn a_snapshot_begins_with_its_moment_and_its_functions() {
        let head = head(&"a".repeat(40), 77, b"libraries\x50\x0012345678").unwrap();
        assert!(head.starts_with(b"VALKEY080") && head.ends_with(b"77libraries"));
    }

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
