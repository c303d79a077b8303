//! Offers: where a generation's tables are and how to reach them. Also why there is no offer: waiting and refusals.

use std::fmt;

use remora_redis::ReplId;
use remora_wire::codec::{Bytes, List, Maybe, Name, Text};
use remora_wire::{codes, record};

use crate::bounds::{MAX_ADDRESS_BYTES, MAX_KEY_BYTES, MAX_KEYS, MAX_NAME_BYTES, MAX_SEAL_BYTES, MAX_TEXT_BYTES};
use crate::join::Upstream;
use crate::replid::{Digits, DigitsIfKnown};

/// A generation and where it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Offer {
    /// The generation's number, unique for the source.
    pub generation: u64,
    /// The primary's replication id. `None` only in an offer without tables, if the primary did not report one.
    pub replid: Option<ReplId>,
    /// The history that this one continues, as far as the server reports it.
    pub former: Option<Former>,
    /// Replication offset of the last byte that the snapshot contains. In an offer without tables, the server's.
    pub offset: u64,
    /// The snapshot's table.
    pub snapshot: TableOffer,
    /// The journal's table. It begins with the byte after `offset`.
    pub journal: TableOffer,
    /// The address of the primary that the replica's server will follow after the hand-off.
    pub primary: Announce,
    /// Kind and version of the primary, as "redis 7.0.15".
    pub server: String,
    /// The run id of the captured server, from `INFO`; empty if it does not report one.
    pub run_id: String,
    /// A number that the source's process has drawn when it started. A source that was started again has another one.
    pub process: u64,
    /// Size of the primary's replication backlog, in bytes.
    pub backlog_bytes: u64,
    /// Growth of the primary's replication offset, in bytes per second. Together with the backlog it says how long a
    /// hand-off may take.
    pub write_rate: u64,
    /// The replica to read the snapshot's slots from; `None`: the source.
    pub upstream: Option<Upstream>,
    /// What may make this sync fail although nothing forbids it, for people; empty if nothing is known.
    pub warning: String,
    /// Why no snapshot of the captured server can be taken now, for people: it has no link to its own primary, it
    /// loads, or it does not answer. Empty if nothing stands in the way.
    pub obstacle: String,
    /// What a snapshot of the captured server would be; `None` from a source that does not know it.
    pub terms: Option<Terms>,
}

record!(Offer {
    generation: u64,
    replid: DigitsIfKnown,
    former: Maybe<Former>,
    offset: u64,
    snapshot: TableOffer,
    journal: TableOffer,
    primary: Announce,
    server: Name<MAX_NAME_BYTES>,
    run_id: Name<MAX_NAME_BYTES>,
    process: u64,
    backlog_bytes: u64,
    write_rate: u64,
    upstream: Maybe<Upstream>,
    warning: Text<MAX_TEXT_BYTES>,
    obstacle: Text<MAX_TEXT_BYTES>,
    terms: Maybe<Terms>,
});

/// What a replica that joins now gets, and what it costs the captured server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Terms {
    /// Bytes of the snapshot: of the present one, or as many as the server's memory suggests.
    pub snapshot_bytes: u64,
    /// Bytes of the source's memory for it.
    pub ring_bytes: u64,
    /// Whether slots of that memory are reused, so that no replica can join late.
    pub windowed: bool,
    /// Whether the present snapshot serves, and the server does not fork.
    pub held: bool,
    /// Whether other hosts read sealed tables.
    pub sealed: bool,
    /// Seconds that the server waits before it forks; 0 if it does not wait, or does not say.
    pub fork_delay_seconds: u64,
    /// Whether the source does without that wait (`--tune-server`).
    pub tunes_server: bool,
    /// Whether the obstacle stays until an administrator changes the server.
    pub is_refused: bool,
    /// Whether the source offers shared memory to readers on its host.
    pub offers_shm: bool,
    /// Whether the source offers reads over RDMA.
    pub offers_verbs: bool,
}

record!(Terms {
    snapshot_bytes: u64,
    ring_bytes: u64,
    windowed: bool,
    held: bool,
    sealed: bool,
    fork_delay_seconds: u64,
    tunes_server: bool,
    is_refused: bool,
    offers_shm: bool,
    offers_verbs: bool,
});

/// A history that a server has left for another one, which is the same up to some byte (`master_replid2` and
/// `second_repl_offset`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Former {
    /// Its replication id.
    pub replid: ReplId,
    /// Replication offset of the first byte that it does not have in common with the present history.
    pub end: u64,
}

record!(Former { replid: Digits, end: u64 });

/// The shape of one table, and how to reach it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TableOffer {
    /// The generation in the table's superblock. A journal outlives the snapshot that it began with.
    pub generation: u64,
    /// The replication offset in the table's superblock: the one of the snapshot that it began with.
    pub first_offset: u64,
    /// Size of a slot, in bytes.
    pub slot_size: u32,
    /// Number of slots in the ring.
    pub slots: u32,
    /// The memory of a published slot never changes, not even after this generation ends: readers may use slots in
    /// place, for as long as they like.
    pub retained: bool,
    /// One key per transport that both ends support; opaque to this protocol. At most [`MAX_KEYS`] of at most
    /// [`MAX_KEY_BYTES`].
    pub keys: Vec<Vec<u8>>,
    /// The number of an algorithm and the secret of the table's keys, if the transports to other hosts export a sealed
    /// table; otherwise empty. Only an encrypted connection carries it.
    pub seal: Vec<u8>,
    /// Whether the transports to other hosts export a table whose slots may be compressed.
    pub compressed: bool,
}

record!(TableOffer {
    generation: u64,
    first_offset: u64,
    slot_size: u32,
    slots: u32,
    retained: bool,
    keys: Keys,
    seal: Bytes<MAX_SEAL_BYTES>,
    compressed: bool,
});

/// The primary's address, as far as the source knows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Announce {
    /// The host that the replica's server must use. Empty: the host by which the replica reached the source.
    pub host: String,
    /// The port that it must use.
    pub port: u16,
    /// Whether that port speaks TLS to replicas.
    pub tls: bool,
    /// The address by which the source reaches the primary, for messages to people.
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
    /// A snapshot is being prepared; an offer follows.
    NotYet,
    /// Other replicas still read the present snapshot; the next one follows it.
    Busy,
    /// The last attempt to take a snapshot failed. The source tries again.
    LastAttemptFailed,
    /// No snapshot of the captured server can be taken now: it has no link to its own primary, it loads, or it does not
    /// answer.
    CutOff,
}

codes!(WaitCause is "cause of waiting" {
    0 => NotYet,
    1 => Busy,
    2 => LastAttemptFailed,
    3 => CutOff,
});

/// Why a source refuses a replica.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RefusalCode {
    /// It serves as many replicas as its limit allows.
    Busy,
    /// It is stopping.
    Stopping,
    /// The replica held up the others. It must start over.
    Stalled,
    /// The server refuses the capture: its settings or the user's permissions must change first.
    PrimaryRefuses,
    /// The journal does not reach back to the replica's offset: it must follow the primary itself, or load a new
    /// snapshot.
    HistoryGone,
    /// The peer's token does not permit the request.
    NotPermitted,
}

impl RefusalCode {
    /// Whether the same request may be granted later.
    pub fn may_pass(self) -> bool {
        match self {
            RefusalCode::Busy | RefusalCode::Stopping | RefusalCode::Stalled => true,
            RefusalCode::PrimaryRefuses | RefusalCode::HistoryGone | RefusalCode::NotPermitted => false,
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
            RefusalCode::NotPermitted => "not permitted",
        })
    }
}

codes!(RefusalCode is "refusal" {
    0 => Busy,
    1 => Stopping,
    2 => Stalled,
    3 => PrimaryRefuses,
    4 => HistoryGone,
    5 => NotPermitted,
});

/// The keys of a region, one per transport.
pub(crate) type Keys = List<Bytes<MAX_KEY_BYTES>, MAX_KEYS>;
