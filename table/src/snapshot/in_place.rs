//! Snapshots in memory that this process can map: slots verified where they are, and what a writer that has ended left.

use std::sync::Arc;

use remora_fabric::{Completion, Peer, View};

use super::fetch::Plan;
use super::slot::{Holder, Place, Slot, Wanted, judge_now};
use crate::error::Error;
use crate::expectation::Expectation;
use crate::layout::{Geometry, HEAD_BYTES, Kind, State};
use crate::publish::{load_entry_again, load_line};
use crate::reads::{Caught, from_peer, the_line};

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
