//! Relays over cables of a known rate, which is their purpose. Needs root, for network namespaces.

use std::time::{Duration, Instant};

use remora_lab::{Agent, Host, Net, Server, Shape, assert_same_data, require};

use crate::kit::{Stage, fill, succeeds};

/// Random data in the primary, in MiB.
const MEBIBYTES: usize = 24;

/// Rate of every cable, in bytes per second each way: 100 Mb/s. The snapshot takes two seconds.
const CABLE: u64 = 100_000_000 / 8;

/// Number of replicas that are made at once.
const REPLICAS: usize = 3;

/// Limit on the time of all together, in multiples of the time of one. Three copies over one cable would take three
/// times as long. Some of the time is not spent on the cable, and other tests run at the same time.
const TOGETHER: f64 = 1.6;

/// A host with an empty server on it.
fn site(net: &Net, kind: remora_lab::Kind, number: usize) -> (Host, Server) {
    let host = net.host(&format!("replica {number}")).unwrap();
    host.shape(Shape::rate(CABLE)).unwrap();
    let server = Server::builder(kind).on(&host).start().unwrap();
    (host, server)
}

#[test]
fn three_replicas_behind_one_cable_take_about_as_long_as_one() {
    let Some(()) = require::namespaces() else { return };
    let Some(kind) = require::valkey() else { return };
    let net = Net::new().unwrap();
    let here = net.host("primary").unwrap();
    let primary = Server::builder(kind).on(&here).config("repl-diskless-sync-delay", 0).start().unwrap();
    fill(&primary, MEBIBYTES, 1);
    here.shape(Shape::rate(CABLE)).unwrap();
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
    assert!(together <= alone.mul_f64(TOGETHER), "{together:?} together, {alone:?} alone");
    for (_, server) in &sites {
        assert_same_data(&primary, server);
    }
}

/// Waits until the last agent has made its server a replica, and returns how long that took.
fn time(agents: Vec<(Agent, &Server)>) -> Duration {
    let began = Instant::now();
    for (mut agent, server) in agents {
        succeeds(&mut agent, server);
    }
    began.elapsed()
}
