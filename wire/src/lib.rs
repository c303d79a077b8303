//! The parts that Remora's wire formats share: bounded fields, the shared token, and proofs of holding it.
//!
//! Pure: bytes in, values out. No sockets, no clock, no randomness. The only file that is read is the token's.
//!
//! - [`codec`]: little-endian numbers, bounded names, texts, bytes and lists. **Start here.**
//! - [`token`]: the secret that both ends of a connection hold.
//! - [`proof`]: HMACs that prove possession of a secret, and keys derived from one.
//!
//! What does not belong here: a message, a frame or a handshake. Those belong to the crate that speaks them.

#![forbid(unsafe_code)]

pub mod codec;
pub mod proof;
pub mod token;

pub use codec::{Malformed, TooLarge};
pub use proof::derive;
pub use token::{Token, TokenError};
