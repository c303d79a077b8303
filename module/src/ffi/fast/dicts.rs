//! Keys added to the tables of Redis, and to those of Valkey 8.0 (`dict`): chains of entries, each with the addresses
//! of its value and of its key, or with the key inside.

use std::ffi::{c_int, c_longlong};
use std::ptr;

use remora_redis::rdb::{Record, Usage};

use super::entries::{entry_key, head};
use super::hashtables::Scratch;
use super::symbols::{Common, Database, Dicts, DictsOnly, Object, Sds};
use super::{AddError, DIGITS_BYTES, FastServer, bytes_of, numbers, prefetch, refused, repeated};

/// Keys that are prefetched together: enough to hide the time of memory, and few enough for the first-level cache.
const BATCH: usize = 32;

impl FastServer {
    pub(super) fn add_to_dict(
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
                prefetch(entry_key(*entry).cast_const().cast::<u8>().wrapping_sub(1));
            }
        }
        let mut clock = None;
        for at in 0..batch.len() {
            let (Some(prepared), Some(record)) = (batch.get(at), records.get(at)) else { break };
            let (key, value) = (prepared.key, prepared.value);
            scratch.made_at = value.addr();
            if !own.added(into, key, value) {
                common.free(batch.get(at..).unwrap_or_default());
                return Err(repeated(record));
            }
            if matches!(only, DictsOnly::Valkey8(_)) {
                // The server has copied it.
                common.free_sds(key);
            }
            if let Some(expires_ms) = record.expires_ms {
                own.expire(common, into, bytes_of(&record.key, &mut digits), expires_ms);
            }
            if let Some(usage) = record.usage {
                own.use_as(value, usage, *clock.get_or_insert_with(|| own.now()));
            }
        }
        Ok(())
    }
}

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

impl Common {
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

impl Dicts {
    fn hash_of(&self, key: &[u8]) -> u64 {
        // SAFETY: The bytes are there and are only read.
        unsafe { (self.hash)(key.as_ptr().cast(), key.len()) }
    }

    /// False if the key exists. The server takes the value if not, and the key unless it copies keys.
    fn added(&self, into: Database, key: Sds, value: Object) -> bool {
        // SAFETY: An existing database, a string and an object of our own.
        unsafe { (self.add)(into, key, value) != 0 }
    }

    fn expire(&self, common: &Common, database: Database, key: &[u8], at_ms: u64) {
        let name = common.name(key);
        let at_ms = c_longlong::try_from(at_ms).unwrap_or(c_longlong::MAX);
        // SAFETY: No client, as in the server's loader; an existing database with that key.
        unsafe { (self.set_expiry)(ptr::null_mut(), database, name, at_ms) };
        common.release(name);
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
}
