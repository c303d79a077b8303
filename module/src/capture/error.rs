//! Why a fork child did not capture.

use std::fmt;

/// Why a capture in the child was declined or failed; the message becomes the status text on the page.
#[derive(Debug, thiserror::Error)]
pub(super) enum CaptureError {
    #[error("it was cancelled")]
    Cancelled,
    #[error("the table was full and its agent did not beat for {0} s")]
    Abandoned(u64),
    #[error("no table was handed over")]
    NoTable,
    #[error("another process is writing to that table")]
    Claimed,
    #[error("{0}")]
    NotExclusive(SharedWith),
    #[error("its agent did not say within {0} s that this child works for it only")]
    NotPermitted(u64),
    #[error("{0}")]
    System(String),
    #[error("the server gave no reply to {0}")]
    NoAnswer(&'static str),
    #[error("the server refused {command}: {text}")]
    Refused { command: &'static str, text: String },
    #[error("the server does not report its {0}")]
    NotReported(&'static str),
    #[error("the key {key:?} of database {database} could not be read")]
    Unreadable { database: u32, key: String },
    #[error(
        "the string {key:?} of database {database} was written, but could not be deleted from what the server saves"
    )]
    Undeletable { database: u32, key: String },
    #[error("the fast walk is not offered: {0}")]
    NoFastWalk(String),
    #[error("the tables of database {database} have {seen} keys, and the server says {wanted}")]
    Miscounted { database: u32, seen: u64, wanted: u64 },
    #[error(transparent)]
    Memory(#[from] remora_fabric::memory::Error),
    #[error(transparent)]
    Table(#[from] remora_table::Error),
}

/// Who else may rely on this child.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum SharedWith {
    /// The server writes a sync's snapshot to a file first.
    File,
    /// This many replicas are waiting for a snapshot, or are being sent one, or the server does not tell their state.
    Replicas(usize),
}

impl fmt::Display for SharedWith {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SharedWith::File => {
                f.write_str("the server writes snapshots of syncs to a file first (repl-diskless-sync no)")
            }
            SharedWith::Replicas(0) => f.write_str("no replica is waiting for this child"),
            SharedWith::Replicas(count) => {
                write!(f, "{count} replicas are waiting, and each of them gets what this child saves")
            }
        }
    }
}
