//! A snapshot's writer and three readers, by random operations, against the bytes that were written.

use std::{collections::HashSet, sync::Arc};

use remora_fabric::{Memory, Peer, View, sim};

use super::{
    Random, drawn_compressed, drawn_sealer, expect, expect_of, for_seeds, identity,
    peer::{Faults, Trouble, Wire},
    seal_all, sink, used_memory,
};
use crate::{Error, Geometry, Kind, Place, Slot, SnapshotReader, SnapshotSealer, SnapshotWriter, State};

/// The possible operations, drawn at random one after the other.
#[derive(Debug, Clone, Copy)]
enum Operation {
    Write {
        bytes: u64,
    },
    /// The writer may retire slots: those that all readers have passed, or, recklessly, any.
    Retire {
        reckless: bool,
    },
    /// Another writer continues at the present position.
    Resume,
    Finish,
    Pump {
        reader: usize,
    },
    Take {
        reader: usize,
    },
    Release {
        reader: usize,
    },
}

fn draw(random: &mut Random) -> Operation {
    let reader = random.below(READERS as u64) as usize;
    match random.below(20) {
        0..4 => Operation::Write { bytes: 1 + random.below(6000) },
        4 if random.one_in(4) => Operation::Resume,
        4 => Operation::Retire { reckless: random.one_in(20) },
        5 if random.one_in(30) => Operation::Finish,
        5..14 => Operation::Pump { reader },
        14..17 => Operation::Take { reader },
        _ => Operation::Release { reader },
    }
}

const READERS: usize = 3;
const HOLD_BACK: u32 = 40;
const OPERATIONS: usize = 3000;

struct Model {
    random: Random,
    geometry: Geometry,
    memory: Arc<Memory>,
    writer: SnapshotWriter,
    /// With five of eight seeds, readers that do not read in place read a table that is sealed, compressed, or both.
    sealer: Option<SnapshotSealer>,
    seed: u64,
    /// Bytes that the writer holds back; a writer that holds none back gets its bytes by `append`.
    hold_back: u32,
    /// The oracle: everything that was received.
    truth: Vec<u8>,
    trim: u64,
    readers: Vec<Reader>,
    wire: Wire,
}

struct Reader {
    reader: SnapshotReader,
    peer: Box<dyn Peer>,
    sink: Arc<Memory>,
    view: Option<Arc<View>>,
    held: HashSet<u64>,
    lent: Vec<Slot>,
    /// Slots below this number have been delivered.
    passed: u64,
    overrun: bool,
}

impl Model {
    fn new(seed: u64, trouble: &Trouble) -> Model {
        let mut random = Random(seed);
        let geometry = Geometry { slot_size: 4096, slots: 2 + random.below(6) as u32 };
        let memory = used_memory(&geometry, &mut random);
        let sealed = used_memory(&geometry, &mut random);
        let hold_back = if random.one_in(3) { 0 } else { HOLD_BACK };
        let writer =
            SnapshotWriter::create(Arc::clone(&memory), geometry, identity(Kind::Snapshot), hold_back).unwrap();
        let sealer = drawn_sealer(&memory, &sealed, geometry, seed);
        let wire = Wire::new(if sealer.is_some() { &sealed } else { &memory }, trouble, seed);
        let mut model = Model {
            geometry,
            memory,
            writer,
            sealer,
            seed,
            hold_back,
            truth: Vec::new(),
            trim: random.below(u64::from(hold_back) + 1),
            readers: Vec::new(),
            wire,
            random,
        };
        for index in 0..READERS {
            let reader = model.join(index);
            model.readers.push(reader);
        }
        model
    }

    /// The last reader reads in place; each holds some slots already.
    fn join(&mut self, index: usize) -> Reader {
        let (sink, layout) = sink(self.geometry, 1 + self.random.below(4) as u32);
        let view = (index == READERS - 1).then(|| Arc::new(self.memory.open_view().unwrap()));
        let held: HashSet<u64> = (0..100).filter(|_| self.random.one_in(10)).collect();
        let is_held = held.clone();
        let expect = if view.is_some() { expect(self.geometry) } else { expect_of(self.geometry, self.seed) };
        let is_held = move |number: u64| is_held.contains(&number);
        let reader = SnapshotReader::new(view.clone(), Arc::clone(&sink), layout, expect, is_held);
        let peer = self.wire.connect(&sink, self.random.next());
        Reader { reader: reader.unwrap(), peer, sink, view, held, lent: Vec::new(), passed: 0, overrun: false }
    }

    fn apply(&mut self, operation: Operation) {
        match operation {
            Operation::Write { bytes } => self.write(bytes),
            Operation::Retire { reckless } => self.retire(reckless),
            Operation::Resume => self.resume(),
            Operation::Finish => self.finish(),
            Operation::Pump { reader } => self.pump(reader),
            Operation::Take { reader } => self.take(reader),
            Operation::Release { reader } => self.release(reader),
        }
        self.seal();
    }

    /// Seals what is complete, before the writer may reuse it.
    fn seal(&mut self) {
        if let Some(sealer) = &mut self.sealer {
            seal_all(sealer);
            assert_eq!(sealer.sealed_slots(), self.writer.published_slots());
            assert_eq!(sealer.state(), self.writer.state());
        }
    }

    fn write(&mut self, bytes: u64) {
        if self.writer.state() != State::Open {
            return;
        }
        if self.hold_back == 0 {
            self.append(bytes)
        } else {
            self.receive(bytes)
        }
        let beyond = self.truth.len() as u64 - self.writer.published_slots() * 4096;
        assert!(beyond < 4096 + u64::from(self.hold_back), "a complete slot was not published");
    }

    /// Copied by the writer: as much as there is space for, however many slots that fills.
    fn append(&mut self, bytes: u64) {
        let bytes = self.random.text(bytes as usize, drawn_compressed(self.seed));
        let taken = self.writer.append(&bytes).unwrap();
        self.truth.extend_from_slice(&bytes[..taken]);
        assert!(taken == bytes.len() || self.writer.space().is_none(), "not all was taken, though there is room");
    }

    /// Placed into the memory by the caller.
    fn receive(&mut self, bytes: u64) {
        let Some(space) = self.writer.space() else {
            return;
        };
        let bytes = bytes.min(space.end - space.start) as usize;
        let bytes = self.random.text(bytes, drawn_compressed(self.seed));
        self.memory.write(space.start, &bytes).unwrap();
        self.truth.extend_from_slice(&bytes);
        self.writer.advance(bytes.len() as u64).unwrap();
    }

    fn retire(&mut self, reckless: bool) {
        let passed = self.readers.iter().filter(|reader| !reader.overrun).map(Reader::needs_from).min();
        let below = if reckless { self.writer.published_slots() } else { passed.unwrap_or(u64::MAX) };
        self.writer.retire(below);
    }

    /// Possible if nothing is held back.
    fn resume(&mut self) {
        if self.writer.state() == State::Open && self.hold_back == 0 {
            let received = self.truth.len() as u64;
            self.writer = SnapshotWriter::resume(Arc::clone(&self.memory), self.geometry, received).unwrap();
        }
    }

    fn finish(&mut self) {
        let trim = self.trim.min(self.truth.len() as u64);
        if self.writer.state() == State::Open {
            let length = self.writer.finish(trim).unwrap();
            self.truth.truncate(length as usize);
            assert_eq!(self.writer.received() - trim, length);
        }
    }

    fn pump(&mut self, index: usize) {
        let reader = &mut self.readers[index];
        if reader.overrun {
            return;
        }
        match reader.reader.pump(&mut *reader.peer) {
            Ok(()) => {}
            Err(Error::Peer(_)) => {
                reader.peer = self.wire.connect(&reader.sink, self.random.next());
                reader.reader.reconnect(reader.view.clone()).unwrap();
            }
            Err(Error::Overrun { wanted, oldest, .. }) => {
                assert!(wanted < self.writer.retired(), "slot {wanted} is there, not below {oldest}");
                reader.overrun = true;
            }
            Err(other) => panic!("{other}"),
        }
    }

    fn take(&mut self, index: usize) {
        let reader = &mut self.readers[index];
        let Some(slot) = reader.reader.next_slot() else {
            return;
        };
        let skipped = (reader.passed..slot.number).all(|number| reader.held.contains(&number));
        assert!(skipped && !reader.held.contains(&slot.number) && slot.number >= reader.passed);
        reader.passed = slot.number + 1;
        if matches!(slot.place, Place::Sink(_)) {
            assert_eq!(content(&slot), right(&self.truth, &slot), "wrong bytes in slot {}", slot.number);
        }
        reader.lent.push(slot);
    }

    fn release(&mut self, index: usize) {
        let reader = &mut self.readers[index];
        if reader.lent.is_empty() {
            return;
        }
        let at = self.random.below(reader.lent.len() as u64) as usize;
        let slot = reader.lent.swap_remove(at);
        let (number, found, wanted) = (slot.number, content(&slot), right(&self.truth, &slot));
        match reader.reader.release(slot) {
            Ok(()) => assert_eq!(found, wanted, "slot {number} was released as whole"),
            Err(Error::Overrun { wanted, .. }) => {
                assert!(wanted < self.writer.retired());
                reader.overrun = true;
            }
            Err(other) => panic!("{other}"),
        }
    }

    /// Writes until the readers have enough, then lets all of them finish.
    fn settle(&mut self) {
        self.finish();
        self.seal();
        for index in 0..READERS {
            let mut pumps = 0;
            while !self.readers[index].overrun && !self.readers[index].reader.is_complete() {
                self.pump(index);
                self.take(index);
                self.release(index);
                pumps += 1;
                assert!(pumps < 100_000, "reader {index} never ends: {:?}", self.readers[index].reader.progress());
            }
            let reader = &self.readers[index];
            let slots = (self.truth.len() as u64).div_ceil(4096);
            let all = (reader.passed..slots).all(|number| reader.held.contains(&number));
            assert!(reader.overrun || all, "reader {index} left slots out");
        }
    }
}

impl Reader {
    /// The first slot that the reader still needs.
    fn needs_from(&self) -> u64 {
        self.lent.iter().map(|slot| slot.number).min().unwrap_or(self.passed)
    }
}

fn content(slot: &Slot) -> Vec<u8> {
    let (memory, range) = slot.bytes();
    let mut bytes = vec![0; slot.length as usize];
    memory.read(range.start, &mut bytes).unwrap();
    bytes
}

fn right<'a>(truth: &'a [u8], slot: &Slot) -> &'a [u8] {
    &truth[slot.position as usize..][..slot.length as usize]
}

fn run(seed: u64, trouble: &Trouble) -> Model {
    let mut model = Model::new(seed, trouble);
    for _ in 0..OPERATIONS {
        let operation = draw(&mut model.random);
        model.apply(operation);
    }
    model.settle();
    model
}

#[test]
fn readers_get_the_bytes_that_were_written_or_know_that_they_have_not() {
    for_seeds(30, |seed| drop(run(seed, &Trouble::Torn(Faults::NONE))));
}

#[test]
fn torn_reads_and_lost_peers_never_give_wrong_bytes() {
    for_seeds(50, |seed| drop(run(seed, &Trouble::Torn(Faults::ALL))));
}

#[test]
fn a_hostile_network_never_gives_wrong_bytes() {
    for_seeds(20, |seed| drop(run(seed, &Trouble::Sim(sim::Faults::hostile()))));
}

/// The model is useful only if the events it is about happen.
#[test]
fn the_model_meets_overruns_wraps_and_whole_snapshots() {
    let (mut overruns, mut wraps, mut wholes) = (0, 0, 0);
    for seed in 0..30 {
        let model = run(seed, &Trouble::Torn(Faults::ALL));
        overruns += model.readers.iter().filter(|reader| reader.overrun).count();
        wholes += model.readers.iter().filter(|reader| !reader.overrun).count();
        wraps += usize::from(!model.writer.is_retained());
    }
    assert!(overruns > 3 && wraps > 10 && wholes > 10, "{overruns} overruns, {wraps} wraps, {wholes} whole");
}
