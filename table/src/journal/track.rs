//! What a journal's reader has read so far: the position between two records, and the chunks that wait for the caller.
//!
//! No reads here: `fetch` copies records and passes them to the track.

use std::collections::VecDeque;

use super::records::{Copied, Damage, Window};
use crate::encoding::Decoder;
use crate::error::Error;
use crate::expectation::Expectation;
use crate::layout::{Entry, Geometry, Line, State};

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

/// How far the writer of a ring is from what its reader needs next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Room {
    /// Bytes of records, headers included, until it is held no more.
    pub left: u64,
    /// Bytes that were written since the table began.
    pub written: u64,
}

/// The state of a journal's reader, shared by the two ways of reading.
pub(super) struct Track {
    pub(super) expect: Expectation,
    pub(super) line: Option<Line>,
    /// The first byte wanted; the bytes before it in its slot are read and dropped.
    pub(super) start: u64,
    /// The position of the next record; unknown until the slot has been found.
    pub(super) place: Option<Cursor>,
    chunks: VecDeque<Chunk>,
    queued: usize,
    /// Of a journal with compressed records.
    decoder: Decoder,
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

impl Cursor {
    /// Whether this entry names the cursor's slot.
    pub(super) fn is_of(&self, entry: &Entry) -> bool {
        entry.number == self.slot && !entry.writing && entry.position == self.slot_position
    }
}

impl Track {
    pub(super) fn new(expect: Expectation, start: u64) -> Track {
        let (chunks, decoder) = (VecDeque::new(), Decoder::default());
        Track { expect, line: None, start, place: None, chunks, queued: 0, decoder }
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
    pub(super) fn accept(&mut self, mut copied: Copied, window: &Window<'_>) -> Result<(), Damage> {
        let Some(cursor) = &mut self.place else {
            return Ok(());
        };
        let offset = cursor.offset;
        let decoder = self.expect.compressed.then_some(&mut self.decoder);
        copied.check(self.expect.seal(), offset, decoder)?;
        cursor.offset = cursor.offset.saturating_add(copied.bytes.len() as u64);
        cursor.inner = copied.inner;
        if window.is_slot_end(cursor.inner) {
            *cursor = Cursor { slot: cursor.slot + 1, slot_position: cursor.offset, inner: 0, offset: cursor.offset };
        }
        self.queue(offset, copied.bytes);
        Ok(())
    }

    /// Whether this slot is still held, as far as is known, and how much can be written until it is not. `elsewhere`:
    /// as in [`JournalReader::look`](super::JournalReader::look).
    pub(super) fn room_before(&self, slot: u64, elsewhere: u64) -> Result<Option<Room>, Error> {
        let Some(line) = self.line else { return Ok(None) };
        let geometry = &self.expect.geometry;
        let behind = line.published.saturating_sub(geometry.start_of(slot));
        if line.retired > slot && behind >= elsewhere {
            return Err(self.overrun(slot));
        }
        let end = geometry.start_of(slot.saturating_add(u64::from(geometry.slots)));
        let left = end.saturating_sub(line.published).max(elsewhere.saturating_sub(behind));
        Ok(Some(Room { left, written: line.published }))
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

    /// Takes the next bytes of the stream.
    pub(super) fn take(&mut self) -> Option<Chunk> {
        let chunk = self.chunks.pop_front()?;
        self.queued -= chunk.bytes.len();
        Some(chunk)
    }

    /// Replication offset of the first byte of the next chunk.
    pub(super) fn position(&self) -> u64 {
        self.chunks.front().map_or(self.next_offset(), |chunk| chunk.offset)
    }

    fn next_offset(&self) -> u64 {
        self.place.map_or(self.start, |cursor| cursor.offset.max(self.start))
    }

    /// Whether everything published has been delivered.
    pub(super) fn is_at_end(&self) -> bool {
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

    /// Fails once an aborted journal has been delivered to its end.
    pub(super) fn check_alive(&self) -> Result<(), Error> {
        if self.is_aborted() && self.is_at_end() {
            return Err(Error::Aborted { generation: self.expect.origin.generation });
        }
        Ok(())
    }
}

// Finding the slot that holds an offset by probing entries: a binary search in a ring that moves meanwhile.
//
// No reads here: [`Search::probe`] returns the entry to load next, [`Search::answer`] takes it.

#[derive(Debug)]
pub(super) struct Search {
    /// The offset wanted.
    wanted: u64,
    /// Slots that are still candidates.
    low: u64,
    high: u64,
    /// The last slot known to begin at or before the offset.
    best: Option<Found>,
    /// The lowest position seen, for the error message.
    oldest: Option<u64>,
}

/// The slot that contains the offset, unless the ring moves on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Found {
    pub(super) number: u64,
    /// Replication offset of its first byte.
    pub(super) position: u64,
}

impl Search {
    /// `None`: nothing is published yet, so there is nothing to search.
    pub(super) fn new(wanted: u64, line: &Line, geometry: &Geometry) -> Option<Search> {
        let high = line.published.checked_sub(1)? / geometry.slot_bytes();
        Some(Search { wanted, low: line.retired, high, best: None, oldest: None })
    }

    /// The entry to load next.
    pub(super) fn probe(&self) -> Option<u64> {
        (self.low <= self.high).then(|| self.low + (self.high - self.low) / 2)
    }

    /// The entry found at the place of slot `number`, the last probe.
    pub(super) fn answer(&mut self, number: u64, entry: &Entry) {
        if entry.number != number || entry.writing {
            // The ring has moved on over this slot, and over all before it.
            self.low = number + 1;
            self.best = self.best.filter(|best| best.number > number);
            return;
        }
        self.oldest = Some(self.oldest.map_or(entry.position, |oldest| oldest.min(entry.position)));
        if entry.position <= self.wanted {
            self.best = Some(Found { number, position: entry.position });
            self.low = number + 1;
        } else if number == 0 {
            self.high = 0;
            self.low = 1;
        } else {
            self.high = number - 1;
        }
    }

    /// The result, once there is nothing more to probe.
    pub(super) fn found(&self) -> Result<Found, Error> {
        let oldest = self.oldest.unwrap_or(self.wanted.saturating_add(1));
        self.best.ok_or(Error::Overrun { wanted: self.wanted, oldest, unit: "stream offset" })
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    #![allow(clippy::unwrap_used)]

    use proptest::prelude::*;

    use super::*;
    use crate::layout::State;

    const GEOMETRY: Geometry = Geometry { slot_size: 4096, slots: 64 };

    fn entry(number: u64, positions: &[u64]) -> Entry {
        Entry::plain(number, positions[number as usize], 0, 0)
    }

    proptest! {
        #[test]
        fn the_slot_found_is_the_one_a_scan_finds(
            steps in prop::collection::vec(1u64..5000, 1..60),
            retired in 0usize..60,
            wanted in 0u64..200_000,
        ) {
            let positions: Vec<u64> = steps.iter().scan(100, |at, step| { *at += step; Some(*at) }).collect();
            let retired = retired.min(positions.len() - 1);
            let line = Line {
                published: positions.len() as u64 * 4096,
                retired: retired as u64,
                end: None,
                state: State::Open,
            };
            let mut search = Search::new(wanted, &line, &GEOMETRY).unwrap();
            let mut probes = 0;
            while let Some(number) = search.probe() {
                search.answer(number, &entry(number, &positions));
                probes += 1;
            }
            prop_assert!(probes <= 7);
            let scan = (retired..positions.len()).rev().find(|&i| positions[i] <= wanted);
            match scan {
                Some(i) => prop_assert_eq!(search.found().unwrap(), Found { number: i as u64, position: positions[i] }),
                None => prop_assert!(search.found().is_err()),
            }
        }
    }

    #[test]
    fn an_empty_journal_has_nothing_to_search() {
        assert!(Search::new(5, &Line::NEW, &GEOMETRY).is_none());
    }

    #[test]
    fn slots_overwritten_during_the_search_are_given_up() {
        let line = Line { published: 8 * 4096, retired: 0, end: None, state: State::Open };
        let mut search = Search::new(1000, &line, &GEOMETRY).unwrap();
        while let Some(number) = search.probe() {
            let now = Entry::plain(number + 64, 999_999, 0, 0);
            search.answer(number, &now);
        }
        assert!(matches!(search.found(), Err(Error::Overrun { wanted: 1000, .. })));
    }
}
