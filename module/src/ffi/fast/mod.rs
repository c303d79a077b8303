//! Fast keys: the server's own functions and tables, for exact builds only.
//!
//! What is slow in a load of small values is not work but waiting: for the key's bucket, for the entry in it, for its
//! key, one after the other. Here a batch of keys is hashed and the memory of all of them is requested at once
//! (prefetch); then **each key is added by the functions that the server's own loader calls, in its order**. Of the
//! server's private memory only the place of a database and of its table are read, and one counter is written.
//!
//! - `symbols`: the functions. `dicts`, `hashtables`: keys added to tables of both kinds. `values`: values of all
//!   types, over the streams of `rio`. `trial`: work in a forked child, which may crash there. `walk`: over the tables
//!   of a fork child; `entries`: what they have there.
//!
//! The rule that every SAFETY comment here relies on, besides those of `ffi`:
//!
//! - **The build rule.** A [`FastServer`] exists only for a program whose version and SHA-256 are those of a layout
//!   (`crate::fast::layout`). Offsets and signatures were taken from that build's own sources and compiler, and a
//!   forked child has tried them before the first use in the server itself.

mod dicts;
mod entries;
mod hashtables;
mod rio;
mod symbols;
mod trial;
mod values;
mod walk;

pub(crate) use trial::in_child;
pub(crate) use walk::{FoundKey, FoundValue, Step};

use std::ffi::{c_char, c_int, c_longlong, c_void};

use remora_redis::rdb::{CollectionError, Content, Record, Usage, Value};

pub(crate) use hashtables::Scratch;

use self::symbols::{Common, Database, DictsOnly, Object, Own, Sds, Symbols};
use super::context::Context;
use crate::fast::layout::{Layout, Offsets};

/// Records that may be added together.
pub(crate) const BATCH: usize = 32;

/// The server's functions and tables.
#[derive(Clone, Copy)]
pub(crate) struct FastServer {
    symbols: Symbols,
    at: Offsets,
    /// This is a child that tries the functions.
    in_trial: bool,
}

/// Why a record was not added.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum AddError {
    #[error("the server has no database {0}, but the snapshot has keys in it: set databases to more than that")]
    Database(u32),
    #[error("the snapshot has the key {0:?} twice")]
    Duplicate(String),
    #[error("the key {key:?}: {error}")]
    Damaged { key: String, error: CollectionError },
    #[error("the server did not take the value of the key {0:?}")]
    Refused(String),
}

/// As which type a saver writes a value, as a number of the file format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SavedType(pub(crate) u8);

impl FastServer {
    /// Looks the functions up.
    ///
    /// # Errors
    /// The name of a function that is missing.
    pub(crate) fn of_build(context: &Context<'_>, layout: &Layout) -> Result<FastServer, &'static str> {
        // SAFETY: A layout comes only from `Layout::find`, for the version and the SHA-256 of this program (the build
        // rule), and names the family of that build, whose sources have these signatures.
        let symbols = unsafe { Symbols::look_up(context, layout.family) }?;
        Ok(FastServer { symbols, at: layout.at, in_trial: false })
    }

    /// The same in a child that tries it: there it may walk, too.
    pub(crate) fn in_trial(self) -> FastServer {
        FastServer { in_trial: true, ..self }
    }

    /// The number of databases, by the server's own state.
    pub(crate) fn database_count(&self) -> usize {
        // SAFETY: By the build rule an `int` is there.
        usize::try_from(unsafe { self.state::<c_int>(self.at.server_database_count) }).unwrap_or(0)
    }

    /// The number that a database says it has. The database must have been selected before: some servers create
    /// databases only then.
    pub(crate) fn number_of(&self, database: u32) -> Option<i32> {
        let database = self.database(database)?;
        // SAFETY: By the build rule an `int` is there.
        Some(unsafe { read::<c_int>(database.cast(), self.at.database_number) })
    }

    /// The number of keys in the table of a database, by the table itself.
    pub(crate) fn keys_in_table(&self, database: u32) -> Option<usize> {
        let table = self.table(self.database(database)?);
        let used = |which: usize| {
            // SAFETY: By the build rule two numbers are there.
            unsafe { read::<usize>(table, self.at.table_used + which * size_of::<usize>()) }
        };
        (!table.is_null()).then(|| used(0).wrapping_add(used(1)))
    }

    /// Adds these records to that database, as the server's own loader adds them. At most [`BATCH`] of them. Their
    /// bytes must not change meanwhile.
    ///
    /// # Errors
    /// [`AddError`]: some of the records may have been added.
    pub(crate) fn add(
        &self,
        context: &Context<'_>,
        scratch: &mut Scratch,
        database: u32,
        records: &[Record<'_>],
    ) -> Result<(), AddError> {
        if !context.select(database) {
            return Err(AddError::Database(database));
        }
        let into = self.database(database).ok_or(AddError::Database(database))?;
        for record in records {
            if let Value::Collection(collection) = &record.value {
                collection.check().map_err(|error| AddError::Damaged { key: shown_key(record), error })?;
            }
        }
        let number = c_int::try_from(database).unwrap_or_default();
        let added = match self.symbols.own {
            Own::Dicts(own, only) => self.add_to_dict((&own, &only), (into, number), scratch, records),
            Own::Valkey(own, only) => self.add_to_valkey((&own, &only), (into, number), scratch, records),
        };
        self.count_loaded(records.len());
        added
    }

    /// A database that exists.
    fn database(&self, number: u32) -> Option<Database> {
        let number = usize::try_from(number).ok().filter(|number| *number < self.database_count())?;
        // SAFETY: By the build rule the address of an array is there.
        let array = unsafe { self.state::<*mut u8>(self.at.server_databases) };
        let database = if self.at.database_bytes == 0 {
            // SAFETY: By the build rule the array has a pointer for each number below the count.
            unsafe { read::<Database>(array, number * size_of::<Database>()) }
        } else {
            array.wrapping_add(number * self.at.database_bytes).cast()
        };
        (!database.is_null()).then_some(database)
    }

    /// The table of a database's keys; null if it has none yet.
    fn table(&self, database: Database) -> *const u8 {
        self.table_at(database, self.at.database_keys)
    }

    /// The table that a database has at that offset, or the only one of a store there.
    fn table_at(&self, database: Database, offset: usize) -> *const u8 {
        // SAFETY: By the build rule the address of a `dict` or of a `kvstore` is there.
        let keys = unsafe { read::<*mut c_void>(database.cast(), offset) };
        match self.symbols.own {
            Own::Dicts(_, DictsOnly::Redis7(_)) => keys.cast(),
            Own::Dicts(..) => {
                // SAFETY: By the build rule a store has the address of an array there.
                let tables = unsafe { read::<*const u8>(keys.cast(), self.at.store_tables) };
                // SAFETY: The array has the address of the first `dict`, or null; outside of cluster mode no other.
                unsafe { read(tables, 0) }
            }
            Own::Valkey(own, _) => own.only_table(keys).cast(),
        }
    }

    /// Adds to the server's counter of keys that it has loaded (INFO `rdb_last_load_keys_loaded`).
    fn count_loaded(&self, keys: usize) {
        let counter = self.symbols.state.as_ptr().wrapping_add(self.at.server_keys_loaded).cast::<c_longlong>();
        // SAFETY: By the build rule a `long long` is there, aligned, and only this thread uses it.
        let before = unsafe { counter.read() };
        // SAFETY: As above.
        unsafe { counter.write(before.wrapping_add(keys as c_longlong)) };
    }

    /// # Safety
    /// The server's state has a `T` at that offset.
    unsafe fn state<T: Copy>(&self, offset: usize) -> T {
        // SAFETY: Guaranteed by the caller.
        unsafe { read(self.symbols.state.as_ptr(), offset) }
    }

    /// Where the heads of buckets are into which keys go now: the address of the first, and the mask for hashes.
    fn buckets(&self, table: *const u8) -> (*const u8, u64) {
        // SAFETY: By the build rule a `long` is there: the position of a rehash, or -1.
        let rehash = unsafe { read::<isize>(table, self.at.table_rehash) };
        let which = usize::from(rehash >= 0);
        // SAFETY: By the build rule two addresses are there.
        let first = unsafe { read::<*const u8>(table, self.at.tables + which * size_of::<*const u8>()) };
        // SAFETY: By the build rule two bytes are there: exponents, -1 for a table that does not exist.
        let exponent = unsafe { read::<i8>(table, self.at.table_exponents + which) };
        let buckets = u32::try_from(exponent).ok().and_then(|exponent| 1_u64.checked_shl(exponent)).unwrap_or(1);
        (first, buckets - 1)
    }
}

fn refused(record: &Record<'_>) -> AddError {
    AddError::Refused(shown_key(record))
}

fn repeated(record: &Record<'_>) -> AddError {
    AddError::Duplicate(shown_key(record))
}

// The methods below are safe under the build rule: a `Symbols` exists only under it. What they take was made by them.

impl Common {
    fn sds(&self, bytes: &[u8]) -> Sds {
        // SAFETY: The bytes are there and are copied.
        unsafe { (self.new_sds)(bytes.as_ptr().cast(), bytes.len()) }
    }

    fn free_sds(&self, sds: Sds) {
        // SAFETY: Made by `sds`, owned by the caller, who does not use it again.
        unsafe { (self.free_sds)(sds) }
    }

    fn string(&self, bytes: &[u8]) -> Object {
        // SAFETY: As in `sds`.
        unsafe { (self.new_string)(bytes.as_ptr().cast(), bytes.len()) }
    }

    /// An object for a function that takes the name of a key as one.
    fn name(&self, bytes: &[u8]) -> Object {
        // SAFETY: As in `sds`.
        unsafe { (self.new_raw_string)(bytes.as_ptr().cast(), bytes.len()) }
    }

    fn number(&self, number: i32) -> Object {
        // SAFETY: No conditions.
        unsafe { (self.new_number)(c_longlong::from(number)) }
    }

    fn release(&self, object: Object) {
        // SAFETY: A reference of the caller's, who does not use it again.
        unsafe { (self.release)(object) }
    }
}

/// Frequency and idle seconds as the servers' loaders pass them: -1 for the one that the snapshot does not have.
fn numbers(usage: Usage) -> (c_longlong, c_longlong) {
    match usage {
        Usage::Idle(seconds) => (-1, c_longlong::try_from(seconds).unwrap_or(c_longlong::MAX)),
        Usage::Frequency(count) => (c_longlong::from(count), -1),
    }
}

/// The bytes for which a key stands.
fn bytes_of<'a>(content: &Content<'a>, digits: &'a mut [u8; DIGITS_BYTES]) -> &'a [u8] {
    use std::io::Write;
    match content {
        Content::Bytes(bytes) => bytes,
        Content::Number(number) => {
            let mut rest = digits.as_mut_slice();
            // The longest number fits.
            let _ = write!(rest, "{number}");
            let written = DIGITS_BYTES - rest.len();
            digits.get(..written).unwrap_or_default()
        }
    }
}

/// The digits of the longest number of 32 bits, and its sign.
const DIGITS_BYTES: usize = 11;

/// A key for a message.
fn shown_key(record: &Record<'_>) -> String {
    const SHOWN_BYTES: usize = 80;
    let mut digits = [0; DIGITS_BYTES];
    let key = bytes_of(&record.key, &mut digits);
    String::from_utf8_lossy(key.get(..SHOWN_BYTES).unwrap_or(key)).into_owned()
}

/// # Safety
/// A `T` is at that offset from `base`, and no other thread writes it.
unsafe fn read<T: Copy>(base: *const u8, offset: usize) -> T {
    let place = base.wrapping_add(offset).cast::<T>();
    // SAFETY: Guaranteed by the caller.
    unsafe { place.read_unaligned() }
}

/// # Safety
/// A `T` is at that offset from `base`, may be written, and no other thread uses it.
unsafe fn write<T: Copy>(base: *const u8, offset: usize, value: T) {
    let place = base.wrapping_add(offset).cast_mut().cast::<T>();
    // SAFETY: Guaranteed by the caller.
    unsafe { place.write_unaligned(value) }
}

/// Asks for the line of memory at that address. Any address is allowed.
fn prefetch(address: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: A hint: it accesses nothing, whatever the address is.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(address.cast())
    };
    #[cfg(not(target_arch = "x86_64"))]
    let _ = address;
}

const _: () = assert!(size_of::<c_char>() == 1 && size_of::<c_longlong>() == 8);
