//! Reader: takes blocks out of a copy's region without its server. One-sided, over any transport of the fabric, or in
//! place on the same host.
//!
//! Entries, blocks and the line are read in one round trip, in any order and in any pieces. A block that was read while
//! it was written is noticed by its entry or its checksum ([`crate::layout`]), and the read is repeated. A reader that
//! has no luck several times asks the server.
//!
//! A region does not tell whether its server still obeys the reader's writer: the line does. Compare its generation.

use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use std::time::{Duration, Instant};

use remora_fabric::memory::{self, Memory, Pages, View};
use remora_fabric::{Completion, Error as FabricError, Peer, ReadError, ReadRequest};

use crate::layout::{ENTRY_BYTES, Entry, LINE_AT, LINE_BYTES, LINE_WORDS, Layout, Line};
use crate::message::Standing;
use crate::shape::BLOCK_BYTES;

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

/// Whether these bytes are a block at one moment. A block that was never written becomes zeros.
fn judge(entry: Option<Entry>, block: &mut [u8]) -> Option<Entry> {
    let entry = entry?;
    if !entry.is_written() {
        block.fill(0);
        return Some(entry);
    }
    entry.is_of(block).then_some(entry)
}

/// Reads a copy of this host in place.
pub struct InPlace {
    view: Arc<View>,
    layout: Layout,
}

impl InPlace {
    /// A reader of a copy of this layout.
    pub fn new(view: Arc<View>, layout: Layout) -> InPlace {
        InPlace { view, layout }
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

    /// Copies a block out, and returns which write it is of.
    ///
    /// # Errors
    /// [`ReaderError::Torn`], [`ReaderError::OutOfBounds`].
    pub fn block(&self, block: u64, into: &mut [u8; BLOCK_BYTES]) -> Result<Entry, ReaderError> {
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
    most: u64,
}

impl OneSided {
    /// The memory into which reads of up to `most` blocks arrive. Connect a peer to it.
    ///
    /// # Errors
    /// The system has no memory of that length.
    pub fn sink(most: u64) -> Result<Arc<Memory>, memory::Error> {
        let length = most * (ENTRY_BYTES + BLOCK_BYTES) as u64 + LINE_BYTES as u64;
        Ok(Arc::new(Memory::create("remora-volume-sink", length, Pages::Small)?))
    }

    /// A reader of a copy of this layout, through a peer that was connected to a [`OneSided::sink`].
    pub fn new(peer: Box<dyn Peer>, sink: Arc<Memory>, layout: Layout) -> OneSided {
        let most = sink.length().saturating_sub(LINE_BYTES as u64) / (ENTRY_BYTES + BLOCK_BYTES) as u64;
        OneSided { peer, sink, layout, most }
    }

    /// Reads blocks into `into`, which has room for `count` of them. Returns their entries, and how the copy stood.
    ///
    /// # Errors
    /// [`ReaderError`]. After [`ReaderError::Fabric`] and [`ReaderError::TimedOut`] the reader is of no more use.
    pub fn blocks(
        &mut self,
        first: u64,
        into: &mut [u8],
        limit: Duration,
    ) -> Result<(Vec<Entry>, Standing), ReaderError> {
        let count = (into.len() / BLOCK_BYTES) as u64;
        if count > self.most || !self.layout.has(first, count) {
            return Err(ReaderError::OutOfBounds { first, count });
        }
        let deadline = Instant::now() + limit;
        let mut torn = ReaderError::TornLine;
        for _ in 0..TRIES {
            self.fetch(first, count, deadline, limit)?;
            match self.judge(first, into)? {
                Ok(found) => return Ok(found),
                Err(why) => torn = why,
            }
        }
        Err(torn)
    }

    /// Reads everything once.
    fn fetch(&mut self, first: u64, count: u64, deadline: Instant, limit: Duration) -> Result<(), ReaderError> {
        let [blocks, entries] = [BLOCK_BYTES, ENTRY_BYTES].map(|bytes| count * bytes as u64);
        let reads = [
            (self.layout.block_at(first), blocks, 0),
            (self.layout.entry_at(first), entries, blocks),
            (LINE_AT, LINE_BYTES as u64, blocks + entries),
        ];
        let requests = reads.map(|(offset, length, sink_offset)| ReadRequest {
            tag: 0,
            offset,
            length: length as u32, // `most` blocks of a sink
            sink_offset,
        });
        let (mut posted, mut completed) = (0, 0);
        let mut completions: Vec<Completion> = Vec::with_capacity(requests.len());
        while completed < requests.len() {
            posted += self.peer.post_read(&requests[posted..])?;
            self.peer.poll(&mut completions)?;
            for completion in completions.drain(..) {
                completion.result?;
                completed += 1;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if completed < requests.len() {
                if left.is_zero() {
                    return Err(ReaderError::TimedOut(limit));
                }
                self.peer.wait(left)?;
            }
        }
        Ok(())
    }

    /// Judges what has arrived. The inner error says what was torn.
    #[allow(clippy::type_complexity)] // two kinds of error: the connection's, and a torn read, which is repeated
    fn judge(&self, first: u64, into: &mut [u8]) -> Result<Result<(Vec<Entry>, Standing), ReaderError>, ReaderError> {
        let blocks = into.len() as u64;
        let count = into.len() / BLOCK_BYTES;
        let mut entries = Vec::with_capacity(count);
        self.sink.read(0, into)?;
        for (number, block) in into.chunks_exact_mut(BLOCK_BYTES).enumerate() {
            let mut bytes = [0; ENTRY_BYTES];
            self.sink.read(blocks + (number * ENTRY_BYTES) as u64, &mut bytes)?;
            let Some(entry) = judge(Entry::from_bytes(&bytes), block) else {
                return Ok(Err(ReaderError::Torn { block: first + number as u64 }));
            };
            entries.push(entry);
        }
        let mut words = [0; LINE_WORDS];
        for (number, word) in words.iter_mut().enumerate() {
            let mut bytes = [0; 8];
            self.sink.read(blocks + (count * ENTRY_BYTES + number * 8) as u64, &mut bytes)?;
            *word = u64::from_le_bytes(bytes);
        }
        Ok(Line::from_words(words).map(|Line(standing)| (entries, standing)).ok_or(ReaderError::TornLine))
    }
}
