//! Converter: rewrites a snapshot, as its bytes arrive, for a server of another family or an older version.
//!
//! ```text
//!   VALKEY080 │ FA … │ FE 0 │ 22 key … │ 20 key <listpack> │ 00 key value │ FF checksum          Valkey 9.1
//!        ▼                    ▼          ▼                   ▼                  ▼
//!   REDIS0012 │ FA … │ FE 0 │ 24 key … │ 20 key <listpack> │ 00 key value │ FF 0                 Redis 8.2
//!   REDIS0009 │ FA … │ FE 0 │ refused  │  2 key members…   │ 00 key value │ FF 0                 Redis 6.2
//! ```
//!
//! The two families number their types alike up to 21, and read the same stream of commands. What keeps one from
//! following the other is the head of the snapshot, and the types that only one of them knows. The converter writes
//! the head that the target reads, and each value in a type that the target knows. Values of other types pass through
//! as they are.
//!
//! Memory is bounded by one listpack, or one field of a hash, and not by a key: a list of a million nodes is converted
//! node by node. A value that has no form at the target is a [`ConvertError::Refused`] that names its key, or is left
//! out and counted if [`Options`] say so. A [`Converter::survey`] finds all of them without writing anything.

use std::collections::BTreeMap;

use super::expand_lzf;
use super::magic;
use super::malformed;
use super::put_length;
use super::read_magic;
use super::records;
use super::records::{Damaged, Item, Listpack, PackedElement, ziplist};
use super::scan::{MODULE_END, module_value};
use super::too_long;
use super::{
    Error, Head, Input, Length, Magic, OPCODE_AUX, OPCODE_EOF, OPCODE_EXPIRETIME, OPCODE_EXPIRETIME_MS, OPCODE_FREQ,
    OPCODE_FUNCTION, OPCODE_IDLE, OPCODE_MODULE_AUX, OPCODE_RESIZEDB, OPCODE_SELECTDB, OPCODE_SLOT_INFO,
    STRING_BYTES_MAX, Stop, TAIL_BYTES,
};

/// Longest listpack, ziplist or element that is rewritten, in bytes: servers bound a listpack to 1 GiB.
const REWRITTEN_BYTES_MAX: u64 = 1 << 30;

/// Bytes added at a time to an item that was cut off: most items are shorter.
const CARRY_STEP: usize = 64;

/// Groups in streams contain consumers, which contain ids: three levels, and one for the value itself.
const DEPTH_MAX: usize = 4;

/// The type of a module's value.
const TYPE_MODULE: u8 = 7;

/// The encoding of a compressed string.
const COMPRESSED: u8 = 3;

/// A conversion of one snapshot. See the module docs.
#[derive(Debug)]
pub struct Converter {
    to: Format,
    options: Options,
    /// Whether obstacles are counted instead of refused, and nothing is written.
    survey: bool,
    /// Position of the next byte that is not parsed yet.
    at: u64,
    /// Bytes from `at` on that belong to one string, and where they go.
    pass: (u64, To),
    /// A string that is collected to be rewritten.
    collecting: Option<Collecting>,
    /// Bytes from `at` on that were already fed: the beginning of an item that was cut off.
    carry: Vec<u8>,
    state: State,
    stack: Vec<Frame>,
    magic: Magic,
    database: u64,
    /// The attributes before the next key, which are written with it.
    prefix: Vec<u8>,
    /// The key of the value that is being read, or its beginning.
    key: Vec<u8>,
    /// Whether the value that is being read is left out.
    skipping: bool,
    /// What the times of a hash's fields count from, and the time of the present one.
    field_time: (u64, i64),
    /// A field and its value, as they are written.
    held: Vec<u8>,
    /// Whether the node of a list is one long element.
    is_plain_node: bool,
    done: Converted,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Magic,
    Records,
    /// The end mark was read; so many bytes of the checksum are still to come.
    Tail(u64),
}

/// Where the bytes of a string go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum To {
    Out,
    Held,
    Nowhere,
}

/// A string of which all bytes are needed.
#[derive(Debug)]
struct Collecting {
    bytes: Vec<u8>,
    length: usize,
    /// Its length once it is expanded, if it is compressed.
    expanded: Option<usize>,
    to: Rewriting,
}

#[derive(Debug, Clone, Copy)]
enum Rewriting {
    Form(Form),
    Node,
}

/// A sequence of items or parts, and how many more times it repeats.
#[derive(Debug)]
struct Frame {
    items: Items,
    next: usize,
    times: u64,
}

#[derive(Debug, Clone, Copy)]
enum Items {
    Same(&'static [Item]),
    Changed(&'static [Part]),
}

/// What comes next in a value.
enum Next {
    Same(&'static Item),
    Changed(&'static Part),
}

impl Converter {
    /// A conversion for a server that reads this format.
    pub fn new(to: Format, options: Options) -> Converter {
        Converter {
            to,
            options,
            survey: false,
            at: 0,
            pass: (0, To::Nowhere),
            collecting: None,
            carry: Vec::new(),
            state: State::Magic,
            stack: Vec::with_capacity(DEPTH_MAX),
            magic: Magic::Redis,
            database: 0,
            prefix: Vec::new(),
            key: Vec::new(),
            skipping: false,
            field_time: (0, NEVER),
            held: Vec::new(),
            is_plain_node: false,
            done: Converted::default(),
        }
    }

    /// Reads a snapshot only to find what its target can't hold ([`Converted::obstacles`]).
    pub fn survey(to: Format) -> Converter {
        Converter { survey: true, ..Converter::new(to, Options::default()) }
    }

    /// What was converted so far.
    pub fn done(&self) -> &Converted {
        &self.done
    }

    /// Whether the end of the snapshot was read.
    pub fn is_over(&self) -> bool {
        self.state == State::Tail(0)
    }

    /// Takes the next bytes of the snapshot, and appends what the target is given of them. All of `input` is taken.
    ///
    /// # Errors
    /// [`ConvertError`]; what was appended by then ends in the middle of a record, and nothing is converted after it.
    pub fn convert(&mut self, input: &[u8], out: &mut Vec<u8>) -> Result<(), ConvertError> {
        let mut rest = input;
        loop {
            rest = self.pass_on(rest, out)?;
            if rest.is_empty() {
                return Ok(());
            }
            let taken = if self.carry.is_empty() {
                match self.step(rest, out)? {
                    Some(taken) => taken,
                    None => {
                        self.carry.extend_from_slice(rest);
                        return Ok(());
                    }
                }
            } else {
                let more = rest.get(..CARRY_STEP).unwrap_or(rest);
                let before = self.carry.len();
                let mut carry = std::mem::take(&mut self.carry);
                carry.extend_from_slice(more);
                match self.step(&carry, out)? {
                    Some(taken) => taken - before,
                    None => {
                        self.carry = carry;
                        more.len()
                    }
                }
            };
            rest = rest.get(taken..).unwrap_or_default();
        }
    }

    /// Takes the bytes that belong to a string, whatever they are. Returns the rest.
    fn pass_on<'i>(&mut self, input: &'i [u8], out: &mut Vec<u8>) -> Result<&'i [u8], ConvertError> {
        let (bytes, to) = self.pass;
        let count = usize::try_from(bytes).unwrap_or(usize::MAX).min(input.len());
        let (passed, mut rest) = input.split_at(count);
        match to {
            To::Out => self.put(out, passed),
            To::Held => self.held.extend_from_slice(passed),
            To::Nowhere => {}
        }
        self.pass.0 -= count as u64;
        self.at += count as u64;
        if let Some(mut collecting) = self.collecting.take() {
            let missing = collecting.length - collecting.bytes.len();
            let (taken, after) = rest.split_at(missing.min(rest.len()));
            collecting.bytes.extend_from_slice(taken);
            self.at += taken.len() as u64;
            rest = after;
            if collecting.bytes.len() < collecting.length {
                self.collecting = Some(collecting);
            } else {
                self.rewrite(collecting, out).map_err(|trouble| self.failed(trouble))?;
            }
        }
        Ok(rest)
    }

    /// Parses one item at the beginning of `bytes` and returns its length; `None` if the item is cut off.
    fn step(&mut self, bytes: &[u8], out: &mut Vec<u8>) -> Result<Option<usize>, ConvertError> {
        let mut input = Input { bytes, position: 0 };
        let result = match (self.state, self.stack.is_empty()) {
            (State::Magic, _) => self.head(&mut input, out),
            (State::Tail(left), _) => {
                // The target's checksum was written in its place.
                let Some(left) = left.checked_sub(1) else {
                    return Err(self.failed(malformed("bytes behind its end").into()));
                };
                (self.state, input.position) = (State::Tail(left), 1);
                Ok(())
            }
            (State::Records, true) => self.record(&mut input, out),
            (State::Records, false) => self.part(&mut input, out),
        };
        match result {
            Ok(()) => {
                self.at += input.position as u64;
                Ok(Some(input.position))
            }
            Err(Trouble::Stop(Stop::Incomplete)) => Ok(None),
            Err(trouble) => Err(self.failed(trouble)),
        }
    }

    fn failed(&self, trouble: Trouble) -> ConvertError {
        let key = self.key.get(..SHOWN_KEY_BYTES).unwrap_or(&self.key).to_vec();
        match trouble {
            Trouble::Stop(Stop::Broken(error)) => ConvertError::Damaged { at: self.at, error },
            Trouble::Stop(Stop::Incomplete) => {
                ConvertError::Damaged { at: self.at, error: Error::Malformed { what: "a value that is cut off" } }
            }
            Trouble::Unknown(code) => ConvertError::Unknown { code, at: self.at, key, database: self.database },
            Trouble::Refused(what) => ConvertError::Refused { what, key, database: self.database },
        }
    }

    /// Appends bytes of the value or the field that is being read, unless it is left out.
    fn put(&self, out: &mut Vec<u8>, bytes: &[u8]) {
        if !self.skipping && !self.survey {
            out.extend_from_slice(bytes);
        }
    }

    fn put_number(&self, out: &mut Vec<u8>, number: u64) {
        if !self.skipping && !self.survey {
            put_length(out, number);
        }
    }

    fn head(&mut self, input: &mut Input<'_>, out: &mut Vec<u8>) -> Result<(), Trouble> {
        (self.magic, _) = read_magic(input)?;
        self.state = State::Records;
        self.put(out, magic(self.to.0).unwrap_or_default().as_bytes());
        Ok(())
    }

    /// The beginning of a record: of an attribute before a key, of a field between keys, or of a key.
    fn record(&mut self, input: &mut Input<'_>, out: &mut Vec<u8>) -> Result<(), Trouble> {
        self.skipping = false;
        let [code] = input.array()?;
        match code {
            OPCODE_EXPIRETIME_MS => drop(input.take(8)?),
            OPCODE_EXPIRETIME => drop(input.take(4)?),
            OPCODE_IDLE => drop(input.number()?),
            OPCODE_FREQ => drop(input.take(1)?),
            OPCODE_SELECTDB => {
                self.database = input.number()?;
                self.key.clear();
                self.put(out, input.bytes.get(..input.position).unwrap_or_default());
                return Ok(());
            }
            OPCODE_EOF => {
                self.state = State::Tail(TAIL_BYTES as u64 - 1);
                // No checksum: the bytes were checked where they came from.
                self.put(out, &[OPCODE_EOF, 0, 0, 0, 0, 0, 0, 0, 0]);
                return Ok(());
            }
            _ if records::aside(code).is_some() => return self.aside(code, input, out),
            _ => return self.key(code, input, out),
        }
        self.prefix.extend_from_slice(input.bytes.get(..input.position).unwrap_or_default());
        Ok(())
    }

    /// What follows an opcode, and carries nothing about keys.
    fn aside(&mut self, code: u8, input: &mut Input<'_>, out: &mut Vec<u8>) -> Result<(), Trouble> {
        self.key.clear();
        // Items that are read here.
        let mut read = 0;
        match code {
            // A hint, which servers of other versions do not know.
            OPCODE_SLOT_INFO => self.skipping = true,
            OPCODE_FUNCTION if !self.to.has_functions() => {
                self.obstacle(Obstacle::Functions, self.options.skip_functions)?;
                self.skipping = true;
            }
            OPCODE_MODULE_AUX => {
                let name = module_name(input.number()?);
                read = 1;
                self.obstacle(Obstacle::Module(name), self.options.skip_modules)?;
                self.skipping = true;
            }
            OPCODE_AUX | OPCODE_RESIZEDB | OPCODE_FUNCTION => {}
            _ => return Err(Trouble::Unknown(code)),
        }
        self.put(out, &[code]);
        self.enter(Items::Same(records::aside(code).unwrap_or_default()), 1);
        self.pass_items(read);
        Ok(())
    }

    /// A key, and the type of its value.
    fn key(&mut self, code: u8, input: &mut Input<'_>, out: &mut Vec<u8>) -> Result<(), Trouble> {
        let key_at = input.position;
        let length = input.string_to_skip()?;
        if length <= STRING_BYTES_MAX as u64 {
            input.take(length as usize)?;
        }
        let end = input.position;
        self.key = (Input { bytes: input.bytes, position: key_at }).string("a key").unwrap_or_default();
        let mut read = 0;
        let way = way(code, self.magic, self.to).ok_or(Trouble::Unknown(code))?;
        let (kind, items) = match way {
            Way::Same(items) => (code, Items::Same(items)),
            Way::Changed(kind, parts) => (kind, Items::Changed(parts)),
            Way::Without(obstacle, kind, parts) => {
                self.obstacle(obstacle, self.options.drop_field_expiry)?;
                (kind, Items::Changed(parts))
            }
        };
        if code == TYPE_MODULE {
            // A key of more bytes than are read hides it.
            let mut name = String::new();
            if length <= STRING_BYTES_MAX as u64 {
                name = module_name(input.number()?);
                read = 1;
            }
            self.obstacle(Obstacle::Module(name), self.options.skip_modules)?;
            self.skipping = true;
        }
        if kind != code {
            *self.done.changed.entry((code, kind)).or_default() += 1;
        }
        self.done.keys += 1;
        let prefix = std::mem::take(&mut self.prefix);
        self.put(out, &prefix);
        self.put(out, &[kind]);
        self.put(out, input.bytes.get(key_at..end).unwrap_or_default());
        if length > STRING_BYTES_MAX as u64 {
            self.pass = (length, To::Out);
        }
        self.enter(items, 1);
        self.pass_items(read);
        Ok(())
    }

    /// Counts what the target can't hold. Refuses it, unless it may be left out.
    fn obstacle(&mut self, what: Obstacle, may_be_left_out: bool) -> Result<(), Trouble> {
        if !self.survey && !may_be_left_out {
            return Err(Trouble::Refused(what));
        }
        let found = self.done.obstacles.entry(what).or_default();
        found.count += 1;
        if found.keys.len() < SAMPLE_KEYS && !self.key.is_empty() {
            let shown = self.key.get(..SHOWN_KEY_BYTES).unwrap_or(&self.key);
            found.keys.push((self.database, shown.to_vec()));
        }
        Ok(())
    }

    fn enter(&mut self, items: Items, times: u64) {
        debug_assert!(self.stack.len() < 2 * DEPTH_MAX);
        if times > 0 {
            self.stack.push(Frame { items, next: 0, times });
        }
    }

    /// Goes on behind items of the sequence just entered.
    fn pass_items(&mut self, read: usize) {
        if let Some(frame) = self.stack.last_mut() {
            frame.next = read;
        }
    }

    /// One item or part of the innermost sequence.
    fn part(&mut self, input: &mut Input<'_>, out: &mut Vec<u8>) -> Result<(), Trouble> {
        let Some(frame) = self.stack.last_mut() else { return Ok(()) };
        let next = match frame.items {
            Items::Same(items) => items.get(frame.next).map(Next::Same),
            Items::Changed(parts) => parts.get(frame.next).map(Next::Changed),
        };
        let Some(next) = next else {
            (frame.next, frame.times) = (0, frame.times.saturating_sub(1));
            if frame.times == 0 {
                self.stack.pop();
            }
            return Ok(());
        };
        let at = self.stack.len() - 1;
        let again = match next {
            Next::Same(item) => self.same(item, input, out)?,
            Next::Changed(part) => {
                self.changed(part, input, out)?;
                false
            }
        };
        // What was entered stands above it.
        if !again && let Some(frame) = self.stack.get_mut(at) {
            frame.next += 1;
        }
        Ok(())
    }

    /// An item that is the same at the target. Returns whether the same item comes once more.
    fn same(&mut self, item: &'static Item, input: &mut Input<'_>, out: &mut Vec<u8>) -> Result<bool, Trouble> {
        let (mut pass, mut inner, mut again) = (0, None, false);
        match item {
            Item::Length => drop(input.number()?),
            Item::String => pass = input.string_to_skip()?,
            Item::Bytes(count) => pass = u64::from(*count),
            Item::Score => match input.array()? {
                [253..=255] => {} // not a number, and the infinities
                [count] => pass = u64::from(count),
            },
            Item::Times(items) => inner = Some((*items, input.number()?)),
            Item::Module => match input.number()? {
                MODULE_END => {}
                kind => {
                    pass = module_value(kind, input)?;
                    again = true;
                }
            },
        }
        self.put(out, input.bytes.get(..input.position).unwrap_or_default());
        self.pass = (pass, To::Out);
        if let Some((items, times)) = inner {
            self.enter(Items::Same(items), times);
        }
        Ok(again)
    }

    /// A part that is written in another way.
    fn changed(&mut self, part: &'static Part, input: &mut Input<'_>, out: &mut Vec<u8>) -> Result<(), Trouble> {
        match part {
            Part::Same(items) => self.enter(Items::Same(items), 1),
            Part::All(parts) => self.enter(Items::Changed(parts), 1),
            Part::LeaveNumber => drop(input.number()?),
            Part::LeaveString => self.pass = (input.string_to_skip()?, To::Nowhere),
            Part::LeaveTimes(parts) => {
                let times = input.number()?;
                self.enter(Items::Changed(parts), times);
            }
            Part::LeaveBytes(count) => self.pass = (u64::from(*count), To::Nowhere),
            Part::Times(parts) => {
                let times = input.number()?;
                self.put(out, input.bytes.get(..input.position).unwrap_or_default());
                self.enter(Items::Changed(parts), times);
            }
            Part::Rewrite(form) => self.collect(Rewriting::Form(*form), input)?,
            Part::NodeKind => {
                self.is_plain_node = match input.number()? {
                    1 => true,
                    2 => false,
                    _ => return Err(malformed("a node of a list of an unknown kind").into()),
                };
            }
            Part::Node => self.collect(Rewriting::Node, input)?,
            Part::Base => self.field_time.0 = u64::from_le_bytes(input.array()?),
            Part::PutBase => self.put(out, &FIELD_TIME_BASE.to_le_bytes()),
            Part::FieldTime => {
                let base = self.field_time.0;
                self.field_time.1 = match input.number()? {
                    0 => NEVER,
                    time => (time - 1)
                        .checked_add(base)
                        .and_then(|time| i64::try_from(time).ok())
                        .ok_or_else(|| malformed("the time of a field"))?,
                };
            }
            Part::PutFieldTime => self.put(out, &self.field_time.1.to_le_bytes()),
            Part::Hold => {
                let bytes = input.string_to_skip()?;
                if bytes > REWRITTEN_BYTES_MAX {
                    return Err(too_long("a field", bytes, REWRITTEN_BYTES_MAX as usize).into());
                }
                self.held.extend_from_slice(input.bytes.get(..input.position).unwrap_or_default());
                self.pass = (bytes, To::Held);
            }
            Part::HeldTime => {
                let time = match i64::from_le_bytes(input.array()?) {
                    NEVER => 0,
                    time => u64::try_from(time)
                        .ok()
                        .and_then(|time| (time + 1).checked_sub(FIELD_TIME_BASE))
                        .ok_or_else(|| malformed("the time of a field"))?,
                };
                self.put_number(out, time);
                let held = std::mem::take(&mut self.held);
                self.put(out, &held);
            }
        }
        Ok(())
    }

    /// The beginning of a string of which all bytes are needed.
    fn collect(&mut self, to: Rewriting, input: &mut Input<'_>) -> Result<(), Trouble> {
        let (length, expanded) = match input.length()? {
            Length::Plain(length) => (length, None),
            Length::Special(COMPRESSED) => (input.number()?, Some(input.number()?)),
            Length::Special(_) => return Err(malformed("a number in place of a listpack").into()),
        };
        let longest = length.max(expanded.unwrap_or_default());
        if longest > REWRITTEN_BYTES_MAX {
            return Err(too_long("a listpack", longest, REWRITTEN_BYTES_MAX as usize).into());
        }
        let (length, expanded) = (length as usize, expanded.map(|length| length as usize));
        self.collecting = Some(Collecting { bytes: Vec::new(), length, expanded, to });
        Ok(())
    }

    /// Writes a string that is there as a whole in its new form.
    fn rewrite(&self, collected: Collecting, out: &mut Vec<u8>) -> Result<(), Trouble> {
        let bytes = match collected.expanded {
            None => collected.bytes,
            Some(length) => expand_lzf(&collected.bytes, length)
                .ok_or_else(|| malformed("a compressed string that does not expand"))?,
        };
        if self.skipping || self.survey {
            return Ok(());
        }
        match collected.to {
            Rewriting::Form(form) => put_form(form, &Listpack::open(&bytes)?.collect::<Result<Vec<_>, _>>()?, out)?,
            Rewriting::Node => {
                let node = if self.is_plain_node {
                    ziplist([Ok(PackedElement::Text(&bytes))].into_iter())?
                } else {
                    ziplist(Listpack::open(&bytes)?)?
                };
                put_length(out, node.len() as u64);
                out.extend_from_slice(&node);
            }
        }
        Ok(())
    }
}

// The formats of targets, and what a conversion says.

/// The version of the format that a server reads, which is the newest one that it writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Format(pub(super) u32);

impl Format {
    /// Redis 5 and 6.
    pub const REDIS_6: Format = Format(9);
    /// Redis 7.0.
    pub const REDIS_7_0: Format = Format(10);
    /// Redis 7.2, and Valkey 7.2 to 8.1.
    pub const COMMON: Format = Format(11);
    /// Redis 7.4 to 8.4.
    pub const REDIS_7_4: Format = Format(12);
    /// Redis 8.6.
    pub const REDIS_8_6: Format = Format(13);
    /// Valkey 9.
    pub const VALKEY_9: Format = Format(80);

    /// The format of a server of this family and version, given as `(major, minor)`.
    pub fn of_server(is_valkey: bool, version: (u32, u32)) -> Format {
        match (is_valkey, version) {
            (true, (9.., _)) => Format::VALKEY_9,
            (true, _) | (false, (7, 2..4)) => Format::COMMON,
            (false, (..7, _)) => Format::REDIS_6,
            (false, (7, ..2)) => Format::REDIS_7_0,
            (false, (7, _) | (8, ..6)) => Format::REDIS_7_4,
            (false, _) => Format::REDIS_8_6,
        }
    }

    /// Whether a server that reads this format reads a snapshot that begins so, without conversion.
    pub fn reads(self, head: &Head) -> bool {
        match (self.family(), head.magic) {
            (Magic::Redis, Magic::Redis) => head.version <= self.0,
            (Magic::Valkey, Magic::Redis) => head.version <= Format::COMMON.0,
            (Magic::Valkey, Magic::Valkey) => true,
            (Magic::Redis, Magic::Valkey) => false,
        }
    }

    fn family(self) -> Magic {
        if self >= Format::VALKEY_9 { Magic::Valkey } else { Magic::Redis }
    }

    /// Whether values of this type can be read.
    fn knows(self, kind: u8) -> bool {
        match kind {
            ..=5 | 9..=15 => true,
            16..=19 => self >= Format::REDIS_7_0,
            20 | 21 => self >= Format::COMMON,
            22 => self.family() == Magic::Valkey,
            24 | 25 => self >= Format::REDIS_7_4 && self.family() == Magic::Redis,
            26 => self >= Format::REDIS_8_6 && self.family() == Magic::Redis,
            _ => false,
        }
    }

    fn has_functions(self) -> bool {
        self >= Format::REDIS_7_0
    }
}

/// What is left out instead of refused, because a person has said so.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Options {
    /// The times at which fields of hashes expire, for a server that knows none: such fields stay for ever.
    pub drop_field_expiry: bool,
    /// Keys of modules' types, and what modules wrote beside keys.
    pub skip_modules: bool,
    /// Libraries of functions, for a server that knows none.
    pub skip_functions: bool,
}

/// What a target can't hold.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, thiserror::Error)]
pub enum Obstacle {
    /// Hashes whose fields expire.
    #[error("a hash whose fields expire")]
    FieldExpiry,
    /// A module's type, by its name.
    #[error("a value of the module type {0:?}")]
    Module(String),
    /// A library of functions.
    #[error("a library of functions")]
    Functions,
}

/// Why a conversion can't continue.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ConvertError {
    /// The target has no form for this.
    #[error("{what} can't be given to the server{}", shown_key(key, *database))]
    Refused {
        /// What it is.
        what: Obstacle,
        /// The beginning of its key; empty if it is beside the keys.
        key: Vec<u8>,
        /// Its database.
        database: u64,
    },
    /// A type or an opcode of a server that is newer than this program, or that was never released.
    #[error("the snapshot holds something of an unknown type, {code}, at byte {at}{}", shown_key(key, *database))]
    Unknown {
        /// The number of the type.
        code: u8,
        /// Its position.
        at: u64,
        /// The key before it; empty if there is none.
        key: Vec<u8>,
        /// The database.
        database: u64,
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

fn shown_key(key: &[u8], database: u64) -> String {
    if key.is_empty() {
        String::new()
    } else {
        format!(" (key {:?} of database {database})", String::from_utf8_lossy(key))
    }
}

/// What a conversion has done so far.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Converted {
    /// Keys that were read.
    pub keys: u64,
    /// Keys that were written in another type, by the numbers of both types.
    pub changed: BTreeMap<(u8, u8), u64>,
    /// What the target can't hold: how often, and the keys of the first ones.
    pub obstacles: BTreeMap<Obstacle, Obstacles>,
}

/// How often a snapshot holds something that its target can't hold.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Obstacles {
    /// How many keys; or libraries or fields beside keys.
    pub count: u64,
    /// The first [`SAMPLE_KEYS`] keys, with their databases.
    pub keys: Vec<(u64, Vec<u8>)>,
}

/// Keys that are named of each kind of obstacle.
pub const SAMPLE_KEYS: usize = 5;

/// Bytes of a key that a message shows.
const SHOWN_KEY_BYTES: usize = 128;

/// Why an item was not parsed.
enum Trouble {
    Stop(Stop),
    Unknown(u8),
    Refused(Obstacle),
}

impl From<Stop> for Trouble {
    fn from(stop: Stop) -> Trouble {
        Trouble::Stop(stop)
    }
}

impl From<Damaged> for Trouble {
    fn from(_: Damaged) -> Trouble {
        Trouble::Stop(malformed("a listpack"))
    }
}

// Ways: in which type a value is written for a target, and how its parts are.
//
// Names and numbers of the types are those of the servers' `rdb.h`, as in [`grammar`].

/// A part of a value that is written in another type.
#[derive(Debug)]
enum Part {
    /// The same in both types.
    Same(&'static [Item]),
    /// All of these.
    All(&'static [Part]),
    /// What only the old type has: a number, bytes, a string; a length, and these parts that many times.
    LeaveNumber,
    LeaveBytes(u8),
    LeaveString,
    LeaveTimes(&'static [Part]),
    /// A length, and these parts that many times.
    Times(&'static [Part]),
    /// A listpack, as one string, in another form.
    Rewrite(Form),
    /// What a list's node is: one long element, or a listpack. The node follows.
    NodeKind,
    Node,
    /// Redis: what times of fields count from. The target's own is written.
    Base,
    PutBase,
    /// Redis: the time of the field that follows; it is written behind it.
    FieldTime,
    PutFieldTime,
    /// Valkey: a field or its value, which are held until their time is known, and the time.
    Hold,
    HeldTime,
}

/// The form that a listpack is given.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Form {
    /// A number of elements, and each as a string.
    Elements,
    /// The same of pairs.
    Pairs,
    /// Pairs of a member and a score in binary.
    Scores,
    /// Fields, values and times as Valkey writes them.
    TimedFields,
    /// Of the same, only fields and values.
    UntimedFields,
}

const SET_AS_TABLE: &[Part] = &[Part::Rewrite(Form::Elements)];
const HASH_AS_TABLE: &[Part] = &[Part::Rewrite(Form::Pairs)];
const SORTED_SET_AS_TABLE: &[Part] = &[Part::Rewrite(Form::Scores)];
const LIST_OF_ZIPLISTS: &[Part] = &[Part::Times(&[Part::NodeKind, Part::Node])];

/// Redis' hashes with times, as Valkey writes them, and without.
const TIMED_TABLE_FOR_VALKEY: &[Part] =
    &[Part::Base, Part::Times(&[Part::FieldTime, Part::Same(&[Item::String, Item::String]), Part::PutFieldTime])];
const TIMED_LISTPACK_FOR_VALKEY: &[Part] = &[Part::LeaveBytes(8), Part::Rewrite(Form::TimedFields)];
const UNTIMED_TABLE: &[Part] =
    &[Part::LeaveBytes(8), Part::Times(&[Part::LeaveNumber, Part::Same(&[Item::String, Item::String])])];
const UNTIMED_LISTPACK: &[Part] = &[Part::LeaveBytes(8), Part::Rewrite(Form::UntimedFields)];

/// Valkey's hashes with times, as Redis writes them, and without.
const TIMED_FOR_REDIS: &[Part] = &[Part::PutBase, Part::Times(&[Part::Hold, Part::Hold, Part::HeldTime])];
const UNTIMED_OF_VALKEY: &[Part] = &[Part::Times(&[Part::Same(&[Item::String, Item::String]), Part::LeaveBytes(8)])];

/// Streams without what later servers added. For 7.2 and Valkey without the ids of messages that producers gave; for
/// 7.0 also without the time at which a consumer was last active; for 6.2 also without the first id, the greatest
/// deleted id, the entries ever added, and each group's own count of them.
const STREAM_4_FOR_7_2: &[Part] = &[
    STREAM_FROM_7_0,
    Part::Same(&[Item::Times(&[
        Item::String,
        Item::Length,
        Item::Length,
        Item::Length,
        Item::Times(PENDING),
        Item::Times(&[Item::String, Item::Bytes(8), Item::Bytes(8), Item::Times(&[Item::Bytes(16)])]),
    ])]),
    LEAVE_MESSAGE_IDS,
];
const STREAM_3_FOR_7_0: &[Part] = &[STREAM_FROM_7_0, GROUPS_FOR_7_0];
const STREAM_4_FOR_7_0: &[Part] = &[STREAM_FROM_7_0, GROUPS_FOR_7_0, LEAVE_MESSAGE_IDS];
const STREAM_3_FOR_6_2: &[Part] = &[STREAM_OF_6_2, LEAVE_COUNTERS_OF_7_0, GROUPS_OF_7_2_FOR_6_2];
const STREAM_4_FOR_6_2: &[Part] = &[STREAM_OF_6_2, LEAVE_COUNTERS_OF_7_0, GROUPS_OF_7_2_FOR_6_2, LEAVE_MESSAGE_IDS];
const STREAM_2_FOR_6_2: &[Part] = &[
    STREAM_OF_6_2,
    LEAVE_COUNTERS_OF_7_0,
    Part::Times(&[
        Part::Same(&[Item::String, Item::Length, Item::Length]),
        Part::LeaveNumber,
        Part::Same(&[
            Item::Times(PENDING),
            Item::Times(&[Item::String, Item::Bytes(8), Item::Times(&[Item::Bytes(16)])]),
        ]),
    ]),
];

const STREAM_OF_6_2: Part = Part::Same(&[Item::Times(STREAM_NODE), Item::Length, Item::Length, Item::Length]);
const STREAM_FROM_7_0: Part = Part::Same(&[
    Item::Times(STREAM_NODE),
    Item::Length,
    Item::Length,
    Item::Length,
    Item::Length,
    Item::Length,
    Item::Length,
    Item::Length,
    Item::Length,
]);
const LEAVE_COUNTERS_OF_7_0: Part =
    Part::All(&[Part::LeaveNumber, Part::LeaveNumber, Part::LeaveNumber, Part::LeaveNumber, Part::LeaveNumber]);
const GROUPS_FOR_7_0: Part = Part::Times(&[
    Part::Same(&[Item::String, Item::Length, Item::Length, Item::Length, Item::Times(PENDING)]),
    Part::Times(CONSUMER_WITHOUT_ACTIVE_TIME),
]);
const GROUPS_OF_7_2_FOR_6_2: Part = Part::Times(&[
    Part::Same(&[Item::String, Item::Length, Item::Length]),
    Part::LeaveNumber,
    Part::Same(&[Item::Times(PENDING)]),
    Part::Times(CONSUMER_WITHOUT_ACTIVE_TIME),
]);
const LEAVE_MESSAGE_IDS: Part = Part::All(&[
    Part::LeaveNumber,
    Part::LeaveNumber,
    Part::LeaveTimes(&[
        Part::LeaveString,
        Part::LeaveTimes(&[Part::LeaveString, Part::LeaveNumber, Part::LeaveNumber]),
    ]),
    Part::LeaveNumber,
    Part::LeaveNumber,
]);
const CONSUMER_WITHOUT_ACTIVE_TIME: &[Part] =
    &[Part::Same(&[Item::String, Item::Bytes(8)]), Part::LeaveBytes(8), Part::Same(&[Item::Times(&[Item::Bytes(16)])])];
const STREAM_NODE: &[Item] = &[Item::String, Item::String];
const PENDING: &[Item] = &[Item::Bytes(16), Item::Bytes(8), Item::Length];

/// The type of a value at the target, and how it is written.
enum Way {
    Same(&'static [Item]),
    Changed(u8, &'static [Part]),
    Without(Obstacle, u8, &'static [Part]),
}

/// How a value of this type is written for a target. `None`: the type is not known.
fn way(kind: u8, from: Magic, to: Format) -> Option<Way> {
    let same = records::value(kind, from)?;
    // Numbers from 22 on mean other things in the other family.
    let is_other_family = kind >= 22 && from != to.family();
    if to.knows(kind) && !is_other_family {
        return Some(Way::Same(same));
    }
    Some(match (kind, to.family()) {
        (16, _) => Way::Changed(4, HASH_AS_TABLE),
        (17, _) => Way::Changed(5, SORTED_SET_AS_TABLE),
        (18, _) => Way::Changed(14, LIST_OF_ZIPLISTS),
        (19, _) => Way::Changed(15, STREAM_2_FOR_6_2),
        (20, _) => Way::Changed(2, SET_AS_TABLE),
        (21, _) if to.knows(19) => Way::Changed(19, STREAM_3_FOR_7_0),
        (21, _) => Way::Changed(15, STREAM_3_FOR_6_2),
        (26, _) if to.knows(21) => Way::Changed(21, STREAM_4_FOR_7_2),
        (26, _) if to.knows(19) => Way::Changed(19, STREAM_4_FOR_7_0),
        (26, _) => Way::Changed(15, STREAM_4_FOR_6_2),
        (22, _) if to.knows(24) => Way::Changed(24, TIMED_FOR_REDIS),
        (24, Magic::Valkey) => Way::Changed(22, TIMED_TABLE_FOR_VALKEY),
        (25, Magic::Valkey) => Way::Changed(22, TIMED_LISTPACK_FOR_VALKEY),
        (22, _) => Way::Without(Obstacle::FieldExpiry, 4, UNTIMED_OF_VALKEY),
        (24, _) => Way::Without(Obstacle::FieldExpiry, 4, UNTIMED_TABLE),
        (25, _) => Way::Without(Obstacle::FieldExpiry, 4, UNTIMED_LISTPACK),
        // Modules' values: what reads them at the target is not known.
        _ => Way::Same(same),
    })
}

// Values: the elements of a listpack, written as other types have them.

/// What stands for "expires never" in Valkey's hashes.
const NEVER: i64 = -1;

/// The time from which a hash written for Redis counts the times of its fields. The server adds it to each of them; it
/// needs only to be before all of them, which are not known yet when it is written.
const FIELD_TIME_BASE: u64 = 1;

/// Writes the elements of a listpack in another form.
fn put_form(form: Form, elements: &[PackedElement<'_>], out: &mut Vec<u8>) -> Result<(), Trouble> {
    let each = match form {
        Form::Elements => 1,
        Form::Pairs | Form::Scores => 2,
        Form::TimedFields | Form::UntimedFields => 3,
    };
    if elements.is_empty() || !elements.len().is_multiple_of(each) {
        return Err(malformed("the number of elements of a listpack").into());
    }
    put_length(out, (elements.len() / each) as u64);
    for group in elements.chunks_exact(each) {
        match (form, group) {
            (Form::Elements, [element]) => put_element(out, *element),
            (Form::Pairs, [field, value]) | (Form::UntimedFields, [field, value, _]) => {
                put_element(out, *field);
                put_element(out, *value);
            }
            (Form::Scores, [member, score]) => {
                put_element(out, *member);
                out.extend_from_slice(&score_of(*score)?.to_le_bytes());
            }
            (Form::TimedFields, [field, value, PackedElement::Number(time @ 0..)]) => {
                put_element(out, *field);
                put_element(out, *value);
                out.extend_from_slice(&(if *time == 0 { NEVER } else { *time }).to_le_bytes());
            }
            _ => return Err(malformed("the time of a field").into()),
        }
    }
    Ok(())
}

/// Writes an element as a string; a number in binary where servers do so.
fn put_element(out: &mut Vec<u8>, element: PackedElement<'_>) {
    match element {
        PackedElement::Text(text) => {
            put_length(out, text.len() as u64);
            out.extend_from_slice(text);
        }
        PackedElement::Number(number) => {
            if let Ok(number) = i8::try_from(number) {
                out.extend_from_slice(&[0xC0, number as u8]);
            } else if let Ok(number) = i16::try_from(number) {
                out.push(0xC1);
                out.extend_from_slice(&number.to_le_bytes());
            } else if let Ok(number) = i32::try_from(number) {
                out.push(0xC2);
                out.extend_from_slice(&number.to_le_bytes());
            } else {
                put_element(out, PackedElement::Text(number.to_string().as_bytes()));
            }
        }
    }
}

/// A score as servers write it into a listpack: a number, or text for one with a fraction and for the infinities.
fn score_of(element: PackedElement<'_>) -> Result<f64, Trouble> {
    let score = match element {
        PackedElement::Number(number) => Some(number as f64),
        PackedElement::Text(text) => std::str::from_utf8(text).ok().and_then(|text| text.parse::<f64>().ok()),
    };
    score.filter(|score| !score.is_nan()).ok_or_else(|| malformed("a score").into())
}

/// The name of a module's type: nine characters of six bits, and ten bits for its version.
fn module_name(id: u64) -> String {
    const LETTERS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
    let letter = |place: u32| LETTERS.get((id >> (10 + 6 * place)) as usize & 0x3F).copied().unwrap_or_default();
    (0..9).rev().map(|place| char::from(letter(place))).collect()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::super::Head;
    use super::*;

    fn text(bytes: &[u8]) -> Vec<u8> {
        let mut text = Vec::new();
        put_element(&mut text, PackedElement::Text(bytes));
        text
    }

    /// A listpack of short strings and small numbers.
    fn listpack(elements: &[&str]) -> Vec<u8> {
        let entries = elements.iter().map(|element| match element.parse::<u8>() {
            Ok(number @ 0..128) => vec![number, 1],
            _ => [&[0x80 | element.len() as u8][..], element.as_bytes(), &[element.len() as u8 + 1]].concat(),
        });
        let body: Vec<u8> = entries.flatten().collect();
        text(&[&(body.len() as u32 + 7).to_le_bytes()[..], &[elements.len() as u8, 0], &body, &[0xFF]].concat())
    }

    fn snapshot(head: &str, records: &[Vec<u8>]) -> Vec<u8> {
        [head.as_bytes(), &records.concat(), b"\xFF12345678"].concat()
    }

    fn record(kind: u8, value: &[u8]) -> Vec<u8> {
        [&[kind, 3][..], b"key", value].concat()
    }

    /// What becomes of the record between head and end, fed in pieces of every size.
    fn converted(from: &str, record: &[u8], to: Format, options: Options) -> Result<Vec<u8>, ConvertError> {
        let whole = snapshot(from, &[record.to_vec()]);
        let mut results = (1..=whole.len()).map(|piece| {
            let (mut converter, mut out) = (Converter::new(to, options), Vec::new());
            whole.chunks(piece).try_for_each(|piece| converter.convert(piece, &mut out))?;
            assert!(converter.is_over());
            let body = out.strip_prefix(magic(to.0).unwrap().as_bytes()).unwrap();
            Ok(body.strip_suffix(b"\xFF\0\0\0\0\0\0\0\0").unwrap().to_vec())
        });
        let first = results.next().unwrap();
        assert!(results.all(|result| result == first));
        first
    }

    fn to(format: Format, from: &str, kind: u8, value: &[u8]) -> Vec<u8> {
        converted(from, &record(kind, value), format, Options::default()).unwrap()
    }

    #[test]
    fn the_format_follows_the_servers_family_and_version() {
        for (is_valkey, version, format) in [
            (false, (6, 2), Format::REDIS_6),
            (false, (7, 0), Format::REDIS_7_0),
            (false, (7, 2), Format::COMMON),
            (false, (7, 4), Format::REDIS_7_4),
            (false, (8, 2), Format::REDIS_7_4),
            (false, (8, 6), Format::REDIS_8_6),
            (true, (7, 2), Format::COMMON),
            (true, (8, 1), Format::COMMON),
            (true, (9, 1), Format::VALKEY_9),
        ] {
            assert_eq!(Format::of_server(is_valkey, version), format, "{is_valkey} {version:?}");
        }
        let reads = |format: Format, magic, version| format.reads(&Head { magic, version, aux: Vec::new() });
        assert!(reads(Format::COMMON, Magic::Redis, 9) && reads(Format::COMMON, Magic::Redis, 11));
        assert!(!reads(Format::COMMON, Magic::Redis, 12) && !reads(Format::COMMON, Magic::Valkey, 80));
        assert!(reads(Format::VALKEY_9, Magic::Valkey, 80) && reads(Format::VALKEY_9, Magic::Redis, 11));
        assert!(!reads(Format::VALKEY_9, Magic::Redis, 12));
    }

    #[test]
    fn what_both_know_passes_through_with_its_attributes() {
        let records = [
            b"\xFA\x01a\x01b\xFE\x03\xFB\x05\x01".to_vec(),
            [&b"\xFC\x01\0\0\0\0\0\0\0\xF8\x07"[..], &record(0, b"\x0Avvvvvvvvvv")].concat(),
            [&b"\xF9\x09"[..], &record(16, &listpack(&["f", "v"]))].concat(),
            record(21, b"\0\0\0\0\0\0\0\0\0\0"),
            b"\xF5\x05#!lua".to_vec(),
        ]
        .concat();
        for format in [Format::COMMON, Format::REDIS_7_4, Format::REDIS_8_6, Format::VALKEY_9] {
            for from in ["REDIS0011", "REDIS0012", "VALKEY080"] {
                assert_eq!(converted(from, &records, format, Options::default()).unwrap(), records, "{format:?}");
            }
        }
        // A hint that other versions do not know.
        let hint = [b"\xF4\x01\x02\x03".to_vec(), record(0, b"\x01v")].concat();
        assert_eq!(converted("REDIS0012", &hint, Format::COMMON, Options::default()).unwrap(), record(0, b"\x01v"));
    }

    #[test]
    fn listpacks_become_tables_for_older_servers() {
        let hash = to(Format::REDIS_6, "REDIS0011", 16, &listpack(&["f", "v", "n", "12"]));
        assert_eq!(hash, record(4, b"\x02\x01f\x01v\x01n\xC0\x0C"));
        let set = to(Format::REDIS_7_0, "REDIS0011", 20, &listpack(&["a", "7", "b"]));
        assert_eq!(set, record(2, b"\x03\x01a\xC0\x07\x01b"));
        let scores = listpack(&["a", "1", "b", "-0.5", "c", "inf"]);
        let numbers = [1.0, -0.5, f64::INFINITY].map(f64::to_le_bytes);
        let wanted = [&b"\x03\x01a"[..], &numbers[0], b"\x01b", &numbers[1], b"\x01c", &numbers[2]].concat();
        assert_eq!(to(Format::REDIS_6, "REDIS0010", 17, &scores), record(5, &wanted));
        // Compressed: a listpack of sixteen times the number 1.
        let plain = listpack(&["1"; 16]);
        let packed = [&[5][..], &plain[1..7], &[1, 1, 1, 7 << 5, 30 - 9, 1, 0, 0xFF]].concat();
        let compressed = [&[0xC3, packed.len() as u8, 39][..], &packed].concat();
        assert_eq!(to(Format::REDIS_7_0, "REDIS0011", 20, &compressed), to(Format::REDIS_7_0, "REDIS0011", 20, &plain));
    }

    #[test]
    fn lists_are_converted_node_by_node() {
        let value = [&b"\x02\x02"[..], &listpack(&["a", "5"]), b"\x01", &text(b"one long element")].concat();
        let node = |elements: &[PackedElement<'_>]| text(&ziplist(elements.iter().copied().map(Ok)).unwrap());
        let wanted = [
            &b"\x02"[..],
            &node(&[PackedElement::Text(b"a"), PackedElement::Number(5)]),
            &node(&[PackedElement::Text(b"one long element")]),
        ]
        .concat();
        assert_eq!(to(Format::REDIS_6, "REDIS0011", 18, &value), record(14, &wanted));
    }

    #[test]
    fn streams_lose_what_older_servers_do_not_know() {
        let (id, time) = ([7; 16], [9; 8]);
        let nodes = [&[1][..], &text(&id), &listpack(&["n"])].concat();
        let pending = [&[1][..], &id, &time, &[3]].concat();
        let consumer = |active: &[u8]| [&[1][..], &text(b"c"), &time, active, &[1], &id].concat();
        let stream = |counters: &[u8], read: &[u8], active: &[u8], ids: &[u8]| {
            let group = [&[1][..], &text(b"g"), &[5, 6], read, &pending, &consumer(active)].concat();
            [&nodes[..], &[1, 2, 3], counters, &group, ids].concat()
        };
        let ids = [&b"\x40\x64\x40\x64\x01"[..], &text(b"producer"), &[1], &text(b"id"), &[8, 0, 1, 0]].concat();
        let newest = stream(&[1; 5], &[4], &time, &ids);
        for (format, kind, wanted) in [
            (Format::REDIS_8_6, 26, newest.clone()),
            (Format::VALKEY_9, 21, stream(&[1; 5], &[4], &time, &[])),
            (Format::REDIS_7_0, 19, stream(&[1; 5], &[4], &[], &[])),
            (Format::REDIS_6, 15, stream(&[], &[], &[], &[])),
        ] {
            assert_eq!(to(format, "REDIS0013", 26, &newest), record(kind, &wanted), "{format:?}");
        }
        let middle = stream(&[1; 5], &[4], &time, &[]);
        assert_eq!(to(Format::REDIS_7_0, "VALKEY080", 21, &middle), record(19, &stream(&[1; 5], &[4], &[], &[])));
        let older = stream(&[1; 5], &[4], &[], &[]);
        assert_eq!(to(Format::REDIS_6, "REDIS0010", 19, &older), record(15, &stream(&[], &[], &[], &[])));
    }

    #[test]
    fn fields_keep_their_times_in_the_other_family() {
        let at = |time: i64| time.to_le_bytes();
        let valkey = [&b"\x02\x01f\x01v"[..], &at(1000), b"\x01g\x01w", &at(NEVER)].concat();
        // From 900 on: 1000 is the hundred-and-first.
        let redis = [&at(900)[..], b"\x02\x40\x65\x01f\x01v\x00\x01g\x01w"].concat();
        let ours = [&at(1)[..], b"\x02\x43\xE8\x01f\x01v\x00\x01g\x01w"].concat();
        assert_eq!(to(Format::VALKEY_9, "REDIS0012", 24, &redis), record(22, &valkey));
        assert_eq!(to(Format::REDIS_7_4, "VALKEY080", 22, &valkey), record(24, &ours));
        assert_eq!(to(Format::VALKEY_9, "REDIS0012", 24, &ours), record(22, &valkey));
        let packed = [&at(100)[..], &listpack(&["f", "v", "100", "g", "w", "0"])].concat();
        let valkey = [&b"\x02\x01f\x01v"[..], &at(100), b"\x01g\x01w", &at(NEVER)].concat();
        assert_eq!(to(Format::VALKEY_9, "REDIS0012", 25, &packed), record(22, &valkey));

        for (from, kind, value) in [("REDIS0012", 24, &redis), ("REDIS0012", 25, &packed), ("VALKEY080", 22, &valkey)] {
            let refused = converted(from, &record(kind, value), Format::COMMON, Options::default());
            let what = Obstacle::FieldExpiry;
            assert_eq!(refused, Err(ConvertError::Refused { what, key: b"key".to_vec(), database: 0 }));
            let options = Options { drop_field_expiry: true, ..Options::default() };
            let kept = converted(from, &record(kind, value), Format::COMMON, options).unwrap();
            assert_eq!(kept, record(4, b"\x02\x01f\x01v\x01g\x01w"), "{kind}");
        }
    }

    #[test]
    fn what_a_target_cannot_hold_is_refused_or_left_out_with_its_attributes() {
        // The name of a module's type is in the upper 54 bits of its number.
        let id = b"vectorset".iter().fold(0_u64, |id, letter| {
            let letters = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
            id << 6 | letters.iter().position(|other| other == letter).unwrap() as u64
        }) << 10;
        let module = [&[0x81][..], &id.to_be_bytes(), b"\x02\x05\x05\x02ab\x00"].concat();
        let with_expiry = [&b"\xFC\x01\0\0\0\0\0\0\0"[..], &record(7, &module)].concat();
        let aux = [&[0xF7, 0x81][..], &id.to_be_bytes(), b"\x02\x02\x05\x02ab\x00"].concat();
        let library = b"\xF5\x05#!lua".to_vec();
        let rest = record(0, b"\x01v");
        let all = [library, aux, with_expiry, rest.clone()].concat();
        let options = Options { skip_modules: true, skip_functions: true, drop_field_expiry: false };
        assert_eq!(converted("REDIS0012", &all, Format::REDIS_6, options).unwrap(), rest);
        let options = Options { skip_functions: true, ..Options::default() };
        let refused = converted("REDIS0012", &all, Format::REDIS_6, options);
        let what = Obstacle::Module("vectorset".into());
        assert_eq!(refused, Err(ConvertError::Refused { what: what.clone(), key: Vec::new(), database: 0 }));

        let mut survey = Converter::survey(Format::REDIS_6);
        let mut out = Vec::new();
        survey.convert(&snapshot("REDIS0012", &[all]), &mut out).unwrap();
        let found = &survey.done().obstacles;
        assert!(out.is_empty() && survey.is_over());
        assert_eq!(found[&what], Obstacles { count: 2, keys: vec![(0, b"key".to_vec())] });
        assert_eq!(found[&Obstacle::Functions].count, 1);
    }

    #[test]
    fn what_is_unknown_or_damaged_is_named() {
        let unknown = converted("REDIS0013", &record(99, b""), Format::COMMON, Options::default());
        assert!(
            matches!(&unknown, Err(ConvertError::Unknown { code: 99, at: 9, key, .. }) if key == b"key"),
            "{unknown:?}"
        );
        for (kind, value) in [
            (20, &b"\x07\x07\0\0\0\x01\0\xFF"[..]), // a listpack without its element
            (20, b"\xC0\x05"),                      // a number
            (16, &listpack(&["half"])),
            (17, &listpack(&["m", "score"])),
            (18, b"\x01\x03\x01a"),        // a node of no kind
            (18, b"\x01\x02\x01a"),        // no listpack
            (20, b"\xC3\x02\x09\x20\x00"), // does not expand
            (20, b"\x80\xFF\xFF\xFF\xFF"), // more than any server writes
        ] {
            let damaged = converted("REDIS0011", &record(kind, value), Format::REDIS_6, Options::default());
            assert!(matches!(damaged, Err(ConvertError::Damaged { .. })), "{kind} {value:?}: {damaged:?}");
        }
        let mut converter = Converter::new(Format::COMMON, Options::default());
        let more = [&snapshot("REDIS0012", &[])[..], b"x"].concat();
        assert!(converter.convert(&more, &mut Vec::new()).is_err());
    }
}
