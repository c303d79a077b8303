//! Why a conversation failed, sorted by who can act on it. Errors of the token file are [`remora_wire::TokenError`]:
//! they are found before any peer is involved.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use remora_messenger::handshake::{self, HandshakeError, Versions};
use remora_protocol::{DecodeError, REFUSED_AS_BUSY, RefusalCode, Side};
use remora_wire::{Malformed, TooLarge};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::{LINGER, VERSIONS};
use remora_process::exit::{Code, Failure};

/// A [`Fault`] and the peer that it happened with.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{peer}: {fault}")]
pub struct Error {
    /// The peer's address, or the name that was given for it if it could not be resolved.
    pub peer: String,
    /// The failure.
    pub fault: Fault,
}

impl Error {
    /// The failure of a command that needs the source.
    pub fn of_source(self) -> Failure {
        let code = match self.fault {
            Fault::PlaintextNetwork(_) => Code::Refused,
            _ => Code::Source,
        };
        Failure::new(code, format!("the source {self}")).that_passes(self.fault.may_pass())
    }
}

/// The result of an operation on a conversation.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A failure, without the peer.
#[derive(Debug, Clone, thiserror::Error)]
pub enum Fault {
    // The operator can act: another attempt without a change fails in the same way.
    /// The peer is another program.
    #[error("this is not a Remora agent: it {looks_like}; check the address and the port")]
    NotRemora {
        /// What the peer seems to be, as the end of a sentence that begins with "it".
        looks_like: String,
    },
    /// The connection would have no TLS.
    #[error("is not on this host: this {0}")]
    PlaintextNetwork(&'static str),
    /// One end does not accept the other end's certificate.
    #[error("{0}")]
    Certificate(String),
    /// The two ends have no version of the protocol in common.
    #[error("speaks version {theirs} of the control protocol, this end {ours}: upgrade the older of the two")]
    NoCommonVersion {
        /// What the peer speaks.
        theirs: Versions,
        /// What this end speaks.
        ours: Versions,
    },
    /// One end could not prove that it holds the other end's token.
    #[error(
        "the {peer} does not hold the same token as this end{}: give both ends the same token file",
        if *.said_by_peer { " (so the peer says)" } else { "" }
    )]
    WrongToken {
        /// The side of the peer.
        peer: Side,
        /// The peer rejected our proof and said so. Otherwise its proof failed here, which an altered handshake also
        /// causes.
        said_by_peer: bool,
    },
    /// The peer refuses the request.
    #[error("refused: {text} ({code})")]
    Refused {
        /// The reason, for programs.
        code: RefusalCode,
        /// The reason, for people, in the peer's words.
        text: String,
    },
    /// The peer sent a message of a later version of the protocol.
    #[error("sent a message of the unknown kind {tag:#04x}: the peer is newer; upgrade this end")]
    UnknownMessage {
        /// The message's tag.
        tag: u8,
    },

    // The network or the peer's host can recover: another attempt may succeed after a while.
    /// The host name cannot be resolved.
    #[error("the address cannot be resolved: {0}; check its spelling, and that it has the form HOST:PORT")]
    Unresolved(Arc<io::Error>),
    /// No process listens at the address, or a firewall blocks it.
    #[error("cannot be reached: {0}; is the source running, and does it listen there?")]
    Unreachable(Arc<io::Error>),
    /// Connecting or the handshake took too long.
    #[error("{doing} took longer than {limit:?}: the host does not answer, or it is not a Remora agent")]
    TimedOut {
        /// The operation.
        doing: &'static str,
        /// The limit that was exceeded.
        limit: Duration,
    },
    /// The source holds as many conversations as its limit allows.
    #[error("has as many conversations as it allows: try again later, or raise its limit")]
    Busy,
    /// No frame arrived for too long, not even the answer to a ping.
    #[error("has been silent for {limit:?}: it hangs, its host is down, or the network is cut")]
    PeerSilent {
        /// The limit that was exceeded.
        limit: Duration,
    },
    /// The peer does not read from the connection.
    #[error("has not read what we sent for {limit:?}: it hangs, or the network is cut")]
    PeerNotReading {
        /// The limit that was exceeded.
        limit: Duration,
    },
    /// The connection ended before the handshake was complete.
    #[error(
        "closed the connection during the handshake: it is stopping, or it is not a Remora agent; its log may say more"
    )]
    ClosedEarly,
    /// The connection ended before the handshake inside TLS was complete.
    #[error(
        "closed the connection during the handshake: it is stopping, or it does not speak TLS; give all agents the same \
         --security, and see its log"
    )]
    ClosedTls,
    /// The connection ended. This never means success: a peer that is done sends [`remora_protocol::Message::Leave`],
    /// which cannot be forged.
    #[error("closed the connection")]
    Closed,
    /// A read or a write failed.
    #[error("{doing} failed: {error}")]
    Io {
        /// The operation.
        doing: &'static str,
        /// The error of the system.
        error: Arc<io::Error>,
    },
    /// The system provides no random bytes, which every handshake needs.
    #[error("no random bytes from the system: {0}")]
    NoRandomness(String),

    // The peer is broken, or the bytes were altered on their way.
    /// Bytes that are not a message.
    #[error("sent a malformed message: {0}")]
    Garbled(#[from] Malformed),
    /// Another failure of the handshake.
    #[error("the handshake failed: {0}")]
    Greeting(HandshakeError),
    /// Bytes that are not a frame of the message layer.
    #[error("sent a malformed frame: {0}")]
    Frame(remora_messenger::frame::Malformed),
    /// A valid message that the peer may not send, or not now.
    #[error("sent {what} out of turn")]
    OutOfTurn {
        /// What the peer sent.
        what: String,
    },
    /// A frame whose seal is not valid.
    #[error("frame {sequence} has no valid seal: frames were altered, repeated, dropped or inserted on their way")]
    Forged {
        /// The sequence number that the frame should have had, counted from 0 in its direction.
        sequence: u64,
    },

    // A mistake of the caller.
    /// The message exceeds the protocol's bounds.
    #[error("message cannot be encoded: {0}")]
    TooLarge(#[from] TooLarge),
    /// The send queue is full. Only [`crate::Sender::try_send`] reports this;
    /// [`crate::Sender::send`] waits.
    #[error("has not read the last {queued} messages")]
    QueueFull {
        /// The length of the queue, in messages.
        queued: usize,
    },
}

impl Fault {
    /// Whether the same attempt may succeed later without any change by an operator.
    pub fn may_pass(&self) -> bool {
        match self {
            Fault::Greeting(_) if self.asks_for_tls() => false,
            Fault::NotRemora { .. }
            | Fault::PlaintextNetwork(_)
            | Fault::Certificate(_)
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
            | Fault::ClosedTls
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

    /// Whether the other end refused a connection because it has no TLS.
    pub(super) fn asks_for_tls(&self) -> bool {
        matches!(self, Fault::Greeting(HandshakeError::Refused { code: REFUSED_AS_PLAINTEXT, .. }))
    }

    /// The fault that a failed handshake with a peer of that side is.
    pub fn greeting(error: &HandshakeError, peer: Side) -> Fault {
        match error.clone() {
            HandshakeError::NotRemora { looks_like } => Fault::NotRemora { looks_like },
            HandshakeError::NoCommonVersion { theirs, ours } => Fault::NoCommonVersion { theirs, ours },
            HandshakeError::WrongToken { said_by_peer } => Fault::WrongToken { peer, said_by_peer },
            HandshakeError::Refused { code: REFUSED_AS_BUSY, .. } => Fault::Busy,
            HandshakeError::TimedOut { limit } => Fault::TimedOut { doing: "the handshake", limit },
            HandshakeError::OutOfTurn { tag } => Fault::OutOfTurn { what: format!("a frame of the kind {tag:#04x}") },
            other @ (HandshakeError::Refused { .. } | HandshakeError::Frame(_)) => Fault::Greeting(other),
        }
    }

    /// Adds the peer.
    pub fn of(self, peer: impl ToString) -> Error {
        Error { peer: peer.to_string(), fault: self }
    }

    /// The system has failed at this step.
    pub fn io(doing: &'static str, error: io::Error) -> Fault {
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

// Answers to connections that get no conversation.

/// Refuses a connection because there is no room for it, reads nothing from it, and closes it. The peer gets
/// [`Fault::Busy`]. Takes at most a second.
pub async fn turn_away(stream: TcpStream) {
    refuse(stream, REFUSED_AS_BUSY, "").await;
}

/// Refuses a connection because it has no TLS, and closes it. The peer, which may be of an earlier version, shows the
/// text. `option`: the value of `--security` that it needs.
pub(super) async fn refuse_plaintext(stream: TcpStream, option: &str) {
    let text = format!("this agent accepts TLS only: start the other one with --security {option}");
    refuse(stream, REFUSED_AS_PLAINTEXT, &text).await;
}

async fn refuse(mut stream: TcpStream, code: u8, text: &str) {
    let said = async {
        stream.write_all(&handshake::refuse(code, text, VERSIONS)).await?;
        stream.shutdown().await?;
        let mut piece = [0; TURNED_AWAY_PIECE_BYTES];
        while stream.read(&mut piece).await? > 0 {} // closing with unread bytes would discard the refusal
        std::io::Result::Ok(())
    };
    let _ = timeout(LINGER, said).await; // best effort: the outcome does not matter
}

/// The code of a refusal because the connection has no TLS. Callers that may choose connect again with TLS.
pub(super) const REFUSED_AS_PLAINTEXT: u8 = REFUSED_AS_BUSY + 1;

/// Size of a read from a peer that was refused.
const TURNED_AWAY_PIECE_BYTES: usize = 512;
