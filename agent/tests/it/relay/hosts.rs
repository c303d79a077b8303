//! Relays over cables of a known rate, which is their purpose. Needs root, for network namespaces.

use std::time::{Duration, Instant};

use remora_lab::{Agent, Host, Kind, Net, Server, Shape, assert_same_data, require};

use crate::kit::{LONG, Stage, at_once, fill, succeeds};

/// Random data in the primary, in MiB.
const MEBIBYTES: usize = 24;

/// Rate of every cable, in bytes per second each way: 100 Mb/s. The snapshot takes two seconds.
const CABLE: u64 = 100_000_000 / 8;

/// Number of replicas that are made at once.
const REPLICAS: usize = 3;

/// A host with a primary on it; `seed` chooses the data.
fn primary_behind_a_cable(net: &Net, kind: Kind, seed: u64) -> (Host, Server) {
    let host = net.host("primary").unwrap();
    let primary = Server::builder(kind).on(&host).config("repl-diskless-sync-delay", 0).start().unwrap();
    fill(&primary, MEBIBYTES, seed);
    host.shape(Shape::rate(CABLE)).unwrap();
    (host, primary)
}

/// A host with an empty server on it.
fn site(net: &Net, kind: Kind, number: usize) -> (Host, Server) {
    let host = net.host(&format!("replica {number}")).unwrap();
    host.shape(Shape::rate(CABLE)).unwrap();
    let server = Server::builder(kind).on(&host).start().unwrap();
    (host, server)
}

#[test]
#[ignore = "long: make test-all"]
fn three_replicas_behind_one_cable_take_about_one_copy_over_it() {
    let Some(()) = require::namespaces() else { return };
    let Some(kind) = require::valkey() else { return };
    let net = Net::new().unwrap();
    let (here, primary) = primary_behind_a_cable(&net, kind, 1);
    let stage = Stage::new();
    let mut source = stage.source_on(&here, &primary.url(), &["--eager"]);
    source.wait_for_snapshot();

    let (host, server) = site(&net, kind, 0);
    let alone = time(vec![(stage.replica_on(&host, &server.url(), source.address, &[]), &server)]);
    let before = source.bytes_served();
    let sites: Vec<(Host, Server)> = (1..=REPLICAS).map(|number| site(&net, kind, number)).collect();
    let start = |(host, server): &(Host, Server)| stage.replica_on(host, &server.url(), source.address, &[]);
    let together = time(sites.iter().map(|site| (start(site), &site.1)).collect());

    let sent = source.bytes_served() - before;
    println!("alone {alone:?}, {REPLICAS} together {together:?}, {sent} bytes from the source");
    assert!(sent * 100 <= ((MEBIBYTES as u64) << 20) * super::ONCE, "{sent} bytes left the source");
    for (_, server) in &sites {
        assert_same_data(&primary, server);
    }
}

/// The cable of a lender that slows down. It is never silent.
const SLOW_CABLE: u64 = CABLE / 20;

/// Slots that the lender holds when its reader joins, and that the reader holds when the lender slows down, of 384. The
/// source knows the reader's rate by then.
const SLOTS_BEFORE: [u64; 2] = [16, 160];

#[test]
#[ignore = "long: make test-all"]
fn a_reader_whose_lender_slows_down_in_the_middle_moves_and_finishes_in_time() {
    let Some(()) = require::namespaces() else { return };
    at_once(require::kinds(), a_lender_slows_down);
}

fn a_lender_slows_down(kind: Kind) {
    let net = Net::new().unwrap();
    let (here, primary) = primary_behind_a_cable(&net, kind, 2);
    let stage = Stage::new();
    let mut source = stage.source_on(&here, &primary.url(), &["--eager"]);
    source.wait_for_snapshot();
    let (lender, reader) = (site(&net, kind, 1), site(&net, kind, 2));
    let start = |site: &(Host, Server), name: &str, slots: u64| {
        // Slowly enough for both to be in the middle.
        let more = ["--download-limit", "6MiB", "--name", name];
        let agent = stage.replica_on(&site.0, &site.1.url(), source.address, &more);
        let status = source.wait_for_status("a replica to hold some slots", |status| {
            super::replica(status, name).is_some_and(|at| at["slots_held"].as_u64() >= Some(slots))
        });
        (agent, status)
    };
    let (mut lending, _) = start(&lender, "lender", SLOTS_BEFORE[0]);
    let (mut reading, status) = start(&reader, "reader", SLOTS_BEFORE[1]);
    let of = |name: &str, field: &str| super::replica(&status, name).unwrap()[field].clone();
    assert_eq!(of("reader", "reads_from"), of("lender", "session"), "{status}");
    lender.0.shape(Shape::rate(SLOW_CABLE)).unwrap();
    let began = Instant::now();
    succeeds(&mut reading, &reader.1);
    let took = began.elapsed();
    println!("{took:?} after the lender slowed down");
    // Behind it the reader would be done when it is, after another twenty seconds.
    assert!(lending.ended().unwrap().is_none(), "{took:?}; the source:\n{}", source.agent.output());
    source.agent.wait_for_event("upstream_assigned", LONG).unwrap();
    assert_same_data(&primary, &reader.1);
}

/// Waits until the last agent has made its server a replica, and returns how long that took.
fn time(agents: Vec<(Agent, &Server)>) -> Duration {
    let began = Instant::now();
    for (mut agent, server) in agents {
        succeeds(&mut agent, server);
    }
    began.elapsed()
}
