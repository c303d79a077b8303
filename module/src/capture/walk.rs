//! The walk: writes every long string of a frozen data set into the table, as records of a snapshot.
//!
//! It runs in a fork child, before the server's own saver, and deletes what it has written from the child's memory:
//!
//! ```text
//!                 the walk                                          the server's saver, afterwards, in the same child
//!   header ─▶ for each database: for each long string:              header, functions, and every key that is still there:
//!             ① expiry, age, name, bytes ──▶ table                   everything else ──▶ pipe ──▶ the source, behind ①
//!             ② the key is deleted, in this process alone
//! ```
//!
//! So each key is in exactly one of the two parts: **it is written here and deleted, or the server writes it.** The
//! walk needs no knowledge of types, of expiring fields, or of what the server considers an expired key; a scan step
//! that shows a key twice, or never, changes nothing. The memory is this child's own copy, so the primary keeps every
//! key.
//!
//! The whole walk is one command, for which the server reads its clock once. A string that is expired by that clock is
//! left to the server: opening it for deletion would be a lookup to which a server that is a replica answers "no such
//! key" while keeping the key.
//!
//! A walk that fails after its first deletion ends the child: what its server would save then is incomplete.

use std::ffi::CString;
use std::sync::Arc;

use remora_fabric::Memory;
use remora_table::CapturePage;
use remora_table::server_pages::capture_page::ForkPoint;

use super::armed::{CaptureError, format_version};
use super::output::Output;
use super::record::{self, Age, Value};
use crate::api::{Context, Cursor, Key, KeyKind, OwnedStr, ServerInfo, StrRef};

/// Writes the long strings into `memory`, and deletes them from what the server will save.
pub(super) fn run(
    context: &Context<'_>,
    page: &CapturePage,
    memory: Arc<Memory>,
    point: &ForkPoint,
) -> Result<(), CaptureError> {
    let least = usize::try_from(page.order().least_bytes).unwrap_or(usize::MAX);
    let out = Output::new(page, memory, point)?;
    let mut walk = Walk { context, out, ages: Ages::of(context), now: server_clock(context)?, least };
    walk.everything(point)?;
    walk.out.finish()
}

/// The moment that this process's data is of. `info`: INFO replication.
pub(super) fn fork_point(context: &Context<'_>, info: &ServerInfo<'_>) -> Result<ForkPoint, CaptureError> {
    let history = info.get(c"master_replid").and_then(|text| text.parse().ok());
    let offset = info.number(c"master_repl_offset");
    Ok(ForkPoint {
        history: history.ok_or(CaptureError::NotReported("replid"))?,
        offset: offset.ok_or(CaptureError::NotReported("offset"))?,
        database: stream_database(context)?,
    })
}

/// The database that the stream writes to before it selects one. A primary's stream begins with a SELECT; a replica
/// forwards its primary's stream from any position.
fn stream_database(context: &Context<'_>) -> Result<u32, CaptureError> {
    if !context.flags().is_replica() {
        return Ok(0);
    }
    let words = ["LIST", "TYPE", "master"].map(|word| OwnedStr::new(context, word.as_bytes()));
    let arguments: Vec<_> = words.iter().map(OwnedStr::borrow).collect();
    let reply = context.call(c"CLIENT", &arguments).ok_or(CaptureError::NoAnswer("CLIENT LIST"))?;
    let line = reply.as_bytes().and_then(|bytes| std::str::from_utf8(bytes).ok()).unwrap_or_default();
    let database = line.split(' ').find_map(|pair| pair.strip_prefix("db=")?.parse().ok());
    database.ok_or(CaptureError::NotReported("link to its primary"))
}

/// The server's own clock: milliseconds since 1970. The server reads the system's clock at certain moments only, and
/// judges keys by the value it has read.
fn server_clock(context: &Context<'_>) -> Result<u64, CaptureError> {
    let info = context.server_info(c"server").ok_or(CaptureError::NoAnswer("INFO server"))?;
    info.number(c"server_time_usec").map(|micros| micros / 1000).ok_or(CaptureError::NotReported("clock"))
}

struct Walk<'w> {
    context: &'w Context<'w>,
    out: Output<'w>,
    ages: Ages,
    /// The server's clock, which does not advance during this command: milliseconds since 1970.
    now: u64,
    /// Strings of at least this many bytes are long.
    least: usize,
}

impl Walk<'_> {
    fn everything(&mut self, point: &ForkPoint) -> Result<(), CaptureError> {
        header(self.context, &mut self.out, point)?;
        let mut number = 0;
        while self.context.select(number) {
            if self.context.key_count() > 0 {
                self.database(number)?;
            }
            number += 1;
        }
        Ok(())
    }

    fn database(&mut self, number: u32) -> Result<(), CaptureError> {
        let expires = expiring(self.context, number);
        record::put_database(&mut self.out.small, number, self.context.key_count(), expires.unwrap_or(0));
        // In a database without expiring keys, not asking each key for its expiry saves a lookup per key.
        let may_expire = expires != Some(0);
        let mut cursor = Cursor::new(self.context);
        let mut written = Vec::new();
        loop {
            let mut error = None;
            let more = self.context.scan(&mut cursor, |name, key| {
                if error.is_none() {
                    error = self.key(number, name, key, may_expire, &mut written).err();
                }
            });
            if let Some(error) = error {
                return Err(error);
            }
            // Do not delete during a scan step: the server still holds the key that it shows.
            for name in written.drain(..) {
                self.take_out(number, &name)?;
            }
            if !more {
                return Ok(());
            }
        }
    }

    /// Writes the key if it is a long string, and remembers its name.
    fn key(
        &mut self,
        database: u32,
        name: StrRef<'_>,
        mut key: Key<'_>,
        may_expire: bool,
        written: &mut Vec<OwnedStr>,
    ) -> Result<(), CaptureError> {
        if key.kind() != KeyKind::String || key.length() < self.least {
            return Ok(());
        }
        let expires_at = if may_expire { key.expires_at() } else { None };
        if expires_at.is_some_and(|time| time <= self.now) {
            return Ok(());
        }
        let age = self.ages.of_key(&key);
        let value = key.string().ok_or_else(|| CaptureError::Unreadable { database, key: shown(name.as_bytes()) })?;
        record::put_head(&mut self.out.small, expires_at, age, name.as_bytes(), Value::Bytes(value.len()));
        self.out.put(value)?;
        self.out.key_done()?;
        written.push(OwnedStr::new(self.context, name.as_bytes()));
        Ok(())
    }

    /// Deletes the key, so that the server does not write it again.
    fn take_out(&self, database: u32, name: &OwnedStr) -> Result<(), CaptureError> {
        let key = self.context.open_to_write(name.borrow()).filter(|key| key.kind() == KeyKind::String);
        if key.is_some_and(|mut key| key.delete()) {
            return Ok(());
        }
        Err(CaptureError::Undeletable { database, key: shown(name.borrow().as_bytes()) })
    }
}

/// Writes the head of the snapshot, and returns the version of its format.
pub(super) fn header(context: &Context<'_>, out: &mut Output<'_>, point: &ForkPoint) -> Result<u16, CaptureError> {
    let version = format_version(context)?;
    out.format(version);
    record::put_magic(&mut out.small, version).ok_or(CaptureError::NoAnswer("FUNCTION DUMP"))?;
    let database = point.database.to_string();
    let offset = point.offset.to_string();
    let fields: [(&str, &[u8]); 3] = [
        ("repl-stream-db", database.as_bytes()),
        ("repl-id", point.history.as_bytes()),
        ("repl-offset", offset.as_bytes()),
    ];
    for (name, value) in fields {
        record::put_field(&mut out.small, name, value);
    }
    Ok(version)
}

/// The number of expiring keys in that database, from INFO.
pub(super) fn expiring(context: &Context<'_>, number: u32) -> Option<u64> {
    let info = context.server_info(c"keyspace")?;
    let line = info.get(&CString::new(format!("db{number}")).ok()?)?.to_owned();
    line.split(',').find_map(|pair| pair.strip_prefix("expires=")?.parse().ok())
}

/// A key's name for a message.
pub(crate) fn shown(name: &[u8]) -> String {
    String::from_utf8_lossy(name.get(..SHOWN_BYTES).unwrap_or(name)).into_owned()
}

/// Bytes of a key's name in a message: enough to find the key.
const SHOWN_BYTES: usize = 80;

/// Which age the server keeps for its keys: servers write it only where their eviction policy uses it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ages {
    None,
    Idle,
    Frequency,
}

impl Ages {
    pub(super) fn of(context: &Context<'_>) -> Ages {
        // Not from INFO: its memory section copies a megabyte of pages in a child, by a small allocation for each line.
        let policy = context.setting("maxmemory-policy").or_else(|| {
            // CONFIG may have been renamed.
            let info = context.server_info(c"memory")?;
            info.get(c"maxmemory_policy").map(str::to_owned)
        });
        Ages::of_policy(&policy.unwrap_or_default())
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
