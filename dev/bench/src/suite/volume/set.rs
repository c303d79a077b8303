//! SETs of a Redis server whose append-only file is in that place, with `appendfsync always`, by redis-benchmark.

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use remora_lab::process::Process;

use super::cases::{Case, MANY_CLIENTS};
use super::place::Place;
use crate::cpu;
use crate::sync::Result;

/// What one run of redis-benchmark says.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Measured {
    /// SETs a second.
    pub per_second: f64,
    /// The median of what a client waits, in µs.
    pub median_us: f64,
    /// The 99th percentile.
    pub p99_us: f64,
    /// SETs.
    pub operations: f64,
    /// Processor seconds of server, client and all processes of the place.
    pub cpu_seconds: f64,
}

/// A Redis server with its files in a directory of its own there. Dropping it kills it and removes the directory.
pub struct Server<'a> {
    place: &'a Place,
    process: Option<Process>,
    folder: String,
}

impl<'a> Server<'a> {
    /// Starts one, and waits until it answers.
    ///
    /// # Errors
    /// It cannot be started, or does not answer.
    pub fn start(place: &'a Place, name: &str) -> Result<Server<'a>> {
        let folder = place.path().join(format!("redis-{name}")).display().to_string();
        let made = place.command("mkdir").arg(&folder).output()?;
        if !made.status.success() {
            return Err(String::from_utf8_lossy(&made.stderr).trim().to_owned().into());
        }
        let mut command = place.server("redis-server");
        command.args(["--port", PORT, "--bind", "127.0.0.1", "--save", "", "--dir", &folder, "--daemonize", "no"]);
        command.args(["--appendonly", "yes", "--appendfsync", "always", "--auto-aof-rewrite-percentage", "0"]);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let (process, _) = Process::start("redis-server", command)?;
        let mut server = Server { place, process: Some(process), folder };
        let until = Instant::now() + START_LIMIT;
        while !server.answers()? {
            let is_over = server.process.as_mut().map(Process::ended).transpose()?.flatten().is_some();
            if is_over || Instant::now() > until {
                return Err("its Redis server does not answer".into());
            }
            std::thread::sleep(LOOK_EVERY);
        }
        Ok(server)
    }

    fn answers(&self) -> Result<bool> {
        let said = self.place.command("redis-cli").args(["-p", PORT, "ping"]).output()?;
        Ok(said.stdout.starts_with(b"PONG"))
    }

    /// Measures for about so long.
    ///
    /// # Errors
    /// redis-benchmark fails, or says something else.
    pub fn measure(&self, case: Case, time: Duration) -> Result<Measured> {
        let clients = if case == Case::ManyClients { MANY_CLIENTS } else { 1 };
        let first = self.run(clients, FIRST_SETS * u64::from(clients))?;
        let sets = (first.per_second * time.as_secs_f64()) as u64;
        let (before, own_before) = (self.place.cpu_seconds()?, cpu::of_ended_children()?);
        let measured = self.run(clients, sets.max(FIRST_SETS * u64::from(clients)))?;
        let own = (cpu::of_ended_children()? - own_before).as_secs_f64();
        Ok(Measured { cpu_seconds: self.place.cpu_seconds()? - before + own, ..measured })
    }

    fn run(&self, clients: u32, sets: u64) -> Result<Measured> {
        let mut command: Command = self.place.command("timeout");
        command.args([
            MOST_SECONDS,
            "redis-benchmark",
            "-p",
            PORT,
            "-t",
            "set",
            "-d",
            "64",
            "--csv",
            "--precision",
            "3",
        ]);
        let ran = command.args(["-c", &clients.to_string(), "-n", &sets.to_string()]).output()?;
        let said = String::from_utf8_lossy(&ran.stdout);
        let measured = read(&said).map(|measured| Measured { operations: sets as f64, ..measured });
        measured
            .ok_or_else(|| format!("redis-benchmark said {said:?}, {}", String::from_utf8_lossy(&ran.stderr)).into())
    }
}

impl Drop for Server<'_> {
    fn drop(&mut self) {
        self.process = None;
        let _ = self.place.command("rm").args(["-rf", &self.folder]).output(); // the place is removed at the end
    }
}

/// `"SET","rps","avg","min","p50","p95","p99","max"`, times in milliseconds.
fn read(csv: &str) -> Option<Measured> {
    let line = csv.lines().find(|line| line.starts_with("\"SET\""))?;
    let fields: Vec<f64> = line.split(',').skip(1).filter_map(|field| field.trim_matches('"').parse().ok()).collect();
    let [per_second, _, _, median, _, p99, _] = fields[..] else { return None };
    Some(Measured { per_second, median_us: median * 1e3, p99_us: p99 * 1e3, operations: 0.0, cpu_seconds: 0.0 })
}

/// In the place's own network.
const PORT: &str = "6379";

/// SETs of each client by which the rate is found.
const FIRST_SETS: u64 = 50;

/// Until redis-benchmark is given up.
const MOST_SECONDS: &str = "60";

/// Until a server answers, on a busy machine.
const START_LIMIT: Duration = Duration::from_secs(20);
const LOOK_EVERY: Duration = Duration::from_millis(20);

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn the_median_and_the_rate_are_read() {
        let csv = "\"test\",\"rps\",\"avg_latency_ms\",\"min_latency_ms\",\"p50_latency_ms\",\"p95_latency_ms\",\
                   \"p99_latency_ms\",\"max_latency_ms\"\n\"SET\",\"8333.33\",\"0.110\",\"0.080\",\"0.103\",\"0.151\",\"0.215\",\"0.999\"\n";
        let measured = read(csv).unwrap();
        assert_eq!((measured.per_second, measured.median_us, measured.p99_us), (8333.33, 103.0, 215.0));
        assert_eq!(read("\"SET\",\"1\""), None);
    }
}
