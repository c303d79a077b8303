//! A server of the NBD protocol: any block device, by a socket.
//!
//! ```text
//!   client ── options ──▶ Handshake (pure)                    answers
//!          ── requests ─▶ Request (pure) ── checked ──▶ Device ──╮
//!          ◀─ replies ─── Replies (pure) ◀── at once, or later ──╯
//! ```
//!
//! What is said, and no I/O:
//!
//! - [`protocol`]: the numbers of the protocol, and replies as bytes. [`export`]: what is served.
//! - [`handshake`]: negotiation, option by option. **Start here.**
//! - [`request`]: one request, and whether it may take place.
//!
//! What carries it:
//!
//! - [`device`]: what a block device must do, and how it answers: in the caller's thread, or later from any other; what
//!   waits to be sent; and a device in this process's memory.
//! - `stream`: a socket, with TLS or without, and its certificates.
//! - [`server`]: listens, and has a thread for each connection.
//!
//! A device that answers at once is served by one thread with one `recv` and one `send` for as many requests as have
//! arrived. One that answers later may have [`device::MOST_REQUESTS`] under way on each connection, answered in the
//! order in which they are completed.
//!
//! It does not know what stands behind a device, and it is not a client.
#![forbid(unsafe_code)]

pub mod device;
pub mod export;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
pub mod handshake;
pub mod protocol;
pub mod request;
pub mod server;
mod stream;

pub use device::Device;
pub use export::{Export, Geometry};
pub use server::{Address, Offer, Server, ServerOptions};
pub use stream::TlsConfig;
