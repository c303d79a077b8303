//! The server's objects as safe handles: an open key, a string, the reply to a command, and its heap.
//!
//! And the servers' module API with its own names: opaque types, numbers, and the functions that are looked up by name
//! at loading.
//!
//! Written by hand from the API's published reference; no header is compiled in. A function that some supported server
//! lacks is an `Option`, and its caller documents what happens without it. Not here: anything that makes the functions
//! safe to call.

use std::ffi::{c_char, c_int, c_long, c_longlong, c_uint, c_ulonglong, c_void};
use std::marker::PhantomData;
use std::ops::Range;
use std::ptr::{self, NonNull};
use std::sync::OnceLock;

use remora_fabric::View;
use rustix::mm::Advice;
use rustix::param::page_size;

use super::Context;

// An open key: its value, its expiry and its age.

/// The kind of a key's value, as far as this module distinguishes kinds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum KeyKind {
    /// The key does not exist.
    Empty,
    /// A plain string.
    String,
    /// A list.
    List,
    /// A hash.
    Hash,
    /// A set.
    Set,
    /// A sorted set.
    SortedSet,
    /// Any other kind.
    Other,
}

/// An open key. A key that we opened is closed when dropped.
pub(crate) struct Key<'c> {
    raw: NonNull<RawKey>,
    ours: bool,
    context: PhantomData<&'c RawContext>,
}

impl<'c> Key<'c> {
    /// # Safety
    /// `raw` is an open key that lives for `'c`; with `ours`, nothing else closes it.
    pub(super) unsafe fn new(raw: NonNull<RawKey>, ours: bool) -> Key<'c> {
        Key { raw, ours, context: PhantomData }
    }

    pub(super) fn raw(&self) -> *mut RawKey {
        self.raw.as_ptr()
    }

    /// The kind of its value.
    pub(crate) fn kind(&self) -> KeyKind {
        // SAFETY: An open key (handle rule).
        match unsafe { (server().key_type)(self.raw.as_ptr()) } {
            KEY_EMPTY => KeyKind::Empty,
            KEY_STRING => KeyKind::String,
            KEY_LIST => KeyKind::List,
            KEY_HASH => KeyKind::Hash,
            KEY_SET => KeyKind::Set,
            KEY_SORTED_SET => KeyKind::SortedSet,
            _ => KeyKind::Other,
        }
    }

    /// The length of its value: the bytes of a string, the elements of anything else.
    pub(crate) fn length(&self) -> usize {
        // SAFETY: An open key.
        unsafe { (server().value_length)(self.raw.as_ptr()) }
    }

    /// The bytes of a string value, in place. An encoded value (an integer, an embedded string) is converted to a plain
    /// one first, which changes this process's memory: do it in a fork child.
    pub(crate) fn string(&mut self) -> Option<&[u8]> {
        let mut length = 0;
        // SAFETY: An open key, and room for a length.
        let start = unsafe { (server().string_dma)(self.raw.as_ptr(), &mut length, READ) };
        if start.is_null() {
            return None;
        }
        // SAFETY: The server guarantees that `length` bytes are there; they stay until the key is changed or closed,
        // for which `self` would have to be borrowed again.
        Some(unsafe { std::slice::from_raw_parts(start.cast(), length) })
    }

    /// Makes the value a string of this length and returns its bytes to be filled. `None` if the key is not open for
    /// writing, has another type, or the length exceeds the server's limit (512 MiB).
    pub(crate) fn string_to_fill(&mut self, length: usize) -> Option<&mut [u8]> {
        // SAFETY: An open key.
        if unsafe { (server().string_truncate)(self.raw.as_ptr(), length) } != OK {
            return None;
        }
        let mut has = 0;
        // SAFETY: An open key, and room for a length.
        let start = unsafe { (server().string_dma)(self.raw.as_ptr(), &mut has, WRITE) };
        if start.is_null() || has != length || length == 0 {
            return None;
        }
        // SAFETY: As for `string`; the value belongs to this key only (the server unshares it for writing), so nothing
        // else refers to it.
        Some(unsafe { std::slice::from_raw_parts_mut(start.cast(), has) })
    }

    /// Sets the value to that string; the server keeps a reference to it. False if the key is not open for writing.
    pub(crate) fn set_string(&mut self, value: StrRef<'_>) -> bool {
        // SAFETY: An open key and a living string; the server takes a reference of its own to the string.
        unsafe { (server().string_set)(self.raw.as_ptr(), value.raw()) == OK }
    }

    /// The time of its expiry: milliseconds since 1970.
    pub(crate) fn expires_at(&self) -> Option<u64> {
        // SAFETY: An open key.
        u64::try_from(unsafe { (server().get_expire)(self.raw.as_ptr()) }).ok()
    }

    /// Sets the time of its expiry: milliseconds since 1970. False if the key is empty or not open for writing.
    pub(crate) fn expire_at(&mut self, milliseconds: u64) -> bool {
        let milliseconds = c_longlong::try_from(milliseconds).unwrap_or(c_longlong::MAX);
        // SAFETY: An open key.
        unsafe { (server().set_expire)(self.raw.as_ptr(), milliseconds) == OK }
    }

    /// Milliseconds since its last use, if the server keeps that.
    pub(crate) fn idle_time(&self) -> Option<u64> {
        let mut idle = -1;
        // SAFETY: An open key, and room for a number.
        let known = unsafe { (server().get_lru)(self.raw.as_ptr(), &mut idle) } == OK;
        u64::try_from(idle).ok().filter(|_| known)
    }

    /// Its frequency of use on the server's logarithmic scale, if the server keeps that.
    pub(crate) fn frequency(&self) -> Option<u8> {
        let mut frequency = -1;
        // SAFETY: An open key, and room for a number.
        let known = unsafe { (server().get_lfu)(self.raw.as_ptr(), &mut frequency) } == OK;
        u8::try_from(frequency).ok().filter(|_| known)
    }

    /// Sets the milliseconds since its last use; a server that keeps frequencies ignores it.
    ///
    /// Valkey 9.1's function multiplies the number by 1000 and sets that many *seconds*, where it should divide. There
    /// the time is set as near as that allows: to 1000 seconds.
    pub(crate) fn set_idle_time(&mut self, milliseconds: u64) {
        const MULTIPLIED_BY: u64 = 1_000_000;
        let set = |milliseconds: u64| {
            let milliseconds = c_longlong::try_from(milliseconds).unwrap_or(c_longlong::MAX);
            // SAFETY: An open key. A refusal means that the server doesn't keep it.
            let _ = unsafe { (server().set_lru)(self.raw.as_ptr(), milliseconds) };
        };
        let is_near = |within: u64| self.idle_time().is_none_or(|idle| idle.abs_diff(milliseconds) <= within);
        set(milliseconds);
        if is_near(IDLE_SLACK_MILLIS) {
            return;
        }
        set((milliseconds + MULTIPLIED_BY / 2) / MULTIPLIED_BY);
        if !is_near(MULTIPLIED_BY / 2 + IDLE_SLACK_MILLIS) {
            // Longer than the server's clock for ages goes.
            set(milliseconds);
        }
    }

    /// Sets its frequency; a server that keeps idle times ignores it.
    pub(crate) fn set_frequency(&mut self, frequency: u8) {
        // SAFETY: An open key. A refusal means that the server doesn't keep it.
        let _ = unsafe { (server().set_lfu)(self.raw.as_ptr(), c_longlong::from(frequency)) };
    }

    /// Deletes it. False if it is not open for writing.
    pub(crate) fn delete(&mut self) -> bool {
        // SAFETY: An open key.
        unsafe { (server().delete_key)(self.raw.as_ptr()) == OK }
    }
}

impl Drop for Key<'_> {
    fn drop(&mut self) {
        if self.ours {
            // SAFETY: Opened by us, closed once.
            unsafe { (server().close_key)(self.raw.as_ptr()) };
        }
    }
}

/// Servers keep ages in seconds, and a second may begin meanwhile.
const IDLE_SLACK_MILLIS: u64 = 2000;

/// `REDISMODULE_READ`.
pub(super) const READ: c_int = 1;

/// `REDISMODULE_WRITE`.
pub(super) const WRITE: c_int = 2;

/// `REDISMODULE_OPEN_KEY_NOTOUCH`.
pub(super) const UNTOUCHED: c_int = 1 << 16;

/// `REDISMODULE_KEYTYPE_EMPTY`.
const KEY_EMPTY: c_int = 0;

/// `REDISMODULE_KEYTYPE_STRING`.
const KEY_STRING: c_int = 1;

/// `REDISMODULE_KEYTYPE_LIST`.
const KEY_LIST: c_int = 2;

/// `REDISMODULE_KEYTYPE_HASH`.
const KEY_HASH: c_int = 3;

/// `REDISMODULE_KEYTYPE_SET`.
const KEY_SET: c_int = 4;

/// `REDISMODULE_KEYTYPE_ZSET`.
const KEY_SORTED_SET: c_int = 5;

// The server's strings: bytes with a length, owned by the server or by us.

/// A string of the server that something else keeps alive for `'s`. It has the representation of the server's pointer,
/// so a list of arguments can be borrowed as it is.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub(crate) struct StrRef<'s> {
    raw: NonNull<RawString>,
    lender: PhantomData<&'s RawString>,
}

impl<'s> StrRef<'s> {
    /// # Safety
    /// `raw` is a string of the server that lives and is not changed for `'s`.
    pub(super) unsafe fn new(raw: NonNull<RawString>) -> StrRef<'s> {
        StrRef { raw, lender: PhantomData }
    }

    /// The bytes.
    pub(crate) fn as_bytes(&self) -> &'s [u8] {
        let mut length = 0;
        // SAFETY: A living string (handle rule), and room for its length.
        let start = unsafe { (server().string_bytes)(self.raw.as_ptr(), &mut length) };
        if start.is_null() || length == 0 {
            return &[];
        }
        // SAFETY: The server guarantees that `length` bytes are there, and they stay as long as the string does, which
        // is `'s`.
        unsafe { std::slice::from_raw_parts(start.cast(), length) }
    }

    /// The text, if the bytes are UTF-8.
    pub(crate) fn as_str(&self) -> Option<&'s str> {
        std::str::from_utf8(self.as_bytes()).ok()
    }

    pub(super) fn raw(&self) -> *mut RawString {
        self.raw.as_ptr()
    }
}

/// A string owned by this module.
pub(crate) struct OwnedStr {
    raw: NonNull<RawString>,
}

impl OwnedStr {
    /// A copy of `bytes`. The context proves that this is the server's thread.
    pub(crate) fn new(_context: &Context<'_>, bytes: &[u8]) -> OwnedStr {
        // SAFETY: A null context is allowed and means that only we free the string; the bytes are copied.
        let raw = unsafe { (server().create_string)(ptr::null_mut(), bytes.as_ptr().cast(), bytes.len()) };
        OwnedStr { raw: NonNull::new(raw).expect("the server ends itself rather than return no string") }
    }

    /// A copy of bytes in shared memory, made by the server itself.
    pub(crate) fn of_memory(
        _context: &Context<'_>,
        memory: &View,
        range: &Range<u64>,
    ) -> Result<OwnedStr, remora_fabric::memory::Error> {
        let (start, length) = (memory.address(range)?, (range.end - range.start) as usize);
        // SAFETY: A null context as for `new`. The bytes stay mapped for as long as `memory` is borrowed, and the
        // server only copies them. Another process may change them meanwhile: the copy is valid only if the agent finds
        // later that this did not happen.
        let raw = unsafe { (server().create_string)(ptr::null_mut(), start.cast(), length) };
        Ok(OwnedStr { raw: NonNull::new(raw).expect("the server ends itself rather than return no string") })
    }

    /// Borrows the string.
    pub(crate) fn borrow(&self) -> StrRef<'_> {
        // SAFETY: Owned by us, and alive as long as `self` is borrowed.
        unsafe { StrRef::new(self.raw) }
    }
}

impl Drop for OwnedStr {
    fn drop(&mut self) {
        // SAFETY: Created without a context, hence freed without; owned by us, and not used again.
        unsafe { (server().free_string)(ptr::null_mut(), self.raw.as_ptr()) };
    }
}

// The reply to a command that this module called.

/// The kind of a [`Reply`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReplyKind {
    /// Bytes.
    String,
    /// An error's text.
    Error,
    /// A number.
    Integer,
    /// A list.
    Array,
    /// Nothing.
    Null,
    /// Kinds that only RESP3 has; this module does not request RESP3.
    Other,
}

/// A reply, freed when dropped; an element of a list is part of its list.
pub(crate) struct Reply<'c> {
    raw: NonNull<RawReply>,
    ours: bool,
    context: PhantomData<&'c RawContext>,
}

impl<'c> Reply<'c> {
    /// # Safety
    /// `raw` is a reply that lives for `'c`; with `ours`, nothing else frees it.
    pub(super) unsafe fn new(raw: NonNull<RawReply>, ours: bool) -> Reply<'c> {
        Reply { raw, ours, context: PhantomData }
    }

    /// Its kind.
    pub(crate) fn kind(&self) -> ReplyKind {
        // SAFETY: A living reply (handle rule).
        match unsafe { (server().reply_type)(self.raw.as_ptr()) } {
            0 => ReplyKind::String,
            1 => ReplyKind::Error,
            2 => ReplyKind::Integer,
            3 => ReplyKind::Array,
            4 => ReplyKind::Null,
            _ => ReplyKind::Other,
        }
    }

    /// The bytes of a string or of an error's text.
    pub(crate) fn as_bytes(&self) -> Option<&[u8]> {
        if !matches!(self.kind(), ReplyKind::String | ReplyKind::Error) {
            return None;
        }
        let mut length = 0;
        // SAFETY: A living reply, and room for a length.
        let start = unsafe { (server().reply_string)(self.raw.as_ptr(), &mut length) };
        if start.is_null() {
            return None;
        }
        // SAFETY: The server guarantees that `length` bytes are there; they live as long as the reply.
        Some(unsafe { std::slice::from_raw_parts(start.cast(), length) })
    }

    /// The number, if the reply is one.
    pub(crate) fn integer(&self) -> Option<i64> {
        // SAFETY: A living reply of the right kind.
        (self.kind() == ReplyKind::Integer).then(|| unsafe { (server().reply_number)(self.raw.as_ptr()) })
    }

    /// Number of elements; 0 if the reply is not an array.
    pub(crate) fn len(&self) -> usize {
        // SAFETY: A living reply of the right kind.
        if self.kind() == ReplyKind::Array { unsafe { (server().reply_length)(self.raw.as_ptr()) } } else { 0 }
    }

    /// An element of a list.
    pub(crate) fn element(&self, index: usize) -> Option<Reply<'_>> {
        if index >= self.len() {
            return None;
        }
        // SAFETY: A living list and an index in it.
        let raw = unsafe { (server().reply_element)(self.raw.as_ptr(), index) };
        // SAFETY: It lives as long as its list, which is borrowed, and is freed with it.
        NonNull::new(raw).map(|raw| unsafe { Reply::new(raw, false) })
    }

    /// The text of an error; `None` if the reply is not an error.
    pub(crate) fn error(&self) -> Option<String> {
        let text = self.as_bytes().filter(|_| self.kind() == ReplyKind::Error)?;
        Some(String::from_utf8_lossy(text).into_owned())
    }
}

impl Drop for Reply<'_> {
    fn drop(&mut self) {
        if self.ours {
            // SAFETY: Owned by us, freed once.
            unsafe { (server().free_reply)(self.raw.as_ptr()) };
        }
    }
}

/// The size of the API's numbers, so that a change there fails here.
const _: () = assert!(size_of::<c_int>() == 4, "the API's numbers have 32 bits");

// The server's heap: populates memory that the server will need soon.

/// Populates the pages of a block of `bytes` bytes with one system call, and returns the block to the server's
/// allocator, which will use it again: a write to a missing page costs a fault, a write to a present one nothing.
/// Returns the range of the pages, or `None` if the system does not support it (before Linux 5.14).
///
/// (Whole pages, since jemalloc places large blocks anywhere inside their first page.)
pub(crate) fn warm(_context: &Context<'_>, bytes: usize) -> Option<Range<usize>> {
    // SAFETY: The only condition is the thread, which the context proves. The server exits instead of returning null.
    let block = unsafe { (server().alloc)(bytes) };
    let page = page_size();
    let pages = block.addr() / page * page..(block.addr() + bytes).next_multiple_of(page);
    let first = block.wrapping_byte_sub(block.addr() - pages.start);
    // SAFETY: Whole pages, each of which contains a byte of a block that is owned by us and mapped for writing. The
    // advice changes no byte: it only populates pages that the next write would populate.
    let done = unsafe { rustix::mm::madvise(first, pages.end - pages.start, Advice::LinuxPopulateWrite) };
    // SAFETY: Allocated above, freed once.
    unsafe { (server().free)(block) };
    done.ok().map(|()| pages)
}

macro_rules! opaque {
    ($($(#[$doc:meta])* $name:ident;)*) => {
        $($(#[$doc])*
        #[repr(C)]
        pub(crate) struct $name {
            _private: [u8; 0],
        })*
    };
}

opaque! {
    /// `RedisModuleCtx`: one call of the server into the module.
    RawContext;
    /// `RedisModuleString`.
    RawString;
    /// `RedisModuleKey`.
    RawKey;
    /// `RedisModuleCallReply`.
    RawReply;
    /// `RedisModuleCommand`.
    RawCommand;
    /// `RedisModuleScanCursor`.
    RawCursor;
    /// `RedisModuleServerInfoData`.
    RawServerInfo;
    /// `RedisModuleInfoCtx`.
    RawInfo;
    /// `RedisModuleType`.
    RawType;
    /// `RedisModuleIO`.
    RawIo;
    /// `RedisModuleCommandFilter`.
    RawFilter;
    /// `RedisModuleCommandFilterCtx`.
    RawFiltered;
}

/// `RedisModuleEvent`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct RawEvent {
    pub(crate) id: u64,
    pub(crate) version: u64,
}

pub(crate) type CommandFn = unsafe extern "C" fn(*mut RawContext, *mut *mut RawString, c_int) -> c_int;

pub(crate) type EventFn = unsafe extern "C" fn(*mut RawContext, RawEvent, u64, *mut c_void);

pub(crate) type ScanFn = unsafe extern "C" fn(*mut RawContext, *mut RawString, *mut RawKey, *mut c_void);

pub(crate) type ElementFn = unsafe extern "C" fn(*mut RawKey, *mut RawString, *mut RawString, *mut c_void);

pub(crate) type InfoFn = unsafe extern "C" fn(*mut RawInfo, c_int);

pub(crate) type TimerFn = unsafe extern "C" fn(*mut RawContext, *mut c_void);

pub(crate) type AuxLoadFn = unsafe extern "C" fn(*mut RawIo, c_int, c_int) -> c_int;

pub(crate) type AuxSaveFn = unsafe extern "C" fn(*mut RawIo, c_int);

pub(crate) type RdbLoadFn = unsafe extern "C" fn(*mut RawIo, c_int) -> *mut c_void;

pub(crate) type RdbSaveFn = unsafe extern "C" fn(*mut RawIo, *mut c_void);

pub(crate) type RewriteFn = unsafe extern "C" fn(*mut RawIo, *mut RawString, *mut c_void);

pub(crate) type FreeFn = unsafe extern "C" fn(*mut c_void);

pub(crate) type GetNumberFn = unsafe extern "C" fn(*const c_char, *mut c_void) -> c_longlong;

pub(crate) type SetNumberFn =
    unsafe extern "C" fn(*const c_char, c_longlong, *mut c_void, *mut *mut RawString) -> c_int;

pub(crate) type GetBoolFn = unsafe extern "C" fn(*const c_char, *mut c_void) -> c_int;

pub(crate) type SetBoolFn = unsafe extern "C" fn(*const c_char, c_int, *mut c_void, *mut *mut RawString) -> c_int;

pub(crate) type ApplyFn = unsafe extern "C" fn(*mut RawContext, *mut c_void, *mut *mut RawString) -> c_int;

pub(crate) type FilterFn = unsafe extern "C" fn(*mut RawFiltered);

pub(crate) type KeyspaceFn = unsafe extern "C" fn(*mut RawContext, c_int, *const c_char, *mut RawString) -> c_int;

/// `RedisModuleTypeMethods`, version 3, which every supported server knows.
#[repr(C)]
pub(crate) struct RawTypeMethods {
    pub(crate) version: u64,
    pub(crate) rdb_load: Option<RdbLoadFn>,
    pub(crate) rdb_save: Option<RdbSaveFn>,
    pub(crate) aof_rewrite: Option<RewriteFn>,
    pub(crate) mem_usage: Option<unsafe extern "C" fn(*const c_void) -> usize>,
    pub(crate) digest: Option<unsafe extern "C" fn(*mut c_void, *mut c_void)>,
    pub(crate) free: Option<FreeFn>,
    pub(crate) aux_load: Option<AuxLoadFn>,
    pub(crate) aux_save: Option<AuxSaveFn>,
    pub(crate) aux_save_triggers: c_int,
    pub(crate) free_effort: Option<unsafe extern "C" fn(*mut RawString, *const c_void) -> usize>,
    pub(crate) unlink: Option<unsafe extern "C" fn(*mut RawString, *const c_void)>,
    pub(crate) copy: Option<unsafe extern "C" fn(*mut RawString, *mut RawString, *const c_void) -> *mut c_void>,
    pub(crate) defrag: Option<unsafe extern "C" fn(*mut c_void, *mut RawString, *mut *mut c_void) -> c_int>,
}

/// Version of [`RawTypeMethods`].
pub(crate) const TYPE_METHODS_VERSION: u64 = 3;

/// `GetApi` itself: a context begins with its address.
pub(crate) type GetApi = unsafe extern "C" fn(*const c_char, *mut *mut c_void) -> c_int;

macro_rules! functions {
    (required { $($name:ident = $symbol:literal: $type:ty,)* } optional { $($maybe:ident = $maybe_symbol:literal: $maybe_type:ty,)* }) => {
        /// All functions of the server that this module calls.
        pub(crate) struct Functions {
            $(pub(crate) $name: $type,)*
            $(pub(crate) $maybe: Option<$maybe_type>,)*
        }

        impl Functions {
            /// Looks up all of them.
            ///
            /// # Errors
            /// The name of the first required one that this server lacks.
            ///
            /// # Safety
            /// `get_api` is the server's `GetApi`.
            pub(crate) unsafe fn look_up(get_api: GetApi) -> Result<Functions, &'static str> {
                Ok(Functions {
                    $(
                        // SAFETY: The server promises that the function of this name has the published signature, which
                        // `$type` is.
                        $name: unsafe { find::<$type>(get_api, concat!($symbol, "\0")) }.ok_or($symbol)?,
                    )*
                    $(
                        // SAFETY: As above.
                        $maybe: unsafe { find::<$maybe_type>(get_api, concat!($maybe_symbol, "\0")) },
                    )*
                })
            }
        }
    };
}

functions! {
    required {
        set_module_attributes = "RedisModule_SetModuleAttribs": unsafe extern "C" fn(*mut RawContext, *const c_char, c_int, c_int),
        is_module_name_busy = "RedisModule_IsModuleNameBusy": unsafe extern "C" fn(*const c_char) -> c_int,
        set_module_options = "RedisModule_SetModuleOptions": unsafe extern "C" fn(*mut RawContext, c_int),
        create_command = "RedisModule_CreateCommand": unsafe extern "C" fn(*mut RawContext, *const c_char, CommandFn, *const c_char, c_int, c_int, c_int) -> c_int,
        get_command = "RedisModule_GetCommand": unsafe extern "C" fn(*mut RawContext, *const c_char) -> *mut RawCommand,
        reply_simple = "RedisModule_ReplyWithSimpleString": unsafe extern "C" fn(*mut RawContext, *const c_char) -> c_int,
        reply_error = "RedisModule_ReplyWithError": unsafe extern "C" fn(*mut RawContext, *const c_char) -> c_int,
        reply_integer = "RedisModule_ReplyWithLongLong": unsafe extern "C" fn(*mut RawContext, c_longlong) -> c_int,
        reply_array = "RedisModule_ReplyWithArray": unsafe extern "C" fn(*mut RawContext, c_long) -> c_int,
        reply_bytes = "RedisModule_ReplyWithStringBuffer": unsafe extern "C" fn(*mut RawContext, *const c_char, usize) -> c_int,
        string_bytes = "RedisModule_StringPtrLen": unsafe extern "C" fn(*const RawString, *mut usize) -> *const c_char,
        create_string = "RedisModule_CreateString": unsafe extern "C" fn(*mut RawContext, *const c_char, usize) -> *mut RawString,
        free_string = "RedisModule_FreeString": unsafe extern "C" fn(*mut RawContext, *mut RawString),
        select_db = "RedisModule_SelectDb": unsafe extern "C" fn(*mut RawContext, c_int) -> c_int,
        db_size = "RedisModule_DbSize": unsafe extern "C" fn(*mut RawContext) -> c_ulonglong,
        open_key = "RedisModule_OpenKey": unsafe extern "C" fn(*mut RawContext, *mut RawString, c_int) -> *mut RawKey,
        close_key = "RedisModule_CloseKey": unsafe extern "C" fn(*mut RawKey),
        key_type = "RedisModule_KeyType": unsafe extern "C" fn(*mut RawKey) -> c_int,
        value_length = "RedisModule_ValueLength": unsafe extern "C" fn(*mut RawKey) -> usize,
        string_dma = "RedisModule_StringDMA": unsafe extern "C" fn(*mut RawKey, *mut usize, c_int) -> *mut c_char,
        string_set = "RedisModule_StringSet": unsafe extern "C" fn(*mut RawKey, *mut RawString) -> c_int,
        string_truncate = "RedisModule_StringTruncate": unsafe extern "C" fn(*mut RawKey, usize) -> c_int,
        get_expire = "RedisModule_GetAbsExpire": unsafe extern "C" fn(*mut RawKey) -> c_longlong,
        set_expire = "RedisModule_SetAbsExpire": unsafe extern "C" fn(*mut RawKey, c_longlong) -> c_int,
        get_lru = "RedisModule_GetLRU": unsafe extern "C" fn(*mut RawKey, *mut c_longlong) -> c_int,
        get_lfu = "RedisModule_GetLFU": unsafe extern "C" fn(*mut RawKey, *mut c_longlong) -> c_int,
        set_lru = "RedisModule_SetLRU": unsafe extern "C" fn(*mut RawKey, c_longlong) -> c_int,
        set_lfu = "RedisModule_SetLFU": unsafe extern "C" fn(*mut RawKey, c_longlong) -> c_int,
        delete_key = "RedisModule_DeleteKey": unsafe extern "C" fn(*mut RawKey) -> c_int,
        scan = "RedisModule_Scan": unsafe extern "C" fn(*mut RawContext, *mut RawCursor, ScanFn, *mut c_void) -> c_int,
        scan_key = "RedisModule_ScanKey": unsafe extern "C" fn(*mut RawKey, *mut RawCursor, ElementFn, *mut c_void) -> c_int,
        list_get = "RedisModule_ListGet": unsafe extern "C" fn(*mut RawKey, c_long) -> *mut RawString,
        cursor_create = "RedisModule_ScanCursorCreate": unsafe extern "C" fn() -> *mut RawCursor,
        cursor_destroy = "RedisModule_ScanCursorDestroy": unsafe extern "C" fn(*mut RawCursor),
        call = "RedisModule_Call": unsafe extern "C" fn(*mut RawContext, *const c_char, *const c_char, ...) -> *mut RawReply,
        free_reply = "RedisModule_FreeCallReply": unsafe extern "C" fn(*mut RawReply),
        reply_type = "RedisModule_CallReplyType": unsafe extern "C" fn(*mut RawReply) -> c_int,
        reply_string = "RedisModule_CallReplyStringPtr": unsafe extern "C" fn(*mut RawReply, *mut usize) -> *const c_char,
        reply_number = "RedisModule_CallReplyInteger": unsafe extern "C" fn(*mut RawReply) -> c_longlong,
        reply_length = "RedisModule_CallReplyLength": unsafe extern "C" fn(*mut RawReply) -> usize,
        reply_element = "RedisModule_CallReplyArrayElement": unsafe extern "C" fn(*mut RawReply, usize) -> *mut RawReply,
        get_server_info = "RedisModule_GetServerInfo": unsafe extern "C" fn(*mut RawContext, *const c_char) -> *mut RawServerInfo,
        free_server_info = "RedisModule_FreeServerInfo": unsafe extern "C" fn(*mut RawContext, *mut RawServerInfo),
        server_info_field = "RedisModule_ServerInfoGetFieldC": unsafe extern "C" fn(*mut RawServerInfo, *const c_char) -> *const c_char,
        get_thread_safe_context = "RedisModule_GetThreadSafeContext": unsafe extern "C" fn(*mut c_void) -> *mut RawContext,
        free_thread_safe_context = "RedisModule_FreeThreadSafeContext": unsafe extern "C" fn(*mut RawContext),
        subscribe = "RedisModule_SubscribeToServerEvent": unsafe extern "C" fn(*mut RawContext, RawEvent, Option<EventFn>) -> c_int,
        log = "RedisModule_Log": unsafe extern "C" fn(*mut RawContext, *const c_char, *const c_char, ...),
        register_info = "RedisModule_RegisterInfoFunc": unsafe extern "C" fn(*mut RawContext, InfoFn) -> c_int,
        info_section = "RedisModule_InfoAddSection": unsafe extern "C" fn(*mut RawInfo, *const c_char) -> c_int,
        info_text = "RedisModule_InfoAddFieldCString": unsafe extern "C" fn(*mut RawInfo, *const c_char, *const c_char) -> c_int,
        info_number = "RedisModule_InfoAddFieldULongLong": unsafe extern "C" fn(*mut RawInfo, *const c_char, c_ulonglong) -> c_int,
        create_type = "RedisModule_CreateDataType": unsafe extern "C" fn(*mut RawContext, *const c_char, c_int, *mut RawTypeMethods) -> *mut RawType,
        load_bytes = "RedisModule_LoadStringBuffer": unsafe extern "C" fn(*mut RawIo, *mut usize) -> *mut c_char,
        is_io_error = "RedisModule_IsIOError": unsafe extern "C" fn(*mut RawIo) -> c_int,
        context_of_io = "RedisModule_GetContextFromIO": unsafe extern "C" fn(*mut RawIo) -> *mut RawContext,
        alloc = "RedisModule_Alloc": unsafe extern "C" fn(usize) -> *mut c_void,
        free = "RedisModule_Free": unsafe extern "C" fn(*mut c_void),
        yield_now = "RedisModule_Yield": unsafe extern "C" fn(*mut RawContext, c_int, *const c_char),
        exit_from_child = "RedisModule_ExitFromChild": unsafe extern "C" fn(c_int) -> c_int,
        context_flags = "RedisModule_GetContextFlags": unsafe extern "C" fn(*mut RawContext) -> c_int,
        create_timer = "RedisModule_CreateTimer": unsafe extern "C" fn(*mut RawContext, c_longlong, TimerFn, *mut c_void) -> u64,
        stop_timer = "RedisModule_StopTimer": unsafe extern "C" fn(*mut RawContext, u64, *mut *mut c_void) -> c_int,
        register_number = "RedisModule_RegisterNumericConfig": unsafe extern "C" fn(*mut RawContext, *const c_char, c_longlong, c_uint, c_longlong, c_longlong, GetNumberFn, SetNumberFn, Option<ApplyFn>, *mut c_void) -> c_int,
        register_bool = "RedisModule_RegisterBoolConfig": unsafe extern "C" fn(*mut RawContext, *const c_char, c_int, c_uint, GetBoolFn, SetBoolFn, Option<ApplyFn>, *mut c_void) -> c_int,
        load_configs = "RedisModule_LoadConfigs": unsafe extern "C" fn(*mut RawContext) -> c_int,
        register_filter = "RedisModule_RegisterCommandFilter": unsafe extern "C" fn(*mut RawContext, FilterFn, c_int) -> *mut RawFilter,
        unregister_filter = "RedisModule_UnregisterCommandFilter": unsafe extern "C" fn(*mut RawContext, *mut RawFilter) -> c_int,
        filtered_count = "RedisModule_CommandFilterArgsCount": unsafe extern "C" fn(*mut RawFiltered) -> c_int,
        filtered_word = "RedisModule_CommandFilterArgGet": unsafe extern "C" fn(*mut RawFiltered, c_int) -> *mut RawString,
        command_keys = "RedisModule_GetCommandKeysWithFlags": unsafe extern "C" fn(*mut RawContext, *mut *mut RawString, c_int, *mut c_int, *mut *mut c_int) -> *mut c_int,
        replicate = "RedisModule_Replicate": unsafe extern "C" fn(*mut RawContext, *const c_char, *const c_char, ...) -> c_int,
        subscribe_to_keys = "RedisModule_SubscribeToKeyspaceEvents": unsafe extern "C" fn(*mut RawContext, c_int, KeyspaceFn) -> c_int,
        notify_of_key = "RedisModule_NotifyKeyspaceEvent": unsafe extern "C" fn(*mut RawContext, c_int, *const c_char, *mut RawString) -> c_int,
    }
    optional {
        // Redis 7.4, Valkey 8.
        add_acl_category = "RedisModule_AddACLCategory": unsafe extern "C" fn(*mut RawContext, *const c_char) -> c_int,
        // Valkey 8. Not called: Redis has the same function under its own name only.
        set_module_options_of_valkey = "ValkeyModule_SetModuleOptions": unsafe extern "C" fn(*mut RawContext, c_int),
        // Redis 7.2, Valkey 7.2.
        set_acl_categories = "RedisModule_SetCommandACLCategories": unsafe extern "C" fn(*mut RawCommand, *const c_char) -> c_int,
    }
}

/// Looks up one function by its zero-terminated name; `None` if the server lacks it.
///
/// # Safety
/// `get_api` is the server's `GetApi`, and `F` is the type of a pointer to the function of that name.
unsafe fn find<F: Copy>(get_api: GetApi, name: &'static str) -> Option<F> {
    const { assert!(size_of::<F>() == size_of::<*mut c_void>(), "a function pointer") };
    let mut found = std::ptr::null_mut();
    // SAFETY: A zero-terminated name (by `look_up`), and space for one pointer.
    let known = unsafe { get_api(name.as_ptr().cast(), &mut found) } == OK;
    if !known || found.is_null() {
        return None;
    }
    // SAFETY: The same size (asserted above), not null, and of this type as guaranteed by the caller.
    Some(unsafe { std::mem::transmute_copy::<*mut c_void, F>(&found) })
}

/// `REDISMODULE_OK`.
pub(crate) const OK: c_int = 0;

/// `REDISMODULE_ERR`.
pub(crate) const ERR: c_int = 1;

/// `REDISMODULE_APIVER_1`, the only version.
pub(crate) const API_VERSION: c_int = 1;

static FUNCTIONS: OnceLock<Functions> = OnceLock::new();

/// Keeps the functions for all later calls; a second load into the same process finds them again.
pub(crate) fn keep(functions: Functions) {
    let _ = FUNCTIONS.set(functions);
}

/// The functions. Reachable only through a handle, and the server gives out handles only after loading the module.
pub(crate) fn server() -> &'static Functions {
    FUNCTIONS.get().expect("the server's functions are looked up before it hands out anything to call them with")
}
