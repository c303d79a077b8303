//! Shipped: the rules, the dashboard and the manual name only what agents export. Their expressions are tried by a real
//! Prometheus in `agent/tests/it/metrics.rs`.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeSet;

use super::register::{ALL, PREFIX};

const RULES: &str = include_str!("../../deploy/prometheus/remora.rules.yml");
const TESTS: &str = include_str!("../../deploy/prometheus/remora_test.yml");
const DASHBOARD: &str = include_str!("../../deploy/grafana/remora.json");
const MANUAL: &str = include_str!("../../docs/reference/metrics.md");

/// The words in a text that look like names of ours, or of a process.
fn names(text: &str) -> BTreeSet<String> {
    let is_of_a_name = |sign: char| sign.is_ascii_alphanumeric() || sign == '_';
    let words = text.split(|sign| !is_of_a_name(sign));
    let is_name = |word: &&str| word.starts_with(&format!("{PREFIX}_")) || word.starts_with("process_");
    words.filter(is_name).map(str::to_owned).collect()
}

/// The anchors of a page's headings, for names of one word.
fn headings(page: &str) -> BTreeSet<String> {
    page.lines().filter_map(|line| line.strip_prefix("### ")).map(str::to_lowercase).collect()
}

#[test]
fn only_families_that_agents_export_are_named() {
    let all: BTreeSet<String> = ALL.iter().map(|family| family.full_name()).collect();
    // The name of the file itself.
    let others = BTreeSet::from(["remora_test".to_owned()]);
    for (of, text) in
        [("the rules", RULES), ("their tests", TESTS), ("the dashboard", DASHBOARD), ("the manual", MANUAL)]
    {
        let named = names(text);
        assert!(named.len() > 10, "{of}: {named:?}");
        let unknown: Vec<_> = named.difference(&all).filter(|name| !others.contains(*name)).collect();
        assert!(unknown.is_empty(), "{of}: {unknown:?}");
    }
}

#[test]
fn each_alert_has_its_words_its_test_and_its_part_of_the_manual() {
    let rules: serde_yaml_ng::Value = serde_yaml_ng::from_str(RULES).unwrap();
    let anchors = headings(MANUAL);
    let mut alerts = BTreeSet::new();
    for rule in rules["groups"].as_sequence().unwrap().iter().flat_map(|group| group["rules"].as_sequence().unwrap()) {
        let name = rule["alert"].as_str().unwrap();
        assert!(alerts.insert(name.to_lowercase()), "{name} is there twice");
        let annotation = |key: &str| rule["annotations"][key].as_str().unwrap_or_default();
        assert!(!annotation("summary").is_empty() && !annotation("description").is_empty(), "{name}");
        assert_eq!(annotation("runbook_url"), format!("docs/reference/metrics.md#{}", name.to_lowercase()));
        assert!(matches!(rule["labels"]["severity"].as_str(), Some("warning" | "critical")), "{name}");
        assert!(TESTS.contains(&format!("alertname=\"{name}\"")), "remora_test.yml does not fire {name}");
    }
    assert_eq!(alerts, anchors, "the alerts, and the headings of docs/reference/metrics.md");
}

#[test]
fn the_dashboard_has_panels_that_do_not_overlap() {
    let dashboard: serde_json::Value = serde_json::from_str(DASHBOARD).unwrap();
    let panels = dashboard["panels"].as_array().unwrap();
    let (mut ids, mut cells) = (BTreeSet::new(), BTreeSet::new());
    for panel in panels {
        let title = panel["title"].as_str().unwrap();
        assert!(ids.insert(panel["id"].as_u64().unwrap()), "{title}");
        let at = |key: &str| panel["gridPos"][key].as_u64().unwrap();
        assert!(at("x") + at("w") <= 24, "{title}");
        for (x, y) in (at("x")..at("x") + at("w")).flat_map(|x| (at("y")..at("y") + at("h")).map(move |y| (x, y))) {
            assert!(cells.insert((x, y)), "{title} lies over another panel");
        }
        let of = panel["targets"].as_array().map_or(0, Vec::len);
        assert_eq!(of == 0, panel["type"] == "row", "{title}");
    }
    let rows: Vec<&str> =
        panels.iter().filter(|one| one["type"] == "row").filter_map(|one| one["title"].as_str()).collect();
    for word in ["Sources", "Replicas", "Volumes"] {
        assert!(rows.iter().any(|row| row.contains(word)), "{word}: {rows:?}");
    }
}
