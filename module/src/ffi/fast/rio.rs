//! The servers' abstraction of a stream (`rio`): a head with four functions, behind which each kind of stream keeps
//! what it needs. Two kinds of our own: a [`Source`] is read from bytes, a [`Sink`] passes on what is written.

use std::ffi::{c_int, c_void};
use std::ptr;

use super::super::callback::guard;

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
