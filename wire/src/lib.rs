//! The parts that Remora's wire formats share: bounded fields, the shared token, and proofs of holding it.
//!
//! Pure: bytes in, values out. No sockets, no clock, no randomness. The only files that are read hold secrets.
//!
//! - [`codec`]: little-endian numbers, bounded names, texts, bytes and lists. **Start here.**
//! - [`mod@printable`]: text from a peer that is safe to show.
//! - [`token`]: the secret that both ends of a connection hold.
//! - [`secret_file`]: such a file is read only if no other user could have read or changed it.
//! - [`proof`]: HMACs that prove possession of a secret, and keys derived from one.
//!
//! What does not belong here: a message, a frame or a handshake. Those belong to the crate that speaks them.

#![forbid(unsafe_code)]

pub mod codec;
pub mod printable;
pub mod proof;
pub mod secret_file;
pub mod token;

pub use codec::{Malformed, TooLarge};
pub use printable::{is_printable, printable};
pub use proof::derive;
pub use token::{Token, TokenError};
