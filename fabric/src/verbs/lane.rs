//! The reader's data path: one queue pair, its credits, and what waits for them. Which read goes to which lane, and what a failure means
//! for the others, is `peer`'s business.
//!
//! ```text
//!   ask ─▶ held ── as far as the credits reach ─▶ posted ═ READ ═▶ completion queue ─▶ receive ─▶ (a credit is free again)
//! ```
//!
//! A queue pair completes its requests in the order in which they were posted, so that `posted` is a queue.

use std::{
    collections::VecDeque,
    os::fd::{AsFd, BorrowedFd},
    sync::Arc,
};

use super::{
    bindings as ffi,
    cm::{Events, Id},
    connector::{Parts, is_end},
    device::{Alarm, Device},
    library::text,
    objects::{Channel, Completed, Completions, QueuePair, Registration, RemoteRead},
};
use crate::{Denial, Error, ReadError};

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
    credits: u32,
    held: VecDeque<Piece>,
    posted: VecDeque<Piece>,
    /// Bytes asked for that are not here.
    outstanding: u64,
    taken: Vec<Completed>,
}

impl Lane {
    /// A lane after its handshake, of which no request is left over.
    pub(super) fn new(parts: Parts, id: Id, events: Arc<Events>, remote: Remote) -> Lane {
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
            credits: parts.queue_depth,
            held: VecDeque::new(),
            posted: VecDeque::new(),
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
    pub(super) fn remote(&self) -> Remote {
        self.remote
    }

    /// Enters a piece. [`Lane::flush`] posts it.
    pub(super) fn ask(&mut self, piece: Piece) {
        self.outstanding += u64::from(piece.length);
        self.held.push_back(piece);
    }

    /// Posts what the credits allow.
    pub(super) fn flush(&mut self) -> Result<(), ReadError> {
        let Some(pair) = &self.pair else { return Err(ReadError::PeerGone) };
        while self.credits > 0
            && let Some(piece) = self.held.pop_front()
        {
            let read = RemoteRead {
                name: piece.slot as u64,
                address: self.remote.base.wrapping_add(piece.offset),
                key: self.remote.key,
                length: piece.length,
                offset: piece.sink_offset,
            };
            if let Err(error) = pair.post_read(&read, &self.sink) {
                tracing::warn!(device = self.device.name(), %error, "a READ can't be posted");
                return Err(ReadError::PeerGone);
            }
            self.credits -= 1;
            self.posted.push_back(piece);
        }
        Ok(())
    }

    /// Takes completions, `budget` at most, and tells `done` the slot of each piece that has come. Says how many came.
    pub(super) fn receive(&mut self, budget: usize, mut done: impl FnMut(usize)) -> Result<usize, ReadError> {
        let mut came = 0;
        while came < budget {
            self.taken.clear();
            let polled = self.completions.poll(&mut self.taken);
            let count = polled.map_err(|error: Error| {
                tracing::warn!(device = self.device.name(), %error, "a queue pair is over");
                ReadError::PeerGone
            })?;
            for completed in &self.taken {
                // Only requests of the handshake have no piece, and those are over.
                let Some(piece) = self.posted.pop_front() else { continue };
                if completed.status != ffi::IBV_WC_SUCCESS {
                    return Err(self.failed(completed.status));
                }
                debug_assert_eq!(piece.slot as u64, completed.name, "requests complete in their order");
                self.credits += 1;
                self.outstanding -= u64::from(piece.length);
                done(piece.slot);
            }
            came += count;
            if count == 0 {
                break;
            }
        }
        Ok(came)
    }

    /// What the status of the first request that failed means. (The others are flushed.)
    fn failed(&self, status: ffi::ibv_wc_status) -> ReadError {
        // SAFETY: Any number has a name that lives for ever.
        let name = text(unsafe { (self.device.library().verbs.ibv_wc_status_str)(status) });
        tracing::info!(device = self.device.name(), status = name, "a READ has failed");
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
        self.device.attend();
        while let Some(event) = self.events.next() {
            if is_end(&event) {
                tracing::debug!(event = self.events.name_of(event.kind), "a queue pair's connection is over");
                return Err(ReadError::PeerGone);
            }
        }
        if self.alarm.has_rung() { Err(ReadError::PeerGone) } else { Ok(()) }
    }

    /// The end: the source is told, and when this returns the card has let go of the sink.
    pub(super) fn end(&mut self) {
        if let Some(pair) = self.pair.take() {
            self.id.disconnect();
            drop(pair);
        }
        self.held.clear();
        self.posted.clear();
    }
}
