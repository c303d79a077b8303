//! Options: what is fetched, backed up and restored. They have units, ranges and defaults, and no words of a command
//! line.

use std::ffi::OsString;
use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use remora_base::files::{PRIVATE, Placing};
use remora_base::units::Moment;
use remora_base::units::Size;
use remora_conversation::SourceKey;
use remora_conversation::tokens::{Credentials, TokenFiles};
use remora_reader::data_set::DataSet;
use remora_reader::{ReadOptions, RelayOptions};
use remora_server::sentinel::Sentinels;

/// From which source a snapshot comes that goes to no server.
#[derive(Clone)]
pub struct SnapshotFrom {
    /// Where the source is, and how its memory is read.
    pub read: ReadOptions,
    /// What proves this command to the source, and to those who read slots here.
    pub tokens: TokenFiles,
    /// The key that the source must hold. `None`: any.
    pub source_key: Option<SourceKey>,
    /// What the snapshot must be of. Clones agree on the same.
    pub data_set: DataSet,
    /// The name that the source shows.
    pub name: String,
}

impl SnapshotFrom {
    /// What connects to the source.
    pub(crate) fn credentials(&self) -> Credentials {
        self.tokens.credentials(self.source_key)
    }
}

/// How slots pass between a fetch and replicas. It lends them while it receives, and no longer.
#[derive(Clone, Debug)]
pub struct PassOn {
    /// How it lends and reads them.
    pub relay: RelayOptions,
    /// Memory for slots that others read here: at least 16 MiB. Three quarters of it hold slots.
    pub memory: Size,
}

/// A snapshot that becomes a file, or goes to standard output.
#[derive(Clone)]
pub struct FetchOptions {
    /// The source.
    pub from: SnapshotFrom,
    /// How slots pass between this command and replicas. `None`: they come from the source alone.
    pub pass_on: Option<PassOn>,
    /// The file.
    pub to: PathBuf,
    /// Its owner, its mode, and whether it replaces one that is there.
    pub placing: Placing,
    /// Put the file in its place although the primary would not continue from it.
    pub allow_stale: bool,
    /// How long the primary must still be able to continue from it.
    pub need: Duration,
    /// The file that gets a line `replicaof HOST PORT`.
    pub replicaof: Option<ReplicaOf>,
}

impl FetchOptions {
    /// A file for its owner alone, from the source alone, with the defaults of all else.
    pub fn new(from: SnapshotFrom, to: PathBuf) -> FetchOptions {
        FetchOptions {
            from,
            pass_on: None,
            to,
            placing: Placing { replaces: false, ..PRIVATE },
            allow_stale: false,
            need: Duration::ZERO,
            replicaof: None,
        }
    }

    /// The same for a backup: no server has to go on from the file, and one of an earlier attempt is replaced.
    pub fn of_a_backup(from: SnapshotFrom, to: PathBuf) -> FetchOptions {
        FetchOptions { placing: PRIVATE, allow_stale: true, ..FetchOptions::new(from, to) }
    }
}

/// A file with a line `replicaof HOST PORT`, for the configuration of a server that starts on a snapshot.
#[derive(Clone)]
pub struct ReplicaOf {
    /// The file.
    pub file: PathBuf,
    /// Who is asked for the primary at that moment. `None`: it is the primary of the source.
    pub sentinels: Option<Sentinels>,
}

/// A snapshot that is mounted.
pub struct MountOptions {
    /// The source.
    pub from: SnapshotFrom,
    /// The directory at which the file appears.
    pub directory: PathBuf,
    /// The folder in whose file system the snapshot is kept, in a file without a name.
    pub spool: PathBuf,
    /// The kernel may ask by io_uring, if this host permits it.
    pub ring: bool,
}

/// A backup of the data of a source's server.
pub struct BackupOptions {
    /// The source.
    pub from: SnapshotFrom,
    /// The folder or the bucket for backups.
    pub to: Location,
    /// Whole backups of the same history and kind that stay: at least one. `None`: all.
    pub keep: Option<u32>,
    /// To whom the data are encrypted: recipients (`age1…`), or files with some. Without any, they are not encrypted.
    pub encrypt_to: Vec<String>,
    /// The folder in whose file system a snapshot is kept until it is sent, or written to standard output.
    pub spool: PathBuf,
    /// How a bucket is reached.
    pub store: StoreOptions,
    /// Record the commands since, too.
    pub journal: Option<JournalOptions>,
}

impl BackupOptions {
    /// A snapshot in a folder or a bucket, with the defaults of all else.
    pub fn new(from: SnapshotFrom, to: Location) -> BackupOptions {
        BackupOptions {
            from,
            to,
            keep: None,
            encrypt_to: Vec::new(),
            spool: PathBuf::from(SPOOL),
            store: StoreOptions::default(),
            journal: None,
        }
    }
}

/// The usual folder for what is on its way.
pub const SPOOL: &str = "/var/tmp";

/// How the commands since a snapshot are recorded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct JournalOptions {
    /// How often they are brought to the disk. Zero: each time that some have arrived.
    pub sync_every: Duration,
    /// How old a segment gets before it is sent to a store.
    pub segment_every: Duration,
    /// A larger file or segment is followed by another one: at least [`LEAST_FILE`].
    pub file_size: Size,
    /// After this time another snapshot begins a new folder. Zero: never.
    pub base_every: Duration,
}

/// The smallest file of commands: with smaller ones, a busy server would have thousands.
pub const LEAST_FILE: Size = Size::bytes(64 << 10);

impl Default for JournalOptions {
    fn default() -> JournalOptions {
        JournalOptions {
            sync_every: Duration::from_secs(1),
            segment_every: Duration::from_secs(10),
            file_size: Size::mebibytes(64),
            base_every: Duration::from_secs(24 * 3600),
        }
    }
}

/// A backup that is checked, and laid out for a server.
pub struct RestoreOptions {
    /// The backup, or where backups are.
    pub from: Location,
    /// The folder of a server that gets the files. `None`: nothing is written.
    pub to: Option<PathBuf>,
    /// The end of the second whose data are wanted. `None`: all that the backup has.
    pub until: Option<Moment>,
    /// Which one is meant if that second is in the backup twice. `None`: it is refused.
    pub until_pass: Option<Pass>,
    /// Replace what is in the folder.
    pub replaces: bool,
    /// The file with the identity to which a backup is encrypted.
    pub identity: Option<PathBuf>,
    /// The folder in whose file system a backup of a store is kept while it is checked, if it is not laid out.
    pub spool: PathBuf,
    /// How long a store that cannot be reached is tried again. Zero: it is tried once.
    pub retry_for: Duration,
    /// How a bucket is reached.
    pub store: StoreOptions,
}

impl RestoreOptions {
    /// A check of the newest backup, with the defaults of all else.
    pub fn new(from: Location) -> RestoreOptions {
        RestoreOptions {
            from,
            to: None,
            until: None,
            until_pass: None,
            replaces: false,
            identity: None,
            spool: PathBuf::from(SPOOL),
            retry_for: RETRY_FOR,
            store: StoreOptions::default(),
        }
    }
}

/// How long a store that cannot be reached is tried again: a restart of it, or of a network.
const RETRY_FOR: Duration = Duration::from_secs(300);

/// Which one of equal seconds is meant, where the clock of the host that wrote a backup went back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pass {
    /// That before the clock went back.
    First,
    /// That after the clock went back.
    Last,
}

/// How an S3-compatible store is reached. Each of them stands above the AWS environment variable of the same meaning.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StoreOptions {
    /// `https://HOST:PORT`. `None`: AWS_ENDPOINT_URL, or Amazon's of the region.
    pub endpoint: Option<String>,
    /// The region of the bucket. `None`: AWS_REGION, or `us-east-1`.
    pub region: Option<String>,
    /// The file with the keys. `None`: the AWS environment variables, then the usual files, then the machine's role.
    pub credentials_file: Option<PathBuf>,
    /// Send requests to an endpoint on another host by `http://` too.
    pub allow_http: bool,
}

/// A place for backups.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Location {
    /// A file or folder of this host; `-` is standard output for a command that writes there.
    Path(PathBuf),
    /// Objects of a bucket whose keys begin with this prefix. The prefix has no slash at its ends, and may be empty.
    Bucket {
        /// The bucket.
        bucket: String,
        /// The prefix.
        prefix: String,
    },
}

/// How the address of a bucket begins.
const SCHEME: &str = "s3://";

impl Location {
    /// Reads an argument.
    ///
    /// # Errors
    /// It begins as the address of a bucket, and is not one.
    pub fn parse(text: OsString) -> Result<Location, String> {
        let Some(rest) = text.to_str().and_then(|text| text.strip_prefix(SCHEME)) else {
            return Ok(Location::Path(PathBuf::from(text)));
        };
        let (bucket, prefix) = rest.split_once('/').unwrap_or((rest, ""));
        let prefix = prefix.trim_matches('/');
        let is_part = |part: &str| !part.is_empty() && part != "." && part != "..";
        let is_bucket =
            !bucket.is_empty() && bucket.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '.' | '_'));
        if !is_bucket || !(prefix.is_empty() || prefix.split('/').all(is_part)) {
            return Err(format!("{SCHEME}{rest} is not the address of a bucket: write s3://BUCKET/PREFIX"));
        }
        Ok(Location::Bucket { bucket: bucket.to_owned(), prefix: prefix.to_owned() })
    }

    /// Whether it is standard output.
    pub fn is_stdout(&self) -> bool {
        *self == Location::Path(PathBuf::from("-"))
    }
}

impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Location::Path(path) => path.display().fmt(f),
            Location::Bucket { bucket, prefix } if prefix.is_empty() => write!(f, "{SCHEME}{bucket}"),
            Location::Bucket { bucket, prefix } => write!(f, "{SCHEME}{bucket}/{prefix}"),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn an_address_of_a_bucket_is_told_from_a_path() {
        let parse = |text: &str| Location::parse(text.into());
        let bucket = |bucket: &str, prefix: &str| Location::Bucket { bucket: bucket.into(), prefix: prefix.into() };
        assert_eq!(parse("s3://b").unwrap(), bucket("b", ""));
        assert_eq!(parse("s3://b/").unwrap(), bucket("b", ""));
        assert_eq!(parse("s3://my-b.x/a/b/").unwrap(), bucket("my-b.x", "a/b"));
        assert_eq!(parse("s3://b/a/b").unwrap().to_string(), "s3://b/a/b");
        assert_eq!(parse("/backups").unwrap(), Location::Path("/backups".into()));
        assert!(parse("-").unwrap().is_stdout());
        for wrong in ["s3://", "s3:///a", "s3://b//a/../c", "s3://b/a//b", "s3://a b/c", "s3://b/./c"] {
            assert!(parse(wrong).unwrap_err().contains("s3://BUCKET/PREFIX"), "{wrong}");
        }
    }
}
