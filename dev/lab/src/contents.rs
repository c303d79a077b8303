//! Everything that a server holds, read as clients read it: no digest of the server's is trusted.
//!
//! `DEBUG DIGEST` leaves out the groups, consumers and counters of streams, functions, and the times at which keys and
//! fields expire. [`Contents::of`] asks for each of them, and [`differences`] compares two servers, or one server with
//! what another one held earlier. Both take seconds for each hundred thousand keys. The servers need not stand still
//! for it, only their clients: a key or a field that has expired meanwhile counts as absent on both sides.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{SystemTime, UNIX_EPOCH};

use remora_redis::resp::Frame;

use crate::client::{Client, shown_bytes};
use crate::compare::knows;
use crate::error::Result;
use crate::walk::{ask_each, databases, each_batch};

/// What a server held.
#[derive(Clone, Debug, Default)]
pub struct Contents {
    keys: BTreeMap<(u32, Vec<u8>), Held>,
    functions: BTreeSet<String>,
}

/// A key's value.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Held {
    kind: String,
    /// When it expires, in milliseconds since 1970; -1 for never.
    expires: i64,
    /// All of a value that is not a hash, in an order that does not depend on its encoding.
    value: Vec<u8>,
    /// The fields of a hash, and when they expire.
    fields: BTreeMap<Vec<u8>, (Vec<u8>, i64)>,
}

impl Contents {
    /// Reads all of a server: each key of each database, and the functions. Needs Redis 7.0 or Valkey.
    pub fn of(client: &mut Client) -> Result<Contents> {
        let mut contents = Contents::default();
        let has_field_expiry = knows(client, "HPEXPIRETIME")?;
        let own = own(client)?;
        for database in databases(client)?.into_keys() {
            each_batch(client, database, &[], |client, keys| {
                let kinds = ask_each(client, database, &["TYPE"], keys)?;
                let times = ask_each(client, database, &["PEXPIRETIME"], keys)?;
                for (kind, (read, sorted)) in READ {
                    let of_kind = keys.iter().zip(kinds.iter().zip(&times));
                    let of_kind = of_kind.filter(|(_, (found, _))| found.as_str() == Some(kind));
                    let (names, times): (Vec<Vec<u8>>, Vec<&Frame>) =
                        of_kind.map(|(key, (_, time))| (key.clone(), time)).unzip();
                    let values = asked(client, read, &names)?;
                    for ((name, value), time) in names.into_iter().zip(values).zip(times) {
                        let mut held = Held::new(kind, time.as_int().unwrap_or(KEY_IS_GONE));
                        if kind == "hash" {
                            held.fields = fields(value);
                            if has_field_expiry {
                                field_times(client, &name, &mut held.fields)?;
                            }
                        } else {
                            encode(&tidied(value, sorted, &own), &mut held.value);
                        }
                        contents.keys.insert((database, name), held);
                    }
                }
                Ok(true)
            })?;
        }
        if knows(client, "FUNCTION")? {
            let libraries = client.list(&["FUNCTION", "LIST", "WITHCODE"])?;
            contents.functions = libraries.iter().map(|library| format!("{library:?}")).collect();
        }
        Ok(contents)
    }

    /// How many keys there are.
    pub fn len(&self) -> usize {
        self.keys.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.keys.is_empty()
    }
}

impl Held {
    fn new(kind: &str, expires: i64) -> Held {
        Held { kind: kind.into(), expires, value: Vec::new(), fields: BTreeMap::new() }
    }

    /// The value at this time: nothing, if the key or all of its fields have expired by then.
    fn at(&self, now: i64) -> Option<Held> {
        let is_live = |expires: i64| expires == NEVER || expires > now;
        let mut held = self.clone();
        held.fields.retain(|_, (_, expires)| is_live(*expires));
        let is_there = is_live(self.expires) && (self.kind != "hash" || !held.fields.is_empty());
        is_there.then_some(held)
    }

    /// The value as text; of a long one, what stands around this byte.
    fn shown(&self, from: usize) -> String {
        let expires = if self.expires == NEVER { "never".to_owned() } else { self.expires.to_string() };
        if self.kind == "hash" {
            let fields: Vec<String> = self
                .fields
                .iter()
                .take(SHOWN_FIELDS)
                .map(|(field, (value, expires))| format!("{}={} @{expires}", shown_bytes(field), shown_bytes(value)))
                .collect();
            return format!("hash of {} ({}), expires {expires}", self.fields.len(), fields.join(", "));
        }
        let around = self.value.get(from.saturating_sub(SHOWN_BEFORE)..).unwrap_or_default();
        format!("{} of {} B, …{}, expires {expires}", self.kind, self.value.len(), shown_bytes(around))
    }
}

/// The differences between two servers at this moment, as text; at most `most` of them. Both were read before.
pub fn differences(one: &Contents, other: &Contents, most: usize) -> Vec<String> {
    // After both were read: what expired in between counts as absent.
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_millis() as i64);
    let mut found: Vec<String> = one
        .functions
        .symmetric_difference(&other.functions)
        .map(|library| format!("only one has this library of functions: {}", shown_bytes(library.as_bytes())))
        .collect();
    let all: BTreeSet<&(u32, Vec<u8>)> = one.keys.keys().chain(other.keys.keys()).collect();
    for place in all {
        if found.len() >= most {
            break;
        }
        let at = |contents: &Contents| contents.keys.get(place).and_then(|held| held.at(now));
        let (left, right) = (at(one), at(other));
        if left != right {
            let (left, right) = differing_fields(left, right);
            let from = differs_from(left.as_ref(), right.as_ref());
            let shown = |held: Option<Held>| held.map_or("nothing".to_owned(), |held| held.shown(from));
            found.push(format!("db {}, {}: {} / {}", place.0, shown_bytes(&place.1), shown(left), shown(right)));
        }
    }
    found.truncate(most);
    found
}

/// Of two hashes, the fields that differ.
fn differing_fields(left: Option<Held>, right: Option<Held>) -> (Option<Held>, Option<Held>) {
    let (Some(mut one), Some(mut other)) = (left.clone(), right.clone()) else { return (left, right) };
    let (before, there) = (one.fields.clone(), other.fields.clone());
    one.fields.retain(|field, value| there.get(field) != Some(value));
    other.fields.retain(|field, value| before.get(field) != Some(value));
    (Some(one), Some(other))
}

/// The first byte in which two values differ.
fn differs_from(left: Option<&Held>, right: Option<&Held>) -> usize {
    let (Some(left), Some(right)) = (left, right) else { return 0 };
    left.value.iter().zip(&right.value).take_while(|(one, other)| one == other).count()
}

/// Sends a command for each key; the key takes the place of `KEY`.
fn asked(client: &mut Client, words: &[&str], keys: &[Vec<u8>]) -> Result<Vec<Frame>> {
    let mut commands: Vec<Vec<Vec<u8>>> = Vec::with_capacity(keys.len());
    for key in keys {
        let words = words.iter().map(|word| if *word == KEY { key.clone() } else { word.as_bytes().to_vec() });
        commands.push(words.collect());
    }
    client.pipeline(&commands)
}

/// The fields of HGETALL's answer.
fn fields(answer: Frame) -> BTreeMap<Vec<u8>, (Vec<u8>, i64)> {
    let Frame::Array(items) = answer else { return BTreeMap::new() };
    let mut items = items.into_iter().filter_map(|item| item.into_bytes().ok());
    let mut fields = BTreeMap::new();
    while let (Some(field), Some(value)) = (items.next(), items.next()) {
        fields.insert(field, (value, NEVER));
    }
    fields
}

/// Adds the times at which the fields expire.
fn field_times(client: &mut Client, key: &[u8], fields: &mut BTreeMap<Vec<u8>, (Vec<u8>, i64)>) -> Result<()> {
    if fields.is_empty() {
        return Ok(());
    }
    let count = fields.len().to_string();
    let mut words = vec![b"HPEXPIRETIME".to_vec(), key.to_vec(), b"FIELDS".to_vec(), count.into_bytes()];
    words.extend(fields.keys().cloned());
    // The whole key may have expired since.
    let Ok(Frame::Array(times)) = client.call(&words) else { return Ok(()) };
    for ((_, expires), time) in fields.values_mut().zip(times) {
        *expires = time.as_int().unwrap_or(NEVER);
    }
    Ok(())
}

/// The names of what a server counts for itself. Before version 7.2, Redis does not replicate how many entries a group
/// has read when it reads: its own replicas differ in that too.
fn own(client: &mut Client) -> Result<Vec<&'static str>> {
    let info = client.info("server")?;
    let version = info.get("redis_version").unwrap_or_default().to_owned();
    let mut numbers = version.split('.').filter_map(|number| number.parse::<u32>().ok());
    let is_old = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0)) < (7, 2);
    Ok(OWN.iter().chain(if is_old { &OWN_BEFORE_7_2[..] } else { &[] }).copied().collect())
}

/// The answer in an order that does not depend on the encoding, and without what each server counts for itself.
fn tidied(answer: Frame, sorted: bool, own: &[&str]) -> Frame {
    let Frame::Array(mut items) = answer else { return answer };
    if sorted {
        items.sort_by_key(|item| item.as_bytes().map(<[u8]>::to_vec));
        return Frame::Array(items);
    }
    let mut tidy = Vec::with_capacity(items.len());
    let mut items = items.into_iter().peekable();
    while let Some(item) = items.next() {
        if item.as_str().is_some_and(|name| own.contains(&name)) {
            items.next();
        } else if !is_idle_consumer(&item) {
            tidy.push(tidied(item, false, own));
        }
    }
    Frame::Array(tidy)
}

/// Whether this describes a consumer without pending entries. The servers do not replicate one that a claim of nothing
/// has made: their own replicas differ in that.
fn is_idle_consumer(frame: &Frame) -> bool {
    let Frame::Array(items) = frame else { return false };
    let names = |index: usize, name: &str| items.get(index).and_then(Frame::as_str) == Some(name);
    let has_none = (1..items.len()).any(|index| names(index - 1, "pel-count") && items[index] == Frame::Integer(0));
    // A group has a count of its own, and more than its name before it.
    names(0, "name") && has_none && !(0..items.len()).any(|index| names(index, "consumers"))
}

/// A frame as bytes that are equal for equal frames only.
fn encode(frame: &Frame, into: &mut Vec<u8>) {
    match frame {
        Frame::Simple(bytes) | Frame::Bulk(bytes) | Frame::Error(bytes) => {
            into.extend_from_slice(format!("${} ", bytes.len()).as_bytes());
            into.extend_from_slice(bytes);
        }
        Frame::Integer(number) => into.extend_from_slice(format!(":{number} ").as_bytes()),
        Frame::Null => into.extend_from_slice(b"_ "),
        Frame::Array(items) => {
            into.extend_from_slice(format!("*{} ", items.len()).as_bytes());
            items.iter().for_each(|item| encode(item, into));
        }
    }
}

/// The word that a key replaces.
const KEY: &str = "\0key";

/// How a value of each type is read, and whether its elements have no order.
const READ: [(&str, (&[&str], bool)); 6] = [
    ("string", (&["GET", KEY], false)),
    ("list", (&["LRANGE", KEY, "0", "-1"], false)),
    ("set", (&["SMEMBERS", KEY], true)),
    ("zset", (&["ZRANGE", KEY, "0", "-1", "WITHSCORES"], false)),
    ("hash", (&["HGETALL", KEY], false)),
    // Entries, identifiers, counters, groups, consumers, and all pending entries.
    ("stream", (&["XINFO", "STREAM", KEY, "FULL", "COUNT", "0"], false)),
];

/// What a server says of a stream's memory, and of when it saw a consumer itself.
const OWN: [&str; 4] = ["radix-tree-keys", "radix-tree-nodes", "seen-time", "active-time"];

/// What Redis 7.0 says of a group, besides.
const OWN_BEFORE_7_2: [&str; 2] = ["entries-read", "lag"];

/// PEXPIRETIME of a key that does not expire.
const NEVER: i64 = -1;

/// PEXPIRETIME of a missing key: it expired before now.
const KEY_IS_GONE: i64 = -2;

/// Bytes before the first one that differs, in a message.
const SHOWN_BEFORE: usize = 40;

/// Fields of a hash in a message.
const SHOWN_FIELDS: usize = 4;

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::{Server, fill_every_type, require};

    fn read(server: &Server) -> Contents {
        Contents::of(&mut server.client().unwrap()).unwrap()
    }

    #[test]
    fn what_a_digest_does_not_see_is_a_difference() {
        for kind in require::kinds() {
            let servers = [Server::start(kind).unwrap(), Server::start(kind).unwrap()];
            for server in &servers {
                let client = &mut server.client().unwrap();
                client.ok(&["SELECT", "3"]).unwrap();
                client.call(&["XADD", "stream", "1-1", "field", "value"]).unwrap();
                client.call(&["XGROUP", "CREATE", "stream", "group", "0"]).unwrap();
                client.call(&["SADD", "set", "a", "b", "1"]).unwrap();
            }
            let [one, other] = &servers;
            // A consumer that no replica of the server's own would have.
            let client = &mut one.client().unwrap();
            client.ok(&["SELECT", "3"]).unwrap();
            client.call(&["XAUTOCLAIM", "stream", "group", "heir", "0", "0"]).unwrap();
            assert_eq!(differences(&read(one), &read(other), 9), Vec::<String>::new());
            let changes: [&[&str]; 6] = [
                &["XREADGROUP", "GROUP", "group", "reader", "STREAMS", "stream", ">"],
                &["XSETID", "stream", "9-9"],
                &["PEXPIREAT", "set", "4102444800000"],
                &["FUNCTION", "LOAD", "#!lua name=l\nredis.register_function('f', function() return 1 end)"],
                &["SREM", "set", "b"],
                &["SET", "new", "value"],
            ];
            for (count, change) in (1..).zip(changes) {
                let client = &mut other.client().unwrap();
                client.ok(&["SELECT", "3"]).unwrap();
                client.call(change).unwrap();
                let found = differences(&read(one), &read(other), 9);
                // The stream and the set are changed twice.
                let wanted = [1, 1, 2, 3, 3, 4][count - 1];
                assert_eq!(found.len(), wanted, "after {change:?}: {found:#?}");
            }
        }
    }

    #[test]
    fn every_type_is_read_and_what_has_expired_is_absent() {
        for kind in require::kinds() {
            let server = Server::start(kind).unwrap();
            let client = &mut server.client().unwrap();
            fill_every_type(client, 7).unwrap();
            client.ok(&["SELECT", "0"]).unwrap();
            let before = read(&server);
            assert!(before.len() > 10 && !before.is_empty());
            assert_eq!(differences(&before, &read(&server), 9), Vec::<String>::new());
            client.ok(&["SET", "gone", "x", "PX", "1"]).unwrap();
            let with = read(&server);
            crate::server::wait_until("the key to expire", crate::compare::CALM_TIME, || {
                let left = client.int(&["PTTL", "gone"])?;
                Ok(if left == KEY_IS_GONE { Ok(()) } else { Err(left.to_string()) })
            })
            .unwrap();
            assert_eq!(differences(&before, &with, 9), Vec::<String>::new());
        }
    }
}
