//! A model of one large value that is taken in pieces while clients change it: what was taken is what it was when the
//! first piece was begun, or it has expired.
//!
//! Commands run at once, or wait in a transaction, which may never run. Faults are put between the value and what takes
//! it, and each of them must be found.

#![allow(clippy::unwrap_used)]

use std::collections::{BTreeMap, VecDeque};

use remora_lab::random::Random;
use remora_redis::rdb::put_length;

use super::large::{End, Large, Lost, Shape, Show, State, Touch, Value};
use super::model::Shape as Tables;

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
        let words: Vec<&[u8]> = [&b"command"[..], b"key"].into_iter().chain(words.iter().map(Vec::as_slice)).collect();
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
    for fault in [Fault::NoRest, Fault::PieceTwice, Fault::Unsettled, Fault::Popped, Fault::OtherEnd, Fault::OneShort] {
        let found = |seed: u64| play(seed, fault).is_err_and(|wrong| wrong == "another value");
        assert!((0..SEEDS).any(found), "{fault:?}");
    }
}
