//! Ring: requests and answers by io_uring, where the kernel has it (Linux 6.14) and its administrator allows it.
//!
//! ```text
//!   process on processor 1 ──▶ queue 1: slot, slot, slot … ──▶ thread 1, on processor 1 ──▶ file system
//!                          ◀────────── committed ───────────────╯ ◀── mailbox ◀── answers of other threads
//! ```
//!
//! The kernel has a queue for each processor and hands a request over on the processor on which it was made, without
//! waking another one. The answer and the wait for the next request are one call of the system.
//!
//! In reading order: all rings of a session, one queue and its thread, and answers that are given later. `uring`
//! has the system's part, and memory that the kernel and this process have in turn: it has the unsafe code.
//!
//! The device is served as well: the kernel sends by it that inodes are forgotten and requests interrupted.
//!
//! A thread that waits in a call of the file system makes the requests of its processor wait, so a file system
//! that does not answer from memory answers later.

#[allow(unsafe_code)]
mod uring;

use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use remora_memory::Memory;
use rustix::event::EventfdFlags;
use rustix::io::Errno;
use rustix::thread::CpuSet;

use crate::abi::{InHeader, LEAST_READ_BYTES, op};
use crate::answer::{Asked, Buffers, LaterReplier, Replier, Sink, WRONG_LENGTH};
use crate::file_system::{self, FileSystem};
use crate::negotiation::page_bytes;
use crate::request::{MOST_NAME_BYTES, MOST_TARGET_BYTES, MOST_VALUE_BYTES, is_of_xattrs, parse, parse_write};
use uring::{Completion, Room, Slot, Uring};

/// The queues of a connection, before they are registered, and the longest request for which they have room.
pub(crate) struct Rings {
    pub(crate) queues: Vec<Queue>,
    pub(crate) most_bytes: u32,
}

impl Rings {
    /// Makes them, with payloads in this memory if it is given.
    ///
    /// # Errors
    /// What the system says, or that the memory is too small.
    pub(crate) fn new(most_bytes: u32, memory: Option<&Arc<Memory>>) -> io::Result<Rings> {
        let processors = processors()?;
        let budget = memory.map_or(MOST_PAYLOAD_BYTES, |memory| memory.length());
        let Some((depth, most_bytes)) = shape(processors, most_bytes, budget) else {
            return Err(io::Error::other(format!(
                "{budget} bytes are too little memory for the payloads of {processors} processors"
            )));
        };
        let room_bytes = u64::from(most_bytes).max(LEAST_READ_BYTES as u64);
        let buffers = Buffers::new(most_bytes as usize);
        let queue = |number: u16| {
            let first = u64::from(number) * depth;
            let rooms = (first..first + depth).map(|room| match memory {
                Some(memory) => Room::provided(memory, room * room_bytes..(room + 1) * room_bytes),
                None => Room::own(room_bytes as usize),
            });
            Queue::new(number, rooms.collect(), Arc::clone(&buffers))
        };
        Ok(Rings { queues: (0..processors).map(queue).collect::<io::Result<_>>()?, most_bytes })
    }
}

/// Slots of each processor, and the longest request, for payloads of that many bytes in all. `None`: it is too little.
fn shape(processors: u16, most_bytes: u32, budget: u64) -> Option<(u64, u32)> {
    let each = budget / u64::from(processors.max(1));
    let room_bytes = u64::from(most_bytes).max(LEAST_READ_BYTES as u64);
    if each >= room_bytes {
        return Some(((each / room_bytes).min(MOST_DEPTH), most_bytes));
    }
    let shorter = u32::try_from(each).ok()? / page_bytes() * page_bytes();
    (shorter >= LEAST_REQUEST_BYTES).then_some((1, shorter))
}

/// Processors that this system may ever have, for each of which the kernel has a queue.
fn processors() -> io::Result<u16> {
    let list = std::fs::read_to_string("/sys/devices/system/cpu/possible")?;
    let last = list.trim().rsplit([',', '-']).next().and_then(|last| last.parse::<u16>().ok());
    let count = last.and_then(|last| last.checked_add(1));
    count.ok_or_else(|| io::Error::other(format!("the system's list of processors is not understood: {list}")))
}

/// Memory for payloads, at most, if the caller gives none: 64 MiB.
const MOST_PAYLOAD_BYTES: u64 = 64 << 20;

/// Slots of a processor at most: requests that processes have under way there at a time. More wait in the kernel.
const MOST_DEPTH: u64 = 8;

/// On machines with many processors, requests are shorter, but not shorter than this: 64 KiB.
const LEAST_REQUEST_BYTES: u32 = 64 << 10;

// The requests that processes make on one processor, and the thread that serves them there.
//
// A slot goes round: registered once, then from the kernel with a request, and back with its answer, which is the
// same call. A request whose answer is given later keeps its slot until then.

/// One processor's queue.
pub(crate) struct Queue {
    number: u16,
    uring: Uring,
    slots: Vec<Slot>,
    /// What each slot's answer is committed by, while its request is not answered.
    under_way: Vec<Option<u64>>,
    mailbox: Arc<Mailbox>,
    /// The payload of a request that is not a write: names, and values of extended attributes.
    names: Vec<u8>,
    /// Extended attributes are agreed.
    has_xattrs: bool,
    /// Completions that came while it was registered.
    early: Vec<Completion>,
    /// For long writes that a file system keeps.
    buffers: Arc<Buffers>,
}

/// The number of the poll for news. Slots have the numbers from 0 on.
const NEWS: u64 = u64::MAX;

/// Bytes of names, targets and values that one request has at most.
const MOST_TEXT_BYTES: usize = MOST_VALUE_BYTES + MOST_NAME_BYTES + 1;

const _: () = assert!(MOST_TARGET_BYTES + MOST_NAME_BYTES < MOST_TEXT_BYTES);

impl Queue {
    /// A queue with a slot for each room.
    fn new(number: u16, rooms: Vec<Room>, buffers: Arc<Buffers>) -> io::Result<Queue> {
        let entries = (rooms.len() as u32 + 1).next_power_of_two();
        let slots: Vec<Slot> = rooms.into_iter().enumerate().map(|(index, room)| Slot::new(index, room)).collect();
        let (uring, mailbox) = (Uring::new(entries)?, Arc::new(Mailbox::new()?));
        let (under_way, names) = (vec![None; slots.len()], Vec::new());
        Ok(Queue { number, uring, slots, under_way, mailbox, names, has_xattrs: false, early: Vec::new(), buffers })
    }

    pub(crate) fn mailbox(&self) -> &Arc<Mailbox> {
        &self.mailbox
    }

    /// Registers the slots, in the thread that will serve them.
    pub(crate) fn register(&mut self, device: BorrowedFd<'_>) -> io::Result<()> {
        let mut here = CpuSet::new();
        here.set(usize::from(self.number));
        // A container may not allow it. Then requests are handed from one processor to another.
        let _ = rustix::thread::sched_setaffinity(None, &here);
        for slot in &mut self.slots {
            self.uring.register(device, self.number, slot);
        }
        let mailbox = Arc::clone(&self.mailbox);
        self.uring.poll(mailbox.news().as_fd(), NEWS);
        self.uring.enter(0)?;
        // A refusal is there at once. A request may be, too.
        while let Some(completion) = self.uring.completed() {
            self.early.push(completion);
        }
        let refused = |completion: &&Completion| completion.user_data() != NEWS && completion.result() < 0;
        let Some(refused) = self.early.iter().find(refused).map(Completion::result) else { return Ok(()) };
        for completion in std::mem::take(&mut self.early) {
            self.returned(&completion);
        }
        Err(io::Error::from_raw_os_error(-refused))
    }

    /// Serves requests until the connection is over.
    pub(crate) fn serve(&mut self, device: BorrowedFd<'_>, file_system: &dyn FileSystem, has_xattrs: bool) {
        self.has_xattrs = has_xattrs;
        let mut goes_on = true;
        for completion in std::mem::take(&mut self.early) {
            goes_on &= self.complete(&completion, device, file_system);
        }
        while goes_on {
            if let Err(error) = self.uring.enter(1) {
                tracing::error!(queue = self.number, "a ring of FUSE has failed: {error}");
                break;
            }
            while let Some(completion) = self.uring.completed() {
                goes_on &= self.complete(&completion, device, file_system);
            }
        }
        self.collect();
    }

    /// Returns whether the connection goes on.
    fn complete(&mut self, completion: &Completion, device: BorrowedFd<'_>, file_system: &dyn FileSystem) -> bool {
        if completion.user_data() == NEWS {
            return self.news(completion.goes_on(), device);
        }
        let Some(index) = self.returned(completion) else { return true };
        match completion.result() {
            0 => self.request(index, device, file_system),
            result => {
                tracing::debug!(queue = self.number, index, result, "a slot of a FUSE ring has ended");
                return self.slots.iter().any(Slot::is_lent);
            }
        }
        true
    }

    /// Takes back the slot that a completion is about.
    fn returned(&mut self, completion: &Completion) -> Option<usize> {
        let index = usize::try_from(completion.user_data()).ok().filter(|index| *index < self.slots.len())?;
        self.slots[index].returned(completion).then_some(index)
    }

    /// Commits what other threads have answered. `is_polled`: the kernel will tell of the next news, too.
    fn news(&mut self, is_polled: bool, device: BorrowedFd<'_>) -> bool {
        let mailbox = Arc::clone(&self.mailbox);
        let (posted, goes_on) = mailbox.take();
        for Posted { index, unique, result, room } in posted {
            if let Some(room) = room {
                self.slots[index].put_body(room);
            }
            self.commit(index, unique, result, device);
        }
        if goes_on && !is_polled {
            self.put_when_there_is_room(|queue| queue.uring.poll(mailbox.news().as_fd(), NEWS));
        }
        goes_on
    }

    /// Has the request in a slot done.
    fn request(&mut self, index: usize, device: BorrowedFd<'_>, file_system: &dyn FileSystem) {
        let slot = &mut self.slots[index];
        let Some(head) = slot.head() else { return };
        self.under_way[index] = Some(head.commit_id());
        let Some(header) = InHeader::decode(head.request()) else {
            return self.commit(index, 0, Err(Errno::IO), device);
        };
        let length = head.payload_bytes();
        let Some(body) = slot.body().filter(|body| length <= body.length()) else {
            return self.commit(index, header.unique, Err(Errno::INVAL), device);
        };
        let mailbox = &self.mailbox;
        let given = if header.opcode == op::WRITE {
            let mut replier = RingReplier { mailbox, index, slot: None, given: None };
            match parse_write(&header, head.operation(), length) {
                Ok(fields) => {
                    let data = body.payload(fields.size as usize).kept_in(&self.buffers);
                    file_system::write(file_system, &header, fields, data, &mut replier);
                }
                Err(errno) => replier.reply(header.unique, Err(errno)),
            }
            replier.given
        } else {
            self.names.resize(length.min(MOST_TEXT_BYTES), 0);
            body.copy_out(&mut self.names);
            let parsed = match self.has_xattrs || !is_of_xattrs(header.opcode) {
                true => parse(&header, head.operation(), &self.names),
                false => Err(Errno::NOSYS),
            };
            let mut replier = RingReplier { mailbox, index, slot: Some(slot), given: None };
            file_system::request(file_system, &header, parsed, &mut replier);
            replier.given
        };
        match given {
            Some(Given::Now(result)) => self.commit(index, header.unique, result, device),
            Some(Given::Later) => {}
            // Such requests have no answer, and come by the device. The slot must go round all the same.
            None => self.commit(index, header.unique, Err(Errno::NOSYS), device),
        }
    }

    /// Gives an answer, and the slot with it.
    fn commit(&mut self, index: usize, unique: u64, result: Result<Body, Errno>, device: BorrowedFd<'_>) {
        let Some(commit_id) = self.under_way[index].take() else { return };
        let slot = &mut self.slots[index];
        let result = result.and_then(|body| match body {
            Body::InPlace(length) => Ok(length),
            Body::Bytes(bytes) => match put(slot.body(), &[&bytes]) {
                Ok(Body::InPlace(length)) => Ok(length),
                _ => Err(WRONG_LENGTH),
            },
        });
        match result {
            Ok(length) => slot.answer(unique, 0, length),
            Err(errno) => slot.answer(unique, -errno.raw_os_error(), 0),
        }
        let number = self.number;
        self.put_when_there_is_room(|queue| queue.uring.commit(device, number, &mut queue.slots[index], commit_id));
    }

    /// There are as many entries as slots and one for the poll, so there is room, at the latest when the kernel has
    /// taken what was put before.
    fn put_when_there_is_room(&mut self, mut put: impl FnMut(&mut Queue) -> bool) {
        if !put(self) && self.uring.enter(0).is_ok() && !put(self) {
            tracing::error!(queue = self.number, "a slot of a FUSE ring is lost");
        }
    }

    /// The connection is over: waits until the kernel has given every slot back.
    fn collect(&mut self) {
        let until = Instant::now() + COLLECT_LIMIT;
        while self.slots.iter().any(Slot::is_lent) && Instant::now() < until {
            if self.uring.enter(0).is_err() {
                return;
            }
            let mut is_idle = true;
            while let Some(completion) = self.uring.completed() {
                is_idle = false;
                self.returned(&completion);
            }
            if is_idle {
                std::thread::sleep(LOOK_AGAIN);
            }
        }
    }
}

/// What has become of an answer.
enum Given {
    Now(Result<Body, Errno>),
    Later,
}

/// Answers in the queue's thread, or not yet.
struct RingReplier<'a> {
    mailbox: &'a Arc<Mailbox>,
    index: usize,
    /// `None` for a write: its payload is what is written, and stays there.
    slot: Option<&'a mut Slot>,
    given: Option<Given>,
}

impl Replier for RingReplier<'_> {
    fn reply(&mut self, _: u64, answer: Result<&[&[u8]], Errno>) {
        let room = self.slot.as_mut().and_then(|slot| slot.body());
        self.given = Some(Given::Now(answer.and_then(|pieces| put(room, pieces))));
    }

    fn fill(&mut self, asked: Asked, fill: &mut dyn FnMut(&mut Sink<'_>)) {
        let Some(room) = self.slot.as_mut().and_then(|slot| slot.body()) else { return };
        let mut sink = room.sink(asked.most);
        fill(&mut sink);
        let result = sink.finish().map(Body::InPlace).ok_or(WRONG_LENGTH);
        self.given = Some(Given::Now(result));
    }

    fn later(&mut self) -> Box<dyn LaterReplier> {
        self.given = Some(Given::Later);
        let room = self.slot.as_mut().and_then(|slot| slot.take_body());
        Box::new(RingLater { mailbox: Arc::clone(self.mailbox), index: self.index, room })
    }
}

/// How long the kernel may take to give slots back when the connection is over. It does so at once.
const COLLECT_LIMIT: Duration = Duration::from_secs(3);

/// How often it is looked whether it has.
const LOOK_AGAIN: Duration = Duration::from_millis(1);

// Answers that other threads give to requests of a ring.
//
// The ring's own thread commits them. A thread that commits has the kernel do the slot's next requests in it, also
// after it has returned to its own work; if it ends, the slot is lost.

/// An answer that was given later.
struct Posted {
    index: usize,
    unique: u64,
    result: Result<Body, Errno>,
    /// The payload that the answer had with it.
    room: Option<Room>,
}

/// What an answer consists of.
enum Body {
    /// These bytes.
    Bytes(Vec<u8>),
    /// So many bytes, which are in the slot's payload.
    InPlace(usize),
}

pub(crate) struct Mailbox {
    state: Mutex<State>,
    /// An eventfd: each write to it is news. It is never read, which would be a system call for each answer: the ring
    /// polls it for writes, not for what it counts.
    news: OwnedFd,
}

#[derive(Default)]
struct State {
    posted: Vec<Posted>,
    is_closed: bool,
}

impl Mailbox {
    fn new() -> io::Result<Mailbox> {
        let news = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Mailbox { state: Mutex::default(), news })
    }

    fn news(&self) -> &OwnedFd {
        &self.news
    }

    /// What was posted, and whether more can be.
    fn take(&self) -> (Vec<Posted>, bool) {
        let mut state = self.state();
        (std::mem::take(&mut state.posted), !state.is_closed)
    }

    /// The connection is over. Answers to come are dropped.
    pub(crate) fn close(&self) {
        self.state().is_closed = true;
        self.tell();
    }

    fn post(&self, posted: Posted) {
        let mut state = self.state();
        if state.is_closed {
            return;
        }
        state.posted.push(posted);
        let is_first = state.posted.len() == 1;
        drop(state);
        if is_first {
            self.tell();
        }
    }

    fn tell(&self) {
        // It is full after 2^64 writes.
        let _ = rustix::io::write(&self.news, &1_u64.to_ne_bytes());
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Answers in any thread.
struct RingLater {
    mailbox: Arc<Mailbox>,
    index: usize,
    /// The slot's payload, for answers that are put there.
    room: Option<Room>,
}

impl LaterReplier for RingLater {
    fn reply(mut self: Box<Self>, unique: u64, answer: Result<&[&[u8]], Errno>) {
        let result = answer.and_then(|pieces| put(self.room.as_mut(), pieces));
        let RingLater { mailbox, index, room } = *self;
        mailbox.post(Posted { index, unique, result, room });
    }

    fn place(&self) -> Option<Range<u64>> {
        self.room.as_ref().and_then(Room::place)
    }

    fn landed(self: Box<Self>, unique: u64, length: usize) {
        let fits = self.room.as_ref().is_some_and(|room| room.place().is_some() && length <= room.length());
        let result = if fits { Ok(Body::InPlace(length)) } else { Err(WRONG_LENGTH) };
        let RingLater { mailbox, index, room } = *self;
        mailbox.post(Posted { index, unique, result, room });
    }
}

/// Puts an answer into the payload, if it is here, or else into bytes of its own.
fn put(room: Option<&mut Room>, pieces: &[&[u8]]) -> Result<Body, Errno> {
    let Some(room) = room else { return Ok(Body::Bytes(pieces.concat())) };
    let mut sink = room.sink(usize::MAX);
    pieces.iter().for_each(|piece| sink.put(piece));
    sink.finish().map(Body::InPlace).ok_or(WRONG_LENGTH)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn payloads_fit_their_budget() {
        assert_eq!(shape(2, 1 << 20, 64 << 20), Some((8, 1 << 20)));
        assert_eq!(shape(16, 1 << 20, 64 << 20), Some((4, 1 << 20)));
        assert_eq!(shape(128, 1 << 20, 64 << 20), Some((1, 512 << 10)));
        assert_eq!(shape(1024, 1 << 20, 64 << 20), Some((1, 64 << 10)));
        assert_eq!(shape(1025, 1 << 20, 64 << 20), None);
        assert_eq!(shape(2, 4096, 1 << 20), Some((8, 4096)), "in rooms of 8 KiB");
        assert!(processors().is_ok_and(|count| count > 0));
    }
}
