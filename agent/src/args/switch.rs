//! The arguments of `remora switch`.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;

use super::{EndsArgs, HostPort};
use crate::{
    exit::{self, Code},
    server::Task,
    units::parse_duration,
};

/// The arguments of `remora switch`.
#[derive(Clone, Debug, Args)]
#[command(long_about = ABOUT, after_long_help = more())]
pub struct SwitchArgs {
    #[command(flatten)]
    #[allow(missing_docs)]
    pub ends: EndsArgs,

    /// The new primary as the old one lists it among its replicas (`INFO replication`). Needed if several of them have
    /// its port.
    #[arg(long, value_name = "HOST:PORT", help_heading = "Servers")]
    pub to_address: Option<HostPort>,

    /// How long writes may wait at the old primary. If the new one has not come up to it by then, nothing is changed
    /// and writes go on.
    #[arg(long, value_name = "TIME", default_value = "2s", value_parser = parse_duration, help_heading = "What to do")]
    pub max_pause: Duration,

    /// A program that leads clients to the new primary: DNS, a proxy, a Service. It is run after the promotion, with
    /// two arguments: the old primary's address and the new one's.
    #[arg(long, value_name = "PROGRAM", help_heading = "What to do")]
    pub hook: Option<PathBuf>,

    /// How long the hook may take. It is killed then.
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = parse_duration, requires = "hook", help_heading = "What to do")]
    pub hook_timeout: Duration,

    /// Close the connections of clients at the old primary once the hook has ended, so that they connect anew. Without
    /// it they stay: they may read there, and writes are refused with -READONLY.
    #[arg(long, help_heading = "What to do")]
    pub close_clients: bool,

    /// Make both servers write their configuration files (CONFIG REWRITE), so that a restart does not undo the switch.
    #[arg(long, help_heading = "What to do")]
    pub rewrite_config: bool,

    /// Check both servers, say what a switch would do, and change nothing.
    #[arg(long, help_heading = "What to do")]
    pub dry_run: bool,

    /// Print the report as one JSON object.
    #[arg(long, help_heading = "Output")]
    pub json: bool,
}

const ABOUT: &str = "\
Promotes a replica, and makes its primary follow it.

The old primary does it by its own command FAILOVER: it pauses writes, waits until the replica has all of them, becomes a replica \
itself, and tells the other one to be the primary. At no time do two servers accept writes, and no acknowledged write is lost. The \
old primary continues at the exact offset, without a full copy. So the same command with --from and --to exchanged is the way back. \
Until the promotion, a failure changes nothing: writes go on at the old primary. The families and versions of the two may differ \
(remora migrate).";

fn more() -> String {
    format!(
        "\
Examples:
  Whether it would work:
    remora switch --dry-run --from redis://10.0.0.5:6379 --to redis://10.0.0.6:6379
  A switch that tells a proxy:
    remora switch --from redis://10.0.0.5:6379 --to redis://10.0.0.6:6379 \\
      --hook /usr/local/bin/move-clients --close-clients
  And back:
    remora switch --from redis://10.0.0.6:6379 --to redis://10.0.0.5:6379

{}
{}",
        Task::Switch.help(),
        exit::help_table(&[
            Code::Usage,
            Code::Refused,
            Code::Server,
            Code::Interrupted,
            Code::NotSwitched,
            Code::HookFailed
        ])
    )
}
