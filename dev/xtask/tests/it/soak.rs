//! The soak runs for some events and finds nothing; one that is stopped leaves nothing behind.

use std::io::{BufRead, BufReader};
use std::process::Stdio;

use remora_lab::require;
use rustix::process::{Pid, Signal, kill_process};

use crate::xtask;

#[test]
fn a_short_soak_compares_all_servers_and_finds_nothing() {
    let Some(_) = require::redis() else { return };
    let ran = xtask(&["soak", "--server", "redis", "--events", "6", "--seed", "2", "--minutes", "2"]).output().unwrap();
    let said = format!("{}\n{}", String::from_utf8_lossy(&ran.stdout), String::from_utf8_lossy(&ran.stderr));
    assert!(ran.status.success(), "{}: {said}", ran.status);
    for part in ["soak: seed 2", "6 events", "0 findings", "rest: B equal at"] {
        assert!(said.contains(part), "{part:?} is not in:\n{said}");
    }
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
