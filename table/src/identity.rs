//! What a table is, and where it begins.

use crate::{error::Error, origin::Origin};

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
