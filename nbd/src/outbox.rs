//! Outbox: what waits to be sent on one connection, and who sends it.
//!
//! At any time one thread sends, the one that has set `sending`, and no thread holds the lock while it does:
//!
//! - the connection's own thread sends the answers that its requests got at once, all of them by one call;
//! - a thread that completes the only request under way sends the answer itself, as far as the socket takes it without
//!   waiting, so that a client with one request at a time waits for no further thread;
//! - otherwise the writer thread sends what has come together meanwhile.

use std::collections::VecDeque;
use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;

use crate::stream::Stream;

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
    pub(crate) fn admit(&self, bytes: usize) {
        self.lock().bytes += bytes;
        self.under_way.fetch_add(1, Ordering::Relaxed);
    }

    /// The answer to a request that was admitted with `room` bytes. Never waits.
    pub(crate) fn post(&self, head: Vec<u8>, data: Vec<Bytes>, room: usize) {
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
