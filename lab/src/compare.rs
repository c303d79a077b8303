//! Whether a replica is exact: the same data, the same history, the same place in it.
//!
//! `DEBUG DIGEST` covers keys, values and whether a key expires, but neither the time at which it does nor functions:
//! those are compared besides. It needs a moment of rest: stop your writers first.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use remora_redis::resp::Frame;

use crate::client::{Client, shown_bytes};
use crate::error::{Error, Result};
use crate::server::{Server, wait_until};

/// What two servers agree on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Agreement {
    /// The name of their common history.
    pub replid: String,
    /// How far both are in it.
    pub offset: u64,
    /// DEBUG DIGEST of both.
    pub digest: String,
}

/// Fails the test unless the replica becomes exact within [`CALM_TIME`]; says what differs.
#[track_caller]
pub fn assert_same_data(primary: &Server, replica: &Server) -> Agreement {
    match same_data(primary, replica, CALM_TIME) {
        Ok(agreement) => agreement,
        Err(error) => panic!("{error}"),
    }
}

/// Waits until both are at the same offset of the same history, then compares everything.
pub fn same_data(primary: &Server, replica: &Server, within: Duration) -> Result<Agreement> {
    let (mut one, mut other) = (primary.client()?, replica.client()?);
    // A primary full of short-lived keys writes deletions for minutes and is never at rest.
    one.ok(&["DEBUG", "SET-ACTIVE-EXPIRE", "0"])?;
    let compared = at_rest(&mut one, &mut other, within).and_then(|(agreement, same_digest)| {
        let found = differences(&mut one, &mut other, same_digest)?;
        if found.is_empty() {
            return Ok(agreement);
        }
        let Agreement { replid, offset, .. } = agreement;
        let heading = format!("{replica} is no exact copy of {primary}, both at {replid} {offset}");
        Err(Error::Different(format!("{heading}:\n  {}", found.join("\n  "))))
    });
    // Where this fails, the server is gone, and so has the comparison failed.
    let _ = one.ok(&["DEBUG", "SET-ACTIVE-EXPIRE", "1"]);
    compared
}

/// A moment in which both are in the same place, and whether their digests then are the same.
///
/// Valkey's digest leaves out those fields of hashes that are over at the moment of asking, so two exact servers that are
/// asked one after the other may differ, and go on so for as long as fields come to their time. Hence the primary is
/// asked before and after the replica: what the replica says has to be one of the two, and where the two are the same,
/// nothing came to its time in between and another answer of the replica is a true difference.
fn at_rest(one: &mut Client, other: &mut Client, within: Duration) -> Result<(Agreement, bool)> {
    wait_until("the replica to be where its primary is", within, || {
        let (here, there) = (place(one)?, place(other)?);
        if here != there {
            return Ok(Err(format!("primary {here:?}, replica {there:?}")));
        }
        let (before, copy, after) = (digest(one)?, digest(other)?, digest(one)?);
        // The primary sends PINGs by itself: digests count only where both stood still around them.
        if place(one)? != here || place(other)? != there {
            return Ok(Err("both moved on while they were compared".into()));
        }
        let same = copy == before || copy == after;
        if !same && before != after {
            return Ok(Err("fields of hashes expired while they were compared".into()));
        }
        Ok(Ok((Agreement { replid: here.replid, offset: here.offset, digest: copy }, same)))
    })
}

/// What differs, in words.
fn differences(one: &mut Client, other: &mut Client, same_digest: bool) -> Result<Vec<String>> {
    if !same_digest {
        let mut found = vec!["the digests differ".to_owned()];
        found.extend(different_keys(one, other, MOST_SHOWN)?);
        return Ok(found);
    }
    let mut found = different_functions(one, other)?;
    found.extend(different_expiries(one, other, MOST_SHOWN)?);
    Ok(found)
}

#[derive(Debug, PartialEq, Eq)]
struct Place {
    replid: String,
    offset: u64,
}

fn place(client: &mut Client) -> Result<Place> {
    let info = client.info("replication")?;
    let replid = info.get("master_replid").unwrap_or_default().to_owned();
    Ok(Place { replid, offset: info.number("master_repl_offset").unwrap_or_default() })
}

fn digest(client: &mut Client) -> Result<String> {
    client.text(&["DEBUG", "DIGEST"])
}

/// The keys that one has and the other has not, or has with another value; at most `most` of them, in words.
pub fn different_keys(one: &mut Client, other: &mut Client, most: usize) -> Result<Vec<String>> {
    let mut found = Vec::new();
    for database in databases(one)?.keys().chain(databases(other)?.keys()).copied().collect::<BTreeSet<u32>>() {
        compare_database(one, other, database, most, &mut found)?;
        // What only the other has was not met by walking the first one's keys.
        each_batch(other, database, |other, keys| {
            let here = ask_each(one, database, &["EXISTS"], keys)?;
            let is_absent = |frame: &Frame| *frame == Frame::Integer(0);
            let absent = keys.iter().zip(here).filter(|(_, here)| is_absent(here)).map(|(key, _)| key.clone());
            let absent: Vec<Vec<u8>> = absent.collect();
            // Asked again, as the key may just have come to its time.
            let there = ask_each(other, database, &["EXISTS"], &absent)?;
            for (key, _) in absent.iter().zip(there).filter(|(_, there)| !is_absent(there)) {
                note(&mut found, most, format!("db {database}, {}: only the replica has it", shown_bytes(key)));
            }
            Ok(found.len() < most)
        })?;
    }
    Ok(found)
}

fn compare_database(one: &mut Client, other: &mut Client, db: u32, most: usize, found: &mut Vec<String>) -> Result<()> {
    each_batch(one, db, |one, keys| {
        let left = ask_each(one, db, &["DEBUG", "DIGEST-VALUE"], keys)?;
        let right = ask_each(other, db, &["DEBUG", "DIGEST-VALUE"], keys)?;
        for (key, _) in keys.iter().zip(left.iter().zip(&right)).filter(|(_, (left, right))| left != right) {
            let (here, there) = (described(one, key)?, described(other, key)?);
            note(found, most, format!("db {db}, {}: {here} at the primary, {there} at the replica", shown_bytes(key)));
        }
        Ok(found.len() < most)
    })
}

fn described(client: &mut Client, key: &[u8]) -> Result<String> {
    let kind = client.text(&[b"TYPE".as_slice(), key])?;
    let encoding = client.text(&[b"OBJECT".as_slice(), b"ENCODING", key]).unwrap_or_default();
    let left = client.int(&[b"PTTL".as_slice(), key])?;
    Ok(if kind == "none" { "missing".into() } else { format!("{kind} ({encoding}, pttl {left})") })
}

/// Keys that expire at another time; a key that is just expiring is passed over.
fn different_expiries(one: &mut Client, other: &mut Client, most: usize) -> Result<Vec<String>> {
    let mut found = Vec::new();
    for (database, expires) in databases(one)? {
        if expires == 0 {
            continue;
        }
        each_batch(one, database, |one, keys| {
            let left = ask_each(one, database, &["PEXPIRETIME"], keys)?;
            let right = ask_each(other, database, &["PEXPIRETIME"], keys)?;
            for (key, (left, right)) in keys.iter().zip(left.iter().zip(&right)) {
                let gone = |time: &Frame| *time == Frame::Integer(KEY_IS_GONE);
                if left != right && !gone(left) && !gone(right) {
                    let key = shown_bytes(key);
                    note(&mut found, most, format!("db {database}, {key}: expires at {left:?} and {right:?}"));
                }
            }
            Ok(found.len() < most)
        })?;
    }
    Ok(found)
}

/// Function libraries that one has and the other has not, code included.
fn different_functions(one: &mut Client, other: &mut Client) -> Result<Vec<String>> {
    let libraries = |client: &mut Client| -> Result<BTreeSet<String>> {
        let list = client.list(&["FUNCTION", "LIST", "WITHCODE"])?;
        Ok(list.iter().map(|library| format!("{library:?}")).collect())
    };
    let (left, right) = (libraries(one)?, libraries(other)?);
    Ok(left
        .symmetric_difference(&right)
        .map(|library| format!("one alone has this function library: {library}"))
        .collect())
}

/// The databases that hold keys, and how many of the keys in each expire.
fn databases(client: &mut Client) -> Result<BTreeMap<u32, u64>> {
    let keyspace = client.info("keyspace")?;
    let expires = |line: &str| line.split(',').find_map(|part| part.strip_prefix("expires=")?.parse().ok());
    let numbered = |name: &str| name.strip_prefix("db")?.parse().ok();
    Ok(keyspace.iter().filter_map(|(name, line)| Some((numbered(name)?, expires(line)?))).collect())
}

/// Walks all keys of a database until `look` says that it has seen enough.
fn each_batch(
    client: &mut Client,
    database: u32,
    mut look: impl FnMut(&mut Client, &[Vec<u8>]) -> Result<bool>,
) -> Result<()> {
    client.ok(&["SELECT", &database.to_string()])?;
    let mut cursor = "0".to_owned();
    loop {
        let mut answer = client.list(&["SCAN", &cursor, "COUNT", SCAN_COUNT])?.into_iter();
        let (Some(next), Some(Frame::Array(keys))) = (answer.next(), answer.next()) else {
            return Err(Error::Garbled("SCAN's answer is no cursor and list".into()));
        };
        let keys: Vec<Vec<u8>> = keys.into_iter().filter_map(|key| key.into_bytes().ok()).collect();
        cursor = next.as_str().unwrap_or("0").to_owned();
        if !look(client, &keys)? || cursor == "0" {
            return Ok(());
        }
    }
}

/// The same question for each key, in one pipeline.
fn ask_each(client: &mut Client, database: u32, question: &[&str], keys: &[Vec<u8>]) -> Result<Vec<Frame>> {
    client.ok(&["SELECT", &database.to_string()])?;
    let ask = |key: &Vec<u8>| question.iter().map(|word| word.as_bytes().to_vec()).chain([key.clone()]).collect();
    client.pipeline(&keys.iter().map(ask).collect::<Vec<Vec<Vec<u8>>>>())
}

fn note(found: &mut Vec<String>, most: usize, what: String) {
    if found.len() < most {
        found.push(what);
    }
}

/// How long a replica may take to be where its primary is, once nobody writes any more.
pub const CALM_TIME: Duration = Duration::from_secs(60);

/// How many differences a message shows.
const MOST_SHOWN: usize = 10;

/// Keys per SCAN.
const SCAN_COUNT: &str = "1000";

/// PEXPIRETIME of a key that is not there.
const KEY_IS_GONE: i64 = -2;
