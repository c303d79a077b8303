//! A finite stream of bytes in slots: the RDB on its way from one writer to any number of readers.
//!
//! ```text
//!   recv(2) ─▶ space() ─▶ advance() ─▶ published ═════ reads ═════▶ pump() ─▶ next_slot() ─▶ release()
//!              writer                             (Peer or View)    reader
//! ```
//!
//! A reader may keep what it has read in a table of its own, from which others read: `copy` is reader and writer in
//! one, and `source_entries` is what it has read from the source itself.

mod copy;
mod fetch;
mod in_place;
mod left;
mod opening;
mod pieces;
mod plan;
mod reader;
mod sealer;
mod sink;
mod slot;
mod source_entries;
mod turn;
mod verdict;
mod writer;

pub use copy::SnapshotCopy;
pub use left::snapshot_left;
pub use reader::SnapshotReader;
pub use sealer::{SnapshotSealer, StoredSlot};
pub use sink::SinkLayout;
pub use slot::{Encoded, Place, Progress, Slot};
pub use turn::{Loss, Turn};
pub use writer::SnapshotWriter;
pub(crate) use writer::lay_out;
