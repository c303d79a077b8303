//! The arguments of `remora replica`, and of `remora attend` and `intercept`.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand, ValueEnum};

use super::connections::{LenderNameArgs, ServerArgs, open_tokens};
use super::{
    FastKeys, HostPort, LinkTlsArgs, MetricsArgs, MetricsFileArgs, OnCommandLine, PeerArgs, Plain, Words, one_of,
    parse_ip, parse_listen,
};
use crate::conversation::Mode;
use crate::conversation::tokens::TokenFiles;
use crate::exit::{self, Code, Failure};
use crate::reader::{ReadOptions, RelayOptions};
use crate::server::Task;
use crate::transports::{UploadLimit, parse_rate};
use crate::units::{Size, UnitError, parse_duration};
use remora_replica::intercept::Cgroup;
use remora_replica::{
    AttendOptions, Delivery, DeliveryOptions, LEAST_MEMORY, LISTEN_PORT, LeftOut, OnFailure, Options,
};

/// The arguments of `remora replica`.
// Larger than the bound: a field for each option of the command line.
#[derive(Clone, Debug, Args)]
#[command(long_about = ABOUT, after_long_help = more())]
pub struct ReplicaArgs {
    #[command(flatten)]
    #[allow(missing_docs)]
    pub server: ServerArgs,

    #[command(flatten)]
    #[allow(missing_docs)]
    pub read: Plain<ReadOptions>,

    /// File with the secret that the agent shares with the source. May be repeated: the agent proves the first token to
    /// the source and to other replicas, and serves its slots to replicas with any of them. Needed unless the source
    /// has `--security mtls` and no token.
    #[arg(long = "token-file", value_name = "FILE", required_unless_present = "cert", help_heading = "Source")]
    pub token_files: Vec<PathBuf>,

    #[command(flatten)]
    #[allow(missing_docs)]
    pub peers: PeerArgs,

    /// The address at which the source must announce the primary. The agent and the server connect to no other one. May
    /// be repeated, for each primary that is expected. Needed if the server has a password for its primary
    /// (`masterauth`) and the primary is neither at the source's own address nor what the server follows already,
    /// unless --source-key or `--security mtls` proves that the source is the right one.
    #[arg(long = "expect-primary", value_name = "HOST:PORT", help_heading = "Security")]
    pub expected_primaries: Vec<HostPort>,

    /// Keep sending the stream to the server until stopped, instead of handing it over to the primary. The primary then
    /// serves one stream for all replicas of this source.
    #[arg(long, help_heading = "What to do")]
    pub stay: bool,

    /// Check everything, print what a sync will do, and change nothing. It checks both servers, the source, its
    /// transport and the connection to the primary. The exit code is that of the sync.
    #[arg(long, conflicts_with = "stay", help_heading = "What to do")]
    pub dry_run: bool,

    /// Convert the snapshot for a server of the other family, or of an older version (docs/how-to/migrate.md). What the
    /// server can't hold is refused. A command of the stream that it does not know ends the sync before it.
    #[arg(long, help_heading = "What to do")]
    pub convert: bool,

    /// What to leave out of the conversion, instead of refusing it, and count in the log. `field-expiry`: the times at
    /// which fields of hashes expire, so that such fields stay; `module-keys`: keys of modules' types; `functions`:
    /// libraries of functions.
    #[arg(long, value_name = "WHAT", value_delimiter = ',', value_parser = one_of(LEFT_OUT), requires = "convert", help_heading = "What to do")]
    pub leave_out: Vec<LeftOut>,

    /// Replace the data that the server holds. Without this option a server with keys is refused.
    #[arg(long, help_heading = "What to do")]
    pub replace: bool,

    /// Raise `failover-timeout` at all Sentinels until the sync ends, for a server that Sentinel knows and would make
    /// follow its primary again before. They must all be in --sentinel, and their user needs +sentinel|set. Meanwhile a
    /// fail-over that fails is tried again later.
    #[arg(long, requires = "sentinels", help_heading = "What to do")]
    pub extend_failover_timeout: bool,

    /// Make the server write its configuration file (CONFIG REWRITE) when it follows the primary, so that it does so
    /// after a restart too. A server without a configuration file is refused.
    #[arg(long, help_heading = "What to do")]
    pub rewrite_config: bool,

    #[command(flatten)]
    #[allow(missing_docs)]
    pub by: DeliveryArgs,

    /// State of the server if the sync fails or is stopped when the server has lost its old data and not loaded the new
    /// ones. `detached`: it follows no primary (`REPLICAOF NO ONE`) and keeps the data that it holds then; the agent
    /// reports how much. `empty`: it is flushed, so that no client takes half a data set for a whole one, and follows
    /// its former primary again if it had one.
    #[arg(long, value_name = "STATE", default_value = "empty", value_parser = one_of(STATES), help_heading = "What to do")]
    pub on_failure: OnFailure,

    /// Memory for slots in flight, and for those that others read here. At least 16MiB. Three quarters
    /// of it hold slots: all of a snapshot if they fit, so that others can read it from the first slot on; else the
    /// newest ones.
    #[arg(long, value_name = "SIZE", default_value = "256MiB", value_parser = parse_memory, help_heading = "Resources")]
    pub memory: Size,

    /// Folder for received slots. A replica agent that is restarted with the same folder reads only the slots it lacks.
    /// The folder needs as much disk space as the snapshot has bytes. Only its owner has access; one that other users
    /// can write to is refused.
    #[arg(long, value_name = "DIR", help_heading = "Resources")]
    pub state_dir: Option<PathBuf>,

    #[command(flatten)]
    #[allow(missing_docs)]
    pub lend: LendArgs,

    /// Whether a server that has the Remora module (docs/explanation/module.md) loads long strings from shared memory.
    /// `auto`: if possible. `off`: never. Anything that cannot be shared is sent over the replication link.
    #[arg(long, value_name = "HOW", default_value = "auto", help_heading = "Link to the server")]
    pub module_load: ModuleLoad,

    /// Whether the module loads small values by the server's own functions, many at a time
    /// (docs/explanation/module.md). `auto`: if the server is a build that the module knows exactly, and a trial in a
    /// forked child succeeds. `off`: never.
    #[arg(long, value_name = "HOW", default_value = "auto", help_heading = "Link to the server")]
    pub fast_keys: FastKeys,

    /// Local address that the server connects to while it loads; the port is any free one and is printed. Default:
    /// loopback if the server is on this host, else the local address of the connection to the server.
    #[arg(long, value_name = "ADDR", value_parser = parse_ip, help_heading = "Link to the server")]
    pub listen: Option<IpAddr>,

    #[command(flatten)]
    #[allow(missing_docs)]
    pub link_tls: LinkTlsArgs,

    #[command(flatten)]
    #[allow(missing_docs)]
    pub metrics: MetricsArgs,

    #[command(flatten)]
    #[allow(missing_docs)]
    pub metrics_file: MetricsFileArgs,

    /// Print the conditions of an exact replica, and how each was checked. With --dry-run: which ones will be.
    #[arg(long, help_heading = "Output")]
    pub explain: bool,

    /// Write the summary as JSON to this file too; with --dry-run, what a sync will do.
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    pub json: Option<PathBuf>,
}

impl ReplicaArgs {
    /// The options without their clap attributes.
    ///
    /// # Errors
    /// They contradict each other, or a file cannot be used.
    pub(crate) fn options(&self) -> Result<Options, Failure> {
        let PeerArgs { security, expected, sentinel, name, .. } = &self.peers;
        Ok(Options {
            source_key: expected.source_key,
            is_source_proven: expected.source_key.is_some() || security.security == Some(Mode::Mtls),
            name: name.clone(),
            sentinels: sentinel.open()?,
            expected_primaries: self.expected_primaries.clone(),
            stay: self.stay,
            dry_run: self.dry_run,
            convert: self.convert,
            leave_out: self.leave_out.clone(),
            replace: self.replace,
            extend_failover_timeout: self.extend_failover_timeout,
            rewrite_config: self.rewrite_config,
            delivery: self.by.options(),
            on_failure: self.on_failure,
            memory: self.memory,
            state_dir: self.state_dir.clone(),
            relay: self.lend.relay.plain(),
            linger: self.lend.linger,
            module_load: self.module_load == ModuleLoad::Auto,
            fast_keys: self.fast_keys == FastKeys::Auto,
            listen: self.listen,
            link_tls: self.link_tls.options(),
            explain: self.explain,
            json: self.json.clone(),
            ..Options::new(self.server.login(), self.read.plain())
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

/// What a conversion leaves out.
pub(crate) const LEFT_OUT: Words<LeftOut, 3> = [
    (LeftOut::FieldExpiry.word(), "The times at which fields of hashes expire", LeftOut::FieldExpiry),
    (LeftOut::ModuleKeys.word(), "Keys of modules' types", LeftOut::ModuleKeys),
    (LeftOut::Functions.word(), "Libraries of functions", LeftOut::Functions),
];

/// Whether the server's module is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ModuleLoad {
    /// If possible.
    Auto,
    /// Never.
    Off,
}

/// The state in which a failed sync leaves the server.
const STATES: Words<OnFailure, 2> = [
    ("detached", "`REPLICAOF NO ONE`, with its data as they are, perhaps incomplete", OnFailure::Detached),
    (
        "empty",
        "`REPLICAOF NO ONE` and `FLUSHALL`, and then `REPLICAOF` its former primary if it had one",
        OnFailure::Empty,
    ),
];

pub(super) fn parse_memory(text: &str) -> Result<Size, String> {
    let size: Size = text.parse().map_err(|error: UnitError| error.to_string())?;
    if size < LEAST_MEMORY {
        return Err(format!("the memory must be at least {LEAST_MEMORY}"));
    }
    Ok(size)
}

const ABOUT: &str = "\
Makes a server an exact replica of the one a source serves.

The agent reads the source's snapshot and the writes that follow it, and sends them to its own server as a primary would. When \
the server has caught up, the agent makes it follow the true primary, where it continues by a partial resynchronisation at the \
exact offset. The agent then prints a summary line per phase and exits with code 0. Before it changes anything, the agent checks \
that the server is suitable (no data, no cluster mode, not the primary itself), that it can reach the primary, and that settings \
and permissions suffice. The agent restores the settings that it changed for the sync, also after a crash.";

fn more() -> String {
    format!(
        "\
Examples:
  The usual case, the agent beside its server:
    remora replica --server redis://127.0.0.1:6380 \\
      --source 10.0.0.5:7379 --token-file token
  Check first whether it would work:
    remora replica --dry-run --server redis://127.0.0.1:6380 \\
      --source 10.0.0.5:7379 --token-file token
  With certificates instead of a token:
    remora replica --server redis://127.0.0.1:6380 --source db1:7379 \\
      --security mtls --cert replica.pem --key replica.key --ca ca.pem
  Under Sentinel, which says at the hand-off where the primary is:
    remora replica --server redis://10.0.0.9:6379 \\
      --source 10.0.0.5:7379 --token-file token --sentinel-name mymaster \\
      --sentinel 10.0.0.1:26379,10.0.0.2:26379,10.0.0.3:26379
  A server with old data, and a large snapshot over an unreliable link:
    remora replica --server redis://127.0.0.1:6380 --source 10.0.0.5:7379 \\
      --token-file token --replace --state-dir /var/lib/remora --retry-for 1h
  A server that replicates by TLS (tls-replication yes):
    remora replica --server rediss://127.0.0.1:6390 --tls-ca ca.pem \\
      --link-cert agent.pem --link-key agent.key \\
      --source 10.0.0.5:7379 --token-file token
  A server that Sentinel or an operator watches, with rules of remora intercept:
    remora replica --server redis://127.0.0.1:6379 --delivery intercept \\
      --source 10.0.0.5:7379 --token-file token
  A server that is restarted on its RDB file:
    remora replica --server redis://127.0.0.1:6379 --replace --delivery file \\
      --restart-command 'systemctl restart redis-server' \\
      --source 10.0.0.5:7379 --token-file token

{}
{}",
        Task::Replica.help() + &Task::Sentinel.help_beside(),
        exit::help_table(&[
            Code::Usage,
            Code::Refused,
            Code::Server,
            Code::Source,
            Code::SyncFailed,
            Code::Interrupted,
            Code::Local,
            Code::TakenOver,
            Code::Stale
        ])
    )
}

/// By which way a server gets the snapshot, and what that way needs.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Delivery")]
pub struct DeliveryArgs {
    /// By which way the server gets the snapshot (docs/reference/delivery.md). `link`: the server follows the agent,
    /// and then the primary. `intercept`: the server's own connection to its primary is intercepted once; it must
    /// follow the primary already. `file`: the snapshot becomes the server's RDB file, and --restart-command restarts
    /// the server. `auto`: by interception for a server in cluster mode or one that Sentinel knows, if it follows its
    /// primary and its connections can be intercepted; otherwise by the link.
    #[arg(long, value_name = "WAY", default_value = "link", value_parser = one_of(WAYS))]
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

impl DeliveryArgs {
    /// The options without their clap attributes.
    fn options(&self) -> DeliveryOptions {
        DeliveryOptions {
            way: self.delivery,
            restart_command: self.restart_command.clone(),
            restart_limit: self.restart_limit,
            write_replicaof: self.write_replicaof.clone(),
            listen_port: self.listen_port,
        }
    }
}

/// The ways.
const WAYS: Words<Delivery, 4> = [
    ("auto", "By interception where the link would be undone, otherwise by the link", Delivery::Auto),
    ("link", "The server follows the agent first", Delivery::Link),
    ("file", "The server is restarted on its RDB file", Delivery::File),
    ("intercept", "Its own connection to its primary is intercepted", Delivery::Intercept),
];

/// How a replica serves slots to other replicas.
#[derive(Clone, Debug, Default, Args)]
pub struct RelayArgs {
    /// Lend received slots to other replicas, so that the source sends each of them about once. This opens a port,
    /// which is printed. The default, unless the source is on this host (`--transport auto`), or read by shared memory,
    /// or `--state-dir` is given.
    #[arg(long, overrides_with = "no_serve_peers", help_heading = "Other replicas")]
    pub serve_peers: bool,

    /// Serve no slots to other replicas. The agent can still read slots from them.
    #[arg(long, overrides_with = "serve_peers", help_heading = "Other replicas")]
    pub no_serve_peers: bool,

    /// Address and port to serve slots at. Default: the local address of the connection to the source, and any free
    /// port.
    #[arg(long, value_name = "ADDR:PORT", value_parser = parse_listen, help_heading = "Other replicas")]
    pub peer_listen: Option<SocketAddr>,

    /// How fast all other replicas together read from this one. `auto`: over TCP as a background transfer, which leaves
    /// the network link to other traffic. `none`: as fast as they can. SIZE: bytes per second, over every transport.
    #[arg(long, value_name = "auto|none|SIZE", default_value = "auto", help_heading = "Other replicas")]
    pub upload_limit: UploadLimit,

    /// Bytes per second that each other replica reads from this one.
    #[arg(long, value_name = "SIZE", value_parser = parse_rate, help_heading = "Other replicas")]
    pub upload_limit_per_peer: Option<Size>,

    /// Bytes per second received from the source and from other replicas together, if slots can be read from other
    /// replicas. The stream of writes is never delayed; the snapshot gets the rest.
    #[arg(long, value_name = "SIZE", value_parser = parse_rate, help_heading = "Other replicas")]
    pub download_limit: Option<Size>,

    /// Location of this replica: a rack, a room, a region. Replicas prefer upstreams in the same zone, and each zone
    /// has its own turns (`--at-once` of the source).
    #[arg(long, value_name = "LABEL", default_value = "", value_parser = parse_zone, help_heading = "Other replicas")]
    pub zone: String,
}

impl OnCommandLine for RelayOptions {
    type Args = RelayArgs;

    fn of(args: RelayArgs) -> RelayOptions {
        let RelayArgs {
            serve_peers,
            no_serve_peers,
            peer_listen,
            upload_limit,
            upload_limit_per_peer,
            download_limit,
            zone,
        } = args;
        RelayOptions {
            serve_peers,
            no_serve_peers,
            peer_listen,
            upload_limit,
            upload_limit_per_peer,
            download_limit,
            zone,
        }
    }
}

/// The same, and how long it goes on when it needs the slots no more.
#[derive(Clone, Debug, Args)]
pub struct LendArgs {
    #[command(flatten)]
    #[allow(missing_docs)]
    pub relay: Plain<RelayOptions>,

    #[command(flatten)]
    #[allow(missing_docs)]
    pub lender: LenderNameArgs,

    /// How long to keep serving slots to other replicas after this replica's own server was handed over, at most. The
    /// agent ends that earlier if no replica reads from it.
    #[arg(long, value_name = "TIME", default_value = "5m", value_parser = parse_duration, help_heading = "Other replicas")]
    pub linger: Duration,
}

impl LendArgs {
    /// The tokens of a replica agent, and what protects its connections.
    ///
    /// # Errors
    /// As those of [`open_tokens`].
    pub(super) fn tokens(&self, files: &[PathBuf], peers: &PeerArgs) -> Result<TokenFiles, Failure> {
        open_tokens(files, &peers.security, &peers.expected, (&peers.readers, &self.lender), self.relay.peer_listen)
    }
}

fn parse_zone(text: &str) -> Result<String, String> {
    let most = remora_protocol::MAX_ZONE_BYTES;
    if text.len() > most {
        return Err(format!("a zone has at most {most} bytes, and this one has {}", text.len()));
    }
    Ok(text.to_owned())
}

// The arguments of `remora attend` and `remora intercept`.

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_zone_is_no_longer_than_its_field() {
        assert!(parse_zone(&"z".repeat(32)).is_ok());
        assert!(parse_zone(&"z".repeat(33)).is_err());
    }
}
