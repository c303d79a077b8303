//! Entries of a `dict`, which hang on its buckets in chains.

use super::symbols::{Object, Sds};
use super::{read, write};

/// The first entry of a bucket, or null. Its low bits say what an entry is like.
pub(super) fn head(bucket: *const u8) -> *const u8 {
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

pub(super) fn entry_key(entry: *const u8) -> Sds {
    if is_embedding(entry) {
        // SAFETY: An entry of a table that embeds its key: a byte is there, and as many bytes behind it is the key.
        let before: u8 = unsafe { of_entry(entry, 0, EMBEDDED_KEY_AT) };
        let first = entry.map_addr(|address| address & !ENTRY_KIND);
        return first.wrapping_add(EMBEDDED_KEY_AT + 1 + usize::from(before)).cast_mut().cast();
    }
    // SAFETY: An entry of a table, which begins with the address of its key.
    unsafe { read(entry, 0) }
}

pub(super) fn entry_value(entry: *const u8) -> Object {
    // SAFETY: An entry of a table of keys: the address of its value is there.
    unsafe { of_entry(entry, ENTRY_VALUE_AT, 0) }
}

pub(super) fn entry_next(entry: *const u8) -> *const u8 {
    // SAFETY: An entry of a table: behind its value is the address of the next, or null.
    unsafe { of_entry(entry, ENTRY_NEXT_AT, EMBEDDING_NEXT_AT) }
}

pub(super) fn set_entry_next(entry: *const u8, next: *const u8) {
    let offset = if is_embedding(entry) { EMBEDDING_NEXT_AT } else { ENTRY_NEXT_AT };
    // SAFETY: As in `entry_next`; this is a fork child.
    unsafe { write(entry.map_addr(|address| address & !ENTRY_KIND), offset, next) };
}

/// `dictEntry`: key, value, next.
pub(super) const ENTRY_VALUE_AT: usize = 8;
const ENTRY_NEXT_AT: usize = 16;

/// `dictEntryEmbedded` of Valkey 8.0: value, next, the size of the key's head, and the key. Addresses of such entries
/// have a bit.
const EMBEDDING_NEXT_AT: usize = 8;
const EMBEDDED_KEY_AT: usize = 16;
const ENTRY_KIND: usize = 7;
const ENTRY_EMBEDS: usize = 4;
