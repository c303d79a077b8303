//! CRC-32C, of slices and of shared bytes: the only implementation in the workspace.
//!
//! A checksum function takes a slice, and shared memory has no slices. Shared bytes are therefore copied out first, a
//! piece at a time, and the sum is taken while the piece is in the cache. That is as fast as summing them in place with
//! the processor's CRC instruction and needs no unsafe code.

// Stands alone: the two doors, of private and of shared bytes, take their sums from one place.

use crc_fast::{CrcAlgorithm, Digest};

use crate::mapping::Span;

/// CRC-32C of `bytes`.
#[inline]
pub fn crc32c(bytes: &[u8]) -> u32 {
    // The result has 32 bits.
    crc_fast::checksum(ALGORITHM, bytes) as u32
}

/// CRC-32C of the bytes whose checksum is `crc`, followed by `bytes`.
#[inline]
pub fn crc32c_append(crc: u32, bytes: &[u8]) -> u32 {
    // The state between two pieces is the checksum before its final inversion.
    let mut digest = Digest::new_with_init_state(ALGORITHM, u64::from(!crc));
    digest.update(bytes);
    digest.finalize() as u32
}

/// CRC-32C of the bytes whose checksum is `crc`, followed by those of `span`.
pub(crate) fn crc32c_span(crc: u32, span: Span<'_>) -> u32 {
    // Clearing a large buffer costs more than the sum of a small span.
    if span.length() <= SMALL_BYTES {
        in_pieces::<SMALL_BYTES>(crc, span)
    } else if span.length() <= MEDIUM_BYTES {
        in_pieces::<MEDIUM_BYTES>(crc, span)
    } else {
        in_pieces::<LARGE_BYTES>(crc, span)
    }
}

fn in_pieces<const N: usize>(crc: u32, mut span: Span<'_>) -> u32 {
    let mut digest = Digest::new_with_init_state(ALGORITHM, u64::from(!crc));
    let mut buffer = [0; N];
    while span.length() > 0 {
        let (now, rest) = span.split(N);
        let (piece, _) = buffer.split_at_mut(now.length());
        now.copy_out(piece);
        digest.update(piece);
        span = rest;
    }
    digest.finalize() as u32
}

/// The Castagnoli polynomial, which iSCSI uses.
const ALGORITHM: CrcAlgorithm = CrcAlgorithm::Crc32Iscsi;

/// Bytes copied to the stack at a time. The largest piece and its source stay in a first-level cache of 32 KiB.
const SMALL_BYTES: usize = 512;
const MEDIUM_BYTES: usize = 4 << 10;
const LARGE_BYTES: usize = 16 << 10;

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use proptest::prelude::*;

    use super::*;
    use crate::{Memory, Pages};

    /// The definition: one bit at a time.
    fn by_bits(crc: u32, bytes: &[u8]) -> u32 {
        !bytes.iter().fold(!crc, |state, byte| {
            (0..8).fold(state ^ u32::from(*byte), |state, _| (state >> 1) ^ (0x82F6_3B78 * (state & 1)))
        })
    }

    proptest! {
        #[test]
        fn sums_are_those_of_the_definition(crc: u32, bytes in prop::collection::vec(any::<u8>(), 0..2000), cut: prop::sample::Index) {
            prop_assert_eq!(crc32c(&bytes), by_bits(0, &bytes));
            prop_assert_eq!(crc32c_append(crc, &bytes), by_bits(crc, &bytes));
            let (first, second) = bytes.split_at(cut.index(bytes.len() + 1));
            prop_assert_eq!(crc32c_append(crc32c(first), second), crc32c(&bytes), "in two pieces");
        }
    }

    #[test]
    fn the_check_value_is_that_of_the_standard() {
        assert_eq!(crc32c(b"123456789"), 0xE306_9283);
        assert_eq!(crc32c(b""), 0);
    }

    #[test]
    fn a_sum_over_a_span_is_the_sum_over_the_bytes_wherever_they_begin_and_end() {
        let size = 500_000;
        let memory = Memory::create("remora-test", size, Pages::Small).unwrap();
        let bytes: Vec<u8> = (0..size).map(|at| ((at * 2_654_435_761) >> 13) as u8).collect();
        memory.write(0, &bytes).unwrap();
        for (start, end) in [(0, size), (1, size), (7, 3 * 65_536 + 7), (8, 3 * 65_536 + 7), (3, 400_001), (9, 9)] {
            let truth = by_bits(77, &bytes[start as usize..end as usize]);
            assert_eq!(memory.crc32c_append(77, start..end).unwrap(), truth, "{start}..{end}");
        }
        for length in [511, 512, 513, 4095, 4096, 4097, 16_383, 16_384, 16_385] {
            let truth = by_bits(77, &bytes[3..3 + length]);
            assert_eq!(memory.crc32c_append(77, 3..3 + length as u64).unwrap(), truth, "{length} bytes");
        }
    }
}
