//! The server's heap: memory that it will need soon, had from the system at once.

use std::ops::Range;

use rustix::mm::Advice;
use rustix::param::page_size;

use super::context::Context;
use super::functions::server;

/// Has the system give the pages of a block of so many bytes in one call, and leaves the block to the server's allocator, which will hand
/// it out again: a page that a write finds missing costs an exception, one that is there nothing. Says which pages those are, or `None` if
/// the system doesn't do that (before Linux 5.14).
///
/// (Pages, since jemalloc puts large blocks anywhere into their first one.)
pub(crate) fn warm(_context: &Context<'_>, bytes: usize) -> Option<Range<usize>> {
    // SAFETY: No conditions but the thread, of which the context is the proof. The server ends itself rather than return none.
    let block = unsafe { (server().alloc)(bytes) };
    let page = page_size();
    let pages = block.addr() / page * page..(block.addr() + bytes).next_multiple_of(page);
    let first = block.wrapping_byte_sub(block.addr() - pages.start);
    // SAFETY: Whole pages, each of which holds a byte of a block that is ours and mapped for writing. The advice changes no byte: it has
    // pages given that would be given at the next write.
    let done = unsafe { rustix::mm::madvise(first, pages.end - pages.start, Advice::LinuxPopulateWrite) };
    // SAFETY: Allocated above, freed once.
    unsafe { (server().free)(block) };
    done.ok().map(|()| pages)
}
