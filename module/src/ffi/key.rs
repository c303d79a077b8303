//! An open key: its value, its expiry and its age.

use std::ffi::{c_int, c_longlong};
use std::marker::PhantomData;
use std::ptr::NonNull;

use super::functions::{OK, RawContext, RawKey, server};
use super::string::StrRef;

/// The kind of a key's value, as far as this module distinguishes kinds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum KeyKind {
    /// The key does not exist.
    Empty,
    /// A plain string.
    String,
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

    /// The kind of its value.
    pub(crate) fn kind(&self) -> KeyKind {
        // SAFETY: An open key (handle rule).
        match unsafe { (server().key_type)(self.raw.as_ptr()) } {
            KEY_EMPTY => KeyKind::Empty,
            KEY_STRING => KeyKind::String,
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
    pub(crate) fn set_idle_time(&mut self, milliseconds: u64) {
        let milliseconds = c_longlong::try_from(milliseconds).unwrap_or(c_longlong::MAX);
        // SAFETY: An open key. A refusal means that the server doesn't keep it.
        let _ = unsafe { (server().set_lru)(self.raw.as_ptr(), milliseconds) };
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

/// `REDISMODULE_READ`.
pub(super) const READ: c_int = 1;
/// `REDISMODULE_WRITE`.
pub(super) const WRITE: c_int = 2;
/// `REDISMODULE_KEYTYPE_EMPTY`.
const KEY_EMPTY: c_int = 0;
/// `REDISMODULE_KEYTYPE_STRING`.
const KEY_STRING: c_int = 1;
