//! The state of a snapshot's reader: which slots are published, which to get next, which are ready to be delivered.
//!
//! No reads here: `fetch` and `in_place` take the next slot from the plan and report what they found.

use std::collections::{BTreeMap, VecDeque};

use super::{slot::Slot, verdict::Wanted};
use crate::{
    error::Error,
    expectation::Expectation,
    layout::{Geometry, Line, State},
};

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
