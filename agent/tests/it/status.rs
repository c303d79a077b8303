//! How far a sync is, how fast, and how long it takes: as `remora status` and the lines of `remora replica` say it.

use std::cell::RefCell;
use std::time::{Duration, Instant};

use remora_lab::server::wait_until;
use remora_lab::{Server, require};
use rustix::process::Signal;
use serde_json::Value;

use crate::kit::{LONG, Source, Stage, at_once, ends, fill, fill_keys, primary, quick, says, succeeds};

/// Bytes per second that the replica reads at, as its `--download-limit`.
const RATE: u64 = 4 << 20;

fn number(replica: &Value, name: &str) -> u64 {
    replica[name].as_u64().unwrap_or_else(|| panic!("no {name} in {replica}"))
}

/// The number before the first `%` of a status for people.
fn drawn_percent(drawn: &str) -> f64 {
    let before = drawn.split('%').next().unwrap();
    before.split_whitespace().last().and_then(|word| word.parse().ok()).unwrap_or_else(|| panic!("no percent: {drawn}"))
}

#[test]
#[ignore = "long: make test-all"]
fn a_status_says_how_far_a_replica_is_and_how_fast_it_reads() {
    at_once(require::kinds(), |kind| {
        let (primary, server) = (primary(kind).start().unwrap(), Server::start(kind).unwrap());
        fill(&primary, 32, 1);
        let mut source = Source::start(&primary, &["--memory", "128MiB", "--slot-size", "64KiB", "--eager"]);
        source.wait_for_snapshot();
        let limit = RATE.to_string();
        let mut agent = source.replica(&server, &["--stay", "--transport", "tcp", "--download-limit", &limit]);

        let is_reading = |replica: &Value| {
            let percent = replica["percent_permille"].as_u64().unwrap_or(0);
            (1..900).contains(&percent) && replica["rate_bytes_per_s"].as_u64() > Some(0)
        };
        let status = source.wait_for_status("the replica to read", |status| is_reading(&status["replicas"][0]));
        let (replica, slots) = (&status["replicas"][0], number(&status["generation"], "published_slots"));
        let (held, permille) = (number(replica, "slots_held"), number(replica, "percent_permille"));
        // Of a slot that is on its way to the server, not all bytes are there.
        assert!(permille.abs_diff(held * 1000 / slots) <= 1 + 1000 / slots, "{kind}: {status}");
        // It may have been allowed to read some more at once.
        let rate = number(replica, "rate_bytes_per_s");
        assert!(rate < 3 * RATE, "{kind}: {rate} bytes/s with a limit of {RATE}");
        let drawn = source.drawn_status();
        assert!(drawn_percent(&drawn) >= permille as f64 / 10.0 && drawn.contains("/s"), "{kind}: {drawn}");

        agent.wait_for_event("in_step", LONG).unwrap();
        source.wait_for_status("the replica to be whole", |status| status["replicas"][0]["percent_permille"] == 1000);
        assert_eq!(drawn_percent(&source.drawn_status()), 100.0);
        agent.signal(Signal::TERM).unwrap();
        agent.wait_for_success(LONG).unwrap();
    });
}

/// Microseconds that the server waits behind each key that it saves: of these keys, some seconds.
const SAVE_DELAY: &str = "250";

/// As [`SAVE_DELAY`], where two reports of `INFO` must lie within one save: the source asks once a second, and later on
/// a busy machine.
const FILE_DELAY: &str = "750";
const KEYS: usize = 20_000;

/// The percentages of lines that begin with `label`.
fn percentages(output: &str, label: &str) -> Vec<f64> {
    let lines = output.lines().filter(|line| line.starts_with(label) && line.contains(" %"));
    lines.map(drawn_percent).collect()
}

#[test]
#[ignore = "long: make test-all"]
fn percent_and_time_left_are_of_the_whole_data_set_while_its_snapshot_is_taken() {
    at_once(require::kinds(), |kind| {
        let (primary, server) = (primary(kind).config("rdb-key-save-delay", SAVE_DELAY), Server::start(kind).unwrap());
        let primary = primary.start().unwrap();
        fill_keys(&primary, KEYS, "value");
        let source = Source::start(&primary, &["--memory", "128MiB", "--slot-size", "64KiB"]);
        let mut agent = source.replica(&server, &["--stay", "--transport", "tcp"]);

        // Until the snapshot is whole, both percentages grow and stay below 100.
        let seen = RefCell::new(Vec::new());
        let last = source.wait_for_status("the snapshot to be whole", |status| {
            let (generation, replica) = (&status["generation"], &status["replicas"][0]);
            if generation["state"] == "complete" {
                return true;
            }
            let is_by_keys = generation["length"]["basis"] == "keys";
            if let (true, Some(taken), Some(held)) =
                (is_by_keys, generation["percent_permille"].as_u64(), replica["percent_permille"].as_u64())
            {
                assert_eq!(status["saving"]["keys_total"], KEYS, "{kind}: {status}");
                seen.borrow_mut().push((taken, held));
            }
            false
        });
        let seen: Vec<(u64, u64)> = seen.into_inner();
        assert!(seen.len() > 2, "{kind}: {seen:?}");
        assert!(seen.is_sorted_by(|one, next| one.0 <= next.0 && one.1 <= next.1), "{kind}: {seen:?}");
        assert!(seen.iter().all(|(taken, held)| (10..1000).contains(taken) && *held < 1000), "{kind}: {seen:?}");
        let (first, end) = (seen[0], seen[seen.len() - 1]);
        assert!(first.0 < 900 && end.0 > first.0 && end.1 > first.1, "{kind}: {seen:?}");
        assert_eq!(last["generation"]["percent_permille"], 1000, "{kind}: {last}");

        agent.wait_for_event("in_step", LONG).unwrap();
        let status = source
            .wait_for_status("the replica to be whole", |status| status["replicas"][0]["percent_permille"] == 1000);
        assert_eq!(status["replicas"][0]["left_seconds"], Value::Null);
        assert_eq!(status["generation"]["length"]["basis"], "known");
        agent.signal(Signal::TERM).unwrap();
        agent.wait_for_success(LONG).unwrap();
        let (output, label) = (agent.output(), format!("transfer to {}: ", server.url()));
        let shown = percentages(&output, &label);
        assert!(shown.is_sorted() && shown.last() == Some(&100.0), "{kind}: {shown:?}\n{output}");
        let line = output.lines().find(|line| line.starts_with(&label) && line.contains(" of about "));
        let line = line.unwrap_or_else(|| panic!("{kind}: no estimate in\n{output}"));
        says(line, &["MiB of about ", " %, ", "/s, ", " s left"]);
        says(&output, &[" in total, ", "/s on average"]);
    });
}

#[test]
#[ignore = "long: make test-all"]
fn while_a_server_saves_to_a_file_first_both_ends_say_how_far_it_is() {
    at_once(require::kinds(), |kind| {
        let primary = primary(kind).config("rdb-key-save-delay", FILE_DELAY).config("repl-diskless-sync", "no");
        let (primary, server) = (primary.start().unwrap(), Server::start(kind).unwrap());
        fill_keys(&primary, KEYS, "value");
        let source = Source::start(&primary, &["--memory", "128MiB", "--slot-size", "64KiB"]);
        let mut agent = source.replica(&server, &["--transport", "tcp"]);
        let saved = |status: &Value| status["saving"]["keys"].as_u64().unwrap_or(0);
        let first = source.wait_for_status("the server to save", |status| saved(status) > 1000);
        assert!(first["generation"].is_null(), "{kind}: {first}");
        let more = source.wait_for_status("the server to save more", |status| saved(status) > saved(&first));
        assert!(saved(&more) < KEYS as u64, "{kind}: {more}");
        agent.wait_for_success(LONG).unwrap();
        let output = agent.output();
        says(&output, &[&format!("{} saves: ", primary.address()), &format!(" of {KEYS} keys, "), " keys/s, "]);
        // The rest may take less time than there is between two reports.
        says(&output, &["  transfer  ", "is a replica of"]);
    });
}

// `remora plan` against what a sync then takes.

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
#[ignore = "long: make test-all"]
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
#[ignore = "long: make test-all"]
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

// `remora probe` against a source of a server without data: figures for the transports that work, reasons for those
// that do not, and nothing left behind. `rdma/` tests it over RDMA.

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
#[ignore = "long: make test-all"]
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
#[ignore = "long: make test-all"]
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

// `remora ready`: the exit code tells a probe whether a server can be given work.

fn ready(stage: &Stage, server: &Server, more: &[&str], code: i32) -> String {
    stage.end(&[&["ready", "--server", &server.url()], more].concat(), code)
}

#[test]
#[ignore = "long: make test-all"]
fn a_replica_is_ready_once_it_is_in_step_with_its_primary() {
    for kind in require::kinds() {
        let (stage, first) = (Stage::new(), primary(kind).start().unwrap());
        fill_keys(&first, 100, "x");
        says(&ready(&stage, &first, &[], 0), &["is ready: a primary"]);
        let server = Server::start(kind).unwrap();
        Source::start(&first, &[]).replicate(&server, &[]);
        let (host, port) = (first.address().ip().to_string(), first.port().to_string());
        let at = format!("{host}:{port}");
        says(&ready(&stage, &server, &["--max-lag", "1MiB", "--timeout", "20s"], 0), &["a replica of", &at]);

        // Nothing listens where it is sent: it waits as long as it is told to.
        server.client().unwrap().ok(&["REPLICAOF", "127.0.0.1", "1"]).unwrap();
        let began = Instant::now();
        let said = ready(&stage, &server, &["--timeout", "1s", "--link-only"], 13);
        says(&said, &["is not ready", "link to 127.0.0.1:1 is down"]);
        assert!(began.elapsed() > Duration::from_millis(700) && began.elapsed() < LONG);
        says(&ready(&stage, &server, &[], 13), &["its primary cannot be asked"]);

        // Its primary follows another server meanwhile, and it goes along.
        let other = quick(kind).start().unwrap();
        server.client().unwrap().ok(&["REPLICAOF", &host, &port]).unwrap();
        ready(&stage, &server, &["--timeout", "60s"], 0);
        first.client().unwrap().ok(&["REPLICAOF", &host, &other.port().to_string()]).unwrap();
        ready(&stage, &first, &["--timeout", "60s"], 0);
        ready(&stage, &server, &["--timeout", "60s"], 0);
    }
}

#[test]
fn each_change_is_said_while_it_is_watched() {
    let Some(kind) = require::redis() else { return };
    let (stage, first, server) = (Stage::new(), primary(kind).start().unwrap(), quick(kind).start().unwrap());
    let mut watch = stage.start(None, &["ready", "--server", &server.url(), "--watch", "100ms"]);
    watch.wait_for_line("is ready: a primary", LONG).unwrap();
    server.client().unwrap().ok(&["REPLICAOF", "127.0.0.1", "1"]).unwrap();
    watch.wait_for_line("is not ready", LONG).unwrap();
    let (host, port) = (first.address().ip().to_string(), first.port().to_string());
    server.client().unwrap().ok(&["REPLICAOF", &host, &port]).unwrap();
    watch.wait_for_line("is ready: a replica of", LONG).unwrap();
    assert_eq!(watch.output().matches("is ready: a primary").count(), 1, "{}", watch.output());
    watch.signal(rustix::process::Signal::TERM).unwrap();
    ends(&mut watch, 7);
}

#[test]
fn a_server_that_is_gone_is_an_error_of_its_own() {
    let Some(kind) = require::redis() else { return };
    let (stage, mut server) = (Stage::new(), quick(kind).start().unwrap());
    server.kill().unwrap();
    says(&ready(&stage, &server, &[], 4), &[&server.url()]);
}
