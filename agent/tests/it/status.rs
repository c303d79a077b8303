//! How far a sync is, how fast, and how long it takes: as `remora status` and the lines of `remora replica` say it.

use std::cell::RefCell;

use remora_lab::{Server, require};
use rustix::process::Signal;
use serde_json::Value;

use crate::kit::{LONG, Source, at_once, fill, fill_keys, primary, says};

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
