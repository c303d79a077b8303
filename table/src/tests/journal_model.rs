//! A journal's writer and three readers, by random operations, against the bytes that were appended.

use std::sync::Arc;

use remora_fabric::{Memory, Peer, View, sim};

use super::{
    FIRST_OFFSET, Random, drawn_compressed, drawn_key, expect_drawn, for_seeds, identity,
    peer::{Faults, Trouble, Wire},
    sink, used_memory,
};
use crate::{Error, Geometry, JournalReader, JournalWriter, Kind, SealKey};

/// The possible operations, drawn at random one after the other.
#[derive(Debug, Clone, Copy)]
enum Operation {
    Append {
        bytes: usize,
    },
    Pump {
        reader: usize,
    },
    Take {
        reader: usize,
    },
    /// A reader that was overrun, or one in many others, begins again somewhere.
    Join {
        reader: usize,
    },
}

fn draw(random: &mut Random) -> Operation {
    let reader = random.below(READERS as u64) as usize;
    match random.below(40) {
        0..3 => Operation::Append { bytes: 1 + random.below(300) as usize },
        3 if random.one_in(8) => Operation::Append { bytes: 1 + random.below(9000) as usize },
        4 if random.one_in(10) => Operation::Join { reader },
        4..32 => Operation::Pump { reader },
        _ => Operation::Take { reader },
    }
}

const READERS: usize = 3;
const OPERATIONS: usize = 4000;

struct Model {
    random: Random,
    geometry: Geometry,
    memory: Arc<Memory>,
    writer: JournalWriter,
    /// With half of the seeds.
    key: Option<SealKey>,
    /// With one in eight, some records are.
    compressed: bool,
    /// The oracle: everything that was appended; its first byte has the offset `FIRST_OFFSET + 1`.
    truth: Vec<u8>,
    readers: Vec<Reader>,
    wire: Wire,
    overruns: u64,
    taken: u64,
}

struct Reader {
    reader: JournalReader,
    peer: Box<dyn Peer>,
    sink: Arc<Memory>,
    view: Option<Arc<View>>,
    /// Offset of the next byte that the reader must deliver.
    next: u64,
    overrun: bool,
}

impl Model {
    fn new(seed: u64, trouble: &Trouble) -> Model {
        let mut random = Random(seed);
        let geometry = Geometry { slot_size: 4096, slots: 2 + random.below(6) as u32 };
        let memory = used_memory(&geometry, &mut random);
        let wire = Wire::new(&memory, trouble, seed);
        let (key, table, identity) = (drawn_key(seed), Arc::clone(&memory), identity(Kind::Journal));
        let compressed = key.is_some() && drawn_compressed(seed);
        let writer = match &key {
            Some(key) if compressed => JournalWriter::create_compressed(table, geometry, identity, key),
            Some(key) => JournalWriter::create_sealed(table, geometry, identity, key),
            None => JournalWriter::create(table, geometry, identity),
        };
        let writer = writer.unwrap();
        let mut model = Model {
            random,
            geometry,
            memory,
            writer,
            key,
            compressed,
            truth: Vec::new(),
            readers: Vec::new(),
            wire,
            overruns: 0,
            taken: 0,
        };
        for index in 0..READERS {
            let reader = model.join(index);
            model.readers.push(reader);
        }
        model
    }

    /// The last reader reads in place.
    fn join(&mut self, index: usize) -> Reader {
        let held = self.writer.end_offset() - self.writer.first_offset();
        let next = self.writer.first_offset() + self.random.below(held + 1);
        let (sink, layout) = sink(self.geometry, 1 + self.random.below(3) as u32);
        let view = (index == READERS - 1).then(|| Arc::new(self.memory.open_view().unwrap()));
        let expect = expect_drawn(Kind::Journal, self.geometry, self.key.as_ref());
        let expect = expect.with_compressed_slots(self.compressed);
        let reader = JournalReader::new(view.clone(), Arc::clone(&sink), layout, expect, next).unwrap();
        let peer = self.wire.connect(&sink, self.random.next());
        Reader { reader, peer, sink, view, next, overrun: false }
    }

    fn apply(&mut self, operation: Operation) {
        match operation {
            Operation::Append { bytes } => self.append(bytes),
            Operation::Pump { reader } => self.pump(reader),
            Operation::Take { reader } => self.take(reader),
            Operation::Join { reader } => self.readers[reader] = self.join(reader),
        }
    }

    fn append(&mut self, bytes: usize) {
        let bytes = self.random.text(bytes, self.compressed);
        self.writer.compress(self.random.one_in(2));
        self.writer.append(&bytes).unwrap();
        self.truth.extend_from_slice(&bytes);
        assert_eq!(self.writer.end_offset(), FIRST_OFFSET + 1 + self.truth.len() as u64);
        let held = self.writer.end_offset() - self.writer.first_offset();
        assert!(self.compressed || held <= u64::from(self.geometry.slots) * 4096);
        let least = (u64::from(self.geometry.slots) - 1) * 2000;
        assert!(held >= least.min(self.truth.len() as u64), "small records cost no more than half of a slot");
    }

    fn pump(&mut self, index: usize) {
        let reader = &mut self.readers[index];
        if reader.overrun {
            self.readers[index] = self.join(index);
            return;
        }
        match reader.reader.pump(&mut *reader.peer) {
            Ok(()) => {}
            Err(Error::Peer(_)) => {
                reader.peer = self.wire.connect(&reader.sink, self.random.next());
                reader.reader.reconnect(reader.view.clone()).unwrap();
            }
            Err(Error::Overrun { .. }) => {
                // What it was about to read is no longer held, at least in part.
                while reader.reader.next_chunk().is_some() {}
                assert!(reader.reader.position() < self.writer.first_offset());
                reader.overrun = true;
                self.overruns += 1;
            }
            Err(other) => panic!("{other}"),
        }
    }

    fn take(&mut self, index: usize) {
        let reader = &mut self.readers[index];
        if reader.overrun {
            return;
        }
        let Some(chunk) = reader.reader.next_chunk() else {
            assert_eq!(reader.reader.position(), reader.next);
            return;
        };
        assert_eq!(chunk.offset, reader.next, "a gap, or a byte twice");
        let at = (chunk.offset - FIRST_OFFSET - 1) as usize;
        assert_eq!(chunk.bytes, self.truth[at..][..chunk.bytes.len()], "wrong bytes at offset {}", chunk.offset);
        reader.next += chunk.bytes.len() as u64;
        self.taken += chunk.bytes.len() as u64;
    }

    /// Nothing more is appended: every reader reaches the end.
    fn settle(&mut self) {
        for index in 0..READERS {
            let mut pumps = 0;
            while !self.has_arrived(index) {
                self.pump(index);
                self.take(index);
                pumps += 1;
                assert!(pumps < 100_000, "reader {index} never arrives");
            }
        }
    }

    /// Whether it has all bytes and reports so.
    fn has_arrived(&self, index: usize) -> bool {
        let reader = &self.readers[index];
        let has_all = reader.next == self.writer.end_offset();
        has_all && reader.reader.is_caught_up()
    }
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
fn readers_get_the_stream_without_a_gap_or_know_that_they_were_passed() {
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
fn the_model_meets_overruns_and_long_reads() {
    let (mut overruns, mut taken) = (0, 0);
    for seed in 0..30 {
        let model = run(seed, &Trouble::Torn(Faults::ALL));
        overruns += model.overruns;
        taken += model.taken;
    }
    assert!(overruns > 30 && taken > 500_000, "{overruns} overruns, {taken} bytes");
}
