//! Stored: backups and files of which a source can make a snapshot, as the one who looks for them tells the source.
//! `remora_backup` looks, and the source chooses.

use std::any::Any;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::time::Duration;

use remora_protocol::BaseKind;
use remora_redis::ReplId;
use remora_redis::rdb::Head;

use crate::exit::Failure;
use crate::rdb_file::RdbFile;
use remora_base::files::open_to_read;
use remora_base::moment::Moment;

/// Backups and files of which a snapshot can be made.
pub trait Stored: Send + Sync {
    /// What there is now. It is asked for often, and reads no data set.
    fn look(&self) -> Vec<Found>;

    /// How long a look serves one who only reports it.
    fn holds(&self) -> Duration;

    /// Reads all of what a look has found, while `goes_on` says so: the data, and `with_commands` the commands since.
    ///
    /// # Errors
    /// It is not there any more, is damaged, or cannot be read; or it does not go on.
    fn open(&self, found: &Found, with_commands: bool, goes_on: &dyn Fn() -> bool) -> Result<Opened, Failure>;
}

/// What a look has found.
#[derive(Clone, Debug)]
pub struct Found {
    /// A backup or a file.
    pub kind: BaseKind,
    /// Where it is.
    pub place: String,
    /// What its head says; or why it cannot be used.
    pub head: Result<StoredHead, String>,
}

/// What is known of stored data before all of them are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StoredHead {
    /// The history that they belong to.
    pub history: ReplId,
    /// The last byte of the stream that they hold.
    pub offset: u64,
    /// The last byte of the stream that is stored behind them. The same offset where none is.
    pub reaches: u64,
    /// When they were taken.
    pub taken: Moment,
    /// The version of their format.
    pub version: u32,
}

/// Stored data that were read to their end.
pub struct Opened {
    /// The file that has them.
    pub path: PathBuf,
    /// What it is.
    pub rdb: RdbFile,
    /// The commands since, if they were asked for.
    pub stream: Option<StoredStream>,
    /// What the files go with.
    pub keeps: Option<Box<dyn Any + Send>>,
}

/// The stream behind stored data, byte by byte, in a file of its own.
#[derive(Debug)]
pub struct StoredStream {
    /// The file that has it.
    pub path: PathBuf,
    /// The offset of its last byte.
    pub end: u64,
}

/// Reads the head of an RDB file, and nothing of its keys.
///
/// # Errors
/// It cannot be read, is not an RDB file, or does not say where in which history it was taken.
pub fn head_of(path: &Path) -> Result<StoredHead, String> {
    let unreadable = |error: io::Error| format!("it cannot be read: {error}");
    let mut beginning = Vec::new();
    let file = open_to_read(path).map_err(unreadable)?;
    file.take(Head::BYTES_MAX as u64 + 1).read_to_end(&mut beginning).map_err(unreadable)?;
    let (head, _) = Head::parse(&beginning).map_err(|error| error.to_string())?.ok_or("it has no whole head")?;
    let text = |name: &str| head.get(name).map(|value| String::from_utf8_lossy(value).into_owned());
    let taken = text("ctime").and_then(|seconds| seconds.parse().ok()).unwrap_or_default();
    match (head.replid(), head.offset()) {
        (Some(history), Some(offset)) => {
            Ok(StoredHead { history, offset, reaches: offset, taken: Moment::seconds(taken), version: head.version })
        }
        _ => Err("it does not say to which replication history it belongs (repl-id, repl-offset)".to_owned()),
    }
}
