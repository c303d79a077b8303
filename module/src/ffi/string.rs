//! The server's strings: bytes with a length, owned by the server or by us.

use std::marker::PhantomData;
use std::ops::Range;
use std::ptr::{self, NonNull};

use remora_fabric::View;

use super::context::Context;
use super::functions::{RawString, server};

/// A string of the server's that somebody else keeps alive for `'s`. The same in memory as the server's pointer, so that a list of
/// arguments can be lent as it is.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub(crate) struct StrRef<'s> {
    raw: NonNull<RawString>,
    lender: PhantomData<&'s RawString>,
}

impl<'s> StrRef<'s> {
    /// # Safety
    /// `raw` is a string of the server's that lives and is not changed for `'s`.
    pub(super) unsafe fn new(raw: NonNull<RawString>) -> StrRef<'s> {
        StrRef { raw, lender: PhantomData }
    }

    /// Its bytes.
    pub(crate) fn as_bytes(&self) -> &'s [u8] {
        let mut length = 0;
        // SAFETY: A living string (handle rule), and room for its length.
        let start = unsafe { (server().string_bytes)(self.raw.as_ptr(), &mut length) };
        if start.is_null() || length == 0 {
            return &[];
        }
        // SAFETY: The server says that so many bytes lie there, and they stay as long as the string does, which is `'s`.
        unsafe { std::slice::from_raw_parts(start.cast(), length) }
    }

    /// Its text, where it is one.
    pub(crate) fn as_str(&self) -> Option<&'s str> {
        std::str::from_utf8(self.as_bytes()).ok()
    }

    pub(super) fn raw(&self) -> *mut RawString {
        self.raw.as_ptr()
    }
}

/// A string that we own.
pub(crate) struct OwnedStr {
    raw: NonNull<RawString>,
}

impl OwnedStr {
    /// A copy of `bytes`. The context is the proof that we are on the server's thread.
    pub(crate) fn new(_context: &Context<'_>, bytes: &[u8]) -> OwnedStr {
        // SAFETY: A null context is allowed and means that nobody but us frees the string; the bytes are copied.
        let raw = unsafe { (server().create_string)(ptr::null_mut(), bytes.as_ptr().cast(), bytes.len()) };
        OwnedStr { raw: NonNull::new(raw).expect("the server ends itself rather than return no string") }
    }

    /// A copy of bytes that lie in shared memory, made by the server itself.
    pub(crate) fn of_memory(
        _context: &Context<'_>,
        memory: &View,
        range: &Range<u64>,
    ) -> Result<OwnedStr, remora_fabric::memory::Error> {
        let (start, length) = (memory.address(range)?, (range.end - range.start) as usize);
        // SAFETY: A null context as for `new`. So many bytes are mapped there for as long as `memory` is borrowed, and the server only copies
        // them; another process may change them meanwhile, and what was copied is worth something only if its reader finds later
        // that nobody did.
        let raw = unsafe { (server().create_string)(ptr::null_mut(), start.cast(), length) };
        Ok(OwnedStr { raw: NonNull::new(raw).expect("the server ends itself rather than return no string") })
    }

    /// Lends it.
    pub(crate) fn borrow(&self) -> StrRef<'_> {
        // SAFETY: Ours, and alive as long as `self` is borrowed.
        unsafe { StrRef::new(self.raw) }
    }
}

impl Drop for OwnedStr {
    fn drop(&mut self) {
        // SAFETY: Made without a context, hence freed without; ours, and not used again.
        unsafe { (server().free_string)(ptr::null_mut(), self.raw.as_ptr()) };
    }
}
