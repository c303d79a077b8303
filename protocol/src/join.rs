//! Joining: what a replica's agent reports about itself when it connects.

use remora_redis::ReplId;
use remora_wire::codec::{Maybe, Name};
use remora_wire::record;

use crate::bounds::{MAX_ADDRESS_BYTES, MAX_NAME_BYTES, MAX_ZONE_BYTES};
use crate::replid::Digits;

/// What a replica's agent reports about itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Join {
    /// The replica's name in status reports; at most [`MAX_NAME_BYTES`].
    pub name: String,
    /// Kind and version of its server, as "valkey 9.1.2".
    pub server: String,
    /// What it still holds from before its connection broke.
    pub resume: Option<Resume>,
    /// It only asks what an offer would contain: no snapshot is taken for it, and the offer's tables are empty.
    pub plan_only: bool,
    /// How it takes part in relaying; `None`: it reads from the source alone.
    pub relays: Option<Relays>,
}

record!(Join {
    name: Name<MAX_NAME_BYTES>,
    server: Name<MAX_NAME_BYTES>,
    resume: Maybe<Resume>,
    plan_only: bool,
    relays: Maybe<Relays>,
});

/// How a replica takes part in relaying slots to other replicas.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Relays {
    /// Address and port at which others may read its slots, as "10.0.0.7:41234". An unspecified host stands for the one
    /// that the source sees it by. Empty: it does not serve.
    pub serves_at: String,
    /// The operator's name for its location; at most [`MAX_ZONE_BYTES`]. Replicas prefer upstreams in the same zone.
    pub zone: String,
}

record!(Relays { serves_at: Name<MAX_ADDRESS_BYTES>, zone: Name<MAX_ZONE_BYTES> });

/// A replica that another replica is assigned to read from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Upstream {
    /// Its session with the source, which identifies it.
    pub session: u64,
    /// Its name.
    pub name: String,
    /// Address and port at which it serves.
    pub address: String,
}

record!(Upstream { session: u64, name: Name<MAX_NAME_BYTES>, address: Name<MAX_ADDRESS_BYTES> });

/// What a replica holds of a generation that it joined earlier.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Resume {
    /// The generation. Useful only while the source still has it.
    pub generation: u64,
    /// Number of slots that it holds without a gap from the first one, verified. It may hold others; it reads the ones
    /// it lacks.
    pub held_slots: u64,
    /// Its server has loaded the whole snapshot: it needs only the stream, from `next_byte` on.
    pub loaded: bool,
    /// The replication id of the history that it follows.
    pub replid: ReplId,
    /// Replication offset of the next byte of the stream that it needs.
    pub next_byte: u64,
}

record!(Resume { generation: u64, held_slots: u64, loaded: bool, replid: Digits, next_byte: u64 });
