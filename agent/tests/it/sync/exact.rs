//! Exactness: whatever is written while a replica is made, afterwards the replica and the primary are equal byte for
//! byte, at the same offset, and the primary has made one copy in all. So it is for replicas that stay, for those that
//! join late, and after commands that must not be applied late.

use std::collections::BTreeSet;
use std::sync::mpsc::RecvTimeoutError;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustix::process::Signal;
use serde_json::Value;

use crate::kit::{
    Flood, LONG, Scene, Source, Stage, at_once, built_module, kinds_and_module, number, primary, quick, syncs,
    with_or_without,
};
use remora_lab::compare::same_data;
use remora_lab::server::{Builder, Program, wait_until};
use remora_lab::workload::Options;
use remora_lab::{Agent, Client, Kind, Server, Workload, assert_same_data, fill_every_type, random, require, server};
use remora_redis::commands::{RELEASES, Release, TABLE, find};

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

// The table of commands, and what must not be applied late: real servers, and replicas that join long after a command.

// ---- the table -----------------------------------------------------------------------------------------------------

/// Fails, by name, for a command that writes and is not in the table, and for what the table says that is not true of
/// this server.
pub(crate) fn assert_table_knows(server: &Server, program: &Program) {
    let described = server::of(server).unwrap();
    let [major, minor, _] = program.version();
    let release = RELEASES
        .iter()
        .find(|release| (release.family, release.major, release.minor) == (program.family(), major, minor));
    let mut wrong = Vec::new();
    for command in described.iter().filter(|command| command.writes() || command.has("may_replicate")) {
        match find(command.name.as_bytes()) {
            None => wrong.push(format!("{} is not in the table", command.name)),
            Some(row) if command.writes() && !row.writes => wrong.push(format!("{} writes", command.name)),
            Some(row) if release.is_some_and(|release| row.releases.has(*release) != Some(true)) => {
                wrong.push(format!("{} is there", command.name));
            }
            Some(_) => {}
        }
    }
    let there: BTreeSet<&str> = described.iter().map(|command| command.name.as_str()).collect();
    if let Some(release) = release {
        let gone = TABLE.iter().filter(|row| row.releases.has(*release) == Some(true) && !there.contains(row.name));
        wrong.extend(gone.map(|row| format!("{} is not there", row.name)));
    }
    // Keys and arity are those of the newest server that has the command.
    for (row, command) in described.iter().filter_map(|command| Some((find(command.name.as_bytes())?, command))) {
        let newest = row.releases.iter().max_by_key(|release: &Release| (release.major, release.minor));
        if newest == release.copied() && row.keys != command.keys {
            wrong.push(format!("{}: its keys are {:?}", command.name, command.keys));
        }
    }
    assert!(wrong.is_empty(), "{program}: {}; cargo xtask commands writes the table", wrong.join(", "));
}

#[test]
fn every_command_of_the_servers_that_writes_is_in_the_table() {
    for kind in require::kinds() {
        let program = Program::at(kind.binary().unwrap()).unwrap();
        assert_table_knows(&Server::start(kind).unwrap(), &program);
    }
}

// ---- late joiners --------------------------------------------------------------------------------------------------

/// A primary that says into its stream what it is told to (`SAY`), as servers of other versions do by themselves.
fn talkative(stage: &Stage, kind: Kind) -> Server {
    // A replica must have the modules of its primary.
    primary(kind).config("loadmodule", built_module(stage, "propagate")).start().unwrap()
}

fn run(client: &mut Client, commands: &[&str]) {
    for command in commands {
        let answer = client.call(&command.split(' ').collect::<Vec<_>>()).unwrap();
        assert!(answer.as_str() != Some("not known"), "{command}: {answer:?}");
    }
}

/// Waits until the source has all that the primary has written.
fn reached(source: &Source, primary: &Server) {
    let wanted = number(primary, "master_repl_offset");
    source.wait_for_status("the journal", |status| status["generation"]["offset_now"].as_u64() >= Some(wanted));
}

/// Makes a replica, so that the source has a snapshot, has the primary say this, and makes another replica.
fn late_joiner(kind: Kind, said: &[&str], options: &[&str], more: &[&str]) -> (Server, Server, Source) {
    let stage = Stage::new();
    let primary = talkative(&stage, kind);
    let mut client = primary.client().unwrap();
    run(&mut client, &["SET kept 1", "SET key 1 PX 600000", "SET other 1 EX 600"]);
    let source = Source::start(&primary, options);
    source.replicate(&talkative(&stage, kind), &[]);
    assert_eq!(syncs(&primary).0, 1);
    run(&mut client, said);
    reached(&source, &primary);
    let late = talkative(&stage, kind);
    if more.contains(&"--stay") {
        let mut agent = source.replica(&late, more);
        agent.wait_for_event("in_step", LONG).unwrap();
        assert_same_data(&primary, &late);
        agent.signal(rustix::process::Signal::TERM).unwrap();
        agent.wait_for_success(LONG).unwrap();
    } else {
        source.replicate(&late, more);
    }
    (primary, late, source)
}

/// Redis 6.2 writes expiries into its stream as they were given: they count from the moment at which a replica runs the
/// command.
#[test]
#[ignore = "long: make test-all"]
fn expiries_that_count_from_their_command_are_not_applied_late() {
    let said: [&[&str]; 4] = [
        &["SAY PEXPIRE key 600000"],
        &["MULTI", "SAY SET key 1 PX 600000", "SAY EXPIRE other 600", "EXEC"],
        &["EVAL redis.call('say','SETEX','other','600','1') 0"],
        &["SAY GETEX key EX 600", "SET last 1"],
    ];
    at_once(require::kinds(), |kind| {
        for (said, more) in said.into_iter().zip([&["--transport", "tcp"][..], &["--stay"], &[], &[]]) {
            let (primary, late, _) = late_joiner(kind, said, &[], more);
            assert_same_data(&primary, &late);
            assert_eq!(syncs(&primary).0, 2, "{said:?}: another snapshot is taken for the late joiner");
        }
    });
}

#[test]
#[ignore = "long: make test-all"]
fn what_changes_the_map_of_a_cluster_is_not_applied_late() {
    for kind in require::kinds() {
        let (primary, late, _) =
            late_joiner(kind, &["SAY CLUSTER SETSLOT 7 NODE 0123456789012345678901234567890123456789"], &[], &[]);
        assert_same_data(&primary, &late);
        assert_eq!(syncs(&primary).0, 2);
        assert!(!late.log().contains("CLUSTER"), "{}", late.log());
    }
}

#[test]
#[ignore = "long: make test-all"]
fn what_may_be_late_needs_no_other_snapshot() {
    for kind in require::kinds() {
        let said = [
            "SET key 2 PX 500000",
            "PEXPIRE other 500000",
            "GETEX key EX 400",
            "SAY SET key 1 PXAT 4000000000000",
            "PUBLISH __sentinel__:hello 127.0.0.1,1,x,1,m,127.0.0.1,2,0",
            "XADD stream * f v",
            "XGROUP CREATE stream g 0",
            "XREADGROUP GROUP g c STREAMS stream >",
        ];
        let (primary, _, _) = late_joiner(kind, &said, &[], &[]);
        assert_eq!(syncs(&primary).0, 1);
    }
}

#[test]
#[ignore = "long: make test-all"]
fn a_message_is_not_repeated_to_a_replica_that_joins_after_it() {
    for kind in require::kinds() {
        for (repeat, wanted) in [("0s", "new"), ("1h", "old")] {
            let primary = primary(kind).start().unwrap();
            let source = Source::start(&primary, &["--repeat-messages", repeat]);
            source.replicate(&Server::start(kind).unwrap(), &[]);
            let mut client = primary.client().unwrap();
            run(&mut client, &["MULTI", "PUBLISH channel old", "SET a 1", "EXEC", "SPUBLISH channel old"]);
            reached(&source, &primary);
            let base = if wanted == "new" { "fork" } else { "snapshot" };
            let told = source.wait_for_status("the base of the next replica", |status| status["base"]["kind"] == base);
            assert_eq!(told["base"]["passed_over"].as_str().unwrap().contains("messages"), wanted == "new", "{told}");
            let late = Server::start(kind).unwrap();
            let mut subscriber = late.client().unwrap();
            for command in [["SUBSCRIBE", "channel"], ["SSUBSCRIBE", "channel"]] {
                subscriber.send(&command).unwrap();
                subscriber.receive().unwrap();
            }
            source.replicate(&late, &[]);
            run(&mut client, &["PUBLISH channel new"]);
            let message = subscriber.receive().unwrap();
            let text =
                message.as_array().and_then(|parts| parts.last()).and_then(|last| last.as_str()).map(str::to_owned);
            assert_eq!(text.as_deref(), Some(wanted), "--repeat-messages {repeat}");
            assert_eq!(syncs(&primary).0, if wanted == "new" { 2 } else { 1 }, "--repeat-messages {repeat}");
            assert_same_data(&primary, &late);
        }
    }
}

#[test]
#[ignore = "long: make test-all"]
fn replicas_that_come_together_share_a_snapshot_while_messages_never_stop() {
    let Some(kind) = require::valkey() else { return };
    // On a busy machine they come within seconds of each other: those who come during the delay come together.
    let primary = primary(kind).config("repl-diskless-sync-delay", 3).start().unwrap();
    // Not more snapshots than it may take without a pause.
    let source = Source::start(&primary, &["--fork-interval", "1h"]);
    let mut publisher = primary.client().unwrap();
    let (stop, stopped) = std::sync::mpsc::channel::<()>();
    let publishing = std::thread::spawn(move || {
        while stopped.recv_timeout(Duration::from_millis(5)) == Err(RecvTimeoutError::Timeout) {
            publisher.call(&["PUBLISH", "channel", "x"]).unwrap();
        }
    });
    let replicas: Vec<Server> = (0..8).map(|_| Server::start(kind).unwrap()).collect();
    let mut agents: Vec<_> = replicas.iter().map(|replica| source.replica(replica, &[])).collect();
    for agent in &mut agents {
        agent.wait_for_success(LONG).unwrap();
    }
    drop(stop);
    publishing.join().unwrap();
    for replica in &replicas {
        assert_same_data(&primary, replica);
    }
}

// ---- backups -------------------------------------------------------------------------------------------------------

#[test]
#[ignore = "long: make test-all"]
fn a_backup_has_times_of_the_calendar_and_no_map_of_a_cluster() {
    for kind in require::kinds() {
        let stage = Stage::new();
        let scene = Scene::new(talkative(&stage, kind), &[]);
        let mut client = scene.primary.client().unwrap();
        let shelf = scene.stage.path("backups");
        let mut backup = scene.start("backup", &shelf, &["--journal"]);
        backup.wait_for_line("the commands since are recorded", LONG).unwrap();
        let before = now();
        run(
            &mut client,
            &[
                "SET key 1",
                "SAY SET key 1 PX 600000",
                "MULTI",
                "SAY SET other 1",
                "SAY EXPIRE other 700",
                "EXEC",
                "SAY CLUSTER SETSLOT 7 NODE 0123456789012345678901234567890123456789",
                "SPUBLISH channel message",
                "SET last 1",
            ],
        );
        let wanted = number(&scene.primary, "master_repl_offset");
        scene.source.wait_for_status("the commands to be recorded", |status| {
            let recorded =
                status["replicas"].as_array().unwrap().iter().filter_map(|one| one["applied_offset"].as_u64());
            recorded.max() >= Some(wanted)
        });
        let after = now();
        backup.signal(rustix::process::Signal::TERM).unwrap();
        backup.wait_for_success(LONG).unwrap();
        let data = scene.stage.path("data");
        scene.stage.end(&["restore", &shelf, "--to", &data], 0);
        // It begins with an error in its files, if it is told to.
        let restored = quick(kind).config("dir", &data).config("appendonly", "yes");
        let restored = restored.config("propagation-error-behavior", "panic").start().unwrap();
        let mut client = restored.client().unwrap();
        assert_eq!(client.text(&["GET", "last"]).unwrap(), "1");
        for (key, lives) in [("key", 600_000), ("other", 700_000)] {
            let expires = client.int(&["PEXPIRETIME", key]).unwrap();
            assert!(
                (before + lives..=after + lives).contains(&expires),
                "{key}: {expires}, {before} to {after} + {lives}"
            );
        }
        assert!(!restored.log().contains("CLUSTER"), "{}", restored.log());
    }
}

/// Milliseconds since 1970.
fn now() -> i64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_millis() as i64
}

// Late joiners: a snapshot serves every replica that joins while the journal reaches back to it, at no cost to the
// primary. When it no longer does, the source takes another snapshot by itself.

/// What a fork or a copy for a replica leaves behind in a primary's INFO.
fn traces_of_a_snapshot(primary: &Server) -> Vec<(&'static str, String)> {
    let names = ["sync_full", "total_forks", "latest_fork_usec", "rdb_last_save_time", "rdb_last_bgsave_time_sec"];
    names.into_iter().map(|name| (name, primary.fact(name).unwrap())).collect()
}

/// Writes `bytes` bytes to the primary, in values of 64 KiB.
fn write(client: &mut Client, bytes: usize) {
    const VALUE: usize = 64 << 10;
    let value = vec![b'v'; VALUE];
    for number in 0..bytes.div_ceil(VALUE) {
        client.ok(&[b"SET".as_slice(), format!("written:{}", number % 16).as_bytes(), &value]).unwrap();
    }
}

/// Whether the journal no longer reaches back to the snapshot, or the source has already dropped the snapshot.
fn is_overrun(status: &Value) -> bool {
    let generation = &status["generation"];
    generation.is_null()
        || generation["journal_first"].as_u64() > generation["offset_start"].as_u64().map(|start| start + 1)
}

#[test]
fn a_late_joiner_is_made_from_the_old_snapshot_without_a_fork() {
    for kind in require::kinds() {
        let primary = primary(kind).start().unwrap();
        let mut client = primary.client().unwrap();
        fill_every_type(&mut client, 3).unwrap();
        let servers = [Server::start(kind).unwrap(), Server::start(kind).unwrap()];
        let source = Source::start(&primary, &["--memory", "64MiB"]);

        source.replicate(&servers[0], &["--transport", "tcp"]);
        let generation = source.generation();
        wait_until("the primary to be done with its child", LONG, || {
            let busy = primary.fact("rdb_bgsave_in_progress")?;
            Ok(if busy == "0" { Ok(()) } else { Err(busy) })
        })
        .unwrap();
        let before = traces_of_a_snapshot(&primary);
        write(&mut client, 2 << 20);
        source.replicate(&servers[1], &["--transport", "shm"]);

        assert_eq!(traces_of_a_snapshot(&primary), before, "the late joiner cost the primary a snapshot");
        assert_eq!((source.generation(), source.snapshots_taken()), (generation, 1));
        assert_eq!(syncs(&primary).1, 2);
        for server in &servers {
            assert_same_data(&primary, server);
        }
    }
}

#[test]
#[ignore = "long: make test-all"]
fn after_the_journal_was_overrun_the_next_joiner_has_a_new_snapshot_taken() {
    for kind in require::kinds() {
        let primary = primary(kind).start().unwrap();
        let mut client = primary.client().unwrap();
        fill_every_type(&mut client, 4).unwrap();
        let servers = [Server::start(kind).unwrap(), Server::start(kind).unwrap()];
        let source = Source::start(&primary, &["--memory", "64MiB", "--journal-memory", "2MiB"]);

        source.replicate(&servers[0], &[]);
        let generation = source.generation();
        write(&mut client, 8 << 20);
        source.wait_for_status("the journal to be overrun", is_overrun);
        source.replicate(&servers[1], &[]);

        assert!(source.generation() > generation);
        assert_eq!((source.snapshots_taken(), syncs(&primary)), (2, (2, 2)));
        for server in &servers {
            assert_same_data(&primary, server);
        }
    }
}

#[test]
#[ignore = "long: make test-all"]
fn a_snapshot_older_than_the_limit_is_not_offered() {
    let Some(kind) = require::redis() else { return };
    let primary = primary(kind).start().unwrap();
    primary.client().unwrap().ok(&["SET", "a", "1"]).unwrap();
    let servers = [Server::start(kind).unwrap(), Server::start(kind).unwrap()];
    let source = Source::start(&primary, &["--memory", "32MiB", "--max-age", "1s", "--eager"]);
    let first = source.wait_for_status("the eager snapshot", |status| status["generation"].is_object());
    let is_gone = |status: &Value| status["generation"].is_null();
    source.wait_for_status("the snapshot to be given up", is_gone);

    source.replicate(&servers[0], &[]);
    assert_eq!(source.snapshots_taken(), 2);
    source.wait_for_status("the second to be given up", is_gone);
    source.replicate(&servers[1], &[]);
    assert_eq!(source.snapshots_taken(), 3);
    assert!(first["generation"]["generation"].as_u64().unwrap() > 0);
    for server in &servers {
        assert_same_data(&primary, server);
    }
}

#[test]
#[ignore = "long: make test-all"]
fn a_new_snapshot_joins_the_stream_that_a_staying_replica_reads() {
    for kind in require::kinds() {
        let primary = primary(kind).start().unwrap();
        let mut client = primary.client().unwrap();
        fill_every_type(&mut client, 5).unwrap();
        let servers = [Server::start(kind).unwrap(), Server::start(kind).unwrap()];
        let source = Source::start(&primary, &["--memory", "64MiB", "--journal-memory", "2MiB"]);

        let mut staying = source.replica(&servers[0], &["--stay"]);
        staying.wait_for_event("in_step", LONG).unwrap();
        let generation = source.generation();
        for _ in 0..16 {
            // The writer never writes more than the journal holds beyond what its reader has read.
            write(&mut client, 512 << 10);
            same_data(&primary, &servers[0], LONG).unwrap();
        }
        source.wait_for_status("the journal to be overrun", is_overrun);
        source.replicate(&servers[1], &[]);
        assert!(source.generation() > generation);

        // The staying replica has lost nothing, and has not needed the primary.
        assert_same_data(&primary, &servers[0]);
        assert_eq!(syncs(&primary), (2, 1));
        assert_eq!(
            number(&primary, "connected_slaves"),
            2,
            "the source's stream, and the replica that was handed over"
        );
        staying.signal(Signal::TERM).unwrap();
        staying.wait_for_success(LONG).unwrap();
        assert_eq!(syncs(&primary), (2, 2));
        for server in &servers {
            assert_same_data(&primary, server);
        }
    }
}

#[test]
#[ignore = "long: make test-all"]
fn after_the_primary_restarted_the_next_joiner_follows_its_new_history() {
    for kind in require::kinds() {
        let mut primary = primary(kind).start().unwrap();
        primary.client().unwrap().ok(&["SET", "before", "the restart"]).unwrap();
        let servers = [Server::start(kind).unwrap(), Server::start(kind).unwrap()];
        let source = Source::start(&primary, &["--memory", "32MiB"]);
        source.replicate(&servers[0], &[]);
        let generation = source.generation();

        primary.restart().unwrap();
        primary.client().unwrap().ok(&["SET", "after", "the restart"]).unwrap();
        source.wait_for_status("the old history to be given up", |status| status["generation"].is_null());
        source.replicate(&servers[1], &[]);
        assert!(source.generation() > generation);
        for server in &servers {
            // The first was handed over to the primary, and has followed it since.
            assert_same_data(&primary, server);
        }
    }
}
