//! What one turn of a copy may do, and what may come of it.

use crate::error::Error;

/// What one call of [`SnapshotCopy::pump`](crate::SnapshotCopy::pump) is allowed to do.
#[derive(Debug, Clone, Copy)]
pub struct Turn {
    /// Lines may be read again to look for news. Not at every turn: each such read costs both ends a small read.
    pub look: bool,
    /// Slots are requested while this is above 0, and their bytes are subtracted: the last read may take it below 0.
    pub allowance: i64,
}

impl Turn {
    /// Without any limit.
    pub const FREE: Turn = Turn { look: true, allowance: i64::MAX };
}

/// Why nothing more can be read from a peer. The copy continues with another peer.
#[derive(Debug, thiserror::Error)]
pub enum Loss {
    /// The peer is gone, or does not answer.
    #[error("{0}")]
    Gone(Error),
    /// The bytes are not those that the source wrote, though the peer had not overwritten them.
    #[error("slot {slot} has the checksum {got:#010x}, the source's entry has {want:#010x}{}", if want == got { ", and another digest" } else { "" })]
    Lied {
        /// Number of the slot.
        slot: u64,
        /// CRC-32C in the source's own entry.
        want: u32,
        /// CRC-32C of the peer's bytes.
        got: u32,
    },
    /// The peer no longer holds the slot that we need next.
    #[error("it no longer holds slot {slot} (the oldest it holds is {oldest})")]
    Passed {
        /// The slot that was wanted.
        slot: u64,
        /// The oldest slot that it holds.
        oldest: u64,
    },
}
