//! The point of a primary's history at which a table begins.

use std::fmt;

use remora_redis::ReplId;

/// The point of a primary's history at which a snapshot was taken, or at which a journal begins, and the number of that
/// snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Origin {
    /// Number of the snapshot; no two snapshots of one source share it.
    pub generation: u64,
    /// The history in which the offset is valid.
    pub history: ReplId,
    /// Replication offset of the last byte of the stream that the snapshot contains. The first byte of the journal has
    /// the next offset.
    pub offset: u64,
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {}:{}", self.generation, self.history, self.offset)
    }
}
