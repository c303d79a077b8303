//! The source's metrics.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use remora_protocol::{GenerationState, GenerationStatus, Phase, ReplicaStatus, StatusReport};
use tokio::net::TcpListener;
use tokio::sync::{mpsc, oneshot};

use super::answers::ask;
use super::{Incoming, Source, status};
use crate::metrics::families::Families;
use crate::metrics::{Answer, Site};
use crate::server::{Facts, Role};

/// How long the server may take to say how it is.
const SERVER_LIMIT: Duration = Duration::from_secs(2);

/// Serves the metrics of the source whose loop reads these messages.
pub(super) fn serve(listener: TcpListener, incoming: mpsc::Sender<Incoming>) -> Site {
    Site::serve(listener, move || {
        let incoming = incoming.clone();
        async move {
            let (tell, told) = oneshot::channel();
            incoming.send(Incoming::Scraped(tell)).await.ok()?;
            told.await.ok()
        }
    })
}

/// Answers a scrape, after the server was asked how it is.
pub(super) fn answer(source: &Source, to: oneshot::Sender<Answer>) {
    let (report, rate) = (status::report(source), source.rate.bytes_per_second());
    let (client, server) = (source.client.clone(), source.captured.server());
    tokio::spawn(async move {
        let asked = tokio::time::timeout(SERVER_LIMIT, ask(&client, &server)).await;
        let facts = match asked {
            Ok(Ok(facts)) => Ok(facts),
            Ok(Err(error)) => Err(error.to_string()),
            Err(_) => Err(format!("{} does not answer within {} s", server.url(), SERVER_LIMIT.as_secs())),
        };
        let text = text(&report, facts.as_ref().ok(), rate);
        let not_ready = match &facts {
            Ok(facts) if facts.loading == Some(true) => Some(format!("{} is loading its data set", server.url())),
            Ok(_) => None,
            Err(why) => Some(why.clone()),
        };
        let _ = to.send(Answer { text, not_ready }); // a client that has gone needs no answer
    });
}

/// `facts`: `None` if the server does not answer. `rate`: bytes that its clients write per second.
fn text(report: &StatusReport, facts: Option<&Facts>, rate: u64) -> String {
    let mut families = Families::new();
    let labels = vec![("server", report.server.clone()), ("role", report.role.clone())];
    families.info("source_server", "The server that the source captures", labels);
    families.gauge("source_server_up", "Whether that server answers", f64::from(u8::from(facts.is_some())));
    families.gauge("source_written_bytes_per_second", "What its clients write, on average", rate as f64);
    of_snapshot(&mut families, report.generation.as_ref());
    of_primary(&mut families, report, facts, rate);
    let totals = &report.totals;
    let result = |result: &str| vec![("result", result.to_owned())];
    let snapshots = [(result("taken"), totals.snapshots_taken), (result("failed"), totals.snapshots_failed)];
    families.counters("snapshots", "Snapshots since the source started", snapshots);
    families.counter("syncs_done", "Replicas that ended in step with their primary", totals.replicas_done);
    families.counter("served_bytes", "Bytes of tables that replicas have read over the network", totals.bytes_served);
    of_replicas(&mut families, &report.replicas);
    families.text()
}

fn of_snapshot(families: &mut Families, snapshot: Option<&GenerationStatus>) {
    let state = match snapshot.map(|snapshot| snapshot.state) {
        None => "none",
        Some(GenerationState::Capturing) => "capturing",
        Some(GenerationState::Complete) => "complete",
    };
    let states = ["none", "capturing", "complete"]
        .map(|name| (vec![("state", name.to_owned())], f64::from(u8::from(name == state))));
    families.gauges("snapshot_state", "1 for the state that the snapshot is in", states);
    let Some(snapshot) = snapshot else { return };
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let began = now.saturating_sub(Duration::from_secs(snapshot.age_seconds));
    for (name, help, value) in [
        ("snapshot_bytes", "Bytes of the snapshot that were received", snapshot.snapshot_bytes),
        ("snapshot_slots", "Slots of its table", snapshot.slots),
        ("snapshot_published_slots", "Slots that replicas can read, or could", snapshot.published_slots),
        ("snapshot_retired_slots", "Slots that were used again", snapshot.retired_slots),
        (
            "snapshot_windowed",
            "Whether slots are used again, so that no replica can join late",
            snapshot.windowed.into(),
        ),
        ("snapshot_generation", "The number of the snapshot", snapshot.generation),
        ("snapshot_offset", "Its replication offset", snapshot.offset_start),
        ("snapshot_started_timestamp_seconds", "When it was begun", began.as_secs()),
        ("journal_first_offset", "The offset of the oldest byte in the journal", snapshot.journal_first),
        ("journal_end_offset", "The offset behind its newest byte", snapshot.journal_end),
        ("memory_used_bytes", "Memory of both tables that is in use", snapshot.memory_bytes),
        ("memory_limit_bytes", "The most that they may use", snapshot.memory_limit),
    ] {
        families.gauge(name, help, value as f64);
    }
    let seconds = snapshot.capture_millis as f64 / 1000.0;
    families.gauge("snapshot_capture_duration_seconds", "How long the capture took, or has taken so far", seconds);
}

/// The primary's backlog, where the source is beside the primary: that of a replica says nothing of it.
fn of_primary(families: &mut Families, report: &StatusReport, facts: Option<&Facts>, rate: u64) {
    let Some(facts) = facts.filter(|facts| facts.role == Some(Role::Primary)) else { return };
    let Some(backlog) = facts.backlog else { return };
    families.gauge("primary_backlog_bytes", "The size of the primary's backlog", backlog.size as f64);
    let Some(snapshot) = &report.generation else { return };
    let behind = facts.offset.unwrap_or(0).saturating_sub(snapshot.offset_start);
    let Some(seconds) = backlog.size.saturating_sub(behind).checked_div(rate) else { return };
    let help = "Until the snapshot's offset leaves the backlog, at that rate of writes; missing if nothing is written";
    families.gauge("primary_backlog_headroom_seconds", help, seconds as f64);
}

fn of_replicas(families: &mut Families, replicas: &[ReplicaStatus]) {
    const PHASES: [Phase; 7] =
        [Phase::Waiting, Phase::Transfer, Phase::Load, Phase::CatchUp, Phase::HandOff, Phase::Stay, Phase::Done];
    let counts = PHASES.map(|phase| {
        let count = replicas.iter().filter(|replica| replica.phase == phase).count();
        (vec![("phase", phase.to_string())], count as f64)
    });
    families.gauges("replicas", "Replicas that have joined, by what they do", counts);
    let name = |replica: &ReplicaStatus| replica.name.clone();
    let above = |replica: &ReplicaStatus| {
        let above = replica.reads_from.and_then(|session| replicas.iter().find(|other| other.session == session));
        above.map_or_else(|| "source".to_owned(), name)
    };
    let infos = replicas.iter().map(|replica| {
        let labels = vec![
            ("replica", name(replica)),
            ("address", replica.address.clone()),
            ("zone", replica.zone.clone()),
            ("transport", replica.transport.clone()),
            ("reads_from", above(replica)),
        ];
        (labels, 1.0)
    });
    families.gauges("replica_info", "What is known of a replica, and 1", infos);
    let mut each = |metric: &str, help: &str, value: fn(&ReplicaStatus) -> f64| {
        let values = replicas.iter().map(|replica| (vec![("replica", name(replica))], value(replica)));
        families.gauges(metric, help, values);
    };
    each("replica_progress_ratio", "The part of the snapshot that a replica holds", |replica| {
        f64::from(replica.percent_permille) / 1000.0
    });
    each("replica_read_bytes_per_second", "How fast it reads", |replica| replica.rate_bytes_per_s as f64);
    each("replica_lag_bytes", "Bytes of the journal that its server has yet to apply", |replica| {
        replica.journal_lag_bytes as f64
    });
    each("replica_applied_offset", "The offset that its server has acknowledged", |replica| {
        replica.applied_offset as f64
    });
    each("replica_silent_seconds", "Since its last message", |replica| replica.silent_seconds as f64);
    each("replica_joined_seconds", "Since it joined", |replica| replica.joined_seconds as f64);
    each("replica_lends", "Whether others may read from it", |replica| f64::from(u8::from(replica.serves)));
}

#[cfg(test)]
mod tests {
    use remora_protocol::Totals;

    use super::*;

    fn report() -> StatusReport {
        StatusReport {
            source: "0.1.0".into(),
            server: "redis://10.0.0.1:6379".into(),
            role: "primary".into(),
            generation: None,
            replicas: Vec::new(),
            totals: Totals { snapshots_taken: 2, ..Totals::default() },
            last_failure: String::new(),
        }
    }

    #[test]
    fn a_source_without_a_snapshot_and_without_a_server_has_metrics() {
        let text = text(&report(), None, 0);
        for line in [
            "remora_source_server_up 0.0",
            "remora_snapshot_state{state=\"none\"} 1.0",
            "remora_snapshots_total{result=\"taken\"} 2",
            "remora_replicas{phase=\"waiting\"} 0.0",
            "remora_source_server_info{server=\"redis://10.0.0.1:6379\",role=\"primary\"} 1",
        ] {
            assert!(text.contains(line), "{line}: {text}");
        }
        assert!(!text.contains("snapshot_bytes") && !text.contains("backlog"), "{text}");
    }

    #[test]
    fn the_manual_lists_every_metric() {
        let manual = include_str!("../../../docs/operating.md");
        let text = super::text(&report(), None, 0);
        for line in text.lines().filter_map(|line| line.strip_prefix("# TYPE ")) {
            let name = line.split(' ').next().unwrap_or_default();
            // Some share the beginning of a row: `remora_snapshot_bytes`, `_slots`.
            let (_, end) = name.strip_prefix("remora_").and_then(|name| name.split_once('_')).unwrap_or(("", name));
            let is_listed = manual.contains(&format!("`{name}")) || manual.contains(&format!("`_{end}`"));
            assert!(is_listed, "docs/operating.md lacks {name}");
        }
    }
}
