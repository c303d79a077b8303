//! A finite stream of bytes in slots: the RDB on its way from one writer to any number of readers.
//!
//! ```text
//!   recv(2) ─▶ space() ─▶ advance() ─▶ published ═════ reads ═════▶ pump() ─▶ next_slot() ─▶ release()
//!              writer                             (Peer or View)    reader
//! ```

mod fetch;
mod in_place;
mod plan;
mod reader;
mod writer;

pub use reader::{Place, Progress, SinkLayout, Slot, SnapshotReader};
pub use writer::SnapshotWriter;
pub(crate) use writer::lay_out;
