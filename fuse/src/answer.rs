//! How a file system answers, and the bytes of writes and reads, wherever the transport has them.

use std::borrow::Cow;
use std::marker::PhantomData;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use remora_memory::Memory;
use rustix::io::Errno;

use crate::reply::{Data, Listing, ListingPlus, Reply};

// How a file system answers.
//
// Each call comes with an [`Answer`] of the kind that it wants. A file system that is done when the call returns
// gives it there, in the caller's thread. One that is done later makes a [`Later`] of it and returns. It may give
// this one from any thread, in any order; giving it waits for no other answer. An answer that is dropped says
// `EIO`, so that no process waits for ever.

/// The answer to a request, to be given before the call returns.
pub struct Answer<'a, R> {
    owed: Owed<&'a mut dyn Replier>,
    reply: PhantomData<fn(R)>,
}

/// The answer to a request, to be given from any thread. See [`Answer`].
pub struct Later<R> {
    owed: Owed<Box<dyn LaterReplier>>,
    reply: PhantomData<fn(R)>,
}

/// What an answer must know of its request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Asked {
    /// Its number.
    pub(crate) unique: u64,
    /// The thread that waits; 0 if it is not known here.
    pub(crate) process: u32,
    /// Bytes of the answer, at most, without its head.
    pub(crate) most: usize,
}

/// Takes the answer to one request. Called once.
pub(crate) trait Replier {
    /// An answer in pieces, or an error.
    fn reply(&mut self, unique: u64, answer: Result<&[&[u8]], Errno>);

    /// An answer that is written where the transport has memory for it: at most as many bytes.
    fn fill(&mut self, asked: Asked, fill: &mut dyn FnMut(&mut Sink<'_>));

    /// The answer is given later.
    fn later(&mut self) -> Box<dyn LaterReplier>;
}

/// Takes the answer to one request, from any thread.
pub(crate) trait LaterReplier: Send {
    /// An answer in pieces, or an error.
    fn reply(self: Box<Self>, unique: u64, answer: Result<&[&[u8]], Errno>);

    /// Where the bytes of a read can be put by others, in the memory that the caller provided.
    fn place(&self) -> Option<Range<u64>> {
        None
    }

    /// They are there: this number of bytes, from the place's start.
    fn landed(self: Box<Self>, unique: u64, _length: usize) {
        self.reply(unique, Err(Errno::IO));
    }
}

/// An answer that is owed, with the one who takes it. If it is dropped, it says `EIO`.
struct Owed<T: Takes> {
    /// `None`: it was given.
    to: Option<T>,
    asked: Asked,
}

/// Takes the answer to one request, and is of no use afterwards.
trait Takes {
    fn take(self, unique: u64, answer: Result<&[&[u8]], Errno>);
}

impl Takes for &mut dyn Replier {
    fn take(self, unique: u64, answer: Result<&[&[u8]], Errno>) {
        self.reply(unique, answer);
    }
}

impl Takes for Box<dyn LaterReplier> {
    fn take(self, unique: u64, answer: Result<&[&[u8]], Errno>) {
        self.reply(unique, answer);
    }
}

impl<T: Takes> Owed<T> {
    fn give(mut self, result: Result<impl Reply, Errno>) {
        let Asked { unique, most, .. } = self.asked;
        match (self.to.take(), result) {
            (Some(to), Ok(reply)) => reply.pieces(|pieces| to.take(unique, checked(pieces, most))),
            (Some(to), Err(errno)) => to.take(unique, Err(errno)),
            (None, _) => {}
        }
    }
}

impl<T: Takes> Drop for Owed<T> {
    fn drop(&mut self) {
        if let Some(to) = self.to.take() {
            to.take(self.asked.unique, Err(NO_ANSWER));
        }
    }
}

impl<'a, R: Reply> Answer<'a, R> {
    pub(crate) fn new(asked: Asked, replier: &'a mut dyn Replier) -> Answer<'a, R> {
        Answer { owed: Owed { to: Some(replier), asked }, reply: PhantomData }
    }

    /// The request's number, which [`crate::FileSystem::interrupt`] says again.
    pub fn unique(&self) -> u64 {
        self.owed.asked.unique
    }

    /// It is done, and this is what was asked for.
    pub fn give(self, reply: R) {
        self.owed.give(Ok(reply));
    }

    /// It failed.
    pub fn fail(self, errno: Errno) {
        self.result(Err(errno));
    }

    /// One of both.
    pub fn result(self, result: Result<R, Errno>) {
        self.owed.give(result);
    }

    /// The answer is given later.
    pub fn later(mut self) -> Later<R> {
        let to = self.owed.to.take().map(|replier| replier.later());
        Later { owed: Owed { to, asked: self.owed.asked }, reply: PhantomData }
    }
}

impl Answer<'_, Data> {
    /// The bytes that were read: `fill` puts at most as many as were asked for. They are written where the transport
    /// has memory for them.
    pub fn fill(mut self, fill: impl FnOnce(&mut Sink<'_>)) {
        let mut fill = Some(fill);
        if let Some(replier) = self.owed.to.take() {
            replier.fill(self.owed.asked, &mut |sink| {
                if let Some(fill) = fill.take() {
                    fill(sink);
                }
            });
        }
    }
}

impl Answer<'_, Listing> {
    /// An empty listing with the room that the answer has.
    pub fn listing(&self) -> Listing {
        Listing::new(self.owed.asked.most)
    }
}

impl Answer<'_, ListingPlus> {
    /// An empty listing with the room that the answer has.
    pub fn listing(&self) -> ListingPlus {
        ListingPlus::new(self.owed.asked.most)
    }
}

impl<R: Reply> Later<R> {
    /// As [`Answer::unique`].
    pub fn unique(&self) -> u64 {
        self.owed.asked.unique
    }

    /// The thread that waits for it; 0 if it is not visible here.
    pub fn process(&self) -> u32 {
        self.owed.asked.process
    }

    /// As [`Answer::give`].
    pub fn give(self, reply: R) {
        self.owed.give(Ok(reply));
    }

    /// As [`Answer::fail`].
    pub fn fail(self, errno: Errno) {
        self.result(Err(errno));
    }

    /// As [`Answer::result`].
    pub fn result(self, result: Result<R, Errno>) {
        self.owed.give(result);
    }
}

impl<R: Reply> Later<R> {
    /// Calls a method that wants an [`Answer`], in a thread that may wait in it.
    pub fn answer_by(mut self, call: impl FnOnce(Answer<'_, R>)) {
        if let Some(replier) = self.owed.to.take() {
            let mut once = Once(Some(replier));
            call(Answer::new(self.owed.asked, &mut once));
        }
    }
}

/// A replier for later, now.
struct Once(Option<Box<dyn LaterReplier>>);

impl Replier for Once {
    fn reply(&mut self, unique: u64, answer: Result<&[&[u8]], Errno>) {
        if let Some(replier) = self.0.take() {
            replier.reply(unique, answer);
        }
    }

    fn fill(&mut self, asked: Asked, fill: &mut dyn FnMut(&mut Sink<'_>)) {
        let mut filled = vec![0; asked.most];
        let mut sink = Sink::new(SinkPlace::Slice(&mut filled), asked.most);
        fill(&mut sink);
        match sink.finish() {
            Some(length) => self.reply(asked.unique, Ok(&[&filled[..length]])),
            None => self.reply(asked.unique, Err(WRONG_LENGTH)),
        }
    }

    fn later(&mut self) -> Box<dyn LaterReplier> {
        // It is there: an answer takes one thing from its replier, once.
        self.0.take().unwrap_or_else(|| Box::new(Nowhere))
    }
}

/// Takes an answer that was given already.
struct Nowhere;

impl LaterReplier for Nowhere {
    fn reply(self: Box<Self>, _: u64, _: Result<&[&[u8]], Errno>) {}
}

impl Later<Data> {
    /// Where the bytes may be put, in the memory that the caller provided ([`crate::SessionOptions::memory`]): by a
    /// copy, a device, or another host. They are given by [`Later::landed`], or all the same by [`Later::give`].
    /// `None` if the answer is not made in that memory.
    pub fn place(&self) -> Option<Range<u64>> {
        self.owed.to.as_ref().and_then(|replier| replier.place())
    }

    /// This number of bytes is at the place's start, at most as many as were asked for. Nothing writes there any more.
    pub fn landed(mut self, length: usize) {
        let Asked { unique, most, .. } = self.owed.asked;
        match self.owed.to.take() {
            Some(replier) if length <= most => replier.landed(unique, length),
            Some(replier) => replier.reply(unique, Err(WRONG_LENGTH)),
            None => {}
        }
    }
}

impl Later<Listing> {
    /// An empty listing with the room that the answer has.
    pub fn listing(&self) -> Listing {
        Listing::new(self.owed.asked.most)
    }
}

impl Later<ListingPlus> {
    /// An empty listing with the room that the answer has.
    pub fn listing(&self) -> ListingPlus {
        ListingPlus::new(self.owed.asked.most)
    }
}

fn checked<'p, 'b>(pieces: &'p [&'b [u8]], most: usize) -> Result<&'p [&'b [u8]], Errno> {
    let length = pieces.iter().map(|piece| piece.len()).sum::<usize>();
    if length <= most { Ok(pieces) } else { Err(WRONG_LENGTH) }
}

/// The file system has dropped the answer.
const NO_ANSWER: Errno = Errno::IO;

/// The file system has given more than was asked for.
pub(crate) const WRONG_LENGTH: Errno = Errno::IO;

// The bytes of a write, wherever the transport has them, and where the bytes of a read go.

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
