//! The agents' control protocol: every message that a replica's agent and a source's agent exchange, and its layout.
//!
//! Pure: values in, bytes out, and back. Connections, time limits and queues are in the agent (`conversation`); frames,
//! seals and the handshake are the message layer's (`remora-messenger`).
//!
//! ```text
//!   replica (client)                                              source (server)
//!        │  MAGIC, Hello{versions, features, nonce}                     │
//!        ├─────────────────────────────────────────────────────────────▶│
//!        │  MAGIC, Challenge{version, versions, features, nonce, session}
//!        │◀─────────────────────────────────────────────────────────────┤
//!        │  Proof = HMAC(token, "client", all of the above)             │   the layer's handshake: the token
//!        ├─────────────────────────────────────────────────────────────▶│   never crosses the wire, and no
//!        │  Proof = HMAC(token, "server", all of the above)             │   message before both proofs hold
//!        │◀─────────────────────────────────────────────────────────────┤
//!        │                                                              │
//!        │  Join, Progress, HandOffQuery, StatusQuery, Leave            │   messages of the layer, in a lossy
//!        ├═════════════════════════════════════════════════════════════▶│   session: every frame bears a MAC
//!        │  Waiting, Offer, HandOffAnswer, GenerationGone, Status, …    │   over direction, sequence and
//!        │◀═════════════════════════════════════════════════════════════┤   content; pings when all is quiet
//! ```
//!
//! A replica that lends its slots ([`Relays`]) is a server in the same way, to the replicas that the source sends to
//! it: they send [`Message::ReadPeer`], and it answers with [`Message::PeerOffer`].
//!
//! A message is one message of the layer: its tag is the kind, its fields are the front, one after the other in the
//! order in which their `record!` lists them. Every list, name and text has a bound ([`bounds`]). A receiver treats an
//! unknown kind as the mark of a newer peer; a payload that ends early or late is malformed.
//! `protocol/README.md` describes every byte, and what the protocol protects against and what not.
//!
//! Messages never carry slots or journal bytes. The only secret in one is the key of a sealed table in an offer, which
//! only a connection with TLS carries. A region key says where memory is; reading it takes a secret
//! that both ends derive from the session's key ([`remora_wire::derive()`]).
//!
//! # Versions, newest first
//!
//! - 7: Expected says how long a snapshot will be, and a status report when it will be whole, or that the source still
//!   prepares its memory; an offer says why no
//!   snapshot of the source's server can be taken now, and so does a cause of waiting; an offer names the history that
//!   its own continues, the source's process, and what a snapshot would be. A standby says that it is one, and readers
//!   are told where standbys serve.
//! - 6: status says what the source's upload in the background does; an offer says whether slots may be compressed, and
//!   a status report how they are.
//! - 5: progress and status say why a server does not use fast keys.
//! - 4: an offer has the keys of sealed tables; a status report says what protects the data of each replica.
//! - 3: Waiting says its cause in a code; fields that no receiver read are gone.
//! - 2: on the message layer. Heartbeat is gone, as the layer pings.
//! - 1: the same messages in frames of their own.
//!
//! # Modules
//!
//! - [`message`]: the messages and what they carry, in the order of a sync. **Start here.**
//! - [`sweep`]: what a server's module sends during a sweep.
//! - [`bounds`]: versions, the limit of every field, how a replication id is encoded, and the version of the commands
//!   between agents and module.

#![forbid(unsafe_code)]

mod base;
pub mod bounds;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
pub mod message;
pub mod sweep;

pub use base::{Base, BaseKind};
pub use bounds::{MODULE_PROTOCOL, *};
pub use message::{
    Advance, Announce, Basis, DecodeError, Expected, Former, GenerationState, GenerationStatus, Join, Length,
    LossCause, Message, Offer, Outcome, Phase, Progress, RefusalCode, Relaying, Relays, ReplicaStatus, Resume, Saving,
    Side, StatusReport, TableOffer, Terms, Totals, UploadStatus, Upstream, WaitCause,
};

#[cfg(test)]
mod tests;
