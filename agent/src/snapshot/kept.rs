//! Kept: the bytes of one snapshot, as they arrive, in a file without a name. Readers of what has not arrived wait.
//!
//! ```text
//!   0 ────────── arrived ─────────────────────────────── end
//!   read at once │ a reader waits: bytes, the end, or that no more will come
//! ```
//!
//! The file has no name, so nothing of it is left when this process ends, however it ends.

use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use remora_fabric::View;
use remora_table::{Origin, Slot};

use super::target::{Keeper, Reached, Stage};
use crate::replica::spool::Held;

/// The bytes of one snapshot, as they arrive.
pub(super) struct Kept {
    pub(super) origin: Origin,
    /// When it began to arrive.
    pub(super) begun: SystemTime,
    file: File,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Bytes that have arrived, and the slots that they came in.
    arrived: u64,
    slots: u64,
    stage: Stage,
    waiting: Vec<Waiting>,
    /// Readers that were interrupted before they waited.
    interrupted: VecDeque<u64>,
}

/// What a reader finds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Found {
    /// This number of bytes from where it reads.
    Bytes(u64),
    End,
    /// They will never come.
    Lost,
    Interrupted,
}

struct Waiting {
    /// The number of the request.
    reader: u64,
    at: u64,
    tell: Tell,
}

type Tell = Box<dyn FnOnce(Found) + Send>;

/// Interruptions that are remembered. An interruption of a request that was answered already is one, and stays until
/// this many others have come: more than the requests that the kernel has under way.
const MOST_INTERRUPTED: usize = 1024;

impl Kept {
    /// An empty one, whose bytes will be in this folder's file system.
    pub(super) fn new(folder: &Path, origin: Origin) -> io::Result<Kept> {
        let file = tempfile::tempfile_in(folder)?;
        Ok(Kept { origin, begun: SystemTime::now(), file, state: Mutex::default() })
    }

    /// Writes the bytes of the next slot.
    fn write(&self, view: &View, offset: u64, length: u32) -> io::Result<()> {
        let (at, mut done) = (self.reached().bytes, 0);
        while done < u64::from(length) {
            let left = (u64::from(length) - done) as usize;
            done += view.write_at(&self.file, at + done, offset + done, left)? as u64;
        }
        Ok(())
    }

    /// Another slot of this length is there.
    fn grow(&self, length: u32) {
        self.change(|state| {
            state.arrived += u64::from(length);
            state.slots += 1;
        });
    }

    /// Tells what there is at this byte, as soon as there is something. `reader` is a number of the caller.
    pub(super) fn when_there(&self, reader: u64, at: u64, tell: Tell) {
        let mut state = self.state();
        let interrupted = state.interrupted.iter().position(|number| *number == reader);
        let interrupted = interrupted.map(|index| _ = state.interrupted.remove(index));
        let found = state.find(at).or(interrupted.map(|()| Found::Interrupted));
        match found {
            Some(found) => {
                drop(state);
                tell(found);
            }
            None => state.waiting.push(Waiting { reader, at, tell }),
        }
    }

    /// What there is at this byte; `None`: nothing yet.
    pub(super) fn find(&self, at: u64) -> Option<Found> {
        self.state().find(at)
    }

    /// A reader waits no longer.
    pub(super) fn interrupt(&self, reader: u64) {
        let mut state = self.state();
        let Some(index) = state.waiting.iter().position(|waiting| waiting.reader == reader) else {
            state.interrupted.push_back(reader);
            if state.interrupted.len() > MOST_INTERRUPTED {
                state.interrupted.pop_front();
            }
            return;
        };
        let waiting = state.waiting.swap_remove(index);
        drop(state);
        (waiting.tell)(Found::Interrupted);
    }

    /// Bytes that have arrived.
    pub(super) fn read(&self, at: u64, length: usize) -> io::Result<Vec<u8>> {
        let mut bytes = vec![0; length];
        self.file.read_exact_at(&mut bytes, at)?;
        Ok(bytes)
    }

    fn change(&self, change: impl FnOnce(&mut State)) {
        let mut state = self.state();
        change(&mut state);
        let mut told = Vec::new();
        for waiting in std::mem::take(&mut state.waiting) {
            match state.find(waiting.at) {
                Some(found) => told.push((waiting.tell, found)),
                None => state.waiting.push(waiting),
            }
        }
        drop(state);
        told.into_iter().for_each(|(tell, found)| tell(found));
    }

    /// The numbers are right after every statement, so a panic elsewhere does not invalidate them.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Keeper for Kept {
    fn origin(&self) -> Origin {
        self.origin
    }

    fn reached(&self) -> Reached {
        let State { arrived, slots, stage, .. } = *self.state();
        Reached { bytes: arrived, slots, stage }
    }

    fn keep(&self, slot: &Slot) -> io::Result<Held> {
        let (view, range) = slot.bytes();
        self.write(view, range.start, slot.length)?;
        Ok(Held::plain(slot.number, slot.length, 0)) // whose checksum this file has no use for
    }

    fn add(&self, held: Held) -> io::Result<()> {
        self.grow(held.length);
        Ok(())
    }

    fn complete(&self) -> io::Result<()> {
        self.change(|state| state.stage = Stage::Whole);
        Ok(())
    }

    fn lose(&self) {
        self.change(|state| {
            if state.stage == Stage::Arriving {
                state.stage = Stage::Lost;
            }
        });
    }
}

impl State {
    fn find(&self, at: u64) -> Option<Found> {
        match self.stage {
            _ if at < self.arrived => Some(Found::Bytes(self.arrived - at)),
            Stage::Arriving => None,
            Stage::Whole => Some(Found::End),
            Stage::Lost => Some(Found::Lost),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::sync::{Arc, mpsc};

    use remora_fabric::{Memory, Pages};

    use super::*;

    fn kept() -> Kept {
        let origin = Origin { generation: 1, history: "a".repeat(40).parse().unwrap(), offset: 7 };
        Kept::new(Path::new("/tmp"), origin).unwrap()
    }

    /// Adds a slot with these bytes.
    fn arrive(kept: &Kept, bytes: &[u8]) {
        let memory = Memory::create("slot", 4096, Pages::Small).unwrap();
        memory.write(100, bytes).unwrap();
        kept.write(&memory, 100, bytes.len() as u32).unwrap();
        kept.grow(bytes.len() as u32);
    }

    fn asks(kept: &Arc<Kept>, reader: u64, at: u64) -> mpsc::Receiver<Found> {
        let (tell, told) = mpsc::channel();
        kept.when_there(reader, at, Box::new(move |found| tell.send(found).unwrap()));
        told
    }

    #[test]
    fn bytes_that_have_arrived_are_read_and_readers_of_others_wait_for_them() {
        let kept = Arc::new(kept());
        let waits = asks(&kept, 1, 0);
        assert!(waits.try_recv().is_err());
        arrive(&kept, b"0123456789");
        assert_eq!(waits.try_recv(), Ok(Found::Bytes(10)));
        assert_eq!(asks(&kept, 2, 7).try_recv(), Ok(Found::Bytes(3)));
        assert_eq!(kept.read(7, 3).unwrap(), b"789");
        let (next, far) = (asks(&kept, 3, 10), asks(&kept, 4, 13));
        arrive(&kept, b"abc");
        assert_eq!(next.try_recv(), Ok(Found::Bytes(3)));
        assert!(far.try_recv().is_err());
        kept.complete().unwrap();
        assert_eq!(far.try_recv(), Ok(Found::End));
        assert_eq!(kept.read(5, 8).unwrap(), b"56789abc");
        assert_eq!(kept.reached(), Reached { bytes: 13, slots: 2, stage: Stage::Whole });
        kept.lose();
        assert_eq!(kept.find(13), Some(Found::End), "a whole snapshot cannot be lost");
    }

    #[test]
    fn readers_of_a_lost_snapshot_are_told_so_and_never_that_it_ends() {
        let kept = Arc::new(kept());
        arrive(&kept, b"half");
        let waits = asks(&kept, 1, 4);
        kept.lose();
        assert_eq!(waits.try_recv(), Ok(Found::Lost));
        assert_eq!(asks(&kept, 2, 1000).try_recv(), Ok(Found::Lost));
        assert_eq!(asks(&kept, 3, 0).try_recv(), Ok(Found::Bytes(4)), "what is there can be read");
    }

    #[test]
    fn an_interrupted_reader_waits_no_longer_whichever_comes_first() {
        let kept = Arc::new(kept());
        let (first, second) = (asks(&kept, 1, 0), asks(&kept, 2, 0));
        kept.interrupt(1);
        assert_eq!(first.try_recv(), Ok(Found::Interrupted));
        assert!(second.try_recv().is_err());
        kept.interrupt(3);
        assert_eq!(asks(&kept, 3, 0).try_recv(), Ok(Found::Interrupted));
        assert!(asks(&kept, 3, 0).try_recv().is_err(), "an interruption counts once");
        for reader in 100..100 + 2 * MOST_INTERRUPTED as u64 {
            kept.interrupt(reader);
        }
        assert_eq!(kept.state().interrupted.len(), MOST_INTERRUPTED);
    }
}
