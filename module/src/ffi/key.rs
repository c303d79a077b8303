//! The server's objects as safe handles: an open key, a string, the reply to a command, and its heap.

use std::ffi::{c_int, c_longlong};
use std::marker::PhantomData;
use std::ops::Range;
use std::ptr::{self, NonNull};

use remora_fabric::View;
use rustix::mm::Advice;
use rustix::param::page_size;

use super::Context;
use super::functions::{OK, RawContext, RawKey, RawReply, RawString, server};

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
