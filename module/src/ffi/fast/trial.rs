//! Work in a forked child of the server: a crash there costs nothing, and its result is a text.

use std::cell::RefCell;
use std::ffi::c_int;
use std::io::{PipeReader, PipeWriter, Read, Write};
use std::ptr;
use std::time::{Duration, Instant};

use remora_redis::rdb::{Collection, Usage, Value};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, Resource, Rlimit, Signal, WaitOptions, kill_process, setrlimit, waitpid};

use super::head;
use super::walk::{BUCKET_BYTES, bucket_of, candidates, encoding, kind, sds_bytes, text_of};
use super::{FastServer, HASH_SHIFT, Object, Own, SavedType};
use crate::ffi::Context;
use crate::ffi::entry::guard;

/// Signals that end a child that has gone wrong. The server's handlers would write a crash report into its log.
const FAULTS: [c_int; 5] = [libc::SIGSEGV, libc::SIGBUS, libc::SIGFPE, libc::SIGILL, libc::SIGABRT];

/// Why a trial failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Trouble {
    /// Something is different, or the child crashed: so it would be the next time.
    #[error("{0}")]
    Found(String),
    /// Nothing was found out: the child could not be started, or not awaited.
    #[error("{0}")]
    Unknown(String),
}

/// Runs `work` in a child of this process, and returns what it returned. The child can't do anything to the server: it
/// has a copy of its memory, runs no event loop, and ends after the work.
///
/// # Errors
/// The text of `work`, or that the child crashed, or took longer than `limit`.
pub(crate) fn in_child(
    _context: &Context<'_>,
    limit: Duration,
    work: impl FnOnce(&Steps) -> Result<(), String>,
) -> Result<(), Trouble> {
    let failed = |error: std::io::Error| Trouble::Unknown(format!("a child could not be started: {error}"));
    let (reader, writer) = std::io::pipe().map_err(failed)?;
    // SAFETY: The context proves that this is the server's main thread. The child has only this thread; it calls the
    // server's allocator, which is made for forks (jemalloc and the C library both handle them), and no lock of another
    // thread of the server is needed for keys and tables: servers fork their own savers in the same way.
    let child = unsafe { libc::fork() };
    match child {
        -1 => Err(failed(std::io::Error::last_os_error())),
        0 => {
            drop(reader);
            run_and_end(writer, work)
        }
        child => {
            drop(writer);
            let result = await_result(reader, limit);
            if let Some(pid) = Pid::from_raw(child) {
                // It has ended, or must not go on.
                let _ = kill_process(pid, Signal::KILL);
                let _ = waitpid(Some(pid), WaitOptions::empty());
            }
            result
        }
    }
}

/// In the child.
fn run_and_end(writer: PipeWriter, work: impl FnOnce(&Steps) -> Result<(), String>) -> ! {
    let steps = Steps(RefCell::new(writer));
    for fault in FAULTS {
        // SAFETY: A valid signal, and its default action.
        unsafe { libc::signal(fault, libc::SIG_DFL) };
    }
    let _ = setrlimit(Resource::Core, Rlimit { current: Some(0), maximum: Some(0) });
    let result = guard(Err("it panicked".to_owned()), || work(&steps));
    let text = result.map_or_else(|text| text, |()| FINE.to_owned());
    let _ = steps.0.borrow_mut().write_all(text.as_bytes());
    // SAFETY: No conditions. The server's handlers for an orderly end must not run.
    unsafe { libc::_exit(0) }
}

/// In the server: what the child writes until it ends.
fn await_result(mut reader: PipeReader, limit: Duration) -> Result<(), Trouble> {
    let (began, mut text) = (Instant::now(), Vec::new());
    loop {
        let Some(left) = limit.checked_sub(began.elapsed()) else {
            let (at, _) = Steps::of(&text);
            return Err(Trouble::Unknown(format!("it took longer than {} s{at}", limit.as_secs())));
        };
        let wait = Timespec { tv_sec: left.as_secs().cast_signed(), tv_nsec: left.subsec_nanos().into() };
        let readable = poll(&mut [PollFd::new(&reader, PollFlags::IN)], Some(&wait));
        if readable.is_err_and(|error| error != rustix::io::Errno::INTR) {
            return Err(Trouble::Unknown("its result could not be awaited".into()));
        }
        if readable != Ok(1) {
            continue;
        }
        let mut part = [0; 512];
        match reader.read(&mut part) {
            Ok(0) => break,
            Ok(read) => text.extend_from_slice(part.get(..read).unwrap_or_default()),
            Err(error) => return Err(Trouble::Unknown(format!("its result could not be read: {error}"))),
        }
    }
    match Steps::of(&text) {
        (_, result) if result == FINE => Ok(()),
        (at, result) if result.is_empty() => Err(Trouble::Found(format!("the child crashed{at}"))),
        (_, result) => Err(Trouble::Found(result)),
    }
}

/// What the child is about to do, for the message about one that crashes there.
pub(crate) struct Steps(RefCell<PipeWriter>);

impl Steps {
    pub(crate) fn begin(&self, step: &str) {
        // A parent that does not read any more ends this process soon.
        let _ = self.0.borrow_mut().write_all(format!("{STEP}{step}\n").as_bytes());
    }

    /// The last step, in words, and the result.
    fn of(text: &[u8]) -> (String, String) {
        let text = String::from_utf8_lossy(text);
        let (mut last, mut rest) = ("", &*text);
        while let Some((step, after)) = rest.strip_prefix(STEP).and_then(|rest| rest.split_once('\n')) {
            (last, rest) = (step, after);
        }
        let at = if last.is_empty() { String::new() } else { format!(" (in {last})") };
        (at, rest.to_owned())
    }
}

/// What stands before a step.
const STEP: char = '\u{1}';

/// What a child writes if its work succeeded.
const FINE: &str = "fine";

// Calls of single functions of the server with known arguments, for a child that tries whether they are what their
// names say. What a call returns is shown as plain values, which `crate::fast` compares.
//
// A function of another shape may do anything here: the child crashes, or returns something else.

/// What an object is like.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Shape {
    /// `OBJ_STRING` is 0, `OBJ_HASH` 4.
    pub(crate) kind: u8,
    /// `OBJ_ENCODING_RAW` is 0, `OBJ_ENCODING_INT` 1, `OBJ_ENCODING_EMBSTR` 8.
    pub(crate) encoding: u8,
    /// A string's bytes, or the digits of its number.
    pub(crate) text: Option<Vec<u8>>,
}

/// What is tried with one key.
pub(crate) struct Adding<'a> {
    pub(crate) database: u32,
    pub(crate) key: &'a [u8],
}

/// Only in a child: all of these are in one that tries.
impl FastServer {
    /// A string of the server with these bytes: what it has, and whether a zero follows.
    pub(crate) fn try_sds(&self, bytes: &[u8]) -> (Vec<u8>, bool) {
        let common = &self.symbols.common;
        let sds = common.sds(bytes);
        // SAFETY: A string that the server has just made: its bytes, and one behind them.
        let end = unsafe { super::read::<u8>(sds.cast_const().cast(), sds_bytes(sds).len()) };
        let has = sds_bytes(sds).to_vec();
        common.free_sds(sds);
        (has, end == 0)
    }

    /// A string that was filled with one text, and then with another. `None`: the family does not do that.
    pub(crate) fn try_copy(&self, first: &[u8], second: &[u8]) -> Option<Vec<u8>> {
        let Own::Valkey(own, _) = self.symbols.own else { return None };
        let mut scratch = self.scratch();
        scratch.fill_key(&own, first);
        Some(sds_bytes(scratch.fill_key(&own, second)).to_vec())
    }

    /// A string object, made in the way for all strings or in that for names.
    pub(crate) fn try_string(&self, bytes: &[u8], is_name: bool) -> Shape {
        let common = &self.symbols.common;
        let object = if is_name { common.name(bytes) } else { common.string(bytes) };
        self.shape_and_release(object)
    }

    /// A number as an object.
    pub(crate) fn try_number(&self, number: i32) -> Shape {
        self.shape_and_release(self.symbols.common.number(number))
    }

    /// A string as the server's loader encodes it.
    pub(crate) fn try_encoded(&self, bytes: &[u8]) -> Shape {
        let common = &self.symbols.common;
        let object = match &self.symbols.own {
            Own::Valkey(own, _) => own.string(common, bytes),
            Own::Dicts(own, only) => {
                let content = remora_redis::rdb::Content::Bytes(bytes);
                own.value(only, common, &Value::String(content), ptr::null_mut(), 0)
            }
        };
        self.shape_and_release(object)
    }

    /// The heads of an object as it was made, with one more reference, and with that given back.
    pub(crate) fn try_references(&self) -> Option<[u64; 3]> {
        let Own::Valkey(own, _) = self.symbols.own else { return None };
        let common = &self.symbols.common;
        let object = common.string(b"one and two references");
        // SAFETY: An object that the server has just made has at least 16 bytes.
        let head = || unsafe { super::read::<u64>(object.cast_const().cast(), 0) };
        let made = head();
        own.retain(object);
        let retained = head();
        common.release(object);
        let released = head();
        common.release(object);
        Some([made, retained, released])
    }

    /// The server's hash of these bytes.
    pub(crate) fn try_hash(&self, bytes: &[u8]) -> u64 {
        match &self.symbols.own {
            Own::Dicts(own, _) => own.hash_of(bytes),
            Own::Valkey(own, _) => own.hash_of(bytes),
        }
    }

    /// Adds a key with a short string. False: the server says that it is there.
    pub(crate) fn try_add(&self, context: &Context<'_>, adding: &Adding<'_>, value: &[u8]) -> Option<bool> {
        if !context.select(adding.database) {
            return None;
        }
        let (common, into) = (&self.symbols.common, self.database(adding.database)?);
        let (key, mut object) = (common.sds(adding.key), common.string(value));
        let (added, copied) = match &self.symbols.own {
            Own::Dicts(_, only) => (only.added(into, key, &mut object, None), only.copies_keys()),
            Own::Valkey(own, _) => (own.added(into, key, &mut object), true),
        };
        if !added {
            common.release(object);
        }
        if copied || !added {
            common.free_sds(key);
        }
        Some(added)
    }

    /// The value of a key, if it is in the bucket of its hash.
    fn in_its_bucket(&self, adding: &Adding<'_>) -> Option<Object> {
        let table = self.table(self.database(adding.database)?);
        if table.is_null() {
            return None;
        }
        let (first, mask) = self.buckets(table);
        let hash = self.try_hash(adding.key);
        match &self.symbols.own {
            Own::Dicts(_, only) => {
                let bucket = first.wrapping_add((hash & mask) as usize * size_of::<*const u8>());
                let mut entry = head(bucket);
                while !entry.is_null() {
                    let (key, value) = only.key_and_value(entry);
                    if sds_bytes(only.key_of((key, value))) == adding.key {
                        return Some(value);
                    }
                    entry = only.next(entry);
                }
                None
            }
            Own::Valkey(own, _) => {
                let mut bucket = first.wrapping_add((hash & mask) as usize * BUCKET_BYTES);
                while !bucket.is_null() {
                    let (presence, next) = bucket_of(bucket);
                    let mut same = candidates(bucket, presence, (hash >> HASH_SHIFT) as u8);
                    if let Some(object) = same.find(|object| sds_bytes(own.key_of(*object)) == adding.key) {
                        return Some(object);
                    }
                    bucket = next;
                }
                None
            }
        }
    }

    /// What the key's value is like. `None`: the key is not in the bucket of its hash.
    pub(crate) fn try_find(&self, adding: &Adding<'_>) -> Option<Shape> {
        self.in_its_bucket(adding).map(|object| self.shape(object))
    }

    /// Sets the key's expiry.
    pub(crate) fn try_expire(&self, adding: &Adding<'_>, at_ms: u64) {
        let (common, into) = (&self.symbols.common, self.database(adding.database));
        match (&self.symbols.own, into) {
            (Own::Dicts(_, only), Some(into)) => only.expire(common, into, adding.key, at_ms),
            (Own::Valkey(own, _), Some(into)) => drop(own.expire(common, into, adding.key, at_ms)),
            _ => {}
        }
    }

    /// The key's expiry, by the functions that a walk uses.
    pub(crate) fn try_expiry(&self, adding: &Adding<'_>) -> Option<i64> {
        match &self.symbols.own {
            Own::Dicts(_, only) => {
                let expiries = self.table_at(self.database(adding.database)?, self.at.database_expires);
                // A store has no table before it has an entry.
                if expiries.is_null() {
                    return None;
                }
                let object = self.in_its_bucket(adding)?;
                let key = self.symbols.common.sds(adding.key);
                let expiry = only.expiry_of(expiries.cast_mut().cast(), key, object);
                self.symbols.common.free_sds(key);
                expiry
            }
            Own::Valkey(own, _) => own.expiry_of(self.in_its_bucket(adding)?),
        }
    }

    /// Sets the key's age or its counter of uses.
    pub(crate) fn try_use(&self, adding: &Adding<'_>, usage: Usage) {
        let Some(object) = self.in_its_bucket(adding) else { return };
        match &self.symbols.own {
            Own::Dicts(own, _) => own.use_as(object, usage, own.now()),
            Own::Valkey(_, only) => only.use_as(object, usage),
        }
    }

    /// The key's idle seconds, by the function that a walk uses.
    pub(crate) fn try_idle(&self, adding: &Adding<'_>) -> Option<u64> {
        let object = self.in_its_bucket(adding)?;
        Some(match &self.symbols.own {
            Own::Dicts(own, _) => own.idle_milliseconds(object) / 1000,
            Own::Valkey(_, only) => only.idle_seconds(object),
        })
    }

    /// The key's counter of uses, likewise.
    pub(crate) fn try_uses(&self, adding: &Adding<'_>) -> Option<u8> {
        let object = self.in_its_bucket(adding)?;
        Some(match &self.symbols.own {
            Own::Dicts(own, _) => own.frequency(object),
            Own::Valkey(_, only) => only.frequency(object),
        })
    }

    /// A collection that was loaded and saved again by the server's functions: its type and encoding, the type as which
    /// the saver writes it in that version of the format, and what it writes.
    pub(crate) fn try_value(&self, collection: &Collection<'_>, version: u16) -> Option<(Shape, u8, Vec<u8>)> {
        let (common, value) = (&self.symbols.common, Value::Collection(*collection));
        let key = common.sds(b"a name");
        let object = match &self.symbols.own {
            Own::Dicts(own, only) => own.value(only, common, &value, key, 0),
            Own::Valkey(own, only) => own.value(only, common, &value, key, 0),
        };
        common.free_sds(key);
        if object.is_null() {
            return None;
        }
        let (mut written, kind) = (Vec::new(), self.saved_type(object, version));
        let shape = self.shape(object);
        let saved = kind.is_some_and(|kind| {
            self.save(object, kind, &mut |bytes| {
                written.extend_from_slice(bytes);
                true
            })
        });
        common.release(object);
        kind.filter(|_| saved).map(|SavedType(kind)| (shape, kind, written))
    }

    fn shape(&self, object: Object) -> Shape {
        let only = match &self.symbols.own {
            Own::Dicts(..) => None,
            Own::Valkey(_, only) => Some(only),
        };
        Shape { kind: kind(object), encoding: encoding(object), text: text_of(object, only) }
    }

    fn shape_and_release(&self, object: Object) -> Shape {
        let shape = self.shape(object);
        self.symbols.common.release(object);
        shape
    }
}
