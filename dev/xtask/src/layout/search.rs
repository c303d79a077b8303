//! The places in a server's memory that fit what the server was filled with.

use std::collections::BTreeSet;

use super::memory::Memory;

const WORD: usize = size_of::<u64>();

/// How far into a database its members are searched for.
const DATABASE_BYTES_MAX: usize = 256;

/// How far into a store of tables the address of its tables is searched for: a store of `dict`s has their type before
/// it, with some twenty functions. What follows a store may be another one.
const STORE_BYTES_MAX: usize = 256;

/// How far into a table its members are searched for.
const TABLE_BYTES_MAX: usize = 72;

/// Keys for each bucket, at most and at least, of a table that was just loaded: Valkey has up to 7 in one, and tables
/// are powers of two.
const KEYS_PER_BUCKET_MAX: u64 = 8;
const BUCKETS_PER_KEY_MAX: u64 = 4;

/// Where databases and their tables are: offsets in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Place {
    pub(super) databases: usize,
    /// 0 if the server keeps addresses of databases.
    pub(super) database_bytes: usize,
    pub(super) keys: usize,
    pub(super) expires: usize,
    pub(super) number: usize,
    /// Where a store has the address of its tables, if there are stores.
    pub(super) store: Option<usize>,
    pub(super) table: Table,
}

/// A table, and where a store has the address of its tables, if the table is in a store.
type InStore = (Option<usize>, Table);

/// Offsets in a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Table {
    pub(super) tables: usize,
    pub(super) used: usize,
    pub(super) rehash: usize,
    pub(super) exponents: usize,
}

/// Where the state has that number.
pub(super) fn numbers_of_32_bits(memory: &Memory, number: u32) -> BTreeSet<usize> {
    let state = memory.bytes(memory.state(), memory.state_bytes());
    offsets(&state, &number.to_le_bytes())
}

/// Where the state has that number.
pub(super) fn numbers_of_64_bits(memory: &Memory, number: u64) -> BTreeSet<usize> {
    let state = memory.bytes(memory.state(), memory.state_bytes());
    offsets(&state, &number.to_le_bytes())
}

fn offsets(bytes: &[u8], wanted: &[u8]) -> BTreeSet<usize> {
    let aligned = bytes.chunks_exact(wanted.len()).enumerate();
    aligned.filter(|(_, number)| *number == wanted).map(|(index, _)| index * wanted.len()).collect()
}

/// Where databases with those keys are: database, keys, and how many of them expire.
pub(super) fn places(memory: &Memory, fill: &[(u32, u64, u64)]) -> BTreeSet<Place> {
    let state = memory.words(memory.state(), memory.state_bytes() / WORD);
    let mut places = BTreeSet::new();
    for (index, array) in state.into_iter().enumerate().filter(|(_, word)| *word != 0) {
        // An array of databases, of any size, or of their addresses.
        for database_bytes in (0..=DATABASE_BYTES_MAX).step_by(WORD) {
            let databases: Option<Vec<Database>> = fill
                .iter()
                .map(|(number, keys, expiring)| {
                    let at = match database_bytes {
                        0 => memory.word(array.wrapping_add(u64::from(*number) * WORD as u64))?,
                        bytes => array.wrapping_add(u64::from(*number) * bytes as u64),
                    };
                    Some(Database { at, number: *number, keys: *keys, expiring: *expiring })
                })
                .collect();
            let found = databases.iter().flat_map(|databases| members(memory, databases));
            for (keys, expires, number, (store, table)) in found {
                places.insert(Place { databases: index * WORD, database_bytes, keys, expires, number, store, table });
            }
        }
    }
    places
}

/// A database, if there is one at that address.
struct Database {
    at: u64,
    number: u32,
    keys: u64,
    expiring: u64,
}

/// Offsets at which all of them have their keys, their expiring keys and their number.
fn members(memory: &Memory, databases: &[Database]) -> Vec<(usize, usize, usize, InStore)> {
    let expires = tables(memory, databases, |database| database.expiring);
    let mut found = Vec::new();
    if expires.is_empty() {
        return found;
    }
    for (keys, table) in tables(memory, databases, |database| database.keys) {
        let alike = |other: &InStore| other.0 == table.0 && other.1.used == table.1.used;
        for (expires, _) in expires.iter().filter(|(offset, other)| *offset != keys && alike(other)) {
            let mut numbers = databases.iter().map(|database| {
                offsets(&memory.bytes(database.at, DATABASE_BYTES_MAX), &database.number.to_le_bytes())
            });
            let first = numbers.next().unwrap_or_default();
            let all = numbers.fold(first, |all, these| &all & &these);
            found.extend(all.into_iter().map(|number| (keys, *expires, number, table)));
        }
    }
    found
}

/// Offsets at which all databases have a table with that many entries, and what these tables are like.
fn tables(memory: &Memory, databases: &[Database], entries: impl Fn(&Database) -> u64) -> Vec<(usize, InStore)> {
    let mut found = Vec::new();
    for offset in (0..DATABASE_BYTES_MAX).step_by(WORD) {
        let mut all = databases.iter().map(|database| {
            let store = memory.word(database.at.wrapping_add(offset as u64)).unwrap_or(0);
            tables_at(memory, store, entries(database))
        });
        let first = all.next().unwrap_or_default();
        // Most places fit none, which the first database shows.
        if !first.is_empty() {
            let common = all.fold(first, |common, these| &common & &these);
            found.extend(common.into_iter().map(|table| (offset, table)));
        }
    }
    found
}

/// What a table with that many entries would be like that is there, or to which a store there refers.
fn tables_at(memory: &Memory, store: u64, entries: u64) -> BTreeSet<InStore> {
    let mut found: BTreeSet<InStore> =
        tables_like(memory, store, entries).into_iter().map(|table| (None, table)).collect();
    // A store has the address of an array of addresses of tables.
    for (index, array) in memory.words(store, STORE_BYTES_MAX / WORD).into_iter().enumerate() {
        let table = if array == 0 { None } else { memory.word(array) };
        let tables = table.into_iter().flat_map(|table| tables_like(memory, table, entries));
        found.extend(tables.map(|table| (Some(index * WORD), table)));
    }
    found
}

/// What a table with that many entries would be like: two tables, of which the second does not exist.
fn tables_like(memory: &Memory, at: u64, entries: u64) -> BTreeSet<Table> {
    let bytes = memory.bytes(at, TABLE_BYTES_MAX);
    let words = memory.words(at, TABLE_BYTES_MAX / WORD);
    let mut found = BTreeSet::new();
    let Some(used) = words.windows(2).position(|pair| pair == [entries, 0]) else { return found };
    let Some(rehash) = words.iter().position(|word| *word == u64::MAX) else { return found };
    let two = words.windows(2).position(|pair| matches!(pair, [first, 0] if memory.word(*first).is_some()));
    let Some(tables) = two.filter(|tables| *tables != used) else { return found };
    let taken = |offset: usize| offset / WORD == rehash || [used, tables].contains(&(offset / WORD));
    for (exponents, pair) in bytes.windows(2).enumerate().filter(|(offset, _)| !taken(*offset)) {
        let [exponent, 0xFF] = pair else { continue };
        let Some(buckets) = 1_u64.checked_shl(u32::from(*exponent)) else { continue };
        if entries <= buckets * KEYS_PER_BUCKET_MAX && buckets <= entries * BUCKETS_PER_KEY_MAX {
            found.insert(Table { tables: tables * WORD, used: used * WORD, rehash: rehash * WORD, exponents });
        }
    }
    found
}
