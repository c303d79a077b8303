//! Base: from what a replica is made that joins a source, as an offer without tables and a status report say it.

use remora_wire::codec::Text;
use remora_wire::{codes, record};
use serde::Serialize;

use crate::bounds::{MAX_TEXT_BYTES, MAX_WHY_BYTES};

/// From what a replica is made that joins a source now.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
pub struct Base {
    /// Which of the ways it is.
    pub kind: BaseKind,
    /// Where it is; empty if the kind says that.
    pub place: String,
    /// Seconds since its data were the server's; 0 if they are taken when they are wanted.
    pub age_seconds: u64,
    /// Bytes of the stream behind it.
    pub stream_bytes: u64,
    /// Which other bases do not serve, and why; empty if all do.
    pub passed_over: String,
}

record!(Base {
    kind: BaseKind,
    place: Text<MAX_WHY_BYTES>,
    age_seconds: u64,
    stream_bytes: u64,
    passed_over: Text<MAX_TEXT_BYTES>,
});

/// The ways to a base, in the order in which a source chooses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum BaseKind {
    /// A snapshot that the source holds, or takes at present.
    Snapshot,
    /// A copy of another source's snapshot.
    Copy,
    /// The snapshot of a backup.
    Backup,
    /// A file that a server has written.
    File,
    /// The server's module sends all keys, without a fork.
    Sweep,
    /// A snapshot of the server, which forks for it.
    Fork,
    /// None serves at present.
    #[default]
    None,
}

codes!(BaseKind is "base" {
    0 => Snapshot,
    1 => Copy,
    2 => Backup,
    3 => File,
    4 => Sweep,
    5 => Fork,
    6 => None,
});

impl BaseKind {
    /// All names, as reports and metrics have them.
    pub const NAMES: [&str; 7] = ["snapshot", "copy", "backup", "file", "sweep", "fork", "none"];

    /// Its name among them.
    pub fn name(self) -> &'static str {
        match self {
            BaseKind::Snapshot => "snapshot",
            BaseKind::Copy => "copy",
            BaseKind::Backup => "backup",
            BaseKind::File => "file",
            BaseKind::Sweep => "sweep",
            BaseKind::Fork => "fork",
            BaseKind::None => "none",
        }
    }

    /// What it is, for people.
    pub fn words(self) -> &'static str {
        match self {
            BaseKind::Snapshot => "the source's snapshot",
            BaseKind::Copy => "a copy of the first source's snapshot",
            BaseKind::Backup => "a backup",
            BaseKind::File => "a file",
            BaseKind::Sweep => "a sweep by the server's module",
            BaseKind::Fork => "a new snapshot of the server",
            BaseKind::None => "none",
        }
    }
}
