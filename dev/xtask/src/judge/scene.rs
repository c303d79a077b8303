//! A place for runs: the programs where every user can read them, and for each file a fresh copy of its suite.
//!
//! ```text
//!   /tmp/remora-judge-…/bin         remora, the module
//!                      /redis-7.0   the server's programs
//!                      /run         suite/ a copy, src/redis-server = dev/judge/wrapper; state/ tokens, locks, agents' logs
//! ```
//!
//! A file runs in network and process namespaces of its own (`dev/judge/inside`): its ports are free, its rules are
//! nobody else's, and no process is left.

use std::fs;
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use remora_bench::sync::Result;
use remora_lab::scratch;
use remora_lab::server::{module_library, project_root};
use tempfile::TempDir;

use super::With;
use super::outcome::Outcome;
use super::suite::Suite;
use crate::process::succeed;

/// The place of a run.
#[derive(Debug)]
pub(super) struct Scene {
    folder: TempDir,
    remora: PathBuf,
    module: PathBuf,
}

/// What one file did.
#[derive(Debug)]
pub(super) struct Played {
    pub(super) outcome: Outcome,
    pub(super) took: Duration,
    pub(super) copies: Copies,
    /// What the agents' logs have that no log may have.
    pub(super) wrong: Vec<String>,
}

/// What `attend` did of the full copies that the servers asked for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Copies {
    /// Begun from a source.
    pub(super) served: usize,
    /// Brought to their end: the server follows its primary by itself.
    pub(super) completed: usize,
    /// Left to the primary.
    pub(super) passed: usize,
}

impl Scene {
    /// Copies the programs.
    pub(super) fn set(remora: &Path) -> Result<Scene> {
        let folder = scratch::folder("judge")?;
        fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755))?;
        let bin = folder.path().join("bin");
        fs::create_dir(&bin)?;
        let (to, module) = (bin.join("remora"), bin.join("libremora_module.so"));
        fs::copy(remora, &to)?;
        fs::copy(module_library()?, &module)?;
        Ok(Scene { remora: to, module, folder })
    }

    /// Runs a file, and keeps what it printed, and what the agents did, under this path.
    pub(super) fn play(&self, suite: Suite, file: &str, with: With, keep: &Path) -> Result<Played> {
        let programs = self.programs(suite)?;
        let run = self.folder.path().join("run");
        if run.exists() {
            fs::remove_dir_all(&run)?;
        }
        let (copy, state) = (run.join("suite"), run.join("state"));
        self.copy(suite, with, &programs, &copy)?;
        self.state(&state)?;
        let mut command = Command::new("timeout");
        command.args(["--kill-after=10", &FILE_LIMIT.as_secs().to_string()]);
        command.args(["unshare", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]);
        let ours = project_root().join("dev/judge");
        command.arg(ours.join("inside")).arg(file).current_dir(&copy);
        let remora = if with == With::Nothing { Path::new("") } else { &self.remora };
        let module = if with == With::Module { &self.module } else { Path::new("") };
        command.env("JUDGE_REMORA", remora).env("JUDGE_MODULE", module).env("JUDGE_STATE", &state);
        command.env("JUDGE_PROGRAMS", &programs).env("JUDGE_BESIDE", ours.join("beside"));
        command.env("JUDGE_FIRST", FIRST.to_string()).env("JUDGE_PORTS", PORTS.to_string());
        command.env("JUDGE_USER", USER.to_string()).env("JUDGE_AGENT", AGENT.to_string());
        fs::create_dir_all(keep.parent().ok_or("the log has no folder")?)?;
        let log = keep.with_extension("log");
        let output = fs::File::create(&log)?;
        command.stdin(Stdio::null()).stdout(output.try_clone()?).stderr(output);
        let begun = Instant::now();
        let status = command.status().map_err(|error| format!("{command:?} could not be started: {error}"))?;
        let took = begun.elapsed();
        let text = String::from_utf8_lossy(&fs::read(&log)?).into_owned();
        let mut outcome = Outcome::read(&text);
        match status.code() {
            Some(NO_NAMESPACE) => return Err(format!("{file} has no namespace: {}", text.trim_end()).into()),
            Some(OVER_TIME | KILLED) | None => {
                outcome.breaks(format!("it did not end within {} s", FILE_LIMIT.as_secs()));
            }
            _ => {}
        }
        let (copies, wrong) = self.keep(&run, with, &outcome, keep)?;
        Ok(Played { outcome, took, copies, wrong })
    }

    /// The server's programs, where its user can read them.
    fn programs(&self, suite: Suite) -> Result<PathBuf> {
        let to = self.folder.path().join(suite.name());
        if !to.exists() {
            succeed(Command::new("cp").args(["-a", "--"]).arg(suite.cache()?.join("programs")).arg(&to))?;
        }
        Ok(to)
    }

    /// A copy of the suite, in which Remora stands beside every server.
    fn copy(&self, suite: Suite, with: With, programs: &Path, to: &Path) -> Result<()> {
        fs::create_dir_all(to.parent().unwrap_or(to))?;
        succeed(
            Command::new("cp").args(["-a", "--no-preserve=ownership", "--"]).arg(suite.cache()?.join("source")).arg(to),
        )?;
        let adapted = suite.ours().join("adapted.patch");
        let mut patch = Command::new("patch");
        patch.args(["--strip=1", "--fuzz=0", "--silent", "--no-backup-if-mismatch"]);
        succeed(patch.arg("--directory").arg(to).arg("--input").arg(&adapted))?;
        for program in fs::read_dir(programs)? {
            let program = program?;
            if program.file_type()?.is_dir() {
                continue;
            }
            let place = to.join("src").join(program.file_name());
            if with != With::Nothing && program.file_name() == suite.server() {
                fs::copy(project_root().join("dev/judge/wrapper"), &place)?;
            } else {
                std::os::unix::fs::symlink(program.path(), &place)?;
            }
        }
        fs::create_dir_all(to.join("tests/tmp"))?;
        for open in [to, &to.join("tests"), &to.join("tests/tmp")] {
            fs::set_permissions(open, fs::Permissions::from_mode(0o777))?;
        }
        Ok(())
    }

    /// What the agents need.
    fn state(&self, state: &Path) -> Result<()> {
        fs::create_dir(state)?;
        let home = state.join("home");
        fs::create_dir(&home)?;
        fs::set_permissions(&home, fs::Permissions::from_mode(0o700))?;
        let token = scratch::token_file(state)?;
        for owned in [&home, &token] {
            chown(owned, Some(AGENT), Some(AGENT))?;
        }
        Ok(())
    }

    /// Keeps the agents' logs, and those of the servers after a failure; counts what the agents did.
    fn keep(&self, run: &Path, with: With, outcome: &Outcome, keep: &Path) -> Result<(Copies, Vec<String>)> {
        let (agents, servers) = (keep.with_extension("agents"), keep.with_extension("servers"));
        for old in [&agents, &servers] {
            if old.exists() {
                fs::remove_dir_all(old)?;
            }
        }
        let (mut copies, mut wrong) = (Copies::default(), Vec::new());
        if with != With::Nothing {
            fs::create_dir_all(&agents)?;
            for log in fs::read_dir(run.join("state"))? {
                let path = log?.path();
                let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
                if !["attend", "source", "beside"].iter().any(|agent| name.ends_with(&format!(".{agent}"))) {
                    continue;
                }
                let text = String::from_utf8_lossy(&fs::read(&path)?).into_owned();
                copies.served += text.matches("the source serves it").count();
                copies.completed += text.matches("the server follows its primary by itself").count();
                copies.passed += text.matches("cannot serve it").count();
                wrong.extend(text.lines().filter(|line| is_wrong(line)).map(|line| format!("{name}: {line}")));
                fs::write(agents.join(&name), text)?;
            }
        }
        if outcome.has_failed() || !wrong.is_empty() {
            for server in fs::read_dir(run.join("suite/tests/tmp"))? {
                let server = server?;
                let log = server.path().join("stdout");
                if log.exists() {
                    fs::create_dir_all(&servers)?;
                    fs::copy(&log, servers.join(server.file_name()))?;
                }
            }
        }
        Ok((copies, wrong))
    }
}

/// What no agent may say: it panicked, or it came to an end that has no exit code of ours.
fn is_wrong(line: &str) -> bool {
    line.contains("panicked at") || line.contains(" ended: 101")
}

/// The first port of the servers. Those of their agents are 500 and 800 higher, and a cluster's buses 10,000.
const FIRST: u16 = 21_000;

/// How many ports servers may have: more than one file's servers, fewer than the kernel's set of ports holds.
const PORTS: u16 = 24;

/// The user of the server at the first port.
const USER: u32 = 30_000;

/// The user of the agents.
const AGENT: u32 = 31_000;

/// How long one file may take: twice the longest on a busy machine.
const FILE_LIMIT: Duration = Duration::from_secs(1200);

/// What `dev/judge/inside` and timeout(1) end with.
const NO_NAMESPACE: i32 = 125;
const OVER_TIME: i32 = 124;
const KILLED: i32 = 137;
