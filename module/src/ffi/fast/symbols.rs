//! The server's own functions that are no part of its module API, looked up by name in the running program.
//!
//! Servers are linked so that modules can bind to every function (`-rdynamic`). Of one that is not, a layout says where
//! they are. What a function takes is not published: so these are looked up only where a layout says of which family
//! the build is (`crate::fast::layout`), and a child calls each of them first (`shapes`).

use std::collections::BTreeMap;
use std::ffi::{c_char, c_int, c_longlong, c_uint, c_ulong, c_void};
use std::ptr::NonNull;

use libloading::os::unix::Library;

use super::super::context::Context;
use super::rio::Rio;
use crate::fast::layout::Family;

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
