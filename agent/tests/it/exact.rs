//! Exactness: whatever is written while a replica is made, afterwards the replica and the primary are equal byte for
//! byte, at the same offset, and the primary has made one copy in all.

use remora_lab::server::{Builder, wait_until};
use remora_lab::workload::Options;
use remora_lab::{Agent, Kind, Server, Workload, assert_same_data, fill_every_type, random, require};
use rustix::process::Signal;

use crate::kit::{Flood, LONG, Source, Stage, kinds_and_module, number, primary, syncs, with_or_without};

/// Commands that the writers must send while the replicas are made, so that there is load at all.
const WRITES_MEANWHILE: u64 = 5_000;

/// Makes one replica over shared memory and one over TCP from one snapshot, under every kind of write.
fn two_replicas_are_exact(primary_kind: Kind, replica_kind: Kind) {
    two_replicas_of(primary(primary_kind).start().unwrap(), replica_kind);
}

fn two_replicas_of(primary: Server, replica_kind: Kind) {
    let Some(()) = require::redis_benchmark() else { return };
    let primary_kind = primary.kind();
    fill_every_type(&mut primary.client().unwrap(), 7).unwrap();
    let servers = [Server::start(replica_kind).unwrap(), Server::start(replica_kind).unwrap()];
    let before = syncs(&primary);
    let source = Source::start(&primary, &["--memory", "1GiB"]);

    let writer = Workload::on(&primary).unwrap();
    let flood = Flood::start(&primary);
    writer.wait_for(WRITES_MEANWHILE);
    let mut agents =
        [source.replica(&servers[0], &["--transport", "shm"]), source.replica(&servers[1], &["--transport", "tcp"])];
    for agent in &mut agents {
        agent.wait_for_success(LONG).unwrap();
    }
    writer.wait_for(WRITES_MEANWHILE);
    flood.stop();
    let counts = writer.stop().unwrap();
    assert!(counts.commands >= 2 * WRITES_MEANWHILE, "{counts:?}");

    for server in &servers {
        if primary_kind == replica_kind {
            assert_same_data(&primary, server);
        } else {
            assert_same_content(&primary, server);
        }
    }
    let after = syncs(&primary);
    assert_eq!((after.0 - before.0, after.1 - before.1), (1, 2), "one copy in all, one continuation for each replica");
}

/// Between the families, digests differ by the digits in which scores are printed (`0.1` and `0.10000000000000001`). So
/// this compares the replication offsets, and then the content of every key.
pub(crate) fn assert_same_content(primary: &Server, replica: &Server) {
    let place = |server: &Server| (server.fact("master_replid").unwrap(), server.fact("master_repl_offset").unwrap());
    wait_until("the replica to reach the offset of its primary", LONG, || {
        let (here, there) = (place(primary), place(replica));
        Ok(if here == there { Ok(()) } else { Err(format!("{here:?} and {there:?}")) })
    })
    .unwrap();
    Stage::new().end(&["verify", "--primary", &primary.url(), "--replica", &replica.url()], 0);
}

#[test]
fn replicas_of_redis_made_under_every_kind_of_write_are_exact() {
    let Some(kind) = require::redis() else { return };
    two_replicas_are_exact(kind, kind);
}

#[test]
fn replicas_of_valkey_made_under_every_kind_of_write_are_exact() {
    let Some(kind) = require::valkey() else { return };
    two_replicas_are_exact(kind, kind);
}

#[test]
#[ignore = "long: make test-all"]
fn replicas_of_a_valkey_that_offers_two_channels_are_exact_under_every_kind_of_write() {
    let Some(kind) = require::valkey() else { return };
    let primary = primary(kind).config("dual-channel-replication-enabled", "yes").start().unwrap();
    two_replicas_of(primary, kind);
}

#[test]
#[ignore = "long: make test-all"]
fn the_stream_of_a_captured_replica_continues_in_the_database_that_it_is_in() {
    for (kind, channels) in [(require::redis(), ""), (require::valkey(), "no"), (require::valkey(), "yes")] {
        let Some(kind) = kind else { continue };
        let quiet = || primary(kind).config("repl-ping-replica-period", 3600);
        let with = |builder: Builder| match channels {
            "" => builder,
            channels => builder.config("dual-channel-replication-enabled", channels),
        };
        let (top, captured) = (with(quiet()).start().unwrap(), with(quiet()).start().unwrap());
        captured.replicate(&top).unwrap();
        captured.wait_for_link(LONG).unwrap();
        let mut client = top.client().unwrap();
        client.ok(&["SELECT", "8"]).unwrap();
        client.ok(&["SET", "before", "1"]).unwrap();
        assert_same_data(&top, &captured);
        // A replica passes its primary's stream on as it is: no SELECT follows for a new replica.
        let source = Source::start(&captured, &["--memory", "64MiB", "--announce", &top.address().to_string()]);
        let server = Server::start(kind).unwrap();
        let mut agent = source.replica(&server, &["--stay"]);
        agent.wait_for_event("in_step", LONG).unwrap();
        client.ok(&["SET", "after", "1"]).unwrap();
        assert_same_data(&top, &server);
    }
}

#[test]
fn a_user_without_the_rule_for_a_second_channel_gets_all_over_one() {
    let Some(kind) = require::valkey() else { return };
    let primary = primary(kind).config("dual-channel-replication-enabled", "yes").start().unwrap();
    let replica = Server::start(kind).unwrap();
    fill_every_type(&mut primary.client().unwrap(), 7).unwrap();
    primary.client().unwrap().ok(&["ACL", "SETUSER", "default", "-sync"]).unwrap();
    let mut source = Source::start(&primary, &["--memory", "64MiB"]);
    source.replicate(&replica, &[]);
    primary.client().unwrap().ok(&["ACL", "SETUSER", "default", "+sync"]).unwrap();
    assert_same_data(&primary, &replica);
    source.agent.wait_for_line("using one connection for snapshot and stream", LONG).unwrap();
}

#[test]
#[ignore = "long: make test-all"]
fn valkey_servers_become_exact_replicas_of_a_redis_under_every_kind_of_write() {
    let (Some(redis), Some(valkey)) = (require::redis(), require::valkey()) else { return };
    two_replicas_are_exact(redis, valkey);
}

#[test]
fn every_type_with_any_bytes_in_sixteen_databases_arrives() {
    for kind in require::kinds() {
        let (primary, replica) = (primary(kind).start().unwrap(), Server::start(kind).unwrap());
        let keys = fill_every_type(&mut primary.client().unwrap(), 11).unwrap();
        let source = Source::start(&primary, &["--memory", "64MiB"]);
        source.replicate(&replica, &[]);
        assert_same_data(&primary, &replica);

        let mut client = replica.client().unwrap();
        assert_eq!(remora_lab::workload::key_count(&mut client).unwrap(), keys);
        let every_byte: Vec<u8> = (0..=u8::MAX).collect();
        assert_eq!(client.bytes(&[b"GET".as_slice(), &every_byte]).unwrap().unwrap(), every_byte);
        for database in 0..16 {
            client.ok(&["SELECT", &database.to_string()]).unwrap();
            assert_eq!(client.text(&["GET", "database"]).unwrap(), database.to_string());
        }
    }
}

#[test]
fn an_empty_primary_makes_an_empty_replica_that_follows_it() {
    for kind in require::kinds() {
        let (primary, replica) = (primary(kind).start().unwrap(), Server::start(kind).unwrap());
        let source = Source::start(&primary, &["--memory", "16MiB"]);
        source.replicate(&replica, &[]);
        assert_eq!(replica.client().unwrap().int(&["DBSIZE"]).unwrap(), 0);
        primary.client().unwrap().ok(&["SET", "after", "the hand-off"]).unwrap();
        assert_same_data(&primary, &replica);
        assert_eq!(replica.client().unwrap().text(&["GET", "after"]).unwrap(), "the hand-off");
    }
}

#[test]
#[ignore = "long: make test-all"]
fn a_value_as_long_as_servers_allow_passes_through_a_small_window() {
    for kind in require::kinds() {
        the_longest_value_passes(kind);
    }
}

fn the_longest_value_passes(kind: Kind) {
    // Without compression: compressed zeros would take no space.
    let primary = primary(kind).config("rdbcompression", "no").start().unwrap();
    let replica = Server::start(kind).unwrap();
    let mut client = primary.client().unwrap();
    assert_eq!(client.int(&["SETRANGE", "big", &(LONGEST - 4).to_string(), "last"]).unwrap(), LONGEST);
    client.int(&["SETRANGE", "big", "200000000", "in the middle"]).unwrap();

    let source = Source::start(&primary, &["--memory", "64MiB"]);
    source.replicate(&replica, &["--memory", "32MiB"]);
    let mut there = replica.client().unwrap();
    assert_eq!(there.int(&["STRLEN", "big"]).unwrap(), LONGEST);
    assert_same_data(&primary, &replica);
}

/// 512 MiB: `proto-max-bulk-len`.
const LONGEST: i64 = 512 << 20;

// Staying: an agent feeds its server until the agent is stopped or the source has ended; no data is lost in either
// case.

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
#[ignore = "long: make test-all"]
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
#[ignore = "long: make test-all"]
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
#[ignore = "long: make test-all"]
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
