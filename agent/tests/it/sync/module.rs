//! Snapshots with the module, at the source, at the replica or at both: whatever the server's child writes into the table,
//! the replica is exact. If anything fails, the snapshot is taken without the module, and the primary is not harmed.

use std::collections::BTreeMap;
use std::fs::{self, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::Signal;

use crate::kit::{
    BACKLOG, Flood, LONG, Source, Stage, assert_untouched, at_once, built_module, ends, fill, load, load_small, number,
    primary, quick, says, steady_writer, succeeds, syncs, with_or_without,
};
use remora_agent::server::Task;
use remora_lab::server::{Builder, module_library, wait_until};
use remora_lab::{Agent, Kind, Server, Workload, assert_same_data, fill_every_type, require};

/// A primary that has the module.
pub(crate) fn with_module(kind: Kind) -> Builder {
    with_module_and(kind, "")
}

/// A primary that has the module, with these arguments.
pub(crate) fn with_module_and(kind: Kind, words: &str) -> Builder {
    primary(kind).module(words).unwrap()
}

/// Options with which the child writes every string, whatever its length.
const EVERY_STRING: [&str; 4] = ["--module-capture", "walk", "--module-walk-from", "0"];

fn walking(primary: &Server, more: &[&str]) -> Source {
    Source::start(primary, &[&EVERY_STRING[..], more].concat())
}

/// A field of the module's section of INFO.
fn module_fact(server: &Server, name: &str) -> String {
    server.fact(&format!("remora_{name}")).unwrap()
}

/// The method by which the source says that it took its snapshot. Whether the walk was a fast one makes no difference
/// for the tests here.
pub(crate) fn method(source: &mut Source) -> String {
    exact_method(source).trim_end_matches(", fast keys").to_owned()
}

/// The method in the source's own words.
pub(crate) fn exact_method(source: &mut Source) -> String {
    let line = source.agent.wait_for_event("snapshot_completed", LONG).unwrap();
    line.split("method=").nth(1).unwrap_or_default().to_owned()
}

/// Every kind of server with both kinds of walks: by the module's API, and in the server's own tables.
fn walks() -> Vec<(Kind, [&'static str; 2])> {
    let both = |kind| ["off", "auto"].map(|fast| (kind, ["--fast-keys", fast]));
    require::kinds().into_iter().flat_map(both).collect()
}

/// Waits until the primary has no child and its module is idle.
fn wait_until_idle(primary: &Server) {
    wait_until("the module to be idle", LONG, || {
        let state = module_fact(primary, "state");
        let child = primary.fact("rdb_bgsave_in_progress")?;
        Ok(if state == "idle" && child == "0" { Ok(()) } else { Err(format!("{state}, child {child}")) })
    })
    .unwrap();
}

/// Asserts that the primary answers, has no child, and takes another snapshot with the module: no earlier failure has
/// an effect.
#[track_caller]
fn assert_unharmed(primary: &Server) {
    wait_until_idle(primary);
    let replica = Server::start(primary.kind()).unwrap();
    let mut source = Source::start(primary, &["--memory", "64MiB", "--module-capture", "walk"]);
    source.replicate(&replica, &[]);
    assert_eq!(method(&mut source), "the module");
    assert_same_data(primary, &replica);
}

#[test]
#[ignore = "long: make test-all"]
fn every_type_with_any_bytes_in_sixteen_databases_arrives_by_a_walk() {
    for (kind, fast) in walks() {
        let primary = with_module(kind).start().unwrap();
        let replica = Server::start(kind).unwrap();
        let keys = fill_every_type(&mut primary.client().unwrap(), 21).unwrap();
        let before = syncs(&primary);
        let mut source = walking(&primary, &[fast[0], fast[1], "--memory", "64MiB"]);
        source.replicate(&replica, &[]);
        assert_same_data(&primary, &replica);
        // The replica may be done before the primary has noticed the end of its child.
        wait_until_idle(&primary);

        assert_eq!(method(&mut source), "the module");
        let walked = if fast[1] == "auto" { "the module, fast keys" } else { "the module" };
        let generation = source.status()["generation"].take();
        assert_eq!(generation["capture"], walked);
        // All of it is shown, and not what there was when the child ended. The mark at the payload's end is in one of them.
        let [shown, whole] =
            [&generation["snapshot_bytes"], &generation["length"]["bytes"]].map(|of| of.as_u64().unwrap());
        assert!(shown.abs_diff(whole) < 100 && generation["percent_permille"] == 1000, "{kind}: {generation}");
        assert_eq!(module_fact(&primary, "captures_done"), "1");
        let written: u64 = module_fact(&primary, "last_keys").parse().unwrap();
        // The fast walk leaves only hashes with expiring fields to the server, which one kind of server has.
        let (least, most) = if fast[1] == "auto" { (keys * 9 / 10, keys) } else { (300, keys - 1) };
        assert!((least..=most).contains(&written), "{kind}: {written} of {keys} keys");
        let after = syncs(&primary);
        assert_eq!((after.0 - before.0, after.1 - before.1), (1, 1), "one copy, one continuation");
        assert_eq!(functions(&primary), functions(&replica));
    }
}

/// All function libraries with their code, in the order of their text.
fn functions(server: &Server) -> Vec<String> {
    let list = server.client().unwrap().list(&["FUNCTION", "LIST", "WITHCODE"]).unwrap();
    let mut libraries: Vec<String> = list.iter().map(|library| format!("{library:?}")).collect();
    libraries.sort_unstable();
    assert!(!libraries.is_empty());
    libraries
}

#[test]
fn a_server_that_writes_itself_does_not_compress_and_its_own_setting_stays() {
    for kind in require::kinds() {
        let primary = with_module(kind).start().unwrap();
        let replica = Server::start(kind).unwrap();
        fill_every_type(&mut primary.client().unwrap(), 22).unwrap();
        primary.client().unwrap().ok(&["SET", "compressible", &"ab".repeat(1 << 20)]).unwrap();
        let mut source = Source::start(&primary, &["--memory", "64MiB", "--module-capture", "server"]);
        source.replicate(&replica, &[]);
        assert_same_data(&primary, &replica);
        assert!(method(&mut source).starts_with("psync, not compressed"));
        assert_eq!(primary.configured("rdbcompression").unwrap(), "yes");
        let bytes = source.status()["generation"]["snapshot_bytes"].as_u64().unwrap();
        assert!(bytes > 2 << 20, "{bytes} bytes: the snapshot is compressed");
    }
}

/// Commands that the writers must send while a replica is made.
const WRITES_MEANWHILE: u64 = 2_000;

/// Under writes of every kind: keys and hash fields expire all the time, and are extended, moved and written again.
fn is_exact_under_every_kind_of_write(kind: Kind) {
    let Some(()) = require::redis_benchmark() else { return };
    let primary = with_module(kind).start().unwrap();
    fill_every_type(&mut primary.client().unwrap(), 23).unwrap();
    load(&primary, 200, 100_000);
    for round in 0..rounds() {
        let replica = Server::start(kind).unwrap();
        // Sometimes only long strings, so that both the child and the server write strings.
        let least = if round % 3 == 2 { "1KiB" } else { "0" };
        let fast = if round % 2 == 0 { "auto" } else { "off" };
        let walk = ["--module-capture", "walk", "--module-walk-from", least, "--fast-keys", fast];
        let args = [&["--memory", "1GiB"], &walk[..]].concat();
        let mut source = Source::start(&primary, &args);
        let writer = Workload::on(&primary).unwrap();
        let flood = Flood::start(&primary);
        writer.wait_for(WRITES_MEANWHILE);
        let mut agent = source.replica(&replica, &["--transport", if round % 2 == 1 { "tcp" } else { "shm" }]);
        agent.wait_for_success(LONG).unwrap();
        writer.wait_for(WRITES_MEANWHILE);
        flood.stop();
        writer.stop().unwrap();
        assert_eq!(method(&mut source), "the module", "{}", source.agent.output());
        assert_same_data(&primary, &replica);
    }
}

/// How many replicas are made one after the other: `REMORA_ROUNDS` sets another number.
fn rounds() -> u32 {
    std::env::var("REMORA_ROUNDS").ok().and_then(|text| text.parse().ok()).unwrap_or(3)
}

#[test]
fn replicas_of_redis_walked_under_every_kind_of_write_are_exact() {
    let Some(kind) = require::redis() else { return };
    is_exact_under_every_kind_of_write(kind);
}

#[test]
#[ignore = "long: make test-all"]
fn replicas_of_valkey_walked_under_every_kind_of_write_are_exact() {
    let Some(kind) = require::valkey() else { return };
    is_exact_under_every_kind_of_write(kind);
}

#[test]
#[ignore = "long: make test-all"]
fn keys_keep_their_time_and_their_age() {
    at_once(walks(), |(kind, fast)| {
        for (policy, command) in [("allkeys-lru", "IDLETIME"), ("allkeys-lfu", "FREQ")] {
            keeps_times_and_ages(kind, fast, policy, command);
        }
    });
}

fn keeps_times_and_ages(kind: Kind, fast: [&str; 2], policy: &str, command: &str) {
    let primary = with_module(kind).config("maxmemory-policy", policy).start().unwrap();
    let replica = Server::builder(kind).config("maxmemory-policy", policy).start().unwrap();
    let mut client = primary.client().unwrap();
    for (key, list, how, when) in
        [("soon", "list soon", "PEXPIRE", "3600000"), ("late", "list late", "PEXPIREAT", "4102444800000")]
    {
        client.ok(&["SET", key, "x"]).unwrap();
        client.int(&["RPUSH", list, "x"]).unwrap();
        for name in [key, list] {
            client.int(&[how, name, when]).unwrap();
        }
    }
    if command == "IDLETIME" {
        thread::sleep(Duration::from_millis(6100));
    } else {
        for _ in 0..2000 {
            client.text(&["GET", "soon"]).unwrap();
        }
    }
    let age = |server: &Server, key: &str| server.client().unwrap().int(&["OBJECT", command, key]).unwrap();
    let ages = ["soon", "list late"].map(|key| (key, age(&primary, key)));
    let began = Instant::now();
    let mut source = walking(&primary, &[fast[0], fast[1], "--memory", "64MiB"]);
    source.replicate(&replica, &[]);
    wait_until_idle(&primary);
    // The fast walk writes the lists too.
    let written = if fast[1] == "auto" { "4" } else { "2" };
    assert_eq!((method(&mut source).as_str(), module_fact(&primary, "last_keys").as_str()), ("the module", written));
    assert_same_data(&primary, &replica);
    for (key, wanted) in ages {
        let found = age(&replica, key);
        // The idle time of an unread key grows by one second each second, and its counter of uses falls by one each minute.
        let passed = i64::try_from(began.elapsed().as_secs()).unwrap();
        let (more, fewer) = if command == "IDLETIME" { (passed, 0) } else { (0, passed / 60) };
        let expected = wanted - fewer - 2..=wanted + more + 2;
        assert!(wanted > 0 && expected.contains(&found), "{kind}: {command} of {key} is {found}, not in {expected:?}");
    }
    let time = |server: &Server, key: &str| server.client().unwrap().int(&["PEXPIRETIME", key]).unwrap();
    for key in ["soon", "late", "list soon", "list late"] {
        assert_eq!(time(&primary, key), time(&replica, key), "{kind}: {key}");
    }
}

#[test]
#[ignore = "long: make test-all"]
fn expired_keys_that_the_server_has_not_removed_arrive() {
    for (kind, fast) in walks() {
        let primary = with_module(kind).start().unwrap();
        let replica = Server::start(kind).unwrap();
        let mut client = primary.client().unwrap();
        client.ok(&["DEBUG", "SET-ACTIVE-EXPIRE", "0"]).unwrap();
        client.ok(&["SET", "string", "x", "PX", "1"]).unwrap();
        client.int(&["RPUSH", "list", "x"]).unwrap();
        client.int(&["PEXPIRE", "list", "1"]).unwrap();
        client.ok(&["SET", "stays", "x", "EX", "1000"]).unwrap();
        thread::sleep(Duration::from_millis(300));
        let mut source = walking(&primary, &[fast[0], fast[1], "--memory", "64MiB"]);
        source.replicate(&replica, &[]);
        // The replica may be done before the primary has noticed the end of its child.
        wait_until_idle(&primary);
        // The fast walk writes all of them, as the server's saver would.
        let written = if fast[1] == "auto" { "3" } else { "1" };
        assert_eq!(
            (method(&mut source).as_str(), module_fact(&primary, "last_keys").as_str()),
            ("the module", written)
        );
        let keys = |server: &Server| server.client().unwrap().int(&["DBSIZE"]).unwrap();
        assert_eq!((keys(&primary), keys(&replica)), (3, 3), "both servers still have the expired keys");
        // An access deletes them, and the deletion is replicated.
        assert_eq!(client.int(&["EXISTS", "string", "list", "stays"]).unwrap(), 1);
        assert_same_data(&primary, &replica);
        assert_eq!((keys(&primary), keys(&replica)), (1, 1));
    }
}

#[test]
#[ignore = "long: make test-all"]
fn the_primary_keeps_the_strings_that_its_child_freed() {
    for (kind, fast) in walks() {
        let primary = with_module(kind).start().unwrap();
        let mut client = primary.client().unwrap();
        fill_every_type(&mut client, 32).unwrap();
        let before = (primary.digest().unwrap(), number(&primary, "expired_keys"));
        let mut source = walking(&primary, &[fast[0], fast[1], "--memory", "64MiB", "--eager"]);
        assert_eq!(method(&mut source), "the module");
        assert_eq!((primary.digest().unwrap(), number(&primary, "expired_keys")), before);
        client.ok(&["CONFIG", "RESETSTAT"]).unwrap();
        // The snapshot is complete here before the server has noticed the end of its child.
        wait_until_idle(&primary);
        client.ok(&["SAVE"]).unwrap();
        client.ok(&["DEBUG", "RELOAD", "NOSAVE"]).unwrap();
        assert_eq!(primary.digest().unwrap(), before.0, "the file is complete");
    }
}

#[test]
#[ignore = "long: make test-all"]
fn a_window_that_is_smaller_than_the_data_is_walked_at_the_readers_pace() {
    for (kind, fast) in walks() {
        let primary = with_module(kind).start().unwrap();
        let replica = Server::start(kind).unwrap();
        load(&primary, 300, 300_000);
        let mut source = Source::start(
            &primary,
            &["--memory", "16MiB", "--slot-size", "256KiB", "--module-capture", "walk", fast[0], fast[1]],
        );
        source.replicate(&replica, &["--memory", "16MiB"]);
        assert_eq!(method(&mut source), "the module");
        assert!(source.status()["generation"]["windowed"].as_bool().unwrap());
        assert_same_data(&primary, &replica);
    }
}

#[test]
#[ignore = "long: make test-all"]
fn a_late_joiner_gets_the_walked_snapshot_and_a_second_one_joins_the_stream() {
    let Some(kind) = require::redis() else { return };
    let primary = with_module(kind).start().unwrap();
    fill_every_type(&mut primary.client().unwrap(), 24).unwrap();
    let replicas = [(); 3].map(|()| Server::start(kind).unwrap());
    let source = Source::start(&primary, &["--memory", "64MiB", "--module-capture", "walk", "--max-age", "3s"]);
    source.replicate(&replicas[0], &[]);
    source.replicate(&replicas[1], &[]);
    assert_eq!(source.snapshots_taken(), 1, "the late joiner got the same snapshot");
    primary.client().unwrap().ok(&["SET", "after", "the first"]).unwrap();
    thread::sleep(Duration::from_millis(3100));
    source.replicate(&replicas[2], &[]);
    assert_eq!((source.snapshots_taken(), module_fact(&primary, "captures_done").as_str()), (2, "2"));
    for replica in &replicas {
        assert_same_data(&primary, replica);
    }
}

#[test]
#[ignore = "long: make test-all"]
fn a_source_beside_a_replica_walks_that_one_and_the_primary_notices_nothing() {
    for kind in require::kinds() {
        let primary = primary(kind).start().unwrap();
        let middle = with_module(kind).start().unwrap();
        let replica = Server::start(kind).unwrap();
        fill_every_type(&mut primary.client().unwrap(), 25).unwrap();
        middle.replicate(&primary).unwrap();
        middle.wait_for_link(LONG).unwrap();
        // The stream now selects another database than at the beginning.
        let mut client = primary.client().unwrap();
        client.ok(&["SELECT", "5"]).unwrap();
        client.ok(&["SET", "before", "the snapshot"]).unwrap();
        let before = syncs(&primary);
        let mut source = Source::start(&middle, &["--memory", "64MiB", "--module-capture", "walk", "--eager"]);
        assert_eq!(method(&mut source), "the module");
        client.ok(&["SET", "after", "the snapshot"]).unwrap();
        source.replicate(&replica, &[]);
        assert_same_data(&middle, &replica);
        assert_eq!(syncs(&primary).0, before.0, "no request reached the primary");
        let mut there = replica.client().unwrap();
        there.ok(&["SELECT", "5"]).unwrap();
        assert_eq!(there.text(&["GET", "after"]).unwrap(), "the snapshot");
    }
}

#[test]
#[ignore = "long: make test-all"]
fn a_save_to_disk_that_is_already_running_is_not_mistaken_for_the_snapshot() {
    for kind in require::kinds() {
        let primary = with_module(kind).start().unwrap();
        let replica = Server::start(kind).unwrap();
        fill_every_type(&mut primary.client().unwrap(), 26).unwrap();
        // Slow enough that the source arms and asks while the save runs, and the next save begins when it ends.
        primary.configure("rdb-key-save-delay", "2000").unwrap();
        primary.client().unwrap().text(&["BGSAVE"]).unwrap();
        let mut source = Source::start(&primary, &["--memory", "64MiB", "--module-capture", "walk"]);
        source.replicate(&replica, &[]);
        assert_eq!(method(&mut source), "the module");
        assert_same_data(&primary, &replica);
    }
}

#[test]
#[ignore = "long: make test-all"]
fn a_save_to_disk_requested_while_the_source_waits_is_complete() {
    for kind in require::kinds() {
        // The source's sync waits for further replicas; the save runs first.
        let primary = with_module(kind).config("repl-diskless-sync-delay", 2).start().unwrap();
        let replica = Server::start(kind).unwrap();
        fill_every_type(&mut primary.client().unwrap(), 33).unwrap();
        let before = primary.digest().unwrap();
        let mut source = walking(&primary, &["--memory", "64MiB", "--eager"]);
        wait_until("the source to wait", LONG, || Ok(waits(&primary, 1))).unwrap();
        primary.client().unwrap().text(&["BGSAVE"]).unwrap();
        assert_eq!(method(&mut source), "the module");
        source.replicate(&replica, &[]);
        assert_same_data(&primary, &replica);
        primary.client().unwrap().ok(&["DEBUG", "RELOAD", "NOSAVE"]).unwrap();
        assert_eq!(primary.digest().unwrap(), before, "the file is complete");
    }
}

#[test]
#[ignore = "long: make test-all"]
fn a_child_that_serves_another_replica_too_leaves_everything_to_the_server() {
    for kind in require::kinds() {
        let primary = with_module(kind).config("repl-diskless-sync-delay", 2).start().unwrap();
        fill_every_type(&mut primary.client().unwrap(), 27).unwrap();
        let (other, replica) = (Server::start(kind).unwrap(), Server::start(kind).unwrap());
        other.replicate(&primary).unwrap();
        wait_until("the other replica to wait", LONG, || Ok(waits(&primary, 1))).unwrap();
        let mut source = walking(&primary, &["--memory", "64MiB", "--eager"]);
        // A replica that wants another format is not served by the same fork; then the child is for the source alone.
        let taken = method(&mut source);
        let alone = number(&primary, "total_forks") == 2;
        println!("{kind}: {taken}, a fork for the source alone: {alone}");
        assert_eq!(taken, if alone { "the module" } else { "psync" }, "{}", source.agent.output());
        source.replicate(&replica, &[]);
        assert_same_data(&primary, &replica);
        other.wait_for_link(LONG).unwrap();
        assert_same_data(&primary, &other);
    }
}

#[test]
#[ignore = "long: make test-all"]
fn a_server_that_syncs_through_files_is_not_walked() {
    for kind in require::kinds() {
        let primary = with_module(kind).config("repl-diskless-sync", "no").start().unwrap();
        let replica = Server::start(kind).unwrap();
        fill_every_type(&mut primary.client().unwrap(), 34).unwrap();
        let before = primary.digest().unwrap();
        let mut source = walking(&primary, &["--memory", "64MiB"]);
        source.replicate(&replica, &[]);
        assert_eq!(method(&mut source), "psync");
        assert_same_data(&primary, &replica);
        primary.client().unwrap().ok(&["DEBUG", "RELOAD", "NOSAVE"]).unwrap();
        assert_eq!(primary.digest().unwrap(), before, "the file is complete");
    }
}

/// For [`wait_until`]: whether `count` replicas wait for a snapshot.
fn waits(primary: &Server, count: usize) -> Result<(), String> {
    let info = primary.info("replication").unwrap();
    let waiting = info.iter().filter(|(_, line)| line.contains("state=wait_bgsave")).count();
    if waiting == count { Ok(()) } else { Err(waiting.to_string()) }
}

#[test]
#[ignore = "long: make test-all"]
fn an_agent_killed_between_arming_and_the_fork_does_not_harm_the_primary() {
    for kind in require::kinds() {
        let primary = with_module(kind).config("repl-diskless-sync-delay", 3).start().unwrap();
        fill_every_type(&mut primary.client().unwrap(), 28).unwrap();
        primary.configure("remora.agent-timeout", "1").unwrap();
        let mut source = Source::start(&primary, &["--memory", "64MiB", "--module-capture", "walk", "--eager"]);
        wait_until("the module to be armed", LONG, || Ok(is_in_state(&primary, "armed"))).unwrap();
        source.agent.kill().unwrap();
        primary.configure("repl-diskless-sync-delay", "0").unwrap();
        assert_unharmed(&primary);
    }
}

#[test]
#[ignore = "long: make test-all"]
fn an_agent_killed_while_its_table_is_full_does_not_harm_the_primary() {
    for kind in require::kinds() {
        let primary = with_module(kind).start().unwrap();
        load(&primary, 300, 300_000);
        primary.configure("remora.agent-timeout", "1").unwrap();
        let mut source = Source::start(
            &primary,
            &["--memory", "16MiB", "--slot-size", "256KiB", "--module-capture", "walk", "--eager"],
        );
        source.wait_for_status("the child to wait for room", |status| {
            let full = status["generation"]["published_slots"].as_u64().unwrap_or(0) > 10;
            full && module_fact(&primary, "state") == "writing"
        });
        source.agent.signal(Signal::KILL).unwrap();
        primary.client().unwrap().int(&["UNLINK", "does not", "wait"]).unwrap();
        let mut client = primary.client().unwrap();
        client.text(&["FLUSHALL"]).unwrap();
        fill_every_type(&mut client, 29).unwrap();
        assert_unharmed(&primary);
    }
}

#[test]
#[ignore = "long: make test-all"]
fn a_killed_child_fails_the_snapshot_and_the_next_one_is_taken_without_the_module() {
    let Some(kind) = require::redis() else { return };
    let primary = with_module(kind).start().unwrap();
    load(&primary, 300, 300_000);
    let replica = Server::start(kind).unwrap();
    let mut source =
        Source::start(&primary, &["--memory", "16MiB", "--slot-size", "256KiB", "--module-capture", "walk", "--eager"]);
    source.agent.wait_for_event("snapshot_started", LONG).unwrap();
    let children = std::fs::read_to_string(format!("/proc/{0}/task/{0}/children", primary.pid())).unwrap();
    let child: i32 = children.split_ascii_whitespace().next().unwrap().parse().unwrap();
    rustix::process::kill_process(rustix::process::Pid::from_raw(child).unwrap(), Signal::KILL).unwrap();
    source.agent.wait_for_event("snapshot_failed", LONG).unwrap();
    source.replicate(&replica, &["--memory", "16MiB"]);
    assert!(source.agent.output().contains("the module failed a short time ago"), "{}", source.agent.output());
    assert_same_data(&primary, &replica);
    assert_eq!(
        (module_fact(&primary, "captures_failed").as_str(), module_fact(&primary, "state").as_str()),
        ("1", "idle")
    );
}

#[test]
#[ignore = "long: make test-all"]
fn a_module_that_is_disabled_is_not_used() {
    for kind in require::kinds() {
        let primary = with_module(kind).config("remora.capture", "no").start().unwrap();
        let replica = Server::start(kind).unwrap();
        fill_every_type(&mut primary.client().unwrap(), 30).unwrap();
        let mut source = Source::start(&primary, &["--memory", "64MiB", "--module-capture", "walk"]);
        source.replicate(&replica, &[]);
        assert_eq!(method(&mut source), "psync");
        assert!(source.agent.output().contains("remora.capture no"), "{}", source.agent.output());
        assert_same_data(&primary, &replica);
    }
}

#[test]
fn readers_of_another_family_that_cannot_read_it_cost_the_primary_no_walk() {
    let (Some(redis), Some(valkey)) = (require::redis(), require::valkey()) else { return };
    let primary = with_module(valkey).start().unwrap();
    let replica = Server::start(redis).unwrap();
    load(&primary, 10, 100_000);
    let source = walking(&primary, &["--memory", "64MiB"]);
    let mut agent = source.replica(&replica, &[]);
    let ended = agent.wait(LONG).unwrap();
    assert!(!ended.success() && agent.output().contains("RDB version"), "{ended}: {}", agent.output());
    assert_eq!((module_fact(&primary, "captures_done").as_str(), number(&primary, "sync_full")), ("0", 0));
}

#[test]
fn a_source_loads_the_module_if_the_server_allows_it_and_else_works_without() {
    for kind in require::kinds() {
        for allowed in ["local", "no"] {
            let primary = primary(kind).config("enable-module-command", allowed).start().unwrap();
            let replica = Server::start(kind).unwrap();
            fill_every_type(&mut primary.client().unwrap(), 31).unwrap();
            let library = remora_lab::server::module_library().unwrap().display().to_string();
            let args = ["--memory", "64MiB", "--module-capture", "walk", "--load-module", &library];
            let mut source = Source::start(&primary, &args);
            source.replicate(&replica, &[]);
            assert_eq!(method(&mut source), if allowed == "local" { "the module" } else { "psync" });
            assert_same_data(&primary, &replica);
        }
    }
}

/// For [`wait_until`]: whether the module is in that state; the error names the present state.
fn is_in_state(primary: &Server, wanted: &str) -> Result<(), String> {
    let found = module_fact(primary, "state");
    if found == wanted { Ok(()) } else { Err(found) }
}

#[test]
fn a_primary_without_the_module_is_asked_for_it_once_only() {
    let Some(kind) = require::redis() else { return };
    let (primary, replica) = (primary(kind).start().unwrap(), Server::start(kind).unwrap());
    let mut source = Source::start(&primary, &["--memory", "64MiB"]);
    source.replicate(&replica, &[]);
    assert_eq!(method(&mut source), "psync");
    assert_eq!(number(&primary, "sync_full"), 1);
    assert_same_data(&primary, &replica);
}

// The source's memory in the hands of the server's child: who may write it, and whose memory it is.

/// The user `nobody`, and its group.
const OTHER_USER: u32 = 65534;

/// Packages run the server as a user of its own. Its child must write the table of a source that runs as another user.
fn a_server_of_another_user_walks(kind: Kind) {
    let folder = tempfile::tempdir().unwrap();
    fs::set_permissions(folder.path(), Permissions::from_mode(0o755)).unwrap();
    let library = folder.path().join("libremora_module.so");
    fs::copy(module_library().unwrap(), &library).unwrap();
    fs::set_permissions(&library, Permissions::from_mode(0o755)).unwrap();

    let primary = primary(kind).config("loadmodule", library.display()).as_user(OTHER_USER).start().unwrap();
    let owner = fs::metadata(format!("/proc/{}", primary.pid())).unwrap().uid();
    assert_eq!(owner, OTHER_USER);
    fill_every_type(&mut primary.client().unwrap(), 41).unwrap();
    load(&primary, 50, 100_000);
    let replica = Server::start(kind).unwrap();
    let mut source = Source::start(&primary, &["--memory", "64MiB", "--module-capture", "walk"]);
    source.replicate(&replica, &[]);
    assert_eq!(method(&mut source), "the module", "{}", source.agent.output());
    assert_same_data(&primary, &replica);
}

#[test]
fn a_redis_of_another_user_walks() {
    let (Some(kind), Some(())) = (require::redis(), require::root()) else { return };
    a_server_of_another_user_walks(kind);
}

#[test]
fn a_valkey_of_another_user_walks() {
    let (Some(kind), Some(())) = (require::valkey(), require::root()) else { return };
    a_server_of_another_user_walks(kind);
}

/// Bytes that back each of the source's snapshot tables, by the file's number.
fn tables(source: &Source) -> BTreeMap<u64, u64> {
    let folder = format!("/proc/{}/fd", source.agent.pid());
    let entries = fs::read_dir(folder).unwrap().filter_map(Result::ok).map(|entry| entry.path());
    let is_table = |path: &std::path::PathBuf| {
        fs::read_link(path).is_ok_and(|target| target.to_string_lossy().contains("memfd:remora-snapshot"))
    };
    let opened = entries.filter(is_table).filter_map(|path| fs::metadata(path).ok());
    opened.map(|file| (file.ino(), file.blocks() * 512)).collect()
}

/// Bytes of long strings in the primary.
const DATA_BYTES: u64 = 40 << 20;

/// A page of shared memory counts for the control group of the process that touches it first, and stays there when the
/// process has ended. A server in a container would pay for the source's table if its child touched it first.
fn the_source_touches_a_new_table_before_the_server_forks(kind: Kind) {
    // Time between the request for the snapshot and the fork.
    let primary = with_module(kind).config("repl-diskless-sync-delay", 3).start().unwrap();
    load(&primary, DATA_BYTES >> 20, 1 << 20);
    let args = ["--memory", "256MiB", "--module-capture", "walk"];
    let mut source = Source::start(&primary, &args);
    let first = tables(&source);
    assert_eq!(first.len(), 1, "{first:?}");

    // A replica that is lost while it reads leaves the table to its server, which may still read it.
    let lost = Server::start(kind).unwrap();
    let mut agent = source.replica(&lost, &["--download-limit", "1MiB", "--transport", "tcp"]);
    source.wait_for_snapshot();
    source.wait_for_slots(&mut agent, 1);
    agent.kill().unwrap();
    source.agent.wait_for_event("replica_disconnected", LONG).unwrap();
    // The next snapshot is another one: nothing continues this one, as the primary has another history now.
    let mut client = primary.client().unwrap();
    client.ok(&["DEBUG", "CHANGE-REPL-ID"]).unwrap();
    client.int(&["CLIENT", "KILL", "TYPE", "replica"]).unwrap();
    source.agent.wait_for_event("stream_lost", LONG).unwrap();
    source.wait_for_status("the snapshot to be given up", |status| status["generation"].is_null());

    let forks = number(&primary, "total_forks");
    let replica = Server::start(kind).unwrap();
    let mut agent = source.replica(&replica, &[]);
    wait_until("the source to touch its new table", LONG, || {
        let bytes = tables(&source)
            .into_iter()
            .filter(|(file, _)| !first.contains_key(file))
            .map(|(_, bytes)| bytes)
            .sum::<u64>();
        Ok(if bytes >= DATA_BYTES { Ok(()) } else { Err(format!("{bytes} bytes")) })
    })
    .unwrap();
    assert_eq!(number(&primary, "total_forks"), forks, "the server forked before the table was touched");
    agent.wait_for_success(LONG).unwrap();
    assert_eq!(source.agent.output().matches("method=the module").count(), 2, "{}", source.agent.output());
    assert_same_data(&primary, &replica);
}

#[test]
#[ignore = "long: make test-all"]
fn the_source_touches_a_new_table_before_redis_forks() {
    let Some(kind) = require::redis() else { return };
    the_source_touches_a_new_table_before_the_server_forks(kind);
}

#[test]
#[ignore = "long: make test-all"]
fn the_source_touches_a_new_table_before_valkey_forks() {
    let Some(kind) = require::valkey() else { return };
    the_source_touches_a_new_table_before_the_server_forks(kind);
}

// The module beside a server's own work: what an idle one costs, which rules a user needs for it, and what clients see
// while it loads.

/// Used memory that an idle module may add: its commands and its type.
const IDLE_BYTES: u64 = 128 << 10;

/// Processor time that an idle module may add in [`IDLE_TIME`], in seconds: less than one tick of the kernel's clock.
const IDLE_CPU: f64 = 0.015;

/// How long servers are watched. A server by itself uses about three milliseconds of processor time a second.
const IDLE_TIME: Duration = Duration::from_secs(3);

/// How often they are watched: what a module costs it costs each time.
const IDLE_WATCHES: usize = 3;

#[test]
#[ignore = "long: make test-all"]
fn an_idle_module_costs_neither_memory_nor_time() {
    for kind in require::kinds() {
        let start = |builder: Builder| {
            let server = builder.start().unwrap();
            fill_every_type(&mut server.client().unwrap(), 3).unwrap();
            server
        };
        let without = start(Server::builder(kind));
        let with = start(Server::builder(kind).module("").unwrap());
        let (bytes, more) = (number(&without, "used_memory"), number(&with, "used_memory"));
        assert!(more < bytes + IDLE_BYTES, "{kind}: {more} bytes with the module, {bytes} without");
        let watch = || {
            let before = [&without, &with].map(|server| server.cpu_seconds().unwrap());
            thread::sleep(IDLE_TIME);
            let after = [&without, &with].map(|server| server.cpu_seconds().unwrap());
            [after[0] - before[0], after[1] - before[1]]
        };
        // The kernel counts in ticks, and on a busy machine one more may hit either server.
        let watched: Vec<[f64; 2]> = std::iter::repeat_with(watch).take(IDLE_WATCHES).collect();
        let is_idle = watched.iter().any(|[alone, with_it]| with_it <= &(alone + IDLE_CPU));
        assert!(is_idle, "{kind}: seconds without a module, and with an idle one: {watched:?}");
    }
}

/// Rules without which the module is not used.
const SOURCE_RULES: &str = "+remora.status +remora.arm +remora.disarm";

const REPLICA_RULES: &str = "+remora.status +remora.load +multi +exec +discard";

/// Makes a replica with users that have `source` and `replica` besides the rules that are always needed. Returns the
/// outputs of both agents.
fn with_rules(kind: Kind, source: &str, replica: &str) -> [String; 2] {
    let stage = Stage::new();
    let (source, replica) =
        (format!("{} {source}", Task::Source.rules()), format!("{} {replica}", Task::Replica.rules()));
    let primary = primary(kind).module("").unwrap().user("agent", "secret", &source).start().unwrap();
    let server = Server::builder(kind).module("").unwrap().user("agent", "secret", &replica).start().unwrap();
    fill(&primary, 8, 1);
    let file = stage.secret("password", "secret");
    let login = ["--user", "agent", "--password-file", &file];
    let source = stage.source(&primary.url(), &[&login[..], &["--module-capture", "walk"]].concat());
    let mut agent = stage.replica(&server.url(), source.address, &login);
    succeeds(&mut agent, &server);
    assert_same_data(&primary, &server);
    [source.agent.output(), agent.output()]
}

fn is_loaded_by_module(agent: &str) -> bool {
    agent.contains("out of shared memory")
}

#[test]
#[ignore = "long: make test-all"]
fn a_user_with_the_rules_of_the_help_page_uses_the_module_and_one_without_them_works_without_it() {
    // The rules are those that the help pages and docs/reference/acl.md name.
    for (task, rules) in [(Task::Source, SOURCE_RULES), (Task::Replica, REPLICA_RULES)] {
        assert!(task.optional().contains(rules), "{}", task.optional());
    }
    for kind in require::kinds() {
        let [source, replica] = with_rules(kind, SOURCE_RULES, REPLICA_RULES);
        assert!(source.contains("method=the module") && is_loaded_by_module(&replica), "{source}\n{replica}");
        let [source, replica] = with_rules(kind, "", "");
        assert!(source.contains("method=psync") && !is_loaded_by_module(&replica), "{source}\n{replica}");
    }
}

#[test]
#[ignore = "long: make test-all"]
fn clients_are_told_that_the_server_is_loading_while_the_module_loads() {
    for kind in require::kinds() {
        let primary = primary(kind).start().unwrap();
        let replica = Server::builder(kind).module("").unwrap().start().unwrap();
        fill(&primary, 8, 1);
        // Too short for the module: the server loads them itself, at a fifth of a millisecond each.
        load_small(&primary, 10_000, 100);
        replica.configure("loading-process-events-interval-bytes", "1024").unwrap();
        replica.configure("key-load-delay", "200").unwrap();
        let source = Source::start(&primary, &["--memory", "64MiB"]);
        let mut agent: Agent = source.replica(&replica, &[]);
        wait_until("the module to load", LONG, || {
            let state = replica.fact("remora_load_state")?;
            Ok(if state == "loading" { Ok(()) } else { Err(format!("{state}: {}", agent.output())) })
        })
        .unwrap();
        let mut client = replica.client().unwrap();
        let refused = client.call(&["GET", "small 1"]).unwrap_err().to_string();
        assert!(refused.contains("LOADING"), "{refused}");
        assert_eq!(number(&replica, "loading"), 1);
        replica.configure("key-load-delay", "0").unwrap();
        succeeds(&mut agent, &replica);
        assert!(is_loaded_by_module(&agent.output()), "{}", agent.output());
        assert_same_data(&primary, &replica);
    }
}

// The module at the source, at the replica, at both, at neither: the replica is exact in each case, whatever is
// written meanwhile.

/// Commands that the writer must send before the replica is made, and again before it is compared.
const WRITES_IN_EACH_CASE: u64 = 3_000;

/// The servers that have the module.
#[derive(Clone, Copy, Debug)]
struct Combination {
    source: bool,
    replica: bool,
}

const COMBINATIONS: [Combination; 4] = [
    Combination { source: false, replica: false },
    Combination { source: true, replica: false },
    Combination { source: false, replica: true },
    Combination { source: true, replica: true },
];

fn every_combination_is_exact(kind: Kind) {
    for (at, transport) in COMBINATIONS.into_iter().flat_map(|at| ["shm", "tcp"].map(|transport| (at, transport))) {
        let primary = with_or_without(primary(kind).config("rdbcompression", "no"), at.source);
        let replica = with_or_without(Server::builder(kind), at.replica);
        fill_every_type(&mut primary.client().unwrap(), 41).unwrap();
        load(&primary, 60, 300_000);
        let mut source = Source::start(&primary, &["--memory", "128MiB", "--module-capture", "walk"]);
        let before = syncs(&primary);
        let writer = steady_writer(&primary);
        writer.wait_for(WRITES_IN_EACH_CASE);
        let mut agent = source.replica(&replica, &["--transport", transport]);
        agent.wait_for_success(LONG).unwrap();
        writer.wait_for(WRITES_IN_EACH_CASE);
        writer.stop().unwrap();
        assert_same_data(&primary, &replica);

        let said = source.agent.wait_for_event("snapshot_completed", LONG).unwrap();
        assert_eq!(said.contains("method=the module"), at.source, "{at:?} {transport}: {said}");
        let loaded = agent.output().contains("out of shared memory");
        assert_eq!(loaded, at.replica, "{at:?} {transport}: {}", agent.output());
        let after = syncs(&primary);
        assert_eq!(
            (after.0 - before.0, after.1 - before.1),
            (1, 1),
            "{at:?} {transport}: one copy, one continuation\n{}\nthe primary:\n{}\nthe replica:\n{}",
            agent.output(),
            primary.log(),
            replica.log()
        );
    }
}

#[test]
#[ignore = "long: make test-all"]
fn every_combination_is_exact_with_redis() {
    let Some(kind) = require::redis() else { return };
    every_combination_is_exact(kind);
}

#[test]
#[ignore = "long: make test-all"]
fn every_combination_is_exact_with_valkey() {
    let Some(kind) = require::valkey() else { return };
    every_combination_is_exact(kind);
}

// A replica whose server has the module: long strings are copied from shared memory, and the result is as exact as
// without the module.

/// The library, as cargo built it beside the program.
fn library() -> Option<PathBuf> {
    match remora_lab::server::module_library() {
        Ok(path) => Some(path),
        Err(error) => require::skip(&error.to_string()),
    }
}

fn that_loads(kind: Kind) -> Option<Builder> {
    Some(Server::builder(kind).config("loadmodule", library()?.display()))
}

/// A primary with every type in it, and long strings of all kinds.
fn full_primary(kind: Kind) -> Server {
    let primary = primary(kind).config("rdbcompression", "no").start().unwrap();
    let mut client = primary.client().unwrap();
    fill_every_type(&mut client, 7).unwrap();
    client.ok(&["SELECT", "0"]).unwrap();
    load(&primary, 60, 300_000);
    load_small(&primary, 2000, 5000);
    client.ok(&["SELECT", "3"]).unwrap();
    client.ok(&[b"SET".as_slice(), b"expires", &[b'x'; 5000], b"PXAT", b"4102444800000"]).unwrap();
    client.ok(&[b"SET".as_slice(), b"alone", &[b'y'; 100_000]]).unwrap();
    primary
}

/// Whether the agent's last lines say that the module loaded the snapshot.
fn loaded_by_module(agent: &Agent) -> bool {
    agent.output().contains("out of shared memory")
}

fn is_exact_by(transport: &str, kind: Kind) {
    let Some(builder) = that_loads(kind) else { return };
    let primary = full_primary(kind);
    let replica = builder.start().unwrap();
    // The data that the server held is replaced.
    replica.client().unwrap().ok(&["SET", "old", "data"]).unwrap();
    let before = syncs(&primary);
    let source = Source::start(&primary, &["--memory", "64MiB", "--module-capture", "off"]);
    let writer = steady_writer(&primary);
    writer.wait_for(2000);
    let agent = source.replicate(&replica, &["--transport", transport, "--replace"]);
    writer.wait_for(2000);
    writer.stop().unwrap();
    assert!(loaded_by_module(&agent), "{}", agent.output());
    assert_same_data(&primary, &replica);
    let after = syncs(&primary);
    assert_eq!((after.0 - before.0, after.1 - before.1), (1, 1), "one copy, and one continuation");
    let loaded: u64 = replica.fact("remora_loaded_bytes").unwrap().parse().unwrap();
    assert!(loaded > 60 * 300_000, "{loaded} bytes: {}", agent.output());
    assert_eq!(replica.fact("remora_load_state").unwrap(), "idle");
}

#[test]
#[ignore = "long: make test-all"]
fn a_redis_that_loads_out_of_the_sources_memory_is_exact() {
    let Some(kind) = require::redis() else { return };
    is_exact_by("shm", kind);
}

#[test]
#[ignore = "long: make test-all"]
fn a_valkey_that_loads_out_of_the_sources_memory_is_exact() {
    let Some(kind) = require::valkey() else { return };
    is_exact_by("shm", kind);
}

#[test]
fn a_redis_that_loads_out_of_its_agents_memory_is_exact() {
    let Some(kind) = require::redis() else { return };
    is_exact_by("tcp", kind);
}

#[test]
#[ignore = "long: make test-all"]
fn a_valkey_that_loads_out_of_its_agents_memory_is_exact() {
    let Some(kind) = require::valkey() else { return };
    is_exact_by("tcp", kind);
}

/// Adds enough keys that the server loads itself, at a fifth of a millisecond each, for a test to interfere meanwhile.
fn load_slowly(primary: &Server, replica: &Server) {
    load_small(primary, 10_000, 100);
    replica.configure("loading-process-events-interval-bytes", "1024").unwrap();
    replica.configure("key-load-delay", "200").unwrap();
}

fn wait_until_it_loads(replica: &Server) {
    wait_until("the module to load", LONG, || {
        let state = replica.fact("remora_load_state")?;
        let keys: u64 = replica.fact("remora_loaded_keys")?.parse().unwrap_or(0);
        Ok(if state == "loading" && keys > 0 { Ok(()) } else { Err(format!("{state}, {keys} keys")) })
    })
    .unwrap();
}

#[test]
#[ignore = "long: make test-all"]
fn an_agent_that_is_killed_while_the_server_loads_leaves_it_empty_and_the_next_one_succeeds() {
    for kind in require::kinds() {
        let Some(builder) = that_loads(kind) else { return };
        let (primary, replica) = (full_primary(kind), builder.start().unwrap());
        load_slowly(&primary, &replica);
        let source = Source::start(&primary, &["--memory", "128MiB"]);
        let mut agent = source.replica(&replica, &[]);
        wait_until_it_loads(&replica);
        agent.kill().unwrap();
        wait_until("the server to give up", LONG, || {
            let (loading, state) = (replica.fact("loading")?, replica.fact("remora_load_state")?);
            Ok(if loading == "0" && state == "idle" { Ok(()) } else { Err(format!("{loading} {state}")) })
        })
        .unwrap();
        assert_eq!(replica.client().unwrap().int(&["DBSIZE"]).unwrap(), 0, "the server serves no partial data");
        assert_eq!(replica.fact("master_link_status").unwrap(), "down");
        replica.configure("key-load-delay", "0").unwrap();
        let agent = source.replicate(&replica, &[]);
        assert!(loaded_by_module(&agent), "{}", agent.output());
        assert_same_data(&primary, &replica);
    }
}

#[test]
#[ignore = "long: make test-all"]
fn a_source_that_ends_while_the_server_loads_costs_only_a_new_snapshot() {
    for kind in require::kinds() {
        let Some(builder) = that_loads(kind) else { return };
        let (primary, replica) = (full_primary(kind), builder.start().unwrap());
        load_slowly(&primary, &replica);
        let mut source = Source::start(&primary, &["--memory", "128MiB"]);
        let mut agent = source.replica(&replica, &[]);
        wait_until_it_loads(&replica);
        source.restart(&primary);
        replica.configure("key-load-delay", "0").unwrap();
        agent.wait_for_success(LONG).unwrap();
        assert_same_data(&primary, &replica);
    }
}

#[test]
#[ignore = "long: make test-all"]
fn a_server_keeps_its_way_of_loading_and_syncs_by_itself_afterwards() {
    for kind in require::kinds() {
        for way in ["disabled", "on-empty-db"] {
            let Some(builder) = that_loads(kind) else { return };
            let (primary, replica) = (full_primary(kind), builder.config("repl-diskless-load", way).start().unwrap());
            let source = Source::start(&primary, &["--memory", "64MiB"]);
            let agent = source.replicate(&replica, &[]);
            assert!(loaded_by_module(&agent), "{}", agent.output());
            assert_eq!(replica.configured("repl-diskless-load").unwrap(), way);
            // Another history: the next sync is a full copy by the server's own replication.
            primary.client().unwrap().ok(&["DEBUG", "CHANGE-REPL-ID"]).unwrap();
            let full = syncs(&primary).0;
            primary.client().unwrap().int(&["CLIENT", "KILL", "TYPE", "replica"]).unwrap();
            wait_until("a full sync of the servers' own", LONG, || {
                let now = syncs(&primary).0;
                Ok(if now > full { Ok(()) } else { Err(format!("{now} full syncs")) })
            })
            .unwrap();
            replica.wait_for_link(LONG).unwrap();
            assert_same_data(&primary, &replica);
        }
    }
}

#[test]
#[ignore = "long: make test-all"]
fn a_server_that_serves_its_old_data_while_it_loads_still_does() {
    for kind in require::kinds() {
        let Some(builder) = that_loads(kind) else { return };
        let (primary, replica) = (full_primary(kind), builder.config("repl-diskless-load", "swapdb").start().unwrap());
        let source = Source::start(&primary, &["--memory", "64MiB"]);
        let agent = source.replicate(&replica, &[]);
        assert!(!loaded_by_module(&agent) && agent.output().contains("swapdb"), "{}", agent.output());
        assert_eq!(replica.configured("repl-diskless-load").unwrap(), "swapdb");
        assert_same_data(&primary, &replica);
    }
}

#[test]
#[ignore = "long: make test-all"]
fn a_module_that_is_switched_off_is_not_used() {
    for kind in require::kinds() {
        let Some(builder) = that_loads(kind) else { return };
        let (primary, replica) = (full_primary(kind), builder.start().unwrap());
        let source = Source::start(&primary, &["--memory", "64MiB"]);
        let agent = source.replicate(&replica, &["--module-load", "off"]);
        assert!(!loaded_by_module(&agent), "{}", agent.output());
        assert_eq!(replica.fact("remora_loaded_keys").unwrap(), "0");
        assert_same_data(&primary, &replica);
    }
}

#[test]
#[ignore = "long: make test-all"]
fn with_the_module_at_both_ends_a_replica_is_exact_through_a_small_window() {
    for kind in require::kinds() {
        let (Some(first), Some(second)) = (that_loads(kind), that_loads(kind)) else { return };
        let primary = first.config("repl-diskless-sync-delay", 0).config("repl-backlog-size", BACKLOG).start().unwrap();
        fill_every_type(&mut primary.client().unwrap(), 9).unwrap();
        load(&primary, 40, 3_000_000);
        let replica = second.start().unwrap();
        let source = Source::start(&primary, &["--memory", "64MiB", "--slot-size", "1MiB", "--module-capture", "walk"]);
        let writer = steady_writer(&primary);
        let agent = source.replicate(&replica, &["--memory", "16MiB"]);
        writer.stop().unwrap();
        assert!(loaded_by_module(&agent), "{}", agent.output());
        assert_same_data(&primary, &replica);
    }
}

/// Through a module, an expiry that is set on a writable replica marks the key as written there: the replica would
/// remove the key when the time is over, before the stream's PERSIST arrives. So such a server loads everything itself.
#[test]
#[ignore = "long: make test-all"]
fn a_writable_replica_keeps_keys_that_the_primary_persisted_while_it_loaded() {
    for kind in require::kinds() {
        let Some(builder) = that_loads(kind) else { return };
        let primary = primary(kind).config("rdbcompression", "no").start().unwrap();
        let mut client = primary.client().unwrap();
        // The server needs 15 s to load them, at half a millisecond each.
        load_small(&primary, 30_000, 20);
        let keys: Vec<String> = (0..50).map(|number| format!("expires {number}")).collect();
        for key in &keys {
            client.ok(&[b"SET".as_slice(), key.as_bytes(), &[b'x'; 4096], b"PX", b"8000"]).unwrap();
        }
        let mut source = Source::start(&primary, &["--memory", "128MiB", "--module-capture", "off", "--eager"]);
        source.wait_for_snapshot();
        for key in &keys {
            assert_eq!(client.int(&["PERSIST", key]).unwrap(), 1);
        }
        let replica = builder.config("replica-read-only", "no").start().unwrap();
        replica.configure("loading-process-events-interval-bytes", "1024").unwrap();
        replica.configure("key-load-delay", "500").unwrap();
        let agent = source.replicate(&replica, &[]);
        let words = [&["EXISTS"], &keys.iter().map(String::as_str).collect::<Vec<_>>()[..]].concat();
        assert_eq!(replica.client().unwrap().int(&words).unwrap(), 50);
        assert!(agent.output().contains("replica-read-only no"), "{}", agent.output());
        assert_same_data(&primary, &replica);
    }
}

// Data types of other modules: a server that loads a value of a module that it lacks ends its process, so it is refused
// before anything is touched.

#[test]
#[ignore = "long: make test-all"]
fn a_server_that_lacks_a_module_whose_data_the_snapshot_holds_is_refused_before_anything_is_touched() {
    for kind in require::kinds() {
        let stage = Stage::new();
        let library = built_module(&stage, "typed");
        let with_the_module = || quick(kind).config("loadmodule", &library);
        let primary = with_the_module().start().unwrap();
        primary.client().unwrap().ok(&["TYPED.SET", "key"]).unwrap();
        let source = stage.source(&primary.url(), &[]);

        let without = Server::start(kind).unwrap();
        without.client().unwrap().ok(&["SET", "own", "1"]).unwrap();
        let said = ends(&mut stage.replica(&without.url(), source.address, &["--replace"]), 3);
        says(&said, &[&without.url(), "lacks modules that the primary has loaded: typed"]);
        assert_untouched(&without);
        assert_eq!(without.client().unwrap().text(&["GET", "own"]).unwrap(), "1");

        // The same snapshot, at a server that has it.
        let with = with_the_module().start().unwrap();
        stage.replica(&with.url(), source.address, &[]).wait_for_success(LONG).unwrap();
        assert_eq!(with.client().unwrap().text(&["TYPE", "key"]).unwrap(), "typed-one");
    }
}
