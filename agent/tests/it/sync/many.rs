//! Eight replicas from one snapshot. One that stops or ends delays no other and costs bounded memory, and slots are
//! compressed once for all.
//!
//! The links arrive in pieces: the kernel delivers what was written in any pieces. Proxies do so on every link of a
//! sync, and nothing of it may be lost, doubled or taken for something else.
//!
//! ```text
//!   primary ◀── cut ── source ◀── cut ── replica agent ◀── cut ── its server
//!                                              └── commands, as they are ──▶
//! ```
//!
//! `make pieces` plays many rounds.

use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use std::{fs, thread};

use remora_lab::random::{self, Random};
use remora_lab::server::wait_until;
use remora_lab::workload::Options;
use remora_lab::{Agent, Client, Host, Kind, Net, Server, Shape, Workload, assert_same_data, fill_every_type, require};
use rustix::process::Signal;
use serde_json::Value;

use crate::kit::{
    LONG, Processors, Scene, Source, Stage, ends, fill, kinds_and_module, load, load_slowly, number, primary, quick,
    says, steady_writer, succeeds, syncs, with_or_without,
};
use crate::sync::attend::{self, handed_over};

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
fn a_zone_does_not_wait_for_a_slow_server_of_another_one() {
    let Some(kind) = require::valkey() else { return };
    let primary = primary(kind).start().unwrap();
    load(&primary, 24, MIB);
    let source = Source::start(&primary, &["--memory", "128MiB", "--at-once", "1"]);
    let servers = servers(kind, 3);
    // Six seconds of reading.
    let slowly = ["--transport", "tcp", "--download-limit", "4MiB", "--zone", "east", "--name", "first"];
    let mut agents = vec![source.replica(&servers[0], &slowly)];
    source.wait_for_status("the first to read", |status| slots_of(status, "first").is_some_and(|held| held > 0));
    agents.push(source.replica(&servers[1], &["--transport", "tcp", "--zone", "east", "--name", "second"]));
    let why = |status: &Value| {
        let replica = status["replicas"].as_array()?.iter().find(|one| one["name"] == "second")?;
        replica["transport_why"].as_str().map(str::to_owned)
    };
    let waits = |status: &Value| why(status).is_some_and(|why| why.starts_with("another replica of zone east loads"));
    source.wait_for_status("the second to wait for its turn in its zone", waits);
    // By shared memory, where no slots are passed on: its zone is known all the same.
    let west = ["--transport", "shm", "--zone", "west", "--name", "third"];
    source.replicate(&servers[2], &west);
    let status = source.status();
    assert!(waits(&status), "the west has waited for the east: {status}");
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

/// Replicas that read from each other, with the module everywhere. The slots that a relay lends are then also the
/// memory from which its own server loads.
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

// Compressed slots: made once by the source, passed on as they are by replicas and state folders, and the same data at
// the end.

/// Over TCP, as if the hosts were far apart.
const FAR: [&str; 2] = ["--transport", "tcp"];

/// Encrypted, as between hosts.
const SEALED: [&str; 2] = ["--security", "token"];

/// Values of 1 KiB of JSON.
const VALUES: u64 = 16 << 10;

/// A primary with records in JSON, which it does not compress itself.
fn with_json(kind: Kind, module: bool, values: u64) -> Server {
    let primary = with_or_without(primary(kind).config("rdbcompression", "no"), module);
    let (url, keys) = (primary.url(), values.to_string());
    Stage::new().end(&["load", "--server", &url, "--keys", &keys, "--value-size", "1024", "--json"], 0);
    primary
}

fn of(source: &Source, name: &str) -> u64 {
    source.status()["generation"][name].as_u64().unwrap()
}

fn compression(status: &Value) -> String {
    status["generation"]["compression"].as_str().unwrap().to_owned()
}

/// Asserts that what is stored is clearly less than the snapshot, and that this crossed the network `times` times.
#[track_caller]
fn assert_small(source: &Source, times: f64) {
    let (bytes, stored, served) = (of(source, "snapshot_bytes"), of(source, "stored_bytes"), source.bytes_served());
    println!("{bytes} bytes, {stored} stored, {served} served");
    assert!(stored * 10 < bytes * 7, "{stored} bytes are stored for a snapshot of {bytes}");
    // Lines, entries and the stream come on top.
    let most = stored as f64 * times * 1.1 + 2e6;
    assert!(served >= stored && (served as f64) < most, "{served} bytes were served of {stored} stored");
}

#[test]
#[ignore = "long: make test-all"]
fn replicas_read_compressed_slots_pass_them_on_as_they_are_and_are_exact() {
    for (number, (kind, module)) in kinds_and_module().enumerate() {
        let primary = with_json(kind, module, VALUES);
        fill_every_type(&mut primary.client().unwrap(), 3).unwrap();
        for (method, security) in [("lz4", &SEALED[..]), ("zstd", &[])] {
            let options = [&["--compress", method, "--memory", "256MiB", "--slot-size", "128KiB"], security].concat();
            let mut source = Source::start(&primary, &options);
            let servers: Vec<Server> = (0..3).map(|_| with_or_without(Server::builder(kind), module)).collect();
            let before = syncs(&primary);
            let writer = steady_writer(&primary);
            let replicate = |server: &Server| source.replica(server, &[&FAR, security].concat());
            let mut agents: Vec<Agent> = servers.iter().map(replicate).collect();
            for (agent, server) in agents.iter_mut().zip(&servers) {
                succeeds(agent, server);
            }
            writer.stop().unwrap();
            for server in &servers {
                assert_same_data(&primary, server);
            }
            assert_eq!(syncs(&primary).0 - before.0, 1, "one snapshot");
            let relayed = agents.iter().filter(|agent| agent.output().contains("reading slots from another replica"));
            assert_eq!(relayed.count(), 2);
            let line = source.agent.wait_for_event("snapshot_completed", LONG).unwrap();
            says(&line, &[&format!("{method}: --compress {method}; "), "% of the snapshot is stored"]);
            says(&source.drawn_status(), &[&format!("compression {method}: --compress {method}; ")]);
            let (stored, bytes) = (of(&source, "stored_bytes"), of(&source, "snapshot_bytes"));
            assert!(stored * 10 < bytes * 7, "{number}: {stored} of {bytes}");
        }
    }
}

#[test]
fn a_replica_on_the_sources_host_reads_plain_slots() {
    let Some(kind) = require::valkey() else { return };
    let (primary, replica) = (with_json(kind, false, 2000), Server::start(kind).unwrap());
    let source = Source::start(&primary, &["--compress", "zstd"]);
    let agent = source.replicate(&replica, &["--transport", "shm"]);
    assert_same_data(&primary, &replica);
    assert!(!agent.output().contains("tcp"), "{}", agent.output());
}

#[test]
#[ignore = "long: make test-all"]
fn values_that_do_not_shrink_stay_plain() {
    let Some(kind) = require::valkey() else { return };
    for method in ["lz4", "zstd"] {
        let primary = primary(kind).config("rdbcompression", "no").start().unwrap();
        fill(&primary, 16, 5);
        let source = Source::start(&primary, &["--compress", method]);
        let replica = Server::start(kind).unwrap();
        source.replicate(&replica, &FAR);
        assert_same_data(&primary, &replica);
        let (stored, bytes) = (of(&source, "stored_bytes"), of(&source, "snapshot_bytes"));
        assert!(stored <= bytes && stored * 100 >= bytes * 99, "{stored} of {bytes}");
        let said = compression(&source.status());
        assert!(said.contains("100.0 % of the snapshot"), "{said}");
    }
}

#[test]
#[ignore = "long: make test-all"]
fn a_state_folder_keeps_compressed_slots_and_the_next_agent_goes_on_with_them() {
    for (kind, security) in require::kinds().into_iter().zip([&SEALED[..], &[]]) {
        let primary = with_json(kind, false, VALUES);
        let limit = ["--no-shm", "--upload-limit", "2MiB", "--compress", "zstd"];
        let scene = Scene::new(primary, &[&limit[..], security].concat());
        let replica = Server::start(kind).unwrap();
        let folder = scene.stage.path("state");
        let more = [&["--state-dir", &folder], security].concat();
        let mut first = scene.source.replica(&replica, &more);
        scene.source.wait_for_slots(&mut first, 60);
        first.kill().unwrap();
        first.wait(LONG).unwrap();
        let kept = fs::metadata(format!("{folder}/slots")).unwrap();
        // Slots lie at multiples of their size, with holes behind them.
        assert!(kept.blocks() * 512 < kept.len() * 2 / 3, "{} blocks for {} bytes", kept.blocks(), kept.len());

        let mut second = scene.source.replica(&replica, &more);
        succeeds(&mut second, &replica);
        assert_same_data(&scene.primary, &replica);
        assert_eq!(number(&scene.primary, "sync_full"), 1);
        assert_small(&scene.source, 1.0);
    }
}

#[test]
#[ignore = "long: make test-all"]
fn fetch_reads_compressed_slots_and_writes_the_same_file() {
    let Some(()) = require::root() else { return };
    for security in [&SEALED[..], &[]] {
        let primary = with_json(Kind::Valkey9, false, VALUES);
        let scene = Scene::new(primary, &[&["--compress", "lz4"], security].concat());
        let fetch = |name: &str, transport: &str| {
            let to = scene.stage.path(name);
            let more = [&["--transport", transport], security].concat();
            ends(&mut scene.start("fetch", &to, &more), 0);
            fs::read(to).unwrap()
        };
        let compressed = fetch("far.rdb", "tcp");
        assert_small(&scene.source, 1.0);
        let plain = fetch("near.rdb", "shm");
        assert_small(&scene.source, 1.0);
        assert!(compressed == plain, "{} bytes and {}", compressed.len(), plain.len());
        assert_eq!(number(&scene.primary, "sync_full"), 1, "both are of one snapshot");
    }
}

#[test]
#[ignore = "long: make test-all"]
fn a_source_says_why_it_does_not_compress() {
    let Some(kind) = require::valkey() else { return };
    let primary = primary(kind).start().unwrap();
    load(&primary, 8, 100_000);
    for (options, why) in [
        (&["--compress", "off"][..], "off: --compress off"),
        (&[], "off: the tables are not encrypted, and compressed slots would need"),
        (&SEALED, "off: no replica on another host reads from the source by TCP"),
    ] {
        let source = Source::start(&primary, options);
        let replica = Server::start(kind).unwrap();
        let security = if options == SEALED { &SEALED[..] } else { &[] };
        source.replicate(&replica, &[&FAR, security].concat());
        assert_same_data(&primary, &replica);
        let said = compression(&source.status());
        assert!(said.starts_with(why), "{said}");
    }
}

/// Rate of the cable, in bytes per second: 100 Mb/s. A method still compresses several times faster when five other
/// programs want each processor.
const CABLE: u64 = 12_500_000;

/// Makes a replica over a slow cable while the source sees these processors. Returns the source's line about its
/// complete snapshot, its whole output and its status. `None`: this machine lacks what the test needs.
fn over_a_slow_cable(processors: fn(&Path) -> Processors) -> Option<(String, String, Value)> {
    require::shaping()?;
    let kind = require::valkey()?;
    let net = Net::new().unwrap();
    let (here, there) = (net.host("primary").unwrap(), net.host("replica").unwrap());
    let primary = primary(kind).config("rdbcompression", "no").on(&here).start().unwrap();
    let stage = Stage::new();
    let (url, keys) = (primary.url(), (96u64 << 10).to_string());
    let arguments = ["load", "--server", &url, "--keys", &keys, "--value-size", "1024", "--json"];
    ends(&mut stage.start(Some(&here), &arguments), 0);
    here.shape(Shape::rate(CABLE)).unwrap();
    let replica = Server::builder(kind).on(&there).start().unwrap();
    // A window, so that the snapshot is taken at the rate of the cable however slowly this machine compresses.
    let mut source = stage.seeing(processors(stage.folder())).source_on(&here, &url, &[]);
    let mut agent = stage.replica_on(&there, &replica.url(), source.address, &[]);
    succeeds(&mut agent, &replica);
    assert_same_data(&primary, &replica);
    let done = source.agent.wait_for_event("snapshot_completed", LONG).unwrap();
    println!("{done}");
    Some((done, source.agent.output(), source.status()))
}

#[test]
#[ignore = "long: make test-all"]
fn a_slow_cable_is_measured_and_what_shrinks_is_compressed_from_then_on() {
    let Some((done, output, _)) = over_a_slow_cable(Processors::idle) else { return };
    assert!(done.contains("compression=lz4: ") || done.contains("compression=zstd: "), "{done}");
    says(&done, &["lz4 leaves", "zstd leaves", "(measured)"]);
    says(&output, &["slots for other hosts are compressed in another way"]);
}

#[test]
#[ignore = "long: make test-all"]
fn where_other_programs_use_all_processors_slots_stay_plain_and_the_log_says_why() {
    let Some((done, output, status)) = over_a_slow_cable(Processors::busy) else { return };
    says(&done, &["compression=off: the host has no processor to spare (0.0 are left); "]);
    assert!(!output.contains("slots for other hosts are compressed"), "{output}");
    // Some slots may be tried before the agent has looked at its processors for the second time.
    let of = |name: &str| status["generation"][name].as_u64().unwrap();
    let (stored, bytes) = (of("stored_bytes"), of("snapshot_bytes"));
    assert!(stored * 100 >= bytes * 99, "{stored} of {bytes}");
}

/// The most bytes that a proxy waits with, and so the longest piece.
const PIECE_BYTES: usize = 64 << 10;

/// How long it waits with them for more, in milliseconds.
const WAIT_MILLIS: u64 = 30;

/// How a proxy passes on what one end sends to the other.
#[derive(Clone)]
enum Manner {
    /// In pieces that a seed chooses.
    Cut(u64),
    /// As it comes, but a full copy only when the test lets go, and then all of it at once.
    Held(Arc<Held>),
    /// As it comes, with the port of a link replaced by that of a proxy before it.
    Renamed(Arc<Renamed>),
}

/// What a server has sent since `+FULLRESYNC`.
#[derive(Default)]
struct Held {
    bytes: Mutex<Vec<u8>>,
    is_over: AtomicBool,
}

impl Held {
    /// Waits until these bytes have come.
    #[track_caller]
    fn wait_for(&self, part: &[u8]) {
        wait_until("the primary to have sent it", LONG, || {
            let bytes = self.bytes.lock().unwrap();
            Ok(if contains(&bytes, part) { Ok(()) } else { Err(format!("{} bytes", bytes.len())) })
        })
        .unwrap();
    }

    /// Delivers them. Returns how many there are.
    fn let_go(&self) -> usize {
        let count = self.bytes.lock().unwrap().len();
        self.is_over.store(true, Ordering::Relaxed);
        count
    }
}

/// The link to which an agent points its server, and the proxy before it.
struct Renamed {
    primary: u16,
    seed: u64,
    link: Mutex<Option<(String, String, Proxy)>>,
}

impl Renamed {
    /// What the agent says to its server. A link that it names gets a proxy.
    fn of_agent(&self, piece: &[u8]) -> Vec<u8> {
        let mut link = self.link.lock().unwrap();
        if let Some(port) = port_of(piece).filter(|port| *port != self.primary) {
            let is_new = link.as_ref().is_none_or(|(known, ..)| *known != port.to_string());
            if is_new {
                let target = SocketAddr::new(Ipv4Addr::LOCALHOST.into(), port);
                let proxy = Proxy::start(Ipv4Addr::LOCALHOST.into(), 0, target, Manner::Cut(self.seed));
                *link = Some((port.to_string(), proxy.address.port().to_string(), proxy));
            }
        }
        link.as_ref().map_or_else(|| piece.to_vec(), |(from, to, _)| replaced(piece, from, to))
    }

    /// What the server says.
    fn of_server(&self, piece: &[u8]) -> Vec<u8> {
        let link = self.link.lock().unwrap();
        link.as_ref().map_or_else(|| piece.to_vec(), |(to, from, _)| replaced(piece, from, to))
    }
}

/// The port in `REPLICAOF <address> <port>`.
fn port_of(piece: &[u8]) -> Option<u16> {
    let text = String::from_utf8_lossy(piece).to_ascii_uppercase();
    let (_, behind) = text.split_once("REPLICAOF\r\n")?;
    behind.split("\r\n").nth(3)?.parse().ok()
}

/// Ports of agents have five digits, so that no length changes.
fn replaced(piece: &[u8], from: &str, to: &str) -> Vec<u8> {
    assert_eq!(from.len(), to.len(), "the ports {from} and {to}");
    let mut piece = piece.to_vec();
    while let Some(at) = piece.windows(from.len()).position(|part| part == from.as_bytes()) {
        piece[at..at + from.len()].copy_from_slice(to.as_bytes());
    }
    piece
}

fn contains(bytes: &[u8], part: &[u8]) -> bool {
    bytes.windows(part.len()).any(|found| found == part)
}

/// A proxy before a server or an agent. Its connections end with their ends.
struct Proxy {
    address: SocketAddr,
    host: Option<Host>,
    is_over: Arc<AtomicBool>,
    /// Connections that have passed through it.
    count: Arc<AtomicU64>,
}

impl Proxy {
    fn start(ip: IpAddr, port: u16, target: SocketAddr, manner: Manner) -> Proxy {
        Proxy::listen(TcpListener::bind((ip, port)).unwrap(), None, target, manner)
    }

    /// On a host of a test network.
    fn start_on(host: &Host, target: SocketAddr, manner: Manner) -> Proxy {
        let listener = host.within(|| TcpListener::bind((host.address(), 0))).unwrap().unwrap();
        Proxy::listen(listener, Some(host.clone()), target, manner)
    }

    fn listen(listener: TcpListener, host: Option<Host>, target: SocketAddr, manner: Manner) -> Proxy {
        let (address, is_over) = (listener.local_addr().unwrap(), Arc::new(AtomicBool::new(false)));
        let (over, there, count) = (is_over.clone(), host.clone(), Arc::new(AtomicU64::new(0)));
        let counted = count.clone();
        thread::spawn(move || {
            for (number, near) in (0..).zip(listener.incoming().flatten()) {
                if over.load(Ordering::Relaxed) {
                    return;
                }
                let connect = || TcpStream::connect(target);
                let far = there.as_ref().map_or_else(connect, |host| host.within(connect).unwrap());
                let Ok(far) = far else { continue };
                counted.fetch_add(1, Ordering::Relaxed);
                join(near, far, &manner, number);
            }
        });
        Proxy { address, host, is_over, count }
    }

    /// How many connections have passed through it.
    fn joined(&self) -> u64 {
        self.count.load(Ordering::Relaxed)
    }

    fn url(&self) -> String {
        format!("redis://{}", self.address)
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
        let wake = || drop(TcpStream::connect(self.address));
        self.host.as_ref().map_or_else(wake, |host| host.within(wake).unwrap());
    }
}

/// Passes on both ways what one connection carries. `near` was accepted, `far` leads to the target.
fn join(near: TcpStream, far: TcpStream, manner: &Manner, number: u64) {
    let ends = |stream: &TcpStream| {
        stream.set_nodelay(true).unwrap();
        stream.try_clone().unwrap()
    };
    let (near_too, far_too) = (ends(&near), ends(&far));
    let (there, back) = (manner.clone(), manner.clone());
    thread::spawn(move || match there {
        Manner::Cut(seed) => cut(&near, &far, Random::new(seed ^ (number * 2))),
        Manner::Renamed(renamed) => pass(&near, &far, |piece| renamed.of_agent(piece)),
        Manner::Held(_) => pass(&near, &far, <[u8]>::to_vec),
    });
    thread::spawn(move || match back {
        Manner::Cut(seed) => cut(&far_too, &near_too, Random::new(seed ^ (number * 2 + 1))),
        Manner::Renamed(renamed) => pass(&far_too, &near_too, |piece| renamed.of_server(piece)),
        Manner::Held(held) => hold(&far_too, &near_too, &held),
    });
}

fn end(from: &TcpStream, to: &TcpStream) {
    let _ = (to.shutdown(Shutdown::Write), from.shutdown(Shutdown::Read));
}

fn pass(mut from: &TcpStream, mut to: &TcpStream, change: impl Fn(&[u8]) -> Vec<u8>) {
    let mut buffer = vec![0; PIECE_BYTES];
    while let Ok(count @ 1..) = from.read(&mut buffer) {
        if to.write_all(&change(&buffer[..count])).is_err() {
            break;
        }
    }
    end(from, to);
}

/// Reads once, and waits for at most this long. `None` at the end.
fn read_within(mut from: &TcpStream, millis: u64, buffer: &mut [u8]) -> Option<usize> {
    from.set_read_timeout(Some(Duration::from_millis(millis))).ok()?;
    match from.read(buffer) {
        Ok(0) => None,
        Ok(count) => Some(count),
        Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => Some(0),
        Err(_) => None,
    }
}

/// Passes bytes on in other pieces: some wait for those that follow, and all are cut anywhere.
fn cut(from: &TcpStream, mut to: &TcpStream, mut draw: Random) {
    let (mut buffer, mut waiting) = (vec![0; PIECE_BYTES], Vec::new());
    loop {
        let read = read_within(from, draw.between(1, WAIT_MILLIS), &mut buffer);
        waiting.extend_from_slice(&buffer[..read.unwrap_or(0)]);
        let may_wait = read.is_some_and(|count| count > 0) && waiting.len() < PIECE_BYTES;
        if may_wait && !draw.one_in(3) {
            continue;
        }
        while !waiting.is_empty() {
            let most = if draw.one_in(2) { 80 } else { waiting.len() as u64 };
            let length = draw.between(1, most).min(waiting.len() as u64) as usize;
            // Whole pieces go on at once when many wait: a cut every few bytes would take minutes.
            let length = if waiting.len() > 4096 && !draw.one_in(8) { waiting.len() } else { length };
            if to.write_all(&waiting[..length]).is_err() {
                return end(from, to);
            }
            waiting.drain(..length);
            if draw.one_in(4) {
                thread::sleep(Duration::from_micros(draw.below(2_000)));
            }
        }
        if read.is_none() {
            return end(from, to);
        }
    }
}

/// Passes bytes on, but those from `+FULLRESYNC` on only when they are let go.
fn hold(from: &TcpStream, mut to: &TcpStream, held: &Held) {
    let mut buffer = vec![0; PIECE_BYTES];
    let mut is_copy = false;
    while let Some(count) = read_within(from, 5, &mut buffer) {
        let piece = &buffer[..count];
        is_copy |= contains(piece, b"+FULLRESYNC");
        let ready = match (is_copy, held.is_over.load(Ordering::Relaxed)) {
            (false, _) => piece.to_vec(),
            (true, false) => {
                held.bytes.lock().unwrap().extend_from_slice(piece);
                continue;
            }
            (true, true) => {
                let mut bytes = std::mem::take(&mut *held.bytes.lock().unwrap());
                bytes.extend_from_slice(piece);
                bytes
            }
        };
        if to.write_all(&ready).is_err() {
            break;
        }
    }
    end(from, to);
}

/// A primary with a small data set, which sends a PING to its replicas once an hour.
fn small_primary(kind: Kind, saves_to_file: bool, module: bool) -> Server {
    let sockets = if saves_to_file { "no" } else { "yes" };
    let builder = primary(kind).config("repl-diskless-sync", sockets).config("repl-ping-replica-period", 3600);
    let primary = with_or_without(builder, module);
    let mut client = primary.client().unwrap();
    for number in 0..20 {
        client.ok(&["SET", &format!("before {number}"), &"value ".repeat(50)]).unwrap();
    }
    primary
}

fn count(client: &mut Client, key: &str, times: u64) {
    for _ in 0..times {
        client.int(&["INCR", key]).unwrap();
    }
}

/// How often the first counter is written before the source reads, and the second one later.
const FIRST: u64 = 100;

const LATER: u64 = 500;

/// A source of the primary that has read header, snapshot and the first writes behind it at once, if the server sends
/// them without waiting for an acknowledgement.
fn glued(stage: &Stage, primary: &Server, host: Option<&Host>) -> (Source, Proxy) {
    let held = Arc::new(Held::default());
    let manner = Manner::Held(held.clone());
    let proxy = match host {
        Some(host) => Proxy::start_on(host, primary.address(), manner),
        None => Proxy::start(Ipv4Addr::LOCALHOST.into(), 0, primary.address(), manner),
    };
    let announce = primary.address().to_string();
    let options = ["--announce", &announce, "--eager", "--no-rdma"];
    let source = match host {
        Some(host) => stage.source_on(host, &proxy.url(), &options),
        None => stage.source(&proxy.url(), &options),
    };
    // The first field of a snapshot, `redis-ver` or `valkey-ver`.
    held.wait_for(b"-ver");
    let mut client = primary.client().unwrap();
    count(&mut client, "aaa", FIRST);
    if primary.configured("repl-diskless-sync").unwrap() == "no" {
        held.wait_for(&"*2\r\n$4\r\nINCR\r\n$3\r\naaa\r\n".repeat(FIRST as usize).into_bytes());
    }
    let bytes = held.let_go();
    assert!(bytes < 16 << 10, "{bytes} bytes are more than one read of a handshake takes");
    count(&mut client, "bbb", LATER);
    (source, proxy)
}

fn has_both_counters(server: &Server) {
    let mut client = server.client().unwrap();
    for (key, wanted) in [("aaa", FIRST), ("bbb", LATER)] {
        assert_eq!(client.text(&["GET", key]).unwrap(), wanted.to_string(), "{key}");
    }
}

#[test]
#[ignore = "long: make test-all"]
fn the_first_writes_behind_a_small_snapshot_are_not_lost_when_they_come_with_it() {
    for kind in require::kinds() {
        for (saves_to_file, module) in [(true, false), (true, true), (false, false), (false, true)] {
            let (stage, primary) = (Stage::new(), small_primary(kind, saves_to_file, module));
            let (mut source, _proxy) = glued(&stage, &primary, None);
            source.wait_for_snapshot();
            let servers = [Server::start(kind).unwrap(), Server::start(kind).unwrap()];
            for (server, transport) in servers.iter().zip(["shm", "tcp"]) {
                source.replicate(server, &["--transport", transport]);
                has_both_counters(server);
                assert_same_data(&primary, server);
            }
            assert_eq!(number(&primary, "sync_full"), 1, "{kind} {saves_to_file} {module}");
            let said = source.agent.output();
            assert!(!said.contains("did not report within the limit"), "{said}");
            if module && saves_to_file {
                assert!(said.contains("repl-diskless-sync no"), "{said}");
            }
        }
    }
}

/// The setting changes between the question to the module and the fork: the child says so.
#[test]
fn a_primary_that_begins_to_save_to_disk_after_the_module_was_armed_is_noticed_at_once() {
    for kind in require::kinds() {
        let (stage, primary) = (Stage::new(), small_primary(kind, false, true));
        let armed = || {
            wait_until("the module to be armed", LONG, || {
                let status = primary.client()?.list(&["REMORA.STATUS"])?;
                let words = status.into_iter().filter_map(|frame| frame.into_bytes().ok());
                let status = String::from_utf8_lossy(&words.collect::<Vec<_>>().join(&b' ')).into_owned();
                Ok(if status.contains("armed") { Ok(()) } else { Err(status) })
            })
            .unwrap();
        };
        // The server waits this long before it forks, so that the setting can be changed meanwhile.
        primary.configure("repl-diskless-sync-delay", "4").unwrap();
        let mut source = stage.source(&primary.url(), &["--eager", "--module-capture", "walk"]);
        armed();
        primary.configure("repl-diskless-sync", "no").unwrap();
        source.wait_for_snapshot();
        let said = source.agent.output();
        assert!(!said.contains("did not report within the limit"), "{said}");
        let server = Server::start(kind).unwrap();
        source.replicate(&server, &[]);
        assert_same_data(&primary, &server);
    }
}

#[test]
#[ignore = "long: make test-all"]
fn a_source_that_was_stopped_while_the_primary_saved_serves_an_exact_replica() {
    for kind in require::kinds() {
        for module in [false, true] {
            let (stage, primary) = (Stage::new(), small_primary(kind, true, module));
            primary.configure("rdb-key-save-delay", "50000").unwrap();
            let mut source = stage.source(&primary.url(), &["--eager"]);
            wait_until("the primary to save", LONG, || {
                let state = primary.info("persistence")?.get("rdb_bgsave_in_progress").unwrap_or_default().to_owned();
                Ok(if state == "1" { Ok(()) } else { Err(state) })
            })
            .unwrap();
            source.agent.signal(Signal::STOP).unwrap();
            count(&mut primary.client().unwrap(), "aaa", FIRST);
            wait_until("the snapshot to be sent", LONG, || {
                let replica = primary.fact("slave0")?;
                Ok(if replica.contains("state=online") { Ok(()) } else { Err(replica) })
            })
            .unwrap();
            source.agent.signal(Signal::CONT).unwrap();
            source.wait_for_snapshot();
            count(&mut primary.client().unwrap(), "bbb", LATER);
            let server = Server::start(kind).unwrap();
            source.replicate(&server, &[]);
            has_both_counters(&server);
            assert_same_data(&primary, &server);
        }
    }
}

#[test]
#[ignore = "long: make test-all"]
fn a_backup_with_a_journal_and_a_fetched_file_have_the_first_writes_too() {
    for kind in require::kinds() {
        let (stage, primary) = (Stage::new(), small_primary(kind, true, false));
        let (source, _proxy) = glued(&stage, &primary, None);
        let scene = Scene { stage, primary, source };
        let (shelf, data, folder) = (scene.stage.path("shelf"), scene.stage.path("data"), scene.stage.path("fetched"));
        let mut backup = scene.start("backup", &shelf, &["--journal"]);
        backup.wait_for_line("the commands since are recorded", LONG).unwrap();
        let wanted = number(&scene.primary, "master_repl_offset");
        scene.source.wait_for_status("the commands to be recorded", |status| {
            let replicas = status["replicas"].as_array().unwrap().iter();
            replicas.filter_map(|replica| replica["applied_offset"].as_u64()).any(|offset| offset >= wanted)
        });
        let digest = scene.primary.digest().unwrap();
        backup.kill().unwrap();
        scene.stage.end(&["restore", &shelf, "--to", &data], 0);
        let restored = quick(kind).config("dir", &data).config("appendonly", "yes").start().unwrap();
        has_both_counters(&restored);
        assert_eq!(restored.digest().unwrap(), digest, "{kind}");

        std::fs::create_dir(&folder).unwrap();
        ends(&mut scene.start("fetch", &format!("{folder}/dump.rdb"), &[]), 0);
        let follows = format!("127.0.0.1 {}", scene.primary.port());
        let fetched = quick(kind).config("dir", &folder).config("replicaof", follows).start().unwrap();
        fetched.wait_for_link(LONG).unwrap();
        has_both_counters(&fetched);
        assert_same_data(&scene.primary, &fetched);
        assert_eq!(number(&scene.primary, "sync_full"), 1, "{kind}");
    }
}

#[test]
fn a_server_that_is_attended_gets_the_first_writes_too() {
    for kind in require::kinds() {
        let builder = primary(kind).config("repl-diskless-sync", "no").config("repl-ping-replica-period", 3600);
        let Some(mut scene) = attend::Scene::with(builder, |_| ()) else { return };
        let (source, _proxy) = glued(&scene.stage, &scene.primary, Some(&scene.host));
        scene.source = source;
        let server = scene.server(quick(kind));
        let agent = scene.attend_with(&server, &[scene.primary.port()], &[]);
        server.replicate(&scene.primary).unwrap();
        handed_over(&agent, &server, 1);
        has_both_counters(&server);
        assert_same_data(&scene.primary, &server);
    }
}

/// One sync whose links all deliver in other pieces than were written.
fn round(kind: Kind, seed: u64) {
    let mut draw = Random::new(seed);
    let saves_to_file = seed.is_multiple_of(2);
    println!("pieces: {kind}, saves to a file: {saves_to_file}, REMORA_SEED={seed}");
    let primary = small_primary(kind, saves_to_file, draw.one_in(3));
    if draw.one_in(3) {
        fill(&primary, draw.between(1, 3) as usize, seed);
    }
    let (loopback, other) = (IpAddr::from([127, 0, 0, 1]), IpAddr::from([127, 0, 0, 2]));
    let (stage, server) = (Stage::new(), Server::start(kind).unwrap());
    if draw.one_in(2) {
        server.configure("repl-diskless-load", "on-empty-db").unwrap();
    }
    let options = Options { big_bytes: 0, ..Options::seeded(seed) };
    let writer = Workload::start(primary.client().unwrap(), options.rate(draw.between(50, 2_000))).unwrap();
    let before_primary = Proxy::start(loopback, 0, primary.address(), Manner::Cut(draw.word()));
    let announce = primary.address().to_string();
    let source = stage.source(&before_primary.url(), &["--announce", &announce, "--no-rdma"]);
    // Lanes lead to the port of the source, on the host where the conversation is.
    let before_source = Proxy::start(other, source.address.port(), source.address, Manner::Cut(draw.word()));
    let renamed = Renamed { primary: primary.port(), seed: draw.word(), link: Mutex::default() };
    let before_server = Proxy::start(loopback, 0, server.address(), Manner::Renamed(Arc::new(renamed)));
    let transport = if draw.one_in(3) { "shm" } else { "tcp" };
    let mut agent = stage.replica(&before_server.url(), before_source.address, &["--transport", transport]);
    if let Err(error) = agent.wait_for_success(LONG) {
        panic!("{error}\n{}\n{}\nthe server:\n{}", agent.output(), source.agent.output(), server.log());
    }
    writer.stop().unwrap();
    assert_same_data(&primary, &server);
    assert!(!server.log().contains("Protocol error"), "{}", server.log());
}

/// The same seeds for each kind of server, an even and an odd one in turn. A seed that a round has printed makes that
/// round the first one.
fn rounds(count: u64) {
    let mut seed = random::seed("pieces");
    for _ in 0..count {
        require::kinds().into_iter().for_each(|kind| round(kind, seed));
        seed = Random::new(seed).word() & !1 | !seed & 1;
    }
}

#[test]
#[ignore = "long: make test-all"]
fn a_sync_is_exact_whatever_pieces_its_links_deliver() {
    rounds(2);
}

mod by_command {
    use super::*;

    /// As many rounds as `REMORA_PIECES_ROUNDS` says, half of them with each server.
    #[test]
    #[ignore = "runs for long; make pieces runs it"]
    fn many_syncs_are_exact_whatever_pieces_their_links_deliver() {
        let count = std::env::var("REMORA_PIECES_ROUNDS").ok().and_then(|count| count.parse().ok());
        rounds(count.unwrap_or(1_000_u64).div_ceil(2));
    }
}

/// Sends what a host says to one address elsewhere instead.
fn lead(from: &Host, to: SocketAddr, instead: SocketAddr) {
    let rule = format!("ip daddr {} tcp dport {} dnat to {instead}", to.ip(), to.port());
    let table = format!("table ip pieces {{ chain output {{ type nat hook output priority -100; {rule}; }}; }}");
    let mut nft = Command::new("nft");
    from.enter(nft.arg(table)).unwrap();
    assert!(nft.status().unwrap().success());
}

/// Slots that pass from replica to replica in other pieces, as the conversations about them do.
#[test]
#[ignore = "long: make test-all"]
fn a_replica_that_reads_from_another_one_is_exact_whatever_pieces_their_links_deliver() {
    let Some(()) = require::namespaces() else { return };
    let seed = random::seed("relayed pieces");
    for kind in require::kinds() {
        let mut draw = Random::new(seed);
        let net = Net::new().unwrap();
        let [near, lends, reads, between] =
            ["primary", "lender", "reader", "between"].map(|name| net.host(name).unwrap());
        let primary = primary(kind).on(&near).start().unwrap();
        fill(&primary, 8, seed);
        let stage = Stage::new();
        let mut source = stage.source_on(&near, &primary.url(), &["--no-rdma", "--eager"]);
        source.wait_for_snapshot();
        let writer = Workload::start(
            primary.client().unwrap(),
            Options { big_bytes: 0, ..Options::seeded(draw.word()) }.rate(200),
        )
        .unwrap();
        let cut = |to: SocketAddr, draw: &mut Random| Proxy::start_on(&between, to, Manner::Cut(draw.word()));
        let lending = SocketAddr::new(lends.address(), 7444);
        let (to_source, to_lender) = (cut(source.address, &mut draw), cut(lending, &mut draw));
        lead(&lends, source.address, to_source.address);
        lead(&reads, source.address, to_source.address);
        lead(&reads, lending, to_lender.address);
        let start = |host: &Host, name: &str, more: &[&str]| {
            let server = quick(kind).on(host).start().unwrap();
            let options = [&["--transport", "tcp", "--name", name], more].concat();
            (stage.replica_on(host, &server.url(), source.address, &options), server)
        };
        let (mut lender, first) = start(&lends, "lender", &["--serve-peers", "--peer-listen", &lending.to_string()]);
        load_slowly(&first, 50_000);
        source.wait_for_status("the lender to hold slots", |status| held(status, "lender") >= 16);
        let (mut reader, second) = start(&reads, "reader", &["--no-serve-peers"]);
        reader.wait_for_event("upstream_read", LONG).unwrap();
        load_slowly(&first, 0);
        for (agent, server) in [(&mut reader, &second), (&mut lender, &first)] {
            if let Err(error) = agent.wait_for_success(LONG) {
                panic!("{error}\n{}\n{}\nthe server:\n{}", agent.output(), source.agent.output(), server.log());
            }
        }
        writer.stop().unwrap();
        for server in [&first, &second] {
            assert_same_data(&primary, server);
        }
        assert!(to_lender.joined() > 0, "{kind}: nothing passed the proxy before the lender\n{}", reader.output());
        assert_eq!(number(&primary, "sync_full"), 1, "{kind}");
    }
}

fn held(status: &Value, name: &str) -> u64 {
    let replicas = status["replicas"].as_array().into_iter().flatten();
    let of = |replica: &Value| replica["slots_held"].as_u64().filter(|_| replica["name"] == name);
    replicas.filter_map(of).max().unwrap_or_default()
}
