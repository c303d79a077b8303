//! The layout of a table's memory, and its encoding as bytes.
//!
//! Not here: the order in which the words are stored and loaded (`publish`), and the writers of the slots (`snapshot`,
//! `journal`). `table/README.md` has the same layout as a drawing.
//!
//! All numbers are little endian. Invariants of every table, at every moment:
//!
//! * slot `i` is at `data_offset + slot_size * (i mod slots)`, its entry at `4096 + 64 * (i mod slots)`;
//! * the head (the first 128 bytes) is written once, before any reader has access, and never changes;
//! * `retired <= published slots`, and both only grow;
//! * every slot `i` with `retired <= i < published slots` has an entry that names `i`;
//! * `published slots - retired <= slots`.
//!
//! There is no invariant for entries of slots that are not published, and none for the bytes of a slot outside its
//! content: memory is used for one table after the other and is not cleared in between. A reader looks at neither.
//!
//! Version 1 is a plain table, version 2 a sealed one: its slots and records are ciphertext (`seal`), and the checks
//! of its line and entries are MACs. Version 3 is a table, sealed or not, whose slots or records may be
//! compressed (`encoding`). The rest is the same.
//!
//! (The state [`State::Sealed`] is another thing: it says that a stream is complete.)
//!
//! Invariants of a complete snapshot besides: `end == published`, the lengths of its slots add up to `end`, and every
//! slot but the last is full.

use remora_fabric::memory::crc;
use remora_redis::ReplId;

use crate::encoding::is_worth;
use crate::error::Error;
use crate::identity::Origin;
pub use crate::identity::{Identity, Kind};
use crate::method::Method;
use crate::seal::{Algorithm, DIGEST_BYTES, Seal, SlotSeal, TAG_BYTES};

/// The first eight bytes of every table.
pub const MAGIC: [u8; 8] = *b"REMORATB";
/// The version of the layout of plain tables. A reader refuses any that is not here.
pub const LAYOUT_VERSION: u32 = 1;
/// The version of the layout of sealed tables.
pub const SEALED_LAYOUT_VERSION: u32 = 2;
/// The version of the layout of tables whose slots may be compressed.
pub const COMPRESSED_LAYOUT_VERSION: u32 = 3;

/// Bytes of the superblock: one page, so that the directory begins on the next.
pub const SUPERBLOCK_BYTES: u64 = 4096;
/// Bytes of the constant part of the superblock, read once: two cache lines.
pub const HEAD_BYTES: usize = 128;
/// Offset of the progress line: the one cache line of the superblock that changes.
pub const LINE_OFFSET: u64 = 128;
/// Bytes of the progress line: one cache line, so that one small read returns published, retired, end and state
/// together.
pub const LINE_BYTES: usize = 64;
/// Bytes of one directory entry: one cache line, so that no two slots share one.
pub const ENTRY_BYTES: usize = 64;
/// Bytes before each record of a journal: its length and its CRC-32C.
pub const RECORD_HEADER_BYTES: u32 = 8;
/// Bytes before each record of a sealed journal: the cipher's tag as well.
pub const SEALED_RECORD_HEADER_BYTES: u32 = RECORD_HEADER_BYTES + TAG_BYTES as u32;

/// Smallest slot in bytes: one page, the unit in which memory is touched and returned to the system.
pub const MIN_SLOT_BYTES: u32 = 4096;
/// Largest slot in bytes: 64 reads of `READ_BYTES`, which a reader tracks in one word. A larger slot would only make
/// the unit of progress coarser.
pub const MAX_SLOT_BYTES: u32 = 64 << 20;
/// Minimum number of slots: one being written while another is read.
pub const MIN_SLOTS: u32 = 2;
/// Maximum number of slots: a directory of 64 MiB, which with slots of 4 MiB addresses 4 TiB.
pub const MAX_SLOTS: u32 = 1 << 20;

/// The directory and the data area begin on multiples of this, bytes.
const PAGE_BYTES: u64 = 4096;
/// `end` while the stream is open.
const END_UNKNOWN: u64 = u64::MAX;

// Offsets in the head.
const AT_MAGIC: usize = 0;
const AT_VERSION: usize = 8;
const AT_KIND: usize = 12;
const AT_GENERATION: usize = 16;
const AT_SLOT_SIZE: usize = 24;
const AT_SLOTS: usize = 28;
const AT_DATA_OFFSET: usize = 32;
const AT_FIRST_OFFSET: usize = 40;
const AT_REPLID: usize = 48;
pub(crate) const AT_HEAD_CHECK: usize = 88;
// After the check, so that it is the same for both versions. A reader compares it with the offer.
const AT_ALGORITHM: usize = 92;

/// Bits of the length of a slot or record; those above are its encoding.
const LENGTH_BITS: u32 = 28;
const LENGTH_MASK: u32 = (1 << LENGTH_BITS) - 1;

/// Words of the progress line: published, retired, end, state, check.
pub(crate) const LINE_WORDS: usize = 5;
/// Words of an entry of a plain table: sequence, position, length and CRC, check.
pub(crate) const ENTRY_WORDS: usize = 4;
/// Words of an entry of a sealed table: sequence, position, length and CRC, tag (2), digest (2), check.
pub(crate) const SEALED_ENTRY_WORDS: usize = 8;

/// Words of an entry. The first [`ENTRY_WORDS`] or all of them are used.
pub(crate) type EntryWords = [u64; SEALED_ENTRY_WORDS];

const _: () = {
    assert!(AT_REPLID + 40 == AT_HEAD_CHECK && AT_HEAD_CHECK + 4 == AT_ALGORITHM && AT_ALGORITHM + 4 <= HEAD_BYTES);
    assert!(HEAD_BYTES as u64 == LINE_OFFSET);
    assert!(LINE_OFFSET.is_multiple_of(LINE_BYTES as u64), "the line must not straddle two cache lines");
    assert!(LINE_OFFSET + LINE_BYTES as u64 <= SUPERBLOCK_BYTES);
    assert!(LINE_WORDS * 8 <= LINE_BYTES && SEALED_ENTRY_WORDS * 8 == ENTRY_BYTES);
    assert!(MAX_SLOT_BYTES <= LENGTH_MASK);
    assert!(TAG_BYTES == 16 && DIGEST_BYTES == 16);
    assert!(SUPERBLOCK_BYTES.is_multiple_of(PAGE_BYTES) && (MIN_SLOT_BYTES as u64).is_multiple_of(PAGE_BYTES));
    assert!(SEALED_RECORD_HEADER_BYTES < MIN_SLOT_BYTES);
    // Words are stored and loaded in native byte order, and must be little endian for readers on other hosts.
    assert!(cfg!(target_endian = "little"), "the table is written by plain stores: little-endian machines only");
};

/// The state of a table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum State {
    /// Still being written.
    Open,
    /// Complete: nothing will change.
    Sealed,
    /// Aborted by its writer: nothing in it is worth reading.
    Aborted,
}

/// The shape of a table: the size of its slots and their number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Geometry {
    /// Bytes of one slot: a multiple of 4096.
    pub slot_size: u32,
    /// Number of slots in the ring.
    pub slots: u32,
}

impl Geometry {
    /// The largest ring of slots of this size whose whole table fits into `budget_bytes`.
    ///
    /// # Errors
    /// [`Error::Layout`] if not even the smallest ring fits, or the slot size is not valid.
    pub fn within(budget_bytes: u64, slot_size: u32) -> Result<Geometry, Error> {
        // At most one page is lost where the directory is rounded up.
        let for_slots = budget_bytes.saturating_sub(SUPERBLOCK_BYTES + PAGE_BYTES);
        let slots = for_slots / (u64::from(slot_size) + ENTRY_BYTES as u64);
        let slots = u32::try_from(slots).unwrap_or(MAX_SLOTS).min(MAX_SLOTS);
        if slots < MIN_SLOTS {
            return Err(Error::Layout(format!(
                "{budget_bytes} bytes do not hold {MIN_SLOTS} slots of {slot_size} bytes: give more memory or \
                 smaller slots"
            )));
        }
        Geometry { slot_size, slots }.checked()
    }

    /// This geometry, if it is within the limits.
    ///
    /// # Errors
    /// [`Error::Layout`] if a limit is exceeded; the text names it.
    pub fn checked(self) -> Result<Geometry, Error> {
        let size = self.slot_size;
        if !(MIN_SLOT_BYTES..=MAX_SLOT_BYTES).contains(&size) || !u64::from(size).is_multiple_of(PAGE_BYTES) {
            return Err(Error::Layout(format!(
                "a slot of {size} bytes: must be a multiple of {PAGE_BYTES} from {MIN_SLOT_BYTES} to {MAX_SLOT_BYTES}"
            )));
        }
        if !(MIN_SLOTS..=MAX_SLOTS).contains(&self.slots) {
            return Err(Error::Layout(format!("a ring of {} slots: must have {MIN_SLOTS} to {MAX_SLOTS}", self.slots)));
        }
        Ok(self)
    }

    /// Bytes of memory that the whole table takes.
    pub fn memory_len(&self) -> u64 {
        self.data_offset() + self.slot_bytes() * u64::from(self.slots)
    }

    /// Offset of the first slot, in bytes from the start of the memory.
    pub fn data_offset(&self) -> u64 {
        let directory = u64::from(self.slots) * ENTRY_BYTES as u64;
        (SUPERBLOCK_BYTES + directory).next_multiple_of(PAGE_BYTES)
    }

    /// Offset of slot `number`, in bytes from the start of the memory.
    pub fn slot_offset(&self, number: u64) -> u64 {
        self.data_offset() + self.slot_bytes() * self.place(number)
    }

    /// Offset of the entry of slot `number`, in bytes from the start of the memory.
    pub fn entry_offset(&self, number: u64) -> u64 {
        SUPERBLOCK_BYTES + ENTRY_BYTES as u64 * self.place(number)
    }

    /// Number of slots that a stream of `bytes` takes.
    pub fn slots_for(&self, bytes: u64) -> u64 {
        bytes.div_ceil(self.slot_bytes())
    }

    /// `slot_size` as the type used in computations.
    pub(crate) fn slot_bytes(&self) -> u64 {
        u64::from(self.slot_size)
    }

    /// The table position at which slot `number` begins; saturating, as numbers may come from the wire.
    pub(crate) fn start_of(&self, number: u64) -> u64 {
        number.saturating_mul(self.slot_bytes())
    }

    fn place(&self, number: u64) -> u64 {
        number % u64::from(self.slots)
    }
}

/// The constant part of the superblock.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Head {
    pub(crate) identity: Identity,
    pub(crate) geometry: Geometry,
    /// How the table is sealed; `None`: it is plain.
    pub(crate) algorithm: Option<Algorithm>,
    /// Whether slots or records may be compressed.
    pub(crate) compressed: bool,
}

impl Head {
    pub(crate) fn to_bytes(&self) -> [u8; HEAD_BYTES] {
        let mut bytes = [0; HEAD_BYTES];
        put(&mut bytes, AT_MAGIC, &MAGIC);
        let version = match self.algorithm {
            _ if self.compressed => COMPRESSED_LAYOUT_VERSION,
            Some(_) => SEALED_LAYOUT_VERSION,
            None => LAYOUT_VERSION,
        };
        put(&mut bytes, AT_VERSION, &version.to_le_bytes());
        put(&mut bytes, AT_KIND, &self.identity.kind.code().to_le_bytes());
        put(&mut bytes, AT_GENERATION, &self.identity.origin.generation.to_le_bytes());
        put(&mut bytes, AT_SLOT_SIZE, &self.geometry.slot_size.to_le_bytes());
        put(&mut bytes, AT_SLOTS, &self.geometry.slots.to_le_bytes());
        put(&mut bytes, AT_DATA_OFFSET, &self.geometry.data_offset().to_le_bytes());
        put(&mut bytes, AT_FIRST_OFFSET, &self.identity.origin.offset.to_le_bytes());
        put(&mut bytes, AT_REPLID, self.identity.origin.history.as_bytes());
        let check = crc::crc32c(&bytes[..AT_HEAD_CHECK]);
        put(&mut bytes, AT_HEAD_CHECK, &check.to_le_bytes());
        put(&mut bytes, AT_ALGORITHM, &self.algorithm.map_or(0, Algorithm::code).to_le_bytes());
        bytes
    }

    pub(crate) fn parse(bytes: &[u8; HEAD_BYTES]) -> Result<Head, Error> {
        if bytes[..8] != MAGIC {
            return Err(Error::Layout("not a table: its first bytes are not the magic".into()));
        }
        let version = get_u32(bytes, AT_VERSION);
        if !(LAYOUT_VERSION..=COMPRESSED_LAYOUT_VERSION).contains(&version) {
            return Err(Error::Layout(format!(
                "the table has layout version {version}, this program reads {LAYOUT_VERSION} to \
                 {COMPRESSED_LAYOUT_VERSION}: use the same release on both ends"
            )));
        }
        if get_u32(bytes, AT_HEAD_CHECK) != crc::crc32c(&bytes[..AT_HEAD_CHECK]) {
            return Err(Error::Layout("the head of the table does not match its checksum".into()));
        }
        let geometry =
            Geometry { slot_size: get_u32(bytes, AT_SLOT_SIZE), slots: get_u32(bytes, AT_SLOTS) }.checked()?;
        let data_offset = get_u64(bytes, AT_DATA_OFFSET);
        if data_offset != geometry.data_offset() {
            return Err(Error::Layout(format!(
                "the data of the table begin at {data_offset}, which does not fit its geometry"
            )));
        }
        let mut replid = [0; 40];
        replid.copy_from_slice(&bytes[AT_REPLID..AT_REPLID + 40]);
        let history = ReplId::try_from(replid)
            .map_err(|error| Error::Layout(format!("the head of the table has no valid replid: {error}")))?;
        let origin =
            Origin { generation: get_u64(bytes, AT_GENERATION), history, offset: get_u64(bytes, AT_FIRST_OFFSET) };
        let identity = Identity { kind: Kind::from_code(get_u32(bytes, AT_KIND))?, origin };
        let algorithm = match (version, get_u32(bytes, AT_ALGORITHM)) {
            (LAYOUT_VERSION, _) | (COMPRESSED_LAYOUT_VERSION, 0) => None,
            (_, code) => Some(Algorithm::from_code(code)?),
        };
        Ok(Head { identity, geometry, algorithm, compressed: version == COMPRESSED_LAYOUT_VERSION })
    }
}

/// The variable part of the superblock.
///
/// Its last word is a checksum of the others, in a sealed table a MAC. The writer stores word by word, and a transport
/// may copy the line in pieces (a socket's buffer can end in the middle of a word). So a line whose check fails was
/// caught in the middle of a change: read it again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Line {
    /// A table position: slot number × slot size + bytes published in the open slot.
    pub(crate) published: u64,
    /// Slots below this number may have been overwritten.
    pub(crate) retired: u64,
    /// The table position at which the stream ends, once known.
    pub(crate) end: Option<u64>,
    pub(crate) state: State,
}

impl Line {
    pub(crate) const NEW: Line = Line { published: 0, retired: 0, end: None, state: State::Open };

    pub(crate) fn to_words(self, seal: Option<&Seal>) -> [u64; LINE_WORDS] {
        let mut words = [self.published, self.retired, self.end.unwrap_or(END_UNKNOWN), self.state.code(), 0];
        words[LINE_WORDS - 1] = line_check(seal, &words[..LINE_WORDS - 1]);
        words
    }

    /// `None`: caught in the middle of a change.
    pub(crate) fn from_words(words: [u64; LINE_WORDS], seal: Option<&Seal>) -> Option<Line> {
        let [published, retired, end, state, found] = words;
        if found != line_check(seal, &words[..LINE_WORDS - 1]) {
            return None;
        }
        let end = (end != END_UNKNOWN).then_some(end);
        Some(Line { published, retired, end, state: State::from_code(state)? })
    }

    pub(crate) fn from_bytes(bytes: &[u8; LINE_BYTES], seal: Option<&Seal>) -> Option<Line> {
        Line::from_words(words(bytes), seal)
    }
}

/// One directory entry: the content of a slot.
///
/// `number` and `writing` share the sequence word, `(number + 1) << 1 | writing`, so that zeroed memory names no slot.
/// The check has the same purpose as the line's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) number: u64,
    /// The bytes of the slot are being replaced by those of `number`; the other fields are undefined.
    pub(crate) writing: bool,
    /// Stream position of the slot's first byte: of the RDB for a snapshot, a replication offset for a journal.
    pub(crate) position: u64,
    /// Bytes in a snapshot's slot, as they are stored; 0 in a journal, where the records have lengths.
    pub(crate) length: u32,
    /// How those bytes are compressed: 0 not at all, or the number of a [`Method`].
    pub(crate) encoding: u8,
    /// CRC-32C of those bytes as they are in the slot; 0 in a journal, whose records have their own.
    pub(crate) crc: u32,
    /// Zeros in a plain table and in a journal, whose records have their own tags.
    pub(crate) seal: SlotSeal,
}

impl Entry {
    pub(crate) fn writing(number: u64) -> Entry {
        Entry { number, writing: true, position: 0, length: 0, encoding: 0, crc: 0, seal: SlotSeal::default() }
    }

    /// An entry of a slot whose content stands in it as it is, in a table that is not sealed.
    pub(crate) fn plain(number: u64, position: u64, length: u32, crc: u32) -> Entry {
        Entry { number, writing: false, position, length, encoding: 0, crc, seal: SlotSeal::default() }
    }

    /// Whether the slot's content is `length` bytes from `position` on. A slot is compressed only if that makes it
    /// smaller by a tenth, and only where that is `allowed`.
    pub(crate) fn has_content(&self, position: u64, length: u32, allowed: bool) -> bool {
        let is_right_size = match self.encoding {
            0 => self.length == length,
            _ => allowed && is_worth(self.length, length),
        };
        self.position == position && is_right_size
    }

    /// How the slot is compressed.
    pub(crate) fn method(&self) -> Result<Option<Method>, Error> {
        match (self.encoding, Method::from_code(self.encoding)) {
            (0, _) => Ok(None),
            (_, Some(method)) => Ok(Some(method)),
            (code, None) => Err(Error::Layout(format!(
                "slot {} of the table is compressed by method {code}, which this program does not know: use the same \
                 release on both ends",
                self.number
            ))),
        }
    }

    /// The words, as many as an entry of the table has. `seal`: that of a sealed table.
    pub(crate) fn to_words(self, seal: Option<&Seal>) -> EntryWords {
        let sequence = (self.number + 1) << 1 | u64::from(self.writing);
        let mut words: EntryWords = [0; SEALED_ENTRY_WORDS];
        let length = with_encoding(self.length, self.encoding);
        words[..3].copy_from_slice(&[sequence, self.position, u64::from(length) | u64::from(self.crc) << 32]);
        if seal.is_some() {
            words[3..5].copy_from_slice(&pair(&self.seal.tag));
            words[5..7].copy_from_slice(&pair(&self.seal.digest));
        }
        let last = entry_words(seal) - 1;
        words[last] = entry_check(seal, &words[..last]);
        words
    }

    /// `None`: never written, or caught in the middle of a change.
    pub(crate) fn from_words(words: EntryWords, seal: Option<&Seal>) -> Option<Entry> {
        let [sequence, position, packed, ..] = words;
        let last = entry_words(seal) - 1;
        if words[last] != entry_check(seal, &words[..last]) {
            return None;
        }
        let parts = |_| SlotSeal { tag: unpair(words[3], words[4]), digest: unpair(words[5], words[6]) };
        let slot_seal = seal.map_or_else(SlotSeal::default, parts);
        let number = (sequence >> 1).checked_sub(1)?;
        let [length, crc] = [packed as u32, (packed >> 32) as u32];
        let (length, encoding) = without_encoding(length);
        Some(Entry { number, writing: sequence & 1 == 1, position, length, encoding, crc, seal: slot_seal })
    }

    /// Whether this is an entry of the place at which slot `number` has its own, of this lap or another one. One that
    /// is not was moved there.
    pub(crate) fn belongs_to(&self, number: u64, geometry: &Geometry) -> bool {
        self.number.abs_diff(number).is_multiple_of(geometry.slots.into())
    }

    pub(crate) fn from_bytes(bytes: &[u8; ENTRY_BYTES], seal: Option<&Seal>) -> Option<Entry> {
        Entry::from_words(words(bytes), seal)
    }
}

/// A length and an encoding as they are stored together.
fn with_encoding(length: u32, encoding: u8) -> u32 {
    length & LENGTH_MASK | u32::from(encoding) << LENGTH_BITS
}

fn without_encoding(word: u32) -> (u32, u8) {
    // Four bits are left.
    (word & LENGTH_MASK, (word >> LENGTH_BITS) as u8)
}

/// Words of an entry in a table that is sealed, or is not.
pub(crate) fn entry_words(seal: Option<&Seal>) -> usize {
    if seal.is_some() { SEALED_ENTRY_WORDS } else { ENTRY_WORDS }
}

/// Bytes before a record in a journal that is sealed, or is not.
pub(crate) fn record_header_bytes(seal: Option<&Seal>) -> u32 {
    if seal.is_some() { SEALED_RECORD_HEADER_BYTES } else { RECORD_HEADER_BYTES }
}

/// The header before the bytes of a journal's record. In a sealed journal, the cipher's tag follows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RecordHeader {
    /// Bytes in the slot, as they are stored.
    pub(crate) length: u32,
    /// How they are compressed: 0 not at all, or the number of a [`Method`].
    pub(crate) encoding: u8,
    /// CRC-32C of the bytes as they are in the slot.
    pub(crate) crc: u32,
}

impl RecordHeader {
    pub(crate) fn to_bytes(self) -> [u8; RECORD_HEADER_BYTES as usize] {
        let mut bytes = [0; RECORD_HEADER_BYTES as usize];
        put(&mut bytes, 0, &with_encoding(self.length, self.encoding).to_le_bytes());
        put(&mut bytes, 4, &self.crc.to_le_bytes());
        bytes
    }

    pub(crate) fn from_bytes(bytes: &[u8; RECORD_HEADER_BYTES as usize]) -> RecordHeader {
        let (length, encoding) = without_encoding(get_u32(bytes, 0));
        RecordHeader { length, encoding, crc: get_u32(bytes, 4) }
    }
}

impl State {
    fn code(self) -> u64 {
        match self {
            State::Open => 1,
            State::Sealed => 2,
            State::Aborted => 3,
        }
    }

    fn from_code(code: u64) -> Option<State> {
        match code {
            1 => Some(State::Open),
            2 => Some(State::Sealed),
            3 => Some(State::Aborted),
            _ => None,
        }
    }
}

/// The check of a line, from its other words.
fn line_check(seal: Option<&Seal>, words: &[u64]) -> u64 {
    seal.map_or_else(|| check(words), |seal| seal.mac(b"line", words))
}

/// The check of an entry, from its other words.
fn entry_check(seal: Option<&Seal>, words: &[u64]) -> u64 {
    seal.map_or_else(|| check(words), |seal| seal.mac(b"entry", words))
}

/// CRC-32C of words in their memory representation.
pub(crate) fn check(words: &[u64]) -> u64 {
    let crc = words.iter().fold(0, |crc, word| crc::crc32c_append(crc, &word.to_le_bytes()));
    u64::from(crc)
}

/// The first `N` words of a cache line.
fn words<const N: usize>(bytes: &[u8; 64]) -> [u64; N] {
    std::array::from_fn(|i| get_u64(bytes, i * 8))
}

fn pair(bytes: &[u8; 16]) -> [u64; 2] {
    let number = u128::from_le_bytes(*bytes);
    [number as u64, (number >> 64) as u64]
}

fn unpair(low: u64, high: u64) -> [u8; 16] {
    (u128::from(low) | u128::from(high) << 64).to_le_bytes()
}

fn put(bytes: &mut [u8], at: usize, field: &[u8]) {
    bytes[at..at + field.len()].copy_from_slice(field);
}

fn get_u32(bytes: &[u8], at: usize) -> u32 {
    let mut field = [0; 4];
    field.copy_from_slice(&bytes[at..at + 4]);
    u32::from_le_bytes(field)
}

fn get_u64(bytes: &[u8], at: usize) -> u64 {
    let mut field = [0; 8];
    field.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(field)
}

#[cfg(all(test, not(loom)))]
mod tests {
    #![allow(clippy::unwrap_used)]
    use proptest::prelude::*;

    use super::*;

    fn head() -> Head {
        let history = "0123456789abcdef0123456789abcdef01234567".parse().unwrap();
        let origin = Origin { generation: 0x0102030405060708, history, offset: 0x1112131415161718 };
        Head {
            identity: Identity { kind: Kind::Snapshot, origin },
            geometry: Geometry { slot_size: 0x40_0000, slots: 3 },
            algorithm: None,
            compressed: false,
        }
    }

    fn hex(bytes: &[u8]) -> String {
        bytes.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// These bytes are in use: another layout needs another `LAYOUT_VERSION`.
    #[test]
    fn the_head_has_these_very_bytes() {
        let bytes = head().to_bytes();
        assert_eq!(hex(&bytes[..48]), GOLDEN_HEAD);
        assert_eq!(&bytes[48..88], b"0123456789abcdef0123456789abcdef01234567");
        assert_eq!(get_u32(&bytes, 88), crc::crc32c(&bytes[..88]));
        assert!(bytes[92..].iter().all(|&byte| byte == 0));
    }

    const GOLDEN_HEAD: &str = concat!(
        "52454d4f52415442", // magic: REMORATB
        "01000000",         // layout version
        "01000000",         // kind: snapshot
        "0807060504030201", // generation
        "00004000",         // slot size
        "03000000",         // slots
        "0020000000000000", // data offset: 4096 + 3 * 64, rounded up to 8192
        "1817161514131211", // first offset
    );

    #[test]
    fn a_head_says_whether_slots_may_be_compressed() {
        for algorithm in [None, Some(Algorithm::Aes256Gcm)] {
            let written = Head { compressed: true, algorithm, ..head() };
            let bytes = written.to_bytes();
            assert_eq!(get_u32(&bytes, AT_VERSION), 3);
            assert_eq!(Head::parse(&bytes).unwrap(), written);
        }
    }

    #[test]
    fn a_compressed_slot_is_smaller_and_stands_in_a_table_that_has_such_slots() {
        let plain = Entry::plain(2, 2000, 1000, 7);
        assert!(plain.has_content(2000, 1000, false) && !plain.has_content(2000, 999, true));
        let smaller = Entry { encoding: 1, length: 900, ..plain };
        assert!(smaller.has_content(2000, 1000, true));
        assert!(!smaller.has_content(2000, 1000, false) && !smaller.has_content(1000, 1000, true));
        for length in [0, 8, 901] {
            assert!(!Entry { length, ..smaller }.has_content(2000, 1000, true), "{length}");
        }
        assert_eq!(smaller.method().unwrap(), Some(Method::Lz4));
        let unknown = Entry { encoding: 9, ..smaller }.method().unwrap_err().to_string();
        assert!(unknown.contains("method 9"), "{unknown}");
    }

    #[test]
    fn a_head_without_a_valid_replid_is_refused() {
        let mut bytes = head().to_bytes();
        bytes[AT_REPLID] = b'A';
        let check = crc::crc32c(&bytes[..AT_HEAD_CHECK]);
        put(&mut bytes, AT_HEAD_CHECK, &check.to_le_bytes());
        let refused = Head::parse(&bytes).unwrap_err().to_string();
        assert!(refused.contains("replid"), "{refused}");
    }

    #[test]
    fn the_line_has_these_very_words() {
        let open = Line { published: 0x2a, retired: 7, end: None, state: State::Open };
        assert_eq!(open.to_words(None)[..4], [0x2a, 7, u64::MAX, 1]);
        let sealed = Line { end: Some(0x2a), state: State::Sealed, ..open };
        assert_eq!(sealed.to_words(None)[..4], [0x2a, 7, 0x2a, 2]);
        // CRC-32C of the 32 bytes before it, as any other implementation computes it.
        let bytes: Vec<u8> = sealed.to_words(None)[..4].iter().flat_map(|word| word.to_le_bytes()).collect();
        assert_eq!(sealed.to_words(None)[4], u64::from(crc::crc32c(&bytes)));
    }

    #[test]
    fn an_entry_has_these_very_words() {
        let entry = Entry::plain(5, 0x1122, 0x10, 0xaabbccdd);
        assert_eq!(entry.to_words(None)[..3], [12, 0x1122, 0xaabbccdd_00000010]);
        let zstd = Entry { encoding: Method::Zstd.code(), ..entry };
        assert_eq!(zstd.to_words(None)[2], 0xaabbccdd_20000010);
        assert_eq!(Entry::writing(5).to_words(None)[0], 13);
    }

    #[test]
    fn zeroed_memory_says_nothing() {
        assert_eq!(Line::from_bytes(&[0; LINE_BYTES], None), None);
        assert_eq!(Entry::from_bytes(&[0; ENTRY_BYTES], None), None);
        assert!(matches!(Head::parse(&[0; HEAD_BYTES]), Err(Error::Layout(_))));
    }

    #[test]
    fn a_budget_is_filled_and_never_exceeded() {
        for budget in [20 << 10, 1 << 20, (1 << 20) + 4095, 64 << 20, 4 << 30] {
            let geometry = Geometry::within(budget, 4096).unwrap();
            assert!(geometry.memory_len() <= budget);
            let more = Geometry { slots: geometry.slots + 2, ..geometry };
            assert!(more.memory_len() > budget);
        }
        assert!(matches!(Geometry::within(8 << 20, 4 << 20), Err(Error::Layout(_))));
        assert!(matches!(Geometry::within(1 << 30, 5000), Err(Error::Layout(_))));
    }

    proptest! {
        #[test]
        fn no_changed_byte_of_a_head_goes_unnoticed(at in 0usize..AT_HEAD_CHECK + 4, flip in 1u8..) {
            let mut bytes = head().to_bytes();
            prop_assert_eq!(Head::parse(&bytes).unwrap(), head());
            bytes[at] ^= flip;
            prop_assert!(Head::parse(&bytes).is_err());
        }

        #[test]
        fn a_line_mixed_from_two_is_invalid_or_one_of_them(
            a in (any::<u64>(), any::<u64>()), b in (any::<u64>(), any::<u64>()), cut in 0usize..=40,
        ) {
            let line = |(published, retired)| Line { published, retired, end: None, state: State::Open };
            let bytes = |line: Line| line.to_words(None).map(u64::to_le_bytes).concat();
            let mut mixed = [0; LINE_BYTES];
            mixed[..cut].copy_from_slice(&bytes(line(a))[..cut]);
            mixed[cut..40].copy_from_slice(&bytes(line(b))[cut..]);
            let found = Line::from_bytes(&mixed, None);
            prop_assert!(found.is_none() || found == Some(line(a)) || found == Some(line(b)));
        }

        #[test]
        fn entries_come_back_as_they_were(
            number in 0..u64::MAX / 4, writing: bool, position: u64, length in 0..=MAX_SLOT_BYTES, encoding in 0u8..16,
            crc: u32,
        ) {
            let entry = Entry { writing, encoding, ..Entry::plain(number, position, length, crc) };
            prop_assert_eq!(Entry::from_words(entry.to_words(None), None), Some(entry));
        }

        #[test]
        fn no_two_slots_of_a_lap_share_a_byte(number in 0u64..1 << 40, slots in MIN_SLOTS..1000, pages in 1u32..64) {
            let geometry = Geometry { slot_size: pages * 4096, slots };
            let end = geometry.slot_offset(number) + geometry.slot_bytes();
            prop_assert!(end <= geometry.memory_len());
            prop_assert!(geometry.entry_offset(number) + 64 <= geometry.data_offset());
            prop_assert_ne!(geometry.slot_offset(number), geometry.slot_offset(number + 1));
            prop_assert_eq!(geometry.slot_offset(number), geometry.slot_offset(number + u64::from(slots)));
        }
    }
}
