//! Snapshots without a server: files that servers start on, a mount, and backups with the commands since.
//!
//! ```text
//!   source ══ slots ═══▶ receiving ──▶ target ─┬─ file ──▶ dump.rdb in its place, or beside backups
//!          ══ journal ═▶ recorder ──▶ files    ├─ kept ──▶ standard output
//!                           │                  ╰─ kept ◀── mount ◀── kernel ◀── cp, redis-check-rdb, …
//!                           ▼
//!             shelf: a folder   archive: a store of objects ──▶ restore ──▶ a server's folder
//! ```
//!
//! Each job is a function that takes its options: [`fetch`](fetch::to_stdout) and its two halves
//! [`receive`](fetch::receive) and [`place`](fetch::Whole::place), [`mount`](mount::run), [`backup`](backup::run) and
//! [`restore`](restore::run). None of them knows a command line; some of them end when a signal stops them.
//!
//! - `receiving` is the conversation with the source about a snapshot, as a replica has it, and reads the slots into a
//!   target. **Start there.**
//! - [`fetch`] has the slots beside the file that they become, or writes them to standard output. [`mount`] keeps them
//!   for the readers that wait for them, and shows them to the kernel.
//! - [`backup`] makes a backup of a snapshot, and `journal` one of the commands since, of which `recorder` makes files.
//!   `destination` is where they go: `shelf` is a folder of backups, its names, and what is removed there; `archive` is
//!   objects of a `store`, such as a bucket, which `sealing` can encrypt. `manifest` says what a backup is, as JSON.
//! - [`restore`] finds a backup, checks all of it, and lays out what a server starts on. `commands_file` checks a file
//!   of commands.
//!
//! A slot's bytes count when they match the source's checksum. What has arrived stays, whatever becomes of the source.
//! What does not arrive is an error, and never the end of a file. A backup gets its name when it is whole, checked and
//! on the disk.
#![forbid(unsafe_code)]

mod archive;
mod arrival;
pub mod backup;
mod commands_file;
mod destination;
pub mod fetch;
mod journal;
mod manifest;
pub mod mount;
mod options;
mod receiving;
mod recorder;
pub mod restore;
mod sealing;
mod shelf;
mod store;

pub use self::manifest::checked_snapshot;
pub use self::options::{
    BackupOptions, FetchOptions, JournalOptions, LEAST_FILE, Location, MountOptions, Pass, PassOn, ReplicaOf,
    RestoreOptions, SPOOL, SnapshotFrom, StoreOptions,
};
