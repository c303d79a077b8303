//! Streams that have ended and are still read.

use std::time::{Duration, Instant};

use super::{Action, Machine, Replica};

/// A stream whose history the primary has left. Its journal holds every byte of the old history that the source
/// received, and stays readable until the replicas that have the whole snapshot have applied it.
pub(super) struct Ending {
    /// The generation that began the stream.
    pub(super) generation: u64,
    /// Offset of the last byte.
    pub(super) at: u64,
    /// When it ended.
    pub(super) since: Instant,
    /// Why it ended, to be sent to the replicas.
    pub(super) text: String,
}

/// How long the replicas of an ended history may take to apply the rest of it while others wait for a snapshot of the
/// new one. A server that was in step acknowledges all of it within a second.
const ENDING_LIMIT: Duration = Duration::from_secs(10);

/// How long such a replica may acknowledge nothing new before it is sent to the primary. Servers acknowledge once a
/// second. The end of a broken stream may be a part of a command or transaction, which a server never acknowledges.
pub(super) const UNMOVED_LIMIT: Duration = Duration::from_secs(3);

impl Machine {
    /// Sends the replicas of an ended stream to the primary once they have applied all of it or make no progress, and
    /// revokes its journal when none is left.
    pub(super) fn finish_ending(&mut self, now: Instant, actions: &mut Vec<Action>) {
        let Some(ending) = self.ending.take() else { return };
        let is_late = now.duration_since(ending.since) > ENDING_LIMIT && !self.waiting().is_empty();
        let is_unmoved = |replica: &Replica| now.duration_since(replica.advanced.max(ending.since)) > UNMOVED_LIMIT;
        let has_all = |replica: &Replica| replica.has_loaded() && replica.at.applied_offset >= ending.at;
        let is_done = |replica: &Replica| is_late || has_all(replica) || is_unmoved(replica);
        self.end_generations(&ending.text, is_done, actions);
        if self.replicas.values().any(|replica| replica.generation.is_some()) {
            self.ending = Some(ending);
        } else {
            actions.push(Action::EndStream { generation: ending.generation });
        }
    }
}
