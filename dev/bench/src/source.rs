//! The source's end of a read benchmark, as a separate process, so that the processor seconds of the two ends can be
//! separated.
//!
//! The program starts itself again with [`ARGUMENT`]. The two then use the child's standard input and output, a line at
//! a time: the child prints the place of its region, and on request its processor time. It ends when its standard input
//! ends, so it cannot outlive the program.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use clap::Args;
use serde::{Deserialize, Serialize};

use crate::cpu;
use crate::processors::{self, Role};
use remora_fabric::shm::{ShmConnector, ShmExporter, ShmOptions};
use remora_fabric::tcp::{SendMode, TcpConnector, TcpExporter, TcpOptions};
use remora_fabric::verbs::{CompletionMode, VerbsConnector, VerbsExporter, VerbsOptions};
use remora_fabric::{Connector, Error, Exporter, Memory, Pages, Peer, RegionId, RegionKey, Regions, Secret};
use remora_lab::Host;
use remora_lab::process::Process;
use remora_messenger::Address;
use remora_volume::client::{ClientOptions, Volume, new_id};
use remora_volume::server::{Server, ServerOptions};
use remora_volume::shape::{Copies, Shape};

/// First argument of the child; the second is a [`SourceOptions`] as JSON.
pub const ARGUMENT: &str = "--be-the-source";

/// What the child exports, and how.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct SourceOptions {
    /// Length of the region.
    pub region_bytes: u64,
    /// Outstanding reads per peer.
    pub depth: usize,
    /// The RDMA devices, if the region is read over RDMA too.
    pub rdma: Ends,
}

impl SourceOptions {
    fn options(&self) -> TcpOptions {
        TcpOptions { lanes: 1, depth: self.depth, send: SendMode::Copy, ..TcpOptions::default() }
    }
}

/// The place of the child's region.
#[derive(Debug, Serialize, Deserialize)]
struct Place {
    shm: Vec<u8>,
    tcp: Vec<u8>,
    verbs: Option<Vec<u8>>,
    plain: SocketAddr,
}

/// The child, seen from the program.
pub struct Source {
    child: Child,
    commands: Option<ChildStdin>,
    answers: BufReader<ChildStdout>,
    place: Place,
    wish: SourceOptions,
}

impl Source {
    /// Starts the child, and waits until its region is warm.
    pub fn start(wish: &SourceOptions) -> io::Result<Source> {
        let mut child = Command::new(std::env::current_exe()?)
            .args([ARGUMENT, &serde_json::to_string(wish)?])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let commands = child.stdin.take();
        let answers = child.stdout.take().ok_or(io::ErrorKind::BrokenPipe)?;
        let mut answers = BufReader::new(answers);
        let place = serde_json::from_str(&line(&mut answers)?)?;
        Ok(Source { child, commands, answers, place, wish: wish.clone() })
    }

    /// Processor time used so far.
    pub fn cpu(&mut self) -> io::Result<Duration> {
        self.commands.as_mut().ok_or(io::ErrorKind::BrokenPipe)?.write_all(b"cpu\n")?;
        let micros = line(&mut self.answers)?.trim().parse().map_err(io::Error::other)?;
        Ok(Duration::from_micros(micros))
    }

    /// A peer of its region over TCP.
    pub fn connect_tcp(&self, sink: &Arc<Memory>) -> Result<Box<dyn Peer>, Error> {
        let key = RegionKey::from_bytes(self.place.tcp.clone())?;
        TcpConnector::new(self.wish.options(), None)?.connect(&key, SESSION, &SECRET, sink.clone())
    }

    /// A peer of its region over RDMA.
    pub fn connect_verbs(&self, sink: &Arc<Memory>) -> Result<Box<dyn Peer>, Error> {
        let key = self.place.verbs.clone().ok_or(Error::Misuse("for RDMA give --rdma-source and --rdma-reader"))?;
        // Its rivals poll, too.
        let completion = CompletionMode::Polling;
        let options = VerbsOptions { depth: self.wish.depth, completion, ..VerbsOptions::default() };
        let local = self.wish.rdma.rdma_reader.into_iter().collect();
        let key = RegionKey::from_bytes(key)?;
        VerbsConnector::new(options, None, local)?.connect(&key, SESSION, &SECRET, sink.clone())
    }

    /// A peer of its region over shared memory.
    pub fn connect_shm(&self, sink: &Arc<Memory>) -> Result<Box<dyn Peer>, Error> {
        let key = RegionKey::from_bytes(self.place.shm.clone())?;
        ShmConnector::new().connect(&key, SESSION, &SECRET, sink.clone())
    }

    /// The simplest server over TCP: 4 bytes in, that number of bytes of private memory out.
    pub fn connect_plain(&self) -> io::Result<TcpStream> {
        let stream = TcpStream::connect(self.place.plain)?;
        stream.set_nodelay(true)?;
        Ok(stream)
    }
}

impl Drop for Source {
    fn drop(&mut self) {
        // The end of its input ends the child.
        self.commands = None;
        let _ = self.child.wait();
    }
}

/// Call this first in `main`: if this process was started as the child, it does the child's work and does not return.
pub fn be_the_source_if_asked() {
    let mut arguments = std::env::args().skip(1);
    if arguments.next().as_deref() != Some(ARGUMENT) {
        return;
    }
    let status = match be_the_source(&arguments.next().unwrap_or_default()) {
        Ok(()) => 0,
        Err(error) => {
            eprintln!("the source's process failed: {error}");
            1
        }
    };
    std::process::exit(status);
}

fn be_the_source(wish: &str) -> Result<(), Box<dyn std::error::Error>> {
    let wish: SourceOptions = serde_json::from_str(wish)?;
    let region = warm_memory("bench-region", wish.region_bytes)?;
    let tcp = TcpExporter::new(wish.options(), None)?;
    tcp.listen("127.0.0.1:0")?;
    let shm = ShmExporter::bind(ShmOptions::default())?;
    let listen = |host| VerbsExporter::listen(VerbsOptions::default(), &[SocketAddr::new(host, 0)]);
    let verbs = wish.rdma.rdma_source.map(listen).transpose()?;
    let mut exporters: Vec<&dyn Exporter> = vec![&tcp, &shm];
    exporters.extend(verbs.iter().map(|verbs| verbs as &dyn Exporter));
    for exporter in exporters {
        exporter.export(ID, region.clone())?;
        exporter.grant(SESSION, SECRET, Regions::All);
    }
    let plain = TcpListener::bind("127.0.0.1:0")?;
    let place = Place {
        shm: shm.key(ID)?.as_bytes().to_vec(),
        tcp: tcp.key(ID)?.as_bytes().to_vec(),
        verbs: verbs.as_ref().map(|verbs| verbs.key(ID)).transpose()?.map(|key| key.as_bytes().to_vec()),
        plain: plain.local_addr()?,
    };
    // Ends with the process.
    let bytes: Arc<[u8]> = vec![1; usize::try_from(wish.region_bytes)?].into();
    std::thread::spawn(move || {
        for stream in plain.incoming().flatten() {
            let bytes = bytes.clone();
            std::thread::spawn(move || serve_plainly(stream, &bytes));
        }
    });
    println!("{}", serde_json::to_string(&place)?);
    for command in io::stdin().lines() {
        match command?.as_str() {
            "cpu" => println!("{}", cpu::of_self()?.as_micros()),
            other => return Err(format!("unknown command {other:?}").into()),
        }
    }
    Ok(())
}

fn serve_plainly(mut stream: TcpStream, bytes: &[u8]) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let mut request = [0; 4];
    let mut offset = 0;
    loop {
        stream.read_exact(&mut request)?;
        let length = u32::from_le_bytes(request) as usize;
        let Some(answer) = bytes.get(offset..).and_then(|rest| rest.get(..length)) else {
            return Err(io::ErrorKind::InvalidInput.into());
        };
        stream.write_all(answer)?;
        // Walks through its memory as the readers of a region do, so that no answer is in a cache.
        offset += length.max(PLAIN_STEP_BYTES);
        if offset + length > bytes.len() {
            offset = 0;
        }
    }
}

/// Memory whose pages all exist and have been touched through this mapping, filled with different bytes.
pub fn warm_memory(name: &str, length: u64) -> Result<Arc<Memory>, Error> {
    let memory = Memory::create(name, length, Pages::Small)?;
    memory.prefault(0..length)?;
    let mut page = [0; 4096];
    for offset in (0..length).step_by(page.len()) {
        page.fill((offset / 4096 % 251) as u8);
        let end = (length - offset).min(page.len() as u64) as usize;
        memory.write(offset, page.get(..end).unwrap_or_default())?;
    }
    // Writing is not enough: a first read through a mapping has a cost, too.
    memory.crc32c(0..length)?;
    Ok(Arc::new(memory))
}

fn line(from: &mut impl BufRead) -> io::Result<String> {
    let mut line = String::new();
    match from.read_line(&mut line)? {
        0 => Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the source's process has ended: see its message above")),
        _ => Ok(line),
    }
}

const ID: RegionId = RegionId { generation: 1, region: 0 };

const SESSION: u64 = 1;

/// The secret of a benchmark on loopback, which needs no protection.
const SECRET: Secret = [7; 32];

/// Least distance between two answers of the simple server.
const PLAIN_STEP_BYTES: usize = 1 << 20;

// Servers of a volume's copies, as processes of their own: the measuring program, started again.

type Failure = Box<dyn std::error::Error + Send + Sync>;

/// A server of copies.
#[derive(Debug)]
pub struct CopyServer {
    /// Its process.
    pub process: Process,
    /// Where it listens.
    pub address: Address,
}

/// Where a server runs, and what it shares.
#[derive(Clone, Copy, Debug, Default)]
pub struct CopyPlace<'a> {
    /// The host of a test network; `None`: this one.
    pub host: Option<&'a Host>,
    /// Whether it shares no memory with other processes, so that what is not in messages is read over TCP.
    pub is_far: bool,
}

/// Servers of copies that this process has started.
static STARTED: AtomicUsize = AtomicUsize::new(0);

impl CopyServer {
    /// Starts one, and waits until it listens at `address`. Port 0 is any port.
    pub fn start(address: &str, place: CopyPlace<'_>) -> Result<CopyServer, Failure> {
        let mut command = Command::new(std::env::current_exe()?);
        command.args([SERVE_COPY, address, if place.is_far { FAR } else { NEAR }]);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        if let Some(host) = place.host {
            host.enter(&mut command)?;
        }
        // No measurement has more servers at once; a client runs on what they leave.
        let role = Role::Server(STARTED.fetch_add(1, Ordering::Relaxed) % 3, 3);
        let (process, pipes) = processors::on(role, || Process::start("a copy's server", command))?;
        let stdout = pipes.stdout.ok_or("a copy's server without its standard output")?;
        let mut line = String::new();
        BufReader::new(stdout).read_line(&mut line)?; // it ends without a line if it cannot listen
        let address = line.trim().parse().map_err(|_| format!("no server of copies at {address}; it said {line:?}"))?;
        Ok(CopyServer { process, address })
    }
}

/// Is such a server, if this program was started as one: until its standard input ends, and the process with it.
pub fn be_one_if_asked() -> Result<(), Failure> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [word, address, distance] = arguments.as_slice() else { return Ok(()) };
    if word != SERVE_COPY {
        return Ok(());
    }
    let near = ServerOptions { memory: MEMORY_BYTES, ..ServerOptions::default() };
    let options = if distance == FAR { ServerOptions { shm: false, lanes: Some(0), ..near } } else { near };
    let server = Server::start(&address.parse()?, &options)?;
    println!("{}", server.address());
    io::stdin().read_to_end(&mut Vec::new())?;
    drop(server);
    std::process::exit(0);
}

/// Makes a new volume of this many blocks on servers, of which `held` must hold a write before it is answered.
pub fn new_volume(servers: &[Address], held: usize, blocks: u64) -> Result<Shape, Failure> {
    let copies = Copies::new(servers.len(), held).ok_or("no volume has copies like these")?;
    let shape = Shape::new(new_id()?, blocks, copies).ok_or("no volume has this many blocks")?;
    Volume::create(shape, servers, &ClientOptions::default())?;
    Ok(shape)
}

/// First argument of the server's process; then its address, and [`NEAR`] or [`FAR`].
const SERVE_COPY: &str = "--serve-copy";

const NEAR: &str = "near";

const FAR: &str = "far";

/// For the volumes of all cases, and what is pulled.
const MEMORY_BYTES: u64 = 2 << 30;

// The rivals of RDMA: `ib_read_bw`, `ib_read_lat`, `ib_send_bw` and `ib_send_lat` of perftest, between the same
// devices, in the same run.
//
// They measure the cards and libraries with as little other code as possible; the difference to a transport is the
// cost of its own code. Each run starts a separate server and client, as perftest requires.

/// The two ends of a measurement over RDMA.
#[derive(Args, Clone, Debug, Default, Serialize, Deserialize)]
pub struct Ends {
    /// Address of the source's device.
    #[arg(long)]
    pub rdma_source: Option<IpAddr>,
    /// Address of the reader's device.
    #[arg(long)]
    pub rdma_reader: Option<IpAddr>,
    /// Name of the source's device, for perftest.
    #[arg(long, default_value = "rxe1")]
    pub rdma_source_device: String,
    /// Name of the reader's device, for perftest.
    #[arg(long, default_value = "rxe0")]
    pub rdma_reader_device: String,
}

impl Ends {
    /// Bytes per second of READs of `size` bytes, `depth` of them in flight, `count` in all.
    ///
    /// # Errors
    /// perftest is not installed, or failed.
    pub fn bandwidth(&self, size: u32, depth: usize, count: u64) -> io::Result<f64> {
        let (depth, count) = (depth.to_string(), count.max(5).to_string());
        // Columns: bytes, iterations, peak, average in MiB/s, messages.
        let mebibytes = self.figure(3, "ib_read_bw", size, &["-t", &depth, "-o", &depth, "-n", &count])?;
        Ok(mebibytes * 1048576.0)
    }

    /// Bytes per second of SENDs of `size` bytes, `depth` of them posted, `count` in all.
    pub fn send_bandwidth(&self, size: u32, depth: usize, count: u64) -> io::Result<f64> {
        let (depth, count) = (depth.to_string(), count.max(5).to_string());
        let mebibytes = self.figure(3, "ib_send_bw", size, &["-t", &depth, "-n", &count])?;
        Ok(mebibytes * 1048576.0)
    }

    /// The typical time of a SEND of `size` bytes, one way, in microseconds.
    pub fn send_latency(&self, size: u32, count: u64) -> io::Result<f64> {
        self.figure(4, "ib_send_lat", size, &["-n", &count.max(5).to_string()])
    }

    /// The typical time of a READ of `size` bytes, in microseconds.
    pub fn latency(&self, size: u32, count: u64) -> io::Result<f64> {
        // Columns: bytes, iterations, shortest, longest, typical, ...
        self.figure(4, "ib_read_lat", size, &["-n", &count.max(5).to_string()])
    }

    /// One column of the output. The clock's calibration sometimes fails on a busy machine, and then perftest prints
    /// `inf`: try again.
    fn figure(&self, number: usize, program: &str, size: u32, more: &[&str]) -> io::Result<f64> {
        let mut tried = Err(io::Error::other("never tried"));
        for _ in 0..TRIES {
            tried = column(&self.run(program, size, more)?, number);
            if tried.is_ok() {
                break;
            }
        }
        tried
    }

    /// Runs server and client, and returns the line of the client's table.
    fn run(&self, program: &str, size: u32, more: &[&str]) -> io::Result<String> {
        let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port().to_string();
        let command = |device: &str| {
            let mut command = Command::new(program);
            // -x 1: the GID of the IPv4 address; -F: no complaint about the processor's clock.
            command.args(["-d", device, "-x", "1", "-F", "-p", &port, "-s", &size.to_string()]).args(more);
            command
        };
        let _server = quiet(program, command(&self.rdma_source_device))?;
        let deadline = Instant::now() + START_LIMIT;
        loop {
            let said = command(&self.rdma_reader_device).arg("127.0.0.1").output()?;
            let text = String::from_utf8_lossy(&said.stdout);
            let wanted = size.to_string();
            let found = text.lines().find(|line| line.split_whitespace().next() == Some(&wanted));
            match found {
                Some(line) if said.status.success() => return Ok(line.to_owned()),
                // Until the server listens.
                _ if Instant::now() < deadline => std::thread::sleep(Duration::from_millis(100)),
                _ => {
                    let text = format!("{program} failed: {text}{}", String::from_utf8_lossy(&said.stderr));
                    return Err(io::Error::other(text));
                }
            }
        }
    }
}

/// Number of attempts if the first give no figure.
const TRIES: usize = 4;

/// How long perftest's server may take to listen.
const START_LIMIT: Duration = Duration::from_secs(20);

fn column(line: &str, number: usize) -> io::Result<f64> {
    let word = line.split_whitespace().nth(number).and_then(|word| word.parse::<f64>().ok());
    word.filter(|value| value.is_finite() && *value > 0.0)
        .ok_or_else(|| io::Error::other(format!("no figure in {line:?}")))
}

/// Starts a tool's server, whose words nobody reads. It ends when it is dropped.
fn quiet(name: &str, mut command: Command) -> io::Result<Process> {
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    Ok(Process::start(name, command).map_err(io::Error::other)?.0)
}

/// What iperf3 has carried over loopback, in one direction.
#[derive(Clone, Copy, Debug)]
pub struct Stream {
    /// Bytes received.
    pub bytes: f64,
    /// In that many seconds.
    pub seconds: f64,
    /// Processor seconds of the sender.
    pub sender_cpu: f64,
    /// Processor seconds of the receiver.
    pub receiver_cpu: f64,
}

/// Runs iperf3 on loopback with these arguments of its client. `None` if it is not installed.
pub fn iperf3(time: Duration, words: &[&str]) -> io::Result<Option<Stream>> {
    if Command::new("iperf3").arg("--version").output().is_err() {
        return Ok(None);
    }
    let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port().to_string();
    let mut server = Command::new("iperf3");
    server.args(["-s", "-1", "-B", "127.0.0.1", "-p", &port]);
    let _server = quiet("iperf3", server)?;
    let seconds = time.as_millis().div_ceil(1000).max(1).to_string();
    let deadline = Instant::now() + START_LIMIT;
    loop {
        std::thread::sleep(Duration::from_millis(20)); // until it listens
        let mut client = Command::new("iperf3");
        let said = client.args(["-c", "127.0.0.1", "-p", &port, "-t", &seconds, "-J"]).args(words).output()?;
        let report: serde_json::Value = serde_json::from_slice(&said.stdout).unwrap_or_default();
        let (end, number) = (&report["end"], |value: &serde_json::Value| value.as_f64());
        let (received, share) = (&end["sum_received"], &end["cpu_utilization_percent"]);
        let figures = (number(&received["bytes"]), number(&received["seconds"]));
        if let (true, (Some(bytes), Some(seconds))) = (said.status.success(), figures) {
            let cpu = |side: &str| number(&share[side]).unwrap_or_default() / 100.0 * seconds;
            let (sender_cpu, receiver_cpu) = (cpu("host_total"), cpu("remote_total"));
            return Ok(Some(Stream { bytes, seconds, sender_cpu, receiver_cpu }));
        }
        if Instant::now() > deadline {
            return Err(io::Error::other(format!("iperf3 failed: {report}")));
        }
    }
}
