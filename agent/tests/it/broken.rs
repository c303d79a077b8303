//! What breaks while a replica is made, and what it costs: connections that break one at a time, loads that fail again
//! and again, memory that is damaged, a journal that overtakes its reader.

use std::net::{IpAddr, Shutdown};
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use remora_lab::server::{Builder, wait_until};
use remora_lab::workload::Options;
use remora_lab::{Agent, Host, Kind, Net, Server, Shape, Workload, assert_same_data, process, require};
use rustix::process::Signal;

use crate::kit::{
    BACKLOG, LONG, Source, Stage, at_once, ends, fill, fill_keys, kinds_and_module, load, load_slowly, load_small,
    number, primary, says, succeeds, syncs,
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
