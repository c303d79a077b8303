//! The arguments of `remora snapshot`.

use std::path::PathBuf;

use clap::{Args, Subcommand};

use super::{ReadArgs, SecurityArgs, SourceKeyArgs};
use crate::exit::{self, Code};

/// The arguments of `remora snapshot`.
#[derive(Clone, Debug, Args)]
#[command(long_about = ABOUT, after_long_help = more())]
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
    pub read: ReadArgs,

    /// File with the secret that this command shares with the source. Needed unless the source has `--security mtls`
    /// and no token.
    #[arg(long, value_name = "FILE", required_unless_present = "cert", help_heading = "Source")]
    pub token_file: Option<PathBuf>,

    /// Name to appear under in `remora status` and the source's log. Default: `fetch`, or
    /// `dump.rdb` for a mount.
    #[arg(long, value_name = "NAME", value_parser = super::peers::parse_name, help_heading = "Source")]
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

const ABOUT: &str = "\
A source's snapshot without a server: as a file.

The command reads the snapshot as a replica does, beside any replicas, and without a further fork of the primary if the source has a \
snapshot already. Each slot is checked before its bytes are shown. If the source withdraws the snapshot before all of it has arrived \
(the primary has failed over, or was restarted), reads of the rest fail with EIO, and the next snapshot is a new file of the same name. \
A snapshot that has arrived needs the source no more.";

fn more() -> String {
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
