//! The arguments of `remora cluster`.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand};
use remora_replica::LeftOut;

use super::inspect::TRANSPORTS;
use super::server::ServerArgs;
use remora_backup::{FetchOptions, SnapshotFrom};

use super::replica::LEFT_OUT;
use super::{HostPort, RdmaReadArgs, SecurityArgs, SnapshotFromArgs, SourceKeyArgs, one_of};
use crate::exit::{self, Code, Failure};
use crate::reader::ReadOptions;
use crate::reader::data_set::DataSet;
use crate::server::Task;
use crate::server::nodes::{Node, is_id};
use crate::transports::TransportChoice;
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
    /// Make new nodes replicas, or let replicas take their data anew, through `remora attend` beside each.
    Sync(ClusterSyncArgs),
    /// Move the cluster to new nodes of another family or version, shard by shard, while its clients go on.
    #[command(long_about = MIGRATE_ABOUT)]
    Migrate(ClusterMigrateArgs),
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
    #[arg(long, value_name = "HOW", default_value = "auto", value_parser = one_of(TRANSPORTS), help_heading = "Sources")]
    pub transport: TransportChoice,

    #[command(flatten)]
    #[allow(missing_docs)]
    pub rdma: RdmaReadArgs,

    /// How long to retry while a source is unreachable, with growing pauses. `0` tries once.
    #[arg(long, value_name = "TIME", default_value = "5m", value_parser = parse_duration, help_heading = "Sources")]
    pub retry_for: Duration,
}

/// The arguments of `remora cluster sync`.
#[derive(Clone, Debug, Args)]
pub struct ClusterSyncArgs {
    #[command(flatten)]
    #[allow(missing_docs)]
    pub sources: ClusterSourcesArgs,

    /// New nodes: empty servers in cluster mode, with `remora attend` beside each. Each one is made known to the
    /// cluster and becomes a replica of the shard that has the fewest.
    #[arg(
        long,
        value_name = "HOST:PORT,…",
        value_delimiter = ',',
        required_unless_present = "renew",
        help_heading = "The nodes"
    )]
    pub add: Vec<HostPort>,

    /// Replicas that throw their data away and take them anew: `all`, or their addresses or ids as the cluster names
    /// them.
    #[arg(long, value_name = "all|NODE,…", value_delimiter = ',', help_heading = "The nodes")]
    pub renew: Vec<Renew>,

    /// Nodes at work at once. The first one goes alone until its source shows that it reads there.
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u8).range(1..=64), help_heading = "The nodes")]
    pub at_once: u8,

    /// Nodes of one shard at work at once.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=64), help_heading = "The nodes")]
    pub per_shard: u8,

    /// How long a node may show no progress before it counts as failed.
    #[arg(long, value_name = "TIME", default_value = "5m", value_parser = parse_duration, help_heading = "The nodes")]
    pub stalled_after: Duration,

    /// Carry the plan out without asking.
    #[arg(long, help_heading = "The nodes")]
    pub yes: bool,

    /// Print what became of the nodes as one JSON array.
    #[arg(long, help_heading = "Output")]
    pub json: bool,
}

/// The arguments of `remora cluster migrate`.
#[derive(Clone, Debug, Args)]
pub struct ClusterMigrateArgs {
    #[command(flatten)]
    #[allow(missing_docs)]
    pub sources: ClusterSourcesArgs,

    /// The new nodes, one for each shard. They are empty servers in cluster mode, with `remora attend --convert` beside
    /// each.
    #[arg(long, value_name = "HOST:PORT,…", value_delimiter = ',', required = true, help_heading = "The nodes")]
    pub to: Vec<HostPort>,

    /// Give the shards back to the old nodes. It takes the same fail-overs in the other direction.
    #[arg(long, help_heading = "What to do")]
    pub back: bool,

    /// Take the old nodes out of the cluster, and empty them. The new ones must serve all shards. It sends CLUSTER
    /// FORGET and CLUSTER RESET. With --back: the new ones, once the old ones serve all shards.
    #[arg(long, help_heading = "What to do")]
    pub forget: bool,

    /// Show the plan, and change nothing. The exit code is 3 if it cannot be carried out.
    #[arg(long, help_heading = "What to do")]
    pub dry_run: bool,

    /// Carry the plan out without asking.
    #[arg(long, help_heading = "What to do")]
    pub yes: bool,

    /// What the agents beside the new nodes leave out (their --leave-out). The plan does not refuse it then. Such
    /// shards are no exact copies: give --no-verify, too.
    #[arg(long, value_name = "WHAT", value_delimiter = ',', value_parser = one_of(LEFT_OUT), help_heading = "What to do")]
    pub leave_out: Vec<LeftOut>,

    /// Do not compare the data of each shard before its fail-over.
    #[arg(long, help_heading = "What to do")]
    pub no_verify: bool,

    /// New nodes that take their data at once. The first one goes alone until its source shows that it reads there.
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u8).range(1..=64), help_heading = "The nodes")]
    pub at_once: u8,

    /// How long a node may show no progress before it counts as failed.
    #[arg(long, value_name = "TIME", default_value = "5m", value_parser = parse_duration, help_heading = "The nodes")]
    pub stalled_after: Duration,

    /// How long to wait for a cluster that is not well. The plan is refused then. A slot moves, a fail-over is under
    /// way, or nodes have not heard of each other yet, for which they take up to half a cluster-node-timeout.
    #[arg(long, value_name = "TIME", default_value = "20s", value_parser = parse_duration, help_heading = "The nodes")]
    pub well_within: Duration,

    /// Print what was done as one JSON object.
    #[arg(long, help_heading = "Output")]
    pub json: bool,
}

/// Replicas that are to take their data anew.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Renew {
    /// All of the cluster.
    All,
    /// The one at this address.
    At(HostPort),
    /// The one of this id: forty hexadecimal digits.
    Id(String),
}

impl Renew {
    /// Whether this node is meant.
    pub(crate) fn names(&self, node: &Node) -> bool {
        match self {
            Renew::All => true,
            Renew::At(place) => place.host == node.host && place.port == node.port,
            Renew::Id(id) => *id == node.id,
        }
    }
}

impl std::str::FromStr for Renew {
    type Err = String;

    fn from_str(text: &str) -> Result<Renew, String> {
        match text {
            "all" => Ok(Renew::All),
            id if is_id(id) => Ok(Renew::Id(id.to_owned())),
            place => place.parse().map(Renew::At).map_err(|why| format!("{why}, an id of 40 digits, or all")),
        }
    }
}

impl std::fmt::Display for Renew {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Renew::All => f.write_str("all"),
            Renew::At(place) => place.fmt(f),
            Renew::Id(id) => f.write_str(id),
        }
    }
}

impl ClusterBackupArgs {
    /// What fetches the snapshot of this source into this file.
    ///
    /// # Errors
    /// The options contradict each other, or a file cannot be used.
    pub(crate) fn fetch(&self, source: HostPort, to: PathBuf, data_set: DataSet) -> Result<FetchOptions, Failure> {
        let read = ReadOptions {
            source: source.into(),
            transport: self.transport,
            lanes: 1,
            rdma: self.rdma.options(),
            retry_for: self.retry_for,
        };
        let ClusterSourcesArgs { token_file, security, expected, .. } = &self.sources;
        let from = SnapshotFromArgs {
            read: read.into(),
            token_file: token_file.clone(),
            name: None,
            security: security.clone(),
            expected: expected.clone(),
        };
        let from = SnapshotFrom { data_set, ..from.open("backup", None)? };
        Ok(FetchOptions::of_a_backup(from, to))
    }
}

const ABOUT: &str = "\
The shards of a cluster, with the sources beside their servers.

Each command asks one node for the others, and every node for its state: nothing is kept between two commands. A source is beside the \
shard whose replication history its server has; it may be beside the primary or beside a replica.";

const MIGRATE_ABOUT: &str = "\
Moves a cluster to new nodes of another family or version, shard by shard, while its clients go on.

Each new node becomes a replica of one shard, through `remora attend --convert` beside it; the data are compared; then it takes the \
shard by CLUSTER FAILOVER, one shard at a time, and the old primary follows it. The work stops on the first doubt, and says how far it \
is. Nothing is kept between two commands: the same one goes on where the cluster is. The old nodes stay as replicas, which is the way \
back (--back), until --forget takes them out.";

fn more() -> String {
    format!(
        "\
Examples:
  Before any work, with a source at port 7379 beside one server of each shard:
    remora cluster plan --server redis://10.0.0.5:6379 --source-port 7379 --token-file token
  A backup, four shards at once:
    remora cluster backup --server redis://10.0.0.5:6379 --source-port 7379 --token-file token \\
      --to backup-$(date +%F) --at-once 4
  Two more replicas, with remora attend beside each:
    remora cluster sync --server redis://10.0.0.5:6379 --source-port 7379 --token-file token \\
      --add 10.0.0.9:6379,10.0.0.10:6379
  From Redis to Valkey, with remora attend --convert beside each new node; and back, if need be:
    remora cluster migrate --server redis://10.0.0.5:6379 --source-port 7379 --token-file token \\
      --to 10.0.1.1:6379,10.0.1.2:6379,10.0.1.3:6379
    remora cluster migrate --server redis://10.0.0.5:6379 --source-port 7379 --token-file token \\
      --to 10.0.1.1:6379,10.0.1.2:6379,10.0.1.3:6379 --back

{}
{}",
        exit::help_table(&[
            Code::Usage,
            Code::Refused,
            Code::Server,
            Code::Source,
            Code::SyncFailed,
            Code::Interrupted,
            Code::Local,
            Code::Differs,
            Code::Undecided,
            Code::NotSwitched
        ]),
        Task::Cluster.help()
    )
}
