//! The arguments of `remora cluster`.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand};
use rustix::fs::Mode;

use super::fetch::ClusterNodeArgs;
use super::{
    FetchArgs, HostPort, RdmaRead, ReadArgs, SecurityArgs, SentinelArgs, SnapshotFromArgs, SourceKeyArgs,
    TransportChoice,
};
use crate::exit::{self, Code};
use crate::server::{ServerArgs, Task};
use crate::units::parse_duration;

/// The arguments of `remora cluster`.
#[derive(Clone, Debug, Args)]
#[command(long_about = ABOUT, after_long_help = more())]
pub struct ClusterArgs {
    #[command(subcommand)]
    #[allow(missing_docs)]
    pub action: ClusterAction,
}

/// The subcommands of `remora cluster`.
#[derive(Clone, Debug, Subcommand)]
#[allow(clippy::large_enum_variant)] // one per process, moved twice
pub enum ClusterAction {
    /// Show each shard with its source, its data, its replicas and its backlog, and whether replicas can be made of it
    /// now (exit code 3 if not).
    Plan(ClusterPlanArgs),
    /// Show what the source of each shard holds, and which replicas read from it.
    Status(ClusterStatusArgs),
    /// Write the snapshot of each shard into a folder, and a list of them.
    Backup(ClusterBackupArgs),
}

/// The cluster, and the sources beside its servers.
#[derive(Clone, Debug, Args)]
pub struct ClusterSourcesArgs {
    /// Any node of the cluster. The others are asked with the same login.
    #[command(flatten)]
    #[allow(missing_docs)]
    pub server: ServerArgs,

    /// Hosts and ports of the source agents. Which shard each one serves is found out.
    #[arg(
        long,
        value_name = "HOST:PORT,…",
        value_delimiter = ',',
        required_unless_present = "source_port",
        help_heading = "Sources"
    )]
    pub sources: Vec<HostPort>,

    /// Look for a source agent at this port on the host of every node.
    #[arg(long, value_name = "PORT", value_parser = clap::value_parser!(u16).range(1..), help_heading = "Sources")]
    pub source_port: Option<u16>,

    /// File with the secret that this command shares with the sources. Needed unless they have `--security mtls` and no
    /// token.
    #[arg(long, value_name = "FILE", required_unless_present = "cert", help_heading = "Sources")]
    pub token_file: Option<PathBuf>,

    #[command(flatten)]
    #[allow(missing_docs)]
    pub security: SecurityArgs,

    #[command(flatten)]
    #[allow(missing_docs)]
    pub expected: SourceKeyArgs,
}

/// The arguments of `remora cluster plan`.
#[derive(Clone, Debug, Args)]
pub struct ClusterPlanArgs {
    #[command(flatten)]
    #[allow(missing_docs)]
    pub sources: ClusterSourcesArgs,

    /// Print one JSON object instead of the table.
    #[arg(long, help_heading = "Output")]
    pub json: bool,
}

/// The arguments of `remora cluster status`.
#[derive(Clone, Debug, Args)]
pub struct ClusterStatusArgs {
    #[command(flatten)]
    #[allow(missing_docs)]
    pub sources: ClusterSourcesArgs,

    /// Print it repeatedly, every TIME (default: one second), until stopped.
    #[arg(long, value_name = "TIME", num_args = 0..=1, default_missing_value = "1s", value_parser = parse_duration, help_heading = "Output")]
    pub watch: Option<Duration>,
}

/// The arguments of `remora cluster backup`.
#[derive(Clone, Debug, Args)]
pub struct ClusterBackupArgs {
    #[command(flatten)]
    #[allow(missing_docs)]
    pub sources: ClusterSourcesArgs,

    /// The folder for the files. It is made if it is missing. A folder with a whole backup is refused.
    #[arg(long, value_name = "DIR", help_heading = "The files")]
    pub to: PathBuf,

    /// Shards whose files are fetched at once.
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u8).range(1..=64), help_heading = "The files")]
    pub at_once: u8,

    /// How to read the sources' memory; see `remora fetch`.
    #[arg(long, value_name = "HOW", default_value = "auto", help_heading = "Sources")]
    pub transport: TransportChoice,

    #[command(flatten)]
    #[allow(missing_docs)]
    pub rdma: RdmaRead,

    /// How long to retry while a source is unreachable, with growing pauses. `0` tries once.
    #[arg(long, value_name = "TIME", default_value = "5m", value_parser = parse_duration, help_heading = "Sources")]
    pub retry_for: Duration,
}

impl ClusterBackupArgs {
    /// What fetches the snapshot of this source into this file.
    pub(crate) fn fetch(&self, source: HostPort, to: PathBuf) -> FetchArgs {
        let read = ReadArgs {
            source,
            transport: self.transport,
            lanes: 1,
            rdma: self.rdma.clone(),
            retry_for: self.retry_for,
        };
        let ClusterSourcesArgs { token_file, security, expected, .. } = &self.sources;
        let from = SnapshotFromArgs {
            read,
            token_file: token_file.clone(),
            name: Some("backup".to_owned()),
            security: security.clone(),
            expected: expected.clone(),
        };
        FetchArgs {
            sentinel: SentinelArgs::default(),
            from,
            to,
            // One of an earlier attempt that did not end.
            replace: true,
            owner: None,
            mode: Mode::RUSR | Mode::WUSR,
            spool: PathBuf::new(),
            allow_stale: true,
            need: Duration::ZERO,
            write_replicaof: None,
            write_nodes_conf: None,
            node_address: None,
            cluster: ClusterNodeArgs::default(),
            server_config: None,
            json: None,
        }
    }
}

const ABOUT: &str = "\
The shards of a cluster, with the sources beside their servers.

Each command asks one node for the others, and every node for its state: nothing is kept between two commands. A source is beside the \
shard whose replication history its server has; it may be beside the primary or beside a replica.";

fn more() -> String {
    format!(
        "\
Examples:
  Before any work, with a source at port 7379 beside one server of each shard:
    remora cluster plan --server redis://10.0.0.5:6379 --source-port 7379 --token-file token
  A backup, four shards at once:
    remora cluster backup --server redis://10.0.0.5:6379 --source-port 7379 --token-file token \\
      --to backup-$(date +%F) --at-once 4

{}
{}",
        exit::help_table(&[Code::Usage, Code::Refused, Code::Server, Code::Source, Code::Interrupted, Code::Local]),
        Task::Cluster.help()
    )
}
