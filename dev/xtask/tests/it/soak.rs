//! The soak runs for some events and finds nothing; one that is stopped leaves nothing behind.

use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::process::Stdio;

use remora_lab::require;
use rustix::process::{Pid, Signal, kill_process};

use crate::xtask;

#[test]
#[ignore = "long: make test-all"]
fn a_short_soak_compares_all_servers_and_finds_nothing() {
    let Some(_) = require::redis() else { return };
    let ran = xtask(&["soak", "--server", "redis", "--events", "6", "--seed", "2", "--minutes", "2"]).output().unwrap();
    let said = format!("{}\n{}", String::from_utf8_lossy(&ran.stdout), String::from_utf8_lossy(&ran.stderr));
    assert!(ran.status.success(), "{}: {said}", ran.status);
    for part in ["soak: seed 2", "6 events", "0 findings", "rest: B equal at"] {
        assert!(said.contains(part), "{part:?} is not in:\n{said}");
    }
}

/// Runs a soak whose `remora replica` is this shell script. It must end with one finding that says `finding`.
#[track_caller]
fn finds(replica: &str, finding: &str) {
    let folder = tempfile::tempdir().unwrap();
    let mut soak = xtask(&["soak", "--server", "redis", "--events", "1", "--seed", "2"]);
    let remora = soak.get_envs().find_map(|(name, value)| (name == "REMORA").then_some(value?.to_owned()));
    let Some(remora) = remora else { return require::skip("remora is not built yet").unwrap_or_default() };
    let script = folder.path().join("remora");
    let remora = remora.display();
    let text = format!(
        "#!/bin/sh\nif [ \"$1 $2\" != \"replica --server\" ]; then exec {remora} \"$@\"; fi\nremora={remora}\n{replica}\n"
    );
    std::fs::write(&script, text).unwrap();
    std::fs::set_permissions(&script, std::fs::Permissions::from_mode(0o700)).unwrap();
    let logs = folder.path().join("logs");
    let ran = soak.env("REMORA", &script).arg("--logs").arg(&logs).output().unwrap();
    let said = String::from_utf8_lossy(&ran.stdout);
    assert_eq!(ran.status.code(), Some(1), "{said}\n{}", String::from_utf8_lossy(&ran.stderr));
    for part in [finding, "written, 1 finding\n", "--seed 2", &*logs.join("group-1").to_string_lossy()] {
        assert!(said.contains(part), "{part:?} is not in:\n{said}");
    }
    assert!(std::fs::read_to_string(logs.join("group-1/history.log")).unwrap().contains("FINDING"), "{said}");
    assert!(logs.join("group-1/A.log").exists() && logs.join("group-1/001-source").exists(), "{said}");
}

#[test]
#[ignore = "long: make test-all"]
fn an_agent_that_panics_is_a_finding() {
    let Some(_) = require::redis() else { return };
    finds("echo \"thread 'main' panicked at nowhere\" >&2; exit 101", "replica-C panicked");
}

#[test]
#[ignore = "long: make test-all"]
fn a_replica_that_differs_is_a_finding() {
    let Some(_) = require::redis() else { return };
    let script = "\"$remora\" \"$@\" || exit $?
redis-cli -u \"$3\" config set replica-read-only no && redis-cli -u \"$3\" set another value";
    finds(script, "is not an exact copy");
}

#[test]
fn a_soak_that_is_stopped_ends_its_servers_and_removes_its_folders() {
    let Some(_) = require::redis() else { return };
    let temporary = tempfile::tempdir().unwrap();
    let mut soak = xtask(&["soak", "--server", "redis", "--minutes", "2"]);
    soak.env("TMPDIR", temporary.path()).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut soak = soak.spawn().unwrap();
    let mut lines = BufReader::new(soak.stderr.take().unwrap()).lines().map(Result::unwrap);
    let first = lines.find(|line| line.contains("] 1 "));
    assert!(first.is_some(), "the soak ended before its first event");
    kill_process(Pid::from_child(&soak), Signal::TERM).unwrap();
    let rest: Vec<String> = lines.collect();
    assert_eq!(soak.wait().unwrap().code(), Some(143), "{rest:?}");
    assert!(!rest.iter().any(|line| line.contains("FINDING")), "{rest:?}");
    // The folder for sockets belongs to all agents of this user.
    let sockets = format!("remora-{}", rustix::process::geteuid().as_raw());
    let left = std::fs::read_dir(temporary.path()).unwrap().map(|entry| entry.unwrap().file_name());
    let left: Vec<_> = left.filter(|name| *name != *sockets).collect();
    assert!(left.is_empty(), "{left:?}");
}
