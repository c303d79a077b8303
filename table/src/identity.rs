//! What a table is: the point of a primary's history at which it begins, and its identity.

use std::fmt;

use remora_redis::ReplId;

use crate::error::Error;

/// The identity of a table. No two tables of one source share it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Identity {
    /// Snapshot or journal.
    pub kind: Kind,
    /// Where it begins.
    pub origin: Origin,
}

/// What a table holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kind {
    /// A finite stream: the bytes of an RDB.
    Snapshot,
    /// An endless stream: the replication stream after the snapshot.
    Journal,
}

impl Kind {
    pub(crate) fn code(self) -> u32 {
        match self {
            Kind::Snapshot => 1,
            Kind::Journal => 2,
        }
    }

    pub(crate) fn from_code(code: u32) -> Result<Kind, Error> {
        match code {
            1 => Ok(Kind::Snapshot),
            2 => Ok(Kind::Journal),
            other => Err(Error::Layout(format!("unknown kind of table: {other}"))),
        }
    }
}

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
