//! The options that say by which way a server gets the snapshot.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueEnum};

use crate::units::parse_duration;

/// The port to which intercepted connections go: next to the source's.
pub const LISTEN_PORT: u16 = 7380;

/// By which way a server gets the snapshot, and what that way needs.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Delivery")]
pub struct DeliveryArgs {
    /// By which way the server gets the snapshot (docs/reference/delivery.md). `link`: the server follows the agent,
    /// and then the primary. `intercept`: the server's own connection to its primary is intercepted once; it must
    /// follow the primary already. `file`: the snapshot becomes the server's RDB file, and --restart-command restarts
    /// the server. `auto`: by interception for a server in cluster mode or one that Sentinel knows, if it follows its
    /// primary and its connections can be intercepted; otherwise by the link.
    #[arg(long, value_name = "WAY", default_value = "link")]
    pub delivery: Delivery,

    /// With --delivery file: the command that restarts the server, such as 'systemctl restart valkey@6380'. `sh -c`
    /// runs it, it must return, and exit code 0 means that the server was restarted. The agent must run on the server's
    /// host, as root or as the server's user.
    #[arg(long, value_name = "COMMAND", required_if_eq("delivery", "file"))]
    pub restart_command: Option<String>,

    /// How long the restart command may take.
    #[arg(long, value_name = "TIME", default_value = "10m", value_parser = parse_duration)]
    pub restart_limit: Duration,

    /// With --delivery file: write a line `replicaof HOST PORT` into this file before the restart, for the server's
    /// configuration to include. Needed for a server whose configuration does not name its primary.
    #[arg(long, value_name = "FILE", requires = "restart_command")]
    pub write_replicaof: Option<PathBuf>,

    /// With --delivery intercept: the port on loopback to which the rules of `remora intercept` send connections.
    #[arg(long, value_name = "PORT", default_value_t = LISTEN_PORT, value_parser = clap::value_parser!(u16).range(1..))]
    pub listen_port: u16,
}

/// The ways.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Delivery {
    /// By interception where the link would be undone, otherwise by the link.
    Auto,
    /// The server follows the agent first.
    Link,
    /// The server is restarted on its RDB file.
    File,
    /// Its own connection to its primary is intercepted.
    Intercept,
}
