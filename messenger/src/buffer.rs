//! Memory for received bytes: aligned buffers, and the pool that they come from and return to.
//!
//! A buffer has a size class of its own and returns whole when it is dropped. So a receiver that keeps one message
//! keeps only that message's memory, and not a block that many messages share.
//!
//! Small bodies (below [`POOLED_FROM_BYTES`]) come from the allocator, whose caches serve those sizes best.

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;

/// The bytes of one body, in memory that returns to its pool when this is dropped.
pub struct Buffer {
    memory: Vec<u8>,
    /// Where the content begins: the first aligned byte.
    start: usize,
    length: usize,
    home: Option<Arc<Pool>>,
}

impl Buffer {
    /// No bytes and no memory.
    pub const EMPTY: Buffer = Buffer { memory: Vec::new(), start: 0, length: 0, home: None };

    /// A buffer of `length` zero bytes that begins at a multiple of `alignment` (a power of two, at most
    /// [`MAX_ALIGNMENT`]; other values count as 1).
    pub fn zeroed(length: usize, alignment: usize) -> Buffer {
        let alignment = sensible(alignment);
        Buffer::carve(vec![0; length + alignment - 1], length, alignment, None)
    }

    fn carve(memory: Vec<u8>, length: usize, alignment: usize, home: Option<Arc<Pool>>) -> Buffer {
        let slack = memory.len() - length;
        let start = memory.as_ptr().align_offset(alignment).min(slack);
        Buffer { memory, start, length, home }
    }
}

impl Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.memory.get(self.start..self.start + self.length).unwrap_or_default()
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        self.memory.get_mut(self.start..self.start + self.length).unwrap_or_default()
    }
}

impl AsRef<[u8]> for Buffer {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl From<Buffer> for Bytes {
    /// Converts without a copy, to send on what was received. The memory returns to its pool when the last holder drops
    /// it.
    fn from(buffer: Buffer) -> Bytes {
        if buffer.is_empty() { Bytes::new() } else { Bytes::from_owner(buffer) }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if let Some(pool) = self.home.take() {
            pool.give_back(std::mem::take(&mut self.memory));
        }
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(to, "Buffer({} bytes)", self.length)
    }
}

/// Buffers that wait to be reused, in size classes that double.
///
/// The pool grows by use up to its bound. A buffer that returns beyond the bound goes to the allocator.
pub struct Pool {
    idle: Mutex<Idle>,
    most_idle_bytes: usize,
}

#[derive(Default)]
struct Idle {
    classes: [Vec<Vec<u8>>; CLASSES],
    bytes: usize,
}

impl Pool {
    /// A pool that keeps at most that many idle bytes.
    pub fn new(most_idle_bytes: usize) -> Arc<Pool> {
        Arc::new(Pool { idle: Mutex::default(), most_idle_bytes })
    }

    /// A buffer of `length` bytes, aligned to `alignment`. Its content is arbitrary (earlier messages of this process)
    /// and must be overwritten.
    pub fn take(self: &Arc<Pool>, length: usize, alignment: usize) -> Buffer {
        let alignment = sensible(alignment);
        let needed = length + alignment - 1;
        let Some(class) = class_of(needed).filter(|_| length >= POOLED_FROM_BYTES) else {
            return Buffer::zeroed(length, alignment);
        };
        let recycled = {
            let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
            let recycled = idle.classes.get_mut(class).and_then(Vec::pop);
            idle.bytes -= recycled.as_ref().map_or(0, Vec::len);
            recycled
        };
        let memory = recycled.unwrap_or_else(|| vec![0; class_bytes(class)]);
        Buffer::carve(memory, length, alignment, Some(Arc::clone(self)))
    }

    /// Bytes that wait to be reused.
    pub fn idle_bytes(&self) -> usize {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner).bytes
    }

    fn give_back(&self, memory: Vec<u8>) {
        let Some(class) = class_of(memory.len()) else { return };
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        if idle.bytes + memory.len() > self.most_idle_bytes {
            return;
        }
        idle.bytes += memory.len();
        if let Some(stack) = idle.classes.get_mut(class) {
            stack.push(memory);
        }
    }
}

impl fmt::Debug for Pool {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(to, "Pool({} of {} bytes idle)", self.idle_bytes(), self.most_idle_bytes)
    }
}

/// The smallest class that holds that many bytes.
fn class_of(bytes: usize) -> Option<usize> {
    let class =
        bytes.max(SMALLEST_CLASS_BYTES).next_power_of_two().trailing_zeros() - SMALLEST_CLASS_BYTES.trailing_zeros();
    Some(class as usize).filter(|&class| class < CLASSES)
}

fn class_bytes(class: usize) -> usize {
    SMALLEST_CLASS_BYTES << class
}

fn sensible(alignment: usize) -> usize {
    if alignment.is_power_of_two() && alignment <= MAX_ALIGNMENT { alignment } else { 1 }
}

/// Bodies of at least this size come from a pool. For smaller ones the allocator's caches are as fast.
pub const POOLED_FROM_BYTES: usize = 1024;

/// The greatest alignment, in bytes: a page, as direct I/O needs it.
pub const MAX_ALIGNMENT: usize = 4096;

/// Bytes of the smallest class.
const SMALLEST_CLASS_BYTES: usize = 2048;

/// 2 KiB to 32 MiB: the longest segment ([`crate::frame::MAX_SEGMENT_BYTES`]) and its alignment fit the last.
const CLASSES: usize = 15;

const _: () =
    assert!(SMALLEST_CLASS_BYTES << (CLASSES - 1) >= crate::frame::MAX_SEGMENT_BYTES as usize + MAX_ALIGNMENT);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_buffer_begins_where_it_was_asked_to() {
        let pool = Pool::new(1 << 20);
        for alignment in [1, 8, 64, 4096] {
            for length in [1, 100, 4096, 70_000] {
                let buffer = pool.take(length, alignment);
                assert_eq!(buffer.len(), length);
                assert_eq!(buffer.as_ptr().align_offset(alignment), 0, "{length} bytes at {alignment}");
            }
        }
    }

    #[test]
    fn dropped_buffers_are_reused_and_the_pool_keeps_its_bound() {
        let pool = Pool::new(100_000);
        let first = pool.take(60_000, 1);
        let place = first.as_ptr();
        let second = pool.take(60_000, 1);
        drop(first);
        assert_eq!(pool.idle_bytes(), 65_536);
        drop(second); // would be 128 KiB idle
        assert_eq!(pool.idle_bytes(), 65_536);
        assert_eq!(pool.take(50_000, 1).as_ptr(), place);
    }

    #[test]
    fn bytes_made_of_a_buffer_give_its_memory_back_at_last() {
        let pool = Pool::new(1 << 20);
        let bytes = Bytes::from(pool.take(4096, 1));
        let slice = bytes.slice(1..3);
        drop(bytes);
        assert_eq!(pool.idle_bytes(), 0);
        drop(slice);
        assert_eq!(pool.idle_bytes(), 4096);
    }

    #[test]
    fn an_invalid_alignment_counts_as_one() {
        assert_eq!(Buffer::zeroed(10, 3).len(), 10);
        assert_eq!(Buffer::zeroed(10, 1 << 30).len(), 10);
    }
}
