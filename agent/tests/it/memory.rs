//! Memory: both ends stay within `--memory` plus 64 MiB, even if the data set is larger.

use remora_lab::server::wait_until;
use remora_lab::{Agent, Kind, Server, assert_same_data, require};

use crate::kit::{LONG, Source, load, primary, with_or_without};

const MIB: u64 = 1 << 20;

/// What an agent may take beyond its `--memory`.
const OWN: u64 = 64 * MIB;

/// Asserts that neither the resident memory of the process nor its shared memory exceeds the limit.
fn assert_within(who: &str, agent: &Agent, memory: u64) {
    let (resident, shared) = (agent.peak_memory() / MIB, agent.peak_memfd() / MIB);
    assert!(resident > 0, "no resident memory measured for {who}");
    assert!(resident * MIB <= memory + OWN, "{who}: {resident} MiB resident with --memory {} MiB", memory / MIB);
    assert!(shared * MIB <= memory + OWN, "{who}: {shared} MiB of shared memory with --memory {} MiB", memory / MIB);
    println!("{who}: {resident} MiB resident, {shared} MiB of shared memory at most");
}

#[test]
#[ignore = "long: make test-all"]
fn a_redis_four_times_as_large_as_the_memory_passes_through_it() {
    let Some(kind) = require::redis() else { return };
    four_times_the_memory(kind);
}

#[test]
#[ignore = "long: make test-all"]
fn a_valkey_four_times_as_large_as_the_memory_passes_through_it() {
    let Some(kind) = require::valkey() else { return };
    four_times_the_memory(kind);
}

fn four_times_the_memory(kind: Kind) {
    for module in [false, true] {
        passes_through(kind, module);
    }
}

/// The primary and both replicas' servers have the module, or none has.
fn passes_through(kind: Kind, module: bool) {
    // Time for both to join the same snapshot: no replica can join a window late.
    let primary = with_or_without(primary(kind).config("repl-diskless-sync-delay", 1), module);
    load(&primary, 32, 4 * MIB);
    let servers = [(); 2].map(|()| with_or_without(Server::builder(kind), module));
    let source = Source::start(&primary, &["--memory", "32MiB"]);
    let mut agents = [
        source.replica(&servers[0], &["--memory", "32MiB", "--transport", "shm"]),
        source.replica(&servers[1], &["--memory", "32MiB", "--transport", "tcp"]),
    ];
    for agent in &mut agents {
        agent.wait_for_success(LONG).unwrap();
    }
    assert_within("the source", &source.agent, 32 * MIB);
    assert_within("the replica by shm", &agents[0], 32 * MIB);
    assert_within("the replica by tcp", &agents[1], 32 * MIB);
    assert!(source.status()["generation"]["windowed"].as_bool().unwrap(), "the snapshot is not windowed");
    for server in &servers {
        assert_same_data(&primary, server);
    }
}

#[test]
#[ignore = "long: make test-all"]
fn a_small_replica_agent_reads_a_large_table_in_place() {
    for module in [false, true] {
        a_small_replica_agent_reads(40, 256 * MIB, false, module);
    }
}

#[test]
#[ignore = "long: make test-all"]
fn a_small_replica_agent_reads_through_a_large_window() {
    for module in [false, true] {
        a_small_replica_agent_reads(64, 256 * MIB, true, module);
    }
}

fn a_small_replica_agent_reads(values: u64, memory: u64, windowed: bool, module: bool) {
    let Some(kind) = require::valkey() else { return };
    let primary = with_or_without(primary(kind), module);
    load(&primary, values, 4 * MIB);
    let source = Source::start(&primary, &["--memory", &memory.to_string()]);
    for transport in ["shm", "tcp"] {
        let server = with_or_without(Server::builder(kind), module);
        let agent = source.replicate(&server, &["--memory", "16MiB", "--transport", transport]);
        assert!(agent.peak_memory() <= 16 * MIB + OWN, "{transport}: {} bytes resident", agent.peak_memory());
        assert_eq!(source.status()["generation"]["windowed"].as_bool(), Some(windowed));
        assert_same_data(&primary, &server);
    }
    assert_eq!(source.snapshots_taken(), if windowed { 2 } else { 1 });
    assert_within("the source", &source.agent, memory);
}

/// A retained table promises its readers that no slot is reused. If the data set grows between INFO and the fork, the
/// estimate is too small and the promise still holds: the source drops the snapshot and takes another one through a
/// window.
#[test]
fn a_data_set_that_outgrows_its_table_before_the_fork_is_taken_again_through_a_window() {
    let Some(kind) = require::redis() else { return };
    // Time to write between the source's INFO and the fork.
    let primary = primary(kind).config("repl-diskless-sync-delay", 3).start().unwrap();
    load(&primary, 4, 4 * MIB);
    let source = Source::start(&primary, &["--memory", "64MiB"]);
    let server = Server::start(kind).unwrap();
    let mut agent = source.replica(&server, &[]);
    wait_until("the source to ask for a snapshot", LONG, || {
        let asked = primary.fact("connected_slaves")? == "1";
        Ok(if asked { Ok(()) } else { Err("no replica yet".to_owned()) })
    })
    .unwrap();
    load(&primary, 24, 4 * MIB);
    agent.wait_for_success(LONG).unwrap();
    let said = source.agent.output();
    assert!(said.contains("larger than the server's INFO"), "the data set did not outgrow its table:\n{said}");
    assert!(source.status()["generation"]["windowed"].as_bool().unwrap(), "no window was taken");
    assert_within("the source", &source.agent, 64 * MIB);
    assert_same_data(&primary, &server);
}
