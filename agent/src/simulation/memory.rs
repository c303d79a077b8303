//! Memory: the tables of the sources, as readers find them.

use std::collections::{BTreeMap, VecDeque};

/// The tables of all sources, by source and generation.
#[derive(Default)]
pub(super) struct Memories {
    pub(super) snapshots: BTreeMap<(usize, u64), Snapshot>,
    pub(super) journals: BTreeMap<(usize, u64), Journal>,
}

/// The slots of one snapshot.
pub(super) struct Snapshot {
    slots: VecDeque<u64>,
    /// Slots below this one were written over.
    pub(super) retired: u64,
    /// The number of slots, once all are there.
    pub(super) end: Option<u64>,
    /// Slots that there is room for.
    pub(super) room: u64,
}

/// The stream behind the snapshots.
pub(super) struct Journal {
    /// Offset of the first byte.
    pub(super) first: u64,
    bytes: VecDeque<u8>,
    room: usize,
}

/// A reader asked for what is no longer there, or not to be read by it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Lost(pub(super) &'static str);

impl Snapshot {
    pub(super) fn new(room: u64) -> Snapshot {
        Snapshot { slots: VecDeque::new(), retired: 0, end: None, room }
    }

    pub(super) fn published(&self) -> u64 {
        self.retired + self.slots.len() as u64
    }

    pub(super) fn is_full(&self) -> bool {
        self.slots.len() as u64 >= self.room
    }

    pub(super) fn push(&mut self, slot: u64) {
        self.slots.push_back(slot);
    }

    /// Lets the writer use the slots below this one again.
    pub(super) fn retire(&mut self, below: u64) {
        while self.retired < below && self.slots.pop_front().is_some() {
            self.retired += 1;
        }
    }

    fn read(&self, from: u64, most: usize) -> Result<Vec<u64>, Lost> {
        if from < self.retired {
            return Err(Lost("the slot was written over"));
        }
        Ok(self.slots.iter().skip((from - self.retired) as usize).take(most).copied().collect())
    }
}

impl Journal {
    pub(super) fn new(first: u64, room: usize) -> Journal {
        Journal { first, bytes: VecDeque::new(), room }
    }

    /// Offset of the last byte.
    pub(super) fn end(&self) -> u64 {
        self.first + self.bytes.len() as u64 - 1
    }

    pub(super) fn append(&mut self, bytes: &[u8]) {
        self.bytes.extend(bytes);
        let excess = self.bytes.len().saturating_sub(self.room);
        self.bytes.drain(..excess);
        self.first += excess as u64;
    }
}

impl Memories {
    /// Slots from this one on, and the number of all slots once it is known.
    pub(super) fn slots(&self, key: (usize, u64), from: u64, most: usize) -> Result<(Vec<u64>, Option<u64>), Lost> {
        let snapshot = self.snapshots.get(&key).ok_or(Lost("the snapshot was revoked"))?;
        Ok((snapshot.read(from, most)?, snapshot.end))
    }

    /// Bytes of the stream from this offset on.
    pub(super) fn stream(&self, key: (usize, u64), next: u64, most: usize) -> Result<Vec<u8>, Lost> {
        let journal = self.journals.get(&key).ok_or(Lost("the journal was revoked"))?;
        if next < journal.first || next > journal.end() + 1 {
            return Err(Lost("the journal does not hold this offset"));
        }
        Ok(journal.bytes.iter().skip((next - journal.first) as usize).take(most).copied().collect())
    }

    /// All that a source has lent.
    pub(super) fn revoke_all(&mut self, source: usize) {
        self.snapshots.retain(|&(of, _), _| of != source);
        self.journals.retain(|&(of, _), _| of != source);
    }
}
