//! A mounted file system in namespaces of its own: see `dev/bench/rivals/files`.

use std::ffi::OsStr;
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{ChildStderr, ChildStdout, Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use remora_lab::process::Process;
use remora_lab::scratch;
use tempfile::TempDir;

use super::cases::Subject;
use crate::sync::Result;

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
    ///
    /// # Errors
    /// A program of it is missing, or it cannot be mounted; the script has said more on standard error.
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
    ///
    /// # Errors
    /// `/proc` cannot be read.
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
