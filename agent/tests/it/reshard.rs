//! Slots that move between two shards while a new replica of each is in the middle of its attended sync. The sources are
//! beside replicas, and beside primaries.

use std::ops::RangeInclusive;

use remora_lab::server::wait_until;
use remora_lab::{Kind, Server, assert_same_data, require};

use crate::attend::handed_over;
use crate::cluster::{move_slot, move_slots, settled};
use crate::cluster_sync::Scene;
use crate::kit::{LONG, at_once, fill_cluster, id, load_slowly, number, syncs, wait_until_loading};

/// Slots of the first shard that move: some sixty keys are in them.
const SLOTS: RangeInclusive<u32> = 0..=299;

/// Microseconds for each key that a new replica loads: it loads until the slots have moved, also on a busy machine.
const STILL_LOADS: u32 = 100_000;

/// Shards of which a new replica is made: the one that the slots leave, and the one that gets them.
const BOTH: usize = 2;

/// Makes a new replica of both shards, and moves slots while the replicas load.
/// `replicas`: of each primary before that. With 0 the sources are beside the primaries.
fn while_both_load(kind: Kind, what: &str, replicas: usize, move_them: impl Fn(&Server, &Server)) {
    let Some(mut scene) = Scene::new(kind, replicas, BOTH) else { return };
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
        let Some(mut scene) = Scene::new(kind, 0, 2) else { return };
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
