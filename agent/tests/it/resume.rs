//! Processes that are killed and connections that are cut in the middle of a transfer, and how it resumes: never with a
//! second snapshot while the first is available, never with a mix of two, and never with a changed setting left behind.

use std::net::IpAddr;
use std::time::Duration;

use remora_lab::server::wait_until;
use remora_lab::workload::Options;
use remora_lab::{Host, Kind, Net, Server, Shape, Workload, assert_same_data, require};
use rustix::process::Signal;

use crate::kit::{LONG, Source, Stage, at_once, ends, fill, fill_keys, load_slowly, number, says, succeeds};

/// Random data in the primary, in MiB.
const MEBIBYTES: usize = 16;

/// Rate of the replica's cable: slow enough to interfere while the snapshot is in transit, which takes about three
/// seconds.
const CABLE: u64 = 6 << 20;

/// Slots after which a test interferes: a quarter of the snapshot.
const A_QUARTER: u64 = 64;

/// How much more than the snapshot may cross the cable if no slot crosses twice: slots in transit when the cut came,
/// directory entries, the stream.
const SLACK: f64 = 1.4;

/// Two hosts, a primary with random data on one, an empty server on the other, and a slow cable between them.
struct Hosts {
    here: Host,
    there: Host,
    primary: Server,
    replica: Server,
    stage: Stage,
}

impl Hosts {
    /// `module`: whether both servers have the module.
    fn new(kind: Kind, module: bool) -> Hosts {
        let net = Net::new().unwrap();
        let (here, there) = (net.host("primary").unwrap(), net.host("replica").unwrap());
        let server = |host| {
            let builder = Server::builder(kind).on(host).config("repl-diskless-sync-delay", 0);
            if module { builder.module("").unwrap() } else { builder }.start().unwrap()
        };
        let (primary, replica) = (server(&here), server(&there));
        fill(&primary, MEBIBYTES, 1);
        there.shape(Shape::rate(CABLE)).unwrap();
        Hosts { here, there, primary, replica, stage: Stage::new() }
    }

    fn source(&self) -> Source {
        self.stage.source_on(&self.here, &self.primary.url(), &[])
    }

    fn source_again(&self, at: std::net::SocketAddr) -> Source {
        self.stage.source_at(&at.to_string(), Some(&self.here), &self.primary.url(), &[])
    }

    /// A replica agent that keeps what it has received.
    fn replica(&self, source: &Source, more: &[&str]) -> remora_lab::Agent {
        let folder = self.stage.path("state");
        let mut args = vec!["--state-dir", &folder];
        args.extend(more);
        self.stage.replica_on(&self.there, &self.replica.url(), source.address, &args)
    }

    /// Asserts that one snapshot was taken, that its bytes crossed the cable once, and that the replica is exact.
    fn assert_one_snapshot_once(&self, source: &Source) {
        assert_eq!(number(&self.primary, "sync_full"), 1, "the primary says:\n{}", self.primary.log());
        let (served, snapshot) = (source.bytes_served() as f64, (MEBIBYTES << 20) as f64);
        assert!(served < snapshot * SLACK, "{served} bytes were served for a snapshot of {snapshot}");
        self.assert_exact();
    }

    fn assert_exact(&self) {
        assert_eq!(self.replica.configured("repl-diskless-load").unwrap(), "disabled");
        assert_same_data(&self.primary, &self.replica);
        assert_eq!(master_host(&self.replica).parse(), Ok(self.primary.address().ip()));
    }
}

fn master_host(server: &Server) -> String {
    server.fact("master_host").unwrap()
}

/// Every kind of server without the module and with it.
fn with_and_without_module() -> Vec<(Kind, bool)> {
    require::kinds().into_iter().flat_map(|kind| [(kind, false), (kind, true)]).collect()
}

/// Changes of every kind, few enough for the slow cable.
fn gentle_writer(server: &Server) -> Workload {
    let options = Options { big_bytes: 0, pipeline: 4, ..Options::seeded(remora_lab::random::seed("workload")) };
    Workload::start(server.client().unwrap(), options.rate(300)).unwrap()
}

#[test]
#[ignore = "long: make test-all"]
fn a_replica_agent_that_was_killed_resumes_with_the_slots_it_lacks() {
    let Some(()) = require::shaping() else { return };
    at_once(with_and_without_module(), |(kind, module)| {
        let hosts = Hosts::new(kind, module);
        let source = hosts.source();
        let writer = gentle_writer(&hosts.primary);
        let mut first = hosts.replica(&source, &[]);
        source.wait_for_slots(&mut first, A_QUARTER);
        first.kill().unwrap();
        // The setting that the second agent has to restore. Without it the test would prove little.
        assert_ne!(hosts.replica.configured("repl-diskless-load").unwrap(), "disabled");

        let mut second = hosts.replica(&source, &[]);
        succeeds(&mut second, &hosts.replica);
        writer.stop().unwrap();
        hosts.assert_one_snapshot_once(&source);
    });
}

#[test]
fn a_replica_agent_that_was_stopped_leaves_an_empty_server_and_resumes_when_started_again() {
    let Some(()) = require::shaping() else { return };
    let Some(kind) = require::redis() else { return };
    let hosts = Hosts::new(kind, true);
    let source = hosts.source();
    let mut first = hosts.replica(&source, &[]);
    source.wait_for_slots(&mut first, A_QUARTER);
    first.signal(Signal::TERM).unwrap();
    says(&ends(&mut first, 7), &["stopped by SIGTERM", "detached and emptied"]);
    assert_eq!(hosts.replica.fact("role").unwrap(), "master");
    assert_eq!(hosts.replica.client().unwrap().int(&["DBSIZE"]).unwrap(), 0);
    assert_eq!(hosts.replica.configured("repl-diskless-load").unwrap(), "disabled");

    let mut second = hosts.replica(&source, &[]);
    succeeds(&mut second, &hosts.replica);
    hosts.assert_one_snapshot_once(&source);
}

/// Longer than the silence that either end tolerates (10 s), so that both lose their connection.
const CUT: Duration = Duration::from_secs(11);

#[test]
#[ignore = "long: make test-all"]
fn a_network_that_was_cut_between_the_agents_loses_no_slot() {
    let Some(()) = require::shaping() else { return };
    at_once(require::kinds(), |kind| {
        // With and without a state folder, and with and without the module.
        is_cut(kind, kind == Kind::Redis7, true);
        is_cut(kind, kind == Kind::Valkey9, false);
    });
}

fn is_cut(kind: Kind, module: bool, keeps: bool) {
    let hosts = Hosts::new(kind, module);
    let mut source = hosts.source();
    let summary = hosts.stage.path("summary.json");
    let mut agent = match keeps {
        true => hosts.replica(&source, &["--json", &summary]),
        false => {
            let args = ["--json", &summary];
            hosts.stage.replica_on(&hosts.there, &hosts.replica.url(), source.address, &args)
        }
    };
    source.wait_for_slots(&mut agent, A_QUARTER);
    hosts.there.cut().unwrap();
    agent.wait_for_event("source_lost", CUT * 3).unwrap();
    source.agent.wait_for_event("replica_disconnected", CUT * 3).unwrap();
    hosts.there.heal().unwrap();
    succeeds(&mut agent, &hosts.replica);
    hosts.assert_one_snapshot_once(&source);
    let summary: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(summary).unwrap()).unwrap();
    assert!(summary["interruptions"].as_u64().unwrap() > 0, "{summary}");
}

#[test]
#[ignore = "long: make test-all"]
fn a_killed_source_is_reported_and_its_successor_is_read_from_the_beginning() {
    let Some(()) = require::shaping() else { return };
    at_once([(Kind::Redis7, true), (Kind::Valkey9, false)], |(kind, keeps)| {
        let Some(kind) = require::kind(kind) else { return };
        let hosts = Hosts::new(kind, !keeps);
        let mut source = hosts.source();
        let writer = gentle_writer(&hosts.primary);
        let mut agent = match keeps {
            true => hosts.replica(&source, &[]),
            false => hosts.stage.replica_on(&hosts.there, &hosts.replica.url(), source.address, &[]),
        };
        source.wait_for_slots(&mut agent, A_QUARTER);
        let (address, generation) = (source.address, source.generation());
        source.agent.kill().unwrap();
        let warning = agent.wait_for_event("source_lost", LONG).unwrap();
        says(&warning, &["WARN", "the source", &address.to_string()]);

        let source = hosts.source_again(address);
        succeeds(&mut agent, &hosts.replica);
        writer.stop().unwrap();
        assert!(source.generation() > generation);
        assert_eq!(number(&hosts.primary, "sync_full"), 2);
        hosts.assert_exact();
    });
}

#[test]
fn a_primary_killed_while_it_makes_the_snapshot_is_asked_again_when_it_is_back() {
    for kind in require::kinds() {
        let mut primary = Server::builder(kind).config("repl-diskless-sync-delay", 0).start().unwrap();
        let replica = Server::start(kind).unwrap();
        // 2000 keys at 2 ms each: the child takes four seconds.
        fill_keys(&primary, 2000, "old");
        primary.configure("rdb-key-save-delay", "2000").unwrap();
        let stage = Stage::new();
        let mut source = stage.source(&primary.url(), &[]);
        let mut agent = stage.replica(&replica.url(), source.address, &[]);
        source.wait_for_slots(&mut agent, 2);
        primary.kill().unwrap();
        says(&source.agent.wait_for_event("snapshot_failed", LONG).unwrap(), &["WARN"]);
        agent.wait_for_event("snapshot_given_up", LONG).unwrap();

        primary.restart().unwrap();
        fill_keys(&primary, 300, "new");
        succeeds(&mut agent, &replica);
        assert_same_data(&primary, &replica);
        assert_eq!(number(&primary, "sync_full"), 1);
    }
}

#[test]
fn a_primary_that_restarts_while_its_snapshot_is_being_loaded_causes_a_new_generation() {
    for kind in require::kinds() {
        let mut primary = Server::builder(kind).config("repl-diskless-sync-delay", 0).start().unwrap();
        let replica = Server::start(kind).unwrap();
        fill_keys(&primary, 3000, "old");
        load_slowly(&replica, 2000);
        let stage = Stage::new();
        let mut source = stage.source(&primary.url(), &[]);
        let mut agent = stage.replica(&replica.url(), source.address, &[]);
        source.wait_for_snapshot();
        let generation = source.generation();
        agent.wait_for_event("link_followed", LONG).unwrap();
        primary.restart().unwrap();
        fill_keys(&primary, 300, "new");
        source.agent.wait_for_event("stream_lost", LONG).unwrap();
        succeeds(&mut agent, &replica);
        assert!(source.generation() > generation);
        assert_same_data(&primary, &replica);
        assert_eq!(replica.client().unwrap().int(&["DBSIZE"]).unwrap(), 300);
    }
}

#[test]
fn a_server_that_restarts_while_it_loads_is_redirected_again() {
    for kind in require::kinds() {
        let primary = Server::builder(kind).config("repl-diskless-sync-delay", 0).start().unwrap();
        let mut replica = Server::start(kind).unwrap();
        fill_keys(&primary, 3000, "old");
        load_slowly(&replica, 1000);
        let stage = Stage::new();
        let source = stage.source(&primary.url(), &[]);
        let mut agent = stage.replica(&replica.url(), source.address, &[]);
        wait_until("the server to load", LONG, || {
            let loading = replica.fact("loading")?;
            Ok(if loading == "1" { Ok(()) } else { Err(loading) })
        })
        .unwrap();
        replica.restart().unwrap();
        agent.wait_for_event("server_restarted", LONG).unwrap();
        succeeds(&mut agent, &replica);
        assert_same_data(&primary, &replica);
        assert_eq!(number(&primary, "sync_full"), 1);
        assert_eq!(replica.configured("repl-diskless-load").unwrap(), "disabled");
        assert_eq!(master_host(&replica).parse::<IpAddr>(), Ok(primary.address().ip()));
    }
}

#[test]
fn a_server_that_another_client_takes_over_meanwhile_is_left_to_it() {
    let Some(kind) = require::redis() else { return };
    let primary = Server::builder(kind).config("repl-diskless-sync-delay", 0).start().unwrap();
    let (replica, other) = (Server::start(kind).unwrap(), Server::start(kind).unwrap());
    fill_keys(&primary, 3000, "old");
    fill_keys(&other, 10, "other");
    load_slowly(&replica, 500);
    let stage = Stage::new();
    // Nothing to load yet: the snapshot waits for the primary's child.
    primary.configure("rdb-key-save-delay", "1000").unwrap();
    let source = stage.source(&primary.url(), &[]);
    let mut agent = stage.replica(&replica.url(), source.address, &[]);
    agent.wait_for_event("link_followed", LONG).unwrap();
    wait_until("the server to be redirected", LONG, || {
        let answer = replica.client()?.ok(&["REPLICAOF", "127.0.0.1", &other.port().to_string()]);
        Ok(answer.map_err(|error| error.to_string()))
    })
    .unwrap();
    let said = ends(&mut agent, 14);
    says(&said, &["was told to follow", &other.port().to_string(), "the server is left as it is"]);
    replica.wait_for_link(LONG).unwrap();
    assert_same_data(&other, &replica);
    assert_eq!(replica.configured("repl-diskless-load").unwrap(), "disabled");
}
