//! The reply to a command that this module called.

use std::ffi::c_int;
use std::marker::PhantomData;
use std::ptr::NonNull;

use super::functions::{RawContext, RawReply, server};

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
