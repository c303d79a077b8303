//! `remora source --tune-server`: two settings of the server, changed for the moment of its fork.

use std::path::Path;
use std::time::{Duration, Instant};

use remora_lab::server::wait_until;
use remora_lab::{Builder, Kind, Server, assert_same_data, require};
use tempfile::TempDir;

use crate::kit::{LONG, Source, Stage, fill, fill_keys, load, says, succeeds};

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
