//! What breaks while a replica is made, what it costs, and how the sync ends: connections that break one at a time, loads
//! that fail again and again, memory that is damaged, a journal that overtakes its reader.

use std::net::{IpAddr, Shutdown};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use std::{fs, thread};

use rustix::fs::{FlockOperation, flock};
use rustix::process::Signal;

use crate::kit::{
    BACKLOG, LONG, Source, Stage, Way, at_once, ends, fill, fill_keys, follows, kinds_and_module, load, load_slowly,
    load_small, number, primary, quick, says, succeeds, syncs, wait_until_loading, way_of_loading,
};
use remora_lab::server::{Builder, wait_until};
use remora_lab::workload::Options;
use remora_lab::{
    Address, Agent, Client, Host, Kind, Net, Server, Shape, Workload, assert_same_data, process, require, server,
};

const MIB: u64 = 1 << 20;

/// Bytes of the data set whose connections break.
const DATA: u64 = 24 * MIB;

/// How much may leave the source, in hundredths of the snapshot, if no slot that has arrived leaves it twice: what was in
/// transit when the connection broke, directory entries, the stream. On a busy machine the kernel holds megabytes.
const ONCE: u64 = 145;

/// Slots after which a connection breaks, of 192: if all of them left the source again, more than [`ONCE`] would.
const SLOTS_BEFORE: u64 = 110;

/// The server of a replica, with the module or without.
fn server(kind: Kind, module: bool) -> Builder {
    let builder = Server::builder(kind);
    if module { builder.module("").unwrap() } else { builder }
}

/// A slow transfer by TCP without `--state-dir`, in the middle of which `which` of the agent's connections to the
/// source breaks. Asserts that every slot leaves the source once, and with the module at most twice. Returns the agents'
/// output.
fn one_connection_breaks(kind: Kind, module: bool, which: fn(usize) -> usize) -> [String; 2] {
    let (primary, replica) = (primary(kind).start().unwrap(), server(kind, module).start().unwrap());
    load(&primary, DATA / MIB, MIB);
    let source = Source::start(&primary, &["--memory", "128MiB", "--slot-size", "128KiB"]);
    let mut agent = source.replica(&replica, &["--transport", "tcp", "--no-serve-peers", "--download-limit", "6MiB"]);
    source.wait_for_slots(&mut agent, SLOTS_BEFORE);
    let connections = process::connections(agent.pid(), source.address).unwrap();
    // The control connection is the first; each lane is one more.
    assert!(connections.len() >= 2, "{connections:?}");
    connections[which(connections.len())].shutdown(Shutdown::Both).unwrap();
    drop(connections);
    succeeds(&mut agent, &replica);
    let (sent, set) = (source.bytes_served(), source.status()["generation"]["snapshot_bytes"].as_u64().unwrap());
    // A server with the module loads out of memory that ends with the transfer: it begins again, and so do the slots.
    let most = if module { ONCE + 100 } else { ONCE };
    assert!(sent * 100 <= set * most, "{sent} bytes left the source for a snapshot of {set}: {}", agent.output());
    assert_eq!((source.snapshots_taken(), syncs(&primary)), (1, (1, 1)));
    assert_same_data(&primary, &replica);
    [agent.output(), source.agent.output()]
}

#[test]
#[ignore = "long: make test-all"]
fn a_data_lane_that_breaks_is_opened_again_and_without_the_module_no_slot_is_sent_twice() {
    for (kind, module) in require::kinds().into_iter().zip([false, true]) {
        let [agent, source] = one_connection_breaks(kind, module, |count| count - 1);
        // The session lasts: only the lane is opened again.
        says(&agent, &["trying again in"]);
        says(&source, &["replica joined"]);
    }
}

#[test]
#[ignore = "long: make test-all"]
fn a_control_connection_that_breaks_is_opened_again_and_without_the_module_no_slot_is_sent_twice() {
    for (kind, module) in require::kinds().into_iter().zip([true, false]) {
        let [agent, source] = one_connection_breaks(kind, module, |_| 0);
        says(&agent, &["trying again in"]);
        says(&source, &["replica disconnected"]);
    }
}

#[test]
#[ignore = "long: make test-all"]
fn a_server_whose_load_breaks_three_times_is_reported_and_left_empty() {
    at_once(kinds_and_module(), |(kind, module)| {
        let (primary, replica) = (primary(kind).start().unwrap(), server(kind, module).start().unwrap());
        // Too short for the module: the server loads them itself.
        load_small(&primary, 4000, 100);
        load_slowly(&replica, 1000);
        let source = Source::start(&primary, &["--memory", "64MiB"]);
        let mut agent = source.replica(&replica, &[]);
        let line = agent.wait_for_event("link_listening", LONG).unwrap();
        let link = line.split("link=").nth(1).and_then(|rest| rest.split(' ').next()).unwrap().parse().unwrap();
        wait_until("the agent to end", LONG, || {
            if agent.ended()?.is_some() {
                return Ok(Ok(()));
            }
            if replica.fact("loading")? == "1" {
                for connection in process::connections(replica.pid(), link)? {
                    // It may have been broken already.
                    let _ = connection.shutdown(Shutdown::Both);
                }
            }
            Ok(Err(agent.output()))
        })
        .unwrap();
        let said = ends(&mut agent, 6);
        says(&said, &["broke off loading the snapshot 3 times", "its log says why"]);
        replica.configure("key-load-delay", "0").unwrap();
        assert_eq!((replica.fact("role").unwrap().as_str(), number(&replica, "loading")), ("master", 0), "{said}");
        assert_eq!(replica.client().unwrap().int(&["DBSIZE"]).unwrap(), 0, "{said}");
        // Nothing is left that would hinder the next attempt.
        source.replicate(&replica, &[]);
        assert_same_data(&primary, &replica);
        assert_eq!(source.snapshots_taken(), 1);
    });
}

/// The setting is named before the sync, and when it has made the sync fail.
#[test]
#[ignore = "long: make test-all"]
fn a_server_that_gives_up_a_slow_snapshot_is_named_with_its_setting() {
    at_once(require::kinds(), |kind| {
        let primary = primary(kind).start().unwrap();
        let replica = Server::builder(kind).config("repl-timeout", "2").start().unwrap();
        load_small(&primary, 1500, 2000);
        let slow = ["--slot-size", "1MiB", "--upload-limit", "200KiB", "--no-shm", "--compress", "off"];
        let source = Source::start(&primary, &slow);
        let said = ends(&mut source.replica(&replica, &["--transport", "tcp"]), 6);
        says(&said, &["for 2 s (repl-timeout)", "broke off loading the snapshot 3 times", "raise its repl-timeout"]);
        replica.configure("repl-timeout", "60").unwrap();
        source.replicate(&replica, &["--transport", "tcp"]);
        assert_same_data(&primary, &replica);
    });
}

/// Changes a byte of the source's snapshot behind its back, in the middle of the slots.
fn damage(source: &Agent) {
    let folder = format!("/proc/{}/fd", source.pid());
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let Ok(target) = std::fs::read_link(&path) else { continue };
        if !target.to_string_lossy().contains("memfd:remora-snapshot") {
            continue;
        }
        let file = std::fs::File::options().read(true).write(true).open(&path).unwrap();
        let (mut byte, at) = ([0], 4 * MIB + 12_345);
        file.read_exact_at(&mut byte, at).unwrap();
        file.write_all_at(&[byte[0] ^ 0x40], at).unwrap();
        return;
    }
    panic!("the source has no memory file with a snapshot: {:?}", process::memfds(source.pid()));
}

#[test]
#[ignore = "long: make test-all"]
fn a_damaged_slot_reaches_no_server_over_any_transport() {
    let Some(()) = require::root() else { return };
    at_once(kinds_and_module(), |(kind, module)| {
        for transport in ["shm", "tcp"] {
            let (primary, replica) = (primary(kind).start().unwrap(), server(kind, module).start().unwrap());
            load(&primary, 12, MIB);
            let mut source = Source::start(&primary, &["--memory", "64MiB", "--slot-size", "256KiB", "--eager"]);
            source.wait_for_snapshot();
            damage(&source.agent);
            let mut agent = source.replica(&replica, &["--transport", transport, "--retry-for", "2s"]);
            // The agent names the slot, or its server finds the damage by the checksum of the whole snapshot.
            let damaged = "is damaged: expected checksum";
            wait_until("the damage to be found", LONG, || {
                let over = agent.ended()?.is_some() || agent.output().contains(damaged);
                Ok(if over { Ok(()) } else { Err(agent.output()) })
            })
            .unwrap();
            let said = agent.output();
            if transport == "tcp" || module {
                says(&said, &[damaged]);
            }
            if transport == "shm" && module {
                says(&ends(&mut agent, 6), &["restart remora source", "detached and emptied"]);
            }
            if transport == "tcp" {
                // Each new connection begins, and meets the same slot: that is no progress.
                let began = Instant::now();
                says(&ends(&mut agent, 5), &[damaged, "tried for 2 s (--retry-for)", "detached and emptied"]);
                assert!(began.elapsed() < LONG, "it took {:?}", began.elapsed());
            }
            assert!(agent.ended().unwrap().is_none_or(|status| !status.success()), "{kind} {transport}: {said}");
            agent.kill().unwrap();
            assert!(holds_nothing(&replica), "{kind} {transport}: {said}");
        }
    });
}

/// Whether a server holds nothing once it is not loading any more. Servers end if the checksum of a snapshot is wrong;
/// such a server holds nothing either.
fn holds_nothing(server: &Server) -> bool {
    let keys = wait_until("the server to stop loading", LONG, || {
        let Ok(mut client) = server.client() else { return Ok(Ok(0)) };
        Ok(match client.int(&["DBSIZE"]) {
            Err(error) if error.to_string().contains("LOADING") => Err(error.to_string()),
            // The server has ended meanwhile.
            Err(_) => Ok(0),
            Ok(keys) => Ok(keys),
        })
    });
    keys.unwrap() == 0
}

#[test]
#[ignore = "long: make test-all"]
fn a_replica_that_the_journal_has_passed_starts_over_alone() {
    for (kind, module) in kinds_and_module() {
        is_overtaken(kind, module, "1mb");
    }
}

#[test]
#[ignore = "long: make test-all"]
fn a_replica_that_the_journal_has_passed_goes_to_a_primary_whose_backlog_still_covers_it() {
    for (kind, module) in require::kinds().into_iter().zip([false, true]) {
        is_overtaken(kind, module, BACKLOG);
    }
}

/// `backlog`: the primary's.
fn is_overtaken(kind: Kind, module: bool, backlog: &str) {
    let primary = primary(kind).config("repl-backlog-size", backlog).start().unwrap();
    let (slow, fast) = (server(kind, module).start().unwrap(), server(kind, module).start().unwrap());
    // Too short for the module: the server loads them itself.
    load_small(&primary, 4000, 100);
    // Twenty seconds, so that it still loads when the journal has been overwritten, also on a busy machine.
    load_slowly(&slow, 5_000);
    let source = Source::start(&primary, &["--memory", "64MiB", "--journal-memory", "8MiB", "--slot-size", "256KiB"]);
    let mut fed = source.replica(&fast, &["--name", "fast", "--stay"]);
    fed.wait_for_event("in_step", LONG).unwrap();
    let mut overtaken = source.replica(&slow, &["--name", "slow", "--memory", "16MiB"]);
    wait_until("the slow server to load", LONG, || {
        let loading = slow.fact("loading")?;
        Ok(if loading == "1" { Ok(()) } else { Err(format!("{loading}: {}", overtaken.output())) })
    })
    .unwrap();
    // Several times what the journal and the agent hold, at a pace that the other server keeps up with.
    for part in 0..16 {
        load_part(&primary, part);
        let written = number(&primary, "master_repl_offset");
        wait_until("the fast server to keep up", LONG, || {
            let applied: u64 = fast.fact("slave_repl_offset")?.parse().unwrap();
            Ok(if written < applied + 2 * MIB {
                Ok(())
            } else {
                Err(format!("{applied} of {written}: {}", fed.output()))
            })
        })
        .unwrap();
    }
    let is_covered = backlog == BACKLOG;
    if is_covered {
        assert_eq!(slow.fact("loading").unwrap(), "1", "the server has loaded too soon: {}", overtaken.output());
        // It loads to the end, and asks the primary then.
        slow.configure("key-load-delay", "0").unwrap();
    }
    let overwritten = overtaken.wait_for_line("the source has overwritten", LONG);
    assert!(overwritten.is_ok(), "{overwritten:?}\nthe source:\n{}", source.agent.output());
    if let Err(error) = slow.configure("key-load-delay", "0") {
        panic!("{error}: {}", slow.log());
    }
    let ended = overtaken.wait(LONG);
    assert!(ended.is_ok(), "{ended:?}\n{}", slow.log());
    succeeds(&mut overtaken, &slow);
    for trouble in ["overwritten", "trying again"] {
        assert!(!fed.output().contains(trouble), "{}", fed.output());
    }
    // A server that the primary could not continue starts over as soon as its stream is lost, in the middle of its load,
    // and again if clients overwrite the stream of the next snapshot too. All snapshots are the source's.
    let snapshots = number(&primary, "sync_full");
    let starts = ["has overwritten", "is requesting a snapshot"];
    let starts = starts.map(|line| overtaken.output().matches(line).count() as u64).into_iter().max().unwrap();
    let expected = if is_covered { 1..=1 } else { 2..=1 + starts };
    assert!(expected.contains(&snapshots), "{snapshots} of {expected:?}: {}", overtaken.output());
    assert_eq!(source.snapshots_taken(), snapshots);
    for server in [&slow, &fast] {
        assert_same_data(&primary, server);
    }
}

/// Writes 2 MiB.
fn load_part(primary: &Server, part: u32) {
    let mut client = primary.client().unwrap();
    let value = vec![b'0' + (part % 10) as u8; 64 << 10];
    for key in 0..32 {
        client.ok(&[b"SET".as_slice(), format!("part {part} {key}").as_bytes(), &value]).unwrap();
    }
}

#[test]
#[ignore = "long: make test-all"]
fn a_server_with_less_maxmemory_than_the_data_still_gets_all_of_it() {
    for (kind, module) in kinds_and_module() {
        let primary = primary(kind).start().unwrap();
        load(&primary, 16, MIB);
        let small = server(kind, module).max_memory(4 * MIB).config("maxmemory-policy", "allkeys-lru");
        let replica = small.start().unwrap();
        let source = Source::start(&primary, &["--memory", "64MiB"]);
        source.replicate(&replica, &[]);
        // Replicas ignore their own limit: the primary decides what is evicted.
        assert_same_data(&primary, &replica);
        assert_eq!((number(&replica, "evicted_keys"), replica.client().unwrap().int(&["DBSIZE"]).unwrap()), (0, 16));
    }
}

/// What the primary buffers for its replicas, in bytes.
fn buffered(primary: &Server) -> u64 {
    let list = primary.client().unwrap().text(&["CLIENT", "LIST", "TYPE", "replica"]).unwrap();
    let of = |word: &str| word.strip_prefix("omem=").and_then(|bytes| bytes.parse::<u64>().ok());
    list.split_ascii_whitespace().filter_map(of).sum()
}

#[test]
#[ignore = "long: make test-all"]
fn writes_are_buffered_in_the_primary_only_while_it_takes_the_snapshot() {
    for kind in require::kinds() {
        let (primary, replica) = (primary(kind).start().unwrap(), Server::start(kind).unwrap());
        fill_keys(&primary, 2000, "old");
        // The child takes two seconds.
        primary.configure("rdb-key-save-delay", "1000").unwrap();
        // Twenty seconds, so that it still loads then, also on a busy machine.
        load_slowly(&replica, 10_000);
        let mut source = Source::start(&primary, &["--memory", "256MiB"]);
        let mut agent = source.replica(&replica, &[]);
        source.agent.wait_for_event("snapshot_started", LONG).unwrap();
        (0..4).for_each(|part| load_part(&primary, part));
        let meanwhile = buffered(&primary);
        source.wait_for_snapshot();
        wait_until("the buffer to be sent", LONG, || {
            let bytes = buffered(&primary);
            Ok(if bytes < MIB { Ok(()) } else { Err(bytes.to_string()) })
        })
        .unwrap();
        assert!(meanwhile > 4 * MIB, "{meanwhile} bytes were buffered during the snapshot");
        // Long after the snapshot, and while the replica still loads.
        let mut most = 0;
        for part in 4..24 {
            load_part(&primary, part);
            std::thread::sleep(Duration::from_millis(20));
            most = most.max(buffered(&primary));
        }
        assert_eq!(replica.fact("loading").unwrap(), "1", "the replica has loaded too soon: {}", agent.output());
        assert!(most < 4 * MIB, "{most} bytes are buffered in the primary after the snapshot");
        replica.configure("key-load-delay", "0").unwrap();
        succeeds(&mut agent, &replica);
        assert_same_data(&primary, &replica);
    }
}

// Processes that are killed and connections that are cut in the middle of a transfer, and how it resumes: never with a
// second snapshot while the first is available, never with a mix of two, and never with a changed setting left behind.

/// Random data in the primary, in MiB.
const MEBIBYTES: usize = 16;

/// Rate of the replica's cable, in bytes per second, until a test has interfered: the snapshot takes a quarter of a
/// minute, in which a busy machine looks at it often enough.
const SLOW_CABLE: u64 = 1 << 20;

/// The same afterwards.
const CABLE: u64 = 6 << 20;

/// Slots after which a test interferes: a quarter of the snapshot.
const A_QUARTER: u64 = 64;

/// How much more than the snapshot may cross the cable if no slot crosses twice: slots in transit when the cut came,
/// directory entries, the stream.
const SLACK: f64 = 1.4;

/// Two hosts, a primary with random data on one, an empty server on the other, and a slow cable between them.
struct Hosts {
    here: Host,
    there: Host,
    primary: Server,
    replica: Server,
    stage: Stage,
}

impl Hosts {
    /// `module`: whether both servers have the module.
    fn new(kind: Kind, module: bool) -> Hosts {
        let net = Net::new().unwrap();
        let (here, there) = (net.host("primary").unwrap(), net.host("replica").unwrap());
        let server = |host| {
            let builder = Server::builder(kind).on(host).config("repl-diskless-sync-delay", 0);
            if module { builder.module("").unwrap() } else { builder }.start().unwrap()
        };
        let (primary, replica) = (server(&here), server(&there));
        fill(&primary, MEBIBYTES, 1);
        there.shape(Shape::rate(SLOW_CABLE)).unwrap();
        Hosts { here, there, primary, replica, stage: Stage::new() }
    }

    fn source(&self) -> Source {
        self.stage.source_on(&self.here, &self.primary.url(), &[])
    }

    /// The test has interfered: the rest may come more quickly.
    fn go_on(&self) {
        self.there.shape(Shape::rate(CABLE)).unwrap();
    }

    fn source_again(&self, at: std::net::SocketAddr) -> Source {
        self.stage.source_at(&at.to_string(), Some(&self.here), &self.primary.url(), &[])
    }

    /// A replica agent that keeps what it has received.
    fn replica(&self, source: &Source, more: &[&str]) -> remora_lab::Agent {
        let folder = self.stage.path("state");
        let mut args = vec!["--state-dir", &folder];
        args.extend(more);
        self.stage.replica_on(&self.there, &self.replica.url(), source.address, &args)
    }

    /// Asserts that one snapshot was taken, that its bytes crossed the cable once, and that the replica is exact.
    fn assert_one_snapshot_once(&self, source: &Source) {
        assert_eq!(number(&self.primary, "sync_full"), 1, "the primary says:\n{}", self.primary.log());
        let (served, snapshot) = (source.bytes_served() as f64, (MEBIBYTES << 20) as f64);
        assert!(served < snapshot * SLACK, "{served} bytes were served for a snapshot of {snapshot}");
        self.assert_exact();
    }

    fn assert_exact(&self) {
        assert_eq!(self.replica.configured("repl-diskless-load").unwrap(), "disabled");
        assert_same_data(&self.primary, &self.replica);
        assert_eq!(master_host(&self.replica).parse(), Ok(self.primary.address().ip()));
    }
}

fn master_host(server: &Server) -> String {
    server.fact("master_host").unwrap()
}

/// Every kind of server without the module and with it.
fn with_and_without_module() -> Vec<(Kind, bool)> {
    require::kinds().into_iter().flat_map(|kind| [(kind, false), (kind, true)]).collect()
}

/// Changes of every kind, few enough for the slow cable.
fn gentle_writer(server: &Server) -> Workload {
    let options = Options { big_bytes: 0, pipeline: 4, ..Options::seeded(remora_lab::random::seed("workload")) };
    Workload::start(server.client().unwrap(), options.rate(300)).unwrap()
}

#[test]
#[ignore = "long: make test-all"]
fn a_replica_agent_that_was_killed_resumes_with_the_slots_it_lacks() {
    let Some(()) = require::shaping() else { return };
    at_once(with_and_without_module(), |(kind, module)| {
        let hosts = Hosts::new(kind, module);
        let source = hosts.source();
        let writer = gentle_writer(&hosts.primary);
        let mut first = hosts.replica(&source, &[]);
        source.wait_for_slots(&mut first, A_QUARTER);
        first.kill().unwrap();
        hosts.go_on();
        // The setting that the second agent has to restore. Without it the test would prove little.
        assert_ne!(hosts.replica.configured("repl-diskless-load").unwrap(), "disabled");

        let mut second = hosts.replica(&source, &[]);
        succeeds(&mut second, &hosts.replica);
        writer.stop().unwrap();
        hosts.assert_one_snapshot_once(&source);
    });
}

#[test]
fn a_replica_agent_that_was_stopped_leaves_an_empty_server_and_resumes_when_started_again() {
    let Some(()) = require::shaping() else { return };
    let Some(kind) = require::redis() else { return };
    let hosts = Hosts::new(kind, true);
    let source = hosts.source();
    let mut first = hosts.replica(&source, &[]);
    source.wait_for_slots(&mut first, A_QUARTER);
    first.signal(Signal::TERM).unwrap();
    says(&ends(&mut first, 7), &["stopped by SIGTERM", "detached and emptied"]);
    hosts.go_on();
    assert_eq!(hosts.replica.fact("role").unwrap(), "master");
    assert_eq!(hosts.replica.client().unwrap().int(&["DBSIZE"]).unwrap(), 0);
    assert_eq!(hosts.replica.configured("repl-diskless-load").unwrap(), "disabled");

    let mut second = hosts.replica(&source, &[]);
    succeeds(&mut second, &hosts.replica);
    hosts.assert_one_snapshot_once(&source);
}

/// Longer than the silence that either end tolerates (10 s), so that both lose their connection.
const CUT: Duration = Duration::from_secs(11);

#[test]
#[ignore = "long: make test-all"]
fn a_network_that_was_cut_between_the_agents_loses_no_slot() {
    let Some(()) = require::shaping() else { return };
    at_once(require::kinds(), |kind| {
        // With and without a state folder, and with and without the module.
        is_cut(kind, kind == Kind::Redis7, true);
        is_cut(kind, kind == Kind::Valkey9, false);
    });
}

fn is_cut(kind: Kind, module: bool, keeps: bool) {
    let hosts = Hosts::new(kind, module);
    let mut source = hosts.source();
    let summary = hosts.stage.path("summary.json");
    let mut agent = match keeps {
        true => hosts.replica(&source, &["--json", &summary]),
        false => {
            let args = ["--json", &summary];
            hosts.stage.replica_on(&hosts.there, &hosts.replica.url(), source.address, &args)
        }
    };
    source.wait_for_slots(&mut agent, A_QUARTER);
    hosts.there.cut().unwrap();
    hosts.go_on();
    agent.wait_for_event("source_lost", CUT * 3).unwrap();
    source.agent.wait_for_event("replica_disconnected", CUT * 3).unwrap();
    hosts.there.heal().unwrap();
    succeeds(&mut agent, &hosts.replica);
    hosts.assert_one_snapshot_once(&source);
    let summary: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(summary).unwrap()).unwrap();
    assert!(summary["interruptions"].as_u64().unwrap() > 0, "{summary}");
}

#[test]
#[ignore = "long: make test-all"]
fn a_killed_source_is_reported_and_its_successor_is_read_from_the_beginning() {
    let Some(()) = require::shaping() else { return };
    at_once([(Kind::Redis7, true), (Kind::Valkey9, false)], |(kind, keeps)| {
        let Some(kind) = require::kind(kind) else { return };
        let hosts = Hosts::new(kind, !keeps);
        let mut source = hosts.source();
        let writer = gentle_writer(&hosts.primary);
        let mut agent = match keeps {
            true => hosts.replica(&source, &[]),
            false => hosts.stage.replica_on(&hosts.there, &hosts.replica.url(), source.address, &[]),
        };
        source.wait_for_slots(&mut agent, A_QUARTER);
        let (address, generation) = (source.address, source.generation());
        source.agent.kill().unwrap();
        hosts.go_on();
        let warning = agent.wait_for_event("source_lost", LONG).unwrap();
        says(&warning, &["WARN", "the source", &address.to_string()]);

        let source = hosts.source_again(address);
        succeeds(&mut agent, &hosts.replica);
        writer.stop().unwrap();
        assert!(source.generation() > generation);
        assert_eq!(number(&hosts.primary, "sync_full"), 2);
        hosts.assert_exact();
    });
}

#[test]
#[ignore = "long: make test-all"]
fn a_primary_killed_while_it_makes_the_snapshot_is_asked_again_when_it_is_back() {
    for kind in require::kinds() {
        let mut primary = Server::builder(kind).config("repl-diskless-sync-delay", 0).start().unwrap();
        let replica = Server::start(kind).unwrap();
        // 2000 keys at 20 ms each: the child takes 40 seconds, and is long killed by then.
        fill_keys(&primary, 2000, "old");
        primary.configure("rdb-key-save-delay", "20000").unwrap();
        let stage = Stage::new();
        let mut source = stage.source(&primary.url(), &[]);
        let mut agent = stage.replica(&replica.url(), source.address, &[]);
        source.wait_for_slots(&mut agent, 2);
        primary.kill().unwrap();
        says(&source.agent.wait_for_event("snapshot_failed", LONG).unwrap(), &["WARN"]);
        agent.wait_for_event("snapshot_given_up", LONG).unwrap();

        primary.restart().unwrap();
        fill_keys(&primary, 300, "new");
        succeeds(&mut agent, &replica);
        assert_same_data(&primary, &replica);
        assert_eq!(number(&primary, "sync_full"), 1);
    }
}

#[test]
#[ignore = "long: make test-all"]
fn a_primary_that_restarts_while_its_snapshot_is_being_loaded_causes_a_new_generation() {
    for kind in require::kinds() {
        let mut primary = Server::builder(kind).config("repl-diskless-sync-delay", 0).start().unwrap();
        let replica = Server::start(kind).unwrap();
        fill_keys(&primary, 3000, "old");
        load_slowly(&replica, 2000);
        let stage = Stage::new();
        let mut source = stage.source(&primary.url(), &[]);
        let mut agent = stage.replica(&replica.url(), source.address, &[]);
        source.wait_for_snapshot();
        let generation = source.generation();
        agent.wait_for_event("link_followed", LONG).unwrap();
        primary.restart().unwrap();
        fill_keys(&primary, 300, "new");
        source.agent.wait_for_event("stream_lost", LONG).unwrap();
        succeeds(&mut agent, &replica);
        assert!(source.generation() > generation);
        assert_same_data(&primary, &replica);
        assert_eq!(replica.client().unwrap().int(&["DBSIZE"]).unwrap(), 300);
    }
}

#[test]
#[ignore = "long: make test-all"]
fn a_server_that_restarts_while_it_loads_is_redirected_again() {
    for kind in require::kinds() {
        let primary = Server::builder(kind).config("repl-diskless-sync-delay", 0).start().unwrap();
        let mut replica = Server::start(kind).unwrap();
        fill_keys(&primary, 3000, "old");
        load_slowly(&replica, 1000);
        let stage = Stage::new();
        let source = stage.source(&primary.url(), &[]);
        let mut agent = stage.replica(&replica.url(), source.address, &[]);
        wait_until("the server to load", LONG, || {
            let loading = replica.fact("loading")?;
            Ok(if loading == "1" { Ok(()) } else { Err(loading) })
        })
        .unwrap();
        replica.restart().unwrap();
        agent.wait_for_event("server_restarted", LONG).unwrap();
        succeeds(&mut agent, &replica);
        assert_same_data(&primary, &replica);
        assert_eq!(number(&primary, "sync_full"), 1);
        assert_eq!(replica.configured("repl-diskless-load").unwrap(), "disabled");
        assert_eq!(master_host(&replica).parse::<IpAddr>(), Ok(primary.address().ip()));
    }
}

#[test]
#[ignore = "long: make test-all"]
fn a_server_that_another_client_takes_over_meanwhile_is_left_to_it() {
    let Some(kind) = require::redis() else { return };
    let primary = Server::builder(kind).config("repl-diskless-sync-delay", 0).start().unwrap();
    let (replica, other) = (Server::start(kind).unwrap(), Server::start(kind).unwrap());
    fill_keys(&primary, 3000, "old");
    fill_keys(&other, 10, "other");
    load_slowly(&replica, 500);
    let stage = Stage::new();
    // Nothing to load yet: the snapshot waits for the primary's child.
    primary.configure("rdb-key-save-delay", "1000").unwrap();
    let source = stage.source(&primary.url(), &[]);
    let mut agent = stage.replica(&replica.url(), source.address, &[]);
    agent.wait_for_event("link_followed", LONG).unwrap();
    wait_until("the server to be redirected", LONG, || {
        let answer = replica.client()?.ok(&["REPLICAOF", "127.0.0.1", &other.port().to_string()]);
        Ok(answer.map_err(|error| error.to_string()))
    })
    .unwrap();
    let said = ends(&mut agent, 14);
    says(&said, &["was told to follow", &other.port().to_string(), "the server is left as it is"]);
    replica.wait_for_link(LONG).unwrap();
    assert_same_data(&other, &replica);
    assert_eq!(replica.configured("repl-diskless-load").unwrap(), "disabled");
}

// The ends of a sync that did not succeed: the server is left in the safest state that is still possible, and what the
// agent says of that state is true.

/// The exit code of a sync that failed after the server had been touched.
const SYNC_FAILED: i32 = 6;

/// The exit code of a sync that was stopped.
const INTERRUPTED: i32 = 7;

/// An address that no host answers at (RFC 5737).
const NOWHERE: (&str, &str) = ("192.0.2.1", "6379");

fn get(server: &Server, key: &str) -> String {
    server.client().unwrap().text(&["GET", key]).unwrap()
}

// ---- a link that never works ----

#[test]
#[ignore = "long: make test-all"]
fn a_server_that_cannot_reach_the_link_is_given_back_and_the_cause_is_named() {
    at_once(require::kinds(), |kind| {
        let (net, stage) = (Net::new().unwrap(), Stage::new());
        let container = net.host("container").unwrap();
        let primary = primary(kind).start().unwrap();
        fill_keys(&primary, 100, "x");
        // The agent reaches it by a socket in the file system, and takes it for one on this host.
        let server = Server::builder(kind).on(&container).unix_socket().start().unwrap();
        let mut client = server.client().unwrap();
        client.ok(&["SET", "old", "1"]).unwrap();
        client.ok(&["REPLICAOF", NOWHERE.0, NOWHERE.1]).unwrap();
        let source = stage.source(&primary.url(), &[]);
        let more = ["--replace", "--retry-for", "10s"];
        let mut agent = stage.replica(&server.unix_url().unwrap(), source.address, &more);
        agent.wait_for_line("has not completed its link", LONG).unwrap();
        let said = ends(&mut agent, SYNC_FAILED);
        says(&said, &["no connection has arrived", "--listen", "follows its former primary 192.0.2.1:6379 again"]);
        says(&said, &["holds what it held before"]);
        assert_eq!((follows(&server), get(&server, "old")), ("192.0.2.1:6379".into(), "1".into()));
        assert_eq!(server.configured("masterauth").unwrap(), "");
        assert_eq!(server.configured("repl-diskless-load").unwrap(), "disabled");
    });
}

#[test]
#[ignore = "long: make test-all"]
fn a_server_that_does_not_accept_the_links_certificate_is_given_back_and_the_cause_is_named() {
    let Some(kind) = require::redis().filter(|kind| kind.speaks_tls()) else { return };
    let (stage, other) = (Stage::new(), Stage::new());
    let (files, _) = server::certificates(stage.folder(), &[]).unwrap();
    let (foreign, _) = server::certificates(other.folder(), &[]).unwrap();
    let path = |path: &std::path::Path| path.display().to_string();
    let primary = primary(kind).tls(files.clone()).start().unwrap();
    let server = Server::builder(kind).tls(files.clone()).config("tls-replication", "yes").start().unwrap();
    let source = stage.source(&primary.tls_url().unwrap(), &["--tls-ca", &path(&files.ca)]);
    let (cert, key) = (path(&foreign.certificate), path(&foreign.key));
    let link = ["--link-cert", &cert, "--link-key", &key, "--retry-for", "10s"];
    let said = ends(&mut stage.replica(&server.url(), source.address, &link), SYNC_FAILED);
    says(
        &said,
        &["has not completed its link", "connection from 127.0.0.1", "failed", "received fatal alert", "--link-cert"],
    );
    says(&said, &["was detached and holds what it held before"]);
    assert_eq!(server.fact("role").unwrap(), "master");
}

// ---- old data that are still whole ----

/// A slow sync of `server`, in the middle of its snapshot.
fn in_the_middle(source: &Source, server: &Server, more: &[&str]) -> (Agent, Way) {
    let slow = ["--replace", "--module-load", "off", "--download-limit", "4MiB", "--transport", "tcp"];
    let mut agent = source.replica(server, &[&slow, more].concat());
    agent.wait_for_event("link_followed", LONG).unwrap();
    let way = wait_until("the server to receive the snapshot", LONG, || Ok(way_of_loading(server))).unwrap();
    (agent, way)
}

/// A primary with 60 MB, and a source of it.
fn large_source(kind: Kind) -> (Server, Source) {
    let primary = primary(kind).start().unwrap();
    load(&primary, 60, 1_000_000);
    let source = Source::start(&primary, &[]);
    (primary, source)
}

/// Another primary with a few keys, and a replica of it by the servers' own replication.
fn replica_of_another(kind: Kind) -> (Server, Server) {
    let former = primary(kind).start().unwrap();
    fill_keys(&former, 50, "former");
    let server = Server::start(kind).unwrap();
    server.replicate(&former).unwrap();
    server.wait_for_link(LONG).unwrap();
    (former, server)
}

#[test]
#[ignore = "long: make test-all"]
fn a_replica_whose_sync_is_stopped_follows_its_former_primary_again() {
    for kind in require::kinds() {
        let (_primary, source) = large_source(kind);
        let (former, server) = replica_of_another(kind);
        let before = syncs(&former);
        let (mut agent, way) = in_the_middle(&source, &server, &[]);
        fill_keys(&former, 60, "later");
        agent.signal(Signal::INT).unwrap();
        let said = ends(&mut agent, INTERRUPTED);
        assert_eq!(follows(&server), former.address().to_string());
        server.wait_for_link(LONG).unwrap();
        assert_same_data(&former, &server);
        assert_eq!(server.configured("masterauth").unwrap(), "");
        let after = syncs(&former);
        match way {
            // It goes on where it was: not even a full copy was needed.
            Way::File => {
                says(&said, &["follows its former primary", "again and holds what it held before"]);
                assert_eq!(after, (before.0, before.1 + 1), "{}", server.log());
            }
            Way::Link => {
                says(&said, &["emptied", "follows its former primary", "sends it a full copy"]);
                assert_eq!(after.0, before.0 + 1);
            }
        }
    }
}

#[test]
#[ignore = "long: make test-all"]
fn the_former_primary_is_known_also_to_the_agent_after_one_that_was_killed() {
    for kind in require::kinds() {
        let (_primary, source) = large_source(kind);
        let (former, server) = replica_of_another(kind);
        let (mut killed, _) = in_the_middle(&source, &server, &[]);
        killed.kill().unwrap();
        let (mut agent, _) = in_the_middle(&source, &server, &[]);
        agent.signal(Signal::INT).unwrap();
        says(&ends(&mut agent, INTERRUPTED), &["follows its former primary", &former.address().to_string()]);
        server.wait_for_link(LONG).unwrap();
        assert_same_data(&former, &server);
    }
}

#[test]
#[ignore = "long: make test-all"]
fn a_server_that_loads_beside_its_data_keeps_them_when_the_source_is_gone_for_good() {
    for kind in require::kinds() {
        let (_primary, mut source) = large_source(kind);
        let server = Server::builder(kind).config("repl-diskless-load", "swapdb").start().unwrap();
        fill_keys(&server, 30, "own");
        let digest = server.digest().unwrap();
        let (mut agent, _) = in_the_middle(&source, &server, &["--retry-for", "2s"]);
        source.agent.kill().unwrap();
        let said = ends(&mut agent, 5);
        says(&said, &["was detached and holds what it held before"]);
        assert_eq!(server.fact("role").unwrap(), "master");
        assert_eq!(server.digest().unwrap(), digest);
    }
}

#[test]
#[ignore = "long: make test-all"]
fn a_server_that_cannot_be_emptied_is_said_to_be_detached_and_not_whole() {
    for kind in require::kinds() {
        let stage = Stage::new();
        let primary = primary(kind).start().unwrap();
        load(&primary, 60, 1_000_000);
        let rules = "~* &* +@all -flushall";
        let server = Server::builder(kind).user("agent", "pw", rules).start().unwrap();
        let source = stage.source(&primary.url(), &[]);
        let password = stage.secret("password", "pw");
        let more = ["--user", "agent", "--password-file", &password, "--module-load", "off"];
        let slow = ["--download-limit", "4MiB", "--transport", "tcp"];
        let mut agent = stage.replica(&server.url(), source.address, &[&more[..], &slow].concat());
        wait_until("the server to load", LONG, || Ok(way_of_loading(&server))).unwrap();
        agent.signal(Signal::TERM).unwrap();
        let said = ends(&mut agent, INTERRUPTED);
        says(&said, &["was detached", "could not be emptied", "flushall"]);
        assert_eq!(server.fact("role").unwrap(), "master");
    }
}

// ---- the configuration file ----

#[test]
#[ignore = "long: make test-all"]
fn a_configuration_file_that_another_client_wrote_during_the_sync_is_written_again() {
    for kind in require::kinds() {
        let primary = primary(kind).start().unwrap();
        fill_keys(&primary, 100, "x");
        let mut server = Server::start(kind).unwrap();
        let source = Source::start(&primary, &[]);
        let mut agent = source.replica(&server, &["--stay"]);
        agent.wait_for_event("in_step", LONG).unwrap();
        let mut client = server.client().unwrap();
        client.ok(&["CONFIG", "REWRITE"]).unwrap();
        let link = follows(&server);
        let file = || {
            let files = fs::read_dir(server.folder()).unwrap().map(|entry| entry.unwrap().path());
            let path = files.into_iter().find(|path| path.extension().is_some_and(|kind| kind == "conf")).unwrap();
            fs::read_to_string(path).unwrap()
        };
        let port = link.split(':').next_back().unwrap();
        assert!(file().contains(&format!("replicaof 127.0.0.1 {port}")) && file().contains("auth"), "{}", file());
        agent.signal(Signal::TERM).unwrap();
        succeeds(&mut agent, &server);
        let text = file();
        assert!(text.contains(&format!("replicaof 127.0.0.1 {}", primary.port())), "{text}");
        assert!(!text.contains("masterauth") && !text.contains("primaryauth"), "{text}");
        server.restart().unwrap();
        server.wait_for_link(LONG).unwrap();
        assert_same_data(&primary, &server);
    }
}

// ---- a full copy at the hand-off ----

/// Has one client wait at the server at any time, so that a hand-off takes its longest pause before `REPLICAOF`.
fn keep_a_client_waiting(server: &Server) -> Arc<AtomicBool> {
    let stop = Arc::new(AtomicBool::new(false));
    let (stopped, address) = (stop.clone(), Address::Tcp(server.address()));
    let mut client = server.client().unwrap();
    thread::spawn(move || {
        while !stopped.load(Ordering::Relaxed) {
            // A server that loads, or changes its primary, answers with an error.
            if client.call(&["XREAD", "BLOCK", "1000", "STREAMS", "nothing", "$"]).is_err() {
                match Client::connect(&address) {
                    Ok(again) => client = again,
                    Err(_) => thread::sleep(Duration::from_millis(20)),
                }
            }
        }
    });
    stop
}

#[test]
#[ignore = "long: make test-all"]
fn a_full_copy_that_the_server_takes_by_itself_is_left_to_it() {
    at_once(require::kinds(), |kind| {
        let stage = Stage::new();
        let primary = primary(kind).config("repl-backlog-size", "16kb").start().unwrap();
        let server = Server::start(kind).unwrap();
        fill_keys(&primary, 400, "x");
        let mut source = stage.source(&primary.url(), &["--eager"]);
        source.wait_for_snapshot();
        // 400 keys: from here on a copy takes half a minute, which is longer than the agent waits.
        primary.configure("rdb-key-save-delay", "75000").unwrap();
        let stop = keep_a_client_waiting(&server);
        let mut agent = stage.replica(&server.url(), source.address, &["--retry-for", "1s"]);
        agent.wait_for_event("handing_over", LONG).unwrap();
        // The backlog no longer reaches back to where the server is.
        fill_keys(&primary, 300, "y");
        agent.wait_for_event("full_copy", LONG).unwrap();
        let said = ends(&mut agent, SYNC_FAILED);
        stop.store(true, Ordering::Relaxed);
        says(&said, &["is taking a full copy of the primary", "by itself"]);
        assert!(!said.contains("back to our link") && !said.contains("whole data set"), "{said}");
        assert_eq!(follows(&server), primary.address().to_string());
        server.wait_for_link(LONG).unwrap();
        assert_same_data(&primary, &server);
        // The source's, and the server's own.
        assert_eq!(number(&primary, "sync_full"), 2);
    });
}

// An agent that is killed leaves a server that can follow any primary again: its `masterauth` is what it was.

/// The primary's password.
const PASSWORD: &str = "s3cret-primary";

struct Scene {
    stage: Stage,
    primary: Server,
    replica: Server,
    source: Source,
}

impl Scene {
    fn new(kind: Kind, password: &str) -> Scene {
        let stage = Stage::new();
        let (primary, replica) = match password {
            "" => (quick(kind), Server::builder(kind)),
            password => (quick(kind).require_pass(password), Server::builder(kind).master_auth(None, password)),
        };
        let (primary, replica) = (primary.start().unwrap(), replica.start().unwrap());
        fill_keys(&primary, 2000, "x");
        let file = stage.secret("password", PASSWORD);
        let options = ["--password-file", &file];
        let source = stage.source(&primary.url(), if password.is_empty() { &[] } else { &options });
        Scene { stage, primary, replica, source }
    }

    fn agent(&self, more: &[&str]) -> Agent {
        self.stage.replica(&self.replica.url(), self.source.address, more)
    }

    /// An operator points the server at the primary, and does nothing else.
    fn assert_follows_by_hand(&self, password: &str) {
        self.replica.replicate(&self.primary).unwrap();
        self.replica.wait_for_link(LONG).unwrap();
        assert_eq!(self.replica.configured("masterauth").unwrap(), password);
        assert_same_data(&self.primary, &self.replica);
    }
}

#[test]
#[ignore = "long: make test-all"]
fn a_server_whose_agent_was_killed_while_it_loaded_follows_its_primary_by_hand() {
    for kind in require::kinds() {
        for password in ["", PASSWORD] {
            let scene = Scene::new(kind, password);
            load_slowly(&scene.replica, 1000);
            let mut agent = scene.agent(&[]);
            wait_until_loading(&scene.replica);
            agent.kill().unwrap();
            scene.replica.configure("key-load-delay", "0").unwrap();
            wait_until_it_has_loaded(&scene.replica);
            scene.assert_follows_by_hand(password);
        }
    }
}

#[test]
#[ignore = "long: make test-all"]
fn a_server_whose_agent_was_killed_when_it_was_in_step_follows_its_primary_by_hand() {
    for kind in require::kinds() {
        for password in ["", PASSWORD] {
            let scene = Scene::new(kind, password);
            let mut agent = scene.agent(&["--stay"]);
            agent.wait_for_event("in_step", LONG).unwrap();
            agent.kill().unwrap();
            scene.assert_follows_by_hand(password);
        }
    }
}

#[test]
#[ignore = "long: make test-all"]
fn a_guard_leaves_the_server_to_the_next_agent_and_ends() {
    let Some(()) = require::root() else { return }; // other processes cannot look at the guard
    for kind in require::kinds() {
        let scene = Scene::new(kind, PASSWORD);
        let mut agent = scene.agent(&["--stay"]);
        agent.wait_for_event("in_step", LONG).unwrap();
        let guards = || guards_of(&scene.replica);
        assert_eq!(guards().len(), 1, "one guard beside the agent");
        agent.kill().unwrap();
        succeeds(&mut scene.agent(&[]), &scene.replica);
        assert_eq!(scene.replica.configured("masterauth").unwrap(), PASSWORD);
        wait_until("the guards to end", LONG, || {
            let left = guards();
            Ok(if left.is_empty() { Ok(()) } else { Err(format!("{left:?}")) })
        })
        .unwrap();
    }
}

/// An agent that `remora migrate` has started ends with it. Its guard must not.
#[test]
fn an_agent_that_migrate_has_started_has_a_guard_too() {
    let Some(()) = require::root() else { return }; // other processes cannot look at the guard
    for kind in require::kinds() {
        let scene = Scene::new(kind, "");
        load_slowly(&scene.replica, 1000);
        let (from, to) = (scene.primary.url(), scene.replica.url());
        let mut agent = scene.stage.start(None, &["migrate", "--from", &from, "--to", &to]);
        wait_until_loading(&scene.replica);
        assert_eq!(guards_of(&scene.replica).len(), 1, "{}", agent.output());
        agent.kill().unwrap();
        scene.replica.configure("key-load-delay", "0").unwrap();
        wait_until_it_has_loaded(&scene.replica);
        scene.assert_follows_by_hand("");
    }
}

/// The kernel closes the files of a killed agent one by one: its pipe to the guard may end well before its lock does.
#[test]
#[ignore = "long: make test-all"]
fn a_guard_waits_for_the_lock_of_the_agent_that_was_killed() {
    for kind in require::kinds() {
        // A guard that is quicker than this test finds no lock, and nothing is shown then.
        let shown = (0..10).any(|_| a_guard_waits_for_a_lock(kind));
        assert!(shown, "the guard was quicker ten times");
    }
}

/// Whether it was shown: `false` if the guard has come to the lock before this process.
fn a_guard_waits_for_a_lock(kind: Kind) -> bool {
    let scene = Scene::new(kind, "");
    let mut agent = scene.agent(&["--stay"]);
    agent.wait_for_event("in_step", LONG).unwrap();
    let lock = fs::File::open(lock_of(&scene)).unwrap();
    let held = thread::spawn(move || flock(&lock, FlockOperation::LockExclusive).map(|()| lock));
    wait_until("a process that waits for the lock", LONG, || waits_for_a_lock(std::process::id())).unwrap();
    agent.kill().unwrap();
    let held = held.join().unwrap().unwrap();
    if scene.replica.configured("masterauth").unwrap().is_empty() {
        return false;
    }
    let mut client = scene.replica.client().unwrap();
    let mut looks = || {
        let stats = client.info("stats").unwrap();
        stats.get("total_connections_received").unwrap().parse::<u64>().unwrap()
    };
    let before = looks();
    // Each look of the guard is one connection, and no other program connects.
    wait_until("the guard to look again", LONG, || match looks() {
        connections if connections >= before + 3 => Ok(Ok(())),
        connections => Ok(Err(format!("{connections} connections after {before}"))),
    })
    .unwrap();
    assert_ne!(scene.replica.configured("masterauth").unwrap(), "", "nothing is changed while the lock is held");
    drop(held);
    scene.assert_follows_by_hand("");
    true
}

/// The file that the replica's agent has locked.
fn lock_of(scene: &Scene) -> PathBuf {
    let folder = scene.stage.folder().join("remora");
    let is_lock = |path: &PathBuf| {
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        name.ends_with(".lock") && name.contains(&scene.replica.address().port().to_string())
    };
    let mut found = fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path()).filter(is_lock);
    found.next().unwrap_or_else(|| panic!("no lock of the replica in {}", folder.display()))
}

/// Whether a thread of this process waits for a lock that another one holds (proc_locks(5)).
fn waits_for_a_lock(process: u32) -> remora_lab::Result<Result<(), String>> {
    let locks = fs::read_to_string("/proc/locks").unwrap();
    let waits =
        |line: &str| line.contains("-> FLOCK") && line.split_whitespace().any(|word| word == process.to_string());
    Ok(if locks.lines().any(waits) { Ok(()) } else { Err(locks) })
}

/// A server that loads from a link that has ended notices that soon, and takes no command before.
fn wait_until_it_has_loaded(server: &Server) {
    wait_until("the server to load no more", LONG, || {
        let info = server.client()?.info("persistence")?;
        Ok(if info.get("loading") == Some("0") { Ok(()) } else { Err("it loads".to_owned()) })
    })
    .unwrap();
}

/// The processes that guard this server.
fn guards_of(server: &Server) -> Vec<u32> {
    let (url, mut found) = (server.url(), Vec::new());
    for entry in std::fs::read_dir("/proc").unwrap().flatten() {
        let Some(id) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        let read = |name: &str| std::fs::read(entry.path().join(name)).unwrap_or_default();
        let has = |text: Vec<u8>, part: &str| String::from_utf8_lossy(&text).contains(part);
        if has(read("cmdline"), &url) && has(read("environ"), "REMORA_GUARD_OF=") {
            found.push(id);
        }
    }
    found
}
