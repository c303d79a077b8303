//! Tables: real tables in a simulated network, beside the model of them in [`super::memory`]. Readers in byte mode read
//! these; the network delays, tears and loses their reads.

use std::collections::BTreeMap;
use std::sync::Arc;

use remora_fabric::sim::{Chance, Faults, Network, SimExporter};
use remora_fabric::{Connector, Exporter, Memory, Pages, Peer, RegionId, Regions};
use remora_protocol::Offer;
use remora_table::{Geometry, Identity, JournalWriter, Kind, Origin, SnapshotWriter};

use super::liar::Liar;
use super::oracle::mixed;
use super::wire::Host;
use remora_replica::parts::delivery::{Connected, CopyWish, Way, connect};

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

#[cfg(test)]
mod tests {
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
