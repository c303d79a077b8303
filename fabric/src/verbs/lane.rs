//! The reader's data path: one queue pair, its credits, and the pieces that wait for credits. `peer` distributes reads
//! over lanes and handles failures.
//!
//! ```text
//!   ask ─▶ held ── as far as the credits allow ─▶ posted ═ READ ═▶ completion queue ─▶ receive ─▶ (a credit is free again)
//!            └─ neighbours in the region become one READ, scattered over the sink
//! ```
//!
//! A queue pair completes its requests in the order of posting, so `posted` is a queue. Several small requests are
//! posted by one call, which writes to the card's doorbell once. Large ones are posted by a call each, because then the
//! doorbell costs nothing in comparison, and because Soft-RoCE overflows a queue of its own when it gets 16 large READs
//! at once.

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

/// What a READ names.
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
    /// The read of the peer that it belongs to.
    pub(super) slot: usize,
    /// Offset of the first byte, in the region.
    pub(super) offset: u64,
    /// Number of bytes.
    pub(super) length: u32,
    /// Offset in the sink for the first byte.
    pub(super) sink_offset: u64,
}

impl Piece {
    /// Offset of the byte after the piece. A range is checked before it is split, so that this does not overflow.
    fn end(&self) -> u64 {
        self.offset + u64::from(self.length)
    }
}

/// The parts of a lane.
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

/// A connection of a peer. Fields are dropped in this order: the queue pair first.
pub(super) struct Lane {
    /// `None` after the lane has ended; then no card writes to the sink.
    pair: Option<QueuePair>,
    id: Id,
    events: Arc<Events>,
    completions: Arc<Completions>,
    channel: Arc<Channel>,
    alarm: Arc<Alarm>,
    device: Arc<Device>,
    sink: Arc<Registration>,
    remote: Remote,
    /// Maximum number of segments of one READ.
    scatter: u32,
    /// Maximum size of one READ.
    longest: u32,
    credits: u32,
    batch: Batch,
    held: VecDeque<Piece>,
    /// Posted pieces, and the number of pieces of each posted request.
    posted: VecDeque<Piece>,
    requests: VecDeque<u32>,
    /// Requests posted since the lane was made.
    #[cfg(test)]
    pub(super) requests_posted: u64,
    /// Bytes requested that have not arrived.
    outstanding: u64,
    taken: Vec<Completed>,
}

impl Lane {
    /// A lane after its handshake, whose requests have all completed.
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

    /// Descriptors that become readable when the lane has something to do.
    pub(super) fn descriptors(&self) -> [BorrowedFd<'_>; 3] {
        [self.channel.as_fd(), self.events.as_fd(), self.alarm.as_fd()]
    }

    pub(super) fn device(&self) -> &Arc<Device> {
        &self.device
    }

    pub(super) fn outstanding(&self) -> u64 {
        self.outstanding
    }

    /// Makes the remote key invalid, for tests.
    #[cfg(test)]
    pub(super) fn spoil_key(&mut self) {
        self.remote.key ^= 0x5555_5500;
    }

    /// Posts a WRITE of the sink's bytes to the same place in the region, for tests. It is a request without pieces.
    #[cfg(test)]
    pub(super) fn post_write(&mut self, offset: u64, length: u32) {
        let address = self.remote.base.wrapping_add(offset);
        let write = RemoteRead { name: 0, address, key: self.remote.key, length, offset };
        self.pair().post_write(&write, &self.sink).expect("the card accepts the request");
        self.requests.push_back(0);
    }

    #[cfg(test)]
    pub(super) fn pair(&self) -> &QueuePair {
        self.pair.as_ref().expect("a lane that has not ended has one")
    }

    #[cfg(test)]
    pub(super) fn remote(&self) -> Remote {
        self.remote
    }

    /// Queues a piece. [`Lane::flush`] posts it.
    pub(super) fn ask(&mut self, piece: Piece) {
        self.outstanding += u64::from(piece.length);
        self.held.push_back(piece);
    }

    /// Posts as many requests as the credits allow: small ones together, large ones one by one.
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
                tracing::warn!(device = self.device.name(), %error, "cannot post a READ");
                return Err(ReadError::PeerGone);
            }
        }
        Ok(())
    }

    /// Makes one request of the first held piece and of those after it that are its neighbours in the region. Returns
    /// its number of bytes.
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

    /// Takes up to `budget` completions, and calls `done` with the slot of each piece that has arrived. Returns the
    /// number of completions.
    pub(super) fn receive(&mut self, budget: usize, mut done: impl FnMut(usize)) -> Result<usize, ReadError> {
        let mut came = 0;
        loop {
            self.taken.clear();
            let polled = self.completions.poll(&mut self.taken);
            let count = polled.map_err(|error| {
                tracing::warn!(device = self.device.name(), %error, "a queue pair has failed");
                ReadError::PeerGone
            })?;
            for completed in &self.taken {
                // Only requests of the handshake are not counted here, and they have completed.
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
            // Fewer than there was room for: the queue is empty.
            if count < BATCH || came >= budget {
                return Ok(came);
            }
        }
    }

    /// The error for the first request that failed. The others are flushed.
    fn failed(&self, status: ffi::ibv_wc_status) -> ReadError {
        tracing::info!(device = self.device.name(), status = status_name(status), "a READ has failed");
        match status {
            // Ranges are checked before they are posted: the key is no longer valid.
            ffi::IBV_WC_REM_ACCESS_ERR => ReadError::Denied(Denial::Revoked),
            _ => ReadError::PeerGone,
        }
    }

    /// Makes a descriptor readable at the next completion. Completions that have arrived before do not count.
    pub(super) fn arm(&self) -> Result<(), ReadError> {
        self.completions.arm().map_err(|_| ReadError::PeerGone)
    }

    /// Handles events other than completions: of the channel, of the device, and of the connection.
    pub(super) fn look(&self) -> Result<(), ReadError> {
        while self.channel.next().is_some() {}
        self.device.handle_events();
        while let Some(event) = self.events.next() {
            if is_end(&event) {
                tracing::debug!(event = self.events.name_of(event.kind), "the connection of a queue pair has ended");
                return Err(ReadError::PeerGone);
            }
        }
        if self.alarm.is_triggered() { Err(ReadError::PeerGone) } else { Ok(()) }
    }

    /// Ends the lane and notifies the source. When this returns, the card no longer accesses the sink.
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

/// A place outside the sink is a bug, because places are checked when reads are posted. The peer ends, and nothing is
/// written there.
fn outside(error: remora_rdma::Error) -> ReadError {
    tracing::error!(%error, "a READ would land outside its sink");
    ReadError::PeerGone
}

/// Maximum size of a request that is gathered from neighbours, and of all requests posted by one call. A 100 Gb/s link
/// takes 5 µs for it; a request and a write to the doorbell take a tenth of that each.
const SMALL_BYTES: u32 = 64 << 10;
