//! A server of the NBD protocol: any block device, by a socket.
//!
//! ```text
//!   client ── options ──▶ Handshake ── answers ──▶ client
//!          ── requests ─▶ Request ──── checked ──▶ a device
//!          ◀─ replies ─── reply ◀─────────────────────╯
//! ```
//!
//! What is said, and no I/O:
//!
//! - [`protocol`]: the numbers of the protocol. [`export`]: what is served.
//! - [`handshake`]: negotiation, option by option. **Start here.**
//! - [`request`]: one request, and whether it may take place. [`reply`]: replies as bytes.
//!
//! It does not know what stands behind a device, and it is not a client.
#![forbid(unsafe_code)]

pub mod export;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
pub mod handshake;
pub mod protocol;
pub mod reply;
pub mod request;

pub use export::{Export, Geometry};
