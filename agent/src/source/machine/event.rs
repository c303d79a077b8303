//! What goes into the machine and what comes out of it: events, readings, actions.

use std::time::Duration;

use remora_protocol::{Phase, RefusalCode, WaitCause};

use crate::source::capture::CaptureEvent;

/// A replica's session, as numbered by the messenger.
pub(crate) type Session = u64;

/// What the machine must be told once.
#[derive(Clone, Debug)]
pub(crate) struct Rules {
    /// How old a snapshot may be when it is offered once more.
    pub(crate) max_age: Duration,
    /// How many replicas may be joined at once.
    pub(crate) max_replicas: usize,
    /// How long a replica may hold up the writer of a windowed table.
    pub(crate) stall_limit: Duration,
}

/// What happened.
#[derive(Debug)]
pub(crate) enum Event {
    /// An authenticated replica asks for a snapshot.
    Joined { session: Session, name: String, address: String, resume: Option<Resume>, reads: Format },
    /// A replica says how far it is.
    Progress { session: Session, at: Report },
    /// A replica is gone: it left, fell silent or lost its connection.
    Gone { session: Session, done: bool },
    /// A capture thread has something to say.
    Capture(CaptureEvent),
    /// Time has passed.
    Tick,
}

/// In which format a snapshot is written, and which a replica's server reads.
///
/// Valkey from 9 on has one of its own, which alone holds the times at which fields of hashes expire; where such fields are,
/// a snapshot in the format that it shares with Redis breaks off. A server that reads its own format reads the shared one too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Format {
    /// The newest that the primary knows.
    Own,
    /// One that servers of the other family, and older ones, know.
    Shared,
}

/// What a replica holds from an earlier session.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Resume {
    pub(crate) generation: u64,
    /// Slots that it holds without a gap from the first.
    pub(crate) held_slots: u64,
    /// Its server holds the whole snapshot: it needs only the stream of that history, from that byte on.
    pub(crate) loaded: Option<([u8; 40], u64)>,
}

/// How far a replica is.
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
}

/// What is to be done.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Action {
    /// Take a snapshot, with the stream too unless one is running. `fresh`: into new memory, since a reader may still use the old.
    Capture { generation: u64, with_stream: bool, fresh: bool },
    /// Give that replica the present snapshot and the journal.
    Offer { session: Session },
    /// That replica must wait; say why.
    Wait { session: Session, cause: WaitCause, text: String },
    /// That replica can't be served any more; say why, and cut its lanes.
    Drop { session: Session, code: RefusalCode, text: String },
    /// The generation is over for those who read it; say why.
    GenerationGone { session: Session, generation: u64, text: String },
    /// Revoke read access to this generation's snapshot.
    RevokeSnapshot { generation: u64 },
    /// The stream has ended: revoke read access to its journal and end its thread.
    EndStream { generation: u64 },
    /// End the capture of this snapshot, which no replica waits for.
    StopCapture { generation: u64 },
    /// Let the snapshot's writer reuse every slot below this one. It grows within a generation; each capture begins at 0.
    AllowRetiring { below: u64 },
}
