//! The volume: numbered blocks in the memory of one to several servers, changed by one writer at a time.
//!
//! ```text
//!   writer ── Write 1, 2, 3, … ──▶ server: copy, a prefix of what the writer said
//!     │   ───── the same ────────▶ server: copy
//!     ╰─────── the same ─────────▶ server: copy that is behind ◀── blocks that it lacks ── a copy that has them
//! ```
//!
//! The rules decide, and do no I/O:
//!
//! - [`rules`]: the order of all writes; what a writer and the servers say to each other; what a server promises,
//!   applies and refuses. **Start here.**
//! - [`writer`]: how a writer opens the volume, writes, and takes copies back.
//!
//! The blocks of a copy are memory that others may read while it is written:
//!
//! - [`shape`]: what of a volume never changes, and which of two sizes a copy has; [`layout`]: where things are in a
//!   copy's region, and the owner's end of it.
//! - [`reader`]: the other end, one-sided or in place.
//!
//! What carries the rules out, over the network:
//!
//! - [`wire`]: the messages as bytes, what the network needs beside the rules, and what requests of several blocks have
//!   in common.
//! - `link`: how they use the messenger; one question at a time, of a server to another one, or of a host that only
//!   reads; memory out of which servers pull large writes, and connections to it, by TCP and RDMA.
//! - [`server`]: the memory of a host, lent to volumes.
//! - [`client`]: a volume as its one writer has it open.
//! - [`read_only`]: a volume as a host reads it that does not write.
//! - [`nbd`]: such a volume as a block device, for clients of the NBD protocol.
//!
//! The crate `remora-files` puts a file system into the blocks.
//!
//! What holds after every event, whichever process dies and whatever is lost on the way, as long as fewer servers than
//! must hold a write forget what they held:
//!
//! - A write that was acknowledged is in what every later writer opens, and so is a write that was read.
//! - Each whole copy is a prefix of one history of writes.
//! - A writer that another one has replaced acknowledges nothing more.
//!
//! `tests/mod.rs` plays random schedules against these sentences, and finds each of the rules missing if it is
//! taken out.
#![forbid(unsafe_code)]

pub mod client;
mod disk;
pub mod layout;
mod link;
pub mod nbd;
pub mod read_only;
pub mod reader;
pub mod rules;
pub mod server;
pub mod shape;
#[cfg(test)]
mod tests;
pub mod wire;
pub mod writer;

pub use link::{Rdma, Security};
