//! Torn reads: readers against a store that is written meanwhile. A block that is read must be the block as it was at
//! one moment of the read.
#![allow(clippy::unwrap_used)]

use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use remora_fabric::{Completion, Error, Memory, Peer, ReadRequest, TransportKind, View};
use remora_lab::Random;
use remora_lab::random::seed;

use crate::layout::Entry;
use crate::reader::{Found, InPlace, OneSided, ReaderError};
use crate::rules::{Generation, Holder, Standing, State, Version};
use crate::shape::{BLOCK_BYTES, Copies, Shape, VolumeId};
use crate::store::{Store, sums};

const BLOCKS: u64 = 5;
const LIMIT: Duration = Duration::from_secs(10);

fn store() -> Store {
    let shape = Shape::new(VolumeId([3; 16]), BLOCKS, Copies::new(1, 1).unwrap()).unwrap();
    Store::create(shape).unwrap()
}

/// Whether a write is one of zeros, without bytes.
fn is_zero(version: Version) -> bool {
    version.counter() % 5 == 3
}

/// What a write leaves in a block: other bytes in each of them. `Version::NONE`: zeros.
fn pattern(block: u64, version: Version) -> Vec<u8> {
    match version {
        version if version == Version::NONE || is_zero(version) => vec![0; BLOCK_BYTES],
        _ => Random::new(version.word() ^ block).bytes(BLOCK_BYTES),
    }
}

fn entry(block: u64, version: Version) -> Entry {
    match version {
        Version::NONE => Entry::NONE,
        version if is_zero(version) => Entry::zeros(version),
        _ => Entry::of(version, sums(&pattern(block, version)).next().unwrap()),
    }
}

/// A writer that stops at any place within a write. Sometimes a block goes back, as in a catch-up.
struct Writer {
    store: Store,
    random: Random,
    last: Version,
    step: u64,
    block: u64,
    /// What each block has been, the last one at the end.
    history: Vec<Vec<Version>>,
}

impl Writer {
    fn new(seed: u64) -> Writer {
        let last = Generation::NONE.next().unwrap().start();
        let history = vec![vec![Version::NONE]; BLOCKS as usize];
        Writer { store: store(), random: Random::new(seed), last, step: 0, block: 0, history }
    }

    /// A fraction of a write.
    fn step(&mut self) {
        let version = *self.history[self.block as usize].last().unwrap();
        let bytes = pattern(self.block, version);
        match self.step % 5 {
            0 => {
                self.block = self.random.below(BLOCKS);
                self.last = self.last.next().unwrap();
                let version = if self.random.one_in(8) { Version::NONE } else { self.last };
                self.history[self.block as usize].push(version);
                self.store.begin(self.block, entry(self.block, version));
            }
            1..=3 if !entry(self.block, version).has_bytes() => {} // the bytes of the write before stay
            1 => self.store.place(self.block, &bytes[..100]),
            2 => self.store.place(self.block, &bytes[..3000]),
            3 => self.store.place(self.block, &bytes),
            _ => self.store.finish(self.block, entry(self.block, version)),
        }
        let applied = self.last;
        self.store.set_line(Standing { state: State::Whole, promised: None, claim: applied, applied, is_cut: false });
        self.step += 1;
    }

    /// How often each block was written.
    fn lengths(&self) -> Vec<usize> {
        self.history.iter().map(Vec::len).collect()
    }
}

/// A peer whose reads are taken in up to six pieces, in any order, between which the writer goes on.
struct TornPeer {
    writer: Arc<Mutex<Writer>>,
    sink: Arc<Memory>,
    random: Random,
    left: Vec<(u64, u64, u64)>,
    completions: usize,
}

impl TornPeer {
    fn cut(&mut self, read: &ReadRequest) {
        let length = u64::from(read.length);
        let mut cuts: Vec<u64> = (0..self.random.below(6)).map(|_| self.random.below(length)).collect();
        cuts.extend([0, length]);
        cuts.sort_unstable();
        let pieces = cuts.windows(2).map(|pair| (read.offset + pair[0], read.sink_offset + pair[0], pair[1] - pair[0]));
        self.left.extend(pieces);
    }
}

impl Peer for TornPeer {
    fn depth(&self) -> usize {
        2
    }

    fn post_read(&mut self, reads: &[ReadRequest]) -> Result<usize, Error> {
        let accepted = reads.len().min(self.depth() - self.completions);
        reads[..accepted].iter().for_each(|read| self.cut(read));
        self.completions += accepted;
        Ok(accepted)
    }

    fn poll(&mut self, completions: &mut Vec<Completion>) -> Result<usize, Error> {
        let mut writer = self.writer.lock().unwrap();
        for _ in 0..self.random.below(3) {
            writer.step();
        }
        if !self.left.is_empty() {
            let piece = self.random.below(self.left.len() as u64) as usize;
            let (from, to, length) = self.left.swap_remove(piece);
            writer.store.memory().copy_to(from..from + length, &self.sink, to).unwrap();
            return Ok(0);
        }
        let completed = std::mem::take(&mut self.completions);
        completions.extend((0..completed).map(|_| Completion { tag: 0, result: Ok(0) }));
        Ok(completed)
    }

    fn wait(&mut self, _: Duration) -> Result<(), Error> {
        Ok(())
    }

    fn arm(&mut self) -> BorrowedFd<'_> {
        View::as_fd(&self.sink)
    }

    fn view(&self) -> Option<Arc<View>> {
        None
    }

    fn close(&mut self) {}
}

/// Random reads through such a peer.
#[test]
fn a_one_sided_read_is_of_one_moment_or_says_that_it_was_torn() {
    let first = seed("torn");
    let (mut right, mut torn) = (0, 0);
    for seed in first..first + 60 {
        let writer = Arc::new(Mutex::new(Writer::new(seed)));
        let sink = OneSided::sink(3).unwrap();
        let peer = TornPeer {
            writer: Arc::clone(&writer),
            sink: Arc::clone(&sink),
            random: Random::new(seed ^ 1),
            left: Vec::new(),
            completions: 0,
        };
        let mut reader = OneSided::new(Box::new(peer), TransportKind::Sim, sink, writer.lock().unwrap().store.layout());
        let mut random = Random::new(seed ^ 2);
        for _ in 0..40 {
            let count = random.between(1, 3);
            let block = random.below(BLOCKS - count + 1);
            let before = writer.lock().unwrap().lengths();
            let mut bytes = vec![0xaa; count as usize * BLOCK_BYTES];
            match reader.blocks(block, &mut bytes, LIMIT) {
                Ok(Found { entries, line: standing }) => {
                    right += 1;
                    assert!(standing.applied <= writer.lock().unwrap().last);
                    for (block, (entry, bytes)) in (block..).zip(entries.iter().zip(bytes.chunks(BLOCK_BYTES))) {
                        let writer = writer.lock().unwrap();
                        // The last one before the read, or any that was begun during it.
                        let could_be = &writer.history[block as usize][before[block as usize].saturating_sub(2)..];
                        assert!(could_be.contains(&entry.version), "seed {seed}: {} of {could_be:?}", entry.version);
                        assert!(bytes == pattern(block, entry.version), "seed {seed}: block {block} is torn");
                    }
                }
                Err(ReaderError::Torn { .. } | ReaderError::TornLine) => torn += 1,
                Err(error) => panic!("seed {seed}: {error}"),
            }
        }
    }
    println!("{right} reads were right, {torn} were torn each time");
    assert!(right > 100 && torn > 100, "{right} right, {torn} torn");
}

/// A peer that makes the reads of a round trip last first. Between two of them another writer comes, and writes.
struct Backwards {
    store: Arc<Store>,
    sink: Arc<Memory>,
    left: Vec<ReadRequest>,
    reads: usize,
    /// Before which read.
    comes_before: usize,
}

/// What the other writer writes into block 0, and how the copy stands then.
fn replaced(store: &Store) -> Standing {
    let generation = Generation::NONE.next().unwrap().next().unwrap();
    let version = generation.start().next().unwrap();
    let line = Standing {
        state: State::Whole,
        promised: Some(Holder { generation, writer: 2 }),
        claim: version,
        applied: version,
        is_cut: false,
    };
    store.set_line(line); // it promises before it obeys
    store.put(0, entry(0, version), &pattern(0, version));
    line
}

impl Peer for Backwards {
    fn depth(&self) -> usize {
        8
    }

    fn post_read(&mut self, reads: &[ReadRequest]) -> Result<usize, Error> {
        self.left.extend(reads);
        Ok(reads.len())
    }

    fn poll(&mut self, completions: &mut Vec<Completion>) -> Result<usize, Error> {
        let Some(ReadRequest { offset, length, sink_offset, .. }) = self.left.pop() else { return Ok(0) };
        if self.reads == self.comes_before {
            replaced(&self.store);
        }
        self.reads += 1;
        self.store.memory().copy_to(offset..offset + u64::from(length), &self.sink, sink_offset).unwrap();
        completions.push(Completion { tag: 0, result: Ok(length) });
        Ok(1)
    }

    fn wait(&mut self, _: Duration) -> Result<(), Error> {
        Ok(())
    }

    fn arm(&mut self) -> BorrowedFd<'_> {
        View::as_fd(&self.sink)
    }

    fn view(&self) -> Option<Arc<View>> {
        None
    }

    fn close(&mut self) {}
}

/// RDMA reads in any order what is posted together. Blocks of another writer must not come with a line from before it.
#[test]
fn where_reads_have_no_order_the_line_is_still_read_after_the_blocks() {
    for comes_before in 0..4 {
        let store = Arc::new(store());
        let sink = OneSided::sink(1).unwrap();
        let (layout, left) = (store.layout(), Vec::new());
        let peer = Backwards { store: Arc::clone(&store), sink: Arc::clone(&sink), left, reads: 0, comes_before };
        let mut reader = OneSided::new(Box::new(peer), TransportKind::Verbs, sink, layout);
        let mut bytes = [0xaa; BLOCK_BYTES];
        let found = reader.blocks(0, &mut bytes, LIMIT).unwrap();
        let obeys = found.line.promised.map(|holder| holder.generation);
        let written = found.newest().generation();
        assert!(written == Generation::NONE || obeys == Some(written), "{comes_before}: {found:?}");
    }
}

/// A writing thread, and readers of the same host that map the region as other processes do.
#[test]
fn a_read_in_place_is_of_one_moment() {
    let store = store();
    let view = Arc::new(store.memory().open_view().unwrap());
    let reader = InPlace::new(view, store.layout());
    let written = AtomicU64::new(0);
    let start = Generation::NONE.next().unwrap().start();
    let version = |number: u64| Version::from_word(start.word() + number).unwrap();
    let writes = 20_000;
    let (mut right, mut torn) = (0, 0);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for number in 1..=writes {
                let bytes = pattern(0, version(number));
                store.put(0, entry(0, version(number)), &bytes);
                written.store(number, Ordering::Release);
            }
        });
        let mut bytes = [0; BLOCK_BYTES];
        let mut last = Version::NONE;
        while written.load(Ordering::Acquire) < writes {
            let before = written.load(Ordering::Acquire);
            match reader.block(0, &mut bytes) {
                Ok(found) => {
                    right += 1;
                    assert!(found.version >= last && (before == 0 || found.version >= version(before)));
                    assert!(bytes == *pattern(0, found.version), "the block of {} is torn", found.version);
                    last = found.version;
                }
                Err(ReaderError::Torn { .. }) => torn += 1,
                Err(error) => panic!("{error}"),
            }
            assert!(reader.line().is_ok());
        }
    });
    println!("{right} reads were right, {torn} were torn each time");
    assert!(right > 0);
}

#[test]
fn a_block_that_was_never_written_is_zeros_whatever_its_memory_holds() {
    let store = store();
    store.place(1, &[7; BLOCK_BYTES]);
    let mut bytes = [1; BLOCK_BYTES];
    assert_eq!(store.get(1, &mut bytes), Ok(Entry::NONE));
    assert_eq!(bytes, [0; BLOCK_BYTES]);
    let reader = InPlace::new(Arc::new(store.memory().open_view().unwrap()), store.layout());
    bytes.fill(1);
    assert_eq!(reader.block(1, &mut bytes).unwrap(), Entry::NONE);
    assert_eq!(bytes, [0; BLOCK_BYTES]);
    assert!(matches!(reader.block(BLOCKS, &mut bytes), Err(ReaderError::OutOfBounds { .. })));
}

#[test]
fn a_block_that_has_changed_by_itself_is_lacked_from_then_on() {
    let store = store();
    let version = Generation::NONE.next().unwrap().start().next().unwrap();
    let (entry, mut bytes) = (entry(2, version), pattern(2, version));
    store.put(2, entry, &bytes);
    assert_eq!(store.entry(2), Some(entry));
    assert_eq!(store.get(2, &mut bytes), Ok(entry));
    store.memory().write(store.layout().block_at(2) + 4000, &[!bytes[4000]]).unwrap();
    assert!(store.get(2, &mut bytes).is_err());
    assert_eq!(store.entry(2), None);
    // Written again, it is there again.
    store.put(2, entry, &pattern(2, version));
    assert_eq!(store.get(2, &mut bytes), Ok(entry));
}
