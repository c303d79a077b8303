//! What becomes of a conversation when its link breaks, and how much of it may be under way: chosen by name.
//!
//! | constructor | who calls again | what is replayed | link gone | the other end is |
//! |---|---|---|---|---|
//! | [`Policy::lossy_client`] | nobody | nothing | the owner is told, and asks again what it still wants to know | `stateless_server` |
//! | [`Policy::stateless_server`] | nobody | nothing | forgotten | `lossy_client` |
//! | [`Policy::lossless_client`] | this end | everything unacknowledged | called again until it answers | `stateful_server` |
//! | [`Policy::stateful_server`] | the other end | everything unacknowledged | kept for a while for the client to come back | `lossless_client` |
//! | [`Policy::lossless_peer`] | whoever has something to say | everything unacknowledged | called again when there is something to say | `lossless_peer` |

use std::sync::Arc;
use std::time::Duration;

use crate::frame::Limits;
use crate::throttle::Throttle;

/// How the sessions of a messenger behave. Made by a named constructor; fields may then be changed.
#[derive(Debug, Clone)]
pub struct Policy {
    /// Nothing is replayed: a message is written once, and a broken link ends the session.
    pub lossy: bool,
    /// This end does not call; it waits to be called.
    pub server: bool,
    /// A broken link with nothing left to say is not made again until there is.
    pub standby: bool,
    /// Messages that may wait to be sent or acknowledged; beyond it `send` says so.
    pub send_messages: usize,
    /// Bytes of the same.
    pub send_bytes: usize,
    /// What may be received and not yet let go by the owner, over all sessions that share it.
    pub receive: Arc<Throttle>,
    /// Instead of `receive`: so many messages and bytes for each session, so that none waits for another one's owner.
    pub receive_each: Option<(usize, usize)>,
    /// The longest bodies taken.
    pub limits: Limits,
    /// How long one attempt may take, from the call to `OPENED`.
    pub opening_limit: Duration,
    /// After this long without a word of the peer we ask whether it lives.
    pub ping_after: Duration,
    /// After this long without a word the link counts as broken. Several times `ping_after`.
    pub silence_limit: Duration,
    /// After this long without a message in either direction the session is closed, though the peer lives; `None`: it never is.
    pub idle_limit: Option<Duration>,
    /// The pause before the second attempt; each later one is twice as long, less a random part of up to a half.
    pub first_pause: Duration,
    /// The longest pause.
    pub longest_pause: Duration,
    /// How long a server keeps a session without a link.
    pub keep: Duration,
}

impl Policy {
    /// Calls; forgets when the link breaks. Whoever asks idempotent questions wants this.
    pub fn lossy_client() -> Policy {
        Policy { lossy: true, ..Policy::lossless_client() }
    }

    /// Is called by lossy clients, and keeps nothing of those that are gone.
    pub fn stateless_server() -> Policy {
        Policy { lossy: true, server: true, ..Policy::lossless_client() }
    }

    /// Calls, and calls again until everything it said has been heard.
    pub fn lossless_client() -> Policy {
        Policy {
            lossy: false,
            server: false,
            standby: false,
            send_messages: SEND_MESSAGES,
            send_bytes: SEND_BYTES,
            receive: Throttle::new(RECEIVE_MESSAGES, RECEIVE_BYTES),
            receive_each: None,
            limits: Limits { front: 1 << 20, data: crate::frame::MAX_SEGMENT_BYTES },
            opening_limit: OPENING_LIMIT,
            ping_after: PING_AFTER,
            silence_limit: SILENCE_LIMIT,
            idle_limit: None,
            first_pause: FIRST_PAUSE,
            longest_pause: LONGEST_PAUSE,
            keep: KEEP,
        }
    }

    /// Is called by lossless clients, and keeps their sessions for [`Policy::keep`] when they are cut off.
    pub fn stateful_server() -> Policy {
        Policy { server: true, standby: true, ..Policy::lossless_client() }
    }

    /// One of equals: either calls when it has something to say, and between two there is one session whoever called first. One
    /// that does not listen cannot be called back, and so calls again at once.
    pub fn lossless_peer() -> Policy {
        Policy { standby: true, ..Policy::lossless_client() }
    }

    /// What a new session may have received and not let go.
    pub(crate) fn throttle(&self) -> Arc<Throttle> {
        match self.receive_each {
            Some((messages, bytes)) => Throttle::new(messages, bytes),
            None => Arc::clone(&self.receive),
        }
    }

    /// With another bound on what is received and not yet let go.
    pub fn with_receive(mut self, throttle: Arc<Throttle>) -> Policy {
        self.receive = throttle;
        self
    }
}

/// At a hundred thousand messages a second, some hundred milliseconds' worth.
const SEND_MESSAGES: usize = 16 * 1024;
/// As much as the kernel's own buffers hold on a fast link, several times over.
const SEND_BYTES: usize = 64 << 20;
/// As for sending.
const RECEIVE_MESSAGES: usize = 16 * 1024;
/// Four of the longest messages at least.
const RECEIVE_BYTES: usize = 128 << 20;
/// Two resent SYNs and an overloaded host.
const OPENING_LIMIT: Duration = Duration::from_secs(10);
/// Short enough to find a dead host in half a minute, long enough that ten thousand idle sessions cost a thousand small
/// packets a second.
const PING_AFTER: Duration = Duration::from_secs(10);
/// Three pings lost.
const SILENCE_LIMIT: Duration = Duration::from_secs(30);
/// A restarted process is back within a few of these.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
/// A host that boots is found again within this.
const LONGEST_PAUSE: Duration = Duration::from_secs(15);
/// Longer than a host takes to boot, short enough that what clients left behind does not pile up.
const KEEP: Duration = Duration::from_secs(300);
