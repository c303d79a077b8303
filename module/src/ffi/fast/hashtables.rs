//! Keys added to Valkey's tables (`hashtable`), from 8.1 on: buckets of seven objects, each with its key inside.
//!
//! Such a server copies the key, and a short string, into an object of its own. So neither is made anew for each key:
//! a [`Scratch`] has one key, and one string of each length, into which the next bytes are written.

use std::ffi::{c_int, c_longlong, c_void};
use std::ptr;

use remora_redis::rdb::{Content, Record, Usage, Value};

use super::symbols::{Common, Database, Object, Sds, Valkey, ValkeyOnly};
use super::walk::{BUCKET_BYTES, bucket_of, candidates, is_embedded};
use super::{AddError, BATCH, DIGITS_BYTES, FastServer, bytes_of, numbers, prefetch, refused, repeated};

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
    pub(super) made_at: usize,
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

impl FastServer {
    /// What [`FastServer::add`] uses again from key to key. It must end on the server's main thread.
    pub(crate) fn scratch(&self) -> Scratch {
        let common = self.symbols.common;
        let key = common.sds(&[0; KEY_BYTES]);
        Scratch { common, key, templates: [ptr::null_mut(); TEMPLATES], made_at: 0 }
    }

    pub(super) fn add_to_valkey(
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
}

/// A bucket keeps the highest byte of each hash.
const HASH_SHIFT: u32 = 56;

impl Valkey {
    fn hash_of(&self, key: &[u8]) -> u64 {
        // SAFETY: The bytes are there and are only read.
        unsafe { (self.hash)(key.as_ptr().cast(), key.len()) }
    }

    /// The table of a store that is not in cluster mode; null before it has a key.
    pub(super) fn only_table(&self, store: *mut c_void) -> *mut c_void {
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
