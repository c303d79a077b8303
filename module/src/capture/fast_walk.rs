//! The fast walk: the same as [`walk`](super::walk), in the server's own tables, where its build is known exactly
//! (`crate::fast`). It writes all strings, short ones too.
//!
//! A string that was written is unlinked from the child's copy of the table instead of being deleted: nothing is
//! freed, and nothing is looked up. The server's saver, which iterates over the same table afterwards, does not find
//! it. So here too each key is in exactly one of the two parts. The saver looks at no clock, and neither does this
//! walk: a string that has expired and is still there is written with its expiry, as the saver would write it.
//!
//! Before the child asks for its permission, a child of its own tries the walk and compares what it finds with the
//! module's API: a wrong layout costs that child, and the snapshot is then taken by the server as usual.

use std::sync::Arc;
use std::time::Duration;

use remora_fabric::Memory;
use remora_table::CapturePage;
use remora_table::server_pages::capture_page::ForkPoint;

use super::error::CaptureError;
use super::output::Output;
use super::record::{self, Age, Value};
use super::walk::{Ages, expiring, header};
use crate::api::{Context, FastServer, FoundString, FoundValue, KeyKind, OwnedStr, Step, in_child};
use crate::fast;

/// How long the trial may take. It looks at a few thousand keys.
const TRIAL_LIMIT: Duration = Duration::from_secs(5);

/// Strings of each database that the trial compares with what the module's API says.
const TRIAL_STRINGS: usize = 500;

/// The server's tables, after a trial.
///
/// # Errors
/// Why the fast walk is not offered.
pub(super) fn checked(context: &Context<'_>) -> Result<FastServer, CaptureError> {
    let server = fast::offer_walk(context).map_err(CaptureError::NoFastWalk)?;
    let trial = in_child(context, TRIAL_LIMIT, || compare(context, &server.in_trial()));
    trial.map_err(|why| CaptureError::NoFastWalk(format!("a trial in a forked child failed: {why}")))?;
    Ok(server)
}

/// Writes the strings into `memory`, and takes them out of what the server will save.
pub(super) fn run(
    context: &Context<'_>,
    page: &CapturePage,
    memory: Arc<Memory>,
    point: &ForkPoint,
    server: &FastServer,
) -> Result<(), CaptureError> {
    let least = usize::try_from(page.order().least_bytes).unwrap_or(usize::MAX);
    let mut out = Output::new(page, memory, point)?;
    header(context, &mut out, point)?;
    let ages = Ages::of(context);
    let mut number = 0;
    while context.select(number) {
        let keys = context.key_count();
        if keys > 0 {
            record::put_database(&mut out.small, number, keys, expiring(context, number).unwrap_or(0));
            database(context, &mut out, server, number, ages, least)?;
        }
        number += 1;
    }
    out.finish()
}

fn database(
    context: &Context<'_>,
    out: &mut Output<'_>,
    server: &FastServer,
    number: u32,
    ages: Ages,
    least: usize,
) -> Result<(), CaptureError> {
    let wanted = context.key_count();
    let mut error = None;
    let walked = server.walk(context, number, |found| match write(out, found, ages, least) {
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
    if seen == wanted { Ok(()) } else { Err(CaptureError::Miscounted { database: number, seen, wanted }) }
}

/// Writes the string if it is long enough.
fn write(out: &mut Output<'_>, found: &FoundString<'_>, ages: Ages, least: usize) -> Result<bool, CaptureError> {
    // A time before 1970 is left to the server.
    let Ok(expires_at) = found.expires_ms.map(u64::try_from).transpose() else { return Ok(false) };
    let age = match ages {
        Ages::None => Age::Unknown,
        Ages::Idle => Age::Idle(found.idle_seconds() * 1000),
        Ages::Frequency => Age::Frequency(found.frequency()),
    };
    match found.value {
        FoundValue::Number(_) if least > DIGITS_MAX => return Ok(false),
        FoundValue::Number(number) => {
            record::put_head(&mut out.small, expires_at, age, found.key, Value::Number(number));
        }
        FoundValue::Bytes(bytes) if bytes.len() < least => return Ok(false),
        FoundValue::Bytes(bytes) => {
            record::put_head(&mut out.small, expires_at, age, found.key, Value::Bytes(bytes.len()));
            out.put(bytes)?;
        }
    }
    out.key_done()?;
    Ok(true)
}

/// Digits and sign of the longest number.
const DIGITS_MAX: usize = 20;

/// In a child of the child: what the walk finds is what the module's API says.
fn compare(context: &Context<'_>, server: &FastServer) -> Result<(), String> {
    let mut number = 0;
    while context.select(number) {
        let wanted = context.key_count();
        if server.number_of(number) != i32::try_from(number).ok() {
            return Err(format!("database {number} has another number"));
        }
        if server.keys_in_table(number).unwrap_or(0) as u64 != wanted {
            return Err(format!("the table of database {number} does not have its {wanted} keys"));
        }
        let mut found = Vec::new();
        server.walk(context, number, |string| {
            found.push((string.key.to_vec(), text(string.value), string.expires_ms));
            if found.len() < TRIAL_STRINGS { Step::Leave } else { Step::Stop }
        });
        found.iter().try_for_each(|(key, value, expires_ms)| is_there(context, key, value, *expires_ms))?;
        number += 1;
    }
    Ok(())
}

fn text(value: FoundValue<'_>) -> Vec<u8> {
    match value {
        FoundValue::Bytes(bytes) => bytes.to_vec(),
        FoundValue::Number(number) => number.to_string().into_bytes(),
    }
}

fn is_there(context: &Context<'_>, key: &[u8], value: &[u8], expires_ms: Option<i64>) -> Result<(), String> {
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
    if open.kind() != KeyKind::String || !same_expiry || open.string() != Some(value) {
        return Err(format!("the key {:?} has another type, expiry or value", shown()));
    }
    Ok(())
}
