//! Device: what a block device must do, and how it answers.
//!
//! Each call comes with an [`Answer`]. A device that is done when the call returns gives it there, in the caller's
//! thread, and copies nothing twice. One that is done later makes a [`Later`] of it and returns. It may give this one
//! from any thread, in any order; giving it never waits. An answer that is dropped says `EIO`, so that no client waits
//! for ever.

use std::sync::Arc;

use bytes::Bytes;

use crate::export::Geometry;
use crate::outbox::Outbox;
pub use crate::outbox::{MOST_BYTES, MOST_REQUESTS};
use crate::protocol::{Asked, Errno, Extent, Failure};
use crate::request::Zero;

/// A block device. Requests are checked: they lie inside it, and are of whole blocks. Many are under way at once, from
/// many threads. Neither their order nor what becomes of overlapping ones is said, as with any disk.
pub trait Device: Send + Sync {
    /// Its size, and what it can do. Never changes.
    fn geometry(&self) -> Geometry;

    /// Reads.
    fn read(&self, at: u64, length: u32, answer: Answer<'_>);

    /// Writes. With `fua` it is done when the bytes are safe.
    fn write(&self, at: u64, data: Payload<'_>, fua: bool, answer: Answer<'_>);

    /// Writes zeros.
    fn zero(&self, at: u64, length: u32, how: Zero, answer: Answer<'_>);

    /// The content is not needed any more. What is read afterwards is up to the device.
    fn trim(&self, at: u64, length: u32, fua: bool, answer: Answer<'_>);

    /// Done when every write is safe that was done before.
    fn flush(&self, answer: Answer<'_>);

    /// Says what is a hole: extents from `at` on. Asked only if [`Geometry::has_status`] is set.
    fn status(&self, _at: u64, length: u32, answer: Answer<'_>) {
        answer.extents([Extent { length, flags: 0 }]);
    }
}

/// The bytes of a write.
#[derive(Debug)]
pub enum Payload<'a> {
    /// In the connection's buffer, until the call returns.
    Borrowed(&'a [u8]),
    /// A long write has memory of its own.
    Owned(Vec<u8>),
}

impl Payload<'_> {
    /// The bytes, for as long as wanted. Short ones are copied.
    pub fn into_bytes(self) -> Bytes {
        match self {
            Payload::Borrowed(bytes) => Bytes::copy_from_slice(bytes),
            Payload::Owned(bytes) => bytes.into(),
        }
    }
}

impl AsRef<[u8]> for Payload<'_> {
    fn as_ref(&self) -> &[u8] {
        match self {
            Payload::Borrowed(bytes) => bytes,
            Payload::Owned(bytes) => bytes,
        }
    }
}

/// The answer to a request, to be given before the call returns.
pub struct Answer<'a> {
    asked: Asked,
    /// One extent, however many there are.
    one: bool,
    /// Bytes that it moves: its share of what may be under way.
    room: usize,
    /// The answers of the requests that have arrived together.
    batch: &'a mut Vec<u8>,
    outbox: &'a Arc<Outbox>,
    is_given: bool,
}

impl<'a> Answer<'a> {
    pub(crate) fn new(asked: Asked, room: usize, batch: &'a mut Vec<u8>, outbox: &'a Arc<Outbox>) -> Answer<'a> {
        Answer { asked, one: false, room, batch, outbox, is_given: false }
    }

    /// Of one extent at most.
    pub(crate) fn of_one_extent(mut self, one: bool) -> Answer<'a> {
        self.one = one;
        self
    }

    /// It is done.
    pub fn done(mut self) {
        self.is_given = true;
        self.asked.done(self.batch);
    }

    /// It failed.
    pub fn fail(mut self, failure: &Failure) {
        self.is_given = true;
        self.asked.fail(failure, self.batch);
    }

    /// The bytes that were read: `fill` puts as many as were asked for.
    pub fn data(mut self, fill: impl FnOnce(&mut Sink<'_>)) {
        self.is_given = true;
        let before = self.batch.len();
        self.asked.data(self.batch);
        let wanted = self.batch.len() + self.asked.length as usize;
        fill(&mut Sink(self.batch));
        if self.batch.len() != wanted {
            self.batch.truncate(before);
            self.asked.fail(&WRONG_LENGTH, self.batch);
        }
    }

    /// All bytes that were to be read are zeros.
    pub fn hole(mut self) {
        self.is_given = true;
        self.asked.hole(self.batch);
    }

    /// What [`Device::status`] was asked for. Neighbours of one kind become one; what lies behind the place that was
    /// asked about is left out.
    pub fn extents(mut self, extents: impl IntoIterator<Item = Extent>) {
        self.is_given = true;
        describe(&self.asked, self.one, extents, self.batch);
    }

    /// The answer is given later.
    pub fn later(mut self) -> Later {
        self.is_given = true;
        self.outbox.admit(self.room);
        Later { asked: self.asked, one: self.one, room: self.room, outbox: Some(Arc::clone(self.outbox)) }
    }
}

impl Drop for Answer<'_> {
    fn drop(&mut self) {
        if !self.is_given {
            self.asked.fail(&NO_ANSWER, self.batch);
        }
    }
}

/// Where the bytes of a read go.
pub struct Sink<'a>(&'a mut Vec<u8>);

impl Sink<'_> {
    /// The next bytes.
    pub fn put(&mut self, bytes: &[u8]) {
        self.0.extend_from_slice(bytes);
    }

    /// The next bytes are zeros.
    pub fn put_zeros(&mut self, count: usize) {
        self.0.resize(self.0.len() + count, 0);
    }
}

/// The answer to a request, to be given from any thread. See [`Answer`].
pub struct Later {
    asked: Asked,
    /// One extent, however many there are.
    one: bool,
    room: usize,
    /// `None`: it was given.
    outbox: Option<Arc<Outbox>>,
}

impl Later {
    /// It is done.
    pub fn done(mut self) {
        self.give(Vec::new(), |asked, head| asked.done(head));
    }

    /// It failed.
    pub fn fail(mut self, failure: &Failure) {
        self.give(Vec::new(), |asked, head| asked.fail(failure, head));
    }

    /// The bytes that were read, as many as were asked for, in pieces.
    pub fn data(mut self, data: Vec<Bytes>) {
        let is_whole = data.iter().map(Bytes::len).sum::<usize>() == self.asked.length as usize;
        if is_whole {
            self.give(data, |asked, head| asked.data(head));
        } else {
            self.give(Vec::new(), |asked, head| asked.fail(&WRONG_LENGTH, head));
        }
    }

    /// What [`Device::status`] was asked for: as [`Answer::extents`].
    pub fn extents(mut self, extents: impl IntoIterator<Item = Extent>) {
        let one = self.one;
        self.give(Vec::new(), |asked, out| describe(asked, one, extents, out));
    }

    fn give(&mut self, data: Vec<Bytes>, say: impl FnOnce(&Asked, &mut Vec<u8>)) {
        let Some(outbox) = self.outbox.take() else { return };
        let mut head = Vec::with_capacity(HEAD_BYTES);
        say(&self.asked, &mut head);
        outbox.post(head, data, self.room);
    }
}

impl Drop for Later {
    fn drop(&mut self) {
        self.give(Vec::new(), |asked, head| asked.fail(&NO_ANSWER, head));
    }
}

/// Says what was found, or that it was nothing.
fn describe(asked: &Asked, one: bool, extents: impl IntoIterator<Item = Extent>, out: &mut Vec<u8>) {
    let extents = joined(extents, asked.length, if one { 1 } else { MOST_EXTENTS });
    if extents.is_empty() {
        return asked.fail(&WRONG_LENGTH, out);
    }
    asked.extents(&extents, out);
}

fn joined(extents: impl IntoIterator<Item = Extent>, length: u32, most: usize) -> Vec<Extent> {
    let (mut joined, mut left) = (Vec::<Extent>::new(), length);
    for Extent { length, flags } in extents {
        let length = length.min(left);
        left -= length;
        let is_full = joined.len() == most;
        match joined.last_mut() {
            _ if length == 0 => {}
            Some(last) if last.flags == flags => last.length += length,
            _ if is_full => break,
            _ => joined.push(Extent { length, flags }),
        }
    }
    joined
}

const NO_ANSWER: Failure = Failure { errno: Errno::Io, text: std::borrow::Cow::Borrowed("the device gave no answer") };
const WRONG_LENGTH: Failure =
    Failure { errno: Errno::Io, text: std::borrow::Cow::Borrowed("the device gave the wrong number of bytes") };

/// Extents of one answer: 32 KiB. A client asks again behind them.
const MOST_EXTENTS: usize = 4096;

/// The head of data, the longest without a text.
const HEAD_BYTES: usize = 32;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// What each byte is, of so many.
    fn bytes(extents: &[Extent], most: u32) -> Vec<u32> {
        let bytes = extents.iter().flat_map(|extent| std::iter::repeat_n(extent.flags, extent.length as usize));
        bytes.take(most as usize).collect()
    }

    proptest! {
        /// A client is told the truth of a first part of what it asked about, in as few extents as there can be.
        #[test]
        fn extents_that_are_joined_say_the_same_of_the_first_bytes(
            extents in prop::collection::vec((0..20_u32, 0..4_u32), 0..20), length in 1..200_u32, most in 1..8_usize
        ) {
            let extents: Vec<Extent> = extents.into_iter().map(|(length, flags)| Extent { length, flags }).collect();
            let said = joined(extents.iter().copied(), length, most);
            let (all, told) = (bytes(&extents, length), bytes(&said, u32::MAX));
            prop_assert!(said.len() <= most && all.starts_with(&told), "{said:?}");
            prop_assert!(said.len() == most || told.len() == all.len(), "only too many extents are left out: {said:?}");
            let is_split = said.windows(2).any(|pair| pair[0].flags == pair[1].flags);
            prop_assert!(!is_split && said.iter().all(|extent| extent.length > 0), "{said:?}");
        }
    }
}
