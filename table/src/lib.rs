//! Fixed-size slots in fabric memory, the directory that describes them, and the two streams stored in them.
//!
//! This crate knows neither Redis nor sockets. It arranges bytes in a [`Memory`](remora_fabric::Memory) so that a
//! reader that can only *read* that memory, from another process or another host, at any moment and in any order,
//! either gets the right bytes or knows that it did not. It has no thread, no clock, no I/O of its own and no unsafe
//! code.
//!
//! ```text
//!                     ┌────────────┬───────────┬────────────┬────────────┬────────────┐
//!   one memfd:        │ superblock │ directory │  slot i    │  slot i+1  │  slot i+2  │ …  slot i is at i mod n
//!                     └────────────┴───────────┴────────────┴────────────┴────────────┘
//!                       identity,    64 bytes    bytes of an RDB (snapshot), or records of
//!                       published,   per slot    the replication stream (journal)
//!                       retired, end
//!
//!   SnapshotWriter ──┐                                           ┌── SnapshotReader ─▶ verified slots, in order
//!     JournalWriter ─┴─▶ bytes, then entry, then `published`  ══▶┴──── JournalReader ─▶ verified bytes from any offset held
//! ```
//!
//! In reading order:
//!
//! * [`layout`]: every byte of a table, and its invariants. **Start here.**
//! * `publish`: the order in which words are stored and loaded; the part that loom checks.
//! * [`encoding`], [`method`]: slots that are stored compressed.
//! * [`seal`]: ciphertext for readers on other hosts, made once.
//! * [`snapshot`]: a finite stream: its writer, its sealer, its reader over a peer or in place, and the copy from which
//!   others read.
//! * [`journal`]: an endless stream of records.
//! * [`server_pages`]: pages on which a process of a server gets its instructions and reports its progress.
//! * [`expectation`]: shared by the two readers: what they expect of a table, and their outstanding reads.
//! * [`identity`]: which table it is, where it begins.
//! * [`error`]: errors, grouped by who can act on them.
//!
//! `table/README.md` describes the same with drawings and the measurements behind it.

#![forbid(unsafe_code)]

pub mod encoding;
pub mod error;
pub mod expectation;
#[cfg(all(any(test, feature = "fuzzing"), not(loom)))]
pub mod fuzzing;
pub mod identity;
pub mod journal;
pub mod layout;
pub mod method;
mod publish;
pub mod seal;
pub mod server_pages;
pub mod snapshot;

pub use error::Error;
pub use expectation::Expectation;
pub use identity::{Identity, Kind, Origin};
pub use journal::{Chunk, JournalReader, JournalWriter, Room, journal_left};
pub use layout::{Geometry, MIN_SLOTS, State};
pub use method::Method;
pub use seal::{Algorithm, Seal, SealKey};
pub use server_pages::{CapturePage, LoadPage};
pub use snapshot::{
    Encoded, Loss, Place, Progress, SinkLayout, Slot, SnapshotCopy, SnapshotReader, SnapshotSealer, SnapshotWriter,
    StoredSlot, Turn, snapshot_left,
};

#[cfg(all(test, not(loom)))]
mod tests;
