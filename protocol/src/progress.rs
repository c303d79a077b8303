//! Progress: what a replica is doing, how far it is, and how it ended.

use std::fmt;

use remora_wire::codec::{Maybe, Text};
use remora_wire::{codes, record};
use serde::Serialize;

use crate::bounds::MAX_WHY_BYTES;

/// A replica's progress.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Progress {
    /// The generation that all other fields are about.
    pub generation: u64,
    /// What the replica is doing.
    pub phase: Phase,
    /// The transport it reads over, as the fabric numbers them; `None` before it reads.
    pub transport: Option<u8>,
    /// Why no better transport is used; empty if none is better.
    pub transport_why: String,
    /// Why its server does not load small values in the fast way; empty if it does, or if that is not decided yet.
    pub no_fast_keys: String,
    /// It will never need slots below this number again: they may be retired.
    pub slots_below: u64,
    /// Slots of the snapshot that it holds.
    pub slots_held: u64,
    /// Bytes of the snapshot that it holds.
    pub bytes: u64,
    /// Replication offset that its server has acknowledged.
    pub applied_offset: u64,
    /// What it reads from other replicas and serves to them; `None`: it does not take part in relaying.
    pub relaying: Option<Relaying>,
}

record!(Progress {
    generation: u64,
    phase: Phase,
    transport: Maybe<u8>,
    transport_why: Text<MAX_WHY_BYTES>,
    no_fast_keys: Text<MAX_WHY_BYTES>,
    slots_below: u64,
    slots_held: u64,
    bytes: u64,
    applied_offset: u64,
    relaying: Maybe<Relaying>,
});

/// Where a replica reads its slots from, and which ones others may read from it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Relaying {
    /// The session of the replica that it reads from; `None`: the source.
    pub reads_from: Option<u64>,
    /// The oldest slot that it holds.
    pub oldest: u64,
    /// The end of the slots that it holds: it has all from `oldest` up to, but not including, this one.
    pub held: u64,
    /// It waits for its own server or its own limits, and not for its upstream.
    pub is_full: bool,
}

record!(Relaying { reads_from: Maybe<u64>, oldest: u64, held: u64, is_full: bool });

/// What a replica is doing, in the order in which a sync passes through.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Phase {
    /// There is nothing to read yet.
    Waiting,
    /// Slots are read over the fabric.
    Transfer,
    /// All slots are here, and the server is still loading them.
    Load,
    /// The server applies the journal up to the present.
    CatchUp,
    /// The server is being pointed at the primary.
    HandOff,
    /// The server follows the primary through the agents, permanently (`--stay`).
    Stay,
    /// The server is an ordinary replica of the primary.
    Done,
}

impl fmt::Display for Phase {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        to.pad(match self {
            Phase::Waiting => "waiting",
            Phase::Transfer => "transfer",
            Phase::Load => "load",
            Phase::CatchUp => "catch-up",
            Phase::HandOff => "hand-off",
            Phase::Stay => "stay",
            Phase::Done => "done",
        })
    }
}

codes!(Phase is "phase" {
    0 => Waiting,
    1 => Transfer,
    2 => Load,
    3 => CatchUp,
    4 => HandOff,
    5 => Stay,
    6 => Done,
});

/// The result of a replica that leaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Outcome {
    /// Its server is an ordinary replica of the primary.
    HandedOver,
    /// The agent was stopped.
    Stopped,
    /// The sync failed.
    Failed,
}

codes!(Outcome is "outcome" {
    0 => HandedOver,
    1 => Stopped,
    2 => Failed,
});

/// Why a replica cannot read from another one any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum LossCause {
    /// The peer has gone, or does not answer.
    Gone,
    /// The peer's bytes are not the source's.
    Lied,
    /// The peer no longer holds the slot that is needed next.
    Passed,
    /// The peer refuses: it has too many readers, or does not have the snapshot.
    Refused,
}

codes!(LossCause is "cause of a loss" {
    0 => Gone,
    1 => Lied,
    2 => Passed,
    3 => Refused,
});
