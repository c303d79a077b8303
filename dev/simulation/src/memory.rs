//! Memory: the tables of the sources, as readers find them. Each is a model, and beside it a real table in a simulated
//! network for readers in byte mode; the network delays, tears and loses their reads. The way to a copy whose lender
//! gives wrong bytes is here too.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use remora_delivery::simulated::{Connected, CopyWish, Way, connect};
use remora_fabric::sim::{Chance, Faults, Network, SimExporter};
use remora_fabric::{
    Completion, Connector, Error, Exporter, Memory, Pages, Peer, ReadRequest, RegionId, Regions, View,
};
use remora_protocol::Offer;
use remora_table::{Geometry, Identity, JournalWriter, Kind, Origin, SnapshotWriter};

use super::oracle::mixed;
use super::wire::Host;

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

/// Bytes of a slot, the least that a table can have. One message of a model server fills one slot.
pub(super) const SLOT_BYTES: u32 = 4096;

/// Words of a slot.
const WORDS: u64 = SLOT_BYTES as u64 / 8;

/// The secret of every session.
const SECRET: [u8; 32] = [7; 32];

/// Regions of a generation.
const SNAPSHOT: u32 = 0;
const JOURNAL: u32 = 1;

/// A generation of a source.
type Key = (usize, u64);

/// See the module's text.
pub(super) struct Tables {
    network: Network,
    exporters: BTreeMap<usize, SimExporter>,
    snapshots: BTreeMap<Key, SnapshotWriter>,
    journals: BTreeMap<Key, JournalWriter>,
    /// What agents lend to each other, by agent.
    lenders: BTreeMap<usize, Lender>,
    sessions: u64,
}

/// An agent at whose port others ask for its copy.
struct Lender {
    host: Host,
    exporter: SimExporter,
    /// Its readers get wrong bytes.
    lies: bool,
    copy: Option<LentCopy>,
    regions: u32,
}

/// A copy that is lent.
#[derive(Clone, Copy)]
struct LentCopy {
    region: RegionId,
    slots: u32,
}

/// What a lender answers.
pub(super) enum Lent {
    /// There is no such lender any more.
    Gone,
    /// It has no copy of this generation yet.
    NotYet,
    /// The way to its copy, and the slots that this has.
    Copy(Box<dyn Peer>, u32),
}

impl Tables {
    pub(super) fn new(seed: u64) -> Tables {
        // A lane is lost in a few of a hundred snapshots: often enough in many schedules, and rarely enough that syncs
        // end.
        let faults = Faults { lost_answer: Chance(100), lost_peer: Chance(100), ..Faults::honest() };
        Tables {
            network: Network::new(seed, faults),
            exporters: BTreeMap::new(),
            snapshots: BTreeMap::new(),
            journals: BTreeMap::new(),
            lenders: BTreeMap::new(),
            sessions: 0,
        }
    }

    /// The unrest is over: connections that are made from now on are not lost.
    pub(super) fn calm(&self) {
        self.network.calm();
    }

    fn table(&mut self, (source, generation): Key, region: u32, geometry: Geometry) -> Option<Arc<Memory>> {
        let memory = Arc::new(Memory::create("simulated-table", geometry.memory_len(), Pages::Small).ok()?);
        let exporter = self.exporters.entry(source).or_insert_with(|| self.network.exporter());
        exporter.export(RegionId { generation, region }, memory.clone()).ok()?;
        Some(memory)
    }

    fn revoke(&mut self, (source, generation): Key, region: u32) {
        if let Some(exporter) = self.exporters.get(&source) {
            exporter.revoke(RegionId { generation, region });
        }
    }

    // ---- the source ----

    pub(super) fn begin_snapshot(&mut self, key: Key, origin: Origin, room: u64) {
        let geometry = Geometry { slot_size: SLOT_BYTES, slots: room as u32 };
        let Some(memory) = self.table(key, SNAPSHOT, geometry) else { return };
        let identity = Identity { kind: Kind::Snapshot, origin };
        if let Ok(writer) = SnapshotWriter::create(memory, geometry, identity, 0) {
            self.snapshots.insert(key, writer);
        }
    }

    /// Writes one slot. Returns whether there was room.
    pub(super) fn push(&mut self, key: Key, slot: u64) -> bool {
        let Some(writer) = self.snapshots.get_mut(&key) else { return false };
        writer.append(&bytes_of(slot)).is_ok_and(|taken| taken == SLOT_BYTES as usize)
    }

    pub(super) fn retire(&mut self, key: Key, below: u64) {
        self.snapshots.get_mut(&key).into_iter().for_each(|writer| writer.retire(below));
    }

    pub(super) fn finish(&mut self, key: Key) -> bool {
        self.snapshots.get_mut(&key).is_some_and(|writer| writer.finish(0).is_ok())
    }

    pub(super) fn revoke_snapshot(&mut self, key: Key) {
        self.revoke(key, SNAPSHOT);
        self.snapshots.remove(&key);
    }

    pub(super) fn begin_journal(&mut self, key: Key, origin: Origin, room: usize) {
        let geometry = journal_geometry(room);
        let Some(memory) = self.table(key, JOURNAL, geometry) else { return };
        let identity = Identity { kind: Kind::Journal, origin };
        if let Ok(writer) = JournalWriter::create(memory, geometry, identity) {
            self.journals.insert(key, writer);
        }
    }

    pub(super) fn append(&mut self, key: Key, bytes: &[u8]) {
        if let Some(writer) = self.journals.get_mut(&key) {
            // An error needs a journal that was aborted, and such a one is removed.
            let _ = writer.append(bytes);
        }
    }

    pub(super) fn revoke_journal(&mut self, key: Key) {
        self.revoke(key, JOURNAL);
        self.journals.remove(&key);
    }

    /// The process of this source is gone.
    pub(super) fn revoke_all(&mut self, source: usize) {
        self.exporters.remove(&source);
        self.snapshots.retain(|&(of, _), _| of != source);
        self.journals.retain(|&(of, _), _| of != source);
    }

    // ---- readers ----

    /// Connects to the tables of an offer. Returns them with the number of the session.
    ///
    /// # Errors
    /// The text says what could not be connected.
    pub(super) fn connect(
        &mut self,
        source: usize,
        offer: &Offer,
        loaded: bool,
        copy: Option<CopyWish>,
    ) -> Result<(Connected, u64), String> {
        let exporter = self.exporters.get(&source).ok_or("the source is gone")?;
        self.sessions += 1;
        let region = |generation: u64, region: u32| RegionId { generation, region };
        let regions = [region(offer.snapshot.generation, SNAPSHOT), region(offer.journal.generation, JOURNAL)];
        exporter.grant(self.sessions, SECRET, Regions::only(regions));
        let key = |generation: u64, region: u32| {
            exporter.key(RegionId { generation, region }).map_err(|error| error.to_string())
        };
        let snapshot = if loaded { None } else { Some(key(offer.snapshot.generation, SNAPSHOT)?) };
        let journal = key(offer.journal.generation, JOURNAL)?;
        let way = Way { network: &self.network, session: self.sessions, secret: SECRET, snapshot, journal, copy };
        Ok((connect(&way, offer)?, self.sessions))
    }

    // ---- lenders ----

    /// Opens the port at which an agent lends its copy.
    pub(super) fn open_lender(&mut self, agent: usize, host: Host, lies: bool) {
        let exporter = self.network.exporter();
        self.lenders.insert(agent, Lender { host, exporter, lies, copy: None, regions: 0 });
    }

    /// The agent is gone, and all connections to its copy with it.
    pub(super) fn close_lender(&mut self, agent: usize) {
        self.lenders.remove(&agent);
    }

    /// Lends this copy from now on, in place of the one before.
    pub(super) fn lend(&mut self, agent: usize, generation: u64, memory: Arc<Memory>, slots: u32) {
        let Some(lender) = self.lenders.get_mut(&agent) else { return };
        if let Some(former) = lender.copy.take() {
            lender.exporter.revoke(former.region);
        }
        lender.regions += 1;
        let region = RegionId { generation, region: lender.regions };
        lender.copy = lender.exporter.export(region, memory).ok().map(|()| LentCopy { region, slots });
    }

    /// Where an agent lends; `None`: it does not, or not any more.
    pub(super) fn host_of_lender(&self, agent: usize) -> Option<Host> {
        self.lenders.get(&agent).map(|lender| lender.host)
    }

    /// Asks a lender for its copy of this generation, which is read into this memory.
    pub(super) fn borrow(&mut self, agent: usize, generation: u64, sink: &Arc<Memory>) -> Lent {
        let Some(lender) = self.lenders.get(&agent) else { return Lent::Gone };
        let Some(copy) = lender.copy.filter(|copy| copy.region.generation == generation) else { return Lent::NotYet };
        self.sessions += 1;
        lender.exporter.grant(self.sessions, SECRET, Regions::only([copy.region]));
        let Ok(key) = lender.exporter.key(copy.region) else { return Lent::Gone };
        match self.network.connector().connect(&key, self.sessions, &SECRET, sink.clone()) {
            Ok(peer) if lender.lies => Lent::Copy(Box::new(Liar::new(peer, sink.clone())), copy.slots),
            Ok(peer) => Lent::Copy(peer, copy.slots),
            Err(_) => Lent::Gone,
        }
    }

    /// Ends the connections of a session.
    pub(super) fn cut(&mut self, source: usize, session: u64) {
        if let Some(exporter) = self.exporters.get(&source) {
            exporter.withdraw(session);
        }
    }
}

/// The journal's shape: it holds at least as much as the model of it.
pub(super) fn journal_geometry(room: usize) -> Geometry {
    let slots = room.div_ceil(SLOT_BYTES as usize / 2) + 2;
    Geometry { slot_size: SLOT_BYTES, slots: slots as u32 }
}

/// The bytes of a slot: the first word is the slot's number in the model, and every other word follows from it, so that
/// bytes of two slots make none.
fn bytes_of(slot: u64) -> Vec<u8> {
    (0..WORDS).flat_map(|at| word(slot, at).to_le_bytes()).collect()
}

fn word(slot: u64, at: u64) -> u64 {
    if at == 0 { slot } else { mixed(slot ^ at.rotate_left(32)) }
}

/// The slot that these bytes are; a number that no model has if they are not one.
pub(super) fn slot_of(bytes: &[u8]) -> u64 {
    let words = bytes.chunks_exact(8).map(|word| word.try_into().map_or(0, u64::from_le_bytes));
    let words: Vec<u64> = words.collect();
    let slot = words.first().copied().unwrap_or(0);
    let is_whole = words.len() as u64 == WORDS && words.iter().zip(0..).all(|(&found, at)| found == word(slot, at));
    if is_whole { slot } else { words.iter().fold(0xBAD, |sum, &word| mixed(sum ^ word)) }
}

/// One in this many reads of a slot brings a wrong byte. Few, so that a reader sees right slots before.
const ONE_IN: u64 = 3;

/// Reads of at least this length are of slots. Shorter ones are of lines and entries, in which readers believe nothing.
const SLOT_READ: u32 = 1024;

/// See the module's text.
pub(super) struct Liar {
    honest: Box<dyn Peer>,
    sink: Arc<Memory>,
    reads: u64,
    /// Where a wrong byte is put when the read of this tag is complete.
    wrong: BTreeMap<u64, u64>,
}

impl Liar {
    /// Reads into this memory.
    pub(super) fn new(honest: Box<dyn Peer>, sink: Arc<Memory>) -> Liar {
        Liar { honest, sink, reads: 0, wrong: BTreeMap::new() }
    }
}

impl Peer for Liar {
    fn depth(&self) -> usize {
        self.honest.depth()
    }

    fn post_read(&mut self, reads: &[ReadRequest]) -> Result<usize, Error> {
        let posted = self.honest.post_read(reads)?;
        for read in reads.iter().take(posted).filter(|read| read.length >= SLOT_READ) {
            self.reads += 1;
            if self.reads.is_multiple_of(ONE_IN) {
                self.wrong.insert(read.tag, read.sink_offset + u64::from(read.length / 2));
            }
        }
        Ok(posted)
    }

    fn poll(&mut self, completions: &mut Vec<Completion>) -> Result<usize, Error> {
        let before = completions.len();
        let polled = self.honest.poll(completions)?;
        for completion in completions.iter().skip(before) {
            let Some(at) = self.wrong.remove(&completion.tag).filter(|_| completion.result.is_ok()) else { continue };
            let mut byte = [0];
            self.sink.read(at, &mut byte)?;
            self.sink.write(at, &[!byte[0]])?;
        }
        Ok(polled)
    }

    fn arm(&mut self) -> BorrowedFd<'_> {
        self.honest.arm()
    }

    fn view(&self) -> Option<Arc<View>> {
        None
    }

    fn close(&mut self) {
        self.honest.close();
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

#[cfg(test)]
mod tables_tests {
    use super::*;

    #[test]
    fn bytes_of_two_slots_are_none_of_them() {
        let (one, two) = (bytes_of(5), bytes_of(6));
        assert_eq!((slot_of(&one), slot_of(&two)), (5, 6));
        let torn: Vec<u8> = one[..2048].iter().chain(&two[2048..]).copied().collect();
        assert_ne!(slot_of(&torn), 5);
        assert_ne!(slot_of(&torn), 6);
        assert_ne!(slot_of(&one[..4088]), 5);
    }
}
