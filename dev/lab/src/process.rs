//! Child processes: started so that none outlives the test, and measured through `/proc`.
//!
//! This is not a supervisor: one process has one owner. [`crate::Server`] and [`crate::Agent`] are built on it.
//!
//! A child asks the kernel to kill it when its parent ends (`PR_SET_PDEATHSIG`), so a test that ends by `kill -9` or a
//! time-out leaves no server behind. The kernel's "parent" is the *thread* that forked, and the test harness ends a
//! thread with every test. So one thread forks all children, the nursery, which runs as long as the process.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::net::{SocketAddr, TcpStream};
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus};
use std::sync::OnceLock;
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, Signal, WaitId, WaitIdOptions, pidfd_getfd, pidfd_open};

use crate::{Doing, Error, Result};

/// One child process. It is killed when its owner is dropped, at the latest with the whole test.
#[derive(Debug)]
pub struct Process {
    name: String,
    pid: u32,
    state: State,
}

#[derive(Debug)]
enum State {
    Running(Child),
    /// Reaped: the id may belong to another process by now and must not be used any more.
    Ended {
        status: ExitStatus,
        cpu: f64,
    },
}

impl Process {
    /// Starts `command` in its own process group, so that a Ctrl-C at the terminal reaches the test, not its servers.
    pub fn start(name: impl Into<String>, mut command: Command) -> Result<(Process, Pipes)> {
        let name = name.into();
        command.process_group(0);
        let mut child = spawn(command).doing(|| format!("start {name}"))?;
        let pipes = Pipes { stdout: child.stdout.take(), stderr: child.stderr.take() };
        Ok((Process { name, pid: child.id(), state: State::Running(child) }, pipes))
    }

    /// The process id. After the end of the process, use it in messages only.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Program and process id, for messages.
    pub fn who(&self) -> String {
        format!("{} (pid {})", self.name, self.pid)
    }

    /// The exit status, if the process has ended. Reaps it; the CPU time stays available.
    pub fn ended(&mut self) -> Result<Option<ExitStatus>> {
        let child = match &mut self.state {
            State::Ended { status, .. } => return Ok(Some(*status)),
            State::Running(child) => child,
        };
        // Checked without reaping first: a zombie still has its CPU times in /proc.
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        let seen = rustix::process::waitid(WaitId::Pid(pid_of(self.pid)?), options)
            .doing(|| format!("look after {} (pid {})", self.name, self.pid))?;
        if seen.is_none() {
            return Ok(None);
        }
        let cpu = cpu_seconds(self.pid).unwrap_or_default();
        let status = child.wait().doing(|| format!("wait for {} (pid {})", self.name, self.pid))?;
        self.state = State::Ended { status, cpu };
        Ok(Some(status))
    }

    /// Waits for the end. `None` if the process still runs after `within`.
    pub fn wait(&mut self, within: Duration) -> Result<Option<ExitStatus>> {
        let deadline = Instant::now() + within;
        loop {
            if let Some(status) = self.ended()? {
                return Ok(Some(status));
            }
            if Instant::now() >= deadline {
                return Ok(None);
            }
            thread::sleep(POLL);
        }
    }

    /// Sends a signal. Does nothing if the process has ended.
    pub fn signal(&mut self, signal: Signal) -> Result<()> {
        if self.ended()?.is_some() {
            return Ok(());
        }
        // Not reaped (checked just now, and only `ended` reaps): the id still belongs to this child.
        rustix::process::kill_process(pid_of(self.pid)?, signal)
            .doing(|| format!("send {signal:?} to {} (pid {})", self.name, self.pid))
    }

    /// Sends SIGKILL to the process and all its descendants, and waits until it has ended.
    pub fn kill(&mut self) -> Result<ExitStatus> {
        if let Some(status) = self.ended()? {
            return Ok(status);
        }
        // Not reaped yet, so the group's id, which is its leader's, still belongs to this child.
        rustix::process::kill_process_group(pid_of(self.pid)?, Signal::KILL)
            .doing(|| format!("kill {}", self.who()))?;
        self.wait(KILL_TIME)?.ok_or_else(|| Error::TooLate {
            what: format!("the end of {} after SIGKILL", self.who()),
            waited: KILL_TIME,
            tail: String::new(),
        })
    }

    /// CPU seconds used so far, user and system, with those of children it has waited for. Also available after the
    /// end.
    pub fn cpu_seconds(&self) -> Result<f64> {
        match &self.state {
            State::Ended { cpu, .. } => Ok(*cpu),
            State::Running(_) => cpu_seconds(self.pid).doing(|| format!("read the CPU times of {}", self.who())),
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // A drop cannot report an error; the parent-death signal kills what could remain.
        let _ = self.kill();
    }
}

/// The ends of a child's output that its command requested as pipes.
#[derive(Debug)]
pub struct Pipes {
    /// Standard output.
    pub stdout: Option<std::process::ChildStdout>,
    /// Standard error.
    pub stderr: Option<std::process::ChildStderr>,
}

/// Starts a command so that it is killed when this process ends. Most callers want `Process` instead.
pub fn spawn(mut command: Command) -> io::Result<Child> {
    let parent = rustix::process::getpid();
    let die_with_parent = move || {
        rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
        // The parent may have ended between fork and prctl; then no signal would come.
        if rustix::process::getppid() != Some(parent) {
            return Err(io::Error::from_raw_os_error(rustix::io::Errno::SRCH.raw_os_error()));
        }
        Ok(())
    };
    // SAFETY: what runs between fork and exec must be async-signal-safe. The closure makes two system calls (prctl,
    // getppid), takes no lock and allocates nothing (an `io::Error` made from a number holds just that number).
    unsafe { command.pre_exec(die_with_parent) };

    let (reply, answer) = mpsc::channel();
    let gone = || io::Error::other("the thread that starts processes is gone");
    nursery().send(Birth { command, reply }).map_err(|_| gone())?;
    answer.recv().map_err(|_| gone())?
}

struct Birth {
    command: Command,
    reply: mpsc::Sender<io::Result<Child>>,
}

/// The thread that forks every child; see the module's documentation.
fn nursery() -> &'static mpsc::Sender<Birth> {
    static NURSERY: OnceLock<mpsc::Sender<Birth>> = OnceLock::new();
    NURSERY.get_or_init(|| {
        let (sender, births) = mpsc::channel::<Birth>();
        thread::spawn(move || {
            for Birth { mut command, reply } in births {
                // The caller has gone: the child's handle is dropped, and the child is killed with this process.
                let _ = reply.send(command.spawn());
            }
        });
        sender
    })
}

/// CPU seconds of a process, user and system, with those of children that it has waited for (such as a server's fork
/// children that have ended; a running child does not count).
pub fn cpu_seconds(pid: u32) -> io::Result<f64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat"))?;
    // The second field is the program's name in brackets, which may contain spaces and brackets.
    let numbers = stat.rsplit_once(')').map(|(_, rest)| rest).unwrap_or_default();
    // utime, stime, cutime, cstime are fields 14 to 17 counted from 1; the first two were split off with the name.
    let ticks: Vec<f64> = numbers.split_whitespace().skip(11).take(4).filter_map(|field| field.parse().ok()).collect();
    if ticks.len() != 4 {
        return Err(io::Error::other(format!("/proc/{pid}/stat does not have the format of proc(5)")));
    }
    Ok(ticks.iter().sum::<f64>() / rustix::param::clock_ticks_per_second() as f64)
}

/// Peak resident memory of a process, in bytes (`VmHWM`), including shared mappings.
pub fn peak_memory(pid: u32) -> io::Result<u64> {
    status_bytes(pid, "VmHWM:")
}

/// Resident memory of a process that is not shared with a file or memfd, in bytes (`RssAnon`).
pub fn private_memory(pid: u32) -> io::Result<u64> {
    status_bytes(pid, "RssAnon:")
}

fn status_bytes(pid: u32, field: &str) -> io::Result<u64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
    status
        .lines()
        .find_map(|line| line.strip_prefix(field))
        .and_then(|rest| rest.trim().strip_suffix(" kB"))
        .and_then(|kib| kib.trim().parse::<u64>().ok())
        .map(|kib| kib * 1024)
        .ok_or_else(|| io::Error::other(format!("process {pid} has no {field} (it has ended)")))
}

/// One memory file that a process holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Memfd {
    /// The name with which it was created.
    pub name: String,
    /// Its length in bytes.
    pub length: u64,
    /// The bytes that have pages.
    pub resident: u64,
}

/// The memory files that a process has open, each once, however many descriptors refer to it.
pub fn memfds(pid: u32) -> io::Result<Vec<Memfd>> {
    let mut found = BTreeMap::new();
    for entry in fs::read_dir(format!("/proc/{pid}/fd"))? {
        let path = entry?.path();
        // A descriptor may be closed meanwhile: then it is ignored.
        let (Ok(target), Ok(facts)) = (fs::read_link(&path), fs::metadata(&path)) else { continue };
        let target = target.to_string_lossy().into_owned();
        let Some(name) = target.strip_prefix("/memfd:") else { continue };
        let name = name.strip_suffix(" (deleted)").unwrap_or(name).to_owned();
        let memfd = Memfd { name, length: facts.len(), resident: facts.blocks() * STAT_BLOCK };
        found.insert((facts.dev(), facts.ino()), memfd);
    }
    Ok(found.into_values().collect())
}

/// The TCP connections of a process to `peer`, in the order of their descriptors. Each is another descriptor of the
/// same socket: `shutdown` breaks the connection of that process. A connection of which the process holds several
/// descriptors is returned once.
pub fn connections(pid: u32, peer: SocketAddr) -> Result<Vec<TcpStream>> {
    let failed = |error: Errno| Error::Io {
        doing: format!("could not take a descriptor of process {pid}"),
        source: error.into(),
    };
    let process = pidfd_open(pid_of(pid)?, PidfdFlags::empty()).map_err(failed)?;
    let folder = format!("/proc/{pid}/fd");
    let names = fs::read_dir(&folder).doing(|| format!("read {folder}"))?;
    let mut numbers: Vec<i32> = names.filter_map(|name| name.ok()?.file_name().to_str()?.parse().ok()).collect();
    numbers.sort_unstable();
    // A descriptor may be closed meanwhile, or be something other than a connection: then it is ignored.
    let taken = numbers.into_iter().filter_map(|number| pidfd_getfd(&process, number, PidfdGetfdFlags::empty()).ok());
    let streams = taken.map(TcpStream::from).filter(|stream| stream.peer_addr().is_ok_and(|address| address == peer));
    let mut seen = BTreeSet::new();
    Ok(streams.filter(|stream| seen.insert(stream.local_addr().ok())).collect())
}

/// An exit status as text: "exit status 3", "killed by signal 9".
pub fn in_words(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("exit status {code}"),
        (None, Some(signal)) => format!("killed by signal {signal}"),
        (None, None) => format!("{status}"),
    }
}

fn pid_of(pid: u32) -> Result<Pid> {
    i32::try_from(pid).ok().and_then(Pid::from_raw).ok_or_else(|| Error::Io {
        doing: format!("could not use process id {pid}"),
        source: io::ErrorKind::InvalidInput.into(),
    })
}

/// Interval between two checks of a process: short beside what tests measure, long beside the check itself.
const POLL: Duration = Duration::from_millis(5);

/// How long a killed process may take to end. Freeing tens of gigabytes takes seconds.
const KILL_TIME: Duration = Duration::from_secs(30);

/// The unit of `st_blocks`, in bytes, whatever the block size of the file system: stat(2).
const STAT_BLOCK: u64 = 512;

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn shell(script: &str) -> Process {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        Process::start("sh", command).unwrap().0
    }

    #[test]
    fn the_cpu_time_of_an_ended_process_is_still_known() {
        let mut process = shell("i=0; while [ $i -lt 200000 ]; do i=$((i+1)); done; exit 3");
        let status = process.wait(Duration::from_secs(60)).unwrap().unwrap();
        assert_eq!(in_words(status), "exit status 3");
        assert!(process.cpu_seconds().unwrap() > 0.0);
    }

    #[test]
    fn a_process_outlives_the_thread_that_started_it() {
        let mut process = thread::spawn(|| shell("sleep 60")).join().unwrap();
        thread::sleep(Duration::from_millis(50));
        assert_eq!(process.ended().unwrap(), None);
        assert_eq!(in_words(process.kill().unwrap()), "killed by signal 9");
    }

    #[test]
    fn a_connection_of_a_process_can_be_broken() {
        use std::io::Read;
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let mut other = Command::new("bash");
        other.args(["-c", &format!("exec 3<>/dev/tcp/127.0.0.1/{}; read -r line <&3", address.port())]);
        let (mut process, _pipes) = Process::start("bash", other).unwrap();
        let (mut accepted, _) = listener.accept().unwrap();
        let connections = connections(process.pid(), address).unwrap();
        assert_eq!(connections.len(), 1);
        connections[0].shutdown(std::net::Shutdown::Both).unwrap();
        assert_eq!(accepted.read(&mut [0; 8]).unwrap(), 0);
        assert!(process.wait(Duration::from_secs(20)).unwrap().is_some());
    }

    #[test]
    fn a_memfd_is_seen_once_with_its_pages() {
        let name = "lab-proc-test";
        let memfd = rustix::fs::memfd_create(name, rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&memfd, 1 << 20).unwrap();
        rustix::io::pwrite(&memfd, &[1; 4096], 0).unwrap();
        let _second = rustix::io::dup(&memfd).unwrap();
        let held: Vec<Memfd> = memfds(std::process::id()).unwrap().into_iter().filter(|m| m.name == name).collect();
        assert_eq!(held, [Memfd { name: name.into(), length: 1 << 20, resident: 4096 }]);
        assert!(peak_memory(std::process::id()).unwrap() >= private_memory(std::process::id()).unwrap());
    }
}
