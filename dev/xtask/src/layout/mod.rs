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
//! on the build itself. [`memory`]: the memory of the server. [`search`]: the places that fit.

mod memory;
mod search;

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use clap::Args;
use remora_bench::sync::Result;
use remora_lab::process::Process;
use remora_lab::{Address, Client, scratch};

use self::memory::Memory;
use self::search::{Place, Table};

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
        database_count: search::numbers_of_32_bits(&memory, numbers.databases),
        keys_loaded: search::numbers_of_64_bits(&memory, keys),
        places: search::places(&memory, &numbers.fill),
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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    /// The kept files are of several builds; those of the lab's servers are found by watching them.
    #[test]
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
