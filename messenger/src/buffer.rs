//! Memory for received bytes: aligned buffers, and the pool that they come from and return to.
//!
//! A buffer has a size class of its own and returns whole when it is dropped. So a receiver that keeps one message
//! keeps only that message's memory, and not a block that many messages share.
//!
//! Small bodies (below [`POOLED_FROM_BYTES`]) come from the allocator, whose caches serve those sizes best.

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
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

/// A bound on messages and bytes under way, shared by everything that it counts. Taking a share returns a [`Permit`],
/// which gives the share back when dropped. A caller that finds no room can leave a waker.
///
/// One message is always let in when nothing is under way, however long it is: a bound below one message would block
/// for ever.
pub struct Throttle {
    max_messages: u64,
    max_bytes: AtomicU64,
    /// Messages in the upper bits, bytes in the lower [`BYTE_BITS`]: both are taken and given back in one step.
    under_way: AtomicU64,
    /// The number of wakers, which is read without the lock whenever a share is given back.
    waiting: AtomicUsize,
    waiters: Mutex<Vec<Waker>>,
}

/// Called once when a share was given back.
pub type Waker = Box<dyn FnOnce() + Send>;

impl Throttle {
    /// A throttle that admits at most that many messages and bytes at once.
    pub fn new(max_messages: usize, max_bytes: usize) -> Arc<Throttle> {
        Arc::new(Throttle {
            max_messages: max_messages.min(MAX_MESSAGES) as u64,
            max_bytes: AtomicU64::new(max_bytes.min(MAX_BYTES) as u64),
            under_way: AtomicU64::new(0),
            waiting: AtomicUsize::new(0),
            waiters: Mutex::default(),
        })
    }

    /// Takes a share for one message of `bytes`, if there is room.
    pub fn take(self: &Arc<Throttle>, bytes: usize) -> Option<Permit> {
        let share = ONE_MESSAGE + bytes.min(MAX_BYTES) as u64;
        let taken = self.under_way.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |held| {
            let (messages, bytes) = ((held + share) >> BYTE_BITS, (held + share) & (ONE_MESSAGE - 1));
            let fits = messages <= self.max_messages && bytes <= self.max_bytes.load(Ordering::Relaxed);
            (fits || held == 0).then_some(held + share)
        });
        taken.is_ok().then(|| Permit { throttle: Arc::clone(self), share })
    }

    /// Like [`Throttle::take`]. If there is no room, `waker` is called once there may be; another caller may be faster.
    pub fn take_or_wait(self: &Arc<Throttle>, bytes: usize, waker: impl FnOnce() + Send + 'static) -> Option<Permit> {
        if let Some(permit) = self.take(bytes) {
            return Some(permit);
        }
        self.lock().push(Box::new(waker));
        self.waiting.fetch_add(1, Ordering::SeqCst);
        // A share that was given back between the two attempts has called no waker: try again.
        self.take(bytes) // if this succeeds, the waker is called for nothing: harmless and rare
    }

    /// Changes the bound on bytes. What is under way stays so; a smaller bound counts for what follows.
    pub fn resize(&self, max_bytes: usize) {
        let before = self.max_bytes.swap(max_bytes.min(MAX_BYTES) as u64, Ordering::SeqCst);
        if max_bytes as u64 > before {
            self.wake();
        }
    }

    /// The bound on bytes.
    pub fn max_bytes(&self) -> usize {
        self.max_bytes.load(Ordering::Relaxed) as usize
    }

    /// Messages and bytes under way.
    pub fn under_way(&self) -> (usize, usize) {
        let held = self.under_way.load(Ordering::SeqCst);
        ((held >> BYTE_BITS) as usize, (held & (ONE_MESSAGE - 1)) as usize)
    }

    fn give_back(&self, share: u64) {
        self.under_way.fetch_sub(share, Ordering::SeqCst);
        if self.waiting.load(Ordering::SeqCst) > 0 {
            self.wake();
        }
    }

    fn wake(&self) {
        let wakers = {
            let mut waiters = self.lock();
            self.waiting.store(0, Ordering::SeqCst);
            std::mem::take(&mut *waiters)
        };
        wakers.into_iter().for_each(|waker| waker());
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<Waker>> {
        self.waiters.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Throttle {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (messages, bytes) = self.under_way();
        let (max_messages, max_bytes) = (self.max_messages, self.max_bytes.load(Ordering::Relaxed));
        write!(to, "Throttle({messages}/{max_messages} messages, {bytes}/{max_bytes} bytes)")
    }
}

/// The share of one message, until dropped.
pub struct Permit {
    throttle: Arc<Throttle>,
    share: u64,
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.throttle.give_back(self.share);
    }
}

impl fmt::Debug for Permit {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(to, "Permit({} bytes)", self.share & (ONE_MESSAGE - 1))
    }
}

const BYTE_BITS: u32 = 40;
const ONE_MESSAGE: u64 = 1 << BYTE_BITS;
/// Larger bounds count as these: 8 million messages, 512 GiB. Half of what the bits hold, so that one more always fits.
const MAX_MESSAGES: usize = (1 << (u64::BITS - BYTE_BITS)) / 2;
const MAX_BYTES: usize = 1 << (BYTE_BITS - 1);

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

    #[test]
    fn a_share_given_back_can_be_taken_again() {
        let throttle = Throttle::new(2, 100);
        let first = throttle.take(60);
        assert!(first.is_some());
        assert!(throttle.take(41).is_none(), "too many bytes");
        let second = throttle.take(40);
        assert!(second.is_some());
        assert!(throttle.take(0).is_none(), "too many messages");
        drop(first);
        assert!(throttle.take(60).is_some());
        drop(second);
        assert_eq!(throttle.under_way(), (0, 0));
    }

    #[test]
    fn a_bound_can_be_changed_and_a_larger_one_wakes() {
        let throttle = Throttle::new(5, 100);
        let held = throttle.take(80);
        throttle.resize(50);
        assert!(throttle.take(1).is_none(), "more is under way than the new bound");
        let woken = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&woken);
        let wake = move || _ = count.fetch_add(1, Ordering::SeqCst);
        assert!(throttle.take_or_wait(60, wake).is_none());
        throttle.resize(140);
        assert_eq!(woken.load(Ordering::SeqCst), 1);
        assert!(throttle.take(60).is_some());
        drop(held);
    }

    #[test]
    fn one_message_always_gets_in() {
        let throttle = Throttle::new(2, 100);
        assert!(throttle.take(1000).is_some());
    }

    #[test]
    fn a_waiter_is_woken_when_a_share_is_given_back() {
        let throttle = Throttle::new(1, 100);
        let held = throttle.take(1);
        let woken = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&woken);
        assert!(
            throttle
                .take_or_wait(1, move || {
                    count.fetch_add(1, Ordering::SeqCst);
                })
                .is_none()
        );
        assert_eq!(woken.load(Ordering::SeqCst), 0);
        drop(held);
        assert_eq!(woken.load(Ordering::SeqCst), 1);
        assert!(throttle.take(1).is_some());
    }
}
