//! The part of the sink that one reader uses: where its small reads land, and its slot buffers.

use remora_fabric::Memory;

use crate::{error::Error, layout::Geometry};

/// The part of the sink in which the reads of one [`SnapshotReader`](crate::SnapshotReader) land: a page for the small
/// reads, then the slot buffers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SinkLayout {
    /// Offset of the page, in bytes from the start of the sink. A multiple of 64.
    pub offset: u64,
    /// Slot buffers, each of `slot_size` bytes. Enough that one slot may be verified and another used while
    /// [`Peer::depth`](remora_fabric::Peer::depth) reads are outstanding.
    pub buffers: u32,
}

impl SinkLayout {
    /// Bytes of the page for small reads: line, head, probe, and an entry per buffer.
    pub const SMALL_BYTES: u64 = 4096;
    /// Maximum number of buffers: as many as have an entry in the page beside the four lines of the other reads.
    pub const MAX_BUFFERS: u32 = 60;

    /// Bytes of the sink that this layout takes from `offset` on.
    pub fn length(&self, geometry: &Geometry) -> u64 {
        Self::SMALL_BYTES + u64::from(self.buffers) * geometry.slot_bytes()
    }

    pub(crate) const fn line(&self) -> u64 {
        self.offset
    }

    pub(crate) const fn head(&self) -> u64 {
        self.offset + 64
    }

    pub(crate) const fn probe(&self) -> u64 {
        self.offset + 192
    }

    pub(crate) fn entry(&self, buffer: u8) -> u64 {
        self.offset + 256 + 64 * u64::from(buffer)
    }

    pub(crate) fn buffer(&self, buffer: u8, geometry: &Geometry) -> u64 {
        self.offset + Self::SMALL_BYTES + u64::from(buffer) * geometry.slot_bytes()
    }

    /// Checks that the layout fits the sink.
    pub(crate) fn check(&self, sink: &Memory, geometry: &Geometry) -> Result<(), Error> {
        if !(1..=Self::MAX_BUFFERS).contains(&self.buffers) {
            return Err(Error::Layout(format!("{} slot buffers: must be 1 to {}", self.buffers, Self::MAX_BUFFERS)));
        }
        let end = self.offset.checked_add(self.length(geometry));
        if end.is_none_or(|end| end > sink.length()) {
            return Err(Error::Layout(format!(
                "a sink of {} bytes does not hold {} slot buffers of {} bytes from {} on",
                sink.length(),
                self.buffers,
                geometry.slot_size,
                self.offset
            )));
        }
        Ok(())
    }
}
