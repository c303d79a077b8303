//! The walk: every key of every database of a frozen data set, as records of a snapshot.
//!
//! It runs in a fork child, inside one command, so that the data stands still and the server's clock does too.
//!
//! ```text
//!   header ─▶ functions ─▶ for each database: SELECTDB, size hints ─▶ for each key: expiry, age, type, name, value ─▶ end
//!                                                                      │
//!                                            a string: its bytes, from where they lie, one copy
//!                                            anything else: what DUMP answers, without its footer
//! ```
//!
//! **Keys whose time is over.** DUMP says of such a key that there is none, and deletes it; strings are read without asking. So a key
//! that is no string and whose time is over, and that the server has not yet removed, can't be walked. To leave it out would be nearly
//! right (whoever touches it at the primary has it deleted, and the stream says so), but not the same data. The walk says so instead, and the
//! snapshot comes without it.

use std::ffi::CString;
use std::sync::Arc;

use remora_fabric::Memory;
use remora_table::Board;
use remora_table::board::Origin;

use super::child::{millis_now, server_clock};
use super::output::Output;
use super::record::{self, Age, Dump, TYPE_STRING};
use crate::api::{Context, Cursor, Key, KeyKind, OwnedStr, StrRef};

/// Why a capture in the child failed; each becomes the sentence on the board.
#[derive(Debug, thiserror::Error)]
pub(super) enum Trouble {
    #[error("it was cancelled")]
    Cancelled,
    #[error("the table was full and its agent said nothing for {0} s")]
    Abandoned(u64),
    #[error("no table was handed over")]
    NoTable,
    #[error("another process writes that table")]
    Claimed,
    #[error("{0}")]
    System(String),
    #[error("the server made no answer to {0}")]
    NoAnswer(&'static str),
    #[error("the server refused {command}: {text}")]
    Refused { command: &'static str, text: String },
    #[error("the server does not say its {0}")]
    Untold(&'static str),
    #[error("the key {key:?} of database {database} could not be read: {why}")]
    Key { database: u32, key: String, why: String },
    #[error("the time of the key {key:?} of database {database} is over, and the server has not removed it yet")]
    Over { database: u32, key: String },
    #[error("database {database} has {counted} keys, {walked} were found")]
    Miscounted { database: u32, counted: u64, walked: u64 },
    #[error(transparent)]
    Memory(#[from] remora_fabric::Error),
    #[error(transparent)]
    Table(#[from] remora_table::Error),
}

/// Writes the whole snapshot into `memory`.
pub(super) fn run(context: &Context<'_>, board: &Board, memory: Arc<Memory>) -> Result<(), Trouble> {
    let origin = origin(context)?;
    let mut walk = Walk {
        context,
        out: Output::new(board, memory, &origin)?,
        ages: Ages::of(context),
        now: server_clock(context)?,
    };
    board.begin(&origin)?;
    match walk.everything(&origin) {
        Ok(()) => walk.out.finish(),
        Err(trouble) => {
            walk.out.abort();
            Err(trouble)
        }
    }
}

/// Which moment this process's data is of.
pub(super) fn origin(context: &Context<'_>) -> Result<Origin, Trouble> {
    let info = context.server_info(c"replication").ok_or(Trouble::NoAnswer("INFO replication"))?;
    let replid = info.get(c"master_replid").and_then(|text| text.as_bytes().try_into().ok());
    let offset = info.number(c"master_repl_offset");
    Ok(Origin {
        replid: replid.ok_or(Trouble::Untold("replid"))?,
        offset: offset.ok_or(Trouble::Untold("offset"))?,
        database: stream_database(context)?,
    })
}

/// The database that the stream writes to before it selects one. A primary selects one first of all; a replica passes on its primary's
/// stream from wherever that is.
fn stream_database(context: &Context<'_>) -> Result<u32, Trouble> {
    if !context.flags().is_replica() {
        return Ok(0);
    }
    let words = ["LIST", "TYPE", "master"].map(|word| OwnedStr::new(context, word.as_bytes()));
    let arguments: Vec<_> = words.iter().map(OwnedStr::borrow).collect();
    let reply = context.call(c"CLIENT", &arguments).ok_or(Trouble::NoAnswer("CLIENT LIST"))?;
    let line = reply.as_bytes().and_then(|bytes| std::str::from_utf8(bytes).ok()).unwrap_or_default();
    let database = line.split(' ').find_map(|pair| pair.strip_prefix("db=")?.parse().ok());
    database.ok_or(Trouble::Untold("link to its primary"))
}

struct Walk<'w> {
    context: &'w Context<'w>,
    out: Output<'w>,
    ages: Ages,
    /// The server's clock, which stands still for this command: milliseconds since 1970.
    now: u64,
}

impl Walk<'_> {
    fn everything(&mut self, origin: &Origin) -> Result<(), Trouble> {
        self.header(origin)?;
        let mut number = 0;
        while self.context.select(number) {
            if self.context.key_count() > 0 {
                self.database(number)?;
            }
            number += 1;
        }
        record::put_end(&mut self.out.small);
        Ok(())
    }

    /// The version is that of the server's own DUMP, which also answers where there is no key at all: for functions.
    fn header(&mut self, origin: &Origin) -> Result<(), Trouble> {
        let dump = OwnedStr::new(self.context, b"DUMP");
        let reply = self.context.call(c"FUNCTION", &[dump.borrow()]).ok_or(Trouble::NoAnswer("FUNCTION DUMP"))?;
        if let Some(text) = reply.error() {
            return Err(Trouble::Refused { command: "FUNCTION DUMP", text });
        }
        let functions = reply.as_bytes().and_then(Dump::parse).ok_or(Trouble::NoAnswer("FUNCTION DUMP"))?;
        record::put_magic(&mut self.out.small, functions.version);
        for (name, value) in self.fields(origin)? {
            record::put_field(&mut self.out.small, name, value.as_bytes());
        }
        self.out.put(functions.body)
    }

    fn fields(&self, origin: &Origin) -> Result<Vec<(&'static str, String)>, Trouble> {
        let server = self.context.server_info(c"server").ok_or(Trouble::NoAnswer("INFO server"))?;
        let version = match (server.get(c"valkey_version"), server.get(c"redis_version")) {
            (Some(version), _) => ("valkey-ver", version.to_owned()),
            (None, version) => ("redis-ver", version.unwrap_or_default().to_owned()),
        };
        Ok(vec![
            version,
            ("redis-bits", usize::BITS.to_string()),
            ("ctime", (millis_now() / 1000).to_string()),
            ("repl-stream-db", origin.database.to_string()),
            ("repl-id", String::from_utf8_lossy(&origin.replid).into_owned()),
            ("repl-offset", origin.offset.to_string()),
        ])
    }

    fn database(&mut self, number: u32) -> Result<(), Trouble> {
        let keys = self.context.key_count();
        let expires = self.expiring(number);
        record::put_database(&mut self.out.small, number, keys, expires.unwrap_or(0));
        let before = self.out.keys();
        let mut cursor = Cursor::new(self.context);
        let mut trouble = None;
        // Not asking each key of a database in which none expires spares a look-up for each.
        let may_expire = expires != Some(0);
        let context = self.context;
        while context.scan(&mut cursor, |name, key| {
            if trouble.is_none() {
                trouble = self.key(number, name, key, may_expire).err();
            }
        }) && trouble.is_none()
        {}
        if let Some(trouble) = trouble {
            return Err(trouble);
        }
        let walked = self.out.keys() - before;
        if walked == keys { Ok(()) } else { Err(Trouble::Miscounted { database: number, counted: keys, walked }) }
    }

    /// How many keys of that database expire, as INFO has it.
    fn expiring(&self, number: u32) -> Option<u64> {
        let info = self.context.server_info(c"keyspace")?;
        let line = info.get(&CString::new(format!("db{number}")).ok()?)?.to_owned();
        line.split(',').find_map(|pair| pair.strip_prefix("expires=")?.parse().ok())
    }

    fn key(&mut self, database: u32, name: StrRef<'_>, mut key: Key<'_>, may_expire: bool) -> Result<(), Trouble> {
        let expires_at = if may_expire { key.expires_at() } else { None };
        let age = self.ages.of_key(&key);
        if key.kind() != KeyKind::String {
            return self.dumped(database, name, expires_at, age);
        }
        let Some(value) = key.string() else { return Err(unreadable(database, name, "it has no bytes".into())) };
        record::put_key(&mut self.out.small, expires_at, age, TYPE_STRING, name.as_bytes());
        remora_redis::rdb::put_length(&mut self.out.small, value.len() as u64);
        self.out.put(value)?;
        self.out.key_done()
    }

    /// Anything but a string, by way of DUMP.
    fn dumped(&mut self, database: u32, name: StrRef<'_>, expires_at: Option<u64>, age: Age) -> Result<(), Trouble> {
        if expires_at.is_some_and(|time| time < self.now) {
            return Err(Trouble::Over { database, key: shown(name) });
        }
        let reply = self.context.call(c"DUMP", &[name]).ok_or(Trouble::NoAnswer("DUMP"))?;
        if let Some(text) = reply.error() {
            return Err(unreadable(database, name, text));
        }
        let dump = reply.as_bytes().and_then(Dump::parse);
        let Some((kind, value)) = dump.and_then(|dump| dump.key()) else {
            return Err(unreadable(database, name, "DUMP says that there is none".into()));
        };
        record::put_key(&mut self.out.small, expires_at, age, kind, name.as_bytes());
        self.out.put(value)?;
        self.out.key_done()
    }
}

fn unreadable(database: u32, name: StrRef<'_>, why: String) -> Trouble {
    Trouble::Key { database, key: shown(name), why }
}

/// A name as it may stand in a sentence.
fn shown(name: StrRef<'_>) -> String {
    let bytes = name.as_bytes();
    String::from_utf8_lossy(bytes.get(..SHOWN_BYTES).unwrap_or(bytes)).into_owned()
}

/// Bytes of a key's name that a sentence shows: enough to find it.
const SHOWN_BYTES: usize = 80;

/// Which age the server keeps of its keys: servers write it only where their policy uses it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ages {
    None,
    Idle,
    Frequency,
}

impl Ages {
    fn of(context: &Context<'_>) -> Ages {
        let info = context.server_info(c"memory");
        let policy = info.as_ref().and_then(|info| info.get(c"maxmemory_policy"));
        Ages::of_policy(policy.unwrap_or_default())
    }

    fn of_policy(policy: &str) -> Ages {
        match policy {
            policy if policy.ends_with("-lru") => Ages::Idle,
            policy if policy.ends_with("-lfu") => Ages::Frequency,
            _ => Ages::None,
        }
    }

    fn of_key(self, key: &Key<'_>) -> Age {
        match self {
            Ages::None => Age::Unknown,
            Ages::Idle => key.idle_time().map_or(Age::Unknown, Age::Idle),
            Ages::Frequency => key.frequency().map_or(Age::Unknown, Age::Frequency),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ages_are_written_where_the_servers_policy_uses_them() {
        let policies = ["noeviction", "allkeys-lru", "volatile-lfu", "volatile-ttl", ""].map(Ages::of_policy);
        assert_eq!(policies, [Ages::None, Ages::Idle, Ages::Frequency, Ages::None, Ages::None]);
    }
}
