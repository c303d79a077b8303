//! `remora status` while a replica reads: how far it is, and how fast.

use remora_lab::{Server, require};
use rustix::process::Signal;
use serde_json::Value;

use crate::kit::{LONG, Source, fill, primary};

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
    for kind in require::kinds() {
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
        assert_eq!(permille, held * 1000 / slots, "{kind}: {status}");
        // It may have been allowed to read some more at once.
        let rate = number(replica, "rate_bytes_per_s");
        assert!(rate < 3 * RATE, "{kind}: {rate} bytes/s with a limit of {RATE}");
        let drawn = source.drawn_status();
        assert!(drawn_percent(&drawn) >= permille as f64 / 10.0 && drawn.contains("/s"), "{kind}: {drawn}");

        agent.wait_for_line("in step; staying", LONG).unwrap();
        source.wait_for_status("the replica to be whole", |status| status["replicas"][0]["percent_permille"] == 1000);
        assert_eq!(drawn_percent(&source.drawn_status()), 100.0);
        agent.signal(Signal::TERM).unwrap();
        agent.wait_for_success(LONG).unwrap();
    }
}
