//! `remora probe` against a source of a server without data: figures for the transports that work, reasons for those
//! that do not, and nothing left behind. `rdma/` tests it over RDMA.

use std::time::Instant;

use remora_lab::server::wait_until;
use remora_lab::{Server, require};
use serde_json::Value;

use crate::kit::{LONG, Source, Stage, ends, says};

/// Runs a probe to its end, which must have this exit code, and returns what it printed.
fn probe(stage: &Stage, source: &Source, more: &[&str], code: i32) -> String {
    let (address, token) = (source.address.to_string(), stage.token.display().to_string());
    let mut command = stage.remora(&["probe", "--source", &address, "--token-file", &token]);
    command.args(more).env("REMORA_RDMA_DISABLE", "1");
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(code), "{said}");
    String::from_utf8(output.stdout).unwrap() + if code == 0 { "" } else { &said }
}

/// Whether the source has a probe region mapped.
fn exports_a_probe_region(source: &Source) -> bool {
    std::fs::read_to_string(format!("/proc/{}/maps", source.agent.pid())).unwrap().contains("remora-probe")
}

#[test]
fn a_source_without_data_is_measured_by_each_transport_and_takes_no_snapshot() {
    let Some(kind) = require::redis() else { return };
    let (stage, primary) = (Stage::new(), Server::start(kind).unwrap());
    let source = stage.source(&primary.url(), &[]);
    let printed = probe(&stage, &source, &["--json", "--time", "3ms"], 0);
    let report: Value = serde_json::from_str(&printed).unwrap();
    let transports = report["transports"].as_array().unwrap();
    let names: Vec<&str> = transports.iter().map(|one| one["transport"].as_str().unwrap()).collect();
    assert_eq!(names, ["shm", "verbs", "tcp"]);
    for one in transports.iter().filter(|one| one["transport"] != "verbs") {
        assert_eq!((&one["usable"], &one["trouble"]), (&Value::Bool(true), &Value::Null), "{one}");
        let figures = one["figures"].as_array().unwrap();
        assert_eq!(figures.len(), 8 * 3, "8 sizes at 3 depths");
        for figure in figures {
            let number = |name: &str| figure[name].as_f64().unwrap();
            assert!(number("median_micros") > 0.0 && number("median_micros") <= number("p99_micros"), "{figure}");
            assert!(number("reads") >= 1.0 && number("bytes_per_second") >= number("read_bytes"), "{figure}");
        }
    }
    assert_eq!(transports[1]["usable"], false);
    says(transports[1]["trouble"].as_str().unwrap(), &["REMORA_RDMA_DISABLE"]);
    assert_eq!(source.status()["totals"]["snapshots_taken"], 0);
    wait_until("the probe region to be revoked", LONG, || {
        Ok(if exports_a_probe_region(&source) { Err("it is mapped".into()) } else { Ok(()) })
    })
    .unwrap();
    source.stop();
}

#[test]
fn the_tables_say_which_transports_are_unusable_and_why_and_the_time_limit_holds() {
    let Some(kind) = require::redis() else { return };
    let (stage, primary) = (Stage::new(), Server::start(kind).unwrap());
    let source = stage.source(&primary.url(), &["--no-shm"]);
    let printed = probe(&stage, &source, &["--time", "3ms", "--sizes", "64,4KiB", "--depths", "1,16"], 0);
    says(
        &printed,
        &["shm: cannot be used: the source does not offer it", "verbs: cannot be used: RDMA", "64 B", "4 KiB"],
    );
    let begun = Instant::now();
    let late = ["--transport", "tcp", "--time", "10s", "--limit", "300ms"];
    let said = probe(&stage, &source, &late, 5);
    assert!(begun.elapsed() < LONG, "{:?}", begun.elapsed());
    says(&said, &["24 of 24 figures are missing", "--limit", "could be measured"]);
    source.stop();
}

#[test]
fn two_probes_at_once_share_the_region_and_a_wrong_token_gets_none() {
    let Some(kind) = require::redis() else { return };
    let (stage, primary) = (Stage::new(), Server::start(kind).unwrap());
    let source = stage.source(&primary.url(), &[]);
    let token = stage.token.display().to_string();
    let address = source.address.to_string();
    let args = ["probe", "--source", &address, "--token-file", &token, "--transport", "tcp", "--time", "20ms"];
    let mut both = [stage.start(None, &args), stage.start(None, &args)];
    for one in &mut both {
        says(&ends(one, 0), &["4 MiB"]);
    }
    let wrong = stage.secret("wrong", "another secret altogether");
    let mut stranger = stage.start(None, &["probe", "--source", &address, "--token-file", &wrong]);
    ends(&mut stranger, 5);
    source.stop();
}
