//! The parts that Remora's wire formats share: bounded fields, the shared token, and proofs of holding it.
//!
//! Pure: bytes in, values out. No sockets, no clock, no randomness. The only files that are read hold secrets.
//!
//! - [`codec`]: little-endian numbers, bounded names, texts, bytes and lists, and text from a peer that is safe to
//!   show. **Start here.**
//! - [`token`]: the secret that both ends of a connection hold, HMACs that prove possession of it, and keys derived
//!   from one.
//! - [`token::read`]: a file with a secret is read only if no other user could have read or changed it.
//!
//! What does not belong here: a message, a frame or a handshake. Those belong to the crate that speaks them.

#![forbid(unsafe_code)]

pub mod codec;
pub mod token;

pub use codec::{Malformed, TooLarge, is_printable, printable};
pub use token::{Token, TokenError, derive};
