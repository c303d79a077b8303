//! Page: the metrics for people, at `/`: one document, whose script asks for [`STATUS`] once a second and draws it.
//!
//! ```text
//!   browser ── GET / ──▶ page.html with page.css and page.js in it, allowed by one nonce
//!           ── GET /status.json, once a second while the page is seen ──▶ Scrape ──▶ names, states, units as text
//! ```
//!
//! All words, states and units are made here and in [`view`](crate::view), where `remora status --watch` has
//! them from too; the script only places them. The port is open to all who reach it, so the page has nothing that
//! `/metrics` and `/readyz` do not show. It loads nothing from elsewhere, and its policy forbids the browser to.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use http_body_util::Full;
use hyper::body::Bytes;
use hyper::header::{
    CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, HeaderValue, REFERRER_POLICY, X_CONTENT_TYPE_OPTIONS,
};
use hyper::{Response, StatusCode};
use remora_protocol::StatusReport;
use serde::Serialize;

use super::families::{Families, Value};
use super::register as all;
use super::register::{Family, Unit};
use crate::view::{self, Fact, HEADS, Level, Rate, Row, Share, View};
use remora_base::units::{Size, readable};
use remora_process::progress;

/// Where the page's script asks.
pub(super) const STATUS: &str = "/status.json";

const HTML: &str = include_str!("page.html");
const STYLE: &str = include_str!("page.css");
const SCRIPT: &str = include_str!("page.js");

/// What stands in the document in place of the nonce, the style and the script.
const PLACES: [&str; 3] = ["{{nonce}}", "{{style}}", "{{script}}"];

/// The document, with a nonce of its own: a browser runs this script and no other.
pub(super) fn document() -> Response<Full<Bytes>> {
    let mut random = [0; 16];
    if let Err(error) = getrandom::fill(&mut random) {
        let mut response = Response::new(Full::new(Bytes::from(format!("no random numbers: {error}\n"))));
        *response.status_mut() = StatusCode::INTERNAL_SERVER_ERROR;
        return response;
    }
    let nonce = format!("{:032x}", u128::from_ne_bytes(random));
    let [at_nonce, at_style, at_script] = PLACES;
    let text = HTML.replace(at_nonce, &nonce).replace(at_style, STYLE).replace(at_script, SCRIPT);
    let mut response = Response::new(Full::new(Bytes::from(text)));
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("text/html; charset=utf-8"));
    // Hexadecimal digits are allowed in every header.
    if let Ok(policy) = HeaderValue::try_from(policy(&nonce)) {
        headers.insert(CONTENT_SECURITY_POLICY, policy);
    }
    headers.insert(X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    headers.insert(REFERRER_POLICY, HeaderValue::from_static("no-referrer"));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    response
}

/// What the browser may do for the page: this style, this script, its icon, and questions to this port. Nothing else,
/// and in no other page's frame.
fn policy(nonce: &str) -> String {
    format!(
        "default-src 'none'; style-src 'nonce-{nonce}'; script-src 'nonce-{nonce}'; img-src data:; connect-src 'self'; \
         base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
}

/// What the page shows.
#[derive(Debug, Serialize)]
struct Shown {
    /// The command.
    agent: &'static str,
    /// The command's version, and what it is of.
    of: String,
    /// Why the agent cannot do its work now; empty if it can.
    why: String,
    facts: Vec<Fact>,
    /// `None` for an agent that serves no replicas.
    replicas: Option<Vec<Row>>,
    heads: [&'static str; HEADS.len()],
    reading: Option<Rate>,
    families: Vec<ShownFamily>,
}

/// A family of the metrics.
#[derive(Debug, PartialEq, Serialize)]
struct ShownFamily {
    name: String,
    help: &'static str,
    values: Vec<ShownValue>,
}

/// One value of a family.
#[derive(Debug, PartialEq, Serialize)]
struct ShownValue {
    /// Its labels.
    of: String,
    text: String,
}

/// What the script gets. `report`: that of a source. `not_ready`: why the agent cannot do its work now.
pub(super) fn status(families: &Families, report: Option<&StatusReport>, not_ready: Option<&str>) -> String {
    let mut shown = Shown {
        agent: families.agent().name(),
        of: format!("remora {}", env!("CARGO_PKG_VERSION")),
        why: not_ready.unwrap_or_default().to_owned(),
        facts: Vec::new(),
        replicas: None,
        heads: HEADS,
        reading: None,
        families: shown_families(families, SystemTime::now()),
    };
    match report {
        Some(report) => {
            let View { source, facts, failure: _, replicas, reading } = View::of(report);
            (shown.of, shown.facts) = (source, facts);
            (shown.replicas, shown.reading) = (Some(replicas), Some(reading));
        }
        None => shown.facts = sync_facts(families),
    }
    // Strings, numbers and lists always become JSON.
    serde_json::to_string(&shown).unwrap_or_default()
}

/// The facts of an agent beside a replica; none for other agents, or without a sync.
fn sync_facts(families: &Families) -> Vec<Fact> {
    let of = |family: &'static Family| families.values().iter().filter(move |value| value.family == family);
    let number = |family: &'static Family| of(family).next().map(|value| value.value);
    let size = |family: &'static Family| Size::bytes(number(family).unwrap_or(0.0) as u64);
    let Some(sync) = of(&all::SYNC).next() else { return Vec::new() };
    let phase = of(&all::SYNC_PHASE).find(|value| value.value == 1.0).and_then(|value| value.labels.first());
    let label = |name: &str| {
        let at = sync.family.labels.iter().position(|label| *label == name);
        at.and_then(|at| sync.labels.get(at)).filter(|text| !text.is_empty())
    };
    let by = label("transport").map_or_else(String::new, |by| format!(" over {}", view::medium(by)));
    let from = label("source").map_or_else(String::new, |source| format!("from {source}{by}"));
    let is_up = number(&all::SYNC_SOURCE_UP) == Some(1.0);
    let expected = number(&all::SYNC_EXPECTED).filter(|bytes| *bytes > 0.0).map(|_| size(&all::SYNC_EXPECTED));
    let of = expected.map_or_else(|| "have arrived".to_owned(), |expected| format!("of {expected} expected"));
    let rate = number(&all::SYNC_RATE).filter(|rate| *rate > 0.0).map(|rate| progress::rate(rate as u64));
    let left = number(&all::SYNC_LEFT).and_then(|left| Duration::try_from_secs_f64(left).ok()).map(progress::time_left);
    let arriving: Vec<String> = [Some(of), rate, left].into_iter().flatten().collect();
    let (server, primary) = (label("server").cloned(), label("primary").cloned());
    let mut facts = vec![
        Fact {
            name: "phase",
            value: phase.cloned().unwrap_or_else(|| "failed".to_owned()),
            more: from,
            share: number(&all::SYNC_PROGRESS).map(|of_one| Share { of_one, level: Level::Low }),
        },
        Fact { name: "snapshot", value: size(&all::SYNC_FETCHED).to_string(), more: arriving.join(", "), share: None },
        Fact {
            name: "server",
            value: server.unwrap_or_default(),
            more: primary.map_or_else(String::new, |primary| format!("of the primary {primary}")),
            share: None,
        },
        Fact {
            name: "source",
            value: if is_up { "connected" } else { "not connected" }.to_owned(),
            more: String::new(),
            share: None,
        },
    ];
    if number(&all::SYNC_LAG).is_some() {
        let value = format!("{} behind", size(&all::SYNC_LAG));
        facts.push(Fact { name: "stream", value, more: String::new(), share: None });
    }
    facts
}

/// All values, in the order of the metrics.
fn shown_families(families: &Families, now: SystemTime) -> Vec<ShownFamily> {
    let mut shown: Vec<ShownFamily> = Vec::new();
    for value in families.values() {
        let name = value.family.full_name();
        let one = ShownValue { of: labels(value), text: text(value.family.unit(), value.value, now) };
        match shown.last_mut().filter(|last| last.name == name) {
            Some(last) => last.values.push(one),
            None => shown.push(ShownFamily { name, help: value.family.help, values: vec![one] }),
        }
    }
    shown
}

fn labels(value: &Value) -> String {
    let labels = value.family.labels.iter().zip(&value.labels);
    let labels = labels.filter(|(_, text)| !text.is_empty());
    labels.map(|(name, text)| format!("{name} {text}")).collect::<Vec<_>>().join(", ")
}

/// A value with its unit.
fn text(unit: Unit, value: f64, now: SystemTime) -> String {
    let duration = |seconds: f64| readable(Duration::try_from_secs_f64(seconds).unwrap_or_default());
    match unit {
        Unit::Bytes => Size::bytes(value as u64).to_string(),
        Unit::BytesPerSecond => progress::rate(value as u64),
        Unit::Seconds => duration(value),
        Unit::Moment => {
            let now = now.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64();
            format!("{} ago", duration(now - value))
        }
        Unit::Ratio => progress::percent((value * 1000.0) as u16),
        Unit::One => String::new(),
        Unit::Offset | Unit::Slots | Unit::Blocks | Unit::State | Unit::Count => format!("{value}"),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use http_body_util::BodyExt;

    use super::super::register::Agent;
    use super::*;

    async fn whole(response: Response<Full<Bytes>>) -> (String, String) {
        let policy = response.headers()[CONTENT_SECURITY_POLICY].to_str().unwrap().to_owned();
        let bytes = response.into_body().collect().await.unwrap().to_bytes();
        (policy, String::from_utf8(bytes.to_vec()).unwrap())
    }

    /// What stands between these two in a text.
    fn between<'a>(text: &'a str, begin: &str, end: &str) -> &'a str {
        text.split_once(begin).and_then(|(_, rest)| rest.split_once(end)).unwrap().0
    }

    #[tokio::test]
    async fn the_document_is_whole_and_its_policy_allows_its_own_script_alone() {
        let (policy, text) = whole(document()).await;
        let nonce = between(&policy, "script-src 'nonce-", "'");
        assert_eq!(nonce.len(), 32);
        for tag in ["style", "script"] {
            assert_eq!(text.matches(&format!("<{tag}")).count(), 1, "{tag}");
            assert!(text.contains(&format!("<{tag} nonce=\"{nonce}\">")), "{tag}");
        }
        for rule in ["default-src 'none'", "connect-src 'self'", "frame-ancestors 'none'", "base-uri 'none'"] {
            assert!(policy.contains(rule), "{policy}");
        }
        assert!(!policy.contains("unsafe") && !text.contains("{{"), "{policy}");
        let (other, _) = whole(document()).await;
        assert_ne!(policy, other, "a nonce is used once");
    }

    #[test]
    fn the_document_loads_nothing_and_takes_no_text_for_markup() {
        for (of, text) in [("page.html", HTML), ("page.css", STYLE), ("page.js", SCRIPT)] {
            let text = text.replace("http://www.w3.org/2000/svg", "");
            for wrong in ["http:", "https:", "src=", "@import", "url(", "style=", "onclick=", "onload=", "onerror="] {
                assert!(!text.contains(wrong), "{of}: {wrong}");
            }
        }
        for wrong in ["innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "Function("] {
            assert!(!SCRIPT.contains(wrong), "{wrong}");
        }
    }

    #[test]
    fn values_have_their_units() {
        let now = UNIX_EPOCH + Duration::from_secs(1000);
        for (unit, value, wanted) in [
            (Unit::Bytes, 1048576.0, "1 MiB"),
            (Unit::BytesPerSecond, 1024.0, "1 KiB/s"),
            (Unit::Seconds, 185.0, "3 min 05 s"),
            (Unit::Moment, 988.0, "12 s ago"),
            (Unit::Moment, 2000.0, "0.0 s ago"),
            (Unit::Ratio, 0.5, "50.0 %"),
            (Unit::Offset, 73322.0, "73322"),
            (Unit::Seconds, f64::NAN, "0.0 s"),
        ] {
            assert_eq!(text(unit, value, now), wanted, "{unit:?} {value}");
        }
    }

    #[test]
    fn an_agent_beside_a_replica_has_the_facts_of_its_sync() {
        let mut families = Families::new(Agent::Replica);
        assert!(sync_facts(&families).is_empty());
        families.info(&all::SYNC, ["redis://b:6379", "a:6379", "a:7379", "tcp", "memory"]);
        families.states(&all::SYNC_PHASE, ["transfer", "load"], Some("load"));
        families.gauge(&all::SYNC_PROGRESS, 0.25);
        families.number(&all::SYNC_FETCHED, 1 << 20);
        families.number(&all::SYNC_EXPECTED, 4 << 20);
        families.number(&all::SYNC_RATE, 1 << 19);
        families.number(&all::SYNC_LEFT, 6);
        families.whether(&all::SYNC_SOURCE_UP, true);
        let facts = sync_facts(&families);
        let said: Vec<String> =
            facts.iter().map(|fact| format!("{}: {} {}", fact.name, fact.value, fact.more)).collect();
        assert_eq!(
            said,
            [
                "phase: load from a:7379 over TCP",
                "snapshot: 1 MiB of 4 MiB expected, 512 KiB/s, 6.0 s left",
                "server: redis://b:6379 of the primary a:6379",
                "source: connected ",
            ]
        );
        assert_eq!(facts[0].share.map(|share| share.of_one), Some(0.25));
        let shown = shown_families(&families, SystemTime::now());
        let phase = shown.iter().find(|family| family.name == "remora_sync_phase").unwrap();
        let values: Vec<_> = phase.values.iter().map(|one| format!("{} {}", one.of, one.text)).collect();
        assert_eq!(values, ["phase transfer 0", "phase load 1"]);
    }
}
