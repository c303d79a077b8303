//! Slots fetched over a peer into buffers of the sink.
//!
//! The states of one buffer:
//!
//! ```text
//!            next_wanted                 all pieces here             entry still names the slot, CRC right
//!   Free ───────────────▶ pieces asked ─────────────────▶ entry asked ────────────────────────────────────▶ Kept ─▶ Free
//!                              ▲                              │  CRC wrong: once more, then Corrupt       (delivered)
//!                              └──────────────────────────────┘
//! ```
//!
//! In a table with compressed slots, the entry is requested before the pieces too: it says how many bytes are stored.
//!
//! Otherwise there is one small read per slot, and it comes last: the entry, requested when every piece has landed. It
//! both proves that the slot was not reused meanwhile and holds the CRC to compare with. The line that said "published"
//! was read before, so the entry is complete. The small read costs a round trip of this buffer only: the reads of the
//! other buffers are outstanding meanwhile.

use std::sync::Arc;

use remora_fabric::{Memory, Peer};

use super::{
    opening::{Opener, WasStored},
    pieces::Pieces,
    plan::Plan,
    sink::SinkLayout,
    slot::{Encoded, Holder, Place, Slot},
    verdict::{Verdict, Wanted},
};
use crate::{
    error::Error,
    expectation::Expectation,
    layout::{ENTRY_BYTES, Entry, HEAD_BYTES, Kind, LINE_BYTES, LINE_OFFSET, Line},
    reads::{Caught, Purpose, Reads, the_entry, the_line},
};

pub(super) struct Fetch {
    sink: Arc<Memory>,
    layout: SinkLayout,
    reads: Reads,
    buffers: Vec<Buffer>,
    head: Head,
    line_asked: bool,
    /// How many times in a row the line was caught in the middle of a change.
    line_caught: Caught,
    /// Opens slots of a table that needs it.
    opener: Opener,
    /// Whether compressed slots are delivered with what is stored.
    keeps_encoded: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Head {
    Unread,
    Asked,
    Right,
}

enum Buffer {
    Free,
    Busy(Box<Work>),
    /// Verified: in the plan, or in use by the caller.
    Kept,
}

struct Work {
    wanted: Wanted,
    /// `None`: the entry, which tells how many bytes are stored, is on its way.
    pieces: Option<Pieces>,
    /// Bytes that are stored.
    stored: u32,
    /// Read a second time.
    again: bool,
    caught: Caught,
}

impl Fetch {
    pub(super) fn new(sink: Arc<Memory>, layout: SinkLayout) -> Fetch {
        Fetch {
            sink,
            layout,
            reads: Reads::default(),
            buffers: (0..layout.buffers).map(|_| Buffer::Free).collect(),
            head: Head::Unread,
            line_asked: false,
            line_caught: Caught::default(),
            opener: Opener::default(),
            keeps_encoded: false,
        }
    }

    pub(super) fn keep_encoded(&mut self, keeping: bool) {
        self.keeps_encoded = keeping;
    }

    pub(super) fn buffers(&self) -> u32 {
        self.layout.buffers
    }

    pub(super) fn pump(&mut self, plan: &mut Plan, peer: &mut dyn Peer) -> Result<(), Error> {
        let arrived = self.reads.collect(peer)?;
        // Queued reads are posted before CRCs are computed, so that the wire isn't idle meanwhile.
        self.reads.post(peer)?;
        for purpose in arrived {
            self.handle(purpose, plan)?;
        }
        self.ask(plan)?;
        self.reads.post(peer)
    }

    /// The peer is gone: returns the slots that were on their way.
    pub(super) fn reset(&mut self) -> Vec<u64> {
        self.reads.reset();
        self.head = Head::Unread;
        self.line_asked = false;
        let mut lost = Vec::new();
        for buffer in &mut self.buffers {
            if let Buffer::Busy(work) = buffer {
                lost.push(work.wanted.number);
                *buffer = Buffer::Free;
            }
        }
        lost
    }

    pub(super) fn free(&mut self, buffer: u8) {
        if let Some(buffer) = self.buffers.get_mut(usize::from(buffer)) {
            *buffer = Buffer::Free;
        }
    }

    /// Queues reads for everything that is wanted and has a buffer.
    fn ask(&mut self, plan: &mut Plan) -> Result<(), Error> {
        if self.head == Head::Unread {
            self.head = Head::Asked;
            self.reads.queue(Purpose::Head, 0, HEAD_BYTES as u32, self.layout.head());
        }
        if self.head == Head::Right {
            self.ask_slots(plan)?;
        }
        if plan.wants_news() && !self.line_asked {
            self.line_asked = true;
            self.reads.queue(Purpose::Line, LINE_OFFSET, LINE_BYTES as u32, self.layout.line());
        }
        Ok(())
    }

    fn ask_slots(&mut self, plan: &mut Plan) -> Result<(), Error> {
        for (index, buffer) in (0..).zip(self.buffers.iter_mut()) {
            if !matches!(buffer, Buffer::Free) {
                continue;
            }
            let Some(wanted) = plan.next_wanted()? else {
                break;
            };
            let mut work =
                Work { wanted, pieces: None, stored: wanted.length, again: false, caught: Caught::default() };
            work.begin(index, plan, &self.layout, &mut self.reads);
            *buffer = Buffer::Busy(Box::new(work));
        }
        Ok(())
    }

    fn handle(&mut self, purpose: Purpose, plan: &mut Plan) -> Result<(), Error> {
        match purpose {
            Purpose::Head => {
                let mut bytes = [0; HEAD_BYTES];
                self.sink.read(self.layout.head(), &mut bytes)?;
                plan.expect.check(&bytes, Kind::Snapshot)?;
                self.head = Head::Right;
                Ok(())
            }
            Purpose::Line => self.handle_line(plan),
            Purpose::Piece { buffer, piece } => self.handle_piece(buffer, piece, plan),
            Purpose::Entry { buffer } => self.handle_entry(buffer, plan),
            Purpose::Probe => Ok(()),
        }
    }

    fn handle_line(&mut self, plan: &mut Plan) -> Result<(), Error> {
        self.line_asked = false;
        let mut bytes = [0; LINE_BYTES];
        self.sink.read(self.layout.line(), &mut bytes)?;
        match Line::from_bytes(&bytes, plan.expect.seal()) {
            Some(line) => {
                self.line_caught.over();
                plan.learn(line)
            }
            None => self.line_caught.again(plan.expect.seal(), the_line),
        }
    }

    fn handle_piece(&mut self, index: u8, piece: u8, plan: &mut Plan) -> Result<(), Error> {
        let at = self.layout.buffer(index, plan.geometry());
        let Some(Buffer::Busy(work)) = self.buffers.get_mut(usize::from(index)) else {
            return Ok(());
        };
        let Some(pieces) = &mut work.pieces else { return Ok(()) };
        pieces.land(piece);
        if pieces.are_here() {
            ask_entry(&work.wanted, index, plan, &self.layout, &mut self.reads);
        }
        // The tag of a slot of a sealed table says more than its sum, and is checked when the slot is opened.
        if plan.expect.seal().is_some() { Ok(()) } else { pieces.sum(&self.sink, at) }
    }

    fn handle_entry(&mut self, index: u8, plan: &mut Plan) -> Result<(), Error> {
        let mut bytes = [0; ENTRY_BYTES];
        self.sink.read(self.layout.entry(index), &mut bytes)?;
        let Some(Buffer::Busy(work)) = self.buffers.get_mut(usize::from(index)) else {
            return Ok(());
        };
        let entry = Entry::from_bytes(&bytes, plan.expect.seal());
        let entry = entry.filter(|entry| entry.belongs_to(work.wanted.number, plan.geometry()));
        let at = self.layout.buffer(index, plan.geometry());
        let (mut crc, mut encoded) = (work.pieces.as_ref().map(Pieces::crc), None);
        let verdict = match entry {
            // It is the first one, of which only the length is wanted; or it has to be right together with the bytes.
            Some(entry) if crc.is_none() => work.wanted.judge(Some(entry), entry.crc, plan.geometry())?,
            Some(entry) if plan.expect.needs_opening() => {
                let opened = self.opener.open_in_place(&plan.expect, &entry, work, (&self.sink, at))?;
                if let Ok(was) = &opened {
                    crc = was.crc;
                    let (opener, keeps) = (&mut self.opener, self.keeps_encoded);
                    encoded = was.method.map(|method| Encoded { method, bytes: keeps.then(|| opener.take_stored()) });
                }
                opened.map_or_else(|verdict| verdict, |_| Verdict::Right)
            }
            _ => work.wanted.judge(entry, crc.unwrap_or_default(), plan.geometry())?,
        };
        match verdict {
            Verdict::Right if work.pieces.is_none() => {
                work.stored = entry.map_or(work.stored, |entry| entry.length);
                work.pieces = Some(ask(&work.wanted, work.stored, index, plan, &self.layout, &mut self.reads));
            }
            Verdict::Right => self.keep(index, plan, crc, encoded),
            Verdict::Unclear => {
                let number = work.wanted.number;
                work.caught.again(plan.expect.seal(), || the_entry(number))?;
                ask_entry(&work.wanted, index, plan, &self.layout, &mut self.reads);
            }
            Verdict::Damaged { want } if work.again => {
                let got = self.sink.crc32c(at..at + u64::from(work.stored))?;
                return Err(Error::Corrupt { slot: work.wanted.number, want, got });
            }
            Verdict::Damaged { .. } => {
                work.again = true;
                work.begin(index, plan, &self.layout, &mut self.reads);
            }
        }
        Ok(())
    }

    /// Delivers a slot whose bytes are right, and were opened if the table needs it. `crc`: of its content, if it was
    /// verified by that.
    fn keep(&mut self, index: u8, plan: &mut Plan, crc: Option<u32>, encoded: Option<Encoded>) {
        let Some(buffer) = self.buffers.get_mut(usize::from(index)) else { return };
        if let Buffer::Busy(work) = std::mem::replace(buffer, Buffer::Kept) {
            let Work { wanted, .. } = *work;
            plan.deliver(Slot {
                number: wanted.number,
                position: wanted.position,
                length: wanted.length,
                crc,
                encoded,
                place: Place::Sink(self.layout.buffer(index, plan.geometry())),
                memory: Holder::Sink(Arc::clone(&self.sink), index),
                geometry: *plan.geometry(),
            });
        }
    }
}

impl Work {
    /// Queues the first reads of the slot.
    fn begin(&mut self, index: u8, plan: &Plan, layout: &SinkLayout, reads: &mut Reads) {
        self.pieces = if self.wanted.compressed {
            ask_entry(&self.wanted, index, plan, layout, reads);
            None
        } else {
            Some(ask(&self.wanted, self.stored, index, plan, layout, reads))
        };
    }
}

impl Opener {
    /// Opens a slot where it is, and judges it: what it was, or the verdict. The tag of a sealed slot says more than
    /// its sum, which is computed only if the tag is wrong: bytes that were damaged have another sum.
    fn open_in_place(
        &mut self,
        expect: &Expectation,
        entry: &Entry,
        work: &Work,
        (sink, at): (&Memory, u64),
    ) -> Result<Result<WasStored, Verdict>, Error> {
        let (wanted, damaged) = (&work.wanted, Verdict::Damaged { want: entry.crc });
        let sum = work.pieces.as_ref().filter(|_| expect.seal.is_none()).map_or(entry.crc, Pieces::crc);
        match wanted.judge(Some(*entry), sum, &expect.geometry)? {
            Verdict::Right => {}
            verdict => return Ok(Err(verdict)),
        }
        // Another number of bytes was read than the slot has by now.
        if entry.length != work.stored {
            return Ok(Err(damaged));
        }
        if expect.seal.is_none() && entry.encoding == 0 {
            return Ok(Ok(WasStored { method: None, crc: Some(sum) }));
        }
        let place = at..at + u64::from(work.stored);
        match self.open(expect.seal(), entry, wanted.length, (sink, at), (sink, at)) {
            Err(Error::Forged { .. }) if sink.crc32c(place)? != entry.crc => Ok(Err(damaged)),
            opened => opened.map(Ok),
        }
    }
}

/// Queues reads of all pieces of a slot, from the beginning. `stored`: its bytes as they are stored.
fn ask(wanted: &Wanted, stored: u32, index: u8, plan: &Plan, layout: &SinkLayout, reads: &mut Reads) -> Pieces {
    let from = plan.geometry().slot_offset(wanted.number);
    Pieces::ask(reads, index, from, stored, layout.buffer(index, plan.geometry()))
}

/// Queues a read of the entry of a slot.
fn ask_entry(wanted: &Wanted, index: u8, plan: &Plan, layout: &SinkLayout, reads: &mut Reads) {
    let offset = plan.geometry().entry_offset(wanted.number);
    reads.queue(Purpose::Entry { buffer: index }, offset, ENTRY_BYTES as u32, layout.entry(index));
}
