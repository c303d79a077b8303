//! Payload: the bytes of a write, wherever the transport has them, and where the bytes of a read go.

use std::borrow::Cow;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use remora_memory::Memory;

/// The bytes of a write.
#[derive(Debug)]
pub struct Payload<'a> {
    place: Place<'a>,
    /// Memory for bytes that are kept.
    buffers: Option<&'a Arc<Buffers>>,
}

#[derive(Debug)]
enum Place<'a> {
    /// In the transport's memory, until the call returns.
    Borrowed(&'a [u8]),
    /// In a buffer that can be given away instead of being copied.
    Buffer { buffer: &'a mut Buffer, range: Range<usize> },
    /// In the caller's memory.
    Provided { memory: &'a Memory, range: Range<u64> },
}

impl<'a> Payload<'a> {
    /// Bytes that are there until the call returns.
    pub fn borrowed(bytes: &'a [u8]) -> Payload<'a> {
        Payload { place: Place::Borrowed(bytes), buffers: None }
    }

    /// A range of a buffer.
    pub(crate) fn in_buffer(buffer: &'a mut Buffer, range: Range<usize>) -> Payload<'a> {
        Payload { place: Place::Buffer { buffer, range }, buffers: None }
    }

    /// A range of the memory that the caller provided.
    pub(crate) fn provided(memory: &'a Memory, range: Range<u64>) -> Payload<'a> {
        Payload { place: Place::Provided { memory, range }, buffers: None }
    }

    /// With memory for bytes that are kept: buffers at least as long as the payload.
    pub(crate) fn kept_in(self, buffers: &'a Arc<Buffers>) -> Payload<'a> {
        Payload { buffers: Some(buffers), ..self }
    }

    /// How many bytes.
    pub fn length(&self) -> usize {
        match &self.place {
            Place::Borrowed(bytes) => bytes.len(),
            Place::Buffer { range, .. } => range.len(),
            Place::Provided { range, .. } => (range.end - range.start) as usize,
        }
    }

    /// The bytes, until the call returns. They are copied only out of memory that the caller provided.
    pub fn bytes(&self) -> Cow<'_, [u8]> {
        match &self.place {
            Place::Borrowed(bytes) => Cow::Borrowed(bytes),
            Place::Buffer { buffer, range } => Cow::Borrowed(&buffer.data[range.clone()]),
            Place::Provided { memory, range } => Cow::Owned(copy(memory, range)),
        }
    }

    /// The bytes, for as long as wanted. Long ones of the device are not copied, and long ones of the ring are copied
    /// to memory that is used again.
    pub fn into_bytes(self) -> Bytes {
        let length = self.length();
        match (self.place, self.buffers) {
            (Place::Buffer { buffer, range }, _) if length >= LEAST_GIVEN_BYTES => buffer.give_away().slice(range),
            (Place::Buffer { buffer, range }, _) => Bytes::copy_from_slice(&buffer.data[range]),
            (place, Some(buffers)) if (LEAST_GIVEN_BYTES..=buffers.length).contains(&length) => {
                let mut buffer = buffers.take();
                place.copy_to(&mut buffer.data[..length]);
                Bytes::from_owner(buffer).slice(..length)
            }
            (Place::Borrowed(bytes), _) => Bytes::copy_from_slice(bytes),
            (Place::Provided { memory, range }, _) => copy(memory, &range).into(),
        }
    }

    /// Where the bytes are in the memory that the caller provided ([`crate::SessionOptions::memory`]), if they are.
    /// They stay there until the write is answered.
    pub fn place(&self) -> Option<Range<u64>> {
        match &self.place {
            Place::Provided { range, .. } => Some(range.clone()),
            _ => None,
        }
    }
}

impl Place<'_> {
    fn copy_to(&self, into: &mut [u8]) {
        match self {
            Place::Borrowed(bytes) => into.copy_from_slice(bytes),
            Place::Buffer { buffer, range } => into.copy_from_slice(&buffer.data[range.clone()]),
            Place::Provided { memory, range } => {
                let inside = memory.read(range.start, into);
                debug_assert!(inside.is_ok(), "the ring has cut its places out of this memory");
            }
        }
    }
}

fn copy(memory: &Memory, range: &Range<u64>) -> Vec<u8> {
    let mut bytes = vec![0; (range.end - range.start) as usize];
    let inside = memory.read(range.start, &mut bytes);
    debug_assert!(inside.is_ok(), "the ring has cut its places out of this memory");
    bytes
}

/// Shorter payloads are copied: that costs less than another buffer.
const LEAST_GIVEN_BYTES: usize = 64 << 10;

/// Where the bytes of a read go, up to as many as were asked for.
pub struct Sink<'a> {
    place: SinkPlace<'a>,
    length: usize,
    most: usize,
    /// More was put than was asked for.
    is_too_long: bool,
}

pub(crate) enum SinkPlace<'a> {
    Slice(&'a mut [u8]),
    Provided { memory: &'a Memory, at: u64 },
}

impl<'a> Sink<'a> {
    pub(crate) fn new(place: SinkPlace<'a>, most: usize) -> Sink<'a> {
        Sink { place, length: 0, most, is_too_long: false }
    }

    /// The next bytes.
    pub fn put(&mut self, bytes: &[u8]) {
        let Some(end) = self.end(bytes.len()) else { return };
        match &mut self.place {
            SinkPlace::Slice(slice) => slice[self.length..end].copy_from_slice(bytes),
            SinkPlace::Provided { memory, at } => {
                let inside = memory.write(*at + self.length as u64, bytes);
                debug_assert!(inside.is_ok(), "the ring has cut its places out of this memory");
            }
        }
        self.length = end;
    }

    /// The next bytes are zeros.
    pub fn put_zeros(&mut self, count: usize) {
        let Some(end) = self.end(count) else { return };
        match &mut self.place {
            SinkPlace::Slice(slice) => slice[self.length..end].fill(0),
            SinkPlace::Provided { memory, at } => {
                let range = *at + self.length as u64..*at + end as u64;
                let inside = memory.fill(range, 0);
                debug_assert!(inside.is_ok(), "the ring has cut its places out of this memory");
            }
        }
        self.length = end;
    }

    /// How many bytes may still be put.
    pub fn left(&self) -> usize {
        self.most - self.length
    }

    /// How many bytes were put. `None`: more than were asked for.
    pub(crate) fn finish(self) -> Option<usize> {
        (!self.is_too_long).then_some(self.length)
    }

    fn end(&mut self, count: usize) -> Option<usize> {
        let end = self.length.checked_add(count).filter(|end| *end <= self.most);
        self.is_too_long |= end.is_none();
        end
    }
}

/// Memory for requests, which is used again. New memory costs the system more than the copy into it: every page of
/// it is mapped and filled with zeros first.
#[derive(Debug)]
pub(crate) struct Buffers {
    free: Mutex<Vec<Vec<u8>>>,
    /// Bytes of each.
    length: usize,
}

/// Buffers that are kept beside those in use.
const MOST_KEPT: usize = 16;

impl Buffers {
    pub(crate) fn new(length: usize) -> Arc<Buffers> {
        Arc::new(Buffers { free: Mutex::default(), length })
    }

    pub(crate) fn take(self: &Arc<Buffers>) -> Buffer {
        let data = self.free().pop().unwrap_or_else(|| vec![0; self.length]);
        Buffer { data, buffers: Arc::clone(self) }
    }

    fn free(&self) -> MutexGuard<'_, Vec<Vec<u8>>> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Memory of one request. It is free again when the last of its bytes is dropped.
#[derive(Debug)]
pub(crate) struct Buffer {
    data: Vec<u8>,
    buffers: Arc<Buffers>,
}

impl Buffer {
    /// All of it, for a request to be received.
    pub(crate) fn as_mut(&mut self) -> &mut [u8] {
        &mut self.data
    }

    /// All of it, for what was received.
    pub(crate) fn as_slice(&self) -> &[u8] {
        &self.data
    }

    /// All of it, for as long as wanted. Another takes its place.
    fn give_away(&mut self) -> Bytes {
        let another = self.buffers.take();
        Bytes::from_owner(std::mem::replace(self, another))
    }
}

impl AsRef<[u8]> for Buffer {
    fn as_ref(&self) -> &[u8] {
        &self.data
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let mut free = self.buffers.free();
        if free.len() < MOST_KEPT {
            free.push(std::mem::take(&mut self.data));
        }
    }
}
