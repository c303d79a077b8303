//! A replica whose server has the module: long strings are copied from shared memory, and the result is as exact as
//! without the module.

use std::path::PathBuf;

use remora_lab::server::{Builder, wait_until};
use remora_lab::{Agent, Kind, Server, assert_same_data, fill_every_type, require};

use crate::kit::{
    BACKLOG, LONG, Source, Stage, assert_untouched, built_module, ends, load, load_small, primary, quick, says,
    steady_writer, syncs,
};

/// The library, as cargo built it beside the program.
fn library() -> Option<PathBuf> {
    match remora_lab::server::module_library() {
        Ok(path) => Some(path),
        Err(error) => require::skip(&error.to_string()),
    }
}

fn with_module(kind: Kind) -> Option<Builder> {
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
    let Some(builder) = with_module(kind) else { return };
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
        let Some(builder) = with_module(kind) else { return };
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
        let Some(builder) = with_module(kind) else { return };
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
            let Some(builder) = with_module(kind) else { return };
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
        let Some(builder) = with_module(kind) else { return };
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
        let Some(builder) = with_module(kind) else { return };
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
        let (Some(first), Some(second)) = (with_module(kind), with_module(kind)) else { return };
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
        let Some(builder) = with_module(kind) else { return };
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
