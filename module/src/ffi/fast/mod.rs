//! Fast keys: the server's own functions and tables, for exact builds only.
//!
//! What is slow in a load of small values is not work but waiting: for the key's bucket, for the entry in it, for its
//! key, one after the other. Here a batch of keys is hashed and the memory of all of them is requested at once
//! (prefetch); then **each key is added by the functions that the server's own loader calls, in its order**. Of the
//! server's private memory only the place of a database and of its table are read, and one counter is written.
//!
//! In reading order: the rule, the entries of a `dict`, keys added to tables of both kinds, and values of all types.
//! `symbols` has the functions, and the streams of values; `trial` the work in a forked child, which may crash there;
//! and `walk` the way over the tables of a fork child.
//!
//! The rule that every SAFETY comment here relies on, besides those of `ffi`:
//!
//! - **The build rule.** A [`FastServer`] exists only for a program whose version and SHA-256 are those of a listed
//!   layout, or whose version and build id are those of a layout that only root and the server's own user can write
//!   (`crate::fast::layout`). The offsets were found in that build, the signatures are those of its family's sources,
//!   and a forked child has called every function with known arguments, and tried everything together, before the
//!   first use in the server itself.

mod symbols;
mod trial;
mod walk;

use std::ffi::{c_char, c_int, c_longlong, c_void};
use std::ptr;

use remora_redis::rdb::{COLLECTION_TYPES, Collection, CollectionError, Content, Record, Usage, Value};

use super::Context;
use crate::fast::layout::{Layout, Offsets};
pub(crate) use symbols::Functions;
use symbols::{Common, Database, Dicts, DictsOnly, Object, Own, Rio, Sds, Sink, Source, Symbols, Valkey, ValkeyOnly};
pub(crate) use trial::{Adding, Shape, Steps, Trouble, in_child};
use walk::{BUCKET_BYTES, bucket_of, candidates, is_embedded};
pub(crate) use walk::{FoundKey, FoundValue, Step};

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
    pub(crate) fn of_build(
        context: &Context<'_>,
        layout: &Layout,
        functions: &Functions,
    ) -> Result<FastServer, &'static str> {
        // SAFETY: A layout comes only from `Layout::listed`, `given` and `found`, for this program (the build rule),
        // and names the family of that build, whose sources have these signatures.
        let symbols = unsafe { Symbols::look_up(context, layout.family, functions) }?;
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
            Own::Dicts(_, DictsOnly::Redis7(..)) => keys.cast(),
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

    fn add_to_dict(
        &self,
        (own, only): (&Dicts, &DictsOnly),
        (into, number): (Database, c_int),
        scratch: &mut Scratch,
        records: &[Record<'_>],
    ) -> Result<(), AddError> {
        let common = &self.symbols.common;
        let table = self.table(into);
        let (first, mask) = if table.is_null() { (ptr::null(), 0) } else { self.buckets(table) };
        let mut batch = [Prepared::NONE; BATCH];
        let mut digits = [0; DIGITS_BYTES];
        for (prepared, record) in batch.iter_mut().zip(records) {
            let key = bytes_of(&record.key, &mut digits);
            let bucket = first.wrapping_add((own.hash_of(key) & mask) as usize * size_of::<*const u8>());
            prefetch(bucket);
            let key = common.sds(key);
            *prepared = Prepared { key, value: own.value(only, common, &record.value, key, number), bucket };
        }
        let batch = batch.get_mut(..records.len()).unwrap_or_default();
        all_made(common, batch, records)?;
        // The entries that are in the buckets, and then their keys, with which the server compares.
        if !first.is_null() {
            let mut entries = [ptr::null(); BATCH];
            for (entry, prepared) in entries.iter_mut().zip(batch.iter()) {
                *entry = head(prepared.bucket);
                prefetch(*entry);
            }
            for entry in entries.iter().filter(|entry| !entry.is_null()) {
                prefetch(only.compared(*entry));
            }
        }
        let mut clock = None;
        for at in 0..batch.len() {
            let (Some(prepared), Some(record)) = (batch.get(at), records.get(at)) else { break };
            let (key, mut value) = (prepared.key, prepared.value);
            if !only.added(into, key, &mut value, record.expires_ms) {
                common.free(batch.get(at..).unwrap_or_default());
                return Err(repeated(record));
            }
            scratch.made_at = value.addr();
            if only.copies_keys() {
                common.free_sds(key);
            }
            if let Some(expires_ms) = record.expires_ms.filter(|_| !only.expires_as_added()) {
                only.expire(common, into, bytes_of(&record.key, &mut digits), expires_ms);
            }
            if let Some(usage) = record.usage {
                own.use_as(value, usage, *clock.get_or_insert_with(|| own.now()));
            }
        }
        Ok(())
    }

    /// What [`FastServer::add`] uses again from key to key. It must end on the server's main thread.
    pub(crate) fn scratch(&self) -> Scratch {
        let common = self.symbols.common;
        let key = common.sds(&[0; KEY_BYTES]);
        Scratch { common, key, templates: [ptr::null_mut(); TEMPLATES], made_at: 0 }
    }

    fn add_to_valkey(
        &self,
        (own, only): (&Valkey, &ValkeyOnly),
        (into, number): (Database, c_int),
        scratch: &mut Scratch,
        records: &[Record<'_>],
    ) -> Result<(), AddError> {
        self.prefetch_places(own, into, records);
        let mut digits = [0; DIGITS_BYTES];
        for record in records {
            let key = bytes_of(&record.key, &mut digits);
            let name = scratch.fill_key(own, key);
            let (mut value, is_template) = match &record.value {
                Value::String(Content::Bytes(bytes)) => scratch.string(own, only, bytes),
                value => (own.value(only, &scratch.common, value, name, number), false),
            };
            if value.is_null() {
                return Err(refused(record));
            }
            let given = value;
            if !own.added(into, name, &mut value) {
                scratch.common.release(value);
                return Err(repeated(record));
            }
            if is_template && value == given {
                scratch.give_up(value);
            }
            if let Some(expires_ms) = record.expires_ms {
                value = own.expire(&scratch.common, into, key, expires_ms);
            }
            if let Some(usage) = record.usage {
                only.use_as(value, usage);
            }
            scratch.made_at = value.addr();
        }
        Ok(())
    }

    /// Requests the memory of the buckets into which these keys go, of what hangs on them, and of the keys with which
    /// the server will compare.
    fn prefetch_places(&self, own: &Valkey, into: Database, records: &[Record<'_>]) {
        let table = self.table(into);
        if table.is_null() {
            return;
        }
        let (first, mask) = self.buckets(table);
        if first.is_null() {
            return;
        }
        let mut places = [(ptr::null(), 0); BATCH];
        let mut digits = [0; DIGITS_BYTES];
        for (place, record) in places.iter_mut().zip(records) {
            let hash = own.hash_of(bytes_of(&record.key, &mut digits));
            let bucket = first.wrapping_add((hash & mask) as usize * BUCKET_BYTES);
            prefetch(bucket);
            *place = (bucket, (hash >> HASH_SHIFT) as u8);
        }
        for (bucket, hash) in places.iter().take(records.len()) {
            let (presence, next) = bucket_of(*bucket);
            prefetch(next);
            for object in candidates(*bucket, presence, *hash) {
                prefetch(object.cast_const().cast());
            }
        }
    }

    /// As which type the server's saver writes that value, in that version of the format. `None`: it is not of the
    /// types that are written here.
    fn saved_type(&self, object: Object, version: u16) -> Option<SavedType> {
        let code = match self.symbols.own {
            Own::Dicts(own, _) => written_type(|rio| {
                // SAFETY: A stream of our own; a value of a table, which is only read.
                unsafe { (own.save_type)(rio, object) };
            })?,
            Own::Valkey(_, ValkeyOnly::Eight(only)) => written_type(|rio| {
                // SAFETY: As above.
                unsafe { (only.save_type)(rio, object) };
            })?,
            Own::Valkey(_, ValkeyOnly::Nine(only)) => {
                // SAFETY: A value of a table, which is only read.
                u8::try_from(unsafe { (only.saved_type)(object, version.into()) }).ok()?
            }
        };
        (COLLECTION_TYPES.contains(&code) || STREAM_TYPES.contains(&code)).then_some(SavedType(code))
    }

    /// Writes what follows the key in a record. False: `put` has returned false.
    fn save(&self, object: Object, kind: SavedType, put: &mut dyn FnMut(&[u8]) -> bool) -> bool {
        let mut sink = Sink::new(put);
        let rio: *mut Rio = ptr::from_mut(&mut sink).cast();
        // The key is used for types of modules only.
        let key = ptr::null_mut();
        let written = match self.symbols.own {
            // SAFETY: A stream of our own; a value of a table that is not of a module's type, and is only read.
            Own::Dicts(own, _) => unsafe { (own.save)(rio, object, key, 0) },
            // SAFETY: As above.
            Own::Valkey(_, ValkeyOnly::Eight(only)) => unsafe { (only.save)(rio, object, key, 0) },
            // SAFETY: As above, and its own type.
            Own::Valkey(_, ValkeyOnly::Nine(only)) => unsafe { (only.save)(rio, object, key, 0, kind.0) },
        };
        written >= 0
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

    /// Frees keys and values that the server has not taken.
    fn free(&self, batch: &[Prepared]) {
        for prepared in batch {
            self.free_sds(prepared.key);
            if !prepared.value.is_null() {
                self.release(prepared.value);
            }
        }
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

// Entries of a `dict`, which hang on its buckets in chains. Where values have their keys inside, the last of a chain is
// the value itself, and the others are links: a value, and what follows. The low bits of an address say which it is.

/// The first entry of a bucket, or null. Its low bits say what an entry is like.
fn head(bucket: *const u8) -> *const u8 {
    // SAFETY: The place of a bucket in a table that exists: an address, by the build rule.
    unsafe { read(bucket, 0) }
}

/// Whether an entry has its key inside.
fn is_embedding(entry: *const u8) -> bool {
    entry.addr() & ENTRY_KIND == ENTRY_EMBEDS
}

/// What an entry has at that offset, which depends on what the entry is like.
///
/// # Safety
/// A `T` is there.
unsafe fn of_entry<T: Copy>(entry: *const u8, plain: usize, embedding: usize) -> T {
    let offset = if is_embedding(entry) { embedding } else { plain };
    // SAFETY: Guaranteed by the caller.
    unsafe { read(entry.map_addr(|address| address & !ENTRY_KIND), offset) }
}

fn entry_key(entry: *const u8) -> Sds {
    if is_embedding(entry) {
        // SAFETY: An entry of a table that embeds its key: a byte is there, and as many bytes behind it is the key.
        let before: u8 = unsafe { of_entry(entry, 0, EMBEDDED_KEY_AT) };
        let first = entry.map_addr(|address| address & !ENTRY_KIND);
        return first.wrapping_add(EMBEDDED_KEY_AT + 1 + usize::from(before)).cast_mut().cast();
    }
    // SAFETY: An entry of a table, which begins with the address of its key.
    unsafe { read(entry, 0) }
}

fn entry_value(entry: *const u8) -> Object {
    // SAFETY: An entry of a table of keys: the address of its value is there.
    unsafe { of_entry(entry, ENTRY_VALUE_AT, 0) }
}

impl DictsOnly {
    /// The key and the value of an entry. `None`: the key is inside of the value, which must be read for it.
    fn key_and_value(&self, entry: *const u8) -> (Option<Sds>, Object) {
        match self {
            DictsOnly::Redis82(_) => (None, linked_value(entry)),
            _ => (Some(entry_key(entry)), entry_value(entry)),
        }
    }

    /// The key of an entry's value.
    fn key_of(&self, (key, value): (Option<Sds>, Object)) -> Sds {
        match (key, self) {
            // SAFETY: A value of a table of keys, which has its key inside.
            (None, DictsOnly::Redis82(only)) => unsafe { (only.key)(value) },
            (key, _) => key.unwrap_or(ptr::null_mut()),
        }
    }

    /// What the server reads to compare an entry's key with another.
    fn compared(&self, entry: *const u8) -> *const u8 {
        match self.key_and_value(entry) {
            (None, value) => value.cast_const().cast(),
            (Some(key), _) => key.cast_const().cast::<u8>().wrapping_sub(1),
        }
    }

    /// The next entry of a chain, or null.
    fn next(&self, entry: *const u8) -> *const u8 {
        match self {
            DictsOnly::Redis82(_) if is_value(entry) => ptr::null(),
            _ => entry_next(entry),
        }
    }
}

/// Whether an entry is a value itself, where values have their keys inside.
fn is_value(entry: *const u8) -> bool {
    entry.addr() & ENTRY_IS_VALUE != 0
}

fn linked_value(entry: *const u8) -> Object {
    let place = entry.map_addr(|address| address & !ENTRY_KIND);
    if is_value(entry) {
        return place.cast_mut().cast();
    }
    // SAFETY: A link, which begins with the address of a value.
    unsafe { read(place, 0) }
}

fn entry_next(entry: *const u8) -> *const u8 {
    // SAFETY: An entry of a table: behind its value is the address of the next, or null.
    unsafe { of_entry(entry, ENTRY_NEXT_AT, EMBEDDING_NEXT_AT) }
}

fn set_entry_next(entry: *const u8, next: *const u8) {
    let offset = if is_embedding(entry) { EMBEDDING_NEXT_AT } else { ENTRY_NEXT_AT };
    // SAFETY: As in `entry_next`; this is a fork child.
    unsafe { write(entry.map_addr(|address| address & !ENTRY_KIND), offset, next) };
}

/// `dictEntry`: key, value, next.
const ENTRY_VALUE_AT: usize = 8;

const ENTRY_NEXT_AT: usize = 16;

/// `dictEntryEmbedded` of Valkey 8.0: value, next, the size of the key's head, and the key. `dictEntryNoValue` of Redis
/// 8.2: value, next. Addresses of such entries have a bit.
const EMBEDDING_NEXT_AT: usize = 8;

const EMBEDDED_KEY_AT: usize = 16;

const ENTRY_KIND: usize = 7;

const ENTRY_EMBEDS: usize = 4;

/// Redis 8.2: the address of a value itself has one of these bits.
const ENTRY_IS_VALUE: usize = 3;

// Keys added to the tables of Redis, and to those of Valkey 8.0 (`dict`): chains of entries, each with the addresses
// of its value and of its key, or with the key inside.

/// The server has made the value of each record. If not, all of them are freed.
fn all_made(common: &Common, batch: &[Prepared], records: &[Record<'_>]) -> Result<(), AddError> {
    let missing = batch.iter().zip(records).find(|(prepared, _)| prepared.value.is_null());
    missing.map_or(Ok(()), |(_, record)| {
        common.free(batch);
        Err(refused(record))
    })
}

/// A key and a value that were made, and the bucket into which the key goes. The value is null if the server has
/// refused it.
#[derive(Clone, Copy)]
struct Prepared {
    key: Sds,
    value: Object,
    bucket: *const u8,
}

impl Prepared {
    const NONE: Prepared = Prepared { key: ptr::null_mut(), value: ptr::null_mut(), bucket: ptr::null() };
}

impl Dicts {
    fn hash_of(&self, key: &[u8]) -> u64 {
        // SAFETY: The bytes are there and are only read.
        unsafe { (self.hash)(key.as_ptr().cast(), key.len()) }
    }

    fn now(&self) -> c_longlong {
        // SAFETY: No conditions.
        c_longlong::from(unsafe { (self.clock)() })
    }

    fn use_as(&self, value: Object, usage: Usage, now: c_longlong) {
        let (frequency, idle) = numbers(usage);
        // SAFETY: A value that was just added. The multiplier for seconds, as in the server's loader.
        unsafe { (self.set_usage)(value, frequency, idle, now, 1000) };
    }

    /// As `rdbLoadObject` makes it; null if the server does not take it.
    fn value(&self, only: &DictsOnly, common: &Common, value: &Value<'_>, key: Sds, database: c_int) -> Object {
        match value {
            Value::String(Content::Number(number)) => common.number(*number),
            Value::String(Content::Bytes(bytes)) => {
                let object = common.string(bytes);
                match only {
                    // SAFETY: A string of our own; the function returns it or another in its place.
                    DictsOnly::Redis7(_, only) => unsafe { (only.encode)(object) },
                    // SAFETY: As above. 0: its unused bytes stay, as in the server's loader.
                    DictsOnly::Redis8(_, only) | DictsOnly::Valkey8(_, only) => unsafe { (only.encode)(object, 0) },
                    // SAFETY: As above.
                    DictsOnly::Redis82(only) => unsafe { (only.encode)(object, 0) },
                }
            }
            Value::Collection(Collection { kind, bytes }) => {
                let (mut source, mut error) = (Source::new(bytes), 0);
                let rio = ptr::from_mut(&mut source).cast();
                // SAFETY: A stream and a key of our own; by the caller the value was checked.
                unsafe { (self.load)(c_int::from(*kind), rio, key, database, &raw mut error) }
            }
        }
    }
}

impl DictsOnly {
    /// Whether the server copies the key of what it adds.
    fn copies_keys(&self) -> bool {
        matches!(self, DictsOnly::Redis82(_) | DictsOnly::Valkey8(..))
    }

    /// Whether [`DictsOnly::added`] sets the expiry.
    fn expires_as_added(&self) -> bool {
        matches!(self, DictsOnly::Redis82(_))
    }

    /// False if the key exists. The server takes the value if not, or puts another in its place, and takes the key
    /// unless it copies keys.
    fn added(&self, into: Database, key: Sds, value: &mut Object, expires_ms: Option<u64>) -> bool {
        match self {
            DictsOnly::Redis7(entries, _) | DictsOnly::Redis8(entries, _) | DictsOnly::Valkey8(entries, _) => {
                // SAFETY: An existing database, a string and an object of our own.
                unsafe { (entries.add)(into, key, *value) != 0 }
            }
            DictsOnly::Redis82(only) => {
                let expires_ms = expires_ms.map_or(NEVER, |at| c_longlong::try_from(at).unwrap_or(c_longlong::MAX));
                // SAFETY: As above.
                !unsafe { (only.add)(into, key, value, expires_ms) }.is_null()
            }
        }
    }

    /// Sets a key's expiry, which may move its value.
    fn expire(&self, common: &Common, database: Database, key: &[u8], at_ms: u64) {
        let name = common.name(key);
        let at_ms = c_longlong::try_from(at_ms).unwrap_or(c_longlong::MAX);
        match self {
            DictsOnly::Redis7(entries, _) | DictsOnly::Redis8(entries, _) | DictsOnly::Valkey8(entries, _) => {
                // SAFETY: No client, as in the server's loader; an existing database with that key.
                unsafe { (entries.set_expiry)(ptr::null_mut(), database, name, at_ms) };
            }
            DictsOnly::Redis82(only) => {
                // SAFETY: As above.
                unsafe { (only.set_expiry)(ptr::null_mut(), database, name, at_ms) };
            }
        }
        common.release(name);
    }
}

/// The expiry of a key that does not expire.
const NEVER: c_longlong = -1;

// Keys added to Valkey's tables (`hashtable`), from 8.1 on: buckets of seven objects, each with its key inside.
//
// Such a server copies the key, and a short string, into an object of its own. So neither is made anew for each key:
// a [`Scratch`] has one key, and one string of each length, into which the next bytes are written.

/// Strings that are kept to be used again: of less than this many bytes. Servers embed strings of up to 115.
const TEMPLATES: usize = 128;

/// Room for the first keys.
const KEY_BYTES: usize = 64;

/// What is used again from key to key.
pub(crate) struct Scratch {
    common: Common,
    /// A key, where the server copies keys.
    key: Sds,
    /// For each length a string of that length, or null. We hold a reference to each, and the server never gets the
    /// last one.
    templates: [Object; TEMPLATES],
    /// Where the last value is that the server has made.
    made_at: usize,
}

impl Scratch {
    /// Where the last value is that the server has made: what its allocator uses now.
    pub(crate) fn made_at(&self) -> usize {
        self.made_at
    }

    fn fill_key(&mut self, own: &Valkey, key: &[u8]) -> Sds {
        // SAFETY: A string of our own; the function returns it, or another in its place.
        self.key = unsafe { (own.set_sds)(self.key, key.as_ptr().cast(), key.len()) };
        self.key
    }

    /// A string as the server's loader makes it. True: it is a template, which the server must copy, and with it comes
    /// a reference of its own.
    fn string(&mut self, own: &Valkey, only: &ValkeyOnly, bytes: &[u8]) -> (Object, bool) {
        let kept = self.templates.get_mut(bytes.len()).filter(|_| !may_be_number(bytes));
        if let Some(template) = kept.as_deref().copied().filter(|template| !template.is_null()) {
            let place: *mut u8 = only.value_of(template).cast();
            // SAFETY: An embedded string of this length, which is ours alone.
            unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), place, bytes.len()) };
            own.retain(template);
            return (template, true);
        }
        let object = own.string(&self.common, bytes);
        match kept.filter(|_| is_embedded(object)) {
            None => (object, false),
            Some(template) => {
                own.retain(object);
                *template = object;
                (object, true)
            }
        }
    }

    /// The server has taken a template as it is: it is not ours any more. Nor is any other kept.
    fn give_up(&mut self, object: Object) {
        self.common.release(object);
        for template in &mut self.templates {
            let template = std::mem::replace(template, ptr::null_mut());
            if !template.is_null() && template != object {
                self.common.release(template);
            }
        }
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        self.common.free_sds(self.key);
        for template in self.templates.iter().filter(|template| !template.is_null()) {
            self.common.release(*template);
        }
    }
}

/// Whether servers might keep this string as a number: then its encoding depends on its bytes.
fn may_be_number(bytes: &[u8]) -> bool {
    bytes.len() <= NUMBER_BYTES_MAX && bytes.first().is_none_or(|first| first.is_ascii_digit() || *first == b'-')
}

/// Digits and sign of the longest number.
const NUMBER_BYTES_MAX: usize = 20;

/// A bucket keeps the highest byte of each hash.
const HASH_SHIFT: u32 = 56;

impl Valkey {
    fn hash_of(&self, key: &[u8]) -> u64 {
        // SAFETY: The bytes are there and are only read.
        unsafe { (self.hash)(key.as_ptr().cast(), key.len()) }
    }

    /// The table of a store that is not in cluster mode; null before it has a key.
    fn only_table(&self, store: *mut c_void) -> *mut c_void {
        // SAFETY: A store that exists; outside of cluster mode it has one table, of number 0.
        unsafe { (self.table)(store, 0) }
    }

    fn retain(&self, object: Object) {
        // SAFETY: An object to which the caller has a reference.
        unsafe { (self.retain)(object) }
    }

    /// False if the key exists. The server copies the key, and takes the value or puts another in its place.
    fn added(&self, into: Database, key: Sds, value: &mut Object) -> bool {
        // SAFETY: An existing database, a string and an object of our own.
        unsafe { (self.add)(into, key, value) != 0 }
    }

    /// Returns the value, which the server may have moved.
    fn expire(&self, common: &Common, database: Database, key: &[u8], at_ms: u64) -> Object {
        let name = common.name(key);
        let at_ms = c_longlong::try_from(at_ms).unwrap_or(c_longlong::MAX);
        // SAFETY: No client, as in the server's loader; an existing database with that key.
        let value = unsafe { (self.set_expiry)(ptr::null_mut(), database, name, at_ms) };
        common.release(name);
        value
    }

    fn string(&self, common: &Common, bytes: &[u8]) -> Object {
        let object = common.string(bytes);
        // SAFETY: A string of our own; the function returns it or another in its place. 0: its unused bytes stay, as in
        // the server's loader.
        unsafe { (self.encode)(object, 0) }
    }

    /// As `rdbLoadObject` makes it; null if the server does not take it.
    fn value(&self, only: &ValkeyOnly, common: &Common, value: &Value<'_>, key: Sds, database: c_int) -> Object {
        match value {
            Value::String(Content::Number(number)) => common.number(*number),
            Value::String(Content::Bytes(bytes)) => self.string(common, bytes),
            Value::Collection(Collection { kind, bytes }) => {
                let (mut source, mut error) = (Source::new(bytes), 0);
                let (rio, kind) = (ptr::from_mut(&mut source).cast(), c_int::from(*kind));
                match only {
                    // SAFETY: A stream and a key of our own; by the caller the value was checked.
                    ValkeyOnly::Eight(eight) => unsafe { (eight.load)(kind, rio, key, database, &raw mut error) },
                    // SAFETY: As above. The time is used only for fields that expire, which no collection has.
                    ValkeyOnly::Nine(nine) => unsafe {
                        (nine.load)(kind, rio, key, database, &raw mut error, REPLICATION, 0)
                    },
                }
            }
        }
    }
}

impl ValkeyOnly {
    fn use_as(&self, value: Object, usage: Usage) {
        let (frequency, idle) = numbers(usage);
        match self {
            ValkeyOnly::Eight(eight) => {
                // SAFETY: No conditions.
                let now = c_longlong::from(unsafe { (eight.clock)() });
                // SAFETY: A value that was just added. The multiplier for seconds, as in the server's loader.
                unsafe { (eight.set_usage)(value, frequency, idle, now, 1000) };
            }
            ValkeyOnly::Nine(nine) => {
                // SAFETY: A value that was just added.
                unsafe { (nine.set_usage)(value, frequency, idle) };
            }
        }
    }
}

// Values of all types, made and written by the server's own loader and saver of one value.
//
// Both work on streams of our own kinds (`symbols`). So encodings, conversions by the server's limits, and
// counters are the server's.
//
// A loader that meets a damaged value ends its server: callers check values first (`Collection::check`).

/// `RDBFLAGS_REPLICATION`: what the server's loader passes when it loads from its primary.
const REPLICATION: c_int = 1 << 1;

/// `RDB_TYPE_STREAM_LISTPACKS` and its two later forms.
const STREAM_TYPES: [u8; 3] = [15, 19, 21];

/// The type that a server's function writes as one byte.
fn written_type(write: impl FnOnce(*mut Rio)) -> Option<u8> {
    let mut code = None;
    let mut put = |bytes: &[u8]| {
        code = bytes.first().copied();
        true
    };
    let mut sink = Sink::new(&mut put);
    write(ptr::from_mut(&mut sink).cast());
    code
}
