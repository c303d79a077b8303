//! The arguments of what needs no server: `remora fetch`, `snapshot`, `backup` and `restore`.

use std::path::PathBuf;
use std::time::Duration;

use clap::builder::{OsStringValueParser, TypedValueParser};
use clap::{Args, Subcommand};
use remora_backup::mount::FILE_NAME;
use remora_backup::{
    BackupOptions, FetchOptions, JournalOptions, LEAST_FILE, Location, MountOptions, Pass, PassOn, ReplicaOf,
    RestoreOptions, SnapshotFrom,
};
use remora_base::files::Placing;
use remora_base::units::Moment;
use rustix::fs::{Gid, Mode, Uid};

use super::connections::{LenderNameArgs, TlsArgs, UrlParser, open_tokens};
use super::replica::parse_memory;
use super::source::StoreArgs;
use super::{
    MetricsArgs, MetricsFileArgs, Plain, ReplicaNameArgs, SecurityArgs, SentinelArgs, SourceKeyArgs, Words, one_of,
};
use crate::exit::{self, Code, Failure};
use crate::reader::data_set::DataSet;
use crate::reader::{ReadOptions, RelayOptions};
use crate::server::nodes::NodeAddress;
use crate::server::{Credentials, Server, ServerUrl, SetupError, Task};
use crate::units::{Size, parse_duration};

/// The arguments of `remora fetch`.
#[derive(Clone, Debug, Args)]
#[command(long_about = FETCH_ABOUT, after_long_help = fetch_help())]
pub struct FetchArgs {
    #[command(flatten)]
    #[allow(missing_docs)]
    pub from: SnapshotFromArgs,

    #[command(flatten)]
    #[allow(missing_docs)]
    pub pass_on: PassOnArgs,

    /// Where the snapshot goes; `-`: to standard output, as it arrives. A file gets its name when it is whole, checked
    /// and on the disk. Until then its slots are in a folder beside it, `.NAME.remora`, and a fetch that was
    /// interrupted goes on there.
    #[arg(long, value_name = "FILE", help_heading = "The file")]
    pub to: PathBuf,

    /// Replace a file that is there. Without this option the command refuses.
    #[arg(long, help_heading = "The file")]
    pub replace: bool,

    /// The numbers of the user and the group that get the file. Default: those of this command.
    #[arg(long, value_name = "UID:GID", value_parser = parse_owner, help_heading = "The file")]
    pub owner: Option<(Uid, Gid)>,

    /// The permissions of the file, in octal digits.
    #[arg(long, value_name = "MODE", default_value = "0600", value_parser = parse_mode, help_heading = "The file")]
    pub mode: Mode,

    /// With `--to -`: folder in whose file system the snapshot is kept as it arrives, in a file without a name.
    #[arg(long, value_name = "DIR", default_value = "/var/tmp", help_heading = "The file")]
    pub spool: PathBuf,

    /// Put the file in place although the primary would not continue a server that starts on it: a backup, or a clone.
    #[arg(long, help_heading = "A server that starts on it")]
    pub allow_stale: bool,

    /// How long the primary must still be able to continue such a server, at the rate of its writes: the time in which
    /// the server is started and loads the file.
    #[arg(long, value_name = "TIME", default_value = "0s", value_parser = parse_duration, help_heading = "A server that starts on it")]
    pub need: Duration,

    /// Write a line `replicaof HOST PORT` into this file, for the server's configuration to include. A server goes on
    /// by a partial resynchronisation only if it is a replica while it loads. With --sentinel: the primary that
    /// Sentinel names at that moment, as it writes it.
    #[arg(long, value_name = "FILE", help_heading = "A server that starts on it")]
    pub write_replicaof: Option<PathBuf>,

    #[command(flatten)]
    #[allow(missing_docs)]
    pub sentinel: SentinelArgs,

    /// Write the configuration of a node that follows the source's primary into this file (`nodes.conf`), for a server
    /// in cluster mode. A file that says so already stays as it is. Other nodes know the new one after one
    /// `CLUSTER MEET`.
    #[arg(long, value_name = "FILE", requires_all = ["cluster", "node_address"], help_heading = "A node of a cluster")]
    pub write_nodes_conf: Option<PathBuf>,

    /// Where the new node will listen. Without the port of its bus: 10000 above its own.
    #[arg(long, value_name = "IP:PORT[@BUSPORT]", requires = "write_nodes_conf", help_heading = "A node of a cluster")]
    pub node_address: Option<NodeAddress>,

    #[command(flatten)]
    #[allow(missing_docs)]
    pub cluster: ClusterNodeArgs,

    /// The server's configuration file. The command refuses if the server would not load the file (`appendonly yes`).
    #[arg(long, value_name = "FILE", help_heading = "A server that starts on it")]
    pub server_config: Option<PathBuf>,

    #[command(flatten)]
    #[allow(missing_docs)]
    pub metrics_file: MetricsFileArgs,

    /// Write the summary as JSON to this file too.
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    pub json: Option<PathBuf>,
}

/// How slots are passed on between this command and replicas. It lends them while it receives, and no longer: a server
/// waits for its end.
#[derive(Clone, Debug, Args)]
pub struct PassOnArgs {
    #[command(flatten)]
    #[allow(missing_docs)]
    pub relay: Plain<RelayOptions>,

    #[command(flatten)]
    #[allow(missing_docs)]
    pub lender: LenderNameArgs,

    #[command(flatten)]
    #[allow(missing_docs)]
    pub readers: ReplicaNameArgs,

    /// Memory for slots that other replicas read from this command; at least 16MiB. Three quarters of it hold slots:
    /// all of a snapshot if they fit, else the newest ones.
    #[arg(long, value_name = "SIZE", default_value = "256MiB", value_parser = parse_memory, help_heading = "Resources")]
    pub memory: Size,
}

/// A node of the cluster that a fetched node is for, and the login there.
#[derive(Clone, Debug, Default, Args)]
#[command(next_help_heading = "A node of a cluster")]
pub struct ClusterNodeArgs {
    /// Any node of the cluster: redis://HOST:PORT or rediss://HOST:PORT (TLS). It is asked for the others.
    #[arg(long, value_name = "URL", value_parser = UrlParser, requires = "write_nodes_conf")]
    pub cluster: Option<ServerUrl>,

    /// ACL user to log in as at the nodes. Without it, a password belongs to the user `default`.
    #[arg(long, value_name = "NAME", requires = "cluster")]
    pub user: Option<String>,

    /// File whose first line is the password. Without it, the environment variable REMORA_PASSWORD counts.
    #[arg(long, value_name = "FILE", requires = "cluster")]
    pub password_file: Option<PathBuf>,

    #[command(flatten)]
    #[allow(missing_docs)]
    pub tls: TlsArgs,
}

impl ClusterNodeArgs {
    /// Reads the named files and prepares connections to the node. It sends nothing.
    pub fn open(&self, node: &ServerUrl) -> Result<Server, SetupError> {
        let credentials = Credentials::gather(self.user.as_deref(), self.password_file.as_deref())?;
        Server::new(node.clone(), credentials, &self.tls.options(), Task::Cluster)
    }
}

fn parse_owner(text: &str) -> Result<(Uid, Gid), String> {
    let numbers = text.split_once(':').and_then(|(user, group)| Some((user.parse().ok()?, group.parse().ok()?)));
    let (user, group): (u32, u32) = numbers.ok_or("an owner has two numbers, such as 999:999")?;
    // The highest number means "no change".
    if user == u32::MAX || group == u32::MAX {
        return Err("no user or group has this number".into());
    }
    Ok((Uid::from_raw(user), Gid::from_raw(group)))
}

fn parse_mode(text: &str) -> Result<Mode, String> {
    let bits = u32::from_str_radix(text, 8).ok().filter(|bits| *bits <= 0o777);
    bits.map(Mode::from_raw_mode).ok_or_else(|| "permissions have octal digits from 0 to 777, such as 0640".to_owned())
}

impl FetchArgs {
    /// The options without their clap attributes. It reads the named files.
    ///
    /// # Errors
    /// The options contradict each other, or a file cannot be used.
    pub(crate) fn options(&self) -> Result<FetchOptions, Failure> {
        let replicaof = match &self.write_replicaof {
            Some(file) => Some(ReplicaOf { file: file.clone(), sentinels: self.sentinel.open()? }),
            None => None,
        };
        Ok(FetchOptions {
            from: self.from.open("fetch", Some(&self.pass_on))?,
            pass_on: Some(PassOn { relay: self.pass_on.relay.plain(), memory: self.pass_on.memory }),
            to: self.to.clone(),
            placing: Placing { owner: self.owner, mode: self.mode, replaces: self.replace },
            allow_stale: self.allow_stale,
            need: self.need,
            replicaof,
        })
    }
}

impl SnapshotFromArgs {
    /// What the options say, for a command of this name. It reads the named files.
    ///
    /// # Errors
    /// The options contradict each other, or a file cannot be used.
    pub(crate) fn open(&self, name: &str, pass_on: Option<&PassOnArgs>) -> Result<SnapshotFrom, Failure> {
        let files: Vec<PathBuf> = self.token_file.iter().cloned().collect();
        let tokens = match pass_on {
            Some(PassOnArgs { readers, lender, relay, .. }) => {
                open_tokens(&files, &self.security, &self.expected, (readers, lender), relay.peer_listen)?
            }
            None => open_tokens(
                &files,
                &self.security,
                &self.expected,
                (&ReplicaNameArgs::default(), &LenderNameArgs::default()),
                None,
            )?,
        };
        Ok(SnapshotFrom {
            read: self.read.plain(),
            tokens,
            source_key: self.expected.source_key,
            data_set: DataSet::of_a_source(self.expected.is_given()),
            name: self.name.clone().unwrap_or_else(|| name.to_owned()),
        })
    }
}

impl SnapshotMountArgs {
    /// The options without their clap attributes. It reads the named files.
    ///
    /// # Errors
    /// The options contradict each other, or a file cannot be used.
    pub(crate) fn options(&self) -> Result<MountOptions, Failure> {
        Ok(MountOptions {
            from: self.from.open(FILE_NAME, None)?,
            directory: self.directory.clone(),
            spool: self.spool.clone(),
            ring: !self.no_ring,
        })
    }
}

const FETCH_ABOUT: &str = "\
A source's snapshot as an RDB file in its place: for a server that is started on it, or as a backup.

The command reads the snapshot as a replica does, from the source or from replicas that hold it already. Each slot is checked as it arrives, and the file's checksum at the end. A server \
that is started on the file as a replica goes on at its offset by a partial resynchronisation, if the primary's backlog still \
reaches back to it. The command asks the primary last, and says for how long that is so. A file that is too old is not put in place \
(exit code 16), unless --allow-stale says that it is a backup or a clone.";

fn fetch_help() -> String {
    format!(
        "\
Examples:
  Before a server starts (an init container), with a minute for it to load:
    remora fetch --source 10.0.0.5:7379 --token-file token --to /data/dump.rdb \\
      --owner 999:999 --need 60s --write-replicaof /data/replicaof.conf
    redis-server /etc/redis.conf --dir /data --include /data/replicaof.conf
  The same for a node of a cluster:
    remora fetch --source 10.0.0.5:7379 --token-file token --to /data/dump.rdb \\
      --write-nodes-conf /data/nodes.conf --cluster redis://10.0.0.5:6379 --node-address 10.0.0.9:6379
  A backup:
    remora fetch --source 10.0.0.5:7379 --token-file token --allow-stale \\
      --to backup-$(date +%F).rdb
  To another program:
    remora fetch --source 10.0.0.5:7379 --token-file token --to - | zstd > backup.zst

{}
With --cluster: {}",
        exit::help_table(&[
            Code::Usage,
            Code::Refused,
            Code::Server,
            Code::Source,
            Code::Interrupted,
            Code::Local,
            Code::Stale
        ]),
        Task::Cluster.help()
    )
}

/// The arguments of `remora snapshot`.
#[derive(Clone, Debug, Args)]
#[command(long_about = SNAPSHOT_ABOUT, after_long_help = snapshot_help())]
pub struct SnapshotArgs {
    #[command(subcommand)]
    #[allow(missing_docs)]
    pub action: SnapshotAction,
}

/// The subcommands of `remora snapshot`.
#[derive(Clone, Debug, Subcommand)]
pub enum SnapshotAction {
    /// Show a source's snapshot as a file `dump.rdb` in this directory, until stopped or unmounted. The file can be
    /// read while it still arrives: a read of what is not there yet waits.
    Mount(SnapshotMountArgs),
}

/// From which source a command takes a snapshot that goes to no server, and how.
#[derive(Clone, Debug, Args)]
pub struct SnapshotFromArgs {
    #[command(flatten)]
    #[allow(missing_docs)]
    pub read: Plain<ReadOptions>,

    /// File with the secret that this command shares with the source. Needed unless the source has `--security mtls`
    /// and no token.
    #[arg(long, value_name = "FILE", required_unless_present = "cert", help_heading = "Source")]
    pub token_file: Option<PathBuf>,

    /// Name to appear under in `remora status` and the source's log. Default: `fetch`, or
    /// `dump.rdb` for a mount.
    #[arg(long, value_name = "NAME", value_parser = super::connections::parse_name, help_heading = "Source")]
    pub name: Option<String>,

    #[command(flatten)]
    #[allow(missing_docs)]
    pub security: SecurityArgs,

    #[command(flatten)]
    #[allow(missing_docs)]
    pub expected: SourceKeyArgs,
}

/// The arguments of `remora snapshot mount`.
#[derive(Clone, Debug, Args)]
pub struct SnapshotMountArgs {
    #[command(flatten)]
    #[allow(missing_docs)]
    pub from: SnapshotFromArgs,

    /// The directory at which the file appears. What is in it is hidden meanwhile.
    #[arg(value_name = "DIRECTORY")]
    pub directory: PathBuf,

    /// Folder in whose file system the snapshot is kept as it arrives, in a file without a name: nothing is left there
    /// when the command ends. It needs room for the whole snapshot.
    #[arg(long, value_name = "DIR", default_value = "/var/tmp", help_heading = "Resources")]
    pub spool: PathBuf,

    /// The system asks by /dev/fuse. Without this option it asks by io_uring, which is faster, if this host permits it.
    #[arg(long, help_heading = "Resources")]
    pub no_ring: bool,
}

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

const SNAPSHOT_ABOUT: &str = "\
A source's snapshot without a server: as a file.

The command reads the snapshot as a replica does, beside any replicas, and without a further fork of the primary if the source has a \
snapshot already. Each slot is checked before its bytes are shown. If the source withdraws the snapshot before all of it has arrived \
(the primary has failed over, or was restarted), reads of the rest fail with EIO, and the next snapshot is a new file of the same name. \
A snapshot that has arrived needs the source no more.";

fn snapshot_help() -> String {
    format!(
        "\
Examples:
  A backup, and a check of the file:
    remora snapshot mount --source 10.0.0.5:7379 --token-file token /mnt/snapshot &
    cp /mnt/snapshot/dump.rdb backup.rdb
    redis-check-rdb /mnt/snapshot/dump.rdb
  A clone of the data set:
    cp /mnt/snapshot/dump.rdb clone/ && redis-server --dir clone --port 6400
    umount /mnt/snapshot

{}",
        exit::help_table(&[Code::Usage, Code::Refused, Code::Source, Code::Local])
    )
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

    #[test]
    fn owners_are_two_numbers_and_modes_are_octal() {
        assert_eq!(parse_owner("999:1000"), Ok((Uid::from_raw(999), Gid::from_raw(1000))));
        for wrong in ["redis:redis", "999", "999:", "4294967295:1", "-1:1"] {
            assert!(parse_owner(wrong).is_err(), "{wrong}");
        }
        assert_eq!(parse_mode("0640").unwrap(), Mode::from_raw_mode(0o640));
        for wrong in ["u+r", "1777", "8", ""] {
            assert!(parse_mode(wrong).is_err(), "{wrong}");
        }
    }

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
