//! Relay: replicas feed each other. The bytes leave the source about once, even if a relay ends, sends wrong data, or
//! is behind a slow cable.

use std::io::ErrorKind;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::Value;
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Runtime;

use crate::kit::{
    LONG, Source, Stage, at_once, ends, fill, load, load_slowly, number, primary, quick, succeeds, syncs,
};
use crate::security::certificates::link_of;
use crate::sync::attend::{PORT, SERVER_USER, handed_over};
use remora_agent::conversation::{self, Connection, Endpoint, Mode, Options, Security, Token, derive};
use remora_fabric::tcp::{LANE_MAGIC, TcpConnector, TcpExporter, TcpOptions};
use remora_fabric::{Connector, Error, Exporter, Memory, Pages, RegionId, RegionKey, Regions, TransportKind};
use remora_lab::{
    Agent, Host, Kind, Net, Server, Shape, Workload, assert_same_data, fill_every_type, require, scratch,
};
use remora_protocol::{Join, Message, Offer, Phase, Progress, Relaying, Relays, TableOffer};
use remora_table::{Geometry, Identity, Origin, SealKey, SnapshotSealer, SnapshotWriter};

const MIB: u64 = 1 << 20;

/// Over TCP, as if the hosts were far apart: on one host no replica needs a relay.
const FAR: [&str; 2] = ["--transport", "tcp"];

/// Limit on the bytes that leave the source, in hundredths of the data set.
const ONCE: u64 = 115;

fn servers(kind: Kind, count: usize) -> Vec<Server> {
    (0..count).map(|_| Server::start(kind).unwrap()).collect()
}

/// A primary with this many values of 1 MiB, whose snapshots begin after this many seconds.
fn loaded(kind: Kind, delay: u64, values: u64) -> Server {
    let primary = primary(kind).config("repl-diskless-sync-delay", delay).start().unwrap();
    load(&primary, values, MIB);
    primary
}

fn served(source: &Source) -> u64 {
    source.status()["totals"]["bytes_served"].as_u64().unwrap()
}

fn snapshot_bytes(source: &Source) -> u64 {
    source.status()["generation"]["snapshot_bytes"].as_u64().unwrap()
}

/// Asserts that one data set has left the source, plus lines and entries.
#[track_caller]
fn assert_once(source: &Source, before: u64) {
    assert_once_beside(source, before, 0);
}

/// As [`assert_once`], where replicas have read at most so many bytes of the stream from the source: on a busy machine
/// a sync takes longer, and more is written meanwhile.
#[track_caller]
fn assert_once_beside(source: &Source, before: u64, stream: u64) {
    let (sent, set) = (served(source) - before, snapshot_bytes(source));
    assert!(sent * 100 <= set * ONCE + stream * 100, "{sent} bytes left the source for a snapshot of {set}");
    assert!(sent >= set, "{sent} bytes for a snapshot of {set}: too few for one replica");
    println!("{sent} bytes left the source for a snapshot of {set}");
}

/// With slots of 128 KiB, so that a small data set has many of them.
fn source(primary: &Server) -> Source {
    Source::start(primary, &["--memory", "128MiB", "--slot-size", "128KiB"])
}

/// One replica in the output of `remora status`.
fn replica<'s>(status: &'s Value, name: &str) -> Option<&'s Value> {
    status["replicas"].as_array()?.iter().find(|replica| replica["name"] == name)
}

/// Waits until this replica, which must still run, holds `slots` slots.
fn wait_for_slots(source: &Source, name: &str, slots: u64) {
    source.wait_for_status("a replica to hold some slots", |status| {
        replica(status, name).is_some_and(|replica| replica["slots_held"].as_u64() >= Some(slots))
    });
}

#[test]
fn four_replicas_under_load_are_exact_and_one_copy_leaves_the_source() {
    for kind in require::kinds() {
        // The snapshot begins when all replicas have joined, however long that takes.
        let primary = primary(kind).config("repl-diskless-sync-delay", 3600).start().unwrap();
        fill_every_type(&mut primary.client().unwrap(), 7).unwrap();
        load(&primary, 24, MIB);
        let (servers, source) = (servers(kind, 4), source(&primary));
        let writer = Workload::start(
            primary.client().unwrap(),
            // Small values only: each replica also fetches the stream from the source, and that is counted too.
            remora_lab::workload::Options {
                big_bytes: 0,
                ..remora_lab::workload::Options::seeded(remora_lab::random::seed("workload")).rate(500)
            },
        )
        .unwrap();
        let mut agents: Vec<Agent> = servers.iter().map(|server| source.replica(server, &FAR)).collect();
        source.wait_for_status("all replicas to have joined", |status| {
            status["replicas"].as_array().is_some_and(|replicas| replicas.len() == 4)
        });
        let began = number(&primary, "master_repl_offset");
        primary.configure("repl-diskless-sync-delay", "0").unwrap();
        for agent in &mut agents {
            agent.wait_for_success(LONG).unwrap();
        }
        let streamed = number(&primary, "master_repl_offset") - began;
        writer.stop().unwrap();
        assert_once_beside(&source, 0, streamed * servers.len() as u64);
        assert_eq!(syncs(&primary), (1, 4), "one snapshot, and four partial resynchronisations");
        for server in &servers {
            assert_same_data(&primary, server);
        }
        let relayed = agents.iter().filter(|agent| agent.output().contains("reading slots from another replica"));
        assert_eq!(relayed.count(), 3);
    }
}

#[test]
#[ignore = "long: make test-all"]
fn a_relay_killed_in_the_middle_costs_its_reader_only_the_slots_in_transit() {
    at_once(require::kinds(), a_relay_is_killed);
}

fn a_relay_is_killed(kind: Kind) {
    let primary = loaded(kind, 1, 24);
    let (servers, source) = (servers(kind, 3), source(&primary));
    // One after the other, so that the chain has this order.
    let mut agents = ["first", "second", "third"].into_iter().zip(&servers).map(|(name, server)| {
        let agent = source.replica(server, &[&FAR[..], &["--name", name, "--download-limit", "8MiB"]].concat());
        wait_for_slots(&source, name, 8);
        agent
    });
    let (mut first, mut second, mut third) = (agents.next().unwrap(), agents.next().unwrap(), agents.next().unwrap());
    second.kill().unwrap();
    third.wait_for_event("upstream_left", LONG).unwrap();
    for agent in [&mut first, &mut third] {
        agent.wait_for_success(LONG).unwrap();
    }
    // The third continues with the first: the source has sent each slot once, except for those it was asked for
    // meanwhile.
    assert_once(&source, 0);
    for server in [&servers[0], &servers[2]] {
        assert_same_data(&primary, server);
    }
    source.replicate(&servers[1], &[&FAR[..], &["--replace"]].concat());
    assert_same_data(&primary, &servers[1]);
    assert_eq!(syncs(&primary).0, 1);
}

#[test]
#[ignore = "long: make test-all"]
fn a_late_joiner_reads_from_a_peer_that_lends_until_the_last_slot() {
    at_once(require::kinds(), a_peer_lends_to_the_end);
}

fn a_peer_lends_to_the_end(kind: Kind) {
    let primary = primary(kind).start().unwrap();
    load(&primary, 24, MIB);
    let (servers, source) = (servers(kind, 2), source(&primary));
    let mut first = source.replica(&servers[0], &[&FAR[..], &["--name", "first", "--stay"]].concat());
    first.wait_for_event("in_step", LONG).unwrap();
    let before = served(&source);
    let limited = ["--name", "late", "--download-limit", "4MiB"];
    let mut late = source.replica(&servers[1], &[&FAR[..], &limited].concat());
    wait_for_slots(&source, "late", 20);
    // The first is handed over, and continues only for the one that reads from it.
    first.signal(Signal::TERM).unwrap();
    first.wait_for_line("1 replica reads slots from here still", LONG).unwrap();
    late.wait_for_success(LONG).unwrap();
    first.wait_for_success(LONG).unwrap();
    let sent = served(&source) - before;
    assert!(sent * 10 < snapshot_bytes(&source), "{sent} bytes from the source for a late joiner");
    for server in &servers {
        assert_same_data(&primary, server);
    }
}

#[test]
#[ignore = "long: make test-all"]
fn reader_and_lender_keep_the_limits_and_the_status_draws_the_chain() {
    let limits = require::kinds().into_iter().zip(["--upload-limit-per-peer", "--upload-limit"]);
    at_once(limits, |(kind, limit)| keeps_the_limit(kind, limit));
}

fn keeps_the_limit(kind: Kind, limit: &str) {
    let primary = loaded(kind, 1, 12);
    let (servers, source) = (servers(kind, 2), source(&primary));
    let head = ["--name", "head", "--zone", "east", limit, "4MiB", "--stay"];
    let mut first = source.replica(&servers[0], &[&FAR[..], &head].concat());
    first.wait_for_event("in_step", LONG).unwrap();
    let began = Instant::now();
    let mut second = source.replica(&servers[1], &[&FAR[..], &["--name", "tail", "--no-serve-peers"]].concat());
    let status = source.wait_for_status("the tail to read from the head", |status| {
        let of = |name: &str, field: &str| replica(status, name).map(|replica| replica[field].clone());
        of("tail", "reads_from").is_some_and(|from| !from.is_null() && Some(from) == of("head", "session"))
    });
    assert_eq!(replica(&status, "head").unwrap()["zone"], "east");
    assert_eq!(replica(&status, "tail").unwrap()["serves"], false);
    let drawn = source.drawn_status();
    assert!(drawn.contains("└─ head") && drawn.contains("   └─ tail"), "{drawn}");
    second.wait_for_success(LONG).unwrap();
    let (took, fair) = (began.elapsed(), Duration::from_secs_f64(12.0 / 4.0));
    assert!(took >= fair.mul_f64(0.9), "{took:?} at a limit that allows {fair:?}");
    assert_once(&source, 0);
    first.signal(Signal::TERM).unwrap();
    first.wait_for_success(LONG).unwrap();
    for server in &servers {
        assert_same_data(&primary, server);
    }
}

#[test]
#[ignore = "long: make test-all"]
fn a_relay_that_has_done_its_work_lingers_no_longer_than_told() {
    at_once(require::kinds(), a_relay_lingers);
}

fn a_relay_lingers(kind: Kind) {
    let primary = primary(kind).start().unwrap();
    load(&primary, 24, MIB);
    let (servers, source) = (servers(kind, 2), source(&primary));
    let brief = ["--name", "first", "--stay", "--linger", "1s"];
    let mut first = source.replica(&servers[0], &[&FAR[..], &brief].concat());
    let link = link_of(&mut first);
    first.wait_for_event("in_step", LONG).unwrap();
    assert!(std::net::TcpStream::connect(link).is_ok(), "the server may come again");
    // Takes six seconds, so the first replica ends in the middle.
    let mut late = source.replica(&servers[1], &[&FAR[..], &["--name", "late", "--download-limit", "4MiB"]].concat());
    wait_for_slots(&source, "late", 20);
    first.signal(Signal::TERM).unwrap();
    first.wait_for_line("1 replica reads slots from here still", LONG).unwrap();
    let began = Instant::now();
    // The server is done with the link.
    assert_eq!(std::net::TcpStream::connect(link).unwrap_err().kind(), ErrorKind::ConnectionRefused);
    assert_eq!(servers[0].fact("master_port").unwrap(), primary.port().to_string());
    let cpu = first.cpu_seconds().unwrap();
    std::thread::sleep(Duration::from_millis(500));
    let cpu = first.cpu_seconds().unwrap() - cpu;
    assert!(cpu < 0.25, "{cpu} s of processor time in half a second of lending 2 MiB");
    assert!(first.ended().unwrap().is_none(), "it was to lend for a second");
    first.wait_for_success(LONG).unwrap();
    let lingered = began.elapsed();
    assert!(late.ended().unwrap().is_none(), "the reader was done before its relay ended: {lingered:?}");
    assert!(lingered >= Duration::from_millis(500), "{lingered:?}");
    late.wait_for_success(LONG).unwrap();
    for server in &servers {
        assert_same_data(&primary, server);
    }
}

#[test]
#[ignore = "long: make test-all"]
fn a_stranger_at_a_relays_port_gets_no_slot_and_changes_nothing() {
    require::kinds().into_iter().for_each(a_stranger_comes);
}

fn a_stranger_comes(kind: Kind) {
    let primary = primary(kind).start().unwrap();
    load(&primary, 8, MIB);
    let (servers, source) = (servers(kind, 2), source(&primary));
    let mut first = source.replica(&servers[0], &[&FAR[..], &["--name", "first", "--stay"]].concat());
    let line = first.wait_for_event("serving", LONG).unwrap();
    let door = line.split("listening=").nth(1).and_then(|rest| rest.split(' ').next()).unwrap();
    first.wait_for_event("in_step", LONG).unwrap();
    has_no_success(door.parse().unwrap(), source.generation());
    // The relay still lends to a replica that has the token.
    let before = served(&source);
    source.replicate(&servers[1], &FAR);
    assert!((served(&source) - before) * 10 < snapshot_bytes(&source), "the relay does not lend any more");
    first.signal(Signal::TERM).unwrap();
    first.wait_for_success(LONG).unwrap();
    for server in &servers {
        assert_same_data(&primary, server);
    }
}

#[test]
#[ignore = "long: make test-all"]
fn a_replica_that_lends_nothing_leaves_a_slow_peer_for_the_source() {
    at_once(require::kinds(), a_peer_is_slow);
}

fn a_peer_is_slow(kind: Kind) {
    let primary = loaded(kind, 0, 48);
    let (servers, source) = (servers(kind, 2), source(&primary));
    let mut slow = source.replica(&servers[0], &[&FAR[..], &["--name", "slow", "--download-limit", "1MiB"]].concat());
    wait_for_slots(&source, "slow", 4);
    let mut fast = source.replica(&servers[1], &[&FAR[..], &["--no-serve-peers"]].concat());
    fast.wait_for_success(LONG).unwrap();
    assert!(fast.output().contains("reading slots from another replica"));
    // It takes 48 s, and so would a reader that stays with it.
    assert!(slow.ended().unwrap().is_none(), "the fast one has waited for the slow one: {}", fast.output());
    assert_same_data(&primary, &servers[1]);
}

#[test]
#[ignore = "long: make test-all"]
fn replicas_that_do_not_lend_all_read_from_the_source() {
    let Some(kind) = require::valkey() else { return };
    let primary = primary(kind).start().unwrap();
    load(&primary, 8, MIB);
    let (servers, source) = (servers(kind, 2), source(&primary));
    let mut agents: Vec<Agent> =
        servers.iter().map(|server| source.replica(server, &[&FAR[..], &["--no-serve-peers"]].concat())).collect();
    for agent in &mut agents {
        agent.wait_for_success(LONG).unwrap();
        assert!(!agent.output().contains("serving slots"));
    }
    assert!(served(&source) >= 2 * snapshot_bytes(&source));
    for server in &servers {
        assert_same_data(&primary, server);
    }
}

/// The data set is three times the source's window: a slot stays there until every replica has it, from any peer.
#[test]
#[ignore = "long: make test-all"]
fn replicas_feed_each_other_what_passes_through_a_window_at_the_source() {
    let Some(kind) = require::valkey() else { return };
    let primary = loaded(kind, 1, 96);
    let source = Source::start(&primary, &["--memory", "40MiB", "--slot-size", "1MiB"]);
    let servers = servers(kind, 3);
    let before = served(&source);
    let mut agents: Vec<Agent> = servers.iter().map(|server| source.replica(server, &FAR)).collect();
    for agent in &mut agents {
        agent.wait_for_success(LONG).unwrap();
    }
    assert!(source.status()["generation"]["windowed"].as_bool().unwrap(), "the snapshot is not windowed");
    assert_eq!(source.snapshots_taken(), 1);
    assert_once(&source, before);
    for server in &servers {
        assert_same_data(&primary, server);
    }
}

/// The replica that lends from a window ends: the slots that its reader lacks are still in the window.
#[test]
#[ignore = "long: make test-all"]
fn a_relay_of_a_window_that_is_killed_costs_its_reader_only_slots_in_transit() {
    at_once(require::kinds(), a_relay_of_a_window_is_killed);
}

fn a_relay_of_a_window_is_killed(kind: Kind) {
    let primary = loaded(kind, 1, 96);
    let source = Source::start(&primary, &["--memory", "40MiB", "--slot-size", "256KiB"]);
    let servers = servers(kind, 2);
    // Both read slowly enough for the test to find out which of them lends.
    let slowly = [&FAR[..], &["--download-limit", "20MiB"]].concat();
    let mut agents: Vec<Agent> = ["one", "two"]
        .iter()
        .zip(&servers)
        .map(|(name, server)| source.replica(server, &[&slowly[..], &["--name", name]].concat()))
        .collect();
    wait_for_slots(&source, "one", 40);
    wait_for_slots(&source, "two", 40);
    // The first slots are given up a moment after both have them.
    source.wait_for_status("the snapshot to be windowed", |status| status["generation"]["windowed"] == true);
    let status = source.status();
    let lends = |name| replica(&status, name).unwrap()["reads_from"].is_null();
    let (lender, reader) = if lends("one") { (0, 1) } else { (1, 0) };
    assert!(!lends(["one", "two"][reader]), "no replica lends: {status}");
    let held = |name| replica(&status, name).unwrap()["slots_held"].as_u64().unwrap();
    let (before, held) = (served(&source), held(["one", "two"][reader]));
    agents[lender].signal(Signal::KILL).unwrap();
    agents[reader].wait_for_success(LONG).unwrap();
    assert_eq!(source.snapshots_taken(), 1);
    assert_same_data(&primary, &servers[reader]);
    // The source sends the reader what it lacked when the lender was killed, and no slot that the reader had.
    let lacked = snapshot_bytes(&source) - held * (256 << 10);
    let sent = served(&source) - before;
    assert!(sent * 100 <= lacked * ONCE, "{sent} bytes for a reader that lacked {lacked}");
}

#[test]
#[ignore = "long: make test-all"]
fn a_small_relay_lends_a_window_and_its_reader_still_gets_all() {
    let Some(kind) = require::valkey() else { return };
    let primary = loaded(kind, 1, 48);
    let (servers, source) = (servers(kind, 3), source(&primary));
    let mut agents: Vec<Agent> =
        servers.iter().map(|server| source.replica(server, &[&FAR[..], &["--memory", "16MiB"]].concat())).collect();
    for agent in &mut agents {
        agent.wait_for_success(LONG).unwrap();
    }
    for server in &servers {
        assert_same_data(&primary, server);
    }
    let relayed = agents.iter().filter(|agent| agent.output().contains("reading slots from another replica")).count();
    let (sent, set) = (served(&source), snapshot_bytes(&source));
    println!("{relayed} read from another replica; {sent} bytes left the source for a snapshot of {set}");
    assert!(relayed >= 1, "no replica has read from another one");
    assert!(sent < set * 2, "{sent} bytes left the source for three replicas of a snapshot of {set}: little was lent");
}

#[test]
fn a_peer_with_wrong_bytes_is_dropped_and_named_and_none_of_them_arrives() {
    require::kinds().into_iter().for_each(|kind| is_dropped_and_named(kind, None));
}

/// The peer has the key of the sealed table, and seals other bytes with it.
#[test]
#[ignore = "long: make test-all"]
fn a_peer_that_seals_wrong_bytes_is_dropped_and_named_and_none_of_them_arrives() {
    require::kinds().into_iter().for_each(|kind| is_dropped_and_named(kind, Some(Mode::Token)));
}

/// A lender has the token, but does not choose to which hosts and ports its readers connect.
#[test]
fn a_lender_cannot_have_its_readers_connect_elsewhere() {
    for kind in require::kinds() {
        let primary = primary(kind).start().unwrap();
        load(&primary, 8, MIB);
        let source = Source::start(&primary, &["--memory", "128MiB", "--slot-size", "128KiB"]);
        let trap = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        trap.set_nonblocking(true).unwrap();
        let leads_to = trap.local_addr().ok();
        let liar = Liar::start_with(source.address, source.token(), Security::new(None, false), leads_to);
        let server = Server::start(kind).unwrap();
        let mut reader = source.replica(&server, &[&FAR[..], &["--name", "reader"]].concat());
        let said = reader.wait_for_event("upstream_left", LONG).unwrap();
        assert!(said.contains("liar") && said.contains("it leads to another address"), "{said}");
        reader.wait_for_success(LONG).unwrap();
        assert_same_data(&primary, &server);
        assert_eq!(liar.readers(), 1);
        assert_eq!(trap.accept().unwrap_err().kind(), ErrorKind::WouldBlock);
    }
}

fn is_dropped_and_named(kind: Kind, mode: Option<Mode>) {
    let primary = primary(kind).start().unwrap();
    load(&primary, 8, MIB);
    let secured: &[&str] = if mode.is_some() { &["--security", "token"] } else { &[] };
    let far = &[&FAR[..], secured].concat();
    let source = Source::start(&primary, &[&["--memory", "128MiB", "--slot-size", "128KiB"], secured].concat());
    let liar = Liar::start(source.address, source.token(), Security::new(mode, false));
    let server = Server::start(kind).unwrap();
    let mut honest = source.replica(&server, &[&far[..], &["--name", "honest"]].concat());
    let said = honest.wait_for_line("bytes that are not the source's", LONG).unwrap();
    assert!(said.contains("liar") && said.contains("checksum"), "{said}");
    honest.wait_for_success(LONG).unwrap();
    assert_same_data(&primary, &server);
    // It left the liar at once: its own report was enough for that.
    assert_eq!(liar.readers(), 1);
    let named = source.agent.output();
    assert!(named.contains("lent slots that differ from the source's") && named.contains("liar"), "{named}");
    assert!(!named.contains("no other replica will read from it"), "one report banned a replica: {named}");

    // One report may be false, so the next replica is still sent there. Its report is the second one.
    let next = Server::start(kind).unwrap();
    let second = source.replicate(&next, &[&far[..], &["--name", "second"]].concat());
    assert!(second.output().contains("bytes that are not the source's"), "{}", second.output());
    assert_same_data(&primary, &next);
    assert_eq!(liar.readers(), 2);
    let named = source.agent.output();
    assert!(named.contains("no other replica will read from it"), "{named}");

    // The source assigns it to no reader any more.
    let another = Server::start(kind).unwrap();
    let later = source.replicate(&another, far);
    assert!(!later.output().contains("liar"), "{}", later.output());
    assert_same_data(&primary, &another);
    assert_eq!(liar.readers(), 2);
    assert!(liar.readers() > 0, "no replica has read from it");
}

// Relays over cables of a known rate, which is their purpose. Needs root, for network namespaces.

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
    assert!(sent * 100 <= ((MEBIBYTES as u64) << 20) * ONCE, "{sent} bytes left the source");
    for (_, server) in &sites {
        assert_same_data(&primary, server);
    }
}

/// Rate of the lender's cable once it slows down, in bytes per second. Its messages still pass, and the rest of its own
/// copy takes a minute at least.
const SLOW_CABLE: u64 = CABLE / 60;

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
            replica(status, name).is_some_and(|at| at["slots_held"].as_u64() >= Some(slots))
        });
        (agent, status)
    };
    let (mut lending, _) = start(&lender, "lender", SLOTS_BEFORE[0]);
    let (mut reading, status) = start(&reader, "reader", SLOTS_BEFORE[1]);
    let of = |name: &str, field: &str| replica(&status, name).unwrap()[field].clone();
    assert_eq!(of("reader", "reads_from"), of("lender", "session"), "{status}");
    lender.0.shape(Shape::rate(SLOW_CABLE)).unwrap();
    let began = Instant::now();
    succeeds(&mut reading, &reader.1);
    let took = began.elapsed();
    println!("{took:?} after the lender slowed down");
    // Behind it the reader would be done when it is, after another minute.
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

// Agents that attend servers on hosts of their own lend slots to each other, also when their servers have gone on.

/// A primary behind a cable, with its source.
struct Scene {
    stage: Stage,
    net: Net,
    kind: Kind,
    primary: Server,
    source: Source,
}

impl Scene {
    fn new(kind: Kind) -> Scene {
        let net = Net::new().unwrap();
        let host = net.host("primary").unwrap();
        let primary = quick(kind).config("repl-backlog-size", "256mb").on(&host).start().unwrap();
        fill(&primary, MEBIBYTES, 1);
        host.shape(Shape::rate(CABLE)).unwrap();
        let stage = Stage::new();
        let mut source = stage.source_on(&host, &primary.url(), &["--eager"]);
        source.wait_for_snapshot();
        Scene { stage, net, kind, primary, source }
    }

    /// A host with an empty server, and rules for its connections.
    fn site(&self, name: &str) -> (Host, Server) {
        let host = self.net.host(name).unwrap();
        host.shape(Shape::rate(CABLE)).unwrap();
        let server = quick(self.kind).as_user(SERVER_USER).on(&host).start().unwrap();
        let rules = ["intercept", "add", "--server-uid", &SERVER_USER.to_string(), "--agent-uid", "0"];
        self.stage.start(Some(&host), &rules).wait_for_success(LONG).unwrap();
        (host, server)
    }

    fn attend(&self, (host, server): &(Host, Server), more: &[&str]) -> Agent {
        let (url, source, port) = (server.url(), self.source.address.to_string(), self.primary.port().to_string());
        let token = self.stage.token.display().to_string();
        let args = ["attend", "--server", &url, "--source", &source, "--token-file", &token, "--listen-port", PORT];
        let args = [&args[..], &["--primary-port", &port, "--name", host.name()], more].concat();
        let mut agent = self.stage.start(Some(host), &args);
        agent.wait_for_event("attending", LONG).unwrap();
        agent
    }

    /// Waits until the second reads slots from the first.
    fn wait_until_it_reads_from(&self, reader: &str, lender: &str) {
        self.source.wait_for_status("a replica to read from another one", |status| {
            let of = |name: &str| replica(status, name);
            match (of(reader), of(lender)) {
                (Some(reader), Some(lender)) => reader["reads_from"] == lender["session"],
                _ => false,
            }
        });
    }
}

#[test]
#[ignore = "long: make test-all"]
fn servers_that_lose_their_data_at_once_take_about_one_copy_out_of_the_primarys_host() {
    let Some(()) = require::namespaces() else { return };
    for kind in require::kinds() {
        let scene = Scene::new(kind);
        let sites: Vec<(Host, Server)> = (0..REPLICAS).map(|number| scene.site(&format!("replica {number}"))).collect();
        let agents: Vec<Agent> = sites.iter().map(|site| scene.attend(site, &[])).collect();
        let before = scene.source.bytes_served();
        for (_, server) in &sites {
            server.replicate(&scene.primary).unwrap();
        }
        for (agent, (_, server)) in agents.iter().zip(&sites) {
            handed_over(agent, server, 1);
        }
        let sent = scene.source.bytes_served() - before;
        println!("{kind}: {sent} bytes from the source for {REPLICAS} replicas");
        // On a busy machine some of them read from the source for a while before another one has anything to give.
        assert!(sent < 2 * ((MEBIBYTES as u64) << 20), "{sent} bytes left the source");
        assert_eq!(syncs(&scene.primary), (1, REPLICAS as u64), "the source's, and the hand-offs");
        for (_, server) in &sites {
            assert_same_data(&scene.primary, server);
        }
    }
}

/// What becomes of a lender whose server has gone on.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Then {
    /// Its server needs another full copy.
    AnotherCopy,
    /// It is stopped.
    Stopped,
}

#[test]
#[ignore = "long: make test-all"]
fn a_lender_goes_on_when_its_server_has_and_its_next_sync_or_a_signal_ends_that() {
    let Some(()) = require::namespaces() else { return };
    for (kind, then) in require::kinds().into_iter().flat_map(|kind| [(kind, Then::AnotherCopy), (kind, Then::Stopped)])
    {
        let scene = Scene::new(kind);
        let (lender, reader) = (scene.site("lender"), scene.site("reader"));
        let mut lending = scene.attend(&lender, &[]);
        load_slowly(&lender.1, 20_000);
        lender.1.replicate(&scene.primary).unwrap();
        wait_for_slots(&scene.source, "lender", 16);
        let reading = scene.attend(&reader, &["--download-limit", "2MiB"]);
        reader.1.replicate(&scene.primary).unwrap();
        scene.wait_until_it_reads_from("reader", "lender");
        load_slowly(&lender.1, 0);
        // Its server is on its own, and its new connections come to the agent again, while the reader still reads.
        lending.wait_for_line("replica reads slots from here still", LONG).unwrap();
        handed_over(&lending, &lender.1, 1);
        scene.wait_until_it_reads_from("reader", "lender");
        match then {
            Then::AnotherCopy => {
                let mut client = lender.1.client().unwrap();
                client.ok(&["REPLICAOF", "NO", "ONE"]).unwrap();
                client.ok(&["FLUSHALL"]).unwrap();
                lender.1.replicate(&scene.primary).unwrap();
                handed_over(&lending, &lender.1, 2);
            }
            Then::Stopped => {
                lending.signal(Signal::TERM).unwrap();
                ends(&mut lending, 0);
            }
        }
        handed_over(&reading, &reader.1, 1);
        assert_eq!(syncs(&scene.primary).0, 1, "{kind}, {then:?}: the source's alone\n{}", lending.output());
        for (_, server) in [&lender, &reader] {
            assert_same_data(&scene.primary, server);
        }
    }
}

/// The arguments of a fetch that shows itself under this name.
fn fetch(scene: &Scene, name: &str, to: &str) -> Vec<String> {
    let (source, token) = (scene.source.address.to_string(), scene.stage.token.display().to_string());
    ["fetch", "--source", &source, "--token-file", &token, "--to", to, "--name", name].map(str::to_owned).to_vec()
}

#[test]
#[ignore = "long: make test-all"]
fn a_file_is_read_from_an_agent_that_attends_and_lent_while_it_arrives() {
    let Some(()) = require::namespaces() else { return };
    for kind in require::kinds() {
        let scene = Scene::new(kind);
        let before = scene.source.bytes_served();
        let (lender, reader) = (scene.site("lender"), scene.site("reader"));
        let host = scene.net.host("file").unwrap();
        host.shape(Shape::rate(CABLE)).unwrap();
        let lending = scene.attend(&lender, &[]);
        load_slowly(&lender.1, 20_000);
        lender.1.replicate(&scene.primary).unwrap();
        wait_for_slots(&scene.source, "lender", 16);
        let to = scene.stage.path("dump.rdb");
        let limited = ["--download-limit".to_owned(), "4MiB".to_owned()];
        let args = [fetch(&scene, "file", &to), limited.to_vec()].concat();
        let mut fetching = scene.stage.start(Some(&host), &args.iter().map(String::as_str).collect::<Vec<_>>());
        scene.wait_until_it_reads_from("file", "lender");
        // The chain's third: it reads what the file's command has got, and goes on elsewhere when that has ended.
        let reading = scene.attend(&reader, &[]);
        reader.1.replicate(&scene.primary).unwrap();
        scene.wait_until_it_reads_from("reader", "file");
        fetching.wait_for_success(LONG).unwrap();
        load_slowly(&lender.1, 0);
        handed_over(&lending, &lender.1, 1);
        handed_over(&reading, &reader.1, 1);
        let sent = scene.source.bytes_served() - before;
        assert!(sent * 100 <= ((MEBIBYTES as u64) << 20) * ONCE, "{kind}: {sent} bytes left the source");
        assert_eq!(syncs(&scene.primary).0, 1, "{kind}: the source's alone");
        for (_, server) in [&lender, &reader] {
            assert_same_data(&scene.primary, server);
        }
        let loaded = quick(kind).config("dir", scene.stage.folder().display()).start().unwrap();
        assert_eq!(loaded.digest().unwrap(), scene.primary.digest().unwrap(), "{kind}: {}", fetching.output());
    }
}

#[test]
#[ignore = "long: make test-all"]
fn a_replica_agent_reads_from_one_that_attends() {
    let (Some(kind), Some(())) = (require::redis(), require::namespaces()) else { return };
    let scene = Scene::new(kind);
    let (lender, reader) = (scene.site("lender"), scene.site("reader"));
    let lending = scene.attend(&lender, &["--peer-listen", &format!("{}:7390", lender.0.address())]);
    load_slowly(&lender.1, 20_000);
    lender.1.replicate(&scene.primary).unwrap();
    wait_for_slots(&scene.source, "lender", 16);
    let more = ["--name", "reader", "--download-limit", "4MiB"];
    let mut reading = scene.stage.replica_on(&reader.0, &reader.1.url(), scene.source.address, &more);
    scene.wait_until_it_reads_from("reader", "lender");
    load_slowly(&lender.1, 0);
    succeeds(&mut reading, &reader.1);
    assert!(reading.output().contains(&format!("address={}:7390", lender.0.address())), "{}", reading.output());
    handed_over(&lending, &lender.1, 1);
    for (_, server) in [&lender, &reader] {
        assert_same_data(&scene.primary, server);
    }
}

// A replica that joins with the right token, claims to hold the whole snapshot, and lends a table that is valid in
// itself, but all of its bytes are invented. If the source's table is sealed, it seals them with the same key, which it
// has from its offer.

/// A running liar. It ends when dropped.
pub(crate) struct Liar {
    readers: Arc<AtomicUsize>,
    _runtime: Runtime,
}

/// What the liar lends, and the number of its readers.
struct Lie {
    id: RegionId,
    offer: TableOffer,
    exporter: Arc<TcpExporter>,
    token: Arc<Token>,
    readers: Arc<AtomicUsize>,
    security: Security,
}

impl Liar {
    /// Joins the source, and returns when it has received the offer and lends its own table.
    pub(crate) fn start(source: SocketAddr, token: &Path, security: Security) -> Liar {
        Liar::start_with(source, token, security, None)
    }

    /// The same, where the offer's key leads readers to that address.
    pub(crate) fn start_with(source: SocketAddr, token: &Path, security: Security, trap: Option<SocketAddr>) -> Liar {
        let runtime = Runtime::new().unwrap();
        let (source, token) = (source.to_string(), Arc::new(Token::read_file(token).unwrap()));
        let readers = Arc::new(AtomicUsize::new(0));
        let counted = readers.clone();
        runtime.block_on(async move {
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let address = listener.local_addr().unwrap();
            let (connection, offer) = join(&source, &token, address, security.clone()).await;
            let mut lie = make(&offer, address, token, counted, security);
            if let Some(trap) = trap {
                lie.lead_to(trap);
            }
            tokio::spawn(listen(listener, Arc::new(lie)));
            boast(connection, offer.generation).await;
        });
        Liar { readers, _runtime: runtime }
    }

    /// How many connections have asked to read from it.
    pub(crate) fn readers(&self) -> usize {
        self.readers.load(Relaxed)
    }
}

impl Lie {
    /// Offers a key that names this address.
    fn lead_to(&mut self, address: SocketAddr) {
        let elsewhere = TcpExporter::new(TcpOptions::default(), Some(address)).unwrap();
        let memory = Geometry { slot_size: self.offer.slot_size, slots: self.offer.slots }.memory_len();
        elsewhere.export(self.id, Arc::new(Memory::create("trap", memory, Pages::Small).unwrap())).unwrap();
        self.offer.keys = vec![elsewhere.key(self.id).unwrap().as_bytes().to_vec()];
    }
}

async fn join(source: &str, token: &Token, address: SocketAddr, security: Security) -> (Connection, Offer) {
    let options = Options::secured(security);
    let mut connection = remora_agent::conversation::connect(source, token, &options).await.unwrap();
    let join = Join {
        name: "liar".into(),
        server: "Valkey 9.1".into(),
        resume: None,
        plan_only: false,
        zone: String::new(),
        relays: Some(Relays { serves_at: address.to_string() }),
    };
    connection.send(Message::Join(join)).await.unwrap();
    loop {
        if let Message::Offer(offer) = connection.receive().await.unwrap() {
            return (connection, offer);
        }
    }
}

/// A complete table with the source's identity and other bytes.
fn make(offer: &Offer, address: SocketAddr, token: Arc<Token>, readers: Arc<AtomicUsize>, security: Security) -> Lie {
    let TableOffer { generation, first_offset, slot_size, slots, seal, .. } = offer.snapshot.clone();
    let geometry = Geometry { slot_size, slots };
    let memory = || Arc::new(Memory::create("liar", geometry.memory_len(), Pages::Small).unwrap());
    let origin = Origin { generation, history: offer.replid.unwrap(), offset: first_offset };
    let identity = Identity { kind: remora_table::Kind::Snapshot, origin };
    let plain = memory();
    let mut writer = SnapshotWriter::create(plain.clone(), geometry, identity.clone(), 0).unwrap();
    writer.append(&vec![0x5a; 16 << 20]).unwrap();
    let mut lent = plain.clone();
    assert_eq!(seal.is_empty(), !security.seals_tables(Ipv4Addr::LOCALHOST.into()));
    let key = (!seal.is_empty()).then(|| SealKey::from_bytes(&seal).unwrap());
    if key.is_some() || offer.snapshot.compressed {
        lent = memory();
        let sealer = match (&key, offer.snapshot.compressed) {
            (Some(key), false) => SnapshotSealer::create(plain, lent.clone(), geometry, identity, key),
            _ => SnapshotSealer::create_compressed(plain, lent.clone(), geometry, identity, key.as_ref()),
        };
        let mut sealer = sealer.unwrap();
        while sealer.pump().unwrap() {}
    }
    let exporter = Arc::new(TcpExporter::new(TcpOptions::default(), Some(address)).unwrap());
    let id = RegionId { generation, region: 99 };
    exporter.export(id, lent).unwrap();
    let keys = vec![exporter.key(id).unwrap().as_bytes().to_vec()];
    let (seal, compressed) = (Vec::new(), false);
    let offer = TableOffer { generation, first_offset, slot_size, slots, retained: true, keys, seal, compressed };
    Lie { id, offer, exporter, token, readers, security }
}

/// Claims more slots than any other replica, and keeps running.
async fn boast(mut connection: Connection, generation: u64) {
    let progress = Progress {
        generation,
        phase: Phase::Stay,
        transport: Some(3),
        transport_why: String::new(),
        no_fast_keys: String::new(),
        slots_below: u64::MAX,
        slots_held: 128,
        bytes: 16 << 20,
        applied_offset: 0,
        relaying: Some(Relaying { reads_from: None, oldest: 0, held: 128, is_full: false }),
    };
    connection.send(Message::Progress(progress.clone())).await.unwrap();
    // Repeated, because a silent replica is not assigned to readers.
    tokio::spawn(async move {
        let mut again = tokio::time::interval(Duration::from_millis(500));
        loop {
            tokio::select! {
                heard = connection.receive() => if heard.is_err() { return },
                _ = again.tick() => if connection.send(Message::Progress(progress.clone())).await.is_err() { return },
            }
        }
    });
}

async fn listen(listener: TcpListener, lie: Arc<Lie>) {
    while let Ok((stream, _)) = listener.accept().await {
        tokio::spawn(greet(stream, lie.clone()));
    }
}

async fn greet(stream: TcpStream, lie: Arc<Lie>) {
    let mut word = [0; LANE_MAGIC.len()];
    while stream.peek(&mut word).await.unwrap() < word.len() {}
    if word == LANE_MAGIC {
        let stream = stream.into_std().unwrap();
        stream.set_nonblocking(false).unwrap();
        return lie.exporter.adopt(stream).unwrap();
    }
    let conversations = Endpoint::new(&lie.token, &Options::secured(lie.security.clone())).unwrap();
    let is_tls = lie.security.seals_tables(Ipv4Addr::LOCALHOST.into());
    let mut connection = conversations.accept(stream, is_tls).await.unwrap();
    while let Ok(message) = connection.receive().await {
        if let Message::ReadPeer { generation, .. } = message {
            assert_eq!(generation, lie.id.generation);
            lie.readers.fetch_add(1, Relaxed);
            let secret = derive(&connection.session_key(), b"remora data lanes");
            lie.exporter.grant(connection.session(), secret, Regions::only([lie.id]));
            let offer = Message::PeerOffer { generation, table: lie.offer.clone(), rate: 0 };
            connection.send(offer).await.unwrap();
        }
    }
}

// A process without the token at the port that a relay listens on.

/// Asserts that neither a control connection with another token nor a data lane without a grant is accepted.
pub(crate) fn has_no_success(door: SocketAddr, generation: u64) {
    let folder = scratch::folder("stranger").unwrap();
    let token = Token::read_file(scratch::token_file(folder.path()).unwrap()).unwrap();
    let connected = Runtime::new()
        .unwrap()
        .block_on(async { conversation::connect(&door.to_string(), &token, &Options::default()).await.map(drop) });
    let refused = connected.unwrap_err().to_string();
    assert!(refused.contains("token"), "{refused}");

    // The key of a region is not secret. Any region number: the relay's own, and those that it does not have.
    let connector = TcpConnector::new(TcpOptions::default(), None).unwrap();
    for region in 0..4 {
        let mut address = vec![1, 4];
        address.extend(door.port().to_le_bytes());
        let SocketAddr::V4(host) = door else { panic!("{door} is not an IPv4 address") };
        address.extend(host.ip().octets());
        address.resize(20, 0);
        let id = RegionId { generation, region };
        let key = RegionKey::new(TransportKind::Tcp, id, 4096, &address).unwrap();
        let sink = Arc::new(Memory::create("stranger", 4096, Pages::Small).unwrap());
        for session in 0..3 {
            let refused = connector.connect(&key, session, &[0x5e; 32], sink.clone()).err().unwrap();
            assert!(matches!(refused, Error::Refused(_)), "{refused}");
        }
    }
}
