//! The demonstration of volumes: a block device in the memory of three servers, with three copies, acknowledged at two.
//!
//! ```text
//!   three servers ── create ── door (NBD) ◀── fio: in sequence, single blocks, single blocks while a server is killed and comes back
//!                                 │ its host hangs
//!                              another door ◀── fio: every block that was written is read and checked
//!                                 │ the host goes on: its door must find that it is not the writer any more
//!                              files in another volume: a Redis server whose host is killed
//! ```
//!
//! As with [`crate::demo`], each figure is of one run; `make bench` has medians.

use std::fs::OpenOptions;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use remora_agent::units::{Size, readable};
use remora_bench::sync::{Program, Result};
use remora_lab::server::wait_until;
use remora_lab::{Agent, Kind, Server};
use rustix::mount::UnmountFlags;
use rustix::process::Signal;
use serde::Serialize;
use serde_json::Value;

use crate::process::{START_LIMIT, TOKEN, ended_well, started};
use crate::process::{Screen, lay_out};

/// Command-line arguments.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Options {
    /// Size of the volume, a multiple of 4 MiB. Each of the three servers holds all of it in memory.
    #[arg(long, value_name = "SIZE", default_value = "256MiB", value_parser = parse_size)]
    size: Size,

    /// Seconds for each measurement of single blocks.
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u8).range(1..=60))]
    seconds: u8,

    /// Also write all results as JSON to this file.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// All results, as `--json` writes them.
#[derive(Serialize)]
pub(crate) struct Report {
    remora: String,
    size: u64,
    rows: Vec<Row>,
    /// Until the other door was open.
    take_over_seconds: f64,
    /// The exit code of the door whose host hung.
    former_code: Option<i32>,
    /// `None`: this machine does not permit mounts.
    files: Option<FilesReport>,
}

/// What fio says of its requests.
#[derive(Serialize)]
struct Row {
    what: &'static str,
    block: &'static str,
    per_second: f64,
    megabytes_per_second: f64,
    median_microseconds: f64,
    longest_milliseconds: f64,
    /// Every block was read again, and had its checksum.
    is_checked: bool,
}

/// Runs the demonstration and prints the table on stdout.
pub(crate) fn run(options: &Options) -> Result<()> {
    let begun = Instant::now();
    let screen = Screen::new();
    let size = options.size.get();
    if size == 0 || !size.is_multiple_of(UNIT) {
        return Err(format!("--size {}: not a multiple of 4 MiB", options.size).into());
    }
    let program = screen.build_for(&[])?;
    let mut demo = Demo::new(&screen, &program, size)?;
    let rows = demo.use_it(options.seconds)?;
    let report = demo.take_over(rows, options.seconds)?;
    print!("{}", report.text());
    if let Some(path) = &options.json {
        std::fs::write(path, serde_json::to_vec_pretty(&report)?)?;
        println!("written to {}", path.display());
    }
    println!("{} in all", readable(begun.elapsed()));
    report.verdict()
}

struct Demo<'a> {
    screen: &'a Screen,
    program: &'a Program,
    folder: tempfile::TempDir,
    size: u64,
    servers: Vec<Agent>,
    addresses: Vec<String>,
    door: Agent,
}

impl<'a> Demo<'a> {
    fn new(screen: &'a Screen, program: &'a Program, size: u64) -> Result<Demo<'a>> {
        screen.say(&format!("three servers, a volume of {}, and a door to it", Size::bytes(size)));
        let folder = tempfile::tempdir()?;
        let path = folder.path();
        ended_well(program, path, &["token", "new", "token"])?;
        let memory = Size::bytes(size + SPARE_MEMORY).to_string();
        let serve = |listen: &str| served(program, path, listen, &memory);
        let (mut servers, mut addresses) = (Vec::new(), Vec::new());
        for _ in 0..SERVERS {
            let (server, address) = serve("127.0.0.1:0")?;
            servers.push(server);
            addresses.push(address);
        }
        let all = addresses.join(",");
        let bytes = Size::bytes(size).to_string();
        ended_well(program, path, &["volume", "create", VOLUME, "--size", &bytes, "--servers", &all, TOKEN, "token"])?;
        let door = opened(program, path, HERE, &[])?;
        Ok(Demo { screen, program, folder, size, servers, addresses, door })
    }

    /// What a client of the device sees while all is well, and while a server is killed.
    fn use_it(&mut self, seconds: u8) -> Result<Vec<Row>> {
        let (half, quarter) = (self.size / 2, self.size / 4);
        let runtime = format!("--runtime={seconds}");
        let timed = ["--bs=4k", "--time_based", &runtime];
        self.screen.say("writing half of it in sequence, with checksums");
        let checked = ["--rw=write", "--bs=1m", "--iodepth=4", LATER, SUMS];
        let mut rows = vec![self.row(HERE, ("write in sequence", "1 MiB"), (0, half), &checked)?];
        self.screen.say("writing and reading single blocks");
        for (what, direction) in
            [("write one block after the other", "--rw=randwrite"), ("read one block after the other", "--rw=randread")]
        {
            rows.push(self.row(HERE, (what, "4 KiB"), (half, quarter), &[&timed[..], &[direction]].concat())?);
        }
        self.screen.say("writing single blocks while a server is killed and comes back");
        let rate = format!("--rate_iops={RATE}");
        let slowly = ["--rw=randwrite", "--bs=4k", &rate, "--iodepth=4", "--do_verify=1", SUMS];
        let fio = fio(self.folder.path(), HERE, (half + quarter, quarter), &slowly);
        let fio = thread::spawn(move || { fio }.output());
        // The server is gone for a quarter of the writes.
        let pause = Duration::from_secs_f64((quarter / BLOCK_BYTES) as f64 / RATE / 4.0);
        thread::sleep(pause);
        self.servers[0].kill()?;
        thread::sleep(pause);
        let memory = Size::bytes(self.size + SPARE_MEMORY).to_string();
        (self.servers[0], _) = served(self.program, self.folder.path(), &self.addresses[0], &memory)?;
        let output = fio.join().map_err(|_| "the thread of fio ended early")??;
        rows.push(row_of(&output, ("write while a server is killed", "4 KiB"), true)?);
        let status =
            || ended_well(self.program, self.folder.path(), &["volume", "status", VOLUME, TOKEN, "token", "--json"]);
        wait_until("three whole copies", COPY_LIMIT, || {
            let whole = status().map(|said| said.matches("\"state\":\"whole\"").count()).unwrap_or_default();
            Ok(if whole == SERVERS { Ok(()) } else { Err(format!("{whole} of {SERVERS} copies are whole")) })
        })?;
        self.screen.say("  it has its copy again: three copies are whole");
        Ok(rows)
    }

    /// The host of the door hangs, and another one opens the volume.
    fn take_over(mut self, mut rows: Vec<Row>, seconds: u8) -> Result<Report> {
        self.screen.say("the host hangs: another one opens the volume, and checks every block that was written");
        self.door.signal(Signal::STOP)?;
        let began = Instant::now();
        let _other = opened(self.program, self.folder.path(), THERE, &["--take-over"])?;
        let take_over_seconds = began.elapsed().as_secs_f64();
        let (half, quarter) = (self.size / 2, self.size / 4);
        let sequence = ["--rw=read", "--bs=1m", "--iodepth=4", SUMS];
        rows.push(self.row(THERE, ("read by the other host", "1 MiB"), (0, half), &sequence)?);
        let single = ["--rw=read", "--bs=4k", "--iodepth=16", SUMS];
        rows.push(self.row(THERE, ("read by the other host", "4 KiB"), (half + quarter, quarter), &single)?);
        self.screen.say("the first host goes on: it must find that it is not the writer any more");
        self.door.signal(Signal::CONT)?;
        let former_code = self.door.wait(COPY_LIMIT)?.code();
        let at = (self.folder.path(), &*self.addresses.join(","));
        let files = demonstrate_files(self.screen, self.program, at, seconds)?;
        Ok(Report { remora: self.program.version()?, size: self.size, rows, take_over_seconds, former_code, files })
    }

    fn row(&self, socket: &str, what: (&'static str, &'static str), at: (u64, u64), job: &[&str]) -> Result<Row> {
        row_of(&fio(self.folder.path(), socket, at, job).output()?, what, job.contains(&SUMS) && !job.contains(&LATER))
    }
}

/// A server that is ready, and its address.
fn served(program: &Program, folder: &Path, listen: &str, memory: &str) -> Result<(Agent, String)> {
    let mut server =
        started(program, folder, &["volume", "serve", "--listen", listen, "--memory", memory, TOKEN, "token"])?;
    let line = server.wait_for_line("volume server ready", START_LIMIT)?;
    let address = line.split("listening=").nth(1).and_then(|rest| rest.split_whitespace().next());
    let address = address.ok_or_else(|| format!("no address in the server's line: {line}"))?.to_owned();
    Ok((server, address))
}

/// A door that serves the volume at this socket.
fn opened(program: &Program, folder: &Path, socket: &str, more: &[&str]) -> Result<Agent> {
    let nbd = ["volume", "nbd", VOLUME, "--socket", socket, "--copy-timeout", "1s", TOKEN, "token"];
    let mut door = started(program, folder, &[&nbd[..], more].concat())?;
    door.wait_for_line("volume open", START_LIMIT)?;
    Ok(door)
}

/// A run of fio on `length` bytes of the device from `at` on.
fn fio(folder: &Path, socket: &str, (at, length): (u64, u64), job: &[&str]) -> Command {
    let mut command = Command::new("fio");
    command.args(["--name=demo", "--ioengine=nbd", "--thread", "--output-format=json", "--verify_state_save=0"]);
    command
        .args(["--verify_fatal=1", "--randrepeat=0"])
        .args(job)
        .arg(format!("--offset={at}"))
        .arg(format!("--size={length}"));
    command.arg(format!("--uri=nbd+unix:///?socket={}", folder.join(socket).display())).current_dir(folder);
    command
}

/// The figures of a run.
fn row_of(output: &Output, (what, block): (&'static str, &'static str), is_checked: bool) -> Result<Row> {
    let said = String::from_utf8_lossy(&output.stdout);
    let report: Value = said.find('{').map_or(Ok(Value::Null), |begin| serde_json::from_str(&said[begin..]))?;
    let job = &report["jobs"][0];
    if !output.status.success() || job["error"] != 0 {
        let said = String::from_utf8_lossy(&output.stderr);
        return Err(format!("fio ({what}) failed: {}: {said}", output.status).into());
    }
    let direction = if what.starts_with("write") { "write" } else { "read" };
    let figure = |path: &[&str]| path.iter().fold(&job[direction], |at, name| &at[name]).as_f64().unwrap_or_default();
    Ok(Row {
        what,
        block,
        per_second: figure(&["iops"]),
        megabytes_per_second: figure(&["bw_bytes"]) / 1e6,
        median_microseconds: figure(&["clat_ns", "percentile", "50.000000"]) / 1e3,
        longest_milliseconds: figure(&["clat_ns", "max"]) / 1e6,
        is_checked,
    })
}

impl Report {
    fn text(&self) -> String {
        let rows: Vec<Vec<String>> = self.rows.iter().map(Row::cells).collect();
        let former = self.former_code.map_or("by a signal".to_owned(), |code| format!("with code {code}"));
        format!(
            "\n{}: a volume of {}, three copies on three servers, acknowledged at two; everything on this machine\n\n{}{LEGEND}  \
             The other host had the volume open after {:.2} s. The door of the first one ended {former}.\n{}",
            self.remora,
            Size::bytes(self.size),
            lay_out(&HEAD, TEXT_COLUMNS, &rows),
            self.take_over_seconds,
            self.files.as_ref().map(FilesReport::text).unwrap_or_default(),
        )
    }

    /// fio has checked the blocks. What is left is that the former writer has found that it is one.
    fn verdict(&self) -> Result<()> {
        if self.former_code == Some(FENCED) {
            return self.files.as_ref().map_or(Ok(()), FilesReport::verdict);
        }
        Err(format!("the door of the host that hung ended with {:?} instead of code {FENCED}", self.former_code).into())
    }
}

impl Row {
    fn cells(&self) -> Vec<String> {
        vec![
            self.what.to_owned(),
            self.block.to_owned(),
            format!("{:.0}", self.per_second),
            format!("{:.0}", self.megabytes_per_second),
            format!("{:.0}", self.median_microseconds),
            format!("{:.1}", self.longest_milliseconds),
            if self.is_checked { "yes" } else { "–" }.to_owned(),
        ]
    }
}

fn parse_size(text: &str) -> std::result::Result<Size, String> {
    text.parse().map_err(|error: remora_agent::units::UnitError| error.to_string())
}

const SERVERS: usize = 3;

/// What a server needs beside the blocks: entries, writes under way, and the volume with files.
const SPARE_MEMORY: u64 = 128 << 20;

/// A quarter of the volume is whole requests of fio, of 1 MiB at most.
const UNIT: u64 = 4 << 20;

const VOLUME: &str = "demo.volume";

/// The sockets of the two doors, in the demonstration's folder.
const HERE: &str = "here/nbd";
const THERE: &str = "there/nbd";

/// Blocks carry checksums.
const SUMS: &str = "--verify=crc32c";

/// They are checked later.
const LATER: &str = "--do_verify=0";

/// The exit code of a writer that another one has replaced.
const FENCED: i32 = 11;

/// Writes a second while a server is killed: few enough that a busy machine keeps up. The default size takes four
/// seconds.
const RATE: f64 = 4000.0;

/// Bytes of a single block.
const BLOCK_BYTES: u64 = 4096;

/// A copy of the largest volume that fits the machine, or the end of a door.
const COPY_LIMIT: Duration = Duration::from_secs(120);

const HEAD: [&str; 7] = ["what", "block", "per second", "MB/s", "median µs", "longest ms", "checked"];

/// The first columns are text.
const TEXT_COLUMNS: usize = 2;

const LEGEND: &str = "
  By fio, through the NBD door: one request at a time where it says one after the other, else four or sixteen. While a server
  is killed, 4,000 writes a second are asked for. longest ms: of a single request. checked: every block was read again and had
  the checksum with which it was written; by the other host, what the first one wrote.

";

// The demonstration of files in a volume: a Redis server with `appendfsync always` in a mounted volume, whose host is
// killed. Another host mounts the files and starts a server on them, and every acknowledged write must be there.

/// What one client sees of the server.
#[derive(Serialize)]
pub(crate) struct FilesReport {
    /// Median time of a SET, in microseconds, with the server's files on this machine's disk.
    disk_microseconds: f64,
    /// The same in the volume.
    volume_microseconds: f64,
    /// Writes that the server had acknowledged when its host was killed.
    acknowledged: u64,
    /// Those of them that the next server has.
    found: u64,
    /// From the death of the host until the next server has answered.
    back_after_seconds: f64,
}

/// Runs it on a new volume of these servers. `None`: this machine does not permit mounts, which is said.
fn demonstrate_files(
    screen: &Screen,
    program: &Program,
    (folder, servers): (&Path, &str),
    seconds: u8,
) -> Result<Option<FilesReport>> {
    let is_permitted = rustix::process::geteuid().is_root();
    if !is_permitted || OpenOptions::new().read(true).write(true).open("/dev/fuse").is_err() {
        screen.say("NOT SHOWN: a server's files in a volume. Mounts need root and /dev/fuse");
        return Ok(None);
    }
    screen.say("a Redis server with `appendfsync always`: on this machine's disk, then in a volume that is mounted");
    let create = ["volume", "create", FILES_VOLUME, "--size", SIZE, "--servers", servers, TOKEN, "token"];
    ended_well(program, folder, &create)?;
    ended_well(program, folder, &["volume", "format", FILES_VOLUME, TOKEN, "token"])?;
    let span = Duration::from_secs(seconds.into());
    let disk = folder.join("disk");
    std::fs::create_dir(&disk)?;
    let disk_microseconds = median(&write(&server(&disk)?, span)?);
    let mut here = Mount::new(program, folder, "one")?;
    let mut first = server(&here.directory)?;
    let volume_microseconds = median(&write(&first, span)?);

    screen.say("its host is killed: another one mounts the files, and starts a server on them");
    let mut client = first.client()?;
    client.ok(&["FLUSHALL"])?;
    let (said, acknowledged) = mpsc::channel();
    let writer = std::thread::spawn(move || {
        for number in 0_u64.. {
            if client.ok(&["SET", &key(number), &value(number)]).is_err() || said.send(()).is_err() {
                return;
            }
        }
    });
    std::thread::sleep(span);
    let died = Instant::now();
    here.mounted.kill()?;
    first.kill()?;
    writer.join().map_err(|_| "the client's thread has panicked")?;
    let acknowledged = acknowledged.into_iter().count() as u64;
    let there = Mount::new(program, folder, "two")?;
    let second = server(&there.directory)?;
    let mut client = second.client()?;
    client.text(&["PING"])?;
    let back_after_seconds = died.elapsed().as_secs_f64();
    let mut found = 0;
    for number in 0..acknowledged {
        let is_there = client.bytes(&["GET", &key(number)])?.is_some_and(|bytes| bytes == value(number).as_bytes());
        found += u64::from(is_there);
    }
    Ok(Some(FilesReport { disk_microseconds, volume_microseconds, acknowledged, found, back_after_seconds }))
}

impl FilesReport {
    pub(crate) fn text(&self) -> String {
        let FilesReport { disk_microseconds, volume_microseconds, acknowledged, found, back_after_seconds } = self;
        format!(
            "\nA Redis server with appendfsync always, one client, median time of a SET: {disk_microseconds:.0} µs on this \
             machine's disk,\n{volume_microseconds:.0} µs in the volume. Its host was killed: {back_after_seconds:.2} s \
             later a server on another host answered, with {found} of\n{acknowledged} acknowledged writes.\n"
        )
    }

    /// # Errors
    /// An acknowledged write is missing.
    pub(crate) fn verdict(&self) -> Result<()> {
        match self.acknowledged - self.found {
            0 => Ok(()),
            missing => Err(format!("{missing} acknowledged writes are missing on the other host").into()),
        }
    }
}

/// The files of the volume at a directory. Nothing is mounted there afterwards.
struct Mount {
    mounted: Agent,
    directory: PathBuf,
}

impl Mount {
    fn new(program: &Program, folder: &Path, name: &str) -> Result<Mount> {
        let directory = folder.join(name);
        std::fs::create_dir(&directory)?;
        let args = ["volume", "mount", FILES_VOLUME, name, "--take-over", "--copy-timeout", "1s", TOKEN, "token"];
        let mut mount = Mount { mounted: started(program, folder, &args)?, directory };
        mount.mounted.wait_for_line("files mounted", START_LIMIT)?;
        Ok(mount)
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let _ = rustix::mount::unmount(&self.directory, UnmountFlags::DETACH); // what a killed process has left
    }
}

fn server(directory: &Path) -> Result<Server> {
    let builder = Server::builder(Kind::Redis7).config("dir", directory.display()).config("appendonly", "yes");
    Ok(builder.config("appendfsync", "always").start()?)
}

/// Sets keys one after the other. Returns how long each has taken.
fn write(server: &Server, span: Duration) -> Result<Vec<Duration>> {
    let mut client = server.client()?;
    let (begun, mut times) = (Instant::now(), Vec::new());
    for number in 0.. {
        let began = Instant::now();
        if began - begun > span {
            break;
        }
        client.ok(&["SET", &key(number), &value(number)])?;
        times.push(began.elapsed());
    }
    Ok(times)
}

/// In microseconds.
fn median(times: &[Duration]) -> f64 {
    let mut times = times.to_vec();
    times.sort_unstable();
    times.get(times.len() / 2).map_or(f64::NAN, |time| time.as_secs_f64() * 1e6)
}

fn key(number: u64) -> String {
    format!("key:{number}")
}

fn value(number: u64) -> String {
    format!("{number:064}")
}

const FILES_VOLUME: &str = "files.volume";

/// Of the volume for files. Each server has memory for it beside the volume of the block device.
const SIZE: &str = "32MiB";
