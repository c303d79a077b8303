//! The conversation beside the data: who may join, which generation there is, where its tables lie, how far everybody has
//! come. One connection between a replica's agent and a source's; some hundred bytes a second.
//!
//! It carries no data set: the bytes of the tables cross by the fabric, on connections of their own. It knows neither Redis
//! nor the fabric: replids, offsets and region keys are numbers and bytes that it hands on. And it decides nothing: what to
//! do with a message is the agents' business.
//!
//! ```text
//!   replica (client)                                              source (server)
//!        │  MAGIC, Hello{versions, features, nonce}                     │
//!        ├─────────────────────────────────────────────────────────────▶│
//!        │  MAGIC, Challenge{version, versions, features, nonce, session}
//!        │◀─────────────────────────────────────────────────────────────┤
//!        │  Proof = HMAC(token, "client", all of the above)             │   nothing secret has crossed,
//!        ├─────────────────────────────────────────────────────────────▶│   and nothing worth having is
//!        │  Proof = HMAC(token, "server", all of the above)             │   said before both proofs hold
//!        │◀─────────────────────────────────────────────────────────────┤
//!        │                                                              │
//!        │  Join, Progress, HandOffQuery, StatusQuery, Leave            │   every frame now bears a MAC over
//!        ├═════════════════════════════════════════════════════════════▶│   direction, sequence and content;
//!        │  Waiting, Offer, HandOffAnswer, GenerationGone, Status, …    │   Heartbeat both ways when there is
//!        │◀═════════════════════════════════════════════════════════════┤   nothing else to say
//! ```
//!
//! Meet the modules in this order (start with [`control`], which is the vocabulary):
//!
//! - [`control`]: the messages and their bounded layout; `control/codec.rs` holds the building blocks of that layout;
//! - [`control::frame`]: one message or one step of the handshake on the wire: preamble, checksums, bounds;
//! - [`control::token`]: the shared secret, and the file that it lives in;
//! - [`control::session`]: the handshake of both ends, the seal on every later frame and the two clocks, as pure machines: bytes and
//!   the time go in, bytes and decisions come out;
//! - [`control::connection`]: the thin tokio driver: [`connect`], [`accept`], [`Sender`], [`Receiver`];
//! - [`control::error`]: what can go wrong, sorted by who can act on it.
//!
//! `docs/protocol.md` describes every byte, and what this protects against and what not.

#![forbid(unsafe_code)]

pub mod buffer;
pub mod connection;
pub mod control;
pub mod dispatcher;
pub mod error;
pub mod frame;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
pub mod message;
pub mod messenger;
pub mod policy;
mod registry;
pub mod seal;
pub mod session;
pub mod signal;
pub mod stack;
pub mod throttle;
mod worker;

pub use buffer::{Buffer, Pool};
pub use connection::SendError;
pub use dispatcher::Dispatcher;
pub use message::{Arrival, Delivery};
pub use messenger::{Messenger, Polling};
pub use policy::Policy;
pub use signal::Refusal;
pub use stack::Address;
pub use throttle::{Permit, Throttle};

pub use control::Message;
pub use control::connection::{Connection, Options, Receiver, Sender, accept, connect, turn_away};
pub use control::error::{Error, Fault, Result};
pub use control::session::{MAGIC, Role, derive};
pub use control::token::Token;
