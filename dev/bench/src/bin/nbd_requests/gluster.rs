//! GlusterFS: a volume of three replicas on this host, in memory, as a file in its FUSE mount.
//!
//! It has namespaces of its own, which fio enters. See `dev/bench/rivals/gluster`.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};

use remora_lab::process::Process;

use super::Failure;

/// A mounted volume. Dropping it ends all of it.
pub(super) struct Gluster {
    process: Process,
    /// The first process of its namespaces.
    first: u32,
    folder: String,
}

impl Gluster {
    /// Starts it, and waits until it is mounted.
    pub(super) fn start(mib: u64) -> Result<Gluster, Failure> {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("rivals/gluster");
        let mut command = Command::new("unshare");
        command.args(["--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]).arg(script);
        command.arg(mib.to_string()).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::inherit());
        let (process, pipes) = Process::start("gluster", command)?;
        let mut line = String::new();
        BufReader::new(pipes.stdout.ok_or("no output")?).read_line(&mut line)?;
        let folder = line.trim().strip_prefix("ready ").ok_or("it was not mounted")?.to_owned();
        let children = fs::read_to_string(format!("/proc/{0}/task/{0}/children", process.pid()))?;
        let first = children.split_whitespace().next().ok_or("it has ended")?.parse()?;
        Ok(Gluster { process, first, folder })
    }

    /// fio on a file there, without the kernel's cache.
    pub(super) fn fio(&self) -> Command {
        let mut command = Command::new("nsenter");
        command.args([
            "--target",
            &self.first.to_string(),
            "--mount",
            "--net",
            "fio",
            "--ioengine=libaio",
            "--direct=1",
        ]);
        command.arg(format!("--filename={}/data", self.folder));
        command
    }

    /// Processor seconds of its processes so far: servers, and the mount.
    pub(super) fn cpu_seconds(&self) -> Result<f64, Failure> {
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
