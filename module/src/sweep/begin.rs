//! `REMORA.SWEEP`: every condition under which a server is not swept, and the moment that the snapshot is of.
//!
//! All of this is one command, so that one moment of the server's main thread decides: what the snapshot holds, from
//! which offset on the stream follows, and from when on the filter sees every command.

use std::ffi::CStr;
use std::time::Duration;

use remora_fabric::handover;

use super::commands::{self, BESIDES};
use super::course::Course;
use super::running::{self, Sweep};
use crate::api::{Command, Context, KeyHash, OwnContext, OwnedStr, StrRef};
use crate::capture::{armed, record};

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
        record::put_database(&mut head, database.number, database.keys, 0);
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
    if !armed::ALLOWED.get() {
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
        if !commands::is_known(name) {
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
    if flags.contains('u') || (flags.contains('b') && commands::writes_unseen(command)) {
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
    let version = record::dump_version(functions).ok_or(Refused::NotReported("format"))?;
    let libraries = record::dumped_value(functions).ok_or(Refused::NotReported("functions"))?;
    let mut head = Vec::new();
    record::put_magic(&mut head, version).ok_or(Refused::NotReported("format"))?;
    record::put_field(&mut head, "repl-stream-db", b"0");
    record::put_field(&mut head, "repl-id", replid.as_bytes());
    record::put_field(&mut head, "repl-offset", offset.to_string().as_bytes());
    head.extend_from_slice(libraries);
    Ok(head)
}

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
}
