//! The set-up of a machine.

use std::path::Path;
use std::process::{Command, Stdio};

use remora_lab::{process, require};

/// What `make test` and `make demo` install.
#[test]
fn a_second_set_up_needs_no_network() {
    let Some(()) = require::namespaces() else { return };
    for part in ["--demo", "--test"] {
        needs_no_network(&[part]);
    }
}

#[test]
#[ignore = "long: make test-all"]
fn a_second_set_up_of_everything_needs_no_network() {
    let Some(()) = require::namespaces() else { return };
    needs_no_network(&[]);
}

/// This machine is set up already; otherwise the tests would not run.
#[track_caller]
fn needs_no_network(parts: &[&str]) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let script = root.join("dev/lab/setup/setup");
    let mut set_up = Command::new("unshare");
    set_up.args(["--net", "--"]).arg(script).args(parts).env("CI", "true");
    set_up.stdout(Stdio::piped()).stderr(Stdio::piped());
    let run = process::spawn(set_up).unwrap().wait_with_output().unwrap();
    let said = [run.stdout, run.stderr].concat();
    let said = String::from_utf8_lossy(&said);
    assert!(run.status.success() && said.contains("set-up: ready"), "{}\n{said}", process::in_words(run.status));
    assert!(!said.contains("downloading") && !said.contains("installing"), "{said}");
}
