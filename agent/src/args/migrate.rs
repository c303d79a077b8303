//! The arguments of `remora migrate`.

use std::path::PathBuf;

use clap::Args;

use super::{EndsArgs, HostPort, LeftOut};
use crate::{
    exit::{self, Code},
    server::Task,
    units::Size,
};

/// The arguments of `remora migrate`.
#[derive(Clone, Debug, Args)]
#[command(long_about = ABOUT, after_long_help = more())]
pub struct MigrateArgs {
    #[command(flatten)]
    #[allow(missing_docs)]
    pub ends: EndsArgs,

    /// Replace the data that the new server holds. Without this option a server with keys is refused.
    #[arg(long, help_heading = "What to do")]
    pub replace: bool,

    /// What to leave out where the new server cannot hold it, instead of refusing it (`remora replica --help`).
    #[arg(long, value_name = "WHAT", value_delimiter = ',', help_heading = "What to do")]
    pub leave_out: Vec<LeftOut>,

    /// Check both servers, say what differs and what a sync would do, and change nothing.
    #[arg(long, help_heading = "What to do")]
    pub dry_run: bool,

    /// Do not compare the two servers at the end. `remora verify` does it later.
    #[arg(long, help_heading = "What to do")]
    pub no_verify: bool,

    /// A source that runs beside the old primary already. Without it, one is started on this host for the time of the
    /// sync; then all data pass this host.
    #[arg(long, value_name = "HOST:PORT", requires = "token_file", help_heading = "Source")]
    pub source: Option<HostPort>,

    /// File with the secret of that source.
    #[arg(long, value_name = "FILE", requires = "source", help_heading = "Source")]
    pub token_file: Option<PathBuf>,

    /// Memory of the source that is started here: as `--memory` of `remora source`.
    #[arg(long, value_name = "SIZE", default_value = "1GiB", conflicts_with = "source", help_heading = "Resources")]
    pub source_memory: Size,

    /// Memory of the replica agent: as `--memory` of `remora replica`.
    #[arg(long, value_name = "SIZE", default_value = "256MiB", help_heading = "Resources")]
    pub memory: Size,
}

const ABOUT: &str = "\
Makes a server of another family or version an exact replica, and compares the two.

It says what differs between the two servers, starts a source for the old primary and a replica agent for the new server, which \
converts the snapshot where that is needed, hands the new server over to native replication, and compares all data. The new server \
then follows the old one until remora switch changes their roles, at a moment of your choice. The old primary is not changed, and \
clients notice nothing. What the new server cannot hold is refused before it is touched. Called again, it goes on where it was.";

fn more() -> String {
    format!(
        "\
Examples:
  What would happen:
    remora migrate --dry-run --from redis://10.0.0.5:6379 --to redis://10.0.0.6:6379
  The migration, and the switch:
    remora migrate --from redis://10.0.0.5:6379 --to redis://10.0.0.6:6379
    remora switch --from redis://10.0.0.5:6379 --to redis://10.0.0.6:6379
  Large data, with a source beside the old primary (there: remora source …), and this command beside the new server:
    remora migrate --from redis://10.0.0.5:6379 --to redis://127.0.0.1:6379 \\
      --source 10.0.0.5:7379 --token-file token

At the old primary as remora source and remora verify, at the new server as remora replica and remora verify. \
{}
{}
{}
{}",
        Task::Source.help(),
        Task::Replica.help(),
        Task::Verify.help(),
        exit::help_table(&[
            Code::Differs,
            Code::Usage,
            Code::Refused,
            Code::Server,
            Code::Source,
            Code::SyncFailed,
            Code::Interrupted,
            Code::Local,
            Code::Undecided,
            Code::TakenOver
        ])
    )
}
