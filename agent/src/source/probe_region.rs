//! Trial: a region without value, lent to whoever measures the way to this source (`remora probe`), with or without a snapshot.
//!
//! ```text
//!   Absent ── somebody asks ──▶ Making (a thread of its own) ──▶ Lent ── the last of them has gone ──▶ Absent
//! ```
//!
//! It is memory beyond `--memory`: [`TRIAL_BYTES`], once for all who measure at a time, and none while nobody does. Decides nothing about who
//! may read: that is the grant of a session, as for tables.

use std::collections::HashSet;
use std::sync::Arc;

use remora_fabric::{Error, Memory, Pages, RegionId};

use super::exports::Exports;
use super::machine::Session;

/// What is lent, and to whom.
#[derive(Default)]
pub(super) struct Trial {
    state: State,
    sessions: HashSet<Session>,
    /// Of the last region that was made: one that is being taken back is never mistaken for the next.
    generation: u64,
}

#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum State {
    #[default]
    Absent,
    Making,
    Lent(RegionId),
}

/// What there is to do after somebody has asked.
pub(super) enum Wanted {
    /// Make the region of this name.
    Make(RegionId),
    /// It is being made.
    Wait,
    /// Tell them where it is.
    Offer(RegionId),
}

impl Trial {
    /// A session wants to measure.
    pub(super) fn wanted(&mut self, session: Session) -> Wanted {
        self.sessions.insert(session);
        match self.state {
            State::Making => Wanted::Wait,
            State::Lent(id) => Wanted::Offer(id),
            State::Absent => {
                self.state = State::Making;
                self.generation += 1;
                Wanted::Make(RegionId { generation: self.generation, region: TRIAL_REGION })
            }
        }
    }

    /// The region is there, or can't be had; who waits for it. With nobody left it is to be taken back at once: `None`.
    pub(super) fn made(&mut self, id: Option<RegionId>) -> Option<Vec<Session>> {
        self.state = id.map_or(State::Absent, State::Lent);
        if self.sessions.is_empty() {
            self.state = State::Absent;
            return None;
        }
        let waiting = self.sessions.iter().copied().collect();
        if id.is_none() {
            self.sessions.clear();
        }
        Some(waiting)
    }

    /// A session has ended; what is to be taken back, if it was the last that measured.
    pub(super) fn left(&mut self, session: Session) -> Option<RegionId> {
        let was_here = self.sessions.remove(&session);
        match self.state {
            State::Lent(id) if was_here && self.sessions.is_empty() => {
                self.state = State::Absent;
                Some(id)
            }
            _ => None,
        }
    }
}

/// Makes the region and lends it by every transport that takes it. Blocks: its pages are touched, and an RDMA device is told of them.
///
/// # Errors
/// No memory, or no transport that takes it.
pub(super) fn lend(id: RegionId, exports: &Exports) -> Result<(), Error> {
    let memory = Arc::new(Memory::create("remora-trial", TRIAL_BYTES, Pages::Small)?);
    memory.prefault(0..TRIAL_BYTES)?;
    // Pages that differ, should anything on the way be clever about those that don't.
    for (page, offset) in (0..TRIAL_BYTES).step_by(PAGE_BYTES).enumerate() {
        memory.fill(offset..offset + PAGE_BYTES as u64, (page % 251) as u8)?;
    }
    exports.export_by_any(id, &memory)
}

/// Beside the tables' two regions.
const TRIAL_REGION: u32 = 2;

/// Sixteen of the largest reads that are measured: more than processors' own caches hold, so that reading is not out of those.
const TRIAL_BYTES: u64 = 64 << 20;

const PAGE_BYTES: usize = 4096;

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn it_is_made_once_for_all_and_taken_back_with_the_last() {
        let mut trial = Trial::default();
        let Wanted::Make(id) = trial.wanted(1) else { panic!("it was not there") };
        assert!(matches!(trial.wanted(2), Wanted::Wait));
        let mut told = trial.made(Some(id)).unwrap();
        told.sort_unstable();
        assert_eq!(told, [1, 2]);
        assert!(matches!(trial.wanted(3), Wanted::Offer(again) if again == id));
        assert_eq!((trial.left(1), trial.left(3), trial.left(9), trial.left(2)), (None, None, None, Some(id)));
        let Wanted::Make(next) = trial.wanted(4) else { panic!("it was taken back") };
        assert!(next.generation > id.generation);
    }

    #[test]
    fn what_nobody_waits_for_any_more_is_taken_back_at_once() {
        let mut trial = Trial::default();
        let Wanted::Make(id) = trial.wanted(1) else { panic!("it was not there") };
        assert_eq!(trial.left(1), None, "it is not there yet");
        assert_eq!(trial.made(Some(id)), None);
        assert!(matches!(trial.wanted(1), Wanted::Make(_)));
        assert_eq!(trial.made(None), Some(vec![1]), "it could not be made: they are told");
        assert!(matches!(trial.wanted(2), Wanted::Make(_)));
    }
}
