//! The arguments of `remora backup` and `remora restore`.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use clap::builder::{OsStringValueParser, TypedValueParser};
use remora_backup::{BackupOptions, JournalOptions, LEAST_FILE, Location, Pass, RestoreOptions};

use super::source::StoreArgs;
use super::{MetricsArgs, MetricsFileArgs, SnapshotFromArgs, Words, one_of};
use crate::exit::{self, Code, Failure};
use crate::units::{Size, parse_duration};
use remora_base::units::Moment;

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

fn parse_file_size(text: &str) -> Result<Size, String> {
    let size: Size = text.parse().map_err(|error: crate::units::UnitError| error.to_string())?;
    if size < LEAST_FILE {
        return Err(format!("a file must have at least {LEAST_FILE}"));
    }
    Ok(size)
}

impl BackupArgs {
    /// The options without their clap attributes. It reads the named files.
    ///
    /// # Errors
    /// The options contradict each other, or a file cannot be used.
    pub(crate) fn options(&self) -> Result<BackupOptions, Failure> {
        let journal = JournalOptions {
            sync_every: self.sync_every,
            segment_every: self.segment_every,
            file_size: self.file_size,
            base_every: self.base_every,
        };
        Ok(BackupOptions {
            from: self.from.open("backup", None)?,
            to: self.to.clone(),
            keep: self.keep,
            encrypt_to: self.encrypt_to.clone(),
            spool: self.spool.clone(),
            store: self.store.options(),
            journal: self.journal.then_some(journal),
        })
    }
}

impl RestoreArgs {
    /// The options without their clap attributes.
    pub(crate) fn options(&self) -> RestoreOptions {
        RestoreOptions {
            from: self.from.clone(),
            to: self.to.clone(),
            until: self.until,
            until_pass: self.until_pass,
            replaces: self.replace,
            identity: self.identity.clone(),
            spool: self.spool.clone(),
            retry_for: self.retry_for,
            store: self.store.options(),
        }
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
    #[arg(long, value_name = "WHICH", value_parser = one_of(PASSES), requires = "until")]
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

/// The values of `--until-pass`.
const PASSES: Words<Pass, 2> =
    [("first", "That before the clock went back", Pass::First), ("last", "That after the clock went back", Pass::Last)];

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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use clap::Parser;
    use remora_backup::SPOOL;
    use remora_base::files::Placing;

    use super::*;
    use crate::args::{Cli, Command};

    /// A token file, and a command of these words with it.
    fn command(words: &[&str]) -> (tempfile::TempDir, Command) {
        let folder = tempfile::tempdir().unwrap();
        let token = folder.path().join("token");
        remora_base::files::write(&token, b"sixteen bytes or more", &remora_base::files::PRIVATE).unwrap();
        let line = ["remora"].iter().chain(words).chain(&["--source", "127.0.0.1:1", "--token-file"]).copied();
        let line: Vec<&str> = line.chain([token.to_str().unwrap()]).collect();
        let command = Cli::try_parse_from(line).unwrap().command;
        (folder, command)
    }

    #[test]
    fn without_options_files_and_backups_are_made_by_the_defaults_of_their_crate() {
        let (_folder, fetch) = command(&["fetch", "--to", "dump.rdb"]);
        let Command::Fetch(args) = fetch else { panic!("another command") };
        let typed = args.options().unwrap();
        let own = remora_backup::FetchOptions::new(typed.from.clone(), "dump.rdb".into());
        let placing = |Placing { owner, mode, replaces }: Placing| (owner, mode, replaces);
        assert_eq!(placing(typed.placing), placing(own.placing));
        assert_eq!((&typed.to, typed.allow_stale, typed.need), (&own.to, own.allow_stale, own.need));
        assert_eq!((typed.replicaof.is_some(), &*args.spool), (own.replicaof.is_some(), SPOOL.as_ref()));

        let (_folder, backup) = command(&["backup", "--to", "/backups", "--journal"]);
        let Command::Backup(args) = backup else { panic!("another command") };
        let typed = args.options().unwrap();
        let own = BackupOptions::new(typed.from.clone(), Location::Path("/backups".into()));
        assert_eq!((typed.to, typed.keep, typed.encrypt_to), (own.to, own.keep, own.encrypt_to));
        assert_eq!((typed.spool, typed.store), (own.spool, own.store));
        assert_eq!(typed.journal, Some(JournalOptions::default()));

        let line = ["remora", "restore", "/backups"];
        let Command::Restore(args) = Cli::try_parse_from(line).unwrap().command else { panic!("another command") };
        let (typed, own) = (args.options(), RestoreOptions::new(Location::Path("/backups".into())));
        assert_eq!((typed.from, typed.to, typed.until), (own.from, own.to, own.until));
        assert_eq!((typed.until_pass, typed.replaces, typed.identity), (own.until_pass, own.replaces, own.identity));
        assert_eq!((typed.spool, typed.retry_for, typed.store), (own.spool, own.retry_for, own.store));
    }
}
