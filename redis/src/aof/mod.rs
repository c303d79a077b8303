//! Append-only files: commands one behind the other, with lines of notes between them, and the manifest that names the
//! files of one data set.
//!
//! ```text
//!   appendonly.aof.manifest        file appendonly.aof.1.base.rdb seq 1 type b       a snapshot
//!                                  file appendonly.aof.1.incr.aof seq 1 type i       commands since
//!
//!   *2 $6 SELECT $1 3 │ #TS:1764114301 │ *3 $3 SET … │ *1 $5 MULTI │ *3 … │ *1 $4 EXEC │ #… │ *3 …
//!                     ▲                              ▲             no border          ▲    ▲
//!                     ╰───────────── borders: a file that ends here is whole ─────────┴────╯
//! ```
//!
//! - [`Walker`]: finds the ends of commands and transactions as bytes arrive, and holds none of the values. It reads
//!   files, and the replication stream, which has the same form without notes. **Start here.**
//! - [`Watch`]: finds the commands of a stream that must not be applied late.
//! - [`Foreign`]: finds the commands of a stream that a server does not know.
//! - [`Manifest`]: the list of files, as Redis 7 and Valkey write it.
//!
//! Not here: what a command does. Only `SELECT`, `MULTI`, `EXEC`, the commands without an effect on data, and those
//! that act on more than data are told apart, by the table of [`commands`](crate::commands).

mod manifest;
mod walk;
mod watch;

pub use manifest::{FileKind, Manifest, ManifestError, NamedFile};
pub use walk::{Found, KEY_BYTES_MAX, Relative, SHORT_BYTES_MAX, Verb, WalkError, Walker};
pub use watch::{Foreign, Known, Seen, Unfit, Watch};

/// What a note begins with that says at which second the commands behind it were run.
pub const TIME_NOTE: &[u8] = b"#TS:";
