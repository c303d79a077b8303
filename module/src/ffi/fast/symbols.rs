//! The server's own functions that are no part of its module API, looked up by name in the running program.
//!
//! Servers are linked so that modules can bind to every function (`-rdynamic`). Of one that is not, a layout says where
//! they are. What a function takes is not published: so these are looked up only where a layout says of which family
//! the build is (`crate::fast::layout`), and a child calls each of them first (`trial`).

use std::collections::BTreeMap;
use std::ffi::{c_char, c_int, c_longlong, c_uint, c_ulong, c_void};
use std::ptr::{self, NonNull};

use libloading::os::unix::Library;

use super::super::Context;
use crate::fast::layout::Family;
use crate::ffi::entry::guard;

/// Where the program has its functions.
pub(crate) enum Functions {
    /// It shows them.
    Shown,
    /// At these addresses, all of them in the program's code, and the state among its variables.
    At(BTreeMap<String, usize>),
}

/// `sds`: the first byte of a string whose length stands before it.
pub(super) type Sds = *mut c_char;
/// `robj`: a key's value.
pub(super) type Object = *mut c_void;
/// `redisDb` or `serverDb`.
pub(super) type Database = *mut c_void;

macro_rules! symbols {
    ($(#[$doc:meta])* $name:ident { $($field:ident = $symbol:literal: $type:ty,)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy)]
        pub(super) struct $name {
            $(pub(super) $field: $type,)*
        }

        impl $name {
            #[cfg(test)]
            pub(super) const NAMES: &[&str] = &[$($symbol),*];

            /// # Errors
            /// The name of the first function that this program does not show.
            ///
            /// # Safety
            /// In this program the function of each name, if there is one, has the signature that is written here.
            unsafe fn look_up(program: &Functions) -> Result<$name, &'static str> {
                Ok($name {
                    $(
                        // SAFETY: `$type` is the type of a pointer to the function of this name, by the caller.
                        $field: unsafe { find::<$type>(program, $symbol) }.ok_or($symbol)?,
                    )*
                })
            }
        }
    };
}

symbols! {
    /// What both families have, with the same signatures.
    Common {
        new_sds = "sdsnewlen": unsafe extern "C" fn(*const c_void, usize) -> Sds,
        free_sds = "sdsfree": unsafe extern "C" fn(Sds),
        new_string = "createStringObject": unsafe extern "C" fn(*const c_char, usize) -> Object,
        new_raw_string = "createRawStringObject": unsafe extern "C" fn(*const c_char, usize) -> Object,
        new_number = "createStringObjectFromLongLongForValue": unsafe extern "C" fn(c_longlong) -> Object,
        release = "decrRefCount": unsafe extern "C" fn(Object),
    }
}

symbols! {
    /// Servers whose tables are `dict`s: Redis, and Valkey 8.0.
    Dicts {
        hash = "dictGenHashFunction": unsafe extern "C" fn(*const c_void, usize) -> u64,
        set_usage = "objectSetLRUOrLFU": unsafe extern "C" fn(Object, c_longlong, c_longlong, c_longlong, c_int) -> c_int,
        clock = "LRU_CLOCK": unsafe extern "C" fn() -> c_uint,
        idle = "estimateObjectIdleTime": unsafe extern "C" fn(Object) -> u64,
        frequency = "LFUDecrAndReturn": unsafe extern "C" fn(Object) -> c_ulong,
        load = "rdbLoadObject": unsafe extern "C" fn(c_int, *mut Rio, Sds, c_int, *mut c_int) -> Object,
        save_type = "rdbSaveObjectType": unsafe extern "C" fn(*mut Rio, Object) -> c_int,
        save = "rdbSaveObject": unsafe extern "C" fn(*mut Rio, Object, Object, c_int) -> isize,
    }
}

symbols! {
    /// What those have whose entries name a key and its value.
    Entries {
        add = "dbAddRDBLoad": unsafe extern "C" fn(Database, Sds, Object) -> c_int,
        set_expiry = "setExpire": unsafe extern "C" fn(*mut c_void, Database, Object, c_longlong),
        find = "dictFind": unsafe extern "C" fn(*mut c_void, *const c_void) -> *mut c_void,
    }
}

symbols! {
    /// What Redis 7 has.
    Redis7Only {
        encode = "tryObjectEncoding": unsafe extern "C" fn(Object) -> Object,
    }
}

symbols! {
    /// What servers have that keep their `dict`s in stores.
    StoresOnly {
        encode = "tryObjectEncodingEx": unsafe extern "C" fn(Object, c_int) -> Object,
    }
}

symbols! {
    /// What Redis 8.2 has, whose values have their keys and expiries inside.
    Redis82Only {
        encode = "tryObjectEncodingEx": unsafe extern "C" fn(Object, c_int) -> Object,
        add = "dbAddRDBLoad": unsafe extern "C" fn(Database, Sds, *mut Object, c_longlong) -> Object,
        set_expiry = "setExpire": unsafe extern "C" fn(*mut c_void, Database, Object, c_longlong) -> Object,
        key = "kvobjGetKey": unsafe extern "C" fn(Object) -> Sds,
        expiry = "kvobjGetExpire": unsafe extern "C" fn(Object) -> c_longlong,
    }
}

/// How servers with `dict`s differ.
#[derive(Clone, Copy)]
pub(super) enum DictsOnly {
    /// A database has its `dict`s itself.
    Redis7(Entries, Redis7Only),
    /// A database has stores of `dict`s.
    Redis8(Entries, StoresOnly),
    /// Likewise, and a value has its key inside.
    Redis82(Redis82Only),
    /// A database has stores of `dict`s, and an entry has its key inside.
    Valkey8(Entries, StoresOnly),
}

symbols! {
    /// Valkey from 8.1 on: what its versions have in common.
    Valkey {
        encode = "tryObjectEncodingEx": unsafe extern "C" fn(Object, c_int) -> Object,
        hash = "hashtableGenHashFunction": unsafe extern "C" fn(*const c_char, usize) -> u64,
        table = "kvstoreGetHashtable": unsafe extern "C" fn(*mut c_void, c_int) -> *mut c_void,
        set_sds = "sdscpylen": unsafe extern "C" fn(Sds, *const c_char, usize) -> Sds,
        retain = "incrRefCount": unsafe extern "C" fn(Object),
        add = "dbAddRDBLoad": unsafe extern "C" fn(Database, Sds, *mut Object) -> c_int,
        set_expiry = "setExpire": unsafe extern "C" fn(*mut c_void, Database, Object, c_longlong) -> Object,
        key = "objectGetKey": unsafe extern "C" fn(Object) -> Sds,
        expiry = "objectGetExpire": unsafe extern "C" fn(Object) -> c_longlong,
    }
}

symbols! {
    /// What Valkey 8.1 has as Redis 7 does.
    Valkey8Only {
        set_usage = "objectSetLRUOrLFU": unsafe extern "C" fn(Object, c_longlong, c_longlong, c_longlong, c_int) -> c_int,
        clock = "LRU_CLOCK": unsafe extern "C" fn() -> c_uint,
        idle = "estimateObjectIdleTime": unsafe extern "C" fn(Object) -> u64,
        frequency = "LFUDecrAndReturn": unsafe extern "C" fn(Object) -> c_ulong,
        load = "rdbLoadObject": unsafe extern "C" fn(c_int, *mut Rio, Sds, c_int, *mut c_int) -> Object,
        save_type = "rdbSaveObjectType": unsafe extern "C" fn(*mut Rio, Object) -> c_int,
        save = "rdbSaveObject": unsafe extern "C" fn(*mut Rio, Object, Object, c_int) -> isize,
    }
}

symbols! {
    /// What Valkey 9 has.
    Valkey9Only {
        set_usage = "objectSetLRUOrLFU": unsafe extern "C" fn(Object, c_longlong, c_longlong) -> c_int,
        value = "objectGetVal": unsafe extern "C" fn(Object) -> Sds,
        idle = "objectGetLRUIdleSecs": unsafe extern "C" fn(Object) -> u32,
        frequency = "objectGetLFUFrequency": unsafe extern "C" fn(Object) -> u8,
        load = "rdbLoadObject": unsafe extern "C" fn(c_int, *mut Rio, Sds, c_int, *mut c_int, c_int, c_longlong) -> Object,
        saved_type = "rdbGetObjectType": unsafe extern "C" fn(Object, c_int) -> c_int,
        save = "rdbSaveObject": unsafe extern "C" fn(*mut Rio, Object, Object, c_int, u8) -> isize,
    }
}

/// The functions that differ between the versions of Valkey.
#[derive(Clone, Copy)]
pub(super) enum ValkeyOnly {
    Eight(Valkey8Only),
    Nine(Valkey9Only),
}

/// The functions of one family.
#[derive(Clone, Copy)]
pub(super) enum Own {
    Dicts(Dicts, DictsOnly),
    Valkey(Valkey, ValkeyOnly),
}

/// All of them, and the server's state.
#[derive(Clone, Copy)]
pub(super) struct Symbols {
    pub(super) common: Common,
    pub(super) own: Own,
    /// `server`: the state of the server.
    pub(super) state: NonNull<u8>,
}

impl Symbols {
    /// # Errors
    /// The name of the first one that is missing.
    ///
    /// # Safety
    /// The running program is a build of that family whose functions have the signatures written here.
    pub(super) unsafe fn look_up(
        _context: &Context<'_>,
        family: Family,
        program: &Functions,
    ) -> Result<Symbols, &'static str> {
        // SAFETY: Guaranteed by the caller.
        let common = unsafe { Common::look_up(program) }?;
        let own = match family {
            Family::Redis7 => {
                // SAFETY: Guaranteed by the caller.
                let entries = unsafe { Entries::look_up(program) }?;
                // SAFETY: Guaranteed by the caller.
                let only = DictsOnly::Redis7(entries, unsafe { Redis7Only::look_up(program) }?);
                // SAFETY: Guaranteed by the caller.
                Own::Dicts(unsafe { Dicts::look_up(program) }?, only)
            }
            Family::Redis8 | Family::Valkey80 => {
                // SAFETY: Guaranteed by the caller.
                let entries = unsafe { Entries::look_up(program) }?;
                // SAFETY: Guaranteed by the caller.
                let stores = unsafe { StoresOnly::look_up(program) }?;
                let is_redis = family == Family::Redis8;
                let only = if is_redis { DictsOnly::Redis8 } else { DictsOnly::Valkey8 };
                // SAFETY: Guaranteed by the caller.
                Own::Dicts(unsafe { Dicts::look_up(program) }?, only(entries, stores))
            }
            Family::Redis82 => {
                // SAFETY: Guaranteed by the caller.
                let only = DictsOnly::Redis82(unsafe { Redis82Only::look_up(program) }?);
                // SAFETY: Guaranteed by the caller.
                Own::Dicts(unsafe { Dicts::look_up(program) }?, only)
            }
            Family::Valkey8 => {
                // SAFETY: Guaranteed by the caller.
                let only = ValkeyOnly::Eight(unsafe { Valkey8Only::look_up(program) }?);
                // SAFETY: Guaranteed by the caller.
                Own::Valkey(unsafe { Valkey::look_up(program) }?, only)
            }
            Family::Valkey9 => {
                // SAFETY: Guaranteed by the caller.
                let only = ValkeyOnly::Nine(unsafe { Valkey9Only::look_up(program) }?);
                // SAFETY: Guaranteed by the caller.
                Own::Valkey(unsafe { Valkey::look_up(program) }?, only)
            }
        };
        // SAFETY: The address of a variable; a pointer has the size of a pointer.
        let state = unsafe { find::<NonNull<u8>>(program, "server") }.ok_or("server")?;
        Ok(Symbols { common, own, state })
    }
}

/// The address of that name, as a pointer type.
///
/// # Safety
/// `F` is the type of a pointer to what has that name in this program.
unsafe fn find<F: Copy>(program: &Functions, name: &str) -> Option<F> {
    const { assert!(size_of::<F>() == size_of::<*mut c_void>(), "a pointer") };
    let address = match program {
        // SAFETY: The symbol is only taken as an address; nothing is called or read here.
        Functions::Shown => unsafe { Library::this().get::<*mut c_void>(name.as_bytes()) }.ok()?.as_raw_ptr(),
        Functions::At(addresses) => std::ptr::with_exposed_provenance_mut(*addresses.get(name)?),
    };
    if address.is_null() {
        return None;
    }
    // SAFETY: The same size (asserted above), not null, and of this type as guaranteed by the caller.
    Some(unsafe { std::mem::transmute_copy::<*mut c_void, F>(&address) })
}

// The servers' abstraction of a stream (`rio`): a head with four functions, behind which each kind of stream keeps
// what it needs. Two kinds of our own: a [`Source`] is read from bytes, a [`Sink`] passes on what is written.

/// `rio`: what both families have, at the same places.
#[repr(C)]
pub(super) struct Rio {
    read: unsafe extern "C" fn(*mut Rio, *mut c_void, usize) -> usize,
    write: unsafe extern "C" fn(*mut Rio, *const c_void, usize) -> usize,
    tell: unsafe extern "C" fn(*mut Rio) -> i64,
    flush: unsafe extern "C" fn(*mut Rio) -> c_int,
    /// No function: no checksum is computed.
    update_checksum: *const c_void,
    checksum: u64,
    flags: u64,
    processed_bytes: usize,
    /// 0: each call reads or writes all at once.
    chunk_bytes_max: usize,
    /// Where the servers' own kinds of streams keep their state, of at most 40 bytes. Only the functions above use it.
    state: [u64; 8],
}

impl Rio {
    fn new(
        read: unsafe extern "C" fn(*mut Rio, *mut c_void, usize) -> usize,
        write: unsafe extern "C" fn(*mut Rio, *const c_void, usize) -> usize,
    ) -> Rio {
        Rio {
            read,
            write,
            tell,
            flush,
            update_checksum: ptr::null(),
            checksum: 0,
            flags: 0,
            processed_bytes: 0,
            chunk_bytes_max: 0,
            state: [0; 8],
        }
    }
}

unsafe extern "C" fn tell(_rio: *mut Rio) -> i64 {
    0
}

unsafe extern "C" fn flush(_rio: *mut Rio) -> c_int {
    1
}

unsafe extern "C" fn reads_nothing(_rio: *mut Rio, _into: *mut c_void, _bytes: usize) -> usize {
    0
}

unsafe extern "C" fn writes_nothing(_rio: *mut Rio, _from: *const c_void, _bytes: usize) -> usize {
    0
}

/// A stream that is read from bytes.
#[repr(C)]
pub(super) struct Source<'a> {
    rio: Rio,
    rest: &'a [u8],
}

impl<'a> Source<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Source<'a> {
        Source { rio: Rio::new(read_source, writes_nothing), rest: bytes }
    }
}

/// # Safety
/// Called by the server for the head of a [`Source`], with room for that many bytes.
unsafe extern "C" fn read_source(rio: *mut Rio, into: *mut c_void, bytes: usize) -> usize {
    // SAFETY: The head is the first field of a `Source`, whose layout is C's, and the pointer was made of the whole of
    // it. Nothing else uses it during the call.
    let source = unsafe { &mut *rio.cast::<Source<'_>>() };
    let Some((taken, rest)) = source.rest.split_at_checked(bytes) else { return 0 };
    // SAFETY: The server has room for that many bytes, which are not ours.
    unsafe { ptr::copy_nonoverlapping(taken.as_ptr(), into.cast(), bytes) };
    source.rest = rest;
    1
}

/// A stream that passes on what is written, until `put` returns false.
#[repr(C)]
pub(super) struct Sink<'a> {
    rio: Rio,
    put: &'a mut dyn FnMut(&[u8]) -> bool,
}

impl<'a> Sink<'a> {
    pub(super) fn new(put: &'a mut dyn FnMut(&[u8]) -> bool) -> Sink<'a> {
        Sink { rio: Rio::new(reads_nothing, write_sink), put }
    }
}

/// # Safety
/// Called by the server for the head of a [`Sink`], with that many bytes.
unsafe extern "C" fn write_sink(rio: *mut Rio, from: *const c_void, bytes: usize) -> usize {
    // SAFETY: As in `read_source`.
    let sink = unsafe { &mut *rio.cast::<Sink<'_>>() };
    // SAFETY: The server's bytes, which stay during the call.
    let written = unsafe { std::slice::from_raw_parts(from.cast::<u8>(), bytes) };
    usize::from(guard(false, || (sink.put)(written)))
}

const _: () = assert!(size_of::<Rio>() == 17 * 8, "nine fields of the head, and eight numbers");

#[cfg(test)]
mod tests {
    use super::*;

    /// The finder writes down where all of these are.
    #[test]
    fn the_names_of_each_family_are_those_that_a_layout_has() {
        for family in Family::ALL {
            let own: &[&[&str]] = match family {
                Family::Redis7 => &[Dicts::NAMES, Entries::NAMES, Redis7Only::NAMES],
                Family::Redis8 | Family::Valkey80 => &[Dicts::NAMES, Entries::NAMES, StoresOnly::NAMES],
                Family::Redis82 => &[Dicts::NAMES, Redis82Only::NAMES],
                Family::Valkey8 => &[Valkey::NAMES, Valkey8Only::NAMES],
                Family::Valkey9 => &[Valkey::NAMES, Valkey9Only::NAMES],
            };
            let mut used = [&["server"], Common::NAMES, &own.concat()].concat();
            let mut listed = family.functions();
            used.sort_unstable();
            listed.sort_unstable();
            assert_eq!(used, listed, "{family:?}");
        }
    }
}
