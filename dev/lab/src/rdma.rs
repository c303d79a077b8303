//! A small machine with RDMA devices: Debian's kernel in QEMU with Soft-RoCE, this host's files, and one command.
//!
//! The machine is not a service: it boots, runs the command, and ends. The script `dev/lab/rdma-vm/rdma-vm` does the
//! work, and its README describes the guest. This module finds the script, prepares the machine, and sets its limits.
//!
//! A test that runs in the machine is an ordinary test of the same program, marked `#[ignore]` for the host. One test
//! that is not ignored boots the machine once and runs the ignored tests there.

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use crate::{Doing, Error, Result};
use crate::{process, scratch};

/// A machine that is ready to boot.
#[derive(Clone, Debug)]
pub struct RdmaVm {
    script: PathBuf,
    nodes: u8,
    limit: Duration,
    writable: Vec<PathBuf>,
}

impl RdmaVm {
    /// Downloads and builds the machine's parts, once per host. Later calls take no time.
    ///
    /// # Errors
    /// [`Error::Missing`], with what this host lacks.
    pub fn ready() -> Result<RdmaVm> {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("rdma-vm/rdma-vm");
        let mut command = Command::new(&script);
        command.arg("--build");
        let built = command.output().doing(|| format!("run {}", script.display()))?;
        if !built.status.success() {
            let said = String::from_utf8_lossy(&built.stderr).trim().to_owned();
            return Err(Error::Missing { what: format!("the RDMA machine ({said})"), how: "call `make setup`".into() });
        }
        Ok(RdmaVm { script, nodes: 1, limit: Duration::from_secs(600), writable: Vec::new() })
    }

    /// Sets the number of nodes, 1 to 9: each has its own RDMA device, with the address [`RdmaVm::address`].
    #[must_use]
    pub fn nodes(mut self, nodes: u8) -> RdmaVm {
        self.nodes = nodes;
        self
    }

    /// Sets a time limit, which includes booting.
    #[must_use]
    pub fn limit(mut self, limit: Duration) -> RdmaVm {
        self.limit = limit;
        self
    }

    /// Keeps what is written below `folder`.
    #[must_use]
    pub fn writable(mut self, folder: &Path) -> RdmaVm {
        self.writable.push(folder.to_owned());
        self
    }

    /// The address of node `number`, counted from 0.
    pub fn address(number: u8) -> std::net::Ipv4Addr {
        std::net::Ipv4Addr::new(10, 77, 0, number + 1)
    }

    /// Whether this process runs in such a machine.
    pub fn is_here() -> bool {
        std::env::var_os("RDMA_VM").is_some()
    }

    /// Boots the machine, runs `command` there (program and arguments, without a shell), and waits for its end. The
    /// command's output is in `stdout`. If the machine itself failed, its console is in `stderr`.
    ///
    /// # Errors
    /// [`Error::Io`] if the machine cannot be started.
    pub fn run(&self, command: &[&str]) -> Result<Output> {
        let mut run = Command::new(&self.script);
        run.args(["-n", &self.nodes.to_string(), "-t", &self.limit.as_secs().to_string(), "-m", "3072"]);
        for folder in &self.writable {
            run.arg("-w").arg(folder);
        }
        // The guest has no package network: a test that is skipped there is a mistake, in CI or not.
        run.args(["-e", "CI=true", "-e", "RUST_BACKTRACE", "-e", "REMORA_LOG", "--"]).args(command);
        run.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let machine = process::spawn(run).doing(|| format!("start {}", self.script.display()))?;
        machine.wait_with_output().doing(|| format!("wait for {}", self.script.display()))
    }

    /// Makes a file that is a disk of 32 MiB with a system of its own, which keeps files there (`disk-init` beside the
    /// script).
    ///
    /// # Errors
    /// [`Error::Io`] if the script cannot be started, [`Error::Missing`] with what it says.
    pub fn make_disk(&self, file: &Path) -> Result<()> {
        let mut command = Command::new(&self.script);
        let made = command.arg("--disk").arg(file).output().doing(|| format!("run {}", self.script.display()))?;
        if made.status.success() {
            return Ok(());
        }
        let said = String::from_utf8_lossy(&made.stderr).trim().to_owned();
        Err(Error::Missing { what: format!("a disk that boots ({said})"), how: "call `make setup`".into() })
    }

    /// The command that boots a machine whose only disk has this URL, as QEMU knows it. Its console is the command's
    /// output. A signal to it is one to the machine: `SIGKILL` cuts its power.
    pub fn boot(&self, url: &str) -> Command {
        let mut command = Command::new(&self.script);
        command.args(["--boot", url]);
        command
    }

    /// Runs the ignored tests of the calling program whose names begin with `prefix`, and returns how many passed.
    ///
    /// # Panics
    /// If a test fails, or none is found; the message contains the whole output.
    pub fn run_ignored_tests(&self, prefix: &str, at_once: u8) -> usize {
        let this_program = std::env::current_exe().unwrap_or_default();
        let at_once = format!("--test-threads={at_once}");
        let run = || {
            let ran = self.run(&[&this_program.to_string_lossy(), "--ignored", prefix, &at_once]);
            ran.unwrap_or_else(|error| panic!("{error}"))
        };
        let mut ran = run();
        if !ran.status.success() && String::from_utf8_lossy(&ran.stderr).contains(KERNEL_HUNG) {
            scratch::note(&format!(
                "the guest's kernel hung (this happens with Soft-RoCE of Linux 6.1), so the tests {prefix} ran again in \
                 a new machine"
            ));
            ran = run();
        }
        let (said, console) = (String::from_utf8_lossy(&ran.stdout), String::from_utf8_lossy(&ran.stderr));
        assert!(ran.status.success(), "{}\n{said}\n{console}", process::in_words(ran.status));
        let passed =
            said.lines().find_map(|line| line.strip_prefix("test result: ok. ")?.split(' ').next()?.parse().ok());
        let passed = passed.filter(|passed| *passed > 0);
        passed.unwrap_or_else(|| panic!("no test of the name {prefix} was run:\n{said}"))
    }
}

/// What the guest's kernel logs about a task that it blocks. The program under test cannot cause it.
const KERNEL_HUNG: &str = "blocked for more than";
