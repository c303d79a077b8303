//! The demonstrations run to their end.

use remora_lab::require;

use crate::xtask;

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
