//! Fixed-size slots in fabric memory, the directory that finds them, and the two streams that are kept in them.
//!
//! This crate knows neither Redis nor sockets. It lays bytes out in a [`Memory`](remora_fabric::Memory) in such a way that
//! somebody who can only *read* that memory, from another process or another host, at any moment and in any order, gets the
//! right bytes or knows that it hasn't. It has no thread, no clock, no I/O of its own and no unsafe code.
//!
//! ```text
//!                     ┌────────────┬───────────┬────────────┬────────────┬────────────┐
//!   one memfd:        │ superblock │ directory │  slot i    │  slot i+1  │  slot i+2  │ …  slot i lies at i mod n
//!                     └────────────┴───────────┴────────────┴────────────┴────────────┘
//!                       identity,    64 bytes    bytes of an RDB (snapshot), or records of
//!                       published,   per slot    the replication stream (journal)
//!                       retired, end
//!
//!   SnapshotWriter ──┐                                           ┌── SnapshotReader ─▶ verified slots, in order
//!     JournalWriter ─┴─▶ bytes, then entry, then `published`  ══▶┴──── JournalReader ─▶ verified bytes from any offset held
//! ```
//!
//! In the order in which to read it:
//!
//! * [`layout`]: every byte of it, and what is always true. **Start here.**
//! * `publish`: in which order words are stored and loaded; the part that loom checks.
//! * [`snapshot`]: a finite stream: its writer, its reader over a peer or in place, and the copy out of which others read on.
//! * [`journal`]: an endless one, of records.
//! * [`server_pages`]: how a writer and a reader inside a server's process are told what to do, and tell how far they are.
//! * `reads`, [`expectation`]: what the two readers share.
//! * [`error`]: what can go wrong, by who can act on it.
//!
//! `docs/table.md` tells the same with drawings and the measurements behind it.

#![forbid(unsafe_code)]

pub mod error;
pub mod expectation;
pub mod journal;
pub mod layout;
mod publish;
mod reads;
pub mod server_pages;
pub mod snapshot;

pub use error::Error;
pub use expectation::Expectation;
pub use journal::{Chunk, JournalReader, JournalWriter};
pub use layout::{Geometry, Identity, Kind, MIN_SLOTS, State};
pub use server_pages::capture_page::CapturePage;
pub use server_pages::load_page::LoadPage;
pub use snapshot::{Loss, Place, Progress, SinkLayout, Slot, SnapshotCopy, SnapshotReader, SnapshotWriter, Turn};

#[cfg(all(test, not(loom)))]
mod tests;
