//! The arguments of `remora backup` and `remora restore`, and where backups are.

use std::ffi::OsString;
use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::builder::{OsStringValueParser, TypedValueParser};
use clap::{Args, ValueEnum};

use super::{FetchArgs, MetricsArgs, MetricsFileArgs, SnapshotFromArgs};
use crate::exit::{self, Code};
use crate::units::{Size, parse_duration};
use remora_base::moment::Moment;

/// The arguments of `remora backup`.
#[derive(Clone, Debug, Args)]
#[command(long_about = BACKUP_ABOUT, after_long_help = backup_help())]
pub struct BackupArgs {
    #[command(flatten)]
    #[allow(missing_docs)]
    pub from: SnapshotFromArgs,

    /// The folder for the backups, which is made if it is missing; or s3://BUCKET/PREFIX; `-`: the snapshot alone, to
    /// standard output.
    #[arg(long, value_name = "DIR|URL", value_parser = OsStringValueParser::new().try_map(Location::parse), help_heading = "Backups")]
    pub to: Location,

    /// Once the new backup is whole, remove the oldest ones of the same replication history and kind, so that N stay.
    /// Files and folders that this command has not made are never touched.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..), help_heading = "Backups")]
    pub keep: Option<u32>,

    /// Encrypt the data to this recipient (age1…), or to those in this file, in the age format. The manifests stay
    /// readable: they hold no keys and values. Can be given several times; any one of the recipients can restore.
    #[arg(long, value_name = "age1…|FILE", help_heading = "Backups")]
    pub encrypt_to: Vec<String>,

    /// With `--to -`, `--to s3://…` and --encrypt-to: folder in whose file system the snapshot is kept, in plain, as it
    /// arrives. Except for `-` it is in a folder there, `remora-backup-…`, in which an interrupted backup goes on; it
    /// is removed once it was sent.
    #[arg(long, value_name = "DIR", default_value = "/var/tmp", help_heading = "Backups")]
    pub spool: PathBuf,

    #[command(flatten)]
    #[allow(missing_docs)]
    pub store: StoreArgs,

    /// Stay, and write the commands since the snapshot too, as a multi-part append-only file with the time of each
    /// second, until stopped. Any moment since the snapshot can be restored then.
    #[arg(long, help_heading = "Commands since")]
    pub journal: bool,

    /// How often the written commands are brought to the disk: at most what came in this time is lost when this host
    /// fails. `0`: each time that some have arrived.
    #[arg(long, value_name = "TIME", default_value = "1s", value_parser = parse_duration, requires = "journal", help_heading = "Commands since")]
    pub sync_every: Duration,

    /// With `--to s3://…` or --encrypt-to: how old a segment of commands gets before it is sent. At most what came in
    /// this time, a second, and the time of sending is lost when this host and the primary are.
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = parse_duration, requires = "journal", help_heading = "Commands since")]
    pub segment_every: Duration,

    /// A file or segment of commands that is larger than this is followed by another one.
    #[arg(long, value_name = "SIZE", default_value = "64MiB", value_parser = parse_file_size, requires = "journal", help_heading = "Commands since")]
    pub file_size: Size,

    /// Begin anew with another snapshot after this time, without a gap. The source takes another snapshot only if its
    /// own is older than its --max-age. `0`: never.
    #[arg(long, value_name = "TIME", default_value = "1d", value_parser = parse_duration, requires = "journal", help_heading = "Commands since")]
    pub base_every: Duration,

    #[command(flatten)]
    #[allow(missing_docs)]
    pub metrics: MetricsArgs,

    #[command(flatten)]
    #[allow(missing_docs)]
    pub metrics_file: MetricsFileArgs,
}

/// The smallest file of commands: with smaller ones, a busy server would have thousands.
const LEAST_FILE: Size = Size::bytes(64 << 10);

fn parse_file_size(text: &str) -> Result<Size, String> {
    let size: Size = text.parse().map_err(|error: crate::units::UnitError| error.to_string())?;
    if size < LEAST_FILE {
        return Err(format!("a file must have at least {LEAST_FILE}"));
    }
    Ok(size)
}

impl BackupArgs {
    /// What fetches the source's snapshot into this file.
    pub(crate) fn fetch(&self, to: &Path) -> FetchArgs {
        let mut from = self.from.clone();
        from.name.get_or_insert_with(|| "backup".to_owned());
        FetchArgs::of_a_backup(from, to.to_owned(), self.spool.clone())
    }
}

const BACKUP_ABOUT: &str = "\
Backs the data of a source's server up: its snapshot as an RDB file in a folder, and with --journal the commands since.

The command reads the snapshot as a replica does: the source forks the server for it at most once, and not at all if it has a \
snapshot already. A backup gets its name when it is whole, checked and on the disk; a crash at any moment leaves the earlier ones as \
they were. Its name begins with its moment in UTC, and a small JSON file beside it says what it is. With --journal the command goes \
on with the replication stream from the source's memory, which costs the primary nothing: a folder of its own has the snapshot and \
the commands since, as a server with appendonly yes has them. `remora restore` checks a backup, and lays it out for a server.";

fn backup_help() -> String {
    format!(
        "\
Examples:
  Each night, with a week of them:
    remora backup --source 10.0.0.5:7379 --token-file token --to /backups --keep 7
  Always, each second; a new beginning each day, and three of them:
    remora backup --source 10.0.0.5:7379 --token-file token --to /backups --keep 3 --journal
  What there is, and the data of a moment for a server:
    remora restore /backups
    remora restore /backups --until 2026-11-25T23:45:00Z --to /data
  To a bucket, with the commands of the last ten seconds at most missing:
    remora backup --source 10.0.0.5:7379 --token-file token --to s3://backups/orders --keep 3 --journal \\
      --s3-endpoint https://minio:9000 --s3-credentials-file keys
  Encrypted, and restored by the owner of the identity:
    remora backup --source 10.0.0.5:7379 --token-file token --to /backups --encrypt-to age1…
    remora restore /backups --identity key.txt --to /data
  To another program:
    remora backup --source 10.0.0.5:7379 --token-file token --to - | zstd > backup.zst

{}",
        exit::help_table(&[Code::Usage, Code::Refused, Code::Source, Code::Interrupted, Code::Local, Code::Store])
    )
}

/// The arguments of `remora restore`.
#[derive(Clone, Debug, Args)]
#[command(long_about = RESTORE_ABOUT, after_long_help = restore_help())]
pub struct RestoreArgs {
    /// A backup: an RDB file, or a folder with an append-only file. Or a folder or s3://BUCKET/PREFIX of `remora
    /// backup`: the newest backup there, or with --until the newest that is not of a later moment. With a backup's
    /// name behind the prefix: that one.
    #[arg(value_name = "PATH|URL", value_parser = OsStringValueParser::new().try_map(Location::parse))]
    pub from: Location,

    /// Folder of a server (`dir`) that gets `dump.rdb`, or `appendonlydir`. Without this option nothing is written.
    #[arg(long, value_name = "DIR")]
    pub to: Option<PathBuf>,

    /// The data as they were at the end of this second: 2026-11-25T23:45:00Z (or with +01:00), or seconds since 1970.
    /// Default: all that the backup has.
    #[arg(long, value_name = "TIME")]
    pub until: Option<Moment>,

    /// Where the clock of the host that wrote the backup went back, a second is in it twice: the first or the last one
    /// counts. Without this option --until refuses such a second.
    #[arg(long, value_name = "WHICH", requires = "until")]
    pub until_pass: Option<Pass>,

    /// Replace a `dump.rdb` or `appendonlydir` that is there. Without this option the command refuses.
    #[arg(long, requires = "to")]
    pub replace: bool,

    /// File with the age identity of an encrypted backup (AGE-SECRET-KEY-1…), that only its owner can read.
    #[arg(long, value_name = "FILE")]
    pub identity: Option<PathBuf>,

    /// Without --to: folder in whose file system a backup that is encrypted or in a bucket is kept while it is checked.
    /// With --to it is fetched into that folder.
    #[arg(long, value_name = "DIR", default_value = "/var/tmp")]
    pub spool: PathBuf,

    /// How long to retry while the store of a bucket cannot be reached, with growing pauses. `0` tries once.
    #[arg(long, value_name = "TIME", default_value = "5m", value_parser = parse_duration)]
    pub retry_for: Duration,

    /// Print one JSON object instead of text.
    #[arg(long, help_heading = "Output")]
    pub json: bool,

    #[command(flatten)]
    #[allow(missing_docs)]
    pub store: StoreArgs,
}

/// Which one of equal seconds is meant.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Pass {
    /// That before the clock went back.
    First,
    /// That after the clock went back.
    Last,
}

const RESTORE_ABOUT: &str = "\
Checks a backup, says what it holds, and lays out what a server starts on.

All of it is read: the structure and the checksum of the RDB file, the list of an append-only file, and each command with its \
transaction. What a crash has left behind the last whole command or transaction is named, and left out. With --to the files are laid \
into a server's folder, up to --until. Backups of other programs can be read too, if they are RDB files or append-only files of Redis \
7 and newer or Valkey.";

fn restore_help() -> String {
    format!(
        "\
Examples:
  Check the newest backup:
    remora restore /backups
  Lay it out, and start a server on it (appendonly yes, if it has commands too):
    remora restore /backups --to /data
    redis-server --dir /data --appendonly yes
  The data before a mistake:
    remora restore /backups --until 2026-11-25T23:44:59Z --to /data
  The same from a bucket:
    remora restore s3://backups/orders --until 2026-11-25T23:44:59Z --to /data

{}",
        exit::help_table(&[Code::Usage, Code::Refused, Code::Interrupted, Code::Local, Code::Store])
    )
}

// Where backups are: a folder, or a bucket of an S3-compatible store.

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

/// How an S3-compatible store is reached. Every option stands above the AWS environment variable of the same meaning.
#[derive(Clone, Debug, Default, Args)]
#[command(next_help_heading = "S3")]
pub struct StoreArgs {
    /// Address of the store: `https://HOST:PORT`. Default: AWS_ENDPOINT_URL, or Amazon's of the region.
    #[arg(long, value_name = "URL")]
    pub s3_endpoint: Option<String>,

    /// Region of the bucket. Default: AWS_REGION, or `us-east-1`, which most other stores ignore.
    #[arg(long, value_name = "NAME")]
    pub s3_region: Option<String>,

    /// File with the keys, in the format of ~/.aws/credentials (the profile AWS_PROFILE, or `default`), that only its
    /// owner can read. Default: the AWS environment variables, then AWS_SHARED_CREDENTIALS_FILE and
    /// ~/.aws/credentials, then the role of the machine.
    #[arg(long, value_name = "FILE")]
    pub s3_credentials_file: Option<PathBuf>,

    /// Send requests to an --s3-endpoint on another host by http:// too. Everyone on the way can read what is not
    /// encrypted.
    #[arg(long)]
    pub s3_allow_http: bool,
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
