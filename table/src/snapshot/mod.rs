//! A finite stream of bytes in slots: the RDB on its way from one writer to any number of readers.
//!
//! ```text
//!   recv(2) ─▶ space() ─▶ advance() ─▶ published ═════ reads ═════▶ pump() ─▶ next_slot() ─▶ release()
//!              writer                             (Peer or View)    reader
//! ```
//!
//! Who reads may keep what it has read in a table of its own, out of which others read on: `copy` is reader and writer in one, and
//! `source_entries` is what it knows from the source alone.

mod copy;
mod fetch;
mod in_place;
mod pieces;
mod plan;
mod reader;
mod source_entries;
mod writer;

pub use copy::{Loss, SnapshotCopy, Turn};
pub use reader::{Place, Progress, SinkLayout, Slot, SnapshotReader};
pub use writer::SnapshotWriter;
pub(crate) use writer::lay_out;
