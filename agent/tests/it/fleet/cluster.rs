//! Clusters: replicas without cluster mode are made of primaries in it while slots move, and clusters as a whole are
//! surveyed, fetched and restored.

use std::fs;
use std::ops::RangeInclusive;

use rustix::process::Signal;
use serde_json::Value;

use crate::kit::{
    LONG, Source, Stage, at_once, ends, fill_cluster, fill_keys, id, kinds_and_module, load_slowly, number, primary,
    quick, says, start_cluster, succeeds, syncs, wait_until_loading, with_or_without,
};
use crate::sync::attend::handed_over;
use remora_lab::sentinel::wait_for_nodes;
use remora_lab::server::wait_until;
use remora_lab::{Agent, Client, Cluster, Host, Kind, Net, Server, assert_same_data, require};
use remora_redis::resp::Frame;

/// Two primaries that know each other.
struct Pair {
    /// It has all slots.
    full: Server,
    /// It has no slot yet.
    empty: Server,
}

impl Pair {
    fn start(kind: Kind, module: bool) -> Pair {
        let [full, empty] = [(); 2].map(|()| with_or_without(primary(kind).cluster(), module));
        let mut client = full.client().unwrap();
        client.ok(&["CLUSTER", "ADDSLOTSRANGE", "0", "16383"]).unwrap();
        let (host, port) = (empty.address().ip().to_string(), empty.port().to_string());
        // The port of the cluster's bus is not the usual one.
        let bus = empty.configured("cluster-port").unwrap();
        client.ok(&["CLUSTER", "MEET", &host, &port, &bus]).unwrap();
        for server in [&full, &empty] {
            wait_for_nodes(server, 2).unwrap();
        }
        Pair { full, empty }
    }
}

/// Moves a slot as `redis-cli --cluster reshard` does, and returns how many keys it has moved.
pub(crate) fn move_slot(from: &Server, to: &Server, slot: u32) -> usize {
    let (from_id, to_id) = (id(from), id(to));
    let (host, port) = (to.address().ip().to_string(), to.port().to_string());
    let (mut from, mut to) = (from.client().unwrap(), to.client().unwrap());
    let slot = slot.to_string();
    to.ok(&["CLUSTER", "SETSLOT", &slot, "IMPORTING", &from_id]).unwrap();
    from.ok(&["CLUSTER", "SETSLOT", &slot, "MIGRATING", &to_id]).unwrap();
    let mut moved = 0;
    loop {
        let keys = keys_in_slot(&mut from, &slot);
        if keys.is_empty() {
            break;
        }
        moved += keys.len();
        let head = ["MIGRATE", &host, &port, "", "0", "5000", "KEYS"].map(|word| word.as_bytes().to_vec());
        from.ok(&head.into_iter().chain(keys).collect::<Vec<_>>()).unwrap();
    }
    for client in [&mut to, &mut from] {
        client.ok(&["CLUSTER", "SETSLOT", &slot, "NODE", &to_id]).unwrap();
    }
    moved
}

/// Moves these slots at once, and does not wait for the end.
pub(crate) fn move_slots(from: &Server, to: &Server, first: u32, last: u32) {
    let (to, slots) = (id(to), [first.to_string(), last.to_string()]);
    let command = ["CLUSTER", "MIGRATESLOTS", "SLOTSRANGE", &slots[0], &slots[1], "NODE", &to];
    from.client().unwrap().ok(&command).unwrap();
}

/// Waits until no slot is on its way from this server, and returns how the last migration ended.
pub(crate) fn settled(from: &Server) -> String {
    wait_until("the end of the migration", LONG, || {
        let state = migration(from)?;
        Ok(if ["success", "failed", "cancelled"].contains(&state.as_str()) { Ok(state) } else { Err(state) })
    })
    .unwrap()
}

fn keys_in_slot(client: &mut Client, slot: &str) -> Vec<Vec<u8>> {
    let keys = client.list(&["CLUSTER", "GETKEYSINSLOT", slot, "100"]).unwrap();
    keys.iter().filter_map(|key| key.as_bytes().map(<[u8]>::to_vec)).collect()
}

/// The state of the newest migration that the server takes part in.
fn migration(server: &Server) -> remora_lab::Result<String> {
    let jobs = server.client()?.list(&["CLUSTER", "GETSLOTMIGRATIONS"])?;
    let Some(Frame::Array(fields)) = jobs.first() else { return Ok(String::new()) };
    let state = fields.chunks_exact(2).find(|pair| pair[0].as_str() == Some("state"));
    Ok(state.and_then(|pair| pair[1].as_str()).unwrap_or_default().to_owned())
}

#[test]
#[ignore = "long: make test-all"]
fn replicas_are_made_of_both_primaries_while_slots_move_between_them() {
    at_once(kinds_and_module(), |(kind, module)| {
        let pair = Pair::start(kind, module);
        fill_keys(&pair.full, KEYS, "value");
        let sources = [&pair.full, &pair.empty].map(|server| Source::start(server, &["--upload-limit", "2MiB"]));
        let servers = [(); 2].map(|()| with_or_without(quick(kind), module));
        let mut agents: Vec<Agent> = sources
            .iter()
            .zip(&servers)
            .map(|(source, server)| source.replica(server, &["--transport", "tcp"]))
            .collect();
        let (mut moved, mut slots) = (0, 0..16_384);
        while agents.iter_mut().any(|agent| agent.ended().unwrap().is_none()) {
            moved += slots.next().map_or(0, |slot| move_slot(&pair.full, &pair.empty, slot));
        }
        for (agent, server) in agents.iter_mut().zip(&servers) {
            succeeds(agent, server);
        }
        // In step, they follow the servers' own replication.
        moved += slots.by_ref().take(200).map(|slot| move_slot(&pair.full, &pair.empty, slot)).sum::<usize>();
        assert!(moved > 0 && moved < KEYS, "{moved} keys were moved");
        assert_same_data(&pair.full, &servers[0]);
        assert_same_data(&pair.empty, &servers[1]);
        assert_eq!((syncs(&pair.full).0, syncs(&pair.empty).0), (1, 1), "one full copy each: the source's");
    });
}

#[test]
#[ignore = "long: make test-all"]
fn no_snapshot_is_used_that_was_taken_while_the_server_imported_slots() {
    let Some(kind) = require::valkey() else { return };
    at_once([(false, false), (false, true), (true, false)], |(module, begins_after_the_request)| {
        let mut pair = Pair::start(kind, module);
        fill_keys(&pair.full, KEYS, "value");
        // The server forks this number of seconds after it was asked for a snapshot.
        pair.empty.configure("repl-diskless-sync-delay", if begins_after_the_request { "3" } else { "0" }).unwrap();
        let asked = begins_after_the_request.then(|| {
            let mut source = Source::start(&pair.empty, &["--eager"]);
            source.agent.wait_for_event("snapshot_requested", LONG).unwrap();
            wait_until("the server to be asked", LONG, || {
                let waiting = pair.empty.fact("connected_slaves")?;
                Ok(if waiting == "1" { Ok(()) } else { Err(waiting) })
            })
            .unwrap();
            source
        });
        move_slots(&pair.full, &pair.empty, 0, 8_000);
        wait_until("the import to begin", LONG, || {
            let state = migration(&pair.empty)?;
            Ok(if state.is_empty() { Err(state) } else { Ok(()) })
        })
        .unwrap();
        // It cannot go on.
        pair.full.pause().unwrap();
        let mut source = asked.unwrap_or_else(|| Source::start(&pair.empty, &["--eager"]));
        source.agent.wait_for_line("imports the slots 0-8000", LONG).unwrap();
        pair.full.resume().unwrap();
        let ended = settled(&pair.full);
        let server = with_or_without(quick(kind), module);
        source.replicate(&server, &[]);
        assert_same_data(&pair.empty, &server);
        println!("module {module}: the migration ended with {ended}");

        // An import is in the stream. Whether it succeeds or not, the replica follows.
        for (first, last, cancelled) in [(8_001, 12_000, true), (8_001, 12_000, false)] {
            move_slots(&pair.full, &pair.empty, first, last);
            if cancelled {
                let _ = pair.full.client().unwrap().call(&["CLUSTER", "CANCELSLOTMIGRATIONS"]);
            }
            settled(&pair.full);
            assert_same_data(&pair.empty, &server);
        }
        assert_eq!(settled(&pair.full), "success", "with the module too, Valkey moves slots");
    });
}

/// Keys of half a kilobyte: at 2 MiB/s, a sync of them takes a second.
const KEYS: usize = 4_000;

// Slots that move between two shards while a new replica of each is in the middle of its attended sync. The sources are
// beside replicas, and beside primaries.

/// Slots of the first shard that move: some sixty keys are in them.
const SLOTS: RangeInclusive<u32> = 0..=299;

/// Microseconds for each key that a new replica loads: it loads until the slots have moved, also on a busy machine.
const STILL_LOADS: u32 = 100_000;

/// Shards of which a new replica is made: the one that the slots leave, and the one that gets them.
const BOTH: usize = 2;

/// Makes a new replica of both shards, and moves slots while the replicas load.
/// `replicas`: of each primary before that. With 0 the sources are beside the primaries.
fn while_both_load(kind: Kind, what: &str, replicas: usize, move_them: impl Fn(&Server, &Server)) {
    let Some(mut scene) = SyncScene::new(kind, replicas, BOTH) else { return };
    let agents = [scene.attend(0, 0), scene.attend(1, 1)];
    for node in &scene.nodes {
        load_slowly(node, STILL_LOADS);
        scene.cluster.meet(node).unwrap();
    }
    let shards = &scene.cluster.shards;
    scene.cluster.wait_for_nodes((1 + replicas) * shards.len() + BOTH).unwrap();
    let copies = || [0, 1].map(|shard| syncs(&shards[shard].primary).0);
    let copied = copies();
    for (node, shard) in scene.nodes.iter().zip(shards) {
        let primary = id(&shard.primary);
        wait_until("the new node to know its primary", LONG, || {
            let told = node.client()?.ok(&["CLUSTER", "REPLICATE", &primary]);
            Ok(told.map_err(|error| error.to_string()))
        })
        .unwrap();
    }
    scene.nodes.iter().for_each(wait_until_loading);
    if kind == Kind::Valkey9 && replicas == 0 {
        for source in &mut scene.sources[..BOTH] {
            source.agent.wait_for_event("slot_moves_free", LONG).unwrap();
        }
    }
    let keys = |server: &Server| server.client().unwrap().int(&["DBSIZE"]).unwrap();
    let before = [0, 1].map(|shard| keys(&shards[shard].primary));
    move_them(&shards[0].primary, &shards[1].primary);
    let moved = before[0] - keys(&shards[0].primary);
    assert!(moved > 0 && keys(&shards[1].primary) == before[1] + moved, "{kind}, {what}: {moved} keys moved");
    fill_cluster(&scene.cluster, 300, 2);
    for node in &scene.nodes {
        assert_eq!(number(node, "loading"), 1, "{kind}, {what}: the slots moved in the middle of the sync");
        load_slowly(node, 0);
    }
    for ((agent, node), shard) in agents.iter().zip(&scene.nodes).zip(shards) {
        handed_over(agent, node, 1);
        assert_same_data(&shard.primary, node);
    }
    // A source beside a primary has one.
    let served = copied.map(|count| count + u64::from(replicas == 0));
    assert_eq!(copies(), served, "{kind}, {what}: the primaries have served the new replicas no full copy");
    println!("{kind}, {what}: {moved} keys moved");
}

#[test]
#[ignore = "long: make test-all"]
fn slots_move_key_by_key() {
    at_once(require::kinds(), |kind| {
        while_both_load(kind, "key by key", 1, key_by_key);
    });
}

/// `CLUSTER SETSLOT` at a Valkey primary waits for each replica that has told its version.
#[test]
#[ignore = "long: make test-all"]
fn slots_move_key_by_key_between_primaries_with_sources() {
    at_once(require::kinds(), |kind| {
        while_both_load(kind, "key by key, sources beside the primaries", 0, key_by_key);
    });
}

fn key_by_key(from: &Server, to: &Server) {
    SLOTS.for_each(|slot| _ = move_slot(from, to, slot));
}

#[test]
#[ignore = "long: make test-all"]
fn slots_move_as_a_whole() {
    let Some(kind) = require::valkey() else { return };
    while_both_load(kind, "as a whole", 1, |from, to| {
        move_slots(from, to, *SLOTS.start(), *SLOTS.end());
        assert_eq!(settled(from), "success");
    });
}

/// Since Valkey 8 a primary replicates `CLUSTER SETSLOT`. A node that ran an old one would take itself for the owner of a
/// slot, or lose its last one, and follow another shard.
#[test]
#[ignore = "long: make test-all"]
fn a_node_that_joins_after_slots_have_moved_does_not_run_what_moved_them() {
    at_once(require::kinds(), |kind| {
        let Some(mut scene) = SyncScene::new(kind, 0, 2) else { return };
        let agents = [scene.attend(0, 0), scene.attend(1, 0)];
        scene.nodes.iter().for_each(|node| scene.cluster.meet(node).unwrap());
        scene.cluster.wait_for_nodes(scene.cluster.shards.len() + 2).unwrap();
        let join = |node: &Server, shard: &str| {
            wait_until("the new node to know its primary", LONG, || {
                let told = node.client()?.ok(&["CLUSTER", "REPLICATE", shard]);
                Ok(told.map_err(|error| error.to_string()))
            })
            .unwrap();
        };
        let shard = id(&scene.cluster.shards[0].primary);
        join(&scene.nodes[0], &shard);
        handed_over(&agents[0], &scene.nodes[0], 1);
        if kind == Kind::Valkey9 {
            scene.sources[0].agent.wait_for_event("slot_moves_free", LONG).unwrap();
        }
        let [left, got] = [0, 1].map(|shard| &scene.cluster.shards[shard].primary);
        let before = syncs(left).0;
        for (from, to, slot) in [(left, got, 0), (got, left, 0), (left, got, 1)] {
            move_slot(from, to, slot);
        }
        let wanted = number(left, "master_repl_offset");
        scene.sources[0].wait_for_status("the journal to have it", |status| {
            status["generation"]["offset_now"].as_u64() >= Some(wanted)
        });
        join(&scene.nodes[1], &shard);
        handed_over(&agents[1], &scene.nodes[1], 1);
        let node = &scene.nodes[1];
        assert_same_data(left, node);
        assert_eq!(number(node, "master_port"), u64::from(left.port()), "{}", node.log());
        assert!(!node.log().contains("Reconfiguring myself as a replica of"), "{}", node.log());
        // Redis keeps the map out of its stream, so the snapshot serves.
        assert_eq!(syncs(left).0, before + u64::from(kind == Kind::Valkey9));
    });
}

// Clusters as a whole: what is beside which shard, a file for each shard, and nodes that start on a file.

const SHARDS: usize = 3;

const SPREAD_KEYS: usize = 3000;

/// A cluster with a source beside each shard: at one of them beside a replica.
struct Scene {
    stage: Stage,
    cluster: Cluster,
    sources: Vec<Source>,
}

impl Scene {
    fn new(kind: Kind) -> Scene {
        let (stage, cluster) = (Stage::new(), start_cluster(None, kind, SHARDS, 1));
        fill_cluster(&cluster, SPREAD_KEYS, 1);
        let beside = |number: usize| match number {
            0 => cluster.shards[0].replicas[0].url(),
            number => cluster.shards[number].primary.url(),
        };
        let sources = (0..SHARDS).map(|number| stage.source(&beside(number), &[])).collect();
        Scene { stage, cluster, sources }
    }

    fn args(&self, action: &str, sources: &[&Source], more: &[&str]) -> Vec<String> {
        let (server, token) = (self.cluster.shards[1].replicas[0].url(), self.sources[0].token().display().to_string());
        let sources: Vec<String> = sources.iter().map(|source| source.address.to_string()).collect();
        let sources = sources.join(",");
        let args = ["cluster", action, "--server", &server, "--sources", &sources, "--token-file", &token];
        args.iter().chain(more).map(|arg| (*arg).to_owned()).collect()
    }

    fn end(&self, action: &str, sources: &[&Source], more: &[&str], code: i32) -> String {
        let args = self.args(action, sources, more);
        self.stage.end(&args.iter().map(String::as_str).collect::<Vec<_>>(), code)
    }

    fn all(&self) -> Vec<&Source> {
        self.sources.iter().collect()
    }
}

#[test]
#[ignore = "long: make test-all"]
fn each_shard_has_its_source_in_the_plan_and_its_file_in_a_backup() {
    for kind in require::kinds() {
        let scene = Scene::new(kind);
        // The sources may be named in any order: each is found at its shard.
        let shuffled = [&scene.sources[2], &scene.sources[0], &scene.sources[1]];
        let said = scene.end("plan", &shuffled, &["--json"], 0);
        let plan: Value = serde_json::from_str(said.lines().find(|line| line.starts_with('{')).unwrap()).unwrap();
        for (number, shard) in scene.cluster.shards.iter().enumerate() {
            let row = &plan["shards"][number];
            assert_eq!(row["primary"], shard.primary.address().to_string(), "{plan}");
            assert_eq!(row["source"], scene.sources[number].address.to_string(), "{plan}");
            assert_eq!(row["replicas"][0]["state"], "in step", "{plan}");
        }
        let before: Vec<_> = scene.cluster.shards.iter().map(|shard| syncs(&shard.primary).0).collect();
        says(&scene.end("status", &shuffled, &[], 0), &["shard", "0-5460", "in step", "snapshot   none"]);

        let folder = scene.stage.path("backup");
        says(&scene.end("backup", &shuffled, &["--to", &folder, "--at-once", "3"], 0), &["3 shards"]);
        says(&scene.end("backup", &shuffled, &["--to", &folder], 3), &["whole backup already"]);
        let read =
            |name: &str| -> Value { serde_json::from_slice(&fs::read(format!("{folder}/{name}")).unwrap()).unwrap() };
        let (manifest, nodes) = (read("manifest.json"), read("nodes.json"));
        for (number, shard) in scene.cluster.shards.iter().enumerate() {
            let entry = &manifest["files"][number];
            assert_eq!(entry["primary_id"], id(&shard.primary));
            assert_eq!(nodes[number]["name"], entry["primary_id"]);
            let data = scene.stage.path(&format!("data-{number}"));
            fs::create_dir(&data).unwrap();
            let file = entry["file"].as_str().unwrap();
            assert_eq!(entry["bytes"].as_u64(), Some(fs::metadata(format!("{folder}/{file}")).unwrap().len()));
            fs::copy(format!("{folder}/{file}"), format!("{data}/dump.rdb")).unwrap();
            let loaded = quick(kind).config("dir", &data).start().unwrap();
            assert_eq!(loaded.digest().unwrap(), shard.primary.digest().unwrap(), "{kind}, shard {number}");
            // The source's own, and none where it is beside a replica.
            let full = syncs(&shard.primary).0 - before[number];
            assert_eq!(full, u64::from(number != 0), "{kind}, shard {number}");
        }
    }
}

#[test]
#[ignore = "long: make test-all"]
fn a_cluster_is_left_alone_that_is_not_well_or_has_a_shard_without_a_source() {
    let Some(kind) = require::redis() else { return };
    let mut scene = Scene::new(kind);
    let two = [&scene.sources[0], &scene.sources[2]];
    says(&scene.end("plan", &two, &[], 3), &["1 of 3 shards are not ready", "no source has its history", "ready"]);
    let folder = scene.stage.path("backup");
    says(&scene.end("backup", &two, &["--to", &folder], 3), &["1 of 3 shards are not ready"]);
    assert_eq!(fs::read_dir(&folder).unwrap().count(), 0);
    // A slot is on its way.
    let (from, to) = (&scene.cluster.shards[0].primary, &scene.cluster.shards[1]);
    let slot = ["CLUSTER", "SETSLOT", "7", "MIGRATING", &id(&to.primary)];
    from.client().unwrap().ok(&slot).unwrap();
    let (server, token) = (from.url(), scene.sources[0].token().display().to_string());
    let sources = scene.all().iter().map(|source| source.address.to_string()).collect::<Vec<_>>().join(",");
    let plan = ["cluster", "plan", "--server", &server, "--sources", &sources, "--token-file", &token];
    says(&scene.stage.end(&plan, 3), &["not well", "slot 7->-"]);
    from.client().unwrap().ok(&["CLUSTER", "SETSLOT", "7", "STABLE"]).unwrap();
    scene.stage.end(&plan, 0);
    // A server that is not in cluster mode, and one that is gone.
    let alone = Server::start(kind).unwrap();
    let sources = ["--sources", &sources, "--token-file", &token];
    let ask = |server: &str| [&["cluster", "plan", "--server", server], sources.as_slice()].concat().join(" ");
    let words = ask(&alone.url());
    says(&scene.stage.end(&words.split(' ').collect::<Vec<_>>(), 3), &["not in cluster mode"]);
    scene.cluster.shards[2].primary.kill().unwrap();
    let words = ask(&scene.cluster.shards[0].primary.url());
    says(&scene.stage.end(&words.split(' ').collect::<Vec<_>>(), 3), &["shards are not ready"]);
}

#[test]
#[ignore = "long: make test-all"]
fn a_new_node_starts_on_a_file_and_goes_on_in_the_cluster_without_a_full_copy() {
    let Some(()) = require::root() else { return };
    for kind in require::kinds() {
        let (scene, mut joined) = (Scene::new(kind), Vec::new());
        for (shard, source) in scene.cluster.shards.iter().zip(&scene.sources) {
            // Its ports and its folder are known, and it has never been in the cluster.
            let mut node = primary(kind).cluster().start().unwrap();
            node.stop(LONG).unwrap();
            let folder = node.folder().display().to_string();
            fs::remove_file(format!("{folder}/nodes.conf")).unwrap();
            let bus = bus_port_of(&folder);
            let at = format!("{}@{bus}", node.address());
            let (to, conf, token) =
                (format!("{folder}/dump.rdb"), format!("{folder}/nodes.conf"), source.token().display().to_string());
            let (address, cluster) = (source.address.to_string(), scene.cluster.shards[1].primary.url());
            let fetch = ["fetch", "--source", &address, "--token-file", &token, "--to", &to];
            let join = ["--write-nodes-conf", &conf, "--cluster", &cluster, "--node-address", &at];
            let full = syncs(&shard.primary).0;
            says(&scene.stage.end(&[&fetch[..], &join[..]].concat(), 0), &["the primary continues from it"]);
            let written = fs::read_to_string(&conf).unwrap();
            // Again: the file of a node that follows this primary already stays as it is.
            scene.stage.end(&[&fetch[..], &join[..], &["--replace"]].concat(), 0);
            assert_eq!(fs::read_to_string(&conf).unwrap(), written);
            let taken = syncs(&shard.primary).0;
            assert!(taken <= full + 1, "the source's own");

            fill_cluster(&scene.cluster, 300, shard.primary.port().into());
            node.restart().unwrap();
            node.wait_for_link(LONG).unwrap();
            scene.cluster.meet(&node).unwrap();
            wait_until("the new node to be known as a replica", LONG, || {
                let text = scene.cluster.shards[2].replicas[0].client()?.text(&["CLUSTER", "NODES"])?;
                let line = text.lines().find(|line| line.contains(&format!(":{}@", node.port())));
                Ok(match line {
                    Some(line) if line.contains("slave") && line.contains(&id(&shard.primary)) => Ok(()),
                    _ => Err(text),
                })
            })
            .unwrap();
            assert_eq!(syncs(&shard.primary).0, taken, "{kind}: {}", node.log());
            assert!(number(&shard.primary, "sync_partial_ok") > 0);
            assert_same_data(&shard.primary, &node);
            joined.push(node);
        }
    }
}

/// The port of the bus in a server's configuration, as the lab has written it.
fn bus_port_of(folder: &str) -> String {
    let text = fs::read_to_string(format!("{folder}/server.conf")).unwrap();
    let line = text.lines().find(|line| line.starts_with("cluster-port")).unwrap();
    line.split_whitespace().nth(1).unwrap().trim_matches('"').to_owned()
}

#[test]
fn a_node_is_not_written_for_a_cluster_that_the_source_is_not_in() {
    let Some(kind) = require::redis() else { return };
    let (stage, cluster) = (Stage::new(), start_cluster(None, kind, 1, 0));
    let elsewhere = primary(kind).start().unwrap();
    let source = stage.source(&elsewhere.url(), &[]);
    let (to, conf) = (stage.path("dump.rdb"), stage.path("nodes.conf"));
    let (address, token) = (source.address.to_string(), source.token().display().to_string());
    let url = cluster.shards[0].primary.url();
    let args = ["fetch", "--source", &address, "--token-file", &token, "--to", &to, "--write-nodes-conf", &conf];
    let mut fetch = stage.start(None, &[&args[..], &["--cluster", &url, "--node-address", "127.0.0.1:7"]].concat());
    says(&ends(&mut fetch, 3), &["no primary in the cluster", "has the snapshot's history"]);
    // A node that runs has locked its file, would write over another one, and over the data beside it.
    let running = format!("{}/nodes.conf", cluster.shards[0].primary.folder().display());
    let before = fs::read(&running).unwrap();
    let args = ["fetch", "--source", &address, "--token-file", &token, "--to", &to, "--write-nodes-conf", &running];
    for more in [&[][..], &["--replace"]] {
        let own = ["--cluster", &url, "--node-address", "127.0.0.1:7"];
        let said = ends(&mut stage.start(None, &[&args[..], &own, more].concat()), 3);
        says(&said, &[&running, "is in use", "stop that node first"]);
    }
    assert_eq!(fs::read(&running).unwrap(), before);
    assert!(!fs::exists(&to).unwrap() && !fs::exists(&conf).unwrap());
}

// Nodes that become replicas by `remora cluster sync`: `remora attend` beside each, in a namespace where the rules of
// `remora intercept` stand.

/// The user of the first new node; the agents are root's, as the primaries are.
const FIRST_USER: u32 = 60_001;

/// The port of the first agent.
const FIRST_PORT: u16 = 7380;

/// A cluster on one host, a source for each shard, and new nodes.
pub(crate) struct SyncScene {
    stage: Stage,
    host: Host,
    pub(crate) cluster: Cluster,
    pub(crate) sources: Vec<Source>,
    pub(crate) nodes: Vec<Server>,
    _net: Net,
}

impl SyncScene {
    /// The sources are beside the primaries, or beside the first replicas where there are some.
    pub(crate) fn new(kind: Kind, replicas: usize, nodes: usize) -> Option<SyncScene> {
        require::namespaces()?;
        let net = Net::new().unwrap();
        let (stage, host) = (Stage::new(), net.host("hosts").unwrap());
        let cluster = start_cluster(Some(&host), kind, SHARDS, replicas);
        fill_cluster(&cluster, SPREAD_KEYS, 1);
        let server = |number: usize| {
            let shard = &cluster.shards[number];
            shard.replicas.first().unwrap_or(&shard.primary).url()
        };
        let sources = (0..SHARDS).map(|number| stage.source_on(&host, &server(number), &[])).collect();
        let node = |user: u32| primary(kind).cluster().as_user(user).on(&host).start().unwrap();
        let nodes = (0..nodes).map(|number| node(user(number))).collect();
        Some(SyncScene { stage, host, cluster, sources, nodes, _net: net })
    }

    /// An agent beside a new node, which reads from the source of this shard.
    pub(crate) fn attend(&self, number: usize, shard: usize) -> Agent {
        let (user, port) = (user(number).to_string(), (FIRST_PORT + u16::try_from(number).unwrap()).to_string());
        let rules = ["intercept", "add", "--server-uid", &user, "--agent-uid", "0", "--listen-port", &port];
        self.stage.start(Some(&self.host), &rules).wait_for_success(LONG).unwrap();
        let (url, source) = (self.nodes[number].url(), self.sources[shard].address.to_string());
        let token = self.stage.token.display().to_string();
        let ports: Vec<String> = self.cluster.nodes().map(|node| node.port().to_string()).collect();
        let mut args = vec!["attend", "--server", &url, "--source", &source, "--token-file", &token];
        args.extend(["--listen-port", &port, "--retry-for", "10s"]);
        ports.iter().for_each(|port| args.extend(["--primary-port", port]));
        let mut agent = self.stage.start(Some(&self.host), &args);
        agent.wait_for_event("attending", LONG).unwrap();
        agent
    }

    fn args(&self, more: &[&str]) -> Vec<String> {
        let (server, token) = (self.cluster.shards[0].primary.url(), self.stage.token.display().to_string());
        let sources: Vec<String> = self.sources.iter().map(|source| source.address.to_string()).collect();
        let sources = sources.join(",");
        let args = ["cluster", "sync", "--server", &server, "--sources", &sources, "--token-file", &token];
        args.iter().chain(more).map(|arg| (*arg).to_owned()).collect()
    }

    fn start(&self, more: &[&str]) -> Agent {
        let args = self.args(more);
        self.stage.start(Some(&self.host), &args.iter().map(String::as_str).collect::<Vec<_>>())
    }

    #[track_caller]
    fn end(&self, more: &[&str], code: i32) -> String {
        ends(&mut self.start(more), code)
    }

    /// The addresses of all new nodes, for `--add`.
    fn new_nodes(&self) -> String {
        self.nodes.iter().map(|node| node.address().to_string()).collect::<Vec<_>>().join(",")
    }

    fn full_copies(&self) -> Vec<u64> {
        self.cluster.shards.iter().map(|shard| syncs(&shard.primary).0).collect()
    }
}

fn user(number: usize) -> u32 {
    FIRST_USER + u32::try_from(number).unwrap()
}

/// The primary's id that the node names as its own.
fn followed(node: &Server) -> String {
    let text = node.client().unwrap().text(&["CLUSTER", "NODES"]).unwrap();
    let own = text.lines().find(|line| line.contains("myself")).unwrap();
    own.split(' ').nth(3).unwrap().to_owned()
}

#[test]
#[ignore = "long: make test-all"]
fn new_nodes_become_replicas_and_the_primaries_serve_no_full_copy() {
    at_once(require::kinds(), |kind| {
        let Some(scene) = SyncScene::new(kind, 0, SHARDS) else { return };
        let agents: Vec<Agent> = (0..SHARDS).map(|number| scene.attend(number, number)).collect();
        let before = scene.full_copies();
        // Without --yes the plan is shown, and nothing is changed.
        let nodes = scene.new_nodes();
        let said = scene.end(&["--add", &nodes], 3);
        says(&said, &["becomes a replica", "0-5460", "--yes"]);
        assert!(scene.nodes.iter().all(|node| followed(node) == "-"));

        let said = scene.end(&["--add", &nodes, "--yes", "--json"], 0);
        let done: Value = serde_json::from_str(said.lines().find(|line| line.starts_with('[')).unwrap()).unwrap();
        assert_eq!(done.as_array().map(Vec::len), Some(SHARDS), "{said}");
        for (number, (node, shard)) in scene.nodes.iter().zip(&scene.cluster.shards).enumerate() {
            assert_eq!(followed(node), id(&shard.primary));
            assert_same_data(&shard.primary, node);
            let full = syncs(&shard.primary).0 - before[number];
            assert_eq!(full, 1, "{kind}: the source's snapshot, and no other; {}", agents[number].output());
        }
        says(&scene.end(&["--add", &nodes, "--yes"], 0), &["already", "nothing is left to do"]);

        // The whole cluster anew, two shards at once.
        let at_first = scene.full_copies();
        let said = scene.end(&["--renew", "all", "--at-once", "2", "--yes"], 0);
        says(&said, &["takes its data anew", "has no other replica meanwhile", "3 replicas in step"]);
        for (number, (node, shard)) in scene.nodes.iter().zip(&scene.cluster.shards).enumerate() {
            assert_eq!(followed(node), id(&shard.primary));
            assert_same_data(&shard.primary, node);
            assert!(syncs(&shard.primary).0 - at_first[number] <= 1, "at most a new snapshot of the source");
            let seen = agents[number].output().matches("the source serves it").count();
            assert_eq!(seen, 2, "{}", agents[number].output());
        }
        scene.cluster.wait_for_nodes(2 * SHARDS).unwrap();
    });
}

#[test]
#[ignore = "long: make test-all"]
fn a_node_without_an_agent_ends_the_work_before_others_begin() {
    let Some(kind) = require::redis() else { return };
    let Some(scene) = SyncScene::new(kind, 0, 2) else { return };
    let nodes = scene.new_nodes();
    let said = scene.end(&["--add", &nodes, "--yes"], 6);
    says(&said, &["has served a full copy itself", "is remora attend beside the node"]);
    assert_eq!(followed(&scene.nodes[0]), id(&scene.cluster.shards[0].primary));
    assert_eq!(followed(&scene.nodes[1]), "-", "it has not begun");
    // With agents the same command goes on.
    let _agents = [scene.attend(0, 0), scene.attend(1, 1)];
    says(&scene.end(&["--add", &nodes, "--yes"], 0), &["already", "1 replica in step"]);
    assert_same_data(&scene.cluster.shards[1].primary, &scene.nodes[1]);
}

#[test]
fn what_cannot_be_done_is_refused_and_nothing_is_changed() {
    let Some(kind) = require::redis() else { return };
    let Some(scene) = SyncScene::new(kind, 0, 1) else { return };
    let node = &scene.nodes[0];
    let address = node.address().to_string();
    let alone = primary(kind).on(&scene.host).start().unwrap();
    says(&scene.end(&["--add", &alone.address().to_string(), "--yes"], 3), &["not in cluster mode"]);
    let of_the_cluster = scene.cluster.shards[1].primary.address().to_string();
    says(&scene.end(&["--add", &of_the_cluster, "--yes"], 3), &["a primary with slots"]);
    says(&scene.end(&["--renew", &of_the_cluster, "--yes"], 3), &["no replica"]);
    says(&scene.end(&["--yes"], 2), &["--add"]);
    // A slot is on its way.
    let (from, to) = (&scene.cluster.shards[0].primary, id(&scene.cluster.shards[1].primary));
    from.client().unwrap().ok(&["CLUSTER", "SETSLOT", "7", "MIGRATING", &to]).unwrap();
    says(&scene.end(&["--add", &address, "--yes"], 3), &["not well", "slot 7"]);
    from.client().unwrap().ok(&["CLUSTER", "SETSLOT", "7", "STABLE"]).unwrap();
    // A source is gone.
    let sources = [&scene.sources[1], &scene.sources[2]].map(|source| source.address.to_string()).join(",");
    let mut args = scene.args(&["--add", &address, "--yes"]);
    let at = args.iter().position(|arg| arg == "--sources").unwrap() + 1;
    args[at] = sources;
    let mut agent = scene.stage.start(Some(&scene.host), &args.iter().map(String::as_str).collect::<Vec<_>>());
    says(&ends(&mut agent, 3), &["no source has its history"]);
    assert_eq!(followed(node), "-");
    assert_eq!(node.client().unwrap().text(&["CLUSTER", "NODES"]).unwrap().lines().count(), 1);
}

#[test]
#[ignore = "long: make test-all"]
fn an_interrupted_run_is_started_again_and_a_fail_over_meanwhile_changes_the_primary() {
    at_once(require::kinds(), |kind| {
        let Some(scene) = SyncScene::new(kind, 1, 2) else { return };
        let agents = [scene.attend(0, 0), scene.attend(1, 1)];
        let nodes = scene.new_nodes();
        // The source of the first shard is beside its replica, whose data are the only ones that it can give.
        let replica = scene.cluster.shards[0].replicas[0].address().to_string();
        says(&scene.end(&["--renew", &replica, "--yes"], 3), &["the only source", "would throw them away"]);
        load_slowly(&scene.nodes[0], 2000);
        let mut run = scene.start(&["--add", &nodes, "--yes"]);
        wait_until_loading(&scene.nodes[0]);
        run.signal(Signal::TERM).unwrap();
        says(&ends(&mut run, 7), &["the same command goes on here"]);

        // The replica of the first shard becomes its primary, while the new node loads.
        let mut run = scene.start(&["--add", &nodes, "--yes"]);
        run.wait_for_line("goes on", LONG).unwrap();
        let shard = &scene.cluster.shards[0];
        let promoted = &shard.replicas[0];
        promoted.client().unwrap().ok(&["CLUSTER", "FAILOVER"]).unwrap();
        wait_until("the replica to be promoted", LONG, || {
            let role = promoted.fact("role")?;
            Ok(if role == "master" { Ok(()) } else { Err(role) })
        })
        .unwrap();
        load_slowly(&scene.nodes[0], 0);
        // The node that loads at full speed may be in step by then.
        let said = ends(&mut run, 0);
        assert!(said.contains("1 replica in step") || said.contains("2 replicas in step"), "{said}");
        wait_until("the new node to follow the new primary", LONG, || {
            let followed = followed(&scene.nodes[0]);
            Ok(if followed == id(promoted) { Ok(()) } else { Err(followed) })
        })
        .unwrap();
        scene.nodes[0].wait_for_link(LONG).unwrap();
        assert_same_data(promoted, &scene.nodes[0]);
        assert_same_data(&scene.cluster.shards[1].primary, &scene.nodes[1]);
        drop(agents);
    });
}
