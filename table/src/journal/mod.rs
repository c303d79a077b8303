//! An endless stream in slots: what the primary says after the snapshot. The oldest slot makes room for the newest.
//!
//! ```text
//!   slot:  ├ length, CRC-32C ┤ bytes ┼ length, CRC-32C ┤ bytes … ┼─ 0 to 8 bytes unused ─┤
//! ```
//!
//! A stream has no borders that must be kept, so an append that doesn't fit is cut in two records. Therefore every slot but
//! the open one is full, but for at most the 8 bytes in which no record fits, and a reader knows without being told where to
//! go on in the next. Offsets are those of replication: the first byte of the journal is `first_offset + 1`.

mod fetch;
mod in_place;
mod reader;
mod records;
mod search;
mod writer;

pub use reader::{Chunk, JournalReader};
pub use writer::JournalWriter;
