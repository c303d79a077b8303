//! Whether a replica is exact: the same data, the same history, the same offset.
//!
//! `DEBUG DIGEST` covers keys, values of most types, and whether a key expires. It covers neither the time of expiry
//! nor functions, nor what `beyond_digest` reads of streams and modules' types, so those are compared separately. The
//! comparison needs idle servers: stop your writers first.

use std::collections::{BTreeMap, BTreeSet};
use std::panic::resume_unwind;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use crate::beyond_digest::{self, ask_each, beyond, databases, each_batch};
use crate::client::{Client, shown_bytes};
use crate::server::{Server, wait_until};
use crate::{Error, Result};
use remora_redis::resp::Frame;

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
    same_data_in_all(primary, &[replica], within)?.remove(0)
}

/// Does the same with several replicas at once, of which each has a result of its own. All digests are computed at the
/// same time, and the primary's once for all.
pub fn same_data_in_all(primary: &Server, replicas: &[&Server], within: Duration) -> Result<Vec<Result<Agreement>>> {
    let latest = Instant::now() + within;
    let mut one = primary.client()?;
    // A primary full of short-lived keys writes deletions for minutes and is never idle.
    one.ok(&["DEBUG", "SET-ACTIVE-EXPIRE", "0"])?;
    let silence = Silence::begin(primary, replicas)?;
    let compared = agreements(&mut one, replicas, within).map(|agreements| {
        std::thread::scope(|scope| {
            let pairs = replicas.iter().copied().zip(agreements);
            let compare = |(replica, known)| scope.spawn(move || compared(primary, replica, known, latest));
            let running: Vec<_> = pairs.map(compare).collect();
            running.into_iter().map(|thread| thread.join().unwrap_or_else(|panic| resume_unwind(panic))).collect()
        })
    });
    drop(silence);
    // If this fails, the server has ended, and the comparison fails too.
    let _ = one.ok(&["DEBUG", "SET-ACTIVE-EXPIRE", "1"]);
    compared
}

/// Compares one replica, whose digest may be known to be the primary's.
fn compared(primary: &Server, replica: &Server, known: Option<Agreement>, latest: Instant) -> Result<Agreement> {
    let (mut one, mut other) = (primary.client()?, replica.client()?);
    let (agreement, same_digest) = match known {
        Some(agreement) => (agreement, true),
        None => at_rest(&mut one, &mut other, latest.saturating_duration_since(Instant::now()))?,
    };
    let found = differences(&mut one, &mut other, same_digest)?;
    if found.is_empty() {
        return Ok(agreement);
    }
    let Agreement { replid, offset, .. } = agreement;
    let heading = format!("{replica} is not an exact copy of {primary}, both at {replid} {offset}");
    Err(Error::Different(format!("{heading}:\n  {}", found.join("\n  "))))
}

/// Waits until all are at the primary's offset of its history, and returns which of them have its digest there. None is
/// known if that does not happen in time.
fn agreements(one: &mut Client, replicas: &[&Server], within: Duration) -> Result<Vec<Option<Agreement>>> {
    let mut others = replicas.iter().map(|replica| replica.client()).collect::<Result<Vec<Client>>>()?;
    let known = wait_until("the replicas to reach their primary's offset", within, || {
        let here = place(one)?;
        if let Some(there) = elsewhere(&here, &mut others)? {
            return Ok(Err(format!("primary {here:?}, replica {there:?}")));
        }
        let (digest, copies) = digests(one, &mut others)?;
        // The primary sends PINGs by itself: digests count only if all offsets stood still around them.
        if place(one)? != here || elsewhere(&here, &mut others)?.is_some() {
            return Ok(Err("they moved on while they were compared".into()));
        }
        let Place { replid, offset } = here;
        let agreement = Agreement { replid, offset, digest };
        Ok(Ok(copies.iter().map(|copy| (*copy == agreement.digest).then(|| agreement.clone())).collect()))
    });
    match known {
        Err(Error::TooLate { .. }) => Ok(vec![None; replicas.len()]),
        known => known,
    }
}

/// The place of the first replica that is not where its primary is.
fn elsewhere(here: &Place, replicas: &mut [Client]) -> Result<Option<Place>> {
    for replica in replicas {
        let there = place(replica)?;
        if there != *here {
            return Ok(Some(there));
        }
    }
    Ok(None)
}

/// A primary and its replicas, between which nothing passes until this is dropped. No client writes to the primary, and
/// no `PING` is sent: the digests of millions of keys take longer than the ten seconds from one to the next.
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
    fn begin<'s>(primary: &'s Server, replicas: &[&'s Server]) -> Result<Silence<'s>> {
        let settings = [(primary, "repl-timeout"), (primary, "repl-ping-replica-period")].into_iter();
        let settings = settings.chain(replicas.iter().map(|replica| (*replica, "repl-timeout")));
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
/// fields expire: neither of two digests that are computed side by side is the earlier one. So the primary's digest is
/// taken before and after the replica's, which must equal one of the two. If the primary's two digests are equal, no
/// field expired in between, and another digest of the replica is a true difference. If they are not, the servers are
/// compared key by key.
fn at_rest(one: &mut Client, other: &mut Client, within: Duration) -> Result<(Agreement, bool)> {
    wait_until("the replica to reach its primary's offset", within, || {
        let (here, there) = (place(one)?, place(other)?);
        if here != there {
            return Ok(Err(format!("primary {here:?}, replica {there:?}")));
        }
        let (before, copy, after) = (digest(one)?, digest(other)?, digest(one)?);
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

/// The digests of the primary and of its replicas, which they compute at the same time.
fn digests(one: &mut Client, others: &mut [Client]) -> Result<(String, Vec<String>)> {
    std::thread::scope(|scope| {
        let computing: Vec<_> = others.iter_mut().map(|other| scope.spawn(|| digest(other))).collect();
        let here = digest(one)?;
        let copies = computing.into_iter().map(|thread| thread.join().unwrap_or_else(|panic| resume_unwind(panic)));
        Ok((here, copies.collect::<Result<_>>()?))
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

// Everything that a server holds, read as clients read it: no digest of the server's is trusted.
//
// `DEBUG DIGEST` leaves out the groups, consumers and counters of streams, functions, and the times at which keys and
// fields expire. [`Contents::of`] asks for each of them, and [`differences_of`] compares two servers, or one server
// with what another one held earlier. Both take seconds for each hundred thousand keys. The servers need not stand
// still for it, only their clients: a key or a field that has expired meanwhile counts as absent on both sides.

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
pub fn differences_of(one: &Contents, other: &Contents, most: usize) -> Vec<String> {
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
            assert_eq!(differences_of(&read(one), &read(other), 9), Vec::<String>::new());
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
                let found = differences_of(&read(one), &read(other), 9);
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
            assert_eq!(differences_of(&before, &read(&server), 9), Vec::<String>::new());
            client.ok(&["SET", "gone", "x", "PX", "1"]).unwrap();
            let with = read(&server);
            crate::server::wait_until("the key to expire", super::CALM_TIME, || {
                let left = client.int(&["PTTL", "gone"])?;
                Ok(if left == KEY_IS_GONE { Ok(()) } else { Err(left.to_string()) })
            })
            .unwrap();
            assert_eq!(differences_of(&before, &with, 9), Vec::<String>::new());
        }
    }
}
