//! Calls of single functions of the server with known arguments, for a child that tries whether they are what their
//! names say. What a call returns is shown as plain values, which `crate::fast::shapes` compares.
//!
//! A function of another shape may do anything here: the child crashes, or returns something else.

use std::ptr;

use remora_redis::rdb::{Collection, Usage, Value};

use super::walk::{BUCKET_BYTES, bucket_of, candidates, encoding, kind, sds_bytes, text_of};
use super::{FastServer, HASH_SHIFT, Object, Own, SavedType, head};
use crate::ffi::context::Context;

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
