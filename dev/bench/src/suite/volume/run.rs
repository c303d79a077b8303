//! A run: every case with every subject in turn, round by round.

use std::ffi::OsStr;
use std::net::IpAddr;
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::time::{Duration, Instant};

use bytes::Bytes;
use remora_lab::process::Process;
use remora_lab::require::RingAllowed;
use remora_lab::{RdmaVm, scratch};
use remora_messenger::{
    Address, Connection, Delivery, Dispatcher, Message, Messenger, Options as MessengerOptions, Policy,
};
use serde_json::Value;

use super::cases::{CONNECTION, Case, Cell, EMULATED_RDMA, EMULATED_TCP, Figures, MANY_CLIENTS, Point, Subject, TCP};
use super::{NAME, Options, Part, Place, Transport, cases};
use crate::messenger::ours;
use crate::suite::volume;
use crate::suite::{Budget, Kept};
use crate::sync::{Program, Result, available_memory};
use crate::{cpu, quantile};

/// Runs the subcommand. Returns whether every target was met for which there are figures, and nothing has failed.
pub fn run(options: &Options) -> Result<bool> {
    if options.emulated {
        return emulated(options);
    }
    let mut bench = Bench { options, kept: Kept::begin(NAME, options.label.as_deref()), is_well: true };
    let budget = Budget::of(options.budget_minutes);
    let mib = options.file_mib(available_memory().unwrap_or(0));
    let needs_files = options.has(Part::Files) || options.has(Part::Set);
    let _allowed = if needs_files { bench.allow_ring() } else { None };
    let subjects = if needs_files { bench.mount(mib)? } else { Vec::new() };
    for round in 0..options.rounds {
        eprintln!("round {} of {}", round + 1, options.rounds);
        bench.round(round, &subjects, mib, budget.part(options.rounds - round))?;
    }
    if options.has(Part::Connections) && !options.no_rdma && !RdmaVm::is_here() {
        bench.emulated();
    }
    bench.kept.keep(options.out.as_deref(), &volume::tables(&[&bench.kept]))?;
    print!("{}", volume::tables(&[&bench.kept]));
    Ok(bench.is_well && cases::are_kept(Figures(&bench.kept.points)))
}

/// Runs this command in an emulated machine, which keeps the run.
fn emulated(options: &Options) -> Result<bool> {
    let remora = format!("REMORA={}", Program::build()?.path().display()); // there is no cargo in the machine
    crate::suite::emulated(EMULATED_NODES, EMULATED_TIME, options.out.as_deref(), &["env", &remora], &[])
}

struct Bench<'a> {
    options: &'a Options,
    kept: Kept<Point>,
    /// Nothing has failed that could be tried.
    is_well: bool,
}

impl Bench<'_> {
    fn allow_ring(&mut self) -> Option<RingAllowed> {
        if self.options.transport == Transport::Device {
            self.kept.note("The kernel asks Remora and the floor of FUSE by /dev/fuse.");
            return None;
        }
        match RingAllowed::new() {
            Ok(allowed) => {
                self.kept
                    .note("The kernel asks Remora and the floor of FUSE by io_uring, which was allowed for this run.");
                Some(allowed)
            }
            Err(why) => {
                self.kept.note(format!("FUSE has no io_uring here ({why}): the kernel asks by /dev/fuse."));
                None
            }
        }
    }

    /// Mounts all of them, and writes their files once.
    fn mount(&mut self, mib: u64) -> Result<Vec<(Subject, Place)>> {
        let program = Program::build()?;
        let own = std::env::current_exe()?;
        let settings: [(&str, &OsStr); 3] = [
            ("REMORA", program.path().as_os_str()),
            ("BENCH", own.as_os_str()),
            ("TRANSPORT", OsStr::new(self.options.transport.word())),
        ];
        // Each number of jobs has files of its own.
        let room = if self.options.has(Part::Files) { mib * self.options.jobs.len() as u64 } else { 0 };
        let mut places = Vec::new();
        for &subject in &self.options.subjects {
            let name = subject.name();
            let mounted = Place::start(subject, room, &settings).and_then(|place| {
                if self.options.has(Part::Files) {
                    fill(&place, subject, &self.options.jobs, mib)?;
                }
                Ok(place)
            });
            match mounted {
                Ok(place) => places.push((subject, place)),
                Err(error) => self.kept.note(format!(
                    "{name} is LEFT OUT: {error}. `dev/lab/setup/setup --rivals` installs all rivals; mounts need root"
                )),
            }
        }
        if places.iter().any(|(subject, _)| subject.is_emulated()) {
            self.kept.note(EMULATED);
        }
        if self.options.has(Part::Files) {
            let at_most = self.options.millis;
            self.kept.note(format!(
                "The files of a cell have {mib} MiB, shared among its jobs, not 500 MiB each: all subjects are in this \
                 machine's memory at a time. A measurement takes {at_most} ms at most."
            ));
        }
        Ok(places)
    }

    /// Every case that still fits, with each subject in turn. Another one is first in each round.
    fn round(&mut self, round: usize, subjects: &[(Subject, Place)], mib: u64, budget: Budget) -> Result<()> {
        let time = Duration::from_millis(self.options.millis);
        let mut left_out: Vec<String> = Vec::new();
        for case in self.options.cases() {
            if !budget.has((time + BESIDE) * subjects.len() as u32) {
                left_out.push(case.to_string());
                continue;
            }
            for turn in 0..subjects.len() {
                let (subject, place) = &subjects[(round + turn) % subjects.len()];
                if !subject.suits(case) {
                    continue;
                }
                match measure(*subject, place, case, (round, mib, time)) {
                    Ok(point) => {
                        eprintln!("{case}, {}: {:.1} {}", subject.name(), point.value, point.unit);
                        self.kept.points.push(point);
                    }
                    Err(error) => self.failed(&format!("round {}, {case}, {}", round + 1, subject.name()), &*error),
                }
            }
            self.kept.keep(self.options.out.as_deref(), &volume::tables(&[&self.kept]))?;
        }
        if self.options.has(Part::Connections) {
            let by_tcp = connections_by_tcp(round);
            self.note_or_add("new connections by TCP", by_tcp);
            if RdmaVm::is_here() {
                let by_rdma = connections_by_rdma(round);
                self.note_or_add("new connections by RDMA", by_rdma);
            }
        }
        if !left_out.is_empty() {
            self.kept.note(format!("Round {}: left out for lack of time: {}", round + 1, left_out.join("; ")));
        }
        self.kept.keep(self.options.out.as_deref(), &volume::tables(&[&self.kept]))
    }

    fn emulated(&mut self) {
        match emulated_connections(self.options.rounds) {
            Ok(points) => {
                self.kept
                    .note("RDMA is Soft-RoCE in an emulated machine: compare it only with TCP in the same machine.");
                self.kept.points.extend(points);
            }
            Err(error) => self.kept.note(format!("new connections by RDMA are LEFT OUT: {error}")),
        }
    }

    fn note_or_add(&mut self, what: &str, measured: Result<Point>) {
        match measured {
            Ok(point) => self.kept.points.push(point),
            Err(error) => self.failed(what, &*error),
        }
    }

    fn failed(&mut self, what: &str, error: &dyn std::error::Error) {
        self.is_well = false;
        self.kept.note(format!("{what}: failed: {error}"));
    }
}

/// One figure.
fn measure(subject: Subject, place: &Place, case: Case, (round, mib, time): (usize, u64, Duration)) -> Result<Point> {
    let point = Point {
        subject: subject.name().to_owned(),
        case: case.to_string(),
        round,
        value: 0.0,
        unit: case.unit().to_owned(),
        operations: 0.0,
        p99_us: None,
        seconds: 0.0,
        cpu_seconds: 0.0,
    };
    match case {
        Case::Files(cell) => measure_cell(place, subject, &cell, mib, time, point),
        Case::OneClient | Case::ManyClients => Server::start(place, &round.to_string())?.measure(case, time, point),
    }
}

const EMULATED: &str = "RDMA is Soft-RoCE in an emulated machine, which shows that it works, and how the two ways compare there: no \
                        figure says how fast a network card is. Compare them only with each other.";

/// The mount and three servers.
const EMULATED_NODES: u8 = 4;

/// Time limit for booting an emulated machine and measuring in it: five rounds of 16 cells of two ways take ten minutes
/// where two processors emulate it.
const EMULATED_TIME: Duration = Duration::from_secs(30 * 60);

/// What a measurement takes besides its time: the start of fio or of a server, and a first look at the rate.
const BESIDE: Duration = Duration::from_millis(1200);

// One cell of the matrix, by fio, with the command line of [`super::cases::published`].

/// Writes the files of these numbers of jobs once, so that no cell pays for memory that is touched for the first
/// time, and none writes past the end of a file.
fn fill(place: &Place, subject: Subject, jobs: &[u32], mib: u64) -> Result<()> {
    for jobs in jobs {
        let mut command = fio(place, subject, *jobs, mib);
        command.args(["--rw=write", "--bs=1m", "--direct=0", "--end_fsync=1"]);
        report(command)?;
    }
    Ok(())
}

/// Measures one cell for at most so long. Past the page cache the same files are used again and again for that time.
/// Otherwise each file is read or written once: a second lap would only be one of the page cache. fio drops it before.
fn measure_cell(place: &Place, subject: Subject, cell: &Cell, mib: u64, time: Duration, point: Point) -> Result<Point> {
    let mut command = fio(place, subject, cell.jobs, mib);
    let word = cell.pattern.word();
    command.args([
        format!("--rw={word}"),
        format!("--bs={}", cell.block),
        format!("--direct={}", u8::from(cell.direct)),
    ]);
    command.arg(format!("--runtime={}ms", time.as_millis()));
    match (cell.direct, cell.pattern.writes()) {
        (true, _) => drop(command.arg("--time_based")),
        (false, true) => drop(command.arg("--end_fsync=1")),
        (false, false) => {}
    }
    let (before, own_before) = (place.cpu_seconds()?, cpu::of_ended_children()?);
    let said = report(command)?;
    let own = (cpu::of_ended_children()? - own_before).as_secs_f64();
    let cpu_seconds = place.cpu_seconds()? - before + own;
    let direction = if cell.pattern.writes() { "write" } else { "read" };
    let point = read_fio(&said, direction, point).ok_or_else(|| format!("fio printed no figures: {said}"))?;
    Ok(Point { cpu_seconds, ..point })
}

/// fio in that place: as many files as there are jobs, of `mib` megabytes in all.
fn fio(place: &Place, subject: Subject, jobs: u32, mib: u64) -> Command {
    let mut command = place.command("timeout");
    command.args([
        "--kill-after=5",
        &FIO_MOST_SECONDS.to_string(),
        "fio",
        "-iodepth",
        "1",
        "--thread",
        "--ioengine=libaio",
    ]);
    let size = (mib / u64::from(jobs)).max(1);
    command.arg(format!("--size={size}M")).arg(format!("--numjobs={jobs}"));
    command.args(["-group_reporting", "-name=testfile10"]);
    if subject == Subject::Nbdfuse {
        command.arg(format!("--filename={}", place.path().display())).arg(format!("--offset_increment={size}M"));
    } else {
        command.arg(format!("--directory={}", place.path().display()));
        // For each number of jobs others.
        command.arg(format!("--filename_format=$jobname.{jobs}.$jobnum"));
    }
    command.args(["--fallocate=none", "--randrepeat=0", "--output-format=json"]);
    command
}

/// Runs fio, and returns its report.
fn report(mut command: Command) -> Result<Value> {
    let output = command.output()?;
    let said = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    match output.status.code() {
        Some(0) => {}
        Some(124 | 137) => return Err(format!("fio did not end within {FIO_MOST_SECONDS} s").into()),
        _ => return Err(format!("fio failed: {}", errors.lines().next().unwrap_or_default()).into()),
    }
    let json = said.find('{').map(|at| &said[at..]).ok_or_else(|| format!("fio printed no report: {errors}"))?;
    Ok(serde_json::from_str(json)?)
}

/// With writes to the page cache, the `fsync` at their end is part of the time.
fn read_fio(said: &Value, direction: &str, point: Point) -> Option<Point> {
    let figures = &said["jobs"][0][direction];
    let number = |name: &str| figures[name].as_f64().filter(|number| *number > 0.0);
    Some(Point {
        value: number("bw_bytes")? / 1e6,
        operations: number("total_ios")?,
        p99_us: figures["clat_ns"]["percentile"]["99.000000"].as_f64().map(|nanos| nanos / 1e3),
        seconds: number("runtime")? / 1e3,
        ..point
    })
}

/// Until fio has ended, with what it must write at the end. A rival that hangs must not stop the run.
const FIO_MOST_SECONDS: u32 = 60;

// SETs of a Redis server whose append-only file is in that place, with `appendfsync always`, by redis-benchmark.

/// A Redis server with its files in a directory of its own there. Dropping it kills it and removes the directory.
struct Server<'a> {
    place: &'a Place,
    process: Option<Process>,
    folder: String,
}

impl<'a> Server<'a> {
    /// Starts one, and waits until it answers.
    fn start(place: &'a Place, name: &str) -> Result<Server<'a>> {
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
    fn measure(&self, case: Case, time: Duration, point: Point) -> Result<Point> {
        let clients = if case == Case::ManyClients { MANY_CLIENTS } else { 1 };
        let few = FIRST_SETS * u64::from(clients);
        let sets = ((self.run(clients, few)?[0] * time.as_secs_f64()) as u64).max(few);
        let (before, own_before) = (self.place.cpu_seconds()?, cpu::of_ended_children()?);
        let [per_second, median_us, p99_us] = self.run(clients, sets)?;
        let own = (cpu::of_ended_children()? - own_before).as_secs_f64();
        Ok(Point {
            value: if case == Case::OneClient { median_us } else { per_second },
            operations: sets as f64,
            p99_us: Some(p99_us),
            seconds: sets as f64 / per_second,
            cpu_seconds: self.place.cpu_seconds()? - before + own,
            ..point
        })
    }

    /// SETs a second, and the median and the 99th percentile of what a client waits, in µs.
    fn run(&self, clients: u32, sets: u64) -> Result<[f64; 3]> {
        let mut command: Command = self.place.command("timeout");
        let words = "redis-benchmark -t set -d 64 --csv --precision 3";
        command.arg(BENCHMARK_MOST_SECONDS).args(words.split(' ')).args(["-p", PORT]);
        let ran = command.args(["-c", &clients.to_string(), "-n", &sets.to_string()]).output()?;
        let said = String::from_utf8_lossy(&ran.stdout);
        let wrong = || format!("redis-benchmark said {said:?}, {}", String::from_utf8_lossy(&ran.stderr));
        Ok(read_sets(&said).ok_or_else(wrong)?)
    }
}

impl Drop for Server<'_> {
    fn drop(&mut self) {
        self.process = None;
        let _ = self.place.command("rm").args(["-rf", &self.folder]).output(); // the place is removed at the end
    }
}

/// `"SET","rps","avg","min","p50","p95","p99","max"`, times in milliseconds.
fn read_sets(csv: &str) -> Option<[f64; 3]> {
    let line = csv.lines().find(|line| line.starts_with("\"SET\""))?;
    let fields: Vec<f64> = line.split(',').skip(1).filter_map(|field| field.trim_matches('"').parse().ok()).collect();
    let [per_second, _, _, median, _, p99, _] = fields[..] else { return None };
    Some([per_second, median * 1e3, p99 * 1e3])
}

/// In the place's own network.
const PORT: &str = "6379";

/// SETs of each client by which the rate is found.
const FIRST_SETS: u64 = 50;

/// Until redis-benchmark is given up.
const BENCHMARK_MOST_SECONDS: &str = "60";

/// Until a server answers, on a busy machine.
const START_LIMIT: Duration = Duration::from_secs(20);
const LOOK_EVERY: Duration = Duration::from_millis(20);

// What a new connection costs: from the wish to connect until the first answer, one after the other.

/// Opens connections from this process to itself, by TCP, for one round.
fn connections_by_tcp(round: usize) -> Result<Point> {
    let ip = RdmaVm::is_here().then(|| RdmaVm::address(1));
    let address = format!("tcp:{}:0", ip.map_or("127.0.0.1".to_owned(), |ip| ip.to_string()));
    measure_connection(if ip.is_some() { EMULATED_TCP } else { TCP }, round, &address, None)
}

/// The same by RDMA, between two devices.
fn connections_by_rdma(round: usize) -> Result<Point> {
    measure_connection(EMULATED_RDMA, round, &format!("rdma:{}:0", RdmaVm::address(1)), Some(RdmaVm::address(0).into()))
}

/// The same by TCP and by RDMA in an emulated machine.
///
/// # Errors
/// There is no such machine, or it fails.
fn emulated_connections(rounds: usize) -> Result<Vec<Point>> {
    let folder = scratch::folder("connections")?;
    let machine = RdmaVm::ready()?.nodes(2).limit(CONNECTIONS_TIME).writable(folder.path());
    let program = std::env::current_exe()?.to_string_lossy().into_owned();
    let (rounds, out) = (rounds.to_string(), folder.path().display().to_string());
    let ran = machine.run(&[&program, "volume", "--parts", "connections", "--rounds", &rounds, "--out", &out])?;
    let kept = crate::suite::newest::<Point>(folder.path(), NAME)?;
    let said = String::from_utf8_lossy(&ran.stderr);
    let (_, Kept { points, .. }) = kept.into_iter().next().ok_or_else(|| said.trim().to_owned())?;
    Ok(points)
}

fn measure_connection(subject: &str, round: usize, address: &str, device: Option<IpAddr>) -> Result<Point> {
    let mut options = MessengerOptions::default();
    let (_server, address) = ours::listen(&address.parse()?, ANSWER_BYTES, &options)?;
    options.rdma.local = device;
    let (said, answers) = mpsc::channel();
    let client = Messenger::new(Policy::lossy_client(), &options, Arc::new(Client(Mutex::new(said))))?;
    let first = connect(&client, &address, &answers)?;
    let (began, before) = (Instant::now(), cpu::of_self()?);
    let times = (0..CONNECTIONS).map(|_| connect(&client, &address, &answers)).collect::<Result<Vec<f64>>>()?;
    let cpu_seconds = (cpu::of_self()? - before).as_secs_f64();
    let seconds = began.elapsed().as_secs_f64();
    let mut sorted = times;
    sorted.sort_by(f64::total_cmp);
    let value = quantile(&sorted, 0.5).unwrap_or(first);
    Ok(Point {
        subject: subject.to_owned(),
        case: CONNECTION.to_owned(),
        round,
        value,
        unit: "µs".to_owned(),
        operations: CONNECTIONS as f64,
        p99_us: quantile(&sorted, 0.99),
        seconds,
        cpu_seconds,
    })
}

/// Connects, asks once, and closes. Returns µs until the answer.
fn connect(client: &Messenger, address: &Address, answers: &mpsc::Receiver<()>) -> Result<f64> {
    let began = Instant::now();
    let connection = client.connect(address);
    answers.recv_timeout(ANSWER_LIMIT).map_err(|_| format!("a new connection to {address} got no answer"))?;
    let took = began.elapsed();
    connection.close();
    Ok(took.as_secs_f64() * 1e6)
}

/// Asks as soon as a connection is there.
struct Client(Mutex<mpsc::Sender<()>>);

impl Dispatcher for Client {
    fn connected(&self, connection: &Connection) {
        let _ = connection.send(Message::new(1, 0, Bytes::new())); // the one who waits is told by its limit
    }

    fn message(&self, _connection: &Connection, _delivery: Delivery) {
        let _ = self.0.lock().unwrap_or_else(PoisonError::into_inner).send(());
    }
}

/// Of one round. A session of a server without answers to keep is forgotten with its connection.
const CONNECTIONS: usize = 100;

const ANSWER_BYTES: usize = 64;
const ANSWER_LIMIT: Duration = Duration::from_secs(10);

/// Time limit for booting an emulated machine and measuring in it.
const CONNECTIONS_TIME: Duration = Duration::from_secs(240);

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn figures_are_of_the_direction_that_was_asked_for() {
        let said = r#"{"jobs": [{"read": {"bw_bytes": 0}, "write": {"bw_bytes": 2000000, "total_ios": 20,
            "runtime": 500, "clat_ns": {"percentile": {"99.000000": 7500}}}}]}"#;
        let said: Value = serde_json::from_str(said).unwrap();
        let point = || cases::tests::point("subject", "case", 0, 0.0);
        let measured = read_fio(&said, "write", point()).unwrap();
        assert_eq!((measured.value, measured.seconds, measured.p99_us), (2.0, 0.5, Some(7.5)));
        assert!(read_fio(&said, "read", point()).is_none());
    }

    #[test]
    fn the_median_and_the_rate_are_read() {
        let csv = "\"test\",\"rps\",\"avg_latency_ms\",\"min_latency_ms\",\"p50_latency_ms\",\"p95_latency_ms\",\
                   \"p99_latency_ms\",\"max_latency_ms\"\n\"SET\",\"8333.33\",\"0.110\",\"0.080\",\"0.103\",\"0.151\",\"0.215\",\"0.999\"\n";
        assert_eq!(read_sets(csv), Some([8333.33, 103.0, 215.0]));
        assert_eq!(read_sets("\"SET\",\"1\""), None);
    }
}
