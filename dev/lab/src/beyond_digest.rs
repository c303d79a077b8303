//! What `DEBUG DIGEST` says nothing of: the groups, consumers, pending entries and counters of streams, and the values
//! of modules' types.
//!
//! Left out is what servers do not replicate: idle times, how many entries a group has read (before Redis 7.4 and
//! Valkey 8.0), and consumers without pending entries (an `XREADGROUP` that finds nothing creates one at the primary,
//! which may be the replica since).

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{DefaultHasher, Hash, Hasher};

use crate::client::{Client, shown_bytes};
use crate::{Error, Result};
use remora_redis::resp::Frame;

/// The keys that a digest does not cover, by database and name, and all of them that servers replicate.
pub(crate) type Beyond = BTreeMap<(u32, Vec<u8>), String>;

/// Reads them all.
pub(crate) fn beyond(client: &mut Client, entries_read: bool) -> Result<Beyond> {
    let mut found = Beyond::new();
    let has_modules = client.info("modules")?.modules().iter().any(|name| name != "remora" && name != "lua");
    for database in databases(client)?.into_keys() {
        let wanted = if has_modules { &[][..] } else { &["TYPE", "stream"] };
        each_batch(client, database, wanted, |client, keys| {
            let kinds = ask_each(client, database, &["TYPE"], keys)?;
            for (key, kind) in keys.iter().zip(kinds) {
                let value = match kind.as_str() {
                    Some("string" | "list" | "set" | "zset" | "hash" | "none") => continue,
                    Some("stream") => stream(client, key, entries_read)?,
                    _ => dumped(client, key)?,
                };
                found.insert((database, key.clone()), value);
            }
            Ok(true)
        })?;
    }
    Ok(found)
}

/// The differences as text; at most `most` of them.
pub(crate) fn different(one: &Beyond, other: &Beyond, most: usize) -> Vec<String> {
    let keys: BTreeSet<_> = one.keys().chain(other.keys()).collect();
    let nothing = String::new();
    let pairs = keys.into_iter().map(|key| (key, one.get(key).unwrap_or(&nothing), other.get(key).unwrap_or(&nothing)));
    let differ = pairs.filter(|(_, one, other)| one != other);
    let shown = differ.map(|((database, key), one, other)| {
        let key = shown_bytes(key);
        format!("db {database}, {key}: {one:?} at the primary, {other:?} at the replica")
    });
    shown.take(most).collect()
}

/// A number that is equal if the texts are. It is the same in every run.
pub(crate) fn fingerprint(beyond: &Beyond) -> u64 {
    let mut hasher = DefaultHasher::new();
    beyond.hash(&mut hasher);
    hasher.finish()
}

/// Whether the server's replicas know how many entries its groups have read.
pub(crate) fn replicates_entries_read(client: &mut Client) -> Result<bool> {
    let info = client.info("server")?;
    let since = |name: &str, wanted: (u32, u32)| {
        let mut parts = info.get(name)?.split('.').map_while(|part| part.parse::<u32>().ok());
        Some((parts.next()?, parts.next()?) >= wanted)
    };
    Ok(since("valkey_version", (8, 0)).or_else(|| since("redis_version", (7, 4))).unwrap_or(false))
}

fn stream(client: &mut Client, key: &[u8], entries_read: bool) -> Result<String> {
    let mut value = String::new();
    let about = client.list(&[&b"XINFO"[..], b"STREAM", key])?;
    for name in ["length", "last-generated-id", "max-deleted-entry-id", "entries-added", "groups"] {
        value += &format!("{name} {:?}, ", field(&about, name));
    }
    for group in client.list(&[&b"XINFO"[..], b"GROUPS", key])? {
        let group = group.as_array().unwrap_or_default();
        let Some(name) = field(group, "name").and_then(Frame::as_bytes) else { continue };
        value += &format!("group {} at {:?}", shown_bytes(name), field(group, "last-delivered-id"));
        if entries_read {
            value += &format!(" after {:?}", field(group, "entries-read"));
        }
        for entry in client.list(&[&b"XPENDING"[..], key, name, b"-", b"+", MOST_PENDING])? {
            // Id, consumer, idle time, number of deliveries.
            if let Some([id, consumer, _, deliveries]) = entry.as_array() {
                value += &format!(", {id:?} {consumer:?} {deliveries:?}");
            }
        }
        value += "; ";
    }
    Ok(value)
}

/// A dump without its version and checksum.
fn dumped(client: &mut Client, key: &[u8]) -> Result<String> {
    let dump = client.bytes(&[&b"DUMP"[..], key])?.unwrap_or_default();
    Ok(shown_bytes(dump.get(..dump.len().saturating_sub(DUMP_FOOT_BYTES)).unwrap_or_default()))
}

fn field<'f>(fields: &'f [Frame], name: &str) -> Option<&'f Frame> {
    let mut pairs = fields.chunks_exact(2);
    pairs.find(|pair| pair[0].as_str() == Some(name)).map(|pair| &pair[1])
}

/// `DEBUG DIGEST`, and the fingerprint of what it leaves out, where there is such a thing.
pub(crate) fn whole_digest(client: &mut Client) -> Result<String> {
    let entries_read = replicates_entries_read(client)?;
    // First, as the walk makes a primary delete keys whose time is over.
    let beyond = beyond(client, entries_read)?;
    let digest = client.text(&["DEBUG", "DIGEST"])?;
    Ok(if beyond.is_empty() { digest } else { format!("{digest} {:016x}", fingerprint(&beyond)) })
}

/// No test has more.
const MOST_PENDING: &[u8] = b"1000000";

/// Version and checksum.
const DUMP_FOOT_BYTES: usize = 10;

// Walk: all keys of a server's databases, in batches.

/// Keys per SCAN.
const SCAN_COUNT: &str = "1000";

/// The databases that hold keys, and how many keys of each expire.
pub(crate) fn databases(client: &mut Client) -> Result<BTreeMap<u32, u64>> {
    let keyspace = client.info("keyspace")?;
    let expires = |line: &str| line.split(',').find_map(|part| part.strip_prefix("expires=")?.parse().ok());
    let numbered = |name: &str| name.strip_prefix("db")?.parse().ok();
    Ok(keyspace.iter().filter_map(|(name, line)| Some((numbered(name)?, expires(line)?))).collect())
}

/// Walks all keys of a database that SCAN's further options want, until `look` says that it has seen enough.
pub(crate) fn each_batch(
    client: &mut Client,
    database: u32,
    wanted: &[&str],
    mut look: impl FnMut(&mut Client, &[Vec<u8>]) -> Result<bool>,
) -> Result<()> {
    client.ok(&["SELECT", &database.to_string()])?;
    let mut cursor = "0".to_owned();
    loop {
        let scan = [&["SCAN", &cursor, "COUNT", SCAN_COUNT], wanted].concat();
        let mut answer = client.list(&scan)?.into_iter();
        let (Some(next), Some(Frame::Array(keys))) = (answer.next(), answer.next()) else {
            return Err(Error::Garbled("SCAN's answer is not a cursor and a list".into()));
        };
        let keys: Vec<Vec<u8>> = keys.into_iter().filter_map(|key| key.into_bytes().ok()).collect();
        cursor = next.as_str().unwrap_or("0").to_owned();
        if !look(client, &keys)? || cursor == "0" {
            return Ok(());
        }
    }
}

/// Sends the same command for each key, in one pipeline.
pub(crate) fn ask_each(client: &mut Client, database: u32, question: &[&str], keys: &[Vec<u8>]) -> Result<Vec<Frame>> {
    client.ok(&["SELECT", &database.to_string()])?;
    let ask = |key: &Vec<u8>| question.iter().map(|word| word.as_bytes().to_vec()).chain([key.clone()]).collect();
    client.pipeline(&keys.iter().map(ask).collect::<Vec<Vec<Vec<u8>>>>())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(text: &str) -> Beyond {
        Beyond::from([((0, b"s".to_vec()), text.into())])
    }

    #[test]
    fn another_value_and_a_missing_one_are_differences() {
        let one = with("g");
        assert!(different(&one, &with("g"), 9).is_empty());
        for other in [with("h"), Beyond::new()] {
            assert_eq!((different(&one, &other, 9).len(), different(&other, &one, 9).len()), (1, 1));
            assert_ne!(fingerprint(&one), fingerprint(&other));
        }
        assert_eq!(fingerprint(&one), fingerprint(&with("g")));
    }
}
