//! The set-up of a machine.

use std::path::Path;
use std::process::{Command, Stdio};

use remora_lab::{process, require};

#[test]
fn a_second_set_up_needs_no_network() {
    let Some(()) = require::namespaces() else { return };
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let script = root.join("dev/lab/setup/setup");
    // This machine is set up already; otherwise the other tests would not run.
    let mut set_up = Command::new("unshare");
    set_up.args(["--net", "--"]).arg(script).env("CI", "true").stdout(Stdio::piped()).stderr(Stdio::piped());
    let run = process::spawn(set_up).unwrap().wait_with_output().unwrap();
    let said = [run.stdout, run.stderr].concat();
    let said = String::from_utf8_lossy(&said);
    assert!(run.status.success() && said.contains("set-up: ready"), "{}\n{said}", process::in_words(run.status));
    assert!(!said.contains("downloading") && !said.contains("installing"), "{said}");
}
