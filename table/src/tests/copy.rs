//! Copies: chains of them, peers that fail, lie or fall behind, windows, limits.

use std::sync::Arc;

use remora_fabric::{Memory, memory::crc};

use super::{
    Random, drawn_compressed, drawn_sealer, expect_of, for_seeds, identity, memory,
    peer::{Faults, TornPeer},
    seal_all,
};
use crate::{Error, Expectation, Geometry, Kind, Loss, SnapshotCopy, SnapshotSealer, SnapshotWriter, Turn};

const SOURCE: Geometry = Geometry { slot_size: 4096, slots: 64 };

/// After this many turns, a copy that is not complete never will be.
const MANY: u32 = 20_000;

struct Origin {
    /// What readers read: the sealed table with odd seeds, one with compressed slots with two of eight.
    region: Arc<Memory>,
    writer: SnapshotWriter,
    sealer: Option<SnapshotSealer>,
    seed: u64,
    bytes: Vec<u8>,
}

impl Origin {
    fn new(geometry: Geometry, slots: u64, seed: u64) -> Origin {
        let (plain, sealed) = (memory(geometry.memory_len()), memory(geometry.memory_len()));
        let writer = SnapshotWriter::create(Arc::clone(&plain), geometry, identity(Kind::Snapshot), 0).unwrap();
        let bytes = Random(seed).text((slots * 4096 - 100) as usize, drawn_compressed(seed));
        let sealer = drawn_sealer(&plain, &sealed, geometry, seed);
        let region = if sealer.is_some() { sealed } else { plain };
        Origin { region, writer, sealer, seed, bytes }
    }

    fn expect(&self) -> Expectation {
        expect_of(self.writer.geometry(), self.seed)
    }

    fn seal(&mut self) {
        if let Some(sealer) = &mut self.sealer {
            seal_all(sealer);
        }
    }

    /// Writes up to that many slots in total; ends with the last one.
    fn write(&mut self, slots: u64) {
        let done = self.writer.received() as usize;
        let to = self.bytes.len().min((slots * 4096) as usize);
        self.writer.append(&self.bytes[done..to]).unwrap();
        if to == self.bytes.len() {
            self.writer.finish(0).unwrap();
        }
        self.seal();
    }

    fn whole(slots: u64, seed: u64) -> Origin {
        let mut origin = Origin::new(SOURCE, slots, seed);
        origin.write(slots);
        origin
    }
}

/// A copy with its peer of the source, and the bytes that were taken out of it.
struct Reader {
    copy: SnapshotCopy,
    memory: Arc<Memory>,
    source: TornPeer,
    peer: Option<TornPeer>,
    taken: Vec<u8>,
}

impl Reader {
    fn new(origin: &Origin, own_slots: u32, faults: Faults, seed: u64) -> Reader {
        let own = Geometry { slots: own_slots, ..SOURCE };
        let memory = memory(SnapshotCopy::memory_len(&own));
        let copy = SnapshotCopy::create(Arc::clone(&memory), own, origin.expect(), 0).unwrap();
        let source = TornPeer::new(&origin.region, &memory, faults, seed);
        Reader { copy, memory, source, peer: None, taken: Vec::new() }
    }

    fn read_from(&mut self, region: &Arc<Memory>, slots: u32, faults: Faults, seed: u64) {
        self.peer = Some(TornPeer::new(region, &self.memory, faults, seed));
        self.copy.read_from_peer(slots).unwrap();
    }

    fn turn(&mut self, turn: &mut Turn) -> Result<Option<Loss>, Error> {
        let peer = self.peer.as_mut().map(|peer| peer as &mut dyn remora_fabric::Peer);
        self.copy.pump(&mut self.source, peer, turn)
    }

    fn take(&mut self) {
        while let Some(slot) = self.copy.next_slot() {
            let (view, range) = slot.bytes();
            let mut bytes = vec![0; slot.length as usize];
            view.read(range.start, &mut bytes).unwrap();
            assert_eq!(crc::crc32c(&bytes), slot.crc().unwrap());
            assert_eq!(slot.position, self.taken.len() as u64);
            self.taken.extend(bytes);
            self.copy.release(slot);
        }
    }

    /// Takes turns until the copy is complete, or a peer is lost.
    fn run(&mut self) -> Option<Loss> {
        for _ in 0..MANY {
            if let Some(loss) = self.turn(&mut Turn::FREE.clone()).unwrap() {
                return Some(loss);
            }
            self.take();
            if self.copy.is_whole() {
                return None;
            }
        }
        panic!("{:?} after {MANY} turns", self.copy.progress());
    }
}

#[test]
fn a_chain_of_copies_carries_every_byte_while_the_source_still_writes() {
    for_seeds(40, |seed| {
        let mut origin = Origin::new(SOURCE, 40, seed);
        let mut random = Random(seed);
        let mut chain: Vec<Reader> = (0..4).map(|i| Reader::new(&origin, 64, Faults::TORN, seed + i)).collect();
        chain[0].copy.read_from_source();
        for i in 1..chain.len() {
            let region = Arc::clone(&chain[i - 1].memory);
            chain[i].read_from(&region, 64, Faults::TORN, seed + 10 + i as u64);
        }
        let mut written = 0;
        for _ in 0..MANY {
            if random.one_in(3) && written < 40 {
                written += 1;
                origin.write(written);
            }
            for reader in &mut chain {
                let loss = reader.turn(&mut Turn::FREE.clone()).unwrap();
                assert!(loss.is_none(), "{loss:?}");
                reader.take();
            }
            if chain.iter().all(|reader| reader.copy.is_whole()) {
                break;
            }
        }
        for reader in &chain {
            assert!(reader.copy.is_whole(), "{:?}", reader.copy.progress());
            assert_eq!(reader.taken, origin.bytes);
        }
        // The bytes of slots crossed the source's wire once; for the other slots the source sent lines and entries.
        assert!(chain[0].source.completed > 40);
        let small: u64 = chain[1..].iter().map(|reader| reader.source.bytes).sum();
        assert!(small < 3 * 40 * 4096 / 4, "{small} bytes of lines and entries");
    });
}

#[test]
fn a_peer_that_is_lost_costs_only_the_slots_that_were_on_their_way() {
    for_seeds(60, |seed| {
        let origin = Origin::whole(30, seed);
        let mut first = Reader::new(&origin, 64, Faults::NONE, seed);
        first.copy.read_from_source();
        assert!(first.run().is_none());
        let mut reader = Reader::new(&origin, 64, Faults::NONE, seed);
        reader.read_from(&Arc::clone(&first.memory), 64, Faults::ALL, seed);
        let mut losses = 0;
        while let Some(loss) = reader.run() {
            assert!(matches!(loss, Loss::Gone(_)), "{loss:?}");
            let held = reader.copy.held();
            losses += 1;
            match seed % 3 {
                0 => reader.copy.read_from_source(),
                _ => reader.read_from(&Arc::clone(&first.memory), 64, Faults::ALL, seed + losses),
            }
            assert_eq!(reader.copy.held(), held);
        }
        assert_eq!(reader.taken, origin.bytes);
    });
}

#[test]
fn a_peer_with_other_bytes_is_found_out_and_none_of_them_is_delivered() {
    let origin = Origin::whole(20, 1);
    let mut liar = Reader::new(&origin, 64, Faults::NONE, 1);
    liar.copy.read_from_source();
    assert!(liar.run().is_none());
    let at = liar.memory.length() - 2 * 4096 - 64 * 4096 + 7 * 4096 + 99;
    liar.memory.write(at, b"forged").unwrap();

    let mut reader = Reader::new(&origin, 64, Faults::TORN, 2);
    reader.read_from(&liar.memory, 64, Faults::TORN, 3);
    let loss = reader.run();
    assert!(matches!(loss, Some(Loss::Lied { slot: 7, .. })), "{loss:?}");
    assert_eq!(reader.copy.held(), 7);
    reader.copy.read_from_source();
    assert!(reader.run().is_none());
    assert_eq!(reader.taken, origin.bytes);
}

#[test]
fn a_peer_that_forges_its_own_entry_too_is_found_out_by_the_sources() {
    let origin = Origin::whole(4, 1);
    // Of a seed with the same cipher.
    let forged = Origin::whole(4, 5);
    let mut reader = Reader::new(&origin, 64, Faults::NONE, 2);
    // A complete and valid table of its own, under the identity of the source's.
    reader.read_from(&forged.region, 64, Faults::NONE, 3);
    let loss = reader.run();
    assert!(matches!(loss, Some(Loss::Lied { slot: 0, .. })), "{loss:?}");
    assert_eq!((reader.copy.held(), reader.taken.len()), (0, 0));
}

#[test]
fn a_peer_of_another_snapshot_is_not_read() {
    let origin = Origin::whole(4, 1);
    let other = memory(SOURCE.memory_len());
    let mut identity = identity(Kind::Snapshot);
    identity.origin.generation = 8;
    SnapshotWriter::create(Arc::clone(&other), SOURCE, identity, 0).unwrap();
    let mut reader = Reader::new(&origin, 64, Faults::NONE, 2);
    reader.read_from(&other, 64, Faults::NONE, 3);
    let loss = reader.run();
    assert!(matches!(loss, Some(Loss::Gone(Error::WrongGeneration { .. }))), "{loss:?}");
}

#[test]
fn a_small_copy_is_a_window_whose_readers_learn_that_they_were_passed() {
    let origin = Origin::whole(30, 5);
    let mut small = Reader::new(&origin, 4, Faults::TORN, 5);
    small.copy.read_from_source();
    let mut late = Reader::new(&origin, 64, Faults::TORN, 6);
    late.read_from(&small.memory, 4, Faults::TORN, 7);
    assert!(!small.copy.keeps_all() && late.copy.keeps_all());
    // The small one goes ahead alone; it does not wait for its readers.
    assert!(small.run().is_none());
    assert_eq!((small.copy.oldest(), &small.taken), (26, &origin.bytes));
    let loss = late.run();
    assert!(matches!(loss, Some(Loss::Passed { slot: 0, oldest: 26 })), "{loss:?}");
    late.copy.read_from_source();
    assert!(late.run().is_none());
    assert_eq!(late.taken, origin.bytes);
}

#[test]
fn a_slot_that_was_lost_is_awaited_from_a_peer_that_does_not_have_it_yet() {
    let origin = Origin::whole(30, 5);
    let mut passed = Reader::new(&origin, 4, Faults::NONE, 5);
    passed.copy.read_from_source();
    assert!(passed.run().is_none());
    let mut reader = Reader::new(&origin, 64, Faults::NONE, 6);
    reader.read_from(&passed.memory, 4, Faults::NONE, 7);
    assert!(matches!(reader.run(), Some(Loss::Passed { slot: 0, .. })));

    let mut next = Reader::new(&origin, 64, Faults::NONE, 8);
    reader.read_from(&next.memory, 64, Faults::NONE, 9);
    for _ in 0..MANY / 10 {
        assert!(reader.turn(&mut Turn::FREE.clone()).unwrap().is_none());
    }
    next.copy.read_from_source();
    assert!(next.run().is_none());
    assert!(reader.run().is_none());
    assert_eq!(reader.taken, origin.bytes);
}

#[test]
fn a_window_waits_for_its_owner_and_lends_no_place_twice() {
    let origin = Origin::whole(10, 5);
    let mut small = Reader::new(&origin, 4, Faults::NONE, 5);
    small.copy.read_from_source();
    for _ in 0..MANY / 10 {
        small.turn(&mut Turn::FREE.clone()).unwrap();
    }
    assert_eq!(small.copy.held(), 4);
    let (a, b) = (small.copy.next_slot().unwrap(), small.copy.next_slot().unwrap());
    small.copy.release(b);
    for _ in 0..MANY / 10 {
        small.turn(&mut Turn::FREE.clone()).unwrap();
    }
    assert_eq!(small.copy.held(), 4, "slot 0 is lent: the place of slot 4");
    let (view, range) = a.bytes();
    assert_eq!(view.crc32c(range).unwrap(), a.crc().unwrap());
    a.release_alone().unwrap();
    for _ in 0..MANY / 10 {
        small.turn(&mut Turn::FREE.clone()).unwrap();
    }
    assert_eq!(small.copy.held(), 6);
}

#[test]
fn a_copy_with_room_for_all_can_be_delivered_again_from_the_start() {
    let origin = Origin::whole(10, 5);
    let mut reader = Reader::new(&origin, 64, Faults::NONE, 5);
    reader.copy.read_from_source();
    assert!(reader.run().is_none());
    assert!(reader.copy.rewind(0));
    reader.taken.clear();
    reader.take();
    assert_eq!(reader.taken, origin.bytes);

    let mut small = Reader::new(&origin, 4, Faults::NONE, 5);
    small.copy.read_from_source();
    assert!(small.run().is_none());
    assert!(!small.copy.rewind(0));
}

#[test]
fn the_source_may_be_reached_anew_in_the_middle() {
    for_seeds(40, |seed| {
        let origin = Origin::whole(30, seed);
        let mut reader = Reader::new(&origin, 8, Faults::ALL, seed);
        reader.copy.read_from_source();
        for again in 0..MANY {
            match reader.turn(&mut Turn::FREE.clone()) {
                Ok(loss) => assert!(loss.is_none()),
                Err(error) => {
                    assert!(error.needs_new_peer(), "{error}");
                    reader.source = TornPeer::new(&origin.region, &reader.memory, Faults::ALL, seed + u64::from(again));
                    reader.copy.reconnect();
                }
            }
            reader.take();
        }
        assert_eq!(reader.taken, origin.bytes);
    });
}

/// A caller that waits before the next look must not wait with a line on its way: it would notice the arrival only
/// after the wait.
#[test]
fn a_copy_is_idle_only_while_nothing_at_all_is_on_its_way() {
    let origin = Origin::new(SOURCE, 10, 3);
    for by_peer in [false, true] {
        let mut reader = Reader::new(&origin, 16, Faults::NONE, 3);
        match by_peer {
            false => reader.copy.read_from_source(),
            true => reader.read_from(&origin.region, SOURCE.slots, Faults::NONE, 4),
        }
        for _ in 0..3 {
            reader.turn(&mut Turn::FREE.clone()).unwrap();
            assert!(!reader.copy.is_idle(), "a line was asked for");
            let comes_to_rest = (0..100).any(|_| {
                reader.turn(&mut Turn { look: false, ..Turn::FREE }).unwrap();
                reader.copy.is_idle()
            });
            assert!(comes_to_rest, "nothing is published, and no read is outstanding");
        }
    }
}

#[test]
fn an_allowance_bounds_what_is_asked_for() {
    let origin = Origin::whole(20, 5);
    let mut reader = Reader::new(&origin, 64, Faults::NONE, 5);
    reader.copy.read_from_source();
    for _ in 0..100 {
        reader.turn(&mut Turn { look: true, allowance: 0 }).unwrap();
    }
    assert_eq!(reader.copy.held(), 0);
    let mut turn = Turn { look: true, allowance: 3 * 4096 };
    for _ in 0..100 {
        reader.turn(&mut turn).unwrap();
    }
    assert_eq!((reader.copy.held(), turn.allowance), (3, 0));
}

#[test]
fn memory_that_holds_something_is_not_taken_for_a_copy() {
    let origin = Origin::whole(4, 5);
    let own = Geometry { slots: 4, ..SOURCE };
    let used = memory(SnapshotCopy::memory_len(&own));
    let create = || SnapshotCopy::create(Arc::clone(&used), own, origin.expect(), 0);
    create().unwrap();
    assert!(matches!(create(), Err(Error::Misuse(_))));
}
