//! Rivals that are installed programs. If one is missing, its column is missing, and the run has a note about it.

use std::io;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::event::epoll;
use rustix::event::epoll::{EventData, EventFlags};
use serde_json::Value;
use tempfile::TempDir;

use super::ours::{Server, answer_for_processor_time};
use super::{Case, Histogram, Outcome, content};
use crate::cpu;
use crate::perftest::Ends;

/// iperf3's rate with writes of the request's size: bytes per second in one direction without replies, as an
/// [`Outcome`] whose requests are its writes. `None` if it is not installed.
///
/// # Errors
/// It cannot be run, or its output cannot be parsed.
pub fn iperf3(case: &Case, time: Duration) -> io::Result<Option<Outcome>> {
    let port = free_port()?.to_string();
    let server =
        Command::new("iperf3").args(["-s", "-1", "-p", &port]).stdout(Stdio::null()).stderr(Stdio::null()).spawn();
    let _server = match server {
        Ok(child) => Reaped(child),
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    let seconds = time.as_secs().max(1).to_string();
    let (streams, length) = (case.connections.to_string(), case.request.to_string());
    for _ in 0..50 {
        std::thread::sleep(Duration::from_millis(20)); // until it listens
        let arguments = ["-c", "127.0.0.1", "-p", &port, "-t", &seconds, "-P", &streams, "-l", &length, "-J"];
        let output = Command::new("iperf3").args(arguments).output()?;
        if output.status.success() {
            return parse_iperf3(&output.stdout, case).map(Some);
        }
    }
    Err(io::Error::other("iperf3 cannot connect to its own server"))
}

fn parse_iperf3(json: &[u8], case: &Case) -> io::Result<Outcome> {
    let end: Value = serde_json::from_slice(json)?;
    let received = &end["end"]["sum_received"];
    let share = &end["end"]["cpu_utilization_percent"];
    let number = |value: &Value| value.as_f64().ok_or_else(|| io::Error::other("iperf3 printed no figures"));
    let (bytes, seconds) = (number(&received["bytes"])?, number(&received["seconds"])?);
    Ok(Outcome {
        requests: (bytes / case.request as f64) as u64,
        seconds,
        latency: [0.0; 4],
        client_cpu: number(&share["host_total"])? / 100.0 * seconds,
        server_cpu: number(&share["remote_total"])? / 100.0 * seconds,
    })
}

/// perftest's SENDs between two RDMA devices: the typical round trip for one at a time, otherwise their rate.
///
/// # Errors
/// It is not installed, or it failed.
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

/// A port on which no process listens at the moment.
fn free_port() -> io::Result<u16> {
    Ok(std::net::TcpListener::bind("127.0.0.1:0")?.local_addr()?.port())
}

/// A child process that is ended when dropped.
struct Reaped(Child);

impl Drop for Reaped {
    fn drop(&mut self) {
        let _ = self.0.kill(); // it may have ended by itself
        let _ = self.0.wait();
    }
}

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
///
/// # Errors
/// A system call failed.
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
///
/// # Errors
/// A system call failed.
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
    let mut histogram = Histogram::default();
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
                histogram.record(now - since);
                asked.push_back(now);
            }
            pipe.owed += count * case.request;
            pipe.write(&content, &epoll, name)?;
        }
    }
    let took = start.elapsed();
    Ok(Outcome::of(&histogram, took, cpu::of_self()? - before, server.cpu()? - server_before))
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
    ///
    /// # Errors
    /// No temporary folder can be created.
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
    ///
    /// # Errors
    /// The program fails, or its output cannot be parsed.
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
