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
mod reader;
mod sealer;
mod slot;
mod source_entries;
mod writer;

pub use copy::{Loss, SnapshotCopy, Turn};
pub use fetch::SinkLayout;
pub use in_place::snapshot_left;
pub use reader::SnapshotReader;
pub use sealer::{SnapshotSealer, StoredSlot};
pub use slot::{Encoded, Place, Progress, Slot};
pub use writer::SnapshotWriter;
pub(crate) use writer::lay_out;
