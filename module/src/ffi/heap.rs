//! The server's heap: populates memory that the server will need soon.

use std::ops::Range;

use rustix::mm::Advice;
use rustix::param::page_size;

use super::context::Context;
use super::functions::server;

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
