//! RDMA: the tests of [`crate::in_the_machine`] in the virtual machine that has devices, and a machine that has none.

use std::process::Command;
use std::time::Duration;

use remora_lab::require;

use crate::kit::{Stage, says};

/// Four times what the tests take in an emulated machine that has two processors for itself.
const LIMIT: Duration = Duration::from_secs(1_500);

#[test]
#[ignore = "long: needs the machine with RDMA devices"]
fn the_job_is_done_over_rdma_in_the_virtual_machine() {
    // The machine has this host's files, and so its servers.
    let (Some(_), Some(_)) = (require::redis(), require::valkey()) else { return };
    let Some(machine) = require::rdma_vm() else { return };
    let passed = machine.nodes(4).limit(LIMIT).run_ignored_tests("in_the_machine::", 1);
    assert_eq!(passed, 11);
}

#[test]
fn a_machine_without_devices_reports_what_is_missing_and_continues() {
    let stage = Stage::new();
    let said = Command::new(env!("CARGO_BIN_EXE_remora"))
        .args(["devices", "--json"])
        .env("REMORA_RDMA_DISABLE", "1")
        .output()
        .unwrap();
    assert!(said.status.success());
    let report: serde_json::Value = serde_json::from_slice(&said.stdout).unwrap();
    assert!(report["rdma"]["trouble"].as_str().unwrap().contains("unset that variable"));
    assert_eq!(report["shm"]["ready"], true);
    assert_eq!(report["tcp"]["ready"], true);
    says(&stage.end(&["devices"], 0), &["rdma   ", "shm    ready", "tcp    ready"]);
}
