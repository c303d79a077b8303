//! Memory: the tables of the sources, as readers find them.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use remora_table::Origin;

use super::tables::Tables;

/// The tables of all sources, by source and generation.
#[derive(Default)]
pub(super) struct Memories {
    snapshots: BTreeMap<(usize, u64), Snapshot>,
    journals: BTreeMap<(usize, u64), Journal>,
    /// The same as real tables, if an agent of this schedule reads such.
    pub(super) real: Option<Tables>,
}

/// The slots of one snapshot.
pub(super) struct Snapshot {
    origin: Origin,
    slots: VecDeque<u64>,
    /// Slots below this one were written over.
    pub(super) retired: u64,
    /// The number of slots, once all are there.
    end: Option<u64>,
    /// Slots that there is room for.
    room: u64,
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
    fn new(origin: Origin, room: u64) -> Snapshot {
        Snapshot { origin, slots: VecDeque::new(), retired: 0, end: None, room }
    }

    pub(super) fn published(&self) -> u64 {
        self.retired + self.slots.len() as u64
    }

    fn is_full(&self) -> bool {
        self.slots.len() as u64 >= self.room
    }

    fn push(&mut self, slot: u64) {
        self.slots.push_back(slot);
    }

    /// Lets the writer use the slots below this one again.
    fn retire(&mut self, below: u64) {
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
    fn new(first: u64, room: usize) -> Journal {
        Journal { first, bytes: VecDeque::new(), room }
    }

    /// Offset of the last byte.
    pub(super) fn end(&self) -> u64 {
        self.first + self.bytes.len() as u64 - 1
    }

    fn append(&mut self, bytes: &[u8]) {
        self.bytes.extend(bytes);
        let excess = self.bytes.len().saturating_sub(self.room);
        self.bytes.drain(..excess);
        self.first += excess as u64;
    }
}

impl Memories {
    /// A source keeps one snapshot and one journal, and neither grows beyond its room. The writers of the real tables
    /// refuse what does not fit, and the model does too; that no second table lives beside is up to the source's
    /// machine.
    ///
    /// Tables of two sources that have one number are of one snapshot.
    pub(super) fn within_limits(&self) -> Result<(), String> {
        self.are_copies()?;
        let (mut snapshots, mut journals) = (BTreeSet::new(), BTreeSet::new());
        for (&(source, generation), snapshot) in &self.snapshots {
            if !snapshots.insert(source) {
                return Err(format!("source {source} holds memory for two snapshots, {generation} being the second"));
            }
            let (slots, room) = (snapshot.slots.len(), snapshot.room);
            if slots as u64 > room {
                return Err(format!("the ring of source {source} holds {slots} slots and has room for {room}"));
            }
        }
        for (&(source, generation), journal) in &self.journals {
            if !journals.insert(source) {
                return Err(format!("source {source} holds memory for two journals, {generation} being the second"));
            }
            let (bytes, room) = (journal.bytes.len(), journal.room);
            if bytes > room {
                return Err(format!("the journal of source {source} holds {bytes} bytes and has room for {room}"));
            }
        }
        Ok(())
    }

    fn are_copies(&self) -> Result<(), String> {
        let mut by_number: BTreeMap<u64, (usize, &Snapshot)> = BTreeMap::new();
        for (&(source, generation), snapshot) in &self.snapshots {
            let Some((other, before)) = by_number.insert(generation, (source, snapshot)) else { continue };
            let both = snapshot.slots.iter().zip(&before.slots);
            let differs = snapshot.retired == 0 && before.retired == 0 && both.into_iter().any(|(one, two)| one != two);
            if snapshot.origin != before.origin || differs {
                return Err(format!("sources {other} and {source} call different snapshots {generation}"));
            }
        }
        Ok(())
    }

    // ---- the source ----

    pub(super) fn begin_snapshot(&mut self, key: (usize, u64), origin: Origin, room: u64) {
        self.snapshots.insert(key, Snapshot::new(origin, room));
        if let Some(real) = &mut self.real {
            real.begin_snapshot(key, origin, room);
        }
    }

    pub(super) fn snapshot(&self, key: (usize, u64)) -> Option<&Snapshot> {
        self.snapshots.get(&key)
    }

    /// Writes one slot. `Some(false)`: the table has no room.
    pub(super) fn push(&mut self, key: (usize, u64), slot: u64) -> Option<bool> {
        let snapshot = self.snapshots.get_mut(&key)?;
        if snapshot.is_full() {
            return Some(false);
        }
        snapshot.push(slot);
        if let Some(real) = &mut self.real {
            assert!(real.push(key, slot), "the model of the table has room, and the table has none");
        }
        Some(true)
    }

    pub(super) fn retire(&mut self, key: (usize, u64), below: u64) {
        self.snapshots.get_mut(&key).into_iter().for_each(|snapshot| snapshot.retire(below));
        self.real.iter_mut().for_each(|real| real.retire(key, below));
    }

    /// All slots are there.
    pub(super) fn finish(&mut self, key: (usize, u64)) {
        if let Some(snapshot) = self.snapshots.get_mut(&key) {
            snapshot.end = Some(snapshot.published());
        }
        if let Some(real) = &mut self.real {
            assert!(real.finish(key), "a table with all its slots could not be sealed");
        }
    }

    pub(super) fn revoke_snapshot(&mut self, key: (usize, u64)) {
        self.snapshots.remove(&key);
        self.real.iter_mut().for_each(|real| real.revoke_snapshot(key));
    }

    /// The stream begins behind the origin's offset.
    pub(super) fn begin_journal(&mut self, key: (usize, u64), origin: Origin, room: usize) {
        self.journals.insert(key, Journal::new(origin.offset + 1, room));
        self.real.iter_mut().for_each(|real| real.begin_journal(key, origin, room));
    }

    pub(super) fn journal(&self, key: (usize, u64)) -> Option<&Journal> {
        self.journals.get(&key)
    }

    pub(super) fn append(&mut self, key: (usize, u64), bytes: &[u8]) {
        let Some(journal) = self.journals.get_mut(&key) else { return };
        journal.append(bytes);
        self.real.iter_mut().for_each(|real| real.append(key, bytes));
    }

    pub(super) fn revoke_journal(&mut self, key: (usize, u64)) {
        self.journals.remove(&key);
        self.real.iter_mut().for_each(|real| real.revoke_journal(key));
    }

    /// All that a source has lent.
    pub(super) fn revoke_all(&mut self, source: usize) {
        self.snapshots.retain(|&(of, _), _| of != source);
        self.journals.retain(|&(of, _), _| of != source);
        self.real.iter_mut().for_each(|real| real.revoke_all(source));
    }

    // ---- readers ----

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
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn memory_beyond_its_limit_is_found() {
        let origin = |generation| {
            let history = "8c1c6b2f0d6a4e7b9a0f1e2d3c4b5a6978695a4b".parse().unwrap();
            Origin { generation, history, offset: 0 }
        };
        let mut memories = Memories::default();
        memories.begin_snapshot((0, 1), origin(1), 2);
        memories.begin_journal((0, 1), origin(1), 10);
        memories.begin_snapshot((1, 1), origin(1), 2);
        assert_eq!((memories.push((0, 1), 1), memories.push((0, 1), 2), memories.push((0, 1), 3)).2, Some(false));
        memories.append((0, 1), &[5; 30]);
        assert_eq!(memories.within_limits(), Ok(()));

        // A source whose machine lets an old snapshot live beside a new one.
        memories.begin_snapshot((0, 2), origin(2), 2);
        assert!(memories.within_limits().is_err_and(|text| text.contains("two snapshots")));
        memories.revoke_snapshot((0, 1));
        assert_eq!(memories.within_limits(), Ok(()));
        memories.begin_journal((0, 2), origin(2), 10);
        assert!(memories.within_limits().is_err_and(|text| text.contains("two journals")));

        // Slots that were written where there is no room.
        memories.revoke_journal((0, 1));
        (3..6).for_each(|slot| memories.snapshots.get_mut(&(0, 2)).unwrap().push(slot));
        assert!(memories.within_limits().is_err_and(|text| text.contains("room for 2")));
    }
}
