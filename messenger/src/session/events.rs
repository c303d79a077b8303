//! What a session is told, and what it asks of its owner.

use std::net::SocketAddr;

use crate::signal::{Entity, Refusal, Signal};

/// A link, by a number that the session's owner gives it. No number is used twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LinkId(pub u64);

/// The end that a session belongs to, and how it reaches the other end.
#[derive(Debug, Clone, Copy)]
pub struct LocalEnd {
    /// This messenger.
    pub entity: Entity,
    /// The address that this end listens at, if it does: the peer may connect there, so this end may stand by.
    pub address: Option<SocketAddr>,
    /// Whether this end knows where to connect.
    pub can_call: bool,
}

/// What the owner of a session has to do, in this order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// Connect to the peer, then call `link_up` or `call_failed`.
    Call,
    /// Serve the session by this link from now on. Half-written and half-read frames of another link are void.
    Adopt(LinkId),
    /// Send that signal on that link, which does not serve the session. Its peer may send OPEN again, or close.
    Answer(LinkId, Signal),
    /// Close that link.
    Hang(LinkId),
    /// Tell the owner of the connection.
    Tell(News),
}

/// An event for the owner of the connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum News {
    /// The session is ready: for the first time, or again after a broken link.
    Connected,
    /// The peer has forgotten the session, or the link of a lossy session broke. A lossless session starts again by
    /// itself.
    Reset {
        /// Messages that were not acknowledged (lossy: not written). The peer may or may not have received them.
        unacknowledged: usize,
        /// Whether this end goes on, with an empty queue.
        goes_on: bool,
    },
    /// The session is over, and everything that this end had queued was written.
    Closed,
    /// The peer refuses the session. This end does not try again.
    Refused(Refusal),
}

impl News {
    /// Whether the session is over with this event.
    pub fn is_last(self) -> bool {
        !matches!(self, News::Connected | News::Reset { goes_on: true, .. })
    }
}

/// What to write next on the session's link.
#[derive(Debug, PartialEq, Eq)]
pub enum Outgoing<'a, T> {
    /// A frame of the session itself.
    Signal(Signal),
    /// A message, with its number and its acknowledgement.
    Message {
        /// Its number.
        number: u64,
        /// Number of the last message received.
        heard: u64,
        /// The message.
        message: Payload<'a, T>,
    },
}

/// A message to be written.
#[derive(Debug, PartialEq, Eq)]
pub enum Payload<'a, T> {
    /// Written once, and not kept by the session.
    Owned(T),
    /// Kept by the session until it is acknowledged, to be written again.
    Kept(&'a T),
}

/// What to do with a received message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// Deliver it to the owner.
    Deliver,
    /// Drop it: it was received before.
    Known,
}

/// The peer violates the protocol. Close its link.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Violation {
    /// The current state does not allow the frame.
    #[error("sent a frame out of turn")]
    OutOfTurn,
    /// A message is missing.
    #[error("sent message {found}; expected {wanted}")]
    Gap {
        /// The number that was received.
        found: u64,
        /// The number that was expected.
        wanted: u64,
    },
    /// The peer acknowledges a message that was not sent.
    #[error("acknowledged message {found}; only {sent} were sent")]
    Unsent {
        /// The number that it acknowledges.
        found: u64,
        /// The last number written.
        sent: u64,
    },
}

/// The session is over: nothing can be sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the session is over")]
pub struct Over;
