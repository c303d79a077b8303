//! The messenger as client and server, and its rivals. The client sends the next request from the callback of the
//! reply, as an asynchronous owner would, or from a thread that waits for the reply.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use rustix::event::epoll::{self, EventData, EventFlags};
use tempfile::TempDir;

use super::{Case, Outcome, Place, content};
use crate::cpu;
use crate::source::{self, Ends};
use remora_messenger::{Address, Connection, Delivery, Dispatcher, Message, Messenger, Options, Policy};

/// Answers every request with `reply` bytes, until its standard input ends.
pub fn serve(address: &Address, reply: usize, options: &Options) -> io::Result<()> {
    let (_messenger, address) = listen(address, reply, options)?;
    answer_for_processor_time(&address.to_string())
}

/// Answers every request with `reply` bytes as long as the returned messenger exists; also returns its address.
pub fn listen(address: &Address, reply: usize, options: &Options) -> io::Result<(Messenger, Address)> {
    let answerer = Arc::new(Answerer { reply: Bytes::from(content(reply)) });
    let messenger = Messenger::new(Policy::stateless_server(), options, answerer)?;
    let address = messenger.listen(address)?;
    Ok((messenger, address))
}

struct Answerer {
    reply: Bytes,
}

impl Dispatcher for Answerer {
    fn message(&self, connection: &Connection, delivery: Delivery) {
        let reply = match delivery.kind {
            PROCESSOR_TIME => delivery.reply(nanos(cpu::of_self().unwrap_or_default()).to_le_bytes().to_vec()),
            _ => Message::new(delivery.transaction, delivery.kind, Bytes::new()).with_data(self.reply.clone()),
        };
        let _ = connection.send(reply); // a client that has gone needs no reply
    }
}

/// Sends requests for `time`.
pub fn measure(server: &mut Server, case: &Case, time: Duration, options: &Options) -> io::Result<Outcome> {
    let asker = Arc::new(Asker::new(case));
    let messenger = Messenger::new(Policy::lossy_client(), options, asker.clone())?;
    let address: Address = server.address.parse().map_err(io::Error::other)?;
    let connections: Vec<Connection> = (0..case.connections).map(|_| messenger.connect(&address)).collect();
    asker.wait("to connect", |asker| asker.connected.load(Ordering::SeqCst) == case.connections)?;
    // Our own server reports its processor time over a pipe at any time; a server elsewhere reports it in a reply,
    // after all others.
    let is_elsewhere = server.is_elsewhere();
    let mut server_cpu = || match connections.first() {
        Some(connection) if is_elsewhere => asker.ask_for_processor_time(connection),
        _ => server.cpu(),
    };
    let (server_before, before) = (server_cpu()?, cpu::of_self()?);
    let start = Instant::now();
    asker.begin(&connections, start);
    std::thread::sleep(time);
    asker.ending.store(true, Ordering::SeqCst);
    let took = start.elapsed();
    let spent = (cpu::of_self()? - before, server_cpu()?.saturating_sub(server_before));
    asker.wait("for the last replies", |asker| asker.under_way.load(Ordering::SeqCst) == 0)?;
    if asker.failed.load(Ordering::SeqCst) {
        return Err(io::Error::other("a connection broke during the measurement"));
    }
    let reply = asker.other_reply.load(Ordering::SeqCst);
    if reply != NO_OTHER {
        let text = format!("the server answers with {reply} bytes, not {}: give both the same --reply", case.reply);
        return Err(io::Error::other(text));
    }
    let times = asker.lanes.iter().flat_map(|lane| std::mem::take(&mut lock(lane).times)).collect();
    Ok(Outcome::of(times, took, spent.0, spent.1))
}

/// Opens idle connections, and returns the memory of both sides in bytes.
pub fn idle(server: &mut Server, connections: usize, options: &Options) -> io::Result<[u64; 2]> {
    let asker = Arc::new(Asker::new(&Case { connections, depth: 0, request: 0, reply: 0 }));
    let messenger = Messenger::new(Policy::lossy_client(), options, asker.clone())?;
    let address: Address = server.address.parse().map_err(io::Error::other)?;
    let _connections: Vec<Connection> = (0..connections).map(|_| messenger.connect(&address)).collect();
    asker.wait("to connect", |asker| asker.connected.load(Ordering::SeqCst) == connections)?;
    Ok([resident()?, server.resident()?])
}

struct Asker {
    request: Bytes,
    /// The expected bytes of a reply, and the bytes of a reply that had another length.
    reply: usize,
    other_reply: AtomicUsize,
    lanes: Vec<Mutex<Lane>>,
    /// The processor time that the server reported last.
    server_cpu: Mutex<Option<Duration>>,
    connected: AtomicUsize,
    under_way: AtomicU64,
    ending: AtomicBool,
    failed: AtomicBool,
    changed: (Mutex<()>, Condvar),
}

/// The requests in flight on one connection, by index. Only the connection's worker accesses it during the run.
struct Lane {
    asked: Vec<Instant>,
    times: Vec<Duration>,
}

impl Asker {
    fn new(case: &Case) -> Asker {
        let lane = || Mutex::new(Lane { asked: vec![Instant::now(); case.depth], times: Vec::with_capacity(EXPECTED) });
        Asker {
            request: Bytes::from(content(case.request)),
            reply: case.reply,
            other_reply: AtomicUsize::new(NO_OTHER),
            lanes: (0..case.connections).filter(|_| case.depth > 0).map(|_| lane()).collect(),
            server_cpu: Mutex::default(),
            connected: AtomicUsize::new(0),
            under_way: AtomicU64::new(0),
            ending: AtomicBool::new(false),
            failed: AtomicBool::new(false),
            changed: Default::default(),
        }
    }

    fn begin(&self, connections: &[Connection], now: Instant) {
        let depth = self.lanes.first().map_or(0, |lane| lock(lane).asked.len());
        self.under_way.store((connections.len() * depth) as u64, Ordering::SeqCst);
        for (at, connection) in connections.iter().enumerate() {
            for place in 0..depth {
                lock(&self.lanes[at]).asked[place] = now;
                self.ask(connection, ((at as u64) << 32) | place as u64);
            }
        }
    }

    fn ask(&self, connection: &Connection, transaction: u64) {
        let request = Message::new(transaction, REQUEST, Bytes::new()).with_data(self.request.clone());
        if connection.send(request).is_err() {
            self.failed.store(true, Ordering::SeqCst);
        }
    }

    /// Asks for the processor time that the server's process has used so far, for all clients.
    fn ask_for_processor_time(&self, connection: &Connection) -> io::Result<Duration> {
        *lock(&self.server_cpu) = None;
        connection.send(Message::new(0, PROCESSOR_TIME, Bytes::new())).map_err(io::Error::other)?;
        self.wait("for the server's processor time", |asker| lock(&asker.server_cpu).is_some())?;
        Ok(lock(&self.server_cpu).unwrap_or_default())
    }

    fn wait(&self, what: &str, holds: impl Fn(&Asker) -> bool) -> io::Result<()> {
        let deadline = Instant::now() + PATIENCE;
        let mut guard = lock(&self.changed.0);
        while !holds(self) {
            if Instant::now() > deadline || self.failed.load(Ordering::SeqCst) {
                return Err(io::Error::other(format!("timed out {what}: is the server running, and idle?")));
            }
            let waited = self.changed.1.wait_timeout(guard, Duration::from_millis(10));
            guard = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        Ok(())
    }
}

impl Dispatcher for Asker {
    fn message(&self, connection: &Connection, delivery: Delivery) {
        if delivery.kind == PROCESSOR_TIME {
            let nanos = delivery.front.first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes));
            *lock(&self.server_cpu) = Some(Duration::from_nanos(nanos));
            return;
        }
        let (at, place) = ((delivery.transaction >> 32) as usize, (delivery.transaction & 0xffff_ffff) as usize);
        if delivery.data.len() != self.reply {
            self.other_reply.store(delivery.data.len(), Ordering::SeqCst);
        }
        if self.ending.load(Ordering::Relaxed) {
            self.under_way.fetch_sub(1, Ordering::SeqCst);
            return;
        }
        let now = Instant::now();
        {
            let mut lane = lock(&self.lanes[at]);
            let asked = std::mem::replace(&mut lane.asked[place], now);
            lane.times.push(now - asked);
        }
        self.ask(connection, delivery.transaction);
    }

    fn connected(&self, _: &Connection) {
        self.connected.fetch_add(1, Ordering::SeqCst);
    }

    fn reset(&self, _: &Connection, _: usize, _: bool) {
        self.failed.store(true, Ordering::SeqCst);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// Replies of a connection for whose times there is room from the start.
const EXPECTED: usize = 1 << 16;

/// Kinds of messages: one asks for a reply of given length, the other for the nanoseconds of processor time used by the
/// process.
const REQUEST: u16 = 1;

const PROCESSOR_TIME: u16 = 2;

/// A server that has not answered for this long is taken for failed.
const PATIENCE: Duration = Duration::from_secs(60);

/// The value if every reply had the expected length.
const NO_OTHER: usize = usize::MAX;

// The server side as a separate process, so that its processor time can be measured: this program, started again. Or a
// server that another command has started elsewhere, of which only the address is known.
//
// It prints its address on one line, and for each line of its input the processor time that it has used so far.

/// A running server. Dropping it ends the process, if this program has started it.
pub struct Server {
    process: Option<Process>,
    /// Its address.
    pub address: String,
}

/// A child process that answers requests.
struct Process {
    child: Child,
    to: ChildStdin,
    from: BufReader<ChildStdout>,
}

impl Process {
    /// Fails if the loader could not preload the library: the loader only prints a warning, and the figures would be
    /// those without it.
    fn has_loaded(&self, library: &str) -> io::Result<()> {
        let maps = std::fs::read_to_string(format!("/proc/{}/maps", self.child.id()))?;
        let name = Path::new(library).file_stem().unwrap_or_default().to_string_lossy().into_owned();
        if !name.is_empty() && maps.contains(&name) {
            return Ok(());
        }
        Err(io::Error::other(format!("the library {library} could not be preloaded: is it installed?")))
    }
}

impl Server {
    /// Starts this program with these arguments, which make it call [`serve`]. `preload` is a library to preload.
    pub fn start(arguments: &[String], preload: Option<&str>) -> io::Result<Server> {
        let mut command = Command::new(std::env::current_exe()?);
        command.args(arguments);
        if let Some(library) = preload {
            command.env("LD_PRELOAD", library);
        }
        let server = Server::start_program(&mut command)?;
        if let (Some(library), Some(process)) = (preload, &server.process) {
            process.has_loaded(library)?;
        }
        Ok(server)
    }

    /// Starts a program with the protocol of [`serve`].
    pub fn start_program(command: &mut Command) -> io::Result<Server> {
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let lost = || io::Error::other("a pipe of the server is missing");
        let to = child.stdin.take().ok_or_else(lost)?;
        let from = BufReader::new(child.stdout.take().ok_or_else(lost)?);
        let mut process = Process { child, to, from };
        let mut address = String::new();
        process.from.read_line(&mut address)?;
        let address = address.trim().to_owned();
        if address.is_empty() {
            return Err(io::Error::other("the server has ended before it listened"));
        }
        Ok(Server { process: Some(process), address })
    }

    /// A server that already listens at this address.
    pub fn elsewhere(place: &Place) -> Server {
        Server { process: None, address: place.to_string() }
    }

    /// Whether another command has started it.
    pub fn is_elsewhere(&self) -> bool {
        self.process.is_none()
    }

    /// Processor time used so far; zero if it runs elsewhere.
    pub fn cpu(&mut self) -> io::Result<Duration> {
        Ok(Duration::from_secs_f64(self.ask()?.0))
    }

    /// Resident memory in bytes; zero if it runs elsewhere.
    pub fn resident(&mut self) -> io::Result<u64> {
        Ok(self.ask()?.1)
    }

    fn ask(&mut self) -> io::Result<(f64, u64)> {
        self.process.as_mut().map_or(Ok((0.0, 0)), Process::ask)
    }
}

impl Process {
    fn ask(&mut self) -> io::Result<(f64, u64)> {
        writeln!(self.to)?;
        self.to.flush()?;
        let mut line = String::new();
        self.from.read_line(&mut line)?;
        let mut words = line.split_whitespace();
        let wrong = || io::Error::other(format!("the server answers {line:?}"));
        let cpu = words.next().and_then(|word| word.parse().ok()).ok_or_else(wrong)?;
        let resident = words.next().and_then(|word| word.parse().ok()).ok_or_else(wrong)?;
        Ok((cpu, resident))
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill(); // it may have ended by itself
        let _ = self.child.wait();
    }
}

/// The child's side: prints the address, then answers until its input ends.
pub fn answer_for_processor_time(address: &str) -> io::Result<()> {
    println!("{address}");
    for line in io::stdin().lines() {
        line?;
        println!("{} {}", crate::cpu::of_self()?.as_secs_f64(), resident()?);
    }
    Ok(())
}

/// Resident memory of this process, in bytes.
pub fn resident() -> io::Result<u64> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kilobytes = line.and_then(|line| line.trim().trim_end_matches(" kB").parse::<u64>().ok());
    kilobytes.map(|kilobytes| kilobytes * 1024).ok_or_else(|| io::Error::other("/proc/self/status has no VmRSS"))
}

// Rivals that are installed programs. If one is missing, its column is missing, and the run has a note about it.

/// iperf3's rate with writes of the request's size: bytes per second in one direction without replies, as an
/// [`Outcome`] whose requests are its writes. `None` if it is not installed.
pub fn iperf3(case: &Case, time: Duration) -> io::Result<Option<Outcome>> {
    let (streams, length) = (case.connections.to_string(), case.request.to_string());
    let stream = source::iperf3(time, &["-P", &streams, "-l", &length])?;
    Ok(stream.map(|stream| Outcome {
        requests: (stream.bytes / case.request as f64) as u64,
        seconds: stream.seconds,
        latency: [0.0; 4],
        client_cpu: stream.sender_cpu,
        server_cpu: stream.receiver_cpu,
    }))
}

/// perftest's SENDs between two RDMA devices: the typical round trip for one at a time, otherwise their rate.
pub fn perftest(case: &Case, ends: &Ends) -> io::Result<Outcome> {
    let size = u32::try_from(case.request).unwrap_or(u32::MAX);
    if case.depth == 1 {
        let micros = 2.0 * ends.send_latency(size, PERFTEST_ROUNDS)?;
        return Ok(of_round_trip([micros, 0.0, 0.0, 0.0], Duration::from_secs(1)));
    }
    let bytes = ends.send_bandwidth(size, case.depth, PERFTEST_ROUNDS)?;
    let requests = (bytes / case.request as f64) as u64;
    Ok(Outcome { requests, seconds: 1.0, latency: [0.0; 4], client_cpu: 0.0, server_cpu: 0.0 })
}

/// Requests one after the other: their rate follows from their time.
fn of_round_trip(latency: [f64; 4], time: Duration) -> Outcome {
    let requests = (time.as_secs_f64() * 1e6 / latency[0].max(0.001)) as u64;
    Outcome { requests, seconds: time.as_secs_f64(), latency, client_cpu: 0.0, server_cpu: 0.0 }
}

/// Number of round trips.
const PERFTEST_ROUNDS: u64 = 1000;

// The simplest rival: epoll, `recv` and `send`, one thread on each side, messages of known length without heads,
// checksums or sessions. Messages that arrive together are answered together. It is the lowest possible cost of a
// messenger over TCP.

/// One side of a connection: the bytes received of the next message, and the bytes still to be sent.
struct Pipe {
    stream: TcpStream,
    /// Bytes received of an incomplete message.
    partial: usize,
    /// Bytes of replies or requests still to be sent.
    owed: usize,
    watched_for_room: bool,
}

impl Pipe {
    fn new(stream: TcpStream) -> io::Result<Pipe> {
        stream.set_nodelay(true)?;
        stream.set_nonblocking(true)?;
        Ok(Pipe { stream, partial: 0, owed: 0, watched_for_room: false })
    }

    /// Reads once, and returns how many messages of that length are complete now. `None` at the end.
    fn read(&mut self, buffer: &mut [u8], length: usize) -> io::Result<Option<usize>> {
        match self.stream.read(buffer) {
            Ok(0) => Ok(None),
            Ok(count) => {
                let have = self.partial + count;
                self.partial = have % length;
                Ok(Some(have / length))
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(Some(0)),
            Err(error) => Err(error),
        }
    }

    /// Sends the pending bytes, from a memory of repeated content.
    fn write(&mut self, content: &[u8], epoll: impl std::os::fd::AsFd, name: u64) -> io::Result<()> {
        while self.owed > 0 {
            let length = self.owed.min(content.len());
            match self.stream.write(&content[..length]) {
                Ok(count) => self.owed -= count,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) => return Err(error),
            }
        }
        let blocked = self.owed > 0;
        if blocked != self.watched_for_room {
            self.watched_for_room = blocked;
            let flags = if blocked { EventFlags::IN | EventFlags::OUT } else { EventFlags::IN };
            epoll::modify(epoll, &self.stream, EventData::new_u64(name), flags)?;
        }
        Ok(())
    }
}

/// Serves until its standard input ends.
pub fn serve_raw(request: usize, reply: usize) -> io::Result<()> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let address = listener.local_addr()?.to_string();
    std::thread::spawn(move || answer(&listener, request, reply));
    answer_for_processor_time(&address)
}

fn answer(listener: &TcpListener, request: usize, reply: usize) -> io::Result<()> {
    let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
    listener.set_nonblocking(true)?;
    epoll::add(&epoll, listener, EventData::new_u64(u64::MAX), EventFlags::IN)?;
    let mut pipes: Vec<Option<Pipe>> = Vec::new();
    let (mut buffer, content) = (vec![0; BUFFER_BYTES], content(BUFFER_BYTES.max(reply)));
    let mut events = Vec::with_capacity(256);
    loop {
        events.clear();
        epoll::wait(&epoll, rustix::buffer::spare_capacity(&mut events), None)?;
        for event in &events {
            let name = { event.data }.u64();
            if name == u64::MAX {
                while let Ok((stream, _)) = listener.accept() {
                    let pipe = Pipe::new(stream)?;
                    epoll::add(&epoll, &pipe.stream, EventData::new_u64(pipes.len() as u64), EventFlags::IN)?;
                    pipes.push(Some(pipe));
                }
                continue;
            }
            let Some(slot) = pipes.get_mut(name as usize) else { continue };
            let Some(pipe) = slot else { continue };
            match pipe.read(&mut buffer, request) {
                Ok(Some(count)) => {
                    pipe.owed += count * reply;
                    pipe.write(&content, &epoll, name)?;
                }
                Ok(None) | Err(_) => *slot = None,
            }
        }
    }
}

/// Sends requests for `time`.
pub fn measure_raw(server: &mut Server, case: &Case, time: Duration) -> io::Result<Outcome> {
    let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
    let mut pipes = Vec::new();
    for name in 0..case.connections {
        let pipe = Pipe::new(TcpStream::connect(&server.address)?)?;
        epoll::add(&epoll, &pipe.stream, EventData::new_u64(name as u64), EventFlags::IN)?;
        pipes.push(pipe);
    }
    let (mut buffer, content) = (vec![0; BUFFER_BYTES], content(BUFFER_BYTES.max(case.request)));
    let mut asked: Vec<std::collections::VecDeque<Instant>> = vec![Default::default(); case.connections];
    let mut times = Vec::with_capacity(EXPECTED * case.connections);
    let (server_before, before) = (server.cpu()?, cpu::of_self()?);
    let start = Instant::now();
    for (name, pipe) in pipes.iter_mut().enumerate() {
        pipe.owed = case.depth * case.request;
        asked[name].extend(std::iter::repeat_n(start, case.depth));
        pipe.write(&content, &epoll, name as u64)?;
    }
    let mut events = Vec::with_capacity(256);
    let mut now = start;
    while now - start < time {
        events.clear();
        epoll::wait(&epoll, rustix::buffer::spare_capacity(&mut events), None)?;
        for event in &events {
            let name = { event.data }.u64();
            let (pipe, asked) = (&mut pipes[name as usize], &mut asked[name as usize]);
            let gone = || io::Error::other("the raw server has closed a connection");
            let count = pipe.read(&mut buffer, case.reply)?.ok_or_else(gone)?;
            now = Instant::now();
            for _ in 0..count {
                let since = asked.pop_front().ok_or_else(|| io::Error::other("a reply without a request"))?;
                times.push(now - since);
                asked.push_back(now);
            }
            pipe.owed += count * case.request;
            pipe.write(&content, &epoll, name)?;
        }
    }
    let took = start.elapsed();
    Ok(Outcome::of(times, took, cpu::of_self()? - before, server.cpu()? - server_before))
}

/// As much as the messenger receives at once.
const BUFFER_BYTES: usize = 256 * 1024;

// ZeroMQ as a rival: a small program (`dev/bench/rivals/zeromq.c`), built here if libzmq's header and a C compiler are
// installed.

/// The built program; dropping it removes the file.
pub struct ZeroMq {
    program: PathBuf,
    _folder: TempDir,
}

impl ZeroMq {
    /// Builds the program. `None` if that is not possible.
    pub fn build() -> io::Result<Option<ZeroMq>> {
        let folder = tempfile::tempdir()?;
        let program = folder.path().join("zeromq");
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("rivals/zeromq.c");
        let built = Command::new("cc").args(["-O2", "-o"]).arg(&program).arg(source).arg("-lzmq").output();
        let is_built = built.is_ok_and(|output| output.status.success());
        Ok(is_built.then_some(ZeroMq { program, _folder: folder }))
    }

    /// Measures one case, with one thread for the client and one for the server, besides the library's thread on each
    /// side.
    pub fn measure(&self, case: &Case, time: Duration) -> io::Result<Outcome> {
        let mut server = Server::start_program(Command::new(&self.program).args(["serve", &case.reply.to_string()]))?;
        let numbers = [case.connections, case.depth, case.request, time.as_millis() as usize].map(|n| n.to_string());
        let before = server.cpu()?;
        let asked = Command::new(&self.program).args(["ask", &server.address]).args(numbers).output()?;
        let server_cpu = server.cpu()? - before;
        let said = String::from_utf8_lossy(&asked.stdout);
        let figures: Vec<f64> = said.split_whitespace().filter_map(|word| word.parse().ok()).collect();
        let [requests, seconds, mean, p50, p99, p999, client_cpu] = figures[..] else {
            let text = format!("the ZeroMQ rival printed {said:?} and {:?}", String::from_utf8_lossy(&asked.stderr));
            return Err(io::Error::other(text));
        };
        let latency = [mean, p50, p99, p999];
        Ok(Outcome { requests: requests as u64, seconds, latency, client_cpu, server_cpu: server_cpu.as_secs_f64() })
    }
}
