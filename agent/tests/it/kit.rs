//! What the tests share: the agents as processes, primaries that take a snapshot at once, and data of a known size.
//!
//! This is not a layer over the lab: servers, networks and waiting are in the lab. This module knows the command line
//! of `remora`.

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

use rustix::mount::UnmountFlags;
use rustix::process::Signal;
use serde_json::Value;
use tempfile::TempDir;

use remora_lab::server::{Builder, wait_until};
use remora_lab::workload::Options;
use remora_lab::{Agent, Cluster, Host, Kind, Random, Sentinels, Server, Workload, require, scratch, sentinel};

/// Time limit that only a broken machine exceeds.
pub(crate) const LONG: Duration = Duration::from_secs(120);

/// Full load is about 60 MB a second, and on a busy machine an agent may not run for seconds.
pub(crate) const BACKLOG: &str = "256mb";

/// A primary for tests: it takes a snapshot at once when asked (by default it waits five seconds for further replicas),
/// and its backlog is large enough for a hand-off under full load.
pub(crate) fn primary(kind: Kind) -> Builder {
    quick(kind).config("repl-backlog-size", BACKLOG)
}

/// Runs a test for all of these at once: for tests that mostly wait, as for a time limit that no option shortens. A case
/// that fails fails the test when all have ended.
pub(crate) fn at_once<T: Send>(cases: impl IntoIterator<Item = T>, test: impl Fn(T) + Sync) {
    let test = &test;
    std::thread::scope(|scope| cases.into_iter().for_each(|case| drop(scope.spawn(move || test(case)))));
}

/// Writes every kind of change, at a rate that a small journal survives even if its readers pause for seconds now and
/// then. A reader that is overrun needs another copy, which these tests do not expect.
pub(crate) fn steady_writer(primary: &Server) -> Workload {
    let options = Options { big_bytes: 1 << 20, ..Options::seeded(remora_lab::random::seed("workload")) };
    Workload::start(primary.client().unwrap(), options.rate(4_000)).unwrap()
}

/// Redis's own load generator at full speed, until stopped. Ask [`require::redis_benchmark`] for it first.
///
/// [`require::redis_benchmark`]: remora_lab::require::redis_benchmark
pub(crate) struct Flood(Agent);

impl Flood {
    /// Clients of the generator.
    const CLIENTS: u64 = 8;

    /// Starts the generator, and waits until all of its clients are connected.
    pub(crate) fn start(server: &Server) -> Flood {
        let before = number(server, "connected_clients");
        let (port, clients) = (server.port().to_string(), Flood::CLIENTS.to_string());
        let args = ["-p", &port, "-t", "set,incr,lpush,rpop,sadd,hset,spop,zadd,zpopmin", "-r", "5000", "-n", "100000"];
        let args = [&args[..], &["-P", "8", "-c", &clients, "-d", "64", "-l", "-q"]].concat();
        let mut agent = Agent::start("redis-benchmark", &args).unwrap();
        wait_until("the load generator's clients to connect", LONG, || {
            let (ended, now) = (agent.ended()?, number(server, "connected_clients"));
            assert!(ended.is_none(), "redis-benchmark has ended: {}", agent.output());
            Ok(if now >= before + Flood::CLIENTS { Ok(()) } else { Err(format!("{now} clients, {before} before")) })
        })
        .unwrap();
        Flood(agent)
    }

    /// Stops the generator, which must have run until now.
    pub(crate) fn stop(mut self) {
        assert!(self.0.ended().unwrap().is_none(), "redis-benchmark has ended: {}", self.0.output());
        self.0.kill().unwrap();
    }
}

/// The text of a JSON object with the checksum that the agent's own files carry: the CRC-64 of all bytes, with zeros in
/// its place.
pub(crate) fn with_checksum(object: &str) -> String {
    let fields = object.trim_end().strip_suffix('}').unwrap();
    let text = |digits: u64| format!("{fields},\n  \"checksum\": \"{digits:016x}\"\n}}\n");
    text(remora_redis::rdb::crc64(0, text(0).as_bytes()))
}

/// The text of a volume's file as a person writes it, without its checksum.
pub(crate) fn without_checksum(text: &str) -> String {
    let (before, _) = text.split_once(",\n  \"checksum\"").unwrap();
    format!("{before}\n}}\n")
}

// Modules of the tests, for servers.

/// Builds a module from its one file beside the tests. Rust links through the C compiler, so every machine that builds
/// the tests has one.
pub(crate) fn built_module(stage: &Stage, name: &str) -> String {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/it/{name}.c"));
    let library = stage.path(&format!("{name}.so"));
    let mut compiler = Command::new("cc");
    compiler.args(["-shared", "-fPIC", "-Wall", "-Werror", "-o", &library]).arg(source);
    let built = compiler.output().unwrap();
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    library
}

// A primary with a source beside it, and commands that read from the source.

/// A primary, its source, and the stage of the commands that read from the source.
pub(crate) struct Scene {
    pub(crate) stage: Stage,
    pub(crate) primary: Server,
    pub(crate) source: Source,
}

impl Scene {
    /// Starts a source of the primary with these options.
    pub(crate) fn new(primary: Server, options: &[&str]) -> Scene {
        let stage = Stage::new();
        let source = stage.source(&primary.url(), options);
        Scene { stage, primary, source }
    }

    /// The arguments of a command that reads from the source and writes to this place.
    pub(crate) fn args(&self, command: &str, to: &str, more: &[&str]) -> Vec<String> {
        let (source, token) = (self.source.address.to_string(), self.source.token().display().to_string());
        let args = [command, "--source", &source, "--token-file", &token, "--to", to];
        args.iter().chain(more).map(|arg| (*arg).to_owned()).collect()
    }

    /// Starts such a command.
    pub(crate) fn start(&self, command: &str, to: &str, more: &[&str]) -> Agent {
        self.stage.start(None, &strs(&self.args(command, to, more)))
    }
}

/// The same arguments, borrowed.
pub(crate) fn strs(args: &[String]) -> Vec<&str> {
    args.iter().map(String::as_str).collect()
}

// Directories at which something is mounted.

/// A directory for a mount. No mount is left there.
pub(crate) struct Directory(pub(crate) String);

impl Directory {
    /// Makes it if it is missing. It may be there, and be what a killed process has left.
    pub(crate) fn new(path: String) -> Directory {
        let _ = fs::create_dir(&path);
        Directory(path)
    }

    /// Where it is.
    pub(crate) fn path(&self) -> &str {
        &self.0
    }

    /// A file in it.
    pub(crate) fn at(&self, name: &str) -> PathBuf {
        Path::new(&self.0).join(name)
    }

    /// Unmounts it as an operator does. A process that another test starts at this moment holds this test's open
    /// files until it executes its program: so it is tried until no process uses it.
    #[track_caller]
    pub(crate) fn unmount(&self) {
        let unmount = || {
            let output = Command::new("umount").arg(&self.0).output().unwrap();
            let said = String::from_utf8_lossy(&output.stderr).into_owned();
            Ok(if output.status.success() { Ok(()) } else { Err(said) })
        };
        wait_until("it is unmounted", LONG, unmount).unwrap();
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = rustix::mount::unmount(&*self.0, UnmountFlags::DETACH); // usually nothing is mounted there any more
    }
}

// Source and replica agents as processes, and their output.

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
            "info,remora_agent=debug,remora_backup=debug,remora_conversation=debug,remora_delivery=debug,remora_metrics=debug,remora_process=debug,remora_reader=debug,remora_replica=debug,remora_server=debug,remora_source=debug,remora_verify=debug",
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

// What the tests set, wait for and look at on a server.

/// A server that takes a snapshot at once when asked.
pub(crate) fn quick(kind: Kind) -> Builder {
    Server::builder(kind).config("repl-diskless-sync-delay", 0)
}

/// Each kind of server, without the module and with it.
pub(crate) fn kinds_and_module() -> impl Iterator<Item = (Kind, bool)> {
    require::kinds().into_iter().flat_map(|kind| [(kind, false), (kind, true)])
}

/// Starts the server, with the module or without.
pub(crate) fn with_or_without(builder: Builder, module: bool) -> Server {
    if module { builder.module("").unwrap().start() } else { builder.start() }.unwrap()
}

/// A number from a server's `INFO`.
pub(crate) fn number(server: &Server, name: &str) -> u64 {
    server.fact(name).unwrap().parse().unwrap()
}

/// How many full copies the primary has made, and how many servers it has continued. Agents, which name no port of their
/// own, are not counted: a source that resumes its stream, and links that keep the backlog for a hand-off.
pub(crate) fn syncs(primary: &Server) -> (u64, u64) {
    let is_server = |line: &&str| {
        line.contains("Partial resynchronization request from")
            && line.contains("accepted")
            && !line.contains("<unknown")
    };
    (number(primary, "sync_full"), primary.log().lines().filter(is_server).count() as u64)
}

/// `host:port` of the primary that a server follows.
pub(crate) fn follows(server: &Server) -> String {
    format!("{}:{}", server.fact("master_host").unwrap(), server.fact("master_port").unwrap())
}

/// Asserts that the server is unchanged: a primary that never got the command to follow another server.
pub(crate) fn assert_untouched(server: &Server) {
    assert_eq!(server.fact("role").unwrap(), "master");
    assert_eq!(server.configured("repl-diskless-load").unwrap(), "disabled");
    assert!(!server.log().contains("REPLICAOF"), "{}", server.log());
}

/// Makes loading so slow on this server that a test can interfere: `microseconds` for each key.
pub(crate) fn load_slowly(server: &Server, microseconds: u32) {
    server.configure("loading-process-events-interval-bytes", "1024").unwrap();
    server.configure("key-load-delay", &microseconds.to_string()).unwrap();
}

/// Waits until the server loads a snapshot.
pub(crate) fn wait_until_loading(server: &Server) {
    wait_until("the server to load", LONG, || {
        let loading = server.info("persistence")?.get("loading").unwrap_or_default().to_owned();
        Ok(if loading == "1" { Ok(()) } else { Err(loading) })
    })
    .unwrap();
}

/// How a server takes its snapshot.
#[derive(Debug, PartialEq)]
pub(crate) enum Way {
    /// Into a file first: its old data are whole until the file is, and it accepts REPLICAOF meanwhile.
    File,
    /// Directly from the link: it refuses every command meanwhile.
    Link,
}

/// How the server takes the snapshot that it receives now. The error is its state if it receives none.
pub(crate) fn way_of_loading(server: &Server) -> Result<Way, String> {
    let (syncing, loading) = (server.fact("master_sync_in_progress"), server.fact("loading"));
    match (syncing.as_deref(), loading.as_deref()) {
        (Ok("1"), Ok("0")) => Ok(Way::File),
        (_, Ok("1")) => Ok(Way::Link),
        state => Err(format!("{state:?}")),
    }
}

// Clusters whose nodes take snapshots at once.

/// Bytes of a key's value.
const VALUE_IN_CLUSTERS: usize = 512;

/// Starts a cluster on this machine's loopback, or on that host.
pub(crate) fn start_cluster(host: Option<&Host>, kind: Kind, shards: usize, replicas: usize) -> Cluster {
    let builder = || match host {
        Some(host) => primary(kind).cluster().on(host),
        None => primary(kind).cluster(),
    };
    Cluster::start(shards, replicas, |_, _| builder().start()).unwrap()
}

/// Sets keys of half a KiB of random data.
pub(crate) fn fill_cluster(cluster: &Cluster, keys: usize, seed: u64) {
    cluster.fill(keys, VALUE_IN_CLUSTERS, seed).unwrap();
}

/// A node's name in its cluster.
pub(crate) fn id(server: &Server) -> String {
    sentinel::id(server).unwrap()
}

// Data sets of a known size, which no server compresses.

/// Bytes of one value of [`fill`].
const VALUE: usize = 128 << 10;

/// Bytes of unsent commands at which they are flushed.
const QUEUE: usize = 4 << 20;

/// Fills a server with `keys` values of `bytes` incompressible bytes each, by `remora load`.
pub(crate) fn load(server: &Server, keys: u64, bytes: u64) {
    let (url, keys, bytes) = (server.url(), keys.to_string(), bytes.to_string());
    Stage::new().end(&["load", "--server", &url, "--keys", &keys, "--value-size", &bytes], 0);
}

/// Adds keys of another name.
pub(crate) fn load_small(server: &Server, keys: u64, bytes: usize) {
    let mut random = Random::new(keys);
    set_all(server, (0..keys).map(|number| (format!("small {number}"), random.bytes(bytes))));
}

/// Fills database 0 with `mebibytes` MiB of random data in values of 128 KiB.
pub(crate) fn fill(server: &Server, mebibytes: usize, seed: u64) {
    let mut random = Random::new(seed);
    let keys = mebibytes * (1 << 20) / VALUE;
    set_all(server, (0..keys).map(|number| (format!("noise {number}"), random.bytes(VALUE))));
}

/// Fills database 0 with `keys` keys of half a KiB of random data, each with `word` at its beginning.
pub(crate) fn fill_keys(server: &Server, keys: usize, word: &str) {
    let mut random = Random::new(keys as u64);
    let mut value = || [word.as_bytes(), b" ", &random.bytes(512)].concat();
    set_all(server, (0..keys).map(|number| (format!("key {number}"), value())));
}

fn set_all(server: &Server, pairs: impl Iterator<Item = (String, Vec<u8>)>) {
    let mut client = server.client().unwrap();
    let mut sent = 0;
    for (key, value) in pairs {
        client.queue(&[b"SET".to_vec(), key.into_bytes(), value]);
        sent += 1;
        if client.queued() > QUEUE {
            client.flush().unwrap();
        }
    }
    for _ in 0..sent {
        let answer = client.receive().unwrap();
        assert!(answer.as_error().is_none(), "{answer:?}");
    }
}

/// Writes until the primary's backlog of 16 KiB no longer holds its first MiB. It gives up what its replicas have got
/// when it writes more.
pub(crate) fn write_past_the_backlog(primary: &Server) {
    fill(primary, 4, 4);
    wait_until("the primary to give up its first bytes", LONG, || {
        primary.client()?.ok(&["SET", "one", "more"])?;
        let first = number(primary, "repl_backlog_first_byte_offset");
        Ok(if first > 1 << 20 { Ok(()) } else { Err(first.to_string()) })
    })
    .unwrap();
}
