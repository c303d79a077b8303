//! The reader of a journal: begins at any offset that is still held, and follows the end. No I/O and no clock of its
//! own.
//!
//! ```text
//!   line ─▶ Search: entries ─▶ Track: slot, place in it, offset ─▶ copy ─▶ entry again ─▶ CRCs ─▶ next_chunk()
//!            (once, to begin)      ▲ Fetch: slots in buffers of the sink
//!                                  └ or the source's memory itself (shm)
//! ```

use std::collections::VecDeque;
use std::sync::Arc;

use remora_fabric::{Completion, Memory, Peer, View};

use super::{Copied, Damage, Window};
use crate::encoding::Decoder;
use crate::error::Error;
use crate::expectation::{Caught, Expectation, Purpose, Reads, from_peer, the_entry, the_line};
use crate::layout::{ENTRY_BYTES, Entry, Geometry, HEAD_BYTES, Kind, LINE_BYTES, LINE_OFFSET, Line, State};
use crate::publish::{load_entry, load_entry_again, load_line};
use crate::seal::Seal;
use crate::snapshot::SinkLayout;

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
        // A table that is sealed or compressed is opened in the sink.
        let view = view.filter(|_| !expect.needs_opening());
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
        let view = view.filter(|_| !self.track.expect.needs_opening());
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

    /// Looks how far the writer is from the first slot that is still needed, and reads none. For a caller that takes no
    /// chunks for a while. `elsewhere`: how many of the last bytes the caller can get from someone else. `None`: not
    /// known yet. Never blocks.
    ///
    /// # Errors
    /// [`Error::Overrun`]: the ring has passed this reader, by more than is held elsewhere.
    /// [`Error::Peer`], [`Error::Fabric`]: as for [`pump`](Self::pump).
    pub fn look(&mut self, peer: &mut dyn Peer, elsewhere: u64) -> Result<Option<Room>, Error> {
        match &mut self.in_place {
            Some(in_place) => in_place.glance(&mut self.track, peer, elsewhere),
            None => self.fetch.look(&mut self.track, peer, elsewhere),
        }
    }

    /// The next bytes of the stream.
    pub fn next_chunk(&mut self) -> Option<Chunk> {
        self.track.take()
    }

    /// Replication offset of the first byte of the next chunk.
    pub fn position(&self) -> u64 {
        self.track.position()
    }

    /// Whether everything that we know to be published has been delivered: only the source can bring more.
    pub fn is_caught_up(&self) -> bool {
        self.track.is_at_end()
    }
}

// What a journal's reader has read so far: the position between two records, and the chunks that wait for the caller.
//
// No reads here: `fetch` copies records and passes them to the track.

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
    slot_position: u64,
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
    fn has_room(&self) -> bool {
        self.queued < QUEUE_BYTES
    }

    fn is_aborted(&self) -> bool {
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
    fn room_before(&self, slot: u64, elsewhere: u64) -> Result<Option<Room>, Error> {
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
    fn check_alive(&self) -> Result<(), Error> {
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
    fn answer(&mut self, number: u64, entry: &Entry) {
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

// How records reach a journal's reader: over a peer, in images in the sink, or straight from memory that can be
// mapped.

// Slots of a journal fetched over a peer, piece by piece as they grow, into images in the sink.
//
// Slot `i` has its image in buffer `i mod buffers`. One round of a buffer:
//
// ```text
//          more published            all pieces here             entry still names the slot
//   Idle ──────────────────▶ Landing ───────────────▶ Vouching ────────────────────────────▶ Idle, `vouched` grown
// ```
//
// Records are taken from the image of the cursor's slot up to `vouched`. `published` is always between two records,
// and so is the end of every round.

pub(super) struct Fetch {
    sink: Arc<Memory>,
    layout: SinkLayout,
    reads: Reads,
    buffers: Vec<Buffer>,
    head_asked: bool,
    head_right: bool,
    line_asked: bool,
    /// How many times in a row the line or a probe was caught in the middle of a change.
    caught: Caught,
    search: Option<Search>,
    probe_asked: bool,
    /// The table position up to which reads have been queued.
    asked: u64,
}

/// The image of one slot.
struct Buffer {
    slot: u64,
    round: Round,
    /// Bytes from the slot's start that are here and proved to be of this slot. Bytes that the cursor has passed may be
    /// missing.
    vouched: u32,
    /// Replication offset of the slot's first byte, according to its entry.
    position: u64,
    /// Read a second time because a checksum was wrong.
    again: bool,
    caught: Caught,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Round {
    Idle,
    Landing { left: u8, up_to: u32 },
    Vouching { up_to: u32 },
}

impl Fetch {
    pub(super) fn new(sink: Arc<Memory>, layout: SinkLayout) -> Fetch {
        Fetch {
            sink,
            layout,
            reads: Reads::default(),
            buffers: (0..layout.buffers).map(|_| Buffer::of(u64::MAX, 0)).collect(),
            head_asked: false,
            head_right: false,
            line_asked: false,
            caught: Caught::default(),
            search: None,
            probe_asked: false,
            asked: 0,
        }
    }

    /// The peer is gone: everything that was on its way is requested again.
    pub(super) fn reset(&mut self) {
        self.reads.reset();
        let reads = std::mem::take(&mut self.reads);
        *self = Fetch { reads, ..Fetch::new(Arc::clone(&self.sink), self.layout) };
    }

    pub(super) fn pump(&mut self, track: &mut Track, peer: &mut dyn Peer) -> Result<(), Error> {
        let arrived = self.reads.collect(peer)?;
        self.reads.post(peer)?;
        for purpose in arrived {
            self.handle(purpose, track)?;
        }
        self.take_records(track)?;
        self.ask(track);
        self.reads.post(peer)
    }

    /// Asks how far the writer is, and takes nothing. The slot that must still be there is the first one whose image is
    /// not whole.
    pub(super) fn look(
        &mut self,
        track: &mut Track,
        peer: &mut dyn Peer,
        elsewhere: u64,
    ) -> Result<Option<Room>, Error> {
        let arrived = self.reads.collect(peer)?;
        for purpose in arrived {
            self.handle(purpose, track)?;
        }
        if self.head_right && !self.line_asked {
            self.line_asked = true;
            self.reads.queue(Purpose::Line, LINE_OFFSET, LINE_BYTES as u32, self.layout.line());
        }
        self.reads.post(peer)?;
        let Some(cursor) = track.place else { return Ok(None) };
        let geometry = &track.expect.geometry;
        let is_here = |slot: u64| {
            let buffer = self.buffers.get((slot % self.buffers.len() as u64) as usize);
            buffer.is_some_and(|buffer| buffer.slot == slot && u64::from(buffer.vouched) >= geometry.slot_bytes())
        };
        let last = cursor.slot + self.buffers.len() as u64;
        let needed = (cursor.slot..last).find(|&slot| !is_here(slot)).unwrap_or(last);
        track.room_before(needed, elsewhere)
    }

    fn ask(&mut self, track: &Track) {
        if !self.head_asked {
            self.head_asked = true;
            self.reads.queue(Purpose::Head, 0, HEAD_BYTES as u32, self.layout.head());
        }
        if self.head_right {
            match track.place {
                None => self.ask_probe(track),
                Some(cursor) => self.ask_slots(track, cursor),
            }
        }
        if self.wants_news(track) && !self.line_asked {
            self.line_asked = true;
            self.reads.queue(Purpose::Line, LINE_OFFSET, LINE_BYTES as u32, self.layout.line());
        }
    }

    /// Whether everything that we know to be published has been requested, or was taken over a former peer.
    fn wants_news(&self, track: &Track) -> bool {
        let taken =
            track.place.map_or(0, |cursor| track.expect.geometry.start_of(cursor.slot) + u64::from(cursor.inner));
        let news = |line: Line| line.published <= self.asked.max(taken);
        !track.is_aborted() && track.line.is_none_or(news)
    }

    fn ask_probe(&mut self, track: &Track) {
        let geometry = &track.expect.geometry;
        if self.search.is_none() {
            self.search = track.line.and_then(|line| Search::new(track.start, &line, geometry));
        }
        if let Some(number) = self.search.as_ref().and_then(Search::probe)
            && !self.probe_asked
        {
            self.probe_asked = true;
            let offset = geometry.entry_offset(number);
            self.reads.queue(Purpose::Probe, offset, ENTRY_BYTES as u32, self.layout.probe());
        }
    }

    fn ask_slots(&mut self, track: &Track, cursor: Cursor) {
        let geometry = &track.expect.geometry;
        let count = self.buffers.len() as u64;
        for slot in cursor.slot..cursor.slot + count {
            let limit = track.limit(slot);
            let index = (slot % count) as u8;
            let Some(buffer) = self.buffers.get_mut(usize::from(index)) else {
                return;
            };
            if buffer.slot != slot && buffer.round == Round::Idle {
                let from = if slot == cursor.slot { cursor.inner } else { 0 };
                *buffer = Buffer::of(slot, from);
            }
            if buffer.slot != slot || buffer.round != Round::Idle || buffer.vouched >= limit {
                continue;
            }
            let from = u64::from(buffer.vouched);
            let to = self.layout.buffer(index, geometry) + from;
            let offset = geometry.slot_offset(slot) + from;
            let left = self.reads.queue_pieces(index, offset, limit - buffer.vouched, to);
            buffer.round = Round::Landing { left, up_to: limit };
            self.asked = self.asked.max(geometry.start_of(slot) + u64::from(limit));
        }
    }

    fn handle(&mut self, purpose: Purpose, track: &mut Track) -> Result<(), Error> {
        match purpose {
            Purpose::Head => {
                let mut bytes = [0; HEAD_BYTES];
                self.sink.read(self.layout.head(), &mut bytes)?;
                track.expect.check(&bytes, Kind::Journal)?;
                self.head_right = true;
                Ok(())
            }
            Purpose::Line => self.handle_line(track),
            Purpose::Probe => self.handle_probe(track),
            Purpose::Piece { buffer, .. } => self.handle_piece(buffer, track),
            Purpose::Entry { buffer } => self.handle_entry(buffer, track),
        }
    }

    fn handle_line(&mut self, track: &mut Track) -> Result<(), Error> {
        self.line_asked = false;
        let mut bytes = [0; LINE_BYTES];
        self.sink.read(self.layout.line(), &mut bytes)?;
        match Line::from_bytes(&bytes, track.expect.seal()) {
            Some(line) => {
                self.caught.over();
                track.learn(line);
                Ok(())
            }
            None => self.caught.again(track.expect.seal(), the_line),
        }
    }

    fn handle_probe(&mut self, track: &mut Track) -> Result<(), Error> {
        self.probe_asked = false;
        let Some(search) = &mut self.search else {
            return Ok(());
        };
        let seal = track.expect.seal();
        let Some(entry) = read_entry(&self.sink, self.layout.probe(), seal)? else {
            return self.caught.again(seal, || the_entry(search.probe().unwrap_or(0)));
        };
        if let Some(number) = search.probe() {
            self.caught.over();
            search.answer(number, &entry);
        }
        if search.probe().is_none() {
            track.begin(search.found()?);
        }
        Ok(())
    }

    fn handle_piece(&mut self, index: u8, track: &Track) -> Result<(), Error> {
        let Some(buffer) = self.buffers.get_mut(usize::from(index)) else {
            return Ok(());
        };
        let Round::Landing { left, up_to } = buffer.round else {
            return Ok(());
        };
        if left > 1 {
            buffer.round = Round::Landing { left: left - 1, up_to };
            return Ok(());
        }
        buffer.round = Round::Vouching { up_to };
        let offset = track.expect.geometry.entry_offset(buffer.slot);
        self.reads.queue(Purpose::Entry { buffer: index }, offset, ENTRY_BYTES as u32, self.layout.entry(index));
        Ok(())
    }

    fn handle_entry(&mut self, index: u8, track: &Track) -> Result<(), Error> {
        let entry = read_entry(&self.sink, self.layout.entry(index), track.expect.seal())?;
        let Some(buffer) = self.buffers.get_mut(usize::from(index)) else {
            return Ok(());
        };
        let Round::Vouching { up_to } = buffer.round else {
            return Ok(());
        };
        match entry {
            Some(entry) if entry.number > buffer.slot => Err(track.overrun(buffer.slot)),
            Some(entry) if entry.number == buffer.slot && !entry.writing => {
                buffer.vouch(up_to, entry.position);
                Ok(())
            }
            _ => {
                let slot = buffer.slot;
                buffer.caught.again(track.expect.seal(), || the_entry(slot))?;
                let offset = track.expect.geometry.entry_offset(buffer.slot);
                self.reads.queue(
                    Purpose::Entry { buffer: index },
                    offset,
                    ENTRY_BYTES as u32,
                    self.layout.entry(index),
                );
                Ok(())
            }
        }
    }

    /// Takes records that are vouched for, as far as the caller's queue has space.
    fn take_records(&mut self, track: &mut Track) -> Result<(), Error> {
        while let Some(cursor) = track.place {
            if !track.has_room() || !self.take_chunk(track, cursor)? {
                break;
            }
        }
        Ok(())
    }

    /// Takes records of the cursor's slot; `false` if there are none, or if they must be read again.
    fn take_chunk(&mut self, track: &mut Track, cursor: Cursor) -> Result<bool, Error> {
        let index = (cursor.slot % self.buffers.len() as u64) as u8;
        let geometry = track.expect.geometry;
        let base = self.layout.buffer(index, &geometry);
        let Some(buffer) = self.buffers.get_mut(usize::from(index)) else {
            return Ok(false);
        };
        if buffer.slot != cursor.slot || buffer.vouched <= cursor.inner {
            return Ok(false);
        }
        buffer.check_position(&cursor)?;
        let is_sealed = track.expect.seal.is_some();
        let window =
            Window { memory: &self.sink, base, slot_size: geometry.slot_size, limit: buffer.vouched, is_sealed };
        let copied = window.copy(cursor.inner)?;
        let Err(damage) = track.accept(copied, &window) else {
            buffer.again = false;
            return Ok(true);
        };
        if buffer.again {
            return Err(damage.of(cursor.slot));
        }
        // Read again over the wire, with what has been published since; but only after the present round has completed.
        if buffer.round == Round::Idle {
            *buffer = Buffer { again: true, ..Buffer::of(cursor.slot, cursor.inner) };
        }
        Ok(false)
    }
}

impl Buffer {
    fn of(slot: u64, vouched: u32) -> Buffer {
        Buffer { slot, round: Round::Idle, vouched, position: 0, again: false, caught: Caught::default() }
    }

    fn vouch(&mut self, up_to: u32, position: u64) {
        self.round = Round::Idle;
        self.vouched = up_to;
        self.position = position;
        self.caught.over();
    }

    /// The entry and the records before it must agree on the stream position at which the slot begins.
    fn check_position(&self, cursor: &Cursor) -> Result<(), Error> {
        if self.position == cursor.slot_position {
            return Ok(());
        }
        Err(Error::Layout(format!(
            "slot {} of the journal begins at offset {}, the one before it ended at {}",
            self.slot, self.position, cursor.slot_position
        )))
    }
}

fn read_entry(sink: &Memory, offset: u64, seal: Option<&Seal>) -> Result<Option<Entry>, Error> {
    let mut bytes = [0; ENTRY_BYTES];
    sink.read(offset, &mut bytes)?;
    Ok(Entry::from_bytes(&bytes, seal))
}

// Records copied straight from the source's memory, for a peer that can map it.

pub(super) struct InPlace {
    view: Arc<View>,
    head_checked: bool,
    /// How many times in a row the line was caught in the middle of a change.
    caught: Caught,
    completions: Vec<Completion>,
}

impl InPlace {
    pub(super) fn new(view: Arc<View>, geometry: &Geometry) -> Result<InPlace, Error> {
        let wanted = geometry.memory_len();
        if view.length() < wanted {
            return Err(Error::Layout(format!("the source's memory has {} bytes, its table {wanted}", view.length())));
        }
        Ok(InPlace { view, head_checked: false, caught: Caught::default(), completions: Vec::new() })
    }

    pub(super) fn pump(&mut self, track: &mut Track, peer: &mut dyn Peer) -> Result<(), Error> {
        // The connection still reports its end.
        peer.poll(&mut self.completions).map_err(from_peer)?;
        self.completions.clear();
        self.look(track)
    }

    /// Looks how far the writer is, and takes nothing.
    fn glance(&mut self, track: &mut Track, peer: &mut dyn Peer, elsewhere: u64) -> Result<Option<Room>, Error> {
        peer.poll(&mut self.completions).map_err(from_peer)?;
        self.completions.clear();
        if let Some(line) = load_line(&&*self.view, None)? {
            track.learn(line);
        }
        track.place.map_or(Ok(None), |cursor| track.room_before(cursor.slot, elsewhere))
    }

    /// Takes what the memory holds now.
    pub(super) fn look(&mut self, track: &mut Track) -> Result<(), Error> {
        self.check_head(track)?;
        match load_line(&&*self.view, None)? {
            Some(line) => {
                self.caught.over();
                track.learn(line);
            }
            None => self.caught.again(None, the_line)?,
        }
        if let (None, Some(line)) = (track.place, track.line) {
            self.find(track, &line)?;
        }
        while let Some(cursor) = track.place {
            if !track.has_room() || cursor.inner >= track.limit(cursor.slot) {
                break;
            }
            self.read(track, cursor)?;
        }
        Ok(())
    }

    fn check_head(&mut self, track: &Track) -> Result<(), Error> {
        if !self.head_checked {
            let mut bytes = [0; HEAD_BYTES];
            self.view.read(0, &mut bytes)?;
            track.expect.check(&bytes, Kind::Journal)?;
            self.head_checked = true;
        }
        Ok(())
    }

    fn find(&self, track: &mut Track, line: &Line) -> Result<(), Error> {
        let geometry = &track.expect.geometry;
        let Some(mut search) = Search::new(track.start, line, geometry) else {
            return Ok(());
        };
        while let Some(number) = search.probe() {
            // The entry of a published slot changes for one reason only: the next lap.
            let entry = load_entry(&&*self.view, geometry, number, None)?.unwrap_or(Entry::writing(number));
            search.answer(number, &entry);
        }
        track.begin(search.found()?);
        Ok(())
    }

    fn read(&self, track: &mut Track, cursor: Cursor) -> Result<(), Error> {
        let window = Window {
            memory: &self.view,
            base: track.expect.geometry.slot_offset(cursor.slot),
            slot_size: track.expect.geometry.slot_size,
            limit: track.limit(cursor.slot),
            is_sealed: false,
        };
        let copied = self.copy(track, &cursor, &window)?;
        if track.accept(copied, &window).is_ok() {
            return Ok(());
        }
        let copied = self.copy(track, &cursor, &window)?;
        let slot = cursor.slot;
        track.accept(copied, &window).map_err(|damage| damage.of(slot))
    }

    /// Records that are proved to be of the cursor's slot: the entry still names it after they were copied.
    fn copy(&self, track: &Track, cursor: &Cursor, window: &Window<'_>) -> Result<Copied, Error> {
        let copied = window.copy(cursor.inner)?;
        let entry = load_entry_again(&&*self.view, &track.expect.geometry, cursor.slot, None)?;
        match entry {
            Some(entry) if cursor.is_of(&entry) => Ok(copied),
            _ => Err(track.overrun(cursor.slot)),
        }
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
