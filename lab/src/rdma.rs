//! A small machine that has RDMA devices: Debian's kernel in QEMU with Soft-RoCE, this host's files, and one command in it.
//!
//! Not a service that one talks to: it boots, runs the command, and is gone. Everything is in the script `lab/rdma-vm/rdma-vm`, whose
//! README says what is in the guest; here a test finds it, has it built, and bounds it.
//!
//! A test that runs in there is an ordinary one of the same program, marked `#[ignore]` for the host: the one that is not ignored boots
//! the machine once and has the program run the ignored ones.

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use crate::error::{Doing, Error, Result};
use crate::process;

/// A machine that is ready to boot.
#[derive(Clone, Debug)]
pub struct RdmaVm {
    script: PathBuf,
    nodes: u8,
    limit: Duration,
    writable: Vec<PathBuf>,
}

impl RdmaVm {
    /// Gets what it is made of, once per machine; after that it takes no time.
    ///
    /// # Errors
    /// [`Error::Missing`], with what this machine lacks.
    pub fn ready() -> Result<RdmaVm> {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("rdma-vm/rdma-vm");
        let mut command = Command::new(&script);
        command.arg("--build");
        let built = command.output().doing(|| format!("run {}", script.display()))?;
        if !built.status.success() {
            let said = String::from_utf8_lossy(&built.stderr).trim().to_owned();
            return Err(Error::Missing { what: format!("the RDMA machine ({said})"), how: "call `make setup`".into() });
        }
        Ok(RdmaVm { script, nodes: 1, limit: Duration::from_secs(240), writable: Vec::new() })
    }

    /// So many nodes, 1 to 9: each an RDMA device of its own, with the address [`RdmaVm::address`].
    #[must_use]
    pub fn nodes(mut self, nodes: u8) -> RdmaVm {
        self.nodes = nodes;
        self
    }

    /// Ends it after this time, booting included.
    #[must_use]
    pub fn limit(mut self, limit: Duration) -> RdmaVm {
        self.limit = limit;
        self
    }

    /// What is written below `folder` is kept.
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

    /// Boots it, runs `command` there (program and arguments, literally), and waits for its end. Its output is in `stdout`; where the
    /// machine itself failed, its console is in `stderr`.
    ///
    /// # Errors
    /// [`Error::Io`] if it can't be started.
    pub fn run(&self, command: &[&str]) -> Result<Output> {
        let mut run = Command::new(&self.script);
        run.args(["-n", &self.nodes.to_string(), "-t", &self.limit.as_secs().to_string(), "-m", "3072"]);
        for folder in &self.writable {
            run.arg("-w").arg(folder);
        }
        // Inside there is no network of packages: a test that has to be skipped there is a mistake, whoever runs it.
        run.args(["-e", "CI=true", "-e", "RUST_BACKTRACE", "-e", "REMORA_LOG", "--"]).args(command);
        run.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let machine = process::spawn(run).doing(|| format!("start {}", self.script.display()))?;
        machine.wait_with_output().doing(|| format!("wait for {}", self.script.display()))
    }

    /// Runs the ignored tests of the program that calls this, those whose names begin with `prefix`, and says how many passed.
    ///
    /// # Panics
    /// If one fails, or none is found: with everything that was printed.
    pub fn run_ignored_tests(&self, prefix: &str, at_once: u8) -> usize {
        let this_program = std::env::current_exe().unwrap_or_default();
        let at_once = format!("--test-threads={at_once}");
        let run = || {
            let ran = self.run(&[&this_program.to_string_lossy(), "--ignored", prefix, &at_once]);
            ran.unwrap_or_else(|error| panic!("{error}"))
        };
        let mut ran = run();
        if !ran.status.success() && String::from_utf8_lossy(&ran.stderr).contains(KERNEL_HUNG) {
            eprintln!(
                "the machine's own kernel hung (Soft-RoCE of Linux 6.1 has been seen to): once more, in another one"
            );
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

/// What the guest's kernel says of a task that it does not let go of, whatever the program does: no fault of the program's.
const KERNEL_HUNG: &str = "blocked for more than";
