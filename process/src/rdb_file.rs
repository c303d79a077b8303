//! RDB files: reads all of a snapshot, checks its structure and its checksum, and counts its keys; and says what a
//! source can make a snapshot of.

use std::any::Any;
use std::collections::BTreeMap;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::exit::Failure;
use remora_base::files::open_to_read;
use remora_base::units::Moment;
use remora_protocol::BaseKind;
use remora_redis::ReplId;
use remora_redis::rdb::{Head, ScanError, Scanner, TAIL_BYTES, crc64};

/// What an RDB file is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RdbFile {
    /// The history; empty if the file does not say it.
    pub replid: String,
    /// The last byte of the stream that it holds; 0 if the file does not say it.
    pub offset: u64,
    /// The version of the server that wrote it, as the file says.
    pub server: String,
    /// Of the format.
    pub version: u32,
    /// When the server began to write it; the beginning of 1970 if the file does not say it.
    pub taken: Moment,
    /// Of the file.
    pub bytes: u64,
    /// Of all before the checksum.
    pub crc: u64,
    /// Whether the file has a checksum of its own.
    pub has_checksum: bool,
    /// Keys of each database. `None`: it holds something that this program does not know, or too many databases.
    pub keys: Option<BTreeMap<u64, u64>>,
    /// Keys whose time to live has ended before the file was read. A server deletes them when it loads the file.
    pub expired: u64,
    /// The database of the stream behind it.
    pub stream_db: u64,
}

/// Bytes that are read at a time.
const PIECE: usize = 1 << 20;

/// Strings of at least this length are not taken for part of a run: a run must be in one piece.
const RUN_BELOW: u64 = 64 << 10;

/// The checksum at the end.
const CHECKSUM_BYTES: usize = TAIL_BYTES - 1;

impl RdbFile {
    /// Reads a file to its end.
    ///
    /// # Errors
    /// It cannot be read, is not an RDB file, or is damaged.
    pub fn read(path: &Path) -> Result<RdbFile, Failure> {
        let unreadable = |error: io::Error| Failure::refused(format!("{} cannot be read: {error}", path.display()));
        let damaged = |what: String| Failure::refused(format!("{} is damaged or no RDB file: {what}", path.display()));
        let mut input = open_to_read(path).map_err(unreadable)?;
        let (mut check, mut piece) = (Check::at(Moment::now()), vec![0; PIECE]);
        loop {
            let length = match input.read(&mut piece) {
                Ok(0) => break,
                Ok(length) => length,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(unreadable(error)),
            };
            check.take(piece.get(..length).unwrap_or_default()).map_err(damaged)?;
        }
        check.end().map_err(damaged)
    }
}

/// A check under way.
struct Check {
    scanner: Scanner,
    /// The head, until it has been parsed.
    beginning: Vec<u8>,
    head: Option<Head>,
    /// The last bytes that have come, which may be the checksum.
    last: Vec<u8>,
    crc: u64,
    bytes: u64,
    /// Where the end mark is.
    end: Option<u64>,
    /// What the scanner does not know. The rest is not looked at.
    unknown: Option<String>,
}

impl Check {
    fn at(now: Moment) -> Check {
        let now_ms = i64::try_from(now.get()).unwrap_or_default() * 1000;
        Check {
            scanner: Scanner::of_runs(RUN_BELOW).counting_expired(now_ms),
            beginning: Vec::new(),
            head: None,
            last: Vec::new(),
            crc: 0,
            bytes: 0,
            end: None,
            unknown: None,
        }
    }

    fn take(&mut self, bytes: &[u8]) -> Result<(), String> {
        self.bytes += bytes.len() as u64;
        self.last.extend_from_slice(bytes);
        let sure = self.last.len().saturating_sub(CHECKSUM_BYTES);
        self.crc = crc64(self.crc, self.last.get(..sure).unwrap_or_default());
        self.last.drain(..sure);
        if self.head.is_none() {
            self.beginning.extend_from_slice(bytes);
            match Head::parse(&self.beginning) {
                Ok(Some((head, _))) => {
                    self.head = Some(head);
                    self.beginning = Vec::new();
                }
                Ok(None) if self.beginning.len() > Head::BYTES_MAX => return Err("its head has no end".to_owned()),
                Ok(None) => {}
                Err(error) => return Err(error.to_string()),
            }
        }
        let mut rest = bytes;
        while !rest.is_empty() && self.end.is_none() && self.unknown.is_none() {
            let passed = self.scanner.skip(rest.len() as u64) as usize;
            rest = rest.get(passed..).unwrap_or_default();
            match self.scanner.feed(rest) {
                Ok((taken, found)) => {
                    rest = rest.get(taken..).unwrap_or_default();
                    if let Some(remora_redis::rdb::Found::End { at }) = found {
                        self.end = Some(at);
                    }
                }
                Err(error @ ScanError::Unknown { .. }) => self.unknown = Some(error.to_string()),
                Err(error) => return Err(error.to_string()),
            }
        }
        Ok(())
    }

    fn end(self) -> Result<RdbFile, String> {
        let head = self.head.ok_or("it ends before its first key")?;
        let ends = self.end.map(|at| at + TAIL_BYTES as u64);
        if self.unknown.is_none() && ends != Some(self.bytes) {
            return Err(match ends {
                None => format!("it has {} bytes and no end", self.bytes),
                Some(ends) if ends > self.bytes => "its checksum is cut off".to_owned(),
                Some(ends) => format!("{} bytes follow its end", self.bytes - ends),
            });
        }
        let stored = <[u8; CHECKSUM_BYTES]>::try_from(&*self.last).map(u64::from_le_bytes).unwrap_or_default();
        if stored != 0 && stored != self.crc {
            return Err(format!("its checksum is {:016x}, and {stored:016x} at its end", self.crc));
        }
        if let Some(unknown) = &self.unknown {
            tracing::warn!("keys are not counted: {unknown}; its checksum was compared");
        }
        let text = |name: &str| head.get(name).map(|value| String::from_utf8_lossy(value).into_owned());
        let kind = if head.get("valkey-ver").is_some() { "valkey" } else { "redis" };
        let server = text("valkey-ver").or_else(|| text("redis-ver"));
        let taken = text("ctime").and_then(|seconds| seconds.parse().ok()).unwrap_or_default();
        Ok(RdbFile {
            replid: head.replid().map(|replid| replid.to_string()).unwrap_or_default(),
            offset: head.offset().unwrap_or_default(),
            server: server.map_or_else(|| "unknown".to_owned(), |version| format!("{kind} {version}")),
            version: head.version,
            taken: Moment::seconds(taken),
            bytes: self.bytes,
            crc: self.crc,
            has_checksum: stored != 0,
            keys: if self.unknown.is_some() { None } else { self.scanner.keys() },
            expired: self.scanner.expired(),
            stream_db: u64::from(head.stream_db().unwrap_or_default()),
        })
    }
}

// Stored: backups and files of which a source can make a snapshot, as the one who looks for them tells the source.
// `remora_backup` looks, and the source chooses.

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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use remora_redis::rdb::Writer;

    use super::*;

    fn snapshot() -> Vec<u8> {
        let mut writer = Writer::new(11);
        writer.aux("redis-ver", "7.0.15").aux("ctime", "1795650300").aux("repl-stream-db", "3");
        writer.aux("repl-id", "8c1c6b2f0d6a4e7b9a0f1e2d3c4b5a6978695a4b").aux("repl-offset", "77");
        for database in [0, 3] {
            writer.select_db(database);
            for key in 0..100 {
                // Some in a run, some by themselves.
                let expiry = [None, Some(1), Some(i64::MAX as u64)][key % 3];
                writer.string(format!("key {key}"), vec![b'v'; 3000 * key], expiry);
            }
        }
        writer.finish()
    }

    #[test]
    fn a_snapshot_is_known_by_what_it_says_and_holds() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("dump.rdb");
        let bytes = snapshot();
        std::fs::write(&file, &bytes).unwrap();
        let read = RdbFile::read(&file).unwrap();
        assert_eq!((read.offset, read.stream_db, read.bytes), (77, 3, bytes.len() as u64));
        assert_eq!((&*read.server, read.taken.get(), read.has_checksum), ("redis 7.0.15", 1_795_650_300, true));
        assert_eq!(read.keys, Some(BTreeMap::from([(0, 100), (3, 100)])));
        assert_eq!(read.expired, 2 * 33);
    }

    #[test]
    fn every_cut_and_every_changed_byte_is_found() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("dump.rdb");
        let bytes = snapshot();
        let refused = |bytes: &[u8]| {
            std::fs::write(&file, bytes).unwrap();
            RdbFile::read(&file).is_err()
        };
        assert!(!refused(&bytes));
        for cut in [0, 5, 9, 40, 2000, bytes.len() - 9, bytes.len() - 1] {
            assert!(refused(&bytes[..cut]), "cut at {cut}");
        }
        assert!(refused(&[&bytes[..], b"x"].concat()));
        for at in [0, 12, 300, bytes.len() / 2, bytes.len() - 9, bytes.len() - 1] {
            let mut changed = bytes.clone();
            changed[at] ^= 1;
            assert!(refused(&changed), "byte {at}");
        }
        assert!(RdbFile::read(folder.path()).is_err() && RdbFile::read(Path::new("/dev/zero")).is_err());
    }
}
