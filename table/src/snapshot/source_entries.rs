//! The source's own statements about its snapshot, read ahead of the bytes: its progress line, and each slot's entry.
//!
//! The bytes may then come from any peer. Their checksum comes only from here, so a replica that forwards other bytes
//! than the source's is detected. Not here: the bytes.
//!
//! ```text
//!   head ─▶ line ─▶ entries, up to 64 in one read ─▶ entry(number)      all out of the source's own region
//!            ▲ └──── published ahead of them? ──┘
//!            └─ read again only when the caller says so: it has the clock
//! ```

use std::collections::BTreeMap;
use std::ops::Range;

use remora_fabric::Memory;

use super::slot::wrong_content;
use crate::error::Error;
use crate::expectation::Expectation;
use crate::layout::{ENTRY_BYTES, Entry, Geometry, HEAD_BYTES, Kind, LINE_BYTES, LINE_OFFSET, Line, State};
use crate::reads::{Caught, Purpose, Reads, the_entry, the_line};

/// Entries in one read: a page of them.
const BATCH: u64 = 64;

/// The place in the sink for the small reads of one region: head and line. Both regions of a copy have such a place.
#[derive(Clone, Copy)]
pub(super) struct SmallPlace {
    pub(super) at: u64,
}

impl SmallPlace {
    /// Bytes of the place.
    pub(super) const BYTES: u64 = 256;

    fn line(self) -> u64 {
        self.at + HEAD_BYTES as u64
    }
}

const _: () = assert!((HEAD_BYTES + LINE_BYTES) as u64 <= SmallPlace::BYTES);

/// The progress of a table according to its own superblock: of the source, or of a replica that lends its copy.
pub(super) struct Front {
    pub(super) expect: Expectation,
    place: SmallPlace,
    head: HeadState,
    line: Option<Line>,
    line_asked: bool,
    caught: Caught,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum HeadState {
    NotRequested,
    Requested,
    Verified,
}

impl Front {
    pub(super) fn new(expect: Expectation, place: SmallPlace) -> Front {
        Front { expect, place, head: HeadState::NotRequested, line: None, line_asked: false, caught: Caught::default() }
    }

    /// The line last seen; `None` until the table has proved to be the expected one.
    pub(super) fn line(&self) -> Option<&Line> {
        self.line.as_ref().filter(|_| self.head == HeadState::Verified)
    }

    /// Whether a read of the line is outstanding.
    pub(super) fn is_line_asked(&self) -> bool {
        self.line_asked
    }

    /// Whether a read of head or line is outstanding.
    pub(super) fn is_asked(&self) -> bool {
        self.line_asked || self.head == HeadState::Requested
    }

    /// Slots that may be read, as last seen.
    pub(super) fn published(&self) -> u64 {
        self.line().map_or(0, |line| self.expect.geometry.slots_for(line.published))
    }

    pub(super) fn is_sealed(&self) -> bool {
        self.line().is_some_and(|line| line.end.is_some())
    }

    /// Queues reads of what has not been seen yet; of the line again if `news` is wanted.
    pub(super) fn ask(&mut self, reads: &mut Reads, news: bool) {
        if self.head == HeadState::NotRequested {
            self.head = HeadState::Requested;
            reads.queue(Purpose::Head, 0, HEAD_BYTES as u32, self.place.at);
        }
        let unseen = self.line.is_none();
        if !self.line_asked && (unseen || news) {
            self.line_asked = true;
            reads.queue(Purpose::Line, LINE_OFFSET, LINE_BYTES as u32, self.place.line());
        }
    }

    pub(super) fn handle_head(&mut self, sink: &Memory) -> Result<(), Error> {
        let mut bytes = [0; HEAD_BYTES];
        sink.read(self.place.at, &mut bytes)?;
        self.expect.check(&bytes, Kind::Snapshot)?;
        self.head = HeadState::Verified;
        Ok(())
    }

    pub(super) fn handle_line(&mut self, sink: &Memory, reads: &mut Reads) -> Result<(), Error> {
        self.line_asked = false;
        let mut bytes = [0; LINE_BYTES];
        sink.read(self.place.line(), &mut bytes)?;
        let Some(line) = Line::from_bytes(&bytes, self.expect.seal()) else {
            self.caught.again(self.expect.seal(), the_line)?;
            self.ask(reads, true);
            return Ok(());
        };
        self.caught.over();
        if line.state == State::Aborted {
            return Err(Error::Aborted { generation: self.expect.origin.generation });
        }
        self.line = Some(line);
        Ok(())
    }

    /// The peer is gone: its outstanding reads will not complete.
    pub(super) fn reset(&mut self) {
        self.line_asked = false;
        if self.head == HeadState::Requested {
            self.head = HeadState::NotRequested;
        }
    }
}

/// The entries of the source's slots. See the module docs.
pub(super) struct SourceEntries {
    pub(super) front: Front,
    entries: BTreeMap<u64, Entry>,
    /// Entries below this number have been seen, or are not wanted.
    next: u64,
    asked: Option<Range<u64>>,
    batch_at: u64,
    caught: Caught,
}

impl SourceEntries {
    /// The entries of the expected table from slot `first` on. Small reads land at `place`, entries in the page at
    /// `batch_at`.
    pub(super) fn new(expect: Expectation, first: u64, place: SmallPlace, batch_at: u64) -> SourceEntries {
        let front = Front::new(expect, place);
        SourceEntries { front, entries: BTreeMap::new(), next: first, asked: None, batch_at, caught: Caught::default() }
    }

    fn geometry(&self) -> &Geometry {
        &self.front.expect.geometry
    }

    /// The source's entry of that slot; `None` if it has not been read yet.
    pub(super) fn entry(&self, number: u64) -> Option<&Entry> {
        self.entries.get(&number)
    }

    /// Slots below this number are done: their entries are dropped.
    pub(super) fn forget_below(&mut self, number: u64) {
        self.entries = self.entries.split_off(&number);
    }

    /// Slots whose entries have been seen without a gap.
    pub(super) fn seen(&self) -> u64 {
        self.next
    }

    /// Whether the source has, as far as we know, published nothing beyond the entries that we have, and may still do
    /// so.
    pub(super) fn wants_news(&self) -> bool {
        self.front.line().is_none() || (!self.front.is_sealed() && self.next >= self.front.published())
    }

    /// Queues the next reads.
    pub(super) fn ask(&mut self, reads: &mut Reads, look: bool) {
        self.front.ask(reads, look && self.wants_news());
        if self.asked.is_some() || self.next >= self.front.published() {
            return;
        }
        let place = self.next % u64::from(self.geometry().slots);
        let until_wrap = u64::from(self.geometry().slots) - place;
        let count = BATCH.min(until_wrap).min(self.front.published() - self.next);
        let from = self.geometry().entry_offset(self.next);
        // At most 64 entries of 64 bytes: a page.
        reads.queue(Purpose::Probe, from, count as u32 * ENTRY_BYTES as u32, self.batch_at);
        self.asked = Some(self.next..self.next + count);
    }

    /// The requested entries have arrived. An entry that was caught in the middle of a change is requested again, with
    /// those after it.
    pub(super) fn handle_entries(&mut self, sink: &Memory) -> Result<(), Error> {
        let Some(asked) = self.asked.take() else { return Ok(()) };
        for (number, at) in asked.zip((self.batch_at..).step_by(ENTRY_BYTES)) {
            let mut bytes = [0; ENTRY_BYTES];
            sink.read(at, &mut bytes)?;
            let entry = Entry::from_bytes(&bytes, self.front.expect.seal());
            let entry = entry.filter(|entry| entry.belongs_to(number, &self.front.expect.geometry));
            if let Some(entry) = entry.filter(|entry| entry.number > number) {
                let oldest = (entry.number + 1).saturating_sub(u64::from(self.geometry().slots));
                return Err(Error::slot_overrun(number, oldest));
            }
            let Some(entry) = entry.filter(|entry| entry.number == number && !entry.writing) else {
                return self.caught.again(self.front.expect.seal(), || the_entry(number));
            };
            self.caught.over();
            self.check(&entry)?;
            self.entries.insert(number, entry);
            self.next = number + 1;
        }
        Ok(())
    }

    /// Bytes of content of the entry's slot: fewer may be stored.
    pub(super) fn content_of(&self, entry: &Entry) -> u32 {
        let position = self.geometry().start_of(entry.number);
        let published = self.front.line().map_or(0, |line| line.published);
        // At most a slot's size, which fits the type.
        published.saturating_sub(position).min(self.geometry().slot_bytes()) as u32
    }

    /// Every slot but the last must be full.
    fn check(&self, entry: &Entry) -> Result<(), Error> {
        let (position, length) = (self.geometry().start_of(entry.number), self.content_of(entry));
        if entry.has_content(position, length, self.front.expect.compressed) {
            return Ok(());
        }
        Err(wrong_content(entry, position, length))
    }

    /// The peer is gone: its outstanding reads will not complete.
    pub(super) fn reset(&mut self) {
        self.front.reset();
        self.asked = None;
    }

    /// Whether reads of head, line or entries are outstanding.
    pub(super) fn is_asked(&self) -> bool {
        self.asked.is_some() || self.front.is_asked()
    }
}
