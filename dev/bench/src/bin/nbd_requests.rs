//! Requests per second of the NBD server with a device in memory, and with a volume, against `nbdkit memory` and
//! GlusterFS, by the same client.
//!
//! A volume has its copies in server processes of their own on this host, which take the blocks over shared memory. One
//! has a single copy, and one three, of which two hold a write before it is answered.
//!
//! GlusterFS has three replicas in memory of this host (`dev/bench/rivals/files`). It has no block device: fio uses a
//! file in its FUSE mount, as its users do, with direct I/O and the engine libaio. Single requests are compared.
//!
//! The client is fio with its engine for NBD, which is libnbd, over a unix socket of this host. All servers run during
//! the whole benchmark, as processes of their own. Each round measures every case of all in turn, and the one that is
//! first changes with each round. nbdkit has sixteen threads for a connection by default; it is measured with one
//! thread, too.
//!
//! fio needs more processor time for a request than our server does, so the client limits the rate. The processor time
//! of both ends stands beside the rate.
//!
//! ```text
//! cargo run --release -p remora-bench --bin nbd_requests -- --rounds 5 --out bench/runs
//! ```

use std::{
    io::{self, Read},
    path::{Path, PathBuf},
    process::{Command, ExitCode, Stdio},
    sync::Arc,
    time::{Duration, Instant},
};

use clap::Parser;
use remora_bench::source::{CopyPlace, CopyServer, new_volume};
use remora_bench::suite::volume::Place as FilePlace;
use remora_bench::suite::volume::cases::Subject;
use remora_bench::{Keep, Run, Sample, bytes, cpu, source};
use remora_lab::process::Process;
use remora_nbd::device::MemoryDevice;
use remora_nbd::{Address, Offer, Server, ServerOptions};
use remora_volume::client::{ClientOptions, Volume};
use remora_volume::nbd::VolumeServer;
use remora_volume::shape::BLOCK_BYTES;
use serde_json::Value;

/// Requests per second of our NBD server and of nbdkit, by fio.
#[derive(Parser, Debug)]
struct Options {
    /// Rounds; the figures are medians over them.
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Milliseconds per measurement.
    #[arg(long, default_value_t = 2000)]
    millis: u64,
    /// Requests under way.
    #[arg(long, value_delimiter = ',', default_value = "1,32")]
    depths: Vec<u32>,
    /// Sizes of a request, in bytes.
    #[arg(long, value_delimiter = ',', default_value = "4096,1048576")]
    sizes: Vec<u64>,
    /// Length of the device in MiB.
    #[arg(long, default_value_t = 256)]
    device_mib: u64,
    #[command(flatten)]
    keep: Keep,
}

type Failure = Box<dyn std::error::Error + Send + Sync>;

fn main() -> Result<ExitCode, Failure> {
    source::be_one_if_asked()?;
    be_the_server_if_asked()?;
    let options = Options::parse();
    let mut run = Run::new("nbd_requests", "requests/s");
    let folder = remora_lab::scratch::folder("bench-nbd")?;
    let mut servers = vec![Rival::ours(folder.path(), &options)?];
    for (name, copies, held) in VOLUMES {
        servers.push(Rival::volume(name, (copies, held), folder.path(), &options)?);
    }
    for (name, threads) in RIVALS {
        match Rival::nbdkit(name, threads, folder.path(), &options) {
            Ok(rival) => servers.push(rival),
            Err(error) => {
                run.notes.push(format!("{name} is missing: {error}; `dev/lab/setup/setup --rivals` installs it"));
            }
        }
    }
    match FilePlace::start(Subject::Gluster, options.device_mib, &[]) {
        Ok(gluster) => servers.push(Rival { name: GLUSTER, copies: Vec::new(), door: Door::File(gluster) }),
        Err(error) => {
            run.notes.push(format!("{GLUSTER} is missing: {error}; `dev/lab/setup/setup --rivals` installs it"))
        }
    }
    for server in &servers {
        server.fill(folder.path(), &options)?;
    }
    for round in 0..options.rounds {
        eprintln!("round {} of {}", round + 1, options.rounds);
        for case in cases(&options) {
            for turn in 0..servers.len() {
                let server = &servers[(round + turn) % servers.len()];
                run.samples.push(server.measure(folder.path(), &options, &case, round)?);
            }
        }
    }
    for case in cases(&options) {
        let promise = if case.size == 4096 { case.promise() } else { None };
        for rival in servers.iter().filter(|server| RIVALS.iter().any(|(name, _)| *name == server.name)) {
            run.compare((OURS, &case.name()), (rival.name, &case.name()), promise);
            for (name, copies, _) in VOLUMES {
                let promise = promise.filter(|_| copies == 1);
                run.compare((name, &case.name()), (rival.name, &case.name()), promise);
            }
        }
    }
    if servers.iter().any(|server| server.name == GLUSTER) {
        for case in cases(&options).into_iter().filter(|case| case.depth == 1) {
            run.compare((THREE_COPIES, &case.name()), (GLUSTER, &case.name()), case.promise_beside_gluster());
        }
    }
    Ok(options.keep.finish(&run)?)
}

/// The same program again, as the server: until its standard input ends.
fn be_the_server_if_asked() -> Result<(), Failure> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match words[..] {
        [SERVE, path, size] => {
            let device = Arc::new(MemoryDevice::new(size.parse()?));
            let offer = Offer { name: String::new(), description: String::new(), device };
            until_stdin_ends(Server::start(vec![offer], &ServerOptions::new(Address::Unix(path.into())))?)
        }
        [SERVE_VOLUME, path, size, held, ref copies @ ..] => {
            let places: Vec<_> = copies.iter().map(|copy| remora_messenger::Address::Shm(copy.into())).collect();
            let shape = new_volume(&places, held.parse()?, size.parse::<u64>()? / BLOCK_BYTES as u64)?;
            let volume = Volume::open(shape, &places, &ClientOptions::default())?;
            until_stdin_ends(VolumeServer::start(volume, "", &ServerOptions::new(Address::Unix(path.into())))?)
        }
        _ => Ok(()),
    }
}

/// Keeps `server` until this process's standard input ends, and then ends the process.
fn until_stdin_ends<S>(server: S) -> Result<(), Failure> {
    io::stdin().read_to_end(&mut Vec::new())?;
    drop(server);
    std::process::exit(0);
}

#[derive(Clone, Copy)]
struct Case {
    writes: bool,
    size: u64,
    depth: u32,
}

fn cases(options: &Options) -> Vec<Case> {
    let (sizes, depths) = (&options.sizes, &options.depths);
    let of = |size, depth| [true, false].map(|writes| Case { writes, size, depth });
    sizes.iter().flat_map(|&size| depths.iter().flat_map(move |&depth| of(size, depth))).collect()
}

impl Case {
    fn name(&self) -> String {
        let verb = if self.writes { "write" } else { "read" };
        format!("random {verb}, {} × {}", bytes(self.size), self.depth)
    }

    fn promise(&self) -> Option<f64> {
        match self.depth {
            1 => Some(ONE_AT_LEAST),
            32 => Some(MANY_AT_LEAST),
            _ => None,
        }
    }

    /// Of three copies: requests per second in multiples of GlusterFS's.
    fn promise_beside_gluster(&self) -> Option<f64> {
        match (self.size, self.writes) {
            (4096, true) => Some(3.0),
            (4096, false) => Some(4.0),
            (1_048_576, true) => Some(3.0),
            _ => None,
        }
    }
}

/// A server that is measured.
struct Rival {
    name: &'static str,
    /// The servers of a volume's copies.
    copies: Vec<CopyServer>,
    door: Door,
}

/// How fio gets to it.
enum Door {
    Nbd { process: Process, socket: PathBuf },
    File(FilePlace),
}

impl Rival {
    fn ours(folder: &Path, options: &Options) -> Result<Rival, Failure> {
        let socket = folder.join("ours");
        let mut command = Command::new(std::env::current_exe()?);
        command.arg(SERVE).arg(&socket).arg((options.device_mib << 20).to_string());
        Rival::start(OURS, command, socket)
    }

    /// A volume with `copies` copies, of which `held` hold a write before it is answered.
    fn volume(
        name: &'static str,
        (copies, held): (usize, usize),
        folder: &Path,
        options: &Options,
    ) -> Result<Rival, Failure> {
        let mut command = Command::new(std::env::current_exe()?);
        let socket = folder.join(format!("volume-{copies}"));
        command.arg(SERVE_VOLUME).arg(&socket).args([(options.device_mib << 20).to_string(), held.to_string()]);
        let mut servers = Vec::new();
        for number in 0..copies {
            let copy = folder.join(format!("copy-{copies}-{number}"));
            servers.push(CopyServer::start(&format!("shm:{}", copy.display()), CopyPlace::default())?);
            command.arg(copy);
        }
        Ok(Rival { copies: servers, ..Rival::start(name, command, socket)? })
    }

    fn nbdkit(name: &'static str, threads: u32, folder: &Path, options: &Options) -> Result<Rival, Failure> {
        let socket = folder.join(format!("nbdkit-{threads}"));
        let mut command = Command::new("nbdkit");
        command.args(["--foreground", &format!("--threads={threads}"), "--unix"]).arg(&socket);
        command.args(["memory", &format!("{}M", options.device_mib)]);
        Rival::start(name, command, socket)
    }

    /// Starts it, and waits until it listens.
    fn start(name: &'static str, command: Command, socket: PathBuf) -> Result<Rival, Failure> {
        let process = listening(name, command, &socket)?;
        Ok(Rival { name, copies: Vec::new(), door: Door::Nbd { process, socket } })
    }

    /// Processor seconds of its processes so far.
    fn cpu_seconds(&self) -> Result<f64, Failure> {
        let mut seconds = match &self.door {
            Door::Nbd { process, .. } => process.cpu_seconds()?,
            Door::File(gluster) => gluster.cpu_seconds()?,
        };
        for copy in &self.copies {
            seconds += copy.process.cpu_seconds()?;
        }
        Ok(seconds)
    }

    /// Writes everything once, so that no case pays for memory that is touched for the first time.
    fn fill(&self, folder: &Path, options: &Options) -> Result<(), Failure> {
        let size = format!("--size={}m", options.device_mib);
        self.fio(folder, &["--rw=write", "--bs=1m", "--iodepth=4", &size]).map(drop)
    }

    fn measure(&self, folder: &Path, options: &Options, case: &Case, round: usize) -> Result<Sample, Failure> {
        let verb = if case.writes { "write" } else { "read" };
        let words = [
            format!("--rw=rand{verb}"),
            format!("--bs={}", case.size),
            format!("--iodepth={}", case.depth),
            format!("--size={}m", options.device_mib),
            format!("--runtime={}ms", options.millis),
            "--time_based".to_owned(),
        ];
        let (server_before, client_before) = (self.cpu_seconds()?, cpu::of_ended_children()?);
        let said = self.fio(folder, &words.each_ref().map(String::as_str))?;
        let client = (cpu::of_ended_children()? - client_before).as_secs_f64();
        let figures = &said["jobs"][0][verb];
        let number = |name: &str| figures[name].as_f64().ok_or(format!("fio printed no {name}: {figures}"));
        let served = self.cpu_seconds()? - server_before;
        let sample = Sample::new(self.name, case.name(), round, number("iops")?);
        Ok(sample.cost(client, served, number("io_bytes")? / 1e9))
    }

    /// Runs fio, and returns its report.
    fn fio(&self, folder: &Path, words: &[&str]) -> Result<Value, Failure> {
        let mut command = match &self.door {
            Door::Nbd { socket, .. } => {
                let mut command = Command::new("fio");
                command.arg("--ioengine=nbd").arg(format!("--uri=nbd+unix:///?socket={}", socket.display()));
                command
            }
            Door::File(gluster) => {
                let mut command = gluster.command("fio");
                command.args(["--ioengine=libaio", "--direct=1"]);
                command.arg(format!("--filename={}/data", gluster.path().display()));
                command
            }
        };
        // A thread, so that fio's processor time is that of one process.
        command
            .args(["--name=x", "--thread", "--output-format=json", "--randrepeat=0"])
            .args(words)
            .current_dir(folder);
        let output = command.output()?;
        let said = String::from_utf8_lossy(&output.stdout);
        let json = said.find('{').map(|at| &said[at..]).filter(|_| output.status.success());
        let why = || format!("fio failed with {}: {}", self.name, String::from_utf8_lossy(&output.stderr));
        Ok(serde_json::from_str(json.ok_or_else(why)?)?)
    }
}

/// Starts a server, and waits until it listens at this socket.
fn listening(name: &str, mut command: Command, socket: &Path) -> Result<Process, Failure> {
    command.stdin(Stdio::piped()).stdout(Stdio::null());
    let (mut process, _) = Process::start(name, command)?;
    let until = Instant::now() + START_LIMIT;
    while !socket.exists() {
        if process.ended()?.is_some() || Instant::now() > until {
            return Err(format!("{name} does not listen at {}", socket.display()).into());
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(process)
}

const OURS: &str = "ours, memory";

/// Volumes: copies, and how many of them hold a write before it is answered.
const VOLUMES: [(&str, usize, usize); 2] = [("volume, one copy", 1, 1), (THREE_COPIES, 3, 2)];
const THREE_COPIES: &str = "volume, three copies";

const GLUSTER: &str = "GlusterFS, three replicas";

/// nbdkit with its device in memory, and its threads for a connection. Sixteen is what it has by default.
const RIVALS: [(&str, u32); 2] = [("nbdkit memory", 16), ("nbdkit memory, one thread", 1)];

/// First argument of the server's process; then its socket, and bytes.
const SERVE: &str = "--serve-memory";

/// First argument of the process that serves a volume; then its socket, bytes, how many copies hold a write, and the
/// sockets of their servers.
const SERVE_VOLUME: &str = "--serve-volume";

/// Targets: requests per second in multiples of nbdkit's.
const ONE_AT_LEAST: f64 = 1.0;
const MANY_AT_LEAST: f64 = 1.2;

/// Until a server listens.
const START_LIMIT: Duration = Duration::from_secs(10);
