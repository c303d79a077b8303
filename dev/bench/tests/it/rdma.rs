//! Reads over RDMA beside perftest's, in the virtual machine that has devices: the cost of the transport's own code.
//!
//! The targets of a release build on a quiet machine (0.9 of `ib_read_bw`, 1.15 times `ib_read_lat`) are judged by
//! `bench/runs`. Here both programs are run and compared, whatever the figures are.

use remora_lab::{RdmaVm, require};
use serde_json::Value;

#[test]
#[ignore = "long: needs the machine with RDMA devices"]
fn reads_are_measured_beside_perftest_in_the_virtual_machine() {
    let Some(machine) = require::rdma_vm() else { return };
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str| folder.path().join(name).display().to_string();
    let (bandwidth, latency) = (file("bandwidth.json"), file("latency.json"));
    let ends = format!("--transports verbs --rdma-source {} --rdma-reader {}", RdmaVm::address(1), RdmaVm::address(0));
    // Both exit with 1 if a target of a release build is missed, which is not checked here.
    let script = format!(
        "{} {ends} --rounds 5 --millis 300 --region-mib 32 --sizes-kib 64,1024 --depths 16 --json {bandwidth}; \
         {} {ends} --rounds 5 --millis 300 --region-mib 32 --sizes 8,4096 --json {latency}; true",
        env!("CARGO_BIN_EXE_read_bandwidth"),
        env!("CARGO_BIN_EXE_read_latency"),
    );
    let machine = machine.nodes(2).writable(folder.path());
    let ran = machine.run(&["bash", "-c", &script]).unwrap();
    let said = format!("{}{}", String::from_utf8_lossy(&ran.stdout), String::from_utf8_lossy(&ran.stderr));
    assert!(ran.status.success(), "{said}");
    println!("{said}");
    for (case, ratio) in [ratios(&bandwidth, &said), ratios(&latency, &said)].concat() {
        assert!(ratio > 0.0 && ratio.is_finite(), "{case}: {ratio}\n{said}");
    }
}

/// The median ratio of each of the two cases.
fn ratios(file: &str, said: &str) -> Vec<(String, f64)> {
    let text = std::fs::read(file).unwrap_or_else(|error| panic!("{file}: {error}\n{said}"));
    let run: Value = serde_json::from_slice(&text).unwrap();
    let comparisons = run["comparisons"].as_array().unwrap();
    assert_eq!(comparisons.len(), 2, "{said}");
    let of = |one: &Value| (one["ours"][1].as_str().unwrap().to_owned(), one["ratio"]["median"].as_f64().unwrap());
    comparisons.iter().map(of).collect()
}
