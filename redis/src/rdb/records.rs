//! Records of small values that follow each other: what most of a snapshot of small values consists of. They are read
//! in place, one after the other, and nothing is copied.
//!
//! ```text
//!   … │ FC <time> 00 <key> <value> │ 10 <key> <hash> │ F9 <freq> 00 <key> <value> │ 15 <key> <stream> │ …
//!     ╰─────────────────── records of a run ───────────────────────────────────────╯  ends the run
//! ```
//!
//! A run ends at the first record that is anything else: of another type, compressed, too long, cut off or damaged. The
//! scanner or the server's own loader then says what it is.

use Item::{Bytes, Length, Module, Score, String, Times};

use super::{Magic, OPCODE_EXPIRETIME_MS, OPCODE_FREQ, OPCODE_IDLE, STRING_BYTES_MAX};

/// Bytes that a record has at most besides its key and its value: expiry, usage, type and two lengths.
pub const RECORD_HEAD_BYTES_MAX: usize = 9 + 10 + 1 + 9 + 9;

/// Longest key of such a record, in bytes.
pub const RECORD_KEY_BYTES_MAX: usize = STRING_BYTES_MAX;

/// A key whose value is small.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Record<'a> {
    /// Its key.
    pub key: Content<'a>,
    /// Its value.
    pub value: Value<'a>,
    /// When it expires, in milliseconds since 1970.
    pub expires_ms: Option<u64>,
    /// Idle time or use counter, if the snapshot has it.
    pub usage: Option<Usage>,
}

/// A value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Value<'a> {
    /// A string.
    String(Content<'a>),
    /// A hash, a list, a set or a sorted set. Nothing but its length has been looked at.
    Collection(Collection<'a>),
}

/// How a key was used, as the eviction policies count it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Usage {
    /// Seconds since the last use.
    Idle(u64),
    /// A logarithmic counter of uses.
    Frequency(u8),
}

/// The records at the beginning of `bytes`.
#[derive(Debug, Clone)]
pub struct Records<'a> {
    bytes: &'a [u8],
    at: usize,
    below: usize,
}

impl<'a> Records<'a> {
    /// The records whose values have fewer than `below` bytes.
    pub fn new(bytes: &'a [u8], below: u64) -> Records<'a> {
        Records { bytes, at: 0, below: usize::try_from(below).unwrap_or(usize::MAX) }
    }

    /// How many bytes the records have that were returned so far.
    pub fn taken(&self) -> usize {
        self.at
    }

    fn record(&self, input: &mut Reader<'a>) -> Option<Record<'a>> {
        let (mut expires_ms, mut usage) = (None, None);
        let kind = loop {
            match input.byte()? {
                // A time before 1970 is left to the server.
                OPCODE_EXPIRETIME_MS => {
                    expires_ms = Some(u64::try_from(i64::from_le_bytes(input.array()?)).ok()?);
                }
                OPCODE_IDLE => usage = Some(Usage::Idle(input.number()?)),
                OPCODE_FREQ => usage = Some(Usage::Frequency(input.byte()?)),
                kind => break kind,
            }
        };
        if kind != TYPE_STRING && !COLLECTION_TYPES.contains(&kind) {
            return None;
        }
        let key = input.content(STRING_BYTES_MAX + 1)?;
        let value = match kind {
            TYPE_STRING => Value::String(input.content(self.below)?),
            _ => Value::Collection(Collection::read(kind, input, self.below)?),
        };
        Some(Record { key, value, expires_ms, usage })
    }
}

impl<'a> Iterator for Records<'a> {
    type Item = Record<'a>;

    fn next(&mut self) -> Option<Record<'a>> {
        let mut input = Reader { rest: self.bytes.get(self.at..)? };
        let record = self.record(&mut input)?;
        self.at = self.bytes.len() - input.rest.len();
        Some(record)
    }
}

// Reads lengths and strings of whole records in place, and copies nothing. `input` reads those of which only a part
// may have arrived.

/// A key or a string: servers write short decimal numbers in binary.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Content<'a> {
    /// The bytes.
    Bytes(&'a [u8]),
    /// A number, which stands for its decimal digits.
    Number(i32),
}

/// What is left to read of records.
pub(super) struct Reader<'a> {
    pub(super) rest: &'a [u8],
}

impl<'a> Reader<'a> {
    pub(super) fn byte(&mut self) -> Option<u8> {
        let (first, rest) = self.rest.split_first()?;
        self.rest = rest;
        Some(*first)
    }

    pub(super) fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (array, rest) = self.rest.split_first_chunk()?;
        self.rest = rest;
        Some(*array)
    }

    /// A length where nothing else is allowed.
    pub(super) fn number(&mut self) -> Option<u64> {
        let first = self.byte()?;
        self.length(first)
    }

    /// The length that begins with `first`; `None` if it is cut off, or if it is something else.
    fn length(&mut self, first: u8) -> Option<u64> {
        match (first >> 6, first) {
            (0, _) => Some(u64::from(first)),
            (1, _) => Some(u64::from(u16::from_be_bytes([first & 0x3F, self.byte()?]))),
            (2, 0x80) => Some(u64::from(u32::from_be_bytes(self.array()?))),
            (2, 0x81) => Some(u64::from_be_bytes(self.array()?)),
            _ => None,
        }
    }

    pub(super) fn take(&mut self, count: usize) -> Option<&'a [u8]> {
        let (bytes, rest) = self.rest.split_at_checked(count)?;
        self.rest = rest;
        Some(bytes)
    }

    /// A string that is neither compressed nor a number.
    pub(super) fn bytes(&mut self) -> Option<&'a [u8]> {
        let length = self.number()?;
        self.take(usize::try_from(length).ok()?)
    }

    /// A string that is not compressed, of fewer than `below` bytes.
    fn content(&mut self, below: usize) -> Option<Content<'a>> {
        let number = match self.byte()? {
            0xC0 => i32::from(i8::from_le_bytes(self.array()?)),
            0xC1 => i32::from(i16::from_le_bytes(self.array()?)),
            0xC2 => i32::from_le_bytes(self.array()?),
            first => {
                let length = usize::try_from(self.length(first)?).ok().filter(|length| *length < below)?;
                return self.take(length).map(Content::Bytes);
            }
        };
        Some(Content::Number(number))
    }
}

// Small collections: hashes, lists, sets and sorted sets as they are in a record. Where such a value ends, and whether
// a server may be given it.
//
// ```text
//   16 │ key │ bytes 4 │ entries 2 │ entry, length │ entry, length … │ FF       a hash in a listpack: one string
//    4 │ key │ 2 │ field │ value │ field │ value                              a hash whose fields are in a table
// ```
//
// A server ends if its loader meets a damaged value. So what is read from memory that may change is checked here
// first, at least as strictly as any server checks it ([`Collection::check`]).

/// Types of values, as the servers' `rdb.h` numbers them.
const SET: u8 = 2;
const HASH: u8 = 4;
const SORTED_SET: u8 = 5;
const INTSET: u8 = 11;
const HASH_LISTPACK: u8 = 16;
const SORTED_SET_LISTPACK: u8 = 17;
const LIST: u8 = 18;
const SET_LISTPACK: u8 = 20;

/// The types that are read: those that today's servers write for lists, sets, hashes without expiring fields, and
/// sorted sets.
pub const COLLECTION_TYPES: [u8; 8] =
    [SET, HASH, SORTED_SET, INTSET, HASH_LISTPACK, SORTED_SET_LISTPACK, LIST, SET_LISTPACK];

/// A node of a list that is a listpack. The other kind is one long element.
const PACKED_NODE: u64 = 2;

/// The value of a hash, a list, a set or a sorted set, neither compressed nor long.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Collection<'a> {
    /// Its type, one of [`COLLECTION_TYPES`].
    pub kind: u8,
    /// What follows the key in its record.
    pub bytes: &'a [u8],
}

/// What is wrong with a collection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the collection is damaged: {0}")]
pub struct CollectionError(&'static str);

impl<'a> Collection<'a> {
    /// Reads a value of that type with fewer than `below` bytes. `None`: it is something else, or it is cut off.
    pub(super) fn read(kind: u8, input: &mut Reader<'a>, below: usize) -> Option<Collection<'a>> {
        let whole = input.rest;
        let most = &whole[..whole.len().min(below.saturating_sub(1))];
        let mut value = Reader { rest: most };
        match kind {
            INTSET | HASH_LISTPACK | SORTED_SET_LISTPACK | SET_LISTPACK => drop(value.bytes()?),
            LIST => {
                for _ in 0..value.number()? {
                    value.number().filter(|node| *node == PACKED_NODE)?;
                    value.bytes()?;
                }
            }
            SET | HASH | SORTED_SET => {
                for _ in 0..value.number()? {
                    value.content(usize::MAX)?;
                    match kind {
                        HASH => drop(value.content(usize::MAX)?),
                        SORTED_SET => drop(value.array::<8>()?),
                        _ => {}
                    }
                }
            }
            _ => return None,
        }
        let (bytes, rest) = whole.split_at_checked(most.len() - value.rest.len())?;
        input.rest = rest;
        Some(Collection { kind, bytes })
    }

    /// Checks that every server takes the value in: its structure is whole, it is not empty, nothing is in it twice,
    /// and scores are numbers.
    ///
    /// # Errors
    /// [`CollectionError`].
    pub fn check(&self) -> Result<(), CollectionError> {
        let mut input = Reader { rest: self.bytes };
        let cut_off = CollectionError("it is cut off");
        let mut blob = || input.bytes().ok_or(cut_off);
        match self.kind {
            INTSET => check_intset(blob()?),
            SET_LISTPACK => check_unique(elements(blob()?)?),
            HASH_LISTPACK => check_unique(pairs(&elements(blob()?)?)?.map(|(field, _)| *field).collect()),
            SORTED_SET_LISTPACK => {
                let elements = elements(blob()?)?;
                if pairs(&elements)?.any(|(_, score)| score.is_not_a_number()) {
                    return Err(CollectionError("a score is not a number"));
                }
                check_unique(pairs(&elements)?.map(|(member, _)| *member).collect())
            }
            LIST => {
                let mut count = input.number().ok_or(cut_off)?;
                let mut empty = true;
                while count > 0 {
                    input.number().ok_or(cut_off)?;
                    empty &= elements(input.bytes().ok_or(cut_off)?)?.is_empty();
                    count -= 1;
                }
                if empty { Err(CollectionError("it is empty")) } else { Ok(()) }
            }
            SET | HASH | SORTED_SET => self.check_table(&mut input).unwrap_or(Err(cut_off)),
            _ => Err(CollectionError("its type is not known")),
        }
    }

    /// `None`: it is cut off.
    fn check_table(&self, input: &mut Reader<'a>) -> Option<Result<(), CollectionError>> {
        let mut names = Vec::new();
        for _ in 0..input.number()? {
            names.push(Element::of(input.content(usize::MAX)?));
            match self.kind {
                HASH => drop(input.content(usize::MAX)?),
                SORTED_SET if f64::from_le_bytes(input.array()?).is_nan() => {
                    return Some(Err(CollectionError("a score is not a number")));
                }
                _ => {}
            }
        }
        Some(check_unique(names))
    }
}

/// An element, in the one form that equal elements have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Element<'a> {
    Number(i64),
    Bytes(&'a [u8]),
}

impl<'a> Element<'a> {
    fn of(content: Content<'a>) -> Element<'a> {
        match content {
            Content::Number(number) => Element::Number(number.into()),
            Content::Bytes(bytes) => Element::of_bytes(bytes),
        }
    }

    /// Digits that stand for a number, as servers write them, are the number.
    fn of_bytes(bytes: &'a [u8]) -> Element<'a> {
        let digits = bytes.strip_prefix(b"-").unwrap_or(bytes);
        let canonical = match digits {
            [b'0'] => bytes.len() == 1,
            [b'1'..=b'9', ..] => bytes.len() <= NUMBER_BYTES_MAX,
            _ => false,
        };
        let text = if canonical { std::str::from_utf8(bytes).ok() } else { None };
        let number = text.and_then(|text| text.parse().ok());
        number.map_or(Element::Bytes(bytes), Element::Number)
    }

    /// Servers read a score by the C library, which takes more spellings than this for "not a number", all of which
    /// begin so.
    fn is_not_a_number(&self) -> bool {
        let Element::Bytes(bytes) = self else { return false };
        let text = bytes.trim_ascii_start();
        let text = text.strip_prefix(b"-").or_else(|| text.strip_prefix(b"+")).unwrap_or(text);
        // The C library also skips a vertical tab.
        text.first().is_none_or(|first| matches!(first, b'n' | b'N' | 0x0B))
    }
}

/// Digits and sign of the longest number of 64 bits.
const NUMBER_BYTES_MAX: usize = 20;

/// The pairs of a hash or a sorted set.
fn pairs<'e, 'a>(
    elements: &'e [Element<'a>],
) -> Result<impl Iterator<Item = (&'e Element<'a>, &'e Element<'a>)>, CollectionError> {
    let (pairs, rest) = elements.as_chunks::<2>();
    if rest.is_empty() {
        Ok(pairs.iter().map(|[one, other]| (one, other)))
    } else {
        Err(CollectionError("half a pair"))
    }
}

/// There is an element, and none twice.
fn check_unique(mut elements: Vec<Element<'_>>) -> Result<(), CollectionError> {
    let twice = if elements.len() <= COMPARED_EACH_MAX {
        elements.iter().enumerate().any(|(at, element)| elements.get(..at).unwrap_or_default().contains(element))
    } else {
        elements.sort_unstable();
        elements.windows(2).any(|pair| pair.first() == pair.last())
    };
    match (elements.is_empty(), twice) {
        (true, _) => Err(CollectionError("it is empty")),
        (_, true) => Err(CollectionError("an element is in it twice")),
        _ => Ok(()),
    }
}

/// Up to this many elements, comparing each with each costs less than sorting them.
const COMPARED_EACH_MAX: usize = 16;

/// An intset: bytes of a number, how many there are, and the numbers in ascending order.
fn check_intset(bytes: &[u8]) -> Result<(), CollectionError> {
    let mut input = Reader { rest: bytes };
    let head = (input.array().map(u32::from_le_bytes), input.array().map(u32::from_le_bytes));
    let (Some(width @ (2 | 4 | 8)), Some(count)) = head else { return Err(CollectionError("the head of its intset")) };
    let (width, count) = (width as usize, count as usize);
    if count == 0 || width.checked_mul(count) != Some(input.rest.len()) {
        return Err(CollectionError("the length of its intset"));
    }
    let number = |bytes: &[u8]| {
        // The sign of the highest byte fills the rest.
        let negative = bytes.last().is_some_and(|high| *high >= 0x80);
        let mut number = [if negative { 0xFF } else { 0 }; 8];
        number.iter_mut().zip(bytes).for_each(|(to, from)| *to = *from);
        i64::from_le_bytes(number)
    };
    if input.rest.chunks_exact(width).map(number).is_sorted_by(|one, other| one < other) {
        Ok(())
    } else {
        Err(CollectionError("the order of its intset"))
    }
}

/// The elements of a listpack: its bytes, the number of its entries, entries, and an end mark.
fn elements(listpack: &[u8]) -> Result<Vec<Element<'_>>, CollectionError> {
    let error = CollectionError("its listpack");
    let mut input = Reader { rest: listpack };
    let bytes = input.array().map(u32::from_le_bytes).ok_or(error)?;
    let count = input.array().map(u16::from_le_bytes).ok_or(error)?;
    if bytes as usize != listpack.len() {
        return Err(error);
    }
    // An entry has at least two bytes.
    let mut elements = Vec::with_capacity(usize::from(count).min(listpack.len() / 2));
    while input.rest.len() > 1 {
        elements.push(entry(&mut input).ok_or(error)?);
    }
    // Many entries are not counted by the head.
    let counted = count == u16::MAX || elements.len() == usize::from(count);
    if input.rest == [LISTPACK_END] && counted { Ok(elements) } else { Err(error) }
}

const LISTPACK_END: u8 = 0xFF;

/// One entry of a listpack, with its length behind it, by which servers go backwards.
fn entry<'a>(input: &mut Reader<'a>) -> Option<Element<'a>> {
    let before = input.rest.len();
    let first = input.byte()?;
    let element = match first {
        0..0x80 => Element::Number(first.into()),
        0x80..0xC0 => Element::of_bytes(input.take(usize::from(first & 0x3F))?),
        0xC0..0xE0 => {
            let number = i64::from(u16::from_be_bytes([first & 0x1F, input.byte()?]));
            Element::Number(if number >= 1 << 12 { number - (1 << 13) } else { number })
        }
        0xE0..0xF0 => {
            let length = u16::from_be_bytes([first & 0x0F, input.byte()?]);
            Element::of_bytes(input.take(length.into())?)
        }
        0xF0 => {
            let length = u32::from_le_bytes(input.array()?);
            Element::of_bytes(input.take(length as usize)?)
        }
        0xF1 => Element::Number(i16::from_le_bytes(input.array()?).into()),
        0xF2 => {
            let [low, middle, high] = input.array()?;
            Element::Number((i32::from_le_bytes([0, low, middle, high]) >> 8).into())
        }
        0xF3 => Element::Number(i32::from_le_bytes(input.array()?).into()),
        0xF4 => Element::Number(i64::from_le_bytes(input.array()?)),
        _ => return None,
    };
    let length = before - input.rest.len();
    let back = match length {
        0..=0x7F => input.byte().map(usize::from),
        // From here on servers differ, and no small collection has such an entry.
        0x3FFF.. => None,
        _ => input.array().map(|[high, low]| (usize::from(high) << 7) | usize::from(low & 0x7F)),
    };
    back.filter(|back| *back == length).map(|_| element)
}

// The structure of each type's value, as far as it is needed to find the end of the value. Nothing here interprets a
// value.
//
// Names and numbers of the types are those of the servers' `rdb.h`; the structures are what their `rdbSaveObject`
// writes.

/// A part of a value.
#[derive(Debug)]
pub(super) enum Item {
    /// A length, as a number.
    Length,
    /// A string in any encoding.
    String,
    /// This many bytes.
    Bytes(u8),
    /// A score as text: a length byte and that many bytes, or one of three special lengths that stand for a value.
    Score,
    /// A length, and this group that many times.
    Times(&'static [Item]),
    /// What a module wrote: pairs of kind and value, up to the kind 0.
    Module,
}

/// The type of a string: the only one whose value is examined.
pub(super) const TYPE_STRING: u8 = 0;

/// What follows the key of a value of this type; `None` for an unknown type.
pub(super) fn value(kind: u8, magic: Magic) -> Option<&'static [Item]> {
    Some(match (kind, magic) {
        // Strings; and sets, hashes and sorted sets that are one string inside: zipmap, ziplist, intset, listpack.
        (TYPE_STRING | 9..=13 | 16 | 17 | 20, _) => &[String],
        (1 | 2, _) => &[Times(&[String])], // list, set
        (3, _) => &[Times(&[String, Score])],
        (4, _) => &[Times(&[String, String])],   // hash
        (5, _) => &[Times(&[String, Bytes(8)])], // sorted set, scores in binary
        (7, _) => &[Length, Module],
        (14, _) => &[Times(&[String])],         // quicklist of ziplists
        (15, _) => STREAM_1,                    // Redis 5
        (18, _) => &[Times(&[Length, String])], // quicklist of listpacks and plain nodes
        (19, _) => STREAM_2,                    // Redis 7.0
        (21, _) => STREAM_3,                    // Redis 7.2
        // From here on, each family numbers its own types.
        (22, Magic::Valkey) => &[Times(&[String, String, Bytes(8)])], // hash with expiring fields, Valkey 9.0
        (24, Magic::Redis) => &[Bytes(8), Times(&[Length, String, String])], // the same, Redis 7.4
        (25, Magic::Redis) => &[Bytes(8), String],                    // the same as one listpack
        (26, Magic::Redis) => STREAM_4,                               // Redis 8.6
        _ => return None,
    })
}

/// What follows an opcode that is located between keys and carries nothing about them; `None` for an unknown one.
pub(super) fn aside(opcode: u8) -> Option<&'static [Item]> {
    Some(match opcode {
        super::OPCODE_AUX => &[String, String],
        super::OPCODE_RESIZEDB => &[Length, Length],
        super::OPCODE_MODULE_AUX => &[Length, Length, Length, Module],
        super::OPCODE_FUNCTION => &[String],
        super::OPCODE_SLOT_INFO => &[Length, Length, Length],
        _ => return None,
    })
}

/// Nodes; number of entries; the last id; groups.
const STREAM_1: &[Item] =
    &[Times(NODE), Length, Length, Length, Times(&[String, Length, Length, Times(PENDING), Times(CONSUMER_1)])];

/// As `STREAM_1`, then the first id, the greatest deleted id, the number of entries ever added; and each group's own
/// count.
const STREAM_2: &[Item] = &[
    Times(NODE),
    Length,
    Length,
    Length,
    Length,
    Length,
    Length,
    Length,
    Length,
    Times(&[String, Length, Length, Length, Times(PENDING), Times(CONSUMER_1)]),
];

/// As `STREAM_2`, then the time at which each consumer was last active.
const STREAM_3: &[Item] = &[
    Times(NODE),
    Length,
    Length,
    Length,
    Length,
    Length,
    Length,
    Length,
    Length,
    Times(&[String, Length, Length, Length, Times(PENDING), Times(CONSUMER_3)]),
];

/// As `STREAM_3`, then how long and how many ids of messages are remembered, these ids by producer, and two counts.
const STREAM_4: &[Item] = &[
    Times(NODE),
    Length,
    Length,
    Length,
    Length,
    Length,
    Length,
    Length,
    Length,
    Times(&[String, Length, Length, Length, Times(PENDING), Times(CONSUMER_3)]),
    Length,
    Length,
    Times(&[String, Times(&[String, Length, Length])]),
    Length,
    Length,
];

/// An id and a listpack.
const NODE: &[Item] = &[String, String];

/// An id, the time of its delivery, and the number of deliveries.
const PENDING: &[Item] = &[Bytes(16), Bytes(8), Length];

/// A name, the time at which the consumer was last seen, and the ids that it has not acknowledged.
const CONSUMER_1: &[Item] = &[String, Bytes(8), Times(&[Bytes(16)])];
const CONSUMER_3: &[Item] = &[String, Bytes(8), Bytes(8), Times(&[Bytes(16)])];

// Listpacks and ziplists: the elements of one, and the other written from them.
//
// ```text
//   listpack   bytes 4 │ entries 2 │ entry, its length │ entry, its length … │ FF
//   ziplist    bytes 4 │ offset of the last entry 4 │ entries 2 │ length of the entry before, entry … │ FF
// ```
//
// Servers since 7.0 write listpacks. Redis 6.2 reads them only inside of streams, and ziplists elsewhere.

/// An element: text, or a number that was written in binary.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PackedElement<'a> {
    Text(&'a [u8]),
    Number(i64),
}

/// The bytes are not what their type says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Damaged;

/// Bytes of the head of a listpack.
const LISTPACK_HEAD: usize = 6;

/// Bytes of the head of a ziplist.
const ZIPLIST_HEAD: usize = 10;

/// The last byte of both.
const END: u8 = 0xFF;

/// Entries that a head can count; this number stands for "this many or more".
const COUNTED_MAX: usize = u16::MAX as usize;

/// The elements of a listpack. They are as many as its head says, and behind each stands its length.
pub(super) struct Listpack<'a> {
    rest: &'a [u8],
    /// How many elements are still to come; `None` if the head does not say it.
    left: Option<u16>,
}

impl<'a> Listpack<'a> {
    /// Reads the head of a listpack.
    pub(super) fn open(bytes: &'a [u8]) -> Result<Listpack<'a>, Damaged> {
        let (head, entries) = bytes.split_at_checked(LISTPACK_HEAD).ok_or(Damaged)?;
        let length = head.first_chunk().map(|bytes| u32::from_le_bytes(*bytes) as usize);
        let (END, entries) = entries.split_last().map(|(end, entries)| (*end, entries)).ok_or(Damaged)? else {
            return Err(Damaged);
        };
        let count = head.last_chunk().map(|bytes| u16::from_le_bytes(*bytes)).ok_or(Damaged)?;
        let left = (usize::from(count) < COUNTED_MAX).then_some(count);
        if length == Some(bytes.len()) { Ok(Listpack { rest: entries, left }) } else { Err(Damaged) }
    }

    fn entry(&mut self) -> Option<PackedElement<'a>> {
        let before = self.rest.len();
        let [first] = self.array()?;
        let element = match first {
            0..0x80 => PackedElement::Number(first.into()),
            0x80..0xC0 => PackedElement::Text(self.take(usize::from(first & 0x3F))?),
            0xC0..0xE0 => {
                let [second] = self.array()?;
                // Thirteen bits, the highest for the sign.
                let number = i64::from(u16::from_be_bytes([first & 0x1F, second]));
                PackedElement::Number(if number >= 1 << 12 { number - (1 << 13) } else { number })
            }
            0xE0..0xF0 => {
                let [second] = self.array()?;
                PackedElement::Text(self.take(u16::from_be_bytes([first & 0x0F, second]).into())?)
            }
            0xF0 => {
                let length = u32::from_le_bytes(self.array()?);
                PackedElement::Text(self.take(length as usize)?)
            }
            0xF1 => PackedElement::Number(i16::from_le_bytes(self.array()?).into()),
            0xF2 => {
                let [low, middle, high] = self.array()?;
                PackedElement::Number((i32::from_le_bytes([0, low, middle, high]) >> 8).into())
            }
            0xF3 => PackedElement::Number(i32::from_le_bytes(self.array()?).into()),
            0xF4 => PackedElement::Number(i64::from_le_bytes(self.array()?)),
            _ => return None,
        };
        // Behind it stands its length, by which servers walk backwards: seven bits a byte.
        let length = before - self.rest.len();
        let said = self.take(match length {
            0..0x80 => 1,
            0x80..0x3FFF => 2,
            0x3FFF..0x1F_FFFF => 3,
            0x1F_FFFF..0xFFF_FFFF => 4,
            _ => 5,
        })?;
        let said = said.iter().fold(0, |said, byte| said << 7 | usize::from(byte & 0x7F));
        (said == length).then_some(element)
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (array, rest) = self.rest.split_first_chunk()?;
        self.rest = rest;
        Some(*array)
    }

    fn take(&mut self, count: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.rest.split_at_checked(count)?;
        self.rest = rest;
        Some(taken)
    }
}

impl<'a> Iterator for Listpack<'a> {
    type Item = Result<PackedElement<'a>, Damaged>;

    fn next(&mut self) -> Option<Self::Item> {
        let entry = match (self.rest.is_empty(), self.left) {
            (true, None | Some(0)) => return None,
            (true, Some(_)) | (false, Some(0)) => None,
            (false, _) => self.entry(),
        };
        self.left = self.left.map(|left| left.saturating_sub(1));
        if entry.is_none() {
            (self.rest, self.left) = (&[], None);
        }
        Some(entry.ok_or(Damaged))
    }
}

/// Writes a ziplist of these elements.
pub(super) fn ziplist<'a>(
    elements: impl Iterator<Item = Result<PackedElement<'a>, Damaged>>,
) -> Result<Vec<u8>, Damaged> {
    let mut bytes = vec![0; ZIPLIST_HEAD];
    let (mut count, mut last, mut before) = (0_usize, ZIPLIST_HEAD, 0_usize);
    for element in elements {
        (count, last) = (count + 1, bytes.len());
        match u8::try_from(before) {
            Ok(before @ 0..0xFE) => bytes.push(before),
            _ => {
                bytes.push(0xFE);
                bytes.extend_from_slice(&u32::try_from(before).map_err(|_| Damaged)?.to_le_bytes());
            }
        }
        put_ziplist_entry(&mut bytes, element?)?;
        before = bytes.len() - last;
    }
    bytes.push(END);
    let (length, last) = (u32::try_from(bytes.len()), u32::try_from(last));
    let (Ok(length), Ok(last)) = (length, last) else { return Err(Damaged) };
    let head =
        [&length.to_le_bytes()[..], &last.to_le_bytes(), &(count.min(COUNTED_MAX) as u16).to_le_bytes()].concat();
    bytes.splice(..ZIPLIST_HEAD, head);
    Ok(bytes)
}

/// An entry without the length of the one before it.
fn put_ziplist_entry(bytes: &mut Vec<u8>, element: PackedElement<'_>) -> Result<(), Damaged> {
    match element {
        PackedElement::Text(text) => {
            let length = u32::try_from(text.len()).map_err(|_| Damaged)?;
            let [_, _, high, low] = length.to_be_bytes();
            match length {
                0..0x40 => bytes.push(low),
                0x40..0x4000 => bytes.extend_from_slice(&[0x40 | high, low]),
                _ => {
                    bytes.push(0x80);
                    bytes.extend_from_slice(&length.to_be_bytes());
                }
            }
            bytes.extend_from_slice(text);
        }
        PackedElement::Number(number) => match number {
            0..=12 => bytes.push(0xF1 + number as u8),
            -0x80..0x80 => bytes.extend_from_slice(&[0xFE, number as u8]),
            -0x8000..0x8000 => put_number(bytes, 0xC0, number, 2),
            -0x80_0000..0x80_0000 => put_number(bytes, 0xF0, number, 3),
            -0x8000_0000..0x8000_0000 => put_number(bytes, 0xD0, number, 4),
            _ => put_number(bytes, 0xE0, number, 8),
        },
    }
    Ok(())
}

fn put_number(bytes: &mut Vec<u8>, encoding: u8, number: i64, width: usize) {
    bytes.push(encoding);
    bytes.extend(number.to_le_bytes().iter().take(width));
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use proptest::prelude::*;

    use super::super::Writer;
    use super::*;

    fn bytes(text: &[u8]) -> Content<'_> {
        Content::Bytes(text)
    }

    fn string(value: Content<'_>) -> Value<'_> {
        Value::String(value)
    }

    #[test]
    fn a_run_has_every_string_with_all_that_belongs_to_it() {
        let run =
            b"\x00\x01a\x03one\xFC\x01\0\0\0\0\0\0\0\xF8\x07\x00\x01b\xC0\xFB\xF9\x09\x00\xC1\x39\x30\xC2\x01\0\0\x80";
        let mut records = Records::new(run, 10);
        let plain = Record { key: bytes(b"a"), value: string(bytes(b"one")), expires_ms: None, usage: None };
        assert_eq!(records.next(), Some(plain));
        let idle = Some(Usage::Idle(7));
        let expiring =
            Record { key: bytes(b"b"), value: string(Content::Number(-5)), expires_ms: Some(1), usage: idle };
        assert_eq!(records.next(), Some(expiring));
        let (key, value) = (Content::Number(12345), string(Content::Number(i32::MIN + 1)));
        let counted = Record { key, value, expires_ms: None, usage: Some(Usage::Frequency(9)) };
        assert_eq!(records.next(), Some(counted));
        assert_eq!((records.next(), records.taken()), (None, run.len()));
    }

    #[test]
    fn a_run_has_small_collections_among_its_strings() {
        let run = b"\x00\x01a\x03one\x04\x01h\x01\x01f\x01v\xFC\x01\0\0\0\0\0\0\0\x10\x01l\x03abc\x00\x01b\x01c";
        let mut records = Records::new(run, 10);
        let collection = |kind, bytes| Value::Collection(Collection { kind, bytes });
        let values: Vec<_> = records.by_ref().map(|record| (record.value, record.expires_ms)).collect();
        let wanted = [
            (string(bytes(b"one")), None),
            (collection(4, &b"\x01\x01f\x01v"[..]), None),
            (collection(16, b"\x03abc"), Some(1)),
            (string(bytes(b"c")), None),
        ];
        assert_eq!((&values[..], records.taken()), (&wanted[..], run.len()));
    }

    #[test]
    fn a_run_ends_before_anything_else() {
        let one = b"\x00\x01a\x03one";
        for other in [
            &b"\x0A\x01h\x05abcde"[..],                            // a ziplist of an old server
            b"\x00\x01z\xC3\x05\x28\x000\xE0\x1E\x00",             // a compressed value
            b"\x00\x01l\x0Atenletters",                            // as long as the limit
            b"\xFC\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\x00\x01a\x01b", // a time before 1970
            b"\xFE\x01",                                           // another database
            b"\x00\x01a\x82",                                      // a length of no encoding
            b"\xFF\0\0\0\0\0\0\0\0",
        ] {
            let all = [&one[..], other].concat();
            let mut records = Records::new(&all, 10);
            assert_eq!(records.by_ref().count(), 1, "{other:?}");
            assert_eq!(records.taken(), one.len());
        }
    }

    proptest! {
        #[test]
        fn a_run_that_is_cut_ends_with_its_last_whole_record(
            strings in proptest::collection::vec((proptest::collection::vec(any::<u8>(), 0..80), 0_usize..300, any::<Option<u32>>()), 1..20),
            cut in any::<prop::sample::Index>(),
        ) {
            let mut writer = Writer::new(11);
            let head = writer.clone().finish().len() - super::super::TAIL_BYTES;
            let mut ends = vec![0];
            for (key, length, expires) in &strings {
                writer.string(key, vec![b'v'; *length], expires.map(u64::from));
                ends.push(writer.clone().finish().len() - super::super::TAIL_BYTES - head);
            }
            let all = writer.finish();
            let run = &all[head..all.len() - super::super::TAIL_BYTES];
            let cut = cut.index(run.len() + 1);
            let mut records = Records::new(&run[..cut], 300);
            let found = records.by_ref().count();
            let whole = ends.iter().filter(|end| **end <= cut).count() - 1;
            prop_assert_eq!((found, records.taken()), (whole, ends[whole]));
        }

        #[test]
        fn any_bytes_are_read_without_a_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let mut records = Records::new(&bytes, 100);
            records.by_ref().for_each(drop);
            prop_assert!(records.taken() <= bytes.len());
        }
    }

    fn listpack(entries: &[&[u8]]) -> Vec<u8> {
        let mut bytes = vec![0; 6];
        for entry in entries {
            bytes.extend_from_slice(entry);
            if entry.len() > 127 {
                bytes.extend([(entry.len() >> 7) as u8, 0x80 | (entry.len() & 0x7F) as u8]);
            } else {
                bytes.push(entry.len() as u8);
            }
        }
        bytes.push(0xFF);
        let length = bytes.len() as u32;
        bytes[..4].copy_from_slice(&length.to_le_bytes());
        bytes[4..6].copy_from_slice(&(entries.len() as u16).to_le_bytes());
        bytes
    }

    fn with_length(bytes: &[u8]) -> Vec<u8> {
        let mut string = Vec::new();
        super::super::put_length(&mut string, bytes.len() as u64);
        [&string, bytes].concat()
    }

    fn check(kind: u8, bytes: &[u8]) -> Result<(), &'static str> {
        let mut input = Reader { rest: bytes };
        let collection = Collection::read(kind, &mut input, 4096).expect("a collection of that type");
        assert_eq!((collection.bytes, input.rest), (bytes, &b""[..]));
        collection.check().map_err(|error| error.0)
    }

    /// What a server's own `DUMP` says of `HSET h f v n 12 big 123456789012 text <200 letters>`, in short.
    #[test]
    fn collections_as_servers_write_them_are_taken() {
        let long = [&[0xE0, 200][..], &[b'l'; 200]].concat();
        let entries =
            [&b"\x81f"[..], b"\x81v", b"\x81n", &[12], b"\x83big", b"\xF4\x14\x1A\x99\xBE\x1C\0\0\0", &long, &[1]];
        for kind in [HASH_LISTPACK, SET_LISTPACK] {
            assert_eq!(check(kind, &with_length(&listpack(&entries))), Ok(()), "{kind}");
        }
        let scores = [&b"\x81a"[..], b"\x831.5", b"\x81b", b"\x83inf", b"\x81c", b"\x84-inf", b"\x81d", b"\xDF\xFF"];
        assert_eq!(check(SORTED_SET_LISTPACK, &with_length(&listpack(&scores))), Ok(()));
        let node = with_length(&listpack(&[b"\x81a", b"\x81a"]));
        assert_eq!(check(LIST, &[&b"\x02"[..], b"\x02", &node, b"\x02", &node].concat()), Ok(()));
        assert_eq!(check(INTSET, &with_length(b"\x02\0\0\0\x03\0\0\0\xFE\xFF\x01\0\x02\0")), Ok(()));
        assert_eq!(check(SET, b"\x03\x01a\xC0\x05\x01b"), Ok(()));
        assert_eq!(check(HASH, b"\x02\x01a\xC0\x05\x01b\x01a"), Ok(()));
        assert_eq!(check(SORTED_SET, &[b"\x01\x01m", &1.5_f64.to_le_bytes()[..]].concat()), Ok(()));
    }

    #[test]
    fn damage_that_ends_a_server_is_found() {
        let whole = listpack(&[b"\x81a", b"\x81b", b"\x81c", b"\x81d"]);
        let changed = |at: usize, to: u8| {
            let mut bytes = whole.clone();
            bytes[at] = to;
            with_length(&bytes)
        };
        // Length, number of entries, the head of an entry, the length behind it, the end mark.
        for (at, to) in [(0, 20), (4, 5), (6, 0xF5), (6, 0xBF), (8, 3), (whole.len() - 1, 0)] {
            for kind in [HASH_LISTPACK, SET_LISTPACK, SORTED_SET_LISTPACK] {
                assert_eq!(check(kind, &changed(at, to)), Err("its listpack"), "{at} {to}");
            }
            let list = [&b"\x01\x02"[..], &changed(at, to)].concat();
            assert_eq!(check(LIST, &list), Err("its listpack"), "{at} {to}");
        }
        let twice = with_length(&listpack(&[b"\x81a", b"\x81b", b"\x81a", b"\x81d"]));
        // A number in binary, and its digits.
        let hidden = with_length(&listpack(&[&[7], b"\x81b", b"\x817", b"\x81d"]));
        for bytes in [twice, hidden] {
            for kind in [HASH_LISTPACK, SET_LISTPACK, SORTED_SET_LISTPACK] {
                assert_eq!(check(kind, &bytes), Err("an element is in it twice"));
            }
        }
        let many: Vec<Vec<u8>> = (0..40_u8).map(|number| vec![number % 39]).collect();
        let many: Vec<&[u8]> = many.iter().map(Vec::as_slice).collect();
        assert_eq!(check(SET_LISTPACK, &with_length(&listpack(&many))), Err("an element is in it twice"));
        assert_eq!(check(HASH_LISTPACK, &with_length(&listpack(&[b"\x81a"]))), Err("half a pair"));
        for score in [&b"\x83nan"[..], b"\x84-NaN", b"\x85 +nan", b"\x80"] {
            let bytes = with_length(&listpack(&[b"\x81a", score]));
            assert_eq!(check(SORTED_SET_LISTPACK, &bytes), Err("a score is not a number"));
        }
        for (bytes, why) in [
            (&b"\x03\0\0\0\x01\0\0\0\x01\0\0"[..], "the head of its intset"),
            (b"\x02\0\0\0\x02\0\0\0\x01\0", "the length of its intset"),
            (b"\x02\0\0\0\0\0\0\0", "the length of its intset"),
            (b"\x02\0\0\0\x02\0\0\0\x01\0\x01\0", "the order of its intset"),
            (b"\x02\0\0\0\x02\0\0\0\x01\0\xFF\xFF", "the order of its intset"),
        ] {
            assert_eq!(check(INTSET, &with_length(bytes)), Err(why));
        }
        assert_eq!(check(SET, b"\x02\x015\xC0\x05"), Err("an element is in it twice"));
        assert_eq!(check(HASH, b"\x02\x01a\x01b\x01a\x01c"), Err("an element is in it twice"));
        assert_eq!(
            check(SORTED_SET, &[b"\x01\x01m", &f64::NAN.to_le_bytes()[..]].concat()),
            Err("a score is not a number")
        );
        for (kind, bytes) in [
            (SET, &b"\0"[..]),
            (HASH, b"\0"),
            (SORTED_SET, b"\0"),
            (LIST, b"\0"),
            (LIST, b"\x01\x02\x07\x07\0\0\0\0\0\xFF"),
            (SET_LISTPACK, b"\x07\x07\0\0\0\0\0\xFF"),
        ] {
            assert_eq!(check(kind, bytes), Err("it is empty"), "{kind}");
        }
    }

    #[test]
    fn what_is_long_or_compressed_is_left_to_the_server() {
        let read = |kind, bytes: &[u8], below| Collection::read(kind, &mut Reader { rest: bytes }, below).is_some();
        let small = with_length(&listpack(&[b"\x81a", b"\x81b"]));
        assert!(read(HASH_LISTPACK, &small, small.len() + 1));
        assert!(!read(HASH_LISTPACK, &small, small.len()));
        assert!(!read(HASH_LISTPACK, b"\xC3\x05\x28\x000\xE0\x1E\x00", 100), "compressed");
        assert!(!read(LIST, &[&b"\x01\x01"[..], &small].concat(), 100), "one long element");
        assert!(!read(SET, b"\x81\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\x01a", 100), "more than there is");
        assert!(!read(22, &small, 100), "a type that only one family has");
    }

    proptest! {
        #[test]
        fn any_bytes_are_checked_without_a_panic(kind in 0..COLLECTION_TYPES.len(), bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let kind = COLLECTION_TYPES[kind];
            let _ = Collection { kind, bytes: &bytes }.check();
            for bytes in [bytes.clone(), with_length(&bytes), with_length(&listpack(&[&bytes]))] {
                if let Some(collection) = Collection::read(kind, &mut Reader { rest: &bytes }, 150) {
                    prop_assert!(collection.bytes.len() < 150);
                    let _ = collection.check();
                }
            }
        }

        /// A byte of a listpack that changes is found, or is a part of an element.
        #[test]
        fn a_changed_listpack_is_found_or_has_as_many_elements(
            entries in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..60), 1..20),
            at in any::<prop::sample::Index>(),
            to in any::<u8>(),
        ) {
            let entries: Vec<Vec<u8>> = entries.iter().map(|entry| [&[0x80 | entry.len() as u8], &entry[..]].concat()).collect();
            let mut bytes = listpack(&entries.iter().map(Vec::as_slice).collect::<Vec<_>>());
            prop_assert_eq!(elements(&bytes).map(|elements| elements.len()), Ok(entries.len()));
            let at = at.index(bytes.len());
            bytes[at] = to;
            if let Ok(found) = elements(&bytes) {
                prop_assert_eq!(found.len(), entries.len());
            }
        }
    }

    fn elements(bytes: &[u8]) -> Result<Vec<PackedElement<'_>>, Damaged> {
        Listpack::open(bytes)?.collect()
    }

    #[test]
    fn a_listpack_of_a_server_is_read() {
        // The first bytes of `OBJECT`'s listpack for: 1, -1, 4095, -4096, 300, -70000, 2^31 - 1, 2^40, "a", "".
        let entries: [&[u8]; 10] = [
            b"\x01\x01",
            b"\xDF\xFF\x02",
            b"\xCF\xFF\x02",
            b"\xD0\x00\x02",
            b"\xC1\x2C\x02",
            b"\xF2\x90\xEE\xFE\x04",
            b"\xF3\xFF\xFF\xFF\x7F\x05",
            b"\xF4\0\0\0\0\0\x01\0\0\x09",
            b"\x81a\x02",
            b"\x80\x01",
        ];
        let body = entries.concat();
        let bytes = [&(body.len() as u32 + 7).to_le_bytes()[..], &[10, 0], &body, &[END]].concat();
        let numbers = [1, -1, 4095, -4096, 300, -70_000, i64::from(i32::MAX), 1 << 40];
        let wanted: Vec<_> = numbers
            .into_iter()
            .map(PackedElement::Number)
            .chain([PackedElement::Text(b"a"), PackedElement::Text(b"")])
            .collect();
        assert_eq!(elements(&bytes).unwrap(), wanted);
        for cut in 0..bytes.len() {
            assert!(elements(&bytes[..cut]).is_err(), "{cut}");
        }
    }

    #[test]
    fn long_entries_have_long_lengths_behind_them() {
        for length in [63_usize, 64, 4095, 4096, 0x3FFF - 5, 0x3FFF - 4, 1 << 20, 3 << 20] {
            let text = vec![b'x'; length];
            let head = match length {
                0..64 => vec![0x80 | length as u8],
                64..4096 => vec![0xE0 | (length >> 8) as u8, length as u8],
                _ => [&[0xF0][..], &(length as u32).to_le_bytes()].concat(),
            };
            let size = head.len() + length;
            let back =
                [127, 16383, 2_097_151, 268_435_455].iter().position(|most| size < *most + usize::from(*most == 127));
            // Seven bits a byte, the lowest last, and a mark on all but the first.
            let back: Vec<u8> = (0..=back.unwrap())
                .rev()
                .zip([0].into_iter().chain(std::iter::repeat(0x80)))
                .map(|(at, mark)| (size >> (7 * at) & 0x7F) as u8 | mark)
                .collect();
            let body = [&head[..], &text, &back, b"\x07\x01"].concat();
            let wrong = [&head[..], &text, &vec![0; back.len()], b"\x07\x01"].concat();
            let wrong = [&(wrong.len() as u32 + 7).to_le_bytes()[..], &[2, 0], &wrong, &[END]].concat();
            assert!(elements(&wrong).is_err(), "{length}: another length");
            let bytes = [&(body.len() as u32 + 7).to_le_bytes()[..], &[2, 0], &body, &[END]].concat();
            assert_eq!(elements(&bytes).unwrap(), [PackedElement::Text(&text), PackedElement::Number(7)], "{length}");
        }
    }

    #[test]
    fn a_ziplist_is_written_as_servers_write_it() {
        let elements = [
            PackedElement::Text(b"ab"),
            PackedElement::Number(12),
            PackedElement::Number(-1),
            PackedElement::Number(1 << 20),
        ];
        let bytes = ziplist(elements.into_iter().map(Ok)).unwrap();
        assert_eq!(bytes, b"\x19\0\0\0\x13\0\0\0\x04\0\x00\x02ab\x04\xFD\x02\xFE\xFF\x03\xF0\0\0\x10\xFF");
        let long = vec![b'x'; 300];
        let bytes = ziplist([PackedElement::Text(&long), PackedElement::Number(0)].into_iter().map(Ok)).unwrap();
        let (head, entries) = bytes.split_at(ZIPLIST_HEAD);
        assert_eq!(head[4..8], (ZIPLIST_HEAD as u32 + 303).to_le_bytes());
        assert_eq!((&entries[..3], &entries[303..]), (&b"\0\x41\x2C"[..], &b"\xFE\x2F\x01\0\0\xF1\xFF"[..]));
    }
}
