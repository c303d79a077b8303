//! Uring: one io_uring, with the four things that are asked of it: register a slot, commit an answer, poll a
//! descriptor, wait.
//!
//! Its queues are in memory that the kernel shares. One thread uses them. An entry of the submission queue has 128
//! bytes, which are written field by field as `linux/io_uring.h` says.

use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use remora_memory::Memory;
use rustix::event::PollFlags;
use rustix::io_uring::{
    IORING_OFF_SQ_RING, IORING_OFF_SQES, IoringEnterFlags, IoringFeatureFlags, IoringOp, IoringSetupFlags,
    io_uring_enter, io_uring_params, io_uring_setup,
};
use rustix::mm::{MapFlags, ProtFlags};

use crate::abi::{IN_HEADER_BYTES, out_header};
use crate::answer::{Payload, Sink, SinkPlace};

/// An io_uring.
pub(super) struct Uring {
    ring: OwnedFd,
    queues: Map,
    entries: Map,
    layout: Layout,
    /// Entries that were put and that the kernel has not taken.
    put: u32,
}

/// Numbers of entries, and where in the queues things are.
struct Layout {
    submissions: u32,
    submission_tail: u32,
    array: usize,
    completions: u32,
    completion_head: u32,
    completion_tail: u32,
    completion: usize,
}

/// `FUSE_IO_URING_CMD_REGISTER`.
const REGISTER: u32 = 1;

/// `FUSE_IO_URING_CMD_COMMIT_AND_FETCH`.
const COMMIT_AND_FETCH: u32 = 2;

/// `IORING_POLL_ADD_MULTI`: a poll that stays.
const POLL_ADD_MULTI: u32 = 1;

/// `IORING_CQE_F_MORE`: further completions of the same entry will follow.
const MORE: u32 = 1 << 1;

/// Bytes of an entry, with `IORING_SETUP_SQE128`.
const ENTRY_BYTES: usize = 128;

/// Bytes of a completion.
const COMPLETION_BYTES: usize = 16;

impl Uring {
    /// With room for this number of entries.
    pub(super) fn new(entries: u32) -> io::Result<Uring> {
        let mut params = io_uring_params::default();
        params.flags = IoringSetupFlags::SQE128;
        // SAFETY: The kernel writes `params` alone. No flag makes it use memory or descriptors that are given there.
        let ring = unsafe { io_uring_setup(entries, &mut params) }?;
        if !params.features.contains(IoringFeatureFlags::SINGLE_MMAP) {
            return Err(io::Error::new(io::ErrorKind::Unsupported, "the kernel's io_uring is older than Linux 5.4"));
        }
        let layout = Layout {
            submissions: params.sq_entries,
            submission_tail: params.sq_off.tail,
            array: params.sq_off.array as usize,
            completions: params.cq_entries,
            completion_head: params.cq_off.head,
            completion_tail: params.cq_off.tail,
            completion: params.cq_off.cqes as usize,
        };
        let array_end = layout.array + layout.submissions as usize * size_of::<u32>();
        let completion_end = layout.completion + layout.completions as usize * COMPLETION_BYTES;
        let queues = Map::new(ring.as_fd(), array_end.max(completion_end), IORING_OFF_SQ_RING)?;
        let entries = Map::new(ring.as_fd(), layout.submissions as usize * ENTRY_BYTES, IORING_OFF_SQES)?;
        Ok(Uring { ring, queues, entries, layout, put: 0 })
    }

    /// Lends a slot to the kernel, for requests of a connection's queue. Returns whether it was put.
    pub(super) fn register(&mut self, device: BorrowedFd<'_>, queue: u16, slot: &mut Slot) -> bool {
        let Some(places) = self.has_room().then(|| slot.lend()).flatten() else { return false };
        self.put(&command(device, REGISTER, places as u64, 2, slot.index(), queue, 0));
        true
    }

    /// Gives the answer that is in a slot, and lends it again for the next request. Returns whether it was put.
    pub(super) fn commit(&mut self, device: BorrowedFd<'_>, queue: u16, slot: &mut Slot, commit_id: u64) -> bool {
        if !self.has_room() || slot.lend().is_none() {
            return false;
        }
        self.put(&command(device, COMMIT_AND_FETCH, 0, 0, slot.index(), queue, commit_id));
        true
    }

    /// Completes each time that the descriptor can be read anew, until a completion says that it was the last one
    /// ([`Completion::goes_on`]). Returns whether it was put.
    pub(super) fn poll(&mut self, descriptor: BorrowedFd<'_>, user_data: u64) -> bool {
        let has_room = self.has_room();
        if has_room {
            let mut entry = entry(IoringOp::PollAdd, descriptor, user_data);
            entry[24..28].copy_from_slice(&POLL_ADD_MULTI.to_ne_bytes());
            entry[28..32].copy_from_slice(&u32::from(PollFlags::IN.bits()).to_ne_bytes());
            self.put(&entry);
        }
        has_room
    }

    /// Has the kernel take what was put, and waits for `least` completions.
    pub(super) fn enter(&mut self, least: u32) -> io::Result<()> {
        // SAFETY: The kernel reads entries that were put: they refer to a slot that it was lent, whose memory
        // lives until it has completed the entry, or to a descriptor, by its number. It writes completions into
        // `queues`, which is mapped as long as the ring is open.
        match unsafe { io_uring_enter(&self.ring, self.put, least, IoringEnterFlags::GETEVENTS) } {
            Ok(taken) => self.put -= taken.min(self.put),
            Err(rustix::io::Errno::INTR | rustix::io::Errno::AGAIN | rustix::io::Errno::BUSY) => {}
            Err(errno) => return Err(errno.into()),
        }
        Ok(())
    }

    /// The next completion.
    pub(super) fn completed(&mut self) -> Option<Completion> {
        let layout = &self.layout;
        let (head, tail) = (self.queues.word(layout.completion_head)?, self.queues.word(layout.completion_tail)?);
        let at = head.load(Ordering::Relaxed); // this thread alone writes it
        if at == tail.load(Ordering::Acquire) {
            return None;
        }
        let place = layout.completion + (at & (layout.completions - 1)) as usize * COMPLETION_BYTES;
        let mut bytes = [0; COMPLETION_BYTES];
        self.queues.copy_out(place, &mut bytes);
        // The kernel may use the place again from now on.
        head.store(at.wrapping_add(1), Ordering::Release);
        let (user_data, rest) = bytes.split_at(8);
        let user_data = user_data.try_into().map_or(u64::MAX, u64::from_ne_bytes);
        let result = rest[..4].try_into().map_or(0, i32::from_ne_bytes);
        let flags = rest[4..].try_into().map_or(0, u32::from_ne_bytes);
        // SAFETY: The kernel has put it into the completion queue, as the tail says, and it is taken once. An entry
        // for a slot has one completion; only a poll has several, and its number is not a slot's.
        Some(unsafe { Completion::of_kernel(user_data, result, flags & MORE != 0) })
    }

    fn has_room(&self) -> bool {
        self.put < self.layout.submissions
    }

    /// Puts an entry. The caller has asked for room.
    fn put(&mut self, entry: &[u8; ENTRY_BYTES]) {
        let layout = &self.layout;
        let Some(tail) = self.queues.word(layout.submission_tail) else { return };
        let at = tail.load(Ordering::Relaxed); // this thread alone writes it
        let index = at & (layout.submissions - 1);
        self.entries.copy_in(index as usize * ENTRY_BYTES, entry);
        self.queues.copy_in(layout.array + index as usize * size_of::<u32>(), &index.to_ne_bytes());
        // The kernel sees the entry before it sees the tail.
        tail.store(at.wrapping_add(1), Ordering::Release);
        self.put += 1;
    }
}

fn entry(operation: IoringOp, descriptor: BorrowedFd<'_>, user_data: u64) -> [u8; ENTRY_BYTES] {
    let mut entry = [0; ENTRY_BYTES];
    entry[0] = operation as u8;
    entry[4..8].copy_from_slice(&descriptor.as_raw_fd().to_ne_bytes());
    entry[32..40].copy_from_slice(&user_data.to_ne_bytes());
    entry
}

/// A command of FUSE: `fuse_uring_cmd_req` is at byte 48.
fn command(
    device: BorrowedFd<'_>,
    command: u32,
    address: u64,
    length: u32,
    index: usize,
    queue: u16,
    commit_id: u64,
) -> [u8; ENTRY_BYTES] {
    let mut entry = entry(IoringOp::UringCmd, device, index as u64);
    entry[8..12].copy_from_slice(&command.to_ne_bytes());
    entry[16..24].copy_from_slice(&address.to_ne_bytes());
    entry[24..28].copy_from_slice(&length.to_ne_bytes());
    entry[56..64].copy_from_slice(&commit_id.to_ne_bytes());
    entry[64..66].copy_from_slice(&queue.to_ne_bytes());
    entry
}

/// Memory of the ring that is shared with the kernel. It is accessed by copies and by atomic words, never by
/// references to plain bytes.
struct Map {
    start: NonNull<u8>,
    length: usize,
}

// SAFETY: A mapping belongs to the process, and any thread may access and remove it.
unsafe impl Send for Map {}

impl Map {
    fn new(ring: BorrowedFd<'_>, length: usize, offset: u64) -> io::Result<Map> {
        let (protection, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED | MapFlags::POPULATE);
        // SAFETY: The address is null, so the system chooses a free place and replaces no mapping. The ring is
        // open, and has this number of bytes at this offset, as its parameters say; the system refuses more.
        let start = unsafe { rustix::mm::mmap(std::ptr::null_mut(), length, protection, flags, ring, offset) }?;
        let start = NonNull::new(start.cast()).ok_or(io::ErrorKind::AddrNotAvailable)?;
        Ok(Map { start, length })
    }

    /// A word. `None` if it is not inside, or not aligned: the kernel does not give such an offset.
    fn word(&self, offset: u32) -> Option<&AtomicU32> {
        let offset = offset as usize;
        if offset.checked_add(size_of::<u32>()).is_none_or(|end| end > self.length) {
            return None;
        }
        let place = self.start.as_ptr().wrapping_add(offset).cast::<u32>();
        if !place.is_aligned() {
            return None;
        }
        // SAFETY: Aligned and inside the mapping, as just checked, which lives as long as the reference. This
        // process accesses it by atomics alone, and the kernel in the same way.
        Some(unsafe { AtomicU32::from_ptr(place) })
    }

    fn copy_in(&self, offset: usize, bytes: &[u8]) {
        assert!(
            offset.checked_add(bytes.len()).is_some_and(|end| end <= self.length),
            "the kernel's queues are longer"
        );
        let place = self.start.as_ptr().wrapping_add(offset);
        // SAFETY: The source is a slice, and the destination is inside the mapping, as just checked. They do not
        // overlap, as no slice points into it. The kernel does not read these bytes before the tail says so.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), place, bytes.len()) };
    }

    fn copy_out(&self, offset: usize, into: &mut [u8]) {
        assert!(offset.checked_add(into.len()).is_some_and(|end| end <= self.length), "the kernel's queues are longer");
        let place = self.start.as_ptr().wrapping_add(offset);
        // SAFETY: The source is inside the mapping, as just checked, and the destination is a slice. They do not
        // overlap. The kernel does not write these bytes before the head says so.
        unsafe { std::ptr::copy_nonoverlapping(place, into.as_mut_ptr(), into.len()) };
    }
}

impl Drop for Map {
    fn drop(&mut self) {
        // SAFETY: `new` has mapped exactly these bytes, and no other code unmaps them. References into them borrow
        // the map.
        let unmapped = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.length) };
        debug_assert!(unmapped.is_ok(), "unmapping what we mapped");
    }
}

// Slot: memory in which the kernel puts one request after the other, and finds the answers.
//
// At any time a slot's memory is either the kernel's, from [`Slot::lend`] to the completion that the kernel gives
// for it, or ours. **Only while it is ours is it accessed here, and only then is it freed.** Memory that is still
// the kernel's when its slot is dropped is never freed: that costs memory once, and a write of the kernel hits
// nothing else.

/// `fuse_uring_req_header`: the request's head or the answer's, the operation's fields, and what belongs to the
/// ring.
const HEAD_BYTES: usize = 288;

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
    unsafe fn of_kernel(user_data: u64, result: i32, goes_on: bool) -> Completion {
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
    fn lend(&mut self) -> Option<*const u8> {
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
