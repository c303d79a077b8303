//! The arguments of the commands that look and change nothing: `remora status`, `ready`, `plan`, `probe` and `devices`,
//! and how they name their source; and of the commands around the job: `load`, `token`, `config`, `module` and
//! `generate`.

use std::path::PathBuf;
use std::time::Duration;

use clap::builder::ArgPredicate;
use clap::{Args, Subcommand, ValueEnum};
use clap_complete::Shell;

use super::connections::ServerArgs;
use super::{HostPort, OnCommandLine, RdmaReadArgs, SecurityArgs, SourceKeyArgs, Words, one_of};
use crate::conversation::tokens::Credentials;
use crate::exit::{self, Code, Failure};
use crate::reader::ReadOptions;
use crate::reader::addresses::Addresses;
use crate::server::Task;
use crate::transports::TransportChoice;
use crate::units::{Size, UnitError, parse_bit_rate, parse_duration};

/// The arguments of `remora status`.
#[derive(Clone, Debug, Args)]
#[command(long_about = STATUS_ABOUT, after_long_help = status_help())]
pub struct StatusArgs {
    #[command(flatten)]
    #[allow(missing_docs)]
    pub ask: AskArgs,

    /// Print one JSON object instead of the table.
    #[arg(long)]
    pub json: bool,

    /// Show it anew every TIME (default: one second), until stopped: on a terminal as a screen, which `q` ends, and
    /// otherwise as text.
    #[arg(long, value_name = "TIME", num_args = 0..=1, default_missing_value = "1s", value_parser = parse_duration)]
    pub watch: Option<Duration>,
}

const STATUS_ABOUT: &str = "\
Shows what a source holds and which replicas read it: the snapshot's generation, offset, bytes, memory and age, and for every joined \
replica its phase, percent, rate and lag.";

fn status_help() -> String {
    format!(
        "\
Examples:
  Once, as a table:
    remora status --source 10.0.0.5:7379 --token-file token
  Every five seconds:
    remora status --source 10.0.0.5:7379 --token-file token --watch 5s
  For a script:
    remora status --source 10.0.0.5:7379 --token-file token --json

{}",
        exit::help_table(&[Code::Usage, Code::Refused, Code::Source, Code::Interrupted])
    )
}

// The options of a command that asks one source.

/// Which source a command asks, and how it proves itself.
#[derive(Clone, Debug, Args)]
pub struct AskArgs {
    /// Host and port of the source agent.
    #[arg(long, value_name = "HOST:PORT")]
    pub source: HostPort,

    /// File with the secret that this command shares with the source. Needed unless the source has `--security mtls`
    /// and no token.
    #[arg(long, value_name = "FILE", required_unless_present = "cert")]
    pub token_file: Option<PathBuf>,

    #[command(flatten)]
    #[allow(missing_docs)]
    pub security: SecurityArgs,

    #[command(flatten)]
    #[allow(missing_docs)]
    pub expected: SourceKeyArgs,
}

impl AskArgs {
    /// What proves this command to the source.
    ///
    /// # Errors
    /// As [`SecurityArgs::credentials`].
    pub(crate) fn credentials(&self) -> Result<Credentials, Failure> {
        self.security.credentials(self.token_file.as_ref(), &self.expected)
    }
}

// Which source a command reads, and how.

/// Which source a command reads, and how.
#[derive(Clone, Debug, Args)]
pub struct ReadArgs {
    /// Host and port of the source agent. Further sources of the same data set, separated by commas, are tried in this
    /// order when it is lost or refuses.
    #[arg(long, value_name = "HOST:PORT,…", help_heading = "Source")]
    pub source: Addresses,

    /// How to read the source's memory. `shm` if both agents share a host, `verbs` (RDMA) or `tcp` between hosts;
    /// `auto` uses the first of these over which a read works, and reports which one and why.
    #[arg(long, value_name = "HOW", default_value = "auto", value_parser = one_of(TRANSPORTS), help_heading = "Source")]
    pub transport: TransportChoice,

    /// TCP connections for reading. More than one helps if a single connection does not fill the link. Several take a
    /// larger share of the link from other traffic: clients of the primary on other hosts wait longer.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=4), help_heading = "Source")]
    pub lanes: u8,

    #[command(flatten)]
    #[allow(missing_docs)]
    pub rdma: RdmaReadArgs,

    /// How long to try again while source or server is away. With growing pauses; `0` tries once.
    #[arg(long, value_name = "TIME", default_value = "5m", value_parser = parse_duration, help_heading = "Source")]
    pub retry_for: Duration,
}

impl OnCommandLine for ReadOptions {
    type Args = ReadArgs;

    fn of(args: ReadArgs) -> ReadOptions {
        let ReadArgs { source, transport, lanes, rdma, retry_for } = args;
        ReadOptions { source, transport, lanes, rdma: rdma.options(), retry_for }
    }
}

/// The transports to read over.
pub(crate) const TRANSPORTS: Words<TransportChoice, 5> = [
    ("auto", "The first that works, the fastest first", TransportChoice::Auto),
    ("shm", "Shared memory of this host", TransportChoice::Shm),
    ("verbs", "RDMA", TransportChoice::Verbs),
    ("rdma", "", TransportChoice::Verbs),
    ("tcp", "TCP", TransportChoice::Tcp),
];

/// The arguments of `remora ready`.
#[derive(Clone, Debug, Args)]
#[command(long_about = READY_ABOUT, after_long_help = ready_help())]
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

const READY_ABOUT: &str = "\
Says whether a server is ready for work, by the exit code.

A primary is ready when it has loaded its data set. A replica is ready when it loads and copies nothing, its link is up, and its primary, \
which is asked with the same user and password, has the same history. A server that follows the link of an agent is not ready: its \
hand-off is still to come.";

fn ready_help() -> String {
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

/// The arguments of `remora plan`.
#[derive(Clone, Debug, Args)]
#[command(long_about = PLAN_ABOUT, after_long_help = plan_help())]
#[command(override_usage = "remora plan [OPTIONS] <--server <URL>|--data <SIZE>>")]
#[command(mut_arg("server", |server| {
    server.required(false).required_unless_present("data").default_value_if("data", ArgPredicate::IsPresent, NO_SERVER)
}))]
pub struct PlanArgs {
    #[command(flatten)]
    #[allow(missing_docs)]
    pub server: ServerArgs,

    /// Plan for this much data (`used_memory` of INFO) instead of a primary's: no server is asked, and nothing is known
    /// of its host. What clients write is --write-rate, or nothing.
    #[arg(long, help_heading = "Plan", value_name = "SIZE", conflicts_with_all = ["server", "measure"])]
    pub data: Option<Size>,

    /// How many replicas are to be made at once.
    #[arg(long, help_heading = "Plan", value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub replicas: u32,

    /// How fast the network is between the source's host and the replicas': `10Gbit/s`, `1Gbit/s`, `200Mbit/s`, or
    /// bytes per second as `100MiB`. Default: faster than the servers.
    #[arg(long, help_heading = "Plan", alias = "link", value_name = "RATE", value_parser = parse_bit_rate)]
    pub rate: Option<Size>,

    /// The `--memory` that the source will get. Default: the source's own default. The memory that holds the whole
    /// snapshot is printed in any case.
    #[arg(long, help_heading = "Plan", value_name = "SIZE", default_value = "1GiB")]
    pub memory: Size,

    /// The `--journal-memory` that the source will get. Default: a quarter of the memory.
    #[arg(long, help_heading = "Plan", value_name = "SIZE")]
    pub journal_memory: Option<Size>,

    /// The `--security` of the agents: `none` if all of them are on one host or the network needs no encryption, and
    /// otherwise `token` or `mtls`, where the source holds everything twice, in plain and sealed.
    #[arg(long, help_heading = "Plan", value_name = "HOW", default_value = "token")]
    pub security: PlannedSecurity,

    /// Bytes per second that clients write to the primary. Default: measured.
    #[arg(long, help_heading = "Plan", value_name = "SIZE")]
    pub write_rate: Option<Size>,

    /// How long to measure what clients write.
    #[arg(long, help_heading = "Plan", value_name = "TIME", default_value = "3s", value_parser = parse_duration, conflicts_with = "write_rate")]
    pub measure: Duration,

    /// Print the plan as JSON.
    #[arg(long, help_heading = "Plan")]
    pub json: bool,
}

/// The address of the primary of a plan without one. It is never connected to.
const NO_SERVER: &str = "redis://none";

/// What protects the connections between agents.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum PlannedSecurity {
    /// Nothing.
    None,
    /// A token.
    Token,
    /// Certificates.
    Mtls,
}

const PLAN_ABOUT: &str = "\
Says what replicas of a primary need and cost: memory, backlog, and time.

It asks the primary for its facts and changes nothing; with --data it asks no server. The figures come from the functions by which the agents divide their memory and \
decide; they are estimates of what is not known before, such as the size of the snapshot. remora replica --dry-run says the same of one \
replica and a source that is there, and tries the way to it.";

fn plan_help() -> String {
    format!(
        "\
Examples:
  Three replicas over 10 Gbit/s:
    remora plan --server redis://10.0.0.5:6379 --replicas 3 --rate 10Gbit/s
  What 60 GiB of data need, without a server to ask:
    remora plan --data 60GiB --replicas 3
  What a source with 64 GiB can do, for clients that write 20 MiB each second:
    remora plan --server redis://10.0.0.5:6379 --memory 64GiB --write-rate 20MiB

{}
{}",
        exit::help_table(&[Code::Usage, Code::Refused, Code::Server, Code::Interrupted]),
        Task::Plan.help()
    )
}

/// The arguments of `remora probe`.
#[derive(Clone, Debug, Args)]
#[command(long_about = PROBE_ABOUT, after_long_help = probe_help())]
pub struct ProbeArgs {
    #[command(flatten)]
    #[allow(missing_docs)]
    pub ask: AskArgs,

    /// Print one JSON object instead of the tables.
    #[arg(long)]
    pub json: bool,

    /// Measure this transport only; `auto` measures each of them.
    #[arg(long, value_name = "HOW", default_value = "auto", value_parser = one_of(TRANSPORTS), help_heading = "What to measure")]
    pub transport: TransportChoice,

    /// Bytes of one read, 1 to 4MiB; several values are separated by commas.
    #[arg(long, value_name = "SIZES", value_delimiter = ',', value_parser = parse_read, default_value = "8,64,512,4KiB,64KiB,256KiB,1MiB,4MiB", help_heading = "What to measure")]
    pub sizes: Vec<Size>,

    /// Reads in flight at once, 1 to 16; several values are separated by commas. A replica has up to 16.
    #[arg(long, value_name = "DEPTHS", value_delimiter = ',', value_parser = clap::value_parser!(u8).range(1..=16), default_value = "1,4,16", help_heading = "What to measure")]
    pub depths: Vec<u8>,

    /// How long to read each size at each depth, 1ms to 10s.
    #[arg(long, value_name = "TIME", default_value = "100ms", value_parser = parse_time, help_heading = "What to measure")]
    pub time: Duration,

    /// Time limit of all measurements, without connecting. Figures that are missing then are left out. Up to 1h.
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = parse_limit, help_heading = "What to measure")]
    pub limit: Duration,

    /// TCP connections for reading.
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u8).range(1..=4), help_heading = "TCP")]
    pub lanes: u8,

    #[command(flatten)]
    #[allow(missing_docs)]
    pub rdma: RdmaReadArgs,
}

fn parse_read(text: &str) -> Result<Size, String> {
    let size: Size = text.parse().map_err(|error: UnitError| error.to_string())?;
    if (1..=LARGEST_READ).contains(&size.get()) { Ok(size) } else { Err("a read has 1 byte to 4MiB".into()) }
}

fn parse_time(text: &str) -> Result<Duration, String> {
    within(text, Duration::from_millis(1), Duration::from_secs(10), "the time must be 1ms to 10s")
}

fn parse_limit(text: &str) -> Result<Duration, String> {
    within(text, Duration::from_millis(100), Duration::from_secs(3600), "the time must be 100ms to 1h")
}

fn within(text: &str, least: Duration, most: Duration, sentence: &str) -> Result<Duration, String> {
    let time = parse_duration(text).map_err(|error| error.to_string())?;
    if (least..=most).contains(&time) { Ok(time) } else { Err(sentence.into()) }
}

/// The most bytes that a replica reads by one request.
const LARGEST_READ: u64 = 4 << 20;

const PROBE_ABOUT: &str = "\
Measures the latency and the bandwidth of reads of a source's memory, over shared memory, RDMA and TCP, for reads of 8 bytes to 4 MiB \
and 1 to 16 reads at once. The source needs no data and takes no snapshot: it exports a scratch region of 64 MiB, and revokes it when \
the probe ends. For a transport that cannot be used, the probe prints the reason. The probe keeps the network busy while it runs.";

fn probe_help() -> String {
    format!(
        "\
Examples:
  All transports, as tables:
    remora probe --source 10.0.0.5:7379 --token-file token
  RDMA by one device, whole slots, for a script:
    remora probe --source 10.0.0.5:7379 --token-file token --transport verbs \\
      --rdma-device mlx5_0 --sizes 4MiB --depths 16 --time 1s --json

{}",
        exit::help_table(&[Code::Usage, Code::Refused, Code::Source, Code::Interrupted, Code::Local])
    )
}

/// The arguments of `remora devices`.
#[derive(Clone, Copy, Debug, Args)]
#[command(long_about = DEVICES_ABOUT, after_long_help = devices_help())]
pub struct DevicesArgs {
    /// Print one JSON object instead of the text.
    #[arg(long)]
    pub json: bool,
}

const DEVICES_ABOUT: &str = "\
Shows the transports over which this host can read the memory of other agents: its RDMA devices with their ports, addresses and \
limits, shared memory, and TCP with its congestion control. For each it prints a verdict: ready, or what is missing and how to get \
it. It opens no connection and changes nothing.";

fn devices_help() -> String {
    format!(
        "\
Examples:
  See whether RDMA would be used, and why not:
    remora devices
  For a script (exit code 0 whatever there is):
    remora devices --json

{}",
        exit::help_table(&[Code::Usage])
    )
}

// The arguments of the commands around the job: `remora load`, `token`, `config`, `module` and `generate`.

/// The arguments of `remora load`.
#[derive(Clone, Debug, Args)]
#[command(long_about = LOAD_ABOUT, after_long_help = load_help())]
pub struct LoadArgs {
    #[command(flatten)]
    #[allow(missing_docs)]
    pub server: ServerArgs,

    /// Keys to write.
    #[arg(long, value_name = "N", help_heading = "Data")]
    pub keys: u64,

    /// Bytes of content of each key: of the string, or of all members, elements, field values or entries together. At
    /// most 512MiB.
    #[arg(long, value_name = "SIZE", value_parser = parse_value_size, help_heading = "Data")]
    pub value_size: Size,

    /// What the keys hold; `mixed` takes the types in turn.
    #[arg(long = "type", value_name = "TYPE", default_value = "string", help_heading = "Data")]
    pub value_type: ValueType,

    /// The same seed gives the same data.
    #[arg(long, value_name = "N", default_value_t = 1, help_heading = "Data")]
    pub seed: u64,

    /// Keys are named PREFIX:0, PREFIX:1 and so on.
    #[arg(long, value_name = "PREFIX", default_value = "key", help_heading = "Data")]
    pub prefix: String,

    /// Database to write to. Default: the one in the address, else 0.
    #[arg(long, value_name = "N", help_heading = "Data")]
    pub db: Option<u32>,

    /// Let every key expire this long after it was written.
    #[arg(long, value_name = "TIME", value_parser = parse_expire, help_heading = "Data")]
    pub expire: Option<Duration>,

    /// Content that cannot be compressed (the default).
    #[arg(long, conflicts_with_all = ["compressible", "json"], help_heading = "Data")]
    pub random: bool,

    /// Content that compresses to about a quarter.
    #[arg(long, help_heading = "Data")]
    pub compressible: bool,

    /// Content that is made of records in JSON, as applications store them.
    #[arg(long, conflicts_with = "compressible", help_heading = "Data")]
    pub json: bool,

    /// How long to retry at the start while the server does not answer, loads, is busy or has too many clients, with
    /// growing pauses. `0` tries once.
    #[arg(long, value_name = "TIME", default_value = "5m", value_parser = parse_duration, help_heading = "Server")]
    pub retry_for: Duration,

    /// Commands in flight at once.
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..=100_000), help_heading = "Data")]
    pub pipeline: u32,
}

/// The type of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, ValueEnum)]
#[allow(missing_docs)]
pub enum ValueType {
    String,
    List,
    Set,
    Zset,
    Hash,
    Stream,
    Mixed,
}

/// The longest string: the servers' default `proto-max-bulk-len`.
const LARGEST_VALUE: Size = Size::mebibytes(512);

fn parse_value_size(text: &str) -> Result<Size, String> {
    let size: Size = text.parse().map_err(|error: UnitError| error.to_string())?;
    if size.get() == 0 || size > LARGEST_VALUE {
        return Err(format!("a value has 1 byte to {LARGEST_VALUE}"));
    }
    Ok(size)
}

fn parse_expire(text: &str) -> Result<Duration, String> {
    match parse_duration(text) {
        Ok(time) if time.is_zero() => Err("the time must not be 0".into()),
        Ok(time) => Ok(time),
        Err(error) => Err(error.to_string()),
    }
}

const LOAD_ABOUT: &str = "\
Fills a server with test data, pipelined: exactly N keys with exactly SIZE bytes each. The same seed gives the same data. Keys of \
the same names are replaced; no other key is changed.";

fn load_help() -> String {
    format!(
        "\
Examples:
  937 MiB in 256 large values:
    remora load --server redis://127.0.0.1:6379 --keys 256 --value-size 3748KiB
  A million small ones of all types that expire tomorrow, in database 3:
    remora load --server redis://127.0.0.1:6379 --keys 1000000 --value-size 100 \\
      --type mixed --db 3 --expire 1d

{}
{}",
        Task::Load.help(),
        exit::help_table(&[Code::Usage, Code::Refused, Code::Server, Code::Interrupted])
    )
}

/// The arguments of `remora token`.
#[derive(Clone, Debug, Args)]
#[command(long_about = TOKEN_ABOUT, after_long_help = token_help())]
pub struct TokenCommandArgs {
    #[command(subcommand)]
    #[allow(missing_docs)]
    pub action: TokenAction,
}

/// The subcommands of `remora token`.
#[derive(Clone, Debug, Subcommand)]
pub enum TokenAction {
    /// Write a new random token into a file that only its owner can read.
    New {
        /// The file, which must not exist yet; `-` for stdout.
        #[arg(value_name = "FILE")]
        file: PathBuf,
    },
    /// Write a new key of a source into a file that only its owner can read, and print the public half, which replicas
    /// are given by --source-key.
    Identity {
        /// The file, which must not exist yet.
        #[arg(value_name = "FILE")]
        file: PathBuf,
    },
}

const TOKEN_ABOUT: &str = "\
Makes the secret that a source and its replicas share.

The token has 256 random bits from the system, as 64 hexadecimal digits. Copy the file to the other hosts over a channel that you \
trust, such as ssh. The agents refuse a token file that other users can read or change, and a token that is short or repeats few bytes.";

fn token_help() -> String {
    format!(
        "\
Examples:
  remora token new token
  A key by which replicas know their source, though others hold the token too:
    remora token identity source.key
  As a secret of another system:
    remora token new - | kubectl create secret generic remora --from-file=token=/dev/stdin

{}",
        exit::help_table(&[Code::Usage, Code::Refused, Code::Local])
    )
}

/// The arguments of `remora config`.
#[derive(Clone, Debug, Args)]
#[command(long_about = CONFIG_ABOUT, after_long_help = config_help())]
pub struct ConfigArgs {
    #[command(subcommand)]
    #[allow(missing_docs)]
    pub action: ConfigAction,
}

/// What to do with a file.
#[derive(Clone, Debug, Subcommand)]
pub enum ConfigAction {
    /// Check the options of every command in a file. Nothing is opened or started.
    Check {
        /// The file.
        file: PathBuf,
    },
    /// Explain the options of a command that are for rare days, which --help leaves out. The file is their place; the
    /// command line takes them too.
    Rare {
        /// The command, such as `replica`.
        #[arg(value_name = "COMMAND")]
        of: String,
    },
}

const CONFIG_ABOUT: &str = "\
The configuration file of every command: --config FILE, or REMORA_CONFIG.

It is TOML. The options of a command stand in a table with its name, under their long names; those of every command stand \
above. An option may also be in the environment: --token-file is REMORA_TOKEN_FILE. The command line wins over the environment, and the \
environment over the file.";

fn config_help() -> String {
    format!(
        "\
A file:
  log-level = \"info\"

  [source]
  server = \"redis://127.0.0.1:6379\"
  listen = \"10.0.0.5:7379\"
  token-file = [\"/etc/remora/token\"]
  tune-server = true

  [volume.serve]
  memory = \"64GiB\"

Examples:
  remora config check /etc/remora/remora.toml
  remora config rare source
  remora source --config /etc/remora/remora.toml --max-replicas 8

{}",
        exit::help_table(&[Code::Usage])
    )
}

/// The arguments of `remora module`.
#[derive(Clone, Debug, Args)]
#[command(long_about = MODULE_ABOUT, after_long_help = module_help())]
pub struct ModuleArgs {
    #[command(subcommand)]
    #[allow(missing_docs)]
    pub question: ModuleQuestion,
}

/// The subcommands of `remora module`.
#[derive(Clone, Debug, Subcommand)]
pub enum ModuleQuestion {
    /// Print the path of the library, for `loadmodule` in a server's configuration, or `MODULE LOAD`.
    Path,
    /// Find out where a build of a server keeps its tables, and keep it for the module, which then loads small values
    /// fast in that build too.
    #[command(long_about = LAYOUT_ABOUT, after_long_help = layout_help())]
    Layout(LayoutArgs),
}

/// The arguments of `remora module layout`.
#[derive(Clone, Debug, Args)]
pub struct LayoutArgs {
    /// The server's program, or a script that becomes it by `exec`.
    #[arg(long, value_name = "PATH", required_unless_present = "pid", conflicts_with = "pid")]
    pub program: Option<PathBuf>,

    /// A running server, for its program. Its data are not looked at, and it does not notice.
    #[arg(long, value_name = "PID", value_parser = clap::value_parser!(u32).range(1..))]
    pub pid: Option<u32>,

    /// The file with the debug information of that program, as distributions offer it, where the program itself does
    /// not name its functions.
    #[arg(long, value_name = "FILE")]
    pub debug_file: Option<PathBuf>,

    /// The folder in which the result is kept. The module looks there, or in the folder that its argument `layouts`
    /// names.
    #[arg(long, value_name = "FOLDER", default_value = remora_layout::folder::DEFAULT)]
    pub layouts: PathBuf,
}

const LAYOUT_ABOUT: &str = "\
Find out where a build of a server keeps its tables, for the module's fast keys.

Remora knows some builds by heart. For another one of a version that it knows, this command starts the program twice by itself, at a \
socket in a folder of its own, fills it with a few thousand keys, and searches its memory for them. The result is kept by the program's \
build id. The module finds it there: a server that has loaded the module already needs no restart. It tries what was found in a forked \
child, and checks the first load, before it relies on it.

What the file says becomes code of the server. The module refuses a file that others than root and the server's user can change, by \
itself or by a folder above it.";

fn layout_help() -> String {
    format!(
        "\
Examples:
  The servers' program of this host:
    remora module layout --program /usr/local/bin/redis-server
  The program of a running server, whatever has become of the file:
    remora module layout --pid \"$(pidof valkey-server)\"
  A program without names, with the file of its package for debugging:
    remora module layout --program /usr/bin/valkey-server --debug-file /usr/lib/debug/.build-id/a5/0d68.debug

{}",
        exit::help_table(&[Code::Usage, Code::Refused, Code::Local, Code::Interrupted])
    )
}

const MODULE_ABOUT: &str = "\
Print the path of the module for servers, or prepare it for a build of a server.

A server with libremora_module.so writes its snapshot at a fraction of the cost, and loads one without a socket in between. Without \
the module everything works too, but slower. Remora looks for the library beside this program, and then in ../lib/remora.";

fn module_help() -> String {
    format!(
        "\
Examples:
  In the server's configuration:
    loadmodule /usr/lib/remora/libremora_module.so
  Into a running server that allows it (enable-module-command):
    redis-cli MODULE LOAD \"$(remora module path)\"
  For fast keys in a build that Remora does not know by heart:
    remora module layout --program /usr/local/bin/redis-server

{}",
        exit::help_table(&[Code::Usage, Code::Local])
    )
}

/// The arguments of `remora generate`.
#[derive(Clone, Debug, Args)]
#[command(long_about = "Writes shell completions or man pages, made from the same definitions as the help pages.", after_long_help = generate_help())]
pub struct GenerateArgs {
    #[command(subcommand)]
    #[allow(missing_docs)]
    pub what: Generated,
}

/// What to generate.
#[derive(Clone, Debug, Subcommand)]
pub enum Generated {
    /// Print the completions of a shell to stdout.
    Completions {
        /// The shell.
        shell: Shell,
    },
    /// Write one man page per command into a folder, which is created if it does not exist.
    Man {
        /// The folder.
        directory: PathBuf,
    },
}

fn generate_help() -> String {
    format!(
        "\
Examples:
  remora generate completions bash > /etc/bash_completion.d/remora
  remora generate completions zsh > ~/.zfunc/_remora
  remora generate man /usr/local/share/man/man1

{}",
        exit::help_table(&[Code::Usage, Code::Local])
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_and_times_are_kept_within_what_can_be_measured() {
        assert!(parse_read("1").is_ok() && parse_read("4MiB").is_ok());
        assert!(parse_read("0").is_err() && parse_read("5MiB").is_err());
        assert!(parse_time("100ms").is_ok() && parse_time("11s").is_err() && parse_time("0").is_err());
        assert!(parse_limit("1h").is_ok() && parse_limit("2h").is_err());
    }
}
