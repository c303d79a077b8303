//! Files in a volume: a file system in the blocks of one, and its mount.
//!
//! ```text
//!   mount ──▶ Files: names in memory, one lock ── blocks, with the log ──▶ Disk: a volume
//!               ▲                                                           │
//!               ╰───────────────── acknowledged: the caller is told ◀───────╯
//!
//!   mount, read-only ──▶ Follower: names, read on when the log has grown ◀── one-sided reads ── Blocks: a copy
//! ```
//!
//! One host writes, by [`Files`] on a [`Disk`]: blocks that one process writes, such as a [`remora_volume`] volume. Any
//! number of hosts read, by a [`Follower`] on [`Blocks`](remora_volume::reader::Blocks) of a copy, and cost the writer
//! nothing. [`Image`] is all of a volume as one file, for another file system in it.
//!
//! - [`names`]: the names of files, in the order of what is written. Pure.
//! - `disk`: the blocks below, requests to them in their order, what is answered early, and threads of the disk.
//!   **Start here.**
//! - `core`: the lock, what is under way, changes of what is in files, reads, and how a volume gets files or
//!   has some. `files`: what can be asked.
//! - `parts`: which blocks a range of a file is, and what a page cache has accepted and the volume has not. `image`:
//!   all of a volume as one file.
//! - `follower`: files on a host that only reads.
//! - `error`: why something cannot be done.
//! - [`mount`]: the files as a file system of the kernel.
//!
//! What is asked of names alone is answered at once. A change is answered when the volume has acknowledged it: then it
//! survives what an acknowledged write of the volume survives. After [`Files::fsync`] everything before it survives
//! what a flush does. What a page cache writes back may be answered before, and is then as safe as in that cache. A
//! write is in the volume together with the size and the clusters that it gives to its file, or it
//! is not.
//!
//! Names change in memory when a change is submitted. So another caller can see a change that is not acknowledged yet;
//! if the writer dies at that moment, the change may be lost.
#![forbid(unsafe_code)]

mod core;
mod disk;
mod error;
mod files;
mod follower;
mod image;
pub mod mount;
#[cfg(test)]
mod mutant;
pub mod names;
mod parts;
#[cfg(test)]
mod tests;

pub use core::Purpose;
pub use disk::{Disk, DiskDone};
pub use error::{FilesError, MOST_WRITE_BYTES};
pub use files::{Allocate, Files};
pub use follower::Follower;
pub use image::Image;
