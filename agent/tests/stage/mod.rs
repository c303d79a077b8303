//! What the tests of both agents share: a token, a source, replica agents, and their output.
//!
//! This is not a layer over the lab: servers, networks and waiting are in the lab. This module knows the command line
//! of `remora`.
#![allow(clippy::unwrap_used, unreachable_pub)]
// Each test program uses another part of this.
#![allow(dead_code)]

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use remora_lab::server::wait_until;
use remora_lab::{Agent, Host, Random, Server, scratch};
use rustix::process::Signal;
use serde_json::Value;
use tempfile::TempDir;

/// Time limit that only a broken machine exceeds.
pub const LONG: Duration = Duration::from_secs(60);

/// Bytes of one value of [`fill`].
pub const VALUE: usize = 128 << 10;

/// What the agents of one test share: a token, and a folder that is their home.
pub struct Stage {
    folder: TempDir,
    pub token: PathBuf,
}

impl Stage {
    pub fn new() -> Stage {
        let folder = scratch::folder("stage").unwrap();
        let token = scratch::token_file(folder.path()).unwrap();
        Stage { folder, token }
    }

    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// A path in the stage's folder.
    pub fn path(&self, name: &str) -> String {
        self.folder.path().join(name).display().to_string()
    }

    /// Writes a file that only its owner can read.
    pub fn secret(&self, name: &str, content: &str) -> String {
        scratch::secret_file(&self.folder.path().join(name), content).unwrap().display().to_string()
    }

    /// A command that runs `remora` with these arguments, not started yet. Its state is kept in the stage's folder.
    pub fn remora(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_remora"));
        command.args(args).env("XDG_STATE_HOME", self.folder.path()).env_remove("REMORA_PASSWORD");
        command.env("REMORA_LOG", "info,remora_agent=debug");
        command
    }

    /// Starts `remora` with these arguments, on a host of a test network or on this machine.
    pub fn start(&self, host: Option<&Host>, args: &[&str]) -> Agent {
        let mut command = self.remora(args);
        if let Some(host) = host {
            host.enter(&mut command).unwrap();
        }
        Agent::run(command).unwrap()
    }

    /// Runs `remora` with these arguments to its end, which must have this exit code, and returns its output.
    #[track_caller]
    pub fn end(&self, args: &[&str], code: i32) -> String {
        ends(&mut self.start(None, args), code)
    }

    /// Starts a source of this server on loopback, and waits until it is ready.
    pub fn source(&self, server: &str, more: &[&str]) -> Source {
        self.source_at("127.0.0.1:0", None, server, more)
    }

    /// Starts a source of this server on that host, and waits until it is ready.
    pub fn source_on(&self, host: &Host, server: &str, more: &[&str]) -> Source {
        self.source_at(&format!("{}:0", host.address()), Some(host), server, more)
    }

    /// Starts a source that listens at `listen`, and waits until it is ready.
    pub fn source_at(&self, listen: &str, host: Option<&Host>, server: &str, more: &[&str]) -> Source {
        let token = self.token.display().to_string();
        let mut args = vec!["source", "--server", server, "--listen", listen, "--token-file", &token];
        args.extend(["--memory", "128MiB", "--slot-size", "64KiB"]);
        args.extend(more);
        let mut agent = self.start(host, &args);
        let ready = agent.wait_for_line("listening=", LONG).unwrap();
        let address = ready.split("listening=").nth(1).and_then(|rest| rest.split(' ').next()).unwrap();
        Source { agent, address: address.parse().unwrap(), token, host: host.cloned() }
    }

    /// The arguments of a replica agent.
    pub fn replica_args(&self, server: &str, source: SocketAddr, more: &[&str]) -> Vec<String> {
        let (source, token) = (source.to_string(), self.token.display().to_string());
        let args = ["replica", "--server", server, "--source", &source, "--token-file", &token];
        args.iter().chain(more).map(|arg| (*arg).to_owned()).collect()
    }

    /// Starts a replica agent on this machine.
    pub fn replica(&self, server: &str, source: SocketAddr, more: &[&str]) -> Agent {
        let args = self.replica_args(server, source, more);
        self.start(None, &args.iter().map(String::as_str).collect::<Vec<_>>())
    }

    /// Starts a replica agent on a host of a test network.
    pub fn replica_on(&self, host: &Host, server: &str, source: SocketAddr, more: &[&str]) -> Agent {
        let args = self.replica_args(server, source, more);
        self.start(Some(host), &args.iter().map(String::as_str).collect::<Vec<_>>())
    }
}

/// A running source.
pub struct Source {
    pub agent: Agent,
    pub address: SocketAddr,
    token: String,
    host: Option<Host>,
}

impl Source {
    /// The output of `remora status --json`.
    pub fn status(&self) -> Value {
        let mut command = Command::new(env!("CARGO_BIN_EXE_remora"));
        let address = self.address.to_string();
        command.args(["status", "--json", "--source", &address, "--token-file", &self.token]).stderr(Stdio::inherit());
        if let Some(host) = &self.host {
            host.enter(&mut command).unwrap();
        }
        let said = command.output().unwrap();
        assert!(said.status.success(), "remora status: {}", said.status);
        serde_json::from_slice(&said.stdout).unwrap()
    }

    /// Waits until this agent, the first that joined, holds `slots` slots of 64 KiB each.
    #[track_caller]
    pub fn wait_for_slots(&self, agent: &mut Agent, slots: u64) {
        let waited = wait_until("the replica to hold some slots", LONG, || {
            let held = self.status()["replicas"][0]["slots_held"].as_u64().unwrap_or(0);
            let over = agent.ended()?.is_some();
            Ok(if held >= slots || over { Ok(over) } else { Err(format!("{held} slots")) })
        });
        assert!(
            matches!(waited, Ok(false)),
            "{waited:?}; the replica agent said:\n{}\nthe source:\n{}",
            agent.output(),
            self.agent.output()
        );
    }

    /// Waits until its snapshot is complete.
    pub fn wait_for_snapshot(&mut self) {
        self.agent.wait_for_line("snapshot completed", LONG).unwrap();
    }

    /// Bytes that its data lanes have sent.
    pub fn bytes_served(&self) -> u64 {
        self.status()["totals"]["bytes_served"].as_u64().unwrap()
    }

    /// The generation of its snapshot.
    pub fn generation(&self) -> u64 {
        self.status()["generation"]["generation"].as_u64().unwrap()
    }

    /// Asks it to stop, as a service manager does.
    pub fn stop(mut self) {
        self.agent.signal(Signal::TERM).unwrap();
        self.agent.wait_for_success(LONG).unwrap();
    }
}

/// Waits for the agent's end, which must have this exit code, and returns its output.
#[track_caller]
pub fn ends(agent: &mut Agent, code: i32) -> String {
    let status = agent.wait(LONG).unwrap();
    let said = agent.output();
    assert_eq!(status.code(), Some(code), "{status}; it said:\n{said}");
    said
}

/// Waits until this agent has made `replica` a replica. A failure shows the server's log.
#[track_caller]
pub fn succeeds(agent: &mut Agent, replica: &Server) {
    if let Err(error) = agent.wait_for_success(LONG) {
        panic!("{error}\n{replica} logged:\n{}", replica.log());
    }
}

/// Fails unless the output contains each of `words`.
#[track_caller]
pub fn says(said: &str, words: &[&str]) {
    for word in words {
        assert!(said.contains(word), "{word:?} is not in:\n{said}");
    }
}

/// Fills database 0 with `mebibytes` MiB of random data, which no server compresses, in values of [`VALUE`] bytes.
pub fn fill(server: &Server, mebibytes: usize, seed: u64) {
    let mut client = server.client().unwrap();
    let mut random = Random::new(seed);
    for number in 0..mebibytes * (1 << 20) / VALUE {
        client.queue(&[b"SET".to_vec(), format!("noise {number}").into_bytes(), random.bytes(VALUE)]);
        if client.queued() > 4 << 20 {
            client.flush().unwrap();
        }
    }
    for _ in 0..mebibytes * (1 << 20) / VALUE {
        client.receive().unwrap();
    }
}

/// Fills database 0 with `keys` keys of half a KiB of random data, each with `word` at its beginning.
pub fn fill_keys(server: &Server, keys: usize, word: &str) {
    let mut random = Random::new(keys as u64);
    let mut value = || [word.as_bytes(), b" ", &random.bytes(512)].concat();
    let commands: Vec<Vec<Vec<u8>>> =
        (0..keys).map(|number| vec![b"SET".to_vec(), format!("key {number}").into_bytes(), value()]).collect();
    for answer in server.client().unwrap().pipeline(&commands).unwrap() {
        assert!(answer.as_error().is_none(), "{answer:?}");
    }
}

/// One line of INFO as a number.
pub fn number(server: &Server, name: &str) -> i64 {
    server.fact(name).unwrap().parse().unwrap()
}

/// Makes loading so slow on this server that a test can interfere: `microseconds` for each key.
pub fn load_slowly(server: &Server, microseconds: u32) {
    server.configure("loading-process-events-interval-bytes", "1024").unwrap();
    server.configure("key-load-delay", &microseconds.to_string()).unwrap();
}
