//! The probe region: scratch memory that the source exports to peers that measure the transports (`remora probe`), with
//! or without a snapshot.
//!
//! ```text
//!   Absent ── a request ──▶ Creating (a thread of its own) ──▶ Exported ── the last session has ended ──▶ Absent
//! ```
//!
//! The region is memory beyond `--memory`: [`REGION_BYTES`], shared by all sessions that measure at a time, and none
//! while no session does. Read access to it is granted with its offer, per session, as for tables. A session that
//! measures gets no access to these.

use std::collections::HashSet;
use std::sync::Arc;

use remora_fabric::{Error, Memory, Pages, RegionId};
use remora_protocol::{Message, RefusalCode};

use super::exports::Exports;
use super::machine::Session;
use super::tables::Exported;
use super::{Incoming, Source};

/// The state of the region, and the sessions that use it.
#[derive(Default)]
pub(super) struct ProbeRegion {
    state: State,
    sessions: HashSet<Session>,
    /// The generation of the last region. Each region has its own, so that one that is being revoked is never taken for
    /// the next.
    generation: u64,
}

#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum State {
    #[default]
    Absent,
    Creating,
    Exported(RegionId),
}

/// What the source has to do after a request.
pub(super) enum Request {
    /// Create the region with this id.
    Create(RegionId),
    /// Wait: the region is being created.
    Wait,
    /// Offer the region.
    Offer(RegionId),
}

impl ProbeRegion {
    /// A session requests the region.
    pub(super) fn requested(&mut self, session: Session) -> Request {
        self.sessions.insert(session);
        match self.state {
            State::Creating => Request::Wait,
            State::Exported(id) => Request::Offer(id),
            State::Absent => {
                self.state = State::Creating;
                self.generation += 1;
                Request::Create(RegionId { generation: self.generation, region: PROBE_REGION })
            }
        }
    }

    /// The region was created, or could not be (`id` is `None`). Returns the sessions that wait for it. `None` if all
    /// of them have ended: the caller revokes the region at once.
    pub(super) fn created(&mut self, id: Option<RegionId>) -> Option<Vec<Session>> {
        self.state = id.map_or(State::Absent, State::Exported);
        if self.sessions.is_empty() {
            self.state = State::Absent;
            return None;
        }
        let waiting = self.sessions.iter().copied().collect();
        if id.is_none() {
            self.sessions.clear();
        }
        Some(waiting)
    }

    /// A session has ended. Returns the region to revoke if it was the last that used it.
    pub(super) fn left(&mut self, session: Session) -> Option<RegionId> {
        let was_here = self.sessions.remove(&session);
        match self.state {
            State::Exported(id) if was_here && self.sessions.is_empty() => {
                self.state = State::Absent;
                Some(id)
            }
            _ => None,
        }
    }
}

impl Source {
    /// A session requests memory to measure with.
    pub(super) fn probe_requested(&mut self, session: Session) {
        match self.probe_region.requested(session) {
            Request::Create(id) => {
                let (exports, incoming) = (self.exports.clone(), self.incoming.clone());
                tokio::task::spawn_blocking(move || {
                    let exported = create(id, &exports);
                    // Fails only while the source stops.
                    let _ = incoming.blocking_send(Incoming::ProbeRegionReady { id, exported });
                });
            }
            Request::Wait => {}
            Request::Offer(id) => self.offer_probe_region(session, id),
        }
    }

    /// The region is exported, or could not be.
    pub(super) fn probe_region_ready(&mut self, id: RegionId, exported: Result<(), Error>) {
        let waiting = self.probe_region.created(exported.is_ok().then_some(id));
        match (waiting, exported) {
            (None, _) => self.exports.revoke_in_background(id),
            (Some(waiting), Ok(())) => waiting.into_iter().for_each(|session| self.offer_probe_region(session, id)),
            (Some(waiting), Err(error)) => {
                let text = format!("the source cannot provide memory to measure with: {error}");
                let refusal = Message::Refused { code: RefusalCode::Busy, text };
                waiting.into_iter().for_each(|session| self.send(session, refusal.clone()));
            }
        }
    }

    fn offer_probe_region(&mut self, session: Session, id: RegionId) {
        let Some(peer) = self.sessions.get_mut(&session) else { return };
        peer.grant(session, &self.exports, |readable| readable.probe = Some(id));
        self.send(session, Message::ProbeOffer { keys: self.exports.keys(id) });
    }

    /// A session has ended that may have measured.
    pub(super) fn probe_left(&mut self, session: Session) {
        if let Some(id) = self.probe_region.left(session) {
            self.exports.revoke_in_background(id);
        }
    }
}

/// Creates the region and exports it over every transport that accepts it. Blocks: it touches the pages, and an RDMA
/// device registers them.
///
/// # Errors
/// There is not enough memory, or no transport accepts the region.
fn create(id: RegionId, exports: &Exports) -> Result<(), Error> {
    let memory = Arc::new(Memory::create("remora-probe", REGION_BYTES, Pages::Small)?);
    memory.prefault(0..REGION_BYTES)?;
    // Pages with different content, in case a layer below merges or compresses equal ones.
    for (page, offset) in (0..REGION_BYTES).step_by(PAGE_BYTES).enumerate() {
        memory.fill(offset..offset + PAGE_BYTES as u64, (page % 251) as u8)?;
    }
    exports.export(id, &Exported::plain(&memory))
}

/// The region's number, beside the two of the tables.
const PROBE_REGION: u32 = 2;

/// Bytes of the region: sixteen of the largest reads that are measured. That is more than a processor's caches hold, so
/// that reads are not served from there.
const REGION_BYTES: u64 = 64 << 20;

/// Bytes of a page.
const PAGE_BYTES: usize = 4096;

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn it_is_created_once_for_all_and_revoked_with_the_last() {
        let mut region = ProbeRegion::default();
        let Request::Create(id) = region.requested(1) else { panic!("the region existed") };
        assert!(matches!(region.requested(2), Request::Wait));
        let mut waiting = region.created(Some(id)).unwrap();
        waiting.sort_unstable();
        assert_eq!(waiting, [1, 2]);
        assert!(matches!(region.requested(3), Request::Offer(again) if again == id));
        assert_eq!((region.left(1), region.left(3), region.left(9), region.left(2)), (None, None, None, Some(id)));
        let Request::Create(next) = region.requested(4) else { panic!("the region was not revoked") };
        assert!(next.generation > id.generation);
    }

    #[test]
    fn a_region_that_no_session_waits_for_is_revoked_at_once() {
        let mut region = ProbeRegion::default();
        let Request::Create(id) = region.requested(1) else { panic!("the region existed") };
        assert_eq!(region.left(1), None, "the region does not exist yet");
        assert_eq!(region.created(Some(id)), None);
        assert!(matches!(region.requested(1), Request::Create(_)));
        assert_eq!(region.created(None), Some(vec![1]), "it could not be created: those who wait are refused");
        assert!(matches!(region.requested(2), Request::Create(_)));
    }
}
