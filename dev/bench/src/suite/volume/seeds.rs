//! The measurement to stand beside: CubeFS over RDMA and over TCP, by ConnectX-5, three copies.
//!
//! ```text
//! fio --directory=MOUNT --direct=1 -iodepth 1 --thread --rw=read --ioengine=libaio --bs=4k --size=500M --numjobs=32
//!     -group_reporting -name=testfile10
//! ```
//!
//! MB/s, as they were published, for each block size in order. `None`: not published.

use super::cases::{Cell, Pattern};

/// MB/s by RDMA, by TCP.
type Pair = Option<(f64, f64)>;

/// Past the page cache or not, threads, what was done, and the four block sizes.
type Row = (bool, u32, Pattern, [Pair; 4]);

/// What they reached in this cell, by RDMA and by TCP.
pub fn of(cell: &Cell) -> Pair {
    let column = BLOCKS_KIB.iter().position(|kib| kib << 10 == cell.block)?;
    let is_it = |row: &&Row| (row.0, row.1, row.2) == (cell.direct, cell.jobs, cell.pattern);
    TABLE.iter().find(is_it)?.3[column]
}

/// Their block sizes.
pub const BLOCKS_KIB: [u64; 4] = [4, 64, 128, 1024];

const TABLE: [Row; 16] = {
    use Pattern::{Randread, Randwrite, Read, Write};
    const fn both(rdma: f64, tcp: f64) -> Pair {
        Some((rdma, tcp))
    }
    [
        (true, 1, Write, [both(16.5, 15.3), None, both(202.0, 140.0), both(153.0, 136.0)]),
        (true, 1, Randwrite, [both(4.67, 4.53), None, both(116.0, 123.0), both(156.0, 153.0)]),
        (true, 32, Write, [both(216.0, 173.0), both(1548.0, 1592.0), both(2469.0, 2449.0), both(2611.0, 2432.0)]),
        (true, 32, Randwrite, [both(97.2, 102.0), both(1054.0, 982.0), both(1818.0, 1939.0), both(2449.0, 2004.0)]),
        (true, 1, Read, [both(35.8, 29.5), None, both(519.0, 395.0), both(581.0, 396.0)]),
        (true, 1, Randread, [both(32.8, 28.5), None, both(504.0, 406.0), both(542.0, 404.0)]),
        (true, 32, Read, [both(595.0, 604.0), both(4048.0, 3108.0), both(3808.0, 2815.0), both(3394.0, 2820.0)]),
        (true, 32, Randread, [both(526.0, 591.0), both(3029.0, 3099.0), both(3421.0, 3784.0), both(3678.0, 3697.0)]),
        (false, 1, Write, [both(74.1, 88.9), None, both(618.0, 841.0), both(567.0, 1000.0)]),
        (false, 1, Randwrite, [both(16.2, 14.3), None, None, both(144.0, 127.0)]),
        (false, 32, Write, [both(675.0, 956.0), None, both(1444.0, 3068.0), both(1289.0, 3072.0)]),
        (false, 32, Randwrite, [both(271.0, 251.0), None, None, both(1133.0, 1148.0)]),
        (false, 1, Read, [both(1039.0, 889.0), None, both(1387.0, 915.0), both(1263.0, 899.0)]),
        (false, 1, Randread, [both(37.1, 29.2), None, None, both(435.0, 332.0)]),
        (false, 32, Read, [both(2601.0, 2592.0), None, both(2971.0, 2446.0), both(2827.0, 2566.0)]),
        (false, 32, Randread, [both(346.0, 283.0), None, None, both(2985.0, 2362.0)]),
    ]
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cell_has_what_was_published_of_it() {
        let cell = Cell { direct: true, pattern: Pattern::Read, block: 128 << 10, jobs: 1 };
        assert_eq!(of(&cell), Some((519.0, 395.0)));
        assert_eq!(of(&Cell { block: 64 << 10, ..cell }), None);
        assert_eq!(of(&Cell { jobs: 8, ..cell }), None);
    }
}
