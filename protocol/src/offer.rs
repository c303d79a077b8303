//! Offers: where a generation's tables are and how to reach them. Also why there is no offer: waiting and refusals.

use std::fmt;

use remora_wire::codec::{Bytes, List, Maybe, Name};
use remora_wire::{codes, record};

use crate::bounds::{MAX_ADDRESS_BYTES, MAX_KEY_BYTES, MAX_KEYS, MAX_NAME_BYTES};
use crate::join::Upstream;

/// Where a generation lies and what it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Offer {
    /// Its number, unique for the source.
    pub generation: u64,
    /// The primary's replication id, as 40 hexadecimal digits.
    pub replid: [u8; 40],
    /// Replication offset of the last byte that the snapshot contains.
    pub offset: u64,
    /// The snapshot's table.
    pub snapshot: TableOffer,
    /// The journal's table, which begins with the byte behind `offset`.
    pub journal: TableOffer,
    /// Where the true primary is.
    pub primary: Announce,
    /// The primary's kind and version, as "redis 7.0.15".
    pub server: String,
    /// The name that the server which is captured has given this run of itself, as `INFO` tells it; empty if it doesn't.
    pub run_id: String,
    /// Size of the primary's replication backlog, in bytes.
    pub backlog_bytes: u64,
    /// How fast its replication offset grows, in bytes per second: with the backlog this says how long a hand-off may take.
    pub write_rate: u64,
    /// From whom to take the snapshot's slots; none: from the source's table.
    pub upstream: Option<Upstream>,
}

record!(Offer {
    generation: u64,
    replid: [u8; 40],
    offset: u64,
    snapshot: TableOffer,
    journal: TableOffer,
    primary: Announce,
    server: Name<MAX_NAME_BYTES>,
    run_id: Name<MAX_NAME_BYTES>,
    backlog_bytes: u64,
    write_rate: u64,
    upstream: Maybe<Upstream>,
});

/// One table: its shape, and how to reach it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TableOffer {
    /// The generation in the table's superblock. A journal outlives the snapshot that it was begun with.
    pub generation: u64,
    /// The replication offset in the table's superblock: that of the snapshot with which it began.
    pub first_offset: u64,
    /// Bytes in a slot.
    pub slot_size: u32,
    /// Slots in the ring.
    pub slots: u32,
    /// The promise that the memory of a slot never gets other bytes once it is published, not even after this generation:
    /// the slots may be used where they lie, for as long as one likes.
    pub retained: bool,
    /// One key per transport that both ends know; opaque here. At most [`MAX_KEYS`] of at most [`MAX_KEY_BYTES`].
    pub keys: Vec<Vec<u8>>,
}

record!(TableOffer { generation: u64, first_offset: u64, slot_size: u32, slots: u32, retained: bool, keys: Keys });

/// The true primary's address, as far as the source can know it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Announce {
    /// The host that a replica's server must use. Empty: the host by which the replica reached the source.
    pub host: String,
    /// The port that it must use.
    pub port: u16,
    /// Whether that port speaks TLS to replicas.
    pub tls: bool,
    /// The address by which the source itself reaches the server, for messages to people.
    pub source_sees_as: String,
}

record!(Announce {
    host: Name<MAX_ADDRESS_BYTES>,
    port: u16,
    tls: bool,
    source_sees_as: Name<MAX_ADDRESS_BYTES>,
});

/// Why a source has no offer yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum WaitCause {
    /// A snapshot is being prepared: an offer follows.
    NotYet,
    /// Other replicas still read the present snapshot; the next one follows it.
    Busy,
    /// The last attempt to take a snapshot failed. The source tries again.
    LastAttemptFailed,
}

codes!(WaitCause is "cause of waiting" {
    0 => NotYet,
    1 => Busy,
    2 => LastAttemptFailed,
});

/// Why a source says no.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RefusalCode {
    /// It serves as many replicas as it may.
    Busy,
    /// It is being stopped.
    Stopping,
    /// The replica held up the others; it alone must begin again.
    Stalled,
    /// The server refuses to be captured: somebody must change its settings or its permissions.
    PrimaryRefuses,
    /// The journal does not reach back to where the replica is: nothing but the primary itself, or a new snapshot, helps.
    HistoryGone,
}

impl RefusalCode {
    /// Whether the same request may be granted later.
    pub fn may_pass(self) -> bool {
        match self {
            RefusalCode::Busy | RefusalCode::Stopping | RefusalCode::Stalled => true,
            RefusalCode::PrimaryRefuses | RefusalCode::HistoryGone => false,
        }
    }
}

impl fmt::Display for RefusalCode {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        to.write_str(match self {
            RefusalCode::Busy => "busy",
            RefusalCode::Stopping => "stopping",
            RefusalCode::Stalled => "stalled",
            RefusalCode::PrimaryRefuses => "the primary refuses",
            RefusalCode::HistoryGone => "history gone",
        })
    }
}

codes!(RefusalCode is "refusal" {
    0 => Busy,
    1 => Stopping,
    2 => Stalled,
    3 => PrimaryRefuses,
    4 => HistoryGone,
});

/// Where a region lies, once per transport.
pub(crate) type Keys = List<Bytes<MAX_KEY_BYTES>, MAX_KEYS>;
