//! Wire: the messages between clients and servers, as the messenger carries them.
//!
//! ```text
//!   client (writer)                                   server
//!     │ Open{shape, Write, writer} ──────────────────▶ │        one connection, one volume
//!     │ ◀───────────────────── Standing{standing, room} │
//!     │ Promise · CatchUp · Mark · Write · Confirm ───▶ │        handled in order, and so answered;
//!     │ Zero ─────────────────────────────────────────▶ │        a write without bytes
//!     │ Read, Map ────────────────────────────────────▶ │        a read sees every write before it
//!     │ Attach ───────────────────────────────────────▶ │        from then on it may read the region, too
//!     │ Window ───────────────────────────────────────▶ │        how much may be under way
//!     │ Offer, Pull ──────────────────────────────────▶ │        it takes a write's blocks from the writer's memory
//! │ ◀── Promised · Progress, Whole · Written · Confirmed · Data · Mapped · Attached · Granted · Reached · Fenced ·
//! Refused
//!
//!   client (server whose copy is behind)              server (lender)
//!     │ Open{shape, Borrow, …}, Lend ────────────────▶ │
//!     │ ◀────────────────────────────── Standing, Lent │
//!
//!   client (server that takes bytes along a chain)    server before it in the chain
//!     │ Open{shape, Borrow, …}, Follow ──────────────▶ │
//!     │ ◀────────────────────────── Standing, Attached │
//!
//!   client (a host that only reads)                   server
//!     │ Open{shape, Read, …}, Look ──────────────────▶ │        from then on it may read the region, and only that
//!     │ ◀────────────────────────── Standing, Attached │
//!
//!   client (a command)                                server
//!     │ Create, Status, Scrub, Remove or Grow ───────▶ │        a question about a volume, without opening it
//!     │ ◀──── Created · Status · Scrubbing, … · Removed │
//!     │ ◀─────────────────────────── Progress, … · Grown │
//! ```
//!
//! - `call`: what clients ask, and what servers answer; `fields`: what both consist of.
//!
//! The kind of a message is its kind at the messenger, its fields are the front, and blocks are the data. A message
//! that says something else than its data is malformed: what decodes can be done without further checks of lengths.
//! Nothing here knows the volume's size.

mod call;
mod fields;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
#[cfg(test)]
mod tests;

use remora_wire::Malformed;
use remora_wire::codec::{Codec, List};

use crate::layout::Entry;
use crate::shape::BLOCK_BYTES;
pub use call::{Call, Reply};
pub use fields::{Cause, Findings, Mode, Room, Run, Status, Used};

/// The version of these messages, for the messenger's handshake.
pub const VERSION: u16 = 6;

/// The most blocks in the data of a message: 4 MiB. Enough that heads cost nothing, and little enough that a message
/// delays the next one by milliseconds only.
pub const MOST_BLOCKS: usize = 1024;

/// The most runs of blocks of a write: a file's data, its name, and what lies between.
pub const MOST_RUNS: usize = 16;

/// The most entries that are lent at once, and blocks that are zeroed or mapped at once: those of 64 MiB. A count has
/// 16 bits.
pub const MOST_ENTRIES: usize = 16 * 1024;

/// Longest address of a server, in bytes: a host name has at most 253, a port 5, and its transport some more.
pub const MAX_ADDRESS_BYTES: usize = 280;

/// Longest explanation, in bytes. A longer one is truncated.
pub const MAX_TEXT_BYTES: usize = 400;

/// Longest key of a region, in bytes: the fabric's own bound.
pub const MAX_KEY_BYTES: usize = 512;

/// The most keys of a region: one for each transport of the fabric.
pub const MOST_KEYS: usize = 4;

/// Bits for the most blocks that are mapped at once, in bytes.
pub const MAX_MAP_BYTES: usize = MOST_ENTRIES / 8;

/// The longest front, in bytes.
pub const MAX_FRONT_BYTES: usize = 64 + List::<Entry, MOST_ENTRIES>::MAX_BYTES;

/// The longest data, in bytes.
pub const MAX_DATA_BYTES: usize = MOST_BLOCKS * BLOCK_BYTES;

/// Why a received message is not one of these.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    /// Its kind is unknown.
    #[error("a message has the unknown kind {0}: use the same release on all hosts")]
    Kind(u16),
    /// Its fields are malformed.
    #[error("a message is malformed: {0}")]
    Malformed(#[from] Malformed),
    /// Its data are not the blocks that its fields speak of.
    #[error("a message has {found} bytes of blocks, and its fields speak of {said} blocks")]
    Data {
        /// Bytes of data.
        found: usize,
        /// Blocks that the fields speak of.
        said: usize,
    },
}

/// Checks that a run has a block, and no more than that many.
fn bounded(run: Run, limit: usize) -> Result<Run, Malformed> {
    match run.count as usize {
        0 => Err(Malformed::Invalid { what: "run of blocks" }),
        count if count > limit => Err(Malformed::Excess { count, limit }),
        _ => Ok(run),
    }
}

/// Checks that the data are this number of blocks.
fn expect(found: usize, said: usize) -> Result<(), DecodeError> {
    let is_so = said <= MOST_BLOCKS && found == said * BLOCK_BYTES;
    if is_so { Ok(()) } else { Err(DecodeError::Data { found, said }) }
}
