//! Names: the files, directories and links in a volume. Pure: no I/O, no clock.
//!
//! All of them are in memory. What changes is written to a log in the volume, in the same order as the data. So a
//! record never appears without what was written before it, whatever of a copy survives.
//!
//! ```text
//!   change ──▶ Names ── records ──▶ Tree (in memory)
//!                 │ ── frame ─────▶ log, in the area in use
//!                 ╰─ a part of ───▶ image, in the other area; complete: the head names it, and the log goes on behind
//! it
//! ```
//!
//! - `tree`: inodes, directories and clusters, as the records make them. **Start here.**
//! - `inode`, `directory`, `runs`, `clusters`: what it consists of.
//! - [`layout`]: where the parts are in a volume; [`record`]: what the log says.
//! - `log`: frames as blocks, written and read; `image`: everything, written while it changes.
//! - `view`: names as they are read, for the one who follows; `writer`: [`Names`], for the one who changes them.
//! - `change`: what is asked; `operations`: what can be done to names; [`error`]: and why it cannot.
//!
//! [docs/volume-files.md](../../../docs/volume-files.md) has the format with sizes and offsets.

mod change;
mod clusters;
mod directory;
pub mod error;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
mod image;
mod inode;
pub mod layout;
mod log;
mod operations;
pub mod record;
mod runs;
#[cfg(test)]
mod tests;
mod tree;
mod view;
mod writer;

pub use change::{New, NewKind, Rename, SetAttributes, SetTime};
pub use error::NamesError;
pub use inode::{Attr, Attributes, Kind, MOST_LINKS, MOST_TARGET_BYTES};
pub use log::BlocksToWrite;
pub use operations::MOST_ALLOCATED;
pub use runs::Run;
pub use tree::ROOT;
pub use view::{Listed, Usage, View};
pub use writer::{MOST_STEP_BYTES, Names};

/// The most clusters of a file: their numbers have 28 bits, as in the largest volume.
pub const MOST_FILE_CLUSTERS: u64 = 1 << 28;

/// The most bytes of a file: 16 TiB.
pub const MOST_FILE_BYTES: u64 = MOST_FILE_CLUSTERS * layout::CLUSTER_BYTES;

/// The most inodes. In memory they and their names take about 250 bytes each. Usually the areas have room for fewer.
pub const MOST_INODES: u64 = 4 << 20;
