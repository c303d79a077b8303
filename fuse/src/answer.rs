//! Answer: how a file system answers.
//!
//! Each call comes with an [`Answer`] of the kind that it wants. A file system that is done when the call returns
//! gives it there, in the caller's thread. One that is done later makes a [`Later`] of it and returns. It may give
//! this one from any thread, in any order; giving it waits for no other answer. An answer that is dropped says
//! `EIO`, so that no process waits for ever.

use std::marker::PhantomData;
use std::ops::Range;

use rustix::io::Errno;

use crate::payload::{Sink, SinkPlace};
use crate::reply::{Data, Listing, ListingPlus, Reply};

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
        let Asked { unique, most } = self.asked;
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
        let Asked { unique, most } = self.owed.asked;
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
