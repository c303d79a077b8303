//! Time limits and sizes of conversations, and what protects them.

use std::time::Duration;

use remora_messenger::frame::Limits;
use remora_messenger::policy::Policy;
use remora_protocol::{MAX_CLIENT_PAYLOAD_BYTES, MAX_PAYLOAD_BYTES, Side};

use super::identity::SourceKey;
use super::security::Security;

/// Time limits and sizes of a conversation. The defaults are for agents; tests use shorter limits.
#[derive(Debug, Clone)]
pub struct Options {
    /// Time limit for connecting, handshake included, for each address of a name.
    pub connect_timeout: Duration,
    /// Time limit for the handshake of an accepted connection, from its first byte to the open session.
    pub handshake_timeout: Duration,
    /// Silence after which the peer is sent a ping.
    pub ping_after: Duration,
    /// How long the peer may send nothing, or read nothing, before the conversation ends. Several times `ping_after`.
    pub silence_limit: Duration,
    /// Length of the send queue, in messages.
    pub send_queue: usize,
    /// What protects the connections.
    pub security: Security,
    /// The name that the peer's certificate must be for, if names are checked; `None`: its address.
    pub peer_name: Option<String>,
    /// The key that the peer must hold; `None`: any.
    pub source_key: Option<SourceKey>,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            connect_timeout: CONNECT_TIMEOUT,
            handshake_timeout: HANDSHAKE_TIMEOUT,
            ping_after: PING_AFTER,
            silence_limit: SILENCE_LIMIT,
            send_queue: SEND_QUEUE,
            security: Security::default(),
            peer_name: None,
            source_key: None,
        }
    }
}

impl Options {
    /// The defaults, with this protection.
    pub fn secured(security: Security) -> Options {
        Options { security, ..Options::default() }
    }

    pub(super) fn policy(&self, side: Side) -> Policy {
        let (policy, opening_limit) = match side {
            Side::Client => (Policy::lossy_client(), self.connect_timeout),
            Side::Server => (Policy::stateless_server(), self.handshake_timeout),
        };
        // A server has many conversations, so each of them may hold little of its memory.
        let (longest, mailbox_bytes) = match side {
            Side::Client => (MAX_PAYLOAD_BYTES, CLIENT_MAILBOX_BYTES),
            Side::Server => (MAX_CLIENT_PAYLOAD_BYTES, SERVER_MAILBOX_BYTES),
        };
        Policy {
            send_messages: self.send_queue.max(1),
            receive_each: Some((MAILBOX_MESSAGES, mailbox_bytes)),
            limits: Limits { front: longest, data: 0 },
            opening_limit,
            ping_after: self.ping_after,
            silence_limit: self.silence_limit,
            ..policy
        }
    }
}

/// A SYN is repeated after 1, 3 and 7 seconds. A host that has not answered by then is down.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// Two round trips and four hashes take milliseconds. The rest is for an agent that gets no processor time.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);

/// A ping costs about a hundred bytes a second on an idle connection.
const PING_AFTER: Duration = Duration::from_secs(1);

/// Nine unanswered pings. Several times longer than TCP takes to repair a lost packet, and short enough that a source
/// soon frees what it keeps for a dead replica.
const SILENCE_LIMIT: Duration = Duration::from_secs(10);

/// Length of the send queue, in messages: many seconds' worth. Most have less than a hundred bytes; the longest
/// ([`MAX_PAYLOAD_BYTES`]) is sent only on request.
const SEND_QUEUE: usize = 64;

/// Messages that may be received and not yet taken by the owner; beyond this the peer is not read. As many as the
/// peer's send queue holds.
const MAILBOX_MESSAGES: usize = 64;

/// Bytes of the messages that a client has received and its owner has not yet taken: two of the longest.
const CLIENT_MAILBOX_BYTES: usize = 2 * MAX_PAYLOAD_BYTES as usize;

/// The same at a server, which may have a thousand conversations: [`MAILBOX_MESSAGES`] of a usual length, or 16 of the
/// longest.
const SERVER_MAILBOX_BYTES: usize = 16 * MAX_CLIENT_PAYLOAD_BYTES as usize;
