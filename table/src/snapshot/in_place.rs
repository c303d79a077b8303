//! Slots verified in the source's memory, for a peer that can map it.
//!
//! No byte is copied. In return, the slot may be overwritten *after* it was verified, while the caller uses it; so its
//! entry is loaded again when it is released.
//!
//! If the source promises that no slot is ever overwritten ([`InPlace::unchanging`]), the bytes are not even read: they
//! are the very bytes that the writer summed, and it stored them before the entry that we see.

use std::sync::Arc;

use remora_fabric::{Completion, Peer, View};

use super::{
    plan::Plan,
    slot::{Holder, Place, Slot},
    verdict::{Wanted, judge_now},
};
use crate::{
    error::Error,
    layout::{Geometry, HEAD_BYTES, Kind},
    publish::{load_entry_again, load_line},
    reads::{Caught, from_peer, the_line},
};

pub(super) struct InPlace {
    view: Arc<View>,
    head_checked: bool,
    /// Maximum number of slots verified ahead of the caller.
    ahead: usize,
    /// No slot of this memory is ever overwritten.
    unchanging: bool,
    /// The slot being verified, and the state of its verification.
    work: Option<Work>,
    caught: Caught,
    /// A peer that provides a view reports nothing by completions; the buffer is only an argument for `poll`.
    completions: Vec<Completion>,
}

#[derive(Clone, Copy)]
struct Work {
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
        self.work = Some(Work { wanted, crc, again: false });
        Ok(())
    }

    /// Delivers a slot by its entry alone.
    fn believe(&mut self, wanted: Wanted, plan: &mut Plan) -> Result<(), Error> {
        let entry = load_entry_again(&&*self.view, plan.geometry(), wanted.number, None)?;
        let crc = entry.map_or(0, |entry| entry.crc);
        self.work = Some(Work { wanted, crc, again: true });
        Ok(())
    }

    fn judge(&mut self, plan: &mut Plan) -> Result<(), Error> {
        let Some(Work { wanted, crc, again }) = self.work else {
            return Ok(());
        };
        match judge_now(&self.view, &wanted, crc, plan.geometry())? {
            None => self.deliver(plan),
            Some(want) if again => return Err(Error::Corrupt { slot: wanted.number, want, got: crc }),
            Some(_) => {
                let crc = self.sum(&wanted, plan.geometry())?;
                self.work = Some(Work { wanted, crc, again: true });
            }
        }
        Ok(())
    }

    fn sum(&self, wanted: &Wanted, geometry: &Geometry) -> Result<u32, Error> {
        let start = geometry.slot_offset(wanted.number);
        Ok(self.view.crc32c(start..start + u64::from(wanted.length))?)
    }

    fn deliver(&mut self, plan: &mut Plan) {
        let Some(Work { wanted, crc, .. }) = self.work.take() else {
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
