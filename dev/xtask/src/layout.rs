//! `xtask layout`: finds the layout of a server's build by watching it, for `module/builds/`.
//!
//! Packages of servers come without debug information, and the headers of a build are rarely at hand. But a running
//! server shows where it keeps things: one that was told to have 1,237 databases has this number in its state, and one
//! that has loaded 701 keys into database 0 has a table there that says so.
//!
//! ```text
//!   start the server ──▶ fill databases with known numbers of keys ──▶ DEBUG RELOAD, so that it has loaded them
//!          ▲                                                                   │ /proc/PID/mem
//!          └───── again, with other numbers ◀───── all places that fit ◀───────┘
//!                                                        │ in every run
//!                                                        ▼
//!                                    one place for each name, or an error that names it
//! ```
//!
//! What is found is proved elsewhere: the module tries a layout in a forked child before it uses it, and its tests run
//! on the build itself. [`Memory`]: that of the server. [`Place`]: a place that fits.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use std::{fs, thread};

use clap::Args;
use object::{Object, ObjectSegment, ObjectSymbol};
use remora_bench::sync::Result;
use remora_lab::process::Process;
use remora_lab::{Address, Client, scratch};
use sha2::{Digest, Sha256};

/// Command-line arguments.
#[derive(Args, Debug)]
pub(crate) struct Options {
    /// The server's program, or a script that becomes it by `exec`.
    program: PathBuf,
    /// Which package the program is from, for the first line of the file.
    #[arg(long, value_name = "WORDS")]
    package: String,
    /// The file to write; standard output without it.
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
}

/// Numbers that a run gives to its server, and then searches for: rare ones, and others in each run.
struct Numbers {
    databases: u32,
    /// Database, its keys, and how many of them expire.
    fill: [(u32, u64, u64); 4],
}

const RUNS: [Numbers; 2] = [
    Numbers { databases: 1237, fill: [(0, 701, 61), (1, 307, 43), (2, 97, 29), (7, 1511, 17)] },
    Numbers { databases: 1019, fill: [(0, 449, 31), (1, 887, 79), (3, 211, 53), (5, 1301, 23)] },
];

/// How long a server may take until it answers.
const START_TIME: Duration = Duration::from_secs(20);

/// A time after which no server runs: 2100-01-01, in milliseconds since 1970.
const FAR_MS: &str = "4102444800000";

/// What is known of a build.
#[derive(Debug)]
struct Found {
    family: &'static str,
    version: String,
    sha256: String,
    database_count: BTreeSet<usize>,
    keys_loaded: BTreeSet<usize>,
    places: BTreeSet<Place>,
}

pub(crate) fn run(options: &Options) -> Result<()> {
    let text = format!("# {}\n{}", options.package, learn(&options.program)?);
    match &options.out {
        None => print!("{text}"),
        Some(path) => fs::write(path, text)
            .map_err(|error| format!("the layout was not written to {}: {error}", path.display()))?,
    }
    Ok(())
}

/// The lines of the layout of that program.
pub(crate) fn learn(program: &Path) -> Result<String> {
    // The server runs in another folder. A link is kept: one program is server, client and more, by its name.
    let program = &std::path::absolute(program)?;
    let [first, second] = &RUNS;
    let (mut found, again) = (watch(program, first)?, watch(program, second)?);
    if found.sha256 != again.sha256 {
        return Err(format!("{} was not the same program in both runs", program.display()).into());
    }
    found.database_count.retain(|offset| again.database_count.contains(offset));
    found.keys_loaded.retain(|offset| again.keys_loaded.contains(offset));
    found.places.retain(|place| again.places.contains(place));
    // Valkey 9 keeps the setting before the number that follows from it. Both are equal, except in cluster mode.
    let count = found.database_count.last().ok_or("no place in the server's state has the number of databases")?;
    let loaded = only(&found.keys_loaded, "the number of loaded keys (server.keys_loaded)")?;
    let place = only(&found.places, "the databases (server.db) and their tables")?;
    let Table { tables, used, rehash, exponents } = place.table;
    let mut text = String::new();
    for (name, value) in [("family", found.family), ("version", &*found.version), ("sha256", &*found.sha256)] {
        writeln!(text, "{name} = {value}")?;
    }
    // Others have a function that knows it.
    let store = place.store.filter(|_| ["redis-8.0", "valkey-8.0"].contains(&found.family));
    let numbers = [
        ("server.db", place.databases),
        ("server.dbnum", *count),
        ("server.keys_loaded", *loaded),
        ("db.bytes", place.database_bytes),
        ("db.keys", place.keys),
        ("db.expires", place.expires),
        ("db.id", place.number),
    ];
    let table =
        [("table.tables", tables), ("table.used", used), ("table.rehash", rehash), ("table.exponents", exponents)];
    for (name, offset) in numbers.into_iter().chain(store.map(|offset| ("store.tables", offset))).chain(table) {
        writeln!(text, "{name} = {offset}")?;
    }
    Ok(text)
}

fn only<'s, T: std::fmt::Debug + Ord>(places: &'s BTreeSet<T>, what: &str) -> Result<&'s T> {
    match places.first() {
        Some(place) if places.len() == 1 => Ok(place),
        Some(_) => Err(format!("several places could be those of {what}: {places:?}").into()),
        None => Err(format!("no place fits {what}: is this a server of another family?").into()),
    }
}

/// Runs the server once, with these numbers.
fn watch(program: &Path, numbers: &Numbers) -> Result<Found> {
    let folder = scratch::folder("layout")?;
    let socket = folder.path().join("server.socket");
    let mut command = Command::new(program);
    command.args(["--port", "0", "--save", "", "--appendonly", "no", "--daemonize", "no", "--enable-debug-command"]);
    command.args(["yes", "--databases", &numbers.databases.to_string(), "--loglevel", "warning", "--unixsocket"]);
    command.arg(&socket).arg("--dir").arg(folder.path()).current_dir(folder.path());
    command.stdin(Stdio::null()).stdout(Stdio::null());
    let (mut process, _) = Process::start(program.display().to_string(), command)?;
    let mut client = connect(&mut process, &socket)?;
    let keys = fill(&mut client, numbers)?;
    // The server saves and loads: its counter is that of its own loader, and its tables are as a load leaves them.
    client.ok(&["DEBUG", "RELOAD"])?;
    let persistence = client.info("persistence")?;
    if persistence.get("rdb_last_load_keys_loaded") != Some(&*keys.to_string()) {
        return Err(format!("the server did not report {keys} loaded keys after DEBUG RELOAD").into());
    }
    let memory = Memory::of(process.pid())?;
    let info = client.info("server")?;
    let version = info.get("valkey_version").or_else(|| info.get("redis_version"));
    let found = Found {
        family: memory.family()?,
        version: version.ok_or("the server does not report its version")?.to_owned(),
        sha256: memory.sha256(),
        database_count: numbers_of_32_bits(&memory, numbers.databases),
        keys_loaded: numbers_of_64_bits(&memory, keys),
        places: places(&memory, &numbers.fill),
    };
    process.kill()?;
    Ok(found)
}

fn connect(process: &mut Process, socket: &Path) -> Result<Client> {
    let deadline = Instant::now() + START_TIME;
    loop {
        match Client::connect(&Address::Unix(socket.to_owned())) {
            Ok(mut client) => {
                client.text(&["PING"])?;
                return Ok(client);
            }
            Err(error) if Instant::now() > deadline => return Err(error.into()),
            Err(_) => {}
        }
        if let Some(status) = process.ended()? {
            return Err(format!("{} ended ({status}) before it answered", process.who()).into());
        }
        thread::sleep(Duration::from_millis(20));
    }
}

/// Returns the number of keys.
fn fill(client: &mut Client, numbers: &Numbers) -> Result<u64> {
    let mut all = 0;
    for (database, keys, expiring) in numbers.fill {
        client.ok(&["SELECT", &database.to_string()])?;
        for number in 0..keys {
            let name = format!("key {number}");
            match number < expiring {
                true => client.ok(&["SET", &name, "value", "PXAT", FAR_MS])?,
                false => client.ok(&["SET", &name, "value"])?,
            }
        }
        all += keys;
    }
    Ok(all)
}

// The memory of a running server, and where its state is in it.

/// The memory of a process that belongs to us.
struct Memory {
    file: File,
    program: Vec<u8>,
    /// Where the variable `server` is, and its size.
    state: u64,
    state_bytes: usize,
}

impl Memory {
    /// # Errors
    /// The program does not show its variable `server`, or its memory cannot be read.
    fn of(pid: u32) -> Result<Memory> {
        // Also where the program was started by a script: this is what runs.
        let program = fs::read(format!("/proc/{pid}/exe"))?;
        let parsed = object::File::parse(&*program)?;
        let state = parsed.dynamic_symbols().find(|symbol| symbol.name() == Ok("server"));
        let state = state.ok_or("the program does not show its variable `server`: it was linked without -rdynamic")?;
        let linked_at = parsed.segments().find(|segment| segment.file_range().0 == 0).map(|segment| segment.address());
        let linked_at = linked_at.ok_or("the program has no segment at its beginning")?;
        let path = fs::read_link(format!("/proc/{pid}/exe"))?;
        let maps = fs::read_to_string(format!("/proc/{pid}/maps"))?;
        let loaded_at = maps.lines().filter(|line| line.ends_with(&*path.to_string_lossy())).find_map(|line| {
            let mut words = line.split_whitespace();
            let (range, offset) = (words.next()?, words.nth(1)?);
            let zero = u64::from_str_radix(offset, 16) == Ok(0);
            zero.then(|| u64::from_str_radix(range.split('-').next()?, 16).ok()).flatten()
        });
        let loaded_at = loaded_at.ok_or_else(|| format!("process {pid} does not have its program in its memory"))?;
        let (address, bytes) = (state.address() - linked_at + loaded_at, state.size() as usize);
        let file = File::open(format!("/proc/{pid}/mem"))?;
        Ok(Memory { file, state: address, state_bytes: bytes, program })
    }

    /// The address of the server's state.
    fn state(&self) -> u64 {
        self.state
    }

    /// The size of the server's state.
    fn state_bytes(&self) -> usize {
        self.state_bytes
    }

    /// The SHA-256 of the program, hexadecimal.
    fn sha256(&self) -> String {
        Sha256::digest(&self.program).iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// The family of the build, by the functions that it shows.
    ///
    /// # Errors
    /// The functions are those of no family that the module knows.
    fn family(&self) -> Result<&'static str> {
        let parsed = object::File::parse(&*self.program)?;
        let shown: Vec<&str> = parsed.dynamic_symbols().filter_map(|symbol| symbol.name().ok()).collect();
        let shows = |name: &str| shown.contains(&name);
        if shows("kvstoreGetHashtable") && shows("objectGetVal") {
            Ok("valkey-9")
        } else if shows("kvstoreGetHashtable") {
            Ok("valkey-8.1")
        } else if shows("dictGenHashFunction") && !shows("kvstoreCreate") {
            Ok("redis-7")
        } else if shows("dictGenHashFunction") && shows("dictSdsEmbedKey") {
            Ok("valkey-8.0")
        } else if shows("dictGenHashFunction") && !shows("kvobjGetKey") {
            Ok("redis-8.0")
        } else {
            Err("the module has no code for this server's tables; its families are redis-7, redis-8.0, valkey-8.0, \
                 valkey-8.1 and valkey-9"
                .into())
        }
    }

    /// The bytes at an address; fewer if fewer can be read.
    fn bytes(&self, address: u64, count: usize) -> Vec<u8> {
        let mut bytes = vec![0; count];
        let read = self.file.read_at(&mut bytes, address).unwrap_or(0);
        bytes.truncate(read);
        bytes
    }

    /// The words at an address; fewer if fewer can be read.
    fn words(&self, address: u64, count: usize) -> Vec<u64> {
        let bytes = self.bytes(address, count * size_of::<u64>());
        bytes
            .chunks_exact(size_of::<u64>())
            .map(|word| word.iter().rev().fold(0, |all, byte| all << 8 | u64::from(*byte)))
            .collect()
    }

    /// The word at an address.
    fn word(&self, address: u64) -> Option<u64> {
        self.words(address, 1).first().copied()
    }
}

// The places in a server's memory that fit what the server was filled with.

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
struct Place {
    databases: usize,
    /// 0 if the server keeps addresses of databases.
    database_bytes: usize,
    keys: usize,
    expires: usize,
    number: usize,
    /// Where a store has the address of its tables, if there are stores.
    store: Option<usize>,
    table: Table,
}

/// A table, and where a store has the address of its tables, if the table is in a store.
type InStore = (Option<usize>, Table);

/// Offsets in a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Table {
    tables: usize,
    used: usize,
    rehash: usize,
    exponents: usize,
}

/// Where the state has that number.
fn numbers_of_32_bits(memory: &Memory, number: u32) -> BTreeSet<usize> {
    let state = memory.bytes(memory.state(), memory.state_bytes());
    offsets(&state, &number.to_le_bytes())
}

/// Where the state has that number.
fn numbers_of_64_bits(memory: &Memory, number: u64) -> BTreeSet<usize> {
    let state = memory.bytes(memory.state(), memory.state_bytes());
    offsets(&state, &number.to_le_bytes())
}

fn offsets(bytes: &[u8], wanted: &[u8]) -> BTreeSet<usize> {
    let aligned = bytes.chunks_exact(wanted.len()).enumerate();
    aligned.filter(|(_, number)| *number == wanted).map(|(index, _)| index * wanted.len()).collect()
}

/// Where databases with those keys are: database, keys, and how many of them expire.
fn places(memory: &Memory, fill: &[(u32, u64, u64)]) -> BTreeSet<Place> {
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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    /// The kept files are of several builds; those of the lab's servers are found by watching them.
    #[test]
    #[ignore = "long: make test-all"]
    fn the_layouts_of_the_labs_servers_are_found_again() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../module/builds");
        let kept: Vec<String> = std::fs::read_dir(folder)
            .unwrap()
            .map(|entry| std::fs::read_to_string(entry.unwrap().path()).unwrap())
            .map(|text| text.lines().filter(|line| !line.starts_with('#')).map(|line| format!("{line}\n")).collect())
            .collect();
        for kind in remora_lab::require::kinds() {
            let learned = super::learn(&kind.binary().unwrap()).unwrap();
            assert!(kept.contains(&learned), "{kind}: no file of module/builds has\n{learned}");
        }
    }
}
