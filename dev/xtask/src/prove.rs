//! Proofs of the files of a mounted volume, by programs that other people wrote to find faults in file systems.
//!
//! ```text
//!   three servers ── create ── format ── mount by io_uring ◀── each proof        [`Scene`], [`prove`]
//!                                        mount by /dev/fuse ◀── each proof
//! ```
//!
//! Each proof has a volume of its own, so that a failure leaves the others alone, and ends with a verdict.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use clap::ValueEnum;
use remora_bench::sync::{Program, Result};
use remora_lab::require::RingAllowed;
use remora_lab::server::{project_root, wait_until};
use remora_lab::{Agent, scratch};
use rustix::mount::UnmountFlags;
use rustix::process::Signal;
use tempfile::TempDir;

use crate::process::Screen;
use crate::process::{START_LIMIT, TOKEN, cargo, ended_well, started};

/// Command-line arguments.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Options {
    /// Run only these.
    #[arg(long, value_delimiter = ',', value_name = "NAME", default_value = "fsx,posix,verify,stress,build,rsync")]
    only: Vec<Proof>,

    /// How the kernel asks for files.
    #[arg(long, value_delimiter = ',', value_name = "HOW", default_value = "ring,device")]
    by: Vec<By>,

    /// How long the proofs take that can be longer: times the usual.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1000))]
    times: u32,
}

/// A proof.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Proof {
    /// Random operations on one file, each compared with what must be in it.
    Fsx,
    /// What POSIX says of files, by pjdfstest.
    Posix,
    /// Every block that was written is read and checked, while servers are killed.
    Verify,
    /// stress-ng's stressors of files, which check what they read.
    Stress,
    /// A repository is cloned into the files, checked, and built there.
    Build,
    /// A tree of files there, a new mount, and back.
    Rsync,
}

/// How the kernel asks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum By {
    /// By io_uring.
    Ring,
    /// By /dev/fuse.
    Device,
}

/// What came of one proof.
struct Verdict {
    name: String,
    by: By,
    took: Duration,
    outcome: Result<String>,
}

/// Runs the proofs, and prints a line for each.
pub(crate) fn run(options: &Options) -> Result<()> {
    let screen = Screen::new();
    if !rustix::process::geteuid().is_root() {
        return Err("mounts need root".into());
    }
    let program = screen.build_for(&[])?;
    let mut verdicts = Vec::new();
    for &by in &options.by {
        let _allowed = match by {
            By::Ring => match RingAllowed::new() {
                Ok(allowed) => Some(allowed),
                Err(why) => {
                    screen.say(&format!("NOT PROVEN by io_uring: FUSE has none here ({why})"));
                    continue;
                }
            },
            By::Device => None,
        };
        for proof in &options.only {
            let name = proof.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default();
            let begun = Instant::now();
            let busy = screen.busy(&format!("{name}, by {by:?}"));
            let outcome = Scene::set(&program, by).and_then(|mut scene| {
                let outcome = prove(*proof, &mut scene, options.times)?;
                scene.end()?;
                Ok(outcome)
            });
            drop(busy);
            let verdict = Verdict { name, by, took: begun.elapsed(), outcome };
            screen.say(&verdict.line());
            verdicts.push(verdict);
        }
    }
    println!("\n| proof | by | verdict | s | what |\n|---|---|---|---:|---|");
    verdicts.iter().for_each(|verdict| println!("{}", verdict.line()));
    let failed: Vec<&str> =
        verdicts.iter().filter(|verdict| verdict.outcome.is_err()).map(|verdict| verdict.name.as_str()).collect();
    if failed.is_empty() { Ok(()) } else { Err(format!("failed: {}", failed.join(", ")).into()) }
}

impl Verdict {
    fn line(&self) -> String {
        let (word, what) = match &self.outcome {
            Ok(what) => ("proven", what.clone()),
            Err(error) => ("**FAILED**", error.to_string().replace('\n', " / ")),
        };
        let by = if self.by == By::Ring { "io_uring" } else { "/dev/fuse" };
        format!("| {} | {by} | {word} | {:.0} | {what} |", self.name, self.took.as_secs_f64())
    }
}

// Three servers, a volume on them, and its files at a directory.

/// A mounted volume. Nothing is mounted there afterwards.
struct Scene<'a> {
    program: &'a Program,
    by: By,
    /// The mount ends before the servers.
    mounted: Option<Agent>,
    servers: Vec<(Agent, String)>,
    folder: TempDir,
}

impl<'a> Scene<'a> {
    fn set(program: &'a Program, by: By) -> Result<Scene<'a>> {
        let folder = scratch::folder("prove")?;
        scratch::token_file(folder.path())?;
        std::fs::create_dir(folder.path().join(FILES))?;
        let mut scene = Scene { program, by, mounted: None, servers: Vec::new(), folder };
        for _ in 0..3 {
            scene.servers.push(scene.serve("127.0.0.1:0")?);
        }
        let servers: Vec<&str> = scene.servers.iter().map(|(_, address)| address.as_str()).collect();
        let create = ["volume", "create", VOLUME, "--size", SIZE, "--servers", &servers.join(","), TOKEN, "token"];
        ended_well(program, scene.folder.path(), &create)?;
        ended_well(program, scene.folder.path(), &["volume", "format", VOLUME, TOKEN, "token"])?;
        scene.mount()?;
        Ok(scene)
    }

    fn serve(&self, listen: &str) -> Result<(Agent, String)> {
        let args = ["volume", "serve", "--listen", listen, "--memory", MEMORY, TOKEN, "token"];
        let mut server = started(self.program, self.folder.path(), &args)?;
        let line = server.wait_for_line("volume server ready", START_LIMIT)?;
        let address = line.split("listening=").nth(1).and_then(|rest| rest.split(' ').next());
        let address = address.ok_or_else(|| format!("the server does not say where it listens: {line}"))?.to_owned();
        Ok((server, address))
    }

    fn mount(&mut self) -> Result<()> {
        let args =
            ["volume", "mount", VOLUME, FILES, "--take-over", "--copy-timeout", "1s", TOKEN, "token", "--no-ring"];
        let args = if self.by == By::Ring { &args[..args.len() - 1] } else { &args };
        let mut mounted = started(self.program, self.folder.path(), args)?;
        let line = mounted.wait_for_line("files mounted", START_LIMIT)?;
        if !line.contains(&format!("{:?}", self.by)) {
            return Err(format!("the kernel asks in another way: {line}").into());
        }
        self.mounted = Some(mounted);
        Ok(())
    }

    /// The directory of the files.
    fn files(&self) -> PathBuf {
        self.folder.path().join(FILES)
    }

    /// A folder on this machine's disk, which no mount hides.
    fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// A server dies.
    fn kill_server(&mut self, number: usize) -> Result<()> {
        Ok(self.servers[number].0.kill()?)
    }

    /// It is there again, without its memory.
    fn start_server(&mut self, number: usize) -> Result<()> {
        let address = self.servers[number].1.clone();
        self.servers[number] = self.serve(&address)?;
        Ok(())
    }

    /// Whether all three copies are whole.
    fn is_whole(&self) -> Result<bool> {
        let status = ["volume", "status", VOLUME, "--json", TOKEN, "token"];
        Ok(ended_well(self.program, self.folder.path(), &status)?.matches("\"state\":\"whole\"").count() == 3)
    }

    /// Unmounts the files and mounts them again: what is read then comes from the servers.
    fn mount_again(&mut self) -> Result<()> {
        self.unmount()?;
        self.mount()
    }

    fn unmount(&mut self) -> Result<()> {
        let Some(mut mounted) = self.mounted.take() else { return Ok(()) };
        mounted.signal(Signal::TERM)?;
        Ok(mounted.wait_for_success(START_LIMIT)?)
    }

    /// Ends all, and fails if the mount does not end well.
    fn end(mut self) -> Result<()> {
        self.unmount()
    }

    /// Runs a command in the directory of the files. Returns what it says, on both streams; fails with its last lines.
    fn run(&self, command: &mut Command) -> Result<String> {
        let ran = command.current_dir(self.files()).output();
        let name = command.get_program().to_string_lossy().into_owned();
        let ran =
            ran.map_err(|error| format!("the program {name}: {error}; call `make prove-files`, which installs it"))?;
        let said = [ran.stdout, ran.stderr].concat();
        let said = String::from_utf8_lossy(&said).into_owned();
        if ran.status.success() {
            return Ok(said);
        }
        let last: Vec<&str> = said.lines().rev().take(LAST_LINES).collect();
        let last: Vec<&str> = last.into_iter().rev().collect();
        Err(format!("{name}: {}: {}", ran.status, last.join("\n")).into())
    }
}

impl Drop for Scene<'_> {
    fn drop(&mut self) {
        self.mounted = None;
        let _ = rustix::mount::unmount(self.files(), UnmountFlags::DETACH); // usually nothing is mounted there any more
    }
}

/// A program that `dev/lab/setup/setup --proofs` has put into the project's cache.
fn built(name: &str) -> Command {
    Command::new(project_root().join(".cache/proofs/bin").join(name))
}

const VOLUME: &str = "files.volume";
const FILES: &str = "files";

/// Of the volume: a clone of this project, and what is built there. Each server has memory for it and its entries.
const SIZE: &str = "1GiB";
const MEMORY: &str = "1100MiB";

/// Of a program that fails.
const LAST_LINES: usize = 12;

// What each proof runs, and what it must say.

fn prove(proof: Proof, scene: &mut Scene<'_>, times: u32) -> Result<String> {
    match proof {
        Proof::Fsx => fsx(scene, times),
        Proof::Posix => prove_posix(scene),
        Proof::Verify => verify(scene, times),
        Proof::Stress => stress(scene, times),
        Proof::Build => build(scene),
        Proof::Rsync => rsync(scene),
    }
}

/// Several seeds. The files are mapped, truncated, punched and read again.
fn fsx(scene: &Scene<'_>, times: u32) -> Result<String> {
    let (seeds, operations) = (4 * times, 5000);
    for seed in 1..=seeds {
        let file = format!("fsx.{seed}");
        let mut command = built("fsx");
        command.args(["-N", &operations.to_string(), "-S", &seed.to_string(), "-P"]).arg(scene.folder()).arg(&file);
        scene.run(&mut command)?;
    }
    Ok(format!("{seeds} seeds, {operations} operations each"))
}

/// Two files are written in random order, block by block with checksums, and read again; meanwhile each server dies
/// once, and comes back without its memory. Then the files are mounted again, and everything is read once more.
fn verify(scene: &mut Scene<'_>, times: u32) -> Result<String> {
    let seconds = 15 * times;
    let files = scene.files();
    let options = |more: &[&str]| {
        let mut command = Command::new("fio");
        command.args(["--name=verify", "--size=96m", "--numjobs=2", "--bs=4k", "--rw=randwrite", "--verify=crc32c"]);
        command.args([
            "--verify_fatal=1",
            "--fallocate=none",
            "--randseed=7",
            "--ioengine=libaio",
            "--iodepth=8",
            "--verify_state_save=0",
        ]);
        command.arg(format!("--directory={}", files.display())).args(more);
        command
    };
    // The same blocks again and again, each lap checked.
    let (runtime, laps) = (format!("--runtime={seconds}"), ["--time_based", "--direct=1", "--verify_backlog=1024"]);
    let mut lap = options(&[laps[0], laps[1], laps[2], &runtime]);
    let writing = thread::spawn(move || lap.output());
    for number in 0..3 {
        thread::sleep(Duration::from_secs(u64::from(seconds)) / 12);
        scene.kill_server(number)?;
        thread::sleep(Duration::from_secs(u64::from(seconds)) / 12);
        scene.start_server(number)?;
        wait_until("three whole copies", WHOLE_LIMIT, || {
            Ok(match scene.is_whole() {
                Ok(true) => Ok(()),
                Ok(false) => Err("fewer".to_owned()),
                Err(error) => Err(error.to_string()),
            })
        })?;
    }
    let wrote = writing.join().map_err(|_| "the thread of fio has panicked")??;
    if !wrote.status.success() {
        return Err(format!("fio, while servers died: {}", String::from_utf8_lossy(&wrote.stderr).trim()).into());
    }
    scene.run(&mut options(&["--direct=0", "--end_fsync=1", "--do_verify=0"]))?;
    scene.mount_again()?;
    scene.run(&mut options(&["--direct=0", "--verify_only"]))?;
    Ok(format!("{seconds} s of random writes while each of three servers died once; read again after a new mount"))
}

/// Those of stress-ng that are about files, one after the other, with `--verify`.
fn stress(scene: &Scene<'_>, times: u32) -> Result<String> {
    let seconds = (3 * times).to_string();
    for name in STRESSORS {
        let mut command = Command::new("stress-ng");
        command.args([&format!("--{name}"), "2", "--timeout", &seconds, "--verify", "--temp-path", ".", "--quiet"]);
        command.args(["--hdd-bytes", "16m", "--iomix-bytes", "16m", "--sync-file-bytes", "4m"]);
        command.args(["--fallocate-bytes", "16m", "--readahead-bytes", "16m", "--revio-bytes", "16m"]);
        scene.run(&mut command).map_err(|error| format!("{name}: {error}"))?;
    }
    Ok(format!("{} stressors, {seconds} s each: {}", STRESSORS.len(), STRESSORS.join(", ")))
}

/// What needs extended attributes, devices or another file system is not here.
const STRESSORS: [&str; 20] = [
    "chmod",
    "chown",
    "copy-file",
    "dentry",
    "dir",
    "dirdeep",
    "dirmany",
    "fallocate",
    "filename",
    "fpunch",
    "getdent",
    "hdd",
    "iomix",
    "link",
    "mmap",
    "rename",
    "seek",
    "symlink",
    "sync-file",
    "utime",
];

/// This project is cloned into the files, found intact, and a crate of it is built and tested there.
fn build(scene: &mut Scene<'_>) -> Result<String> {
    let project = project_root();
    let mut clone = Command::new("git");
    clone.args(["clone", "--quiet", "--no-hardlinks"]).arg(&project).arg("clone");
    scene.run(&mut clone)?;
    scene.run(Command::new("git").args(["-C", "clone", "fsck", "--strict", "--no-progress"]))?;
    let begun = Instant::now();
    let mut test = cargo();
    test.args(["test", "--quiet", "--locked", "--offline", "-p", "remora-wire"]);
    test.args(["--manifest-path", "clone/Cargo.toml", "--target-dir", "built"]);
    scene.run(&mut test)?;
    let took = begun.elapsed().as_secs_f64();
    scene.mount_again()?;
    scene.run(Command::new("git").args(["-C", "clone", "fsck", "--strict", "--no-progress"]))?;
    let status = scene.run(Command::new("git").args(["-C", "clone", "status", "--porcelain"]))?;
    if !status.is_empty() {
        return Err(format!("after a new mount, git sees changes: {status}").into());
    }
    Ok(format!(
        "cloned, checked by git fsck before and after a new mount; a crate was built and tested there in {took:.0} s"
    ))
}

/// A tree with links, odd names, holes and modes, to the files and, after a new mount, back. rsync compares by
/// checksum.
fn rsync(scene: &mut Scene<'_>) -> Result<String> {
    let (there, back) = (scene.files().join("there"), scene.folder().join("back"));
    let from = scene.folder().join("from");
    let mut make = Command::new("bash");
    make.args(["-euc", MAKE_TREE, "make"]).arg(&from).arg(project_root());
    scene.run(&mut make)?;
    let copy = |from: &std::path::Path, to: &std::path::Path, more: &[&str]| {
        let mut command = Command::new("rsync");
        command.args(["--archive", "--hard-links", "--sparse", "--checksum", "--numeric-ids"]).args(more);
        command.arg(format!("{}/", from.display())).arg(to);
        command
    };
    scene.run(&mut copy(&from, &there, &[]))?;
    scene.mount_again()?;
    scene.run(&mut copy(&there, &back, &[]))?;
    for (one, other) in [(&from, &there), (&from, &back)] {
        let differences = scene.run(&mut copy(one, other, &["--dry-run", "--delete", "--itemize-changes"]))?;
        if !differences.is_empty() {
            return Err(format!("{} and {} differ: {differences}", one.display(), other.display()).into());
        }
    }
    let count = scene.run(Command::new("bash").args(["-c", "find there | wc -l"]))?;
    Ok(format!(
        "{} names there, and back after a new mount, with the same contents, modes, owners, times and links",
        count.trim()
    ))
}

const MAKE_TREE: &str = r#"
mkdir "$1"
cp --archive "$2"/docs "$2"/volume "$2"/fuse "$1"
cd "$1"
ln bench/report.md hard
ln -s docs/nowhere dangling
printf x > $'new\nline'
printf x > "$(printf 'n%.0s' {1..255})"
mkfifo pipe
truncate --size 1G holes && printf end >> holes
for number in {1..2000}; do printf '%s' "$number" > "docs/$number"; done
chmod 4711 docs/1; chmod 0 docs/2; chown 1234:5678 docs/3; touch --date @1000000000.123456789 docs/4
"#;

/// Until a server that came back has its copy again.
const WHOLE_LIMIT: Duration = Duration::from_secs(60);

// pjdfstest: what POSIX says of system calls on files, a test for each sentence.

/// Runs all of its tests. One that fails must be in [`OF_DEVICES`], and one that is there must fail.
fn prove_posix(scene: &Scene<'_>) -> Result<String> {
    let configuration = scene.folder().join("pjdfstest.toml");
    std::fs::write(&configuration, text())?;
    let other = scene.folder().join("other");
    std::fs::create_dir(&other)?;
    let mut command = built("pjdfstest");
    command.env("NO_COLOR", "1").arg("--configuration-file").arg(&configuration);
    command.arg("--path").arg(scene.files()).arg("--secondary-fs").arg(&other);
    let said = scene.run(&mut command)?;
    let summary = said.lines().rev().find(|line| line.starts_with("Summary")).ok_or("it printed no summary")?;
    Ok(format!("{} (those that fail, and why: dev/xtask/src/prove.rs)", summary.trim_start_matches("Summary: ")))
}

/// What the file system has, users that every Debian has, and what must fail.
fn text() -> String {
    let mut text = String::from(
        "[features]\nposix_fallocate = {}\nrename_ctime = {}\nutime_now = {}\nutimensat = {}\n\n\
         [dummy_auth]\nentries = [[\"nobody\", \"nogroup\"], [\"daemon\", \"daemon\"]]\n\n\
         [settings]\nnaptime = 0.01\nallow_remount = false\nexpected_failures = [\n",
    );
    for name in OF_DEVICES {
        let _ = writeln!(text, "  \"{name}::block\",\n  \"{name}::char\",");
    }
    text + "]\n"
}

/// Tests that fail here, once for block devices and once for character devices: a volume has none, and `mknod` says
/// `EPERM`. Everything else holds.
const OF_DEVICES: [&str; 43] = [
    "chmod::change_perm",
    "chmod::enotdir_component",
    "chmod::failed_chmod_unchanged_ctime",
    "chmod::update_ctime",
    "chown::enotdir_component",
    "chown::lchown::enotdir_component",
    "link::changed_ctime_success",
    "link::eexist_dest_exists",
    "link::enotdir_component_either",
    "link::remove_link",
    "link::share_metadata",
    "link::unchanged_ctime_fails",
    "mkdir::eexist_file_exists",
    "mkdir::enotdir_component",
    "mkfifo::eexist_file_exists",
    "mkfifo::enotdir_component",
    "mknod::changed_times_success",
    "mknod::device_files",
    "mknod::eexist_file_exists",
    "mknod::enotdir_comp_char_block",
    "mknod::enotdir_component",
    "mknod::privileged::eexist_file_exists",
    "open::eexist_file_exists",
    "rename::changed_ctime_success",
    "rename::eexist_enotempty_to_non_empty",
    "rename::eisdir_to_dir_from_not_dir",
    "rename::enotdir_component_either",
    "rename::enotdir_from_dir_to_not_dir",
    "rename::preserve_metadata",
    "rename::to_multiply_linked",
    "rename::unchanged_ctime_failed",
    "rmdir::eexist_enotempty_non_empty_dir",
    "rmdir::enotdir_component",
    "symlink::create_symlink",
    "symlink::eexist_file_exists",
    "symlink::enotdir_component",
    "truncate::enotdir_component",
    "unlink::enotdir_component",
    "unlink::remove_type",
    "unlink::unchanged_ctime_failed",
    "unlink::update_ctime_success",
    "unlink::update_mtime_ctime_success_folder",
    "utimensat::changes_timestamps",
];
