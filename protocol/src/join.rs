//! Joining: what a replica's agent reports about itself when it connects.

use remora_wire::codec::{Maybe, Name};
use remora_wire::record;

use crate::bounds::{MAX_ADDRESS_BYTES, MAX_NAME_BYTES, MAX_ZONE_BYTES};

/// What a replica's agent says of itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Join {
    /// How the replica is called in status reports; at most [`MAX_NAME_BYTES`].
    pub name: String,
    /// Its server's kind and version, as "valkey 9.1.2".
    pub server: String,
    /// What it holds already from before a cut.
    pub resume: Option<Resume>,
    /// It only wants to know what an offer would say: no snapshot is taken for it, and the offer's tables are empty.
    pub plan_only: bool,
    /// It can read from other replicas, and perhaps be read; none: it reads from the source alone.
    pub relays: Option<Relays>,
}

record!(Join {
    name: Name<MAX_NAME_BYTES>,
    server: Name<MAX_NAME_BYTES>,
    resume: Maybe<Resume>,
    plan_only: bool,
    relays: Maybe<Relays>,
});

/// How a replica takes part in passing slots on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Relays {
    /// Address and port at which others may read its slots, as "10.0.0.7:41234"; an unspecified host stands for the one that the source
    /// sees it by. Empty: it does not serve.
    pub serves_at: String,
    /// Where it stands, in words of its operator's; at most [`MAX_ZONE_BYTES`]. Replicas of one zone rather read from each other.
    pub zone: String,
}

record!(Relays { serves_at: Name<MAX_ADDRESS_BYTES>, zone: Name<MAX_ZONE_BYTES> });

/// A replica that another one is sent to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Upstream {
    /// Its session with the source: its name in what the two say of it.
    pub session: u64,
    /// How it is called.
    pub name: String,
    /// Where it serves: address and port.
    pub address: String,
}

record!(Upstream { session: u64, name: Name<MAX_NAME_BYTES>, address: Name<MAX_ADDRESS_BYTES> });

/// What a replica holds of a generation that it began earlier.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Resume {
    /// The generation; worth something only while the source still has it.
    pub generation: u64,
    /// How many of its slots it holds without a gap from the first, checked. It may hold others; those that it lacks it reads.
    pub held_slots: u64,
    /// Its server has loaded the whole snapshot: it needs the stream only, from `next_byte` on.
    pub loaded: bool,
    /// The history that it is part of, as 40 hexadecimal digits.
    pub replid: [u8; 40],
    /// Replication offset of the next byte of the stream that it needs.
    pub next_byte: u64,
}

record!(Resume { generation: u64, held_slots: u64, loaded: bool, replid: [u8; 40], next_byte: u64 });
