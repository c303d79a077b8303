//! Buffers: memory for long reads, which is used again. New memory costs the system more than the copy into it: every
//! page of it is mapped and filled with zeros first.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;

/// Buffers that no read has. See the module's text.
#[derive(Debug, Default)]
pub(super) struct Buffers {
    free: Mutex<Vec<Vec<u8>>>,
}

/// Shorter reads get new memory, which the allocator has at hand.
const LEAST_BYTES: usize = 64 << 10;

/// Bytes that are kept: a few of the longest reads.
const MOST_KEPT_BYTES: usize = 16 << 20;

impl Buffers {
    /// A buffer of this length. What is in it is left from an earlier read, or zeros.
    pub(super) fn take(self: &Arc<Buffers>, length: usize) -> Buffer {
        let mut free = self.free();
        let found = if length < LEAST_BYTES { None } else { free.iter().position(|data| data.len() >= length) };
        let found = found.map(|place| free.swap_remove(place));
        drop(free);
        Buffer { data: found.unwrap_or_else(|| vec![0; length]), length, buffers: Arc::clone(self) }
    }

    fn give_back(&self, data: Vec<u8>) {
        let mut free = self.free();
        let kept: usize = free.iter().map(Vec::len).sum();
        if data.len() >= LEAST_BYTES && kept + data.len() <= MOST_KEPT_BYTES {
            free.push(data);
        }
    }

    fn free(&self) -> MutexGuard<'_, Vec<Vec<u8>>> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Memory of one read. It is free again when the last of its bytes is dropped.
#[derive(Debug)]
pub(super) struct Buffer {
    data: Vec<u8>,
    length: usize,
    buffers: Arc<Buffers>,
}

impl Buffer {
    /// What is read goes here.
    pub(super) fn as_mut(&mut self) -> &mut [u8] {
        &mut self.data[..self.length]
    }

    /// It is read.
    pub(super) fn into_bytes(self) -> Bytes {
        Bytes::from_owner(self)
    }
}

impl AsRef<[u8]> for Buffer {
    fn as_ref(&self) -> &[u8] {
        &self.data[..self.length]
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        self.buffers.give_back(std::mem::take(&mut self.data));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_buffers_are_used_again_once_their_last_byte_is_dropped() {
        let buffers = Arc::new(Buffers::default());
        let mut first = buffers.take(1 << 20);
        first.as_mut().fill(7);
        let at = first.as_ref().as_ptr();
        let bytes = first.into_bytes();
        let part = bytes.slice(5..9);
        drop(bytes);
        assert_ne!(buffers.take(1 << 20).as_ref().as_ptr(), at, "a part of it is still used");
        assert_eq!(part, [7; 4].as_slice());
        drop(part);
        // Two are free now; each is long enough for a shorter read.
        let again = [buffers.take(1 << 20), buffers.take(LEAST_BYTES)];
        assert!(again.iter().any(|buffer| buffer.as_ref().as_ptr() == at));
        assert_eq!(again.each_ref().map(|buffer| buffer.as_ref().len()), [1 << 20, LEAST_BYTES]);
    }

    #[test]
    fn what_is_kept_has_a_bound_and_short_buffers_are_not() {
        let buffers = Arc::new(Buffers::default());
        let many: Vec<Buffer> = (0..20).map(|_| buffers.take(1 << 20)).collect();
        drop(many);
        assert_eq!(buffers.free().iter().map(Vec::len).sum::<usize>(), MOST_KEPT_BYTES);
        let short = Arc::new(Buffers::default());
        drop(short.take(4096));
        assert!(short.free().is_empty());
    }
}
