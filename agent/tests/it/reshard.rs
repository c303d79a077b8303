//! Slots that move between two shards while a new replica of each is in the middle of its attended sync. The sources are
//! beside replicas: `CLUSTER SETSLOT` at a Valkey primary waits for an acknowledgement of each replica that is attached to
//! it, and a source acknowledges nothing.

use std::ops::RangeInclusive;

use remora_lab::server::wait_until;
use remora_lab::{Kind, Server, assert_same_data, require};

use crate::attend::handed_over;
use crate::cluster::{move_slot, move_slots, settled};
use crate::cluster_sync::Scene;
use crate::kit::{LONG, fill_cluster, id, load_slowly, number, syncs, wait_until_loading};

/// Slots of the first shard that move: some sixty keys are in them.
const SLOTS: RangeInclusive<u32> = 0..=299;

/// Shards of which a new replica is made: the one that the slots leave, and the one that gets them.
const BOTH: usize = 2;

/// Makes a new replica of both shards, and moves slots while the replicas load.
fn while_both_load(kind: Kind, what: &str, move_them: impl Fn(&Server, &Server)) {
    let Some(scene) = Scene::new(kind, 1, BOTH) else { return };
    let agents = [scene.attend(0, 0), scene.attend(1, 1)];
    for node in &scene.nodes {
        load_slowly(node, 10_000);
        scene.cluster.meet(node).unwrap();
    }
    let shards = &scene.cluster.shards;
    scene.cluster.wait_for_nodes(2 * shards.len() + BOTH).unwrap();
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
    assert_eq!(copies(), copied, "{kind}, {what}: the primaries have served no full copy");
    println!("{kind}, {what}: {moved} keys moved");
}

#[test]
fn slots_move_key_by_key() {
    for kind in require::kinds() {
        while_both_load(kind, "key by key", |from, to| _ = SLOTS.map(|slot| move_slot(from, to, slot)).sum::<usize>());
    }
}

#[test]
fn slots_move_as_a_whole() {
    let Some(kind) = require::valkey() else { return };
    while_both_load(kind, "as a whole", |from, to| {
        move_slots(from, to, *SLOTS.start(), *SLOTS.end());
        assert_eq!(settled(from), "success");
    });
}
