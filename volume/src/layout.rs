//! Layout: where things are in the memory of a copy, what their bytes mean, and how its owner writes them while others
//! read. One copy is one region.
//!
//! ```text
//! 0                       4096                      next page
//! │ superblock │ line │ … │ entries: 16 bytes each  │ blocks: 4096 bytes each │      integers are little-endian
//! ```
//!
//! - [`Superblock`]: what of the volume never changes.
//! - [`Line`]: how the copy stands: what its server says by message, for a reader that asks no server.
//! - [`Entry`]: which write a block is of, and its checksum, or that it is zeros.
//!
//! What a reader relies on, in whatever order and pieces the bytes reach it: an entry that is not being written, whose
//! own check holds, and whose checksum is that of the block's bytes. At the moment at which the entry was read, the
//! memory held a block with that checksum, and the bytes are equal to it. So the read took place at that moment.
//!
//! Words are stored and loaded atomically. Everything else is judged by a checksum.
//!
//! The [`Store`] is the owner's end: the blocks of one copy, in memory that others may read while they are written.
//!
//! ```text
//! put:   entry := version, being written ─▶ block ─▶ entry := version, checksum          then, by its owner: set_line
//! ```
//!
//! It has one writer: its owner's lock. Readers elsewhere take no lock ([`crate::reader`]).

use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use remora_fabric::memory::crc::{crc32c, crc32c_append};
use remora_fabric::memory::{self, Memory, Pages};

use crate::rules::{Generation, Holder, Standing, State, Version};
use crate::shape::{BLOCK_BYTES, Copies, Shape, VolumeId};

#[cfg(test)]
use crate::rules::Mutant;

/// Bytes of an entry.
pub const ENTRY_BYTES: usize = 16;

/// Where the line begins: a cache line of its own.
pub const LINE_AT: u64 = 128;

/// Bytes of the line.
pub const LINE_BYTES: usize = 8 * LINE_WORDS;

/// Words of the line.
pub(crate) const LINE_WORDS: usize = 6;

/// Where the entries begin, and the unit to which they are rounded up.
const PAGE_BYTES: u64 = 4096;

/// First bytes of every copy.
const MAGIC: [u8; 8] = *b"REMORAVO";

/// Changes with every change of this file's layout.
const LAYOUT_VERSION: u32 = 2;

/// Bit of an entry's version: the block is being written.
const BUSY: u64 = 1 << 63;

/// The offsets in a copy of this number of blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    blocks: u64,
}

impl Layout {
    /// The layout of a copy of this volume.
    pub fn of(shape: Shape) -> Layout {
        Layout { blocks: shape.blocks() }
    }

    /// The number of blocks.
    pub fn blocks(self) -> u64 {
        self.blocks
    }

    /// Whether the volume has all of these blocks.
    pub fn has(self, first: u64, count: u64) -> bool {
        first.checked_add(count).is_some_and(|end| end <= self.blocks)
    }

    /// The offset of a block's entry.
    pub fn entry_at(self, block: u64) -> u64 {
        PAGE_BYTES + block * ENTRY_BYTES as u64
    }

    /// The offset of a block.
    pub fn block_at(self, block: u64) -> u64 {
        self.entry_at(self.blocks).next_multiple_of(PAGE_BYTES) + block * BLOCK_BYTES as u64
    }

    /// Bytes of the region.
    pub fn length(self) -> u64 {
        self.block_at(self.blocks)
    }
}

/// What of the volume never changes, at the beginning of each copy.
///
/// ```text
/// 0       8        12          16       32       40          44       48
/// │ magic │ layout │ (0)       │ volume │ blocks │ copies    │ hold   │ CRC-32C of bytes 0 to 47 │
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Superblock(pub Shape);

/// Bytes of the superblock.
pub const SUPERBLOCK_BYTES: usize = 52;

const _: () = assert!(SUPERBLOCK_BYTES as u64 <= LINE_AT && LINE_AT + LINE_BYTES as u64 <= PAGE_BYTES);

/// Why a region is not a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LayoutError {
    /// It does not begin as a copy does.
    #[error("not a copy of a volume: its first bytes are not the magic")]
    Magic,
    /// It has another layout.
    #[error("the copy has layout {0}, this program reads {LAYOUT_VERSION}: use the same release on all hosts")]
    Version(u32),
    /// Its superblock is damaged.
    #[error("the superblock of the copy is damaged")]
    Damaged,
}

impl Superblock {
    /// The bytes in memory.
    pub fn to_bytes(self) -> [u8; SUPERBLOCK_BYTES] {
        let Superblock(shape) = self;
        let mut bytes = [0; SUPERBLOCK_BYTES];
        let mut at = 0;
        let mut put = |field: &[u8]| {
            bytes[at..at + field.len()].copy_from_slice(field);
            at += field.len();
        };
        put(&MAGIC);
        put(&LAYOUT_VERSION.to_le_bytes());
        put(&[0; 4]);
        put(&shape.volume().0);
        put(&shape.blocks().to_le_bytes());
        put(&(shape.copies().number() as u32).to_le_bytes());
        put(&(shape.copies().hold() as u32).to_le_bytes());
        let check = crc32c(&bytes[..SUPERBLOCK_BYTES - 4]);
        bytes[SUPERBLOCK_BYTES - 4..].copy_from_slice(&check.to_le_bytes());
        bytes
    }

    /// Parses the bytes of a region's beginning.
    ///
    /// # Errors
    /// [`LayoutError`].
    pub fn parse(bytes: &[u8; SUPERBLOCK_BYTES]) -> Result<Superblock, LayoutError> {
        let mut rest = bytes.as_slice();
        if take(&mut rest) != MAGIC {
            return Err(LayoutError::Magic);
        }
        let version = u32::from_le_bytes(take(&mut rest));
        if version != LAYOUT_VERSION {
            return Err(LayoutError::Version(version));
        }
        let _: [u8; 4] = take(&mut rest);
        let volume = VolumeId(take(&mut rest));
        let blocks = u64::from_le_bytes(take(&mut rest));
        let [copies, hold]: [usize; 2] = std::array::from_fn(|_| u32::from_le_bytes(take(&mut rest)) as usize);
        let check = u32::from_le_bytes(take(&mut rest));
        let shape = Copies::new(copies, hold).and_then(|copies| Shape::new(volume, blocks, copies));
        let shape = shape.filter(|_| check == crc32c(&bytes[..SUPERBLOCK_BYTES - 4]));
        shape.map(Superblock).ok_or(LayoutError::Damaged)
    }
}

/// The next field of bytes whose length was checked. Beyond the end it is zeros.
fn take<const N: usize>(rest: &mut &[u8]) -> [u8; N] {
    let Some((field, after)) = rest.split_first_chunk() else { return [0; N] };
    *rest = after;
    *field
}

/// How the copy stands. Whether its power was cut concerns writers that open it, and they ask.
///
/// ```text
/// generation promised, 0: none │ its writer │ claim │ applied │ state │ CRC-32C of the five words      eight bytes
/// each ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Line(pub Standing);

impl Line {
    /// The words in memory.
    pub(crate) fn to_words(self) -> [u64; LINE_WORDS] {
        let Line(standing) = self;
        let (generation, writer) =
            standing.promised.map_or((0, 0), |holder| (u64::from(holder.generation.number()), holder.writer));
        let state = match standing.state {
            State::Empty => 0,
            State::Behind => 1,
            State::Whole => 2,
        };
        let mut words = [generation, writer, standing.claim.word(), standing.applied.word(), state, 0];
        words[LINE_WORDS - 1] = line_check(&words);
        words
    }

    /// `None`: it was read in the middle of a change, or is damaged.
    pub(crate) fn from_words(words: [u64; LINE_WORDS]) -> Option<Line> {
        let [generation, writer, claim, applied, state, check] = words;
        if check != line_check(&words) {
            return None;
        }
        let generation = u32::try_from(generation).ok().and_then(Generation::from_number)?;
        let state = match state {
            0 => State::Empty,
            1 => State::Behind,
            2 => State::Whole,
            _ => return None,
        };
        Some(Line(Standing {
            state,
            promised: (generation != Generation::NONE).then_some(Holder { generation, writer }),
            claim: Version::from_word(claim)?,
            applied: Version::from_word(applied)?,
            is_cut: false,
        }))
    }
}

fn line_check(words: &[u64; LINE_WORDS]) -> u64 {
    let sum = words[..LINE_WORDS - 1].iter().fold(0, |sum, word| crc32c_append(sum, &word.to_le_bytes()));
    u64::from(sum)
}

/// Which write a block is of.
///
/// ```text
/// 0         8                     12                                16
/// │ version │ CRC-32C of the block │ CRC-32C of the 12 bytes before │      highest bit of the version: being written
/// ```
///
/// All zeros: the block was never written, and reads as zeros whatever its bytes are. The last checksum has all of its
/// bits inverted: a write of zeros was the last one, and the block reads as zeros whatever its bytes are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Entry {
    /// The last write of the block; [`Version::NONE`] before the first.
    pub version: Version,
    /// CRC-32C of the block; 0 before the first write.
    pub crc: u32,
    /// The last write was one of zeros, without bytes.
    pub is_zero: bool,
}

impl Entry {
    /// The entry of a block that was never written.
    pub const NONE: Entry = Entry { version: Version::NONE, crc: 0, is_zero: false };

    /// The entry of a block that was written with bytes of this checksum.
    pub fn of(version: Version, crc: u32) -> Entry {
        Entry { version, crc, is_zero: false }
    }

    /// The entry of a block that was written as zeros, without bytes.
    pub fn zeros(version: Version) -> Entry {
        Entry { version, crc: ZEROS_CRC, is_zero: true }
    }

    /// Whether the block was written.
    pub fn is_written(self) -> bool {
        self.version != Version::NONE
    }

    /// Whether the block is what its bytes are. If not, it is zeros whatever they are.
    pub fn has_bytes(self) -> bool {
        self.is_written() && !self.is_zero
    }

    /// What a copy that has `ours` takes of a block with this entry, which is to be its own. `None`: it lacks the block.
    pub(crate) fn need(self, ours: Option<Entry>) -> Need {
        match ours {
            Some(ours) if ours == self => Need::Nothing,
            #[cfg(test)]
            Some(_) if self.is_zero && Mutant::ZerosNotTaken.is_active() => Need::Nothing,
            _ if self.has_bytes() => Need::Block,
            _ => Need::Entry,
        }
    }

    /// The words in memory.
    pub(crate) fn to_words(self) -> [u64; 2] {
        if !self.is_written() {
            return [0, 0];
        }
        let version = self.version.word();
        let check = entry_check(version, self.crc);
        let check = if self.is_zero { !check } else { check };
        [version, u64::from(self.crc) | u64::from(check) << 32]
    }

    /// The first word while the block is being written.
    pub(crate) fn busy_word(self) -> u64 {
        self.version.word() | BUSY
    }

    /// `None`: the block is being written, or the entry was read in the middle of a change, or it is damaged.
    pub(crate) fn from_words([version, sums]: [u64; 2]) -> Option<Entry> {
        if [version, sums] == [0, 0] {
            return Some(Entry::NONE);
        }
        let (crc, check) = (sums as u32, (sums >> 32) as u32);
        let version = Version::from_word(version).filter(|version| *version != Version::NONE)?;
        let expected = entry_check(version.word(), crc);
        let is_zero = check == !expected && crc == ZEROS_CRC;
        (is_zero || check == expected).then_some(Entry { version, crc, is_zero })
    }

    /// Reads an entry from the bytes of a region.
    pub(crate) fn from_bytes(bytes: &[u8; ENTRY_BYTES]) -> Option<Entry> {
        let mut rest = bytes.as_slice();
        Entry::from_words(std::array::from_fn(|_| u64::from_le_bytes(take(&mut rest))))
    }

    /// Whether these are the bytes of the block, which has some.
    pub(crate) fn is_of(self, block: &[u8]) -> bool {
        crc32c(block) == self.crc
    }
}

/// What one copy takes of a block of another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Need {
    /// It is the same.
    Nothing,
    /// Its entry, which says that it is zeros.
    Entry,
    /// Its entry and its bytes.
    Block,
}

/// CRC-32C of a block of zeros.
pub(crate) const ZEROS_CRC: u32 = 0x98f9_4189;

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

fn entry_check(version: u64, crc: u32) -> u32 {
    crc32c_append(crc32c(&version.to_le_bytes()), &crc.to_le_bytes())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use proptest::prelude::*;

    use super::*;

    fn shapes() -> impl Strategy<Value = Shape> {
        (any::<[u8; 16]>(), 1..=1_u64 << 32, 1..=5_usize, 1..=5_usize)
            .prop_filter_map("more hold", |(id, blocks, n, m)| Shape::new(VolumeId(id), blocks, Copies::new(n, m)?))
    }

    fn versions() -> impl Strategy<Value = Version> {
        any::<u64>().prop_map(|word| Version::from_word(word >> 1).unwrap())
    }

    fn standings() -> impl Strategy<Value = Standing> {
        let state = prop::sample::select(vec![State::Empty, State::Behind, State::Whole]);
        (state, any::<Option<(u32, u64)>>(), versions(), versions()).prop_map(|(state, promised, claim, applied)| {
            let promised = promised.map(|(number, writer)| {
                let generation = Generation::from_number(number % Generation::LAST.number() + 1).unwrap();
                Holder { generation, writer }
            });
            Standing { state, promised, claim, applied, is_cut: false }
        })
    }

    proptest! {
        #[test]
        fn superblocks_and_lines_and_entries_come_back(shape in shapes(), standing in standings(), version in versions(), crc: u32) {
            prop_assert_eq!(Superblock::parse(&Superblock(shape).to_bytes()), Ok(Superblock(shape)));
            prop_assert_eq!(Line::from_words(Line(standing).to_words()), Some(Line(standing)));
            let entry = if version == Version::NONE { Entry::NONE } else { Entry::of(version, crc) };
            prop_assert_eq!(Entry::from_words(entry.to_words()), Some(entry));
            prop_assert_eq!(Entry::from_words([entry.busy_word(), entry.to_words()[1]]), None);
            let zeros = Entry::zeros(version.next().unwrap_or(version));
            prop_assert_eq!(Entry::from_words(zeros.to_words()), Some(zeros));
            let lies = Entry { crc, ..zeros };
            prop_assert_eq!(Entry::from_words(lies.to_words()).is_some(), crc == ZEROS_CRC);
        }

        /// No bit makes one of the other kind.
        #[test]
        fn a_changed_bit_of_an_entry_is_found(version in versions(), crc: u32, is_zero: bool, bit in 0..128_usize) {
            let version = version.next().unwrap_or(version);
            let mut words = if is_zero { Entry::zeros(version) } else { Entry::of(version, crc) }.to_words();
            words[bit / 64] ^= 1 << (bit % 64);
            prop_assert_eq!(Entry::from_words(words), None);
        }

        #[test]
        fn a_changed_bit_is_found(shape in shapes(), standing in standings(), bit: prop::sample::Index) {
            let mut bytes = Superblock(shape).to_bytes();
            let at = bit.index(bytes.len() * 8);
            bytes[at / 8] ^= 1 << (at % 8);
            prop_assert!(Superblock::parse(&bytes).is_err());
            let mut words = Line(standing).to_words();
            let at = bit.index(LINE_WORDS * 64);
            words[at / 64] ^= 1 << (at % 64);
            prop_assert_eq!(Line::from_words(words), None);
        }

        #[test]
        fn any_bytes_are_an_entry_or_not_one_but_never_a_panic(bytes: [u8; ENTRY_BYTES], words: [u64; LINE_WORDS]) {
            let _ = (Entry::from_bytes(&bytes), Line::from_words(words));
        }

        /// Entries and blocks neither overlap nor leave the region.
        #[test]
        fn parts_follow_each_other(shape in shapes()) {
            let layout = Layout::of(shape);
            let last = shape.blocks() - 1;
            prop_assert!(layout.entry_at(0) >= LINE_AT + LINE_BYTES as u64);
            prop_assert!(layout.entry_at(last) + ENTRY_BYTES as u64 <= layout.block_at(0));
            prop_assert_eq!(layout.block_at(0) % PAGE_BYTES, 0);
            prop_assert_eq!(layout.block_at(last) + BLOCK_BYTES as u64, layout.length());
            prop_assert!(layout.has(last, 1) && !layout.has(last, 2) && !layout.has(u64::MAX, 2));
        }
    }

    #[test]
    fn zeros_have_the_checksum_of_a_block_of_zeros() {
        assert_eq!(crc32c(&[0; BLOCK_BYTES]), ZEROS_CRC);
    }
}
