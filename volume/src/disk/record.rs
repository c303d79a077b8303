//! The bytes of a store: a record is an event of a copy as the journal has it, and the superblock is what a recovery
//! begins with.

use remora_fabric::memory::crc::crc32c;

use crate::layout::{self, ENTRY_BYTES, Entry, LINE_WORDS, Line};
use crate::message::Standing;
use crate::shape::{BLOCK_BYTES, Shape};
use crate::wire::{MOST_BLOCKS, MOST_ENTRIES};

// An event of a copy, as the journal has it.
//
// ```text
// 0       8       12        16       20      24      32        40         48         56       64     112   128
// │ magic │ check │ changes │ blocks │ flags │ store │ segment │ sequence │ previous │ synced │ line │ (0) │
// │ for each change: block 8, entry 16 │ (0) up to a multiple of 512 │ the blocks of entries that have bytes │
// ```
//
// The check is a CRC-32C of all that follows it in front of the blocks. The blocks have theirs in the entries, which
// the writer has computed: no byte is summed twice. `synced` is the last event that was known as durable when this one
// was appended: a record before it that is unreadable was not torn by a power cut.

/// Records begin at multiples of this: a sector, so that no record shares one.
pub(crate) const UNIT: usize = 512;

/// Bytes of the head, without its changes.
pub(crate) const HEAD_BYTES: usize = 128;

/// Bytes of a change.
pub(crate) const CHANGE_BYTES: usize = 8 + ENTRY_BYTES;

/// The longest head with its changes: the entries that are lent at once.
pub(crate) const MAX_HEAD_BYTES: usize = (HEAD_BYTES + MOST_ENTRIES * CHANGE_BYTES).next_multiple_of(UNIT);

/// The longest record: the changes of the most entries, and the most blocks of a message.
pub(crate) const MAX_RECORD_BYTES: usize = MAX_HEAD_BYTES + MOST_BLOCKS * BLOCK_BYTES;

const MAGIC: [u8; 8] = *b"REMORAJR";

/// Flag: writes may be missing since a power cut.
const CUT: u32 = 1;

/// A record without its blocks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Head {
    /// The random number of the store. Bytes of another one are none of its records.
    pub(crate) store: u64,
    pub(crate) segment: u64,
    /// The number of the event.
    pub(crate) sequence: u64,
    /// The event before it.
    pub(crate) previous: u64,
    pub(crate) synced: u64,
    /// How the copy stands after it.
    pub(crate) standing: Standing,
    /// What it changed.
    pub(crate) changes: Vec<(u64, Entry)>,
}

impl Head {
    /// Bytes of the head with its changes.
    pub(crate) fn bytes(&self) -> usize {
        (HEAD_BYTES + self.changes.len() * CHANGE_BYTES).next_multiple_of(UNIT)
    }

    /// The number of its blocks.
    pub(crate) fn blocks(&self) -> usize {
        self.changes.iter().filter(|(_, entry)| entry.has_bytes()).count()
    }

    /// Bytes of the record.
    pub(crate) fn record_bytes(&self) -> usize {
        self.bytes() + self.blocks() * BLOCK_BYTES
    }

    /// The bytes in front of the blocks.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(self.bytes());
        out.extend(MAGIC);
        out.extend([0; 4]);
        out.extend((self.changes.len() as u32).to_le_bytes());
        out.extend((self.blocks() as u32).to_le_bytes());
        out.extend(if self.standing.is_cut { CUT } else { 0 }.to_le_bytes());
        let numbers = [self.store, self.segment, self.sequence, self.previous, self.synced];
        let words = numbers.into_iter().chain(Line(self.standing).to_words());
        words.for_each(|word| out.extend(word.to_le_bytes()));
        out.resize(HEAD_BYTES, 0);
        for (block, entry) in &self.changes {
            let [version, sums] = entry.to_words();
            [*block, version, sums].iter().for_each(|word| out.extend(word.to_le_bytes()));
        }
        out.resize(self.bytes(), 0);
        let check = crc32c(&out[12..]);
        out[8..12].copy_from_slice(&check.to_le_bytes());
        out
    }

    /// The bytes of the head with its changes, and of the record, as the beginning of a head says them. `None`: it is
    /// the beginning of no record.
    pub(crate) fn lengths(beginning: &[u8]) -> Option<(usize, usize)> {
        let beginning: &[u8; HEAD_BYTES] = beginning.first_chunk()?;
        let (changes, blocks) = (u32_at(beginning, 12) as usize, u32_at(beginning, 16) as usize);
        let is_head = beginning[..8] == MAGIC && changes <= MOST_ENTRIES && blocks <= changes && blocks <= MOST_BLOCKS;
        let head = (HEAD_BYTES + changes * CHANGE_BYTES).next_multiple_of(UNIT);
        is_head.then_some((head, head + blocks * BLOCK_BYTES))
    }

    /// Parses a head with its changes; `None` if it is damaged, or ends early.
    pub(crate) fn parse(bytes: &[u8]) -> Option<Head> {
        let (length, _) = Head::lengths(bytes)?;
        let bytes = bytes.get(..length)?;
        let check = u32_at(bytes, 8);
        if check != crc32c(&bytes[12..]) {
            return None;
        }
        let [store, segment, sequence, previous, synced] = std::array::from_fn(|number| u64_at(bytes, 24 + number * 8));
        let words: [u64; LINE_WORDS] = std::array::from_fn(|number| u64_at(bytes, 64 + number * 8));
        let Line(standing) = Line::from_words(words)?;
        let standing = Standing { is_cut: u32_at(bytes, 20) & CUT != 0, ..standing };
        let changes = bytes[HEAD_BYTES..].chunks_exact(CHANGE_BYTES).take(u32_at(bytes, 12) as usize);
        let changes = changes.map(|change| {
            let [block, version, sums] = std::array::from_fn(|number| u64_at(change, number * 8));
            Some((block, Entry::from_words([version, sums])?))
        });
        let head =
            Head { store, segment, sequence, previous, synced, standing, changes: changes.collect::<Option<_>>()? };
        (head.blocks() == u32_at(bytes, 16) as usize).then_some(head)
    }

    /// The changes with their blocks, which follow the head; no bytes for a block that is zeros. `None`: a block has
    /// not its checksum, or is missing.
    pub(crate) fn with_blocks<'a>(&'a self, blocks: &'a [u8]) -> Option<Vec<(u64, Entry, &'a [u8])>> {
        let mut blocks = blocks.chunks_exact(BLOCK_BYTES);
        let changes = self.changes.iter().map(|&(block, entry)| {
            let bytes = if entry.has_bytes() { blocks.next()? } else { &[] };
            (!entry.has_bytes() || entry.is_of(bytes)).then_some((block, entry, bytes))
        });
        changes.collect()
    }
}

/// A field of bytes whose length was checked. Beyond the end it is 0.
pub(crate) fn u32_at(bytes: &[u8], at: usize) -> u32 {
    bytes.get(at..).and_then(|rest| rest.first_chunk()).copied().map_or(0, u32::from_le_bytes)
}

/// See [`u32_at`].
pub(crate) fn u64_at(bytes: &[u8], at: usize) -> u64 {
    bytes.get(at..).and_then(|rest| rest.first_chunk()).copied().map_or(0, u64::from_le_bytes)
}

/// The body of properties: any bytes are a record, which is the same again as bytes, or not one.
#[cfg(test)]
pub(crate) fn fuzz(bytes: &[u8]) {
    let Some(head) = Head::parse(bytes) else { return };
    let again = head.encode();
    assert_eq!(Head::parse(&again).as_ref(), Some(&head), "a record that is written otherwise");
    assert!(head.record_bytes() <= MAX_RECORD_BYTES);
    let _ = head.with_blocks(&bytes[head.bytes()..]);
}

/// Bytes of a slot: a page, so that no write of one touches the other.
pub(crate) const SLOT_BYTES: usize = 4096;

/// Bytes of the fields.
const FIELDS: usize = 80 + layout::SUPERBLOCK_BYTES;

const SUPERBLOCK_MAGIC: [u8; 8] = *b"REMORAST";

/// Changes with every change of a store's files.
pub(crate) const LAYOUT_VERSION: u32 = 2;

/// Flag: the server has ended in peace, and everything is synced.
const CLEAN: u32 = 1;

/// Flag: a write or a sync has failed.
const LOST: u32 = 2;

/// What the recovery of a store begins with. Two slots are written in turn, so that one is always whole.
///
/// ```text
/// 0       8       12       16        24      32     40       48     64      68       72          80               132
/// │ magic │ check │ layout │ counter │ store │ base │ synced │ boot │ flags │ former │ scrubbed │ the volume's shape │
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Superblock {
    /// Rises with every write. The higher one counts.
    pub(crate) counter: u64,
    /// A random number, which each record repeats.
    pub(crate) store: u64,
    pub(crate) shape: Shape,
    /// The first segment that is needed.
    pub(crate) base: u64,
    /// Events up to this one were synced.
    pub(crate) synced: u64,
    /// Of the system that ran when it was written.
    pub(crate) boot: [u8; 16],
    pub(crate) is_clean: bool,
    pub(crate) is_lost: bool,
    /// When all blocks were last read and checked, in seconds since 1970; 0: never.
    pub(crate) scrubbed: u64,
    /// The blocks before a growth that is not agreed, fewer than now; in the file, 0 is none.
    pub(crate) former: Option<u64>,
}

impl Superblock {
    /// Where it is written.
    pub(crate) fn at(&self) -> u64 {
        self.counter % 2 * SLOT_BYTES as u64
    }

    /// The bytes of its slot.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(SLOT_BYTES);
        out.extend(SUPERBLOCK_MAGIC);
        out.extend([0; 4]);
        out.extend(LAYOUT_VERSION.to_le_bytes());
        [self.counter, self.store, self.base, self.synced].iter().for_each(|word| out.extend(word.to_le_bytes()));
        out.extend(self.boot);
        let flags = if self.is_clean { CLEAN } else { 0 } | if self.is_lost { LOST } else { 0 };
        out.extend(flags.to_le_bytes());
        // The most blocks have 33 bits, and these are fewer.
        let former = self.former.and_then(|former| u32::try_from(former).ok()).unwrap_or(0);
        out.extend(former.to_le_bytes());
        out.extend(self.scrubbed.to_le_bytes());
        out.extend(layout::Superblock(self.shape).to_bytes());
        let check = crc32c(&out[12..]);
        out[8..12].copy_from_slice(&check.to_le_bytes());
        out.resize(SLOT_BYTES, 0);
        out
    }

    /// The newest of the slots of these bytes; `None` if both are damaged, or of another release.
    pub(crate) fn newest(bytes: &[u8]) -> Option<Superblock> {
        bytes.chunks(SLOT_BYTES).filter_map(Superblock::parse).max_by_key(|superblock| superblock.counter)
    }

    /// The layout of these bytes, if they are whole and of another release.
    pub(crate) fn other_layout(bytes: &[u8]) -> Option<u32> {
        let fields = bytes.chunks(SLOT_BYTES).filter_map(fields);
        fields.map(|fields| u32_at(fields, 12)).find(|&layout| layout != LAYOUT_VERSION)
    }

    fn parse(slot: &[u8]) -> Option<Superblock> {
        let fields = fields(slot).filter(|fields| u32_at(fields, 12) == LAYOUT_VERSION)?;
        let [counter, store, base, synced] = std::array::from_fn(|number| u64_at(fields, 16 + number * 8));
        let flags = u32_at(fields, 64);
        let layout::Superblock(shape) = layout::Superblock::parse(fields.last_chunk()?).ok()?;
        let boot = *fields.get(48..)?.first_chunk()?;
        let (is_clean, is_lost) = (flags & CLEAN != 0, flags & LOST != 0);
        let former = Some(u64::from(u32_at(fields, 68))).filter(|former| *former > 0);
        let scrubbed = u64_at(fields, 72);
        Some(Superblock { counter, store, shape, base, synced, boot, is_clean, is_lost, scrubbed, former })
    }
}

/// The fields of a slot, if they have their checksum.
fn fields(slot: &[u8]) -> Option<&[u8]> {
    let fields = slot.get(..FIELDS)?;
    (fields[..8] == SUPERBLOCK_MAGIC && u32_at(fields, 8) == crc32c(&fields[12..])).then_some(fields)
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;
    use crate::message::State;
    use crate::shape::{Copies, VolumeId};
    use crate::version::Version;

    fn heads() -> impl Strategy<Value = Head> {
        let version = || any::<u64>().prop_filter_map("the first bit is 0", |word| Version::from_word(word >> 1));
        let change =
            (any::<u64>(), version(), any::<u32>(), any::<bool>()).prop_map(|(block, version, crc, is_zero)| {
                let entry = if is_zero { Entry::zeros(version) } else { Entry::of(version, crc) };
                (block, if entry.is_written() { entry } else { Entry::NONE })
            });
        (any::<[u64; 5]>(), version(), any::<bool>(), vec(change, 0..20)).prop_map(
            |(numbers, applied, is_cut, changes)| {
                let [store, segment, sequence, previous, synced] = numbers;
                let standing = Standing { state: State::Whole, applied, is_cut, ..Standing::default() };
                Head { store, segment, sequence, previous, synced, standing, changes }
            },
        )
    }

    proptest! {
        #[test]
        fn a_head_comes_back_and_a_changed_bit_is_found(head in heads(), bit: prop::sample::Index) {
            let mut bytes = head.encode();
            prop_assert_eq!(bytes.len(), head.bytes());
            prop_assert_eq!(Head::lengths(&bytes), Some((head.bytes(), head.record_bytes())));
            fuzz(&bytes);
            prop_assert_eq!(Head::parse(&bytes), Some(head));
            let at = bit.index(bytes.len() * 8);
            bytes[at / 8] ^= 1 << (at % 8);
            prop_assert_eq!(Head::parse(&bytes), None);
        }

        #[test]
        fn any_bytes_are_a_head_or_none(bytes in vec(any::<u8>(), 0..700), numbers: [u8; 4]) {
            fuzz(&bytes);
            let mut bytes = [&MAGIC[..], &[0; 4], &numbers, &bytes].concat();
            let check = crc32c(&bytes[12..]);
            bytes[8..12].copy_from_slice(&check.to_le_bytes());
            fuzz(&bytes);
        }
    }

    #[test]
    fn the_newer_slot_counts_and_a_damaged_one_does_not() {
        let shape = Copies::new(3, 2).and_then(|copies| Shape::new(VolumeId([7; 16]), 9, copies));
        let Some(shape) = shape else { unreachable!("nine blocks") };
        let older = Superblock {
            counter: 6,
            store: 1,
            shape,
            base: 2,
            synced: 3,
            boot: [4; 16],
            is_clean: true,
            is_lost: false,
            scrubbed: 5,
            former: None,
        };
        let newer = Superblock { counter: 7, is_clean: false, is_lost: true, former: Some(1), ..older };
        let mut bytes = [older.encode(), newer.encode()].concat();
        assert_eq!((older.at(), newer.at()), (0, SLOT_BYTES as u64));
        assert_eq!(Superblock::newest(&bytes), Some(newer));
        bytes[SLOT_BYTES + 20] ^= 1;
        assert_eq!(Superblock::newest(&bytes), Some(older));
        bytes[100] ^= 1;
        assert_eq!(Superblock::newest(&bytes), None);
        assert_eq!((Superblock::newest(&[]), Superblock::other_layout(&bytes)), (None, None));
        // As an earlier release has written it.
        let mut bytes = newer.encode();
        bytes[12..16].copy_from_slice(&1_u32.to_le_bytes());
        let check = crc32c(&bytes[12..FIELDS]);
        bytes[8..12].copy_from_slice(&check.to_le_bytes());
        assert_eq!((Superblock::newest(&bytes), Superblock::other_layout(&bytes)), (None, Some(1)));
    }
}
