//! Builds small snapshots. Not a saver: strings only, nothing compressed, everything in memory.

use super::{FIRST_VALKEY_VERSION, OPCODE_AUX, OPCODE_EOF, OPCODE_EXPIRETIME_MS, OPCODE_SELECTDB};

/// The type byte of a plain string value.
const TYPE_STRING: u8 = 0;

/// Builds a snapshot step by step.
///
/// ```
/// use remora_redis::rdb::{Head, Writer};
/// let mut writer = Writer::new(11);
/// writer.aux("repl-offset", "7").select_db(0).string("key", "value", None);
/// let snapshot = writer.finish();
/// let (head, _) = Head::parse(&snapshot)?.expect("the snapshot is whole");
/// assert_eq!(head.offset(), Some(7));
/// # Ok::<(), remora_redis::rdb::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Writer {
    bytes: Vec<u8>,
}

impl Writer {
    /// Begins a snapshot with this version of the format; from 80 on it has Valkey's magic.
    ///
    /// # Panics
    /// If the version has more than the three digits that Valkey's magic has room for.
    pub fn new(version: u32) -> Writer {
        let magic = magic(version);
        assert!(magic.is_some(), "no snapshot has version {version}");
        Writer { bytes: magic.unwrap_or_default().into_bytes() }
    }

    /// Adds an auxiliary field. Fields must come before the first database.
    pub fn aux(&mut self, name: impl AsRef<[u8]>, value: impl AsRef<[u8]>) -> &mut Writer {
        self.bytes.push(OPCODE_AUX);
        self.put_string(name.as_ref());
        self.put_string(value.as_ref());
        self
    }

    /// The keys that follow belong to this database.
    pub fn select_db(&mut self, number: u32) -> &mut Writer {
        self.bytes.push(OPCODE_SELECTDB);
        self.put_length(number.into());
        self
    }

    /// Adds a string; `expire_ms` is in milliseconds since 1970.
    pub fn string(&mut self, key: impl AsRef<[u8]>, value: impl AsRef<[u8]>, expire_ms: Option<u64>) -> &mut Writer {
        if let Some(expire_ms) = expire_ms {
            self.bytes.push(OPCODE_EXPIRETIME_MS);
            self.bytes.extend_from_slice(&expire_ms.to_le_bytes());
        }
        self.bytes.push(TYPE_STRING);
        self.put_string(key.as_ref());
        self.put_string(value.as_ref());
        self
    }

    /// Ends the snapshot with its checksum.
    pub fn finish(mut self) -> Vec<u8> {
        self.bytes.push(OPCODE_EOF);
        let checksum = crc64(0, &self.bytes);
        self.bytes.extend_from_slice(&checksum.to_le_bytes());
        self.bytes
    }

    fn put_string(&mut self, string: &[u8]) {
        self.put_length(string.len() as u64);
        self.bytes.extend_from_slice(string);
    }

    fn put_length(&mut self, length: u64) {
        put_length(&mut self.bytes, length);
    }
}

/// Appends a length, or the number of a database, in the shortest encoding, as servers do.
pub fn put_length(out: &mut Vec<u8>, length: u64) {
    let low = length.to_be_bytes();
    match length {
        0..0x40 => out.push(low[7]),
        0x40..0x4000 => out.extend_from_slice(&[0x40 | low[6], low[7]]),
        0x4000..=0xFFFF_FFFF => {
            out.push(0x80);
            out.extend_from_slice(&low[4..]);
        }
        _ => {
            out.push(0x81);
            out.extend_from_slice(&low);
        }
    }
}

/// The nine bytes at the beginning of a snapshot of this version; from 80 on with Valkey's magic. `None` if the version
/// has more than the three digits that Valkey's magic has room for.
pub fn magic(version: u32) -> Option<String> {
    match version {
        1000.. => None,
        FIRST_VALKEY_VERSION.. => Some(format!("VALKEY{version:03}")),
        _ => Some(format!("REDIS{version:04}")),
    }
}

// CRC-64/Jones, the checksum at the end of a snapshot. Reflected; starts with 0; no final inversion.

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
    use proptest::prelude::*;

    use super::super::{TAIL_BYTES, Tail};
    use super::*;

    #[test]
    fn a_snapshot_is_written_byte_for_byte() {
        let mut writer = Writer::new(11);
        writer.aux("a", "b").select_db(3).string("k", "v", Some(1));
        let bytes = writer.finish();
        let (body, tail) = bytes.split_at(bytes.len() - TAIL_BYTES + 1);
        assert_eq!(body, b"REDIS0011\xFA\x01a\x01b\xFE\x03\xFC\x01\0\0\0\0\0\0\0\0\x01k\x01v\xFF");
        assert_eq!(tail, crc64(0, body).to_le_bytes());
    }

    #[test]
    fn the_checksum_is_that_of_everything_before_it() {
        for version in [9, 11, 80] {
            let bytes = Writer::new(version).finish();
            let (body, _) = bytes.split_at(bytes.len() - 8);
            let tail = bytes.last_chunk().map(|tail| Tail::parse(*tail));
            assert_eq!(tail, Some(Ok(Tail { checksum: crc64(0, body) })));
        }
    }

    #[test]
    fn each_length_takes_the_shortest_form() {
        let form = |length: u64| {
            let mut writer = Writer { bytes: Vec::new() };
            writer.put_length(length);
            writer.bytes
        };
        assert_eq!(form(63), [63]);
        assert_eq!(form(64), [0x40, 64]);
        assert_eq!(form(16_383), [0x7F, 0xFF]);
        assert_eq!(form(16_384), [0x80, 0, 0, 0x40, 0]);
        assert_eq!(form(1 << 32), [0x81, 0, 0, 0, 1, 0, 0, 0, 0]);
    }

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
