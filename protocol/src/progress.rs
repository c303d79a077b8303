//! Progress: what a replica is doing, how far it is, and how it ended.

use std::fmt;

use remora_wire::codec::{Maybe, Text};
use remora_wire::{codes, record};
use serde::Serialize;

use crate::bounds::MAX_WHY_BYTES;

/// How far a replica has come.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Progress {
    /// The generation that all of this speaks of.
    pub generation: u64,
    /// What it is doing.
    pub phase: Phase,
    /// The transport it reads by, numbered as the fabric numbers them; none before it reads.
    pub transport: Option<u8>,
    /// Why it reads by no better one; empty if there is none.
    pub transport_why: String,
    /// It never needs slots below this number again: they may be retired.
    pub slots_below: u64,
    /// Slots of the snapshot that it holds.
    pub slots_held: u64,
    /// Bytes of the snapshot that it holds.
    pub bytes: u64,
    /// Replication offset that its server has acknowledged.
    pub applied_offset: u64,
    /// What it takes from others and lends to them; none: it takes no part in that.
    pub relaying: Option<Relaying>,
}

record!(Progress {
    generation: u64,
    phase: Phase,
    transport: Maybe<u8>,
    transport_why: Text<MAX_WHY_BYTES>,
    slots_below: u64,
    slots_held: u64,
    bytes: u64,
    applied_offset: u64,
    relaying: Maybe<Relaying>,
});

/// Where a replica takes its slots from, and what others may take from it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Relaying {
    /// The session of the replica that it reads from; none: it reads from the source.
    pub reads_from: Option<u64>,
    /// The oldest slot that it holds.
    pub oldest: u64,
    /// It holds all slots from there up to this number.
    pub held: u64,
    /// It waits for its own server or its own limits, not for whom it reads from.
    pub is_full: bool,
}

record!(Relaying { reads_from: Maybe<u64>, oldest: u64, held: u64, is_full: bool });

/// What a replica is doing, in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Phase {
    /// Nothing to read yet.
    Waiting,
    /// Slots cross the fabric.
    Transfer,
    /// All slots are here; the server is still loading them.
    Load,
    /// The server applies the journal up to the present.
    CatchUp,
    /// The server is being pointed at the primary.
    HandOff,
    /// The server follows through the agents, for good.
    Stay,
    /// The server is an ordinary replica.
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

/// How it ended for a replica that leaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Outcome {
    /// Its server is an ordinary replica of the primary.
    HandedOver,
    /// Somebody stopped the agent.
    Stopped,
    /// It could not be done.
    Failed,
}

codes!(Outcome is "outcome" {
    0 => HandedOver,
    1 => Stopped,
    2 => Failed,
});

/// Why a replica can't read from another any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum LossCause {
    /// It is gone, or does not answer.
    Gone,
    /// Its bytes are not the source's.
    Lied,
    /// It no longer holds what is wanted next.
    Passed,
    /// It does not let us read: it has too many readers, or no such snapshot.
    Refused,
}

codes!(LossCause is "cause of a loss" {
    0 => Gone,
    1 => Lied,
    2 => Passed,
    3 => Refused,
});
