//! The arguments of `remora ready`.

use std::time::Duration;

use clap::Args;

use super::server::ServerArgs;
use crate::{
    exit::{self, Code},
    server::Task,
    units::{Size, parse_duration},
};

/// The arguments of `remora ready`.
#[derive(Clone, Debug, Args)]
#[command(long_about = ABOUT, after_long_help = more())]
pub struct ReadyArgs {
    #[command(flatten)]
    #[allow(missing_docs)]
    pub server: ServerArgs,

    /// How far a replica may be behind its primary, in bytes of the stream. Default: as far as it is.
    #[arg(long, value_name = "SIZE", conflicts_with = "link_only")]
    pub max_lag: Option<Size>,

    /// Do not connect to the replica's primary: the link alone counts. For a user that the primary does not have.
    #[arg(long)]
    pub link_only: bool,

    /// Look again until the server is ready, for this time. Default: look once.
    #[arg(long, value_name = "TIME", default_value = "0s", value_parser = parse_duration)]
    pub timeout: Duration,

    /// Look every TIME (default: one second) until stopped, and print each change. For a container beside the server,
    /// whose probe runs `remora ready`.
    #[arg(long, value_name = "TIME", num_args = 0..=1, default_missing_value = "1s", value_parser = parse_duration, conflicts_with = "timeout")]
    pub watch: Option<Duration>,
}

const ABOUT: &str = "\
Says whether a server is ready for work, by the exit code.

A primary is ready when it has loaded its data set. A replica is ready when it loads and copies nothing, its link is up, and its primary, \
which is asked with the same user and password, has the same history. A server that follows the link of an agent is not ready: its \
hand-off is still to come.";

fn more() -> String {
    format!(
        "\
Examples:
  As the readiness probe of a container:
    remora ready --server redis://127.0.0.1:6379 --max-lag 1MiB
  In a script, before the next server is replaced:
    remora ready --server redis://127.0.0.1:6380 --timeout 10m

{}
{}",
        exit::help_table(&[Code::Usage, Code::Refused, Code::Server, Code::Interrupted, Code::NotReady]),
        Task::Ready.help()
    )
}
