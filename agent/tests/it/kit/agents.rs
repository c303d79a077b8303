//! Source and replica agents as processes, and their output.

use std::fs::{self, File};
use std::io::{self, BufRead, BufReader};
use std::net::SocketAddr;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use remora_lab::{Agent, Host, Sentinels, Server, scratch, sentinel};
use rustix::process::Signal;
use serde_json::Value;
use tempfile::TempDir;

use super::LONG;

/// What the agents of one test share: a token, and a folder that is their home.
#[derive(Clone)]
pub(crate) struct Stage {
    folder: Arc<TempDir>,
    pub(crate) token: PathBuf,
    processors: Option<Arc<Processors>>,
}

impl Stage {
    pub(crate) fn new() -> Stage {
        let folder = scratch::folder("stage").unwrap();
        let token = scratch::token_file(folder.path()).unwrap();
        Stage { folder: Arc::new(folder), token, processors: None }
    }

    /// The same stage for agents that see these processors instead of this machine's.
    pub(crate) fn seeing(&self, processors: Processors) -> Stage {
        Stage { processors: Some(Arc::new(processors)), ..self.clone() }
    }

    pub(crate) fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// A path in the stage's folder.
    pub(crate) fn path(&self, name: &str) -> String {
        self.folder.path().join(name).display().to_string()
    }

    /// Writes a file that only its owner can read.
    pub(crate) fn secret(&self, name: &str, content: &str) -> String {
        scratch::secret_file(&self.folder.path().join(name), content).unwrap().display().to_string()
    }

    /// A command that runs `remora` with these arguments, not started yet. Its state is kept in the stage's folder.
    pub(crate) fn remora(&self, args: &[&str]) -> Command {
        let program = env!("CARGO_BIN_EXE_remora");
        let mut command = match &self.processors {
            Some(processors) => processors.shown_to(program),
            None => Command::new(program),
        };
        command.args(args).env("XDG_STATE_HOME", self.folder.path()).env_remove("REMORA_PASSWORD");
        command.env(
            "REMORA_LOG",
            "info,remora_agent=debug,remora_backup=debug,remora_conversation=debug,remora_metrics=debug,remora_process=debug,remora_reader=debug,remora_replica=debug,remora_server=debug,remora_source=debug",
        );
        command
    }

    /// Starts `remora` with these arguments, on a host of a test network or on this machine.
    pub(crate) fn start(&self, host: Option<&Host>, args: &[&str]) -> Agent {
        let mut command = self.remora(args);
        if let Some(host) = host {
            host.enter(&mut command).unwrap();
        }
        Agent::run(command).unwrap()
    }

    /// Runs `remora` with these arguments to its end, which must have this exit code, and returns its output.
    #[track_caller]
    pub(crate) fn end(&self, args: &[&str], code: i32) -> String {
        ends(&mut self.start(None, args), code)
    }

    /// Starts a source of this server on loopback with small slots, and waits until it is ready.
    pub(crate) fn source(&self, server: &str, more: &[&str]) -> Source {
        self.source_at("127.0.0.1:0", None, server, more)
    }

    /// Starts a source of this server on that host with small slots, and waits until it is ready.
    pub(crate) fn source_on(&self, host: &Host, server: &str, more: &[&str]) -> Source {
        self.source_at(&format!("{}:0", host.address()), Some(host), server, more)
    }

    /// Starts a source that listens at `listen` and has small slots, and waits until it is ready.
    pub(crate) fn source_at(&self, listen: &str, host: Option<&Host>, server: &str, more: &[&str]) -> Source {
        let memory: &[&str] = if more.contains(&"--memory") { &[] } else { &["--memory", "128MiB"] };
        let more = [memory, &["--slot-size", "64KiB"], more].concat();
        Source::launch(self.clone(), listen, host, &["--server", server], &more)
    }

    /// Starts a source with small slots of the group that these Sentinels watch, on the host or on loopback, and waits
    /// until it is ready.
    pub(crate) fn source_of_group(&self, host: Option<&Host>, sentinels: &Sentinels, more: &[&str]) -> Source {
        let small = ["--memory", "128MiB", "--slot-size", "64KiB"];
        let listen = host.map_or("127.0.0.1:0".to_owned(), |host| format!("{}:0", host.address()));
        let list = sentinels.list();
        let of = ["--sentinel", &list, "--sentinel-name", sentinel::NAME];
        Source::launch(self.clone(), &listen, host, &of, &[&small, more].concat())
    }

    /// The arguments of a replica agent.
    pub(crate) fn replica_args(&self, server: &str, source: SocketAddr, more: &[&str]) -> Vec<String> {
        let (source, token) = (source.to_string(), self.token.display().to_string());
        let args = ["replica", "--server", server, "--source", &source, "--token-file", &token];
        args.iter().chain(more).map(|arg| (*arg).to_owned()).collect()
    }

    /// Starts a replica agent on this machine.
    pub(crate) fn replica(&self, server: &str, source: SocketAddr, more: &[&str]) -> Agent {
        let args = self.replica_args(server, source, more);
        self.start(None, &args.iter().map(String::as_str).collect::<Vec<_>>())
    }

    /// Starts a replica agent on a host of a test network.
    pub(crate) fn replica_on(&self, host: &Host, server: &str, source: SocketAddr, more: &[&str]) -> Agent {
        let args = self.replica_args(server, source, more);
        self.start(Some(host), &args.iter().map(String::as_str).collect::<Vec<_>>())
    }
}

/// A running source agent.
pub(crate) struct Source {
    /// The process.
    pub(crate) agent: Agent,
    /// The address on which it listens.
    pub(crate) address: SocketAddr,
    stage: Stage,
    host: Option<Host>,
    /// Its options that say what protects connections, which the other end must have too.
    security: Vec<String>,
}

/// A process that is killed when nobody reads it any more.
struct Ended(Child);

impl Drop for Ended {
    fn drop(&mut self) {
        let _ = self.0.kill().and_then(|()| self.0.wait()); // it may have ended
    }
}

impl Source {
    /// Starts a source of `primary` with the default memory and slots, and waits until it is ready.
    pub(crate) fn start(primary: &Server, more: &[&str]) -> Source {
        Source::launch(Stage::new(), "127.0.0.1:0", None, &["--server", &primary.url()], more)
    }

    fn launch(stage: Stage, listen: &str, host: Option<&Host>, of: &[&str], more: &[&str]) -> Source {
        let token = stage.token.display().to_string();
        let args = ["source", "--token-file", &token, "--listen", listen];
        let mut agent = stage.start(host, &[&args, of, more].concat());
        let ready = agent.wait_for_event("source_ready", LONG).unwrap();
        let address = ready.split("listening=").nth(1).and_then(|rest| rest.split(' ').next()).unwrap();
        let mut security = Vec::new();
        for option in ["--security", "--cert", "--key", "--ca"] {
            if let Some(at) = more.iter().position(|given| *given == option) {
                security.extend(more[at..].iter().take(2).map(|option| (*option).to_owned()));
            }
        }
        security
            .extend(more.iter().filter(|option| **option == "--plaintext-network").map(|option| (*option).to_owned()));
        Source { agent, address: address.parse().unwrap(), stage, host: host.cloned(), security }
    }

    /// Stops it as an operator would, and starts it again at the same address, with the default memory and slots.
    pub(crate) fn restart(&mut self, primary: &Server) {
        self.agent.signal(Signal::TERM).unwrap();
        self.agent.wait_for_success(LONG).unwrap();
        let again =
            Source::launch(self.stage.clone(), &self.address.to_string(), None, &["--server", &primary.url()], &[]);
        self.agent = again.agent;
    }

    /// Starts a replica agent that makes `server` a replica.
    pub(crate) fn replica(&self, server: &Server, more: &[&str]) -> Agent {
        self.stage.replica(&server.url(), self.address, more)
    }

    /// Makes `server` a replica, and waits for the end of the agent.
    pub(crate) fn replicate(&self, server: &Server, more: &[&str]) -> Agent {
        let mut agent = self.replica(server, more);
        agent.wait_for_success(LONG).unwrap();
        agent
    }

    /// The file with the token that source and replicas share.
    pub(crate) fn token(&self) -> &Path {
        &self.stage.token
    }

    /// The output of `remora status --json`.
    pub(crate) fn status(&self) -> Value {
        serde_json::from_str(&self.printed_status(&["--json"])).unwrap()
    }

    /// The output of `remora status` for people.
    pub(crate) fn drawn_status(&self) -> String {
        self.printed_status(&[])
    }

    fn asks_for_status(&self, more: &[&str]) -> Command {
        let (address, token) = (self.address.to_string(), self.stage.token.display().to_string());
        let security: Vec<&str> = self.security.iter().map(String::as_str).collect();
        let args = [&["status", "--source", &address, "--token-file", &token], &security[..], more].concat();
        let mut command = self.stage.remora(&args);
        if let Some(host) = &self.host {
            host.enter(&mut command).unwrap();
        }
        command
    }

    fn printed_status(&self, more: &[&str]) -> String {
        let printed = self.asks_for_status(more).output().unwrap();
        let said = String::from_utf8_lossy(&printed.stderr);
        assert!(printed.status.success(), "remora status: {}\n{said}", printed.status);
        String::from_utf8(printed.stdout).unwrap()
    }

    /// Waits until the status satisfies `wanted`.
    pub(crate) fn wait_for_status(&self, what: &str, wanted: impl Fn(&Value) -> bool) -> Value {
        self.watch(what, |status| if wanted(status) { Ok(status.clone()) } else { Err(status.to_string()) })
    }

    /// Waits until this agent, the first that joined, holds `slots` slots.
    #[track_caller]
    pub(crate) fn wait_for_slots(&self, agent: &mut Agent, slots: u64) {
        let is_over = self.watch("the replica to hold some slots", |status| {
            let held = status["replicas"][0]["slots_held"].as_u64().unwrap_or(0);
            let over = agent.ended().unwrap().is_some();
            if held >= slots || over { Ok(over) } else { Err(format!("{held} slots")) }
        });
        assert!(
            !is_over,
            "it has ended; the replica agent's output:\n{}\nthe source's:\n{}",
            agent.output(),
            self.agent.output()
        );
    }

    /// Waits until its status is as wanted. One command tells it again and again: a command for each look takes longer
    /// to start, on a busy machine, than some states last.
    fn watch<T>(&self, what: &str, mut look: impl FnMut(&Value) -> Result<T, String>) -> T {
        let mut told =
            Ended(self.asks_for_status(&["--json", "--watch", "20ms"]).stdout(Stdio::piped()).spawn().unwrap());
        let (until, mut last) = (Instant::now() + LONG, "it says nothing".to_owned());
        for line in BufReader::new(told.0.stdout.take().unwrap()).lines() {
            match look(&serde_json::from_str(&line.unwrap()).unwrap()) {
                Ok(seen) => return seen,
                Err(why) => last = why,
            }
            assert!(Instant::now() < until, "{what}: not within {LONG:?}: {last}");
        }
        panic!("{what}: remora status has ended: {last}; the source's output:\n{}", self.agent.output());
    }

    /// Waits until its snapshot is complete.
    pub(crate) fn wait_for_snapshot(&mut self) {
        self.agent.wait_for_event("snapshot_completed", LONG).unwrap();
    }

    /// Bytes that its data lanes have sent.
    pub(crate) fn bytes_served(&self) -> u64 {
        self.status()["totals"]["bytes_served"].as_u64().unwrap()
    }

    /// The generation of its snapshot.
    pub(crate) fn generation(&self) -> u64 {
        self.status()["generation"]["generation"].as_u64().unwrap()
    }

    /// How many snapshots it has taken so far.
    pub(crate) fn snapshots_taken(&self) -> u64 {
        self.status()["totals"]["snapshots_taken"].as_u64().unwrap()
    }

    /// Asks it to stop, as a service manager does.
    pub(crate) fn stop(mut self) {
        self.agent.signal(Signal::TERM).unwrap();
        self.agent.wait_for_success(LONG).unwrap();
    }
}

/// Waits for the agent's end, which must have this exit code, and returns its output.
#[track_caller]
pub(crate) fn ends(agent: &mut Agent, code: i32) -> String {
    let status = agent.wait(LONG).unwrap();
    let output = agent.output();
    assert_eq!(status.code(), Some(code), "{status}; its output:\n{output}");
    output
}

/// Waits until this agent has made `replica` a replica, and returns its output. A failure shows the server's log.
#[track_caller]
pub(crate) fn succeeds(agent: &mut Agent, replica: &Server) -> String {
    if let Err(error) = agent.wait_for_success(LONG) {
        panic!("{error}\n{}\n{replica} logged:\n{}", agent.output(), replica.log());
    }
    agent.output()
}

/// Fails unless the output contains each of `words`.
#[track_caller]
pub(crate) fn says(output: &str, words: &[&str]) {
    for word in words {
        assert!(output.contains(word), "{word:?} is not in:\n{output}");
    }
}

// Processors as a test decides them: an agent gets a `/proc/stat` of its own. Then it does not matter to the agent
// what else this machine does.

/// What the processors do, by the file that an agent finds at `/proc/stat`: a copy of this machine's, whose first line
/// a thread writes again and again until this is dropped.
pub(crate) struct Processors {
    file: PathBuf,
    over: Arc<AtomicBool>,
    writer: Option<JoinHandle<io::Result<()>>>,
}

impl Processors {
    /// All of them are idle. The file is made in `folder`.
    pub(crate) fn idle(folder: &Path) -> Processors {
        Processors::counting(folder, |ticks| stat(0, ticks))
    }

    /// Other programs use all of them. The file is made in `folder`.
    pub(crate) fn busy(folder: &Path) -> Processors {
        Processors::counting(folder, |ticks| stat(ticks, 0))
    }

    fn counting(folder: &Path, line: fn(u64) -> String) -> Processors {
        let path = folder.join("stat");
        let real = fs::read_to_string("/proc/stat").unwrap();
        let (_, others) = real.split_once('\n').unwrap();
        fs::write(&path, line(0) + others).unwrap();
        // Each write goes into the same file: what is mounted over `/proc/stat` is the file, not its name.
        let file = File::options().write(true).open(&path).unwrap();
        let over = Arc::new(AtomicBool::new(false));
        let stop = Arc::clone(&over);
        let writer = thread::spawn(move || {
            for ticks in (TICKS..).step_by(TICKS as usize) {
                thread::sleep(PAUSE);
                if stop.load(Ordering::Relaxed) {
                    break;
                }
                file.write_all_at(line(ticks).as_bytes(), 0)?;
            }
            Ok(())
        });
        Processors { file: path, over, writer: Some(writer) }
    }

    /// A command that runs `program` where `/proc/stat` is this file, in a mount namespace that ends with it. Arguments
    /// that are added are the program's. Ask [`require::root`] for it first.
    ///
    /// [`require::root`]: remora_lab::require::root
    pub(crate) fn shown_to(&self, program: &str) -> Command {
        let mut command = Command::new("unshare");
        command.args(["--mount", "sh", "-c", "mount --bind \"$0\" /proc/stat && exec \"$@\""]);
        command.arg(&self.file).arg(program);
        command
    }
}

impl Drop for Processors {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
        let written = self.writer.take().map(JoinHandle::join);
        assert!(thread::panicking() || matches!(written, Some(Ok(Ok(())))), "{}: {written:?}", self.file.display());
    }
}

/// The first line of the file, always of the same length.
fn stat(user: u64, idle: u64) -> String {
    format!("cpu  {user:020} 0 0 {idle:020} 0 0 0 0 0 0\n")
}

/// Time between two writes: a fifth of that between two looks of an agent.
const PAUSE: Duration = Duration::from_millis(50);

/// Ticks of 10 ms that pass with each write: far more than the agent itself uses meanwhile.
const TICKS: u64 = 100_000;
