//! Slot: memory in which the kernel puts one request after the other, and finds the answers.
//!
//! At any time a slot's memory is either the kernel's, from [`Slot::lend`] to the completion that the kernel gives
//! for it, or ours. **Only while it is ours is it accessed here, and only then is it freed.** Memory that is still
//! the kernel's when its slot is dropped is never freed: that costs memory once, and a write of the kernel hits
//! nothing else.

use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;

use remora_memory::Memory;

use crate::abi::{IN_HEADER_BYTES, out_header};
use crate::answer::{Payload, Sink, SinkPlace};

/// `fuse_uring_req_header`: the request's head or the answer's, the operation's fields, and what belongs to the
/// ring.
pub(super) const HEAD_BYTES: usize = 288;

/// In the head: the operation's fields.
const OPERATION: Range<usize> = 128..256;

/// In the head: what the answer to this request is committed by.
const COMMIT_ID: Range<usize> = 264..272;

/// In the head: bytes of the payload.
const PAYLOAD_BYTES: Range<usize> = 272..276;

/// Behind the head, where the kernel reads it once: where head and payload are, as two `iovec`s.
const PLACES: Range<usize> = HEAD_BYTES..HEAD_BYTES + 32;

/// Memory that only this process and the kernel access, or a range of the caller's.
pub(super) struct Room(Kind);

enum Kind {
    Own(Own),
    Provided { memory: Arc<Memory>, range: Range<u64> },
}

/// Bytes without references to them, but those that the methods of [`Room`] make while they have the room
/// exclusively.
struct Own {
    start: NonNull<u8>,
    length: usize,
}

// SAFETY: It owns its bytes, as a box does, and no field is bound to a thread.
unsafe impl Send for Own {}

impl Own {
    fn new(length: usize) -> Own {
        let bytes: &'static mut [u8] = Box::leak(vec![0; length].into_boxed_slice());
        Own { start: NonNull::from(bytes).cast(), length }
    }

    fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: `new` has leaked a box of so many initialised bytes, and only `drop` frees them. It is borrowed
        // exclusively for as long as the slice lives, so no other reference exists. The kernel does not write them
        // meanwhile: a room that can be reached is ours (see the module's text).
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.length) }
    }
}

impl Drop for Own {
    fn drop(&mut self) {
        let bytes = std::ptr::slice_from_raw_parts_mut(self.start.as_ptr(), self.length);
        // SAFETY: `new` has leaked a box with this address and length, which is not freed elsewhere. The kernel
        // does not have it: `Slot` forgets a room that it has.
        drop(unsafe { Box::from_raw(bytes) });
    }
}

impl Room {
    pub(super) fn own(length: usize) -> Room {
        Room(Kind::Own(Own::new(length)))
    }

    /// A range inside the memory.
    pub(super) fn provided(memory: &Arc<Memory>, range: Range<u64>) -> Room {
        debug_assert!(range.end <= memory.length(), "a room is cut out of its memory");
        Room(Kind::Provided { memory: Arc::clone(memory), range })
    }

    pub(super) fn length(&self) -> usize {
        match &self.0 {
            Kind::Own(own) => own.length,
            Kind::Provided { range, .. } => (range.end - range.start) as usize,
        }
    }

    /// Where it is in the memory that the caller provided.
    pub(super) fn place(&self) -> Option<Range<u64>> {
        match &self.0 {
            Kind::Own(_) => None,
            Kind::Provided { range, .. } => Some(range.clone()),
        }
    }

    /// Its first bytes, as what was written.
    pub(super) fn payload(&mut self, length: usize) -> Payload<'_> {
        match &mut self.0 {
            Kind::Own(own) => Payload::borrowed(&own.bytes()[..length]),
            Kind::Provided { memory, range } => Payload::provided(memory, range.start..range.start + length as u64),
        }
    }

    /// Its first bytes, for what is read.
    pub(super) fn sink(&mut self, most: usize) -> Sink<'_> {
        let most = most.min(self.length());
        match &mut self.0 {
            Kind::Own(own) => Sink::new(SinkPlace::Slice(own.bytes()), most),
            Kind::Provided { memory, range } => Sink::new(SinkPlace::Provided { memory, at: range.start }, most),
        }
    }

    /// Copies its first bytes out.
    pub(super) fn copy_out(&mut self, into: &mut [u8]) {
        match &mut self.0 {
            Kind::Own(own) => into.copy_from_slice(&own.bytes()[..into.len()]),
            Kind::Provided { memory, range } => {
                let inside = memory.read(range.start, into);
                debug_assert!(inside.is_ok(), "a room is cut out of its memory");
            }
        }
    }

    /// Where the kernel finds it.
    fn address(&self) -> *mut u8 {
        match &self.0 {
            Kind::Own(own) => own.start.as_ptr(),
            Kind::Provided { memory, range } => memory.base_address().as_ptr().wrapping_add(range.start as usize),
        }
    }
}

/// The kernel has done what was asked with this number.
pub(super) struct Completion {
    user_data: u64,
    result: i32,
    goes_on: bool,
}

impl Completion {
    /// # Safety
    /// The kernel has completed what was asked with this number. If it is the number of a slot, the kernel says so for
    /// the first time: memory that it was lent for that is not its any more.
    pub(super) unsafe fn of_kernel(user_data: u64, result: i32, goes_on: bool) -> Completion {
        Completion { user_data, result, goes_on }
    }

    pub(super) fn user_data(&self) -> u64 {
        self.user_data
    }

    /// For a slot: 0, or a negative errno.
    pub(super) fn result(&self) -> i32 {
        self.result
    }

    /// Whether further completions of the same entry will follow.
    pub(super) fn goes_on(&self) -> bool {
        self.goes_on
    }
}

/// A slot. See the module's text.
pub(super) struct Slot {
    index: usize,
    head: Option<Room>,
    /// `None` while a file system that answers later has it.
    body: Option<Room>,
    is_lent: bool,
}

/// What the kernel says of a request in a slot, besides its payload.
pub(super) struct Head([u8; HEAD_BYTES]);

impl Head {
    pub(super) fn request(&self) -> &[u8] {
        &self.0[..IN_HEADER_BYTES]
    }

    pub(super) fn operation(&self) -> &[u8] {
        &self.0[OPERATION]
    }

    pub(super) fn commit_id(&self) -> u64 {
        self.0[COMMIT_ID].try_into().map_or(0, u64::from_ne_bytes)
    }

    pub(super) fn payload_bytes(&self) -> usize {
        self.0[PAYLOAD_BYTES].try_into().map_or(0, u32::from_ne_bytes) as usize
    }
}

impl Slot {
    pub(super) fn new(index: usize, body: Room) -> Slot {
        Slot { index, head: Some(Room::own(PLACES.end)), body: Some(body), is_lent: false }
    }

    /// Its number, by which its completions are known.
    pub(super) fn index(&self) -> usize {
        self.index
    }

    pub(super) fn is_lent(&self) -> bool {
        self.is_lent
    }

    /// From now on its memory is the kernel's. Returns where the kernel finds head and payload. `None` if it is the
    /// kernel's already, or another has its payload.
    pub(super) fn lend(&mut self) -> Option<*const u8> {
        if self.is_lent {
            return None;
        }
        let (head, body) = (self.head.as_mut()?, self.body.as_ref()?);
        let places = [head.address() as u64, HEAD_BYTES as u64, body.address() as u64, body.length() as u64];
        let Kind::Own(own) = &mut head.0 else { return None };
        for (place, word) in own.bytes()[PLACES].chunks_exact_mut(8).zip(places) {
            place.copy_from_slice(&word.to_ne_bytes());
        }
        self.is_lent = true;
        Some(head.address().wrapping_add(PLACES.start))
    }

    /// The kernel has given it back. Returns whether the completion is of this slot.
    pub(super) fn returned(&mut self, completion: &Completion) -> bool {
        let is_own = completion.user_data() == self.index as u64;
        self.is_lent &= !is_own;
        is_own
    }

    /// The request's head, copied.
    pub(super) fn head(&mut self) -> Option<Head> {
        let mut head = Head([0; HEAD_BYTES]);
        self.head.as_mut().filter(|_| !self.is_lent)?.copy_out(&mut head.0);
        Some(head)
    }

    /// Its payload, while it is here.
    pub(super) fn body(&mut self) -> Option<&mut Room> {
        self.body.as_mut().filter(|_| !self.is_lent)
    }

    /// Its payload, for a file system that answers later.
    pub(super) fn take_body(&mut self) -> Option<Room> {
        if self.is_lent { None } else { self.body.take() }
    }

    /// Its payload is back.
    pub(super) fn put_body(&mut self, body: Room) {
        debug_assert!(self.body.is_none() && !self.is_lent, "it has its payload");
        self.body.get_or_insert(body);
    }

    /// Writes the answer's head, for a payload of this length.
    pub(super) fn answer(&mut self, unique: u64, error: i32, length: usize) {
        let Some(Room(Kind::Own(own))) = self.head.as_mut().filter(|_| !self.is_lent) else { return };
        let bytes = own.bytes();
        let head = out_header(crate::abi::OUT_HEADER_BYTES + length, error, unique);
        bytes[..head.len()].copy_from_slice(&head);
        bytes[PAYLOAD_BYTES].copy_from_slice(&(length as u32).to_ne_bytes());
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        if self.is_lent {
            tracing::error!("the kernel has not given back memory of its ring: it is not freed");
            std::mem::forget((self.head.take(), self.body.take()));
        }
    }
}
