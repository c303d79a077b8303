//! `remora plan` against what a sync then takes.

use std::time::Instant;

use remora_lab::{Server, require};
use serde_json::Value;

use crate::kit::{Source, Stage, fill, fill_keys, primary, says, succeeds};

/// Whether two figures are the same within this share of the greater one.
#[track_caller]
fn assert_near(what: &str, planned: &Value, found: u64, share: f64) {
    let planned = planned.as_f64().unwrap();
    let differs = (planned - found as f64).abs() / planned.max(found as f64);
    assert!(differs <= share, "{what}: planned {planned}, found {found}");
}

/// Memory may differ by this share.
const MEMORY: f64 = 0.15;

#[test]
fn what_was_planned_is_what_a_sync_then_takes() {
    for kind in require::kinds() {
        let top = primary(kind).config("rdbcompression", "no").config("repl-backlog-size", "4mb").start().unwrap();
        fill(&top, 64, 1);
        let stage = Stage::new();
        let planned = stage.end(&["plan", "--server", &top.url(), "--measure", "1s", "--json"], 0);
        let plan: Value = serde_json::from_str(&planned[planned.find('{').unwrap()..]).unwrap();
        assert_eq!(plan["source"]["sealed"], true);
        assert_eq!(plan["fork"]["count"], 1);

        // Exactly what was said to be needed, and of the same security.
        let memory = plan["source"]["whole_memory_bytes"].to_string();
        let options = ["--memory", &memory, "--security", "token"];
        let source = Source::start(&top, &options);
        let began = Instant::now();
        let server = Server::start(kind).unwrap();
        let transport = ["--security", "token", "--transport", "tcp", "--no-serve-peers"];
        succeeds(&mut source.replica(&server, &transport), &server);
        let took = began.elapsed().as_secs_f64();
        let status = source.status();
        let generation = &status["generation"];
        assert_eq!(generation["windowed"], false, "{status}");
        let bytes = |value: &Value| value.as_u64().unwrap();
        assert_near("the snapshot", &plan["snapshot_bytes"], bytes(&generation["snapshot_bytes"]), MEMORY);
        assert_near(
            "the source's memory",
            &plan["source"]["whole_in_use_bytes"],
            bytes(&generation["memory_bytes"]),
            MEMORY,
        );
        let used = server.fact("used_memory").unwrap().parse().unwrap();
        assert_near("the server's memory", &plan["replicas"]["server_bytes"], used, MEMORY);
        let served = source.bytes_served();
        assert_near("what left the source", &plan["snapshot_bytes"], served, MEMORY);
        // The machine may be busy.
        let seconds = plan["total_seconds"].as_f64().unwrap();
        assert!(took < 20.0 * seconds && took > seconds / 20.0, "planned {seconds} s, took {took} s");

        // One mebibyte less, and the snapshot does not fit.
        let less = (memory.parse::<u64>().unwrap() - (2 << 20)).to_string();
        let said = stage.end(&["plan", "--server", &top.url(), "--write-rate", "1MiB", "--memory", &less], 0);
        says(&said, &["holds the snapshot", "is a window of", "makes the primary fork and send its data again"]);
        let said = stage.end(&["plan", "--server", &top.url(), "--write-rate", "1MiB", "--memory", &memory], 0);
        says(&said, &["is enough", "costs the primary nothing", "set repl-backlog-size to 16 MiB or more"]);
    }
}

#[test]
fn a_primary_that_cannot_be_asked_is_an_error_and_nothing_is_changed() {
    for kind in require::kinds() {
        let top = primary(kind).user("planner", "pw", "-@all +ping +info").start().unwrap();
        let stage = Stage::new();
        let file = stage.secret("pw", "pw");
        let login = ["--user", "planner", "--password-file", &file, "--measure", "1s"];
        let said = stage.end(&[&["plan", "--server", &top.url(), "--replicas", "3"][..], &login].concat(), 0);
        says(&said, &["replicas  3, each with about", "the primary has no backlog yet"]);
        let said = stage.end(&["plan", "--server", &top.url(), "--memory", "1MiB"], 3);
        says(&said, &["--memory is too small"]);
        stage.end(&["plan", "--server", "redis://127.0.0.1:1", "--measure", "1s"], 4);
        assert_eq!(top.fact("sync_full").unwrap(), "0");
        // A snapshot compresses such strings, and the allocator rounds their memory up: a user that may not look at keys
        // knows neither.
        fill_keys(&top, 5_000, &"0123456789".repeat(100));
        let planned = |login: &[&str]| {
            let url = top.url();
            let args = [&["plan", "--server", &url, "--write-rate", "1MiB", "--json"][..], login].concat();
            let said = stage.end(&args, 0);
            let plan: Value = serde_json::from_str(&said[said.find('{').unwrap()..]).unwrap();
            assert!(plan["snapshot_bytes"].as_u64() <= plan["snapshot_at_most_bytes"].as_u64(), "{plan}");
            plan["snapshot_bytes"].as_u64().unwrap()
        };
        let (with, without) = (planned(&[]), planned(&login[..4]));
        assert!(with < without * 4 / 5, "{with} {without}");
    }
}
