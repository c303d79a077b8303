//! One slot that arrives in pieces: which pieces are here, and the checksum of those that are here without a gap.
//!
//! Not here: the source of the slot, and the checksum that it should have.

use remora_fabric::Memory;

use crate::{
    error::Error,
    reads::{READ_BYTES, Reads},
};

/// The pieces of one slot. See the module docs.
pub(super) struct Pieces {
    /// Bytes of the slot.
    length: u32,
    count: u8,
    /// One bit per piece that has arrived. `MAX_SLOT_BYTES / READ_BYTES` bits fit.
    landed: u64,
    /// Number of pieces whose CRC is included in `crc`, in order.
    summed: u8,
    crc: u32,
}

const _: () = assert!(crate::layout::MAX_SLOT_BYTES / READ_BYTES <= u64::BITS);

impl Pieces {
    /// Queues reads of all pieces of the `length` bytes at `from`, to land at `to`, tagged with `buffer`.
    pub(super) fn ask(reads: &mut Reads, buffer: u8, from: u64, length: u32, to: u64) -> Pieces {
        let count = reads.queue_pieces(buffer, from, length, to);
        Pieces { length, count, landed: 0, summed: 0, crc: 0 }
    }

    /// One more piece has arrived, of that many bytes.
    pub(super) fn land(&mut self, piece: u8) -> u64 {
        self.landed |= 1 << piece;
        u64::from((self.length - u32::from(piece) * READ_BYTES).min(READ_BYTES))
    }

    /// Whether all pieces have arrived.
    pub(super) fn are_here(&self) -> bool {
        self.landed.count_ones() == u32::from(self.count)
    }

    /// Continues the CRC over all pieces that are here without a gap; the first byte of the first piece is at `at`.
    pub(super) fn sum(&mut self, sink: &Memory, at: u64) -> Result<(), Error> {
        while self.summed < self.count && self.landed >> self.summed & 1 == 1 {
            let start = u64::from(self.summed) * u64::from(READ_BYTES);
            let end = (start + u64::from(READ_BYTES)).min(u64::from(self.length));
            self.crc = sink.crc32c_append(self.crc, at + start..at + end)?;
            self.summed += 1;
        }
        Ok(())
    }

    /// The CRC-32C of the pieces summed so far.
    pub(super) fn crc(&self) -> u32 {
        self.crc
    }
}
