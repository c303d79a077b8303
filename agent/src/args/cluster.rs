//! The arguments of the commands that move servers: `remora cluster`, `migrate`, `switch` and `verify`.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand, ValueEnum};

use super::connections::{ServerArgs, TlsArgs, UrlParser};
use super::inspect::TRANSPORTS;
use super::replica::LEFT_OUT;
use super::{HostPort, RdmaReadArgs, SecurityArgs, SentinelArgs, SnapshotFromArgs, SourceKeyArgs, one_of};
use crate::exit::{self, Code, Failure};
use crate::reader::ReadOptions;
use crate::reader::data_set::DataSet;
use crate::server::nodes::{Node, is_id};
use crate::server::{Server, ServerUrl, SetupError, Task};
use crate::transports::TransportChoice;
use crate::units::{Size, parse_duration};
use remora_backup::{FetchOptions, SnapshotFrom};
use remora_replica::LeftOut;

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

// The arguments of the commands on two servers: `remora migrate`, `switch` and `verify`.

/// The arguments of `remora migrate`.
#[derive(Clone, Debug, Args)]
#[command(long_about = ABOUT_MIGRATE, after_long_help = migrate_help())]
pub struct MigrateArgs {
    #[command(flatten)]
    #[allow(missing_docs)]
    pub ends: EndsArgs,

    /// Replace the data that the new server holds. Without this option a server with keys is refused.
    #[arg(long, help_heading = "What to do")]
    pub replace: bool,

    /// What to leave out where the new server cannot hold it, instead of refusing it (`remora replica --help`).
    #[arg(long, value_name = "WHAT", value_delimiter = ',', value_parser = one_of(LEFT_OUT), help_heading = "What to do")]
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

const ABOUT_MIGRATE: &str = "\
Makes a server of another family or version an exact replica, and compares the two.

It says what differs between the two servers, starts a source for the old primary and a replica agent for the new server, which \
converts the snapshot where that is needed, hands the new server over to native replication, and compares all data. The new server \
then follows the old one until remora switch changes their roles, at a moment of your choice. The old primary is not changed, and \
clients notice nothing. What the new server cannot hold is refused before it is touched. Called again, it goes on where it was. Both \
agents also take the options of their sections in the file that --config names, and the replica agent logs as this command is told to.";

fn migrate_help() -> String {
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

/// The arguments of `remora switch`.
#[derive(Clone, Debug, Args)]
#[command(long_about = SWITCH_ABOUT, after_long_help = switch_help())]
pub struct SwitchArgs {
    #[command(flatten)]
    #[allow(missing_docs)]
    pub ends: EndsArgs,

    /// The new primary as the old one lists it among its replicas (`INFO replication`). Needed if several of them have
    /// its port.
    #[arg(long, value_name = "HOST:PORT", help_heading = "Servers")]
    pub to_address: Option<HostPort>,

    #[command(flatten)]
    #[allow(missing_docs)]
    pub sentinel: SentinelArgs,

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

const SWITCH_ABOUT: &str = "\
Promotes a replica, and makes its primary follow it.

Writes wait at the old primary until the replica has all of them. Then the old primary becomes a replica, and says in the same step \
which writes it holds; the other one is promoted if it holds exactly these. So there are never two primaries, and no acknowledged \
write is lost. The old primary continues at the exact offset, without a full copy: the same command with --from and --to exchanged is \
the way back. Until the promotion, a failure is undone, and writes go on at the old primary. A command that was killed is finished or \
undone by the same command. The families and versions of the two may differ (remora migrate).";

fn switch_help() -> String {
    format!(
        "\
Examples:
  Whether it would work:
    remora switch --dry-run --from redis://10.0.0.5:6379 --to redis://10.0.0.6:6379
  A switch that tells a proxy:
    remora switch --from redis://10.0.0.5:6379 --to redis://10.0.0.6:6379 \\
      --hook /usr/local/bin/move-clients --close-clients
  A switch that the Sentinels of the primary learn of:
    remora switch --from redis://10.0.0.5:6379 --to redis://10.0.0.6:6379 \\
      --sentinel 10.0.0.1:26379,10.0.0.2:26379,10.0.0.3:26379 --sentinel-name mymaster
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

// The options that name the two ends of a move: the server that clients leave, and the one that they come to.

/// `--from`, `--to`, and the login of each.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Servers")]
pub struct EndsArgs {
    /// The old primary: redis://HOST:PORT, rediss://HOST:PORT (TLS) or unix:///PATH.
    #[arg(long, value_name = "URL", value_parser = UrlParser)]
    pub from: ServerUrl,

    /// ACL user on the old primary.
    #[arg(long, value_name = "NAME")]
    pub from_user: Option<String>,

    /// File whose first line is the password on the old primary. Without it, the environment variable REMORA_PASSWORD
    /// is used.
    #[arg(long, value_name = "FILE")]
    pub from_password_file: Option<PathBuf>,

    /// The server that is to take its place.
    #[arg(long, value_name = "URL", value_parser = UrlParser)]
    pub to: ServerUrl,

    /// ACL user on that server.
    #[arg(long, value_name = "NAME")]
    pub to_user: Option<String>,

    /// File whose first line is the password on that server. Without it, the environment variable REMORA_PASSWORD is
    /// used.
    #[arg(long, value_name = "FILE")]
    pub to_password_file: Option<PathBuf>,

    /// The TLS options are for each of the two that has a rediss:// address.
    #[command(flatten)]
    pub tls: TlsArgs,
}

impl EndsArgs {
    /// The old primary.
    pub fn open_from(&self, task: Task) -> Result<Server, SetupError> {
        self.tls.open(&self.from, self.from_user.as_deref(), self.from_password_file.as_deref(), task)
    }

    /// The comparison of the two, by `remora verify`. `retry_for`: how long it waits for a server that does not answer.
    pub(crate) fn comparison(&self, retry_for: Duration) -> remora_verify::Options {
        let login = |url: &ServerUrl, user: &Option<String>, file: &Option<PathBuf>| {
            self.tls.login(url, user.as_deref(), file.as_deref())
        };
        remora_verify::Options {
            primary: login(&self.from, &self.from_user, &self.from_password_file),
            replica: login(&self.to, &self.to_user, &self.to_password_file),
            // A digest would keep the old primary from its clients.
            may_digest: false,
            recheck: ROUNDS,
            limit: SHOWN,
            retry_for,
        }
    }

    /// The server that is to take its place.
    pub fn open_to(&self, task: Task) -> Result<Server, SetupError> {
        self.tls.open(&self.to, self.to_user.as_deref(), self.to_password_file.as_deref(), task)
    }
}

/// How often a comparison at the end looks at a key that differs again: as the default of `remora verify`.
const ROUNDS: u32 = 5;

/// Differences that such a comparison lists.
const SHOWN: u32 = 20;

/// The arguments of `remora verify`.
#[derive(Clone, Debug, Args)]
#[command(long_about = VERIFY_ABOUT, after_long_help = verify_help())]
pub struct VerifyArgs {
    /// The server to compare with: redis://HOST:PORT, rediss://HOST:PORT (TLS) or unix:///PATH.
    #[arg(long, value_name = "URL", value_parser = UrlParser, help_heading = "Servers")]
    pub primary: ServerUrl,

    /// ACL user on the primary.
    #[arg(long, value_name = "NAME", help_heading = "Servers")]
    pub primary_user: Option<String>,

    /// File whose first line is the password on the primary. Without it, the environment variable REMORA_PASSWORD is
    /// used.
    #[arg(long, value_name = "FILE", help_heading = "Servers")]
    pub primary_password_file: Option<PathBuf>,

    /// The server to check.
    #[arg(long, value_name = "URL", value_parser = UrlParser, help_heading = "Servers")]
    pub replica: ServerUrl,

    /// ACL user on the replica.
    #[arg(long, value_name = "NAME", help_heading = "Servers")]
    pub replica_user: Option<String>,

    /// File whose first line is the password on the replica. Without it, the environment variable REMORA_PASSWORD is
    /// used.
    #[arg(long, value_name = "FILE", help_heading = "Servers")]
    pub replica_password_file: Option<PathBuf>,

    /// The TLS options are for each of the two that has a rediss:// address.
    #[command(flatten)]
    pub tls: TlsArgs,

    /// Whether to compare `DEBUG DIGEST` of both servers first, if they allow it. It is fast, but a server answers no
    /// other client while it computes the digest: seconds per gigabyte, or per million elements.
    #[arg(long, value_name = "WHEN", default_value = "auto", help_heading = "Comparison")]
    pub digest: DigestUse,

    /// How often to compare keys and function libraries that differ again, each time after the replica has caught up
    /// with the primary. Those that changed every time are reported as undecided.
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000), help_heading = "Comparison")]
    pub recheck: u32,

    /// How many differences to list. All are counted.
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = clap::value_parser!(u32).range(0..=100_000), help_heading = "Comparison")]
    pub limit: u32,

    /// How long to retry while a server does not answer, loads, is busy or has too many clients, with growing pauses.
    /// The comparison then begins anew. `0` tries once.
    #[arg(long, value_name = "TIME", default_value = "5m", value_parser = parse_duration, help_heading = "Servers")]
    pub retry_for: Duration,

    /// Print the report as one JSON object.
    #[arg(long, help_heading = "Output")]
    pub json: bool,
}

/// When to use `DEBUG DIGEST`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum DigestUse {
    /// If both servers allow it.
    Auto,
    /// Never: read and compare every value.
    Never,
}

impl VerifyArgs {
    /// The options without their clap attributes.
    pub(crate) fn options(&self) -> remora_verify::Options {
        let (primary, replica) = (self.primary_user.as_deref(), self.replica_user.as_deref());
        remora_verify::Options {
            primary: self.tls.login(&self.primary, primary, self.primary_password_file.as_deref()),
            replica: self.tls.login(&self.replica, replica, self.replica_password_file.as_deref()),
            may_digest: self.digest == DigestUse::Auto,
            recheck: self.recheck,
            limit: self.limit,
            retry_for: self.retry_for,
        }
    }
}

const VERIFY_ABOUT: &str = "\
Compares the data of two servers completely: all databases, every key of every type with its expiry, and the functions.

If both servers allow DEBUG DIGEST and the digests are equal, strings, lists, sets, sorted sets and hashes are the same, and what \
digests do not cover is compared by itself: when keys expire, streams with their groups, consumers, pending entries and counters, \
and the types of modules. That takes a pass over the names of all keys, and reads those values. Otherwise, and where fields of \
hashes expire, every key of both is compared by DUMP; values whose DUMP differs only by version or encoding are compared by content. Clients \
may write to both servers meanwhile: keys that differ are compared again when the replica has caught up. Nothing is changed on \
either server; the memory used does not grow with the data.";

fn verify_help() -> String {
    format!(
        "\
Examples:
  Two servers:
    remora verify --primary redis://10.0.0.5:6379 --replica redis://127.0.0.1:6380
  A busy primary that DEBUG DIGEST must not block, for a script:
    remora verify --digest never --json \\
      --primary redis://10.0.0.5:6379 --replica redis://127.0.0.1:6380
  Different users:
    remora verify --tls-ca ca.pem \\
      --primary rediss://db1:6390 --primary-user check --primary-password-file p1 \\
      --replica redis://127.0.0.1:6380 --replica-user check --replica-password-file p2

{}
{}",
        Task::Verify.help(),
        exit::help_table(&[
            Code::Differs,
            Code::Usage,
            Code::Refused,
            Code::Server,
            Code::Interrupted,
            Code::Undecided
        ])
    )
}
