//! What the primary sees of a source, and does because of it: a replica that acknowledges nothing, that may be slower
//! than its limits allow, and for which it forks.
//!
//! And a server whose replication history changes while a source captures it: it is shut down and started again, or
//! promoted. Replicas must get nothing of the new history under the replid of the old one, and must not need a full
//! copy.

use std::fs;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use remora_lab::server::{Builder, wait_until};
use remora_lab::{Agent, Kind, Net, Server, Shape, assert_same_data, fill_every_type, require};
use rustix::process::Signal;
use tempfile::TempDir;

use crate::kit::{
    LONG, Scene, Source, Stage, at_once, ends, fill, fill_keys, load, number, primary, quick, says, start_cluster,
    steady_writer, strs, succeeds, syncs,
};
use crate::sync::by_file;

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

/// The default of `--fork-interval`.
const FORK_INTERVAL: Duration = Duration::from_secs(30);

/// The primary holds the stream back for a windowed capture, in the output buffer of its connection. No attempt can
/// succeed under these writes, and each one forks.
fn an_output_buffer_that_is_too_small_is_named_and_not_met_without_end(kind: Kind) {
    let limited =
        primary(kind).config("client-output-buffer-limit", "replica 8mb 0 0").config("repl-backlog-size", "1mb");
    let primary = limited.start().unwrap();
    fill(&primary, 48, 1);
    let server = Server::start(kind).unwrap();
    let source = Source::start(&primary, &["--memory", "16MiB", "--slot-size", "64KiB"]);
    let (flood, began) = (Flood::start(&primary), Instant::now());

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
    // Five at once, one more in each `--fork-interval`, and the one that may begin now.
    let (forks, most) = (syncs(&primary).0, 6 + began.elapsed().as_secs() / FORK_INTERVAL.as_secs());
    assert!((2..=most).contains(&forks), "{forks} forks, and {most} are the most");
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

// The default upload limit: a sync of a distant replica stays in the background of the primary's cable. What its
// clients notice is measured by `remora-bench feel`. Needs root, for network namespaces.

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

// What a primary does because a replica is attached, and what a source makes of it: the lines of the table in
// docs/reference/primary.md that no other file has. `shutdown-timeout` is an hour here, so that a server that waits
// for a source does not end in a test.

/// A server that waits for its replicas for an hour.
fn patient(builder: Builder) -> Builder {
    builder.config("shutdown-timeout", 3600).config("repl-ping-replica-period", 3600)
}

fn patient_primary(kind: Kind) -> Builder {
    patient(crate::kit::primary(kind))
}

/// Waits until the server has ended, as it says with success.
#[track_caller]
fn has_ended(server: &mut Server) {
    let ended = wait_until("the primary to end", LONG, || Ok(server.ended()?.ok_or("it runs".to_owned())));
    assert!(ended.as_ref().is_ok_and(|status| status.success()), "{ended:?}\n{}", server.log());
}

/// Asks the server to end, and waits for nothing.
fn shut_down(server: &Server, save: &str) {
    server.client().unwrap().send(&["SHUTDOWN", save]).unwrap();
}

/// How many replicas the server counts.
fn wait_for_replicas(server: &Server, wanted: u64) {
    wait_until("the server's replicas", LONG, || {
        let connected = number(server, "connected_slaves");
        Ok(if connected == wanted { Ok(()) } else { Err(format!("{connected}: {}", server.fact("slave0")?)) })
    })
    .unwrap();
}

/// Gives the primary a stream. One that has none is at offset 0, which every replica has acknowledged.
fn written_to(primary: &Server) {
    give_a_backlog(primary);
    primary.client().unwrap().ok(&["SET", "written", "1"]).unwrap();
}

/// Writes one number after the other, until the server ends. Returns the last one that it has acknowledged.
fn write_until_the_end(server: &Server) -> thread::JoinHandle<u64> {
    let mut client = server.client().unwrap();
    let mut last = 0;
    let started = std::sync::mpsc::channel();
    let writer = thread::spawn(move || {
        while client.ok(&["SET", "count", &(last + 1).to_string()]).is_ok() {
            last += 1;
            let _ = started.0.send(());
        }
        last
    });
    started.1.recv().unwrap();
    writer
}

#[test]
#[ignore = "long: make test-all"]
fn a_primary_with_a_source_ends_at_once_and_nothing_is_lost_quiet_and_under_writes() {
    for (kind, writes) in require::kinds().into_iter().flat_map(|kind| [(kind, false), (kind, true)]) {
        let mut primary = patient_primary(kind).start().unwrap();
        fill_every_type(&mut primary.client().unwrap(), 31).unwrap();
        written_to(&primary);
        let mut source = Source::start(&primary, &["--memory", "128MiB"]);
        let server = Server::start(kind).unwrap();
        let mut agent = source.replica(&server, &["--stay"]);
        agent.wait_for_event("in_step", LONG).unwrap();
        let writer = writes.then(|| write_until_the_end(&primary));
        shut_down(&primary, "SAVE");
        has_ended(&mut primary);
        let acknowledged = writer.map_or(0, |writer| writer.join().unwrap());
        source.agent.wait_for_event("shutdown_seen", LONG).unwrap();

        primary.restart().unwrap();
        agent.wait_for_success(LONG).unwrap();
        assert_same_data(&primary, &server);
        assert_eq!(number(&primary, "sync_full"), 0, "{kind}: the source had every byte\n{}", source.agent.output());
        if writes {
            let text = server.client().unwrap().text(&["GET", "count"]).unwrap();
            assert!(text.parse::<u64>().unwrap() >= acknowledged, "{kind}: {text}, {acknowledged} were acknowledged");
        }
        assert_eq!(source.agent.output().matches("the stream broke").count(), 0, "{}", source.agent.output());
    }
}

#[test]
#[ignore = "long: make test-all"]
fn sigterm_ends_a_primary_with_a_source_too_by_tls_and_by_two_channels() {
    for kind in require::kinds() {
        let (stage, mut servers) = (Stage::new(), vec![(patient_primary(kind), Vec::new())]);
        if kind.speaks_tls() {
            let (tls, _) = remora_lab::server::certificates(stage.folder(), &[]).unwrap();
            let ca = tls.ca.display().to_string();
            servers.push((
                patient_primary(kind).tls(tls).config("tls-auth-clients", "no"),
                vec!["--tls-ca".to_owned(), ca],
            ));
        }
        if kind == Kind::Valkey9 {
            servers.push((patient_primary(kind).config("dual-channel-replication-enabled", "yes"), Vec::new()));
        }
        for (builder, options) in servers {
            let mut primary = builder.start().unwrap();
            fill_keys(&primary, 100, "x");
            written_to(&primary);
            let options: Vec<&str> = options.iter().map(String::as_str).chain(["--eager"]).collect();
            let url = primary.tls_url().unwrap_or_else(|| primary.url());
            let mut source = stage.source(&url, &options);
            source.wait_for_snapshot();
            online(&primary);
            primary.stop(LONG).unwrap();
            says(&source.agent.output(), &["has closed its link"]);
        }
    }
}

/// A native replica that stands still makes the primary wait. The source comes back when that was called off.
#[test]
#[ignore = "long: make test-all"]
fn a_shutdown_that_is_called_off_costs_no_copy_and_wait_never_counts_the_source() {
    for kind in require::kinds() {
        let primary = patient_primary(kind).start().unwrap();
        let mut source = attached(&primary);
        let mut still = Server::start(kind).unwrap();
        still.replicate(&primary).unwrap();
        still.wait_for_link(LONG).unwrap();
        wait_for_replicas(&primary, 2);
        still.pause().unwrap();
        let mut client = primary.client().unwrap();
        client.ok(&["SET", "not", "acknowledged"]).unwrap();
        let counts = || ["sync_full", "sync_partial_ok"].map(|name| number(&primary, name));
        let before = counts();
        for round in 1..=2 {
            shut_down(&primary, "NOSAVE");
            wait_for_replicas(&primary, 1);
            primary.client().unwrap().ok(&["SHUTDOWN", "ABORT"]).unwrap();
            wait_for_replicas(&primary, 2);
            assert_eq!(counts(), [before[0], before[1] + round], "{kind}: {}", primary.log());
        }
        source.agent.wait_for_event("stream_resumed", LONG).unwrap();
        client.ok(&["SET", "after", "that"]).unwrap();
        assert_eq!(client.int(&["WAIT", "1", "1000"]).unwrap(), 0, "{kind}: one stands still, one is a source");
        let server = Server::start(kind).unwrap();
        source.replicate(&server, &[]);
        assert_same_data(&primary, &server);
        still.resume().unwrap();
    }
}

#[test]
#[ignore = "long: make test-all"]
fn a_primary_ends_at_once_while_a_snapshot_is_taken_with_the_module_and_without() {
    for (kind, module) in crate::kit::kinds_and_module() {
        let mut primary = crate::kit::with_or_without(patient_primary(kind), module);
        fill_keys(&primary, 3000, "x");
        written_to(&primary);
        primary.client().unwrap().ok(&["SAVE"]).unwrap();
        primary.configure("rdb-key-save-delay", "20000").unwrap();
        let source = Source::start(&primary, &["--memory", "64MiB", "--module-capture", "server"]);
        let server = Server::start(kind).unwrap();
        let mut agent = source.replica(&server, &["--retry-for", "600s"]);
        wait_until("the snapshot to begin", LONG, || {
            let saves = primary.info("persistence")?.get("rdb_bgsave_in_progress").unwrap_or_default().to_owned();
            Ok(if saves == "1" && number(&primary, "connected_slaves") == 1 { Ok(()) } else { Err(saves) })
        })
        .unwrap();
        primary.stop(LONG).unwrap();
        says(&source.agent.output(), &["closes its links"]);
        primary.restart().unwrap();
        succeeds(&mut agent, &server);
        assert_same_data(&primary, &server);
        assert!(!source.agent.output().contains("the module failed"), "{}", source.agent.output());
    }
}

/// What is kept for a server that is away is a link too, of the replica's agent.
#[test]
fn a_primary_ends_at_once_while_its_backlog_is_kept_for_a_hand_off() {
    for kind in require::kinds() {
        let mut scene = by_file::Scene::with_data(patient_primary(kind));
        give_a_backlog(&scene.primary);
        // What a pin needs before the offset that it keeps.
        crate::kit::load_small(&scene.primary, 1000, 2000);
        let server = scene.server(quick(kind));
        let mut agent = scene.deliver_to_new(&server, &[]);
        scene.wait_for_the_command(&mut agent);
        wait_for_replicas(&scene.primary, 2);
        scene.primary.stop(LONG).unwrap();
        says(&agent.output(), &["the link that keeps its backlog for replicas is closed"]);
        agent.kill().unwrap();
    }
}

#[test]
#[ignore = "long: make test-all"]
fn a_failover_that_only_a_source_makes_possible_is_ended_and_one_to_a_replica_succeeds() {
    for kind in require::kinds() {
        let mut primary = patient_primary(kind).start().unwrap();
        let mut source = attached(&primary);
        // The source has looked by then.
        wait_for_replicas(&primary, 1);
        primary.client().unwrap().ok(&["FAILOVER"]).unwrap();
        source.agent.wait_for_event("failover_ended", LONG).unwrap();
        assert_eq!(primary.fact("master_failover_state").unwrap(), "no-failover");
        primary.client().unwrap().ok(&["SET", "writes", "go on"]).unwrap();

        let native = Server::start(kind).unwrap();
        native.replicate(&primary).unwrap();
        native.wait_for_link(LONG).unwrap();
        primary.client().unwrap().ok(&["FAILOVER"]).unwrap();
        wait_until("the replica to take over", LONG, || {
            let role = native.fact("role")?;
            Ok(if role == "master" { Ok(()) } else { Err(role) })
        })
        .unwrap();
        primary.wait_for_link(LONG).unwrap();
        source.agent.wait_for_event("history_changed", LONG).unwrap();
        primary.stop(LONG).unwrap();
    }
}

/// Offset 0 is acknowledged by every replica: the server hands over to the source at once, which has no port.
#[test]
fn a_failover_of_a_primary_without_a_stream_is_ended_too() {
    for kind in require::kinds() {
        let primary = patient_primary(kind).start().unwrap();
        let mut source = Source::start(&primary, &["--memory", "16MiB", "--eager"]);
        source.wait_for_snapshot();
        online(&primary);
        primary.client().unwrap().ok(&["FAILOVER"]).unwrap();
        source.agent.wait_for_event("failover_ended", LONG).unwrap();
        assert_eq!(primary.fact("master_failover_state").unwrap(), "no-failover");
        assert_eq!(primary.fact("role").unwrap(), "master");
        primary.client().unwrap().ok(&["SET", "writes", "go on"]).unwrap();
    }
}

#[test]
fn a_failover_that_a_source_may_not_end_is_named_with_the_command_that_does() {
    for kind in require::kinds() {
        let rules = "+ping +info +replconf +psync +config|get";
        let primary = patient_primary(kind).user("source", "secret", rules).start().unwrap();
        let stage = Stage::new();
        let password = stage.secret("password", "secret");
        let login = ["--user", "source", "--password-file", &password, "--eager"];
        let mut source = stage.source(&primary.url(), &login);
        source.wait_for_snapshot();
        online(&primary);
        primary.client().unwrap().ok(&["SET", "written", "1"]).unwrap();
        primary.client().unwrap().ok(&["FAILOVER"]).unwrap();
        let line = source.agent.wait_for_event("failover_waits", LONG).unwrap();
        says(&line, &["FAILOVER ABORT", "+failover"]);
        assert_eq!(primary.fact("master_failover_state").unwrap(), "waiting-for-sync");
        primary.client().unwrap().ok(&["FAILOVER", "ABORT"]).unwrap();
    }
}

#[test]
#[ignore = "long: make test-all"]
fn the_primary_lists_a_source_without_a_port_and_keeps_its_backlog_for_it() {
    for kind in require::kinds() {
        let primary = patient_primary(kind).config("repl-backlog-ttl", 1).start().unwrap();
        let source = attached(&primary);
        let line = online(&primary);
        assert!(line.contains(",port=0,") && line.contains("offset=0,"), "{line}");
        let role = primary.client().unwrap().list(&["ROLE"]).unwrap();
        let replicas = format!("{:?}", role[2]);
        // Its address, its port and its offset: "0" and "0".
        assert_eq!(replicas.matches("Bulk([48])").count(), 2, "{replicas}");
        assert_eq!(number(&primary, "connected_slaves"), 1);
        // Three times as long as the primary keeps a backlog without replicas.
        thread::sleep(Duration::from_secs(3));
        assert_eq!(number(&primary, "repl_backlog_active"), 1, "{kind}");
        source.stop();
        wait_until("the backlog to be released", LONG, || {
            let active = number(&primary, "repl_backlog_active");
            Ok(if active == 0 { Ok(()) } else { Err("it is kept".to_owned()) })
        })
        .unwrap();
    }
}

#[test]
#[ignore = "long: make test-all"]
fn a_source_outlasts_client_pause() {
    for kind in require::kinds() {
        let primary = patient_primary(kind).start().unwrap();
        let mut source = attached(&primary);
        for mode in ["WRITE", "ALL"] {
            primary.client().unwrap().ok(&["CLIENT", "PAUSE", "2000", mode]).unwrap();
            primary.client().unwrap().ok(&["SET", "written", mode]).unwrap();
        }
        let end = number(&primary, "master_repl_offset");
        source.wait_for_status("all writes", |status| status["generation"]["offset_now"].as_u64() == Some(end));
        assert_eq!(source.agent.output().matches("the stream broke").count(), 0, "{}", source.agent.output());
        assert!(source.agent.ended().unwrap().is_none());
    }
}

#[test]
#[ignore = "long: make test-all"]
fn a_manual_failover_of_a_cluster_goes_to_the_replica_beside_a_source() {
    for kind in require::kinds() {
        let cluster = start_cluster(None, kind, 3, 1);
        let shard = &cluster.shards[0];
        let stage = Stage::new();
        let mut source = stage.source(&shard.primary.url(), &["--eager"]);
        source.wait_for_snapshot();
        online_beside(&shard.primary);
        shard.replicas[0].client().unwrap().ok(&["CLUSTER", "FAILOVER"]).unwrap();
        wait_until("the replica to be promoted", LONG, || {
            let role = shard.replicas[0].fact("role")?;
            Ok(if role == "master" { Ok(()) } else { Err(role) })
        })
        .unwrap();
        source.agent.wait_for_event("history_changed", LONG).unwrap();
        let mut agent = source.agent;
        agent.signal(Signal::TERM).unwrap();
        ends(&mut agent, 0);
    }
}

/// Waits until the primary has a native replica and a source.
fn online_beside(primary: &Server) {
    wait_for_replicas(primary, 2);
    wait_until("both to be online", LONG, || {
        let lines = [primary.fact("slave0")?, primary.fact("slave1")?];
        let online = lines.iter().all(|line| line.contains("state=online"));
        Ok(if online { Ok(()) } else { Err(lines.join(" ")) })
    })
    .unwrap();
}

// `remora source --tune-server`: two settings of the server, changed for the moment of its fork.

/// The default of `repl-diskless-sync-delay`, in seconds.
const DELAY: u64 = 5;

/// A server with the settings as they come: it waits, and compresses.
fn as_it_comes(kind: Kind) -> Builder {
    Server::builder(kind)
        .config("repl-diskless-sync", "yes")
        .config("repl-diskless-sync-delay", DELAY.to_string())
        .config("rdbcompression", "yes")
}

fn settings(server: &Server) -> [String; 2] {
    ["repl-diskless-sync-delay", "rdbcompression"].map(|name| server.configured(name).unwrap())
}

/// Waits until the settings have these values.
fn wait_for_settings(server: &Server, wanted: [&str; 2]) {
    wait_until("the settings", LONG, || {
        let settings = settings(server);
        Ok(if settings == wanted { Ok(()) } else { Err(format!("{settings:?}")) })
    })
    .unwrap();
}

/// The record files in a folder.
fn records(folder: &Path) -> Vec<String> {
    let names = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    names.filter(|name| name.ends_with(".json")).collect()
}

/// What a server logs that waits for further replicas before it forks.
const WAITS: &str = "Delay next BGSAVE";

/// How long an agent took that says `load`ed and followed.
fn made(source: &Source, replica: &Server) -> (Duration, String) {
    let began = Instant::now();
    let mut agent = source.replica(replica, &[]);
    succeeds(&mut agent, replica);
    (began.elapsed(), agent.output())
}

#[test]
fn a_tuned_server_neither_waits_nor_compresses_and_has_its_settings_back_after_the_fork() {
    for kind in require::kinds() {
        let (primary, replica) = (as_it_comes(kind).start().unwrap(), Server::start(kind).unwrap());
        // One letter over and over: compressed it would be a few kilobytes.
        load(&primary, 8, 1 << 20);
        let stage = Stage::new();
        let folder = stage.path("state");
        let mut source = Source::start(&primary, &["--memory", "64MiB", "--tune-server", "--state-dir", &folder]);
        let (_, said) = made(&source, &replica);
        assert!(!primary.log().contains(WAITS), "{kind}: {said}\n{}", primary.log());
        assert!(!said.contains("--tune-server"), "{kind}: {said}");
        assert_same_data(&primary, &replica);
        wait_for_settings(&primary, [&DELAY.to_string(), "yes"]);
        let bytes = source.status()["generation"]["snapshot_bytes"].as_u64().unwrap();
        assert!(bytes > 8 << 20, "{kind}: a snapshot of {bytes} bytes is compressed");
        wait_until("the record to be removed", LONG, || {
            let left = records(Path::new(&folder));
            Ok(if left.is_empty() { Ok(()) } else { Err(format!("{left:?}")) })
        })
        .unwrap();
        source.agent.kill().unwrap();
    }
}

#[test]
#[ignore = "long: make test-all"]
fn a_replica_that_waits_for_the_servers_delay_is_told_of_it_and_of_the_switch() {
    for kind in require::kinds() {
        let (primary, replica) = (as_it_comes(kind).start().unwrap(), Server::start(kind).unwrap());
        fill_keys(&primary, 10, "x");
        let source = Source::start(&primary, &["--memory", "64MiB"]);
        let (took, said) = made(&source, &replica);
        // The server looks once in a second whether its delay is over.
        assert!(took > Duration::from_secs(DELAY - 2), "{kind}: it took {took:?} only");
        says(&primary.log(), &[WAITS]);
        says(&said, &["the server waits 5 s before it forks", "repl-diskless-sync-delay", "--tune-server"]);
        assert_eq!(settings(&primary), ["5", "yes"]);
    }
}

/// A primary whose child saves the data set to its file for a long time, so that it forks for no replica meanwhile.
fn busy(kind: Kind) -> Server {
    let primary = as_it_comes(kind).start().unwrap();
    fill_keys(&primary, 1000, "x");
    primary.configure("rdb-key-save-delay", "10000").unwrap();
    primary.client().unwrap().ok(&["BGSAVE"]).unwrap();
    primary
}

/// Such a primary with a source that has changed its settings and waits for the fork, and the source's state folder.
fn tuned(kind: Kind) -> (Server, Source, TempDir) {
    let (primary, state) = (busy(kind), tempfile::tempdir().unwrap());
    let folder = state.path().display().to_string();
    let source = Source::start(&primary, &["--memory", "64MiB", "--eager", "--tune-server", "--state-dir", &folder]);
    wait_for_settings(&primary, ["0", "no"]);
    (primary, source, state)
}

#[test]
fn what_a_killed_source_has_changed_the_next_one_puts_back() {
    for kind in require::kinds() {
        let (primary, mut source, state) = tuned(kind);
        source.agent.kill().unwrap();
        assert_eq!(settings(&primary), ["0", "no"]);
        assert_eq!(records(state.path()).len(), 1);
        // It tunes nothing itself.
        let source =
            Source::start(&primary, &["--memory", "64MiB", "--state-dir", &state.path().display().to_string()]);
        assert_eq!(settings(&primary), ["5", "yes"], "{kind}: {}", source.agent.output());
        assert_eq!(records(state.path()), [""; 0]);
    }
}

#[test]
fn a_source_that_is_stopped_before_the_fork_puts_the_settings_back() {
    for kind in require::kinds() {
        let (primary, source, state) = tuned(kind);
        // Another client has the server note its settings meanwhile, as Sentinels do.
        primary.client().unwrap().ok(&["CONFIG", "REWRITE"]).unwrap();
        let file = primary.folder().join("server.conf");
        let noted = || {
            let text = std::fs::read_to_string(&file).unwrap();
            ["repl-diskless-sync-delay 0", "rdbcompression no"].map(|line| text.contains(line))
        };
        assert_eq!(noted(), [true, true]);
        source.stop();
        assert_eq!(noted(), [false, false], "{kind}: a restart would bring them back");
        assert_eq!(settings(&primary), ["5", "yes"]);
        assert_eq!(records(state.path()), [""; 0]);
    }
}

#[test]
#[ignore = "long: make test-all"]
fn a_setting_that_another_client_changes_meanwhile_is_left_as_it_is() {
    for kind in require::kinds() {
        let (primary, mut source, _state) = tuned(kind);
        primary.configure("repl-diskless-sync-delay", "2").unwrap();
        primary.configure("rdb-key-save-delay", "0").unwrap();
        source.wait_for_snapshot();
        wait_for_settings(&primary, ["2", "yes"]);
        source.agent.wait_for_line("was changed by another client meanwhile", LONG).unwrap();
    }
}

#[test]
fn without_the_right_to_change_settings_the_snapshot_is_taken_as_ever_and_the_rule_is_named() {
    for kind in require::kinds() {
        let rules = "-@all +ping +info +replconf +psync +config|get";
        let primary = as_it_comes(kind).config("repl-diskless-sync-delay", "0").user("remora", "pw", rules);
        let (primary, replica) = (primary.start().unwrap(), Server::start(kind).unwrap());
        fill(&primary, 1, 1);
        let stage = Stage::new();
        let (folder, file) = (stage.path("state"), stage.secret("password", "pw"));
        let args = ["--user", "remora", "--password-file", &file, "--tune-server", "--state-dir", &folder];
        let source = stage.source(&primary.url(), &args);
        succeeds(&mut stage.replica(&replica.url(), source.address, &[]), &replica);
        says(&source.agent.output(), &["the server refuses CONFIG SET", "+config|set"]);
        assert_same_data(&primary, &replica);
        assert_eq!(settings(&primary), ["0", "yes"]);
        assert_eq!(records(Path::new(&folder)), [""; 0]);
    }
}

/// A server that follows `source`'s stream through an agent that stays.
fn staying(source: &Source, kind: Kind) -> (Server, Agent) {
    let server = Server::start(kind).unwrap();
    let mut agent = source.replica(&server, &["--stay"]);
    agent.wait_for_event("in_step", LONG).unwrap();
    (server, agent)
}

/// A primary with every type in it.
fn filled(kind: Kind) -> Server {
    let server = primary(kind).config("repl-ping-replica-period", 3600).start().unwrap();
    fill_every_type(&mut server.client().unwrap(), 31).unwrap();
    server
}

/// A replica of `primary`, by the servers' own replication.
fn native_replica(primary: &Server, name: &str, value: &str) -> Server {
    let plan = crate::kit::primary(primary.kind()).config("repl-ping-replica-period", 3600).config(name, value);
    let server = plan.start().unwrap();
    server.replicate(primary).unwrap();
    server.wait_for_link(LONG).unwrap();
    server
}

/// Waits until the agent has handed its server over. If the agent feeds its server instead, so that `fed` is true,
/// stops the agent as an operator would.
fn handed_over(agent: &mut Agent, fed: impl Fn() -> bool) {
    let look = || {
        let done = agent.ended()?.is_some() || fed();
        Ok(if done { Ok(()) } else { Err("neither handed over nor fed".to_owned()) })
    };
    wait_until("the server to be handed over", LONG, look).unwrap();
    agent.signal(Signal::TERM).unwrap();
    agent.wait_for_success(LONG).unwrap();
}

fn set(server: &Server, database: &str, key: &str) {
    let mut client = server.client().unwrap();
    client.ok(&["SELECT", database]).unwrap();
    client.ok(&["SET", key, "1"]).unwrap();
}

fn exists(server: &Server, database: &str, key: &str) -> bool {
    let mut client = server.client().unwrap();
    client.ok(&["SELECT", database]).unwrap();
    client.int(&["EXISTS", key]).unwrap() == 1
}

#[test]
#[ignore = "long: make test-all"]
fn a_primary_that_is_shut_down_and_started_again_continues_its_replicas() {
    for kind in require::kinds() {
        let mut primary = filled(kind);
        let mut source = Source::start(&primary, &["--memory", "128MiB"]);
        let (server, mut agent) = staying(&source, kind);
        set(&primary, "0", "before");
        // A primary that starts again has no backlog: it continues only replicas that had received everything.
        assert_same_data(&primary, &server);
        primary.restart_saved(LONG).unwrap();
        for number in 0..100 {
            set(&primary, "3", &format!("after {number}"));
        }
        handed_over(&mut agent, || exists(&server, "3", "after 99"));
        assert_same_data(&primary, &server);
        assert_eq!(number(&primary, "sync_full"), 0, "{kind}: a full copy since the restart");
        source.agent.wait_for_event("history_changed", LONG).unwrap();
        assert_eq!(server.fact("master_port").unwrap(), primary.port().to_string());
    }
}

/// Well below the minute for which a source tries to resume a broken stream.
const SOON: Duration = Duration::from_secs(30);

#[test]
#[ignore = "long: make test-all"]
fn a_primary_that_starts_again_with_older_data_is_not_asked_again_and_again_for_the_old_stream() {
    at_once(require::kinds(), |kind| {
        let mut primary = filled(kind);
        primary.client().unwrap().ok(&["SAVE"]).unwrap();
        let mut source = Source::start(&primary, &["--memory", "128MiB"]);
        let (server, mut agent) = staying(&source, kind);
        set(&primary, "0", "not saved");
        assert_same_data(&primary, &server);
        // Valkey cannot write the data for a replica that does not say its version, since fields of hashes expire: it
        // answers +FULLRESYNC and closes the connection.
        primary.restart().unwrap();
        source.agent.wait_for_line("no longer reaches back", SOON).unwrap();
        // The primary would not continue the server, which loads another snapshot of the source.
        agent.wait_for_event("loading_again", LONG).unwrap();
        wait_until("the server to be fed again", LONG, || {
            let times = agent.output().matches("in step; staying").count();
            Ok(if times == 2 { Ok(()) } else { Err(agent.output()) })
        })
        .unwrap();
        assert_same_data(&primary, &server);
        assert!(!exists(&server, "0", "not saved"), "{kind}");
        agent.signal(Signal::TERM).unwrap();
        agent.wait_for_success(LONG).unwrap();
        assert_same_data(&primary, &server);
        // The answer to the source, and its snapshot.
        assert!(number(&primary, "sync_full") <= 2, "{kind}: {}", primary.log());
    });
}

#[test]
#[ignore = "long: make test-all"]
fn a_server_that_joins_after_the_change_gets_a_snapshot_of_the_new_history() {
    for kind in require::kinds() {
        let mut primary = filled(kind);
        let mut source = Source::start(&primary, &["--memory", "128MiB"]);
        let (_server, mut agent) = staying(&source, kind);
        primary.restart_saved(LONG).unwrap();
        set(&primary, "0", "after");
        source.agent.wait_for_event("history_changed", LONG).unwrap();
        agent.wait_for_success(LONG).unwrap();

        let late = Server::start(kind).unwrap();
        source.replicate(&late, &[]);
        let agreement = assert_same_data(&primary, &late);
        assert_eq!(source.snapshots_taken(), 2, "{kind}");
        assert_eq!(source.status()["generation"]["replid"], agreement.replid, "{kind}");
        assert_eq!(number(&primary, "sync_full"), 1, "{kind}: the second snapshot's alone");
    }
}

#[test]
#[ignore = "long: make test-all"]
fn a_captured_replica_that_is_promoted_does_not_give_its_new_writes_to_replicas_of_its_former_primary() {
    for kind in require::kinds() {
        let top = filled(kind);
        let captured = native_replica(&top, "repl-diskless-sync", "yes");
        let announced = top.address().to_string();
        let mut source = Source::start(&captured, &["--memory", "128MiB", "--announce", &announced]);
        let (server, mut agent) = staying(&source, kind);
        set(&top, "0", "before");
        assert_same_data(&top, &captured);
        let before = syncs(&top);

        // From here on the two servers have separate histories, with different bytes at the same offsets.
        captured.client().unwrap().ok(&["REPLICAOF", "NO", "ONE"]).unwrap();
        set(&captured, "0", "b-only-key");
        set(&top, "1", "a-only-key");
        set(&top, "1", "one more");
        handed_over(&mut agent, || exists(&server, "0", "b-only-key"));

        assert_same_data(&top, &server);
        assert!(exists(&server, "1", "a-only-key") && !exists(&server, "0", "b-only-key"), "{kind}");
        assert_eq!(server.fact("master_port").unwrap(), top.port().to_string());
        assert_eq!(syncs(&top), (before.0, before.1 + 1), "{kind}: no full copy");
        source.agent.wait_for_event("history_changed", LONG).unwrap();
    }
}

#[test]
#[ignore = "long: make test-all"]
fn a_captured_replica_that_is_promoted_takes_over_the_servers_that_were_fed_from_it() {
    for (kind, two_channels) in [(require::redis(), "no"), (require::valkey(), "no"), (require::valkey(), "yes")] {
        let Some(kind) = kind else { continue };
        let top = filled(kind);
        let option = if kind == Kind::Valkey9 { "dual-channel-replication-enabled" } else { "repl-diskless-sync" };
        let captured = native_replica(&top, option, if kind == Kind::Valkey9 { two_channels } else { "yes" });
        let mut source = Source::start(&captured, &["--memory", "128MiB"]);
        let (server, mut agent) = staying(&source, kind);
        set(&top, "0", "before");
        assert_same_data(&top, &captured);
        let before = syncs(&captured);

        captured.client().unwrap().ok(&["REPLICAOF", "NO", "ONE"]).unwrap();
        set(&captured, "2", "after");
        handed_over(&mut agent, || exists(&server, "2", "after"));

        assert_same_data(&captured, &server);
        assert!(exists(&server, "2", "after"), "{kind}");
        assert_eq!(number(&captured, "sync_full"), before.0, "{kind}: no full copy");
        source.agent.wait_for_event("history_changed", LONG).unwrap();
        assert_eq!(server.fact("master_port").unwrap(), captured.port().to_string());
    }
}

#[test]
fn a_promotion_in_the_middle_of_writes_loses_none_of_them() {
    for kind in require::kinds() {
        let top = filled(kind);
        let captured = native_replica(&top, "repl-diskless-sync", "yes");
        let mut source = Source::start(&captured, &["--memory", "128MiB"]);
        let (server, mut agent) = staying(&source, kind);
        let before = syncs(&captured);
        let writer = steady_writer(&top);
        writer.wait_for(2_000);
        // The stream may be cut in the middle of a command or of a transaction.
        captured.client().unwrap().ok(&["REPLICAOF", "NO", "ONE"]).unwrap();
        set(&captured, "2", "after");
        handed_over(&mut agent, || exists(&server, "2", "after"));
        writer.stop().unwrap();

        assert_same_data(&captured, &server);
        assert_eq!(number(&captured, "sync_full"), before.0, "{kind}: no full copy");
        source.agent.wait_for_event("history_changed", LONG).unwrap();
    }
}

// The source's name leads to the source of another data set in the middle of a run: its address was given to another
// host, or the name stands for two sources. Nothing of it is taken, its primary does not fork, and the run goes on
// when the name leads to the right source again.

/// What a source of another data set is refused with.
pub(crate) const ANOTHER: &str = "is the source of another data set";

/// Random data in the right primary, in MiB: 32 keys.
const HISTORY_MEBIBYTES: usize = 4;

/// How long the right primary takes for each key of its snapshot, in microseconds: three seconds in all.
const KEY_TIME: &str = "100000";

/// Slots after which a test interferes: a quarter of the snapshot.
const A_QUARTER: u64 = 16;

/// A primary whose snapshots take seconds.
fn slow(kind: Kind) -> Server {
    let right = primary(kind).start().unwrap();
    fill(&right, HISTORY_MEBIBYTES, 1);
    right.configure("rdb-key-save-delay", KEY_TIME).unwrap();
    right
}

/// A primary with other data.
pub(crate) fn foreign(kind: Kind) -> Server {
    let server = quick(kind).start().unwrap();
    server.client().unwrap().ok(&["SET", "foreign", "data"]).unwrap();
    server
}

pub(crate) fn has_foreign_data(server: &Server) -> bool {
    server.client().unwrap().int(&["EXISTS", "foreign"]).is_ok_and(|count| count > 0)
}

fn history(server: &Server) -> String {
    server.fact("master_replid").unwrap()
}

/// Kills a source, and starts one of another server at its address.
pub(crate) fn replaced(stage: &Stage, mut source: Source, by: &Server, more: &[&str]) -> Source {
    let address: SocketAddr = source.address;
    source.agent.kill().unwrap();
    stage.source_at(&address.to_string(), None, &by.url(), more)
}

/// An agent whose server has got a part of the snapshot.
fn in_the_middle(source: &Source, server: &Server, more: &[&str]) -> Agent {
    let mut agent = source.replica(server, more);
    source.wait_for_slots(&mut agent, A_QUARTER);
    agent
}

#[test]
#[ignore = "long: make test-all"]
fn a_server_in_the_middle_of_its_load_gets_nothing_of_it_and_is_in_step_once_the_right_source_is_back() {
    for (kind, stay) in require::kinds().into_iter().flat_map(|kind| [(kind, false), (kind, true)]) {
        let (stage, right, other) = (Stage::new(), slow(kind), foreign(kind));
        let server = Server::start(kind).unwrap();
        let source = stage.source(&right.url(), &[]);
        let more: &[&str] = if stay { &["--stay"] } else { &[] };
        let mut agent = in_the_middle(&source, &server, more);
        let before = history(&right);
        let source = replaced(&stage, source, &other, &[]);
        let line = agent.wait_for_line(ANOTHER, LONG).unwrap();
        says(&line, &[&before, &history(&other), &other.url(), &right.url(), &source.address.to_string()]);
        assert_eq!(number(&other, "sync_full"), 0, "the foreign primary has forked");
        right.configure("rdb-key-save-delay", "0").unwrap();
        let _source = replaced(&stage, source, &right, &[]);
        if stay {
            agent.wait_for_event("in_step", LONG).unwrap();
            assert!(!has_foreign_data(&server), "{kind}");
            agent.signal(Signal::TERM).unwrap();
        }
        succeeds(&mut agent, &server);
        assert_same_data(&right, &server);
        assert!(!has_foreign_data(&server), "{kind}");
    }
}

#[test]
#[ignore = "long: make test-all"]
fn a_sync_whose_right_source_does_not_come_back_fails_by_its_name_and_the_server_has_nothing_foreign() {
    at_once(require::kinds(), |kind| {
        let (stage, right, other) = (Stage::new(), slow(kind), foreign(kind));
        let server = Server::start(kind).unwrap();
        let source = stage.source(&right.url(), &[]);
        let mut agent = in_the_middle(&source, &server, &["--stay", "--retry-for", "3s"]);
        let _foreign = replaced(&stage, source, &other, &[]);
        let said = ends(&mut agent, 5);
        says(&said, &[ANOTHER, "--retry-for", &history(&other)]);
        wait_until("the server to answer", LONG, || {
            let loading = server.info("persistence")?.get("loading").unwrap_or_default().to_owned();
            Ok(if loading == "0" { Ok(()) } else { Err(loading) })
        })
        .unwrap();
        assert!(!has_foreign_data(&server), "{kind}");
        assert_eq!(number(&other, "sync_full"), 0, "the foreign primary has forked");
    });
}

/// `--expect-primary` is for every conversation: the address that a later source names counts as that of the first.
#[test]
#[ignore = "long: make test-all"]
fn a_later_source_that_names_an_unexpected_primary_is_refused_though_its_history_is_right() {
    let Some(kind) = require::redis() else { return };
    let (stage, right) = (Stage::new(), slow(kind));
    let server = Server::start(kind).unwrap();
    let source = stage.source(&right.url(), &[]);
    let expected = format!("127.0.0.1:{}", right.port());
    let mut agent = in_the_middle(&source, &server, &["--expect-primary", &expected, "--retry-for", "3s"]);
    let elsewhere = format!("127.0.0.3:{}", right.port());
    let _other = replaced(&stage, source, &right, &["--announce", &elsewhere]);
    says(&ends(&mut agent, 5), &[&elsewhere, &format!("--expect-primary names {expected}")]);
}

/// The primary may begin a history that has nothing in common with the former one. It says so itself.
#[test]
#[ignore = "long: make test-all"]
fn a_primary_that_lost_its_data_is_still_the_primary() {
    for kind in require::kinds() {
        let (stage, mut right) = (Stage::new(), slow(kind));
        let server = Server::start(kind).unwrap();
        let source = stage.source(&right.url(), &[]);
        let mut agent = in_the_middle(&source, &server, &[]);
        let before = history(&right);
        right.restart().unwrap();
        fill_keys(&right, 10, "new");
        assert_ne!(history(&right), before);
        succeeds(&mut agent, &server);
        assert_same_data(&right, &server);
    }
}

#[test]
#[ignore = "long: make test-all"]
fn a_fetch_and_a_backup_in_the_middle_take_nothing_of_it_and_go_on_when_the_right_source_is_back() {
    at_once(require::kinds(), |kind| {
        for command in ["fetch", "backup"] {
            let scene = Scene::new(slow(kind), &[]);
            let to = scene.stage.path(if command == "fetch" { "dump.rdb" } else { "backups" });
            let mut agent = scene.start(command, &to, &[]);
            agent.wait_for_event("snapshot_arrives", LONG).unwrap();
            let args = strs_of(&scene, command, &to);
            let Scene { stage, primary, source } = scene;
            let other = foreign(kind);
            let source = replaced(&stage, source, &other, &[]);
            says(&agent.wait_for_line(ANOTHER, LONG).unwrap(), &[&history(&other), &primary.url()]);
            assert_eq!(number(&other, "sync_full"), 0, "{command}: the foreign primary has forked");
            primary.configure("rdb-key-save-delay", "0").unwrap();
            let source = replaced(&stage, source, &primary, &[]);
            agent.wait_for_success(LONG).unwrap();
            // And one whose right source does not come back.
            primary.configure("rdb-key-save-delay", KEY_TIME).unwrap();
            source.stop();
            let source = stage.source_at(&args.1, None, &primary.url(), &[]);
            let to = stage.path("another");
            let mut again = args.0.clone();
            let at = again.iter().position(|arg| arg == "--to").unwrap();
            again[at + 1].clone_from(&to);
            again.extend(["--retry-for".to_owned(), "2s".to_owned()]);
            let mut agent = stage.start(None, &strs(&again));
            agent.wait_for_event("snapshot_arrives", LONG).unwrap();
            let _foreign = replaced(&stage, source, &other, &[]);
            says(&ends(&mut agent, 5), &[ANOTHER]);
            let rdb = std::fs::read_dir(&to).map_or(0, |folder| {
                folder.filter(|entry| entry.as_ref().is_ok_and(|entry| is_a_snapshot(&entry.path()))).count()
            });
            assert_eq!((rdb, std::path::Path::new(&to).is_file()), (0, false), "{command}");
        }
    });
}

fn is_a_snapshot(path: &std::path::Path) -> bool {
    let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    name.ends_with(".rdb") && !name.starts_with('.')
}

/// The arguments of such a command, and the source's address.
fn strs_of(scene: &Scene, command: &str, to: &str) -> (Vec<String>, String) {
    (scene.args(command, to, &[]), scene.source.address.to_string())
}

#[test]
fn a_backup_with_its_journal_records_nothing_of_it_and_goes_on_with_the_right_one() {
    for kind in require::kinds() {
        let right = primary(kind).start().unwrap();
        fill_keys(&right, 100, "right");
        let scene = Scene::new(right, &[]);
        let to = scene.stage.path("backups");
        let mut agent = scene.start("backup", &to, &["--journal"]);
        agent.wait_for_line("the commands since are recorded", LONG).unwrap();
        let Scene { stage, primary, source } = scene;
        let other = foreign(kind);
        let source = replaced(&stage, source, &other, &[]);
        says(&agent.wait_for_line(ANOTHER, LONG).unwrap(), &[&history(&other), &history(&primary)]);
        assert_eq!(number(&other, "sync_full"), 0, "the foreign primary has forked");
        let source = replaced(&stage, source, &primary, &["--eager"]);
        primary.client().unwrap().ok(&["SET", "after", "1"]).unwrap();
        source.wait_for_status("the backup to record again", |status| {
            status["replicas"].as_array().is_some_and(|replicas| replicas.iter().any(|one| one["phase"] == "stay"))
        });
        // A signal before a new folder has its name would find a snapshot that is not whole.
        wait_until("the folders to be begun", LONG, || {
            let said = agent.output();
            let count = |text: &str| said.matches(text).count();
            let is_done = count("the commands since are recorded") > count("a new folder begins");
            Ok(if is_done { Ok(()) } else { Err(said) })
        })
        .unwrap();
        agent.signal(Signal::TERM).unwrap();
        ends(&mut agent, 0);
        let names = std::fs::read_dir(&to).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
        for name in names.filter(|name| !name.starts_with('.')) {
            assert!(!name.contains(&history(&other)[..8]), "{name} is of the foreign data set");
        }
    }
}
