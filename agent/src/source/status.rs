//! The source's answer to `remora status`.

use std::time::Instant;

use remora_fabric::tcp::Upload;
use remora_protocol::{Advance, GenerationState, GenerationStatus, ReplicaStatus, StatusReport, Totals, UploadStatus};

use super::Source;
use super::links;
use super::machine::{Replica, Session, Stage};
use crate::progress::tracker::WHOLE;
use crate::progress::words::{Unit, in_progress};
use crate::server::{Facts, Link, Role};
use crate::units::Size;

/// The report that `remora status` shows.
pub(super) fn report(source: &Source) -> StatusReport {
    let (now, status) = (Instant::now(), source.machine.status());
    StatusReport {
        source: env!("CARGO_PKG_VERSION").into(),
        server: source.captured.server().url().to_string(),
        role: role(&source.facts),
        generation: generation_status(source, now),
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
    format!("{snapshot}; {replicas}; {} made so far", status.replicas_done)
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
        memory_limit: source.args.memory.get(),
        age_seconds: snapshot.taken().elapsed().as_secs(),
        journal_first: first,
        journal_end: end + 1,
        capture_millis: source.gauge.capture_time().as_millis() as u64,
        capture: source.gauge.method().to_string(),
        no_fast_keys: source.gauge.no_fast_keys(),
        stored_bytes: source.gauge.stored_bytes(),
        compression: links::compression(source),
    })
}

fn replica_status(source: &Source, session: Session, replica: &Replica, now: Instant) -> ReplicaStatus {
    let (oldest_slot, serves) = source.topology.lends(session);
    let peer = source.sessions.get(&session);
    let relays = peer.and_then(|peer| peer.relays.as_ref());
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
        zone: relays.map(|relays| relays.zone.clone()).unwrap_or_default(),
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
