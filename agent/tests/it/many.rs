//! Eight replicas from one snapshot. One that stops or ends delays no other and costs bounded memory.

use std::time::{Duration, Instant};

use remora_lab::server::wait_until;
use remora_lab::{Agent, Kind, Server, Workload, assert_same_data, fill_every_type, require};
use rustix::process::Signal;

use crate::kit::{LONG, Source, load, primary, syncs, with_or_without};

/// Number of replicas that join at once.
const REPLICAS: usize = 8;

/// What a stopped neighbour may add to the time of the others: scheduling noise, but none of our time limits.
const GRACE: Duration = Duration::from_secs(5);

const MIB: u64 = 1 << 20;

fn servers(kind: Kind, count: usize) -> Vec<Server> {
    (0..count).map(|_| Server::start(kind).unwrap()).collect()
}

/// The slots that the replica of this name holds, as the source knows it.
fn slots_of(status: &serde_json::Value, name: &str) -> Option<u64> {
    let replicas = status["replicas"].as_array()?;
    replicas.iter().find(|replica| replica["name"] == name)?["slots_held"].as_u64()
}

/// Starts an agent for every server, waits for all of them, and returns how long that took.
fn replicate_all(source: &Source, servers: &[Server], more: &[&str]) -> Duration {
    let begun = Instant::now();
    let mut agents: Vec<Agent> = servers.iter().map(|server| source.replica(server, more)).collect();
    for agent in &mut agents {
        agent.wait_for_success(LONG).unwrap();
    }
    begun.elapsed()
}

#[test]
fn eight_replicas_at_once_are_exact_and_cost_the_primary_one_copy() {
    for kind in require::kinds() {
        let primary = primary(kind).start().unwrap();
        fill_every_type(&mut primary.client().unwrap(), 21).unwrap();
        let servers = servers(kind, REPLICAS);
        let source = Source::start(&primary, &["--memory", "64MiB"]);
        let writer = Workload::start(
            primary.client().unwrap(),
            remora_lab::workload::Options::seeded(remora_lab::random::seed("workload")).rate(2_000),
        )
        .unwrap();
        let (by_shm, by_tcp) = servers.split_at(REPLICAS / 2);
        let begun: Vec<Agent> = by_shm.iter().map(|server| source.replica(server, &["--transport", "shm"])).collect();
        replicate_all(&source, by_tcp, &["--transport", "tcp"]);
        for mut agent in begun {
            agent.wait_for_success(LONG).unwrap();
        }
        writer.stop().unwrap();

        assert_eq!(syncs(&primary), (1, REPLICAS as u64));
        for server in &servers {
            assert_same_data(&primary, server);
        }
        assert!(source.agent.peak_memory() < (64 + 64) * MIB, "{}", source.agent.peak_memory());
    }
}

/// How many replicas have a part of the snapshot and have not loaded all of it, as the source knows them.
fn loading(status: &serde_json::Value) -> usize {
    let replicas = status["replicas"].as_array().map_or(&[][..], Vec::as_slice);
    let loads = |replica: &&serde_json::Value| matches!(replica["phase"].as_str(), Some("transfer" | "load"));
    replicas.iter().filter(loads).count()
}

#[test]
fn with_a_limit_replicas_load_in_turn_and_each_is_told_its_place() {
    let Some(kind) = require::redis() else { return };
    let primary = primary(kind).start().unwrap();
    load(&primary, 24, MIB);
    let source = Source::start(&primary, &["--memory", "128MiB", "--at-once", "1"]);
    let servers = servers(kind, 3);
    // Three seconds of reading: long enough that the others join meanwhile.
    let slowly = ["--transport", "tcp", "--download-limit", "8MiB"];
    let mut agents = vec![source.replica(&servers[0], &[&slowly[..], &["--name", "first"]].concat())];
    source.wait_for_status("the first to read", |status| slots_of(status, "first").is_some_and(|held| held > 0));
    for (server, name) in servers[1..].iter().zip(["second", "third"]) {
        agents.push(source.replica(server, &["--transport", "tcp", "--name", name]));
        source.wait_for_status("it to wait for its turn", |status| {
            assert!(loading(status) <= 1, "{status}");
            let replica = status["replicas"].as_array().and_then(|all| all.iter().find(|one| one["name"] == name));
            replica.is_some_and(|one| one["transport_why"].as_str().unwrap().contains("--at-once"))
        });
    }
    for agent in &mut agents {
        agent.wait_for_success(LONG).unwrap();
    }
    assert_eq!(syncs(&primary), (1, 3));
    for server in &servers {
        assert_same_data(&primary, server);
    }
}

#[test]
#[ignore = "long: make test-all"]
fn a_stopped_agent_and_a_killed_agent_delay_no_other_replica() {
    for kind in require::kinds() {
        two_end_in_the_middle(kind);
    }
}

/// How long an agent is stopped: longer than the silence that the source tolerates (10 s), so that both the time before
/// and the time after the source gives it up are seen.
const STOPPED: Duration = Duration::from_secs(12);

fn two_end_in_the_middle(kind: Kind) {
    let primary = primary(kind).start().unwrap();
    load(&primary, 48, MIB);
    let source = Source::start(&primary, &["--memory", "128MiB"]);
    let alone = replicate_all(&source, &servers(kind, REPLICAS), &["--transport", "tcp"]);

    let (stopped, killed) = (Server::start(kind).unwrap(), Server::start(kind).unwrap());
    let (others, later) = (servers(kind, REPLICAS), servers(kind, 2));
    // At this rate they need six seconds for the snapshot, and are interrupted long before.
    let slowly = ["--transport", "tcp", "--download-limit", "8MiB"];
    let mut lame = source.replica(&stopped, &[&slowly[..], &["--name", "lame"]].concat());
    let mut doomed = source.replica(&killed, &[&slowly[..], &["--name", "doomed"]].concat());
    for name in ["lame", "doomed"] {
        source.wait_for_status("both to read", |status| slots_of(status, name).is_some_and(|held| held > 0));
    }
    lame.signal(Signal::STOP).unwrap();
    doomed.kill().unwrap();
    let began = Instant::now();
    let status = source.status();
    let (held, all) = (slots_of(&status, "lame").unwrap(), status["generation"]["published_slots"].as_u64().unwrap());
    assert!(held < all / 2, "the stopped agent holds {held} of {all} slots: it does not lack enough");

    let beside_them = replicate_all(&source, &others, &["--transport", "tcp"]);
    assert!(beside_them < alone * 2 + GRACE, "{beside_them:?} beside a stopped one, {alone:?} without");
    // Others that join after the source has given it up are not delayed either.
    std::thread::sleep(STOPPED.saturating_sub(began.elapsed()));
    let after_it = replicate_all(&source, &later, &["--transport", "tcp"]);
    assert!(after_it < alone * 2 + GRACE, "{after_it:?} after a stopped one, {alone:?} without");
    for server in others.iter().chain(&later) {
        assert_same_data(&primary, server);
    }

    // Both succeed in the end, either by themselves or after a restart, and with the same snapshot.
    lame.signal(Signal::CONT).unwrap();
    lame.wait_for_success(LONG).unwrap();
    source.replicate(&killed, &["--transport", "tcp", "--replace"]);
    assert!(lame.output().contains("trying again in"), "it has not noticed: {}", lame.output());
    for server in [&stopped, &killed] {
        assert_same_data(&primary, server);
    }
    assert_eq!(syncs(&primary).0, 1);
    assert!(source.agent.peak_memory() < (128 + 64) * MIB, "{}", source.agent.peak_memory());
}

#[test]
#[ignore = "long: make test-all"]
fn a_redis_that_stops_reading_a_window_is_disconnected_and_joins_again() {
    let Some(kind) = require::redis() else { return };
    one_of_three_stops_reading(kind);
}

#[test]
#[ignore = "long: make test-all"]
fn a_valkey_that_stops_reading_a_window_is_disconnected_and_joins_again() {
    let Some(kind) = require::valkey() else { return };
    one_of_three_stops_reading(kind);
}

fn one_of_three_stops_reading(kind: Kind) {
    // Time for all to join the same snapshot: no replica can join a window late.
    let primary = primary(kind).config("repl-diskless-sync-delay", 1).start().unwrap();
    load(&primary, 64, MIB);
    let source = Source::start(&primary, &["--memory", "32MiB", "--stall-timeout", "2s"]);
    let alone = replicate_all(&source, &servers(kind, 2), &[]);

    let (mut paused, others) = (Server::start(kind).unwrap(), servers(kind, 2));
    let mut lame = source.replica(&paused, &[]);
    let begun = Instant::now();
    let mut agents: Vec<Agent> = others.iter().map(|server| source.replica(server, &[])).collect();
    lame.wait_for_event("link_followed", LONG).unwrap();
    paused.pause().unwrap();
    for agent in &mut agents {
        agent.wait_for_success(LONG).unwrap();
    }
    let beside_it = begun.elapsed();
    assert!(beside_it < alone * 3 + Duration::from_secs(2) + GRACE, "{beside_it:?}, without it {alone:?}");

    // The source does not ask the primary again because of a server that does not answer.
    let taken = source.snapshots_taken();
    lame.wait_for_line("the replica took no slot", LONG).unwrap();
    lame.wait_for_line("does not answer", LONG).unwrap();
    assert_eq!(source.snapshots_taken(), taken);
    paused.resume().unwrap();
    lame.wait_for_success(LONG).unwrap();
    for server in others.iter().chain([&paused]) {
        assert_same_data(&primary, server);
    }
    assert!(source.agent.peak_memory() < (32 + 64) * MIB, "{}", source.agent.peak_memory());
}

/// Replicas that read from each other, with the module everywhere. The slots that a relay lends are then also the memory
/// from which its own server loads.
#[test]
#[ignore = "long: make test-all"]
fn a_relay_that_is_killed_among_replicas_with_the_module_leaves_the_others_exact() {
    for kind in require::kinds() {
        let primary = with_or_without(primary(kind).config("repl-diskless-sync-delay", 1), true);
        load(&primary, 32, MIB);
        let servers: Vec<Server> = (0..4).map(|_| with_or_without(Server::builder(kind), true)).collect();
        let source = Source::start(&primary, &["--memory", "128MiB", "--slot-size", "128KiB"]);
        let names = ["one", "two", "three", "four"];
        // One after the other, so that each reads from the one before it.
        let start = |(name, server)| {
            let more = ["--transport", "tcp", "--name", name, "--download-limit", "8MiB"];
            let agent = source.replica(server, &more);
            source.wait_for_status("it to read", |status| slots_of(status, name) >= Some(8));
            agent
        };
        let mut agents: Vec<Agent> = names.into_iter().zip(&servers).map(start).collect();
        let status = source.status();
        let of = |name: &str, field: &str| {
            let replicas = status["replicas"].as_array().unwrap().iter();
            replicas.clone().find(|replica| replica["name"] == name).unwrap()[field].clone()
        };
        assert_eq!(of("three", "reads_from"), of("two", "session"), "{status}");
        agents[1].kill().unwrap();
        for number in [0, 2, 3] {
            agents[number].wait_for_success(LONG).unwrap();
            let said = agents[number].output();
            assert!(said.contains("out of shared memory"), "its server loaded without the module: {said}");
            assert_same_data(&primary, &servers[number]);
        }
        assert!(agents[2].output().contains("no more slots come from another replica"), "{}", agents[2].output());
        let again = source.replicate(&servers[1], &["--transport", "tcp", "--replace"]);
        assert!(again.output().contains("out of shared memory"), "{}", again.output());
        assert_same_data(&primary, &servers[1]);
        assert_eq!(syncs(&primary).0, 1, "one snapshot for all of them");
    }
}

// Memory: both ends stay within `--memory` plus 64 MiB, even if the data set is larger.

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
#[ignore = "long: make test-all"]
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
