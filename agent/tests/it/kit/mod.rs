//! What the tests share: the agents as processes, primaries that take a snapshot at once, and data of a known size.
//!
//! This is not a layer over the lab: servers, networks and waiting are in the lab. This module knows the command line
//! of `remora`.

mod agents;
mod server;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

pub(crate) use agents::{Source, Stage, ends, says, succeeds};
use remora_lab::server::{Builder, wait_until};
use remora_lab::workload::Options;
use remora_lab::{Agent, Kind, Server, Workload};
use rustix::mount::UnmountFlags;
pub(crate) use server::{
    Way, assert_untouched, follows, kinds_and_module, load_slowly, number, quick, syncs, wait_until_loading,
    way_of_loading, with_or_without,
};

pub(crate) use self::agents::Processors;
pub(crate) use self::server::{
    fill, fill_cluster, fill_keys, id, load, load_small, start_cluster, write_past_the_backlog,
};

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
