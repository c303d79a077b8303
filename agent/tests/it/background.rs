//! The default upload limit: clients of the primary beside a sync, over cables of a known rate. Needs root, for network
//! namespaces.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use remora_lab::{Address, Client, Host, Kind, Net, Server, Shape, assert_same_data, require};

use crate::kit::{Stage, fill, says, succeeds};

/// Random data in the primary, in MiB, and the rate of every cable in bytes per second: 100 Mb/s. A sync takes three
/// seconds.
const MEBIBYTES: usize = 32;
const CABLE: u64 = 100_000_000 / 8;

/// Time between two commands of the client.
const PAUSE: Duration = Duration::from_millis(2);

/// Limits of the client's 99th percentile and of the time of the sync, in multiples of those without a limit. Both are
/// wider than what is measured, because other tests run at the same time.
const WAIT: f64 = 0.6;
const TIME: f64 = 1.4;

/// A replica on a host of its own, a client of the primary on another one, and what they noticed.
struct Felt {
    took: Duration,
    p99: Duration,
}

/// Makes a replica, and times what a client on another host waits meanwhile.
fn sync(net: &Net, kind: Kind, here: &Host, primary: &Server, client: &Host, limit: &[&str]) -> Felt {
    let stage = Stage::new();
    // The queue of the cable is filled by the usual congestion control, whichever the system has.
    let options = [&["--eager", "--tcp-congestion", "cubic"], limit].concat();
    let mut source = stage.source_on(here, &primary.url(), &options);
    source.wait_for_snapshot();
    let there = net.host("replica").unwrap();
    there.shape(Shape::rate(CABLE)).unwrap();
    let replica = Server::builder(kind).on(&there).start().unwrap();
    let mut far = client.within(|| Client::connect(&Address::Tcp(primary.address()))).unwrap().unwrap();
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        let asks = scope.spawn(|| {
            let mut waits = Vec::new();
            while !is_over.load(Ordering::Relaxed) {
                let began = Instant::now();
                far.text(&["PING"]).unwrap();
                waits.push(began.elapsed());
                thread::sleep(PAUSE);
            }
            waits
        });
        let began = Instant::now();
        let mut agent = stage.replica_on(&there, &replica.url(), source.address, &["--no-serve-peers"]);
        succeeds(&mut agent, &replica);
        let took = began.elapsed();
        is_over.store(true, Ordering::Relaxed);
        let mut waits = asks.join().unwrap();
        waits.sort();
        assert_same_data(primary, &replica);
        let status = source.status();
        assert_eq!(status["upload"].is_object(), limit.is_empty(), "{status}");
        if limit.is_empty() {
            says(&source.drawn_status(), &["upload", "up to", "in the background", "of queue"]);
            assert!(status["upload"]["bytes_per_second"].as_u64() >= Some(1 << 20), "{status}");
        }
        Felt { took, p99: waits[waits.len() * 99 / 100] }
    })
}

#[test]
fn clients_hardly_wait_beside_a_sync_without_options_and_it_takes_hardly_longer() {
    let Some(()) = require::namespaces() else { return };
    let Some(kind) = require::valkey() else { return };
    let net = Net::new().unwrap();
    let (here, client) = (net.host("primary").unwrap(), net.host("client").unwrap());
    let primary = Server::builder(kind).on(&here).config("repl-diskless-sync-delay", 0).start().unwrap();
    fill(&primary, MEBIBYTES, 1);
    [&here, &client].into_iter().for_each(|host| host.shape(Shape::rate(CABLE)).unwrap());
    let full = sync(&net, kind, &here, &primary, &client, &["--upload-limit", "none"]);
    let auto = sync(&net, kind, &here, &primary, &client, &[]);
    println!("no limit: {:?}, p99 {:?}; auto: {:?}, p99 {:?}", full.took, full.p99, auto.took, auto.p99);
    assert!(auto.p99 <= full.p99.mul_f64(WAIT), "{:?}, {:?} without a limit", auto.p99, full.p99);
    assert!(auto.took <= full.took.mul_f64(TIME), "{:?}, {:?} without a limit", auto.took, full.took);
}
