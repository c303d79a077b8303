//! The search: finds the layout of a server's build by watching it.
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
//! The server listens at a socket in a folder of its own only, saves nothing, and is killed when it was watched.
//!
//! What is found is proved elsewhere: the module tries a layout in a forked child before it uses it. `Memory`: that
//! of the server. `Place`: a place that fits. `Talk`: the commands to the server.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fmt::Write as _;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

use remora_redis::resp::{Decoder, Frame, Limits, command};

use crate::build::{Maps, Names, NamesError, STATE, Table as NamesTable};
use crate::family::{Maker, UnknownVersion};
use crate::{Build, Family, Program};

/// What is searched.
pub struct Wanted<'w> {
    /// The server's program, or a script that becomes it by `exec`.
    pub program: &'w Path,
    /// The name by which it is called, if that is not the program's: one program is server, client and more.
    pub called: Option<OsString>,
    /// A file with the debug information of that program.
    pub debug_file: Option<&'w Path>,
    /// Set from elsewhere when nobody waits any more.
    pub stop: &'w AtomicBool,
}

/// A layout that was found.
#[derive(Debug)]
pub struct Layout {
    /// Of which build.
    pub build: Build,
    /// Its family.
    pub family: Family,
    /// Maker and version of the server.
    pub server: String,
    /// Which table names its functions.
    pub names: NamesTable,
    /// The lines of the file.
    pub text: String,
}

/// Why no layout is found.
#[derive(Debug, thiserror::Error)]
pub enum SearchError {
    /// A file cannot be read.
    #[error("{path} cannot be read: {error}")]
    File {
        /// Its path.
        path: PathBuf,
        /// What the system says.
        error: io::Error,
    },
    /// The program does not run, or not as a server.
    #[error("{program} does not run as a server: {why}")]
    Server {
        /// The program.
        program: PathBuf,
        /// What went wrong.
        why: String,
    },
    /// A reply that was not expected.
    #[error("the server answered {command} by {reply}")]
    Reply {
        /// What was asked.
        command: String,
        /// The answer.
        reply: String,
    },
    /// The program's functions are not named.
    #[error(transparent)]
    Names(#[from] NamesError),
    /// The module has no code for it.
    #[error(transparent)]
    Version(#[from] UnknownVersion),
    /// Version and functions say different things, or a function is missing.
    #[error("this build of {server} is not as others of its version: {why}")]
    Differs {
        /// The server.
        server: String,
        /// What is different.
        why: String,
    },
    /// No place, or several.
    #[error("{0}")]
    Places(String),
    /// Nobody waits any more.
    #[error("the search was stopped")]
    Stopped,
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
const START_LIMIT: Duration = Duration::from_secs(20);

/// How long it may take for one answer: it loads a few thousand keys at most.
const ANSWER_LIMIT: Duration = Duration::from_secs(30);

/// How often a server that starts is asked.
const START_POLL: Duration = Duration::from_millis(20);

/// A time after which no server runs: 2100-01-01, in milliseconds since 1970.
const FAR_MS: &str = "4102444800000";

/// The largest state that is searched; servers have about 20 KB.
const STATE_BYTES_MAX: u64 = 1 << 20;

/// What is known of a build after a run.
struct Found {
    program: Program,
    names: Names,
    maker: Maker,
    version: String,
    database_count: BTreeSet<usize>,
    keys_loaded: BTreeSet<usize>,
    places: BTreeSet<Place>,
}

/// Finds the layout of a program.
///
/// # Errors
/// [`SearchError`].
pub fn find(wanted: &Wanted<'_>) -> Result<Layout, SearchError> {
    // An older server does not know the options with which it would be watched.
    if let Some((maker, version)) = announced(wanted)? {
        Family::of_version(maker, &version)?;
    }
    let [first, second] = &RUNS;
    let (mut found, again) = (watch(wanted, first)?, watch(wanted, second)?);
    if found.program.bytes() != again.program.bytes() {
        let why = "it was not the same program in both runs".into();
        return Err(SearchError::Server { program: wanted.program.to_owned(), why });
    }
    found.database_count.retain(|offset| again.database_count.contains(offset));
    found.keys_loaded.retain(|offset| again.keys_loaded.contains(offset));
    found.places.retain(|place| again.places.contains(place));
    let family = family_of(&found)?;
    let server = format!("{:?} {}", found.maker, found.version);
    let none = |what: &str| SearchError::Places(format!("no place in the server's state has {what}"));
    // Valkey 9 keeps the setting before the number that follows from it. Both are equal, except in cluster mode.
    let count = *found.database_count.last().ok_or_else(|| none("the number of databases (server.dbnum)"))?;
    let loaded = *only(&found.keys_loaded, "the number of loaded keys (server.keys_loaded)")?;
    let place = only(&found.places, "the databases (server.db) and their tables")?;
    let (build, names) = (found.program.build(), found.names.table());
    let mut text = String::new();
    let mut line = |name: &str, value: &dyn std::fmt::Display| {
        // Writing to a string does not fail.
        let _ = writeln!(text, "{name} = {value}");
    };
    line("family", &family.name());
    line("version", &found.version);
    line("sha256", &found.program.sha256());
    line("build", &build);
    for (name, offset) in place.lines(family, count, loaded) {
        line(name, &offset);
    }
    line("names", &names.name());
    // A module looks dynamic symbols up by itself.
    if names != NamesTable::Dynamic {
        for name in family.functions() {
            let offset = found.names.offset(name).unwrap_or_default();
            line(&format!("at.{name}"), &offset);
        }
    }
    Ok(Layout { build, family, server, names, text })
}

/// The family by the version, and by the functions: both must agree, and no function may be missing.
fn family_of(found: &Found) -> Result<Family, SearchError> {
    let server = format!("{:?} {}", found.maker, found.version);
    let family = Family::of_version(found.maker, &found.version)?;
    let by_functions = Family::of_functions(|name| found.names.find(name).is_some());
    if by_functions != Some(family) {
        let shown = by_functions.map_or("no family that is known", Family::name);
        let why = format!("its functions are those of {shown}, and its version is of {}", family.name());
        return Err(SearchError::Differs { server, why });
    }
    match family.functions().into_iter().find(|name| found.names.find(name).is_none()) {
        None => Ok(family),
        Some(name) => {
            let why = format!("{} does not have the function {name}, or has it twice", found.names.table().words());
            Err(SearchError::Differs { server, why })
        }
    }
}

fn only<'s, T: std::fmt::Debug + Ord>(places: &'s BTreeSet<T>, what: &str) -> Result<&'s T, SearchError> {
    match places.first() {
        Some(place) if places.len() == 1 => Ok(place),
        Some(_) => Err(SearchError::Places(format!("several places could be those of {what}: {places:?}"))),
        None => Err(SearchError::Places(format!("no place fits {what}: is this a server of another family?"))),
    }
}

/// Maker and version by the program's own `--version`. `None`: it says them in another form, or not at all; the
/// running server will say them.
fn announced(wanted: &Wanted<'_>) -> Result<Option<(Maker, String)>, SearchError> {
    let mut asked = Running::spawn(wanted, |command, _| _ = command.arg("--version"))?;
    let deadline = Instant::now() + START_LIMIT;
    while asked.child.try_wait().is_ok_and(|ended| ended.is_none()) && Instant::now() < deadline {
        if wanted.stop.load(Relaxed) {
            return Err(SearchError::Stopped);
        }
        thread::sleep(START_POLL);
    }
    let said = fs::read_to_string(asked.folder.path().join(LOG)).unwrap_or_default();
    // `Redis server v=7.0.15 sha=00000000:0 malloc=jemalloc-5.3.0 bits=64 build=…`
    let mut words = said.split_whitespace();
    let maker = match words.next() {
        Some("Redis") => Maker::Redis,
        Some("Valkey") => Maker::Valkey,
        _ => return Ok(None),
    };
    Ok(words.find_map(|word| word.strip_prefix("v=")).map(|version| (maker, version.to_owned())))
}

/// Runs the server once, with these numbers.
fn watch(wanted: &Wanted<'_>, numbers: &Numbers) -> Result<Found, SearchError> {
    let mut server = Running::start(wanted, numbers)?;
    let mut talk = server.talk(wanted.stop)?;
    // Before it is filled: a program without names, or of an unknown version, costs no more than this.
    let maker = talk.maker()?;
    let version = talk.version()?;
    Family::of_version(maker, &version)?;
    let process = PathBuf::from(format!("/proc/{}", server.child.id()));
    // Also where the program was started by a script: this is what runs.
    let program = read(&process.join("exe"))?;
    let names = Names::of(&program, wanted.debug_file.map(read).transpose()?.as_ref())?;
    let keys = talk.fill(numbers)?;
    // The server saves and loads: its counter is that of its own loader, and its tables are as a load leaves them.
    talk.ok(&["DEBUG", "RELOAD"])?;
    let info = talk.ask(&["INFO", "persistence"])?;
    if fact(&info, "rdb_last_load_keys_loaded") != Some(&*keys.to_string()) {
        let why = format!("it did not report {keys} loaded keys after DEBUG RELOAD");
        return Err(SearchError::Server { program: wanted.program.to_owned(), why });
    }
    let memory = Memory::of(&process, &names)?;
    Ok(Found {
        database_count: offsets(&memory.state(), &numbers.databases.to_le_bytes()),
        keys_loaded: offsets(&memory.state(), &keys.to_le_bytes()),
        places: places(&memory, &numbers.fill, wanted.stop)?,
        program,
        names,
        maker,
        version,
    })
}

fn read(path: &Path) -> Result<Program, SearchError> {
    Program::read(path).map_err(|error| SearchError::File { path: path.to_owned(), error })
}

// A server that is watched, and what it is told.

/// A running server, killed when this is dropped.
struct Running {
    child: Child,
    program: PathBuf,
    folder: tempfile::TempDir,
}

impl Drop for Running {
    fn drop(&mut self) {
        // A drop reports no error. It has ended, or must not go on.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Running {
    fn start(wanted: &Wanted<'_>, numbers: &Numbers) -> Result<Running, SearchError> {
        Running::spawn(wanted, |command, folder| {
            command.args(["--port", "0", "--save", "", "--appendonly", "no", "--daemonize", "no"]);
            command.args(["--enable-debug-command", "yes", "--loglevel", "warning"]);
            command.args(["--databases", &numbers.databases.to_string(), "--unixsocketperm", "700"]);
            command.arg("--unixsocket").arg(folder.join(SOCKET)).arg("--dir").arg(folder);
        })
    }

    /// Starts the program in a folder of its own, with the options that `add` gives it; `add` gets the folder.
    fn spawn(wanted: &Wanted<'_>, add: impl FnOnce(&mut Command, &Path)) -> Result<Running, SearchError> {
        let failed =
            |error: io::Error| SearchError::Server { program: wanted.program.to_owned(), why: error.to_string() };
        // The server runs in another folder. A link is kept: one program is server, client and more, by its name.
        let program = std::path::absolute(wanted.program).map_err(failed)?;
        let folder = tempfile::Builder::new().prefix("remora-layout-").tempdir().map_err(failed)?;
        let mut command = Command::new(&program);
        if let Some(name) = &wanted.called {
            command.arg0(name);
        }
        add(&mut command, folder.path());
        command.current_dir(folder.path());
        command.stdin(Stdio::null()).stdout(File::create(folder.path().join(LOG)).map_err(failed)?);
        command.stderr(File::options().append(true).open(folder.path().join(LOG)).map_err(failed)?);
        Ok(Running { child: command.spawn().map_err(failed)?, program, folder })
    }

    fn talk(&mut self, stop: &AtomicBool) -> Result<Talk, SearchError> {
        let deadline = Instant::now() + START_LIMIT;
        loop {
            if stop.load(Relaxed) {
                return Err(SearchError::Stopped);
            }
            let failed = |why: String| SearchError::Server { program: self.program.clone(), why };
            match UnixStream::connect(self.folder.path().join(SOCKET)) {
                Ok(stream) => {
                    let mut talk = Talk::over(stream).map_err(|error| failed(error.to_string()))?;
                    talk.ask(&["PING"])?;
                    return Ok(talk);
                }
                Err(error) if Instant::now() > deadline => return Err(failed(error.to_string())),
                Err(_) => {}
            }
            if let Some(status) = self.child.try_wait().map_err(|error| failed(error.to_string()))? {
                return Err(failed(format!("it ended ({status}) before it answered{}", self.said())));
            }
            thread::sleep(START_POLL);
        }
    }

    /// The last that it wrote, for a message.
    fn said(&self) -> String {
        let text = fs::read(self.folder.path().join(LOG)).unwrap_or_default();
        let text = String::from_utf8_lossy(text.get(text.len().saturating_sub(SAID_BYTES)..).unwrap_or_default());
        if text.trim().is_empty() { String::new() } else { format!("; it wrote: {}", text.trim()) }
    }
}

const SOCKET: &str = "socket";
const LOG: &str = "log";

/// How much of a log a message has.
const SAID_BYTES: usize = 500;

/// Commands to a server, one after the other.
struct Talk {
    stream: UnixStream,
    decoder: Decoder,
}

impl Talk {
    fn over(stream: UnixStream) -> io::Result<Talk> {
        stream.set_read_timeout(Some(ANSWER_LIMIT))?;
        stream.set_write_timeout(Some(ANSWER_LIMIT))?;
        Ok(Talk { stream, decoder: Decoder::new(Limits::default()) })
    }

    fn ask(&mut self, words: &[&str]) -> Result<Frame, SearchError> {
        self.send(&[words.to_vec()])?;
        self.receive(words)
    }

    fn ok(&mut self, words: &[&str]) -> Result<(), SearchError> {
        let frame = self.ask(words)?;
        if frame.is_ok() { Ok(()) } else { Err(unexpected(words, format!("{frame:?}"))) }
    }

    fn send(&mut self, commands: &[Vec<&str>]) -> Result<(), SearchError> {
        let mut bytes = Vec::new();
        commands.iter().for_each(|words| command(&mut bytes, words));
        let words = commands.first().map_or(&[][..], Vec::as_slice);
        self.stream.write_all(&bytes).map_err(|error| unexpected(words, error.to_string()))
    }

    fn receive(&mut self, words: &[&str]) -> Result<Frame, SearchError> {
        let mut buffer = [0; 16 << 10];
        loop {
            match self.decoder.next_frame() {
                Ok(Some(Frame::Error(text))) => return Err(unexpected(words, String::from_utf8_lossy(&text).into())),
                Ok(Some(frame)) => return Ok(frame),
                Ok(None) => {}
                Err(error) => return Err(unexpected(words, error.to_string())),
            }
            match self.stream.read(&mut buffer) {
                Ok(0) => return Err(unexpected(words, "the end of the connection".into())),
                Ok(read) => self.decoder.feed(buffer.get(..read).unwrap_or_default()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(unexpected(words, error.to_string())),
            }
        }
    }

    fn maker(&mut self) -> Result<Maker, SearchError> {
        let info = self.ask(&["INFO", "server"])?;
        Ok(if fact(&info, "valkey_version").is_some() { Maker::Valkey } else { Maker::Redis })
    }

    /// The server's own version: Valkey also reports the version of Redis that it is compatible with.
    fn version(&mut self) -> Result<String, SearchError> {
        let info = self.ask(&["INFO", "server"])?;
        let version = fact(&info, "valkey_version").or_else(|| fact(&info, "redis_version"));
        version.map(str::to_owned).ok_or_else(|| unexpected(&["INFO", "server"], "no version".into()))
    }

    /// Returns the number of keys.
    fn fill(&mut self, numbers: &Numbers) -> Result<u64, SearchError> {
        let mut all = 0;
        for (database, keys, expiring) in numbers.fill {
            self.ok(&["SELECT", &database.to_string()])?;
            let names: Vec<String> = (0..keys).map(|number| format!("key {number}")).collect();
            // Some kilobytes at once: neither end waits for the other.
            for (number, part) in names.chunks(PIPELINE).enumerate() {
                let first = (number * PIPELINE) as u64;
                let set = |(at, name): (u64, &'_ String)| -> Vec<String> {
                    let words = ["SET", name, "value"].map(str::to_owned).to_vec();
                    let expiry = ["PXAT", FAR_MS].map(str::to_owned);
                    if first + at < expiring { [&words[..], &expiry].concat() } else { words }
                };
                let commands: Vec<Vec<String>> = (0..).zip(part).map(set).collect();
                let borrowed: Vec<Vec<&str>> =
                    commands.iter().map(|words| words.iter().map(String::as_str).collect()).collect();
                self.send(&borrowed)?;
                for words in &borrowed {
                    self.receive(words)?;
                }
            }
            all += keys;
        }
        Ok(all)
    }
}

/// Commands that are on their way at once.
const PIPELINE: usize = 100;

fn unexpected(words: &[&str], reply: String) -> SearchError {
    SearchError::Reply { command: words.join(" "), reply }
}

/// A value in a reply to INFO.
fn fact<'f>(info: &'f Frame, name: &str) -> Option<&'f str> {
    let lines = info.as_str()?.lines();
    lines.filter_map(|line| line.trim_end().split_once(':')).find(|(known, _)| *known == name).map(|(_, value)| value)
}

// The memory of a running server, and where its state is in it.

/// The memory of a process that belongs to us.
struct Memory {
    file: File,
    /// Where the variable `server` is, and its size.
    state: u64,
    state_bytes: usize,
}

impl Memory {
    fn of(process: &Path, names: &Names) -> Result<Memory, SearchError> {
        let failed = |path: PathBuf| move |error| SearchError::File { path, error };
        let maps = Maps::of(process).map_err(failed(process.join("maps")))?;
        let none = || SearchError::Places("the process does not have its program in its memory".into());
        let (loaded_at, state) = (maps.program.ok_or_else(none)?, names.find(STATE).ok_or(NamesError::Stripped)?);
        let address = loaded_at.wrapping_add(state.offset);
        if state.bytes == 0 || state.bytes > STATE_BYTES_MAX || !maps.is_data(address, state.bytes) {
            return Err(SearchError::Places(format!("`{STATE}` is not the server's state: {} bytes", state.bytes)));
        }
        let file = File::open(process.join("mem")).map_err(failed(process.join("mem")))?;
        Ok(Memory { file, state: address, state_bytes: state.bytes as usize })
    }

    /// The server's state.
    fn state(&self) -> Vec<u8> {
        self.bytes(self.state, self.state_bytes)
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

/// Where these bytes are, at multiples of their length.
fn offsets(bytes: &[u8], wanted: &[u8]) -> BTreeSet<usize> {
    let aligned = bytes.chunks_exact(wanted.len()).enumerate();
    aligned.filter(|(_, number)| *number == wanted).map(|(index, _)| index * wanted.len()).collect()
}

/// Where databases with those keys are: database, keys, and how many of them expire.
fn places(memory: &Memory, fill: &[(u32, u64, u64)], stop: &AtomicBool) -> Result<BTreeSet<Place>, SearchError> {
    let state = memory.words(memory.state, memory.state_bytes / WORD);
    let mut places = BTreeSet::new();
    for (index, array) in state.into_iter().enumerate().filter(|(_, word)| *word != 0) {
        if stop.load(Relaxed) {
            return Err(SearchError::Stopped);
        }
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
    Ok(places)
}

impl Place {
    /// The lines of a layout.
    fn lines(&self, family: Family, count: usize, loaded: usize) -> Vec<(&'static str, usize)> {
        let Table { tables, used, rehash, exponents } = self.table;
        // Other families have no stores, or a function that knows them.
        let store = self.store.filter(|_| family.has_stores_of_dicts());
        let first = [
            ("server.db", self.databases),
            ("server.dbnum", count),
            ("server.keys_loaded", loaded),
            ("db.bytes", self.database_bytes),
            ("db.keys", self.keys),
            ("db.expires", self.expires),
            ("db.id", self.number),
        ];
        let table =
            [("table.tables", tables), ("table.used", used), ("table.rehash", rehash), ("table.exponents", exponents)];
        first.into_iter().chain(store.map(|offset| ("store.tables", offset))).chain(table).collect()
    }
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
    use std::os::unix::fs::PermissionsExt;

    use object::{Object, ObjectSection};
    use remora_lab::require;

    use super::*;

    fn search(program: &Path, debug_file: Option<&Path>) -> Result<Layout, SearchError> {
        find(&Wanted { program, called: None, debug_file, stop: &AtomicBool::new(false) })
    }

    /// A copy of a server in which a section has another name for the server's state.
    fn without(program: &[u8], sections: &[&str], path: &Path) {
        let (mut bytes, parsed) = (program.to_vec(), object::File::parse(program).unwrap());
        for range in sections.iter().filter_map(|name| parsed.section_by_name(name)?.file_range()) {
            let names = &mut bytes[range.0 as usize..(range.0 + range.1) as usize];
            let at = names.windows(8).position(|name| name == b"\0server\0").unwrap();
            names[at + 1] = b'S';
        }
        fs::write(path, bytes).unwrap();
        fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
    }

    #[test]
    fn functions_are_named_by_the_program_its_symbols_or_a_debug_file() {
        for kind in require::kinds() {
            let folder = tempfile::tempdir().unwrap();
            let original = kind.binary().unwrap();
            let shown = search(&original, None).unwrap();
            assert_eq!(shown.names, NamesTable::Dynamic);
            assert!(!shown.text.contains("at."), "a module looks them up by itself");
            let program = Program::read(&original).unwrap();
            let has_symbols = object::File::parse(program.bytes()).unwrap().symbols().next().is_some();
            let [quiet, stripped] = ["quiet-server", "stripped-server"].map(|name| folder.path().join(name));
            without(program.bytes(), &[".dynstr"], &quiet);
            without(program.bytes(), &[".dynstr", ".strtab"], &stripped);
            let refused = search(&stripped, None).unwrap_err().to_string();
            assert!(refused.contains("--debug-file"), "{refused}");
            // A debug file of another program, and one without names.
            let other = search(&stripped, Some(&std::env::current_exe().unwrap())).unwrap_err();
            assert!(matches!(other, SearchError::Names(NamesError::OtherBuild { .. })), "{other}");
            let nameless = search(&stripped, Some(&stripped)).unwrap_err();
            assert!(matches!(nameless, SearchError::Names(NamesError::NoSymbols)), "{nameless}");
            if !has_symbols {
                continue;
            }
            for (program, debug_file, table) in
                [(&quiet, None, NamesTable::Symbols), (&stripped, Some(&*original), NamesTable::DebugFile)]
            {
                let found = search(program, debug_file).unwrap();
                assert_eq!((found.names, &found.build), (table, &shown.build));
                for name in found.family.functions() {
                    assert!(found.text.contains(&format!("at.{name} = ")), "{name}");
                }
            }
        }
    }

    #[test]
    fn what_is_no_server_is_refused_with_what_it_said() {
        let refused = |program: &str| search(Path::new(program), None).unwrap_err().to_string();
        assert!(refused("/nonexistent/server").contains("No such file"));
        let text = refused("/bin/false");
        assert!(text.contains("ended (exit status: 1) before it answered"), "{text}");
        let folder = tempfile::tempdir().unwrap();
        let script = folder.path().join("script");
        fs::write(&script, "#!/bin/sh\necho 'libfoo.so.1 is missing' >&2\nexit 3\n").unwrap();
        fs::set_permissions(&script, fs::Permissions::from_mode(0o755)).unwrap();
        let text = search(&script, None).unwrap_err().to_string();
        assert!(text.contains("libfoo.so.1 is missing"), "{text}");
    }

    #[test]
    fn a_version_that_is_not_known_is_refused_before_the_server_runs() {
        let folder = tempfile::tempdir().unwrap();
        let script = folder.path().join("old-server");
        fs::write(
            &script,
            "#!/bin/sh\ntest \"$1\" = --version || exit 3\necho 'Redis server v=6.2.14 sha=0:0 bits=64'\n",
        )
        .unwrap();
        fs::set_permissions(&script, fs::Permissions::from_mode(0o755)).unwrap();
        let refused = search(&script, None).unwrap_err();
        assert!(matches!(refused, SearchError::Version(_)), "{refused}");
    }

    #[test]
    fn a_search_that_is_stopped_leaves_no_server_behind() {
        let stop = AtomicBool::new(true);
        for kind in require::kinds() {
            let program = &kind.binary().unwrap();
            let stopped = find(&Wanted { program, called: None, debug_file: None, stop: &stop }).unwrap_err();
            assert!(matches!(stopped, SearchError::Stopped), "{stopped}");
        }
    }
}
