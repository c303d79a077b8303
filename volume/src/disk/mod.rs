//! Disk: the store of a copy: what a server keeps of it in files, so that it has it again after its end.
//!
//! ```text
//!   event ─▶ record in the journal ─▶ memory ─▶ answer            one pwrite; the page cache outlives the process
//!                  │ fdatasync, for all records so far             `durable` advances; promises and marks are answered
//!                  ▼
//!            a segment is full ─▶ checkpoint: its blocks go to the extents, fdatasync, the segment is removed
//! ```
//!
//! - `journal`: an event as bytes: how the copy stands after it, and the blocks that it changed; the superblock, with
//!   which recovery begins; and what appends, and knows what is synced. **Start here.**
//! - `files`: what a store asks of its folder, and the system's.
//! - `checkpoint`: moves blocks from the journal's segments to the extents, and scrubs: it reads what no client reads,
//!   before it is needed.
//! - `recovery`: finds the copy again, and makes the store of one that becomes larger; the folders of
//!   a server's copies.
//!
//! What holds:
//!
//! - A copy that is found again is the copy as it was after one event, at or after the last one that was synced.
//! - A block in the extents that is torn is in the journal still: a segment is removed after the extents are synced.
//! - What was synced and is not readable any more is not taken for the end of the journal: the copy is lost, as what
//!   it has promised may be missing. That it was synced, a later record says, or after half a second the superblock.
//! - As long as the system runs, nothing is missing but a write that the process's end has interrupted.
//! - After an error of a write or a sync nothing is believed: the store is marked as lost, and the copy is.
//!
//! Assumed of the device: what was synced stays, also if a neighbouring sector is written when the power fails.

pub(crate) mod checkpoint;
pub(crate) mod files;
pub(crate) mod journal;
pub(crate) mod recovery;
#[cfg(test)]
mod simulated;
#[cfg(test)]
mod tests;
