//! What can go wrong in a conversation, sorted by who can act on it. Not here: what is wrong with a token's file
//! ([`remora_wire::TokenError`]); that is found before there is anybody to talk to.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use remora_messenger::handshake::{HandshakeError, Versions};
use remora_protocol::{DecodeError, REFUSED_AS_BUSY, RefusalCode, Side};
use remora_wire::{Malformed, TooLarge};

/// A [`Fault`] and the peer with whom it happened.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{peer}: {fault}")]
pub struct Error {
    /// The peer's address, or what was typed for it where it could not be resolved.
    pub peer: String,
    /// What happened.
    pub fault: Fault,
}

/// The outcome of a conversation's step.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What happened, without saying with whom.
#[derive(Debug, Clone, thiserror::Error)]
pub enum Fault {
    // Whoever set up the two ends can act: trying again changes nothing.
    /// Something else listens, or calls, there.
    #[error("this is not a Remora agent: it {looks_like}; check the address and the port")]
    NotRemora {
        /// What it seems to be, as the end of "it …".
        looks_like: String,
    },
    /// The two ends have no version of the protocol in common.
    #[error("speaks version {theirs} of the control protocol, this end {ours}: upgrade the older of the two")]
    NoCommonVersion {
        /// What the peer speaks.
        theirs: Versions,
        /// What we speak.
        ours: Versions,
    },
    /// One end could not prove that it holds the token of the other.
    #[error(
        "the {peer} does not hold the same token as this end{}: give both ends the same token file",
        if *.said_by_peer { " (so the peer says)" } else { "" }
    )]
    WrongToken {
        /// Which end the peer is.
        peer: Side,
        /// The peer found it out and told us; otherwise its proof failed here, which is also what an altered handshake looks like.
        said_by_peer: bool,
    },
    /// The peer understood and will not.
    #[error("refused: {text} ({code})")]
    Refused {
        /// Why, for programs.
        code: RefusalCode,
        /// Why, for people: the peer's own words.
        text: String,
    },
    /// The peer sent a message of a later version.
    #[error("sent a message of the unknown kind {tag:#04x}: the peer is newer; upgrade this end")]
    UnknownMessage {
        /// The frame's tag.
        tag: u8,
    },

    // The network, or the peer's host: worth another attempt after a while.
    /// The name has no address.
    #[error("the address cannot be resolved: {0}; check its spelling, and that it is HOST:PORT")]
    Unresolved(Arc<io::Error>),
    /// Nobody listens there, or the way is blocked.
    #[error("cannot be reached: {0}; is the source running, and does it listen there?")]
    Unreachable(Arc<io::Error>),
    /// No answer in time while connecting or greeting.
    #[error("{doing} took longer than {limit:?}: the host does not answer, or it is not a Remora agent")]
    TimedOut {
        /// What was being done.
        doing: &'static str,
        /// The limit that was passed.
        limit: Duration,
    },
    /// The source holds as many conversations as it allows.
    #[error("has as many conversations as it allows: try again later, or raise its limit")]
    Busy,
    /// Not a single frame, not even the answer to a ping, for too long.
    #[error("has been silent for {limit:?}: it hangs, its host is down, or the network is cut")]
    PeerSilent {
        /// The limit that was passed.
        limit: Duration,
    },
    /// The peer takes no bytes off the connection.
    #[error("has not read what we sent for {limit:?}: it hangs, or the network is cut")]
    PeerNotReading {
        /// The limit that was passed.
        limit: Duration,
    },
    /// The connection ended before both ends had proved themselves.
    #[error(
        "closed the connection during the greeting: it is stopping, or it is not a Remora agent; its log may say more"
    )]
    ClosedEarly,
    /// The connection ended. It is never a way of saying "done": that is [`remora_protocol::Message::Leave`], which nobody can forge.
    #[error("closed the connection")]
    Closed,
    /// The system failed a read or a write.
    #[error("{doing} failed: {error}")]
    Io {
        /// What was being done.
        doing: &'static str,
        /// The system's answer.
        error: Arc<io::Error>,
    },
    /// The system has no random bytes, without which no proof is worth anything.
    #[error("no random bytes from the system: {0}")]
    NoRandomness(String),

    // The peer is broken, or somebody stands between.
    /// Bytes that are no frame, or a frame that holds no message.
    #[error("sent something garbled: {0}")]
    Garbled(#[from] Malformed),
    /// What else may fail in the greeting.
    #[error("the greeting failed: {0}")]
    Greeting(HandshakeError),
    /// Bytes that are no frame of the message layer.
    #[error("sent something garbled: {0}")]
    Frame(remora_messenger::frame::Malformed),
    /// A good frame at a moment, or from an end, that has no use for it.
    #[error("sent {what} out of turn")]
    OutOfTurn {
        /// What it sent.
        what: String,
    },
    /// A frame whose seal does not hold.
    #[error("frame {sequence} does not bear a valid seal: it was altered, repeated, left out or put in on its way")]
    Forged {
        /// The sequence number that the frame should have borne, counted from 0 in its direction.
        sequence: u64,
    },

    // We were misused: a mistake of the caller.
    /// A message that does not fit the protocol's bounds.
    #[error("cannot be told this: {0}")]
    TooLarge(#[from] TooLarge),
    /// The send queue is full ([`crate::conversation::Sender::try_send`] only; [`crate::conversation::Sender::send`] waits instead).
    #[error("has yet to take the last {queued} messages")]
    QueueFull {
        /// The queue's length in messages.
        queued: usize,
    },
}

impl Fault {
    /// Whether the same attempt may succeed after a while without anybody changing anything.
    pub fn may_pass(&self) -> bool {
        match self {
            Fault::NotRemora { .. }
            | Fault::NoCommonVersion { .. }
            | Fault::WrongToken { .. }
            | Fault::UnknownMessage { .. }
            | Fault::TooLarge(_) => false,
            Fault::Refused { code, .. } => code.may_pass(),
            Fault::Unresolved(_)
            | Fault::Unreachable(_)
            | Fault::TimedOut { .. }
            | Fault::Busy
            | Fault::PeerSilent { .. }
            | Fault::PeerNotReading { .. }
            | Fault::ClosedEarly
            | Fault::Closed
            | Fault::Io { .. }
            | Fault::NoRandomness(_)
            | Fault::Garbled(_)
            | Fault::Greeting(_)
            | Fault::Frame(_)
            | Fault::OutOfTurn { .. }
            | Fault::Forged { .. }
            | Fault::QueueFull { .. } => true,
        }
    }

    /// The failure of a handshake with a peer of that side.
    pub(crate) fn greeting(error: &HandshakeError, peer: Side) -> Fault {
        match error.clone() {
            HandshakeError::NotRemora { looks_like } => Fault::NotRemora { looks_like },
            HandshakeError::NoCommonVersion { theirs, ours } => Fault::NoCommonVersion { theirs, ours },
            HandshakeError::WrongToken { said_by_peer } => Fault::WrongToken { peer, said_by_peer },
            HandshakeError::Refused { code: REFUSED_AS_BUSY, .. } => Fault::Busy,
            HandshakeError::TimedOut { limit } => Fault::TimedOut { doing: "the greeting", limit },
            HandshakeError::OutOfTurn { tag } => Fault::OutOfTurn { what: format!("a frame of the kind {tag:#04x}") },
            other @ (HandshakeError::Refused { .. } | HandshakeError::Frame(_)) => Fault::Greeting(other),
        }
    }

    /// The same, said of a peer.
    pub fn of(self, peer: impl ToString) -> Error {
        Error { peer: peer.to_string(), fault: self }
    }

    pub(crate) fn io(doing: &'static str, error: io::Error) -> Fault {
        Fault::Io { doing, error: Arc::new(error) }
    }
}

impl From<DecodeError> for Fault {
    fn from(error: DecodeError) -> Fault {
        match error {
            DecodeError::UnknownMessage { tag } => Fault::UnknownMessage { tag },
            DecodeError::Malformed(malformed) => Fault::Garbled(malformed),
        }
    }
}
