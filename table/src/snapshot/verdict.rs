//! Whether bytes that were read are those of the slot that was wanted, by the slot's entry.

use remora_fabric::View;

use crate::{
    error::Error,
    layout::{Entry, Geometry},
    publish::load_entry_again,
};

/// A slot to get.
#[derive(Debug, Clone, Copy)]
pub(super) struct Wanted {
    pub(super) number: u64,
    pub(super) position: u64,
    /// Bytes of its content. Fewer are stored if it is compressed.
    pub(super) length: u32,
    /// Whether it may be compressed.
    pub(super) compressed: bool,
}

/// The judgement of an entry that was loaded after the slot's bytes.
#[derive(Debug)]
pub(super) enum Verdict {
    /// The bytes are the slot.
    Right,
    /// The entry was caught in the middle of a change, or is older than `published`: load it again.
    Unclear,
    /// The bytes are not what was written, though the slot was not overwritten.
    Damaged { want: u32 },
}

impl Wanted {
    /// Judges bytes with the checksum `crc` by the entry at the place of their slot.
    pub(super) fn judge(&self, entry: Option<Entry>, crc: u32, geometry: &Geometry) -> Result<Verdict, Error> {
        let Some(entry) = entry else {
            return Ok(Verdict::Unclear);
        };
        if entry.number > self.number {
            let oldest = (entry.number + 1).saturating_sub(u64::from(geometry.slots));
            return Err(Error::slot_overrun(self.number, oldest));
        }
        if entry.number < self.number || entry.writing {
            return Ok(Verdict::Unclear);
        }
        if !entry.has_content(self.position, self.length, self.compressed) {
            return Err(wrong_content(&entry, self.position, self.length));
        }
        if entry.crc != crc {
            return Ok(Verdict::Damaged { want: entry.crc });
        }
        Ok(Verdict::Right)
    }
}

/// An entry says another thing of its slot than the progress line.
pub(super) fn wrong_content(entry: &Entry, position: u64, length: u32) -> Error {
    let compressed = if entry.encoding == 0 { "" } else { ", compressed" };
    Error::Layout(format!(
        "slot {} of the table is published as bytes {position}+{length} and entered as {}+{}{compressed}",
        entry.number, entry.position, entry.length
    ))
}

/// Whether bytes with this CRC, taken before this call, are those of the slot: `None`, or the CRC that they should
/// have.
pub(super) fn judge_now(view: &View, wanted: &Wanted, crc: u32, geometry: &Geometry) -> Result<Option<u32>, Error> {
    match wanted.judge(load_entry_again(&view, geometry, wanted.number, None)?, crc, geometry)? {
        Verdict::Right => Ok(None),
        Verdict::Damaged { want } => Ok(Some(want)),
        // Words of a mapping are never torn, and the entry of a published slot changes for one reason only: the next
        // lap.
        Verdict::Unclear => Err(Error::slot_overrun(wanted.number, wanted.number + 1)),
    }
}
