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

use super::feed::{Astray, Course, Place};
use crate::capture::walk::put_string;

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

#[cfg(test)]
mod large_model {
    //! A model of one large value that is taken in pieces while clients change it: what was taken is what it was when
    //! the first piece was begun, or it has expired.
    //!
    //! Commands run at once, or wait in a transaction, which may never run. Faults are put between the value and what
    //! takes it, and each of them must be found.

    #![allow(clippy::unwrap_used)]

    use std::collections::{BTreeMap, VecDeque};

    use remora_lab::random::Random;
    use remora_redis::rdb::put_length;

    use super::super::model::Shape as Tables;
    use super::{End, Large, Lost, Shape, Show, State, Touch, Value};

    /// A fault in the driver.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    enum Fault {
        None,
        /// The rest is not taken before a command that may change anything.
        NoRest,
        /// A piece is sent twice.
        PieceTwice,
        /// Elements that a command names are not settled.
        Unsettled,
        /// An element that does not exist is not kept among the settled.
        Absent,
        /// Of the elements that a command names, the first one is settled only.
        FirstOnly,
        /// Elements are not taken before they are popped.
        Popped,
        /// Those that a transaction pops are taken when it runs, and the commands were seen when they were queued.
        QueuedUnseen,
        /// An event of a list is taken for one of its other end.
        OtherEnd,
        /// Events of a list are not heard.
        Unheard,
        /// A key that came in the place of one that has expired is taken for that one.
        Anew,
        /// The bytes of a string that a command writes over are not kept.
        Unkept,
        /// Of these bytes the last is not kept.
        OneShort,
        /// They are kept after the command has run.
        KeptLate,
        /// What is sent of a string is sent again when more is taken.
        SentTwice,
    }

    const FAULTS: [Fault; 14] = [
        Fault::NoRest,
        Fault::PieceTwice,
        Fault::Unsettled,
        Fault::Absent,
        Fault::FirstOnly,
        Fault::Popped,
        Fault::QueuedUnseen,
        Fault::OtherEnd,
        Fault::Unheard,
        Fault::Anew,
        Fault::Unkept,
        Fault::OneShort,
        Fault::KeptLate,
        Fault::SentTwice,
    ];

    /// What clients do. An element is a number.
    #[derive(Clone, Debug)]
    enum Operation {
        /// `HSET`, `SADD`, `ZADD`.
        Put(Vec<u64>, u64),
        /// `HDEL`, `SREM`, `ZREM`.
        Remove(Vec<u64>),
        Push(End, Vec<u64>),
        Pop(End, u64),
        /// `APPEND`.
        Append(Vec<u64>),
        /// `SETRANGE`, `SETBIT`: from this byte on.
        Write(u64, Vec<u64>),
        /// `LTRIM`, `SPOP`, `ZREMRANGEBYRANK`, `BITOP`: removes every second element.
        Thin,
        Delete,
    }

    #[derive(Clone, Debug)]
    enum Data {
        List(VecDeque<u64>),
        Table(BTreeMap<u64, u64>, Tables),
        Bytes(Vec<u8>),
    }

    impl Data {
        fn len(&self) -> usize {
            match self {
                Data::List(list) => list.len(),
                Data::Table(table, _) => table.len(),
                Data::Bytes(bytes) => bytes.len(),
            }
        }

        fn of(shape: Shape, random: &mut Random, elements: u64) -> Data {
            match shape {
                Shape::List => Data::List((0..elements).map(|_| random.below(1000)).collect()),
                Shape::String => Data::Bytes((0..elements).map(|_| random.below(256) as u8).collect()),
                _ => {
                    let mut table = BTreeMap::new();
                    while (table.len() as u64) < elements {
                        table.insert(random.below(NAMES), random.below(100));
                    }
                    Data::Table(table, Tables { bits: random.below(6) as u32, next: None })
                }
            }
        }
    }

    /// Names of elements, of which about half exist.
    const NAMES: u64 = 60;

    /// A key with its value.
    #[derive(Clone, Debug)]
    struct Key {
        data: Data,
        expires_at: Option<u64>,
    }

    fn word(element: u64) -> Vec<u8> {
        element.to_string().into_bytes()
    }

    fn number(word: &[u8]) -> u64 {
        std::str::from_utf8(word).unwrap().parse().unwrap()
    }

    /// The server's side of a [`Key`].
    struct Shown<'k> {
        key: &'k Key,
        expires_at: Option<u64>,
        moved: u64,
    }

    impl Value for Shown<'_> {
        fn expires_at(&self) -> Option<u64> {
            self.expires_at
        }

        fn length(&self) -> u64 {
            self.key.data.len() as u64
        }

        fn at(&mut self, number: i64, show: &mut dyn FnMut(&[u8])) -> bool {
            let Data::List(list) = &self.key.data else { return false };
            let element = usize::try_from(number).ok().and_then(|number| list.get(number));
            element.inspect(|element| show(&word(**element))).is_some()
        }

        fn bytes(&mut self, from: u64, bytes: u64, show: &mut dyn FnMut(&[u8])) -> bool {
            let Data::Bytes(whole) = &self.key.data else { return false };
            whole.get(from as usize..(from + bytes) as usize).inspect(|bytes| show(bytes)).is_some()
        }

        fn hash(&self, element: &[u8]) -> u64 {
            Random::new(number(element) + 7).word()
        }

        fn step(&mut self, cursor: u64, show: &mut Show<'_>) -> Option<u64> {
            let Data::Table(table, shape) = &self.key.data else { return None };
            let moved = self.moved;
            let (shows, next) = shape.step(cursor, |hash| hash.rotate_left(9) & moved & 1 == 1);
            for (element, value) in table {
                let hash = self.hash(&word(*element));
                if shows(hash) {
                    show(hash, &word(*element), &word(*value));
                }
            }
            (next != 0).then_some(next)
        }
    }

    /// A server with that key.
    struct World {
        random: Random,
        shape: Shape,
        key: Option<Key>,
        large: Large,
        state: State,
        fault: Fault,
        expired: bool,
        /// What is sent of a string that is sent before it is whole.
        sent: Option<Vec<u8>>,
    }

    impl World {
        /// Something is done with the value, as the server has it.
        fn with_value(
            &mut self,
            work: impl FnOnce(&mut Large, Option<&mut dyn Value>) -> Result<State, Lost>,
        ) -> Result<(), Lost> {
            if self.state != State::Open {
                return Ok(());
            }
            let anew = self.fault == Fault::Anew && self.expired;
            let mut shown = self.key.as_ref().map(|key| Shown {
                key,
                expires_at: if anew { Some(EXPIRY) } else { key.expires_at },
                moved: self.random.word(),
            });
            self.state = work(&mut self.large, shown.as_mut().map(|shown| shown as &mut dyn Value))?;
            Ok(())
        }

        fn piece(&mut self) -> Result<(), Lost> {
            let mut steps = self.random.between(1, 8);
            let twice = self.fault == Fault::PieceTwice && self.random.one_in(3);
            self.with_value(|large, value| {
                let before = large.clone();
                let state = large.piece(value, |_| {
                    steps -= 1;
                    steps == 0
                });
                if twice && state == Ok(State::Open) {
                    large.repeat(before);
                }
                state
            })?;
            if let Some(sent) = self.sent.as_mut().filter(|_| self.state == State::Open && self.random.one_in(2)) {
                let mut large = self.large.clone();
                sent.extend(large.give().concat());
                if self.fault != Fault::SentTwice {
                    self.large = large;
                }
            }
            Ok(())
        }

        /// A command is sent.
        fn see(&mut self, operation: &Operation) -> Result<(), Lost> {
            let (touch, mut words) = match operation {
                Operation::Put(names, _) | Operation::Remove(names) => {
                    (Touch::Elements { first: 2, step: 1 }, names.iter().map(|name| word(*name)).collect())
                }
                Operation::Push(..) => (Touch::Push, vec![]),
                Operation::Pop(end, count) => (Touch::Pop(*end, *count), vec![]),
                Operation::Append(_) => (Touch::Append, vec![]),
                Operation::Write(from, bytes) => {
                    let bytes = bytes.len() as u64 - u64::from(self.fault == Fault::OneShort);
                    (Touch::Write { from: *from, bytes }, vec![])
                }
                Operation::Thin | Operation::Delete => (Touch::All, vec![]),
            };
            match self.fault {
                Fault::NoRest if touch == Touch::All => return Ok(()),
                Fault::Unsettled if matches!(touch, Touch::Elements { .. }) => return Ok(()),
                Fault::Unkept if matches!(touch, Touch::Write { .. }) => return Ok(()),
                Fault::Popped if matches!(touch, Touch::Pop(..)) => return Ok(()),
                Fault::FirstOnly => words.truncate(1),
                Fault::Absent => words.retain(|word| match &self.key {
                    Some(Key { data: Data::Table(table, _), .. }) => table.contains_key(&number(word)),
                    _ => false,
                }),
                _ => {}
            }
            let words: Vec<&[u8]> =
                [&b"command"[..], b"key"].into_iter().chain(words.iter().map(Vec::as_slice)).collect();
            self.with_value(|large, value| large.touched(value, touch, words.len(), |at| words.get(at).copied()))
        }

        /// A command runs.
        fn run(&mut self, operation: &Operation) {
            let fresh = |shape: Shape| Data::of(shape, &mut Random::new(1), 0);
            let key = self.key.take();
            let mut key = match (key, operation) {
                (None, Operation::Put(..) | Operation::Push(..) | Operation::Append(_) | Operation::Write(..)) => {
                    Key { data: fresh(self.shape), expires_at: None }
                }
                (None, _) | (_, Operation::Delete) => return,
                (Some(key), _) => key,
            };
            let mut event = None;
            match (&mut key.data, operation) {
                (Data::Table(table, _), Operation::Put(names, value)) => {
                    table.extend(names.iter().map(|name| (*name, *value)));
                }
                (Data::Table(table, _), Operation::Remove(names)) => table.retain(|name, _| !names.contains(name)),
                (Data::Table(table, _), Operation::Thin) => {
                    let mut keep = false;
                    table.retain(|_, _| {
                        keep = !keep;
                        keep
                    });
                }
                (Data::List(list), Operation::Push(end, elements)) => {
                    event = Some(*end);
                    for element in elements {
                        match end {
                            End::Head => list.push_front(*element),
                            End::Tail => list.push_back(*element),
                        }
                    }
                }
                (Data::List(list), Operation::Pop(end, count)) => {
                    event = Some(*end);
                    for _ in 0..*count {
                        let _ = if *end == End::Head { list.pop_front() } else { list.pop_back() };
                    }
                }
                (Data::Bytes(whole), Operation::Append(bytes)) => whole.extend(bytes.iter().map(|byte| *byte as u8)),
                (Data::Bytes(whole), Operation::Write(from, bytes)) => {
                    let (from, end) = (*from as usize, *from as usize + bytes.len());
                    whole.resize(whole.len().max(end), 0);
                    whole.splice(from..end, bytes.iter().map(|byte| *byte as u8));
                }
                (Data::Bytes(whole), Operation::Thin) => {
                    let mut keep = false;
                    whole.retain(|_| {
                        keep = !keep;
                        keep
                    });
                }
                (Data::List(list), Operation::Thin) => {
                    let mut keep = false;
                    list.retain(|_| {
                        keep = !keep;
                        keep
                    });
                }
                _ => {}
            }
            if let Some(end) = event.filter(|_| self.fault != Fault::Unheard) {
                let other = if end == End::Head { End::Tail } else { End::Head };
                let end = if self.fault == Fault::OtherEnd { other } else { end };
                self.large.list_changed(end, key.data.len() as u64);
            }
            self.key = Some(key).filter(|key| key.data.len() > 0);
        }

        fn operation(&mut self) -> Operation {
            let random = &mut self.random;
            let end = if random.one_in(2) { End::Head } else { End::Tail };
            let mut some =
                |below: u64, most: u64| (0..random.between(1, most)).map(|_| random.below(below)).collect::<Vec<_>>();
            let (names, elements) = (some(NAMES, 4), some(1000, 4));
            match (self.shape, random.below(20)) {
                (_, 0) => Operation::Thin,
                (_, 1) => Operation::Delete,
                (Shape::List, 2..=10) => Operation::Push(end, elements),
                (Shape::String, 2..=8) => Operation::Append(elements),
                (Shape::String, _) => Operation::Write(random.below(STRING_BYTES_MAX + 20), elements),
                (Shape::List, _) => Operation::Pop(end, random.between(1, 4)),
                (_, 2..=11) => Operation::Put(names, random.below(100) + 100),
                _ => Operation::Remove(names),
            }
        }
    }

    /// The longest string, and its blocks: one step takes many of them.
    const STRING_BYTES_MAX: u64 = 1_000;
    const BLOCK_BYTES: u64 = 4;

    /// When a key expires that does.
    const EXPIRY: u64 = 1_000_000;

    /// Plays the taking of one value to its end, and says what is wrong with what was taken.
    fn play(seed: u64, fault: Fault) -> Result<(), String> {
        let mut random = Random::new(seed);
        let shape = [Shape::List, Shape::Hash, Shape::Set, Shape::SortedSet, Shape::String][random.below(5) as usize];
        let count = random.between(1, if shape == Shape::String { STRING_BYTES_MAX } else { 40 });
        let key = Key { data: Data::of(shape, &mut random, count), expires_at: random.one_in(3).then_some(EXPIRY) };
        let begin = key.clone();
        let large = Large::with_blocks(shape, count, count * 10, key.expires_at, BLOCK_BYTES);
        let sent = (shape == Shape::String && random.one_in(2)).then(|| large.head());
        let pace = random.between(1, 6);
        let (state, expired) = (State::Open, false);
        let mut world = World { random, shape, key: Some(key), large, state, fault, expired, sent };
        let mut queued: Vec<Operation> = Vec::new();
        while world.state == State::Open {
            let took = match world.random.below(8) {
                0 => {
                    if let Some(Key { data: Data::Table(_, shape), .. }) = &mut world.key {
                        shape.change(&mut world.random);
                    }
                    Ok(())
                }
                1 if world.random.one_in(8) => {
                    if world.key.as_ref().is_some_and(|key| key.expires_at.is_some()) {
                        (world.key, world.expired) = (None, true);
                    }
                    Ok(())
                }
                2 => {
                    let operation = world.operation();
                    let seen = if fault == Fault::QueuedUnseen { Ok(()) } else { world.see(&operation) };
                    queued.push(operation);
                    seen
                }
                3 => {
                    let runs = world.random.one_in(2);
                    queued.drain(..).filter(|_| runs).for_each(|operation| world.run(&operation));
                    Ok(())
                }
                _ if world.random.below(8) < pace => world.piece(),
                _ => {
                    let operation = world.operation();
                    if fault == Fault::KeptLate && matches!(operation, Operation::Write(..)) {
                        world.run(&operation);
                        world.see(&operation)
                    } else {
                        let seen = world.see(&operation);
                        world.run(&operation);
                        seen
                    }
                }
            };
            took.map_err(|lost| lost.to_string())?;
        }
        check(world, &begin)
    }

    fn check(world: World, begin: &Key) -> Result<(), String> {
        if world.state == State::Gone {
            return if world.expired { Ok(()) } else { Err("it has not expired".into()) };
        }
        let mut wanted: Vec<Vec<u8>> = Vec::new();
        let put = |element: &[u8]| [&[element.len() as u8], element].concat();
        match &begin.data {
            Data::List(list) => wanted.extend(list.iter().map(|element| put(&word(*element)))),
            Data::Table(table, _) => wanted.extend(table.iter().map(|(element, value)| {
                let value = match world.shape {
                    Shape::Hash => put(&word(*value)),
                    Shape::SortedSet => (*value as f64).to_le_bytes().to_vec(),
                    Shape::Set | Shape::List | Shape::String => vec![],
                };
                [put(&word(*element)), value].concat()
            })),
            Data::Bytes(bytes) => {
                let mut wanted = Vec::new();
                put_length(&mut wanted, bytes.len() as u64);
                wanted.extend(bytes);
                let found = match world.sent {
                    Some(sent) => [sent, world.large.into_rest().concat()].concat(),
                    None => world.large.into_record().concat(),
                };
                return if found == wanted { Ok(()) } else { Err("another value".into()) };
            }
        }
        let record = world.large.into_record().concat();
        let (count, mut left) = record.split_first().unwrap();
        let mut found = Vec::new();
        while let Some((length, _)) = left.split_first() {
            let mut length = 1 + usize::from(*length);
            match world.shape {
                Shape::Hash => length += 1 + usize::from(left[length]),
                Shape::SortedSet => length += 8,
                Shape::Set | Shape::List | Shape::String => {}
            }
            let (element, rest) = left.split_at(length);
            found.push(element.to_vec());
            left = rest;
        }
        if world.shape != Shape::List {
            wanted.sort();
            found.sort();
        }
        if usize::from(*count) == wanted.len() && found == wanted { Ok(()) } else { Err("another value".into()) }
    }

    /// Values that are taken.
    const SEEDS: u64 = 20_000;

    #[test]
    fn what_is_taken_of_a_large_value_is_what_it_was() {
        for seed in 0..SEEDS {
            play(seed, Fault::None).unwrap_or_else(|wrong| panic!("seed {seed}: {wrong}"));
        }
    }

    #[test]
    fn every_fault_in_the_taking_of_a_large_value_is_found() {
        for fault in FAULTS {
            assert!((0..SEEDS).any(|seed| play(seed, fault).is_err()), "{fault:?} is not found");
        }
    }

    #[test]
    fn a_fault_is_found_in_what_was_taken_and_not_only_by_a_count() {
        for fault in
            [Fault::NoRest, Fault::PieceTwice, Fault::Unsettled, Fault::Popped, Fault::OtherEnd, Fault::OneShort]
        {
            let found = |seed: u64| play(seed, fault).is_err_and(|wrong| wrong == "another value");
            assert!((0..SEEDS).any(found), "{fault:?}");
        }
    }
}
