//! Eight replicas from one snapshot. One that stops or ends delays no other and costs bounded memory, and slots are
//! compressed once for all.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::Value;

use crate::kit::{
    LONG, Processors, Scene, Source, Stage, ends, fill, kinds_and_module, load, number, primary, says, steady_writer,
    succeeds, syncs, with_or_without,
};
use remora_lab::server::wait_until;
use remora_lab::{Agent, Kind, Net, Server, Shape, Workload, assert_same_data, fill_every_type, require};

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
