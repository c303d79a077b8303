//! The verification of the first load in a build whose layout was found: a sample of the keys that were loaded in the
//! fast way, as the module's API shows them. It is made before the end of the snapshot is sent, so a difference costs
//! the load and not the data.
//!
//! A forked child looks: in tables that are not what they seem it may crash, which says as much as a difference.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use remora_redis::rdb::{Collection, Content, Record, Value, crc64};

use super::command;
use crate::api::{Context, FastServer, KeyKind, OwnedStr, Steps, Trouble, in_child};

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
