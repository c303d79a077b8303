//! What happens to a session when its link breaks, and how much it may have under way: chosen by name.
//!
//! | constructor | reconnects | replays | after the link is gone | the other end is |
//! |---|---|---|---|---|
//! | [`Policy::lossy_client`] | no | nothing | the owner is told, and repeats its requests | `stateless_server` |
//! | [`Policy::stateless_server`] | no | nothing | the session is forgotten | `lossy_client` |
//! | [`Policy::lossless_client`] | this end | everything unacknowledged | reconnects until the server answers | `stateful_server` |
//! | [`Policy::stateful_server`] | the other end | everything unacknowledged | keeps the session for a while | `lossless_client` |
//! | [`Policy::lossless_peer`] | either end that has messages | everything unacknowledged | reconnects when there are messages | `lossless_peer` |

use std::sync::Arc;
use std::time::Duration;

use crate::buffer::Throttle;
use crate::frame::Limits;

/// The behaviour of a messenger's sessions. Made by a named constructor, after which fields may be changed.
#[derive(Debug, Clone)]
pub struct Policy {
    /// Nothing is replayed: a message is written once, and a broken link ends the session.
    pub lossy: bool,
    /// This end does not connect; it is connected to.
    pub server: bool,
    /// A broken link is replaced only when there are messages to send.
    pub standby: bool,
    /// Messages that may wait to be sent or acknowledged. Beyond this `send` reports a full queue.
    pub send_messages: usize,
    /// Bytes that may wait to be sent or acknowledged.
    pub send_bytes: usize,
    /// Bounds what is received and not released by the owner, over all sessions that share it.
    pub receive: Arc<Throttle>,
    /// Messages and bytes for each session, in place of `receive`: no session waits for the owner of another one.
    pub receive_each: Option<(usize, usize)>,
    /// The longest bodies that are accepted.
    pub limits: Limits,
    /// Time limit for one attempt, from the connect to `OPENED`.
    pub opening_limit: Duration,
    /// Silence of the peer after which it is sent a ping.
    pub ping_after: Duration,
    /// Silence of the peer after which the link counts as broken. Several times `ping_after`.
    pub silence_limit: Duration,
    /// Time without a message in either direction after which the session is closed, although the peer is alive;
    /// `None`: never.
    pub idle_limit: Option<Duration>,
    /// Pause before the second attempt. Each later pause is twice as long, less a random part of up to a half.
    pub first_pause: Duration,
    /// The longest pause between attempts.
    pub longest_pause: Duration,
    /// How long a server keeps a session without a link.
    pub keep: Duration,
}

impl Policy {
    /// Connects; the session ends with its link. For idempotent requests.
    pub fn lossy_client() -> Policy {
        Policy { lossy: true, ..Policy::lossless_client() }
    }

    /// Is connected to by lossy clients, and keeps nothing of clients that have gone.
    pub fn stateless_server() -> Policy {
        Policy { lossy: true, server: true, ..Policy::lossless_client() }
    }

    /// Connects, and reconnects until everything sent is acknowledged.
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

    /// Is connected to by lossless clients, and keeps their sessions for [`Policy::keep`] without a link.
    pub fn stateful_server() -> Policy {
        Policy { server: true, standby: true, ..Policy::lossless_client() }
    }

    /// One of two equal peers. Either one connects when it has messages, and the two have one session whichever
    /// connected first. A peer that does not listen cannot be connected to, and so reconnects at once.
    pub fn lossless_peer() -> Policy {
        Policy { standby: true, ..Policy::lossless_client() }
    }

    /// The receive throttle of a new session.
    pub(crate) fn throttle(&self) -> Arc<Throttle> {
        match self.receive_each {
            Some((messages, bytes)) => Throttle::new(messages, bytes),
            None => Arc::clone(&self.receive),
        }
    }

    /// Returns the policy with another bound on what is received and not released.
    pub fn with_receive(mut self, throttle: Arc<Throttle>) -> Policy {
        self.receive = throttle;
        self
    }
}

/// At a hundred thousand messages a second: about 150 milliseconds' worth.
const SEND_MESSAGES: usize = 16 * 1024;
/// Several times what the kernel's buffers hold on a fast link.
const SEND_BYTES: usize = 64 << 20;
/// The same as for sending.
const RECEIVE_MESSAGES: usize = 16 * 1024;
/// At least four of the longest messages.
const RECEIVE_BYTES: usize = 128 << 20;
/// Two resent SYNs and an overloaded host.
const OPENING_LIMIT: Duration = Duration::from_secs(10);
/// Short enough to find a dead host in half a minute. Long enough that ten thousand idle sessions cost only a thousand
/// small packets a second.
const PING_AFTER: Duration = Duration::from_secs(10);
/// Three lost pings.
const SILENCE_LIMIT: Duration = Duration::from_secs(30);
/// A restarted process is back after a few of these.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
/// A host that boots is found again within this time.
const LONGEST_PAUSE: Duration = Duration::from_secs(15);
/// Longer than a host takes to boot. Short enough that the sessions of clients that have gone do not pile up.
const KEEP: Duration = Duration::from_secs(300);
