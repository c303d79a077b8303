//! Superblock: what the recovery of a store begins with. Two slots are written in turn, so that one is always whole.
//!
//! ```text
//! 0       8       12       16        24      32     40       48     64      68    72          80               132
//! │ magic │ check │ layout │ counter │ store │ base │ synced │ boot │ flags │ (0) │ scrubbed │ the volume's shape │
//! ```

use remora_fabric::memory::crc::crc32c;

use super::record::{u32_at, u64_at};
use crate::layout;
use crate::shape::Shape;

/// Bytes of a slot: a page, so that no write of one touches the other.
pub(crate) const SLOT_BYTES: usize = 4096;

/// Bytes of the fields.
const FIELDS: usize = 80 + layout::SUPERBLOCK_BYTES;

const MAGIC: [u8; 8] = *b"REMORAST";

/// Changes with every change of a store's files.
pub(crate) const LAYOUT_VERSION: u32 = 2;

/// Flag: the server has ended in peace, and everything is synced.
const CLEAN: u32 = 1;

/// Flag: a write or a sync has failed.
const LOST: u32 = 2;

/// See the module's text.
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
}

impl Superblock {
    /// Where it is written.
    pub(crate) fn at(&self) -> u64 {
        self.counter % 2 * SLOT_BYTES as u64
    }

    /// The bytes of its slot.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(SLOT_BYTES);
        out.extend(MAGIC);
        out.extend([0; 4]);
        out.extend(LAYOUT_VERSION.to_le_bytes());
        [self.counter, self.store, self.base, self.synced].iter().for_each(|word| out.extend(word.to_le_bytes()));
        out.extend(self.boot);
        let flags = if self.is_clean { CLEAN } else { 0 } | if self.is_lost { LOST } else { 0 };
        out.extend(u64::from(flags).to_le_bytes());
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
        Some(Superblock { counter, store, shape, base, synced, boot, is_clean, is_lost, scrubbed: u64_at(fields, 72) })
    }
}

/// The fields of a slot, if they have their checksum.
fn fields(slot: &[u8]) -> Option<&[u8]> {
    let fields = slot.get(..FIELDS)?;
    (fields[..8] == MAGIC && u32_at(fields, 8) == crc32c(&fields[12..])).then_some(fields)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shape::{Copies, VolumeId};

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
        };
        let newer = Superblock { counter: 7, is_clean: false, is_lost: true, ..older };
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
