//! Rivals that are installed programs. If one is missing, its column is missing, and the run has a note about it.

use std::io;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use serde_json::Value;

use super::{Case, Outcome};
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

/// sockperf's ping-pong over TCP: one connection, one message in flight, its own echo server.
///
/// # Errors
/// As [`iperf3`].
pub fn sockperf(case: &Case, time: Duration) -> io::Result<Option<Outcome>> {
    let port = free_port()?.to_string();
    let place = ["--tcp", "-i", "127.0.0.1", "-p", &port];
    let Some(_server) = serve(Command::new("sockperf").arg("server").args(place))? else { return Ok(None) };
    let (size, seconds) = (case.request.max(14).to_string(), time.as_secs().max(1).to_string());
    let mut ask = Command::new("sockperf");
    ask.arg("ping-pong").args(place).args(["-m", &size, "-t", &seconds, "--full-rtt"]);
    let said = retry(&mut ask, |said| said.contains("Summary:"))?;
    let after = |mark: &str| {
        let rest = said.split(mark).nth(1)?;
        rest.split(|c: char| !c.is_ascii_digit() && c != '.').find(|word| !word.is_empty())?.parse::<f64>().ok()
    };
    let figures = ["Summary: Round trip is", "percentile 50.000 =", "percentile 99.000 =", "percentile 99.900 ="];
    let latency = figures.map(|mark| after(mark).unwrap_or_default());
    Ok(Some(of_round_trip(latency, time)))
}

/// ucx_perftest's active messages, over `tcp` or shared memory (`posix`), both sides spinning.
///
/// # Errors
/// As [`iperf3`].
pub fn ucx(case: &Case, transport: &str) -> io::Result<Option<Outcome>> {
    let (port, size) = (free_port()?.to_string(), case.request.to_string());
    let command = || {
        let mut command = Command::new("ucx_perftest");
        command.env("UCX_TLS", format!("{transport},self")).env("UCX_WARN_UNUSED_ENV_VARS", "n");
        command.args(["-p", &port]);
        command
    };
    let Some(_server) = serve(&mut command())? else { return Ok(None) };
    let mut ask = command();
    ask.args(["127.0.0.1", "-t", "ucp_am_lat", "-s", &size, "-n", ROUNDS, "-w", "2000"]);
    let said = retry(&mut ask, |said| said.contains("Final:"))?;
    // After the iterations: percentile, average and overall latency of one way, in µs.
    let line = said.split("Final:").nth(1).unwrap_or_default();
    one_way(line.split_whitespace().nth(3))
}

/// fi_pingpong over a provider of libfabric, both sides spinning.
///
/// # Errors
/// As [`iperf3`].
pub fn fabric(case: &Case, provider: &str) -> io::Result<Option<Outcome>> {
    let (port, size) = (free_port()?.to_string(), case.request.to_string());
    let command = || {
        let mut command = Command::new("fi_pingpong");
        command.args(["-p", provider, "-e", "rdm", "-I", ROUNDS, "-S", &size]);
        command
    };
    let Some(_server) = serve(command().args(["-B", &port]))? else { return Ok(None) };
    let said = retry(command().args(["-P", &port, "127.0.0.1"]), |said| said.contains("usec/xfer"))?;
    // bytes, sent, acknowledged, total, time, MB/s, µs one way, ...
    let line = said.lines().last().unwrap_or_default();
    one_way(line.split_whitespace().nth(6))
}

/// redis-benchmark's SET against a separate redis-server, with the request as the value.
///
/// # Errors
/// As [`iperf3`].
pub fn redis(case: &Case, time: Duration) -> io::Result<Option<Outcome>> {
    let port = free_port()?.to_string();
    let folder = tempfile::tempdir()?;
    let mut server = Command::new("redis-server");
    server.current_dir(folder.path()).args(["--port", &port, "--save", "", "--appendonly", "no"]);
    let Some(_server) = serve(&mut server)? else { return Ok(None) };
    let (connections, depth) = (case.connections.to_string(), case.depth.to_string());
    let size = case.request.to_string();
    let requests = (time.as_secs_f64() * 100_000.0 * (case.depth as f64).sqrt()) as u64;
    let mut ask = Command::new("redis-benchmark");
    ask.args(["-p", &port, "-t", "set", "-d", &size, "-c", &connections, "-P", &depth, "--csv"]);
    ask.args(["-n", &requests.to_string()]);
    let said = retry(&mut ask, |said| said.contains("\"SET\""))?;
    // rps, then milliseconds: average, shortest, p50, p95, p99, longest.
    let line = said.lines().find(|line| line.contains("\"SET\"")).unwrap_or_default();
    let figures: Vec<f64> = line.split(',').filter_map(|word| word.trim_matches('"').parse().ok()).collect();
    let [rate, mean, _, p50, _, p99, _] = figures[..] else {
        return Err(io::Error::other(format!("redis-benchmark printed {line:?}")));
    };
    let latency = [mean, p50, p99, 0.0].map(|millis| millis * 1e3);
    let seconds = requests as f64 / rate;
    Ok(Some(Outcome { requests, seconds, latency, client_cpu: 0.0, server_cpu: 0.0 }))
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

/// Starts a server without output; `None` if it is not installed.
fn serve(command: &mut Command) -> io::Result<Option<Reaped>> {
    match command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn() {
        Ok(child) => Ok(Some(Reaped(child))),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Runs the client until the server listens, and returns the client's output.
fn retry(command: &mut Command, is_answer: impl Fn(&str) -> bool) -> io::Result<String> {
    let mut last = String::new();
    for _ in 0..50 {
        std::thread::sleep(Duration::from_millis(20)); // until it listens
        let output = command.stdin(Stdio::null()).output()?;
        last = String::from_utf8_lossy(&output.stdout).into_owned();
        if output.status.success() && is_answer(&last) {
            return Ok(last);
        }
        last += &String::from_utf8_lossy(&output.stderr);
    }
    Err(io::Error::other(format!("{command:?} cannot connect to its own server: {}", last.trim())))
}

/// The outcome of a tool that reports the time of one way, in µs.
fn one_way(word: Option<&str>) -> io::Result<Option<Outcome>> {
    let micros = word.and_then(|word| word.parse::<f64>().ok()).filter(|micros| *micros > 0.0);
    let micros = micros.ok_or_else(|| io::Error::other(format!("a rival printed {word:?} instead of a time")))?;
    Ok(Some(of_round_trip([2.0 * micros, 0.0, 0.0, 0.0], Duration::from_secs(1))))
}

/// Requests one after the other: their rate follows from their time.
fn of_round_trip(latency: [f64; 4], time: Duration) -> Outcome {
    let requests = (time.as_secs_f64() * 1e6 / latency[0].max(0.001)) as u64;
    Outcome { requests, seconds: time.as_secs_f64(), latency, client_cpu: 0.0, server_cpu: 0.0 }
}

/// Number of round trips for tools that limit a run by count and not by time.
const ROUNDS: &str = "30000";
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
