//! What a session says of itself.

use super::{LinkId, Session, State};
use crate::signal::Cookie;

impl<T> Session<T> {
    /// Whether a link serves the session.
    pub fn has_link(&self) -> bool {
        self.link.is_some()
    }

    /// Whether the session is over.
    pub fn is_closed(&self) -> bool {
        self.state == State::Closed
    }

    /// Whether messages flow.
    pub fn is_ready(&self) -> bool {
        self.state == State::Ready
    }

    /// Whether messages flow, the peer has received all that were sent, and there is nothing to do for the owner.
    pub fn is_quiet(&self) -> bool {
        self.is_ready() && self.link.is_some() && self.actions.is_empty() && !self.closing && self.queue.is_heard()
    }

    /// The link that serves the session.
    pub fn link(&self) -> Option<LinkId> {
        self.link
    }

    /// The cookie of this end.
    pub fn cookie(&self) -> Cookie {
        self.ours
    }

    /// Number of messages queued and not acknowledged (lossy: not written).
    pub fn unacknowledged(&self) -> usize {
        self.queue.len()
    }
}
