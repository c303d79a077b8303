//! The reader of a snapshot: drives a peer and delivers verified slots in order. No I/O and no clock of its own.
//!
//! ```text
//!            ┌──────────────────────────── Plan ───────────────────────────┐
//!   line ──▶ │ published … next_wanted()                   deliver() order │ ──▶ next_slot() ──▶ release()
//!            └──────────┬──────────────────────────────────────────▲───────┘
//!                       ├─▶ Fetch:   pieces → entry → CRC, in a buffer of the sink ─┤   (any peer)
//!                       └─▶ InPlace: CRC over the view → entry ─────────────────────┘   (shm)
//! ```
//!
//! `InPlace` verifies slots of memory that this process can map where they are. `Fetch` fetches slots over a peer into
//! buffers of the sink. The states of one buffer:
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

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use remora_fabric::{Completion, Memory, Peer, View};

use super::slot::{Encoded, Holder, Opener, Place, Progress, SinkLayout, Slot, Verdict, Wanted, WasStored, judge_now};
use crate::error::Error;
use crate::expectation::{Caught, Expectation, Purpose, READ_BYTES, Reads, from_peer, the_entry, the_line};
use crate::layout::{ENTRY_BYTES, Entry, Geometry, HEAD_BYTES, Kind, LINE_BYTES, LINE_OFFSET, Line, State};
use crate::publish::{load_entry_again, load_line};

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

// One slot that arrives in pieces: which pieces are here, and the checksum of those that are here without a gap.
//
// Not here: the source of the slot, and the checksum that it should have.

/// The pieces of one slot. See the module docs.
pub(super) struct Pieces {
    /// Bytes of the slot.
    length: u32,
    count: u8,
    /// One bit per piece that has arrived. `MAX_SLOT_BYTES / READ_BYTES` bits fit.
    landed: u64,
    /// Number of pieces whose CRC is included in `crc`, in order.
    summed: u8,
    crc: u32,
}

const _: () = assert!(crate::layout::MAX_SLOT_BYTES / READ_BYTES <= u64::BITS);

impl Pieces {
    /// Queues reads of all pieces of the `length` bytes at `from`, to land at `to`, tagged with `buffer`.
    pub(super) fn ask(reads: &mut Reads, buffer: u8, from: u64, length: u32, to: u64) -> Pieces {
        let count = reads.queue_pieces(buffer, from, length, to);
        Pieces { length, count, landed: 0, summed: 0, crc: 0 }
    }

    /// One more piece has arrived, of that many bytes.
    pub(super) fn land(&mut self, piece: u8) -> u64 {
        self.landed |= 1 << piece;
        u64::from((self.length - u32::from(piece) * READ_BYTES).min(READ_BYTES))
    }

    /// Whether all pieces have arrived.
    pub(super) fn are_here(&self) -> bool {
        self.landed.count_ones() == u32::from(self.count)
    }

    /// Continues the CRC over all pieces that are here without a gap; the first byte of the first piece is at `at`.
    pub(super) fn sum(&mut self, sink: &Memory, at: u64) -> Result<(), Error> {
        while self.summed < self.count && self.landed >> self.summed & 1 == 1 {
            let start = u64::from(self.summed) * u64::from(READ_BYTES);
            let end = (start + u64::from(READ_BYTES)).min(u64::from(self.length));
            self.crc = sink.crc32c_append(self.crc, at + start..at + end)?;
            self.summed += 1;
        }
        Ok(())
    }

    /// The CRC-32C of the pieces summed so far.
    pub(super) fn crc(&self) -> u32 {
        self.crc
    }
}

// The state of a snapshot's reader: which slots are published, which to get next, which are ready to be delivered.
//
// No reads here: `Fetch` and `InPlace` take the next slot from the plan and report what they found.

/// Tells by a slot's number whether the caller holds that slot already.
pub(super) type Held = Box<dyn Fn(u64) -> bool + Send>;

pub(super) struct Plan {
    pub(super) expect: Expectation,
    held: Held,
    line: Option<Line>,
    /// The first number not yet planned.
    next: u64,
    /// Planned and lost with a former peer: planned again before any other.
    again: VecDeque<u64>,
    /// Planned and not delivered, in order.
    order: VecDeque<u64>,
    /// Verified, by number.
    ready: BTreeMap<u64, Slot>,
}

impl Plan {
    pub(super) fn new(expect: Expectation, held: Held) -> Plan {
        Plan {
            expect,
            held,
            line: None,
            next: 0,
            again: VecDeque::new(),
            order: VecDeque::new(),
            ready: BTreeMap::new(),
        }
    }

    pub(super) fn geometry(&self) -> &Geometry {
        &self.expect.geometry
    }

    pub(super) fn line(&self) -> Option<&Line> {
        self.line.as_ref()
    }

    /// A newer progress line has been read.
    pub(super) fn learn(&mut self, line: Line) -> Result<(), Error> {
        if line.state == State::Aborted {
            return Err(Error::Aborted { generation: self.expect.origin.generation });
        }
        self.line = Some(line);
        Ok(())
    }

    /// Whether the next slot, if there will be one, is not published as far as we know: the line must be read again.
    pub(super) fn wants_news(&self) -> bool {
        match self.line {
            None => true,
            Some(line) => line.end.is_none() && self.next >= self.published_slots(),
        }
    }

    /// The next slot to get, and the length of its content. The caller must verify it.
    pub(super) fn next_wanted(&mut self) -> Result<Option<Wanted>, Error> {
        let Some(line) = self.line else {
            return Ok(None);
        };
        let Some(number) = self.again.pop_front().or_else(|| self.next_new()) else {
            return Ok(None);
        };
        if number < line.retired {
            return Err(Error::slot_overrun(number, line.retired));
        }
        let position = self.geometry().start_of(number);
        let length = (line.published.saturating_sub(position)).min(self.geometry().slot_bytes()) as u32;
        Ok(Some(Wanted { number, position, length, compressed: self.expect.compressed }))
    }

    /// A slot has been verified.
    pub(super) fn deliver(&mut self, slot: Slot) {
        self.ready.insert(slot.number, slot);
    }

    /// These slots were on their way from a peer that is gone.
    pub(super) fn lost(&mut self, mut numbers: Vec<u64>) {
        numbers.extend(self.again.drain(..));
        numbers.sort_unstable();
        self.again = numbers.into();
    }

    /// The next verified slot, in order.
    pub(super) fn take(&mut self) -> Option<Slot> {
        let slot = self.ready.remove(self.order.front()?)?;
        self.order.pop_front();
        Some(slot)
    }

    pub(super) fn ready(&self) -> usize {
        self.ready.len()
    }

    /// Whether every planned slot has been delivered.
    pub(super) fn is_drained(&self) -> bool {
        self.order.is_empty()
    }

    /// Whether all slots that will ever exist have been planned.
    pub(super) fn is_exhausted(&self) -> bool {
        let end = self.line.and_then(|line| line.end);
        end.is_some_and(|end| (self.next..self.geometry().slots_for(end)).all(|number| (self.held)(number)))
    }

    pub(super) fn published_slots(&self) -> u64 {
        self.line.map_or(0, |line| self.geometry().slots_for(line.published))
    }

    fn next_new(&mut self) -> Option<u64> {
        while self.next < self.published_slots() {
            let number = self.next;
            self.next += 1;
            if !(self.held)(number) {
                self.order.push_back(number);
                return Some(number);
            }
        }
        None
    }
}

// Slots verified in the source's memory, for a peer that can map it.
//
// No byte is copied. In return, the slot may be overwritten *after* it was verified, while the caller uses it; so its
// entry is loaded again when it is released.
//
// If the source promises that no slot is ever overwritten ([`InPlace::unchanging`]), the bytes are not even read: they
// are the very bytes that the writer summed, and it stored them before the entry that we see.

pub(super) struct InPlace {
    view: Arc<View>,
    head_checked: bool,
    /// Maximum number of slots verified ahead of the caller.
    ahead: usize,
    /// No slot of this memory is ever overwritten.
    unchanging: bool,
    /// The slot being verified, and the state of its verification.
    work: Option<Verifying>,
    caught: Caught,
    /// A peer that provides a view reports nothing by completions; the buffer is only an argument for `poll`.
    completions: Vec<Completion>,
}

#[derive(Clone, Copy)]
struct Verifying {
    wanted: Wanted,
    crc: u32,
    again: bool,
}

impl InPlace {
    pub(super) fn new(view: Arc<View>, geometry: &Geometry, ahead: u32) -> Result<InPlace, Error> {
        let wanted = geometry.memory_len();
        if view.length() < wanted {
            return Err(Error::Layout(format!("the source's memory has {} bytes, its table {wanted}", view.length())));
        }
        Ok(InPlace {
            view,
            head_checked: false,
            ahead: ahead as usize,
            unchanging: false,
            work: None,
            caught: Caught::default(),
            completions: Vec::new(),
        })
    }

    /// Relies on the source's promise that no slot is ever overwritten.
    pub(super) fn unchanging(self) -> InPlace {
        InPlace { unchanging: true, ..self }
    }

    pub(super) fn pump(&mut self, plan: &mut Plan, peer: &mut dyn Peer) -> Result<(), Error> {
        // The connection still reports its end.
        peer.poll(&mut self.completions).map_err(from_peer)?;
        self.completions.clear();
        self.check_head(plan)?;
        match load_line(&&*self.view, None)? {
            Some(line) => {
                self.caught.over();
                plan.learn(line)?;
            }
            None => self.caught.again(None, the_line)?,
        }
        // One slot at a time: the caller may have a socket to feed in between.
        if self.work.is_none() && plan.ready() < self.ahead {
            self.begin(plan)?;
        }
        self.judge(plan)
    }

    /// The slot that is planned and not verified.
    pub(super) fn under_way(self) -> Option<u64> {
        self.work.map(|work| work.wanted.number)
    }

    fn check_head(&mut self, plan: &Plan) -> Result<(), Error> {
        if !self.head_checked {
            let mut bytes = [0; HEAD_BYTES];
            self.view.read(0, &mut bytes)?;
            plan.expect.check(&bytes, Kind::Snapshot)?;
            self.head_checked = true;
        }
        Ok(())
    }

    fn begin(&mut self, plan: &mut Plan) -> Result<(), Error> {
        let Some(wanted) = plan.next_wanted()? else {
            return Ok(());
        };
        if self.unchanging {
            return self.believe(wanted, plan);
        }
        let start = plan.geometry().slot_offset(wanted.number);
        self.view.populate(start..start + u64::from(wanted.length));
        let crc = self.sum(&wanted, plan.geometry())?;
        self.work = Some(Verifying { wanted, crc, again: false });
        Ok(())
    }

    /// Delivers a slot by its entry alone.
    fn believe(&mut self, wanted: Wanted, plan: &mut Plan) -> Result<(), Error> {
        let entry = load_entry_again(&&*self.view, plan.geometry(), wanted.number, None)?;
        let crc = entry.map_or(0, |entry| entry.crc);
        self.work = Some(Verifying { wanted, crc, again: true });
        Ok(())
    }

    fn judge(&mut self, plan: &mut Plan) -> Result<(), Error> {
        let Some(Verifying { wanted, crc, again }) = self.work else {
            return Ok(());
        };
        match judge_now(&self.view, &wanted, crc, plan.geometry())? {
            None => self.deliver(plan),
            Some(want) if again => return Err(Error::Corrupt { slot: wanted.number, want, got: crc }),
            Some(_) => {
                let crc = self.sum(&wanted, plan.geometry())?;
                self.work = Some(Verifying { wanted, crc, again: true });
            }
        }
        Ok(())
    }

    fn sum(&self, wanted: &Wanted, geometry: &Geometry) -> Result<u32, Error> {
        let start = geometry.slot_offset(wanted.number);
        Ok(self.view.crc32c(start..start + u64::from(wanted.length))?)
    }

    fn deliver(&mut self, plan: &mut Plan) {
        let Some(Verifying { wanted, crc, .. }) = self.work.take() else {
            return;
        };
        plan.deliver(Slot {
            number: wanted.number,
            position: wanted.position,
            length: wanted.length,
            crc: Some(crc),
            encoded: None,
            place: Place::View(plan.geometry().slot_offset(wanted.number)),
            memory: Holder::View(Arc::clone(&self.view)),
            geometry: *plan.geometry(),
        });
    }
}

// Whether a snapshot is complete whose writer has ended.

/// The number of slots of the expected snapshot, if the memory has all of them, so that readers may be given it. No
/// process may write it any more. The bytes of the slots are not read: readers check each.
///
/// # Errors
/// It is another table than expected, or damaged.
pub fn snapshot_left(view: &View, expect: &Expectation) -> Result<Option<u64>, Error> {
    let geometry = expect.geometry.checked()?;
    if view.length() < geometry.memory_len() {
        return Err(Error::Layout(format!(
            "the memory has {} bytes, its table {}",
            view.length(),
            geometry.memory_len()
        )));
    }
    let mut bytes = [0; HEAD_BYTES];
    view.read(0, &mut bytes)?;
    expect.check(&bytes, Kind::Snapshot)?;
    // A line that was caught in the middle of a change was not the last one.
    let line = load_line(&view, expect.seal())?;
    let whole = line.filter(|line| line.state == State::Sealed && line.retired == 0);
    Ok(whole.map(|line| line.published.div_ceil(geometry.slot_bytes())))
}

#[cfg(all(test, not(loom)))]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::tests::{Random, expect, identity, origin, used_memory};
    use crate::{Geometry, SnapshotWriter};

    const GEOMETRY: Geometry = Geometry { slot_size: 4096, slots: 4 };

    #[test]
    fn only_a_complete_snapshot_of_that_generation_is_taken_as_whole() {
        let memory = used_memory(&GEOMETRY, &mut Random(1));
        assert!(snapshot_left(&memory, &expect(GEOMETRY)).is_err(), "there is no table yet");
        let mut writer = SnapshotWriter::create(memory.clone(), GEOMETRY, identity(Kind::Snapshot), 0).unwrap();
        assert_eq!(writer.append(&[7; 6000]).unwrap(), 6000);
        assert_eq!(snapshot_left(&memory, &expect(GEOMETRY)).unwrap(), None, "it is still being written");
        writer.finish(0).unwrap();
        assert_eq!(snapshot_left(&memory, &expect(GEOMETRY)).unwrap(), Some(2));
        let mut other = origin();
        other.generation += 1;
        let error = snapshot_left(&memory, &Expectation::plain(other, GEOMETRY)).unwrap_err();
        assert!(matches!(error, Error::WrongGeneration { .. }), "{error}");
        // One that reused slots no longer has its first ones.
        let mut writer = SnapshotWriter::create(memory.clone(), GEOMETRY, identity(Kind::Snapshot), 0).unwrap();
        assert_eq!(writer.append(&[7; 4 * 4096]).unwrap(), 4 * 4096);
        writer.retire(1);
        assert_eq!(writer.append(&[7; 4096]).unwrap(), 4096);
        writer.finish(0).unwrap();
        assert_eq!(snapshot_left(&memory, &expect(GEOMETRY)).unwrap(), None);
    }
}
