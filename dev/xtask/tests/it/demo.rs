//! The demonstration runs to its end.

use remora_lab::require;

use crate::xtask;

#[test]
fn the_demo_makes_equal_replicas_by_every_method_and_prints_a_table() {
    let Some(_) = require::valkey() else { return };
    let folder = tempfile::tempdir().unwrap();
    let json = folder.path().join("demo.json");
    let mut demo =
        xtask(&["demo", "--size", "8MiB", "--server", "valkey", "--replicas", "2", "--writes", "200", "--json"]);
    let ran = demo.arg(&json).output().unwrap();
    let said = format!("{}\n{}", String::from_utf8_lossy(&ran.stdout), String::from_utf8_lossy(&ran.stderr));
    assert!(ran.status.success(), "{}: {said}", ran.status);
    assert!(said.contains("Transports of this machine"), "{said}");
    let report: serde_json::Value = serde_json::from_slice(&std::fs::read(json).unwrap()).unwrap();
    for server in report["servers"].as_array().unwrap() {
        let outcomes = server["outcomes"].as_array().unwrap();
        assert_eq!(outcomes.len(), 7, "{server}");
        assert!(outcomes.iter().all(|outcome| outcome["equal"] == true), "{server}");
    }
}
