//! Status: what a source reports to `remora status`.

use remora_redis::ReplId;
use remora_wire::codec::{List, Maybe, Name, Text};
use remora_wire::{codes, record};
use serde::{Serialize, Serializer};

use crate::ahead::{Advance, Length, Saving};
use crate::bounds::{
    MAX_ADDRESS_BYTES, MAX_NAME_BYTES, MAX_PROTECTION_BYTES, MAX_REPLICAS, MAX_TEXT_BYTES, MAX_WHY_BYTES,
    MAX_ZONE_BYTES,
};
use crate::progress::Phase;
use crate::replid;

/// The state of a source, for `remora status`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct StatusReport {
    /// Version of the source's agent.
    pub source: String,
    /// Address of the server that is captured.
    pub server: String,
    /// Role of that server: "primary", or "replica of HOST:PORT".
    pub role: String,
    /// The generation that replicas are served from.
    pub generation: Option<GenerationStatus>,
    /// What the source does before it can take its first snapshot; empty once it can.
    pub preparing: String,
    /// How far the server is that saves its data set for a snapshot; `None` while it does not save, or does not say.
    pub saving: Option<Saving>,
    /// The replicas that have joined; at most [`MAX_REPLICAS`].
    pub replicas: Vec<ReplicaStatus>,
    /// Totals since the source started.
    pub totals: Totals,
    /// Why the last snapshot failed; empty if it did not.
    pub last_failure: String,
    /// The background transfer over TCP; `None` if the source's upload has a fixed limit, or none.
    pub upload: Option<UploadStatus>,
}

record!(StatusReport {
    source: Name<MAX_NAME_BYTES>,
    server: Name<MAX_ADDRESS_BYTES>,
    role: Name<MAX_ADDRESS_BYTES>,
    generation: Maybe<GenerationStatus>,
    preparing: Text<MAX_WHY_BYTES>,
    saving: Maybe<Saving>,
    replicas: List<ReplicaStatus, MAX_REPLICAS>,
    totals: Totals,
    last_failure: Text<MAX_TEXT_BYTES>,
    upload: Maybe<UploadStatus>,
});

/// What a background transfer does at present.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct UploadStatus {
    /// The rate at which it may send.
    pub bytes_per_second: u64,
    /// How long its bytes wait in the queue of the network link, in microseconds.
    pub queueing_micros: u64,
    /// Whether it sends less because others fill the link.
    pub yields: bool,
}

record!(UploadStatus { bytes_per_second: u64, queueing_micros: u64, yields: bool });

/// The generation that a source holds.
// Larger than the bound: a field for each value that is shown.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct GenerationStatus {
    /// Its number.
    pub generation: u64,
    /// The primary's replication id.
    #[serde(serialize_with = "as_text")]
    pub replid: ReplId,
    /// Replication offset of the snapshot.
    pub offset_start: u64,
    /// Replication offset of the newest byte in the journal.
    pub offset_now: u64,
    /// Whether the snapshot is complete.
    pub state: GenerationState,
    /// Bytes of the snapshot received so far.
    pub snapshot_bytes: u64,
    /// The length of the whole snapshot, as far as it is known.
    pub length: Length,
    /// How far the capture is: the bytes that the source has received.
    #[serde(flatten)]
    pub advance: Advance,
    /// Slots in the snapshot's ring.
    pub slots: u64,
    /// Slots published so far.
    pub published_slots: u64,
    /// Slots that may be overwritten.
    pub retired_slots: u64,
    /// Whether slots are reused, so that no replica can join late.
    pub windowed: bool,
    /// Memory in use by both tables, in bytes.
    pub memory_bytes: u64,
    /// Limit of that memory, in bytes.
    pub memory_limit: u64,
    /// Seconds since the capture began.
    pub age_seconds: u64,
    /// Replication offset of the oldest byte in the journal.
    pub journal_first: u64,
    /// Replication offset after the newest byte in the journal.
    pub journal_end: u64,
    /// Duration of the capture so far, or in all once it is complete, in milliseconds.
    pub capture_millis: u64,
    /// The method of the capture, in words.
    pub capture: String,
    /// Why the server does not write small values in the fast way; empty if it does.
    pub no_fast_keys: String,
    /// Bytes that replicas on other hosts read for the slots published so far: fewer than those of the snapshot if
    /// slots are compressed.
    pub stored_bytes: u64,
    /// How slots are compressed for replicas on other hosts, and why.
    pub compression: String,
}

record!(GenerationStatus {
    generation: u64,
    replid: replid::Text,
    offset_start: u64,
    offset_now: u64,
    state: GenerationState,
    snapshot_bytes: u64,
    length: Length,
    advance: Advance,
    slots: u64,
    published_slots: u64,
    retired_slots: u64,
    windowed: bool,
    memory_bytes: u64,
    memory_limit: u64,
    age_seconds: u64,
    journal_first: u64,
    journal_end: u64,
    capture_millis: u64,
    capture: Name<MAX_NAME_BYTES>,
    no_fast_keys: Text<MAX_WHY_BYTES>,
    stored_bytes: u64,
    compression: Text<MAX_WHY_BYTES>,
});

/// Serializes a value as it is printed.
fn as_text<S: Serializer>(value: &ReplId, to: S) -> Result<S::Ok, S::Error> {
    to.collect_str(value)
}

/// The state of a snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum GenerationState {
    /// The server is still sending it.
    Capturing,
    /// All of it is in the table.
    Complete,
}

codes!(GenerationState is "state of a generation" {
    0 => Capturing,
    1 => Complete,
});

/// One replica, as the source sees it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ReplicaStatus {
    /// Its name, as it has reported it.
    pub name: String,
    /// The address that it connected from.
    pub address: String,
    /// Name of the transport it reads over; empty before it reads.
    pub transport: String,
    /// Why no better transport is used; empty if none is better.
    pub transport_why: String,
    /// Why its server does not load small values in the fast way; empty if it does, or if that is not decided yet.
    pub no_fast_keys: String,
    /// What protects the data that it reads, or before it reads what protects its conversation with the source.
    pub protection: String,
    /// What it is doing.
    pub phase: Phase,
    /// Slots of the snapshot that it holds.
    pub slots_held: u64,
    /// How far it is: the bytes of the snapshot that it holds. 1000 thousandths if it needs no more of it.
    #[serde(flatten)]
    pub advance: Advance,
    /// Bytes of the journal that its server has yet to apply.
    pub journal_lag_bytes: u64,
    /// Replication offset that its server has acknowledged.
    pub applied_offset: u64,
    /// Seconds since it joined.
    pub joined_seconds: u64,
    /// Seconds since its last message.
    pub silent_seconds: u64,
    /// Its session, which identifies it in `reads_from`.
    pub session: u64,
    /// The session of the replica that it reads slots from; `None`: the source.
    pub reads_from: Option<u64>,
    /// Whether others may read from it.
    pub serves: bool,
    /// The oldest slot that it holds for others.
    pub oldest_slot: u64,
    /// The operator's name for its location.
    pub zone: String,
}

record!(ReplicaStatus {
    name: Name<MAX_NAME_BYTES>,
    address: Name<MAX_ADDRESS_BYTES>,
    transport: Name<16>,
    transport_why: Text<MAX_WHY_BYTES>,
    no_fast_keys: Text<MAX_WHY_BYTES>,
    protection: Name<MAX_PROTECTION_BYTES>,
    phase: Phase,
    slots_held: u64,
    advance: Advance,
    journal_lag_bytes: u64,
    applied_offset: u64,
    joined_seconds: u64,
    silent_seconds: u64,
    session: u64,
    reads_from: Maybe<u64>,
    serves: bool,
    oldest_slot: u64,
    zone: Name<MAX_ZONE_BYTES>,
});

/// Totals since a source started.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct Totals {
    /// Snapshots taken from the server.
    pub snapshots_taken: u64,
    /// Attempts to take a snapshot that failed, before or after it began.
    pub snapshots_failed: u64,
    /// Replicas that finished successfully.
    pub replicas_done: u64,
    /// Bytes of tables that replicas have read.
    pub bytes_served: u64,
}

record!(Totals { snapshots_taken: u64, snapshots_failed: u64, replicas_done: u64, bytes_served: u64 });
