//! A writer at full speed, and a data set with every type in it.
//!
//! ```no_run
//! # use remora_lab::{Kind, Server, workload::Workload};
//! # fn main() -> Result<(), remora_lab::Error> {
//! # let server = Server::start(Kind::Redis7)?;
//! let writer = Workload::on(&server)?;        // full speed, every kind of change, a seed that is printed
//! // ... the test ...
//! let counts = writer.stop()?;
//! # Ok(()) }
//! ```

mod operations;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use crate::client::{Address, Client, shown_bytes};
use crate::random::{self, Random};
use crate::server::{Server, wait_until};
use crate::{Error, Result};
use remora_redis::resp::Frame;

/// How a writer writes.
#[derive(Clone, Debug)]
pub struct Options {
    /// The same seed gives the same commands (their timing depends on the machine).
    pub seed: u64,
    /// Commands per second. `None` for as fast as the server answers.
    pub rate: Option<u64>,
    /// How many operations are sent before their answers are read.
    pub pipeline: usize,
    /// Whether databases other than the first are sometimes emptied and swapped.
    pub flush: bool,
    /// Length of the longest of the big values, in bytes (the shortest has 1 MiB); 0 for no big values.
    pub big_bytes: u64,
    /// Which features are used; `None`: those of the server that is written to.
    pub abilities: Option<Abilities>,
}

impl Options {
    /// Full speed with every operation, from this seed.
    pub fn seeded(seed: u64) -> Options {
        Options { seed, rate: None, pipeline: 32, flush: true, big_bytes: 4 << 20, abilities: None }
    }

    /// Limits the rate to `per_second` commands per second.
    pub fn rate(self, per_second: u64) -> Options {
        Options { rate: Some(per_second), ..self }
    }
}

/// A running writer, with its own thread and connection. Dropping it stops it.
#[derive(Debug)]
pub struct Workload {
    stop: Arc<AtomicBool>,
    sent: Arc<AtomicU64>,
    writer: Option<JoinHandle<Result<Counts>>>,
}

/// What a writer has done.
#[derive(Clone, Debug, Default)]
pub struct Counts {
    /// Number of commands answered.
    pub commands: u64,
    /// Number of commands answered with an error; some errors are expected (no such key).
    pub refused: u64,
    /// How often each error occurred, by its first words.
    pub refusals: BTreeMap<String, u64>,
    /// How often each operation ran, by its name.
    pub operations: BTreeMap<&'static str, u64>,
}

impl Workload {
    /// Starts a writer at full speed with every operation, from a new seed that is printed (`REMORA_SEED` sets it).
    pub fn on(server: &Server) -> Result<Workload> {
        Workload::start(server.client()?, Options::seeded(random::seed("workload")))
    }

    /// Starts a writer on this connection.
    pub fn start(mut client: Client, options: Options) -> Result<Workload> {
        let abilities = match options.abilities {
            Some(abilities) => abilities,
            None => Abilities::of(&mut client)?,
        };
        let (stop, sent) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let mut writer = Writer { client, options, abilities, sent: Arc::clone(&sent), counts: Counts::default() };
        let is_stopped = Arc::clone(&stop);
        let writer = thread::spawn(move || {
            writer.run(&is_stopped)?;
            Ok(writer.counts)
        });
        Ok(Workload { stop, sent, writer: Some(writer) })
    }

    /// Number of commands answered so far.
    pub fn commands(&self) -> u64 {
        self.sent.load(Ordering::Relaxed)
    }

    /// Whether the writer has ended by itself: its connection broke.
    pub fn is_over(&self) -> bool {
        self.writer.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// Waits until the writer has sent `commands` more commands, or has failed.
    pub fn wait_for(&self, commands: u64) {
        let goal = self.commands() + commands;
        while self.commands() < goal && !self.is_over() {
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// Stops the writer. Everything that it sent has been answered by then. Fails if the connection broke.
    pub fn stop(mut self) -> Result<Counts> {
        self.halt().unwrap_or_else(|| Ok(Counts::default()))
    }

    fn halt(&mut self) -> Option<Result<Counts>> {
        self.stop.store(true, Ordering::Relaxed);
        let joined = self.writer.take()?.join();
        Some(joined.unwrap_or_else(|_| Err(Error::Garbled("the writer's thread panicked".into()))))
    }
}

impl Drop for Workload {
    fn drop(&mut self) {
        // A caller that wants the counts or the error has called stop().
        let _ = self.halt();
    }
}

struct Writer {
    client: Client,
    options: Options,
    abilities: Abilities,
    sent: Arc<AtomicU64>,
    counts: Counts,
}

impl Writer {
    fn run(&mut self, stop: &AtomicBool) -> Result<()> {
        let operations = operations::operations(self.abilities, self.options.flush, self.options.big_bytes);
        let mut script = operations::Script::new(self.options.seed, self.options.big_bytes);
        let begun = Instant::now();
        while !stop.load(Ordering::Relaxed) {
            let now = milliseconds_since_1970();
            for _ in 0..self.options.pipeline {
                let operation = operations::draw(&operations, &mut script.random);
                script.write(operation, now);
                *self.counts.operations.entry(operation.name).or_default() += 1;
            }
            let commands = script.commands.len() as u64;
            for answer in script.commands.run(&mut self.client)? {
                self.counts.note(&answer);
            }
            self.counts.commands += commands;
            self.sent.fetch_add(commands, Ordering::Relaxed);
            self.pace(begun, stop);
        }
        Ok(())
    }

    /// Sleeps until the rate allows more.
    fn pace(&self, begun: Instant, stop: &AtomicBool) {
        let Some(rate) = self.options.rate else { return };
        let due = Duration::from_secs_f64(self.counts.commands as f64 / rate.max(1) as f64);
        while let Some(ahead) = due.checked_sub(begun.elapsed()).filter(|ahead| !ahead.is_zero()) {
            if stop.load(Ordering::Relaxed) {
                return;
            }
            thread::sleep(ahead.min(LONGEST_SLEEP));
        }
    }
}

impl Counts {
    fn note(&mut self, answer: &Frame) {
        let Frame::Error(text) = answer else { return };
        self.refused += 1;
        let text = String::from_utf8_lossy(text);
        let words: Vec<&str> = text.split(' ').take(6).collect();
        *self.refusals.entry(words.join(" ")).or_default() += 1;
    }
}

/// Features that only some servers have.
#[derive(Clone, Copy, Debug)]
pub struct Abilities {
    hash_field_expiry: bool,
    functions: bool,
    /// Whether it writes `HINCRBYFLOAT` into its stream as `HSETEX`, as Redis does since 8.0.
    writes_hsetex: bool,
    knows_hsetex: bool,
    /// Whether it knows how many entries a group has read, which servers since 7.0 write into their stream.
    counts_of_groups: bool,
}

impl Abilities {
    /// Asks the server.
    pub fn of(client: &mut Client) -> Result<Abilities> {
        let mut knows = |command: &str| -> Result<bool> {
            let answer = client.list(&["COMMAND", "INFO", command])?;
            Ok(matches!(answer.first(), Some(Frame::Array(facts)) if !facts.is_empty()))
        };
        let (hash_field_expiry, functions) = (knows("HPEXPIREAT")?, knows("FUNCTION")?);
        let knows_hsetex = knows("HSETEX")?;
        let info = client.info("server")?;
        let is_redis_8 = info.get("server_name") != Some("valkey")
            && info.get("redis_version").and_then(|version| version.split('.').next()?.parse().ok()) >= Some(8_u32);
        let writes_hsetex = is_redis_8 && knows_hsetex;
        Ok(Abilities { hash_field_expiry, functions, writes_hsetex, knows_hsetex, counts_of_groups: functions })
    }

    /// Those that this server and another one have in common.
    #[must_use]
    pub fn and(self, other: Abilities) -> Abilities {
        Abilities {
            hash_field_expiry: self.hash_field_expiry && other.hash_field_expiry,
            functions: self.functions && other.functions,
            writes_hsetex: self.writes_hsetex || other.writes_hsetex,
            knows_hsetex: self.knows_hsetex && other.knows_hsetex,
            counts_of_groups: self.counts_of_groups && other.counts_of_groups,
        }
    }

    /// Whether floating-point numbers are added to fields: it is known what stands for that in the stream.
    fn adds_to_fields(self) -> bool {
        self.knows_hsetex || !self.writes_hsetex
    }
}

fn milliseconds_since_1970() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_millis() as u64)
}

/// How long a slow writer may take to notice that it must stop.
const LONGEST_SLEEP: Duration = Duration::from_millis(20);

// Pipelines of commands with arguments of several types.

/// Adds one command to a [`Commands`]: `say!(commands, "SET", key, 5)`.
macro_rules! say {
    ($commands:expr, $($word:expr),+ $(,)?) => {{
        // The arguments first: they may borrow from the owner of `$commands`.
        let command = vec![$($crate::workload::Word::into_bytes($word)),+];
        $commands.push(command)
    }};
}
pub(crate) use say;

/// A value that can be an argument of a command.
pub(crate) trait Word {
    /// The bytes sent to the server.
    fn into_bytes(self) -> Vec<u8>;
}

impl Word for &str {
    fn into_bytes(self) -> Vec<u8> {
        self.as_bytes().to_vec()
    }
}

impl Word for &[u8] {
    fn into_bytes(self) -> Vec<u8> {
        self.to_vec()
    }
}

impl Word for Vec<u8> {
    fn into_bytes(self) -> Vec<u8> {
        self
    }
}

impl Word for &Vec<u8> {
    fn into_bytes(self) -> Vec<u8> {
        self.clone()
    }
}

macro_rules! printed_words {
    ($($kind:ty),+) => {
        $(impl Word for $kind {
            fn into_bytes(self) -> Vec<u8> {
                self.to_string().into_bytes()
            }
        })+
    };
}

printed_words!(u32, u64, i64, f64, String, &String);

/// Commands in order.
#[derive(Debug, Default)]
pub(crate) struct Commands {
    list: Vec<Vec<Vec<u8>>>,
}

impl Commands {
    /// Adds a command; `say!` is usually shorter.
    pub(crate) fn push(&mut self, command: Vec<Vec<u8>>) {
        self.list.push(command);
    }

    /// Adds a command with any number of further arguments.
    pub(crate) fn push_with(&mut self, head: &[&str], words: impl IntoIterator<Item = Vec<u8>>) {
        let mut command: Vec<Vec<u8>> = head.iter().map(|word| word.as_bytes().to_vec()).collect();
        command.extend(words);
        self.list.push(command);
    }

    /// The number of commands.
    pub(crate) fn len(&self) -> usize {
        self.list.len()
    }

    /// Sends the commands and returns their answers. Errors of the server are frames. The list is empty afterwards.
    pub(crate) fn run(&mut self, client: &mut Client) -> Result<Vec<Frame>> {
        let list = std::mem::take(&mut self.list);
        for command in &list {
            client.queue(command);
            // Never more in memory at once than one buffer and one command.
            if client.queued() >= SEND_BYTES {
                client.flush()?;
            }
        }
        list.iter().map(|_| client.receive()).collect()
    }

    /// Sends the commands, and fails at the first error of the server.
    pub(crate) fn run_all(&mut self, client: &mut Client) -> Result<()> {
        let names: Vec<String> = self.list.iter().map(|command| named(command)).collect();
        let answers = self.run(client)?;
        match names.into_iter().zip(answers).find(|(_, answer)| matches!(answer, Frame::Error(_))) {
            Some((command, Frame::Error(text))) => {
                Err(Error::Refused { command, reply: String::from_utf8_lossy(&text).into_owned() })
            }
            _ => Ok(()),
        }
    }
}

fn named(command: &[Vec<u8>]) -> String {
    command.iter().take(3).map(|word| shown_bytes(word)).collect::<Vec<_>>().join(" ")
}

/// Bytes to encode before they are sent.
const SEND_BYTES: usize = 1 << 20;

// A data set with every type in every encoding, and with every byte in keys and values.
//
// It is small (a few MiB) and the same for the same seed: errors of a copy show here first.

/// Fills the databases 0 to 15 with every type. Returns the number of keys in all of them.
pub fn fill_every_type(client: &mut Client, seed: u64) -> Result<u64> {
    let abilities = Abilities::of(client)?;
    fill_with(client, seed, abilities)
}

/// The same with these features only.
pub fn fill_with(client: &mut Client, seed: u64, abilities: Abilities) -> Result<u64> {
    let mut random = Random::new(seed);
    let mut commands = Commands::default();
    for database in 0..DATABASES {
        say!(commands, "SELECT", database);
        small_set(&mut commands, database);
    }
    // The whole collection twice: in database 0, which most tests look at, and in the last one.
    for database in [0, DATABASES - 1] {
        say!(commands, "SELECT", database);
        strings(&mut commands, &mut random);
        lists(&mut commands, &mut random);
        sets(&mut commands, &mut random);
        sorted_sets(&mut commands, &mut random);
        hashes(&mut commands, &mut random, abilities);
        streams(&mut commands, abilities);
        special_strings(&mut commands, &mut random);
        commands.run_all(client)?;
    }
    functions(&mut commands, abilities);
    say!(commands, "SELECT", 0_u32);
    commands.run_all(client)?;
    key_count(client)
}

/// The number of keys in all databases.
pub fn key_count(client: &mut Client) -> Result<u64> {
    let keyspace = client.info("keyspace")?;
    let keys = |line: &str| line.strip_prefix("keys=")?.split(',').next()?.parse::<u64>().ok();
    Ok(keyspace.iter().filter(|(name, _)| name.starts_with("db")).filter_map(|(_, line)| keys(line)).sum())
}

/// The same names with other values in each database: a copy that loses a SELECT differs.
fn small_set(commands: &mut Commands, database: u32) {
    say!(commands, "SET", "database", database);
    say!(commands, "RPUSH", "path", "from", database, "to", database + 1);
    say!(commands, "SET", format!("only-in-{database}"), "here");
}

fn strings(commands: &mut Commands, random: &mut Random) {
    say!(commands, "SET", "string:int", 12_345_u64);
    say!(commands, "SET", "string:int:least", i64::MIN);
    say!(commands, "SET", "string:int:most", i64::MAX);
    say!(commands, "SET", "string:not-quite-int", "9223372036854775808");
    say!(commands, "SET", "string:embstr", "x".repeat(44));
    say!(commands, "SET", "string:raw", "x".repeat(1000));
    say!(commands, "SET", "string:empty", "");
    say!(commands, "SET", "string:compressible", "ab".repeat(50_000));
    say!(commands, "SET", "string:noise", random.bytes(1 << 20));
    say!(commands, "APPEND", "string:appended", "grown");
    say!(commands, "APPEND", "string:appended", " later");
    say!(commands, "SETRANGE", "string:hole", 1000_u32, "after a thousand zeros");

    let every_byte: Vec<u8> = (0..=u8::MAX).collect();
    say!(commands, "SET", &every_byte, &every_byte);
    for byte in 0..=u8::MAX {
        say!(commands, "SET", vec![byte], vec![byte; 3]);
    }
    for strange in
        ["", "\r\n", "a\0b", "$5\r\nhello\r\n", "*1\r\n$4\r\nPING\r\n", "naïve 鯨", "key with spaces \" and '"]
    {
        say!(commands, "SET", strange, strange);
    }
    say!(commands, "SET", "k".repeat(10_000), "a long name");

    say!(commands, "SET", "expires:late", "in 2100", "PXAT", YEAR_2100_MS);
    say!(commands, "SET", "expires:never", "now for good", "PXAT", YEAR_2100_MS);
    say!(commands, "PERSIST", "expires:never");
    for number in 0..50_u64 {
        say!(commands, "SET", format!("expires:{number}"), number, "PXAT", YEAR_2100_MS + number * 977);
    }
}

fn lists(commands: &mut Commands, random: &mut Random) {
    say!(commands, "RPUSH", "list:listpack", "a", "", "-1", "12345678901", "z");
    commands.push_with(&["RPUSH", "list:quicklist"], (0..3000).map(|n: u32| format!("item {n}").into_bytes()));
    say!(commands, "RPUSH", "list:big-item", "before", random.bytes(64 << 10), "after");
    say!(commands, "RPUSH", "list:popped", 1_u32, 2_u32, 3_u32);
    say!(commands, "LPOP", "list:popped");
    say!(commands, "RPUSH", "list:expires", "x");
    say!(commands, "PEXPIREAT", "list:expires", YEAR_2100_MS);
}

fn sets(commands: &mut Commands, random: &mut Random) {
    for (name, base) in [("16", 0_i64), ("32", 1 << 20), ("64", 1 << 40)] {
        let members = (0..100).map(|n| (base + n * 7 - 300).to_string().into_bytes());
        commands.push_with(&["SADD", &format!("set:intset:{name}")], members);
    }
    say!(commands, "SADD", "set:listpack", "a", "b", "", "17");
    commands.push_with(&["SADD", "set:hashtable"], (0..1000).map(|n: u32| format!("member {n}").into_bytes()));
    say!(commands, "SADD", "set:long-member", random.bytes(5000));
}

fn sorted_sets(commands: &mut Commands, random: &mut Random) {
    say!(commands, "ZADD", "zset:listpack", 1.5, "a", "-inf", "least", "+inf", "most", 1e300, "far", 0_u32, "zero");
    say!(commands, "ZADD", "zset:precise", "0.1", "tenth", "0.30000000000000004", "sum", "-0.0", "minus zero");
    let scored = |n: u64, random: &mut Random| {
        let score = random.below(1 << 40) as f64 / 1000.0;
        [score.to_string().into_bytes(), format!("member {n}").into_bytes()]
    };
    let members: Vec<Vec<u8>> = (0..1000).flat_map(|n| scored(n, random)).collect();
    commands.push_with(&["ZADD", "zset:skiplist"], members);
    say!(commands, "GEOADD", "geo", "13.361389", "38.115556", "Palermo", "15.087269", "37.502669", "Catania");
}

fn hashes(commands: &mut Commands, random: &mut Random, abilities: Abilities) {
    say!(commands, "HSET", "hash:listpack", "field", "value", "", "", "number", "-42");
    let fields = (0..2000).map(|n: u32| format!("word {n}").into_bytes());
    commands.push_with(&["HSET", "hash:hashtable"], fields);
    say!(commands, "HSET", "hash:long-value", "noise", random.bytes(10_000), "short", "x");
    if abilities.hash_field_expiry {
        say!(commands, "HSET", "hash:expiring", "stays", "1", "goes", "2", "goes too", "3");
        say!(commands, "HPEXPIREAT", "hash:expiring", YEAR_2100_MS, "FIELDS", "2", "goes", "goes too");
        commands.push_with(&["HSET", "hash:expiring:big"], (0..2000).map(|n: u32| format!("word {n}").into_bytes()));
        say!(commands, "HPEXPIREAT", "hash:expiring:big", YEAR_2100_MS, "FIELDS", "1", "word 0");
    }
}

fn streams(commands: &mut Commands, abilities: Abilities) {
    for number in 1..=500_u64 {
        say!(commands, "XADD", "stream", format!("{}-{number}", 1_000 + number), "number", number, "text", "entry");
    }
    say!(commands, "XDEL", "stream", "1100-100", "1101-101", "1500-500");
    say!(commands, "XGROUP", "CREATE", "stream", "readers", 0_u32);
    say!(commands, "XGROUP", "CREATE", "stream", "idle", "$");
    say!(commands, "XGROUP", "CREATECONSUMER", "stream", "readers", "never read");
    for consumer in ["ann", "bob"] {
        say!(commands, "XREADGROUP", "GROUP", "readers", consumer, "COUNT", 20_u32, "STREAMS", "stream", ">");
    }
    say!(commands, "XACK", "stream", "readers", "1001-1", "1025-25");
    say!(commands, "XADD", "stream:emptied", "1-1", "a", "b");
    say!(commands, "XDEL", "stream:emptied", "1-1");
    say!(commands, "XGROUP", "CREATE", "stream:made", "group", "$", "MKSTREAM");
    say!(commands, "XADD", "stream:other-fields", "5-1", "a", "1");
    say!(commands, "XADD", "stream:other-fields", "5-2", "b", "2", "c", "3");
    // Redis counts what was added to a stream since 7.0, which brought functions too.
    match abilities.functions {
        true => say!(commands, "XSETID", "stream:other-fields", "9-0", "ENTRIESADDED", 12_u32, "MAXDELETEDID", "4-4"),
        false => say!(commands, "XSETID", "stream:other-fields", "9-0"),
    }
}

/// Strings with a structure that some commands use.
fn special_strings(commands: &mut Commands, random: &mut Random) {
    say!(commands, "PFADD", "hll:sparse", "a", "b", "c");
    commands.push_with(&["PFADD", "hll:dense"], (0..20_000).map(|n: u32| format!("visitor {n}").into_bytes()));
    say!(commands, "SETBIT", "bitmap", 100_000_u32, 1_u32);
    say!(commands, "BITFIELD", "bitfield", "SET", "u8", "#0", "200", "INCRBY", "i64", "#2", random.below(1 << 40));
}

fn functions(commands: &mut Commands, abilities: Abilities) {
    if abilities.functions {
        for library in ["first", "second"] {
            say!(commands, "FUNCTION", "LOAD", "REPLACE", library_code(library));
        }
    }
}

/// A library with one function that sets a key.
fn library_code(name: &str) -> String {
    format!(
        "#!lua name={name}\nredis.register_function('{name}_set', function(keys, args) return \
         redis.call('SET', keys[1], args[1]) end)\n"
    )
}

/// The servers' default number of databases.
const DATABASES: u32 = 16;

/// Later than any test. Absolute, so that two fills with the same seed are equal.
const YEAR_2100_MS: u64 = 4_102_444_800_000;

// A data set of small values of all types, as many services have: half strings, a third hashes, the rest lists, sets
// and sorted sets; a tenth of the keys expire.

/// Commands that are sent before their answers are read.
const TOGETHER: u64 = 500;

/// A time at which no benchmark runs any more: 2100-01-01, in milliseconds since 1970.
const FAR_MS: u64 = 4_102_444_800_000;

/// Bytes of a value of the mix, on average, with its names.
pub const MIX_BYTES: u64 = 200;

/// Fills the database that is selected with this many keys. The same seed gives the same data.
pub fn fill_mix(client: &mut Client, keys: u64, seed: u64) -> Result<()> {
    let mut random = Random::new(seed);
    let mut commands = Vec::new();
    for number in 0..keys {
        let name = format!("mix:{number}").into_bytes();
        let command = match number % 6 {
            0..3 => {
                let length = random.between(10, 500) as usize;
                vec![b"SET".to_vec(), name.clone(), random.bytes(length)]
            }
            3 | 4 => hash(name.clone(), &mut random),
            _ => collection(name.clone(), number / 6, &mut random),
        };
        commands.push(command);
        if random.one_in(10) {
            commands.push(vec![b"PEXPIREAT".to_vec(), name, (FAR_MS + number).to_string().into_bytes()]);
        }
        if number % TOGETHER == TOGETHER - 1 || number + 1 == keys {
            client.pipeline(&commands)?;
            commands.clear();
        }
    }
    Ok(())
}

/// A record of a few fields: text, and numbers.
fn hash(name: Vec<u8>, random: &mut Random) -> Vec<Vec<u8>> {
    let mut command = vec![b"HSET".to_vec(), name];
    for field in 0..random.between(2, 8) {
        command.push(format!("field{field}").into_bytes());
        command.push(match field % 3 {
            0 => random.below(1 << 31).to_string().into_bytes(),
            _ => {
                let length = random.between(4, 40) as usize;
                random.bytes(length)
            }
        });
    }
    command
}

/// A list, a set of words, a set of numbers, or a sorted set.
fn collection(name: Vec<u8>, which: u64, random: &mut Random) -> Vec<Vec<u8>> {
    let word = ["RPUSH", "SADD", "SADD", "ZADD"][which as usize % 4];
    let mut command = vec![word.into(), name];
    for element in 0..random.between(2, 12) {
        if word == "ZADD" {
            command.push(random.below(100_000).to_string().into_bytes());
        }
        command.push(match which % 4 {
            2 => random.below(1 << 20).to_string().into_bytes(),
            _ => format!("{element}:{:016x}", random.word()).into_bytes(),
        });
    }
    command
}

// A client that knows a primary and its replica, writes where writes are taken, and counts what was acknowledged.

/// The writer, on a thread of its own. Dropping it ends the thread.
pub struct PairWriter {
    is_done: Arc<AtomicBool>,
    acknowledged: Arc<AtomicU64>,
    longest: Arc<AtomicU64>,
    thread: Option<JoinHandle<()>>,
}

/// How long the writer waits for an answer. A pause of writes is shorter.
const ANSWER_LIMIT: Duration = Duration::from_secs(30);

/// The longest sleep between two writes, and so the time in which the thread notices that it is to end.
const NAP: Duration = Duration::from_millis(20);

impl PairWriter {
    /// Sets `rate` keys a second, one after the other. The name and the value of a key hold its number.
    pub fn start(servers: [&Server; 2], rate: u32) -> PairWriter {
        let addresses = servers.map(Server::address);
        let (is_done, acknowledged, longest) = <(Arc<AtomicBool>, Arc<AtomicU64>, Arc<AtomicU64>)>::default();
        let (end, count, gap) = (is_done.clone(), acknowledged.clone(), longest.clone());
        let thread = thread::spawn(move || {
            let (mut at, mut client) = (0, None);
            let (began, mut last) = (Instant::now(), Instant::now());
            while !end.load(Ordering::Relaxed) {
                let number = count.load(Ordering::Relaxed);
                let Some(open) = client.as_mut() else {
                    client = connect(addresses[at]);
                    continue;
                };
                if set(open, number) {
                    gap.fetch_max(micros(last.elapsed()), Ordering::Relaxed);
                    last = Instant::now();
                    count.store(number + 1, Ordering::Relaxed);
                } else {
                    // It takes no writes, or has closed the connection: the other one.
                    (at, client) = (1 - at, None);
                }
                let due = began + Duration::from_secs_f64(number as f64 / f64::from(rate));
                thread::sleep(due.saturating_duration_since(Instant::now()).min(NAP));
            }
        });
        PairWriter { is_done, acknowledged, longest, thread: Some(thread) }
    }

    /// How many writes were acknowledged until now.
    pub fn acknowledged(&self) -> u64 {
        self.acknowledged.load(Ordering::Relaxed)
    }

    /// Waits until `writes` more are acknowledged.
    ///
    /// # Errors
    /// [`Error::TooLate`] if that takes longer than `within`.
    pub fn wait_for_more(&self, writes: u64, within: Duration) -> Result<()> {
        let wanted = self.acknowledged() + writes;
        wait_until("writes to be acknowledged", within, || {
            let now = self.acknowledged();
            Ok(if now >= wanted { Ok(()) } else { Err(format!("{now} of {wanted}")) })
        })
    }

    /// The longest time between two acknowledged writes since this was last asked.
    pub fn take_longest(&self) -> Duration {
        Duration::from_micros(self.longest.swap(0, Ordering::Relaxed))
    }

    /// Ends the writer, and returns how many writes were acknowledged.
    pub fn stop(mut self) -> u64 {
        self.end();
        self.acknowledged()
    }

    fn end(&mut self) {
        self.is_done.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join(); // a panic was reported where it happened
        }
    }
}

impl Drop for PairWriter {
    fn drop(&mut self) {
        self.end();
    }
}

/// Fails unless the server has all of the first `acknowledged` writes.
///
/// # Errors
/// [`Error::Different`] names one that is lost; or the connection failed.
pub fn assert_has_all(server: &Server, acknowledged: u64) -> Result<()> {
    let client = &mut server.client()?;
    for number in 0..acknowledged {
        let found = client.bytes(&["GET", &key(number)])?;
        if found.as_deref() != Some(number.to_string().as_bytes()) {
            return Err(Error::Different(format!("write {number} of {acknowledged} is lost at {server}")));
        }
    }
    Ok(())
}

fn connect(address: SocketAddr) -> Option<Client> {
    let mut client = Client::connect(&Address::Tcp(address)).ok()?;
    client.timeout(ANSWER_LIMIT).ok()?;
    Some(client)
}

fn set(client: &mut Client, number: u64) -> bool {
    matches!(client.call(&["SET", &key(number), &number.to_string()]), Ok(Frame::Simple(_)))
}

fn key(number: u64) -> String {
    format!("acknowledged {number}")
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}
