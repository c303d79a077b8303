//! What a forked child tries before the server itself adds keys in the fast way: keys and values of all sizes, read
//! back by the module's API and by commands, and compared with keys that the server's own loader made.

use std::cell::RefCell;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use remora_redis::rdb::{Collection, Content, Record, Value, crc64};

use super::command;
use crate::api::{AddError, BATCH, Context, FastServer, KeyKind, OwnedStr, Scratch, Step, Steps, Trouble, in_child};

/// How long the child may take: it needs a few hundredths of a second.
const TRIAL_LIMIT: Duration = Duration::from_secs(5);

/// Keys that only fill the tables, which grow several times meanwhile.
const FILLERS: usize = 5000;

/// Lengths of values, on both sides of every border that servers draw: nothing, numbers, embedded strings, the sizes of
/// the heads of strings, long ones.
const VALUE_BYTES: [usize; 22] =
    [0, 1, 7, 8, 31, 32, 43, 44, 45, 46, 63, 64, 95, 96, 111, 128, 191, 255, 256, 1000, 1024, 4095];

/// Lengths of keys, likewise.
const KEY_BYTES: [usize; 10] = [3, 20, 31, 32, 64, 127, 128, 255, 256, 4096];

/// How many bytes the memory of two equal keys may differ by: the C library's allocator gives what it has, up to 16
/// bytes more than asked for. A string has two such pieces, and a collection of two elements up to eight.
const STRING_SLACK_BYTES: u64 = 2 * 16;
const COLLECTION_SLACK_BYTES: u64 = 8 * 16;

/// Values that servers keep as numbers, or that only look like some.
const NUMBERS: [&str; 9] =
    ["0", "7", "9999", "10000", "-1", "007", "9223372036854775807", "-9223372036854775808", "9223372036854775808"];

/// Commands, without the key, that make a collection of each type in each encoding.
const COLLECTIONS: [&[&str]; 13] = [
    &["HSET", "field", "value", "number", "12", "negative", "-70000", "empty", "", "wide", "123456789012"],
    &["HSET", "field", LONG, "number", "7"],
    &["RPUSH", "one", "2", "", "one", "-3", "40000", "9223372036854775807"],
    &["RPUSH", LONG, LONG, LONG],
    &["RPUSH", "x"],
    &["SADD", "1", "2", "-3"],
    &["SADD", "1", "70000"],
    &["SADD", "9223372036854775807", "5"],
    &["SADD", "one", "2", "three", "-4", ""],
    &["SADD", LONG, "two"],
    &["ZADD", "1", "one", "2.5", "two", "-inf", "least", "inf", "most", "1", "7"],
    &["ZADD", "1", LONG, "0.1", "two"],
    &["HSET", "f", "v"],
];

/// In place of an argument: one that is too long for the compact encodings.
const LONG: &str = "<long>";

/// What follows type and value in the reply to `DUMP`: version and checksum.
const DUMP_FOOTER_BYTES: usize = 10;

/// A time after which no test is run: 2100-01-01, in milliseconds since 1970.
const FAR_MS: u64 = 4_102_444_800_000;

/// Tries everything in a forked child. The databases must be empty.
///
/// # Errors
/// What went wrong.
pub(super) fn run(context: &Context<'_>, server: FastServer) -> Result<(), Trouble> {
    in_child(context, TRIAL_LIMIT, |steps| {
        super::check(context, &server.in_trial(), steps)?;
        steps.begin("the trial of all functions together");
        let scratch = RefCell::new(server.scratch());
        Trial { context, server, scratch }.everything()
    })
}

/// A key as it should be.
struct TrialKey {
    key: Vec<u8>,
    value: Vec<u8>,
    number: Option<i32>,
    expires_ms: Option<u64>,
}

struct Trial<'t> {
    context: &'t Context<'t>,
    server: FastServer,
    scratch: RefCell<Scratch>,
}

impl Trial<'_> {
    fn add(&self, records: &[Record<'_>]) -> Result<(), AddError> {
        self.server.add(self.context, &mut self.scratch.borrow_mut(), 0, records)
    }

    fn everything(&self) -> Result<(), String> {
        self.has_its_databases()?;
        self.expect_keys(0)?;
        let samples = samples();
        let loaded = self.loaded();
        for batch in samples.chunks(BATCH) {
            let records: Vec<_> = batch.iter().map(TrialKey::record).collect();
            self.add(&records).map_err(|error| error.to_string())?;
        }
        self.expect_keys(samples.len())?;
        if self.server.keys_in_table(0) != Some(samples.len()) {
            return Err("the layout is wrong: the table does not have the keys that were added".into());
        }
        if self.loaded().checked_sub(loaded) != Some(samples.len() as u64) {
            return Err("the server's counter of loaded keys did not follow".into());
        }
        // A load only prefetches by the table's size; a walk goes by it.
        let walked = self.server.in_trial().walk(self.context, 0, |_| Step::Leave);
        if walked.map(|walked| walked.seen) != Some(samples.len()) {
            return Err("the layout is wrong: a walk over the table does not find the keys that were added".into());
        }
        self.refuses_a_duplicate(&samples)?;
        samples.iter().try_for_each(|sample| self.is_there(sample))?;
        // Every 97th: each costs several commands.
        samples
            .iter()
            .step_by(97)
            .chain(samples.iter().take(300))
            .try_for_each(|sample| self.is_like_the_servers(sample))?;
        if self.command("RANDOMKEY", &[])?.is_empty() {
            return Err("RANDOMKEY found no key".into());
        }
        let (gone, left) = samples.split_at(samples.len() / 2);
        gone.iter().try_for_each(|sample| self.delete(sample))?;
        left.iter().try_for_each(|sample| self.is_there(sample))?;
        left.iter().try_for_each(|sample| self.delete(sample))?;
        self.expect_keys(0)?;
        // Values are taken from the replies to DUMP. This is a child: the server keeps its setting.
        self.command("CONFIG", &[b"SET", b"rdbcompression", b"no"])?;
        COLLECTIONS.iter().enumerate().try_for_each(|(number, collection)| self.collection(number, collection))?;
        self.expect_keys(0)
    }

    /// A collection that the server has made is added under another name: it must be like one that the server's own
    /// loader makes.
    fn collection(&self, number: usize, command: &[&str]) -> Result<(), String> {
        let names = [b"trial: fast".as_slice(), b"trial: own "];
        let [fast, own] = names;
        let [name, arguments @ ..] = command else { return Ok(()) };
        let long = "long".repeat(100);
        let arguments =
            arguments.iter().map(|argument| if *argument == LONG { long.as_bytes() } else { argument.as_bytes() });
        self.command(name, &[&[own], &arguments.collect::<Vec<_>>()[..]].concat())?;
        let payload = self.command("DUMP", &[own])?;
        let expires_ms = number.is_multiple_of(2).then_some(FAR_MS);
        let expiry = expires_ms.unwrap_or(0).to_string();
        self.command("RESTORE", &[own, expiry.as_bytes(), &payload, b"ABSTTL", b"REPLACE"])?;
        let value = payload.len().checked_sub(DUMP_FOOTER_BYTES).and_then(|end| payload.get(..end));
        let (kind, bytes) = value.and_then(<[u8]>::split_first).ok_or("a DUMP is too short")?;
        let value = Value::Collection(Collection { kind: *kind, bytes });
        let record = Record { key: Content::Bytes(fast), value, expires_ms, usage: None };
        let loaded = self.loaded();
        self.add(&[record]).map_err(|error| error.to_string())?;
        if self.loaded() != loaded + 1 || self.add(&[record]).is_ok() {
            return Err(format!("{name}: the counter of loaded keys did not follow, or a key was added twice"));
        }
        self.are_alike(fast, own, name)?;
        for command in ["DUMP", "PEXPIRETIME"] {
            if self.command(command, &[fast])? != self.command(command, &[own])? {
                return Err(format!("{name}: {command} differs from that of the server's own"));
            }
        }
        self.command("DEL", &names)?;
        Ok(())
    }

    /// The cheapest check of a layout.
    fn has_its_databases(&self) -> Result<(), String> {
        let wanted = self.context.setting("databases").unwrap_or_default();
        let has = self.server.database_count();
        if has.to_string() != wanted {
            return Err(format!("the layout is wrong: the server has {wanted} databases, and not {has}"));
        }
        match self.server.number_of(0) {
            Some(0) => Ok(()),
            other => Err(format!("the layout is wrong: database 0 has the number {other:?}")),
        }
    }

    fn refuses_a_duplicate(&self, samples: &[TrialKey]) -> Result<(), String> {
        let Some(first) = samples.first() else { return Ok(()) };
        match self.add(&[first.record()]) {
            Err(_) => self.expect_keys(samples.len()),
            Ok(()) => Err("a key was added twice".into()),
        }
    }

    fn expect_keys(&self, wanted: usize) -> Result<(), String> {
        self.context.select(0);
        match self.context.key_count() {
            keys if keys == wanted as u64 => Ok(()),
            keys => Err(format!("the database has {keys} keys where {wanted} were expected")),
        }
    }

    fn loaded(&self) -> u64 {
        let info = self.context.server_info(c"persistence");
        info.and_then(|info| info.number(c"rdb_last_load_keys_loaded")).unwrap_or(0)
    }

    /// The key has its value and its expiry, by the module's API.
    fn is_there(&self, sample: &TrialKey) -> Result<(), String> {
        let name = OwnedStr::new(self.context, &sample.key);
        let mut key = self.context.open_to_write(name.borrow()).ok_or("a key could not be opened")?;
        if key.kind() != KeyKind::String || key.expires_at() != sample.expires_ms {
            return Err(format!("{} has another type or expiry", sample.shown()));
        }
        match key.string() {
            Some(value) if value == sample.value => Ok(()),
            _ => Err(format!("{} has another value", sample.shown())),
        }
    }

    /// The server's own loader makes a key with a name as long, and with the same value and expiry: encoding and memory
    /// must be the same.
    fn is_like_the_servers(&self, sample: &TrialKey) -> Result<(), String> {
        let twin = sample.twin();
        // The sample was read by the module's API, which may have changed its encoding: it is loaded anew.
        self.delete(sample)?;
        self.add(&[sample.record()]).map_err(|error| error.to_string())?;
        let payload = self.command("DUMP", &[&sample.key])?;
        let expiry = sample.expires_ms.unwrap_or(0).to_string();
        self.command("RESTORE", &[&twin, expiry.as_bytes(), &payload, b"ABSTTL"])?;
        self.are_alike(&sample.key, &twin, &sample.shown())?;
        let name = OwnedStr::new(self.context, &twin);
        self.context.open_to_write(name.borrow()).map(|mut key| key.delete());
        Ok(())
    }

    /// Encoding and memory of both keys are the same.
    fn are_alike(&self, fast: &[u8], own: &[u8], shown: &str) -> Result<(), String> {
        let mut slack = STRING_SLACK_BYTES;
        for (command, word) in [("OBJECT", "ENCODING"), ("MEMORY", "USAGE")] {
            let ask = |key: &[u8]| self.command(command, &[word.as_bytes(), key]);
            let (fast, own) = (ask(fast)?, ask(own)?);
            let number = |text: &[u8]| std::str::from_utf8(text).ok().and_then(|text| text.parse::<u64>().ok());
            let near = number(&fast).zip(number(&own)).is_some_and(|(fast, own)| fast.abs_diff(own) <= slack);
            if fast != own && !near {
                let (fast, own) = (String::from_utf8_lossy(&fast), String::from_utf8_lossy(&own));
                return Err(format!("{command} {word} of {shown} is {fast}, and {own} of the server's own"));
            }
            // Its nodes have random heights.
            if fast == b"skiplist" {
                break;
            }
            if fast == b"hashtable" {
                slack = COLLECTION_SLACK_BYTES;
            }
        }
        Ok(())
    }

    fn delete(&self, sample: &TrialKey) -> Result<(), String> {
        let name = OwnedStr::new(self.context, &sample.key);
        let key = self.context.open_to_write(name.borrow());
        let deleted = key.is_some_and(|mut key| key.kind() == KeyKind::String && key.delete());
        if deleted { Ok(()) } else { Err(format!("{} could not be deleted", sample.shown())) }
    }

    fn command(&self, name: &str, arguments: &[&[u8]]) -> Result<Vec<u8>, String> {
        super::command(self.context, name, arguments)
    }
}

impl TrialKey {
    fn record(&self) -> Record<'_> {
        let value = Value::String(self.number.map_or(Content::Bytes(&self.value), Content::Number));
        Record { key: Content::Bytes(&self.key), value, expires_ms: self.expires_ms, usage: None }
    }

    /// A name of the same length that no sample has.
    fn twin(&self) -> Vec<u8> {
        let mut name = self.key.clone();
        if let Some(last) = name.last_mut() {
            *last = !*last;
        }
        name
    }

    fn shown(&self) -> String {
        format!("a key of {} bytes with a value of {}", self.key.len(), self.value.len())
    }
}

fn samples() -> Vec<TrialKey> {
    let mut samples = Vec::new();
    let mut put = |key_bytes: usize, value: Vec<u8>, number: Option<i32>| {
        let which = samples.len();
        // Binary names, each of its own: the number of the sample is in the first three bytes.
        let mut key: Vec<u8> = (which as u32).to_le_bytes()[..3].to_vec();
        key.resize(key_bytes.max(3), b'k');
        let expires_ms = (which % 3 == 0).then_some(FAR_MS + which as u64);
        samples.push(TrialKey { key, value, number, expires_ms });
    };
    for key_bytes in KEY_BYTES {
        for value_bytes in VALUE_BYTES {
            // Values of one length differ: some servers are given all of them in one place.
            put(key_bytes, vec![b'a' + (key_bytes % 26) as u8; value_bytes], None);
        }
    }
    for text in NUMBERS {
        for key_bytes in [3, 32, 200] {
            put(key_bytes, text.into(), None);
            // As servers write short numbers.
            if let Some(number) = text.parse().ok().filter(|number: &i32| number.to_string() == text) {
                put(key_bytes, text.into(), Some(number));
            }
        }
    }
    for filler in 0..FILLERS {
        put(3 + filler % 30, vec![0; filler % 150], None);
    }
    samples
}

// The verification of the first load in a build whose layout was found: a sample of the keys that were loaded in the
// fast way, as the module's API shows them. It is made before the end of the snapshot is sent, so a difference costs
// the load and not the data.
//
// A forked child looks: in tables that are not what they seem it may crash, which says as much as a difference.

/// Keys of a sample, at most: each has less than 4 KiB, and the server waits while they are looked at.
const SAMPLE_KEYS: usize = 2048;

/// How long the child may take. It needs some hundredths of a second; the fork takes longer the more was loaded.
const LIMIT: Duration = Duration::from_secs(30);

/// How often a random key is asked for.
const RANDOM_KEYS: usize = 64;

/// A sample of what is loaded: spread evenly over all of it, however much follows.
pub(crate) struct Sample {
    keys: Vec<Loaded>,
    /// Every so many keys one is taken.
    stride: u64,
    seen: u64,
}

/// A key as it was loaded.
struct Loaded {
    database: u32,
    key: Vec<u8>,
    value: Wanted,
    expires_ms: Option<u64>,
}

enum Wanted {
    Text(Vec<u8>),
    Collection(u8, Vec<u8>),
}

impl Sample {
    pub(crate) fn new() -> Sample {
        Sample { keys: Vec::new(), stride: 1, seen: 0 }
    }

    /// Notes records that were added.
    pub(crate) fn note(&mut self, database: u32, records: &[Record<'_>]) {
        for record in records {
            self.seen += 1;
            if !self.seen.is_multiple_of(self.stride) {
                continue;
            }
            if self.keys.len() == SAMPLE_KEYS {
                let mut number = 0_usize;
                self.keys.retain(|_| {
                    number += 1;
                    number.is_multiple_of(2)
                });
                self.stride *= 2;
            }
            self.keys.push(Loaded::of(database, record));
        }
    }

    /// Compares the sample with what the server has.
    ///
    /// # Errors
    /// What is different.
    pub(crate) fn verify(&self, context: &Context<'_>, server: FastServer) -> Result<(), Trouble> {
        in_child(context, LIMIT, |steps| {
            let twin = b"remora: the same value, by the server's own loader: 5e0c1f7a";
            let looking = Looking { context, server: &server.in_trial(), steps, twin };
            looking.tables()?;
            self.keys.iter().try_for_each(|loaded| looking.at(loaded))
        })
    }
}

impl Loaded {
    fn of(database: u32, record: &Record<'_>) -> Loaded {
        let bytes = |content: &Content<'_>| match content {
            Content::Bytes(bytes) => bytes.to_vec(),
            Content::Number(number) => number.to_string().into_bytes(),
        };
        let value = match &record.value {
            Value::String(content) => Wanted::Text(bytes(content)),
            Value::Collection(Collection { kind, bytes }) => Wanted::Collection(*kind, bytes.to_vec()),
        };
        Loaded { database, key: bytes(&record.key), value, expires_ms: record.expires_ms }
    }

    /// It may have expired meanwhile: the server then hides it.
    fn may_be_gone(&self) -> bool {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_millis();
        self.expires_ms.is_some_and(|at| u128::from(at) <= now)
    }

    fn shown(&self) -> String {
        const SHOWN_BYTES: usize = 80;
        String::from_utf8_lossy(self.key.get(..SHOWN_BYTES).unwrap_or(&self.key)).into_owned()
    }
}

struct Looking<'l> {
    context: &'l Context<'l>,
    server: &'l FastServer,
    steps: &'l Steps,
    /// A name that no key has.
    twin: &'l [u8],
}

impl Looking<'_> {
    /// Each table has as many keys as the server says, and random ones exist.
    fn tables(&self) -> Result<(), String> {
        let mut database = 0;
        while self.context.select(database) {
            self.steps.begin(&format!("the table of database {database}"));
            let keys = self.context.key_count();
            let has = self.server.keys_in_table(database).unwrap_or(0) as u64;
            if has != keys {
                return Err(format!("the table of database {database} has {has} keys, and the server says {keys}"));
            }
            for _ in 0..if keys == 0 { 0 } else { RANDOM_KEYS } {
                self.context.select(database);
                let name = command(self.context, "RANDOMKEY", &[])?;
                // It may expire between the two.
                let name = OwnedStr::new(self.context, &name);
                let key = self.context.open_to_write(name.borrow()).ok_or("a random key could not be opened")?;
                let _ = (key.kind(), key.length());
            }
            database += 1;
        }
        Ok(())
    }

    fn at(&self, loaded: &Loaded) -> Result<(), String> {
        self.steps.begin(&format!("the key {:?}", loaded.shown()));
        self.context.select(loaded.database);
        let name = OwnedStr::new(self.context, &loaded.key);
        let mut key = self.context.open_to_write(name.borrow()).ok_or("a key could not be opened")?;
        let differs = |what: &str| Err(format!("the key {:?} has another {what}", loaded.shown()));
        if key.kind() == KeyKind::Empty && loaded.may_be_gone() {
            return Ok(());
        }
        if key.expires_at() != loaded.expires_ms {
            return differs("expiry");
        }
        match &loaded.value {
            Wanted::Text(_) if key.kind() != KeyKind::String => differs("type"),
            Wanted::Text(text) => {
                if key.string() == Some(text) {
                    Ok(())
                } else {
                    differs("value")
                }
            }
            Wanted::Collection(kind, bytes) => {
                drop(key);
                let dump = command(self.context, "DUMP", &[&loaded.key])?;
                let footer = dump.len().checked_sub(FOOTER_BYTES).and_then(|at| dump.get(at..at + VERSION_BYTES));
                let mut payload = [&[*kind], &bytes[..], footer.ok_or("a DUMP is too short")?].concat();
                payload.extend(crc64(0, &payload).to_le_bytes());
                command(self.context, "RESTORE", &[self.twin, b"0", &payload, b"REPLACE"])?;
                let own = command(self.context, "DUMP", &[self.twin])?;
                if own == dump { Ok(()) } else { differs("value") }
            }
        }
    }
}

/// What follows a value in the reply to `DUMP`: the version of the format, and a checksum.
const FOOTER_BYTES: usize = 10;
const VERSION_BYTES: usize = 2;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sample_is_spread_over_everything_and_bounded() {
        let mut sample = Sample::new();
        for number in 0..100_000_i32 {
            let value = Value::String(Content::Bytes(b"value"));
            sample.note(7, &[Record { key: Content::Number(number), value, expires_ms: None, usage: None }]);
        }
        assert!((SAMPLE_KEYS / 2..=SAMPLE_KEYS).contains(&sample.keys.len()), "{}", sample.keys.len());
        let numbers: Vec<i32> =
            sample.keys.iter().map(|loaded| String::from_utf8_lossy(&loaded.key).parse().unwrap_or(-1)).collect();
        let halves = numbers.iter().filter(|number| **number < 50_000).count();
        assert!((sample.keys.len() / 3..sample.keys.len() * 2 / 3).contains(&halves), "{halves}");
        assert!(numbers.is_sorted() && *numbers.last().unwrap_or(&0) > 99_000);
    }
}
