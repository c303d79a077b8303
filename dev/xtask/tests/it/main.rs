//! The developer commands, as a developer starts them, with a little data and for a short time.

#![allow(clippy::unwrap_used)]

use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};

use remora_lab::require;

/// `xtask` with these arguments, not started yet.
fn xtask(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_xtask"));
    command.args(arguments);
    // The tests of the agents have built it, in the same run of cargo; if not, the command builds it.
    let remora = std::env::current_exe().unwrap().parent().unwrap().parent().unwrap().join("remora");
    if remora.exists() {
        command.env("REMORA", remora);
    }
    command
}

// The soak runs for some events and finds nothing; one that is stopped leaves nothing behind.

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

// The demonstrations run to their end.

#[test]
#[ignore = "long: make test-all"]
fn the_demo_makes_equal_replicas_by_every_method_and_prints_a_table() {
    let Some(_) = require::valkey() else { return };
    let folder = tempfile::tempdir().unwrap();
    let (json, picture) = (folder.path().join("demo.json"), folder.path().join("demo.svg"));
    let mut demo = xtask(&["demo", "--size", "8MiB", "--server", "valkey", "--replicas", "2", "--writes", "200"]);
    let ran = demo.arg("--json").arg(&json).arg("--picture").arg(&picture).output().unwrap();
    let said = format!("{}\n{}", String::from_utf8_lossy(&ran.stdout), String::from_utf8_lossy(&ran.stderr));
    assert!(ran.status.success(), "{}: {said}", ran.status);
    assert!(said.contains("Transports of this machine"), "{said}");
    let drawn = std::fs::read_to_string(picture).unwrap();
    for bar in ["replication, defaults", "Remora, defaults, tuned"] {
        let line = said.lines().find(|line| line.contains(bar) && line.contains('█'));
        assert!(line.is_some() && drawn.contains(bar), "no bar for {bar}: {said}");
    }
    let report: serde_json::Value = serde_json::from_slice(&std::fs::read(json).unwrap()).unwrap();
    for server in report["servers"].as_array().unwrap() {
        let outcomes = server["outcomes"].as_array().unwrap();
        assert_eq!(outcomes.len(), 8, "{server}");
        assert!(outcomes.iter().all(|outcome| outcome["equal"] == true), "{server}");
    }
}

#[test]
#[ignore = "long: make test-all"]
fn the_demo_of_volumes_loses_nothing_and_prints_a_table() {
    let Some(()) = require::nbd_clients() else { return };
    let folder = tempfile::tempdir().unwrap();
    let json = folder.path().join("demo.json");
    let ran = xtask(&["demo-volume", "--size", "32MiB", "--seconds", "1", "--json"]).arg(&json).output().unwrap();
    let said = format!("{}\n{}", String::from_utf8_lossy(&ran.stdout), String::from_utf8_lossy(&ran.stderr));
    assert!(ran.status.success(), "{}: {said}", ran.status);
    let report: serde_json::Value = serde_json::from_slice(&std::fs::read(json).unwrap()).unwrap();
    let rows = report["rows"].as_array().unwrap();
    let checked = rows.iter().filter(|row| row["is_checked"] == true).count();
    assert_eq!((rows.len(), checked), (6, 3), "{report}");
    assert!(rows.iter().all(|row| row["per_second"].as_f64() > Some(0.0)), "{report}");
    if let Some(()) = require::fuse() {
        let files = &report["files"];
        assert!(files["acknowledged"].as_u64() > Some(0) && files["found"] == files["acknowledged"], "{report}");
    }
    let refused = xtask(&["demo-volume", "--size", "1MiB"]).output().unwrap();
    assert!(!refused.status.success());
    assert!(String::from_utf8_lossy(&refused.stderr).contains("not a multiple of 4 MiB"));
}

// Builds share what they compile: a crate has one set of features, whatever is built.

/// The sets of features of each crate. A crate that procedural macros or build scripts use as well may have two.
type Features = BTreeMap<String, BTreeSet<String>>;

/// What `cargo tree` says of a build of these packages, with what it needs of each kind.
fn features(packages: &[&str], kinds: &str) -> Features {
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["tree", "--locked", "--offline", "--prefix", "none", "--format", "{p}|{f}|", "--edges", kinds]);
    let output = cargo.args(packages).current_dir(remora_lab::server::project_root()).output().unwrap();
    assert!(output.status.success(), "{cargo:?}: {}", String::from_utf8_lossy(&output.stderr));
    let mut found = Features::new();
    // "tokio v1.54.1|default,fs| (*)"; of a crate of ours the folder follows its version.
    for line in String::from_utf8(output.stdout).unwrap().lines().filter(|line| !line.is_empty()) {
        let [package, features, _] = line.split('|').collect::<Vec<_>>()[..] else { panic!("{line}") };
        let name = package.split(' ').take(2).collect::<Vec<_>>().join(" ");
        found.entry(name).or_default().insert(features.to_owned());
    }
    found
}

#[test]
fn every_build_compiles_a_crate_with_the_features_that_the_tests_have() {
    let tests = features(&["--workspace"], "normal,build,dev");
    assert!(tests.len() > 300, "{tests:?}");
    let product = ["-p", "remora-agent", "-p", "remora-module"];
    // The benches are built together with what they measure.
    let benches = [&["-p", "remora-bench"], &product[..]].concat();
    let builds: [&[&str]; 5] = [&["--workspace"], &product[..2], &product, &["-p", "xtask"], &benches];
    for build in builds {
        let of_build = features(build, "normal,build");
        assert!(of_build.len() > 200, "{build:?}: {of_build:?}");
        for (name, sets) in of_build {
            let of_tests = &tests[&name];
            assert!(
                sets.is_subset(of_tests),
                "{build:?}: {name} has the features {sets:?}, and {of_tests:?} in the tests: name the missing ones in \
                 dev/features/Cargo.toml"
            );
        }
    }
}
