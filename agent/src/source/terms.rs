//! Terms: what a replica that joins now would get, and whether the server would send this source a snapshot at all.
//!
//! A source's user may lack `+psync`, and a replica that the source captures may have begun to evict. Both are found
//! before a replica asks, when the source starts and with the facts for each plan, so that a dry run hears of them.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use remora_fabric::TransportKind;
use remora_protocol::Terms;

use super::Source;
use super::tables::expected;
use crate::server::own_changes::why_not_as_its_primary;
use crate::server::permission::{Permission, TO_REPLICATE};
use crate::server::{Client, Facts, ServerError};

/// How long the server is believed to permit what it has permitted: the question can leave a line in its log.
const BELIEVED_FOR: Duration = Duration::from_secs(60);

/// What the server has permitted.
#[derive(Debug, Default)]
pub(super) struct Rights(Mutex<Option<Instant>>);

impl Rights {
    /// Why the server sends this source no snapshot until an administrator changes something there; `None` if nothing
    /// is known to speak against it.
    ///
    /// # Errors
    /// The connection failed.
    pub(super) async fn why_refused(&self, client: &mut Client, facts: &Facts) -> Result<Option<String>, ServerError> {
        if !self.are_believed() {
            for needed in TO_REPLICATE {
                if let Permission::Refused(error) = needed.ask(client, facts).await? {
                    return Ok(Some(error.to_string()));
                }
            }
            *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
        }
        why_not_as_its_primary(client).await
    }

    fn are_believed(&self) -> bool {
        let asked = *self.0.lock().unwrap_or_else(PoisonError::into_inner);
        asked.is_some_and(|asked| asked.elapsed() < BELIEVED_FOR)
    }
}

/// What a replica that joins now gets. `refusal`: why there will be no further snapshot.
pub(super) fn terms(source: &Source, refusal: Option<&str>) -> Terms {
    let windowed = source.tables.is_windowed_for(&source.facts);
    let held = !needs_fork(source);
    let (geometry, tuning) = (source.tables.snapshot.1, &source.methods.tuning);
    let snapshot_bytes = match held && !source.gauge.is_capturing() {
        true => source.gauge.received(),
        false => expected(&source.facts, geometry),
    };
    Terms {
        snapshot_bytes,
        ring_bytes: source.tables.ring(),
        windowed,
        held,
        sealed: source.tables.is_sealed(),
        fork_delay_seconds: if source.methods.takes_from_the_server() { tuning.fork_delay() } else { 0 },
        tunes_server: tuning.is_wanted(),
        is_refused: refusal.is_some(),
        offers_shm: source.exports.offer(TransportKind::Shm),
        offers_verbs: source.exports.offer(TransportKind::Verbs),
    }
}

/// Whether a replica that joins now makes the server fork: there is no snapshot, or its slots are reused.
pub(super) fn needs_fork(source: &Source) -> bool {
    source.machine.status().snapshot.is_none() || source.tables.is_windowed_for(&source.facts)
}
