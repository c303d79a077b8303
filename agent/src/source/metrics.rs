//! The source's metrics.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use remora_protocol::{GenerationState, GenerationStatus, Phase, ReplicaStatus, StatusReport};
use tokio::net::TcpListener;
use tokio::sync::mpsc;

use super::answers::ask;
use super::{Incoming, Source, status};
use crate::metrics::register::{self as all, Family};
use crate::metrics::{Agent, Families, Scrape, Site};
use crate::server::{Facts, Role};

/// How long the server may take to say how it is.
const SERVER_LIMIT: Duration = Duration::from_secs(2);

/// Serves the metrics of the source whose loop reads these messages.
pub(super) fn serve(listener: TcpListener, incoming: mpsc::Sender<Incoming>) -> Site {
    Site::serve(listener, move || {
        let incoming = incoming.clone();
        async move {
            let (scrape, told) = Scrape::of(Agent::Source);
            incoming.send(Incoming::Scraped(Box::new(scrape))).await.ok()?;
            told.await.ok()
        }
    })
}

/// Answers a scrape, after the server was asked how it is.
pub(super) fn answer(source: &Source, mut scrape: Scrape) {
    let (report, rate) = (status::report(source), source.rate.bytes_per_second());
    let (client, server) = (source.questions.client.clone(), source.captured.server());
    tokio::spawn(async move {
        let asked = tokio::time::timeout(SERVER_LIMIT, ask(&client, &server)).await;
        let facts = match asked {
            Ok(Ok(facts)) => Ok(facts),
            Ok(Err(error)) => Err(error.to_string()),
            Err(_) => Err(format!("{} does not answer within {} s", server.url(), SERVER_LIMIT.as_secs())),
        };
        show(&mut scrape.families, &report, facts.as_ref().ok(), rate);
        let preparing = Some(format!("the source is {}", report.preparing)).filter(|_| !report.preparing.is_empty());
        scrape.report = Some(Box::new(report));
        scrape.answer(match &facts {
            Ok(facts) if facts.loading == Some(true) => Some(format!("{} is loading its data set", server.url())),
            Ok(_) => preparing,
            Err(why) => Some(why.clone()),
        });
    });
}

/// `facts`: `None` if the server does not answer. `rate`: bytes that its clients write per second.
fn show(families: &mut Families, report: &StatusReport, facts: Option<&Facts>, rate: u64) {
    families.info(&all::SOURCE_SERVER, [&*report.server, &*report.role]);
    families.whether(&all::SOURCE_SERVER_UP, facts.is_some());
    families.number(&all::SOURCE_WRITTEN, rate);
    show_snapshot(families, report.generation.as_ref());
    show_primary(families, report, facts, rate);
    let totals = &report.totals;
    families.counters(&all::SNAPSHOTS, [(["taken"], totals.snapshots_taken), (["failed"], totals.snapshots_failed)]);
    families.counter(&all::SYNCS_DONE, totals.replicas_done);
    families.counter(&all::SERVED, totals.bytes_served);
    if let Some(upload) = &report.upload {
        families.number(&all::UPLOAD_RATE, upload.bytes_per_second);
        families.gauge(&all::UPLOAD_QUEUEING, upload.queueing_micros as f64 / 1e6);
        families.whether(&all::UPLOAD_YIELDS, upload.yields);
    }
    show_replicas(families, &report.replicas);
}

fn show_snapshot(families: &mut Families, snapshot: Option<&GenerationStatus>) {
    let state = match snapshot.map(|snapshot| snapshot.state) {
        None => "none",
        Some(GenerationState::Capturing) => "capturing",
        Some(GenerationState::Complete) => "complete",
    };
    families.states(&all::SNAPSHOT_STATE, ["none", "capturing", "complete"], Some(state));
    let Some(snapshot) = snapshot else { return };
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let began = now.saturating_sub(Duration::from_secs(snapshot.age_seconds));
    for (family, value) in [
        (&all::SNAPSHOT_BYTES, snapshot.snapshot_bytes),
        (&all::SNAPSHOT_STORED, snapshot.stored_bytes),
        (&all::SNAPSHOT_SLOTS, snapshot.slots),
        (&all::SNAPSHOT_PUBLISHED, snapshot.published_slots),
        (&all::SNAPSHOT_RETIRED, snapshot.retired_slots),
        (&all::SNAPSHOT_WINDOWED, snapshot.windowed.into()),
        (&all::SNAPSHOT_GENERATION, snapshot.generation),
        (&all::SNAPSHOT_OFFSET, snapshot.offset_start),
        (&all::SNAPSHOT_STARTED, began.as_secs()),
        (&all::JOURNAL_FIRST, snapshot.journal_first),
        (&all::JOURNAL_END, snapshot.journal_end),
        (&all::MEMORY_USED, snapshot.memory_bytes),
        (&all::MEMORY_LIMIT, snapshot.memory_limit),
    ] {
        families.number(family, value);
    }
    if let Some(ratio) = snapshot.advance.ratio() {
        families.gauge(&all::SNAPSHOT_PROGRESS, ratio);
    }
    families.gauge(&all::SNAPSHOT_CAPTURE, snapshot.capture_millis as f64 / 1000.0);
}

/// The primary's backlog, where the source is beside the primary: that of a replica says nothing of it.
fn show_primary(families: &mut Families, report: &StatusReport, facts: Option<&Facts>, rate: u64) {
    let Some(facts) = facts.filter(|facts| facts.role == Some(Role::Primary)) else { return };
    let Some(backlog) = facts.backlog else { return };
    families.number(&all::BACKLOG, backlog.size);
    let Some(snapshot) = &report.generation else { return };
    let behind = facts.offset.unwrap_or(0).saturating_sub(snapshot.offset_start);
    if let Some(seconds) = backlog.size.saturating_sub(behind).checked_div(rate) {
        families.number(&all::BACKLOG_HEADROOM, seconds);
    }
}

fn show_replicas(families: &mut Families, replicas: &[ReplicaStatus]) {
    const PHASES: [Phase; 7] =
        [Phase::Waiting, Phase::Transfer, Phase::Load, Phase::CatchUp, Phase::HandOff, Phase::Stay, Phase::Done];
    let counts = PHASES.map(|phase| {
        let count = replicas.iter().filter(|replica| replica.phase == phase).count();
        ([phase.to_string()], count as f64)
    });
    families.gauges(&all::REPLICAS, counts);
    let name = |replica: &ReplicaStatus| replica.name.clone();
    let above = |replica: &ReplicaStatus| {
        let above = replica.reads_from.and_then(|session| replicas.iter().find(|other| other.session == session));
        above.map_or_else(|| "source".to_owned(), name)
    };
    families.infos(
        &all::REPLICA,
        replicas.iter().map(|replica| {
            let ReplicaStatus { address, zone, transport, .. } = replica.clone();
            [name(replica), address, zone, transport, above(replica)]
        }),
    );
    let mut each = |family: &'static Family, value: fn(&ReplicaStatus) -> Option<f64>| {
        families.gauges(family, replicas.iter().filter_map(|replica| Some(([name(replica)], value(replica)?))));
    };
    each(&all::REPLICA_PROGRESS, |replica| replica.advance.ratio());
    each(&all::REPLICA_RATE, |replica| Some(replica.advance.rate_bytes_per_s as f64));
    // Without an acknowledged offset, the lag would be the whole history.
    each(&all::REPLICA_LAG, |replica| (replica.applied_offset > 0).then_some(replica.journal_lag_bytes as f64));
    each(&all::REPLICA_APPLIED, |replica| (replica.applied_offset > 0).then_some(replica.applied_offset as f64));
    each(&all::REPLICA_SILENT, |replica| Some(replica.silent_seconds as f64));
    each(&all::REPLICA_JOINED, |replica| Some(replica.joined_seconds as f64));
    each(&all::REPLICA_LENDS, |replica| Some(f64::from(u8::from(replica.serves))));
}

#[cfg(test)]
mod tests {
    use remora_protocol::Totals;

    use super::*;
    use crate::metrics::families::Form;

    #[test]
    fn a_source_without_a_snapshot_and_without_a_server_has_metrics() {
        let report = StatusReport {
            source: "0.1.0".into(),
            server: "redis://10.0.0.1:6379".into(),
            role: "primary".into(),
            generation: None,
            preparing: String::new(),
            saving: None,
            replicas: Vec::new(),
            totals: Totals { snapshots_taken: 2, ..Totals::default() },
            last_failure: String::new(),
            upload: None,
        };
        let mut families = Families::new(Agent::Source);
        show(&mut families, &report, None, 0);
        let text = families.text(Form::OpenMetrics);
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
}
