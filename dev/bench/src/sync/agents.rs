//! Remora as a user starts it: the program itself, one process per agent.

use std::collections::HashSet;
use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::Value;

use super::method::{NO_LIMIT, Upload};
use super::summary::Summary;
use super::{Method, Phases, Result};
use crate::Background;
use remora_lab::{Agent, Client, Host, Server, scratch};
use remora_redis::info::Info;

/// The command `remora`.
#[derive(Clone, Debug)]
pub struct Program {
    path: PathBuf,
    /// Whether its replicas can feed each other, which is whether it knows the option.
    serves_peers: bool,
    /// Whether it uses TLS between hosts unless an option says otherwise.
    has_tls: bool,
    /// Whether it limits its uploads unless an option says otherwise.
    limits_uploads: bool,
}

impl Program {
    /// Builds the program and our server module if needed, and finds it beside this program. `REMORA` names another
    /// one, which is not built.
    pub fn build() -> Result<Program> {
        if let Some(named) = std::env::var_os("REMORA") {
            return Program::at(named.into());
        }
        let own = std::env::current_exe()?;
        let folder = own.parent().ok_or("this program has no parent folder")?;
        let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
        let mut build = Command::new(cargo);
        build.args("build --quiet --locked -p remora-agent -p remora-module --lib --bin remora".split(' '));
        build.current_dir(remora_lab::server::project_root());
        // Cargo's folder has the name of the profile, except for the one of development.
        if let Some(profile) = folder.file_name().filter(|name| *name != "debug") {
            build.arg("--profile").arg(profile);
            // With the features that `make demo` has built it with: it would be built again.
            if profile == "demo" {
                build.arg("--no-default-features");
            }
        }
        if let Some(target) = folder.parent() {
            build.arg("--target-dir").arg(target);
        }
        if !build.status()?.success() {
            return Err("the command remora could not be built; see cargo's errors above".into());
        }
        Program::at(folder.join("remora"))
    }

    fn at(path: PathBuf) -> Result<Program> {
        let said = |args: &[&str]| Command::new(&path).args(args).output();
        let mut help = said(&["replica", "--help"])?.stdout;
        // `--help` leaves out the options of rare days. A build that does not know this command shows all of them.
        help.extend(said(&["config", "rare", "replica"])?.stdout);
        let help = String::from_utf8_lossy(&help);
        let (serves_peers, has_tls) = (help.contains(SERVE_PEERS), help.contains(PLAINTEXT[2]));
        Ok(Program { serves_peers, has_tls, limits_uploads: help.contains(AUTO_UPLOAD), path })
    }

    /// Whether its replicas can feed each other.
    pub fn serves_peers(&self) -> bool {
        self.serves_peers
    }

    /// Options of agents beside that server. Own replication is measured without TLS, so Remora is too, unless the
    /// method is about encryption.
    fn security(&self, server: &Server, is_sealed: bool) -> &'static [&'static str] {
        match server.address().ip().is_loopback() {
            _ if !self.has_tls => &[],
            _ if is_sealed => &SEALED,
            true => &[],
            false => &PLAINTEXT,
        }
    }

    /// Its path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Its name and version.
    pub fn version(&self) -> Result<String> {
        let output = Command::new(&self.path).arg("--version").output()?;
        Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
    }

    /// Runs `remora load` with `keys` keys of random bytes, or of JSON records.
    pub fn load(&self, server: &Server, keys: u64, value_bytes: u64, is_json: bool) -> Result<()> {
        let (keys, size) = (keys.to_string(), value_bytes.to_string());
        let words = ["--quiet", "load", "--server", &server.url(), "--keys", &keys, "--value-size", &size];
        let mut command = Command::new(&self.path);
        command.args(words).args(is_json.then_some("--json"));
        enter(server, &mut command)?;
        Ok(Agent::run(command)?.wait_for_success(LONGEST_LOAD)?)
    }

    /// Starts `remora replica` for that server. Its summary is written into `folder` under `name`.
    pub(crate) fn replica(&self, server: &Server, source: &Source, method: Method, name: &str) -> Result<Replica> {
        let summary = source.folder.join(format!("{name}.json"));
        let mut more = vec![os("--json"), summary.as_os_str()];
        match method.serves_peers() {
            Some(true) if self.serves_peers => more.push(os(SERVE_PEERS)),
            Some(false) if self.serves_peers => more.push(os(NO_SERVE_PEERS)),
            _ => {}
        }
        if self.limits_uploads && method.upload_limit(None).is_some() {
            more.extend([os(UPLOAD_LIMIT), os(NO_LIMIT)]);
        }
        let mut command = Command::new(&self.path);
        enter(server, &mut command)?;
        command.args(["--log-level", "warn", "replica", "--server", &server.url(), "--source", &source.address]);
        command.args(["--transport", method.transport().unwrap_or("auto"), "--name", name, "--token-file"]);
        command.arg(&source.token).args(source.security).args(more);
        let agent = Agent::run(command)?;
        Ok(Replica { agent, summary })
    }

    /// Makes rules for the connections of a server of this user, on its host. They change nothing while no agent asks.
    pub(crate) fn intercept(&self, server: &Server, user: u32) -> Result<()> {
        let mut command = Command::new(&self.path);
        enter(server, &mut command)?;
        command.args(["intercept", "add", "--server-uid", &user.to_string(), "--agent-uid", "0"]);
        Ok(Agent::run(command)?.wait_for_success(START_TIME)?)
    }

    /// Starts `remora attend` beside that server, whose primary has one of these ports, with this much memory.
    pub(crate) fn attend(&self, server: &Server, source: &Source, ports: &[u16], memory: u64) -> Result<Running> {
        let mut command = Command::new(&self.path);
        enter(server, &mut command)?;
        command.args(["attend", "--server", &server.url(), "--source", &source.address, "--token-file"]);
        command.arg(&source.token).args(["--memory", &format!("{}MiB", memory >> 20)]).args(source.security);
        ports.iter().for_each(|port| _ = command.args(["--primary-port", &port.to_string()]));
        let mut agent = Agent::run(command)?;
        agent.wait_for_line("attending", START_TIME)?;
        Ok(Running(agent))
    }
}

/// A running `remora source`. Dropping it stops it.
#[derive(Debug)]
pub struct Source {
    agent: Running,
    address: String,
    token: PathBuf,
    folder: PathBuf,
    program: PathBuf,
    /// Options that other commands need to speak with it.
    security: &'static [&'static str],
    host: Option<Host>,
}

impl Source {
    /// Starts a source for that method. It may limit the bytes that leave the source by a cable of that rate.
    pub(crate) fn start_by(
        method: Method,
        program: &Program,
        server: &Server,
        folder: &Path,
        data_bytes: u64,
        cable: Option<u64>,
    ) -> Result<Source> {
        // A program without the default has no limit anyway.
        let limit = method.upload_limit(cable).filter(|limit| program.limits_uploads || *limit != Upload::Unlimited);
        let limit = limit.map(|limit| limit.to_string());
        let mut more: Vec<&str> = limit.iter().flat_map(|limit| [UPLOAD_LIMIT, limit]).collect();
        let state = folder.join("state").display().to_string();
        if method.tunes() {
            more.extend(["--tune-server", "--state-dir", &state]);
        }
        more.extend(method.compress().iter().flat_map(|how| ["--compress", how]));
        let security = program.security(server, method.is_sealed());
        Source::launch(program, server, folder, data_bytes, security, &more)
    }

    fn launch(
        program: &Program,
        server: &Server,
        folder: &Path,
        data_bytes: u64,
        security: &'static [&'static str],
        more: &[&str],
    ) -> Result<Source> {
        let token = scratch::token_file(folder)?;
        // A sealed table holds everything a second time.
        let copies = if security == SEALED { 2 } else { 1 };
        let memory = format!("{}MiB", copies * (((data_bytes * 2) >> 20) + 2 * JOURNAL_MIB));
        let journal = format!("{}MiB", copies * JOURNAL_MIB);
        let listen = SocketAddr::new(server.address().ip(), 0).to_string();
        let mut command = Command::new(&program.path);
        enter(server, &mut command)?;
        command.args(["source", "--server", &server.url(), "--listen", &listen, "--token-file"]).arg(&token);
        command.args(["--memory", &memory, "--journal-memory", &journal]);
        command.args(security).args(more);
        let mut agent = Agent::run(command)?;
        let line = agent.wait_for_line("listening=", START_TIME)?;
        let words = line.split_whitespace().find_map(|word| word.strip_prefix("listening="));
        let address = words.ok_or("the source did not say where it listens")?.to_owned();
        let (folder, program, host) = (folder.to_owned(), program.path.clone(), server.host().cloned());
        Ok(Source { agent: Running(agent), address, token, folder, program, security, host })
    }

    /// Processor seconds since its start.
    pub fn cpu(&self) -> Result<f64> {
        self.agent.cpu()
    }

    /// The output of `remora status` for it.
    pub(crate) fn status(&self) -> Result<serde_json::Value> {
        let mut command = Command::new(&self.program);
        command.args(["status", "--source", &self.address, "--json", "--token-file"]).arg(&self.token);
        if let Some(host) = &self.host {
            host.enter(&mut command)?;
        }
        command.args(self.security);
        Ok(serde_json::from_slice(&command.output()?.stdout)?)
    }

    /// Peak memory, including its tables, in bytes.
    pub fn peak_memory(&self) -> u64 {
        self.agent.0.peak_memory()
    }
}

/// A `remora replica` that ends with its hand-off.
#[derive(Debug)]
pub(crate) struct Replica {
    agent: Agent,
    summary: PathBuf,
}

impl Replica {
    /// Fails if it has ended with an error.
    pub(crate) fn finish(&mut self) -> Result<(Summary, f64)> {
        self.agent.wait_for_success(END_TIME)?;
        let summary = serde_json::from_slice(&fs::read(&self.summary)?)?;
        Ok((summary, self.agent.cpu_seconds()?))
    }

    /// Peak memory, including the slots that it keeps for others, in bytes.
    pub(crate) fn peak_memory(&self) -> u64 {
        self.agent.peak_memory()
    }

    /// Kills it with SIGKILL.
    pub(crate) fn kill(&mut self) -> Result<()> {
        Ok(self.agent.kill()?)
    }

    /// Whether it has ended without success.
    pub(crate) fn has_failed(&mut self) -> Result<Option<String>> {
        let ended = self.agent.ended()?;
        Ok(ended.filter(|status| !status.success()).map(|_| self.agent.output()))
    }
}

/// An agent that is asked to stop when it is dropped, so that it leaves nothing behind; killed if that does not help.
#[derive(Debug)]
pub struct Running(Agent);

impl Running {
    /// Processor seconds since its start.
    pub fn cpu(&self) -> Result<f64> {
        Ok(self.0.cpu_seconds()?)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.signal(Signal::TERM);
        let _ = self.0.wait(STOP_TIME);
    }
}

/// On a host of a test network, the agent runs on its server's host.
fn enter(server: &Server, command: &mut Command) -> Result<()> {
    Ok(server.host().map_or(Ok(()), |host| host.enter(command))?)
}

fn os(text: &str) -> &std::ffi::OsStr {
    text.as_ref()
}

/// What is the default between hosts, on loopback too.
const SEALED: [&str; 2] = ["--security", "token"];

/// No TLS between hosts.
const PLAINTEXT: [&str; 3] = ["--security", "none", "--plaintext-network"];

const SERVE_PEERS: &str = "--serve-peers";

const NO_SERVE_PEERS: &str = "--no-serve-peers";

/// The option, and what its help says if it has a default.
const UPLOAD_LIMIT: &str = "--upload-limit";

const AUTO_UPLOAD: &str = "--upload-limit <auto|none|SIZE>";

/// Memory for the stream: what `remora source` takes by default.
const JOURNAL_MIB: u64 = 256;

/// Time limit for filling a server: the slowest shape takes a tenth of it.
const LONGEST_LOAD: Duration = Duration::from_secs(600);

/// Time limit for the source, which touches its memory before it is ready: one or two seconds per gigabyte, more on a
/// busy machine.
const START_TIME: Duration = Duration::from_secs(60);

/// Time limit from the hand-off to the end of the process.
const END_TIME: Duration = Duration::from_secs(60);

/// Time limit for an agent that was asked to stop.
const STOP_TIME: Duration = Duration::from_secs(20);

// How long a server has a fork child.

/// Looks for children of a process until ended, and returns how long there was one. It reads `/proc`, so that the
/// server is not asked.
pub(super) fn watch_children(parent: u32) -> Background<Duration> {
    Background::start(move |is_over| {
        let (mut strangers, mut child, mut lived) = (HashSet::new(), None, Duration::ZERO);
        let mut last = Instant::now();
        while !is_over.load(Ordering::Relaxed) {
            child = child.filter(|child| is_alive(*child)).or_else(|| find(parent, &mut strangers));
            let now = Instant::now();
            if child.is_some() {
                lived += now - last;
            }
            last = now;
            thread::sleep(LOOK_EVERY);
        }
        lived
    })
}

/// A child of that process. `strangers`: processes that are not its children, so that they are read once.
fn find(parent: u32, strangers: &mut HashSet<u32>) -> Option<u32> {
    let all = fs::read_dir("/proc").ok()?;
    let numbers = all.flatten().filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    numbers.into_iter().find(|pid| {
        if strangers.contains(pid) {
            return false;
        }
        let is_child = state(*pid).is_some_and(|(_, of)| of == parent);
        if !is_child {
            strangers.insert(*pid);
        }
        is_child
    })
}

fn is_alive(pid: u32) -> bool {
    // One that has ended stays in the table until its parent has looked.
    state(pid).is_some_and(|(state, _)| state != 'Z')
}

/// A process's state, and its parent.
fn state(pid: u32) -> Option<(char, u32)> {
    let line = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name before it may have any characters.
    let mut words = line.rsplit_once(')')?.1.split_whitespace();
    Some((words.next()?.chars().next()?, words.next()?.parse().ok()?))
}

/// A look costs a tenth of a millisecond.
const LOOK_EVERY: Duration = Duration::from_millis(5);

// A relay that is killed in the middle: which replica it is, and when, so that the sync no longer waits for it.
//
// The source decides which replica reads from which, so this module asks the source. It kills the agent that others
// read from (`kill -9`) as soon as it holds half of the snapshot. Its server is left alone, and the sync ends when all
// other replicas have caught up.

/// The replica that was killed, if any, counted from 0.
#[derive(Debug)]
pub(super) struct Lost {
    number: AtomicUsize,
    is_over: AtomicBool,
}

impl Lost {
    /// No replica.
    pub(super) fn none() -> Lost {
        Lost { number: AtomicUsize::new(NO_REPLICA), is_over: AtomicBool::new(false) }
    }

    /// Whether this replica was killed.
    pub(super) fn is(&self, number: usize) -> bool {
        self.number.load(Ordering::Acquire) == number
    }

    pub(super) fn is_anybody(&self) -> bool {
        !self.is(NO_REPLICA)
    }

    /// Ends the wait for a relay: the sync is over.
    pub(super) fn call_off(&self) {
        self.is_over.store(true, Ordering::Release);
    }

    /// Waits for a relay in the middle of its work, marks it as lost, and kills it. Replicas are named `replica-1` ….
    pub(super) fn lose_a_relay(&self, source: &Source, kill: impl FnOnce(usize) -> Result<()>) -> Result<()> {
        while !self.is_over.load(Ordering::Acquire) {
            if let Some(number) = source.status().ok().and_then(|status| relay_in_the_middle(&status)) {
                // Marked as lost first, so that its end is not a failure.
                self.number.store(number, Ordering::Release);
                return kill(number);
            }
            thread::sleep(ASK_EVERY);
        }
        Ok(())
    }
}

/// The number of a replica that holds half of the snapshot while another, still incomplete one reads from it.
fn relay_in_the_middle(status: &Value) -> Option<usize> {
    let replicas = status["replicas"].as_array()?;
    let permille = |replica: &Value| replica["percent_permille"].as_u64().unwrap_or(0);
    let is_read = |replica: &&Value| {
        let reads_here =
            |other: &Value| other["reads_from"].as_u64().is_some() && other["reads_from"] == replica["session"];
        replicas.iter().any(|other| reads_here(other) && permille(other) < MOST_PERMILLE)
    };
    let in_the_middle = |replica: &&Value| (HALF_PERMILLE..MOST_PERMILLE).contains(&permille(replica));
    let found = replicas.iter().filter(in_the_middle).find(is_read)?;
    found["name"].as_str()?.strip_prefix("replica-")?.parse::<usize>().ok()?.checked_sub(1)
}

const NO_REPLICA: usize = usize::MAX;

/// Thousandths of the snapshot: the range that counts as the middle.
const HALF_PERMILLE: u64 = 450;

const MOST_PERMILLE: u64 = 900;

/// Interval between status queries: each starts a process, which costs a few milliseconds of the primary's host.
const ASK_EVERY: Duration = Duration::from_millis(100);

// The measurement of progress: one thread per replica asks its server with INFO. It is the same for every method, so
// that no difference is due to the way of looking.

/// The progress of a replica, for display.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sight {
    /// The phase, in one word.
    pub phase: &'static str,
    /// Bytes of the snapshot that have arrived or are loaded.
    pub bytes: u64,
}

/// Is called with every look at a replica, and its number.
pub type Show<'a> = dyn Fn(usize, Sight) + Sync + 'a;

/// What to watch.
pub(crate) struct Watch<'a> {
    pub(crate) primary: &'a Server,
    pub(crate) replicas: &'a [Server],
    pub(crate) begun: Instant,
    pub(crate) loads_while_receiving: bool,
    pub(crate) show: &'a Show<'a>,
    /// Fails if the replica can no longer catch up.
    pub(crate) check: &'a (dyn Fn() -> Result<()> + Sync),
    /// Replicas that are not waited for.
    pub(crate) lost: &'a Lost,
}

impl Watch<'_> {
    /// Waits until all replicas have caught up. Returns the phases of each, in their order; `None` for a lost replica.
    pub(crate) fn until_all_in_step(&self) -> Result<Vec<Option<Phases>>> {
        thread::scope(|scope| {
            let threads: Vec<_> =
                (0..self.replicas.len()).map(|number| scope.spawn(move || self.until_in_step(number))).collect();
            threads.into_iter().map(|thread| thread.join().map_err(|_| "a watching thread panicked")?).collect()
        })
    }

    fn until_in_step(&self, number: usize) -> Result<Option<Phases>> {
        let replica = self.replicas.get(number).ok_or("no such replica")?;
        let (mut there, mut here) = (self.primary.client()?, replica.client()?);
        let mut marks = Marks::default();
        let mut goal = None;
        loop {
            if self.lost.is(number) {
                return Ok(None);
            }
            let info = look(&mut here)?;
            let now = self.begun.elapsed();
            let is_linked = info.get("master_link_status") == Some("up")
                && info.number::<u16>("master_port") == Some(self.primary.port());
            marks.note(&info, now, self.loads_while_receiving);
            (self.show)(number, marks.sight(&info, is_linked));
            if is_linked {
                let goal = match goal {
                    Some(goal) => goal,
                    None => *goal.insert(offset(&there.info("replication")?)),
                };
                if offset(&info) >= goal {
                    return Ok(Some(marks.phases(self.begun.elapsed())));
                }
            }
            (self.check)()?;
            if now > LONGEST_SYNC {
                return Err(format!(
                    "{replica} is not in step after {LONGEST_SYNC:?}; its log ends:\n{}",
                    tail(replica)
                )
                .into());
            }
            thread::sleep(WATCH_EVERY);
        }
    }
}

/// When each phase was first seen.
#[derive(Debug, Default)]
struct Marks {
    receiving: Option<Duration>,
    received: Option<Duration>,
    loaded: Option<Duration>,
}

impl Marks {
    fn note(&mut self, info: &Info, now: Duration, loads_while_receiving: bool) {
        let is_loading = info.get("loading") == Some("1") || info.get("async_loading") == Some("1");
        let has_bytes = info.number::<i64>("master_sync_read_bytes").is_some_and(|bytes| bytes > 0);
        let is_syncing = info.get("master_sync_in_progress") == Some("1");
        if is_loading || (is_syncing && has_bytes) {
            self.receiving.get_or_insert(now);
        } else if self.receiving.is_some() && !is_syncing {
            self.loaded.get_or_insert(now);
        }
        if is_loading && !loads_while_receiving {
            self.received.get_or_insert(now);
        }
    }

    fn sight(&self, info: &Info, is_linked: bool) -> Sight {
        let bytes = |name| info.number::<i64>(name).and_then(|bytes| u64::try_from(bytes).ok()).unwrap_or(0);
        let (loaded, received) = (bytes("loading_loaded_bytes"), bytes("master_sync_read_bytes"));
        match () {
            () if is_linked => Sight { phase: "in step", bytes: u64::MAX },
            () if self.loaded.is_some() => Sight { phase: "catch-up", bytes: u64::MAX },
            () if loaded > 0 => Sight { phase: "loading", bytes: loaded },
            () if self.receiving.is_some() => Sight { phase: "receiving", bytes: received },
            () => Sight { phase: "waiting", bytes: 0 },
        }
    }

    /// A phase that was too short to be seen took no time.
    fn phases(&self, end: Duration) -> Phases {
        let loaded = self.loaded.unwrap_or(end);
        let receiving = self.receiving.unwrap_or(loaded);
        let received = self.received.unwrap_or(loaded);
        Phases {
            snapshot: receiving.as_secs_f64(),
            transfer: received.saturating_sub(receiving).as_secs_f64(),
            load: loaded.saturating_sub(received).as_secs_f64(),
            catch_up: end.saturating_sub(loaded).as_secs_f64(),
        }
    }
}

fn look(client: &mut Client) -> Result<Info> {
    Ok(Info::parse(&client.bytes(&["INFO", "replication", "persistence"])?.unwrap_or_default()))
}

fn offset(info: &Info) -> u64 {
    info.number("slave_repl_offset").or_else(|| info.number("master_repl_offset")).unwrap_or(0)
}

fn tail(server: &Server) -> String {
    let log = server.log();
    let lines: Vec<&str> = log.lines().collect();
    lines.get(lines.len().saturating_sub(TAIL_LINES)..).unwrap_or_default().join("\n")
}

/// Each look costs the server a tenth of a millisecond.
const WATCH_EVERY: Duration = Duration::from_millis(10);

/// Several times the time of the slowest known case (Redis 7 by default, three replicas, four million keys).
const LONGEST_SYNC: Duration = Duration::from_secs(600);

/// Number of log lines in an error.
const TAIL_LINES: usize = 15;

#[cfg(test)]
mod tests {

    use serde_json::json;

    use super::*;

    #[test]
    fn a_child_counts_while_it_lives() {
        // A parent of its own: other tests have children too. It waits for the end of its input.
        let mut shell = std::process::Command::new("sh");
        shell.args(["-c", "sleep 0.4 & wait; read line"]).stdin(std::process::Stdio::piped());
        let parent = shell.spawn();
        let lived = parent.as_ref().ok().map(|parent| {
            let mut watch = watch_children(parent.id());
            thread::sleep(Duration::from_millis(1200));
            watch.end().unwrap_or_default().as_secs_f64()
        });
        assert!(parent.is_ok_and(|mut parent| parent.wait().is_ok()));
        assert!(lived.is_some_and(|lived| (0.2..0.9).contains(&lived)), "{lived:?}");
    }

    #[test]
    fn only_a_relay_in_the_middle_is_killed() {
        let replica = |number: u64, from: Option<u64>, permille: u64| json!({"name": format!("replica-{number}"), "session": 10 + number, "reads_from": from, "percent_permille": permille});
        let status = |all: &[Value]| json!({ "replicas": all });
        let chain = |head, tail| status(&[replica(1, Some(12), tail), replica(2, None, head)]);
        assert_eq!(relay_in_the_middle(&chain(500, 480)), Some(1));
        assert_eq!(relay_in_the_middle(&chain(300, 280)), None, "too early");
        assert_eq!(relay_in_the_middle(&chain(1000, 950)), None, "too late");
        assert_eq!(
            relay_in_the_middle(&status(&[replica(1, None, 500), replica(2, None, 500)])),
            None,
            "no replica reads from it"
        );
        assert_eq!(relay_in_the_middle(&json!({})), None);
    }

    fn info(text: &str) -> Info {
        Info::parse(text.replace(' ', "\n").as_bytes())
    }

    #[test]
    fn a_sync_through_disk_shows_transfer_and_then_load() {
        let mut marks = Marks::default();
        let looks = [
            (1, "loading:0 master_sync_in_progress:0"),
            (2, "loading:0 master_sync_in_progress:1 master_sync_read_bytes:0"),
            (3, "loading:0 master_sync_in_progress:1 master_sync_read_bytes:7"),
            (5, "loading:1 master_sync_in_progress:1 master_sync_read_bytes:9 loading_loaded_bytes:4"),
            (8, "loading:0 master_sync_in_progress:0"),
        ];
        for (second, text) in looks {
            marks.note(&info(text), Duration::from_secs(second), false);
        }
        let phases = marks.phases(Duration::from_secs(9));
        assert_eq!(phases, Phases { snapshot: 3.0, transfer: 2.0, load: 3.0, catch_up: 1.0 });
        assert_eq!(phases.sum(), 9.0);
    }

    #[test]
    fn a_sync_too_quick_to_be_seen_counts_as_snapshot() {
        assert_eq!(Marks::default().phases(Duration::from_secs(1)).snapshot, 1.0);
    }

    #[test]
    fn loading_during_the_transfer_counts_as_transfer() {
        let mut marks = Marks::default();
        marks.note(&info("loading:1 master_sync_in_progress:1 loading_loaded_bytes:4"), Duration::from_secs(1), true);
        assert_eq!(marks.sight(&info("loading:1 loading_loaded_bytes:4"), false), Sight { phase: "loading", bytes: 4 });
        marks.note(&info("loading:0 master_sync_in_progress:0"), Duration::from_secs(4), true);
        let phases = marks.phases(Duration::from_secs(4));
        assert_eq!((phases.transfer, phases.load), (3.0, 0.0));
    }
}
