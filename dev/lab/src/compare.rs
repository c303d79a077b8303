//! Whether a replica is exact: the same data, the same history, the same offset.
//!
//! `DEBUG DIGEST` covers keys, values of most types, and whether a key expires. It covers neither the time of expiry
//! nor functions, nor what `beyond_digest` reads of streams and modules' types, so those are compared separately. The
//! comparison needs idle servers: stop your writers first.

use std::collections::BTreeSet;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use remora_redis::resp::Frame;

use crate::beyond_digest::{self, beyond};
use crate::client::{Client, shown_bytes};
use crate::error::{Error, Result};
use crate::server::{Server, wait_until};
use crate::walk::{ask_each, databases, each_batch};

/// The state on which two servers agree.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Agreement {
    /// The replid of their common history.
    pub replid: String,
    /// The replication offset of both.
    pub offset: u64,
    /// DEBUG DIGEST of both.
    pub digest: String,
}

/// Fails the test, with the differences, unless the replica becomes exact within [`CALM_TIME`].
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
    // A primary full of short-lived keys writes deletions for minutes and is never idle.
    one.ok(&["DEBUG", "SET-ACTIVE-EXPIRE", "0"])?;
    let silence = Silence::begin(primary, replica)?;
    let compared = at_rest(&mut one, &mut other, within).and_then(|(agreement, same_digest)| {
        let found = differences(&mut one, &mut other, same_digest)?;
        if found.is_empty() {
            return Ok(agreement);
        }
        let Agreement { replid, offset, .. } = agreement;
        let heading = format!("{replica} is not an exact copy of {primary}, both at {replid} {offset}");
        Err(Error::Different(format!("{heading}:\n  {}", found.join("\n  "))))
    });
    drop(silence);
    // If this fails, the server has ended, and the comparison fails too.
    let _ = one.ok(&["DEBUG", "SET-ACTIVE-EXPIRE", "1"]);
    compared
}

/// Two servers between which nothing passes until this is dropped. No client writes to the primary, and no `PING` is
/// sent: the digests of millions of keys take longer than the ten seconds from one to the next.
struct Silence<'s> {
    primary: &'s Server,
    settings: Vec<(&'s Server, &'static str, String)>,
}

/// Longer than any comparison.
const SILENT_SECONDS: &str = "86400";

/// Clients that write wait for ten minutes at most: longer than any comparison, if this process is killed in one.
const PAUSE: [&str; 4] = ["CLIENT", "PAUSE", "600000", "WRITE"];
const UNPAUSE: [&str; 2] = ["CLIENT", "UNPAUSE"];

impl Silence<'_> {
    fn begin<'s>(primary: &'s Server, replica: &'s Server) -> Result<Silence<'s>> {
        let settings = [(primary, "repl-timeout"), (replica, "repl-timeout"), (primary, "repl-ping-replica-period")];
        let mut silence = Silence { primary, settings: Vec::new() };
        for (server, name) in settings {
            let before = server.configured(name)?;
            server.configure(name, SILENT_SECONDS)?;
            silence.settings.push((server, name, before));
        }
        primary.client()?.ok(&PAUSE)?;
        Ok(silence)
    }
}

impl Drop for Silence<'_> {
    fn drop(&mut self) {
        // If one of these fails, the server has ended, and the comparison fails too.
        let _ = self.primary.client().and_then(|mut client| client.ok(&UNPAUSE));
        for (server, name, before) in self.settings.drain(..).rev() {
            let _ = server.configure(name, &before);
        }
    }
}

/// Waits for a moment in which both have the same offset, and returns whether their digests are equal then.
///
/// Valkey's digest leaves out hash fields that have expired at that moment. So two exact servers may differ, as long as
/// fields expire: neither of two digests that are computed side by side is the earlier one. If they differ, the
/// primary's digest is taken before and after the replica's, which must equal one of the two. If the primary's two
/// digests are equal, no field expired in between, and another digest of the replica is a true difference. If they are
/// not, the servers are compared key by key.
fn at_rest(one: &mut Client, other: &mut Client, within: Duration) -> Result<(Agreement, bool)> {
    wait_until("the replica to reach its primary's offset", within, || {
        let (here, there) = (place(one)?, place(other)?);
        if here != there {
            return Ok(Err(format!("primary {here:?}, replica {there:?}")));
        }
        let (mut before, mut copy) = digests(one, other)?;
        let mut after = before.clone();
        if copy != before {
            (before, copy, after) = (digest(one)?, digest(other)?, digest(one)?);
        }
        // The primary sends PINGs by itself: digests count only if both offsets stood still around them.
        if place(one)? != here || place(other)? != there {
            return Ok(Err("both moved on while they were compared".into()));
        }
        let same = copy == before || copy == after;
        let some_expired = before != after;
        let same = same || some_expired && different_keys(one, other, 1)?.is_empty();
        if !same && some_expired {
            return Ok(Err("fields of hashes expired while they were compared".into()));
        }
        if !same && remove_empty_hashes(one)? > 0 {
            return Ok(Err("the primary held empty hashes".into()));
        }
        Ok(Ok((Agreement { replid: here.replid, offset: here.offset, digest: copy }, same)))
    })
}

/// Deletes the primary's hashes without fields, and returns how many there were.
///
/// Valkey 9 rarely keeps such a key after the last field of a hash has expired. Its snapshots leave it out, so its own
/// replicas do not have it either.
fn remove_empty_hashes(primary: &mut Client) -> Result<u64> {
    primary.ok(&UNPAUSE)?;
    let mut removed = 0;
    for database in databases(primary)?.into_keys() {
        each_batch(primary, database, &[], |primary, keys| {
            let types = ask_each(primary, database, &["TYPE"], keys)?;
            let hashes = keys.iter().zip(types).filter(|(_, kind)| kind.as_str() == Some("hash"));
            let hashes: Vec<Vec<u8>> = hashes.map(|(key, _)| key.clone()).collect();
            let lengths = ask_each(primary, database, &["HLEN"], &hashes)?;
            for (key, _) in hashes.iter().zip(lengths).filter(|(_, length)| *length == Frame::Integer(0)) {
                removed += primary.int(&[b"DEL".as_slice(), key])? as u64;
            }
            Ok(true)
        })?;
    }
    primary.ok(&PAUSE)?;
    Ok(removed)
}

/// The differences as text.
fn differences(one: &mut Client, other: &mut Client, same_digest: bool) -> Result<Vec<String>> {
    if !same_digest {
        let mut found = vec!["the digests differ".to_owned()];
        found.extend(different_keys(one, other, MOST_SHOWN)?);
        return Ok(found);
    }
    let mut found = different_functions(one, other)?;
    found.extend(different_expiries(one, other, MOST_SHOWN)?);
    let entries_read = beyond_digest::replicates_entries_read(one)? && beyond_digest::replicates_entries_read(other)?;
    let (here, there) = (beyond(one, entries_read)?, beyond(other, entries_read)?);
    found.extend(beyond_digest::different(&here, &there, MOST_SHOWN));
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

/// Both digests, which the servers compute at the same time.
fn digests(one: &mut Client, other: &mut Client) -> Result<(String, String)> {
    std::thread::scope(|scope| {
        let computing = scope.spawn(|| digest(other));
        let here = digest(one)?;
        let there = computing.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        Ok((here, there))
    })
}

fn digest(client: &mut Client) -> Result<String> {
    client.text(&["DEBUG", "DIGEST"])
}

/// The keys that only one server has, or that have different values; at most `most` of them, as text.
pub fn different_keys(one: &mut Client, other: &mut Client, most: usize) -> Result<Vec<String>> {
    let mut found = Vec::new();
    for database in databases(one)?.keys().chain(databases(other)?.keys()).copied().collect::<BTreeSet<u32>>() {
        compare_database(one, other, database, most, &mut found)?;
        // Walking the first server's keys does not find the keys that only the other one has.
        each_batch(other, database, &[], |other, keys| {
            let here = ask_each(one, database, &["EXISTS"], keys)?;
            let is_absent = |frame: &Frame| *frame == Frame::Integer(0);
            let absent = keys.iter().zip(here).filter(|(_, here)| is_absent(here)).map(|(key, _)| key.clone());
            let absent: Vec<Vec<u8>> = absent.collect();
            // Checked again, as the key may just have expired.
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
    each_batch(one, db, &[], |one, keys| {
        let left = ask_each(one, db, &["DEBUG", "DIGEST-VALUE"], keys)?;
        let right = ask_each(other, db, &["DEBUG", "DIGEST-VALUE"], keys)?;
        // Again, as a field may have expired meanwhile.
        let again = ask_each(one, db, &["DEBUG", "DIGEST-VALUE"], keys)?;
        let pairs = keys.iter().zip(left.iter().zip(&again).zip(&right));
        for (key, _) in pairs.filter(|(_, ((left, again), right))| left != right && again != right) {
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
    let mut fields = String::new();
    if kind == "hash" {
        // Expired fields count for HLEN as long as they are stored, but HKEYS does not show them.
        let (stored, live) = (client.int(&[b"HLEN".as_slice(), key])?, client.list(&[b"HKEYS".as_slice(), key])?.len());
        fields = format!(", {stored} fields stored, {live} live");
    }
    Ok(if kind == "none" { "missing".into() } else { format!("{kind} ({encoding}, pttl {left}{fields})") })
}

/// Keys with a different time of expiry. A key that expires at this moment is ignored.
fn different_expiries(one: &mut Client, other: &mut Client, most: usize) -> Result<Vec<String>> {
    let mut found = Vec::new();
    let are_exact = knows(one, "PEXPIRETIME")? && knows(other, "PEXPIRETIME")?;
    for (database, expires) in databases(one)? {
        if expires == 0 {
            continue;
        }
        each_batch(one, database, &[], |one, keys| {
            let times = if are_exact { asked_times } else { computed_times };
            let (left, right) = (times(one, database, keys)?, times(other, database, keys)?);
            for (key, (left, right)) in keys.iter().zip(left.iter().zip(&right)) {
                let gone = |time: &Frame| *time == Frame::Integer(KEY_IS_GONE);
                if !same_time(left, right, are_exact) && !gone(left) && !gone(right) {
                    let key = shown_bytes(key);
                    note(&mut found, most, format!("db {database}, {key}: expires at {left:?} and {right:?}"));
                }
            }
            Ok(found.len() < most)
        })?;
    }
    Ok(found)
}

/// When keys expire.
fn asked_times(client: &mut Client, database: u32, keys: &[Vec<u8>]) -> Result<Vec<Frame>> {
    ask_each(client, database, &["PEXPIRETIME"], keys)
}

/// The same, of servers before Redis 7.0, which say only how long keys still live.
fn computed_times(client: &mut Client, database: u32, keys: &[Vec<u8>]) -> Result<Vec<Frame>> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_millis() as i64);
    let left = ask_each(client, database, &["PTTL"], keys)?;
    let at = |frame| match frame {
        Frame::Integer(left) if left >= 0 => Frame::Integer(now + left),
        other => other,
    };
    Ok(left.into_iter().map(at).collect())
}

/// Whether two times of expiry are equal, but for the time between two questions where they were computed.
fn same_time(one: &Frame, other: &Frame, are_exact: bool) -> bool {
    match (one, other) {
        (Frame::Integer(one), Frame::Integer(other)) if !are_exact && *one > 0 && *other > 0 => {
            one.abs_diff(*other) <= ASKED_WITHIN
        }
        (one, other) => one == other,
    }
}

/// Whether the server has a command.
pub(crate) fn knows(client: &mut Client, command: &str) -> Result<bool> {
    let answer = client.list(&["COMMAND", "INFO", command])?;
    Ok(matches!(answer.first(), Some(Frame::Array(facts)) if !facts.is_empty()))
}

/// Function libraries that only one server has, including their code. Before Redis 7.0 there are none.
fn different_functions(one: &mut Client, other: &mut Client) -> Result<Vec<String>> {
    let libraries = |client: &mut Client| -> Result<BTreeSet<String>> {
        if !knows(client, "FUNCTION")? {
            return Ok(BTreeSet::new());
        }
        let list = client.list(&["FUNCTION", "LIST", "WITHCODE"])?;
        Ok(list.iter().map(|library| format!("{library:?}")).collect())
    };
    let (left, right) = (libraries(one)?, libraries(other)?);
    Ok(left
        .symmetric_difference(&right)
        .map(|library| format!("only one server has this function library: {library}"))
        .collect())
}

fn note(found: &mut Vec<String>, most: usize, what: String) {
    if found.len() < most {
        found.push(what);
    }
}

/// How long a replica may take to reach its primary's offset once no client writes any more.
pub const CALM_TIME: Duration = Duration::from_secs(60);

/// Number of differences in a message.
const MOST_SHOWN: usize = 10;

/// Milliseconds between the questions for one batch's times at two servers, on a busy machine.
const ASKED_WITHIN: u64 = 2000;

/// PEXPIRETIME of a missing key.
const KEY_IS_GONE: i64 = -2;
