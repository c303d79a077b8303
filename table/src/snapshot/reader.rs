//! The reader of a snapshot: drives a peer and delivers verified slots in order. No I/O and no clock of its own.
//!
//! ```text
//!            ┌──────────────────────────── Plan ───────────────────────────┐
//!   line ──▶ │ published … next_wanted()                   deliver() order │ ──▶ next_slot() ──▶ release()
//!            └──────────┬──────────────────────────────────────────▲───────┘
//!                       ├─▶ Fetch:   pieces → entry → CRC, in a buffer of the sink ─┤   (any peer)
//!                       └─▶ InPlace: CRC over the view → entry ─────────────────────┘   (shm)
//! ```

use std::{ops::Range, sync::Arc};

use remora_fabric::{Memory, Peer, View};

use super::{copy::Lent, fetch::Fetch, in_place::InPlace, plan::Plan};
use crate::{
    error::Error,
    expectation::Expectation,
    layout::{Geometry, State},
};

/// The part of the sink in which the reads of one [`SnapshotReader`] land: a page for the small reads, then the slot
/// buffers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SinkLayout {
    /// Offset of the page, in bytes from the start of the sink. A multiple of 64.
    pub offset: u64,
    /// Slot buffers, each of `slot_size` bytes. Enough that one slot may be verified and another used while
    /// [`Peer::depth`] reads are outstanding.
    pub buffers: u32,
}

impl SinkLayout {
    /// Bytes of the page for small reads: line, head, probe, and an entry per buffer.
    pub const SMALL_BYTES: u64 = 4096;
    /// Maximum number of buffers: as many as have an entry in the page beside the four lines of the other reads.
    pub const MAX_BUFFERS: u32 = 60;

    /// Bytes of the sink that this layout takes from `offset` on.
    pub fn length(&self, geometry: &Geometry) -> u64 {
        Self::SMALL_BYTES + u64::from(self.buffers) * geometry.slot_bytes()
    }

    pub(crate) const fn line(&self) -> u64 {
        self.offset
    }

    pub(crate) const fn head(&self) -> u64 {
        self.offset + 64
    }

    pub(crate) const fn probe(&self) -> u64 {
        self.offset + 192
    }

    pub(crate) fn entry(&self, buffer: u8) -> u64 {
        self.offset + 256 + 64 * u64::from(buffer)
    }

    pub(crate) fn buffer(&self, buffer: u8, geometry: &Geometry) -> u64 {
        self.offset + Self::SMALL_BYTES + u64::from(buffer) * geometry.slot_bytes()
    }

    /// Checks that the layout fits the sink.
    pub(crate) fn check(&self, sink: &Memory, geometry: &Geometry) -> Result<(), Error> {
        if !(1..=Self::MAX_BUFFERS).contains(&self.buffers) {
            return Err(Error::Layout(format!("{} slot buffers: must be 1 to {}", self.buffers, Self::MAX_BUFFERS)));
        }
        let end = self.offset.checked_add(self.length(geometry));
        if end.is_none_or(|end| end > sink.length()) {
            return Err(Error::Layout(format!(
                "a sink of {} bytes does not hold {} slot buffers of {} bytes from {} on",
                sink.length(),
                self.buffers,
                geometry.slot_size,
                self.offset
            )));
        }
        Ok(())
    }
}

/// The location of a delivered slot's bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// At this offset of the sink: reserved for the caller until released.
    Sink(u64),
    /// At this offset of the source's own memory. They may be overwritten while they are used, if the table is windowed
    /// and the source believes that we have passed the slot. [`SnapshotReader::release`] reports that.
    View(u64),
}

/// A slot whose bytes have been verified. Return it with [`SnapshotReader::release`].
#[derive(Debug)]
#[must_use = "a slot that is never released keeps its buffer"]
pub struct Slot {
    /// Number of the slot; numbers that the caller holds are skipped.
    pub number: u64,
    /// Position of its first byte in the stream (the RDB).
    pub position: u64,
    /// Bytes of content.
    pub length: u32,
    /// CRC-32C of those bytes.
    pub crc: u32,
    /// Location of the bytes.
    pub place: Place,
    pub(super) memory: Holder,
    pub(super) geometry: Geometry,
}

impl Slot {
    /// Releases a slot whose reader is gone, and checks that it was intact until now.
    ///
    /// # Errors
    /// As for [`SnapshotReader::release`].
    pub fn release_alone(self) -> Result<(), Error> {
        match &self.memory {
            Holder::Sink(..) => Ok(()),
            Holder::Copy(_, lent) => {
                lent.give_back(self.number);
                Ok(())
            }
            Holder::View(view) => InPlace::release(view, &self.geometry, &self),
        }
    }

    /// The memory that holds the bytes, and their range in it.
    pub fn bytes(&self) -> (&View, Range<u64>) {
        let (Place::Sink(offset) | Place::View(offset)) = self.place;
        let range = offset..offset + u64::from(self.length);
        match &self.memory {
            Holder::Sink(memory, _) | Holder::Copy(memory, _) => (memory, range),
            Holder::View(view) => (view, range),
        }
    }
}

/// Keeps a slot's memory mapped, even if the peer that delivered it is gone.
#[derive(Debug)]
pub(super) enum Holder {
    /// A buffer of the sink.
    Sink(Arc<Memory>, u8),
    /// A table of our own, and the accounts of the slots in use.
    Copy(Arc<Memory>, Arc<Lent>),
    View(Arc<View>),
}

/// What is known about the snapshot so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    /// Slots that may be read.
    pub published: u64,
    /// Total number of slots, once known.
    pub end: Option<u64>,
    /// Bytes of content in the published slots.
    pub bytes_known: u64,
    /// The state last seen. `Open` before the first read of the line.
    pub state: State,
}

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
            Holder::View(_) | Holder::Copy(..) => slot.release_alone()?,
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
