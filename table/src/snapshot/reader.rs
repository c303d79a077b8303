//! The reader of a snapshot: drives a peer and delivers verified slots in order. No I/O and no clock of its own.
//!
//! ```text
//!            ┌──────────────────────────── Plan ───────────────────────────┐
//!   line ──▶ │ published … next_wanted()                   deliver() order │ ──▶ next_slot() ──▶ release()
//!            └──────────┬──────────────────────────────────────────▲───────┘
//!                       ├─▶ Fetch:   pieces → entry → CRC, in a buffer of the sink ─┤   (any peer)
//!                       └─▶ InPlace: CRC over the view → entry ─────────────────────┘   (shm)
//! ```

use std::sync::Arc;

use remora_fabric::{Memory, Peer, View};

use super::fetch::{Fetch, Plan, SinkLayout};
use super::in_place::InPlace;
use super::slot::{Holder, Progress, Slot};
use crate::error::Error;
use crate::expectation::Expectation;
use crate::layout::State;

/// Reads one snapshot. See the drawing at the top of this file.
///
/// The caller's loop: [`pump`](Self::pump), then all of [`next_slot`](Self::next_slot), each used and
/// [`release`](Self::release)d. If nothing came, wait: with [`Peer::wait`], or, if
/// [`is_caught_up`](Self::is_caught_up), for as long as the source may need to publish another slot.
pub struct SnapshotReader {
    plan: Plan,
    fetch: Fetch,
    in_place: Option<InPlace>,
    unchanging: bool,
    /// Delivered and not released yet.
    lent: usize,
}

impl SnapshotReader {
    /// Creates a reader that begins at the first slot that the caller does not hold.
    ///
    /// `view`: the region itself, if the peer can provide it ([`Peer::view`]): slots are then verified and delivered in
    /// place. `held`: tells which slots the caller has already, from an earlier attempt at the same generation. These
    /// are neither read nor delivered, and the answer for a slot must never change.
    ///
    /// # Errors
    /// [`Error::Layout`]: the geometry is outside its limits, the sink or the view too small.
    pub fn new(
        view: Option<Arc<View>>,
        sink: Arc<Memory>,
        layout: SinkLayout,
        expect: Expectation,
        held: impl Fn(u64) -> bool + Send + 'static,
    ) -> Result<SnapshotReader, Error> {
        let geometry = expect.geometry.checked()?;
        layout.check(&sink, &geometry)?;
        // A table that is sealed or compressed is opened in the sink.
        let view = view.filter(|_| !expect.needs_opening());
        let in_place = view.map(|view| InPlace::new(view, &geometry, layout.buffers)).transpose()?;
        Ok(SnapshotReader {
            plan: Plan::new(expect, Box::new(held)),
            fetch: Fetch::new(sink, layout),
            in_place,
            unchanging: false,
            lent: 0,
        })
    }

    /// The source promises that no published slot's memory changes: slots delivered in place are then not summed. They
    /// are the writer's own bytes, which no transport has touched. Their entries are still checked.
    pub fn unchanging(mut self) -> SnapshotReader {
        self.unchanging = true;
        self.in_place = self.in_place.map(InPlace::unchanging);
        self
    }

    /// Slots that are compressed are delivered with their stored bytes too ([`Slot::encoded`]), for a caller that keeps
    /// them. That takes as many bytes more for each slot that is not released.
    pub fn keeping_encoded(mut self, keeping: bool) -> SnapshotReader {
        self.fetch.keep_encoded(keeping);
        self
    }

    /// Continues with another peer of the same table, after [`Error::Peer`]. Verified slots stay; slots that were on
    /// their way are read again. The former peer must be closed, so that none of its reads lands in the sink any more.
    ///
    /// # Errors
    /// [`Error::Layout`]: the view is too small.
    pub fn reconnect(&mut self, view: Option<Arc<View>>) -> Result<(), Error> {
        let buffers = self.fetch.buffers();
        self.plan.lost(self.fetch.reset());
        if let Some(lost) = self.in_place.take().and_then(|in_place| in_place.under_way()) {
            self.plan.lost(vec![lost]);
        }
        let view = view.filter(|_| !self.plan.expect.needs_opening());
        let in_place = view.map(|view| InPlace::new(view, self.plan.geometry(), buffers)).transpose()?;
        self.in_place = if self.unchanging { in_place.map(InPlace::unchanging) } else { in_place };
        Ok(())
    }

    /// Posts reads, takes those that have completed, verifies slots. Never blocks; computes at most the CRC of what
    /// arrived, or of one slot in place. Reads the line of the source at most once per call.
    ///
    /// # Errors
    /// [`Error::Peer`], [`Error::Fabric`]: get another peer and [`reconnect`](Self::reconnect). All others end this
    /// reader.
    pub fn pump(&mut self, peer: &mut dyn Peer) -> Result<(), Error> {
        match &mut self.in_place {
            Some(in_place) => in_place.pump(&mut self.plan, peer),
            None => self.fetch.pump(&mut self.plan, peer),
        }
    }

    /// The next verified slot, in order of the stream.
    pub fn next_slot(&mut self) -> Option<Slot> {
        let slot = self.plan.take()?;
        self.lent += 1;
        Some(slot)
    }

    /// The caller has used the slot.
    ///
    /// # Errors
    /// [`Error::Overrun`]: it was read in place and has been overwritten meanwhile. Discard what was made of it.
    pub fn release(&mut self, slot: Slot) -> Result<(), Error> {
        self.lent = self.lent.saturating_sub(1);
        match &slot.memory {
            Holder::Sink(_, buffer) => self.fetch.free(*buffer),
            Holder::View(_) | Holder::Copy(..) | Holder::Opened { .. } => slot.release_alone()?,
        }
        Ok(())
    }

    /// What is known about the snapshot so far.
    pub fn progress(&self) -> Progress {
        let line = self.plan.line();
        Progress {
            published: self.plan.published_slots(),
            end: line.and_then(|line| line.end).map(|end| self.plan.geometry().slots_for(end)),
            bytes_known: line.map_or(0, |line| line.published),
            state: line.map_or(State::Open, |line| line.state),
        }
    }

    /// Everything published so far has been delivered: only the source can bring more, so waiting for the peer is
    /// useless.
    pub fn is_caught_up(&self) -> bool {
        self.plan.line().is_some() && self.plan.is_drained() && self.plan.wants_news()
    }

    /// All slots have been delivered (or were held) and released, and no more will come.
    pub fn is_complete(&self) -> bool {
        self.lent == 0 && self.plan.is_drained() && self.plan.is_exhausted()
    }
}
