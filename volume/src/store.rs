//! Store: the blocks of one copy, in memory that others may read while they are written.
//!
//! ```text
//! put:   entry := version, being written ─▶ block ─▶ entry := version, checksum          then, by its owner: set_line
//! ```
//!
//! A store has one writer: its owner's lock. Readers elsewhere take no lock ([`crate::reader`]).

use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use remora_fabric::memory::crc::crc32c;
use remora_fabric::memory::{self, Memory, Pages};

use crate::layout::{Entry, LINE_AT, Layout, Line, Superblock};
use crate::rules::Standing;
use crate::shape::{BLOCK_BYTES, Shape};

/// A block that has the checksum of no write: its memory has changed by itself. The copy lacks the block from now on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("block {block} is damaged: the memory of this host may be faulty")]
pub struct Damaged {
    /// The block.
    pub block: u64,
}

/// The blocks of one copy. See the module's text.
#[derive(Debug)]
pub struct Store {
    memory: Arc<Memory>,
    shape: Shape,
    layout: Layout,
}

impl Store {
    /// A store without any written block. Pages back it as they are written.
    ///
    /// # Errors
    /// The system has no memory of that length.
    pub fn create(shape: Shape) -> Result<Store, memory::Error> {
        let layout = Layout::of(shape);
        let memory = Memory::create_single_writer("remora-volume", layout.length(), Pages::Small)?;
        memory.write(0, &Superblock(shape).to_bytes())?;
        let store = Store { memory: Arc::new(memory), shape, layout };
        store.set_line(Standing::default());
        Ok(store)
    }

    /// The volume.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// Where its parts are.
    pub fn layout(&self) -> Layout {
        self.layout
    }

    /// The region, to be exported to readers.
    pub fn memory(&self) -> &Arc<Memory> {
        &self.memory
    }

    /// Says how the copy stands. Call it before a message says the same.
    pub fn set_line(&self, standing: Standing) {
        self.store_words(LINE_AT, &Line(standing).to_words());
    }

    /// Writes a block of [`BLOCK_BYTES`] with its entry. If that says that the block is zeros whatever its bytes are,
    /// none are needed, and those in memory stay: no page is touched for them.
    pub fn put(&self, block: u64, entry: Entry, bytes: &[u8]) {
        debug_assert!(self.layout.has(block, 1) && (!entry.has_bytes() || bytes.len() == BLOCK_BYTES));
        self.begin(block, entry);
        if entry.has_bytes() {
            self.place(block, bytes);
        }
        self.finish(block, entry);
    }

    pub(crate) fn begin(&self, block: u64, entry: Entry) {
        self.store_words(self.layout.entry_at(block), &[entry.busy_word()]);
        fence(Ordering::Release); // no byte of the block before the mark
    }

    pub(crate) fn place(&self, block: u64, bytes: &[u8]) {
        let written = self.memory.write(self.layout.block_at(block), bytes);
        debug_assert!(written.is_ok(), "a block of the volume: {written:?}");
    }

    pub(crate) fn finish(&self, block: u64, entry: Entry) {
        fence(Ordering::Release); // no new entry before the last byte of the block
        let [version, sums] = entry.to_words();
        let at = self.layout.entry_at(block);
        self.store_words(at + 8, &[sums]);
        self.store_words(at, &[version]);
    }

    /// The copy lacks this block from now on.
    pub(crate) fn lack(&self, block: u64) {
        self.begin(block, Entry::NONE);
    }

    /// The entry of a block; `None` if the copy lacks the block.
    pub fn entry(&self, block: u64) -> Option<Entry> {
        let at = self.layout.entry_at(block);
        Entry::from_words([self.load_word(at)?, self.load_word(at + 8)?])
    }

    /// Copies a block out, and checks it.
    ///
    /// # Errors
    /// [`Damaged`].
    pub fn get(&self, block: u64, into: &mut [u8]) -> Result<Entry, Damaged> {
        let entry = self.entry(block).ok_or(Damaged { block })?;
        if !entry.has_bytes() {
            into.fill(0);
            return Ok(entry);
        }
        let is_read = self.memory.read(self.layout.block_at(block), into).is_ok();
        if !is_read || !entry.is_of(into) {
            // Its entry says from now on that it lacks the block, so that the next catch-up takes it from another copy.
            self.begin(block, entry);
            return Err(Damaged { block });
        }
        Ok(entry)
    }

    /// In the byte order of the region. An offset outside of it is a bug, and changes nothing.
    fn store_words(&self, at: u64, words: &[u64]) {
        for (offset, word) in (at..).step_by(8).zip(words) {
            let stored = self.memory.store_u64(offset, word.to_le(), Ordering::Release);
            debug_assert!(stored.is_ok(), "a word of the region: {stored:?}");
        }
    }

    fn load_word(&self, at: u64) -> Option<u64> {
        self.memory.load_u64(at, Ordering::Acquire).ok().map(u64::from_le)
    }
}

/// The checksum of each block of these bytes.
pub fn sums(blocks: &[u8]) -> impl Iterator<Item = u32> + '_ {
    blocks.chunks_exact(BLOCK_BYTES).map(crc32c)
}
