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
    /// `None`: it was given.
    replier: Option<&'a mut dyn Replier>,
    asked: Asked,
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

impl<'a, R: Reply> Answer<'a, R> {
    pub(crate) fn new(asked: Asked, replier: &'a mut dyn Replier) -> Answer<'a, R> {
        Answer { replier: Some(replier), asked, reply: PhantomData }
    }

    /// The request's number, which [`crate::FileSystem::interrupt`] says again.
    pub fn unique(&self) -> u64 {
        self.asked.unique
    }

    /// It is done, and this is what was asked for.
    pub fn give(mut self, reply: R) {
        let most = self.asked.most;
        if let Some(replier) = self.replier.take() {
            reply.pieces(|pieces| replier.reply(self.asked.unique, checked(pieces, most)));
        }
    }

    /// It failed.
    pub fn fail(mut self, errno: Errno) {
        if let Some(replier) = self.replier.take() {
            replier.reply(self.asked.unique, Err(errno));
        }
    }

    /// One of both.
    pub fn result(self, result: Result<R, Errno>) {
        match result {
            Ok(reply) => self.give(reply),
            Err(errno) => self.fail(errno),
        }
    }

    /// The answer is given later.
    pub fn later(mut self) -> Later<R> {
        let replier = self.replier.take().map(|replier| replier.later());
        Later { replier, asked: self.asked, reply: PhantomData }
    }
}

impl Answer<'_, Data> {
    /// The bytes that were read: `fill` puts at most as many as were asked for. They are written where the transport
    /// has memory for them.
    pub fn fill(mut self, fill: impl FnOnce(&mut Sink<'_>)) {
        let mut fill = Some(fill);
        if let Some(replier) = self.replier.take() {
            replier.fill(self.asked, &mut |sink| {
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
        Listing::new(self.asked.most)
    }
}

impl Answer<'_, ListingPlus> {
    /// An empty listing with the room that the answer has.
    pub fn listing(&self) -> ListingPlus {
        ListingPlus::new(self.asked.most)
    }
}

impl<R> Drop for Answer<'_, R> {
    fn drop(&mut self) {
        if let Some(replier) = self.replier.take() {
            replier.reply(self.asked.unique, Err(NO_ANSWER));
        }
    }
}

/// The answer to a request, to be given from any thread. See [`Answer`].
pub struct Later<R> {
    /// `None`: it was given.
    replier: Option<Box<dyn LaterReplier>>,
    asked: Asked,
    reply: PhantomData<fn(R)>,
}

impl<R: Reply> Later<R> {
    /// The request's number, which [`crate::FileSystem::interrupt`] says again.
    pub fn unique(&self) -> u64 {
        self.asked.unique
    }

    /// It is done, and this is what was asked for.
    pub fn give(mut self, reply: R) {
        let most = self.asked.most;
        if let Some(replier) = self.replier.take() {
            reply.pieces(|pieces| replier.reply(self.asked.unique, checked(pieces, most)));
        }
    }

    /// It failed.
    pub fn fail(mut self, errno: Errno) {
        if let Some(replier) = self.replier.take() {
            replier.reply(self.asked.unique, Err(errno));
        }
    }

    /// One of both.
    pub fn result(self, result: Result<R, Errno>) {
        match result {
            Ok(reply) => self.give(reply),
            Err(errno) => self.fail(errno),
        }
    }
}

impl<R: Reply> Later<R> {
    /// Calls a method that wants an [`Answer`], in a thread that may wait in it.
    pub fn answer_by(mut self, call: impl FnOnce(Answer<'_, R>)) {
        if let Some(replier) = self.replier.take() {
            let mut once = Once(Some(replier));
            call(Answer::new(self.asked, &mut once));
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
        self.replier.as_ref().and_then(|replier| replier.place())
    }

    /// So many bytes are at the place's start, at most as many as were asked for. Nothing writes there any more.
    pub fn landed(mut self, length: usize) {
        let (unique, most) = (self.asked.unique, self.asked.most);
        match self.replier.take() {
            Some(replier) if length <= most => replier.landed(unique, length),
            Some(replier) => replier.reply(unique, Err(WRONG_LENGTH)),
            None => {}
        }
    }
}

impl Later<Listing> {
    /// An empty listing with the room that the answer has.
    pub fn listing(&self) -> Listing {
        Listing::new(self.asked.most)
    }
}

impl Later<ListingPlus> {
    /// An empty listing with the room that the answer has.
    pub fn listing(&self) -> ListingPlus {
        ListingPlus::new(self.asked.most)
    }
}

impl<R> Drop for Later<R> {
    fn drop(&mut self) {
        if let Some(replier) = self.replier.take() {
            replier.reply(self.asked.unique, Err(NO_ANSWER));
        }
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
