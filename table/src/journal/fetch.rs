//! How records reach a journal's reader: over a peer, in images in the sink, or straight from memory that can be
//! mapped.

use std::sync::Arc;

use remora_fabric::{Completion, Memory, Peer, View};

use super::records::{Copied, Window};
use super::track::{Cursor, Room, Search, Track};
use crate::error::Error;
use crate::layout::{ENTRY_BYTES, Entry, Geometry, HEAD_BYTES, Kind, LINE_BYTES, LINE_OFFSET, Line};
use crate::publish::{load_entry, load_entry_again, load_line};
use crate::reads::{Caught, Purpose, Reads, from_peer, the_entry, the_line};
use crate::seal::Seal;
use crate::snapshot::SinkLayout;

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
    pub(super) fn glance(
        &mut self,
        track: &mut Track,
        peer: &mut dyn Peer,
        elsewhere: u64,
    ) -> Result<Option<Room>, Error> {
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
