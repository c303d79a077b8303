//! The arguments of `remora source`, and of what is stored.

use std::net::SocketAddr;
use std::num::NonZeroU32;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use clap::builder::{OsStringValueParser, TypedValueParser};
use clap::{Args, ValueEnum};

use super::connections::{TlsArgs, UrlParser};
use super::{
    HostPort, MetricsArgs, MonitorNameArgs, RdmaOfferArgs, ReplicaNameArgs, SecurityArgs, SentinelArgs, Words, one_of,
    parse_listen,
};
use crate::conversation::security::CertificateRoles;
use crate::conversation::tokens::TokenFiles;
use crate::conversation::{Identity, Mode, Role, Security};
use crate::exit::{self, Code, Failure};
use crate::server::{Credentials, Server, ServerUrl, SetupError, Task};
use crate::source::{
    Beside, Compress, LEAST_AGE, LEAST_MEMORY, LaneOptions, MAX_REPLICAS, ModuleCapture, ModuleOptions, OpenFile,
    Options, SLOT_SIZES, SourceFile, TableOptions, Target, TuningOptions,
};
use crate::transports::UploadLimit;
use crate::units::{Size, parse_duration};
use remora_backup::restore::Places;
use remora_backup::{Location, SPOOL, StoreOptions};
use remora_process::rdb_file::Stored;

/// The arguments of `remora source`.
// Larger than the bound: a field for each option of the command line.
#[derive(Clone, Debug, Args)]
#[command(long_about = ABOUT, after_long_help = more())]
pub struct SourceArgs {
    #[command(flatten)]
    #[allow(missing_docs)]
    pub captured: CapturedArgs,

    #[command(flatten)]
    #[allow(missing_docs)]
    pub sentinel: SentinelArgs,

    /// Address and port to serve replica agents on. Exactly this one port is opened. The default, 127.0.0.1:7379,
    /// serves this host only; give the address of an interface (or 0.0.0.0 for all) to serve others. Not needed where
    /// systemd opens the port (remora-source@.socket).
    #[arg(long, value_name = "ADDR:PORT", value_parser = parse_listen, help_heading = "Serving")]
    pub listen: Option<SocketAddr>,

    #[command(flatten)]
    #[allow(missing_docs)]
    pub metrics: MetricsArgs,

    #[command(flatten)]
    #[allow(missing_docs)]
    pub tokens: TokenArgs,

    /// The primary's address as the replicas' servers reach it. Default: the server's own address;
    /// if that is loopback or a socket, the host at which a replica reached this source. With --sentinel: what the
    /// Sentinels say at the time.
    #[arg(long, value_name = "HOST:PORT", conflicts_with = "sentinels", help_heading = "Serving")]
    pub announce: Option<HostPort>,

    /// Maximum number of replica agents joined at the same time; the source makes further ones wait. Each needs four
    /// descriptors of the source.
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_REPLICAS)), help_heading = "Serving")]
    pub max_replicas: u32,

    /// Maximum number of replicas that read the snapshot and load it at the same time, in each zone that replicas name
    /// with --zone; the source makes further ones wait for their turn, in the order in which they joined, and tells
    /// each its place. A server that only needs the stream does not wait. The journal must hold what the primary writes
    /// until the last turn. Not for a windowed snapshot, where each turn would cost the primary a fork. Default: all at
    /// once.
    #[arg(long, value_name = "N", help_heading = "Serving")]
    pub at_once: Option<NonZeroU32>,

    /// Memory for the snapshot and the journal together. At least 16MiB. A snapshot that fits is kept whole and serves
    /// late joiners too. A larger one is windowed: the source reuses slots that every joined replica has read, at the
    /// pace of the slowest one. It holds all twice if data are encrypted: plain for this host, and ciphertext. So it
    /// does with the snapshot if --compress names a method.
    #[arg(long, value_name = "SIZE", default_value = "1GiB", value_parser = parse_memory, help_heading = "Memory")]
    pub memory: Size,

    /// The journal's part of that memory: the stream of writes since the snapshot. The longer it reaches back, the
    /// later a replica can join without a new snapshot. Default: a quarter of --memory.
    #[arg(long, value_name = "SIZE", help_heading = "Memory")]
    pub journal_memory: Option<Size>,

    /// Size of a snapshot's slots: a power of two from 64KiB to 64MiB. A replica resumes at the beginning of a slot,
    /// and serves a slot to others when it has all of it. Default: 1MiB, or more if the memory would hold more than
    /// 262144 of them.
    #[arg(long, value_name = "SIZE", value_parser = parse_slot_size, help_heading = "Memory")]
    pub slot_size: Option<Size>,

    /// Take the snapshot immediately instead of when the first replica joins.
    #[arg(long, help_heading = "Snapshot")]
    pub eager: bool,

    /// The snapshot is this RDB file, which a server of the primary's history has written (with repl-id and
    /// repl-offset), and the server is asked for the stream behind it only: never for a snapshot. Its backlog must
    /// reach back to the file's offset when the source starts.
    #[arg(long, value_name = "FILE", conflicts_with = "load_module", help_heading = "Snapshot")]
    pub from_file: Option<PathBuf>,

    #[command(flatten)]
    #[allow(missing_docs)]
    pub bases: BaseArgs,

    /// Never have the primary fork for a snapshot: it comes from --from-file, from --base, from the source of
    /// --standby-of, or by `--module-capture sweep`. Where that cannot be, replicas wait, and the log says why.
    #[arg(long, help_heading = "Snapshot")]
    pub no_fork: bool,

    /// Stand by for this other source of the same primary: copy each of its snapshots while it is taken or kept, and
    /// serve it under the same number, so that readers whose source is lost go on here at the slot where they are. The
    /// stream behind it comes from the server here. Both need the same --memory, --security and --compress. The first
    /// tells its readers of this address.
    #[arg(long, value_name = "HOST:PORT", conflicts_with_all = ["from_file", "eager"], help_heading = "Snapshot")]
    pub standby_of: Option<HostPort>,

    /// With --standby-of: how long a replica waits for a snapshot of the first source before the server here is asked
    /// for one. With --no-fork it never is.
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = parse_duration, requires = "standby_of", help_heading = "Snapshot")]
    pub fork_after: Duration,

    /// A snapshot older than this is not given to new joiners: the next one that joins starts a new snapshot. At least
    /// 1s.
    #[arg(long, value_name = "TIME", default_value = "1h", value_parser = parse_age, help_heading = "Snapshot")]
    pub max_age: Duration,

    #[command(flatten)]
    #[allow(missing_docs)]
    pub tune: TuneArgs,

    #[command(flatten)]
    #[allow(missing_docs)]
    pub limits: LimitArgs,

    /// How the module takes part in a snapshot, if the server has it (docs/explanation/module.md). `walk`: the server's
    /// fork child writes long strings directly into the source's memory, and the server writes the rest, without
    /// compressing. `server`: the server writes everything, without compressing. `auto`: the one that costs the server
    /// less, by the average size of its values. `sweep`: experimental, without a fork: the server's own process writes
    /// everything, a millisecond at a time; what stands in its way ends it, and then it is as with `auto`. `off`: not
    /// at all. If the module cannot take part, the snapshot is taken as without a module.
    #[arg(long, value_name = "HOW", default_value = "auto", value_parser = one_of(CAPTURES), help_heading = "Snapshot")]
    pub module_capture: ModuleCapture,

    #[command(flatten)]
    #[allow(missing_docs)]
    pub walk: WalkArgs,

    /// Load the module into a server that does not have it (MODULE LOAD). PATH is the path of the library on the
    /// server's host; the default is the one that `remora module path` prints. The server must allow it
    /// (enable-module-command), and the ACL user needs `+module|load`.
    #[arg(long, value_name = "PATH", num_args = 0..=1, default_missing_value = "", value_parser = parse_library, help_heading = "Snapshot")]
    pub load_module: Option<PathBuf>,

    /// Folder for the socket over which the module receives the source's memory. Default: a socket without a file,
    /// which servers in another network namespace (a container) cannot reach; they and this agent can share a folder.
    #[arg(long, value_name = "FOLDER", help_heading = "Snapshot")]
    pub module_socket_folder: Option<PathBuf>,

    /// Congestion control of the TCP lanes, as in /proc/sys/net/ipv4/tcp_allowed_congestion_control. Default: the
    /// system's.
    #[arg(long, value_name = "NAME", help_heading = "Transports")]
    pub tcp_congestion: Option<String>,

    /// How the slots that replicas on other hosts read are compressed: once, for any number of replicas, and only slots
    /// that this makes smaller by a tenth. `auto`: by the method with which compressor and link together are fastest,
    /// if the link is slow enough, a processor idle, and the data are encrypted anyway. `lz4`, `zstd`: always by this
    /// one; the snapshot is then held twice, plain for this host, and compressed. `off`: not at all.
    #[arg(long, value_name = "HOW", default_value = "auto", value_parser = one_of(METHODS), help_heading = "Transports")]
    pub compress: Compress,

    /// How fast the source sends over TCP, to all replicas together. `auto`: as a background transfer, so that the
    /// primary's clients on other hosts hardly wait behind the snapshot: at nearly full speed while nothing else fills
    /// the network link, and less while something does. `none`: as fast as TCP does. SIZE: bytes per second (105MiB is
    /// a little below the rate of 1 Gb/s). The source cannot observe reads over RDMA; replicas limit these with
    /// `--download-limit`. Reads of shared memory have no limit.
    #[arg(long, value_name = "auto|none|SIZE", default_value = "auto", help_heading = "Transports")]
    pub upload_limit: UploadLimit,

    /// Do not offer shared memory to replicas on this host: they read over TCP.
    #[arg(long, help_heading = "Transports")]
    pub no_shm: bool,

    #[command(flatten)]
    #[allow(missing_docs)]
    pub rdma: RdmaOfferArgs,
}

/// The server to take the snapshot of, or how to find it, and its login.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Server")]
pub struct CapturedArgs {
    /// redis://HOST:PORT, rediss://HOST:PORT (TLS) or unix:///PATH. Without a port: 6379.
    #[arg(long, value_name = "URL", value_parser = UrlParser, required_unless_present = "sentinels", conflicts_with = "sentinels")]
    pub server: Option<ServerUrl>,

    /// With --sentinel: beside which server of the group to take the snapshot. `replica`: the one with the least lag
    /// that is in step with the primary; another one when it is promoted or gone. `primary`: the primary, also after a
    /// fail-over.
    #[arg(long, value_name = "WHICH", default_value = "replica", value_parser = one_of(SERVERS), requires = "sentinels", help_heading = "Sentinel")]
    pub from: Beside,

    /// With --sentinel: the servers that Sentinel names are reached by TLS.
    #[arg(long, requires = "sentinels", help_heading = "Sentinel")]
    pub servers_tls: bool,

    /// ACL user to log in as. Without it, a password belongs to the user `default`.
    #[arg(long, value_name = "NAME")]
    pub user: Option<String>,

    /// File whose first line is the password. Others than owner and group must not be able to read it. Without it, the
    /// environment variable REMORA_PASSWORD counts. Passwords are never taken from the command line.
    #[arg(long, value_name = "FILE")]
    pub password_file: Option<PathBuf>,

    /// How long to wait at the start for a server that does not answer, loads or is busy, and for Sentinels that know
    /// no suitable one yet: in a pod they start together. `0` tries once.
    #[arg(long, alias = "retry-for", value_name = "TIME", default_value = "5m", value_parser = parse_duration)]
    pub wait_for_server: Duration,

    #[command(flatten)]
    #[allow(missing_docs)]
    pub tls: TlsArgs,
}

impl CapturedArgs {
    /// The server, or how it is found. Nothing is sent.
    ///
    /// # Errors
    /// A file cannot be used, or the options contradict each other.
    fn target(&self, sentinel: &SentinelArgs) -> Result<Target, Failure> {
        if let Some(sentinels) = sentinel.open()? {
            let (args, scheme) = (self.clone(), if self.servers_tls { "rediss" } else { "redis" });
            let open = move |address: &HostPort| {
                let url: ServerUrl = format!("{scheme}://{address}").parse().map_err(|error| {
                    Failure::refused(format!("Sentinel's address of the primary {address} is not one: {error}"))
                })?;
                Ok(args.open(&url)?)
            };
            return Ok(Target::Group { sentinels, beside: self.from, open: Box::new(open) });
        }
        let url = self.server.as_ref().ok_or_else(|| Failure::refused("no --server is given"))?;
        Ok(Target::Server(self.open(url)?))
    }

    /// Prepares connections to the server at this address. It sends nothing.
    fn open(&self, url: &ServerUrl) -> Result<Server, SetupError> {
        let credentials = Credentials::gather(self.user.as_deref(), self.password_file.as_deref())?;
        Server::new(url.clone(), credentials, &self.tls.options(), Task::Source)
    }
}

/// The values of `--from`.
const SERVERS: Words<Beside, 2> =
    [("replica", "The replica with the least lag", Beside::Replica), ("primary", "The primary", Beside::Primary)];

/// What the source may change at its server for the moment of the fork.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Snapshot")]
pub struct TuneArgs {
    /// Spare the snapshot the server's delay and compression. For the moment of the fork alone, the server neither
    /// waits for more replicas (repl-diskless-sync-delay 0) nor compresses the snapshot (rdbcompression no). Both
    /// settings are put back as soon as the server has forked, and also by the next source if this one is killed. The
    /// user needs +config|set.
    #[arg(long, conflicts_with = "from_file")]
    pub tune_server: bool,

    /// Folder for the file in which the settings are noted before they are changed. Default: $XDG_STATE_HOME/remora, or
    /// ~/.local/state/remora. Only its owner has access; one that other users can write to is refused.
    #[arg(long, value_name = "DIR")]
    pub state_dir: Option<PathBuf>,
}

/// Limits that protect the primary and the replicas from one replica.
#[derive(Clone, Debug, Args)]
pub struct LimitArgs {
    /// The source takes 5 snapshots in a row without a pause. Before each further one it leaves the primary without a
    /// fork for this long, or for as long as the last snapshot took (at most 4 minutes), so that replicas that fail in
    /// a loop do not make the primary fork without end. 0: no pause.
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = parse_duration, help_heading = "Snapshot")]
    pub fork_interval: Duration,

    /// A new replica's subscribers get no message that was published before it joined: if there was one since the
    /// snapshot, the source takes another snapshot for it. With this option they may get those of this long again, and
    /// the present snapshot serves.
    #[arg(long, value_name = "TIME", default_value = "0s", value_parser = parse_duration, help_heading = "Snapshot")]
    pub repeat_messages: Duration,

    /// A replica that reads nothing for this long, while others or the primary wait for it, is disconnected, and so is
    /// one that reads less than 512 KiB/s for much longer; only that replica starts over. Keep it well below the
    /// primary's repl-timeout (60 s by default), after which the primary aborts the snapshot for all.
    #[arg(long, value_name = "TIME", default_value = "15s", value_parser = parse_duration, help_heading = "Snapshot")]
    pub stall_timeout: Duration,
}

/// The token files of a source, and what else protects its connections.
#[derive(Clone, Debug, Args)]
pub struct TokenArgs {
    /// File with the secret that source and replicas share. At least 16 bytes, for its owner and group only. It never
    /// crosses the network. Make one by: remora token new FILE. May be repeated: a replica needs one of the tokens. To
    /// change the token without a gap, give two files, write the new token to one of them, and send SIGHUP: the source
    /// reads its token files again. With `--security mtls` a token is not needed.
    #[arg(long = "token-file", value_name = "FILE", required_unless_present = "cert", help_heading = "Serving")]
    pub token_files: Vec<PathBuf>,

    /// File with a secret for monitoring: `remora status` with this token gets the status, and every other request is
    /// refused. May be repeated.
    #[arg(long = "monitor-token-file", value_name = "FILE", help_heading = "Serving")]
    pub monitor_token_files: Vec<PathBuf>,

    /// File with a secret for measurements: `remora probe` and `remora status` work with this token, and every other
    /// request is refused. May be repeated.
    #[arg(long = "probe-token-file", value_name = "FILE", help_heading = "Serving")]
    pub probe_token_files: Vec<PathBuf>,

    #[command(flatten)]
    #[allow(missing_docs)]
    pub security: SecurityArgs,

    #[command(flatten)]
    #[allow(missing_docs)]
    pub replicas: ReplicaNameArgs,

    #[command(flatten)]
    #[allow(missing_docs)]
    pub monitors: MonitorNameArgs,

    /// File with the private key of this source (Ed25519, PEM), by which replicas know it: --source-key. Make one by:
    /// remora token identity FILE. Without it, each holder of the token can pose as the source.
    #[arg(long, value_name = "FILE", help_heading = "Security")]
    pub identity: Option<PathBuf>,
}

impl TokenArgs {
    /// Reads the token files.
    ///
    /// # Errors
    /// As [`TokenFiles::read`].
    pub(crate) fn read(&self, security: Security) -> Result<TokenFiles, Failure> {
        let others = [(Role::Probe, &self.probe_token_files[..]), (Role::Monitor, &self.monitor_token_files)];
        TokenFiles::read(&self.token_files, &others, security)
    }

    /// What protects the source's connections.
    ///
    /// # Errors
    /// Options contradict each other, or a file cannot be used.
    pub(crate) fn open_security(&self) -> Result<Security, Failure> {
        let (replicas, monitors) = (self.replicas.replica_names.clone(), self.monitors.monitor_names.clone());
        let probers = self.monitors.probe_names.clone();
        let security = self.security.open(CertificateRoles { replicas, probers, monitors })?;
        let Some(file) = &self.identity else { return Ok(security) };
        match self.security.security {
            Some(Mode::None) => Err(Failure::new(Code::Usage, "--identity needs TLS: omit --security none")),
            Some(Mode::Mtls) => {
                Err(Failure::new(Code::Usage, "--identity goes with the token; --security mtls has certificates"))
            }
            _ => {
                let identity = Identity::read(file)?;
                tracing::info!("replicas know this source by: --source-key {}", identity.public());
                Ok(security.with_identity(identity))
            }
        }
    }
}

/// The values of `--module-capture`.
const CAPTURES: Words<ModuleCapture, 5> = [
    ("auto", "Whichever costs the server less", ModuleCapture::Auto),
    (
        "walk",
        "The fork child writes the long strings into the source's memory, the server the rest",
        ModuleCapture::Walk,
    ),
    ("server", "The server writes the snapshot, without compressing", ModuleCapture::Server),
    (
        "sweep",
        "The server's own process writes the snapshot without a fork, if nothing stands in the way. Experimental",
        ModuleCapture::Sweep,
    ),
    ("off", "Nothing", ModuleCapture::Off),
];

/// The values of `--compress`.
const METHODS: Words<Compress, 4> = [
    ("auto", "Whichever is fastest", Compress::Auto),
    ("off", "Not at all", Compress::Off),
    ("lz4", "By LZ4", Compress::Lz4),
    ("zstd", "By Zstandard", Compress::Zstd),
];

fn parse_age(text: &str) -> Result<Duration, String> {
    match parse_duration(text).map_err(|error| error.to_string())? {
        age if age < LEAST_AGE => {
            Err(format!("at least {} s, or every snapshot is too old at once", LEAST_AGE.as_secs()))
        }
        age => Ok(age),
    }
}

/// The path of a library, which may be empty: a parser of paths takes no empty ones.
fn parse_library(text: &str) -> Result<PathBuf, std::convert::Infallible> {
    Ok(PathBuf::from(text))
}

impl SourceArgs {
    /// What the options say, without their clap attributes. `open_file` reads the file that has the snapshot.
    ///
    /// # Errors
    /// They contradict each other, or a file cannot be used.
    pub(crate) fn options(&self, open_file: OpenFile) -> Result<Options, Failure> {
        let tokens = self.tokens.read(self.tokens.open_security()?)?;
        Ok(Options {
            target: self.captured.target(&self.sentinel)?,
            wait_for_server: self.captured.wait_for_server,
            listen: self.listen,
            metrics: self.metrics.metrics,
            tokens,
            announce: self.announce.clone(),
            max_replicas: self.max_replicas,
            at_once: self.at_once,
            tables: TableOptions {
                memory: self.memory,
                journal: self.journal_memory,
                slot_size: self.slot_size,
                compress: self.compress,
            },
            eager: self.eager,
            file: self.from_file.clone().map(|path| SourceFile { path, open: open_file }),
            stored: self.bases.stored(),
            no_fork: self.no_fork,
            first: self.standby_of.clone(),
            fork_after: self.fork_after,
            max_age: self.max_age,
            tuning: TuningOptions { is_wanted: self.tune.tune_server, state_dir: self.tune.state_dir.clone() },
            fork_interval: self.limits.fork_interval,
            repeat_messages: self.limits.repeat_messages,
            stall_limit: self.limits.stall_timeout,
            module: ModuleOptions {
                capture: self.module_capture,
                walk_from: self.walk.module_walk_from,
                fast_keys: self.walk.fast_keys == FastKeys::Auto,
                load: self.load_module.clone(),
                socket_folder: self.module_socket_folder.clone(),
            },
            lanes: LaneOptions { congestion: self.tcp_congestion.clone(), upload_limit: self.upload_limit },
            shared_memory: !self.no_shm,
            rdma: self.rdma.options(),
        })
    }
}

fn parse_memory(text: &str) -> Result<Size, String> {
    let size: Size = text.parse().map_err(|error: crate::units::UnitError| error.to_string())?;
    if size < LEAST_MEMORY {
        return Err(format!("the memory must be at least {LEAST_MEMORY}"));
    }
    Ok(size)
}

fn parse_slot_size(text: &str) -> Result<Size, String> {
    let size: Size = text.parse().map_err(|error: crate::units::UnitError| error.to_string())?;
    let fits = SLOT_SIZES.contains(&size.get()) && size.get().is_power_of_two();
    if fits { Ok(size) } else { Err("the size must be a power of two from 64KiB to 64MiB".into()) }
}

const ABOUT: &str = "\
Takes one snapshot of a server and serves it, with the writes that follow, to any number of replica agents.

The source connects to the server as one more replica. Nothing is installed there, and the server forks once per snapshot, no \
matter how many replicas read it. The server can itself be a replica of the primary (same history, same offsets); the source then \
does not contact the primary at all. The source runs until SIGINT or SIGTERM stops it, which is a normal end (exit code 0).";

fn more() -> String {
    format!(
        "\
Examples:
  Serve this host only (shared memory):
    remora source --server redis://127.0.0.1:6379 --token-file token
  Serve others on port 7379 of one interface, as a user, with 8 GiB, and the snapshot
  ready before the first replica joins:
    remora source --server redis://127.0.0.1:6379 --user remora --password-file pw \\
      --listen 10.0.0.5:7379 --token-file token --memory 8GiB --eager
  Serve others with certificates instead of a token:
    remora source --server redis://127.0.0.1:6379 --listen 10.0.0.5:7379 \\
      --security mtls --cert source.pem --key source.key --ca ca.pem
  With the snapshot from a file, and the stream behind it from the primary:
    remora source --server redis://10.0.0.5:6379 --token-file token --from-file dump.rdb
  With the newest backup as the base, as long as the primary continues behind it:
    remora source --server redis://10.0.0.5:6379 --token-file token --base s3://backups/orders
  As the standby of the source on another host, without a fork:
    remora source --server redis://10.0.0.5:6379 --listen 10.0.0.6:7379 --token-file token \\
      --standby-of 10.0.0.5:7379 --no-fork
  Beside a replica of the group that three Sentinels watch, wherever it is:
    remora source --sentinel 10.0.0.1:26379,10.0.0.2:26379,10.0.0.3:26379 \\
      --sentinel-name mymaster --listen 10.0.0.5:7379 --token-file token
  From a server with TLS, which the replicas reach as db1:6390:
    remora source --server rediss://db1:6390 --tls-ca ca.pem --announce db1:6390 \\
      --token-file token

{}
{}",
        Task::Source.help() + &Task::Sentinel.help_beside(),
        exit::help_table(&[Code::Usage, Code::Refused, Code::Server, Code::Local])
    )
}

// What both ends do with short strings, and from which length on a fork child writes strings.

/// What a fork child with the module writes.
#[derive(Args, Clone, Debug)]
pub struct WalkArgs {
    /// Size from which strings are long, for `walk`. For shorter ones the module costs the server more than its own
    /// saver does. Default: with fast keys all keys, else 1KiB if the server's allocator is jemalloc, else 64KiB.
    #[arg(long, value_name = "SIZE", help_heading = "Snapshot")]
    pub module_walk_from: Option<Size>,

    /// Whether the server's fork child writes small values too, in the fast way (docs/explanation/module.md). `auto`:
    /// if the server is a build that the module knows exactly, and a trial in a forked child succeeds. `off`: never.
    #[arg(long, value_name = "HOW", default_value = "auto", help_heading = "Snapshot")]
    pub fast_keys: FastKeys,
}

/// Whether small values are handled in the fast way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum FastKeys {
    /// Where the module offers it.
    Auto,
    /// Never.
    Off,
}

// The arguments that say where data are stored: how a bucket is reached, and what a source makes a snapshot of.

/// What a source makes a snapshot of before its server is asked for one.
#[derive(Args, Clone, Debug)]
pub struct BaseArgs {
    /// Make a snapshot of what is stored there before the server is asked for one: an RDB file, a folder of `remora
    /// backup` or of a server (its dump.rdb), or s3://BUCKET/PREFIX of `remora backup`. It serves at any age, if the
    /// server's backlog reaches back to it. Of several the newest one that serves is taken; if none does, a sweep or a
    /// fork follows. Can be given several times.
    #[arg(long, value_name = "PATH|URL", value_parser = OsStringValueParser::new().try_map(Location::parse), conflicts_with = "from_file", help_heading = "Snapshot")]
    pub base: Vec<Location>,

    /// File with the age identity of encrypted backups at --base, that only its owner can read.
    #[arg(long, value_name = "FILE", requires = "base", help_heading = "Snapshot")]
    pub base_identity: Option<PathBuf>,

    /// Folder in whose file system a backup that comes from a bucket is kept, in plain, until it has been read.
    #[arg(long, value_name = "DIR", default_value = SPOOL, requires = "base", help_heading = "Snapshot")]
    pub base_spool: PathBuf,

    /// For a bucket at --base, as --s3-endpoint of `remora backup`.
    #[arg(long, value_name = "URL", requires = "base", help_heading = "Snapshot")]
    pub base_s3_endpoint: Option<String>,

    /// For a bucket at --base, as --s3-region of `remora backup`.
    #[arg(long, value_name = "NAME", requires = "base", help_heading = "Snapshot")]
    pub base_s3_region: Option<String>,

    /// For a bucket at --base, as --s3-credentials-file of `remora backup`.
    #[arg(long, value_name = "FILE", requires = "base", help_heading = "Snapshot")]
    pub base_s3_credentials_file: Option<PathBuf>,

    /// For a bucket at --base, as --s3-allow-http of `remora backup`.
    #[arg(long, requires = "base", help_heading = "Snapshot")]
    pub base_s3_allow_http: bool,
}

impl BaseArgs {
    /// The places, without their clap attributes; `None` if none is named.
    pub(crate) fn stored(&self) -> Option<Arc<dyn Stored>> {
        let places = Places {
            at: self.base.clone(),
            store: StoreOptions {
                endpoint: self.base_s3_endpoint.clone(),
                region: self.base_s3_region.clone(),
                credentials_file: self.base_s3_credentials_file.clone(),
                allow_http: self.base_s3_allow_http,
            },
            identity: self.base_identity.clone(),
            spool: self.base_spool.clone(),
        };
        (!places.at.is_empty()).then(|| Arc::new(places) as Arc<dyn Stored>)
    }
}

/// How an S3-compatible store is reached. Every option stands above the AWS environment variable of the same meaning.
#[derive(Clone, Debug, Default, Args)]
#[command(next_help_heading = "S3")]
pub struct StoreArgs {
    /// Address of the store: `https://HOST:PORT`. Default: AWS_ENDPOINT_URL, or Amazon's of the region.
    #[arg(long, value_name = "URL")]
    pub s3_endpoint: Option<String>,

    /// Region of the bucket. Default: AWS_REGION, or `us-east-1`, which most other stores ignore.
    #[arg(long, value_name = "NAME")]
    pub s3_region: Option<String>,

    /// File with the keys, in the format of ~/.aws/credentials (the profile AWS_PROFILE, or `default`), that only its
    /// owner can read. Default: the AWS environment variables, then AWS_SHARED_CREDENTIALS_FILE and
    /// ~/.aws/credentials, then the role of the machine.
    #[arg(long, value_name = "FILE")]
    pub s3_credentials_file: Option<PathBuf>,

    /// Send requests to an --s3-endpoint on another host by http:// too. Everyone on the way can read what is not
    /// encrypted.
    #[arg(long)]
    pub s3_allow_http: bool,
}

impl StoreArgs {
    /// The options without their clap attributes.
    pub(crate) fn options(&self) -> StoreOptions {
        StoreOptions {
            endpoint: self.s3_endpoint.clone(),
            region: self.s3_region.clone(),
            credentials_file: self.s3_credentials_file.clone(),
            allow_http: self.s3_allow_http,
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::os::unix::fs::PermissionsExt;

    use clap::Parser;

    use super::*;
    use crate::args::{Cli, Command};

    #[test]
    fn too_little_memory_is_refused_with_the_least() {
        assert!(parse_memory("1MiB").unwrap_err().contains("16 MiB"));
        assert_eq!(parse_memory("4GiB").unwrap(), Size::mebibytes(4096));
    }

    #[test]
    fn without_options_a_source_is_asked_for_the_defaults_of_its_crate() {
        let folder = tempfile::tempdir().unwrap();
        let token = folder.path().join("token");
        std::fs::write(&token, "sixteen bytes or more").unwrap();
        std::fs::set_permissions(&token, std::fs::Permissions::from_mode(0o600)).unwrap();
        let line = ["remora", "source", "--server", "redis://127.0.0.1:1", "--token-file", token.to_str().unwrap()];
        let Command::Source(args) = Cli::try_parse_from(line).unwrap().command else { panic!("another command") };
        let typed = args.options(|_| Err(Failure::refused("no file"))).unwrap();
        let own = Options::new(args.captured.target(&args.sentinel).unwrap(), typed.tokens.clone());
        let times = |options: &Options| {
            let waits = (options.wait_for_server, options.max_age, options.stall_limit);
            (waits, options.fork_interval, options.repeat_messages)
        };
        let parts = |options: &Options| {
            let (tables, lanes, module) = (&options.tables, &options.lanes, &options.module);
            format!("{tables:?} {lanes:?} {module:?} {:?} {:?}", options.tuning, options.rdma)
        };
        let others = |options: &Options| {
            let given = (options.listen, options.metrics, options.announce.clone(), options.file.is_some());
            (given, options.max_replicas, options.at_once, options.eager, options.shared_memory)
        };
        assert_eq!((times(&typed), parts(&typed), others(&typed)), (times(&own), parts(&own), others(&own)));
    }

    #[test]
    fn slots_are_powers_of_two_within_reason() {
        assert!(parse_slot_size("4MiB").is_ok());
        for wrong in ["3MiB", "32KiB", "128MiB", "0"] {
            assert!(parse_slot_size(wrong).is_err(), "{wrong}");
        }
    }
}
