//! Payload: what the plain and the referenced payload have in common.

use std::io;

use crate::exit::Failure;
use crate::replica::parts::FeedError;

/// Bytes handed to the socket at once.
pub(super) const WRITE_PIECE: usize = 1 << 20;

/// Why a payload cannot continue.
pub(super) enum WriteError {
    Link(io::Error),
    Feed(FeedError),
    /// A slot of the source's own memory is damaged: reading it again would give the same bytes.
    Damaged(FeedError),
    /// The server cannot be given this snapshot.
    Refused(Failure),
    /// The server's module refused, or cannot be sent this.
    Module(String),
}

impl From<io::Error> for WriteError {
    fn from(error: io::Error) -> Self {
        WriteError::Link(error)
    }
}
