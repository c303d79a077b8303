//! The reader of a snapshot: drives a peer, gives out verified slots in order. No I/O and no clock of its own.
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

/// Where in the sink the reads of one [`SnapshotReader`] land: a page for the small ones, then the slot buffers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SinkLayout {
    /// Where the page begins, bytes from the start of the sink. A multiple of 64.
    pub offset: u64,
    /// Slot buffers, each of `slot_size` bytes. Enough that a slot may be verified and another used while
    /// [`Peer::depth`] reads are under way.
    pub buffers: u32,
}

impl SinkLayout {
    /// Bytes of the page for small reads: line, head, probe, and an entry per buffer.
    pub const SMALL_BYTES: u64 = 4096;
    /// Most buffers: as many as have an entry in the page beside the four lines of the others.
    pub const MAX_BUFFERS: u32 = 60;

    /// Bytes of the sink that this takes from `offset` on.
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

    /// Whether it lies in this sink.
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

/// Where the bytes of a delivered slot are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// At this offset of the sink: ours until released.
    Sink(u64),
    /// At this offset of the source's own memory: may be overwritten while it is used, if the table is windowed and the
    /// source believes that we have passed. [`SnapshotReader::release`] tells.
    View(u64),
}

/// A slot whose bytes have been verified. Give it back with [`SnapshotReader::release`].
#[derive(Debug)]
#[must_use = "a slot that is never released keeps its buffer"]
pub struct Slot {
    /// Which slot it is; numbers that the caller holds are left out.
    pub number: u64,
    /// Position of its first byte in the stream (the RDB).
    pub position: u64,
    /// Bytes of content.
    pub length: u32,
    /// CRC-32C of those bytes.
    pub crc: u32,
    /// Where they are.
    pub place: Place,
    pub(super) memory: Holder,
    pub(super) geometry: Geometry,
}

impl Slot {
    /// Gives back a slot whose reader is gone: was it whole until now?
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

    /// The memory in which the bytes lie, and where in it.
    pub fn bytes(&self) -> (&View, Range<u64>) {
        let (Place::Sink(offset) | Place::View(offset)) = self.place;
        let range = offset..offset + u64::from(self.length);
        match &self.memory {
            Holder::Sink(memory, _) | Holder::Copy(memory, _) => (memory, range),
            Holder::View(view) => (view, range),
        }
    }
}

/// Keeps a slot's memory mapped, also when the peer it came by is gone.
#[derive(Debug)]
pub(super) enum Holder {
    /// The sink, and which buffer of it.
    Sink(Arc<Memory>, u8),
    /// A table of our own, and who keeps account of what is lent of it.
    Copy(Arc<Memory>, Arc<Lent>),
    View(Arc<View>),
}

/// What is known about the snapshot so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    /// Slots that may be read.
    pub published: u64,
    /// Slots there will be in all, once known.
    pub end: Option<u64>,
    /// Bytes of content in the published slots.
    pub bytes_known: u64,
    /// As last seen. `Open` before the first look.
    pub state: State,
}

/// Reads one snapshot. See the drawing at the top of this file.
///
/// The caller's loop: [`pump`](Self::pump), then all of [`next_slot`](Self::next_slot), each used and
/// [`release`](Self::release)d; where nothing came, wait: [`Peer::wait`], or, if [`is_caught_up`](Self::is_caught_up), as
/// long as the source may well need to publish another slot.
pub struct SnapshotReader {
    plan: Plan,
    fetch: Fetch,
    in_place: Option<InPlace>,
    unchanging: bool,
    /// Delivered and not released.
    lent: usize,
}

impl SnapshotReader {
    /// A reader that begins at the first slot that it doesn't hold.
    ///
    /// `view`: the region itself, where the peer can give it ([`Peer::view`]): slots are then verified and delivered in
    /// place. `held`: says which slots the caller has already, from an earlier attempt at the same generation. These are
    /// neither read nor delivered, and it must always answer the same.
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

    /// The source promises that no slot's memory gets other bytes once it is published: slots that are delivered in place are then
    /// not summed. They are the writer's own bytes, which no transport has touched. Their entries are looked at as ever.
    pub fn unchanging(mut self) -> SnapshotReader {
        self.unchanging = true;
        self.in_place = self.in_place.map(InPlace::unchanging);
        self
    }

    /// Goes on with another peer to the same table, after [`Error::Peer`]. What was verified stays; what was under way is
    /// read again. The former peer must be closed, so that nothing of it lands in the sink any more.
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

    /// Posts what may be posted, takes what has arrived, verifies. Never blocks; reckons at most the CRC of what arrived,
    /// or of one slot in place. Looks for news of the source at most once per call.
    ///
    /// # Errors
    /// [`Error::Peer`], [`Error::Fabric`]: get another peer and [`reconnect`](Self::reconnect). All others end this reader.
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

    /// The slot has been used.
    ///
    /// # Errors
    /// [`Error::Overrun`]: it was read in place and has been overwritten meanwhile. Whatever was made of it is worthless.
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

    /// Everything published so far has been delivered: only the source can bring more, so waiting for the peer is in vain.
    pub fn is_caught_up(&self) -> bool {
        self.plan.line().is_some() && self.plan.is_drained() && self.plan.wants_news()
    }

    /// All slots have been delivered (or were held) and released, and no more will come.
    pub fn is_complete(&self) -> bool {
        self.lent == 0 && self.plan.is_drained() && self.plan.is_exhausted()
    }
}
