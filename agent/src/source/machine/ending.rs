//! Streams that have ended and are still read.

use std::time::{Duration, Instant};

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
pub(super) const ENDING_LIMIT: Duration = Duration::from_secs(10);

/// How long such a replica may acknowledge nothing new before it is sent to the primary. Servers acknowledge once a
/// second. The end of a broken stream may be a part of a command or transaction, which a server never acknowledges.
pub(super) const UNMOVED_LIMIT: Duration = Duration::from_secs(3);
