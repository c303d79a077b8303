//! Referenced payload: a snapshot on its way to a server that has our module. It writes what the [`ReferencePlan`]
//! says, and returns slots when the server has used them. The caller hands slots in, from whatever source.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use remora_table::{LoadPage, Place, Slot};

use super::payload::{WRITE_PIECE, WriteError};
use super::plain::Used;
use super::reference_plan::{Abilities, Part, ReferencePlan};
use crate::replica::introduction::{Answer, GrantedMemory};
use crate::replica::link::Link;

/// A snapshot whose long strings the server copies from shared memory.
pub(super) struct ReferencedPayload {
    mark: [u8; 40],
    plan: ReferencePlan,
    tally: LoadPage,
    /// Slots that were planned and not returned yet.
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

/// The result of a write.
pub(super) enum Turn {
    /// This number of bytes was written.
    Wrote(usize),
    /// There is nothing to write, or no room.
    Nothing,
    /// All slots were written and used. These bytes complete the payload.
    Whole(Vec<u8>),
}

/// Slots that may be with the server at once: enough that it need not wait for us, while what it has read is soon given
/// back.
const LENT_MAX: usize = 12;

/// Strings no longer than this number of slots are described when all of them are there, in slots that the source
/// keeps: half of those that may be with the server. (Slots in buffers are few, and may all be taken before such a
/// string ends.)
const WHOLE_SLOTS: u64 = LENT_MAX as u64 / 2;

/// Checks a slot in the source's own memory. The reader does not sum such slots, because a server sums the whole
/// snapshot as it loads; but a server that is only referred to strings sums none of their bytes.
fn check_in_place(slot: &Slot) -> Result<(), WriteError> {
    let (view, place) = slot.bytes();
    let got = view.crc32c(place).map_err(|error| WriteError::Module(error.to_string()))?;
    let want = slot.crc().map_err(|error| WriteError::Module(error.to_string()))?;
    if got == want {
        return Ok(());
    }
    let error = remora_table::Error::Corrupt { slot: slot.number, want, got };
    Err(WriteError::Damaged(error.into()))
}

/// The magic and the greeting.
const GREETING_PARTS: u64 = 2;

/// How long the server may take from our first bytes to the greeting: it is empty, and has only to begin. One that
/// loads from a file after all never gets there.
const BEGIN_LIMIT: Duration = Duration::from_secs(20);

impl ReferencedPayload {
    /// Begins a payload with the snapshot's first slot.
    pub(super) fn new(
        now: Instant,
        mark: [u8; 40],
        shown: GrantedMemory,
        answer: Answer,
        first: Slot,
    ) -> Result<ReferencedPayload, WriteError> {
        let whole = if matches!(first.place, Place::View(_)) { WHOLE_SLOTS * u64::from(first.length) } else { 0 };
        let abilities = Abilities { idle_times: answer.idle_times, runs: answer.fast_keys.is_ok() };
        let plan = ReferencePlan::new(shown.ticket, abilities, whole);
        let (tally, lent) = (shown.tally, VecDeque::new());
        let mut payload = ReferencedPayload { mark, plan, tally, lent, taken: 0, parts: 0, began: now };
        payload.take(first)?;
        Ok(payload)
    }

    /// Slots that were not given back.
    pub(super) fn into_slots(self) -> impl Iterator<Item = Slot> {
        self.lent.into_iter().map(|lent| lent.slot)
    }

    /// Whether something may be written.
    pub(super) fn has_part(&self) -> bool {
        self.plan.part().is_some() && !self.awaits_greeting()
    }

    /// Bytes that were not written but referred to.
    pub(super) fn referred(&self) -> u64 {
        self.plan.referred()
    }

    /// Returns the slots that are used up. The error says that the module refused.
    pub(super) fn settle(&mut self) -> Result<Vec<Used>, WriteError> {
        if let Some(text) = self.tally.refusal() {
            return Err(WriteError::Module(text));
        }
        // In this order: what the server counted, it had read before; and before the entry is looked at again.
        let (done, passed) = (self.tally.done(), self.plan.passes_from());
        let mut used = Vec::new();
        while self.lent.front().is_some_and(|lent| lent.fields <= done && lent.end <= passed) {
            used.extend(self.lent.pop_front().map(|lent| Used { slot: lent.slot, alone: false }));
        }
        Ok(used)
    }

    /// Whether another slot may be with the server.
    pub(super) fn wants_slot(&self) -> bool {
        self.lent.len() < LENT_MAX
    }

    /// Plans what is written of this slot, which follows the one before.
    pub(super) fn take(&mut self, slot: Slot) -> Result<(), WriteError> {
        let (view, place) = slot.bytes();
        if matches!(slot.place, Place::View(_)) {
            check_in_place(&slot)?;
        }
        self.plan.take(view, place).map_err(|error| WriteError::Module(error.to_string()))?;
        self.taken += u64::from(slot.length);
        self.lent.push_back(Lent { slot, end: self.taken, fields: self.plan.fields() });
        Ok(())
    }

    /// Writes as much as the socket takes. `fetched` says that no more slots follow.
    pub(super) fn write(&mut self, now: Instant, link: &mut Link, fetched: bool) -> Result<Turn, WriteError> {
        if self.awaits_greeting() && now.duration_since(self.began) > BEGIN_LIMIT {
            let text = format!("the server did not begin to load from its link within {} s", BEGIN_LIMIT.as_secs());
            return Err(WriteError::Module(text));
        }
        if self.has_part() {
            return Ok(self.write_part(link)?.map_or(Turn::Nothing, Turn::Wrote));
        }
        if fetched && self.lent.is_empty() && self.plan.part().is_none() {
            let mut end = self.plan.finish().map_err(WriteError::Module)?;
            end.extend_from_slice(&self.mark);
            return Ok(Turn::Whole(end));
        }
        Ok(Turn::Nothing)
    }

    /// The greeting is on its way: nothing else may follow before the server has counted it.
    fn awaits_greeting(&self) -> bool {
        self.parts >= GREETING_PARTS && self.tally.done() == 0
    }

    /// Writes as much of the next part as the socket takes.
    fn write_part(&mut self, link: &mut Link) -> Result<Option<usize>, WriteError> {
        let wrote = match self.plan.part() {
            Some(Part::Bytes(bytes)) => link.write(bytes)?,
            Some(Part::Pass(range)) => {
                let lent = self.lent.iter().find(|lent| range.start < lent.end);
                let Some(Lent { slot, end, .. }) = lent else {
                    return Err(WriteError::Module("a part of the snapshot was given back too early".into()));
                };
                let (view, place) = slot.bytes();
                let left = range.end.min(*end) - range.start;
                let offset = place.end - (end - range.start);
                link.write_view(view, offset, left.min(WRITE_PIECE as u64) as usize)?
            }
            None => None,
        };
        let Some(bytes) = wrote else { return Ok(None) };
        self.parts += u64::from(self.plan.wrote(bytes));
        Ok(Some(bytes))
    }
}
