//! What a primary does because a replica is attached, and what a source makes of it: the lines of the table in
//! docs/reference/primary.md that no other file has. `shutdown-timeout` is an hour here, so that a server that waits
//! for a source does not end in a test.

use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use remora_lab::server::{Builder, wait_until};
use remora_lab::{Kind, Server, assert_same_data, fill_every_type, require};
use rustix::process::Signal;
use tempfile::TempDir;

use crate::by_file;
use crate::kit::{LONG, Source, Stage, ends, fill, fill_keys, load, number, quick, says, start_cluster, succeeds};
use crate::primary::{attached, give_a_backlog, online};

/// A server that waits for its replicas for an hour.
fn patient(builder: Builder) -> Builder {
    builder.config("shutdown-timeout", 3600).config("repl-ping-replica-period", 3600)
}

fn primary(kind: Kind) -> Builder {
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
        let mut primary = primary(kind).start().unwrap();
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
        let (stage, mut servers) = (Stage::new(), vec![(primary(kind), Vec::new())]);
        if kind.speaks_tls() {
            let (tls, _) = remora_lab::tls::certificates(stage.folder(), &[]).unwrap();
            let ca = tls.ca.display().to_string();
            servers.push((primary(kind).tls(tls).config("tls-auth-clients", "no"), vec!["--tls-ca".to_owned(), ca]));
        }
        if kind == Kind::Valkey9 {
            servers.push((primary(kind).config("dual-channel-replication-enabled", "yes"), Vec::new()));
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
        let primary = primary(kind).start().unwrap();
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
        let mut primary = crate::kit::with_or_without(primary(kind), module);
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
        let mut scene = by_file::Scene::with_data(primary(kind));
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
        let mut primary = primary(kind).start().unwrap();
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
        let primary = primary(kind).start().unwrap();
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
        let primary = primary(kind).user("source", "secret", rules).start().unwrap();
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
        let primary = primary(kind).config("repl-backlog-ttl", 1).start().unwrap();
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
        let primary = primary(kind).start().unwrap();
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
        source.stop();
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
