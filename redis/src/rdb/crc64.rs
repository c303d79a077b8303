//! CRC-64/Jones, the checksum at the end of a snapshot. Reflected; starts with 0; no final inversion.

/// The polynomial 0xad93d23594c935a9 with its bits reversed, as a reflected CRC needs it.
const POLYNOMIAL: u64 = 0x95ac_9329_ac4b_c9b5;

/// Bytes processed in one step. Eight tables take 16 KiB: half of a first-level cache, which the data needs too.
const STEP: usize = 8;

/// `TABLES[k][b]` is the CRC of the byte `b` followed by `k` zero bytes.
static TABLES: [[u64; 256]; STEP] = tables();

/// The checksum of `bytes`, continued from `seed`: 0 at the beginning, else the checksum of the bytes before.
///
/// ```
/// assert_eq!(remora_redis::rdb::crc64(0, b"123456789"), 0xe9c6_d914_c4b8_d9ca);
/// ```
pub fn crc64(seed: u64, bytes: &[u8]) -> u64 {
    let (steps, rest) = bytes.as_chunks::<STEP>();
    let crc = steps.iter().fold(seed, |crc, step| eight(crc ^ u64::from_le_bytes(*step)));
    rest.iter().fold(crc, |crc, byte| (crc >> 8) ^ TABLES[0][low(crc ^ u64::from(*byte))])
}

/// Eight bytes at once: each is looked up in the table of its distance from the end, and no look-up waits for another.
fn eight(word: u64) -> u64 {
    TABLES[7][low(word)]
        ^ TABLES[6][low(word >> 8)]
        ^ TABLES[5][low(word >> 16)]
        ^ TABLES[4][low(word >> 24)]
        ^ TABLES[3][low(word >> 32)]
        ^ TABLES[2][low(word >> 40)]
        ^ TABLES[1][low(word >> 48)]
        ^ TABLES[0][low(word >> 56)]
}

/// The lowest byte, as an index that is always inside a table of 256.
fn low(word: u64) -> usize {
    (word & 0xFF) as usize
}

const fn tables() -> [[u64; 256]; STEP] {
    let mut tables = [[0; 256]; STEP];
    let mut byte = 0;
    while byte < 256 {
        let mut crc = byte as u64;
        let mut bit = 0;
        while bit < 8 {
            crc = (crc >> 1) ^ (if crc & 1 == 1 { POLYNOMIAL } else { 0 });
            bit += 1;
        }
        tables[0][byte] = crc;
        byte += 1;
    }
    let mut distance = 1;
    while distance < STEP {
        let mut byte = 0;
        while byte < 256 {
            let nearer = tables[distance - 1][byte];
            tables[distance][byte] = (nearer >> 8) ^ tables[0][(nearer & 0xFF) as usize];
            byte += 1;
        }
        distance += 1;
    }
    tables
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The definition, bit by bit.
    fn slow(seed: u64, bytes: &[u8]) -> u64 {
        bytes.iter().fold(seed, |crc, byte| {
            (0..8).fold(crc ^ u64::from(*byte), |crc, _| (crc >> 1) ^ if crc & 1 == 1 { POLYNOMIAL } else { 0 })
        })
    }

    #[test]
    fn the_check_value_of_the_servers_is_met() {
        assert_eq!(crc64(0, b"123456789"), 0xe9c6_d914_c4b8_d9ca);
        assert_eq!(crc64(0, b""), 0);
    }

    proptest! {
        #[test]
        fn it_equals_the_definition_and_can_be_continued_anywhere(bytes in proptest::collection::vec(any::<u8>(), 0..200), cut in 0_usize..200) {
            let cut = cut.min(bytes.len());
            prop_assert_eq!(crc64(0, &bytes), slow(0, &bytes));
            prop_assert_eq!(crc64(crc64(0, &bytes[..cut]), &bytes[cut..]), crc64(0, &bytes));
        }
    }
}
