//! Seconds and processor time to create many empty files in a volume's mount, and to remove them.
//!
//! | subject | what it is |
//! |---|---|
//! | `volume` | three servers on loopback as processes of their own, two of which hold a change before it is answered |
//! | `FUSE floor` | names in memory of the serving process, by the same FUSE: what the kernel asks costs that much |
//! | `this disk` | a folder of the temporary files' file system |
//!
//! Files are created with `open(O_CREAT)` and `close`, one after the other, in one directory and in twenty in turn.
//! `rm -rf` removes them. Each round measures all of it in turn. Processor time is of the load, the mount and the
//! servers together; the figures of a busy machine are to be compared with those beside them only.
//!
//! ```text
//! cargo run --release -p remora-bench --bin name_changes -- --rounds 5 --out bench/runs
//! ```

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::sync::Arc;
use std::time::{Duration, Instant};

use clap::Parser;
use remora_bench::source::{CopyPlace, CopyServer, new_volume};
use remora_bench::{Keep, Run, Sample, cpu, source};
use remora_files::Files;
use remora_files::mount::MountedFiles;
use remora_files::names::New;
use remora_fuse::memory::MemoryFileSystem;
use remora_fuse::{Session, SessionOptions};
use remora_lab::require::RingAllowed;
use remora_lab::scratch;
use remora_messenger::Address;
use remora_volume::client::{ClientOptions, Volume};

/// Time to create files in a volume's mount, and to remove them.
#[derive(Parser, Debug)]
struct Options {
    /// Rounds; the figures are medians over them.
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Files of a measurement.
    #[arg(long, default_value_t = 20_000)]
    files: usize,
    /// The kernel asks by `/dev/fuse`, and not by io_uring.
    #[arg(long)]
    device: bool,
    /// Threads that read `/dev/fuse`; by default as many as there are processors.
    #[arg(long)]
    threads: Option<usize>,
    #[command(flatten)]
    keep: Keep,
}

type Failure = Box<dyn std::error::Error + Send + Sync>;

fn main() -> Result<ExitCode, Failure> {
    source::be_one_if_asked()?;
    create_if_asked()?;
    let options = Options::parse();
    let mut run = Run::new("name_changes", "seconds, or seconds of processor");
    let allowed = if options.device { None } else { RingAllowed::new().ok() };
    run.notes.push(format!("The kernel asks by {}.", if allowed.is_some() { "io_uring" } else { "/dev/fuse" }));
    let folder = scratch::folder("bench-names")?;
    let places = ["volume", "floor", "disk"].map(|name| folder.path().join(name));
    places.iter().try_for_each(fs::create_dir)?;
    let mut session = SessionOptions { ring: allowed.is_some(), ..SessionOptions::default() };
    session.threads = options.threads.unwrap_or(session.threads);
    let servers: Vec<CopyServer> =
        (0..3).map(|_| CopyServer::start("tcp:127.0.0.1:0", CopyPlace::default())).collect::<Result<_, _>>()?;
    let mounted = mount(&servers, &places[0], &session)?;
    let floor = SessionOptions { lists_attributes: true, ..session };
    let floor = Session::start(&places[1], Arc::new(MemoryFileSystem::new(VALID)), &floor)?;
    for round in 0..options.rounds {
        eprintln!("round {} of {}", round + 1, options.rounds);
        for directories in [1, MANY_DIRECTORIES] {
            for turn in 0..SUBJECTS.len() {
                let place = (round + turn) % SUBJECTS.len();
                let figures = measure(&places[place], (options.files, directories), &servers)?;
                let of = |(what, value)| Sample::new(SUBJECTS[place], case(what, directories), round, value);
                run.samples.extend(figures.map(of));
            }
        }
    }
    floor.end()?;
    drop(mounted);
    for what in [CREATE, REMOVE, CREATE_CPU, REMOVE_CPU] {
        for rival in [FLOOR, DISK] {
            let cases = [1, MANY_DIRECTORIES].map(|directories| case(what, directories));
            cases.iter().for_each(|case| run.compare_less((VOLUME, case), (rival, case), None));
        }
    }
    Ok(options.keep.finish(&run)?)
}

/// The volume's files. What they are mounted by is dropped before the servers.
fn mount(servers: &[CopyServer], directory: &Path, session: &SessionOptions) -> Result<MountedFiles, Failure> {
    let addresses: Vec<Address> = servers.iter().map(|server| server.address.clone()).collect();
    let shape = new_volume(&addresses, HELD, BLOCKS)?;
    let volume = Arc::new(Volume::open(shape, &addresses, &ClientOptions::default())?);
    Files::format(&*volume, &New::default(), false)?;
    Ok(MountedFiles::mount(volume, directory, AHEAD, session)?)
}

/// Creates files, and removes them. Seconds and processor seconds of both.
fn measure(
    place: &Path,
    (files, directories): (usize, usize),
    servers: &[CopyServer],
) -> Result<[(&'static str, f64); 4], Failure> {
    let top = place.join("many");
    let paths: Vec<PathBuf> = (0..directories).map(|number| top.join(number.to_string())).collect();
    paths.iter().try_for_each(fs::create_dir_all)?;
    let used = || -> Result<f64, Failure> {
        let served: f64 = servers.iter().map(|server| server.process.cpu_seconds()).sum::<Result<f64, _>>()?;
        Ok((cpu::of_self()? + cpu::of_ended_children()?).as_secs_f64() + served)
    };
    let timed = |command: &mut Command| -> Result<[f64; 2], Failure> {
        let (before, began) = (used()?, Instant::now());
        let ended = command.status()?;
        let seconds = began.elapsed().as_secs_f64();
        if ended.success() { Ok([seconds, used()? - before]) } else { Err(format!("{command:?}: {ended}").into()) }
    };
    let mut load = Command::new(std::env::current_exe()?);
    let [create, create_cpu] = timed(load.arg(BE_THE_LOAD).arg(files.to_string()).args(&paths))?;
    let [remove, remove_cpu] = timed(Command::new("rm").arg("-rf").arg(&top))?;
    Ok([(CREATE, create), (CREATE_CPU, create_cpu), (REMOVE, remove), (REMOVE_CPU, remove_cpu)])
}

/// Is the process that creates files, if this program was started as it.
fn create_if_asked() -> Result<(), Failure> {
    let mut arguments = std::env::args_os().skip(1);
    if arguments.next().is_none_or(|word| word != BE_THE_LOAD) {
        return Ok(());
    }
    let files: usize = arguments.next().and_then(|word| word.to_str()?.parse().ok()).ok_or("how many files?")?;
    let directories: Vec<PathBuf> = arguments.map(PathBuf::from).collect();
    for (number, directory) in (0..files).zip(directories.iter().cycle()) {
        File::create_new(directory.join(format!("file-{number}")))?;
    }
    std::process::exit(0);
}

fn case(what: &str, directories: usize) -> String {
    format!("{what}, {directories} {}", if directories == 1 { "directory" } else { "directories" })
}

const VOLUME: &str = "volume";
const FLOOR: &str = "FUSE floor";
const DISK: &str = "this disk";

/// In the order of their places.
const SUBJECTS: [&str; 3] = [VOLUME, FLOOR, DISK];

const CREATE: &str = "create";
const CREATE_CPU: &str = "create, processor";
const REMOVE: &str = "rm -rf";
const REMOVE_CPU: &str = "rm -rf, processor";

const MANY_DIRECTORIES: usize = 20;

/// First argument of the process that creates files; then how many, and the directories.
const BE_THE_LOAD: &str = "--create-files";

/// Copies that hold a change before it is answered.
const HELD: usize = 2;

/// 1 GiB: names of 60,000 files.
const BLOCKS: u64 = 256 * 1024;

/// As much as the command permits by default.
const AHEAD: usize = 64 << 20;

/// As for the volume, the kernel may use what it was told for as long as it likes.
const VALID: Duration = Duration::from_secs(3600);
