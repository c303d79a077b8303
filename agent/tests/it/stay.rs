//! Staying: an agent feeds its server until the agent is stopped or the source has ended; no data is lost in either
//! case.

use remora_lab::workload::Options;
use remora_lab::{Agent, Kind, Server, Workload, assert_same_data, fill_every_type, random, require};
use rustix::process::Signal;

use crate::kit::{LONG, Source, kinds_and_module, number, primary, syncs, with_or_without};

/// A primary with every type in it, a source, and a server that follows it through an agent that stays.
struct Staying {
    primary: Server,
    server: Server,
    source: Source,
    agent: Agent,
}

impl Staying {
    fn start(kind: Kind, transport: &str) -> Staying {
        Staying::start_with(kind, transport, false)
    }

    /// The primary and the server have the module, or neither has.
    fn start_with(kind: Kind, transport: &str, module: bool) -> Staying {
        let (primary, server) =
            (with_or_without(primary(kind), module), with_or_without(Server::builder(kind), module));
        fill_every_type(&mut primary.client().unwrap(), 31).unwrap();
        let source = Source::start(&primary, &["--memory", "128MiB"]);
        let mut agent = source.replica(&server, &["--stay", "--transport", transport]);
        agent.wait_for_event("in_step", LONG).unwrap();
        Staying { primary, server, source, agent }
    }

    /// A writer of some thousand commands a second.
    fn writer(&self) -> Workload {
        let options = Options::seeded(random::seed("workload")).rate(WRITES_PER_SECOND);
        Workload::start(self.primary.client().unwrap(), options).unwrap()
    }
}

/// The write rate that a machine with two cores sustains in a debug build, together with everything else.
const WRITES_PER_SECOND: u64 = 3_000;

/// Limit on the bytes that the server is behind while it is fed: less than the writer makes in a moment. What matters
/// is that the distance does not grow. One of the workload's big values is a MiB and more.
const SMALL_LAG_BYTES: u64 = 8 << 20;

#[test]
#[ignore = "long: make test-all"]
fn a_server_that_is_fed_stays_close_and_is_handed_over_when_its_agent_is_stopped() {
    for (kind, transport) in require::kinds().into_iter().zip(["tcp", "shm"]) {
        let mut fed = Staying::start(kind, transport);
        let before = syncs(&fed.primary);
        let writer = fed.writer();
        for _ in 0..5 {
            writer.wait_for(WRITES_PER_SECOND / 2);
            let status = fed.source.wait_for_status("a small lag", |status| {
                status["replicas"][0]["journal_lag_bytes"].as_u64().is_some_and(|lag| lag < SMALL_LAG_BYTES)
            });
            assert_eq!(status["replicas"][0]["phase"], "stay");
            assert_eq!(status["replicas"][0]["transport"], transport);
        }
        assert_eq!(syncs(&fed.primary), before, "the primary serves one stream, the source's");

        // Stopped in the middle of the stream.
        fed.agent.signal(Signal::TERM).unwrap();
        fed.agent.wait_for_success(LONG).unwrap();
        assert_eq!(syncs(&fed.primary), (before.0, before.1 + 1));
        writer.stop().unwrap();
        assert_same_data(&fed.primary, &fed.server);
        assert_eq!(fed.server.fact("master_port").unwrap(), fed.primary.port().to_string());
    }
}

#[test]
fn a_server_that_is_fed_equals_an_idle_primary_without_a_hand_off() {
    for kind in require::kinds() {
        let fed = Staying::start(kind, "auto");
        let writer = fed.writer();
        writer.wait_for(WRITES_PER_SECOND);
        writer.stop().unwrap();
        assert_same_data(&fed.primary, &fed.server);
        assert_ne!(fed.server.fact("master_port").unwrap(), fed.primary.port().to_string());
    }
}

#[test]
#[ignore = "long: make test-all"]
fn when_the_source_is_killed_the_server_goes_to_the_primary_without_loss() {
    for (kind, module) in kinds_and_module() {
        let mut fed = Staying::start_with(kind, "auto", module);
        let before = syncs(&fed.primary);
        let writer = fed.writer();
        writer.wait_for(WRITES_PER_SECOND / 2);
        fed.source.agent.kill().unwrap();
        fed.agent.wait_for_event("handing_over", LONG).unwrap();
        fed.agent.wait_for_success(LONG).unwrap();
        writer.stop().unwrap();
        assert_same_data(&fed.primary, &fed.server);
        assert_eq!(syncs(&fed.primary), (before.0, before.1 + 1));
    }
}

#[test]
fn when_the_source_is_stopped_and_started_again_the_server_goes_to_the_primary_without_loss() {
    let Some(kind) = require::redis() else { return };
    let mut fed = Staying::start(kind, "tcp");
    let before = syncs(&fed.primary);
    let writer = fed.writer();
    writer.wait_for(WRITES_PER_SECOND / 2);
    fed.source.restart(&fed.primary);
    fed.agent.wait_for_success(LONG).unwrap();
    writer.stop().unwrap();
    assert_same_data(&fed.primary, &fed.server);
    assert_eq!(
        syncs(&fed.primary),
        (before.0, before.1 + 1),
        "a new source does not know the old stream; the primary does"
    );
}

#[test]
#[ignore = "long: make test-all"]
fn a_server_that_loses_its_link_continues_at_its_offset() {
    for (kind, module) in kinds_and_module() {
        let fed = Staying::start_with(kind, "auto", module);
        let before = syncs(&fed.primary);
        let writer = fed.writer();
        writer.wait_for(WRITES_PER_SECOND / 2);
        // The server drops the link and connects again with its offset.
        fed.server.client().unwrap().call(&["CLIENT", "KILL", "TYPE", "master"]).unwrap();
        writer.wait_for(WRITES_PER_SECOND / 2);
        writer.stop().unwrap();
        assert_same_data(&fed.primary, &fed.server);
        assert_eq!(syncs(&fed.primary), before);
        assert_eq!(fed.source.snapshots_taken(), 1);
    }
}

#[test]
#[ignore = "long: make test-all"]
fn a_server_that_restarts_without_its_data_is_filled_again() {
    for (kind, module) in kinds_and_module() {
        let mut fed = Staying::start_with(kind, "auto", module);
        let port = fed.server.fact("master_port").unwrap();
        fed.server.restart().unwrap();
        // The server has lost the address of its primary: its operator, or its configuration file, sets it again.
        fed.server.client().unwrap().ok(&["REPLICAOF", "127.0.0.1", &port]).unwrap();
        let writer = fed.writer();
        writer.wait_for(WRITES_PER_SECOND / 2);
        writer.stop().unwrap();
        assert_same_data(&fed.primary, &fed.server);
        assert_eq!(fed.source.snapshots_taken(), 1, "the source still held the snapshot");
    }
}

#[test]
fn a_primary_that_drops_the_sources_link_loses_nothing_of_the_stream() {
    for kind in require::kinds() {
        let mut fed = Staying::start(kind, "auto");
        let counts = || (number(&fed.primary, "sync_full"), number(&fed.primary, "sync_partial_ok"));
        let before = counts();
        let writer = fed.writer();
        writer.wait_for(WRITES_PER_SECOND / 2);
        fed.primary.client().unwrap().call(&["CLIENT", "KILL", "TYPE", "replica"]).unwrap();
        fed.source.agent.wait_for_event("stream_resumed", LONG).unwrap();
        writer.wait_for(WRITES_PER_SECOND / 2);
        writer.stop().unwrap();
        assert_same_data(&fed.primary, &fed.server);
        assert_eq!(counts(), (before.0, before.1 + 1));
    }
}
