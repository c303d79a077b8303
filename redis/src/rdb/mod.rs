//! The envelope of a snapshot, and the boundaries of the records in it. Values are decoded only to be given to a server
//! that does not know their type.
//!
//! ```text
//!   ┌───────────┬───────────────────────────┬──────────────────────────────────────┬────┬──────────────┐
//!   │ REDIS0011 │ FA name value  FA name …  │ functions, module fields, databases, │ FF │ CRC-64, low  │
//!   │ VALKEY080 │ redis-ver repl-id ctime … │ keys …                               │    │ byte first   │
//!   └───────────┴───────────────────────────┴──────────────────────────────────────┴────┴──────────────┘
//!    9 bytes      Head::parse ends here ──▶  passed on unseen                        Tail::parse, 9 bytes
//! ```
//!
//! - [`Head`]: the server that wrote the snapshot, and the history and offset it belongs to.
//! - [`Tail`]: whether the snapshot is complete.
//! - [`Scanner`]: walks over the records and points at the long strings among them.
//! - [`Records`]: small values that follow each other, read in place. [`Collection`]: one of them that is not a string.
//! - [`mod@reference`]: how a server is given such a string without its bytes.
//! - [`Converter`]: rewrites a snapshot for a server of another family or an older version.
//! - [`crc64`]: the checksum that the servers use.
//! - [`Writer`]: small snapshots of our own: an empty data set, or a few strings for tests.

mod convert;
mod records;
pub mod reference;
mod scan;

use crate::info::{self, ReplId};

pub use convert::{ConvertError, Converted, Converter, Format, Obstacle, Obstacles, Options, SAMPLE_KEYS};
pub use records::{
    COLLECTION_TYPES, Collection, CollectionError, Content, RECORD_HEAD_BYTES_MAX, RECORD_KEY_BYTES_MAX, Record,
    Records, Usage, Value,
};
pub use scan::{Found, Run, ScanError, Scanner, Text};

/// Slot and number of keys that follow: a hint for cluster mode.
pub const OPCODE_SLOT_INFO: u8 = 0xF4;
/// The source code of a function library follows.
pub const OPCODE_FUNCTION: u8 = 0xF5;
/// Module data outside the keyspace follows.
pub const OPCODE_MODULE_AUX: u8 = 0xF7;
/// The idle time of the next key in seconds follows.
pub const OPCODE_IDLE: u8 = 0xF8;
/// A logarithmic counter of the next key's uses follows.
pub const OPCODE_FREQ: u8 = 0xF9;
/// An auxiliary field follows: a name and a value.
pub const OPCODE_AUX: u8 = 0xFA;
/// Size hints for the database's tables follow.
pub const OPCODE_RESIZEDB: u8 = 0xFB;
/// The next key's expiry, in milliseconds since 1970, follows.
pub const OPCODE_EXPIRETIME_MS: u8 = 0xFC;
/// The next key's expiry, in seconds since 1970, follows. Written before Redis 2.6 only.
pub const OPCODE_EXPIRETIME: u8 = 0xFD;
/// The number of the database that the next keys belong to follows.
pub const OPCODE_SELECTDB: u8 = 0xFE;
/// The end; the checksum follows.
pub const OPCODE_EOF: u8 = 0xFF;

/// How many bytes follow the last key: [`OPCODE_EOF`] and the checksum.
pub const TAIL_BYTES: usize = 9;

/// The first RDB version that Valkey writes with its own magic. Redis numbers its versions from 12 on below it.
const FIRST_VALKEY_VERSION: u32 = 80;

/// The end of a snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tail {
    /// CRC-64 of everything before it; 0 if the server is configured not to compute it (`rdbchecksum no`, or over TLS).
    pub checksum: u64,
}

impl Tail {
    /// Parses the last nine bytes.
    pub fn parse(bytes: [u8; TAIL_BYTES]) -> Result<Tail, Error> {
        let [OPCODE_EOF, checksum @ ..] = bytes else {
            return Err(Error::NoEnd { found: bytes[0] });
        };
        Ok(Tail { checksum: u64::from_le_bytes(checksum) })
    }
}

/// The bytes are not a snapshot, or the snapshot is damaged.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The first bytes are not those of a snapshot.
    #[error("not a snapshot: it begins with {found:?} instead of REDIS or VALKEY and a version")]
    NotRdb {
        /// The first bytes.
        found: String,
    },
    /// Something is longer than any server writes it.
    #[error("the snapshot is damaged: {what} of {size}, the limit is {limit}")]
    TooLong {
        /// Which part.
        what: &'static str,
        /// Its size in bytes (or fields).
        size: u64,
        /// The limit.
        limit: u64,
    },
    /// A field can't be read.
    #[error("the snapshot is damaged: {what}")]
    Malformed {
        /// Which part, and what is wrong with it.
        what: &'static str,
    },
    /// The end mark is missing.
    #[error("the snapshot is cut off or damaged: its end mark reads {found:#04x}, not 0xff")]
    NoEnd {
        /// The byte found in place of the end mark.
        found: u8,
    },
}

// The head of a snapshot: magic, version, auxiliary fields.

/// Maximum number of auxiliary fields. Servers write about ten.
const FIELDS_MAX: usize = 64;

/// `REDIS0011` and `VALKEY080` are both nine bytes.
const MAGIC_BYTES: usize = 9;

/// Before Redis 7 the script cache is saved as fields of this name, of any size and number, after the last key; without
/// keys, that is directly after the head. These fields therefore count as content.
const SCRIPT_FIELD: &[u8] = b"lua";

/// The format family.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Magic {
    /// `REDIS` and four digits: all versions of Redis, Valkey before 9, and Valkey 9 towards older replicas.
    Redis,
    /// `VALKEY` and three digits: Valkey from 9 on.
    Valkey,
}

/// What a snapshot contains before its first key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Head {
    /// The format family.
    pub magic: Magic,
    /// Version of the format: 9 is Redis 5 and 6, 10 is 7.0, 11 is 7.2 and Valkey 7.2 to 8, from 12 on Redis 7.4 and
    /// later, from 80 on Valkey 9 and later.
    pub version: u32,
    /// Names and values, in their order. Numbers are converted to text.
    pub aux: Vec<(Vec<u8>, Vec<u8>)>,
}

impl Head {
    /// Maximum size of a head, in bytes: a reader that has collected this much can give up. It is the sum of the magic
    /// and of `FIELDS_MAX` fields with an opcode and two strings, each with a length of at most 9 + 9 + 1 bytes before
    /// it.
    pub const BYTES_MAX: usize = MAGIC_BYTES + FIELDS_MAX * (1 + 2 * (19 + STRING_BYTES_MAX));

    /// Parses the head at the beginning of a snapshot, and returns its length in bytes. `None` if more bytes are
    /// needed: the end of the head shows only in the byte after it.
    pub fn parse(bytes: &[u8]) -> Result<Option<(Head, usize)>, Error> {
        let mut input = Input { bytes, position: 0 };
        match Head::read(&mut input) {
            Ok(head) => Ok(Some((head, input.position))),
            Err(Stop::Incomplete) => Ok(None),
            Err(Stop::Broken(error)) => Err(error),
        }
    }

    /// The value of a field.
    pub fn get(&self, name: &str) -> Option<&[u8]> {
        let (_, value) = self.aux.iter().find(|(found, _)| found == name.as_bytes())?;
        Some(value)
    }

    /// The history the snapshot belongs to (`repl-id`).
    pub fn replid(&self) -> Option<ReplId> {
        ReplId::parse(self.get("repl-id")?).ok()
    }

    /// The last byte of the stream that the snapshot contains (`repl-offset`).
    pub fn offset(&self) -> Option<u64> {
        info::decimal_u64(self.get("repl-offset")?)
    }

    /// The database that the stream after the snapshot writes to until it selects one (`repl-stream-db`).
    pub fn stream_db(&self) -> Option<u32> {
        info::decimal_u64(self.get("repl-stream-db")?)?.try_into().ok()
    }

    fn read(input: &mut Input<'_>) -> Result<Head, Stop> {
        let (magic, version) = read_magic(input)?;
        let mut aux = Vec::new();
        while input.peek()? == OPCODE_AUX {
            let field = input.position;
            input.take(1)?;
            let name = input.string("the name of a field")?;
            if name == SCRIPT_FIELD {
                input.position = field;
                break;
            }
            if aux.len() == FIELDS_MAX {
                return Err(too_long("fields", aux.len() as u64 + 1, FIELDS_MAX));
            }
            aux.push((name, input.string("the value of a field")?));
        }
        Ok(Head { magic, version, aux })
    }
}

fn read_magic(input: &mut Input<'_>) -> Result<(Magic, u32), Stop> {
    let rest = input.rest();
    let not_rdb = || Stop::Broken(Error::NotRdb { found: info::excerpt(rest.get(..MAGIC_BYTES).unwrap_or(rest)) });
    // A few bytes are enough to see that it is not a snapshot.
    let could_be = |magic: &[u8]| magic.iter().zip(rest).all(|(wanted, found)| wanted == found);
    if !could_be(b"REDIS") && !could_be(b"VALKEY") {
        return Err(not_rdb());
    }
    let bytes = input.take(MAGIC_BYTES)?;
    let (magic, digits) = match (bytes.strip_prefix(b"REDIS"), bytes.strip_prefix(b"VALKEY")) {
        (Some(digits), _) => (Magic::Redis, digits),
        (_, Some(digits)) => (Magic::Valkey, digits),
        _ => return Err(not_rdb()),
    };
    let version = info::decimal_u64(digits).and_then(|version| u32::try_from(version).ok());
    let version = version.ok_or_else(not_rdb)?;
    let fits = magic == Magic::Redis || version >= FIRST_VALKEY_VERSION;
    if fits { Ok((magic, version)) } else { Err(not_rdb()) }
}

// Builds small snapshots. Not a saver: strings only, nothing compressed, everything in memory.

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

// A forward reader over the bytes of a snapshot that have arrived: lengths and strings in all their encodings. Not a
// buffer: the caller keeps the bytes and tries again with more of them.

/// Longest string that is read instead of skipped, in bytes: names and values of fields, keys. The longest that servers
/// write in a field is the replid with its 40 bytes; a key may be longer, and is then not examined.
const STRING_BYTES_MAX: usize = 4 * 1024;

/// The bytes that are left to read.
struct Input<'a> {
    bytes: &'a [u8],
    position: usize,
}

/// Why reading stopped.
enum Stop {
    Incomplete,
    Broken(Error),
}

/// A length, or what may take its place.
enum Length {
    Plain(u64),
    /// The encoding of a string instead of a length.
    Special(u8),
}

impl<'a> Input<'a> {
    fn rest(&self) -> &'a [u8] {
        self.bytes.get(self.position..).unwrap_or_default()
    }

    fn peek(&self) -> Result<u8, Stop> {
        self.rest().first().copied().ok_or(Stop::Incomplete)
    }

    fn take(&mut self, count: usize) -> Result<&'a [u8], Stop> {
        let taken = self.rest().get(..count).ok_or(Stop::Incomplete)?;
        self.position += count;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], Stop> {
        let taken = self.rest().first_chunk::<N>().ok_or(Stop::Incomplete)?;
        self.position += N;
        Ok(*taken)
    }

    /// Two bits tell how to read the rest: 6 bits, 14 bits, 32 or 64 bits with the high byte first, or a special
    /// encoding.
    fn length(&mut self) -> Result<Length, Stop> {
        let [first] = self.array()?;
        let low = first & 0x3F;
        match (first >> 6, first) {
            (0, _) => Ok(Length::Plain(low.into())),
            (1, _) => {
                let [second] = self.array()?;
                Ok(Length::Plain(u16::from_be_bytes([low, second]).into()))
            }
            (2, 0x80) => Ok(Length::Plain(u32::from_be_bytes(self.array()?).into())),
            (2, 0x81) => Ok(Length::Plain(u64::from_be_bytes(self.array()?))),
            (2, _) => Err(malformed("a length of an unknown encoding")),
            _ => Ok(Length::Special(low)),
        }
    }

    /// A length where nothing else is allowed.
    fn number(&mut self) -> Result<u64, Stop> {
        match self.length()? {
            Length::Plain(number) => Ok(number),
            Length::Special(_) => Err(malformed("an encoding in place of a length")),
        }
    }

    /// A string: a length and bytes, a number, or compressed bytes.
    fn string(&mut self, what: &'static str) -> Result<Vec<u8>, Stop> {
        match self.length()? {
            Length::Plain(length) => Ok(self.take(bounded(what, length)?)?.to_vec()),
            Length::Special(0) => Ok(i8::from_le_bytes(self.array()?).to_string().into_bytes()),
            Length::Special(1) => Ok(i16::from_le_bytes(self.array()?).to_string().into_bytes()),
            Length::Special(2) => Ok(i32::from_le_bytes(self.array()?).to_string().into_bytes()),
            Length::Special(3) => self.compressed(what),
            Length::Special(_) => Err(malformed("a string of an unknown encoding")),
        }
    }

    fn compressed(&mut self, what: &'static str) -> Result<Vec<u8>, Stop> {
        let (Length::Plain(packed), Length::Plain(length)) = (self.length()?, self.length()?) else {
            return Err(malformed("a compressed string without its lengths"));
        };
        let (packed, length) = (bounded(what, packed)?, bounded(what, length)?);
        expand_lzf(self.take(packed)?, length).ok_or_else(|| malformed("a compressed string that does not expand"))
    }

    /// The beginning of a string that is skipped: how many bytes follow.
    fn string_to_skip(&mut self) -> Result<u64, Stop> {
        match self.length()? {
            Length::Plain(length) => Ok(length),
            Length::Special(0) => Ok(1),
            Length::Special(1) => Ok(2),
            Length::Special(2) => Ok(4),
            Length::Special(3) => {
                let packed = self.number()?;
                self.number()?;
                Ok(packed)
            }
            Length::Special(_) => Err(malformed("a string of an unknown encoding")),
        }
    }
}

fn bounded(what: &'static str, length: u64) -> Result<usize, Stop> {
    match usize::try_from(length) {
        Ok(length) if length <= STRING_BYTES_MAX => Ok(length),
        _ => Err(too_long(what, length, STRING_BYTES_MAX)),
    }
}

fn too_long(what: &'static str, size: u64, limit: usize) -> Stop {
    Stop::Broken(Error::TooLong { what, size, limit: limit as u64 })
}

fn malformed(what: &'static str) -> Stop {
    Stop::Broken(Error::Malformed { what })
}

// LZF, the compression of strings in a snapshot. Only the short strings of the head are expanded here: servers
// compress a field of more than 20 bytes when that saves four, and a replid may contain repetitions.
//
// ```text
//   000nnnnn  literal…            n + 1 bytes as they are
//   lllooooo  oooooooo            l + 2 bytes from offset + 1 bytes back        (l from 1 to 6)
//   111ooooo  llllllll  oooooooo  l + 9 bytes from offset + 1 bytes back
// ```

/// Expands `packed` to exactly `length` bytes; `None` if it has another length. The caller bounds `length`.
fn expand_lzf(packed: &[u8], length: usize) -> Option<Vec<u8>> {
    let mut out: Vec<u8> = Vec::new();
    let mut rest = packed;
    while let Some((control, after)) = rest.split_first() {
        let control = usize::from(*control);
        if control < 32 {
            let (literal, after) = after.split_at_checked(control + 1)?;
            out.extend_from_slice(literal);
            rest = after;
        } else {
            let (run, after) = run_length(control >> 5, after)?;
            let (low, after) = after.split_first()?;
            let back = ((control & 0x1F) << 8) + usize::from(*low) + 1;
            copy_back(&mut out, back, run)?;
            rest = after;
        }
        if out.len() > length {
            return None;
        }
    }
    (out.len() == length).then_some(out)
}

fn run_length(short: usize, after: &[u8]) -> Option<(usize, &[u8])> {
    match short {
        7 => after.split_first().map(|(more, after)| (usize::from(*more) + 9, after)),
        _ => Some((short + 2, after)),
    }
}

/// Byte by byte: a run may overlap the bytes that it writes.
fn copy_back(out: &mut Vec<u8>, back: usize, run: usize) -> Option<()> {
    let from = out.len().checked_sub(back)?;
    for place in from..from + run {
        out.push(*out.get(place)?);
    }
    Some(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_tail_holds_the_checksum_low_byte_first() {
        assert_eq!(Tail::parse([0xFF, 1, 0, 0, 0, 0, 0, 0, 2]), Ok(Tail { checksum: 0x0200_0000_0000_0001 }));
        assert_eq!(Tail::parse([0xFE; TAIL_BYTES]), Err(Error::NoEnd { found: 0xFE }));
    }

    fn whole(bytes: &[u8]) -> (Head, usize) {
        Head::parse(bytes).unwrap().unwrap()
    }

    #[test]
    fn both_magics_and_their_versions_are_read() {
        for (bytes, magic, version) in [
            (b"REDIS0009\xFE", Magic::Redis, 9),
            (b"REDIS0012\xFF", Magic::Redis, 12),
            (b"VALKEY080\xF5", Magic::Valkey, 80),
        ] {
            assert_eq!(whole(bytes), (Head { magic, version, aux: vec![] }, MAGIC_BYTES));
        }
    }

    #[test]
    fn what_does_not_begin_like_a_snapshot_is_refused_at_once() {
        for wrong in [&b"PK"[..], b"REDIX", b"VALKEX", b"REDIS00x1", b"VALKEY011", b"REDIS+011", b"<html>"] {
            assert!(matches!(Head::parse(wrong), Err(Error::NotRdb { .. })), "{wrong:?}");
        }
        for short in [&b""[..], b"R", b"REDIS001", b"VALKEY08", b"REDIS0011"] {
            assert_eq!(Head::parse(short), Ok(None), "{short:?}");
        }
    }

    #[test]
    fn every_encoding_of_a_field_is_read() {
        let long = [b'v'; 100];
        let values: [(&[u8], &[u8]); 9] = [
            (b"\x03abc", b"abc"),
            (&[&[0x40, 100], &long[..]].concat(), &long),
            (&[&[0x80, 0, 0, 0, 100], &long[..]].concat(), &long),
            (&[&[0x81, 0, 0, 0, 0, 0, 0, 0, 100], &long[..]].concat(), &long),
            (&[0xC0, 0xFF], b"-1"),
            (&[0xC1, 0x00, 0x80], b"-32768"),
            (&[0xC2, 0xFF, 0xFF, 0xFF, 0x7F], b"2147483647"),
            (&[0xC3, 5, 40, 0, b'0', 7 << 5, 30, 0], &[b'0'; 40]),
            (b"\x00", b""),
        ];
        for (encoded, value) in values {
            let bytes = [b"REDIS0011\xFA\x01k", encoded, b"\xFF"].concat();
            let (head, length) = whole(&bytes);
            assert_eq!(head.get("k"), Some(value), "{encoded:?}");
            assert_eq!(length, bytes.len() - 1);
        }
    }

    #[test]
    fn damaged_fields_are_errors() {
        for field in [
            &[0xC4][..],              // no such encoding
            &[0x82],                  // no such length
            &[0xC3, 0xC0],            // a special encoding for a length
            &[0xC3, 2, 9, 1 << 5, 0], // a run from before the beginning
            &[0x50, 1],               // 4,097 bytes
            &[0x81, 255, 255, 255, 255, 255, 255, 255, 255],
            &[0xC3, 1, 0x80, 0xFF, 0xFF, 0xFF, 0xFF], // expands to 4 GiB
        ] {
            let bytes = [b"REDIS0011\xFA", field, &[0; 20]].concat();
            assert!(Head::parse(&bytes).is_err(), "{field:?}");
        }
        let endless = [&b"REDIS0011"[..], &b"\xFA\x01k\x01v".repeat(FIELDS_MAX + 1)].concat();
        assert!(matches!(Head::parse(&endless), Err(Error::TooLong { what: "fields", .. })));
    }

    #[test]
    fn the_place_in_the_stream_is_found() {
        let replid = "8c1c6b2f0d6a4e7b9a0f1e2d3c4b5a6978695a4b";
        let mut writer = Writer::new(11);
        writer.aux("repl-stream-db", "3").aux("repl-id", replid).aux("repl-offset", "307366");
        let (head, _) = whole(&writer.finish());
        assert_eq!(head.replid(), Some(replid.parse().unwrap()));
        assert_eq!((head.stream_db(), head.offset()), (Some(3), Some(307_366)));
        let (head, _) = whole(b"REDIS0011\xFA\x0erepl-stream-db\xC0\xFF\xFF");
        assert_eq!((head.replid(), head.stream_db(), head.offset()), (None, None, None));
    }

    #[test]
    fn scripts_of_an_empty_data_set_are_content_however_long() {
        let head = b"REDIS0009\xFA\x01k\x01v";
        let bytes = [&head[..], b"\xFA\x03lua\x80\x10\x00\x00\x00"].concat();
        assert_eq!(whole(&bytes).1, head.len());
    }

    proptest! {
        #[test]
        fn what_is_written_is_read_and_every_beginning_is_incomplete(
            fields in proptest::collection::vec((proptest::collection::vec(any::<u8>(), 4..30), proptest::collection::vec(any::<u8>(), 0..300)), 0..8),
            version in prop_oneof![1_u32..80, 80_u32..1000],
        ) {
            let mut writer = Writer::new(version);
            for (name, value) in &fields {
                writer.aux(name, value);
            }
            let bytes = writer.finish();
            let (head, length) = whole(&bytes);
            prop_assert_eq!(&head.aux, &fields);
            prop_assert_eq!(head.version, version);
            prop_assert_eq!(head.magic == Magic::Valkey, version >= 80);
            prop_assert_eq!(length, bytes.len() - super::TAIL_BYTES);
            for cut in 0..=length {
                prop_assert_eq!(Head::parse(&bytes[..cut]), Ok(None));
            }
        }
    }

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

    #[test]
    fn literals_and_runs_are_expanded() {
        assert_eq!(expand_lzf(&[2, b'a', b'b', b'c'], 3), Some(b"abc".to_vec()));
        // "ab", then 4 bytes from 2 back: a run that overlaps itself.
        assert_eq!(expand_lzf(&[1, b'a', b'b', 2 << 5, 1], 6), Some(b"ababab".to_vec()));
        // "0", then 39 bytes from 1 back: how servers compress a replid of zeros.
        assert_eq!(expand_lzf(&[0, b'0', 7 << 5, 30, 0], 40), Some(vec![b'0'; 40]));
    }

    #[test]
    fn damage_is_refused() {
        for (packed, length) in [
            (&[3, b'a'][..], 4),        // a literal cut off
            (&[1 << 5], 3),             // a run without its offset
            (&[7 << 5, 1], 10),         // a long run without its offset
            (&[0, b'a', 1 << 5, 1], 4), // a run from before the beginning
            (&[1, b'a', b'b'], 3),      // shorter than promised
            (&[1, b'a', b'b'], 1),      // longer than promised
        ] {
            assert_eq!(expand_lzf(packed, length), None, "{packed:?}");
        }
    }
}
