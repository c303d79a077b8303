//! What a volume's writes and reads cost, how fast they are, and how long they stall, by the library's client.
//!
//! | scene | what is measured | beside |
//! |---|---|---|
//! | `cost` | processor time of a 4 KiB write, client and one server | the promise |
//! | `copy` | 1 MiB reads in the memory of a server on this host | `memcpy` |
//! | `window` | writes over a link with late answers, by `fixed:32`, `fixed:1024`, `adaptive` | `fixed:1024` |
//! | `chain` | 1 MiB writes of three copies over cables of 1 Gb/s: inline, pulled, along a chain | pulled |
//! | `stall` | the longest time between two answers while one of three servers is killed, or hangs | the promise |
//!
//! Servers are processes of their own, but in `window`, which asks its server how much memory writers had. Each round
//! measures all of a scene in turn. Requests over NBD, beside other servers, are measured by `nbd_requests`.
//!
//! ```text
//! cargo run --release -p remora-bench --bin volume_requests -- --rounds 5 --out bench/runs
//! ```

use std::hint::black_box;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use clap::{Parser, ValueEnum};
use remora_bench::source::{CopyPlace, CopyServer, new_volume};
use remora_bench::{Keep, Run, Sample, cpu, source};
use remora_lab::net::Link;
use remora_lab::{Host, Net, Shape as Cable};
use remora_messenger::Address;
use remora_volume::client::{ClientOptions, Error, Request, Volume, Writes};
use remora_volume::server::{Server, ServerOptions};
use remora_volume::shape::{BLOCK_BYTES, Shape};
use rustix::process::Signal;

/// Processor time, rates and stalls of a volume.
#[derive(Parser, Debug)]
struct Options {
    /// Rounds; the figures are medians over them.
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Milliseconds per measurement.
    #[arg(long, default_value_t = 2000)]
    millis: u64,
    /// What to measure.
    #[arg(long, value_enum, value_delimiter = ',', default_value = "cost,copy,window,chain,stall")]
    scenes: Vec<SceneName>,
    #[command(flatten)]
    keep: Keep,
}

impl Options {
    fn span(&self) -> Duration {
        Duration::from_millis(self.millis)
    }
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum SceneName {
    Cost,
    Copy,
    Window,
    Chain,
    Stall,
}

type Failure = Box<dyn std::error::Error + Send + Sync>;

/// Something that is set up once, and measured in each round.
trait Scene {
    /// Measures everything once.
    fn measure(&mut self, round: usize) -> Result<Vec<Sample>, Failure>;

    /// Compares, after the last round.
    fn compare(&self, run: &mut Run);
}

fn main() -> Result<ExitCode, Failure> {
    source::be_one_if_asked()?;
    let options = Options::parse();
    let mut run = Run::new("volume_requests", "each case names its unit");
    for name in &options.scenes {
        let mut scene = match name {
            SceneName::Cost => boxed(Cost::new(options.span())?),
            SceneName::Copy => boxed(Reading::new(options.span())?),
            SceneName::Window => boxed(Windows::new(options.span())?),
            SceneName::Chain => match Cables::new(options.span()) {
                Ok(cables) => boxed(cables),
                Err(error) => {
                    run.notes.push(format!("the scene chain was left out: {error}"));
                    continue;
                }
            },
            SceneName::Stall => boxed(Stalls::new(options.span())?),
        };
        for round in 0..options.rounds {
            eprintln!("{name:?}: round {} of {}", round + 1, options.rounds);
            run.samples.extend(scene.measure(round)?);
        }
        scene.compare(&mut run);
        // A run that is ended has what it has measured.
        options.keep.keep(&run)?;
    }
    Ok(options.keep.finish(&run)?)
}

fn boxed(scene: impl Scene + 'static) -> Box<dyn Scene> {
    Box::new(scene)
}

/// What was promised, as a subject that figures are compared with.
const PROMISED: &str = "promised";

// Load: writes that are submitted as fast as the volume takes them.

/// Bytes a second of writes of `blocks` blocks that are completed in `span`. The volume makes the caller wait while it
/// has as many as it takes.
pub(crate) fn rate(volume: &Volume, blocks: u32, span: Duration) -> Result<f64, Error> {
    let (completed, data) = (Arc::new(AtomicU64::new(0)), Bytes::from(vec![5; blocks as usize * BLOCK_BYTES]));
    let places = volume.shape().blocks() / u64::from(blocks);
    let (began, mut number) = (Instant::now(), 0);
    while began.elapsed() < span {
        let counter = Arc::clone(&completed);
        let done = move |result: Result<Bytes, Error>| _ = counter.fetch_add(result.is_ok().into(), Ordering::Relaxed);
        volume.submit(Request::write(number % places * u64::from(blocks), data.clone()), done)?;
        number += 1;
    }
    let (writes, seconds) = (completed.load(Ordering::Relaxed), began.elapsed().as_secs_f64());
    volume.flush()?; // the next measurement begins with an idle volume
    Ok((writes * data.len() as u64) as f64 / seconds)
}

/// Writes each block once, so that no measurement pays for memory that is touched for the first time.
pub(crate) fn fill(volume: &Volume) -> Result<(), Error> {
    let (blocks, most) = (volume.shape().blocks(), MIB_BLOCKS.into());
    for first in (0..blocks).step_by(MIB_BLOCKS as usize) {
        let count = (blocks - first).min(most);
        volume.write(first, vec![7; count as usize * BLOCK_BYTES])?;
    }
    volume.flush()
}

/// Blocks of 1 MiB.
const MIB_BLOCKS: u32 = 256;

// Chain: large writes of three copies over cables of 1 Gb/s, by each way.

/// A writer's host, and three with a server each.
pub(crate) struct Cables {
    writer: Host,
    _servers: Vec<(Host, CopyServer)>,
    addresses: Vec<Address>,
    shape: Shape,
    span: Duration,
}

impl Cables {
    pub(crate) fn new(span: Duration) -> Result<Cables, Failure> {
        let net = Net::new()?;
        let host = |name: &str| {
            let host = net.host(name)?;
            host.shape(Cable::bits(GIGABIT))?;
            Ok::<Host, Failure>(host)
        };
        let writer = host("writer")?;
        let mut servers = Vec::new();
        for name in ["first", "second", "third"] {
            let host = host(name)?;
            let place = CopyPlace { host: Some(&host), is_far: true };
            let server = CopyServer::start(&format!("tcp:{}:0", host.address()), place)?;
            servers.push((host, server));
        }
        let addresses: Vec<Address> = servers.iter().map(|(_, server)| server.address.clone()).collect();
        let made = writer.within(|| {
            let shape = new_volume(&addresses, HELD, CHAIN_BLOCKS).map_err(|error| error.to_string())?;
            let volume = Volume::open(shape, &addresses, &ClientOptions::default());
            volume.and_then(|volume| fill(&volume)).map_err(|error| error.to_string())?;
            Ok::<Shape, String>(shape)
        })?;
        Ok(Cables { writer, _servers: servers, addresses, shape: made?, span })
    }

    /// Bytes a second, and bytes that leave the writer's host for each byte that is written.
    fn by(&self, writes: Writes) -> Result<(f64, f64), Failure> {
        let options = ClientOptions { writes, ..ClientOptions::default() };
        let measured = self.writer.within(|| {
            let volume = Volume::open(self.shape, &self.addresses, &options).map_err(|error| error.to_string())?;
            // Until the servers pull, and the window has grown.
            rate(&volume, MIB_BLOCKS, WARM).map_err(|error| error.to_string())?;
            let counts = volume.write_counts();
            if (counts.pulled > 0) != (writes != Writes::Inline) {
                return Err(format!("the blocks took another way than {writes}: {counts:?}"));
            }
            let before = self.writer.traffic().map_err(|error| error.to_string())?;
            let written = volume.write_counts();
            let rate = rate(&volume, MIB_BLOCKS, self.span).map_err(|error| error.to_string())?;
            let sent = self.writer.traffic().map_err(|error| error.to_string())?.since(before).sent;
            let counts = volume.write_counts();
            // Each write counts once for each of three servers.
            let writes = (counts.inline + counts.pulled - written.inline - written.pulled) / 3;
            Ok((rate, sent as f64 / (writes * u64::from(MIB_BLOCKS) * BLOCK_BYTES as u64) as f64))
        })?;
        Ok(measured?)
    }
}

impl Scene for Cables {
    fn measure(&mut self, round: usize) -> Result<Vec<Sample>, Failure> {
        let mut samples = vec![Sample::new(PROMISED, BYTES_OUT, round, CHAIN_BYTES_MOST)];
        for (name, writes) in [(INLINE, Writes::Inline), (STAR, Writes::Pulled), (CHAIN, Writes::Chain)] {
            let (rate, bytes) = self.by(writes)?;
            samples.extend([
                Sample::new(name, CHAIN_WRITES, round, rate / 1e6),
                Sample::new(name, BYTES_OUT, round, bytes),
            ]);
        }
        Ok(samples)
    }

    fn compare(&self, run: &mut Run) {
        run.compare((CHAIN, CHAIN_WRITES), (STAR, CHAIN_WRITES), Some(CHAIN_RATE_LEAST));
        run.compare((CHAIN, CHAIN_WRITES), (INLINE, CHAIN_WRITES), None);
        run.compare_less((CHAIN, BYTES_OUT), (PROMISED, BYTES_OUT), Some(1.0));
    }
}

const INLINE: &str = "inline";
const STAR: &str = "pulled by each server";
const CHAIN: &str = "along a chain";

const CHAIN_WRITES: &str = "write 1 MiB, three copies, two hold it, 1 Gb/s, MB/s";
const BYTES_OUT: &str = "bytes out of the writer's host for each byte";

const CHAIN_RATE_LEAST: f64 = 2.5;
const CHAIN_BYTES_MOST: f64 = 1.1;

const GIGABIT: u64 = 1_000_000_000;

/// Copies that hold a write before it is answered.
const HELD: usize = 2;

/// 128 MiB.
const CHAIN_BLOCKS: u64 = 32 * 1024;

/// The outbox is reached in a second, and a window that grows has doubled a few times.
const WARM: Duration = Duration::from_millis(1500);

// Cost: processor time of a write, and reads in memory beside `memcpy`.

/// Volumes of one copy, and one 4 KiB write after the other.
pub(crate) struct Cost {
    subjects: Vec<(&'static str, CopyServer, Volume)>,
    span: Duration,
    _folder: tempfile::TempDir,
}

impl Cost {
    pub(crate) fn new(span: Duration) -> Result<Cost, Failure> {
        let folder = tempfile::tempdir()?;
        let socket = format!("shm:{}", folder.path().join("copy").display());
        let mut subjects = Vec::new();
        for (name, address) in [("by TCP", "tcp:127.0.0.1:0"), ("by shared memory", &socket)] {
            let server = CopyServer::start(address, CopyPlace::default())?;
            let volume = open(&server)?;
            subjects.push((name, server, volume));
        }
        Ok(Cost { subjects, span, _folder: folder })
    }
}

const WRITE_COST: &str = "write 4 KiB × 1, µs of processor";

/// For client and one server.
const WRITE_COST_LIMIT: f64 = 20.0;

impl Scene for Cost {
    fn measure(&mut self, round: usize) -> Result<Vec<Sample>, Failure> {
        let mut samples = vec![Sample::new(PROMISED, WRITE_COST, round, WRITE_COST_LIMIT)];
        let data = Bytes::from(vec![9; BLOCK_BYTES]);
        for (name, server, volume) in &self.subjects {
            let (client, served) = (cpu::of_self()?, server.process.cpu_seconds()?);
            let (began, mut count) = (Instant::now(), 0_u32);
            while began.elapsed() < self.span {
                volume.write(u64::from(count) * 7919 % COST_BLOCKS, data.clone())?;
                count += 1;
            }
            let seconds = began.elapsed().as_secs_f64();
            let (client, served) = ((cpu::of_self()? - client).as_secs_f64(), server.process.cpu_seconds()? - served);
            let per_write = (client + served) * 1e6 / f64::from(count);
            let gigabytes = f64::from(count) * BLOCK_BYTES as f64 / 1e9;
            samples.push(Sample::new(*name, WRITE_COST, round, per_write).cost(client, served, gigabytes));
            samples.push(Sample::new(*name, "write 4 KiB × 1, a second", round, f64::from(count) / seconds));
        }
        Ok(samples)
    }

    fn compare(&self, run: &mut Run) {
        for (name, ..) in &self.subjects {
            run.compare_less((name, WRITE_COST), (PROMISED, WRITE_COST), Some(1.0));
        }
    }
}

/// A volume of one copy, in memory that this process can map.
pub(crate) struct Reading {
    volume: Volume,
    _server: CopyServer,
    /// As much memory of this process, out of which `memcpy` copies.
    floor: Vec<u8>,
    span: Duration,
}

impl Reading {
    pub(crate) fn new(span: Duration) -> Result<Reading, Failure> {
        let server = CopyServer::start("tcp:127.0.0.1:0", CopyPlace::default())?;
        let volume = open(&server)?;
        Ok(Reading { volume, _server: server, floor: vec![7; COST_BLOCKS as usize * BLOCK_BYTES], span })
    }

    /// Bytes a second of `read`, which gets a place of 1 MiB in turn.
    fn rate(&self, mut read: impl FnMut(u64) -> Result<(), Failure>) -> Result<f64, Failure> {
        let (began, mut count) = (Instant::now(), 0_u64);
        while began.elapsed() < self.span {
            read(count * 97 % (COST_BLOCKS / u64::from(MIB_BLOCKS)))?;
            count += 1;
        }
        Ok(count as f64 * MIB_BYTES as f64 / began.elapsed().as_secs_f64())
    }
}

const MIB_BYTES: usize = MIB_BLOCKS as usize * BLOCK_BYTES;

const READ_RATE: &str = "read 1 MiB × 1, GB/s";
const IN_PLACE: &str = "in the server's memory";
const COPIED: &str = "memcpy";

/// Of what `memcpy` copies.
const READ_LEAST: f64 = 0.8;

impl Scene for Reading {
    fn measure(&mut self, round: usize) -> Result<Vec<Sample>, Failure> {
        let before = self.volume.read_counts();
        let ours = self.rate(|place| {
            black_box(self.volume.read(place * u64::from(MIB_BLOCKS), MIB_BLOCKS)?);
            Ok(())
        })?;
        let after = self.volume.read_counts();
        if (after.far, after.asked) != (before.far, before.asked) {
            return Err(format!("reads were not answered out of the server's memory: {after:?}").into());
        }
        let mut into = vec![0; MIB_BYTES];
        let copied = self.rate(|place| {
            let from = place as usize * MIB_BYTES;
            into.copy_from_slice(&self.floor[from..from + MIB_BYTES]);
            black_box(&into);
            Ok(())
        })?;
        Ok([(IN_PLACE, ours), (COPIED, copied)]
            .map(|(who, rate)| Sample::new(who, READ_RATE, round, rate / 1e9))
            .into())
    }

    fn compare(&self, run: &mut Run) {
        run.compare((IN_PLACE, READ_RATE), (COPIED, READ_RATE), Some(READ_LEAST));
    }
}

fn open(server: &CopyServer) -> Result<Volume, Failure> {
    let servers = [server.address.clone()];
    let shape = new_volume(&servers, 1, COST_BLOCKS)?;
    let volume = Volume::open(shape, &servers, &ClientOptions::default())?;
    fill(&volume)?;
    // Until the memory of the server is mapped.
    let (before, deadline) = (volume.read_counts().here, Instant::now() + MAPPED_LIMIT);
    while volume.read_counts().here == before {
        volume.read(0, 1)?;
        if Instant::now() > deadline {
            return Err("the server's memory cannot be read".into());
        }
    }
    Ok(volume)
}

/// 256 MiB: more than the processor's caches hold.
const COST_BLOCKS: u64 = 64 * 1024;

/// Until a server's memory is mapped: a question, and passing a descriptor.
const MAPPED_LIMIT: Duration = Duration::from_secs(5);

// Stall: the longest time between two answers while a server is killed, or hangs.

/// Three servers, of which two hold a write before it is answered.
pub(crate) struct Stalls {
    servers: Vec<CopyServer>,
    volume: Volume,
    /// How long a fault lasts, and a time without one.
    span: Duration,
}

impl Stalls {
    pub(crate) fn new(span: Duration) -> Result<Stalls, Failure> {
        let start = |_| CopyServer::start("tcp:127.0.0.1:0", CopyPlace::default());
        let servers: Vec<CopyServer> = (0..3).map(start).collect::<Result<_, _>>()?;
        let addresses: Vec<Address> = servers.iter().map(|server| server.address.clone()).collect();
        let volume = Volume::open(new_volume(&addresses, 2, STALL_BLOCKS)?, &addresses, &ClientOptions::default())?;
        fill(&volume)?;
        Ok(Stalls { servers, volume, span })
    }

    /// The longest time between two answers, of writes one after the other, from before `fault` until it has ended and
    /// `span` is over.
    fn longest(
        volume: &Volume,
        span: Duration,
        fault: impl FnOnce() -> Result<(), Failure>,
    ) -> Result<Duration, Failure> {
        let is_over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let writer = scope.spawn(|| {
                let (mut longest, mut last, mut number) = (Duration::ZERO, Instant::now(), 0);
                while !is_over.load(Ordering::Relaxed) {
                    number = (number + 7919) % STALL_BLOCKS;
                    volume.write(number, vec![3; BLOCK_BYTES])?;
                    longest = longest.max(last.elapsed());
                    last = Instant::now();
                }
                Ok::<Duration, Error>(longest)
            });
            std::thread::sleep(BEFORE);
            let done = fault();
            std::thread::sleep(span);
            is_over.store(true, Ordering::Relaxed);
            let longest = writer.join().map_err(|_| "the writer has panicked")??;
            done.map(|()| longest)
        })
    }

    /// Until every copy is whole again.
    fn wait_until_whole(&self) -> Result<(), Failure> {
        let deadline = Instant::now() + WHOLE_LIMIT;
        while self.volume.members().len() < self.servers.len() {
            if Instant::now() > deadline {
                return Err(format!("copies are not whole again: {:?}", self.volume.members()).into());
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    }
}

impl Scene for Stalls {
    fn measure(&mut self, round: usize) -> Result<Vec<Sample>, Failure> {
        let number = round % self.servers.len();
        self.wait_until_whole()?;
        let quiet = Stalls::longest(&self.volume, self.span, || Ok(()))?;

        let victim = &mut self.servers[number];
        let killed = Stalls::longest(&self.volume, self.span, || {
            victim.process.kill()?;
            Ok(())
        })?;
        *victim = CopyServer::start(&victim.address.to_string(), CopyPlace::default())?;
        self.wait_until_whole()?;

        let victim = &mut self.servers[number];
        let limit = ClientOptions::default().copy_limit;
        let hangs = Stalls::longest(&self.volume, limit + self.span, || Ok(victim.process.signal(Signal::STOP)?))?;
        victim.process.signal(Signal::CONT)?;
        self.wait_until_whole()?;

        let ms = |time: Duration| time.as_secs_f64() * 1e3;
        let limits = [(KILLED, KILLED_LIMIT), (HANGS, limit + HANGS_MORE)];
        let mut samples: Vec<Sample> = limits.map(|(case, limit)| Sample::new(PROMISED, case, round, ms(limit))).into();
        for (case, longest) in [(QUIET, quiet), (KILLED, killed), (HANGS, hangs)] {
            samples.push(Sample::new(OURS, case, round, ms(longest)));
        }
        Ok(samples)
    }

    fn compare(&self, run: &mut Run) {
        for case in [KILLED, HANGS] {
            run.compare_less((OURS, case), (PROMISED, case), Some(1.0));
        }
    }
}

const OURS: &str = "three copies, two hold a write";

const QUIET: &str = "longest time between two answers, ms";
const KILLED: &str = "the same while a server is killed, ms";
const HANGS: &str = "the same while a server hangs, ms";

const KILLED_LIMIT: Duration = Duration::from_millis(100);

/// Beyond the time after which a server is left out.
const HANGS_MORE: Duration = Duration::from_millis(500);

/// 64 MiB.
const STALL_BLOCKS: u64 = 16 * 1024;

/// Of undisturbed writes before a fault.
const BEFORE: Duration = Duration::from_millis(300);

/// A copy of 64 MiB is taken back in less than a second. A server that was away for long is tried again every 5 s.
const WHOLE_LIMIT: Duration = Duration::from_secs(30);

// Window: how much may be under way, over a link whose answers are late.
//
// A published measurement of buffered writes over RDMA lost 30 to 58 % because 32 packets may be under way there. A
// packet has 128 KiB, so that is 4 MiB. A cable of 10 Gb/s whose answers are 5 ms late holds 6.25 MB. Two processors
// do not carry 10 Gb/s through client, link and server, so this link has 2 Gb/s and answers that are 25 ms late,
// which is as much under way. 32 jobs with 1 MiB each are 256 packets: more than the small window takes, and fewer
// than the large one.

/// A volume for each window, on one server behind the link.
pub(crate) struct Windows {
    volumes: Vec<(&'static str, Volume)>,
    server: Server,
    _link: Link,
    staging: u64,
    span: Duration,
}

impl Windows {
    pub(crate) fn new(span: Duration) -> Result<Windows, Failure> {
        let options = ServerOptions { shm: false, ..ServerOptions::default() };
        let server = Server::start(&"tcp:127.0.0.1:0".parse()?, &options)?;
        let Address::Tcp(at) = *server.address() else { return Err("a server without a port".into()) };
        let link = Link::new(at, DELAY, RATE)?;
        let mut volumes = Vec::new();
        for size in [SMALL, LARGE, ADAPTIVE] {
            let shape = new_volume(&[server.address().clone()], 1, WINDOW_BLOCKS)?;
            let settings = ClientOptions { window: size.parse()?, ..ClientOptions::default() };
            let volume = Volume::open(shape, &[Address::Tcp(link.address())], &settings)?;
            fill(&volume)?;
            rate(&volume, PACKET_BLOCKS, span)?; // until the window has grown
            volumes.push((size, volume));
        }
        Ok(Windows { volumes, server, _link: link, staging: options.staging, span })
    }
}

impl Scene for Windows {
    fn measure(&mut self, round: usize) -> Result<Vec<Sample>, Failure> {
        let mut samples = Vec::new();
        for (size, volume) in &self.volumes {
            samples.push(Sample::new(*size, WINDOW_WRITES, round, rate(volume, PACKET_BLOCKS, self.span)? / 1e6));
        }
        let (_, most) = self.server.staging();
        samples.push(Sample::new(SERVER, STAGING, round, most as f64 / f64::from(1 << 20)));
        samples.push(Sample::new(PROMISED, STAGING, round, self.staging as f64 / f64::from(1 << 20)));
        Ok(samples)
    }

    fn compare(&self, run: &mut Run) {
        run.compare((ADAPTIVE, WINDOW_WRITES), (LARGE, WINDOW_WRITES), Some(ADAPTIVE_LEAST));
        run.compare_less((SMALL, WINDOW_WRITES), (LARGE, WINDOW_WRITES), Some(SMALL_MOST));
        run.compare_less((SERVER, STAGING), (PROMISED, STAGING), Some(1.0));
    }
}

const SMALL: &str = "fixed:32";
const LARGE: &str = "fixed:1024";
const ADAPTIVE: &str = "adaptive";
const SERVER: &str = "the server";

const WINDOW_WRITES: &str = "write 128 KiB, 2 Gb/s and answers after 25 ms, MB/s";
const STAGING: &str = "most that writers had under way, MiB";

/// The adaptive window loses next to nothing, and the small one loses what the published measurement lost.
const ADAPTIVE_LEAST: f64 = 0.95;
const SMALL_MOST: f64 = 0.7;

/// The link.
const RATE: f64 = 250e6;
const DELAY: Duration = Duration::from_millis(25);

/// 128 KiB.
const PACKET_BLOCKS: u32 = 32;

/// 64 MiB.
const WINDOW_BLOCKS: u64 = 16 * 1024;
