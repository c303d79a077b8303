//! The module at the source, at the replica, at both, at neither: the replica is exact in each case, whatever is
//! written meanwhile.

use remora_lab::{Kind, Server, assert_same_data, fill_every_type, require};

use crate::kit::{LONG, Source, load, primary, steady_writer, syncs, with_or_without};

/// Commands that the writer must send before the replica is made, and again before it is compared.
const WRITES_MEANWHILE: u64 = 3_000;

/// The servers that have the module.
#[derive(Clone, Copy, Debug)]
struct Combination {
    source: bool,
    replica: bool,
}

const COMBINATIONS: [Combination; 4] = [
    Combination { source: false, replica: false },
    Combination { source: true, replica: false },
    Combination { source: false, replica: true },
    Combination { source: true, replica: true },
];

fn every_combination_is_exact(kind: Kind) {
    for (at, transport) in COMBINATIONS.into_iter().flat_map(|at| ["shm", "tcp"].map(|transport| (at, transport))) {
        let primary = with_or_without(primary(kind).config("rdbcompression", "no"), at.source);
        let replica = with_or_without(Server::builder(kind), at.replica);
        fill_every_type(&mut primary.client().unwrap(), 41).unwrap();
        load(&primary, 60, 300_000);
        let mut source = Source::start(&primary, &["--memory", "128MiB", "--module-capture", "walk"]);
        let before = syncs(&primary);
        let writer = steady_writer(&primary);
        writer.wait_for(WRITES_MEANWHILE);
        let mut agent = source.replica(&replica, &["--transport", transport]);
        agent.wait_for_success(LONG).unwrap();
        writer.wait_for(WRITES_MEANWHILE);
        writer.stop().unwrap();
        assert_same_data(&primary, &replica);

        let said = source.agent.wait_for_event("snapshot_completed", LONG).unwrap();
        assert_eq!(said.contains("method=the module"), at.source, "{at:?} {transport}: {said}");
        let loaded = agent.output().contains("out of shared memory");
        assert_eq!(loaded, at.replica, "{at:?} {transport}: {}", agent.output());
        let after = syncs(&primary);
        assert_eq!(
            (after.0 - before.0, after.1 - before.1),
            (1, 1),
            "{at:?} {transport}: one copy, one continuation\n{}\nthe primary:\n{}\nthe replica:\n{}",
            agent.output(),
            primary.log(),
            replica.log()
        );
    }
}

#[test]
#[ignore = "long: make test-all"]
fn every_combination_is_exact_with_redis() {
    let Some(kind) = require::redis() else { return };
    every_combination_is_exact(kind);
}

#[test]
#[ignore = "long: make test-all"]
fn every_combination_is_exact_with_valkey() {
    let Some(kind) = require::valkey() else { return };
    every_combination_is_exact(kind);
}
