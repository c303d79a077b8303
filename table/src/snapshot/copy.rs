//! A copy of a snapshot in a table of our own: read from the source or from a peer that holds a part of it, and read by
//! others while it grows. No I/O and no clock of its own.
//!
//! ```text
//!            ┌─ source_entries: line, entries ◀════════════════════ the source's region, always
//!   pump ──▶ │
//!            └─ bytes of slots ◀═══════════════════════════ the way: the source, or one peer's copy
//!                  │ CRC as the *source's* entry says? no: Loss::Lied, the bytes are discarded
//!                  ▼
//!    own table:  bytes, then entry, then `published`  ═════▶ any SnapshotCopy or SnapshotReader elsewhere
//!                  │
//!                  └─▶ next_slot() ──▶ release()             for our own use, in order
//! ```
//!
//! Our own table has the layout of the source's, with as many slots as the memory can hold. Invariants:
//!
//! - A slot of our own table is published only if its bytes have the checksum in the source's own entry, and the
//!   digest if the table is sealed. A copy holds what the source has stored, with the source's own entries: ciphertext,
//!   or compressed slots. They are opened elsewhere for our own use (`slot`).
//! - A slot's place is reused only after every reader that *we* gave it to has released it. A reader on another host
//!   detects the reuse by `retired` and the entry, as with every table. While the ring has space for all slots, no
//!   place is written twice.
//! - The loss of a peer costs the slots that were on their way from it, and nothing else.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;

use remora_fabric::{Memory, Peer};

use super::lay_out;
use super::reader::Pieces;
use super::slot::{
    Encoded, Holder, Lent, Opened, Opening, Place, Progress, Slot, Verdict, Wanted, forged_slot, wrong_content,
};
use crate::error::Error;
use crate::expectation::{Caught, Expectation, Purpose, READ_BYTES, Reads, the_entry, the_line};
use crate::layout::{
    ENTRY_BYTES, Entry, Geometry, HEAD_BYTES, Identity, Kind, LINE_BYTES, LINE_OFFSET, Line, MAGIC, State,
};
use crate::publish::Publisher;

/// The source of the bytes of slots.
enum Way {
    /// No source at present.
    Hold,
    Source,
    Peer(Front),
}

/// A slot on its way.
struct Work {
    wanted: Wanted,
    /// Bytes of it that are stored.
    stored: u32,
    pieces: Pieces,
    from_peer: bool,
    /// Read from the source for the second time.
    again: bool,
    /// Its bytes were wrong, and had this CRC. The peer's line is read once more, to find out whether the peer has just
    /// overwritten them.
    suspect: Option<u32>,
}

/// The copy of one snapshot. See the module docs.
pub struct SnapshotCopy {
    memory: Arc<Memory>,
    /// The shape of our own table.
    own: Geometry,
    /// The first slot of our own table.
    first: u64,
    publisher: Publisher<Arc<Memory>>,
    source_entries: SourceEntries,
    source: Reads,
    way: Way,
    peer: Reads,
    works: Vec<Option<Work>>,
    /// The first number that has not been requested.
    next: u64,
    /// Requested and lost: these are requested first.
    lost: BTreeSet<u64>,
    /// Landed and verified, waiting for an earlier slot that is missing; with the bytes of content.
    landed: BTreeMap<u64, (Entry, u32)>,
    /// The next slot for our own use.
    delivered: u64,
    lent: Arc<Lent>,
    /// Of a table that is sealed or compressed: where slots are opened.
    opening: Option<Opening>,
    /// Why a slot cannot be opened.
    failed: Option<Error>,
    /// Bytes of content of slots that have arrived, including those discarded.
    arrived: u64,
    /// The last turn found nothing more to request.
    starved: bool,
}

impl SnapshotCopy {
    /// Bytes that a copy of this shape takes: the table, and behind it a place for small reads.
    pub fn memory_len(own: &Geometry) -> u64 {
        own.memory_len() + SMALL_BYTES
    }

    /// Bytes that a copy of a table that is sealed or compressed takes besides.
    pub fn opening_len(own: &Geometry) -> u64 {
        Opening::memory_len(own)
    }

    /// Creates an empty copy of the expected table in `memory`, from slot `first` on. The memory must not hold a table
    /// yet, as others may still read a former copy, and must be the sink of every peer that is read from.
    ///
    /// # Errors
    /// [`Error::Layout`] if a geometry is outside its limits, the slots differ in size from the source's, or the memory
    /// is too small; [`Error::Misuse`] if the memory holds a table already.
    pub fn create(memory: Arc<Memory>, own: Geometry, expect: Expectation, first: u64) -> Result<SnapshotCopy, Error> {
        let source = expect.geometry.checked()?;
        if own.checked()?.slot_size != source.slot_size || memory.length() < Self::memory_len(&own) {
            return Err(Error::Layout(format!(
                "a copy of {} slots of {} bytes in {} bytes of memory, of a table with slots of {} bytes",
                own.slots,
                own.slot_size,
                memory.length(),
                source.slot_size
            )));
        }
        let mut magic = [0; MAGIC.len()];
        memory.read(0, &mut magic)?;
        if magic != [0; MAGIC.len()] {
            return Err(Error::Misuse("the memory for a copy holds a table already"));
        }
        let identity = Identity { kind: Kind::Snapshot, origin: expect.origin };
        let mut publisher = lay_out(&memory, own, identity, expect.seal.clone(), expect.compressed)?;
        let opening = Opening::of(&expect, &own)?;
        publisher.publish(own.start_of(first))?;
        publisher.retire(first)?;
        let works = (READ_AHEAD_BYTES / own.slot_bytes() + 1).clamp(2, MOST_WORKS);
        let source_entries = SourceEntries::new(expect, first, small_place(&own, 0), small_place(&own, 2).at);
        Ok(SnapshotCopy {
            memory,
            own,
            first,
            publisher,
            source_entries,
            source: Reads::default(),
            way: Way::Hold,
            peer: Reads::default(),
            works: (0..works).map(|_| None).collect(),
            next: first,
            lost: BTreeSet::new(),
            landed: BTreeMap::new(),
            delivered: first,
            lent: Arc::default(),
            opening,
            failed: None,
            arrived: 0,
            starved: false,
        })
    }

    /// The memory that holds the copy.
    pub fn memory(&self) -> &Arc<Memory> {
        &self.memory
    }

    /// Slots come from the source from now on.
    pub fn read_from_source(&mut self) {
        self.leave_way();
        self.way = Way::Source;
    }

    /// Slots come from a peer's copy from now on. `slots`: the number of slots in its ring. The former peer must be
    /// closed.
    ///
    /// # Errors
    /// [`Error::Layout`] if that is not a valid number of slots.
    pub fn read_from_peer(&mut self, slots: u32) -> Result<(), Error> {
        let geometry = Geometry { slots, ..self.own }.checked()?;
        self.leave_way();
        let expect = Expectation { geometry, ..self.source_entries.front.expect.clone() };
        self.way = Way::Peer(Front::new(expect, small_place(&self.own, 1)));
        Ok(())
    }

    /// No slots are read until a new source is chosen. The former peer must be closed.
    pub fn hold(&mut self) {
        self.leave_way();
        self.way = Way::Hold;
    }

    /// The peer of the source was replaced. The former one must be closed.
    pub fn reconnect(&mut self) {
        self.source.reset();
        self.source_entries.reset();
        self.lose(|work| !work.from_peer);
    }

    fn leave_way(&mut self) {
        if let Way::Peer(_) = self.way {
            self.peer.reset();
            self.lose(|work| work.from_peer);
        }
    }

    fn lose(&mut self, which: impl Fn(&Work) -> bool) {
        for work in &mut self.works {
            if let Some(gone) = work.take_if(|work| which(work)) {
                self.lost.insert(gone.wanted.number);
            }
        }
    }

    /// Takes what has arrived, verifies and publishes it, and requests what may be requested. Never blocks; computes at
    /// most the CRC of what arrived. `peer` is the one of [`read_from_peer`](Self::read_from_peer). After a loss, close
    /// that peer and choose where to continue.
    ///
    /// # Errors
    /// [`Error::Peer`], [`Error::Fabric`]: get another peer of the source and [`reconnect`](Self::reconnect). All
    /// others end this copy.
    pub fn pump(
        &mut self,
        source: &mut dyn Peer,
        peer: Option<&mut (dyn Peer + '_)>,
        turn: &mut Turn,
    ) -> Result<Option<Loss>, Error> {
        self.check()?;
        if self.is_whole() {
            return Ok(None);
        }
        for purpose in self.source.collect(source)? {
            self.handle_from_source(purpose)?;
        }
        let loss = match peer {
            Some(peer) if matches!(self.way, Way::Peer(_)) => self.pump_peer(peer, turn)?,
            _ => None,
        };
        let look = turn.look && self.needs_the_source();
        self.source_entries.ask(&mut self.source, look);
        if !matches!(self.way, Way::Peer(_)) {
            self.ask_slots()?;
        }
        self.source.post_within(source, &mut turn.allowance)?;
        Ok(loss)
    }

    /// The peer's part of a turn. A failure of the peer is a loss, a failure of ours an error.
    fn pump_peer(&mut self, peer: &mut (dyn Peer + '_), turn: &mut Turn) -> Result<Option<Loss>, Error> {
        let arrived = match self.peer.collect(peer) {
            Ok(arrived) => arrived,
            Err(error) => return Ok(Some(Loss::Gone(error))),
        };
        for purpose in arrived {
            if let Some(loss) = self.handle_from_peer(purpose)? {
                return Ok(Some(loss));
            }
        }
        self.ask_slots()?;
        let exhausted = self.is_exhausted();
        if let Way::Peer(front) = &mut self.way {
            front.ask(&mut self.peer, turn.look && exhausted && !front.is_sealed());
        }
        Ok(self.peer.post_within(peer, &mut turn.allowance).err().map(Loss::Gone))
    }

    /// Whether news of the source would be of use. Behind a peer, only for slots that the peer has: otherwise many
    /// readers would read lines of the source that none of them can follow yet.
    fn needs_the_source(&self) -> bool {
        match &self.way {
            Way::Hold => false,
            Way::Source => true,
            Way::Peer(front) => front.is_sealed() || front.published() > self.source_entries.seen(),
        }
    }

    /// Whether everything that is wanted and that the present source of slots has published was requested. A slot that
    /// was lost can be one that the present source does not have yet.
    fn is_exhausted(&self) -> bool {
        self.first_wanted() >= self.front_of_way().map_or(0, Front::published)
    }

    /// The number of the slot that is requested next.
    fn first_wanted(&self) -> u64 {
        self.lost.first().copied().unwrap_or(self.next)
    }

    fn front_of_way(&self) -> Option<&Front> {
        match &self.way {
            Way::Hold => None,
            Way::Source => Some(&self.source_entries.front),
            Way::Peer(front) => Some(front),
        }
    }

    fn handle_from_source(&mut self, purpose: Purpose) -> Result<(), Error> {
        match purpose {
            Purpose::Head => self.source_entries.front.handle_head(&self.memory),
            Purpose::Line => {
                self.source_entries.front.handle_line(&self.memory, &mut self.source)?;
                self.seal_if_whole()
            }
            Purpose::Probe => self.source_entries.handle_entries(&self.memory),
            Purpose::Piece { buffer, piece } => self.land(buffer, piece).map(drop),
            Purpose::Entry { .. } => Ok(()),
        }
    }

    fn handle_from_peer(&mut self, purpose: Purpose) -> Result<Option<Loss>, Error> {
        let front = match &mut self.way {
            Way::Peer(front) => front,
            Way::Hold | Way::Source => return Ok(None),
        };
        let handled = match purpose {
            Purpose::Head => front.handle_head(&self.memory),
            Purpose::Line => front.handle_line(&self.memory, &mut self.peer),
            Purpose::Piece { buffer, piece } => return self.land(buffer, piece),
            Purpose::Probe | Purpose::Entry { .. } => Ok(()),
        };
        // A line that was caught in the middle of a change has been requested again, and says nothing yet.
        let is_news = purpose == Purpose::Line && !front.is_line_asked();
        if let Err(error) = handled {
            return Ok(Some(Loss::Gone(error)));
        }
        Ok(if is_news { self.judge_suspects() } else { None })
    }

    /// One more piece has arrived; the last piece completes its slot.
    fn land(&mut self, index: u8, piece: u8) -> Result<Option<Loss>, Error> {
        let Some(Some(work)) = self.works.get_mut(usize::from(index)) else { return Ok(None) };
        let at = self.own.slot_offset(work.wanted.number);
        // In bytes of content: those of a compressed slot count for more.
        self.arrived += work.pieces.land(piece) * u64::from(work.wanted.length) / u64::from(work.stored.max(1));
        // The digest of a slot of a sealed table says more than its sum.
        if self.source_entries.front.expect.seal.is_none() {
            work.pieces.sum(&self.memory, at)?;
        }
        if !work.pieces.are_here() {
            return Ok(None);
        }
        let number = work.wanted.number;
        // The entry was there when the slot was requested, and is dropped only when the slot is published.
        let Some(entry) = self.source_entries.entry(number).copied() else { return Ok(None) };
        let place = at..at + u64::from(entry.length);
        let bytes = (&**self.memory, place.clone());
        let opening = self.opening.as_mut();
        let has_digest = opening.map_or(Ok(None), |opening| opening.is_right(&entry.seal, bytes))?;
        let got = match has_digest {
            None => work.pieces.crc(),
            Some(true) => entry.crc,
            Some(false) => self.memory.crc32c(place)?,
        };
        // Damaged bytes have another sum, and forged ones may have this one.
        let is_forged = has_digest == Some(false) && got == entry.crc;
        match work.wanted.judge(Some(entry), got, &self.own)? {
            Verdict::Right if !is_forged => {
                let length = work.wanted.length;
                self.works[usize::from(index)] = None;
                self.landed.insert(number, (entry, length));
                self.publish()?;
            }
            _ if work.from_peer => {
                work.suspect = Some(got);
                if let Way::Peer(front) = &mut self.way {
                    front.ask(&mut self.peer, true);
                }
            }
            _ if work.again && is_forged => return Err(forged_slot(number)),
            _ if work.again => return Err(Error::Corrupt { slot: number, want: entry.crc, got }),
            _ => {
                work.again = true;
                let from = self.source_entries.front.expect.geometry.slot_offset(number);
                work.pieces = Pieces::ask(&mut self.source, index, from, entry.length, at);
            }
        }
        Ok(None)
    }

    /// A line that was read after the wrong bytes tells whether the peer has overwritten them meanwhile, which it may.
    fn judge_suspects(&self) -> Option<Loss> {
        let retired = self.front_of_way().and_then(Front::line).map_or(0, |line| line.retired);
        let suspects = self.works.iter().flatten();
        let (slot, got) = suspects.filter_map(|work| Some((work.wanted.number, work.suspect?))).next()?;
        if retired > slot {
            return Some(Loss::Passed { slot, oldest: retired });
        }
        let want = self.source_entries.entry(slot).map_or(0, |entry| entry.crc);
        Some(Loss::Lied { slot, want, got })
    }

    /// Publishes the slots that are here without a gap.
    fn publish(&mut self) -> Result<(), Error> {
        let mut number = self.held();
        while let Some((entry, length)) = self.landed.remove(&number) {
            self.publisher.complete(entry)?;
            self.publisher.publish(entry.position + u64::from(length))?;
            number += 1;
        }
        self.source_entries.forget_below(number);
        self.seal_if_whole()
    }

    fn seal_if_whole(&mut self) -> Result<(), Error> {
        let end = self.source_entries.front.line().and_then(|line| line.end);
        if self.publisher.line().state == State::Open && end == Some(self.publisher.line().published) {
            self.publisher.seal()?;
        }
        Ok(())
    }

    /// Requests everything that is wanted, published, and has a place.
    fn ask_slots(&mut self) -> Result<(), Error> {
        self.starved = true;
        while let Some(index) = self.works.iter().position(Option::is_none) {
            let Some((wanted, stored)) = self.next_wanted()? else { return Ok(()) };
            let (number, to) = (wanted.number, self.own.slot_offset(wanted.number));
            let (reads, geometry, from_peer) = match &self.way {
                Way::Hold => return Ok(()),
                Way::Source => (&mut self.source, &self.source_entries.front.expect.geometry, false),
                Way::Peer(front) => (&mut self.peer, &front.expect.geometry, true),
            };
            // At most `MOST_WORKS`, which fits the type.
            let pieces = Pieces::ask(reads, index as u8, geometry.slot_offset(number), stored, to);
            self.works[index] = Some(Work { wanted, stored, pieces, from_peer, again: false, suspect: None });
        }
        self.starved = false;
        Ok(())
    }

    /// The next slot to get, after its place was made free, and how many bytes of it are stored.
    fn next_wanted(&mut self) -> Result<Option<(Wanted, u32)>, Error> {
        let number = self.first_wanted();
        let published = self.front_of_way().map_or(0, Front::published);
        let Some(entry) = self.source_entries.entry(number).filter(|_| number < published) else { return Ok(None) };
        let length = self.source_entries.content_of(entry);
        let compressed = self.source_entries.front.expect.compressed;
        let (wanted, stored) = (Wanted { number, position: entry.position, length, compressed }, entry.length);
        let room_below = self.lent.floor(self.delivered) + u64::from(self.own.slots);
        if number >= room_below {
            return Ok(None);
        }
        if let Some(former) = number.checked_sub(u64::from(self.own.slots))
            && former >= self.publisher.line().retired
        {
            self.publisher.retire(former + 1)?;
        }
        self.publisher.begin(number)?;
        if !self.lost.remove(&number) {
            self.next += 1;
        }
        Ok(Some((wanted, stored)))
    }

    // ---- our own use ----

    /// The next verified slot, in order of the stream.
    pub fn next_slot(&mut self) -> Option<Slot> {
        let number = self.delivered;
        if number >= self.held() {
            return None;
        }
        let position = self.own.start_of(number);
        let length = (self.publisher.line().published - position).min(self.own.slot_bytes()) as u32;
        let seal = self.source_entries.front.expect.seal();
        let entry = crate::publish::load_entry(&self.memory, &self.own, number, seal).ok().flatten()?;
        let mut at = self.own.slot_offset(number);
        let (mut crc, mut encoded, lent) = (Some(entry.crc), None, Arc::clone(&self.lent));
        // All slots are delivered from one memory, as a server's module is given it once.
        let memory = match &mut self.opening {
            None => Holder::Copy(Arc::clone(&self.memory), lent),
            Some(opening) => {
                let opened = opening.open(&entry, length, (&self.memory, at));
                let opened = opened.map_err(|error| self.failed = Some(error)).ok()??;
                let Opened { memory, buffer, was, .. } = opened;
                // The entry has the sum of what is stored.
                (at, crc) = (opened.at, was.crc);
                encoded = was.method.map(|method| Encoded { method, bytes: None });
                Holder::Opened { memory, lent, _buffer: buffer }
            }
        };
        self.delivered += 1;
        self.lent.lend(number);
        Some(Slot { number, position, length, crc, encoded, place: Place::Sink(at), memory, geometry: self.own })
    }

    /// Whether all slots that were to be delivered could be opened.
    ///
    /// # Errors
    /// [`Error::Forged`], [`Error::Encoding`]: one of them could not.
    pub fn check(&mut self) -> Result<(), Error> {
        self.failed.take().map_or(Ok(()), Err)
    }

    /// The caller has used the slot.
    pub fn release(&mut self, slot: Slot) {
        self.lent.give_back(slot.number);
    }

    /// Delivers again from slot `first` on. `false`: the slot is no longer held, or its place may be reused while a
    /// process that it was delivered to may still read it. Then begin another copy, in other memory.
    pub fn rewind(&mut self, first: u64) -> bool {
        if first < self.oldest() || first > self.held() || (first < self.delivered && !self.keeps_all()) {
            return false;
        }
        if let Some(opening) = &mut self.opening {
            let Ok(renewed) = opening.renewed(&self.own) else { return false };
            *opening = renewed;
        }
        self.delivered = first;
        true
    }

    /// Returns to slot `first`, which is in use and was not released.
    pub fn resume_at(&mut self, first: u64) -> bool {
        let is_there = first >= self.publisher.line().retired && first <= self.held();
        if is_there {
            self.delivered = first;
        }
        is_there
    }

    /// Whether no place will ever be written twice: there is space for all slots of the source, which retains all of
    /// them.
    pub fn keeps_all(&self) -> bool {
        let source = self.source_entries.front.expect.geometry;
        let end = self.source_entries.front.line().and_then(|line| line.end).map(|end| source.slots_for(end));
        let most = end.unwrap_or(u64::from(source.slots)).max(1);
        u64::from(self.own.slots) + self.first >= most
    }

    /// Slots below this number are held, except those below [`oldest`](Self::oldest).
    pub fn held(&self) -> u64 {
        self.own.slots_for(self.publisher.line().published)
    }

    /// The oldest slot that others may read here.
    pub fn oldest(&self) -> u64 {
        self.publisher.line().retired
    }

    /// Bytes of content of slots that have arrived, including those discarded.
    pub fn arrived(&self) -> u64 {
        self.arrived
    }

    /// Whether the next slot has no place until the caller releases one.
    pub fn is_full(&self) -> bool {
        self.next >= self.lent.floor(self.delivered) + u64::from(self.own.slots)
    }

    /// What is known about the snapshot so far.
    pub fn progress(&self) -> Progress {
        let line = self.source_entries.front.line();
        Progress {
            published: self.held(),
            end: line.and_then(|line| line.end).map(|end| self.own.slots_for(end)),
            bytes_known: line.map_or(0, |line| line.published),
            state: line.map_or(State::Open, |line| line.state),
        }
    }

    /// Whether all slots are held, or were.
    pub fn is_whole(&self) -> bool {
        self.publisher.line().state == State::Sealed
    }

    /// Whether nothing is on its way and nothing can be requested: only time brings something new.
    pub fn is_idle(&self) -> bool {
        self.is_whole()
            || (self.starved
                && !self.source_entries.is_asked()
                && !matches!(&self.way, Way::Peer(front) if front.is_asked())
                && self.works.iter().all(Option::is_none)
                && self.source.is_posted()
                && self.peer.is_posted())
    }
}

/// Behind the table: a page for the small reads of both regions, and a page of entries. No reader of the table looks
/// there.
const SMALL_BYTES: u64 = 2 * 4096;

/// The places for small reads: 0 for the source, 1 for the peer, 2 the page of entries.
fn small_place(own: &Geometry, index: u64) -> SmallPlace {
    let page = own.memory_len();
    SmallPlace { at: if index < 2 { page + index * SmallPlace::BYTES } else { page + 4096 } }
}

const _: () = assert!(2 * SmallPlace::BYTES <= 4096);

/// Bytes requested ahead of those that are here: as many as fill the depth of a peer, 16 reads of 1 MiB.
const READ_AHEAD_BYTES: u64 = 16 * READ_BYTES as u64;

/// Maximum number of slots on their way: a number that fits the tag of a read, for tables with small slots.
const MOST_WORKS: u64 = 64;

// What one turn of a copy may do, and what may come of it.

/// What one call of [`SnapshotCopy::pump`](crate::SnapshotCopy::pump) is allowed to do.
#[derive(Debug, Clone, Copy)]
pub struct Turn {
    /// Lines may be read again to look for news. Not at every turn: each such read costs both ends a small read.
    pub look: bool,
    /// Slots are requested while this is above 0, and their bytes are subtracted: the last read may take it below 0.
    pub allowance: i64,
}

impl Turn {
    /// Without any limit.
    pub const FREE: Turn = Turn { look: true, allowance: i64::MAX };
}

/// Why nothing more can be read from a peer. The copy continues with another peer.
#[derive(Debug, thiserror::Error)]
pub enum Loss {
    /// The peer is gone, or does not answer.
    #[error("{0}")]
    Gone(Error),
    /// The bytes are not those that the source wrote, though the peer had not overwritten them.
    #[error("slot {slot} has the checksum {got:#010x}, the source's entry has {want:#010x}{}", if want == got { ", and another digest" } else { "" })]
    Lied {
        /// Number of the slot.
        slot: u64,
        /// CRC-32C in the source's own entry.
        want: u32,
        /// CRC-32C of the peer's bytes.
        got: u32,
    },
    /// The peer no longer holds the slot that we need next.
    #[error("it no longer holds slot {slot} (the oldest it holds is {oldest})")]
    Passed {
        /// The slot that was wanted.
        slot: u64,
        /// The oldest slot that it holds.
        oldest: u64,
    },
}

// The source's own statements about its snapshot, read ahead of the bytes: its progress line, and each slot's entry.
//
// The bytes may then come from any peer. Their checksum comes only from here, so a replica that forwards other bytes
// than the source's is detected. Not here: the bytes.
//
// ```text
//   head ─▶ line ─▶ entries, up to 64 in one read ─▶ entry(number)      all out of the source's own region
//            ▲ └──── published ahead of them? ──┘
//            └─ read again only when the caller says so: it has the clock
// ```

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
    fn is_line_asked(&self) -> bool {
        self.line_asked
    }

    /// Whether a read of head or line is outstanding.
    fn is_asked(&self) -> bool {
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

    fn handle_head(&mut self, sink: &Memory) -> Result<(), Error> {
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
    fn forget_below(&mut self, number: u64) {
        self.entries = self.entries.split_off(&number);
    }

    /// Slots whose entries have been seen without a gap.
    fn seen(&self) -> u64 {
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
    fn handle_entries(&mut self, sink: &Memory) -> Result<(), Error> {
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
    fn content_of(&self, entry: &Entry) -> u32 {
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
    fn is_asked(&self) -> bool {
        self.asked.is_some() || self.front.is_asked()
    }
}
