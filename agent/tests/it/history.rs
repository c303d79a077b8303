//! A server whose replication history changes while a source captures it: it is shut down and started again, or
//! promoted. Replicas must get nothing of the new history under the replid of the old one, and must not need a full
//! copy.

use std::time::Duration;

use remora_lab::server::wait_until;
use remora_lab::{Agent, Kind, Server, assert_same_data, fill_every_type, require};
use rustix::process::Signal;

use crate::kit::{LONG, Source, at_once, number, primary, steady_writer, syncs};

/// A server that follows `source`'s stream through an agent that stays.
fn staying(source: &Source, kind: Kind) -> (Server, Agent) {
    let server = Server::start(kind).unwrap();
    let mut agent = source.replica(&server, &["--stay"]);
    agent.wait_for_event("in_step", LONG).unwrap();
    (server, agent)
}

/// A primary with every type in it.
fn filled(kind: Kind) -> Server {
    let server = primary(kind).config("repl-ping-replica-period", 3600).start().unwrap();
    fill_every_type(&mut server.client().unwrap(), 31).unwrap();
    server
}

/// A replica of `primary`, by the servers' own replication.
fn native_replica(primary: &Server, name: &str, value: &str) -> Server {
    let plan = crate::kit::primary(primary.kind()).config("repl-ping-replica-period", 3600).config(name, value);
    let server = plan.start().unwrap();
    server.replicate(primary).unwrap();
    server.wait_for_link(LONG).unwrap();
    server
}

/// Waits until the agent has handed its server over. If the agent feeds its server instead, so that `fed` is true,
/// stops the agent as an operator would.
fn handed_over(agent: &mut Agent, fed: impl Fn() -> bool) {
    let look = || {
        let done = agent.ended()?.is_some() || fed();
        Ok(if done { Ok(()) } else { Err("neither handed over nor fed".to_owned()) })
    };
    wait_until("the server to be handed over", LONG, look).unwrap();
    agent.signal(Signal::TERM).unwrap();
    agent.wait_for_success(LONG).unwrap();
}

fn set(server: &Server, database: &str, key: &str) {
    let mut client = server.client().unwrap();
    client.ok(&["SELECT", database]).unwrap();
    client.ok(&["SET", key, "1"]).unwrap();
}

fn exists(server: &Server, database: &str, key: &str) -> bool {
    let mut client = server.client().unwrap();
    client.ok(&["SELECT", database]).unwrap();
    client.int(&["EXISTS", key]).unwrap() == 1
}

#[test]
fn a_primary_that_is_shut_down_and_started_again_continues_its_replicas() {
    for kind in require::kinds() {
        let mut primary = filled(kind);
        let mut source = Source::start(&primary, &["--memory", "128MiB"]);
        let (server, mut agent) = staying(&source, kind);
        set(&primary, "0", "before");
        // A primary that starts again has no backlog: it continues only replicas that had received everything.
        assert_same_data(&primary, &server);
        primary.restart_saved(LONG).unwrap();
        for number in 0..100 {
            set(&primary, "3", &format!("after {number}"));
        }
        handed_over(&mut agent, || exists(&server, "3", "after 99"));
        assert_same_data(&primary, &server);
        assert_eq!(number(&primary, "sync_full"), 0, "{kind}: a full copy since the restart");
        source.agent.wait_for_event("history_changed", LONG).unwrap();
        assert_eq!(server.fact("master_port").unwrap(), primary.port().to_string());
    }
}

/// Well below the minute for which a source tries to resume a broken stream.
const SOON: Duration = Duration::from_secs(30);

#[test]
#[ignore = "long: make test-all"]
fn a_primary_that_starts_again_with_older_data_is_not_asked_again_and_again_for_the_old_stream() {
    at_once(require::kinds(), |kind| {
        let mut primary = filled(kind);
        primary.client().unwrap().ok(&["SAVE"]).unwrap();
        let mut source = Source::start(&primary, &["--memory", "128MiB"]);
        let (server, mut agent) = staying(&source, kind);
        set(&primary, "0", "not saved");
        assert_same_data(&primary, &server);
        // Valkey cannot write the data for a replica that does not say its version, since fields of hashes expire: it
        // answers +FULLRESYNC and closes the connection.
        primary.restart().unwrap();
        source.agent.wait_for_line("no longer reaches back", SOON).unwrap();
        // The primary would not continue the server, which loads another snapshot of the source.
        agent.wait_for_event("loading_again", LONG).unwrap();
        wait_until("the server to be fed again", LONG, || {
            let times = agent.output().matches("in step; staying").count();
            Ok(if times == 2 { Ok(()) } else { Err(agent.output()) })
        })
        .unwrap();
        assert_same_data(&primary, &server);
        assert!(!exists(&server, "0", "not saved"), "{kind}");
        agent.signal(Signal::TERM).unwrap();
        agent.wait_for_success(LONG).unwrap();
        assert_same_data(&primary, &server);
        // The answer to the source, and its snapshot.
        assert!(number(&primary, "sync_full") <= 2, "{kind}: {}", primary.log());
    });
}

#[test]
fn a_server_that_joins_after_the_change_gets_a_snapshot_of_the_new_history() {
    for kind in require::kinds() {
        let mut primary = filled(kind);
        let mut source = Source::start(&primary, &["--memory", "128MiB"]);
        let (_server, mut agent) = staying(&source, kind);
        primary.restart_saved(LONG).unwrap();
        set(&primary, "0", "after");
        source.agent.wait_for_event("history_changed", LONG).unwrap();
        agent.wait_for_success(LONG).unwrap();

        let late = Server::start(kind).unwrap();
        source.replicate(&late, &[]);
        let agreement = assert_same_data(&primary, &late);
        assert_eq!(source.snapshots_taken(), 2, "{kind}");
        assert_eq!(source.status()["generation"]["replid"], agreement.replid, "{kind}");
        assert_eq!(number(&primary, "sync_full"), 1, "{kind}: the second snapshot's alone");
    }
}

#[test]
fn a_captured_replica_that_is_promoted_does_not_give_its_new_writes_to_replicas_of_its_former_primary() {
    for kind in require::kinds() {
        let top = filled(kind);
        let captured = native_replica(&top, "repl-diskless-sync", "yes");
        let announced = top.address().to_string();
        let mut source = Source::start(&captured, &["--memory", "128MiB", "--announce", &announced]);
        let (server, mut agent) = staying(&source, kind);
        set(&top, "0", "before");
        assert_same_data(&top, &captured);
        let before = syncs(&top);

        // From here on the two servers have separate histories, with different bytes at the same offsets.
        captured.client().unwrap().ok(&["REPLICAOF", "NO", "ONE"]).unwrap();
        set(&captured, "0", "b-only-key");
        set(&top, "1", "a-only-key");
        set(&top, "1", "one more");
        handed_over(&mut agent, || exists(&server, "0", "b-only-key"));

        assert_same_data(&top, &server);
        assert!(exists(&server, "1", "a-only-key") && !exists(&server, "0", "b-only-key"), "{kind}");
        assert_eq!(server.fact("master_port").unwrap(), top.port().to_string());
        assert_eq!(syncs(&top), (before.0, before.1 + 1), "{kind}: no full copy");
        source.agent.wait_for_event("history_changed", LONG).unwrap();
    }
}

#[test]
fn a_captured_replica_that_is_promoted_takes_over_the_servers_that_were_fed_from_it() {
    for (kind, two_channels) in [(require::redis(), "no"), (require::valkey(), "no"), (require::valkey(), "yes")] {
        let Some(kind) = kind else { continue };
        let top = filled(kind);
        let option = if kind == Kind::Valkey9 { "dual-channel-replication-enabled" } else { "repl-diskless-sync" };
        let captured = native_replica(&top, option, if kind == Kind::Valkey9 { two_channels } else { "yes" });
        let mut source = Source::start(&captured, &["--memory", "128MiB"]);
        let (server, mut agent) = staying(&source, kind);
        set(&top, "0", "before");
        assert_same_data(&top, &captured);
        let before = syncs(&captured);

        captured.client().unwrap().ok(&["REPLICAOF", "NO", "ONE"]).unwrap();
        set(&captured, "2", "after");
        handed_over(&mut agent, || exists(&server, "2", "after"));

        assert_same_data(&captured, &server);
        assert!(exists(&server, "2", "after"), "{kind}");
        assert_eq!(number(&captured, "sync_full"), before.0, "{kind}: no full copy");
        source.agent.wait_for_event("history_changed", LONG).unwrap();
        assert_eq!(server.fact("master_port").unwrap(), captured.port().to_string());
    }
}

#[test]
fn a_promotion_in_the_middle_of_writes_loses_none_of_them() {
    for kind in require::kinds() {
        let top = filled(kind);
        let captured = native_replica(&top, "repl-diskless-sync", "yes");
        let mut source = Source::start(&captured, &["--memory", "128MiB"]);
        let (server, mut agent) = staying(&source, kind);
        let before = syncs(&captured);
        let writer = steady_writer(&top);
        writer.wait_for(2_000);
        // The stream may be cut in the middle of a command or of a transaction.
        captured.client().unwrap().ok(&["REPLICAOF", "NO", "ONE"]).unwrap();
        set(&captured, "2", "after");
        handed_over(&mut agent, || exists(&server, "2", "after"));
        writer.stop().unwrap();

        assert_same_data(&captured, &server);
        assert_eq!(number(&captured, "sync_full"), before.0, "{kind}: no full copy");
        source.agent.wait_for_event("history_changed", LONG).unwrap();
    }
}
