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
//! There is one small read per slot, and it comes last: the entry, requested when every piece has landed. It both
//! proves that the slot was not reused meanwhile and holds the CRC to compare with. The line that said "published" was
//! read before, so the entry is complete. The small read costs a round trip of this buffer only: the reads of the other
//! buffers are outstanding meanwhile.

use std::sync::Arc;

use remora_fabric::{Memory, Peer};

use super::{
    opening::open_slot,
    pieces::Pieces,
    plan::Plan,
    sink::SinkLayout,
    slot::{Holder, Place, Slot},
    verdict::{Verdict, Wanted},
};
use crate::{
    error::Error,
    layout::{ENTRY_BYTES, Entry, Geometry, HEAD_BYTES, Kind, LINE_BYTES, LINE_OFFSET, Line},
    reads::{Purpose, Reads, caught_in_change, the_entry, the_line},
    seal::Seal,
};

pub(super) struct Fetch {
    sink: Arc<Memory>,
    layout: SinkLayout,
    reads: Reads,
    buffers: Vec<Buffer>,
    head: Head,
    line_asked: bool,
    /// How many times in a row the line was caught in the middle of a change.
    line_caught: u32,
    /// Where a slot of a sealed table is while it is opened.
    scratch: Vec<u8>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Head {
    Unread,
    Asked,
    Right,
}

enum Buffer {
    Free,
    Busy(Work),
    /// Verified: in the plan, or in use by the caller.
    Kept,
}

struct Work {
    wanted: Wanted,
    pieces: Pieces,
    /// Read a second time.
    again: bool,
    caught: u32,
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
            line_caught: 0,
            scratch: Vec::new(),
        }
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
            let pieces = ask(&wanted, index, plan, &self.layout, &mut self.reads);
            *buffer = Buffer::Busy(Work { wanted, pieces, again: false, caught: 0 });
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
                self.line_caught = 0;
                plan.learn(line)
            }
            None => caught_in_change(&mut self.line_caught, plan.expect.seal(), the_line),
        }
    }

    fn handle_piece(&mut self, index: u8, piece: u8, plan: &mut Plan) -> Result<(), Error> {
        let at = self.layout.buffer(index, plan.geometry());
        let Some(Buffer::Busy(work)) = self.buffers.get_mut(usize::from(index)) else {
            return Ok(());
        };
        work.pieces.land(piece);
        if work.pieces.are_here() {
            let offset = plan.geometry().entry_offset(work.wanted.number);
            self.reads.queue(Purpose::Entry { buffer: index }, offset, ENTRY_BYTES as u32, self.layout.entry(index));
        }
        // The tag of a slot of a sealed table says more than its sum, and is checked when the slot is opened.
        if plan.expect.seal().is_some() { Ok(()) } else { work.pieces.sum(&self.sink, at) }
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
        let verdict = match (plan.expect.seal(), entry) {
            (Some(seal), Some(entry)) => {
                open_in_place(seal, &entry, &work.wanted, (&self.sink, at), plan.geometry(), &mut self.scratch)?
            }
            _ => work.wanted.judge(entry, work.pieces.crc(), plan.geometry())?,
        };
        match verdict {
            Verdict::Right => self.keep(index, plan),
            Verdict::Unclear => {
                let number = work.wanted.number;
                caught_in_change(&mut work.caught, plan.expect.seal(), || the_entry(number))?;
                let offset = plan.geometry().entry_offset(work.wanted.number);
                self.reads.queue(
                    Purpose::Entry { buffer: index },
                    offset,
                    ENTRY_BYTES as u32,
                    self.layout.entry(index),
                );
            }
            Verdict::Damaged { want } if work.again => {
                let got = self.sink.crc32c(at..at + u64::from(work.wanted.length))?;
                return Err(Error::Corrupt { slot: work.wanted.number, want, got });
            }
            Verdict::Damaged { .. } => {
                work.again = true;
                work.pieces = ask(&work.wanted, index, plan, &self.layout, &mut self.reads);
            }
        }
        Ok(())
    }

    /// Delivers a slot whose bytes are right, and were decrypted if the table is sealed.
    fn keep(&mut self, index: u8, plan: &mut Plan) {
        let Some(buffer) = self.buffers.get_mut(usize::from(index)) else { return };
        if let Buffer::Busy(Work { wanted, pieces, .. }) = std::mem::replace(buffer, Buffer::Kept) {
            plan.deliver(Slot {
                number: wanted.number,
                position: wanted.position,
                length: wanted.length,
                crc: plan.expect.seal().is_none().then(|| pieces.crc()),
                place: Place::Sink(self.layout.buffer(index, plan.geometry())),
                memory: Holder::Sink(Arc::clone(&self.sink), index),
                geometry: *plan.geometry(),
            });
        }
    }
}

/// Decrypts a slot of a sealed table where it is, and judges it. Its tag says more than its sum, which is computed only
/// if the tag is wrong: bytes that were damaged have another sum.
fn open_in_place(
    seal: &Seal,
    entry: &Entry,
    wanted: &Wanted,
    (sink, at): (&Memory, u64),
    geometry: &Geometry,
    scratch: &mut Vec<u8>,
) -> Result<Verdict, Error> {
    let verdict = wanted.judge(Some(*entry), entry.crc, geometry)?;
    if !matches!(verdict, Verdict::Right) {
        return Ok(verdict);
    }
    let place = at..at + u64::from(wanted.length);
    match open_slot(seal, wanted.number, &entry.seal, (sink, place.clone()), (sink, at), scratch) {
        Err(Error::Forged { .. }) if sink.crc32c(place)? != entry.crc => Ok(Verdict::Damaged { want: entry.crc }),
        opened => opened.map(|()| Verdict::Right),
    }
}

/// Queues reads of all pieces of a slot, from the beginning.
fn ask(wanted: &Wanted, index: u8, plan: &Plan, layout: &SinkLayout, reads: &mut Reads) -> Pieces {
    let from = plan.geometry().slot_offset(wanted.number);
    Pieces::ask(reads, index, from, wanted.length, layout.buffer(index, plan.geometry()))
}
