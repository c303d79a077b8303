//! The walk of a fork child over its own copy of the server's tables, with the memory of many keys requested at once.
//!
//! ```text
//!   window of buckets ──prefetch──▶ entries ──prefetch──▶ keys, objects ──prefetch──▶ values ──▶ show each key
//!                                                               shown and taken: out of its bucket, nothing is freed
//! ```
//!
//! What the caller takes is out of the table afterwards, so the server's saver, which iterates over the same tables,
//! does not find it. Mostly everything is taken: then the table is made an empty one at the end, and no bucket is
//! written, which would be a copy of its page. From the first window on in which something is left, what was taken is
//! unlinked from its bucket. Nothing is freed: the child ends soon. Only a fork child may do this.

use std::ffi::{c_int, c_void};
use std::marker::PhantomData;
use std::ptr;

use super::symbols::{Dicts, DictsOnly, Object, Own, Sds, Valkey, ValkeyOnly};
use super::{ENTRY_VALUE_AT, FastServer, NEVER, SavedType, head, prefetch, read, set_entry_next, write};
use crate::ffi::Context;

/// Buckets that are looked at together: a few hundred keys, whose heads fit in a first-level cache.
const WINDOW: usize = 128;

/// A key and its value, in their places. Nothing in a fork child moves them.
pub(crate) struct FoundKey<'w> {
    pub(crate) key: &'w [u8],
    pub(crate) value: FoundValue<'w>,
    /// When it expires, in milliseconds since 1970.
    pub(crate) expires_ms: Option<i64>,
    server: &'w FastServer,
    object: Object,
}

/// A value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FoundValue<'w> {
    /// A string.
    Bytes(&'w [u8]),
    /// A string that is a number, which stands for its decimal digits.
    Number(i64),
    /// A list, a set, a sorted set, a hash or a stream.
    Collection,
}

impl FoundKey<'_> {
    /// As which type the server's saver writes a collection, in that version of the format. `None`: in a form that is
    /// left to the saver (hashes with expiring fields).
    pub(crate) fn saved_type(&self, version: u16) -> Option<SavedType> {
        self.server.saved_type(self.object, version)
    }

    /// Writes a collection as the server's saver does: what follows the key in its record. False: `put` has returned
    /// false.
    pub(crate) fn save(&self, kind: SavedType, put: &mut dyn FnMut(&[u8]) -> bool) -> bool {
        self.server.save(self.object, kind, put)
    }

    /// Seconds since its last use, as the server's saver writes them.
    pub(crate) fn idle_seconds(&self) -> u64 {
        match self.server.symbols.own {
            Own::Dicts(own, _) => own.idle_milliseconds(self.object) / 1000,
            Own::Valkey(_, only) => only.idle_seconds(self.object),
        }
    }

    /// Its counter of uses, as the server's saver writes it.
    pub(crate) fn frequency(&self) -> u8 {
        match self.server.symbols.own {
            Own::Dicts(own, _) => own.frequency(self.object),
            Own::Valkey(_, only) => only.frequency(self.object),
        }
    }
}

/// What a walk has seen of a database.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Walked {
    /// Keys of all types.
    pub(crate) seen: usize,
    /// Those that the caller has taken.
    pub(crate) taken: usize,
}

/// Whether the caller of a walk has taken a key, and whether it wants more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    Take,
    Leave,
    Stop,
}

impl FastServer {
    /// Shows each key of a database, except those of modules' types. What `show` takes is out of the table afterwards.
    /// Only in a fork child: nothing happens in the server itself. `None`: the server has no such database.
    pub(crate) fn walk(
        &self,
        context: &Context<'_>,
        database: u32,
        show: impl FnMut(&FoundKey<'_>) -> Step,
    ) -> Option<Walked> {
        if !context.flags().is_child() && !self.in_trial {
            return None;
        }
        if !context.select(database) {
            return None;
        }
        let database = self.database(database)?;
        let table = self.table(database);
        if table.is_null() {
            return Some(Walked::default());
        }
        let (walked, lent) = (Walked::default(), PhantomData);
        let mut walk = Walk { server: self, table, show, walked, stopped: false, deferred: true, lent };
        for which in 0..2 {
            match self.symbols.own {
                Own::Dicts(_, only) => {
                    let expiries = self.table_at(database, self.at.database_expires);
                    walk.dict(&only, expiries.cast_mut().cast(), which);
                }
                Own::Valkey(own, only) => walk.valkey_table(&own, &only, which),
            }
        }
        // A walk that was stopped has left the key at which it was.
        if walk.deferred && walk.walked.seen > 0 {
            walk.forget();
        }
        Some(walk.walked)
    }
}

/// A walk over one database.
struct Walk<'w, F> {
    server: &'w FastServer,
    table: *const u8,
    show: F,
    walked: Walked,
    stopped: bool,
    /// All keys so far were taken, and are still in their buckets.
    deferred: bool,
    lent: PhantomData<&'w u8>,
}

impl<F: FnMut(&FoundKey<'_>) -> Step> Walk<'_, F> {
    /// The buckets of one of the two tables: the address of the first, and their number.
    fn buckets(&self, which: usize) -> (*const u8, usize) {
        let at = &self.server.at;
        // SAFETY: By the build rule two addresses are there.
        let first = unsafe { read::<*const u8>(self.table, at.tables + which * size_of::<*const u8>()) };
        // SAFETY: By the build rule two bytes are there.
        let exponent = unsafe { read::<i8>(self.table, at.table_exponents + which) };
        let count = u32::try_from(exponent).ok().and_then(|exponent| 1_usize.checked_shl(exponent)).unwrap_or(0);
        if first.is_null() { (first, 0) } else { (first, count) }
    }

    /// Makes the table an empty one: all of its keys were taken. A table that grows has two parts.
    fn forget(&self) {
        let at = &self.server.at;
        for which in 0..2 {
            // SAFETY: By the build rule two addresses are there; this is a fork child with one thread.
            unsafe { write(self.table, at.tables + which * size_of::<*const u8>(), ptr::null::<u8>()) };
            // SAFETY: By the build rule two bytes are there; -1 is the exponent of a table that does not exist.
            unsafe { write(self.table, at.table_exponents + which, -1_i8) };
        }
        // SAFETY: By the build rule a `long` is there; -1: the table does not grow.
        unsafe { write(self.table, at.table_rehash, -1_isize) };
    }

    /// A key was left, so the table will not be made an empty one: the keys that were taken from buckets before this
    /// one leave them now.
    fn leave_out_before(&mut self, which: usize, bucket: usize, bucket_bytes: usize, leave_out: fn(*const u8)) {
        self.deferred = false;
        for part in 0..=which {
            let (first, count) = self.buckets(part);
            let end = if part == which { bucket } else { count };
            (0..end).for_each(|bucket| leave_out(first.wrapping_add(bucket * bucket_bytes)));
        }
    }

    /// Notes that this many keys were taken out of one of the two tables.
    fn taken(&mut self, which: usize, taken: usize) {
        self.walked.taken += taken;
        let offset = self.server.at.table_used + which * size_of::<usize>();
        // SAFETY: By the build rule two numbers are there.
        let used = unsafe { read::<usize>(self.table, offset) };
        // SAFETY: As above, and this is a fork child with one thread.
        unsafe { write(self.table, offset, used.saturating_sub(taken)) };
    }

    /// Shows a key to the caller. True if the caller has taken it.
    fn show(&mut self, found: &FoundKey<'_>) -> bool {
        if self.stopped {
            return false;
        }
        match (self.show)(found) {
            Step::Take => true,
            Step::Leave => false,
            Step::Stop => {
                self.stopped = true;
                false
            }
        }
    }

    // --- dicts: chains of entries ---------------------------------------------------------------------------------

    fn dict(&mut self, only: &DictsOnly, expiries: *mut c_void, which: usize) {
        let (first, count) = self.buckets(which);
        let server = self.server;
        // Asked once: most data sets have none.
        let expire = server.entries(expiries) > 0;
        let (mut entries, mut taken) = (Vec::new(), 0);
        for window in (0..count).step_by(WINDOW) {
            if self.stopped {
                break;
            }
            let buckets = window..count.min(window + WINDOW);
            let place = |bucket: usize| first.wrapping_add(bucket * size_of::<*const u8>());
            for bucket in buckets.clone() {
                prefetch(head(place(bucket)));
            }
            entries.clear();
            for bucket in buckets {
                let mut entry = head(place(bucket));
                while !entry.is_null() {
                    let (key, object) = only.key_and_value(entry);
                    prefetch(object.cast_const().cast());
                    if let Some(key) = key {
                        prefetch(key.cast_const().cast::<u8>().wrapping_sub(1));
                    }
                    entries.push(Entry { bucket: place(bucket), entry, key, object, is_taken: false });
                    entry = only.next(entry);
                }
            }
            for entry in &entries {
                prefetch_value(entry.object);
            }
            self.walked.seen += entries.len();
            let before = taken;
            for entry in &mut entries {
                let value = match (kind(entry.object), encoding(entry.object)) {
                    (STRING, NUMBER) => FoundValue::Number(value_address(entry.object) as i64),
                    (STRING, _) => FoundValue::Bytes(sds_bytes(value_address(entry.object).cast())),
                    (COLLECTION_FIRST..=COLLECTION_LAST | STREAM, _) => FoundValue::Collection,
                    _ => continue,
                };
                let key = only.key_of((entry.key, entry.object));
                let expires_ms = expire.then(|| only.expiry_of(expiries, key, entry.object)).flatten();
                let key = sds_bytes(key);
                if self.show(&FoundKey { key, value, expires_ms, server, object: entry.object }) {
                    entry.is_taken = true;
                    taken += 1;
                }
            }
            if self.deferred && taken - before < entries.len() {
                self.leave_out_before(which, window, size_of::<*const u8>(), unlink_all);
            }
            if !self.deferred && taken > before {
                relink(only, &entries);
            }
        }
        self.taken(which, taken);
    }

    // --- Valkey: buckets of seven ---------------------------------------------------------------------------------

    fn valkey_table(&mut self, own: &Valkey, only: &ValkeyOnly, which: usize) {
        let (first, count) = self.buckets(which);
        let server = self.server;
        let (mut entries, mut taken) = (Vec::new(), 0);
        let place = |bucket: usize| first.wrapping_add(bucket * BUCKET_BYTES);
        // A bucket is a line of memory with seven keys.
        for window in (0..count).step_by(WINDOW / 4) {
            if self.stopped {
                break;
            }
            entries.clear();
            for bucket in window..count.min(window + WINDOW / 4) {
                let mut bucket = place(bucket);
                loop {
                    let (presence, child) = bucket_of(bucket);
                    for position in (0..POSITIONS).filter(|position| presence & (1 << position) != 0) {
                        let object = bucket_entry(bucket, position);
                        prefetch(object.cast_const().cast());
                        entries.push(Entry {
                            bucket,
                            entry: ptr::without_provenance(position),
                            key: None,
                            object,
                            is_taken: false,
                        });
                    }
                    if child.is_null() {
                        break;
                    }
                    bucket = child;
                }
            }
            for entry in &entries {
                prefetch_value(entry.object);
            }
            self.walked.seen += entries.len();
            let before = taken;
            for entry in &mut entries {
                let value = match (kind(entry.object), encoding(entry.object)) {
                    (STRING, NUMBER) => FoundValue::Number(value_address(entry.object) as i64),
                    (STRING, _) => FoundValue::Bytes(sds_bytes(only.value_of(entry.object))),
                    (COLLECTION_FIRST..=COLLECTION_LAST | STREAM, _) => FoundValue::Collection,
                    _ => continue,
                };
                let (key, expires_ms) = (sds_bytes(own.key_of(entry.object)), own.expiry_of(entry.object));
                if self.show(&FoundKey { key, value, expires_ms, server, object: entry.object }) {
                    entry.is_taken = true;
                    taken += 1;
                }
            }
            if self.deferred && taken - before < entries.len() {
                self.leave_out_before(which, window, BUCKET_BYTES, leave_all_out);
            }
            if !self.deferred {
                let taken = entries.iter().filter(|entry| entry.is_taken);
                taken.for_each(|entry| leave_out(entry.bucket, entry.entry.addr()));
            }
        }
        self.taken(which, taken);
    }
}

/// An entry of a table, and where it hangs. Valkey: `entry` is its position in the bucket.
struct Entry {
    bucket: *const u8,
    entry: *const u8,
    /// `None`: the key is inside of the object.
    key: Option<Sds>,
    object: Object,
    is_taken: bool,
}

/// Redis: everything in a bucket was taken.
fn unlink_all(bucket: *const u8) {
    if !head(bucket).is_null() {
        // SAFETY: The place of a bucket, which has an address; this is a fork child.
        unsafe { write(bucket, 0, ptr::null::<u8>()) };
    }
}

/// Makes chains of the entries that are left, in their order. `entries` has whole chains.
fn relink(only: &DictsOnly, entries: &[Entry]) {
    for chain in entries.chunk_by(|one, other| one.bucket == other.bucket) {
        let mut next = ptr::null();
        for left in chain.iter().rev().filter(|entry| !entry.is_taken) {
            // A value that hangs in a chain itself is the last.
            if only.next(left.entry) != next {
                set_entry_next(left.entry, next);
            }
            next = left.entry;
        }
        let Some(first) = chain.first() else { continue };
        if head(first.bucket) != next {
            // SAFETY: The place of a bucket, which has an address; this is a fork child.
            unsafe { write(first.bucket, 0, next) };
        }
    }
}

/// Which positions of a bucket have an entry, and the bucket that continues it, or null.
pub(super) fn bucket_of(bucket: *const u8) -> (u8, *const u8) {
    // SAFETY: A bucket of a table that exists; it begins with a byte of bits.
    let bits = unsafe { read::<u8>(bucket, 0) };
    if bits & CHAINED == 0 {
        return (bits >> 1, ptr::null());
    }
    (bits >> 1 & LAST_POSITION_OFF, bucket_entry(bucket, POSITIONS - 1).cast_const().cast())
}

/// The entries of a bucket whose hashes have that highest byte: those with whose keys the server compares a new key.
pub(super) fn candidates(bucket: *const u8, presence: u8, hash: u8) -> impl Iterator<Item = Object> {
    // SAFETY: A bucket has seven bytes of hashes behind its bits.
    let hashes = unsafe { read::<u64>(bucket, 0) } >> u8::BITS;
    // A byte of the difference is zero where the hashes are equal.
    let differs = hashes ^ (u64::from(hash) * 0x01_0101_0101_0101);
    let may_be_equal = differs.wrapping_sub(0x01_0101_0101_0101) & !differs & 0x80_8080_8080_8080;
    let positions = if may_be_equal == 0 { 0 } else { POSITIONS };
    (0..positions)
        .filter(move |position| presence >> position & 1 != 0 && (differs >> (position * 8)) as u8 == 0)
        .map(move |position| bucket_entry(bucket, position))
}

fn bucket_entry(bucket: *const u8, position: usize) -> Object {
    // SAFETY: A bucket has seven addresses behind its bits and hashes.
    unsafe { read(bucket, BUCKET_ENTRIES_AT + position * size_of::<Object>()) }
}

fn leave_out(bucket: *const u8, position: usize) {
    // SAFETY: As in `bucket_of`.
    let bits = unsafe { read::<u8>(bucket, 0) };
    // SAFETY: As above; this is a fork child.
    unsafe { write(bucket, 0, bits & !(2 << position)) };
}

/// Everything in a bucket, and in those that continue it, was taken.
fn leave_all_out(bucket: *const u8) {
    // SAFETY: As in `bucket_of`.
    if unsafe { read::<u8>(bucket, 0) } != 0 {
        // SAFETY: As above; this is a fork child.
        unsafe { write(bucket, 0, 0_u8) };
    }
}

/// A bucket of Valkey's tables: one cache line.
pub(super) const BUCKET_BYTES: usize = 64;

/// Entries in a bucket; the last is the next bucket where the bucket is chained.
const POSITIONS: usize = 7;
const CHAINED: u8 = 1;
const LAST_POSITION_OFF: u8 = 0b011_1111;
const BUCKET_ENTRIES_AT: usize = 8;

/// The type of a value, in the low bits of its head.
pub(super) fn kind(object: Object) -> u8 {
    // SAFETY: A value of a table: it begins with type, encoding and age.
    (unsafe { read::<u8>(object.cast_const().cast(), 0) }) & 0xF
}

pub(super) fn encoding(object: Object) -> u8 {
    // SAFETY: As in `kind`.
    (unsafe { read::<u8>(object.cast_const().cast(), 0) }) >> 4
}

/// A string whose bytes are in the object itself.
pub(super) fn is_embedded(object: Object) -> bool {
    (kind(object), encoding(object)) == (STRING, EMBEDDED)
}

/// What stands where most values have the address of their data: a number itself, for a string that is one.
fn value_address(object: Object) -> *mut c_void {
    // SAFETY: A value of a table has at least 16 bytes.
    unsafe { read(object.cast_const().cast(), VALUE_AT) }
}

/// The text of a string, or the digits of its number. `None`: it is another value.
pub(super) fn text_of(object: Object, only: Option<&ValkeyOnly>) -> Option<Vec<u8>> {
    let value = value_address(object);
    match (kind(object), encoding(object)) {
        (STRING, NUMBER) => Some((value as i64).to_string().into_bytes()),
        (STRING, _) => Some(sds_bytes(only.map_or(value.cast(), |only| only.value_of(object))).to_vec()),
        _ => None,
    }
}

/// Requests the bytes of a value. Where the value is embedded, what is read as its address is some of its bytes, for
/// which a prefetch does nothing.
fn prefetch_value(object: Object) {
    let value: *const u8 = value_address(object).cast_const().cast();
    prefetch(value.wrapping_sub(SDS_HEAD_BYTES_MAX / 2));
    prefetch(value.wrapping_add(LINE_BYTES - SDS_HEAD_BYTES_MAX / 2));
}

/// `OBJ_STRING` and `OBJ_ENCODING_INT`.
const STRING: u8 = 0;
const NUMBER: u8 = 1;
/// `OBJ_ENCODING_EMBSTR`.
const EMBEDDED: u8 = 8;
/// `OBJ_LIST`, `OBJ_SET`, `OBJ_ZSET`, `OBJ_HASH`; `OBJ_STREAM`. Between them is `OBJ_MODULE`.
const COLLECTION_FIRST: u8 = 1;
const COLLECTION_LAST: u8 = 4;
const STREAM: u8 = 6;
/// `robj`: type, encoding, age, references, and at 8 the address of the value.
const VALUE_AT: usize = 8;
const LINE_BYTES: usize = 64;
const SDS_HEAD_BYTES_MAX: usize = 17;

/// The bytes of a string of the server. The byte before them says how long the head is that has their number.
pub(super) fn sds_bytes<'w>(sds: Sds) -> &'w [u8] {
    let first: *const u8 = sds.cast_const().cast();
    // SAFETY: A string of the server: flags stand before its first byte.
    let flags = unsafe { read::<u8>(first.wrapping_sub(1), 0) };
    // SAFETY: The kind of the head, in the flags, says where the number of bytes is and how large.
    let length = match flags & 7 {
        0 => u64::from(flags >> 3),
        // SAFETY: As above.
        1 => u64::from(unsafe { read::<u8>(first.wrapping_sub(3), 0) }),
        // SAFETY: As above.
        2 => u64::from(unsafe { read::<u16>(first.wrapping_sub(5), 0) }),
        // SAFETY: As above.
        3 => u64::from(unsafe { read::<u32>(first.wrapping_sub(9), 0) }),
        // SAFETY: As above.
        _ => unsafe { read::<u64>(first.wrapping_sub(17), 0) },
    };
    // SAFETY: That many bytes are there, and nothing in a fork child changes or frees them.
    unsafe { std::slice::from_raw_parts(first, length as usize) }
}

impl FastServer {
    /// Redis: the number of entries of a table.
    fn entries(&self, table: *mut c_void) -> usize {
        let used = |which: usize| {
            // SAFETY: By the build rule two numbers are there.
            unsafe { read::<usize>(table.cast_const().cast(), self.at.table_used + which * size_of::<usize>()) }
        };
        if table.is_null() { 0 } else { used(0) + used(1) }
    }
}

impl DictsOnly {
    /// A key's expiry: by the table of expiries, or inside of its value.
    pub(super) fn expiry_of(&self, expiries: *mut c_void, key: Sds, object: Object) -> Option<i64> {
        let find = match self {
            DictsOnly::Redis7(entries, _) | DictsOnly::Redis8(entries, _) | DictsOnly::Valkey8(entries, _) => {
                entries.find
            }
            DictsOnly::Redis82(only) => {
                // SAFETY: A value of a table of keys.
                let expiry = unsafe { (only.expiry)(object) };
                return (expiry != NEVER).then_some(expiry);
            }
        };
        // SAFETY: A table that exists, and a key; it is only looked up.
        let entry = unsafe { find(expiries, key.cast()) };
        // SAFETY: An entry of the table of expiries has a number behind its key.
        (!entry.is_null()).then(|| unsafe { read::<i64>(entry.cast_const().cast(), ENTRY_VALUE_AT) })
    }
}

impl Dicts {
    pub(super) fn idle_milliseconds(&self, object: Object) -> u64 {
        // SAFETY: A value of a table; it is only read.
        unsafe { (self.idle)(object) }
    }

    pub(super) fn frequency(&self, object: Object) -> u8 {
        // SAFETY: A value of a table; it is only read.
        u8::try_from(unsafe { (self.frequency)(object) }).unwrap_or(u8::MAX)
    }
}

impl Valkey {
    pub(super) fn key_of(&self, object: Object) -> Sds {
        // SAFETY: A value of a table of keys, which embeds its key.
        unsafe { (self.key)(object) }
    }

    pub(super) fn expiry_of(&self, object: Object) -> Option<i64> {
        // SAFETY: A value of a table.
        let expiry = unsafe { (self.expiry)(object) };
        (expiry != NEVER).then_some(expiry)
    }
}

impl ValkeyOnly {
    pub(super) fn value_of(&self, object: Object) -> Sds {
        match self {
            // Also where the value is embedded.
            ValkeyOnly::Eight(_) => value_address(object).cast(),
            // SAFETY: A string of a table that is not a number.
            ValkeyOnly::Nine(nine) => unsafe { (nine.value)(object) },
        }
    }

    pub(super) fn idle_seconds(&self, object: Object) -> u64 {
        match self {
            // SAFETY: A value of a table; it is only read.
            ValkeyOnly::Eight(eight) => (unsafe { (eight.idle)(object) }) / 1000,
            // SAFETY: As above.
            ValkeyOnly::Nine(nine) => u64::from(unsafe { (nine.idle)(object) }),
        }
    }

    pub(super) fn frequency(&self, object: Object) -> u8 {
        match self {
            // SAFETY: A value of a table; it is only read.
            ValkeyOnly::Eight(eight) => u8::try_from(unsafe { (eight.frequency)(object) }).unwrap_or(u8::MAX),
            // SAFETY: As above.
            ValkeyOnly::Nine(nine) => unsafe { (nine.frequency)(object) },
        }
    }
}

const _: () = assert!(size_of::<c_int>() == 4);
