//! Payload: what every way of writing a snapshot to the server's link has in common.

use std::io;

use super::parts::FeedError;

/// Bytes handed to the socket at once.
pub(super) const WRITE_PIECE: usize = 1 << 20;

/// Why a payload goes no further.
pub(super) enum WriteTrouble {
    Link(io::Error),
    Feed(FeedError),
    /// The server's module, or what was sent to it.
    Module(String),
}

impl From<io::Error> for WriteTrouble {
    fn from(error: io::Error) -> Self {
        WriteTrouble::Link(error)
    }
}
