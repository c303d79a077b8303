//! Why a link ended. The worker logs it where it handles it. The owner of a connection is told the consequence
//! ([`crate::Dispatcher`]), and can ask for the reason ([`crate::Connection::link_error`]).

// Stands alone: each floor of a link ends with one of these.

use std::io;

use crate::frame::Malformed;
use crate::handshake::HandshakeError;
use crate::session::Violation;

/// Why a link ended.
#[derive(Debug, thiserror::Error)]
pub enum LinkError {
    // The network or the peer's host can recover.
    /// The peer closed it.
    #[error("the peer closed the connection")]
    Ended,
    /// The connect failed.
    #[error("connect failed: {0}")]
    Unreachable(io::Error),
    /// The peer has been silent for too long.
    #[error("the peer has been silent for too long")]
    Silent,
    /// A system call failed.
    #[error("{0}")]
    Io(io::Error),
    /// The peer did not answer, or did not read, in time.
    #[error("the peer did not {0} in time")]
    TooSlow(&'static str),

    // The operator of the two ends can act.
    /// The handshake failed.
    #[error("the handshake failed: {0}")]
    Handshake(#[from] HandshakeError),

    // The peer is broken, or the bytes were altered on their way.
    /// The peer sent bytes that are not a frame.
    #[error("the peer sent a malformed frame: {0}")]
    Malformed(#[from] Malformed),
    /// The peer sent frames that the state of the session does not allow.
    #[error("the peer {0}")]
    Violation(#[from] Violation),

    // This end.
    /// The owner cut the link.
    #[error("cut by the owner")]
    Cut,
}
