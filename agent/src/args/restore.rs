//! The arguments of `remora restore`.

use std::path::PathBuf;
use std::time::Duration;

use clap::builder::{OsStringValueParser, TypedValueParser};
use clap::{Args, ValueEnum};

use super::{Location, StoreArgs};
use crate::exit::{self, Code};
use crate::units::parse_duration;
use remora_base::moment::Moment;

/// The arguments of `remora restore`.
#[derive(Clone, Debug, Args)]
#[command(long_about = ABOUT, after_long_help = more())]
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

const ABOUT: &str = "\
Checks a backup, says what it holds, and lays out what a server starts on.

All of it is read: the structure and the checksum of the RDB file, the list of an append-only file, and each command with its \
transaction. What a crash has left behind the last whole command or transaction is named, and left out. With --to the files are laid \
into a server's folder, up to --until. Backups of other programs can be read too, if they are RDB files or append-only files of Redis \
7 and newer or Valkey.";

fn more() -> String {
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
