//! What the tests share: the agents as processes, primaries that take a snapshot at once, and data of a known size.
//!
//! This is not a layer over the lab: servers, networks and waiting are in the lab. This module knows the command line
//! of `remora`.

mod agents;
mod built;
mod cluster;
mod data;
mod mounted;
mod processors;
mod scene;
mod server;

use std::time::Duration;

use remora_lab::server::{Builder, wait_until};
use remora_lab::workload::Options;
use remora_lab::{Agent, Kind, Server, Workload};

pub(crate) use agents::{Source, Stage, ends, says, succeeds};
pub(crate) use built::built_module;
pub(crate) use cluster::{fill_cluster, id, start_cluster};
pub(crate) use data::{fill, fill_keys, load, load_small, write_past_the_backlog};
pub(crate) use mounted::Directory;
pub(crate) use processors::Processors;
pub(crate) use scene::{Scene, strs};
pub(crate) use server::{
    Way, assert_untouched, follows, kinds_and_module, load_slowly, number, quick, syncs, wait_until_loading,
    way_of_loading, with_or_without,
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
