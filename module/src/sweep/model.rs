//! A model of a server that is swept while clients change it: what the sweep writes down is what the server had at the
//! beginning, and with the stream behind it, what the server has at the end.
//!
//! The model has the servers' tables as far as a sweep sees them: two tables while one of them grows or shrinks, and
//! the servers' own scan (`dictScan`). Faults are put into the driver, and each of them must be found.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;

use remora_lab::random::Random;

use super::feed::{Course, Place};

/// A fault in the driver of a sweep.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    None,
    /// The destination of a `RENAME` is not settled.
    RenamedOnto,
    /// A deletion settles nothing: the stream deletes the key.
    Deleted,
    /// Nor does what overwrites a key.
    Overwritten,
    /// A key that does not exist is not kept among the settled.
    Absent,
    /// Keys are settled in the database that is being swept only.
    OneDatabase,
    /// A command of a transaction is seen when it runs; it was queued before the beginning and is not.
    QueuedBefore,
    /// A key that is shown again is recorded again.
    ShownAgain,
    /// The filter is removed when the last database is begun.
    EarlyEnd,
}

const FAULTS: [Fault; 8] = [
    Fault::RenamedOnto,
    Fault::Deleted,
    Fault::Overwritten,
    Fault::Absent,
    Fault::OneDatabase,
    Fault::QueuedBefore,
    Fault::ShownAgain,
    Fault::EarlyEnd,
];

type Data = Vec<BTreeMap<u8, u64>>;

/// What clients do. A key is a letter, a value a number.
#[derive(Clone, Copy, Debug)]
enum Operation {
    Set(u8, u64),
    /// Changes what is there, or makes it.
    Append(u8, u64),
    Delete(u8),
    Rename(u8, u8),
    /// Into the database of that number.
    Copy(u8, usize, u8),
    /// From two into one.
    Union(u8, u8, u8),
    /// The server removes a key by itself: no filter sees it, and the stream has a deletion.
    Expire(u8),
}

impl Operation {
    fn random(random: &mut Random) -> Operation {
        let mut key = || random.below(u64::from(KEYS)) as u8;
        let (a, b, c) = (key(), key(), key());
        let value = random.word();
        match random.below(7) {
            0 => Operation::Set(a, value),
            1 | 2 => Operation::Append(a, value),
            3 => Operation::Delete(a),
            4 => Operation::Rename(a, b),
            5 => Operation::Copy(a, random.below(DATABASES as u64) as usize, b),
            _ => Operation::Union(a, b, c),
        }
    }

    fn keys(self) -> Vec<u8> {
        match self {
            Operation::Set(a, _) | Operation::Append(a, _) | Operation::Delete(a) => vec![a],
            Operation::Rename(a, b) | Operation::Copy(a, _, b) => vec![a, b],
            Operation::Union(a, b, c) => vec![a, b, c],
            Operation::Expire(_) => vec![],
        }
    }

    fn apply(self, data: &mut Data, database: usize) {
        let at = |data: &Data, key: u8| data[database].get(&key).copied();
        match self {
            Operation::Set(a, value) => drop(data[database].insert(a, value)),
            Operation::Append(a, value) => {
                let old = at(data, a).unwrap_or(0);
                data[database].insert(a, old.wrapping_mul(31).wrapping_add(value));
            }
            Operation::Delete(a) | Operation::Expire(a) => drop(data[database].remove(&a)),
            Operation::Rename(a, b) => {
                if let Some(value) = data[database].remove(&a) {
                    data[database].insert(b, value);
                }
            }
            Operation::Copy(a, into, b) => {
                if let Some(value) = at(data, a) {
                    data[into].insert(b, value);
                }
            }
            Operation::Union(a, b, c) => {
                let value = at(data, b).unwrap_or(1).wrapping_mul(7) ^ at(data, c).unwrap_or(2);
                data[database].insert(a, value);
            }
        }
    }
}

const KEYS: u8 = 40;
const DATABASES: usize = 3;

/// Keys from here on expire some time.
const EXPIRING: u8 = 36;

/// The shape of one database's tables.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shape {
    pub(super) bits: u32,
    /// While keys move there.
    pub(super) next: Option<u32>,
}

impl Shape {
    pub(super) fn change(&mut self, random: &mut Random) {
        match self.next.take() {
            Some(bits) => self.bits = bits,
            None => self.next = Some(random.below(7) as u32),
        }
    }

    /// One step of the servers' scan: whether it shows a key of this hash, and where the next step begins.
    pub(super) fn step(self, cursor: u64, hash_is_in_next: impl Fn(u64) -> bool) -> (impl Fn(u64) -> bool, u64) {
        let mask = |bits: u32| (1_u64 << bits) - 1;
        let mut masks = [mask(self.bits), mask(self.next.unwrap_or(self.bits))];
        let is_moving = self.next.is_some();
        let swapped = masks[0] > masks[1];
        if swapped {
            masks.swap(0, 1);
        }
        let [small, large] = masks;
        let mut buckets = Vec::new();
        let mut at = cursor;
        loop {
            buckets.push(at & large);
            at |= !large;
            at = at.reverse_bits().wrapping_add(1).reverse_bits();
            if at & (small ^ large) == 0 {
                break;
            }
        }
        let shows = move |hash: u64| {
            let is_in_small = !is_moving || hash_is_in_next(hash) == swapped;
            if is_in_small { hash & small == cursor & small } else { buckets.contains(&(hash & large)) }
        };
        (shows, at)
    }
}

/// A server that is being swept, and what came of it.
struct World {
    random: Random,
    data: Data,
    shapes: Vec<Shape>,
    course: Course,
    cursor: u64,
    fault: Fault,
    expired: u64,
    snapshot: Vec<Vec<(u8, u64)>>,
}

fn hash(key: u8) -> u64 {
    Random::new(u64::from(key)).word()
}

impl World {
    fn settle(&mut self, key: u8) {
        let place = Place::of_hash(hash(key));
        let current = self.course.current().map_or(usize::MAX, |(index, _)| index);
        if self.fault == Fault::Absent && self.data.iter().all(|database| !database.contains_key(&key)) {
            return;
        }
        for index in self.course.settle(place, &[key]).unwrap() {
            if self.fault == Fault::OneDatabase && index != current {
                continue;
            }
            self.record(index, key);
        }
    }

    fn record(&mut self, index: usize, key: u8) {
        let database = self.course.databases()[index].number as usize;
        if let Some(value) = self.data[database].get(&key) {
            self.snapshot[database].push((key, *value));
            self.course.recorded(index);
        }
    }

    fn see(&mut self, operation: Operation) {
        let over = self.fault == Fault::EarlyEnd
            && self.course.current().is_none_or(|(index, _)| index + 1 == self.course.databases().len());
        if over {
            return;
        }
        let keys = match (operation, self.fault) {
            (Operation::Rename(a, _), Fault::RenamedOnto) => vec![a],
            (Operation::Delete(_), Fault::Deleted) | (Operation::Set(..), Fault::Overwritten) => vec![],
            _ => operation.keys(),
        };
        for key in keys {
            self.settle(key);
        }
    }

    fn step(&mut self) {
        let Some((index, database)) = self.course.current() else { return };
        let moved = self.random.word();
        let (shows, cursor) =
            self.shapes[database as usize].step(self.cursor, |hash| hash.rotate_left(9) & moved & 1 == 1);
        let keys: Vec<u8> = self.data[database as usize].keys().copied().filter(|key| shows(hash(*key))).collect();
        let next = Place::of_cursor(cursor);
        for key in keys {
            let is_new = self.course.shown(Place::of_hash(hash(key)), &[key], next).unwrap();
            if is_new || self.fault == Fault::ShownAgain {
                self.record(index, key);
            }
        }
        self.cursor = cursor;
        self.course.passed(next).unwrap();
    }
}

/// Plays a sweep to its end, and says what is wrong with its snapshot.
fn play(seed: u64, fault: Fault) -> Result<(), String> {
    let mut random = Random::new(seed);
    let mut data: Data = vec![BTreeMap::new(); DATABASES];
    for database in &mut data {
        for key in 0..KEYS {
            if random.one_in(2) {
                database.insert(key, random.word());
            }
        }
    }
    if random.one_in(3) {
        data[1].clear();
    }
    let bits = |random: &mut Random| Shape { bits: random.below(7) as u32, next: None };
    let shapes = (0..DATABASES).map(|_| bits(&mut random)).collect();
    let course = Course::new(data.iter().enumerate().map(|(number, keys)| (number as u32, keys.len() as u64)));
    // A transaction: what was queued, and its database.
    let mut queued: Vec<Operation> = Vec::new();
    if fault == Fault::QueuedBefore {
        queued.push(Operation::random(&mut random));
    }
    let (begin, mut stream) = (data.clone(), Vec::new());
    let snapshot = vec![Vec::new(); DATABASES];
    let pace = random.between(1, 6);
    let mut world = World { random, data, shapes, course, cursor: 0, fault, expired: 0, snapshot };
    while world.course.current().is_some() {
        let database = world.random.below(DATABASES as u64) as usize;
        match world.random.below(8) {
            0 => world.shapes[database].change(&mut world.random),
            1 => {
                let key = world.random.between(EXPIRING.into(), KEYS.into()) as u8;
                if world.data[database].contains_key(&key) {
                    world.expired += 1;
                    stream.push((database, Operation::Expire(key)));
                    Operation::Expire(key).apply(&mut world.data, database);
                }
            }
            2 => {
                let operation = Operation::random(&mut world.random);
                world.see(operation);
                queued.push(operation);
            }
            3 => {
                for operation in queued.drain(..) {
                    stream.push((database, operation));
                    operation.apply(&mut world.data, database);
                }
            }
            _ if world.random.below(8) < pace => world.step(),
            _ => {
                let operation = Operation::random(&mut world.random);
                world.see(operation);
                stream.push((database, operation));
                operation.apply(&mut world.data, database);
            }
        }
    }
    check(&world, &begin, &stream)
}

fn check(world: &World, begin: &Data, stream: &[(usize, Operation)]) -> Result<(), String> {
    world.course.check(world.expired).map_err(|astray| astray.to_string())?;
    let mut loaded: Data = vec![BTreeMap::new(); DATABASES];
    for (number, records) in world.snapshot.iter().enumerate() {
        for (key, value) in records {
            if loaded[number].insert(*key, *value).is_some() {
                return Err(format!("the key {key} of database {number} is there twice"));
            }
        }
        let wanted = &begin[number];
        let is_missing = |key: &u8| *key < EXPIRING && !loaded[number].contains_key(key);
        if let Some(key) = wanted.keys().find(|key| is_missing(key)) {
            return Err(format!("the key {key} of database {number} is missing"));
        }
        if let Some((key, _)) = loaded[number].iter().find(|(key, value)| wanted.get(key) != Some(value)) {
            return Err(format!("the key {key} of database {number} was another one at the beginning"));
        }
    }
    for (database, operation) in stream {
        operation.apply(&mut loaded, *database);
    }
    if loaded == world.data { Ok(()) } else { Err("with the stream the data are others".into()) }
}

/// Sweeps that are played.
const SEEDS: u64 = 3_000;

#[test]
fn a_snapshot_is_the_data_of_its_moment_and_with_the_stream_the_data_of_the_end() {
    for seed in 0..SEEDS {
        play(seed, Fault::None).unwrap_or_else(|wrong| panic!("seed {seed}: {wrong}"));
    }
}

#[test]
fn every_fault_is_found() {
    for fault in FAULTS {
        assert!((0..SEEDS).any(|seed| play(seed, fault).is_err()), "{fault:?} is not found");
    }
}
