//! A report for tests of what is shown of one: of the page here, and of `remora status` in another crate.

use remora_protocol::{
    Advance, Base, BaseKind, Basis, GenerationState, GenerationStatus, Length, Phase, ReplicaStatus, StatusReport,
    Totals,
};

/// A source with a whole snapshot, and these replicas.
pub fn report(replicas: Vec<ReplicaStatus>) -> StatusReport {
    let generation = GenerationStatus {
        generation: 1,
        replid: "0123456789012345678901234567890123456789".parse().expect("a replication id"),
        offset_start: 100,
        offset_now: 8 << 20,
        state: GenerationState::Complete,
        snapshot_bytes: 937 << 20,
        length: Length { bytes: 937 << 20, basis: Basis::Known },
        advance: Advance { percent_permille: Some(1000), ..Advance::default() },
        slots: 1000,
        published_slots: 937,
        retired_slots: 0,
        windowed: false,
        memory_bytes: 1 << 30,
        memory_limit: 2 << 30,
        age_seconds: 180,
        journal_first: 101,
        journal_end: 8 << 20,
        capture_millis: 900,
        capture: "psync".into(),
        no_fast_keys: String::new(),
        stored_bytes: 234 << 20,
        compression: "zstd: --compress zstd; 25.0 % of the snapshot is stored".into(),
    };
    let totals = Totals { snapshots_taken: 1, snapshots_failed: 0, forks: 1, replicas_done: 3, bytes_served: 1 << 30 };
    StatusReport {
        source: "0.1.0".into(),
        server: "redis://10.0.0.1:6379".into(),
        role: "primary".into(),
        generation: Some(generation),
        base: Base { kind: BaseKind::Snapshot, age_seconds: 180, stream_bytes: 5 << 20, ..Base::default() },
        preparing: String::new(),
        saving: None,
        replicas,
        totals,
        last_failure: String::new(),
        upload: None,
    }
}

/// A replica that reads the snapshot. `reads_from`: the session of its upstream; `None`: the source.
pub fn replica(session: u64, name: &str, reads_from: Option<u64>) -> ReplicaStatus {
    ReplicaStatus {
        name: name.into(),
        address: String::new(),
        transport: "tcp".into(),
        transport_why: String::new(),
        no_fast_keys: String::new(),
        protection: "plaintext".into(),
        phase: Phase::Transfer,
        slots_held: 10,
        advance: Advance { percent_permille: Some(0), ..Advance::default() },
        journal_lag_bytes: 0,
        applied_offset: 0,
        joined_seconds: 0,
        silent_seconds: 0,
        session,
        reads_from,
        serves: true,
        oldest_slot: 0,
        zone: String::new(),
    }
}
