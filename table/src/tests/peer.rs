//! The peers that the models read through: the fabric's simulated network, and one that is worse in one respect: its
//! reads are taken in up to six pieces, in any order, each at another moment.

use std::os::fd::BorrowedFd;
use std::sync::Arc;

use remora_fabric::memory::crc;
use remora_fabric::sim::{self, Network, SimExporter};
use remora_fabric::{
    Completion, Connector, Error, Exporter, Memory, Peer, ReadError, ReadRequest, RegionId, Regions, View,
};

use super::Random;
use super::identity;
use super::memory;
use crate::identity::Kind;
use crate::journal::JournalWriter;
use crate::layout::{ENTRY_BYTES, Entry, Geometry, RECORD_HEADER_BYTES};

/// A connection to one region, which gives a new peer whenever one is lost.
pub(super) struct Wire {
    region: Arc<Memory>,
    way: Way,
}

/// What is between reader and region.
#[derive(Debug, Clone)]
pub(super) enum Trouble {
    Torn(Faults),
    Sim(sim::Faults),
}

enum Way {
    Torn(Faults),
    Sim(Network, SimExporter),
}

const ID: RegionId = RegionId { generation: 7, region: 0 };
const SESSION: u64 = 1;
const SECRET: [u8; 32] = [9; 32];

impl Wire {
    pub(super) fn new(region: &Arc<Memory>, trouble: &Trouble, seed: u64) -> Wire {
        let way = match trouble {
            Trouble::Torn(faults) => Way::Torn(*faults),
            Trouble::Sim(faults) => {
                let network = Network::new(seed, faults.clone());
                let exporter = network.exporter();
                exporter.export(ID, Arc::clone(region)).unwrap();
                exporter.grant(SESSION, SECRET, Regions::All);
                Way::Sim(network, exporter)
            }
        };
        Wire { region: Arc::clone(region), way }
    }

    /// A new peer; retried until one is available.
    pub(super) fn connect(&self, sink: &Arc<Memory>, seed: u64) -> Box<dyn Peer> {
        match &self.way {
            Way::Torn(faults) => Box::new(TornPeer::new(&self.region, sink, *faults, seed)),
            Way::Sim(network, exporter) => loop {
                let key = exporter.key(ID).unwrap();
                if let Ok(peer) = network.connector().connect(&key, SESSION, &SECRET, Arc::clone(sink)) {
                    break peer;
                }
            },
        }
    }
}

/// The faults of a [`TornPeer`].
#[derive(Debug, Clone, Copy)]
pub(super) struct Faults {
    /// A read is taken in up to this many pieces, at most one per poll: 1 is a read that isn't torn.
    pub(super) pieces: u64,
    /// One in this many polls finds the peer gone; 0: none.
    lost_one_in: u64,
}

impl Faults {
    pub(super) const NONE: Faults = Faults { pieces: 1, lost_one_in: 0 };
    pub(super) const TORN: Faults = Faults { pieces: 6, lost_one_in: 0 };
    pub(super) const ALL: Faults = Faults { pieces: 6, lost_one_in: 60 };
}

pub(super) struct TornPeer {
    region: Arc<Memory>,
    sink: Arc<Memory>,
    faults: Faults,
    random: Random,
    flights: Vec<Flight>,
    gone: bool,
    /// Reads that completed.
    pub(super) completed: u64,
    /// Bytes of the reads that completed.
    pub(super) bytes: u64,
}

/// One outstanding read: its ranges that are still to be taken.
struct Flight {
    request: ReadRequest,
    left: Vec<(u32, u32)>,
}

impl TornPeer {
    const DEPTH: usize = 5;

    pub(super) fn new(region: &Arc<Memory>, sink: &Arc<Memory>, faults: Faults, seed: u64) -> TornPeer {
        let [region, sink] = [region, sink].map(Arc::clone);
        TornPeer {
            region,
            sink,
            faults,
            random: Random(seed),
            flights: Vec::new(),
            gone: false,
            completed: 0,
            bytes: 0,
        }
    }

    fn cut(&mut self, length: u32) -> Vec<(u32, u32)> {
        let pieces = 1 + self.random.below(self.faults.pieces);
        let mut cuts: Vec<u32> = (1..pieces).map(|_| self.random.below(u64::from(length)) as u32).collect();
        cuts.extend([0, length]);
        cuts.sort_unstable();
        cuts.windows(2).map(|pair| (pair[0], pair[1])).collect()
    }

    /// Takes one piece of one read, with the region's present content.
    fn take_piece(&mut self, index: usize) {
        let flight = &mut self.flights[index];
        let piece = self.random.below(flight.left.len() as u64) as usize;
        let (from, to) = flight.left.swap_remove(piece);
        let at = flight.request.offset + u64::from(from);
        let to = flight.request.offset + u64::from(to);
        self.region.copy_to(at..to, &self.sink, flight.request.sink_offset + u64::from(from)).unwrap();
    }
}

impl Peer for TornPeer {
    fn depth(&self) -> usize {
        Self::DEPTH
    }

    fn post_read(&mut self, reads: &[ReadRequest]) -> Result<usize, Error> {
        if self.gone {
            return Err(Error::Retired(ReadError::PeerGone));
        }
        let accepted = reads.len().min(Self::DEPTH - self.flights.len());
        for &request in &reads[..accepted] {
            let left = self.cut(request.length);
            self.flights.push(Flight { request, left });
        }
        Ok(accepted)
    }

    fn poll(&mut self, completions: &mut Vec<Completion>) -> Result<usize, Error> {
        if self.faults.lost_one_in > 0 && self.random.one_in(self.faults.lost_one_in) {
            self.gone = true;
        }
        if self.gone {
            return Err(Error::Retired(ReadError::PeerGone));
        }
        for index in 0..self.flights.len() {
            if self.faults.pieces == 1 || self.random.one_in(2) {
                self.take_piece(index);
            }
        }
        let before = completions.len();
        for index in (0..self.flights.len()).rev() {
            if self.flights[index].left.is_empty() {
                let request = self.flights.swap_remove(index).request;
                self.bytes += u64::from(request.length);
                completions.push(Completion { tag: request.tag, result: Ok(request.length) });
            }
        }
        self.completed += (completions.len() - before) as u64;
        Ok(completions.len() - before)
    }

    fn arm(&mut self) -> BorrowedFd<'_> {
        View::as_fd(&self.sink)
    }

    fn view(&self) -> Option<Arc<View>> {
        None
    }

    fn close(&mut self) {
        self.gone = true;
    }
}

// Readers that make the mistakes that the protocol avoids, on the same torn peer: they must accept wrong bytes. If
// they did not, the tests beside this one would prove nothing.

const GEOMETRY: Geometry = Geometry { slot_size: 4096, slots: 2 };
const RECORD: usize = GEOMETRY.slot_size as usize - RECORD_HEADER_BYTES as usize;

/// What a reader checks before it accepts a slot.
#[derive(Debug, Clone, Copy)]
struct Trust {
    /// The entry, by a read that is posted after the bytes have arrived (instead of before them).
    entry_after: bool,
    checksum: bool,
}

/// Reads random slots while they are overwritten. Returns how many it accepted, and how many of those were wrong.
fn accepted_and_wrong(trust: Trust) -> (u64, u64) {
    let region = memory(GEOMETRY.memory_len());
    let sink = memory(2 * 4096);
    let mut writer = JournalWriter::create(Arc::clone(&region), GEOMETRY, identity(Kind::Journal)).unwrap();
    let mut peer = TornPeer::new(&region, &sink, Faults::TORN, 1);
    let mut random = Random(2);
    let mut truth: Vec<Vec<u8>> = Vec::new();
    let (mut accepted, mut wrong) = (0, 0);
    for _ in 0..4000 {
        let mut between = |random: &mut Random| {
            if truth.is_empty() || random.one_in(4) {
                truth.push(random.bytes(RECORD));
                writer.append(truth.last().unwrap()).unwrap();
            }
            truth.len() as u64 - 1
        };
        let slot = between(&mut random);
        let entry = ReadRequest { tag: 0, offset: GEOMETRY.entry_offset(slot), length: 64, sink_offset: 0 };
        let bytes = ReadRequest { tag: 0, offset: GEOMETRY.slot_offset(slot), length: 4096, sink_offset: 4096 };
        let order = if trust.entry_after { [bytes, entry] } else { [entry, bytes] };
        for request in order {
            peer.post_read(&[request]).unwrap();
            let mut arrived = Vec::new();
            while arrived.is_empty() {
                peer.poll(&mut arrived).unwrap();
                between(&mut random);
            }
        }
        let (right_slot, right_sum, content) = judge(&sink, slot);
        if right_slot && (right_sum || !trust.checksum) {
            accepted += 1;
            wrong += u64::from(content != truth[slot as usize]);
        }
    }
    (accepted, wrong)
}

fn judge(sink: &Memory, slot: u64) -> (bool, bool, Vec<u8>) {
    let mut entry = [0; ENTRY_BYTES];
    sink.read(0, &mut entry).unwrap();
    let right_slot = Entry::from_bytes(&entry, None).is_some_and(|entry| entry.number == slot && !entry.writing);
    let mut bytes = vec![0; 4096];
    sink.read(4096, &mut bytes).unwrap();
    let content = bytes.split_off(RECORD_HEADER_BYTES as usize);
    let right_sum = bytes[4..] == crc::crc32c(&content).to_le_bytes();
    (right_slot, right_sum, content)
}

#[test]
fn an_entry_read_before_the_bytes_accepts_torn_ones() {
    let (accepted, wrong) = accepted_and_wrong(Trust { entry_after: false, checksum: false });
    assert!(wrong > 100, "{wrong} of {accepted}: this peer tears too little to test anything");
}

/// A checksum alone detects torn bytes, but not the bytes of the next lap, which are complete and wrong.
#[test]
fn a_checksum_without_a_later_entry_accepts_another_lap() {
    let (accepted, wrong) = accepted_and_wrong(Trust { entry_after: false, checksum: true });
    assert!(wrong > 10, "{wrong} of {accepted}");
}

#[test]
fn an_entry_read_after_the_bytes_is_never_fooled() {
    let (accepted, wrong) = accepted_and_wrong(Trust { entry_after: true, checksum: false });
    assert!(accepted > 100);
    assert_eq!(wrong, 0);
}
