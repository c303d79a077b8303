//! The reader's data path: one queue pair, its credits, and what waits for them. Which read goes to which lane, and what a failure means
//! for the others, is `peer`'s business.
//!
//! ```text
//!   ask ─▶ held ── as far as the credits reach ─▶ posted ═ READ ═▶ completion queue ─▶ receive ─▶ (a credit is free again)
//!            └─ neighbours in the region become one READ, scattered over the sink
//! ```
//!
//! A queue pair completes its requests in the order in which they were posted, so that `posted` is a queue. Small requests go to
//! the card by one call for several, which costs one ring of its doorbell; large ones by a call each, as then the ring is nothing beside them,
//! and a card in software (Soft-RoCE) that is told of 16 large READs at once has the answers overflow a queue of its own.

use std::{
    collections::VecDeque,
    os::fd::{AsFd, BorrowedFd},
    sync::Arc,
};

use remora_rdma::{
    bindings as ffi,
    cm::{Events, Id, is_end},
    device::{Alarm, Device},
    objects::{BATCH, Batch, Channel, Completed, Completions, QueuePair, Registration, RemoteRead},
    status_name,
};

use crate::{Denial, ReadError};

/// What a READ has to name.
#[derive(Clone, Copy, Debug)]
pub(super) struct Remote {
    /// The key of the region.
    pub(super) key: u32,
    /// The address of its first byte.
    pub(super) base: u64,
}

/// A piece of a read.
#[derive(Clone, Copy, Debug)]
pub(super) struct Piece {
    /// Which read of the peer it belongs to.
    pub(super) slot: usize,
    /// First byte, in the region.
    pub(super) offset: u64,
    /// Bytes.
    pub(super) length: u32,
    /// Where it lands, in the sink.
    pub(super) sink_offset: u64,
}

impl Piece {
    /// The byte of the region that follows it. A range is checked before it is cut into pieces, so that nothing overflows.
    fn end(&self) -> u64 {
        self.offset + u64::from(self.length)
    }
}

/// What a lane is made of.
pub(super) struct Parts {
    pub(super) pair: QueuePair,
    pub(super) channel: Arc<Channel>,
    pub(super) completions: Arc<Completions>,
    pub(super) buffer: Arc<Registration>,
    pub(super) alarm: Arc<Alarm>,
    pub(super) sink: Arc<Registration>,
    pub(super) queue_depth: u32,
    pub(super) scatter: u32,
}

/// One connection of a peer. Fields go in this order: the queue pair before what it stands on.
pub(super) struct Lane {
    /// Gone when the lane has ended; then no card writes into the sink any more.
    pair: Option<QueuePair>,
    id: Id,
    events: Arc<Events>,
    completions: Arc<Completions>,
    channel: Arc<Channel>,
    alarm: Arc<Alarm>,
    device: Arc<Device>,
    sink: Arc<Registration>,
    remote: Remote,
    /// Places that one READ may be scattered over.
    scatter: u32,
    /// Bytes of one READ, at most.
    longest: u32,
    credits: u32,
    batch: Batch,
    held: VecDeque<Piece>,
    /// Pieces that are on their way, and of how many of them each request is made up.
    posted: VecDeque<Piece>,
    requests: VecDeque<u32>,
    /// Requests ever posted.
    #[cfg(test)]
    pub(super) requests_posted: u64,
    /// Bytes asked for that are not here.
    outstanding: u64,
    taken: Vec<Completed>,
}

impl Lane {
    /// A lane after its handshake, of which no request is left over.
    pub(super) fn new(parts: Parts, id: Id, events: Arc<Events>, remote: Remote, longest: u32) -> Lane {
        let device = parts.sink.domain().device().clone();
        Lane {
            pair: Some(parts.pair),
            id,
            events,
            completions: parts.completions,
            channel: parts.channel,
            alarm: parts.alarm,
            device,
            sink: parts.sink,
            remote,
            scatter: parts.scatter,
            longest,
            credits: parts.queue_depth,
            batch: Batch::default(),
            held: VecDeque::new(),
            posted: VecDeque::new(),
            requests: VecDeque::new(),
            #[cfg(test)]
            requests_posted: 0,
            outstanding: 0,
            taken: Vec::new(),
        }
    }

    /// What becomes readable when there is something to do here.
    pub(super) fn descriptors(&self) -> [BorrowedFd<'_>; 3] {
        [self.channel.as_fd(), self.events.as_fd(), self.alarm.as_fd()]
    }

    pub(super) fn device(&self) -> &Arc<Device> {
        &self.device
    }

    pub(super) fn outstanding(&self) -> u64 {
        self.outstanding
    }

    /// See [`VerbsPeer`](super::VerbsPeer)'s own, for tests.
    #[cfg(test)]
    pub(super) fn spoil_key(&mut self) {
        self.remote.key ^= 0x5555_5500;
    }

    #[cfg(test)]
    pub(super) fn pair(&self) -> &QueuePair {
        self.pair.as_ref().expect("a lane that has not ended has one")
    }

    #[cfg(test)]
    pub(super) fn remote(&self) -> Remote {
        self.remote
    }

    /// Enters a piece. [`Lane::flush`] posts it.
    pub(super) fn ask(&mut self, piece: Piece) {
        self.outstanding += u64::from(piece.length);
        self.held.push_back(piece);
    }

    /// Posts what the credits allow: small requests together, large ones each by itself.
    pub(super) fn flush(&mut self) -> Result<(), ReadError> {
        while self.credits > 0 && !self.held.is_empty() {
            let mut bytes = 0;
            while self.credits > 0
                && self.batch.len() < BATCH
                && let Some(next) = self.held.front()
                && (bytes == 0 || bytes + next.length <= SMALL_BYTES)
            {
                bytes += self.gather()?;
            }
            let Some(pair) = &self.pair else { return Err(ReadError::PeerGone) };
            if let Err(error) = pair.post_reads(&mut self.batch) {
                tracing::warn!(device = self.device.name(), %error, "a READ can't be posted");
                return Err(ReadError::PeerGone);
            }
        }
        Ok(())
    }

    /// Makes one request of the first piece that is held and of those after it that are its neighbours in the region; gives its bytes.
    fn gather(&mut self) -> Result<u32, ReadError> {
        let Some(first) = self.held.pop_front() else { return Ok(0) };
        let read = RemoteRead {
            name: first.slot as u64,
            address: self.remote.base.wrapping_add(first.offset),
            key: self.remote.key,
            length: first.length,
            offset: first.sink_offset,
        };
        self.batch.add(&read, &self.sink).map_err(outside)?;
        self.posted.push_back(first);
        let (mut pieces, mut end, mut bytes) = (1, first.end(), first.length);
        while pieces < self.scatter
            && let Some(next) = self.held.front().copied()
            && next.offset == end
            && bytes + next.length <= self.longest.min(SMALL_BYTES)
        {
            self.held.pop_front();
            self.batch.extend(&self.sink, next.sink_offset, next.length).map_err(outside)?;
            self.posted.push_back(next);
            (pieces, end, bytes) = (pieces + 1, next.end(), bytes + next.length);
        }
        self.requests.push_back(pieces);
        self.credits -= 1;
        #[cfg(test)]
        {
            self.requests_posted += 1;
        }
        Ok(bytes)
    }

    /// Takes completions, `budget` at most, and tells `done` the slot of each piece that has come. Says how many came.
    pub(super) fn receive(&mut self, budget: usize, mut done: impl FnMut(usize)) -> Result<usize, ReadError> {
        let mut came = 0;
        loop {
            self.taken.clear();
            let polled = self.completions.poll(&mut self.taken);
            let count = polled.map_err(|error| {
                tracing::warn!(device = self.device.name(), %error, "a queue pair is over");
                ReadError::PeerGone
            })?;
            for completed in &self.taken {
                // Only requests of the handshake are not counted here, and those are over.
                let Some(pieces) = self.requests.pop_front() else { continue };
                if completed.status != ffi::IBV_WC_SUCCESS {
                    return Err(self.failed(completed.status));
                }
                self.credits += 1;
                for piece in self.posted.drain(..(pieces as usize).min(self.posted.len())) {
                    self.outstanding -= u64::from(piece.length);
                    done(piece.slot);
                }
            }
            came += count;
            // Less than there was room for: the queue was empty.
            if count < BATCH || came >= budget {
                return Ok(came);
            }
        }
    }

    /// What the status of the first request that failed means. (The others are flushed.)
    fn failed(&self, status: ffi::ibv_wc_status) -> ReadError {
        tracing::info!(device = self.device.name(), status = status_name(status), "a READ has failed");
        match status {
            // Ranges are checked before they are posted: it is the key that is none any more.
            ffi::IBV_WC_REM_ACCESS_ERR => ReadError::Denied(Denial::Revoked),
            _ => ReadError::PeerGone,
        }
    }

    /// From now on the next completion makes a descriptor readable. What has come before does not.
    pub(super) fn arm(&self) -> Result<(), ReadError> {
        self.completions.arm().map_err(|_| ReadError::PeerGone)
    }

    /// Takes what else there is to hear: that completions wait, that the connection has ended, that the device has something to say.
    pub(super) fn look(&self) -> Result<(), ReadError> {
        while self.channel.next().is_some() {}
        self.device.handle_events();
        while let Some(event) = self.events.next() {
            if is_end(&event) {
                tracing::debug!(event = self.events.name_of(event.kind), "a queue pair's connection is over");
                return Err(ReadError::PeerGone);
            }
        }
        if self.alarm.is_triggered() { Err(ReadError::PeerGone) } else { Ok(()) }
    }

    /// The end: the source is told, and when this returns the card has let go of the sink.
    pub(super) fn end(&mut self) {
        if let Some(pair) = self.pair.take() {
            self.id.disconnect();
            drop(pair);
        }
        self.held.clear();
        self.posted.clear();
        self.requests.clear();
    }
}

/// A place outside the sink: a bug, since places are checked when reads are posted. The peer ends, and nothing is written there.
fn outside(error: remora_rdma::Error) -> ReadError {
    tracing::error!(%error, "a READ would land outside its sink");
    ReadError::PeerGone
}

/// Up to so many bytes are asked for by one request that is gathered from neighbours, and by one call. Sending so much takes a 100 Gb/s link
/// 5 µs, beside which neither a request nor a ring of the doorbell, each a tenth of one, can be seen.
const SMALL_BYTES: u32 = 64 << 10;
