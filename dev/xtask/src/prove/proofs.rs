//! What each proof runs, and what it must say.

use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use remora_bench::sync::Result;
use remora_lab::server::{project_root, wait_until};

use super::Proof;
use super::posix;
use super::scene::{Scene, built};
use crate::process::cargo;

pub(super) fn run(proof: Proof, scene: &mut Scene<'_>, times: u32) -> Result<String> {
    match proof {
        Proof::Fsx => fsx(scene, times),
        Proof::Posix => posix::run(scene),
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
