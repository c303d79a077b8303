//! Scanner: walks over the records of a snapshot as its bytes arrive, and reports the positions of the long plain
//! strings.
//!
//! ```text
//!   REDIS0011 │ FA … │ FE 0 │ FB 9 2 │ FC <time> 00 <key> <length> ▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓ │ 04 <key> … │ FF <checksum>
//!                                      ▲ begins                    ▲ value                            ▲ end
//!                                      └───────── Found::Text ─────┴──────────────────┘               Found::End
//! ```
//!
//! The scanner is not a loader: of everything except such strings it determines only the length. It need not see values
//! at all: [`Scanner::skippable`] returns how many bytes may be skipped. A type that it does not know (of a newer
//! server) is an error that names the position; a caller that only forwards the bytes can continue.

use std::collections::BTreeMap;
use std::ops::Range;

use super::malformed;
use super::read_magic;
use super::records::{self, Item, Records, TYPE_STRING, Usage};
use super::{
    Error, Input, Length, Magic, OPCODE_EOF, OPCODE_EXPIRETIME, OPCODE_EXPIRETIME_MS, OPCODE_FREQ, OPCODE_IDLE,
    OPCODE_SELECTDB, STRING_BYTES_MAX, Stop, TAIL_BYTES,
};

/// What the scanner found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Found {
    /// A string of at least the requested length, neither compressed nor a number. Its value comes next.
    Text(Text),
    /// A run of records, where the caller asked for runs ([`Scanner::of_runs`]). They have been consumed.
    Run(Run),
    /// The end mark; the checksum follows.
    End {
        /// Position of the end mark.
        at: u64,
    },
}

/// A key whose value is a plain string. Positions are bytes from the start of the snapshot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Text {
    /// Where its record begins, expiry and the like included.
    pub begins: u64,
    /// Where the bytes of the value are; the record ends with them.
    pub value: Range<u64>,
    /// Its database.
    pub database: u64,
    /// Its key, of at most 4096 bytes: a string with a longer key is not reported.
    pub key: Vec<u8>,
    /// When it expires, in milliseconds since 1970.
    pub expires_ms: Option<i64>,
    /// Its idle time or use counter, if the snapshot has it.
    pub usage: Option<Usage>,
}

/// Whole records of small values that follow each other ([`Records`]).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Run {
    /// Where they are, in bytes from the start of the snapshot.
    pub bytes: Range<u64>,
    /// Their database.
    pub database: u64,
    /// How many there are.
    pub keys: u64,
}

/// Why a scan can't continue.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ScanError {
    /// A type or an opcode of a server that is newer than this program, or that was never released. Not necessarily
    /// damage.
    #[error("the snapshot holds something of an unknown type, {code}, at byte {at}")]
    Unknown {
        /// The number of the type.
        code: u8,
        /// Its position.
        at: u64,
    },
    /// No server writes this.
    #[error("byte {at}: {error}")]
    Damaged {
        /// The position.
        at: u64,
        /// What is wrong there.
        error: Error,
    },
}

/// A scan of one snapshot. See the module docs.
#[derive(Debug)]
pub struct Scanner {
    /// Shorter strings are not reported by themselves.
    least: u64,
    /// Whether smaller values are reported in runs.
    runs: bool,
    /// Position of the next byte that is not parsed yet.
    at: u64,
    /// Bytes from `at` on that are skipped.
    skip: u64,
    /// Bytes from `at` on that were already fed: the beginning of an item that was cut off.
    carry: Vec<u8>,
    state: State,
    /// Parts of the present value that are still to come, the innermost last.
    stack: Vec<Frame>,
    magic: Magic,
    database: u64,
    /// Keys of the present database since it was selected.
    keys: u64,
    /// Keys of each database before; `None`: there were too many databases.
    counts: Option<BTreeMap<u64, u64>>,
    prefix: Option<Prefix>,
    found: Option<Found>,
    /// Keys that expire at this moment (milliseconds since 1970) or before it are counted.
    expires_by_ms: i64,
    expired: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Magic,
    Records,
    Ended,
}

/// A sequence of items, and how many more times it repeats.
#[derive(Debug)]
struct Frame {
    items: &'static [Item],
    next: usize,
    times: u64,
}

/// The attributes before a key.
#[derive(Debug, Clone, Copy)]
struct Prefix {
    begins: u64,
    expires_ms: Option<i64>,
    usage: Option<Usage>,
}

/// Bytes added at a time to an item that was cut off: most items are shorter.
const CARRY_STEP: usize = 64;

/// Maximum size of one item, in bytes: a type, a key in any encoding, the length of a string.
const UNIT_BYTES_MAX: usize = STRING_BYTES_MAX + 64;

/// Databases whose keys are counted at most. Servers have 16 by default; a snapshot could name millions in a few bytes.
const DATABASES_MAX: usize = 1 << 16;

/// Groups in streams contain consumers, which contain ids: three levels, and one for the value itself.
const DEPTH_MAX: usize = 4;

impl Scanner {
    /// A scanner at the first byte, which reports plain strings of at least this many bytes.
    pub fn new(least: u64) -> Scanner {
        Scanner {
            least,
            runs: false,
            at: 0,
            skip: 0,
            carry: Vec::new(),
            state: State::Magic,
            stack: Vec::with_capacity(DEPTH_MAX),
            magic: Magic::Redis,
            database: 0,
            keys: 0,
            counts: Some(BTreeMap::new()),
            prefix: None,
            found: None,
            expires_by_ms: i64::MIN,
            expired: 0,
        }
    }

    /// Like [`Scanner::new`], and reports smaller values too, in runs: those whose whole records are in one input.
    pub fn of_runs(least: u64) -> Scanner {
        Scanner { runs: true, ..Scanner::new(least) }
    }

    /// Like `self`, and counts the keys that expire by this moment, in milliseconds since 1970 ([`Scanner::expired`]).
    #[must_use]
    pub fn counting_expired(self, by_ms: i64) -> Scanner {
        Scanner { expires_by_ms: by_ms, ..self }
    }

    /// How many of the keys read so far expire by the moment of [`Scanner::counting_expired`].
    pub fn expired(&self) -> u64 {
        self.expired
    }

    /// Bytes up to this position belong to no string that is still to be found: they may be forwarded. It lags behind
    /// what was fed by no more than the beginning of a record, and a string that was found is passed only with its last
    /// byte.
    pub fn settled(&self) -> u64 {
        self.prefix.map_or(self.at, |prefix| prefix.begins)
    }

    /// How many keys each database has, as far as the snapshot was read. `None`: it has too many databases.
    pub fn keys(&self) -> Option<BTreeMap<u64, u64>> {
        let mut counts = self.counts.clone()?;
        count(&mut counts, self.database, self.keys).then_some(counts)
    }

    /// How many of the next bytes need not be fed.
    pub fn skippable(&self) -> u64 {
        self.skip
    }

    /// Skips this many bytes, or as many as are skippable; returns how many.
    pub fn skip(&mut self, bytes: u64) -> u64 {
        let passed = bytes.min(self.skip);
        self.skip -= passed;
        self.at += passed;
        passed
    }

    /// Takes the next bytes: up to the first find (the value of a string is not consumed yet), or all of them. Returns
    /// how many, and what was found.
    ///
    /// # Errors
    /// [`ScanError`]; nothing is parsed after it.
    pub fn feed(&mut self, input: &[u8]) -> Result<(usize, Option<Found>), ScanError> {
        let mut taken = self.finish_carry(input)?;
        loop {
            if let Some(found) = self.found.take() {
                return Ok((taken, Some(found)));
            }
            taken += self.skip((input.len() - taken) as u64) as usize;
            let rest = input.get(taken..).unwrap_or_default();
            if self.skip > 0 || rest.is_empty() || self.state == State::Ended {
                return Ok((taken, None));
            }
            let run = self.run(rest);
            if run > 0 {
                taken += run;
                continue;
            }
            match self.understand(rest)? {
                Some(bytes) => taken += bytes,
                None => {
                    self.carry.extend_from_slice(rest);
                    return Ok((input.len(), None));
                }
            }
        }
    }

    /// Consumes the run at the beginning of `bytes`, if runs are reported. Returns how many bytes that took.
    fn run(&mut self, bytes: &[u8]) -> usize {
        let between_records = self.state == State::Records && self.stack.is_empty() && self.prefix.is_none();
        if !self.runs || !between_records {
            return 0;
        }
        let mut records = Records::new(bytes, self.least);
        let (by_ms, mut keys) = (self.expires_by_ms, 0);
        for record in records.by_ref() {
            keys += 1;
            self.expired +=
                u64::from(record.expires_ms.is_some_and(|at| i64::try_from(at).is_ok_and(|at| at <= by_ms)));
        }
        let begins = self.at;
        self.at += records.taken() as u64;
        self.keys += keys;
        if keys > 0 {
            self.found = Some(Found::Run(Run { bytes: begins..self.at, database: self.database, keys }));
        }
        records.taken()
    }

    /// Completes the item that was cut off. Returns how many bytes that took.
    fn finish_carry(&mut self, input: &[u8]) -> Result<usize, ScanError> {
        let before = self.carry.len();
        let mut taken = 0;
        while !self.carry.is_empty() && taken < input.len() {
            debug_assert!(self.carry.len() <= UNIT_BYTES_MAX);
            let more = input.get(taken..).unwrap_or_default();
            let more = more.get(..CARRY_STEP).unwrap_or(more);
            self.carry.extend_from_slice(more);
            taken += more.len();
            let carry = std::mem::take(&mut self.carry);
            match self.understand(&carry)? {
                Some(bytes) => return Ok(bytes - before),
                None => self.carry = carry,
            }
        }
        Ok(taken)
    }

    /// Parses one item at the beginning of `bytes` and returns its length; `None` if the item is cut off.
    fn understand(&mut self, bytes: &[u8]) -> Result<Option<usize>, ScanError> {
        let mut input = Input { bytes, position: 0 };
        let result = match (self.state, self.stack.is_empty()) {
            (State::Magic, _) => self.magic(&mut input),
            (_, true) => self.record(&mut input),
            (_, false) => self.item(&mut input),
        };
        match result {
            Ok(Known) => {
                self.at += input.position as u64;
                Ok(Some(input.position))
            }
            Err(Trouble::Stop(Stop::Incomplete)) => Ok(None),
            Err(Trouble::Stop(Stop::Broken(error))) => Err(ScanError::Damaged { at: self.at, error }),
            Err(Trouble::Unknown(code)) => Err(ScanError::Unknown { code, at: self.at }),
        }
    }

    fn magic(&mut self, input: &mut Input<'_>) -> Result<Known, Trouble> {
        (self.magic, _) = read_magic(input)?;
        self.state = State::Records;
        Ok(Known)
    }

    /// The beginning of a record: of an attribute before a key, of a field between keys, or of a key.
    fn record(&mut self, input: &mut Input<'_>) -> Result<Known, Trouble> {
        let [code] = input.array()?;
        let mut prefix = self.prefix.unwrap_or(Prefix { begins: self.at, expires_ms: None, usage: None });
        match code {
            OPCODE_EXPIRETIME_MS => prefix.expires_ms = Some(i64::from_le_bytes(input.array()?)),
            OPCODE_EXPIRETIME => prefix.expires_ms = Some(i64::from(i32::from_le_bytes(input.array()?)) * 1000),
            OPCODE_IDLE => prefix.usage = Some(Usage::Idle(input.number()?)),
            OPCODE_FREQ => prefix.usage = Some(Usage::Frequency(input.array::<1>()?[0])),
            OPCODE_SELECTDB => {
                let database = input.number()?;
                if database != self.database {
                    let (before, keys) = (self.database, std::mem::take(&mut self.keys));
                    self.counts.take_if(|counts| !count(counts, before, keys));
                    self.database = database;
                }
                return Ok(Known);
            }
            OPCODE_EOF => {
                self.state = State::Ended;
                self.skip = TAIL_BYTES as u64 - 1;
                self.found = Some(Found::End { at: self.at });
                return Ok(Known);
            }
            _ => return self.key(code, prefix, input),
        }
        self.prefix = Some(prefix);
        Ok(Known)
    }

    /// A key and the beginning of its value, or what follows an opcode.
    fn key(&mut self, code: u8, prefix: Prefix, input: &mut Input<'_>) -> Result<Known, Trouble> {
        if let Some(items) = records::aside(code) {
            self.enter(items, 1);
            return Ok(Known);
        }
        let items = records::value(code, self.magic).ok_or(Trouble::Unknown(code))?;
        let key_at = input.position;
        let key_bytes = input.string_to_skip()?;
        if code == TYPE_STRING && key_bytes <= STRING_BYTES_MAX as u64 {
            input.take(key_bytes as usize)?;
            let value_at = input.position;
            if let Length::Plain(length) = input.length()? {
                self.string(prefix, key_at, length, input)?;
            } else {
                input.position = value_at;
                self.skip = input.string_to_skip()?;
            }
        } else {
            self.skip = key_bytes;
            self.enter(items, 1);
        }
        self.expired += u64::from(prefix.expires_ms.is_some_and(|at| at <= self.expires_by_ms));
        self.prefix = None;
        self.keys += 1;
        Ok(Known)
    }

    /// A plain string: its value is skipped, and reported if it is long.
    fn string(&mut self, prefix: Prefix, key_at: usize, length: u64, input: &mut Input<'_>) -> Result<(), Trouble> {
        self.skip = length;
        if length < self.least {
            return Ok(());
        }
        let starts = self.at + input.position as u64;
        let ends = starts.checked_add(length).ok_or(Trouble::Stop(malformed("a string without an end")))?;
        // A string whose key is too long once expanded is not reported: the record is skipped.
        if let Ok(key) = (Input { bytes: input.bytes, position: key_at }).string("a key") {
            self.found = Some(Found::Text(Text {
                begins: prefix.begins,
                value: starts..ends,
                database: self.database,
                key,
                expires_ms: prefix.expires_ms,
                usage: prefix.usage,
            }));
        }
        Ok(())
    }

    /// One item of the innermost sequence.
    fn item(&mut self, input: &mut Input<'_>) -> Result<Known, Trouble> {
        let Some(frame) = self.stack.last_mut() else { return Ok(Known) };
        let Some(item) = frame.items.get(frame.next) else {
            (frame.next, frame.times) = (0, frame.times.saturating_sub(1));
            if frame.times == 0 {
                self.stack.pop();
            }
            return Ok(Known);
        };
        let mut inner = None;
        match item {
            Item::Length => drop(input.number()?),
            Item::String => self.skip = input.string_to_skip()?,
            Item::Bytes(count) => self.skip = u64::from(*count),
            Item::Score => match input.array()? {
                [253..=255] => {} // not a number, and the infinities
                [count] => self.skip = u64::from(count),
            },
            Item::Times(items) => inner = Some((*items, input.number()?)),
            Item::Module => match input.number()? {
                MODULE_END => {}
                kind => {
                    self.skip = module_value(kind, input)?;
                    return Ok(Known); // the same item again
                }
            },
        }
        frame.next += 1;
        if let Some((items, times)) = inner {
            self.enter(items, times);
        }
        Ok(Known)
    }

    fn enter(&mut self, items: &'static [Item], times: u64) {
        debug_assert!(self.stack.len() < DEPTH_MAX);
        if times > 0 {
            self.stack.push(Frame { items, next: 0, times });
        }
    }
}

/// Adds keys to a database. `false`: there would be too many databases.
fn count(counts: &mut BTreeMap<u64, u64>, database: u64, keys: u64) -> bool {
    if keys > 0 {
        *counts.entry(database).or_default() += keys;
    }
    counts.len() <= DATABASES_MAX
}

/// Kinds of values that modules write: the end, signed and unsigned numbers, of four and eight bytes, strings.
pub(super) const MODULE_END: u64 = 0;
const MODULE_SIGNED: u64 = 1;
const MODULE_UNSIGNED: u64 = 2;
const MODULE_FLOAT: u64 = 3;
const MODULE_DOUBLE: u64 = 4;
const MODULE_STRING: u64 = 5;

/// How many bytes of it follow.
pub(super) fn module_value(kind: u64, input: &mut Input<'_>) -> Result<u64, Stop> {
    match kind {
        MODULE_SIGNED | MODULE_UNSIGNED => input.number().map(|_| 0),
        MODULE_FLOAT => Ok(4),
        MODULE_DOUBLE => Ok(8),
        MODULE_STRING => input.string_to_skip(),
        _ => Err(malformed("a module's value of an unknown kind")),
    }
}

/// An item was parsed.
struct Known;

/// Why an item was not parsed.
enum Trouble {
    Stop(Stop),
    Unknown(u8),
}

impl From<Stop> for Trouble {
    fn from(stop: Stop) -> Trouble {
        Trouble::Stop(stop)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use proptest::prelude::*;

    use super::super::Writer;
    use super::*;

    /// Everything that is found when the values are skipped instead of fed.
    fn scan(bytes: &[u8], piece: usize, least: u64) -> Result<Vec<Found>, ScanError> {
        scan_with(Scanner::new(least), bytes, piece)
    }

    fn scan_with(mut scanner: Scanner, bytes: &[u8], piece: usize) -> Result<Vec<Found>, ScanError> {
        let (mut at, mut all) = (0, Vec::new());
        while at < bytes.len() {
            let passed = scanner.skip((bytes.len() - at) as u64) as usize;
            at += passed;
            let end = bytes.len().min(at + piece);
            let (taken, found) = scanner.feed(&bytes[at..end])?;
            at += taken;
            if passed + taken == 0 && found.is_none() && scanner.skippable() == 0 {
                assert!(matches!(all.last(), Some(Found::End { .. })), "only the end stops it");
                break;
            }
            all.extend(found);
        }
        Ok(all)
    }

    /// A string in a snapshot.
    fn text(bytes: &[u8]) -> Vec<u8> {
        [&[bytes.len() as u8], bytes].concat()
    }

    #[test]
    fn long_strings_are_pointed_at_with_all_that_belongs_to_them() {
        let mut bytes = b"REDIS0011\xFA\x01a\x01b\xFE\x03\xFB\x05\x01".to_vec();
        let begins = bytes.len() as u64;
        bytes.extend(b"\xFC\x01\0\0\0\0\0\0\0\xF8\x07\x00\x03key\x0Avvvvvvvvvv");
        let second = bytes.len() as u64;
        bytes.extend(b"\xFD\x02\0\0\0\xF9\x09\x00\xC1\x39\x30\x0Awwwwwwwwww");
        let third = bytes.len() as u64;
        // Too short, a number, and a compressed one.
        bytes.extend(b"\x00\x01s\x02no\x00\x01i\xC0\x05\x00\x01z\xC3\x05\x28\x000\xE0\x1E\x00");
        let end = bytes.len() as u64;
        bytes.extend([0xFF, 0, 0, 0, 0, 0, 0, 0, 0]);
        let one = Text {
            begins,
            value: second - 10..second,
            database: 3,
            key: b"key".to_vec(),
            expires_ms: Some(1),
            usage: Some(Usage::Idle(7)),
        };
        let other = Text {
            begins: second,
            value: third - 10..third,
            database: 3,
            key: b"12345".to_vec(),
            expires_ms: Some(2000),
            usage: Some(Usage::Frequency(9)),
        };
        for piece in 1..bytes.len() {
            let found = scan(&bytes, piece, 10).unwrap();
            assert_eq!(found, [Found::Text(one.clone()), Found::Text(other.clone()), Found::End { at: end }]);
        }
    }

    /// One value of each type, as the servers write it, byte by byte after their own savers.
    fn values() -> Vec<(Magic, u8, Vec<u8>)> {
        let (id, time) = ([7; 16], [9; 8]);
        let packed = text(b"any string will do: it is not looked into");
        let list = [&[2][..], &text(b"one"), &text(b"two")].concat();
        let consumer = |extra: &[u8]| [&[1][..], &text(b"consumer"), &time, extra, &[2], &id, &id].concat();
        let pending = [&[2][..], &id, &time, &[3], &id, &time, &[0x40, 100]].concat();
        let nodes = [&[1][..], &text(&id), &packed].concat();
        let stream = |counters: usize, group: usize, extra: &[u8]| {
            let counts = vec![5; counters];
            let group = [&[1][..], &text(b"group"), &vec![6; group], &pending, &consumer(extra)].concat();
            [&nodes[..], &counts, &group].concat()
        };
        let metadata =
            [&time[..], &[2, 0], &text(b"field"), &text(b"value"), &[0x41, 0], &text(b"f"), &text(b"v")].concat();
        let module = b"\x81\0\0\0\0\0\0\0\x02\x01\x05\x02\x40\x50\x03abcd\x04abcdefgh\x05\x03xyz\x05\xC0\x01\x00";
        let mut all = Vec::new();
        let mut both = |kind, value: &[u8]| {
            for magic in [Magic::Redis, Magic::Valkey] {
                all.push((magic, kind, value.to_vec()));
            }
        };
        both(1, &list);
        both(2, &list);
        both(3, &[&[3][..], &text(b"a"), &[3], b"1.5", &text(b"b"), &[255], &text(b"c"), &[253]].concat());
        both(4, &[&[1][..], &text(b"field"), &text(b"value")].concat());
        both(5, &[&[1][..], &text(b"member"), &time].concat());
        both(7, module);
        for kind in [9, 10, 11, 12, 13, 16, 17, 20] {
            both(kind, &packed);
        }
        both(14, &list);
        both(18, &[&[2, 1][..], &text(b"plain"), &[2], &text(b"packed")].concat());
        both(15, &stream(3, 2, &[]));
        both(19, &stream(8, 3, &[]));
        both(21, &stream(8, 3, &time));
        both(1, &[0]); // empty
        all.push((Magic::Valkey, 22, [&[1][..], &text(b"field"), &text(b"value"), &time].concat()));
        all.push((Magic::Redis, 24, metadata));
        all.push((Magic::Redis, 25, [&time[..], &packed].concat()));
        all
    }

    #[test]
    fn the_end_of_every_type_is_found_however_its_bytes_arrive() {
        for (magic, kind, value) in values() {
            let head = if magic == Magic::Redis { b"REDIS0012" } else { b"VALKEY080" };
            let mut bytes = [&head[..], &[kind], &text(b"key"), &value].concat();
            let begins = bytes.len() as u64;
            bytes.extend(b"\x00\x04next\x05value\xFF\0\0\0\0\0\0\0\0");
            for piece in 1..bytes.len() {
                let found = scan(&bytes, piece, 1).unwrap_or_else(|error| panic!("type {kind}: {error}"));
                let [Found::Text(next), Found::End { .. }] = &found[..] else { panic!("type {kind}: {found:?}") };
                assert_eq!((next.begins, &next.key[..]), (begins, &b"next"[..]), "type {kind} in pieces of {piece}");
            }
        }
    }

    #[test]
    fn what_stands_between_keys_is_passed_over() {
        let bytes = [
            &b"REDIS0011\xFA\x01a\xC0\x05\xF5\x05#!lua"[..],
            b"\xF7\x81\0\0\0\0\0\0\0\x02\x02\x01\x05\x02ab\x00\xF4\x01\x02\x03\xFE\x00\xFB\x01\x00",
            b"\x00\x01k\x01v\xFF\0\0\0\0\0\0\0\0",
        ]
        .concat();
        for piece in 1..bytes.len() {
            let found = scan(&bytes, piece, 1).unwrap();
            assert!(matches!(&found[..], [Found::Text(text), Found::End { .. }] if text.key == b"k"), "{found:?}");
        }
    }

    #[test]
    fn the_keys_of_each_database_are_counted_once_however_they_are_read() {
        let mut writer = Writer::new(11);
        for (database, keys) in [(3, 2), (0, 1), (3, 4), (5, 0), (7, 5)] {
            writer.select_db(database);
            for key in 0..keys {
                writer.string(format!("{database} {key}"), vec![b'v'; key * 40], None);
            }
        }
        let bytes = [&writer.finish()[..]].concat();
        let wanted = BTreeMap::from([(0, 1), (3, 6), (7, 5)]);
        for (piece, runs) in [(1, false), (7, true), (64, true), (1000, false), (1000, true)] {
            let mut scanner = if runs { Scanner::of_runs(100) } else { Scanner::new(100) };
            for piece in bytes.chunks(piece) {
                let mut rest = piece;
                while !rest.is_empty() {
                    let (taken, _) = scanner.feed(rest).unwrap();
                    rest = &rest[taken..];
                }
            }
            assert_eq!(scanner.keys(), Some(wanted.clone()), "in pieces of {piece}, runs: {runs}");
        }
        let many: Vec<u8> = (0..=DATABASES_MAX as u32 + 1)
            .flat_map(|number| [&[0xFE, 0x80][..], &number.to_be_bytes(), b"\x00\x01k\x01v"].concat())
            .collect();
        let mut scanner = Scanner::new(100);
        scanner.feed(&[b"REDIS0011", &many[..]].concat()).unwrap();
        assert_eq!(scanner.keys(), None);
    }

    #[test]
    fn an_unknown_type_is_named_with_its_place_and_damage_with_its_kind() {
        for (bytes, code) in
            [(&b"REDIS0011\x06"[..], 6), (b"REDIS0012\x16", 22), (b"VALKEY080\x18", 24), (b"REDIS0011\xF6", 0xF6)]
        {
            assert_eq!(scan(bytes, 64, 1), Err(ScanError::Unknown { code, at: 9 }));
        }
        for bytes in [
            &b"REDIS0011\xFE\xC0"[..],     // an encoding for a length
            b"REDIS0011\x01\x01k\xC1",     // the same, of a list
            b"REDIS0011\x00\x01k\xC9",     // a string of no encoding
            b"REDIS0011\x07\x01k\x01\x06", // a module's value of no kind
            b"REDIS0011\x00\x01k\x82",     // a length of no encoding
            b"REDIS0011\x00\x01k\x81\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF",
            b"VALKEY011",
            b"RADIS0011",
        ] {
            assert!(matches!(scan(bytes, 64, 1), Err(ScanError::Damaged { .. })), "{bytes:?}");
        }
    }

    #[test]
    fn a_string_with_a_very_long_key_is_passed_over() {
        let long = vec![b'k'; STRING_BYTES_MAX + 1];
        let mut writer = Writer::new(11);
        writer.string(&long, "value", None).string(&long[1..], "value", None);
        let found = scan(&writer.finish(), 100, 1).unwrap();
        assert!(matches!(&found[..], [Found::Text(text), _] if text.key.len() == STRING_BYTES_MAX), "{}", found.len());
    }

    proptest! {
        #[test]
        fn strings_are_found_where_they_were_written(
            strings in proptest::collection::vec((proptest::collection::vec(any::<u8>(), 0..300), 0_usize..3000, any::<Option<u32>>()), 0..20),
            piece in 1_usize..2000,
            least in 0_u64..2000,
        ) {
            let mut writer = Writer::new(11);
            writer.aux("a", "b").select_db(7);
            for (key, length, expires) in &strings {
                writer.string(key, vec![b'v'; *length], expires.map(u64::from));
            }
            let bytes = writer.finish();
            let mut found = scan(&bytes, piece, least).unwrap();
            prop_assert_eq!(found.pop(), Some(Found::End { at: bytes.len() as u64 - TAIL_BYTES as u64 }));
            let wanted: Vec<_> = strings.iter().filter(|(_, length, _)| *length as u64 >= least).collect();
            prop_assert_eq!(found.len(), wanted.len());
            for (found, (key, length, expires)) in found.iter().zip(wanted) {
                let Found::Text(text) = found else { panic!("{found:?}") };
                prop_assert_eq!((&text.key, text.database), (key, 7));
                prop_assert_eq!(text.expires_ms, expires.map(i64::from));
                let value = &bytes[text.value.start as usize..text.value.end as usize];
                prop_assert_eq!(value, &vec![b'v'; *length][..]);
            }
        }

        #[test]
        fn runs_and_reports_have_every_string_once(
            records in proptest::collection::vec((proptest::collection::vec(any::<u8>(), 0..300), 0_usize..800, any::<Option<u32>>(), any::<bool>()), 0..30),
            piece in 1_usize..3000,
        ) {
            let (mut writer, mut wanted) = (Writer::new(11), Vec::new());
            writer.select_db(7);
            for (key, length, expires, compressed) in &records {
                writer.string(key, vec![b'v'; *length], expires.map(u64::from));
                wanted.push(*length);
                if *compressed {
                    writer.select_db(7);
                }
            }
            let bytes = writer.finish();
            let (mut found, mut alone, mut end) = (0, 0, 9);
            for one in scan_with(Scanner::of_runs(500), &bytes, piece).unwrap() {
                match one {
                    Found::Run(run) => {
                        prop_assert!(run.bytes.start >= end);
                        let run_bytes = &bytes[run.bytes.start as usize..run.bytes.end as usize];
                        let mut within = Records::new(run_bytes, 500);
                        prop_assert_eq!((within.by_ref().count() as u64, run.database), (run.keys, 7));
                        prop_assert_eq!(within.taken(), run_bytes.len());
                        found += run.keys as usize;
                        end = run.bytes.end;
                    }
                    Found::Text(text) => {
                        prop_assert!(text.begins >= end);
                        alone += 1;
                        end = text.value.end;
                    }
                    Found::End { at } => prop_assert_eq!(at, bytes.len() as u64 - TAIL_BYTES as u64),
                }
            }
            prop_assert_eq!(alone, wanted.iter().filter(|length| **length >= 500).count());
            // Those that a piece cuts are in no run: at most one for each piece.
            let short = wanted.len() - alone;
            prop_assert!(found <= short && found + bytes.len() / piece + 1 >= short, "{found} of {short}");
        }

        #[test]
        fn any_bytes_are_understood_the_same_however_they_are_cut(bytes in proptest::collection::vec(any::<u8>(), 0..400), piece in 1_usize..50) {
            let bytes = [b"REDIS0012", &bytes[..]].concat();
            prop_assert_eq!(scan(&bytes, piece, 1), scan(&bytes, bytes.len(), 1));
        }
    }
}
