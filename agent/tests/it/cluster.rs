//! Primaries in cluster mode: replicas without cluster mode are made of them while slots move.

use std::ops::RangeInclusive;

use remora_lab::cluster::wait_for_nodes;
use remora_lab::server::wait_until;
use remora_lab::{Agent, Client, Kind, Server, assert_same_data, require};
use remora_redis::resp::Frame;

use crate::attend::handed_over;
use crate::clusters::SyncScene;
use crate::kit::{
    LONG, Source, at_once, fill_cluster, fill_keys, id, kinds_and_module, load_slowly, number, primary, quick,
    succeeds, syncs, wait_until_loading, with_or_without,
};

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
