//! An endless stream in slots: the replication stream after the snapshot. The newest slot replaces the oldest.
//!
//! ```text
//!   slot:  ├ length, CRC-32C ┤ bytes ┼ length, CRC-32C ┤ bytes … ┼─ 0 to 8 bytes unused ─┤
//! ```
//!
//! A stream has no boundaries that must be kept, so an append that does not fit is split into two records. Therefore
//! every slot but the open one is full, except for at most 8 bytes in which no record fits, and a reader knows where to
//! continue in the next one. Offsets are replication offsets: the first byte of the journal is `first_offset + 1`.

mod fetch;
mod reader;
mod records;
mod track;
mod writer;

pub use reader::JournalReader;
pub use track::{Chunk, Room};
pub use writer::{JournalWriter, journal_left};
