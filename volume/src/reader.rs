//! Reader: takes blocks out of a copy's region without its server. One-sided, over any transport of the fabric, or in
//! place on the same host.
//!
//! Entries and blocks are read in one round trip, in any order and in any pieces. A block that was read while it was
//! written is noticed by its entry or its checksum ([`crate::layout`]), and the read is repeated. A reader that has no
//! luck several times asks the server.
//!
//! A region does not tell whether its server still obeys the reader's writer: the line does. Compare its generation.
//! That says something of the blocks only if the line is read after them. TCP keeps that order, as it serves the reads
//! of a connection one after the other: there all of it is one round trip. RDMA does not. One read is several READs, on
//! several queue pairs if there are any. A card answers READs in their order, but may fetch what several of them ask
//! for from memory in any order. Only a completion says that bytes were read. So the line is fetched by itself there,
//! after the blocks have completed. It costs one round trip more.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::time::{Duration, Instant};

use remora_fabric::memory::{self, Memory, Pages, View};
use remora_fabric::{Completion, Error as FabricError, Peer, ReadError, ReadRequest, TransportKind};

use crate::layout::{ENTRY_BYTES, Entry, LINE_AT, LINE_BYTES, LINE_WORDS, Layout, Line};
use crate::rules::{Generation, Standing, State, Version};
use crate::shape::BLOCK_BYTES;
use crate::wire::newest;

/// How often blocks are read before the reader gives up. A block is torn for as long as one write of it takes, so even
/// the second attempt is rare.
const TRIES: usize = 4;

/// Why blocks were not read.
#[derive(Debug, thiserror::Error)]
pub enum ReaderError {
    /// The blocks are not in the volume, or more than one read takes.
    #[error("blocks {first} to {} are not in the volume, or too many for one read", first + count)]
    OutOfBounds {
        /// The first one.
        first: u64,
        /// How many.
        count: u64,
    },
    /// A block or the line was being written at each attempt, or is damaged: ask the server.
    #[error("block {block} was being written each of the {TRIES} times that it was read, or is damaged")]
    Torn {
        /// The block.
        block: u64,
    },
    /// The line was being written at each attempt, or is damaged: ask the server.
    #[error("the line of the copy was being written each of the {TRIES} times that it was read, or is damaged")]
    TornLine,
    /// The copy did not answer in time.
    #[error("the copy did not answer within {0:?}")]
    TimedOut(Duration),
    /// The connection failed.
    #[error(transparent)]
    Fabric(#[from] FabricError),
    /// A read was refused.
    #[error(transparent)]
    Denied(#[from] ReadError),
    /// The region is shorter than the copy.
    #[error(transparent)]
    Memory(#[from] memory::Error),
}

impl ReaderError {
    /// Whether the reader is of no more use. After the other ones it is: the blocks were being written.
    pub fn is_final(&self) -> bool {
        !matches!(self, ReaderError::OutOfBounds { .. } | ReaderError::Torn { .. } | ReaderError::TornLine)
    }
}

/// Whether these bytes are a block at one moment. A block that has no bytes of its own becomes zeros.
fn judge(entry: Option<Entry>, block: &mut [u8]) -> Option<Entry> {
    let entry = entry?;
    if !entry.has_bytes() {
        block.fill(0);
        return Some(entry);
    }
    entry.is_of(block).then_some(entry)
}

/// What was found in a region.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// Which write each block is of.
    pub entries: Vec<Entry>,
    /// How the copy stood. The line is read after the blocks. So its server obeyed the line's writer when the blocks
    /// were read, if that writer began before.
    pub line: Standing,
}

impl Found {
    /// The last write of any of the blocks.
    pub fn newest(&self) -> Version {
        newest(self.entries.iter().map(|entry| entry.version))
    }
}

/// Blocks to be read.
#[derive(Debug)]
pub struct Wanted<'a> {
    /// The first one.
    pub first: u64,
    /// Where they are put; its length says how many.
    pub into: &'a mut [u8],
}

/// Where a run of blocks arrives in the sink: blocks, entries, line.
#[derive(Clone, Copy)]
struct Place {
    first: u64,
    count: u64,
    at: u64,
}

impl Place {
    fn entries_at(self) -> u64 {
        self.at + self.count * BLOCK_BYTES as u64
    }

    fn line_at(self) -> u64 {
        self.entries_at() + self.count * ENTRY_BYTES as u64
    }
}

/// A read of a part of the region into a part of the sink.
fn request(offset: u64, length: u64, sink_offset: u64) -> ReadRequest {
    ReadRequest { tag: 0, offset, length: length as u32, sink_offset } // no longer than a sink
}

/// Bytes that `blocks` blocks take in a sink.
fn sink_bytes(blocks: u64) -> u64 {
    blocks * (ENTRY_BYTES + BLOCK_BYTES) as u64 + LINE_BYTES as u64
}

/// Reads a copy of this host in place.
///
/// The pages that it has read are the server's, and count for this process too (`VmRSS`, `RssShmem`) as long as they
/// are mapped: at most 64 MiB and what is read at the moment. Then all are unmapped, and are mapped again by the next
/// reads of them, sixteen at a time.
pub struct InPlace {
    view: Arc<View>,
    layout: Layout,
    /// Bytes that were read since pages were unmapped.
    mapped: AtomicU64,
}

/// Bytes that are read before their pages are unmapped.
const MOST_MAPPED: u64 = 64 << 20;

impl InPlace {
    /// A reader of a copy of this layout.
    pub fn new(view: Arc<View>, layout: Layout) -> InPlace {
        InPlace { view, layout, mapped: AtomicU64::new(0) }
    }

    /// How the copy stands.
    ///
    /// # Errors
    /// [`ReaderError::TornLine`].
    pub fn line(&self) -> Result<Standing, ReaderError> {
        for _ in 0..TRIES {
            let mut words = [0; LINE_WORDS];
            for (at, word) in (LINE_AT..).step_by(8).zip(&mut words) {
                *word = u64::from_le(self.view.load_u64(at, Ordering::Acquire)?);
            }
            if let Some(Line(standing)) = Line::from_words(words) {
                return Ok(standing);
            }
        }
        Err(ReaderError::TornLine)
    }

    /// Copies blocks out, as many as `into` has room for, and then the line.
    ///
    /// # Errors
    /// [`ReaderError::Torn`], [`ReaderError::TornLine`], [`ReaderError::OutOfBounds`].
    pub fn blocks(&self, first: u64, into: &mut [u8]) -> Result<Found, ReaderError> {
        let blocks = (first..).zip(into.chunks_exact_mut(BLOCK_BYTES));
        let entries = blocks.map(|(block, into)| self.block(block, into)).collect::<Result<_, _>>()?;
        fence(Ordering::Acquire); // no word of the line before the last byte of a block
        let found = Found { entries, line: self.line()? };
        self.has_mapped(into.len() as u64);
        Ok(found)
    }

    /// So many bytes were read.
    fn has_mapped(&self, bytes: u64) {
        let before = self.mapped.fetch_add(bytes, Ordering::Relaxed);
        // One of several threads.
        if before < MOST_MAPPED && before + bytes >= MOST_MAPPED {
            self.view.forget(0..self.layout.length());
            self.mapped.store(0, Ordering::Relaxed);
        }
    }

    /// Copies a block of [`BLOCK_BYTES`] out, and returns which write it is of.
    ///
    /// # Errors
    /// [`ReaderError::Torn`], [`ReaderError::OutOfBounds`].
    pub fn block(&self, block: u64, into: &mut [u8]) -> Result<Entry, ReaderError> {
        if !self.layout.has(block, 1) {
            return Err(ReaderError::OutOfBounds { first: block, count: 1 });
        }
        for _ in 0..TRIES {
            let at = self.layout.entry_at(block);
            let word = |at| self.view.load_u64(at, Ordering::Acquire).map(u64::from_le);
            let entry = Entry::from_words([word(at)?, word(at + 8)?]);
            fence(Ordering::Acquire);
            self.view.read(self.layout.block_at(block), into)?;
            if let Some(entry) = judge(entry, into) {
                return Ok(entry);
            }
        }
        Err(ReaderError::Torn { block })
    }
}

/// Reads a copy over the fabric.
pub struct OneSided {
    peer: Box<dyn Peer>,
    sink: Arc<Memory>,
    layout: Layout,
    /// Whether what is posted last is read last, within one round trip.
    is_ordered: bool,
}

impl OneSided {
    /// The memory into which reads of up to `most` blocks arrive, or several of fewer ones. Connect a peer to it.
    ///
    /// # Errors
    /// The system has no memory of that length.
    pub fn sink(most: u64) -> Result<Arc<Memory>, memory::Error> {
        Ok(Arc::new(Memory::create("remora-volume-sink", sink_bytes(most), Pages::Small)?))
    }

    /// A reader of a copy of this layout, through a peer of this transport that was connected to a [`OneSided::sink`].
    pub fn new(peer: Box<dyn Peer>, transport: TransportKind, sink: Arc<Memory>, layout: Layout) -> OneSided {
        let is_ordered = matches!(transport, TransportKind::Tcp | TransportKind::Sim);
        OneSided { peer, sink, layout, is_ordered }
    }

    /// How the copy stands.
    ///
    /// # Errors
    /// As for [`OneSided::blocks`].
    pub fn line(&mut self, limit: Duration) -> Result<Standing, ReaderError> {
        let deadline = Instant::now() + limit;
        for _ in 0..TRIES {
            let left = deadline.saturating_duration_since(Instant::now());
            fetch(&mut *self.peer, &[request(LINE_AT, LINE_BYTES as u64, 0)], left, || true)?;
            if let Some(line) = self.line_at(0)? {
                return Ok(line);
            }
        }
        Err(ReaderError::TornLine)
    }

    /// Reads blocks into `into`, which has room for `count` of them. Returns their entries, and how the copy stood.
    ///
    /// # Errors
    /// [`ReaderError`]. After [`ReaderError::is_final`] ones the reader is of no more use.
    pub fn blocks(&mut self, first: u64, into: &mut [u8], limit: Duration) -> Result<Found, ReaderError> {
        let mut found = self.several(&mut [Wanted { first, into }], limit)?;
        found.pop().unwrap_or(Err(ReaderError::TornLine))
    }

    /// Reads several runs of blocks together, as far as one of them is not torn. They must fit the sink.
    ///
    /// # Errors
    /// For each run those that concern it alone, [`ReaderError::Torn`] and [`ReaderError::TornLine`]; for all of them
    /// as for [`OneSided::blocks`].
    pub fn several(
        &mut self,
        wanted: &mut [Wanted<'_>],
        limit: Duration,
    ) -> Result<Vec<Result<Found, ReaderError>>, ReaderError> {
        let mut at = 0;
        let mut places = Vec::with_capacity(wanted.len());
        for Wanted { first, into } in wanted.iter() {
            let (first, count) = (*first, (into.len() / BLOCK_BYTES) as u64);
            if !self.layout.has(first, count) || at + sink_bytes(count) > self.sink.length() {
                return Err(ReaderError::OutOfBounds { first, count });
            }
            places.push(Place { first, count, at });
            at += sink_bytes(count);
        }
        let deadline = Instant::now() + limit;
        let mut results: Vec<_> = wanted.iter().map(|_| Err(ReaderError::TornLine)).collect();
        let mut due: Vec<usize> = (0..wanted.len()).collect();
        for _ in 0..TRIES {
            let mut requests: Vec<ReadRequest> =
                due.iter().flat_map(|&number| self.blocks_of(places[number])).collect();
            // Posted last, and so read last; or fetched by itself: see the module's text.
            let line_at = due.last().map_or(0, |&number| places[number].line_at());
            let line = request(LINE_AT, LINE_BYTES as u64, line_at);
            let mut fetch = |requests: &[ReadRequest]| {
                fetch(&mut *self.peer, requests, deadline.saturating_duration_since(Instant::now()), || true)
            };
            if self.is_ordered {
                requests.push(line);
                fetch(&requests)?;
            } else {
                fetch(&requests)?;
                fetch(&[line])?;
            }
            for &number in &due {
                results[number] = self.judge(places[number], line_at, wanted[number].into)?;
            }
            due.retain(|&number| results[number].is_err());
            if due.is_empty() {
                break;
            }
        }
        Ok(results)
    }

    /// The reads of the blocks and entries of one run.
    fn blocks_of(&self, place: Place) -> [ReadRequest; 2] {
        let Place { first, count, at } = place;
        let [blocks, entries] = [BLOCK_BYTES, ENTRY_BYTES].map(|bytes| count * bytes as u64);
        [
            request(self.layout.block_at(first), blocks, at),
            request(self.layout.entry_at(first), entries, place.entries_at()),
        ]
    }

    /// Judges what has arrived, with the line at `line_at`. The inner error says what was torn.
    fn judge(&self, place: Place, line_at: u64, into: &mut [u8]) -> Result<Result<Found, ReaderError>, ReaderError> {
        let entries_at = place.entries_at();
        let mut entries = Vec::with_capacity(place.count as usize);
        self.sink.read(place.at, into)?;
        for (number, block) in (0..).zip(into.chunks_exact_mut(BLOCK_BYTES)) {
            let mut bytes = [0; ENTRY_BYTES];
            self.sink.read(entries_at + number * ENTRY_BYTES as u64, &mut bytes)?;
            let Some(entry) = judge(Entry::from_bytes(&bytes), block) else {
                return Ok(Err(ReaderError::Torn { block: place.first + number }));
            };
            entries.push(entry);
        }
        Ok(self.line_at(line_at)?.map(|line| Found { entries, line }).ok_or(ReaderError::TornLine))
    }

    /// The line that has arrived there; `None`: it was being written.
    fn line_at(&self, line_at: u64) -> Result<Option<Standing>, ReaderError> {
        let mut words = [0; LINE_WORDS];
        for (at, word) in (line_at..).step_by(8).zip(&mut words) {
            let mut bytes = [0; 8];
            self.sink.read(at, &mut bytes)?;
            *word = u64::from_le_bytes(bytes);
        }
        Ok(Line::from_words(words).map(|Line(line)| line))
    }
}

/// Makes these reads, each once. `goes_on` is asked from time to time whether to wait on.
///
/// # Errors
/// [`ReaderError::is_final`] ones, and [`ReaderError::TimedOut`] also if it should not go on.
pub(crate) fn fetch(
    peer: &mut dyn Peer,
    requests: &[ReadRequest],
    limit: Duration,
    goes_on: impl Fn() -> bool,
) -> Result<(), ReaderError> {
    let deadline = Instant::now() + limit;
    let (mut posted, mut completed) = (0, 0);
    let mut completions: Vec<Completion> = Vec::with_capacity(requests.len());
    while completed < requests.len() {
        posted += peer.post_read(&requests[posted..])?;
        peer.poll(&mut completions)?;
        for completion in completions.drain(..) {
            completion.result?;
            completed += 1;
        }
        let left = deadline.saturating_duration_since(Instant::now());
        if completed < requests.len() {
            if left.is_zero() || !goes_on() {
                return Err(ReaderError::TimedOut(limit));
            }
            peer.wait(left.min(LOOK_AGAIN))?;
        }
    }
    Ok(())
}

/// How often a reader that waits looks whether it should go on.
const LOOK_AGAIN: Duration = Duration::from_millis(50);

// Blocks of some copy, whichever is read, for those who must know of which writes they are.

/// Why blocks were not read.
#[derive(Clone, Debug, thiserror::Error)]
pub enum BlocksError {
    /// They were being written, or the copy is not a prefix at present. They can be read again.
    #[error("{0}")]
    Again(String),
    /// The copy cannot be read any more.
    #[error("{0}")]
    Failed(String),
}

/// Of which writes blocks were that were read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seen {
    /// The last write of any of them.
    pub newest: Version,
    /// What the copy had applied after they were read. Its generation is the history to which they belong: another one
    /// says that writes which were read before may be undone.
    pub applied: Version,
}

impl Seen {
    /// The history to which a whole copy belongs that has applied this. A writer's first word is at every copy before
    /// anything of it is, and after all that it undoes.
    pub fn history(self) -> Generation {
        self.applied.generation()
    }
}

/// The blocks of one copy, read one-sided, by any number of threads. Each block is one that was written. What is read
/// later is not older.
pub trait Blocks: Send + Sync {
    /// Reads whole blocks.
    ///
    /// # Errors
    /// [`BlocksError`].
    fn read(&self, first: u64, into: &mut [u8]) -> Result<Seen, BlocksError>;
}

/// A copy of this host.
impl Blocks for InPlace {
    fn read(&self, first: u64, into: &mut [u8]) -> Result<Seen, BlocksError> {
        seen_of(self.blocks(first, into))
    }
}

fn seen_of(found: Result<Found, ReaderError>) -> Result<Seen, BlocksError> {
    let found = found.map_err(|error| match error {
        ReaderError::Torn { .. } | ReaderError::TornLine => BlocksError::Again(error.to_string()),
        error => BlocksError::Failed(error.to_string()),
    })?;
    // A copy that is behind takes blocks in any order.
    if found.line.state != State::Whole {
        return Err(BlocksError::Again("the copy is behind: its server takes what it lacks".into()));
    }
    Ok(Seen { newest: found.newest(), applied: found.line.applied })
}

/// Torn reads: readers against a store that is written meanwhile. A block that is read must be the block as it was at
/// one moment of the read.
#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::os::fd::BorrowedFd;
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::sync::{Arc, Mutex};
    use std::time::Duration;

    use remora_fabric::{Completion, Error, Memory, Peer, ReadRequest, TransportKind, View};
    use remora_lab::Random;
    use remora_lab::random::seed;

    use super::{Found, InPlace, OneSided, ReaderError};
    use crate::layout::Entry;
    use crate::layout::{Store, sums};
    use crate::rules::{Generation, Holder, Standing, State, Version};
    use crate::shape::{BLOCK_BYTES, Copies, Shape, VolumeId};

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
            self.store.set_line(Standing {
                state: State::Whole,
                promised: None,
                claim: applied,
                applied,
                is_cut: false,
            });
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
            let pieces =
                cuts.windows(2).map(|pair| (read.offset + pair[0], read.sink_offset + pair[0], pair[1] - pair[0]));
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
            let mut reader =
                OneSided::new(Box::new(peer), TransportKind::Sim, sink, writer.lock().unwrap().store.layout());
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
                            assert!(
                                could_be.contains(&entry.version),
                                "seed {seed}: {} of {could_be:?}",
                                entry.version
                            );
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

    /// RDMA reads in any order what is posted together. Blocks of another writer must not come with a line from before
    /// it.
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
}
