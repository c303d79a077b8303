//! `remora-bench volume`: files of a mounted volume with three copies, beside those of other file systems, on one host.
//!
//! ```text
//!   Place       a mounted file system in namespaces of its own     dev/bench/rivals/files
//!      ▲  fio, redis-server
//!   run         a cell of the matrix, by fio; SETs of a Redis with `appendfsync always` there; new connections;
//!      │        every case with every subject in turn, round by round ──▶ Kept
//!   cases       what is measured, what others have published of it, and what must be reached
//!   tables      Markdown
//! ```
//!
//! The cells are those of the measurement that the project was asked to stand beside ([`cases::published`]), and eight
//! jobs. Here: the command line, a place, and the floor of all file systems by our FUSE.

pub mod cases;
pub mod run;

use std::ffi::OsStr;
use std::fmt::Write as _;
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{ChildStderr, ChildStdout, Command, Stdio};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use cases::{BLOCKS_KIB, CONNECTION, Case, Cell, EMULATED_RDMA, EMULATED_TCP, Figures, Pattern, Subject, TCP};
use clap::ValueEnum;
use tempfile::TempDir;

use crate::suite::{Kept, minutes};
use crate::sync::Result;
use crate::{Spread, bytes};
use remora_fuse::memory::MemoryFileSystem;
use remora_fuse::{Session, SessionOptions};
use remora_lab::process::Process;
use remora_lab::scratch;

pub use cases::Point;
pub use run::run;

// The command line.

/// The subcommand's name, and that of its kept runs.
pub const NAME: &str = "volume";

/// Command-line arguments.
#[derive(Clone, Debug, clap::Args)]
pub struct Options {
    /// Rounds; figures are medians over them. Each measures every case of every subject in turn.
    #[arg(long, default_value_t = 3)]
    pub rounds: usize,
    /// Time limit in minutes. What does not fit is left out, cases without a target first, and the kept run lists it.
    #[arg(long, value_parser = minutes)]
    pub budget_minutes: Option<f64>,
    /// What to measure.
    #[arg(long, value_delimiter = ',', default_value = "set,files,connections")]
    pub parts: Vec<Part>,
    /// File systems to measure.
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "remora-tcp,remora-shm,gluster,moosefs,bindfs,nbdfuse,memory,disk"
    )]
    pub subjects: Vec<Subject>,
    /// Files: past the kernel's page cache (1), or by it (0).
    #[arg(long, value_delimiter = ',', value_parser = clap::value_parser!(u8).range(0..=1), default_value = "1,0")]
    pub direct: Vec<u8>,
    /// Files: what fio does.
    #[arg(long, value_delimiter = ',', default_value = "write,randwrite,read,randread")]
    pub patterns: Vec<Pattern>,
    /// Files: KiB of a request.
    #[arg(long, value_delimiter = ',', value_parser = clap::value_parser!(u64).range(1..=16384), default_value = "4,64,128,1024")]
    pub blocks_kib: Vec<u64>,
    /// Files: threads, each with a file of its own.
    #[arg(long, value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..=64), default_value = "1,8,32")]
    pub jobs: Vec<u32>,
    /// Only cases that have a target.
    #[arg(long)]
    pub goals_only: bool,
    /// Milliseconds for each measurement, at most. Writes to the page cache take longer, by the `fsync` at their end.
    #[arg(long, value_parser = clap::value_parser!(u64).range(50..=600_000), default_value_t = 1000)]
    pub millis: u64,
    /// MiB of the files of one cell, all jobs together. Default: what half of the free memory has room for, 32 to 1024.
    #[arg(long, value_parser = clap::value_parser!(u64).range(16..=65_536))]
    pub mib: Option<u64>,
    /// How the kernel asks Remora, and the floor of FUSE, for files. By io_uring it needs Linux 6.14; it is allowed for
    /// the time of the run.
    #[arg(long, default_value = "ring")]
    pub transport: Transport,
    /// Run the same, with these options, in an emulated machine (dev/lab/rdma-vm) that has RDMA devices: subjects
    /// `emulated-rdma` and `emulated-tcp`, `--transport device`.
    #[arg(long)]
    pub emulated: bool,
    /// Connections: leave out those by RDMA, which need an emulated machine (dev/lab/rdma-vm) and half a minute.
    #[arg(long)]
    pub no_rdma: bool,
    /// Keep the run in a new folder below this one.
    #[arg(long)]
    pub out: Option<PathBuf>,
    /// A label at the end of that folder's name, for runs that are shown beside each other.
    #[arg(long)]
    pub label: Option<String>,
}

/// A part of the measurements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Part {
    /// SETs of a Redis server with `appendfsync always`.
    Set,
    /// Reads and writes by fio.
    Files,
    /// New connections.
    Connections,
}

impl Options {
    fn has(&self, part: Part) -> bool {
        self.parts.contains(&part)
    }

    /// What is measured of mounted file systems, what has a target first.
    fn cases(&self) -> Vec<Case> {
        let mut cases = Vec::new();
        if self.has(Part::Set) {
            cases.extend([Case::OneClient, Case::ManyClients]);
        }
        if self.has(Part::Files) {
            for direct in self.direct.iter().map(|direct| *direct == 1) {
                for &jobs in &self.jobs {
                    for block in self.blocks_kib.iter().map(|kib| kib << 10) {
                        let cell = |&pattern| Case::Files(Cell { direct, pattern, block, jobs });
                        cases.extend(self.patterns.iter().map(cell));
                    }
                }
            }
        }
        let (first, rest): (Vec<Case>, Vec<Case>) = cases.into_iter().partition(|case| cases::concern(*case));
        if self.goals_only { first } else { first.into_iter().chain(rest).collect() }
    }

    /// Megabytes of the files of one cell.
    fn file_mib(&self, available: u64) -> u64 {
        let most_jobs = u64::from(self.jobs.iter().copied().max().unwrap_or(1));
        let copies: u64 = self.subjects.iter().map(|subject| subject.copies()).sum();
        // Each number of jobs has files of its own.
        let files = (self.jobs.len() as u64 * copies.max(1)).max(1);
        let mib = self.mib.unwrap_or_else(|| ((available >> 20) / 2 / files).clamp(32, 1024));
        (mib / most_jobs).max(1) * most_jobs
    }
}

// A mounted file system in namespaces of its own: see `dev/bench/rivals/files`.

/// A mounted file system. Dropping it ends all of its processes, and removes its mounts and folders.
#[derive(Debug)]
pub struct Place {
    process: Process,
    /// The first process of its namespaces.
    first: u32,
    path: PathBuf,
    _folder: TempDir,
}

impl Place {
    /// Mounts it, with room for files of `mib` megabytes, and waits until it is there. `settings` are the variables
    /// that the script has for it.
    pub fn start(subject: Subject, mib: u64, settings: &[(&str, &OsStr)]) -> Result<Place> {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("rivals/files");
        let what = &subject.word();
        let folder = scratch::folder(what)?;
        let mut command = Command::new("unshare");
        if !subject.is_emulated() {
            command.arg("--net"); // Soft-RoCE devices belong to the machine's first network
        }
        command.args(["--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]).arg(script);
        command.args([what, &mib.to_string()]).arg(folder.path()).envs(settings.iter().copied());
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let (mut process, pipes) = Process::start(what, command)?;
        let line = first_line(pipes.stdout);
        let Some(path) = line.trim().strip_prefix("ready ").map(PathBuf::from) else {
            process.kill()?;
            return Err(last_line(pipes.stderr).into());
        };
        drain(pipes.stderr);
        let children = fs::read_to_string(format!("/proc/{0}/task/{0}/children", process.pid()))?;
        let first = children.split_whitespace().next().ok_or("it has ended")?.parse()?;
        Ok(Place { process, first, path, _folder: folder })
    }

    /// The directory of its files, or its only file, for processes that [`Place::command`] starts.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// A command there, as a process of this one.
    pub fn command(&self, program: &str) -> Command {
        let mut command = Command::new("nsenter");
        command.args(["--target", &self.first.to_string(), "--mount", "--root", "--net"]).arg(program);
        command
    }

    /// A command there whose process belongs to it: [`Place::cpu_seconds`] counts it while it runs.
    pub fn server(&self, program: &str) -> Command {
        let mut command = Command::new("nsenter");
        command.args(["--target", &self.first.to_string(), "--mount", "--root", "--net", "--pid"]).arg(program);
        command
    }

    /// Processor seconds of its processes so far: servers, and the mount.
    pub fn cpu_seconds(&self) -> Result<f64> {
        let namespace = |pid: &str| fs::read_link(format!("/proc/{pid}/ns/pid")).ok();
        let own = namespace(&self.first.to_string());
        let mut seconds = self.process.cpu_seconds()?;
        for entry in fs::read_dir("/proc")? {
            let name = entry?.file_name();
            let pid = name.to_string_lossy();
            if pid.parse::<u32>().is_ok() && own.is_some() && namespace(&pid) == own {
                // One that ends meanwhile is left out.
                seconds += remora_lab::process::cpu_seconds(pid.parse()?).unwrap_or_default();
            }
        }
        Ok(seconds)
    }
}

/// The line that says that it is mounted; empty if it has ended, or is not mounted in time.
fn first_line(stdout: Option<ChildStdout>) -> String {
    let (said, line) = mpsc::channel();
    std::thread::spawn(move || {
        let mut line = String::new();
        let _ = stdout.map(|stdout| BufReader::new(stdout).read_line(&mut line)); // an error is no line
        let _ = said.send(line); // the other end may have given up
    });
    line.recv_timeout(START_LIMIT).unwrap_or_default()
}

/// What a place that is not mounted said last.
fn last_line(stderr: Option<ChildStderr>) -> String {
    let lines = stderr.map(|stderr| BufReader::new(stderr).lines().map_while(std::io::Result::ok));
    lines.and_then(|lines| lines.filter(|line| !line.trim().is_empty()).last()).unwrap_or("it was not mounted".into())
}

/// Reads what servers say until they end: a full pipe would stop them.
fn drain(stderr: Option<ChildStderr>) {
    if let Some(mut stderr) = stderr {
        std::thread::spawn(move || std::io::copy(&mut stderr, &mut std::io::sink()));
    }
}

/// Until it is mounted, on a busy machine that emulates another one.
const START_LIMIT: Duration = Duration::from_secs(300);

// `remora-bench memory-files`: the floor of all file systems by our FUSE, whose files are in this process's memory.

/// Command-line arguments.
#[derive(Clone, Debug, clap::Args)]
pub struct MemoryOptions {
    /// The directory at which the files appear.
    pub directory: PathBuf,
    /// How the kernel asks.
    #[arg(default_value = "ring")]
    pub transport: Transport,
}

/// How the kernel asks for files.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Transport {
    /// By io_uring.
    Ring,
    /// By /dev/fuse.
    Device,
}

impl Transport {
    /// Its word on the command line.
    pub fn word(self) -> &'static str {
        match self {
            Transport::Ring => "ring",
            Transport::Device => "device",
        }
    }
}

/// Serves the files until they are unmounted, with the same settings as `remora volume mount`.
pub fn serve_memory(options: &MemoryOptions) -> Result<bool> {
    let session = SessionOptions {
        ring: options.transport == Transport::Ring,
        write_back: false,
        lists_attributes: true,
        ..SessionOptions::default()
    };
    let session = Session::start(&options.directory, Arc::new(MemoryFileSystem::new(VALID)), &session)?;
    while !session.wait(LOOK_AGAIN) {}
    session.end()?;
    Ok(true)
}

/// For how long the kernel uses what it was told. No other process changes these files.
const VALID: Duration = Duration::from_secs(60);

const LOOK_AGAIN: Duration = Duration::from_secs(1);

// The tables, as Markdown, from kept figures.

/// All tables of these runs.
pub fn tables(runs: &[&Kept<Point>]) -> String {
    let mut out = String::from(EXPLAINED);
    for kept in runs {
        if !kept.label.is_empty() {
            let _ = writeln!(out, "\n### Run {}", kept.label);
        }
        let figures = Figures(&kept.points);
        for (title, text) in [
            ("Targets", cases::table(figures)),
            ("Redis, `appendfsync always`", sets(figures)),
            ("New connections", of_connections(figures)),
        ] {
            if text.lines().count() > if text.starts_with('|') { 2 } else { 0 } {
                let _ = writeln!(out, "\n**{title}**\n\n{}", text.trim_end());
            }
        }
        for emulated in [false, true] {
            for (direct, jobs) in [true, false].into_iter().flat_map(|direct| [1, 8, 32].map(|jobs| (direct, jobs))) {
                files(&mut out, figures, &Group { emulated, direct, jobs });
            }
        }
    }
    out
}

fn sets(figures: Figures<'_>) -> String {
    let mut out = String::from(
        "| files on | 1 client: µs | p99 µs | CPU µs each | 50 clients: SETs/s | p99 µs | CPU µs each |\n|---|---:|---:|---:|---:|---:|---:|\n",
    );
    for subject in subjects(figures, |case| !case.ends_with("direct") && !case.ends_with("buffered")) {
        let _ = write!(out, "| {}", subject.name());
        for case in [Case::OneClient, Case::ManyClients].map(|case| case.to_string()) {
            let of = || figures.of(subject.name(), &case);
            let spread = figures.spread(subject.name(), &case);
            let each = Spread::of(of().map(|point| 1e6 * point.cpu_seconds / point.operations));
            let _ = write!(
                out,
                " | {} | {} | {}",
                range(spread),
                median(Spread::of(of().filter_map(|p| p.p99_us))),
                median(each)
            );
        }
        out += " |\n";
    }
    out
}

fn of_connections(figures: Figures<'_>) -> String {
    let mut out =
        String::from("| by | µs until the first answer | p99 µs | CPU µs of both ends |\n|---|---:|---:|---:|\n");
    for subject in [TCP, EMULATED_TCP, EMULATED_RDMA] {
        let of = || figures.of(subject, CONNECTION);
        let Some(spread) = figures.spread(subject, CONNECTION) else { continue };
        let each = Spread::of(of().map(|point| 1e6 * point.cpu_seconds / point.operations));
        let p99 = Spread::of(of().filter_map(|point| point.p99_us));
        let _ = writeln!(out, "| {subject} | {} | {} | {} |", range(Some(spread)), median(p99), median(each));
    }
    out
}

/// Cells that stand in one table.
struct Group {
    /// Of the emulated machine, or of this one.
    emulated: bool,
    direct: bool,
    jobs: u32,
}

/// Two tables: MB/s, and processor time.
fn files(out: &mut String, figures: Figures<'_>, &Group { emulated, direct, jobs }: &Group) {
    let mut cells = Vec::new();
    for pattern in Pattern::value_variants().iter().copied() {
        let blocks = BLOCKS_KIB.map(|kib| Cell { direct, pattern, block: kib << 10, jobs });
        let is_measured = |cell: &Cell| {
            let case = Case::Files(*cell).to_string();
            figures.0.iter().any(|point| point.case == case)
        };
        cells.extend(blocks.into_iter().filter(is_measured));
    }
    let (how, threads) = (if direct { "direct" } else { "buffered" }, if jobs == 1 { "job" } else { "jobs" });
    let names = cells.iter().map(|cell| Case::Files(*cell).to_string()).collect::<Vec<_>>();
    let mut subjects = subjects(figures, |case| names.iter().any(|name| name == case));
    subjects.retain(|subject| subject.is_emulated() == emulated);
    if subjects.is_empty() {
        return;
    }
    if emulated {
        files_emulated(out, figures, &format!("{jobs} {threads}, {how}"), &cells, &subjects);
        return;
    }
    let heads: Vec<&str> = subjects.iter().map(|subject| subject.name()).collect();
    let (heads, line) = (heads.join(" | "), "---:|".repeat(subjects.len()));
    let _ = writeln!(
        out,
        "\n**{jobs} {threads}, {how}: MB/s**\n\n| | CubeFS RDMA | CubeFS TCP | {heads} |\n|---|---:|---:|{line}"
    );
    for (cell, name) in cells.iter().zip(&names) {
        let (rdma, tcp) = cases::published(cell).unzip();
        let published = |figure: Option<f64>| figure.map_or("–".to_owned(), |figure| figure.to_string());
        let ours = subjects.iter().map(|subject| range(figures.spread(subject.name(), name)));
        let _ = writeln!(
            out,
            "| {} {} | {} | {} | {} |",
            cell.pattern.word(),
            bytes(cell.block),
            published(rdma),
            published(tcp),
            ours.collect::<Vec<_>>().join(" | ")
        );
    }
    let _ = writeln!(
        out,
        "\n**{jobs} {threads}, {how}: processor µs of a request, all processes**\n\n| | {heads} |\n|---|{line}"
    );
    for (cell, name) in cells.iter().zip(&names) {
        let each = |subject: &Subject| {
            let of = figures.of(subject.name(), name);
            median(Spread::of(of.map(|point| 1e6 * point.cpu_seconds / point.operations)))
        };
        let each = subjects.iter().map(each).collect::<Vec<_>>().join(" | ");
        let _ = writeln!(out, "| {} {} | {each} |", cell.pattern.word(), bytes(cell.block));
    }
}

/// The same of the emulated machine, without what others have measured on real ones, and with the ratio of two ways.
fn files_emulated(out: &mut String, figures: Figures<'_>, what: &str, cells: &[Cell], subjects: &[Subject]) {
    let heads: Vec<&str> = subjects.iter().map(|subject| subject.name()).collect();
    let _ = writeln!(
        out,
        "\n**{what}, in the emulated machine: MB/s, and processor µs of a request**\n\n| | {} | RDMA / TCP | {} |\n|---|{}",
        heads.join(" | "),
        heads.iter().map(|head| format!("µs: {head}")).collect::<Vec<_>>().join(" | "),
        "---:|".repeat(2 * subjects.len() + 1)
    );
    for cell in cells {
        let name = Case::Files(*cell).to_string();
        let rates = subjects.iter().map(|subject| range(figures.spread(subject.name(), &name)));
        let each = subjects.iter().map(|subject| {
            let of = figures.of(subject.name(), &name);
            median(Spread::of(of.map(|point| 1e6 * point.cpu_seconds / point.operations)))
        });
        let ratio = figures.ratio(Subject::EmulatedRdma.name(), Subject::EmulatedTcp.name(), &name);
        let columns = rates.chain([range(ratio)]).chain(each).collect::<Vec<_>>().join(" | ");
        let _ = writeln!(out, "| {} {} | {columns} |", cell.pattern.word(), bytes(cell.block));
    }
}

/// Those that have figures of such cases, in their order.
fn subjects(figures: Figures<'_>, is_one: impl Fn(&str) -> bool) -> Vec<Subject> {
    let has = |subject: &Subject| figures.0.iter().any(|point| point.subject == subject.name() && is_one(&point.case));
    Subject::value_variants().iter().copied().filter(has).collect()
}

fn median(spread: Option<Spread>) -> String {
    spread.map_or("–".to_owned(), |spread| short(spread.median))
}

fn range(spread: Option<Spread>) -> String {
    let Some(Spread { median, low, high }) = spread else { return "–".to_owned() };
    let (middle, low, high) = (short(median), short(low), short(high));
    if low == high { middle } else { format!("{middle} ({low}–{high})") }
}

/// Three digits, or all of those before the point.
fn short(figure: f64) -> String {
    match figure.abs() {
        small if small < 10.0 => format!("{figure:.2}"),
        middle if middle < 100.0 => format!("{figure:.1}"),
        _ => format!("{figure:.0}"),
    }
}

const EXPLAINED: &str = "\
Medians over the rounds, in brackets the least and the greatest value. MB are 10⁶ bytes. *CubeFS*: as published, with ConnectX-5 cards, three
copies and a client of its own; all other columns are of this run, in which one host runs clients, mount and servers. *Remora*: a volume with three copies in memory, acknowledged
at two, mounted by `remora volume mount`: *TCP* by messages only, *shm* with blocks read and taken by shared memory. *GlusterFS*: three replicas; *MooseFS*: the goal of three copies, *bindfs*:
a directory once more; their disks are in memory. *nbdfuse*: a file in the memory of nbdkit, one copy. *FUSE floor*: a file system in the memory of one process, by Remora's own FUSE. *local disk*: a
directory of this machine's disk. *Emulated*: in a machine that QEMU emulates, with Soft-RoCE: by RDMA blocks are read, and writes of 64 KiB and more taken; smaller writes are messages over TCP in both columns. Those figures are
compared with each other only. Direct: the same files again and again for the time of a measurement. Buffered: each file once, from a page cache that has been emptied of it, and with one `fsync` at the end
of its writes.
";

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use clap::Parser;

    use super::cases::tests::point;
    use super::*;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        options: Options,
    }

    fn options(typed: &[&str]) -> Options {
        Cli::try_parse_from(["volume"].iter().chain(typed)).unwrap().options
    }

    #[test]
    fn every_cell_is_measured_and_those_with_a_target_first() {
        let cases = options(&[]).cases();
        assert_eq!(cases.len(), 2 + 2 * 4 * 4 * 3);
        let without = cases.iter().position(|case| !cases::concern(*case)).unwrap();
        assert!(cases[without..].iter().all(|case| !cases::concern(*case)));
        assert_eq!(options(&["--goals-only"]).cases().len(), without);
    }

    #[test]
    fn files_fit_into_half_of_the_memory_and_every_job_has_as_much() {
        let three = options(&["--subjects", "remora-tcp,bindfs", "--jobs", "1,8,32"]);
        assert_eq!(three.file_mib(6 << 30), 256);
        assert_eq!(three.file_mib(0), 32);
        assert_eq!(options(&["--mib", "50", "--jobs", "8"]).file_mib(0), 48);
    }

    #[test]
    fn every_measured_cell_has_a_row_with_what_was_published() {
        let mut kept = Kept::begin("volume", None);
        kept.points.push(point("Remora, shm", "read 1 MiB, 32 jobs, direct", 0, 1234.4));
        kept.points.push(point("GlusterFS", "SET, 1 client", 0, 99.5));
        let text = tables(&[&kept]);
        assert!(text.contains("| | CubeFS RDMA | CubeFS TCP | Remora, shm |"), "{text}");
        assert!(text.contains("| read 1 MiB | 3394 | 2820 | 1234 |"), "{text}");
        assert!(text.contains("| read 1 MiB | 500 |"), "half a second of 1000 requests: {text}");
        assert!(text.contains("| GlusterFS | 99.5 | – | 500 | – | – | – |"), "{text}");
        assert!(!text.contains("buffered: MB/s") && !text.contains("Targets"), "{text}");
    }

    #[test]
    fn figures_of_the_emulated_machine_stand_in_tables_of_their_own() {
        let mut kept = Kept::begin("volume", None);
        let case = "read 1 MiB, 1 job, direct";
        for (subject, value) in
            [("Remora, shm", 900.0), ("Remora, RDMA, emulated", 30.0), ("Remora, TCP, emulated", 20.0)]
        {
            kept.points.push(point(subject, case, 0, value));
        }
        let text = tables(&[&kept]);
        assert!(text.contains("| read 1 MiB | 581 | 396 | 900 |"), "{text}");
        assert!(text.contains("| read 1 MiB | 30.0 | 20.0 | 1.50 | 500 | 500 |"), "{text}");
    }
}
