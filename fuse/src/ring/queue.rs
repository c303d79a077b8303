//! Queue: the requests that processes make on one processor, and the thread that serves them there.
//!
//! A slot goes round: registered once, then from the kernel with a request, and back with its answer, which is the
//! same call. A request whose answer is given later keeps its slot until then.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::thread::CpuSet;

use super::mailbox::{Body, Mailbox, Posted, RingLater, put};
use super::slot::{Completion, Room, Slot};
use super::uring::Uring;
use crate::abi::{InHeader, op};
use crate::answer::{Asked, LaterReplier, Replier, WRONG_LENGTH};
use crate::dispatch;
use crate::file_system::FileSystem;
use crate::payload::{Buffers, Sink};
use crate::request::{MOST_NAME_BYTES, MOST_TARGET_BYTES, parse, parse_write};

/// One processor's queue.
pub(crate) struct Queue {
    number: u16,
    uring: Uring,
    slots: Vec<Slot>,
    /// What each slot's answer is committed by, while its request is not answered.
    under_way: Vec<Option<u64>>,
    mailbox: Arc<Mailbox>,
    /// The payload of a request that is not a write: names.
    names: Vec<u8>,
    /// Completions that came while it was registered.
    early: Vec<Completion>,
    /// For long writes that a file system keeps.
    buffers: Arc<Buffers>,
}

/// The number of the poll for news. Slots have the numbers from 0 on.
const NEWS: u64 = u64::MAX;

/// Names and targets that one request has at most.
const MOST_TEXT_BYTES: usize = MOST_TARGET_BYTES + 2 * (MOST_NAME_BYTES + 1);

impl Queue {
    /// A queue with a slot for each room.
    pub(super) fn new(number: u16, rooms: Vec<Room>, buffers: Arc<Buffers>) -> io::Result<Queue> {
        let entries = (rooms.len() as u32 + 1).next_power_of_two();
        let slots: Vec<Slot> = rooms.into_iter().enumerate().map(|(index, room)| Slot::new(index, room)).collect();
        let (uring, mailbox) = (Uring::new(entries)?, Arc::new(Mailbox::new()?));
        let (under_way, names) = (vec![None; slots.len()], Vec::with_capacity(MOST_TEXT_BYTES));
        Ok(Queue { number, uring, slots, under_way, mailbox, names, early: Vec::new(), buffers })
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
    pub(crate) fn serve(&mut self, device: BorrowedFd<'_>, file_system: &dyn FileSystem) {
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
                    dispatch::write(file_system, &header, fields, data, &mut replier);
                }
                Err(errno) => replier.reply(header.unique, Err(errno)),
            }
            replier.given
        } else {
            self.names.resize(length.min(MOST_TEXT_BYTES), 0);
            body.copy_out(&mut self.names);
            let parsed = parse(&header, head.operation(), &self.names);
            let mut replier = RingReplier { mailbox, index, slot: Some(slot), given: None };
            dispatch::request(file_system, &header, parsed, &mut replier);
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
