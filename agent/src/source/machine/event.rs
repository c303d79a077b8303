//! The machine's input and output: rules and events go in, actions come out.

use std::time::Duration;

use remora_protocol::{self as protocol, Phase, Progress, RefusalCode, WaitCause};
use remora_redis::ReplId;

use crate::source::capture::CaptureEvent;

/// A replica's session, as numbered by the messenger.
pub(crate) type Session = u64;

/// Limits that the machine is given once, at its creation.
#[derive(Clone, Debug)]
pub(crate) struct Rules {
    /// The highest age of a snapshot that is still offered to another replica.
    pub(crate) max_age: Duration,
    /// The highest number of joined replicas.
    pub(crate) max_replicas: usize,
    /// How long a replica may hold up the writer of a windowed snapshot.
    pub(crate) stall_limit: Duration,
    /// The shortest mean time between two forks of the primary, after the first few; zero: no limit.
    pub(crate) fork_interval: Duration,
    /// How long ago a message to subscribers may have been published that a replica gets, before it joined.
    pub(crate) repeat_messages: Duration,
    /// Size of a slot.
    pub(crate) slot_bytes: u64,
}

/// What happened.
#[derive(Debug)]
pub(crate) enum Event {
    /// An authenticated replica asks for a snapshot.
    Joined { session: Session, name: String, address: String, resume: Option<Resume>, reads: Format },
    /// A replica reports its progress.
    Progress { session: Session, at: Report },
    /// A replica has left, timed out or lost its connection. `done`: it was handed over.
    Gone { session: Session, done: bool },
    /// An event of a capture.
    Capture(CaptureEvent),
    /// Time has passed.
    Tick,
}

/// The format of a snapshot, and the newest format that a replica's server reads.
///
/// Valkey has a format of its own from version 9 on. Only this format has the expiry times of hash fields: if the data
/// set has any, Valkey breaks off a snapshot in the format that it shares with Redis. A server that reads its own
/// format reads the shared one too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Format {
    /// The newest format that the primary knows.
    Own,
    /// A format that older servers and those of the other family know.
    Shared,
}

/// The slots or the data set that a replica holds from an earlier session.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Resume {
    pub(crate) generation: u64,
    /// Slots that the replica holds from the first one without a gap.
    pub(crate) held_slots: u64,
    /// Set if the replica's server has loaded the whole snapshot: it needs only the stream of this history, from this
    /// byte on.
    pub(crate) loaded: Option<(ReplId, u64)>,
}

impl Resume {
    pub(crate) fn of(asked: &protocol::Resume) -> Resume {
        Resume {
            generation: asked.generation,
            held_slots: asked.held_slots,
            loaded: asked.loaded.then_some((asked.replid, asked.next_byte)),
        }
    }
}

/// The progress that a replica reports.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Report {
    pub(crate) phase: Phase,
    pub(crate) transport: Option<u8>,
    pub(crate) slots_below: u64,
    pub(crate) slots_held: u64,
    pub(crate) bytes: u64,
    pub(crate) applied_offset: u64,
}

impl Report {
    pub(super) const NOTHING: Report =
        Report { phase: Phase::Waiting, transport: None, slots_below: 0, slots_held: 0, bytes: 0, applied_offset: 0 };

    pub(crate) fn of(progress: &Progress) -> Report {
        Report {
            phase: progress.phase,
            transport: progress.transport,
            slots_below: progress.slots_below,
            slots_held: progress.slots_held,
            bytes: progress.bytes,
            applied_offset: progress.applied_offset,
        }
    }
}

/// What the source's loop has to do.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Action {
    /// Take a snapshot. `with_stream`: follow the stream too, as no capture follows it yet. `fresh`: into new memory,
    /// as a reader may still use the old one.
    Capture { generation: u64, with_stream: bool, fresh: bool },
    /// Offer this replica the current snapshot and the journal.
    Offer { session: Session },
    /// Tell this replica that it must wait, and why.
    Wait { session: Session, cause: WaitCause, text: String },
    /// Refuse this replica further service, tell it why, and close its lanes.
    Drop { session: Session, code: RefusalCode, text: String },
    /// Tell this replica that the generation it was given has ended, and why.
    GenerationGone { session: Session, generation: u64, text: String },
    /// Revoke read access to this generation's snapshot.
    RevokeSnapshot { generation: u64 },
    /// The stream has ended: revoke read access to its journal and end its thread.
    EndStream { generation: u64 },
    /// End the capture of this snapshot, which no replica waits for.
    StopCapture { generation: u64 },
    /// Let the snapshot's writer reuse every slot below this one. It grows within a generation; each capture begins at
    /// 0.
    AllowRetiring { below: u64 },
}
