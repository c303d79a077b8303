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

mod commands;
mod fill;
mod mix;
mod operations;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use remora_redis::resp::Frame;

use crate::client::Client;
use crate::error::{Error, Result};
use crate::random;
use crate::server::Server;

pub use fill::{fill_every_type, fill_with, key_count};
pub use mix::{MIX_BYTES, fill_mix};

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
