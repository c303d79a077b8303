//! Compressed slots: made once by the source, passed on as they are by replicas and state folders, and the same data at
//! the end.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use remora_lab::{Agent, Kind, Net, Server, Shape, assert_same_data, fill_every_type, require};
use serde_json::Value;

use crate::kit::{
    LONG, Processors, Scene, Source, Stage, ends, fill, kinds_and_module, load, number, primary, says, steady_writer,
    succeeds, syncs, with_or_without,
};

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
