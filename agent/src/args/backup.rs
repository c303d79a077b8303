//! The arguments of `remora backup`.

use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use clap::builder::{OsStringValueParser, TypedValueParser};

use super::{FetchArgs, Location, MetricsArgs, MetricsFileArgs, SnapshotFromArgs, StoreArgs};
use crate::exit::{self, Code};
use crate::units::{Size, parse_duration};

/// The arguments of `remora backup`.
#[derive(Clone, Debug, Args)]
#[command(long_about = ABOUT, after_long_help = more())]
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

const ABOUT: &str = "\
Backs the data of a source's server up: its snapshot as an RDB file in a folder, and with --journal the commands since.

The command reads the snapshot as a replica does: the source forks the server for it at most once, and not at all if it has a \
snapshot already. A backup gets its name when it is whole, checked and on the disk; a crash at any moment leaves the earlier ones as \
they were. Its name begins with its moment in UTC, and a small JSON file beside it says what it is. With --journal the command goes \
on with the replication stream from the source's memory, which costs the primary nothing: a folder of its own has the snapshot and \
the commands since, as a server with appendonly yes has them. `remora restore` checks a backup, and lays it out for a server.";

fn more() -> String {
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
