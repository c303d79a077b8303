//! The server's strings: bytes with a length, owned by the server or by us.

use std::marker::PhantomData;
use std::ops::Range;
use std::ptr::{self, NonNull};

use remora_fabric::View;

use super::context::Context;
use super::functions::{RawString, server};

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
