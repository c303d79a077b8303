//! Mixed: the payload for a server that has our module, while it is under way: writes what the [`Mixture`] plans, and gives slots back
//! when the server has used them up.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use remora_table::{LoadPage, Place, Slot};

use super::feed::SnapshotFeed;
use super::introduction::{Answer, Shown};
use super::link::Link;
use super::meter::Meter;
use super::mixture::{Mixture, Part, REFER_FROM_BYTES};
use super::payload::{WRITE_PIECE, WriteTrouble};

/// See the module's text.
pub(super) struct Mixed {
    mark: [u8; 40],
    mixture: Mixture,
    tally: LoadPage,
    /// Taken, planned, and not given back.
    lent: VecDeque<Lent>,
    /// Positions below this were taken.
    taken: u64,
    /// Parts that have been written: the second is the greeting.
    parts: u64,
    began: Instant,
}

/// A slot, and when it is used up.
struct Lent {
    slot: Slot,
    /// Position behind its last byte.
    end: u64,
    /// Fields that must have been counted.
    fields: u64,
}

/// What a turn has come to.
pub(super) enum Turn {
    /// So many bytes were written, or something else has moved.
    Moved(usize),
    /// There is nothing to do, or no room.
    Nothing,
    /// All is written and was used; these bytes make it whole.
    Whole(Vec<u8>),
}

/// Slots that may be with the server at once: enough that it need not wait for us, while what it has read is soon given back.
const LENT_MAX: usize = 12;

/// Strings no longer than so many slots are told when all of them is there, in slots that the source keeps: half of those that may be with
/// the server. (Slots in buffers are few, and may all be taken before such a string ends.)
const WHOLE_SLOTS: u64 = LENT_MAX as u64 / 2;

/// The magic and the greeting.
const GREETING_PARTS: u64 = 2;

/// How long the server may take from our first bytes to the greeting: it is empty, and has only to begin. One that loads from a file after
/// all never gets there.
const BEGIN_LIMIT: Duration = Duration::from_secs(20);

impl Mixed {
    /// At the beginning, with the slot that showed that there is one.
    pub(super) fn new(mark: [u8; 40], shown: Shown, answer: Answer, first: Slot) -> Result<Mixed, WriteTrouble> {
        let whole = if matches!(first.place, Place::View(_)) { WHOLE_SLOTS * u64::from(first.length) } else { 0 };
        let mixture = Mixture::new(shown.ticket, answer.idle_times, REFER_FROM_BYTES, whole);
        let began = Instant::now();
        let mut mixed = Mixed { mark, mixture, tally: shown.tally, lent: VecDeque::new(), taken: 0, parts: 0, began };
        mixed.take(first)?;
        Ok(mixed)
    }

    /// Slots that were not given back.
    pub(super) fn into_slots(self) -> impl Iterator<Item = Slot> {
        self.lent.into_iter().map(|lent| lent.slot)
    }

    /// Whether something may be written.
    pub(super) fn has_part(&self) -> bool {
        self.mixture.part().is_some() && !self.awaits_greeting()
    }

    /// Bytes that were not written but referred to.
    pub(super) fn referred(&self) -> u64 {
        self.mixture.referred()
    }

    /// One turn. `fetched`: there are no more slots, and all were given back.
    pub(super) fn turn(
        &mut self,
        link: &mut Link,
        snapshot: Option<&mut SnapshotFeed>,
        meter: &Meter,
        fetched: bool,
    ) -> Result<Turn, WriteTrouble> {
        if let Some(text) = self.tally.refusal() {
            return Err(WriteTrouble::Module(text));
        }
        let mut moved = false;
        if let Some(snapshot) = snapshot {
            moved |= self.give_back(snapshot, meter)?;
            moved |= self.take_next(snapshot, meter)?;
        }
        if self.awaits_greeting() && self.began.elapsed() > BEGIN_LIMIT {
            let text = format!("the server did not begin to load from its link within {} s", BEGIN_LIMIT.as_secs());
            return Err(WriteTrouble::Module(text));
        }
        if self.has_part() {
            return match self.write(link)? {
                Some(bytes) => Ok(Turn::Moved(bytes)),
                None if moved => Ok(Turn::Moved(0)),
                None => Ok(Turn::Nothing),
            };
        }
        if fetched && self.lent.is_empty() && self.mixture.part().is_none() {
            let mut end = self.mixture.finish().map_err(WriteTrouble::Module)?;
            end.extend_from_slice(&self.mark);
            return Ok(Turn::Whole(end));
        }
        Ok(if moved { Turn::Moved(0) } else { Turn::Nothing })
    }

    /// The greeting is on its way: nothing else may follow before it is counted.
    fn awaits_greeting(&self) -> bool {
        self.parts >= GREETING_PARTS && self.tally.done() == 0
    }

    fn take_next(&mut self, snapshot: &mut SnapshotFeed, meter: &Meter) -> Result<bool, WriteTrouble> {
        if self.lent.len() >= LENT_MAX {
            return Ok(false);
        }
        let Some(slot) = snapshot.next_slot() else { return Ok(false) };
        snapshot.count(&slot, meter);
        self.take(slot)?;
        Ok(true)
    }

    fn take(&mut self, slot: Slot) -> Result<(), WriteTrouble> {
        let (view, place) = slot.bytes();
        self.mixture.take(view, place).map_err(|error| WriteTrouble::Module(error.to_string()))?;
        self.taken += u64::from(slot.length);
        self.lent.push_back(Lent { slot, end: self.taken, fields: self.mixture.fields() });
        Ok(())
    }

    /// Gives back what is used up, which says whether it was whole until now.
    fn give_back(&mut self, snapshot: &mut SnapshotFeed, meter: &Meter) -> Result<bool, WriteTrouble> {
        let mut moved = false;
        // In this order: what the server counted, it had read before; and before the entry is looked at again.
        let (done, passed) = (self.tally.done(), self.mixture.passes_from());
        while self.lent.front().is_some_and(|lent| lent.fields <= done && lent.end <= passed) {
            let Some(lent) = self.lent.pop_front() else { break };
            let (number, length) = (lent.slot.number, lent.slot.length);
            snapshot.release(lent.slot).map_err(|error| WriteTrouble::Feed(error.into()))?;
            meter.slots_below.set(number + 1);
            meter.bytes_delivered.add(u64::from(length));
            moved = true;
        }
        Ok(moved)
    }

    /// Writes of the next part what there is room for.
    fn write(&mut self, link: &mut Link) -> Result<Option<usize>, WriteTrouble> {
        let wrote = match self.mixture.part() {
            Some(Part::Bytes(bytes)) => link.write(bytes)?,
            Some(Part::Pass(range)) => {
                let lent = self.lent.iter().find(|lent| range.start < lent.end);
                let Some(Lent { slot, end, .. }) = lent else {
                    return Err(WriteTrouble::Module("a part of the snapshot was given back too early".into()));
                };
                let (view, place) = slot.bytes();
                let left = range.end.min(*end) - range.start;
                let offset = place.end - (end - range.start);
                link.write_view(view, offset, left.min(WRITE_PIECE as u64) as usize)?
            }
            None => None,
        };
        let Some(bytes) = wrote else { return Ok(None) };
        self.parts += u64::from(self.mixture.wrote(bytes));
        Ok(Some(bytes))
    }
}
