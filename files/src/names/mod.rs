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
//! - `tree`: inodes, directories and clusters, as the records make them; what is asked, and why it cannot be done.
//!   **Start here.**
//!   With them is what a host that follows keeps of files that were removed.
//! - `inode`, `clusters`: what it consists of. Access control lists are extended attributes.
//! - [`layout`]: where the parts are in a volume; [`log`]: what the log says, and its frames as blocks, written and
//!   read.
//! - `writer`: [`Names`], for the one who changes them; as they are read, for the one who follows. In `tree` is the
//!   image: everything, written while it changes.
//!
//! [README.md](../../README.md) has the format with sizes and offsets.

mod clusters;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
mod inode;
pub mod layout;
pub mod log;
#[cfg(test)]
mod tests;
mod tree;
mod writer;

pub use clusters::Run;
pub(crate) use inode::list_of;
pub use inode::{
    Attr, Attributes, Kind, MOST_LINKS, MOST_TARGET_BYTES, MOST_XATTR_BYTES, MOST_XATTR_NAME_BYTES, TRUSTED,
};
pub use log::BlocksToWrite;
pub use tree::{NamesError, New, NewKind, ROOT, Rename, SetAttributes, SetTime, SetXattr, SetXattrHow};
pub use writer::{Listed, MOST_ALLOCATED, MOST_STEP_BYTES, Names, Usage, View};

/// The most clusters of a file: their numbers have 28 bits, as in the largest volume.
pub const MOST_FILE_CLUSTERS: u64 = 1 << 28;

/// The most bytes of a file: 16 TiB.
pub const MOST_FILE_BYTES: u64 = MOST_FILE_CLUSTERS * layout::CLUSTER_BYTES;

/// The most inodes. In memory they and their names take about 250 bytes each. Usually the areas have room for fewer.
pub const MOST_INODES: u64 = 4 << 20;
