//! Record: an event of a copy, as the journal has it.
//!
//! ```text
//! 0       8       12        16       20      24      32        40         48         56       64     112   128
//! │ magic │ check │ changes │ blocks │ flags │ store │ segment │ sequence │ previous │ synced │ line │ (0) │
//! │ for each change: block 8, entry 16 │ (0) up to a multiple of 512 │ the blocks of entries that have bytes │
//! ```
//!
//! The check is a CRC-32C of all that follows it in front of the blocks. The blocks have theirs in the entries, which
//! the writer has computed: no byte is summed twice. `synced` is the last event that was known as durable when this one
//! was appended: a record before it that is unreadable was not torn by a power cut.

use remora_fabric::memory::crc::crc32c;

use crate::layout::{ENTRY_BYTES, Entry, LINE_WORDS, Line};
use crate::message::Standing;
use crate::shape::BLOCK_BYTES;
use crate::wire::{MOST_BLOCKS, MOST_ENTRIES};

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

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;
    use crate::message::State;
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
}
