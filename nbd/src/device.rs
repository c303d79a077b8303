//! Device: what a block device must do, and how it answers.
//!
//! Each call comes with an [`Answer`]. A device that is done when the call returns gives it there, in the caller's
//! thread, and copies nothing twice. One that is done later makes a [`Later`] of it and returns. It may give this one
//! from any thread, in any order; giving it never waits. An answer that is dropped says `EIO`, so that no client waits
//! for ever.

use std::collections::VecDeque;
use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::{Duration, Instant};

use bytes::Bytes;

use crate::Geometry;
use crate::protocol::extent_flags::{HOLE, ZERO};
use crate::protocol::{Asked, Errno, Extent, Failure};
use crate::request::Zero;
use crate::stream::Stream;

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

// Memory: a device in this process's memory. What was never written, or trimmed, has none.

/// A device in memory. It answers at once.
pub struct MemoryDevice {
    size: u64,
    /// Each has its lock: requests of different connections rarely wait for each other.
    pages: Box<[RwLock<Page>]>,
}

/// [`PAGE_BYTES`] bytes, or zeros without memory.
type Page = Option<Box<[u8]>>;

impl MemoryDevice {
    /// A device of `size` bytes, all zeros.
    pub fn new(size: u64) -> MemoryDevice {
        let pages = size.div_ceil(PAGE_BYTES as u64);
        MemoryDevice { size, pages: (0..pages).map(|_| RwLock::default()).collect() }
    }

    fn read_page(&self, number: usize) -> RwLockReadGuard<'_, Page> {
        self.pages[number].read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write_page(&self, number: usize) -> RwLockWriteGuard<'_, Page> {
        self.pages[number].write().unwrap_or_else(PoisonError::into_inner)
    }

    fn clear(&self, at: u64, length: u32, keep: bool) {
        for Part { page, start, length } in parts(at, length) {
            let mut content = self.write_page(page);
            match &mut *content {
                Some(_) if length == PAGE_BYTES && !keep => *content = None,
                Some(bytes) => bytes[start..start + length].fill(0),
                None if keep => _ = content.get_or_insert_with(empty_page),
                None => {}
            }
        }
    }
}

impl Device for MemoryDevice {
    fn geometry(&self) -> Geometry {
        Geometry { fast_zero: true, has_status: true, ..Geometry::of_blocks(self.size, 1) }
    }

    fn read(&self, at: u64, length: u32, answer: Answer<'_>) {
        // One page needs no list of locks, and most requests are in one.
        let mut parts = parts(at, length).map(|part| (self.read_page(part.page), part));
        let Some(first) = parts.next() else { return answer.done() };
        let rest: Vec<_> = parts.collect();
        if first.0.is_none() && rest.iter().all(|(page, _)| page.is_none()) {
            return answer.hole();
        }
        answer.data(|sink| {
            for (page, Part { start, length, .. }) in std::iter::once(first).chain(rest) {
                match &*page {
                    Some(bytes) => sink.put(&bytes[start..start + length]),
                    None => sink.put_zeros(length),
                }
            }
        });
    }

    fn write(&self, at: u64, data: Payload<'_>, _: bool, answer: Answer<'_>) {
        let mut data = data.as_ref();
        for Part { page, start, length } in parts(at, data.len() as u32) {
            let (part, rest) = data.split_at(length);
            self.write_page(page).get_or_insert_with(empty_page)[start..start + length].copy_from_slice(part);
            data = rest;
        }
        answer.done();
    }

    fn zero(&self, at: u64, length: u32, how: Zero, answer: Answer<'_>) {
        self.clear(at, length, how.keep);
        answer.done();
    }

    fn trim(&self, at: u64, length: u32, _: bool, answer: Answer<'_>) {
        self.clear(at, length, false);
        answer.done();
    }

    fn flush(&self, answer: Answer<'_>) {
        answer.done();
    }

    fn status(&self, at: u64, length: u32, answer: Answer<'_>) {
        answer.extents(parts(at, length).map(|Part { page, length, .. }| {
            let flags = if self.read_page(page).is_some() { 0 } else { HOLE | ZERO };
            Extent { length: length as u32, flags }
        }));
    }
}

/// A part of a request: in one page.
struct Part {
    page: usize,
    start: usize,
    length: usize,
}

fn parts(at: u64, length: u32) -> impl Iterator<Item = Part> {
    let end = at + u64::from(length);
    let first = at / PAGE_BYTES as u64;
    (first..end.div_ceil(PAGE_BYTES as u64)).map(move |page| {
        let begin = page * PAGE_BYTES as u64;
        let (start, stop) = (at.max(begin), end.min(begin + PAGE_BYTES as u64));
        Part { page: page as usize, start: (start - begin) as usize, length: (stop - start) as usize }
    })
}

fn empty_page() -> Box<[u8]> {
    vec![0; PAGE_BYTES].into()
}

/// Large enough that a device of a terabyte has four million of them, small enough that holes are found.
const PAGE_BYTES: usize = 256 << 10;

// Outbox: what waits to be sent on one connection, and who sends it.
//
// At any time one thread sends, the one that has set `sending`, and no thread holds the lock while it does:
//
// - the connection's own thread sends the answers that its requests got at once, all of them by one call;
// - a thread that completes the only request under way sends the answer itself, as far as the socket takes it without
//   waiting, so that a client with one request at a time waits for no further thread;
// - otherwise the writer thread sends what has come together meanwhile.

pub(crate) struct Outbox {
    stream: Stream,
    state: Mutex<State>,
    changed: Condvar,
    /// Requests that are to be answered later, until their answers are sent. Changed under the lock only.
    under_way: AtomicUsize,
}

#[derive(Default)]
struct State {
    queue: VecDeque<Parcel>,
    /// A thread sends. Nothing else may be sent before it has finished.
    sending: bool,
    /// The connection has ended: nothing is sent any more.
    over: bool,
    /// Bytes of the requests under way.
    bytes: usize,
    /// Threads that wait for a change. Waking none costs a call of the system too.
    waiting: usize,
}

/// An answer that was given later.
struct Parcel {
    head: Vec<u8>,
    data: Vec<Bytes>,
    /// Bytes of both that were sent.
    sent: usize,
    /// The request's share of `bytes`.
    room: usize,
}

impl Parcel {
    /// What was not sent.
    fn pieces(&self) -> impl Iterator<Item = &[u8]> {
        let mut skip = self.sent;
        let pieces = std::iter::once(&self.head[..]).chain(self.data.iter().map(|piece| &piece[..]));
        pieces.filter_map(move |piece| {
            let skipped = skip.min(piece.len());
            skip -= skipped;
            if skipped < piece.len() { Some(&piece[skipped..]) } else { None }
        })
    }
}

impl Outbox {
    pub(crate) fn new(stream: Stream) -> Outbox {
        Outbox { stream, state: Mutex::default(), changed: Condvar::new(), under_way: AtomicUsize::new(0) }
    }

    pub(crate) fn stream(&self) -> &Stream {
        &self.stream
    }

    /// Sends these bytes, and what waits before them.
    pub(crate) fn send(&self, batch: &mut Vec<u8>) -> io::Result<()> {
        if batch.is_empty() {
            return Ok(());
        }
        let mut state = self.wait_while(self.lock(), |state| state.sending && !state.over);
        if state.over {
            return Err(io::ErrorKind::ConnectionAborted.into());
        }
        let waiting = self.begin(&mut state);
        drop(state);
        let result = match &waiting[..] {
            [] => self.stream.send(&[batch]),
            parcels => {
                let pieces: Vec<&[u8]> = parcels.iter().flat_map(Parcel::pieces).chain([&batch[..]]).collect();
                self.stream.send(&pieces)
            }
        };
        batch.clear();
        self.finish(&waiting, result.is_ok());
        result
    }

    /// Whether requests are under way that are to be answered later.
    pub(crate) fn has_under_way(&self) -> bool {
        self.under_way.load(Ordering::Relaxed) > 0
    }

    /// Waits until a request of this length may be under way beside the others. Any may if there are none. Returns
    /// whether the connection goes on.
    pub(crate) fn wait_for_room(&self, bytes: usize) -> bool {
        if !self.has_under_way() {
            return true;
        }
        let is_full = |state: &mut State| {
            let number = self.under_way.load(Ordering::Relaxed);
            number > 0 && !state.over && (number >= MOST_REQUESTS || state.bytes + bytes > MOST_BYTES)
        };
        !self.wait_while(self.lock(), is_full).over
    }

    /// A request of this length is to be answered later, by [`Outbox::post`].
    fn admit(&self, bytes: usize) {
        self.lock().bytes += bytes;
        self.under_way.fetch_add(1, Ordering::Relaxed);
    }

    /// The answer to a request that was admitted with `room` bytes. Never waits.
    fn post(&self, head: Vec<u8>, data: Vec<Bytes>, room: usize) {
        let parcel = Parcel { head, data, sent: 0, room };
        let mut state = self.lock();
        let is_alone = state.queue.is_empty() && self.under_way.load(Ordering::Relaxed) == 1;
        if state.over {
            return self.release(&mut state, &[parcel]);
        }
        state.queue.push_back(parcel);
        if !is_alone || state.sending || !self.stream.is_plain() {
            return self.tell(&state); // the writer, or the thread that sends already
        }
        let mut parcels = self.begin(&mut state);
        drop(state);
        let pieces: Vec<&[u8]> = parcels.iter().flat_map(Parcel::pieces).collect();
        let length: usize = pieces.iter().map(|piece| piece.len()).sum();
        match self.stream.send_now(&pieces) {
            Ok(sent) if sent < length => {
                parcels[0].sent = sent;
                let mut state = self.lock();
                state.sending = false;
                // Nothing is sent before the rest of this one.
                parcels.drain(..).rev().for_each(|parcel| state.queue.push_front(parcel));
                self.tell(&state);
            }
            result => self.finish(&parcels, result.is_ok()),
        }
    }

    /// Sends what waits, until the connection is over: the writer thread's work.
    pub(crate) fn write(&self) {
        loop {
            let is_idle = |state: &mut State| !state.over && (state.sending || state.queue.is_empty());
            let mut state = self.wait_while(self.lock(), is_idle);
            if state.over {
                return;
            }
            let parcels = self.begin(&mut state);
            drop(state);
            let pieces: Vec<&[u8]> = parcels.iter().flat_map(Parcel::pieces).collect();
            let result = self.stream.send(&pieces);
            if let Err(error) = &result {
                tracing::debug!("an NBD client does not take its answers: {error}");
            }
            self.finish(&parcels, result.is_ok());
        }
    }

    /// Waits until every request is answered, for as long as `limit`.
    pub(crate) fn drain(&self, limit: Duration) {
        let until = Instant::now() + limit;
        let mut state = self.lock();
        while self.has_under_way() && !state.over {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            state.waiting += 1;
            let waited = self.changed.wait_timeout(state, left);
            state = waited.map_or_else(|poison| poison.into_inner().0, |(state, _)| state);
            state.waiting -= 1;
        }
    }

    /// The connection is over. Answers to come are dropped.
    pub(crate) fn end(&self) {
        self.stream.shut_down();
        let mut state = self.lock();
        state.over = true;
        let parcels: Vec<Parcel> = state.queue.drain(..).collect();
        self.release(&mut state, &parcels);
    }

    fn begin(&self, state: &mut State) -> Vec<Parcel> {
        state.sending = true;
        state.queue.drain(..).collect()
    }

    fn finish(&self, sent: &[Parcel], is_well: bool) {
        let mut state = self.lock();
        state.sending = false;
        if !is_well {
            state.over = true;
            self.stream.shut_down();
        }
        self.release(&mut state, sent);
    }

    fn release(&self, state: &mut State, parcels: &[Parcel]) {
        state.bytes -= parcels.iter().map(|parcel| parcel.room).sum::<usize>();
        if !parcels.is_empty() {
            self.under_way.fetch_sub(parcels.len(), Ordering::Relaxed);
        }
        self.tell(state);
    }

    fn tell(&self, state: &State) {
        if state.waiting > 0 {
            self.changed.notify_all();
        }
    }

    fn wait_while<'a>(
        &self,
        mut state: MutexGuard<'a, State>,
        mut condition: impl FnMut(&mut State) -> bool,
    ) -> MutexGuard<'a, State> {
        while condition(&mut state) {
            state.waiting += 1;
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
            state.waiting -= 1;
        }
        state
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Requests of a connection under way: twice what QEMU and libnbd send, four times what Linux does.
pub const MOST_REQUESTS: usize = 512;

/// Bytes of a connection's requests under way: two of the longest.
pub const MOST_BYTES: usize = 64 << 20;

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
