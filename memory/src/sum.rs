//! CRC-32C of shared bytes, where they lie.
//!
//! The checksum's library takes a slice, and there are no slices of shared memory; copying it out first, a few kilobytes at a
//! time, costs as much again as the sum itself. On x86-64 the sum is therefore taken by the processor's instruction straight from
//! the mapping, over three lanes at once, since one instruction takes three cycles but a new one can begin in each:
//!
//! ```text
//!   │ lane 0, LANE_BYTES │ lane 1, LANE_BYTES │ lane 2, LANE_BYTES │  again …  │ rest: copied out │
//!     crc0 = step(crc0)    crc1 = step(crc1)    crc2 = step(crc2)    one after another, eight bytes each
//!     └──── behind_a_lane(behind_a_lane(crc0) ^ crc1) ^ crc2: sums are linear, so it takes four look-ups ────┘
//! ```

#[cfg(target_arch = "x86_64")]
use std::sync::LazyLock;

use crate::mapping::Span;

/// Bytes of a lane. Three of them stay in a second-level cache.
#[cfg(target_arch = "x86_64")]
const LANE_BYTES: usize = 64 << 10;

/// Bytes copied to the stack at a time: with the source's lines they stay in a first-level cache of 32 KiB.
const COPY_BYTES: usize = 4096;

/// CRC-32C of what `crc` stands for followed by the span.
pub(crate) fn crc32c_append(crc: u32, span: Span<'_>) -> u32 {
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("sse4.2") {
        return by_lanes(crc, span);
    }
    by_copies(crc, span)
}

fn by_copies(mut crc: u32, mut span: Span<'_>) -> u32 {
    let mut buffer = [0; COPY_BYTES];
    while span.length() > 0 {
        let (now, rest) = span.split(COPY_BYTES);
        let (chunk, _) = buffer.split_at_mut(now.length());
        now.copy_out(chunk);
        crc = crc32c::crc32c_append(crc, chunk);
        span = rest;
    }
    crc
}

#[cfg(target_arch = "x86_64")]
fn by_lanes(mut crc: u32, mut span: Span<'_>) -> u32 {
    while span.length() >= 3 * LANE_BYTES {
        let (lanes, rest) = span.split(3 * LANE_BYTES);
        // The instruction works on the inverted sum.
        let [first, second, third] = lanes.sum_three_lanes([!crc, 0, 0]);
        crc = !(behind_a_lane(behind_a_lane(first) ^ second) ^ third);
        span = rest;
    }
    by_copies(crc, span)
}

/// What a sum becomes when a lane of zeros follows.
#[cfg(target_arch = "x86_64")]
fn behind_a_lane(sum: u32) -> u32 {
    static SHIFTED: LazyLock<[[u32; 256]; 4]> = LazyLock::new(shifted);
    let [a, b, c, d] = sum.to_le_bytes().map(usize::from);
    SHIFTED[0][a] ^ SHIFTED[1][b] ^ SHIFTED[2][c] ^ SHIFTED[3][d]
}

/// For each byte of a sum at each of its places, what it becomes. Made from the library's answers for the single bits, which are all
/// that a linear function has.
#[cfg(target_arch = "x86_64")]
fn shifted() -> [[u32; 256]; 4] {
    let of_bit: [u32; 32] = std::array::from_fn(|bit| crc32c::crc32c_combine(1 << bit, 0, LANE_BYTES));
    let of_byte = |place: usize, byte: usize| {
        let bits = (0..8).filter(|bit| byte >> bit & 1 == 1);
        bits.fold(0, |sum, bit| sum ^ of_bit[8 * place + bit])
    };
    std::array::from_fn(|place| std::array::from_fn(|byte| of_byte(place, byte)))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use crate::{Memory, Pages};

    #[test]
    fn a_sum_over_lanes_is_the_sum_over_the_bytes_wherever_they_begin_and_end() {
        let size = 500_000;
        let memory = Memory::create("remora-test", size, Pages::Small).unwrap();
        let bytes: Vec<u8> = (0..size).map(|at| ((at * 2_654_435_761) >> 13) as u8).collect();
        memory.write(0, &bytes).unwrap();
        for (start, end) in [(0, size), (1, size), (7, 3 * 65_536 + 7), (8, 3 * 65_536 + 7), (3, 400_001), (9, 9)] {
            let truth = crc32c::crc32c_append(77, &bytes[start as usize..end as usize]);
            assert_eq!(memory.crc32c_append(77, start..end).unwrap(), truth, "{start}..{end}");
        }
    }
}
