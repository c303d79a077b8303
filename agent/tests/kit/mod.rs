//! Shared by the tests of both ends: primaries set up for quick snapshots, a source and its replica agents as
//! processes, the output of `remora status` and of a server's INFO.
//!
//! It asserts only that processes start.
#![allow(clippy::unwrap_used, dead_code)] // each test program uses another part of it

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use remora_lab::server::{Builder, wait_until};
use remora_lab::workload::Options;
use remora_lab::{Agent, Kind, Server, Workload, scratch};
use rustix::process::Signal;
use serde_json::Value;
use tempfile::TempDir;

/// Time limit that only a broken machine exceeds.
pub(crate) const LONG: Duration = Duration::from_secs(90);

/// A primary for tests: it takes a snapshot at once when asked (by default it waits five seconds for further replicas),
/// and its backlog is large enough for a hand-off under full load.
pub(crate) fn primary(kind: Kind) -> Builder {
    Server::builder(kind).config("repl-diskless-sync-delay", 0).config("repl-backlog-size", BACKLOG)
}

/// Full load is about 60 MB a second, and on a busy machine an agent may not run for seconds.
pub(crate) const BACKLOG: &str = "256mb";

/// Writes every kind of change, at a rate that a small journal survives even if its readers pause for seconds now and
/// then. A reader that is overrun needs another copy, which these tests do not expect.
#[allow(dead_code)] // not every test that has this kit needs it
pub(crate) fn steady_writer(primary: &Server) -> Workload {
    let options = Options { big_bytes: 1 << 20, ..Options::seeded(remora_lab::random::seed("workload")) };
    Workload::start(primary.client().unwrap(), options.rate(4_000)).unwrap()
}

/// A running source agent. Its folder holds the token, and is the home of all agents that it starts.
pub(crate) struct Source {
    /// The process.
    pub(crate) agent: Agent,
    /// The address on which it listens.
    pub(crate) address: String,
    folder: TempDir,
    token: PathBuf,
}

impl Source {
    /// Starts a source for `primary`, and waits until it is ready.
    pub(crate) fn start(primary: &Server, more: &[&str]) -> Source {
        let folder = scratch::folder("source").unwrap();
        let token = scratch::token_file(folder.path()).unwrap();
        let (agent, address) = launch(primary, folder.path(), &token, "127.0.0.1:0", more);
        Source { agent, address, folder, token }
    }

    /// Stops it as an operator would, and starts it again at the same address.
    pub(crate) fn restart(&mut self, primary: &Server) {
        self.agent.signal(Signal::TERM).unwrap();
        self.agent.wait_for_success(LONG).unwrap();
        (self.agent, _) = launch(primary, self.folder.path(), &self.token, &self.address, &[]);
    }

    /// Starts a replica agent that makes `server` a replica.
    pub(crate) fn replica(&self, server: &Server, more: &[&str]) -> Agent {
        let (url, token) = (server.url(), self.token.display().to_string());
        let mut args = vec!["replica", "--server", &url, "--source", &self.address, "--token-file", &token];
        args.extend(more);
        remora(self.folder.path(), &args)
    }

    /// Makes `server` a replica, and waits for the end of the agent.
    pub(crate) fn replicate(&self, server: &Server, more: &[&str]) -> Agent {
        let mut agent = self.replica(server, more);
        agent.wait_for_success(LONG).unwrap();
        agent
    }

    /// What `remora status --json` prints.
    pub(crate) fn status(&self) -> Value {
        let token = self.token.display().to_string();
        let args = ["status", "--json", "--source", &self.address, "--token-file", &token];
        let mut agent = remora(self.folder.path(), &args);
        agent.wait_for_success(LONG).unwrap();
        serde_json::from_str(&agent.stdout()).unwrap()
    }

    /// What `remora status` prints for people.
    pub(crate) fn drawn_status(&self) -> String {
        let token = self.token.display().to_string();
        let mut agent = remora(self.folder.path(), &["status", "--source", &self.address, "--token-file", &token]);
        agent.wait_for_success(LONG).unwrap();
        agent.stdout()
    }

    /// The token that source and replicas share.
    pub(crate) fn token(&self) -> &Path {
        &self.token
    }

    /// Waits until the status satisfies `wanted`.
    pub(crate) fn wait_for_status(&self, what: &str, wanted: impl Fn(&Value) -> bool) -> Value {
        let look = || {
            let status = self.status();
            Ok(if wanted(&status) { Ok(status) } else { Err(status.to_string()) })
        };
        wait_until(what, LONG, look).unwrap()
    }

    /// The generation of its snapshot.
    pub(crate) fn generation(&self) -> u64 {
        self.status()["generation"]["generation"].as_u64().unwrap()
    }

    /// How many snapshots it has taken so far.
    pub(crate) fn snapshots_taken(&self) -> u64 {
        self.status()["totals"]["snapshots_taken"].as_u64().unwrap()
    }
}

fn launch(primary: &Server, home: &Path, token: &Path, listen: &str, more: &[&str]) -> (Agent, String) {
    let (url, token) = (primary.url(), token.display().to_string());
    let mut args = vec!["source", "--server", &url, "--token-file", &token, "--listen", listen];
    args.extend(more);
    let mut agent = remora(home, &args);
    let line = agent.wait_for_line("source ready", LONG).unwrap();
    let address = line.split("listening=").nth(1).and_then(|rest| rest.split(' ').next()).unwrap();
    (agent, address.to_owned())
}

/// Starts `remora` with `home` as its home.
fn remora(home: &Path, args: &[&str]) -> Agent {
    let mut command = Command::new(env!("CARGO_BIN_EXE_remora"));
    command.args(args).env("XDG_STATE_HOME", home).env_remove("REMORA_PASSWORD").env_remove("REMORA_LOG");
    Agent::run(command).unwrap()
}

/// Runs `remora` to its end, which must be success. For commands that keep no state.
pub(crate) fn run(args: &[&str]) {
    remora(Path::new("/nonexistent"), args).wait_for_success(LONG).unwrap();
}

/// Fills a server with `keys` values of `bytes` incompressible bytes each.
pub(crate) fn load(server: &Server, keys: u64, bytes: u64) {
    let (url, keys, bytes) = (server.url(), keys.to_string(), bytes.to_string());
    run(&["load", "--server", &url, "--keys", &keys, "--value-size", &bytes]);
}

/// Adds keys of another name.
pub(crate) fn load_small(server: &Server, keys: u64, bytes: usize) {
    let mut client = server.client().unwrap();
    let mut random = remora_lab::Random::new(keys);
    for number in 0..keys {
        client.queue(&[b"SET".to_vec(), format!("small {number}").into_bytes(), random.bytes(bytes)]);
    }
    for _ in 0..keys {
        client.receive().unwrap();
    }
}

/// A number out of a server's INFO.
pub(crate) fn number(server: &Server, name: &str) -> u64 {
    server.fact(name).unwrap().parse().unwrap()
}

/// How many full copies the primary has made, and how many partial resynchronisations.
pub(crate) fn syncs(primary: &Server) -> (u64, u64) {
    (number(primary, "sync_full"), number(primary, "sync_partial_ok"))
}

/// Redis's own load generator at full speed, until dropped. `None` if it is not installed.
pub(crate) fn benchmark(server: &Server) -> Option<Agent> {
    let port = server.port().to_string();
    let args = ["-p", &port, "-t", "set,incr,lpush,rpop,sadd,hset,spop,zadd,zpopmin", "-r", "5000", "-n", "100000"];
    Agent::start("redis-benchmark", &[&args[..], &["-P", "8", "-c", "8", "-d", "64", "-l", "-q"]].concat()).ok()
}
