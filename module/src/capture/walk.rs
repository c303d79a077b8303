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
use std::thread;
use std::time::{Duration, Instant};

use remora_fabric::Memory;
use remora_redis::rdb::{
    OPCODE_AUX, OPCODE_EOF, OPCODE_EXPIRETIME_MS, OPCODE_FREQ, OPCODE_IDLE, OPCODE_RESIZEDB, OPCODE_SELECTDB, magic,
    put_length,
};
use remora_table::server_pages::{ForkPoint, WriterStatus};
use remora_table::{CapturePage, Identity, Kind, SnapshotWriter};

use super::format_version;
use super::{AGENT_TIMEOUT, CaptureError};
use crate::api::{
    Context, Cursor, FastServer, FoundKey, FoundValue, Key, KeyKind, OwnedStr, ServerInfo, Step, StrRef, in_child,
};
use crate::fast;

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
        put_database(&mut self.out.small, number, self.context.key_count(), expires.unwrap_or(0));
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
        put_head(&mut self.out.small, expires_at, age, name.as_bytes(), Value::Bytes(value.len()));
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
    put_magic(&mut out.small, version).ok_or(CaptureError::NoAnswer("FUNCTION DUMP"))?;
    let database = point.database.to_string();
    let offset = point.offset.to_string();
    let fields: [(&str, &[u8]); 3] = [
        ("repl-stream-db", database.as_bytes()),
        ("repl-id", point.history.as_bytes()),
        ("repl-offset", offset.as_bytes()),
    ];
    for (name, value) in fields {
        put_field(&mut out.small, name, value);
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

// The fast walk: the same in the server's own tables, where its build is known exactly
// (`crate::fast`). It writes all strings, short ones too, and all other values that the server's own function for one
// value writes into its output. To the saver it leaves values of modules, and hashes with expiring fields.
//
// A key that was written is unlinked from the child's copy of the table instead of being deleted: nothing is freed,
// and nothing is looked up. The server's saver, which iterates over the same table afterwards, does not find it. So
// here too each key is in exactly one of the two parts. The saver looks at no clock, and neither does this walk: a key
// that has expired and is still there is written with its expiry, as the saver would write it.
//
// Before the child asks for its permission, a child of its own tries the walk and compares what it finds with the
// module's API: a wrong layout costs that child, and the snapshot is then taken by the server as usual.

/// How long the trial may take. It looks at a few thousand keys.
const TRIAL_LIMIT: Duration = Duration::from_secs(5);

/// Strings, and collections, of each database that the trial compares with what the module's API says.
const TRIAL_STRINGS: usize = 500;
const TRIAL_COLLECTIONS: usize = 100;

/// Keys of each database among which the trial looks for them.
const TRIAL_KEYS: usize = 5000;

/// Bytes at each end of a string that are compared. The middle of a longer one lies between them in one piece, and some
/// hundred long strings are a whole data set: to compare all of them would take as long as the snapshot.
const TRIAL_END_BYTES: usize = 4 << 10;

/// Larger collections are not compared: the server makes two copies of each.
const TRIAL_COLLECTION_BYTES_MAX: usize = 64 << 10;

/// The server's tables, after a trial.
///
/// # Errors
/// Why the fast walk is not offered.
pub(super) fn checked(context: &Context<'_>) -> Result<FastServer, CaptureError> {
    let server = fast::offer_walk(context).map_err(CaptureError::NoFastWalk)?;
    // One fork for both: that of a large server takes a while. What tries the functions changes the data of its copy,
    // and so it comes last.
    let trial = in_child(context, TRIAL_LIMIT, |steps| {
        compare(context, &server.in_trial())?;
        fast::check_shapes(context, &server.in_trial(), steps)
    });
    trial.map_err(|trouble| {
        let why = format!("a trial in a forked child failed: {trouble}");
        fast::mark(context, &trouble, &why);
        CaptureError::NoFastWalk(why)
    })?;
    Ok(server)
}

/// Writes the keys into `memory`, and takes them out of what the server will save.
pub(super) fn run_fast(
    context: &Context<'_>,
    page: &CapturePage,
    memory: Arc<Memory>,
    point: &ForkPoint,
    server: &FastServer,
) -> Result<(), CaptureError> {
    let least = usize::try_from(page.order().least_bytes).unwrap_or(usize::MAX);
    let mut out = Output::new(page, memory, point)?;
    let version = header(context, &mut out, point)?;
    let mut writer = Writer { out, ages: Ages::of(context), version, least, database: 0 };
    while context.select(writer.database) {
        writer.everything_of_a_database(context, server)?;
        writer.database += 1;
    }
    writer.out.finish()
}

struct Writer<'w> {
    out: Output<'w>,
    ages: Ages,
    /// The version of the format.
    version: u16,
    /// Shorter strings are left to the server, and all other types unless this is 0.
    least: usize,
    database: u32,
}

impl Writer<'_> {
    fn everything_of_a_database(&mut self, context: &Context<'_>, server: &FastServer) -> Result<(), CaptureError> {
        let (database, wanted) = (self.database, context.key_count());
        if wanted == 0 {
            return Ok(());
        }
        put_database(&mut self.out.small, database, wanted, expiring(context, database).unwrap_or(0));
        let mut error = None;
        let walked = server.walk(context, database, |found| match self.key(found) {
            Ok(true) => Step::Take,
            Ok(false) => Step::Leave,
            Err(why) => {
                error = Some(why);
                Step::Stop
            }
        });
        if let Some(error) = error {
            return Err(error);
        }
        let seen = walked.unwrap_or_default().seen as u64;
        if seen == wanted { Ok(()) } else { Err(CaptureError::Miscounted { database, seen, wanted }) }
    }

    /// Writes the key, or leaves it to the server.
    fn key(&mut self, found: &FoundKey<'_>) -> Result<bool, CaptureError> {
        // A time before 1970 is left to the server.
        let Ok(expires_at) = found.expires_ms.map(u64::try_from).transpose() else { return Ok(false) };
        let age = match self.ages {
            Ages::None => Age::Unknown,
            Ages::Idle => Age::Idle(found.idle_seconds() * 1000),
            Ages::Frequency => Age::Frequency(found.frequency()),
        };
        let out = &mut self.out;
        match found.value {
            FoundValue::Number(_) if self.least > DIGITS_MAX => return Ok(false),
            FoundValue::Number(number) => {
                put_head(&mut out.small, expires_at, age, found.key, Value::Number(number));
            }
            FoundValue::Bytes(bytes) if bytes.len() < self.least => return Ok(false),
            FoundValue::Bytes(bytes) => {
                put_head(&mut out.small, expires_at, age, found.key, Value::Bytes(bytes.len()));
                out.put(bytes)?;
            }
            FoundValue::Collection if self.least > 0 => return Ok(false),
            FoundValue::Collection => {
                let Some(kind) = found.saved_type(self.version) else { return Ok(false) };
                put_key(&mut out.small, expires_at, age, kind.0, found.key);
                let mut written = Ok(());
                let saved = found.save(kind, &mut |bytes| {
                    written = out.put(bytes);
                    written.is_ok()
                });
                written?;
                if !saved {
                    let key = shown(found.key);
                    return Err(CaptureError::Unreadable { database: self.database, key });
                }
            }
        }
        self.out.key_done()?;
        Ok(true)
    }
}

/// Digits and sign of the longest number.
const DIGITS_MAX: usize = 20;

/// In a child of the child: what the walk finds is what the module's API says.
fn compare(context: &Context<'_>, server: &FastServer) -> Result<(), String> {
    let version = format_version(context).map_err(|error| error.to_string())?;
    let mut number = 0;
    while context.select(number) {
        let wanted = context.key_count();
        if server.number_of(number) != i32::try_from(number).ok() {
            return Err(format!("database {number} has another number"));
        }
        if server.keys_in_table(number).unwrap_or(0) as u64 != wanted {
            return Err(format!("the table of database {number} does not have its {wanted} keys"));
        }
        let (mut seen, mut strings, mut collections) = (0, Vec::new(), Vec::new());
        server.walk(context, number, |found| {
            seen += 1;
            let key = || found.key.to_vec();
            match text(found.value) {
                Some(value) if strings.len() < TRIAL_STRINGS => strings.push((key(), value, found.expires_ms)),
                None if collections.len() < TRIAL_COLLECTIONS => {
                    collections.extend(dumped(found, version).map(|dump| (key(), dump, found.expires_ms)));
                }
                _ => {}
            }
            let enough = strings.len() >= TRIAL_STRINGS && collections.len() >= TRIAL_COLLECTIONS;
            if enough || seen >= TRIAL_KEYS { Step::Stop } else { Step::Leave }
        });
        strings.iter().try_for_each(|(key, value, expires_ms)| is_there(context, key, value, *expires_ms))?;
        collections.iter().try_for_each(|(key, dump, expires_ms)| is_dumped(context, key, dump, *expires_ms))?;
        number += 1;
    }
    Ok(())
}

/// What is compared of a string: its length and its ends.
#[derive(PartialEq, Eq)]
struct Ends {
    bytes: usize,
    first: Vec<u8>,
    last: Vec<u8>,
}

impl Ends {
    fn of(value: &[u8]) -> Ends {
        let (first, rest) = value.split_at(value.len().min(TRIAL_END_BYTES));
        let last = rest.get(rest.len().saturating_sub(TRIAL_END_BYTES)..).unwrap_or_default();
        Ends { bytes: value.len(), first: first.to_vec(), last: last.to_vec() }
    }
}

/// The value of a string.
fn text(value: FoundValue<'_>) -> Option<Ends> {
    match value {
        FoundValue::Bytes(bytes) => Some(Ends::of(bytes)),
        FoundValue::Number(number) => Some(Ends::of(number.to_string().as_bytes())),
        FoundValue::Collection => None,
    }
}

/// Type and value of a collection, as the walk would write them. `None`: it would leave it to the server, or the value
/// is large.
fn dumped(found: &FoundKey<'_>, version: u16) -> Option<Vec<u8>> {
    let kind = found.saved_type(version)?;
    let mut dump = vec![kind.0];
    let saved = found.save(kind, &mut |bytes| {
        dump.extend_from_slice(bytes);
        dump.len() <= TRIAL_COLLECTION_BYTES_MAX
    });
    saved.then_some(dump)
}

/// The server's own `DUMP` is the same, and the expiry too.
fn is_dumped(context: &Context<'_>, key: &[u8], dump: &[u8], expires_ms: Option<i64>) -> Result<(), String> {
    let name = OwnedStr::new(context, key);
    let reply = context.call(c"DUMP", &[name.borrow()]);
    let own = reply.as_ref().and_then(|reply| reply.as_bytes());
    // One that has expired meanwhile is not shown any more.
    if own.is_none() && expires_ms.is_some() {
        return Ok(());
    }
    let expires_at = context.open_to_write(name.borrow()).and_then(|key| key.expires_at());
    let same_expiry = expires_at == expires_ms.and_then(|at| u64::try_from(at).ok());
    if same_expiry && own.and_then(dumped_value) == Some(dump) {
        return Ok(());
    }
    Err(format!("the key {:?} has another type, expiry or value", shown(key)))
}

fn is_there(context: &Context<'_>, key: &[u8], value: &Ends, expires_ms: Option<i64>) -> Result<(), String> {
    let name = OwnedStr::new(context, key);
    let shown = || shown(key);
    let Some(mut open) = context.open_to_write(name.borrow()) else {
        return Err(format!("the key {:?} could not be opened", shown()));
    };
    // One that has expired meanwhile is not shown any more.
    if open.kind() == KeyKind::Empty && expires_ms.is_some() {
        return Ok(());
    }
    let same_expiry = open.expires_at() == expires_ms.and_then(|at| u64::try_from(at).ok());
    if open.kind() != KeyKind::String || !same_expiry || open.string().map(Ends::of).as_ref() != Some(value) {
        return Err(format!("the key {:?} has another type, expiry or value", shown()));
    }
    Ok(())
}

// Writes the walk's bytes into the table, through a small buffer for short items. It also decides what to do while
// there is no space: wait as long as the agent is alive, and stop when the agent is gone or cancels.

/// The snapshot being written.
pub(super) struct Output<'b> {
    writer: SnapshotWriter,
    page: &'b CapturePage,
    /// Bytes that are not in the table yet; short items are collected here and written together.
    pub(super) small: Vec<u8>,
    status: WriterStatus,
    began: Instant,
}

impl<'b> Output<'b> {
    /// Lays the table out: from now on it holds the snapshot of that moment.
    pub(super) fn new(
        page: &'b CapturePage,
        memory: Arc<Memory>,
        point: &ForkPoint,
    ) -> Result<Output<'b>, CaptureError> {
        let order = page.order();
        let identity = Identity { kind: Kind::Snapshot, origin: point.origin(order.generation) };
        let writer = SnapshotWriter::create(memory, order.geometry, identity, 0)?;
        let small = Vec::with_capacity(2 * SMALL_BYTES);
        Ok(Output { writer, page, small, status: WriterStatus::default(), began: Instant::now() })
    }

    /// The version of the format that is written.
    pub(super) fn format(&mut self, version: u16) {
        self.status.format = version.into();
    }

    /// One more key is complete.
    pub(super) fn key_done(&mut self) -> Result<(), CaptureError> {
        self.status.keys += 1;
        if self.small.len() < SMALL_BYTES { Ok(()) } else { self.flush() }
    }

    /// Appends bytes after those in the buffer: copied once, straight into the table, unless there are only a few.
    pub(super) fn put(&mut self, bytes: &[u8]) -> Result<(), CaptureError> {
        if bytes.len() < SMALL_BYTES {
            self.small.extend_from_slice(bytes);
            return if self.small.len() < SMALL_BYTES { Ok(()) } else { self.flush() };
        }
        self.flush()?;
        self.append(bytes)
    }

    /// Everything is written. The table stays open: the source writes what the server saves.
    pub(super) fn finish(&mut self) -> Result<(), CaptureError> {
        self.flush()?;
        self.status.took_micros = self.began.elapsed().as_micros() as u64;
        self.report();
        Ok(())
    }

    fn flush(&mut self) -> Result<(), CaptureError> {
        let small = std::mem::take(&mut self.small);
        let appended = self.append(&small);
        self.small = small;
        self.small.clear();
        appended
    }

    fn append(&mut self, bytes: &[u8]) -> Result<(), CaptureError> {
        if self.page.is_cancelled() {
            return Err(CaptureError::Cancelled);
        }
        let mut rest = bytes;
        loop {
            let taken = self.writer.append(rest)?;
            rest = rest.get(taken..).unwrap_or_default();
            self.report();
            if rest.is_empty() {
                return Ok(());
            }
            self.wait_for_room()?;
        }
    }

    /// The ring is full: its readers are slower than this writer.
    fn wait_for_room(&mut self) -> Result<(), CaptureError> {
        let limit = Duration::from_secs(AGENT_TIMEOUT.get());
        let mut beat = self.page.orderer_beat();
        let mut heard = Instant::now();
        loop {
            if self.page.is_cancelled() {
                return Err(CaptureError::Cancelled);
            }
            let below = self.page.retire_below();
            if below > self.writer.retired() {
                self.writer.retire(below);
                if self.writer.space().is_some() {
                    return Ok(());
                }
            }
            let now = self.page.orderer_beat();
            if now != beat {
                (beat, heard) = (now, Instant::now());
            } else if heard.elapsed() > limit {
                return Err(CaptureError::Abandoned(limit.as_secs()));
            }
            self.status.waits += 1;
            self.report();
            thread::sleep(ROOM_POLL);
        }
    }

    fn report(&mut self) {
        self.status.received = self.writer.received();
        self.status.published_slots = self.writer.published_slots();
        self.status.retired_slots = self.writer.retired();
        self.page.report(&self.status);
    }
}

/// Bytes that are collected before they go to the table together, and from which on a value goes there by itself. Large
/// compared to the cost of one append (some hundred nanoseconds), small compared to a first-level cache.
const SMALL_BYTES: usize = 8 << 10;

/// How often a writer without space checks for it: readers release a slot of 4 MiB in a millisecond or two.
const ROOM_POLL: Duration = Duration::from_micros(200);

// Records of a snapshot as the servers write them: header, databases, keys, strings. Pure: appends bytes to a buffer.
//
// A long value is not put into the buffer: only the bytes before it are, and the caller writes the value from its own
// place.
//
// ```text
//   REDIS0011  FA name value …   FE db  FB keys expires   [FC expiry]  [F8 idle | F9 freq]  0 key length   value   …
//   ╰── header ──────────────╯   ╰──── database ───────╯  ╰──── head of a string ───────────────────────╯
// ```

/// The age of a key, if the server keeps it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Age {
    /// The server keeps none.
    Unknown,
    /// Milliseconds since the last use.
    Idle(u64),
    /// Frequency of use, on the server's scale.
    Frequency(u8),
}

/// The first nine bytes. `None`: no snapshot has this version.
pub(crate) fn put_magic(out: &mut Vec<u8>, version: u16) -> Option<()> {
    out.extend_from_slice(magic(u32::from(version))?.as_bytes());
    Some(())
}

/// One field of the header.
pub(crate) fn put_field(out: &mut Vec<u8>, name: &str, value: &[u8]) {
    out.push(OPCODE_AUX);
    put_string(out, name.as_bytes());
    put_string(out, value);
}

/// The keys that follow belong to this database; it has `keys` keys, of which `expires` expire.
pub(crate) fn put_database(out: &mut Vec<u8>, number: u32, keys: u64, expires: u64) {
    put_selected(out, number);
    out.push(OPCODE_RESIZEDB);
    put_length(out, keys);
    put_length(out, expires);
}

/// The keys that follow belong to this database, which the snapshot may have mentioned before.
pub(crate) fn put_selected(out: &mut Vec<u8>, number: u32) {
    out.push(OPCODE_SELECTDB);
    put_length(out, u64::from(number));
}

/// The end of a snapshot, with zeros for the checksum: it has none.
pub(crate) fn put_end(out: &mut Vec<u8>) {
    out.push(OPCODE_EOF);
    out.extend_from_slice(&[0; CHECKSUM_BYTES]);
}

/// Bytes of a snapshot's checksum.
const CHECKSUM_BYTES: usize = 8;

/// A key up to its value: expiry (milliseconds since 1970), age, type, and name.
pub(crate) fn put_key(out: &mut Vec<u8>, expires_at: Option<u64>, age: Age, kind: u8, name: &[u8]) {
    if let Some(milliseconds) = expires_at {
        out.push(OPCODE_EXPIRETIME_MS);
        out.extend_from_slice(&milliseconds.to_le_bytes());
    }
    match age {
        Age::Unknown => {}
        Age::Idle(milliseconds) => {
            out.push(OPCODE_IDLE);
            put_length(out, milliseconds / 1000);
        }
        Age::Frequency(frequency) => out.extend_from_slice(&[OPCODE_FREQ, frequency]),
    }
    out.push(kind);
    put_string(out, name);
}

/// The value of a string.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Value {
    /// This number of bytes, which follow.
    Bytes(usize),
    /// This number, which stands for its decimal digits.
    Number(i64),
}

/// A string up to its bytes. A number is written as a whole.
pub(super) fn put_head(out: &mut Vec<u8>, expires_at: Option<u64>, age: Age, name: &[u8], value: Value) {
    put_key(out, expires_at, age, TYPE_STRING, name);
    match value {
        Value::Bytes(length) => put_length(out, length as u64),
        Value::Number(number) => put_number(out, number),
    }
}

/// A number as servers write it: in binary, if it has at most 32 bits.
fn put_number(out: &mut Vec<u8>, number: i64) {
    if let Ok(number) = i8::try_from(number) {
        out.push(0xC0);
        out.extend_from_slice(&number.to_le_bytes());
    } else if let Ok(number) = i16::try_from(number) {
        out.push(0xC1);
        out.extend_from_slice(&number.to_le_bytes());
    } else if let Ok(number) = i32::try_from(number) {
        out.push(0xC2);
        out.extend_from_slice(&number.to_le_bytes());
    } else {
        put_string(out, number.to_string().as_bytes());
    }
}

/// The type of a plain string.
const TYPE_STRING: u8 = 0;

/// A string: length and bytes.
pub(crate) fn put_string(out: &mut Vec<u8>, string: &[u8]) {
    put_length(out, string.len() as u64);
    out.extend_from_slice(string);
}

/// The version of the format that the server writes, from the reply to `FUNCTION DUMP`. `None` if the reply is too
/// short.
pub(crate) fn dump_version(answer: &[u8]) -> Option<u16> {
    let (_, footer) = answer.split_at_checked(answer.len().checked_sub(DUMP_FOOTER_BYTES)?)?;
    let [low, high, ..] = *footer else { return None };
    Some(u16::from_le_bytes([low, high]))
}

/// Type and value in the reply to `DUMP key`.
pub(crate) fn dumped_value(answer: &[u8]) -> Option<&[u8]> {
    answer.get(..answer.len().checked_sub(DUMP_FOOTER_BYTES)?)
}

/// Version and checksum at the end of a `DUMP`.
const DUMP_FOOTER_BYTES: usize = 10;

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use remora_redis::rdb::Head;

    use super::*;

    #[test]
    fn ages_are_written_where_the_servers_policy_uses_them() {
        let policies = ["noeviction", "allkeys-lru", "volatile-lfu", "volatile-ttl", ""].map(Ages::of_policy);
        assert_eq!(policies, [Ages::None, Ages::Idle, Ages::Frequency, Ages::None, Ages::None]);
    }

    #[test]
    fn a_string_is_compared_by_its_length_and_its_ends() {
        let long = |at: usize, byte: u8| {
            let mut value = vec![b'x'; 1 << 20];
            value[at] = byte;
            Ends::of(&value)
        };
        assert!(long(0, b'x') == long(1, b'x'));
        assert!(long(TRIAL_END_BYTES - 1, b'y') != long(0, b'x'));
        assert!(long((1 << 20) - 1, b'y') != long(0, b'x'));
        assert!(Ends::of(b"abc") != Ends::of(b"abd") && Ends::of(b"") != Ends::of(b"a"));
        assert!(Ends::of(&vec![1; TRIAL_END_BYTES + 1]) != Ends::of(&vec![1; TRIAL_END_BYTES]));
        let kept = Ends::of(&vec![0; 64 << 20]);
        assert_eq!((kept.first.len(), kept.last.len()), (TRIAL_END_BYTES, TRIAL_END_BYTES));
    }

    fn written(write: impl FnOnce(&mut Vec<u8>)) -> Vec<u8> {
        let mut out = Vec::new();
        write(&mut out);
        out
    }

    #[test]
    fn a_header_is_read_back_as_the_servers_own() {
        for (version, begins) in [(10, b"REDIS0010"), (80, b"VALKEY080")] {
            let mut out = Vec::new();
            put_magic(&mut out, version).unwrap();
            put_field(&mut out, "repl-id", &[b'a'; 40]);
            put_field(&mut out, "repl-offset", b"77");
            put_field(&mut out, "repl-stream-db", b"3");
            put_database(&mut out, 0, 1, 0);
            let (head, _) = Head::parse(&out).unwrap().unwrap();
            assert!(out.starts_with(begins));
            assert_eq!((head.version, head.offset(), head.stream_db()), (u32::from(version), Some(77), Some(3)));
        }
    }

    #[test]
    fn a_string_has_its_expiry_and_its_age_before_type_name_and_length() {
        let bytes = written(|out| put_head(out, Some(258), Age::Idle(61_999), b"k", Value::Bytes(3)));
        assert_eq!(bytes, b"\xFC\x02\x01\0\0\0\0\0\0\xF8\x3D\0\x01k\x03");
        let bytes = written(|out| put_head(out, None, Age::Frequency(7), b"key", Value::Bytes(64)));
        assert_eq!(bytes, b"\xF9\x07\x00\x03key\x40\x40");
    }

    #[test]
    fn a_number_is_as_short_as_servers_write_it() {
        for (number, bytes) in [
            (-128, &b"\xC0\x80"[..]),
            (300, b"\xC1\x2C\x01"),
            (-2_147_483_648, b"\xC2\0\0\0\x80"),
            (2_147_483_648, b"\x0A2147483648"),
        ] {
            let written = written(|out| put_head(out, None, Age::Unknown, b"k", Value::Number(number)));
            assert_eq!(written, [b"\0\x01k", bytes].concat());
        }
    }

    #[test]
    fn a_database_says_how_many_keys_to_expect() {
        assert_eq!(written(|out| put_database(out, 15, 64, 3)), b"\xFE\x0F\xFB\x40\x40\x03");
    }

    #[test]
    fn the_version_stands_before_the_checksum_at_the_end_of_a_dump() {
        assert_eq!(dump_version(b"functions\x50\x0012345678"), Some(80));
        assert_eq!(dump_version(b"\x0b\x0012345678"), Some(11), "no functions at all");
        assert_eq!(dump_version(b"123456789"), None);
    }
}
