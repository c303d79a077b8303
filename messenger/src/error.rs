//! Why a link was given up. It is logged where it is handled, in the worker; the owner of a connection is told what follows
//! from it ([`crate::Dispatcher`]), and may ask what it was ([`crate::Connection::broken`]).

use std::io;

use crate::frame::Malformed;
use crate::handshake::HandshakeError;
use crate::session::Violation;

/// A link is of no use any more.
#[derive(Debug, thiserror::Error)]
pub enum LinkError {
    // The network, or the peer's host.
    /// The peer closed it.
    #[error("the peer closed the connection")]
    Ended,
    /// Nobody answers there.
    #[error("cannot be called: {0}")]
    Unreachable(io::Error),
    /// Not a word for too long.
    #[error("the peer has been silent for too long")]
    Silent,
    /// The system failed a call on it.
    #[error("{0}")]
    Io(io::Error),
    /// Nothing was answered, or taken, in time.
    #[error("the peer did not {0} in time")]
    TooSlow(&'static str),

    // Whoever set up the two ends can act.
    /// The two could not agree.
    #[error("the greeting failed: {0}")]
    Greeting(#[from] HandshakeError),

    // The peer is broken, or somebody stands between.
    /// Bytes that are no frame.
    #[error("the peer sent something garbled: {0}")]
    Malformed(#[from] Malformed),
    /// Frames that the state of the session has no place for.
    #[error("the peer {0}")]
    Violation(#[from] Violation),

    // Ourselves.
    /// The owner cut it.
    #[error("cut by the owner")]
    Cut,
}
