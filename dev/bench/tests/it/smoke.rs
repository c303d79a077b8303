//! Every benchmark runs once, with a little data, and every replica that it makes is compared with its primary. (The
//! messenger's has a file of its own, [`crate::messenger`].) The figures say nothing: this is a build with debug assertions, beside other tests.

use std::path::{Path, PathBuf};
use std::process::Command;

use remora_lab::require;
use serde_json::Value;

/// Runs a benchmark to its end. `codes`: the exit codes that are accepted.
#[track_caller]
fn run(program: &str, arguments: &[&str], codes: &[i32]) {
    let mut command = Command::new(program);
    command.args(arguments);
    // The tests of the agents have built it, in the same run of cargo; if not, the benchmark builds it.
    if let Some(remora) = built() {
        command.env("REMORA", remora);
    }
    let ran = command.output().unwrap();
    let said = format!("{}\n{}", String::from_utf8_lossy(&ran.stdout), String::from_utf8_lossy(&ran.stderr));
    assert!(ran.status.code().is_some_and(|code| codes.contains(&code)), "{}: {said}", ran.status);
    for word in ["NOT EQUAL", "failed", "left out"] {
        assert!(!said.contains(word), "{said}");
    }
}

/// The command `remora` of this build, beside the folder of this program.
fn built() -> Option<PathBuf> {
    let program = std::env::current_exe().unwrap();
    Some(program.parent()?.parent()?.join("remora")).filter(|remora| remora.exists())
}

/// The content of the only file of that name below the folder.
fn kept(folder: &Path) -> Value {
    let run = std::fs::read_dir(folder).unwrap().next().unwrap().unwrap().path();
    serde_json::from_slice(&std::fs::read(run.join("run.json")).unwrap()).unwrap()
}

/// Asserts that each of these measurements compared its replicas, and found them equal.
#[track_caller]
fn all_equal<'v>(points: impl IntoIterator<Item = &'v Value>, count: usize) {
    let points: Vec<&Value> = points.into_iter().collect();
    assert_eq!(points.len(), count, "{points:?}");
    for point in points {
        assert_eq!(point["equal"], true, "{point}");
    }
}

#[test]
#[ignore = "long: make test-all"]
fn full_sync_compares_what_every_method_makes() {
    let Some(_) = require::valkey() else { return };
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().display().to_string();
    let small = ["--rounds", "1", "--divide", "64", "--servers", "valkey", "--shapes", "large", "--replicas", "1"];
    // A target that is missed is the code 1.
    run(env!("CARGO_BIN_EXE_full_sync"), &[&small[..], &["--out", &out]].concat(), &[0, 1]);
    let report = kept(folder.path());
    // All but the one that waits for further replicas, and the one whose program only some machines have.
    let has_shake = std::env::var_os("REMORA_REDIS_SHAKE").is_some();
    all_equal(report["samples"].as_array().unwrap(), if has_shake { 13 } else { 12 });
    let notes = report["run"]["notes"].to_string();
    assert_eq!(notes.contains("NOT MEASURED: RedisShake 4"), !has_shake, "{notes}");
    // The one that started on a file continued from there.
    let of_file = report["samples"].as_array().unwrap().iter().find(|sample| sample["method"] == "rdb-file").unwrap();
    assert_eq!(of_file["full_copies"], 1, "{of_file}");
    assert!(!notes.contains("SECOND FULL COPY"), "{notes}");
}

#[test]
#[ignore = "long: make test-all"]
fn volume_requests_measures_every_scene() {
    let Some(()) = require::shaping() else { return };
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().display().to_string();
    run(env!("CARGO_BIN_EXE_volume_requests"), &["--rounds", "1", "--millis", "100", "--out", &out], &[0, 1]);
    let comparisons = kept(folder.path())["comparisons"].as_array().unwrap().clone();
    assert_eq!(comparisons.len(), 11, "{comparisons:?}");
    for comparison in comparisons {
        assert!(comparison["ratio"]["median"].as_f64().unwrap() > 0.0, "{comparison}");
    }
}

#[test]
#[ignore = "long: make test-all"]
fn name_changes_are_measured_in_a_mount_and_beside_it() {
    let Some(()) = require::fuse() else { return };
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().display().to_string();
    run(env!("CARGO_BIN_EXE_name_changes"), &["--rounds", "1", "--files", "200", "--out", &out], &[0]);
    let samples = kept(folder.path())["samples"].as_array().unwrap().clone();
    assert_eq!(samples.len(), 3 * 2 * 4, "three subjects, two numbers of directories, four figures: {samples:?}");
}

#[test]
#[ignore = "long: make test-all"]
fn mass_replacement_takes_one_full_copy_of_each_primary_with_remora() {
    let Some(()) = require::shaping() else { return };
    let Some(_) = require::valkey() else { return };
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().display().to_string();
    let small = ["--rounds", "1", "--mebibytes", "8", "--rate", "1gbit", "--servers", "valkey"];
    run(env!("CARGO_BIN_EXE_mass_replacement"), &[&small[..], &["--out", &out]].concat(), &[0, 1]);
    let samples = kept(folder.path())["samples"].as_array().unwrap().clone();
    let copies: Vec<_> =
        samples.iter().filter(|sample| sample["case"].as_str().unwrap().contains("sync_full")).collect();
    assert_eq!(copies.len(), 6, "{samples:?}");
    for sample in copies {
        let is_ours = sample["subject"].as_str().unwrap().starts_with("Remora");
        let count = sample["value"].as_f64().unwrap();
        assert!(if is_ours { count == 1.0 } else { count >= 2.0 }, "{sample}");
    }
}

#[test]
#[ignore = "long: make test-all"]
fn hand_offs_beside_writes_take_one_full_copy_with_default_settings() {
    let Some(_) = require::valkey() else { return };
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().display().to_string();
    let small = ["--rounds", "1", "--values", "16", "--replicas", "2", "--loads", "paced,large"];
    run(env!("CARGO_BIN_EXE_hand_offs"), &[&small[..], &["--out", &out]].concat(), &[0]);
    let goals = kept(folder.path())["goals"].as_array().unwrap().clone();
    assert_eq!(goals.len(), 2 * 2 * 4, "two servers, two loads, four promises: {goals:?}");
    assert!(goals.iter().all(|goal| goal["value"]["median"].is_number()), "{goals:?}");
}

#[test]
#[ignore = "long: make test-all"]
fn remora_bench_compares_its_syncs_over_a_network_and_under_load() {
    let Some(()) = require::shaping() else { return };
    let Some(_) = require::valkey() else { return };
    let suite = |name: &str, more: &[&str], count: usize| {
        let folder = tempfile::tempdir().unwrap();
        let out = folder.path().display().to_string();
        let always = [name, "--rounds", "1", "--out", &out];
        run(env!("CARGO_BIN_EXE_remora-bench"), &[&always, more].concat(), &[0]);
        let report = kept(folder.path());
        let with_replicas = |point: &&Value| point["replicas"] != 0;
        all_equal(report["points"].as_array().unwrap().iter().filter(with_replicas), count);
        report
    };
    let few = ["--servers", "valkey", "--networks", "1gbit", "--values", "8"];
    let methods = ["--methods", "own-best,remora-tcp,remora-relay", "--replicas", "2"];
    let report = suite("sync", &[&few[..], &methods].concat(), 3);
    let relay = report["points"].as_array().unwrap().iter().find(|point| point["method"] == "remora-relay").unwrap();
    let memory = relay["agent_memory"].as_array().unwrap();
    assert!(memory.len() == 2 && memory.iter().all(|bytes| bytes.as_u64() > Some(1 << 20)), "{relay}");
    // Near clients and far clients.
    suite("feel", &[&few[..], &["--methods", "remora-relay", "--replicas", "2", "--rate", "200"]].concat(), 2);
}

#[test]
fn reads_are_measured_beside_their_rivals() {
    let Some(()) = require::iperf3() else { return };
    let small = ["--rounds", "1", "--millis", "50", "--region-mib", "16"];
    let bandwidth = [&small[..], &["--sizes-kib", "64", "--depths", "4"]].concat();
    run(env!("CARGO_BIN_EXE_read_bandwidth"), &bandwidth, &[0, 1]);
    run(env!("CARGO_BIN_EXE_read_latency"), &[&small[..], &["--sizes", "4096"]].concat(), &[0, 1]);
}

#[test]
#[ignore = "long: make test-all"]
fn nbd_requests_are_measured_beside_nbdkit() {
    let Some(()) = require::nbd_clients() else { return };
    let small = ["--rounds", "1", "--millis", "100", "--device-mib", "16", "--depths", "4"];
    run(env!("CARGO_BIN_EXE_nbd_requests"), &small, &[0, 1]);
}

#[test]
#[ignore = "long: make test-all"]
fn files_of_a_volume_are_measured_beside_fuse_alone() {
    let Some(()) = require::fuse().and_then(|()| require::fio()).and_then(|()| require::redis_benchmark()) else {
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().display().to_string();
    let few = [
        "volume",
        "--rounds",
        "1",
        "--millis",
        "100",
        "--mib",
        "16",
        "--no-rdma",
        "--subjects",
        "remora-tcp,remora-shm,memory",
    ];
    let cells =
        ["--blocks-kib", "4", "--jobs", "2", "--patterns", "randwrite,read", "--transport", "device", "--out", &out];
    run(env!("CARGO_BIN_EXE_remora-bench"), &[&few[..], &cells].concat(), &[0, 1]);
    let report = kept(folder.path());
    let points = report["points"].as_array().unwrap();
    let of = |subject: &str| points.iter().filter(|point| point["subject"] == subject).collect::<Vec<_>>();
    for subject in ["Remora, TCP", "Remora, shm", "FUSE floor"] {
        // Two of Redis, and four of fio.
        assert_eq!(of(subject).len(), 6, "{subject}: {report}");
        for point in of(subject) {
            assert!(point["value"].as_f64() > Some(0.0) && point["cpu_seconds"].as_f64() > Some(0.0), "{point}");
        }
    }
    assert_eq!(of("TCP").len(), 1, "new connections: {report}");
}
