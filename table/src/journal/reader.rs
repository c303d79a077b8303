//! The reader of a journal: begins at any offset that is still held, and follows the end. No I/O and no clock of its
//! own.
//!
//! ```text
//!   line ─▶ Search: entries ─▶ Track: slot, place in it, offset ─▶ copy ─▶ entry again ─▶ CRCs ─▶ next_chunk()
//!            (once, to begin)      ▲ Fetch: slots in buffers of the sink
//!                                  └ or the source's memory itself (shm)
//! ```

use std::{collections::VecDeque, sync::Arc};

use remora_fabric::{Memory, Peer, View};

use super::{
    fetch::Fetch,
    in_place::InPlace,
    records::{Copied, Damage, Window},
    search::Found,
};
use crate::{
    error::Error,
    expectation::Expectation,
    layout::{Line, State},
    snapshot::SinkLayout,
};

/// Bytes read ahead of the caller, approximately: a few chunks, so that memory stays bounded if the caller takes none.
const QUEUE_BYTES: usize = 4 << 20;

/// Bytes of the stream, in order, without a gap.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Chunk {
    /// Replication offset of the first byte.
    pub offset: u64,
    /// Never empty.
    pub bytes: Vec<u8>,
}

/// Follows one journal.
///
/// The caller's loop: [`pump`](Self::pump), then all of [`next_chunk`](Self::next_chunk). If nothing came, wait: with
/// [`Peer::wait`], or, if [`is_caught_up`](Self::is_caught_up), for as long as news may be late.
pub struct JournalReader {
    track: Track,
    fetch: Fetch,
    in_place: Option<InPlace>,
}

impl JournalReader {
    /// Creates a reader whose first byte is the one at replication offset `start`. If the journal has not reached it
    /// yet, the reader waits.
    ///
    /// `view`: the region itself, if the peer can provide it ([`Peer::view`]); the sink's buffers are then not used.
    /// Two buffers or more keep the wire busy while one is checked.
    ///
    /// # Errors
    /// [`Error::Layout`]: the geometry is outside its limits, the sink or the view too small.
    pub fn new(
        view: Option<Arc<View>>,
        sink: Arc<Memory>,
        layout: SinkLayout,
        expect: Expectation,
        start: u64,
    ) -> Result<JournalReader, Error> {
        let geometry = expect.geometry.checked()?;
        layout.check(&sink, &geometry)?;
        let in_place = view.map(|view| InPlace::new(view, &geometry)).transpose()?;
        Ok(JournalReader { track: Track::new(expect, start), fetch: Fetch::new(sink, layout), in_place })
    }

    /// Continues with another peer of the same table, after [`Error::Peer`]. The former peer must be closed, so that
    /// none of its reads lands in the sink any more.
    ///
    /// # Errors
    /// [`Error::Layout`]: the view is too small.
    pub fn reconnect(&mut self, view: Option<Arc<View>>) -> Result<(), Error> {
        self.fetch.reset();
        self.in_place = view.map(|view| InPlace::new(view, &self.track.expect.geometry)).transpose()?;
        Ok(())
    }

    /// Posts reads, takes those that have completed, verifies records. Never blocks. Reads the line of the source at
    /// most once per call.
    ///
    /// # Errors
    /// [`Error::Overrun`]: the ring has passed this reader, or the start is no longer held. [`Error::Aborted`], after
    /// the last chunk has been taken. [`Error::Peer`], [`Error::Fabric`]: get another peer and
    /// [`reconnect`](Self::reconnect).
    pub fn pump(&mut self, peer: &mut dyn Peer) -> Result<(), Error> {
        match &mut self.in_place {
            Some(in_place) => in_place.pump(&mut self.track, peer)?,
            None => self.fetch.pump(&mut self.track, peer)?,
        }
        self.track.check_alive()
    }

    /// The next bytes of the stream.
    pub fn next_chunk(&mut self) -> Option<Chunk> {
        self.track.take()
    }

    /// Replication offset of the first byte of the next chunk.
    pub fn position(&self) -> u64 {
        self.track.chunks.front().map_or(self.track.next_offset(), |chunk| chunk.offset)
    }

    /// Whether everything that we know to be published has been delivered: only the source can bring more.
    pub fn is_caught_up(&self) -> bool {
        self.track.is_at_end()
    }
}

/// The state of a reader, shared by the two ways of reading.
pub(super) struct Track {
    pub(super) expect: Expectation,
    pub(super) line: Option<Line>,
    /// The first byte wanted; the bytes before it in its slot are read and dropped.
    pub(super) start: u64,
    /// The position of the next record; unknown until the slot has been found.
    pub(super) place: Option<Cursor>,
    chunks: VecDeque<Chunk>,
    queued: usize,
}

/// A position between two records.
#[derive(Debug, Clone, Copy)]
pub(super) struct Cursor {
    pub(super) slot: u64,
    /// Replication offset of the slot's first byte.
    pub(super) slot_position: u64,
    /// Bytes of the slot that have been taken, headers included.
    pub(super) inner: u32,
    /// Replication offset of the next record's first byte.
    pub(super) offset: u64,
}

impl Track {
    fn new(expect: Expectation, start: u64) -> Track {
        Track { expect, line: None, start, place: None, chunks: VecDeque::new(), queued: 0 }
    }

    /// A newer progress line has been read.
    pub(super) fn learn(&mut self, line: Line) {
        self.line = Some(line);
    }

    /// The slot has been found.
    pub(super) fn begin(&mut self, found: Found) {
        self.place =
            Some(Cursor { slot: found.number, slot_position: found.position, inner: 0, offset: found.position });
    }

    /// Bytes of this slot that are published.
    pub(super) fn limit(&self, slot: u64) -> u32 {
        let geometry = &self.expect.geometry;
        let published = self.line.map_or(0, |line| line.published);
        published.saturating_sub(geometry.start_of(slot)).min(geometry.slot_bytes()) as u32
    }

    /// Whether more may be read ahead.
    pub(super) fn has_room(&self) -> bool {
        self.queued < QUEUE_BYTES
    }

    pub(super) fn is_aborted(&self) -> bool {
        self.line.is_some_and(|line| line.state == State::Aborted)
    }

    /// Takes records that were copied from the cursor on and are known to be of its slot.
    pub(super) fn accept(&mut self, copied: Copied, window: &Window<'_>) -> Result<(), Damage> {
        let Some(cursor) = &mut self.place else {
            return Ok(());
        };
        copied.check()?;
        let offset = cursor.offset;
        cursor.offset = cursor.offset.saturating_add(copied.bytes.len() as u64);
        cursor.inner = copied.inner;
        if window.is_slot_end(cursor.inner) {
            *cursor = Cursor { slot: cursor.slot + 1, slot_position: cursor.offset, inner: 0, offset: cursor.offset };
        }
        self.queue(offset, copied.bytes);
        Ok(())
    }

    /// The writer has passed this reader.
    pub(super) fn overrun(&self, slot: u64) -> Error {
        let retired = self.line.map_or(0, |line| line.retired);
        Error::slot_overrun(slot, retired.max(slot + 1))
    }

    fn queue(&mut self, mut offset: u64, mut bytes: Vec<u8>) {
        let early = self.start.saturating_sub(offset).min(bytes.len() as u64);
        if early > 0 {
            bytes.drain(..early as usize);
            offset += early;
        }
        if !bytes.is_empty() {
            self.queued += bytes.len();
            self.chunks.push_back(Chunk { offset, bytes });
        }
    }

    fn take(&mut self) -> Option<Chunk> {
        let chunk = self.chunks.pop_front()?;
        self.queued -= chunk.bytes.len();
        Some(chunk)
    }

    fn next_offset(&self) -> u64 {
        self.place.map_or(self.start, |cursor| cursor.offset.max(self.start))
    }

    /// Whether everything published has been delivered.
    fn is_at_end(&self) -> bool {
        let Some(line) = self.line else {
            return false;
        };
        if !self.chunks.is_empty() {
            return false;
        }
        match self.place {
            None => line.published == 0,
            Some(cursor) => cursor.inner >= self.limit(cursor.slot),
        }
    }

    fn check_alive(&self) -> Result<(), Error> {
        if self.is_aborted() && self.is_at_end() {
            return Err(Error::Aborted { generation: self.expect.generation });
        }
        Ok(())
    }
}
