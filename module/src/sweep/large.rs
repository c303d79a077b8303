//! A large value that is taken down in pieces, while clients change it. Pure: elements in, a record's bytes out.
//!
//! The record is of the value as it was when the first piece was begun, which nobody had changed since the sweep's
//! beginning. What a client's command does next decides what is taken before it runs:
//!
//! ```text
//!   hash, set, sorted set    ██████████▌ · s · · · s ·     a sweep of its own ([`Course`]): a command that names
//!                                 elements: s, settled     elements settles those, as a command does with keys
//!
//!   list          pops  ◀─ ████████▌ · · · · · ▐███ ─▶ pops      taken from both ends. A push adds what is not taken;
//!                 pushes ─▶ front              back ◀─ pushes    the server's events tell at which end, and so where
//!                                                                the rest has moved to
//!
//!   string        ████████▌ · ▒ · · · ▒ · ·   taken from its beginning. Blocks (▒) that a command is about to write into
//!                                             are kept as they are; what is appended changes nothing of them
//!
//!   any other command        the rest is taken at once, if it is not too much
//! ```
//!
//! A value that has expired meanwhile is dropped: the stream removes its key.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use remora_redis::rdb::put_length;

use super::course::{Astray, Course, Place};
use crate::capture::record::put_string;

/// The kind of a value that can be taken in pieces. Other kinds have more than their elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Shape {
    List,
    Hash,
    Set,
    SortedSet,
    /// Its elements are its bytes.
    String,
}

impl Shape {
    /// The type of its record, which is a number of elements, and each of them.
    pub(super) fn record_type(self) -> u8 {
        match self {
            Shape::String => 0,
            Shape::List => 1,
            Shape::Set => 2,
            Shape::Hash => 4,
            Shape::SortedSet => 5,
        }
    }
}

/// An end of a list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    Head,
    Tail,
}

impl End {
    /// By the server's word for what was done to a list.
    pub(super) fn of_event(event: &[u8]) -> Option<End> {
        match event {
            b"lpush" | b"lpop" => Some(End::Head),
            b"rpush" | b"rpop" => Some(End::Tail),
            _ => None,
        }
    }
}

/// What a command does to the value of a key that it names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Touch {
    /// Changes no elements of a hash, a set or a sorted set but those among its words: from the `first` on, each
    /// `step`th.
    Elements { first: usize, step: usize },
    /// Adds to an end of a list.
    Push,
    /// Removes at most so many from an end of a list.
    Pop(End, u64),
    /// Adds to the end of a string.
    Append,
    /// Writes `bytes` bytes into a string, from the byte `from` on.
    Write { from: u64, bytes: u64 },
    /// Anything.
    All,
}

/// Takes the hash of an element, the element, and its value.
pub(super) type Show<'s> = dyn FnMut(u64, &[u8], &[u8]) + 's;

/// The value in its server.
pub(super) trait Value {
    fn expires_at(&self) -> Option<u64>;

    /// Number of elements.
    fn length(&self) -> u64;

    /// Shows the element of that number of a list. False if there is none.
    fn at(&mut self, number: i64, show: &mut dyn FnMut(&[u8])) -> bool;

    /// Shows bytes of a string, from this one on. False if it has none there, or fewer.
    fn bytes(&mut self, from: u64, bytes: u64, show: &mut dyn FnMut(&[u8])) -> bool;

    /// The hash of an element's name.
    fn hash(&self, element: &[u8]) -> u64;

    /// Shows the elements of one step of the scan, each with its hash and its value, and returns where the next step
    /// begins.
    fn step(&mut self, cursor: u64, show: &mut Show<'_>) -> Option<u64>;
}

/// How far a value has been taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    Open,
    /// Every element of the beginning.
    Whole,
    /// It has expired meanwhile.
    Gone,
}

/// Why a value cannot be taken to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Lost {
    #[error("its elements were taken as keys are, and {0}")]
    Astray(#[from] Astray),
    #[error("it has left, or was changed, by no command that was seen")]
    Unseen,
    #[error("one element of {0} bytes is too large to be written in one moment")]
    Element(usize),
    #[error("a client changes all of it, and {0} of its elements are too large to be written in one moment")]
    Rest(u64),
    #[error("a client changes all of it, and {} KiB of its {} are too much to be copied in one moment", .rest >> 10, .all >> 10)]
    RestOfString { rest: u64, all: u64 },
    #[error("it has expired, and a part of it is sent")]
    Expired,
    #[error("the server showed a score that is no number")]
    Score,
}

/// Elements from which on their record takes longer than a client should wait: some milliseconds.
pub(super) const MOMENT_ELEMENTS_MAX: u64 = 20_000;

/// The same for their bytes.
const MOMENT_BYTES_MAX: u64 = 4 << 20;

/// The same for the bytes of a string, which are copied and nothing else.
const STRING_MOMENT_BYTES_MAX: u64 = 4 << 20;

/// Bytes of a string that are kept together when a command is about to write into them: some writes in a row have one
/// copy, and what is remembered of each is little beside it.
const BLOCK_BYTES: u64 = 4 << 10;

/// Bytes that a block takes besides its own.
const KEPT_BYTES: usize = 64;

/// Blocks of a string that are taken in one step: some microseconds.
const BLOCKS_OF_A_STEP: u64 = 16;

/// Bytes of a piece of the record: beyond that another one is begun, so that none is copied while it grows.
const PIECE_BYTES: usize = 256 << 10;

/// A value that is being taken.
#[derive(Clone, Debug)]
pub(super) struct Large {
    shape: Shape,
    /// Elements at the beginning.
    count: u64,
    /// Bytes of an element, on average.
    element_bytes: u64,
    expires_at: Option<u64>,
    way: Way,
    taken: Taken,
}

#[derive(Clone, Debug)]
enum Way {
    List(Ends),
    Table { course: Course, cursor: u64 },
    Bytes(Bytes),
}

/// How far a string is taken.
#[derive(Clone, Debug)]
struct Bytes {
    /// Bytes of a block.
    block: u64,
    /// Where the next step begins: a block does.
    at: u64,
    /// Blocks ahead, by where they begin, as they were before a command wrote into them.
    kept: BTreeMap<u64, Vec<u8>>,
}

/// How far a list is taken from its ends, and where the rest is now.
#[derive(Clone, Copy, Debug, Default)]
struct Ends {
    front: u64,
    back: u64,
    /// How many elements of the beginning the commands that were seen may remove at most, at the head and at the tail.
    popped: [u64; 2],
    /// How far elements have moved away from the head.
    shift: i64,
    /// Elements now.
    length: u64,
}

/// What is taken.
#[derive(Clone, Debug, Default)]
struct Taken {
    pieces: Vec<Vec<u8>>,
    /// Elements of a list's tail, the last one first.
    back: Vec<Vec<u8>>,
    back_bytes: usize,
    /// Pieces of such elements in their order, the last piece first.
    back_pieces: Vec<Vec<u8>>,
    bytes: usize,
    wrong: Option<Lost>,
}

impl Taken {
    fn put(&mut self, shape: Shape, element: &[u8], value: &[u8]) {
        let longest = element.len().max(value.len());
        if longest as u64 > MOMENT_BYTES_MAX {
            self.wrong = Some(Lost::Element(longest));
            return;
        }
        if self.pieces.last().is_none_or(|piece| piece.len() >= PIECE_BYTES) {
            self.pieces.push(Vec::with_capacity(PIECE_BYTES + PIECE_BYTES / 8));
        }
        let Some(piece) = self.pieces.last_mut() else { return };
        let before = piece.len();
        put_string(piece, element);
        match shape {
            Shape::Hash => put_string(piece, value),
            Shape::SortedSet => match std::str::from_utf8(value).ok().and_then(|score| score.parse::<f64>().ok()) {
                Some(score) => piece.extend_from_slice(&score.to_le_bytes()),
                None => self.wrong = Some(Lost::Score),
            },
            Shape::List | Shape::Set | Shape::String => {}
        }
        self.bytes += piece.len() - before;
    }

    /// Bytes of a string.
    fn put_bytes(&mut self, bytes: &[u8]) {
        if self.pieces.last().is_none_or(|piece| piece.len() >= PIECE_BYTES) {
            self.pieces.push(Vec::with_capacity(PIECE_BYTES + PIECE_BYTES / 8));
        }
        if let Some(piece) = self.pieces.last_mut() {
            piece.extend_from_slice(bytes);
            self.bytes += bytes.len();
        }
    }

    fn put_back(&mut self, element: &[u8]) {
        if element.len() as u64 > MOMENT_BYTES_MAX {
            self.wrong = Some(Lost::Element(element.len()));
            return;
        }
        let mut piece = Vec::with_capacity(element.len() + 5);
        put_string(&mut piece, element);
        self.bytes += piece.len();
        self.back_bytes += piece.len();
        self.back.push(piece);
        if self.back_bytes >= PIECE_BYTES {
            self.join_back();
        }
    }

    fn join_back(&mut self) {
        self.back.reverse();
        self.back_pieces.push(self.back.concat());
        self.back.clear();
        self.back_bytes = 0;
    }

    fn check(&self) -> Result<(), Lost> {
        self.wrong.map_or(Ok(()), Err)
    }
}

impl Large {
    /// A value of `count` elements, which take some `memory` bytes.
    pub(super) fn new(shape: Shape, count: u64, memory: u64, expires_at: Option<u64>) -> Large {
        Large::with_blocks(shape, count, memory, expires_at, BLOCK_BYTES)
    }

    /// The same, and a string has blocks of that length.
    pub(super) fn with_blocks(shape: Shape, count: u64, memory: u64, expires_at: Option<u64>, block: u64) -> Large {
        let way = match shape {
            Shape::String => Way::Bytes(Bytes { block, at: 0, kept: BTreeMap::new() }),
            Shape::List => Way::List(Ends { length: count, ..Ends::default() }),
            _ => Way::Table { course: Course::new([(0, count)]), cursor: 0 },
        };
        let element_bytes = memory / count.max(1);
        Large { shape, count, element_bytes, expires_at, way, taken: Taken::default() }
    }

    /// Bytes of the record as far as it is taken.
    pub(super) fn bytes(&self) -> usize {
        self.taken.bytes
    }

    /// The record's bytes behind the key's name.
    pub(super) fn into_record(self) -> Vec<Vec<u8>> {
        let head = self.head();
        std::iter::once(head).chain(self.into_rest()).collect()
    }

    /// The first of these bytes: the number of elements.
    pub(super) fn head(&self) -> Vec<u8> {
        let mut head = Vec::new();
        put_length(&mut head, self.count);
        head
    }

    /// The others, but for what [`Large::give`] has given.
    pub(super) fn into_rest(mut self) -> Vec<Vec<u8>> {
        self.taken.join_back();
        let back = self.taken.back_pieces.into_iter().rev();
        self.taken.pieces.into_iter().chain(back).collect()
    }

    /// Gives what is taken of a string, which is its beginning, or follows what was given before.
    pub(super) fn give(&mut self) -> Vec<Vec<u8>> {
        let pieces = std::mem::take(&mut self.taken.pieces);
        self.taken.bytes -= pieces.iter().map(Vec::len).sum::<usize>();
        pieces
    }

    /// Takes some elements, until it is `enough`: asked after each step, with the bytes that are taken.
    pub(super) fn piece(
        &mut self,
        value: Option<&mut dyn Value>,
        mut enough: impl FnMut(usize) -> bool,
    ) -> Result<State, Lost> {
        let value = match self.find(value)? {
            Ok(value) => value,
            Err(state) => return Ok(state),
        };
        while self.state() == State::Open {
            self.step(value)?;
            if enough(self.taken.bytes) {
                break;
            }
        }
        Ok(self.state())
    }

    /// A command is about to run that names the value's key.
    pub(super) fn touched<'w>(
        &mut self,
        value: Option<&mut dyn Value>,
        touch: Touch,
        words: usize,
        word: impl Fn(usize) -> Option<&'w [u8]>,
    ) -> Result<State, Lost> {
        let value = match self.find(value)? {
            Ok(value) => value,
            Err(state) => return Ok(state),
        };
        match (touch, &mut self.way) {
            (Touch::Elements { first, step }, Way::Table { .. }) => {
                for element in (first..words).step_by(step.max(1)).filter_map(word) {
                    self.settle(value, element)?;
                }
            }
            (Touch::Push, Way::List(_)) | (Touch::Append, Way::Bytes(_)) => {}
            (Touch::Write { from, bytes }, Way::Bytes(_)) => self.keep(value, from, bytes)?,
            (Touch::Pop(end, elements), Way::List(ends)) => {
                let popped = &mut ends.popped[end as usize];
                *popped = popped.saturating_add(elements);
                self.take_popped(value)?;
            }
            _ => {
                self.check_moment(self.rest())?;
                while self.state() == State::Open {
                    self.step(value)?;
                }
            }
        }
        Ok(self.state())
    }

    /// The list has changed at that end, and has so many elements now.
    pub(super) fn list_changed(&mut self, end: End, length: u64) {
        let Way::List(ends) = &mut self.way else { return };
        let grown = length.cast_signed().wrapping_sub(ends.length.cast_signed());
        if end == End::Head {
            ends.shift += grown;
        }
        ends.length = length;
    }

    /// Forgets how far it has come since, and keeps what it has taken: a fault, for the model.
    #[cfg(test)]
    pub(super) fn repeat(&mut self, before: Large) {
        self.way = before.way;
    }

    /// The value, if it is still the one of the beginning and something of it is left to take.
    fn find<'v>(&self, value: Option<&'v mut dyn Value>) -> Result<Result<&'v mut dyn Value, State>, Lost> {
        let state = self.state();
        if state != State::Open {
            return Ok(Err(state));
        }
        match value {
            Some(value) if value.expires_at() == self.expires_at => match &self.way {
                Way::List(ends) if ends.length != value.length() => Err(Lost::Unseen),
                Way::Bytes(_) if self.count > value.length() => Err(Lost::Unseen),
                _ => Ok(Ok(value)),
            },
            // Every element was taken before it was removed, and the key left with the last one.
            _ if self.rest() == 0 => Ok(Err(State::Whole)),
            None if self.expires_at.is_some() => Ok(Err(State::Gone)),
            // What has come in its place came by a command that takes no rest, and so has no expiry.
            Some(value) if value.expires_at().is_none() => Ok(Err(State::Gone)),
            _ => Err(Lost::Unseen),
        }
    }

    fn state(&self) -> State {
        if self.rest() > 0 || self.is_scanning() { State::Open } else { State::Whole }
    }

    /// Elements of the beginning that are not taken.
    fn rest(&self) -> u64 {
        match &self.way {
            Way::List(ends) => self.count.saturating_sub(ends.front + ends.back),
            Way::Bytes(bytes) => self.count.saturating_sub(bytes.at),
            Way::Table { course, .. } => {
                let recorded: u64 = course.databases().iter().map(|table| table.recorded).sum();
                self.count.saturating_sub(recorded)
            }
        }
    }

    /// A scan goes on to its end, so that an element that was taken twice is noticed.
    fn is_scanning(&self) -> bool {
        matches!(&self.way, Way::Table { course, .. } if course.current().is_some())
    }

    fn check_moment(&self, elements: u64) -> Result<(), Lost> {
        if self.shape == Shape::String {
            let too_much = Lost::RestOfString { rest: elements, all: self.count };
            return if elements > STRING_MOMENT_BYTES_MAX { Err(too_much) } else { Ok(()) };
        }
        let bytes = elements.saturating_mul(self.element_bytes);
        if elements > MOMENT_ELEMENTS_MAX || bytes > MOMENT_BYTES_MAX { Err(Lost::Rest(elements)) } else { Ok(()) }
    }

    /// Takes the next element of a list, the elements of the next step of a scan, or some bytes of a string.
    fn step(&mut self, value: &mut dyn Value) -> Result<(), Lost> {
        let Large { shape, count, way, taken, .. } = self;
        match way {
            Way::Bytes(Bytes { block, at, kept }) => {
                if let Some(bytes) = kept.remove(at) {
                    taken.bytes -= bytes.len() + KEPT_BYTES;
                    taken.put_bytes(&bytes);
                    *at += bytes.len() as u64;
                } else {
                    let next = kept.first_key_value().map_or(*count, |(begin, _)| *begin);
                    let bytes = (next - *at).min(*block * BLOCKS_OF_A_STEP);
                    if !value.bytes(*at, bytes, &mut |bytes| taken.put_bytes(bytes)) {
                        return Err(Lost::Unseen);
                    }
                    *at += bytes;
                }
            }
            Way::List(ends) => {
                let number = ends.front.cast_signed() + ends.shift;
                if !(number >= 0 && value.at(number, &mut |element| taken.put(*shape, element, &[]))) {
                    return Err(Lost::Unseen);
                }
                ends.front += 1;
            }
            Way::Table { course, cursor } => {
                let (mut furthest, mut recorded, mut wrong) = (Place::default(), 0_u64, None);
                let next = value.step(*cursor, &mut |hash, element, of| {
                    let place = Place::of_hash(hash);
                    furthest = furthest.max(place);
                    match course.shown(place, element, None) {
                        Ok(true) => {
                            taken.put(*shape, element, of);
                            recorded += 1;
                        }
                        Ok(false) => {}
                        Err(astray) => wrong = Some(astray),
                    }
                });
                wrong.map_or(Ok(()), Err)?;
                let next_place = next.and_then(Place::of_cursor);
                // Whether the step has stayed before its end is known now.
                course.shown(furthest, &[], next_place)?;
                (0..recorded).for_each(|_| course.recorded(0));
                course.passed(next_place)?;
                *cursor = next.unwrap_or_default();
                if next_place.is_none() {
                    course.check(0)?;
                }
            }
        }
        self.taken.check()
    }

    /// Takes an element that a command is about to change, if it lies ahead and exists.
    fn settle(&mut self, value: &mut dyn Value, element: &[u8]) -> Result<(), Lost> {
        let Large { shape, way: Way::Table { course, .. }, taken, .. } = self else { return Ok(()) };
        let hash = value.hash(element);
        if course.settle(Place::of_hash(hash), element)?.is_empty() {
            return Ok(());
        }
        let mut exists = false;
        value.step(hash, &mut |_, shown, of| {
            if shown == element && !exists {
                taken.put(*shape, shown, of);
                exists = true;
            }
        });
        if exists {
            course.recorded(0);
        }
        taken.check()
    }

    /// Keeps the blocks ahead that a command is about to write into.
    fn keep(&mut self, value: &mut dyn Value, from: u64, bytes: u64) -> Result<(), Lost> {
        let Large { count, way: Way::Bytes(Bytes { block, at, .. }), .. } = self else { return Ok(()) };
        let end = from.saturating_add(bytes).min(*count);
        let first = (from / *block * *block).max(*at);
        let (count, block) = (*count, *block);
        self.check_moment(end.saturating_sub(first))?;
        let Large { way: Way::Bytes(Bytes { kept, .. }), taken, .. } = self else { return Ok(()) };
        let mut begin = first;
        while begin < end {
            if let Entry::Vacant(entry) = kept.entry(begin) {
                let mut copy = Vec::new();
                if !value.bytes(begin, block.min(count - begin), &mut |bytes| copy.extend_from_slice(bytes)) {
                    return Err(Lost::Unseen);
                }
                taken.bytes += copy.len() + KEPT_BYTES;
                entry.insert(copy);
            }
            begin += block;
        }
        Ok(())
    }

    /// Takes what the commands that were seen may remove from the ends of a list.
    fn take_popped(&mut self, value: &mut dyn Value) -> Result<(), Lost> {
        let (rest, Way::List(ends)) = (self.rest(), &self.way) else { return Ok(()) };
        let wanted = |end: End, taken: u64| ends.popped[end as usize].saturating_sub(taken).min(rest);
        let (front, back) = (wanted(End::Head, ends.front), wanted(End::Tail, ends.back));
        self.check_moment(front.saturating_add(back).min(rest))?;
        for _ in 0..front {
            self.step(value)?;
        }
        let back = back.min(self.rest());
        let Large { count, way: Way::List(ends), taken, .. } = self else { return Ok(()) };
        for _ in 0..back {
            let number = (*count - 1 - ends.back).cast_signed() + ends.shift;
            if !(number >= 0 && value.at(number, &mut |element| taken.put_back(element))) {
                return Err(Lost::Unseen);
            }
            ends.back += 1;
        }
        taken.check()
    }
}
