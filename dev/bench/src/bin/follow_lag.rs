//! The lag of a replica while the primary is written to: `remora replica --stay` against the server's own replication.
//!
//! The probe is exact: the publisher sends the time as a message on the primary, the command travels in the replication
//! stream like any write, and a subscriber on the replica takes the time on arrival. A subscriber on the primary itself
//! shows the probe's own delay.
//!
//! ```text
//!   writer ──SETs at a rate──▶ primary ◀──PUBLISH probe <now>── publisher, a thousand a second
//!                                │ stream: own link, or source ══ table ══ replica --stay
//!                                ▼
//!                             replica ──message──▶ subscriber: now − <then>
//! ```
//!
//! ```text
//! cargo run --release -p remora-bench --bin follow_lag -- --rounds 5 --out bench/runs
//! ```

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use clap::Parser;
use remora_bench::sync::{Compare, Program, Result, Source, Stay};
use remora_bench::{Run, Sample, quantile};
use remora_lab::server::wait_until;
use remora_lab::{Client, Kind, Random, Server, compare, scratch};
use remora_redis::resp::Frame;
use tempfile::TempDir;

/// Lag of a replica that follows through Remora, and through the server's own replication.
#[derive(Parser, Debug)]
struct Options {
    /// Rounds; the figures are medians over them.
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Seconds per measurement.
    #[arg(long, default_value_t = 10)]
    seconds: u64,
    /// Writes per second.
    #[arg(long, value_delimiter = ',', default_value = "1000,10000,50000")]
    rates: Vec<u64>,
    /// Bytes of each written value.
    #[arg(long, default_value_t = 100)]
    value_bytes: usize,
    /// Use Redis 7 instead of Valkey 9.1.
    #[arg(long)]
    redis: bool,
    /// When to compare the replicas with the primary, by digest.
    #[arg(long, default_value = "first")]
    compare: Compare,
    /// Transport of `remora replica`.
    #[arg(long, value_delimiter = ',', default_value = "shm,tcp")]
    transports: Vec<String>,
    /// Keep the run in a new folder below this one.
    #[arg(long)]
    out: Option<PathBuf>,
    /// Write everything as JSON to this file.
    #[arg(long)]
    json: Option<PathBuf>,
}

fn main() -> Result<ExitCode> {
    let options = Options::parse();
    let kind = if options.redis { Kind::Redis7 } else { Kind::Valkey9 };
    // Otherwise each sync of the set-up would wait for five seconds. The measurements do not depend on it.
    let primary = Server::builder(kind).config("repl-diskless-sync-delay", 0).start()?;
    let mut run = Run::new("follow_lag", "ms");
    run.notes.push(format!("{kind} ({}); smaller is better, so is a smaller ratio.", primary.version()?));
    run.notes.push(
        "CPU: of the replica's server and agent, and of the primary and the source; GB of the stream.".to_owned(),
    );
    let mut bench = Bench { program: Program::build()?, primary, options: &options, run };
    for round in 0..options.rounds {
        eprintln!("round {} of {}", round + 1, options.rounds);
        bench.round(round)?;
    }
    bench.compare();
    bench.run.finish(options.out.as_deref(), options.json.as_deref())?;
    Ok(ExitCode::SUCCESS)
}

struct Bench<'a> {
    options: &'a Options,
    program: Program,
    primary: Server,
    run: Run,
}

/// A server under test. The fields are dropped in order: the agent hands its server over, then the source ends, then
/// the server.
struct Subject {
    agent: Option<Stay>,
    source: Option<Source>,
    /// `None` for the primary itself, which shows the probe's time without replication.
    replica: Option<Server>,
    /// The folder with the agents' token.
    #[allow(dead_code)] // held for its drop
    folder: Option<TempDir>,
}

impl Subject {
    /// Processor seconds so far on the replica's side, and on the primary's.
    fn cpu(&self, primary: &Server) -> Result<(f64, f64)> {
        let servers = (self.replica.as_ref().map_or(Ok(0.0), Server::cpu_seconds)?, primary.cpu_seconds()?);
        let agents =
            (self.agent.as_ref().map_or(Ok(0.0), Stay::cpu)?, self.source.as_ref().map_or(Ok(0.0), Source::cpu)?);
        Ok((servers.0 + agents.0, servers.1 + agents.1))
    }
}

impl Bench<'_> {
    fn round(&mut self, round: usize) -> Result<()> {
        let mut names = subjects(self.options);
        let count = names.len().max(1);
        names.rotate_left(round % count);
        for name in names {
            let mut subject = self.subject(&name)?;
            for rate in &self.options.rates {
                let seen = self.measure(&subject, *rate)?;
                if let Some(agent) = &mut subject.agent {
                    agent.check()?;
                }
                self.note(&name, *rate, round, &seen);
            }
            if let Some(replica) = subject.replica.as_ref().filter(|_| self.options.compare.is_due(round)) {
                compare::same_data(&self.primary, replica, FOLLOW_TIME)?;
            }
        }
        Ok(())
    }

    /// Creates a fresh replica and waits until it follows.
    fn subject(&self, name: &str) -> Result<Subject> {
        let mut subject = Subject { agent: None, source: None, replica: None, folder: None };
        if name == PRIMARY {
            return Ok(subject);
        }
        let server = Server::start(self.primary.kind())?;
        match name.strip_prefix(STAY) {
            None => server.replicate(&self.primary)?,
            Some(transport) => {
                let folder = scratch::folder("lag")?;
                let source = Source::start(&self.program, &self.primary, folder.path(), SOURCE_BYTES)?;
                subject.agent = Some(Stay::start(&self.program, &server, &source, transport)?);
                (subject.source, subject.folder) = (Some(source), Some(folder));
            }
        }
        self.wait_until_it_follows(&server)?;
        subject.replica = Some(server);
        Ok(subject)
    }

    fn wait_until_it_follows(&self, replica: &Server) -> Result<()> {
        let (mut there, mut here) = (self.primary.client()?, replica.client()?);
        wait_until("the replica to follow", FOLLOW_TIME, || {
            let goal: Option<u64> = there.info("replication")?.number("master_repl_offset");
            let info = here.info("replication")?;
            let offset = info.number::<u64>("slave_repl_offset");
            let is_up = info.get("master_link_status") == Some("up");
            Ok(if is_up && offset >= goal { Ok(()) } else { Err(format!("up: {is_up}, {offset:?} of {goal:?}")) })
        })?;
        Ok(())
    }

    fn measure(&self, subject: &Subject, rate: u64) -> Result<Seen> {
        let begun = Instant::now();
        let mut subscriber = subject.replica.as_ref().unwrap_or(&self.primary).client()?;
        subscriber.send(&["SUBSCRIBE", CHANNEL])?;
        subscriber.receive()?;
        let subscriber_thread = thread::spawn(move || listen(&mut subscriber, begun));
        let writer = Writer::start(self.primary.client()?, rate, self.options.value_bytes);
        // The first writes fill buffers and tables, which are then warm.
        thread::sleep(WARM_UP);
        let place = |client: &mut Client| -> Result<u64> {
            Ok(client.info("replication")?.number("master_repl_offset").unwrap_or(0))
        };
        let mut client = self.primary.client()?;
        let (cpu, offset, written, since) =
            (subject.cpu(&self.primary)?, place(&mut client)?, writer.written(), Instant::now());
        let sent = publish(self.primary.client()?, begun, Duration::from_secs(self.options.seconds))?;
        let (after, end, elapsed) = (subject.cpu(&self.primary)?, place(&mut client)?, since.elapsed().as_secs_f64());
        let reached = (writer.written() - written) as f64 / elapsed;
        writer.stop()?;
        let mut lags = subscriber_thread.join().map_err(|_| "the subscriber's thread panicked")??;
        lags.sort_by(f64::total_cmp);
        Ok(Seen {
            lost: sent - lags.len() as u64,
            lags,
            reached,
            replica_cpu: after.0 - cpu.0,
            primary_cpu: after.1 - cpu.1,
            gigabytes: (end - offset) as f64 / 1e9,
        })
    }

    fn note(&mut self, subject: &str, rate: u64, round: usize, seen: &Seen) {
        let worst = seen.lags.last().copied();
        for (what, value) in [("p50", quantile(&seen.lags, 0.5)), ("p99", quantile(&seen.lags, 0.99)), ("max", worst)] {
            self.run.samples.push(Sample {
                subject: subject.to_owned(),
                case: case(rate, what),
                round,
                value: value.unwrap_or(f64::NAN),
                reader_cpu_seconds: seen.replica_cpu,
                source_cpu_seconds: seen.primary_cpu,
                gigabytes: seen.gigabytes,
            });
        }
        if seen.lost > 0 {
            let lost = format!("{subject} at {rate}/s, round {round}: {} messages never arrived", seen.lost);
            self.run.notes.push(lost);
        }
        if seen.reached < rate as f64 * RATE_REACHED {
            let slow = format!("{subject} at {rate}/s, round {round}: only {:.0} writes/s were reached", seen.reached);
            self.run.notes.push(slow);
        }
    }

    fn compare(&mut self) {
        for rate in &self.options.rates {
            for transport in &self.options.transports {
                for what in ["p50", "p99"] {
                    let case = case(*rate, what);
                    self.run.compare((&format!("{STAY}{transport}"), &case), (OWN, &case), None);
                }
            }
        }
    }
}

/// The result of one measurement.
struct Seen {
    /// Lags in milliseconds, sorted.
    lags: Vec<f64>,
    /// Number of probes that never arrived.
    lost: u64,
    /// Writes per second.
    reached: f64,
    replica_cpu: f64,
    primary_cpu: f64,
    gigabytes: f64,
}

/// Publishes the time until stopped, then publishes the end. Returns the number of probes.
fn publish(mut client: Client, begun: Instant, time: Duration) -> Result<u64> {
    let (start, mut count) = (Instant::now(), 0);
    while start.elapsed() < time {
        client.int(&["PUBLISH", CHANNEL, &begun.elapsed().as_nanos().to_string()])?;
        count += 1;
        // By the clock and not with pauses: otherwise a slow primary would be probed less often just when it is slow.
        thread::sleep((PROBE_EVERY * count).saturating_sub(start.elapsed()));
    }
    client.int(&["PUBLISH", CHANNEL, END])?;
    Ok(u64::from(count))
}

/// Receives the probes until the last, and returns their delays in milliseconds.
fn listen(client: &mut Client, begun: Instant) -> Result<Vec<f64>> {
    let mut lags = Vec::new();
    loop {
        let Frame::Array(message) = client.receive()? else {
            return Err("a subscriber received something other than a message".into());
        };
        let now = begun.elapsed();
        let text = message.get(2).and_then(Frame::as_str).unwrap_or_default();
        if text == END {
            return Ok(lags);
        }
        let then = Duration::from_nanos(text.parse()?);
        lags.push(now.saturating_sub(then).as_secs_f64() * 1e3);
    }
}

/// A thread that sets random keys at a rate.
struct Writer {
    stop: Arc<AtomicBool>,
    written: Arc<AtomicU64>,
    thread: thread::JoinHandle<Result<()>>,
}

impl Writer {
    fn start(client: Client, rate: u64, value_bytes: usize) -> Writer {
        let (stop, written) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let (is_stopped, count) = (Arc::clone(&stop), Arc::clone(&written));
        let thread = thread::spawn(move || write(client, rate, value_bytes, &is_stopped, &count));
        Writer { stop, written, thread }
    }

    fn written(&self) -> u64 {
        self.written.load(Ordering::Relaxed)
    }

    fn stop(self) -> Result<()> {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().map_err(|_| "the writer's thread panicked")?
    }
}

fn write(mut client: Client, rate: u64, value_bytes: usize, stop: &AtomicBool, written: &AtomicU64) -> Result<()> {
    let (begun, mut random) = (Instant::now(), Random::new(1));
    let value = random.bytes(value_bytes);
    let mut count = 0;
    while !stop.load(Ordering::Relaxed) {
        let due = (begun.elapsed().as_secs_f64() * rate as f64) as u64;
        let batch = due.saturating_sub(count).min(LARGEST_BATCH);
        for _ in 0..batch {
            let key = format!("key:{}", random.below(KEYS));
            client.queue(&[b"SET".as_slice(), key.as_bytes(), &value]);
        }
        for _ in 0..batch {
            client.receive()?;
        }
        count += batch;
        written.store(count, Ordering::Relaxed);
        thread::sleep(BATCH_EVERY);
    }
    Ok(())
}

fn subjects(options: &Options) -> Vec<String> {
    let stays = options.transports.iter().map(|transport| format!("{STAY}{transport}"));
    [PRIMARY.to_owned(), OWN.to_owned()].into_iter().chain(stays).collect()
}

fn case(rate: u64, what: &str) -> String {
    format!("{rate}/s {what}")
}

const PRIMARY: &str = "the primary itself";
const OWN: &str = "own replication";
const STAY: &str = "--stay by ";

const CHANNEL: &str = "probe";
const END: &str = "end";

/// A thousand a second: a p99 of ten seconds is based on a hundred probes.
const PROBE_EVERY: Duration = Duration::from_millis(1);

/// Writes are sent in batches: with one write per system call, the writer would be the bottleneck.
const BATCH_EVERY: Duration = Duration::from_millis(1);

/// A writer that fell behind catches up in steps, as clients do, and not all at once.
const LARGEST_BATCH: u64 = 1000;

/// Number of different keys: few enough that the data set stays small, so that only the stream needs memory.
const KEYS: u64 = 100_000;

/// A rate counts as reached from this share on.
const RATE_REACHED: f64 = 0.97;

const WARM_UP: Duration = Duration::from_secs(1);

/// Time limit: an almost empty server is copied in a second.
const FOLLOW_TIME: Duration = Duration::from_secs(60);

/// More than the keys above ever fill.
const SOURCE_BYTES: u64 = 128 << 20;
