//! The parts that Remora's wire formats share: bounded fields, the shared token, and proofs of holding it.
//!
//! Pure: bytes in, values out. No sockets, no clock, no randomness. The only file that is read is the token's.
//!
//! - [`codec`]: little-endian numbers, bounded names, texts, bytes and lists. **Start here.**
//! - [`mod@printable`]: text from a peer that is safe to show.
//! - [`token`]: the secret that both ends of a connection hold.
//! - [`proof`]: HMACs that prove possession of a secret, and keys derived from one.
//!
//! What does not belong here: a message, a frame or a handshake. Those belong to the crate that speaks them.

#![forbid(unsafe_code)]

pub mod codec;
pub mod printable;
pub mod proof;
pub mod token;

pub use codec::{Malformed, TooLarge};
pub use printable::{is_printable, printable};
pub use proof::derive;
pub use token::{Token, TokenError};
