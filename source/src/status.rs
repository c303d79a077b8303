//! What the source shows: its answer to `remora status`, and its metrics.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use remora_fabric::tcp::Upload;
use remora_protocol::{
    Advance, BaseKind, GenerationState, GenerationStatus, Phase, ReplicaStatus, StatusReport, Totals, UploadStatus,
};
use tokio::net::TcpListener;
use tokio::sync::mpsc;

use super::answers::ask;
use super::choice::base;
use super::machine::{Replica, Session, Stage};
use super::{Incoming, Source, exports};
use remora_base::units::Size;
use remora_metrics::register::Family;
use remora_metrics::{Agent, Families, Scrape, Site, register as all};
use remora_process::progress::WHOLE;
use remora_process::progress::{Unit, in_progress};
use remora_server::{Facts, Link, Role};

/// The report that `remora status` shows.
pub(super) fn report(source: &Source) -> StatusReport {
    let (now, status) = (Instant::now(), source.machine.status());
    StatusReport {
        source: env!("CARGO_PKG_VERSION").into(),
        server: source.captured.server().url().to_string(),
        role: role(&source.facts),
        generation: generation_status(source, now),
        base: base(source),
        preparing: source.preparation.words(),
        saving: source.ahead.expected().saving,
        replicas: status
            .replicas
            .iter()
            .map(|(session, replica)| replica_status(source, *session, replica, now))
            .collect(),
        totals: Totals {
            snapshots_taken: status.snapshots_taken,
            snapshots_failed: status.failures.total(),
            forks: status.forks_made,
            replicas_done: status.replicas_done,
            bytes_served: source.exports.bytes_served(),
        },
        last_failure: status.failures.last().to_owned(),
        upload: source.exports.upload().map(upload_status),
    }
}

/// The source in one line, for a service manager.
pub(super) fn in_short(source: &Source) -> String {
    let status = source.machine.status();
    let snapshot = match status.snapshot.map(|snapshot| &snapshot.stage) {
        None if source.preparation.is_under_way() => source.preparation.words(),
        None => "no snapshot".to_owned(),
        Some(Stage::Asked) => "a snapshot is requested".to_owned(),
        Some(Stage::Sealed { .. }) => format!("a snapshot of {}", Size::bytes(source.gauge.received())),
        Some(_) => format!("taking a snapshot, {}", in_progress(&source.ahead.look(Instant::now()), Unit::Bytes)),
    };
    let replicas = match status.replicas.len() {
        0 => "no replica has joined".to_owned(),
        1 => "1 replica has joined".to_owned(),
        count => format!("{count} replicas have joined"),
    };
    let standby = source.standby.as_ref().map_or(String::new(), |standby| format!("{}; ", standby.words(source)));
    format!("{standby}{snapshot}; {replicas}; {} made so far", status.replicas_done)
}

fn generation_status(source: &Source, now: Instant) -> Option<GenerationStatus> {
    let snapshot = source.machine.status().snapshot?;
    let origin = snapshot.origin()?;
    let (first, end) = source.gauge.journal();
    Some(GenerationStatus {
        generation: origin.generation,
        replid: origin.history,
        offset_start: origin.offset,
        offset_now: end,
        state: match snapshot.stage {
            Stage::Sealed { .. } => GenerationState::Complete,
            _ => GenerationState::Capturing,
        },
        snapshot_bytes: source.gauge.received(),
        length: source.ahead.expected().length,
        advance: source.ahead.look(now).advance(),
        slots: u64::from(source.tables.snapshot.1.slots),
        published_slots: source.gauge.published_slots(),
        retired_slots: source.gauge.retired_slots(),
        windowed: source.gauge.retired_slots() > 0,
        memory_bytes: source.tables.resident(),
        memory_limit: source.options.tables.memory.get(),
        age_seconds: snapshot.taken().elapsed().as_secs(),
        journal_first: first,
        journal_end: end + 1,
        capture_millis: source.gauge.capture_time().as_millis() as u64,
        capture: source.gauge.method().to_string(),
        no_fast_keys: source.gauge.no_fast_keys(),
        stored_bytes: source.gauge.stored_bytes(),
        compression: exports::compression(source),
    })
}

fn replica_status(source: &Source, session: Session, replica: &Replica, now: Instant) -> ReplicaStatus {
    let (oldest_slot, serves) = source.topology.lends(session);
    let peer = source.sessions.get(&session);
    ReplicaStatus {
        name: replica.name.clone(),
        address: replica.address.clone(),
        transport: replica.transport().map(|kind| kind.name().to_owned()).unwrap_or_default(),
        transport_why: match replica.waits_because() {
            Some(why) => why.to_owned(),
            None => peer.map(|peer| peer.transport_why.clone()).unwrap_or_default(),
        },
        no_fast_keys: peer.map(|peer| peer.no_fast_keys.clone()).unwrap_or_default(),
        protection: peer
            .map(|peer| peer.data_protection(replica.transport(), source.tables.is_sealed()).to_string())
            .unwrap_or_default(),
        phase: replica.at.phase,
        slots_held: replica.at.slots_held,
        advance: advance(replica, now),
        journal_lag_bytes: source.gauge.journal().1.saturating_sub(replica.at.applied_offset),
        applied_offset: replica.at.applied_offset,
        joined_seconds: now.duration_since(replica.joined).as_secs(),
        silent_seconds: now.duration_since(replica.last_seen).as_secs(),
        session,
        reads_from: source.topology.reads_from(session),
        serves,
        oldest_slot,
        zone: replica.zone.clone(),
    }
}

/// How far a replica is with its snapshot: nothing is known of one that waits, and one that has all has no rate.
fn advance(replica: &Replica, now: Instant) -> Advance {
    match replica.generation {
        _ if replica.has_all_slots() => WHOLE,
        None => Advance::default(),
        Some(_) => replica.tracker.look(now).advance(),
    }
}

fn upload_status(upload: Upload) -> UploadStatus {
    let Upload { bytes_per_second, queueing, yields } = upload;
    UploadStatus { bytes_per_second, queueing_micros: queueing.as_micros() as u64, yields }
}

fn role(facts: &Facts) -> String {
    match (facts.role, &facts.link) {
        (Some(Role::Replica), Some(Link { host, port, .. })) => format!("replica of {host}:{port}"),
        (Some(Role::Replica), None) => "replica".into(),
        _ => "primary".into(),
    }
}

// The source's metrics.

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
    let (report, rate) = (report(source), source.rate.bytes_per_second());
    let copy = source.standby.as_ref().map(|_| Copy {
        is_whole: source.machine.status().snapshot.is_some_and(|snapshot| snapshot.is_sealed()),
        journal_end: source.machine.status().stream.map(|_| source.gauge.journal().1),
    });
    let (client, server) = (source.questions.client.clone(), source.captured.server());
    tokio::spawn(async move {
        let asked = tokio::time::timeout(SERVER_LIMIT, ask(&client, &server)).await;
        let facts = match asked {
            Ok(Ok(facts)) => Ok(facts),
            Ok(Err(error)) => Err(error.to_string()),
            Err(_) => Err(format!("{} does not answer within {} s", server.url(), SERVER_LIMIT.as_secs())),
        };
        show(&mut scrape.families, &report, facts.as_ref().ok(), rate);
        show_copy(&mut scrape.families, copy, facts.as_ref().ok());
        let preparing = Some(format!("the source is {}", report.preparing)).filter(|_| !report.preparing.is_empty());
        scrape.report = Some(Box::new(report));
        scrape.answer(match &facts {
            Ok(facts) if facts.loading == Some(true) => Some(format!("{} is loading its data set", server.url())),
            Ok(_) => preparing,
            Err(why) => Some(why.clone()),
        });
    });
}

/// What a standby has.
struct Copy {
    is_whole: bool,
    /// The newest byte of the stream; `None` without a stream.
    journal_end: Option<u64>,
}

fn show_copy(families: &mut Families, copy: Option<Copy>, facts: Option<&Facts>) {
    let Some(copy) = copy else { return };
    families.whether(&all::STANDBY_COPY, copy.is_whole);
    if let (Some(end), Some(offset)) = (copy.journal_end, facts.and_then(|facts| facts.offset)) {
        families.number(&all::STANDBY_LAG, offset.saturating_sub(end));
    }
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
    families.counter(&all::FORKS, totals.forks);
    families.states(&all::BASE, BaseKind::NAMES, Some(report.base.kind.name()));
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
    each(&all::REPLICA_SERVES, |replica| Some(f64::from(u8::from(replica.serves))));
}

#[cfg(test)]
mod tests {
    use remora_protocol::{Base, Totals};

    use super::*;
    use remora_metrics::families::Form;

    #[test]
    fn a_source_without_a_snapshot_and_without_a_server_has_metrics() {
        let report = StatusReport {
            source: "0.1.0".into(),
            server: "redis://10.0.0.1:6379".into(),
            role: "primary".into(),
            generation: None,
            base: Base::default(),
            preparing: String::new(),
            saving: None,
            replicas: Vec::new(),
            totals: Totals { snapshots_taken: 2, forks: 1, ..Totals::default() },
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
            "remora_forks_total 1\n",
            "remora_base{kind=\"fork\"} 0.0",
            "remora_base{kind=\"none\"} 1.0",
            "remora_source_server_info{server=\"redis://10.0.0.1:6379\",role=\"primary\"} 1",
        ] {
            assert!(text.contains(line), "{line}: {text}");
        }
        assert!(!text.contains("snapshot_bytes") && !text.contains("backlog"), "{text}");
    }
}
