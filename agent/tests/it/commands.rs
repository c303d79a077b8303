//! The table of commands, and what must not be applied late: real servers, and replicas that join long after a command.

use std::collections::BTreeSet;
use std::sync::mpsc::RecvTimeoutError;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use remora_lab::compare::same_data;
use remora_lab::server::{Program, wait_until};
use remora_lab::{Client, Kind, Server, assert_same_data, commands, fill_every_type, require};
use remora_redis::commands::{RELEASES, Release, TABLE, find};
use rustix::process::Signal;
use serde_json::Value;

use crate::kit::{LONG, Scene, Source, Stage, at_once, built_module, number, primary, quick, syncs};

// ---- the table -----------------------------------------------------------------------------------------------------

/// Fails, by name, for a command that writes and is not in the table, and for what the table says that is not true of
/// this server.
pub(crate) fn assert_table_knows(server: &Server, program: &Program) {
    let described = commands::of(server).unwrap();
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
