//! One slot on its way in pieces: which of them are here, and the checksum of those that are here without a gap.
//!
//! Not here: where the slot comes from, and what its checksum should be.

use remora_fabric::Memory;

use crate::{
    error::Error,
    reads::{READ_BYTES, Reads},
};

/// See the module's text.
pub(super) struct Pieces {
    /// Bytes of the slot.
    length: u32,
    count: u8,
    /// One bit per piece that is here. `MAX_SLOT_BYTES / READ_BYTES` fit.
    landed: u64,
    /// Pieces whose CRC is in `crc`: in order.
    summed: u8,
    crc: u32,
}

const _: () = assert!(crate::layout::MAX_SLOT_BYTES / READ_BYTES <= u64::BITS);

impl Pieces {
    /// Asks for all pieces of the `length` bytes at `from`, to land at `to`, under the name `buffer`.
    pub(super) fn ask(reads: &mut Reads, buffer: u8, from: u64, length: u32, to: u64) -> Pieces {
        let count = reads.queue_pieces(buffer, from, length, to);
        Pieces { length, count, landed: 0, summed: 0, crc: 0 }
    }

    /// One more is here: of so many bytes.
    pub(super) fn land(&mut self, piece: u8) -> u64 {
        self.landed |= 1 << piece;
        u64::from((self.length - u32::from(piece) * READ_BYTES).min(READ_BYTES))
    }

    /// All are here.
    pub(super) fn are_here(&self) -> bool {
        self.landed.count_ones() == u32::from(self.count)
    }

    /// Carries the CRC on over all pieces that are here without a gap; the first byte of the first lies at `at`.
    pub(super) fn sum(&mut self, sink: &Memory, at: u64) -> Result<(), Error> {
        while self.summed < self.count && self.landed >> self.summed & 1 == 1 {
            let start = u64::from(self.summed) * u64::from(READ_BYTES);
            let end = (start + u64::from(READ_BYTES)).min(u64::from(self.length));
            self.crc = sink.crc32c_append(self.crc, at + start..at + end)?;
            self.summed += 1;
        }
        Ok(())
    }

    /// The CRC-32C of what has been summed.
    pub(super) fn crc(&self) -> u32 {
        self.crc
    }
}
