//! A real Prometheus beside agents: it scrapes them, evaluates the alerts that are shipped, and accepts each expression of
//! the dashboard.

use std::path::{Path, PathBuf};

use remora_lab::prometheus::promtool;
use remora_lab::server::wait_until;
use remora_lab::{Prometheus, Server, require};

use crate::kit::{LONG, Source, fill, primary};
use crate::metrics::free_address;

fn shipped(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy").join(name)
}

#[test]
#[ignore = "long: make test-all"]
fn the_alerts_fire_when_they_should_and_only_then() {
    let Some(()) = require::prometheus() else { return };
    let folder = shipped("prometheus");
    for args in [["check", "rules", "remora.rules.yml"], ["test", "rules", "remora_test.yml"]] {
        let ran = promtool(&folder, &args, "").unwrap();
        let said = String::from_utf8_lossy(&[ran.stdout, ran.stderr].concat()).into_owned();
        assert!(ran.status.success() && said.contains("SUCCESS"), "{args:?}: {said}");
    }
    // A rule that is spoilt is found: the tests test something.
    let other = tempfile::tempdir().unwrap();
    let rules = std::fs::read_to_string(folder.join("remora.rules.yml")).unwrap();
    let spoilt = rules.replace("remora_attend_rules == 0", "remora_attend_rules == 1");
    assert_ne!(spoilt, rules);
    std::fs::write(other.path().join("remora.rules.yml"), spoilt).unwrap();
    std::fs::copy(folder.join("remora_test.yml"), other.path().join("remora_test.yml")).unwrap();
    let ran = promtool(other.path(), &["test", "rules", "remora_test.yml"], "").unwrap();
    assert!(!ran.status.success(), "{ran:?}");
}

#[test]
#[ignore = "long: needs Prometheus"]
fn prometheus_scrapes_a_source_and_a_replica_and_accepts_the_alerts_and_the_dashboard() {
    let (Some(kind), Some(())) = (require::valkey(), require::prometheus()) else { return };
    let server = primary(kind).start().unwrap();
    fill(&server, 8, 1);
    let (at_source, at_replica) = (free_address(), free_address());
    let source = Source::start(&server, &["--metrics", &at_source.to_string()]);
    let replica = Server::start(kind).unwrap();
    let mut stays = source.replica(&replica, &["--stay", "--name", "db2", "--metrics", &at_replica.to_string()]);
    stays.wait_for_event("in_step", LONG).unwrap();
    let rules = shipped("prometheus/remora.rules.yml").canonicalize().unwrap();
    let prometheus = Prometheus::start("remora", &[at_source, at_replica], &rules).unwrap();
    // Its answers are of the past: at most a scrape and an evaluation.
    let becomes = |expression: &str, wanted: f64| {
        wait_until(expression, LONG, || {
            Ok(match prometheus.value(expression) {
                Ok(value) if value == wanted => Ok(()),
                Ok(value) => Err(value.to_string()),
                Err(error) => Err(error.to_string()),
            })
        })
        .unwrap();
    };
    becomes("count(up{job=\"remora\"} == 1)", 2.0);
    becomes("count(remora_build_info{agent=\"source\"})", 1.0);
    becomes("remora_sync_phase{phase=\"stay\"}", 1.0);
    becomes("remora_replica_progress_ratio{replica=\"db2\"}", 1.0);
    becomes("sum(remora_replicas{phase=\"stay\"})", 1.0);
    becomes("remora_snapshots_total{result=\"taken\"}", 1.0);
    // But for the mark at the end of a payload without a length.
    becomes("abs(remora_snapshot_bytes - on () remora_sync_snapshot_bytes) < bool 100", 1.0);
    // Metadata: the types are those of the text.
    let metadata = prometheus.ask("/api/v1/targets/metadata?metric=remora_sync_interruptions").unwrap();
    assert_eq!(metadata[0]["type"], "counter", "{metadata}");

    // Every rule was evaluated, without an error.
    wait_until("the rules to be evaluated", LONG, || {
        let groups = prometheus.ask("/api/v1/rules")?;
        let groups = groups["groups"].as_array().cloned().unwrap_or_default();
        let rules: Vec<_> = groups.iter().filter_map(|group| group["rules"].as_array()).flatten().collect();
        let healths: Vec<String> = rules.iter().map(|rule| format!("{}: {}", rule["name"], rule["health"])).collect();
        let are_well = rules.len() > 15 && rules.iter().all(|rule| rule["health"] == "ok");
        Ok(if are_well { Ok(()) } else { Err(healths.join("\n")) })
    })
    .unwrap();
    let firing = prometheus.query("ALERTS").unwrap();
    assert!(firing.is_empty(), "{firing:?}");

    // Every expression of the dashboard, as Grafana would ask it for all instances.
    let dashboard = std::fs::read_to_string(shipped("grafana/remora.json")).unwrap();
    let dashboard: serde_json::Value = serde_json::from_str(&dashboard).unwrap();
    let panels = dashboard["panels"].as_array().unwrap();
    let targets = panels.iter().filter_map(|panel| panel["targets"].as_array()).flatten();
    let (mut asked, mut with_values) = (0, 0);
    for target in targets {
        let expression = target["expr"].as_str().unwrap();
        let filled = expression.replace("$__rate_interval", "1m").replace("$instance", ".*");
        assert!(!filled.contains('$'), "{expression}: a variable that this test does not know");
        let found = prometheus.query(&filled).unwrap_or_else(|error| panic!("{expression}: {error}"));
        (asked, with_values) = (asked + 1, with_values + usize::from(!found.is_empty()));
    }
    println!("{asked} expressions of the dashboard, {with_values} of them with values here");
    assert!(asked > 40 && with_values > 15, "{asked}, {with_values}");
    assert!(prometheus.query("rate(remora_sync_lag_bytes[").is_err(), "what is no expression is refused");

    // The server ends: the alert is pending, which takes it a minute to fire.
    drop(server);
    becomes("ALERTS{alertname=\"RemoraSourceServerDown\", alertstate=\"pending\"}", 1.0);
    let log = prometheus.log();
    assert!(!log.contains("level=error"), "{log}");
}
