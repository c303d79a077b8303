//! What breaks while a replica is made, and what it costs: connections that break one at a time, loads that fail again
//! and again, memory that is damaged, a journal that overtakes its reader.

use std::net::Shutdown;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use remora_lab::server::{Builder, wait_until};
use remora_lab::{Agent, Kind, Server, assert_same_data, process, require};

use crate::kit::{
    BACKLOG, LONG, Source, at_once, ends, fill_keys, kinds_and_module, load, load_slowly, load_small, number, primary,
    says, succeeds, syncs,
};

const MIB: u64 = 1 << 20;

/// Bytes of the data set whose connections break.
const DATA: u64 = 24 * MIB;

/// How much more than the snapshot may leave the source if no slot leaves it twice: slots in transit when the
/// connection broke, directory entries, the stream. In hundredths.
const ONCE: u64 = 130;

/// The server of a replica, with the module or without.
fn server(kind: Kind, module: bool) -> Builder {
    let builder = Server::builder(kind);
    if module { builder.module("").unwrap() } else { builder }
}

/// A slow transfer by TCP without `--state-dir`, in the middle of which `which` of the agent's connections to the
/// source breaks. Asserts that every slot leaves the source once. Returns the agents' output.
fn one_connection_breaks(kind: Kind, module: bool, which: fn(usize) -> usize) -> [String; 2] {
    let (primary, replica) = (primary(kind).start().unwrap(), server(kind, module).start().unwrap());
    load(&primary, DATA / MIB, MIB);
    let source = Source::start(&primary, &["--memory", "128MiB", "--slot-size", "128KiB"]);
    let mut agent = source.replica(&replica, &["--transport", "tcp", "--no-serve-peers", "--download-limit", "6MiB"]);
    source.wait_for_slots(&mut agent, 40);
    let connections = process::connections(agent.pid(), source.address).unwrap();
    // The control connection is the first; each lane is one more.
    assert!(connections.len() >= 2, "{connections:?}");
    connections[which(connections.len())].shutdown(Shutdown::Both).unwrap();
    drop(connections);
    succeeds(&mut agent, &replica);
    let (sent, set) = (source.bytes_served(), source.status()["generation"]["snapshot_bytes"].as_u64().unwrap());
    assert!(sent * 100 <= set * ONCE, "{sent} bytes left the source for a snapshot of {set}: {}", agent.output());
    assert_eq!((source.snapshots_taken(), syncs(&primary)), (1, (1, 1)));
    assert_same_data(&primary, &replica);
    [agent.output(), source.agent.output()]
}

#[test]
#[ignore = "long: make test-all"]
fn a_data_lane_that_breaks_is_opened_again_and_no_slot_is_sent_twice() {
    for (kind, module) in require::kinds().into_iter().zip([false, true]) {
        let [agent, source] = one_connection_breaks(kind, module, |count| count - 1);
        // The session lasts: only the lane is opened again.
        says(&agent, &["trying again in"]);
        says(&source, &["replica joined"]);
    }
}

#[test]
#[ignore = "long: make test-all"]
fn a_control_connection_that_breaks_is_opened_again_and_no_slot_is_sent_twice() {
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
    let starts = overtaken.output().matches("has overwritten").count() as u64;
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
fn writes_are_buffered_in_the_primary_only_while_it_takes_the_snapshot() {
    for kind in require::kinds() {
        let (primary, replica) = (primary(kind).start().unwrap(), Server::start(kind).unwrap());
        fill_keys(&primary, 2000, "old");
        // The child takes two seconds.
        primary.configure("rdb-key-save-delay", "1000").unwrap();
        load_slowly(&replica, 1000);
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
