//! What the primary sees of a source: a replica that acknowledges nothing, and that may be slower than its limits
//! allow.

use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use remora_lab::server::{Builder, wait_until};
use remora_lab::{Kind, Net, Server, Shape, assert_same_data, require};

use crate::kit::{LONG, Source, Stage, ends, fill, fill_keys, number, primary, quick, says, succeeds, syncs};

/// Waits until the primary has one replica, to which it sends its stream, and returns the line that describes it.
pub(crate) fn online(primary: &Server) -> String {
    wait_until("the primary to send the source its stream", LONG, || {
        let line = primary.fact("slave0").unwrap_or_default();
        Ok(if line.contains("state=online") { Ok(line) } else { Err(line) })
    })
    .unwrap()
}

/// Makes the primary write a replication stream, which it does from its first replica on. The writes of a primary that
/// never had one are at offset 0, which every replica has acknowledged.
pub(crate) fn give_a_backlog(primary: &Server) {
    let first = Server::start(primary.kind()).unwrap();
    first.replicate(primary).unwrap();
    first.wait_for_link(LONG).unwrap();
    drop(first);
    wait_until("the primary to have no replica", LONG, || {
        let left = primary.fact("connected_slaves")?;
        Ok(if left == "0" { Ok(()) } else { Err(left) })
    })
    .unwrap();
}

/// `WAIT` counts a replica whose last acknowledged offset is at least that of the client's last write. A source that
/// acknowledges the offset of its snapshot is counted for the writes before the snapshot, although it keeps them in
/// memory only and cannot be promoted. So it acknowledges offset 0.
fn wait_never_counts_a_source(builder: Builder) {
    // A primary drops a replica that has acknowledged nothing for `repl-timeout`. A PING every second moves the offset.
    let primary = builder.config("repl-timeout", 4).config("repl-ping-replica-period", 1).start().unwrap();
    let mut client = primary.client().unwrap();
    give_a_backlog(&primary);
    client.ok(&["SET", "before", "the snapshot"]).unwrap();
    assert!(number(&primary, "master_repl_offset") > 0);
    let mut source = Source::start(&primary, &["--memory", "16MiB", "--eager"]);
    source.wait_for_snapshot();
    online(&primary);
    assert_eq!(client.int(&["WAIT", "1", "1000"]).unwrap(), 0, "counted for a write before the snapshot");
    client.ok(&["SET", "after", "the snapshot"]).unwrap();
    assert_eq!(client.int(&["WAIT", "1", "1000"]).unwrap(), 0, "counted for a write after the snapshot");

    // A source that resumes its stream acknowledges nothing either.
    client.call(&["CLIENT", "KILL", "TYPE", "replica"]).unwrap();
    source.agent.wait_for_event("stream_resumed", LONG).unwrap();
    online(&primary);
    assert_eq!(client.int(&["WAIT", "1", "6000"]).unwrap(), 0, "counted after the stream was resumed");

    // Those six seconds were longer than `repl-timeout`: the acknowledgements keep the connection alive.
    assert!(online(&primary).contains("offset=0,"), "{}", online(&primary));
    assert_eq!(source.agent.output().matches("the stream broke").count(), 1, "{}", source.agent.output());

    // A server that was handed over counts.
    let replica = Server::start(primary.kind()).unwrap();
    source.replicate(&replica, &[]);
    assert_same_data(&primary, &replica);
    assert_eq!(client.int(&["WAIT", "1", "10000"]).unwrap(), 1, "the replica is counted");
}

#[test]
fn wait_on_redis_never_counts_a_source() {
    let Some(kind) = require::redis() else { return };
    wait_never_counts_a_source(primary(kind));
}

#[test]
#[ignore = "long: make test-all"]
fn wait_on_valkey_never_counts_a_source() {
    let Some(kind) = require::valkey() else { return };
    wait_never_counts_a_source(primary(kind));
}

#[test]
#[ignore = "long: make test-all"]
fn wait_on_a_valkey_that_offers_two_channels_never_counts_a_source() {
    let Some(kind) = require::valkey() else { return };
    wait_never_counts_a_source(primary(kind).config("dual-channel-replication-enabled", "yes"));
}

/// Starts a source of this primary, and waits until the primary sends it its stream, which has begun.
pub(crate) fn attached(primary: &Server) -> Source {
    give_a_backlog(primary);
    primary.client().unwrap().ok(&["SET", "key", "1"]).unwrap();
    let mut source = Source::start(primary, &["--memory", "16MiB", "--eager"]);
    source.wait_for_snapshot();
    online(primary);
    source
}

#[test]
#[ignore = "long: make test-all"]
fn min_replicas_to_write_counts_a_source() {
    for kind in require::kinds() {
        let limited = primary(kind).config("min-replicas-to-write", 1).config("min-replicas-max-lag", 4);
        let primary = limited.start().unwrap();
        let mut client = primary.client().unwrap();
        let mut writes = || client.ok(&["SET", "key", "1"]).map_err(|error| error.to_string());
        assert!(writes().is_err_and(|refused| refused.contains("NOREPLICAS")), "{kind}");
        let source = Source::start(&primary, &["--memory", "16MiB", "--eager"]);
        online(&primary);
        says(&source.agent.output(), &["the server has min-replicas-to-write", "one replica fewer"]);
        // The primary counts in its cron, once a second.
        wait_until("the primary to accept writes", LONG, || Ok(writes())).unwrap();
        // It is counted by its acknowledgements, also long after it has come.
        let until = Instant::now() + Duration::from_secs(6);
        let mut least = u64::MAX;
        while Instant::now() < until {
            least = least.min(number(&primary, "min_slaves_good_slaves"));
            thread::sleep(Duration::from_millis(200));
        }
        assert_eq!((least, writes()), (1, Ok(())), "{kind}");
        source.stop();
        wait_until("the primary to refuse writes", LONG, || Ok(writes().err().ok_or("it accepts".to_string())))
            .unwrap();
    }
}

/// Writes the same large value again and again, until dropped.
struct Flood {
    over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Flood {
    fn start(primary: &Server) -> Flood {
        let over = Arc::new(AtomicBool::new(false));
        let (mut client, stop) = (primary.client().unwrap(), over.clone());
        let thread = thread::spawn(move || {
            let value = "x".repeat(256 << 10);
            while !stop.load(Ordering::Relaxed) {
                client.ok(&["SET", "flood", &value]).unwrap();
            }
        });
        Flood { over, thread: Some(thread) }
    }
}

impl Drop for Flood {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
        self.thread.take().unwrap().join().unwrap();
    }
}

/// The primary holds the stream back for a windowed capture, in the output buffer of its connection. No attempt can
/// succeed under these writes, and each one forks.
fn an_output_buffer_that_is_too_small_is_named_and_not_met_without_end(kind: Kind) {
    let limited =
        primary(kind).config("client-output-buffer-limit", "replica 8mb 0 0").config("repl-backlog-size", "1mb");
    let primary = limited.start().unwrap();
    fill(&primary, 48, 1);
    let server = Server::start(kind).unwrap();
    let source = Source::start(&primary, &["--memory", "16MiB", "--slot-size", "64KiB"]);
    let flood = Flood::start(&primary);

    // The plan says it before anything is touched.
    let mut plan = source.replica(&server, &["--dry-run"]);
    let planned = ends(&mut plan, 0);
    says(
        &planned,
        &["does not fit in the source's memory", "client-output-buffer-limit for replicas is 8 MiB", "raise the limit"],
    );
    assert_eq!(syncs(&primary).0, 0);

    let slow = ["--download-limit", "2MiB", "--transport", "tcp", "--retry-for", "5s"];
    let mut agent = source.replica(&server, &slow);
    let failed = ends(&mut agent, 5);
    drop(flood);
    says(&failed, &["snapshots in a row failed", "client-output-buffer-limit for replicas is 8 MiB"]);
    says(&source.agent.output(), &["snapshot failed", "held back", "client-output-buffer-limit for replicas is 8 MiB"]);
    let forks = syncs(&primary).0;
    assert!((2..=6).contains(&forks), "{forks} forks");
    let status = source.status();
    assert_eq!(status["totals"]["snapshots_failed"].as_u64(), Some(forks));
    assert!(status["last_failure"].as_str().unwrap().contains("client-output-buffer-limit"), "{status}");
    says(&source.drawn_status(), &[&format!(" taken, {forks} failed, "), "client-output-buffer-limit"]);
}

#[test]
#[ignore = "long: make test-all"]
fn an_output_buffer_of_redis_that_is_too_small_is_named_and_not_met_without_end() {
    let Some(kind) = require::redis() else { return };
    an_output_buffer_that_is_too_small_is_named_and_not_met_without_end(kind);
}

#[test]
#[ignore = "long: make test-all"]
fn an_output_buffer_of_valkey_that_is_too_small_is_named_and_not_met_without_end() {
    let Some(kind) = require::valkey() else { return };
    an_output_buffer_that_is_too_small_is_named_and_not_met_without_end(kind);
}

// Forks that come to nothing, and snapshots that take longer than they may be old: the primary forks rarely, and those
// who wait are served.

/// A primary that saves to disk first answers `+FULLRESYNC` and forks, and sends nothing if the save fails.
#[test]
#[ignore = "long: make test-all"]
fn a_primary_whose_saves_to_disk_fail_forks_less_and_less_often() {
    for kind in require::kinds() {
        let primary = quick(kind).config("repl-diskless-sync", "no").start().unwrap();
        fill_keys(&primary, 100, "value");
        // The child cannot give its file this name.
        let in_the_way = primary.folder().join("dump.rdb");
        fs::create_dir(&in_the_way).unwrap();
        let source = Source::start(&primary, &["--fork-interval", "0s"]);
        let server = Server::start(kind).unwrap();
        let mut agent = source.replica(&server, &[]);
        agent.wait_for_line("4 snapshots in a row failed after the primary had forked", LONG).unwrap();
        let forks = number(&primary, "total_forks");
        assert!((4..=5).contains(&forks), "{kind}: {forks} forks");
        fs::remove_dir(&in_the_way).unwrap();
        succeeds(&mut agent, &server);
        assert_same_data(&primary, &server);
        let forks = number(&primary, "total_forks");
        assert!(forks <= 6, "{kind}: {forks} forks");
    }
}

#[test]
#[ignore = "long: make test-all"]
fn a_snapshot_that_takes_longer_than_max_age_serves_who_waited_and_who_joined_meanwhile() {
    for (kind, diskless) in require::kinds().into_iter().flat_map(|kind| [(kind, "no"), (kind, "yes")]) {
        let primary = quick(kind).config("repl-diskless-sync", diskless).start().unwrap();
        fill_keys(&primary, 100, "value");
        primary.configure("rdb-key-save-delay", "30000").unwrap();
        let source = Source::start(&primary, &["--max-age", "1s", "--fork-interval", "0s"]);
        let servers = [(); 2].map(|()| Server::start(kind).unwrap());
        let mut first = source.replica(&servers[0], &[]);
        wait_until("the primary to save", LONG, || {
            let saves = primary.fact("rdb_bgsave_in_progress")?;
            Ok(if saves == "1" { Ok(()) } else { Err(saves) })
        })
        .unwrap();
        let mut second = source.replica(&servers[1], &[]);
        for (agent, server) in [&mut first, &mut second].into_iter().zip(&servers) {
            succeeds(agent, server);
            assert_same_data(&primary, server);
        }
        assert_eq!(source.snapshots_taken(), 1, "{kind}, repl-diskless-sync {diskless}");
        assert_eq!(number(&primary, "sync_full"), 1, "{kind}, repl-diskless-sync {diskless}");
    }
}

// The default upload limit: a sync of a distant replica stays in the background of the primary's cable. What its clients
// notice is measured by `remora-bench feel`. Needs root, for network namespaces.

/// Random data in the primary, in MiB, and the rate of every cable in bytes per second: 100 Mb/s. A sync takes three
/// seconds.
const MEBIBYTES: usize = 32;
const CABLE: u64 = 100_000_000 / 8;

#[test]
#[ignore = "long: make test-all"]
fn a_sync_without_options_is_in_the_background_and_one_without_a_limit_is_not() {
    let Some(()) = require::namespaces() else { return };
    let Some(kind) = require::valkey() else { return };
    let net = Net::new().unwrap();
    let here = net.host("primary").unwrap();
    here.shape(Shape::rate(CABLE)).unwrap();
    let primary = Server::builder(kind).on(&here).config("repl-diskless-sync-delay", 0).start().unwrap();
    fill(&primary, MEBIBYTES, 1);
    for limit in [&["--upload-limit", "none"][..], &[]] {
        let stage = Stage::new();
        let mut source = stage.source_on(&here, &primary.url(), &[&["--eager"], limit].concat());
        source.wait_for_snapshot();
        let there = net.host("replica").unwrap();
        there.shape(Shape::rate(CABLE)).unwrap();
        let replica = Server::builder(kind).on(&there).start().unwrap();
        let mut agent = stage.replica_on(&there, &replica.url(), source.address, &["--no-serve-peers"]);
        succeeds(&mut agent, &replica);
        assert_same_data(&primary, &replica);
        let status = source.status();
        assert_eq!(status["upload"].is_object(), limit.is_empty(), "{status}");
        if limit.is_empty() {
            says(&source.drawn_status(), &["upload", "up to", "in the background", "of queue"]);
            assert!(status["upload"]["bytes_per_second"].as_u64() >= Some(1 << 20), "{status}");
        }
    }
}
