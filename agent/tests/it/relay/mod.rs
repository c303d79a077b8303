//! Relay: replicas feed each other. The bytes leave the source about once, even if a relay ends or sends wrong data.

mod hosts;
mod liar;

use std::io::ErrorKind;
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

use liar::Liar;
use remora_agent::conversation::{Mode, Security};
use remora_lab::{Agent, Kind, Server, Workload, assert_same_data, fill_every_type, require};
use rustix::process::Signal;
use serde_json::Value;

use crate::kit::{LONG, Source, at_once, load, number, primary, syncs};
use crate::link::link_of;

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

/// As [`assert_once`], where replicas have read at most so many bytes of the stream from the source: on a busy machine a
/// sync takes longer, and more is written meanwhile.
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
    assert!(TcpStream::connect(link).is_ok(), "the server may come again");
    // Takes six seconds, so the first replica ends in the middle.
    let mut late = source.replica(&servers[1], &[&FAR[..], &["--name", "late", "--download-limit", "4MiB"]].concat());
    wait_for_slots(&source, "late", 20);
    first.signal(Signal::TERM).unwrap();
    first.wait_for_line("1 replica reads slots from here still", LONG).unwrap();
    let began = Instant::now();
    // The server is done with the link.
    assert_eq!(TcpStream::connect(link).unwrap_err().kind(), ErrorKind::ConnectionRefused);
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
    liar::has_no_success(door.parse().unwrap(), source.generation());
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
        let trap = TcpListener::bind("127.0.0.1:0").unwrap();
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
