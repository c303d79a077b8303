//! The arguments of `remora attend` and `remora intercept`.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand};
use remora_replica::intercept::Cgroup;
use remora_replica::{AttendOptions, LISTEN_PORT, LeftOut};

use super::replica::parse_memory;
use super::replica::{LEFT_OUT, LendArgs};
use super::server::ServerArgs;
use super::{HostPort, LinkTlsArgs, MetricsArgs, PeerArgs, Plain, one_of};
use crate::conversation::tokens::TokenFiles;
use crate::exit::{self, Code, Failure};
use crate::reader::ReadOptions;
use crate::server::Task;
use crate::units::{Size, parse_duration};

/// The port of a primary, unless another is given: the servers' own default.
pub const PRIMARY_PORT: u16 = 6379;

/// The arguments of `remora attend`.
#[derive(Clone, Debug, Args)]
#[command(long_about = ATTEND_ABOUT, after_long_help = attend_help())]
pub struct AttendArgs {
    #[command(flatten)]
    #[allow(missing_docs)]
    pub server: ServerArgs,

    #[command(flatten)]
    #[allow(missing_docs)]
    pub read: Plain<ReadOptions>,

    /// Further sources, separated by commas: one for each primary that the server may follow, such as those of a
    /// cluster's shards. The one that has the replication history of the server's primary serves it.
    #[arg(long, value_name = "HOST:PORT,…", value_delimiter = ',', help_heading = "Source")]
    pub sources: Vec<HostPort>,

    /// File with the secret that the agent shares with the source. May be repeated: the agent proves the first token to
    /// the source and to other replicas, and serves its slots to replicas with any of them.
    #[arg(long = "token-file", value_name = "FILE", required_unless_present = "cert", help_heading = "Source")]
    pub token_files: Vec<PathBuf>,

    #[command(flatten)]
    #[allow(missing_docs)]
    pub peers: PeerArgs,

    #[command(flatten)]
    #[allow(missing_docs)]
    pub link_tls: LinkTlsArgs,

    /// Memory for slots in flight, and for those that others read here. At least 16MiB. Three
    /// quarters of it hold slots: all of a snapshot if they fit, so that others can read it from the first slot on;
    /// else the newest ones. It is freed when no sync is under way and no replica reads.
    #[arg(long, value_name = "SIZE", default_value = "256MiB", value_parser = parse_memory, help_heading = "Resources")]
    pub memory: Size,

    #[command(flatten)]
    #[allow(missing_docs)]
    pub lend: LendArgs,

    /// How long to wait at the start for a server that does not answer, loads or is busy, and for Sentinels that do not
    /// answer yet: in a pod they start together. The server's connections come here already meanwhile. Default: the
    /// time of --retry-for.
    #[arg(long, value_name = "TIME", value_parser = parse_duration, help_heading = "Resources")]
    pub wait_for_server: Option<Duration>,

    /// The port on loopback to which the rules of `remora intercept` send connections.
    #[arg(long, value_name = "PORT", default_value_t = LISTEN_PORT, value_parser = clap::value_parser!(u16).range(1..), help_heading = "Interception")]
    pub listen_port: u16,

    /// A port at which the server's primaries listen. May be repeated: in a cluster whose nodes have different ports,
    /// for each. With --sentinel: the ports of the servers that Sentinel knows.
    #[arg(long = "primary-port", value_name = "PORT", conflicts_with = "sentinels", default_values_t = [PRIMARY_PORT], value_parser = clap::value_parser!(u16).range(1..), help_heading = "Interception")]
    pub primary_ports: Vec<u16>,

    /// Convert the copy of a primary of the other family, or of another version, as `remora replica --convert` does. No
    /// full copy that the server could not load is let through to such a primary.
    #[arg(long, help_heading = "Conversion")]
    pub convert: bool,

    /// What to leave out of the conversion, instead of refusing it; see `remora replica --help`.
    #[arg(long, value_name = "WHAT", value_delimiter = ',', value_parser = one_of(LEFT_OUT), requires = "convert", help_heading = "Conversion")]
    pub leave_out: Vec<LeftOut>,

    #[command(flatten)]
    #[allow(missing_docs)]
    pub metrics: MetricsArgs,
}

impl AttendArgs {
    /// The options without their clap attributes.
    ///
    /// # Errors
    /// They contradict each other, or a file cannot be used.
    pub(crate) fn options(&self) -> Result<AttendOptions, Failure> {
        Ok(AttendOptions {
            server: self.server.login(),
            read: self.read.plain(),
            sources: self.sources.clone(),
            source_key: self.peers.expected.source_key,
            name: self.peers.name.clone(),
            sentinels: self.peers.sentinel.open()?,
            link_tls: self.link_tls.options(),
            memory: self.memory,
            relay: self.lend.relay.plain(),
            linger: self.lend.linger,
            wait_for_server: self.wait_for_server,
            listen_port: self.listen_port,
            primary_ports: self.primary_ports.clone(),
            convert: self.convert.then(|| self.leave_out.clone()),
        })
    }

    /// The tokens, and what protects the agents' connections.
    ///
    /// # Errors
    /// The options contradict each other, or a file cannot be used.
    pub(crate) fn tokens(&self) -> Result<TokenFiles, Failure> {
        self.lend.tokens(&self.token_files, &self.peers)
    }
}

const ATTEND_ABOUT: &str = "\
Stays beside a server, and turns each full copy that the server would take of its primary into a cheap one.

The rules of `remora intercept` send the server's own connections to its primary to this agent. The agent passes them on. If the \
server asks for a full copy, the agent plays the primary instead: it answers with the primary's true history, and feeds the source's \
snapshot and the writes since. When the server has caught up, the agent closes its connection. The server connects again by itself, \
to its primary, and goes on at the exact offset. No setting of the server is changed, and no command is sent to it (but one with --sentinel: \
REPLICAOF, if its primary was replaced before a Sentinel knew the server): it follows its primary all the time, so REPLICAOF, CLUSTER REPLICATE, Sentinel and operators work as ever. A partial resynchronisation that the primary can \
serve is passed to it. If the source cannot help, the full copy is passed to the primary too.";

fn attend_help() -> String {
    format!(
        "\
Examples:
  Once, with CAP_NET_ADMIN, for a server of user 999 and an agent of user 998:
    remora intercept add --server-uid 999 --agent-uid 998
  Then, as user 998, for as long as the server runs:
    remora attend --server redis://127.0.0.1:6379 \\
      --source 10.0.0.5:7379 --token-file token
  In a cluster whose nodes have different ports:
    remora attend --server redis://127.0.0.1:7004 --source 10.0.0.5:7379 \\
      --token-file token --primary-port 7001 --primary-port 7002
  For a server that speaks TLS to its primary (tls-replication yes):
    remora attend --server redis://127.0.0.1:6379 --source 10.0.0.5:7379 \\
      --token-file token --link-cert agent.pem --link-key agent.key
  Beside a Valkey that is to follow a Redis, in a cluster that moves from one to the other:
    remora attend --server redis://127.0.0.1:6379 --source 10.0.0.5:7379 \\
      --token-file token --convert
  Under Sentinel, with servers at different ports:
    remora attend --server redis://127.0.0.1:6379 --source 10.0.0.5:7379 \\
      --token-file token --sentinel 10.0.0.1:26379 --sentinel-name mymaster

{}
{}",
        Task::Attend.help() + &Task::Sentinel.help_beside(),
        exit::help_table(&[Code::Usage, Code::Refused, Code::Server, Code::Interrupted, Code::Local])
    )
}

/// The arguments of `remora intercept`.
#[derive(Clone, Debug, Args)]
#[command(long_about = INTERCEPT_ABOUT, after_long_help = intercept_help())]
pub struct InterceptArgs {
    #[command(subcommand)]
    #[allow(missing_docs)]
    pub action: InterceptAction,
}

/// What to do with the rules.
#[derive(Clone, Debug, Subcommand)]
pub enum InterceptAction {
    /// Make the rules, or replace them.
    Add(AddArgs),
    /// Remove the rules.
    Remove(InterceptPortArgs),
    /// Show the rules, and the entries of the agents that ask for connections.
    Show(ShowArgs),
}

/// Which rules to make.
#[derive(Clone, Debug, Args)]
pub struct AddArgs {
    /// The number of the user that the server runs as. Its connections are meant.
    #[arg(long, value_name = "UID", required_unless_present = "server_cgroup", conflicts_with = "server_cgroup")]
    pub server_uid: Option<u32>,

    /// The control group (cgroup v2) that the server runs in, instead of its user, as in /proc/PID/cgroup. It must
    /// exist, and rules are for this very group: make them again when the service was restarted.
    #[arg(long, value_name = "PATH", value_parser = parse_cgroup)]
    pub server_cgroup: Option<Cgroup>,

    /// The number of the user that `remora attend` runs as, which must be another one than the server's.
    #[arg(long, value_name = "UID")]
    pub agent_uid: u32,

    /// The port of `remora attend`: its --listen-port.
    #[arg(long, value_name = "PORT", default_value_t = LISTEN_PORT, value_parser = clap::value_parser!(u16).range(1..))]
    pub listen_port: u16,
}

fn parse_cgroup(text: &str) -> Result<Cgroup, String> {
    Cgroup::at(text).ok_or_else(|| "a control group is a path such as system.slice/redis-server.service".to_owned())
}

/// Which rules to remove.
#[derive(Clone, Debug, Args)]
pub struct InterceptPortArgs {
    /// The port of `remora attend`: its --listen-port.
    #[arg(long, value_name = "PORT", default_value_t = LISTEN_PORT, value_parser = clap::value_parser!(u16).range(1..))]
    pub listen_port: u16,
}

/// `remora intercept show` has no options.
#[derive(Clone, Copy, Debug, Args)]
pub struct ShowArgs {}

const INTERCEPT_ABOUT: &str = "\
The rules by which a server's own connections to its primary come to `remora attend`.

The command needs CAP_NET_ADMIN in the network namespace of the server, and the program nft; `remora attend` needs neither. The rules \
change nothing unless the agent asks for connections each second. So they can stay, and a server whose agent has ended goes to its \
primary by itself, after three seconds at the latest.";

fn intercept_help() -> String {
    format!(
        "\
Examples:
  Once, at the start of a host or in an init container:
    remora intercept add --server-uid 999 --agent-uid 998
  For a service, by its control group, whatever user it runs as:
    remora intercept add --server-cgroup system.slice/redis-server.service --agent-uid 998
  See them, and whether an agent asks for connections:
    remora intercept show
  Remove them:
    remora intercept remove

{}",
        exit::help_table(&[Code::Usage, Code::Refused, Code::Local])
    )
}
