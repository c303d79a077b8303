//! The fast walk: the same as [`walk`](super::walk), in the server's own tables, where its build is known exactly
//! (`crate::fast`). It writes all strings, short ones too, and all other values that the server's own function for one
//! value writes into its output. To the saver it leaves values of modules, and hashes with expiring fields.
//!
//! A key that was written is unlinked from the child's copy of the table instead of being deleted: nothing is freed,
//! and nothing is looked up. The server's saver, which iterates over the same table afterwards, does not find it. So
//! here too each key is in exactly one of the two parts. The saver looks at no clock, and neither does this walk: a key
//! that has expired and is still there is written with its expiry, as the saver would write it.
//!
//! Before the child asks for its permission, a child of its own tries the walk and compares what it finds with the
//! module's API: a wrong layout costs that child, and the snapshot is then taken by the server as usual.

use std::sync::Arc;
use std::time::Duration;

use remora_fabric::Memory;
use remora_table::CapturePage;
use remora_table::server_pages::capture_page::ForkPoint;

use super::armed::{CaptureError, format_version};
use super::output::Output;
use super::record::{self, Age, Value};
use super::walk::{Ages, expiring, header};
use crate::api::{Context, FastServer, FoundKey, FoundValue, KeyKind, OwnedStr, Step, in_child};
use crate::fast;

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
pub(super) fn run(
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
        record::put_database(&mut self.out.small, database, wanted, expiring(context, database).unwrap_or(0));
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
                record::put_head(&mut out.small, expires_at, age, found.key, Value::Number(number));
            }
            FoundValue::Bytes(bytes) if bytes.len() < self.least => return Ok(false),
            FoundValue::Bytes(bytes) => {
                record::put_head(&mut out.small, expires_at, age, found.key, Value::Bytes(bytes.len()));
                out.put(bytes)?;
            }
            FoundValue::Collection if self.least > 0 => return Ok(false),
            FoundValue::Collection => {
                let Some(kind) = found.saved_type(self.version) else { return Ok(false) };
                record::put_key(&mut out.small, expires_at, age, kind.0, found.key);
                let mut written = Ok(());
                let saved = found.save(kind, &mut |bytes| {
                    written = out.put(bytes);
                    written.is_ok()
                });
                written?;
                if !saved {
                    let key = super::walk::shown(found.key);
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
    if same_expiry && own.and_then(record::dumped_value) == Some(dump) {
        return Ok(());
    }
    Err(format!("the key {:?} has another type, expiry or value", super::walk::shown(key)))
}

fn is_there(context: &Context<'_>, key: &[u8], value: &Ends, expires_ms: Option<i64>) -> Result<(), String> {
    let name = OwnedStr::new(context, key);
    let shown = || super::walk::shown(key);
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

#[cfg(test)]
mod tests {
    use super::*;

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
}
