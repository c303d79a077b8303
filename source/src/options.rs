//! Options: what a source is asked to do. It has units, ranges and defaults, and no words of a command line.

use std::net::SocketAddr;
use std::num::NonZeroU32;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use remora_base::units::Size;
use remora_conversation::tokens::TokenFiles;
use remora_conversation::transports::{RdmaOffer, UploadLimit};
use remora_process::exit::Failure;
use remora_process::rdb_file::RdbFile;
use remora_process::rdb_file::Stored;
use remora_server::sentinel::Sentinels;
use remora_server::{HostPort, Server};

/// What a source is asked to do.
pub struct Options {
    /// The server that is captured.
    pub target: Target,
    /// How long the source waits at its start for a server that cannot be captured yet. Zero: it tries once.
    pub wait_for_server: Duration,
    /// Where it serves replicas. `None`: the port that the service manager has opened, or 127.0.0.1:7379.
    pub listen: Option<SocketAddr>,
    /// Where it serves metrics.
    pub metrics: Option<SocketAddr>,
    /// The secrets of those who may connect, and what protects the connections.
    pub tokens: TokenFiles,
    /// Where the replicas' servers reach the primary. `None`: the server's own address, or what the Sentinels say.
    pub announce: Option<HostPort>,
    /// Replicas that may have joined at the same time: 1 to [`MAX_REPLICAS`].
    pub max_replicas: u32,
    /// Replicas of one zone that may read a snapshot and load it at the same time. `None`: all that have joined.
    pub at_once: Option<NonZeroU32>,
    /// The memory of the tables.
    pub tables: TableOptions,
    /// Take the first snapshot at once, and not when the first replica joins.
    pub eager: bool,
    /// The file that has the snapshot, in place of the server.
    pub file: Option<SourceFile>,
    /// Backups and files of which a snapshot is made before the server is asked for one.
    pub stored: Option<Arc<dyn Stored>>,
    /// Take no snapshot that makes the primary fork. Snapshots come from the file, from what is stored, from the first
    /// source, or by a sweep of the module: one of the four must be asked for.
    pub no_fork: bool,
    /// The source whose snapshots this one copies, as its standby.
    pub first: Option<HostPort>,
    /// How long a replica of a standby waits for one of those before the server is asked for one.
    pub fork_after: Duration,
    /// A snapshot that is older is not given to new joiners: at least [`LEAST_AGE`].
    pub max_age: Duration,
    /// What the source may change at its server for the moment of the fork.
    pub tuning: TuningOptions,
    /// How long the primary is left without a fork after some of them.
    pub fork_interval: Duration,
    /// How old messages may be that a new replica's subscribers get again.
    pub repeat_messages: Duration,
    /// How long a replica may read nothing while others wait for it.
    pub stall_limit: Duration,
    /// What a module in the server may be asked to do.
    pub module: ModuleOptions,
    /// The lanes over TCP.
    pub lanes: LaneOptions,
    /// Offer shared memory to replicas of this host.
    pub shared_memory: bool,
    /// The RDMA devices that are offered.
    pub rdma: RdmaOffer,
}

/// The server that a source captures, or how it is found. None of it has been connected to.
pub enum Target {
    /// This server.
    Server(Server),
    /// One of a group.
    Group {
        /// Know the servers of the group.
        sentinels: Sentinels,
        /// Which one of them is captured.
        beside: Beside,
        /// Prepares connections to the one at this address.
        open: OpenServer,
    },
}

/// Prepares connections to the server at an address, with the login and the TLS of its group.
pub type OpenServer = Box<dyn Fn(&HostPort) -> Result<Server, Failure> + Send + Sync>;

/// Which server of a group a source captures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Beside {
    /// The replica with the least lag.
    Replica,
    /// The primary.
    Primary,
}

/// Reads a file that has a snapshot.
pub type OpenFile = fn(&Path) -> Result<RdbFile, Failure>;

/// A file that has a snapshot.
pub struct SourceFile {
    /// Where it is.
    pub path: PathBuf,
    /// Reads all of it. It fails if the file differs from what is kept beside it.
    pub open: OpenFile,
}

/// What a source may change at its server for the moment of the fork.
#[derive(Clone, Debug, Default)]
pub struct TuningOptions {
    /// Change anything.
    pub is_wanted: bool,
    /// The folder of the file that notes the former settings. `None`: the user's state folder.
    pub state_dir: Option<PathBuf>,
}

/// The memory of a source's tables.
#[derive(Clone, Debug)]
pub struct TableOptions {
    /// Memory of the snapshot and the journal together: at least [`LEAST_MEMORY`].
    pub memory: Size,
    /// The journal's part of it. `None`: a quarter.
    pub journal: Option<Size>,
    /// The size of a snapshot's slots: a power of two within [`SLOT_SIZES`]. `None`: [`default_slot_size`].
    pub slot_size: Option<Size>,
    /// How slots are compressed for other hosts.
    pub compress: Compress,
}

/// The lanes over TCP.
#[derive(Clone, Debug)]
pub struct LaneOptions {
    /// Their congestion control. `None`: the system's.
    pub congestion: Option<String>,
    /// How fast all of them send together.
    pub upload_limit: UploadLimit,
}

/// What a module in the server may be asked to do.
#[derive(Clone, Debug)]
pub struct ModuleOptions {
    /// How it takes part.
    pub capture: ModuleCapture,
    /// The child writes strings of at least this size. `None`: the size depends on the server's allocator.
    pub walk_from: Option<Size>,
    /// Let the child write small values in the fast way.
    pub fast_keys: bool,
    /// The library that a server without the module is asked to load. An empty path: the one beside this program.
    pub load: Option<PathBuf>,
    /// The folder of the socket by which the module gets the table. `None`: an abstract socket.
    pub socket_folder: Option<PathBuf>,
}

/// How a module takes part in a snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ModuleCapture {
    /// In the way that costs the server less.
    Auto,
    /// The fork child writes the long strings into the source's memory, the server the rest.
    Walk,
    /// The server writes the snapshot, without compressing.
    Server,
    /// The server's own process writes the snapshot without a fork, if nothing stands in the way. Experimental.
    Sweep,
    /// Not at all.
    Off,
}

/// How slots are compressed for other hosts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compress {
    /// In the way that is fastest.
    Auto,
    /// Not at all.
    Off,
    /// By LZ4.
    Lz4,
    /// By Zstandard.
    Zstd,
}

/// The most replicas of one source: a status report lists no more.
pub const MAX_REPLICAS: u32 = remora_protocol::MAX_REPLICAS as u32;

/// The least memory: four slots of the smallest window and a journal of the same size. With less the source would wait
/// more than copy.
pub const LEAST_MEMORY: Size = Size::mebibytes(16);

/// The least age at which a snapshot is too old. Some time passes until a replica that has asked for one is told of it,
/// and with less it would ask for another one each time.
pub const LEAST_AGE: Duration = Duration::from_secs(1);

/// The default time after which a standby asks its own server for a snapshot: a source that is started again is back
/// sooner, and replicas try for longer.
pub const DEFAULT_FORK_AFTER: Duration = Duration::from_secs(30);

/// The sizes in bytes that a slot may have. With smaller slots, reading the directory costs too much; with larger ones,
/// too much is read again after a connection is lost.
pub const SLOT_SIZES: std::ops::RangeInclusive<u64> = 64 << 10..=64 << 20;

/// The default size of a slot. A slot is lent when it is complete, so each replica of a chain is one slot's time behind
/// its upstream: 9 ms at 1 Gb/s. It is also the most that is read at once; smaller slots need more reads for the same
/// bytes.
const DEFAULT_SLOT: u64 = 1 << 20;

/// The most slots that a table has by default: a directory of 16 MiB.
const MOST_DEFAULT_SLOTS: u64 = 1 << 18;

/// The size of a slot for this much memory.
pub fn default_slot_size(memory: Size) -> Size {
    let few_enough = memory.get().div_ceil(MOST_DEFAULT_SLOTS).next_power_of_two();
    Size::bytes(few_enough.clamp(DEFAULT_SLOT, *SLOT_SIZES.end()))
}

impl Options {
    /// The defaults, for this server and these secrets.
    pub fn new(target: Target, tokens: TokenFiles) -> Options {
        Options {
            target,
            wait_for_server: Duration::from_secs(300),
            listen: None,
            metrics: None,
            tokens,
            announce: None,
            max_replicas: 64,
            at_once: None,
            stored: None,
            no_fork: false,
            first: None,
            fork_after: DEFAULT_FORK_AFTER,
            tables: TableOptions::default(),
            eager: false,
            file: None,
            max_age: Duration::from_secs(3600),
            tuning: TuningOptions::default(),
            fork_interval: Duration::from_secs(30),
            repeat_messages: Duration::ZERO,
            stall_limit: Duration::from_secs(15),
            module: ModuleOptions::default(),
            lanes: LaneOptions::default(),
            shared_memory: true,
            rdma: RdmaOffer::default(),
        }
    }

    /// Whether no snapshot comes from anywhere else than the first source.
    pub(crate) fn needs_the_first(&self) -> bool {
        self.no_fork && self.stored.is_none() && self.module.capture != ModuleCapture::Sweep
    }

    /// Whether the snapshot is taken without a replica: the backlog may not reach back to a file's offset later.
    pub fn is_eager(&self) -> bool {
        self.eager || self.file.is_some()
    }
}

impl TableOptions {
    /// The size of a slot: the requested one, or one that suits this much memory.
    pub fn slot_size(&self) -> Size {
        self.slot_size.unwrap_or_else(|| default_slot_size(self.memory))
    }
}

impl Default for TableOptions {
    fn default() -> TableOptions {
        TableOptions { memory: Size::mebibytes(1024), journal: None, slot_size: None, compress: Compress::Auto }
    }
}

impl Default for LaneOptions {
    fn default() -> LaneOptions {
        LaneOptions { congestion: None, upload_limit: UploadLimit::Auto }
    }
}

impl Default for ModuleOptions {
    fn default() -> ModuleOptions {
        ModuleOptions {
            capture: ModuleCapture::Auto,
            walk_from: None,
            fast_keys: true,
            load: None,
            socket_folder: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_are_small_unless_there_would_be_too_many() {
        let size_for = |memory| default_slot_size(Size::bytes(memory)).get();
        assert_eq!(size_for(16 << 20), 1 << 20);
        assert_eq!(size_for(256 << 30), 1 << 20);
        assert_eq!(size_for(300 << 30), 2 << 20);
        assert_eq!(size_for(4 << 40), 16 << 20);
        assert_eq!(size_for(u64::MAX / 2), 64 << 20);
    }
}
