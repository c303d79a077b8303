//! What the machine knows of the snapshot, the stream and each replica. Others see it through a shared reference only.

use std::time::Instant;

use remora_fabric::TransportKind;
use remora_protocol::{Phase, WaitCause};
use remora_redis::ReplId;

use super::event::{Format, Report, Resume};

/// One snapshot, from asking for it to its end.
pub(crate) struct Snapshot {
    pub(crate) generation: u64,
    pub(crate) stage: Stage,
    pub(crate) format: Format,
    pub(super) asked: Instant,
}

/// How far a snapshot is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    /// The primary was asked and has not answered.
    Asked,
    /// Slots are being filled.
    Open { replid: ReplId, offset: u64 },
    /// Whole.
    Sealed { replid: ReplId, offset: u64, bytes: u64 },
}

impl Snapshot {
    pub(crate) fn origin(&self) -> Option<(ReplId, u64)> {
        match self.stage {
            Stage::Asked => None,
            Stage::Open { replid, offset } | Stage::Sealed { replid, offset, .. } => Some((replid, offset)),
        }
    }

    /// When the server was asked for it.
    pub(crate) fn asked(&self) -> Instant {
        self.asked
    }

    pub(super) fn is_sealed(&self) -> bool {
        matches!(self.stage, Stage::Sealed { .. })
    }
}

/// The stream in the journal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stream {
    /// The generation that began it.
    pub(crate) generation: u64,
    pub(crate) replid: ReplId,
}

/// A joined replica.
pub(crate) struct Replica {
    pub(crate) name: String,
    pub(crate) address: String,
    pub(crate) joined: Instant,
    pub(crate) heard: Instant,
    /// The generation it was given; `None` while it waits.
    pub(crate) generation: Option<u64>,
    pub(crate) at: Report,
    pub(crate) rate: u64,
    pub(super) resume: Option<Resume>,
    pub(super) reads: Format,
    pub(super) moved: Instant,
    pub(super) told: Option<(WaitCause, String)>,
    /// The history of the stream in its last offer.
    pub(super) history: Option<ReplId>,
    /// When it last reported a higher applied offset, or joined.
    pub(super) advanced: Instant,
    /// Its stream has ended and its server has loaded the snapshot: it goes to the primary and needs no other snapshot.
    pub(super) sent_away: bool,
}

impl Replica {
    /// By what it reads, once it does.
    pub(crate) fn transport_name(&self) -> String {
        let kind = self.at.transport.and_then(TransportKind::from_code);
        kind.map(|kind| kind.name().to_string()).unwrap_or_default()
    }

    /// Slots of that generation that it brings along, from the first without a gap.
    pub(crate) fn held_slots(&self, generation: u64) -> u64 {
        self.resume.filter(|resume| resume.generation == generation).map_or(0, |resume| resume.held_slots)
    }

    /// Its server holds a whole snapshot: it needs the stream only.
    pub(crate) fn is_loaded(&self) -> bool {
        self.resume.is_some_and(|resume| resume.loaded.is_some())
    }

    /// Its server is loading the snapshot, or has loaded it.
    pub(super) fn has_all_slots(&self) -> bool {
        self.at.phase > Phase::Transfer
    }

    /// Its server has loaded the snapshot and needs the stream only.
    pub(super) fn has_loaded(&self) -> bool {
        self.at.phase > Phase::Load
    }

    /// It still needs slots of the snapshot.
    pub(super) fn is_reading(&self) -> bool {
        self.generation.is_some() && matches!(self.at.phase, Phase::Waiting | Phase::Transfer)
    }
}
